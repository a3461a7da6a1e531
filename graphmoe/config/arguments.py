"""Parser of arguments (``key=value``, ``--key=value``, ``--key value``); output and errors of tools."""

import ast
import dataclasses
import difflib
import enum
import glob
import inspect
import itertools
import json
import math
import os
import platform
import re
import sys
import textwrap
import types
import typing
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from graphmoe.config.choices import OutputFormat
from graphmoe.config.packages import version_of
from graphmoe.config.progress import output_begins, starting
from graphmoe.config.ranges import ConfigError, spelled

Args = TypeVar("Args")

LONGEST_LINE = 1600
NUMBERS = {int: "whole number", float: "number"}
COMMANDS = {
    "train": "train a model; with -m a sweep of runs",
    "info": "parameters, FLOPs per token and memory of a model, without allocating it",
    "project": "whether a run fits its GPUs and how fast it is, from its configuration alone",
    "tune": "the fastest settings of a run on this machine, by short jobs",
    "report": "the page of a run, or one page that compares several",
    "trace": "where the time of recorded steps went",
    "pipeline_view": "numbers and pictures of pipelines, simulated or recorded",
    "generate": "text from a trained run",
    "convert": "weights of the Hugging Face hub in and out",
    "prepare": "text files to files of tokens",
    "bench": "timings of operations, steps and exchanges on this machine",
    "cache": "list, verify or prune the compiled code that runs share",
    "doctor": "this machine: versions, devices, missing packages; prove=FILE checks kernels and graphs",
    "worker": "one rank of a run, for a torchrun of your own",
}
WIDTH, LONG_KEY = 100, 44  # columns of help text; longer keys get their own line
MOST_NAMED = 50  # most keys named in errors
MOST_COMPARED = 10_000  # most folder entries compared with a missing name
UNITS = {f"{prefix}B": 1000**power for power, prefix in enumerate(("", "K", "M", "G", "T"))}
UNITS |= {f"{prefix}iB": 1024**power for power, prefix in enumerate(("K", "M", "G", "T"), start=1)}
_KEY = re.compile(r"[A-Za-z_][\w.]*=")


def run_tool(main: Callable[[list[str]], None], argv: Sequence[str] | None = None) -> None:
    """Run ``main``; known errors print one line and exit with status 2, disk errors with 1."""
    try:
        main(list(sys.argv[1:] if argv is None else argv))
    except ConfigError as error:
        print_error(error)
        sys.exit(2)
    except OSError as error:
        print_error(f"{error.filename}: {error.strerror}" if error.filename else error)
        sys.exit(2 if isinstance(error, (FileNotFoundError, PermissionError)) else 1)


def print_error(error: object) -> None:
    """Print ``error: ...`` on stderr, escaped and shortened."""
    half, short = LONGEST_LINE // 2, list[str]()
    for raw in str(error).split("\n"):
        line = "".join(c if c.isprintable() else repr(c)[1:-1] for c in raw)
        is_long = len(line) > LONGEST_LINE
        short.append(f"{line[:half]}...({len(line)} characters)...{line[-half:]}" if is_long else line)
    print("error:", "\n".join(short), file=sys.stderr)


def parse_args(cls: type[Args], argv: Sequence[str], *, prog: str, places: Sequence[str] = ()) -> Args:
    """Parse arguments into the dataclass; ``--help`` and ``--version`` exit. *Raises* ConfigError.

    Commas split lists, ``none`` clears a value, nested fields have dotted keys; arguments without a key
    are, in order, values of the keys in ``places``.
    """
    if wants_help(argv):
        emit({}, usage(cls, prog, places), OutputFormat.text)
        sys.exit(0)
    answer_version(argv)
    keys = {key.word: key for key in _keys(cls)}
    words, problems = key_value_words(argv, {name: key.hint for name, key in keys.items()}, places)
    values: dict[tuple[str, ...], Any] = {}
    for name, _, text in (word.partition("=") for word in words):
        if name not in keys:
            problems.append(f"unknown key '{name}'{nearest(name, list(keys))}")
        else:
            try:
                values[keys[name].path] = _convert(text, keys[name].hint)
            except ValueError as error:
                problems.append(f"{name}={text}: {error}")
    needed = [key for key in keys.values() if key.default is dataclasses.MISSING and key.path not in values]
    if problems := problems or [f"{key.word}=... is required ({key.doc})" for key in needed]:
        raise ConfigError(f"{'; '.join(problems)} ({typed_as(prog)} --help lists the keys)")
    starting(prog)
    return _filled(cls, values)


