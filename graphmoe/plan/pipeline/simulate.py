"""Simulation of a pipeline: times of all steps if each took the time that is given for it."""

from __future__ import annotations

from dataclasses import dataclass

from graphmoe.plan.pipeline.actions import Action, Placement, Step, Table, Together, parts
from graphmoe.plan.pipeline.check import in_order, needs, peak_activations, peaks, result
from graphmoe.plan.pipeline.timeline import Span, Timeline


@dataclass(frozen=True)
class Costs:
    """Times of steps by stage, all in one unit. B takes as long as I and W together."""

    forward: tuple[float, ...]
    backward_input: tuple[float, ...]
    backward_weight: tuple[float, ...]
    comm: float = 0.0
    """Time from an action's end to the arrival of its result on another rank; no rank is busy with it."""
    hidden: float = 0.0
    """Time that a forward and a backward save when they run together; at most the shorter of both."""
    activation_bytes: tuple[float, ...] | None = None
    """Bytes that are kept of each stage for one micro-batch."""

    @classmethod
    def of_rank(
        cls,
        placement: Placement,
        forward: float,
        backward_input: float,
        backward_weight: float,
        *,
        comm: float = 0.0,
        hidden: float = 0.0,
        activation_bytes: float | None = None,
    ) -> Costs:
        """Make equal stages from the costs of a rank's whole stage, which its virtual stages share.

        The saving of a pair is of whole stages too; a message has the same size however stages are cut.
        """
        shares = [len(placement.stages_of(rank)) for rank in placement.rank_of]
        assert len(set(shares)) == 1 or not hidden, (
            "pairs of ranks with more or fewer stages save differently"
        )
        return cls(
            tuple(forward / share for share in shares),
            tuple(backward_input / share for share in shares),
            tuple(backward_weight / share for share in shares),
            comm,
            hidden / shares[0],
            None if activation_bytes is None else tuple(activation_bytes / share for share in shares),
        )

    def of(self, step: Step) -> float:
        """Return the time that a rank computes for a step."""
        if isinstance(step, Together):
            forward, backward = self.of(step.forward), self.of(step.backward)
            return forward + backward - min(self.hidden, forward, backward)
        backward_input, backward_weight = self.backward_input[step.stage], self.backward_weight[step.stage]
        whole = backward_input + backward_weight
        times = {"F": self.forward[step.stage], "B": whole, "I": backward_input, "W": backward_weight}
        return times[step.kind]


def simulate(table: Table, costs: Costs) -> Timeline:
    """Simulate a table in which each step starts as early as its rank and its inputs allow.

    Transfers cost no rank its time and do not wait for each other. Both halves of a `Together` start and end
    with it. Raises `TableError` on a deadlock.
    """
    placement = table.placement
    spans: list[Span] = []
    ends: dict[Action, float] = {}
    free = [0.0] * placement.num_ranks
    busy = 0.0
    for rank, step in in_order(table):
        start = free[rank]
        for action in parts(step):
            for need in needs(action, placement.num_stages):
                arrived = ends[need]
                if costs.comm and placement.rank_of[need.stage] != rank:
                    arrived += costs.comm
                    spans.append(Span(rank, "comm", action, ends[need], arrived))
                start = max(start, arrived)
        free[rank] = start + costs.of(step)
        busy += costs.of(step)
        ends.update((result(action), free[rank]) for action in parts(step))
        spans.append(Span(rank, "compute", step, start, free[rank]))
    makespan = max(free)
    offered = makespan * placement.num_ranks
    return Timeline(
        table.schedule,
        placement,
        table.num_micro_batches,
        tuple(sorted(spans, key=lambda span: (span.rank, span.start, span.end))),
        makespan,
        (offered - busy) / offered if offered else 0.0,
        peak_activations(table),
        None if costs.activation_bytes is None else peaks(table, costs.activation_bytes),
    )
