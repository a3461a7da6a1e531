"""fuse_permutation: every spelling of plan, gather and return becomes three operations; what stays."""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from graphmoe.ops.grouped_mm import grouped_mm
from graphmoe.ops.permute import permute, routing_plan, unpermute
from graphmoe.passes.base import MadeBy, Rewrites
from graphmoe.passes.fuse_permutation import fuse_permutation
from tests.passes.blocks import DTYPES, ROUTINGS, D, E, K, R, T, assert_left, experts_of, random, traced

ops = torch.ops.graphmoe
MOVES = {"sort", "index", "index_select", "gather", "scatter", "index_put", "index_add", "histc"}
MOVES |= {"scatter_add"}


def histogram(ids, base=0, step=1):
    counts, ones = torch.full((E,), base, dtype=torch.int32), torch.full((R,), step, dtype=torch.int32)
    return counts.scatter_add(0, ids, ones)


def inverted(order, rows=None):
    return torch.zeros_like(order).scatter(0, order, torch.arange(R) if rows is None else rows)


def put_index(order):
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(R)
    return inverse


def columns(index, width=D):
    return index.unsqueeze(1).expand(-1, width)


COUNTS = {
    "scatter_add": lambda ids, ordered, order: histogram(ids),
    "histc": lambda ids, ordered, order: torch.histc(ordered.float(), bins=E, min=0, max=E - 1),
    "bincount": lambda ids, ordered, order: torch.bincount(ids, minlength=E),
    "of_sorted": lambda ids, ordered, order: histogram(ids[order]),
}
INVERSES = {"scatter": inverted, "index_put": put_index, "argsort": lambda order: order.argsort()}
GATHERS = {
    "divide": lambda x, order: x[order // K],
    "floor": lambda x, order: x[torch.div(order, K, rounding_mode="floor")],
    "table": lambda x, order: x[torch.arange(T).repeat_interleave(K)[order]],
    "expanded": lambda x, order: x[torch.arange(T).unsqueeze(1).expand(T, K).reshape(-1)[order]],
    "index_select": lambda x, order: x.index_select(0, order // K),
    "gather": lambda x, order: x.gather(0, columns(order // K)),
}
RETURNS = {  # y, weights [T, K] and [R, 1], order, inverse
    "plain": lambda y, w, of_rows, order, inverse: by_token(y, inverse).sum(dim=1),
    "keepdim": lambda y, w, of_rows, order, inverse: by_token(y, inverse).sum(dim=-2, keepdim=True),
    "before": lambda y, w, of_rows, order, inverse: by_token(y * of_rows, inverse).sum(dim=1).to(y.dtype),
    "after": lambda y, w, of_rows, order, inverse: (y[inverse.view(T, K)] * w[..., None]).sum(1).to(y.dtype),
    "index_add": lambda y, w, of_rows, order, inverse: zeros(y).index_add(0, order // K, y),
    "scatter_add": lambda y, w, of_rows, order, inverse: (
        torch.zeros(T, D).scatter_add(0, columns(order // K), y.float() * of_rows).to(y.dtype)
    ),
    "weighted_index_add": lambda y, w, of_rows, order, inverse: zeros(y).index_add(
        0, order // K, (y.float() * of_rows).to(y.dtype)
    ),
}
USUAL = {"count": "scatter_add", "invert": "scatter", "gather": "divide", "put_back": "before"}
SPELLINGS = [
    (part, spelling, dtype)
    for part, spellings in zip(USUAL, (COUNTS, INVERSES, GATHERS, RETURNS), strict=True)
    for number, spelling in enumerate(spellings)
    for dtype in (DTYPES if part == "put_back" else DTYPES[number % 2 :][:1])
    if part == "put_back" or spelling != USUAL[part]
]
"""Other parts than the usual, each in fp32 or bf16; returns, which round sums, in both."""


def zeros(y):
    return torch.zeros(T, D, dtype=y.dtype)


def by_token(y, inverse):
    return y[inverse].view(T, K, D)


def layer(count, invert, gather, put_back, stable=True):
    def run(x, weight, w, expert):
        ids = expert.reshape(-1)
        ordered, order = torch.sort(ids, stable=stable)
        ends = COUNTS[count](ids, ordered, order).cumsum(0, dtype=torch.int32)
        y, of_rows = grouped_mm(GATHERS[gather](x, order), w, ends), weight.reshape(-1)[order].unsqueeze(1)
        return RETURNS[put_back](y, weight, of_rows, order, INVERSES[invert](order)), ends

    return run


def inputs(dtype=torch.float32, routing="natural"):
    weight = random(T, K, seed=5).detach().softmax(-1).requires_grad_()
    return random(T, D, dtype=dtype), weight, random(E, D, D, seed=6, dtype=dtype), experts_of(routing)


@pytest.mark.parametrize(("part", "spelling", "dtype"), SPELLINGS)
def test_every_spelling_becomes_three_operations_with_the_same_numbers(part, spelling, dtype):
    plain = traced(layer(**USUAL | {part: spelling}), *inputs(dtype))
    fused, (result,) = plain.rewritten(fuse_permutation)
    calls = fused.calls
    assert (calls["routing_plan"], calls["permute"], calls["unpermute"]) == (1, 1, 1)
    assert not MOVES & {*calls} and not result.left, (calls, result)
    assert plain.calls.total() > calls.total()
    fused.assert_same(plain, *(inputs(dtype, routing) for routing in ROUTINGS))
    again, (result,) = fused.rewritten(fuse_permutation)
    assert result.matches == 0 and again.calls == calls


@pytest.mark.parametrize("stable", [True, False])
def test_an_unstable_sort_of_flat_ids_becomes_the_stable_order(stable):
    x, weight, w, expert = inputs()
    plain = traced(layer(**USUAL, stable=stable), x, weight, w, expert.flatten())
    fused, (result,) = plain.rewritten(fuse_permutation)
    assert result.matches == 4  # plan, rows, weights of the rows, return
    plan = fused.call("routing_plan")
    assert plan.args[0].meta["val"].shape == expert.shape  # K is what the order is divided by
    fused.assert_same(plain)


def test_nothing_is_expected_where_the_model_calls_the_operations_itself():
    def run(x, row, slot, ends):
        return ops.unpermute(ops.permute(x, slot, row, ends), slot, row, ends, None)

    x, _, _, expert = inputs()
    _, ends_E, row_TK, slot_R = ops.routing_plan(expert.int(), E)
    _, (result,) = traced(run, x, row_TK, slot_R, ends_E).rewritten(fuse_permutation)
    assert result == Rewrites(0, (), "the model calls permute or unpermute itself, 2 times", expected=False)


PLAN = [MadeBy("graphmoe::routing_plan", "unit:call", part) for part in (1, 2, 3)]


def moved(x, weight, slot, row):
    rows = permute(x, slot, row) * permute(weight.reshape(-1, 1), slot, row.reshape(-1, 1))
    return unpermute(rows, slot, row)


@pytest.mark.parametrize(
    ("makers", "matches"),
    [
        (PLAN, 3),
        ([None, None, None], 0),
        ([*PLAN[:2], None], 0),
        ([*PLAN[:2], PLAN[2]._replace(call="unit:another")], 0),
        ([maker._replace(target="graphmoe::router") for maker in PLAN], 0),
    ],
    ids=["a plan", "unknown", "not whole", "of two plans", "another operation"],
)
def test_a_plan_from_another_unit_is_known_by_what_made_it(makers, matches):
    x, weight, _, expert = inputs()
    plan = routing_plan(expert.int(), E)
    parts = plan.ends_E, plan.row_TK, plan.slot_R
    plain = traced(lambda x, w, ends, row, slot: (moved(x, w, slot, row), ends), x, weight, *parts)
    placeholders = plain.graph.graph.find_nodes(op="placeholder")
    for node, maker in zip(placeholders[2:], makers, strict=True):
        node.meta["made_by"] = maker
    fused, (result,) = plain.rewritten(fuse_permutation)
    calls = fused.calls
    assert result.matches == matches and calls["permute"] == calls["unpermute"] == (matches > 0)
    assert not matches or not MOVES & {*calls}
    fused.assert_same(plain)


class Moves(NamedTuple):
    """Tokens, slots in the order of experts, and the row of each slot."""

    x: Tensor
    order: Tensor
    inverse: Tensor

    token = property(lambda self: self.order // K)
    rows = property(lambda self: self.x[self.token])
    back = property(lambda self: by_token(self.rows, self.inverse))


def with_plan(body):
    """Moves behind a plan, which itself matches."""

    def run(x, weight, w, expert):
        ids = expert.reshape(-1)
        order = ids.argsort(stable=True)
        ends = histogram(ids).cumsum(0, dtype=torch.int32)
        results = body(Moves(x, order, inverted(order)))
        return *(results if isinstance(results, tuple) else (results,)), ends

    return run


COLUMNS, NO_SLOT = "is not a sum over the second axis", "the index is not slot // k"
NO_WEIGHT = "is not a product with one weight for each row"
NO_ZERO, UNCOUNTED = "added to something that is not zero", "nothing counts the ids"
LOOK_ALIKES = {  # name: (body, reason; none: it does not look alike)
    "another k": (lambda m: m.x[m.order // 3], "[18, 16] to [36, 16] is not [R / 3, D]"),
    "an index of its own": (lambda m: m.x[m.order % T], NO_SLOT),
    "rows with another reader": (lambda m: ((back := m.back).sum(1), back), "has 2 users"),
    "a mean": (lambda m: m.back.mean(1), "read by mean"),
    "a sum over columns": (lambda m: m.back.sum(2), COLUMNS),
    "a sum over parts of columns": (lambda m: m.back.view(T, 2 * K, D // 2).sum(1), COLUMNS),
    "a gather of some columns": (lambda m: m.x.gather(0, columns(m.token, 8)), "[18, 16] to [36, 8] is not"),
    "a gather of matrices": (lambda m: m.x.view(T, 4, 4)[m.token], "[18, 4, 4] to [36, 4, 4] is not"),
    "another order back": (
        lambda m: m._replace(inverse=inverted(m.order, torch.arange(R).flip(0))).back.sum(1),
        NO_SLOT,
    ),
    "a scale": (lambda m: (m.back * 2.0).sum(1), NO_WEIGHT),
    "a weight for each column": (lambda m: (m.back * m.x[:1]).sum(1), NO_WEIGHT),
    "rows in reverse": (lambda m: by_token(m.rows, m.order.argsort(descending=True)).sum(1), UNCOUNTED),
    "a sum onto something": (lambda m: torch.ones(T, D).index_add(0, m.token, m.rows.float()), NO_ZERO),
    "a sum onto an input": (lambda m: m.x.index_add(0, m.token, m.rows), NO_ZERO),
    "a sum into more tokens": (
        lambda m: torch.zeros(T + 2, D).index_add(0, m.token, m.rows),
        "[20, 16] is not [R / 2, D], R = 36",
    ),
    "a sum of columns": (lambda m: torch.zeros(D, T).index_add(1, m.token, (m.rows * 2).T), ""),
    "a scaled sum": (lambda m: torch.zeros(T, D).index_add(0, m.token, m.rows * 2, alpha=2), ""),
    "a bf16 sum that stays in fp32": (
        lambda m: m._replace(x=m.x.bfloat16()).back.float().sum(1),
        "the sum of torch.bfloat16 rows stays torch.float32",
    ),
    "integers": (lambda m: m.order[m.inverse] + m.x.sum().long(), ""),
}


@pytest.mark.parametrize(("body", "reason"), LOOK_ALIKES.values(), ids=LOOK_ALIKES)
def test_look_alikes_stay_with_a_reason(body, reason):
    fused, (result,) = (plain := traced(with_plan(body), *inputs())).rewritten(fuse_permutation)
    assert any(reason in line for line in result.left) if reason else result.left == ()
    assert fused.calls["unpermute"] == 0 and fused.calls["routing_plan"] == 1
    fused.assert_same(plain)


ROWS = {
    "a product of their own": lambda m, y: y * y.mean(1, keepdim=True),
    "a weight of each token": lambda m, y: y * m.x.mean(1, keepdim=True)[m.token],
    "a view of another shape": lambda m, y: y.view(R, 2, D // 2).softmax(-1).view(R, D),
}


@pytest.mark.parametrize("made", ROWS.values(), ids=ROWS)
def test_rows_that_are_no_product_with_slot_weights_are_summed_as_they_are(made):
    plain = traced(with_plan(lambda m: by_token(made(m, m.rows), m.inverse).sum(1)), *inputs())
    fused, _ = plain.rewritten(fuse_permutation)
    call = fused.call("unpermute")
    assert call.args[-1] is None and call.args[0].meta["val"].shape == (R, D)
    fused.assert_same(plain)


NO_PLANS = {
    "uncounted": (lambda x, ids: x[ids.argsort() // K], UNCOUNTED),
    "counted from 1": (lambda x, ids: (x[ids.argsort() // K], histogram(ids, base=1)), UNCOUNTED),
    "counted twice": (lambda x, ids: (x[ids.argsort() // K], histogram(ids, step=2)), UNCOUNTED),
    "descending": (lambda x, ids: (x[ids.argsort(descending=True) // K], histogram(ids)), "descending order"),
    "numbers": (lambda x, ids: (x.sort(dim=-1).values, ids), "1 sorts, none of a flat list of expert ids"),
}


@pytest.mark.parametrize(("run", "reason"), NO_PLANS.values(), ids=NO_PLANS)
def test_orders_that_are_no_plan_stay_with_a_reason(run, reason):
    plain = traced(lambda x, expert: run(x, expert.reshape(-1)), random(T, D), experts_of("natural"))
    assert_left(plain, reason, fuse_permutation)


def test_sorted_ids_that_are_read_keep_their_sort_beside_the_plan():
    def run(x, bias, expert):
        ordered, order = expert.reshape(-1).sort(stable=True)
        return x[order // K] + bias[ordered], histogram(expert.reshape(-1))

    plain = traced(run, random(T, D), random(E, D, seed=1), experts_of("natural"))
    fused, (result,) = plain.rewritten(fuse_permutation)
    assert result.matches == 2 and any("its sorted ids are read" in line for line in result.left)
    fused.assert_same(plain)
