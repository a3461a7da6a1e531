"""UnitCode: a compile unit's forward, dgrad, wgrad and their autograd node; ranks take turns to compile."""

import functools
import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from graphmoe.ops import fp8_mlp, grouped_mlp  # noqa: F401  # registers the operations
from graphmoe.ops.gradients import (
    Gradient,
    PendingWeightGrads,
    begin,
    gather_weights,
    have_begun,
    report_added,
    rounded_sum,
)
from graphmoe.ops.replicas.exchange import when_at_owners
from graphmoe.runtime.compile.graphs import UnitGraphs
from graphmoe.runtime.compile.host_activations import HostActivations
from graphmoe.runtime.host.files import FileLock, dispensable
from graphmoe.runtime.launch.stamps import wait_for
from graphmoe.runtime.torch_compat import FakeTensorMode, compile_inference, make_fx
from graphmoe.segments import profiler_range

_COMPILED = "compiled"
Compiled = Callable[..., Sequence[Tensor]]
Gradients = tuple[list[Tensor | None], list[Tensor | None]]
"""(input gradients, weight gradients for autograd)."""
aten, prims, ops = torch.ops.aten, torch.ops.prims, torch.ops.graphmoe


def compile_graph(graph: fx.GraphModule) -> Compiled:
    """Compile an inference graph for its traced shapes and strides."""
    values = [node.meta["val"] for node in graph.graph.nodes if node.op == "placeholder"]
    mode: FakeTensorMode = values[0].fake_mode
    with mode:
        fakes = [torch.empty_strided(v.shape, v.stride(), dtype=v.dtype, device=v.device) for v in values]
    return compile_inference(graph, fakes, mode)


@dataclass
class Turn:
    elsewhere: bool = False  # another rank has compiled the graph
    compiles: bool = True  # False if this rank finds it in the cache


