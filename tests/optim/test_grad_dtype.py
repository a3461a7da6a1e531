"""Gradients in bf16: sums rounded stochastically, in runs, in memory, and what is refused."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from graphmoe.config.schema import ConfigError, GradDtype
from graphmoe.model.sizes import state_bytes
from graphmoe.ops.gradients import Gradient
from graphmoe.optim.storage import kept_of
from graphmoe.plan.layout import ALONE
from graphmoe.plan.rules import check
from tests.distributed.training import as_traced
from tests.optim.test_zero1 import backward, compile_update, gradients, net_and_optimizer, step
from tests.runs import COMPILED_MODEL, QUIET, config, trainer_in
from tests.tolerances import relative_error

BF16 = ("optim.grad_dtype=bf16", "precision.compute=bf16")
MANY = (*QUIET, "train.global_batch_size=64", "train.steps=1", "model.aux_loss=none")
# larger relative deviation of a sum rounded stochastically: half a step of 2^-7
DEVIATION = 2**-8


def keyed(shape: tuple[int, ...], key: int = 7) -> Gradient:
    return Gradient(torch.full(shape, math.nan, dtype=torch.bfloat16), torch.tensor(key, dtype=torch.int32))


def test_the_mean_of_32_sums_does_not_drift_though_addends_are_small():
    shape, errors = (64, 96), []
    for seed in range(8):
        generator, gradient = torch.Generator().manual_seed(seed), keyed((64, 96), 1000 * seed)
        wanted = torch.zeros(shape, dtype=torch.float64)
        for number in range(32):
            # later ones are a fifth of a step of the sum: to the nearest, none would change it
            value = torch.rand(shape, generator=generator) * (2.0**-10 if number else 0) + (number == 0)
            gradient.add(value)
            wanted += value.double()
        errors.append((gradient.total.double() - wanted) / wanted)
    found = torch.stack(errors)
    # 31 roundings of independent random bits, each with a deviation of at most `DEVIATION`
    deviation = DEVIATION * math.sqrt(31)
    assert found.std() < deviation and found.mean().abs() < 5 * deviation / math.sqrt(found.numel())
    assert found.mean((1, 2)).abs().max() < 5 * deviation / math.sqrt(found[0].numel())
    lost = (torch.ones(shape).bfloat16() + 2.0**-10).double()
    assert ((lost - wanted) / wanted).mean() < -0.01


def test_equal_addends_are_rounded_by_other_bits_in_each_sum_row_and_key():
    found = []
    for key in (1, 1 + 2**12):
        gradient = keyed((3, 4, 256), key)
        gradient.add(torch.ones(3, 4, 256))
        gradient.add(torch.full((3, 4, 256), 2.0**-8))  # up or down with one half
        found.append(gradient.total.clone().view(12, 256))
        assert gradient.key.item() == key + 1
    up = torch.cat(found) > 1
    assert (up.float().mean(1) - 0.5).abs().max() < 5 * 0.5 / 16
    assert len({tuple(row.tolist()) for row in up}) == 24
    nan = keyed((1, 4))
    nan.add(torch.ones(1, 4))
    nan.add(torch.tensor([[math.nan, math.inf, -math.inf, 0.0]]))
    wanted = torch.tensor([[math.nan, math.inf, -math.inf, 1.0]], dtype=torch.bfloat16)
    torch.testing.assert_close(nan.total, wanted, rtol=0, atol=0, equal_nan=True)


def test_large_gradients_are_added_in_pieces_with_the_same_bits(monkeypatch):
    sums = []
    for elements in (2**24, 20):
        monkeypatch.setattr("graphmoe.ops.gradients.PIECE_ELEMENTS", elements)
        gradient = keyed((2, 5, 7))
        for seed in range(2):
            gradient.add(torch.randn(2, 5, 7, generator=torch.Generator().manual_seed(seed)))
        sums.append(gradient.total)
    assert torch.equal(*sums)


@pytest.mark.parametrize("how", ["eager", "traceable", pytest.param("compiled", marks=pytest.mark.slow)])
@pytest.mark.parametrize("rule", ["adamw", "muon"])
def test_an_update_reads_bf16_gradients_in_fp32(rule, how, monkeypatch):
    """One addition is stored, so it is rounded as a bf16 model's gradient is: the same as with fp32."""
    monkeypatch.setattr("graphmoe.optim.rule.PIECE_ELEMENTS", 70)
    nets = [
        net_and_optimizer(0.5, torch.bfloat16, name=rule, grad_dtype=GradDtype(d)) for d in ("fp32", "bf16")
    ]
    for net, optimizer in nets:
        if how == "traceable":
            optimizer.compile(lambda update, arguments: update)
        elif how == "compiled":
            compile_update(optimizer)
        for number in range(3):
            result = step(net, optimizer, gradients(net, number))
            assert result.finite == 1
    (_, one), (_, other) = nets
    assert other.families[0].grad.dtype == torch.bfloat16 and one.families[0].grad.dtype == torch.float32
    for a, b in zip(one.main, other.main, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def test_keys_are_those_of_the_applied_steps_whatever_was_added():
    (_, one), (net, other) = (
        net_and_optimizer(0.0, torch.bfloat16, grad_dtype=GradDtype.bf16) for _ in range(2)
    )
    start = other._keys.clone()
    for count in (1, 3):
        for number in range(count):
            backward(net, gradients(net, number))
        loss = torch.tensor(1.0 if count == 1 else math.nan)  # the second step is skipped
        other.step(loss)
        assert torch.equal(other._keys, start + 2**12)
    one.applied.copy_(other.applied)
    one.restored(one.state_dict())
    assert torch.equal(one._keys, other._keys) and len(start.unique()) == 4


def sums_of_a_step(folder, *words: str) -> dict[str, Tensor]:
    """Gradients of a step of 32 micro-batches, one of whose experts has no tokens."""
    trainer = trainer_in(folder, *MANY, *words)
    for router in trainer.model.routers():
        router.selection_bias[:2] = torch.tensor([-9.0, 9.0])
    optimizer, found = trainer.optimizer, dict[str, Tensor]()
    named, update = dict(zip(optimizer.names, optimizer._gradients.values(), strict=True)), optimizer.step

    def watched(loss: Tensor):
        found.update({name: each.total.clone() for name, each in named.items() if each.begun})
        return update(loss)

    optimizer.step = watched
    assert trainer.run()
    return found


TRACED = ("compile.enabled=true", "compile.cache=false", *COMPILED_MODEL)
RUNS = {
    "eager": (),
    "traced": TRACED,
    "captured": (*TRACED, "graph.scope=layer", "graph.warmup_steps=1", "train.steps=2", "optim.lr=1e-12"),
    "fp8": (*TRACED, "precision.fp8=rowwise", "model.hidden_size=32", "model.expert_ffn_size=16"),
}


@pytest.mark.usefixtures("as_traced")
@pytest.mark.parametrize("words", RUNS.values(), ids=RUNS)
def test_sums_of_32_micro_batches_are_those_in_fp32(words, tmp_path):
    """fp32 sums of 32 micro-batches are within 1e-6 of those in fp64."""
    exact, found = (sums_of_a_step(tmp_path / str(n), *words, *BF16[n:]) for n in (1, 0))
    assert found.keys() == exact.keys() and len(found) > 20
    errors = []
    for name, total in found.items():
        wanted = exact[name].double()
        assert total.dtype == torch.bfloat16 and exact[name].dtype == torch.float32
        # no partial sum is much larger than the last
        error, limit = relative_error(total, wanted), DEVIATION * math.sqrt(31)
        assert error < limit, name
        errors.append((total.double() - wanted).mul(wanted.sign()).flatten())
        if "moe_experts" in name:
            assert not total[0].any() and total[1].any()
    pooled = torch.cat(errors)
    assert pooled.sum().abs() < 5 * pooled.square().sum().sqrt()  # they drift neither up nor down


@pytest.mark.slow
def test_compiled_sums_have_the_bits_of_traced_ones(tmp_path):
    words = ("compile.enabled=true", *COMPILED_MODEL, *BF16)
    found = sums_of_a_step(tmp_path / "compiled", *words)
    with as_traced():
        wanted = sums_of_a_step(tmp_path / "traced", *words, "compile.cache=false")
    for name, total in found.items():
        assert relative_error(total, wanted[name]) < 2 * DEVIATION * math.sqrt(31), name


@pytest.mark.parametrize("model", ["optim.name=adamw", "optim.name=muon"])
def test_unreduced_gradients_take_half(model):
    run = config(model, *BF16)
    halves, whole = (
        state_bytes(run.model, ALONE, bucket_mb=100, kept=kept_of(replace(run.optim, grad_dtype=dtype)))
        for dtype in (GradDtype.bf16, GradDtype.fp32)
    )
    assert 2 * halves.pop("grads") == whole.pop("grads") and halves == whole


@pytest.mark.parametrize("word", ["precision.compute=fp32", "precision.compute=auto"])
def test_what_has_no_bf16_gradients_is_refused_in_one_line(word):
    with pytest.raises(ConfigError, match=r"optim\.grad_dtype=bf16 .*, or optim\.grad_dtype=fp32") as error:
        check(config(*BF16, word))
    assert "\n" not in str(error.value)
