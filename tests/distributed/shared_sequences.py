"""Attention over a sequence that ranks share, as cases of `tests.distributed.ranks`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from graphmoe.model.build import build_model
from graphmoe.model.rope import own_positions
from graphmoe.model.transformer import Transformer
from graphmoe.ops.collectives import use_groups
from graphmoe.ops.ring_attention import ring_attention
from graphmoe.plan.layout import Layout
from graphmoe.runtime.ranks import Mesh, Ranks
from graphmoe.segments import Executor, run_segments
from tests.distributed.parallel_steps import Outcome, compiling, describe
from tests.runs import config

SCALE = 0.3


@dataclass(frozen=True)
class Ring:
    """Output and gradients of ring attention, for the positions of a rank."""

    layout: Layout
    heads: tuple[int, int] = (2, 2)
    """Numbers of heads of queries, and of keys and values."""
    sizes: tuple[int, int] = (8, 8)
    """Sizes of a query or key head, and of a value head."""
    dtype: torch.dtype = torch.float32
    seq_len: int = 32
    device: str = "cpu"

    def __call__(self, ranks: Ranks, folder: Path) -> list[Tensor]:
        use_groups(Mesh(self.layout))
        *tensors, d_out = (own_positions(x.to(self.device), self.layout, dim=1) for x in self.whole())
        q, k, v = (x.requires_grad_() for x in tensors)
        out = ring_attention(q, k, v, scale=SCALE, axis="cp", size=self.layout.cp)
        results = [out.detach(), *torch.autograd.grad(out, (q, k, v), d_out)]
        use_groups(None)
        return [result.cpu() for result in results]

    def whole(self) -> list[Tensor]:
        """q, k, v and the gradient of the output, over whole sequences."""
        generator = torch.Generator().manual_seed(0)
        (of_queries, of_keys), (query, value) = self.heads, self.sizes
        shapes = ((of_queries, query), (of_keys, query), (of_keys, value), (of_queries, value))
        return [torch.randn(2, self.seq_len, *each, generator=generator).to(self.dtype) for each in shapes]

    def expected(self) -> list[Tensor]:
        """The same over whole sequences in fp64, by the definition."""
        *tensors, d_out = (x.double() for x in self.whole())
        q, k, v = (x.requires_grad_() for x in tensors)
        groups = self.heads[0] // self.heads[1]
        keys, values = (x.repeat_interleave(groups, dim=2) for x in (k, v))
        scores = torch.einsum("bqhe,bkhe->bhqk", q, keys) * SCALE
        future = torch.ones(self.seq_len, self.seq_len, dtype=torch.bool).triu(1)
        out = torch.einsum("bhqk,bkhv->bqhv", scores.masked_fill(future, -torch.inf).softmax(-1), values)
        return [out.detach(), *torch.autograd.grad(out, (q, k, v), d_out)]

    def joined(self, results: list[list[Tensor]]) -> list[Tensor]:
        """Results over whole sequences, from those of all ranks in zigzag order."""
        whole = []
        for parts in zip(*results, strict=True):
            chunks = {}
            for rank, part in enumerate(parts):
                place, last = self.layout.index("cp", rank), 2 * self.layout.cp - 1
                chunks[place], chunks[last - place] = part.chunk(2, dim=1)
            whole.append(torch.cat([chunks[i] for i in sorted(chunks)], dim=1))
        return whole


@dataclass
class BothWays:
    """An attn segment eagerly and compiled: its result, then the gradients of its input and weights."""

    eager: list[Tensor]
    compiled: list[Tensor]
    graphs: list[str]


@dataclass(frozen=True)
class CompiledAttention:
    """Forward and backward of one attn segment, both ways."""

    words: tuple[str, ...]
    layout: Layout

    def __call__(self, ranks: Ranks, folder: Path) -> BothWays:
        use_groups(Mesh(self.layout))
        run = config(*self.words)
        model = build_model(run.model, layout=self.layout, rank=ranks.rank)
        compiled = compiling(run, folder)
        both = [self._ends(model, execute, ranks.rank) for execute in (run_segments, compiled)]
        outcome = Outcome({}, {}, {}, {})
        describe(compiled, outcome)
        use_groups(None)
        return BothWays(*both, outcome.graphs)

    def _ends(self, model: Transformer, execute: Executor, rank: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(rank)
        shape = (2, 16 // self.layout.size("cp_tp"), model.config.hidden_size)
        x, dy = (torch.randn(shape, generator=generator) for _ in range(2))
        segments, (cos, sin) = model.layers[0].segments()[:1], model.rope(16, x.device)
        model.zero_grad()
        (y,) = execute(segments, {"x": x.requires_grad_(), "cos": cos, "sin": sin}, ("x",))
        y.backward(dy)
        assert x.grad is not None
        return [y.detach(), x.grad, *(p.grad for p in model.parameters() if p.grad is not None)]


def positions(ranks: Ranks, folder: Path) -> dict[str, list[int]]:
    """Return the positions of 16 that a rank holds in each order."""
    layouts = {
        "neighbours": Layout(cp=4),
        "zigzag": Layout(cp=4, ring=True),
        "dp": Layout(dp=2, cp=2, ring=True),
    }
    found = {}
    for name, layout in layouts.items():
        use_groups(Mesh(layout))
        found[name] = own_positions(torch.arange(16)[None], layout, dim=1)[0].tolist()
    use_groups(None)
    return found
