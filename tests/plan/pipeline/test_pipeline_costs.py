"""Costs of a pipeline's stages, from measured times of parts, segments or units."""

from dataclasses import replace

import pytest
import torch

from graphmoe.config.schema import ConfigError, ModelConfig, MoEConfig
from graphmoe.model.layer import DenseLayer, MoELayer
from graphmoe.plan.costs.activations import DENSE_SEGMENTS, MOE_SEGMENTS
from graphmoe.plan.pipeline.balance import balanced_layout, measured_parts


def test_the_segments_of_layers_are_those_that_layers_have():
    config = ModelConfig()
    with torch.device("meta"):
        dense, moe = DenseLayer(config).segments(), MoELayer(config, MoEConfig()).segments()
    assert (tuple(s.name for s in dense), tuple(s.name for s in moe)) == (DENSE_SEGMENTS, MOE_SEGMENTS)


MODEL = ModelConfig(num_layers=3, num_dense_layers=1, mtp_depth=1)


@pytest.mark.parametrize(
    "measured",
    [
        {"dense": 2.0, "moe": 5.0, "loss": 3.0},
        {"attn..mlp": 2.0, "attn..moe_combine": 5.0, "loss": 3.0},
        {
            "attn": 1.5,
            "mlp": 0.5,
            "moe_router..moe_preprocess": 1.0,
            "moe_dispatch..moe_combine": 2.5,
            "loss": 3,
        },
        {"dense": 2.0, "moe": 5.0, "loss": 3.0, "embed": 0.0, "mtp": 8.0},
    ],
)
def test_times_may_be_of_parts_segments_or_units(measured):
    mtp = measured.get("mtp", 5.0)
    expected = [("E", 0.0), ("t", 2.0), ("t", 5.0), ("t", 5.0), ("m", mtp), ("L", 3.0)]
    assert measured_parts(MODEL, measured) == expected
    assert balanced_layout(expected, range(2)) == "Ettt|mL"


@pytest.mark.parametrize(
    ("changes", "entry"),
    [
        ({"num_dense_layers": 0}, "dense"),
        ({"mtp_depth": 0}, "mtp"),
        ({"shared_ffn_size": 0}, "shared_experts"),
        ({}, "attn"),
    ],
)
def test_times_that_nothing_reads_are_named(changes, entry):
    model = replace(MODEL, **changes)
    times = {"moe": 5.0, "loss": 3.0, entry: 1.0}
    if model.num_dense_layers:
        times |= {"dense": 2.0}
    with pytest.raises(ConfigError, match=f"{entry}: the model has no such part, or its time is given"):
        measured_parts(model, times)


@pytest.mark.parametrize(
    "measured, message",
    [
        (
            {"atn": 1.0},
            "'atn' is no part whose time balances a pipeline; use embed, dense, moe, mtp, loss, a seg",
        ),
        ({"attn..mpl": 1.0}, "'attn..mpl' is no part"),
        ({"moe..loss": 1.0}, "'moe..loss' is no part.*, or a unit of neighbouring segments such as"),
        ({"moe_combine..attn": 1.0}, "'moe_combine..attn' is no part"),
        ({"attn..moe_router..moe_combine": 1.0}, "'attn..moe_router..moe_combine' is no part"),
        ({"dense": -1.0}, "the time of 'dense' is -1.0 ms; it must be 0 or greater"),
        (
            {"dense": 1.0, "attn": 1.0, "loss": 1.0},
            "no time for moe_router, moe_preprocess, .*whole part, moe",
        ),
        (
            {"attn..mlp": 1.0, "mlp": 1.0, "moe": 1.0},
            "'attn..mlp' and 'mlp' both have the time of mlp; leave",
        ),
        ({"dense": 1.0, "moe": 1.0}, "no time for loss"),
    ],
)
def test_wrong_or_missing_times_are_named(measured, message):
    with pytest.raises(ConfigError, match=message):
        measured_parts(MODEL, measured)
