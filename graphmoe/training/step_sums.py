"""Forced expert loads of a step; its losses and router statistics, summed over micro-batches and ranks."""

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from graphmoe.model.dispatch import has_load
from graphmoe.model.moe_segments import ROUTER_STATS, Router
from graphmoe.model.transformer import LossOutput, Transformer
from graphmoe.plan.forced_loads import LOADS, ends, load, read_counts, recorded
from graphmoe.plan.layout import Axis
from graphmoe.plan.pipeline.layouts import StagePieces
from graphmoe.plan.plan import Plan
from graphmoe.runtime.ranks import Mesh, sums
from graphmoe.training.step_rows import MASKED, OWN


class Totals(NamedTuple):
    """A step's sums over all ranks, without a device sync."""

    # mean losses, router statistics and attended keys; with replicas their number per micro-batch
    scalars: dict[str, Tensor]
    counts_LE: Tensor  # tokens of each expert
    # largest `graphmoe.plan.experts.Load` of any rank per MoE layer; None if buffers hold any routing
    received_L2: Tensor | None


class StepSums:
    """Sums of micro-batch outputs on the device. ``routers`` has the MoE layers' routers, by index."""

    def __init__(self, model: Transformer, routers: Mapping[int, Router], device: torch.device) -> None:
        self._model, self._routers = model, routers
        shape = model.num_moe_layers, model.config.num_experts
        self._received_L2 = torch.zeros(model.num_moe_layers, 2, dtype=torch.int32, device=device)
        self._replicas = torch.zeros((), dtype=torch.int64, device=device)
        self._names = "loss", "mtp_loss", *ROUTER_STATS, *(MASKED if model.end_token is not None else ())
        self._sums = torch.zeros(len(self._names), device=device)
        self._counts_LE = torch.zeros(shape, dtype=torch.int32, device=device)
        apart = any(router.counts_apart for router in model.routers())
        # slots that balance losses count
        self._counted_LE = torch.zeros_like(self._counts_LE) if apart else self._counts_LE

    def add(self, pieces: StagePieces, output: LossOutput) -> None:
        """Add a stage's output of one micro-batch."""
        model = self._model
        layers = model.moe_layers(pieces)
        stats = output.stats_L3.sum(dim=0) / max(model.num_moe_layers, 1)
        attended = [] if output.attended is None else [output.attended[None].float()]
        self._sums.add_(torch.cat([output.cross_entropy[None], output.mtp[None], stats, *attended]))
        self._counts_LE[layers.start : layers.stop] += output.counts_LE
        if output.counted_LE is not None:
            self._counted_LE[layers.start : layers.stop] += output.counted_LE
        if output.received_L2 is not None:
            most_L2 = self._received_L2[layers.start : layers.stop]
            most_L2.copy_(torch.maximum(most_L2, output.received_L2))
        if output.replicas is not None:
            self._replicas.add_(output.replicas)
        self._tell_routers(self._counted_LE, layers)

    def reduce(self, plan: Plan, mesh: Mesh) -> Totals:
        """Sum over ranks, one collective per process group."""
        self._tell_routers(torch.zeros_like(self._counts_LE), self._routers)
        # Ranks of cp and tp route parts of the same tokens, and have one loss.
        axes: list[tuple[Axis, Tensor]] = [("dp_pp", self._sums)]
        if has_counts := self._counts_LE.numel() > 0:
            axes.append(("world", self._counts_LE))
        if has_load(self._model.dispatcher):
            axes.append(("world", _one_of_all(self._received_L2, mesh)))
            if plan.replica_slots:
                axes.append(("world", self._replicas))
        total, *more = _summed(mesh, axes)
        counts_LE = more.pop(0) if has_counts else self._counts_LE
        means = total / plan.global_micro_batches
        scalars = dict(zip(self._names, means, strict=True))
        for name in MASKED if MASKED[0] in scalars else ():
            scalars[name] = scalars[name] / (plan.train.micro_batch_size * plan.seq_len)
        if plan.train.rerun:
            scalars[OWN[0]] = self._sums[0] / plan.num_micro_batches
        if len(more) > 1:  # each rank that shares a stage has counted those of its exchanges
            scalars["replicas"] = more[1] / (mesh.layout.size("stage") * plan.num_micro_batches)
        return Totals(scalars, counts_LE, more[0].amax(dim=0) if more else None)

    def _tell_routers(self, counts_LE: Tensor, layers: Iterable[int]) -> None:
        for layer in layers:
            if (router := self._routers[layer]).reads_earlier:
                router.earlier_counts.copy_(counts_LE[layer])


def _summed(mesh: Mesh, tensors: list[tuple[Axis, Tensor]]) -> list[Tensor]:
    groups = [mesh.group(axis) for axis, _ in tensors]
    found: dict[int, Tensor] = {}
    for group in dict.fromkeys(groups):
        together = [i for i, each in enumerate(groups) if each is group]
        found |= zip(together, sums(group, *(tensors[i][1] for i in together)), strict=True)
    return [found[i] for i in range(len(tensors))]


def _one_of_all(received_L2: Tensor, mesh: Mesh) -> Tensor:
    # [world, L, 2], zeros of other ranks: the sum over ranks has the loads of each
    after = mesh.layout.size("world") - 1 - mesh.rank
    return F.pad(received_L2.unsqueeze(0), (0, 0, 0, 0, mesh.rank, after))


class ForcedLoads:
    """Writes forced expert loads to each ``Router.load_ends`` in place: captured graphs hold its address."""

    def __init__(self, plan: Plan, routers: Mapping[int, Router]) -> None:
        name, sizes = plan.moe.expert_load, (plan.model.num_experts, plan.model.top_k)
        self._routers, self._now = routers, list[list[int]]()
        self._load: Callable[[int, int], list[float]] = (
            (lambda step, layer: load(name, step, layer, *sizes, plan.layout.ep))
            if name in LOADS
            else functools.partial(recorded, read_counts(name, sizes[0]), top_k=sizes[1])
        )

    def set(self, step: int) -> None:
        """Write the loads of a step, from 1, if they changed. No device sync."""
        ends_LE = [ends(self._load(step, layer)) for layer in self._routers]
        if ends_LE == self._now:
            return
        self._now, found = ends_LE, torch.tensor(ends_LE)
        for router, end_E in zip(self._routers.values(), found, strict=True):
            assert router.load_ends is not None
            # The pinned-memory allocator reuses it only after the copy is done.
            end_E = end_E.pin_memory() if router.load_ends.is_cuda else end_E
            router.load_ends.copy_(end_E, non_blocking=True)
