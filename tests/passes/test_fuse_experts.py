"""fuse_experts, behind the passes that it builds on; what it leaves, and the numbers."""

import functools
import itertools

import pytest
import torch
import torch.nn.functional as F

from graphmoe.ops.grouped_mm import grouped_mm
from graphmoe.ops.permute import permute, routing_plan, unpermute
from graphmoe.passes.fuse_activation import fuse_activation
from graphmoe.passes.fuse_experts import fuse_experts
from graphmoe.passes.fuse_permutation import fuse_permutation
from tests.passes.blocks import (
    DTYPES,
    ROUTINGS,
    WIDTH,
    D,
    E,
    K,
    R,
    T,
    Traced,
    assert_left,
    assert_same_numbers,
    expert_weights,
    experts_of,
    operations,
    random,
    rewritten,
    traced,
)

BEHIND_PERMUTATION = (fuse_permutation, fuse_activation, fuse_experts)


def block(where: str = "activation"):
    """Experts of given ids, with the weights in the activation or in the sum."""

    def run(x, weight, gate_up, down, expert):
        plan = routing_plan(expert, E)
        rows, slots = (plan.slot_R, plan.row_TK), (plan.slot_R, plan.row_TK.reshape(-1, 1))
        gate, up = grouped_mm(permute(x, *rows), gate_up, plan.ends_E).chunk(2, dim=-1)
        of_rows = permute(weight.reshape(-1, 1), *slots)
        a = F.silu(gate) * up
        if where in ("activation", "both"):
            a = (a * of_rows).to(x.dtype)
        y = grouped_mm(a, down, plan.ends_E)
        if where in ("sum", "both"):
            y = y * of_rows
        return unpermute(y, *rows).to(x.dtype)

    return run


def inputs(dtype=torch.float32, routing="natural"):
    weight = random(T, K, seed=5).detach().softmax(-1).requires_grad_()
    return [random(T, D, dtype=dtype), weight, *expert_weights(dtype), experts_of(routing).int()]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("where", ["activation", "sum"])
def test_weights_in_the_activation_or_in_the_sum_give_the_same_numbers(where, dtype):
    plain = traced(block(where), *inputs(dtype))
    fused, results = rewritten(plain, *BEHIND_PERMUTATION)
    assert [result.matches for result in results][1:] == [1, 1]
    assert operations(fused) == {"routing_plan": 1, "getitem": 4, "grouped_mlp": 1}
    for routing in ROUTINGS:
        given = inputs(dtype, routing)
        assert_same_numbers(Traced(fused.graph, given), Traced(plain.graph, given))


@pytest.mark.parametrize("backend", ["torch", "triton", "torch,triton,torch"])
def test_fused_experts_run_on_the_backend_that_is_given(backend):
    passes = (*BEHIND_PERMUTATION[:2], functools.partial(fuse_experts, backend=backend))
    plain = traced(block(), *inputs())
    fused, _ = rewritten(plain, *passes)
    (call,) = [node for node in fused.graph.graph.nodes if "grouped_mlp" in str(node.target)]
    x, gate_up, down, weight, slot, row, ends, given = call.args
    assert given == backend
    shapes = [tuple(node.meta["val"].shape) for node in (x, gate_up, down, weight, slot, row, ends)]
    assert shapes == [(T, D), (E, 2 * WIDTH, D), (E, D, WIDTH), (T, K), (R,), (T, K), (E,)]
    assert_same_numbers(fused, plain)


def chained(body):
    """A plan and the words to build a look-alike of experts with."""

    def run(x, weight, gate_up, down, expert):
        plan = routing_plan(expert, E)
        rows, slots = (plan.slot_R, plan.row_TK), (plan.slot_R, plan.row_TK.reshape(-1, 1))
        of_rows = permute(weight.reshape(-1, 1), *slots)

        def activated(h):
            gate, up = h.chunk(2, dim=-1)
            return F.silu(gate) * up * of_rows

        return body(permute(x, *rows), rows, of_rows, (gate_up, down), plan.ends_E, activated)

    return run


def product_returned(x, rows, of_rows, w, ends, activated):
    h = grouped_mm(x, w[0], ends)
    return unpermute(grouped_mm(activated(h), w[1], ends), *rows), h


def rows_returned(x, rows, of_rows, w, ends, activated):
    return unpermute(grouped_mm(activated(grouped_mm(x, w[0], ends)), w[1], ends), *rows), x


def other_offsets(x, rows, of_rows, w, ends, activated):
    h = grouped_mm(x, w[0], ends.clamp(max=R - 1))
    return unpermute(grouped_mm(activated(h), w[1], ends), *rows)


