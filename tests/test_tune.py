"""The climb on a simulated machine, what stops it and what it resumes; one real run on a CPU."""

import functools
import json
import re
import shlex
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from graphmoe import tune
from graphmoe.bench import jobs
from graphmoe.bench.cases import CaseFailed
from graphmoe.command.errors import known_keys
from graphmoe.command.hydra import compose_config
from graphmoe.config.arguments import run_tool
from graphmoe.config.schema import ConfigError
from graphmoe.runtime.host.signals import Interrupted
from graphmoe.trace.events import read_trace
from tests.kineto import two_steps
from tests.runs import ROOT

GIVEN = ("model=tiny", "train.global_batch_size=64")
SPEEDS = {"none": 1.0, "partial": 1.05, "layer": 1.08, "full_iteration": 1.2}
OUT_OF_MEMORY = CaseFailed(
    "the job's process ended with status 1: torch.OutOfMemoryError: CUDA out of memory."
)


@functools.cache
def composed_once(*words):
    try:
        return compose_config(*words)
    except ConfigError as error:
        return error


def composed(*words):
    if isinstance(found := composed_once(*words), ConfigError):
        raise found
    return found


def simulated(values):
    """A machine on which graphs gain until the host waits no longer, then micro-batches up to 16 do."""
    size, scope = int(values["train.micro_batch_size"]), values.get("graph.scope", "none")
    if size > 16:
        raise OUT_OF_MEMORY
    wall = "host" if scope == "none" else "compute"
    return {tune.RATE: 1000 * SPEEDS[scope] * size / (size + 4), "gib": size, "wall": wall}


@pytest.fixture
def tuned(tmp_path, monkeypatch, capsys):
    """Run the command with jobs of a machine; return status, document, jobs and output."""

    def tuned(*words, machine=simulated, minutes=10):
        ran = []

        def trained(config, overrides, limit_s):
            ran.append({"train.micro_batch_size": "4"} | dict(word.split("=", 1) for word in overrides))
            return machine(ran[-1])

        monkeypatch.setattr(tune, "trained", trained)
        monkeypatch.setattr(tune, "compose_config", composed)
        argv, status = [*words, f"minutes={minutes}", f"out={tmp_path / 'out'}"], 0
        try:
            run_tool(tune.main, argv)
        except SystemExit as end:
            status = end.code
        file = tmp_path / "out" / "tune.json"
        document = json.loads(file.read_text()) if file.exists() else None
        return SimpleNamespace(status=status, document=document, jobs=ran, **capsys.readouterr()._asdict())

    return tuned


def test_the_climb_reaches_the_best_by_walls_and_stops(tuned, tmp_path):
    found = tuned(*GIVEN)
    rows = found.document["rows"]
    assert found.status == 0 and rows[0]["name"] == "as given" and rows[0]["gain"] == 0
    assert rows[1]["why"] == "host: graph.scope=full_iteration"  # what its wall says
    assert rows[2]["why"] == "compute: train.micro_batch_size=*2"
    best = max((row for row in rows if not row["error"]), key=lambda row: row[tune.RATE])
    assert best["changes"] == {"graph.scope": "full_iteration", "train.micro_batch_size": "16"}
    assert best[tune.RATE] == pytest.approx(1000 * 1.2 * 16 / 20) and best["gain"] == pytest.approx(0.92)
    # the best two are repeated in turns, and every other job ran once
    assert [len(row["rates"]) for row in rows].count(1 + tune.ROUNDS) == 2
    assert {row["changes"].get("graph.scope") for row in rows} == {
        None,
        "full_iteration",
    }  # not layer after it
    assert len(found.jobs) == len(rows) + 2 * tune.ROUNDS
    assert len({row["name"] for row in rows}) == len(rows) < 16
    ranges = re.findall(r"\| ([\d,]+) \| ([\d,]+) to ([\d,]+) \|", found.out)
    assert len(ranges) == sum(not row["error"] for row in rows)
    numbers = [[int(number.replace(",", "")) for number in each] for each in ranges]
    assert all(low <= median <= high for median, low, high in numbers)
    command = found.document["winner"]
    assert command in found.out and "data=synthetic" in command and "optim.lr" not in command
    page = (tmp_path / "out" / "tune.html").read_text()
    assert 'class="plot"' in page and "graph.scope=full_iteration" in page and "out of memory" in page


def test_the_command_of_the_winner_can_be_typed(tuned, tmp_path):
    words = shlex.split(tuned(*GIVEN).document["winner"])
    assert words[:3] == ["python", "-m", "graphmoe.train"]
    dry = [*words[3:], "launch.write_only=true", f"hydra.run.dir={tmp_path / 'run'}"]
    subprocess.run([sys.executable, *words[1:3], *dry], cwd=ROOT, check=True, capture_output=True)
    resolved = (tmp_path / "run" / "resolved.yaml").read_text()
    assert "scope: full_iteration" in resolved and "micro_batch_size: 16" in resolved


