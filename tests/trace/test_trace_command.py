"""``graphmoe.trace`` as a command: traces that it reads or refuses, TraceLens, a run on a CPU."""

import json
import os
import sys
from pathlib import Path

import pytest

from graphmoe.config.schema import ConfigError
from graphmoe.trace.__main__ import main
from tests.kineto import FACTS, KinetoTrace, two_steps
from tests.runs import TINY, command


def test_other_ranks_are_named_where_none_was_asked_for(tmp_path, capsys):
    for rank in (0, 2, 3):
        two_steps().write(tmp_path / "profile" / f"rank{rank}.trace.json.gz", FACTS)
    note = "there are traces of more ranks, 2, 3; rank=2 shows one of them"
    for words, expected in (((), True), (("rank=0",), False)):
        main([f"run={tmp_path}", *words, "tracelens=false", "format=json"])
        assert (note in json.loads(capsys.readouterr().out)["notes"]) is expected


def test_two_runs_are_compared_by_a_rank_that_both_have(tmp_path, capsys):
    for run, ranks in (("one", (0, 1)), ("two", (1, 2)), ("three", (0,))):
        for rank in ranks:
            two_steps().write(tmp_path / run / "profile" / f"rank{rank}.trace.json.gz", FACTS)
    runs = [tmp_path / name for name in ("one", "two", "three")]
    main([f"run={runs[0]},{runs[1]}", "tracelens=false", "format=json"])
    found = json.loads(capsys.readouterr().out)
    assert [Path(each["trace"]).name for each in found["traces"]] == ["rank1.trace.json.gz"] * 2
    with pytest.raises(ConfigError, match="two has rank 1, 2, .*three has rank 0; record the same"):
        main([f"run={runs[1]},{runs[2]}"])


REFUSED = (
    ("", "nothing to read; use run=outputs/tiny or trace=<file>"),
    ("run=a trace=b", "use one of them"),
    ("trace=a,b,c", "3 traces are given"),
    ("trace=a rank=1", "rank=1 is one of a run"),
    ("trace=a kernels=0", "kernels=0 must be 1 or more"),
    ("run=nowhere", "run=nowhere is no folder"),
    ("run=.", "has no trace; a run with profile.steps=[10,12] writes one"),
    ("trace=nowhere.json", "nowhere.json cannot be read (No such file"),
    ("run=one rank=3", "rank=3 has no trace in one; there are those of 0"),
    ("trace=torn.json.gz", "torn.json.gz is no whole trace"),
    ("trace=list.json", "list.json: expected object, found array"),
    ("trace=steps.json", "has no range ProfilerStep#"),
    ("trace=idle.json", "has no kernel that a step launched"),
)


def test_a_trace_that_cannot_be_read_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    whole = two_steps().write(Path("one/profile/rank0.trace.json.gz")).read_bytes()
    Path("torn.json.gz").write_bytes(whole[: len(whole) // 2])
    Path("list.json").write_text("[]")
    KinetoTrace().write(Path("steps.json"))
    idle = KinetoTrace()
    idle.range("ProfilerStep#1", 0, 10)
    idle.launch("validation", 20, 30, 40)
    idle.write(Path("idle.json"))
    for words, said in REFUSED:
        with pytest.raises(ConfigError) as caught:
            main(words.split())
        assert said in str(caught.value)


def script(folder: Path, name: str, text: str) -> None:
    """An executable in a folder."""
    (folder / name).write_text(f"#!{sys.executable}\n{text}")
    (folder / name).chmod(0o755)


def test_tracelens_of_amd_is_called_where_it_is_on_path_and_no_other_command(tmp_path, monkeypatch, capsys):
    path, report = two_steps().write(tmp_path / "rank0.trace.json"), tmp_path / "rank0.tracelens.xlsx"
    script(tmp_path, "tracelens", "open('called', 'w')")
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    main([f"trace={path}", "format=json"])
    assert "tracelens" not in json.loads(capsys.readouterr().out) and not Path("called").exists()
    command = "TraceLens_generate_perf_report_pytorch"
    script(tmp_path, command, "import sys\nprint('noise')\nopen(sys.argv[4], 'w')\n")
    main([f"trace={path}", "tracelens=false"])
    assert not report.exists() and capsys.readouterr().out
    main([f"trace={path}", "format=json"])
    assert json.loads(capsys.readouterr().out)["tracelens"] == [str(report)]
    script(tmp_path, command, "raise SystemExit('no sheet')")
    main([f"trace={path}"])
    shown = capsys.readouterr()
    assert "ended with status 1: no sheet" in shown.err and "GPU idle" in shown.out


def test_a_run_on_the_cpu_is_recorded_and_read(tmp_path, capsys):
    words = (*TINY, "run.name=tiny", "train.steps=4", "profile.steps=[2,3]", "checkpoint.enabled=false")
    trained = command(tmp_path, *words)
    assert trained.process.exitcode == 0, trained.err.read_text()
    assert "steps 2 to 3 are in" in trained.err.read_text() + trained.out.read_text()
    main([f"run={tmp_path / 'outputs/tiny'}", "format=json"])
    found = json.loads(capsys.readouterr().out)
    assert (found["on"], found["num_steps"], found["idle"]) == ("cpu", 2, None)
    names = {(s["segment"], s["part"]) for s in found["segments"]}
    assert {("attn", "F"), ("attn", "B"), ("moe_experts", "B"), ("optimizer", "update")} <= names
    assert sum(s["ms"] for s in found["segments"]) == pytest.approx(found["step_ms"], rel=0.02)
