"""Suites of training runs: steps by graph scope; a ladder, one feature more in each run; and projections."""

import functools
import itertools
import math
import re
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from graphmoe.bench import NOISE, BenchArgs, card_of_device, jobs
from graphmoe.bench.cases import BYTES_PER_S, Measured, Row, Suite, chosen, earlier_rows
from graphmoe.bench.jobs import RunCase, Trained, key_of, numbers_of_run, refuse, run_case, split_list
from graphmoe.config.schema import ComputeDtype, ConfigError, RunConfig
from graphmoe.model.sizes import count_parameters
from graphmoe.optim.storage import kept_of
from graphmoe.plan.costs.hardware import Card
from graphmoe.plan.plan import plan_of
from graphmoe.project.document import MEMORY_ERROR, projected
from graphmoe.run.machine import device_name, git_commit, memory_of
from graphmoe.segments import CAPTURABLE, FULL_ITERATION, SCOPES
from graphmoe.trace.summary import largest, summarise
from graphmoe.training.memory import PlaceMemory, allocated_bytes, has_margin, memory_of_places

DATA, TINY, LITE = jobs.DATA, jobs.TINY, jobs.LITE
WHOLE = ("model=deepseek_v2_lite", *DATA, "data.seq_len=4096", "precision.compute=bf16")
QWEN = ("model=qwen3_30b_a3b", "model.num_layers=4", *DATA)
PLAIN = ("graph.scope=none", "pipeline.ep_overlap=false")
LONG, SHORT = ("data.seq_len=4096", "precision.compute=bf16", *PLAIN), ("data.seq_len=32",)
MEMORY = (
    "Memory: most in torch's allocator at a time, of the worst rank; GPU GiB: all at the end, with graphs."
)
RECORDED_STEPS = 3  # after the timed ones; a trace of them is read
PLANNED = "planned_rank_load"  # slots of the fullest rank over the mean, by a plan of replicas
NUM_KERNELS = 10  # largest kernels of a row
PEAK_TFLOPS = 989.0  # dense bf16 of an H100 or H200, which published figures of MFU count
MICRO_BATCHES = 4  # of a rank in a step, if train.global_batch_size is not among the overrides
MOST_TIME = 0.10  # error of a projected time beyond which a row is a miss


RUNGS: dict[str, tuple[str, tuple[str, ...]]] = {
    "baseline": (
        "compiled, without the rows below",
        ("moe.dispatcher=alltoall", "moe.balance=none", "graph.scope=none", "pipeline.ep_overlap=false")
        + ("passes.disabled=[fuse_loss]", "host.numa=none", "host.manual_gc=false", "precision.fp8=none"),
    ),
    "loss_fusion": ("logits are never whole", ("passes.disabled=[]",)),
    "symm": ("GPUs read each other's tokens", ("moe.dispatcher=symm",)),
    "replicas": ("replicas of hot experts", ("moe.balance=replicas",)),
    "partial": ("graphs of attention, router and preprocessing", ("graph.scope=partial",)),
    "full_iteration": ("the whole step is one graph", ("graph.scope=full_iteration",)),
    "ep_overlap": ("a backward beside the next forward", ("pipeline.ep_overlap=true",)),
    "host_tuning": ("NUMA binding, garbage at fixed steps", ("host.numa=auto", "host.manual_gc=true")),
    "fp8": ("GEMMs in fp8", ("precision.fp8=rowwise",)),
}
"""Each run (rung) of the ladder: text and overrides, which later rungs keep; sizes follow."""
OF_SEVERAL = "symm", "replicas", "ep_overlap"  # rungs without effect on one GPU
LAST = "host_tuning"  # in bf16
TAIL_STEPS = 300  # of this rung, which p99 judges, and of the one before it, in all passes
FULL_RUNS: dict[str, tuple[int, int, tuple[str, ...]]] = {
    "lite_mbs1_none": (1, 1, (*LITE, *LONG)),
    "lite_mbs1_layer": (1, 1, (*LITE, *LONG, "graph.scope=layer")),
    "lite_mbs4_full": (4, 1, (*LITE, *LONG, "graph.scope=full_iteration")),
    "lite_mbs4_recompute": (4, 1, (*LITE, *LONG, "recompute.ops=[layernorm,mla_up_proj,core_attn]")),
    "lite_mbs2_times_4": (2, 4, (*LITE, *LONG)),
    "lite_stage3_partial": (2, 1, (*LITE, *LONG, "moe.sync_free_stage=3", "graph.scope=partial")),
    "qwen_mbs2": (2, 1, (*QWEN, *LONG)),
    "qwen_mbs4_recompute_all": (4, 1, (*QWEN, *LONG, "recompute.all=true", "graph.scope=full_iteration")),
    "small_none": (4, 1, ("model=tiny", *DATA, "data.seq_len=256", "precision.compute=bf16", *PLAIN)),
}
"""Micro-batch size, micro-batches of a step for each rank along dp, and overrides of each run."""
SMALL = (*TINY, *SHORT, *PLAIN)
TINY_RUNS = {"plain": (1, 1, SMALL), "recompute": (1, 1, (*SMALL, "recompute.all=true"))}


