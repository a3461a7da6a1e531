"""Command line for Hydra: all forms that people type become overrides, which are checked at once."""

import dataclasses
import itertools
import re
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_module
from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig

from graphmoe.command.errors import groups, with_plain_groups, wrong_words
from graphmoe.config.arguments import key_value_words
from graphmoe.config.ranges import fields_of
from graphmoe.config.schema import ConfigError, RunConfig

FLAGS = {
    **dict.fromkeys(("-c", "--cfg", "-p", "--package", "-cp", "--config-path", "-cn", "--config-name"), 1),
    **dict.fromkeys(("-cd", "--config-dir", "--experimental-rerun"), 1),
    **dict.fromkeys(("-m", "--multirun", "-r", "--run", "--resolve", "--hydra-help", "-i", "--info"), 0),
}
"""Hydra's own options, with the number of words that belong to each; tab completion has more."""
OTHER_SOURCES = ("-cp", "--config-path", "-cn", "--config-name", "--experimental-rerun")
"""Options of Hydra that compose a configuration of something other than ``conf/config.yaml``."""
_OVERRIDE = re.compile(r"[+~=]|(?!--)[\w./@:-]+=")
_PLAIN = re.compile(r"[\w/.+*?$%@|-]+")


def run_words(argv: Sequence[str], more: Mapping[str, Any] | None = None) -> list[str]:
    """Return the command line as Hydra overrides; ``more``: types of a tool's keys. *Raises* ConfigError."""
    if {"-sc", "--shell-completion"} & {*argv}:
        return list(argv)
    flags, words = _split(argv)
    hints = {**run_hints(), **(more or {})}
    found, problems = key_value_words(words, hints, ("model",), as_they_are=_OVERRIDE, listed=_as_list)
    if problems:
        raise ConfigError(f"{'; '.join(problems)}; --help lists the keys")
    open_keys = tuple(f"{name}." for name, hint in hints.items() if typing.get_origin(hint) is dict)
    found = [
        f"++{word}" if f"{word.partition('=')[0]}.".startswith(open_keys) else word  # such as host.env.X=v
        for word in with_plain_groups(found)
    ]
    of_runs = [word for word in found if word.partition("=")[0] not in (more or {})]
    if wrong := wrong_words([*flags, *of_runs]):
        raise ConfigError(wrong)
    return [*flags, *found]


def composed(overrides: Sequence[str] = ()) -> DictConfig:
    """Compose the overrides with Hydra; the configuration is not checked yet."""
    ConfigStore.instance().store(name="schema", node=RunConfig)
    with initialize_config_module("graphmoe.conf", version_base="1.3"):
        return compose("config", list(overrides))


def own_folders(words: Sequence[str]) -> Iterator[Path]:
    """Yield the folders of the user's own options, those of --config-dir."""
    for word, following in itertools.pairwise([*words, ""]):
        name, _, value = word.partition("=")
        if name in ("-cd", "--config-dir"):
            yield Path(value or following)


def run_hints() -> dict[str, Any]:
    sections = typing.get_type_hints(RunConfig)
    plain = {name: kind for name, kind in sections.items() if not dataclasses.is_dataclass(kind)}
    return dict.fromkeys(groups(), str) | plain | {field.key: field.hint for field in fields_of(RunConfig())}


def _split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    flags, others, rest = list[str](), list[str](), list(argv)
    while rest:
        word = rest.pop(0)
        is_flag = word.partition("=")[0] in FLAGS
        (flags if is_flag else others).append(word)
        for _ in range(FLAGS.get(word, 0)):
            flags += [rest.pop(0)] if rest else []
    return flags, others


def _as_list(values: Sequence[str]) -> str:
    if len(values) == 1 and values[0].startswith(("[", "null", "none")):
        return values[0]
    quoted = (text if _PLAIN.fullmatch(text) else "'" + text.replace("'", "\\'") + "'" for text in values)
    return f"[{','.join(quoted)}]"
