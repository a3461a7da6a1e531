"""Suites that train with some overrides and read what the run wrote: step, ladder and projection.

``suite=step`` times whole steps of one micro-batch by shape and graph scope, each row in a process of its
own, so that no pool of memory and no cache outlives it. ``suite=ladder`` runs one job on several GPUs, faster
from rung to rung, in the order in which Primus published its gains for this model (AMD, MI355X).
``suite=projection`` runs short jobs beside the memory and the time that are projected of them.
"""

from __future__ import annotations

import itertools
import re
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

import torch

from graphmoe.bench import step_times
from graphmoe.bench.arguments import (
    BenchArgs,
    compose_config,
    key_of,
    numbers,
    refuse,
    split_list,
    visible,
    without,
)
from graphmoe.bench.calibrate_suite import card_of_device
from graphmoe.bench.cases import Measured, chosen, one_by_one
from graphmoe.bench.own_process import ProcessFailed, in_own_process, train
from graphmoe.bench.run_rows import UPDATE_BYTES, LadderRow, ProjectionRow, StepRow, take_gains
from graphmoe.bench.step_times import UNREAD
from graphmoe.config.schema import ConfigError, RunConfig
from graphmoe.segments import CAPTURABLE, FULL_ITERATION, SCOPES

AnyRow = TypeVar("AnyRow", StepRow, LadderRow, ProjectionRow)


@dataclass(frozen=True)
class RunCase(Generic[AnyRow]):
    """One run: the row to fill, whose overrides are all that the run sets."""

    name: str
    row: AnyRow


def run_case(case: RunCase[AnyRow], measure: Callable[[AnyRow, RunConfig], None]) -> list[AnyRow]:
    """Measure a run into its row; a run that fails leaves the reason there. Raises nothing."""
    row = case.row
    try:
        measure(row, compose_config(*row.overrides))
    except (ConfigError, ProcessFailed, OSError) as error:
        row.error = " ".join(str(error).split())
    return [row]


class StepSetting(NamedTuple):
    """Overrides of ``suite=step``, and its shapes: sequences of the micro-batch, and their tokens."""

    words: tuple[str, ...]
    shapes: tuple[tuple[int, int], ...]


STEP_FULL = StepSetting(
    ("model=deepseek_v2_lite", "model.num_layers=6", "data=synthetic", "optim.lr=1e-6"),
    ((1, 4096), (4, 4096), (1, 512)),
)
STEP_TINY = StepSetting(("model=tiny", "model.num_layers=2", "data=synthetic", "optim.lr=1e-6"), ((2, 32),))
STEP_KEYS = {
    "graph": "scopes",
    "graph.scope": "scopes",
    "train.micro_batch_size": "micro_batch_sizes",
    "data.seq_len": "seq_lens",
    "train.steps": "repeats",
    "run.device": "device",
}
"""Keys that the suite sets, and its argument for each."""
OTHER_STEPS = 30
"""More than all steps of a row of ``suite=step`` that are neither timed nor before its capture."""


def measure_steps(args: BenchArgs, device: torch.device, full: bool) -> Measured:
    """Run ``suite=step``."""
    cases = chosen(step_cases(STEP_FULL if full else STEP_TINY, device.type, args), args.only)

    def measure(row: StepRow, config: RunConfig) -> None:
        row.take_floor(config)
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            arguments = config, Path(folder), args.repeats
            row.take(in_own_process(step_times.measure, *arguments, limit_s=args.limit_s))

    rows = one_by_one(
        cases,
        lambda case: run_case(case, measure),
        lambda found: found[0].error or f"{found[0].median_ms:.2f} ms, {found[0].tokens_per_s:,.0f} tokens/s",
        args.out,
    )
    method = {
        "warm_up_steps": f"graph.warmup_steps + {step_times.WARM_UP_STEPS}",
        "host_steps": step_times.HOST_STEPS,
        "profiled_steps": step_times.PROFILED_STEPS,
        "max_s_per_row": args.limit_s,
        "update_bytes_per_parameter": UPDATE_BYTES,
    }
    return rows, [], method


