"""Checks of a schedule's table: dependencies, deadlocks, and counts of saved activations."""

import functools
import operator
from collections import deque
from collections.abc import Iterable, Iterator, Sequence

from graphmoe.plan.pipeline import Action, Kind, Step, Table, Together, parts

FORWARD_ONLY = "forward_only"  # schedule name of tables that evaluate
KINDS: tuple[Kind, ...] = ("F", "B", "I", "W")


class TableError(ValueError):
    """Raised for a schedule's table that cannot run; the message names ranks and actions."""


def check(table: Table) -> None:
    """Check that each rank runs all its stages' actions once, in a feasible order. *Raises* `TableError`."""
    _check_shape(table)
    # messages between two stages arrive in the order sent, so all stages process micro-batches in increasing
    # order
    for rank in range(len(table.ranks)):
        _check_work(table, rank)
        _check_order(table, rank)
    for _ in in_order(table):
        pass


def peak_activations(table: Table) -> tuple[float, ...]:
    """Return each rank's peak of saved activations; 1 is one micro-batch's of all the rank's stages."""
    sizes = [1] * table.placement.num_stages
    shares = [len(table.placement.stages_of(rank)) for rank in range(table.placement.num_ranks)]
    # a stage counts 1/n on a rank with n stages
    return tuple(peak / share for peak, share in zip(peaks(table, sizes), shares, strict=True))


def peaks(table: Table, sizes: Iterable[float], deferred: Sequence[float] | None = None) -> tuple[float, ...]:
    """Return each rank's peak of saved activations; ``sizes``: one micro-batch's at each stage.

    ``deferred``: the sizes after dgrad, which are otherwise equal.
    """
    size_of, found = list(sizes), []
    later = size_of if deferred is None else deferred
    for rank, moments in enumerate(in_flight(table)):
        own = [of[stage] for of in (size_of, later) for stage in table.placement.stages_of(rank)]
        found.append(max(float(sum(map(operator.mul, counts, own))) for counts in moments))
    return tuple(found)


@functools.lru_cache(maxsize=4)
def in_flight(table: Table) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Return, per rank, counts of saved activations at each time that may be the rank's peak: by stage, of
    micro-batches before their dgrad, then of those whose wgrad is deferred.
    """
    found = []
    for rank in range(len(table.ranks)):
        stages = table.placement.stages_of(rank)
        counts = dict.fromkeys(((kind, stage) for kind in "FI" for stage in stages), 0)
        moments = {tuple(counts.values())}
        actions = table.actions(rank)
        trained = {action[1:] for action in actions if action.kind != "F"}
        for action in actions:
            # freed after B, or after I but for what W reads; without a backward, after F
            if action.kind in "FI":
                counts[action[:2]] += 1
            if action.kind in "BI":
                counts["F", action.stage] -= 1
            moments.add(tuple(counts.values()))
            if action.kind == "W" or action[1:] not in trained:
                counts["I" if action.kind == "W" else "F", action.stage] -= 1
        found.append(largest(moments))
    return tuple(found)


def largest(moments: Iterable[tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
    """Return the points in time without those whose counts are at most another's in every stage."""
    kept: list[tuple[int, ...]] = []
    for counts in sorted(moments, key=sum, reverse=True):
        if not any(all(map(operator.le, counts, other)) for other in kept):
            kept.append(counts)
    return tuple(kept)


def _check_shape(table: Table) -> None:
    placement = table.placement
    if len(table.ranks) != placement.num_ranks:
        raise TableError(
            f"{table.schedule}: the table has steps of {len(table.ranks)} ranks, but its placement has "
            f"{placement.num_ranks}"
        )
    nowhere = [stage for stage, rank in enumerate(placement.rank_of) if not 0 <= rank < placement.num_ranks]
    if nowhere:
        raise TableError(f"{table.schedule}: stages {nowhere} are on none of {placement.num_ranks} ranks")
    for rank, steps in enumerate(table.ranks):
        for pair in (step for step in steps if isinstance(step, Together)):
            if pair.forward.kind != "F" or pair.backward.kind not in ("B", "I"):
                raise TableError(f"{table.schedule}: {pair} of rank {rank} is not a forward and a backward")
            if pair.forward.micro_batch == pair.backward.micro_batch:
                raise TableError(f"{table.schedule}: {pair} of rank {rank} must be of two micro-batches")


