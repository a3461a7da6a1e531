"""The dispatcher ``turbo``: `graphmoe.runtime.dispatch.deepep` on ROCm, through the buffer of Primus-Turbo.

Its ``primus_turbo.pytorch.deep_ep.Buffer`` has DeepEP's calls and puts rows where DeepEP puts them. Written
against the source of commit a6a16cdc, and not run with the package yet.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from graphmoe.runtime.dispatch import deepep


def open_buffer(group: dist.ProcessGroup, hidden: int) -> Any:
    """Primus-Turbo's buffer for bf16 rows of a size. A collective of the group."""
    from primus_turbo.pytorch import deep_ep  # type: ignore[import-not-found]

    return deepep.open_buffer(deep_ep, group, hidden)
