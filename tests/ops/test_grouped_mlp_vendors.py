"""Vendor backends of the grouped MLP against their recorded signatures, where the packages are absent."""

import pytest
import torch

from graphmoe.config.schema import ConfigError
from graphmoe.ops.grouped_mlp.vendor import te_module
from tests.ops import grouped_mlp_fakes as fakes
from tests.ops.mlp_cases import CASES, COUNTS, assert_directions_match, make_problem, ops_of

ops = torch.ops.graphmoe


@pytest.fixture(params=["turbo", "te"])
def vendor(request, monkeypatch):
    """The name of a backend whose package is a fake."""
    te_module.cache_clear()
    fakes.install_turbo(monkeypatch) if request.param == "turbo" else fakes.install_te(monkeypatch)
    yield request.param
    te_module.cache_clear()


@pytest.mark.parametrize("case", [*CASES, *COUNTS], ids=str)
def test_each_direction_matches_fp64_with_nan_in_dead_rows(case, vendor):
    assert_directions_match(ops_of(vendor), make_problem(case, torch.bfloat16))


@pytest.mark.parametrize("mixed", ["{},torch,torch", "torch,{},torch", "torch,torch,{}"])
def test_a_vendor_may_run_one_direction_alone(mixed, vendor):
    assert_directions_match(ops_of(mixed.format(vendor)), make_problem("empty experts", torch.bfloat16))


def test_fp32_is_refused_with_what_to_set_instead(vendor):
    p = make_problem("random", torch.float32)
    with pytest.raises(ConfigError, match=f"moe.experts={vendor} has bf16 .* use precision.compute=bf16"):
        ops.grouped_mlp(*p.inputs, *p.plan, vendor)


@pytest.mark.parametrize(("backend", "package"), [("turbo", "primus_turbo"), ("te", "transformer_engine")])
@pytest.mark.parametrize("direction", ["forward", "dgrad", "wgrad"])
def test_a_missing_package_is_named_with_the_command_that_installs_it(direction, backend, package):
    p = make_problem("random", torch.bfloat16)
    run = ops_of("torch")
    _, h = run.forward(*p.inputs, *p.plan)
    _, _, dh, a = run.dgrad(p.dy_TD, h, *p.inputs[1:], *p.plan)
    arguments = {
        "forward": (*p.inputs, *p.plan),
        "dgrad": (p.dy_TD, h, *p.inputs[1:], *p.plan),
        "wgrad": (p.dy_TD, p.x_TD, dh, a, *p.plan),
    }
    with pytest.raises(ConfigError, match=f"moe.experts={backend} needs the package {package}.*pip install"):
        getattr(ops_of(backend), direction)(*arguments[direction])


def test_te_without_the_product_that_takes_device_counts_is_refused(monkeypatch):
    fakes.install_te(monkeypatch, supported=False)
    p = make_problem("random", torch.bfloat16)
    with pytest.raises(ConfigError, match="moe.experts=te needs the grouped products of cuBLASLt"):
        ops.grouped_mlp(*p.inputs, *p.plan, "te")


def test_turbo_gets_the_weights_as_they_are_stored(monkeypatch):
    fake = fakes.install_turbo(monkeypatch)
    p = make_problem("random", torch.bfloat16)
    assert_directions_match(ops_of("turbo"), p)
    used = [call["b"].data_ptr() for call in fake.calls if "trans_c" not in call]
    assert used == [w.data_ptr() for w in (p.w_gate_up, p.w_down, p.w_down, p.w_gate_up)]
