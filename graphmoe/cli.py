"""What the small command-line tools share: ``key=value`` arguments, output and errors.

The tools that read a run's whole configuration are Hydra applications (``graphmoe.entry``).
"""

from __future__ import annotations

import dataclasses
import difflib
import enum
import json
import sys
import types
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console, RenderableType

from graphmoe.config import ConfigError, OutputFormat
from graphmoe.field_docs import field_docs

Args = TypeVar("Args")


def run_tool(main: Callable[[list[str]], None], argv: Sequence[str] | None = None) -> None:
    """Run ``main`` on the command line; a known error is one line on stderr and exit status 2."""
    try:
        main(list(sys.argv[1:] if argv is None else argv))
    except (ConfigError, FileNotFoundError, PermissionError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def parse_args(cls: type[Args], argv: Sequence[str], *, prog: str) -> Args:
    """Fill the dataclass from ``key=value`` words; values are taken verbatim.

    Lists are split at commas, ``none`` clears an optional value. ``--help`` prints the keys and ends
    the process. *Raises* ConfigError naming each unknown, malformed or missing key.
    """
    if any(word in ("-h", "--help", "help") for word in argv):
        print(usage(cls, prog))
        sys.exit(0)
    hints = typing.get_type_hints(cls)
    fields = {_key(f.name): f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    problems: list[str] = []
    values: dict[str, Any] = {}
    for word in argv:
        key, equals, text = word.partition("=")
        if not equals:
            problems.append(f"'{word}' is not of the form key=value")
        elif key not in fields:
            problems.append(f"unknown key '{key}'{nearest(key, list(fields))}")
        else:
            try:
                values[fields[key].name] = _convert(text, hints[fields[key].name])
            except ValueError as error:
                problems.append(f"{key}={text}: {error}")
    for key, f in fields.items():
        required = f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
        if required and f.name not in values and not problems:
            problems.append(f"{key}=... is required ({field_docs(cls).get(f.name, '')})")
    if problems:
        raise ConfigError("; ".join(problems) + f"\n{usage(cls, prog)}")
    return cls(**values)


def usage(cls: type, prog: str) -> str:
    """One line for each key of the tool, with its default."""
    docs = field_docs(cls)
    lines = [f"usage: python -m {prog} key=value ..."]
    for f in dataclasses.fields(cls):
        default = f.default if f.default is not dataclasses.MISSING else None
        if isinstance(default, enum.Enum):
            default = default.name
        shown = f"{_key(f.name)}={default}" if default is not None else f"{_key(f.name)}=..."
        lines.append(f"  {shown:<28} {docs.get(f.name, '')}")
    return "\n".join(lines)


def nearest(word: str, choices: Sequence[str]) -> str:
    """'; did you mean ...?', or the list of choices where none is near."""
    close = difflib.get_close_matches(word, choices, n=1, cutoff=0.5)
    if close:
        return f"; did you mean '{close[0]}'?"
    return f"; valid: {', '.join(choices)}"


def emit(document: Any, text: RenderableType, output: OutputFormat) -> None:
    """Print one JSON document, or the text form, on stdout; a string is printed as it is."""
    if output is OutputFormat.json:
        print(json.dumps(document, indent=2))
    elif isinstance(text, str):  # rich would take brackets in generated text for its own markup
        print(text)
    else:
        Console().print(text)


def _key(name: str) -> str:
    """How a field is spelled on the command line: ``from_`` is ``from``, which Python keeps for itself."""
    return name.removesuffix("_")


def _convert(text: str, hint: Any) -> Any:
    """The value that ``text`` spells for a field of type ``hint``."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        options = [option for option in typing.get_args(hint) if option is not type(None)]
        if text.lower() in ("none", "null"):
            return None
        return _convert(text, options[0])
    if typing.get_origin(hint) is list:
        return [_convert(part, typing.get_args(hint)[0]) for part in text.split(",") if part]
    if hint is bool:
        if text.lower() not in ("true", "false"):
            raise ValueError("expected true or false")
        return text.lower() == "true"
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        if text not in hint.__members__:
            raise ValueError(f"expected one of {', '.join(hint.__members__)}")
        return hint[text]
    if hint is Path:
        return Path(text).expanduser()
    return hint(text)
