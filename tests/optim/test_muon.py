"""Muon against torch's on single matrices; which matrices there are, and who owns them."""

import copy
import math
from collections import Counter
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.library import opcheck
from torch.optim import _muon

from graphmoe.checkpoint import CheckpointError
from graphmoe.checkpoint.hf.families import to_hf_config
from graphmoe.checkpoint.hf.pieces import pieces
from graphmoe.config.schema import OptimConfig, TrainConfig
from graphmoe.model.build import build_model
from graphmoe.optim import muon
from graphmoe.optim.muon import orthogonalize, orthogonalize_flops
from graphmoe.optim.zero1 import Optimizer
from graphmoe.passes.base import PassRunner
from graphmoe.plan.buckets import ALIGNMENT, BufferLayout, matrices_of
from graphmoe.runtime.compile.executor import CompiledSegments
from tests.runs import assert_same_state, config, final_state, numbers, spoil_steps, trainer_in

LOSS, STEPS, LR, DECAY = torch.tensor(1.0), 5, 1e-2, 0.3
SHAPES = {
    "embed.weight": (9, 6), "wide": (4, 9), "gate_up": (8, 6), "norm": (6,), "moe_router.gate": (3, 6),
    "experts": (3, 7, 6), "tall": (5, 3), "experts.w_gate_up": (3, 8, 6), "head.weight": (9, 6),
}  # fmt: skip
BY_ELEMENT = ("embed.weight", "norm", "moe_router.gate", "head.weight")


class Net(nn.Module):
    """Parameters of each kind, by names with dots."""

    def __init__(self) -> None:
        super().__init__()
        random = torch.Generator().manual_seed(0)
        self.held = {
            name: nn.Parameter(torch.randn(shape, generator=random)) for name, shape in SHAPES.items()
        }

    def named_parameters(self, *_, **__):
        return iter(self.held.items())

    def parameters(self, *_):
        return iter(self.held.values())


def net_and_optimizer(name: str = "muon", clip: float = 0.0) -> tuple[Net, Optimizer]:
    net, optim = Net(), OptimConfig(name=name, lr=LR, schedule="constant", weight_decay=DECAY)
    return net, Optimizer(net, optim, TrainConfig(steps=STEPS, clip_grad_norm=clip))


def gradients(step: int) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(step)
    return {name: torch.randn(shape, generator=random) for name, shape in SHAPES.items()}


def step(net: Net, optimizer: Optimizer, grads: dict[str, Tensor]) -> Tensor:
    sum((weight * grads[name]).sum() for name, weight in net.held.items()).backward()
    return optimizer.step(LOSS).finite


def separate(tensors: dict[str, Tensor]) -> list[Tensor]:
    """Matrices as published: each expert's, gate and up apart."""
    found = []
    for name, tensor in tensors.items():
        if name not in BY_ELEMENT:
            experts = tensor if tensor.dim() == 3 else [tensor]
            found += [part for each in experts for part in each.chunk(1 + ("gate_up" in name))]
    return found


@pytest.mark.parametrize("clip", [0.0, 5.0])
def test_steps_equal_those_of_torch_muon_on_separate_matrices_in_fp32(clip):
    assert (*muon.COEFFICIENTS, muon.STEPS, muon.EPS) == (
        *(_muon.DEFAULT_A, _muon.DEFAULT_B, _muon.DEFAULT_C), *(_muon.DEFAULT_NS_STEPS, _muon.EPS),
    )  # fmt: skip
    (net, optimizer), (plain, by_element) = net_and_optimizer(clip=clip), net_and_optimizer("adamw", clip)
    weights = [w.detach().clone().requires_grad_() for w in separate(net.held)]
    theirs = torch.optim.Muon(weights, lr=LR, weight_decay=DECAY, adjust_lr_fn="match_rms_adamw")
    for number in range(STEPS):
        grads = {name: grad * 3**number for name, grad in gradients(number).items()}
        assert step(net, optimizer, grads) == step(plain, by_element, grads) == 1
        norm = torch.stack([grad.norm() for grad in grads.values()]).norm()
        for weight, grad in zip(weights, separate(grads), strict=True):
            weight.grad = grad * min(1.0, clip / norm) if clip else grad.clone()
        with mock.patch.object(Tensor, "bfloat16", Tensor.float):  # torch's iteration is in bf16 only
            theirs.step()
        for ours, wanted in zip(separate(net.held), weights, strict=True):
            torch.testing.assert_close(ours, wanted, rtol=0, atol=1e-6)
    for name in BY_ELEMENT:
        assert torch.equal(net.held[name], plain.held[name])


