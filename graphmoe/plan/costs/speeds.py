"""Speeds of a card: seconds of products, of data that moves in its memory, and of exchange with others."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from graphmoe.plan.costs.hardware import GPUS_PER_NODE, Card
from graphmoe.plan.costs.rates import Rates, Share, share_at

Sides = tuple[float, float]
"""Rows and columns of a weight, as far as a rank has it."""
FP32 = 4
"""Bytes of an element."""


class Product(NamedTuple):
    """Seconds of products: forward, and gradients of what they read and of weights."""

    forward: float = 0.0
    inputs: float = 0.0
    weights: float = 0.0


@dataclass(frozen=True)
class Speeds:
    """Speeds that a card reaches, in FLOP/s and bytes/s."""

    card: Card
    rates: Rates
    adding: float = 0.0
    """Share of a step's micro-batches that add their weight gradients to those of others, 0 to 1."""

    def weights_seconds(self, flops: float, name: str, kind: float, size: float) -> float:
        """Seconds of a product that makes weight gradients, by the rate ``name``, on average of a step."""
        stored, added = (getattr(self.rates, rate) for rate in (name, f"{name}_added"))
        return (1 - self.adding) * self.seconds(flops, stored, kind, size) + self.adding * self.seconds(
            flops, added, kind, size
        )

    def stored(self, elements: float) -> float:
        """Seconds to read and write a weight's gradient in fp32, and to read the sum that it is added to."""
        return (2 + self.adding) * FP32 * elements / self.hbm

    def seconds(self, flops: float, share: Share, kind: float, size: float) -> float:
        """Seconds of a product with the two sizes that `graphmoe.plan.costs.rates.CLASSES` names."""
        return flops / (self.card.tflops * 1e12 * share_at(share, kind, size))

    def dense(self, rows: float, products: Iterable[Sides]) -> Product:
        """Time products of so many rows with weights of these sides."""
        forward = weights = 0.0
        for first, second in products:
            flops, width = 2 * rows * first * second, (first * second) ** 0.5
            forward += self.seconds(flops, self.rates.dense, width, rows)
            weights += self.weights_seconds(flops, "dense_weights", width, rows)
        return Product(forward, forward, weights)

    @property
    def hbm(self) -> float:
        return self.card.hbm_tb_per_s * 1e12 * self.rates.hbm

    def exchange(self, num_bytes: float, ranks: int, stride: int = 1) -> float:
        """Seconds of an all-to-all: so many bytes to ``ranks`` ranks alike, this one among them.

        The ranks are ``stride`` apart. Bytes for other nodes take the rank's own network card.
        """
        if ranks == 1:
            return 0.0
        in_node = _in_node(ranks, stride)
        return max(
            num_bytes * (in_node - 1) / ranks / self._node,
            num_bytes * (ranks - in_node) / ranks / self._network,
        )

    def gather(self, num_bytes: float, ranks: int, stride: int = 1) -> float:
        """Seconds of an all-gather that makes so many bytes on every rank, or of the reduce-scatter back.

        Bytes of other nodes come to each node once, over the network cards of all its ranks.
        """
        if ranks == 1:
            return 0.0
        in_node = _in_node(ranks, stride)
        return max(
            num_bytes * (ranks - 1) / ranks / self._node,
            num_bytes * (ranks - in_node) / ranks / in_node / self._network,
        )

    def pass_on(self, num_bytes: float, *, in_node: bool) -> float:
        """Seconds to send so many bytes to one other rank."""
        return num_bytes / (self.card.peer_gb_per_s * 1e9 * self.rates.node if in_node else self._network)

    @property
    def _node(self) -> float:
        return self.card.node_gb_per_s * 1e9 * self.rates.node

    @property
    def _network(self) -> float:
        return self.card.network_gb_per_s * 1e9 * self.rates.network


def _in_node(ranks: int, stride: int) -> int:
    """Return the number of ranks, of ``ranks`` that are ``stride`` apart, in one node."""
    return max(min(ranks, GPUS_PER_NODE // stride), 1)
