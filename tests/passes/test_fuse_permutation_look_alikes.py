"""fuse_permutation: what it leaves, and the reasons that it gives."""

import pytest
import torch

from graphmoe.passes.fuse_permutation import fuse_permutation
from tests.passes.blocks import (
    D,
    E,
    K,
    R,
    T,
    assert_left,
    assert_same_numbers,
    experts_of,
    operations,
    random,
    rewritten,
    traced,
)
from tests.passes.permutation_spellings import by_token, count, inputs, with_plan

LOOK_ALIKES = {
    "another k": (
        lambda x, w, order, inverse: (x[order // 3],),
        "[18, 16] to [36, 16] is not [R / 3, D] to [R, D]",
    ),
    "an index of its own": (lambda x, w, order, inverse: (x[order % T],), "the index is not slot // k"),
    "rows with another reader": (
        lambda x, w, order, inverse: ((rows := by_token(x[order // K], inverse)).sum(1), rows),
        "has 2 users",
    ),
    "a mean": (lambda x, w, order, inverse: (by_token(x[order // K], inverse).mean(1),), "read by mean"),
    "a sum over columns": (
        lambda x, w, order, inverse: (by_token(x[order // K], inverse).sum(2),),
        "is no sum over the second axis",
    ),
    "a sum over parts of columns": (
        lambda x, w, order, inverse: (by_token(x[order // K], inverse).view(T, 2 * K, D // 2).sum(1),),
        "is no sum over the second axis",
    ),
    "a gather of some columns": (
        lambda x, w, order, inverse: (x.gather(0, (order // K).unsqueeze(1).expand(-1, D // 2)),),
        "[18, 16] to [36, 8] is not",
    ),
    "a gather of matrices": (
        lambda x, w, order, inverse: (x.view(T, 4, 4)[order // K],),
        "[18, 4, 4] to [36, 4, 4] is not",
    ),
    "another order back": (
        lambda x, w, order, inverse: (
            by_token(x[order // K], order.scatter(0, order, torch.arange(R).flip(0))).sum(1),
        ),
        "the index is not slot // k",
    ),
    "a scale": (
        lambda x, w, order, inverse: ((by_token(x[order // K], inverse) * 2.0).sum(1),),
        "is no product with one weight for each row",
    ),
    "a weight for each column": (
        lambda x, w, order, inverse: ((by_token(x[order // K], inverse) * x[:1]).sum(1),),
        "is no product with one weight for each row",
    ),
    "rows in reverse": (
        lambda x, w, order, inverse: (by_token(x[order // K], order.argsort(descending=True)).sum(1),),
        "nothing counts the ids",
    ),
    "a sum onto something": (
        lambda x, w, order, inverse: (torch.ones(T, D).index_add(0, order // K, x[order // K].float()),),
        "added to something that is not zero",
    ),
    "a sum onto an input": (
        lambda x, w, order, inverse: (x.index_add(0, order // K, x[order // K]),),
        "added to something that is not zero",
    ),
    "a sum into more tokens": (
        lambda x, w, order, inverse: (torch.zeros(T + 2, D).index_add(0, order // K, x[order // K]),),
        "[20, 16] is not [R / 2, D], R = 36",
    ),
}


@pytest.mark.parametrize("name", LOOK_ALIKES)
def test_look_alikes_stay_with_a_reason(name):
    body, reason = LOOK_ALIKES[name]
    plain = traced(with_plan(body), *inputs())
    fused, (result,) = rewritten(plain, fuse_permutation)
    assert any(reason in line for line in result.left), result.left
    assert operations(fused)["unpermute"] == 0 and operations(fused)["routing_plan"] == 1
    assert_same_numbers(fused, plain)


QUIET = {
    "a sum of columns": lambda x, y, order, inverse: torch.zeros(D, T).index_add(1, order // K, y.T),
    "a scaled sum": lambda x, y, order, inverse: torch.zeros(T, D).index_add(0, order // K, y, alpha=2),
    "integers": lambda x, y, order, inverse: order[inverse] + x.sum().long(),
}


@pytest.mark.parametrize("name", QUIET)
def test_what_does_not_look_alike_is_not_reported(name):
    def body(x, weight, order, inverse):
        return (QUIET[name](x, x[order // K] * 2, order, inverse),)

    fused, (result,) = rewritten(plain := traced(with_plan(body), *inputs()), fuse_permutation)
    assert result.left == () and operations(fused)["unpermute"] == 0
    assert_same_numbers(fused, plain)


ROWS = {
    "a product of their own": lambda x, y, order: y * y.mean(1, keepdim=True),
    "a weight of each token": lambda x, y, order: y * x.mean(1, keepdim=True)[order // K],
    "a view of another shape": lambda x, y, order: y.view(R, 2, D // 2).softmax(-1).view(R, D),
}


@pytest.mark.parametrize("name", ROWS)
def test_rows_that_are_no_product_with_slot_weights_are_summed_as_they_are(name):
    def body(x, weight, order, inverse):
        return (by_token(ROWS[name](x, x[order // K], order), inverse).sum(1),)

    fused, _ = rewritten(plain := traced(with_plan(body), *inputs()), fuse_permutation)
    (call,) = [node for node in fused.graph.graph.nodes if "unpermute" in str(node.target)]
    assert call.args[-1] is None and call.args[0].meta["val"].shape == (R, D)
    assert_same_numbers(fused, plain)


def test_a_bf16_sum_that_stays_in_fp32_is_left():
    def body(x, weight, order, inverse):
        return (by_token(x[order // K], inverse).float().sum(1),)

    plain = traced(with_plan(body), *inputs(torch.bfloat16))
    fused, (result,) = rewritten(plain, fuse_permutation)
    assert operations(fused)["unpermute"] == 0
    assert any("the sum of torch.bfloat16 rows stays torch.float32" in line for line in result.left)


def test_orders_that_are_no_plan_stay_with_a_reason():
    ids = experts_of("natural")
    uncounted = traced(lambda x, e: x[e.reshape(-1).argsort() // K], random(T, D), ids)
    assert_left(uncounted, "nothing counts the ids", fuse_permutation)

    def descending(x, e):
        order = e.reshape(-1).argsort(descending=True)
        return x[order // K], count("scatter_add", e.reshape(-1), order, None)

    assert_left(traced(descending, random(T, D), ids), "descending order", fuse_permutation)

    def miscounted(base, step):
        def run(x, e):
            ids = e.reshape(-1)
            return x[ids.argsort() // K], torch.full((E,), base).scatter_add(0, ids, torch.full((R,), step))

        return traced(run, random(T, D), ids)

    for plain in (miscounted(1, 1), miscounted(0, 2)):
        assert_left(plain, "nothing counts the ids", fuse_permutation)
    numbers = traced(lambda x: x.sort(dim=-1).values, random(T, D))
    assert_left(numbers, "1 sorts, none of a flat list of expert ids", fuse_permutation)


def test_sorted_ids_that_are_read_keep_their_sort_beside_the_plan():
    def run(x, bias, expert):
        ordered, order = expert.reshape(-1).sort(stable=True)
        counts = count("scatter_add", expert.reshape(-1), order, None)
        return x[order // K] + bias[ordered], counts

    plain = traced(run, random(T, D), random(E, D, seed=1), experts_of("natural"))
    fused, (result,) = rewritten(plain, fuse_permutation)
    assert result.matches == 2 and any("its sorted ids are read" in line for line in result.left)
    assert_same_numbers(fused, plain)
