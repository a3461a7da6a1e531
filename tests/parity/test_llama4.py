"""Folders of Llama 4: shards of reordered rows, and keys of config.json."""

from dataclasses import replace

import pytest
import torch

from graphmoe import load_hf
from graphmoe.checkpoint.flat_shards import FlatShard
from graphmoe.checkpoint.hf.families import to_model_config
from graphmoe.checkpoint.hf.folder import open_hf
from graphmoe.config.schema import ConfigError, RopeScaling
from graphmoe.model.sizes import count_parameters
from graphmoe.pipeline_view.plans import load_preset
from graphmoe.plan.layout import REPLICATED, Cut, Layout, ParameterLayout, own_part
from tests.parity.hf_models import CASES, random_model, tensors_in
from tests.parity.test_hf_configs import PUBLISHED

SCOUT = PUBLISHED["llama4_scout"]


def read(raw):
    return to_model_config(raw, "config.json", "test")[1]


@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(dp=3)], ids=["tp", "dp"])
@pytest.mark.parametrize("name", ["layers.1.attn.q_proj.weight", "layers.1.moe_experts.w_gate_up"])
def test_shards_of_ranks_are_read_from_reordered_rows(tmp_path, layout, name):
    random_model(CASES["llama4_scout"]).save_pretrained(tmp_path)
    source, whole = open_hf(tmp_path), load_hf(tmp_path)[1].get_parameter(name)
    is_cut = layout.tp > 1 and "attn" in name
    parallel = ParameterLayout((Cut(0, "tp"),), "dp_cp") if is_cut else REPLICATED
    for rank in range(layout.size("world")):
        own = own_part(whole.detach(), parallel, layout, rank)
        start = own.numel() // layout.dp * layout.index("dp", rank) + 7  # inside of a row and of a head
        wanted = own.flatten()[start : start + 511]
        shard = FlatShard(torch.empty_like(wanted), start, own.shape, parallel, layout, rank)
        source.fill({name: shard})
        assert torch.equal(shard.data, wanted) and wanted.numel() == 511


def test_reordered_rows_rotate_as_neighbours_do(tmp_path):
    """The file's rows 0 and 1 of a head are a pair; ours are row 0 and that of half the head."""
    random_model(CASES["llama4_scout"]).save_pretrained(tmp_path)
    theirs = tensors_in(tmp_path)["model.layers.0.self_attn.k_proj.weight"].unflatten(0, (2, 10))
    ours = load_hf(tmp_path)[1].get_parameter("layers.0.attn.k_proj.weight").unflatten(0, (2, 10))
    assert torch.equal(ours[:, 0], theirs[:, 0]) and torch.equal(ours[:, 5], theirs[:, 1])
    assert torch.equal(ours[:, [1, 2, 6]], theirs[:, [2, 4, 3]])


@pytest.mark.parametrize("name", ["llama4_scout", "llama4_maverick"])
def test_billions_of_parameters_are_the_published_ones(name):
    counts = count_parameters(load_preset(name))
    found = counts["total"]["full"] / 1e9, counts["active"]["full"] / 1e9
    assert found == pytest.approx((109 if name == "llama4_scout" else 400, 17), rel=0.015)


def test_keys_of_older_files_and_instruct_models_are_read():
    config = read(SCOUT)
    listed = {"no_rope_layers": [1, 1, 1, 0] * 12, "moe_layers": [*range(48)], "attn_temperature_tuning": 4}
    assert read(SCOUT | listed) == config
    assert read(SCOUT | {"no_rope_layers": None, "no_rope_layer_interval": 4}) == config
    instruct = {"factor": 16.0, "high_freq_factor": 1.0, "low_freq_factor": 0.5}
    found = read(SCOUT | {"rope_scaling": SCOUT["rope_scaling"] | instruct})
    assert (found.rope_scaling, found.llama3_factor) == (RopeScaling.llama3, 16.0)
    assert read(SCOUT | {"attn_temperature_tuning": False}).attention_temperature_floor == 0
    assert read(SCOUT | {"max_position_embeddings": 8192}).attention_chunk == 0
    assert read(SCOUT | {"no_rope_layers": [1] * 48}) == replace(
        config, nope_every=0, attention_temperature_floor=0
    )


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"num_experts_per_tok": 2}, "num_experts_per_tok=2; supported is 1"),
        ({"moe_layers": [0, 3]}, "moe_layers=[0, 3]; supported is null or [0, 1, 2"),
        ({"no_rope_layers": [1, 0, 0] * 16}, "no_rope_layers[2]=0; supported is 1 there"),
        ({"no_rope_layers": [1, 0]}, "no_rope_layers has 2 entries; supported is 48 entries 1"),
        (
            {"layer_types": ["full_attention"] * 48},
            'layer_types[0]="full_attention"; supported is "chunked_attention" there',
        ),
        ({"attn_temperature_tuning": 8}, "attn_temperature_tuning=8; supported is true or false or 4"),
        ({"attention_bias": True}, "attention_bias=true; supported is false"),
        ({"router_jitter_noise": 0.1}, "router_jitter_noise=0.1; supported is 0.0"),
        ({"interleave_moe_layer_step": 0}, "interleave_moe_layer_step=0 must be"),
        ({"interleave_moe_layer_step": 50}, "interleave_moe_layer_step=50 leaves no layer with experts"),
        ({"no_rope_layers": 3}, "no_rope_layers=3; supported is"),
    ],
)
def test_what_has_no_counterpart_is_named_in_one_line(change, named):
    with pytest.raises(ConfigError) as caught:
        read(SCOUT | change)
    assert named in str(caught.value) and len(str(caught.value).splitlines()) == 1