@pytest.mark.parametrize("dtype, close", [(torch.float32, 1e-5), (torch.bfloat16, 0.03)], ids=str)
@pytest.mark.parametrize("shape", [(5, 16, 48), (5, 48, 16), (2, 24, 24)], ids=str)
def test_a_batch_equals_a_loop_and_commutes_with_transposition(shape, dtype, close):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    found = orthogonalize(x)
    assert found.dtype == dtype
    opcheck(torch.ops.graphmoe.newton_schulz, (x,), test_utils="test_faketensor")
    loop = torch.stack([_muon._zeropower_via_newtonschulz(one, muon.COEFFICIENTS, 5, 1e-7) for one in x])
    torch.testing.assert_close(found.float(), loop.float(), rtol=0, atol=0.03)  # theirs is in bf16
    torch.testing.assert_close(found, torch.cat([*map(orthogonalize, x.split(1))]), rtol=0, atol=close)
    torch.testing.assert_close(found, orthogonalize(x.mT).mT, rtol=0, atol=close)
    values = torch.linalg.svdvals(found.float())
    assert values.min() > 0.3 and values.max() < 1.3


def test_an_expert_without_gradient_only_decays_and_its_momentum_moves_it_later():
    net, optimizer = net_and_optimizer()
    for number in range(2):
        before, grads = copy.deepcopy(net.held), gradients(number)
        grads["experts"][1 - number] = 0
        step(net, optimizer, grads)
        if number == 0:
            decayed = before["experts"][1] * (1 - LR * DECAY)
            torch.testing.assert_close(net.held["experts"][1], decayed, rtol=1e-7, atol=0)
    own = net.held["experts"][0] - before["experts"][0] * (1 - LR * DECAY)
    rms = own.square().mean().sqrt().item()  # of momentum alone: an update is as large as any
    assert rms == pytest.approx(LR * muon.RMS, rel=0.3) and net.held["experts"].isfinite().all()


