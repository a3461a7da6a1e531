"""The folder that a run gets, and its metrics after a resume."""

import json
import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest
import yaml

from graphmoe.config.schema import ConfigError
from graphmoe.run.folder import claim, passed_over
from graphmoe.run.metrics_file import cut_metrics

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["graphmoe.run.folder"])

CONFIG = {"model": {"name": "tiny", "norm_eps": 1e-6, "tags": ["a"]}, "optim": {"lr": 3e-4}, "format": "text"}
OTHER = {**CONFIG, "optim": {"lr": 1e-3}}


def claim_and_leave(base: Path, config: dict, *, resume=True, finish=False) -> tuple[str, bool]:
    """Name of the folder that a run gets which then ends, finished or not; whether it resumed."""
    folder = claim(base, config, resume=resume)
    if finish:
        (folder.path / "summary.json").write_text(json.dumps({"finished": True}))
    folder.release()
    return folder.path.name, folder.resumed


def test_a_free_base_is_used_and_gets_the_configuration(tmp_path):
    base = tmp_path / "outputs" / "tiny"
    assert claim_and_leave(base, CONFIG) == ("tiny", False)
    assert yaml.safe_load((base / "resolved.yaml").read_text()) == CONFIG
    assert sorted(path.name for path in base.iterdir()) == ["resolved.yaml", "run.lock"]


def test_an_unfinished_run_of_the_same_configuration_is_continued(tmp_path):
    claim_and_leave(tmp_path / "tiny", CONFIG)
    reordered = dict(reversed({**CONFIG, "format": "json"}.items()))
    assert claim_and_leave(tmp_path / "tiny", reordered) == ("tiny", True)


def test_a_run_with_another_endpoint_or_host_env_is_the_same_run(tmp_path):
    one, other = (
        {
            **CONFIG,
            "launch": {"nproc": 2, "endpoint": f"node{i}:29500"},
            "host": {"threads": 1, "env": {"A": i}},
        }
        for i in range(2)
    )
    claim_and_leave(tmp_path / "tiny", one)
    assert claim_and_leave(tmp_path / "tiny", other) == ("tiny", True)
    assert yaml.safe_load((tmp_path / "tiny" / "resolved.yaml").read_text()) == other  # what workers read
    more = (
        {**other, "launch": {"nproc": 4}},
        {**other, "host": {"threads": 2}},
        {**other, "parallel": {"tp": 2}},
    )
    assert [claim_and_leave(tmp_path / "tiny", config)[0] for config in more] == [
        "tiny-2",
        "tiny-3",
        "tiny-4",
    ]


def test_a_summary_that_does_not_say_finished_leaves_the_run_unfinished(tmp_path, caplog):
    claim_and_leave(tmp_path / "tiny", CONFIG)
    for text in ('{"finished": false}', '{"finished": tr'):
        (tmp_path / "tiny" / "summary.json").write_text(text)
        assert claim_and_leave(tmp_path / "tiny", CONFIG) == ("tiny", True)
    assert "counts as unfinished" in caplog.text


def test_finished_runs_and_other_configurations_push_to_the_next_number(tmp_path):
    base = tmp_path / "tiny"
    assert claim_and_leave(base, CONFIG, finish=True) == ("tiny", False)
    assert claim_and_leave(base, OTHER) == ("tiny-2", False)
    assert claim_and_leave(base, CONFIG) == ("tiny-3", False)
    assert claim_and_leave(base, CONFIG) == ("tiny-3", True)
    assert claim_and_leave(base, OTHER) == ("tiny-2", True)


def test_without_resume_an_unfinished_run_is_left_alone(tmp_path):
    claim_and_leave(tmp_path / "tiny", CONFIG)
    before = (tmp_path / "tiny" / "resolved.yaml").stat().st_mtime_ns
    assert claim_and_leave(tmp_path / "tiny", CONFIG, resume=False) == ("tiny-2", False)
    assert (tmp_path / "tiny" / "resolved.yaml").stat().st_mtime_ns == before


def test_a_run_that_could_not_start_leaves_its_folder_free_but_keeps_a_continued_one(tmp_path):
    claim(tmp_path / "tiny", CONFIG, resume=True).abandon()
    assert claim_and_leave(tmp_path / "tiny", OTHER) == ("tiny", False)
    claim(tmp_path / "tiny", OTHER, resume=True).abandon()
    assert claim_and_leave(tmp_path / "tiny", OTHER) == ("tiny", True)


def test_a_file_or_a_run_without_configuration_in_the_way_is_passed_over(tmp_path):
    (tmp_path / "tiny").write_text("a file")
    (tmp_path / "tiny-2" / "checkpoints").mkdir(parents=True)
    assert claim_and_leave(tmp_path / "tiny", CONFIG) == ("tiny-3", False)


def test_unfinished_runs_that_are_passed_over_are_named_with_what_differs(tmp_path):
    base = tmp_path / "tiny"
    claim_and_leave(base, CONFIG, finish=True)
    claim_and_leave(base, OTHER)
    assert claim_and_leave(base, CONFIG) == ("tiny-3", False)
    found = passed_over(base, tmp_path / "tiny-3", CONFIG)
    assert found == ([(tmp_path / "tiny-2", ["optim.lr=0.001, here 0.0003"])], 0)
    assert passed_over(base, base, CONFIG) == ([], 0)


