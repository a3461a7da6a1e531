"""Ranks on GPUs that share matrices or sequences, as cases of `tests.distributed.ranks`."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from graphmoe.model.build import build_model
from graphmoe.ops import collectives as ops
from graphmoe.plan.layout import Layout
from graphmoe.runtime.ranks import Mesh, Ranks
from tests.distributed.steps import batch, compiling
from tests.gpu.tiny import GPU
from tests.runs import config

LAYOUT = Layout(tp=2)


@dataclass
class Replayed:
    """Results of a captured graph's replay, and of the same calls before, uncaptured."""

    captured: list[Tensor]
    plain: list[Tensor]


def captured(run: Callable[[], list[Tensor]], change: Callable[[int], None]) -> Replayed:
    """Warm up on one input, capture on it, replay on another; the host must not wait for the device."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
        torch.cuda.set_sync_debug_mode("error")
        run()
        torch.cuda.set_sync_debug_mode("default")
        change(1)
        plain = [tensor.clone() for tensor in run()]
        change(0)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            results = run()
        change(1)
        graph.replay()
    torch.cuda.synchronize()
    return Replayed([tensor.cpu() for tensor in results], [tensor.cpu() for tensor in plain])


def all_collectives(ranks: Ranks, folder: Path) -> Replayed:
    """Each collective, forward and backward, on bf16."""
    ops.use_groups(Mesh(LAYOUT))
    x = torch.empty(2, 8, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    def change(seed: int) -> None:
        generator = torch.Generator("cuda").manual_seed(2 * seed + ranks.rank)
        with torch.no_grad():
            x.normal_(generator=generator)

    def run() -> list[Tensor]:
        results = [ops.all_gather(x, "tp", 2, dim) for dim in (0, 1)]
        results += [ops.reduce_scatter(x, "tp", 2, dim) for dim in (0, 1)]
        results += [ops.all_to_all(x, "tp", 2, split=2, join=1), ops.all_to_all(x, "tp", 2, split=1, join=2)]
        results += [ops.all_reduce(x, "tp", 2), ops.all_reduce(x, "tp", 2, "max"), ops.index_along("tp", x)]
        loss = sum((y.float() ** 2).sum() for y in results if y.requires_grad)
        return [*(y.detach() for y in results), *torch.autograd.grad(loss, x)]

    change(0)
    return captured(run, change)


@dataclass(frozen=True)
class CapturedStep:
    """Loss and gradients of a bf16 model of two ranks, eager or compiled."""

    words: tuple[str, ...]
    compiled: bool
    layout: Layout = LAYOUT

    def __call__(self, ranks: Ranks, folder: Path) -> Replayed:
        mesh = Mesh(self.layout)
        ops.use_groups(mesh)
        run_config = config(*GPU, *self.words)
        model = build_model(
            run_config.model,
            device="cuda",
            dtype=torch.bfloat16,
            execution=run_config.moe,
            layout=self.layout,
            rank=mesh.rank,
        )
        execute = (compiling(run_config, folder),) if self.compiled else ()
        tokens, labels = (each.cuda() for each in batch(0, run_config.model.vocab_size, "none"))
        batches = [tuple(t.cuda() for t in batch(number, 512, "some")) for number in (0, 1)]

        def change(number: int) -> None:
            tokens.copy_(batches[number][0])
            labels.copy_(batches[number][1])

        def run() -> list[Tensor]:
            model.zero_grad()
            output = model.loss(tokens, labels, *execute)
            output.total.backward()
            return [output.total.detach(), *(p.grad for p in model.parameters())]

        return captured(run, change)
