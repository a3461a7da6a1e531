"""QK-clip against logits that are written out, on one process; tests/distributed has it on several ranks."""

import copy
import math

import pytest
import torch
from torch import Tensor

from graphmoe.config.schema import ConfigError
from graphmoe.model.attention import CoreAttention, LatentAttention
from graphmoe.plan.rules import check
from graphmoe.training.trainer import Trainer
from tests.runs import (
    COMPILED,
    COMPILED_MODEL,
    QUIET,
    assert_same_state,
    config,
    final_state,
    metrics,
    numbers,
    slow_but,
    spoil_steps,
    trainer_in,
)

SEQ = 16
CLIP = ("optim.name=muon", "optim.qk_clip=3.5", "model.init_std=0.3")
STILL = (*QUIET, "optim.lr=1e-30", "optim.weight_decay=0")  # weights change by the clip alone
GQA = (
    *("model.attention=gqa", "model.num_heads=4", "model.num_kv_heads=2", "model.head_dim=8"),
    *("model.attention_bias=qkvo", "model.attention_gate=true"),
)
MASKED = (
    *GQA, "model.window=5", "model.full_every=2", "model.attention_sinks=true", "data.document_mask=true",
    "data.document_length=5",
)  # fmt: skip
DELTA_NET = (
    *GQA[:4], "model.linear_attention=delta_net", "model.full_every=2", "model.linear_key_heads=2",
    "model.linear_value_heads=4", "model.linear_value_head_dim=16",
)  # fmt: skip
MODELS = {
    "mla": (), "mla, latent queries, mtp": ("model.q_lora_rank=8", "model.mtp_depth=1"), "gqa": GQA,
    "window, sinks, documents": MASKED, "delta net": DELTA_NET, "bf16": (*GQA, "precision.compute=bf16"),
}  # fmt: skip


