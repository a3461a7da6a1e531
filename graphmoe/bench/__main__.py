"""Measure operations, training steps or exchanges of tokens against what their FLOPs or bytes take at least.

python -m graphmoe.bench suite=ops
python -m graphmoe.bench only=grouped_mlp/v2_lite,swiglu out=ops.json
python -m graphmoe.bench suite=step
python -m graphmoe.bench suite=step overrides=model=mixtral_8x7b,model.num_layers=2 micro_batch_sizes=1,2
python -m graphmoe.bench device=cpu format=json
torchrun --nproc-per-node=4 -m graphmoe.bench suite=dispatch
python -m graphmoe.bench suite=calibrate out=rates.json
python -m graphmoe.bench suite=projection rates=rates.json out=projection.json
python -m graphmoe.bench suite=ladder nproc=4 out=ladder.json

Times are medians of device time; operations find cold caches. A case that fails is a row with the reason, the
others go on, and the exit status is 1. What ends early leaves the rows that it has beside out=ops.json, in
ops.rows.jsonl.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from graphmoe.bench import (
    calibrate_cases,
    calibrate_suite,
    dispatch_suite,
    dispatch_times,
    ladder_suite,
    projection_suite,
    step_suite,
    step_times,
)
from graphmoe.bench.arguments import BenchArgs, Suite, check, visible
from graphmoe.bench.calibrate_suite import CalibrateRow, card_of_device, rates_of_rows, render_calibration
from graphmoe.bench.cases import (
    BYTES_PER_S,
    FLOPS_PER_S,
    Case,
    Row,
    as_plain,
    free_memory,
    run_case,
    without_folders,
)
from graphmoe.bench.dispatch_suite import DispatchSuite, dispatch_cases
from graphmoe.bench.dispatch_table import LINK_BYTES_PER_S, DispatchRow, render_dispatch
from graphmoe.bench.ladder_suite import ladder_cases, run_rung
from graphmoe.bench.ladder_table import LadderRow, draw_ladder, render_ladder, take_gains
from graphmoe.bench.one_by_one import chosen, is_first, keep, one_by_one, rows_file
from graphmoe.bench.ops_suite import FULL, TINY, ops_suite
from graphmoe.bench.ops_table import brief, render_operations
from graphmoe.bench.projection_suite import (
    ProjectionRow,
    projection_cases,
    render_projections,
    run_projection_case,
)
from graphmoe.bench.rank_group import joined_ranks
from graphmoe.bench.step_suite import run_step_case, step_cases
from graphmoe.bench.step_table import UPDATE_BYTES, StepRow, render_steps
from graphmoe.config.arguments import emit, parse_args, run_tool
from graphmoe.config.schema import ConfigError
from graphmoe.ops.timing import FLUSH_BYTES, MAX_CASE_S, WARM_UP_CALLS
from graphmoe.run.machine import describe

log = logging.getLogger(__name__)
CPU_NOTE = "these are times of a CPU at tiny shapes and mean nothing; they show that every case runs"


Measured = tuple[Sequence[object], list[str], dict[str, Any]]
"""Rows, what was left out, and how they were measured."""


def main(argv: list[str]) -> None:
    args = parse_args(BenchArgs, argv, prog="graphmoe.bench")
    logging.basicConfig(format="%(message)s", level=logging.INFO)  # on stderr
    document = bench(args, argv)
    if not is_first():
        sys.exit(any(row["error"] for row in document["rows"]))
    if args.out is not None:
        try:
            args.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"cannot write out={args.out}: {error}") from error
        rows_file(args.out).unlink(missing_ok=True)
    emit(document, render(document), args.format)
    if args.suite is Suite.ladder and args.out is not None:
        draw_ladder(document, args.out.with_suffix(".png"))
    if any(row["error"] for row in document["rows"]):
        sys.exit(1)


def bench(args: BenchArgs, argv: Sequence[str] = ()) -> dict[str, Any]:
    """Run the suite and return the JSON document; progress goes to the log, and rows beside ``out``.

    *Raises* ConfigError.
    """
    device, full = check(args)
    started = time.monotonic()
    if args.out is not None and is_first():
        rows_file(args.out).unlink(missing_ok=True)
    rows, left_out, method = SUITES[args.suite](args, device, full)
    of_rates = [row for row in rows if isinstance(row, CalibrateRow)]
    found = {"rates": rates_of_rows(of_rates)} if args.suite is Suite.calibrate else {}
    return {
        "suite": args.suite.name,
        "environment": _environment(device, argv),
        "method": {
            "repeats": args.repeats,
            "shapes": "full" if full else "tiny",
            "floor_flops_per_s": FLOPS_PER_S,
            "floor_bytes_per_s": BYTES_PER_S,
            "warning": None if device.type == "cuda" else CPU_NOTE,
            **method,
        },
        "left_out": left_out,
        "seconds": round(time.monotonic() - started, 3),
        **found,
        "rows": as_plain(rows),
    }


def _operations(
    args: BenchArgs, device: torch.device, full: bool
) -> tuple[list[Row], list[str], dict[str, Any]]:
    """Rows of ``suite=ops``, what is left out, and how it is measured."""
    cases, left_out = ops_suite(FULL if full else TINY, device, args.peers)
    cases = chosen(cases, args.only)
    for line in left_out:
        log.info("left out: %s", line)

    def run(case: Case) -> list[Row]:
        found = run_case(case, device, args.repeats)
        free_memory(device, after_error=any(row.error for row in found))
        return found

    rows = one_by_one(cases, run, brief, args.out)
    flushed = FLUSH_BYTES if device.type == "cuda" else 0
    method = {"warm_up_calls": WARM_UP_CALLS, "max_s_per_case": MAX_CASE_S, "cache_flush_bytes": flushed}
    return rows, left_out, method


def _steps(
    args: BenchArgs, device: torch.device, full: bool
) -> tuple[list[StepRow], list[str], dict[str, Any]]:
    """Rows of ``suite=step``, nothing left out, and how it is measured."""
    cases = step_cases(
        step_suite.FULL if full else step_suite.TINY,
        device.type,
        args.repeats,
        overrides=args.overrides or "",
        scopes=args.scopes,
        micro_batch_sizes=args.micro_batch_sizes or "",
        seq_lens=args.seq_lens or "",
    )
    cases = chosen(cases, args.only)
    rows = one_by_one(
        cases,
        lambda case: [run_step_case(case, args.repeats, args.limit_s)],
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


def _rungs(
    args: BenchArgs, device: torch.device, full: bool
) -> tuple[list[LadderRow], list[str], dict[str, Any]]:
    """Rows of ``suite=ladder``, nothing left out, and how it is measured."""
    num_ranks = args.nproc or visible(device)
    cases = ladder_cases(
        ladder_suite.FULL if full else ladder_suite.TINY,
        device.type,
        num_ranks,
        args.repeats,
        overrides=args.overrides or "",
        micro_batch_sizes=args.micro_batch_sizes or "",
    )
    cases = chosen(cases, args.only)
    rows = one_by_one(
        cases,
        lambda case: [run_rung(case, num_ranks, args.repeats, args.limit_s)],
        lambda found: found[0].error or f"{found[0].median_ms:.1f} ms, {found[0].tokens_per_s:,.0f} a GPU",
        args.out,
    )
    take_gains(rows)
    method = {
        "ranks": num_ranks,
        "warm_up_steps": f"graph.warmup_steps + 1 + {ladder_suite.WARM_UP_STEPS}",
        "max_s_per_row": args.limit_s,
    }
    return rows, [], method


def _exchanges(
    args: BenchArgs, device: torch.device, full: bool
) -> tuple[list[DispatchRow], list[str], dict[str, Any]]:
    """Rows of ``suite=dispatch``, what is left out, and how it is measured; equal on all ranks."""
    shapes = dispatch_suite.FULL if full else dispatch_suite.TINY
    vendors = dispatch_suite.vendors_of(device, shapes)
    left_out = [f"{choice.value}: {missing}" for choice, missing in vendors.items() if missing]
    for line in left_out * is_first():
        log.info("left out: %s", line)
    here = [choice for choice, missing in vendors.items() if not missing]
    cases = dispatch_cases(shapes, args.blocks, here)
    cases = chosen(cases, args.only)
    with joined_ranks(device) as ranks:
        if ranks.rank:
            logging.getLogger().setLevel(logging.WARNING)
        suite = DispatchSuite(ranks, args.repeats)
        rows = one_by_one(
            cases,
            suite.run,
            lambda found: ", ".join(row.error or f"{row.exchange} {row.median_ms:.3f} ms" for row in found),
            args.out,
        )
        suite.close()
    method = {
        "ranks": ranks.size,
        "rounds": dispatch_times.ROUNDS[device.type],
        "warm_up_samples": dispatch_times.WARM_UP_SAMPLES,
        "experts": suite.backends,
        "priority": dispatch_times.PRIORITY,
        "link_bytes_per_s": LINK_BYTES_PER_S,
    }
    return rows, left_out, method


def _rates(
    args: BenchArgs, device: torch.device, full: bool
) -> tuple[list[CalibrateRow], list[str], dict[str, Any]]:
    """Rows of ``suite=calibrate``, what is left out, and how it is measured."""
    card = card_of_device(device)
    cases = calibrate_cases.calibrate_cases(calibrate_cases.FULL if full else calibrate_cases.TINY)
    is_alone = int(os.environ.get("WORLD_SIZE", "1")) == 1
    rows: list[CalibrateRow] = []
    if is_first():
        rows += one_by_one(
            chosen(cases, args.only),
            lambda case: calibrate_suite.run_calibrate_case(case, card, device, args.repeats),
            calibrate_suite.brief,
            args.out,
        )
        rows.append(calibrate_suite.launch_row(device))
        keep(args.out, rows[-1:])
    if is_alone:
        left_out = ["node: one rank sends nothing; start it with torchrun --nproc-per-node=8"]
        own = [] if device.type == "cuda" else ["compile=none"]
        rows.append(calibrate_suite.host_row(device, args.limit_s, *own))
    else:
        left_out = ["host_us: it is measured by one process; start it with python -m graphmoe.bench"]
        with joined_ranks(device) as ranks:
            rows.append(calibrate_suite.exchange_row(ranks, card, args.repeats))
    keep(args.out, rows[-1:])
    for line in left_out:
        log.info("left out: %s", line)
    method = {
        "card": card.name,
        "kernels_of_segment": calibrate_suite.KERNELS_OF_SEGMENT,
        "launched": " ".join(calibrate_suite.LAUNCHED),
    }
    return rows, left_out, method


def _projections(
    args: BenchArgs, device: torch.device, full: bool
) -> tuple[list[ProjectionRow], list[str], dict[str, Any]]:
    """Rows of ``suite=projection``, nothing left out, and how it is measured."""
    setting = projection_suite.FULL if full else projection_suite.TINY
    num_ranks = args.nproc or 1
    cases = projection_cases(setting, device.type, num_ranks, args.repeats, overrides=args.overrides or "")
    cases = chosen(cases, args.only)
    card = card_of_device(device)
    rows = one_by_one(
        cases,
        lambda case: [run_projection_case(case, card, args.rates, num_ranks, args.repeats, args.limit_s)],
        lambda found: found[0].error or found[0].brief,
        args.out,
    )
    method = {
        "card": card.name,
        "ranks": num_ranks,
        "rates": None if args.rates is None else args.rates.name,
        "warm_up_steps": f"graph.warmup_steps + 1 + {projection_suite.WARM_UP_STEPS}",
        "max_s_per_row": args.limit_s,
    }
    return rows, [], method


SUITES: dict[Suite, Callable[[BenchArgs, torch.device, bool], Measured]] = {
    Suite.ops: _operations,
    Suite.step: _steps,
    Suite.dispatch: _exchanges,
    Suite.ladder: _rungs,
    Suite.calibrate: _rates,
    Suite.projection: _projections,
}
RENDERERS = {
    "ops": render_operations,
    "step": render_steps,
    "dispatch": render_dispatch,
    "ladder": render_ladder,
    "calibrate": render_calibration,
    "projection": render_projections,
}


def render(document: dict[str, Any]) -> str:
    """The table as Markdown, with what a reader must know of it below."""
    table = RENDERERS[document["suite"]]
    return "\n".join([*table(document), *_footnotes(document)])


def _environment(device: torch.device, argv: Sequence[str]) -> dict[str, Any]:
    """What the times depend on, without names of this machine or of its folders."""
    facts = {key: value for key, value in describe(device).items() if key != "host"}
    return facts | {"command": [without_folders(word) for word in ["python", "-m", "graphmoe.bench", *argv]]}


def _footnotes(document: dict[str, Any]) -> Iterator[str]:
    facts, packages = document["environment"], document["environment"]["packages"]
    if document["method"]["warning"]:
        yield f"Warning: {document['method']['warning']}."
    yield f"Device: {facts['device']}, torch {packages['torch']}, triton {packages['triton']}; bf16."
    yield f"Commit: {facts['git_commit'] or 'not in a git checkout'}; command: {' '.join(facts['command'])}"
    for line in document["left_out"]:
        yield f"Left out: {line}."
    yield f"{document['seconds']:.1f} s in all."


if __name__ == "__main__":
    run_tool(main)
