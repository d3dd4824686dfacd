"""Weights from and for elsewhere: our checkpoints, nanoGPT's, Hugging Face's folders."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nanofit.terminal import InputError, first_line

# Hugging Face keeps these as Conv1D: input features first.
_TRANSPOSED = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")
_TABLES = ("transformer.wte.", "transformer.wpe.")
_ARCH_OF_GELU = {"gelu": "gpt2", "gelu_new": "gpt2-tanh", "gelu_pytorch_tanh": "gpt2-tanh"}
_MODERN = "nanofit"  # its model_type, as in nanofit/export/modeling_nanofit.py


class UnreadableCheckpoint(InputError):
    """A file that holds no checkpoint, or no longer does."""


def read_weights(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The shape (GPTConfig's arguments) and the weights (our parameter names) stored at `path`."""
    if (path / "config.json").exists():
        return _read_hugging_face(path)
    if not path.is_file():
        raise InputError(
            f"no weights at {path}: give a checkpoint file, or a folder with config.json and "
            "model.safetensors (hf download gpt2 --local-dir gpt2)"
        )
    checkpoint = read_checkpoint(path)
    return checkpoint["model_args"], _without_masks(without_compile_prefix(checkpoint["model"]))


def read_checkpoint(path: Path, *, mmap: bool = True) -> dict[str, Any]:
    """A checkpoint's content, on the CPU; it is read as data, so it cannot run code.

    With `mmap` only the tensors that are used are read from the disk.
    """
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    except Exception as error:  # torch raises many kinds for a damaged file
        told = f"{path} is not a readable checkpoint ({first_line(error)})"
        raise UnreadableCheckpoint(told) from error
    missing = {"model", "model_args"} - set(checkpoint if isinstance(checkpoint, dict) else ())
    if missing:
        raise InputError(
            f"{path} is not a checkpoint: it has no {' and no '.join(sorted(missing))}"
        )
    return checkpoint


def without_compile_prefix(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """nanoGPT saves compiled models with a prefix before every name."""
    return {name.removeprefix("_orig_mod."): tensor for name, tensor in weights.items()}


def to_hugging_face(
    shape: dict[str, Any], weights: dict[str, Tensor]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The config and the tensors by which transformers knows this model."""
    config = {name: shape[name] for name in ("n_layer", "n_head", "n_embd", "vocab_size")}
    config["n_positions"] = shape["block_size"]
    if shape["arch"] == "modern":
        return {"model_type": _MODERN, "bias": shape["bias"], **config}, weights
    gelu = next(name for name, arch in _ARCH_OF_GELU.items() if arch == shape["arch"])
    tensors = {}
    for name, tensor in weights.items():
        if name == "lm_head.weight":  # tied
            continue
        tensors[name] = tensor.t() if name.endswith(_TRANSPOSED) else tensor
        if not shape["bias"] and not name.startswith(_TABLES):  # zeros are none
            tensors[name.replace(".weight", ".bias")] = tensor.new_zeros(tensor.size(0))
    return {"model_type": "gpt2", "activation_function": gelu, **config}, tensors


def _read_hugging_face(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        shape = _shape_of_hugging_face(config)
        stored = load_file(folder / "model.safetensors")
    except (OSError, ValueError, LookupError, TypeError, SafetensorError) as error:
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise InputError(f"{folder} does not hold a GPT-2 ({reason})") from error
    if shape["arch"] == "modern":
        return shape, {name: tensor.float() for name, tensor in stored.items()}
    return shape, _rename_hugging_face(_without_masks(stored))


def _shape_of_hugging_face(config: dict[str, Any]) -> dict[str, Any]:
    if config["model_type"] not in ("gpt2", _MODERN):
        raise ValueError(f"it is a {config['model_type']} model")
    is_modern = config["model_type"] == _MODERN
    gelu = config.get("activation_function", "gelu_new")
    return {
        "n_layer": config["n_layer"],
        "n_head": config["n_head"],
        "n_embd": config["n_embd"],
        "block_size": config["n_positions"],
        "vocab_size": config["vocab_size"],
        "bias": config["bias"] if is_modern else True,
        "arch": "modern" if is_modern else _ARCH_OF_GELU[gelu],
    }


def _rename_hugging_face(stored: dict[str, Tensor]) -> dict[str, Tensor]:
    weights = {}
    for name, tensor in stored.items():
        if name.endswith(_TRANSPOSED):
            tensor = tensor.t().contiguous()
        weights["transformer." + name.removeprefix("transformer.")] = tensor.float()
    weights.pop("transformer.lm_head.weight", None)
    weights["lm_head.weight"] = weights["transformer.wte.weight"]
    return weights


def _without_masks(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Old versions of both store their causal masks as if they were weights."""
    masks = (".attn.bias", ".attn.masked_bias")
    return {name: tensor for name, tensor in weights.items() if not name.endswith(masks)}
