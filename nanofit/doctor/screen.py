"""Findings as a person reads them: one screen, each trouble with its way out."""

import shutil
import sys
import textwrap
from collections.abc import Iterator

from rich.console import Console
from rich.text import Text

from nanofit.doctor.finding import Finding
from nanofit.terminal import printable, redacted

COLUMNS = 100  # at most, and where nobody tells how many there are
STYLES = {"ok": "green", "warning": "yellow", "problem": "bold red"}
STATE, TOPIC = 9, 10  # columns


class Screen:
    """Where findings appear as they come, and what is being done meanwhile."""

    def __init__(self, *, is_quiet: bool = False):
        on_terminal = sys.stdout.isatty()
        columns = min(shutil.get_terminal_size().columns, COLUMNS) if on_terminal else COLUMNS
        self._columns, self._is_quiet = columns, is_quiet
        self._console = Console(highlight=False, soft_wrap=True, force_terminal=on_terminal)
        # Whoever draws a live line has to know of what is printed above it.
        is_shared = on_terminal and not is_quiet
        self._status = (self._console if is_shared else Console(stderr=True)).status("")

    def __enter__(self) -> "Screen":
        self._status.start()
        return self

    def __exit__(self, *_) -> None:
        self._status.stop()

    def note(self, text: str) -> None:
        self._status.update(f"{text} ...")

    def show(self, finding: Finding) -> None:
        if not self._is_quiet:
            for line in lines_of(finding, self._columns):
                shown = Text(line)
                if line.startswith(finding.state):
                    shown.stylize(STYLES[finding.state], 0, STATE)
                self._console.print(shown)

    def say(self, text: str) -> None:
        if not self._is_quiet:
            print(textwrap.fill(text, self._columns, break_on_hyphens=False))


def lines_of(finding: Finding, columns: int) -> Iterator[str]:
    """State, topic and text; a remedy on lines of its own, which begin with "do"."""
    yield from _folded(f"{finding.state:{STATE}}{finding.topic:{TOPIC}}", finding.text, columns)
    if finding.remedy:
        yield from _folded(f"{'':{STATE}}{'  do':{TOPIC}}", finding.remedy, columns)


def _folded(begin: str, text: str, columns: int) -> list[str]:
    text = printable(redacted(text))  # it may quote what anybody has named or written
    indent = " " * len(begin)
    return textwrap.wrap(
        text,
        columns,
        initial_indent=begin,
        subsequent_indent=indent,
        break_on_hyphens=False,
        break_long_words=False,
    )


def verdict(findings: list[Finding]) -> str:
    problems, warnings = (
        sum(one.state == state for one in findings) for state in ("problem", "warning")
    )
    if not problems:
        few = f", {warnings} warning{'s' if warnings > 1 else ''}" if warnings else ""
        return f"All is well for a run{few}."
    return f"{problems} problem{'s' if problems > 1 else ''} would stop a run or spoil it."
