"""Agreement of all ranks to stop after the same step, whichever of them got a signal."""

from __future__ import annotations

import signal

import torch
import torch.distributed as dist
from torch import Tensor

from graphmoe.runtime.launch.stamps import wait_for
from graphmoe.runtime.ranks import PATIENCE, Ranks

NOTHING = 0
"""No signal has this number."""


class StopFlag:
    """Flag that tells the other ranks of a signal between two steps, and reads the flags of the time before.

    So nobody waits for a message: it had a whole step to arrive. It travels between the hosts, in a group
    of its own. Every rank builds it and calls it at the same points.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._group = dist.new_group(backend="gloo", timeout=PATIENCE) if ranks.size > 1 else None
        self._sent: tuple[Tensor, dist.Work] | None = None

    def signal(self, received: str | None) -> str | None:
        """Name of the signal to stop for, the same on all ranks; ``received`` is what this one got.

        It is a call later than ``received``; on one rank it is ``received``, at once.
        """
        if self._group is None:
            return received
        agreed = self._answer()
        if agreed is None:
            flag = torch.tensor(signal.Signals[received] if received else NOTHING, dtype=torch.int32)
            work = dist.all_reduce(flag, dist.ReduceOp.MAX, group=self._group, async_op=True)
            self._sent = flag, work
        return agreed

    def close(self) -> None:
        """Wait for the last message, which every rank has sent."""
        self._answer()

    def _answer(self) -> str | None:
        if self._sent is None:
            return None
        (flag, work), self._sent = self._sent, None
        wait_for(work.wait)
        number = int(flag)
        return None if number == NOTHING else signal.Signals(number).name
