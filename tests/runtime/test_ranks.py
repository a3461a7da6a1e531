"""Messages between ranks: sums, objects, and errors of one rank that all raise."""

import functools
import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from graphmoe.config.schema import ConfigError
from graphmoe.runtime.ranks import Place, Ranks, check_places, sums
from tests.distributed.ranks import run_ranks


class Picky(Exception):
    """An error that cannot be made again from its message."""

    def __init__(self, one: int, other: int) -> None:
        super().__init__(f"{one} and {other}")


def refuse(error: Exception | None) -> None:
    if error:
        raise error


def summed(ranks: Ranks, folder: Path) -> tuple[torch.Tensor, ...]:
    count = torch.tensor([2**24 + 1, 5], dtype=torch.int32) * (ranks.rank + 1)
    loss = torch.tensor([[0.1], [float("nan")]]) if ranks.rank else torch.tensor([[0.2], [1.0]])
    return sums(dist.group.WORLD, loss, count)


def objects(ranks: Ranks, folder: Path) -> dict[str, Any]:
    ranks.barrier()
    os.environ["LOCAL_WORLD_SIZE"] = "1"
    two_nodes = Ranks()
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    return {
        "places": ranks.gather((ranks.rank, ranks.size, ranks.local_index, ranks.is_first)),
        "first": ranks.on_first(lambda: ranks.rank),
        "one node": ranks.on_first_of_node(lambda: ranks.rank),
        "two nodes": two_nodes.on_first_of_node(lambda: ranks.rank),
    }


def errors(ranks: Ranks, folder: Path) -> list[str]:
    own, found = ConfigError(f"of rank {ranks.rank}"), []
    for collective, error in (
        (ranks.on_first, own),
        (ranks.on_first, Picky(1, 2)),
        (ranks.on_first_of_node, own),
        (ranks.on_each, own if ranks.rank else None),
    ):
        with pytest.raises(Exception) as caught:
            collective(functools.partial(refuse, error))
        found.append(f"{caught.typename}: {caught.value}")
    return found


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    cases = {case.__name__: case for case in (summed, objects, errors)}
    return run_ranks(tmp_path_factory.mktemp("world"), cases)


def test_sums_are_exact_for_counts_and_keep_shape_and_dtype(two):
    for loss, count in two["summed"]:
        assert loss.dtype == torch.float32 and loss.shape == (2, 1)
        assert loss[0].item() == pytest.approx(0.3) and loss[1].isnan()
        assert count.dtype == torch.int32 and count.tolist() == [3 * (2**24 + 1), 15]


def test_every_rank_knows_what_all_said_and_what_the_first_did(two):
    places = [(0, 2, 0, True), (1, 2, 1, False)]
    same = {"places": places, "first": 0, "one node": 0}
    assert two["objects"] == [{**same, "two nodes": rank} for rank in range(2)]


def test_an_error_of_one_rank_is_raised_on_every_rank_even_if_it_cannot_be_pickled(two):
    of_first, of_second = "ConfigError: of rank 0", "ConfigError: of rank 1"
    assert two["errors"] == [[of_first, "RuntimeError: Picky: 1 and 2", of_first, of_second]] * 2


@pytest.mark.parametrize(
    ("hosts", "local_ranks", "sizes", "said"),
    [
        ("aabb", (0, 1, 0, 1), (2, 2, 2, 2), None),
        ("aaaa", (0, 1, 0, 1), (2, 2, 2, 2), None),  # two nodes of one machine
        ("aabb", (0, 0, 0, 0), (2, 2, 2, 2), None),  # each sees its own GPU only
        ("abab", (0, 0, 1, 1), (2, 2, 2, 2), "rank 1 is local rank 0 of b, and must be local rank 1 of a"),
        ("abab", (0, 0, 0, 0), (2, 2, 2, 2), "distribution=block, or mpirun --map-by ppr:2:node"),
        ("aaab", (0, 1, 2, 0), (3, 3, 3, 1), "3 ranks on a and 1 on b; start the same number on each node"),
    ],
)
def test_ranks_run_node_by_node_or_are_refused(hosts, local_ranks, sizes, said):
    places = [Place(host, host, *local) for host, *local in zip(hosts, local_ranks, sizes, strict=True)]
    with nullcontext() if said is None else pytest.raises(ConfigError, match=said):
        check_places(places)


def test_one_rank_gives_back_what_it_got():
    ranks, tensor = Ranks(), torch.ones(2)
    assert (ranks.rank, ranks.size, ranks.local_index, ranks.is_first) == (0, 1, 0, True)
    assert sums(None, tensor, tensor) == (tensor, tensor)
    assert ranks.gather(3) == [3] and ranks.on_first(lambda: 4) == ranks.on_first_of_node(lambda: 4) == 4
