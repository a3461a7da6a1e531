"""Keys without effect, warnings about them and about unlikely values."""

import dataclasses
import math
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

from graphmoe.config.choices import OPTIMIZERS
from graphmoe.config.ranges import spelled
from graphmoe.config.schema import AuxLoss, Balance, DpShard, Fp8Recipe, MoEConfig, RopeScaling, RunConfig
from graphmoe.plan.attention import (
    DELTA_NET_KEYS,
    is_hybrid,
    keys_of_other_scalings,
    keys_of_others,
    masks_of_layers,
)
from graphmoe.plan.experts import EXPERT_KEYS
from graphmoe.plan.plan import Plan
from graphmoe.plan.rules.auto import OVERLAP, value_of
from graphmoe.plan.rules.parallel import seq_len_of

LARGE_LR = 10  # factor of ``model.peak_lr`` above which a learning rate is probably a mistake


def doubtful(config: RunConfig) -> Iterator[str]:
    """Yield a warning for each unlikely value, and how to confirm it."""
    model, lr, seq_len = config.model, config.optim.lr, seq_len_of(config)
    if config.optim.name in OPTIMIZERS.names and lr > LARGE_LR * model.peak_lr:
        yield (
            f"optim.lr={lr:g} is {lr / model.peak_lr:.0f} times the {model.peak_lr:g} that suits "
            f"model={model.name}; model.peak_lr={lr:g} says that it is meant"
        )
    warmup, steps = config.optim.warmup_steps, config.train.steps
    if warmup >= steps > 1:
        yield (
            f"optim.warmup_steps={warmup} is not less than train.steps={steps}: the learning rate only "
            f"rises, and optim.schedule has no effect; use optim.warmup_steps={steps // 10}"
        )
    reach = model.yarn_factor * model.yarn_original_context
    if model.rope_scaling is RopeScaling.yarn and seq_len > reach:
        yield (
            f"data.seq_len={seq_len} is beyond the {reach:.0f} tokens that model.yarn_factor="
            f"{model.yarn_factor:g} times model.yarn_original_context={model.yarn_original_context} reach; "
            f"use model.yarn_factor={math.ceil(seq_len / model.yarn_original_context)}"
        )


def of_experts(config: RunConfig, given: Collection[str] = ()) -> dict[str, Any]:
    """Return defaults of the keys that only MoE layers read and that a dense model sets.

    Keys of ``model`` count if they are among those ``given`` on the command line: a preset may have them.
    """
    if config.model.num_experts != 0:
        return {}
    default = RunConfig()
    keys = ["model.mtp_depth", *(key for name in EXPERT_KEYS if (key := f"model.{name}") in given)]
    keys += [f"moe.{field.name}" for field in dataclasses.fields(MoEConfig)]
    keys += ["parallel.ep", "parallel.etp", OVERLAP]
    decided = {"moe.dispatcher": "local", "moe.balance": "none", "moe.sync_free_stage": 0, OVERLAP: False}
    values = {key: value_of(default, key) for key in keys}
    return {k: value for k, value in values.items() if value_of(config, k) not in (value, decided.get(k))}


class _Unused(NamedTuple):
    section: str
    keys: Sequence[str]
    because: str


def without_effect(plan: Plan, num_ranks: int) -> Iterator[str]:
    """Yield a warning for each key that differs from its default but has no effect."""
    # not an error: a sweep may set such a key for some of its jobs
    for section, keys, because in _unused(plan, num_ranks):
        given = getattr(plan.config, section)
        default = type(given)()
        for key in keys:
            if (value := getattr(given, key)) != getattr(default, key):
                yield f"{section}.{key}={spelled(value)} has no effect {because}"


def _unused(plan: Plan, num_ranks: int) -> Iterator[_Unused]:
    config = plan.config
    if plan.pipeline is None:
        of_stages = ("schedule", "virtual_stages", "microbatches", "layout", "costs")
        yield _Unused("pipeline", of_stages, "with parallel.pp=1")
        yield _Unused("profile", ("pipeline",), "with parallel.pp=1")
    if not plan.reads_peers:
        yield _Unused("moe", ("receive_budget",), f"with moe.dispatcher={plan.dispatcher}")
    if plan.dispatcher != "symm":
        yield _Unused("moe", ("transport",), f"with moe.dispatcher={plan.dispatcher}")
    if config.moe.balance is Balance.none:
        of_auto = "" if plan.fuses_experts else "auto makes no replicas without the pass fuse_experts"
        why = plan.no_replicas or of_auto or "use moe.balance=replicas"
        yield _Unused("moe", ("replica_slots", "replica_keep"), f"with moe.balance=none: {why}")
    elif plan.exact_of:
        yield _Unused("moe", ("receive_budget",), "with moe.balance=replicas: all that can arrive has room")
    if config.moe.balance is Balance.replicas and plan.experts_in_fp8:
        recipe = config.precision.fp8.value
        yield _Unused(
            "moe", ("replica_keep",), f"with precision.fp8={recipe}: the backward reads other weight copies"
        )
    elif config.moe.balance is Balance.replicas and plan.recomputes_experts:
        yield _Unused("moe", ("replica_keep",), "if recompute covers moe_experts, which fetches them again")
    elif config.moe.balance is Balance.replicas and not plan.fuses_experts:
        yield _Unused("moe", ("replica_keep",), "without the pass fuse_experts: separate steps save them")
    if config.parallel.dp_shard is not DpShard.zero1:
        yield _Unused("optim", ("bucket_mb",), "with parallel.dp_shard=fsdp2")
    elif num_ranks == 1:
        yield _Unused("optim", ("bucket_mb",), "with one rank")
    yield from _of_model(config)
    yield from _of_run(config)


