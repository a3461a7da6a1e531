"""Train dense models and MoEs with equal active parameters, and compare their losses at equal time.

python benchmarks/moe_vs_dense.py folder=outputs/moe_vs_dense out=moe_vs_dense.json
python benchmarks/moe_vs_dense.py folder=outputs/moe_vs_dense out=moe_vs_dense.json sizes=300m minutes=9

Each run is a process of `python -m graphmoe.train`, compiled and captured as it decides. In each layer the
MoE has 8 experts of width F/2 in place of an MLP of width F, and a token uses 2 of them. Both models train on
the same batches with the same AdamW, warm-up and cosine: the MoE for one number of steps, the dense model for
several, each with its own schedule. Between two dense runs log-loss is linear in log-tokens and log-time.
`out` is written after each run. The same command continues it: it starts the runs that are missing.
"""

import bisect
import enum
import hashlib
import json
import math
import shutil
import statistics
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise, product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml

from graphmoe.bench.cases import without_folders
from graphmoe.bench.jobs import UNREAD, split_list, without
from graphmoe.command.hydra import compose_config
from graphmoe.config.arguments import emit, parse_args, run_tool
from graphmoe.config.schema import ConfigError, DeviceChoice, OutputFormat
from graphmoe.data.indexed import pair, smallest_dtype, write_token_file
from graphmoe.data.tokenizer import TRAINED_END, encode, load_tokenizer, train_bpe
from graphmoe.model.sizes import count_parameters, flops_per_token
from graphmoe.prepare import PrepareArgs, prepare
from graphmoe.run.files import CONFIG_FILE, METRICS_FILE, SUMMARY_FILE, write_json
from graphmoe.run.machine import describe, open_device
from graphmoe.runtime.host.files import sha256_of

Row = dict[str, Any]
Kind = enum.StrEnum("Kind", ("moe", "dense"))


class Batches(NamedTuple):
    vocab: int
    seq_len: int
    sequences: int  # of a step
    held_out: int  # sequences for validation, a multiple of each micro-batch size that may be chosen

    @property
    def of_step(self) -> int:
        return self.sequences * self.seq_len  # tokens


class Shape(NamedTuple):
    width: int
    layers: int
    heads: int
    steps: int  # of the MoE
    batches: Batches


FULL, SMALL = Batches(16384, 2048, 32, 256), Batches(512, 64, 8, 32)
SIZES = {
    "30m": Shape(512, 9, 4, 900, FULL), "100m": Shape(768, 13, 6, 600, FULL),
    "300m": Shape(1024, 22, 8, 400, FULL), "tiny": Shape(128, 2, 2, 30, SMALL),
}  # fmt: skip
"""Active parameters without embedding and head. ``tiny`` shows on a CPU that the comparison runs."""
WIDTHS_OF_FFN, EXPERTS, TOP_K = 3, 8, 2  # MLP over residual stream; experts are 1 / TOP_K as wide as the MLP
RATE = 0.768  # peak learning rate times width, for both kinds
WORDS = ("model=tiny_gqa", "model.rope_theta=10000", "optim=adamw", "optim.min_lr_ratio=0.1")
VALIDATIONS = 8
UNTIMED = 7  # first steps, which compile and capture: they count as the median of the others
MOST_EPOCHS = 4
ENDINGS = {".py", ".pyi", ".h", ".hpp", ".rst", ".md", ".txt"}
LARGEST_FILE = 1 << 20  # bytes; larger ones are mostly tables
HELD_OUT, OF_BPE = 50, 1 << 25  # each n-th file is for validation; characters from which the tokenizer learns
SLOW_FLOPS, START_S = 2e14, 60  # of a run not yet measured, to decide if it would end within `minutes`


@dataclass
class VersusArgs:
    folder: Path
    """Folder for tokens and runs."""
    out: Path
    """File for the JSON document, which the same command continues."""
    sizes: list[str] = field(default_factory=lambda: ["30m", "100m", "300m"])
    """30m, 100m, 300m active parameters without embedding and head; tiny for a CPU."""
    minutes: float | None = None
    """Start no run that is expected to end later than this, > 0; default: no limit."""
    budgets: list[float] = field(default_factory=lambda: [1.0, 1.6])
    """Steps of the dense runs over those of the MoE, two or more, > 0."""
    rates: list[float] = field(default_factory=list)
    """Peak learning rates to try, > 0; the table has each model's best. Default: 0.768 / width."""
    length: float = 1.0
    """Factor on the steps of all runs, > 0."""
    texts: list[str] = field(default_factory=list)
    """Folders with text; default: all of this Python, with its packages."""
    device: DeviceChoice = DeviceChoice.auto
    """cuda, cpu or auto."""
    overrides: str | None = None
    """Further overrides of all runs, such as compile=none."""
    format: OutputFormat = OutputFormat.text
    """Output on stdout: text, or one JSON document."""