class CompileTurns:
    """Lock files of this job and node: the first rank compiles a graph, others with the same graph wait."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder

    @contextmanager
    def turn(self, graph: fx.GraphModule) -> Iterator[Turn]:
        """Context in which to compile the graph; waits first if another rank is compiling an equal graph."""
        path = self._folder / graph_fingerprint(graph)
        lock = wait_for(lambda: FileLock.acquire(path, wait=True))
        assert lock is not None
        try:
            if done := path.read_text():
                lock.release()  # waiting ranks load the compiled code in parallel
            turn = Turn(elsewhere=done == _COMPILED)
            yield turn
            if not done:
                with dispensable(path):
                    path.write_text(_COMPILED if turn.compiles else "found")
        finally:
            lock.release()


def graph_fingerprint(graph: fx.GraphModule) -> str:
    """Return a hash that is equal on ranks with equal code."""
    values = [node.meta["val"] for node in graph.graph.nodes if node.op == "placeholder"]
    tensors = [(tuple(v.shape), v.stride(), str(v.dtype), str(v.device)) for v in values]
    return hashlib.sha256(f"{graph.graph}\n{tensors}".encode()).hexdigest()[:24]


class UnitCode:
    """The compiled forward, dgrad and wgrad of a compile unit; equal units share one."""

    def __init__(
        self, graphs: UnitGraphs, compiler: Callable[[fx.GraphModule], Compiled], *, accumulates: bool,
        rounds: bool = False,
    ) -> None:  # fmt: skip
        """``accumulates``: wgrad sums weight gradients itself, in bf16 if ``rounds``; else autograd does."""
        self.graphs, self.accumulates, self._rounds, self._compiler = graphs, accumulates, rounds, compiler
        self._forward = compiler(graphs.forward) if graphs.num_outputs else lambda *_: ()
        self.inputs: Compiled | None = None  # dgrad, if it computes anything
        # wgrad that stores and wgrad that adds, each compiled at first use
        self._weights: dict[bool, Compiled] = {}
        self.host: HostActivations | None = None  # stores `UnitGraphs.offloaded`
        self.weights_run: set[bool] = set()  # keys of _weights that have run, if wgrad accumulates
        if graphs.backward is not None:
            if graphs.input_gradients or graphs.backward.num_handed:
                self.inputs = compiler(graphs.backward.inputs)
            if graphs.weight_gradients:
                self._weights_code(add=False)

    def compile_rest(self) -> None:
        """Compile the wgrad that adds to gradients, which otherwise compiles at its first use."""
        if self.graphs.weight_gradients:
            self._weights_code(add=True)

    def __call__(
        self,
        tensors: Sequence[Tensor],
        gradients: Sequence[Gradient],
        pending: PendingWeightGrads | None = None,
    ) -> tuple[Tensor, ...]:
        """Return outputs of (parameters, buffers, inputs); the backward adds wgrad to ``pending``, if any."""
        return call_unit(self, tensors, gradients, pending)

    def forward(self, tensors: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], list[Tensor]]:
        """Run the forward; return (unit outputs, tensors saved for the backward)."""
        return self.outputs_and_kept(tensors, self.run_forward(tensors))

    def run_forward(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return the results, then the saved activations."""
        with profiler_range(self.graphs.name, "F"):
            return self._forward(*tensors)

    def outputs_and_kept(
        self, tensors: Sequence[Tensor], results: Sequence[Tensor]
    ) -> tuple[tuple[Tensor, ...], list[Tensor]]:
        count = self.graphs.num_outputs
        return tuple(results[:count]), [*(tensors[i] for i in self.graphs.kept_inputs), *results[count:]]

    def backward(
        self,
        kept: Sequence[Tensor],
        of_outputs: Sequence[Tensor],
        gradients: Sequence[Gradient],
        pending: PendingWeightGrads | None = None,
    ) -> Gradients:
        """Run dgrad, then run wgrad or append it to ``pending``; returns gradients for autograd."""
        of_inputs, handed = self.backward_inputs(kept, of_outputs)
        if pending is None:
            return of_inputs, self.backward_weights(handed, gradients)
        assert self.accumulates, "autograd wants weight gradients at once"
        assert all(i >= len(gradients) for i in self.graphs.input_gradients), "dgrad has weight gradients"
        if self.graphs.weight_gradients:
            # an input's grad_fn refers to other units' pending calls: without detach, a cycle that leaks
            handed = [tensor.detach() for tensor in handed]
            pending.append(functools.partial(self.backward_weights, handed, gradients))
        return of_inputs, [None] * len(self.graphs.weight_gradients)

    def backward_inputs(
        self, kept: Sequence[Tensor], gradients: Sequence[Tensor]
    ) -> tuple[list[Tensor | None], list[Tensor]]:
        """Run dgrad: returns input gradients, and the tensors that wgrad reads."""
        split = self.graphs.backward
        assert split is not None
        read = [*kept, *gradients]
        results: Sequence[Tensor] = ()
        if self.inputs is not None:
            with profiler_range(self.graphs.name, "I"):
                results = self.inputs(*(read[i] for i in split.inputs_read))
        count = len(self.graphs.input_gradients)
        return list(results[:count]), [*results[count:], *(read[i] for i in split.weights_read)]

    def backward_weights(
        self, handed: Sequence[Tensor], gradients: Sequence[Gradient]
    ) -> list[Tensor | None]:
        """Run wgrad: returns weight gradients, None for each if it accumulates."""
        wanted = self.graphs.weight_gradients
        if not wanted:
            return []
        if not self.accumulates:
            code = self._weights_code(add=False)
            with profiler_range(self.graphs.name, "W"):
                return list(code(*handed))
        sums = [gradients[i] for i in wanted]
        with when_at_owners(functools.partial(report_added, sums)):
            self.run_weights(handed, sums, add=have_begun(sums))
            begin(sums)  # the next micro-batch may add before all of this one is reduced to the owner
        return [None] * len(wanted)

    def run_weights(self, handed: Sequence[Tensor], sums: Sequence[Gradient], *, add: bool) -> None:
        """Run wgrad, which writes to the buffers in ``sums`` or, with ``add``, adds to them."""
        if sums:
            code = self._weights_code(add=add)
            with profiler_range(self.graphs.name, "W"):
                key = [gradient.key for gradient in sums[:1] if add and gradient.key is not None]
                code(*handed, *(gradient.total for gradient in sums), *key)
            self.weights_run.add(add)

    def _weights_code(self, *, add: bool) -> Compiled:
        if add not in self._weights:
            assert self.graphs.backward is not None
            graph = self.graphs.backward.weights
            self._weights[add] = self._compiler(
                accumulate_outputs(graph, add=add, rounds=self._rounds) if self.accumulates else graph
            )
        return self._weights[add]


