"""Executor of a run's segments: eager, or compiled with passes and captured."""

import functools
import json
import logging
import os
import shlex
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from graphmoe.config.formats import FORMATS
from graphmoe.config.ranges import number_of, own_code
from graphmoe.config.schema import ConfigError, PassesConfig
from graphmoe.ops.fp8 import reason_against
from graphmoe.ops.fp8_choice import ALL_IN_FP8, Experts, InBf16
from graphmoe.ops.grouped_mlp import row_of
from graphmoe.ops.grouped_mlp.choice import MlpShape, choose_backends
from graphmoe.ops.grouped_mm import has_grouped_kernel
from graphmoe.optim.base import StepOptimizer
from graphmoe.passes import select_passes
from graphmoe.passes.base import PassRunner
from graphmoe.plan.experts import adapts_experts, has_experts
from graphmoe.plan.plan import Plan
from graphmoe.run.machine import device_name
from graphmoe.runtime.cache.key import facts_of
from graphmoe.runtime.cache.store import CompileCache
from graphmoe.runtime.capture import Capture
from graphmoe.runtime.compile.captured_units import UnitCapture
from graphmoe.runtime.compile.cut import RecomputedSegments
from graphmoe.runtime.compile.executor import CompiledSegments
from graphmoe.runtime.compile.host_activations import HostActivations, offloading
from graphmoe.runtime.compile.job_cache import JobCache
from graphmoe.runtime.compile.report import REPORT_FILE, cache_line, to_json, to_text
from graphmoe.runtime.host.files import dispensable
from graphmoe.runtime.host.logs import FILE_ONLY
from graphmoe.runtime.overlap import Overlap
from graphmoe.runtime.ranks import Ranks
from graphmoe.segments import EXPERTS_STAGE, Executor, Segment, lowest_stage, run_segments
from graphmoe.training.products import (
    dense_products,
    describe_products,
    fp8_passes,
    keeps_experts,
    measured,
    plain_products,
    skips_experts,
)
from graphmoe.training.saves import Chosen

log = logging.getLogger(__name__)


