"""Parameters, FLOPs per token and memory of a model, without allocating it.

python -m graphmoe.info model=deepseek_v3
python -m graphmoe.info model=mixtral_8x7b model.num_layers=4 data.seq_len=8192 format=json
"""

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table

from graphmoe.command.hydra import hydra_app
from graphmoe.config.arguments import emit, text_table
from graphmoe.config.choices import compute_words
from graphmoe.config.ranges import number_of
from graphmoe.config.schema import ConfigError, RunConfig
from graphmoe.plan.experts import num_dense
from graphmoe.plan.layout import ALONE, Layout
from graphmoe.plan.pipeline.plan import with_one_micro_batch
from graphmoe.plan.plan import Plan, plan_of
from graphmoe.plan.rules.auto import AUTO, FP8, ROUNDS, presumed, undecided, with_values

EXAMPLES = [
    "python -m graphmoe.info model=deepseek_v3",
    "python -m graphmoe.info model=deepseek_v2_lite model.num_layers=6 data.seq_len=8192",
    "python -m graphmoe.info model=qwen3_30b_a3b format=json",
]

KINDS = {
    "params": "weights_bf16",
    "grads": "gradients_fp32",
    "main_params": "main_weights_fp32",
    "moments": "moments_fp32",
}
"""Names of the kinds of state in the document."""


def main() -> None:
    hydra_app(show, prog="graphmoe.info", examples=EXAMPLES, complete=with_some_batch)


def show(cfg: RunConfig) -> None:
    smallest = smallest_layout(cfg)
    document = describe(plan_of(with_one_micro_batch(cfg, smallest), smallest.size("world")))
    emit(document, render(document), cfg.format)


def with_some_batch(cfg: RunConfig) -> RunConfig:
    """Return the configuration with batches that fit its ranks; the figures do not depend on them."""
    cfg = with_values(presumed(cfg), {"run.auto": undecided(cfg)})
    counts = [count for count in (cfg.launch.nproc, cfg.launch.nodes) if type(count) is int]
    with suppress(ConfigError, ZeroDivisionError):  # the rules of a run refuse these
        layout = Layout.of(cfg.parallel, math.prod(counts))
        together = cfg.train.micro_batch_size * layout.dp
        if cfg.train.global_batch_size % together:
            train = replace(cfg.train, global_batch_size=ROUNDS * layout.pp * together)
            return replace(cfg, train=train)
    return cfg


def smallest_layout(cfg: RunConfig) -> Layout:
    """Return the layout of all workers or ``launch.fake_world`` ranks, on as few nodes as fit if auto."""
    launch, parallel = cfg.launch, cfg.parallel
    if launch.fake_world is not None:
        return Layout.of(parallel, launch.fake_world)
    nproc = launch.nproc if type(launch.nproc) is int else 1
    if type(launch.nodes) is int:
        return Layout.of(parallel, nproc * launch.nodes)
    fits_all = math.lcm(
        parallel.tp * parallel.cp * parallel.pp * (parallel.dp or 1), parallel.ep * parallel.etp
    )
    for nodes in range(1, fits_all + 1):
        with suppress(ConfigError):
            return Layout.of(parallel, nproc * nodes)
    return Layout.of(parallel, nproc)


def describe(plan: Plan) -> dict[str, Any]:
    """Return parameters, FLOPs per token, and state bytes: unsharded, of the largest rank, by pp rank."""
    # imports torch
    from graphmoe.model.sizes import count_parameters, forward_flops, host_bytes, state_bytes, step_flops
    from graphmoe.optim.storage import kept_of

    model, layout, pipeline = plan.model, plan.layout, plan.pipeline
    optim = plan.optim
    kept = kept_of(optim)
    state = functools.partial(
        state_bytes,
        model,
        bucket_mb=optim.bucket_mb,
        kept=kept,
        grad_shard=optim.grad_shard,
        weight_places=plan.weight_places,
        offload=optim.offload,
    )
    names = {**KINDS, "moments": "slots" if optim.offload else f"moments_{optim.moment_dtype}"}
    names["grads"] = f"gradients_{optim.grad_dtype}"
    stages_of = [plan.own_stages(place) for place in range(layout.pp)]
    of_places = [_whole_bytes(state(layout, stages), names) for stages in stages_of]
    on_host = [
        host_bytes(model, layout, stages, bucket_mb=optim.bucket_mb, kept=kept)
        for stages in stages_of
        if optim.offload
    ]
    by_part, by_part_of_step = (count(model, plan.seq_len) for count in (forward_flops, step_flops))
    forward, total = sum(by_part.values()), sum(by_part_of_step.values())
    flops = {
        "forward_components": by_part, "step_components": by_part_of_step,
        "forward": forward, "backward": total - forward, "total": total,
    }  # fmt: skip
    document = {
        "model": model.name, "num_layers": model.num_layers, "num_dense_layers": num_dense(model),
        "seq_len": plan.seq_len, "parameters": count_parameters(model), "flops_per_token": flops,
        "fp8": AUTO if FP8 in plan.config.run.auto else plan.precision.fp8.value,
        "num_ranks": layout.size("world"),
        "memory_bytes": _whole_bytes(state(ALONE), names),
        "memory_bytes_per_rank": max(of_places, key=lambda kinds: kinds["total"]),
        "host_bytes_per_rank": round(max(on_host, default=0)),
    }  # fmt: skip
    if pipeline:
        document["pipeline"] = {
            "layout": pipeline.layout,
            "ranks": [
                {"pieces": pipeline.pieces_of_place(place), "memory_bytes": kinds}
                for place, kinds in enumerate(of_places)
            ],
        }
    return document


