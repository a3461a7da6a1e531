"""Write docs/configuration.md from the schema, the YAML files and the tools: python docs/make_tables.py"""

import dataclasses
import enum
import importlib
import re
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf

from graphmoe import conf
from graphmoe.command.words import composed
from graphmoe.config.arguments import field_docs
from graphmoe.config.ranges import OneOf
from graphmoe.config.schema import RunConfig

PAGE = Path(__file__).with_name("configuration.md")
CONF = Path(conf.__path__[0])
TOOLS = {
    "prepare": "PrepareArgs",
    "convert": "ConvertArgs",
    "generate": "GenerateArgs",
    "doctor": "DoctorArgs",
    "bench": "BenchArgs",
    "cache": "CacheArgs",
}

INTRODUCTION = """\
# Configuration

<!-- Written by docs/make_tables.py from graphmoe/config/ and conf/: change those, then run `make docs`. -->

`graphmoe.train` and `graphmoe.info` compose their configuration with [Hydra](https://hydra.cc): they start
from `conf/config.yaml`, take one file of each group below, and put the words of the command line on top. The
result must fit the [schema](../graphmoe/config/schema.py). An unknown key, a wrong type or a value out of
range ends in one error that says what to type instead. The run's folder keeps the outcome in
`resolved.yaml`.

```
python -m graphmoe.train model=deepseek_v2_lite model.num_layers=4 data=synthetic optim.lr=3e-4 train.steps=20
```

`model=...` without a dot chooses a file of `conf/model/`; `model.num_layers=...` with a dot sets one key.
"""

GRAMMAR = """\
## What the shell and Hydra make of a word

| you want | type | why |
|---|---|---|
| a list | `'data.paths=[a.jsonl,b.jsonl]'` | the quotes keep brackets and `*` from the shell |
| a value with a space or comma | `'data.eod_token="a, b"'` | outer quotes for the shell, inner for Hydra |
| no value | `data.tokenizer=null` | `null` stands for none |
| one run for each value | `-m optim.lr=1e-3,3e-3` | a comma outside brackets is a sweep, which needs `-m` |
| options of your own | `--config-dir my_conf model=mine` | takes `my_conf/model/mine.yaml` |
| the model of a folder | `model=DeepSeek-V2-Lite` | its [model, weights and tokenizer](checkpoints.md) |
| another folder for the run | `hydra.run.dir=runs/first` | the default is `outputs/${run.name}` |
| a named run | `experiment=tiny_wsd` | a file of `conf/experiment/` sets keys of groups; or `+experiment=` |

```
python -m graphmoe.train --cfg job                               # print the configuration and stop
python -m graphmoe.train -m optim.lr=1e-3,3e-3 train.steps=20    # two runs, under multirun/
python -m graphmoe.train --help                                  # examples, groups, keys that are set often
python -m graphmoe.train --help=all                              # all keys, with a line each
python -m graphmoe.train model=deepseek_v3 --help                # with the values of that model
graphmoe train --help                                            # the same command, once it is installed
```

## Code of your own

Where a value may be `package.module:NAME`, the module is looked for where Python does, then in the working
folder, then in the folders of `--config-dir`, in which YAML options and modules may lie side by side. Workers
find it there too, and what is no such thing is refused before a run has a folder.
[CONTRIBUTING.md](../CONTRIBUTING.md) shows one of each kind.

```
python -m graphmoe.train --config-dir my_conf optim.schedule=my_schedules:linear    # my_conf/my_schedules.py
```

## Sweeps and output

A sweep puts its runs into `multirun/<run.name>/<time>/<number>`; a signal ends all of it with status 130,
and with `format=json` it prints one list of summaries.

`--train.steps=20`, `--train.steps 20` and `train.steps=20` are one word to every command;
`--data.paths a.jsonl b.jsonl` makes a list, `--data.shuffle` alone says true, and a name without a key is
the preset: `graphmoe info deepseek_v3`. `--version` prints ours and torch's.

The [small tools](#small-tools) take their keys in the same three forms: values are taken as they are, a
comma separates the items of a list, `none` clears an optional value. What a tool is about needs no key:
`graphmoe report outputs/tiny`, `graphmoe trace outputs/tiny`, `graphmoe generate outputs/tiny "def main("`,
`graphmoe convert hf_folder folder`. Every tool takes `format=json` and then prints one JSON document on
stdout and nothing else there.
"""

KEYS = """\
## Keys

*Default* is the schema's. *Shipped* is what a run without arguments has where a file of `conf/` says
otherwise; `${...}` is the value of another key.
"""


def main() -> None:
    """Rewrite the page."""
    PAGE.write_text(render(), encoding="utf-8")


def render() -> str:
    """The whole page."""
    parts = [INTRODUCTION, GRAMMAR, "\n".join(_groups()), KEYS, *_sections(), "\n".join(_tools())]
    return "\n".join(part.strip("\n") + "\n" for part in parts)


