"""Products of matrices with their transposes: values against fp64, symmetry, and the kernel."""

from unittest import mock

import pytest
import torch

from graphmoe.ops import symmetric_mm_kernel as kernel
from graphmoe.ops.symmetric_mm import symmetric_mm
from tests.ops.ahead_of_time import launches_of
from tests.ops.interpreted import BACKENDS, INTERPRETING, device_of
from tests.tolerances import assert_forward_close

SHAPES = [(3, 40, 72), (2, 72, 40), (1, 8, 16), (2, 176, 16), (2, 24, 200), (1, 264, 136), (0, 16, 16)][
    : -1 if INTERPRETING else None
]
DTYPES = (torch.bfloat16, torch.float32)


def product(x_NRC, of_columns, **numbers):
    if INTERPRETING:
        return kernel.launch(x_NRC, of_columns, **numbers)
    return symmetric_mm(x_NRC, of_columns=of_columns, **numbers)


@pytest.mark.parametrize("dtype", DTYPES[INTERPRETING:], ids=str)  # it rounds bf16 wrongly
@pytest.mark.parametrize("of_columns", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_products_match_fp64_and_are_symmetric(backend, shape, of_columns, dtype):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(device_of(backend), dtype)
    found = product(x, of_columns, scale=0.5, diagonal=3.0)
    exact = x.double()
    exact = 0.5 * (exact.mT @ exact if of_columns else exact @ exact.mT)
    identity = torch.eye(found.shape[1], dtype=torch.float64, device=x.device)
    assert_forward_close(found, exact + 3 * identity)
    assert backend == "plain" or torch.equal(found, found.mT)
    again = product(found, False, scale=2.0, add=-1.0)
    assert_forward_close(again, 2 * found.double() @ found.double() - found.double())


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_not_finite_spoils_its_matrix_alone(backend):
    x = torch.ones(3, 24, 40, device=device_of(backend))
    x[1, 20, 3] = torch.nan
    found = product(x if INTERPRETING else x.bfloat16(), False)
    assert found[1, 20].isnan().all() and found[1, :, 20].isnan().all() and found[::2].isfinite().all()


def ahead_of_time_cases():
    cases = []
    with torch.device("meta"):
        x, square = (torch.empty(8, 1408, width).bfloat16() for width in (2048, 1408))
    given = {"rows": (x, False), "columns": (x, True), "squares": (square, False, 2.0, -4.0, 3.0)}
    with mock.patch.multiple(kernel, kind_of=lambda _: "hopper", units_of=lambda _: 132):
        for name, each in given.items():
            for case in launches_of(name, lambda each=each: kernel.launch(*each)):
                case["constexprs"] |= {"UPCAST": False}
                cases.append(case | {"only": ("sm_90", "sm_100")})
    return cases
