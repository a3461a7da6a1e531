"""Models that the fusion passes are tried on, and how a graph and its rewritten form are compared.

B sequences, S positions, T tokens, K slots, E experts, R = T * K rows, D hidden, F expert width, V ids.
"""

import contextlib
import copy
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, fx, nn

from graphmoe.ops.grouped_mm import grouped_mm
from graphmoe.passes import PASSES
from graphmoe.passes.base import Rewrites
from graphmoe.runtime.compile.units import fakes_of, trace_forward
from tests.tolerances import TOLERANCES, relative_error

T, K, E, D, WIDTH = 18, 2, 4, 16, 8
R = T * K
DTYPES = (torch.float32, torch.bfloat16)
NUMERICS = {spec.run: spec.numerics for spec in PASSES}

Pass = Callable[[fx.Graph], Rewrites]


class Traced(NamedTuple):
    """A graph and tensors to run it with."""

    graph: fx.GraphModule
    inputs: list[Tensor]


def traced(run: Callable[..., Any], *inputs: Tensor, device: str = "cpu") -> Traced:
    """The forward of a function or module; a module's parameters and buffers become inputs.

    The graph of another device than the CPU can be looked at but not run.
    """
    state = dict(run.state_dict(keep_vars=True)) if isinstance(run, nn.Module) else {}
    if isinstance(run, nn.Module):
        state |= dict(run.named_buffers())
    names, values = list(state), [*state.values(), *inputs]

    def function(*tensors: Tensor) -> tuple[Tensor, ...]:
        given, rest = dict(zip(names, tensors, strict=False)), tensors[len(names) :]
        output = torch.func.functional_call(run, given, rest) if names else run(*rest)
        outputs = output if isinstance(output, tuple) else (output,)
        return tuple(tensor for tensor in outputs if tensor is not None)

    fakes = fakes_of(values)
    if device != "cpu":
        with fakes[0].fake_mode:
            fakes = [torch.empty(x.shape, dtype=x.dtype, device=device) for x in values]
        fakes = [fake.requires_grad_(x.requires_grad) for fake, x in zip(fakes, values, strict=True)]
    return Traced(trace_forward(function, fakes), values)


def rewritten(plain: Traced, *passes: Pass) -> tuple[Traced, list[Rewrites]]:
    module = copy.deepcopy(plain.graph)
    for node in module.graph.nodes:
        node.meta["custom"] = {"segment": "here"}
    results = []
    for each in passes:
        results.append(each(module.graph))
        module.graph.eliminate_dead_code()
        module.graph.lint()
    module.recompile()
    promises = {NUMERICS[getattr(each, "func", each)] for each in passes}
    module.meta["numerics"] = "allclose" if "allclose" in promises else "bitwise"
    for node in module.graph.nodes:
        assert node.meta["custom"] == {"segment": "here"}, node
        assert node.op == "output" or "val" in node.meta, node
    return Traced(module, plain.inputs), results


def assert_left(plain: Traced, reason: str, *passes: Pass) -> None:
    before, _ = rewritten(plain, *passes[:-1])
    after, results = rewritten(plain, *passes)
    assert operations(after) == operations(before)
    assert results[-1].matches == 0
    reasons = results[-1].left or (results[-1].absent,)
    assert any(reason in line for line in reasons), reasons


def operations(traced: Traced) -> Counter[str]:
    calls = [node.target for node in traced.graph.graph.nodes if node.op == "call_function"]
    return Counter(getattr(target, "_opname", target.__name__) for target in calls)


def call_of(traced: Traced, name: str) -> fx.Node:
    (call,) = [node for node in traced.graph.graph.nodes if str(node.target).startswith(f"graphmoe.{name}")]
    return call


def row_sized(traced: Traced, rows: int) -> list[str]:
    found = []
    for node in traced.graph.graph.nodes:
        sizes = getattr(node.meta.get("val"), "shape", ())
        name = getattr(node.target, "_opname", "")
        per_slot = len(sizes) > 2 and sizes[:2].numel() == rows  # [T, K, ...]
        if name in ("index", "silu", "mul") and (per_slot or sizes[:1] == (rows,)):
            found.append(node.name)
    return found


class Results(NamedTuple):
    outputs: list[Tensor]
    gradients: list[Tensor | None]


def run(traced: Traced) -> Results:
    """Outputs, and the gradients of a random combination of them in all inputs that want one."""
    inputs = [x.detach().clone().requires_grad_(x.requires_grad) for x in traced.inputs]
    outputs = traced.graph(*inputs)
    wanted = [x for x in inputs if x.requires_grad]
    roots = [y for y in outputs if y.requires_grad]
    generator = torch.Generator().manual_seed(7)
    seeds = [torch.randn(y.shape, generator=generator).to(y) for y in roots]
    if not roots:
        return Results(list(outputs), [])
    return Results(list(outputs), list(torch.autograd.grad(roots, wanted, seeds, allow_unused=True)))


