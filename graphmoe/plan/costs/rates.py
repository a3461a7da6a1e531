"""Rates that a card reaches of its peaks (measured, assumed, or given by a file), and speeds by them."""

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
from graphmoe.config.schema import ConfigError, Fp8Recipe
from graphmoe.config.untrusted import FileError, from_json, read_json, typed
from graphmoe.plan.costs.hardware import H200, Card

FP8 = "fp8_"
"""Beginning of the names of rates of products in 8 bits, as shares of that peak."""
ALIGNED = 16
"""Elements of which both sides of a weight are multiples where its products are in 8 bits."""
FP8_SCALE = 4
"""Bytes of the scale of numbers of 8 bits."""
LARGEST = 1e300
Size = Annotated[float, Meta(gt=0, lt=LARGEST)]
Part = Annotated[float, Meta(gt=0, le=1)]
Time = Annotated[float, Meta(ge=0, lt=LARGEST)]
Point = tuple[Size, Size, Part]
"""Two sizes of a product, which `CLASSES` names, and the share of the peak that the product reached."""
Share = Part | Annotated[tuple[Point, ...], Meta(min_length=1)]
"""Share of a peak, 0 to 1: one number for products of every size, or measured points."""


@dataclass(frozen=True)
class Rates:
    """Shares of a card's peaks, 0 to 1, and times that are lost whatever is computed."""

    dense: Share
    """Products with dense weights: forward, and gradients of what they read."""
    dense_weights: Share
    """Gradients of dense weights, stored in fp32."""
    dense_weights_added: Share
    """Gradients of dense weights, added to a sum in fp32, as from a step's second micro-batch on."""
    grouped: Share
    """Products of experts, with gathers, activations and sums of rows: forward, and gradients of rows."""
    grouped_weights: Share
    """Gradients of experts' weights, stored in fp32."""
    grouped_weights_added: Share
    """Gradients of experts' weights, added to a sum in fp32."""
    router: Share
    """The router's products, in fp32 but as a share of the peak of bf16."""
    head: Share
    """The three products of the head with its loss, where a rank has the whole vocabulary."""
    attention_forward: Share
    """Attention's own products, causal ones counted by half."""
    attention_backward: Share
    """Four products are counted, though kernels compute five."""
    fp8_dense: Share
    """As `dense`, in 8 bits: the product alone, as a share of the card's peak in 8 bits."""
    fp8_dense_weights: Share
    fp8_dense_weights_added: Share
    fp8_grouped: Share
    """As `grouped`, in 8 bits, with what is rounded between its products; its input is rounded already."""
    fp8_grouped_weights: Share
    """As `grouped_weights`, with the transposed copies of what it reads."""
    fp8_grouped_weights_added: Share
    fp8_quantise: Part
    """Rounding to 8 bits: bytes that are read and written, of the bandwidth of the card's memory."""
    hbm: Part
    """Work that moves data in the card's memory: norms, activations, routing, the optimizer."""
    node: Part
    """Exchange between GPUs of a node."""
    network: Part
    """Exchange between nodes."""
    hidden_exchange: Annotated[float, Meta(ge=0, le=1)]
    """Share of the experts' exchange that pipeline.ep_overlap=true hides."""
    hidden_gradients: Annotated[float, Meta(ge=0, le=1)]
    """Share of the exchange of gradients and weights that computation covers."""
    segment_us: Time
    """Launches and tails of a segment on the device, forward; as much again backward."""
    host_us: Time
    """Time of the host to start a segment, or a graph of segments, forward; as much again backward."""


_DENSE, _GROUPED, _SCORES = (
    ("square root of the weight's elements", "rows"),
    ("width of an expert", "rows of an expert"),
    ("size of a query head", "tokens of a sequence"),
)
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
}
"""Rates that may be points, and their two sizes: the first picks a class, the second is interpolated."""


FP8_RATES = tuple(field.name for field in dataclasses.fields(Rates) if field.name.startswith(FP8))


def share_at(share: Share, kind: float, size: float) -> float:
    """Return the share of a product: interpolated between the points of its class, or that of the end point.

    The class is the one whose first size has the ratio to ``kind`` that is nearest to 1.
    """
    if isinstance(share, float | int):
        return share
    nearest_kind = min({point[0] for point in share}, key=lambda known: abs(math.log(known / kind)))
    points = np.log(sorted(point[1:] for point in share if point[0] == nearest_kind))
    return math.exp(np.interp(math.log(size), points[:, 0], points[:, 1]))


@functools.cache
def default_rates(*, is_nvidia: bool) -> Rates:
    """Return the rates of a vendor's cards where no others are given.

    NVIDIA's were measured on H200s by ``graphmoe.bench suite=calibrate``; hbm and segment_us are means of two
    cards, node is of two GPUs of a host (docs/benchmarks/projection_h200). The network and the shares that
    other work hides are assumed, and so is that other cards reach the same shares. Those of products in 8
    bits are of one H200, with scales of rows (docs/benchmarks/fp8_h200). All of AMD's are assumed, lower than
    NVIDIA's.
    """
    file = files(__package__) / ("nvidia.json" if is_nvidia else "amd.json")
    return from_json(file.read_text(encoding="utf-8"), Rates, file.name)


