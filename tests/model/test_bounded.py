"""The routed path in chunks: what it keeps, how much it works on at a time, and that it sums the same."""

import functools
from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch import Tensor

from graphmoe.config.schema import ModelConfig, MoEConfig
from graphmoe.model.dispatch import BoundedPath
from graphmoe.model.layer import MoELayer
from graphmoe.model.moe_segments import Experts
from graphmoe.ops.gradients import Gradient
from graphmoe.plan.experts import Load
from graphmoe.plan.layout import Layout
from graphmoe.runtime.dispatch.alltoall import AllToAll
from graphmoe.runtime.ranks import Mesh
from graphmoe.segments import run_segments
from tests.model.models import filled
from tests.runs import config
from tests.tolerances import relative_error

EXPERTS, TOP_K, TOKENS = 8, 3, 64
MODEL = config(f"model.num_experts={EXPERTS}", f"model.top_k={TOP_K}", "model.num_dense_layers=0").model
BIASED = replace(MODEL, expert_bias=True, swiglu_limit=0.4, router_bias=True)
SCALED = replace(MODEL, input_scaling=True, top_k=1)
of_both = pytest.mark.parametrize("model", [MODEL, BIASED, SCALED], ids=["plain", "biased", "scaled"])
CHUNKS = {
    "by rows": Load(20, 1000),
    "by slots": Load(1000, 48),
    "of one row": Load(1, TOP_K),
    "in one piece": Load(1000, 1000),
}


def in_chunks(chunk: Load | None = None) -> AllToAll:
    return AllToAll(Mesh(Layout()), EXPERTS, chunk)


def layer_of(dtype: torch.dtype, model: ModelConfig = MODEL) -> MoELayer:
    return filled(MoELayer(model, MoEConfig(), dispatcher=in_chunks()).to(dtype), seed=1)