class Run(NamedTuple):
    size: str
    kind: Kind
    steps: int
    rate: float


def main(argv: list[str]) -> None:
    args = parse_args(VersusArgs, argv, prog="benchmarks.moe_vs_dense", places=("folder", "out"))
    check(args)
    began = time.monotonic()
    texts = {size: text_of(args, SIZES[size].batches) for size in args.sizes}
    device = open_device(args.device)
    facts = {key: value for key, value in describe(device).items() if key != "host"}
    facts["command"] = [without_folders(word) for word in ("python", "benchmarks/moe_vs_dense.py", *argv)]
    own = split_list(args.overrides or "")
    document: Row = {"environment": facts, "settings": [*WORDS, *own], "texts": texts, "runs": []}
    if args.out.exists():
        document = continued(json.loads(args.out.read_text(encoding="utf-8")), document, args.out)
    missing, runs = [], [*wanted(args)]
    for run in runs:
        epochs = run.steps * SIZES[run.size].batches.of_step / texts[run.size]["tokens"]
        if epochs > MOST_EPOCHS:
            raise ConfigError(f"{run.size} would read the text {epochs:.1f} times, at most {MOST_EPOCHS} do")
    for run in runs:
        words = [*words_of(run, args.folder, texts[run.size]["name"]), f"run.device={args.device.name}", *own]
        if any(row["key"] == [*run] for row in document["runs"]):
            continue
        expected = expected_s(run, words, document["runs"])
        if args.minutes and time.monotonic() - began + expected > 60 * args.minutes:
            missing.append(f"{run.size} {run.kind}, {run.steps} steps, about {expected:.0f} s")
            continue
        document["runs"].append(train(run, words, args.folder / "runs" / "-".join(map(str, run))))
        write_json(args.out, document)
    document["results"] = results(document["runs"])
    write_json(args.out, document)
    emit(document, "\n".join(render(document, missing)), args.format)


def check(args: VersusArgs) -> None:
    if not args.sizes or {*args.sizes} - SIZES.keys():
        raise ConfigError(f"sizes={','.join(args.sizes)}: use some of {', '.join(SIZES)}")
    numbers_of = {"budgets": args.budgets, "rates": args.rates, "length": [args.length]}
    for name, numbers in (numbers_of | {"minutes": [args.minutes or 1]}).items():
        if not all(0 < number < math.inf for number in numbers):
            raise ConfigError(f"{name}={','.join(map(str, numbers))}: use numbers above 0")
    if len({*args.budgets}) < 2:
        raise ConfigError(f"budgets={','.join(map(str, args.budgets))}: use two or more, such as 1,1.6")
    if min(steps_of(size, 1, args) for size in args.sizes) < 2 * UNTIMED:
        raise ConfigError(f"length={args.length:g} leaves less than {2 * UNTIMED} steps; use more")


def steps_of(size: str, budget: float, args: VersusArgs) -> int:
    return round(SIZES[size].steps * args.length * budget)


def wanted(args: VersusArgs) -> Iterator[Run]:
    for size in args.sizes:
        rates, count = args.rates or [round(RATE / SIZES[size].width, 6)], steps_of(size, 1, args)
        for rate in rates:
            yield Run(size, Kind.moe, count, rate)
        for budget, rate in product(args.budgets, rates):
            yield Run(size, Kind.dense, steps_of(size, budget, args), rate)


def continued(earlier: Row, now: Row, out: Path) -> Row:
    """Return the earlier document. *Raises* ConfigError if its runs would not compare with those of today."""
    old, new = ({key: d["environment"][key] for key in ("device", "git_commit")} for d in (earlier, now))
    old["settings"], new["settings"] = earlier["settings"], now["settings"]
    shared = earlier["texts"].keys() & now["texts"].keys()
    old["text"], new["text"] = ([d["texts"][size]["sha256"] for size in shared] for d in (earlier, now))
    if differ := [key for key in old if old[key] != new[key]]:
        raise ConfigError(f"out={out} has runs of another {', '.join(differ)}; use a new file")
    return earlier | {"texts": earlier["texts"] | now["texts"]}


