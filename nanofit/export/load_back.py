"""An exported folder loaded by transformers, in a process of its own, and held to the model.

The child is `python -m nanofit.export.load_back FOLDER REQUEST ANSWER`; it knows the folder alone.
"""

import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from nanofit.data.tokenizer import SELF_CHECK, gpt2
from nanofit.files import PROJECT
from nanofit.terminal import InputError

if TYPE_CHECKING:
    from model import GPT

LIMIT = 1e-4
OLDEST = 5  # version of transformers that reads what is written
MOST_TOKENS, MOST_POSITIONS = 1024, 64  # of a sequence: run, and compared


def transformers_version() -> str | None:
    """The installed transformers, if it is one that can check an export."""
    try:
        found = version("transformers")
    except PackageNotFoundError:
        return None
    return found if int(found.partition(".")[0]) >= OLDEST else None


@torch.inference_mode()
def difference(
    folder: Path, model: "GPT", *, vocab_size: int, has_tokenizer: bool
) -> tuple[float, torch.dtype]:
    """The largest between the folder's logits and the model's, if it is small, and in which dtype.

    On random tokens in any case; with a tokenizer on text as well, of which it must make the same
    tokens. Products summed in another order may differ by more in float32: float64 then decides.
    """
    generator = torch.Generator().manual_seed(0)
    length = min(model.config.block_size, MOST_TOKENS)
    texts = SELF_CHECK if has_tokenizer else []
    tokens = [gpt2().encode(text, allowed_special="all") for text in texts]
    batches = [torch.randint(vocab_size, (2, length), generator=generator)]
    batches += [torch.tensor([ids[:length]]) for ids in tokens]
    for dtype in (torch.float32, torch.float64):
        answer = _ask(folder, {"batches": batches, "texts": texts, "dtype": dtype})
        for text, ids, read in zip(texts, tokens, answer["read"], strict=True):
            if read != [ids, text]:
                raise InputError(f"the folder's tokenizer does not read {text!r} as ours does")
        model.to(dtype).eval()
        expected = [_thinned(model(batch))[..., :vocab_size] for batch in batches]
        pairs = zip(answer["logits"], expected, strict=True)
        apart = torch.stack([(theirs - ours).abs().max() for theirs, ours in pairs]).max().item()
        if apart <= LIMIT:  # which nan is not
            return apart, dtype
    raise InputError(
        f"the folder's logits differ from the checkpoint's by up to {apart:.1e}, more than rounding"
    )


def _ask(folder: Path, request: dict[str, Any]) -> dict[str, Any]:
    with TemporaryDirectory() as place:
        asked, answered = Path(place, "request.pt"), Path(place, "answer.pt")
        torch.save(request, asked)
        words = [str(one.resolve()) for one in (folder, asked, answered)]
        done = subprocess.run(
            [sys.executable, "-m", "nanofit.export.load_back", *words],
            cwd=PROJECT,
            env=_environment(place),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        if done.returncode:
            said = [line.strip() for line in done.stderr.splitlines() if line.strip()]
            raise InputError(
                f"transformers fails on the folder ({said[-1] if said else done.returncode})"
            )
        return torch.load(answered, weights_only=True)


def _environment(place: str) -> dict[str, str]:
    """Nothing is downloaded, no card is used, and no copy of the modelling file stays behind."""
    settings = {
        "HF_HUB_OFFLINE": "1",
        "HF_MODULES_CACHE": place,
        "CUDA_VISIBLE_DEVICES": "",
        "TRANSFORMERS_VERBOSITY": "error",
    }
    return {**os.environ, **settings}


def _thinned(logits: Tensor) -> Tensor:
    """Those of some positions (B, T, V), the first and the last among them."""
    length = logits.size(1)
    return logits[:, torch.linspace(0, length - 1, min(length, MOST_POSITIONS)).long()].clone()


@torch.inference_mode()
def _answer(
    folder: str, batches: list[Tensor], texts: list[str], dtype: torch.dtype
) -> dict[str, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    trusting = {"trust_remote_code": True}
    model, told = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, output_loading_info=True, **trusting
    )
    if wrong := {name: keys for name, keys in told.items() if keys}:
        raise RuntimeError(f"its weights do not fit: {wrong}")
    tokenizer = AutoTokenizer.from_pretrained(folder, **trusting) if texts else None
    tokens = [tokenizer(text)["input_ids"] for text in texts]
    return {
        "logits": [_thinned(model(batch).logits) for batch in batches],
        "read": [[ids, tokenizer.decode(ids)] for ids in tokens],
    }


if __name__ == "__main__":
    place, asked, answered = sys.argv[1:]
    torch.save(_answer(place, **torch.load(asked, weights_only=True)), answered)
