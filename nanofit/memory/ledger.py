"""A step's memory, written down: each tensor that matters, when it comes and when it goes.

    L layers  C width  H heads  T block  V vocabulary  B micro-batch  N = B·T tokens

What model.py, the loss and the optimiser do is told here a second time, in sizes alone, so that it
takes neither torch nor time. Tests hold it to the simulator, which runs the code itself.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from math import prod
from typing import NamedTuple

from nanofit.files import PROJECT
from nanofit.learning.chunks import MOST_NUMBERS, chunk_rows
from nanofit.memory.allocator import rounded
from nanofit.memory.course import MOST_SEQUENCES, Buffer, Course, Event
from nanofit.memory.savers import budgets_for
from nanofit.memory.setup import Setup
from nanofit.memory.shards import Group, block_of, groups_of, part_of

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int64": 8, "uint8": 1, "bool": 1}
_FEWEST_OF_8_BITS, _PER_SCALE = 4096, 256  # torchao's: of values in a tensor, and for one scale


def covers(setup: Setup) -> bool:
    """Whether such a step is written down here; any other has to be simulated."""
    budget, has_recompute = setup.activation_memory_budget, setup.recompute != "off"
    if setup.shard and (setup.compiled or setup.optimizer == "muon" or setup.optimizer_bits == 8):
        return False
    if setup.loss != "chunked" or setup.attention == "math":
        return False
    if not setup.compiled:
        return not (has_recompute and setup.shape.dropout)
    if budget == 1:
        return True
    # What the compiler keeps within other budgets is up to its knapsack, and depends on the shape.
    return budget in budgets_for(setup) and setup.dtype != "float32" and not setup.shape.dropout


def write_down(setup: Setup, micro_batch_size: int) -> Course:
    """The course of two steps and an evaluation, as `simulate` would find it."""
    eager = _ShardedStep if setup.shard else _EagerStep
    step = (_CompiledStep if setup.compiled else eager)(setup, micro_batch_size)
    step.build()
    for _ in range(2):
        step.learn()
    step.evaluate()
    return Course(step.events)


@dataclass(frozen=True)
class WrittenNeed:
    """What any micro-batch needs of a setup that is covered."""

    setup: Setup

    def at(self, micro_batch_size: int) -> int:
        return _peak(self.setup, micro_batch_size)

    def largest(self, limit_bytes: float) -> int:
        fits, fails = 0, MOST_SEQUENCES + 1
        while fits + 1 < fails:
            middle = (fits + fails) // 2
            if self.at(middle) <= limit_bytes:
                fits = middle
            else:
                fails = middle
        return fits


class EvaluationNeed(WrittenNeed):
    """What an eager evaluation needs besides the weights."""

    def at(self, micro_batch_size: int) -> int:
        step = _EagerStep(self.setup, micro_batch_size)
        for _ in range(self.setup.shape.n_layer):  # autocast keeps them until the end
            step.take_all(step.cast("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"))
        step.evaluate()
        return Course(step.events).peak_bytes


@cache
def _peak(setup: Setup, micro_batch_size: int) -> int:
    return write_down(setup, micro_batch_size).peak_bytes


def saved_by_8_bits(setup: Setup) -> int:
    """What 8-bit moments take less than 32-bit ones."""
    wide, narrow = (_Step(replace(setup, optimizer_bits=bits), 1) for bits in (32, 8))
    for step in (wide, narrow):
        step.update()
    return wide.allocated_bytes - narrow.allocated_bytes


def held_bytes(setup: Setup) -> int:
    """All weights, gradients and moments that are on a card."""
    step = _with_gradients(setup)
    step.update()
    return step.allocated_bytes


def update_bytes(setup: Setup) -> int:
    """What an update needs, with all weights, gradients and moments, but without activations."""
    step = _with_gradients(setup)
    step.update()
    return Course(step.events).peak_bytes


def _with_gradients(setup: Setup) -> "_Step":
    step = (_ShardedStep if setup.shard else _Step)(setup, 1)
    step.build()
    step.all_gradients()
    return step


class _Tensor(NamedTuple):
    shape: tuple[int, ...]
    dtype: str
    op: str
    code: str = ""  # a piece of the line that makes it
    part: str = ""  # of the model


@dataclass
class _Kept:
    """What a pass keeps: of tokens, of each block, after the last of them, of the loss."""

    tokens: list[Buffer] = field(default_factory=list)
    blocks: list[tuple[list[Buffer], list[Buffer]]] = field(default_factory=list)
    end: list[Buffer] = field(default_factory=list)
    loss: list[Buffer] = field(default_factory=list)


# Pieces of the lines that make what is large.
_EMBEDDED, _POSITIONED = "x = self.transformer.wte(idx)", "x, turns = x + self.transformer.wpe"
_NORMED = "x, turns = self.transformer.ln_e(x)"
_QKV, _TURNED, _VALUES = "heads = self.c_attn(x)", "y = _turned(wide * scale", "v.contiguous()"
_ATTENTION, _PROJECTED = "y = F.scaled_dot_product_attention(", "y = self.c_proj("
_MLP, _SQUARED = "x = self.c_proj(self.act(self.c_fc(x)))", "y = F.relu(x)"
_AFTER_ATTENTION, _AFTER_MLP = "x = x + self.attn(", "return x + self.mlp("
_LAST_NORM = "return self.transformer.ln_f(x)"
_INPUTS, _HEAD = "inputs = hidden.to(dtype", "weight_cast = weight.to("
_D_HEAD, _LOGITS = "d_weight = weight.new_empty", "logits = F.linear(inputs[chunk]"
_WIDENED, _SLOPE = "log_probs = logits.float()", "slope = log_probs.clone()"
_SCALED = "return loss_sum / (targets >= 0).sum()"
_OPAQUE = "compute(inputs, weight"
_GATHERED, _WHOLE = "gathered weights", "whole gradients"  # components


class _Step:
    """Writes the events of a step; here is what is the same in every stage."""

    def __init__(self, setup: Setup, B: int):
        shape = setup.shape
        self.setup, self.shape = setup, shape
        self.B, self.T, self.N = B, shape.block_size, B * shape.block_size
        self.C, self.H, self.V = shape.n_embd, shape.n_head, shape.vocab_size
        self.is_half = setup.dtype != "float32"
        self.product = "addmm" if shape.bias else "mm"
        self.weights = shape.weights()
        self.stored = self.weights  # on this card
        self.gradients: dict[str, Buffer] = {}
        self.has_state = False
        self.events: list[Event] = []
        self.phase = "build"

    @property
    def allocated_bytes(self) -> int:
        """What is there now."""
        *_, allocated = Course(self.events).allocated()
        return allocated

    def take(self, tensor: _Tensor, component: str = "temporaries") -> Buffer:
        shape, dtype, op, code, part = tensor
        size = rounded(prod(shape) * BYTES[dtype])
        buffer = Buffer(size, shape, dtype, op, _line_of(code), component, part)
        self.events.append(Event(buffer, True, self.phase))
        return buffer

    def take_all(self, tensors: Iterable[_Tensor], component: str = "activations") -> list[Buffer]:
        return [self.take(tensor, component) for tensor in tensors]

    def give(self, buffers: Iterable[Buffer]) -> None:
        self.events += [Event(buffer, False, self.phase) for buffer in buffers]

    def pass_by(self, *tensors: _Tensor) -> None:
        """Take and give back what is there for a moment."""
        self.give(self.take_all(tensors, "temporaries"))

    # Kinds of tensors

    def stream(self, op: str, code: str = "", part: str = "norms") -> _Tensor:
        """What blocks add to, or its gradient."""
        return _Tensor((self.B, self.T, self.C), "float32", op, code, part)

    def result(self, op: str, code: str = "", part: str = "", *, times: int = 1) -> _Tensor:
        """What products take and give, or its gradient."""
        return _Tensor((self.N, times * self.C), self.setup.dtype, op, code, part)

    def numbers(self, op: str, part: str, *, each: int = 1) -> _Tensor:
        """A few for each token."""
        return _Tensor((self.N, each), "float32", op, "", part)

    def table(self, op: str, code: str = "", dtype: str = "float32") -> _Tensor:
        """As large as the embedding."""
        return _Tensor((self.V, self.C), dtype, op, code)

    def cast(self, *names: str) -> list[_Tensor]:
        """Weights of a block in half precision."""
        shapes = [self.weights[f"transformer.h.0.{name}.weight"] for name in names]
        return [_Tensor(shape, self.setup.dtype, "_to_copy") for shape in shapes if self.is_half]

    def mask(self, part: str) -> list[_Tensor]:
        """Of dropout, in bytes."""
        mask = _Tensor((self.N, self.C), "uint8", "native_dropout", "", part)
        return [mask] if self.shape.dropout else []

    # What a block keeps

    def attention(self) -> list[_Tensor]:
        """Its input, queries, keys and values, their result, a sum for each head and token."""
        part, width = "attention", self.shape.head_width
        padded = -(-width // 8) * 8 if self.setup.attention == "flash" else width
        heads = _Tensor((self.N, self.H * padded), self.setup.dtype, "pad", _ATTENTION, part)
        kept = [self.result("_to_copy", _QKV, part)]
        if self.shape.is_modern:
            turned = self.result("_to_copy", _TURNED, part)
            kept += 2 * [turned, self.numbers("rsqrt", part, each=self.H)]
            kept += [self.result("clone", _VALUES, part)]
        elif padded == width:
            kept += [self.result(self.product, _QKV, part, times=3)]
        if padded > width:
            kept += 3 * [heads] + [self.result("clone", _PROJECTED, part)]
        kept += [heads._replace(op="attention"), self.numbers("attention", part, each=self.H)]
        return kept + self.mask(part)

    def mlp(self) -> list[_Tensor]:
        """Its input, the product of that if the activation does not tell its slope by itself."""
        wide = self.result(self.product, _MLP, "MLP", times=4)
        products = [] if self.shape.is_modern else [wide]
        is_own = self.shape.is_modern and not self.setup.compiled
        inputs = self.result("_to_copy", _MLP, "MLP")
        act = wide._replace(op="act", code=_SQUARED if is_own else _MLP)
        return [inputs, *products, act, *self.mask("MLP")]

    def products(self) -> tuple[list[_Tensor], list[_Tensor]]:
        """What cannot be had again but by a product, of attention and of the MLP."""
        attention, mlp = "attention", "MLP"
        return [
            self.result(self.product, _QKV, attention, times=3),
            self.result("attention", _ATTENTION, attention),
            self.numbers("attention", attention, each=self.H),
            self.result(self.product, _PROJECTED, attention),
        ], [
            self.result(self.product, _MLP, mlp, times=4),
            self.result(self.product, _MLP, mlp),
        ]

    # A step

    def build(self) -> None:
        for shape in self.stored.values():
            self.take(_Tensor(shape, "float32", "empty"), "weights")
        if self.shape.is_modern:
            turns = _Tensor((2, self.T, 1, self.shape.head_width // 2), "float32", "stack")
            self.take(turns, "weights")
        if self.setup.dtype == "float16":  # the scale and its tracker
            self.take_all(2 * [_Tensor((1,), "float32", "full", "", "loss scale")])
        if self.has_buckets:
            for name in self.weights:
                self.gradient(name)

    @property
    def has_buckets(self) -> bool:
        """Gradients that processes sum are parts of buffers that last as long as the run."""
        return self.setup.world > 1 and not self.setup.shard

    def learn(self) -> None:
        for _ in range(2):
            self.phase = "forward"
            kept = self.forward()
            self.phase = "backward"
            self.backward(kept)
        self.phase = "optimiser"
        self.update()
        self.phase = "between steps"
        if not self.has_buckets:
            self.give(self.gradients.values())
            self.gradients = {}

    def forward(self) -> _Kept:
        raise NotImplementedError

    def backward(self, kept: _Kept) -> None:
        raise NotImplementedError

    def gradient(self, name: str) -> None:
        """A new gradient stays; another one is added to it."""
        made = _Tensor(self.weights[name], "float32", "gradient")
        if name in self.gradients:
            self.pass_by(made)
        else:
            self.gradients[name] = self.take(made, "gradients")

    def all_gradients(self) -> None:
        """As they are when all passes are done."""
        for name in self.weights:
            self.gradient(name)

    def update(self) -> None:
        if not self.has_state:
            self.has_state = True
            for name, shape in self.stored.items():
                self.take_all(self._state(name, shape), "optimiser state")
        for name, shape in self.stored.items():
            if self._has_8_bits(name, shape):  # both moments in 32 bits, one weight at a time
                moment, scales = self._moment(shape)
                self.pass_by(scales, scales, moment, moment)
        if self.setup.optimizer == "muon":
            for matrices, rows, columns in self._muon_batches():
                batch = _Tensor((matrices, rows, columns), "bfloat16", "baddbmm")
                squares = batch._replace(shape=(matrices, rows, rows))
                others = [batch] if self.setup.world > 1 else []  # which another process finds
                self.pass_by(batch, squares, squares, batch, *others)

    def _state(self, name: str, shape: tuple[int, ...]) -> list[_Tensor]:
        moment, scales = self._moment(shape)
        if self._is_muons(name, shape):
            return [moment]
        moments = [moment]
        if self._has_8_bits(name, shape):
            values = scales._replace(shape=(_PER_SCALE,))
            moments = [moment._replace(dtype="uint8"), scales, values]
        return [_Tensor((1,), "float32", "zeros"), *moments, *moments]  # and a count of steps

    def _moment(self, shape: tuple[int, ...]) -> tuple[_Tensor, _Tensor]:
        """As large as its weight, and the scales that it has in 8 bits."""
        scales = _Tensor((prod(shape) // _PER_SCALE,), "float32", "zeros")
        return _Tensor(shape, "float32", "zeros_like"), scales

    def _is_muons(self, name: str, shape: tuple[int, ...]) -> bool:
        return self.setup.optimizer == "muon" and len(shape) == 2 and ".h." in name

    def _has_8_bits(self, name: str, shape: tuple[int, ...]) -> bool:
        if self.setup.optimizer_bits == 32 or self._is_muons(name, shape):
            return False
        return prod(shape) >= _FEWEST_OF_8_BITS and prod(shape) % _PER_SCALE == 0

    def _muon_batches(self) -> Iterator[tuple[int, int, int]]:
        """Matrices of a shape, as many at once as learning/muon.py takes."""
        L, C = self.shape.n_layer, self.C
        for matrices, rows, columns in ((4 * L, C, C), (2 * L, C, 4 * C)):
            share = -(-matrices // self.setup.world)
            most = max(min(MOST_NUMBERS // (rows * columns), share), 1)
            for start in range(0, matrices, most):
                yield min(most, matrices - start), rows, columns

    def evaluate(self) -> None:
        """Nothing is kept: what is there at once is in a block and in the loss."""
        self.phase = "forward"
        streams = self.take_all(2 * [self.stream("add")], "temporaries")
        if self.shape.is_modern:  # keys are turned in float32, beside queries that were
            qkv, turned = self.result(self.product, _QKV, times=3), self.result("_to_copy", _TURNED)
            self.pass_by(*4 * [self.stream("native_layer_norm")], qkv, turned)
        up = self.result(self.product, _MLP, times=4)
        self.pass_by(self.stream("native_layer_norm"), up, up)
        inputs = self.take(self.result("_to_copy", _INPUTS), "logits and loss")
        self.give([*self.chunk(with_gradients=False), inputs, *streams])

    def chunk(self, *, with_gradients: bool) -> list[Buffer]:
        """The loss of a chunk of tokens; what is left of it is the gradient of the head."""
        of_loss, rows = "logits and loss", chunk_rows(self.C, fused=self.setup.compiled)
        cast = self.table("_to_copy", _HEAD, self.setup.dtype)
        for_a_while = self.take_all(self.is_half * [cast], "weights in half precision")
        of_head = [self.table("new_empty", _D_HEAD), *self._head_bias()]
        left = self.take_all(with_gradients * of_head, of_loss)
        logits = _Tensor((min(rows, self.N), self.V), self.setup.dtype, self.product, _LOGITS)
        for_a_while += [self.take(logits, of_loss)]
        if not self.setup.compiled and self.is_half:
            for_a_while += [self.take(logits._replace(dtype="float32", code=_WIDENED), of_loss)]
        elif not self.setup.compiled and self.shape.is_modern:
            for_a_while += [self.take(logits._replace(code=_SLOPE), of_loss)]
        self.give(for_a_while)
        return left

    def _head_bias(self) -> list[_Tensor]:
        """The gradient of a bias, where the head has one."""
        has_bias = "lm_head.bias" in self.weights
        return has_bias * [_Tensor((self.V,), "float32", "new_empty", _D_HEAD)]


class _EagerStep(_Step):
    """Op by op, as the model is written."""

    def forward(self) -> _Kept:
        self.enter()
        kept = _Kept(tokens=self.take_all(self._tokens()))
        first = ("mul", _NORMED) if self.shape.is_modern else ("add", _POSITIONED)
        stream = self.take(self.stream(*first), "activations")
        repeated_casts = []
        for layer in range(self.shape.n_layer):
            self.enter(layer)
            attention, mlp = self._kept_in_block(layer)
            names = ("attn.c_attn", "attn.c_proj"), ("mlp.c_fc", "mlp.c_proj")
            casts = [self.take_all(self.cast(*n), "weights in half precision") for n in names]
            if self._mode(layer) == "off":
                attention, mlp = attention + casts[0], mlp + casts[1]
            else:  # which autocast keeps until the end of the forward pass
                repeated_casts += casts[0] + casts[1]
            kept.blocks.append(([stream, *attention], mlp))
            stream = self.take(self.stream("add", _AFTER_MLP), "activations")
            self.leave(layer)
        kept.end = [stream, *self.take_all(self._statistics("embedding"))]
        normed = self.take(self.stream("native_layer_norm", _LAST_NORM))
        inputs = self.take(self.result("_to_copy", _INPUTS), "logits and loss")
        kept.loss = [inputs, *self.chunk(with_gradients=True)]
        self.give([normed, *repeated_casts])
        self.leave()
        return kept

    # What only sharded weights have done to them: a block's, or those outside of blocks

    def enter(self, layer: int | None = None) -> None:
        pass

    def leave(self, layer: int | None = None) -> None:
        pass

    def enter_again(self, layer: int | None = None) -> None:
        """In the backward pass."""

    def reduce(self, layer: int | None = None) -> None:
        """Gradients, which are complete."""

    def _tokens(self) -> list[_Tensor]:
        """Their ids and targets, and what enters a norm of their embedding."""
        kept = 2 * [_Tensor((self.N,), "int64", "randint", "", "embedding")]
        if self.shape.is_modern:
            kept += [self.stream("embedding", _EMBEDDED, "embedding")]
            kept += self._statistics("embedding")
        return kept + self.mask("embedding")

    def _statistics(self, part: str = "norms") -> list[_Tensor]:
        """Mean and deviation of what a norm gets; an RMSNorm has no mean."""
        return (2 - self.shape.is_modern) * [self.numbers("native_layer_norm", part)]

    def _mode(self, layer: int) -> str:
        mode = self.setup.recompute
        return {"alternate": "off" if layer % 2 else "block"}.get(mode, mode)

    def _block(self) -> tuple[list[_Tensor], list[_Tensor]]:
        """All that the backward pass needs of a block but for what enters it."""
        middle = self.stream("add", _AFTER_ATTENTION)
        statistics = self._statistics()
        return statistics + self.attention(), [middle, *statistics, *self.mlp()]

    def _kept_in_block(self, layer: int) -> tuple[list[Buffer], list[Buffer]]:
        mode, nothing = self._mode(layer), ([], [])
        tensors = {"off": self._block(), "selective": self.products(), "block": nothing}[mode]
        attention, mlp = tensors
        return self.take_all(attention), self.take_all(mlp)

    def backward(self, kept: _Kept) -> None:
        self.enter_again()
        wide = self.take_all(self.is_half * [self.stream("_to_copy", _SCALED)], "logits and loss")
        d_hidden = self.take(self.stream("mul", _SCALED), "logits and loss")
        self.give(wide)
        if self.shape.is_modern:
            self._gradients_of_head()
        else:
            d_head = self.take(self.table("mul", _SCALED), "logits and loss")
        self.give(kept.loss)
        d_stream = self.take(self.stream("native_layer_norm_backward"))
        self.give([d_hidden, *kept.end])
        for layer in reversed(range(self.shape.n_layer)):
            self.enter_again(layer)
            self._backward_block(layer, *kept.blocks[layer])
            self.reduce(layer)
        if self.shape.is_modern:
            self.pass_by(self.stream("native_layer_norm_backward"))
            self.gradient("transformer.wte.weight")
            self.give([d_stream, *kept.tokens])
        else:
            self.gradient("transformer.wpe.weight")
            dense = self.take(self.table("embedding_dense_backward"))
            self.give([d_stream])
            self.gradient("transformer.wte.weight")  # the sum of both
            self.give([d_head, dense, *kept.tokens])
        self.reduce()

    def _gradients_of_head(self) -> None:
        self.gradient("lm_head.weight")
        if "lm_head.bias" in self.weights:
            self.gradient("lm_head.bias")

    def _backward_block(self, layer: int, attention: list[Buffer], mlp: list[Buffer]) -> None:
        """The stream's gradient is there all the time."""
        if self._mode(layer) != "off":
            attention, mlp = self._repeated(layer, attention, mlp)
        names = [f"transformer.h.{layer}.{name}" for name in ("mlp.c_proj", "mlp.c_fc")]
        up = self.result(self.product, _MLP, times=4)
        if self.is_half or self.shape.dropout:
            self.pass_by(self.result("_to_copy"), up)
        # Of the activation its gradient comes first, then what enters it gets one.
        d_up = self.take(up)
        self._gradients_of(names[0])
        if self.shape.is_modern:
            self.pass_by(up)
        self.give([d_up])
        self._gradients_of(names[1])
        self.pass_by(*2 * [self.stream("native_layer_norm_backward")])
        self.give(mlp)
        self.pass_by(*4 * [self.result("attention_backward")], self._sums())
        names = [f"transformer.h.{layer}.{name}" for name in ("attn.c_proj", "attn.c_attn")]
        for name in names:
            self._gradients_of(name)
        self.give(attention)

    def _gradients_of(self, name: str) -> None:
        if self.is_half:
            self.pass_by(_Tensor(self.weights[f"{name}.weight"], self.setup.dtype, "mm"))
        for kind in ("weight", "bias"):
            if f"{name}.{kind}" in self.weights:
                self.gradient(f"{name}.{kind}")

    def _repeated(self, layer: int, *kept: list[Buffer]) -> list[list[Buffer]]:
        """All of a block, of which parts are computed again, but for the product at its end.

        Products that were kept for this alone are gone then.
        """
        products = self.products() if self._mode(layer) == "selective" else ([], [])
        casts = self.cast("attn.c_attn", "attn.c_proj"), self.cast("mlp.c_fc", "mlp.c_proj")
        all_of_it = []
        for had, made, needed, cast in zip(kept, products, self._block(), casts, strict=True):
            again = [one for one in needed if one not in made] + cast
            of_products = zip(had[len(had) - len(made) :], made, strict=True)
            used_up = [buffer for buffer, one in of_products if one not in needed]
            used_up = used_up if made is products[0] else used_up[:-1]
            left = [buffer for buffer in had if buffer not in used_up]
            all_of_it.append(left + self.take_all(again, "temporaries"))
            self.give(used_up)
        return all_of_it

    def _sums(self) -> _Tensor:
        """In float32, for the gradients of queries."""
        return _Tensor((self.N, self.C + self.H), "float32", "attention_backward")