def step_cases(setting: StepSetting, device: str, args: BenchArgs) -> list[RunCase[StepRow]]:
    """Cases of the shapes and scopes asked for; ``none`` first and last, for the drift of the device's clock.

    *Raises* ConfigError.
    """
    own, wanted = split_list(args.overrides or ""), split_list(args.scopes)
    refuse(own, STEP_KEYS, UNREAD)
    _check_scopes(wanted)
    shapes: Sequence[tuple[int, int]] = setting.shapes
    if args.micro_batch_sizes or args.seq_lens:
        sizes = numbers("micro_batch_sizes", args.micro_batch_sizes or "")
        lengths = numbers("seq_lens", args.seq_lens or "") or [shapes[0][1]]
        shapes = list(itertools.product(sizes or list(dict.fromkeys(s for s, _ in shapes)), lengths))
    order = sorted(wanted, key=lambda scope: scope != "none")
    order += ["none"] if "none" in wanted and len(wanted) > 1 else []
    cases = []
    for size, length in shapes:
        words = [
            *without(setting.words, own),
            *without((f"train.global_batch_size={size}",), own),
            *own,
            *UNREAD,
            f"run.device={device}",
            f"train.micro_batch_size={size}",
            f"data.seq_len={length}",
        ]
        config = compose_config(*words, "graph.scope=none")  # what is wrong with it is wrong with every row
        words += _steps_words(args.repeats + config.graph.warmup_steps + OTHER_STEPS)
        for number, scope in enumerate(order):
            shape, again = f"mbs{size}_s{length}", number >= len(wanted)
            name = f"{shape}/{scope.strip('[]').replace(',', '+')}{'_again' if again else ''}"
            row = StepRow(case=shape, scope=scope, again=again, overrides=[*words, f"graph.scope={scope}"])
            cases.append(RunCase(name, row))
    return cases


def _check_scopes(scopes: Sequence[str]) -> None:
    for scope in scopes:
        names = re.fullmatch(r"\[(.+)\]", scope)
        listed = {name.strip() for name in names[1].split(",")} if names else set()
        known = listed <= set(CAPTURABLE) if names else scope in (*SCOPES, FULL_ITERATION)
        if not known:
            raise ConfigError(
                f"scopes={scope}: use any of {', '.join([*SCOPES, FULL_ITERATION])}, and lists of "
                f"{', '.join(CAPTURABLE)} in brackets of their own, such as scopes=[none,[attn,loss]]"
            )
    if not scopes:
        raise ConfigError("scopes= names none; use scopes=none,full_iteration or more of them")


def _steps_words(steps: int) -> list[str]:
    return [f"train.steps={steps}", f"train.log_interval={steps}"]


class Rung(NamedTuple):
    """The changes of one rung, which the rungs after it keep."""

    name: str
    words: tuple[str, ...]
    what: str


RUNGS = (
    Rung(
        "baseline",
        ("moe.dispatcher=alltoall", "graph.scope=none", "pipeline.ep_overlap=false")
        + ("passes.disabled=[fuse_loss]", "host.numa=none", "host.manual_gc=false"),
        "alltoall with counts on the host",
    ),
    Rung("loss_fusion", ("passes.disabled=[]",), "logits are never whole"),
    Rung("symm", ("moe.dispatcher=symm",), "GPUs read each other's tokens"),
    Rung("partial", ("graph.scope=partial",), "graphs of attention, router and preprocessing"),
    Rung("full_iteration", ("graph.scope=full_iteration",), "the whole step is one graph"),
    Rung("ep_overlap", ("pipeline.ep_overlap=true",), "a backward beside the next forward"),
    Rung("host_tuning", ("host.numa=auto", "host.manual_gc=true"), "NUMA binding, garbage at fixed steps"),
)
"""All but the larger micro-batches, which come last."""


class LadderSetting(NamedTuple):
    """Overrides of ``suite=ladder``, and its micro-batch sizes: of all rungs, then of further rungs."""

    words: tuple[str, ...]
    micro_batch_sizes: tuple[int, ...]


