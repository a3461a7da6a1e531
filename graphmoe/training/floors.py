"""Least times of segments on this device, from the projection's FLOPs and bytes; traces compare with them."""

import logging
from collections import defaultdict

from graphmoe.config.schema import ConfigError
from graphmoe.model.sizes import owned_elements
from graphmoe.optim import rule_of
from graphmoe.plan.costs.hardware import card_in
from graphmoe.plan.costs.rates import Speeds, ceilings
from graphmoe.plan.costs.segment_times import SegmentTime
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
    owned = owned_elements(plan.model, plan.layout, own, plan.optim.bucket_mb)
    return [
        *({times[0].name: _sums(times) for times in zip(*alike, strict=True)} for alike in kinds.values()),
        {"optimizer": (1e3 * update_seconds(plan.optim.name, owned, speeds), 0.0, 0.0)},
    ]


def _sums(times: tuple[SegmentTime, ...]) -> tuple[float, float, float]:
    return sum(t.forward for t in times), sum(t.inputs for t in times), sum(t.weights for t in times)


def update_seconds(optimizer: str, owned: int, speeds: Speeds) -> float:
    return owned * rule_of(optimizer).bytes_moved / speeds.hbm