class _ShardedStep(_EagerStep):
    """Each process holds a part of everything, and has one block's weights whole at a time.

    As torch's fully_shard does it: blocks are gathered in the precision of their products, norms
    and what is outside of blocks in float32; gradients are reduced in float32 after each pass.
    While a block is computed, forward the buffer it came in is still there, backward the next's.
    """

    def __init__(self, setup: Setup, B: int):
        super().__init__(setup, B)
        self._rest, self._blocks = groups_of(self.shape, setup.world)
        self.stored = {name: part_of(size, setup.world) for name, size in self.weights.items()}
        self._held: list[Buffer] = []  # the weights of a block
        self._held_rest: list[Buffer] = []
        self._gathered: list[Buffer] = []  # what they came in
        self._made: dict[int | None, list[Buffer]] = {}  # gradients, whole, by block
        self._sent: list[Buffer] = []  # those that are being reduced

    def cast(self, *names: str) -> list[_Tensor]:
        return []  # they come in half precision

    def enter(self, layer: int | None = None) -> None:
        if layer is None and self._held_rest:  # an evaluation has left them
            return
        group = self._group(layer)
        gathered = self._gather(group)
        held = self._unpack(group)
        if layer is None:
            self._held_rest = held
        else:
            self._held = held
        self.give(self._gathered)
        self._gathered = [gathered]

    def leave(self, layer: int | None = None) -> None:
        if layer is None:
            self.give(self._gathered)
            self._gathered = []
        else:
            self.give(self._held)

    def enter_again(self, layer: int | None = None) -> None:
        """And have the next block come meanwhile."""
        following = self.shape.n_layer - 1 if layer is None else layer - 1
        if layer is not None:
            self._held = self._unpack(self._group(layer))
            self.give(self._gathered)
        self._gathered = [self._gather(self._group(following))] if following >= 0 else []

    def reduce(self, layer: int | None = None) -> None:
        """Let weights go, send gradients and keep this process's part of their sum.

        The buffer of those sent before is there until then.
        """
        group = self._group(layer)
        self.give(self._held_rest if layer is None else self._held)
        self.give(self._sent)
        flat = _Tensor((group.numbers,), "float32", "reduce_scatter")
        self._sent = [self.take(flat, _WHOLE)]
        self.give(self._made.pop(layer))
        self._keep_part(group)
        if layer is None:
            self.give(self._sent)
            self._held_rest, self._sent = [], []

    def gradient(self, name: str) -> None:
        """Whole, until its block is reduced."""
        layer = block_of(name)
        whole = _Tensor(self.weights[name], self._dtype(self._group(layer)), "gradient")
        self._made.setdefault(layer, []).append(self.take(whole, _WHOLE))

    def all_gradients(self) -> None:
        for group in (*self._blocks, self._rest):
            self._keep_part(group)

    def evaluate(self) -> None:
        self.phase = "forward"
        self.enter()
        for layer in range(min(self.shape.n_layer, 2)):  # the second has the first one's buffer
            self.enter(layer)
            self.leave(layer)
        super().evaluate()
        self.leave()

    def _gradients_of(self, name: str) -> None:
        for kind in ("weight", "bias"):
            if f"{name}.{kind}" in self.weights:
                self.gradient(f"{name}.{kind}")

    def _group(self, layer: int | None) -> Group:
        return self._rest if layer is None else self._blocks[layer]

    def _dtype(self, group: Group) -> str:
        return self.setup.dtype if group.is_block else "float32"

    def _gather(self, group: Group) -> Buffer:
        """All parts, one after the other."""
        return self.take(_Tensor((group.numbers,), self._dtype(group), "all_gather"), _GATHERED)

    def _unpack(self, group: Group) -> list[Buffer]:
        """Weight by weight."""
        parts = (part_of(size, group.world) for size in group.weights.values())
        dtype, world = self._dtype(group), group.world
        whole = (_Tensor((world * rows, *rest), dtype, "unpack") for rows, *rest in parts)
        return self.take_all(whole, _GATHERED)

    def _keep_part(self, group: Group) -> None:
        part = _Tensor((group.part_numbers,), "float32", "reduce_scatter")
        name = next(iter(group.weights))
        if name in self.gradients:
            self.pass_by(part)  # added
        else:
            self.gradients[name] = self.take(part, "gradients")


