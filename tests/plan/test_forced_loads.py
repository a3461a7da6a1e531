"""Loads that benchmarks force: what each is, and that tokens are drawn by them."""

import itertools
import json
import math

import pytest
import torch

from graphmoe.config.schema import ModelConfig, MoEConfig
from graphmoe.config.untrusted import FileError
from graphmoe.ops.router import draw_experts
from graphmoe.plan.experts import Load, sent_load
from graphmoe.plan.forced_loads import LOADS, ends, fitted, load, read_counts, recorded
from graphmoe.plan.layout import Layout

SIZES = [(4, 2, 2), (4, 4, 1), (8, 1, 8), (12, 5, 3), (64, 6, 2), (256, 8, 64), (384, 16, 1), (6, 5, 2)]
"""Experts, slots of a token, ranks."""


def test_alltoall_is_counted_with_fewer_rows_if_routing_is_uniform():
    layout, model = Layout(dp=16, ep=4, etp=2), ModelConfig(num_experts=8, top_k=2)
    forced, uniform = (sent_load(MoEConfig(force_balance=each), model, layout, 64) for each in (True, False))
    assert forced == Load(2 * 64 * 2, 256) and uniform == Load(math.ceil(8 * 64 * 13 / 28), 256)


def of_ranks(share: list[float], ranks: int) -> list[float]:
    own = len(share) // ranks
    return [sum(share[rank * own : (rank + 1) * own]) * ranks / sum(share) for rank in range(ranks)]


@pytest.mark.parametrize("name", LOADS)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_a_load_has_all_slots_of_a_token_and_no_expert_twice(name, sizes):
    for step, layer in itertools.product((1, 2, 10, 37), (0, 1, 70)):
        share, units = load(name, step, layer, *sizes), ends(load(name, step, layer, *sizes))
        assert len(share) == sizes[0] and math.isclose(sum(share), sizes[1])
        assert min(share) >= 0 and max(share) <= 1
        chosen = draw_experts(512, sizes[1], torch.tensor(units))
        assert chosen.dtype == torch.int32 and chosen.shape == (512, sizes[1])
        assert bool((chosen.diff(dim=1) > 0).all()) and chosen.min() >= 0 and chosen.max() < sizes[0]


def test_each_load_is_what_its_name_says():
    E, K, R = 64, 8, 8

    def ranks(name, step=1):
        return of_ranks(load(name, step, 3, E, K, R), R)

    assert load("balanced", 1, 3, E, K, R) == [1 / 8] * E
    assert ranks("hot_rank") == pytest.approx([2, *[6 / 7] * 7])
    assert ranks("idle_rank") == pytest.approx([0, *[8 / 7] * 7])
    assert ranks("burst", 10) == pytest.approx([3, *[5 / 7] * 7]) and ranks("burst", 11) == [1.0] * 8
    hot = load("hot_experts", 1, 3, E, K, R)
    assert hot[12:16] == pytest.approx([0.8] * 4) and max(hot[:12] + hot[16:]) == pytest.approx(4.8 / 60)
    assert load("rotating", 1, 3, E, K, R)[16:20] == pytest.approx([0.8] * 4)
    assert load("rotating", 2, 3, E, K, R)[20:24] == pytest.approx([0.8] * 4)
    one = load("one_expert", 1, 3, E, K, R)
    assert one[3] == 1 and one[:3] + one[4:] == pytest.approx([7 / 63] * 63)
    assert of_ranks(load("hot_rank", 1, 0, 4, 2, 2), 2) == [2, 0], "one of two ranks takes all"


def test_weights_become_shares_of_at_most_one():
    assert fitted([1, 1, 2], 2) == [0.5, 0.5, 1]
    assert fitted([9, 1, 1, 0], 2) == [1, 0.5, 0.5, 0]
    assert fitted([1e9, 1e9, 1e-30], 2) == [1, 1, 0]
    assert fitted([5, 0, 0, 0, 0], 3) == [1, 0.5, 0.5, 0.5, 0.5], "fewer are loaded than a token takes"


@pytest.mark.parametrize("start, tokens", [(0, 4096), (1000, 400)])
def test_any_run_of_tokens_has_nearly_the_load(start, tokens):
    weights = torch.rand(64, generator=torch.Generator().manual_seed(1)).pow(4).tolist()
    share = fitted([0.0, *weights, 0.0], 8)
    chosen = draw_experts(start + tokens, 8, torch.tensor(ends(share)))[start:]
    counts = torch.bincount(chosen.flatten(), minlength=66)
    assert counts[0] == counts[65] == 0
    assert (counts - tokens * torch.tensor(share)).abs().max() < 6


def test_recorded_counts_are_taken_in_turns(tmp_path):
    path = tmp_path / "loads.json"
    path.write_text(json.dumps([[[1, 3, 0]], [[0, 0, 1.5]], [[2, 2, 2]]]))
    counts = read_counts(str(path), 3)
    found = [recorded(counts, step, 5, 1) for step in (1, 2, 4)]
    assert found == [[0.25, 0.75, 0], [0, 0, 1], [0.25, 0.75, 0]]


@pytest.mark.parametrize(
    "text, message",
    [
        ("[[[1,2]", "is not JSON"), ('[[["1",2,3]]]', "expected float, found str"), ("[]", "or no step"),
        ("[[]]", "a step without layers"), ("[[[1,2]]]", "counts 2 experts, and model.num_experts=3"),
        ("[[[1,-2,3]]]", "are negative"), ("[[[0,0,0]]]", "or all 0"), ("[[[NaN,1,1]]]", "infinite"),
        ("[[[1e308,1e308,1e308]]]", "infinite"), ("{}", "expected array, found object"),
    ],
)  # fmt: skip
def test_a_file_without_counts_is_refused_in_one_line(tmp_path, text, message):
    path = tmp_path / "loads.json"
    path.write_text(text)
    with pytest.raises(FileError, match=message) as raised:
        read_counts(str(path), 3)
    assert "\n" not in str(raised.value) and str(path) in str(raised.value)
