"""Single values of the configuration as machines have them: types, texts, paths, numbers and their limits."""

from __future__ import annotations

import ctypes
import dataclasses
import math
import re
import typing
from collections.abc import Iterator

from graphmoe.config.schema import RunConfig, is_path

FP32 = """
    optim.lr optim.min_lr_ratio optim.beta1 optim.beta2 optim.eps optim.weight_decay train.clip_grad_norm
    model.norm_eps model.init_std model.rope_theta model.routed_scale model.yarn_factor model.yarn_mscale
    model.yarn_mscale_all_dim model.bias_update_rate model.aux_loss_coef model.z_loss_coef
    model.mtp_loss_weight
"""
MOST = {
    2000: "model.num_layers model.mtp_depth",  # each is an object of its own
    100_000: """
        parallel.dp parallel.tp parallel.cp parallel.pp parallel.ep parallel.etp launch.nproc launch.nodes
        launch.fake_world pipeline.virtual_stages pipeline.microbatches
    """,
    2**31 - 1: """
        model.vocab_size model.hidden_size model.dense_ffn_size model.num_heads model.num_kv_heads
        model.head_dim model.q_lora_rank model.kv_lora_rank model.qk_nope_head_dim model.qk_rope_head_dim
        model.v_head_dim model.yarn_original_context model.context_length model.num_experts model.top_k
        model.expert_ffn_size model.shared_ffn_size model.num_groups model.topk_groups data.seq_len
        train.global_batch_size train.micro_batch_size
    """,
}
"""The largest values of keys: above any run's, below those that take hours or all memory before it begins."""
LONGEST_NAME = 200
"""Bytes of a run's name: file systems take 255, and numbers and endings are added."""
PATHS = "checkpoint.resume_from checkpoint.init_from data.paths data.tokenizer data.val_paths sweep.resume"
BELOW_ONE = "optim.beta1 optim.beta2"
LARGEST_BELOW_ONE = 1 - 2**-24


def fp32_rules(config: RunConfig) -> Iterator[str]:
    """Values that become 0, infinite or 1 in fp32; those out of every range are left to other rules."""
    least, most = 2.0**-126, (2 - 2.0**-23) * 2.0**127
    for key in FP32.split():
        section, name = key.split(".")
        value = getattr(getattr(config, section), name)
        held = ctypes.c_float(value).value
        if not math.isfinite(value) or value == 0:
            continue
        if not least <= abs(held) <= most:
            rounded = "too small for" if abs(held) < least else "infinite in"
            yield f"{key}={value} is {rounded} fp32; use a number from {least:.2g} to {most:.2g}"
        elif key in BELOW_ONE.split() and value < 1 <= held:
            yield f"{key}={value} is 1 in fp32; use at most {LARGEST_BELOW_ONE:.8f}"


def integer_rules(config: RunConfig) -> Iterator[str]:
    """Integers of more than 64 bits, and those above what `MOST` says."""
    most = {key: limit for limit, keys in MOST.items() for key in keys.split()}
    for section in dataclasses.fields(config):
        if not dataclasses.is_dataclass(values := getattr(config, section.name)):
            continue
        for field in dataclasses.fields(values):
            key, found = f"{section.name}.{field.name}", getattr(values, field.name)
            for value in found if isinstance(found, list) else [found]:
                if not isinstance(value, int):
                    continue
                digits = str(value)
                shown = digits if len(digits) < 30 else f"{digits[:10]}...({len(digits)} digits)"
                if not -(2**63) <= value < 2**63:
                    yield f"{key}={shown} needs more than 64 bits; use at most {most.get(key, 2**63 - 1)}"
                elif value > most.get(key, value):
                    yield f"{key}={shown} is too large; use at most {most[key]}"


def item_rules(config: RunConfig) -> Iterator[str]:
    """Lists with items of another type than their own, and texts that UTF-8 has not: OmegaConf takes both."""
    for section, kind in typing.get_type_hints(RunConfig).items():
        for name, hint in typing.get_type_hints(kind).items() if dataclasses.is_dataclass(kind) else ():
            values = getattr(getattr(config, section), name)
            if typing.get_origin(hint) is list and any(type(v) is not hint.__args__[0] for v in values):
                wanted = {int: "whole numbers", str: "texts"}[hint.__args__[0]]
                yield f"{section}.{name}={values} must be a list of {wanted}"
            texts = values if isinstance(values, list) else [values]
            texts = [*values, *values.values()] if isinstance(values, dict) else texts
            if any(isinstance(text, str) and re.search("[\ud800-\udfff]", text) for text in texts):
                yield f"{section}.{name}={ascii(values)} has half a character; write it in UTF-8"


def path_rules(config: RunConfig) -> Iterator[str]:
    """Names that no folder of a run, and paths that no file, can have."""
    if config.run.name in ("", ".", "..") or set("/\\\0") & set(config.run.name):
        yield f"run.name='{config.run.name}' can name no folder; use one without slashes, as run.name=my-run"
    elif not config.run.name.isprintable() or len(config.run.name.encode()) > LONGEST_NAME:
        shown = ascii(config.run.name[:40])
        yield f"run.name={shown} names a folder: use at most {LONGEST_NAME} bytes, all of them printable"
    for key in PATHS.split():
        section, name = key.split(".")
        value = getattr(getattr(config, section), name) or []
        for path in [value] if isinstance(value, str) else value:
            if not is_path(path):
                yield f"{key}={ascii(path)[1:-1]} can name no file; use at most 255 bytes between slashes"


def divisors(number: int, most: int | None = None) -> list[int]:
    """Divisors of a positive number in order, up to ``most``."""
    below = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    found = sorted({*below, *(number // d for d in below)})
    return [d for d in found if most is None or d <= most]