class Execution:
    """Executor of a run with its capture, compiled units and compile cache."""

    def __init__(
        self, plan: Plan, device: torch.device, optimizer: StepOptimizer, ranks: Ranks, folder: Path,
        chosen: Chosen,
    ) -> None:  # fmt: skip
        """``chosen``: a checkpoint's kernel choices; if empty, may time GPU kernels. *Raises* ConfigError."""
        self.device, scope = device, plan.graph.scope
        self._plan, self._ranks, self._folder = plan, ranks, folder
        of_capture = scope, device, plan.graph.warmup_steps, folder if ranks.is_first else None
        self.capture = Capture(*of_capture) if scope != "none" else None
        replays = plan.captured & {"moe_dispatch", "moe_combine"}
        self.overlap = Overlap(device, defers=not replays) if plan.ep_overlap else None
        self.chosen = chosen
        passes = select_passes(plan.passes, fp8_passes(plan))
        names = [spec.name for spec in passes] if plan.compile.enabled else []
        self.fuses = plan.fuses_experts  # True if routed experts run as one operation
        # weights of GEMMs that may run in fp8, by name
        self._dense = dense_products(plan) if "fp8_linear" in names else {}
        # True if experts run in fp8, except in skipped layers
        self._in_fp8 = "fp8_experts" in names and has_experts(plan.model) and keeps_experts(plan)
        # True if fp8 experts are timed against bf16, unlike a vendor's
        self._times_experts = self._in_fp8 and plan.fp8_vendor is None
        self._counts: tuple[int, int] | None = None  # numbers of fp8 GEMMs, and of those left in bf16
        self.compiled: CompiledSegments | None = None
        self._recompute = plan.recompute
        if self._recompute:
            log.info("the backward computes again: %s", self._recompute.words())
        refuse_waiting_experts(plan, device, fuses=self.fuses)
        if plan.moe.experts != "auto":
            row_of(plan.moe.experts)  # raises for an unknown backend, even if nothing runs on it
        log.info("host syncs: moe.sync_free_stage=%d", plan.moe.sync_free_stage, extra=FILE_ONLY)
        self.execute: Executor = run_segments
        if plan.compile.enabled:
            self._compile(device, optimizer)
        elif self._recompute:
            self.execute = RecomputedSegments(self._recompute)
        if self._recompute.offload and not plan.compile.enabled:
            self.execute = offloading(self.execute, self._recompute, HostActivations())
        self._warn_of_unused()

    def _warn_of_unused(self) -> None:
        plan, requested = self._plan, self._plan.moe.experts
        unused = {} if requested == "auto" else {"moe.experts": requested}
        if not plan.compile.enabled:
            default = asdict(PassesConfig())
            changed = {k: v for k, v in asdict(plan.passes).items() if v != default[k]}
            _warn("compile.enabled=false", {f"passes.{key}": v for key, v in changed.items()} | unused)
            return
        if not self.fuses:
            adapted = "model.lora_targets that has experts" if adapts_experts(plan.model) else ""
            _warn(adapted or "the pass fuse_experts off", unused)
        elif self._times_experts and not skips_experts(plan):
            recipe = plan.precision.fp8.value
            _warn(f"precision.fp8={recipe} of experts, which runs kernels of its own", unused)
        if self.fuses and "moe_act" in self._recompute.parts:
            _warn("the pass fuse_experts, which recomputes it anyway", {"recompute.ops": "moe_act"})

    def _compile(self, device: torch.device, optimizer: StepOptimizer) -> None:
        plan, ranks, capture = self._plan, self._ranks, self.capture
        if device.type == "cpu":
            _need_compiler()
        in_fp8 = fp8_passes(plan)
        if in_fp8:
            recipe = plan.precision.fp8.value
            # A vendor library may support devices that our kernels do not.
            needed = recipe if "fp8_quantise" in in_fp8 else FORMATS[recipe].turbo.needs or recipe
            if reason := reason_against(device, needed):
                raise ConfigError(f"precision.fp8={recipe} {reason}")
        assert plan.compile.cache_dir is not None
        folder = Path(plan.compile.cache_dir) if plan.compile.cache else None
        store = CompileCache(folder, shared=plan.compile.cache_shared)
        dump = self._folder / "graphs" if plan.passes.dump and ranks.is_first else None
        # Opened before kernels are chosen: measuring compiles them.
        facts = facts_of(plan.config, select_passes(plan.passes, in_fp8), device)
        traces = plan.passes.dump or any(own_code(plan.config))  # their sources are not among the facts
        self._cache = JobCache(store, facts, ranks, None if traces else self._plan.layout)
        self.chosen, plain = ranks.on_first(lambda: self._choose(store))
        if in_fp8:
            left = len(plain.shapes) + plain.experts
            self._counts = len(self._dense) + self._in_fp8 - left, left
        self._in_fp8 &= not plain.experts
        runner = pass_runner(plan, self.chosen.experts or "torch", dump, plain=plain)
        units = UnitCapture(self._plan.captured, capture) if capture and self._plan.captured else None
        # quantized copies would be as large as weights that no rank has whole
        forms = optimizer.weight_forms if optimizer.model_is_whole else None
        self.compiled = CompiledSegments(
            runner, optimizer.gradient_of, units, self._recompute, self.overlap, forms
        )
        self.compiled.turns, self.compiled.kept = self._cache.turns, self._cache.graphs
        self._published = 0  # compiled graphs at the last cache write
        self.execute = self.compiled

    def _choose(self, store: CompileCache) -> tuple[Chosen, InBf16]:
        plan, (experts, known) = self._plan, self.chosen

        @functools.cache
        def backends() -> str:
            return chosen_experts(plan, self.device, store, experts)

        def timed() -> Experts:
            return Experts(mlp_shape(plan), backends(), self._plan.precision.fp8.value)

        found = measured(plan, self._dense, timed if self._times_experts else None, known, self.device, store)
        plain = plain_products(self._dense, found)
        in_fp8 = self._times_experts and not plain.experts and not skips_experts(plan)
        if self.fuses and has_experts(plan.model) and not in_fp8:
            experts = backends()
        return Chosen(experts, found), plain

    @property
    def backends(self) -> str:
        """Return the names of the fused experts' backends; empty if the experts are not fused."""
        return self.chosen.experts if self.fuses else ""

    def describe(self) -> list[str]:
        """Describe passes, cache and kernels for the log."""
        if self.compiled is None:
            return ["none, compile.enabled=false"]
        passes, kernels = len(self.compiled.runner.names), self.chosen.experts
        experts = [f"experts run on {kernels} (forward,dgrad,wgrad)"] if kernels else []
        in_fp8 = describe_products(self._plan, self.chosen.fp8)
        rows = ["tokens are dispatched in fp8"] * (self._in_fp8 and self._plan.fp8_rows)
        return [f"{number_of(passes, 'pass')}", self._cache.found, *experts, *in_fp8, *rows]

    def precision(self) -> dict[str, Any]:
        """Return the fp8 entries of summary.json."""
        in_fp8, in_bf16 = self._counts or (None, None)
        recipe = self._plan.precision.fp8.value
        return {"fp8": recipe, "products_in_fp8": in_fp8, "products_in_bf16": in_bf16}

    def compile_update(self, optimizer: StepOptimizer, segments: Iterable[Sequence[Segment]]) -> None:
        """Compile the optimizer's update, the first compiled unit."""
        if self.compiled is not None:
            self.compiled.expect(segments)
            optimizer.compile(self.compiled.in_place)

    def keep_code(self) -> None:
        """Write newly compiled units to the compile cache. A collective."""
        if self.compiled is None:
            return
        graphs = sum(report.graphs for report in self.compiled.reports)
        if any(self._ranks.gather(graphs > self._published)):
            scope = self.capture.report.scope if self.capture else "none"
            notes = {"model": self._plan.model.name, "device": device_name(self.device), "scope": scope}
            self._cache.publish({**notes, "graphs": graphs})
        self._published = graphs

    def release_graphs(self) -> None:
        """Free captured graphs before the process groups end. No step may follow."""
        if self.capture:
            self.capture.maker.release()

    def warn_if_uncaptured(self) -> None:
        """Warn if the run ended before its first capture."""
        if self.capture and not self.capture.has_captured:
            log.warning(
                "graph.scope=%s captured nothing: the run did %d steps, and graph.warmup_steps=%d run "
                "uncaptured first",
                self.capture.report.scope,
                self.capture.steps,
                self.capture.warmup_steps,
            )

    def write_report(self) -> None:
        if self.compiled is not None:
            with dispensable(self._folder / REPORT_FILE):
                compiled = self.compiled
                facts = compiled.recompiled, compiled.runner.uuid(), self._cache.why
                text = json.dumps(to_json(compiled.reports, *facts), indent=1)
                (self._folder / REPORT_FILE).write_text(f"{text}\n")

    def report(self) -> None:
        self.write_report()
        if self.compiled is None:
            return
        for line in to_text(self.compiled.reports).splitlines():
            log.info(line, extra=FILE_ONLY)
        log.info(cache_line(self.compiled.reports, self._cache.why))
        if self._recompute and not any(unit.recomputed for unit in self.compiled.reports):
            log.warning("recompute has no effect: recomputing %s saves no memory", self._recompute.words())
        quantizes = ("fp8_linear", "fp8_experts")
        of_fp8 = [row.matches for r in self.compiled.reports for row in r.passes if row.name in quantizes]
        if of_fp8 and not any(of_fp8):
            recipe = self._plan.precision.fp8.value
            log.warning(
                "precision.fp8=%s has no effect: none of the GEMMs can run in fp8; %s has the reasons",
                recipe,
                REPORT_FILE,
            )


