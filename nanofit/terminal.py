"""What a person sees: errors in one line, and progress fit for a terminal or a log file."""

import argparse
import atexit
import errno
import os
import re
import shutil
import signal
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn, TextIO

from rich.cells import cell_len
from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

MAIN_SPEAKS_FIRST_S = 3.0
_SECRETS = [  # each after what may be told of it
    re.compile(r"(://[^/\s:@]*:)[^/\s@]+(?=@)"),  # https://name:password@host
    re.compile(r"(://)[^/\s:@]{20,}(?=@)"),  # https://token@host
    re.compile(
        r"((?:\b|[_-])(?:token|password|secret|signature|sig|credential|api_?key|access_?key)=)"
        r"[^&\s'\"]+",
        re.IGNORECASE,
    ),
    re.compile(r"\b(hf_|gh[opsu]_|sk-|AKIA|wandb_v1_)[A-Za-z0-9_-]{16,}"),
]
LEAVING_S = 20.0
MOST_BAR = 24  # columns
_NO_BREAK = "\N{NO-BREAK SPACE}"


class InputError(Exception):
    """Something given from outside cannot be used; the message says what, why and the way out."""

    is_known_elsewhere = False  # another process has the better message
    is_told = False  # it was said when it was raised


def run_script(main: Callable[[Sequence[str]], int | None]) -> NoReturn:
    """Run a script's `main`; bad input is one clear line and exit code 2, never a traceback."""
    _open_closed_streams()
    code = _outcome(main)
    if "torch" in sys.modules:
        _leave_at_once(code)
    sys.exit(code)


def _outcome(main: Callable[[Sequence[str]], int | None]) -> int:
    try:
        return main(sys.argv[1:]) or 0
    except InputError as error:
        _wait_for_better_words(error)
        if not error.is_told:
            say_error(error)
        return 2
    except PermissionError as error:  # of a folder that one may not even look into
        if error.filename is None:
            raise
        say_error(InputError(f"{error.filename}: no permission; give another place, or chmod it"))
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # whoever read our output has left, as `head` does
        discard_output()
        return 1


def _leave_at_once(code: int) -> NoReturn:
    """End the process without taking the interpreter apart.

    A thread of torch's, gloo's or autograd's, that lets go of its last tensor meanwhile aborts the
    process, once in a dozen times, and torchrun then calls all of the run a failure. What libraries
    still have to do gets its time, but not for ever: a tracker may wait for a dead network. Where
    memory is so short that no thread can start, they get none. Nor is a request to save that comes
    now a reason to die.
    """
    if hasattr(signal, "SIGUSR1"):
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    leaving = threading.Thread(target=atexit._run_exitfuncs, daemon=True)
    with suppress(KeyboardInterrupt, RuntimeError, MemoryError):  # whoever insists does not wait
        leaving.start()
        leaving.join(LEAVING_S)
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # nobody may be reading any more
            stream.flush()
    os._exit(code)


def say_error(error: InputError) -> None:
    """Say it, and which process says so if that is not the main one."""
    rank = os.environ.get("RANK", "0")
    told = printable(redacted(str(error)))  # it may quote a file that anybody has written
    lines = f"{'' if rank == '0' else f'[rank {rank}] '}error: {told}".splitlines()
    with suppress(OSError):  # nobody may be reading any more
        print("\n".join(folded(line, sys.stderr) for line in lines), file=sys.stderr)


def _wait_for_better_words(error: InputError) -> None:
    """Have an error said once for all processes, unless it is this one's alone.

    torchrun ends all processes when the first one ends. What is wrong for all is said by the main
    one while the others wait here; who outlives the wait has something else to say.
    """
    is_main = os.environ.get("RANK", "0") == "0"
    time.sleep(MAIN_SPEAKS_FIRST_S * ((not is_main) + 2 * error.is_known_elsewhere))


