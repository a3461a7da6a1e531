"""Valid values of the schema's keys, spelled as on the command line."""

import enum
import importlib
import operator
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, TypeVar, cast

from graphmoe.config.ranges import OWN_CODE, ConfigError, OneOf, no_such_choice

Row = TypeVar("Row")


class SourceFacts(NamedTuple):
    """Properties of a data source; a plug-in has the defaults."""

    needs: tuple[str, ...] = ()  # required keys of ``data``
    reads: tuple[str, ...] | None = None  # optional keys of ``data``; None: any
    endless: bool = True
    end_key: str | None = None  # optional key that gives the source a token after each document
    marks: bool = False  # its tokens have the flags of graphmoe.config.token_flags

    def ignores(self, key: str) -> bool:
        return self.reads is not None and key not in (*EVERY_SOURCE, *self.needs, *self.reads)


# keys of ``data`` for all sources
EVERY_SOURCE = ("source", "seq_len", "seed", "prefetch", "cache_dir", "document_mask")
_TEXT = ("tokenizer", "eod_token", "val_fraction", "shuffle", "skip_bad")
_HF = ("hf_config", "hf_split", "hf_val_split")
_CHAT = ("chat_template", "train_on", "too_long")
SOURCES = {
    "stdlib": SourceFacts(reads=(*_TEXT, "bpe_vocab_size"), endless=False),
    "files": SourceFacts(
        ("paths", "tokenizer"), (*_TEXT, "weights", "val_paths", "text_field"), endless=False
    ),
    "chat": SourceFacts(
        ("tokenizer",),
        (*_TEXT, "paths", "weights", "val_paths", "hf_name", *_HF, *_CHAT),
        endless=False,
        marks=True,
    ),
    "hf": SourceFacts(("hf_name", "tokenizer"), (*_TEXT, *_HF, "text_field")),
    "memmap": SourceFacts(("paths",), (*_TEXT, "weights", "val_paths"), endless=False, end_key="tokenizer"),
    "synthetic": SourceFacts(reads=("document_length",), end_key="document_length"),
}
ATTENTIONS = OneOf(("mla", "gqa"))
LAYERS = OneOf(("standard",))
DATA_SOURCES = OneOf(tuple(SOURCES))
DISPATCHERS = OneOf(("auto", "local", "alltoall", "symm", "nvshmem", "deepep", "turbo"))
EXPERTS_BACKENDS = OneOf(("auto", "torch", "triton", "turbo", "te"))
LORA_TARGETS = ("attention", "mlp", "shared_experts", "experts")
OPTIMIZERS = OneOf(("adamw", "muon"))
LR_SCHEDULES = OneOf(("cosine", "wsd", "constant"))


CODE_FOLDERS = "GRAPHMOE_CODE_FOLDERS"  # variable with the folders of --config-dir


def compute_words(compute: str, fp8: str, share: str = "products") -> str:
    return compute if fp8 == "none" else f"{compute}, {share} in 8 bits ({fp8})"


def look_up(table: Mapping[str, Row], choice: str, key: str, kind: Any = object, attribute: str = "") -> Row:
    """Return a choice's row of a table, or the object (or its ``attribute``) that a plug-in choice names."""
    if choice in table:
        return table[choice]
    # imports code, so graphmoe.command.hydra.load_config rejects files that name code unless its reader does
    found = import_code(choice, key, attribute, table)
    if not isinstance(found, kind):
        wanted = "function" if kind is Callable else f"{kind.__module__}.{kind.__name__}"
        raise ConfigError(f"{key}={choice} is a {type(found).__name__}; name a {wanted}")
    return cast(Row, found)


