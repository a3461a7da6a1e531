"""Rates: shares of a GPU's peak speeds (measured, assumed, or from a file), and the resulting speeds."""

import dataclasses
import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
from msgspec import Meta

from graphmoe.config.arguments import nearest
from graphmoe.config.formats import FORMATS
from graphmoe.config.schema import ConfigError, Fp8Recipe
from graphmoe.config.untrusted import FileError, from_json, read_json, typed
from graphmoe.plan.costs.hardware import H200, Card

FP8 = "fp8_"  # prefix of rates of fp8 GEMMs, as shares of the fp8 peak
# the format that is modelled; `Format.rates` counts others as it, or refuses them
ROWWISE = FORMATS[Fp8Recipe.rowwise]
PUBLISHED = 24  # runs on AMD's cards that amd.json is fitted to: tests/project/test_published.py has them
LARGEST = 1e300
Size = Annotated[float, Meta(gt=0, lt=LARGEST)]
Part = Annotated[float, Meta(gt=0, le=1)]
Time = Annotated[float, Meta(ge=0, lt=LARGEST)]
Hidden = Annotated[float, Meta(ge=0, le=1)]
Point = tuple[Size, Size, Part]  # two sizes of a GEMM, named by `CLASSES`, and its share of the peak
# share of a peak, 0 to 1, for all sizes or as measured points
Share = Part | Annotated[tuple[Point, ...], Meta(min_length=1)]


@dataclass(frozen=True)
class Rates:
    """Achieved shares of a GPU's peak speeds, 0 to 1, and fixed overheads."""

    dense: Share
    """Forward and dgrad of GEMMs with dense weights."""
    dense_weights: Share
    """wgrad of dense weights, stored in fp32."""
    dense_weights_added: Share
    """wgrad of dense weights added to an fp32 sum."""
    grouped: Share
    """Expert GEMMs with gathers, activations and row sums: forward and dgrad."""
    grouped_weights: Share
    """wgrad of experts, stored in fp32."""
    grouped_weights_added: Share
    """wgrad of experts, added to an fp32 sum."""
    router: Share
    """The router's GEMM: fp32, as a share of the bf16 peak."""
    head: Share
    """The head's three GEMMs and the loss, without tp."""
    attention_forward: Share
    """Forward of attention's GEMMs; causal ones count half."""
    attention_backward: Share
    """Backward of attention, counted as four GEMMs, though kernels compute five."""
    delta_net_forward: Share
    """Forward of a delta net's states, counted position by position, though kernels compute chunks."""
    delta_net_backward: Share
    """Backward of a delta net's states, counted twice the forward."""
    fp8_dense: Share
    """Forward and dgrad of dense GEMMs in fp8, without quantization; a share of the fp8 peak."""
    fp8_dense_weights: Share
    fp8_dense_weights_added: Share
    fp8_grouped: Share
    """Forward and dgrad of experts in fp8, with quantization between the GEMMs, without that of the input."""
    fp8_grouped_weights: Share
    """wgrad of experts in fp8, stored in fp32, with transposed copies of its inputs."""
    fp8_grouped_weights_added: Share
    fp8_quantise: Part
    """Quantization to fp8: bytes read and written, as a share of memory bandwidth."""
    hbm: Part
    """Memory-bound work: norms, activations, routing, the optimizer."""
    passes: Size
    """Times that a layer reads or writes its saved bytes and their gradients, forward and backward."""
    power_cap: Hidden
    """Slowdown of GEMMs by the card's power limit in a step that does nothing else."""
    load_spread: Annotated[float, Meta(ge=0, lt=10)]
    """Standard deviation of experts' loads over their mean, of natural routing without replicas."""
    node: Part
    """Collectives between GPUs of a node; the rates below replace it in dispatch and combine."""
    network: Part
    """Links between nodes, but for all-to-all collectives."""
    network_alltoall: Part
    pull: Part
    """moe.transport=pull: kernels that read peers' memory."""
    copy_engine: Part
    """moe.transport=copy_engine, with packing."""
    deepep: Part
    """Kernels of DeepEP and of its port in Primus-Turbo."""
    hidden_exchange: Hidden
    """Share of dispatch and combine that pipeline.ep_overlap=true saves, after GEMMs that it slows."""
    hidden_gradients: Hidden
    """Share of gradient and weight communication that computation hides."""
    segment_us: Time
    """Launch and tail overhead of a segment on the device, forward; the same backward."""
    host_us: Time
    """Host time to launch a segment or graph, forward; the same backward."""
    barrier_us: Time
    """A barrier of symm's ranks, with the wait for the last one."""
    collective_us: Time
    """Latency of a collective, with the wait for the last rank."""
    deepep_us: Time
    """Latency of an exchange by DeepEP."""


