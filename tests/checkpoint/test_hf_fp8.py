"""Folders of Hugging Face whose matrices are fp8 with a scale for each block: read, refused, written."""

import json
from dataclasses import replace
from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import pad

from graphmoe import load_hf, save_hf
from graphmoe.checkpoint.flat_shards import FlatShard
from graphmoe.checkpoint.hf.families import to_hf_config
from graphmoe.checkpoint.hf.folder import entries_of, open_hf, shapes_of
from graphmoe.checkpoint.hf.pieces import pieces
from graphmoe.checkpoint.hf.tensor_files import dequantised, in_fp8, quantised, scales_of
from graphmoe.config.schema import ConfigError, ModelConfig
from graphmoe.convert import main
from graphmoe.model.build import build_model
from graphmoe.plan.layout import ALONE, Layout, ParameterLayout
from graphmoe.run.weights import check_weights, load_weights
from tests.command.test_convert import CONFIG as SMALL
from tests.command.test_convert import assert_same_weights, call, random_model
from tests.runs import refusal

CONFIG = replace(  # widths that are no multiples of a block's, and some that are
    SMALL, vocab_size=54, hidden_size=202, num_layers=2, dense_ffn_size=300, num_heads=2, kv_lora_rank=128,
    qk_nope_head_dim=66, v_head_dim=130, num_experts=4, expert_ffn_size=140, shared_ffn_size=140,
)  # fmt: skip
AS_PUBLISHED = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8"}
AS_PUBLISHED |= {"weight_block_size": [128, 128]}
PLAIN = ("embed_tokens.weight", "head.weight", "gate.weight", "eh_proj.weight")
"""Ends of the names of matrices that DeepSeek-V3 is published with in bf16."""
DOWN, UP = (f"model.layers.{layer}.weight" for layer in ("0.mlp.down_proj", "1.mlp.experts.2.up_proj"))


def values_of(weight, scale):
    blocks = torch.kron(scale, torch.ones(128, 128))
    return weight.float() * blocks[: weight.shape[0], : weight.shape[1]]


def largest_of(weight):
    rows, columns = (-size % 128 for size in weight.shape)
    blocks = pad(weight.float().abs(), (0, columns, 0, rows)).unflatten(1, (-1, 128)).unflatten(0, (-1, 128))
    return blocks.amax((1, 3))


def is_matrix(name, tensor):
    return tensor.dim() == 2 and not name.endswith(PLAIN)


def tensors_in(folder):
    return {name: each for path in folder.glob("*.safetensors") for name, each in load_file(path).items()}


def change(folder, tensors=None, **config):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    if tensors is not None:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def assert_same(found, expected):
    assert all(tensor.dtype == expected[name].dtype for name, tensor in found.items())
    assert_same_weights(found, expected)


@pytest.fixture
def published(tmp_path):
    """A folder with fp8 matrices, made without our code, and one with their values in fp32."""
    model = random_model(CONFIG).bfloat16()
    for name in ("fp8", "fp32"):
        save_hf(model, CONFIG, tmp_path / name)
    fp8, fp32 = {}, tensors_in(tmp_path / "fp32")
    for name, weight in sorted(fp32.items()):
        fp8[name] = weight
        if is_matrix(name, weight):
            scale = largest_of(weight) / 400
            scaled = weight.float() / values_of(torch.ones(weight.shape), scale)
            fp8 |= {name: scaled.to(torch.float8_e4m3fn), f"{name}_scale_inv": scale}
            fp32[name] = values_of(fp8[name], scale)
    change(tmp_path / "fp8", fp8, quantization_config=AS_PUBLISHED)
    change(tmp_path / "fp32", {name: tensor.float() for name, tensor in fp32.items()})
    return tmp_path / "fp8", tmp_path / "fp32", fp8


@pytest.mark.parametrize("dtype", ["keep", "fp32"])
def test_the_converter_and_a_run_read_the_same_values(published, tmp_path, capsys, dtype):
    fp8, fp32, _ = published
    report = call(capsys, f"from={fp8}", f"to={tmp_path / 'own'}", f"dtype={dtype}")
    assert report["dtypes"] == (["bfloat16", "float32"] if dtype == "keep" else ["float32"])
    own, started, expected = (build_model(CONFIG, seed=seed) for seed in (1, 2, 3))
    load_weights(expected, fp32)
    load_weights(started, fp8)
    assert_same(started.state_dict(), expected.state_dict())
    load_weights(own, tmp_path / "own")
    if dtype == "keep":
        biases = {name: each for name, each in expected.state_dict().items() if "selection_bias" in name}
        expected.bfloat16().float().load_state_dict(biases, strict=False)
    assert_same(own.state_dict(), expected.state_dict())


