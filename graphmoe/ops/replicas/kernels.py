"""Kernels of the plan of replicas: one program makes it, one of each expert splits its rows.

Suffixes: R ranks, H experts of a rank, E of all, S slots. Sizes are padded to powers of two.
"""

# mypy: allow-untyped-defs
# The arguments of a Triton function have no Python types.

import triton
import triton.language as tl

NEVER = tl.constexpr(2**30)
"""More rows than any rank has."""


@triton.jit
def plan_kernel(
    counts_ptr, home_ptr, expert_ptr, rows_ptr, slack,
    R: tl.constexpr, H: tl.constexpr, S: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """`reference.plan` of counts [R, E] -> home [E], and experts and rows of slots [R, S], filled before."""
    rank, expert = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_H)
    place = rank[:, None] * H + expert[None, :]
    known = (rank < R)[:, None] & (expert < H)[None, :]
    home = tl.zeros((BLOCK_R, BLOCK_H), tl.int32)
    for source in range(0, R):
        home += tl.load(counts_ptr + source * (R * H) + place, known, other=0)
    load = tl.sum(home, 1)
    used = tl.where(rank < R, 0, S)
    most = (tl.sum(load, 0) + R - 1) // R + slack
    fullest, source = tl.max(load, 0), tl.argmax(load, 0)
    emptiness = tl.where((used < S) & (load < most), load, NEVER)
    least, target = tl.min(emptiness, 0), tl.argmin(emptiness, 0)
    while (fullest > most) & (least < NEVER):
        of_source = tl.sum(tl.where((rank == source)[:, None], home, 0), 0)
        largest, column = tl.max(of_source, 0), tl.argmax(of_source, 0)
        taken = tl.sum(tl.where(rank == target, used, 0), 0)
        lacks = most - least
        moved = tl.minimum(tl.minimum(lacks, fullest - most), largest)
        runs_out = (lacks - moved).to(tl.int64) * H > (S - taken - 1).to(tl.int64) * most
        moved = tl.where(runs_out, tl.minimum(lacks, largest), moved)
        home = tl.where((rank == source)[:, None] & (expert == column)[None, :], home - moved, home)
        load += tl.where(rank == target, moved, 0) - tl.where(rank == source, moved, 0)
        used += tl.where(rank == target, 1, 0)
        tl.store(expert_ptr + target * S + taken, source * H + column)
        tl.store(rows_ptr + target * S + taken, moved)
        fullest, source = tl.max(load, 0), tl.argmax(load, 0)
        emptiness = tl.where((used < S) & (load < most), load, NEVER)
        least, target = tl.min(emptiness, 0), tl.argmin(emptiness, 0)
    tl.store(home_ptr + place, home, known)


@triton.jit
def split_kernel(
    counts_ptr, home_ptr, expert_ptr, rows_ptr, send_ptr, receive_ptr, own,
    R: tl.constexpr, H: tl.constexpr, S: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """`reference.split` of an expert: rows that rank ``own`` sends to each, and gets from each, [E, R]."""
    expert, rank, slot = tl.program_id(0), tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_S)
    counts = tl.load(counts_ptr + rank * (R * H) + expert, rank < R, other=0)
    known = (rank < R)[:, None] & (slot < S)[None, :]
    at = rank[:, None] * S + slot[None, :]
    here = tl.load(expert_ptr + at, known, other=-1) == expert
    copies = tl.sum(tl.where(here, tl.load(rows_ptr + at, known, other=0), 0), 1)
    copies += tl.where(rank == expert // H, tl.load(home_ptr + expert), 0)
    stays = tl.minimum(counts, copies)
    rest, room = counts - stays, copies - stays
    first, start = tl.cumsum(rest, 0) - rest, tl.cumsum(room, 0) - room
    is_own = rank == own
    own_first, own_rest = tl.sum(tl.where(is_own, first, 0), 0), tl.sum(tl.where(is_own, rest, 0), 0)
    own_start, own_room = tl.sum(tl.where(is_own, start, 0), 0), tl.sum(tl.where(is_own, room, 0), 0)
    sent = tl.minimum(own_first + own_rest, start + room) - tl.maximum(own_first, start)
    got = tl.minimum(first + rest, own_start + own_room) - tl.maximum(first, own_start)
    own_stays = tl.where(is_own, stays, 0)
    tl.store(send_ptr + expert * R + rank, tl.maximum(sent, 0) + own_stays, rank < R)
    tl.store(receive_ptr + expert * R + rank, tl.maximum(got, 0) + own_stays, rank < R)
