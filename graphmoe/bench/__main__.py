"""Measure operations, training steps or token exchanges against the least time of their FLOPs or bytes.

python -m graphmoe.bench suite=ops only=grouped_mlp/v2_lite,swiglu out=ops.json
python -m graphmoe.bench suite=step overrides=model=mixtral_8x7b,model.num_layers=2 micro_batch_sizes=1,2
torchrun --nproc-per-node=4 -m graphmoe.bench suite=dispatch
python -m graphmoe.bench suite=calibrate out=rates.json
python -m graphmoe.bench suite=projection rates=rates.json out=projection.json
python -m graphmoe.bench suite=ladder nproc=4 out=ladder.json stop_after_s=300
python -m graphmoe.bench suite=regress

Times are medians of device time, with cold caches for operations. A failed case is a row with the reason, the
others go on, and the exit status is 1. A suite that ends early leaves its rows beside out=ops.json, in
ops.rows.jsonl; suite=ladder goes on from them, so it can be measured in pieces of stop_after_s=.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphmoe.bench import BenchArgs, SuiteName, check
from graphmoe.config.arguments import emit, parse_args, run_tool

if TYPE_CHECKING:
    from graphmoe.bench.cases import Suite

CPU_NOTE = "these are times of a CPU at tiny shapes and mean nothing; they show that every case runs"


def main(argv: list[str]) -> None:
    args = parse_args(BenchArgs, argv, prog="graphmoe.bench", places=("suite",))
    from graphmoe.bench import regress_suite  # imports torch
    from graphmoe.bench.cases import is_first, rows_file

    logging.basicConfig(format="%(message)s", level=logging.INFO)  # on stderr
    document = bench(args, argv)
    if is_first():
        text = json.dumps(document, indent=1) + "\n"
        if args.out is not None:
            args.out.write_text(text, encoding="utf-8")
            if not (args.suite is SuiteName.ladder and args.only):  # others may go on from these
                rows_file(args.out).unlink(missing_ok=True)
        emit(document, render(document), args.format)
        if args.suite is SuiteName.ladder and args.out is not None:
            draw_ladder(document, args.out.with_suffix(".png"))
    if any(row["error"] or row.get("verdict") == "worse" for row in document["rows"]):
        sys.exit(1)
    if args.write and is_first():
        regress_suite.write_baselines(document["environment"]["device"], text)


def suites() -> dict[SuiteName, Suite]:
    from graphmoe.bench import calibrate_suite, dispatch_suite, ops_suite, regress_suite, runs

    first = ops_suite.OPS, runs.STEP, dispatch_suite.DISPATCH, runs.LADDER, calibrate_suite.CALIBRATE
    return dict(zip(SuiteName, (*first, runs.PROJECTION, regress_suite.REGRESS), strict=True))


def bench(args: BenchArgs, argv: Sequence[str] = ()) -> dict[str, Any]:
    """Run the suite; return the JSON document. Measured rows are also written beside ``out`` at once."""
    device, full = check(args)
    from graphmoe.bench import cases
    from graphmoe.bench.calibrate_suite import rates_of_rows
    from graphmoe.run.machine import describe

    started = time.monotonic()
    if args.out is not None and cases.is_first() and args.suite is not SuiteName.ladder:
        cases.rows_file(args.out).unlink(missing_ok=True)
    rows, left_out, method = suites()[args.suite].measure(args, device, full)
    facts = {key: value for key, value in describe(device).items() if key != "host"}
    facts["command"] = [cases.without_folders(word) for word in ("python", "-m", "graphmoe.bench", *argv)]
    about = {
        "repeats": args.repeats,
        "shapes": "full" if full else "tiny",
        "floor_flops_per_s": cases.FLOPS_PER_S,
        "floor_fp8_flops_per_s": cases.FP8_FLOPS_PER_S,
        "floor_bytes_per_s": cases.BYTES_PER_S,
        "warning": None if device.type == "cuda" else CPU_NOTE,
    }
    document: dict[str, Any] = {"suite": args.suite.name, "environment": facts, "method": about | method}
    document |= {"left_out": left_out, "seconds": round(time.monotonic() - started, 3)}
    document |= {"rates": rates_of_rows(rows)} if args.suite is SuiteName.calibrate else {}
    return document | {"rows": rows}


def render(document: dict[str, Any]) -> str:
    from graphmoe.bench.cases import Scaled, table

    suite, facts = suites()[SuiteName[document["suite"]]], document["environment"]
    warning, packages = document["method"]["warning"], facts["packages"]
    lines = [*table(suite.columns, document["rows"], suite.shown)]
    lines.append(Scaled().vformat(suite.legend, (), document))
    lines += [f"Warning: {warning}."] if warning else []
    lines.append(f"Device: {facts['device']}, torch {packages['torch']}, triton {packages['triton']}; bf16.")
    commit, command = facts["git_commit"] or "not in a git checkout", " ".join(facts["command"])
    lines.append(f"Commit: {commit}; command: {command}")
    lines += [f"Left out: {line}." for line in document["left_out"]]
    return "\n".join([*lines, f"{document['seconds']:.1f} s in all."])


def draw_ladder(document: dict[str, Any], path: Path) -> None:
    """Write a bar chart of tokens/s/GPU of a ladder as PNG."""
    from matplotlib.figure import Figure

    rows = [row for row in document["rows"] if row.get("tokens_per_s")]
    figure = Figure(figsize=(9, 0.45 * max(len(rows), 3) + 1.2), layout="constrained")
    axes = figure.subplots()
    bars = axes.barh([row["rung"] for row in rows], [row["tokens_per_s"] for row in rows], color="#4477aa")
    axes.bar_label(bars, [f" {row['tokens_per_s']:,.0f}  {row['gain']}" for row in rows])
    axes.invert_yaxis()
    axes.margins(x=0.35)
    given = dict(word.split("=", 1) for word in document["rows"][0]["overrides"] if "=" in word)
    ranks, device = document["method"]["ranks"], document["environment"]["device"]
    layers = f"{given.get('model.num_layers', 'all')} layers"
    title = f"{given.get('model')}, {layers}, {ranks} x {device}, EP {ranks}, S {given.get('data.seq_len')}"
    axes.set(xlabel="tokens/s/GPU", title=title)
    figure.savefig(path, dpi=130, format="png")


if __name__ == "__main__":
    run_tool(main)