def pass_runner(
    plan: Plan, experts: str, dump: Path | None = None, *, plain: InBf16 = ALL_IN_FP8
) -> PassRunner:
    """Return the passes of compiled units; ``experts`` names the experts' backends."""
    in_fp8, of_experts = fp8_passes(plan, plain), {"backend": experts, "keep": plan.keeps_replicas}
    specs = select_passes(plan.passes, {"fuse_experts": of_experts, **in_fp8})
    if not plan.fuses_experts:  # adapters of experts are steps of their own
        specs = [spec for spec in specs if spec.name != "fuse_experts"]
    return PassRunner([replace(s, skips=plan.fp8_skips) if s.name in in_fp8 else s for s in specs], dump)


def _warn(because: str, unused: dict[str, Any]) -> None:
    for key, value in unused.items():
        log.warning("%s=%s has no effect with %s", key, value, because)


def chosen_experts(plan: Plan, device: torch.device, store: CompileCache, remembered: str) -> str:
    """Return the experts' backends; for ``auto`` those of a checkpoint (``remembered``) if they run here."""
    requested, shape = plan.moe.experts, mlp_shape(plan)
    sync_free = plan.moe.sync_free_stage >= EXPERTS_STAGE
    if requested == "auto" and ":" in remembered:
        log.warning(
            "moe.experts=auto does not import the plug-in %s that the checkpoint names, so the order of sums "
            "may change; if you trust it, name that as moe.experts on the command line",
            remembered.split(",")[0],
        )
    elif requested == "auto" and remembered:
        try:
            return choose_backends(remembered, shape, device, store, sync_free=sync_free)
        except ConfigError as error:
            log.warning("the checkpoint's experts backend cannot run here, so sums may change: %s", error)
    # backends that wait for the host run only if named
    return choose_backends(requested, shape, device, store, sync_free=sync_free or requested == "auto")


