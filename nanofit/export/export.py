"""A run's checkpoint -> a folder that Hugging Face's tools read.

Where transformers is installed, the folder takes its name only when a fresh process has loaded it
and found the logits that the checkpoint gives.
"""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from model import GPT
from nanofit.data.tokenizer import END_OF_TEXT, VOCABULARY_SIZE
from nanofit.export.card import model_card
from nanofit.export.load_back import difference, transformers_version
from nanofit.export.tokenizer_files import as_json, tokenizer_files
from nanofit.files import atomic_folder
from nanofit.report.history import History, read_history
from nanofit.settings.config import flatten
from nanofit.settings.shape import GPTConfig
from nanofit.terminal import InputError, Progress, compact, first_line
from nanofit.weights import read_checkpoint, to_hugging_face

MODELING = Path(__file__).with_name("modeling_nanofit.py")
_MOST_ROWS = 51200  # GPT-2's 50257 rounded up, to 1024 at most; more stand for other tokens
# What an export may consist of, and --overwrite may remove.
_FILES = {
    *("README.md", "config.json", "generation_config.json", "model.safetensors", MODELING.name),
    *("tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt"),
}


def export(checkpoint: Path, folder: Path, *, dtype: str, overwrite: bool) -> None:
    """Write a checkpoint's model to `folder`, verified, or nothing at all."""
    folder = folder.resolve()
    _check_target(folder, overwrite)
    with Progress("export", 3) as progress:
        progress.update(0, f"reading {checkpoint}")
        saved, model = _read(checkpoint, dtype)
        shape = _without_padding(model.config)
        with _told_in_a_line(folder), atomic_folder(folder) as new:
            progress.update(1, "writing")
            card = model_card(folder.name, shape, saved, _history(checkpoint.parent), dtype=dtype)
            _write(new, model, shape, dtype=dtype, card=card)
            progress.update(2, "loading it back")
            verdict = _verify(new, model, shape)
    size = compact(shape.parameters)
    step = saved.get("iter_num", "unknown")
    print(f"{checkpoint}: step {step}, arch = {shape.arch!r}, {size} parameters")
    print(_said_of_tokens(model.config.vocab_size, shape.vocab_size))
    print(f"{folder}: {verdict}")


def _check_target(folder: Path, overwrite: bool) -> None:
    """Refuse what would take something from the user."""
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder} is a file; give a folder that is not there yet")
    held = sorted(path.name for path in folder.iterdir()) if folder.exists() else []
    if held and not overwrite:
        raise InputError(f"{folder} is not empty; use --overwrite to replace it, or another folder")
    if foreign := [name for name in held if name not in _FILES]:
        raise InputError(
            f"{folder} holds {foreign[0]}, which no export has written, and would lose it; "
            "move it away, or give another folder"
        )


def _read(checkpoint: Path, dtype: str) -> tuple[dict[str, Any], GPT]:
    """What a checkpoint tells, and its model with weights that `dtype` can hold."""
    saved = read_checkpoint(checkpoint)
    model = GPT.from_checkpoint(checkpoint, dropout=saved["model_args"].get("dropout", 0.0)).eval()
    for name, parameter in model.named_parameters():
        if not parameter.isfinite().all():
            raise InputError(
                f"{checkpoint} holds a {name} that is not finite: its run has diverged; "
                "name an earlier one with --checkpoint=..."
            )
        parameter.data = parameter.to(getattr(torch, dtype)).float()
        if not parameter.isfinite().all():
            raise InputError(f"{name} is too large for {dtype}; use --dtype=bfloat16")
    return saved, model


def _without_padding(shape: GPTConfig) -> GPTConfig:
    """GPT-2's vocabulary is padded for speed; no token has the last rows."""
    is_gpt2s = VOCABULARY_SIZE <= shape.vocab_size <= _MOST_ROWS
    return replace(shape, vocab_size=VOCABULARY_SIZE) if is_gpt2s else shape


