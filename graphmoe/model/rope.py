"""Rotary embedding, with YaRN as DeepSeek-V2 and V3 define it.

Sources: RoFormer (arXiv 2104.09864, section 3.4); YaRN (arXiv 2309.00071, sections 3.2 and 3.4); DeepSeek-V2
(arXiv 2405.04434, section 3.1.4) for mscale. Suffixes: B batch, S sequence, H heads, R rotated head size, P =
R / 2 rotation pairs.
"""

import math

import torch
from torch import Tensor

from graphmoe.config.schema import ModelConfig, RopeScaling


def rope_tables(config: ModelConfig, dim: int, seq_len: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return cosine and sine, scaled by `yarn_magnitude`: two fp32 [S, P]."""
    position_S = torch.arange(seq_len, device=device, dtype=torch.float32)
    angle_SP = torch.outer(position_S, inverse_frequencies(config, dim).to(device))
    magnitude = 1.0
    if config.rope_scaling is RopeScaling.yarn:
        magnitude = yarn_magnitude(config.yarn_factor, config.yarn_mscale)
        magnitude /= yarn_magnitude(config.yarn_factor, config.yarn_mscale_all_dim)
    return angle_SP.cos() * magnitude, angle_SP.sin() * magnitude


def inverse_frequencies(config: ModelConfig, dim: int) -> Tensor:
    """Return radians per position of each rotation pair, fp32 [dim / 2], on the CPU."""
    exponent_P = torch.arange(0, dim, 2, dtype=torch.float32) / dim
    kept_P = 1.0 / config.rope_theta**exponent_P
    if config.rope_scaling is RopeScaling.none:
        return kept_P
    low = math.floor(_pair_of_rotations(config, dim, config.yarn_beta_fast))
    high = math.ceil(_pair_of_rotations(config, dim, config.yarn_beta_slow))
    low, high = max(low, 0), min(high, dim - 1)
    pair_P = torch.arange(dim // 2, dtype=torch.float32)
    # if high < low no full rotation fits: the published codes keep every frequency then
    ramp_P = ((pair_P - low) / (high - low or 0.001)).clamp(0, 1)
    return kept_P * (1 - ramp_P) + kept_P / config.yarn_factor * ramp_P


def yarn_magnitude(factor: float, coefficient: float) -> float:
    """YaRN's attention scaling (mscale); 1 for factors up to 1."""
    return 1.0 if factor <= 1 else 0.1 * coefficient * math.log(factor) + 1.0


def attention_scale(config: ModelConfig, head_dim: int) -> float:
    """1 / sqrt(head size), times YaRN's squared magnitude."""
    scale = head_dim**-0.5
    if config.rope_scaling is RopeScaling.yarn:
        scale *= yarn_magnitude(config.yarn_factor, config.yarn_mscale_all_dim) ** 2
    return scale


def rotate_pairs(x_BSHR: Tensor, cos_SP: Tensor, sin_SP: Tensor) -> Tensor:
    """Rotate neighbouring elements (0, 1), (2, 3), ... as DeepSeek checkpoints store them."""
    a, b = x_BSHR.float().unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack(_rotate(a, b, cos_SP, sin_SP), dim=-1).flatten(-2).to(x_BSHR.dtype)


def rotate_halves(x_BSHR: Tensor, cos_SP: Tensor, sin_SP: Tensor) -> Tensor:
    """Rotate element i with element i + R / 2, as Qwen3 and Mixtral checkpoints store them."""
    a, b = x_BSHR.float().chunk(2, dim=-1)
    return torch.cat(_rotate(a, b, cos_SP, sin_SP), dim=-1).to(x_BSHR.dtype)


def _rotate(a: Tensor, b: Tensor, cos_SP: Tensor, sin_SP: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = cos_SP[:, None], sin_SP[:, None]
    return a * cos - b * sin, a * sin + b * cos


def _pair_of_rotations(config: ModelConfig, dim: int, rotations: float) -> float:
    turns = config.yarn_original_context / (rotations * 2 * math.pi)
    return dim * math.log(turns) / (2 * math.log(config.rope_theta))