def _open_closed_streams() -> None:
    """Let no file of ours be taken for a standard stream that was closed, as `>&-` does."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode))  # noqa: SIM115


class FlagParser(argparse.ArgumentParser):
    """For scripts with a few flags of their own, beside the settings of a run."""

    def __init__(self, *, usage: str, description: str):
        super().__init__(
            usage=usage,
            description=description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message}; --help shows how")


def _truth(text: str) -> bool:
    if text not in ("True", "False"):
        raise argparse.ArgumentTypeError(f"{text!r} is not True or False")
    return text == "True"


SWITCH = dict(nargs="?", const=True, default=False, type=_truth, metavar="True")  # of a flag


class Progress:
    """How far a long job is and how long it will still take.

    On a terminal this is one live line; in a file or a pipe a plain line every `every_s` seconds.
    It goes to standard output unless that is for a result.
    """

    def __init__(
        self,
        label: str,
        total: int,
        *,
        done: int = 0,
        every_s: float = 10.0,
        quiet: bool = False,
        stream: TextIO | None = None,
    ):
        self.label, self.total, self.done, self.every_s = label, total, done, every_s
        self.note = ""
        self._first, self._started = done, time.monotonic()
        self._next_line = self._started + every_s
        self._quiet = quiet
        stream = stream or sys.stdout
        self._console = _Console(
            file=stream,
            quiet=quiet,
            highlight=False,
            soft_wrap=True,
            force_terminal=stream.isatty(),
        )
        self._live = None

    def __enter__(self) -> "Progress":
        if self._console.is_terminal and not self._quiet:
            self._live = Live(
                get_renderable=self._live_line,
                console=self._console,
                refresh_per_second=5,
                transient=True,
            )
            self._live.start()
        return self

    def __exit__(self, *_) -> None:
        if self._live:
            self._live.stop()

    @property
    def is_live(self) -> bool:
        """Whether somebody may be looking."""
        return self._live is not None

    def update(self, done: int, note: str = "") -> None:
        """Tell how much is done; `note` is what else is worth seeing now."""
        if done < self._first:  # the job has gone back
            self._first, self._started = done, time.monotonic()
        self.done, self.note = done, note or self.note
        if self._live is None and time.monotonic() >= self._next_line and done < self.total:
            self._next_line = time.monotonic() + self.every_s
            words = [f"{self.label} {done / self.total:.0%}", self.note, f"eta {self.eta()}"]
            self.line("  ".join(filter(None, words)))

    def line(self, text: str, *, style: str = "", bold: Sequence[str] = ()) -> None:
        """Print a line that stays, above the live one; style and bold words are for a terminal."""
        shown = Text(folded(text, self._console.file), style=style)
        for word in bold:
            shown.highlight_regex(rf"(?<![\w.])(?<!step ){re.escape(word)}(?!\w)", "bold")
        try:
            self._console.print(shown)
        except OSError as error:  # the job goes on
            self._console.quiet = not is_disk_full(error)
            self._console.leave_to_stream()

    def restart_clock(self) -> None:
        """Leave what was done so far out of the speed: it was another one."""
        self._first, self._started = self.done, time.monotonic()

    def eta(self) -> str:
        """Time left at the speed so far."""
        advanced = self.done - self._first
        if not advanced:
            return "-"
        elapsed_s = time.monotonic() - self._started
        return duration(elapsed_s / advanced * (self.total - self.done))

    def _live_line(self) -> Table:
        share = f"{self.done / max(self.total, 1):4.0%}"
        words = [self.label, share, self.note, f"eta {self.eta()}"]
        room = self._console.width - sum(len(word) + 1 for word in words) - 1
        bar = ProgressBar(
            total=max(self.total, 1), completed=self.done, width=min(max(room, 4), MOST_BAR)
        )
        grid = Table.grid(padding=(0, 1))
        for _ in range(5):
            grid.add_column(no_wrap=True)  # a second line would flicker
        grid.add_row(self.label, bar, *words[1:])
        return grid


class _Console(Console):
    """A console whose reader may leave, as `head` does, without ending the job."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        discard_output()

    def leave_to_stream(self) -> None:
        """What a full disk did not take lies in the stream's buffer, and need not lie here too."""
        self._buffer.clear()


