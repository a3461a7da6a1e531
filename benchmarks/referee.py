"""Train the same model by graphmoe and by Hugging Face transformers, and compare their losses.

python benchmarks/referee.py model=deepseek_v2_lite folder=outputs/referee out=deepseek_v2_lite.json
python benchmarks/referee.py model=qwen3_30b_a3b size=tiny dtype=fp32 steps=50 folder=outputs/tiny_referee

Both halves start from one Hugging Face folder, whose weights are in the dtype that graphmoe computes in, and
train on the batches of `graphmoe.data`. Ours is `python -m graphmoe.train`, compiled and captured as it
decides. Theirs is transformers' model and loss, not compiled, with fp32 parameters, under autocast if
dtype=bf16; AdamW, clipping and learning rates are torch's. Neither has a loss of routers.
The exit status is 1 if the losses differ by more than `LIMITS`. Needs the extra graphmoe[dev].
"""

import enum
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import transformers
import yaml
from torch import Tensor, nn
from torch.nn.utils.parametrize import register_parametrization
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR

from graphmoe import save_hf
from graphmoe.bench.cases import without_folders
from graphmoe.bench.jobs import UNREAD, split_list
from graphmoe.command.hydra import compose_config
from graphmoe.config.arguments import emit, parse_args, run_tool
from graphmoe.config.schema import (
    ComputeDtype,
    ConfigError,
    DeviceChoice,
    OptimConfig,
    OutputFormat,
    RunConfig,
)
from graphmoe.data import Loader, open_data
from graphmoe.model.build import build_model
from graphmoe.run.files import CONFIG_FILE, METRICS_FILE
from graphmoe.run.machine import describe, open_device

Row = dict[str, Any]
Size = enum.StrEnum("Size", ("full", "tiny"))
Model = enum.StrEnum("Model", ("deepseek_v2_lite", "qwen3_30b_a3b"))
TINY = (
    "model.vocab_size=512", "model.hidden_size=64", "model.num_layers=2", "model.num_heads=4",
    "model.num_experts=8", "model.expert_ffn_size=32", "model.init_std=0.02",
)  # fmt: skip
OF_TINY = {
    Model.deepseek_v2_lite: (
        "model.dense_ffn_size=96", "model.shared_ffn_size=64", "model.kv_lora_rank=32", "model.top_k=3",
        "model.qk_nope_head_dim=16", "model.qk_rope_head_dim=8", "model.v_head_dim=16",
    ),
    Model.qwen3_30b_a3b: ("model.num_kv_heads=2", "model.head_dim=16", "model.top_k=2"),
}  # fmt: skip
"""Keys of size=tiny beside ``TINY``."""
OF_SIZE = {Size.full: ("data.seq_len=2048", "optim.lr=1e-4"), Size.tiny: ("data.seq_len=64", "optim.lr=1e-3")}
WORDS = (
    "data=stdlib", "train.global_batch_size=4", "train.micro_batch_size=2", "model.aux_loss=none",
    "model.z_loss_coef=0", *UNREAD,
)  # fmt: skip
KERNELS = {"attn_implementation": "sdpa", "experts_implementation": "grouped_mm"}

LAST = 100
LIMITS = {ComputeDtype.bf16: ("means", 2e-3), ComputeDtype.fp32: ("steps", 1e-5)}
"""Largest relative difference, of the means of the ``LAST`` losses or of the losses of each step."""


@dataclass
class RefereeArgs:
    model: Model
    """deepseek_v2_lite or qwen3_30b_a3b."""
    folder: Path
    """Folder for weights (up to 13 GB) and run, each in a new folder of the model's name."""
    steps: int = 300
    """Optimizer steps of 4 sequences, > 2. The learning rate warms up for a tenth of them."""
    dtype: ComputeDtype = ComputeDtype.bf16
    """bf16 or fp32."""
    size: Size = Size.full
    """full (4 layers of the preset's widths, 2048 tokens a sequence) or tiny (2 small layers, 64 tokens)."""
    device: DeviceChoice = DeviceChoice.auto
    """cuda, cpu or auto."""
    overrides: str | None = None
    """Overrides of graphmoe's half alone, such as compile=none."""
    out: Path | None = None
    """File for the JSON document."""
    format: OutputFormat = OutputFormat.text
    """Output on stdout: text, or one JSON document."""