def source_of_rates(card: Card, path: Path | None, recipe: Fp8Recipe) -> str:
    """Name the source of the rates that `rates_of` returns, and of those that ``recipe`` needs."""
    if path is None:
        known, which = _source_of_defaults(card), "those of products in 8 bits"
    else:
        known, which = f"the rates of {path}", "those that it lacks of products in 8 bits"
    if recipe is Fp8Recipe.none:
        return known
    if path is None or not {*FP8_RATES} <= _given(path).keys():
        known += f"; {which} are {'of one H200' if card.is_nvidia else 'assumed'}"
    if recipe is not Fp8Recipe.rowwise:
        known += f"; {recipe} is assumed to have those of {Fp8Recipe.rowwise}"
    return known


def _source_of_defaults(card: Card) -> str:
    if not card.is_nvidia:
        return "assumed rates"
    of_others = "" if card.name == H200.name else f", and assumed to hold for {card.name}"
    return f"rates measured on H200s{of_others}; network and overlap are assumed"


def rates_of(card: Card, path: Path | None = None) -> Rates:
    """Return the rates of a card; a JSON file may give some or all of them. *Raises* ConfigError.

    The file holds an object of rates, or a document of ``graphmoe.bench suite=calibrate``, whose ``rates``
    are one.
    """
    rates = default_rates(is_nvidia=card.is_nvidia)
    if path is None:
        return rates
    return typed({**dataclasses.asdict(rates), **_given(path)}, Rates, f"rates={path}")


def _given(path: Path) -> dict[str, Any]:
    """Return the rates of a file, by names that there are. *Raises* ConfigError."""
    names = [field.name for field in dataclasses.fields(Rates)]
    try:
        given = read_json(path, dict[str, Any])
    except FileError as error:
        raise ConfigError(f"rates={error}; it must hold an object with some of {', '.join(names)}") from error
    if isinstance(given.get("rates"), dict):
        given = given["rates"]
    if unknown := [f"'{name}' is no rate{nearest(name, names)}" for name in given if name not in names]:
        raise ConfigError(f"rates={path}: {'; '.join(unknown)}")
    return given


Sides = tuple[float, float]
"""Rows and columns of a weight, as far as a rank has it."""
FP32 = 4
"""Bytes of an element."""


class Product(NamedTuple):
    """Seconds of products: forward, and gradients of what they read and of weights."""

    forward: float = 0.0
    inputs: float = 0.0
    weights: float = 0.0


class Fp8Dense(NamedTuple):
    """Dense products in 8 bits."""

    element_bytes: int
    """Bytes of an element before it is rounded."""
    bf16_weights: bool = False
    """True where their weight gradients are in bf16."""


@dataclass(frozen=True, eq=False)
class Speeds:
    """Speeds that a card reaches, in FLOP/s and bytes/s. An object equals only itself, as a key of caches."""

    card: Card
    rates: Rates
    adding: float = 0.0
    """Share of a step's micro-batches that add their weight gradients to those of others, 0 to 1."""

    def weights_seconds(self, flops: float, name: str, kind: float, size: float) -> float:
        """Seconds of a product that makes weight gradients, by the rate ``name``, on average of a step."""
        first, later = (self.seconds(flops, rate, kind, size) for rate in (name, f"{name}_added"))
        return (1 - self.adding) * first + self.adding * later

    def stored(self, elements: float) -> float:
        """Seconds to read and write a weight's gradient in fp32, and to read the sum that it is added to."""
        return (2 + self.adding) * FP32 * elements / self.hbm

    def seconds(self, flops: float, rate: str, kind: float, size: float) -> float:
        """Seconds of a product by a rate, with the two sizes that `CLASSES` names for it."""
        peak = self.card.fp8_tflops if rate.startswith(FP8) else self.card.tflops
        return flops / (peak * 1e12 * share_at(getattr(self.rates, rate), kind, size))

    def dense(self, rows: float, products: Iterable[Sides], fp8: Fp8Dense | None = None) -> Product:
        """Time products of so many rows with weights of these sides.

        With ``fp8`` they are in 8 bits where their sides allow it, with the rounding of what they read.
        Products that read as many elements are taken to read the same, which is rounded once.
        """
        forward = inputs = weights = 0.0
        rounded = set[float]()
        for first, second in products:
            flops, width = 2 * rows * first * second, (first * second) ** 0.5
            eight = FP8 if fp8 and not (first % ALIGNED or second % ALIGNED) else ""
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
        """Seconds to read so many elements and to write them in 8 bits, or back."""
        return elements * (element_bytes + 1) / (self.card.hbm_tb_per_s * 1e12 * self.rates.fp8_quantise)

    def weight_forms(self, elements: float, element_bytes: int) -> float:
        """Seconds of a micro-batch for both forms of weights in 8 bits, which are made once a step."""
        return (1 - self.adding) * 2 * self.quantised(elements, element_bytes)

    @property
    def hbm(self) -> float:
        return self.card.hbm_tb_per_s * 1e12 * self.rates.hbm

    def exchange(self, num_bytes: float, ranks: int, stride: int = 1) -> float:
        """Seconds of an all-to-all: so many bytes to ``ranks`` ranks alike, this one among them.

        The ranks are ``stride`` apart. Bytes for other nodes take the rank's own network card.
        """
        if ranks == 1:
            return 0.0
        in_node = self._in_node(ranks, stride)
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
        in_node = self._in_node(ranks, stride)
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

    def _in_node(self, ranks: int, stride: int) -> int:
        return max(min(ranks, self.card.per_node // stride), 1)
