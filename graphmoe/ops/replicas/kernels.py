"""Triton kernels of replicas.

Suffixes: R ranks, H experts of a rank, E experts, S replica slots. Sizes are padded to powers of two.
"""

# mypy: allow-untyped-defs
# The arguments of a Triton function have no Python types.

import triton
import triton.language as tl

NEVER = tl.constexpr(2**30)  # more rows than any rank has


@triton.jit
def plan_kernel(
    counts_ptr, home_ptr, expert_ptr, rows_ptr, slack,
    R: tl.constexpr, H: tl.constexpr, S: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Compute the plan of `reference.plan` in one program; the caller fills experts with -1, rows with 0."""
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


@triton.jit(do_not_specialize=["own"])
def places_kernel(
    counts_ptr, home_ptr, expert_ptr, rows_ptr, until_ptr, place_ptr, own,
    R: tl.constexpr, H: tl.constexpr, S: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Compute the results of `ops.replicas.places` for rank ``own``; a program per expert."""
    expert, rank, slot = tl.program_id(0), tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_S)
    counts = tl.load(counts_ptr + rank * (R * H) + expert, rank < R, other=0)
    known = (rank < R)[:, None] & (slot < S)[None, :]
    at = rank[:, None] * S + slot[None, :]
    here = tl.load(expert_ptr + at, known, other=-1) == expert
    copies = tl.sum(tl.where(here, tl.load(rows_ptr + at, known, other=0), 0), 1)
    owns = rank == expert // H
    copies += tl.where(owns, tl.load(home_ptr + expert), 0)
    stays = tl.minimum(counts, copies)
    rest, room = counts - stays, copies - stays
    first, start = tl.cumsum(rest, 0) - rest, tl.cumsum(room, 0) - room
    is_own = rank == own
    own_first, own_rest = tl.sum(tl.where(is_own, first, 0), 0), tl.sum(tl.where(is_own, rest, 0), 0)
    sent = tl.minimum(own_first + own_rest, start + room) - tl.maximum(own_first, start)
    sent = tl.maximum(sent, 0) + tl.where(is_own, stays, 0)
    tl.store(until_ptr + expert * R + rank, tl.cumsum(sent, 0), rank < R)
    held = tl.sum(tl.where(here, slot[None, :] + 1, 0), 1)
    local = tl.where(owns, expert % H, H + held - 1)
    place = tl.where(owns | (held > 0), rank * (H + S) + local, -1)
    tl.store(place_ptr + expert * R + rank, place, rank < R)


@triton.jit(do_not_specialize=["rank"])
def put_kernel(
    from_HN, to_HN, expert_RS, words, rank,
    H: tl.constexpr, RS: tl.constexpr, BLOCK_RS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    held = _held(expert_RS, rank, H, RS, BLOCK_RS)
    if tl.max(held, 0) >= 0:
        for expert in range(0, H):
            if tl.max((held == expert).to(tl.int32), 0) > 0:
                first = tl.cast(words, tl.int64) * expert
                for start in range(tl.program_id(0) * TILE, words, tl.num_programs(0) * TILE):
                    at = start + tl.arange(0, TILE)
                    tl.store(to_HN + first + at, tl.load(from_HN + first + at, at < words), at < words)


@triton.jit(do_not_specialize=["rank"])
def pull_kernel(
    address_R, to_SN, expert_RS, offset, words, rank,
    H: tl.constexpr, S: tl.constexpr, BLOCK_S: tl.constexpr, TILE: tl.constexpr, ALIGNMENT: tl.constexpr,
):  # fmt: skip
    """Fetch this rank's replica weights, ``words`` each, from ``offset`` in the owners' peer memory."""
    word_bytes: tl.constexpr = to_SN.dtype.element_ty.primitive_bitwidth // 8
    lane = tl.arange(0, BLOCK_S)
    held = tl.load(expert_RS + rank * S + lane, lane < S, other=-1) >= 0
    for i in range(0, S if tl.max(held.to(tl.int32), 0) > 0 else 0):
        slot = (i + rank) % S
        expert = tl.load(expert_RS + rank * S + slot)
        if expert >= 0:
            # ranks start at different slots, to spread reads over the owners
            base = tl.load(address_R + expert // H) + offset
            base += tl.cast(words, tl.int64) * word_bytes * (expert % H)
            source = tl.multiple_of(base.to(to_SN.dtype), ALIGNMENT)
            to = to_SN + tl.cast(words, tl.int64) * slot
            for start in range(tl.program_id(0) * TILE, words, tl.num_programs(0) * TILE):
                at = start + tl.arange(0, TILE)
                tl.store(to + at, tl.load(source + at, at < words), at < words)


@triton.jit(do_not_specialize=["rank"])
def home_kernel(
    address_R, made_SN, total_HN, expert_RS, offset, numbers, rank,
    H: tl.constexpr, S: tl.constexpr, RS: tl.constexpr, BLOCK_RS: tl.constexpr, TILE: tl.constexpr,
    ALIGNMENT: tl.constexpr,
):  # fmt: skip
    """Add replica gradients, at ``offset`` in all peer memory, to own totals, in fp32 and rank order."""
    number_bytes: tl.constexpr = made_SN.dtype.element_ty.primitive_bitwidth // 8
    held, lane = _held(expert_RS, rank, H, RS, BLOCK_RS), tl.arange(0, BLOCK_RS)
    if tl.max(held, 0) >= 0:
        for expert in range(0, H):
            first = tl.min(tl.where(held == expert, lane, BLOCK_RS), 0)
            if first < BLOCK_RS:
                total_N = total_HN + tl.cast(numbers, tl.int64) * expert
                for start in range(tl.program_id(0) * TILE, numbers, tl.num_programs(0) * TILE):
                    at = start + tl.arange(0, TILE)
                    total = tl.load(total_N + at, at < numbers, other=0.0).to(tl.float32)
                    place = first
                    while place < BLOCK_RS:
                        base = tl.load(address_R + place // S) + offset
                        base += tl.cast(numbers, tl.int64) * number_bytes * (place % S)
                        made = tl.multiple_of(base.to(made_SN.dtype), ALIGNMENT)
                        total += tl.load(made + at, at < numbers, other=0.0).to(tl.float32)
                        place = tl.min(tl.where((held == expert) & (lane > place), lane, BLOCK_RS), 0)
                    tl.store(total_N + at, total.to(total_HN.dtype.element_ty), at < numbers)


@triton.jit
def _held(expert_RS, rank, H: tl.constexpr, RS: tl.constexpr, BLOCK_RS: tl.constexpr):
    # local index of each slot's expert, -1 if not owned here
    lane = tl.arange(0, BLOCK_RS)
    expert = tl.load(expert_RS + lane, lane < RS, other=-1) - rank * H
    return tl.where((expert >= 0) & (expert < H), expert, -1)