def main(argv: list[str]) -> None:
    args = parse_args(RefereeArgs, argv, prog="benchmarks.referee", places=("model", "folder"))
    if args.steps <= 2:
        raise ConfigError(f"steps={args.steps} is not more than 2; use 300")
    if (args.folder / args.model).exists():
        raise ConfigError(f"folder={args.folder} has {args.model} of an earlier comparison; use a new folder")
    document = compare(args)
    words = ("python", "benchmarks/referee.py", *argv)
    document["environment"]["command"] = [without_folders(word) for word in words]
    if args.out is not None:
        args.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    emit(document, "\n".join(render(document)), args.format)
    if not document["agrees"]:
        sys.exit(1)


def compare(args: RefereeArgs) -> Row:
    """Train both halves; return the JSON document. *Raises* ConfigError."""
    sizes = (*TINY, *OF_TINY[args.model]) if args.size is Size.tiny else ("model.num_layers=4",)
    words = [*WORDS, *OF_SIZE[args.size], f"precision={args.dtype.name}", f"train.steps={args.steps}"]
    words += [f"optim.warmup_steps={max(args.steps // 10, 2)}", f"run.device={args.device.name}"]
    config = compose_config(f"model={args.model}", *sizes, *words)
    device, folder = open_device(config.run.device), args.folder / args.model
    times = [time.monotonic()]
    write_weights(config, folder / "weights", device)
    times.append(time.monotonic())
    own = split_list(args.overrides or "")
    ours, chosen = train_ours([f"checkpoint.init_from={folder / 'weights'}", *words, *own], folder / "run")
    times.append(time.monotonic())
    theirs = train_theirs(config, folder / "weights", device)
    times.append(time.monotonic())
    seconds = (round(end - start, 1) for start, end in pairwise(times))
    facts = {key: value for key, value in describe(device).items() if key != "host"}
    facts["packages"]["transformers"] = transformers.__version__
    settings = {"model": [f"model={args.model}", *sizes], "both": words, "graphmoe": own, "chosen": chosen}
    document = {key: getattr(args, key).name for key in ("model", "size", "dtype")} | {"steps": args.steps}
    document |= {"environment": facts, "settings": settings | {"transformers": KERNELS}}
    document["seconds"] = dict(zip(("weights", "graphmoe", "transformers"), seconds, strict=True))
    return document | {"graphmoe": ours, "transformers": theirs} | verdict(ours, theirs, args.dtype)


def write_weights(config: RunConfig, folder: Path, device: torch.device) -> None:
    """Write a Hugging Face folder of random weights, in the dtype that graphmoe computes in."""
    dtype = torch.bfloat16 if config.precision.compute is ComputeDtype.bf16 else torch.float32
    save_hf(build_model(config.model, device=device, dtype=dtype), config.model, folder)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # graphmoe's half is another process


def train_ours(words: Sequence[str], folder: Path) -> tuple[Row, list[str]]:
    """Run graphmoe.train with its output on stderr; return numbers of each step, and what it chose."""
    command = [sys.executable, "-m", "graphmoe.train", *words, f"hydra.run.dir={folder}"]
    if status := subprocess.run(command, stdout=2).returncode:
        raise ConfigError(f"graphmoe.train ended with status {status}")
    lines = (folder / METRICS_FILE).read_text(encoding="utf-8").splitlines()
    rows = [row for row in map(json.loads, lines) if "loss" in row]
    resolved = yaml.safe_load((folder / CONFIG_FILE).read_text(encoding="utf-8"))
    return {key: [row[key] for row in rows] for key in ("loss", "grad_norm", "lr")}, resolved["run"]["auto"]


def train_theirs(config: RunConfig, folder: Path, device: torch.device) -> Row:
    """Train transformers' model; return the same numbers of each step."""
    train, in_bf16 = config.train, config.precision.compute is ComputeDtype.bf16
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **KERNELS)
    model.to(device).train()
    if in_bf16:
        cast_experts(model)
    adamw, schedule = optimizer_of(model, config.optim, train.steps)
    batches, count = batches_of(config), train.global_batch_size // train.micro_batch_size
    losses, norms, rates = list[Tensor](), list[Tensor](), list[float]()
    for _ in range(train.steps):
        losses.append(torch.zeros((), device=device))
        for _ in range(count):
            tokens_BT = next(batches).to(device)
            with torch.autocast(device.type, torch.bfloat16, enabled=in_bf16):
                loss = model(input_ids=tokens_BT, labels=tokens_BT, use_cache=False).loss / count
            loss.backward()
            losses[-1] += loss.detach()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), train.clip_grad_norm))
        rates.append(adamw.param_groups[0]["lr"])
        adamw.step()
        schedule.step()
        adamw.zero_grad()
    batches.close()
    return {"loss": torch.stack(losses).tolist(), "grad_norm": torch.stack(norms).tolist(), "lr": rates}


