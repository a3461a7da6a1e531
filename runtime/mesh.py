"""Process groups of a layout."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from graphmoe.plan.layout import AXES, SUMMED_OVER, Axis, Layout
from graphmoe.runtime.ranks import COLLECTIVE_TIMEOUT


class Mesh:
    """The process groups that this rank is in. Making one is collective; one rank alone needs none.

    Axes with the same ranks share a group, but none in which gradients and weights travel beside the model's
    own collectives: a communicator runs one operation after the other, and these would wait for those.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self._groups: dict[Axis, dist.ProcessGroup] = {}
        made: dict[tuple[Any, ...], dist.ProcessGroup] = {}
        for axis in AXES:
            groups = layout.groups(axis)
            key = (axis in SUMMED_OVER, *groups)
            if layout.size(axis) > 1 and key not in made:
                made[key], _ = dist.new_subgroups_by_enumeration(
                    [list(group) for group in groups], timeout=COLLECTIVE_TIMEOUT
                )
            if layout.size(axis) > 1:
                self._groups[axis] = made[key]

    def group(self, axis: Axis) -> dist.ProcessGroup | None:
        """The process group of an axis; None where this rank is alone in it."""
        return self._groups.get(axis)

    def index(self, axis: Axis) -> int:
        """The place of this rank in its group of the axis."""
        return self.layout.index(axis, self.rank)
