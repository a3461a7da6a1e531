"""What an action waits for, and an order of all ranks' steps in which nothing waits in vain.

Check and simulation walk through a table in this order: both meet a deadlock as an error that says who waits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

from graphmoe.plan.pipeline.actions import Action, Step, Table, parts


class TableError(ValueError):
    """A table that no ranks could run; the message names the ranks and actions."""


def result(action: Action) -> Action:
    """What others wait for: of B and I alike the gradients of the stage's inputs, which are called I here."""
    return action._replace(kind="I") if action.kind == "B" else action


def needs(action: Action, num_stages: int) -> list[Action]:
    """The results that have to be there before an action starts."""
    kind, stage, micro_batch = action
    if kind == "F":
        return [Action("F", stage - 1, micro_batch)] if stage else []
    if kind == "W":
        return [Action("I", stage, micro_batch)]
    forward = Action("F", stage, micro_batch)
    return [forward] if stage == num_stages - 1 else [forward, Action("I", stage + 1, micro_batch)]


def in_order(table: Table) -> Iterator[tuple[int, Step]]:
    """Each rank's steps in its own order, all ranks' in one where all that a step needs came before it.

    Raises `TableError` where ranks wait for each other, or for what no rank does.
    """
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
    """Words the ranks that wait in a circle, or those that lead to an action that is nowhere."""
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
        what = f"{need}, which no rank does"
        if need in owner:
            what = f"{owner[need][1]}, which comes later on rank {owner[need][0]}"
        words.append(f"rank {rank} at {table.ranks[rank][position[rank]]} waits for {what}")
    return "; ".join(words)
