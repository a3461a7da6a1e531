"""Builds a run's parts, from plan to trainer, and loads the state to start from."""

import logging
from functools import partial
from pathlib import Path

import torch
from tokenizers import Tokenizer

from graphmoe.checkpoint.store import CheckpointStore
from graphmoe.config.schema import ConfigError
from graphmoe.data import Corpus, Loader, open_data
from graphmoe.model.transformer import Transformer
from graphmoe.ops.collectives import use_groups
from graphmoe.ops.waits import Waits, use_waits
from graphmoe.optim.base import StepOptimizer
from graphmoe.optim.zero1 import Optimizer
from graphmoe.plan.plan import Plan
from graphmoe.run.machine import device_name, open_device
from graphmoe.run.stored import named_source, refuse_other_tokenizer
from graphmoe.run.weights import explained_mismatch, load_weights
from graphmoe.runtime.capture import Capture
from graphmoe.runtime.dispatch import make_dispatcher, open_dispatcher
from graphmoe.runtime.dispatch.symm import share_axes
from graphmoe.runtime.host.logs import Progress
from graphmoe.runtime.launch.stamps import Heartbeat
from graphmoe.runtime.ranks import Mesh, Ranks
from graphmoe.runtime.torch_compat import tensors_of
from graphmoe.training.build import build, receive_ladder
from graphmoe.training.evaluation import Validation
from graphmoe.training.executor import Execution
from graphmoe.training.export import export
from graphmoe.training.log_lines import start_block
from graphmoe.training.metrics import MetricsWriter
from graphmoe.training.micro_batches import MicroBatches, Pipelined, micro_batches_of
from graphmoe.training.profile import PipelineProfile, StepTrace
from graphmoe.training.replicas import ReplicaCheck
from graphmoe.training.reruns import Reruns
from graphmoe.training.saves import Chosen, Saves, not_finite, restore_random_state, seed_everything, state_of
from graphmoe.training.step import Steps, TrainStep
from graphmoe.training.step_rows import StepRows
from graphmoe.training.trainer import Trainer

log = logging.getLogger(__name__)


def build_trainer(plan: Plan, folder: Path, progress: Progress, ranks: Ranks | None = None) -> Trainer:
    """Build all parts of a run and load the state to start from. Collective."""
    ranks, mesh = ranks or Ranks(), Mesh(plan.layout)
    use_groups(mesh)
    device = open_device(plan.run.device)
    share_axes(mesh, ranks, device)
    open_dispatcher(plan, mesh, device)
    seed_everything(plan.train.seed, plan.precision, device)
    corpus, loader = _open_data(plan, ranks, device)
    model, optimizer = build(plan, device, mesh, make_dispatcher(plan, mesh), end_token=corpus.end_token)
    saves = Saves(CheckpointStore(folder / "checkpoints", plan.checkpoint), plan, ranks)
    step, chosen = restore(plan, saves, ranks, model, optimizer, loader, corpus.tokenizer)
    execution = Execution(plan, device, optimizer, ranks, folder, chosen)
    capture = execution.capture
    log.info(start_block(plan, corpus, device_name(device), execution.describe()))
    execution.compile_update(optimizer, model.segment_lists())
    first_steps = capture.warmup_steps + 1 if capture else 1
    heartbeat = Heartbeat(plan.launch.hang_timeout_s, first_steps)
    micro_batches = _micro_batches(plan, model, optimizer, mesh, execution)
    if capture:  # graphs keep the addresses of these tensors
        capture.watch({**tensors_of(model), **optimizer.fixed_tensors()})
    ladder = receive_ladder(plan, mesh, ranks, model, device, capture, fused=execution.fuses)
    train_step = TrainStep(plan, optimizer, micro_batches, mesh, execution.backends)
    waits = Waits(device) if ranks.size > 1 else None
    use_waits(waits)
    gate = train_step.gate
    reruns = Reruns(plan, ranks, model, gate, device) if gate else None
    steps = Steps(train_step, _rows(plan, model, device, waits), heartbeat, capture, ladder, reruns)
    validation = Validation(plan, corpus, micro_batches, mesh, heartbeat, ladder)
    trace = _trace(plan, step, folder, ranks, steps, heartbeat, capture)
    profile = None
    if isinstance(micro_batches, Pipelined) and plan.profile.pipeline:
        profile = PipelineProfile(plan, micro_batches.pipeline, device, mesh, steps.rows.clock, folder, step)
    replicas = None
    checks = plan.checkpoint.replica_check > 0 and ranks.size > 1 and optimizer.model_is_whole
    if checks and isinstance(optimizer, Optimizer):
        replicas = ReplicaCheck(optimizer, ranks, plan.layout, step)
    writers: list[MetricsWriter] = []
    ranks.on_first(lambda: writers.append(MetricsWriter(folder, plan, step)))
    return Trainer(
        plan, folder, progress, ranks, device, corpus, loader, model, optimizer, saves, step, execution,
        heartbeat, steps, validation, trace, profile, writers[0] if writers else None,
        partial(export, plan, folder, optimizer, ranks) if plan.checkpoint.export else None, replicas,
    )  # fmt: skip


