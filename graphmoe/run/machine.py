"""What the run runs on: device, seeds, and the record of versions in ``env.json``."""

from __future__ import annotations

import ast
import importlib.metadata
import math
import os
import platform
import random
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import torch

from graphmoe.checkpoint import CheckpointError
from graphmoe.config.packages import VENDORS
from graphmoe.config.schema import (
    ComputeDtype,
    ConfigError,
    DataSource,
    DeviceChoice,
    HostConfig,
    PrecisionConfig,
)
from graphmoe.model.sizes import count_parameters, state_bytes
from graphmoe.plan.plan import Plan

PACKAGES = (
    *("torch", "triton", "hydra-core", "omegaconf", "numpy", "tokenizers", "safetensors"),
    *(package.module for package in VENDORS.values()),
)
"""Distributions on which what a run computes, or how fast, depends."""
PER_CPU = 16
"""The most threads, and the most processes, for each CPU: tests have many on few."""


def open_device(choice: DeviceChoice) -> torch.device:
    """The device that a resolved configuration names."""
    if choice is DeviceChoice.cuda:
        if not torch.cuda.is_available():
            raise ConfigError("run.device=cuda, but torch sees no GPU; use run.device=cpu or auto")
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def memory_of(device: torch.device) -> int:
    """Bytes of a device's whole memory."""
    return torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else psutil.virtual_memory().total


def check_memory(plan: Plan, device: torch.device) -> None:
    """Refuse weights with gradients and moments, or batches, that alone exceed a rank's memory.

    Where layers are shared out, of the ranks that hold most.
    """
    config, layout, pipeline, num_ranks = plan.config, plan.layout, plan.pipeline, plan.layout.size("world")
    parameters = count_parameters(config.model).total.full
    rounded, dp_shard = config.precision.compute is ComputeDtype.bf16, config.parallel.dp_shard
    needed_by_place = [
        sum(state_bytes(config.model, layout, stages, rounded=rounded, dp_shard=dp_shard).values())
        for stages in (pipeline.stages_of_places if pipeline else [[]])
    ]
    needed = max(needed_by_place)
    there = memory_of(device)
    if needed > there:
        where, instead = f" on each of {num_ranks} ranks" if num_ranks > 1 else "", ""
        if pipeline:
            place = needed_by_place.index(needed)
            where = (
                f" on rank {place} of parallel.pp={layout.pp} ({', '.join(pipeline.pieces_of_place(place))})"
            )
            instead = f", or a pipeline.layout that gives it less than {pipeline.layout}"
        raise ConfigError(
            f"model={config.model.name} with model.num_layers={config.model.num_layers} has {parameters:,} "
            f"parameters: weights, gradients and moments take {needed / 2**30:.1f} GiB{where}, and this "
            f"{device.type} has {there / 2**30:.1f} GiB; use fewer layers or experts, or a smaller "
            f"model{instead}"
        )
    _check_batches(plan, there)


def _check_batches(plan: Plan, device_bytes: int) -> None:
    """Refuse batches, and rows of metrics, that alone exceed the memory of device or host."""
    train, data, model = plan.config.train, plan.config.data, plan.config.model
    tokens = train.micro_batch_size * (data.seq_len or 1)
    batch = 8 * (tokens + train.micro_batch_size)
    state = plan.tokens * model.hidden_size * plan.dtype.itemsize
    endless = data.source in (DataSource.synthetic, DataSource.hf)
    validation = train.val_batches * batch if endless else 0
    kept = min(train.log_interval, train.steps)
    rows = 4 * kept * model.num_layers * model.num_experts
    host = memory_of(torch.device("cpu"))
    sizes = {"data.seq_len": data.seq_len or 1, "train.micro_batch_size": train.micro_batch_size}
    larger = max(sizes.items(), key=lambda item: item[1])
    for key, value, what, num_bytes, there in (
        (*larger, "hidden states of a micro-batch", state, device_bytes),
        ("data.prefetch", data.prefetch, "batches that are read ahead", data.prefetch * batch, host),
        ("train.val_batches", train.val_batches, "batches of a validation", validation, host),
        ("train.log_interval", kept, "metrics of so many steps", rows, host),
    ):
        if num_bytes > there:
            raise ConfigError(
                f"{key}={value}: the {what} alone take {num_bytes / 2**30:.1f} GiB, and there are "
                f"{there / 2**30:.1f} GiB; use at most {key}={value * there // num_bytes}"
            )


def check_processes(host: HostConfig, nproc: int) -> None:
    """Refuse more threads or processes than this machine can serve. *Raises* ConfigError."""
    most = PER_CPU * (os.cpu_count() or 1)
    for key, value in (("host.threads", host.threads or 1), ("launch.nproc", nproc)):
        if value > most:
            raise ConfigError(
                f"{key}={value} is more than {PER_CPU} for each CPU of this machine; use at most {most}"
            )


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


def describe(device: torch.device) -> dict[str, Any]:
    """Versions, device, source commit and command line of this process."""
    versions: dict[str, str | None] = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    return {
        "python": platform.python_version(),
        "packages": versions,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "device": device_name(device),
        "num_devices": torch.cuda.device_count(),
        "host": platform.node(),
        "platform": platform.platform(),
        "cpu_cores": psutil.cpu_count(logical=False),
        "git_commit": git_commit(),
        "command": sys.orig_argv,
    }


def device_name(device: torch.device) -> str:
    """Marketing name of a GPU, or the processor's architecture."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()


def git_commit() -> str | None:
    """Commit of this source tree, with '-dirty' if it has changes; None outside a git checkout."""
    here = Path(__file__).parent
    command = ["git", "-C", str(here), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (FileNotFoundError, subprocess.CalledProcessError):
        return None


def memory_gib(device: torch.device) -> float:
    """Peak memory so far in GiB: allocated on a GPU, resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def taken_gib(device: torch.device) -> float:
    """Memory of the GPU that is in use now, by whatever and whomever, in GiB; on a CPU as `memory_gib`."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return (total - free) / 2**30
    return memory_gib(device)


def free_bytes(device: torch.device) -> float:
    """Return the bytes that may still be allocated: a GPU's free ones and torch's unused; inf on a CPU."""
    if device.type != "cuda":
        return math.inf
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + unused


def seconds_since_process_start() -> float:
    """Wall time since this process was started, imports included."""
    return time.time() - psutil.Process().create_time()