def _whole_bytes(kinds: dict[str, float], names: Mapping[str, str]) -> dict[str, int]:
    rounded = {names[kind]: round(size) for kind, size in kinds.items() if size}
    return {**rounded, "total": sum(rounded.values())}


def render(document: dict[str, Any]) -> Group:
    layers = f"{number_of(document['num_layers'], 'layer')}, {document['num_dense_layers']} of them dense"
    seq_len, num_ranks = document["seq_len"], document["num_ranks"]
    ranks = f", of a run of {num_ranks} ranks" if num_ranks > 1 else ""
    formats = compute_words("bf16", document["fp8"])
    unknown = "activations" if document["fp8"] == "none" else "activations and what weights in 8 bits add"
    return Group(
        f"[bold]{document['model']}[/bold], {layers}",
        "\n[bold]Parameters[/bold]",
        _parameter_table(document["parameters"]),
        f"\n[bold]FLOPs per token[/bold] at data.seq_len={seq_len}, causal attention halved",
        _flops_table(document["flops_per_token"]),
        f"\n[bold]Memory of training[/bold] in {formats}, without {unknown}{ranks}",
        _memory_table(document),
        *[f"in host memory, for each rank: {document['host_bytes_per_rank'] / 2**30:,.3f} GiB"]
        * (document["host_bytes_per_rank"] > 0),
    )


def _parameter_table(parameters: dict[str, dict[str, int]]) -> Table:
    total, active = parameters["total"], parameters["active"]
    scale, unit = (1e9, "B") if total["full"] >= 1e9 else (1e6, "M")
    labels = {"full": "all", "body": "without embedding, head, norms, mtp", "adapters": "adapters (trained)"}
    labels["body"] += ", adapters" * (total["adapters"] > 0)
    pairs = {labels.get(name, name): (number, active[name]) for name, number in total.items() if number}
    rows = [
        (name, *(f"{n:,}" for n in pair), *(f"{n / scale:.3f}" for n in pair)) for name, pair in pairs.items()
    ]
    return _table(("component", "total", "active", f"total {unit}", f"active {unit}"), rows)


def _flops_table(flops: dict[str, Any]) -> Table:
    scale, unit = (1e9, "GFLOP") if flops["total"] >= 1e9 else (1e6, "MFLOP")
    parts = [
        (name, n, flops["step_components"][name]) for name, n in flops["forward_components"].items() if n
    ]
    rows = [
        (name, f"{forward / scale:.3f}", f"{both / scale:.3f}")
        for name, forward, both in [*parts, ("all", flops["forward"], flops["total"])]
    ]
    return _table(("component", f"forward {unit}", f"forward + backward {unit}"), rows)


def _memory_table(document: dict[str, Any]) -> Table:
    memory, num_ranks = document["memory_bytes"], document["num_ranks"]
    scale, unit = (2**30, "GiB") if memory["total"] >= 2**30 else (2**20, "MiB")
    columns = {unit if num_ranks == 1 else f"{unit} on one rank": memory}
    if "pipeline" in document:
        ranks = [*enumerate(document["pipeline"]["ranks"])]
        ranks.sort(key=lambda rank: -rank[1]["memory_bytes"]["total"])
        for word, (place, rank) in zip(("most", "least"), (ranks[0], ranks[-1]), strict=True):
            columns[f"{word}: pp rank {place}, {' '.join(rank['pieces'])}"] = rank["memory_bytes"]
    elif num_ranks > 1:
        columns[f"{unit} on each of {num_ranks}"] = document["memory_bytes_per_rank"]
    rows = [(name, *(f"{sizes.get(name, 0) / scale:,.3f}" for sizes in columns.values())) for name in memory]
    return _table(("state", *columns), rows)


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    shown = [(name.replace("_", " "), *numbers) for name, *numbers in rows]
    return text_table(columns, shown, box=SIMPLE_HEAD)


if __name__ == "__main__":
    main()