class _CompiledStep(_Step):
    """Two graphs: the first keeps what the second needs, all gradients arrive with its end."""

    def forward(self) -> _Kept:
        kept, budget = _Kept(), self.setup.activation_memory_budget
        ids = 2 * [_Tensor((self.N,), "int64", "randint", "", "embedding")]
        kept.tokens = self.take_all(ids + self._embedded(budget))
        for _ in range(self.shape.n_layer):
            attention, mlp = self._block(budget)
            kept.blocks.append((self.take_all(attention), self.take_all(mlp)))
        casts = []
        if budget == 1:
            names = "attn.c_attn attn.c_proj mlp.c_fc mlp.c_proj".split()
            cast = self.shape.n_layer * self.cast(*names)
            kept.tokens += self.take_all(cast, "weights in half precision")
            kept.end = self.take_all(self._at_the_end())
        inputs = self.take(self.result("where", _INPUTS), "logits and loss")
        d_inputs = self.take(self.result("loss_sum", _OPAQUE), "logits and loss")
        kept.loss = [d_inputs, *self.chunk(with_gradients=True)]
        self.give([inputs, *casts])
        return kept

    def _embedded(self, budget: float) -> list[_Tensor]:
        """What is kept of the embedding of tokens, and of positions where they have one."""
        positions = _Tensor((self.T, self.C), "float32", "embedding", _POSITIONED, "embedding")
        tokens = self.stream("embedding", _EMBEDDED, "embedding")
        if self.shape.is_modern:
            return [tokens] if budget == 1 else []
        return {1.0: [positions, *self.mask("embedding")], 0.7: [positions, tokens]}.get(budget, [])

    def _at_the_end(self) -> list[_Tensor]:
        deviation = self.numbers("rsqrt", "embedding")
        normed = self.stream("mul", _LAST_NORM, "embedding")
        return [deviation] if self.shape.is_modern else [deviation, normed]

    def _block(self, budget: float) -> tuple[list[_Tensor], list[_Tensor]]:
        if budget == 1:
            first, second = (self.stream("mul", code) for code in (_AFTER_MLP, _AFTER_ATTENTION))
            deviation = self.numbers("rsqrt", "norms")
            return [first, deviation, *self.attention()], [second, deviation, *self.mlp()]
        attention, mlp = self.products()
        qkv, result, sums, projected = attention
        if self.shape.is_modern:
            values = self.result("clone", _VALUES, "attention")
            scale = self.numbers("mean", "attention", each=self.H)
            means = [self.numbers("mean", "norms")]
            return [qkv, values, scale, scale, projected, *means], [*mlp, *means]
        if budget == 0.7:
            means = 2 * [self.numbers("var_mean", "norms")]
            return [qkv, result, sums, projected, *means], [*mlp, *means]
        return [qkv, projected], mlp

    def backward(self, kept: _Kept) -> None:
        made = [self.take(self.table("mul", _SCALED))]
        d_stream = self.take(self.stream("native_layer_norm_backward"))
        self.give([*kept.loss, *kept.end])
        again = self._computed_again()
        for layer in reversed(range(self.shape.n_layer)):
            attention, mlp = kept.blocks[layer]
            within = 4 * self.shape.bias + 4 * len(again) + self.is_half
            self.pass_by(*within * [self.result("mm")])
            made += self._gradients_of(layer, "ln_2", "mlp.c_fc", "mlp.c_proj")
            self.give(mlp)
            self.pass_by(*4 * [self.result("attention_backward")])
            made += self._gradients_of(layer, "ln_1", "attn.c_attn", "attn.c_proj")
            self.give(attention)
        made += [self.take(self.table("embedding_dense_backward"))]
        if not self.shape.is_modern:
            made += [self.take(_Tensor((self.T, self.C), "float32", "sum"))]
        self.give([d_stream, *kept.tokens, *made, *again])
        for name in self.weights:
            if name not in self.gradients:
                self.gradient(name)

    def _computed_again(self) -> list[Buffer]:
        """Streams, which a budget below 1 does not keep: some, less the products they consist of.

        Inductor stores one that would be read from more than four places, as every second is.
        """
        is_whole = self.setup.activation_memory_budget == 1
        streams = _Tensor((self.shape.n_layer, self.N, self.C), "uint8", "add", _AFTER_MLP)
        return [] if is_whole else [self.take(streams)]

    def _gradients_of(self, layer: int, *names: str) -> list[Buffer]:
        """New ones, beside the old, until the graph ends."""
        prefixes = tuple(f"transformer.h.{layer}.{name}." for name in names)
        shapes = [shape for name, shape in self.weights.items() if name.startswith(prefixes)]
        return self.take_all((_Tensor(shape, "float32", "mm") for shape in shapes), "temporaries")


@cache
def _line_of(code: str) -> str:
    """Where a piece of the model's code stands, as "model.py:137"."""
    if not code:
        return ""
    for path in (PROJECT / "model.py", PROJECT / "nanofit/learning/loss.py"):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if code in line:
                return f"{path.name}:{number}"
    raise LookupError(f"no line of the model has {code!r}")
