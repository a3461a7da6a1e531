"""Tables of a dry run's document for people."""

from collections.abc import Sequence
from typing import Any

from rich.console import Group
from rich.table import Table

from graphmoe.config.choices import compute_words
from graphmoe.config.ranges import number_of, shown_size
from graphmoe.plan.layout import ranks_of_axes

FILE = "dry_run.json"
# labels of memory kinds
KINDS = {
    "weights": "weights, whole and own shard",
    "main_weights": "fp32 main weights",
    "gradients": "fp32 gradients, whole and own shard",
    "moments": "moments",
    "slots": "pieces of state in host memory",
    "buffers": "buffers",
    "forms": "weights in 8 bits",
    "shared": "shared with ranks of ep: rows, replicas",
    "forward": "made by the forward: activations",
    "backward": "made by the backward",
    "update": "made by the update",
    "inside": "inside an operation",
}


def render(document: dict[str, Any]) -> Group:
    """Show memory and collectives as tables, and whether the rank fits its device."""
    count, of_each = document["micro_batches"], document["micro_batch_size"]
    has_experts = document["num_experts"] > 0
    return Group(
        f"[bold]{document['model']}[/bold], rank {document['rank']} of {document['world']}",
        *_pipeline_lines(document),
        ranks_of_axes(document["layout"], has_experts=has_experts),
        f"{number_of(document['global_batch_size'], 'sequence')} of {document['seq_len']} tokens in a step, "
        f"of which each data-parallel rank has {number_of(count, 'micro-batch')} of {of_each}; "
        f"{compute_words(document['compute'], document['fp8'])}{', experts balanced' * has_experts}",
        *_shortened_lines(document),
        "\n[bold]Collectives of a step[/bold], on this rank",
        _collective_table(document["collectives"]),
        "\n[bold]Memory[/bold]",
        _memory_table(document["memory"]),
        *[f"in host memory: {_gib(document['memory']['host_bytes'])} GiB"]
        * (document["memory"]["host_bytes"] > 0),
        f"not counted: {', '.join(document['memory']['not_counted'])}",
        "",
        verdict(document),
    )


def verdict(document: dict[str, Any]) -> str:
    """Say whether the peak fits the device; if not, by how much, and what could help."""
    memory, card = document["memory"], document["card_bytes"]
    peak, state = memory["peak_bytes"], sum({**memory["state_bytes"], "shared": 0}.values())
    numbers = f"the peak is {_gib(peak)} GiB ({peak:,} bytes) and the device has {_gib(card)} GiB"
    if document["fits"]:
        return f"[bold]fits[/bold]: {numbers}, {_gib(card - peak)} GiB to spare"
    lines = f"[bold]DOES NOT FIT[/bold]: {numbers}, {_gib(peak - card)} GiB ({peak - card:,} bytes) too few. "
    pipeline = document["pipeline"]
    if state > card:
        of_experts = ", parallel.ep, parallel.etp" * (document["num_experts"] > 0)
        fsdp2 = "" if document["shards_weights"] else ", or use parallel.dp_shard=fsdp2"
        return (
            f"{lines}Weights, gradients and optimizer state alone take {_gib(state)} GiB, so no batch is "
            f"small enough: raise parallel.pp{of_experts} or parallel.tp{fsdp2}"
        )
    ways = ["a larger parallel.tp or parallel.cp"]
    if pipeline and pipeline["schedule"] != "v_min":
        ways.insert(0, "pipeline.schedule=v_min")
    if document["micro_batch_size"] > 1:
        ways.insert(0, "a smaller train.micro_batch_size")
    if not document["recompute_all"]:
        ways.insert(0, "recompute=all")
    shared = memory["state_bytes"].get("shared", 0)
    kinds = f"activations and {_gib(shared)} GiB that ranks share" if shared else "activations"
    room = f"{_gib(card - state)} GiB are left for {kinds}"
    return f"{lines}Without these it is {_gib(state)} GiB, so {room}: try {', or '.join(ways)}"


