"""Measure the operations one by one against the time that their FLOPs or bytes take at least.

python -m graphmoe.bench suite=ops
python -m graphmoe.bench only=grouped_mlp/v2_lite,swiglu out=ops.json
python -m graphmoe.bench device=cpu format=json

Times are medians of device time with cold caches. A case that fails is a row with the reason, the others go
on, and the exit status is 1.
"""

from __future__ import annotations

import enum
import json
import logging
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from graphmoe.benchmarks.cases import (
    BYTES_PER_S,
    FLOPS_PER_S,
    Case,
    Row,
    as_plain,
    free_memory,
    run_case,
    without_folders,
)
from graphmoe.benchmarks.ops_suite import FULL, TINY, ops_suite
from graphmoe.cli import emit, parse_args, run_tool
from graphmoe.config import ConfigError, DeviceChoice, OutputFormat
from graphmoe.environment import describe
from graphmoe.timing import FLUSH_BYTES, MAX_CASE_S, WARM_UP_CALLS

log = logging.getLogger(__name__)
CPU_NOTE = "these are times of a CPU at tiny shapes and mean nothing; they show that every case runs"


class Suite(enum.Enum):
    ops = "ops"


class ShapeChoice(enum.Enum):
    auto = "auto"
    full = "full"
    tiny = "tiny"


@dataclass
class BenchArgs:
    """What the tool is asked."""

    suite: Suite = Suite.ops
    """What is measured: ops is each operation of graphmoe/ops alone."""
    only: list[str] = field(default_factory=list)
    """Measure only cases whose name starts with one of these, separated by commas; default: all."""
    repeats: int = 20
    """Timed calls of each alternative, >= 1; slow cases take fewer, but at least 3."""
    shapes: ShapeChoice = ShapeChoice.auto
    """full: layers of published models; tiny: to see that it runs; auto is full on a GPU, else tiny."""
    device: DeviceChoice = DeviceChoice.auto
    """Where it runs; auto takes the GPU if there is one."""
    peers: bool = True
    """Measure other projects' kernels too, where they are installed; some take minutes to tune themselves."""
    out: Path | None = None
    """File for the JSON document, written at the end; default: none."""
    format: OutputFormat = OutputFormat.text
    """text, or json: one document on stdout and nothing else there."""


def main(argv: list[str]) -> None:
    args = parse_args(BenchArgs, argv, prog="graphmoe.bench")
    logging.basicConfig(format="%(message)s", level=logging.INFO)  # on stderr
    document = bench(args, argv)
    if args.out is not None:
        try:
            args.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"cannot write out={args.out}: {error}") from error
    emit(document, render(document), args.format)
    if any(row["error"] for row in document["rows"]):
        sys.exit(1)


def bench(args: BenchArgs, argv: Sequence[str] = ()) -> dict[str, Any]:
    """Run the suite and return the JSON document; progress goes to the log. *Raises* ConfigError."""
    device, full = _check(args)
    started = time.monotonic()
    cases, left_out = ops_suite(FULL if full else TINY, device, args.peers)
    cases = _chosen(cases, args.only)
    for line in left_out:
        log.info("left out: %s", line)
    rows: list[Row] = []
    for number, case in enumerate(cases, start=1):
        case_started = time.monotonic()
        found = run_case(case, device, args.repeats)
        free_memory(device, after_error=any(row.error for row in found))
        seconds = time.monotonic() - case_started
        log.info("[%d/%d] %s: %s (%.1f s)", number, len(cases), case.name, _brief(found), seconds)
        rows += found
    return {
        "suite": args.suite.name,
        "environment": _environment(device, argv),
        "method": {
            "repeats": args.repeats,
            "warm_up_calls": WARM_UP_CALLS,
            "max_s_per_case": MAX_CASE_S,
            "cache_flush_bytes": FLUSH_BYTES if device.type == "cuda" else 0,
            "shapes": "full" if full else "tiny",
            "floor_flops_per_s": FLOPS_PER_S,
            "floor_bytes_per_s": BYTES_PER_S,
            "warning": None if device.type == "cuda" else CPU_NOTE,
        },
        "left_out": left_out,
        "seconds": round(time.monotonic() - started, 3),
        "rows": as_plain(rows),
    }


def render(document: dict[str, Any]) -> str:
    """The table as Markdown, with what a reader must know of it below."""
    lines = [
        "| case | alternative | median ms | p10 to p90 | floor ms | time / floor | memory MiB |",
        "|---|---|---|---|---|---|---|",
        *(_line(row) for row in document["rows"]),
        "",
        *_footnotes(document),
    ]
    return "\n".join(lines)