_DENSE, _GROUPED, _SCORES, _STATES = (
    ("square root of the weight's elements", "rows"),
    ("width of an expert", "rows of an expert"),
    ("size of a query head", "tokens of a sequence"),
    ("size of a key head", "value heads of all sequences"),
)
# rates that may be points, and their two sizes: the first selects a class, the second is interpolated
CLASSES = {
    **{
        fp8 + kind + direction: sizes
        for kind, sizes in (("dense", _DENSE), ("grouped", _GROUPED))
        for fp8 in ("", FP8)
        for direction in ("", "_weights", "_weights_added")
    },
    "router": ("experts", "tokens"),
    "head": ("hidden size", "tokens"),
    **dict.fromkeys(("attention_forward", "attention_backward"), _SCORES),
    **dict.fromkeys(("delta_net_forward", "delta_net_backward"), _STATES),
}


FP8_RATES = tuple(field.name for field in dataclasses.fields(Rates) if field.name.startswith(FP8))


def share_at(share: Share, kind: float, size: float) -> float:
    """Return a GEMM's share of peak, interpolated by size among points with first size nearest ``kind``."""
    if isinstance(share, float | int):
        return share
    nearest_kind = min({point[0] for point in share}, key=lambda known: abs(math.log(known / kind)))
    # seconds per FLOP are linear in 1 / size: fixed costs are divided by more work
    points = 1 / np.array(sorted((point[1:] for point in share if point[0] == nearest_kind), reverse=True))
    return float(1 / np.interp(1 / size, points[:, 0], points[:, 1]))


@functools.cache
def default_rates(*, is_nvidia: bool) -> Rates:
    """Return a vendor's default rates: of H200s measured, of AMD's cards fitted (docs/projection.md)."""
    file = files(__package__) / ("nvidia.json" if is_nvidia else "amd.json")
    return from_json(file.read_text(encoding="utf-8"), Rates, file.name)


# shares of a card's data sheet that kernels reach at best, by H200s: 790 bf16 and 1,450 fp8 TFLOP/s, 4.3 TB/s
BF16_CEILING, FP8_CEILING, HBM_CEILING = 790 / 989.4, 1450 / 1978.8, 4.3 / 4.8


@functools.cache
def ceilings() -> Rates:
    """Return the rates that lower bounds of times assume: the best shares of peaks, and no overheads."""
    found = dataclasses.asdict(default_rates(is_nvidia=True))
    found |= {name: FP8_CEILING if name.startswith(FP8) else BF16_CEILING for name in CLASSES}
    found |= {"hbm": HBM_CEILING, "fp8_quantise": HBM_CEILING, "passes": 3.5}  # a write and 2.5 reads
    found |= dict.fromkeys(("node", "network", "network_alltoall", "pull", "copy_engine", "deepep"), 1.0)
    nothing = "hidden_exchange", "hidden_gradients", "power_cap", "load_spread"
    found |= {name: 0.0 for name in found if name in nothing or name.endswith("_us")}
    return Rates(**found)


def fits_fp8(*sides: float) -> bool:
    return not any(side % ROWWISE.aligned for side in sides)


def source_of_rates(card: Card, path: Path | None, recipe: Fp8Recipe) -> str:
    """Return text for logs: the source of a card's rates, and of its fp8 ``recipe``'s."""
    if path is None:
        known, which = _source_of_defaults(card), "those of fp8 GEMMs"
    else:
        known, which = f"the rates of {path}", "those of fp8 GEMMs that it lacks"
    if recipe is Fp8Recipe.none:
        return known
    if path is None or not {*FP8_RATES} <= _given(path).keys():
        known += f"; {which} are {'of one H200' if card.is_nvidia else 'assumed'}"
    if FORMATS[recipe].rates == "assumed":
        known += f"; {recipe} is assumed to have those of {Fp8Recipe.rowwise}"
    return known


def _source_of_defaults(card: Card) -> str:
    if not card.is_nvidia:
        known = f"rates fitted to {PUBLISHED} published points"
        return f"{known}; {card.name} is only announced" if card.is_announced else known
    of_others = "" if card.name == H200.name else f", and assumed to hold for {card.name}"
    return f"rates measured on H200s{of_others}; links between nodes are assumed"


def rates_of(card: Card, path: Path | None = None) -> Rates:
    """Return a GPU's rates, updated by a file of ``graphmoe.bench suite=calibrate``. *Raises* ConfigError."""
    rates = default_rates(is_nvidia=card.is_nvidia)
    if path is None:
        return rates
    return typed({**dataclasses.asdict(rates), **_given(path)}, Rates, f"rates={path}")


def _given(path: Path) -> dict[str, Any]:
    names = [field.name for field in dataclasses.fields(Rates)]
    try:
        given = read_json(path, dict[str, Any])
    except FileError as error:
        raise ConfigError(f"rates={error}; it must hold an object with some of {', '.join(names)}") from error
    if isinstance(given.get("rates"), dict):
        given = given["rates"]
    if unknown := [f"'{name}' is not a rate{nearest(name, names)}" for name in given if name not in names]:
        raise ConfigError(f"rates={path}: {'; '.join(unknown)}")
    return given


Sides = tuple[float, float]
FP32 = 4


class Product(NamedTuple):
    """Seconds that GEMMs take in forward, dgrad and wgrad."""

    forward: float = 0.0
    inputs: float = 0.0
    weights: float = 0.0


