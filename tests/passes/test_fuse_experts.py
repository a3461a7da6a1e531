"""fuse_experts, behind the passes that it builds on; what it leaves, and the numbers."""

import functools
import itertools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from graphmoe.ops.grouped_mm import grouped_mm
from graphmoe.ops.permute import permute, routing_plan, unpermute
from graphmoe.passes.fuse_activation import fuse_activation
from graphmoe.passes.fuse_experts import fuse_experts, hidden_only
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
    assert_left,
    expert_inputs,
    random,
    traced,
)

ops = torch.ops.graphmoe
BEHIND_PERMUTATION = (fuse_permutation, fuse_activation, fuse_experts)


def same(y, *more):
    return y


def weighted(a, of_rows, to_rows):
    return a * of_rows


def block(gathered=same, hidden=None, activated=weighted, made=same, ends_of=same, num_experts=E):
    """Experts of given ids, with another step for the rows, the ends, the activation or the second product.

    ``activated`` gets the activation, the weights of rows, and how weights of tokens come to rows.
    """

    def run(x, weight, gate_up, down, expert):
        plan = routing_plan(expert, num_experts)
        rows, slots = (plan.slot_R, plan.row_TK), (plan.slot_R, plan.row_TK.reshape(-1, 1))
        of_rows, x = permute(weight.reshape(-1, 1), *slots), permute(x, *rows)
        h = grouped_mm(gathered(x), gate_up, ends_of(plan.ends_E))
        gate, up = h.chunk(2, dim=-1)
        a = activated(F.silu(gate) * up, of_rows, lambda w: permute(w, *rows)).to(x.dtype)
        y = unpermute(made(grouped_mm(a, down, plan.ends_E), of_rows), *rows).to(x.dtype)
        return (y, {"h": h, "x": x}[hidden]) if hidden else y

    return run


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("in_sum", [False, True])
def test_weights_in_the_activation_or_in_the_sum_give_the_same_numbers(in_sum, dtype):
    run = block(activated=same, made=lambda y, w: y * w) if in_sum else block()
    plain = traced(run, *expert_inputs(dtype))
    fused, results = plain.rewritten(*BEHIND_PERMUTATION)
    assert [result.matches for result in results][1:] == [1, 1]
    assert fused.calls == {"routing_plan": 1, "getitem": 4, "grouped_mlp": 1}
    fused.assert_same(plain, *(expert_inputs(dtype, routing) for routing in ROUTINGS))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("biased", "limit"), [(True, 1.0), (False, 1.0), (True, 0.0)], ids=str)
def test_an_activation_that_the_model_calls_keeps_its_biases_and_limit(biased, limit, dtype):
    def run(x, weight, gate_up, down, expert, bias):
        plan = routing_plan(expert, E)
        of_rows = permute(weight.reshape(-1, 1), plan.slot_R, plan.row_TK.reshape(-1, 1))
        h = grouped_mm(permute(x, plan.slot_R, plan.row_TK), gate_up, plan.ends_E)
        a = ops.swiglu(h, of_rows, plan.ends_E, bias if biased else None, limit)
        return unpermute(grouped_mm(a, down, plan.ends_E), plan.slot_R, plan.row_TK).to(x.dtype)

    bias = random(E, 2 * WIDTH, seed=8, dtype=dtype)
    plain = traced(run, *expert_inputs(dtype), bias)
    fused, (_, activation, experts) = plain.rewritten(*BEHIND_PERMUTATION)
    assert (activation.matches, activation.left, activation.expected) == (0, (), False)
    assert experts.matches == 1 and fused.calls == {"routing_plan": 1, "getitem": 4, "grouped_mlp": 1}
    fused.assert_same(plain, *([*expert_inputs(dtype, routing), bias] for routing in ROUTINGS))


@pytest.mark.parametrize("backend", ["torch", "triton", "torch,triton,torch"])
def test_fused_experts_run_on_the_backend_that_is_given(backend):
    passes = (*BEHIND_PERMUTATION[:2], functools.partial(fuse_experts, backend=backend))
    plain = traced(block(), *expert_inputs())
    fused, _ = plain.rewritten(*passes)
    x, gate_up, down, weight, slot, row, ends, given = fused.call("grouped_mlp").args
    assert given == backend
    shapes = [tuple(node.meta["val"].shape) for node in (x, gate_up, down, weight, slot, row, ends)]
    assert shapes == [(T, D), (E, 2 * WIDTH, D), (E, D, WIDTH), (T, K), (R,), (T, K), (E,)]
    fused.assert_same(plain)


def with_replicas(of_down: int = 0, to_down: Callable[[Tensor], Tensor] = same):
    """Experts whose weights have those of replicas behind them.

    ``of_down`` is the plan of the second product, and ``to_down`` makes the weight that is replicated there.
    """

    def run(x, weight, gate_up, down, place, *experts_RS):
        replicas = ops.replica_weights(gate_up, experts_RS[0])
        both = torch.cat([gate_up, replicas])
        of_second = torch.cat([down, ops.replica_weights(to_down(down), experts_RS[of_down])])
        return block(num_experts=E + experts_RS[0].shape[1])(x, weight, both, of_second, place)

    return run


def inputs_with_replicas(dtype=torch.float32, plans: int = 1):
    """Every second slot of expert 2 is at its replica, and another replica has no rows."""
    *tensors, expert = expert_inputs(dtype)
    place = expert.clone()
    place.view(-1)[(expert == 2).view(-1).nonzero()[::2, 0]] = E + 1
    return [*tensors, place, *(torch.tensor([[0, 2, -1]], dtype=torch.int32) for _ in range(plans))]


