"""Folders whose code is run: whom they belong to, and who may write there."""

import os
import shutil
import threading
import time
from contextlib import nullcontext
from pathlib import Path

import pytest

from graphmoe.config.schema import ConfigError
from graphmoe.runtime.cache import folders
from graphmoe.runtime.cache.blobs import write_whole
from graphmoe.runtime.cache.folders import check_trusted, make_cache


@pytest.fixture
def cache(tmp_path) -> Path:
    tmp_path.chmod(0o755)
    make_cache(tmp_path / "cache")
    (tmp_path / "cache").chmod(0o755)  # so that what is inside counts too
    return tmp_path / "cache"


def test_a_new_cache_is_its_users_alone_whatever_the_umask(tmp_path):
    before = os.umask(0)
    try:
        make_cache(tmp_path / "cache")
        make_cache(tmp_path / "shared", shared=True)
        for name in ("cache", "shared"):
            write_whole(tmp_path / name / "blobs" / "3f" / "3fa9", b"code")
    finally:
        os.umask(before)
    folders = (path for path in tmp_path.rglob("*") if path.is_dir())
    modes = {str(path.relative_to(tmp_path)): path.stat().st_mode & 0o7777 for path in folders}
    for name, mode in (("cache", 0o700), ("shared", 0o2770)):
        assert {modes[f"{name}{inner}"] for inner in ("", "/blobs", "/blobs/3f")} == {mode}
    assert (tmp_path / "shared" / "blobs" / "3f" / "3fa9").stat().st_mode & 0o777 == 0o660


@pytest.mark.parametrize("place", ["", "blobs", "blobs/3f", "blobs/3f/3fa9", ".."])
@pytest.mark.parametrize(("mode", "shared_helps"), [(0o775, True), (0o757, False), (0o777, False)])
def test_a_folder_that_others_may_write_to_is_refused(cache, monkeypatch, place, mode, shared_helps):
    monkeypatch.setattr(folders, "_is_own_group", lambda gid: False)
    write_whole(cache / "blobs" / "3f" / "3fa9", b"code")
    check_trusted(cache, shared=False)
    path = (cache / place).resolve()
    path.chmod(mode)
    said = rf"{path} belongs to \w+ with mode {mode:04o}, so that others may write .*chmod -R go-w {path}"
    for shared in (False, True):
        helps = shared and shared_helps
        with nullcontext() if helps else pytest.raises(ConfigError, match=said):
            check_trusted(cache, shared=shared)


def test_folders_that_other_jobs_remove_meanwhile_are_passed_over(cache):
    end = time.monotonic() + 1

    def make_and_remove() -> None:
        while time.monotonic() < end:
            (cache / "work" / "a" / "b").mkdir(parents=True, exist_ok=True)
            shutil.rmtree(cache / "work")

    other = threading.Thread(target=make_and_remove)
    other.start()
    while other.is_alive():
        check_trusted(cache, shared=False)


def test_a_link_that_others_may_replace_or_that_leads_to_an_open_folder_is_refused(cache):
    opened, disk = cache.parent / "open", cache.parent / "disk"
    for folder in (opened, disk):
        folder.mkdir()
    (opened / "link").symlink_to(cache)
    (cache / "blobs").symlink_to(disk)
    for folder, named in ((opened, opened / "link"), (disk, cache)):
        check_trusted(named, shared=False)
        folder.chmod(0o777)
        with pytest.raises(ConfigError, match=rf"{folder} belongs to \w+ with mode 0777"):
            check_trusted(named, shared=False)
        folder.chmod(0o755)


def test_a_private_group_and_a_sticky_folder_above_are_fine(cache, monkeypatch):
    cache.parent.chmod(0o1777)
    check_trusted(cache, shared=False)
    cache.chmod(0o1777)
    with pytest.raises(ConfigError, match="1777"):
        check_trusted(cache, shared=False)
    cache.chmod(0o775)
    monkeypatch.setattr(folders, "_is_own_group", lambda gid: True)
    check_trusted(cache, shared=False)


def test_another_users_folder_is_refused_unless_it_is_shared(cache, monkeypatch):
    if os.getuid() == 0:
        os.chown(cache, 12345, -1)
    else:
        monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.raises(ConfigError, match="belongs to"):
        check_trusted(cache, shared=False)
    check_trusted(cache, shared=True)
