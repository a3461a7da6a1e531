"""The models, in plain PyTorch. They know nothing of compilation, capture or parallelism."""

from __future__ import annotations

import hashlib

import torch
from torch import nn

from graphmoe.config import ModelConfig, MoEConfig
from graphmoe.model.transformer import LossOutput, Transformer

__all__ = ["LossOutput", "Transformer", "build_model", "init_weights"]


def build_model(
    config: ModelConfig,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    seed: int | None = 0,
    execution: MoEConfig | None = None,
) -> Transformer:
    """The model of the configuration, built on the meta device and filled on ``device``.

    Parameters have ``dtype``; the router's bias and counts stay fp32. ``seed=None`` leaves the weights
    unset, for a caller that loads them.
    """
    with torch.device("meta"):
        model = Transformer(config, execution or MoEConfig())
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    if torch.device(device).type != "meta":
        model.to_empty(device=device)
        for buffer in model.buffers():
            buffer.zero_()
        if seed is not None:
            init_weights(model, config.init_std, seed)
    return model


@torch.no_grad()
def init_weights(model: nn.Module, std: float, seed: int) -> None:
    """Fill matrices with N(0, std) and norms with 1, in place.

    Each parameter has a generator of its own, seeded by its name and ``seed``: a weight does not depend
    on which other weights exist.
    """
    norms = {m.weight for m in model.modules() if isinstance(m, nn.RMSNorm)}
    for name, parameter in model.named_parameters():
        if parameter in norms:
            parameter.fill_(1.0)
            continue
        generator = torch.Generator(device=parameter.device)
        # A hash, since torch's CPU generator reads only the low 32 bits of what it is given.
        digest = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=8).digest()
        generator.manual_seed(int.from_bytes(digest, "little"))
        parameter.normal_(0.0, std, generator=generator)
