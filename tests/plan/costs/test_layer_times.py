"""Times of segments and of a model's parts: FLOPs, bytes that are sent, what runs again, default layouts."""

import json
from collections import Counter
from dataclasses import fields, replace

import pytest

from graphmoe.config.schema import ContextMethod, Fp8Recipe, ModelConfig, RecomputeConfig, RunConfig
from graphmoe.model.sizes import flops_per_token
from graphmoe.pipeline_view.plans import load_preset
from graphmoe.plan.attention import is_linear
from graphmoe.plan.costs import layer_parts, segment_times
from graphmoe.plan.costs.hardware import H200
from graphmoe.plan.costs.layer_parts import attention_parts, experts, gate, swiglu, weight_forms
from graphmoe.plan.costs.rates import Rates, Speeds, default_rates
from graphmoe.plan.costs.segment_times import (
    SegmentTime,
    modelled_parts,
    second_forward,
    stage_costs,
    stage_times,
    sum_of,
)
from graphmoe.plan.costs.sizes import Sizes
from graphmoe.plan.layout import Layout
from graphmoe.plan.pipeline.balance import default_layout
from graphmoe.plan.pipeline.layouts import all_pieces, parse_layout, pieces_of
from graphmoe.plan.recompute import Recompute
from tests.runs import PRESETS, ROOT

NVIDIA = default_rates(is_nvidia=True)
NOTHING = ("load_spread", "power_cap", *(f.name for f in fields(NVIDIA) if f.name.endswith("_us")))
PEAK = replace(NVIDIA, **{f.name: 0.0 if f.name in NOTHING else 1.0 for f in fields(NVIDIA)})
ENDLESS = 1e30
WIRES = ("node_gb_per_s", "peer_gb_per_s", "network_gb_per_s")
FREE = replace(H200, hbm_tb_per_s=ENDLESS, **dict.fromkeys(WIRES, ENDLESS))  # products alone take time
AT_PEAK = Speeds(FREE, PEAK)
SEQ_LEN = 4096
NEXT = "qwen3_next_80b_a3b"
STATES = json.loads((ROOT / "docs/benchmarks/qwen3_next_h200/kernels.json").read_text())


def run_of(model: str, **parallel: object) -> RunConfig:
    run = RunConfig(model=load_preset(model))
    run.data.seq_len, run.train.micro_batch_size = SEQ_LEN, 1
    run.precision.compute = type(run.precision.compute)["bf16"]
    run.parallel = replace(run.parallel, **parallel)
    run.moe.dispatcher = "alltoall"
    return run


def sizes_of(run: RunConfig, ranks: int) -> Sizes:
    return Sizes.from_config(run, Layout.of(run.parallel, ranks), on_nvidia=True)


def times_of(run: RunConfig, speeds: Speeds) -> list[SegmentTime]:
    return stage_times(run, sizes_of(run, 8), speeds, all_pieces(run.model.num_layers, run.model.mtp_depth))


@pytest.mark.parametrize("parallel", [{}, {"tp": 2, "cp": 2, "ep": 4}, {"tp": 2, "cp": 2, "ep": 2, "etp": 2}])
@pytest.mark.parametrize("model", ["deepseek_v3", "qwen3_30b_a3b", "deepseek_v2_lite", "mixtral_8x7b", NEXT])
def test_at_the_peak_a_step_takes_the_models_flops_and_its_routers(model, parallel):
    run = run_of(model, cp_method=ContextMethod.ring, **parallel)
    config, layout = run.model, sizes_of(run, 8).layout
    seconds = sum_of("", times_of(run, AT_PEAK)).total
    tokens = SEQ_LEN // (layout.cp * layout.tp)
    num_moe_layers = config.num_layers - config.num_dense_layers + config.mtp_depth
    routers = 3 * 2 * num_moe_layers * config.hidden_size * config.num_experts
    # short convolutions take the time of their traffic
    taps = config.linear_conv_taps * sum(is_linear(config, i) for i in range(config.num_layers))
    keys, values = (
        getattr(config, f"linear_{key}_heads") * getattr(config, f"linear_{key}_head_dim")
        for key in ("key", "value")
    )
    flops = tokens * (flops_per_token(config, SEQ_LEN) + routers - 3 * 2 * taps * (2 * keys + values))
    assert seconds * FREE.tflops * 1e12 == pytest.approx(flops, rel=1e-9)


def test_a_dispatch_whose_rows_the_host_counts_waits_for_a_launch():
    run, speeds = run_of("deepseek_v3", ep=8), Speeds(FREE, replace(PEAK, host_us=100.0))
    counted = sum_of("", times_of(run, speeds)).forward
    run.moe.dispatcher = "symm"
    num_moe_layers, free = 58 + 1, sum_of("", times_of(run, speeds)).forward  # that of the later token too
    assert counted - free == pytest.approx(num_moe_layers * 100e-6, rel=1e-6)


def busy(run: RunConfig, rates: Rates = NVIDIA) -> dict[str, float]:
    found = Counter[str]()
    for time in times_of(run, Speeds(H200, rates, adding=1.0)):
        found[time.name] += time.total
    return found


