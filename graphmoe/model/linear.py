"""Matrices that the ranks of tp share (Megatron-LM, arXiv 1909.08053, section 3).

Between two such matrices each rank has the whole sequence and a part of the heads or of the inner width.
Everywhere else it has its own part of the sequence, and all of the width (arXiv 2205.05198, section 4.2.2).
"""

from __future__ import annotations

from torch import Tensor, nn

from graphmoe.plan.layout import Cut, ParameterLayout


def column_parallel(width: int, outputs: int, tp: int, pieces: int = 1) -> nn.Linear:
    """This rank's outputs of a matrix; ``pieces`` as in ``Cut``: 2 for gate and up rows in one."""
    assert outputs % (tp * pieces) == 0, (outputs, tp, pieces)
    linear = nn.Linear(width, outputs // tp, bias=False)
    cut_along_tp(linear.weight, tp, dim=0, pieces=pieces)
    return linear


def row_parallel(inputs: int, width: int, tp: int) -> nn.Linear:
    """A matrix over this rank's part of the inputs: the sum over the ranks of tp is the product."""
    assert inputs % tp == 0, (inputs, tp)
    linear = nn.Linear(inputs // tp, width, bias=False)
    cut_along_tp(linear.weight, tp, dim=1)
    return linear


def cut_along_tp(weight: Tensor, tp: int, dim: int, pieces: int = 1) -> None:
    """Say of a parameter that each rank of tp has its part of it along ``dim``."""
    if tp > 1:
        weight.parallel = ParameterLayout((Cut(dim, "tp", pieces),), "dp_cp")  # type: ignore[attr-defined]
