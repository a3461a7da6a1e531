"""Build models and initialize their weights."""

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from graphmoe.config.schema import ModelConfig, MoEConfig
from graphmoe.model.moe_segments import Experts
from graphmoe.model.transformer import Transformer
from graphmoe.ops.dispatch import Dispatcher
from graphmoe.plan.layout import ALONE, Layout, ParameterLayout, layout_of, own_part
from graphmoe.plan.pipeline.layouts import StagePieces

ZERO = (".biases.", "gate.bias", ".lora_B")
"""Parts of names of parameters that are 0 at first."""


def build_model(
    config: ModelConfig,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    seed: int | None = 0,
    execution: MoEConfig | None = None,
    layout: Layout = ALONE,
    rank: int = 0,
    dispatcher: Dispatcher | None = None,
    stages: Sequence[StagePieces] = (),
) -> Transformer:
    """Build a rank's part of the model on ``device``; without ``stages`` it has all layers.

    The router's bias and counts stay fp32. ``seed=None`` leaves weights unset. Without a dispatcher the rank
    must hold all experts. Sharded layers need ``graphmoe.ops.collectives.use_groups`` before they run.
    """
    with torch.device("meta"):
        model = Transformer(config, execution or MoEConfig(), layout, dispatcher, stages)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    if torch.device(device).type != "meta":
        materialise(model, device)
        if seed is not None:
            init_weights(model, config.init_std, seed, layout, rank)
    return model


@torch.no_grad()
def materialise(module: nn.Module, device: torch.device | str, *, allocates: bool = True) -> None:
    """Allocate parameters (unset) and buffers (zeros) of a meta module; ties stay tied.

    Without ``allocates``, a parameter gets its shape and device, but the memory of one element.
    """
    made: dict[Tensor, Tensor] = {}
    for part in module.modules():
        for name, old in [*part.named_parameters(recurse=False), *part.named_buffers(recurse=False)]:
            if old not in made and isinstance(old, nn.Parameter):
                one = torch.empty((), dtype=old.dtype, device=device).expand(old.shape)
                data = torch.empty_like(old, device=device) if allocates else one
                made[old] = nn.Parameter(data, old.requires_grad)
                made[old].parallel = layout_of(old)  # type: ignore[attr-defined]
            elif old not in made:
                made[old] = torch.zeros_like(old, device=device)
            setattr(part, name, made[old])


@torch.no_grad()
def init_weights(
    model: nn.Module,
    std: float,
    seed: int,
    layout: Layout = ALONE,
    rank: int = 0,
    only: Collection[Tensor] | None = None,
) -> None:
    """Fill matrices with N(0, std), norms with 1, biases with 0, in place. ``only``: parameters to fill.

    Delta nets: decay rates are U(0.01, 16), the bias of steps is 1. LoRA: B is 0, A is U(-k^-0.5, k^-0.5) for
    k inputs.
    """
    # Each parameter and routed expert has its own generator, seeded by name: weights do not depend on each
    # other. Sharded ones are drawn whole and cut: they do not depend on the layout either.
    norms = {m.weight for m in model.modules() if isinstance(m, nn.RMSNorm)}
    experts = {p for m in model.modules() if isinstance(m, Experts) for p in m.parameters()}
    for name, parameter in model.named_parameters():
        if only is not None and parameter not in only:
            continue
        if parameter in norms or name.endswith("dt_bias_V"):
            parameter.fill_(1.0)
        elif layout_of(parameter).is_bias or any(part in name for part in ZERO):
            parameter.zero_()
        elif parameter in experts:
            _init_experts(parameter, name, std, seed, layout, rank)
        else:
            is_rate, generator = name.endswith("log_rate_V"), _generator(parameter, seed, name)
            own_std = 1.0 if is_rate else None if ".lora_A" in name else std
            _init_part(parameter, layout_of(parameter), generator, own_std, layout, rank)
            if is_rate:  # the rate is uniform from 0.01 to 16
                parameter.copy_(torch.special.ndtr(parameter.float()).mul_(15.99).add_(0.01).log_())


def _init_experts(parameter: Tensor, name: str, std: float, seed: int, layout: Layout, rank: int) -> None:
    # ranks that share an expert (etp) draw the whole matrix and keep their part
    _, *cuts = layout_of(parameter).cuts or (None,)
    of_one = ParameterLayout(tuple(replace(cut, dim=cut.dim - 1) for cut in cuts))
    first = layout.index("ep", rank) * len(parameter)
    for local, part in enumerate(parameter):
        generator = _generator(parameter, seed, f"{name} {first + local}")
        _init_part(part, of_one, generator, None if ".lora_A" in name else std, layout, rank)


def _init_part(
    part: Tensor, parallel: ParameterLayout, generator: torch.Generator, std: float | None, layout: Layout,
    rank: int,
) -> None:  # fmt: skip
    shape = list(part.shape)
    for cut in parallel.cuts:
        shape[cut.dim] *= layout.size(cut.axis)
    whole = part.new_empty(shape) if parallel.cuts else part
    if std is None:  # A of LoRA: Kaiming's uniform distribution with a = sqrt(5), as PEFT draws it
        whole.uniform_(-(shape[-1] ** -0.5), shape[-1] ** -0.5, generator=generator)
    else:
        whole.normal_(0.0, std, generator=generator)
    if parallel.cuts:
        part.copy_(own_part(whole, parallel, layout, rank))


def _generator(like: Tensor, seed: int, name: str) -> torch.Generator:
    # a hash, since torch's CPU generator reads only the low 32 bits of a seed
    digest = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=8).digest()
    return torch.Generator(device=like.device).manual_seed(int.from_bytes(digest, "little"))
