"""Overrides of a run's configuration, as words of a benchmark's command line."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from hydra import compose, initialize_config_module
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from graphmoe.command.errors import explain
from graphmoe.command.hydra import to_config
from graphmoe.config.schema import ConfigError, RunConfig

DEPENDENT = {
    "model": ("model.", "recompute."),
    "compile": ("recompute.ops",),
    "compile.enabled": ("recompute.ops",),
    "recompute": ("recompute.",),
}
"""What a default says of keys below or beside a choice, which another choice need not have."""


def compose_config(*words: str) -> RunConfig:
    """The configuration of a run with these overrides. *Raises* ConfigError."""
    ConfigStore.instance().store(name="schema", node=RunConfig)
    try:
        with initialize_config_module("graphmoe.conf", version_base="1.3"):
            return to_config(compose("config", overrides=list(words)))
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(f"overrides: {explain(error, words)}") from error


def words_of(text: str) -> list[str]:
    """The items of a list, which commas outside brackets separate; brackets around all may be left out."""
    items, depth, whole = [""], 0, False
    for character in text:
        depth += (character in "[{(") - (character in "]})")
        if character == "," and depth == 0:
            items.append("")
        else:
            items[-1] += character
    whole = len(items) == 1 and text.startswith("[") and text.endswith("]")
    return words_of(text[1:-1]) if whole else [item.strip() for item in items if item.strip()]


def without(words: Sequence[str], own: Sequence[str]) -> list[str]:
    """The words whose key the user does not set; another model has its own number of layers."""
    keys = {key_of(word) for word in own}
    gone = tuple(prefix for group in keys & DEPENDENT.keys() for prefix in DEPENDENT[group])
    return [word for word in words if key_of(word) not in keys and not word.startswith(gone)]


def refuse(own: Sequence[str], arguments: Mapping[str, str], unread: Sequence[str]) -> None:
    """*Raises* ConfigError for a word that the suite sets, by an argument or so that only steps are timed."""
    fixed = {key_of(word) for word in unread} | {"train.log_interval"}
    for word in own:
        key = key_of(word)
        if key in arguments:
            raise ConfigError(f"overrides={word}: the suite sets {key}; use {arguments[key]}=...")
        if key in fixed or key.startswith("checkpoint."):
            raise ConfigError(f"overrides={word}: the suite sets {key}, so that only steps are timed")


def key_of(word: str) -> str:
    """The key that an override sets."""
    return word.partition("=")[0].lstrip("+~")


def numbers(key: str, text: str) -> list[int]:
    """The numbers of a list, all above 0. *Raises* ConfigError, which names the argument ``key``."""
    words = words_of(text)
    for word in words:
        if not re.fullmatch(r"[1-9]\d*", word):
            raise ConfigError(f"{key}={text}: '{word}' is no number above 0; use such as {key}=1,4")
    return [int(word) for word in words]