LADDER_FULL = LadderSetting(
    ("model=deepseek_v2_lite", "data=synthetic", "data.seq_len=4096", "optim.lr=1e-6")
    + ("recompute.ops=[layernorm,mla_up_proj]",),
    (2, 4),
)
LADDER_TINY = LadderSetting(
    ("model=tiny", "model.num_layers=2", "data=synthetic", "data.seq_len=16", "optim.lr=1e-6"), (1, 2)
)
LADDER_KEYS = {
    "train.micro_batch_size": "micro_batch_sizes",
    "train.steps": "repeats",
    "run.device": "device",
    "launch.nproc": "nproc",
    "parallel.ep": "nproc",
}
LADDER_WARM_UP = 5
"""Steps before the timed ones, after those of graph.warmup_steps and the step that is captured."""
MICRO_BATCHES = 4
"""Micro-batches of a rank in a step, if train.global_batch_size is not among the overrides."""


def measure_rungs(args: BenchArgs, device: torch.device, full: bool) -> Measured:
    """Run ``suite=ladder``."""
    num_ranks = args.nproc or visible(device)
    cases = ladder_cases(LADDER_FULL if full else LADDER_TINY, device.type, num_ranks, args)

    def measure(row: LadderRow, config: RunConfig) -> None:
        row.take_floor(config)
        steps, summary = train(row.overrides, args.limit_s)
        row.take(steps[-args.repeats :], summary)

    rows = one_by_one(
        chosen(cases, args.only),
        lambda case: run_case(case, measure),
        lambda found: found[0].error or f"{found[0].median_ms:.1f} ms, {found[0].tokens_per_s:,.0f} a GPU",
        args.out,
    )
    take_gains(rows)
    method = {
        "ranks": num_ranks,
        "warm_up_steps": f"graph.warmup_steps + 1 + {LADDER_WARM_UP}",
        "max_s_per_row": args.limit_s,
    }
    return rows, [], method


def ladder_cases(
    setting: LadderSetting, device: str, num_ranks: int, args: BenchArgs
) -> list[RunCase[LadderRow]]:
    """The rungs, each with the settings of those before it. *Raises* ConfigError."""
    own = split_list(args.overrides or "")
    _check_ladder_overrides(own)
    sizes = numbers("micro_batch_sizes", args.micro_batch_sizes or "") or list(setting.micro_batch_sizes)
    larger = [Rung(f"micro_batch_{size}", (), f"{size} sequences at once") for size in sizes[1:]]
    of_rungs = [sizes[0]] * len(RUNGS) + sizes[1:]
    base = (*without(setting.words, own), f"parallel.ep={num_ranks}", *own, *UNREAD, "log.sample_tokens=0")
    cases: list[RunCase[LadderRow]] = []
    changed: dict[str, str] = {}
    steps: int | None = None
    for rung, size in zip((*RUNGS, *larger), of_rungs, strict=True):
        changed |= {key_of(word): word for word in rung.words}
        words = [
            *without((f"train.global_batch_size={size * num_ranks * MICRO_BATCHES}",), own),
            *base,
            *changed.values(),
            f"train.micro_batch_size={size}",
            f"run.device={device}",
            f"launch.nproc={num_ranks}",
            "launch.nodes=1",
        ]
        if steps is None:  # what is wrong with the first rung is wrong with all, as a rule
            steps = args.repeats + LADDER_WARM_UP + compose_config(*words).graph.warmup_steps + 1
        row = LadderRow(
            rung=rung.name, what=rung.what, ranks=num_ranks, overrides=[*words, *_steps_words(steps)]
        )
        cases.append(RunCase(rung.name, row))
    return cases


def _check_ladder_overrides(own: Sequence[str]) -> None:
    of_rungs = {key_of(word): rung.name for rung in RUNGS for word in rung.words}
    refuse(own, LADDER_KEYS, UNREAD)
    for word in own:
        key = key_of(word)
        if key in of_rungs or key == "graph":
            rung = of_rungs.get(key, "partial")
            raise ConfigError(f"overrides={word}: the rung {rung} sets {key}; choose rungs by only=...")
        if re.match(r"(parallel|launch)\b", key):
            raise ConfigError(f"overrides={word}: the suite has all GPUs of one node along parallel.ep")


class Run(NamedTuple):
    """One run of ``suite=projection``; ``micro_batches`` are those of a step for each rank along dp."""

    micro_batch_size: int
    words: tuple[str, ...]
    micro_batches: int = 1


class ProjectionSetting(NamedTuple):
    """Overrides of all runs of ``suite=projection``, and the runs."""

    words: tuple[str, ...]
    runs: dict[str, Run]


