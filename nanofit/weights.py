"""Weights from elsewhere: our checkpoints, nanoGPT's, or a local Hugging Face GPT-2 folder."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nanofit.terminal import InputError

# Hugging Face keeps these as Conv1D: input features first.
_TRANSPOSED = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")
_GELU_OF_ARCH = {"gelu": "gpt2", "gelu_new": "gpt2-tanh", "gelu_pytorch_tanh": "gpt2-tanh"}


def read_weights(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The shape (GPTConfig's arguments) and the weights (our parameter names) stored at `path`."""
    if (path / "config.json").exists():
        return _read_hugging_face(path)
    if not path.is_file():
        raise InputError(
            f"no weights at {path}: give a checkpoint file, or a folder with config.json and "
            "model.safetensors (huggingface-cli download gpt2 --local-dir gpt2)"
        )
    checkpoint = read_checkpoint(path)
    return checkpoint["model_args"], without_compile_prefix(checkpoint["model"])


def read_checkpoint(path: Path, *, mmap: bool = True) -> dict[str, Any]:
    """A checkpoint's content, on the CPU; it is read as data, so it cannot run code.

    With `mmap` only the tensors that are used are read from the disk.
    """
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    except Exception as error:  # torch raises many kinds for a damaged file
        raise InputError(f"{path} is not a readable checkpoint ({_first_line(error)})") from error
    missing = {"model", "model_args"} - set(checkpoint if isinstance(checkpoint, dict) else ())
    if missing:
        raise InputError(
            f"{path} is not a checkpoint: it has no {' and no '.join(sorted(missing))}"
        )
    return checkpoint


def without_compile_prefix(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """nanoGPT saves compiled models with a prefix before every name."""
    return {name.removeprefix("_orig_mod."): tensor for name, tensor in weights.items()}


def _read_hugging_face(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if config.get("model_type") != "gpt2":
        raise InputError(
            f"{folder} holds a {config.get('model_type')} model; only gpt2 can be read"
        )
    if config.get("activation_function", "gelu_new") not in _GELU_OF_ARCH:
        raise InputError(f"{folder}: activation {config['activation_function']} is not supported")
    try:
        stored = load_file(folder / "model.safetensors")
    except (OSError, SafetensorError) as error:
        raise InputError(
            f"cannot read {folder}/model.safetensors ({_first_line(error)})"
        ) from error
    shape = {
        "n_layer": config["n_layer"],
        "n_head": config["n_head"],
        "n_embd": config["n_embd"],
        "block_size": config["n_positions"],
        "vocab_size": config["vocab_size"],
        "bias": True,
        "arch": _GELU_OF_ARCH[config.get("activation_function", "gelu_new")],
    }
    return shape, _rename_hugging_face(stored)


def _rename_hugging_face(stored: dict[str, Tensor]) -> dict[str, Tensor]:
    weights = {}
    for name, tensor in stored.items():
        if name.endswith((".attn.bias", ".attn.masked_bias")):
            continue  # causal masks of old versions
        if name.endswith(_TRANSPOSED):
            tensor = tensor.t().contiguous()
        weights["transformer." + name.removeprefix("transformer.")] = tensor.float()
    weights.pop("transformer.lm_head.weight", None)
    weights["lm_head.weight"] = weights["transformer.wte.weight"]
    return weights


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
