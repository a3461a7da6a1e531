"""Folders on disk: shards, multi-token-prediction layers, and tensors or files that do not fit."""

import json
from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from transformers.modeling_layers import MtpModel

from graphmoe import load_hf, save_hf
from graphmoe.checkpoint.hf.tensor_files import has_weights
from graphmoe.config.schema import ConfigError
from graphmoe.model.build import build_model
from tests.parity.hf_models import CASES, assert_same_bits, random_model, reload, tensors_in, tokens_of

CASE = CASES["v3_moonlight"]  # 3 layers, 1 of them dense, 11 experts


@pytest.fixture
def folder(tmp_path):
    random_model(CASE).save_pretrained(tmp_path / "hf")
    return tmp_path / "hf"


def change_tensors(folder, change):
    """Rewrite a folder's one file of weights after ``change`` edited its dict of tensors."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def save_mtp_model(folder, depth=2, **changes):
    """Write a DeepSeek-V3 folder with multi-token prediction; the model, all of it random."""
    random_model(CASE).save_pretrained(folder.parent / "shape")
    config = replace(load_hf(folder.parent / "shape")[0], mtp_depth=depth, **changes)
    model = build_model(config, seed=3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
        for router in model.routers():
            router.selection_bias.uniform_(-0.2, 0.2)
    save_hf(model, config, folder)
    return config, model


def refused(folder, match=None):
    with pytest.raises(ConfigError, match=match) as caught:
        load_hf(folder)
    return str(caught.value)


@pytest.mark.parametrize("how", [{"max_shard_size": "20KB"}, {"save_original_format": False}], ids=str)
@pytest.mark.parametrize("case", ["v3_moonlight", "v2_plain", "qwen3_renormalised", "mixtral", "minimax"])
def test_shards_and_experts_in_one_tensor_are_read_as_one_file(tmp_path, case, how):
    model = random_model(CASES[case])
    model.save_pretrained(tmp_path / "hf")
    model.save_pretrained(tmp_path / "other", **how)
    fused = any(name.endswith("experts.gate_up_proj") for name in tensors_in(tmp_path / "other"))
    assert fused or len(list((tmp_path / "other").glob("*.safetensors"))) > 3
    assert_same_bits(load_hf(tmp_path / "other")[1].state_dict(), load_hf(tmp_path / "hf")[1].state_dict())


def test_two_sets_of_weights_are_refused(folder):
    random_model(CASE).save_pretrained(folder, max_shard_size="20KB")  # leaves model.safetensors there
    refused(folder, "two sets.*model.safetensors and .*index.json .*model-00001-of")
    (folder / "model.safetensors").unlink()
    load_hf(folder)


@pytest.mark.parametrize("size", ["20KB", 1])
def test_shards_are_bounded_and_transformers_reads_them(folder, tmp_path, size):
    config, model = load_hf(folder)
    save_hf(model, config, tmp_path / "out", max_shard_size=size)
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    if size == "20KB":
        assert 5 < len(files) < 40
        assert all(sum(t.nbytes for t in load_file(path).values()) <= 20_000 for path in files)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == {name: path.name for path in files for name in load_file(path)}
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors_in(folder).values())
    assert_same_bits(tensors_in(tmp_path / "out"), tensors_in(folder))
    assert_same_bits(load_hf(tmp_path / "out")[1].state_dict(), model.state_dict())
    again, report = reload(tmp_path / "out")
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with torch.no_grad():
        assert torch.equal(again(tokens_of(CASE, 9)).logits, random_model(CASE)(tokens_of(CASE, 9)).logits)


def test_an_export_replaces_an_earlier_one_with_more_shards(folder):
    config, model = load_hf(folder)
    save_hf(model, config, folder, max_shard_size="20KB")
    save_hf(model, config, folder, max_shard_size="60KB")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert {path.name for path in folder.glob("*.safetensors")} == set(index["weight_map"].values())
    save_hf(model, config, folder)
    names = {path.name for path in folder.iterdir()}
    assert names == {"config.json", "generation_config.json", "model.safetensors"}
    assert len({path.stat().st_mode for path in folder.iterdir()}) == 1  # who may read one may read all
    assert_same_bits(load_hf(folder)[1].state_dict(), model.state_dict())


def test_mtp_layers_round_trip_bitwise_under_the_published_names(tmp_path):
    config, model = save_mtp_model(tmp_path / "mtp")
    again, loaded = load_hf(tmp_path / "mtp")
    assert again == replace(config, name="mtp")
    assert_same_bits(loaded.state_dict(), model.state_dict())
    tensors = tensors_in(tmp_path / "mtp")
    for layer in (3, 4):
        prefix = f"model.layers.{layer}"
        published = ["embed_tokens", "enorm", "hnorm", "eh_proj", "shared_head.norm", "shared_head.head"]
        assert {f"{prefix}.{name}.weight" for name in published} < tensors.keys()
        assert torch.equal(tensors[f"{prefix}.embed_tokens.weight"], model.embed.weight)
        assert torch.equal(tensors[f"{prefix}.shared_head.head.weight"], model.loss_head.head.weight)
    save_hf(loaded, again, tmp_path / "again", max_shard_size="20KB")
    assert_same_bits(tensors_in(tmp_path / "again"), tensors)
    theirs, report = reload(tmp_path / "mtp")
    assert not report["missing_keys"]
    tokens = tokens_of(CASE, 11)
    with torch.no_grad():
        assert torch.allclose(theirs(tokens).logits, model(tokens), rtol=1e-4, atol=1e-5)


def test_copies_of_embedding_and_head_may_be_left_out_but_not_differ(tmp_path):
    _, model = save_mtp_model(tmp_path / "mtp", depth=1)
    copies = ["model.layers.3.embed_tokens.weight", "model.layers.3.shared_head.head.weight"]
    save_mtp_model(tmp_path / "other", depth=1)
    change_tensors(tmp_path / "other", lambda tensors: [tensors[name][2, 3].add_(1e-3) for name in copies])
    assert all(f"different: {name}" in refused(tmp_path / "other") for name in copies)
    change_tensors(tmp_path / "mtp", lambda tensors: [tensors.pop(name) for name in copies])
    assert_same_bits(load_hf(tmp_path / "mtp")[1].state_dict(), model.state_dict())


def test_a_tied_folder_may_have_its_head_but_no_other(tmp_path):
    folder = tmp_path / "hf"
    config, _ = save_mtp_model(folder, tie_embeddings=True)
    names = ["lm_head.weight", "model.layers.3.shared_head.head.weight"]
    _, model = load_hf(folder)
    assert config.tie_embeddings and model.loss_head.head.weight is model.embed.weight
    assert names[0] not in tensors_in(folder) and names[1] in tensors_in(folder)
    change_tensors(folder, lambda tensors: tensors.update({names[0]: tensors[names[1]].clone()}))
    assert_same_bits(load_hf(folder)[1].state_dict(), model.state_dict())
    change_tensors(folder, lambda tensors: [tensors[name].add_(1e-3) for name in names])
    equal = "must equal model.embed_tokens.weight: the model ties them"
    assert all(f"different: {name} {equal}" in refused(folder) for name in names)


def test_every_missing_extra_and_misshaped_tensor_is_listed_at_once(folder):
    def damage(tensors):
        del tensors["model.norm.weight"]
        del tensors["model.layers.1.mlp.experts.7.up_proj.weight"]
        tensors["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(32)
        tensors["model.layers.9.mlp.gate.weight"] = torch.zeros(11, 26)
        tensors["lm_head.weight"] = torch.zeros(60, 26)
        tensors["model.layers.2.mlp.gate.weight"] = tensors["model.layers.2.mlp.gate.weight"].T.contiguous()
        tensors["model.embed_tokens.weight"] = torch.zeros(61, 26, dtype=torch.int64)

    change_tensors(folder, damage)
    lines = [line.strip() for line in refused(folder).splitlines()]
    assert lines[0].endswith("does not fit the model in 7 tensors:")
    assert sorted(lines[1:]) == [
        "extra: model.layers.0.self_attn.q_proj.bias [32]",
        "extra: model.layers.9.mlp.gate.weight [11, 26]",
        "mis-shaped: lm_head.weight is [60, 26], not [61, 26]",
        "mis-shaped: model.layers.2.mlp.gate.weight is [26, 11], not [11, 26]",
        "missing: model.layers.1.mlp.experts.7.up_proj.weight [9, 26]",
        "missing: model.norm.weight [26]",
        "wrong dtype: model.embed_tokens.weight is I64, not F64/F32/F16/BF16",
    ]


def test_rotary_tables_empty_tensors_and_mtp_are_no_weights(folder):
    before, added = load_hf(folder)[1].state_dict(), {"model.layers.1.mlp.unused.weight": torch.zeros(0, 26)}
    added["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(2)
    added["mtp.fc.weight"] = torch.ones(2, 4)  # of Qwen3-Next
    change_tensors(folder, lambda tensors: tensors.update(added))
    assert_same_bits(load_hf(folder)[1].state_dict(), before)


def test_missing_and_damaged_files_are_named_at_once(tmp_path):
    random_model(CASE).save_pretrained(tmp_path, max_shard_size="20KB")
    first, second, *_ = sorted(tmp_path.glob("*.safetensors"))
    first.unlink()
    second.write_bytes(second.read_bytes()[:-7])
    said = refused(tmp_path)
    assert first.name in said and second.name in said
    second.write_bytes((2**25).to_bytes(8, "little"))
    refused(tmp_path, "its header has 33,554,432 bytes; at most 16,777,216 are read")


def test_a_folder_without_weights_says_what_it_needs(folder):
    before = "model.safetensors"
    for name in ("pytorch_model.bin", "model.bin"):
        before = (folder / before).rename(folder / name).name
        refused(folder, f"{name}.*save them as safetensors")
        assert has_weights(folder)
    (folder / "config.json").write_text("{")
    refused(folder, "is not JSON")
    (folder / "config.json").unlink()
    refused(folder, "config.json cannot be read")


def test_a_model_of_another_configuration_is_not_written(folder, tmp_path):
    config, model = load_hf(folder)
    with pytest.raises(ConfigError, match="(?s)does not fit the configuration: .*layers.2.moe_experts"):
        save_hf(model, replace(config, num_experts=10), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_failed_write_leaves_the_earlier_files(folder, monkeypatch):
    config, model = load_hf(folder)
    before = (folder / "model.safetensors").read_bytes()
    fail = Mock(side_effect=OSError("no space"))
    monkeypatch.setattr("graphmoe.checkpoint.hf.tensor_files.save_file", fail)
    with pytest.raises(OSError, match="no space"):
        save_hf(model, config, folder)
    assert (folder / "model.safetensors").read_bytes() == before
    assert not list(folder.glob(".*"))


def test_transformers_runs_the_prediction_layer_of_a_glm_folder(tmp_path):
    """Its layer 46, the only one beside 92 that transformers takes for one, computes our loss of depth 1."""
    case = CASES["glm_air"]
    shape = case.config | {"num_hidden_layers": 46, "first_k_dense_replace": 45}
    random_model(replace(case, config=shape)).save_pretrained(tmp_path / "shape")
    config = replace(load_hf(tmp_path / "shape")[0], mtp_depth=1, init_std=0.2)
    ours = build_model(config, seed=5)
    save_hf(ours, config, tmp_path / "hf")
    assert_same_bits(load_hf(tmp_path / "hf")[1].state_dict(), ours.state_dict())
    main, _ = reload(tmp_path / "hf")
    layer, tokens = MtpModel.from_pretrained(main), tokens_of(case, 15)
    with torch.no_grad():
        found = ours.loss(tokens[:, :-1], tokens[:, 1:]).mtp
        state = main.model(tokens[:, :-1]).last_hidden_state[:, :-1]
        positions = torch.arange(13)[None]
        state = layer.forward_layer(0, state, positions, None, input_ids=tokens[:, 1:-1])
        expected = F.cross_entropy(main.lm_head(state).flatten(0, 1), tokens[:, 2:].flatten())
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=0)
