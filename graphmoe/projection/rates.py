"""What a card reaches of its peaks: assumptions, in one place, until measured rates take their place."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields, replace
from pathlib import Path

from graphmoe.cli import nearest
from graphmoe.config import ConfigError
from graphmoe.projection.hardware import Card


@dataclass(frozen=True)
class Rates:
    """Shares of a card's peaks, 0 to 1, and times that are lost whatever is computed."""

    dense: float
    """Products with dense weights."""
    grouped: float
    """Products of experts."""
    attention_forward: float
    """Attention's own products, causal ones counted by half."""
    attention_backward: float
    hbm: float
    """What moves data in the card's memory: norms, activations, routing, the optimizer."""
    node: float
    """Between GPUs of a node."""
    network: float
    """Between nodes."""
    hidden_exchange: float
    """Share of the experts' exchange that pipeline.ep_overlap=true hides."""
    segment_us: float
    """Launches and tails of a segment, forward; as much again backward."""


NVIDIA = Rates(0.75, 0.65, 0.58, 0.42, 0.85, 0.67, 0.8, 0.8, 20)
"""Measured on an H200 (8192^3 product 700 to 790 of 989 TFLOP/s, experts' products 637 to 664, attention 578
forward and 412 backward, copies at 4.3 TB/s, exchange at 300 GB/s); others are assumed to reach the same
share. The network, what is hidden and launches are assumed."""
AMD = Rates(0.5, 0.42, 0.35, 0.28, 0.75, 0.65, 0.8, 0.8, 30)
"""Assumed, lower than NVIDIA's: nothing was measured on these cards by this project."""


def rates_of(card: Card, path: Path | None = None) -> Rates:
    """Those of a card; a JSON file may give some or all of them. *Raises* ConfigError."""
    rates = AMD if card.name.startswith("MI") else NVIDIA
    if path is None:
        return rates
    try:
        given = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"rates={path} cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise ConfigError(f"rates={path} is no JSON: {error}") from error
    names = [field.name for field in fields(Rates)]
    if not isinstance(given, dict):
        raise ConfigError(f"rates={path} must hold an object with some of {', '.join(names)}")
    for name, value in given.items():
        if name not in names:
            raise ConfigError(f"rates={path}: '{name}' is no rate{nearest(name, names)}")
        is_time = name == "segment_us"
        if type(value) not in (int, float) or value < 0 or (not is_time and not 0 <= value <= 1):
            limit = "0 or greater" if is_time else "a share of the peak, 0 to 1"
            raise ConfigError(f"rates={path}: {name}={value} must be {limit}")
        if value == 0 and name not in ("segment_us", "hidden_exchange"):
            raise ConfigError(f"rates={path}: {name}=0 would take for ever; use a share above 0")
    return replace(rates, **given)
