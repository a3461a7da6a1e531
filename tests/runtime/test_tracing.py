"""Tracing of segments: effects that a graph of tensors does not show by itself, and refusals."""

import pytest
import torch
from torch import Tensor, nn

from graphmoe.passes.base import PassRunner
from graphmoe.runtime.compile.executor import CompiledSegments
from graphmoe.runtime.compile.units import UntraceableSegment
from graphmoe.segments import Segment, run_segments


def compiled() -> CompiledSegments:
    return CompiledSegments(PassRunner([]))


class Undeclared(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        pass

    @staticmethod
    def backward(ctx, dy: Tensor) -> Tensor:
        return dy * 2


class Doubled(Undeclared):
    gradient_of_forward = True


def without_gradients(x: Tensor) -> Tensor:
    with torch.no_grad():
        scale = x.exp().sum()
        with torch.enable_grad():
            inner = x.cos()
        scale = scale + inner.sum()  # inner has a gradient of its own, but the sum under no_grad has not
    return x * scale


def inferring(x: Tensor) -> Tensor:
    with torch.inference_mode():
        scale = x.exp()
    return x * scale.clone()


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.arange(1.0, 5))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x * self.scale, x


RUNS = {
    "a region without gradients": without_gradients,
    "a region in inference mode": inferring,
    "a function whose backward is its forward's gradient": lambda x: Doubled.apply(x) + 1,
    "a module that hands on its input": Scaled(),
    "the input": lambda x: x,
    "a view of the input": lambda x: x.t()[1:],
    "the input beside a result": lambda x: (x, x.exp(), x.view(-1)),
    "a result twice": lambda x: (lambda h: (h, h))(x.exp()),
    "a result and a view of it": lambda x: (lambda h: (h.flatten(), h, h[:, :2]))(x.exp()),
    "halves of a result": lambda x: x.exp().chunk(2, dim=-1),
    "halves of the input, one used": lambda x: (x.chunk(2, dim=-1)[0], x.chunk(2, dim=-1)[1].exp()),
    "other views": lambda x: (x[None].squeeze(), x.diagonal(), x.exp().unbind(0)[1]),
    "a detached view": lambda x: (lambda h: (h, h.detach().view(-1)))(x.exp()),
}


@pytest.mark.parametrize("name", RUNS)
def test_outputs_their_memory_and_gradients_are_those_of_the_plain_segment(name):
    run, found = RUNS[name], []
    parameters = [*run.parameters()] if isinstance(run, nn.Module) else []
    for execute in (compiled(), run_segments):
        x = torch.arange(12.0).view(3, 4).mul(0.1).requires_grad_()
        made = run(x)
        writes = ("y", "z", "v")[: 1 if isinstance(made, Tensor) else len(made)]
        segment = Segment("attn", run, ("x",), writes)
        outputs = execute([segment], {"x": x}, writes)
        total = sum((output * (i + 2)).sin().sum() for i, output in enumerate(outputs))
        tensors = [*outputs, *torch.autograd.grad(total, [x, *parameters])]
        with torch.no_grad():
            outputs = execute([segment], {"x": x}, writes)
        storages = [tensor.untyped_storage().data_ptr() for tensor in (x, *outputs)]
        found.append((tensors, [storages.index(pointer) for pointer in storages]))
    (tensors, sharing), (of_plain, plain_sharing) = found
    for one, other in zip(tensors, of_plain, strict=True):
        assert one.shape == other.shape and one.stride() == other.stride()
        torch.testing.assert_close(one, other, rtol=2e-5, atol=1e-5)
    assert sharing == plain_sharing


def changing(x: Tensor) -> Tensor:
    h = x * 2
    with torch.no_grad():
        h.mul_(3)
    return h * h


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen.add_(1)
        return x + self.seen


UNDECLARED = r".* Undeclared .* torch.library.*Undeclared.gradient_of_forward = True"
REFUSED = {
    "a result": (changing, ".*tensor with a gradient.* in place"),
    "a buffer": (Counting(), ".*seen.* in place"),
    "the input": (lambda x: x.detach().add_(1), ".*x.* in place"),
    "another backward": (lambda x: Undeclared.apply(x * 2) + 1, UNDECLARED),
    "a value on the host": (
        lambda x: x * 2 if x.sum().item() > 0 else x, " cannot be compiled.*enabled=false"
    ),
    "an error of its own": (lambda x: x + torch.ones(3), r".*torch.Size\(\[3\]\)"),
}  # fmt: skip


@pytest.mark.parametrize(("run", "said"), REFUSED.values(), ids=REFUSED)
def test_what_a_graph_would_get_wrong_is_refused_with_the_segment_and_a_way_out(run, said):
    x = torch.arange(12.0).view(3, 4).requires_grad_()
    with pytest.raises(UntraceableSegment, match=f"(?s)segment attn of attn{said}") as caught:
        compiled()([Segment("attn", run, ("x",), ("y",))], {"x": x}, ("y",))
    assert "torch.Size" not in said or isinstance(caught.value.__cause__, RuntimeError)
