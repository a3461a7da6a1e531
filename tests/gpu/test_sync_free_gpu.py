"""moe.sync_free_stage on a GPU: what a stage promises never waits for the host; what it leaves out may."""

from collections.abc import Callable, Iterator

import pytest
import torch

from graphmoe.config.schema import ModelConfig, PassesConfig
from graphmoe.model.build import build_model
from graphmoe.model.layer import PLAN
from graphmoe.passes import select_passes
from graphmoe.passes.base import PassRunner
from graphmoe.runtime.compile.executor import CompiledSegments
from graphmoe.segments import Executor, run_segments
from tests.gpu.sleeping import (
    assert_host_is_back_while_the_device_sleeps,
    assert_never_waits,
    syncs_are_errors,
)

CONFIG = ModelConfig(
    vocab_size=64,
    hidden_size=128,
    num_layers=1,
    num_dense_layers=0,
    kv_lora_rank=64,
    num_experts=8,
    expert_ffn_size=64,
    shared_ffn_size=64,
    selection_bias=True,
    z_loss_coef=1e-3,
)
STAGE_1 = ("moe_router", "moe_preprocess")
STAGE_2 = (*STAGE_1, "moe_dispatch", "moe_experts")
STAGE_3 = (*STAGE_2, "shared_experts", "moe_combine")
PROMISED = {  # stage: its segments, and what is wanted of them
    1: (STAGE_1, ("h", "weight", "loss", "stats", *PLAN)),
    2: (STAGE_2, ("routed", "loss", "stats", "counts")),
    3: (STAGE_3, ("x", "loss", "stats", "counts")),
}
WAYS = [("eager", torch.bfloat16), ("compiled", torch.bfloat16), ("compiled", torch.float32)]
Part = Callable[[], None]


def make_part(stage: int, way: str, dtype: torch.dtype, device: str = "cuda") -> Part:
    """Forward and backward of what a stage promises, in one layer of 1024 tokens."""
    names, wanted = PROMISED[stage]
    layer = build_model(CONFIG, device=device, dtype=dtype).layers[0]
    segments = [segment for segment in layer.segments() if segment.name in names]
    passes = select_passes(PassesConfig(), {"fuse_experts": {"backend": "triton"}})
    execute: Executor = run_segments if way == "eager" else CompiledSegments(PassRunner(passes))
    x_BSD = torch.randn(4, 256, CONFIG.hidden_size, device=device).to(dtype).requires_grad_()

    def run() -> None:
        layer.zero_grad()
        outputs = [o for o in execute(segments, {"x": x_BSD}, wanted) if o.requires_grad]
        torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs])

    return run


@pytest.fixture(scope="module")
def warm_part() -> Iterator[Callable[..., Part]]:
    """Make parts that have run three times, or give those of an earlier test."""
    made: dict[tuple[int, str, torch.dtype], Part] = {}

    def make(stage: int, way: str, dtype: torch.dtype) -> Part:
        if (stage, way, dtype) not in made:
            run = made[stage, way, dtype] = make_part(stage, way, dtype)
            for _ in range(3):
                run()
        torch.cuda.synchronize()
        return made[stage, way, dtype]

    yield make


@pytest.mark.parametrize("way, dtype", WAYS, ids=str)
@pytest.mark.parametrize("stage", PROMISED)
def test_what_a_stage_promises_never_waits_for_the_device(warm_part, stage, way, dtype):
    assert_never_waits(warm_part(stage, way, dtype))


def test_plain_products_in_fp32_read_on_the_host_behind_a_router_that_does_not(warm_part):
    router, experts = (warm_part(stage, "eager", torch.float32) for stage in (1, 2))
    with syncs_are_errors():
        router()
        with pytest.raises(RuntimeError, match="synchronizing"):
            experts()
    assert_host_is_back_while_the_device_sleeps(router)
    with pytest.raises(AssertionError, match="the host waited"):
        assert_host_is_back_while_the_device_sleeps(experts)
