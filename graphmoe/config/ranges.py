"""Value ranges annotated on fields, and their checks."""

import ctypes
import dataclasses
import enum
import functools
import math
import os
import re
import typing
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Annotated, Any, NamedTuple


class ConfigError(ValueError):
    """Invalid configuration; the message says what to type instead."""


class Range(NamedTuple):
    """Check of a field's number: finite, and ``holds`` is true."""

    wanted: str  # completes "must be ..."
    holds: Callable[[float], bool]


class AtMost(NamedTuple):
    """Upper limit of a field, beyond any real run: it bounds time and memory at the start."""

    limit: int


class OneOf(NamedTuple):
    """Check of a field's text: a name in a table, or ``package.module:NAME`` for a plug-in."""

    names: tuple[str, ...] = ()  # empty if another rule checks the table


class Mark(enum.Enum):
    fp32 = enum.auto()
    path = enum.auto()


POSITIVE = Range("greater than 0", lambda value: value > 0)
NOT_NEGATIVE = Range("0 or greater", lambda value: value >= 0)
BELOW_ONE = Range("at least 0 and below 1", lambda value: 0 <= value < 1)
SHARE = Range("between 0 and 1", lambda value: 0 <= value <= 1)
MANY_RANKS = AtMost(100_000)
MANY_LAYERS = AtMost(2000)  # each is an object of its own
INT32 = AtMost(2**31 - 1)
FP32, PATH = Mark.fp32, Mark.path
LEAST_FP32, MOST_FP32 = 2.0**-126, (2 - 2.0**-23) * 2.0**127
LARGEST_BELOW_ONE = 1 - 2**-24
NEED_GPU = ("triton", "turbo", "te", "nvshmem", "deepep", "padded_flash", "flash4", "fla")
OWN_CODE = re.compile(r"[\w.]+:\w+")

Count = Annotated[int, POSITIVE]
CountOrZero = Annotated[int, NOT_NEGATIVE]
Size = Annotated[int, POSITIVE, INT32]
RankCount = Annotated[int, POSITIVE, MANY_RANKS]


class SchemaField(NamedTuple):
    key: str  # as on the command line
    hint: Any
    value: Any
    marks: tuple[Any, ...]

    @property
    def items(self) -> Sequence[Any]:
        """Return a list's items, or the value as the only item."""
        return self.value if isinstance(self.value, list) else [self.value]


def fields_of(config: Any) -> Iterator[SchemaField]:
    for section in dataclasses.fields(config):
        values = getattr(config, section.name)
        if dataclasses.is_dataclass(values):
            for name, (hint, marks) in _marks(type(values)).items():  # type: ignore[arg-type]
                yield SchemaField(f"{section.name}.{name}", hint, getattr(values, name), marks)


def field_of(section: type, name: str, key: str, value: Any) -> SchemaField:
    hint, marks = _marks(section)[name]
    return SchemaField(key, hint, value, marks)


def own_code(config: Any) -> Iterator[tuple[str, str]]:
    for field in fields_of(config):
        if any(isinstance(mark, OneOf) for mark in field.marks) and OWN_CODE.fullmatch(field.value):
            yield field.key, field.value
    yield from (("passes.extra", path) for path in config.passes.extra)


def spelled(value: Any) -> str:
    """Return a value as text, as it is typed on a command line."""
    if isinstance(value, enum.Enum):
        return value.name
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return f"[{','.join(map(spelled, value))}]" if isinstance(value, list) else str(value)


