"""Follow the memory of tensors from birth to death, op by op, on real and on fake tensors."""

import re
import sys
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    is_traceable_wrapper_subclass_type,
)
from torch.utils._pytree import tree_leaves

from model import GPT
from nanofit.files import PROJECT
from nanofit.learning.loss import chunk_bytes
from nanofit.memory.allocator import rounded
from nanofit.memory.course import Buffer, Event
from nanofit.memory.setup import Attention

_MODEL_CODE = {str(PROJECT / "model.py"), str(PROJECT / "nanofit/learning/loss.py")}
_CASTS = ("_to_copy", "convert_element_type.default")
_WORTH_A_LINE = 2**20  # bytes from which on it matters which line of code made a tensor


class _StorageWatch(TorchDispatchMode):
    """Tells subclasses of every storage that appears and of its end."""

    def __init__(self):
        super().__init__()
        self._known: dict[int, tuple[weakref.ref, Any]] = {}

    def adopt(self, tensors: Iterable[Tensor]) -> None:
        """Follow tensors that were there before."""
        for tensor in tensors:
            self._follow(tensor, "adopted")

    def token_of(self, tensor: Tensor) -> Any:
        """What `born` returned for the storage of a tensor."""
        return self._known[_address(tensor)][1]

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(map(is_traceable_wrapper_subclass_type, types)):
            return NotImplemented  # until it is down to the tensors that have memory
        results = func(*args, **(kwargs or {}))
        for result in tree_leaves(results):
            if isinstance(result, Tensor):
                self._follow(result, func.name())
        return results

    def _follow(self, tensor: Tensor, op: str) -> None:
        key = _address(tensor)
        if key not in self._known:
            storage = tensor.untyped_storage()
            token = self.born(tensor, rounded(storage.nbytes()), op)
            self._known[key] = weakref.ref(storage, lambda _: self._forget(key)), token

    def _forget(self, key: int) -> None:
        _, token = self._known.pop(key)
        self.died(token)

    def born(self, tensor: Tensor, size_bytes: int, op: str) -> Any:
        """A new storage; what is returned comes back as the token of `died`."""
        raise NotImplementedError

    def died(self, token: Any) -> None:
        raise NotImplementedError


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata  # views of one storage share it


class MemoryBudget(_StorageWatch):
    """Raises torch.OutOfMemoryError once living tensors exceed `limit_bytes`, on any device.

    The limit may be changed at any time, so that memory can be made to run out in any phase of a
    step. The op that went over the limit has run, but its results are lost.
    """

    def __init__(self, limit_bytes: float = float("inf")):
        super().__init__()
        self.limit_bytes, self.allocated_bytes = limit_bytes, 0

    def born(self, tensor: Tensor, size_bytes: int, op: str) -> int:
        if self.allocated_bytes + size_bytes > self.limit_bytes:
            raise torch.OutOfMemoryError(
                f"out of memory: {op} asks for {size_bytes} bytes, "
                f"{self.allocated_bytes} of {self.limit_bytes} are in use"
            )
        self.allocated_bytes += size_bytes
        return size_bytes

    def died(self, token: int) -> None:
        self.allocated_bytes -= token


class Origin(NamedTuple):
    """Where in the model's code something comes from; empty where that is not known."""

    line: str = ""  # as "model.py:137"
    function: str = ""


