"""Files of a run on a disk that may be full, its console and logs; locks with and without flock."""

import errno
import fcntl
import json
import logging
import multiprocessing
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import Mock

import pytest

from graphmoe.config.schema import ConfigError
from graphmoe.runtime.host import files
from graphmoe.runtime.host.files import FileLock, LineFile, dispensable, replace_text
from graphmoe.runtime.host.logs import LogFile
from tests.damage import dead_pid, no_file_beyond
from tests.runs import ROOT, TINY


def test_lines_that_a_full_disk_does_not_take_are_lost_whole_counted_and_told_once(tmp_path):
    path, told = tmp_path / "rows", list[str]()
    file = LineFile(path, told.append)
    file.append(["first", "second"])
    with no_file_beyond(16):  # three bytes of the next
        file.append(["third"])
        file.append(["fourth", "fifth"])
    assert path.read_text() == "first\nsecond\n"
    file.append(["sixth"])
    file.close()
    assert path.read_text() == "first\nsecond\nsixth\n"
    first, again = told
    assert first == f"{path} takes no more lines (File too large): they are lost, and the run goes on"
    assert again == f"{path} takes lines again; lost are 3"


def test_a_line_after_a_torn_one_begins_at_its_own(tmp_path):
    (tmp_path / "rows").write_text('{"step": 1}\n{"st')
    file = LineFile(tmp_path / "rows")
    file.append(['{"step": 2}'])
    file.append(['{"step": 3}'])
    assert (tmp_path / "rows").read_text() == '{"step": 1}\n{"st\n{"step": 2}\n{"step": 3}\n'


def test_a_file_that_could_not_be_replaced_stays_and_its_draft_takes_no_room(tmp_path, caplog):
    path = tmp_path / "page.html"
    replace_text(path, "old")
    with no_file_beyond(10), dispensable(path):
        replace_text(path, "new" * 10)
    assert [file.name for file in tmp_path.iterdir()] == ["page.html"] and path.read_text() == "old"
    assert caplog.messages == [f"{path} is not written (File too large); the run continues"]
    with pytest.raises(ValueError), dispensable(path):
        raise ValueError


@pytest.fixture(params=[errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS])
def no_flock(monkeypatch, request):
    refused = OSError(request.param, os.strerror(request.param))
    monkeypatch.setattr(fcntl, "flock", Mock(side_effect=refused))
    files._say_once.cache_clear()


def taken(folder: Path) -> FileLock:
    lock = FileLock.acquire(folder / "run.lock")
    assert lock is not None
    return lock


def test_a_lock_without_flock_excludes_others_until_it_is_released(tmp_path, no_flock, caplog):
    first = taken(tmp_path)
    assert FileLock.acquire(tmp_path / "run.lock") is None
    first.release()
    taken(tmp_path).release()
    assert caplog.text.count("has no file locks") == 1
    assert not list(tmp_path.glob("*.held*"))


def test_processes_that_race_without_flock_exclude_each_other(tmp_path, monkeypatch):
    monkeypatch.setattr(fcntl, "flock", Mock(side_effect=OSError(errno.ENOLCK, "no locks")))

    def race(number: int) -> None:
        for _ in range(200):
            if lock := FileLock.acquire(tmp_path / "run.lock"):
                assert not [*tmp_path.glob("*.inside")]
                (mine := tmp_path / f"{number}.inside").touch()
                time.sleep(0.0005)
                mine.unlink()
                lock.release()

    fork = multiprocessing.get_context("fork")
    racers = [fork.Process(target=race, args=(number,)) for number in range(4)]
    for racer in racers:
        racer.start()
    for racer in racers:
        racer.join(60)
    assert [racer.exitcode for racer in racers] == [0] * 4
    assert [path.name for path in tmp_path.iterdir()] == ["run.lock"]


def test_the_file_of_a_dead_process_counts_for_nothing(tmp_path, no_flock):
    for pid, started in ((dead_pid(), "1 of x"), (os.getpid(), "another start")):
        holder = {**files._holder(pid), "started": started}
        (tmp_path / "run.lock.held").write_text(json.dumps(holder))
        lock = taken(tmp_path)
        assert json.loads((tmp_path / "run.lock.held").read_text())["pid"] == os.getpid()
        lock.release()


