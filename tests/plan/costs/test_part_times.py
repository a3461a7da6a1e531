"""Times of a model's parts as a pipeline assumes them, and the layouts that follow."""

from dataclasses import replace
from pathlib import Path

import pytest

from graphmoe.config.schema import ModelConfig
from graphmoe.pipeline_view.plans import load_preset
from graphmoe.plan.costs.segment_times import modelled_parts, stage_costs
from graphmoe.plan.pipeline.balance import default_layout
from graphmoe.plan.pipeline.layouts import parse_layout, pieces_of

PRESETS = sorted(path.stem for path in (Path(__file__).parents[2] / "conf" / "model").glob("*.yaml"))


@pytest.mark.parametrize("name", PRESETS)
def test_the_default_layout_fits_its_model(name):
    model = load_preset(name)
    parts = modelled_parts(model, 4096)
    letters = "".join(part.name for part in parts)
    assert letters == "E" + "t" * model.num_layers + "m" * model.mtp_depth + "L"
    for num_stages in (1, 2, 4, 5):
        layout = default_layout(model, 4096, range(num_stages))
        pieces_of(layout, model.num_layers, model.mtp_depth, num_stages)
        costs = [stage.total for stage in stage_costs(parse_layout(layout), parts)]
        assert min(costs) > 0 and sum(costs) == pytest.approx(sum(part.total for part in parts))
        assert max(costs) <= sum(costs) / num_stages + max(part.total for part in parts)


def test_the_head_of_every_depth_is_with_the_loss():
    model = load_preset("deepseek_v3")
    alone = replace(model, mtp_depth=0)
    *_, layer, mtp, loss = modelled_parts(model, 4096)
    assert loss.total == pytest.approx(2 * modelled_parts(alone, 4096)[-1].total)
    assert layer.total < mtp.total < 1.2 * layer.total


def test_layers_differ_by_kind_and_by_the_length_of_sequences():
    model = ModelConfig(num_layers=4, num_dense_layers=2)
    _, dense, other, moe, last, _ = modelled_parts(model, 64)
    assert dense == other and moe == last and dense.total < moe.total
    assert modelled_parts(model, 4096)[1].total > 2 * dense.total
