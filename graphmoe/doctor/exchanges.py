"""Checks between ranks, each a process: token exchanges and an all-reduce inside a graph.

Values are small integers, so results are exact and are compared on the device, in the graph. Suffixes: T
tokens, K slots, N rows received, D hidden.
"""

import functools
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from graphmoe.bench.dispatch_suite import vendors_of
from graphmoe.doctor.outcome import Error, Numbers, Skipped, side_stream
from graphmoe.ops.collectives import use_groups
from graphmoe.ops.dispatch import Dispatcher, send_plan
from graphmoe.ops.symm import use_peers
from graphmoe.plan.experts import Load
from graphmoe.plan.layout import Layout
from graphmoe.runtime.capture.graphs import GraphMaker
from graphmoe.runtime.dispatch import close_dispatcher, open_buffer
from graphmoe.runtime.dispatch.deepep import DeepEP
from graphmoe.runtime.dispatch.symm import Symm, make_peers
from graphmoe.runtime.host.environment import MULTICAST
from graphmoe.runtime.ranks import Mesh, Ranks, backend_of
from graphmoe.training.auto import SHARED_GPUS

RANKS = 2
T, D, EXPERTS, K = 128, 512, 8, 2
ROUNDS = 5  # of a graph, each a dispatch and a combine, or two sums
Round = Callable[[Tensor], Tensor]  # its number, int64 [] -> how many elements are wrong


def token_exchanges(device: torch.device, kind: str, replays: int) -> Numbers:
    """Exchange tokens by ``kind`` (symm, or vendor) in a graph; each round has other tokens and routing."""
    if kind == "vendor":
        names, left_out = vendors_of(device, D)
        if not names:
            raise Skipped("; ".join(left_out) or "needs a GPU")
        kind = names[0]
    return _on_ranks(device, functools.partial(_trips, kind), replays)


def all_reduces(device: torch.device, replays: int) -> Numbers:
    """Sum over ranks in a graph, by NCCL or RCCL, of one rank if there is one GPU."""
    return _on_ranks(device, _sums, replays, min(RANKS, torch.cuda.device_count()))


@contextmanager
def _trips(kind: str, device: torch.device, ranks: Ranks) -> Iterator[Round]:
    mesh, rank = Mesh(Layout(dp=ranks.size, ep=ranks.size)), ranks.rank
    use_groups(mesh)
    room, experts = Load(ranks.size * T, ranks.size * T * K), EXPERTS // ranks.size
    if kind == "symm":
        use_peers(make_peers(mesh, device))
        dispatcher: Dispatcher = Symm(room, experts, 1)
    else:
        open_buffer(kind, mesh, D)
        dispatcher = DeepEP(room, experts)
    token_T1, slot_K = torch.arange(T, device=device)[:, None], torch.arange(K, device=device)
    column_D = torch.arange(D, device=device)

    def trip(number: Tensor) -> Tensor:
        h_TD = ((7 * token_T1 + 3 * column_D + 5 * number + 11 * rank) % 7 - 3).bfloat16()
        weight_TK = ((token_T1 + slot_K + number) % 3 + 1).float()
        expert_TK = ((5 * token_T1 + 3 * (number + slot_K) + rank) % EXPERTS).int()
        plan = send_plan(expert_TK, EXPERTS, ranks.size, 1)
        received_ND, weight_NK, number_NK, _, *handle = dispatcher.dispatch(h_TD, weight_TK, expert_TK, *plan)
        scale_N1 = torch.where(number_NK >= 0, weight_NK * (number_NK + 2), 0).sum(1, keepdim=True)
        sum_TD = dispatcher.combine((received_ND * scale_N1).bfloat16(), *plan, *handle)
        wanted_TD = h_TD.float() * (weight_TK * (expert_TK % experts + 2)).sum(1, keepdim=True)
        return (sum_TD.float() != wanted_TD).sum()

    yield trip
    close_dispatcher()
    use_groups(None)


@contextmanager
def _sums(device: torch.device, ranks: Ranks) -> Iterator[Round]:
    index = torch.arange(1 << 16, device=device)

    def of_rank(number: Tensor, rank: int) -> Tensor:
        return ((index + number) % 7 * (rank + 1)).float()

    def reduce(number: Tensor) -> Tensor:
        wrong = torch.zeros_like(number)
        for part in (number, number + 3):
            total = of_rank(part, ranks.rank)
            dist.all_reduce(total)
            wrong += (total != sum(of_rank(part, rank) for rank in range(ranks.size))).sum()
        return wrong

    yield reduce


def _on_ranks(device: torch.device, made: Callable[..., object], replays: int, size: int = RANKS) -> Numbers:
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_rank, (size, device.type, made, replays, folder), nprocs=size)
        wrong = [json.loads(file.read_text()) for file in Path(folder).glob("*.json")]
    assert len(wrong) == size
    gpus = min(size, torch.cuda.device_count()) if device.type == "cuda" else 0
    numbers: Numbers = {"ranks": size, "gpus": gpus, "exchanges": 2 * ROUNDS * replays}
    return numbers | {"wrong elements": Error(float(sum(wrong)), 0)}


def _rank(rank: int, size: int, kind: str, made: Callable[..., object], replays: int, folder: str) -> None:
    os.environ |= {"LOCAL_WORLD_SIZE": str(size), "LOCAL_RANK": str(rank), **MULTICAST}
    device = torch.device("cpu")
    if kind == "cuda":
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    backend = backend_of(device)
    if kind == "cuda" and torch.cuda.device_count() < size:  # NCCL refuses two ranks on one GPU
        os.environ[SHARED_GPUS], backend = "1", "cpu:gloo,cuda:gloo"
    dist.init_process_group(backend, init_method=f"file://{folder}/meeting", rank=rank, world_size=size)
    with torch.no_grad(), made(device, ranks := Ranks()) as one_round:  # type: ignore[attr-defined]
        Path(folder, f"{rank}.json").write_text(json.dumps(_replayed(one_round, device, ranks, replays)))
    dist.destroy_process_group()


def _replayed(one_round: Round, device: torch.device, ranks: Ranks, replays: int) -> int:
    number, wrong = (torch.zeros((), dtype=torch.int64, device=device) for _ in range(2))

    def run() -> tuple[Tensor, ...]:
        for _ in range(ROUNDS):
            wrong.add_(one_round(number.add_(1)))
        return ()

    maker = GraphMaker(device)
    with side_stream(device):
        run()  # loads kernels, and makes shared memory large enough
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        ranks.barrier()
        graph = maker.make(run)
        ranks.barrier()  # no rank replays while another captures
        for _ in range(replays):
            graph.replay()
    assert int(number) == ROUNDS * (replays + 1), number
    maker.release()
    ranks.barrier()
    return int(wrong)
