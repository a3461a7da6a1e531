"""Models that the fusion passes are tried on, and how a graph and its rewritten form are compared.

B sequences, S positions, T tokens, K slots, E experts, R = T * K rows, D hidden, F expert width, V ids.
"""

import copy
from collections import Counter
from collections.abc import Callable, Sequence
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

    @property
    def nodes(self) -> list[fx.Node]:
        return [*self.graph.graph.nodes]

    @property
    def calls(self) -> Counter[str]:
        targets = [node.target for node in self.nodes if node.op == "call_function"]
        return Counter(getattr(target, "_opname", target.__name__) for target in targets)

    def call(self, name: str) -> fx.Node:
        (found,) = [node for node in self.nodes if str(node.target).startswith(f"graphmoe.{name}")]
        return found

    def row_sized(self, rows: int) -> list[str]:
        found = []
        for node in self.nodes:
            sizes = getattr(node.meta.get("val"), "shape", ())
            per_slot = len(sizes) > 2 and sizes[:2].numel() == rows  # [T, K, ...]
            is_moved = getattr(node.target, "_opname", "") in ("index", "silu", "mul")
            if is_moved and (per_slot or sizes[:1] == (rows,)):
                found.append(node.name)
        return found

    def rewritten(self, *passes: Pass) -> tuple["Traced", list[Rewrites]]:
        module = copy.deepcopy(self.graph)
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
        return Traced(module, self.inputs), results

    def results(self) -> dict[str, Sequence[Tensor | None]]:
        """Outputs, and the gradients of a random combination of them in all inputs that want one."""
        inputs = [x.detach().clone().requires_grad_(x.requires_grad) for x in self.inputs]
        outputs = self.graph(*inputs)
        wanted, roots = ([x for x in each if x.requires_grad] for each in (inputs, outputs))
        generator = torch.Generator().manual_seed(7)
        seeds = [torch.randn(y.shape, generator=generator).to(y) for y in roots]
        gradients = torch.autograd.grad(roots, wanted, seeds, allow_unused=True) if roots else ()
        return {"forward": outputs, "gradient": gradients}

    def assert_same(self, plain: "Traced", *others: Sequence[Tensor]) -> None:
        """Compare outputs and gradients, on the inputs of ``plain`` and on others of the same dtypes."""
        dtypes = {x.dtype for x in plain.inputs if x.is_floating_point()}
        tolerance = TOLERANCES[max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)]
        for given in (plain.inputs, *others):
            found, expected = (Traced(each.graph, [*given]).results() for each in (self, plain))
            for kind, wanted in expected.items():
                limit = getattr(tolerance, kind)
                for i, (ours, theirs) in enumerate(zip(found[kind], wanted, strict=True)):
                    if ours is None or theirs is None:
                        assert ours is theirs is None, (kind, i)
                    else:
                        assert_agrees(ours, theirs, self.graph.meta["numerics"], limit, f"{kind} {i}")


def traced(run: Callable[..., Any], *inputs: Tensor, device: str = "cpu") -> Traced:
    """The forward of a function or module; a module's parameters and buffers become inputs.

    The graph of another device than the CPU can be looked at but not run.
    """
    is_module = isinstance(run, nn.Module)
    state = run.state_dict(keep_vars=True) | dict(run.named_buffers()) if is_module else {}
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


def assert_left(plain: Traced, reason: str, *passes: Pass) -> None:
    before, _ = plain.rewritten(*passes[:-1])
    after, (*_, result) = plain.rewritten(*passes)
    assert after.calls == before.calls and result.matches == 0
    assert any(reason in line for line in result.left or (result.absent,)), result


def assert_agrees(actual: Tensor, wanted: Tensor, numerics: str, limit: float, name: str) -> None:
    """Equal bits for "bitwise"; else both within ``limit`` of exact numbers, so within twice that."""
    assert actual.dtype == wanted.dtype and actual.shape == wanted.shape, name
    if numerics == "bitwise" or not wanted.is_floating_point():
        assert torch.equal(actual, wanted), name
    else:
        error = relative_error(actual, wanted)
        assert error <= 2 * limit, f"{name}: relative L2 error {error:.1e} is over {2 * limit:.1e}"


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


def expert_weights(dtype: torch.dtype) -> list[Tensor]:
    gate_up = random(E, 2 * WIDTH, D, seed=1, dtype=dtype).detach() / D**0.5
    down = random(E, D, WIDTH, seed=2, dtype=dtype).detach() / WIDTH**0.5
    return [gate_up.requires_grad_(), down.requires_grad_()]


def expert_inputs(dtype: torch.dtype = torch.float32, routing: str = "natural") -> list[Tensor]:
    """Tokens, weights of slots, weights of experts, and int32 ids."""
    weight = random(T, K, seed=5).detach().softmax(-1).requires_grad_()
    return [random(T, D, dtype=dtype), weight, *expert_weights(dtype), experts_of(routing).int()]


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
    from transformers.integrations import moe

    def product(rows: Tensor, weight_EKN: Tensor, offs: Tensor) -> Tensor:
        return grouped_mm(rows.to(weight_EKN.dtype), weight_EKN.mT, offs)

    name, settings = BLOCKS[family]
    shape = {"hidden_size": D, "num_experts_per_tok": K, "moe_intermediate_size": WIDTH}
    made = AutoConfig.for_model(family, **(shape | settings | changes))
    made._experts_implementation = "grouped_mm"
    module = getattr(import_module(f"transformers.models.{family}.modeling_{family}"), name)(made)
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            tensor.normal_(0.0, 0.5, generator=generator)
    with mock.patch.object(moe, "_grouped_mm", product):  # ours in place of torch's
        return traced(module.to(dtype), random(2, T // 2, D, dtype=dtype), device=device)
