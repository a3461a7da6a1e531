"""What a check of `graphmoe.doctor.prove` returns or raises, and comparisons with fp64."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from graphmoe.config.schema import ConfigError

T = TypeVar("T")
# largest relative L2 errors of results and of gradients against fp64
LIMITS = {torch.float32: (3e-6, 1e-5), torch.bfloat16: (5e-3, 1e-2)}
Numbers = dict[str, Any]  # errors by name, and facts such as the number of ranks


class Skipped(Exception):
    """A check cannot run here; the message says why."""


class Error(NamedTuple):
    """A measured error and its limit; of a bitwise comparison, the number of elements that differ, and 0."""

    error: float
    limit: float

    @property
    def is_over(self) -> bool:
        return not self.error <= self.limit  # NaN is over each limit

    def to_json(self) -> dict[str, float | str]:
        error = self.error if math.isfinite(self.error) else str(self.error)  # JSON has no NaN
        return {"error": error, "limit": self.limit}


def unless_refused(call: Callable[[], T]) -> T:
    """Return the result of ``call``. *Raises* Skipped with the text of a ConfigError."""
    try:
        return call()
    except ConfigError as error:
        raise Skipped(str(error)) from error


def require_gpus(device: torch.device, count: int = 1) -> None:
    """Raise Skipped if fewer GPUs are visible."""
    found = torch.cuda.device_count() if device.type == "cuda" else 0
    if found < count:
        raise Skipped(f"needs {'a GPU' if count == 1 else f'{count} GPUs'}, and {found} are visible")


def differing(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> Error:
    """Return in how many elements tensors differ."""
    pairs = zip(found, wanted, strict=True)
    return Error(float(sum(int((one != other).sum()) for one, other in pairs)), 0)


def relative_error(found: Tensor, exact: Tensor) -> float:
    """Return ||found - exact|| / ||exact|| in fp64."""
    exact = exact.detach().cpu().double()
    return float((found.detach().cpu().double() - exact).norm() / exact.norm().clamp_min(1e-300))


def compared(
    label: str, names: str, run: Callable[..., Tensor], given: Sequence[Any],
    exact: Callable[..., Tensor] | None = None, limits: tuple[float, float] | None = None,
) -> Numbers:  # fmt: skip
    """Compare a result and its gradients with those of ``exact``, by default ``run``, in fp64 on the CPU.

    ``names``: of the result and of the gradients of floating-point tensors among ``given``. Limits are by
    default those of the result's dtype.
    """
    generator, found = torch.Generator().manual_seed(1), list[list[Tensor]]()
    grad: Tensor | None = None
    for function, is_exact in ((run, False), (exact or run, True)):
        inputs = [_input(each, is_exact) for each in given]
        leaves = [each for each in inputs if isinstance(each, Tensor) and each.requires_grad]
        out = function(*inputs)
        if grad is None:
            grad = torch.randn(out.shape, generator=generator).to(out.dtype)
        gradients = torch.autograd.grad(out, leaves, grad.to(out))
        found.append([out, *gradients])
    forward, backward = limits or LIMITS[found[0][0].dtype]
    triples = zip(names.split(), *found, strict=True)
    return {
        f"{label} {name}": Error(relative_error(one, other), backward if number else forward)
        for number, (name, one, other) in enumerate(triples)
    }


def _input(given: Any, is_exact: bool) -> Any:
    if not isinstance(given, Tensor):
        return given
    tensor = given.detach().cpu() if is_exact else given.detach()
    if not tensor.is_floating_point():
        return tensor
    return (tensor.double() if is_exact else tensor).requires_grad_()


@contextmanager
def side_stream(device: torch.device) -> Iterator[None]:
    """Context on a stream of its own, which a capture needs. Syncs the device at its end."""
    if device.type == "cpu":
        yield
        return
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield
    torch.cuda.synchronize(device)