def key_value_words(
    argv: Sequence[str],
    hints: Mapping[str, Any],
    places: Sequence[str] = (),
    *,
    as_they_are: re.Pattern[str] = _KEY,
    listed: Callable[[list[str]], str] = ",".join,
) -> tuple[list[str], list[str]]:
    """Return arguments as ``key=value``, and error messages for invalid ones.

    ``hints``: types of the keys; a list takes several arguments, a bool alone means true.
    """
    words, problems, rest, free = list[str](), list[str](), deque(argv), deque(places)

    def take(name: str) -> str:
        if not is_list(hints.get(name)):
            return rest.popleft()
        values = [rest.popleft()]
        while rest and not rest[0].startswith("-") and not as_they_are.match(rest[0]):
            values.append(rest.popleft())
        return listed(values)

    while rest:
        if as_they_are.match(rest[0]):
            words.append(rest.popleft())
        elif free and not rest[0].startswith("-") and rest[0] not in hints:
            name = free.popleft()
            words.append(f"{name}={take(name)}")
        elif rest[0].startswith("--") and (word := rest.popleft()[2:]):
            name, equals, value = word.partition("=")
            name = name.replace("-", "_")
            is_alone = not rest or rest[0].startswith("--")
            if equals:
                words.append(f"{name}={value}")
            elif hints.get(name) is bool and (is_alone or rest[0].lower() not in ("true", "false")):
                words.append(f"{name}=true")
            elif name in hints and is_alone:
                problems.append(f"--{word} needs a value: {name}=...")
            else:
                words.append(f"{name}=" if is_alone else f"{name}={take(name)}")
        else:
            word = rest.popleft()
            known = f"; keys: {', '.join(hints)}" if len(hints) < MOST_NAMED else ""
            problems.append(f"'{word}' is not of the form key=value{known}")
    return words, problems


def is_list(hint: Any) -> bool:
    return any(typing.get_origin(kind) is list for kind in (hint, *typing.get_args(hint)))


def wants_help(argv: Sequence[str]) -> bool:
    return bool({"-h", "--help"} & {*argv}) or list(argv[:1]) == ["help"]


def answer_version(argv: Sequence[str]) -> None:
    if "--version" in argv:
        torch, python = version_of("torch") or "missing", platform.python_version()
        print(f"graphmoe {sys.modules['graphmoe'].__version__} (torch {torch}, Python {python})")
        sys.exit(0)


def typed_as(prog: str) -> str:
    """Return the command as the user typed it, with ``python -m`` or without."""
    is_console = Path(sys.argv[0]).name == "graphmoe" or sys.argv[0].endswith("graphmoe/__main__.py")
    return prog.replace(".", " ", 1) if is_console else f"python -m {prog}"


def usage(cls: type, prog: str, places: Sequence[str] = ()) -> str:
    keys = {key.word: key for key in _keys(cls)}
    shown = "".join(f" [{name}{' ...' if is_list(keys[name].hint) else ''}]" for name in places)
    lines = [f"usage: {typed_as(prog)}{shown} key=value ..."]
    if title := COMMANDS.get(prog.partition(".")[2]):
        lines += [title, "Keys, each as key=value, --key=value or --key value:"]
    rows = []
    for word, key in keys.items():
        is_set = key.default not in (None, dataclasses.MISSING, [])
        shown = ",".join(map(spelled, key.default if isinstance(key.default, list) else [key.default]))
        rows.append((f"{word}={shown if is_set else '...'}", key.doc))
    return "\n".join([*lines, *key_lines(rows)])


def key_lines(rows: Sequence[tuple[str, str]]) -> Iterator[str]:
    width = max(len(word) for word, _ in rows if len(word) < LONG_KEY)
    for word, doc in rows:
        lines = textwrap.wrap(doc, WIDTH - width - 4) or [""]
        yield f"  {word}" if len(word) > width else f"  {word:<{width}}  {lines.pop(0)}"
        yield from (" " * (width + 4) + line for line in lines)


def nearest(word: str, choices: Sequence[str]) -> str:
    """Return '; did you mean ...?', or the list of choices."""
    close = difflib.get_close_matches(word, choices, n=1, cutoff=0.5)
    if close:
        return f"; did you mean '{close[0]}'?"
    return f"; valid: {', '.join(choices)}"


def near_path(path: str | Path) -> str:
    """Return '; did you mean ...?' if a missing path has a similar sibling, else ''."""
    parts = Path(os.path.expanduser(path)).parts
    if not parts or os.path.exists(Path(*parts)) or glob.glob(str(Path(*parts)), recursive=True):
        return ""
    found = Path(parts[0]) if os.path.isabs(parts[0]) else Path()
    for index, part in enumerate(parts):
        if glob.has_magic(part):
            found = found.joinpath(*parts[index:])
            break
        if not os.path.exists(found / part):
            try:
                names = [entry.name for entry in itertools.islice(os.scandir(found), MOST_COMPARED)]
            except OSError:
                return ""
            close = difflib.get_close_matches(part, names, n=1, cutoff=0.7)
            part = close[0] if close else part
        found /= part
    return f"; did you mean {found}?" if glob.glob(str(found), recursive=True) else ""


