"""Load the state that a run starts from: its own checkpoint, another's, or weights."""

import logging

from tokenizers import Tokenizer

from graphmoe.checkpoint.store import CheckpointStore
from graphmoe.config.schema import ConfigError
from graphmoe.data import Loader
from graphmoe.model.transformer import Transformer
from graphmoe.optim.base import StepOptimizer
from graphmoe.plan.plan import Plan
from graphmoe.run.stored import named_source, refuse_other_tokenizer
from graphmoe.run.weights import explained_mismatch, load_weights
from graphmoe.runtime.ranks import Ranks
from graphmoe.training.saves import Saves
from graphmoe.training.state import Chosen, restore_random_state, state_of

log = logging.getLogger(__name__)


def restore(
    plan: Plan,
    saves: Saves,
    ranks: Ranks,
    model: Transformer,
    optimizer: StepOptimizer,
    loader: Loader,
    tokenizer: Tokenizer | None,
) -> tuple[int, Chosen]:
    """Load the newest checkpoint, or resume_from, or init_from; return its step and choices. A collective.

    *Raises* ConfigError for a checkpoint or weights of another model, TrainingStopped for a diverged run.
    """
    config, store, chosen = plan.config, saves.store, Chosen()
    state = state_of(0, optimizer, loader, chosen)
    source = None if store.latest() else config.checkpoint.resume_from
    if not store.latest():
        refuse_other_tokenizer(config, tokenizer)
    del state["experts"], state["fp8"], state["loader"]["contents"], state["optimizer"]["scales"]
    with named_source("resume_from", source):
        store = CheckpointStore.open_any(source) if source else store
        with explained_mismatch(store.folder, config.model):
            found = store.load(state)
    if found is None:
        _import_weights(plan, saves, ranks, model, optimizer)
        return 0, chosen
    saves.taken(store, found, state)
    step, chosen = state["step"], Chosen(state.get("experts", ""), state.get("fp8", {}))
    if step > (steps := config.train.steps):
        raise ConfigError(
            f"train.steps={steps}, but {store.folder} is at step {step} already; use more steps"
        )
    skipped = int(optimizer.skipped_in_row.item())
    if step == steps and skipped >= config.train.max_nonfinite:
        raise saves.diverged(step, skipped)  # no step is left that could show it again
    optimizer.restored(state["optimizer"])
    loader.load_state_dict(state["loader"])
    restore_random_state(state["random"])
    log.info("continuing after step %d of %s", step, store.folder)
    return step, chosen


def _import_weights(
    plan: Plan, saves: Saves, ranks: Ranks, model: Transformer, optimizer: StepOptimizer
) -> None:
    folder = plan.config.checkpoint.init_from
    if not folder:
        return
    weights = optimizer.weights_to_fill()
    with named_source("init_from", folder):
        kind = load_weights(model, folder, weights, plan.layout, ranks.rank)
    optimizer.adopt(weights)
    filled = {"model": optimizer.model_state(), "optimizer": optimizer.state_dict()}
    if name := saves.not_finite(filled):
        raise ConfigError(f"checkpoint.init_from={folder}: its {name} has values that are not finite")
    log.info("weights taken from %s (%s)", folder, kind.value)