def call_unit(
    unit: Any, tensors: Sequence[Tensor], gradients: Sequence[Gradient], pending: PendingWeightGrads | None
) -> tuple[Tensor, ...]:
    """Return a compile unit's outputs; its ``forward`` and ``backward`` are one node of autograd."""
    graphs: UnitGraphs = unit.graphs
    gather_weights(gradients, "forward")
    if graphs.backward is None:
        results, _ = unit.forward(tensors)
    else:
        results = UnitFunction.apply(unit, gradients, pending, *tensors)
    return graphs.views(tensors, results) if graphs.views else results


class UnitFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        unit: Any,
        gradients: Sequence[Gradient],
        pending: PendingWeightGrads | None,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        outputs, kept = unit.forward(tensors)
        ctx.unit, ctx.num_inputs, ctx.gradients, ctx.pending = unit, len(tensors), gradients, pending
        offloaded = unit.graphs.offloaded
        ctx.stored = unit.host.store([kept[i] for i in offloaded]) if offloaded else None
        ctx.save_for_backward(*(tensor for i, tensor in enumerate(kept) if i not in offloaded))
        fixed = [o for o, wanted in zip(outputs, unit.graphs.differentiable, strict=True) if not wanted]
        ctx.mark_non_differentiable(*fixed)
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError("compiled segments have no gradients of gradients; use compile.enabled=false")
        graphs: UnitGraphs = ctx.unit.graphs
        wanted = [g for g, w in zip(gradients, graphs.differentiable, strict=True) if w]
        wanted = [_with_strides(g, s) for g, s in zip(wanted, graphs.gradient_strides, strict=True)]
        kept = [*ctx.saved_tensors]
        if graphs.offloaded and ctx.stored is None:
            raise RuntimeError("recompute.offload allows one backward of a forward, without retain_graph")
        if ctx.stored is not None:
            for i, tensor in zip(graphs.offloaded, ctx.stored.take(), strict=True):
                kept.insert(i, tensor)
            ctx.stored = None  # autograd holds this node until the whole backward has run
        of_inputs, of_weights = _backward_of(ctx.unit, kept, wanted, ctx.gradients, ctx.pending)
        result: list[Tensor | None] = [None] * ctx.num_inputs
        places = (*graphs.input_gradients, *graphs.weight_gradients)
        for i, gradient in zip(places, (*of_inputs, *of_weights), strict=True):
            result[i] = gradient
        return *[None] * 3, *result


def _backward_of(
    unit: Any,
    kept: list[Tensor],
    of_outputs: Sequence[Tensor],
    gradients: Sequence[Gradient],
    pending: PendingWeightGrads | None,
) -> Gradients:
    """Run a unit's backward; it, and its wgrad in ``pending``, gather the weights that they read."""
    graphs: UnitGraphs = unit.graphs
    read = {j: gradients[i] for j, i in enumerate(graphs.kept_inputs) if i < len(gradients)}
    for j, gradient in read.items():
        if gradient.weight_in_backward is not None:
            kept[j] = gradient.weight_in_backward
    gather_weights([*read.values()], "backward")
    num_pending = len(pending) if pending is not None else 0
    results: Gradients = unit.backward(kept, of_outputs, gradients, pending)
    assert graphs.backward is not None
    by_weights = [read[j] for j in graphs.backward.weights_read if j in read and read[j].gathers]
    if pending is not None and len(pending) > num_pending and by_weights:
        wgrad = pending.pop()

        def gather_and_run() -> None:
            gather_weights(by_weights, "backward")
            wgrad()

        pending.append(gather_and_run)
    return results


