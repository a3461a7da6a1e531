"""Train on every rank; rank 0 writes env.json, the tokenizer and summary.json."""

import gc
import itertools
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from graphmoe.checkpoint import CheckpointError
from graphmoe.config.progress import console, working
from graphmoe.config.schema import ComputeDtype, ConfigError, DeviceChoice, RunConfig
from graphmoe.config.untrusted import read_text
from graphmoe.data import DataError
from graphmoe.data.tokenizer import TEMPLATE_FILE, num_ids
from graphmoe.model.attention import check_backend
from graphmoe.passes import select_passes
from graphmoe.plan.experts import has_experts
from graphmoe.plan.forced_loads import NO_LOAD
from graphmoe.plan.pipeline.plan import run_slower_than_1f1b
from graphmoe.plan.plan import Plan, plan_of
from graphmoe.plan.rules.unused import doubtful, without_effect
from graphmoe.run.expert_loads import summary_of
from graphmoe.run.files import (
    ENVIRONMENT_FILE,
    EXPERT_LOADS_FILE,
    METRICS_FILE,
    SUMMARY_FILE,
    TOKENIZER_FILE,
    ExpertLoad,
    MetricsRow,
    to_json,
)
from graphmoe.run.machine import check_processes, describe, open_device
from graphmoe.run.metrics_file import lines_of, read_lines, summarise
from graphmoe.runtime.dispatch import check_dispatcher
from graphmoe.runtime.host.environment import HostLine, set_environment
from graphmoe.runtime.host.files import replace_text
from graphmoe.runtime.host.logs import Progress
from graphmoe.runtime.host.signals import StopSignal
from graphmoe.runtime.host.tuning import log_host, start_host
from graphmoe.runtime.launch.failures import RunFailed
from graphmoe.runtime.ranks import Ranks
from graphmoe.runtime.torch_compat import import_compilers
from graphmoe.training.evaluation import generate, model_of_one_rank, prompt_of
from graphmoe.training.saves import TrainingStopped
from graphmoe.training.setup import build_trainer
from graphmoe.training.start_checks import check_memory, check_start
from graphmoe.training.trainer import Trainer

log = logging.getLogger(__name__)

ROUND_IDS, MANY_IDS = 128, 1.05  # usual divisor of vocabulary sizes; a run warns of more than 5% unused ids


def open_worker(config: RunConfig, ranks: Ranks) -> tuple[Plan, list[HostLine]]:
    """Tune this process and select its GPU; return the plan and host log lines. Collective."""
    check_processes(config.host, ranks.local_size)
    lines = set_environment(config.host, config.run.device)
    on_gpu, local_rank = config.run.device is DeviceChoice.cuda, int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", local_rank) if on_gpu else torch.device("cpu")
    if on_gpu and 0 < torch.cuda.device_count() <= local_rank:
        count = torch.cuda.device_count()
        raise ConfigError(
            f"{ranks.local_size} workers need a GPU each, and {count} are visible; start {count}"
        )
    lines += start_host(config.host, device, ranks.local_size, ranks.gather)
    if on_gpu and local_rank:
        torch.cuda.set_device(device)
    plan = plan_of(config, ranks.size)
    ranks.on_each(lambda: check_memory(plan, open_device(config.run.device)))  # memory differs between ranks
    check_backend(config.model, device.type, ring=plan.layout.ring)
    check_dispatcher(plan.dispatcher, device, plan.layout, ranks)
    select_passes(config.passes, {})
    return plan, lines


def run_worker(plan: Plan, folder: Path, ranks: Ranks, host_lines: Sequence[HostLine] = ()) -> dict[str, Any]:
    """Train to the end or to a signal; return the summary on rank 0.

    *Raises* RunFailed if data, checkpoints or losses end the run.
    """
    log_host(host_lines)
    warn_of_unused(plan, ranks)
    wanted = plan.log.progress and ranks.is_first
    ranks.on_first(lambda: check_start(plan.config, folder))
    if plan.compile.enabled:
        import_compilers()
    gc.freeze()  # keep imported objects: the first collection would scan them for half a second
    with _known_errors(), Progress(console(), plan.train.steps, wanted=wanted) as progress:
        trainer = build_trainer(plan, folder, progress, ranks)
        if ranks.is_first:
            workers = {"num_workers": ranks.size, "workers_of_node": ranks.local_size}
            text = to_json({**describe(trainer.device), **workers})
            _write(folder / ENVIRONMENT_FILE, text, "before the first step")
            warn_of_unused_ids(plan, trainer.corpus.tokenizer)
            if trainer.corpus.tokenizer is not None:
                text = trainer.corpus.tokenizer.to_str(pretty=True)
                _write(folder / TOKENIZER_FILE, text, "before the first step")
            if (name := plan.data.chat_template) is not None:
                text = read_text(Path(name).expanduser())
                _write(folder / TEMPLATE_FILE, text, "before the first step")
        finished = trainer.run()
    with StopSignal() as stop:  # all steps are done: signals stop the sample only
        memory = ranks.gather(trainer.memory)
        return _summarise(trainer, folder, finished, memory, stop) if ranks.is_first else {}


