"""What runs: names of the operations of this project, and new tensors."""

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class SeenOps(TorchDispatchMode):
    """Names of the ops of this project that run inside the context; shapes and dtypes of all results."""

    def __init__(self):
        super().__init__()
        self.names, self.made = [], []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "graphmoe":
            self.names.append(func._schema.name)
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and "out" not in (kwargs or {}):
            self.made.append((result.shape, result.dtype))
        return result
