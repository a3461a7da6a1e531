"""What the dispatchers that stand on libraries of vendors can carry, and their packages.

``deepep`` is DeepEP 1.2.1 and ``turbo`` its port to ROCm in Primus-Turbo; both move rows through a buffer
between the GPUs of one node. ``nvshmem`` is torch's own exchange on NVSHMEM.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from graphmoe.config.packages import INSTALL, PACKAGES
from graphmoe.config.schema import ComputeDtype, DispatcherChoice, ModelConfig, MoEConfig, ParallelConfig

INSTEAD = "moe.dispatcher=alltoall, or symm within a node"
"""Dispatchers that need no package."""
BUFFER_RANKS = (2, 4, 8)
"""Ranks that share a buffer: the kernels are compiled for these (launch.cuh)."""
BUFFER_EXPERTS = 128
"""Experts of a rank: each is a thread of one block (``notify_dispatch`` in intranode.cu)."""


@dataclass(frozen=True)
class Buffered:
    """A package whose buffer moves rows, and the rows that it takes."""

    package: str
    """Its import name."""
    install: str
    hidden_step: int
    """Hidden sizes are multiples of it."""
    hidden_most: int | None
    top_k: int
    """Slots of a token at most: one for each thread of a warp."""


BUFFERED = {
    # A warp sums 256 numbers in each round of `combine` and synchronises inside it, so each of its threads
    # must have a part of every round. `dispatch` moves half a row through a warp's 8 KiB of shared memory.
    DispatcherChoice.deepep: Buffered(
        "deep_ep",
        "pip install --no-build-isolation git+https://github.com/deepseek-ai/DeepEP@v1.2.1",
        hidden_step=256,
        hidden_most=7936,
        top_k=32,
    ),
    DispatcherChoice.turbo: Buffered(
        PACKAGES["turbo"], INSTALL["turbo"], hidden_step=8, hidden_most=None, top_k=64
    ),
}


def vendor_dispatch_rules(
    moe: MoEConfig, parallel: ParallelConfig, model: ModelConfig, compute: ComputeDtype
) -> Iterator[str]:
    """Violated rules of the dispatchers ``deepep``, ``turbo`` and ``nvshmem``."""
    key, ranks = f"moe.dispatcher={moe.dispatcher.value}", parallel.ep * parallel.etp
    if moe.dispatcher is DispatcherChoice.nvshmem and (ranks < 2 or ranks & (ranks - 1)):
        yield (
            f"{key} shares out an exchange evenly to 2, 4, 8, 16, ... ranks, and parallel.ep={parallel.ep} * "
            f"parallel.etp={parallel.etp} = {ranks}; use such a product, or {_instead(ranks)}"
        )
    takes = BUFFERED.get(moe.dispatcher)
    if takes is None:
        return
    if parallel.etp > 1:
        yield (
            f"{key} sends a token to one rank for each expert, and parallel.etp={parallel.etp} shares each "
            f"out to several; use parallel.etp=1, or {INSTEAD}"
        )
    if parallel.ep not in BUFFER_RANKS:
        yield (
            f"{key} exchanges between 2, 4 or 8 ranks, and parallel.ep={parallel.ep}; use parallel.ep of "
            f"these, or {_instead(ranks)}"
        )
    elif model.num_experts > BUFFER_EXPERTS * parallel.ep:
        yield (
            f"{key} takes up to {BUFFER_EXPERTS} experts of a rank, and model.num_experts="
            f"{model.num_experts} over parallel.ep={parallel.ep} are {model.num_experts // parallel.ep}; use "
            f"more ranks, or {INSTEAD}"
        )
    if compute is ComputeDtype.fp32:
        yield f"{key} moves bf16 and precision.compute=fp32; use precision.compute=bf16, or {INSTEAD}"
    yield from _row_rules(key, takes, model)


def _row_rules(key: str, takes: Buffered, model: ModelConfig) -> Iterator[str]:
    hidden, most = model.hidden_size, takes.hidden_most
    if hidden % takes.hidden_step or (most is not None and hidden > most):
        limit = "" if most is None else f", {most} at most"
        yield (
            f"{key} moves rows of a multiple of {takes.hidden_step} numbers{limit}, and "
            f"model.hidden_size={hidden}; use such a size, or {INSTEAD}"
        )
    if model.top_k > takes.top_k:
        yield (
            f"{key} takes up to {takes.top_k} experts of a token, and model.top_k={model.top_k}; use "
            f"{INSTEAD}"
        )


def _instead(ranks: int) -> str:
    return INSTEAD if ranks > 1 else "moe.dispatcher=auto"
