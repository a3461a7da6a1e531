"""A rank of a job in which one never comes to a collective: ``torchrun -m tests.gpu.late_rank <folder>``."""

import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from graphmoe.runtime.launch.failures import set_flight_recorder

LATE_S = 60
"""Seconds, more than the other ranks wait."""


def main() -> None:
    set_flight_recorder(Path(sys.argv[1]))
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", timeout=timedelta(seconds=10))
    met = torch.ones(1, device="cuda")
    dist.all_reduce(met)
    assert met.item() == dist.get_world_size()
    if dist.get_rank() == 1:
        time.sleep(LATE_S)
    dist.all_reduce(met)
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
