"""A LoRA run from a Hugging Face folder: peft reads its adapters, and merged folders have the same logits."""

import json

import pytest
import torch
import transformers
import yaml
from omegaconf import OmegaConf

from graphmoe import convert, generate
from graphmoe.checkpoint.hf import load_hf, save_hf
from graphmoe.checkpoint.hf.peft import CONFIG
from graphmoe.model.build import build_model
from graphmoe.run.weights import load_weights
from tests.runs import TINY, config, refusal, train_in
from tests.tolerances import relative_error

EAGER = {"attn_implementation": "eager", "experts_implementation": "eager"}
WORDS = (
    *TINY, "model.attention=gqa", "model.num_kv_heads=1", "model.head_dim=6", "model.selection_bias=false",
    "model.lora_rank=3", "model.lora_alpha=5", "checkpoint.interval=0", "train.val_batches=0",
    "optim.weight_decay=0", "optim.lr=0.3", "train.clip_grad_norm=0",
)  # fmt: skip
KINDS = {
    "llama": ("model.num_experts=0", "model.lora_targets=[attention,mlp]"),
    "qwen3": ("model.num_experts=0", "model.qk_norm=true", "model.lora_targets=[attention,mlp]"),
    "mixtral": (
        "model.num_dense_layers=0", "model.shared_ffn_size=0", "model.softmax_after_topk=true",
        "model.lora_targets=[attention,experts]", "model.num_heads=4", "model.head_dim=4",
    ),
    "qwen3_moe": (
        "model.num_dense_layers=0", "model.shared_ffn_size=0", "model.qk_norm=true",
        "model.lora_targets=[attention,experts]", "model.renormalise=true",
    ),
}  # fmt: skip


def run_in(folder, *words):
    plain = OmegaConf.to_container(OmegaConf.structured(config(*words)), enum_to_str=True)
    folder.mkdir()
    (folder / "resolved.yaml").write_text(yaml.safe_dump(plain))
    train_in(folder, *words)


@pytest.fixture(scope="module", params=KINDS)
def adapted(request, tmp_path_factory):
    """Folders of the frozen weights and of the run, tokens, and the run's logits."""
    folder = tmp_path_factory.mktemp(request.param)
    words = (*WORDS, f"model.hf_family={request.param}", *KINDS[request.param])
    base = build_model(config(*words, "model.lora_rank=0").model, seed=3)
    save_hf(base, base.config, folder / "base")
    starts = f"checkpoint.init_from={folder / 'base'}", f"checkpoint.export={folder / 'exported'}"
    run_in(folder / "run", *words, *starts)
    model, _ = generate.load_model(folder / "run", config(*words).model, torch.device("cpu"))
    tokens = torch.randint(0, 64, (2, 13), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        found, before = model(tokens), base(tokens)
    own, frozen = model.state_dict(), base.state_dict()
    assert all(own[name].equal(weight) for name, weight in frozen.items())
    assert relative_error(found, before) > 1e-2, "the adapters have learned nothing"
    return folder, tokens, found


def test_peft_reads_the_adapters(adapted):
    peft = pytest.importorskip("peft")
    folder, tokens, wanted = adapted
    convert.main([f"from={folder / 'run'}", f"to={folder / 'adapter'}", "target=peft"])
    named = json.loads((folder / "adapter" / CONFIG).read_text())
    assert (named["r"], named["lora_alpha"]) == (3, 5)
    assert named["base_model_name_or_path"] == str(folder / "base")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "base", **EAGER)
    model = peft.PeftModel.from_pretrained(model.float(), folder / "adapter")
    with torch.no_grad():
        assert relative_error(model(tokens).logits, wanted) < 1e-5
        assert relative_error(model.merge_and_unload()(tokens).logits, wanted) < 1e-5


def test_merged_folders_have_the_logits_of_the_run(adapted):
    folder, tokens, wanted = adapted
    for target in ("hf", "graphmoe"):
        convert.main([f"from={folder / 'run'}", f"to={folder / target}", f"target={target}"])
    config_of_hf, model = load_hf(folder / "hf")
    exported = load_hf(folder / "exported")[1].state_dict()
    assert all(weight.equal(exported[name]) for name, weight in model.state_dict().items())
    again = build_model(config_of_hf, seed=None)
    load_weights(again, folder / "graphmoe")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder / "hf", **EAGER).float()
    with torch.no_grad():
        for found in (model(tokens), again(tokens), theirs(tokens).logits):
            assert relative_error(found, wanted) < 1e-5
    convert.main([f"from={folder / 'run'}", f"to={folder / 'half'}", "dtype=bf16"])
    rounded = load_hf(folder / "half", dtype=torch.bfloat16)[1].state_dict()
    assert all(rounded[n].equal(w.bfloat16()) for n, w in model.state_dict().items()), "rounded once"


def test_adapters_that_peft_has_not_are_refused_by_name(tmp_path, capsys):
    latent = (*TINY, "model.selection_bias=false", "model.lora_rank=3", "train.steps=1")
    run_in(tmp_path / "run", *latent, "model.lora_targets=[mlp]")
    words = f"from={tmp_path / 'run'}", f"to={tmp_path / 'adapter'}", "target=peft"
    said = refusal(convert.main, capsys, *words)
    assert "model.layers.0.mlp.gate_proj" in said and "target=hf" in said, said
    run_in(tmp_path / "plain", *latent, "model.lora_rank=0")
    said = refusal(convert.main, capsys, f"from={tmp_path / 'plain'}", *words[1:])
    assert "has none" in said
    said = refusal(convert.main, capsys, *words, "quantise=fp8_block")
    assert "quantise=fp8_block is not for adapters" in said
