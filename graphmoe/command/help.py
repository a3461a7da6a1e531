"""Help of the commands that read a run's configuration: groups, keys and defaults, without composing any."""

import dataclasses
import enum
import re
import textwrap
import typing
from collections.abc import Iterator, Sequence
from typing import Any

from graphmoe.command.errors import CONF, groups, options
from graphmoe.config.arguments import COMMANDS, field_docs, typed_as
from graphmoe.config.schema import RunConfig
from graphmoe.config.untrusted import load_yaml

OFTEN_SET = """
    model.num_layers data.paths data.tokenizer data.seq_len
    train.steps train.global_batch_size train.micro_batch_size train.seed
    optim.lr optim.warmup_steps optim.schedule
    graph.scope recompute.all
    launch.nproc parallel.ep parallel.pp parallel.tp
    checkpoint.interval checkpoint.init_from run.name
"""
"""Keys that people set."""
WIDTH = 100
FOOTER = """\
--help=all   all keys                     --cfg job       print the configuration and stop
-m key=a,b   one job for each value       --config-dir D  add a folder of your own YAML files
--version    versions                     --hydra-help    Hydra's own options
docs/configuration.md describes groups and keys with their types."""


def help_text(prog: str, examples: Sequence[str], *, with_all: bool = False) -> str:
    """Return the help of ``graphmoe.<name>``: the keys that people set, or all."""
    often, rows = OFTEN_SET.split(), dict(_keys())
    wanted = [*rows] if with_all else often
    width = max(len(rows[key][0]) for key in wanted if len(rows[key][0]) < 44)
    parts = [
        [f"{typed_as(prog)}: {COMMANDS[prog.partition('.')[2]]}"],
        ["Examples:", *(f"  {example}" for example in examples)],
        ["Groups, an option each (model=deepseek_v2_lite, or the preset's name alone):", *_group_lines()],
        [
            f"{'All' if with_all else 'Often set'} keys, as key=value, --key=value or --key value:",
            *(line for key in wanted for line in _key_lines(*rows[key], width)),
        ],
        [FOOTER],
    ]
    return "\n\n".join("\n".join(part) for part in parts)


def shipped() -> dict[str, Any]:
    """Return the values that the files of ``conf/`` give a run without arguments, by key."""
    named = load_yaml((CONF / "config.yaml").read_text(encoding="utf-8"))["defaults"]
    chosen = {group: option for entry in named if isinstance(entry, dict) for group, option in entry.items()}
    files = {group: CONF / group / f"{option}.yaml" for group, option in chosen.items() if option}
    return {
        f"{group}.{name}": value
        for group, file in files.items()
        if file.is_file()
        for name, value in (load_yaml(file.read_text(encoding="utf-8")) or {}).items()
    }


def _keys() -> Iterator[tuple[str, tuple[str, str]]]:
    """Yield each key with its ``key=default`` and its line of documentation."""
    given = shipped()
    for section, kind in typing.get_type_hints(RunConfig).items():
        if not dataclasses.is_dataclass(kind):
            yield section, (f"{section}=text", field_docs(RunConfig)[section])
            continue
        docs = field_docs(typing.cast(type, kind))
        for f in dataclasses.fields(kind):
            key = f"{section}.{f.name}"
            value = given.get(key, f.default_factory() if callable(f.default_factory) else f.default)
            yield key, (f"{key}={_shown(value, given)}", docs[f.name])


def _shown(value: Any, given: dict[str, Any]) -> str:
    """Return a value as it is typed."""
    if isinstance(value, enum.Enum):
        return value.name
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list):
        return f"[{','.join(map(str, value))}]"
    return re.sub(r"\$\{([\w.]+)\}", lambda match: str(given.get(match[1], match[0])), str(value))


def _key_lines(word: str, doc: str, width: int) -> list[str]:
    first = f"  {word:<{width}}  "
    lines = textwrap.wrap(doc, WIDTH - width - 4)
    if len(first) > width + 4:
        return [first.rstrip(), *(" " * (width + 4) + line for line in lines)]
    return [first + lines[0], *(" " * (width + 4) + line for line in lines[1:])]


def _group_lines() -> Iterator[str]:
    for group in groups():
        if group != "hydra":
            line = f"  {group:<12}{' '.join(options(group))}"
            yield from textwrap.wrap(line, WIDTH, subsequent_indent=" " * 14, break_on_hyphens=False)