REPLACED = [("bytes", "env.json"), ("bytes", "metrics.jsonl"), ("bytes", "run.lock"), ("pipe", "run.lock")]
UNREADABLE = [
    *((kind, name) for kind in ("folder", "pipe", "bytes") for name in ("resolved.yaml", "summary.json")),
    *((kind, name) for kind in ("folder", "pipe") for name in ("env.json", "metrics.jsonl")),
    *(("forbidden", name) for name in ("resolved.yaml", "summary.json", "metrics.jsonl")),
    ("folder", "run.lock"),
]


@pytest.mark.parametrize(("kind", "name"), [*REPLACED, *UNREADABLE])
def test_an_unreadable_file_in_an_old_folder_stops_no_new_run(tmp_path, caplog, monkeypatch, kind, name):
    claim_and_leave(tmp_path / "tiny", CONFIG)
    file = tmp_path / "tiny" / name
    file.unlink(missing_ok=True)
    if kind == "folder":
        file.mkdir()
    elif kind == "pipe":
        os.mkfifo(file)
    else:
        file.write_bytes(b"\xff\xfe\x00")
    if kind == "forbidden":
        real_open, real_access = os.open, os.access

        def no_open(path, *args, **kwargs):
            if str(path) == str(file):
                raise PermissionError(13, "Permission denied", str(path))
            return real_open(path, *args, **kwargs)

        monkeypatch.setattr(os, "open", no_open)
        monkeypatch.setattr(os, "access", lambda p, m: str(p) != str(file) and real_access(p, m))
    is_used = (kind, name) in REPLACED
    assert claim_and_leave(tmp_path / "tiny", CONFIG)[0] == ("tiny" if is_used else "tiny-2")
    assert len([record for record in caplog.records if record.levelname == "WARNING"]) == (not is_used)


def test_a_folder_that_cannot_be_made_is_one_line_and_no_endless_search(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="tiny cannot be made"):
        claim(tmp_path / "file" / "tiny", CONFIG, resume=True)


def test_a_live_run_is_never_joined(tmp_path):
    first = claim(tmp_path / "tiny", CONFIG, resume=True)
    second = claim(tmp_path / "tiny", CONFIG, resume=True)
    assert [first.path.name, second.path.name] == ["tiny", "tiny-2"]
    first.release()
    first.release()
    assert claim_and_leave(tmp_path / "tiny", CONFIG) == ("tiny", True)
    second.release()


def _race(base: Path, start, names, end) -> None:
    start.wait()
    names.put(claim(base, CONFIG, resume=True).path.name)
    end.wait()


def test_processes_that_race_for_a_base_get_different_folders(tmp_path):
    for attempt in range(2):
        start, end, names = _CONTEXT.Barrier(4), _CONTEXT.Event(), _CONTEXT.SimpleQueue()
        base = tmp_path / f"tiny{attempt}"
        arguments = (base, start, names, end)
        racers = [_CONTEXT.Process(target=_race, args=arguments, daemon=True) for _ in range(4)]
        for racer in racers:
            racer.start()
        found = sorted(names.get() for _ in racers)
        end.set()
        for racer in racers:
            racer.join()
        assert found == [base.name, *(f"{base.name}-{number}" for number in (2, 3, 4))]


def _claim_fork_and_hang(base: Path, forked) -> None:
    claim(base, CONFIG, resume=True)
    if os.fork() == 0:
        forked.put(os.getpid())  # now that it has let go of the lock
        time.sleep(60)
        os._exit(0)
    time.sleep(60)


def test_a_killed_run_frees_its_folder_even_if_its_forked_child_lives_on(tmp_path):
    forked = _CONTEXT.SimpleQueue()
    run = _CONTEXT.Process(target=_claim_fork_and_hang, args=(tmp_path / "tiny", forked), daemon=True)
    run.start()
    child = forked.get()
    assert claim_and_leave(tmp_path / "tiny", CONFIG) == ("tiny-2", False)
    os.kill(run.pid, signal.SIGKILL)
    run.join()
    os.kill(child, 0)
    assert claim_and_leave(tmp_path / "tiny", CONFIG) == ("tiny", True)
    os.kill(child, signal.SIGKILL)


def write_rows(path: Path, *steps: int, tail: str = "") -> None:
    path.write_text("".join(json.dumps({"step": step, "loss": float("nan")}) + "\n" for step in steps) + tail)


def steps_of(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_rows_after_the_step_and_a_torn_last_line_are_cut(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write_rows(path, 1, 2, 2, 3, 4, tail='{"step": 2, "lo')
    assert cut_metrics(path, 2) == 3
    assert steps_of(path) == [1, 2, 2] and path.read_bytes().endswith(b"\n")
    assert list(tmp_path.iterdir()) == [path]


def test_an_unreadable_line_in_the_middle_is_dropped_and_reported(tmp_path, caplog):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n\x00\x00\xff\n{"step": 2}\n')
    assert cut_metrics(path, 9) == 1 and steps_of(path) == [1, 2]
    assert "no JSON object: [2]" in caplog.text
