"""The optimizer against torch's own AdamW and clipping, and what a skipped step leaves alone."""

import copy
import gc
import math
import weakref

import pytest
import torch
from torch import Tensor, nn

from graphmoe.config.schema import OptimConfig, TrainConfig
from graphmoe.model.moe_segments import update_selection_bias
from graphmoe.optim.reduction import WeightGather
from graphmoe.optim.zero1 import Optimizer
from graphmoe.passes.base import PassRunner
from graphmoe.runtime.compile.executor import CompiledSegments
from graphmoe.runtime.compile.units import fakes_of, trace_in_place
from graphmoe.segments import Segment, run_segments
from tests.runs import decoded
from tests.tolerances import TOLERANCES, relative_error

LOSS = torch.tensor(1.0)
STEPS = 4


class Net(nn.Module):
    """A matrix, an expert weight, a norm and a bias."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for name, shape in (("matrix", (5, 3)), ("experts", (2, 4, 3)), ("norm", (6,)), ("bias", (2,))):
            setattr(self, name, nn.Parameter(torch.randn(shape, generator=generator).to(dtype)))


def net_and_optimizer(clip=1.0, dtype=torch.float32, **optim) -> tuple[Net, Optimizer]:
    net = Net(dtype)
    return net, Optimizer(net, OptimConfig(**optim), TrainConfig(steps=STEPS, clip_grad_norm=clip))


def compile_update(optimizer: Optimizer) -> CompiledSegments:
    made = CompiledSegments(PassRunner([]))
    optimizer.compile(made.in_place)
    return made


def gradients(net: nn.Module, step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(p.shape, generator=generator) / (step + 1) for p in net.parameters()]


def backward(net: nn.Module, grads: list[Tensor]) -> None:
    sum((p.float() * g).sum() for p, g in zip(net.parameters(), grads, strict=True)).backward()


def step(net: nn.Module, optimizer: Optimizer, grads: list[Tensor], loss: Tensor = LOSS):
    backward(net, grads)
    return optimizer.step(loss)


@pytest.mark.parametrize("clip", [0.0, 0.5, 1e6])
def test_steps_equal_those_of_torch_adamw_and_clip_grad_norm_in_fp64(clip):
    numbers = {"weight_decay": 0.3, "beta1": 0.8, "beta2": 0.9, "eps": 1e-6}
    net, optimizer = net_and_optimizer(clip, lr=1e-2, schedule="constant", **numbers)
    weights = [p.detach().double().requires_grad_() for p in net.parameters()]
    groups = [
        {"params": [w for w in weights if (w.dim() > 1) == decays], "weight_decay": 0.3 * decays}
        for decays in (True, False)
    ]
    adamw = torch.optim.AdamW(groups, lr=1e-2, betas=(0.8, 0.9), eps=1e-6, foreach=False)
    before = [w.detach().clone() for w in weights]
    for number in range(STEPS):
        grads = gradients(net, number)
        for weight, grad in zip(weights, grads, strict=True):
            weight.grad = grad.double()
        norm = nn.utils.clip_grad_norm_(weights, clip or math.inf).item()
        adamw.step()
        result = step(net, optimizer, grads)
        assert result.finite.item() == 1.0 and result.grad_norm.item() == pytest.approx(norm, rel=1e-6)
    for actual, wanted, start in zip(net.parameters(), weights, before, strict=True):
        assert relative_error(actual.detach(), wanted.detach()) < TOLERANCES[torch.float32].forward
        # an update is about 1e-2 of the weight that it is rounded into
        assert relative_error(actual.detach() - start, wanted.detach() - start) < 1e-4
    assert optimizer.applied.item() == STEPS


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)])
def test_compiled_traceable_or_by_torch_the_update_is_the_same(dtype):
    pairs = [net_and_optimizer(0.5, dtype, lr=1e-2, beta1=0.0, warmup_steps=2) for _ in range(3)]
    plain, traceable, compiled = (optimizer for _, optimizer in pairs)
    traceable.compile(lambda update, arguments: update)
    made = compile_update(compiled)
    for number in range(STEPS):
        loss = torch.tensor(math.nan) if number == 1 else LOSS
        first, *others = [step(net, each, gradients(net, number), loss) for net, each in pairs]
        for result in others:
            torch.testing.assert_close(result, first)
    for a, b, c in zip(*(tensors_of(snapshot(o)) for o in (plain, traceable, compiled)), strict=True):
        for other in (b, c):
            torch.testing.assert_close(other, a, rtol=1e-6 if a.dtype == torch.float32 else 2**-7, atol=1e-9)
    assert [(r.unit, r.graphs) for r in made.reports] == [("optimizer", 1)]


def test_a_parameter_without_a_gradient_in_this_step_has_not_the_one_of_the_last():
    net, optimizer = net_and_optimizer(lr=0.1, beta1=0.0, weight_decay=0.0)
    step(net, optimizer, gradients(net, 0))
    before = copy.deepcopy(net)
    (net.matrix.sum() * 2).backward()
    assert optimizer.step(LOSS).grad_norm.item() == pytest.approx(2 * math.sqrt(15))
    assert not torch.equal(net.matrix, before.matrix)
    for name in ("experts", "norm", "bias"):
        assert torch.equal(getattr(net, name), getattr(before, name))


def snapshot(optimizer: Optimizer) -> dict:
    return copy.deepcopy({"state": decoded(optimizer.state_dict()), "weights": optimizer.weights})


def tensors_of(node) -> list[Tensor]:
    if isinstance(node, Tensor):
        return [node]
    return [t for child in (node.values() if isinstance(node, dict) else node) for t in tensors_of(child)]


NOT_FINITE = [f"{bad} {place}" for bad in ("nan", "inf", "-inf") for place in ("loss", "gradient")]
VOID = ["void", "void with nan loss"]
BAD_STEPS = [(dtype, why, False) for dtype in (torch.float32, torch.bfloat16) for why in NOT_FINITE + VOID]
BAD_STEPS += [(torch.float32, why, True) for why in ("nan gradient", *VOID)]


@pytest.mark.parametrize(
    "dtype, why, compiled",
    [*BAD_STEPS, pytest.param(torch.bfloat16, "nan gradient", True, marks=pytest.mark.slow)],
    ids=str,
)
def test_a_step_that_is_void_or_not_finite_changes_no_bit_but_its_counters(dtype, why, compiled):
    net, optimizer = net_and_optimizer(dtype=dtype, lr=1e-2)
    if compiled:
        compile_update(optimizer)
    step(net, optimizer, gradients(net, 0))
    before = snapshot(optimizer)
    bad = float(why.split()[-2]) if why != "void" else 1.0
    for number in (1, 2):
        grads = gradients(net, number)
        if "gradient" in why:
            grads[1][0, 0, 0] = bad
        optimizer.void.fill_(float("void" in why))
        loss = torch.tensor(bad) if "loss" in why else LOSS
        assert step(net, optimizer, grads, loss).finite.item() == 0.0
    after = snapshot(optimizer)
    counted = 0.0 if "void" in why else 2.0
    counters = dict.fromkeys(("skipped", "skipped_in_row", "longest_skip"), counted) | {"applied": 1.0}
    for state in (before, after):
        found = {name: value.item() for name, value in state["state"].pop("counters").items()}
    assert found == counters
    for one, other in zip(tensors_of(before), tensors_of(after), strict=True):
        assert torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))
    optimizer.void.zero_()
    assert step(net, optimizer, gradients(net, 3)).finite.item() == 1.0
    assert (optimizer.applied.item(), optimizer.skipped_in_row.item()) == (2.0, 0.0)
    moved = (torch.equal(a, b) for a, b in zip(after["weights"], optimizer.weights, strict=True))
    assert not any(moved)


@pytest.mark.parametrize("size", [2e19, 1e25, 3e38])
@pytest.mark.parametrize("clip", [0.0, 1.0, 1e24])
def test_a_gradient_whose_square_is_infinite_in_fp32_is_skipped_unless_it_is_clipped_to_less(clip, size):
    net, optimizer = net_and_optimizer(clip, lr=1e-2)
    grads = gradients(net, 0)
    grads[0][0, 0] = size
    assert step(net, optimizer, grads).finite.item() == (clip == 1.0)
    assert step(net, optimizer, gradients(net, 1)).finite.item() == 1.0
    assert all(t.isfinite().all() for t in tensors_of(optimizer.state_dict()))
    before = snapshot(optimizer)["weights"]
    step(net, optimizer, gradients(net, 2))
    assert all((new != old).all() for new, old in zip(optimizer.weights, before, strict=True))


def test_skips_are_counted_and_move_no_rate_and_a_restore_counts_the_longest_anew():
    net, optimizer = net_and_optimizer(lr=1.0, warmup_steps=4)
    found, rates = [], []
    for finite in (1, 0, 0, 1, 0, 0, 0, 1):
        rates.append(optimizer.step(LOSS if finite else torch.tensor(math.inf)).lr.item())
        found.append((optimizer.skipped_in_row.item(), optimizer.longest_skip.item()))
    assert found == [(0, 0), (1, 1), (2, 2), (0, 2), (1, 2), (2, 2), (3, 3), (0, 3)]
    assert rates == [0.25, 0.5, 0.5, 0.5, 0.75, 0.75, 0.75, 0.75]
    assert (optimizer.applied.item(), optimizer.skipped.item()) == (3, 5)
    optimizer.restored({})
    optimizer.step(LOSS)
    assert optimizer.longest_skip.item() == 0
    optimizer.skipped_in_row.fill_(5)  # a restore inside a series goes on with it
    optimizer.restored({})
    optimizer.void.fill_(1.0)
    optimizer.step(LOSS)
    assert optimizer.longest_skip.item() == 0
    optimizer.void.zero_()
    optimizer.step(torch.tensor(math.nan))
    assert optimizer.longest_skip.item() == 6


def test_gradients_of_micro_batches_add_up_in_fp32():
    net, optimizer = net_and_optimizer(dtype=torch.bfloat16)
    for value in (1.0, *[2**-9] * 4):  # bf16 would drop each of the small ones
        backward(net, [torch.full(p.shape, value) for p in net.parameters()])
    for weight in net.parameters():
        assert torch.equal(optimizer.gradient_of(weight).total, torch.full(weight.shape, 1 + 4 * 2**-9))
        assert weight.grad is None and weight.storage_offset() * 2 % 128 == 0


def test_fp32_main_weights_collect_updates_below_the_resolution_of_bf16():
    net, optimizer = net_and_optimizer(dtype=torch.bfloat16, lr=1e-5, schedule="constant", weight_decay=0.0)
    start = [w.detach().clone() for w in net.parameters()]
    ones = [torch.ones(p.shape) for p in net.parameters()]
    step(net, optimizer, ones)
    assert all(torch.equal(w, s) for w, s in zip(net.parameters(), start, strict=True))
    changes = [main - s.float() for main, s in zip(optimizer.main, start, strict=True)]
    torch.testing.assert_close(changes[0], torch.full((5, 3), -1e-5), rtol=0.05, atol=0)
    for _ in range(999):
        step(net, optimizer, ones)
    assert all(main.dtype == torch.float32 for main in optimizer.main)
    for weight, main, s in zip(net.parameters(), optimizer.main, start, strict=True):
        torch.testing.assert_close(main, s.float() - 1e-2, rtol=0, atol=1e-4)
        assert torch.equal(weight, main.bfloat16()) and weight.grad is None
    assert not torch.equal(net.matrix, start[0])


def test_the_selection_bias_moves_towards_balance_unless_the_step_is_skipped():
    bias = torch.tensor([0.5, -0.5, 0.0])
    counts = torch.tensor([9, 0, 3], dtype=torch.int32)
    update_selection_bias(bias, counts, 0.1, torch.tensor(0.0))
    assert bias.tolist() == [0.5, -0.5, 0.0]
    update_selection_bias(bias, counts, 0.1, torch.tensor(1.0))
    torch.testing.assert_close(bias, torch.tensor([0.4, -0.4, 0.1]))
    update_selection_bias(bias, torch.tensor([4, 4, 4]), 0.1, torch.tensor(1.0))
    torch.testing.assert_close(bias, torch.tensor([0.4, -0.4, 0.1]))


def test_other_numbers_of_the_configuration_need_no_other_code():
    """Check that the next job of a sweep would find the update in the caches."""

    def code(optim: OptimConfig, train: TrainConfig) -> str:
        traced: list[str] = []

        def compiler(run, arguments):
            traced.append(str(trace_in_place(run, fakes_of(arguments)).graph))
            return run

        model = torch.nn.Linear(4, 4)
        Optimizer(model, optim, train).compile(compiler)
        return traced[0]

    plain = code(OptimConfig(), TrainConfig())
    others = {"lr": 1e-2, "min_lr_ratio": 0.2, "warmup_steps": 7, "beta1": 0.8, "beta2": 0.99}
    others |= {"eps": 1e-6, "weight_decay": 0.2, "wsd_decay_fraction": 0.5}
    assert code(OptimConfig(**others), TrainConfig(steps=77, clip_grad_norm=0.3)) == plain
    assert code(OptimConfig(schedule="constant"), TrainConfig()) != plain


def test_an_optimizer_is_freed_with_its_model_though_hooks_of_the_weights_call_it():
    net, optimizer = net_and_optimizer()
    net.matrix.sum().backward()
    assert net.matrix.grad is None and optimizer.gradient_of(net.matrix).begun
    gone = weakref.ref(optimizer), weakref.ref(net)
    del net, optimizer
    gc.collect()
    assert [each() for each in gone] == [None, None]


def test_segments_wait_for_the_weights_of_their_modules_and_methods_and_for_no_others():
    one, other, third = (nn.Linear(1, 1, bias=False) for _ in range(3))
    events: list[object] = []

    def execute(segments, tensors, keep):
        events.append("run")
        return run_segments(segments, tensors, keep)

    gather = WeightGather([])
    gather.wait = lambda weights: events.extend(map(id, weights))
    for calls in ([("attn", one), ("mlp", other.forward)], [("embed", torch.sin)], [("loss", third.forward)]):
        segments = [Segment(name, function, ("x",), ("x",)) for name, function in calls]
        gather.execute(execute, segments, {"x": torch.ones(1)}, ("x",))
    assert events == [id(one.weight), id(other.weight), "run", "run", id(third.weight), "run"]
