"""Reader and writer of weight folders in graphmoe's format; loading of weights from any folder.

A folder has ``model/<name>.yaml``, ``weights.safetensors`` or shards, and ``weights.json``. These files, and
a run's ``resolved.yaml``, are untrusted: types are checked, and interpolations are refused.
"""

import json
import logging
import math
import re
import shlex
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torch import Tensor, nn

from graphmoe.checkpoint import CHECKPOINTS, saved_steps
from graphmoe.checkpoint.flat_shards import FlatShard, shards_of
from graphmoe.checkpoint.folders import MismatchError, run_of, shortened
from graphmoe.checkpoint.hf.differences import different_keys, same_function
from graphmoe.checkpoint.hf.family import Piece
from graphmoe.checkpoint.hf.folder import OpenFolder, open_hf, read_hf_config, shapes_of
from graphmoe.checkpoint.hf.tensor_files import TensorFiles, TensorToWrite, has_weights, write_shards
from graphmoe.checkpoint.store import CheckpointStore, check_fit
from graphmoe.config.progress import working
from graphmoe.config.ranges import OWN_CODE
from graphmoe.config.schema import ComputeDtype, ConfigError, MasterDtype, ModelConfig, RunConfig
from graphmoe.config.untrusted import FileError, is_file_name, read_json, read_yaml
from graphmoe.model.lora import ADAPTER, without_adapters
from graphmoe.plan.layout import ALONE, Layout
from graphmoe.plan.rules import violations
from graphmoe.run.files import hydra_value
from graphmoe.run.stored import META_FILE, FolderKind, WeightsMeta, config_file, kind_of, read_stored_run

log = logging.getLogger(__name__)

FORMAT = "graphmoe-weights-1"
STEM = "weights"
OPTIONS = "model"
BUFFER = ".selection_bias"  # fp32 in the model
FINE_TUNING_LR = 1e-5  # about a thirtieth of pretraining's; larger ones lose what the weights know
Named = Collection[str | None]  # plug-ins that a file may name because its reader has named them


def load_weights(
    model: nn.Module,
    folder: str | Path,
    into: Mapping[str, Tensor | FlatShard] | None = None,
    layout: Layout = ALONE,
    rank: int = 0,
) -> FolderKind:
    """Load a folder's weights into a model, cast to its dtypes; return the folder's kind.

    ``into``: tensors to fill instead, such as fp32 master weights. *Raises* ConfigError (CheckpointError for
    a run) before any change if tensors do not fit.
    """
    config, folder = model.config, Path(folder)
    assert isinstance(config, ModelConfig)
    with working(f"reading {folder}"):
        theirs = _take(shards_of(model, layout, rank, instead=into), folder, config)
    if config.context_length > theirs.context_length:
        log.warning(
            "model.context_length=%d is longer than the %d of %s: its weights never saw positions beyond; "
            "use at most data.seq_len=%d, or go on if it is to learn them",
            config.context_length, theirs.context_length, folder, theirs.context_length,
        )  # fmt: skip
    _log_differences(config, theirs, folder)
    return kind_of(folder)


def _log_differences(ours: ModelConfig, theirs: ModelConfig, folder: Path) -> None:
    for line in same_function(ours, theirs):
        log.warning("%s as in %s; the weights are used with this run's value", line, folder)


def check_weights(folder: Path, config: ModelConfig) -> None:
    """Raise the error that ``load_weights`` would raise for the folder; reads headers only."""
    state = {name: torch.empty(shape, device="meta") for name, shape in shapes_of(config).items()}
    _take(state, folder, config, only_check=True)


def _take(
    state: Mapping[str, Tensor | FlatShard], folder: Path, config: ModelConfig, *, only_check: bool = False
) -> ModelConfig:
    if (kind := kind_of(folder)) is not FolderKind.run:
        source = open_folder(folder, kind, own_model_code(config))
        _refuse_other_tie(folder, source.config, config)
        _refuse_other_shapes(folder, source, config)
        source.check()
        if not only_check:
            source.fill(state)
        return source.config
    theirs = run_config(folder, own_model_code(config))
    _refuse_other_tie(folder, theirs, config)
    _refuse_other_adapters(folder, theirs, config)
    if not theirs.lora_rank:  # adapters that begin here keep their initial values
        state = {name: tensor for name, tensor in state.items() if ADAPTER not in name}
    places = _places_in_run(folder, state)
    with explained_mismatch(folder, config):
        if only_check:
            check_fit(folder, places, partial=True)
        else:
            CheckpointStore.open_any(folder).load(places, partial=True)
    return theirs


class FoundModel(NamedTuple):
    config: ModelConfig
    has_weights: bool
    compute: ComputeDtype | None = None  # of the weights of a Hugging Face folder


