"""``suite=regress``: figures that README.md and docs quote, beside the baselines of this card."""

import functools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

import graphmoe
from graphmoe.bench import BenchArgs, jobs
from graphmoe.bench.cases import Call, Case, Measured, Operation, Row, Run, Suite, run_cases
from graphmoe.bench.ops_suite import ops_suite
from graphmoe.config.schema import ConfigError
from graphmoe.run.machine import device_name

FOLDER = Path(graphmoe.__file__).parents[1] / "benchmarks" / "baselines"
LIMITS = dict.fromkeys(("tokens_per_s", "peak_gib", "time_over_floor", "memory_bytes"), 0.03)
LIMITS["start_s"] = 0.2  # the host and its disk decide it
"""Quantities, and the change of time or bytes beyond which a row is marked."""
BF16 = (*jobs.DATA, "data.seq_len=4096", "precision.compute=bf16")
SHARE = (
    *("model=deepseek_v2_lite", "model.num_experts=8", *BF16, "graph.scope=full_iteration"),
    *("train.micro_batch_size=4", "train.global_batch_size=16"),
)
GPT_OSS = (
    *("model=gpt_oss_20b", "model.num_experts=4", "model.context_length=4096", *BF16),
    *("train.micro_batch_size=2", "train.global_batch_size=8"),
)
JOBS: dict[str, tuple[int, tuple[str, ...]]] = {
    "train/bare": (8, jobs.LITE),
    "train/share_of_eight": (5, SHARE),
    "train/share_of_eight_fp8": (5, (*SHARE, "precision.fp8=rowwise")),
    "train/gpt_oss": (5, GPT_OSS),
    "start": (1, jobs.LITE),
}
"""Timed steps and overrides of training jobs; ``start`` runs twice, for the start of the second job."""
OPERATIONS = {
    **dict.fromkeys(("grouped_mlp/v2_lite/forward", "grouped_mlp/v2_lite/dgrad"), "triton"),
    **dict.fromkeys(("grouped_mlp/qwen3_30b/forward", "grouped_mlp/qwen3_30b/dgrad"), "triton"),
    "grouped_mlp/v2_lite/wgrad": "torch",
    "fp8_mlp/v2_lite": "fp8",
    **dict.fromkeys(("attention/v2_lite/forward", "attention/v2_lite/backward"), "sdpa"),
    **dict.fromkeys(("permute", "unpermute_weighted", "swiglu/forward", "swiglu/backward"), "graphmoe"),
    **dict.fromkeys(("router/v3/forward", "linear_cross_entropy/forward_backward"), "graphmoe"),
}
"""Cases of ``suite=ops``, and the alternative to time; if there is none, as on a CPU, the first."""


def measure_changes(args: BenchArgs, device: torch.device, full: bool) -> Measured:
    """Measure all cases, and once more those that are worse. *Raises* ConfigError without baselines."""
    card = device_name(device)
    commit, baselines = (None, {}) if args.write else _read(card)
    calls = {name: functools.partial(_trained, job_of(args, device.type, name, full), args) for name in JOBS}
    for operation in ops_suite(full, device)[0]:
        if operation.name in OPERATIONS:
            calls[operation.name] = functools.partial(_timed, operation, device, args.repeats)
    made = [Case(name, {"case": name}, call) for name, call in calls.items()]
    rows = run_cases(made, _brief, args.out, args.only)
    worse = {row["case"] for row in compared(rows, baselines) if row.get("verdict") == "worse"}
    rows += run_cases([case for case in made if case.name in worse], _brief, args.out)
    found = compared(rows, baselines)
    gone = [] if args.only else sorted(baselines.keys() - {*map(_key, found)})
    left_out = [f"{name}: it was not measured, and has a baseline" for name in gone]
    return found, left_out, {"card": card, "baselines": commit, "measured": rows}


def job_of(args: BenchArgs, device: str, name: str, full: bool) -> jobs.RunCase:
    steps, words = JOBS[name]
    words = words if full else (*jobs.TINY, "data.seq_len=32")
    return jobs.run_case(replace(args, repeats=steps), device, 1, name, {}, words)


def _trained(job: jobs.RunCase, args: BenchArgs) -> list[Row]:
    if isinstance(job.config, ConfigError):
        raise job.config
    found = jobs.train(job.row["overrides"], args.limit_s)
    if job.name == "start":
        second = jobs.train(job.row["overrides"], args.limit_s)
        return [{"start_s": second.summary["time_to_first_step_s"]}]
    row = jobs.numbers_of_run(job.config, 1, found.steps[-JOBS[job.name][0] :], found.summary)
    return [{name: row[name] for name in ("tokens_per_s", "peak_gib", "samples_ms")}]


def _timed(operation: Operation, device: torch.device, repeats: int) -> list[Row]:
    def make(generator: torch.Generator) -> Mapping[str, Call | Run]:
        made, name = operation.make(generator), OPERATIONS[operation.name]
        return {name: made[name]} if name in made else dict([*made.items()][:1])

    return operation._replace(make=make).rows(device, repeats, lambda _: operation.floor_ms)


def compared(rows: Sequence[Row], baselines: Mapping[str, float]) -> list[Row]:
    """Return failed rows, and one for each quantity of the others: the better value if there are two.

    Changes are of time or bytes. A verdict is worse, better, new (without a baseline) or empty.
    """
    found: dict[str, Row] = {}
    for row in rows:
        if row["error"]:
            found[row["case"]] = row
        for quantity in (each for each in LIMITS if row.get(each) and not row["error"]):
            value, change, verdict = row[quantity], None, "new"
            made = {"case": row["case"], "quantity": quantity, "value": value, "error": None}
            if before := baselines.get(key := _key(made)):
                change = (before / value if quantity == "tokens_per_s" else value / before) - 1
                verdict = "" if abs(change) <= LIMITS[quantity] else "worse" if change > 0 else "better"
            if key not in found or (change is not None and change < found[key]["change"]):
                found[key] = made | {"baseline": before, "change": change, "verdict": verdict}
    return [*found.values()]


def _key(row: Row) -> str:
    return f"{row['case']} {row.get('quantity')}"


def _brief(row: Row) -> str:
    return ", ".join(f"{quantity} {row[quantity]:,.2f}" for quantity in LIMITS if row.get(quantity))


def write_baselines(card: str, document: str) -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    _file_of(card).write_text(document, encoding="utf-8")


def _file_of(card: str) -> Path:
    return FOLDER / (re.sub(r"\W+", "_", card.lower().removeprefix("nvidia ")) + ".json")


def _read(card: str) -> tuple[str, dict[str, float]]:
    if not (file := _file_of(card)).exists():
        named, command = "/".join(file.parts[-3:]), "python -m graphmoe.bench suite=regress write=true"
        raise ConfigError(f"there is no {named}, with baselines of {card}; write it by: {command}")
    document = json.loads(file.read_text(encoding="utf-8"))
    return document["environment"]["git_commit"], {_key(row): row["value"] for row in document["rows"]}


REGRESS = Suite(
    measure_changes,
    "case: {case} | quantity: {quantity} | value: {value:,.2f} | baseline: {baseline:,.2f} | "
    "change %: {change:%*+.1f} | verdict: {verdict}",
    "Baselines: {method[card]}, commit {method[baselines]}. Changes: of time or bytes. Worse: by over "
    f"{LIMITS['peak_gib']:.0%}, a start by {LIMITS['start_s']:.0%}, each time of two; the exit status is 1. "
    "Better: renew the baselines by write=true.",
)
