"""The update of buffers whose elements 32 bits cannot count, by torch's kernel and compiled."""

import gc
import math

import pytest
import torch
from torch import Tensor, nn

from graphmoe.config.schema import OptimConfig, TrainConfig
from graphmoe.optim.zero1 import Optimizer
from graphmoe.passes.base import PassRunner
from graphmoe.runtime.compile.executor import CompiledSegments

WIDTH = 2**16
ROWS = 2**15 + 3
SLICES = [slice(0, 4096), slice(2**31 - 2048, 2**31 + 2048), slice(ROWS * WIDTH - 4096, ROWS * WIDTH)]
"""The beginning, where 32 bits end, and the end."""
DECAY, CLIP, LR = 0.1, 0.5, 1e-3


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(ROWS, WIDTH, dtype=torch.bfloat16, device="cuda").normal_())


def reference(main: Tensor, grad: Tensor) -> Tensor:
    weight = nn.Parameter(main.double())
    weight.grad = grad.double()
    torch.optim.AdamW([weight], lr=LR, betas=(0.9, 0.95), eps=1e-8, weight_decay=DECAY).step()
    return weight.detach()


@pytest.mark.alone
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_one_update_reaches_every_element_and_copies_no_buffer_to_the_host(compiled):
    gc.collect()  # an optimizer refers to itself
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()  # Inductor copies to the host what would raise the peak
    if torch.cuda.mem_get_info()[0] < 50 * 2**30:
        pytest.skip("needs 50 GiB")
    torch.manual_seed(0)
    config = OptimConfig(
        lr=LR, schedule="constant", warmup_steps=0, weight_decay=DECAY, beta1=0.9, beta2=0.95
    )
    optimizer = Optimizer(Wide(), config, TrainConfig(steps=2, clip_grad_norm=CLIP))
    if compiled:
        segments = CompiledSegments(PassRunner([]))
        optimizer.compile(segments.in_place)
    optimizer.gradient_of(optimizer.weights[0]).add(torch.zeros((), device="cuda"))
    grad = optimizer.families[0].grad.normal_()
    norm = math.sqrt(sum(part.double().square().sum().item() for part in grad.split(2**26)))
    main = optimizer.main[0].view(-1)
    wanted = [reference(main[part], grad[part] * (CLIP / norm)) for part in SLICES]
    pinned = torch.cuda.host_memory_stats()["allocated_bytes.allocated"]
    result = optimizer.step(torch.ones((), device="cuda"))
    assert result.grad_norm.item() == pytest.approx(norm, rel=1e-5)
    for part, values in zip(SLICES, wanted, strict=True):
        torch.testing.assert_close(main[part].double(), values, rtol=1e-6, atol=1e-7)
    assert torch.equal(optimizer.weights[0].view(-1), main.bfloat16())
    assert torch.cuda.host_memory_stats()["allocated_bytes.allocated"] - pinned < 2**20