def _has_tokenizer(shape: GPTConfig) -> bool:
    return shape.vocab_size == VOCABULARY_SIZE


def _history(run_folder: Path) -> History | None:
    with suppress(InputError):  # an older run, nanoGPT's, or a checkpoint on its own
        return read_history(run_folder)
    return None


@contextmanager
def _told_in_a_line(folder: Path) -> Iterator[None]:
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or first_line(error)
        raise InputError(f"cannot write {folder} ({reason})") from error
    except InputError as error:
        raise InputError(f"{error}; nothing was written to {folder}") from error


def _write(new: Path, model: GPT, shape: GPTConfig, *, dtype: str, card: str) -> None:
    from safetensors.torch import save_file

    weights = {
        name: _kept_rows(name, tensor, shape.vocab_size).to(getattr(torch, dtype))
        for name, tensor in model.state_dict().items()
    }
    config, tensors = to_hugging_face(flatten(shape), weights)
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    stored = new / "model.safetensors"
    save_file(tensors, stored, metadata={"format": "pt"})
    ends = _special_tokens(shape)
    files = {
        "config.json": as_json({**config, **_for_other_tools(shape, dtype), **ends}, indent=2),
        "generation_config.json": as_json({**ends, "pad_token_id": ends["eos_token_id"]}, indent=2),
        "README.md": card,
        **(tokenizer_files(shape.block_size) if _has_tokenizer(shape) else {}),
    }
    for name, content in files.items():
        (new / name).write_text(content, encoding="utf-8", newline="\n")
    shutil.copymode(new / "config.json", stored)  # safetensors lets nobody else read
    if shape.is_modern:
        shutil.copyfile(MODELING, new / MODELING.name)


def _kept_rows(name: str, tensor: Tensor, vocab_size: int) -> Tensor:
    return tensor[:vocab_size] if "wte." in name or "lm_head." in name else tensor


def _special_tokens(shape: GPTConfig) -> dict[str, int | None]:
    """Documents end with the token that a prompt may begin with."""
    return dict.fromkeys(
        ("bos_token_id", "eos_token_id"), END_OF_TEXT if _has_tokenizer(shape) else None
    )


def _for_other_tools(shape: GPTConfig, dtype: str) -> dict[str, Any]:
    """What a config holds besides the shape."""
    common = {"torch_dtype": dtype, "use_cache": True, "tie_word_embeddings": not shape.is_modern}
    if shape.is_modern:
        classes = {"AutoConfig": "NanofitConfig", "AutoModelForCausalLM": "NanofitForCausalLM"}
        return {
            **common,
            "architectures": ["NanofitForCausalLM"],
            "auto_map": {auto: f"{MODELING.stem}.{name}" for auto, name in classes.items()},
            "dropout": shape.dropout,
        }
    return {
        **common,
        "architectures": ["GPT2LMHeadModel"],
        "n_ctx": shape.block_size,  # which llama.cpp's converter asks for
        "layer_norm_epsilon": 1e-5,
        **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), shape.dropout),
    }


def _verify(new: Path, model: GPT, shape: GPTConfig) -> str:
    """Hold the new folder to the model; what came of it, in words."""
    found = transformers_version()
    if found is None:
        return "not verified; pip install 'transformers>=5', and export again, to verify it"
    has_tokenizer = _has_tokenizer(shape)
    apart, dtype = difference(new, model, vocab_size=shape.vocab_size, has_tokenizer=has_tokenizer)
    also = ", and reads text as the same tokens" if has_tokenizer else ""
    exact = str(dtype).removeprefix("torch.")
    return f"transformers {found} finds the same logits, to {apart:.1e} in {exact}{also}"


def _said_of_tokens(rows: int, kept: int) -> str:
    if kept != VOCABULARY_SIZE:
        return f"its {kept} tokens are not GPT-2's: the folder has no tokenizer"
    left_out = f"; {rows - kept} rows of padding are left out" if rows > kept else ""
    return f"its {kept} tokens are GPT-2's{left_out}"
