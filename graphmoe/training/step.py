"""One optimizer step as a function of its micro-batches."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from graphmoe.model.dispatch import has_load
from graphmoe.model.moe import ROUTER_STATS, Router, update_selection_bias
from graphmoe.model.transformer import LossOutput
from graphmoe.ops.dispatch import Dispatcher
from graphmoe.optim.base import StepOptimizer
from graphmoe.plan.forced_loads import LOADS, NO_LOAD, ends, load, read_counts, recorded
from graphmoe.plan.layout import Axis
from graphmoe.plan.pipeline.layouts import StagePieces
from graphmoe.plan.plan import Plan
from graphmoe.runtime.ranks import Mesh, sums
from graphmoe.segments import profiler_range
from graphmoe.training.micro_batches import OneAfterTheOther, one_of_all, rooms_of
from graphmoe.training.step_rows import device_row


class ForcedLoads:
    """Loads of ``moe.expert_load``, which routers read from a buffer of the same address in each step."""

    def __init__(self, plan: Plan, routers: Mapping[int, Router]) -> None:
        moe, model = plan.config.moe, plan.config.model
        self._name, self._ranks, self._routers = moe.expert_load, plan.layout.ep, routers
        self._sizes = model.num_experts, model.top_k
        recorded = moe.expert_load not in LOADS
        self._counts = read_counts(moe.expert_load, model.num_experts) if recorded else None
        self._now: list[list[int]] = []

    def set(self, step: int) -> None:
        """Store the loads of a step, counted from 1, if they are others. No device sync."""
        ends_LE = [ends(self._load(step, layer)) for layer in self._routers]
        if ends_LE == self._now:
            return
        self._now, found = ends_LE, torch.tensor(ends_LE)
        for router, end_E in zip(self._routers.values(), found, strict=True):
            assert router.load_ends is not None
            # The allocator of pinned memory lends it to nobody before the copy has been made.
            end_E = end_E.pin_memory() if router.load_ends.is_cuda else end_E
            router.load_ends.copy_(end_E, non_blocking=True)

    def _load(self, step: int, layer: int) -> list[float]:
        if self._counts is not None:
            return recorded(self._counts, step, layer, self._sizes[1])
        return load(self._name, step, layer, *self._sizes, self._ranks)


class TrainStep:
    """Forward and backward of every micro-batch, the optimizer's update, the routers' bias, the metrics.

    Each data-parallel rank does its micro-batches; gradients, losses and expert loads are summed over ranks
    before anything is made of them, so that all come to the same weights and return the same row.

    Where more arrives at any rank than its dispatcher has room for, the step is void, and so are all after it
    until ``optimizer.void`` is taken back: they change nothing that a later step or a checkpoint reads.

    It leaves the host as it was but for the batches that it takes, and never waits for the device where no
    dispatcher does, so a graph can hold it.
    """

    def __init__(
        self,
        plan: Plan,
        optimizer: StepOptimizer,
        micro_batches: OneAfterTheOther,
        mesh: Mesh,
        backends: str = "",
    ) -> None:
        """``backends`` are those of the fused experts, of which metrics tell the bytes of replicas."""
        self.plan, self.optimizer, self.micro_batches, self.mesh = plan, optimizer, micro_batches, mesh
        self._replica_gb = plan.replica_bytes(backends) / 1e9
        self.model = model = micro_batches.model
        layers = [layer for stage in model.stages for layer in model.moe_layers(stage)]
        self.routers = dict(zip(layers, model.routers(), strict=True))
        """Routers of this rank, by their place among all MoE layers of the model."""
        self._rooms_of: tuple[Dispatcher, ...] = ()
        self._rooms_L2: Tensor
        self.loads = ForcedLoads(plan, self.routers) if plan.config.moe.expert_load != NO_LOAD else None

    def prepare(self, step: int) -> None:
        """Set what the host sets outside of graphs before a step, counted from 1."""
        if self.loads:
            self.loads.set(step)

    def __call__(self, batches: Iterable[Tensor]) -> Tensor:
        """Map token ids [micro_batch_size, seq_len + 1] of each own micro-batch to a row of ``StepRows``."""
        scales = self.optimizer.scales
        if scales:
            scales.begin()
        scalars, counts_LE, received_L2 = self.accumulate(batches)
        if received_L2 is not None:
            scalars |= self._received(received_L2)
        with profiler_range("optimizer", "update"):
            result = self.optimizer.step(scalars["loss"])
            if scales:
                scales.update(result.finite)
        if self.plan.config.model.selection_bias:
            rate = self.plan.config.model.bias_update_rate
            for layer, router in self.routers.items():
                update_selection_bias(router.selection_bias, counts_LE[layer], rate, result.finite)
        scalars |= {"grad_norm": result.grad_norm, "lr": result.lr, "skipped": 1 - result.finite}
        scalars |= {"skipped_total": self.optimizer.skipped, "longest_skip": self.optimizer.longest_skip}
        return device_row(scalars, counts_LE, self.mesh.layout.ep, received_L2)

    def accumulate(self, batches: Iterable[Tensor]) -> tuple[dict[str, Tensor], Tensor, Tensor | None]:
        """Run every own micro-batch -> mean losses, expert loads, and the receive loads.

        Of all ranks: expert loads are summed; a receive load is the most that arrived anywhere at once in a
        MoE layer, a `graphmoe.plan.experts.Load`. There are none, but None, where no room is planned.
        """
        model = self.model
        shape, device = (model.num_moe_layers, model.config.num_experts), self.micro_batches.device
        received_L2 = torch.zeros(model.num_moe_layers, 2, dtype=torch.int32, device=device)
        replicas = torch.zeros((), dtype=torch.int64, device=device)
        losses = torch.zeros(2 + len(ROUTER_STATS), device=device)
        counts_LE = torch.zeros(shape, dtype=torch.int32, device=device)
        apart = any(router.counts_apart for router in model.routers())
        counted_LE = torch.zeros_like(counts_LE) if apart else counts_LE  # slots that balance losses count

        def add(pieces: StagePieces, output: LossOutput) -> None:
            layers = model.moe_layers(pieces)
            stats = output.stats_L3.sum(dim=0) / max(model.num_moe_layers, 1)
            losses.add_(torch.cat([output.cross_entropy[None], output.mtp[None], stats]))
            counts_LE[layers.start : layers.stop] += output.counts_LE
            if output.counted_LE is not None:
                counted_LE[layers.start : layers.stop] += output.counted_LE
            if output.received_L2 is not None:
                most_L2 = received_L2[layers.start : layers.stop]
                most_L2.copy_(torch.maximum(most_L2, output.received_L2))
            if output.replicas is not None:
                replicas.add_(output.replicas)
            self._tell_routers(counted_LE, layers)

        self.optimizer.start_gather()
        self.micro_batches.train(batches, add)
        self._tell_routers(torch.zeros_like(counts_LE), self.routers)
        # Ranks of cp and tp route parts of the same tokens, and have one loss.
        axes: list[tuple[Axis, Tensor]] = [("dp_pp", losses), ("world", counts_LE)]
        if has_load(model.dispatcher):
            axes.append(("world", one_of_all(received_L2, self.mesh)))
            if self.plan.replica_slots:
                axes.append(("world", replicas))
        total, slots_LE, *more = self._summed(axes)
        means = total / self.plan.global_micro_batches
        named = dict(zip(("loss", "mtp_loss", *ROUTER_STATS), means, strict=True))
        if len(more) > 1:  # each rank that shares a stage has counted those of its exchanges
            named["replicas"] = more[1] / (self.mesh.layout.size("stage") * self.plan.num_micro_batches)
            named["replica_gb"] = named["replicas"] * self._replica_gb
        return named, slots_LE, more[0].amax(dim=0) if more else None

    def _summed(self, tensors: list[tuple[Axis, Tensor]]) -> list[Tensor]:
        """Sum each over the ranks of its axis; tensors of the same ranks are sent together."""
        groups = [self.mesh.group(axis) for axis, _ in tensors]
        found: dict[int, Tensor] = {}
        for group in dict.fromkeys(groups):
            together = [i for i, each in enumerate(groups) if each is group]
            found |= zip(together, sums(group, *(tensors[i][1] for i in together)), strict=True)
        return [found[i] for i in range(len(tensors))]

    def _received(self, received_L2: Tensor) -> dict[str, Tensor]:
        """Return the loads of ranks as ``device_row`` names them; the step is void if a layer lacks room."""
        dispatchers, void = self.model.dispatchers, self.optimizer.void
        if dispatchers[0].capacity is not None:
            if self._rooms_of != dispatchers:  # before any capture: each program runs uncaptured first
                self._rooms_of, self._rooms_L2 = dispatchers, rooms_of(dispatchers, void.device)
            void.copy_(torch.maximum(void, (received_L2 > self._rooms_L2).any().float()))
        rows, slots = received_L2.amax(dim=0).unbind()
        of_mean = slots / self.plan.balanced.slots
        load = {"receive_load": torch.maximum(rows / self.plan.balanced.rows, of_mean), "void": void}
        return load | ({"planned_rank_load": of_mean} if self.plan.replica_slots else {})

    def _tell_routers(self, counts_LE: Tensor, layers: Iterable[int]) -> None:
        for layer in layers:
            if (router := self.routers[layer]).reads_earlier:
                router.earlier_counts.copy_(counts_LE[layer])
