"""Rules of recomputation and of activations in host memory."""

from collections.abc import Iterator, Sequence
from typing import Any

from graphmoe.config.schema import ModelConfig, RunConfig
from graphmoe.plan.attention import attention_facts
from graphmoe.plan.experts import moe_layers
from graphmoe.segments import CAPTURABLE, FULL_ITERATION, LAYER_SEGMENTS, PARTS, segments_of


def recompute_rules(config: RunConfig) -> Iterator[str]:
    wanted, model = config.recompute, config.model
    last = model.num_layers + model.mtp_depth - 1
    known: dict[str, tuple[list[Any], Sequence[Any]]] = {
        "segments": (wanted.segments, LAYER_SEGMENTS),
        "ops": (wanted.ops, PARTS),
        "layer_ids": (wanted.layer_ids, range(last + 1)),
        "offload": (wanted.offload, LAYER_SEGMENTS),
    }
    if last < 0:
        return  # other rules refuse such a model
    if wanted.all and any(given for given, _ in known.values()):
        named = " and ".join(f"recompute.{key}={given}" for key, (given, _) in known.items() if given)
        yield f"recompute.all=true recomputes every layer; leave out {named}, or use recompute.all=false"
    for key, (given, valid) in known.items():
        bad = [str(each) for each in given if each not in valid]
        twice = sorted({str(each) for each in given if given.count(each) > 1})
        if bad:
            words = f"0 to {last}" if key == "layer_ids" else ", ".join(map(str, valid))
            yield f"recompute.{key}={given} has {', '.join(bad)}; use {words}"
        elif twice:
            yield f"recompute.{key}={given} names {', '.join(twice)} twice; name each once"
    if wanted.ops and not config.compile.enabled:
        yield (
            f"recompute.ops={wanted.ops} needs compiled graphs, but compile.enabled=false; use "
            f"compile.enabled=true, or recompute.segments"
        )
    yield from _offload_rules(config)
    layers = [i for i in wanted.layer_ids if 0 <= i <= last] or range(last + 1)
    for key, name in [*(("segments", n) for n in wanted.segments), *(("ops", n) for n in wanted.ops)]:
        having = _layers_with(name, model)
        if name in known[key][1] and not having:
            yield f"recompute.{key} names {name}, which this model does not have; leave it out"
        elif name in known[key][1] and not set(layers) & set(having):
            yield (
                f"recompute.{key} names {name}, which no layer of recompute.layer_ids={wanted.layer_ids} "
                f"has; leave it out, or name some of the layers {having[0]} to {having[-1]}"
            )


def _offload_rules(config: RunConfig) -> Iterator[str]:
    wanted, scope = config.recompute, config.graph.scope
    given = f"recompute.offload={wanted.offload}"
    if lost := [n for n in wanted.offload if n in LAYER_SEGMENTS and not _layers_with(n, config.model)]:
        yield f"{given} has {', '.join(lost)}, which this model does not have; leave it out"
    if again := [name for name in wanted.offload if name in wanted.segments and not wanted.layer_ids]:
        yield f"{given} has {', '.join(again)}, which recompute.segments computes again; name each in one"
    captured = CAPTURABLE if scope == FULL_ITERATION else segments_of(scope)
    if inside := [name for name in wanted.offload if name in captured]:
        words = f"{given} has {', '.join(inside)}, which graph.scope={scope} captures"
        yield f"{words}; use graph.scope=none, or leave them out"
    if wanted.offload and config.pipeline.ep_overlap is True:
        yield f"{given} copies behind one stream; use pipeline.ep_overlap=false, or recompute.offload=[]"


def _layers_with(name: str, model: ModelConfig) -> Sequence[int]:
    every, moe = range(model.num_layers + model.mtp_depth), moe_layers(model)
    having = {
        "mlp": [i for i in every if i not in moe],
        "shared_experts": moe if model.shared_ffn_size else [],
        "mla_up_proj": every if attention_facts(model).up else [],
    }
    return having.get(name, moe if name.startswith("moe_") else every)
