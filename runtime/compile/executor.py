"""CompiledSegments: runs a model's segments as compiled units, in place of ``run_segments``."""

import dataclasses
import functools
import logging
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, fx

from graphmoe.config.progress import working
from graphmoe.config.ranges import number_of
from graphmoe.ops.gradients import Gradient, with_gathered_weights
from graphmoe.passes.base import MadeBy, PassRunner
from graphmoe.plan.recompute import Recompute
from graphmoe.runtime.compile.captured_units import CapturedUnit, UnitCapture
from graphmoe.runtime.compile.code import Compiled, CompileTurns, PendingWeightGrads, UnitCode
from graphmoe.runtime.compile.cut import executor_outside_graphs
from graphmoe.runtime.compile.graphs import UnitGraphs, unit_graphs
from graphmoe.runtime.compile.host_activations import HostActivations, offloading
from graphmoe.runtime.compile.kept import kept_graphs
from graphmoe.runtime.compile.report import UnitReport
from graphmoe.runtime.compile.units import BoundUnit, Unit, fakes_of, owner_of, trace_in_place, units_of
from graphmoe.runtime.compile.weight_forms import WeightForms
from graphmoe.runtime.host.logs import FILE_ONLY
from graphmoe.segments import Segment

log = logging.getLogger(__name__)

OVERLAPPED = frozenset({"shared_experts"})  # units of their own, to overlap with transfers


UnitCall = Callable[[Sequence[Tensor], PendingWeightGrads], Sequence[Tensor]]


class UnitTurns(Protocol):
    @property
    def runs(self) -> bool:
        """Return whether a forward with interleaved compile units is running."""

    def run_unit(self, unit: Unit, read: Sequence[Tensor], call: UnitCall) -> tuple[Tensor, ...]:
        """Run the compile unit in its turn; return its results."""


@dataclass
class _PlacedUnit:
    bound: BoundUnit
    gradients: list[Gradient]  # of each parameter; empty if autograd gets them
    # by input shapes, and by whether gradients are wanted
    codes: dict[tuple[Any, ...], UnitCode | CapturedUnit] = field(default_factory=dict)


