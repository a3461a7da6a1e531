"""Share of a model that a stage of a pipeline has, and layout strings, which list the layers of each.

``Et|(tt|)*6L`` is eight pieces: ``E`` the embedding, ``t`` a transformer layer, ``m`` a
multi-token-prediction layer, ``L`` the loss (final norm, head and loss), ``|`` the border of two stages.
``x*n`` and ``(x)*n`` repeat; commas and spaces are ignored. The n-th piece is stage n.
"""

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, NoReturn

from graphmoe.config.schema import ConfigError


@dataclass(frozen=True)
class StagePieces:
    """Pieces of the model that one stage has; layers are numbered over the whole model."""

    embed: bool
    layers: range
    mtp: range
    loss: bool


def all_pieces(num_layers: int, mtp_depth: int) -> StagePieces:
    """Return the pieces of the one stage of a model that is not cut."""
    return StagePieces(True, range(num_layers), range(mtp_depth), True)


def needs_embedding(stage: StagePieces, *, tied: bool) -> bool:
    """Return True where a stage reads the embedding's weight, which is also the weight of a tied head."""
    return stage.embed or len(stage.mtp) > 0 or (tied and stage.loss)


def normalises(stage: StagePieces, mtp_depth: int) -> bool:
    """Return True for the stage that applies the final norm.

    It is the first stage that predicts later tokens; in a model without such layers, the stage of the loss.
    """
    return stage.mtp.start == 0 and len(stage.mtp) > 0 if mtp_depth else stage.loss


KEY = "pipeline.layout"
MAX_SIGNS = 10_000
"""Letters and borders that a layout may have once it is written out."""
MAX_GROUPS = 200
"""Parentheses that a layout may have, nested or not."""
_LETTERS = "EtmL"
_VALID = "E (embedding), t (layer), m (multi-token-prediction layer), L (loss), |, x*n and (x)*n"


def parse_layout(text: str, *, key: str = KEY) -> list[str]:
    """Return the pieces of a layout, written out: ``Et``, ``tt``, ..., ``L``.

    *Raises* ConfigError, which points at the character, for a string that is no layout of any model. The
    error names the string by ``key``.
    """
    return _written(_pieces(_Source(text, key)))


def pieces_of(
    text: str, num_layers: int, mtp_depth: int, num_stages: int, *, key: str = KEY
) -> tuple[StagePieces, ...]:
    """Return the pieces of each stage. *Raises* ConfigError where the layout does not fit model or stages."""
    source = _Source(text, key)
    pieces = _pieces(source)
    _check_count(source, pieces, "t", "model.num_layers", num_layers)
    _check_count(source, pieces, "m", "model.mtp_depth", mtp_depth)
    if len(pieces) != num_stages:
        at = pieces[num_stages][0].at if len(pieces) > num_stages else pieces[-1][-1].at
        source.fail(
            at,
            f"{_counted(len(pieces), 'piece')}, and parallel.pp * pipeline.virtual_stages = {num_stages}; "
            f"use {_counted(num_stages - 1, 'border')} |, or other numbers of ranks or virtual stages",
        )
    return _numbered(_written(pieces))


def short_layout(pieces: Sequence[str]) -> str:
    """Write the pieces as a layout with repetitions, from which `parse_layout` makes the same pieces."""
    shown = ""
    for each, same in itertools.groupby(pieces):
        count = len([*same])
        piece = re.sub(r"(\w)\1{3,}", lambda run: f"{run[1]}*{len(run[0])}", each)
        shown += min(f"{piece}|" * count, f"({piece}|)*{count}", key=len)
    return shown.removesuffix("|")


class _Sign(NamedTuple):
    """A letter or border of the layout written out, and its place in the string."""

    char: str
    at: int


@dataclass(frozen=True)
class _Source:
    text: str
    key: str

    def fail(self, at: int, problem: str) -> NoReturn:
        """Raise ConfigError with the string and a caret below the character at ``at``."""
        shown = self.text.replace("\n", " ").replace("\t", " ")
        raise ConfigError(f"{self.key}: {problem}\n  {shown}\n  {' ' * at}^")


def _written(pieces: list[list[_Sign]]) -> list[str]:
    return ["".join(sign.char for sign in piece) for piece in pieces]


def _pieces(source: _Source) -> list[list[_Sign]]:
    """Return the letters between borders. *Raises* ConfigError unless E is first, L last, m after every t."""
    signs = _Parser(source).signs()
    pieces: list[list[_Sign]] = [[]]
    for sign in signs:
        if sign.char != "|":
            pieces[-1].append(sign)
        elif pieces[-1]:
            pieces.append([])
        else:
            source.fail(sign.at, "the stage before this border is empty; write a t, or take the border away")
    if not signs:
        source.fail(0, "it is empty; write such as 'Ett|ttL'")
    if not pieces[-1]:
        source.fail(signs[-1].at, "the stage after this border is empty; end with L, or take the border away")
    _check_order(source, [sign for piece in pieces for sign in piece])
    return pieces


