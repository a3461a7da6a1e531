"""A projection as plain values: what ``format=json`` prints and the tables show."""

import dataclasses
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from graphmoe.config.ranges import fields_of
from graphmoe.config.schema import ConfigError, PrecisionConfig, RunConfig
from graphmoe.model.sizes import flops_per_token
from graphmoe.ops.timing import FLUSH_BYTES
from graphmoe.plan.costs.hardware import Card
from graphmoe.plan.costs.rates import Speeds, rates_of, source_of_rates
from graphmoe.plan.costs.sizes import refuse_unknown
from graphmoe.plan.experts import has_experts
from graphmoe.plan.layout import Layout, divisors
from graphmoe.plan.plan import Plan
from graphmoe.plan.rules import violations
from graphmoe.plan.rules.auto import value_of, with_values
from graphmoe.project.arguments import Assumptions, ProjectArgs, replica_size
from graphmoe.project.step_time import short_plan, step_time
from graphmoe.training import memory
from graphmoe.training.auto import decided, machine_of
from graphmoe.training.memory import MEMORY_ERROR, PlaceMemory, host_of_places, memory_of_places

NOT_COUNTED = (
    "the device's context and the code of kernels",
    "gaps and rounding of the allocator",
    "workspaces of matrix products and attention",
    f"{FLUSH_BYTES // 2**20} MiB that moe.experts=auto clears while it times kernels, before the first step",
)
BF16 = 2
MOST_GPUS = 4096
SCALED = (
    "num_ranks", "nodes", "global_batch_size", "tokens_per_s_per_gpu", "step_time_s", "bubble", "time_s",
    "memory_gb", "fits", "fits_with_margin",
)  # fmt: skip
NEAR = "near the limit"


def has_margin(total_gb: float, card: Card) -> bool:
    return memory.has_margin(total_gb, card.memory_gb)


def margin_words(document: Mapping[str, Any]) -> str:
    """Return text that says that a rank is near its card's limit, and what the projection does not count."""
    return (
        f"{NEAR.capitalize()}: less than {MEMORY_ERROR * document['card_gb']:,.1f} GB are left, "
        f"{MEMORY_ERROR:.0%} of the card, and a projection may be too low by that. Not counted: "
        f"{', '.join(document['not_counted'])}"
    )


def projected(
    plan: Plan, card: Card, rates: Path | None, bubble: float | None = None
) -> tuple[list[PlaceMemory], dict[str, Any]]:
    """Return each pipeline position's memory, and the step's times; ``bubble`` replaces the simulated one."""
    refuse_unknown(plan.config)
    places, sizes = memory_of_places(plan, on_nvidia=card.is_nvidia), plan.sizes(on_nvidia=card.is_nvidia)
    return places, step_time(plan, sizes, places, Speeds(card, rates_of(card, rates)), bubble)


def project(config: RunConfig, args: ProjectArgs) -> dict[str, Any]:
    """Estimate memory (decimal GB), time and FLOPs of a resolved configuration. *Raises* ConfigError.

    Automatic keys are decided for the cards. Ranks at one position along pp are alike. FLOPs are the model's:
    no recompute, causal attention halved.
    """
    card = args.card
    asked, config = config, decided(config, machine_of(card, args.num_ranks))
    plan = short_plan(config, args.num_ranks)
    layout, pipeline, micro_batches = plan.layout, plan.pipeline, plan.num_micro_batches
    virtual_stages = len(plan.stages) // layout.pp
    is_published = args.assumptions is Assumptions.published
    chart = [published_memory_gb(config, layout)] * layout.pp if is_published else []
    # the chart's: (p - 1) / (p - 1 + m v)
    bubble = (layout.pp - 1) / (layout.pp - 1 + micro_batches * virtual_stages) if is_published else None
    places, time = projected(plan, card, args.rates, bubble)
    on_host = memory.activations_on_host(plan, on_nvidia=card.is_nvidia)
    of_places = chart or [place.kinds() for place in places]
    worst = max(range(layout.pp), key=lambda place: of_places[place]["total"])
    total, of_stage = of_places[worst]["total"], layout.size("stage")
    assert config.data.seq_len is not None
    per_token = flops_per_token(config.model, config.data.seq_len)
    tokens = config.train.global_batch_size * config.data.seq_len
    return {
        **given(config, args, config.precision),
        "auto": config.run.auto,
        "assumptions": args.assumptions.value,
        "layout": sizes_of(layout),
        "micro_batch_size": config.train.micro_batch_size,
        "micro_batches": micro_batches,
        "replica_slots": plan.replica_slots,
        "compute": config.precision.compute.value,
        "pipeline": pipeline
        and {
            "schedule": pipeline.table.schedule,
            "virtual_stages": virtual_stages,
            "layout": pipeline.layout,
        },
        "memory_gb": dict(of_places[worst]),
        "host_gb": max(map(sum, zip(host_of_places(plan), on_host, strict=True))) / 1e9,
        "worst_rank": worst * of_stage,
        "memory_gb_per_rank": [dict(of_place) for of_place in of_places for _ in range(of_stage)],
        "left_gb": card.memory_gb - total,
        "fits": total <= card.memory_gb,
        "fits_with_margin": has_margin(total, card),
        "recompute_all": config.recompute.all,
        "larger": {} if total <= card.memory_gb else _larger(asked, args.num_ranks),
        **({} if is_published else _details(places[worst])),
        "flops_per_token": per_token,
        "flops_per_step": per_token * tokens,
        "flops_per_step_per_rank": per_token * tokens / layout.size("world"),
        **time,
    }