def step_cases(args: BenchArgs, device: str, full: bool, ranks: int) -> list[RunCase]:
    """Return runs of ``suite=step``, for each shape and graph scope asked for. *Raises* ConfigError."""
    refuse(args)
    shapes: list[tuple[int, int]] = [(1, 4096), (4, 4096), (1, 512)] if full else [(2, 32)]
    if args.micro_batch_sizes or args.seq_lens:
        sizes = args.micro_batch_sizes or [*dict.fromkeys(size for size, _ in shapes)]
        shapes = [*itertools.product(sizes, args.seq_lens or [shapes[0][1]])]
    # none first and last, for the drift of the device's clock
    wanted = [(scope, "") for scope in sorted(_scopes(args.scopes), key=lambda scope: scope != "none")]
    wanted += [("none", "_again")] * (len(wanted) > 1 and wanted[0][0] == "none")
    cases = []
    for (size, seq_len), (scope, again) in itertools.product(shapes, wanted):
        shape = f"mbs{size}_s{seq_len}"
        defaults = (*(LITE if full else TINY), *PLAIN[1:], f"train.global_batch_size={size * ranks}")
        fixed = [f"graph.scope={scope}", f"train.micro_batch_size={size}", f"data.seq_len={seq_len}"]
        row = {"case": shape, "scope": scope, "again": bool(again)}
        name = f"{shape}/{scope.strip('[]').replace(',', '+')}{again}"
        cases.append(run_case(args, device, ranks, name, row, defaults, fixed, RECORDED_STEPS))
    return cases


def _scopes(text: str) -> list[str]:
    scopes, whole = split_list(text), [*SCOPES, FULL_ITERATION]
    for scope in scopes:
        names = re.fullmatch(r"\[(.+)\]", scope)
        listed = {name.strip() for name in names[1].split(",")} if names else {scope}
        if not listed <= {*(CAPTURABLE if names else whole)}:
            raise ConfigError(
                f"scopes={scope}: use {', '.join(whole)}, or a list in brackets of any of "
                f"{', '.join(CAPTURABLE)}, such as scopes=[none,[attn,loss]]"
            )
    if not scopes:
        raise ConfigError("scopes= is empty; use scopes=none,full_iteration or more of them")
    return scopes


def step_numbers(config: RunConfig, ranks: int, found: Trained, repeats: int) -> Row:
    """Return measurements of the timed steps, and of the profiled steps after them."""
    assert found.trace is not None
    timed = found.steps[-repeats - RECORDED_STEPS : -RECORDED_STEPS]
    row, recorded = numbers_of_run(config, ranks, timed, found.summary), summarise(found.trace, 1)
    kernels = [(a.name, a.end - a.start) for a in found.trace.activities]
    moved = kept_of(config.optim)[0].bytes_moved * count_parameters(config.model)["total"]["full"]
    idle, first = None, found.trace.steps[0]
    if recorded.idle is not None:
        idle = max(0.0, 1 - (1 - recorded.idle) * recorded.step_ms / row["median_ms"])
    return {
        **row,
        "floor_with_optimizer_ms": row["floor_ms"] + moved / BYTES_PER_S * 1e3,
        "idle_share": idle,
        "host_ms": (first.end - first.start) / 1e3,  # it started with the device idle
        "kernels": [vars(kernel) for kernel in largest(kernels, RECORDED_STEPS, NUM_KERNELS)],
        "pool_bytes": found.captured.get("pool_bytes"),
        "graphs": found.captured.get("graphs"),
        "capture_s": found.captured.get("seconds"),
    }