@pytest.mark.parametrize(
    ("words", "kept", "number"),
    [
        ("graph=layer", {"graph.scope"}, 4),
        ("graph.scope=none train.micro_batch_size=2", {"graph.scope", "train.micro_batch_size"}, 1),
        ("recompute.ops=[core_attn]", {"recompute.ops", "recompute.all"}, 5),
        ("", {"precision.fp8", "moe.experts", "pipeline.schedule"}, 5),  # numerics; keys without effect here
    ],
)
def test_fixed_keys_stay(tuned, words, kept, number):
    rows = tuned(*GIVEN, *words.split()).document["rows"]
    assert len(rows) >= number and not any(kept & row["changes"].keys() for row in rows)


def test_after_a_failure_candidates_need_less_memory(tuned):
    found = tuned(*GIVEN, "hardware=h200", machine=lambda values: small(values, 4))
    rows = found.document["rows"]
    proposed = [row["why"] == "projection" for row in rows]
    assert rows[0]["error"] is None and any(proposed) and sum(proposed) <= tune.TuneArgs.top
    failed = next(place for place, row in enumerate(rows) if row["error"])
    assert "out of memory" in rows[failed]["error"] and failed < len(rows) - 1
    assert all(row["projected_gb"] < rows[failed]["projected_gb"] for row in rows[failed + 1 :])


def small(values, most):
    if int(values["train.micro_batch_size"]) > most:
        raise OUT_OF_MEMORY
    return simulated(values)


@pytest.mark.parametrize("hardware", [(), ("hardware=h200",)])
def test_moves_of_memory_follow_as_long_as_nothing_fits(tuned, hardware):
    found = tuned(*GIVEN, *hardware, machine=lambda values: small(values, 1))
    failed, *rows = [row for row in found.document["rows"] if row["why"] != "projection"]
    assert found.status == 0 and "out of memory" in failed["error"] and "micro_batch_size=1" in found.out
    assert rows[0]["why"].startswith("memory: ")


def test_a_run_that_is_projected_not_to_fit_is_not_started(tuned):
    words = ("model=deepseek_v2_lite", "data.seq_len=4096", "hardware=h100", "data=synthetic")
    found = tuned(*words, "train.micro_batch_size=4", "moe.dispatcher=local")
    row = found.document["rows"][0]
    assert found.jobs == [] and found.status == 1 and row["projected_gb"] > 80
    assert row["error"] == f"out of memory: projected {row['projected_gb']:.1f} of 80 GB"


def test_it_ends_if_the_run_fails_for_another_reason(tuned):
    def broken(values):
        raise CaseFailed("no such data")

    found = tuned(*GIVEN, machine=broken)
    assert found.status == 1 and len(found.jobs) == 1 and found.document["winner"] is None
    assert "failed: no such data" in found.out and "no candidate ran" in found.out


def interrupted_at(number):
    left = iter(range(number))

    def machine(values):
        if next(left, None) is None:
            raise Interrupted(signal.SIGTERM)
        return simulated(values)

    return machine


def test_a_finished_climb_is_not_repeated_nor_mixed(tuned):
    whole = tuned(*GIVEN, "recompute=none")
    whole_rows = [row["name"] for row in whole.document["rows"]]
    assert tuned(*GIVEN).status == 2  # the folder has the rows of other words
    again = tuned(*GIVEN, "recompute=none")
    assert (
        again.status == 0 and again.jobs == [] and [r["name"] for r in again.document["rows"]] == whole_rows
    )


@pytest.mark.parametrize("number", [0, 3])
def test_an_interrupted_climb_keeps_its_rows_and_resumes(tuned, tmp_path, number):
    first = tuned(*GIVEN, machine=interrupted_at(number))
    assert first.status == 128 + signal.SIGTERM and (tmp_path / "out" / "tune.html").exists()
    rows = first.document["rows"] if number else []
    assert len(rows) == number and (first.document["winner"] if number else "no candidate ran") in first.out
    second = tuned(*GIVEN)
    assert second.status == 0 and [row["name"] for row in second.document["rows"][:number]] == [
        row["name"] for row in rows
    ]
    ran = sum(len(row["rates"]) for row in second.document["rows"])
    failed = sum(bool(row["error"]) for row in second.document["rows"])
    assert len(second.jobs) == ran + failed - number  # none of the first was repeated


def test_a_failed_repeat_keeps_the_row_and_the_fastest_is_repeated_first(tuned, caplog):
    seen = []

    def machine(values):
        seen.append(values)
        if seen.count(values) > 1:
            raise CaseFailed("the job's process was killed by SIGKILL")
        return simulated(values)

    found = tuned(*GIVEN, machine=machine)
    assert max(measured := found.document["rows"], key=lambda row: row.get(tune.RATE, 0))["error"] is None
    repeated = next(values for number, values in enumerate(seen) if values in seen[:number])
    assert (repeated["train.micro_batch_size"], repeated["graph.scope"]) == ("16", "full_iteration")
    assert "train.micro_batch_size=16" in found.document["winner"]
    assert sum(row["error"] is None for row in measured) > 2 and "failed when it was repeated" in caplog.text


