"""Automatic keys: their rules, and what other rules assume until graphmoe.training.auto has decided them."""

import enum
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from graphmoe.config.ranges import spelled
from graphmoe.config.schema import Fp8Measure, Fp8Recipe, RunConfig
from graphmoe.plan.rules.model import one_node_rules

AUTO = "auto"
FP8, DISPATCHER, SCOPE = "precision.fp8", "moe.dispatcher", "graph.scope"
OVERLAP, SIZE = "pipeline.ep_overlap", "train.micro_batch_size"
KEYS = (FP8, DISPATCHER, "moe.balance", SCOPE, "moe.sync_free_stage", OVERLAP, SIZE)
ROUNDS = 4  # micro-batches for each rank of a pipeline, so that its bubble is short
MICRO_BATCH_SIZE = 4  # on a CPU, and the most if memory is not projected


def value_of(config: RunConfig, key: str) -> Any:
    section, _, name = key.partition(".")
    return getattr(getattr(config, section), name)


def with_values(config: RunConfig, values: Mapping[str, Any]) -> RunConfig:
    """Return a copy with other values of keys, such as ``moe.dispatcher``; choices may be given by name."""
    for key, value in values.items():
        section, _, name = key.partition(".")
        old = value_of(config, key)
        value = type(old)(value) if isinstance(old, enum.Enum) else value
        config = replace(config, **{section: replace(getattr(config, section), **{name: value})})
    return config


def assumed_size(config: RunConfig) -> int:
    """Return ``train.micro_batch_size``; if it is automatic, that of default batches."""
    size = config.train.micro_batch_size
    return MICRO_BATCH_SIZE if size == AUTO else int(size)


def auto_rules(config: RunConfig) -> Iterator[str]:
    """Yield errors of values that other rules cannot compute with, and of fp8 that nothing would measure."""
    size, overlap, precision = config.train.micro_batch_size, config.pipeline.ep_overlap, config.precision
    if size != AUTO and (type(size) is not int or size < 1):
        yield f"{SIZE}={spelled(size)} must be greater than 0, a whole number, or auto"
    if overlap != AUTO and type(overlap) is not bool:
        yield f"{OVERLAP}={spelled(overlap)} must be true, false or auto"
    if precision.fp8 is Fp8Recipe.auto and precision.fp8_measure is Fp8Measure.none:
        yield (
            f"{FP8}=auto measures which GEMMs gain, and precision.fp8_measure=none does not; use "
            f"precision.fp8_measure=auto, or a recipe such as {FP8}=rowwise"
        )


def presumed(config: RunConfig) -> RunConfig:
    """Return a copy with a stand-in for each automatic key: the value that rules refuse least."""
    near = with_values(config, {DISPATCHER: "symm"})
    dispatcher = "local" if config.parallel.ep * config.parallel.etp == 1 else "symm"
    values: dict[str, Any] = {FP8: "rowwise", SCOPE: "none", OVERLAP: False, SIZE: 1}
    values[DISPATCHER] = "alltoall" if any(one_node_rules(near)) else dispatcher
    if SIZE in (keys := undecided(config)):
        config = with_values(config, {"pipeline.microbatches": None})
    return with_values(config, {key: value for key, value in values.items() if key in keys})


def undecided(config: RunConfig) -> list[str]:
    return [key for key in KEYS if value_of(config, key) == AUTO]
