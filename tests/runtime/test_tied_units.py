"""Units that share a weight: whichever accumulates first stores its gradient, the others add theirs."""

import torch
from torch import Tensor

from graphmoe.model.build import build_model
from graphmoe.model.transformer import Transformer
from graphmoe.ops.gradients import Gradient
from graphmoe.passes.table import PassRunner, select_passes
from graphmoe.runtime.compile.executor import CompiledSegments
from graphmoe.segments import Executor, Segment, run_segments
from tests.runs import config
from tests.tolerances import assert_forward_close, assert_gradient_close

NAMES = ("embed.weight", "loss_head.norm.weight")


def compiling(gradients: dict[int, Gradient]) -> CompiledSegments:
    passes = config().passes
    return CompiledSegments(
        lambda trains: PassRunner(select_passes(passes, {"fuse_loss": {"needs_grad": trains}})),
        lambda weight: gradients[id(weight)],
    )


def loss_of_both_uses(model: Transformer, tokens_BS: Tensor, execute: Executor) -> Tensor:
    """The loss of a model without layers."""
    named = {"tokens": tokens_BS[:, :-1], "labels": tokens_BS[:, 1:]}
    (x_BSD,) = execute([Segment("embed", model.embed, ("tokens",), ("x",))], named, ("x",))
    (loss,) = execute(
        model.loss_head.segments(model.loss_head.norm), {**named, "x": x_BSD}, ("cross_entropy",)
    )
    return loss


def test_compiled_units_sum_the_gradients_of_both_uses_over_micro_batches():
    run = config("model.tie_embeddings=true")
    model, exact = (build_model(run.model, execution=run.moe) for _ in range(2))
    exact.double()
    weights = {name: model.get_parameter(name) for name in NAMES}
    gradients = {name: Gradient(torch.full_like(weight, torch.nan)) for name, weight in weights.items()}
    came: list[str] = []
    for name, gradient in gradients.items():
        gradient.on_added = lambda name=name: came.append(name)
    execute = compiling({id(weights[name]): gradient for name, gradient in gradients.items()})
    batches = torch.randint(0, 64, (2, 2, 17), generator=torch.Generator().manual_seed(0))
    for tokens in batches:
        loss, expected = (
            loss_of_both_uses(*each) for each in ((model, tokens, execute), (exact, tokens, run_segments))
        )
        assert_forward_close(loss, expected)
        loss.backward()
        expected.backward()
    assert came == ["loss_head.norm.weight", "embed.weight", "embed.weight"] * 2
    for name, weight in weights.items():
        assert_gradient_close(gradients[name].total, exact.get_parameter(name).grad)
        assert weight.grad is None
    rows = {(unit.unit, row.name): row.matches for unit in execute.reports for row in unit.passes}
    assert rows["loss", "fuse_loss"] == 1
