"""Checks before a run starts: checkpoint to start from, memory, number of steps."""

import logging
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from graphmoe.checkpoint import CHECKPOINTS, CheckpointError, saved_steps
from graphmoe.checkpoint.hf.families import require_family
from graphmoe.checkpoint.store import check_fit
from graphmoe.config.choices import LAYERS
from graphmoe.config.schema import ConfigError, RunConfig
from graphmoe.data import DataError, open_data
from graphmoe.data.tokenizer import find_tokenizer, load_tokenizer
from graphmoe.model.build import build_model
from graphmoe.model.sizes import count_parameters
from graphmoe.plan.attention import attention_facts
from graphmoe.plan.costs.activations import made_again, stage_activations
from graphmoe.plan.costs.sizes import Sizes
from graphmoe.plan.experts import runs_pass
from graphmoe.plan.pipeline.layouts import StagePieces
from graphmoe.plan.plan import Plan, dtype_of
from graphmoe.plan.rules import check
from graphmoe.run.machine import free_memory_of, memory_of
from graphmoe.run.stored import named_source, read_stored_run, refuse_other_tokenizer
from graphmoe.run.weights import check_weights, explained_mismatch
from graphmoe.runtime.launch.failures import RunFailed
from graphmoe.training.export import check_export
from graphmoe.training.memory import (
    activations_on_host,
    chunk_bytes,
    host_of_places,
    in_flight,
    state_of_place,
)

log = logging.getLogger(__name__)

FUSE_LOSS = "fuse_loss"
SURE = 0.9  # lower bound of activations over projected ones, which are within 5% of a dry run's


def check_start(config: RunConfig, own_folder: Path | None = None) -> None:
    """Check that resume_from or init_from is whole and of this model, and that an export can be written.

    Reads shapes, not contents. Starts are ignored if the run has a checkpoint. *Raises* ConfigError.
    """
    checkpoint, model = config.checkpoint, config.model
    require_family(model.hf_family)
    is_continued = own_folder is not None and bool(saved_steps(own_folder / CHECKPOINTS))
    earlier = read_stored_run(own_folder)[1].checkpoint.export if own_folder and is_continued else None
    check_export(checkpoint, model, earlier)
    if is_continued:
        return
    try:
        if checkpoint.resume_from:
            with named_source("resume_from", checkpoint.resume_from):
                folder = Path(checkpoint.resume_from)
                ours = build_model(model, device="meta", dtype=dtype_of(config.precision.compute))
                with explained_mismatch(folder, model):
                    check_fit(folder, {"model": ours.state_dict()}, partial=False)
        if checkpoint.init_from:
            with named_source("init_from", checkpoint.init_from):
                check_weights(Path(checkpoint.init_from), model)
    except CheckpointError as error:
        raise ConfigError(str(error)) from error
    if name := config.data.tokenizer:
        refuse_other_tokenizer(checkpoint, config.data, load_tokenizer(find_tokenizer(name)))


def with_epochs(config: RunConfig) -> RunConfig:
    """Return the configuration with steps in place of ``train.epochs``. Opens the data."""
    train, data = config.train, config.data
    if train.epochs is None:
        return config
    assert data.seq_len is not None
    try:
        corpus = open_data(data, seq_len=data.seq_len, vocab_size=config.model.vocab_size)
    except DataError as error:
        raise RunFailed(str(error)) from error
    found = corpus.train.num_samples
    if found is None:
        raise ConfigError(
            f"train.epochs={train.epochs}: data={data.source} does not say how long it is; use "
            f"train.steps or train.tokens"
        )
    steps = math.ceil(train.epochs * found / train.global_batch_size)
    log.info(
        "train.epochs=%g of %d samples: %d steps of %d", train.epochs, found, steps, train.global_batch_size
    )
    counted = replace(config, train=replace(train, steps=steps, epochs=None))
    check(counted)
    return counted


def check_memory(plan: Plan, device: torch.device) -> None:
    """Raise ConfigError if state, batches or activations certainly exceed the memory of a rank."""
    model, layout, pipeline, num_ranks = plan.model, plan.layout, plan.pipeline, plan.layout.size("world")
    parameters, needed_by_place = count_parameters(model)["total"]["full"], state_of_places(plan)
    needed, there = max(needed_by_place), memory_of(device)
    if needed > there:
        where, instead = f" on each of {num_ranks} ranks" if num_ranks > 1 else "", ""
        if pipeline:
            place = needed_by_place.index(needed)
            where = (
                f" on rank {place} of parallel.pp={layout.pp} ({', '.join(pipeline.pieces_of_place(place))})"
            )
            instead = f", or a pipeline.layout that gives it less than {pipeline.layout}"
        experts = f" and model.num_experts={model.num_experts}" if model.num_experts else ""
        raise ConfigError(
            f"model={model.name} with model.num_layers={model.num_layers}{experts} has {parameters:,} "
            f"parameters: weights, gradients and moments take {needed / 2**30:.1f} GiB{where}, and this "
            f"{device.type} has {there / 2**30:.1f} GiB; use fewer layers or experts{instead}"
        )
    _check_host(plan, needed if device.type == "cpu" else 0.0)
    _check_batches(plan)
    _check_activations(plan, device, needed_by_place)


def state_of_places(plan: Plan) -> list[float]:
    """Return a rank's bytes of weights, gradients and moments by pipeline position."""
    return [sum(state_of_place(plan, place).values()) for place in range(plan.layout.pp)]


