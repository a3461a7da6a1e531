"""gpt-oss folders whose experts are stored in MXFP4: values, parts that ranks read, and damage."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from graphmoe import load_hf, save_hf
from graphmoe.checkpoint.flat_shards import FlatShard
from graphmoe.checkpoint.hf import mxfp4
from graphmoe.config.schema import ConfigError
from graphmoe.convert import ConvertArgs, Quantise, convert
from graphmoe.model.build import build_model
from graphmoe.model.moe_segments import Experts
from graphmoe.plan.layout import Layout
from graphmoe.run.weights import load_weights
from tests.parity.hf_models import assert_same_bits, gpt_oss, random_model, reload, tensors_in

E, WIDTH, INNER = 6, 64, 32
CASE = gpt_oss((WIDTH, 2), (4, 2, 8), (E, 2, INNER))
QUANTIZED = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}


def random_blocks(rows: int, columns: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """All bytes occur in the blocks; scales are those of weights, or the least and largest."""
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(256, (E, rows, columns // 32, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(118, 126, (E, rows, columns // 32), generator=generator, dtype=torch.uint8)
    return blocks, scales


@pytest.fixture
def folders(tmp_path):
    """A folder in MXFP4, and one with the same weights, by transformers, in bf16."""
    for name in ("packed", "plain"):
        random_model(CASE).bfloat16().save_pretrained(tmp_path / name)
    tensors = tensors_in(tmp_path / "plain")
    packed = dict(tensors)
    for layer in range(2):
        for name, rows, columns in (("gate_up_proj", 2 * INNER, WIDTH), ("down_proj", WIDTH, INNER)):
            key = f"model.layers.{layer}.mlp.experts.{name}"
            blocks, scales = random_blocks(rows, columns, seed=layer)
            tensors[key] = convert_moe_packed_tensors(blocks, scales).contiguous()
            del packed[key]
            packed |= {f"{key}_blocks": blocks, f"{key}_scales": scales}
    for name, written in (("packed", packed), ("plain", tensors)):
        save_file(written, tmp_path / name / "model.safetensors", metadata={"format": "pt"})
    path = tmp_path / "packed" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": QUANTIZED}))
    return tmp_path / "packed", tmp_path / "plain"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_values_are_those_of_transformers_whatever_the_bytes(dtype):
    blocks, _ = random_blocks(8, 8 * 32, seed=3)
    scales = torch.arange(E * 64).reshape(E, 8, 8).remainder(253).to(torch.uint8)
    scales[0, 0, 0], scales[0, 0, 1] = 0, 252
    found = mxfp4.unpacked("", blocks, scales)
    expected = convert_moe_packed_tensors(blocks, scales, dtype=dtype)
    assert found.dtype == torch.bfloat16 and found.shape == expected.shape == (E, 8 * 32, 8)
    assert torch.equal(found.to(dtype), expected)
    assert len(found.unique()) > 1000


@pytest.mark.parametrize(("scale", "byte"), [(253, 0x55), (254, 0xB3)])  # values 3 and 3, 1.5 and -1.5
def test_a_large_scale_is_read_if_its_values_are_finite(scale, byte):
    blocks = torch.full((1, 2, 1, 16), byte, dtype=torch.uint8)
    scales = torch.full((1, 2, 1), scale, dtype=torch.uint8)
    assert mxfp4.unpacked("", blocks, scales).abs().unique().item() == {253: 3.0, 254: 1.5}[scale] * 2.0 ** (
        scale - 127
    )
    blocks[0, 1, 0, 7] = 0x60  # 4
    with pytest.raises(ConfigError, match=f"^X in F: values with scale {scale} are not finite; .* most 252"):
        mxfp4.unpacked("X in F", blocks, scales)


def test_a_folder_is_read_as_its_bf16_copy_and_written_without_quantization(folders, tmp_path):
    packed, plain = folders
    config, model = load_hf(packed)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert config == replace(load_hf(plain)[0], name="packed")
    assert_same_bits(model.state_dict(), load_hf(plain)[1].state_dict())
    save_hf(model, config, tmp_path / "again")
    assert_same_bits(tensors_in(tmp_path / "again"), tensors_in(plain))
    assert "quantization_config" not in json.loads((tmp_path / "again" / "config.json").read_text())
    _, report = reload(tmp_path / "again")
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))


@pytest.mark.parametrize("folder", ["packed", "plain"])
@pytest.mark.parametrize("rank", [0, 2])
def test_a_rank_reads_its_experts_only(folders, folder, rank, monkeypatch):
    path, layout, read = folders[folder == "plain"], Layout(dp=3, ep=3), list[int]()
    whole, config = load_hf(path)[1].state_dict(), load_hf(path)[0]
    unpacked = mxfp4.unpacked
    monkeypatch.setattr(mxfp4, "unpacked", lambda at, *pair: read.append(len(pair[0])) or unpacked(at, *pair))
    model = build_model(config, layout=layout, rank=rank, seed=None)
    load_weights(model, path, layout=layout, rank=rank)
    experts = slice(rank * E // 3, (rank + 1) * E // 3)
    for name, tensor in model.state_dict().items():
        expected = whole[name][experts] if "moe_experts" in name else whole[name]
        assert torch.equal(tensor, expected.float()), name
    assert read == ([1] * (2 * 2 * E // 3) if folder == "packed" else [])


def test_a_flat_part_of_a_weight_is_read_by_the_experts_that_it_cuts(folders):
    packed, _ = folders
    config, model = load_hf(packed)
    name = "layers.1.moe_experts.w_gate_up"
    whole = model.state_dict()[name].flatten()
    shape = model.state_dict()[name].shape
    start, stop = shape[1:].numel() - 7, 3 * shape[1:].numel() + 3 * WIDTH + 5  # ends within rows
    data = torch.zeros(stop - start)
    shard = FlatShard(data, start, shape, Experts.GATE_UP, Layout(), 0)
    load_weights(build_model(config, device="meta"), packed, into={name: shard})
    assert torch.equal(data, whole[start:stop].float())


def damaged(folder, change) -> str:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError) as caught:
        load_hf(folder)
    return str(caught.value)


def test_missing_or_wrong_scales_are_named(folders):
    packed, _ = folders
    key = "model.layers.1.mlp.experts.down_proj"
    said = damaged(packed, lambda tensors: tensors[f"{key}_scales"][2, 5, 0].fill_(255))
    assert said.startswith(f"{key}_scales in ") and "values with scale 255 are not finite" in said


STORED = {
    "dtype": (lambda blocks, scales: (blocks.char(), scales), "I8 [6, 64, 1, 16]", "U8 [6, 64, 1]"),
    "shape": (lambda blocks, scales: (blocks, scales.mT), "U8 [6, 64, 1, 16]", "U8 [6, 1, 64]"),
    "flat": (lambda blocks, scales: (blocks.flatten(2), scales), "U8 [6, 64, 16]", "U8 [6, 64, 1]"),
    "no scales": (lambda blocks, scales: (blocks, None), "U8 [6, 64, 1, 16]", "missing"),
    "no blocks": (lambda blocks, scales: (None, scales), "missing", "U8 [6, 64, 1]"),
}


@pytest.mark.parametrize("name", STORED)
def test_blocks_and_scales_that_store_no_weight_have_one_line(folders, name):
    key, (change, *found) = "model.layers.1.mlp.experts.down_proj", STORED[name]

    def changed(tensors):
        names = f"{key}_blocks", f"{key}_scales"
        new = zip(names, change(*map(tensors.pop, names)), strict=True)
        tensors.update({each: tensor.contiguous() for each, tensor in new if tensor is not None})

    _, *lines = damaged(folders[0], changed).splitlines()
    assert [line.strip() for line in lines] == [
        f"{key}_blocks is {found[0]} and {key}_scales is {found[1]}; MXFP4 needs U8 [6, 64, 1, 16] and "
        "U8 [6, 64, 1]"
    ]


def test_blocks_of_another_size_and_a_weight_beside_them_are_named(folders):
    key = "model.layers.1.mlp.experts.down_proj"
    said = damaged(folders[0], lambda tensors: tensors.update({f"{key}_scales": torch.zeros(1)}))
    assert f"{key}_scales is F32 [1]; MXFP4 needs" in said
    shapes = {f"{key}_blocks": (6, 60, 1, 16), f"{key}_scales": (6, 60, 1)}
    wrong = {each: torch.zeros(shape, dtype=torch.uint8) for each, shape in shapes.items()}
    said = damaged(folders[0], lambda tensors: tensors.update(wrong))
    needed = "MXFP4 needs U8 [6, 64, 1, 16] and U8 [6, 64, 1]"
    assert f"{key}_blocks is U8 [6, 60, 1, 16] and {key}_scales is U8 [6, 60, 1]; {needed}" in said
    said = damaged(folders[0], lambda tensors: tensors.update({key: torch.zeros(6, 32, 64)}))
    assert f"extra: {key}_blocks [6, 60, 1, 16]" in said


def test_convert_dequantizes_and_writes_no_other_form(folders, tmp_path):
    packed, plain = folders
    ours, again = tmp_path / "ours", tmp_path / "again"
    found = convert(ConvertArgs(packed, ours))
    assert (found["family"], found["dtypes"]) == (None, ["bfloat16"])
    with pytest.raises(ConfigError, match="is not a form of gpt_oss folders; use quantise=none"):
        convert(ConvertArgs(ours, again, quantise=Quantise.fp8_block))
    assert convert(ConvertArgs(ours, again))["family"] == "gpt_oss"
    assert_same_bits(tensors_in(again), tensors_in(plain))


def test_other_quantizations_of_the_family_are_refused(folders):
    path = folders[0] / "config.json"
    raw = json.loads(path.read_text())
    path.write_text(json.dumps(raw | {"quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(ConfigError, match='quantization_config.quant_method="fp8"; supported is "mxfp4"'):
        load_hf(folders[0])
    path.write_text(json.dumps(raw | {"quantization_config": "mxfp4"}))
    with pytest.raises(ConfigError, match='"mxfp4"; supported is {"quant_method": "mxfp4"}$'):
        load_hf(folders[0])
    path.write_text(json.dumps(raw | {"quantization_config": None}))
    said = '4 are MXFP4 weights, .*_proj for one; .* quantization_config={"quant_method": "mxfp4"}$'
    with pytest.raises(ConfigError, match=said):
        load_hf(folders[0])
