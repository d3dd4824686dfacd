"""Weights from and for elsewhere: our checkpoints, nanoGPT's, Hugging Face's folders.

A file may come from anybody. So it is read as data, by torch's `weights_only`, and only once it is
known to name nothing but tensors, and to unpack to no more than it is.
"""

import json
import pickletools
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nanofit.files import read_small
from nanofit.terminal import InputError, first_line

# Hugging Face keeps these as Conv1D: input features first.
_TRANSPOSED = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")
_TABLES = ("transformer.wte.", "transformer.wpe.")
_ARCH_OF_GELU = {"gelu": "gpt2", "gelu_new": "gpt2-tanh", "gelu_pytorch_tanh": "gpt2-tanh"}
_MODERN = "nanofit"  # its model_type, as in nanofit/export/modeling_nanofit.py

# What a checkpoint is pickled as, besides plain values. torch allows more, some of which takes as
# much memory as it is told to.
_REBUILDS = {
    "collections OrderedDict",
    "torch._utils _rebuild_tensor_v2",
    "torch._utils _rebuild_parameter",
}
_MOST_PICKLED = 8 * 2**20  # bytes; of GPT-2 XL and its optimiser it is less than one MiB
_MOST_VALUES = 10**6  # of all containers; one that holds another twice counts it twice
_TOO_LARGE = 2**63
_KINDS = {  # of what is used, where it is there
    "model": dict,
    "model_args": dict,
    "config": dict,
    "optimizer": dict,
    "iter_num": int,
    "sequences_seen": int,
    "seconds": float,
}


class UnreadableCheckpoint(InputError):
    """A file that holds no checkpoint, or no longer does."""


class _Untrusted(ValueError):
    """What no damage makes of a checkpoint, and nobody saves."""


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

    All of it is read once, for its checksums; with `mmap` only tensors that are used take memory.
    """
    try:
        path.open("rb").close()
    except OSError as error:
        raise InputError(f"cannot read {path} ({error.strerror})") from error
    try:
        _check_archive(path)
        checkpoint = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
        _check_values(checkpoint, path.stat().st_size)
    except Exception as error:  # torch raises many kinds for a damaged file
        kind = InputError if isinstance(error, _Untrusted) else UnreadableCheckpoint
        raise kind(f"{path} is not a readable checkpoint ({first_line(error)})") from error
    missing = {"model", "model_args"} - set(checkpoint if isinstance(checkpoint, dict) else ())
    if missing:
        raise InputError(
            f"{path} is not a checkpoint: it has no {' and no '.join(sorted(missing))}"
        )
    for name, kind in _KINDS.items():
        if not isinstance(checkpoint.get(name, kind()), kind):
            raise InputError(f"{path} is not a checkpoint: its {name} is no {kind.__name__}")
    if not all(isinstance(weight, Tensor) for weight in checkpoint["model"].values()):
        raise InputError(f"{path} is not a checkpoint: a weight of its model is no tensor")
    return checkpoint


def _check_archive(path: Path) -> None:
    """Hold a file to what torch.save writes, before torch goes by the sizes and names in it."""
    with zipfile.ZipFile(path) as archive:
        if not is_stored(archive):
            raise _Untrusted("it would unpack to more than it is, as no checkpoint does")
        described = [one for one in archive.infolist() if one.filename.endswith("/data.pkl")]
        if any(entry.file_size > _MOST_PICKLED for entry in described):
            raise _Untrusted("more of it than of any checkpoint is not tensors")
        for entry in described:
            _check_names(archive.read(entry))
        if (damaged := archive.testzip()) is not None:  # torch.load looks at no checksum
            raise ValueError(f"it is damaged: {damaged} is not what was written")


def is_stored(archive: zipfile.ZipFile) -> bool:
    """Whether all in it is as large as it says, and lies in the file once."""
    entries = archive.infolist()
    are_plain = all(entry.file_size == entry.compress_size for entry in entries)
    file_bytes = Path(archive.filename).stat().st_size
    return are_plain and sum(entry.file_size for entry in entries) <= file_bytes


def _check_names(pickled: bytes) -> None:
    for operation, name, _ in pickletools.genops(pickled):
        if "GLOBAL" in operation.name and not _is_of_a_tensor(name):
            raise _Untrusted(
                f"it names {str(name).replace(' ', '.')}, which could run code or take any memory: "
                "do not trust it"
            )


def _is_of_a_tensor(name: str | None) -> bool:
    return name in _REBUILDS or (str(name).startswith("torch ") and str(name).endswith("Storage"))


def _check_values(content: Any, file_bytes: int) -> None:
    """Refuse what is no tree of plain values and of tensors that the file has room for."""
    waiting, values, tensor_bytes = [content], 0, 0
    while waiting:
        one, values = waiting.pop(), values + 1
        if isinstance(one, dict):
            waiting += [*one.keys(), *one.values()]
        elif isinstance(one, list | tuple):
            waiting += one
        elif isinstance(one, Tensor):
            tensor_bytes += one.numel() * one.element_size()
        elif isinstance(one, int) and abs(one) >= _TOO_LARGE:
            raise _Untrusted("a number in it is too large")
        elif not isinstance(one, str | int | float | None):
            raise _Untrusted(f"it holds a {type(one).__name__}, as no checkpoint does")
        if values > _MOST_VALUES:
            raise _Untrusted("it is nested without an end")
        if tensor_bytes > 2 * file_bytes:  # tied weights are there once and told twice
            raise _Untrusted("its tensors are larger than the file")


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
        config = json.loads(read_small(folder / "config.json"))
        shape = _shape_of_hugging_face(config)
        stored = load_file(folder / "model.safetensors")
    except (OSError, ValueError, LookupError, TypeError, RecursionError, SafetensorError) as error:
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
