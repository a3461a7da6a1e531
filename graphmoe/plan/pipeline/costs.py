"""Times of a model's parts that a user has measured."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from graphmoe.config.schema import ConfigError, ModelConfig
from graphmoe.plan.costs.activations import DENSE_SEGMENTS, MOE_SEGMENTS

KINDS = ("embed", "dense", "moe", "mtp", "loss")
"""Names of the parts of a model whose costs may be given as a whole."""


def measured_parts(model: ModelConfig, measured_ms: Mapping[str, float]) -> list[tuple[str, float]]:
    """Return letter and milliseconds of each part, forward and backward together, from measured times.

    Names are kinds of parts (`KINDS`), segments (``attn``) or units of neighbouring segments
    (``attn..moe_combine``). A layer without a time of its own costs what its segments do, an MTP layer as
    much as a MoE layer, the embedding nothing; the loss is that of all depths. *Raises* ConfigError.
    """
    known = {*KINDS, *DENSE_SEGMENTS, *MOE_SEGMENTS}
    for name, ms in measured_ms.items():
        unit = name.split("..")
        unknown = [word for word in unit if word not in known]
        if (
            not unknown
            and len(unit) > 1
            and not any(_is_unit(unit, of) for of in (DENSE_SEGMENTS, MOE_SEGMENTS))
        ):
            raise ConfigError(f"'{name}' is no unit: give the first and the last of neighbouring segments")
        if unknown:
            raise ConfigError(
                f"'{name}' is no part whose time balances a pipeline; use {', '.join(KINDS)}, a segment of a "
                f"layer such as attn, or a unit such as attn..moe_combine"
            )
        if not 0 <= ms < math.inf:
            raise ConfigError(f"the time of '{name}' is {ms} ms; it must be 0 or greater")
    has_shared = model.shared_ffn_size > 0
    moe_segments = [s for s in MOE_SEGMENTS if s != "shared_experts" or has_shared]
    num_moe_layers = model.num_layers - model.num_dense_layers
    needs_moe = num_moe_layers or (model.mtp_depth and "mtp" not in measured_ms)
    read = {"embed", *(["mtp"] if model.mtp_depth else [])}
    dense = _kind_ms("dense", DENSE_SEGMENTS, measured_ms, read) if model.num_dense_layers else 0.0
    moe = _kind_ms("moe", moe_segments, measured_ms, read) if needs_moe else 0.0
    embed, loss = measured_ms.get("embed", 0.0), _kind_ms("loss", ("loss",), measured_ms, read)
    if unread := [name for name in measured_ms if name not in read]:
        raise ConfigError(
            f"{', '.join(unread)}: the model has no such part, or its time is given as a whole; leave it out"
        )
    return [
        ("E", embed),
        *[("t", dense)] * model.num_dense_layers,
        *[("t", moe)] * num_moe_layers,
        *[("m", measured_ms.get("mtp", moe))] * model.mtp_depth,
        ("L", loss),
    ]


def _is_unit(words: Sequence[str], segments: Sequence[str]) -> bool:
    """Return True where the words are the first and the last of neighbouring segments of a layer."""
    return (
        len(words) == 2 and {*words} <= {*segments} and segments.index(words[0]) <= segments.index(words[1])
    )


def _kind_ms(kind: str, segments: Sequence[str], measured_ms: Mapping[str, float], read: set[str]) -> float:
    """Return the milliseconds of a part: its own entry, or the sum over its segments and units.

    The names of used entries are added to ``read``. The model has ``segments``; a unit may span others.
    """
    if kind in measured_ms:
        read.add(kind)
        return measured_ms[kind]
    order = DENSE_SEGMENTS if kind == "dense" else MOE_SEGMENTS if kind == "moe" else segments
    found: dict[str, str] = {}
    for name in measured_ms:
        first, _, last = name.partition("..")
        if first not in order or (last or first) not in order:
            continue
        for segment in order[order.index(first) : order.index(last or first) + 1]:
            if segment in found:
                raise ConfigError(
                    f"'{found[segment]}' and '{name}' both have the time of {segment}; leave one out"
                )
            if segment in segments:
                found[segment] = name
    if missing := [segment for segment in segments if segment not in found]:
        raise ConfigError(
            f"no time for {', '.join(missing)}; give it, perhaps in a unit such as attn..moe_combine, or the "
            f"time of the whole part, {kind}"
        )
    names = [*dict.fromkeys(found.values())]
    read.update(names)
    return sum(measured_ms[name] for name in names)
