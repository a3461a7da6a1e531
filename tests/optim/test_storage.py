"""Moments in bf16 and int8, and bf16 weights without master weights: rounding, updates, runs and resumes."""

import copy
import functools
import math
import weakref

import pytest
import torch
import yaml
from torch import Tensor
from torch._inductor import metrics
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from graphmoe.checkpoint import CheckpointError
from graphmoe.config.schema import ConfigError, MasterDtype, MomentDtype
from graphmoe.ops.gradients import noise, to_bf16
from graphmoe.optim import flat_buffers
from graphmoe.optim.flat_buffers import families_of
from graphmoe.optim.rule import ADAMW
from graphmoe.optim.storage import ROW, Storage, decode, encode, origins_of
from graphmoe.passes.base import PassRunner
from graphmoe.plan.layout import ALONE, Cut, Layout, ParameterLayout, own_part
from graphmoe.plan.rules import check
from graphmoe.run.weights import model_to_yaml, read_run
from graphmoe.runtime.compile.executor import CompiledSegments
from graphmoe.runtime.ranks import Mesh
from tests.optim.test_zero1 import (
    LOSS,
    Net,
    compile_update,
    gradients,
    net_and_optimizer,
    snapshot,
    step,
    tensors_of,
)
from tests.runs import (
    assert_same_state,
    config,
    decoded,
    final_state,
    numbers,
    slow_but,
    spoil_steps,
    train_in,
    trainer_in,
)
from tests.runs import metrics as rows_of

BF16, INT8, IN_PLACE = MomentDtype.bf16, MomentDtype.int8, MasterDtype.bf16
KINDS = [(BF16, MasterDtype.fp32), (INT8, MasterDtype.fp32), (MomentDtype.fp32, IN_PLACE), (INT8, IN_PLACE)]
# larger relative errors of a stored value: one step of bf16; between neighbouring codes of int8
BF16_STEP, SIGNED_STEP, SQUARE_STEP = 2**-7, 2 / 127, 4 / 255


def random_rows(count: int, seed: int = 0) -> Tensor:
    return torch.randn((count, ROW), generator=torch.Generator().manual_seed(seed))


def draws(rows: int, number: int) -> Tensor:
    origin = torch.arange(rows, dtype=torch.int32)[:, None] * 977
    return noise(origin, ROW, torch.tensor(float(number)), 0)


def test_random_bits_are_uniform_and_independent_of_row_step_and_stream():
    origin = random_rows(64)[:, :1].view(torch.int32)
    found = torch.stack(
        [noise(origin, ROW, torch.tensor(float(n)), stream).float() for n in range(8) for stream in range(3)]
    ).flatten(1)
    assert torch.equal(noise(origin, ROW, torch.tensor(2.0), 1).flatten().float(), found[7])
    assert found.min() >= 0 and found.max() < 2**16
    centred = (found - 32767.5) / (2**16 / math.sqrt(12))
    error = found.shape[1] ** -0.5
    assert centred.mean().abs() < 4 * error / math.sqrt(24)
    correlations = centred @ centred.T / found.shape[1] - torch.eye(24)
    assert correlations.abs().max() < 5 * error
    shifted = (centred[:, 1:] * centred[:, :-1]).mean(1)  # of neighbours
    assert shifted.abs().max() < 5 * error
    counts = torch.histc(found, 64, 0, 2**16)
    expected = found.numel() / 64
    assert ((counts - expected) ** 2 / expected).sum() < 63 + 5 * math.sqrt(2 * 63)


