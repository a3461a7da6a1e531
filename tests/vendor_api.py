"""Recorded signatures of vendor libraries, so that adapters are checked where the library is absent."""

import ast
import importlib.machinery
import inspect
import json
import sys
import types
from pathlib import Path

FOLDER = Path(__file__).parent / "data" / "vendor_api"


def recorded_signature(library, name, method=None):
    """Return the signature of a function, or of a class's method without ``self``.

    ``library`` is a file in tests/data/vendor_api without its ending, ``name`` the public import path.
    """
    document = json.loads((FOLDER / f"{library}.json").read_text())
    entry = document["classes"][name]["methods"][method] if method else document["functions"][name]
    keyword_only = set(entry.get("kwonly") or entry.get("keyword_only") or [])
    return inspect.Signature([_parameter(n, default, n in keyword_only) for n, default in entry["params"]])


def bind(signature, args, kwargs):
    """Return all arguments by name with defaults filled in. Raises TypeError like the real call."""
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.arguments


def install_module(monkeypatch, path, **names):
    """Put a fake module with ``names``, and its parent packages, in place of ``path``."""
    parts = path.split(".")
    for depth in range(1, len(parts) + 1):
        full_name = ".".join(parts[:depth])
        module = types.ModuleType(full_name)
        module.__spec__ = importlib.machinery.ModuleSpec(full_name, loader=None, is_package=True)
        module.__path__ = []
        monkeypatch.setitem(sys.modules, full_name, module)
    for name, value in names.items():
        monkeypatch.setattr(sys.modules[path], name, value, raising=False)


def _parameter(name, default, keyword_only):
    kind = inspect.Parameter.KEYWORD_ONLY if keyword_only else inspect.Parameter.POSITIONAL_OR_KEYWORD
    value = inspect.Parameter.empty if default is None else ast.literal_eval(default)
    return inspect.Parameter(name, kind, default=value)
