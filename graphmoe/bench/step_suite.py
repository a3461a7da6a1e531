"""``suite=step``: whole steps of one micro-batch by shape and graph scope."""

import itertools
import re
from collections.abc import Iterator
from typing import Any

import torch

from graphmoe.bench.arguments import BenchArgs
from graphmoe.bench.cases import BYTES_PER_S, FLOPS_PER_S, Cell, Measured, Row, table
from graphmoe.bench.jobs import (
    COLUMNS,
    LITE,
    MEMORY,
    TINY,
    RunCase,
    Trained,
    brief,
    method,
    numbers,
    numbers_of_run,
    refuse,
    run_case,
    run_cases,
    split_list,
    train,
)
from graphmoe.config.schema import ConfigError, RunConfig
from graphmoe.model.sizes import count_parameters
from graphmoe.optim import rule_of
from graphmoe.segments import CAPTURABLE, FULL_ITERATION, SCOPES
from graphmoe.trace.summary import largest, summarise

RECORDED_STEPS = 3
"""Steps after the timed ones of which a trace is read."""
NUM_KERNELS = 10
"""Largest kernels of a row."""


def measure_steps(args: BenchArgs, device: torch.device, full: bool) -> Measured:
    """Run ``suite=step``."""
    ranks = args.nproc or 1

    def numbers_of(row: Row, config: RunConfig) -> Row:
        return step_numbers(config, ranks, train(row["overrides"], args.limit_s), args.repeats)

    rows = run_cases(step_cases(args, device.type, full), args, numbers_of, brief)
    return rows, [], method(args, ranks, recorded_steps=RECORDED_STEPS)


def step_cases(args: BenchArgs, device: str, full: bool) -> list[RunCase]:
    """Cases of the shapes and scopes asked for; ``none`` first and last, for the drift of the device's clock.

    *Raises* ConfigError.
    """
    refuse(args)
    ranks = args.nproc or 1
    shapes: list[tuple[int, int]] = [(1, 4096), (4, 4096), (1, 512)] if full else [(2, 32)]
    sizes, lengths = numbers("micro_batch_sizes", args.micro_batch_sizes), numbers("seq_lens", args.seq_lens)
    if sizes or lengths:
        sizes = sizes or list(dict.fromkeys(size for size, _ in shapes))
        shapes = list(itertools.product(sizes, lengths or [shapes[0][1]]))
    wanted = sorted(_scopes(args.scopes), key=lambda scope: scope != "none")
    last = ["none"] if "none" in wanted and len(wanted) > 1 else []
    cases = []
    for size, seq_len in shapes:
        for number, scope in enumerate([*wanted, *last]):
            shape, again = f"mbs{size}_s{seq_len}", number >= len(wanted)
            name = f"{shape}/{scope.strip('[]').replace(',', '+')}{'_again' if again else ''}"
            defaults = (*(LITE if full else TINY), f"train.global_batch_size={size * ranks}")
            fixed = [f"run.device={device}", f"launch.nproc={ranks}", f"graph.scope={scope}"]
            fixed += [f"train.micro_batch_size={size}", f"data.seq_len={seq_len}"]
            row = {"case": shape, "scope": scope, "again": again}
            cases.append(run_case(args, name, row, defaults, fixed, RECORDED_STEPS))
    return cases


def _scopes(text: str) -> list[str]:
    scopes = split_list(text)
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
    return scopes


def step_numbers(config: RunConfig, ranks: int, found: Trained, repeats: int) -> Row:
    """Numbers of the timed steps, and of the recorded ones behind them.

    ``host_ms`` is that of the first recorded step, which the host starts with the device idle; recording
    costs the host some microseconds for each operation.
    """
    assert found.trace is not None
    timed = found.steps[-repeats - RECORDED_STEPS : -RECORDED_STEPS]
    row = numbers_of_run(config, ranks, timed, found.summary)
    recorded = summarise(found.trace, 1)
    kernels = [(a.name, a.end - a.start, None) for a in found.trace.activities]
    moved = rule_of(config.optim.name).bytes_moved * count_parameters(config.model).total.full
    idle = None
    if recorded.idle is not None:
        idle = max(0.0, 1 - (1 - recorded.idle) * recorded.step_ms / row["median_ms"])
    first = found.trace.steps[0]
    return {
        **row,
        "floor_with_optimizer_ms": row["floor_ms"] + moved / BYTES_PER_S * 1e3,
        "idle_share": idle,
        "host_ms": (first.end - first.start) / 1e3,
        "kernels": [vars(kernel) for kernel in largest(kernels, RECORDED_STEPS, NUM_KERNELS)],
        "pool_bytes": found.captured.get("pool_bytes"),
        "graphs": found.captured.get("graphs"),
        "capture_s": found.captured.get("seconds"),
    }


def render_steps(document: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of the table and its legend."""
    columns: dict[str, Cell] = {
        "case": "{case}",
        "scope": lambda row: f"{row['scope']}, again" if row["again"] else row["scope"],
        **COLUMNS,
        "GPU idle %": lambda row: f"{100 * row['idle_share']:.1f}",
        "host ms": "{host_ms:.2f}",
        "pool GiB": lambda row: f"{row['pool_bytes'] / 2**30:.2f}",
        "capture s": "{capture_s:.2f}",
    }
    yield from table(columns, document["rows"], named=2)
    for case, row in {row["case"]: row for row in document["rows"] if not row["error"]}.items():
        yield (
            f"Floor of {case}: {row['floor_ms']:.2f} ms of FLOPs at {FLOPS_PER_S / 1e12:.0f} TFLOP/s, which "
            f"step / floor counts; {row['floor_with_optimizer_ms']:.2f} ms with the bytes that "
            f"the update moves at {BYTES_PER_S / 1e12:.1f} TB/s, both as measured on an H200."
        )
    yield (
        f"Step: median of {document['method']['repeats']} by the device's clock, while the host runs ahead. "
        f"Host and GPU idle are of {RECORDED_STEPS} further steps that are recorded: until the first, which "
        "starts on an idle device, returns, and the share of a step in which nothing runs."
    )
    yield MEMORY
