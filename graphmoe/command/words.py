"""Conversion of a run's command line, as people type it, to checked overrides; and its help text."""

import dataclasses
import itertools
import re
import shlex
import textwrap
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_module
from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf

from graphmoe.command.errors import (
    explain,
    groups,
    is_model_folder,
    options,
    parsed,
    with_plain_groups,
    wrong_words,
)
from graphmoe.config.arguments import COMMANDS, WIDTH, field_docs, key_lines, key_value_words, typed_as
from graphmoe.config.ranges import fields_of, spelled
from graphmoe.config.schema import ConfigError, RunConfig

FLAGS = {
    **dict.fromkeys(("-c", "--cfg", "-p", "--package", "-cp", "--config-path", "-cn", "--config-name"), 1),
    **dict.fromkeys(("-cd", "--config-dir", "--experimental-rerun"), 1),
    **dict.fromkeys(("-m", "--multirun", "-r", "--run", "--resolve", "--hydra-help", "-i", "--info"), 0),
}
"""Hydra's own options, with the number of words that belong to each; tab completion has more."""
OTHER_SOURCES = ("-cp", "--config-path", "-cn", "--config-name", "--experimental-rerun")
"""Hydra's options that compose a configuration from something other than ``conf/config.yaml``."""
_OVERRIDE = re.compile(r"[+~=]|(?!--)[\w./@:-]+=")
_PLAIN = re.compile(r"[\w/.+*?$%@|-]+")
OFTEN_SET = """
    model.num_layers data.paths data.tokenizer data.seq_len
    train.steps train.global_batch_size train.micro_batch_size train.seed
    optim.lr optim.warmup_steps optim.schedule
    graph.scope recompute.all
    launch.nproc parallel.ep parallel.pp parallel.tp
    checkpoint.interval checkpoint.init_from checkpoint.export run.name
"""
FOOTER = """\
--help=all   all keys                     --cfg job       print the configuration and stop
-m key=a,b   one job for each value       --config-dir D  add a folder of your own YAML files
--version    versions                     --hydra-help    Hydra's own options
docs/configuration.md describes groups and keys with their types."""


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
    """Return the configuration that Hydra composes from the overrides, not checked yet."""
    ConfigStore.instance().store(name="schema", node=RunConfig)
    with initialize_config_module("graphmoe.conf", version_base="1.3"):
        return compose("config", list(overrides))


def own_folders(words: Sequence[str]) -> Iterator[Path]:
    """Yield the folders that --config-dir names, which hold the user's own options."""
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


def help_text(
    prog: str,
    examples: Sequence[str],
    words: Sequence[str] = (),
    *,
    with_all: bool = False,
    more: Mapping[str, Any] | None = None,
) -> str:
    """Return the help of ``graphmoe.<name>``: the keys that people often set, or all.

    Values are those of the command line ``words``, if it is valid. ``more``: types of the tool's own keys.
    """
    given, own, said = _given(words, more or {})
    often, rows = OFTEN_SET.split(), dict(_keys(given))
    wanted = [*rows] if with_all else often
    parts = [
        [f"{typed_as(prog)}: {COMMANDS[prog.partition('.')[2]]}"],
        ["Examples:", *(f"  {example}" for example in examples)],
        ["Groups, an option each (model=deepseek_v2_lite, or the preset's name alone):", *_group_lines(own)],
        [
            f"{'All' if with_all else 'Often set'} keys, as key=value, --key=value or --key value:",
            *key_lines([rows[key] for key in wanted]),
        ],
        textwrap.wrap(said, WIDTH, break_on_hyphens=False, break_long_words=False),
        [FOOTER],
    ]
    return "\n\n".join("\n".join(part) for part in parts if part)


def _given(words: Sequence[str], more: Mapping[str, Any]) -> tuple[dict[str, Any], list[Path], str]:
    asked = [word for word in words if word not in ("help", "-h", "--help", "--help=all", "--help-all")]
    own, read = [*own_folders(asked)], asked
    try:
        read = [word for word in run_words(asked, more) if word.partition("=")[0] not in more]
        unread = [f"{word} is not read by --help" for word in read if word.partition("=")[0] in OTHER_SOURCES]
        unread += [f"{folder} is not a folder" for folder in own if not folder.is_dir()]
        overrides, unreadable = parsed(read)
        models = [str(each.value()) for each in overrides if each.key_or_group == "model" and not own]
        unread += [f"the folder {name} is not read by --help" for name in models if is_model_folder(name)]
        if unread or unreadable:
            raise ConfigError(unreadable or unread[0])
        kept = [str(each.input_line) for each in overrides if not each.is_sweep_override()]
        path = [f"hydra.searchpath={[f'file://{folder.absolute()}' for folder in own]}"] if own else []
        shown = [word for folder in own for word in ("--config-dir", str(folder))] + kept
        said = f"The values are those of {shlex.join(shown)}." if shown else ""
        return _values([*path, *kept]), own, said
    except ConfigError as error:
        why = str(error)
    except Exception as error:  # also for a value that Hydra does not foresee
        why = explain(error, read)
    return _values(), own, f"The values are those of model=tiny: {why}"


def _values(overrides: Sequence[str] = ()) -> dict[str, Any]:
    plain = OmegaConf.to_container(composed(overrides), resolve=True)
    assert isinstance(plain, dict)
    sections = {str(name): values for name, values in plain.items() if isinstance(values, dict)}
    return {f"{name}.{key}": value for name, values in sections.items() for key, value in values.items()}


def _keys(given: Mapping[str, Any]) -> Iterator[tuple[str, tuple[str, str]]]:
    for section, kind in typing.get_type_hints(RunConfig).items():
        if not dataclasses.is_dataclass(kind):
            yield section, (f"{section}=text", field_docs(RunConfig)[section])
            continue
        for name, doc in field_docs(typing.cast(type, kind)).items():
            key = f"{section}.{name}"
            yield key, (f"{key}={spelled(given[key])}", doc)


def _group_lines(own: Sequence[Path]) -> Iterator[str]:
    for group in groups():
        if group != "hydra":
            line = f"  {group:<12}{' '.join(options(group, own))}"
            yield from textwrap.wrap(line, WIDTH, subsequent_indent=" " * 14, break_on_hyphens=False)
