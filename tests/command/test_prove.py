"""The doctor's checks: on a CPU, and what becomes of those that fail, die or hang."""

import functools
import getpass
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

from graphmoe.config.schema import AttentionBackend
from graphmoe.doctor import exchanges, operations, prove, training
from graphmoe.doctor.__main__ import main
from graphmoe.doctor.outcome import Error, compared
from graphmoe.doctor.prove import FAILED, PASSED, SKIPPED, TABLE, Check, clean, run_check
from graphmoe.ops.library_attention import LIBRARIES
from tests.command import prove_checks
from tests.runs import ROOT, refusal, text_of

CPU = torch.device("cpu")


@pytest.fixture
def no_scratch(tmp_path, monkeypatch):
    monkeypatch.setattr(training, "scratch", lambda: tmp_path)


def is_alive(pid):
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_the_table_has_twenty_checks_within_the_time():
    assert len(TABLE) == len({check.name for check in TABLE}) == 20
    assert all(0 < check.limit_s < prove.TOTAL_S for check in TABLE)
    groups = [check.group for check in TABLE]
    assert groups == sorted(groups, key=groups.index), "a group's checks follow each other"


def test_what_fails_dies_or_hangs_is_reported_and_the_rest_runs(tmp_path, capsys):
    hangs = functools.partial(prove_checks.hangs, pid_file=tmp_path / "pid")
    first = [prove_checks.passes, prove_checks.is_over, prove_checks.raises, prove_checks.dies]
    table = [Check(run.__name__, "one", run) for run in first]
    table += [Check("hangs", "two", hangs, limit_s=2), Check("is skipped", "two", prove_checks.is_skipped)]
    table += [
        Check("needs more", "two", prove_checks.passes, gpus=99),
        Check("last", "two", prove_checks.passes),
    ]
    started = time.monotonic()
    document = prove.prove(tmp_path / "cpu.json", table)
    assert time.monotonic() - started < 240
    found = {check["name"]: check for check in document["checks"]}
    assert [*found] == [check.name for check in table]
    statuses = [PASSED, FAILED, FAILED, FAILED, FAILED, SKIPPED, SKIPPED, PASSED]
    assert [check["status"] for check in found.values()] == statuses
    assert found["passes"]["numbers"]["y"] == {"error": 1e-4, "limit": 1e-3}
    assert found["is_over"]["reason"] == "y is 0.5, over 0.001, dx is nan, over 1"
    assert found["is_over"]["numbers"]["dx"]["error"] == "nan"
    lines = found["raises"]["reason"].splitlines()
    assert len(lines) == prove.LAST_LINES and lines[-1] == "39"
    assert found["dies"]["reason"].startswith("the process ended with status -6:")
    assert "Memory access fault by GPU node-1" in found["dies"]["reason"]
    assert found["hangs"]["reason"].startswith("no result in 2 s") and "in hangs" in found["hangs"]["reason"]
    assert not is_alive(int((tmp_path / "pid").read_text())), "a rank outlives its check"
    assert found["is skipped"]["reason"] == "needs another GPU"
    assert found["needs more"]["reason"].startswith("needs 99 GPUs")
    assert json.loads((tmp_path / "cpu.json").read_text()) == document
    shown = text_of(prove.render(document))
    assert "2 passed, 4 failed, 2 skipped" in shown and "y 0.0001 of 0.001" in shown
    assert capsys.readouterr().err.count("\n") == len(table)


def test_checks_that_do_not_start_in_time_fail(tmp_path, capsys):
    table = [Check("first", "one", prove_checks.passes), Check("second", "two", prove_checks.passes)]
    document = prove.prove(tmp_path / "cpu.json", table, total_s=0)
    assert [check["status"] for check in document["checks"]] == [FAILED, FAILED]
    assert "the time for all checks was over" in document["checks"][1]["reason"]


def test_the_command_writes_a_file_and_ends_with_1_after_a_failure(tmp_path, capsys, monkeypatch):
    rows = (
        Check("symmetric", "one", operations.symmetric_products),
        Check("raises", "one", prove_checks.raises),
    )
    monkeypatch.setattr(prove, "TABLE", rows[:1])
    main([f"prove={tmp_path}/cpu.json", "format=json"])
    document = json.loads(capsys.readouterr().out)
    assert document == json.loads((tmp_path / "cpu.json").read_text())
    assert document["checks"][0]["status"] == PASSED and document["torch"] == torch.__version__
    monkeypatch.setattr(prove, "TABLE", rows[1:])
    with pytest.raises(SystemExit) as end:
        main([f"prove={tmp_path}/cpu.json"])
    assert end.value.code == 1 and "0 passed, 1 failed" in capsys.readouterr().out