@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_of_replicas_are_got_by_the_operation(one_peer, dtype):
    plain = traced(with_replicas(), *inputs_with_replicas(dtype))
    fused, results = plain.rewritten(*BEHIND_PERMUTATION)
    assert [result.matches for result in results][1:] == [1, 1]
    assert fused.calls == {"routing_plan": 1, "getitem": 4, "grouped_mlp": 1}
    _, gate_up, down, *_, backend, experts = fused.call("grouped_mlp").args
    assert backend == "torch" and tuple(experts.meta["val"].shape) == (1, 3)
    assert (gate_up.op, down.op) == ("placeholder", "placeholder")
    fused.assert_same(plain)
    hidden_only(fused.graph.graph)
    assert fused.calls["grouped_mlp_hidden"] == 0  # its sum is read


@pytest.mark.parametrize("given", [{"of_down": 1}, {"to_down": lambda w: w * 1}], ids=["plan", "weight"])
def test_weights_with_other_replicas_are_read_as_they_are(one_peer, given):
    plain = traced(with_replicas(**given), *inputs_with_replicas(plans=2))
    fused, _ = plain.rewritten(*BEHIND_PERMUTATION)
    assert fused.calls["cat"] == fused.calls["replica_weights"] == 2
    assert len(fused.call("grouped_mlp").args) == 8
    fused.assert_same(plain)


def test_a_first_product_alone_keeps_its_replicas(one_peer):
    x, weight, gate_up, down, place, experts = inputs_with_replicas()
    _, ends, row, slot = ops.routing_plan(place, E + 3)
    given = [each.detach() for each in (x, gate_up, down, weight, slot, row, ends, experts)]
    plain = traced(lambda *given: ops.grouped_mlp(*given[:-1], "torch", given[-1])[1], *given)
    fused, _ = plain.rewritten()
    hidden_only(fused.graph.graph)
    fused.graph.graph.eliminate_dead_code()
    fused.graph.recompile()
    assert fused.calls == {"grouped_mlp_hidden": 1}
    fused.assert_same(plain)


USERS, ELSEWHERE = "has 2 users", "the rows of its products end elsewhere"
NO_GATHER = "is not a gather of the weights by the plan"
LOOK_ALIKES = {
    "product returned": (block(hidden="h"), USERS),
    "rows returned": (block(hidden="x"), USERS),
    "other offsets": (block(ends_of=lambda ends: ends.clamp(max=R - 1)), ELSEWHERE),
    "biased": (block(made=lambda y, w: y + 1), "is in place of graphmoe.grouped_mm"),
    "no gather": (block(gathered=lambda x: x + 1), "is in place of graphmoe.permute"),
    "weighted twice": (block(made=lambda y, w: y * w), "the rows are weighted twice"),
    "unweighted": (block(activated=same), "the rows have no weights"),
    "weights of their own": (block(activated=lambda a, w, to_rows: a * w.sigmoid()), NO_GATHER),
    "weights of tokens": (block(activated=lambda a, w, to_rows: a * to_rows(torch.ones(T, 1))), NO_GATHER),
    "no return": (
        lambda x, weight, gate_up, down, expert: (grouped_mm(x, gate_up, expert[:E, 0]), weight, down),
        "1 grouped products, and no unpermute behind one",
    ),
}


@pytest.mark.parametrize(("run", "reason"), LOOK_ALIKES.values(), ids=LOOK_ALIKES)
def test_look_alikes_stay_with_a_reason(run, reason):
    assert_left(traced(run, *expert_inputs()), reason, *BEHIND_PERMUTATION)


PARTS = ("slot", "row", "ends")
PLACES = ("gather", "weights", "up", "activation", "down")
MIXTURES = [*itertools.product(PLACES[:2], PARTS), *itertools.product(PLACES[2:], PARTS[2:])]


def of_two_plans(place, part):
    """The operations of a plan, but for one part of another plan in one place."""

    def run(x, weight, gate_up, down, experts):
        names = ("counts", *PARTS[::-1])
        plans = [dict(zip(names, ops.routing_plan(ids, E), strict=True)) for ids in experts]
        used = {where: dict(plans[0]) for where in (*PLACES, "sum")}
        used[place][part] = plans[1][part]
        rows = {where: tuple(plan[name] for name in PARTS) for where, plan in used.items()}
        slot, row, ends = rows["weights"]
        of_rows = ops.permute(weight.reshape(-1, 1), slot, row.view(-1, 1), ends)
        h = grouped_mm(ops.permute(x, *rows["gather"]), gate_up, used["up"]["ends"])
        y = grouped_mm(ops.swiglu(h, of_rows, used["activation"]["ends"]), down, used["down"]["ends"])
        return ops.unpermute(y, *rows["sum"], None)

    *tensors, expert = expert_inputs()
    return traced(run, *tensors, torch.stack([expert, expert.flip(0)]))


@pytest.mark.parametrize(("place", "part"), MIXTURES)
def test_experts_with_a_part_of_another_plan_are_left(place, part):
    assert_left(of_two_plans(place, part), "unpermute", fuse_experts)


def test_the_operations_of_one_plan_match_without_the_other_passes():
    fused, (result,) = of_two_plans("gather", "counts").rewritten(fuse_experts)
    assert result[:2] == (1, ()) and fused.calls["grouped_mlp"] == 1