def _with_strides(tensor: Tensor, strides: tuple[int, ...]) -> Tensor:
    if tensor.stride() == strides:
        return tensor
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def accumulate_outputs(module: fx.GraphModule, *, add: bool, rounds: bool = False) -> fx.GraphModule:
    """Return the graph changed to store its outputs in fp32 buffers or, with ``add``, to add them there.

    With ``rounds`` buffers are bf16; a graph that adds reads and increments a key, its last input.
    """
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    result = graph.graph_copy(module.graph, copies)
    assert isinstance(result, tuple)
    last_input = [node for node in graph.nodes if node.op == "placeholder"][-1:]
    pairs: list[tuple[fx.Node, fx.Node]] = []
    for index, value in enumerate(result):
        shape = value.meta["val"]
        with graph.inserting_after(last_input[0]) if last_input else graph.inserting_before(None):
            buffer = graph.placeholder(f"buffer_{index}")
        last_input = [buffer]
        buffer.meta["val"] = shape.new_empty(shape.shape, dtype=torch.bfloat16 if rounds else torch.float32)
        pairs.append((value, buffer))
    key: fx.Node | None = None
    if rounds and add and pairs:
        with graph.inserting_after(last_input[0]):
            key = graph.placeholder("key")
        key.meta["val"] = pairs[0][1].meta["val"].new_empty((), dtype=torch.int32)
    # The experts' kernels accumulate from fp32 sums if they can; others are added before the final cast.
    for number, (value, buffer) in enumerate(pairs if key else _without_experts(graph, pairs, add)):
        # (a @ b).T becomes b.T @ a.T, so that both operands of the sum have one layout
        value = _transposed_product(graph, _before_rounding(value))
        if key:
            value = _rounded_sum(graph, number, buffer, value, key)
        elif add:
            value = graph.call_function(aten.add.Tensor, (buffer, value))
            value.meta["val"] = buffer.meta["val"]
        copy = graph.call_function(aten.copy_.default, (buffer, value))
        copy.meta["val"] = buffer.meta["val"]
    if key:
        following = graph.call_function(aten.add.Tensor, (key, 1))
        following.meta["val"] = key.meta["val"]
        copy = graph.call_function(aten.copy_.default, (key, following))
        copy.meta["val"] = key.meta["val"]
    graph.output(())
    graph.eliminate_dead_code()
    graph.lint()
    return fx.GraphModule(module, graph)


def _without_experts(
    graph: fx.Graph, pairs: list[tuple[fx.Node, fx.Node]], add: bool
) -> list[tuple[fx.Node, fx.Node]]:
    # the experts' kernels fill their buffers themselves; returns the other pairs
    into = {  # each with the number of tensors before the backend or recipe, and the replicas
        ops.grouped_mlp_wgrad.default: (ops.grouped_mlp_wgrad_into.default, 7),
        ops.fp8_mlp_wgrad.default: (ops.fp8_mlp_wgrad_into.default, 11),
    }
    for node in [node for node in graph.nodes if node.target in into]:
        found = {value: _before_rounding(value) for value, _ in pairs}
        of_node = [pair for pair in pairs if found[pair[0]] in node.users]
        of_node.sort(key=lambda pair: found[pair[0]].args[1])  # type: ignore[arg-type, return-value]
        places = [found[value].args[1] for value, _ in of_node]
        if places == [0, 1] and not any(value.users for value, _ in of_node):
            (target, count), totals = into[node.target], [buffer for _, buffer in of_node]
            tensors, backend, replicas = node.args[:count], node.args[count], node.args[count + 1 :]
            call = graph.call_function(target, (*tensors, *totals, backend, add, *replicas))
            call.meta["val"] = None
            pairs = [pair for pair in pairs if pair not in of_node]
    return pairs


def _rounded_sum(graph: fx.Graph, number: int, *given: fx.Node) -> fx.Node:
    # of a buffer, a value and a key
    fakes = [node.meta["val"] for node in given]
    with torch.no_grad(), fakes[0].fake_mode:
        traced = make_fx(functools.partial(rounded_sum, number=number))(*fakes)
    copies = dict(zip(traced.graph.find_nodes(op="placeholder"), given, strict=True))
    result = graph.graph_copy(traced.graph, copies)
    assert isinstance(result, fx.Node)
    return result


def _before_rounding(node: fx.Node) -> fx.Node:
    if node.target is prims.convert_element_type.default:
        source = node.args[0]
        if isinstance(source, fx.Node) and source.meta["val"].dtype == torch.float32:
            return source
    return node


def _transposed_product(graph: fx.Graph, node: fx.Node) -> fx.Node:
    product = node.args[0] if node.target is aten.permute.default and list(node.args[1]) == [1, 0] else None  # type: ignore[arg-type]
    if not (isinstance(product, fx.Node) and product.target is aten.mm.default and len(product.users) == 1):
        return node
    turned = []
    for factor in reversed(product.args):
        assert isinstance(factor, fx.Node)
        view = graph.call_function(aten.permute.default, (factor, [1, 0]))
        view.meta["val"] = factor.meta["val"].permute(1, 0)
        turned.append(view)
    result = graph.call_function(aten.mm.default, tuple(turned))
    result.meta = {**node.meta, "val": node.meta["val"].new_empty(node.meta["val"].shape)}
    return result
