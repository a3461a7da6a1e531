"""The rows of ``suite=step``: whole training steps of one micro-batch, by shape and graph scope.

Each row runs in a process of its own, so that no pool of memory and no cache outlives it. At each shape
``none`` comes first and once more last, which shows how far the device's clock drifts meanwhile.
"""

from __future__ import annotations

import itertools
import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from graphmoe.bench.own_process import ProcessFailed, in_own_process
from graphmoe.bench.step_table import StepRow
from graphmoe.bench.step_times import measure
from graphmoe.bench.words import compose_config, numbers, refuse, without, words_of
from graphmoe.config.schema import ConfigError
from graphmoe.segments import CAPTURABLE, FULL_ITERATION, SCOPES

OTHER_STEPS = 30
"""More than all steps of a row that are neither timed nor before its capture."""
UNREAD = (
    "train.val_batches=0",
    "checkpoint=none",
    "checkpoint.interval=0",
    "log.tensorboard=false",
    "log.report=false",
    "log.progress=false",
)
CHOSEN_BY = {
    "graph": "scopes",
    "graph.scope": "scopes",
    "train.micro_batch_size": "micro_batch_sizes",
    "data.seq_len": "seq_lens",
    "train.steps": "repeats",
    "run.device": "device",
}
"""Keys that the suite sets, and its argument for each."""


@dataclass(frozen=True)
class Setting:
    """What is measured if the command line says nothing else."""

    words: tuple[str, ...]
    shapes: tuple[tuple[int, int], ...]
    """(sequences of the micro-batch, their tokens)"""


FULL = Setting(
    ("model=deepseek_v2_lite", "model.num_layers=6", "data=synthetic", "optim.lr=1e-6"),
    ((1, 4096), (4, 4096), (1, 512)),
)
TINY = Setting(("model=tiny", "model.num_layers=2", "data=synthetic", "optim.lr=1e-6"), ((2, 32),))


@dataclass(frozen=True)
class StepCase:
    """One shape and graph scope."""

    shape: str
    scope: str
    words: tuple[str, ...]
    """Overrides of the run's configuration."""
    again: bool = False

    @property
    def name(self) -> str:
        """Such as mbs4_s4096/full_iteration, or mbs1_s512/attn+loss for a list of segments."""
        label = self.scope.strip("[]").replace(",", "+")
        return f"{self.shape}/{label}{'_again' if self.again else ''}"


def step_cases(
    setting: Setting,
    device: str,
    repeats: int,
    *,
    overrides: str = "",
    scopes: str,
    micro_batch_sizes: str = "",
    seq_lens: str = "",
) -> list[StepCase]:
    """The cases that the words of the command line ask for. *Raises* ConfigError."""
    own, wanted = words_of(overrides), words_of(scopes)
    refuse(own, CHOSEN_BY, UNREAD)
    _check_scopes(wanted)
    shapes: Sequence[tuple[int, int]] = setting.shapes
    if micro_batch_sizes or seq_lens:
        sizes = numbers("micro_batch_sizes", micro_batch_sizes) or list(dict.fromkeys(s for s, _ in shapes))
        lengths = numbers("seq_lens", seq_lens) or [shapes[0][1]]
        shapes = list(itertools.product(sizes, lengths))
    cases = []
    for size, length in shapes:
        words = (
            *without(setting.words, own),
            *without((f"train.global_batch_size={size}",), own),
            *own,
            *UNREAD,
            f"run.device={device}",
            f"train.micro_batch_size={size}",
            f"data.seq_len={length}",
        )
        config = compose_config(*words, "graph.scope=none")  # what is wrong with it is wrong with every row
        steps = repeats + config.graph.warmup_steps + OTHER_STEPS
        words = (*words, f"train.steps={steps}", f"train.log_interval={steps}")
        order = sorted(wanted, key=lambda scope: scope != "none")
        again = ["none"] if "none" in wanted and len(wanted) > 1 else []
        for number, scope in enumerate([*order, *again]):
            case_words = (*words, f"graph.scope={scope}")
            cases.append(StepCase(f"mbs{size}_s{length}", scope, case_words, number == len(order)))
    return cases


def run_step_case(case: StepCase, repeats: int, limit_s: float) -> StepRow:
    """Measure a case in a process of its own, which gets ``limit_s`` seconds. Raises nothing."""
    row = StepRow(case=case.shape, scope=case.scope, again=case.again, overrides=list(case.words))
    try:
        config = compose_config(*case.words)
        row.take_floors(config)
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            row.take(in_own_process(measure, config, Path(folder), repeats, limit_s=limit_s))
    except (ConfigError, ProcessFailed) as error:
        row.error = " ".join(str(error).split())
    return row


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