def _groups() -> Iterator[str]:
    """A table of each group's options and what they are."""
    yield "## Groups\n"
    yield "| group | option | what it is |"
    yield "|---|---|---|"
    chosen = _chosen_options()
    for group in sorted(path for path in CONF.iterdir() if any(path.glob("*.yaml"))):
        for file in sorted(group.rglob("*.yaml")):
            option = str(file.relative_to(group).with_suffix(""))
            default = " (default)" if chosen.get(group.name) == option else ""
            yield f"| `{group.name}` | `{option}`{default} | {_cell(_opening(file))} |"


def _sections() -> Iterator[str]:
    """A heading, the section's own sentence and a table for each section of the schema."""
    shipped = _shipped()
    hints = typing.get_type_hints(RunConfig)
    top: list[str] = []
    for section in dataclasses.fields(RunConfig):
        cls = hints[section.name]
        if not dataclasses.is_dataclass(cls):
            top += _rows(RunConfig, "", shipped, only=section.name)
            continue
        assert isinstance(cls, type)
        head = [f"### {section.name}", "", f"{cls.__doc__}", "", *_header()]
        yield "\n".join([*head, *_rows(cls, f"{section.name}.", shipped[section.name])])
    yield "\n".join(["### Top level", "", *_header(), *top])


def _tools() -> Iterator[str]:
    """The keys of the tools that do not read a run's configuration."""
    yield "## Small tools"
    for tool, name in TOOLS.items():
        module = importlib.import_module(f"graphmoe.{tool}")
        if hasattr(module, "__path__"):
            module = importlib.import_module(f"graphmoe.{tool}.__main__")
        cls = getattr(module, name)
        yield f"\n### graphmoe.{tool}\n"
        yield f"{str(module.__doc__).splitlines()[0]}\n"
        yield "| key | type | default | what it does |"
        yield "|---|---|---|---|"
        yield from _rows(cls, "", None)


def _header() -> list[str]:
    return ["| key | type | default | shipped | what it does |", "|---|---|---|---|---|"]


def _rows(cls: type, prefix: str, shipped: Any, only: str | None = None) -> Iterator[str]:
    """Table rows of a dataclass's fields; ``shipped`` None leaves that column out."""
    hints, docs = typing.get_type_hints(cls, include_extras=True), field_docs(cls)
    for f in dataclasses.fields(cls):
        if only not in (None, f.name):
            continue
        default = _default(f)
        cells = [f"`{prefix}{f.name.removesuffix('_')}`", _type(hints[f.name]), default]
        if shipped is not None:
            value = _shown(shipped[f.name])
            cells.append("" if value == default else value)
        yield f"| {' | '.join([*cells, _cell(docs[f.name])])} |"


def _default(f: dataclasses.Field[Any]) -> str:
    if f.default_factory is not dataclasses.MISSING:
        return _shown(f.default_factory())
    return "required" if f.default is dataclasses.MISSING else _shown(f.default)


def _shown(value: Any) -> str:
    """A value as it is typed on the command line."""
    if isinstance(value, enum.Enum):
        value = value.name
    if value is None or isinstance(value, bool):
        value = {None: "null", True: "true", False: "false"}[value]
    return f"`{value}`"


def _type(hint: Any) -> str:
    """The type of a field, or its choices."""
    if marks := getattr(hint, "__metadata__", ()):
        names = [f"`{name}`" for mark in marks if isinstance(mark, OneOf) for name in mark.names]
        if any(isinstance(mark, OneOf) for mark in marks):
            return ", ".join([*(names or ["a name"]), "or `package.module:NAME`"])
        return _type(typing.get_args(hint)[0])
    if hint is Any:
        return "as described"
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        options = [option for option in typing.get_args(hint) if option is not type(None)]
        return f"{_type(options[0])} or null"
    if typing.get_origin(hint) is list:
        return f"list of {_type(typing.get_args(hint)[0])}"
    if issubclass(hint, enum.Enum):
        return ", ".join(f"`{choice.name}`" for choice in hint)
    return "path" if hint is Path else str(hint.__name__)


def _shipped() -> dict[str, Any]:
    """The configuration of a run without arguments, interpolations left as they are."""
    plain = OmegaConf.to_container(composed(), resolve=False, enum_to_str=True)
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}


def _chosen_options() -> dict[str, str]:
    """The option of each group that conf/config.yaml names."""
    defaults = yaml.safe_load((CONF / "config.yaml").read_text(encoding="utf-8"))["defaults"]
    return {group: option for entry in defaults if isinstance(entry, dict) for group, option in entry.items()}


def _opening(file: Path) -> str:
    """The first sentence of the comment that a YAML file opens with."""
    words: list[str] = []
    for line in file.read_text(encoding="utf-8").splitlines():
        if not line.startswith("# ") or line.startswith(("#  ", "# @", "# python")):
            if words:
                break
            continue
        words.append(line.removeprefix("# "))
    return re.split(r"(?<=\.)\s", " ".join(words))[0]


def _cell(text: str) -> str:
    """Text whose characters mean themselves in a table."""
    return text.replace("|", "\\|").replace("<", "\\<")


if __name__ == "__main__":
    main()