def biased(x, rows, of_rows, w, ends, activated):
    return unpermute(grouped_mm(activated(grouped_mm(x, w[0], ends)), w[1], ends) + 1, *rows)


def no_gather(x, rows, of_rows, w, ends, activated):
    return unpermute(grouped_mm(activated(grouped_mm(x + 1, w[0], ends)), w[1], ends), *rows)


def weighted_twice(x, rows, of_rows, w, ends, activated):
    return unpermute(grouped_mm(activated(grouped_mm(x, w[0], ends)), w[1], ends) * of_rows, *rows)


def unweighted(x, rows, of_rows, w, ends, activated):
    gate, up = grouped_mm(x, w[0], ends).chunk(2, dim=-1)
    return unpermute(grouped_mm(F.silu(gate) * up, w[1], ends), *rows)


def weights_of_their_own(x, rows, of_rows, w, ends, activated):
    gate, up = grouped_mm(x, w[0], ends).chunk(2, dim=-1)
    return unpermute(grouped_mm(F.silu(gate) * up * of_rows.sigmoid(), w[1], ends), *rows)


def weights_of_tokens(x, rows, of_rows, w, ends, activated):
    gate, up = grouped_mm(x, w[0], ends).chunk(2, dim=-1)
    of_tokens = permute(torch.ones(T, 1), *rows)
    return unpermute(grouped_mm(F.silu(gate) * up * of_tokens, w[1], ends), *rows)


LOOK_ALIKES = {
    product_returned: "has 2 users",
    rows_returned: "has 2 users",
    other_offsets: "the rows of its products end elsewhere",
    biased: "stands where graphmoe.grouped_mm should",
    no_gather: "stands where graphmoe.permute should",
    weighted_twice: "the rows are weighted twice",
    unweighted: "the rows have no weights",
    weights_of_tokens: "is no gather of the weights by the plan",
    weights_of_their_own: "is no gather of the weights by the plan",
}


@pytest.mark.parametrize("look_alike", LOOK_ALIKES, ids=lambda f: f.__name__)
def test_look_alikes_stay_with_a_reason(look_alike):
    plain = traced(chained(look_alike), *inputs())
    assert_left(plain, LOOK_ALIKES[look_alike], *BEHIND_PERMUTATION)


PARTS = ("slot", "row", "ends")
PLACES = ("gather", "weights", "up", "activation", "down")
MIXTURES = [*itertools.product(PLACES[:2], PARTS), *itertools.product(PLACES[2:], PARTS[2:])]


def of_two_plans(place, part):
    """The operations of a plan, but for one part of another plan in one place."""
    ops = torch.ops.graphmoe

    def run(x, weight, gate_up, down, experts):
        plans = [
            dict(zip(("counts", *PARTS[::-1]), ops.routing_plan(ids, E), strict=True)) for ids in experts
        ]
        used = {where: dict(plans[0]) for where in (*PLACES, "sum")}
        used[place][part] = plans[1][part]
        rows = {where: tuple(plan[name] for name in PARTS) for where, plan in used.items()}
        slot, row, ends = rows["weights"]
        of_rows = ops.permute(weight.reshape(-1, 1), slot, row.view(-1, 1), ends)
        h = grouped_mm(ops.permute(x, *rows["gather"]), gate_up, used["up"]["ends"])
        y = grouped_mm(ops.swiglu(h, of_rows, used["activation"]["ends"]), down, used["down"]["ends"])
        return ops.unpermute(y, *rows["sum"], None)

    *tensors, expert = inputs()
    return traced(run, *tensors, torch.stack([expert, expert.flip(0)]))


@pytest.mark.parametrize(("place", "part"), MIXTURES)
def test_experts_with_a_part_of_another_plan_are_left(place, part):
    assert_left(of_two_plans(place, part), "unpermute", fuse_experts)


def test_the_operations_of_one_plan_match_without_the_other_passes():
    fused, (result,) = rewritten(of_two_plans("gather", "counts"), fuse_experts)
    assert result[:2] == (1, ()) and operations(fused)["grouped_mlp"] == 1


def test_products_without_a_return_are_counted():
    def run(x, gate_up, ends):
        return grouped_mm(x, gate_up, ends)

    ends = torch.tensor([R] * E, dtype=torch.int32)
    plain = traced(run, random(R, D), expert_weights(torch.float32).gate_up, ends)
    assert_left(plain, "1 grouped products, and no unpermute behind one", *BEHIND_PERMUTATION)
