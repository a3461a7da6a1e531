"""From a compile unit to its compiled graphs: forward F, dgrad I, wgrad W.

Trace the forward -> passes -> trace the joint graph -> cut it where the fewest bytes are saved -> split the
backward into dgrad and wgrad.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor, fx

from graphmoe.passes.base import MadeBy, PassReport, PassRunner
from graphmoe.passes.matching import SAME_ELEMENTS, is_cast, is_op, operand
from graphmoe.passes.split_backward import SplitBackward, drop_kept_axes, split_backward
from graphmoe.plan.recompute import NOTHING, UnitRecompute
from graphmoe.runtime.compile.cut import (
    Halves,
    OutputViews,
    cut_joint,
    root_of,
    said_of,
    take_off_borders,
    take_off_views,
)
from graphmoe.runtime.compile.units import trace_forward
from graphmoe.runtime.compile.weight_forms import NUM_TENSORS, WeightForm, take_out_forms, take_up_largest
from graphmoe.runtime.torch_compat import FakeTensorMode, joint_graph, lazy_graph_modules

WIDER_INTEGERS = (torch.int32, torch.int64)


@dataclass
class UnitGraphs:
    forward: fx.GraphModule  # inputs -> results, then saved activations
    num_outputs: int
    differentiable: tuple[bool, ...]
    gradient_strides: tuple[tuple[int, ...], ...] = ()  # of output gradients that the backward expects
    kept_inputs: tuple[int, ...] = ()
    # reads (saved inputs, saved activations, gradients of the differentiable outputs)
    backward: SplitBackward | None = None
    offloaded: tuple[int, ...] = ()  # of saved inputs and activations, those in host memory
    input_gradients: tuple[int, ...] = ()  # inputs whose gradients dgrad returns, in order
    weight_gradients: tuple[int, ...] = ()
    forms: tuple[WeightForm, ...] = ()  # quantized weights, whose values and scales are the last inputs
    views: OutputViews | None = None  # makes the outputs from the results if some are inputs or share memory
    made_by: tuple[MadeBy | None, ...] = ()  # the multi-result operation behind each output, if any
    name: str = "unit"
    reports: list[PassReport] = field(default_factory=list)
    kept_bytes: int = 0
    recomputed: int = 0

    def modules(self) -> list[fx.GraphModule]:
        backward = [self.backward.inputs, self.backward.weights] if self.backward else []
        return [self.forward, *([self.views.graph] if self.views else []), *backward]


@lazy_graph_modules()
def unit_graphs(
    run: Callable[..., tuple[Tensor, ...]],
    fakes: Sequence[Tensor],
    *,
    num_weights: int,
    runner: PassRunner,
    name: str,
    segments: tuple[str, ...] = (),
    recompute: UnitRecompute = NOTHING,
    makers: Sequence[MadeBy | None] = (),
    lifts: bool = False,
) -> UnitGraphs:
    """Trace ``run`` and cut it; the first ``num_weights`` inputs are parameters.

    ``makers``: operations of other units that compute the last inputs. ``lifts``: quantized parameters become
    inputs, `UnitGraphs.forms`. Raises ConfigError if a recomputed part draws random numbers.
    """
    forward = trace_forward(run, fakes)
    placeholders = forward.graph.find_nodes(op="placeholder")
    for node, fake in zip(placeholders, fakes, strict=True):
        node.meta["frozen"] = not fake.requires_grad
    for node, maker in zip(placeholders[len(placeholders) - len(makers) :], makers, strict=True):
        node.meta["made_by"] = maker
    views = take_off_views(forward)
    differentiable = _differentiable(forward, fakes)
    if not any(differentiable):
        reports = runner.run("forward", forward, name, segments)
        made_by, count = _made_by(forward, views, name), len(_outputs(forward))
        reports += runner.run("joint", forward, name, segments)  # no backward: the forward is the joint graph
        graphs = UnitGraphs(forward, count, (False,) * count, views=views, name=name, reports=reports)
        graphs.made_by = made_by
        graphs.forms = take_out_forms(forward, len(fakes), num_weights) if lifts else ()
        take_up_largest(forward)
        return graphs

    def cut_of(joint: fx.GraphModule, forms: Sequence[WeightForm] = ()) -> Halves:
        inputs_of_forms = range(len(fakes), len(fakes) + NUM_TENSORS * len(forms))
        return cut_joint(joint, len(differentiable), [*range(num_weights), *inputs_of_forms], recompute)

    last: dict[str, Halves] = {}  # the graph measured last, cut

    def saved_bytes(module: fx.GraphModule) -> int:
        last.clear()
        cut = last[str(module.graph)] = cut_of(joint_graph(module, fakes))
        return bytes_kept(cut.forward, len(differentiable))

    reports = runner.run("forward", forward, name, segments, saved_bytes)
    made_by = _made_by(forward, views, name)
    cut, forms = last.get(str(forward.graph)), tuple[WeightForm, ...]()
    if cut is None or any(spec.stage == "joint" for spec in runner.specs):
        joint = joint_graph(forward, fakes)
        reports += runner.run("joint", joint, name, segments)
        forms = take_out_forms(joint, len(fakes), num_weights) if lifts else ()
        cut = cut_of(joint, forms)
    kept_bytes = bytes_kept(cut.forward, len(differentiable))
    graphs = _joined(cut.forward, cut.backward, differentiable, fakes, num_weights, runner, recompute.offload)
    assert graphs.backward is not None
    graphs.views, graphs.kept_bytes, graphs.recomputed = views, kept_bytes, cut.recomputed
    graphs.made_by, graphs.name, graphs.forms = made_by, name, forms
    for half in (graphs.forward, graphs.backward.inputs, graphs.backward.weights):
        take_up_largest(half)
    graphs.reports = [*reports, *runner.split_report(cut.backward, graphs.backward, name)]
    return graphs


def _made_by(forward: fx.GraphModule, views: OutputViews | None, unit: str) -> tuple[MadeBy | None, ...]:
    results, behind = _outputs(forward), dict[fx.Node, fx.Node]()
    if views is not None:
        inputs = forward.graph.find_nodes(op="placeholder")
        read = views.graph.graph.find_nodes(op="placeholder")
        behind = dict(zip(read, [*(inputs[i] for i in views.inputs), *results], strict=True))
        results = _outputs(views.graph)
    return tuple(_maker(node, behind, unit) for node in results)


def _maker(result: fx.Node, behind: Mapping[fx.Node, fx.Node], unit: str) -> MadeBy | None:
    node = result
    while True:
        if node in behind:
            node = behind[node]
        # int32 may have been widened in between
        elif is_op(node, *SAME_ELEMENTS) or (is_cast(node) and node.meta["val"].dtype in WIDER_INTEGERS):
            node = node.all_input_nodes[0]
        else:
            break
    wanted, found = (each.meta["val"] for each in (behind.get(result, result), node))
    if not isinstance(found, Tensor) or (wanted.dtype, wanted.numel()) != (found.dtype, found.numel()):
        return None
    if node.op == "placeholder":
        return node.meta.get("made_by")
    call = node.args[0] if node.target is operator.getitem else None
    if not isinstance(call, fx.Node) or not isinstance(call.target, torch._ops.OpOverload):
        return None
    return MadeBy(call.target.name(), f"{unit}:{call.name}", cast(int, node.args[1]))


def bytes_kept(forward: fx.GraphModule, num_outputs: int) -> int:
    """Return the bytes of saved activations, each storage once."""
    storages: dict[int, int] = {}
    for node in _outputs(forward)[num_outputs:]:
        value = node.meta.get("val") if isinstance(node, fx.Node) else None
        if isinstance(value, Tensor) and node.op != "placeholder":
            root = root_of(node)
            if root.op != "placeholder":
                storages[id(root)] = max(storages.get(id(root), 0), value.untyped_storage().nbytes())
    return sum(storages.values())


def _is_made(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return root_of(node).op != "placeholder" and isinstance(value, Tensor) and value.numel() > 0


def _outputs(module: fx.GraphModule) -> list[fx.Node]:
    return [*operand(module.graph.output_node())]


def _differentiable(forward: fx.GraphModule, fakes: Sequence[Tensor]) -> tuple[bool, ...]:
    mode: FakeTensorMode = fakes[0].fake_mode  # type: ignore[attr-defined]
    with mode, torch.enable_grad():
        return tuple(output.requires_grad for output in fx.Interpreter(forward).run(*fakes))


def _joined(
    forward: fx.GraphModule,
    backward: fx.GraphModule,
    differentiable: tuple[bool, ...],
    fakes: Sequence[Tensor],
    num_weights: int,
    runner: PassRunner,
    offload: frozenset[str] = frozenset(),
) -> UnitGraphs:
    inputs = {node: i for i, node in enumerate(forward.graph.find_nodes(op="placeholder"))}
    count = len(differentiable)
    results, kept = _outputs(forward)[:count], _outputs(forward)[count:]
    kept_inputs = [node for node in kept if node in inputs]
    kept_results = [node for node in kept if node not in inputs]
    # the unit's results stay on the device, where other units save them
    stay = {root_of(node) for node in results}
    offloaded = tuple(
        i
        for i, node in enumerate(kept_results, len(kept_inputs))
        if said_of(node, "segment") in offload and not {root_of(node)} & stay and _is_made(node)
    )
    _reorder_placeholders(backward, [node.name for node in (*kept_inputs, *kept_results)])
    placeholders = backward.graph.find_nodes(op="placeholder")
    _set_outputs(forward, [*results, *kept_results])
    take_off_borders(forward)
    # A parameter that the unit's module holds and the unit does not use has no gradient.
    gradients = _outputs(backward)
    needed = [i for i, fake in enumerate(fakes) if fake.requires_grad and gradients[i] is not None]
    _set_outputs(backward, [gradients[i] for i in needed])
    of_weights = [i for i in needed if i < num_weights]
    drop_kept_axes(backward.graph)
    splits = runner.splits_backward
    as_weights = range(len(of_weights)) if splits else ()
    return UnitGraphs(
        forward,
        count,
        differentiable,
        tuple(node.meta["val"].stride() for node in placeholders[len(kept) :]),
        tuple(inputs[node] for node in kept_inputs),
        split_backward(backward, as_weights),
        offloaded,
        tuple(needed[len(of_weights) if splits else 0 :]),
        tuple(of_weights if splits else ()),
    )


def _set_outputs(module: fx.GraphModule, outputs: list[fx.Node]) -> None:
    module.graph.output_node().args = (tuple(outputs),)
    module.graph.eliminate_dead_code()
    module.recompile()


def _reorder_placeholders(module: fx.GraphModule, first: list[str]) -> None:
    by_name = {node.name: node for node in module.graph.find_nodes(op="placeholder")}
    # gradients stay last
    rest = [node for name, node in by_name.items() if name not in set(first)]
    anchor = next(node for node in module.graph.nodes if node.op != "placeholder")
    for node in [*(by_name[name] for name in first), *rest]:
        anchor.prepend(node)
    module.recompile()
