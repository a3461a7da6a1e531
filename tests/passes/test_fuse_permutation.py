"""fuse_permutation: every spelling of plan, gather and return becomes three operations; what stays."""

import pytest
import torch

from graphmoe.ops.grouped_mm import grouped_mm
from graphmoe.ops.permute import permute, routing_plan, unpermute
from graphmoe.passes.base import MadeBy, Rewrites
from graphmoe.passes.fuse_permutation import fuse_permutation
from tests.passes.blocks import (
    DTYPES,
    ROUTINGS,
    D,
    E,
    K,
    R,
    T,
    assert_left,
    assert_same_numbers,
    call_of,
    experts_of,
    operations,
    random,
    rewritten,
    traced,
)

ops = torch.ops.graphmoe
MOVES = {
    *("sort", "index", "index_select", "gather", "scatter", "index_put", "index_add", "scatter_add", "histc")
}


def histogram(ids, base=0, step=1):
    return torch.full((E,), base, dtype=torch.int32).scatter_add(
        0, ids, torch.full((R,), step, dtype=torch.int32)
    )


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
    "after": lambda y, w, of_rows, order, inverse: (
        (y[inverse.view(T, K)] * w.unsqueeze(-1)).sum(dim=1).to(y.dtype)
    ),
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
    fused, (result,) = rewritten(plain, fuse_permutation)
    calls = operations(fused)
    assert (calls["routing_plan"], calls["permute"], calls["unpermute"]) == (1, 1, 1)
    assert not MOVES & set(calls) and not result.left, (calls, result)
    assert operations(plain).total() > calls.total()
    assert_same_numbers(fused, plain, *(inputs(dtype, routing) for routing in ROUTINGS))
    again, (result,) = rewritten(fused, fuse_permutation)
    assert result.matches == 0 and operations(again) == calls


@pytest.mark.parametrize("stable", [True, False])
def test_an_unstable_sort_of_flat_ids_becomes_the_stable_order(stable):
    x, weight, w, expert = inputs()
    plain = traced(layer(**USUAL, stable=stable), x, weight, w, expert.flatten())
    fused, (result,) = rewritten(plain, fuse_permutation)
    assert result.matches == 4  # plan, rows, weights of the rows, return
    plan = call_of(fused, "routing_plan")
    assert plan.args[0].meta["val"].shape == expert.shape  # K is what the order is divided by
    assert_same_numbers(fused, plain)


def test_nothing_is_expected_where_the_model_calls_the_operations_itself():
    def run(x, row, slot, ends):
        return ops.unpermute(ops.permute(x, slot, row, ends), slot, row, ends, None)

    x, _, _, expert = inputs()
    _, ends_E, row_TK, slot_R = ops.routing_plan(expert.int(), E)
    _, (result,) = rewritten(traced(run, x, row_TK, slot_R, ends_E), fuse_permutation)
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
    plain = traced(
        lambda x, weight, ends, row, slot: (moved(x, weight, slot, row), ends),
        *(x, weight, plan.ends_E, plan.row_TK, plan.slot_R),
    )
    placeholders = plain.graph.graph.find_nodes(op="placeholder")
    for node, maker in zip(placeholders[2:], makers, strict=True):
        node.meta["made_by"] = maker
    fused, (result,) = rewritten(plain, fuse_permutation)
    calls = operations(fused)
    assert result.matches == matches and calls["permute"] == calls["unpermute"] == (matches > 0)
    assert not matches or not MOVES & set(calls)
    assert_same_numbers(fused, plain)


def test_the_models_own_plan_and_moves_match():
    def run(x, weight, expert):
        plan = routing_plan(expert, E)
        return moved(x, weight, plan.slot_R, plan.row_TK), *plan[1:5]

    x, weight, _, expert = inputs()
    plain = traced(run, x, weight, expert.int())
    fused, (result,) = rewritten(plain, fuse_permutation)
    assert result.matches == 4 and not MOVES & set(operations(fused))
    assert_same_numbers(fused, plain, *([x, weight, experts_of(routing).int()] for routing in ROUTINGS))


def with_plan(body):
    """Rows behind a plan, which itself matches: ``body(x, weights, order, inverse)``."""

    def run(x, weight, w, expert):
        ids = expert.reshape(-1)
        order = ids.argsort(stable=True)
        ends = histogram(ids).cumsum(0, dtype=torch.int32)
        results = body(x, weight, order, inverted(order))
        return *(results if isinstance(results, tuple) else (results,)), ends

    return run