def scaled(config: RunConfig, args: ProjectArgs) -> dict[str, Any]:
    """Project a resolved configuration on doubling numbers of nodes, by more data parallelism.

    Layout, automatic keys and the micro-batches of a rank are those of ``args.nodes``. ``rows`` have
    ``efficiency``, throughput relative to the fewest GPUs that have the memory, and ``shares`` of the step's
    time; ``left_out`` has numbers of GPUs by reason. *Raises* ConfigError.
    """
    config = decided(config, machine_of(args.card, args.num_ranks))
    layout, replica = Layout.of(config.parallel, args.num_ranks), replica_size(config)
    of_rank = config.train.global_batch_size // layout.dp
    rows, left_out = [], dict[str, list[int]]()
    nodes, most = args.num_ranks // args.per_node, max(MOST_GPUS, args.num_ranks)
    nodes //= nodes & -nodes  # its odd part
    while (num_ranks := nodes * args.per_node) <= most:
        dp = num_ranks * layout.dp // args.num_ranks
        values = {"launch.nodes": nodes, "parallel.dp": None, "train.global_batch_size": of_rank * dp}
        run = with_values(config, values)
        problems = [f"the layout needs a multiple of {replica}"] if num_ranks % replica else violations(run)
        if problems:
            left_out.setdefault(problems[0].partition("; ")[0], []).append(num_ranks)
        else:
            found = project(run, replace(args, nodes=nodes))
            shares = shares_of(found)
            bound_by = next(iter(shares)) if found["fits"] else "memory"
            rows.append({key: found[key] for key in SCALED} | {"bound_by": bound_by, "shares": shares})
        nodes *= 2
    first = next((row for row in rows if row["fits"]), None)
    for row in rows:
        rate = row["tokens_per_s_per_gpu"]
        row["efficiency"] = rate / first["tokens_per_s_per_gpu"] if first and row["fits"] else None
    of_run = {"layout": sizes_of(layout), "micro_batch_size": config.train.micro_batch_size}
    of_run |= {"micro_batches": of_rank // of_run["micro_batch_size"], "auto": config.run.auto}
    return {**given(config, args, config.precision), **of_run, "rows": rows, "left_out": left_out}


def shares_of(document: Mapping[str, Any]) -> dict[str, float]:
    """Return shares of a step's time, largest first; only the host's if its launches take longest."""
    time, step = document["time_s"], document["step_time_s"]
    if time["host"] >= step:
        return {"host": 1.0}
    keys = {"exchange": "exposed_exchange", "gradients": "exposed_gradients", "update": "update"}
    shares = {name: time[key] / step for name, key in keys.items()}
    shares["bubble"] = document["bubble"] * (1 - shares["gradients"] - shares["update"])
    shares["compute"] = 1 - sum(shares.values())
    return dict(sorted(shares.items(), key=lambda share: share[1], reverse=True))


def sizes_of(layout: Layout) -> dict[str, int]:
    return {axis: layout.size(axis) for axis in ("dp", "cp", "tp", "pp", "edp", "ep", "etp")}


def _larger(config: RunConfig, num_ranks: int) -> dict[str, int]:
    """Return the next larger size of each axis that the rules of a run allow on as many ranks."""

    def least(key: str) -> int:
        larger = (size for size in divisors(num_ranks) if size > value_of(config, key))
        return next((size for size in larger if not violations(with_values(config, {key: size}))), 0)

    return {key: size for axis in ("ep", "pp", "tp", "cp") if (size := least(key := f"parallel.{axis}"))}


def given(config: RunConfig, args: ProjectArgs, precision: PrecisionConfig) -> dict[str, Any]:
    """Return the fields that documents of projections and searches share: run, card, and its rates."""
    card = args.card
    return {
        "model": config.model.name,
        "hardware": card.name,
        "nodes": args.num_ranks // args.per_node,
        "num_ranks": args.num_ranks,
        "seq_len": config.data.seq_len,
        "global_batch_size": config.train.global_batch_size,
        "fp8": precision.fp8.value,
        "fp8_measure": precision.fp8_measure.value,
        "fp8_products": list(precision.fp8_products),
        "card_gb": card.memory_gb,
        "num_experts": config.model.num_experts,
        "not_counted": [*NOT_COUNTED][: None if has_experts(config.model) else -1],
        "rates": dataclasses.asdict(rates_of(card, args.rates)),
        "rates_from": source_of_rates(card, args.rates, precision.fp8),
    }


def precision_words(document: Mapping[str, Any]) -> str:
    """Return text that says which GEMMs are in fp8."""
    if document["fp8"] == "none":
        return "no products in 8 bits (precision.fp8=none)"
    words = f"{', '.join(document['fp8_products'])} in 8 bits (precision.fp8={document['fp8']})"
    if document["fp8_measure"] == "auto":
        words += ", of which precision.fp8_measure=auto may leave some in bf16"
    return f"with and without products of {words}" if document.get("try_fp8") else f"products of {words}"


def _details(worst: PlaceMemory) -> dict[str, Any]:
    return {
        "activations_gb_by_segment": _gb(worst.by_segment),
        "activations_gb_by_layer": {part: kept.total() / 1e9 for part, kept in worst.by_part.items()},
        "activations_in_flight": worst.activations / max(worst.by_segment.total(), 1),
        "buffers_gb": _gb(worst.buffers),
    }


def _gb(sizes: Mapping[str, float]) -> dict[str, float]:
    return {name: size / 1e9 for name, size in sizes.items() if size}


CHART = {
    "model.attention": "gqa",
    "model.num_dense_layers": 0,
    "model.moe_every": 1,
    "model.mtp_depth": 0,
    "parallel.tp": 1,
    "parallel.etp": 1,
    "recompute.all": False,
    "recompute.segments": [],
    "recompute.ops": [],
    "recompute.layer_ids": [],
    "pipeline.layout": None,
    "precision.fp8": "none",
}


def published_memory_gb(config: RunConfig, layout: Layout) -> dict[str, float]:
    """Return a rank's decimal GB by kind, by the assumptions of a published chart of a 10^12-parameter model.

    bf16 gradients, 2 bytes of a master weight and 8 of moments, sharded over the ranks that hold the same
    experts; an attention of H^2 weights, no shared expert, one layer per virtual stage. Cells are rounded to
    0.1, and totals add the rounded cells. *Raises* ConfigError for other configurations.
    """
    model, d, seq_len = config.model, config.model.hidden_size, config.data.seq_len
    given = {field.key: getattr(field.value, "value", field.value) for field in fields_of(config)}
    problems = [
        f"needs {key}={value}, not {given[key]}" for key, value in CHART.items() if given[key] != value
    ]
    if model.num_layers % layout.pp:
        problems.append(
            f"needs a parallel.pp that divides model.num_layers={model.num_layers}, not {layout.pp}"
        )
    if problems:
        raise ConfigError(f"assumptions=published {'; '.join(problems)}; use assumptions=exact")
    assert seq_len is not None
    of_layer = model.num_experts / layout.ep * 3 * d * model.expert_ffn_size + d * d
    weights = model.num_layers / layout.pp * of_layer + model.vocab_size * d
    # queries, attention's result, the residual stream; keys and values
    attention = 2 * model.num_heads * model.head_dim + d + 2 * model.num_kv_heads * model.head_dim
    experts = model.top_k * (3 * model.expert_ffn_size + d) + 2 * d
    # of the first rank of an interleaved pipeline, in bf16, and logits in bf16 and fp32
    in_flight = (model.num_layers / layout.pp + 1) * layout.pp - 1
    of_token = in_flight * BF16 * (attention + experts) + (BF16 + 4) * (model.vocab_size + d)
    sizes = {
        "params": BF16 * weights,
        "grads": BF16 * weights,
        "main_params": 2 * weights / layout.edp,
        "moments": 8 * weights / layout.edp,
        "activations": config.train.micro_batch_size * seq_len * of_token / layout.cp,
        "buffers": 0.0,
    }
    cells = {kind: round(size / 1e9, 1) for kind, size in sizes.items()}
    return {**cells, "total": round(sum(cells.values()), 1)}
