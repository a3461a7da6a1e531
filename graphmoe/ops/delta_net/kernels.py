"""Triton kernels of `delta_net` by chunks of C positions: the states between chunks are the only recurrence.

In a chunk that starts with the state S, with G the decay from its start, D_ij the decay from j to i <= i and
(I + A) T = I, A_ij = beta_i D_ij k_i k_j for j < i: u = T beta (v - G k S), out = scale G q S + P u with
P_ij = scale D_ij q_i k_j, and the state behind it is D S + sum_j D_j k_j u_j. A decay to another document is
0. (Gated Delta Networks, arXiv 2412.06464, section 3.3; the inverse as in arXiv 2406.06484, section 3.2.)

Logarithms of decays are summed without differences of sums, which lose the small ones. Sums are fp32 and
results deterministic: no kernel has atomics. A program is one value head; K and W are sizes of a key and a
value head, BW columns of the latter.
"""

# mypy: allow-untyped-defs
# The arguments of a Triton function have no Python types.

import triton
import triton.language as tl


@triton.jit
def _load(ptr, row, stride, column, inside):
    at = row.to(tl.int64)[:, None] * stride + column[None, :]
    return tl.load(ptr + at, mask=inside[:, None], other=0.0)


@triton.jit
def _store(ptr, row, stride, column, inside, x):
    at = row.to(tl.int64)[:, None] * stride + column[None, :]
    tl.store(ptr + at, x.to(ptr.dtype.element_ty), mask=inside[:, None])


@triton.jit
def _square(ptr, C: tl.constexpr):
    return ptr + tl.arange(0, C)[:, None] * C + tl.arange(0, C)[None, :]