def text_of(args: VersusArgs, batches: Batches) -> Row:
    """Tokenise the text once; return counts. Of files with equal contents one is used."""
    roots = [Path(text) for text in args.texts]
    if not roots:
        roots = [Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib")]
        roots += [Path(entry) for entry in sys.path if entry.endswith("-packages")]
    name = hashlib.sha256("\n".join([*map(str, roots), *map(str, batches)]).encode()).hexdigest()[:12]
    folder = args.folder / f"text_{name}"
    if (folder / "facts.json").exists():
        return dict(json.loads((folder / "facts.json").read_text(encoding="utf-8")))
    print("reading text", file=sys.stderr)
    train, held_out = read_texts(roots)
    if not (train and held_out):
        raise ConfigError(f"texts={','.join(map(str, roots))}: too few files of {', '.join(sorted(ENDINGS))}")
    folder.mkdir(parents=True, exist_ok=True)
    few = train[:: max(sum(map(len, train)) // OF_BPE, 1)]
    tokenizer = train_bpe(iter(few), batches.vocab, len(few))
    (folder / "tokenizer.json").write_text(tokenizer.to_str(), encoding="utf-8")
    with open(folder / "train.jsonl", "w", encoding="utf-8") as file:
        file.writelines(json.dumps({"text": text}) + "\n" for text in train)
    prefix = folder / "train"
    found = prepare(PrepareArgs([f"{prefix}.jsonl"], folder / "tokenizer.json", prefix, overwrite=True))
    (folder / "train.jsonl").unlink()
    tokenizer = load_tokenizer(folder / "tokenizer.json")
    ids = np.concatenate([np.zeros(0, np.int64), *encode(tokenizer, held_out, TRAINED_END)])
    need = batches.held_out * batches.seq_len + 1
    if len(ids) < need:
        raise ConfigError(f"texts=...: {len(ids)} tokens are held out, {need} are needed; name more folders")
    write_token_file(folder / "val", [ids[:need]], smallest_dtype(batches.vocab))
    facts = {"name": folder.name, "files": len(train) + len(held_out), "characters": sum(map(len, train))}
    facts |= {"tokens": found["tokens"], "validation_tokens": need - 1}
    sums = [sha256_of(pair(folder / name)[0]) for name in ("train", "val")]
    write_json(folder / "facts.json", facts | {"sha256": sums})
    return facts | {"sha256": sums}


def read_texts(roots: Sequence[Path]) -> tuple[list[str], list[str]]:
    """Return the texts for training and validation, ordered by a hash of their paths below a root."""
    by_hash, seen = list[tuple[int, str]](), set[bytes]()
    named = {path: path.relative_to(root).as_posix() for root in roots for path in sorted(root.rglob("*"))}
    for path, name in named.items():
        if path.suffix in ENDINGS and path.is_file() and path.stat().st_size <= LARGEST_FILE:
            raw = path.read_bytes()
            contents = hashlib.blake2b(raw, digest_size=16).digest()
            number = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big")
            if raw and contents not in seen:
                seen.add(contents)
                by_hash.append((number, raw.decode("utf-8", errors="ignore")))
    by_hash.sort()
    return [t for n, t in by_hash if n % HELD_OUT], [t for n, t in by_hash if n % HELD_OUT == 0]


def words_of(run: Run, folder: Path, text: str) -> list[str]:
    shape, prefix = SIZES[run.size], folder.absolute() / text
    ffn, batches = WIDTHS_OF_FFN * shape.width, shape.batches
    keys = {
        "hidden_size": shape.width, "num_layers": shape.layers, "num_heads": shape.heads,
        "num_kv_heads": shape.heads, "head_dim": shape.width // shape.heads, "vocab_size": batches.vocab,
        "context_length": batches.seq_len,
    }  # fmt: skip
    dense = {"num_experts": 0, "num_dense_layers": shape.layers, "dense_ffn_size": ffn}
    moe = {"num_experts": EXPERTS, "top_k": TOP_K, "expert_ffn_size": ffn // TOP_K}
    keys |= moe if run.kind is Kind.moe else dense
    words = [*WORDS, *(f"model.{key}={value}" for key, value in keys.items())]
    words += ["data=memmap", f"data.paths=[{prefix / 'train'}]", f"data.val_paths=[{prefix / 'val'}]"]
    words += [f"train.steps={run.steps}", f"train.global_batch_size={batches.sequences}"]
    words += [f"optim.lr={run.rate}", f"optim.warmup_steps={max(run.steps // 10, 2)}"]
    words += [f"train.val_interval={run.steps // VALIDATIONS}", f"train.val_batches={batches.held_out}"]
    return [*words, *without(UNREAD, words)]


def expected_s(run: Run, words: Sequence[str], rows: Sequence[Row]) -> float:
    """Return the expected seconds of a run, by those of its size if there are any."""
    speeds = {row["key"][1]: row["seconds"] / row["tokens"] for row in rows if row["key"][0] == run.size}
    batches, model = SIZES[run.size].batches, compose_config(*words).model
    slow = flops_per_token(model, batches.seq_len) / SLOW_FLOPS
    speed = speeds.get(run.kind.name, max(speeds.values(), default=slow))
    return START_S + 1.1 * speed * run.steps * batches.of_step


def train(run: Run, words: Sequence[str], folder: Path) -> Row:
    """Run graphmoe.train with its output on stderr; return losses over steps, seconds, tokens and FLOPs."""
    model, batches = compose_config(*words).model, SIZES[run.size].batches
    counts, of_step = count_parameters(model), batches.of_step
    flops = flops_per_token(model, batches.seq_len) + 6 * counts["active"]["router"]  # which it leaves out
    shutil.rmtree(folder, ignore_errors=True)  # of an interrupted run
    command = [sys.executable, "-m", "graphmoe.train", *words, f"hydra.run.dir={folder}"]
    if status := subprocess.run(command, stdout=2).returncode:
        raise ConfigError(f"graphmoe.train ended with status {status}")
    rows = [*map(json.loads, (folder / METRICS_FILE).read_text(encoding="utf-8").splitlines())]
    steps, resolved = [row for row in rows if "loss" in row], (folder / CONFIG_FILE).read_text("utf-8")
    curve = [(row["step"], row["val_loss"]) for row in rows if "val_loss" in row]
    if None in (losses := [loss for _, loss in curve]):
        raise ConfigError(f"{run.size} {run.kind}: a validation loss is not finite; use smaller rates")
    seconds = seconds_at([row["step_s"] for row in steps])
    summary = json.loads((folder / SUMMARY_FILE).read_text(encoding="utf-8"))
    chosen = yaml.safe_load(resolved)
    counted = {key: {name: counts[key][name] for name in ("body", "router", "full")} for key in counts}
    at = [step for step, _ in curve]
    return {
        "key": [*run], "overrides": [without_folders(word) for word in words], "parameters": counted,
        "flops_per_token": flops, "tokens": run.steps * of_step, "seconds": seconds[-1], "loss": losses[-1],
        "epochs": steps[-1]["epoch"], "peak_gib": summary["peak_memory_gib"], "chosen": chosen["run"]["auto"],
        "micro_batch_size": chosen["train"]["micro_batch_size"],
        "load_max_over_mean": steps[-1].get("load_max_over_mean"),
        "validation": {
            "step": at, "loss": losses, "seconds": [seconds[step - 1] for step in at],
            "tokens": [step * of_step for step in at], "flops": [step * of_step * flops for step in at],
        },
        "train": {key: [row[key] for row in steps] for key in ("loss", "grad_norm", "step_s")},
    }  # fmt: skip


def seconds_at(step_s: Sequence[float]) -> list[float]:
    """Return the seconds at the end of each step, without compilation and capture."""
    median = statistics.median(step_s[UNTIMED:])
    return [*accumulate([median] * UNTIMED + [*step_s[UNTIMED:]])]


def results(rows: Sequence[Row]) -> list[Row]:
    """Return the comparison of each MoE with the dense runs of its size, if there are two or more."""
    best = dict[tuple[Any, ...], Row]()
    for row in rows:
        key = tuple(row["key"][:3])
        if key not in best or row["loss"] < best[key]["loss"]:
            best[key] = row
    found = list[Row]()
    for (size, kind, _), moe in best.items():
        dense = [row for (its, other, _), row in best.items() if (its, other) == (size, Kind.dense)]
        if kind == Kind.moe and len(dense) > 1:
            found.append({"size": size, **compared(moe, dense)})
    return found


def compared(moe: Row, dense: Sequence[Row]) -> Row:
    """Return gain per FLOP, tax and losses at equal time of an MoE and dense runs of several lengths."""
    active, router = (moe["parameters"]["active"][key] for key in ("body", "router"))
    assert active - router == dense[0]["parameters"]["active"]["body"]

    def between(x: str, y: str, at: float) -> float:
        return on_power_law([(row[x], row[y]) for row in dense], at)

    tokens, seconds = (between("loss", key, moe["loss"]) for key in ("tokens", "seconds"))
    of_dense = sum(row["seconds"] for row in dense) / sum(row["tokens"] for row in dense)
    flops = dense[0]["flops_per_token"] / moe["flops_per_token"]
    within = {
        key: min(row[key] for row in dense) <= moe[key] <= max(row[key] for row in dense)
        for key in ("loss", "seconds")
    }
    return {
        "active": active - router, "router": router, "moe_in_all": moe["parameters"]["total"]["body"],
        "tokens": moe["tokens"], "seconds": moe["seconds"], "moe_loss": moe["loss"],
        "dense_loss_at_equal_tokens": between("tokens", "loss", moe["tokens"]),
        "dense_loss_at_equal_time": between("seconds", "loss", moe["seconds"]),
        "gain_per_token": tokens / moe["tokens"], "gain_per_flop": tokens * flops / moe["tokens"],
        "tax": moe["seconds"] / moe["tokens"] / of_dense, "speedup": seconds / moe["seconds"],
        "within_dense_runs": within,
        "rates": {"moe": moe["key"][3], "dense": sorted({row["key"][3] for row in dense})},
    }  # fmt: skip


def on_power_law(points: Sequence[tuple[float, float]], x: float) -> float:
    """Return y at x on lines of log y over log x between neighbours, extended beyond the first and last."""
    logs = sorted((math.log(a), math.log(b)) for a, b in points)
    place = bisect.bisect([a for a, _ in logs[1:-1]], math.log(x))
    (x0, y0), (x1, y1) = [*pairwise(logs)][place]
    return math.exp(y0 + (y1 - y0) * (math.log(x) - x0) / (x1 - x0))


def render(document: Row, missing: Sequence[str]) -> Iterator[str]:
    """Yield lines of a Markdown table and what they are of."""
    yield (
        "| active | MoE in all | tokens | MoE's s | MoE's loss | dense, equal tokens | gain per FLOP | tax "
        "| dense, equal time | speed-up |"
    )
    yield "|---" * 10 + "|"
    for row in document["results"]:
        sizes = " | ".join(f"{row[key] / 1e6:,.1f}M" for key in ("active", "moe_in_all", "tokens"))
        losses = f"{row['moe_loss']:.4f} | {row['dense_loss_at_equal_tokens']:.4f}"
        of_loss, of_time = ("" if row["within_dense_runs"][key] else " *" for key in ("loss", "seconds"))
        gain, tax = f"{row['gain_per_flop']:.2f}{of_loss}", f"{row['tax']:.2f}"
        at_equal_time = f"{row['dense_loss_at_equal_time']:.4f}{of_time}"
        shown = f"{losses} | {gain} | {tax} | {at_equal_time} | {row['speedup']:.2f}{of_loss}"
        yield f"| {sizes} | {row['seconds']:.1f} | {shown} |"
    yield ""
    yield "Gain: FLOPs that the dense model needs to reach the MoE's loss, over the MoE's FLOPs."
    yield "Tax: time per token, MoE over dense. Speed-up: time that the dense model needs to reach the MoE's"
    yield "loss, over the MoE's time. Times are those of training steps."
    if not all(all(row["within_dense_runs"].values()) for row in document["results"]):
        yield "* Beyond the dense runs: the line of the nearest two is extended; add to budgets=."
    for text in {text["name"]: text for text in document["texts"].values()}.values():
        held_out = f"{text['validation_tokens']:,} of other files for validation"
        yield f"Text: {text['tokens']:,} tokens of {text['files']:,} files, {held_out}"
    facts = document["environment"]
    versions = ", ".join(f"{name} {facts['packages'][name]}" for name in ("torch", "triton"))
    yield f"{facts['device']}, {versions}; commit: {facts['git_commit'] or 'not in a git checkout'}"
    for run in missing:
        yield f"Not run, for lack of minutes: {run}. The same command goes on."


if __name__ == "__main__":
    run_tool(main)
