"""The folder that a run gets, and its metrics after a resume."""

import itertools
import json
import os
import signal
import time
from pathlib import Path

import pytest
import yaml

from graphmoe.config.schema import ConfigError
from graphmoe.run.folder import announce, claim, passed_over
from graphmoe.run.metrics_file import cut_metrics
from tests.forked import FORKS

CONFIG = {
    "model": {"name": "tiny", "norm_eps": 1e-6, "tags": ["a"]},
    "optim": {"lr": 3e-4},
    "format": "text",
    "checkpoint": {"mirror": None},
}
OTHER = {**CONFIG, "optim": {"lr": 1e-3}}


def claim_and_leave(base: Path, config: dict, *, resume=True, finish=False) -> tuple[str, bool]:
    """Name of the folder that a run gets which then ends, finished or not; whether it resumed."""
    folder = claim(base, config, resume=resume)
    if finish:
        (folder.path / "summary.json").write_text(json.dumps({"finished": True}))
    folder.release()
    return folder.path.name, folder.resumed


def test_a_run_with_another_endpoint_or_host_env_is_the_same_run(tmp_path):
    one, other = (
        CONFIG | {"launch": {"nproc": 2, "endpoint": f"node{i}:1"}, "host": {"threads": 1, "env": {"A": i}}}
        for i in range(2)
    )
    claim_and_leave(tmp_path / "tiny", one)
    assert claim_and_leave(tmp_path / "tiny", other) == ("tiny", True)
    assert yaml.safe_load((tmp_path / "tiny" / "resolved.yaml").read_text()) == other  # what workers read
    for number, change in enumerate([{"launch": {"nproc": 4}}, {"host": {"threads": 2}}], start=2):
        assert claim_and_leave(tmp_path / "tiny", other | change) == (f"tiny-{number}", False)


def test_a_summary_that_does_not_say_finished_leaves_the_run_unfinished(tmp_path, caplog):
    claim_and_leave(tmp_path / "tiny", CONFIG)
    for text in ('{"finished": false}', '{"finished": tr'):
        (tmp_path / "tiny" / "summary.json").write_text(text)
        assert claim_and_leave(tmp_path / "tiny", CONFIG) == ("tiny", True)
    assert "counts as unfinished" in caplog.text


def test_a_run_gets_a_free_folder_or_goes_on_in_one_of_the_same_configuration(tmp_path):
    base = tmp_path / "outputs" / "tiny"
    assert claim_and_leave(base, CONFIG) == ("tiny", False)
    assert yaml.safe_load((base / "resolved.yaml").read_text()) == CONFIG
    assert sorted(path.name for path in base.iterdir()) == ["resolved.yaml", "run.lock"]
    reordered = dict(reversed({**CONFIG, "format": "json"}.items()))
    assert claim_and_leave(base, reordered, finish=True) == ("tiny", True)
    assert claim_and_leave(base, OTHER) == ("tiny-2", False)
    assert claim_and_leave(base, CONFIG) == ("tiny-3", False)
    before = (base.with_name("tiny-3") / "resolved.yaml").stat().st_mtime_ns
    assert claim_and_leave(base, CONFIG, resume=False) == ("tiny-4", False)
    assert (base.with_name("tiny-3") / "resolved.yaml").stat().st_mtime_ns == before
    assert claim_and_leave(base, CONFIG) == ("tiny-3", True)
    assert claim_and_leave(base, OTHER) == ("tiny-2", True)


def test_a_run_that_could_not_start_leaves_its_folder_free_but_keeps_a_continued_one(tmp_path):
    claim(tmp_path / "tiny", CONFIG, resume=True).abandon()
    assert claim_and_leave(tmp_path / "tiny", OTHER) == ("tiny", False)
    claim(tmp_path / "tiny", OTHER, resume=True).abandon()
    assert claim_and_leave(tmp_path / "tiny", OTHER) == ("tiny", True)


@pytest.mark.parametrize("launch", [{"write_only": True}, {"write_only": False, "fake_world": 8}])
def test_a_configuration_that_nothing_was_trained_with_is_taken_over(tmp_path, launch):
    base, left = tmp_path / "tiny", OTHER | {"launch": launch}
    claim_and_leave(base, left)
    assert passed_over(base, tmp_path / "tiny-2", CONFIG) == ([], 0)
    text = (base / "resolved.yaml").read_text()
    claim(base, CONFIG, resume=True).abandon()  # as a dry run does, or a start that failed
    assert (base / "resolved.yaml").read_text() == text
    assert claim_and_leave(base, CONFIG, resume=False) == ("tiny", False)
    assert yaml.safe_load((base / "resolved.yaml").read_text()) == CONFIG


@pytest.mark.parametrize("name", ["env.json", "metrics.jsonl", "summary.json", "checkpoints"])
def test_a_written_configuration_with_a_trace_of_training_is_not_taken_over(tmp_path, name):
    claim_and_leave(tmp_path / "tiny", OTHER | {"launch": {"write_only": True}})
    (tmp_path / "tiny" / name).write_text("{}")
    assert claim_and_leave(tmp_path / "tiny", CONFIG) == ("tiny-2", False)


def test_a_file_or_a_run_without_configuration_in_the_way_is_passed_over(tmp_path):
    (tmp_path / "tiny").write_text("a file")
    (tmp_path / "tiny-2" / "checkpoints").mkdir(parents=True)
    assert claim_and_leave(tmp_path / "tiny", CONFIG) == ("tiny-3", False)


