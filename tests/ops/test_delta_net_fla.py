"""The gated delta rule by flash-linear-attention: a stand-in that takes the calls of recorded signatures.

It computes gradients from what a backward is given. The kernels themselves need a GPU.
"""

import contextlib
import inspect

import pytest
import torch

from graphmoe.config import packages
from graphmoe.config.schema import ConfigError, DeltaNetBackend
from graphmoe.model.attention import check_backend
from graphmoe.model.build import build_model
from graphmoe.ops.delta_net import fla, reference
from graphmoe.plan.attention import is_linear
from tests.ops.test_delta_net import DECAYS, inputs_of, results, written_out
from tests.plan.rules.test_linear_attention import HYBRID
from tests.plan.rules.test_rules import broken
from tests.runs import config
from tests.tolerances import assert_forward_close, assert_gradient_close
from tests.vendor_api import bind, install_module, recorded_signature

PATH = "fla.ops.gated_delta_rule.chunk"
NAMES = ("chunk_gated_delta_rule_fwd", "chunk_gated_delta_rule_bwd")
FORWARD, BACKWARD = (recorded_signature("fla_core", f"{PATH}.{name}") for name in NAMES)
LN2 = 0.6931471805599453
BF16 = torch.bfloat16


def checked(signature, args, kwargs):
    call = bind(signature, args, kwargs)
    tensors = [x for x in call.values() if isinstance(x, torch.Tensor)]
    assert all(x.is_contiguous() for x in tensors) and call["q"].dtype in (BF16, torch.float16)
    assert call["g"].dtype == call["beta"].dtype == torch.float32
    assert call["scale"] == call["q"].shape[-1] ** -0.5 and call["initial_state"] is None
    assert call["cu_seqlens"] is None and call["chunk_size"] == 64 and not call["use_gate_in_kernel"]
    return call, [call[name] for name in ("q", "k", "v", "g", "beta")]


def sums_in_chunks(g, undo=False):
    parts = [part.diff(dim=1, prepend=0 * part[:, :1]) if undo else part.cumsum(1) for part in g.split(64, 1)]
    return torch.cat(parts, 1) * (LN2 if undo else 1 / LN2)


@pytest.fixture
def stand_in(monkeypatch):
    """Backward calls of fla-core with all their arguments."""
    calls = []

    def forward(*args, **kwargs):
        call, (q, k, v, g, beta) = checked(FORWARD, args, kwargs)
        assert not call["output_final_state"]
        inverse = k.new_full((*g.shape, 64), 3.0)
        return sums_in_chunks(g), reference.forward(q, k, v, g, beta, None), inverse, None, None, None

    def backward(*args, **kwargs):
        call, (q, k, v, sums, beta) = checked(BACKWARD, args, kwargs)
        calls.append(call)
        assert call["A"].eq(3).all() and call["dht"] is None
        wide = (call["do"], q, k, v, sums_in_chunks(sums.double(), undo=True), beta)
        dq, dk, dv, dg, d_beta = reference.backward(*(x.double() for x in wide), None)
        return dq.float(), dk.float(), dv.float(), d_beta.float(), dg.float(), None, None, None

    install_module(monkeypatch, PATH, **dict(zip(NAMES, (forward, backward), strict=True)))
    fla._kernels.cache_clear()
    yield calls
    fla._kernels.cache_clear()


@pytest.mark.parametrize("decays", DECAYS.values(), ids=DECAYS)
def test_fla_matches_fp64_eager_and_compiled(decays, stand_in):
    inputs, grad = inputs_of((2, 130, 2, 4, 16, 32), decays, BF16, "cpu")
    out, *gradients = results(fla.delta_net, inputs, grad, None)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    wanted, *wanted_gradients = results(written_out, exact, grad.double(), None)
    assert_forward_close(out, wanted)
    for x, actual, expected in zip(inputs, gradients, wanted_gradients, strict=True):
        assert actual.dtype == x.dtype and actual.is_contiguous()
        assert_gradient_close(actual.to(BF16), expected, terms=float(grad.norm()))
    torch.compiler.reset()
    compiled = torch.compile(fla.delta_net, fullgraph=True, backend="aot_eager")
    assert all(map(torch.equal, results(compiled, inputs, grad, None), [out, *gradients]))
    assert len(stand_in) == 2


