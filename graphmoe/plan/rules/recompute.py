"""Rules of ``recompute``: what a model has that its backward can compute again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from graphmoe.config.schema import AttentionKind, ModelConfig, RecomputeConfig
from graphmoe.segments import LAYER_SEGMENTS, PARTS


def recompute_rules(wanted: RecomputeConfig, model: ModelConfig, compiles: bool) -> Iterator[str]:
    """Violated rules of ``recompute``."""
    last = model.num_layers + model.mtp_depth - 1
    known: dict[str, tuple[list[Any], Sequence[Any]]] = {
        "segments": (wanted.segments, LAYER_SEGMENTS),
        "ops": (wanted.ops, PARTS),
        "layer_ids": (wanted.layer_ids, range(last + 1)),
    }
    if last < 0:
        return  # of such a model other rules speak
    if wanted.all and any(given for given, _ in known.values()):
        named = " and ".join(f"recompute.{key}={given}" for key, (given, _) in known.items() if given)
        yield f"recompute.all=true computes every layer again; leave out {named}, or use recompute.all=false"
    for key, (given, valid) in known.items():
        bad = [str(each) for each in given if each not in valid]
        twice = sorted({str(each) for each in given if given.count(each) > 1})
        if bad:
            words = f"0 to {last}" if key == "layer_ids" else ", ".join(map(str, valid))
            yield f"recompute.{key}={given} has {', '.join(bad)}; use {words}"
        elif twice:
            yield f"recompute.{key}={given} names {', '.join(twice)} twice; name each once"
    if wanted.ops and not compiles:
        yield (
            f"recompute.ops={wanted.ops} are chosen in compiled graphs, and compile.enabled=false; use "
            f"compile.enabled=true, or recompute.segments"
        )
    layers = [i for i in wanted.layer_ids if 0 <= i <= last] or range(last + 1)
    for key, name in [*(("segments", n) for n in wanted.segments), *(("ops", n) for n in wanted.ops)]:
        having = _layers_with(name, model)
        if name in known[key][1] and not having:
            yield f"recompute.{key} names {name}, which the model has not; leave it out"
        elif name in known[key][1] and not set(layers) & set(having):
            yield (
                f"recompute.{key} names {name}, which no layer of recompute.layer_ids={wanted.layer_ids} "
                f"has; leave it out, or name some of the layers {having[0]} to {having[-1]}"
            )


def _layers_with(name: str, model: ModelConfig) -> range:
    """The layers that have a segment or a part; none for those of an attention or of experts not there."""
    end = model.num_layers + model.mtp_depth
    moe = range(model.num_dense_layers, end)
    having = {
        "mlp": range(model.num_dense_layers),
        "shared_experts": moe if model.shared_ffn_size else range(0),
        "mla_up_proj": range(end if model.attention is AttentionKind.mla else 0),
    }
    return having.get(name, moe if name.startswith("moe_") else range(end))
