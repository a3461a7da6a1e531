"""graphmoe trains Mixture-of-Experts language models; see README.md."""

import importlib
from typing import Any

__version__ = "0.1.0"
__all__ = ["Trainer", "load_hf", "save_hf"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        module = "graphmoe.api" if name == "Trainer" else "graphmoe.checkpoint.hf"
        return getattr(importlib.import_module(module), name)
    raise AttributeError(f"module 'graphmoe' has no attribute '{name}'")