def assert_same_numbers(fused: Traced, plain: Traced, *others: Sequence[Tensor]) -> None:
    for given in others:
        assert_same_numbers(Traced(fused.graph, [*given]), Traced(plain.graph, [*given]))
    results, expected = run(fused), run(plain)
    assert len(results.outputs) == len(expected.outputs)
    assert len(results.gradients) == len(expected.gradients)
    for kind, ours, theirs in (
        ("forward", results.outputs, expected.outputs),
        ("gradient", results.gradients, expected.gradients),
    ):
        for i, (actual, wanted) in enumerate(zip(ours, theirs, strict=True)):
            if wanted is None or actual is None:
                assert actual is wanted is None, (kind, i)
                continue
            limit = getattr(TOLERANCES[_coarsest(plain)], kind)
            assert_agrees(actual, wanted, fused.graph.meta["numerics"], limit, f"{kind} {i}")


def assert_agrees(actual: Tensor, wanted: Tensor, numerics: str, limit: float, name: str) -> None:
    """Equal bits for "bitwise"; else both within ``limit`` of exact numbers, so within twice that."""
    assert actual.dtype == wanted.dtype and actual.shape == wanted.shape, name
    if numerics == "bitwise" or not wanted.is_floating_point():
        assert torch.equal(actual, wanted), name
    else:
        error = relative_error(actual, wanted)
        assert error <= 2 * limit, f"{name}: relative L2 error {error:.1e} is over {2 * limit:.1e}"


def _coarsest(traced: Traced) -> torch.dtype:
    return max((x.dtype for x in traced.inputs if x.is_floating_point()), key=lambda d: torch.finfo(d).eps)


def random(*sizes: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*sizes, generator=generator).to(dtype).requires_grad_()


ROUTINGS = ("natural", "one_expert", "empty_experts")


def experts_of(routing: str, tokens: int = T, k: int = K, num_experts: int = E, seed: int = 3) -> Tensor:
    """Ids int64 [T, K]: random, all slots of a rank at one expert, or without the first and last expert."""
    generator = torch.Generator().manual_seed(seed)
    if routing == "one_expert":
        return torch.arange(k).expand(tokens, k).clone()
    scores = torch.rand(tokens, num_experts, generator=generator)
    if routing == "empty_experts":
        scores[:, [0, -1]] = -1.0
    return scores.topk(k).indices


class Weights(NamedTuple):
    """Weights for the experts' functions below."""

    gate_up: Tensor
    down: Tensor


def expert_weights(dtype: torch.dtype) -> Weights:
    gate_up = random(E, 2 * WIDTH, D, seed=1, dtype=dtype).detach() / D**0.5
    down = random(E, D, WIDTH, seed=2, dtype=dtype).detach() / WIDTH**0.5
    return Weights(gate_up.requires_grad_(), down.requires_grad_())


@contextlib.contextmanager
def our_grouped_mm() -> Iterator[None]:
    """Let the experts of transformers call our grouped product in place of torch's."""
    from transformers.integrations import moe

    def product(rows: Tensor, weight_EKN: Tensor, offs: Tensor) -> Tensor:
        return grouped_mm(rows.to(weight_EKN.dtype), weight_EKN.mT, offs)

    with mock.patch.object(moe, "_grouped_mm", product):
        yield


GROUPED = {
    "n_routed_experts": 2 * E, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5,
    "n_shared_experts": 1, "num_attention_heads": 2,
}  # fmt: skip
BLOCKS = {  # family: (class, settings of its config)
    "mixtral": ("MixtralSparseMoeBlock", {"intermediate_size": WIDTH, "num_local_experts": E}),
    "qwen3_moe": ("Qwen3MoeSparseMoeBlock", {"num_experts": E}),
    "deepseek_v2": ("DeepseekV2Moe", GROUPED),
    "deepseek_v3": ("DeepseekV3MoE", GROUPED),
}


def transformers_block(family: str, dtype: torch.dtype, device: str = "cpu", **changes: Any) -> Traced:
    from transformers import AutoConfig

    name, settings = BLOCKS[family]
    shape = {"hidden_size": D, "num_experts_per_tok": K, "moe_intermediate_size": WIDTH}
    made = AutoConfig.for_model(family, **(shape | settings | changes))
    made._experts_implementation = "grouped_mm"
    module = getattr(import_module(f"transformers.models.{family}.modeling_{family}"), name)(made)
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            tensor.normal_(0.0, 0.5, generator=generator)
    with our_grouped_mm():
        return traced(module.to(dtype), random(2, T // 2, D, dtype=dtype), device=device)
