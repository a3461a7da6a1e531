"""Automatic keys: the value of each on a run's devices, decided once by the process that composes the run."""

import contextlib
import itertools
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from graphmoe.config.formats import FORMATS, Gpu, automatic_format
from graphmoe.config.ranges import own_code, spelled
from graphmoe.config.schema import ConfigError, DeviceChoice, RunConfig
from graphmoe.ops.fp8 import gpu_of
from graphmoe.plan.costs.hardware import GPUS_PER_NODE, Card
from graphmoe.plan.costs.sizes import refuse_unknown
from graphmoe.plan.experts import experts_of, has_experts
from graphmoe.plan.layout import Layout
from graphmoe.plan.plan import Plan, plan_of
from graphmoe.plan.rules import auto, check, violations
from graphmoe.plan.rules.auto import AUTO, DISPATCHER, FP8, OVERLAP, SCOPE, SIZE, undecided, with_values
from graphmoe.runtime.launch.nodes import num_nodes, num_ranks
from graphmoe.segments import FULL_ITERATION, lowest_stage
from graphmoe.training.memory import has_margin, memory_of_places

SIZES = (16, 8, 4, 2, 1)
ENOUGH = 4  # sequences of a micro-batch; up to there twice as many gain more than overlap, on H200s
SHARED_GPUS = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"  # lets ranks of one GPU share memory in torch


class Machine(NamedTuple):
    """What automatic keys depend on beside the configuration."""

    num_ranks: int
    per_node: int  # ranks
    gpu: Gpu | None = None  # the device of each rank; None: a CPU
    memory: float = 0.0  # bytes of a device
    has_peers: bool = True  # each GPU of a node can map the memory of the others
    is_here: bool = False  # the GPUs are this process's


def this_machine(config: RunConfig) -> Machine:
    """Return the devices of a run, or those that a dry run simulates. Creates no context on a GPU."""
    launch, world, nodes = config.launch, config.launch.fake_world, config.launch.nodes
    if world is not None:
        gpu = Gpu("gfx942") if torch.version.hip else Gpu(major=9, cuda=(12, 9))
        per_node = launch.nproc if launch.nproc > 1 else min(GPUS_PER_NODE, world)
        return Machine(world, per_node, gpu, launch.fake_memory_gb * 2**30)
    if nodes == AUTO:
        nodes = num_ranks() // launch.nproc if "LOCAL_RANK" in os.environ else num_nodes()
    sizes = launch.nproc * nodes, launch.nproc
    if config.run.device is DeviceChoice.cpu or not torch.cuda.is_available():
        return Machine(*sizes)
    count, device = torch.cuda.device_count(), torch.device("cuda", 0)
    has_peers = launch.nproc <= count or os.environ.get(SHARED_GPUS) == "1"
    has_peers &= all(torch.cuda.can_device_access_peer(a, b) for a in range(count) for b in range(a))
    memory = torch.cuda.get_device_properties(device).total_memory
    return Machine(*sizes, gpu_of(device), memory, has_peers, is_here=True)


def machine_of(card: Card, num_ranks: int) -> Machine:
    return Machine(num_ranks, card.per_node, card.gpu, card.memory_gb * 1e9)


def decided(
    config: RunConfig, machine: Machine | None = None, earlier: Mapping[str, Any] | None = None
) -> RunConfig:
    """Return a resolved configuration with automatic keys decided; ``run.auto`` says how.

    ``machine`` is by default this one. Values of ``earlier``, of the run that this one continues, are kept if
    rules allow them. *Raises* ConfigError if rules refuse what was decided.
    """
    if not (keys := undecided(config)):
        return config
    why = dict[str, str]()
    with contextlib.suppress(TypeError, ValueError):  # of values in a damaged file
        kept = with_values(config, earlier or {})
        # a folder names no code for this run
        if earlier and {*own_code(kept)} <= {*own_code(config)} and not violations(kept):
            config, why = kept, dict.fromkeys(earlier, "as before")
    found, reasons = decisions(config, machine or this_machine(config))
    check(found)
    if not has_experts(found.model):
        keys = [key for key in keys if key != OVERLAP and not key.startswith("moe.")]
    shown = ((key, spelled(auto.value_of(found, key)), (reasons | why).get(key)) for key in keys)
    notes = [f"{key}={value}{because and f' ({because})' or ''}" for key, value, because in shown]
    return with_values(found, {"run.auto": notes})