STEP = Suite(
    functools.partial(jobs.measure, step_cases, step_numbers),
    "case: {case} | scope: {scope}{again:?, again} | tokens/s/GPU: {tokens_per_s:,.0f} | "
    "step ms: {median_ms:.2f} | p10 to p90: {p10_ms:.2f} to {p90_ms:.2f} | "
    "step / floor: {time_over_floor:.2f} | peak GiB: {peak_gib:.2f} | GPU GiB: {device_gib:.2f} | "
    "GPU idle %: {idle_share:%*.1f} | host ms: {host_ms:.2f} | "
    "floor ms: {floor_ms:.2f}, {floor_with_optimizer_ms:.2f} | pool GiB: {pool_bytes:Gi*.2f} | "
    "capture s: {capture_s:.2f}",
    "Floor: FLOPs at {method[floor_flops_per_s]:T*.0f} TFLOP/s, then with the bytes that the update moves at "
    "{method[floor_bytes_per_s]:T*.1f} TB/s, both as measured on an H200. Step: median of {method[repeats]} "
    f"by the device's clock. Host and GPU idle are of {RECORDED_STEPS} further recorded steps: until "
    f"the first, which starts on an idle device, returns; share of a step in which nothing runs.\n{MEMORY}",
)


def measure_rungs(args: BenchArgs, device: torch.device, full: bool) -> Measured:
    """Run all rungs, then sizes of micro-batches with the settings of the fastest rung in bf16."""
    until = time.monotonic() + (args.stop_after_s or math.inf)
    memory = memory_of(device) if device.type == "cuda" else math.inf
    facts = {"commit": git_commit(), "device": device_name(device), "limit_s": args.limit_s}
    # What failed runs again only with another limit
    earlier = [row if row["error"] else row | {"limit_s": args.limit_s} for row in earlier_rows(args.out)]

    def measured(are_rungs: bool, best: str) -> Measured:
        def cases_of(_: BenchArgs, kind: str, full: bool, ranks: int) -> list[RunCase]:
            runs = ladder_cases(args, kind, full, ranks, memory, best)
            runs = [run for run in runs if (run.name in RUNGS) == are_rungs]
            return [
                run._replace(name=f"{run.name}, pass {number}", row=run.row | facts | {"pass": number})
                for number in range(1, args.passes + 1)
                for run in (runs if number % 2 else runs[::-1])  # so that a drift of the device cancels out
            ]

        every = replace(args, only=[])
        return jobs.measure(cases_of, rung_numbers, every, device, full, earlier=earlier, until=until)

    rows, _, method = measured(True, LAST)
    rates = {row["rung"]: row["tokens_per_s"] for row in ladder_rows(rows) if not row["error"]}
    best = max(rates.keys() - {"fp8"}, key=rates.__getitem__, default=LAST)
    left_out = [f"{name}: one rank has all experts" for name in OF_SEVERAL if method["ranks"] == 1]
    rows = ladder_rows([*rows, *measured(False, best)[0]])
    return rows, left_out, method | {"passes": args.passes, "best": best}


def ladder_cases(
    args: BenchArgs, device: str, full: bool, ranks: int, memory: float = math.inf, best: str = LAST
) -> list[RunCase]:
    """Return rungs, each with the settings of those before it, then sizes with those of the rung ``best``.

    A size projected to need more than ``memory`` bytes recomputes norms; all rungs do if one of them needs
    more. *Raises* ConfigError.
    """
    of_rungs = "graph", *(key_of(word) for _, words in RUNGS.values() for word in words)
    instead = dict.fromkeys(of_rungs, "only=... to choose rungs")
    instead |= dict.fromkeys(("parallel.", "launch."), "nproc=...")
    if any(re.match(r"recompute\b|compile(\.enabled)?=", word) for word in refuse(args, **instead)):
        memory = math.inf  # no recompute beside the user's own, or without compilation
    sizes, set_by = args.micro_batch_sizes or ([2, 1, 4] if full else [1, 2]), dict[str, str]()
    planned: dict[str, tuple[str, list[str], int]] = {}
    for name, (what, words) in RUNGS.items():
        if ranks > 1 or name not in OF_SEVERAL:
            set_by |= {key_of(word): word for word in words}
            set_by |= {"moe.dispatcher": "moe.dispatcher=local"} if ranks == 1 else {}
            planned[name] = what, [*set_by.values()], sizes[0]
    rungs = [*planned]
    for size, fp8 in itertools.product(sorted({*sizes}), ("", "fp8")):
        every = [*planned[best][1], *(RUNGS["fp8"][1] if fp8 else ())]
        planned[f"mbs{size}{fp8 and '_fp8'}"] = f"as {best}{fp8 and ', in fp8'}", every, size

    def case(name: str, *more: str) -> RunCase:
        (what, words, size), is_tail = planned[name], name in rungs[-3:-1]  # host_tuning, the one before it
        steps = max(args.repeats, math.ceil(TAIL_STEPS / args.passes)) if is_tail else args.repeats
        defaults = (
            *(WHOLE if full else (*TINY, *SHORT)),
            f"train.global_batch_size={size * ranks * MICRO_BATCHES}",
        )
        fixed = [*words, *more, f"train.micro_batch_size={size}", f"parallel.ep={ranks}", "launch.nodes=1"]
        row = {"rung": name, "what": ", ".join([what, *more]), "ranks": ranks}
        return run_case(replace(args, repeats=steps), device, ranks, name, row, defaults, fixed)

    names = chosen([*planned], args.only)
    cases = {name: case(name) for name in (names if memory == math.inf else planned)}
    tight = {name for name, run in cases.items() if not fits(run.config, ranks, memory)}
    tight |= {*rungs} if tight & {*rungs} else set()
    cases |= {name: case(name, "recompute.ops=[layernorm]") for name in tight}
    return [cases[name] for name in names]