def test_a_path_that_cannot_be_written_is_one_line(tmp_path, capsys):
    wrong = {
        f"prove={tmp_path}": "is a folder; name a file",
        f"prove={tmp_path}/cpu.txt": f"use prove={tmp_path}/cpu.json",
        f"prove={tmp_path}/none/cpu.json": f"there is no folder {tmp_path}/none",
        "prove=": "prove=. is a folder",
        f"proof={tmp_path}/cpu.json": "did you mean 'prove'?",
    }
    for word, text in wrong.items():
        said = refusal(main, capsys, word)
        assert text in said and said.count("\n") == 1, said


def test_nothing_personal_is_left_in_a_text():
    user, host, inside = getpass.getuser(), platform.node(), ROOT / "graphmoe" / "ops" / "fp8.py"
    text = clean(f'File "/home/{user}/venv/x.py", {inside} on {host} of {user}, {Path.home()}/a/b.so')
    assert text == 'File "x.py", graphmoe/ops/fp8.py on HOST of USER, b.so'


def test_a_comparison_finds_what_differs():
    x = torch.randn(64)
    good = compared("f", "y dx", torch.sin, [x])
    assert [*good] == ["f y", "f dx"] and not any(each.is_over for each in good.values())
    bad = compared("f", "y dx", lambda x: torch.sin(x) * (1 + 1e-4), [x], torch.sin)
    assert all(each.is_over for each in bad.values())
    assert Error(float("nan"), 1.0).is_over and not Error(0.0, 0).is_over


def test_attention_of_a_library_is_the_librarys_own(monkeypatch):
    def forward(*_):
        raise RuntimeError("the library is called")

    of_te = LIBRARIES[AttentionBackend.te]._replace(forward=forward)
    monkeypatch.setitem(LIBRARIES, AttentionBackend.te, of_te)
    monkeypatch.setattr(operations, "half", lambda device: torch.bfloat16)
    with pytest.raises(RuntimeError, match="the library is called"):
        operations.attend(CPU, operations.EQUAL, AttentionBackend.te)


@pytest.mark.parametrize("check", [c for c in TABLE if c.group in ("kernels", "fp8")], ids=lambda c: c.name)
def test_operations_of_a_cpu_pass_or_say_what_is_missing(check):
    found = run_check(check, CPU)
    wanted = SKIPPED if check.gpus else PASSED
    assert found["status"] == wanted, found["reason"]
    assert wanted == SKIPPED or any("limit" in each for each in found["numbers"].values())


def test_exchanges_between_ranks_are_exact():
    found = exchanges.token_exchanges(CPU, "symm", replays=2)
    assert found == {"ranks": 2, "gpus": 0, "exchanges": 20, "wrong elements": Error(0, 0)}


@pytest.mark.slow
def test_sums_over_ranks_are_exact_and_wrong_elements_are_counted():
    assert exchanges._on_ranks(CPU, exchanges._sums, 2)["wrong elements"] == Error(0, 0)
    wrong = exchanges._on_ranks(CPU, prove_checks.wrong_rounds, 2)["wrong elements"]
    assert wrong == Error(2 * 3 * exchanges.ROUNDS, 0)


@pytest.mark.slow
def test_a_captured_scope_is_bitwise_the_uncaptured_one(no_scratch, as_traced, monkeypatch):
    monkeypatch.setattr(training, "WORDS", (*training.WORDS, "compile.cache=false"))
    found = training.capture_scope(CPU, "layer")
    assert found["on"] == "host" and found["graphs"] > 0
    assert found["losses"] == found["weights"] == Error(0, 0)


@pytest.mark.slow
def test_no_check_fails_on_a_cpu(tmp_path):
    line = [sys.executable, "-m", "graphmoe", "doctor", "prove=cpu.json"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(line, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=900)
    text = (tmp_path / "cpu.json").read_text()
    checks = json.loads(text)["checks"]
    assert {check["status"] for check in checks} == {PASSED, SKIPPED}, done.stdout
    assert done.returncode == 0 and [check["name"] for check in checks] == [check.name for check in TABLE]
    assert all(bool(check["reason"]) == (check["status"] == SKIPPED) for check in checks)
    assert platform.node() not in text and str(tmp_path) not in text and str(ROOT) not in text
