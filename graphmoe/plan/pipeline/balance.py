"""Layouts that balance a pipeline, by estimated or measured times of the model's parts."""

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from graphmoe.config.schema import ConfigError, ModelConfig
from graphmoe.plan.costs.activations import DENSE_SEGMENTS, MOE_SEGMENTS
from graphmoe.plan.costs.segment_times import modelled_parts
from graphmoe.plan.experts import is_moe
from graphmoe.plan.pipeline.layouts import short_layout

Borders = list[int]  # boundaries of stages among a model's parts, from 0 to their number
Key = tuple[float, ...]  # rounded costs: sums in another order are equal
MOST_TRIED = 20_000  # layouts enumerated exhaustively, in 0.3 s; beyond that, only neighbours of a good one


def default_layout(model: ModelConfig, seq_len: int, rank_of: tuple[int, ...]) -> str:
    """Return the layout that balances ranks by estimated times of parts. ``rank_of``: rank of each stage."""
    return balanced_layout(tuple((part.name, part.total) for part in modelled_parts(model, seq_len)), rank_of)


@functools.lru_cache(maxsize=1024)  # schedules may place stages alike; the largest layout takes a second
def balanced_layout(costs: tuple[tuple[str, float], ...], rank_of: tuple[int, ...]) -> str:
    """Return the layout of non-empty stages that minimizes the busiest rank's time. *Raises* ConfigError.

    ``costs``: letter and cost of each part. Ties: least largest stage, sum of squares, lighter stages first.
    """
    num_stages = len(rank_of)
    if not 1 <= num_stages <= len(costs):
        raise ConfigError(
            f"parallel.pp * pipeline.virtual_stages = {num_stages}, and the model has {len(costs)} parts "
            f"({short_layout([''.join(letter for letter, _ in costs)])}), of which each stage needs one; use "
            f"1 to {len(costs)} stages"
        )
    total = sum(cost for _, cost in costs) or 1.0
    sums = [0.0, *itertools.accumulate(cost / total for _, cost in costs)]
    borders = _even_stages(sums, num_stages)
    # with several stages a rank and more than MOST_TRIED layouts, a local search moves borders
    if len(set(rank_of)) < num_stages:
        borders = _even_ranks(sums, rank_of, borders)
    letters = "".join(letter for letter, _ in costs)
    return short_layout([letters[start:end] for start, end in itertools.pairwise(borders)])


def _even_stages(sums: Sequence[float], num_stages: int) -> Borders:
    largest, _ = _cheapest(sums, num_stages, max)

    def evenness(before: float, stage: float) -> float:
        return before + stage * stage if stage <= largest + 1e-12 else math.inf

    return _cheapest(sums, num_stages, evenness)[1]


def _cheapest(
    sums: Sequence[float], num_stages: int, join: Callable[[float, float], float]
) -> tuple[float, Borders]:
    # sums[i] is the cost of the first i parts; join adds a stage to the joint cost of those before it
    num_parts = len(sums) - 1
    table: dict[int, tuple[float, int]] = {0: (0.0, 0)}
    starts: list[dict[int, int]] = []
    for stage in range(1, num_stages + 1):
        after: dict[int, tuple[float, int]] = {}
        for end in range(stage, num_parts - (num_stages - stage) + 1):
            after[end] = min(
                (join(table[start][0], sums[end] - sums[start]), start) for start in table if start < end
            )
        starts.append({end: start for end, (_, start) in after.items()})
        table = after
    borders = [num_parts]
    for by_end in reversed(starts):
        borders.append(by_end[borders[-1]])
    return table[num_parts][0], borders[::-1]


def _even_ranks(sums: Sequence[float], rank_of: Sequence[int], borders: Borders) -> Borders:
    num_parts, num_stages = len(sums) - 1, len(rank_of)

    def costs(of: Borders) -> tuple[list[float], list[float]]:
        stages = [sums[end] - sums[start] for start, end in itertools.pairwise(of)]
        ranks = [0.0] * num_stages
        for rank, cost in zip(rank_of, stages, strict=True):
            ranks[rank] += cost
        return stages, ranks

    def by_rank(of: Borders) -> Key:
        _, ranks = costs(of)
        return _rounded(max(ranks), _squares(ranks))

    def by_stage(of: Borders) -> Key:
        stages, ranks = costs(of)
        return _rounded(max(ranks), max(stages), _squares(stages))

    if math.comb(num_parts - 1, num_stages - 1) <= MOST_TRIED:
        inner = itertools.combinations(range(1, num_parts), num_stages - 1)
        return min(([0, *places, num_parts] for places in inner), key=by_stage)
    return _descend(_descend(borders, by_rank), by_stage)


