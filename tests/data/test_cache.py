import errno
import fcntl
import multiprocessing
import os
import socket
import time
from pathlib import Path
from unittest.mock import Mock

import pytest

from graphmoe.config.schema import ConfigError
from graphmoe.data.cache import cached
from tests.damage import dead_pid, limited

FORK = multiprocessing.get_context("fork")


def _ask(cache: Path, tally: Path, seconds: float) -> None:
    def build(folder):
        (folder / "data").write_text("x" * 1000)
        tally.open("a").write("built\n")
        time.sleep(seconds)
        return {"answer": 42}

    entry, meta = cached(cache, "thing", build)
    assert (entry / "data").stat().st_size == 1000 and meta == {"answer": 42}


def builder(*arguments):
    process = FORK.Process(target=_ask, args=arguments)
    process.start()
    return process


def build(folder):
    (folder / "data").write_text("whole")
    return {"n": 1}


def test_processes_that_race_build_once_and_share(tmp_path):
    tally = tmp_path / "tally"
    racers = [builder(tmp_path, tally, 0.5) for _ in range(3)]
    for racer in racers:
        racer.join(60)
    assert [racer.exitcode for racer in racers] == [0, 0, 0]
    assert tally.read_text() == "built\n"


def test_a_killed_builder_leaves_no_entry_and_the_next_one_cleans_up(tmp_path):
    tally = tmp_path / "tally"
    process = builder(tmp_path, tally, 60)
    end = time.monotonic() + 60
    while not tally.exists():
        assert time.monotonic() < end and process.is_alive()
        time.sleep(0.02)
    process.kill()
    process.join()
    assert not (tmp_path / "thing").exists() and list(tmp_path.glob("thing.tmp-*"))
    assert cached(tmp_path, "thing", build)[1] == {"n": 1}
    assert not list(tmp_path.glob("thing.tmp-*"))


def test_a_build_removes_what_killed_builders_of_other_entries_left_and_nothing_that_lives(tmp_path):
    here, now = socket.gethostname(), time.time()
    ages = {
        f"one.tmp-{here}-{dead_pid()}": 0,
        f"two.tmp-{here}-{os.getppid()}": 0,
        "three.tmp-elsewhere-7": 0,
        "four.tmp-elsewhere-7": 2 * 24 * 3600,
        "five.tmp-elsewhere-7": 2 * 24 * 3600,
        f"thing.tmp-{here}-{os.getpid()}": 0,  # of the process before us in a container
    }
    for name, age in ages.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "data").touch()
        for path in (tmp_path / name / "data", tmp_path / name):
            os.utime(path, (now - age, now - age))
    with open(tmp_path / "five.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert cached(tmp_path, "thing", build)[1] == {"n": 1}
    assert {path.name.partition(".")[0] for path in tmp_path.glob("*.tmp-*")} == {"two", "three", "five"}


def test_a_full_disk_is_an_error_that_names_the_entry_and_the_key(tmp_path):
    fail = Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
    with pytest.raises(ConfigError, match=rf"{tmp_path}/a: .*No space left on device; .* data.cache_dir="):
        cached(tmp_path, "a", fail)
    assert [path.name for path in tmp_path.iterdir()] == ["a.lock"]


DAMAGES = [("data", "who"), ("data", "whold"), ("other", ""), ("data", None)]
DAMAGES += [("meta.json", text) for text in ('{"met', "[]", "[" * 100_000, '{"files": 3, "meta": {}}')]
DAMAGES += [("meta.json", '{"files": {"../x": {"num_bytes": 5, "sha256": ""}}, "meta": {}}')]
DAMAGES += [("meta.json", '{"files": {}, "meta": [1]}'), ("meta.json", '{"files": {"data": 5}, "meta": {}}')]


@pytest.mark.parametrize(("name", "text"), DAMAGES)
def test_a_damaged_entry_is_built_again(tmp_path, name, text, caplog):
    entry, _ = cached(tmp_path, "a", build, dict[str, int])
    (entry / name).unlink(missing_ok=True)
    if text is not None:
        (entry / name).write_text(text)
    entry, meta = cached(tmp_path, "a", build, dict[str, int])
    assert (entry / "data").read_text() == "whole" and meta == {"n": 1}
    assert f"cache entry {entry} is damaged" in caplog.text


@pytest.mark.parametrize("name", ["a/meta.json", "a.lock"])
def test_a_fifo_is_not_waited_for(tmp_path, name):
    (tmp_path / "a").mkdir()
    os.mkfifo(tmp_path / name)
    with limited():
        assert cached(tmp_path, "a", build)[1] == {"n": 1}