@triton.jit
def _numbers(ptr, position, inside, V: tl.constexpr):
    return tl.load(ptr + position * V, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _first_of(first_ptr, batch, position, S, HAS_FIRST: tl.constexpr):
    if HAS_FIRST:
        return tl.load(first_ptr + batch * S + tl.minimum(position, S - 1))
    return position * 0


@triton.jit
def _decays(g, position, first, C: tl.constexpr):
    """Return the decay from column to row, 0 between documents and above the diagonal."""
    row, column = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    between = tl.cumsum(tl.where(row > column, g[:, None], 0.0), 0)
    same = (row >= column) & (position[None, :] >= first[:, None])
    return tl.where(same, tl.exp(between), 0.0)


@triton.jit
def _chunk(
    g_ptr, beta_ptr, first_ptr, batch, head, chunk, S,
    V: tl.constexpr, C: tl.constexpr, HAS_FIRST: tl.constexpr,
):  # fmt: skip
    """Return a chunk's positions, flags of those inside, rows, logarithms of decays, and betas; then decays:
    of the state before it to each position, of that state to the chunk's end, of each position to the end.
    """
    start = chunk * C
    position = start + tl.arange(0, C)
    inside, row = position < S, (batch * S + position) * V + head
    g_ptr += batch * S * V + head
    g = _numbers(g_ptr, position, inside, V)
    beta = _numbers(beta_ptr + batch * S * V + head, position, inside, V)
    end = tl.minimum(start + C, S) - 1
    # a product, so that a decay that is not finite is seen even if there is no state
    before = tl.exp(tl.cumsum(g, 0)) * (_first_of(first_ptr, batch, position, S, HAS_FIRST) < start)
    first_of_end = _first_of(first_ptr, batch, end, S, HAS_FIRST)
    through = tl.exp(tl.sum(g, 0)) * (first_of_end < start)
    later = _numbers(g_ptr, position + 1, position < end, V)
    after = tl.exp(tl.cumsum(later, 0, reverse=True))
    return position, inside, row, g, beta, before, through, tl.where(position >= first_of_end, after, 0.0)


@triton.jit
def chunks_kernel(
    q_ptr, k_ptr, g_ptr, beta_ptr, first_ptr, inverse_ptr, scores_ptr,
    q_batch, q_stride, q_head, k_batch, k_stride, k_head, S, scale,
    H: tl.constexpr, V: tl.constexpr, K: tl.constexpr, C: tl.constexpr, LEVELS: tl.constexpr,
    HAS_FIRST: tl.constexpr, PRECISION: tl.constexpr, OF_INVERSE: tl.constexpr,
):  # fmt: skip
    """Store T and P of each chunk, [B, V, chunks, C, C] in the dtype of k."""
    head, chunk, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    position = chunk * C + tl.arange(0, C)
    inside, column = position < S, tl.arange(0, K)
    k = _load(k_ptr + batch * k_batch + head // (V // H) * k_head, position, k_stride, column, inside)
    q = _load(q_ptr + batch * q_batch + head // (V // H) * q_head, position, q_stride, column, inside)
    g = _numbers(g_ptr + batch * S * V + head, position, inside, V)
    beta = _numbers(beta_ptr + batch * S * V + head, position, inside, V)
    decay = _decays(g, position, _first_of(first_ptr, batch, position, S, HAS_FIRST), C)
    at = ((batch * V + head) * tl.num_programs(1) + chunk) * C * C
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * decay * scale
    tl.store(_square(scores_ptr + at, C), scores.to(scores_ptr.dtype.element_ty))
    rest = tl.dot(k, tl.trans(k), input_precision=PRECISION) * decay * beta[:, None]
    # Blocks on the diagonal are inverted, from 1 x 1 to the whole: with inverses T of two neighbours and R
    # below the diagonal between them, -T R T is the inverse there. No intermediate exceeds the result, as
    # powers of A do if keys are alike.
    row, column = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    inverse = tl.where(row == column, 1.0, tl.where((row // 2 == column // 2) & (row > column), -rest, 0.0))
    for level in tl.static_range(1, LEVELS):
        below = (row >> level > column >> level) & (row >> (level + 1) == column >> (level + 1))
        product = tl.dot(tl.where(below, rest, 0.0), inverse, input_precision=OF_INVERSE)
        inverse -= tl.dot(inverse, product, input_precision=OF_INVERSE)
    tl.store(_square(inverse_ptr + at, C), inverse.to(inverse_ptr.dtype.element_ty))


@triton.jit
def states_kernel(
    q_ptr, k_ptr, v_ptr, g_ptr, beta_ptr, first_ptr, inverse_ptr, scores_ptr, out_ptr, state_ptr, step_ptr,
    q_batch, q_stride, q_head, k_batch, k_stride, k_head, v_batch, v_stride, v_head, S, scale,
    H: tl.constexpr, V: tl.constexpr, K: tl.constexpr, W: tl.constexpr, BW: tl.constexpr, C: tl.constexpr,
    HAS_FIRST: tl.constexpr, KEEPS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Store the result; if KEEPS, instead the state before each chunk and u of each position."""
    head, batch = tl.program_id(1), tl.program_id(2).to(tl.int64)
    column, of_key, chunks = tl.program_id(0) * BW + tl.arange(0, BW), tl.arange(0, K), tl.cdiv(S, C)
    q_ptr += batch * q_batch + head // (V // H) * q_head
    k_ptr += batch * k_batch + head // (V // H) * k_head
    v_ptr += batch * v_batch + head * v_head
    kind = k_ptr.dtype.element_ty
    state = tl.zeros([K, BW], tl.float32)
    for chunk in range(chunks):
        place = (batch * V + head) * chunks + chunk
        position, inside, row, g, beta, before, through, after = _chunk(
            g_ptr, beta_ptr, first_ptr, batch, head, chunk, S, V, C, HAS_FIRST
        )
        k = _load(k_ptr, position, k_stride, of_key, inside)
        v = _load(v_ptr, position, v_stride, column, inside).to(tl.float32)
        rounded = state.to(kind)
        known = tl.dot(k, rounded, input_precision=PRECISION)
        error = (beta[:, None] * (v - before[:, None] * known)).to(kind)
        step = tl.dot(tl.load(_square(inverse_ptr + place * C * C, C)), error, input_precision=PRECISION)
        if KEEPS:
            _store(state_ptr + place * K * W, of_key, W, column, of_key < K, rounded)
            _store(step_ptr, row, W, column, inside, step)
        else:
            q = _load(q_ptr, position, q_stride, of_key, inside)
            out = tl.dot(q, rounded, input_precision=PRECISION) * (scale * before)[:, None]
            scores = tl.load(_square(scores_ptr + place * C * C, C))
            out = tl.dot(scores, step.to(kind), out, input_precision=PRECISION)
            _store(out_ptr, row, W, column, inside, out)
        kept = (after[:, None] * step).to(kind)
        state = tl.dot(tl.trans(k), kept, through * state, input_precision=PRECISION)


@triton.jit
def d_states_kernel(
    d_out_ptr, q_ptr, k_ptr, g_ptr, beta_ptr, first_ptr, inverse_ptr, scores_ptr, d_state_ptr, d_error_ptr,
    d_batch, d_stride, d_head, q_batch, q_stride, q_head, k_batch, k_stride, k_head, S, scale,
    H: tl.constexpr, V: tl.constexpr, K: tl.constexpr, W: tl.constexpr, BW: tl.constexpr, C: tl.constexpr,
    HAS_FIRST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Store gradients of the state behind each chunk and of beta (v - G k S), from the last chunk on."""
    head, batch = tl.program_id(1), tl.program_id(2).to(tl.int64)
    column, of_key, chunks = tl.program_id(0) * BW + tl.arange(0, BW), tl.arange(0, K), tl.cdiv(S, C)
    d_out_ptr += batch * d_batch + head * d_head
    q_ptr += batch * q_batch + head // (V // H) * q_head
    k_ptr += batch * k_batch + head // (V // H) * k_head
    kind = k_ptr.dtype.element_ty
    d_state = tl.zeros([K, BW], tl.float32)
    for number in range(chunks):
        chunk = chunks - 1 - number
        place = (batch * V + head) * chunks + chunk
        position, inside, row, g, beta, before, through, after = _chunk(
            g_ptr, beta_ptr, first_ptr, batch, head, chunk, S, V, C, HAS_FIRST
        )
        q = _load(q_ptr, position, q_stride, of_key, inside)
        k = _load(k_ptr, position, k_stride, of_key, inside)
        d_out = _load(d_out_ptr, position, d_stride, column, inside)
        rounded = d_state.to(kind)
        _store(d_state_ptr + place * K * W, of_key, W, column, of_key < K, rounded)
        d_step = after[:, None] * tl.dot(k, rounded, input_precision=PRECISION)
        scores = tl.load(_square(scores_ptr + place * C * C, C))
        d_step = tl.dot(tl.trans(scores), d_out, d_step, input_precision=PRECISION)
        inverse = tl.load(_square(inverse_ptr + place * C * C, C))
        d_error = tl.dot(tl.trans(inverse), d_step.to(kind), input_precision=PRECISION)
        _store(d_error_ptr, row, W, column, inside, d_error)
        of_out = ((scale * before)[:, None] * d_out).to(kind)
        of_error = ((-before * beta)[:, None] * d_error).to(kind)
        d_state = tl.dot(tl.trans(q), of_out, through * d_state, input_precision=PRECISION)
        d_state = tl.dot(tl.trans(k), of_error, d_state, input_precision=PRECISION)


@triton.jit
def gradients_kernel(
    d_out_ptr, q_ptr, k_ptr, v_ptr, g_ptr, beta_ptr, first_ptr, scores_ptr, state_ptr, step_ptr, d_state_ptr,
    d_error_ptr, dq_ptr, dk_ptr, dv_ptr, dg_ptr, d_beta_ptr,
    d_batch, d_stride, d_head, q_batch, q_stride, q_head, k_batch, k_stride, k_head,
    v_batch, v_stride, v_head, S, scale,
    H: tl.constexpr, V: tl.constexpr, K: tl.constexpr, W: tl.constexpr, BK: tl.constexpr, BW: tl.constexpr,
    C: tl.constexpr, HAS_FIRST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Store gradients of a chunk and value head; those of q and k, [B, S, V, K], are summed by the launch."""
    head, chunk, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    place = (batch * V + head) * tl.num_programs(1) + chunk
    position, inside, at, g, beta, before, through, after = _chunk(
        g_ptr, beta_ptr, first_ptr, batch, head, chunk, S, V, C, HAS_FIRST
    )
    d_out_ptr += batch * d_batch + head * d_head
    q_ptr += batch * q_batch + head // (V // H) * q_head
    k_ptr += batch * k_batch + head // (V // H) * k_head
    v_ptr += batch * v_batch + head * v_head
    state_ptr += place * K * W
    d_state_ptr += place * K * W
    kind = k_ptr.dtype.element_ty
    d_scores, d_rest = tl.zeros([C, C], tl.float32), tl.zeros([C, C], tl.float32)
    d_beta = tl.zeros([C], tl.float32)
    for left in range(0, W, BW):
        column = left + tl.arange(0, BW)
        d_error = _load(d_error_ptr, at, W, column, inside)
        v = _load(v_ptr, position, v_stride, column, inside)
        d_beta += tl.sum(d_error.to(tl.float32) * v, 1)
        _store(dv_ptr, at, W, column, inside, beta[:, None] * d_error)
        step = tl.trans(_load(step_ptr, at, W, column, inside))
        d_out = _load(d_out_ptr, position, d_stride, column, inside)
        d_scores = tl.dot(d_out, step, d_scores, input_precision=PRECISION)
        d_rest = tl.dot(d_error, step, d_rest, input_precision=PRECISION)
    # gradients of q k and of k k, and of the logarithms of the decays between two positions
    first = _first_of(first_ptr, batch, position, S, HAS_FIRST)
    decay = _decays(g, position, first, C)
    whole = _load(k_ptr, position, k_stride, tl.arange(0, K), inside)
    products = tl.dot(whole, tl.trans(whole), input_precision=PRECISION)
    below = tl.arange(0, C)[:, None] > tl.arange(0, C)[None, :]
    same = position[None, :] >= first[:, None]
    d_rest = tl.where(below & same, -d_rest * decay, 0.0)
    d_beta += tl.sum(d_rest * products, 1)
    d_rest *= beta[:, None]
    scores = tl.load(_square(scores_ptr + place * C * C, C)).to(tl.float32)
    d_decay = tl.where(below & same, d_scores * scores, 0.0) + d_rest * products
    dg = tl.sum(tl.where(below, tl.cumsum(d_decay, 0, reverse=True), 0.0), 1)
    d_scores = tl.where((tl.trans(below) == 0) & same, d_scores * decay * scale, 0.0).to(kind)
    d_rest = (d_rest + tl.trans(d_rest)).to(kind)
    d_before, d_after = tl.zeros([C], tl.float32), tl.zeros([C], tl.float32)
    d_through = tl.zeros([BW], tl.float32)
    for top in range(0, K, BK):
        of_key = top + tl.arange(0, BK)
        q = _load(q_ptr, position, q_stride, of_key, inside)
        k = _load(k_ptr, position, k_stride, of_key, inside)
        of_out, of_error = tl.zeros([C, BK], tl.float32), tl.zeros([C, BK], tl.float32)
        of_step = tl.zeros([C, BK], tl.float32)
        for left in range(0, W, BW):
            column = left + tl.arange(0, BW)
            state = _load(state_ptr, of_key, W, column, of_key < K)
            d_state = _load(d_state_ptr, of_key, W, column, of_key < K)
            d_through += tl.sum(state.to(tl.float32) * d_state, 0)
            d_out = _load(d_out_ptr, position, d_stride, column, inside)
            of_out = tl.dot(d_out, tl.trans(state), of_out, input_precision=PRECISION)
            d_error = _load(d_error_ptr, at, W, column, inside)
            of_error = tl.dot(d_error, tl.trans(state), of_error, input_precision=PRECISION)
            step = _load(step_ptr, at, W, column, inside)
            of_step = tl.dot(step, tl.trans(d_state), of_step, input_precision=PRECISION)
        known = before * tl.sum(k * of_error, 1)
        d_beta -= known
        d_before += scale * before * tl.sum(q * of_out, 1) - beta * known
        d_after += after * tl.sum(k * of_step, 1)
        dq = tl.dot(d_scores, k, of_out * (scale * before)[:, None], input_precision=PRECISION)
        dk = after[:, None] * of_step - (before * beta)[:, None] * of_error
        dk = tl.dot(d_rest, k, dk, input_precision=PRECISION)
        dk = tl.dot(tl.trans(d_scores), q, dk, input_precision=PRECISION)
        _store(dq_ptr, at, K, of_key, inside, dq)
        _store(dk_ptr, at, K, of_key, inside, dk)
    dg += tl.cumsum(d_before, 0, reverse=True) + through * tl.sum(d_through, 0)
    dg += tl.cumsum(d_after, 0) - d_after
    tl.store(dg_ptr + at, dg.to(dg_ptr.dtype.element_ty), mask=inside)
    tl.store(d_beta_ptr + at, d_beta.to(d_beta_ptr.dtype.element_ty), mask=inside)
