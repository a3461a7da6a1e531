"""Torch's flight recorder: which variables are set, who is asked to dump, and what an error says of dumps."""

import os
import threading
import time
from pathlib import Path

import pytest

from graphmoe.runtime.launch.failures import Failure
from graphmoe.runtime.launch.flight_recorder import NAME, ask_for_dumps, dumps_since, set_flight_recorder
from graphmoe.runtime.launch.stamps import STAMPS

NAMES = (
    "TORCH_FR_BUFFER_SIZE",
    "TORCH_NCCL_TRACE_BUFFER_SIZE",
    "TORCH_NCCL_DUMP_ON_TIMEOUT",
    "TORCH_FR_DUMP_TEMP_FILE",
    "TORCH_NCCL_DEBUG_INFO_TEMP_FILE",
    "TORCH_NCCL_DEBUG_INFO_PIPE_FILE",
)


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """Unset torch's variables, and restore them afterwards."""
    for name in (*NAMES, STAMPS):
        monkeypatch.setenv(name, "")  # so that it is taken away afterwards, whoever sets it
        del os.environ[name]


def found() -> dict[str, str]:
    return {name: os.environ[name] for name in NAMES if name in os.environ}


def test_the_file_is_named_when_the_folder_is_known(tmp_path, monkeypatch):
    monkeypatch.setenv(STAMPS, "/dev/shm/stamps")
    set_flight_recorder(None)
    before = {
        "TORCH_FR_BUFFER_SIZE": "2000",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_NCCL_DEBUG_INFO_PIPE_FILE": "/dev/shm/stamps/flight_recorder.",
    }
    assert found() == before
    set_flight_recorder(tmp_path)
    assert found() == {**before, "TORCH_FR_DUMP_TEMP_FILE": f"{tmp_path}/flight_recorder.rank"}


def test_what_the_user_has_set_by_either_name_stays(tmp_path, monkeypatch):
    mine = {
        "TORCH_NCCL_TRACE_BUFFER_SIZE": "0",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "/mine/rank_",
    }
    for name, value in mine.items():
        monkeypatch.setenv(name, value)
    set_flight_recorder(tmp_path)
    assert found() == mine


class Worker(threading.Thread):
    """Thread that makes the pipe as torch does, and dumps when something comes."""

    def __init__(self, stamps: Path, log_dir: Path, rank: int, takes_s: float = 0.0) -> None:
        super().__init__(daemon=True)
        pipe = stamps / f"flight_recorder.{rank}.pipe"
        os.mkfifo(pipe)
        self.pipe = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
        self.takes_s = takes_s
        self.dump, self.stop = log_dir / f"{NAME}{rank}", threading.Event()

    def run(self) -> None:
        while not self.stop.wait(0.05):
            if os.read(self.pipe, 128):
                time.sleep(self.takes_s)
                self.dump.write_bytes(b"dump")
                break
        os.close(self.pipe)


def test_workers_with_a_pipe_dump_when_they_are_asked(tmp_path):
    (stamps := tmp_path / "stamps").mkdir()
    (logs := tmp_path / "logs").mkdir()
    workers = [Worker(stamps, logs, rank) for rank in (0, 2)]
    for worker in workers:
        worker.start()
    os.mkfifo(stamps / "flight_recorder.1.pipe")  # of a worker that is gone
    ask_for_dumps(stamps, range(4), logs)
    assert dumps_since(0.0, logs) == {0: workers[0].dump, 2: workers[1].dump}
    for worker in workers:
        worker.join(5)


def failure(log_dir: Path) -> Failure:
    return Failure(1, "node7", "killed by SIGABRT", 0.0, -6, "job/0", str(log_dir / "rank1.log"))


def test_an_error_names_the_dumps_of_its_job_in_the_order_of_ranks(tmp_path):
    for rank in (10, 2, 0):
        (tmp_path / f"{NAME}{rank}").write_bytes(b"dump")
    os.utime(tmp_path / f"{NAME}0", (100, 100))  # of a job before
    (tmp_path / f"{NAME}2.txt").touch()
    assert str(failure(tmp_path).raised(tmp_path, 1000.0)).splitlines() == [
        "rank 1 on node7: killed by SIGABRT",
        f"  torch's flight recorder has the last collectives of each rank: {NAME}2, {NAME}10 in {tmp_path}",
        f"  to compare them: torchfrtrace {tmp_path} --prefix {NAME}",
    ]
