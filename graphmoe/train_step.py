"""One optimizer step as a function of its micro-batches: all that the device does."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from graphmoe.config import AuxLoss, RunConfig
from graphmoe.model.moe import ROUTER_STATS
from graphmoe.model.transformer import Transformer
from graphmoe.optim import Optimizer, update_selection_bias
from graphmoe.segments import Executor
from graphmoe.step_rows import device_row
from graphmoe.world import World


class TrainStep:
    """Forward and backward of every micro-batch, the optimizer's update, the routers' bias, the metrics.

    Each rank does its micro-batches; gradients, losses and expert loads are summed over all ranks before
    anything is made of them, so that every rank does the same update and returns the same row.

    It never waits for the device, and leaves the host as it was but for the batches that it takes, so a
    graph can hold it.
    """

    def __init__(
        self, config: RunConfig, model: Transformer, optimizer: Optimizer, execute: Executor, world: World
    ) -> None:
        self.config, self.model, self.optimizer, self.execute = config, model, optimizer, execute
        self.world = world
        assert world.size == 1 or config.model.aux_loss is not AuxLoss.global_batch, "counts of one rank"
        self.routers = model.routers()
        self.global_micro_batches = config.train.global_batch_size // config.train.micro_batch_size
        self.num_micro_batches = self.global_micro_batches // world.size
        """Of this rank."""
        self.device = next(model.parameters()).device

    def __call__(self, batches: Iterable[Tensor]) -> Tensor:
        """Token ids [micro_batch_size, seq_len + 1] of each own micro-batch -> a row of ``StepRows``."""
        scalars, counts_LE = self.accumulate(batches)
        result = self.optimizer.step(scalars["loss"], self.world.sum_)
        if self.config.model.selection_bias:
            rate = self.config.model.bias_update_rate
            for router, counts_E in zip(self.routers, counts_LE, strict=True):
                update_selection_bias(router.selection_bias, counts_E, rate, result.finite)
        scalars |= {"grad_norm": result.grad_norm, "lr": result.lr, "skipped": 1 - result.finite}
        scalars |= {"skipped_total": self.optimizer.skipped, "longest_skip": self.optimizer.longest_skip}
        return device_row(scalars, counts_LE)

    def accumulate(self, batches: Iterable[Tensor]) -> tuple[dict[str, Tensor], Tensor]:
        """Forward and backward of every own micro-batch; mean losses and summed expert loads of all ranks."""
        losses = torch.zeros(2 + len(ROUTER_STATS), device=self.device)
        counts_LE = torch.zeros(
            len(self.routers), self.config.model.num_experts, dtype=torch.int32, device=self.device
        )
        for tokens in batches:
            tokens = tokens.to(self.device, non_blocking=True)
            output = self.model.loss(tokens[:, :-1], tokens[:, 1:], self.execute)
            (output.total / self.global_micro_batches).backward()
            stats = output.stats_L3.mean(dim=0) if self.routers else output.stats_L3.new_zeros(3)
            losses += torch.cat([output.cross_entropy[None], output.mtp[None], stats])
            counts_LE += output.counts_LE
            self._tell_routers(counts_LE)
        self._tell_routers(torch.zeros_like(counts_LE))
        losses, counts_LE = self.world.sums(losses, counts_LE)
        names = ("loss", "mtp_loss", *ROUTER_STATS)
        return dict(zip(names, losses / self.global_micro_batches, strict=True)), counts_LE

    def _tell_routers(self, counts_LE: Tensor) -> None:
        """Give the step's counts so far to the balance loss over the global batch."""
        if self.config.model.aux_loss is AuxLoss.global_batch:
            for router, counts_E in zip(self.routers, counts_LE, strict=True):
                router.earlier_counts.copy_(counts_E)
