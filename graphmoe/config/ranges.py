"""Ranges of the schema's numbers, beside the fields: ``steps: Annotated[int, POSITIVE] = 1000``."""

from __future__ import annotations

import dataclasses
import enum
import functools
import typing
from collections.abc import Callable, Iterator
from typing import Annotated, Any, NamedTuple


class Range(NamedTuple):
    """Numbers that a field may have; infinity and NaN are in no range."""

    wanted: str
    """Completes "must be ..." in an error."""
    holds: Callable[[float], bool]


class AtMost(NamedTuple):
    """Largest value: above any run's, below those that take hours or all memory before a run begins."""

    limit: int


class Mark(enum.Enum):
    """Further facts about the values of a field."""

    fp32 = enum.auto()
    """The device holds the number in fp32."""
    path = enum.auto()
    """A path, or a list of paths."""


POSITIVE = Range("greater than 0", lambda value: value > 0)
NOT_NEGATIVE = Range("0 or greater", lambda value: value >= 0)
BELOW_ONE = Range("at least 0 and below 1", lambda value: 0 <= value < 1)
SHARE = Range("between 0 and 1", lambda value: 0 <= value <= 1)
MANY_RANKS = AtMost(100_000)
MANY_LAYERS = AtMost(2000)  # each is an object of its own
INT32 = AtMost(2**31 - 1)
FP32, PATH = Mark.fp32, Mark.path

Count = Annotated[int, POSITIVE]
CountOrZero = Annotated[int, NOT_NEGATIVE]
Size = Annotated[int, POSITIVE, INT32]
RankCount = Annotated[int, POSITIVE, MANY_RANKS]


class SchemaField(NamedTuple):
    """A field of a section of the configuration, with its value."""

    key: str
    """``section.name``, as on the command line."""
    hint: Any
    """Its type, without ranges."""
    value: Any
    marks: tuple[Any, ...]
    """Range, AtMost and Mark that stand beside it."""


def fields_of(config: Any) -> Iterator[SchemaField]:
    """List the fields of all sections of a configuration."""
    for section in dataclasses.fields(config):
        values = getattr(config, section.name)
        if dataclasses.is_dataclass(values):
            for name, (hint, marks) in _marks(type(values)).items():  # type: ignore[arg-type]
                yield SchemaField(f"{section.name}.{name}", hint, getattr(values, name), marks)


@functools.cache
def _marks(section: type) -> dict[str, tuple[Any, tuple[Any, ...]]]:
    """Type and marks of each field; those of ``RankCount | None`` stand inside the union."""
    hints, marked = typing.get_type_hints(section), typing.get_type_hints(section, include_extras=True)
    kinds = {name: [hint, *typing.get_args(hint)] for name, hint in marked.items()}
    return {
        name: (
            hints[name],
            tuple(mark for kind in kinds[name] for mark in getattr(kind, "__metadata__", ())),
        )
        for name in hints
    }