def is_disk_full(error: OSError) -> bool:
    """Whether what was to be told will be, with what comes next, once there is room."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def discard_output() -> None:
    """Go on without a reader."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def folded(text: str, stream: TextIO | None = None) -> str:
    """A line as a terminal shows it best: it goes on under its last column. Elsewhere as it is."""
    columns = shutil.get_terminal_size().columns
    if not (stream or sys.stdout).isatty() or len(text) <= columns:
        return text
    column_starts = [gap.end() for gap in re.finditer(r"^ +|\S {2,}|^warning |^error: ", text)]
    indent = max((start for start in column_starts if start <= 0.7 * columns), default=0)
    shown = textwrap.fill(
        re.sub(r"(?<=\d) (?=[kMGT]?i?B\b)", _NO_BREAK, text[indent:]),  # a number keeps its unit
        columns,
        initial_indent=text[:indent],
        subsequent_indent=" " * indent,
        break_on_hyphens=False,
        break_long_words=False,  # a path or a command is copied whole
    )
    return shown.replace(_NO_BREAK, " ")


class FlowingText:
    """Text that comes in pieces: a terminal's edge breaks no word. Elsewhere it is as it came."""

    def __init__(self):
        self._columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
        self._column = 0
        self._gap = self._word = ""  # what is to be shown next

    def add(self, piece: str) -> None:
        """Show what has come, but for a word that may go on."""
        if self._columns is None:
            print(piece, end="", flush=True)
            return
        for part in re.split(r"(\s)", piece):
            if part == "\n":
                self._break_line()
            elif part.isspace():
                if self._word:
                    self._show()
                self._gap += part
            else:
                self._word += part
        if cell_len(self._gap + self._word) > self._columns:  # not all writing has gaps
            self._show()
        sys.stdout.flush()

    def end(self) -> None:
        """Show the rest; what comes next begins a line."""
        self._break_line()
        sys.stdout.flush()

    def _break_line(self) -> None:
        self._show()
        print()
        self._column = 0

    def _show(self) -> None:
        taken = cell_len(self._gap + self._word)
        if self._word and self._column and self._column + taken > self._columns:
            print()
            self._gap, self._column = "", 0
        print(self._gap + self._word, end="")
        self._column += cell_len(self._gap + self._word)
        self._gap = self._word = ""


def duration(seconds: float) -> str:
    """A time span as a person says it: `42s`, `3m10s`, `2h05m`, `6d04h`."""
    seconds = round(seconds)
    for unit_s, unit, part_s, part in (
        (86400, "d", 3600, "h"),
        (3600, "h", 60, "m"),
        (60, "m", 1, "s"),
    ):
        if seconds >= unit_s:
            return f"{seconds // unit_s}{unit}{seconds % unit_s // part_s:02d}{part}"
    return f"{seconds}s"


def compact(number: float) -> str:
    """A count in at most four digits: `950`, `56.1k`, `1.25M`, `0.73B`."""
    for unit, name in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= 0.5 * unit and number >= 999.5:
            return f"{number / unit:.3g}{name}"
    return f"{number:.3g}"


def parse_size(text: str) -> int:
    """Bytes in a size as people write it: 512MB, 1.5 GiB, 10g, 1000."""
    match = re.fullmatch(r"\s*(\d{1,18}(?:\.\d+)?)\s*(?:([kmgt])(i?))?b?\s*", text.lower())
    if not match:
        raise ValueError(f"{text!r} is not a size such as 512MB or 1.5GiB")
    number, unit, binary = match.groups()
    return int(float(number) * (1024 if binary else 1000) ** " kmgt".index(unit or " "))


def redacted(text: str) -> str:
    """A text without the passwords and tokens that can be told as such."""
    for secret in _SECRETS:
        text = secret.sub(r"\1***", text)
    return text


def printable(text: str) -> str:
    """A text that does nothing to the terminal which shows it."""
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", "?", text)


def first_line(error: Exception) -> str:
    """What an error says, as part of a line of ours."""
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
