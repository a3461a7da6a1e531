"""Helpers of the tests of recompute: units whose graphs run as they are, and one layer's gradients."""

import functools

import torch

from graphmoe.config.schema import RecomputeConfig
from graphmoe.passes.table import PassRunner, select_passes
from graphmoe.plan.recompute import Recompute
from graphmoe.runtime.compile.executor import CompiledSegments
from tests.runs import config
from tests.runtime.test_compiled import model_of

B, S, D = 2, 16, 16
ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
GQA = ("model.attention=gqa", "model.num_kv_heads=1", "model.head_dim=4", "model.qk_norm=true")
UNFUSED = "passes.disabled=[fuse_experts]"


def recompute(**named) -> Recompute:
    return Recompute.of(RecomputeConfig(**named))


class Unmeasured(PassRunner):
    """Runner that does not cut the graph once more for each pass, to say how many bytes the pass saves."""

    def run(self, stage, module, unit, segments=(), saved_bytes=None):
        return super().run(stage, module, unit, segments)


def executor(wanted: Recompute | None = None, *overrides: str) -> CompiledSegments:
    passes = config(*overrides).passes
    knobs = {"fuse_loss": {"needs_grad": True}}
    return CompiledSegments(lambda trains: Unmeasured(select_passes(passes, knobs)), recompute=wanted)


def layer_gradients(execute, *overrides: str, layer: int = 1, dtype=torch.float32):
    """Loss, and the gradients of the input and of every weight of one layer."""
    model = model_of("model.num_layers=2", *overrides)
    module = model.layers[layer].to(dtype)
    for buffer in module.buffers():
        buffer.data = buffer.data.float()
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(B, S, D, generator=generator).to(dtype).requires_grad_()
    output = module(x, *model.rope(S, x.device), execute, layer)
    loss = output.square().sum() if layer == 0 else output.x_BSD.square().sum() + output.loss
    return loss, torch.autograd.grad(loss, [x, *module.parameters()])


@functools.cache
def kept_without(*overrides: str, layer: int = 1, dtype=torch.float32) -> tuple[int, list[torch.Tensor]]:
    execute = executor(None, *(word for word in overrides if word.startswith("passes.")))
    loss, gradients = layer_gradients(execute, *overrides, layer=layer, dtype=dtype)
    assert execute.reports[0].recomputed == 0
    return execute.reports[0].kept_bytes, [loss, *gradients]