def _pipeline_lines(document: dict[str, Any]) -> list[str]:
    pipeline = document["pipeline"]
    if pipeline is None:
        return []
    stages = " and ".join(
        f"{number} ({piece})" for number, piece in zip(pipeline["stages"], pipeline["pieces"], strict=True)
    )
    sizes = ", ".join(_gib(size) for size in pipeline["projected_bytes_by_pp_rank"])
    return [
        f"rank {pipeline['pp_rank']} of the pipeline: stage {stages} of {pipeline['layout']}, "
        f"pipeline.schedule={pipeline['schedule']}",
        f"projected GiB of the ranks of the pipeline, from 0: {sizes}; "
        f"launch.fake_rank={document['world'] // document['layout']['pp']}*n shows rank n",
    ]


def _shortened_lines(document: dict[str, Any]) -> list[str]:
    count, num_run = document["micro_batches"], document["micro_batches_run"]
    if document["pipeline"] is None or num_run == count:
        return []
    return [
        f"{num_run} of the {count:,} micro-batches were run: by the schedule's table the rank holds the same "
        f"during the others, which send the same again"
    ]


def _memory_table(memory: dict[str, Any]) -> Table:
    scale, unit = (2**30, "GiB") if memory["peak_bytes"] >= 2**30 else (2**20, "MiB")
    table = Table(unit)
    for name in ("all the time", "at the peak"):
        table.add_column(name, justify="right")
    state, peak = memory["state_bytes"], memory["at_peak_bytes"]
    rows = {kind: (state.get(kind, 0), peak.get(kind, 0)) for kind in KINDS}
    for kind, sizes in rows.items():
        if any(sizes):
            table.add_row(KINDS[kind], *(f"{size / scale:,.3f}" for size in sizes))
        if kind == "forward":
            for segment, size in memory["activation_bytes_by_segment"].items():
                table.add_row(f"  of {segment}", "", f"{size / scale:,.3f}", style="dim")
    table.add_section()
    sums = [sum(sizes) / scale for sizes in zip(*rows.values(), strict=True)]
    table.add_row(f"all (peak in the {memory['peak_in']})", *(f"{size:,.3f}" for size in sums))
    return table


def _collective_table(collectives: Sequence[dict[str, Any]]) -> Table:
    table = Table()
    for name in ("phase", "operation", "along", "ranks"):
        table.add_column(name, no_wrap=True)
    for name in ("calls", "bytes"):
        table.add_column(name, justify="right", no_wrap=True)
    rows: dict[tuple[str, str, str, str], list[dict[str, Any]]] = {}
    for call in collectives:
        key = call["phase"], call["operation"], call["axes"][0], ranks_in_words(call["ranks"])
        rows.setdefault(key, []).append(call)
    order = ("forward", "backward", "update")
    for key, calls in sorted(rows.items(), key=lambda row: order.index(row[0][0])):
        total = sum(call["bytes"] * call["count"] for call in calls)
        table.add_row(*key, str(sum(call["count"] for call in calls)), shown_size(total))
    return table


def ranks_in_words(ranks: Sequence[int]) -> str:
    """Format 0 1 2 3 as '0..3', 0 8 16 24 as '0..24 by 8', 0 1 2 3 8 9 10 as '0..3 8..10'."""
    steps = {after - before for before, after in zip(ranks, ranks[1:], strict=False)}
    if len(ranks) > 2 and len(steps) == 1:
        (step,) = steps
        return f"{ranks[0]}..{ranks[-1]}{'' if step == 1 else f' by {step}'}"
    starts = [i for i, rank in enumerate(ranks) if i == 0 or rank != ranks[i - 1] + 1]
    runs = [ranks[start:end] for start, end in zip(starts, [*starts[1:], len(ranks)], strict=True)]
    return " ".join(f"{run[0]}..{run[-1]}" if len(run) > 2 else " ".join(map(str, run)) for run in runs)


def _gib(size: int) -> str:
    return f"{size / 2**30:,.2f}"
