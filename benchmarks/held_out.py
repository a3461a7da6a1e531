"""Twenty runs that no rate of `graphmoe.project` was fitted to, projected before they are measured.

    python benchmarks/held_out.py list       # projections to held_out_h200.json, from a clean checkout
    python benchmarks/held_out.py gpus=1     # measures the runs of one GPU, adds them to the file
    python benchmarks/held_out.py gpus=2 only=12,15

A run counts as right within 5% of its time (median of its last 8 steps) and 3% of its memory (most in torch's
allocator at a time, of the fullest rank). Runs that are measured keep the projections of the list.
"""

import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from graphmoe.bench.cases import CaseFailed
from graphmoe.bench.jobs import UNREAD, train
from graphmoe.run.machine import describe
from graphmoe.training.memory import OUTSIDE_ALLOCATOR

ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT / "benchmarks" / "held_out_h200.json"
COMMON = "data=synthetic optim.lr=1e-6 precision.compute=bf16 data.seq_len=4096 optim.warmup_steps=0"
STEPS, MEASURED, LIMIT_S = 14, 8, 110
MOST_TIME, MOST_MEMORY = 0.05, 0.03
CAPTURED = "graph.scope=full_iteration pipeline.ep_overlap=false"
OVERLAP = "moe.dispatcher=symm graph.scope=full_iteration pipeline.ep_overlap=true"
PIPELINE = "parallel.pp=2"

# GPUs, micro-batch size, micro-batches of each data-parallel rank in a step, other words
RUNS: tuple[tuple[int, int, int, str], ...] = (
    (1, 4, 2, f"model=moonlight_16b model.num_layers=5 {CAPTURED}"),
    (1, 2, 2, f"model=gpt_oss_20b model.num_layers=6 {CAPTURED}"),
    (1, 2, 2, f"model=ling_mini_2 model.num_layers=5 {CAPTURED}"),
    (1, 2, 4, f"model=glm_4_5_air model.num_layers=3 model.num_experts=64 {CAPTURED}"),
    (1, 2, 2, f"model=mixtral_8x7b model.num_layers=2 {CAPTURED}"),
    (1, 2, 4, f"model=llama3_2_1b data.seq_len=8192 {CAPTURED}"),
    (1, 1, 4, f"model=qwen3_8b model.num_layers=16 recompute.ops=[layernorm] {CAPTURED}"),
    (1, 2, 2, f"model=qwen3_30b_a3b model.num_layers=5 precision.fp8=rowwise {CAPTURED}"),
    (1, 4, 2, f"model=deepseek_v2_lite model.num_layers=5 optim=muon {CAPTURED}"),
    (1, 2, 2, "model=qwen3_30b_a3b model.num_layers=5 graph.scope=partial pipeline.ep_overlap=false"),
    (1, 2, 2, f"model=qwen3_30b_a3b model.num_layers=8 model.lora_rank=16 {CAPTURED}"),
    (1, 1, 4, f"model=deepseek_v2_lite model.num_layers=6 data.seq_len=16384 recompute=all {CAPTURED}"),
    (2, 4, 2, f"model=moonlight_16b model.num_layers=8 parallel.ep=2 {OVERLAP}"),
    (2, 2, 4, f"model=qwen3_30b_a3b model.num_layers=8 parallel.ep=2 precision.fp8=rowwise {OVERLAP}"),
    (2, 2, 2, f"model=gpt_oss_20b model.num_layers=8 parallel.ep=2 {OVERLAP}"),
    (2, 2, 4, f"model=llama3_2_1b {CAPTURED}"),
    (2, 1, 8, f"model=qwen3_30b_a3b model.num_layers=8 {PIPELINE} pipeline.schedule=zb1p graph.scope=layer"),
    (4, 2, 4, f"model=qwen3_30b_a3b model.num_layers=16 parallel.ep=4 {OVERLAP}"),
    (4, 4, 2, f"model=moonlight_16b parallel.ep=4 recompute.ops=[layernorm] {OVERLAP}"),
    (4, 1, 8, f"model=deepseek_v2_lite model.num_layers=16 {PIPELINE} parallel.ep=2 {OVERLAP}"),
)  # fmt: skip


