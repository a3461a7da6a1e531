"""Messages that a rank of a table sends and receives, and their times; nothing here knows tensors.

A channel is an ordered pair of ranks. Messages arrive in the order in which its source sends them, so its
destination posts receives in that order too: each just before the step that reads the message, or earlier
where a later message is read first. It posts none earlier: a receive that waits on an AMD GPU holds up other
collectives.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from graphmoe.plan.pipeline.actions import Action, Step, Table, parts
from graphmoe.plan.pipeline.check import FORWARD_ONLY, needs, result

HELD = 2
"""Messages of a channel that a rank holds while it evaluates, where no answers come back."""
Channel = tuple[int, int]
"""Source and destination, ranks of the pipeline."""


class Message(NamedTuple):
    """A result on its way to the rank with the next stage, or with the one before."""

    content: Action
    """F: activations for the next stage. I: gradients for the stage before."""
    source: int
    destination: int

    @property
    def channel(self) -> Channel:
        return self.source, self.destination


@dataclass(frozen=True)
class Transfers:
    """The messages of one rank."""

    posts: Mapping[Step, tuple[Message, ...]]
    """Messages whose receives are posted just before a step, in order."""
    sends: Mapping[Action, Message]
    """Messages by their content; each is sent as soon as its action is over."""
    over: Mapping[Step, tuple[Message, ...]]
    """Sent messages whose memory is free once a step has its inputs: the rank that got the message made one
    of these inputs later. So waiting for the message takes no time."""


def channels_of(table: Table) -> list[Channel]:
    """Return a table's channels, sorted. A table that evaluates uses some of those of its schedule."""
    ranks = range(table.placement.num_ranks)
    return sorted({message.channel for rank in ranks for message in _sent(table, rank)})


def transfers_of(table: Table, rank: int) -> Transfers:
    """Return the transfers of a rank with which all of its steps get their inputs from other ranks."""
    sent = _sent(table, rank)
    received = [
        message
        for source in range(table.placement.num_ranks)
        for message in _sent(table, source)
        if message.destination == rank
    ]
    return Transfers(
        _by_step(table, rank, _times_to_post(table, rank, received)),
        {message.content: message for message in sent},
        _by_step(table, rank, _times_over(table, rank, sent, received)),
    )


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


def _times_to_post(table: Table, rank: int, received: list[Message]) -> dict[Message, int]:
    """Return the step before which each receive is posted; messages of a channel stay in order."""
    read = _times_read(table, rank)
    times = {}
    earliest: dict[Channel, int] = {}
    for message in reversed(received):
        channel = message.channel
        earliest[channel] = min(read[message.content], earliest.get(channel, read[message.content]))
        times[message] = earliest[channel]
    return {message: times[message] for message in received}


def _times_over(table: Table, rank: int, sent: list[Message], received: list[Message]) -> dict[Message, int]:
    """Return the step by which each sent message is over, where one tells so before the end."""
    times: dict[Message, int] = {}
    for other in {message.destination for message in sent}:
        there = [message for message in sent if message.destination == other]
        answers = [message for message in received if message.source == other]
        if table.schedule == FORWARD_ONLY:
            times |= _times_replaced(table, rank, there)
        else:
            times |= _times_answered(table, rank, other, there, answers)
    return {message: times[message] for message in sent if message in times}


def _times_answered(
    table: Table, rank: int, other: int, sent: list[Message], answers: list[Message]
) -> dict[Message, int]:
    """Return the step that reads the first answer which the other rank made after it had read a message."""
    made, read, read_there = _times_made(table, other), _times_read(table, rank), _times_read(table, other)
    of_answers = [(made[answer.content], read[answer.content]) for answer in answers]
    times = {}
    for message in sent:
        after = [seen for since, seen in of_answers if since >= read_there[message.content]]
        if after:
            times[message] = min(after)
    return times


def _times_replaced(table: Table, rank: int, sent: list[Message]) -> dict[Message, int]:
    """Return for each message the step that sends the `HELD`-th message after it.

    In tables that evaluate, no ranks wait in a circle for that (tests/plan/pipeline/test_transfers.py), and
    a rank that is so far ahead gains nothing by holding more.
    """
    made = _times_made(table, rank)
    return {message: made[later.content] for message, later in zip(sent, sent[HELD:], strict=False)}


def _times_read(table: Table, rank: int) -> dict[Action, int]:
    num_stages = table.placement.num_stages
    return {
        need: time
        for time, step in enumerate(table.ranks[rank])
        for action in parts(step)
        for need in needs(action, num_stages)
        if need.stage != action.stage
    }


def _times_made(table: Table, rank: int) -> dict[Action, int]:
    return {result(action): time for time, step in enumerate(table.ranks[rank]) for action in parts(step)}


def _by_step(table: Table, rank: int, times: dict[Message, int]) -> dict[Step, tuple[Message, ...]]:
    steps = table.ranks[rank]
    found: dict[Step, tuple[Message, ...]] = {}
    for message, time in times.items():
        found[steps[time]] = (*found.get(steps[time], ()), message)
    return found
