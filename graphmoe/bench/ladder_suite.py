"""The rungs of ``suite=ladder``: one training job on several GPUs, faster from rung to rung.

Each rung keeps the settings of the one before and changes a few; it is a job of its own, as a user starts it.
The order is that in which Primus published its gains for this model (AMD, MI355X), baseline first.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graphmoe.bench.ladder_table import LadderRow
from graphmoe.bench.own_process import ProcessFailed
from graphmoe.bench.step_suite import UNREAD
from graphmoe.bench.training_job import steps_of, train
from graphmoe.bench.words import compose_config, key_of, numbers, refuse, without, words_of
from graphmoe.config.schema import ConfigError
from graphmoe.run.files import SUMMARY_FILE

WARM_UP_STEPS = 5
"""Before those that are timed, after those of graph.warmup_steps and the step that is captured."""
MICRO_BATCHES = 4
"""Of a rank in a step, if train.global_batch_size is not among the overrides."""


@dataclass(frozen=True)
class Rung:
    """What one rung changes."""

    name: str
    words: tuple[str, ...]
    what: str


RUNGS = (
    Rung(
        "baseline",
        (
            "moe.dispatcher=alltoall",
            "moe.sync_free_stage=0",
            "graph.scope=none",
            "pipeline.ep_overlap=false",
            "passes.disabled=[fuse_loss]",
            "host.numa=none",
            "host.manual_gc=false",
        ),
        "alltoall with counts on the host",
    ),
    Rung("loss_fusion", ("passes.disabled=[]",), "logits are never whole"),
    Rung("symm", ("moe.dispatcher=symm",), "GPUs read each other's tokens"),
    Rung("sync_free_1", ("moe.sync_free_stage=1",), "router and plan promise not to wait"),
    Rung("sync_free_2", ("moe.sync_free_stage=2",), "dispatch and experts too"),
    Rung("sync_free_3", ("moe.sync_free_stage=3",), "the whole layer"),
    Rung("partial", ("graph.scope=partial",), "graphs of attention, router and preprocessing"),
    Rung("full_iteration", ("graph.scope=full_iteration",), "the whole step is one graph"),
    Rung("ep_overlap", ("pipeline.ep_overlap=true",), "a backward beside the next forward"),
    Rung("host_tuning", ("host.numa=auto", "host.manual_gc=true"), "NUMA binding, garbage at fixed steps"),
)
"""All but the larger micro-batches, which come last."""


@dataclass(frozen=True)
class Setting:
    """What is measured if the command line says nothing else."""

    words: tuple[str, ...]
    micro_batch_sizes: tuple[int, ...]
    """The first is that of all rungs, each further one a rung of its own."""


FULL = Setting(
    (
        "model=deepseek_v2_lite",
        "data=synthetic",
        "data.seq_len=4096",
        "optim.lr=1e-6",
        "recompute.ops=[layernorm,mla_up_proj]",
    ),
    (2, 4),
)
TINY = Setting(
    ("model=tiny", "model.num_layers=2", "data=synthetic", "data.seq_len=16", "optim.lr=1e-6"), (1, 2)
)


@dataclass(frozen=True)
class LadderCase:
    """One rung, with all that its job sets."""

    name: str
    what: str
    words: tuple[str, ...]


CHOSEN_BY = {
    "train.micro_batch_size": "micro_batch_sizes",
    "train.steps": "repeats",
    "run.device": "device",
    "launch.nproc": "nproc",
    "parallel.ep": "nproc",
}
"""Keys that the suite sets, and its argument for each."""


def ladder_cases(
    setting: Setting,
    device: str,
    num_ranks: int,
    repeats: int,
    *,
    overrides: str = "",
    micro_batch_sizes: str = "",
) -> list[LadderCase]:
    """The rungs that the words of the command line ask for. *Raises* ConfigError."""
    own = words_of(overrides)
    _check_overrides(own)
    sizes = numbers("micro_batch_sizes", micro_batch_sizes) or list(setting.micro_batch_sizes)
    larger = [Rung(f"micro_batch_{size}", (), f"{size} sequences at once") for size in sizes[1:]]
    of_rungs = [sizes[0]] * len(RUNGS) + sizes[1:]
    base = (*without(setting.words, own), f"parallel.ep={num_ranks}", *own, *UNREAD, "log.sample_tokens=0")
    cases: list[LadderCase] = []
    changed: dict[str, str] = {}
    steps: int | None = None
    for rung, size in zip((*RUNGS, *larger), of_rungs, strict=True):
        changed |= {key_of(word): word for word in rung.words}
        words = (
            *without((f"train.global_batch_size={size * num_ranks * MICRO_BATCHES}",), own),
            *base,
            *changed.values(),
            f"train.micro_batch_size={size}",
            f"run.device={device}",
            f"launch.nproc={num_ranks}",
            "launch.nodes=1",
        )
        if steps is None:  # what is wrong with the first rung is wrong with all, as a rule
            steps = repeats + WARM_UP_STEPS + compose_config(*words).graph.warmup_steps + 1
        words = (*words, f"train.steps={steps}", f"train.log_interval={steps}")
        cases.append(LadderCase(rung.name, rung.what, words))
    return cases


def run_rung(case: LadderCase, num_ranks: int, repeats: int, limit_s: float) -> LadderRow:
    """Measure a rung by a job of its own, which gets ``limit_s`` seconds. Raises nothing."""
    row = LadderRow(case.name, case.what, num_ranks, list(case.words))
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        folder = Path(scratch) / "run"
        try:
            row.take_floor(compose_config(*case.words))
            train(case.words, folder, limit_s)
            summary: dict[str, Any] = json.loads((folder / SUMMARY_FILE).read_text())
            row.take(list(steps_of(folder))[-repeats:], summary)
        except (ConfigError, ProcessFailed, OSError) as error:
            row.error = " ".join(str(error).split())
    return row


def _check_overrides(own: Sequence[str]) -> None:
    of_rungs = {key_of(word): rung.name for rung in RUNGS for word in rung.words}
    refuse(own, CHOSEN_BY, UNREAD)
    for word in own:
        key = key_of(word)
        if key in of_rungs or key == "graph":
            rung = of_rungs.get(key, "partial")
            raise ConfigError(f"overrides={word}: the rung {rung} sets {key}; choose rungs by only=...")
        if re.match(r"(parallel|launch)\b", key):
            raise ConfigError(f"overrides={word}: the suite has all GPUs of one node along parallel.ep")
