"""A run's state of whole parameters that are known, as the ranks of a layout hold it with ZeRO-1."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from graphmoe.checkpoint.entries import flatten, local_part
from graphmoe.checkpoint.flat_shards import FlatShard
from graphmoe.checkpoint.store import CheckpointStore
from graphmoe.config.schema import CheckpointConfig
from graphmoe.plan.layout import REPLICATED, Cut, Layout, ParameterLayout, own_part
from graphmoe.runtime.ranks import Ranks

ATTENTION = ParameterLayout((Cut(0, "tp"),), "dp_cp")
PARAMETERS: dict[str, tuple[tuple[int, ...], ParameterLayout]] = {
    "norm.weight": ((7,), REPLICATED),
    "temperature": ((), REPLICATED),
    "router.weight": ((5, 3), REPLICATED),
    "qkv.weight": ((8, 6), ATTENTION),
    "out.weight": ((6, 8), ParameterLayout((Cut(1, "tp"),), "dp_cp")),
    "gate_up.weight": ((16, 5), ParameterLayout((Cut(0, "tp", 2),), "dp_cp")),
    "experts.w_gate_up": ((8, 8, 3), ParameterLayout((Cut(0, "ep"), Cut(1, "etp", 2)), "edp")),
    "experts.w_down": ((8, 3, 8), ParameterLayout((Cut(0, "ep"), Cut(2, "etp")), "edp")),
    "nothing": ((0, 4), REPLICATED),
}


def whole(name: str, kind: str, step: int) -> Tensor:
    random = torch.Generator().manual_seed(step * 1000 + list(PARAMETERS).index(name) * 10 + len(kind))
    value = torch.randn(PARAMETERS[name][0], generator=random)
    return value.bfloat16() if kind == "model" else value


def state_of_rank(layout: Layout, rank: int, step: int) -> dict[str, Any]:
    """State of a rank after a step; 0 for a state to load into, of other numbers."""
    optimizer = {
        kind: {name: _zero_shard(name, kind, layout, rank, step) for name in PARAMETERS}
        for kind in ("main", "exp_avg")
    }
    model = {name: _own(name, layout, rank, step) for name in PARAMETERS}
    return {"model": model, "optimizer": optimizer, "loader": {"position": step}, "step": step}


def whole_state(step: int) -> dict[str, Any]:
    kinds = {kind: {name: whole(name, kind, step) for name in PARAMETERS} for kind in ("main", "exp_avg")}
    model = {name: whole(name, "model", step) for name in PARAMETERS}
    return {"model": model, "optimizer": kinds, "loader": {"position": step}, "step": step}


def differing(state: dict[str, Any], other: dict[str, Any]) -> list[str]:
    ours, theirs = flatten(state), flatten(other)
    assert ours.names == theirs.names
    names = [name for name, value in ours.values.items() if value != theirs.values[name]]
    for name, tensor in ours.tensors.items():
        left, right = local_part(tensor), local_part(theirs.tensors[name])
        if left.dtype != right.dtype or not torch.equal(_bits(left), _bits(right)):
            names.append(name)
    return sorted(names)


def save(layout: Layout, steps: tuple[int, ...], async_save: bool, ranks: Ranks, folder: Path) -> set[str]:
    """A case: save these steps, changing the state as soon as ``save`` returns; what this rank copied."""
    store = CheckpointStore(folder, CheckpointConfig(async_save=async_save, keep_last=9))
    state = state_of_rank(layout, ranks.rank, 0)
    for step in steps:
        for tensor, value in _pairs(state, state_of_rank(layout, ranks.rank, step)):
            tensor.copy_(value)
        store.save(step, state | {"loader": {"position": step}, "step": step})
        copied = set(store._copies._buffers)
        for tensor, _ in _pairs(state, state):
            tensor.fill_(-1)
    store.close()
    return copied


def load(layout: Layout, source: str, ranks: Ranks, folder: Path) -> tuple[int | None, list[str]]:
    """A case: load the newest checkpoint of another case; its step, and what is not as it was saved."""
    state = state_of_rank(layout, ranks.rank, 0)
    step = CheckpointStore.open_any(folder.parent / source).load(state)
    return step, differing(state, state_of_rank(layout, ranks.rank, step or 0))


def _own(name: str, layout: Layout, rank: int, step: int) -> Tensor | FlatShard:
    parallel = PARAMETERS[name][1]
    part = own_part(whole(name, "model", step), parallel, layout, rank).contiguous()
    return FlatShard.from_part(part, parallel, layout, rank) if parallel.cuts else part


def _zero_shard(name: str, kind: str, layout: Layout, rank: int, step: int) -> FlatShard:
    parallel = PARAMETERS[name][1]
    part = own_part(whole(name, kind, step), parallel, layout, rank)
    index, size = layout.index(parallel.summed_over, rank), layout.size(parallel.summed_over)
    # shares of one size, less 2 elements for the first: ranges that are no rows, and empty ones
    bounds = [0, *(max(part.numel() * i // size - 2, 0) for i in range(1, size)), part.numel()]
    start, stop = bounds[index], bounds[index + 1]
    flat = torch.cat([torch.zeros(3), part.reshape(-1)[start:stop]])
    return FlatShard(flat[3:], start, part.shape, parallel, layout, rank)


def _pairs(state: dict[str, Any], other: dict[str, Any]) -> list[tuple[Tensor, Tensor]]:
    theirs = flatten(other).tensors
    return [(local_part(t), local_part(theirs[name])) for name, t in flatten(state).tensors.items()]


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)