def _open_data(plan: Plan, ranks: Ranks, device: torch.device) -> tuple[Corpus, Loader]:
    data, train = plan.data, plan.train
    corpus = open_data(
        data, seq_len=plan.seq_len, vocab_size=plan.model.vocab_size, check=ranks.local_index == 0
    )
    loader = Loader(
        corpus.train,
        micro_batch_size=train.micro_batch_size,
        global_batch_size=train.global_batch_size,
        rank=plan.layout.index("dp", ranks.rank),
        world_size=plan.layout.dp,
        prefetch=data.prefetch,
        pin_memory=device.type == "cuda",
    )
    return corpus, loader


def _micro_batches(
    plan: Plan, model: Transformer, optimizer: StepOptimizer, mesh: Mesh, execution: Execution
) -> MicroBatches:
    compiled = execution.compiled
    return micro_batches_of(
        plan,
        model,
        optimizer.executor(execution.execute),
        mesh,
        overlap=execution.overlap,
        lane=compiled.lane if compiled and compiled.captures else None,
        deferring=compiled.deferring if compiled else None,
        capture=execution.capture,
    )


def _rows(plan: Plan, model: Transformer, device: torch.device, waits: Waits | None) -> StepRows:
    train, dispatcher = plan.train, model.dispatcher
    return StepRows(
        min(train.log_interval, train.steps) + 2,  # 2: steps launched before the read
        (model.num_moe_layers, model.config.num_experts),
        device,
        planned=dispatcher is not None and dispatcher.capacity is not None,
        replicated=dispatcher is not None and plan.replica_slots > 0,
        masked=plan.data.document_mask,
        ignores=plan.ignores_labels,
        clipped=plan.optim.qk_clip > 0,
        reruns=plan.train.rerun,
        waits=waits,
    )


def _trace(
    plan: Plan,
    step: int,
    folder: Path,
    ranks: Ranks,
    steps: Steps,
    heartbeat: Heartbeat,
    capture: Capture | None,
) -> StepTrace | None:
    asked = plan.profile.steps
    if asked and step >= asked[-1]:
        log.info("profile.steps=%s: the run continues after step %d, nothing is recorded", asked, step)
    elif asked:
        device = steps.step.micro_batches.device
        return StepTrace(plan, folder, ranks, device, heartbeat, steps.rows.clock, capture)
    return None


def restore(
    plan: Plan,
    saves: Saves,
    ranks: Ranks,
    model: Transformer,
    optimizer: StepOptimizer,
    loader: Loader,
    tokenizer: Tokenizer | None,
) -> tuple[int, Chosen]:
    """Load the newest checkpoint, resume_from or init_from; return its step and kernels. Collective.

    *Raises* ConfigError for a checkpoint or weights of another model, TrainingStopped for a diverged run.
    """
    store, chosen = saves.store, Chosen()
    there = store.to_resume()
    source = None if there else plan.checkpoint.resume_from
    if not there:
        refuse_other_tokenizer(plan.checkpoint, plan.data, tokenizer)
    if not (there or source):
        import_weights(plan, ranks, model, optimizer)
        return 0, chosen
    state = state_of(0, optimizer, loader, chosen)
    del state["experts"], state["fp8"], state["loader"]["contents"], state["optimizer"]["scales"]
    with named_source("resume_from", source):
        store = CheckpointStore.open_any(source) if source else store
        with explained_mismatch(store.folder, plan.model):
            store.load(state)
    saves.taken(store, state["step"], state)
    step, chosen = state["step"], Chosen(state.get("experts", ""), state.get("fp8", {}))
    if step > (steps := plan.train.steps):
        raise ConfigError(
            f"train.steps={steps}, but {store.folder} is at step {step} already; use more steps"
        )
    skipped = int(optimizer.skipped_in_row.item())
    if step == steps and skipped >= plan.train.max_nonfinite:
        raise saves.diverged(step, skipped)  # no step is left to detect it
    optimizer.restored(state["optimizer"])
    loader.load_state_dict(state["loader"])
    restore_random_state(state["random"])
    log.info("continuing after step %d of %s", step, store.folder)
    return step, chosen


def import_weights(plan: Plan, ranks: Ranks, model: Transformer, optimizer: StepOptimizer) -> None:
    """Load the weights of ``checkpoint.init_from``, if given. Collective. *Raises* ConfigError."""
    if not (folder := plan.checkpoint.init_from):
        return
    weights = optimizer.weights_to_fill()
    with named_source("init_from", folder):
        kind = load_weights(model, folder, weights, plan.layout, ranks.rank)
    optimizer.adopt(weights)
    filled = {"model": optimizer.model_state(), "optimizer": {"main": optimizer.main_state()}}
    if name := not_finite(filled, ranks):
        raise ConfigError(f"checkpoint.init_from={folder}: its {name} has values that are not finite")
    log.info("weights loaded from %s (%s)", folder, kind.value)