def _of_model(config: RunConfig) -> Iterator[_Unused]:
    model = config.model
    others = sorted(keys_of_others(model) - {*DELTA_NET_KEYS})
    yield _Unused("model", others, f"with model.attention={model.attention}")
    if not is_hybrid(model):
        yield _Unused("model", DELTA_NET_KEYS, "with model.linear_attention=none")
    scalings = sorted(keys_of_other_scalings(model))
    yield _Unused("model", scalings, f"with model.rope_scaling={model.rope_scaling.value}")
    if not model.num_experts:
        yield _Unused("model", EXPERT_KEYS, "with model.num_experts=0")
        return
    masked = not masks_of_layers(model, seq_len_of(config))[0, 0]
    if config.data.document_mask or masked or model.attention_sinks:
        why = "with documents, windows or chunks in every layer, or sinks, which have kernels of their own"
        yield _Unused("model", ("attention_backend",), why)
    if not model.selection_bias:
        yield _Unused("model", ("bias_update_rate",), "with model.selection_bias=false")
    # a Hugging Face folder that turns the loss off has a coefficient too
    if model.aux_loss is AuxLoss.none and model.aux_loss_coef and not model.hf_family:
        how = "model.aux_loss=micro_batch turns the loss on, model.aux_loss_coef=0 off"
        yield _Unused("model", ("aux_loss_coef",), f"with model.aux_loss=none; {how}")
    if not model.mtp_depth:
        yield _Unused("model", ("mtp_loss_weight",), "with model.mtp_depth=0")


def _of_run(config: RunConfig) -> Iterator[_Unused]:
    data, schedule = config.data, config.optim.schedule
    if data.source == "stdlib" and data.tokenizer is None:
        yield _Unused("data", ("eod_token",), "without data.tokenizer")
    elif data.source == "stdlib":
        yield _Unused("data", ("bpe_vocab_size",), "with data.tokenizer")
    if data.source != "stdlib" and data.val_paths:
        yield _Unused("data", ("val_fraction",), "with data.val_paths")
    if data.source == "hf" and data.hf_val_split:
        yield _Unused("data", ("val_fraction",), "with data.hf_val_split")
    if config.precision.fp8 is Fp8Recipe.none:
        yield _Unused(
            "precision",
            ("fp8_products", "fp8_wgrad", "fp8_skip_layers", "fp8_measure"),
            "with precision.fp8=none",
        )
    elif set(config.precision.fp8_products) == {"experts"}:
        yield _Unused("precision", ("fp8_wgrad",), "with precision.fp8_products=[experts]")
    if schedule in ("cosine", "constant"):
        yield _Unused("optim", ("wsd_decay_fraction",), f"with optim.schedule={schedule}")
    if schedule == "constant":
        yield _Unused("optim", ("min_lr_ratio",), "with optim.schedule=constant")
    if config.optim.name == "adamw":
        yield _Unused("optim", ("momentum",), "with optim.name=adamw")
    if not config.checkpoint.enabled:
        keys = ("interval", "keep_last", "keep_every", "async_save")
        yield _Unused("checkpoint", keys, "with checkpoint.enabled=false")
    if config.graph.scope in ("none", None):
        yield _Unused("graph", ("warmup_steps",), "with graph.scope=none")
    if not config.host.manual_gc:
        yield _Unused("host", ("gc_interval",), "with host.manual_gc=false")
    if not config.log.wandb:
        yield _Unused("log", ("wandb_project",), "with log.wandb=false")
    if not config.log.mlflow:
        yield _Unused("log", ("mlflow_experiment",), "with log.mlflow=false")
    if not config.profile.steps:
        yield _Unused("profile", ("ranks",), "without profile.steps")
