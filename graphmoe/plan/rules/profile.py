"""What ``profile.*`` asks of a configuration."""

from __future__ import annotations

from collections.abc import Iterator

from graphmoe.config.schema import ProfileConfig, RunConfig


def profile_rules(config: RunConfig) -> Iterator[str]:
    """Violated rules of ``profile.steps`` and ``profile.ranks``."""
    steps, ranks, total = config.profile.steps, config.profile.ranks, config.train.steps
    if not steps:
        return
    if len(steps) > 2:
        yield f"profile.steps={steps} has {len(steps)} numbers; use the first and the last, or one"
        return
    first, last = steps[0], steps[-1]
    if first < 1 or last < first:
        yield f"profile.steps={steps} must be the first and the last step, counted from 1, e.g. [10,12]"
    elif last > total:
        inside = [min(first, total), total] if first < total else [total]
        yield f"profile.steps={steps} goes beyond train.steps={total}; use at most {inside}"
    if not ranks or min(ranks) < 0 or len({*ranks}) < len(ranks):
        yield f"profile.ranks={ranks} must be ranks, counted from 0, each once; [0] is the default"
    if config.launch.fake_world is not None:
        yield (
            f"profile.steps={steps} measures steps, and launch.fake_world={config.launch.fake_world} runs "
            f"none; leave one of them out"
        )


def rank_rules(profile: ProfileConfig, world_size: int) -> Iterator[str]:
    """Violated rules of ``profile.ranks`` in a job of so many ranks."""
    ranks = profile.ranks
    if profile.steps and max(ranks, default=0) >= world_size:
        yield f"profile.ranks={ranks} has a rank that is none of {world_size}; use 0 to {world_size - 1}"
