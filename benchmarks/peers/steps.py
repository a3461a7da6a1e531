"""What the processes of all peers share: their job, random tokens, timed steps and the record of them."""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import Tensor


def read_job() -> SimpleNamespace:
    """Return the job of argv[1], a JSON file of `run.py`, with ``rank`` and ``device``; select the device."""
    job = SimpleNamespace(**json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    job.rank, local = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    job.device = torch.device("cuda", local) if job.on_gpu else torch.device("cpu")
    if job.on_gpu:
        torch.cuda.set_device(job.device)
    torch.manual_seed(job.rank)
    return job


def tokens_of(job: SimpleNamespace, sequences: int, extra: int = 0) -> Tensor:
    return torch.randint(job.config["vocab_size"], (sequences, job.seq_len + extra), device=job.device)


def measure(job: SimpleNamespace, step: Callable[[], Tensor | float]) -> None:
    """Time steps, each with a wait for the device, and write the record."""
    seconds, losses = list[float](), list[Tensor | float]()
    for _ in range(job.steps):
        began = time.perf_counter()
        losses.append(step())
        if job.on_gpu:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    peak = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()  # 0 without a GPU
    gib = torch.tensor(peak, dtype=torch.float64, device=job.device) / 2**30
    if dist.is_initialized():
        dist.all_reduce(gib, dist.ReduceOp.MAX)
    if job.rank == 0:
        record = {"seconds": seconds, "losses": [*map(float, losses)]}
        record |= dict(zip(("peak_gib", "reserved_gib"), gib.tolist(), strict=True))
        Path(job.record).write_text(json.dumps(record), encoding="utf-8")
