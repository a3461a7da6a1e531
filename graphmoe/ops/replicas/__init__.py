"""Plan of replicas: which experts are computed on further ranks, so that all ranks have as many rows.

Each rank makes it of the counts of all, so it needs no further exchange, and no host. It is exact: with as
many slots as a rank owns experts no rank has more than its share of rows (`reference` proves it).

Suffixes: R ranks, E experts, S slots of a rank.
"""

import torch
from torch import Tensor

from graphmoe.ops import num_warps
from graphmoe.ops.replicas import reference


@torch.library.custom_op("graphmoe::replica_plan", mutates_args=())
def plan(counts_RE: Tensor, slots: int, slack: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of experts on their owners [E]; experts [R, S], -1 for none, and their rows [R, S], int32.

    ``counts_RE`` [R, E] int32 are the rows of each rank's tokens; an n-th of the experts is each rank's. No
    rank has more than the mean, rounded up, and ``slack`` rows, with E / R ``slots`` or more. No device sync
    on a GPU.
    """
    R = len(counts_RE)
    if counts_RE.device.type == "cpu":
        rows_E = counts_RE.sum(0).tolist()
        found = reference.plan(rows_E, R, slots, -(-sum(rows_E) // R) + slack)
        made = (found.home_E, found.expert_RS, found.rows_RS)
        home_E, expert_RS, rows_RS = (torch.tensor(each, dtype=torch.int32) for each in made)
        return home_E, expert_RS.view(R, slots), rows_RS.view(R, slots)
    return by_kernel(counts_RE, slots, slack)


def by_kernel(counts_RE: Tensor, slots: int, slack: int) -> tuple[Tensor, Tensor, Tensor]:
    """The same by a kernel."""
    import triton

    from graphmoe.ops.replicas.kernels import plan_kernel

    R, E = counts_RE.shape
    home_E, expert_RS = counts_RE.new_empty(E), counts_RE.new_full((R, slots), -1)
    rows_RS, padded = torch.zeros_like(expert_RS), (triton.next_power_of_2(n) for n in (R, E // R))
    block_r, block_h = padded
    plan_kernel[(1,)](
        counts_RE.contiguous(), home_E, expert_RS, rows_RS, slack,
        R=R, H=E // R, S=slots, BLOCK_R=block_r, BLOCK_H=block_h, num_warps=num_warps(128),
    )  # fmt: skip
    return home_E, expert_RS, rows_RS


@torch.library.custom_op("graphmoe::replica_split", mutates_args=())
def split(
    counts_RE: Tensor, home_E: Tensor, expert_RS: Tensor, rows_RS: Tensor, rank: int
) -> tuple[Tensor, Tensor]:
    """Rows of each expert that a rank sends to each, and gets from each, [E, R] int32, by a plan.

    Rows stay where they are as far as there is a copy. No device sync on a GPU.
    """
    (R, E), device = counts_RE.shape, counts_RE.device
    if device.type == "cpu":
        made = (home_E.tolist(), expert_RS.tolist(), rows_RS.tolist())
        found = reference.Replicas(*made)
        sent = [reference.split(counts_RE[:, e].tolist(), found.copies(e)) for e in range(E)]
        sent_ERR = torch.tensor(sent, dtype=torch.int32).view(E, R, R)
        return sent_ERR[:, rank].clone(), sent_ERR[:, :, rank].clone()
    return split_by_kernel(counts_RE, home_E, expert_RS, rows_RS, rank)


def split_by_kernel(
    counts_RE: Tensor, home_E: Tensor, expert_RS: Tensor, rows_RS: Tensor, rank: int
) -> tuple[Tensor, Tensor]:
    """The same by a kernel."""
    import triton

    from graphmoe.ops.replicas.kernels import split_kernel

    (R, E), slots = counts_RE.shape, expert_RS.shape[1]
    send_ER, receive_ER = counts_RE.new_empty(E, R), counts_RE.new_empty(E, R)
    split_kernel[(E,)](
        counts_RE.contiguous(), home_E, expert_RS, rows_RS, send_ER, receive_ER, rank,
        R=R, H=E // R, S=slots, BLOCK_R=triton.next_power_of_2(R), BLOCK_S=triton.next_power_of_2(slots),
        num_warps=num_warps(64),
    )  # fmt: skip
    return send_ER, receive_ER


plan.register_fake(
    lambda counts_RE, slots, slack: (
        counts_RE.new_empty(counts_RE.shape[1]),
        counts_RE.new_empty(counts_RE.shape[0], slots),
        counts_RE.new_empty(counts_RE.shape[0], slots),
    )
)
split.register_fake(lambda counts_RE, *_: tuple(counts_RE.new_empty(counts_RE.shape[::-1]) for _ in range(2)))
