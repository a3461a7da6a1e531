"""Ranks whose own work takes longer than that of others: a step's time without waits for other ranks."""

import logging
import statistics
from typing import Any

import torch

from graphmoe.plan.layout import Layout
from graphmoe.run.machine import place_of
from graphmoe.run.metrics_file import IN_A_ROW, SLOW
from graphmoe.runtime.ranks import Ranks

log = logging.getLogger(__name__)

LEAST_S = 0.005  # over the median: rank 0 also writes files


class SlowRanks:
    """Compares the own work of ranks that have the same layers. Methods are collective."""

    def __init__(self, ranks: Ranks, layout: Layout, device: torch.device) -> None:
        self._ranks, self._device = ranks, device
        self._groups = [group for group in layout.groups("stage") if len(group) > 1]
        self._late = [0] * ranks.size  # logged steps in a row

    def add(self, step: int, own_s: float) -> dict[str, Any]:
        """Compare this rank's own work in a logged step; log a rank that becomes slow; return metrics."""
        times = self._ranks.gather(own_s)
        of_groups = [(g, statistics.median_low([times[i] for i in g])) for g in self._groups]
        medians = {rank: median for group, median in of_groups for rank in group}
        if not medians:
            return {}
        for rank, median in medians.items():
            is_late = times[rank] > SLOW * median and times[rank] - median > LEAST_S
            self._late[rank] = self._late[rank] + 1 if is_late else 0
        if IN_A_ROW in self._late:
            places = self._ranks.gather(place_of(self._device))
            for rank in [rank for rank, late in enumerate(self._late) if late == IN_A_ROW]:
                self._log(step, rank, times[rank], medians[rank], places[rank])
        slowest = max(medians, key=lambda rank: times[rank] / max(medians[rank], 1e-9))
        slow = [rank for rank, late in enumerate(self._late) if late >= IN_A_ROW]
        found = {"slowest_rank": slowest, "slowest_own_s": times[slowest], "median_own_s": medians[slowest]}
        return found | ({"slow_ranks": slow} if slow else {})

    def _log(self, step: int, rank: int, seconds: float, median: float, place: str) -> None:
        log.warning(
            "rank %d (%s) is slow: without waits for others a step takes it %.3g s, %.2f times the median; "
            "over %g times in %d logged steps in a row, up to step %d",
            *(rank, place, seconds, seconds / median, SLOW, IN_A_ROW, step),
        )
