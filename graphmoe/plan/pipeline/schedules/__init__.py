"""Schedules by name; to add one, add a file and an entry of `SCHEDULES`."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from graphmoe.config.choices import look_up
from graphmoe.config.schema import ConfigError
from graphmoe.plan.pipeline import Placement, Table
from graphmoe.plan.pipeline.check import TableError, check
from graphmoe.plan.pipeline.schedules.one_f_one_b import one_forward_one_backward, zb1p
from graphmoe.plan.pipeline.schedules.paired import dualpipe_v, zb1p_in_pairs
from graphmoe.plan.pipeline.schedules.v_shaped import folded
from graphmoe.plan.pipeline.simulate import Costs

# arguments: numbers of ranks, micro-batches and virtual stages; on a V also ``costs``
Build = Callable[..., Table]


@dataclass(frozen=True)
class Schedule:
    build: Build
    description: str
    virtual_stages: tuple[int, int | None] = (1, 1)
    """Least and most stages per rank; None: any number."""
    splits_backward: bool = False
    """True if tables have dgrad (I) and wgrad (W) instead of B."""
    is_folded: bool = False
    """True if stages are placed on a V and tables depend on costs; otherwise round-robin."""
    build_overlapped: Build | None = None
    """Builder of the table with overlapped forwards and backwards, if any."""
    keeps_all: bool = False
    """True if ranks save activations of all micro-batches; a search skips such schedules."""


def _in_turns(name: str, description: str, virtual_stages: tuple[int, int | None]) -> Schedule:
    build = partial(one_forward_one_backward, name)
    return Schedule(build, description, virtual_stages, build_overlapped=partial(build, overlap=True))


def _on_a_v(description: str, build: Build, paired: Build | None = None) -> Schedule:
    return Schedule(build, description, (2, 2), splits_backward=True, is_folded=True, build_overlapped=paired)


PAIRED = partial(dualpipe_v, "dualpipe_v")
SCHEDULES = {
    "gpipe": Schedule(
        partial(one_forward_one_backward, "gpipe", forwards_first=True),
        "all forwards, then all backwards",
        keeps_all=True,
    ),
    "1f1b": _in_turns("1f1b", "a forward and a backward in turns", (1, 1)),
    "interleaved": _in_turns(
        "interleaved",
        "1f1b on several stages of each rank: less bubble, more messages and activations",
        (2, None),
    ),
    "zb1p": Schedule(
        zb1p,
        "1f1b with weight gradients where ranks would wait: a third of the bubble",
        splits_backward=True,
        build_overlapped=zb1p_in_pairs,
    ),
    # With F = I = W and no fewer micro-batches than ranks, the last rank only waits for its first forward.
    "zbv": _on_a_v(
        "two stages on each rank, there and back: least bubble, with the activations of 1f1b",
        partial(folded, "zbv", lambda num_ranks: 2 * num_ranks),
        partial(dualpipe_v, "zbv"),
    ),
    "dualpipe_v": _on_a_v(
        "zbv in pairs of a forward and another micro-batch's backward, with pipeline.ep_overlap or without",
        PAIRED,
        PAIRED,
    ),
    "v_half": _on_a_v(
        "zbv with half of the activations and some bubble",
        partial(folded, "v_half", lambda num_ranks: num_ranks + 2),
    ),
    "v_min": _on_a_v(
        "zbv with a third of the activations and more bubble",
        partial(folded, "v_min", lambda num_ranks: round(2 * (num_ranks + 4) / 3)),
    ),
}


def schedule_of(name: str) -> Schedule:
    """Return the schedule of a name or import path. *Raises* ConfigError if there is none."""
    return look_up(SCHEDULES, name, "pipeline.schedule", Schedule)


def make_table(
    name: str, num_ranks: int, num_micro_batches: int, virtual_stages: int | None = None, *,
    overlap: bool = False, costs: Costs | None = None, stands_for: int | None = None,
) -> Table:  # fmt: skip
    """Return the table of a schedule. *Raises* ConfigError.

    ``virtual_stages`` defaults to the least. V schedules read ``costs`` and ``stands_for``, the number of
    micro-batches that a shorter table represents. ``overlap`` pairs forwards and backwards.
    """
    problems = list(schedule_rules(name, num_ranks, num_micro_batches, virtual_stages, overlap=overlap))
    if problems:
        raise ConfigError("\n  ".join(problems))
    schedule = schedule_of(name)
    # longer warm-ups make the two micro-batches of every pair independent
    build = schedule.build_overlapped if overlap else schedule.build
    assert build
    sizes = num_ranks, num_micro_batches, virtual_stages or schedule.virtual_stages[0]
    table = build(*sizes, costs=costs, stands_for=stands_for) if schedule.is_folded else build(*sizes)
    if name not in SCHEDULES:
        placement = placement_of(name, num_ranks, virtual_stages)
        table = Table(name, placement, num_micro_batches, table.ranks)
        try:
            check(table)
        except TableError as error:
            raise ConfigError(f"pipeline.schedule={error}") from error
    return table


def placement_of(name: str, num_ranks: int, virtual_stages: int | None = None) -> Placement:
    schedule = schedule_of(name)
    if schedule.is_folded:
        return Placement.folded(num_ranks)
    return Placement.loop(num_ranks, virtual_stages or schedule.virtual_stages[0])


def schedule_rules(
    name: str,
    num_ranks: int,
    num_micro_batches: int,
    virtual_stages: int | None = None,
    *,
    overlap: bool = False,
) -> Iterator[str]:
    """Yield an error, with valid numbers, for each violated rule. *Raises* ConfigError for unknown names."""
    if num_ranks < 1:
        yield f"parallel.pp={num_ranks} is not a number of ranks; use 1 or more"
    if num_micro_batches < 1:
        yield f"pipeline.microbatches={num_micro_batches} leaves nothing to do; use 1 or more"
    schedule = schedule_of(name)
    if virtual_stages is not None and not _takes(schedule, virtual_stages):
        fewest, most = schedule.virtual_stages
        wanted = f"{fewest}" if fewest == most else f"{fewest} or more"
        takers = ", ".join(other for other, line in SCHEDULES.items() if _takes(line, virtual_stages))
        instead = f", or a schedule that takes {virtual_stages}: {takers}" if takers else ""
        yield (
            f"pipeline.virtual_stages={virtual_stages} does not suit pipeline.schedule={name}, which has "
            f"{wanted} on each rank; use {wanted}{instead}"
        )
    if overlap and schedule.build_overlapped is None:
        able = ", ".join(other for other, line in SCHEDULES.items() if line.build_overlapped)
        yield (
            f"pipeline.ep_overlap=true runs a forward and a backward together, and pipeline.schedule={name} "
            f"pairs none; use one of {able}"
        )


def _takes(schedule: Schedule, virtual_stages: int) -> bool:
    fewest, most = schedule.virtual_stages
    return fewest <= virtual_stages <= (most or virtual_stages)