def warn_of_unused(plan: Plan, ranks: Ranks) -> None:
    if plan.moe.force_balance:
        log.warning("MOE.FORCE_BALANCE IS ON: THE ROUTER IS IGNORED. This is for benchmarks only")
    if plan.moe.expert_load != NO_LOAD:
        log.warning(
            "MOE.EXPERT_LOAD=%s IS ON: THE ROUTER IS IGNORED. This is for benchmarks only",
            plan.moe.expert_load,
        )
    on_gpu, in_fp32 = plan.run.device is DeviceChoice.cuda, plan.precision.compute is ComputeDtype.fp32
    if on_gpu and in_fp32 and not plan.compile.enabled:
        log.warning(
            "with precision.compute=fp32 and compile.enabled=false, expert GEMMs on a GPU wait for the host"
        )
    for line in (*without_effect(plan, ranks.size), *doubtful(plan.config)):
        log.warning(line)
    if plan.pipeline and plan.splits_backward and not plan.compile.enabled:
        log.warning(
            "pipeline.schedule=%s splits the backward, which compile.enabled=false does not: weight "
            "gradients are computed with those of inputs, and ranks wait longer; use compile.enabled=true",
            plan.pipeline.table.schedule,
        )
    if ranks.is_first and (slower := run_slower_than_1f1b(plan.config, plan.layout)):
        log.warning("pipeline.schedule=%s", slower)


@contextmanager
def _known_errors() -> Iterator[None]:
    try:
        yield
    except (DataError, CheckpointError, TrainingStopped) as error:
        raise RunFailed(str(error)) from error


def _summarise(
    trainer: Trainer, folder: Path, finished: bool, memory: Sequence[tuple[float, float]], stop: StopSignal
) -> dict[str, Any]:
    peak, taken = (round(max(of_ranks), 3) for of_ranks in zip(*memory, strict=True))
    sums, model = summarise(lines_of(folder / METRICS_FILE, MetricsRow)), trainer.plan.model
    loads = read_lines(folder / EXPERT_LOADS_FILE, ExpertLoad)
    rest = trainer.host_times.take().items()  # such as the last checkpoint's
    summary = {
        "finished": finished,
        "stopped_by": trainer.stopped_by,
        "steps": trainer.step,
        "folder": str(folder),
        **sums,
        **trainer.execution.precision(),
        **(summary_of(loads, model.top_k) if has_experts(model) else {}),
        "peak_memory_gib": peak,
        "device_memory_gib": taken,
        "time_to_first_step_s": trainer.first_step_s,
        **{name: (sums[name] or 0.0) + seconds for name, seconds in rest},
    }
    summary["sample_prompt"], summary["sample"] = sample_of(trainer, stop) if finished else (None, None)
    _write(folder / SUMMARY_FILE, to_json(summary), f"after step {trainer.step}")
    return summary


def sample_of(trainer: Trainer, stop: StopSignal) -> tuple[str | None, str | None]:
    """Return a prompt and its continuation, until ``stop`` has a signal; None without a tokenizer."""
    count, tokenizer = trainer.plan.log.sample_tokens, trainer.corpus.tokenizer
    prompt, none = trainer.plan.log.sample_prompt, (None, None)
    if count and not trainer.optimizer.model_is_whole:
        log.info("log.sample_tokens=%d: no text is written, since no rank has all weights", count)
        return none
    if not count or tokenizer is None:
        return none
    model = model_of_one_rank(trainer.model, trainer.plan.moe)
    if model is None:
        log.info("no sample of text: no rank has all weights; graphmoe.generate reads them from a checkpoint")
        return none
    try:
        prompt = prompt_of(trainer.corpus, tokenizer) if prompt is None else prompt
        with working(f"writing a sample of text (log.sample_tokens={count})"):
            pieces = generate(model, tokenizer, prompt, count, temperature=0.8, seed=0)
            return prompt, "".join(itertools.takewhile(lambda _: stop.received is None, pieces))
    except (ConfigError, DataError) as error:
        log.info("no sample of text (log.sample_prompt): %s", error)
        return none


def warn_of_unused_ids(plan: Plan, tokenizer: Tokenizer | None) -> None:
    """Warn if many embedding rows have no token in the tokenizer, unless weights are loaded."""
    model, there = plan.model, num_ids(tokenizer) if tokenizer else 0
    enough = -(-there // ROUND_IDS) * ROUND_IDS
    given = plan.checkpoint.init_from or plan.checkpoint.resume_from
    if tokenizer is None or given or model.vocab_size <= MANY_IDS * enough:
        return
    data, name = plan.data, plan.data.tokenizer
    key = f"data.tokenizer={name}" if name else f"data.bpe_vocab_size={data.bpe_vocab_size}"
    log.warning(
        "model.vocab_size=%d, and the tokenizer (%s) has %d ids: %d rows of the embedding and the head stand "
        "for no token; model.vocab_size=%d is enough",
        model.vocab_size, key, there, model.vocab_size - there, enough,
    )  # fmt: skip


def _write(path: Path, text: str, moment: str) -> None:
    try:
        replace_text(path, text)
    except OSError as error:
        raise RunFailed(
            f"{path} cannot be written {moment}: {error.strerror}; free space and run the command again"
        ) from error
