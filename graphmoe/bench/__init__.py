"""Benchmarks of operations, steps and exchanges: arguments of the tool, and their check."""

from __future__ import annotations

import enum
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from graphmoe.config.arguments import file_problems
from graphmoe.config.packages import FOR_PLOTS, is_installed
from graphmoe.config.schema import ConfigError, DeviceChoice, OutputFormat
from graphmoe.plan.costs.hardware import CARDS, H200, Card, card_in

if TYPE_CHECKING:
    import torch

NOISE = 0.01  # times of equal runs differ by up to 1%
SuiteName = enum.StrEnum("SuiteName", "ops step dispatch ladder calibrate projection regress")
ShapeChoice = enum.StrEnum("ShapeChoice", ("auto", "full", "tiny"))


@dataclass
class BenchArgs:
    suite: SuiteName = SuiteName.ops
    """ops: operations alone. step: training by graph.scope. dispatch: exchange of tokens, by torchrun.
    ladder: training on several GPUs, one feature more in each run. calibrate: rates of this machine for
    projections, by torchrun between its GPUs too. projection: short runs beside their projections.
    regress: figures of the docs beside this card's baselines; exit status 1 if one is 3% worse."""
    only: list[str] = field(default_factory=list)
    """Measure only cases whose name starts with one of these, separated by commas; default: all."""
    repeats: int = 20
    """Timed calls of each alternative, or steps, >= 1; slow operations take fewer, but at least 3."""
    shapes: ShapeChoice = ShapeChoice.auto
    """full: layers of published models; tiny: to see that it runs; auto is full on a GPU, else tiny."""
    device: DeviceChoice = DeviceChoice.auto
    """Device of the run; auto takes the GPU if there is one."""
    scopes: str = "none,partial,layer,full_iteration"
    """step: values of graph.scope; none is measured first and once more last."""
    micro_batch_sizes: list[int] = field(default_factory=list)
    """step: sequences per micro-batch, with each of seq_lens; default: 1 and 4 of 4096 tokens, 1 of 512.
    ladder: first those of all rungs; each is tried at the best settings; default: 2,1,4."""
    seq_lens: list[int] = field(default_factory=list)
    """step: tokens per sequence; default: 4096."""
    overrides: str | None = None
    """step, ladder, projection: further overrides of the runs, separated by commas, such as
    model=mixtral_8x7b,model.num_layers=2."""
    limit_s: int = 300
    """step, ladder, projection, regress: seconds that a job may take, > 0; calibrate: the row of the host."""
    passes: int = 3
    """ladder: jobs of each rung, > 0, in alternating order: forward, backward, forward."""
    stop_after_s: int | None = None
    """ladder: seconds after which no further job starts; the same command with the same out= goes on."""
    nproc: int | None = None
    """ladder: GPUs, which share the experts, > 0; default: all that are visible, or 2 ranks on a CPU.
    step, projection: ranks of each run, > 0, along dp if its words name no other; default: 1."""
    rates: Path | None = None
    """projection: document of suite=calibrate, or another file of rates; default: the tool's own."""
    write: bool = False
    """regress: write the figures as the baselines of this card, benchmarks/baselines/<card>.json."""
    blocks: list[float] = field(default_factory=lambda: [0.5, 0.8, 0.95, 1.1])
    """dispatch: sizes of copy-engine blocks over the mean number of rows between two ranks, > 0."""
    out: Path | None = None
    """File that ends in .json for the document, written at the end, with the ladder's chart beside it.
    Until then a file that ends in .rows.jsonl has the rows that are there; a ladder goes on from it."""
    format: OutputFormat = OutputFormat.text
    """text, or json: one document on stdout and nothing else there."""


MOST_S = 86_400  # a day
MOST = {"blocks": 4}
CPU_RANKS = 2
OF_RUNS = (SuiteName.step, SuiteName.ladder, SuiteName.projection)
OF_SUITES = {
    "scopes": (SuiteName.step,),
    "seq_lens": (SuiteName.step,),
    "micro_batch_sizes": (SuiteName.step, SuiteName.ladder),
    "overrides": OF_RUNS,
    "limit_s": (*OF_RUNS, SuiteName.calibrate, SuiteName.regress),
    "passes": (SuiteName.ladder,),
    "stop_after_s": (SuiteName.ladder,),
    "rates": (SuiteName.projection,),
    "write": (SuiteName.regress,),
    "blocks": (SuiteName.dispatch,),
    "nproc": OF_RUNS,
}


