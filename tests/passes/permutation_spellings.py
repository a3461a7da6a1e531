"""Routing plans, gathers and returns in the many ways in which they are written."""

import torch

from graphmoe.ops.grouped_mm import grouped_mm
from tests.passes.blocks import D, E, K, R, T, experts_of, random

USUAL = {"counts": "scatter_add", "inverse": "scatter", "tokens": "divide", "back": "before"}
SPELLINGS = [
    USUAL | {part: spelling}
    for part, spellings in {
        "counts": ("scatter_add", "histc", "bincount", "of_sorted"),
        "inverse": ("scatter", "index_put", "argsort"),
        "tokens": ("divide", "floor", "table", "expanded", "index_select", "gather"),
        "back": ("plain", "keepdim", "before", "after", "index_add", "scatter_add", "weighted_index_add"),
    }.items()
    for spelling in spellings
]
MOVES = {
    "sort",
    "index",
    "index_select",
    "gather",
    "scatter",
    "index_put",
    "index_add",
    "scatter_add",
    "histc",
}


def count(spelling, ids, order, ordered):
    if spelling == "histc":
        return torch.histc(ordered.float(), bins=E, min=0, max=E - 1)
    if spelling == "bincount":
        return torch.bincount(ids, minlength=E)
    ids = ids[order] if spelling == "of_sorted" else ids
    return torch.zeros(E, dtype=torch.int32).scatter_add(0, ids, torch.ones(R, dtype=torch.int32))


def invert(spelling, order):
    if spelling == "argsort":
        return order.argsort()
    rows = torch.arange(R)
    if spelling == "index_put":
        inverse = torch.empty_like(order)
        inverse[order] = rows
        return inverse
    return torch.zeros_like(order).scatter(0, order, rows)


def gather(spelling, x, order):
    token = order // K
    if spelling == "floor":
        token = torch.div(order, K, rounding_mode="floor")
    elif spelling == "table":
        token = torch.arange(T).repeat_interleave(K)[order]
    elif spelling == "expanded":
        token = torch.arange(T).unsqueeze(1).expand(T, K).reshape(-1)[order]
    elif spelling == "index_select":
        return x.index_select(0, token)
    elif spelling == "gather":
        return x.gather(0, token.unsqueeze(1).expand(-1, D))
    return x[token]


def put_back(spelling, y, weight, order, inverse):
    of_rows = weight.reshape(-1)[order].unsqueeze(1)
    if spelling == "plain":
        return y[inverse].view(T, K, D).sum(dim=1)
    if spelling == "keepdim":
        return y[inverse].view(T, K, D).sum(dim=-2, keepdim=True)
    if spelling == "before":
        return (y * of_rows)[inverse].view(T, K, D).sum(dim=1).to(y.dtype)
    if spelling == "after":
        return (y[inverse.view(T, K)] * weight.unsqueeze(-1)).sum(dim=1).to(y.dtype)
    if spelling == "scatter_add":
        token = (order // K).unsqueeze(1).expand(-1, D)
        return torch.zeros(T, D).scatter_add(0, token, y.float() * of_rows).to(y.dtype)
    rows = (y.float() * of_rows).to(y.dtype) if spelling == "weighted_index_add" else y
    return torch.zeros(T, D, dtype=y.dtype).index_add(0, order // K, rows)


def layer(counts="scatter_add", inverse="scatter", tokens="divide", back="before", stable=True):
    """Tokens through one square matrix of each expert and back."""

    def run(x, weight, w, expert):
        ids = expert.reshape(-1)
        ordered, order = torch.sort(ids, stable=stable)
        ends = count(counts, ids, order, ordered).cumsum(0, dtype=torch.int32)
        y = grouped_mm(gather(tokens, x, order), w, ends)
        return put_back(back, y, weight, order, invert(inverse, order)), ends

    return run


def inputs(dtype=torch.float32, routing="natural"):
    weight = random(T, K, seed=5).detach().softmax(-1).requires_grad_()
    return random(T, D, dtype=dtype), weight, random(E, D, D, seed=6, dtype=dtype), experts_of(routing)


def with_plan(body):
    """A function of rows behind a plan; the plan itself matches."""

    def run(x, weight, w, expert):
        ids = expert.reshape(-1)
        order = ids.argsort(stable=True)
        ends = count("scatter_add", ids, order, None).cumsum(0, dtype=torch.int32)
        return *body(x, weight, order, invert("scatter", order)), ends

    return run


def by_token(y, inverse):
    return y[inverse].view(T, K, D)
