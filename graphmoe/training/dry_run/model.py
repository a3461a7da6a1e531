"""Mesh, model and executor of a dry run: tensors have a shape and no data."""

import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from graphmoe.config.ranges import number_of
from graphmoe.model.moe_segments import Experts
from graphmoe.model.transformer import Transformer
from graphmoe.ops.collectives import use_groups
from graphmoe.ops.gradients import Gradient
from graphmoe.optim.zero1 import Optimizer
from graphmoe.plan.experts import Load, sent_load
from graphmoe.plan.plan import Plan
from graphmoe.runtime.compile.code import Compiled
from graphmoe.runtime.compile.cut import RecomputedSegments, said_of
from graphmoe.runtime.compile.executor import CompiledSegments
from graphmoe.runtime.compile.host_activations import HostActivations, offloading
from graphmoe.runtime.compile.report import UnitReport
from graphmoe.runtime.compile.weight_forms import WeightForms
from graphmoe.runtime.dispatch import make_dispatcher
from graphmoe.runtime.dispatch.alltoall import AllToAll
from graphmoe.runtime.ranks import Mesh
from graphmoe.runtime.torch_compat import FakeTensorMode, fake_process_group, without_modes
from graphmoe.segments import Executor, Segment, run_segments
from graphmoe.training.build import build
from graphmoe.training.dry_run.watch import StepWatch
from graphmoe.training.executor import pass_runner

log = logging.getLogger(__name__)
aten = torch.ops.aten


@contextmanager
def fake_mesh(plan: Plan, rank: int) -> Iterator[Mesh]:
    """Yield a rank's mesh whose groups send nothing; tensors made inside have no data."""
    with fake_process_group(plan.layout.size("world"), rank):
        mesh = Mesh(plan.layout)
        use_groups(mesh)
        try:
            # A fallback would run operations without a fake kernel on real zeros of full size.
            with FakeTensorMode(allow_fallback_kernels=False):
                yield mesh
        finally:
            use_groups(None)


def fake_build(plan: Plan, mesh: Mesh) -> tuple[Transformer, Optimizer]:
    """Build a rank's model and optimizer without data, inside ``fake_mesh``.

    With alltoall, routing is assumed balanced: there are no counts to read.
    """
    model, dispatcher = plan.model, make_dispatcher(plan, mesh)
    if isinstance(dispatcher, AllToAll):
        dispatcher = BalancedAllToAll(
            mesh, model.num_experts, sent_load(plan.moe, model, plan.layout, plan.tokens)
        )
    # the tokens have no data, so any end token serves
    built, optimizer = build(plan, torch.device("cpu"), mesh, dispatcher, has_values=False, end_token=0)
    assert isinstance(optimizer, Optimizer)
    if isinstance(dispatcher, BalancedAllToAll):
        for module in built.modules():
            if isinstance(module, Experts):
                module.assumed_rows = dispatcher.expert_rows
    return built, optimizer


def fake_executor(
    plan: Plan,
    watch: StepWatch,
    gradient_of: Callable[[Tensor], Gradient] | None = None,
    weight_forms: WeightForms | None = None,
) -> Executor:
    """Return an executor that saves the activations a run saves, and tells ``watch`` the current segment."""
    recompute = plan.recompute
    if plan.compile.enabled:
        runner = pass_runner(plan, "triton")
        return GraphSegments(watch, runner, gradient_of, recompute=recompute, weight_forms=weight_forms)
    execute: Executor = RecomputedSegments(recompute) if recompute else run_segments
    if recompute.offload:
        execute = offloading(execute, recompute, WatchedHost(watch))

    def run(segment: Segment, *tensors: Tensor) -> Tensor | tuple[Tensor, ...]:
        watch.segment = segment.name
        return segment.run(*tensors)

    def told(
        segments: Sequence[Segment], tensors: dict[str, Tensor], keep: tuple[str, ...]
    ) -> tuple[Tensor, ...]:
        noted = [replace(segment, run=functools.partial(run, segment)) for segment in segments]
        return execute(noted, tensors, keep)

    return told


class WatchedHost(HostActivations):
    def __init__(self, watch: StepWatch) -> None:
        super().__init__()
        self._watch = watch

    @contextmanager
    def host(self) -> Iterator[None]:
        self._watch.on_host = True
        yield
        self._watch.on_host = False


class GraphSegments(CompiledSegments):
    """``CompiledSegments`` without the compiler: traced, rewritten by passes, split into three graphs.

    Saved activations are those of a compiled run. Nothing is fused.
    """

    def __init__(self, watch: StepWatch, *arguments: Any, **named: Any) -> None:
        self._watch = watch
        super().__init__(*arguments, **named)

    def new_host(self) -> HostActivations:
        return WatchedHost(self._watch)

    def _compile(self, *arguments: Any) -> Any:
        with without_modes():  # tracing has its own mode, and its tensors are not the step's
            code, report = super()._compile(*arguments)
            code.compile_rest()
            return code, report

    def _compile_graph(self, report: UnitReport, graph: fx.GraphModule) -> Compiled:
        report.graphs += 1
        watch = self._watch

        class Noting(fx.Interpreter):
            def run_node(self, n: fx.Node) -> Any:
                watch.segment = said_of(n, "segment") or ""
                return self.env[n.args[0]] if _is_in_place(n) else super().run_node(n)  # type: ignore[index]

        # A new interpreter for each call, since it holds its intermediate results.
        return lambda *tensors: Noting(graph).run(*tensors)

    def _forms_of(self, *arguments: Any) -> Sequence[Tensor]:
        before, self._watch.phase = self._watch.phase, "forms"
        forms = super()._forms_of(*arguments)
        self._watch.phase = before
        return forms

    def _add(self, report: UnitReport) -> None:
        self.reports.append(report)
        log.info("traced unit %s: %s, %.1f s", report.unit, number_of(report.graphs, "graph"), report.seconds)


_ADDS_ROWS = (  # an embedding's gradient, depending on torch's version
    *(aten._unsafe_index_put.default, aten.index_put.default),
    aten._unsafe_masked_index_put_accumulate.default,
)


def _is_in_place(node: fx.Node) -> bool:
    # Inductor adds an embedding's rows into zeros, and a weight's gradient into its sum, in place.
    into = node.args[0] if node.args else None
    if not isinstance(into, fx.Node):
        return False
    if node.target in _ADDS_ROWS:
        return into.target is aten.full.default and len(into.users) == 1
    stored = [user for user in node.users if user.target is aten.copy_.default and user.args == (into, node)]
    return node.target is aten.add.Tensor and len(stored) == len(node.users) == 1


class BalancedAllToAll(AllToAll):
    """`AllToAll` for a balanced routing, which sends each rank as many rows.

    ``rows_P``: rows sent to, and received from, each rank of ``ep_etp``; ``expert_rows``: rows of this rank's
    experts.
    """

    def __init__(self, mesh: Mesh, num_experts: int, load: Load) -> None:
        super().__init__(mesh, num_experts)
        layout = mesh.layout
        # Their sum is exact: a plan has no capacity for rows added by rounding up.
        each, more = divmod(load.rows // layout.etp, layout.ep)
        self.rows_P = [each + (block < more) for block in range(layout.ep) for _ in range(layout.etp)]
        self.expert_rows = load.slots

    def _on_host(self, counts: Tensor) -> Any:
        return self.rows_P if counts.dim() == 1 else [self.rows_P] * len(counts)
