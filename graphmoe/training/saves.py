"""Run state and its checkpoints, checked for non-finite weights on saving and loading."""

import ast
import math
import os
import random
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch

from graphmoe.checkpoint import CheckpointError
from graphmoe.checkpoint.entries import flatten, local_part
from graphmoe.checkpoint.flat_shards import FlatShard
from graphmoe.checkpoint.folders import folder_of
from graphmoe.checkpoint.store import CheckpointStore
from graphmoe.config.ranges import number_of
from graphmoe.config.schema import PrecisionConfig
from graphmoe.data import Loader
from graphmoe.optim.base import StepOptimizer
from graphmoe.plan.plan import Plan
from graphmoe.runtime.launch.stamps import wait_for
from graphmoe.runtime.ranks import Ranks

ADVICE = (
    "Try a lower optim.lr, more optim.warmup_steps or a smaller train.clip_grad_norm, or look at the data "
    "around this step"
)
NOTHING = "nothing is saved (checkpoint.enabled=false)"


class Chosen(NamedTuple):
    """Kernels chosen by measurement; checkpoints store them, since other kernels sum in another order."""

    experts: str = ""  # backends of the experts' forward, dgrad and wgrad; empty if none run
    # fp8 speedups over bf16 of timed GEMMs
    fp8: Mapping[str, float] = {}  # noqa: RUF012  # nobody changes it


def state_of(step: int, optimizer: StepOptimizer, loader: Loader, chosen: Chosen) -> dict[str, Any]:
    """Return the state after ``step``, without copying tensors. Collective."""
    return {
        "model": optimizer.model_state(),
        "optimizer": optimizer.state_dict(),
        "loader": loader.state_dict(),
        "random": random_state(),
        **chosen._asdict(),
        "step": step,
    }


class TrainingStopped(RuntimeError):
    """Raised for a diverged run; the message names the checkpoint to resume."""


class Saves:
    """Checkpoints of a run. Methods are collective."""

    def __init__(self, store: CheckpointStore, plan: Plan, ranks: Ranks) -> None:
        self.store, self._plan, self._ranks = store, plan, ranks
        self._good: Path | None = None  # newest checkpoint known to be finite

    def save(self, step: int, state: dict[str, Any], *, wait: bool = False, before: str = "") -> None:
        """Save a step's state if checkpoints are enabled. Syncs the device.

        *Raises* TrainingStopped, whose message begins with ``before``, if the state is not finite.
        """
        if name := not_finite(state, self._ranks):
            raise TrainingStopped(f"{before}{self._lost(step, f'{name} is not finite')}. {ADVICE}")
        if self._plan.checkpoint.enabled:
            skipped = int(state["optimizer"]["counters"]["skipped_in_row"].item())
            self.store.save(step, state, wait=wait, skipped=skipped)
            self._good = folder_of(self.store.folder, step)

    def taken(self, store: CheckpointStore, step: int, state: dict[str, Any]) -> None:
        """Raise CheckpointError, naming an earlier finite checkpoint, if a loaded state is not finite."""
        path = folder_of(store.folder, step)
        name = not_finite(state, self._ranks)
        if name is None:
            self._good = path
            return
        good = next((each for each in store.latest() if each < step and self._fits(store, each, state)), None)
        instead = (
            "and no earlier one there can be used"
            if good is None
            else f"but {folder_of(store.folder, good)} is: remove {path.name}, or give the latter to "
            "checkpoint.resume_from"
        )
        raise CheckpointError(f"{path} cannot be resumed: {name} is not finite in it, {instead}")

    def after_skips(self, step: int, state: dict[str, Any], skipped: int) -> TrainingStopped:
        """Save the state after too many skipped steps; return the error that ends the run."""
        self.save(step, state, wait=True, before=self._skips(skipped))
        return self.diverged(step, skipped)

    def diverged(self, step: int, skipped: int) -> TrainingStopped:
        """Return the error that ends a run after too many skipped steps."""
        saved = f"the weights before them are saved at step {step} in {self.store.folder}"
        if not self._plan.checkpoint.enabled:
            saved = NOTHING + (f"; the run began from {self._good}" if self._good else "")
        return TrainingStopped(f"{self._skips(skipped)}{saved}. {ADVICE}")

    def replicas_differ(self, step: int, difference: str) -> TrainingStopped:
        """Return the error that ends a run whose ranks no longer hold the same weights."""
        interval = self._plan.checkpoint.replica_check
        return TrainingStopped(
            f"checkpoint.replica_check={interval}: {self._lost(step, difference)}. Memory or a transfer has "
            "flipped a bit: test that GPU (`graphmoe doctor prove=FILE`) before it trains on"
        )

    def _fits(self, store: CheckpointStore, step: int, state: dict[str, Any]) -> bool:
        with suppress(CheckpointError):
            store.load(state, step)
            return not_finite(state, self._ranks) is None
        return False

    def _skips(self, skipped: int) -> str:
        limit = self._plan.train.max_nonfinite
        return (
            f"{number_of(skipped, 'step')} in a row had a loss or gradient that is not finite "
            f"(train.max_nonfinite={limit}); "
        )

    def _lost(self, step: int, what: str) -> str:
        self.store.wait()  # for a pending checkpoint, or its error
        instead = "no step before it is saved" if self._plan.checkpoint.enabled else NOTHING
        if self._good is not None:
            instead = (
                f"the newest checkpoint with finite weights is {self._good}, from which this run goes on"
            )
        return f"{what} after step {step}, which is not saved; {instead}"


