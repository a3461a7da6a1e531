"""Checks of training: runs of a tiny model in this process, captured, compiled, resumed, and compared."""

import functools
import io
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from torch import Tensor

from graphmoe.command.hydra import to_config
from graphmoe.command.words import composed
from graphmoe.doctor.outcome import Error, Numbers, differing
from graphmoe.optim.zero1 import Optimizer
from graphmoe.plan.plan import plan_of
from graphmoe.run.files import METRICS_FILE
from graphmoe.run.metrics_file import read_rows, steps_of
from graphmoe.runtime.host.logs import Progress
from graphmoe.training.auto import decided
from graphmoe.training.setup import build_trainer

STEPS, WARM_UP = 6, 2
WORDS = (
    "model=tiny", "model.num_layers=2", "model.hidden_size=128", "model.vocab_size=512",
    "model.expert_ffn_size=64", "model.shared_ffn_size=64", "data=synthetic", "data.seq_len=64",
    "optim.schedule=constant", "train.global_batch_size=4", "train.micro_batch_size=2",
    "train.val_batches=0", "train.log_interval=1", "checkpoint.interval=0", f"graph.warmup_steps={WARM_UP}",
    "precision.deterministic=true", "pipeline.ep_overlap=false", "log.tensorboard=false", "log.report=false",
    "log.progress=false", "log.sample_tokens=0", "host.numa=none",
)  # fmt: skip
EAGER, NO_GRAPHS = "compile.enabled=false", "graph.scope=none"
# relative differences of compiled steps, which round in another order and so may flip near-equal experts
LOSS, NORM = 2e-3, 5e-2


class Trained(NamedTuple):
    losses: Tensor  # of each step, fp64
    norms: Tensor  # of gradients
    weights: list[Tensor]  # fp32 master weights
    report: dict[str, Any]  # sums of the capture's report, empty without graphs


@functools.cache
def scratch() -> Path:
    """Return a folder of this process; in a child of `graphmoe.doctor.prove` its parent removes it."""
    return Path(tempfile.mkdtemp(prefix="prove_"))


def train(device: torch.device, name: str, *words: str, steps: int = STEPS) -> Trained:
    """Train the tiny model in a folder of this name, which is resumed if it has checkpoints."""
    folder = scratch() / name
    folder.mkdir(exist_ok=True)
    where = f"run.device={device.type}", f"train.steps={steps}", f"compile.cache_dir={scratch()}/cache"
    plan = plan_of(decided(to_config(composed([*WORDS, *where, *words]))), 1)
    progress = Progress(Console(file=io.StringIO()), steps, wanted=False)
    trainer = build_trainer(plan, folder, progress)
    trainer.run()
    assert isinstance(trainer.optimizer, Optimizer)
    rows = steps_of(read_rows(folder / METRICS_FILE))
    losses, norms = (torch.tensor([row[key] for row in rows]).double() for key in ("loss", "grad_norm"))
    capture = trainer.execution.capture
    report = {**capture.report.sums(), "on": capture.report.on} if capture else {}
    return Trained(losses, norms, [weight.clone() for weight in trainer.optimizer.main], report)


def capture_scope(device: torch.device, scope: str) -> Numbers:
    """Compare captured steps with the same steps uncaptured, bitwise."""
    word = f"graph.scope={scope}"
    captured = train(device, f"{scope}_captured", word)
    # a scope of segments cuts the compiled units, so the other run has it too, and only warms up
    plain = NO_GRAPHS if scope == "full_iteration" else f"graph.warmup_steps={STEPS}"
    uncaptured = train(device, f"{scope}_plain", word, plain)
    if not captured.report["graphs"] or uncaptured.report.get("graphs"):
        raise RuntimeError(f"graphs of {scope}: {captured.report}, without capture {uncaptured.report}")
    numbers: Numbers = {name: captured.report[name] for name in ("on", "graphs", "nodes")}
    return numbers | _bitwise(captured, uncaptured)


def resume(device: torch.device) -> Numbers:
    """Compare a run that stopped and resumed from its checkpoint with one that did not, bitwise."""
    words = EAGER, NO_GRAPHS, "checkpoint.enabled=true"
    whole = train(device, "whole", *words)
    train(device, "parts", *words, steps=STEPS // 2)
    return _bitwise(train(device, "parts", *words), whole)


def compiled_step(device: torch.device) -> Numbers:
    """Compare eager steps with compiled ones, the last of which replay one graph."""
    captured = train(device, "compiled", "graph.scope=full_iteration")
    eager = train(device, "eager", EAGER, NO_GRAPHS)
    if not captured.report["graphs"]:
        raise RuntimeError(f"no step was captured: {captured.report}")
    pairs = ("losses", captured.losses, eager.losses, LOSS), ("norms", captured.norms, eager.norms, NORM)
    return {name: Error(float((one / other - 1).abs().max()), limit) for name, one, other, limit in pairs}


def _bitwise(found: Trained, wanted: Trained) -> Numbers:
    if not wanted.losses.isfinite().all():
        raise RuntimeError(f"losses are not finite: {wanted.losses.tolist()}")
    return {
        "losses": differing([found.losses, found.norms], [wanted.losses, wanted.norms]),
        "weights": differing(found.weights, wanted.weights),
    }