def model_of(folder: Path, named: Named = ()) -> FoundModel:
    """Return the model of any folder. *Raises* ConfigError."""
    kind = kind_of(folder)
    if kind is FolderKind.run:
        saved = saved_steps(run_of(folder.absolute()) / CHECKPOINTS)
        return FoundModel(run_config(folder, named), bool(saved))
    if kind is FolderKind.graphmoe:
        return FoundModel(open_weights(folder, named).config, has_weights=True)
    if not has_weights(folder):
        return FoundModel(read_hf_config(folder)[1], has_weights=False)
    found = open_hf(folder)
    return FoundModel(found.config, has_weights=True, compute=_compute_of(found))


def _compute_of(folder: OpenFolder) -> ComputeDtype:
    elements = Counter[str]()  # a few tensors, such as routers, may be in fp32 in folders of bf16 or fp8
    for header in folder.files.headers.values():
        elements[header.dtype] += math.prod(header.shape)
    return ComputeDtype.fp32 if elements.most_common(1)[0][0] == "F32" else ComputeDtype.bf16


def tuned(config: ModelConfig) -> ModelConfig:
    """Return the model of published weights, with the peak learning rate that suits training them further."""
    return replace(config, peak_lr=FINE_TUNING_LR)


def open_folder(folder: Path, kind: FolderKind, named: Named) -> OpenFolder:
    """Open a folder of safetensors, Hugging Face's or graphmoe's. *Raises* ConfigError."""
    return open_hf(folder) if kind is FolderKind.hf else open_weights(folder, named)


def _refuse_other_shapes(folder: Path, source: OpenFolder, ours: ModelConfig) -> None:
    if not (why := of_another_model(folder, source.config, ours)):
        return
    theirs, wanted = source.shapes, shapes_of(without_adapters(ours))
    lines = [f"missing: {name} {list(shape)}" for name, shape in wanted.items() if name not in theirs]
    lines += [f"extra: {name} {list(shape)}" for name, shape in theirs.items() if name not in wanted]
    for name in wanted:
        if wanted[name] != theirs.get(name, wanted[name]):
            lines.append(f"mis-shaped: {name} is {list(theirs[name])}, not {list(wanted[name])}")
    if lines:
        raise ConfigError(f"{why}\n  tensors that differ: {len(lines)}\n  {shortened(lines)}")


def of_another_model(folder: Path, theirs: ModelConfig, ours: ModelConfig) -> str | None:
    """Return an error message that lists the model keys that differ; None if none do."""
    if not (changes := different_keys(theirs, ours)):
        return None
    listed = ", ".join(f"model.{key}: {before} -> {after}" for key, before, after in changes)
    return (
        f"{folder} is of another model ({listed}; its own -> this run's); use "
        f"model={hydra_value(str(folder))} and none of these keys, or start without its weights"
    )


def _refuse_other_tie(folder: Path, theirs: ModelConfig, ours: ModelConfig) -> None:
    if theirs.tie_embeddings != ours.tie_embeddings:
        wanted, has = (str(config.tie_embeddings).lower() for config in (ours, theirs))
        what = "has no head of its own" if theirs.tie_embeddings else "has a head that would be dropped"
        raise ConfigError(
            f"model.tie_embeddings={wanted}, but {folder} is of a model with {has}, which {what}; use "
            f"model.tie_embeddings={has}, or start without its weights"
        )


def _refuse_other_adapters(folder: Path, theirs: ModelConfig, ours: ModelConfig) -> None:
    has, wanted = (
        (each.lora_rank, each.lora_alpha, sorted(each.lora_targets)) if each.lora_rank else (0,)
        for each in (theirs, ours)
    )
    if theirs.lora_rank and has != wanted:
        raise ConfigError(
            f"{folder} has adapters of model.lora_rank={theirs.lora_rank} lora_alpha={theirs.lora_alpha:g} "
            f"lora_targets=[{','.join(theirs.lora_targets)}], not this run's; use these, or merge them by "
            f"python -m graphmoe.convert from={folder} to=FOLDER"
        )


@contextmanager
def explained_mismatch(folder: Path, ours: ModelConfig) -> Iterator[None]:
    """Context that adds the differing model keys to a MismatchError's message, or else logs them."""
    try:
        yield
        with suppress(ConfigError):  # of a damaged file, which a checkpoint does not need
            if config_file(folder) is not None:
                _log_differences(ours, run_config(folder, own_model_code(ours)), folder)
    except MismatchError as error:
        if config_file(folder) is None:
            raise
        why = of_another_model(folder, run_config(folder, own_model_code(ours)), ours) or (
            f"{folder} is of the same model, but not of the same precision or optimizer; use the same, "
            "or checkpoint.init_from, which takes the weights only"
        )
        raise MismatchError(f"{why}\n{error}") from error