def _check(args: BenchArgs) -> tuple[torch.device, bool]:
    """The device, and whether shapes are full. *Raises* ConfigError with everything that is wrong."""
    problems: list[str] = []
    gpu = torch.cuda.is_available()
    if args.repeats < 1:
        problems.append(f"repeats={args.repeats} times nothing; use repeats=1 or more, such as repeats=20")
    if args.device is DeviceChoice.cuda and not gpu:
        problems.append("device=cuda, but torch sees no GPU; use device=cpu or device=auto")
    on_gpu = gpu and args.device is not DeviceChoice.cpu
    if args.shapes is ShapeChoice.full and not on_gpu:
        problems.append("shapes=full would take hours on a CPU; use shapes=tiny or shapes=auto")
    if args.out is not None and args.out.is_dir():
        problems.append(f"out={args.out} is a folder; name a file, such as out={args.out / 'ops.json'}")
    elif args.out is not None and not args.out.parent.is_dir():
        problems.append(
            f"out={args.out}: there is no folder {args.out.parent}; make it, or name another file"
        )
    if problems:
        raise ConfigError("; ".join(problems))
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    return device, args.shapes is ShapeChoice.full or (on_gpu and args.shapes is ShapeChoice.auto)


def _chosen(cases: list[Case], prefixes: Sequence[str]) -> list[Case]:
    """Cases whose name starts with one of the prefixes. *Raises* ConfigError for a prefix of none."""
    unknown = [prefix for prefix in prefixes if not any(case.name.startswith(prefix) for case in cases)]
    if unknown:
        names = ", ".join(case.name for case in cases)
        raise ConfigError(f"only={','.join(unknown)}: no case starts with that; cases are {names}")
    return [case for case in cases if not prefixes or case.name.startswith(tuple(prefixes))]


def _environment(device: torch.device, argv: Sequence[str]) -> dict[str, Any]:
    """What the times depend on, without names of this machine or of its folders."""
    facts = {key: value for key, value in describe(device).items() if key != "host"}
    return facts | {"command": [without_folders(word) for word in ["python", "-m", "graphmoe.bench", *argv]]}


def _brief(rows: Sequence[Row]) -> str:
    return ", ".join(
        f"{row.alternative} {row.error}" if row.error else f"{row.alternative} {row.median_ms:.3f} ms"
        for row in rows
    )


def _line(row: dict[str, Any]) -> str:
    name = f"{row['alternative']} (peer)" if row["is_peer"] else row["alternative"]
    if row["error"]:
        reason = row["error"].replace("|", "/")
        return f"| {row['case']} | {name} | failed: {reason} | | {row['floor_ms']:.4g} | | |"
    memory = "" if row["memory_bytes"] is None else f"{row['memory_bytes'] / 2**20:,.0f} {row['memory_kind']}"
    cells = [
        row["case"],
        name,
        f"{row['median_ms']:.4f}",
        f"{row['p10_ms']:.4f} to {row['p90_ms']:.4f}",
        f"{row['floor_ms']:.4g}",
        f"{row['time_over_floor']:.2f}",
        memory,
    ]
    return f"| {' | '.join(cells)} |"


def _footnotes(document: dict[str, Any]) -> Iterator[str]:
    facts, method = document["environment"], document["method"]
    packages = facts["packages"]
    if method["warning"]:
        yield f"Warning: {method['warning']}."
    yield f"Device: {facts['device']}, torch {packages['torch']}, triton {packages['triton']}; bf16."
    yield f"Commit: {facts['git_commit'] or 'not in a git checkout'}; command: {' '.join(facts['command'])}"
    yield (
        f"Times: medians of up to {method['repeats']} calls with cold caches, alternatives in turns. Floors: "
        f"FLOPs at {FLOPS_PER_S / 1e12:.0f} TFLOP/s (grouped_mlp, linear_cross_entropy), "
        f"bytes at {BYTES_PER_S / 1e12:.1f} TB/s (the others), both as measured on an H200."
    )
    yield (
        "Memory: kept for the backward beside x and y (kept); most in use above the inputs and the "
        "gradients dh and dw (peak)."
    )
    for row in document["rows"]:
        if row["note"]:
            yield f"Note: {row['case']}, {row['alternative']}: {row['note']}."
    for line in document["left_out"]:
        yield f"Left out: {line}."
    yield f"{document['seconds']:.1f} s in all."


if __name__ == "__main__":
    run_tool(main)