def words_of(run: tuple[int, int, int, str]) -> list[str]:
    gpus, size, count, own = run
    ranks = gpus // (2 if PIPELINE in own else 1)
    batch = (
        f"train.micro_batch_size={size} train.global_batch_size={size * count * ranks} launch.nproc={gpus}"
    )
    return f"{COMMON} {batch} {own}".split()


def projected(words: list[str]) -> dict[str, float]:
    command = [sys.executable, "-m", "graphmoe.project", *words, "hardware=h200", "format=json"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    if done.returncode:
        sys.exit(f"{' '.join(words)}: {done.stderr.strip()}")
    found = json.loads(done.stdout)
    apart = sum(found["buffers_gb"].get(kind, 0.0) for kind in OUTSIDE_ALLOCATOR)
    gib = (found["memory_gb"]["total"] - apart) * 1e9 / 2**30
    return {"projected_ms": found["step_time_s"] * 1e3, "projected_gib": gib}


def measured(words: list[str]) -> dict[str, Any]:
    steps = f"train.steps={STEPS} train.log_interval={STEPS}"
    try:
        found = train([*words, *steps.split(), *UNREAD], LIMIT_S)
    except CaseFailed as error:
        return {"error": str(error)}
    seconds = [row["step_s"] for row in found.steps[-MEASURED:]]
    return {
        "measured_ms": statistics.median(seconds) * 1e3,
        "samples_ms": [round(each * 1e3, 3) for each in seconds],
        "measured_gib": found.summary["peak_memory_gib"],
    }


def write(document: dict[str, Any]) -> None:
    FILE.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def table(rows: list[dict[str, Any]]) -> str:
    """Return a Markdown table; an error beyond `MOST_TIME` or `MOST_MEMORY` is bold."""

    def error(row: dict[str, Any], quantity: str, most: float) -> str:
        if f"measured_{quantity}" not in row:
            return row.get("error", "")
        found = row[f"projected_{quantity}"] / row[f"measured_{quantity}"] - 1
        return f"**{found:+.1%}**" if abs(found) > most else f"{found:+.1%}"

    head = (
        "| # | GPUs | words | projected ms | error | projected GiB | error |\n|---|---|---|---|---|---|---|\n"
    )
    for number, row in enumerate(rows):
        time, memory = error(row, "ms", MOST_TIME), error(row, "gib", MOST_MEMORY)
        head += f"| {number} | {row['gpus']} | `{row['words']}` | {row['projected_ms']:.1f} | {time} | "
        head += f"{row['projected_gib']:.2f} | {memory} |\n"
    return head


def main() -> None:
    given = dict(word.partition("=")[::2] for word in sys.argv[1:])
    if unknown := given.keys() - {"list", "gpus", "only"}:
        sys.exit(
            f"error: {unknown.pop()} is not a key of held_out.py; use list, gpus=N or only=NUMBER,NUMBER"
        )
    commit = describe(torch.device("cpu"))["git_commit"]
    if "list" in given:
        if not commit or commit.endswith("-dirty"):
            sys.exit("error: list needs a clean checkout, whose commit it writes")
        each = [(run[0], words_of(run)) for run in RUNS]
        rows = [{"gpus": gpus, "words": " ".join(words), **projected(words)} for gpus, words in each]
        write({"listed": commit, "rows": rows})
    document = json.loads(FILE.read_text(encoding="utf-8"))
    only = [int(each) for each in given.get("only", "").split(",") if each]
    for number, row in enumerate(document["rows"]):
        if str(row["gpus"]) == given.get("gpus") and (not only or number in only):
            row.pop("error", None)
            row |= {"commit": commit, **measured(row["words"].split())}
            write(document)
    print(table(document["rows"]))


if __name__ == "__main__":
    main()