def in_8_bits(run: RunConfig, **precision: object) -> RunConfig:
    fp8 = replace(run.precision, fp8=Fp8Recipe.rowwise, **precision)
    return replace(run, precision=fp8, moe=replace(run.moe, dispatcher="symm"))


def test_time_falls_where_products_in_8_bits_dominate():
    wide = run_of("deepseek_v3", ep=8)
    wide.moe.dispatcher = "symm"
    plain, eight = busy(wide), busy(in_8_bits(wide))
    less = {"attn", "mlp", "shared_experts", "moe_experts", "moe_dispatch", "moe_combine"}
    assert all(eight[name] < plain[name] if name in less else eight[name] == plain[name] for name in plain)
    assert eight["moe_experts"] < 0.8 * plain["moe_experts"]
    of_experts = busy(in_8_bits(wide, fp8_products=["experts"]))
    assert of_experts["attn"] == plain["attn"] and of_experts["moe_experts"] == eight["moe_experts"]
    skipping = busy(in_8_bits(wide, fp8_skip_layers=[0, 1, 2]))
    assert skipping["mlp"] == plain["mlp"] and eight["attn"] < skipping["attn"] < plain["attn"]
    slow = busy(in_8_bits(wide), replace(NVIDIA, fp8_quantise=0.01))
    assert slow["moe_experts"] > eight["moe_experts"] and slow["attn"] > plain["attn"]


def test_at_the_peak_products_in_8_bits_take_half_the_time_and_weights_are_rounded_once_a_step():
    run = run_of("deepseek_v2_lite")
    sizes = [sizes_of(each, 1) for each in (run, in_8_bits(run))]
    plain, eight = (
        [*experts(each, AT_PEAK), *(s for p in swiglu(each, AT_PEAK, "mlp") for s in p)] for each in sizes
    )
    assert eight == pytest.approx([seconds / 2 for seconds in plain])
    model, card = run.model, Speeds(H200, PEAK)
    weights = 3 * model.num_experts * model.expert_ffn_size * model.hidden_size
    moved = 2 * 3 * weights / (H200.hbm_tb_per_s * 1e12)  # both forms, each of 2 bytes read and 1 written
    assert weight_forms(sizes[1], card, "moe_experts") == pytest.approx(moved)
    assert weight_forms(sizes[1], replace(card, adding=0.75), "moe_experts") == pytest.approx(moved / 4)
    assert weight_forms(sizes[0], card, "moe_experts") == 0


def test_ranks_gather_latents_instead_of_hidden_states():
    run = run_of("deepseek_v3", tp=4)
    sizes, speeds = sizes_of(run, 8), Speeds(H200, PEAK)
    width = 1536 + 512 + 64
    parts = attention_parts(sizes, speeds)
    assert parts.gather == pytest.approx(2 * SEQ_LEN * width * 3 / 4 / 450e9)
    assert parts.scatter == pytest.approx(2 * SEQ_LEN * 7168 * 3 / 4 / 450e9)
    run = run_of("deepseek_v3", cp=4, cp_method=ContextMethod.alltoall)
    parts = attention_parts(sizes_of(run, 8), speeds)
    assert parts.gather == pytest.approx(2 * SEQ_LEN * (512 + 64) * 3 / 4 / 450e9) and parts.scatter == 0
    exchanged = 2 * SEQ_LEN / 4 * 128 * (192 + 128)
    assert parts.heads == pytest.approx(exchanged * 3 / 4 / 450e9)


@pytest.mark.parametrize("model", ["deepseek_v2_lite", "qwen3_30b_a3b"])
def test_a_ring_waits_for_what_its_products_do_not_cover_and_for_the_last_gradients(model):
    run = run_of(model, cp=4, cp_method=ContextMethod.ring)
    sizes, config = sizes_of(run, 4), run.model
    is_latent = config.attention == "mla"
    groups, size = (16, 192 + 128) if is_latent else (4, 128 + 128)
    passing = 2 * SEQ_LEN / 4 * groups * size
    fast = Speeds(replace(H200, peer_gb_per_s=ENDLESS), PEAK)
    assert attention_parts(sizes, fast).ring == pytest.approx((0, 0), abs=1e-12)
    slow = attention_parts(sizes, Speeds(replace(H200, peer_gb_per_s=1), PEAK))
    scores = SEQ_LEN / 4 * layer_parts.attention_scores(config, SEQ_LEN) / (H200.tflops * 1e12)
    forward = 3 * (passing / 1e9 - scores / 4)
    # fp32 gradients are twice as large
    backward = 3 * (3 * passing / 1e9 - 2 * scores / 4) + 2 * passing / 1e9
    assert slow.ring == pytest.approx((forward, backward))


