"""Names of the operations of this project that run."""

from torch.utils._python_dispatch import TorchDispatchMode


class SeenOps(TorchDispatchMode):
    """Names of the ops of this project that run inside the context."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "graphmoe":
            self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))