def _check_order(source: _Source, letters: list[_Sign]) -> None:
    """Raise ConfigError unless the letters are E, every t, every m, L."""
    for char, place, index, what in (("E", "first", 0, "embedding"), ("L", "last", -1, "loss")):
        found = [sign for sign in letters if sign.char == char]
        if not found:
            source.fail(letters[index].at, f"{char}, the {what}, is missing; write it {place}")
        if len(found) > 1:
            again = found[1] if char == "E" else found[0]
            source.fail(again.at, f"{char}, the {what}, is there {len(found)} times; write it once, {place}")
        if letters[index].char != char:
            source.fail(found[0].at, f"{char}, the {what}, must be the {place} letter; move it there")
    last_layer = max((i for i, sign in enumerate(letters) if sign.char == "t"), default=0)
    early = next((sign for sign in letters[:last_layer] if sign.char == "m"), None)
    if early:
        source.fail(early.at, "m, a multi-token-prediction layer, must come after the last t; move it there")


def _check_count(source: _Source, pieces: list[list[_Sign]], char: str, key: str, wanted: int) -> None:
    letters = [sign for piece in pieces for sign in piece]
    found = [sign for sign in letters if sign.char == char]
    if len(found) == wanted:
        return
    if len(found) > wanted:
        at, change = found[wanted].at, f"take {len(found) - wanted} away"
    else:
        at, change = (found or letters)[-1].at, f"add {wanted - len(found)}"
    source.fail(at, f"{char} is there {_counted(len(found), 'time')}, and {key}={wanted}; {change}")


def _numbered(pieces: list[str]) -> tuple[StagePieces, ...]:
    def ranges(char: str) -> Iterator[range]:
        ends = itertools.accumulate((piece.count(char) for piece in pieces), initial=0)
        return itertools.starmap(range, itertools.pairwise(ends))

    parts = zip(pieces, ranges("t"), ranges("m"), strict=True)
    return tuple(StagePieces("E" in piece, layers, mtp, "L" in piece) for piece, layers, mtp in parts)


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


class _Parser:
    """Parser of a layout from left to right, which skips commas and spaces."""

    def __init__(self, source: _Source) -> None:
        self.source = source
        self.chars = [_Sign(char, at) for at, char in enumerate(source.text) if char not in ", \t\n"]
        self.next = 0

    def signs(self) -> list[_Sign]:
        """Return every letter and border, written out."""
        opened = [sign for sign in self.chars if sign.char == "("]
        if len(opened) > MAX_GROUPS:
            self.source.fail(opened[MAX_GROUPS].at, f"more than {MAX_GROUPS} parentheses; use fewer")
        found = self._group()
        if self.next < len(self.chars):
            self.source.fail(self.chars[self.next].at, "no parenthesis is open here; take this one away")
        return found

    def _group(self) -> list[_Sign]:
        """Return letters and borders up to the end, or up to the parenthesis that closes the open one."""
        found: list[_Sign] = []
        while (char := self._peek()) not in ("", ")"):
            item = self._item(char)
            count = self._count(item) if self._peek() == "*" else 1
            if len(found) + len(item) * count > MAX_SIGNS:
                self.source.fail(
                    self.chars[self.next - 1].at, f"more than {MAX_SIGNS} letters; repeat less often"
                )
            found += item * count
        return found

    def _item(self, char: str) -> list[_Sign]:
        sign = self.chars[self.next]
        self.next += 1
        if char == "|" or char in _LETTERS:
            return [sign]
        if char == "(":
            inner = self._group()
            if self._peek() != ")":
                self.source.fail(sign.at, "this parenthesis is not closed; write ) after what it holds")
            self.next += 1
            if not inner:
                self.source.fail(sign.at, "nothing is in these parentheses; write such as (tt|)*3")
            return inner
        if char == "*":
            self.source.fail(sign.at, "there is nothing here to repeat; write such as t*3 or (tt|)*3")
        self.source.fail(sign.at, f"'{char}' is no letter of a layout; use {_VALID}")

    def _count(self, item: list[_Sign]) -> int:
        star = self.chars[self.next]
        self.next += 1
        what = f"{item[0].char}*3" if len(item) == 1 else "(...)*3"
        digits, at = "", star.at
        while "0" <= self._peek() <= "9":
            sign = self.chars[self.next]
            if digits and sign.at != at + 1:
                self.source.fail(sign.at, f"a space splits this number; write such as {what}")
            digits, at = digits + sign.char, sign.at
            self.next += 1
        if not digits and self._peek() == "-":
            self.source.fail(self.chars[self.next].at, f"the number must be above 0; write such as {what}")
        if not digits:
            self.source.fail(star.at, f"a number must follow the star; write such as {what}")
        if not digits.strip("0"):
            self.source.fail(at, f"the number must be above 0; write such as {what}")
        if self._peek() == "*":
            self.source.fail(self.chars[self.next].at, "to repeat a repetition, use parentheses: (t*2)*3")
        return int(digits[-9:]) if not digits[:-9].strip("0") else MAX_SIGNS + 1

    def _peek(self) -> str:
        return self.chars[self.next].char if self.next < len(self.chars) else ""