class Fp8Dense(NamedTuple):
    element_bytes: int
    """Bytes of an element before quantization."""
    bf16_weights: bool = False


@dataclass(frozen=True, eq=False)
class Speeds:
    """Speeds of a GPU, in FLOP/s and bytes/s; compared by identity, as a cache key."""

    card: Card
    rates: Rates
    adding: float = 0.0
    """Share of a step's micro-batches whose wgrad adds to existing gradients, 0 to 1."""

    def weights_seconds(self, flops: float, name: str, kind: float, size: float) -> float:
        """Return the seconds of a wgrad GEMM with the rate ``name``, averaged over a step's micro-batches."""
        first, later = (self.seconds(flops, rate, kind, size) for rate in (name, f"{name}_added"))
        return (1 - self.adding) * first + self.adding * later

    def stored(self, elements: float) -> float:
        """Return the seconds to write and read an fp32 gradient once, and to read the sum it is added to."""
        return (2 + self.adding) * FP32 * elements / self.hbm

    def seconds(self, flops: float, rate: str, kind: float, size: float) -> float:
        peak = self.card.fp8_tflops if rate.startswith(FP8) else self.card.tflops
        return flops / (peak * 1e12 * share_at(getattr(self.rates, rate), kind, size))

    def dense(self, rows: float, products: Iterable[Sides], fp8: Fp8Dense | None = None) -> Product:
        """Return seconds of GEMMs of ``rows`` rows with weights of these sizes; ``fp8`` adds quantization."""
        forward = inputs = weights = 0.0
        # GEMMs with the same input width are assumed to share their input, which is quantized once
        rounded = set[float]()
        for first, second in products:
            flops, width = 2 * rows * first * second, (first * second) ** 0.5
            eight = FP8 if fp8 and fits_fp8(first, second) else ""
            once = self.seconds(flops, f"{eight}dense", width, rows)
            forward, inputs = forward + once, inputs + once
            of_weights = "" if fp8 and fp8.bf16_weights else eight
            weights += self.weights_seconds(flops, f"{of_weights}dense_weights", width, rows)
            if fp8 and eight:
                forward += 0 if first in rounded else self.quantised(rows * first, fp8.element_bytes)
                inputs += self.quantised(rows * second, fp8.element_bytes)
                if fp8.bf16_weights:  # rows are read back
                    weights += self.quantised(rows * first, fp8.element_bytes)
                else:  # transposed copies of both sides
                    weights += self.quantised(rows * (first + second), 1)
                rounded.add(first)
        return Product(forward, inputs, weights)

    def quantised(self, elements: float, element_bytes: int) -> float:
        return elements * (element_bytes + 1) / (self.card.hbm_tb_per_s * 1e12 * self.rates.fp8_quantise)

    def weight_forms(self, elements: float, element_bytes: int) -> float:
        """Return the seconds, per micro-batch, to quantize a weight and its transpose once a step."""
        return (1 - self.adding) * 2 * self.quantised(elements, element_bytes)

    @property
    def hbm(self) -> float:
        return self.card.hbm_tb_per_s * 1e12 * self.rates.hbm

    def exchange(self, num_bytes: float, ranks: int, stride: int = 1) -> float:
        """Return seconds of an all-to-all of ``num_bytes`` among ranks, numbered ``stride`` apart."""
        in_node = self.in_node(ranks, stride)
        sent = num_bytes * (in_node - 1) / ranks, num_bytes * (ranks - in_node) / ranks
        return self.sent(*sent, self.rates.node, self.rates.network_alltoall)

    def sent(self, in_node: float, between: float, node: float, network: float) -> float:
        """Return seconds to send bytes at shares of the links in a node, and of the rank's own NIC."""
        card = self.card
        return max(in_node / (card.node_gb_per_s * node), between / (card.network_gb_per_s * network)) / 1e9

    def gather(self, num_bytes: float, ranks: int, stride: int = 1) -> float:
        """Return seconds of an all-gather to ``num_bytes`` on each rank, or of a reduce-scatter from them."""
        if ranks == 1:
            return 0.0
        in_node = self.in_node(ranks, stride)
        return self.rates.collective_us * 1e-6 + max(
            num_bytes * (ranks - 1) / ranks / self._node,
            # bytes of other nodes enter each node once, over the NICs of all its ranks
            num_bytes * (ranks - in_node) / ranks / in_node / self._network,
        )

    def pass_on(self, num_bytes: float, *, in_node: bool) -> float:
        return num_bytes / (self.card.peer_gb_per_s * 1e9 * self.rates.node if in_node else self._network)

    @property
    def _node(self) -> float:
        return self.card.node_gb_per_s * 1e9 * self.rates.node

    @property
    def _network(self) -> float:
        return self.card.network_gb_per_s * 1e9 * self.rates.network

    def in_node(self, ranks: int, stride: int = 1) -> int:
        """Return how many of a group's ranks, numbered ``stride`` apart, fast links join."""
        return max(min(ranks, self.card.linked // stride), 1)
