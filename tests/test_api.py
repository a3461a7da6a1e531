"""graphmoe.Trainer: gradients of a run, resuming, weights for others, and what it refuses."""

import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

import graphmoe
from graphmoe.config.schema import ConfigError
from tests.runs import ROOT

SMALL = (
    "model=tiny", "model.num_layers=2", "model.hidden_size=64", "model.dense_ffn_size=96",
    "model.vocab_size=128", "optim.lr=1e-3", "optim.warmup_steps=0", "precision=fp32", "run.device=cpu",
    "compile.enabled=false",
)  # fmt: skip
TOKENS = torch.randint(0, 128, (4, 33), generator=torch.Generator().manual_seed(0))
ROUTES = (7 * torch.arange(4 * 32).view(4, 32, 1, 1) + torch.arange(2)) % 5
"""Experts of tokens; those above 4 have none."""


def nll(trainer, tokens):
    return -trainer.log_probs(tokens).mean()


def replayed(trainer, batch):
    tokens, routes = batch
    return -trainer.log_probs(tokens, routes).mean()


def weights_of(trainer):
    return {name: weight.clone() for name, weight in trainer.model.state_dict().items()}


DENSE = (
    "model=qwen3_0_6b",
    "model.num_heads=4",
    "model.num_kv_heads=2",
    "model.head_dim=16",
    "model.context_length=64",
)


@pytest.mark.parametrize("words", [(), ("model.selection_bias=true", "model.score_function=sigmoid"), DENSE])
def test_a_step_is_that_of_the_model_s_own_loss(words):
    with graphmoe.Trainer(*SMALL, *words) as trainer, graphmoe.Trainer(*SMALL, *words) as other:
        row = trainer.step(TOKENS, nll)
        output = other.model.loss(TOKENS[:, :-1], TOKENS[:, 1:])
        output.total.backward()
        result = other.optimizer.step(output.cross_entropy)
        assert row["loss"] == pytest.approx(output.cross_entropy.item(), rel=1e-6) and row["skipped"] == 0.0
        assert row["grad_norm"] == pytest.approx(result.grad_norm.item(), rel=1e-5)
        after = weights_of(other)
        for name, weight in weights_of(trainer).items():
            if name.endswith("selection_bias"):
                assert weight.abs().max() == pytest.approx(0.001)  # the rate; ``other`` left it at zero
            else:
                torch.testing.assert_close(weight, after[name], rtol=0, atol=2e-6)


def test_without_compilation_only_a_user_s_own_passes_are_warned_of(caplog):
    for words, named in (((), False), (("passes.disabled=[fuse_router]",), True)):
        caplog.clear()
        with graphmoe.Trainer(*SMALL, *words):
            assert ("passes.disabled" in caplog.text) == named, caplog.text


def test_micro_batches_are_averaged():
    words = *SMALL, "model.aux_loss=none"
    with graphmoe.Trainer(*words) as trainer, graphmoe.Trainer(*words) as other:
        rows = trainer.step(TOKENS, nll), other.step([*TOKENS.chunk(2)], nll)
        assert rows[0] == pytest.approx(rows[1], rel=1e-5)


def test_a_loss_that_is_not_finite_is_skipped():
    with graphmoe.Trainer(*SMALL) as trainer:
        before = weights_of(trainer)
        assert trainer.step(TOKENS, lambda *given: nll(*given) * torch.nan)["skipped"] == 1.0
        assert all(map(torch.equal, before.values(), weights_of(trainer).values()))
        assert trainer.step(TOKENS, nll)["skipped"] == 0.0


def test_a_loop_resumes_bitwise(tmp_path):
    with graphmoe.Trainer(*SMALL) as trainer:
        assert trainer.load(tmp_path / "none") == 0
        for step in range(4):
            if step == 2:
                trainer.save(tmp_path / "saved", step)
            trainer.step(TOKENS, nll)
        expected = weights_of(trainer)
    with graphmoe.Trainer(*SMALL, "train.seed=1") as trainer:
        assert trainer.load(tmp_path / "saved") == 2
        for _ in range(2):
            trainer.step(TOKENS, nll)
        assert all(map(torch.equal, expected.values(), weights_of(trainer).values()))


