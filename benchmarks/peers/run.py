"""Run graphmoe and its peers for the same job on this machine, one after the other, and print one table.

python benchmarks/peers/run.py job=A gpus=1 peers=transformers,torchtitan,graphmoe minutes=9 out=A_1.json

Each setting of settings.py is a process of its own with a time limit; its error is one line of the table.
``out`` is written after each row, and the same command goes on from it. docs/benchmarks/peers.md says how
figures compare.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from benchmarks.peers.settings import JOBS, MODULES, OF_TINY, SETTINGS, TINY, settings_of  # noqa: E402
from graphmoe.bench.jobs import UNREAD  # noqa: E402
from graphmoe.checkpoint.hf.families import to_hf_config  # noqa: E402
from graphmoe.command.hydra import compose_config  # noqa: E402
from graphmoe.config.arguments import emit, parse_args, run_tool  # noqa: E402
from graphmoe.config.schema import ConfigError, OutputFormat  # noqa: E402
from graphmoe.model.sizes import flops_per_token  # noqa: E402
from graphmoe.plan.costs.hardware import peak_tflops  # noqa: E402
from graphmoe.run.machine import describe  # noqa: E402

Row = dict[str, Any]
Size = StrEnum("Size", ("full", "tiny"))
JobName = StrEnum("JobName", {name: name for name in JOBS})
WARM_UP = 5
TOO_LITTLE_S = 30  # no setting begins with less time left
CAUSE = re.compile(r"^(?:\[rank\d+\]: ?)?(error: .*|[\w.]*(?:Error|Exception)\b.*)$", re.MULTILINE)


@dataclass
class PeersArgs:
    job: JobName
    """A: 6 layers of DeepSeek-V2-Lite; B: 6 of Qwen3-30B-A3B; C: all 48 of Qwen3-30B-A3B."""
    gpus: int = 1
    """GPUs of this machine, each with its own sequences; 1 or 2 for A and B, 4 for C."""
    peers: list[str] = field(default_factory=lambda: ["graphmoe", "transformers"])
    """Of graphmoe, transformers, liger and torchtitan, in this order."""
    minutes: float = 9.0
    """Minutes of all settings together; those that do not begin are left out."""
    limit_s: float = 200.0
    """Most seconds of one setting, compilation included."""
    steps: int = 14
    """Steps of a setting, > 5; the first 5 are warm-up."""
    size: Size = Size.full
    """full, or tiny: small widths on a CPU, to try the scripts."""
    out: Path | None = None
    """File for the JSON document; its rows are not measured again."""
    format: OutputFormat = OutputFormat.text
    """Output on stdout: text, or one JSON document."""


def main(argv: list[str]) -> None:
    args = parse_args(PeersArgs, argv, prog="benchmarks.peers.run", places=("job",))
    allowed = JOBS[args.job].gpus if args.size is Size.full else TINY.gpus
    if unknown := [peer for peer in args.peers if peer not in SETTINGS]:
        raise ConfigError(f"peers={','.join(unknown)} is not known; use some of {','.join(SETTINGS)}")
    if args.steps <= WARM_UP:
        raise ConfigError(f"steps={args.steps} is not more than {WARM_UP}; use 14")
    if args.gpus not in allowed:
        raise ConfigError(f"gpus={args.gpus} is not for job={args.job}; use {' or '.join(map(str, allowed))}")
    document = measure_all(args)
    emit(document, "\n".join(render(document)), args.format)


def measure_all(args: PeersArgs) -> Row:
    """Measure settings of peers; return the JSON document, which is written after each row."""
    tiny, of_job = args.size is Size.tiny, JOBS[args.job]
    words = [of_job.words[0], *TINY.words, *OF_TINY[of_job.words[0]]] if tiny else [*of_job.words]
    model, (_, seq_len, sequences, _) = (
        compose_config(*words, "data=synthetic").model,
        TINY if tiny else of_job,
    )
    flops, facts = flops_per_token(model, seq_len), describe(torch.device("cpu" if tiny else "cuda"))
    document: Row = {"job": args.job.name, "size": args.size.name, "gpus": args.gpus, "words": words}
    document |= {"seq_len": seq_len, "sequences_per_gpu": sequences, "flops_per_token": flops}
    document |= {"peak_tflops": (peak := peak_tflops(facts["device"])), "warm_up_steps": WARM_UP}
    document["environment"] = {key: value for key, value in facts.items() if key != "host"}
    has_rows = args.out is not None and args.out.exists()
    rows = document["rows"] = list[Row]()
    if has_rows:
        before = json.loads(args.out.read_text(encoding="utf-8"))
        before["environment"]["command"] = facts["command"]  # minutes and peers may differ
        if others := [key for key in document if key != "rows" and before.get(key) != document[key]]:
            raise ConfigError(f"out={args.out} has rows of another {others[0]}; use another file")
        rows += before["rows"]
    job = {"config": to_hf_config(model)[1], "seq_len": seq_len, "sequences": sequences, "gpus": args.gpus}
    job |= {"steps": args.steps, "on_gpu": not tiny}
    until = time.monotonic() + 60 * args.minutes
    pairs = [
        (peer, each) for peer in args.peers for each in settings_of(peer, args.job, args.gpus, tiny=tiny)
    ]
    for peer, setting in pairs:
        limit = min(args.limit_s, until - time.monotonic())
        if limit < TOO_LITTLE_S or (peer, setting) in [(row["peer"], row["setting"]) for row in rows]:
            continue
        row = {"peer": peer, "setting": setting, "error": None}
        row |= measure_one(peer, job | {"setting": setting}, words, limit)
        if timed := row.get("seconds", [])[WARM_UP:]:
            row["tokens_per_s_per_gpu"] = rate = seq_len * sequences / median(timed)
            row["mfu"] = rate * flops / (peak * 1e12) if peak else None
        rows.append(row)
        print(f"{peer} {setting}: {row['error'] or f'{rate:,.0f} tokens/s'}", file=sys.stderr, flush=True)
        if args.out:
            args.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return document


def measure_one(peer: str, job: Row, words: Sequence[str], limit_s: float) -> Row:
    """Run a setting as a process; return its seconds, losses and memory, or its error in one line."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder, ours = Path(name), peer == "graphmoe"
        record, printed, run = folder / "record.json", folder / "printed", folder / "run"
        (folder / "job.json").write_text(json.dumps(job | {"record": str(record)}), encoding="utf-8")
        command = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={job['gpus']}"]
        command += ["-m", f"benchmarks.peers.{MODULES.get(peer)}", str(folder / "job.json")]
        if ours:
            command = ["-m", "graphmoe.train", *words_of_graphmoe(job, words), f"hydra.run.dir={run}"]
        began, status = time.monotonic(), run_process(command, printed, limit_s)
        row: Row = {"command": command[:-1], "total_s": round(time.monotonic() - began, 1)}
        if status is None:
            return row | {"error": f"not done after {limit_s:.0f} s"}
        if status:
            return row | {"error": cause_of(printed.read_text(encoding="utf-8", errors="replace"), status)}
        if not ours:
            return row | json.loads(record.read_text(encoding="utf-8"))
        steps = map(json.loads, (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
        timed = [(step["step_s"], step["loss"]) for step in steps if "loss" in step]
        summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
        row |= {"peak_gib": summary["peak_memory_gib"], "device_gib": summary["device_memory_gib"]}
        return row | dict(zip(("seconds", "losses"), zip(*timed, strict=True), strict=True))


def words_of_graphmoe(job: Row, words: Sequence[str]) -> list[str]:
    """Return the bare command of the job; that of job C is an experiment, as its state must be small."""
    gpus = job["gpus"]
    shared = [f"train.global_batch_size={gpus * job['sequences']}", f"data.seq_len={job['seq_len']}"]
    shared += [f"train.steps={job['steps']}", "train.log_interval=1", *UNREAD]
    if gpus == 4:
        return ["experiment=finetune_qwen3_30b_a3b_4_h200", *shared]
    ranks = [f"launch.nproc={gpus}", f"parallel.ep={gpus}"] if gpus > 1 else []
    return [*words, "data=synthetic", "optim.lr=1e-6", *ranks, *shared]


def run_process(words: Sequence[str], printed: Path, limit_s: float) -> int | None:
    """Run Python with these words; return its status, or None if it was ended at the limit."""
    own = {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}", "HF_HUB_OFFLINE": "1"}
    command, environment = [sys.executable, *words], os.environ | own
    options: Row = {"cwd": ROOT, "env": environment, "start_new_session": True}
    with printed.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, **options)
        try:
            return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # its ranks too
            process.wait()


def cause_of(printed: str, status: int) -> str:
    """Return the line of the output that says why the process ended."""
    found = [line for line in CAUSE.findall(printed) if "ChildFailedError" not in line]
    of_memory = [line for line in found if "OutOfMemory" in line]
    last = (of_memory or found or printed.strip().splitlines() or ["no output"])[-1]
    return f"status {status}: {last[:240]}"


def render(document: Row) -> Iterator[str]:
    """Yield lines of a Markdown table, the fastest setting of each peer first, and what it is of."""
    yield "| peer | setting | tokens/s a GPU | MFU | peak GiB | ms a step, p10 to p90 | last loss |"
    yield "|---|---|---|---|---|---|---|"
    for row in sorted(document["rows"], key=lambda row: (row["peer"], -row.get("tokens_per_s_per_gpu", 0))):
        setting = " ".join(f"{key}={value}" for key, value in row["setting"].items()) or "bare command"
        cells = [row["peer"], setting]
        if row["error"]:
            cells += [row["error"].replace("|", "/"), "", "", "", ""]
        else:
            times = sorted(1e3 * seconds for seconds in row["seconds"][document["warm_up_steps"] :])
            tenth, last = len(times) // 10, row["losses"][-1]
            cells += [f"{row['tokens_per_s_per_gpu']:,.0f}", f"{row['mfu']:.1%}" if row["mfu"] else ""]
            cells.append(f"{row['peak_gib']:.1f}" if row.get("peak_gib") else "")
            cells.append(f"{times[tenth]:.1f} to {times[-1 - tenth]:.1f}")
            cells.append(f"{last:.3f}")
        yield f"| {' | '.join(cells)} |"
    facts, tokens = document["environment"], document["seq_len"] * document["sequences_per_gpu"]
    device = f"{document['gpus']} x {facts['device']}"
    yield ""
    yield f"job={document['job']}, size={document['size']}, {device}. A step has"
    gflop = f"{document['flops_per_token'] / 1e9:.3f} GFLOP each, causal attention halved."
    yield f"{tokens:,} tokens a GPU, of {gflop} Commit: {facts['git_commit'] or 'not in a git checkout'}"


if __name__ == "__main__":
    run_tool(main)
