"""Export of a run's weights as a Hugging Face folder.

Rank 0 writes one tensor after the other: it asks for a tensor, and the ranks that hold parts of it send them.
So no rank holds more than its own state and one file of the folder.
"""

import logging
import os
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from graphmoe.checkpoint.entries import Entries, own_share
from graphmoe.checkpoint.flat_shards import FlatShard
from graphmoe.checkpoint.hf.families import to_hf_config
from graphmoe.checkpoint.hf.folder import STEM, hf_entries, shapes_of, write_hf
from graphmoe.checkpoint.hf.tensor_files import DEFAULT_SHARD, Index, TensorToWrite
from graphmoe.config.arguments import parse_size
from graphmoe.config.progress import counting
from graphmoe.config.ranges import shown_size
from graphmoe.config.schema import CheckpointConfig, ConfigError, ModelConfig
from graphmoe.model.lora import without_adapters
from graphmoe.optim.base import StepOptimizer
from graphmoe.plan.layout import REPLICATED, Layout
from graphmoe.plan.plan import Plan, dtype_of
from graphmoe.run.files import display_path, hydra_value
from graphmoe.run.tokenizer_files import tokenizer_of_run, write_tokenizer
from graphmoe.runtime.launch.failures import RunFailed
from graphmoe.runtime.ranks import Ranks

log = logging.getLogger(__name__)

DONE = -1


def check_export(checkpoint: CheckpointConfig, model: ModelConfig, earlier: str | None = None) -> None:
    """Raise ConfigError if ``checkpoint.export`` cannot be written; ``earlier``, if given, is replaced.

    ``earlier``: the folder that a continued run named before.
    """
    if (name := checkpoint.export) is None:
        return
    folder, key = _folder(name), f"checkpoint.export={name}"
    for start in filter(None, (checkpoint.init_from, checkpoint.resume_from)):
        if folder.resolve() == Path(start).expanduser().resolve():
            raise ConfigError(f"{key} is the folder that the run starts from; use a new folder")
    try:
        to_hf_config(without_adapters(model))
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}") from error
    is_own = earlier is not None and _folder(earlier).resolve() == folder.resolve()
    if folder.is_dir() and any(folder.iterdir()) and not is_own:
        raise ConfigError(f"{key} is not empty; use a new folder or an empty one")
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if os.path.lexists(path))
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        why = "cannot be written to" if there.is_dir() else "is not a folder"
        raise ConfigError(f"{key}: {there} {why}; use another folder")


def export(
    plan: Plan, run: Path, optimizer: StepOptimizer, ranks: Ranks, on_tensor: Callable[[], None]
) -> None:
    """Write the weights to ``checkpoint.export``, in the dtype of ``precision.compute``. Collective.

    ``run``: the run's folder, whose tokenizer is written too. ``on_tensor`` is called after each tensor on
    all ranks, and after each file. *Raises* RunFailed if a file cannot be written.
    """
    assert plan.checkpoint.export is not None
    folder, started = _folder(plan.checkpoint.export), time.perf_counter()
    try:
        files = write_folder(plan, folder, optimizer, ranks, run, on_tensor)
    except (ConfigError, OSError) as error:
        words = f"from={hydra_value(str(run))} to={hydra_value(str(folder))} overwrite=true"
        instead = f"; python -m graphmoe.convert {words} writes the checkpoint" * plan.checkpoint.enabled
        raise RunFailed(f"checkpoint.export={folder} could not be written: {error}{instead}") from error
    if ranks.is_first:
        size, seconds = shown_size(sum(path.stat().st_size for path in files)), time.perf_counter() - started
        family, _ = to_hf_config(without_adapters(plan.model))
        log.info("exported %s (%s): %s in %.2f s", display_path(folder), family.name, size, seconds)


