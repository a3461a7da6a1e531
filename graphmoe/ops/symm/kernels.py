"""Kernels of dispatch and combine over peer memory.

Terms and suffixes as in the package; ``columns`` = D. RANKS is P rounded up to a power of two. A sent row has
a record of 1 + 2 K int32: token, weights, local experts at the receiver; LANES is its padded length.
"""

# mypy: allow-untyped-defs, disable-error-code="assignment,index,var-annotated"
# The arguments and tuples of a Triton function have no Python types.

import triton
import triton.language as tl

# AMD: plain loads see what peers wrote, as a barrier's kernel runs in between. HIP starts and ends kernels
# with fences of device scope, which invalidate and write back every L2 of a device that has several. With one
# (CPX), acquire and release of system scope in the barrier do so (LLVM, AMDGPUUsage, "Memory Model GFX942";
# torch, CUDASymmetricMemory-inl.cuh). A kernel that waited for peers itself would have to load their memory
# with cache_modifier=".cv" (sc0 sc1), as its fence reaches the L2 of its own die only.
NO_END = tl.constexpr(2147483647)


@triton.jit(do_not_specialize=["experts", "num_rows"])
def records_kernel(
    slot_R, counts_P, ends_P, weight_TK, expert_TK, record_R, to_counts_P, experts, num_rows,
    P: tl.constexpr, RANKS: tl.constexpr, W: tl.constexpr, K: tl.constexpr, ETP: tl.constexpr,
    LANES: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Write each sent row's record, and the row count of each rank. With K = 0 a record is only the token."""
    rank = tl.arange(0, RANKS)
    if tl.program_id(0) == 0:
        counts = tl.load(counts_P + rank, rank < P, other=0)
        tl.store(to_counts_P + rank, counts, rank < P)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = (row < num_rows) & (row < tl.load(ends_P + P - 1))
    token = tl.load(slot_R + row, live, other=0) // W
    lane = tl.arange(0, LANES)[None, :]
    value = token[:, None] + tl.zeros([ROWS, LANES], tl.int32)
    if K > 0:
        ends = tl.load(ends_P + rank, rank < P, other=NO_END)
        to = tl.sum((ends[None, :] <= row[:, None]).to(tl.int32), 1)
        of_token = token.to(tl.int64)[:, None] * K + lane - 1
        is_weight, is_number = (lane >= 1) & (lane <= K), (lane > K) & (lane <= 2 * K)
        weight = tl.load(weight_TK + of_token, live[:, None] & is_weight, other=0.0)
        number = tl.load(expert_TK + of_token - K, live[:, None] & is_number, other=-1)
        number -= (to // ETP * experts)[:, None]
        number = tl.where((number >= 0) & (number < experts), number, -1)
        value = tl.where(is_weight, weight.to(tl.int32, bitcast=True), tl.where(is_number, number, value))
    to = record_R + row.to(tl.int64)[:, None] * (1 + 2 * K) + lane
    # in plan order, so that a peer reads contiguous memory
    tl.store(to, value, live[:, None] & (lane < 1 + 2 * K))


@triton.jit(do_not_specialize=["me", "block"])
def pack_kernel(
    x_TD, row_TW, counts_P, ends_P, token_TD, block_PBD, received_ND, tokens, columns, me, block,
    P: tl.constexpr, RANKS: tl.constexpr, W: tl.constexpr, AT_ONCE: tl.constexpr, TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Copy each token to its ranks' blocks, or to ``token_TD`` for a peer to fetch if its block is full."""
    across = tl.cdiv(columns, COLUMNS)
    token = ((tl.program_id(0) // across) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    column = (tl.program_id(0) % across) * COLUMNS + tl.arange(0, COLUMNS)
    is_token, is_column = token < tokens, (column < columns)[None, :]
    rank = tl.arange(0, RANKS)
    ends = tl.load(ends_P + rank, rank < P, other=NO_END)[None, :]
    counts = tl.load(counts_P + rank, rank < P, other=0)[None, :]
    at = token[:, None] * columns + column[None, :]
    x = tl.load(x_TD + at, is_token[:, None] & is_column, other=0.0)
    # rows for this rank go straight to received_ND
    own = tl.full([TOKENS], -1, tl.int32)
    is_behind = tl.zeros([TOKENS], tl.int32)
    for first in range(0, W, AT_ONCE):
        targets = ()
        for w in tl.static_range(min(W, AT_ONCE)):  # before the first store, which no load may overtake
            is_place = is_token & (first + w < W)
            row = tl.load(row_TW + token * W + first + w, is_place, other=-1)
            earlier = ends <= row[:, None]
            to = tl.sum(earlier.to(tl.int32), 1)
            row_of_rank = row - tl.sum(tl.where(earlier, counts, 0), 1)
            packed = (row >= 0) & (row_of_rank < block)
            is_behind = is_behind | ((row >= 0) & (row_of_rank >= block)).to(tl.int32)
            own = tl.where(packed & (to == me), me * block + row_of_rank, own)
            target = tl.where(packed & (to != me), to * block + row_of_rank, -1)
            targets = targets + (target.to(tl.int64),)
        for w in tl.static_range(len(targets)):
            to = block_PBD + targets[w][:, None] * columns + column[None, :]
            tl.store(to, x, (targets[w] >= 0)[:, None] & is_column)
    to = received_ND + own.to(tl.int64)[:, None] * columns + column[None, :]
    tl.store(to, x, (own >= 0)[:, None] & is_column)
    tl.store(token_TD + at, x, (is_behind > 0)[:, None] & is_column)


@triton.jit(do_not_specialize=["me", "rows", "block"])
def receive_kernel(
    address_P, arrivals_PP, from_N, weight_NK, number_NK, counts_offset, records_offset, tokens_offset,
    row_bytes, me, rows, block,
    P: tl.constexpr, RANKS: tl.constexpr, K: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Write each received row's peer address (0: unused), all counts; if K > 0 weights and experts."""
    rank = tl.arange(0, RANKS)
    base = tl.load(address_P + rank, rank < P, other=0)
    counts_at = (base + counts_offset).to(arrivals_PP.dtype)
    known = (rank < P)[:, None] & (rank < P)[None, :]
    counts = tl.load(counts_at[:, None] + rank[None, :], known, other=0)
    if tl.program_id(0) == 0:
        tl.store(arrivals_PP + rank[:, None] * P + rank[None, :], counts, known)
    arrived = tl.sum(tl.where(rank[None, :] == me, counts, 0), 1)
    first_record = tl.sum(tl.where(rank[None, :] < me, counts, 0), 1)
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    source, row = _source_of(n, arrived, block, P)
    is_source = source[:, None] == rank[None, :]
    live = (n < rows) & (row < tl.sum(tl.where(is_source, arrived[None, :], 0), 1))
    base = tl.sum(tl.where(is_source, base[None, :], 0), 1)
    record = row + tl.sum(tl.where(is_source, first_record[None, :], 0), 1)
    record_at = (base + records_offset + record.to(tl.int64) * (4 + 8 * K)).to(arrivals_PP.dtype)
    lane = tl.arange(0, LANES)[None, :]
    value = tl.load(record_at[:, None] + lane, live[:, None] & (lane < 1 + 2 * K), other=-1)
    token = tl.sum(tl.where(lane == 0, value, 0), 1).to(tl.int64)
    tl.store(from_N + n, tl.where(live, base + tokens_offset + token * row_bytes, 0), n < rows)
    if K > 0:
        is_weight, is_number = (lane >= 1) & (lane <= K), (lane > K) & (lane <= 2 * K)
        to = n.to(tl.int64)[:, None] * K + lane - 1
        tl.store(weight_NK + to, value.to(tl.float32, bitcast=True), live[:, None] & is_weight)
        tl.store(number_NK + to - K, value, (n < rows)[:, None] & is_number)


@triton.jit
def _source_of(n, arrived, block, P: tl.constexpr):
    rest = tl.maximum(arrived - block, 0)
    ends = tl.cumsum(rest, 0)[None, :]
    behind = n - P * block
    earlier = ends <= behind[:, None]
    source = tl.sum(earlier.to(tl.int32), 1)
    row = behind - tl.sum(tl.where(earlier, rest[None, :], 0), 1) + block
    divisor = tl.maximum(block, 1)
    return tl.where(behind < 0, n // divisor, source), tl.where(behind < 0, n % divisor, row)


@triton.jit(do_not_specialize=["me", "rows", "block"])
def pull_kernel(
    from_N, received_ND, arrivals_PP, columns, me, rows, block,
    P: tl.constexpr, RANKS: tl.constexpr, ALIGNMENT: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Fetch the received rows beyond the blocks from the peer addresses ``from_N``."""
    rank = tl.arange(0, RANKS)
    arrived = tl.load(arrivals_PP + rank * P + me, rank < P, other=0)
    first = P * block
    live_rows = tl.minimum(tl.sum(tl.maximum(arrived - block, 0), 0), rows - first)
    stretch = tl.cdiv(tl.cdiv(live_rows, ROWS), P)
    across = tl.cdiv(columns, COLUMNS)
    for i in range(tl.program_id(0), stretch * P * across, tl.num_programs(0)):
        turn = i // across
        # each rank starts at a different source, to spread reads over ranks
        tile = (turn + me) % P * stretch + turn // P
        row = tile * ROWS + tl.arange(0, ROWS)
        column = i % across * COLUMNS + tl.arange(0, COLUMNS)
        live = row < live_rows
        # one load of addresses, then the rows
        at = tl.multiple_of(tl.load(from_N + first + row, live, other=0).to(received_ND.dtype), ALIGNMENT)
        is_value = live[:, None] & (column < columns)[None, :]
        x = tl.load(at[:, None] + column[None, :], is_value)
        to = received_ND + (first + row).to(tl.int64)[:, None] * columns + column[None, :]
        tl.store(to, x, is_value)


@triton.jit(do_not_specialize=["me", "rows", "block"])
def put_kernel(
    y_ND, sum_ND, arrivals_PP, columns, me, rows, block,
    P: tl.constexpr, RANKS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Copy the outputs for other ranks' tokens to ``sum_ND`` in own peer memory, for those ranks to read."""
    rank = tl.arange(0, RANKS)
    arrived = tl.load(arrivals_PP + rank * P + me, rank < P, other=0)
    rest = tl.maximum(arrived - block, 0)
    end = tl.minimum(P * block + tl.sum(rest, 0), rows)
    own = P * block + tl.sum(tl.where(rank < me, rest, 0), 0)
    own_end = own + tl.sum(tl.where(rank == me, rest, 0), 0)
    arrived = tl.where(rank == me, 0, arrived)
    across = tl.cdiv(columns, COLUMNS)
    divisor = tl.maximum(block, 1)
    for i in range(tl.program_id(0), tl.cdiv(end, ROWS) * across, tl.num_programs(0)):
        row = i // across * ROWS + tl.arange(0, ROWS)
        column = i % across * COLUMNS + tl.arange(0, COLUMNS)
        is_block = (row // divisor)[:, None] == rank[None, :]
        in_block = tl.sum(tl.where(is_block, arrived[None, :], 0), 1)
        is_rest = (row >= P * block) & ((row < own) | (row >= own_end))
        is_first = (row < P * block) & (row % divisor < in_block)
        live = (row < end) & (is_rest | is_first)
        at = row.to(tl.int64)[:, None] * columns + column[None, :]
        is_value = live[:, None] & (column < columns)[None, :]
        tl.store(sum_ND + at, tl.load(y_ND + at, is_value), is_value)


@triton.jit(do_not_specialize=["me", "rows", "block", "num_places"])
def way_back_kernel(
    address_P, row_TW, ends_P, arrivals_PP, staged_PBD, y_ND, dweight_NK, from_TW, dweight_from_TW,
    sums_offset, dweights_offset, row_bytes, me, rows, block, num_places,
    P: tl.constexpr, RANKS: tl.constexpr, K: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    """Write the address of the output, and of the weight gradient, for each sent row [T, W]; 0 for none."""
    rank = tl.arange(0, RANKS)
    known = rank < P
    ends = tl.load(ends_P + rank, known, other=NO_END)[None, :]
    base = tl.load(address_P + rank, known, other=0)[None, :]
    sent = tl.load(arrivals_PP + me * P + rank, known, other=0)[None, :]
    is_earlier = (rank < me)[:, None] & known[None, :]
    arrivals = tl.load(arrivals_PP + rank[:, None] * P + rank[None, :], is_earlier, other=0)
    rest_before = tl.sum(tl.maximum(arrivals - block, 0), 0)[None, :]
    place = (tl.program_id(0) * PLACES + tl.arange(0, PLACES)).to(tl.int64)
    row = tl.load(row_TW + place, place < num_places, other=-1)
    earlier = ends <= row[:, None]
    to = tl.sum(earlier.to(tl.int32), 1)
    row_of_rank = row - tl.sum(tl.where(earlier, sent, 0), 1)
    is_rank = to[:, None] == rank[None, :]
    base = tl.sum(tl.where(is_rank, base, 0), 1)
    rest = P * block + tl.sum(tl.where(is_rank, rest_before, 0), 1) + row_of_rank - block
    at = tl.where(row_of_rank < block, me * block + row_of_rank, rest).to(tl.int64)
    fits = (row >= 0) & (at < rows)
    sums_at = base + sums_offset + at * row_bytes
    # blocks of other ranks have been copied already
    if staged_PBD is not None:
        staged_row = (to * block + row_of_rank).to(tl.int64)
        sums_at = tl.where(row_of_rank < block, staged_PBD.to(tl.int64) + staged_row * row_bytes, sums_at)
    # this rank's own sums are read where the experts wrote them
    sums_at = tl.where(to == me, y_ND.to(tl.int64) + at * row_bytes, sums_at)
    tl.store(from_TW + place, tl.where(fits, sums_at, 0), place < num_places)
    if K > 0:
        dweight_at = base + dweights_offset + at * (4 * K)
        dweight_at = tl.where(to == me, dweight_NK.to(tl.int64) + at * (4 * K), dweight_at)
        tl.store(dweight_from_TW + place, tl.where(fits, dweight_at, 0), place < num_places)


@triton.jit(do_not_specialize=["me"])
def sum_parts_kernel(address_P, part, offset, me, length, P: tl.constexpr, ELEMENTS: tl.constexpr):
    """Sum over ranks the ``length`` elements of this rank in each P * length of their memory, in fp32."""
    tiles = tl.cdiv(length, ELEMENTS)  # on one axis with the groups: others have at most 65,535 programs
    at = tl.program_id(0) % tiles * ELEMENTS + tl.arange(0, ELEMENTS)
    group, is_element = (tl.program_id(0) // tiles).to(tl.int64), at < length
    total = tl.zeros([ELEMENTS], tl.float32)
    for p in tl.static_range(P):
        base = tl.multiple_of((tl.load(address_P + p) + offset).to(part.dtype), 16)
        x = tl.load(base + (group * P + me) * length + at, is_element, other=0.0)
        total += x.to(tl.float32)
    tl.store(part + group * length + at, total.to(part.dtype.element_ty), is_element)


@triton.jit(do_not_specialize=["tokens"])
def sum_kernel(
    from_TW, x_TD, tokens, columns,
    W: tl.constexpr, AT_ONCE: tl.constexpr, ALIGNMENT: tl.constexpr, TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Sum the rows at each token's W addresses, in order, in fp32, with AT_ONCE loads in flight."""
    across = tl.cdiv(columns, COLUMNS)
    for i in range(tl.program_id(0), tl.cdiv(tokens, TOKENS) * across, tl.num_programs(0)):
        token = (i // across * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
        column = i % across * COLUMNS + tl.arange(0, COLUMNS)
        is_token, is_column = token < tokens, (column < columns)[None, :]
        total = tl.zeros([TOKENS, COLUMNS], tl.float32)
        for first in range(0, W, AT_ONCE):
            addresses, terms = (), ()
            for w in tl.static_range(min(W, AT_ONCE)):
                is_place = is_token & (first + w < W)
                addresses = addresses + (tl.load(from_TW + token * W + first + w, is_place, other=0),)
            for w in tl.static_range(len(addresses)):
                at = tl.multiple_of(addresses[w].to(x_TD.dtype), ALIGNMENT)
                is_value = (addresses[w] != 0)[:, None] & is_column
                terms = terms + (tl.load(at[:, None] + column[None, :], is_value, other=0.0),)
            for w in tl.static_range(len(terms)):
                total += terms[w].to(tl.float32)
        to = x_TD + token[:, None] * columns + column[None, :]
        tl.store(to, total.to(x_TD.dtype.element_ty), is_token[:, None] & is_column)
