"""Readers of small untrusted files: nothing is executed, a bad file gives a one-line error.

``kind`` is a dataclass, TypedDict, ``msgspec.Struct`` or a type like ``dict[str, int]``; unknown fields are
ignored.
"""

import json
import math
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, TypeVar

import msgspec
import yaml

from graphmoe.config.ranges import ConfigError

T = TypeVar("T")

LARGEST_BYTES = 1 << 30
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_DEEPEST = 100


class FileError(ConfigError):
    """Error for an invalid file; the message names path, field, found and valid values."""


def open_at_once(path: str, flags: int) -> int:
    """Return a file descriptor, opened without blocking on a FIFO; an ``opener`` for `open`."""
    return os.open(path, flags | os.O_NONBLOCK)


def read_bytes(path: Path, largest_bytes: int = LARGEST_BYTES) -> bytes:
    """Read a regular file; rejects FIFOs and devices without waiting. *Raises* FileError."""
    with open_regular(path, largest_bytes) as file:
        return file.read()


@contextmanager
def open_regular(path: Path, largest_bytes: float = math.inf) -> Iterator[IO[bytes]]:
    """Open a regular file; rejects FIFOs and devices without waiting. *Raises* FileError."""
    try:
        with open(path, "rb", opener=open_at_once) as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise FileError(f"{path} is not a regular file; give a file")
            if found.st_size > largest_bytes:
                raise FileError(f"{path} has {found.st_size:,} bytes; at most {largest_bytes:,} are read")
            yield file
    except (OSError, ValueError) as error:
        if isinstance(error, FileError):
            raise
        why = error.strerror if isinstance(error, OSError) else error
        raise FileError(f"{path} cannot be read ({why})") from error


def read_text(path: Path, largest_bytes: int = LARGEST_BYTES) -> str:
    """Read a regular UTF-8 file. *Raises* FileError."""
    try:
        return read_bytes(path, largest_bytes).decode("utf-8")
    except UnicodeDecodeError as error:
        raise FileError(f"{path} is not UTF-8 text (byte {error.start})") from error


def read_json(path: Path, kind: type[T], largest_bytes: int = LARGEST_BYTES) -> T:
    """Parse a JSON file into ``kind``. *Raises* FileError."""
    return from_json(read_text(path, largest_bytes), kind, str(path))


def read_yaml(path: Path, kind: type[T]) -> T:
    """Parse a YAML file of plain values into ``kind``. *Raises* FileError."""
    return _typed(read_text(path), load_yaml, "YAML", kind, str(path))


def is_file_name(name: str) -> bool:
    """Return whether this is a plain file name, without a path."""
    return name not in ("", ".", "..") and "/" not in name and "\0" not in name


def from_json(text: str, kind: type[T], source: str) -> T:
    """Parse JSON text into ``kind``; ``source`` names it in errors. *Raises* FileError."""
    return _typed(text, json.loads, "JSON", kind, source)


def load_yaml(text: str) -> Any:
    """Parse YAML of plain values. *Raises* YAMLError or ValueError."""
    depth = 0
    for event in yaml.parse(text, _LOADER):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        is_tagged = getattr(event, "tag", None) is not None
        # nested aliases grow exponentially, constructors of tags raise anything, and the C loader crashes at
        # great depth
        if depth > _DEEPEST or is_tagged or isinstance(event, yaml.AliasEvent):
            what = "tags" if is_tagged else "aliases" if depth <= _DEEPEST else f"more than {_DEEPEST} levels"
            line = event.start_mark.line + 1 if event.start_mark else 0
            raise yaml.YAMLError(f"{what} are not supported (line {line})")
    return yaml.load(text, _LOADER)  # a SafeLoader


def _typed(text: str, load: Callable[[str], Any], name: str, kind: type[T], source: str) -> T:
    try:
        found = load(text)
    except (ValueError, yaml.YAMLError, RecursionError) as error:
        why = "nested too deeply" if isinstance(error, RecursionError) else " ".join(str(error).split())
        raise FileError(f"{source} is not {name}: {why}") from error
    return typed(found, kind, source)


def decoded(content: bytes, kind: Any, source: str) -> Any:
    """Parse JSON into ``kind`` without plain values between; ``source`` names it. *Raises* FileError."""
    try:
        return msgspec.json.decode(content, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        what = "" if isinstance(error, msgspec.ValidationError) else "not JSON: "
        raise FileError(f"{source}: {what}{worded(str(error))}") from error


def typed(found: Any, kind: type[T], source: str) -> T:
    """Convert plain values to ``kind``; ``source`` names them in errors. *Raises* FileError."""
    try:
        return msgspec.convert(found, kind)
    except (msgspec.ValidationError, RecursionError) as error:
        raise FileError(f"{source}: {worded(str(error))}") from error


def worded(message: str) -> str:
    """Convert msgspec's 'Expected `str`, got `int` - at `$.a.b`' to 'a.b: expected str, found int'."""
    what, _, place = message.partition(" - at `")
    place = place.rstrip("`").removeprefix("$").removeprefix(".")
    what = what.replace("`", "").replace(", got ", ", found ")
    return f"{place}: {what[:1].lower()}{what[1:]}" if place else f"{what[:1].lower()}{what[1:]}"