class CompiledSegments:
    """Executor like ``run_segments``; compiles each unit at its first call. Equal units share code."""

    def __init__(
        self,
        runner: PassRunner,
        gradient_of: Callable[[Tensor], Gradient] | None = None,
        capture: UnitCapture | None = None,
        recompute: Recompute | None = None,
        unit_turns: UnitTurns | None = None,
        weight_forms: WeightForms | None = None,
    ) -> None:
        self.turns: CompileTurns | None = None
        self.kept: Path | None = None  # folder of earlier jobs' traced graphs; None traces all
        self.runner = runner
        self._gradient_of = gradient_of  # None leaves gradients to autograd
        self._capture = capture
        self._recompute = Recompute() if recompute is None else recompute
        self._unit_turns = unit_turns
        self._weight_forms = weight_forms  # None: each forward and backward quantizes weights
        self._pending: PendingWeightGrads | None = None  # backwards append wgrad here; None: they run it
        self._host = self.new_host()
        self._run_dynamic = executor_outside_graphs(self._recompute)
        if self._recompute.offload:
            self._run_dynamic = offloading(self._run_dynamic, self._recompute, self._host)
        # units of a list of segments; dynamic units run uncompiled
        self._places: dict[tuple[Any, ...], list[_PlacedUnit | Unit]] = {}
        self._codes: dict[tuple[Any, ...], tuple[UnitCode, UnitReport]] = {}
        # the key leaves out gradients: inference runs the forward that was compiled for training
        self._forwards: dict[tuple[Any, ...], UnitCode] = {}
        self.reports: list[UnitReport] = []
        self.num_expected = 0
        self.recompiled = 0

    def new_host(self) -> HostActivations:
        return HostActivations()

    def expect(self, lists: Iterable[Sequence[Segment]]) -> None:
        """Count units to compile, for progress: distinct units of these lists, and the optimizer's update."""
        captured = self._capture.names if self._capture else frozenset[str]()
        apart = OVERLAPPED if self._unit_turns else frozenset[str]()
        units = (unit for segments in lists for unit in units_of(segments, (), captured, apart))
        kinds = {(_kind_of(unit), self._runner_of(unit).names) for unit in units if not unit.dynamic}
        self.num_expected = 1 + len(kinds)

    def __call__(
        self, segments: Sequence[Segment], tensors: dict[str, Tensor], keep: tuple[str, ...]
    ) -> tuple[Tensor, ...]:
        values = dict(tensors)
        made_by: dict[str, MadeBy | None] = {}
        for position, place in enumerate(self._places_of(segments, keep)):
            if isinstance(place, Unit):
                made = self._run_uncompiled(place, {name: values[name] for name in place.reads})
                values.update(zip(place.writes, made, strict=True))
                made_by |= dict.fromkeys(place.writes)
                continue
            # code is compiled for strides; a slice would need code of its own
            read = [values[name].contiguous() for name in place.bound.unit.reads]
            code = self._code(place, read, made_by)
            results = self._run(place, code, read)
            values.update(zip(place.bound.unit.writes, results, strict=True))
            for name, maker in zip(place.bound.unit.writes, code.graphs.made_by, strict=True):
                made_by[name] = maker and maker.at(position)
        return tuple(values[name] for name in keep)

    @contextmanager
    def deferring(self, pending: PendingWeightGrads) -> Iterator[None]:
        """Context whose forwards leave wgrad in ``pending`` for the caller, except in uncompiled units."""
        before, self._pending = self._pending, pending
        try:
            yield
        finally:
            self._pending = before

    @property
    def captures(self) -> bool:
        return self._capture is not None

    def lane(self, name: Hashable) -> AbstractContextManager[None]:
        """Context that assigns a micro-batch's forward to a micro-batch slot, for captured units.

        Results and input gradients are valid until the slot is reused: by then every backward, wgrad and send
        must be complete. Each step's first micro-batch must use the same slot: its wgrad overwrites the sums.
        """
        return nullcontext() if self._capture is None else self._capture.lane(name)

    def _run(self, place: _PlacedUnit, code: UnitCode | CapturedUnit, read: list[Tensor]) -> Sequence[Tensor]:
        forms = self._forms_of(place, code)
        if self._unit_turns is None or not self._unit_turns.runs:
            return code([*place.bound.tensors, *read, *forms], place.gradients, self._pending)

        def call(own: Sequence[Tensor], pending: PendingWeightGrads) -> Sequence[Tensor]:
            return code([*place.bound.tensors, *own, *forms], place.gradients, pending)

        return self._unit_turns.run_unit(place.bound.unit, read, call)

    def _forms_of(self, place: _PlacedUnit, code: UnitCode | CapturedUnit) -> Sequence[Tensor]:
        forms = code.graphs.forms
        if not forms:
            return ()
        assert self._weight_forms is not None
        return self._weight_forms.of(forms, place.bound.tensors)

    def in_place(
        self, run: Callable[..., Sequence[Tensor]], tensors: Sequence[Tensor]
    ) -> Callable[..., Sequence[Tensor]]:
        """Return ``run`` compiled without passes; ``run(*tensors)`` updates some of ``tensors`` in place."""
        report = UnitReport("optimizer")
        with self._compiling(report):
            with report.measured():
                graph = trace_in_place(run, fakes_of([tensor.detach() for tensor in tensors]))
            code = report.compile(graph, self.turns)
        self._add(report)
        return code

    def _places_of(self, segments: Sequence[Segment], keep: tuple[str, ...]) -> list[_PlacedUnit | Unit]:
        # Graphs hold addresses of other graphs' results, so each program of a capture has units of its own.
        program = self._capture.capture.program if self._capture else None
        if self._capture and self._capture.has_new_program():
            self._places = {key: units for key, units in self._places.items() if key[-1] is None}
            self._capture.capture.maker.prepare()  # frees what only released graphs held
        key = (*(_identity(segment) for segment in segments), keep, program)
        if key not in self._places:
            captured = self._capture.names if self._capture and program is not None else frozenset[str]()
            units = units_of(segments, keep, captured, OVERLAPPED if self._unit_turns else frozenset())
            self._places[key] = [unit if unit.dynamic else self._placed(BoundUnit.of(unit)) for unit in units]
        return self._places[key]

    def _placed(self, bound: BoundUnit) -> _PlacedUnit:
        return _PlacedUnit(bound, self._gradients(bound.tensors[: bound.num_parameters]))

    def _runner_of(self, unit: Unit) -> PassRunner:
        return self.runner.of_layer(unit.segments[0].layer)

    def _gradients(self, parameters: Iterable[Tensor]) -> list[Gradient]:
        if self._gradient_of is None:
            return []
        # a frozen weight has none, and no code writes to the place of it
        return [self._gradient_of(w) if w.requires_grad else Gradient(w.new_empty(0)) for w in parameters]

    def _run_uncompiled(self, unit: Unit, read: dict[str, Tensor]) -> tuple[Tensor, ...]:
        segments = [self._fused(segment) for segment in unit.segments]
        owners = [owner for segment in unit.segments if (owner := owner_of(segment.run))]
        gradients = self._gradients(weight for owner in owners for weight in owner.parameters())
        return with_gathered_weights(gradients, lambda: self._run_dynamic(segments, read, unit.writes))

    def _fused(self, segment: Segment) -> Segment:
        if segment.fused is None or self._experts is None:
            return segment
        owner = owner_of(segment.run)
        totals = self._gradients(w for w in owner.parameters() if w.requires_grad) if owner else []
        return dataclasses.replace(segment, run=functools.partial(segment.fused, self._experts, totals))

    @functools.cached_property
    def _experts(self) -> str | None:
        knobs = {spec.name: spec.knobs for spec in self.runner.specs}
        return knobs["fuse_experts"].get("backend", "torch") if "fuse_experts" in knobs else None

    def _code(
        self, place: _PlacedUnit, read: list[Tensor], made_by: dict[str, MadeBy | None]
    ) -> UnitCode | CapturedUnit:
        trains, unit, capture = torch.is_grad_enabled(), place.bound.unit, self._capture
        key = (trains, *((t.shape, t.dtype, t.requires_grad) for t in read))
        if key in place.codes:
            return place.codes[key]
        if capture is None or not unit.captured or not trains:
            place.codes[key] = self._shared_code(place, read, made_by)
            return place.codes[key]
        for trained, *shapes in place.codes:
            if trained:
                raise ValueError(
                    f"{unit.name} is captured, and {_changes(unit, tuple(shapes), read)}; leave its segments "
                    f"out of graph.scope"
                )
        code = self._shared_code(place, read, made_by)
        names = tuple(segment.name for segment in unit.segments)
        stream = unit.segments[0].stream if self._unit_turns else "compute"
        place.codes[key] = capture.unit(code, names, unit.name, unit.reads, stream)
        return place.codes[key]

    def _shared_code(
        self, place: _PlacedUnit, read: list[Tensor], made_by: dict[str, MadeBy | None]
    ) -> UnitCode:
        bound, trains = place.bound, torch.is_grad_enabled()
        tensors = [*bound.tensors, *read]
        makers = tuple(made_by.get(name) for name in bound.unit.reads)
        passes = self._runner_of(bound.unit).names
        signatures = [(t.shape, t.stride(), t.dtype, t.device) for t in tensors]
        forward = (bound.fingerprint(), makers, passes, *signatures)
        key = (*forward, self._recompute.of_unit(bound.unit.segments), *(t.requires_grad for t in tensors))
        if not trains and forward in self._forwards:
            return self._forwards[forward]
        if key in self._codes:
            code, report = self._codes[key]
            report.shared_by += 1
            return code
        for shapes in place.codes:
            if shapes[0] == trains:
                self.recompiled += 1
                log.warning(
                    "%s is compiled again: %s", bound.unit.name, _changes(bound.unit, shapes[1:], read)
                )
                break
        code, report = self._codes[key] = self._compile(bound, tensors, makers, key)
        self._forwards[forward] = code
        return code

    def _compile(
        self, bound: BoundUnit, tensors: list[Tensor], makers: tuple[MadeBy | None, ...], key: tuple[Any, ...]
    ) -> tuple[UnitCode, UnitReport]:
        unit, report, runner = bound.unit, UnitReport(bound.unit.name), self._runner_of(bound.unit)
        lifts = self._weight_forms is not None

        def trace() -> UnitGraphs:
            return unit_graphs(
                bound.run,
                fakes_of(tensors),
                num_weights=bound.num_parameters,
                runner=runner,
                name=unit.name,
                segments=tuple(segment.name for segment in unit.segments),
                recompute=self._recompute.of_unit(unit.segments),
                makers=makers,
                lifts=lifts,
            )

        with self._compiling(report):
            with report.measured():
                graphs = kept_graphs(self.kept, (unit.name, runner.uuid(), lifts, key), trace)
            report.passes = graphs.reports
            report.kept_bytes, report.recomputed = graphs.kept_bytes, graphs.recomputed
            compiler = functools.partial(self._compile_graph, report)
            gradients = self._gradients(bound.tensors[: bound.num_parameters])
            rounds = any(gradient.key is not None for gradient in gradients)
            accumulates = self._gradient_of is not None
            code = UnitCode(graphs, compiler, accumulates=accumulates, rounds=rounds)
            code.host = self._host
        self._add(report)
        return code, report

    def _compiling(self, report: UnitReport) -> AbstractContextManager[Any]:
        number = len(self.reports) + 1
        of = f" of {max(number, self.num_expected)}" if self.num_expected else ""
        return working(f"compiling unit {number}{of}: {report.unit}")

    def _compile_graph(self, report: UnitReport, graph: fx.GraphModule) -> Compiled:
        if report not in self.reports:
            return report.compile(graph, self.turns)
        with working(f"compiling {report.unit} for later micro-batches, which add to the gradients"):
            code = report.compile(graph, self.turns)
        _log_compiled(report, " for later micro-batches too, which add to the gradients")
        return code

    def _add(self, report: UnitReport) -> None:
        self.reports.append(report)
        _log_compiled(report, f": {number_of(report.graphs, 'graph')} in {report.seconds:.1f} s")