@pytest.fixture
def step(monkeypatch):
    """Return a function that makes a step, and returns logits of layers that have some, fp64 [B, H, S, S]."""
    found, with_bound = dict[int, list[Tensor]](), CoreAttention.with_bound

    def written_out(self, q, k, v, first_BS=None, sinks_H=None):
        k_BSHE = k.detach().double().repeat_interleave(q.shape[2] // k.shape[2], dim=2)
        logits = self.scale * torch.einsum("bshe,bthe->bhst", q.detach().double(), k_BSHE)
        key, query = torch.arange(SEQ), torch.arange(SEQ)[:, None]
        seen = (key <= query) & (key > query - (self.window or SEQ))
        if first_BS is not None:
            seen = seen & (key >= first_BS[..., None])[:, None]
        found.setdefault(id(self), []).append(logits.masked_fill(~seen, -math.inf))
        return with_bound(self, q, k, v, first_BS, sinks_H)

    monkeypatch.setattr(CoreAttention, "with_bound", written_out)

    def run(trainer: Trainer, tokens: list[Tensor]) -> list[Tensor]:
        found.clear()
        trainer.steps(1, tokens)
        return [torch.cat(found[id(attn.attend)]) for attn in attentions(trainer).values()]

    return run


def attentions(trainer: Trainer):
    return {name: each for name, each in trainer.model.named_modules() if hasattr(each, "attend")}


def bounds_of(logits: Tensor) -> Tensor:
    return logits.logsumexp(-1).amax((0, 2))


def factors_of(attn, factor_H: Tensor) -> dict[str, Tensor]:
    """Return factors of the rows of each parameter that a clip scales."""
    root_H = factor_H.sqrt()
    if isinstance(attn, LatentAttention):
        nope, rope, value = attn.sizes
        of_queries = torch.cat([root_H.expand(nope, -1), factor_H.expand(rope, -1)]).T
        of_keys = torch.cat([root_H.expand(nope, -1), torch.ones(value, len(factor_H))]).T
        queries = "q_up" if hasattr(attn, "q_up") else "q_proj"
        return {f"{queries}.weight": of_queries.flatten(), "kv_up.weight": of_keys.flatten()}
    of_queries = root_H.expand(attn.head_dim, -1)
    if attn.gated:
        of_queries = torch.cat([of_queries, torch.ones(attn.head_dim, len(factor_H))])
    of_keys = root_H[:: len(factor_H) // 2].expand(attn.head_dim, -1)
    every = {"q": of_queries.T.flatten(), "k": of_keys.T.flatten()}
    biases = {f"biases.{name}": each for name, each in every.items() if name in attn.biases}
    return {f"{name}_proj.weight": each for name, each in every.items()} | biases


@pytest.mark.parametrize("name", MODELS)
def test_heads_over_the_threshold_are_scaled_and_no_other(name, step, tmp_path):
    trainer = trainer_in(tmp_path, *CLIP, *STILL, *MODELS[name])
    clip, model, is_fp32 = trainer.optimizer.qk_clip, trainer.model, name != "bf16"
    for key, main in trainer.optimizer._entries("main").items():
        if "biases" in key or "sinks" in key:
            main.uniform_(-1, 1)
    trainer.optimizer.publish()
    tokens = [next(trainer.loader) for _ in range(trainer.plan.num_micro_batches)]
    clip.threshold = 1e9
    first = step(trainer, tokens)
    # of the first layer with logits one head is over it, the one with the largest
    bounds = [bounds_of(logits) for logits in first]
    clip.threshold = float(bounds[0].topk(2).values.mean())
    before = copy.deepcopy(trainer.optimizer._entries("main"))
    for one, other in zip(step(trainer, tokens), first, strict=True):
        assert torch.equal(one, other)
    largest = max(float(bound.max()) for bound in bounds)
    for row in trainer.rows.read():
        assert row.values["max_logit"] == pytest.approx(largest, rel=1e-5 if is_fp32 else 1e-2)
    expected, factors = dict(before), []
    for (prefix, attn), bound_H in zip(attentions(trainer).items(), bounds, strict=True):
        groups = len(bound_H) if isinstance(attn, LatentAttention) else 2
        factor_H = (clip.threshold / bound_H).clamp_max(1).view(groups, -1).amin(1)
        factors.append(factor_H.repeat_interleave(len(bound_H) // groups))
        for name, factor in factors_of(attn, factors[-1]).items():
            weight = before[key := f"{prefix}.{name}"]
            expected[key] = (weight.double() * factor.view(-1, *[1] * (weight.dim() - 1))).float()
    assert (factors[0] < 1).any() and (factors[0] == 1).any()
    for key, main in trainer.optimizer._entries("main").items():
        torch.testing.assert_close(main, expected[key], rtol=1e-6 if is_fp32 else 1e-2, atol=0)
        same = expected[key] == before[key]
        assert torch.equal(main[same], before[key][same]), key
        assert torch.equal(model.get_parameter(key), main.to(model.get_parameter(key).dtype)), key
    after = step(trainer, tokens)[0]
    assert float(after[after > -math.inf].max()) <= clip.threshold * (1 + (1e-5 if is_fp32 else 1e-2))
    if is_fp32:  # every logit of the first layer has the factor of its head
        torch.testing.assert_close(after, first[0] * factors[0].view(-1, 1, 1), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("why", ["void", "loss", "query", "validation"])
def test_what_no_step_applies_clips_nothing(why, tmp_path):
    trainer = trainer_in(tmp_path, *CLIP, *STILL, "train.val_batches=2")
    optimizer = trainer.optimizer
    assert all((bound == -math.inf).all() for bound in optimizer.qk_clip.bound_LH)
    if why == "validation":
        trainer.validation()
        assert (optimizer.qk_clip.bound_LH == -math.inf).all()
        return
    if why == "void":
        optimizer.void.fill_(1.0)
    else:
        name = {"loss": "loss_head.head.weight", "query": "layers.0.attn.q_proj.weight"}[why]
        optimizer._entries("main")[name][0, 0] = math.inf
    before = copy.deepcopy(optimizer._entries("main"))
    trainer.steps(1, [next(trainer.loader) for _ in range(trainer.plan.num_micro_batches)])
    (row,) = trainer.rows.read()
    assert row.values["skipped"] == 1 and row.values["max_logit"] != -math.inf
    assert_same_state(optimizer._entries("main"), before)
    assert (optimizer.qk_clip.bound_LH == -math.inf).all()


@pytest.mark.parametrize("bound", [math.nan, math.inf, -math.inf, 3.5])
def test_a_bound_that_is_not_finite_or_not_over_the_threshold_scales_nothing(bound, tmp_path):
    optimizer = trainer_in(tmp_path, *CLIP, *QUIET).optimizer
    before = copy.deepcopy(optimizer._entries("main"))
    optimizer.qk_clip.bound_LH.fill_(bound)
    optimizer.qk_clip.apply(torch.ones(()))
    assert_same_state(optimizer._entries("main"), before)


RUN = (*CLIP, *COMPILED_MODEL, "model.mtp_depth=1", "train.steps=6")
TRACED = (*COMPILED[:1], "compile.cache=false")
WAYS = {  # words, and those of the run with the same bits
    "recomputed": (("recompute.all=true",), ()),
    "captured": (("graph.scope=full_iteration", "graph.warmup_steps=2"), ()),
    "layers": ((*TRACED, "graph.scope=layer", "graph.warmup_steps=2"), TRACED),
    "partial": ((*TRACED, "graph.scope=partial", "graph.warmup_steps=2"), TRACED),
    "recomputed in graphs": ((*TRACED, "recompute.all=true"), TRACED),
}


@pytest.mark.usefixtures("unmeasured", "as_traced")
@pytest.mark.parametrize("name", slow_but([*WAYS], "recomputed", "captured", "layers"))
def test_compiled_captured_and_recomputed_runs_clip_alike(name, tmp_path, monkeypatch):
    words, like = WAYS[name]
    found = {}
    for way, more in {"own": words, "like": like, "eager": ()}.items():
        with monkeypatch.context() as patch:
            trainer = trainer_in(tmp_path / way, *RUN, *more)
            spoil_steps(patch, trainer, (4,))
            assert trainer.run() and trainer.optimizer.applied.item() == 5
        found[way] = final_state(tmp_path / way / "checkpoints", tmp_path / f"{way}_", *RUN)
    assert numbers(tmp_path / "own") == numbers(tmp_path / "like")
    assert_same_state(found["own"], found["like"])
    rows = [[row for row in metrics(tmp_path / way) if "max_logit" in row] for way in ("own", "eager")]
    for own, eager in zip(*rows, strict=True):
        assert own["max_logit"] == pytest.approx(eager["max_logit"], rel=1e-3)
    assert rows[1][0]["max_logit"] > 3.5


REFUSED = {
    "optim.name=adamw": "3.5 belongs to Muon, and optim.name=adamw; use optim.name=muon, or optim.qk_clip=0",
    "optim.qk_clip=2.7": "2.7 is not above 2.77, the log-sum-exp of data.seq_len=16 logits of 0; use",
    "model.qk_norm=true": "which model.qk_norm=true norms; use model.qk_norm=false",
    "model.layer=graphmoe.model.layer:MoELayer": "MoELayer bounds no logits for optim.qk_clip=3.5; use",
}


@pytest.mark.parametrize("word", REFUSED)
def test_what_has_no_logits_to_clip_is_refused(word):
    with pytest.raises(ConfigError, match=REFUSED[word]):
        check(config(*CLIP, *GQA, word))