def again(run: RunConfig, index: int = 1, **recompute: object) -> tuple[dict[str, float], Sizes, Speeds]:
    sizes, speeds = sizes_of(run, 8), Speeds(replace(H200, hbm_tb_per_s=ENDLESS), PEAK)
    found = second_forward(sizes, speeds, Recompute.of(RecomputeConfig(**recompute)), index)
    return {name: seconds for name, seconds in found.items() if seconds > 1e-12}, sizes, speeds


def test_the_last_product_of_a_piece_runs_again_only_for_a_reader():
    run = run_of("deepseek_v2_lite", tp=2)
    found, sizes, speeds = again(run, segments=["attn"])
    parts = attention_parts(sizes, speeds)
    once = parts.before.forward + parts.scores.forward + parts.gather
    assert found == pytest.approx({"attn": once})
    read = {"attn": once + parts.after.forward + parts.scatter, "moe_router": gate(sizes, speeds).forward}
    assert again(run, segments=["attn", "moe_router"])[0] == pytest.approx(read)


def test_experts_and_mlps_run_gate_and_up_again_and_never_down():
    run = run_of("deepseek_v2_lite")
    found, sizes, speeds = again(run, all=True)
    shared, _ = swiglu(sizes, speeds, "shared_experts")
    assert found["moe_experts"] == pytest.approx(experts(sizes, speeds).forward * 2 / 3)
    assert found["shared_experts"] == pytest.approx(shared.forward)
    assert {*found} == {"attn", "moe_router", "shared_experts", "moe_experts"}
    assert {*again(run, index=0, all=True)[0]} == {"attn", "mlp"}


def test_parts_run_again_where_they_are_and_beside_whole_segments():
    run = run_of("deepseek_v2_lite")
    found, sizes, speeds = again(run, ops=["core_attn"])
    parts = attention_parts(sizes, speeds)
    assert found == pytest.approx({"attn": parts.scores.forward})
    found, _, _ = again(run, ops=["mla_up_proj"])
    assert found == pytest.approx({"attn": parts.up.forward}) and parts.up.forward < parts.before.forward
    assert again(run, ops=["layernorm"])[0] == {}  # moves data alone
    moved = second_forward(sizes, Speeds(H200, PEAK), Recompute(parts=frozenset({"layernorm"})), 1)
    assert moved["attn"] > 0 and moved["moe_experts"] == 0
    assert {*again(run, segments=["moe_experts"], ops=["core_attn"])[0]} == {"attn", "moe_experts"}
    assert again(run, layer_ids=[2], ops=["core_attn"])[0] == {} and segment_times.MOVED > 1


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


@pytest.mark.parametrize("row", STATES["rows"], ids=lambda row: f"{row['sequences']} x {row['tokens']}")
def test_states_take_the_time_that_their_kernels_were_measured_at(row):
    run, kernels = run_of(NEXT), row["kernels_ms"]
    assert sum(kernels.values()) == pytest.approx(row["total_ms"])
    for key in ("key_heads", "value_heads"):
        setattr(run.model, f"linear_{key}", row[key])
    run.model.linear_key_head_dim, run.model.linear_value_head_dim = row["key_size"], row["value_size"]
    run.data.seq_len, run.train.micro_batch_size = row["tokens"], row["sequences"]
    scores = attention_parts(sizes_of(run, 1).of_layer(0), Speeds(H200, NVIDIA)).scores
    forward = (kernels["states_kernel"] + kernels["chunks_kernel"]) / 2  # each runs once each way
    assert scores.forward * 1e3 == pytest.approx(forward, rel=0.005)
    assert scores.inputs * 1e3 == pytest.approx(row["total_ms"] - forward, rel=0.005) and not scores.weights


def test_fewer_states_than_programs_of_the_gpu_take_as_long_for_their_recurrence():
    sizes, speeds = sizes_of(run_of(NEXT), 8), Speeds(H200, NVIDIA)
    of_ranks = (replace(sizes, layout=Layout(tp=tp)).of_layer(0) for tp in (1, 2))
    whole, part = (attention_parts(each, speeds).scores for each in of_ranks)
    row = STATES["rows"][2]  # of 32 states too
    kernels, share = row["kernels_ms"], SEQ_LEN / row["tokens"]
    waits = share * (kernels["states_kernel"] + kernels["d_states_kernel"])
    rest = share * row["total_ms"] - waits
    for found, wanted in ((whole, waits + rest), (part, waits + rest / 2)):
        assert sum(found) * 1e3 == pytest.approx(wanted, rel=0.01)


def test_the_head_of_every_depth_is_with_the_loss():
    model = load_preset("deepseek_v3")
    *_, layer, mtp, loss = modelled_parts(model, 4096)
    assert loss.total == pytest.approx(2 * modelled_parts(replace(model, mtp_depth=0), 4096)[-1].total)
    assert layer.total < mtp.total < 1.2 * layer.total


def test_layers_differ_by_kind_and_by_the_length_of_sequences():
    model = ModelConfig(num_layers=4, num_dense_layers=2)
    _, dense, other, moe, last, _ = modelled_parts(model, 64)
    assert dense == other and moe == last and dense.total < moe.total
    assert modelled_parts(model, 4096)[1].total > 2 * dense.total
