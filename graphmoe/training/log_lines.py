"""Log lines of a run: its start, its steps, its expert loads."""

import logging
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from graphmoe.config.choices import compute_words
from graphmoe.config.progress import console
from graphmoe.config.ranges import number_of
from graphmoe.config.schema import DeviceChoice
from graphmoe.data import Corpus
from graphmoe.model.sizes import count_parameters
from graphmoe.plan.experts import has_experts, num_dense
from graphmoe.plan.plan import Plan
from graphmoe.run.expert_loads import ASCII, BLOCKS, LoadWatch, load_bar
from graphmoe.runtime.host.tuning import cores_here
from graphmoe.training.step_rows import StepRow

log = logging.getLogger(__name__)

WIDTH = 91  # columns, 100 with the time of day
AXES = ("dp", "tp", "cp", "pp", "ep", "etp")


class StepLog:
    def __init__(self, plan: Plan) -> None:
        self._steps = plan.train.steps
        self._watch = LoadWatch(plan.model.top_k)
        self._blocks = _takes(console().encoding, BLOCKS)

    def write(self, rows: Sequence[dict[str, Any]], read: Sequence[StepRow]) -> None:
        """Log one line for all steps ``read``; ``rows`` are their metrics.jsonl rows."""
        last, timed = rows[-1], _timed(rows)
        left = (self._steps - last["step"]) * sum(row["step_s"] for row in timed) / len(timed)
        compiled = last.get("start_s") is not None  # one step alone, not typical of later ones
        log.info(step_line(rows, self._steps, left if left > 0 and not compiled else None))
        load_LE = sum((row.load_LE for row in read[1:]), read[0].load_LE) / len(read)
        if line := experts_line(last, load_LE, self._blocks):
            log.info(line)
            if found := self._watch.add(last["step"], len(read), load_LE.tolist()):
                log.warning("unbalanced experts in %s", found)
        if line := ranks_line(last):
            log.info(line)


def start_block(plan: Plan, corpus: Corpus, device: str, compiled: Sequence[str]) -> str:
    """Describe the run, one line per topic."""
    model, layout = plan.model, plan.layout
    parameters = count_parameters(model)
    total, active = (parameters[kind]["full"] for kind in ("total", "active"))
    size = f"{quantity(total)} parameters, {quantity(active)} active"
    if model.lora_rank:
        size += f", {quantity(parameters['total']['adapters'])} in adapters of rank {model.lora_rank} train"
    parts = [f"{number_of(model.num_layers, 'layer')} ({num_dense(model)} dense)"]
    if has_experts(model):
        parts.append(f"{number_of(model.num_experts, 'expert')}, {model.top_k} a token")
    ranks = layout.size("world")
    axes = " ".join(f"{axis}={getattr(layout, axis)}" for axis in AXES if getattr(layout, axis) > 1)
    unit = "GPU" if plan.run.device is DeviceChoice.cuda else "process"
    threads, cores = torch.get_num_threads(), cores_here()
    used = f"{number_of(threads, 'thread')}{' each' * (ranks > 1)} on {number_of(cores, 'core')}"
    cpu = "" if unit == "GPU" else f", {used}"
    of_step = plan.train.global_batch_size * plan.seq_len
    steps, there = plan.train.steps, corpus.counts.get("train_tokens")
    tokens = quantity(steps * of_step)
    epochs = f", {steps * of_step / there:.2g} epochs of {quantity(there)}" if there else ""
    dispatcher = plan.dispatcher if layout.size("ep_etp") > 1 else "none, experts are on each rank"
    dispatch = {"dispatcher": dispatcher} if has_experts(model) else {}
    scope, optim, masked = plan.graph.scope, plan.optim, ", documents masked" * plan.data.document_mask
    warmup = number_of(optim.warmup_steps, "step")
    rising = f"after {warmup} of warm-up" if optim.warmup_steps else "without warm-up"
    chosen = {"auto": ", ".join(plan.run.auto)} if plan.run.auto else {}
    lines = {
        "model": f"{model.name}, {size}; {'; '.join(parts)}",
        "layout": f"{number_of(ranks, unit)} ({device}{cpu}){f': {axes}' if axes else ''}",
        **chosen,
        "precision": compute_words(plan.precision.compute.value, plan.precision.fp8.value),
        "graphs": f"graph.scope={scope if isinstance(scope, str) else f'[{chr(44).join(scope)}]'}",
        **dispatch,
        "compile": "; ".join(compiled),
        "data": f"{plan.data.source}, sequences of {plan.seq_len} tokens{masked}",
        "optimizer": f"{optim.name}, learning rate {optim.lr:g}, {optim.schedule} {rising}",
        "run": f"{number_of(steps, 'step')} of {quantity(of_step)} tokens: {tokens} tokens{epochs}",
    }
    return "\n".join(["this run", *(f"  {name:<11} {text}" for name, text in lines.items())])