def _log_compiled(report: UnitReport, rest: str) -> None:
    loaded = report.source != "compiled"
    done = "loaded" if loaded else "compiled"
    log.info("%s unit %s%s", done, report.unit, rest, extra=FILE_ONLY if loaded else None)


def _kind_of(unit: Unit) -> tuple[Any, ...]:
    segments = tuple((each.name, each.reads, type(owner_of(each.run))) for each in unit.segments)
    return segments, unit.reads


def _identity(segment: Segment) -> tuple[Any, ...]:
    owner = getattr(segment.run, "__self__", None)
    run = id(segment.run) if owner is None else (id(owner), segment.run.__name__)
    return segment.name, segment.layer, segment.reads, segment.writes, run


def _changes(unit: Unit, shapes: tuple[Any, ...], read: list[Tensor]) -> str:
    lines = []
    for name, (shape, dtype, requires_grad), tensor in zip(unit.reads, shapes, read, strict=True):
        if (shape, dtype, requires_grad) != (tensor.shape, tensor.dtype, tensor.requires_grad):
            before, now = (f"{dtype} {list(shape)}", f"{tensor.dtype} {list(tensor.shape)}")
            if before == now:
                before, now = (f"requires_grad={flag}" for flag in (requires_grad, tensor.requires_grad))
            lines.append(f"{name} was {before} and is {now}")
    return ", ".join(lines) or "the layout of a tensor changed"