def check(args: BenchArgs) -> tuple[torch.device, bool]:
    """Return the device, and if shapes are full-size. *Raises* ConfigError that lists all wrong arguments."""
    import torch

    on_gpu = torch.cuda.is_available() and args.device is not DeviceChoice.cpu
    gpus = torch.cuda.device_count() if on_gpu else 0
    if problems := [*_problems(args, on_gpu), *_wrong_ranks(args, gpus)]:
        raise ConfigError("; ".join(problems))
    device, local = torch.device("cpu"), os.environ.get("LOCAL_RANK")
    if on_gpu:  # this rank's own, if torchrun started several
        own = torch.cuda.current_device() if local is None else int(local) % gpus
        device = torch.device("cuda", own)
    return device, args.shapes is ShapeChoice.full or (on_gpu and args.shapes is ShapeChoice.auto)


def ranks_of(args: BenchArgs, gpus: int) -> int:
    if args.nproc is not None:
        return args.nproc
    return (gpus or CPU_RANKS) if args.suite is SuiteName.ladder else 1


def _problems(args: BenchArgs, on_gpu: bool) -> Iterator[str]:
    for name, usual in (("repeats", 20), ("passes", 3)):
        if (value := getattr(args, name)) < 1:
            yield f"{name}={value} must be 1 or more, such as {name}={usual}"
    if args.stop_after_s is not None and args.stop_after_s < 1:
        yield f"stop_after_s={args.stop_after_s} must be 1 or more, such as stop_after_s=300"
    elif args.stop_after_s is not None and args.out is None:
        yield f"stop_after_s={args.stop_after_s} needs a file to go on from, such as out=ladder.json"
    if not 1 <= args.limit_s <= MOST_S:
        yield f"limit_s={args.limit_s} must be from 1 to {MOST_S}, such as limit_s=120"
    for name, suites in OF_SUITES.items():
        value = getattr(args, name)
        shown = ",".join(f"{each:g}" for each in value) if isinstance(value, list) else value
        if args.suite not in suites and value != getattr(BenchArgs(), name):
            others = " or ".join(f"suite={suite.name}" for suite in suites)
            yield f"{name}={shown} has no effect with suite={args.suite.name}; use {others}"
        elif isinstance(value, list) and not all(0 < each <= MOST.get(name, each) for each in value):
            most = f" and at most {MOST[name]}" if name in MOST else ""
            yield f"{name}={shown}: use numbers above 0{most}, such as {name}=1,2"
    if args.write and args.only:
        yield f"write=true writes the figures of all cases; leave out only={','.join(args.only)}"
    if args.device is DeviceChoice.cuda and not on_gpu:
        yield "device=cuda, but torch sees no GPU; use device=cpu or device=auto"
    if args.shapes is ShapeChoice.full and not on_gpu:
        yield "shapes=full would take hours on a CPU; use shapes=tiny or shapes=auto"
    yield from file_problems("out", args.out, f"{args.suite.name}.json")
    if args.suite is SuiteName.ladder and args.out is not None and not is_installed("matplotlib"):
        yield f"out={args.out} writes a chart, which needs matplotlib: {FOR_PLOTS}"


def _wrong_ranks(args: BenchArgs, gpus: int) -> Iterator[str]:
    size, name = int(os.environ.get("WORLD_SIZE", "1")), f"suite={args.suite.name}"
    if args.suite is SuiteName.dispatch and size == 1:
        yield (
            "suite=dispatch measures the exchange of tokens between ranks, but there is one; start it with "
            "torchrun --nproc-per-node=4 -m graphmoe.bench suite=dispatch"
        )
    if args.suite not in (SuiteName.dispatch, SuiteName.calibrate):
        if size > 1:
            yield f"{name} runs in one process; start it with python -m graphmoe.bench"
    elif size != int(os.environ.get("LOCAL_WORLD_SIZE", size)):
        yield f"{name} runs on one node; use torchrun --nnodes=1"
    elif 0 < gpus < size:
        yield f"{name}: {size} ranks and {gpus} GPUs; use torchrun --nproc-per-node={gpus}"
    ranks = ranks_of(args, gpus)
    if ranks < 1:
        yield f"nproc={ranks} must be 1 or more"
    elif 0 < gpus < ranks:
        yield f"nproc={ranks}, but {gpus} GPUs are visible; use nproc={gpus}"


def card_of_device(device: torch.device) -> Card:
    """Return the GPU model that results are compared with, on a CPU an H200. *Raises* ConfigError."""
    if device.type != "cuda":
        return H200
    import torch

    name = torch.cuda.get_device_name(device)
    card = card_in(name)
    if card and card in CARDS.values():  # a variant has another peak
        return card
    known = ", ".join(card.name for card in CARDS.values())
    raise ConfigError(
        f"suite=calibrate and suite=projection need a GPU with known peak rates, not {name}; use one of "
        f"{known} (of NVIDIA's cards the SXM or HGX form, and no MIG slice)"
    )