def _descend(borders: Borders, key: Callable[[Borders], Key]) -> Borders:
    here = key(borders)
    while True:
        best, found = min(((key(other), other) for other in _neighbours(borders)), default=(here, borders))
        if best >= here:
            return borders
        here, borders = best, found


def _neighbours(borders: Borders) -> Iterator[Borders]:
    inner = range(1, len(borders) - 1)
    for first, last in itertools.combinations_with_replacement(inner, 2):
        for step in (-1, 1):
            moved = [place + step for place in borders[first : last + 1]]
            if borders[first - 1] < moved[0] and moved[-1] < borders[last + 1]:
                yield [*borders[:first], *moved, *borders[last + 1 :]]


def _rounded(*costs: float) -> Key:
    return tuple(round(cost, 12) for cost in costs)


def _squares(costs: Iterable[float]) -> float:
    return sum(cost * cost for cost in costs)


# parts that may have one time each, and the segments that each sums
KINDS = {
    "embed": ("embed",),
    "dense": DENSE_SEGMENTS,
    "moe": MOE_SEGMENTS,
    "mtp": ("mtp",),
    "loss": ("loss",),
}


def measured_parts(model: ModelConfig, measured_ms: Mapping[str, float]) -> list[tuple[str, float]]:
    """Return letter and milliseconds of each part, forward plus backward. *Raises* ConfigError.

    Names are `KINDS`, segments, or ranges of segments (``attn..moe_combine``). The embedding may be left out.
    """
    for name, ms in measured_ms.items():
        if not any(_pieces_in(name, kind) for kind in KINDS):
            raise ConfigError(
                f"'{name}' is not a part with a time; use {', '.join(KINDS)}, a segment of a "
                f"layer such as attn, or a unit of neighbouring segments such as attn..moe_combine"
            )
        if not 0 <= ms < math.inf:
            raise ConfigError(f"the time of '{name}' is {ms} ms; it must be 0 or greater")
    layers = ["moe" if is_moe(model, i) else "dense" for i in range(model.num_layers)]
    kinds = ["dense"] * ("dense" in layers)
    kinds += ["moe"] * ("moe" in layers or (model.mtp_depth > 0 and "mtp" not in measured_ms))
    kinds += ["mtp"] * (model.mtp_depth > 0 and "mtp" in measured_ms) + ["loss"]
    read = {"embed"}
    ms_of = {kind: _kind_ms(kind, model, measured_ms, read) for kind in kinds}
    if unread := [name for name in measured_ms if name not in read]:
        raise ConfigError(
            f"{', '.join(unread)}: the model has no such part, or its time is given as a whole; leave it out"
        )
    return [
        ("E", measured_ms.get("embed", 0.0)),
        *(("t", ms_of[kind]) for kind in layers),
        *[("m", ms_of.get("mtp", ms_of.get("moe", 0.0)))] * model.mtp_depth,
        ("L", ms_of["loss"]),
    ]


def _pieces_in(name: str, kind: str) -> Sequence[str]:
    pieces = KINDS[kind]
    first, _, last = name.partition("..")
    if name == kind:
        return pieces
    if not {first, last or first} <= {*pieces}:
        return ()
    return pieces[pieces.index(first) : pieces.index(last or first) + 1]


def _kind_ms(kind: str, model: ModelConfig, measured_ms: Mapping[str, float], read: set[str]) -> float:
    wanted = [piece for piece in KINDS[kind] if piece != "shared_experts" or model.shared_ffn_size]
    found: dict[str, str] = {}
    for name in [kind] if kind in measured_ms else measured_ms:
        for piece in _pieces_in(name, kind):
            if piece in found:
                raise ConfigError(
                    f"'{found[piece]}' and '{name}' both have the time of {piece}; leave one out"
                )
            if piece in wanted:
                found[piece] = name
    if missing := [piece for piece in wanted if piece not in found]:
        raise ConfigError(
            f"no time for {', '.join(missing)}; give the time of each, of a range of segments such as "
            f"attn..moe_combine, or of {kind} as a whole"
        )
    read.update(found.values())
    return sum(measured_ms[name] for name in dict.fromkeys(found.values()))