def _check_work(table: Table, rank: int) -> None:
    wanted = ("F",) if table.schedule == FORWARD_ONLY else ("FB", "FIW")
    stages, numbers = table.placement.stages_of(rank), range(table.num_micro_batches)
    found = {(stage, number): "" for stage in stages for number in numbers}
    for kind, stage, number in sorted(table.actions(rank), key=lambda action: KINDS.index(action.kind)):
        if (stage, number) not in found:
            raise TableError(
                f"{table.schedule}: rank {rank} does {stage}{kind}{number}, and has the stages "
                f"{', '.join(map(str, stages))} and {len(numbers)} micro-batches"
            )
        found[stage, number] += kind
    for (stage, number), kinds in found.items():
        if kinds not in wanted:
            raise TableError(
                f"{table.schedule}: rank {rank} does {' and '.join(kinds) or 'nothing'} of stage {stage} for "
                f"micro-batch {number}; {' or '.join(map(' and '.join, wanted))} must each be there once"
            )


def _check_order(table: Table, rank: int) -> None:
    last: dict[tuple[str, int], Action] = {}
    for action in table.actions(rank):
        if action.kind == "W":
            continue  # has no result to send
        key = ("forward" if action.kind == "F" else "backward", action.stage)
        before = last.get(key)
        if before and before.micro_batch > action.micro_batch:
            raise TableError(
                f"{table.schedule}: rank {rank} does {action} after {before}; the micro-batches of a stage "
                f"go {key[0]} in increasing order"
            )
        last[key] = action


def result(action: Action) -> Action:
    return action._replace(kind="I") if action.kind == "B" else action


def needs(action: Action, num_stages: int) -> list[Action]:
    """Return the results that an action needs before it starts."""
    kind, stage, micro_batch = action
    if kind == "F":
        return [Action("F", stage - 1, micro_batch)] if stage else []
    if kind == "W":
        return [Action("I", stage, micro_batch)]
    forward = Action("F", stage, micro_batch)
    return [forward] if stage == num_stages - 1 else [forward, Action("I", stage + 1, micro_batch)]


def in_order(table: Table) -> Iterator[tuple[int, Step]]:
    """Yield (rank, step) in dependency order. *Raises* `TableError` on a deadlock or a missing action."""
    ranks, num_stages = table.ranks, table.placement.num_stages
    position = [0] * len(ranks)
    done: set[Action] = set()
    waiting: dict[Action, list[int]] = {}
    awake = deque(range(len(ranks)))
    while awake:
        rank = awake.popleft()
        while position[rank] < len(ranks[rank]):
            step = ranks[rank][position[rank]]
            missing = _missing(parts(step), done, num_stages)
            if missing:
                waiting.setdefault(missing, []).append(rank)
                break
            yield rank, step
            position[rank] += 1
            for action in parts(step):
                done.add(result(action))
                awake.extend(waiting.pop(result(action), ()))
    if waiting:
        raise TableError(f"{table.schedule}: {_who_waits(table, position, waiting)}")


def _missing(actions: Iterable[Action], done: set[Action], num_stages: int) -> Action | None:
    return next((need for action in actions for need in needs(action, num_stages) if need not in done), None)


def _who_waits(table: Table, position: list[int], waiting: dict[Action, list[int]]) -> str:
    owner = {result(a): (rank, a) for rank in range(len(table.ranks)) for a in table.actions(rank)}
    waits_for = {rank: need for need, ranks in waiting.items() for rank in ranks}
    chain = [min(waits_for)]
    while (need := waits_for[chain[-1]]) in owner:
        holder = owner[need][0]
        if holder in chain:
            del chain[: chain.index(holder)]
            break
        chain.append(holder)
    words = []
    for rank in chain:
        need = waits_for[rank]
        what = f"{need}, which no rank computes"
        if need in owner:
            what = f"{owner[need][1]}, which is later on rank {owner[need][0]}"
        words.append(f"rank {rank} at {table.ranks[rank][position[rank]]} waits for {what}")
    return "; ".join(words)
