"""Commands of docs/models.md: a published folder of each family trains ten steps and is written back."""

import json
import re
from dataclasses import replace

import pytest
import torch
import transformers

from graphmoe import load_hf
from graphmoe.checkpoint.hf.families import FAMILIES
from graphmoe.data.tokenizer import train_bpe
from graphmoe.model.build import build_model
from graphmoe.model.sizes import count_parameters
from graphmoe.pipeline_view.plans import load_preset
from graphmoe.run.weights import read_run
from tests.parity.hf_models import CASES, assert_same_bits, multimodal, random_model, reload, tensors_in
from tests.parity.test_bailing import folder_of, raw_of, weights_of
from tests.runs import ROOT, command, metrics, slow_but
from tests.test_docs import words_of
from tests.tolerances import relative_error

PAGE = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^### .*\n\n```bash\n([^`]*)```\n\n`model_type`: `(\w+)`", PAGE, re.MULTILINE)
COMMANDS = {name: block.replace("\\\n", " ").splitlines() for block, name in BLOCKS}
OF_FAMILY = {
    "deepseek_v2": "v2_groups_q_lora_yarn",
    "deepseek_v3": "v3_moonlight",
    "llama": "llama_scaled_tied",
    "qwen3": "qwen3_dense",
    "qwen3_moe": "qwen3_renormalised",
    "qwen3_next": "qwen3_next",
    "qwen3_5_moe_text": "qwen3_5",
    "mixtral": "mixtral_odd",
    "gpt_oss": "gpt_oss",
    "glm4_moe": "glm_air",
    "bailing_moe_v2": "groups",
    "minimax_m2": "minimax",
    "llama4_text": "llama4_scout",
}
"""The case of each family; that of Ling is one of ``test_bailing``."""
IN_BF16 = ("deepseek_v3", "qwen3", "mixtral", "gpt_oss", "bailing_moe_v2", "llama4_text")
WITH_IMAGES = ("qwen3_5_moe_text", "llama4_text")
HERE = (
    "run.device=cpu", "compile=none", "launch.nproc=1", "launch.nodes=1", "parallel.ep=1", "parallel.pp=1",
    "data.seq_len=16", "train.global_batch_size=4", "train.val_batches=0", "log.report=false",
    "log.sample_tokens=0", "optim.lr=1e-3",
)  # fmt: skip
"""Words behind those of the page: a small run in one process."""
VOCABULARY = 320
OWN = {"_name_or_path", "eos_token_id", "rope_parameters"}
"""Keys in which the configs differ: the run's data has another end token, and YaRN is written in full."""


def write_published(folder, family, text_only):
    """Write a folder as published, and return that of its text model."""
    dtype = torch.bfloat16 if family in IN_BF16 else torch.float32
    if family == "bailing_moe_v2":
        raw = raw_of(OF_FAMILY[family]) | {"vocab_size": VOCABULARY}
        folder_of(folder, raw, {name: tensor.to(dtype) for name, tensor in weights_of(raw).items()})
        return folder
    case = replace(CASES[OF_FAMILY[family]], vocab_size=VOCABULARY)
    without = {"num_nextn_predict_layers": 0}  # which transformers does not write
    model = random_model(replace(case, config=case.config | without)).to(dtype)
    if family not in WITH_IMAGES:
        model.save_pretrained(folder)
        return folder
    multimodal(folder, model)
    model.save_pretrained(text_only)
    return text_only


def config_of(folder, family):
    """The keys of config.json as transformers reads them, or as they are if it lacks the family."""
    if family == "bailing_moe_v2":
        return json.loads((folder / "config.json").read_text())
    config = transformers.AutoConfig.from_pretrained(folder)
    return {key: config.to_dict()[key] for key in type(config)().to_dict()}


def trained_model(folder, dtype):
    """The model of a run's newest checkpoint, in fp32, of weights in another dtype."""
    config, state, _ = read_run(folder, None)
    model = build_model(config)
    rounded = {
        name: each if name.endswith("selection_bias") else each.to(dtype) for name, each in state.items()
    }
    model.load_state_dict(rounded)
    return model


def test_each_family_opens_with_a_command():
    assert [*COMMANDS] == [*dict.fromkeys(COMMANDS)] and {*COMMANDS} == {family.name for family in FAMILIES}
    assert {*OF_FAMILY} == {*COMMANDS} and all(len(lines) == 1 for lines in COMMANDS.values())


@pytest.mark.parametrize("family", slow_but([*OF_FAMILY], "gpt_oss"))
def test_documented_commands_train_a_folder_and_write_it_back(tmp_path, family):
    ((train, words),) = map(words_of, COMMANDS[family])
    given = dict(word.split("=", 1) for word in words)
    published, exported = tmp_path / given["model"], tmp_path / given["checkpoint.export"]
    text = write_published(published, family, tmp_path / "text")
    train_bpe(iter(["a text"]), 300, 1).save(str(published / "tokenizer.json"))
    (tmp_path / "tokenizer.json").write_bytes((published / "tokenizer.json").read_bytes())
    (tmp_path / "corpus").mkdir()
    rows = [json.dumps({"text": f"document {i} of a corpus. " * 20}) for i in range(100)]
    (tmp_path / "corpus" / "a.jsonl").write_text("\n".join(rows))
    run = command(tmp_path, *words, *HERE, module=train)
    assert run.wait() == 0, run.err.read_text()
    folder = tmp_path / "outputs" / given["run.name"]
    rows = [row for row in metrics(folder) if "loss" in row]
    assert [row["step"] for row in rows] == [*range(1, 11)]
    dtype = torch.bfloat16 if family in IN_BF16 else torch.float32
    before, after = tensors_in(text), tensors_in(exported)
    assert {n: t.shape for n, t in after.items()} == {n: t.shape for n, t in before.items()}
    assert all(not before[n].equal(after[n]) for n in before if "_proj" in n or "query_key_value" in n)
    assert {t.dtype for n, t in after.items() if not n.endswith(("correction_bias", "expert_bias"))} == {
        dtype
    }
    trained, tokens = trained_model(folder, dtype), torch.arange(26).view(2, 13) * 7
    with torch.no_grad():
        expected = trained(tokens)
        assert expected.isfinite().all() and torch.equal(
            load_hf(exported, dtype=torch.float32)[1](tokens), expected
        )
    ours, theirs = config_of(exported, family), config_of(text, family)
    assert [key for key in theirs.keys() - OWN if ours.get(key) != theirs[key]] == []
    if family != "bailing_moe_v2":
        assert theirs["rope_parameters"].items() <= ours["rope_parameters"].items()
        model, report = reload(exported)
        assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        with torch.no_grad():
            assert relative_error(expected, model(tokens).logits) <= 1e-4
        model.to(dtype).save_pretrained(tmp_path / "again")
        again = tensors_in(tmp_path / "again")
        assert_same_bits(again, {name: tensor.to(again[name].dtype) for name, tensor in after.items()})


def test_counts_of_the_page_are_those_of_the_presets():
    counts = re.findall(r"`(\w+)` has\s([\d.]+)B\sparameters(?:,\s([\d.]+)B\sactive)?", PAGE)
    assert len(counts) == 23
    for name, total, active in counts:
        found = count_parameters(replace(load_preset(name), mtp_depth=0))
        assert f"{found['total']['full'] / 1e9:.1f}" == total, name
        assert f"{found['active']['full'] / 1e9:.1f}" == (active or total), name