def test_fla_operation_is_registered_as_torch_asks_also_for_views(stand_in):
    inputs, _ = inputs_of((2, 70, 1, 2, 16, 16), DECAYS["weak"], BF16, "cpu")
    torch.library.opcheck(torch.ops.graphmoe.fla_delta_net.default, (*inputs,))
    apart = [x.detach().transpose(0, 1).contiguous().transpose(0, 1) for x in inputs]
    assert torch.equal(fla.delta_net(*apart, None), fla.delta_net(*inputs, None))


def test_a_model_runs_the_backend_that_its_configuration_names(stand_in):
    words = f"{HYBRID} model.linear_key_heads=2 model.linear_value_heads=4 model.hidden_size=64".split()
    losses = []
    for backend in ("auto", "fla"):
        shape = config(*words, f"model.delta_net_backend={backend}").model
        model = build_model(shape, seed=0).bfloat16()
        tokens = torch.randint(64, (2, 17), generator=torch.Generator().manual_seed(0))
        loss = model.loss(tokens[:, :-1], tokens[:, 1:]).total
        loss.backward()
        losses.append(loss.item())
        delta_nets = sum(is_linear(shape, i) for i in range(shape.num_layers))
        assert len(stand_in) == (delta_nets if backend == "fla" else 0) and delta_nets
    assert losses[0] == pytest.approx(losses[1], rel=1e-2)


@pytest.mark.parametrize("capability, triton, tilelang, refused", [
    (9, "3.6.0", False, True), (9, "3.7.0+git1", False, True), (9, "3.6.0", True, False),
    (9, "3.7.1", False, False), (9, "3.3.1", False, False), (10, "3.6.0", False, False),
])  # fmt: skip
def test_fla_is_refused_if_it_refuses_triton(capability, triton, tilelang, refused, stand_in, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (capability, 0))
    monkeypatch.setattr(fla, "version_of", lambda name: {"triton": triton}[name])
    monkeypatch.setattr(fla, "is_installed", lambda name: tilelang)
    said = "delta_net_backend=fla refuses triton 3.*=auto or triton$"
    with pytest.raises(ConfigError, match=said) if refused else contextlib.nullcontext():
        check_backend(config(*HYBRID.split(), "model.delta_net_backend=fla").model, "cuda")


def test_what_cannot_run_is_one_line_with_what_would(monkeypatch):
    for backend in ("fla", "triton"):
        with pytest.raises(ConfigError, match=f"_backend={backend} needs a GPU .* use .*=auto$"):
            fla.check_delta_net(DeltaNetBackend(backend), "cpu")
    fla.check_delta_net(DeltaNetBackend.auto, "cpu")
    monkeypatch.setattr(packages, "is_installed", lambda package: False)
    said = "=fla needs the package fla, .* pip install 'graphmoe.fla.', or use .*=auto or triton$"
    with pytest.raises(ConfigError, match=said):
        fla.check_delta_net(DeltaNetBackend.fla, "cuda")
    words = f"{HYBRID} data.document_mask=true model.delta_net_backend"
    (found,) = (line for line in broken(f"{words}=fla") if "delta_net_backend" in line)
    assert "is refused with data.document_mask=true; use model.delta_net_backend=auto or triton" in found
    assert not any("delta_net_backend" in line for line in broken(f"{words}=triton"))
    inputs, _ = inputs_of((1, 8, 1, 1, 16, 16), DECAYS["weak"], torch.float32, "cpu")
    with pytest.raises(ConfigError, match="model.delta_net_backend=fla has bf16 and fp16 kernels only"):
        fla.delta_net(*inputs, None)


@pytest.mark.skipif(not packages.is_installed("fla"), reason="fla-core is not installed")
def test_signatures_are_those_of_the_installed_package():
    chunk = pytest.importorskip(PATH)
    for name, recorded in zip(NAMES, (FORWARD, BACKWARD), strict=True):
        found = inspect.signature(getattr(chunk, name)).parameters
        facts = [[(p.name, p.default) for p in each.values()] for each in (found, recorded.parameters)]
        assert facts[0] == facts[1]
