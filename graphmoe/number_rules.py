"""Numbers of the configuration as the device has them, in fp32 or 64 bits: in range there too."""

from __future__ import annotations

import ctypes
import dataclasses
import math
from collections.abc import Iterator

import torch

from graphmoe.config import RunConfig

FP32 = """
    optim.lr optim.min_lr_ratio optim.beta1 optim.beta2 optim.eps optim.weight_decay train.clip_grad_norm
    model.norm_eps model.init_std model.rope_theta model.routed_scale model.yarn_factor model.yarn_mscale
    model.yarn_mscale_all_dim model.bias_update_rate model.aux_loss_coef model.z_loss_coef
    model.mtp_loss_weight
"""
BELOW_ONE = "optim.beta1 optim.beta2"
LARGEST_BELOW_ONE = 1 - 2**-24


def fp32_rules(config: RunConfig) -> Iterator[str]:
    """Values that become 0, infinite or 1 in fp32; those out of every range are left to other rules."""
    least, most = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max
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
    """Integers of more than 64 bits."""
    for section in dataclasses.fields(config):
        if not dataclasses.is_dataclass(values := getattr(config, section.name)):
            continue
        for field in dataclasses.fields(values):
            value = getattr(values, field.name)
            if isinstance(value, int) and not -(2**63) <= value < 2**63:
                key, digits = f"{section.name}.{field.name}", str(value)
                shown = digits if len(digits) < 30 else f"{digits[:10]}...({len(digits)} digits)"
                yield f"{key}={shown} needs more than 64 bits; use at most {2**63 - 1}"
