"""Several ranks on this machine, each a process, that run a list of cases one after the other.

A rank on the CPU is a child of a server that has torch and graphmoe imported; on a GPU it is started anew.
If there are fewer GPUs than ranks, ranks share them and use gloo, which can't be captured.
"""

import gc
import logging
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from graphmoe.runtime.ranks import Ranks, backend_of
from tests.forked import FORKS

Case = Callable[[Ranks, Path], Any]
"""Function that runs on every rank, with one folder for all ranks; its result can be pickled."""

NO_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}


class Job:
    def __init__(
        self, folder: Path, cases: Mapping[str, Case], num_ranks: int = 2, device: str = "cpu"
    ) -> None:
        self.folder, self.cases = folder, cases
        self._scratch = folder / f"ranks_{time.monotonic_ns()}"
        self._scratch.mkdir(parents=True)
        self.processes: list[BaseProcess] = []
        for rank in range(num_ranks):
            arguments = (rank, num_ranks, device, folder, self._scratch, dict(cases))
            context = FORKS if device == "cpu" else multiprocessing.get_context("spawn")
            self.processes.append(context.Process(target=_rank, args=arguments, daemon=True))
            self.processes[-1].start()

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()

    def wait_until(self, reached: Callable[[], bool], seconds: float = 60) -> None:
        end = time.monotonic() + seconds
        while not reached():
            failed = [r for r, process in enumerate(self.processes) if process.exitcode is not None]
            if failed or time.monotonic() > end:
                self.kill()
                raise AssertionError(f"ended: ranks {failed}, or too late; {self._errors()}")
            time.sleep(0.005)

    def results(self, seconds: float = 300) -> dict[str, list[Any]]:
        end = time.monotonic() + seconds
        while any(process.exitcode is None for process in self.processes):
            failed = any(process.exitcode for process in self.processes)
            if failed or time.monotonic() > end:
                self.kill()
            time.sleep(0.005)
        assert not any(process.exitcode for process in self.processes), self._errors()
        ranks = range(len(self.processes))
        files = [self._scratch / f"{rank}.results" for rank in ranks]
        by_rank = [torch.load(file, weights_only=False) for file in files]
        return {name: [results[name] for results in by_rank] for name in self.cases}

    def _errors(self) -> str:
        return "\n".join(path.read_text() for path in sorted(self._scratch.glob("*.error"))) or "no trace"


def share_gpus(num_ranks: int) -> bool:
    return torch.cuda.device_count() < num_ranks


def run_ranks(folder: Path, cases: Mapping[str, Case], num_ranks: int = 2) -> dict[str, list[Any]]:
    return Job(folder, cases, num_ranks).results()


def selected(request: pytest.FixtureRequest, parameter: str) -> list[Any]:
    """Values of a parameter with which tests of a fixture's module will run."""
    items = [item for item in request.session.items if item.path == request.path]
    cases = [item.callspec.params for item in items if hasattr(item, "callspec")]
    return [*dict.fromkeys(case[parameter] for case in cases if parameter in case)]


def _rank(
    rank: int, num_ranks: int, device: str, folder: Path, scratch: Path, cases: dict[str, Case]
) -> None:
    os.environ |= {"LOCAL_WORLD_SIZE": str(num_ranks), **NO_MULTICAST}
    torch.set_num_threads(1)
    gc.freeze()  # a collection takes half a second where it looks through the modules too
    gc.unfreeze = lambda: None  # which each run calls at its end
    logging.basicConfig(filename=scratch / f"{rank}.log", level=logging.INFO)
    backend = backend_of(torch.device(device))
    try:
        if device == "cuda":
            torch.cuda.set_device(rank % torch.cuda.device_count())
            if share_gpus(num_ranks):
                os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
                backend = "cpu:gloo,cuda:gloo"  # NCCL refuses two ranks on one GPU
        results: dict[str, Any] = {}
        # A case on the CPU has groups of its own: each of gloo's wakes 100 times a second until it is gone.
        parts = [[name] for name in cases] if device == "cpu" else [[*cases]]
        for part in parts:
            meeting = f"file://{scratch}/meeting_{len(results)}"
            dist.init_process_group(backend, init_method=meeting, rank=rank, world_size=num_ranks)
            ranks = Ranks()
            results |= {name: cases[name](ranks, folder / name) for name in part}
            ranks.barrier()
            dist.destroy_process_group()
            del ranks
            gc.collect()
        torch.save(results, scratch / f"{rank}.results")  # pickle would make a file of each tensor
    except BaseException:
        (scratch / f"{rank}.error").write_text(f"rank {rank}: {traceback.format_exc()}")
        raise
