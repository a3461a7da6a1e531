"""The schedule runtime of torch.distributed.pipelining, checked with torch 2.11 to 2.13.

The runtime walks through a rank's list of actions; the work of an action is ours. Torch's own way of sending
is not used: it keeps each sent tensor to the end of the step and has one communicator for both directions.
(torch/distributed/pipelining/schedules.py, stage.py:
https://github.com/pytorch/pytorch/tree/v2.13.0/torch/distributed/pipelining)
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.distributed.pipelining.schedules import (
    _Action,
    _ComputationType,
    _PipelineContext,
    _PipelineScheduleRuntime,
)
from torch.distributed.pipelining.stage import _PipelineStageBase

Part = tuple[str, int, int]
"""F, B, I or W; the stage; the micro-batch."""
Parts = tuple[Part, ...]
"""One part, or a forward and a backward that run together."""

_TYPES = {
    "F": _ComputationType.FORWARD,
    "B": _ComputationType.FULL_BACKWARD,
    "I": _ComputationType.BACKWARD_INPUT,
    "W": _ComputationType.BACKWARD_WEIGHT,
}


class ScheduleRuntime:
    """Runtime whose call runs one rank's actions in order, each inside a profiler range ``PP:<action>``.

    When an action fails, torch logs the orders of all ranks with a mark at it; the error is raised as it is.
    No process group is used, and the host waits for nothing.
    """

    def __init__(
        self,
        orders: Mapping[int, Sequence[Parts]],
        rank: int,
        stages: Sequence[int],
        num_stages: int,
        run: Callable[[Parts], None],
    ) -> None:
        """``orders`` by rank, for the log all of them; ``stages`` are those of this rank.

        Torch's check is left out: it refuses tables that only evaluate.
        """
        num_micro_batches = 1 + max(part[2] for order in orders.values() for parts in order for part in parts)
        places = [_Stage(stage, num_stages, rank, len(orders)) for stage in stages]
        self._runtime = _PipelineScheduleRuntime(places, num_micro_batches)
        translated = {of: list(map(_action, order)) for of, order in orders.items()}
        self._runtime.pipeline_order_with_comms = translated
        self._runtime.stage_index_to_group_rank = {
            part[1]: of for of, order in orders.items() for parts in order for part in parts
        }
        # What `_initialize_stages` would do: send shapes from stage to stage. Ours are known.
        self._runtime._stages_forward_initialized = True
        parts_of = dict(zip(translated[rank], orders[rank], strict=True))

        def act(action: _Action, ctx: _PipelineContext) -> None:
            run(parts_of[action])

        for computation in (*_TYPES.values(), _ComputationType.OVERLAP_F_B):
            self._runtime.register_custom_function(computation, act)

    def __call__(self) -> None:
        self._runtime.step(return_outputs=False)


class _Stage(_PipelineStageBase):
    """A number: torch's runtime reads where the stage is, and has nothing to run or to send.

    The base's constructor is left out, which wants a process group and a module.
    """

    def __init__(self, stage: int, num_stages: int, rank: int, num_ranks: int) -> None:
        self.stage_index, self.num_stages = stage, num_stages
        self.group_rank, self.group_size = rank, num_ranks
        self.has_backward = False

    def clear_runtime_states(self) -> None:
        """Do nothing: no state is kept here."""

    def _prepare_forward_infra(self, *arguments: Any, **named: Any) -> Any:
        raise AssertionError("shapes are known")

    _prepare_backward_infra = _create_grad_recv_info = _prepare_forward_infra


def _action(parts: Parts) -> _Action:
    actions = [_Action(stage, _TYPES[kind], micro_batch) for kind, stage, micro_batch in parts]
    if len(actions) == 1:
        return actions[0]
    return _Action(-1, _ComputationType.OVERLAP_F_B, None, tuple(actions))