def _check_host(plan: Plan, beside: float) -> None:
    asked, world = plan.config.launch.nproc, plan.layout.size("world")
    ranks = min(asked, world) if isinstance(asked, int) else world
    needed, there = ranks * (max(host_of_places(plan)) + beside), memory_of(torch.device("cpu"))
    if plan.optim.offload and needed > there:
        raise ConfigError(
            f"optim.offload=true: master weights and moments of the {ranks} ranks of a node take "
            f"{needed / 2**30:.1f} GiB of host memory, and this node has {there / 2**30:.1f} GiB; use "
            f"optim.moment_dtype=int8, more nodes or optim.offload=false"
        )
    if not plan.recompute.offload:
        return
    kept = ranks * SURE * max(activations_on_host(plan, on_nvidia=True))
    if needed + kept > there:
        raise ConfigError(
            f"recompute.offload={plan.config.recompute.offload}: saved activations of the {ranks} ranks of a "
            f"node take at least {kept / 2**30:.1f} GiB of host memory, beside {needed / 2**30:.1f} GiB of "
            f"{there / 2**30:.1f}; use fewer segments, or a smaller train.micro_batch_size"
        )


def _check_batches(plan: Plan) -> None:
    train, data, model = plan.config.train, plan.config.data, plan.config.model
    batch = 8 * train.micro_batch_size * ((data.seq_len or 1) + 1)
    validation = train.val_batches * batch if data.source_facts.endless else 0
    kept = min(train.log_interval, train.steps)
    rows = 4 * kept * model.num_layers * model.num_experts
    host = memory_of(torch.device("cpu"))
    for key, value, what, num_bytes in (
        ("data.prefetch", data.prefetch, "batches that are read ahead", data.prefetch * batch),
        ("train.val_batches", train.val_batches, "batches of a validation", validation),
        ("train.log_interval", kept, "metrics of so many steps", rows),
    ):
        if num_bytes > host:
            raise ConfigError(
                f"{key}={value}: the {what} alone take {num_bytes / 2**30:.1f} GiB, and there are "
                f"{host / 2**30:.1f} GiB; use at most {key}={value * host // num_bytes}"
            )


def _check_activations(plan: Plan, device: torch.device, state: Sequence[float]) -> None:
    train, data, nproc = plan.config.train, plan.config.data, plan.config.launch.nproc
    least = least_bytes(plan, state)
    cases = [(float(free_memory_of(device)), *each, "") for each in least]
    if device.type == "cpu" and nproc == plan.layout.size("world") > 1:  # ranks share host memory
        fixed, kept = (sum(each) / len(least) for each in zip(*least, strict=True))
        cases.append((memory_of(device) / nproc, fixed, kept, f" for each of {nproc} ranks"))
    free, fixed, kept, whose = max(cases, key=lambda case: case[1] + case[2] - case[0])
    if fixed + kept <= free:
        return
    sizes = {"data.seq_len": data.seq_len or 1, "train.micro_batch_size": train.micro_batch_size}
    key, value = max(sizes.items(), key=lambda item: item[1])
    most = min(int(value * (there - alone) / batch) for there, alone, batch, _ in cases)
    use = "fewer layers or a smaller model" if most < 1 else f"at most {key}={most}"
    again = "" if plan.recompute or most < 1 else "recompute=all or "
    raise ConfigError(
        f"{key}={value}: activations and logits of a micro-batch take at least {kept / 2**30:.1f} GiB beside "
        f"{fixed / 2**30:.1f} GiB of weights, gradients and moments, and this {device.type} has "
        f"{free / 2**30:.1f} GiB free{whose}; use {again}{use}"
    )


def least_bytes(plan: Plan, state: Sequence[float]) -> list[tuple[float, float]]:
    """Return lower bounds by pipeline position: (bytes of ``state`` and other fixed parts, of activations).

    Activations are of micro-batches in flight, or of one with its logits.
    """
    config, layout, model = plan.config, plan.layout, plan.config.model
    sizes = Sizes.from_config(config, layout, on_nvidia=True)  # NVIDIA GPUs save least
    known = attention_facts(model).kept is not None and model.layer in LAYERS.names
    kept = [_kept_bytes(plan, sizes, stage) if known else sizes.state for stage in plan.stages]
    most = in_flight(plan, kept)
    found = []
    fuses = config.compile.enabled and runs_pass(config.passes, FUSE_LOSS)
    logits = sizes.gathered * model.vocab_size // layout.tp
    for place, needed in enumerate(state):
        with_loss = [kept[number] for number in plan.stage_numbers(place) if plan.stages[number].loss]
        of_loss = 0.0
        if with_loss and fuses:  # the gradient of the head, and logits of a chunk
            needed += 4 * model.vocab_size * model.hidden_size * (not model.lora_rank) + chunk_bytes(sizes)
        elif with_loss:  # of an eager run in fp32, with their logarithms
            of_loss = with_loss[0] + logits * (sizes.element_bytes if config.compile.enabled else 8)
        again = [
            made_again(sizes, plan.recompute, stage.layers[-1]) if len(stage.layers) else 0.0
            for stage in plan.own_stages(place)
        ]
        found.append((needed, max(most[place] + SURE * min(again) * known, of_loss)))
    return found


def _kept_bytes(plan: Plan, sizes: Sizes, stage: StagePieces) -> float:
    parts = stage_activations(sizes, plan.recompute, stage)
    # Rows of dispatch depend on the routing, and those of the loss on how it runs.
    of_layers = (kept.total() - kept["moe_dispatch"] for part, kept in parts.items() if part != "loss")
    return SURE * sum(of_layers)