@pytest.mark.parametrize("layout", [Layout(tp=2, ep=2), Layout(dp=2, tp=2, ep=2, etp=2)], ids=str)
def test_each_rank_takes_its_part_of_the_blocks(published, layout):
    for rank in range(layout.size("world")):
        found, expected = (build_model(CONFIG, seed=7, layout=layout, rank=rank) for _ in range(2))
        load_weights(found, published[0], None, layout, rank)
        load_weights(expected, published[1], None, layout, rank)
        assert_same(found.state_dict(), expected.state_dict())


def test_a_range_that_begins_and_ends_within_blocks_is_filled(published):
    name = "layers.0.mlp.down.weight"  # [202, 300]
    whole = load_hf(published[1])[1].state_dict()[name]
    source = open_hf(published[0])
    source.check()
    for start, stop in ((0, 1), (100, 30_001), (41_234, 60_600)):
        shard = FlatShard(torch.empty(stop - start), start, whole.shape, ParameterLayout(), ALONE, 0)
        source.fill({name: shard})
        assert torch.equal(shard.data, whole.flatten()[start:stop])


def lines_of(refused, folder) -> list[str]:
    """Lines of the error below its head."""
    with pytest.raises(ConfigError) as caught:
        refused(folder)
    return [each.strip() for each in str(caught.value).splitlines()[1:]]


SCALE, HOLE = f"{DOWN}_scale_inv", torch.tensor([[1.0, 1.0, 1.0], [1.0, 1.0, 0.0]])
E4M3 = partial(torch.Tensor.to, dtype=torch.float8_e4m3fn)
FINITE = "it must be finite and not negative"
IN_FILE = f"{DOWN}_scale_inv in model.safetensors"
NO_FLOAT = "not F64/F32/F16/BF16"


@pytest.mark.parametrize(
    ("name", "damage", "line"),
    [
        (SCALE, None, f"no scale: {DOWN} in model.safetensors is fp8, and needs {SCALE}, F32 [2, 3]"),
        (SCALE, lambda scale: scale[:1], f"mis-shaped: {IN_FILE} is F32 [1, 3], not F32 [2, 3]"),
        (SCALE, torch.Tensor.bfloat16, f"mis-shaped: {IN_FILE} is BF16 [2, 3], not F32 [2, 3]"),
        (SCALE, lambda scale: scale / HOLE, f"wrong scale: {IN_FILE} has inf at [1, 2]; {FINITE}"),
        (SCALE, lambda scale: HOLE - 1.5, f"wrong scale: {IN_FILE} has -0.5 at [0, 0]; {FINITE}"),
        ("lm_head.weight", E4M3, f"wrong dtype: lm_head.weight is F8_E4M3, {NO_FLOAT}"),
        ("model.norm.weight", E4M3, f"wrong dtype: model.norm.weight is F8_E4M3, {NO_FLOAT}"),
        (UP, lambda weight: weight.to(torch.float8_e5m2), f"wrong dtype: {UP} is F8_E5M2, {NO_FLOAT}"),
        (UP, torch.Tensor.bfloat16, f"extra: {UP}_scale_inv [2, 2]"),
    ],
)
def test_a_scale_that_is_missing_or_wrong_is_one_line_before_a_run_starts(published, name, damage, line):
    folder, _, tensors = published
    found = tensors.pop(name)
    change(folder, tensors if damage is None else {**tensors, name: damage(found)})
    for refused in (load_hf, partial(check_weights, config=CONFIG)):
        assert lines_of(refused, folder) == [line]


def test_another_quantization_is_one_line_with_its_key(published):
    for key, value, valid in [
        ("quant_method", "gptq", '"fp8"'),
        ("quant_method", None, '"fp8"'),
        ("fmt", "e5m2", '"e4m3"'),
        ("activation_scheme", "static", '"dynamic"'),
        ("weight_block_size", [64, 128], "[128, 128]"),
        ("weight_block_size", None, "[128, 128]"),
        ("scale_fmt", "e8m0", '"float" or "ue8m0"'),
    ]:
        change(published[0], quantization_config=AS_PUBLISHED | {key: value})
        line = f"quantization_config.{key}={json.dumps(value)}; supported is {valid}"
        with pytest.raises(ConfigError) as caught:
            load_hf(published[0])
        assert str(caught.value) == f"{published[0] / 'config.json'}: {line}"


