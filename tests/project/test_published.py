"""The published chart and the published bubbles come out of the assumptions that made them."""

from dataclasses import replace

import pytest

from graphmoe.config.schema import (
    ConfigError,
    DataConfig,
    ParallelConfig,
    RecomputeConfig,
    RunConfig,
    TrainConfig,
)
from graphmoe.pipeline_view.plans import load_preset
from graphmoe.plan.layout import Layout
from graphmoe.project.document import published_memory_gb

KINDS = ("params", "grads", "main_params", "moments", "activations", "total")
# MoE of 10^12 parameters on 768 GPUs, sequences of 4096, one in a micro-batch; GB of each GPU
CHART = {
    (24, 8, 1): (12.8, 12.8, 3.2, 12.8, 153.4, 195.0),
    (24, 8, 2): (12.8, 12.8, 3.2, 12.8, 76.7, 118.3),
    (24, 16, 1): (7.5, 7.5, 3.7, 14.9, 153.4, 187.0),
    (48, 8, 1): (7.2, 7.2, 3.6, 14.4, 183.8, 216.2),
}


def config_of(pp: int = 24, ep: int = 8, cp: int = 1) -> RunConfig:
    return RunConfig(
        model=load_preset("moe_1t"),
        data=DataConfig(seq_len=4096),
        train=TrainConfig(micro_batch_size=1),
        parallel=ParallelConfig(pp=pp, ep=ep, cp=cp),
    )


def projected(config: RunConfig, ranks: int = 768) -> dict[str, float]:
    return published_memory_gb(config, Layout.of(config.parallel, ranks))


@pytest.mark.parametrize("sizes", CHART, ids=lambda sizes: "PP{} EP{} CP{}".format(*sizes))
def test_each_cell_of_the_chart_is_reproduced(sizes):
    pp, ep, cp = sizes
    found = projected(config_of(pp, ep, cp))
    assert [found[kind] for kind in KINDS] == list(CHART[sizes]) and found["buffers"] == 0


def test_activations_grow_with_the_micro_batch():
    one = config_of()
    two = replace(one, train=TrainConfig(micro_batch_size=2))
    assert projected(two)["activations"] == pytest.approx(2 * projected(one)["activations"], abs=0.1)


def test_what_the_chart_does_not_describe_is_refused_with_a_way_out():
    config = config_of()
    config.parallel.tp = 2
    config.recompute = RecomputeConfig(all=True)
    config.model.mtp_depth = 1
    with pytest.raises(ConfigError) as error:
        projected(config)
    for words in ("parallel.tp=2", "recompute", "model.mtp_depth=1", "use assumptions=exact"):
        assert words in str(error.value)
