"""Parts of the model on a stage, and layout strings.

``Et|(tt|)*6L`` is eight stages: ``E`` embedding, ``t`` layer, ``m`` multi-token-prediction layer, ``L`` loss,
``|`` boundary. ``x*n`` and ``(x)*n`` repeat; commas and spaces are ignored.
"""

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, NoReturn

from graphmoe.config.schema import ConfigError


@dataclass(frozen=True)
class StagePieces:
    """Layers and other parts of one stage; layers are numbered over the whole model."""

    embed: bool
    layers: range
    mtp: range
    loss: bool


def all_pieces(num_layers: int, mtp_depth: int) -> StagePieces:
    return StagePieces(True, range(num_layers), range(mtp_depth), True)


def needs_embedding(stage: StagePieces, *, tied: bool) -> bool:
    """Return whether a stage reads the embedding's weight, which may be a tied head's too."""
    return stage.embed or len(stage.mtp) > 0 or (tied and stage.loss)


def normalises(stage: StagePieces, mtp_depth: int) -> bool:
    """Return whether a stage applies the final norm: the first MTP stage, else the stage of the loss."""
    return stage.mtp.start == 0 and len(stage.mtp) > 0 if mtp_depth else stage.loss


KEY = "pipeline.layout"
MAX_SIGNS = 10_000  # most letters and borders of an expanded layout
_VALID = "E (embedding), t (layer), m (multi-token-prediction layer), L (loss), |, x*n and (x)*n"
_REPEAT = "such as t*3 or (tt|)*3"


def parse_layout(text: str, *, key: str = KEY) -> list[str]:
    """Return the expanded pieces of a layout: ``Et``, ``tt``, ..., ``L``. *Raises* ConfigError."""
    return "".join(sign.char for sign in _checked(_Source(text, key))).split("|")


def pieces_of(
    text: str, num_layers: int, mtp_depth: int, num_stages: int, *, key: str = KEY
) -> tuple[StagePieces, ...]:
    """Return the pieces of each stage. *Raises* ConfigError if the layout does not fit."""
    source = _Source(text, key)
    signs = _checked(source)
    for char, of_model, wanted in (
        ("t", "model.num_layers", num_layers),
        ("m", "model.mtp_depth", mtp_depth),
    ):
        found = [sign for sign in signs if sign.char == char]
        more = wanted - len(found)
        if more:
            at = (found[wanted:] or found[-1:] or signs[-1:])[0].at
            change = f"add {more}" if more > 0 else f"take {-more} away"
            source.fail(at, f"{char} occurs {len(found)} times, but {of_model}={wanted}; {change}")
    pieces = "".join(sign.char for sign in signs).split("|")
    if len(pieces) != num_stages:
        borders = [sign for sign in signs if sign.char == "|"]
        source.fail(
            (borders[num_stages - 1 :] or signs[-1:])[0].at,
            f"{len(pieces)} piece{'s' * (len(pieces) != 1)}, and parallel.pp * pipeline.virtual_stages = "
            f"{num_stages}; use {num_stages - 1} border{'s' * (num_stages != 2)} |, or other numbers of "
            f"ranks or virtual stages",
        )

    def ranges(char: str) -> Iterator[range]:
        ends = itertools.accumulate((piece.count(char) for piece in pieces), initial=0)
        return itertools.starmap(range, itertools.pairwise(ends))

    parts = zip(pieces, ranges("t"), ranges("m"), strict=True)
    return tuple(StagePieces("E" in piece, layers, mtp, "L" in piece) for piece, layers, mtp in parts)


def short_layout(pieces: Sequence[str]) -> str:
    """Return the pieces as a layout with repetitions, the inverse of `parse_layout`."""
    shown = ""
    for each, same in itertools.groupby(pieces):
        count = len([*same])
        piece = re.sub(r"(\w)\1{3,}", lambda run: f"{run[1]}*{len(run[0])}", each)
        shown += min(f"{piece}|" * count, f"({piece}|)*{count}", key=len)
    return shown.removesuffix("|")


class _Sign(NamedTuple):
    char: str
    at: int


class _Source(NamedTuple):
    text: str
    key: str

    def fail(self, at: int, problem: str) -> NoReturn:
        shown = self.text.replace("\n", " ").replace("\t", " ")
        raise ConfigError(f"{self.key}: {problem}\n  {shown}\n  {' ' * at}^")


def _checked(source: _Source) -> list[_Sign]:
    signs = _written_out(source)
    if not signs:
        source.fail(0, "it is empty; write such as 'Ett|ttL'")
    for before, sign, after in zip([None, *signs], signs, [*signs[1:], None], strict=False):
        if sign.char == "|" and "|" in (before.char if before else "|", after.char if after else "|"):
            source.fail(sign.at, "a stage beside this border is empty; write a t, or take the border away")
    letters = [sign for sign in signs if sign.char != "|"]
    kinds = "".join(sign.char for sign in letters)
    if not re.fullmatch("Et*m*L", kinds):
        fitting = re.match("(Et*m*L?)?", kinds)
        assert fitting
        at = letters[min(fitting.end(), len(letters) - 1)].at
        source.fail(at, "the letters are E once, then every t, then every m, then L once; fix the order here")
    return signs


def _written_out(source: _Source) -> list[_Sign]:
    groups: list[list[_Sign]] = [[]]  # open groups, the outermost first
    opened: list[int] = []
    last: list[_Sign] = []  # repeated by a star
    for match in re.finditer(r"\*[\s,]*(\d*)|[^\s,]", source.text, re.ASCII):
        char, at = match[0][0], match.start()
        if char in "EtmL|":
            last = [_Sign(char, at)]
            groups[-1] += last
        elif char == "(":
            groups.append([])
            opened.append(at)
            last = []
        elif char == ")":
            if not opened:
                source.fail(at, "no parenthesis is open here; take this one away")
            last, start = groups.pop(), opened.pop()
            if not last:
                source.fail(start, "nothing is in these parentheses; write such as (tt|)*3")
            groups[-1] += last
        elif char != "*":
            source.fail(at, f"'{char}' is not a letter of a layout; use {_VALID}")
        elif not last:
            source.fail(at, f"there is nothing here to repeat; write {_REPEAT}, and (t*2)*3 for twice")
        elif not match[1].strip("0"):
            source.fail(at, f"a number above 0 must follow the star; write {_REPEAT}")
        else:
            count = int(match[1]) if len(match[1]) < 9 else MAX_SIGNS
            if count * len(last) > MAX_SIGNS:
                source.fail(at, f"more than {MAX_SIGNS} letters; repeat less often")
            groups[-1] += last * (count - 1)
            last = []
        if len(groups[-1]) > MAX_SIGNS:
            source.fail(at, f"more than {MAX_SIGNS} letters; repeat less often")
    if opened:
        source.fail(opened[-1], "this parenthesis is not closed; write ) after what it holds")
    return groups[0]