class MemoryTrace(_StorageWatch):
    """Everything that was allocated and freed while it was active, in order.

    Needs torch's anomaly mode to tell which line of the model a backward op belongs to, and the
    kernels that stand behind attention on the card.
    """

    def __init__(self, attention: Attention = "flash"):
        super().__init__()
        self._attention = attention
        self.events: list[Event] = []
        self.alive: dict[Buffer, None] = {}  # in order of birth
        self.phase, self.component = "build", "weights"
        self._parameter_shapes: set[tuple[int, ...]] = set()
        self._vocabulary: int | None = None

    def follow_step(self, model: GPT, optimizer: Optimizer) -> None:
        """Learn by hooks which phase of a step it is, and which tensors become gradients."""
        self._parameter_shapes = {tuple(p.shape) for p in model.parameters()}
        self._vocabulary = model.config.vocab_size
        model.register_forward_pre_hook(lambda *_: self._enter("forward"), prepend=True)
        model.register_forward_hook(lambda *_: self._leave_forward())
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(self._is_gradient)
        optimizer.register_step_pre_hook(lambda *_: self._enter("optimiser", "optimiser state"))
        optimizer.register_step_post_hook(lambda *_: self._enter("between steps"))
        self._enter("between steps")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        results = super().__torch_dispatch__(func, types, args, kwargs)
        if results is not NotImplemented:
            self.workspace(func, results)
        return results

    @contextmanager
    def making(self, component: str) -> Iterator[None]:
        """What appears meanwhile is for this."""
        before, self.component = self.component, component
        try:
            yield
        finally:
            self.component = before

    def resized(self, tensor: Tensor, component: str) -> None:
        """A storage has grown from nothing, or shrunk to it, in place."""
        key = _address(tensor)
        if key in self._known:
            self._forget(key)
        if tensor.untyped_storage().size() > 0:
            with self.making(component):
                self._follow(tensor, "resize_")

    def workspace(self, op: Any, results: Any, origin: Origin | None = None) -> None:
        """Memory that a kernel takes for itself while it runs: no tensor shows it."""
        size_bytes = _workspace_bytes(op, results, self._attention)
        if size_bytes:
            self.died(self.allocate(size_bytes, (size_bytes,), "uint8", op.name(), origin))

    def allocate(
        self,
        size_bytes: int,
        shape: tuple[int, ...],
        dtype: str,
        op: str,
        origin: Origin | None = None,
    ) -> Buffer:
        """Note a new buffer; without `origin` the code that runs now has made it."""
        if origin is None:
            origin = _origin() if size_bytes >= _WORTH_A_LINE else Origin()
        component = self.component
        if shape in self._parameter_shapes and op.endswith(_CASTS):
            component = "weights in half precision"
        elif (
            component != "optimiser state"
            and (  # the head's bias has moments as long as logits
                self._vocabulary in shape[-1:] or "loss" in origin.line + origin.function
            )
        ):
            component = "logits and loss"
        buffer = Buffer(rounded(size_bytes), shape, dtype, op, origin.line, component)
        self.alive[buffer] = None
        self.events.append(Event(buffer, True, self.phase))
        return buffer

    def born(self, tensor: Tensor, size_bytes: int, op: str) -> Buffer:
        return self.allocate(size_bytes, tuple(tensor.shape), dtype_name(tensor.dtype), op)

    def died(self, token: Buffer) -> None:
        del self.alive[token]
        self.events.append(Event(token, False, self.phase))

    def _enter(self, phase: str, component: str = "temporaries") -> None:
        self.phase, self.component = phase, component

    def _leave_forward(self) -> None:
        """What outlives the forward pass was kept for the backward pass."""
        for buffer in self.alive:
            if buffer.component == "temporaries":
                buffer.component = "activations"
        self._enter("backward")

    def _is_gradient(self, parameter: Tensor) -> None:
        own = getattr(parameter.grad, "_local_tensor", parameter.grad)  # of a sharded parameter
        self.token_of(own).component = "gradients"


def _workspace_bytes(op: Any, results: Any, attention: Attention) -> int:
    """What a kernel takes besides its results, where it is worth mentioning."""
    if op is torch.ops.nanofit.loss_sum.default:
        return chunk_bytes(*results[1:])
    if str(op).startswith("aten._scaled_dot_product") and "backward" in str(op):
        return _attention_bytes(results[0], attention)
    return 0


def _attention_bytes(d_queries: Tensor, attention: Attention) -> int:
    """What attention's backward pass on CUDA takes for its sums in float32.

    Flash attention pads heads to a multiple of 32 and rows, which have one more number each, to one
    of 128. The efficient kernels work in blocks of 64 rows; in half precision wide heads have the
    gradients of keys and values summed up as well.
    """
    batch, heads, rows, width = d_queries.shape
    if attention == "flash":
        return 4 * batch * heads * _padded(rows, 128) * (_padded(width, 32) + 1)
    sums = 3 if width > 128 and d_queries.dtype != torch.float32 else 1
    block = 64 if width <= 64 else 128
    return 4 * batch * heads * _padded(rows, 64) * (sums * _padded(width, block) + 1)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def origin_of_call() -> Origin:
    """The line of the model's code that runs now."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename in _MODEL_CODE:
            file = Path(frame.f_code.co_filename).name
            return Origin(f"{file}:{frame.f_lineno}", frame.f_code.co_name)
        frame = frame.f_back
    return Origin()


def _origin() -> Origin:
    """The line of the model's code that runs now, or whose backward pass does."""
    node = torch._C._current_autograd_node()
    if node is None:
        return origin_of_call()
    for entry in reversed(node.metadata.get("traceback_", [])):
        file, line, function = re.match(r'  File "(.*)", line (\d+), in (\S+)', entry).groups()
        if file in _MODEL_CODE:
            return Origin(f"{Path(file).name}:{line}", function)
    return Origin()


def _padded(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
