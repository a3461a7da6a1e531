"""Times of a model's parts, which balance the stages of a pipeline where nothing was measured."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from graphmoe.config.schema import ComputeDtype, DispatcherChoice, ModelConfig, RunConfig
from graphmoe.plan.costs.hardware import H200
from graphmoe.plan.costs.rates import default_rates
from graphmoe.plan.costs.segment_times import SegmentTime, embed_time, head_time, join_time, times_of_layers
from graphmoe.plan.costs.sizes import Sizes
from graphmoe.plan.costs.speeds import Speeds
from graphmoe.plan.layout import Layout
from graphmoe.plan.recompute import Recompute

NOTHING_AGAIN = Recompute()


class PartCost(NamedTuple):
    """Cost of a part of the model, such as its seconds."""

    letter: str
    """Letter of the part in layout strings."""
    forward: float
    inputs: float
    """Cost of the gradients of the part's inputs."""
    weights: float
    """Cost of the gradients of the part's weights."""

    @property
    def total(self) -> float:
        return self.forward + self.inputs + self.weights

    def taking(self, total: float) -> PartCost:
        """Return the part with another total, of which the three costs keep their shares."""
        by = total / self.total if self.total else 0.0
        return PartCost(self.letter, self.forward * by, self.inputs * by, self.weights * by)


def modelled_parts(
    model: ModelConfig,
    seq_len: int,
    recompute: Recompute = NOTHING_AGAIN,
    *,
    expert_ranks: int = 1,
    joint_experts: bool = False,
) -> list[PartCost]:
    """Return the seconds of one sequence in each part, in the order of the model: E, layers, MTP layers, L.

    Whatever card runs, they are the times of an H200, from a step's second micro-batch on. It has each part
    whole, except for the experts, which ``expert_ranks`` ranks share. Head and loss of all depths are in L,
    where a pipeline has them. With ``joint_experts`` the experts' weight gradients count with the gradients
    of their inputs.
    """
    sizes, speeds = _on_a_card(model, seq_len, expert_ranks)
    depths = model.mtp_depth

    indices = range(model.num_layers + depths)
    layers = times_of_layers(sizes, speeds, recompute, indices, host_counts=joint_experts, hidden=0.0)
    return [
        _part("E", [embed_time(sizes, speeds)]),
        *(_part("t", times) for times in layers[: model.num_layers]),
        *(_part("m", [*times, join_time(sizes, speeds)]) for times in layers[model.num_layers :]),
        _part("L", [head_time(sizes, speeds, depths + 1)]),
    ]


def modelled_message(model: ModelConfig, seq_len: int) -> float:
    """Seconds to send the state of one sequence from an H200 to one of another node."""
    sizes, speeds = _on_a_card(model, seq_len)
    return speeds.pass_on(sizes.state, in_node=False)


def _on_a_card(model: ModelConfig, seq_len: int, expert_ranks: int = 1) -> tuple[Sizes, Speeds]:
    run = RunConfig(model=model)
    run.data.seq_len, run.train.micro_batch_size = seq_len, 1
    run.precision.compute, run.moe.dispatcher = ComputeDtype.bf16, DispatcherChoice.local
    layout = Layout(ep=expert_ranks)
    return Sizes.from_config(run, layout, on_nvidia=True), Speeds(H200, default_rates(H200), adding=1.0)


def _part(letter: str, times: Sequence[SegmentTime]) -> PartCost:
    sums = (sum(getattr(time, kind) for time in times) for kind in ("forward", "inputs", "weights"))
    return PartCost(letter, *sums)


def stage_costs(pieces: Sequence[str], parts: Sequence[PartCost]) -> list[PartCost]:
    """Sum the parts of each stage; the letter of a sum is the stage's piece."""
    assert "".join(pieces) == "".join(part.letter for part in parts)
    found, rest = [], iter(parts)
    for piece in pieces:
        own = list(itertools.islice(rest, len(piece)))
        sums = (sum(part[field] for part in own) for field in (1, 2, 3))  # type: ignore[misc]
        found.append(PartCost(piece, *sums))
    return found
