"""Sequences that ranks share: ring attention by its definition, and the choice of a method."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from graphmoe.config.schema import ConfigError, ContextMethod
from graphmoe.model.blocks import own_positions
from graphmoe.model.build import build_model
from graphmoe.ops.collectives import use_groups
from graphmoe.ops.ring_attention import ring_attention
from graphmoe.plan.layout import Layout
from graphmoe.plan.rules import resolve
from graphmoe.runtime.ranks import Mesh, Ranks
from tests.distributed.ranks import run_ranks
from tests.runs import config
from tests.tolerances import assert_forward_close, assert_gradient_close

SCALE = 0.3


@dataclass(frozen=True)
class Ring:
    layout: Layout
    heads: tuple[int, int] = (2, 2)  # of queries, and of keys and values
    sizes: tuple[int, int] = (8, 8)  # of a query or key head, and of a value head
    dtype: torch.dtype = torch.float32
    seq_len: int = 32
    device: str = "cpu"

    def __call__(self, ranks: Ranks, folder: Path) -> list[Tensor]:
        use_groups(Mesh(self.layout))
        *tensors, d_out = (own_positions(x.to(self.device), self.layout, dim=1) for x in self.whole())
        q, k, v = (x.requires_grad_() for x in tensors)
        out, _ = ring_attention(q, k, v, scale=SCALE, axis="cp", size=self.layout.cp)
        results = [out.detach(), *torch.autograd.grad(out, (q, k, v), d_out)]
        use_groups(None)
        return [result.cpu() for result in results]

    def whole(self) -> list[Tensor]:
        generator = torch.Generator().manual_seed(0)
        (of_queries, of_keys), (query, value) = self.heads, self.sizes
        shapes = ((of_queries, query), (of_keys, query), (of_keys, value), (of_queries, value))
        return [torch.randn(2, self.seq_len, *each, generator=generator).to(self.dtype) for each in shapes]

    def expected(self) -> list[Tensor]:
        *tensors, d_out = (x.double() for x in self.whole())
        q, k, v = (x.requires_grad_() for x in tensors)
        groups = self.heads[0] // self.heads[1]
        keys, values = (x.repeat_interleave(groups, dim=2) for x in (k, v))
        scores = torch.einsum("bqhe,bkhe->bhqk", q, keys) * SCALE
        future = torch.ones(self.seq_len, self.seq_len, dtype=torch.bool).triu(1)
        out = torch.einsum("bhqk,bkhv->bqhv", scores.masked_fill(future, -torch.inf).softmax(-1), values)
        return [out.detach(), *torch.autograd.grad(out, (q, k, v), d_out)]

    def joined(self, results: list[list[Tensor]]) -> list[Tensor]:
        found = []
        for parts in zip(*results, strict=True):
            chunks = {}
            for rank, part in enumerate(parts):
                place, last = self.layout.index("cp", rank), 2 * self.layout.cp - 1
                chunks[place], chunks[last - place] = part.chunk(2, dim=1)
            found.append(torch.cat([chunks[i] for i in sorted(chunks)], dim=1))
        return found


RINGS = {
    "ring of 4": Ring(Layout(cp=4, ring=True)),
    "ring of 2, grouped heads": Ring(Layout(dp=2, cp=2, ring=True), heads=(6, 2)),
    "ring of 4, grouped unequal heads, fp64": Ring(Layout(cp=4, ring=True), (4, 2), (6, 10), torch.float64),
    "ring of 4, bf16": Ring(Layout(cp=4, ring=True), (4, 2), (12, 6), dtype=torch.bfloat16, seq_len=64),
}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return run_ranks(tmp_path_factory.mktemp("four"), RINGS, num_ranks=4)


@pytest.mark.slow
@pytest.mark.parametrize("name", RINGS)
def test_ring_attention_and_its_gradients_are_those_of_the_definition(ranks, name):
    found = RINGS[name].joined(ranks[name])
    for check, result, expected in zip(
        (assert_forward_close, *[assert_gradient_close] * 3), found, RINGS[name].expected(), strict=True
    ):
        assert result.dtype == RINGS[name].dtype
        check(result, expected)


@pytest.mark.parametrize(
    ("words", "method"),
    [
        ("parallel.cp=2 model.num_heads=4", ContextMethod.alltoall),
        ("parallel.cp=4 model.num_heads=4 parallel.tp=2", ContextMethod.ring),
        ("parallel.cp=2 model.num_heads=4 model.attention=gqa model.num_kv_heads=1", ContextMethod.ring),
        ("parallel.cp=2 model.num_heads=4 parallel.cp_method=ring", ContextMethod.ring),
    ],
)
def test_auto_exchanges_heads_where_they_can_be_shared(words, method):
    run = resolve(config(*words.split()))
    assert run.parallel.cp_method is method
    layout = Layout.of(run.parallel, run.parallel.cp * run.parallel.tp)
    assert layout.ring == (method is ContextMethod.ring)


@pytest.mark.parametrize("axis", ["cp", "tp"])
def test_a_rank_with_a_part_of_a_sequence_or_of_the_logits_refuses_to_generate(axis):
    model = build_model(config("model.num_heads=4").model, layout=Layout(**{axis: 2}), device="meta")
    with pytest.raises(ConfigError, match=rf"parallel.{axis}=2: .* use parallel.{axis}=1"):
        model(torch.zeros(1, 16, dtype=torch.long, device="meta"))
