"""One optimizer step as a function of its micro-batches: all that the device does."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

from graphmoe.config import AuxLoss, RunConfig
from graphmoe.layout import Axis
from graphmoe.model.moe import ROUTER_STATS
from graphmoe.model.transformer import LossOutput, Transformer
from graphmoe.optim import update_selection_bias
from graphmoe.receive_budget import balanced_load, routed_tokens
from graphmoe.segments import Executor
from graphmoe.step_optimizer import StepOptimizer
from graphmoe.step_rows import RECEIVED, device_row
from graphmoe.world import sums
from runtime.mesh import Mesh
from runtime.overlap.runner import Overlap


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
        config: RunConfig,
        model: Transformer,
        optimizer: StepOptimizer,
        execute: Executor,
        mesh: Mesh,
        overlap: Overlap | None = None,
    ) -> None:
        """``execute`` is ``optimizer.executor``'s; it runs units by ``overlap``, if that is given."""
        self.config, self.model, self.optimizer, self.execute = config, model, optimizer, execute
        self.mesh, self.overlap = mesh, overlap
        self.routers = model.routers()
        self.global_micro_batches = config.train.global_batch_size // config.train.micro_batch_size
        self.num_micro_batches = self.global_micro_batches // mesh.layout.dp
        """Of this rank."""
        self.device = next(model.parameters()).device
        self.balanced = balanced_load(config.model, mesh.layout, routed_tokens(config, mesh.layout))

    def __call__(self, batches: Iterable[Tensor]) -> Tensor:
        """Token ids [micro_batch_size, seq_len + 1] of each own micro-batch -> a row of ``StepRows``."""
        scalars, counts_LE, load_2 = self.accumulate(batches)
        if load_2 is not None:
            scalars |= self._received(load_2)
        result = self.optimizer.step(scalars["loss"])
        if self.config.model.selection_bias:
            rate = self.config.model.bias_update_rate
            for router, counts_E in zip(self.routers, counts_LE, strict=True):
                update_selection_bias(router.selection_bias, counts_E, rate, result.finite)
        scalars |= {"grad_norm": result.grad_norm, "lr": result.lr, "skipped": 1 - result.finite}
        scalars |= {"skipped_total": self.optimizer.skipped, "longest_skip": self.optimizer.longest_skip}
        return device_row(scalars, counts_LE, self.mesh.layout.ep)

    def accumulate(self, batches: Iterable[Tensor]) -> tuple[dict[str, Tensor], Tensor, Tensor | None]:
        """Forward and backward of every own micro-batch -> mean losses, expert loads, and the receive load.

        Of all ranks: expert loads are summed; the receive load is the most that arrived anywhere at once, a
        `graphmoe.receive_budget.Load`, or None where no room is planned.
        """
        losses = torch.zeros(2 + len(ROUTER_STATS), device=self.device)
        counts_LE = torch.zeros(
            len(self.routers), self.config.model.num_experts, dtype=torch.int32, device=self.device
        )
        load_2: Tensor | None = None
        self.optimizer.start_gather()
        for tokens in batches:
            tokens = tokens.to(self.device, non_blocking=True)
            output = self._forward_and_backward(tokens)
            stats = output.stats_L3.mean(dim=0) if self.routers else output.stats_L3.new_zeros(3)
            losses += torch.cat([output.cross_entropy[None], output.mtp[None], stats])
            counts_LE += output.counts_LE
            if output.load_2 is not None:
                load_2 = output.load_2 if load_2 is None else torch.maximum(load_2, output.load_2)
            self._tell_routers(counts_LE)
        if overlap := self._overlap_in_use:
            overlap.finish()
        self._tell_routers(torch.zeros_like(counts_LE))
        # Ranks of cp and tp route parts of the same tokens, and have one loss.
        axes: list[tuple[Axis, Tensor]] = [("dp", losses), ("stage", counts_LE)]
        if load_2 is not None:
            axes.append(("world", one_of_all(load_2, self.mesh)))
        losses, counts_LE, *loads = self._summed(axes)
        named = zip(("loss", "mtp_loss", *ROUTER_STATS), losses / self.global_micro_batches, strict=True)
        return dict(named), counts_LE, loads[0].amax(dim=0) if loads else None

    def _forward_and_backward(self, tokens: Tensor) -> LossOutput:
        """Of one micro-batch; with overlap the backward may still have to run when this returns."""

        def forward() -> LossOutput:
            return self.model.loss(tokens[:, :-1], tokens[:, 1:], self.execute)

        overlap = self._overlap_in_use
        output = overlap.forward(forward) if overlap else forward()
        total = output.total / self.global_micro_batches
        if overlap:
            overlap.backward(total)
        else:
            total.backward()
        return output

    @property
    def _overlap_in_use(self) -> Overlap | None:
        """None where the host counts what arrives: then units are no graphs, and it would wait in between."""
        dispatcher = self.model.dispatcher
        return self.overlap if dispatcher is not None and dispatcher.capacity is not None else None

    def _summed(self, tensors: list[tuple[Axis, Tensor]]) -> list[Tensor]:
        """Each summed over the ranks of its axis; what travels over the same ranks does so together."""
        groups = [self.mesh.group(axis) for axis, _ in tensors]
        found: dict[int, Tensor] = {}
        for group in dict.fromkeys(groups):
            together = [i for i, each in enumerate(groups) if each is group]
            found |= zip(together, sums(group, *(tensors[i][1] for i in together)), strict=True)
        return [found[i] for i in range(len(tensors))]

    def _received(self, load_2: Tensor) -> dict[str, Tensor]:
        """The step's values of ``RECEIVED``; makes it void where the load is more than there is room for."""
        dispatcher, void = self.model.dispatcher, self.optimizer.void
        assert dispatcher is not None
        rows, slots = load_2.unbind()
        if dispatcher.capacity is not None:
            more = (rows > dispatcher.capacity.rows) | (slots > dispatcher.capacity.slots)
            void.copy_(torch.maximum(void, more.float()))
        of_balanced = torch.maximum(rows / self.balanced.rows, slots / self.balanced.slots)
        return dict(zip(RECEIVED, (of_balanced, rows, slots, void), strict=True))

    def _tell_routers(self, counts_LE: Tensor) -> None:
        """Give this rank's counts of the step so far to the balance loss over the global batch."""
        if self.config.model.aux_loss is AuxLoss.global_batch:
            for router, counts_E in zip(self.routers, counts_LE, strict=True):
                router.earlier_counts.copy_(counts_E)


def one_of_all(load_2: Tensor, mesh: Mesh) -> Tensor:
    """A rank's load as a row among zeros [world, 2]: in their sum over all ranks each has its own."""
    after = mesh.layout.size("world") - 1 - mesh.rank
    return F.pad(load_2.unsqueeze(0), (0, 0, mesh.rank, after))