def not_finite(state: Mapping[str, Any], ranks: Ranks) -> str | None:
    """Return an entry of model or optimizer that is not finite on any rank. One device sync. Collective."""
    found = ranks.gather(first_not_finite({part: state[part] for part in ("model", "optimizer")}))
    return next((name for name in found if name is not None), None)


@torch.no_grad()
def first_not_finite(state: dict[str, Any]) -> str | None:
    """Return this rank's first entry with a non-finite value. One device sync."""
    entries = flatten(state)
    for name, (_, value) in entries.values.items():
        each = value if type(value) is list else [value]
        if any(isinstance(v, float) and not math.isfinite(v) for v in each):
            return name
    encoded = {name: each.encoded for name, each in entries.of(FlatShard).items() if each.encoded}
    parts = [(name, local_part(each)) for name, each in entries.tensors.items() if name not in encoded]
    parts += [(name, bounds) for name, each in encoded.items() for bounds in each.bounds()]
    floats = [(name, part) for name, part in parts if part.is_floating_point() and part.numel()]
    if not floats:
        return None
    # the largest magnitude is NaN where any value is; other than isfinite() it takes no memory
    norms = [torch.linalg.vector_norm(part, math.inf).float() for _, part in floats]
    largest = torch.stack([norm.to(norms[0].device) for norm in norms])  # some moments are in host memory
    finite = wait_for(largest.isfinite().tolist)
    return next((name for (name, _), fine in zip(floats, finite, strict=True) if not fine), None)


def seed_everything(seed: int, precision: PrecisionConfig, device: torch.device) -> None:
    """Seed Python and torch; select deterministic kernels on a CPU, and elsewhere if configured."""
    random.seed(seed)
    torch.manual_seed(seed)
    if precision.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # On a CPU compiled code would else add gradients of indexing by several threads at once.
    torch.use_deterministic_algorithms(precision.deterministic or device.type == "cpu")
    # Tests prove that uninitialized memory is never read; filling it would cost a pass each time.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def random_state() -> dict[str, Any]:
    """Return random generator states as tensors and plain values."""
    state: dict[str, Any] = {"python": repr(random.getstate()), "torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore_random_state(state: dict[str, Any]) -> None:
    """Restore a state of ``random_state``. *Raises* CheckpointError if invalid."""
    try:
        random.setstate(ast.literal_eval(state["python"]))
        torch.set_rng_state(state["torch"])
        if "cuda" in state and torch.cuda.is_available():
            torch.cuda.set_rng_state(state["cuda"])
    except (ValueError, TypeError, SyntaxError, RecursionError, RuntimeError) as error:
        raise CheckpointError(
            f"the checkpoint's random numbers are not a generator's state: {error}"
        ) from error
