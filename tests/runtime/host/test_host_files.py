"""Files of a run on a disk that may be full, its console and logs; locks with and without flock."""

import errno
import fcntl
import json
import logging
import os
import subprocess
import sys
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
    assert caplog.messages == [f"{path} is not written (File too large); the run goes on"]
    with pytest.raises(ValueError), dispensable(path):
        raise ValueError


@pytest.fixture(params=[errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS])
def no_flock(monkeypatch, request):
    refused = OSError(request.param, os.strerror(request.param))
    monkeypatch.setattr(fcntl, "flock", Mock(side_effect=refused))
    files._say_once.cache_clear()


def test_a_lock_without_flock_excludes_others_until_it_is_released(tmp_path, no_flock, caplog):
    first = FileLock.acquire(tmp_path / "run.lock")
    assert first is not None and FileLock.acquire(tmp_path / "run.lock") is None
    first.release()
    again = FileLock.acquire(tmp_path / "run.lock")
    assert again is not None
    again.release()
    assert caplog.text.count("has no file locks") == 1
    assert not list(tmp_path.glob("*.held*"))


RACE = """
import errno, fcntl, sys, time
from pathlib import Path
def refuse(descriptor, operation):
    raise OSError(errno.ENOLCK, "no locks")
fcntl.flock = refuse
from graphmoe.runtime.host.files import FileLock
path, mine = Path(sys.argv[1]), Path(sys.argv[2])
for number in range(200):
    lock = FileLock.acquire(path)
    if lock is not None:
        inside = [*path.parent.glob("*.inside")]
        assert not inside, inside
        mine.touch()
        time.sleep(0.0005)
        mine.unlink()
        lock.release()
"""


def test_processes_that_race_without_flock_exclude_each_other(tmp_path):
    started = [
        subprocess.Popen(
            [sys.executable, "-c", RACE, str(tmp_path / "run.lock"), str(tmp_path / f"{n}.inside")],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        for n in range(4)
    ]
    assert [process.wait(60) for process in started] == [0] * 4
    assert [path.name for path in tmp_path.iterdir()] == ["run.lock"]


def test_the_file_of_a_dead_process_counts_for_nothing(tmp_path, no_flock):
    for pid, started in ((dead_pid(), "1 of x"), (os.getpid(), "another start")):
        holder = {**files._holder(pid), "started": started}
        (tmp_path / "run.lock.held").write_text(json.dumps(holder))
        lock = FileLock.acquire(tmp_path / "run.lock")
        assert lock is not None
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
    lock = FileLock.acquire(tmp_path / "run.lock")
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
    lock = FileLock.acquire(tmp_path / "run.lock")
    assert lock is not None
    lock.release()


def test_another_error_of_flock_is_not_passed_over(tmp_path, monkeypatch):
    monkeypatch.setattr(fcntl, "flock", Mock(side_effect=OSError(errno.EIO, "bad disk")))
    with pytest.raises(OSError, match="bad disk"):
        FileLock.acquire(tmp_path / "run.lock")


def test_a_log_file_on_a_full_disk_says_so_on_the_console_and_goes_on(tmp_path, capsys):
    handler, path = LogFile(tmp_path / "rank0.log"), tmp_path / "rank0.log"
    logger = logging.Logger("mine")
    logger.addHandler(handler)
    logger.info("one")
    with no_file_beyond(path.stat().st_size + 5):
        logger.info("two")
        logger.info("three")
    logger.info("four")
    handler.close()
    assert [line.split()[-1] for line in path.read_text().splitlines()] == ["one", "four"]
    first, again = capsys.readouterr().err.splitlines()
    assert (
        first.startswith(f"{path} takes no more lines (") and again == f"{path} takes lines again; lost are 2"
    )


@pytest.mark.parametrize("full", [False, True], ids=["closed", "full"])
def test_a_console_that_takes_no_more_is_named_once_in_the_log_and_ends_nothing(tmp_path, full):
    code = f"""
import logging, sys
from pathlib import Path
from graphmoe.config.progress import console
from graphmoe.runtime.host.logs import Progress, start_logging
start_logging(Path({str(tmp_path)!r}), "rank0", on_console=True)
sys.stdin.readline()
with Progress(console(), 3, wanted=True):
    logging.info("one")
    logging.warning("two")
print("three", file=sys.stderr)
print("four", flush=True)
logging.info("five")
"""
    with open("/dev/full", "w") as device:
        ours = device if full else subprocess.PIPE
        with subprocess.Popen(
            [sys.executable, "-c", code], cwd=ROOT, stdin=subprocess.PIPE, stdout=ours, stderr=ours
        ) as run:
            for stream in filter(None, (run.stdout, run.stderr)):
                stream.close()
            run.communicate(b"\n")
    assert run.returncode == 0
    lines = [line.split(" ", 2)[-1] for line in (tmp_path / "rank0.log").read_text().splitlines()]
    why = "No space left on device" if full else "Broken pipe"
    gone = [f"WARNING {name} cannot be written ({why}); the run goes on" for name in ("stderr", "stdout")]
    assert lines == [gone[0], "INFO one", "WARNING two", gone[1], "INFO five"]


@pytest.mark.slow
def test_a_run_whose_output_goes_to_head_is_trained_to_its_end(tmp_path):
    words = [*TINY, "hydra.run.dir=run"]
    line = [sys.executable, "-m", "graphmoe.train", *words]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        line, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as run:
        assert run.stdout is not None
        while b"run folder: run" not in (said := run.stdout.readline()):
            assert said == b"graphmoe.train: starting\n" or b": at work (" in said
        run.stdout.close()
    assert run.returncode == 0
    folder = tmp_path / "run"
    assert (folder / "checkpoints/step_00000006/manifest.json").exists() and (
        folder / "summary.json"
    ).exists()
    log = (folder / "logs/rank0.log").read_text()
    assert log.count("stderr cannot be written (Broken pipe)") == 1 and "step 6/6" in log
