"""The models compute what transformers computes with the same weights, forward and backward."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from graphmoe import load_hf, save_hf
from graphmoe.config.schema import AuxLoss
from tests.parity.hf_models import CASES, assert_same_bits, random_model, reload, tensors_in, tokens_of
from tests.tolerances import relative_error

LIMIT = 1e-4  # norm of the difference over norm of the reference, both in fp32


@pytest.fixture(scope="module", params=CASES)
def pair(request, tmp_path_factory):
    """A case, transformers' model of it, the folder that it wrote, and what load_hf reads from there."""
    case = CASES[request.param]
    theirs = random_model(case)
    folder = tmp_path_factory.mktemp(request.param)
    theirs.save_pretrained(folder)
    config, ours = load_hf(folder)
    return case, theirs, folder, config, ours


def test_logits_agree_with_transformers(pair):
    case, theirs, _, _, ours = pair
    for length in case.lengths:
        tokens = tokens_of(case, length)
        with torch.no_grad():
            actual, expected = ours(tokens), theirs(tokens).logits
        assert actual.dtype == torch.float32 and actual.shape == (2, length, case.vocab_size)
        assert relative_error(actual, expected) <= LIMIT


def test_gradients_of_every_parameter_agree_with_transformers(pair, tmp_path):
    case, theirs, _, config, ours = pair
    # the loss is the cross-entropy alone
    assert (config.aux_loss is AuxLoss.none or config.num_experts == 0) and config.mtp_depth == 0
    assert_gradients_agree(ours, theirs, tokens_of(case, case.lengths[-1] + 1), tmp_path)


def assert_gradients_agree(ours, theirs, tokens, folder):
    inputs, labels = tokens[:, :-1], tokens[:, 1:]
    ours.zero_grad()
    ours.loss(inputs, labels).total.backward()
    expected = gradients_in_our_names(theirs, inputs, labels, folder)
    scale = max(gradient.norm().item() for gradient in expected.values())
    for name, parameter in ours.named_parameters():
        difference, norm = (parameter.grad - expected[name]).double().norm(), expected[name].double().norm()
        # a gradient below 1e-5 of the largest is what cancellation leaves
        error = float(difference / norm.clamp(min=1e-5 * scale))
        assert error <= LIMIT, f"{name}: {error:.1e}"


def gradients_in_our_names(model, inputs, labels, folder: Path) -> dict[str, torch.Tensor]:
    """Gradients of transformers' model: it saves them like weights, and load_hf reads them like weights."""
    model.zero_grad()
    logits = model(inputs).logits
    F.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
        model.save_pretrained(folder)
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])
    found = {name: parameter.detach() for name, parameter in load_hf(folder)[1].named_parameters()}
    if type(model).__name__.startswith(("Qwen3Next", "Qwen3_5")):  # its norms are read with 1 added
        for name in found:
            found[name] -= int(name.endswith("norm.weight") and not name.endswith("out_norm.weight"))
    return found


def test_an_export_has_every_bit_and_transformers_reads_it(pair, tmp_path):
    case, theirs, folder, config, ours = pair
    save_hf(ours, config, tmp_path / "again")
    original = {name: tensor for name, tensor in tensors_in(folder).items() if tensor.numel()}
    assert_same_bits(tensors_in(tmp_path / "again"), original)
    again, model = load_hf(tmp_path / "again")
    assert again == replace(config, name="again")
    assert_same_bits(model.state_dict(), ours.state_dict())
    read, report = reload(tmp_path / "again")
    missing = [name for name in report["missing_keys"] if "shared_experts" not in name]  # empty ones
    assert not missing and not report["unexpected_keys"] and not report["mismatched_keys"]
    tokens = tokens_of(case, case.lengths[-1])
    with torch.no_grad():
        assert torch.equal(read(tokens).logits, theirs(tokens).logits)


def test_dtype_is_kept_or_cast(tmp_path):
    theirs = random_model(CASES["v3_moonlight"]).bfloat16()
    for name, buffer in theirs.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.data = buffer.float()  # as published
    theirs.save_pretrained(tmp_path)
    config, kept = load_hf(tmp_path)
    assert {p.dtype for p in kept.parameters()} == {torch.bfloat16}
    assert kept.layers[1].moe_router.selection_bias.dtype == torch.float32
    save_hf(kept, config, tmp_path / "again")
    assert_same_bits(tensors_in(tmp_path / "again"), tensors_in(tmp_path))
    _, cast = load_hf(tmp_path, dtype=torch.float32)
    for name, parameter in cast.named_parameters():
        assert torch.equal(parameter, kept.get_parameter(name).float())


def test_weights_of_several_dtypes_are_loaded_without_loss(tmp_path):
    theirs = random_model(CASES["qwen3_yarn"]).bfloat16()
    theirs.model.layers[0].mlp.gate.float().weight.data += 1e-4
    theirs.save_pretrained(tmp_path)
    _, ours = load_hf(tmp_path)
    assert {p.dtype for p in ours.parameters()} == {torch.float32}
    assert torch.equal(ours.layers[0].moe_router.gate.weight, theirs.model.layers[0].mlp.gate.weight)
