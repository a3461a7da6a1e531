"""Train a model: python -m graphmoe.train model=tiny train.steps=20 optim.lr=1e-3

Results go to the run's folder (hydra.run.dir, by default outputs/<run.name>): resolved.yaml, env.json,
metrics.jsonl, summary.json, logs/, tensorboard/ and checkpoints/.
"""

from __future__ import annotations

import json
import logging
import os
from functools import partial
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from rich.console import Console

from graphmoe.checkpoint import CHECKPOINTS, CheckpointError, saved_steps
from graphmoe.cli import emit
from graphmoe.config import ComputeDtype, ConfigError, DeviceChoice, OutputFormat, RunConfig
from graphmoe.data import DataError
from graphmoe.entry import hydra_app, to_plain
from graphmoe.environment import check_memory, describe, open_device
from graphmoe.generate import TOKENIZER_FILE, generate
from graphmoe.logs import start_logging
from graphmoe.metrics import METRICS_FILE, summarise
from graphmoe.model.attention import check_backend
from graphmoe.progress import Progress
from graphmoe.run_folder import SUMMARY_FILE, RunFolder, claim, passed_over
from graphmoe.trainer import Trainer, TrainingStopped
from passes import select_passes

log = logging.getLogger(__name__)

EXAMPLES = (
    "python -m graphmoe.train",
    "python -m graphmoe.train model=deepseek_v2_lite model.num_layers=4 data=synthetic train.steps=20",
    "python -m graphmoe.train -m optim.lr=1e-3,3e-3 train.steps=100",
)
PROMPT = "def read_file(path):\n"


def main() -> None:
    """Run the command line; a sweep prints its JSON summaries as one list."""
    known = (DataError, CheckpointError, TrainingStopped)
    swept: list[dict[str, Any]] = []
    task = partial(train, swept=swept)
    try:
        hydra_app(task, prog="graphmoe.train", examples=EXAMPLES, makes_folder=True, known_errors=known)
    finally:
        if swept:
            emit(swept, "", OutputFormat.json)


def train(config: RunConfig, swept: list[dict[str, Any]]) -> float | None:
    """Train to the end, or to a signal; the final validation loss, which sweeps minimise.

    In a sweep with ``format=json`` the summary is appended to ``swept`` instead of printed, and a
    signal ends the whole sweep.
    """
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise ConfigError(
            f"WORLD_SIZE={os.environ['WORLD_SIZE']}: this version trains on one device; start it with "
            f"python -m graphmoe.train, without torchrun"
        )
    device = open_device(config.run.device)
    check_memory(config, device)
    check_backend(config.model, device.type)
    select_passes(config.passes, {})  # its errors come before a folder is made
    console = Console(stderr=True)
    run_folder = _claim(config, console)
    folder = run_folder.path
    if config.moe.force_balance:
        log.warning("MOE.FORCE_BALANCE IS ON: THE ROUTER IS IGNORED. This is for benchmarks only")
    on_gpu, in_fp32 = config.run.device is DeviceChoice.cuda, config.precision.compute is ComputeDtype.fp32
    if on_gpu and in_fp32 and not config.compile.enabled:
        log.warning("precision.compute=fp32 uncompiled on a GPU: expert products wait for the host")
    with Progress(console, config.train.steps, wanted=config.log.progress) as progress:
        try:
            trainer = Trainer(config, folder, progress)
            trainer.start()
        except BaseException:
            run_folder.abandon()  # a run that never started, say for want of data, keeps no folder
            raise
        _write_json(folder / "env.json", describe(trainer.device))
        if trainer.corpus.tokenizer is not None:
            trainer.corpus.tokenizer.save(str(folder / TOKENIZER_FILE))
        finished = trainer.run()
    summary = {
        "finished": finished,
        "steps": trainer.step,
        "folder": str(folder),
        **summarise(folder / METRICS_FILE),
        "time_to_first_step_s": trainer.first_step_s,
    }
    summary["sample"] = _sample(trainer) if finished else None
    _write_json(folder / SUMMARY_FILE, summary)
    sweeps = HydraConfig.get().mode is RunMode.MULTIRUN
    if sweeps and config.format is OutputFormat.json:
        swept.append(summary)
    else:
        emit(summary, _report(summary), config.format)
    run_folder.release()
    if sweeps and trainer.stopped_by:
        log.warning("%s: the rest of the sweep is not started", trainer.stopped_by)
        raise KeyboardInterrupt
    return summary["final_val_loss"] if summary["final_val_loss"] is not None else summary["final_loss"]


def _claim(config: RunConfig, console: Console) -> RunFolder:
    """The run's folder, with the log started there."""
    base, plain = Path(HydraConfig.get().runtime.output_dir), to_plain(config)
    run_folder = claim(base, plain, resume=config.checkpoint.resume)
    start_logging(run_folder.path, rank=0, console=console)
    continued = " (continued)" if saved_steps(run_folder.path / CHECKPOINTS) else " (again: it saved nothing)"
    log.info("run folder: %s%s", _shown(run_folder.path), continued if run_folder.resumed else "")
    for path, keys in passed_over(base, run_folder.path, plain):
        saved = saved_steps(path / CHECKPOINTS)
        how = f"checkpoint.resume_from={_shown(path)} continues it" if saved else "it saved nothing"
        log.info(
            "%s is an unfinished run of another configuration (%s); %s", _shown(path), ", ".join(keys), how
        )
    return run_folder


def _sample(trainer: Trainer) -> str | None:
    """Text that the trained model writes, where the corpus has a tokenizer."""
    count, tokenizer = trainer.config.log.sample_tokens, trainer.corpus.tokenizer
    if not count or tokenizer is None or not tokenizer.encode(PROMPT, add_special_tokens=False).ids:
        return None
    return generate(trainer.model, tokenizer, PROMPT, count, temperature=0.8, seed=0)


def _report(summary: dict[str, Any]) -> str:
    """The end of a run, for people."""
    lines = []
    if summary["sample"]:
        lines += ["", "A sample of what the model writes now:", "", summary["sample"], ""]
    first, last = summary["first_val_loss"], summary["final_val_loss"]
    if not summary["finished"]:
        lines.append(f"stopped after step {summary['steps']}, training loss {summary['final_loss']}")
    elif first is not None and last is not None:
        lines.append(f"validation loss {first:.3f} -> {last:.3f} in {summary['steps']} steps")
    elif summary["final_loss"] is not None:
        lines.append(f"loss {summary['final_loss']:.3f} after {summary['steps']} steps")
    lines.append(f"results: {_shown(Path(summary['folder']))}")
    return "\n".join(lines)


def _write_json(path: Path, document: dict[str, Any]) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    temporary.replace(path)


def _shown(folder: Path) -> str:
    """The folder relative to where the user stands, if it lies there."""
    here = Path.cwd()
    return str(folder.relative_to(here)) if folder.is_relative_to(here) else str(folder)


if __name__ == "__main__":
    main()