def fits(config: RunConfig | ConfigError, ranks: int, memory: float) -> bool:
    """Return False if a projection says that a rank needs more than 95% of ``memory`` bytes."""
    if isinstance(config, ConfigError) or memory == math.inf:
        return True
    plan = plan_of(config, ranks).with_its_transport()
    places = memory_of_places(plan, on_nvidia=torch.version.hip is None)
    return has_margin(max(place.total for place in places), memory)


def rung_numbers(config: RunConfig, ranks: int, found: Trained, _: int) -> Row:
    """Return measurements of the timed steps; runs with equal micro-batches should have close losses."""
    steps = found.steps[config.graph.warmup_steps + 1 + jobs.WARM_UP_STEPS :]
    row = numbers_of_run(config, ranks, steps, found.summary)
    return {
        **row,
        "mfu": row["tflops"] / PEAK_TFLOPS,
        "rank_load": statistics.fmean(step.get("rank_load", 1.0) for step in steps),
        "replica_load": max((s[PLANNED] for s in steps if PLANNED in s), default=None),
        "first_step_s": found.summary["time_to_first_step_s"],
        "loss": steps[-1]["loss"],
    }


def ladder_rows(rows: Sequence[Row]) -> list[Row]:
    """Return each rung's median job, with gains over the last rung that worked; then jobs that failed."""
    found, before = list[Row](), dict[int, float]()
    for name in dict.fromkeys(row["rung"] for row in rows):
        of_rung = [row for row in rows if row["rung"] == name]
        if worked := sorted((r for r in of_rung if not r["error"]), key=lambda row: row["tokens_per_s"]):
            rates = {row["pass"]: row["tokens_per_s"] for row in worked}
            gains = [rate / before[n] - 1 for n, rate in rates.items() if n in before and name in RUNGS]
            found.append(worked[(len(worked) - 1) // 2] | {"gain": gain_words(gains), "jobs": of_rung})
            steps_ms, before = [ms for job in worked for ms in job["samples_ms"]], rates
            if len(steps_ms) >= TAIL_STEPS:
                p50, p99 = (statistics.quantiles(steps_ms, n=100, method="inclusive")[n] for n in (49, 98))
                found[-1] |= {"p50_ms": p50, "p99_ms": p99, "p99_over_p50": p99 / p50}
        found += {row["error"]: row for row in of_rung if row["error"]}.values()
    return found


def gain_words(gains: Sequence[float]) -> str:
    if not gains:
        return ""
    gain, spread = statistics.median(gains), f" ({min(gains):+.1%} to {max(gains):+.1%})"
    return ("no gain" if abs(gain) <= NOISE else f"{gain:+.1%}") + spread * (len(gains) > 1)


LADDER = Suite(
    measure_rungs,
    "rung: `{rung}` | what: {what} | tokens/s/GPU: {tokens_per_s:,.0f} | gain: {gain} | "
    "step ms: {median_ms:.1f} | p50, p99 ms: {p50_ms:.1f}, {p99_ms:.1f} | p99 / p50: {p99_over_p50:.3f} | "
    "MFU %: {mfu:%*.1f} | peak GiB: {peak_gib:.1f} | GPU GiB: {device_gib:.1f} | "
    "busiest rank: {rank_load:.2f} | with replicas: {replica_load:.2f}",
    "EP {method[ranks]}, on as many GPUs. A rung has the settings of those before it; `mbs2` has 2 "
    "sequences in a micro-batch and the settings of `{method[best]}`. Each was run {method[passes]} times, "
    "in alternating order; a row is the run of median speed.\n"
    "Gain: median of the gains over the rung before in the same pass, and their spread; no gain: within "
    f"{NOISE:.0%}. p50 and p99: of all runs' steps. MFU: of {PEAK_TFLOPS:.0f} TFLOP/s, without recompute. "
    "Busiest rank: its slots over the mean; with replicas: the most in a layer and micro-batch.\n"
    f"{MEMORY}",
)


def measure_projections(args: BenchArgs, device: torch.device, full: bool) -> Measured:
    card = card_of_device(device)

    def numbers_of(config: RunConfig, ranks: int, found: Trained, repeats: int) -> Row:
        measured = numbers_of_run(config, ranks, found.steps[-repeats:], found.summary)
        return measured | errors_of(*projected_run(config, card, args.rates, ranks), measured)

    brief = "{projected_gib:.2f} of {peak_gib:.2f} GiB ({memory_error:+.1%}), {projected_ms:.2f} of "
    brief += "{median_ms:.2f} ms ({time_error:+.1%})"
    rows, left_out, method = jobs.measure(projection_cases, numbers_of, args, device, full, brief)
    rates = "those without a file" if args.rates is None else args.rates.name
    method |= {"card": card.name, "rates": rates, "misses": [r["case"] for r in rows if r.get("misses")]}
    return rows, left_out, method


def projection_cases(args: BenchArgs, device: str, full: bool, ranks: int) -> list[RunCase]:
    """Return runs to measure and project, each with the user's overrides. *Raises* ConfigError."""
    refuse(args)
    cases = []
    for name, (size, micro_batches, words) in (FULL_RUNS if full else TINY_RUNS).items():
        batch = (f"train.micro_batch_size={size}", f"train.global_batch_size={size * micro_batches * ranks}")
        cases.append(run_case(args, device, ranks, name, {"case": name, "ranks": ranks}, (*batch, *words)))
    return cases


def projected_run(
    config: RunConfig, card: Card, rates: Path | None, num_ranks: int
) -> tuple[list[PlaceMemory], dict[str, Any]]:
    """Project a run: return memory by pipeline position, and the step's times. *Raises* ConfigError."""
    if config.precision.compute is ComputeDtype.auto:
        config = replace(config, precision=replace(config.precision, compute=ComputeDtype.bf16))
    return projected(plan_of(config, num_ranks), card, rates)


def errors_of(places: Sequence[PlaceMemory], step: Row, measured: Row) -> Row:
    """Return projected time and memory, and their errors: projected over measured, less 1."""
    times = step["time_s"]
    seconds = {f"{name}:forward": each for name, each in times["forward_by_segment"].items()}
    seconds |= {f"{name}:backward": each for name, each in times["backward_by_segment"].items()}
    seconds |= {"update": times["update"], "gradients": times["exposed_gradients"], "host": times["host"]}
    projected_ms, projected_gib = step["step_time_s"] * 1e3, max(map(allocated_bytes, places)) / 2**30
    memory, time = projected_gib / measured["peak_gib"] - 1, projected_ms / measured["median_ms"] - 1
    misses = {"memory": abs(memory) > MEMORY_ERROR, "time": abs(time) > MOST_TIME}
    return {
        "projected_gib": projected_gib,
        "projected_ms": projected_ms,
        "projected_by_segment_ms": {name: round(each * 1e3, 4) for name, each in seconds.items()},
        "memory_error": memory,
        "time_error": time,
        "misses": [name for name, missed in misses.items() if missed],
    }


PROJECTION = Suite(
    measure_projections,
    "run: {case} | projected GiB: {projected_gib:.2f} | measured GiB: {peak_gib:.2f} | "
    "error of GiB: {memory_error:+.1%}{memory_miss:? miss} | projected ms: {projected_ms:.2f} | "
    "measured ms: {median_ms:.2f} | p10 to p90: {p10_ms:.2f} to {p90_ms:.2f} | "
    "error of ms: {time_error:+.1%}{time_miss:? miss}",
    f"Misses, memory beyond {MEMORY_ERROR:.0%} or time beyond {MOST_TIME:.0%}: {{method[misses]}}. Memory: "
    "most in torch's allocator at a time, of the worst rank. Time: median of {method[repeats]} steps. Rates: "
    "{method[rates]}, of {method[card]}.",
    lambda row: row | {f"{name}_miss": name in row["misses"] for name in ("memory", "time")},
)
