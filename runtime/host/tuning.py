"""Tuning of a worker's process: where its threads run, how many they are, when garbage is collected."""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Callable, Sequence
from types import TracebackType

import torch

from graphmoe.config.schema import HostConfig, NumaBinding
from graphmoe.runtime.host.environment import HostLine
from graphmoe.runtime.host.numa import Unbound, cores_here, cpus_near
from graphmoe.runtime.torch_compat import bind_threads

log = logging.getLogger(__name__)


def start_host(
    host: HostConfig, device: torch.device, num_workers: int, gather: Callable[[int], list[int]]
) -> list[HostLine]:
    """Bind a worker's threads near its GPU and choose their number; what was done, and what not and why.

    For each worker, once, before it touches the device and before anything is compiled. ``num_workers``
    are those of this node, ``gather`` gives every rank's number to every rank.
    """
    cores = cores_here()
    lines = [bind_to_numa(host, device), set_threads(host, num_workers, cores, gather)]
    when = f"every {host.gc_interval} steps" if host.manual_gc else "whenever Python pleases"
    return [*lines, HostLine(f"garbage is collected {when} (host.manual_gc={str(host.manual_gc).lower()})")]


def bind_to_numa(host: HostConfig, device: torch.device) -> HostLine:
    """Bind all threads of this process, and those to come, to the CPUs of its GPU's NUMA node.

    Asking for the node starts CUDA, in this process only and without memory of the GPU; the threads that
    CUDA has by then are bound too. Never raises: what cannot be bound runs where it would have.
    """
    if host.numa is NumaBinding.none:
        return HostLine("threads run on any CPU (host.numa=none)")
    try:
        node, near = cpus_near(device)
        bind_threads(near)
    except Unbound as reason:
        return HostLine(f"threads run on any CPU: {reason}")
    except (OSError, RuntimeError, ValueError, AssertionError) as error:  # of the system, and of CUDA
        return HostLine(f"threads run on any CPU, since binding them failed: {error}", warns=True)
    return HostLine(f"threads run on {len(near)} CPUs of NUMA node {node}, that of GPU {device.index or 0}")


def set_threads(
    host: HostConfig, num_workers: int, cores: int, gather: Callable[[int], list[int]]
) -> HostLine:
    """Set the number of threads of torch's operations on the CPU, the same on all ranks.

    Compiled code for a CPU has the number in it, so the least of all ranks is taken. ``cores`` are those
    that the process had before it was bound.
    """
    wanted, why = _threads(host, num_workers, cores)
    number = min(gather(wanted))
    if number != torch.get_num_threads():
        torch.set_num_threads(number)
    least = f"; the least of all ranks, {wanted} here" if number < wanted else ""
    return HostLine(
        f"{number} {'thread' if number == 1 else 'threads'} for operations on the CPU ({why}{least})"
    )


def _threads(host: HostConfig, num_workers: int, cores: int) -> tuple[int, str]:
    """The number that this rank would take, and why."""
    if host.threads is not None:
        return host.threads, f"host.threads={host.threads}"
    given = os.environ.get("OMP_NUM_THREADS", "")
    if given:
        number = int(given) if given.isdigit() and int(given) else torch.get_num_threads()
        hint = (
            "; torchrun sets 1 where nothing is set, host.threads goes before it" if num_workers > 1 else ""
        )
        return number, f"OMP_NUM_THREADS={given}{hint}"
    bound = cores_here()
    if num_workers > 1:
        return max(min(cores // num_workers, bound), 1), f"{cores} cores, {num_workers} workers"
    if bound < min(cores, torch.get_num_threads()):
        return bound, "the cores that it is bound to"
    return torch.get_num_threads(), "torch's own choice"


def log_host(lines: Sequence[HostLine]) -> None:
    """Log what became of the host's settings."""
    for line in lines:
        log.log(logging.WARNING if line.warns else logging.INFO, "host: %s", line.text)


class GarbageCollection:
    """Collects garbage at fixed steps instead of whenever Python pleases, inside a ``with`` block.

    A collection in the middle of a step delays its kernel launches by milliseconds; at a fixed step
    every rank pays at the same time. None happens before the first step has ended, since imports and
    tracing make much that stays and a quarter of their time would go into looking at it.
    """

    def __init__(self, config: HostConfig) -> None:
        self.config = config
        self._began = False

    def __enter__(self) -> GarbageCollection:
        gc.disable()
        return self

    def after_step(self, step: int) -> None:
        """Collect if this step is due, or is the first one here."""
        if not self.config.manual_gc:
            gc.enable()
        elif not self._began or step % self.config.gc_interval == 0:
            gc.collect()
        self._began = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        gc.enable()
