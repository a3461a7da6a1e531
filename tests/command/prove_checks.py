"""Checks of `graphmoe.doctor.prove` that pass, fail, die or hang in its child processes."""

import os
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import torch

from graphmoe.doctor.outcome import Error, Numbers, Skipped


def passes(device: torch.device) -> Numbers:
    return {"y": Error(1e-4, 1e-3), "process": os.getpid()}


def is_over(device: torch.device) -> Numbers:
    return {"y": Error(0.5, 1e-3), "dx": Error(float("nan"), 1.0), "dw": Error(0.0, 0.0)}


def raises(device: torch.device) -> Numbers:
    raise RuntimeError("\n".join(["HIP error: an illegal memory access", *map(str, range(40))]))


def is_skipped(device: torch.device) -> Numbers:
    raise Skipped("needs another GPU")


def dies(device: torch.device) -> Numbers:
    print("Memory access fault by GPU node-1", file=sys.stderr)
    os.abort()


def hangs(device: torch.device, pid_file: Path) -> Numbers:
    """Hang with a process of its own, as one with ranks does."""
    rank = subprocess.Popen(["sleep", "600"])
    pid_file.write_text(str(rank.pid))
    time.sleep(600)
    return {}


@contextmanager
def wrong_rounds(device: torch.device, ranks):
    yield lambda number: torch.ones_like(number)