def open_weights(folder: Path, named: Named = ()) -> OpenFolder:
    """Open a folder in graphmoe's format and read its headers. *Raises* ConfigError."""
    meta = read_json(folder / META_FILE, WeightsMeta)
    if meta.format != FORMAT:
        raise ConfigError(f"{folder / META_FILE}: format={meta.format}; this version reads {FORMAT}")
    place, _, name = meta.model.partition("/")
    if place != OPTIONS or not is_file_name(name):
        raise ConfigError(
            f"{folder / META_FILE}: model={meta.model} must be a file in {OPTIONS}/ of its folder"
        )
    path = folder / OPTIONS / name
    config = model_from(read_yaml(path, dict[str, Any]), f"{path}: ", named)
    files = TensorFiles(folder, STEM)
    files.require_parts(config, str(path))
    shapes = shapes_of(config)
    return OpenFolder(config, files, shapes, own_pieces(shapes), meta.token_ids or {})


def write_weights(
    folder: Path,
    config: ModelConfig,
    entries: Iterable[TensorToWrite],
    meta: dict[str, Any],
    *,
    max_bytes: int,
    on_bytes: Callable[[int], None] = lambda num_bytes: None,
) -> list[Path]:
    """Write a folder in graphmoe's format; return its files."""
    written = write_shards(folder, STEM, entries, max_bytes, on_bytes)
    option = folder / OPTIONS / f"{option_name(config.name)}.yaml"
    option.parent.mkdir(exist_ok=True)
    option.write_text(f"# {train_command(folder)}\n{model_to_yaml(config)}", encoding="utf-8")
    path = folder / META_FILE
    document = {"format": FORMAT, "model": f"{OPTIONS}/{option.name}", **meta}
    path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    return [path, option, *written]


def own_pieces(names: Iterable[str]) -> list[Piece]:
    return [Piece(name, name) for name in names]


def train_command(folder: Path) -> str:
    return shlex.join(["python", "-m", "graphmoe.train", f"model={hydra_value(str(folder))}"])


def option_name(name: str) -> str:
    """Return a name without characters that Hydra or file systems reject."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", name).strip("-.") or "imported"


def model_to_yaml(config: ModelConfig) -> str:
    plain = OmegaConf.to_container(OmegaConf.structured(config), enum_to_str=True)
    return yaml.safe_dump(plain, sort_keys=False)


def own_model_code(config: ModelConfig) -> Named:
    return config.attention, config.layer


def run_config(folder: Path, named: Named = ()) -> ModelConfig:
    """Return a run's ModelConfig, given its folder, its ``checkpoints`` or one checkpoint."""
    path, run = read_stored_run(folder)
    return model_from(run.model, f"{path}: model.", named)


def model_from(plain: dict[str, Any], where: str, named: Named = ()) -> ModelConfig:
    """Parse a ModelConfig, which may name only plug-ins in ``named``. *Raises* ConfigError."""
    for key, value in plain.items():
        if "${" in str(value):
            raise FileError(
                f"{where}{key}={value} would be looked up on this machine, which is not done for a file that "
                "somebody else may have written; write the value itself there"
            )
    try:
        config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(ModelConfig), plain))
    except (OmegaConfBaseException, ValueError, TypeError, OverflowError) as error:
        reason = str(error).strip().splitlines()[0]
        key = getattr(error, "full_key", None) or ""
        raise FileError(f"{where}{key} fits no model of this version: {reason}") from error
    assert isinstance(config, ModelConfig)
    for key, name in {"attention": config.attention, "layer": config.layer}.items():
        if OWN_CODE.fullmatch(name) and name not in named:
            raise FileError(
                f"{where}{key}={name} is code outside the package; if you trust it, add to the command "
                f"line: {key}={name} (in a run model.{key}={name})"
            )
    wrong = [line for line in violations(RunConfig(model=config)) if line.startswith("model.")]
    if wrong:
        raise FileError(f"{where}* has invalid values: {'; '.join(wrong)}")
    return config


def read_run(folder: Path, step: int | None, named: Named = ()) -> tuple[ModelConfig, dict[str, Tensor], int]:
    """Return model, fp32 master weights and step of a run's checkpoint, by default the newest."""
    config = run_config(folder, named)
    state = {name: torch.empty(shape, dtype=torch.float32) for name, shape in shapes_of(config).items()}
    places = _places_in_run(folder, state)
    found = CheckpointStore.open_any(folder).load(places, step, partial=True)
    assert found is not None
    return config, state, found


def _places_in_run(folder: Path, state: Mapping[str, Tensor | FlatShard]) -> dict[str, Any]:
    path, run = read_stored_run(folder)
    compute = run.precision.compute
    if compute is not None and compute not in ComputeDtype.__members__:
        valid = ", ".join(ComputeDtype.__members__)
        raise FileError(f"{path}: precision.compute={compute} must be one of {valid}")
    if compute != ComputeDtype.bf16.name or run.optim.master_dtype == MasterDtype.bf16:
        return {"model": state}
    # "model" holds weights rounded to bf16; the optimizer holds the master weights.
    adapts = bool(run.model.get("lora_rank"))  # frozen weights have no master weights
    main = {name: t for name, t in state.items() if adapts == (ADAPTER in name) and not name.endswith(BUFFER)}
    return {"model": {n: t for n, t in state.items() if n not in main}, "optimizer": {"main": main}}