def test_weights_are_those_of_the_folder_and_start_a_loop(tmp_path):
    with graphmoe.Trainer(*SMALL) as trainer:
        trainer.step(TOKENS, nll)
        trainer.save_hf(tmp_path / "hf")
        config, model = graphmoe.load_hf(tmp_path / "hf")
        assert config.vocab_size == 128
        assert all(map(torch.equal, model.state_dict().values(), trainer.model.state_dict().values()))
        with torch.no_grad():
            expected = trainer.log_probs(TOKENS)
            logits_BSV = model(TOKENS[:, :-1]).log_softmax(dim=-1)
        torch.testing.assert_close(expected, logits_BSV.gather(2, TOKENS[:, 1:, None])[..., 0])
    words = *SMALL[5:], f"checkpoint.init_from={tmp_path / 'hf'}"
    with graphmoe.Trainer(*words) as again, torch.no_grad():
        assert torch.equal(again.log_probs(TOKENS), expected)


REFUSED = (
    "parallel.cp=2", "graph.scope=partial", "model.mtp_depth=1", "parallel.dp_shard=fsdp2",
    "moe.receive_budget=2", "data.document_mask=true",
)  # fmt: skip


@pytest.mark.parametrize("word", REFUSED)
def test_what_a_loop_cannot_run_is_named(word):
    with pytest.raises(ConfigError, match=word.partition("=")[0]):
        graphmoe.Trainer(*SMALL, word)


TWO_RANKS = """
import torch, graphmoe
from tests.test_api import ROUTES, SMALL, TOKENS, nll, replayed
with graphmoe.Trainer(*SMALL, "parallel.ep=2", "model.aux_loss=none") as trainer:
    rank = torch.distributed.get_rank()
    rows = [trainer.step(TOKENS.chunk(2)[rank], nll)["loss"] for _ in range(3)]
    own = TOKENS.chunk(2)[rank], ROUTES.chunk(2)[rank]
    rows += [trainer.step(own, replayed)["loss"] for _ in range(2)]
    found = dict(trainer.weights())
    trainer.save_hf("both")
    if rank == 0:
        torch.save({"losses": rows, "weights": found}, "found.pt")
"""


@pytest.mark.slow
def test_two_ranks_with_half_the_experts_each_are_one(tmp_path):
    (tmp_path / "both.py").write_text(TWO_RANKS)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "both.py"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    found = torch.load(tmp_path / "found.pt")
    with graphmoe.Trainer(*SMALL, "model.aux_loss=none") as trainer:
        losses = [trainer.step(TOKENS, nll)["loss"] for _ in range(3)]
        losses += [trainer.step((TOKENS, ROUTES), replayed)["loss"] for _ in range(2)]
        assert found["losses"] == pytest.approx(losses, rel=1e-5)
        for name, weight in trainer.weights():
            torch.testing.assert_close(found["weights"][name], weight, rtol=0, atol=1e-5)
    _, model = graphmoe.load_hf(tmp_path / "both")
    written = model.state_dict()
    for name, weight in weights_of(trainer).items():
        torch.testing.assert_close(written[name], weight, rtol=0, atol=1e-5)


def test_adapters_are_handed_out_merged(tmp_path):
    words = *SMALL, "model.lora_rank=2", "model.lora_targets=[attention,experts]"
    with graphmoe.Trainer(*words, "optim.lr=0.1") as trainer:
        before = {name: weight.clone() for name, weight in trainer.weights()}
        for _ in range(2):
            trainer.step(TOKENS, nll)
        after = dict(trainer.weights())
        changed = {name for name in after if not torch.equal(before[name], after[name])}
        assert changed == {n for n in after if "self_attn" in n and "norm" not in n or ".experts." in n}
        trainer.save_hf(tmp_path / "hf")
        _, model = graphmoe.load_hf(tmp_path / "hf")
        with torch.no_grad():
            logits_BSV = model(TOKENS[:, :-1]).log_softmax(dim=-1)
            wanted = trainer.log_probs(TOKENS)
        torch.testing.assert_close(logits_BSV.gather(2, TOKENS[:, 1:, None])[..., 0], wanted)


def test_losses_of_routers_do_not_grow_with_calls():
    def twice(trainer, tokens):
        return -torch.cat([trainer.log_probs(half) for half in tokens.chunk(2)]).mean()

    words = *SMALL, "model.aux_loss=sequence", "model.aux_loss_coef=10"
    with graphmoe.Trainer(*words) as trainer, graphmoe.Trainer(*words) as other:
        assert trainer.step(TOKENS, nll) == pytest.approx(other.step(TOKENS, twice), rel=1e-5)


def test_start_weights_that_are_not_finite_are_refused(tmp_path):
    with graphmoe.Trainer(*SMALL) as trainer:
        trainer.save_hf(tmp_path / "hf")
    file = tmp_path / "hf" / "model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"][3] = torch.nan
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match="loss_head.norm.weight has values that are not finite"):
        graphmoe.Trainer(*SMALL[5:], f"checkpoint.init_from={tmp_path / 'hf'}")