def batches_of(config: RunConfig) -> Loader:
    data, train = config.data, config.train
    assert data.seq_len is not None
    corpus = open_data(data, seq_len=data.seq_len, vocab_size=config.model.vocab_size)
    sizes = {"micro_batch_size": train.micro_batch_size, "global_batch_size": train.global_batch_size}
    return Loader(corpus.train, **sizes)


class InBf16(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.bfloat16()


def cast_experts(model: nn.Module) -> None:
    """Cast experts' fp32 parameters in each forward, as autocast does those of linear layers."""
    # autocast does not know grouped_mm, which would compute in the dtype of the parameters (pytorch 174763)
    for module in [*model.modules()]:
        for name, parameter in [*module.named_parameters(recurse=False)]:
            if parameter.dim() == 3:
                register_parametrization(module, name, InBf16(), unsafe=True)  # unsafe: to another dtype


def optimizer_of(model: nn.Module, optim: OptimConfig, steps: int) -> tuple[torch.optim.AdamW, SequentialLR]:
    """Return torch's AdamW, with decay of matrices alone, and its linear warm-up and cosine."""
    groups: list[Row] = [{"params": [], "weight_decay": decay} for decay in (0.0, optim.weight_decay)]
    for name, parameter in model.named_parameters():
        groups[parameter.dim() > 1 and "bias" not in name]["params"].append(parameter)
    fused = True if groups[1]["params"][0].is_cuda else None
    betas, warmup = (optim.beta1, optim.beta2), optim.warmup_steps
    adamw = torch.optim.AdamW(groups, lr=optim.lr, betas=betas, eps=optim.eps, fused=fused)
    rising = LinearLR(adamw, start_factor=1 / warmup, total_iters=warmup - 1)
    falling = CosineAnnealingLR(adamw, steps - warmup, eta_min=optim.min_lr_ratio * optim.lr)
    return adamw, SequentialLR(adamw, [rising, falling], milestones=[warmup - 1])


def verdict(ours: Row, theirs: Row, dtype: ComputeDtype) -> Row:
    """Return relative differences of the losses, and whether the one that counts is within its limit."""
    a, b = (torch.tensor(half["loss"], dtype=torch.float64) for half in (ours, theirs))
    means, steps = a[-LAST:].mean() / b[-LAST:].mean() - 1, (a / b - 1).abs().max()  # NaN stays NaN
    found, (counts, limit) = {"means": abs(means.item()), "steps": steps.item()}, LIMITS[dtype]
    return {"differences": found, "counts": counts, "limit": limit, "agrees": found[counts] <= limit}


def render(document: Row) -> Iterator[str]:
    """Yield lines of a Markdown table and what they are of."""
    halves, steps = (document["graphmoe"], document["transformers"]), document["steps"]
    yield "| steps | graphmoe | transformers | difference | gradient norm | transformers |"
    yield "|---|---|---|---|---|---|"
    spans = [range(max(end - LAST, 0), end) for end in range(steps, 0, -LAST)]
    for span in (range(1), *spans[::-1]):
        a, b, *norms = (fmean(half[key][i] for i in span) for key in ("loss", "grad_norm") for half in halves)
        name = f"{span.start + 1} to {span.stop}" if len(span) > 1 else f"{span.stop}"
        yield f"| {name} | {a:.5f} | {b:.5f} | {a / b - 1:+.1e} | {norms[0]:.4f} | {norms[1]:.4f} |"
    found, facts, limit = document["differences"], document["environment"], document["limit"]
    count, is_within = min(LAST, steps), "within" if document["agrees"] else "NOT within"
    yield ""
    means, of_steps = (f"{found[key]:.1e}" for key in ("means", "steps"))
    yield f"Means of the last {count} losses differ by {means}, losses of a step by at most {of_steps}."
    yield f"The difference of {document['counts']} is {is_within} its limit of {limit:g}."
    versions = ", ".join(f"{name} {facts['packages'][name]}" for name in ("torch", "triton", "transformers"))
    size, dtype = document["size"], document["dtype"]
    yield f"{document['model']}, size={size}, dtype={dtype}; {facts['device']}, {versions}"
    yield f"Commit: {facts['git_commit'] or 'not in a git checkout'}"


if __name__ == "__main__":
    run_tool(main)