def mlp_shape(plan: Plan) -> MlpShape:
    """Return the shape of a rank's experts under balanced routing."""
    model, layout = plan.model, plan.layout
    top_k = max(model.top_k // layout.ep, 1)
    return MlpShape(
        plan.tokens * layout.etp * model.top_k // top_k,
        model.hidden_size,
        model.expert_ffn_size // layout.etp,
        model.num_experts // layout.ep,
        top_k,
        plan.dtype,
    )


def refuse_waiting_experts(plan: Plan, device: torch.device, *, fuses: bool) -> None:
    """Raise ConfigError if the experts' GEMMs would sync although moe.sync_free_stage forbids it."""
    stage, scope, dtype = plan.moe.sync_free_stage, plan.graph.scope, plan.dtype
    waits = device.type == "cuda" and not has_grouped_kernel(dtype, device)
    if stage < EXPERTS_STAGE or not waits or not has_experts(plan.model):
        return
    adapted = "model.lora_targets without experts" if adapts_experts(plan.model) else ""
    needed = [] if fuses else [adapted or "compile.enabled=true with the pass fuse_experts"]
    if plan.moe.experts == "torch":
        needed.append("moe.experts=auto")
    if not needed:
        return
    half = "precision.compute=bf16, " if has_grouped_kernel(torch.bfloat16, device) else ""
    lower = "graph.scope=none with " if lowest_stage(scope) >= EXPERTS_STAGE else ""
    raise ConfigError(
        f"moe.sync_free_stage={stage} (graph.scope={scope} needs {lowest_stage(scope)}): the experts "
        f"must not wait for the host, but torch's grouped GEMMs in {dtype} do on this device; use "
        f"{' and '.join(needed)}, {half}or {lower}moe.sync_free_stage=auto"
    )


def _need_compiler() -> None:
    words = shlex.split(os.environ.get("CXX", "g++"))
    if not words or shutil.which(words[0]) is None:
        raise ConfigError(
            f"compile.enabled=true needs a C++ compiler on a CPU, and {' '.join(words) or 'CXX'} is not "
            f"found; install g++, set CXX, or use compile.enabled=false"
        )
