"""The benchmark tool: every operation at tiny shapes, floors, failures, arguments, kept rows."""

import json
import logging
import math
import re

import pytest
import torch

from graphmoe.bench import BenchArgs
from graphmoe.bench import __main__ as bench
from graphmoe.bench import ops_suite as ops
from graphmoe.bench.cases import Case, Operation, earlier_rows, keep, run_cases
from tests.runs import refusal

CPU = torch.device("cpu")
FLOORS = {  # case: (FLOPs or bytes, milliseconds), worked out by hand
    # 98304 rows x 2048 x 1408: three products of 2 FLOPs each, gate, up and down
    "grouped_mlp/v2_lite_skewed/dgrad": (6 * 98304 * 2048 * 1408, 2.1529),
    "grouped_mlp/v2_lite/forward_backward": (18 * 98304 * 2048 * 1408, 6.4588),
    # q k^T, share v; half of the pairs: 4 x 16 x 4096 x 4096 / 2 x 2 FLOPs x 320, twice for the backward
    "attention/v2_lite/backward": (2 * 4 * 16 * 4096 * 4096 * 320, 0.86987),
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


def documented(*words):
    return bench.bench(bench.parse_args(BenchArgs, words, prog="graphmoe.bench"), words)


def table_of(document):
    lines = [line for line in bench.render(document).splitlines() if line.startswith("|")]
    assert len(lines) == 2 + len(document["rows"]) and len({line.count("|") for line in lines}) == 1
    return lines


def test_every_case_runs_and_stdout_is_what_the_file_holds(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # as in a new process
    out = tmp_path / "ops.json"
    (tmp_path / "ops.rows.jsonl").write_text("what an earlier suite left")
    bench.main(["suite=ops", "device=cpu", "repeats=4", "format=json", f"out={out}"])
    streams = capsys.readouterr()
    document = json.loads(streams.out)
    assert json.loads(out.read_text()) == document and [*tmp_path.iterdir()] == [out]
    names = [case.name for case in ops.ops_suite(False, CPU)[0]]
    assert [*dict.fromkeys(row["case"] for row in document["rows"])] == names and FLOORS.keys() < {*names}
    assert f"[{len(names)}/{len(names)}] {names[-1]}: " in streams.err
    for row in document["rows"]:
        assert row["error"] is None and len(row["samples_ms"]) == 4, row
        assert 0 < min(row["samples_ms"]) <= row["p10_ms"] <= row["median_ms"] <= row["p90_ms"] < math.inf
        assert row["time_over_floor"] == pytest.approx(row["median_ms"] / row["floor_ms"], rel=1e-3)
    command = ["graphmoe.bench", "suite=ops", "device=cpu", "repeats=4", "format=json", "out=ops.json"]
    assert document["environment"]["command"][2:] == command
    assert document["left_out"] == ["triton, turbo, te: a CPU has the torch backend only"]
    assert str(tmp_path) not in json.dumps(document) and "host" not in document["environment"]
    loops = {row["case"]: row for row in document["rows"] if row["alternative"] == "loop"}
    assert {name.rpartition("/")[2] for name in loops} == {"forward", "forward_backward"} and len(loops) == 12
    for row in document["rows"]:
        gain = loops[row["case"]]["median_ms"] / row["median_ms"] if row["case"] in loops else None
        assert row.get("over_loop") == gain
    row = r"\| grouped_mlp/v2_lite/forward \| torch( \| [\d.e-]+( to [\d.]+)?){5} \|  \|"
    assert re.fullmatch(row, table_of(document)[2])
    assert "times of a CPU" in (text := bench.render(document)) and "790 TFLOP/s" in text


WRONG = (
    ("repeats=0", "repeats=0 must be 1 or more"),
    ("suite=regress write=true only=start", "write=true writes the figures of all cases; leave out only="),
    ("suite=ladder device=cpu passes=0", "passes=0 must be 1 or more, such as passes=3"),
    ("suite=ladder device=cpu stop_after_s=9", "stop_after_s=9 needs a file to go on from, such as"),
    ("suite=model", "suite=model: expected one of ops"),
    ("device=cpu shapes=full", "use shapes=tiny or shapes=auto"),
    ("device=cpu only=permute,gemm", "only=gemm: no case starts with that; cases: grouped_mlp/v2_lite"),
    ("device=cpu out=no_such_folder/ops.json", "out=no_such_folder/ops.json: there is no folder"),
    ("limit_s=9", "limit_s=9 has no effect with suite=ops; use suite=step or suite=ladder"),
    ("suite=step limit_s=0", "limit_s=0 must be from 1 to 86400"),
    ("suite=step scopes=none,every", "scopes=every: use none"),
    ("suite=step scopes=none,[attn,every]", "scopes=[attn,every]: use none"),
    ("suite=step scopes=[]", "scopes= is empty; use scopes=none,full_iteration"),
    ("suite=step micro_batch_sizes=1,x", "micro_batch_sizes=1,x: expected a whole number"),
    ("suite=step seq_lens=0", "seq_lens=0: use numbers above 0"),
    ("suite=step overrides=model.num_layer=2", "'model.num_layers'"),
    ("suite=step overrides=graph=layer", "overrides=graph=layer: the suite sets graph; use scopes=..."),
    ("suite=step overrides=train.val_batches=2", "sets train.val_batches, so that only steps are timed"),
    ("suite=step device=cpu overrides=model.top_k=9", "use 1 to 8"),
    ("suite=step device=cpu only=mbs9", "mbs2_s32/none_again"),
    ("suite=ladder device=cpu nproc=0", "nproc=0 must be 1 or more"),
    ("suite=ladder device=cpu nproc=1 only=symm", "only=symm: no case starts with that; cases: baseline, "),
    ("suite=ladder device=cpu overrides=precision.fp8=rowwise", "the suite sets precision.fp8; use only="),
    ("suite=ladder device=cpu blocks=1", "blocks=1 has no effect with suite=ladder; use suite=dispatch"),
    ("suite=ladder device=cpu only=top", "only=top: no case starts with that; cases: baseline, loss_"),
    ("suite=ladder device=cpu overrides=moe.dispatcher=symm", "the suite sets moe.dispatcher; use only=..."),
    ("suite=ladder device=cpu overrides=graph=layer", "sets graph; use only=... to choose rungs"),
    ("suite=ladder device=cpu overrides=train.micro_batch_size=4", "use micro_batch_sizes=..."),
    ("suite=ladder device=cpu overrides=checkpoint.interval=4", "the suite sets checkpoint.interval"),
    ("suite=ladder device=cpu overrides=parallel.tp=2", "the suite sets parallel.tp; use nproc="),
    ("suite=ladder device=cpu overrides=model=no_such", "no_such"),
    ("suite=projection device=cpu overrides=launch.nproc=2", "use nproc="),
)


@pytest.mark.parametrize(("words", "said"), WRONG, ids=[words for words, _ in WRONG])
def test_a_bad_argument_names_key_value_and_what_is_valid(words, said, capsys):
    assert said in refusal(bench.main, capsys, *words.split())


def test_a_floor_is_what_a_hand_calculation_gives():
    cases = {case.name: case for case in ops.ops_suite(True, CPU)[0]}
    for name, (amount, ms) in FLOORS.items():
        assert (cases[name].amount, cases[name].floor_ms) == (amount, pytest.approx(ms, rel=1e-4)), name


def gives(*values):
    return lambda: tuple(torch.tensor([value]) for value in values)


def fails(*_):
    raise RuntimeError("no kernel in /opt/some/where/kernels.py for you\nlong advice")


def test_alternatives_and_cases_that_fail_are_rows_with_the_reason(monkeypatch, capsys):
    right = {"nan_first": gives(math.nan, 2.0), "reference": gives(1.0, 2.0), "broken": fails}
    right |= {"wrong": gives(1.0, 2.2), "nan": gives(math.nan, 2.0), "right": gives(1.001, 2.0)}
    good = Operation("made_up", {"T": 3}, 1000, "bytes", ("y", "dx"), lambda generator: right)
    bad = good._replace(name="too_large", make=fails)
    monkeypatch.setattr(ops, "ops_suite", lambda *_: ([bad, good], []))
    document = documented("device=cpu", "repeats=2")
    first, *rows = document["rows"]
    no_kernel, no_number = "RuntimeError: no kernel in kernels.py for you", "y is not finite"
    errors = {"nan_first": no_number, "reference": None, "broken": no_kernel}
    errors |= {"wrong": "dx differs by 10.0% from the first alternative's", "nan": no_number, "right": None}
    assert {row["alternative"]: row["error"] for row in rows} == errors
    assert [len(row.get("samples_ms", ())) for row in rows] == [0, 2, 0, 0, 0, 2]
    assert (first["alternative"], first["error"]) == ("all", no_kernel)
    assert table_of(document)[2].startswith("| too_large | all | failed: RuntimeError: no kernel in kernels")
    with pytest.raises(SystemExit, match="1"):
        bench.main(["device=cpu", "repeats=2"])


def made_up(name):
    def run():
        if name == "killed":
            raise KeyboardInterrupt
        return [{}, {"case": f"{name} again", "error": "no"}]

    return Case(name, {"case": name}, run)


def test_rows_are_kept_at_once_and_by_the_first_rank_alone(tmp_path, monkeypatch, caplog):
    out, file = tmp_path / "ops.json", tmp_path / "ops.rows.jsonl"
    cases = [made_up(name) for name in ("first", "second", "killed", "never")]
    caplog.set_level("INFO")
    with pytest.raises(KeyboardInterrupt):
        run_cases(cases, str, out)
    kept = [json.loads(line) for line in file.read_text().splitlines()]
    assert [row["case"] for row in kept] == ["first", "first again", "second", "second again"]
    assert [row["error"] for row in kept] == [None, "no"] * 2 and not out.exists()
    with file.open("a") as torn:
        torn.write('{"case": "kil')
    assert earlier_rows(out) == kept and earlier_rows(tmp_path / "none.json") == []
    assert file.read_text().count("\n") == 4 and file.read_text().endswith("\n")
    again = [cases[0], Case("second", {"case": "second"}, fails)]
    assert [row["error"] for row in run_cases(again, str, out, earlier=kept)] == [None, None]
    assert run_cases(again[:1], str, out, earlier=kept[1:], until=math.inf)[1:] == kept[1:2]
    with pytest.raises(SystemExit) as stopped:
        run_cases(again, str, out, earlier=kept[:1], until=0)
    assert not stopped.value.code and "stopped before [2/2] second" in caplog.text
    keep(tmp_path / "gone" / "ops.json", kept)
    assert "intermediate results cannot be saved" in caplog.text
    file.unlink()
    run_cases(cases[:1], str, None)
    monkeypatch.setenv("RANK", "1")
    assert run_cases(cases[:1], str, out) == kept[:2]
    assert not [*tmp_path.iterdir()]