def rows(x, order, inverse):
    return by_token(x[order // K], inverse)


COLUMNS, NO_SLOT = "is not a sum over the second axis", "the index is not slot // k"
NO_WEIGHT = "is not a product with one weight for each row"
NO_ZERO = "added to something that is not zero"
LOOK_ALIKES = {  # name: (body, reason; none: it does not look alike)
    "another k": (lambda x, w, order, inverse: x[order // 3], "[18, 16] to [36, 16] is not [R / 3, D]"),
    "an index of its own": (lambda x, w, order, inverse: x[order % T], NO_SLOT),
    "rows with another reader": (
        lambda x, w, order, inverse: ((of_slots := rows(x, order, inverse)).sum(1), of_slots),
        "has 2 users",
    ),
    "a mean": (lambda x, w, order, inverse: rows(x, order, inverse).mean(1), "read by mean"),
    "a sum over columns": (lambda x, w, order, inverse: rows(x, order, inverse).sum(2), COLUMNS),
    "a sum over parts of columns": (
        lambda x, w, order, inverse: rows(x, order, inverse).view(T, 2 * K, D // 2).sum(1),
        COLUMNS,
    ),
    "a gather of some columns": (
        lambda x, w, order, inverse: x.gather(0, columns(order // K, D // 2)),
        "[18, 16] to [36, 8] is not",
    ),
    "a gather of matrices": (
        lambda x, w, order, inverse: x.view(T, 4, 4)[order // K],
        "[18, 4, 4] to [36, 4, 4] is not",
    ),
    "another order back": (
        lambda x, w, order, inverse: rows(x, order, inverted(order, torch.arange(R).flip(0))).sum(1),
        NO_SLOT,
    ),
    "a scale": (lambda x, w, order, inverse: (rows(x, order, inverse) * 2.0).sum(1), NO_WEIGHT),
    "a weight for each column": (
        lambda x, w, order, inverse: (rows(x, order, inverse) * x[:1]).sum(1),
        NO_WEIGHT,
    ),
    "rows in reverse": (
        lambda x, w, order, inverse: rows(x, order, order.argsort(descending=True)).sum(1),
        "nothing counts the ids",
    ),
    "a sum onto something": (
        lambda x, w, order, inverse: torch.ones(T, D).index_add(0, order // K, x[order // K].float()),
        NO_ZERO,
    ),
    "a sum onto an input": (lambda x, w, order, inverse: x.index_add(0, order // K, x[order // K]), NO_ZERO),
    "a sum into more tokens": (
        lambda x, w, order, inverse: torch.zeros(T + 2, D).index_add(0, order // K, x[order // K]),
        "[20, 16] is not [R / 2, D], R = 36",
    ),
    "a sum of columns": (
        lambda x, w, order, inverse: torch.zeros(D, T).index_add(1, order // K, (x[order // K] * 2).T),
        "",
    ),
    "a scaled sum": (
        lambda x, w, order, inverse: torch.zeros(T, D).index_add(0, order // K, x[order // K] * 2, alpha=2),
        "",
    ),
    "a bf16 sum that stays in fp32": (
        lambda x, w, order, inverse: rows(x.bfloat16(), order, inverse).float().sum(1),
        "the sum of torch.bfloat16 rows stays torch.float32",
    ),
    "integers": (lambda x, w, order, inverse: order[inverse] + x.sum().long(), ""),
}


@pytest.mark.parametrize("name", LOOK_ALIKES)
def test_look_alikes_stay_with_a_reason(name):
    body, reason = LOOK_ALIKES[name]
    plain = traced(with_plan(body), *inputs())
    fused, (result,) = rewritten(plain, fuse_permutation)
    assert any(reason in line for line in result.left) if reason else result.left == ()
    assert operations(fused)["unpermute"] == 0 and operations(fused)["routing_plan"] == 1
    assert_same_numbers(fused, plain)


ROWS = {
    "a product of their own": lambda x, y, order: y * y.mean(1, keepdim=True),
    "a weight of each token": lambda x, y, order: y * x.mean(1, keepdim=True)[order // K],
    "a view of another shape": lambda x, y, order: y.view(R, 2, D // 2).softmax(-1).view(R, D),
}


@pytest.mark.parametrize("name", ROWS)
def test_rows_that_are_no_product_with_slot_weights_are_summed_as_they_are(name):
    def body(x, weight, order, inverse):
        return by_token(ROWS[name](x, x[order // K], order), inverse).sum(1)

    fused, _ = rewritten(plain := traced(with_plan(body), *inputs()), fuse_permutation)
    call = call_of(fused, "unpermute")
    assert call.args[-1] is None and call.args[0].meta["val"].shape == (R, D)
    assert_same_numbers(fused, plain)


NO_PLANS = {
    "uncounted": (lambda x, ids: x[ids.argsort() // K], "nothing counts the ids"),
    "counted from 1": (
        lambda x, ids: (x[ids.argsort() // K], histogram(ids, base=1)),
        "nothing counts the ids",
    ),
    "counted twice": (
        lambda x, ids: (x[ids.argsort() // K], histogram(ids, step=2)),
        "nothing counts the ids",
    ),
    "descending": (lambda x, ids: (x[ids.argsort(descending=True) // K], histogram(ids)), "descending order"),
    "numbers": (lambda x, ids: (x.sort(dim=-1).values, ids), "1 sorts, none of a flat list of expert ids"),
}


@pytest.mark.parametrize("name", NO_PLANS)
def test_orders_that_are_no_plan_stay_with_a_reason(name):
    run, reason = NO_PLANS[name]
    plain = traced(lambda x, expert: run(x, expert.reshape(-1)), random(T, D), experts_of("natural"))
    assert_left(plain, reason, fuse_permutation)


def test_sorted_ids_that_are_read_keep_their_sort_beside_the_plan():
    def run(x, bias, expert):
        ordered, order = expert.reshape(-1).sort(stable=True)
        return x[order // K] + bias[ordered], histogram(expert.reshape(-1))

    plain = traced(run, random(T, D), random(E, D, seed=1), experts_of("natural"))
    fused, (result,) = rewritten(plain, fuse_permutation)
    assert result.matches == 2 and any("its sorted ids are read" in line for line in result.left)
    assert_same_numbers(fused, plain)