def test_what_transformers_writes_without_is_read_and_a_folder_that_does_not_say_fp8_is_not(published):
    folder, fp32, tensors = published
    change(folder, quantization_config={"quant_method": "fp8", "scale_fmt": "ue8m0", "dequantize": False})
    assert_same(load_hf(folder, dtype=torch.float32)[1].state_dict(), load_hf(fp32)[1].state_dict())
    config, model = load_hf(folder)
    assert (
        config == replace(CONFIG, name="fp8", hf_family="deepseek_v3")
        and next(model.parameters()).dtype == torch.bfloat16
    )
    assert_same(model.state_dict(), load_hf(fp32, dtype=torch.bfloat16)[1].state_dict())
    change(fp32, quantization_config=AS_PUBLISHED)  # cast to another dtype, and the key left in
    assert next(load_hf(fp32)[1].parameters()).dtype == torch.float32
    change(folder, quantization_config=None)
    quantised_names = [name for name in tensors if name.endswith("_scale_inv")]
    expected = f"{2 * len(quantised_names)} are fp8 weights or their scales.*quantization_config="
    with pytest.raises(ConfigError, match=expected):
        load_hf(folder)
    change(folder, quantization_config="fp8")
    with pytest.raises(ConfigError, match='quantization_config="fp8"; supported is {"activation_scheme"'):
        load_hf(folder)


@pytest.fixture
def own(tmp_path, capsys):
    """A folder of our own format in fp32, one block of it zeros and one tiny."""
    model = random_model(CONFIG)
    with torch.no_grad():
        model.layers[0].mlp.down.weight[:128, 128:256] = 0
        model.layers[0].mlp.down.weight[128:, 128:256] *= 1e-41
    save_hf(model, CONFIG, tmp_path / "hf")
    call(capsys, f"from={tmp_path / 'hf'}", f"to={tmp_path / 'own'}")
    return tmp_path / "own", tensors_in(tmp_path / "hf")


def test_matrices_are_written_in_fp8_and_all_else_is_kept(own, tmp_path, capsys):
    folder, before = own
    words = ("dtype=bf16", "quantise=fp8_block", "max_shard_size=50KB")
    report = call(capsys, f"from={folder}", f"to={tmp_path / 'out'}", *words)
    assert report["dtypes"] == ["bfloat16", "float32", "float8_e4m3fn"]
    config, after = json.loads((tmp_path / "out" / "config.json").read_text()), tensors_in(tmp_path / "out")
    assert (config["quantization_config"], config["torch_dtype"]) == (AS_PUBLISHED, "bfloat16")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in after.values())
    matrices = {name for name, tensor in before.items() if is_matrix(name, tensor)}
    assert after.keys() == before.keys() | {f"{name}_scale_inv" for name in matrices}
    for name in before.keys() - matrices:
        dtype = torch.float32 if name.endswith("e_score_correction_bias") else torch.bfloat16
        assert torch.equal(after[name], before[name].to(dtype)) and after[name].dtype == dtype, name
    for name in matrices:
        scale, largest = after[f"{name}_scale_inv"], largest_of(before[name])  # of fp32 weights, not of bf16
        assert torch.allclose(scale, torch.where(largest > 1e-30, largest / 448, scale), rtol=1e-7)
        error = (values_of(after[name], scale) - before[name]).abs()
        most = values_of(torch.ones_like(error), scale) * 16  # half of 448's last digit
        assert (error <= most).all(), name
    assert after[f"{DOWN}_scale_inv"][0, 1] == 1 and not after[DOWN][:, 128:256].float().any()


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_the_matrices_of_other_families_are_those_but_router_embedding_and_head(family):
    own = {"qk_norm": family == "qwen3_moe", "softmax_after_topk": family == "mixtral"}
    config = ModelConfig(attention="gqa", num_dense_layers=0, shared_ffn_size=0, **own)
    found, _ = to_hf_config(config)
    shapes, names = shapes_of(config), pieces(found, config)
    dtypes = dict.fromkeys(shapes, torch.bfloat16)
    entries = [*in_fp8(entries_of(names, shapes, dtypes, lambda name, index: torch.empty(0)))]
    fp8 = {entry.name for entry in entries if entry.dtype == torch.float8_e4m3fn}
    matrices = {entry.name for entry in entries if len(entry.shape) == 2}
    assert found.name == family
    assert fp8 == {name for name in matrices if not name.endswith((*PLAIN, "_scale_inv"))}


