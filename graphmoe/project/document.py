"""A projection as plain values: what ``format=json`` prints and the tables show."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from graphmoe.config.schema import RunConfig
from graphmoe.model.sizes import flops_per_token
from graphmoe.ops.timing import FLUSH_BYTES
from graphmoe.plan.costs.hardware import Card
from graphmoe.plan.costs.rates import Speeds, rates_of, source_of_rates
from graphmoe.plan.costs.sizes import Sizes
from graphmoe.plan.layout import Layout
from graphmoe.plan.pipeline.plan import PipelinePlan, num_micro_batches, pipeline_of
from graphmoe.project.arguments import Assumptions, ProjectArgs
from graphmoe.project.memory import PlaceMemory, exact_memory
from graphmoe.project.published import published_bubble, published_memory_gb
from graphmoe.project.step_time import StepTime, step_time

NOT_COUNTED = (
    "the device's context and the code of kernels",
    "gaps and rounding of the allocator",
    "workspaces of matrix products and attention",
    f"{FLUSH_BYTES // 2**20} MiB that moe.experts=auto clears while it times kernels, before the first step",
)

MEMORY_ERROR = 0.05
"""Share of a peak by which a projection may be wrong; the benchmark suite `projection` calls more a miss."""


def has_margin(total_gb: float, card: Card) -> bool:
    """Return True where a rank fits even if it needs more by the error that a projection may have."""
    return total_gb <= (1 - MEMORY_ERROR) * card.memory_gb


NEAR = "near the limit"
"""Words for a rank that fits without that margin."""


def margin_words(document: Mapping[str, Any]) -> str:
    """Explain that a rank is near the limit of its card, and what else has to find room there."""
    share = MEMORY_ERROR * document["card_gb"]
    return (
        f"{NEAR.capitalize()}: less than {share:,.1f} GB are left, {MEMORY_ERROR:.0%} of the card, by which "
        f"a projection may be too low. What is not counted needs room too: "
        f"{', '.join(document['not_counted'])}"
    )


def project(config: RunConfig, args: ProjectArgs) -> dict[str, Any]:
    """Project all values of a resolved configuration. *Raises* ConfigError."""
    layout = Layout.of(config.parallel, args.num_ranks)
    rates = rates_of(args.card, args.rates)
    on_nvidia, plan = args.card.is_nvidia, pipeline_of(config, layout)
    is_published = args.assumptions is Assumptions.published
    published = [published_memory_gb(config, layout)] * layout.pp if is_published else []
    places, bubble = exact_memory(config, layout, on_nvidia=on_nvidia, plan=plan), None
    if is_published:
        virtual_stages = len(plan.stages) // layout.pp if plan else 1
        bubble = published_bubble(layout.pp, num_micro_batches(config, layout), virtual_stages)
    of_places = published or [place.kinds_gb() for place in places]
    sizes, speeds = Sizes.from_config(config, layout, on_nvidia=on_nvidia), Speeds(args.card, rates)
    time = step_time(config, sizes, places, speeds, plan, bubble)
    return {
        **_setting(config, args, layout, plan),
        **_memory(of_places, layout, args.card),
        **({} if is_published else _details(places, of_places)),
        **_flops(config, layout),
        **_time(time),
        "rates": dataclasses.asdict(rates),
        "rates_from": source_of_rates(args.card, args.rates),
    }


def _time(time: StepTime) -> dict[str, Any]:
    """Return the seconds of a step and of its parts, and the throughput."""
    return {
        "step_time_s": time.step_s,
        "bubble": time.bubble,
        "tokens_per_s_per_gpu": time.tokens_per_s_per_gpu,
        "mfu": time.mfu,
        "time_s": {
            "forward_by_segment": time.forward_s,
            "backward_by_segment": time.backward_s,
            "exposed_exchange": time.exchange_s,
            "exposed_gradients": time.gradients_s,
            "update": time.update_s,
            "host": time.host_s,
        },
    }


def _setting(
    config: RunConfig, args: ProjectArgs, layout: Layout, plan: PipelinePlan | None
) -> dict[str, Any]:
    """Return the model, the cards and the layout that were projected."""
    return {
        "model": config.model.name,
        "hardware": args.card.name,
        "nodes": args.nodes,
        "num_ranks": args.num_ranks,
        "assumptions": args.assumptions.value,
        "layout": {axis: layout.size(axis) for axis in ("dp", "cp", "tp", "pp", "edp", "ep", "etp")},
        "seq_len": config.data.seq_len,
        "micro_batch_size": config.train.micro_batch_size,
        "global_batch_size": config.train.global_batch_size,
        "micro_batches": num_micro_batches(config, layout),
        "compute": config.precision.compute.value,
        "pipeline": None
        if plan is None
        else {
            "schedule": plan.table.schedule,
            "virtual_stages": len(plan.stages) // layout.pp,
            "layout": plan.layout,
        },
    }


def _memory(of_places: Sequence[Mapping[str, float]], layout: Layout, card: Card) -> dict[str, Any]:
    """Return memory of the worst rank and of all, in decimal GB, and whether it fits.

    Rank 0 is at place 0 of pp.
    """
    worst = max(range(layout.pp), key=lambda place: of_places[place]["total"])
    of_stage = layout.size("stage")
    total = of_places[worst]["total"]
    return {
        "memory_gb": dict(of_places[worst]),
        "worst_rank": worst * of_stage,
        "memory_gb_per_rank": [dict(of_place) for of_place in of_places for _ in range(of_stage)],
        "card_gb": card.memory_gb,
        "left_gb": card.memory_gb - total,
        "fits": total <= card.memory_gb,
        "fits_with_margin": has_margin(total, card),
        "not_counted": list(NOT_COUNTED),
    }


def _details(places: Sequence[PlaceMemory], of_places: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Return the activations of the worst rank by segment and layer, and its buffers by purpose."""
    worst = max(places, key=lambda place: of_places[place.place]["total"])
    return {
        "activations_gb_by_segment": _gb(worst.by_segment),
        "activations_gb_by_layer": {part: kept.total() / 1e9 for part, kept in worst.by_part.items()},
        "activations_in_flight": worst.activations / max(worst.by_segment.total(), 1),
        "buffers_gb": _gb(worst.buffers),
    }


def _flops(config: RunConfig, layout: Layout) -> dict[str, Any]:
    """Return model FLOPs: no recomputation, causal attention halved."""
    assert config.data.seq_len is not None
    per_token = flops_per_token(config.model, config.data.seq_len).total
    tokens = config.train.global_batch_size * config.data.seq_len
    return {
        "flops_per_token": per_token,
        "flops_per_step": per_token * tokens,
        "flops_per_step_per_rank": per_token * tokens / layout.size("world"),
    }


def _gb(sizes: Mapping[str, float]) -> dict[str, float]:
    return {name: size / 1e9 for name, size in sizes.items() if size}
