"""The memory of a compiled model: its forward and backward graphs, and when each buffer lives.

torch.compile splits a step into a forward and a backward graph and fuses what it can. Of a fused
kernel only what it reads and writes exists: results of products, attention and reductions, what
those read, and what leaves the graph. Everything else is computed on the fly.
"""

import operator
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.utils.flop_counter import (
    register_flop_formula,
    sdpa_backward_flop_count,
    sdpa_flop_count,
)

from nanofit.learning.compiler import keep_loss
from nanofit.memory.allocator import rounded
from nanofit.memory.trace import (
    Buffer,
    MemoryTrace,
    Origin,
    dtype_name,
    origin_of_call,
)

_SCATTERS = {"_unsafe_masked_index_put_accumulate", "index_put"}
_OPAQUE = _SCATTERS | {
    "mm",
    "addmm",
    "bmm",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention_for_cpu_backward",
    "embedding_dense_backward",
}
_MANY_READS = 4  # inductor stores a value used twice rather than repeat as many reads
_GRADIENTS = "tangents_"  # how a backward graph names what comes from above: 1 is for output 1


@register_flop_formula(torch.ops.aten._scaled_dot_product_flash_attention_for_cpu)
def _attention_flops(queries, keys, values, *_, **__) -> int:
    """torch knows this of attention on CUDA alone, and takes to repeat it on a CPU to be free."""
    return sdpa_flop_count(queries, keys, values)


@register_flop_formula(torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward)
def _attention_backward_flops(d_out, queries, keys, values, *_, **__) -> int:
    return sdpa_backward_flop_count(d_out, queries, keys, values)


class Graphs(NamedTuple):
    forward: fx.Graph
    backward: fx.Graph
    evaluation: fx.Graph


def compiled_graphs(
    function: Callable[..., tuple[Tensor, ...]],
    inputs: Sequence[Tensor],
    *,
    weights: int,
    outputs: int,
    activation_memory_budget: float,
) -> Graphs:
    """The graphs that inductor would be given, split as it splits them. All private APIs are here.

    The first `weights` of the inputs are there anyway. Each node's `stack_trace` is the line of the
    model it comes from.
    """
    from torch._functorch import config
    from torch._functorch.aot_autograd import aot_export_joint_simple
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table

    # torch.compile says of itself that it is compiling, and the loss asks.
    with _LinesOfCalls(), torch.compiler._compile_session_context():
        joint, evaluation = (
            aot_export_joint_simple(
                function, tuple(inputs), trace_joint=joint, decompositions=select_decomp_table()
            )
            for joint in (True, False)
        )
    joint_inputs = [node.meta["val"] for node in joint.graph.nodes if node.op == "placeholder"]
    keep_loss(joint.graph)
    with config.patch(activation_memory_budget=activation_memory_budget):
        forward, backward = min_cut_rematerialization_partition(
            joint,
            joint_inputs,
            compiler="inductor",
            num_fwd_outputs=outputs,
            static_lifetime_input_indices=list(range(weights)),
        )
    return Graphs(forward.graph, backward.graph, evaluation.graph)


