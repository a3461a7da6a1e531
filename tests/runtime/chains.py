"""Short chains of units, some of which are captured after a step."""

import itertools

import torch
from torch import nn

from graphmoe.ops.gradients import Gradient
from graphmoe.passes.table import PassRunner, select_passes
from graphmoe.runtime.capture.capture import Capture
from graphmoe.runtime.compile.captured_units import UnitCapture
from graphmoe.runtime.compile.executor import CompiledSegments
from graphmoe.segments import Segment, run_segments
from tests.runs import config
from tests.tolerances import assert_gradient_close

CPU = torch.device("cpu")


class Scale(nn.Module):
    """sin(x times its weight)."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(1, 2, 4))

    def forward(self, x: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
        return (x * self.weight + shift).sin()


class Chain:
    """Two units, the first of which is captured after one step, with their gradients."""

    def __init__(self, names: tuple[str, ...] = ("attn",)) -> None:
        self.modules = [Scale(), Scale()]
        self.segments = [
            Segment(name, module, ("x", "shift"), ("x",))
            for name, module in zip(("attn", "mlp"), self.modules, strict=True)
        ]
        self.gradients = {id(m.weight): Gradient(torch.full((4,), torch.nan)) for m in self.modules}
        split = select_passes(config("passes.enabled=[split_backward]").passes, {})
        self.capture = Capture("test", CPU, warmup_steps=1)
        self.execute = CompiledSegments(
            lambda trains: PassRunner(split),
            lambda p: self.gradients[id(p)],
            UnitCapture(frozenset(names), self.capture),
        )
        self.shift = torch.full((4,), 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        (y,) = self.execute(self.segments, {"x": x, "shift": self.shift}, ("x",))
        return y

    def check(self, *batches: torch.Tensor) -> None:
        """One step of the batches: results and all gradients are those of the plain segments."""
        wanted = [torch.zeros(4), torch.zeros(4)]
        with self.capture.step():
            leaves = [batch.clone().requires_grad_() for batch in batches]
            outputs = [self.forward(leaf) for leaf in leaves]
            for leaf, output in zip(leaves[::-1], outputs[::-1], strict=True):
                (plain,) = run_segments(self.segments, {"x": leaf, "shift": self.shift}, ("x",))
                weights = [m.weight for m in self.modules]
                of_x, *of_weights = torch.autograd.grad(plain.square().sum(), [leaf, *weights])
                torch.testing.assert_close(output, plain)
                output.square().sum().backward()
                assert_gradient_close(leaf.grad, of_x)
                wanted = [total + gradient for total, gradient in zip(wanted, of_weights, strict=True)]
        for module, total in zip(self.modules, wanted, strict=True):
            gradient = self.gradients[id(module.weight)]
            assert_gradient_close(gradient.total, total)
            gradient.finish()


class OrderedChain(Chain):
    """Three units, the middle one without weights, the others with code that they share.

    It notes which graphs replay, by the order of making.
    """

    def __init__(self) -> None:
        super().__init__(("attn", "moe_combine"))
        between = Segment("moe_combine", lambda x: x.cos(), ("x",), ("x",), stream="comm")
        first, last = (Segment("attn", module, ("x", "shift"), ("x",)) for module in self.modules)
        self.segments = [first, between, last]
        self.replayed: list[tuple[object, int]] = []
        """Pool and number of each graph."""
        make, made = self.capture.maker.make, itertools.count()

        def noting(run, given=(), pool=0):
            graph, number = make(run, given, pool), next(made)
            replay = graph.replay
            graph.replay = lambda: self.replayed.append((pool, number)) or replay()
            return graph

        self.capture.maker.make = noting