LITE = ("model=deepseek_v2_lite", "model.num_layers=6")
QWEN = ("model=qwen3_30b_a3b", "model.num_layers=4")
PROJECTION_FULL = ProjectionSetting(
    ("data=synthetic", "data.seq_len=4096", "optim.lr=1e-6", "precision.compute=bf16"),
    {
        "lite_mbs1_none": Run(1, LITE),
        "lite_mbs1_layer": Run(1, (*LITE, "graph.scope=layer")),
        "lite_mbs4_full": Run(4, (*LITE, "graph.scope=full_iteration")),
        "lite_mbs4_recompute": Run(4, (*LITE, "recompute.ops=[layernorm,mla_up_proj,core_attn]")),
        "lite_mbs2_times_4": Run(2, LITE, micro_batches=4),
        "lite_stage3_partial": Run(2, (*LITE, "moe.sync_free_stage=3", "graph.scope=partial")),
        "qwen_mbs2": Run(2, QWEN),
        "qwen_mbs4_recompute_all": Run(4, (*QWEN, "recompute.all=true", "graph.scope=full_iteration")),
        "small_none": Run(4, ("model=tiny", "data.seq_len=256")),
    },
)
PROJECTION_TINY = ProjectionSetting(
    ("model=tiny", "model.num_layers=2", "data=synthetic", "data.seq_len=32", "optim.lr=1e-6"),
    {"plain": Run(1, ()), "recompute": Run(1, ("recompute.all=true",))},
)
PROJECTION_KEYS = {"train.steps": "repeats", "run.device": "device", "launch.nproc": "nproc"}
PROJECTION_WARM_UP = 2
"""Steps before the timed ones, after those of graph.warmup_steps and the step that is captured."""


def measure_projections(args: BenchArgs, device: torch.device, full: bool) -> Measured:
    """Run ``suite=projection``."""
    num_ranks, card = args.nproc or 1, card_of_device(device)
    setting = PROJECTION_FULL if full else PROJECTION_TINY
    cases = chosen(projection_cases(setting, device.type, num_ranks, args), args.only)

    def measure(row: ProjectionRow, config: RunConfig) -> None:
        row.take_projection(config, card, args.rates)
        steps, summary = train(row.overrides, args.limit_s)
        row.take(steps[-args.repeats :], summary)

    rows = one_by_one(
        cases,
        lambda case: run_case(case, measure),
        lambda found: found[0].error or _brief(found[0]),
        args.out,
    )
    method = {
        "card": card.name,
        "ranks": num_ranks,
        "rates": None if args.rates is None else args.rates.name,
        "warm_up_steps": f"graph.warmup_steps + 1 + {PROJECTION_WARM_UP}",
        "max_s_per_row": args.limit_s,
    }
    return rows, [], method


def _brief(row: ProjectionRow) -> str:
    return (
        f"{row.projected_gib:.2f} of {row.measured_gib:.2f} GiB ({row.memory_error:+.1%}), "
        f"{row.projected_ms:.2f} of {row.measured_ms:.2f} ms ({row.time_error:+.1%})"
    )


def projection_cases(
    setting: ProjectionSetting, device: str, num_ranks: int, args: BenchArgs
) -> list[RunCase[ProjectionRow]]:
    """The runs with the user's overrides in all of them. *Raises* ConfigError where none can run."""
    own = split_list(args.overrides or "")
    refuse(own, PROJECTION_KEYS, UNREAD)
    cases, errors = [], []
    for name, (size, words, micro_batches) in setting.runs.items():
        base = (
            f"train.micro_batch_size={size}",
            f"train.global_batch_size={size * micro_batches * num_ranks}",
            *without(setting.words, words),
            *words,
        )
        given = [*without(base, own), *own, *UNREAD, "log.sample_tokens=0"]
        given += [f"run.device={device}", f"launch.nproc={num_ranks}"]
        warm_up = 0
        try:
            warm_up = compose_config(*given).graph.warmup_steps
        except ConfigError as error:  # of one run with these words, which its row will say
            errors.append(error)
        given += _steps_words(args.repeats + PROJECTION_WARM_UP + warm_up + 1)
        cases.append(RunCase(name, ProjectionRow(case=name, overrides=given, ranks=num_ranks)))
    if len(errors) == len(cases):
        raise errors[0]
    return cases
