"""The fp64 reference of causal attention, inputs, and the check against it, on a CPU or a GPU."""

import functools

import torch

from tests.tolerances import assert_forward_close, assert_gradient_close


def make_inputs(shape, dtype=torch.bfloat16, device="cpu"):
    """Return q, k, v that require gradients, and the gradient of the output."""
    B, S, H, G, E, V = shape
    generator = torch.Generator(device).manual_seed(0)
    sizes = ((B, S, H, E), (B, S, G, E), (B, S, G, V), (B, S, H, V))
    q, k, v, grad = (torch.randn(size, generator=generator, device=device).to(dtype) for size in sizes)
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), grad


def forward_and_gradients(run, qkv, grad):
    out = run(*qkv)
    return [out, *torch.autograd.grad(out, qkv, grad)]


def assert_matches_reference(run, shape, dtype, device="cpu"):
    """Compare output and gradients of ``run``, a partial with a scale, with the fp64 reference."""
    *qkv, grad = make_inputs(shape, dtype, device)
    out, *gradients = forward_and_gradients(run, qkv, grad)
    reference = functools.partial(reference_attention, scale=run.keywords["scale"])
    exact = [x.detach().double().requires_grad_() for x in qkv]
    expected, *expected_gradients = forward_and_gradients(reference, exact, grad.double())
    assert out.dtype == dtype
    assert_forward_close(out, expected)
    for actual, wanted in zip(gradients, expected_gradients, strict=True):
        assert actual.dtype == dtype
        assert_gradient_close(actual, wanted, terms=float(grad.norm()))  # one token: dq = dk = 0


def reference_attention(
    q_BSHE: torch.Tensor, k_BSGE: torch.Tensor, v_BSGV: torch.Tensor, *, scale: float, causal: bool = True
) -> torch.Tensor:
    """Return attention [B, S, H, V] in fp64, with the softmax written out."""
    q, k, v = (x.double() for x in (q_BSHE, k_BSGE, v_BSGV))
    group_of_head = torch.arange(q.shape[2], device=q.device) // (q.shape[2] // k.shape[2])
    k, v = k[:, :, group_of_head], v[:, :, group_of_head]
    logits_BHST = scale * torch.einsum("bshe,bthe->bhst", q, k)
    if causal:
        future_ST = torch.ones(logits_BHST.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        logits_BHST = logits_BHST.masked_fill(future_ST, float("-inf"))
    weights_BHST = (logits_BHST - logits_BHST.amax(-1, keepdim=True)).exp()
    weights_BHST = weights_BHST / weights_BHST.sum(-1, keepdim=True)
    return torch.einsum("bhst,bthv->bshv", weights_BHST, v)
