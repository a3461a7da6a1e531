"""What the parts of a model take, which balances the stages of a pipeline where nothing was measured."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from graphmoe.config import ComputeDtype, DispatcherChoice, ModelConfig, RecomputeConfig, RunConfig
from graphmoe.layout import ALONE
from graphmoe.pipeline_balance import balanced_layout
from graphmoe.pipeline_costs import PartCost
from graphmoe.projection.hardware import H200
from graphmoe.projection.rates import default_rates
from graphmoe.projection.segment_times import (
    SegmentTime,
    embed_time,
    head_time,
    join_time,
    layer_times,
)
from graphmoe.projection.sizes import Sizes
from graphmoe.projection.speeds import Speeds


def default_layout(model: ModelConfig, seq_len: int, rank_of: Sequence[int]) -> str:
    """The layout whose busiest rank takes least, by `modelled_parts`. ``rank_of`` says where each stage is.

    *Raises* ConfigError where there are more stages than parts.
    """
    return balanced_layout([(part.letter, part.total) for part in modelled_parts(model, seq_len)], rank_of)


def modelled_parts(model: ModelConfig, seq_len: int) -> list[PartCost]:
    """Seconds of one sequence in each part, in the order of the model: E, layers, MTP layers, L.

    Those of an H200 that has the part whole, from a step's second micro-batch on, without recompute and
    without exchange between ranks: a layout is the same on every card and for every way to share out layers.
    Head and loss of all depths are in L, where a pipeline has them.
    """
    run = RunConfig(model=model)
    run.data.seq_len, run.train.micro_batch_size = seq_len, 1
    run.precision.compute, run.moe.dispatcher = ComputeDtype.bf16, DispatcherChoice.local
    sizes = Sizes.of(run, ALONE, on_nvidia=True)
    speeds = Speeds(H200, default_rates(H200), adding=1.0)

    @functools.cache
    def layer(is_dense: bool) -> list[SegmentTime]:
        index = 0 if is_dense else model.num_dense_layers
        return layer_times(sizes, speeds, RecomputeConfig(), index, host_counts=False, hidden=0.0)

    depths = model.mtp_depth
    return [
        _part("E", [embed_time(sizes, speeds)]),
        *(_part("t", layer(index < model.num_dense_layers)) for index in range(model.num_layers)),
        *[_part("m", [*layer(False), join_time(sizes, speeds)]) for _ in range(depths)],
        _part("L", [head_time(sizes, speeds, depths + 1)]),
    ]


def _part(letter: str, times: Sequence[SegmentTime]) -> PartCost:
    sums = (sum(getattr(time, kind) for time in times) for kind in ("forward", "inputs", "weights"))
    return PartCost(letter, *sums)