@pytest.mark.parametrize(("changes", "says"), [
    ({"moe.dispatcher": "evil:make"}, "changes moe.dispatcher to evil:make"),
    ({"host.env": "{CXX: ./evil.sh}"}, "changes host.env to"),
    (["moe.dispatcher=symm"], "expected object, found array"),
])  # fmt: skip
def test_a_file_of_a_stranger_runs_no_code_and_is_refused_in_one_line(tuned, tmp_path, changes, says):
    tuned(*GIVEN)
    file = tmp_path / "out" / "tune.json"
    document = json.loads(file.read_text())
    document["rows"][-1]["changes"] = changes
    file.write_text(json.dumps(document))
    found = tuned(*GIVEN)
    assert found.status == 2 and not found.jobs and says in found.err and found.err.count("error:") == 1


def test_it_ends_with_the_time(tuned, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(tune.time, "monotonic", lambda: clock[0])

    def slow(values):
        clock[0] += 60.0
        return simulated(values)

    found = tuned(*GIVEN, machine=slow, minutes=7)
    assert (
        len(found.jobs) == 7 and clock[0] == 420 and max(len(r["rates"]) for r in found.document["rows"]) > 1
    )


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("minutes=0", "minutes=0 must be above 0, such as minutes=10"),
        ("top=0", "top=0 must be 1 or more"),
        ("launch.nodes=2", "launch.nodes=2: jobs train on this node only; leave it out"),
        ("hardware=h20", "hardware=h20 is not known"),
        ("try_fp8=true precision.fp8=none", "try_fp8=true tries precision.fp8=none and rowwise"),
        ("train.micro_batch_size=3", "error: train.global_batch_size="),
        ("minuts=3", "unknown key 'minuts'; did you mean 'minutes'?"),
        ("-m", "-m: this tool takes one run"),
    ],
)
def test_bad_words_are_answered_by_one_error(tuned, capsys, words, says):
    given = [word for word in words.split() if "minutes" not in word]
    found = tuned(*GIVEN, *given, minutes=0 if words == "minutes=0" else 10)
    assert found.status == 2 and found.err.count("error: ") == 1 and says in found.err, found.err
    assert found.jobs == [] and found.document is None


def test_every_move_sets_keys_of_a_run():
    keys = {key for moves in tune.MOVES.values() for words in moves for key in tune.changes_of(words)}
    assert keys | tune.USELESS.keys() <= {*known_keys()}


@pytest.mark.parametrize(("step_ms", "exposed"), [(0.75, "13.3%"), (0.7, "14.3%")])
def test_a_row_has_medians_and_the_wall_at_their_pace(monkeypatch, tmp_path, step_ms, exposed):
    trace = read_trace(two_steps().write(tmp_path / "a.json"))  # recorded steps take 0.95 ms, 0.1 exposed
    steps = [{"step_s": each} for each in (9.0, *[step_ms / 1e3] * tune.TIMED, *[9.0] * tune.RECORDED)]
    found = jobs.Trained(steps, {"peak_memory_gib": 2.0, "device_memory_gib": 4.0}, {}, trace)
    monkeypatch.setattr(jobs, "train", lambda words, limit_s: found)
    row = tune.trained(composed(*GIVEN), [], 1.0)
    assert row[tune.RATE] == pytest.approx(64 * 256 / step_ms * 1e3) and row["gib"] == 4.0
    assert row["wall"] == "exchange" and f"exposed for {exposed} of the step" in row["why_wall"]


@pytest.mark.slow
def test_a_run_on_the_cpu_is_measured_and_ends_at_a_signal(tmp_path):
    words = [
        "model=tiny",
        "model.num_layers=2",
        "data.seq_len=16",
        "compile=none",
        "minutes=10",
        f"out={tmp_path}",
    ]
    process = subprocess.Popen(
        [sys.executable, "-m", "graphmoe.tune", *words], cwd=ROOT, stdout=subprocess.PIPE
    )
    while not (tmp_path / "tune.json").exists() and process.poll() is None:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    out = process.communicate(timeout=60)[0].decode()
    assert process.returncode == 128 + signal.SIGTERM and "python -m graphmoe.train model=tiny" in out
    row = json.loads((tmp_path / "tune.json").read_text())["rows"][0]
    assert row["error"] is None and row[tune.RATE] > 0 and row["gib"] > 0 and row["wall"] == "compute"
    assert (tmp_path / "tune.html").stat().st_size > 100_000
