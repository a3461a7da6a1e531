"""Rules that a value keeps by itself: its type, its range beside the field, its form on disk and in fp32."""

from __future__ import annotations

import ctypes
import math
import re
import typing
from collections.abc import Iterator, Sequence
from typing import Any

from graphmoe.config.ranges import FP32, PATH, AtMost, Range, SchemaField
from graphmoe.config.schema import is_path

LEAST_FP32, MOST_FP32 = 2.0**-126, (2 - 2.0**-23) * 2.0**127
LARGEST_BELOW_ONE = 1 - 2**-24


def type_rules(field: SchemaField) -> Iterator[str]:
    """Name values with which other rules cannot compute."""
    yield from _item_rules(field)
    yield from _integer_rules(field)


def form_rules(field: SchemaField) -> Iterator[str]:
    """Name paths that no file can have, and numbers that fp32 does not have."""
    yield from _path_rules(field)
    yield from _fp32_rules(field)


def _item_rules(field: SchemaField) -> Iterator[str]:
    """Refuse items of another type than their list's, and texts that are not UTF-8: OmegaConf takes both."""
    key, values = field.key, field.value
    if typing.get_origin(field.hint) is list and any(type(v) is not field.hint.__args__[0] for v in values):
        wanted = {int: "whole numbers", str: "texts"}[field.hint.__args__[0]]
        yield f"{key}={values} must be a list of {wanted}"
    texts = [*values, *values.values()] if isinstance(values, dict) else _items(values)
    if any(isinstance(text, str) and re.search("[\ud800-\udfff]", text) for text in texts):
        yield f"{key}={ascii(values)} has half a character; write it in UTF-8"


def _integer_rules(field: SchemaField) -> Iterator[str]:
    """Refuse integers of more than 64 bits, and those above the limit that stands beside the field."""
    limit = next((mark.limit for mark in field.marks if isinstance(mark, AtMost)), 2**63 - 1)
    for value in _items(field.value):
        if not isinstance(value, int):
            continue
        digits = str(value)
        shown = digits if len(digits) < 30 else f"{digits[:10]}...({len(digits)} digits)"
        if not -(2**63) <= value < 2**63:
            yield f"{field.key}={shown} needs more than 64 bits; use at most {limit}"
        elif value > limit:
            yield f"{field.key}={shown} is too large; use at most {limit}"


def range_rules(field: SchemaField) -> Iterator[str]:
    """Refuse numbers out of their range; infinity and NaN are out of every range."""
    for mark in field.marks:
        if not isinstance(mark, Range) or field.value is None:
            continue
        if not math.isfinite(field.value):
            yield f"{field.key}={field.value} must be finite and {mark.wanted}"
        elif not mark.holds(field.value):
            yield f"{field.key}={field.value} must be {mark.wanted}"


def _fp32_rules(field: SchemaField) -> Iterator[str]:
    """Refuse numbers that become 0, infinite or 1 in fp32; other rules refuse those out of range."""
    key, value = field.key, field.value
    if FP32 not in field.marks or not math.isfinite(value) or value == 0:
        return
    held = ctypes.c_float(value).value
    if not LEAST_FP32 <= abs(held) <= MOST_FP32:
        rounded = "too small for" if abs(held) < LEAST_FP32 else "infinite in"
        yield f"{key}={value} is {rounded} fp32; use a number from {LEAST_FP32:.2g} to {MOST_FP32:.2g}"
    elif any(isinstance(mark, Range) and mark.holds(value) and not mark.holds(held) for mark in field.marks):
        yield f"{key}={value} is {held:.0f} in fp32; use at most {LARGEST_BELOW_ONE:.8f}"


def _path_rules(field: SchemaField) -> Iterator[str]:
    """Refuse paths that no file can have."""
    for path in _items(field.value) if PATH in field.marks else ():
        if path and not is_path(path):
            yield f"{field.key}={ascii(path)[1:-1]} can name no file; use at most 255 bytes between slashes"


def _items(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list) else [value]
