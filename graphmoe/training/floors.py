"""Least times of segments on this device, from the projection's FLOPs and bytes; traces compare with them."""

import logging
from collections import defaultdict
from collections.abc import Sequence

from graphmoe.config.schema import ConfigError, ModelConfig, OptimConfig
from graphmoe.model.sizes import Owned, owned_parameters
from graphmoe.optim import rule_of
from graphmoe.optim.storage import kept_of
from graphmoe.plan.costs.hardware import card_in
from graphmoe.plan.costs.rates import Speeds, ceilings
from graphmoe.plan.costs.segment_times import SegmentTime
from graphmoe.plan.layout import Layout
from graphmoe.plan.pipeline.layouts import StagePieces
from graphmoe.plan.plan import Plan
from graphmoe.segments import LAYER_SEGMENTS

log = logging.getLogger(__name__)
Floors = list[dict[str, tuple[float, float, float]]]


def floors_of(plan: Plan, rank: int, device: str) -> Floors:
    """Return ms per step of a rank's forward, dgrad and wgrad by segment, for each kind of layer.

    Empty for devices and configurations that are not projected. ``device``: torch's name of it.
    """
    if (card := card_in(device)) is None:
        return []
    count, own = plan.num_micro_batches, plan.own_stages(plan.layout.index("pp", rank))
    speeds = Speeds(card, ceilings(), adding=(count - 1) / count)
    try:  # an eager run has the floors of a compiled one
        times = [time for pieces in own for time in plan.segment_times(speeds, pieces)]
    except ConfigError as error:
        log.info("the trace has no floors of segments: %s", error)
        return []
    layers: list[list[SegmentTime]] = []
    for time in times:
        if time.name not in LAYER_SEGMENTS or time.name == LAYER_SEGMENTS[0]:
            layers.append([])
        layers[-1].append(time.scaled(count * 1e3))
    kinds: dict[tuple[str, ...], list[list[SegmentTime]]] = defaultdict(list)
    for layer in layers:
        kinds[tuple(time.name for time in layer)].append(layer)
    owned = owned_of(plan.optim, plan.model, plan.layout, own)
    return [
        *({times[0].name: _sums(times) for times in zip(*alike, strict=True)} for alike in kinds.values()),
        {"optimizer": (1e3 * update_seconds(plan.optim, owned, speeds), 0.0, 0.0)},
    ]


def _sums(times: tuple[SegmentTime, ...]) -> tuple[float, float, float]:
    return sum(t.forward for t in times), sum(t.inputs for t in times), sum(t.weights for t in times)


def owned_of(optim: OptimConfig, model: ModelConfig, layout: Layout, stages: Sequence[StagePieces]) -> Owned:
    whole = rule_of(optim.name).matrices is not None
    return owned_parameters(model, layout, stages, optim.bucket_mb, whole=whole)


def update_seconds(optim: OptimConfig, owned: Owned, speeds: Speeds) -> float:
    """Return seconds of a rank's update: memory traffic, and GEMMs of whole matrices at the dense rate.

    At least those in which ``optim.offload`` copies the state in each direction, at once.
    """
    rule, kept = rule_of(optim.name), kept_of(optim)
    seconds = owned.elements * kept[0].bytes_moved / speeds.hbm
    copied = owned.elements * (kept[0].main + kept[0].moments)
    for shape, count in owned.matrices.items():
        assert rule.matrices is not None
        seconds += count * shape.size * kept[1].bytes_moved / speeds.hbm
        copied += count * shape.size * (kept[1].main + kept[1].moments)
        if rule.matrices.flops:
            flops = count * rule.matrices.flops(*shape)
            seconds += speeds.seconds(flops, "dense", shape.size**0.5, max(shape))
    return max(seconds, optim.offload * copied / (1e9 * speeds.card.host_gb_per_s))