def write_folder(
    plan: Plan, folder: Path, optimizer: StepOptimizer, ranks: Ranks, run: Path | None = None,
    on_tensor: Callable[[], None] = lambda: None,
) -> list[Path]:  # fmt: skip
    """Write a Hugging Face folder, with the tokenizer of ``run`` if given; return rank 0's files. Collective.

    *Raises* ConfigError or OSError, on all ranks.
    """
    shapes = shapes_of(plan.model)
    dtypes = dict.fromkeys(shapes, dtype_of(plan.precision.compute))
    dtypes |= {name: torch.float32 for name in shapes if name.endswith(".selection_bias")}
    state = {**optimizer.model_state(), **optimizer.main_state()}
    # vectors may be changed, and adapters merged, before they are rounded
    exact = {name for name, shape in shapes.items() if len(shape) == 1 or plan.model.lora_rank}
    sent = dtypes | dict.fromkeys(exact, torch.float32)
    _, raw, entries = hf_entries(plan.model, dtypes, _reader(state, shapes, sent, plan.layout, ranks))

    def write(asked: Sequence[TensorToWrite]) -> list[Path]:
        for draft in folder.glob(f".{STEM}.tmp-*"):  # of an export that was killed
            shutil.rmtree(draft)
        tokenizer = tokenizer_of_run(run) if run else None
        most, ids = parse_size("max_shard_size", DEFAULT_SHARD, least=1), tokenizer and tokenizer.token_ids
        with counting(f"writing {folder}", sum(entry.num_bytes for entry in asked)) as on_bytes:

            def on_file(num_bytes: int) -> None:
                on_bytes(num_bytes)
                on_tensor()

            files = write_hf(folder, raw, asked, max_bytes=most, token_ids=ids, on_bytes=on_file)
        return files + (write_tokenizer(tokenizer, folder, plan.model.context_length) if tokenizer else [])

    def noted(entry: TensorToWrite) -> TensorToWrite:
        def make() -> Tensor:
            made = entry.make()
            on_tensor()
            return made

        return replace(entry, make=make)

    return _on_first(write, [*map(noted, entries)], ranks)


def _folder(name: str) -> Path:
    return Path(name).expanduser()


def _on_first(
    write: Callable[[Sequence[TensorToWrite]], list[Path]], entries: Sequence[TensorToWrite], ranks: Ranks
) -> list[Path]:
    """Call ``write`` on rank 0; the others compute each tensor that it computes. All raise its error."""
    if ranks.size == 1:
        return write(entries)
    number = torch.zeros((), dtype=torch.int64)

    def ask(wanted: int) -> None:
        dist.broadcast(number.fill_(wanted), 0, group=ranks.group)

    def made(wanted: int) -> Tensor:
        ask(wanted)
        return entries[wanted].make()

    outcome: list[list[Path] | Exception] = []
    if ranks.is_first:
        asked = [replace(entry, make=partial(made, wanted)) for wanted, entry in enumerate(entries)]
        try:
            outcome.append(write(asked))
        except Exception as error:
            outcome.append(error)
        ask(DONE)
    else:
        dist.broadcast(number, 0, group=ranks.group)
        while (wanted := int(number)) != DONE:
            entries[wanted].make()
            dist.broadcast(number, 0, group=ranks.group)

    def result() -> list[Path]:
        if isinstance(outcome[0], Exception):
            raise outcome[0]
        return outcome[0]

    return ranks.on_first(result)


def _reader(
    state: dict[str, Tensor | FlatShard], shapes: dict[str, torch.Size], dtypes: dict[str, torch.dtype],
    layout: Layout, ranks: Ranks,
) -> Callable[[str, Index], Tensor]:  # fmt: skip
    """Return a function that gives a part of a whole tensor on rank 0, on others a meta tensor. Collective.

    ``dtypes`` are those of the parts that ranks send. All ranks call the function with the same arguments.
    """
    shards: dict[str, Tensor | FlatShard] = {
        name: each
        if isinstance(each, FlatShard)
        else FlatShard.from_part(each, REPLICATED, layout, ranks.rank)
        for name, each in state.items()
    }
    own = own_share(Entries({**shards}), ranks).of(FlatShard)
    holders: dict[str, list[FlatShard]] = {name: [] for name in shapes}
    described = {name: replace(shard, data=shard.data.to("meta")) for name, shard in own.items()}
    for of_rank in ranks.gather(described):
        for name, shard in of_rank.items():
            holders[name].append(shard)

    def read(name: str, index: Index) -> Tensor:
        shape = torch.empty(shapes[name], device="meta")[index].shape
        if not ranks.is_first:
            for part, _ in own[name].within(index) if name in own else ():
                dist.send(part.to("cpu", dtypes[name]).contiguous(), 0, group=ranks.group)
            return torch.empty(shape, device="meta")
        whole = torch.empty(shape, dtype=dtypes[name])
        for shard in holders[name]:
            for part, place in (own[name] if shard.rank == 0 else shard).within(index):
                if part.is_meta:
                    part = torch.empty(part.shape, dtype=dtypes[name])
                    dist.recv(part, shard.rank, group=ranks.group)
                whole[place] = part
        return whole

    return read
