"""Small files in the place of compiled code, and what a cache makes of them."""

import json
import logging
from pathlib import Path

import pytest

from graphmoe.runtime.cache import folders as work_folders
from graphmoe.runtime.cache.key import Facts, key_of
from graphmoe.runtime.cache.store import CompileCache
from graphmoe.runtime.cache.work import WorkFolder

FACTS = {"base.torch": "2.13.0", "model.num_experts": 8, "passes.enabled": ["fuse_loss"]}
KERNEL = "triton/ABC/kernel.cubin"


def empty_cache(folder: Path, monkeypatch: pytest.MonkeyPatch) -> CompileCache:
    """A cache, and a folder for temporary files, below ``folder``; no user has set torch's folders."""
    for name in (*work_folders.VARIABLES, work_folders.OURS):
        monkeypatch.delenv(name, raising=False)
    (folder / "temporary").mkdir()
    monkeypatch.setattr(work_folders.tempfile, "tempdir", str(folder / "temporary"))
    return CompileCache(folder / "cache")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CompileCache:
    return empty_cache(tmp_path, monkeypatch)


def write(work: WorkFolder, **contents: str) -> None:
    for name, text in contents.items():
        path = work.path / "inductor" / "ab" / f"{name}.so"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)


def read(work: WorkFolder) -> dict[str, str]:
    return {path.stem: path.read_text() for path in (work.path / "inductor").rglob("*.so")}


def write_kernel(work: WorkFolder, code: str = "code") -> None:
    folder = work.path / "triton" / "ABC"
    folder.mkdir()
    names = ("kernel.json", "kernel.cubin")
    for name in names:
        (folder / name).write_text(code)
    group = {"child_paths": {name: str(folder / name) for name in names}}
    (folder / "__grp__kernel.json").write_text(json.dumps(group))


def kept(cache: CompileCache, facts: Facts = FACTS, **contents: str) -> None:
    work = cache.open(facts)
    write(work, **contents)
    work.publish({"model": "tiny"})
    work.close()


def blob_of(cache: CompileCache, path: str, facts: Facts = FACTS) -> Path:
    return cache.blobs.path(cache.entries.read(key_of(facts)).files[path])


def warned(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