def test_bf16_is_unbiased_keeps_its_own_values_and_what_is_not_finite():
    x = random_rows(16)
    mean = torch.stack([to_bf16(x, draws(16, n)).double() for n in range(512)]).mean(0)
    steps = (mean - x.double()) / (x.abs().log2().floor().exp2() * BF16_STEP)
    # a draw is within one step: its deviation is at most a half
    assert steps.abs().max() < 5 * 0.5 / math.sqrt(512) and steps.mean().abs() < 5 * 0.5 / math.sqrt(
        512 * 1024
    )
    exact = x.bfloat16()
    special = torch.tensor([math.nan, math.inf, -math.inf, 0.0, -0.0, 3.0]).view(torch.int32)
    # NaN of all bits, and one whose set bit rounding would clear
    special = torch.cat([special, torch.tensor([0x7FFFFFFF, 0x7F800001, -1], dtype=torch.int32)])
    odd = special.view(torch.float32)
    for n in range(8):
        assert torch.equal(to_bf16(exact.float(), draws(16, n)), exact)
        found = to_bf16(odd, draws(1, n)[0, : len(odd)])
        torch.testing.assert_close(found, odd.bfloat16(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype, largest", [(torch.int8, SIGNED_STEP), (torch.uint8, SQUARE_STEP)], ids=str)
def test_int8_is_unbiased_within_neighbouring_codes_and_returns_to_its_codes(dtype, largest):
    x = random_rows(16) if dtype == torch.int8 else random_rows(16).square() * 1e-9
    scale = x.abs().amax(1, keepdim=True)
    nearest = encode(x, dtype)
    assert nearest[0].dtype == dtype and torch.equal(nearest[1], scale)
    again = encode(decode(*nearest), dtype)
    assert torch.equal(again[0], nearest[0]) and torch.equal(again[1], nearest[1])
    drawn = [encode(x, dtype, draws(16, n)) for n in range(512)]
    assert all(torch.equal(largest_of, scale) for _, largest_of in drawn)
    values = torch.stack([decode(*each).double() for each in drawn])
    errors = (values - x) / scale
    assert errors.abs().max() < largest and (decode(*nearest) - x).abs().div(scale).max() < largest / 2
    mean, deviation = errors.mean(0), 0.5 * largest / math.sqrt(512)
    assert mean.abs().max() < 5 * deviation and mean.mean().abs() < 5 * deviation / math.sqrt(x.numel())


def test_a_second_moment_above_zero_is_not_stored_as_zero():
    v = torch.zeros(2, ROW)
    v[0, :3] = torch.tensor([1.0, 1e-30, 0.0])
    for n in range(16):
        codes, scale = encode(v, torch.uint8, draws(2, n))
        assert codes[0, :3].tolist() == [255, 1, 0] and not codes[1].any() and scale.isfinite().all()
        assert decode(codes, scale)[1].eq(0).all()


@pytest.mark.parametrize("moments, master", KINDS, ids=str)
def test_an_update_is_that_in_fp64_within_one_step_of_what_is_stored(moments, master):
    dtype = torch.bfloat16 if master is IN_PLACE else torch.float32
    named = {"lr": 1e-2, "schedule": "constant", "weight_decay": 0.3, "beta2": 0.9}
    net, optimizer = net_and_optimizer(0.0, dtype, moment_dtype=moments, master_dtype=master, **named)
    for number in range(4):
        before = copy.deepcopy(
            [decoded(optimizer.state_dict()), [w.detach().clone() for w in net.parameters()]]
        )
        grads = gradients(net, number)
        step(net, optimizer, grads)
        after = decoded(optimizer.state_dict())
        for (name, w), old, g in zip(net.named_parameters(), before[1], grads, strict=True):
            g = g.to(dtype).double() if master is IN_PLACE else g.double()
            m = before[0]["exp_avg"][name].double() * 0.9 + 0.1 * g
            v = before[0]["exp_avg_sq"][name].double() * 0.9 + 0.1 * g * g
            bias = 1 - 0.9 ** (number + 1)
            decayed = old.double() * (1 - 1e-2 * 0.3 * (w.dim() > 1))
            wanted = decayed - 1e-2 * (m / bias) / ((v / bias).sqrt() + 1e-8)
            relative = BF16_STEP if master is IN_PLACE else 1e-6
            assert (w.double() - wanted).abs().le(relative * wanted.abs() + 1e-8).all()
            for key, exact, of_int8 in (("exp_avg", m, SIGNED_STEP), ("exp_avg_sq", v, SQUARE_STEP)):
                error = (after[key][name].double() - exact).abs()
                if moments is INT8:  # each parameter is one row, whose largest element int8 stores exactly
                    assert error.max() < of_int8 * exact.abs().max()
                else:
                    step_of = BF16_STEP if moments is BF16 else 1e-6
                    assert error.le(step_of * exact.abs() + 1e-12).all()
    assert optimizer.applied == 4


@pytest.mark.parametrize(
    "moments, master", [KINDS[0], pytest.param(*KINDS[3], marks=pytest.mark.slow)], ids=str
)
def test_compiled_updates_are_the_same_bits(moments, master):
    named = {"dtype": torch.bfloat16, "lr": 1e-2, "moment_dtype": moments, "master_dtype": master}
    (net, plain), (other, compiled) = (net_and_optimizer(0.5, **named) for _ in range(2))
    made = compile_update(compiled)
    for number in range(3):
        loss = torch.tensor(math.nan) if number == 1 else LOSS
        for of, optimizer in ((net, plain), (other, compiled)):
            step(of, optimizer, gradients(of, number), loss)
    for one, two in zip(tensors_of(snapshot(plain)), tensors_of(snapshot(compiled)), strict=True):
        assert torch.equal(one, two)
    assert [(r.unit, r.graphs) for r in made.reports] == [("optimizer", 1)]


@pytest.mark.slow
def test_compiled_updates_write_no_intermediate_result_to_memory():
    def kernels(**named: object) -> int:
        _, optimizer = net_and_optimizer(0.5, torch.bfloat16, **named)
        update = functools.partial(optimizer._update_in_place, fused=False)
        metrics.reset()
        with torch._inductor.config.patch(force_disable_caches=True):
            arguments = [optimizer.applied, *optimizer._arguments(optimizer.applied)]
            CompiledSegments(PassRunner([])).in_place(update, arguments)
        return metrics.generated_kernel_count

    assert 0 < kernels(moment_dtype=BF16, master_dtype=IN_PLACE) <= kernels()


@pytest.mark.parametrize("moments, master", KINDS, ids=str)
@pytest.mark.parametrize("why", ["void", "nan loss", "nan gradient"])
def test_a_skipped_step_changes_no_stored_bit(moments, master, why):
    net, optimizer = net_and_optimizer(0.5, torch.bfloat16, moment_dtype=moments, master_dtype=master)

    def stored() -> list[Tensor]:
        of = optimizer.families[0]
        return [t.clone() for t in (of.main, of.weight, *of.moments.values(), *of.rows.values())]

    step(net, optimizer, gradients(net, 0))
    before, grads = stored(), gradients(net, 1)
    optimizer.void.fill_(float(why == "void"))
    grads[1][0, 0, 0] = math.nan if why == "nan gradient" else 1.0
    assert step(net, optimizer, grads, torch.tensor(math.nan) if why == "nan loss" else LOSS).finite == 0
    assert all(map(torch.equal, stored(), before))
    optimizer.void.zero_()
    step(net, optimizer, gradients(net, 2))
    assert not torch.equal(stored()[0], before[0])


def test_small_updates_of_bf16_weights_add_up():
    net, optimizer = net_and_optimizer(
        0.0, torch.bfloat16, lr=1e-4, schedule="constant", weight_decay=0.0, master_dtype=IN_PLACE
    )
    start = [w.detach().float().clone() for w in net.parameters()]
    for _ in range(200):
        step(net, optimizer, [torch.ones(w.shape) for w in net.parameters()])
    moved = torch.cat([(w.float() - s).flatten() for w, s in zip(net.parameters(), start, strict=True)])
    # each update is 1e-4, a fortieth of a step of most weights: to the nearest, none of these would move
    assert moved.mean().item() == pytest.approx(-200e-4, rel=0.15)


def test_second_moments_in_bf16_follow_at_a_beta2_that_rounding_to_the_nearest_stalls():
    named = {"beta2": 0.999, "lr": 1e-9, "schedule": "constant", "weight_decay": 0.0}
    net, optimizer = net_and_optimizer(0.0, moment_dtype=BF16, **named)
    for number in range(400):
        step(net, optimizer, [torch.full(w.shape, 1.0 if number < 200 else 0.0) for w in net.parameters()])
    found = torch.cat([each.flatten() for each in decoded(optimizer.state_dict()["exp_avg_sq"]).values()])
    wanted = (1 - 0.999**200) * 0.999**200
    assert found.mean().item() == pytest.approx(wanted, rel=0.05)
    stalled = torch.tensor(wanted).bfloat16()
    assert torch.equal((stalled * 0.999).bfloat16(), stalled)


def test_random_keys_are_those_of_elements_of_the_whole_parameter():
    whole, layout = torch.Size((4, 16, 128)), Layout(tp=2, ep=2)
    parallel = ParameterLayout((Cut(0, "ep"), Cut(1, "tp", 2)), "edp")
    index = torch.arange(whole.numel()).view(whole)

    def keys(elements: Tensor, shape: torch.Size, of: Layout, rank: int, seed: int = 7) -> Tensor:
        return origins_of("w", elements, shape, parallel, of, rank, seed)

    of_whole = keys(index.flatten(), whole, Layout(), 0)
    assert len(of_whole.unique()) == whole.numel()  # 2^13 of 2^32 values
    for rank in range(layout.size("world")):
        part = own_part(index, parallel, layout, rank)
        found = keys(torch.arange(part.numel()), part.shape, layout, rank)
        assert torch.equal(found, of_whole[part.flatten()])
    assert not torch.equal(keys(index.flatten(), whole, Layout(), 0, seed=8), of_whole)
    family, *_ = families_of(Net(), Mesh(ALONE), 1e9, ADAMW, Storage(INT8, seed=7))
    wanted = origins_of("matrix", torch.tensor([0]), torch.Size((5, 3)), ParameterLayout(), ALONE, 0, 7)
    assert family.rows["origins 0"][0] == wanted


RUN = ("train.steps=6", "checkpoint.interval=3", "checkpoint.keep_last=9", "model.hidden_size=32")
STORED = {
    "bf16": ("optim.moment_dtype=bf16",),
    "int8, in place": ("optim.moment_dtype=int8", "optim.master_dtype=bf16", "precision.compute=bf16"),
    "muon, bf16, in place": (
        *("optim.name=muon", "optim.moment_dtype=bf16", "optim.master_dtype=bf16", "precision.compute=bf16"),
    ),
    "muon, int8": ("optim.name=muon", "optim.moment_dtype=int8"),
    "bf16 gradients": ("optim.grad_dtype=bf16", "precision.compute=bf16"),
}


@pytest.mark.parametrize("words", STORED.values(), ids=STORED)
def test_a_resume_is_bitwise_and_reads_stored_moments(words, tmp_path):
    whole = train_in(tmp_path / "whole", *RUN, *words)
    source = f"checkpoint.resume_from={tmp_path}/whole/checkpoints/step_00000003"
    second = train_in(tmp_path / "second", *RUN, *words, source)
    assert numbers(tmp_path / "second")[-1] == numbers(tmp_path / "whole")[-1]
    assert_same_state(
        *({**t.optimizer.state_dict(), "weights": t.optimizer.weights} for t in (whole, second))
    )
    for one, two in zip(whole.optimizer.families, second.optimizer.families, strict=True):
        for kind in ("moments", "rows"):
            assert_same_state(getattr(one, kind), getattr(two, kind))
    plan = whole.plan
    stored = {key: getattr(plan.optim, key).value for key in ("moment_dtype", "master_dtype")}
    document = {"model": yaml.safe_load(model_to_yaml(plan.model)), "optim": stored}
    document["precision"] = {"compute": plan.precision.compute.value}
    (tmp_path / "whole" / "resolved.yaml").write_text(yaml.safe_dump(document))
    _, weights, found = read_run(tmp_path / "whole", 6)
    assert found == 6
    for name, main in zip(whole.optimizer.names, whole.optimizer.main, strict=True):
        assert torch.equal(weights[name], main.float())


@pytest.mark.usefixtures("unmeasured", "as_traced")
@pytest.mark.parametrize(
    "words",
    [(*STORED["int8, in place"], "optim.grad_dtype=bf16"), STORED["muon, bf16, in place"]],
    ids=["adamw", "muon"],
)
def test_a_captured_run_with_a_bad_step_is_the_eager_one(words, tmp_path, monkeypatch):
    words = (*words, "graph.scope=full_iteration", "train.steps=7")
    for name, warmup in (("plain", 7), ("captured", 2)):
        with monkeypatch.context() as patch:
            trainer = trainer_in(tmp_path / name, *words, f"graph.warmup_steps={warmup}")
            spoil_steps(patch, trainer, (5,))
            assert trainer.run() and trainer.execution.capture.ready == (name == "captured")
    assert numbers(tmp_path / "captured") == numbers(tmp_path / "plain")
    folders = [(tmp_path / name / "checkpoints", tmp_path / f"{name}_") for name in ("plain", "captured")]
    assert_same_state(*(final_state(*each, *words) for each in folders))


def test_a_run_resumes_with_moments_stored_otherwise_but_not_without_its_masters(tmp_path):
    bf16 = ("precision.compute=bf16",)
    first = train_in(tmp_path / "first", *RUN, *bf16)
    source = f"checkpoint.resume_from={tmp_path}/first"
    other = trainer_in(tmp_path / "other", *RUN, *bf16, "optim.moment_dtype=bf16", source)
    for kind in ("exp_avg", "exp_avg_sq"):
        for name, moment in first.optimizer.state_dict()[kind].items():
            assert torch.equal(decoded(other.optimizer.state_dict()[kind][name]), moment.bfloat16().float())
    with pytest.raises(CheckpointError, match=r"unexpected in the checkpoint: optimizer\.main\."):
        trainer_in(tmp_path / "second", *RUN, *bf16, "optim.master_dtype=bf16", source)


class Live(TorchDispatchMode):
    """Counts the bytes of new tensors that live at once."""

    now = most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        for each in [] if func.is_view or func._schema.is_mutable else tree_leaves(found):
            if isinstance(each, Tensor) and not each.is_meta:
                self.add(each.nbytes)
                weakref.finalize(each, self.add, -each.nbytes)
        return found

    def add(self, num_bytes):
        self.now += num_bytes
        self.most = max(self.most, self.now)


@pytest.mark.parametrize("words", [STORED["int8, in place"], STORED["muon, int8"]], ids=["adamw", "muon"])
def test_a_save_and_a_resume_decode_one_entry_at_a_time(words, tmp_path, monkeypatch):
    monkeypatch.setattr(flat_buffers, "PIECE", 64)
    trainer = train_in(tmp_path, *RUN, *words, "model.vocab_size=1024")
    before = copy.deepcopy(trainer.optimizer.families[0].moments)
    with Live() as live:
        trainer.saves.save(7, trainer._state(), wait=True)
        trainer.saves.store.load(trainer._state())
    assert_same_state(trainer.optimizer.families[0].moments, before)
    sizes = [4 * weight.numel() for weight in trainer.optimizer.weights]
    assert max(sizes) <= live.most < 1.5 * max(sizes) < sum(sizes)


REFUSED = {
    "precision.compute=auto": "those of precision.compute=auto are fp32; use precision.compute=bf16",
    "optim.qk_clip=100": "optim.qk_clip=100 scales weights by less than optim.master_dtype=bf16 resolves",
}


@pytest.mark.parametrize("word", REFUSED)
def test_what_cannot_be_stored_so_is_refused_in_one_line(word):
    with pytest.raises(ConfigError, match=REFUSED[word]):
        check(config(*STORED["muon, bf16, in place"], word))


TEXT = (
    "data.source=stdlib", "data.seq_len=64", "model.context_length=64", "model.vocab_size=512",
    "model.hidden_size=64", "model.expert_ffn_size=64", "model.dense_ffn_size=128", "optim.lr=3e-3",
    "optim.warmup_steps=20", "train.steps=200", "train.global_batch_size=16", "train.micro_batch_size=16",
    "train.val_interval=200", "train.val_batches=16", "checkpoint.enabled=false",
)  # fmt: skip
"""docs/benchmarks/README.md has the losses of these runs with three seeds."""


# the other two have both rules and both dtypes of moments too; test_a_resume_is_bitwise runs all four
@pytest.mark.parametrize("words", slow_but(STORED, exhaustive=("bf16", "muon, int8")))
def test_runs_on_text_end_with_the_loss_of_fp32_state(words, tmp_path):
    losses = []
    for name, more in (("stored", words), ("fp32", [word for word in words if "_dtype=" not in word])):
        train_in(tmp_path / name, *TEXT, *more)
        losses.append(rows_of(tmp_path / name)[-1]["val_loss"])
    assert losses[0] == pytest.approx(losses[1], rel=0.005)
