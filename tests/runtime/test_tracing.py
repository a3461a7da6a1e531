"""Tracing of segments: effects that a graph of tensors does not show by itself, and refusals."""

import pytest
import torch
from torch import Tensor, nn

from graphmoe.passes.table import PassRunner
from graphmoe.runtime.compile.executor import CompiledSegments
from graphmoe.runtime.compile.units import UntraceableSegment
from graphmoe.segments import Segment, run_segments


def compiled(run, *, writes=("y",), parameters=()):
    """Outputs and gradients of one segment ``attn`` of x, compiled and plain."""
    found = []
    for execute in (CompiledSegments(lambda trains: PassRunner([])), run_segments):
        x = torch.arange(12.0).view(3, 4).mul(0.1).requires_grad_()
        outputs = execute([Segment("attn", run, ("x",), writes)], {"x": x}, writes)
        total = sum((output * (i + 2)).sin().sum() for i, output in enumerate(outputs))
        found.append(([o.detach() for o in outputs], torch.autograd.grad(total, [x, *parameters])))
    return found


def assert_same(found) -> None:
    (outputs, gradients), (expected, of_plain) = found
    for one, other in zip([*outputs, *gradients], [*expected, *of_plain], strict=True):
        assert one.shape == other.shape and one.stride() == other.stride()
        torch.testing.assert_close(one, other, rtol=2e-5, atol=1e-5)


class Straight(torch.autograd.Function):
    """Function that rounds, and lets gradients through."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        pass

    @staticmethod
    def backward(ctx, dy: Tensor) -> Tensor:
        return dy


class Doubled(Straight):
    gradient_of_forward = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx, dy: Tensor) -> Tensor:
        return dy * 2


def without_gradients(x: Tensor) -> Tensor:
    with torch.no_grad():
        scale = x.exp().sum()
        with torch.enable_grad():
            inner = x.cos()
        scale = scale + inner.sum()
    return x * scale


def test_a_region_without_gradients_gets_none_and_one_inside_it_does():
    # inner has a gradient of its own, but what it is added to under no_grad has not
    assert_same(compiled(without_gradients))


def inferring(x: Tensor) -> Tensor:
    with torch.inference_mode():
        scale = x.exp()
    return x * scale.clone()


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


def test_a_region_in_inference_mode_gets_no_gradient():
    assert_same(compiled(inferring))


@pytest.mark.parametrize(
    "run, what",
    [(changing, "tensor with a gradient"), (Counting(), "seen"), (lambda x: x.detach().add_(1), "x")],
)
def test_a_change_in_place_that_a_graph_would_get_wrong_is_refused(run, what):
    with pytest.raises(UntraceableSegment, match=f"segment attn of attn .*{what}.* in place"):
        compiled(run)


def test_a_function_whose_backward_is_the_gradient_of_its_forward_is_compiled():
    assert_same(compiled(lambda x: Doubled.apply(x) + 1))


def test_a_function_with_another_backward_is_refused_with_a_way_out():
    with pytest.raises(UntraceableSegment, match=r"segment attn .* Straight .* torch.library") as caught:
        compiled(lambda x: Straight.apply(x * 2) + 1)
    assert "Straight.gradient_of_forward = True" in str(caught.value)


def test_a_segment_that_reads_a_value_on_the_host_is_named():
    with pytest.raises(
        UntraceableSegment, match="(?s)segment attn of attn cannot be compiled.*enabled=false"
    ):
        compiled(lambda x: x * 2 if x.sum().item() > 0 else x)


def test_an_error_of_the_segment_itself_is_the_cause_of_the_refusal():
    with pytest.raises(UntraceableSegment, match=r"segment attn of attn .*torch.Size\(\[3\]\)") as caught:
        compiled(lambda x: x + torch.ones(3))
    assert isinstance(caught.value.__cause__, RuntimeError)


VIEWS = {
    "the input": (lambda x: x, ("y",)),
    "a view of the input": (lambda x: x.t()[1:], ("y",)),
    "the input beside a result": (lambda x: (x, x.exp(), x.view(-1)), ("y", "z", "v")),
    "a result twice": (lambda x: (lambda h: (h, h))(x.exp()), ("y", "z")),
    "a result and a view of it": (lambda x: (lambda h: (h.flatten(), h, h[:, :2]))(x.exp()), ("y", "z", "v")),
    "halves of a result": (lambda x: x.exp().chunk(2, dim=-1), ("y", "z")),
    "halves of the input, one used": (
        lambda x: (x.chunk(2, dim=-1)[0], x.chunk(2, dim=-1)[1].exp()),
        ("y", "z"),
    ),
    "other views": (lambda x: (x[None].squeeze(), x.diagonal(), x.exp().unbind(0)[1]), ("y", "z", "v")),
    "a detached view": (lambda x: (lambda h: (h, h.detach().view(-1)))(x.exp()), ("y", "z")),
}


@pytest.mark.parametrize("case", VIEWS)
def test_outputs_that_share_memory_are_those_of_the_plain_segment(case):
    run, writes = VIEWS[case]
    assert_same(compiled(run, writes=writes))


@pytest.mark.parametrize("case", VIEWS)
def test_compiled_outputs_share_the_memory_that_plain_ones_share(case):
    run, writes = VIEWS[case]
    x = torch.rand(3, 4)
    pointers = []
    for execute in (CompiledSegments(lambda trains: PassRunner([])), run_segments):
        with torch.no_grad():
            outputs = execute([Segment("attn", run, ("x",), writes)], {"x": x}, writes)
        storages = [x.untyped_storage().data_ptr(), *(o.untyped_storage().data_ptr() for o in outputs)]
        pointers.append([storages.index(pointer) for pointer in storages])
    assert pointers[0] == pointers[1]


def test_a_module_hands_on_its_own_input_and_learns():
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor([1.0, 2.0, 3.0, 4.0]))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x * self.scale, x

    module = Scaled()
    assert_same(compiled(module, writes=("y", "x"), parameters=tuple(module.parameters())))
