"""A text that a person and a model write in turns."""

import re
import signal
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path

import torch

from model import GPT
from nanofit.data.tokenizer import END_OF_TEXT, encoded
from nanofit.machine.device import Device
from nanofit.terminal import FlowingText
from nanofit.use.generate import Choose, Context, choose_token
from nanofit.use.write import TextPieces, opened

OPENING = (
    "A base model does not answer, it continues a text: you write, it goes on. "
    "Ctrl-C stops it, Ctrl-D ends, /help tells more."
)
HELP = """\
What you write becomes a line of the text, and the model goes on at its end.
  an empty line  lets it go on from where it is
  /retry         has its last part written anew
  /reset         forgets the text
  /quit, Ctrl-D  ends
  Ctrl-C         stops the model
It sees {block_size} tokens at most: when they are full, it forgets the older half."""


class SharedText:
    """The text so far, as much of it as the model can see."""

    def __init__(self, model: GPT, device: Device, choose: Choose):
        self._model, self._device, self._choose = model, device, choose
        self.has_ended = False  # the document, by the model's last part
        self.reset()

    @property
    def block_size(self) -> int:
        return self._model.config.block_size

    def reset(self) -> None:
        """Forget it."""
        self._begin([[]])
        self._part_begins = 0  # the model's last one

    def write(self, line: str) -> None:
        """Add a person's line; an empty one adds nothing."""
        if not len(self.context):
            self._add(encoded(line) or [END_OF_TEXT])
        elif line:
            self._add(encoded("\n" + line))

    def retry(self) -> bool:
        """Take back the model's last part; False if there is none."""
        if self._part_begins < 1:
            return False
        self.context.cut(self._part_begins)
        return True

    @torch.inference_mode()
    def go_on(self, max_new_tokens: int) -> Iterator[str]:
        """What the model adds, in pieces; whoever has enough leaves off asking for more."""
        self._part_begins, self.has_ended = len(self.context), False
        text = TextPieces()
        for _ in range(max_new_tokens):
            if len(self.context) > self.block_size:
                self._forget_half()
            with self._device.autocast():
                token = self._choose(self.context.next_logits(), self.context.tokens)
            piece = text.add(token.item())
            if text.has_ended:
                self.has_ended = True
                break
            self.context.append(token[:, None])
            yield piece
        yield text.rest()

    def _begin(self, tokens: list[list[int]] | torch.Tensor) -> None:
        tokens = torch.as_tensor(tokens, dtype=torch.long, device=self._device.torch_device)
        self.context = Context(self._model, tokens)

    def _add(self, tokens: list[int]) -> None:
        self.context.append(torch.tensor([tokens], device=self._device.torch_device))

    def _forget_half(self) -> None:
        """Else every token would move all others, and nothing could be kept."""
        before = len(self.context)
        self._begin(self.context.tokens[:, -self.block_size // 2 :])
        self._part_begins -= before - len(self.context)


def chat(
    checkpoint: Path,
    start: str,
    *,
    device: str,
    dtype: str,
    seed: int,
    max_new_tokens: int,
    **how_to_choose: float | None,
) -> None:
    """Let a person and a model write in turns, on a terminal or line by line through a pipe."""
    is_live = sys.stdin.isatty() and sys.stdout.isatty()
    sys.stdin.reconfigure(errors="replace")  # what is no UTF-8 is no reason to end
    with opened(checkpoint, device, dtype) as (model, described):
        generator = torch.Generator(described.torch_device).manual_seed(seed % 2**63)
        choose = partial(choose_token, generator=generator, **how_to_choose)
        text = SharedText(model, described, choose)
        _note(OPENING)
        if start:
            text.write(start)
            _show(text.go_on(max_new_tokens), is_live, after=start)
        for line in _typed() if is_live else _piped():
            if line.strip() == "/quit":
                break
            if _takes_turn(line, text):
                _show(text.go_on(max_new_tokens), is_live)
                if text.has_ended:
                    _note("(the document ends here)")


def _takes_turn(line: str, text: SharedText) -> bool:
    """Do as a line says; whether the model is to go on then."""
    word = line.strip()
    if word == "/help":
        _note(HELP.format(block_size=text.block_size))
    elif word == "/reset":
        text.reset()
        _note("(the text is forgotten)")
    elif word == "/retry":
        if text.retry():
            return True
        _note("(there is nothing to write anew)")
    elif re.fullmatch(r"/\w+", word):
        _note(f"no command {word}; /help tells which there are")
    else:
        text.write(line)
        return True
    return False


def _show(pieces: Iterator[str], is_live: bool, *, after: str = "") -> None:
    """Print what comes until it ends or, on a terminal, Ctrl-C stops it."""
    shown = FlowingText()
    shown.add(after)
    with _ctrl_c_noted() if is_live else nullcontext([]) as presses, closing(pieces):
        for piece in pieces:
            shown.add(piece)
            if presses:
                break
    shown.end()


@contextmanager
def _ctrl_c_noted() -> Iterator[list[int]]:
    """Ctrl-C adds to this list and does nothing else."""
    presses: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: presses.append(number))
    try:
        yield presses
    finally:
        signal.signal(signal.SIGINT, before)


def _typed() -> Iterator[str]:
    """Lines from a terminal, with a history where there is readline, until Ctrl-D."""
    with suppress(ImportError):  # Windows has none
        import readline  # noqa: F401
    while True:
        try:
            line = input("> ")
        except KeyboardInterrupt:  # as in a shell: this line is forgotten
            print()
            continue
        except EOFError:
            print()
            return
        yield line


def _piped() -> Iterator[str]:
    return (line.rstrip("\n") for line in sys.stdin)


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