def run(layer: MoELayer, chunk: Load | None, backend: str = "", totals=()) -> dict[str, Tensor]:
    """Result and gradients; by fused operations of a backend where one is named."""
    layer.use(in_chunks(chunk))
    layer.zero_grad()
    dtype = layer.moe_experts.w_down.dtype
    x = torch.randn(4, TOKENS // 4, MODEL.hidden_size, generator=torch.Generator().manual_seed(2)).to(dtype)
    x.requires_grad_()

    def in_form(segment):
        if not backend or segment.fused is None:
            return segment
        return replace(segment, run=functools.partial(segment.fused, backend, totals))

    def execute(segments, tensors, keep):
        return run_segments([*map(in_form, segments)], tensors, keep)

    output = layer(x, torch.ones(16, 2), torch.zeros(16, 2), execute)
    (output.x_BSD.float().square().mean() + output.loss).backward()
    for gradient, p in zip(totals, layer.moe_experts.parameters(), strict=False):
        if p.grad is not None:  # as the optimizer's hook does
            gradient.add(p.grad)
            p.grad = None
    found = {name: p.grad for name, p in layer.named_parameters() if p.grad is not None}
    found |= {f"total {i}": gradient.total for i, gradient in enumerate(totals)}
    if output.received_load is not None:
        expected = torch.tensor([TOKENS, TOKENS * layer.moe_router.config.top_k], dtype=torch.int32)
        assert output.received_load.equal(expected)
    return {"y": output.x_BSD.detach(), "dx": x.grad, **found}


def fresh_totals(layer: MoELayer, begun: bool) -> tuple[list[Gradient], list[int]]:
    """Sums of the experts' gradients, and where the number of each addition is put."""
    totals = [Gradient(torch.full(p.shape, 0.5)) for p in layer.moe_experts.parameters()]
    added: list[int] = []
    for i, gradient in enumerate(totals):
        gradient.begun, gradient.on_added = begun, functools.partial(added.append, i)
    return totals, added


@pytest.mark.parametrize("name", CHUNKS)
@pytest.mark.parametrize("mode", ["steps", "fused", "totals", "begun totals"])
@of_both
def test_results_and_gradients_are_bitwise_those_in_one_piece_where_no_expert_is_split(model, name, mode):
    """Compare in bf16, where a CPU's product of one row is that of many."""
    layer = layer_of(torch.bfloat16, model)
    backend, found = "" if mode == "steps" else "torch", []
    for chunk in (None, CHUNKS[name]):
        totals, added = fresh_totals(layer, mode == "begun totals") if "totals" in mode else ([], [])
        found.append(run(layer, chunk, backend, totals))
        assert sorted(added) == [*range(len(totals))] and all(gradient.begun for gradient in totals)
    plain, bounded = found
    assert plain.keys() == bounded.keys()
    biases = {key for key in plain if "experts.b_" in key or key in ("total 2", "total 3")}
    rounded = biases if totals else set()  # those of one piece are rounded to bf16
    if CHUNKS[name].slots < 40:  # experts are split, and each part is rounded to bf16
        rounded = {name for name in plain if "moe_experts" in name or "total" in name}
        assert len(rounded) == 2 + len(biases)
    if mode == "steps":  # torch's sum over F of a slot's weight gradient is another for fewer rows
        rounded |= {name for name in plain if "router" in name or "attn" in name or name == "dx"}
    for key, value in plain.items():
        if key in rounded:
            assert relative_error(bounded[key], value) < 4e-3, key
        else:
            assert torch.equal(bounded[key], value), key


@pytest.mark.parametrize("name", [None, *CHUNKS])
def test_sums_in_bf16_are_rounded_once(name):
    layer, chunk = layer_of(torch.bfloat16), CHUNKS.get(name)
    (totals, _), (rounded, added) = (fresh_totals(layer, begun=True) for _ in range(2))
    for gradient in rounded:
        gradient.total, gradient.key = gradient.total.bfloat16(), torch.tensor(3, dtype=torch.int32)
    exact, found = (run(layer, chunk, "torch", each) for each in (totals, rounded))
    assert sorted(added) == [0, 1]
    for i, gradient in enumerate(rounded):
        assert gradient.total.dtype == torch.bfloat16 and gradient.key == 4
        # each of this pass, and the addend where the sum of chunks is not rounded
        assert 0 < relative_error(found[f"total {i}"], exact[f"total {i}"]) < 2**-8


@pytest.mark.parametrize("name", CHUNKS)
@of_both
def test_in_fp32_nothing_differs_but_by_the_order_of_fp32_sums(model, name):
    layer = layer_of(torch.float32, model)
    plain, bounded = (run(layer, c) for c in (None, CHUNKS[name]))
    for key, value in plain.items():
        assert relative_error(bounded[key], value) < 1e-6, key


@pytest.mark.parametrize("name", ["by rows", "by slots", "of one row"])
def test_experts_never_work_on_more_than_a_chunk(name):
    layer, room, seen = layer_of(torch.float32), CHUNKS[name], []
    received = Experts.received

    def watched(self, h_CD: Tensor, weight_CK: Tensor, number_CK: Tensor) -> Tensor:
        seen.append((len(h_CD), int((number_CK >= 0).sum())))
        return received(self, h_CD, weight_CK, number_CK)

    with mock.patch.object(Experts, "received", watched):
        run(layer, room)
    assert len(seen) > 4 and max(slots for _, slots in seen) <= room.slots
    forward = seen[: -(-TOKENS // room.rows)]
    assert max(rows for rows, _ in forward) <= room.rows
    assert sum(slots for _, slots in seen) == 3 * TOKENS * TOP_K  # forward, gradients of rows and of weights


def test_only_what_enters_is_kept_for_the_backward():
    layer = layer_of(torch.float32)
    dispatcher = in_chunks(Load(20, 60))
    layer.use(dispatcher)
    path = BoundedPath(dispatcher, layer.moe_experts)
    h = torch.randn(TOKENS, MODEL.hidden_size, requires_grad=True)
    weight = torch.rand(TOKENS, TOP_K, requires_grad=True)
    expert = torch.stack([torch.randperm(EXPERTS)[:TOP_K] for _ in range(TOKENS)]).int()
    _, *plan = layer.moe_preprocess(expert)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        path(h, weight, expert, *plan)
    assert {t.data_ptr() for t in kept} == {t.data_ptr() for t in (h, weight, expert, *plan)}
