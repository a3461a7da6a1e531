"""Folders with a vision model too: their text model is read as from a folder of its own."""

import json
import re

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from graphmoe import load_hf
from graphmoe.checkpoint.hf.differences import same_function
from graphmoe.checkpoint.hf.folder import read_hf_config
from graphmoe.config.schema import ConfigError
from graphmoe.model.sizes import count_parameters
from graphmoe.pipeline_view.plans import load_preset
from tests.parity.hf_models import CASES, assert_same_bits, multimodal, random_model, tensors_in, tokens_of
from tests.parity.test_documented_families import PAGE
from tests.parity.test_hf_configs import PUBLISHED
from tests.parity.test_hf_parity import LIMIT, assert_gradients_agree
from tests.tolerances import relative_error

LLAMA4 = {"language_model", "vision_model", "multi_modal_projector"}
QWEN3_5 = {"model.language_model", "model.visual"}
"""What the names of tensors of a whole folder begin with."""
PREFIX = {"llama4_scout": "language_model.model.", "qwen3_5": "model.language_model."}


def with_tensors(folder, change):
    change(tensors := load_file(folder / "model.safetensors"))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


WHOLE = dict.fromkeys(("llama4_scout", "llama4_maverick", "llama4_scout_tied"), LLAMA4)
WHOLE |= {"qwen3_5": QWEN3_5 | {"lm_head.weight"}, "qwen3_5_tied": QWEN3_5}


@pytest.mark.parametrize(("case", "parts"), WHOLE.items())
def test_the_text_model_of_a_whole_folder_is_read(tmp_path, case, parts):
    text = random_model(CASES[case])
    text.save_pretrained(tmp_path / "text")
    multimodal(tmp_path / "whole", text)
    depth = 1 if parts is LLAMA4 else 2
    assert {".".join(name.split(".")[:depth]) for name in tensors_in(tmp_path / "whole")} == parts
    # the prediction layer of published folders, which transformers does not write
    with_tensors(tmp_path / "whole", lambda tensors: tensors.update({"mtp.fc.weight": torch.ones(26, 52)}))
    config, model = load_hf(tmp_path / "whole")
    wanted, plain = load_hf(tmp_path / "text")
    assert same_function(config, wanted) == [] and config.hf_family == wanted.hf_family
    assert_same_bits(model.state_dict(), plain.state_dict())


@pytest.mark.parametrize("case", PREFIX)
def test_a_missing_or_extra_tensor_is_named_with_its_prefix(tmp_path, case):
    multimodal(tmp_path, random_model(CASES[case]))
    gone, more = f"{PREFIX[case]}layers.1.self_attn.q_proj.weight", "model.audio.weight"
    with_tensors(tmp_path, lambda tensors: tensors.update({more: tensors.pop(gone)}))
    with pytest.raises(ConfigError) as caught:
        load_hf(tmp_path)
    _, *lines = str(caught.value).splitlines()
    assert [line.split()[:2] for line in lines] == [["missing:", gone], ["extra:", more]]


@pytest.mark.parametrize("case", ["llama4_scout", "qwen3_5", "qwen3_5_tied"])
def test_the_whole_model_has_our_logits_and_gradients_of_text(tmp_path, case):
    model = multimodal(tmp_path / "whole", random_model(CASES[case])).eval()
    ours, tokens = load_hf(tmp_path / "whole")[1], tokens_of(CASES[case], 20)
    with torch.no_grad():
        assert relative_error(ours(tokens), model(input_ids=tokens).logits) <= LIMIT
    assert_gradients_agree(ours, model, tokens, tmp_path / "gradients")


def test_the_page_names_each_tensor_of_a_delta_net():
    lines = [line.split(" | ") for line in PAGE.splitlines() if line[:1] == "|" and "`linear_attn." in line]
    for case, column in (("qwen3_next", 1), ("qwen3_5", 2)):
        cells = [line[1] if line[column].startswith("the same") else line[column] for line in lines]
        tensors = [name.partition(".linear_attn.")[2] for name in random_model(CASES[case]).state_dict()]
        wanted = {name.removesuffix(".weight") for name in tensors if name}
        assert {*re.findall(r"`linear_attn\.(\w+)`", " ".join(cells))} == wanted


def test_a_whole_folder_of_another_family_is_refused(tmp_path):
    raw = {"model_type": "llava", "text_config": PUBLISHED["llama4_scout"]}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ConfigError, match="model_type=llava"):
        load_hf(tmp_path)


def test_the_preset_of_qwen3_5_is_the_model_of_transformers(tmp_path):
    """Its defaults are the sizes of Qwen3.5-35B-A3B, but for theta and the context."""
    text = transformers.Qwen3_5MoeTextConfig(max_position_embeddings=262144).to_dict()
    image = {"mrope_section": [11, 11, 10], "mrope_interleaved": True}
    text["rope_parameters"] |= {"rope_theta": 1e7} | image
    raw = transformers.Qwen3_5MoeConfig(text_config=text).to_dict()
    (tmp_path / "config.json").write_text(json.dumps(raw))
    family, found, _ = read_hf_config(tmp_path)
    preset = load_preset("qwen3_5_35b_a3b")
    assert same_function(found, preset) == [] and found.hf_family == preset.hf_family == family.name
    with torch.device("meta"):
        theirs = transformers.Qwen3_5MoeForCausalLM(transformers.Qwen3_5MoeTextConfig(**text))
    assert count_parameters(preset)["total"]["full"] == theirs.num_parameters()
    raw["text_config"]["attn_output_gate"] = False
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ConfigError, match="attn_output_gate=false; supported is true"):
        read_hf_config(tmp_path)