def import_code(path: str, key: str, attribute: str = "", choices: Iterable[str] = ()) -> Any:
    """Import ``package.module:NAME`` or its ``attribute``. *Raises* ConfigError.

    Searches Python's path, the working folder, then the folders of --config-dir.
    """
    if not OWN_CODE.fullmatch(path):
        raise ConfigError(no_such_choice(key, path, choices))
    folders = [os.getcwd(), *filter(None, os.environ.get(CODE_FOLDERS, "").split(os.pathsep))]
    sys.path += [folder for folder in folders if folder not in sys.path]
    module, _, name = path.partition(":")
    try:
        return operator.attrgetter(f"{name}.{attribute}".strip("."))(importlib.import_module(module))
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise ConfigError(f"{key}={path} cannot be imported ({error}); install what it needs") from error
        raise ConfigError(
            f"{key}={path} cannot be imported: there is no module {error.name} in {', '.join(folders)}, on "
            f"PYTHONPATH or among the installed packages; write package.module:NAME"
        ) from error
    except (ImportError, AttributeError, SyntaxError, ValueError) as error:
        raise ConfigError(f"{key}={path} cannot be imported ({error}); write package.module:NAME") from error


AttentionBackend = enum.StrEnum("AttentionBackend", ("auto", "sdpa", "padded_flash", "flash4", "turbo", "te"))
RUN_SINKS = frozenset({AttentionBackend.flash4, AttentionBackend.te, AttentionBackend.turbo})
RUN_WINDOWS = frozenset({AttentionBackend.te, AttentionBackend.turbo})  # those of flash4 were not tested
AttentionBias = enum.StrEnum("AttentionBias", ("none", "qkv", "qkvo"))
DeltaNetBackend = enum.StrEnum("DeltaNetBackend", ("auto", "triton", "fla"))
LinearAttention = enum.StrEnum("LinearAttention", ("none", "delta_net"))
RopeScaling = enum.StrEnum("RopeScaling", ("none", "yarn", "llama3"))
ScoreFunction = enum.StrEnum("ScoreFunction", ("softmax", "sigmoid"))
GroupScore = enum.StrEnum("GroupScore", ("max", "topk_sum", "top2_sum"))
AuxLoss = enum.StrEnum("AuxLoss", ("none", "sequence", "micro_batch", "global_batch"))
Balance = enum.StrEnum("Balance", ("auto", "none", "replicas"))
Transport = enum.StrEnum("Transport", ("auto", "copy_engine", "pull"))
DpShard = enum.StrEnum("DpShard", ("zero1", "fsdp2"))
DispatchDtype = enum.StrEnum("DispatchDtype", ("auto", "bf16", "fp8"))
ContextMethod = enum.StrEnum("ContextMethod", ("auto", "alltoall", "ring"))
MomentDtype = enum.StrEnum("MomentDtype", ("fp32", "bf16", "int8"))
MasterDtype = enum.StrEnum("MasterDtype", ("fp32", "bf16"))
GradDtype = enum.StrEnum("GradDtype", ("fp32", "bf16"))
ComputeDtype = enum.StrEnum("ComputeDtype", ("auto", "bf16", "fp32"))
Fp8WeightGrad = enum.StrEnum("Fp8WeightGrad", ("fp8", "bf16"))
Fp8Measure = enum.StrEnum("Fp8Measure", ("auto", "none"))
TrainOn = enum.StrEnum("TrainOn", ("assistant", "all", "field"))
TooLong = enum.StrEnum("TooLong", ("truncate", "skip"))
FP8_PRODUCTS = ("experts", "attn", "mlp", "shared_experts")
DeviceChoice = enum.StrEnum("DeviceChoice", ("auto", "cpu", "cuda"))
NumaBinding = enum.StrEnum("NumaBinding", ("auto", "none"))
OutputFormat = enum.StrEnum("OutputFormat", ("text", "json"))


# in model order
SEGMENT_NAMES = (
    "embed", "attn", "mlp", "moe_router", "moe_preprocess", "moe_dispatch", "shared_experts", "moe_experts",
    "moe_combine", "loss", "optimizer",
)  # fmt: skip