def test_fp8_read_in_fp32_and_written_again_has_the_same_bytes(own, tmp_path, capsys):
    call(capsys, f"from={own[0]}", f"to={tmp_path / 'a'}", "quantise=fp8_block", "dtype=bf16")
    call(capsys, f"from={tmp_path / 'a'}", f"to={tmp_path / 'b'}", "dtype=fp32")
    call(capsys, f"from={tmp_path / 'b'}", f"to={tmp_path / 'c'}", "quantise=fp8_block", "dtype=bf16")
    for file in ("config.json", "model.safetensors"):
        assert (tmp_path / "c" / file).read_bytes() == (tmp_path / "a" / file).read_bytes()


def test_scales_and_numbers_come_back_at_every_magnitude():
    generator = torch.Generator().manual_seed(3)
    for exponent in range(-46, 36, 2):
        weight = torch.randn(150, 260, generator=generator) * 10.0**exponent
        weight = weight.clamp(-3e38, 3e38)
        scale, numbers = scales_of(weight), quantised(weight)
        found = dequantised(numbers, scale, range(150), range(260))
        assert torch.equal(found, values_of(numbers, scale))
        assert torch.equal(scales_of(found), scale)
        assert torch.equal(quantised(found).view(torch.uint8), numbers.view(torch.uint8))


def test_what_cannot_be_written_in_fp8_is_refused(own, tmp_path, capsys):
    path, words = own[0] / "weights.safetensors", (f"to={tmp_path / 'out'}", "quantise=fp8_block")
    tensors = load_file(path)
    tensors["layers.1.moe_experts.w_down"][3, 5, 7] = float("inf")
    save_file(tensors, path)
    said = refusal(main, capsys, f"from={own[0]}", *words)
    assert "experts.3.down_proj.weight" in said and "not finite" in said
    said = refusal(main, capsys, f"from={tmp_path / 'hf'}", *words)
    assert "quantise=fp8_block is for Hugging Face folders only" in said
    assert "graphmoe weights and these" in said and not (tmp_path / "out").exists()


def test_transformers_reads_what_is_written_with_the_same_logits(tmp_path, capsys, monkeypatch):
    transformers = pytest.importorskip("transformers")
    # It wants accelerate for any fp8 folder, and needs it for none that it dequantises on a CPU.
    quantizer = "transformers.quantizers.quantizer_finegrained_fp8"
    monkeypatch.setattr(f"{quantizer}.is_accelerate_available", lambda: True)
    config = replace(  # it dequantises whole blocks only
        CONFIG, hidden_size=256, dense_ffn_size=384, q_lora_rank=128, kv_lora_rank=64, mtp_depth=0,
        qk_nope_head_dim=64, qk_rope_head_dim=64, v_head_dim=64, expert_ffn_size=128, shared_ffn_size=128,
    )  # fmt: skip
    save_hf(random_model(config), config, tmp_path / "hf")
    call(capsys, f"from={tmp_path / 'hf'}", f"to={tmp_path / 'own'}")
    call(capsys, f"from={tmp_path / 'own'}", f"to={tmp_path / 'fp8'}", "quantise=fp8_block", "dtype=bf16")
    wanted = {"attn_implementation": "eager", "experts_implementation": "eager", "dtype": torch.float32}
    wanted |= {"quantization_config": transformers.FineGrainedFP8Config(dequantize=True)}
    theirs, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "fp8", output_loading_info=True, **wanted
    )
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    ours = load_hf(tmp_path / "fp8", dtype=torch.float32)[1]
    assert torch.equal(theirs.model.layers[0].mlp.down_proj.weight.float(), ours.layers[0].mlp.down.weight)
    tokens = torch.randint(config.vocab_size, (2, 13), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = theirs.float()(tokens).logits
        assert (ours(tokens) - expected).norm() < 1e-5 * expected.norm()
