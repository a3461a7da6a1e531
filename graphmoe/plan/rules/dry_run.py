"""What a dry run of a rank, ``launch.fake_world``, asks of a configuration, and the batch that it takes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from graphmoe.config.schema import ConfigError, DpShard, RunConfig, TrainConfig
from graphmoe.plan.layout import Layout


def dry_run_rules(config: RunConfig) -> Iterator[str]:
    """Violated rules of ``launch.fake_*``, beside those of the layout."""
    launch = config.launch
    world = launch.fake_world
    if world is None or world < 1:
        return
    if launch.nproc not in (1, "auto") or launch.nodes not in (1, "auto"):
        yield (
            f"launch.fake_world={world} stands for all ranks, and launch.nproc={launch.nproc} with "
            f"launch.nodes={launch.nodes} starts processes; leave those two out"
        )
    if launch.fake_rank is not None and not 0 <= launch.fake_rank < world:
        yield (
            f"launch.fake_rank={launch.fake_rank} is not among the ranks of launch.fake_world={world}; use "
            f"0 to {world - 1}"
        )
    if config.parallel.dp_shard is DpShard.fsdp2:
        yield (
            f"launch.fake_world={world} counts what parallel.dp_shard=zero1 keeps and sends, and "
            f"parallel.dp_shard=fsdp2 is given; leave one of them out"
        )
    if launch.write_only:
        yield (
            f"launch.write_only=true writes a run that others start, and launch.fake_world={world} starts "
            f"none; leave one of them out"
        )


def with_dry_batch(config: RunConfig) -> RunConfig:
    """In a dry run the default global batch is at least one micro-batch for each data-parallel rank.

    With a pipeline it is ``pipeline.microbatches`` of each, or four for each rank of the pipeline. Any other
    that does not divide is refused, as in a run.
    """
    launch, train, parallel = config.launch, config.train, config.parallel
    if launch.fake_world is None or train.global_batch_size != TrainConfig.global_batch_size:
        return config
    try:
        together = train.micro_batch_size * Layout.of(parallel, launch.fake_world).dp
    except (ConfigError, ZeroDivisionError):  # of these other rules speak
        return config
    count = config.pipeline.microbatches or 4 * parallel.pp if parallel.pp > 1 else 1
    if min(together, count) < 1 or (parallel.pp == 1 and train.global_batch_size % together == 0):
        return config
    train = dataclasses.replace(train, global_batch_size=together * count)
    return dataclasses.replace(config, train=train)
