"""Products in 8 bits are timed on a GPU, beside those in bf16."""

import pytest
import torch

from graphmoe.ops import fp8_choice
from graphmoe.ops.fp8_choice import Dense, Experts, speeds
from graphmoe.ops.grouped_mlp.choice import MlpShape
from graphmoe.runtime.cache.store import CompileCache

CUDA = torch.device("cuda", 0)


@pytest.mark.parametrize("wgrad", ["fp8", "bf16"])
def test_products_are_timed_and_remembered(wgrad, tmp_path, monkeypatch):
    experts = Experts(MlpShape(2048, 512, 256, 16, 4), "triton,triton,triton")
    products = {"dense": Dense(2040, 512, 1024, wgrad), "experts": experts}
    found = speeds(products, 4, CUDA, CompileCache(tmp_path))
    assert all(0.01 < speed < 100 for speed in found.values())
    monkeypatch.delattr(fp8_choice, "time_in_turns")
    assert speeds(products, 4, CUDA, CompileCache(tmp_path)) == found
