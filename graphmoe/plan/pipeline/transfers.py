"""Messages between the ranks of a pipeline table, as plain data.

Messages of a channel, an ordered pair of ranks, arrive in send order. A receive is posted just before the
step that reads it or a later message: on AMD GPUs a waiting receive stalls other collectives.
"""

import itertools
from collections import Counter
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from graphmoe.plan.pipeline import Action, Kind, Step, Table, parts
from graphmoe.plan.pipeline.check import FORWARD_ONLY, needs, result

HELD = 2  # messages per channel that a rank holds in evaluation, which has no replies
Channel = tuple[int, int]


class Message(NamedTuple):
    content: Action
    """F: activations for the next stage. I: gradients for the stage before."""
    source: int
    destination: int

    @property
    def channel(self) -> Channel:
        return self.source, self.destination


@dataclass(frozen=True)
class Transfers:
    posts: Mapping[Step, tuple[Message, ...]]
    """Messages whose receives are posted just before a step, in order."""
    sends: Mapping[Action, Message]
    """Messages by content; each is sent when its action ends."""
    over: Mapping[Step, tuple[Message, ...]]
    """Sent messages that have been received by the time of a step, so that their memory is free."""


def channels_of(table: Table) -> list[Channel]:
    """Return a table's channels, sorted. Those of evaluation are a subset of the training schedule's."""
    ranks = range(table.placement.num_ranks)
    return sorted({message.channel for rank in ranks for message in _sent(table, rank)})


def transfers_of(table: Table, rank: int) -> Transfers:
    steps, (read, made), all_sent = table.ranks[rank], _times(table, rank), _sent(table, rank)
    posts: dict[Step, tuple[Message, ...]] = {}
    over: dict[Step, tuple[Message, ...]] = {}

    def note(found: dict[Step, tuple[Message, ...]], time: int, message: Message) -> None:
        found[steps[time]] = (*found.get(steps[time], ()), message)

    for other in range(table.placement.num_ranks):
        received = [message for message in _sent(table, other) if message.destination == rank]
        # a receive is posted no later than those behind it
        times = itertools.accumulate((read[message.content] for message in reversed(received)), min)
        for message, time in zip(received, [*times][::-1], strict=True):
            note(posts, time, message)
        sent = [message for message in all_sent if message.destination == other]
        if table.schedule == FORWARD_ONLY:
            # waiting for the message that is `HELD` behind cannot deadlock
            # (tests/plan/pipeline/test_transfers.py), and holding more gains nothing
            for message, later in zip(sent, sent[HELD:], strict=False):
                note(over, made[later.content], message)
        elif sent:  # freed by the first reply that the receiver computed after reading it
            read_there, made_there = _times(table, other)
            answers = [(made_there[answer.content], read[answer.content]) for answer in received]
            for message in sent:
                seen = [time for since, time in answers if since >= read_there[message.content]]
                if seen:
                    note(over, min(seen), message)
    return Transfers(posts, {message.content: message for message in all_sent}, over)


def moments_of(table: Table, rank: int) -> set[Hashable]:
    """Return a rank's distinct states, which determine memory: last and current actions, tensors held."""
    transfers, num_stages = transfers_of(table, rank), table.placement.num_stages
    own, found = table.placement.stages_of(rank), set[Hashable]()
    held, before = Counter[tuple[str, Kind, int]](), tuple[tuple[Kind, int], ...]()
    for step in table.ranks[rank]:
        actions = parts(step)
        doing = tuple((action.kind, action.stage) for action in actions)
        held.update(("input", *message.content[:2]) for message in transfers.posts.get(step, ()))
        found.add((before, doing, frozenset((+held).items())))
        for action in actions:
            inputs = (need for need in needs(action, num_stages) if need.stage != action.stage)
            held.subtract(("input", *need[:2]) for need in inputs)
        held.subtract(("sent", *message.content[:2]) for message in transfers.over.get(step, ()))
        for action in actions:
            kind, stage, _ = action
            if kind == "F":
                held["kept", "F", stage] += 1
            else:
                held["kept", "I" if kind == "W" else "F", stage] -= 1
                held["kept", "I", stage] += kind == "I"
            made, reader = result(action), stage + (1 if kind == "F" else -1)
            if made in transfers.sends:
                held["sent", made.kind, stage] += 1
            elif kind != "W" and reader in own:
                held["input", made.kind, stage] += 1
        before = doing
    return found


def _sent(table: Table, rank: int) -> list[Message]:
    placement = table.placement
    found = []
    for action in table.actions(rank):
        if action.kind != "W":
            stage = action.stage + (1 if action.kind == "F" else -1)
            home = placement.rank_of[stage] if 0 <= stage < placement.num_stages else rank
            if home != rank:
                found.append(Message(result(action), rank, home))
    return found


def _times(table: Table, rank: int) -> tuple[dict[Action, int], dict[Action, int]]:
    num_stages = table.placement.num_stages
    done = [(time, action) for time, step in enumerate(table.ranks[rank]) for action in parts(step)]
    read = {
        need: time
        for time, action in done
        for need in needs(action, num_stages)
        if need.stage != action.stage
    }
    return read, {result(action): time for time, action in done}
