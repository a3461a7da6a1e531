"""The benchmark tool: every operation at tiny shapes, floors, routings, failures, arguments, kept rows."""

import dataclasses
import json
import logging
import math
import re

import pytest
import torch

from graphmoe.bench import __main__ as bench
from graphmoe.bench import ops_suite as ops
from graphmoe.bench.arguments import BenchArgs
from graphmoe.bench.cases import Case, Operation, Run, keep, run_cases
from graphmoe.bench.replicas_suite import MODELS, Sizes, planned
from graphmoe.config.arguments import run_tool
from graphmoe.ops import replicas
from tests.runs import refusal

CPU = torch.device("cpu")
FLOORS = {  # case: (FLOPs or bytes, milliseconds), worked out by hand
    # 98304 rows x 2048 x 1408: three products of 2 FLOPs each, gate, up and down
    "grouped_mlp/v2_lite_skewed/dgrad": (6 * 98304 * 2048 * 1408, 2.1529),
    "grouped_mlp/v2_lite/forward_backward": (18 * 98304 * 2048 * 1408, 6.4588),
    # experts read; counts, ends, rows and slots written
    "routing_plan": (393_216 + 256 + 256 + 393_216 + 393_216, 0.00027446),
    # 64 MiB of tokens, 384 MiB of rows, 384 KiB of row numbers, as much of weights
    "unpermute_weighted": (402_653_184 + 67_108_864 + 2 * 393_216, 0.109430),
    # h of 528 MiB and a of half that; weights of 384 KiB
    "swiglu/backward": (276_824_064 + 2 * 553_648_128 + 2 * 393_216, 0.322073),
    # logits of 16 MiB and a bias of 1 KiB; weights and experts of 512 KiB, sums of 4 KiB
    "router/v3/forward": (16_777_216 + 1024 + 2 * 524_288 + 2 * 4096 + 8, 0.0041477),
    # logits, and the gradients of both factors
    "linear_cross_entropy/forward_backward": (6 * 16384 * 2048 * 102400, 26.0960),
}


def documented(*words: str):
    """The document of a command line."""
    return bench.bench(bench.parse_args(BenchArgs, words, prog="graphmoe.bench"), words)


