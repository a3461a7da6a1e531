"""What kernels and calls of a runtime are, by their names."""

from __future__ import annotations

import re

from graphmoe.trace.events import Activity

_COMMUNICATION = re.compile(
    r"nccl|rccl|nvshmem|rocshmem|deep_ep|mori::|multimem|one_shot_all_reduce|two_shot_all_reduce"
    r"|PtoP|PeerToPeer|symm_mem"
    # graphmoe.ops.symm: those that wait for other ranks, or read and write their memory
    r"|^(records|receive|pull|put|way_back|sum)_kernel",
    re.IGNORECASE,
)
_LAUNCH = re.compile(r"^(cuda|cu|hip)[A-Za-z]*Launch")
_RANGE = re.compile(r"(?!(?:gloo|nccl|ucc|mpi):)([a-z_]+(?:\.\.[a-z_]+)?):([A-Za-z]+)")
"""Not those of torch's process groups, such as gloo:send, which last until a message is there."""


def is_communication(activity: Activity) -> bool:
    """Whether it moves data between ranks."""
    return bool(_COMMUNICATION.search(activity.name))


def is_launch(name: str) -> bool:
    """Whether a call of the runtime launches kernels or graphs."""
    return bool(_LAUNCH.match(name))


def unit_and_part(name: str) -> tuple[str, str] | None:
    """What a range of `graphmoe.segments` names; None for any other."""
    match = _RANGE.fullmatch(name)
    return (match[1], match[2]) if match else None
