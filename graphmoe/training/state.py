"""State of a run: what a checkpoint holds, and its random numbers."""

import ast
import os
import random
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from graphmoe.checkpoint import CheckpointError
from graphmoe.config.schema import PrecisionConfig
from graphmoe.data import Loader
from graphmoe.optim.base import StepOptimizer


class Chosen(NamedTuple):
    """Choices by measured times. A checkpoint keeps them: other kernels would sum in another order."""

    experts: str = ""
    """Backends of the experts' forward, dgrad and wgrad; empty where none run."""
    fp8: Mapping[str, float] = {}  # noqa: RUF012  # nobody changes it
    """Speeds in 8 bits of the products that were timed."""


def state_of(step: int, optimizer: StepOptimizer, loader: Loader, chosen: Chosen) -> dict[str, Any]:
    """Return the state after ``step``, whose tensors are the run's own. A collective."""
    return {
        "model": optimizer.model_state(),
        "optimizer": optimizer.state_dict(),
        "loader": loader.state_dict(),
        "random": random_state(),
        **chosen._asdict(),
        "step": step,
    }


def seed_everything(seed: int, precision: PrecisionConfig, device: torch.device) -> None:
    """Seed Python and torch, and choose deterministic kernels: on a CPU always, else where asked for."""
    random.seed(seed)
    torch.manual_seed(seed)
    if precision.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # On a CPU compiled code would else add gradients of indexing by several threads at once.
    torch.use_deterministic_algorithms(precision.deterministic or device.type == "cpu")
    # What is not written is never read, which tests prove; filling it would cost a pass each time.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def random_state() -> dict[str, Any]:
    """State of the random number generators, as tensors and plain values."""
    state: dict[str, Any] = {"python": repr(random.getstate()), "torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore_random_state(state: dict[str, Any]) -> None:
    """Put the generators back to a state of ``random_state``. *Raises* CheckpointError for any other."""
    try:
        random.setstate(ast.literal_eval(state["python"]))
        torch.set_rng_state(state["torch"])
        if "cuda" in state and torch.cuda.is_available():
            torch.cuda.set_rng_state(state["cuda"])
    except (ValueError, TypeError, SyntaxError, RecursionError, RuntimeError) as error:
        raise CheckpointError(
            f"the checkpoint's random numbers are no state of a generator: {error}"
        ) from error