def test_every_case_runs_on_a_cpu_and_json_on_stdout_is_what_the_file_holds(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # as in a new process
    out = tmp_path / "ops.json"
    (tmp_path / "ops.rows.jsonl").write_text("what an earlier suite left")
    bench.main(["suite=ops", "device=cpu", "repeats=4", "format=json", f"out={out}"])
    streams = capsys.readouterr()
    document = json.loads(streams.out)
    assert json.loads(out.read_text()) == document and [*tmp_path.iterdir()] == [out]
    names = [case.name for case in ops.ops_suite(ops.TINY, CPU)[0]]
    assert [*dict.fromkeys(row["case"] for row in document["rows"])] == names and FLOORS.keys() < {*names}
    assert f"[{len(names)}/{len(names)}] {names[-1]}: " in streams.err
    for row in document["rows"]:
        assert row["error"] is None and len(row["samples_ms"]) == 4, row
        assert 0 < min(row["samples_ms"]) <= row["p10_ms"] <= row["median_ms"] <= row["p90_ms"] < math.inf
        assert row["time_over_floor"] == pytest.approx(row["median_ms"] / row["floor_ms"], rel=1e-3)
    assert document["environment"]["command"][2:] == [
        "graphmoe.bench", "suite=ops", "device=cpu", "repeats=4", "format=json", "out=ops.json",
    ]  # fmt: skip
    assert document["left_out"] == ["triton, turbo, te: a CPU has the torch backend only"]
    assert str(tmp_path) not in json.dumps(document) and "host" not in document["environment"]
    table = bench.render(document)
    lines = [line for line in table.splitlines() if line.startswith("|")]
    assert len(lines) == 2 + len(document["rows"]) and len({line.count("|") for line in lines}) == 1
    assert "times of a CPU" in table and "790 TFLOP/s" in table


def test_replicas_are_simulated_with_the_bytes_and_times_worked_out_by_hand():
    document = documented("suite=replicas", "device=cpu", "only=ep8/e64/hot_rank,ep16/e64/trained_3.0")
    hot, with_slack, trained, _ = document["rows"]
    assert hot["before"] == pytest.approx(2, abs=0.01) and (hot["after"], with_slack["slack"]) == (1, 1024)
    assert trained["before"] == pytest.approx(3, abs=0.02) and trained["after"] == 1
    assert 1.01 < with_slack["after"] <= 1 + 1 / 64
    assert (hot["replicas"], hot["busiest_link"]) == (7, 7)  # each other rank lacks rows, and one has them
    expert = 3 * 7168 * 2048
    assert hot["moved_bytes"]["deepseek_v3"] == 7 * expert * (2 + 2 + 4)
    link_s, experts_s = 7 * expert * 8 / 325e9, 6 * expert * 8192 * 8 / (0.7 * 790e12)
    assert hot["time_exposed"]["deepseek_v3"] == pytest.approx(1 + link_s / experts_s)
    assert hot["time_exposed"]["deepseek_v3"] == pytest.approx(hot["time_exposed"]["deepseek_v2_lite"])
    assert hot["time_beside_attention"] == {"deepseek_v3": 1, "deepseek_v2_lite": 1}
    assert "| ep8/e64/hot_rank | 0 | 2.0" in (shown := bench.render(document)) and "a simulation" in shown


def test_rows_that_cross_ranks_are_those_of_the_split():
    counts_RE = torch.randint(0, 60, (4, 8), generator=torch.Generator().manual_seed(0)).int()
    counts_RE[:, 2] *= 9
    row = planned(counts_RE, 0, {name: Sizes(1, 1) for name in MODELS})
    plan = replicas.plan(counts_RE, 2, 0)
    ends_RER = torch.stack([replicas.plain_places(counts_RE, *plan, rank)[0] for rank in range(4)])
    sent_RR = ends_RER.diff(dim=2, prepend=torch.zeros(4, 8, 1, dtype=torch.int32)).sum(1)
    crossing, without = (int(each.sum() - each.trace()) for each in (sent_RR, counts_RE.view(4, 4, 2).sum(2)))
    assert row["replicas"] and row["more_sent_rows"] * int(counts_RE.sum()) == pytest.approx(
        crossing - without
    )


WRONG = (
    ("repeats=0", "repeats=0 times nothing; use repeats=1 or more"),
    ("suite=model", "suite=model: expected one of ops"),
    ("device=cpu shapes=full", "use shapes=tiny or shapes=auto"),
    ("device=cpu only=permute,gemm", "only=gemm: no case starts with that; cases are grouped_mlp/v2_lite"),
    ("device=cpu only=gemm", "grouped_mlp/v3_ep8_skewed/..., routing_plan, permute, unpermute, unpermute_"),
    ("device=cpu out=no_such_folder/ops.json", "out=no_such_folder/ops.json: there is no folder"),
    ("repeat=3", "did you mean 'repeats'?"),
    ("limit_s=9", "limit_s=9 has no effect with suite=ops; use suite=step or suite=ladder"),
    ("suite=step limit_s=0", "limit_s=0 must be from 1 to 86400"),
    ("suite=step scopes=none,every", "scopes=every: use any of none"),
    ("suite=step scopes=[]", "scopes= names none; use scopes=none,full_iteration"),
    ("suite=step micro_batch_sizes=1,x", "micro_batch_sizes=1,x: 'x' is no number above 0"),
    ("suite=step seq_lens=0", "seq_lens=0: '0' is no number above 0; use such as seq_lens=1,4"),
    ("suite=step overrides=model.num_layer=2", "'model.num_layers'"),
    ("suite=step overrides=graph=layer", "overrides=graph=layer: the suite sets graph; use scopes=..."),
    ("suite=step overrides=train.val_batches=2", "sets train.val_batches, so that only steps are timed"),
    ("suite=step device=cpu overrides=model.top_k=9", "use 1 to 8"),
    ("suite=step device=cpu only=mbs9", "mbs2_s32/none_again"),
    ("suite=ladder device=cpu nproc=1", "nproc=1: the rungs of suite=ladder share experts"),
    ("suite=ladder device=cpu blocks=1", "blocks=1 has no effect with suite=ladder; use suite=dispatch"),
    ("suite=ladder device=cpu only=top", "only=top: no case starts with that; cases are baseline, loss_"),
    ("suite=ladder device=cpu overrides=moe.dispatcher=symm", "rung symm sets moe.dispatcher; choose rungs"),
    ("suite=ladder device=cpu overrides=graph=layer", "sets graph; choose rungs by only="),
    ("suite=ladder device=cpu overrides=train.micro_batch_size=4", "use micro_batch_sizes=..."),
    ("suite=ladder device=cpu overrides=checkpoint.interval=4", "the suite sets checkpoint.interval"),
    ("suite=ladder device=cpu overrides=parallel.tp=2", "of one node along parallel.ep; use nproc="),
    ("suite=ladder device=cpu overrides=model=no_such", "no_such"),
    ("suite=projection device=cpu overrides=launch.nproc=2", "use nproc="),
    ("suite=projection device=cpu overrides=model.top_k=999", "model.top_k=999"),
)


@pytest.mark.parametrize(("words", "said"), WRONG, ids=[words for words, _ in WRONG])
def test_a_bad_argument_names_key_value_and_what_is_valid(words, said, capsys):
    assert said in refusal(bench.main, capsys, *words.split())


def test_a_floor_is_what_a_hand_calculation_gives():
    cases = {case.name: case for case in ops.ops_suite(ops.FULL, CPU)[0]}
    for name, (amount, ms) in FLOORS.items():
        assert (cases[name].amount, cases[name].floor_ms) == (amount, pytest.approx(ms, rel=1e-4)), name


def case_of(**alternatives):
    return Operation("made_up", {"T": 3}, 1000, "bytes", ("y", "dx"), lambda: alternatives)


def gives(*values):
    return lambda: Run(lambda: tuple(torch.tensor([v]) for v in values))


def fails():
    raise RuntimeError("no kernel in /opt/some/where/kernels.py for you\nlong advice")


def test_a_failing_alternative_is_a_row_with_the_reason_and_the_others_go_on():
    nan = gives(float("nan"), 2.0)
    good, right, wrong = gives(1.0, 2.0), gives(1.001, 2.0), gives(1.0, 2.2)
    case = case_of(reference=good, broken=fails, wrong=wrong, nan=nan, right=right)
    rows = run_cases([case.case(CPU, 2)], str, None)
    assert {row["alternative"]: row["error"] for row in rows} == {
        "reference": None,
        "broken": "RuntimeError: no kernel in kernels.py for you",
        "wrong": "dx differs by 10.0% from the first alternative's",
        "nan": "y is not finite",
        "right": None,
    }
    assert [len(row.get("samples_ms", ())) for row in rows] == [2, 0, 0, 0, 2]


def test_a_case_whose_inputs_do_not_fit_is_one_row_and_the_status_is_1(monkeypatch, capsys):
    def make():
        raise torch.OutOfMemoryError("out of memory. Tried to allocate 2 TiB")

    good = case_of(reference=gives(1.0, 2.0))
    bad = dataclasses.replace(good, name="too_large", make=make)
    monkeypatch.setattr(ops, "ops_suite", lambda *_: ([bad, good], []))
    with pytest.raises(SystemExit) as exit_info:
        run_tool(bench.main, ["device=cpu", "repeats=2"])
    table = capsys.readouterr().out
    assert exit_info.value.code == 1 and "| made_up | reference | 0." in table
    assert re.search(r"\| too_large \| all \| failed: OutOfMemoryError: out of memory\. Tried", table)


def made_up(name: str) -> Case:
    def run():
        if name == "killed":
            raise KeyboardInterrupt
        return [{}, {"case": f"{name} again", "error": "no"}]

    return Case(name, {"case": name}, run)


def test_rows_are_kept_as_soon_as_they_are_there_by_the_first_rank_alone(tmp_path, monkeypatch, caplog):
    out, file = tmp_path / "ops.json", tmp_path / "ops.rows.jsonl"
    cases = [made_up(name) for name in ("first", "second", "killed", "never")]
    with pytest.raises(KeyboardInterrupt):
        run_cases(cases, str, out)
    kept = [json.loads(line) for line in file.read_text().splitlines()]
    assert [row["case"] for row in kept] == ["first", "first again", "second", "second again"]
    assert [row["error"] for row in kept] == [None, "no"] * 2 and not out.exists()
    keep(tmp_path / "gone" / "ops.json", kept)
    assert "rows are not kept meanwhile" in caplog.text
    file.unlink()
    run_cases(cases[:1], str, None)
    monkeypatch.setenv("RANK", "1")
    assert run_cases(cases[:1], str, out) == kept[:2]
    assert not [*tmp_path.iterdir()]
