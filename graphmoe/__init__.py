"""graphmoe trains Mixture-of-Experts language models; see README.md."""

import importlib
from typing import Any

__version__ = "0.1.0"
__all__ = ["Trainer", "load_hf", "save_hf"]


def __getattr__(name: str) -> Any:
    if name == "Trainer":
        return importlib.import_module("graphmoe.api").Trainer
    if name in __all__:
        from graphmoe.checkpoint import hf

        return getattr(hf, name)
    raise AttributeError(f"module 'graphmoe' has no attribute '{name}'")
