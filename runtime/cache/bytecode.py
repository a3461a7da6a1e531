"""Python's bytecode of installed packages, kept beside compiled code where the installation has none.

Images are often built without it (PYTHONDONTWRITEBYTECODE, or an installer that compiles nothing). Each
process then compiles torch's 2,500 modules for itself, which is a large part of a warm start.
"""

import hashlib
import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from graphmoe.runtime.cache.blobs import make_folder
from graphmoe.runtime.cache.folders import make_cache

BYTECODE = "bytecode"
"""Folder below the compile cache's, with a folder for each set of installed packages."""
PREFIX = "PYTHONPYCACHEPREFIX"
"""Python's variable for the folder of bytecode, for the processes that this one starts."""
SAMPLES = ("torch", "sympy")
"""Packages that stand for all that a run imports."""


def keep_bytecode(cache: Path, *, shared: bool = False) -> None:
    """Let this process and its children keep bytecode in the compile cache, if torch came without.

    Call it before torch is imported. Where Python can read bytecode beside the sources, or may write it
    there, nothing changes, nor where the user has set PYTHONPYCACHEPREFIX, nor where the cache cannot be
    written.
    """
    if "torch" in sys.modules or not (sys.pycache_prefix or any(map(_lacks_bytecode, SAMPLES))):
        return
    folder = cache / BYTECODE / _environment()
    if sys.pycache_prefix not in (None, str(folder)):
        return
    try:
        make_cache(cache, shared=shared)
        make_folder(folder)
        os.utime(folder)  # used now
    except OSError:
        return
    sys.pycache_prefix = os.environ[PREFIX] = str(folder)
    sys.dont_write_bytecode = False  # PYTHONDONTWRITEBYTECODE keeps source folders clean, and they stay so


def folder_in_use() -> Path | None:
    """Return the folder in which `keep_bytecode` keeps bytecode; None where it changed nothing."""
    folder = Path(sys.pycache_prefix or "")
    return folder if folder.parent.name == BYTECODE else None


def _lacks_bytecode(package: str) -> bool:
    """Tell whether Python would compile an installed package in every process."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.origin or not spec.has_location:
        return False
    if not sys.dont_write_bytecode and os.access(os.path.dirname(spec.origin), os.W_OK):
        return False
    try:
        with open(spec.cached or "", "rb") as file:
            head = file.read(16)
        source = os.stat(spec.origin)
    except OSError:
        return True
    by_hash = int.from_bytes(head[4:8], "little") & 1
    times = int.from_bytes(head[8:12], "little"), int.from_bytes(head[12:16], "little")
    fresh = by_hash or times == (int(source.st_mtime) & 0xFFFFFFFF, source.st_size & 0xFFFFFFFF)
    return head[:4] != importlib.util.MAGIC_NUMBER or not fresh


def _environment() -> str:
    """Return a name that stands for the packages installed here.

    Python takes bytecode for current by the time and size of the source. In images all files may have one
    time, so two versions of a package could pass for each other. Of our own sources the content counts,
    if they have one time.
    """
    found = hashlib.sha256(f"{sys.version}\n{sys.prefix}".encode())
    for name in _installed():
        found.update(f"\n{name}".encode())
    ours = own_sources()
    if len({int(path.stat().st_mtime) for path in ours}) == 1:
        for path in ours:
            found.update(path.read_bytes())
    return found.hexdigest()[:24]


def own_sources() -> list[Path]:
    """Return all sources of this package, also in the folders that it links to, sorted."""
    (root,) = sys.modules[__name__.partition(".")[0]].__path__
    folders = os.walk(root, followlinks=True)
    return sorted(
        Path(folder, name) for folder, _, names in folders for name in names if name.endswith(".py")
    )


def _installed() -> Iterator[str]:
    """Return names with versions of all that lies on the path, such as ``torch-2.13.0.dist-info``."""
    for folder in sys.path:
        if os.path.isdir(folder):
            yield from sorted(n for n in os.listdir(folder) if n.endswith((".dist-info", ".egg-info")))
