"""Sums of received rows, back to the tokens: each rank puts its rows, and sums those of its tokens.

Rows of its own tokens it reads where they are.

Suffixes: T tokens, P ranks, W places of a token, N rows received, D hidden (``columns``). RANKS is P rounded
up to a power of two, ROWS, TOKENS and COLUMNS are the sizes of a tile.
"""

# mypy: allow-untyped-defs, disable-error-code="assignment,index,var-annotated"
# The arguments and tuples of a Triton function have no Python types.

from __future__ import annotations

import triton
import triton.language as tl

NO_END = tl.constexpr(2147483647)


@triton.jit(do_not_specialize=["me", "rows", "block"])
def put_kernel(
    y_ND, sum_ND, arrivals_PP, columns, me, rows, block,
    P: tl.constexpr, RANKS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Copy the live rows of other ranks' tokens; other rows are neither read nor written."""
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
    """The address of what each place of a token adds, 0 where it adds nothing; with K > 0 of weights too.

    With ``staged_PBD`` the blocks of other ranks are here already.
    """
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
    if staged_PBD is not None:
        staged_row = (to * block + row_of_rank).to(tl.int64)
        sums_at = tl.where(row_of_rank < block, staged_PBD.to(tl.int64) + staged_row * row_bytes, sums_at)
    sums_at = tl.where(to == me, y_ND.to(tl.int64) + at * row_bytes, sums_at)
    tl.store(from_TW + place, tl.where(fits, sums_at, 0), place < num_places)
    if K > 0:
        dweight_at = base + dweights_offset + at * (4 * K)
        dweight_at = tl.where(to == me, dweight_NK.to(tl.int64) + at * (4 * K), dweight_at)
        tl.store(dweight_from_TW + place, tl.where(fits, dweight_at, 0), place < num_places)


@triton.jit(do_not_specialize=["tokens"])
def sum_kernel(
    from_TW, x_TD, tokens, columns,
    W: tl.constexpr, AT_ONCE: tl.constexpr, ALIGNMENT: tl.constexpr, TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Add the rows of each token's places, in order, in fp32; AT_ONCE of them are under way at once."""
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
