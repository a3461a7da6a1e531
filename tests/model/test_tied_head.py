"""A tied head: one parameter, one name, and the gradient of both uses."""

import copy
import dataclasses

import pytest
import torch

from graphmoe.config.schema import ModelConfig
from graphmoe.model.blocks import EMBEDDING, HEAD
from graphmoe.model.build import build_model
from graphmoe.model.transformer import Transformer
from graphmoe.plan.layout import Layout
from graphmoe.training.evaluation import model_of_one_rank
from tests.model.models import CONFIGS, both, make_batch
from tests.runs import config
from tests.tolerances import assert_gradient_close


def tied(name: str = "mla", **changes) -> ModelConfig:
    return dataclasses.replace(CONFIGS[name], tie_embeddings=True, **changes)


def untied(of: ModelConfig) -> ModelConfig:
    return dataclasses.replace(of, tie_embeddings=False)


def is_tied(model: Transformer) -> bool:
    return model.get_parameter(HEAD) is model.get_parameter(EMBEDDING)


@pytest.mark.parametrize("depth", [0, 2])
@both
def test_the_gradient_of_a_tied_head_is_the_sum_over_all_its_uses(name, depth):
    model = build_model(tied(name, mtp_depth=depth)).double()
    apart = build_model(untied(model.config), seed=None).double()
    weights = model.state_dict() | {HEAD: model.embed.weight.detach().clone()}
    apart.load_state_dict(weights)
    of_tied, of_untied = model.loss(*make_batch()), apart.loss(*make_batch())
    of_tied.total.backward()
    of_untied.total.backward()
    assert torch.equal(of_tied.total, of_untied.total)
    uses = [apart.get_parameter(name).grad for name in (EMBEDDING, HEAD)]
    assert all(bool(gradient.any()) for gradient in uses)
    assert_gradient_close(model.embed.weight.grad, uses[0] + uses[1])
    for key, parameter in model.named_parameters():
        if key != EMBEDDING:
            assert_gradient_close(parameter.grad, apart.get_parameter(key).grad)


def test_the_head_has_the_first_weight_of_the_embedding_whether_they_are_tied_or_not():
    model, apart = (build_model(of, seed=3) for of in (tied(), untied(tied())))
    assert torch.equal(model.get_parameter(HEAD), apart.get_parameter(EMBEDDING))
    others = apart.state_dict()
    del others[EMBEDDING], others[HEAD]
    assert all(torch.equal(model.state_dict()[key], weight) for key, weight in others.items())


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_the_weight_is_one_parameter_with_one_name_on_every_device(device):
    model, apart = (build_model(of, device=device, dtype=torch.bfloat16) for of in (tied(), untied(tied())))
    assert is_tied(model) and model.embed.weight.dtype == torch.bfloat16
    names = [name for name, _ in model.named_parameters()]
    assert set(apart.state_dict()) - set(model.state_dict()) == {HEAD}
    assert [name for name, _ in apart.named_parameters() if name != HEAD] == names


@pytest.mark.parametrize("assign", [False, True])
def test_a_model_stays_tied_when_it_loads_a_state_or_is_copied(assign):
    model, other = build_model(tied(), seed=1), build_model(tied(), seed=2)
    other.load_state_dict(model.state_dict(), assign=assign)
    again = copy.deepcopy(other)
    tokens, _ = make_batch()
    for each in (other, again):
        assert is_tied(each) and torch.equal(each(tokens), model(tokens))
    held = torch.nn.ModuleDict({"model": model})
    assert "model." + EMBEDDING in held.state_dict() and "model." + HEAD not in held.state_dict()
    assert not any(held.load_state_dict(held.state_dict()))


def test_a_state_with_another_head_is_refused():
    model, apart = build_model(tied()), build_model(untied(tied()))
    with pytest.raises(RuntimeError, match=f'Unexpected key.*"{HEAD}"'):
        model.load_state_dict(apart.state_dict())


def test_a_rank_of_cp_samples_with_a_tied_model_that_shares_its_weights():
    run = config("model.tie_embeddings=true")
    shared = build_model(run.model, execution=run.moe, layout=Layout(cp=2), seed=3)
    alone = model_of_one_rank(shared, run.moe)
    assert is_tied(alone) and alone.embed.weight.data_ptr() == shared.embed.weight.data_ptr()
