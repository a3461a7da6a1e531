"""Numbers of the configuration that the device has in fp32: there, too, they must be in their range."""

from __future__ import annotations

import ctypes
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