@pytest.mark.parametrize("why", ["nan", "inf", "void"])
def test_a_skipped_step_leaves_momentum_and_weights_alone(why):
    net, optimizer = net_and_optimizer(clip=1.0)
    step(net, optimizer, gradients(0))
    state = copy.deepcopy({**optimizer.state_dict(), "weights": net.held})
    assert {*state["momentum"]} == SHAPES.keys() - {*BY_ELEMENT} == SHAPES.keys() - state["exp_avg"].keys()
    grads = gradients(1)
    if why == "void":
        optimizer.void.fill_(1.0)
    else:
        grads["experts"][1, 0, 0] = float(why)
    assert step(net, optimizer, grads) == 0
    for kind in ("momentum", "exp_avg", "exp_avg_sq", "weights"):
        now = net.held if kind == "weights" else optimizer.state_dict()[kind]
        assert all(torch.equal(state[kind][name], tensor) for name, tensor in now.items()), kind
    optimizer.void.zero_()
    assert step(net, optimizer, gradients(2)) == 1


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_compiled_or_traceable_the_update_is_the_same(compiled):
    (plain, first), (net, other) = net_and_optimizer(clip=0.5), net_and_optimizer(clip=0.5)
    other.compile(CompiledSegments(PassRunner([])).in_place if compiled else lambda update, _: update)
    for number in range(3):
        assert step(plain, first, gradients(number)) == step(net, other, gradients(number))
    for name, weight in plain.held.items():
        torch.testing.assert_close(net.held[name], weight, rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("unmeasured", "as_traced")
def test_a_captured_run_with_a_bad_step_equals_an_eager_one(tmp_path, monkeypatch):
    words = ("optim.name=muon", "graph.scope=full_iteration", "train.steps=7", "optim.warmup_steps=2")
    for name, warmup in (("plain", 7), ("captured", 2)):
        with monkeypatch.context() as patch:
            trainer = trainer_in(tmp_path / name, *words, f"graph.warmup_steps={warmup}")
            spoil_steps(patch, trainer, (5,))
            assert trainer.run() and trainer.execution.capture.ready == (name == "captured")
            assert trainer.optimizer.applied.item() == 6
    assert numbers(tmp_path / "captured") == numbers(tmp_path / "plain")
    folders = [(tmp_path / name / "checkpoints", tmp_path / f"{name}_") for name in ("plain", "captured")]
    assert_same_state(*(final_state(*each, *words) for each in folders))


def test_a_checkpoint_of_another_optimizer_is_refused(tmp_path):
    for name, other, missing in (("muon", "adamw", "exp_avg"), ("adamw", "muon", "momentum")):
        trainer_in(tmp_path / name, f"optim.name={name}", "train.steps=1").run()
        words = (f"optim.name={other}", f"checkpoint.resume_from={tmp_path}/{name}")
        with pytest.raises(
            CheckpointError, match=rf"missing in the checkpoint: optimizer\.{missing}\.layers"
        ):
            trainer_in(tmp_path / "second", *words)


MLA = ("model.q_lora_rank=8", "model.num_dense_layers=1", "model.mtp_depth=1", "model.score_function=sigmoid")
GQA = (
    *("model.attention=gqa", "model.num_kv_heads=1", "model.head_dim=4", "model.qk_norm=true"),
    *("model.num_dense_layers=0", "model.shared_ffn_size=0", "model.selection_bias=false"),
)
GLM = (
    *("model.attention=gqa", "model.num_kv_heads=1", "model.head_dim=4", "model.rotary_fraction=0.5"),
    *("model.attention_bias=qkv", "model.score_function=sigmoid", "model.mtp_depth=1"),
)


def test_taps_of_a_convolution_are_updated_by_element():
    weight = torch.empty(64, 4)
    assert matrices_of("layers.0.attn.convs.q", weight) is None
    assert matrices_of("layers.0.attn.q_proj.weight", weight) == (64, 4)


@pytest.mark.parametrize("words", [MLA, (*GQA, "model.renormalise=true"), GLM], ids=["mla", "gqa", "glm"])
def test_matrices_are_those_of_hugging_face_folders_but_embedding_head_and_router(words):
    model = config(*words).model
    weights = dict(build_model(model, seed=0).named_parameters())
    found, wanted = Counter(), Counter()
    for name, weight in weights.items():
        if shape := matrices_of(name, weight):
            found[shape] += weight.numel() // shape.size
    for piece in pieces(to_hf_config(model)[0], model):
        tensor = weights[piece.ours][piece.index] if piece.ours in weights else torch.zeros(1)
        if piece.repeats is None and tensor.dim() == 2:
            wanted[tuple(tensor.shape)] += not any(
                part in piece.theirs for part in ("embed_tokens", "head", "mlp.gate.")
            )
    assert found == wanted and found.total() > 10


WEIGHTS = [torch.empty(shape) for shape in ((20, 30), (8, 16, 8), (7, 9), (3, 8, 8), (40, 30), (2, 5, 7))]


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
def test_each_matrix_has_one_owner_and_the_first_rank_has_most(num_ranks):
    layouts = [BufferLayout.of_matrices(WEIGHTS, num_ranks, index) for index in range(num_ranks)]
    owners, sizes = torch.zeros(layouts[0].size, dtype=torch.int), [each.shard_size for each in layouts]
    for layout in layouts:
        assert (layout.starts, layout.size) == (layouts[0].starts, layouts[0].size)
        end = 0
        for bucket in layout.buckets:
            assert bucket.shard.start == end
            end, owners[bucket.own] = bucket.shard.stop, owners[bucket.own] + 1
        for i, first, part in layout.own_ranges(WEIGHTS):
            matrix = math.prod(WEIGHTS[i].shape[-2:])
            assert first % matrix == (part.stop - part.start) % matrix == 0
    assert (owners == 1).all() and all(start % ALIGNMENT == 0 for start in layouts[0].starts)
    assert sizes[0] == max(sizes) and sum(sizes) == layouts[0].size
    of_eight = [
        part.stop - part.start for each in layouts for i, _, part in each.own_ranges(WEIGHTS) if i == 1
    ]
    assert of_eight == {1: [1024], 2: [512] * 2, 3: [384, 384, 256], 8: [128] * 8}[num_ranks]


def test_flops_are_those_of_five_steps_of_three_products():
    assert orthogonalize_flops(2048, 1408) == orthogonalize_flops(1408, 2048) == 109_114_818_560
