"""QK-clip (Kimi-K2, arXiv 2507.20534, section 2.1): scale query and key weights of heads with large logits.

The bound of a head's logits is its largest log-sum-exp, which attention computes anyway. Suffixes: L layers,
those of multi-token prediction last, H query heads, G groups of heads that share keys, R rows of a head.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from graphmoe.model.attention import GroupedQueryAttention, LatentAttention
from graphmoe.model.layer import LOGIT_BOUND, DenseLayer, MoELayer, MtpLayer
from graphmoe.model.transformer import Transformer
from graphmoe.optim.flat_buffers import Family
from graphmoe.plan.attention import attention_facts
from graphmoe.runtime.ranks import Mesh
from graphmoe.segments import Executor, Segment

Powers = dict[str, list[float]]  # by parameter: for each row of a head, the power of the logits' factor


def logit_powers(attn: nn.Module) -> Powers:
    """Return the powers that together scale a head's logits by a factor; none for attention without logits.

    Of a rotary part that all heads of MLA share, the whole factor is in the queries.
    """
    if isinstance(attn, LatentAttention):
        nope, rope, value = attn.sizes
        queries = "q_up" if hasattr(attn, "q_up") else "q_proj"
        of_queries, of_keys = [0.5] * nope + [1.0] * rope, [0.5] * nope + [0.0] * value
        return {f"{queries}.weight": of_queries, "kv_up.weight": of_keys}
    if not isinstance(attn, GroupedQueryAttention):
        return {}
    of_keys = [0.5] * attn.head_dim
    powers = {"q": of_keys + [0.0] * attn.head_dim * attn.gated, "k": of_keys}
    weights = {f"{name}_proj.weight": each for name, each in powers.items()}
    return weights | {f"biases.{name}": powers[name] for name in powers if name in attn.biases}


class _Rows(NamedTuple):
    """Rows of a parameter that this rank owns."""

    main: Tensor  # master weights [rows, columns]
    rounded: Tensor | None
    first: int
    layer: int
    power_R: Tensor
    num_heads: int


class QkClip:
    """Bounds of a step's logits, and the weights that it scales. No device sync."""

    def __init__(self, model: nn.Module, families: Sequence[Family], mesh: Mesh, threshold: float) -> None:
        """Attention layers of ``model`` return their bounds from now on."""
        assert isinstance(model, Transformer)
        self.threshold, self.group = threshold, mesh.group("world")
        num_heads = model.config.num_heads
        self._groups = attention_facts(model.config).kv_heads or num_heads
        shape = len(model.layers) + len(model.mtp), num_heads
        self.bound_LH = torch.full(shape, -torch.inf, device=families[0].main.device)
        powers: dict[str, tuple[int, list[float]]] = {}
        for index, prefix, layer in _layers(model):
            if of_layer := logit_powers(layer.attn):
                layer.attn.attend = replace(layer.attn.attend, bounds=True)  # type: ignore[type-var]
                layer.attn_writes = (*layer.attn_writes, LOGIT_BOUND)
            powers |= {f"{prefix}.attn.{name}": (index, power) for name, power in of_layer.items()}
        self._rows = [rows for family in families for rows in _rows_of(family, powers)]

    def execute(
        self,
        execute: Executor,
        segments: Sequence[Segment],
        tensors: dict[str, Tensor],
        keep: tuple[str, ...],
    ) -> tuple[Tensor, ...]:
        """Run segments; keep the largest bounds, except those of a validation."""
        layers = [segment.layer for segment in segments if LOGIT_BOUND in segment.writes]
        if not layers:
            return execute(segments, tensors, keep)
        *results, bound_H = execute(segments, tensors, (*keep, LOGIT_BOUND))
        if torch.is_grad_enabled():
            largest_H = self.bound_LH[layers[0]]
            largest_H.copy_(torch.maximum(largest_H, bound_H))
        return tuple(results)

    @torch.no_grad()
    def apply(self, done: Tensor) -> Tensor:
        """Scale the updated weights if ``done`` is 1.0; return the largest bound, fp32 []. A collective."""
        if self.group is not None:
            dist.all_reduce(self.bound_LH, dist.ReduceOp.MAX, group=self.group)
        # a step with a bound that is not finite is skipped, but whatever happens no weight may become NaN
        clips_LH = (done > 0) & torch.isfinite(self.bound_LH) & (self.bound_LH > self.threshold)
        factor_LH = torch.where(clips_LH, self.threshold / self.bound_LH, 1.0)
        factor_LG = factor_LH.unflatten(1, (self._groups, -1)).amin(dim=2)
        for main, rounded, first, layer, power_R, num_heads in self._rows:
            factor_H = factor_LG[layer].repeat_interleave(num_heads // self._groups)
            factors = (factor_H[:, None] ** power_R).flatten()  # exactly 1 for the power 0 and the factor 1
            main.mul_(factors[first : first + len(main), None])
            if rounded is not None:
                rounded.copy_(main)
        largest = self.bound_LH.max()
        self.bound_LH.fill_(-torch.inf)
        return largest


def _layers(model: Transformer) -> Iterator[tuple[int, str, DenseLayer | MoELayer]]:
    for index, layer in enumerate((*model.layers, *model.mtp)):
        prefix = f"layers.{index}"
        if isinstance(layer, MtpLayer):
            prefix, layer = f"mtp.{index - len(model.layers)}.layer", layer.layer
        if isinstance(layer, DenseLayer | MoELayer):  # not of another pipeline rank
            yield index, prefix, layer


def _rows_of(family: Family, powers: dict[str, tuple[int, list[float]]]) -> Iterator[_Rows]:
    rounds, rounded = family.weight_shard is not family.main, family.owned(family.weight_shard)
    shapes = {name: weight.shape for name, weight in zip(family.names, family.weights, strict=True)}
    for name, (start, main) in family.owned(family.main).items():
        if name not in powers:
            continue
        (layer, power), (rows, *rest) = powers[name], shapes[name]
        columns = rest[0] if rest else 1
        own = [each.view(-1, columns) for each in (main, rounded[name][1])]
        power_R = torch.tensor(power, device=main.device)
        yield _Rows(own[0], own[1] if rounds else None, start // columns, layer, power_R, rows // len(power))