@pytest.mark.parametrize("change", [{"host": "node7"}, {"processes": "pid:[1]"}])
def test_the_file_of_another_host_or_container_stays_and_is_named(tmp_path, no_flock, change):
    held = tmp_path / "run.lock.held"
    held.write_text(json.dumps({**files._holder(os.getpid()), **change, "pid": 99}))
    with pytest.raises(ConfigError, match=rf"process 99 on .*remove the file: rm {held}"):
        FileLock.acquire(tmp_path / "run.lock")
    assert held.exists()


def test_a_forked_child_leaves_its_parents_file(tmp_path, no_flock):
    lock = taken(tmp_path)
    child = os.fork()
    if child == 0:
        lock.release()
        os._exit(0)
    os.waitpid(child, 0)
    assert (tmp_path / "run.lock.held").exists()
    lock.release()


def test_a_disk_that_takes_no_more_is_not_held(tmp_path, no_flock, monkeypatch):
    with monkeypatch.context() as full:
        full.setattr(json, "dumps", Mock(side_effect=OSError(28, "No space left")))
        with pytest.raises(OSError, match="No space"):
            FileLock.acquire(tmp_path / "run.lock")
    taken(tmp_path).release()


def test_another_error_of_flock_is_not_passed_over(tmp_path, monkeypatch):
    monkeypatch.setattr(fcntl, "flock", Mock(side_effect=OSError(errno.EIO, "bad disk")))
    with pytest.raises(OSError, match="bad disk"):
        FileLock.acquire(tmp_path / "run.lock")


def test_a_log_file_on_a_full_disk_says_so_on_the_console_and_goes_on(tmp_path, capsys):
    path = tmp_path / "rank0.log"
    handler = LogFile(path)
    with no_file_beyond(0):
        handler.handle(logging.makeLogRecord({"msg": "one"}))
    handler.handle(logging.makeLogRecord({"msg": "two"}))
    handler.close()
    (line,) = path.read_text().splitlines()
    assert line.endswith(" two")
    first, again = capsys.readouterr().err.splitlines()
    assert first.startswith(f"{path} takes no more lines (")
    assert again == f"{path} takes lines again; lost are 1"


def run_without_console(folder: Path, *words: str, why: str = "Broken pipe") -> str:
    """Run Python, whose stdout and stderr take nothing, to its end; its log file without the times."""
    reader, closed = os.pipe()
    os.close(reader)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with open("/dev/full", "w") as full, open(closed, "w") as pipe:
        device = pipe if why == "Broken pipe" else full
        line = [sys.executable, *words]
        done = subprocess.run(line, cwd=folder, env=environment, stdout=device, stderr=device, check=False)
    assert done.returncode == 0
    (log,) = folder.rglob("rank0.log")
    return re.sub(r"(?m)^\S+ \S+ ", "", log.read_text())


@pytest.mark.parametrize("why", ["Broken pipe", "No space left on device"])
def test_a_console_that_takes_no_more_is_named_once_in_the_log_and_ends_nothing(tmp_path, why):
    code = """
import logging, sys
from pathlib import Path
from graphmoe.config.progress import console
from graphmoe.runtime.host.logs import Progress, start_logging
start_logging(Path(), "rank0", on_console=True)
with Progress(console(), 3, wanted=True):
    logging.info("one")
    logging.warning("two")
print("three", file=sys.stderr)
print("four", flush=True)
logging.info("five")
"""
    gone = [f"WARNING writing {name} failed ({why}); the run continues" for name in ("stderr", "stdout")]
    lines = run_without_console(tmp_path, "-c", code, why=why).splitlines()
    assert lines == [gone[0], "INFO one", "WARNING two", gone[1], "INFO five"]


@pytest.mark.slow
def test_a_run_whose_output_nobody_reads_is_trained_to_its_end(tmp_path):
    log = run_without_console(tmp_path, "-m", "graphmoe.train", *TINY, "hydra.run.dir=run")
    assert log.count("writing stderr failed (Broken pipe)") == 1 and "step 6/6" in log
    for name in ("checkpoints/step_00000006/manifest.json", "summary.json"):
        assert (tmp_path / "run" / name).exists()