def decisions(config: RunConfig, machine: Machine) -> tuple[RunConfig, dict[str, str]]:
    """Return the configuration with automatic keys decided but not checked, and reasons by key."""
    why, launch = dict[str, str](), config.launch
    if launch.fake_world is None:  # rules then know the number of ranks
        config = with_values(config, {"launch.nodes": machine.num_ranks // machine.per_node})
    if config.precision.fp8 == AUTO:
        config = with_values(config, {FP8: _format(machine.gpu)})
    if config.moe.dispatcher == AUTO:
        choice, why[DISPATCHER] = _dispatcher(config, machine)
        config = with_values(config, {DISPATCHER: choice})
    config = with_values(config, {"moe.balance": experts_of(config).balance})
    found, memory = _fitting(config, machine)
    if config.train.micro_batch_size == AUTO:
        why[SIZE] = memory
    return replace(found, launch=launch), why


def overlap_gains(dispatcher: str, gpu: Gpu | None) -> bool:
    """Return whether overlap saves time: with copy engines, as kernels that send take SMs from GEMMs."""
    return dispatcher == "symm" and gpu is not None and not gpu.gfx


def _format(gpu: Gpu | None) -> str:
    if gpu and (name := automatic_format(gpu)):
        return name
    this = "is on a CPU" if gpu is None else f"has GPUs of {gpu.gfx or f'compute capability {gpu.major}'}"
    raise ConfigError(f"{FP8}=auto needs {FORMATS['rowwise'].needs}, and this run {this}; use {FP8}=none")


def _dispatcher(config: RunConfig, machine: Machine) -> tuple[str, str]:
    ranks = config.parallel.ep * config.parallel.etp
    if ranks == 1:
        return "local", "each rank has all experts"
    if machine.gpu is None:
        return "alltoall", "no GPU"
    if machine.num_ranks > machine.per_node and machine.per_node % ranks:
        return "alltoall", f"{ranks} ranks on several nodes"
    if not machine.has_peers:
        return "alltoall", "GPUs cannot map each other's memory"
    return "symm", f"{ranks} ranks of one node"


def _fitting(config: RunConfig, machine: Machine) -> tuple[RunConfig, str]:
    """Return the first option that rules allow and that fits, else the last; and its memory in words."""
    is_known = not _refused(refuse_unknown, config)
    *_, last = options = [*_options(config, machine, SIZES[0] if is_known else auto.MICRO_BATCH_SIZE)]
    problems, needs, memory, limit = len(violations(config)), dict[int, float](), "no GPU", machine.memory
    on_nvidia = machine.gpu is not None and not machine.gpu.gfx
    for values in options if machine.gpu else ():
        found = with_values(config, values)
        if len(violations(found)) > problems:
            continue
        plan = None if problems else plan_of(found, machine.num_ranks)  # the check lists the problems
        if plan and machine.is_here and _experts_wait(plan):
            continue
        last, memory = values, "its memory is not projected"
        if plan is None or not is_known:
            break
        places = memory_of_places(plan, on_nvidia=on_nvidia)
        larger = [f"; {size} need {total / 1e9:.1f}" for size, total in needs.items() if size > values[SIZE]]
        needs[values[SIZE]] = total = max(place.total for place in places)
        memory = f"{total / 1e9:.1f} of {limit / 1e9:.1f} GB{''.join(larger[-1:])}"
        if has_margin(total, limit):
            break
    return with_values(config, last), memory


def _experts_wait(plan: Plan) -> bool:
    from graphmoe.training.executor import refuse_waiting_experts  # imports compilers

    return _refused(refuse_waiting_experts, plan, torch.device("cuda", 0), fuses=plan.fuses_experts)


def _refused(check_it: Callable[..., None], *arguments: Any, **named: Any) -> bool:
    try:
        check_it(*arguments, **named)
    except ConfigError:
        return True
    return False


def _options(config: RunConfig, machine: Machine, most: int) -> Iterator[dict[str, Any]]:
    """Yield values of overlap, micro-batch size, scope and stage, the fastest first."""
    pipeline, given, pp = config.pipeline, config.train.micro_batch_size, config.parallel.pp
    batch = config.train.global_batch_size
    with contextlib.suppress(ConfigError):  # the check repeats it
        batch //= Layout.of(config.parallel, machine.num_ranks).dp
    sizes = [size for size in SIZES if size <= most and batch % size == 0]
    if given != AUTO or machine.gpu is None:
        sizes = [auto.assumed_size(config)]
    elif pipeline.microbatches:
        sizes = [max(batch // pipeline.microbatches, 1) if batch % pipeline.microbatches == 0 else 1]
    # overlap is measured for symm without a pipeline (docs/benchmarks/README.md)
    gains = overlap_gains(config.moe.dispatcher, machine.gpu) and pp == 1
    overlaps = [True] * gains + [False] if pipeline.ep_overlap == AUTO else [pipeline.ep_overlap]
    scopes = [FULL_ITERATION, "partial"] * (machine.gpu is not None) + ["none"]
    ways = sorted(itertools.product(overlaps, sizes), key=lambda way: (-min(way[1], ENOUGH), not way[0]))
    for overlap, size in ways:
        is_last = (overlap, size) == (overlaps[-1], sizes[-1])
        if is_last or batch // size >= max(auto.ROUNDS * pp if pp > 1 else 1, 1 + overlap):
            for scope in scopes if config.graph.scope == AUTO else [config.graph.scope]:
                needed = lowest_stage(scope) if has_experts(config.model) else 0
                stage = needed if config.moe.sync_free_stage == AUTO else config.moe.sync_free_stage
                yield {OVERLAP: overlap, SIZE: size, SCOPE: scope, "moe.sync_free_stage": stage}
