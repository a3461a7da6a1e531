"""Folders that jobs compile to: where they lie, who points torch at them, when they go."""

import errno
import os
import shutil
import socket
import time
from pathlib import Path

import pytest

from graphmoe.runtime.cache import folders as work_folders
from graphmoe.runtime.cache.folders import point_torch_at
from graphmoe.runtime.cache.store import CompileCache
from graphmoe.runtime.host.files import is_dead
from tests.damage import dead_pid
from tests.runtime.cache.cache_contents import FACTS, KERNEL, blob_of, kept, read, warned, write, write_kernel


def test_a_read_only_cache_is_read_and_the_work_folder_lies_elsewhere(cache, monkeypatch, caplog):
    kept(cache, a="1", b="2")
    blob_of(cache, "inductor/ab/b.so").write_bytes(b"?")
    with monkeypatch.context() as patch:
        names = ("mkdir", "write_bytes", "write_text", "rename", "replace", "touch", "unlink")
        for name, real in {name: getattr(Path, name) for name in names}.items():

            def call(path, *arguments, real=real, **named):
                if Path(path).is_relative_to(cache.folder):
                    raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
                return real(path, *arguments, **named)

            patch.setattr(Path, name, call)
        work = cache.open(FACTS)
        assert not work.path.is_relative_to(cache.folder) and read(work) == {"a": "1"}
        write(work, b="2")
        assert work.publish() == 0 and not work.keeps
        assert cache.remember("fastest", FACTS, "one") == "one"
    assert "cannot be written (Read-only file system); compiled" in warned(caplog)[0]
    work.close()
    assert not work.path.exists()


def fill(monkeypatch, folder: Path, room: int = 0) -> None:
    write_bytes, written = Path.write_bytes, []

    def write(path, content):
        if not path.is_relative_to(folder):
            return write_bytes(path, content)
        written.append(path)
        write_bytes(path, content if len(written) <= room else b"")
        if len(written) > room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_bytes", write)


@pytest.mark.parametrize("case", ["nearly full", "fills up", "no disk has room"])
def test_on_a_full_disk_the_work_folder_lies_elsewhere_or_is_empty(cache, monkeypatch, caplog, case):
    kept(cache, a="1")
    nowhere, usage = case == "no disk has room", shutil.disk_usage(cache.folder)
    with monkeypatch.context() as patch:
        if case == "nearly full":
            patch.setattr(work_folders.shutil, "disk_usage", lambda folder: usage._replace(free=2**20))
        else:
            fill(patch, Path("/") if nowhere else cache.folder)
        work = cache.open(FACTS)
    assert read(work) == ({} if nowhere else {"a": "1"}) and work.found != nowhere
    assert not work.path.is_relative_to(cache.folder) and not [*(cache.folder / "work").iterdir()]
    assert ("1 MiB are free" in caplog.text) == (case == "nearly full") and "is not saved" in caplog.text
    assert ("nothing can be read" in caplog.text) == nowhere


@pytest.mark.parametrize("room", range(3))
def test_a_disk_that_fills_up_while_publishing_leaves_no_part(cache, monkeypatch, caplog, room):
    kept(cache, a="1")
    work = cache.open(FACTS)
    write(work, b="2", c="3")
    with monkeypatch.context() as patch:
        fill(patch, Path("/"), room)
        assert work.publish() == 0
    assert "not saved: [Errno 28] No space left" in caplog.text
    assert not list((cache.folder / "blobs").rglob("*.draft"))
    assert work.publish() == 2  # there is room again
    assert read(cache.open(FACTS)) == {"a": "1", "b": "2", "c": "3"}


def test_a_cache_in_no_folder_keeps_nothing(cache):
    nowhere = CompileCache(None)
    work = nowhere.open(FACTS)
    write(work, a="1")
    assert work.publish() == 0 and not work.found
    assert nowhere.remember("fastest", FACTS, "one") == "one" and nowhere.recall("fastest", FACTS) is None
    assert read(nowhere.open(FACTS)) == {}
    work.close()
    assert not work.path.exists()


def test_torch_is_pointed_at_the_work_folder_until_it_is_closed(cache):
    work = cache.open(FACTS)
    point_torch_at(work.path)
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(work.path / "inductor")
    assert os.environ["TRITON_CACHE_DIR"] == str(work.path / "triton")
    other = cache.open(FACTS)  # of the same process, or of one that it has started
    point_torch_at(other.path)
    work.close()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(other.path / "inductor")
    other.close()
    assert not {*work_folders.VARIABLES, work_folders.OURS} & os.environ.keys()


def test_a_folder_that_the_user_has_set_stays_and_is_neither_filled_nor_kept(cache, monkeypatch, tmp_path):
    first = cache.open(FACTS)
    write(first, a="1")
    write_kernel(first)
    first.publish()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "mine"))
    work = cache.open(FACTS)
    assert read(work) == {} and (work.path / KERNEL).exists()
    assert point_torch_at(work.path) == [*work_folders.VARIABLES][1:]
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "mine")
    work.close()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "mine")
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    assert read(cache.open(FACTS)) == {"a": "1"}


def test_work_folders_of_dead_processes_are_removed_and_others_stay(cache):
    work, host, dead, held = cache.folder / "work", socket.gethostname(), dead_pid(), cache.open(FACTS)
    folders = {  # days since the last change, and whether they stay
        f"{host}-{dead}-aa": (1.0, False),
        f"{host}-{dead}-bb": (0.0, True),  # young: its process may not have locked it yet
        f"{host}-{os.getpid()}-cc": (1.0, True),
        f"other-host-{dead}-dd": (1.0, True),
        f"other-host-{dead}-ee": (8.0, False),
        "not-a-work-folder": (8.0, True),
        f"{host}-{dead}-ff": (8.0, True),  # alive, whatever its name says
    }
    disguised = held.path.rename(work / f"{host}-{dead}-ff")
    for name, (days, _) in folders.items():
        (work / name).mkdir(exist_ok=True)
        os.utime(work / name, (time.time() - days * 86400,) * 2)
    live = cache.open(FACTS)
    stay = {name for name, (_, stays) in folders.items() if stays}
    assert {path.name for path in work.iterdir()} == stay | {live.path.name}
    held._lock.release()
    assert is_dead(disguised)