def parse_size(key: str, text: str, *, least: int = 0) -> int:
    """Parse '20GB', '1.5GiB' or '0' to bytes. *Raises* ConfigError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip().lower())
    scale = {unit.lower(): size for unit, size in UNITS.items()}.get(match[2]) if match else None
    size = float(match[1]) * (scale or 1) if match else -1
    if match is None or not least <= size < math.inf or (scale is None and (match[2] or size)):
        units = ", ".join(UNITS)
        raise ConfigError(f"{key}={text} is not a size; use a number with one of {units}, e.g. {key}=20GB")
    return math.floor(size)


def file_problems(key: str, path: Path | None, example: str) -> Iterator[str]:
    """Yield error messages about an output path; ``example`` has the required suffix."""
    if path is None:
        return
    suffix = Path(example).suffix
    if path.is_dir():
        yield f"{key}={path} is a folder; name a file, such as {key}={path / example}"
    elif path.suffix.lower() != suffix:
        yield f"{key}={path} must end in {suffix}; use {key}={path.with_suffix(suffix)}"
    if not path.parent.is_dir():
        yield f"{key}={path}: there is no folder {path.parent}; make it, or name another file"


def emit(document: Any, text: RenderableType, output: OutputFormat, end: str = "\n") -> None:
    """Print the document as JSON, or ``text``, on stdout."""
    output_begins()
    try:
        if output is OutputFormat.json:
            print(json.dumps(document, indent=2), flush=True)
        elif isinstance(text, str):  # rich would take brackets in generated text for its own markup
            print(text, flush=True, end=end)
        else:
            console = Console()
            with console.capture() as captured:  # rich itself would end the process at a closed pipe
                console.print(text, crop=False)  # a command to copy is a line, however long
            print(captured.get(), end="", flush=True)
    # as for head: a reader may close the pipe early
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what Python flushes at its end


def text_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[str | Text]],
    *,
    names: Container[int] = (0,),
    styles: Sequence[str | None] = (),
    **options: Any,
) -> Table:
    """Build a terminal table; columns in ``names`` may wrap, others are numbers; ``options`` are rich's."""
    table = Table(**{"box": None, "pad_edge": False, "header_style": "bold", **options})
    for place, column in enumerate(columns):
        is_name = place in names
        table.add_column(column, justify="left" if is_name else "right", no_wrap=not is_name, overflow="fold")
    for row, style in itertools.zip_longest(rows, styles):
        table.add_row(*(cell if isinstance(cell, Text) else Text(cell) for cell in row), style=style)
    return table


@dataclass(frozen=True)
class _Key:
    word: str
    path: tuple[str, ...]
    hint: Any
    doc: str
    default: Any


def _keys(cls: type, outer: tuple[str, ...] = ()) -> Iterator[_Key]:
    hints, docs = typing.get_type_hints(cls), field_docs(cls)
    for f in dataclasses.fields(cls):
        path = (*outer, f.name)
        if dataclasses.is_dataclass(hints[f.name]):
            yield from _keys(hints[f.name], path)
            continue
        # from_ is spelled from, which Python keeps for itself
        word = ".".join(name.removesuffix("_") for name in path)
        default = f.default_factory() if callable(f.default_factory) else f.default
        yield _Key(word, path, hints[f.name], docs.get(f.name, ""), default)


def field_docs(cls: type) -> dict[str, str]:
    """Return each field's docstring on one line."""
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    assert isinstance(body, ast.ClassDef)
    docs: dict[str, str] = {}
    name: str | None = None
    for node in body.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            name = node.target.id
        elif name and isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            docs[name] = " ".join(str(node.value.value).split())
            name = None
    return docs


def _filled(cls: type[Args], values: Mapping[tuple[str, ...], Any], outer: tuple[str, ...] = ()) -> Args:
    given: dict[str, Any] = {}
    for name, hint in typing.get_type_hints(cls).items():
        path = (*outer, name)
        if dataclasses.is_dataclass(hint):
            given[name] = _filled(typing.cast(type, hint), values, path)
        elif path in values:
            given[name] = values[path]
    return cls(**given)


def _convert(text: str, hint: Any) -> Any:
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
    try:
        return hint(text)
    except ValueError:
        raise ValueError(f"expected a {NUMBERS[hint]}") from None