def shown_size(num_bytes: float) -> str:
    """Format a size, such as '7.63 MiB'."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:,.2f} {unit}"
    return f"{num_bytes:.0f} B"


def number_of(count: int, noun: str) -> str:
    """Format a count with its noun, such as '3 steps'."""
    plural = re.sub("(?<![aeiou])y$", "ie", noun) + ("es" if noun.endswith(("ch", "s")) else "s")
    return f"{count:,} {noun if count == 1 else plural}"


@functools.cache
def _marks(section: type) -> dict[str, tuple[Any, tuple[Any, ...]]]:
    hints, marked = typing.get_type_hints(section), typing.get_type_hints(section, include_extras=True)
    kinds = {name: [hint, *typing.get_args(hint)] for name, hint in marked.items()}
    # those of RankCount | None are inside the union
    found = {name: [m for kind in kinds[name] for m in getattr(kind, "__metadata__", ())] for name in hints}
    return {name: (hint, tuple(found[name])) for name, hint in hints.items()}


def type_rules(field: SchemaField) -> Iterator[str]:
    """Yield error messages about types and sizes; later rules assume that there are none."""
    key, values = field.key, field.value
    # OmegaConf accepts items of another type than the list's, and texts that are not UTF-8
    if typing.get_origin(field.hint) is list and any(type(v) is not field.hint.__args__[0] for v in values):
        wanted = {int: "whole numbers", str: "texts", float: "numbers"}[field.hint.__args__[0]]
        yield f"{key}={values} must be a list of {wanted}"
    for name in (
        [name for name, value in values.items() if type(value) is not str] if isinstance(values, dict) else ()
    ):
        yield f"{key}.{name} must be a text, without brackets"
    for mark in field.marks:
        names = mark.names if isinstance(mark, OneOf) else ()
        if names and field.value not in names and not OWN_CODE.fullmatch(field.value):
            yield no_such_choice(field.key, field.value, names)
    texts = [*values, *values.values()] if isinstance(values, dict) else field.items
    if any(isinstance(text, str) and re.search("[\ud800-\udfff]", text) for text in texts):
        yield f"{key}={ascii(values)} has half a character (a lone surrogate); write it in UTF-8"
    limit = next((mark.limit for mark in field.marks if isinstance(mark, AtMost)), 2**63 - 1)
    for value in (item for item in field.items if isinstance(item, int)):
        digits = str(value)
        shown = digits if len(digits) < 30 else f"{digits[:10]}...({len(digits)} digits)"
        if not -(2**63) <= value < 2**63:
            yield f"{key}={shown} needs more than 64 bits; use at most {limit}"
        elif value > limit:
            yield f"{key}={shown} is too large; use at most {limit}"


def range_rules(field: SchemaField) -> Iterator[str]:
    """Yield an error message for each number out of range."""
    for mark in field.marks:
        if not isinstance(mark, Range) or field.value is None:
            continue
        if not math.isfinite(field.value):
            yield f"{field.key}={field.value} must be finite and {mark.wanted}"
        elif not mark.holds(field.value):
            yield f"{field.key}={field.value} must be {mark.wanted}"


def no_such_choice(key: str, value: str, names: Iterable[str]) -> str:
    module, dot, name = value.rpartition(".")
    own = f"{module}:{name}" if dot else "package.module:NAME"
    known = ", ".join(f"{name} (on a GPU)" if name in NEED_GPU else name for name in names)
    ours = f"one of {known}, or " if known else ""
    return f"{key}={value}: there is no such choice; use {ours}{own} for code of your own"


def form_rules(field: SchemaField) -> Iterator[str]:
    """Yield error messages about invalid paths, and numbers that fp32 cannot hold."""
    key, value = field.key, field.value
    for path in field.items if PATH in field.marks else ():
        if path and not is_path(path):
            yield f"{key}={ascii(path)[1:-1]} cannot be a file name; use at most 255 bytes between slashes"
    if FP32 not in field.marks or not math.isfinite(value) or value == 0:
        return  # other rules refuse those out of range
    held = ctypes.c_float(value).value
    if not LEAST_FP32 <= abs(held) <= MOST_FP32:
        rounded = "too small for" if abs(held) < LEAST_FP32 else "infinite in"
        yield f"{key}={value} is {rounded} fp32; use a number from {LEAST_FP32:.2g} to {MOST_FP32:.2g}"
    elif any(isinstance(mark, Range) and mark.holds(value) and not mark.holds(held) for mark in field.marks):
        yield f"{key}={value} is {held:.0f} in fp32; use at most {LARGEST_BELOW_ONE:.8f}"


def is_path(text: str) -> bool:
    """Return whether this can be a file name."""
    try:
        parts = os.fsencode(text).split(b"/")
    except UnicodeEncodeError:
        return False
    return "\0" not in text and max(map(len, parts)) < 256 and len(text) < 2048