class _LinesOfCalls(torch.overrides.TorchFunctionMode):
    """Writes onto each node of a graph which line of the model called for it."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        with fx.traceback.preserve_node_meta():
            fx.traceback.set_stack_trace([" ".join(origin_of_call())])
            return function(*args, **(kwargs or {}))


@dataclass
class Birth:
    """A buffer that a kernel writes, and what is freed once the kernel has run."""

    key: str
    value: Tensor
    op: str
    origin: Origin
    call: tuple[Any, Any] | None  # the kernel and its results, once all of these are there
    written_over: str | None = None  # a buffer of the same size that nobody else needs any more
    frees: list[str] = field(default_factory=list)


class GraphLife:
    """When the buffers of one graph are born and freed.

    `aliases` tells which buffer an input is in, where inputs share one. `held` are buffers that
    somebody else keeps, as weights are.
    """

    def __init__(self, graph: fx.Graph, aliases: dict[str, str], held: set[str]):
        self._nodes = list(graph.nodes)
        self._bases = self._find_bases(aliases)
        self.buffers = {node.name: self._key(base, aliases) for node, base in self._bases.items()}
        results = [node for node in self._nodes[-1].args[0] if node is not None]
        self._outputs = {self._bases[node] for node in results}
        self._stored = self._find_stored()
        self.births = list(self._find_births(aliases, held))

    def _find_bases(self, aliases: dict[str, str]) -> dict[fx.Node, fx.Node]:
        """For each value the first one in the same buffer."""
        bases: dict[fx.Node, fx.Node] = {}
        first: dict[str, fx.Node] = {}
        for node in self._nodes:
            if node.op == "placeholder":
                bases[node] = first.setdefault(self._key(node, aliases), node)
            else:
                bases[node] = bases[node.args[0]] if _is_view(node) else node
        return bases

    @staticmethod
    def _key(node: fx.Node, aliases: dict[str, str]) -> str:
        return aliases.get(node.name, node.name)

    def _inputs(self, node: fx.Node) -> list[fx.Node]:
        return [self._bases[one] for one in _producer(node).all_input_nodes]

    def _find_stored(self) -> set[fx.Node]:
        """The values that exist in memory, rather than within a kernel only."""
        stored = {self._bases[node] for node in self._nodes if node.op == "placeholder"}
        stored |= self._outputs
        for node in self._nodes:
            if _is_opaque(node):
                stored |= {node, *self._inputs(node)}
        reads: dict[fx.Node, set[fx.Node]] = {}
        for node in filter(_is_value, self._nodes):
            parts = [
                {one} if one in stored else reads.get(one, set()) for one in self._inputs(node)
            ]
            reads[node] = set().union(*parts)
            is_worth_storing = len(node.users) > 1 and len(reads[node]) >= _MANY_READS
            if _reduces(node) or is_worth_storing:
                stored.add(node)
        return stored

    def _buffers_read(self, node: fx.Node) -> set[fx.Node]:
        buffers, pending = set(), self._inputs(node)
        while pending:
            value = pending.pop()
            if value in self._stored:
                buffers.add(value)
            else:
                pending += self._inputs(value)
        return buffers

    def _find_births(self, aliases: dict[str, str], held: set[str]) -> Iterator[Birth]:
        born = [node for node in self._nodes if node in self._stored and _is_value(node)]
        reads = {node: self._buffers_read(node) for node in born}
        last_reader = {buffer: node for node in born for buffer in reads[node]}
        for node in born:
            birth = _birth(node)
            for buffer in sorted({*reads[node], node}, key=lambda one: one.name):
                key = self._key(buffer, aliases)
                is_needed = buffer in self._outputs or key in held
                if is_needed or last_reader.get(buffer, node) is not node:
                    continue
                if birth.written_over is None and _can_overwrite(node, buffer):
                    birth.written_over = key
                else:
                    birth.frees.append(key)
            yield birth


def _birth(node: fx.Node) -> Birth:
    producer = _producer(node)
    last_result = list(producer.users)[-1] if producer is not node else node
    call = (producer.target, producer.meta["val"]) if node is last_result else None
    line, _, function = node.meta.get("stack_trace", "").partition(" ")
    origin = Origin(line, re.sub(r"\W.*", "", function))
    return Birth(node.name, node.meta["val"], str(producer.target), origin, call)


def _can_overwrite(node: fx.Node, buffer: fx.Node) -> bool:
    if buffer is node or _size(buffer) != _size(node) or buffer.name.startswith(_GRADIENTS):
        return False
    return not _is_opaque(node) or _producer(node).target._opname in _SCATTERS


def _size(node: fx.Node) -> int:
    return rounded(node.meta["val"].numel() * node.meta["val"].element_size())


def _producer(node: fx.Node) -> fx.Node:
    """The call a value comes from: another node for one of several results."""
    return node.args[0] if node.target is operator.getitem else node


def _is_value(node: fx.Node) -> bool:
    """Whether a node computes a tensor of its own."""
    if node.op != "call_function" or _is_view(node):
        return False
    return isinstance(node.meta.get("val"), Tensor)


def _is_view(node: fx.Node) -> bool:
    target = _producer(node).target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    is_alias = any(result.alias_info is not None for result in target._schema.returns)
    return is_alias or target._opname == "_unsafe_view"


def _is_opaque(node: fx.Node) -> bool:
    """Whether a kernel of its own computes a value, with which nothing is fused."""
    if not _is_value(node):
        return False
    target = _producer(node).target
    return target.namespace not in ("aten", "prims") or target._opname in _OPAQUE


def _reduces(node: fx.Node) -> bool:
    if node.target is torch.ops.aten.embedding.default:  # a look-up: part of the kernel it feeds
        return False
    inputs = [one.meta.get("val") for one in _producer(node).all_input_nodes]
    return any(one.numel() > node.meta["val"].numel() for one in inputs if isinstance(one, Tensor))


class CompiledStandIn:
    """Takes the place of a model's forward and backward pass, in memory alone.

    With `returns_logits` the caller keeps the logits until the next step, as nanoGPT's does.
    """

    def __init__(
        self,
        model: nn.Module,
        graphs: Graphs,
        trace: MemoryTrace,
        *,
        returns_logits: bool,
    ):
        self._trace, self._parameters = trace, list(model.parameters())
        forward, backward, evaluation = graphs
        inputs, placeholders = _inputs_of(forward), _inputs_of(backward)
        self._forward = GraphLife(forward, {}, inputs)
        self._evaluation = GraphLife(evaluation, {}, _inputs_of(evaluation))
        saved = {name: f"saved {key}" for name, key in self._forward.buffers.items()}
        aliases = {name: saved[name] for name in placeholders if name in saved}
        self._logits = saved[forward.output_node().args[0][0].name] if returns_logits else None
        self._zeros = f"{_GRADIENTS}1" if returns_logits else None
        gradients = placeholders - set(saved) - {self._zeros}
        held = {saved[name] for name in inputs} | gradients | {self._logits}
        self._backward = GraphLife(backward, aliases, held)
        results = backward.output_node().args[0]
        gradients = zip(results, self._parameters, strict=False)  # none for the tokens
        self._gradients = {self._backward.buffers[one.name]: weight for one, weight in gradients}
        self._kept_logits: Buffer | None = None

    def __call__(self, idx: Tensor, targets: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            for buffer in self._live(self._evaluation, {}, {}).values():
                self._trace.died(buffer)
            return torch.zeros(())
        return _Play.apply(self, *self._parameters)

    def forward(self) -> dict[str, Any]:
        """Live through the forward graph; return what it saves."""
        saved = self._live(self._forward, {}, {})
        saved = {f"saved {key}": buffer for key, buffer in saved.items()}
        if self._kept_logits:
            self._trace.died(self._kept_logits)
        self._kept_logits = saved.get(self._logits)
        return saved

    def backward(self, saved: dict[str, Any]) -> list[Tensor]:
        """Live through the backward graph; return the gradients of the parameters."""
        if self._kept_logits:
            saved[self._zeros] = self._trace.allocate(
                self._kept_logits.size_bytes,
                self._kept_logits.shape,
                self._kept_logits.dtype,
                "a zero gradient for the returned logits",
                Origin(function="loss"),
            )
        buffers = self._live(self._backward, saved, self._gradients)
        gradients = [buffers.pop(key) for key in self._gradients]
        for buffer in buffers.values():
            if buffer is not self._kept_logits:
                self._trace.died(buffer)
        return gradients

    def _live(
        self, life: GraphLife, buffers: dict[str, Any], gradients: dict[str, Tensor]
    ) -> dict[str, Any]:
        for birth in life.births:
            if birth.key in gradients:
                if birth.written_over:
                    self._trace.died(buffers.pop(birth.written_over))
                buffers[birth.key] = torch.empty_like(gradients[birth.key])
            elif birth.written_over:
                buffers[birth.key] = buffers.pop(birth.written_over)
            else:
                buffers[birth.key] = self._trace.allocate(
                    birth.value.numel() * birth.value.element_size(),
                    tuple(birth.value.shape),
                    dtype_name(birth.value.dtype),
                    birth.op,
                    birth.origin,
                )
            if birth.call:
                self._trace.workspace(*birth.call, birth.origin)
            for key in birth.frees:
                self._trace.died(buffers.pop(key))
        return buffers


def _inputs_of(graph: fx.Graph) -> set[str]:
    return {node.name for node in graph.nodes if node.op == "placeholder"}


class _Play(torch.autograd.Function):
    @staticmethod
    def forward(ctx, stand_in: CompiledStandIn, *parameters: Tensor) -> Tensor:
        ctx.stand_in, ctx.saved = stand_in, stand_in.forward()
        return torch.zeros(())

    @staticmethod
    def backward(ctx, _: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.stand_in.backward(ctx.saved)