def step_line(rows: Sequence[dict[str, Any]], total_steps: int, left_s: float | None) -> str:
    """Format consecutive steps on one line: values of the last, rate of all."""
    row = rows[-1]
    timed = _timed(rows)
    share = row["step_s"] * len(timed) / sum(each["step_s"] for each in timed)
    rates = (row[key] for key in ("tokens_per_s", "tflops", "mfu"))
    rate, tflops, mfu = (None if each is None else each * share for each in rates)
    assert rate is not None and tflops is not None
    skipped = sum(each["skipped"] for each in rows)
    parts = (  # how soon it is dropped from a long line, whether it is shown, text
        (0, True, f"step {row['step']:>{len(str(total_steps))}}/{total_steps}"),
        (0, True, f"loss {row['loss']:.4f}"),
        (4, row["mtp_loss"], f"mtp {row['mtp_loss']:.4f}"),
        (3, True, f"grad {row['grad_norm']:.3g}"),
        (0, True, f"{quantity(rate) if rate >= 1e6 else f'{rate:,.0f}'} tokens/s"),
        (1, True, f"{tflops:.3g} TFLOP/s" if mfu is None else f"MFU {100 * mfu:.1f}%"),
        (1, True, f"{row['memory_gib']:.4g} GiB"),
        (0, skipped, f"SKIPPED {skipped}: {_why_skipped(rows)}"),
        (1, row["skipped_total"], f"{row['skipped_total']} skipped"),
        (2, left_s is not None, f"ETA {duration(left_s or 0)}"),
    )
    return _fitted(parts)


def experts_line(row: dict[str, Any], load_LE: Tensor, blocks: bool) -> str | None:
    """Format mean expert loads of the layer with the fullest expert; None without loads."""
    if not load_LE.numel():
        return None
    layer = int(load_LE.amax(dim=1).argmax())
    loads: list[float] = load_LE[layer].tolist()
    where = f" in layer {layer}" if len(load_LE) > 1 else ""
    received, has_line = row.get("receive_load"), "planned_rank_load" in row
    parts = (
        (0, True, f"experts  load max {max(loads):.1f}{where}"),
        (0, True, load_bar(loads, BLOCKS if blocks else ASCII)),
        (0, True, f"entropy {row['router_entropy']:.2f}"),
        (3, row["balance_loss"], f"balance {row['balance_loss']:.3f}"),
        (1, row["rank_load"] > 1 and not has_line, f"rank load {row['rank_load']:.2f}"),
        (1, received is not None, f"receive load {received or 0:.2f}"),
        (2, row["z_loss"], f"z {row['z_loss']:.3f}"),
    )
    return _fitted(parts)


def ranks_line(row: dict[str, Any]) -> str | None:
    """Format the busiest rank's load before and after replicas; None without replicas."""
    if "planned_rank_load" not in row:
        return None
    loads = f"{row['rank_load']:.2f} -> {row['planned_rank_load']:.2f}"
    moved = f"{number_of(round(row['replicas']), 'replica')}, {row['replica_gb']:.2g} GB in a micro-batch"
    return f"ranks    load {loads}  {moved}"


def quantity(number: float) -> str:
    """Format with three digits and a unit: 4.21M, 1.23B."""
    for limit, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e4, "k")):
        if number >= limit:
            return f"{number / {'k': 1e3}.get(unit, limit):#.3g}".rstrip(".") + unit
    return f"{number:,.0f}"


def duration(seconds: float) -> str:
    """Format seconds: 4:05, 3h 12m, 12d 03h."""
    minutes, hours = seconds / 60, seconds / 3600
    if hours < 1:
        return f"{int(minutes)}:{int(seconds) % 60:02}"
    if hours < 48:
        return f"{int(hours)}h {int(minutes) % 60:02}m"
    return f"{int(hours / 24)}d {int(hours) % 24:02}h"


def _timed(rows: Sequence[dict[str, Any]]) -> Sequence[dict[str, Any]]:
    return rows[1:] if rows[0].get("start_s") is not None and len(rows) > 1 else rows


def _takes(encoding: str, text: str) -> bool:
    try:
        text.encode(encoding)
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def _why_skipped(rows: Sequence[dict[str, Any]]) -> str:
    finite = [
        math.isfinite(each["loss"]) and math.isfinite(each["grad_norm"]) for each in rows if each["skipped"]
    ]
    return "the gradient's square overflows fp32" if any(finite) else "not finite"


def _fitted(parts: Sequence[tuple[int, Any, str]]) -> str:
    there = [(rank, text) for rank, holds, text in parts if holds]
    while len(line := "  ".join(text for _, text in there)) > WIDTH:
        last = max(there, key=lambda part: part[0])
        if last[0] == 0:
            break
        there.remove(last)
    return line