def test_unfinished_runs_passed_over_are_named_in_a_short_line(tmp_path, caplog):
    base = tmp_path / "tiny"
    claim_and_leave(base, CONFIG, finish=True)
    claim_and_leave(base, OTHER)
    assert claim_and_leave(base, CONFIG) == ("tiny-3", False)
    found = passed_over(base, tmp_path / "tiny-3", CONFIG)
    assert found == ([(tmp_path / "tiny-2", ["optim.lr=0.001, here 0.0003"])], 0)
    assert passed_over(base, base, CONFIG) == ([], 0)
    long = CONFIG | {"data": {"paths": ["/a/path/of/a/corpus"] * 9, "name": "x" * 300}, "seed": 1, "steps": 2}
    with caplog.at_level("INFO"):
        announce(claim(base, long, resume=True), long)
    line = caplog.messages[-1]
    assert "tiny-3 is an unfinished run" in line and "and 1 key more" in line
    assert len(line) < 250 + len(str(tmp_path))


WAYS = {
    "optim.lr": "; checkpoint.resume_from=tiny continues it",
    "optim.name": "; checkpoint.init_from=tiny starts from its weights",
    "model.top_k": "; its weights are of another model",
    "model.peak_lr": "; checkpoint.resume_from=tiny continues it",
}


@pytest.mark.parametrize("key", WAYS)
def test_a_run_of_another_optimizer_or_model_is_not_offered_to_be_resumed(tmp_path, caplog, monkeypatch, key):
    monkeypatch.chdir(tmp_path)
    section, _, name = key.partition(".")
    theirs, ours = (CONFIG | {section: CONFIG[section] | {name: each}} for each in ("theirs", "ours"))
    claim_and_leave(Path("tiny"), theirs)
    Path("tiny", "checkpoints", "step_00000002").mkdir(parents=True)
    with caplog.at_level("INFO"):
        announce(claim(Path("tiny"), ours, resume=True), ours)
    assert caplog.messages[-1].endswith(WAYS[key])


REPLACED = [("bytes", "env.json"), ("bytes", "metrics.jsonl"), ("bytes", "run.lock"), ("pipe", "run.lock")]
UNREADABLE = [
    *itertools.product(("folder", "pipe", "bytes", "forbidden"), ("resolved.yaml", "summary.json")),
    *itertools.product(("folder", "pipe"), ("env.json", "metrics.jsonl")),
    *(("forbidden", "metrics.jsonl"), ("folder", "run.lock")),
]


@pytest.mark.parametrize(("kind", "name"), [*REPLACED, *UNREADABLE])
def test_an_unreadable_file_in_an_old_folder_stops_no_new_run(tmp_path, caplog, monkeypatch, kind, name):
    claim_and_leave(tmp_path / "tiny", CONFIG)
    file = tmp_path / "tiny" / name
    file.unlink(missing_ok=True)
    make = {"folder": Path.mkdir, "pipe": os.mkfifo}
    make.get(kind, lambda file: file.write_bytes(b"\xff\xfe\x00"))(file)
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


def _race(base: Path, start, names, end) -> None:
    start.wait()
    names.put(claim(base, CONFIG, resume=True).path.name)
    end.wait()


def test_processes_that_race_for_a_base_get_different_folders(tmp_path):
    for base in (tmp_path / "one", tmp_path / "two"):
        start, end, names = FORKS.Barrier(4), FORKS.Event(), FORKS.SimpleQueue()
        arguments = (base, start, names, end)
        racers = [FORKS.Process(target=_race, args=arguments, daemon=True) for _ in range(4)]
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
    forked = FORKS.SimpleQueue()
    run = FORKS.Process(target=_claim_fork_and_hang, args=(tmp_path / "tiny", forked), daemon=True)
    run.start()
    child = forked.get()
    assert claim_and_leave(tmp_path / "tiny", CONFIG) == ("tiny-2", False)
    os.kill(run.pid, signal.SIGKILL)
    run.join()
    os.kill(child, 0)
    assert claim_and_leave(tmp_path / "tiny", CONFIG) == ("tiny", True)
    os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize("place", ["logs/rank0.log", "checkpoints", "run.lock", "metrics.jsonl"])
def test_a_run_writes_through_no_link_of_its_folder(tmp_path, place):
    claim_and_leave(tmp_path / "tiny", CONFIG)
    link = tmp_path / "tiny" / place
    link.parent.mkdir(exist_ok=True)
    link.unlink(missing_ok=True)
    (tmp_path / "own").write_text("mine")
    link.symlink_to(tmp_path / "own")
    with pytest.raises(ConfigError, match=f"{place} is a link"):
        claim_and_leave(tmp_path / "tiny", CONFIG)
    assert (tmp_path / "own").read_text() == "mine"
    link.unlink()
    (tmp_path / "tiny" / "checkpoints" / "step_00000001").parent.mkdir()
    (tmp_path / "tiny" / "checkpoints" / "step_00000001").symlink_to(tmp_path)
    (tmp_path / "other").symlink_to(tmp_path / "tiny")
    assert claim_and_leave(tmp_path / "other", CONFIG)[1]


def test_rows_after_the_step_and_torn_or_unreadable_lines_are_cut(tmp_path, caplog):
    path = tmp_path / "metrics.jsonl"
    rows = [f'{{"step": {step}, "loss": NaN}}\n'.encode() for step in (1, 2, 2, 3, 4)]
    path.write_bytes(b"".join(rows) + b'{"step": 2, "lo')
    assert cut_metrics(path, 2) == 3 and not caplog.text
    assert path.read_bytes() == b"".join(rows[:3]) and list(tmp_path.iterdir()) == [path]
    path.write_bytes(rows[0] + b"\x00\x00\xff\n" + rows[1])
    assert cut_metrics(path, 9) == 1 and path.read_bytes() == rows[0] + rows[1]
    assert "no JSON object: [2]" in caplog.text
