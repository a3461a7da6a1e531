"""Keys without effect, warnings about them and about unlikely values."""

import dataclasses
import math
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from graphmoe.config.choices import OPTIMIZERS, RUN_SINKS, RUN_WINDOWS
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


Row = tuple[object, str, str]
"""Keys as "section.key key key" that have no effect if the first value is true, and the reason."""


def without_effect(plan: Plan, num_ranks: int) -> Iterator[str]:
    """Yield a warning for each key that differs from its default but has no effect."""
    # not an error: a sweep may set such a key for some of its jobs
    for holds, named, because in (*_of_plan(plan, num_ranks), *_of_model(plan.config), *_of_run(plan.config)):
        section, _, keys = named.partition(".")
        given = getattr(plan.config, section)
        default = type(given)()
        for key in keys.split() if holds else ():
            if (value := getattr(given, key)) != getattr(default, key):
                yield f"{section}.{key}={spelled(value)} has no effect {because}"


def _of_plan(plan: Plan, num_ranks: int) -> Sequence[Row]:
    config, balance = plan.config, plan.config.moe.balance
    dispatcher = f"with moe.dispatcher={plan.dispatcher}"
    of_auto = "" if plan.fuses_experts else "auto makes no replicas without the pass fuse_experts"
    why = plan.no_replicas or of_auto or "use moe.balance=replicas"
    exact = "with moe.balance=replicas: all that can arrive has room"
    fsdp2, one_stage = config.parallel.dp_shard is not DpShard.zero1, plan.pipeline is None
    not_kept = "" if plan.fuses_experts else "without the pass fuse_experts: separate steps save them"
    if plan.recomputes_experts:
        not_kept = "if recompute covers moe_experts, which fetches them again"
    if plan.experts_in_fp8:
        not_kept = f"with precision.fp8={config.precision.fp8.value}: the backward reads other weight copies"
    return (
        (one_stage, "pipeline.schedule virtual_stages microbatches layout costs", "with parallel.pp=1"),
        (one_stage, "profile.pipeline", "with parallel.pp=1"),
        (not plan.reads_peers, "moe.receive_budget", dispatcher),
        (plan.dispatcher != "symm", "moe.transport", dispatcher),
        (balance is Balance.none, "moe.replica_slots replica_keep", f"with moe.balance=none: {why}"),
        (balance is not Balance.none and plan.exact_of, "moe.receive_budget", exact),
        (balance is Balance.replicas and not_kept, "moe.replica_keep", not_kept),
        (fsdp2, "checkpoint.replica_check", "with parallel.dp_shard=fsdp2: each rank holds other weights"),
        (num_ranks == 1, "checkpoint.replica_check", "with one rank"),
        (not fsdp2, "parallel.dp_shard_size", "with parallel.dp_shard=zero1"),
        (fsdp2, "optim.grad_shard", "with parallel.dp_shard=fsdp2, which shards gradients too"),
        (num_ranks == 1, "optim.bucket_mb grad_shard", "with one rank"),
    )


def _of_model(config: RunConfig) -> Sequence[Row]:
    model, delta_net = config.model, " ".join(DELTA_NET_KEYS)
    others = sorted(keys_of_others(model) - {*DELTA_NET_KEYS})
    scalings, experts = sorted(keys_of_other_scalings(model)), model.num_experts > 0
    backend, masks = model.attention_backend, masks_of_layers(model, seq_len_of(config))
    runs = any(not chunk and (not window or backend in RUN_WINDOWS) for window, chunk in masks)
    own = config.data.document_mask or not runs or (model.attention_sinks and backend not in RUN_SINKS)
    why = "with documents, windows or chunks in every layer, or sinks, which other kernels run"
    # a Hugging Face folder that turns the loss off has a coefficient too
    off = experts and model.aux_loss is AuxLoss.none and model.aux_loss_coef and not model.hf_family
    how = "model.aux_loss=micro_batch turns the loss on, model.aux_loss_coef=0 off"
    return (
        (others, f"model.{' '.join(others)}", f"with model.attention={model.attention}"),
        (not is_hybrid(model), f"model.{delta_net}", "with model.linear_attention=none"),
        (scalings, f"model.{' '.join(scalings)}", f"with model.rope_scaling={model.rope_scaling.value}"),
        (not experts, f"model.{' '.join(EXPERT_KEYS)}", "with model.num_experts=0"),
        (experts and own, "model.attention_backend", why),
        (experts and not model.selection_bias, "model.bias_update_rate", "with model.selection_bias=false"),
        (off, "model.aux_loss_coef", f"with model.aux_loss=none; {how}"),
        (experts and not model.mtp_depth, "model.mtp_loss_weight", "with model.mtp_depth=0"),
    )


def _of_run(config: RunConfig) -> Sequence[Row]:
    data, schedule, fp8, log = config.data, config.optim.schedule, config.precision.fp8, config.log
    stdlib, chat = data.source == "stdlib", data.source == "chat"
    alone = {*config.precision.fp8_products} == {"experts"}
    unscaled = fp8 is Fp8Recipe.none
    of_fp8 = "precision.fp8_products fp8_wgrad fp8_skip_layers fp8_measure"
    saves = "checkpoint.interval keep_last keep_every async_save mirror"
    return (
        (stdlib and data.tokenizer is None, "data.eod_token", "without data.tokenizer"),
        (stdlib and data.tokenizer is not None, "data.bpe_vocab_size", "with data.tokenizer"),
        (not stdlib and data.val_paths, "data.val_fraction", "with data.val_paths"),
        (data.hf_name and data.hf_val_split, "data.val_fraction", "with data.hf_val_split"),
        (chat and data.hf_name, "data.val_paths weights", "with data.hf_name"),
        (chat and not data.hf_name, "data.hf_config hf_split hf_val_split", "without data.hf_name"),
        (unscaled, of_fp8, "with precision.fp8=none"),
        (not unscaled and alone, "precision.fp8_wgrad", "with precision.fp8_products=[experts]"),
        (schedule in ("cosine", "constant"), "optim.wsd_decay_fraction", f"with optim.schedule={schedule}"),
        (schedule == "constant", "optim.min_lr_ratio", "with optim.schedule=constant"),
        (config.optim.name == "adamw", "optim.momentum", "with optim.name=adamw"),
        (not config.checkpoint.enabled, saves, "with checkpoint.enabled=false"),
        (config.graph.scope in ("none", None), "graph.warmup_steps", "with graph.scope=none"),
        (not config.host.manual_gc, "host.gc_interval", "with host.manual_gc=false"),
        (not log.wandb, "log.wandb_project", "with log.wandb=false"),
        (not log.mlflow, "log.mlflow_experiment", "with log.mlflow=false"),
        (not config.train.rerun, "train.spike_factor inject_fault", "with train.rerun=false"),
        (not config.profile.steps, "profile.ranks", "without profile.steps"),
    )
