"""Recorded signatures of vendor libraries: adapters are checked against them if the library is absent.

``python -m tests.vendor_api primus_turbo CHECKOUT COMMIT`` updates them from sources and prints differences.
"""

import ast
import importlib.machinery
import inspect
import json
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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


def record(library: str, sources: Path, version: str, folder: Path = FOLDER) -> Iterator[str]:
    """Write the signatures of a file's names as ``sources`` have them; yield a line for each that differs."""
    path = folder / f"{library}.json"
    document = json.loads(path.read_text())
    document["commit" if "commit" in document else "version"] = version
    for name, entry in document.get("functions", {}).items():
        yield from _update(entry, _defined(sources, name), name)
    for name, entry in document.get("classes", {}).items():
        found = _defined(sources, name)
        for method, of_method in entry["methods"].items():
            own = [node for node in found.body if getattr(node, "name", None) == method] if found else []
            yield from _update(of_method, own[-1] if own else None, f"{name}.{method}")
    path.write_text(json.dumps(document, indent=1) + "\n")


def _update(entry: dict[str, Any], found: ast.FunctionDef | None, name: str) -> Iterator[str]:
    if found is None:
        yield f"{name} is gone"
        return
    of = found.args
    usual = [None] * (len(of.posonlyargs + of.args) - len(of.defaults)) + [
        ast.unparse(x) for x in of.defaults
    ]
    named = [default and ast.unparse(default) for default in of.kw_defaults]
    params = [
        [x.arg, default]
        for x, default in zip(of.posonlyargs + of.args + of.kwonlyargs, usual + named, strict=True)
        if x.arg not in ("self", "cls")
    ]
    if params != entry["params"]:
        yield f"{name}: {entry['params']} -> {params}"
    keyword_only = "kwonly" if "kwonly" in entry else "keyword_only"
    entry |= {"params": params, keyword_only: [x.arg for x in of.kwonlyargs]}


def _defined(sources: Path, name: str) -> Any:
    """Return the definition of a public import path, through the imports of the packages on its way."""
    module, _, last = name.rpartition(".")
    base = sources / module.replace(".", "/")
    file = next((f for f in (base.with_suffix(".py"), base / "__init__.py") if f.is_file()), None)
    if file is None:
        return None
    package = module if file.name == "__init__.py" else module.rpartition(".")[0]
    tree = ast.parse(file.read_text())
    own = [node for node in tree.body if getattr(node, "name", None) == last]
    if own:
        return own[-1]
    for node in tree.body:
        if isinstance(node, ast.ImportFrom):
            parts = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            origin = ".".join([*parts, *([node.module] if node.module else [])])
            for alias in node.names:
                if alias.name == "*" or (alias.asname or alias.name) == last:
                    found = _defined(sources, f"{origin}.{last if alias.name == '*' else alias.name}")
                    if found is not None:
                        return found
    return None


if __name__ == "__main__":
    print(*record(sys.argv[1], Path(sys.argv[2]), sys.argv[3]), sep="\n")
