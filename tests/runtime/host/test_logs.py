"""The console and the log files of a run, which end no run."""

import logging
import os
import subprocess
import sys

import pytest

from graphmoe.runtime.host.logs import LogFile
from tests.damage import no_file_beyond
from tests.runs import ROOT, TINY


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
from graphmoe.runtime.host.logs import console, start_logging
from graphmoe.runtime.host.logs import Progress
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
    gone = [f"WARNING {name} takes no more ({why}); the run goes on" for name in ("stderr", "stdout")]
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
        assert b"run folder: run" in run.stdout.readline()
        run.stdout.close()
    assert run.returncode == 0
    folder = tmp_path / "run"
    assert (folder / "checkpoints/step_00000006/manifest.json").exists() and (
        folder / "summary.json"
    ).exists()
    log = (folder / "logs/rank0.log").read_text()
    assert log.count("stderr takes no more (Broken pipe)") == 1 and "step 6/6" in log
