"""The benchmark tool: every operation at tiny shapes, floors, routings, failures, arguments, kept rows."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import os
import re

import pytest
import torch

from graphmoe.bench import __main__ as bench
from graphmoe.bench import cases as cases_module
from graphmoe.bench import ops_suite as ops
from graphmoe.bench.arguments import BenchArgs, split_list
from graphmoe.bench.cases import (
    Alternative,
    Case,
    Floor,
    Run,
    keep,
    one_by_one,
    route,
    run_case,
    without_folders,
)
from graphmoe.config.arguments import run_tool

CPU = torch.device("cpu")
MLP_NAMES = {
    f"grouped_mlp/{label}{routing}/{direction}"
    for label in ("v2_lite", "qwen3_30b", "v3_ep8")
    for routing in ("", "_skewed")
    for direction in ("forward", "dgrad", "wgrad", "forward_backward")
}
NAMES = MLP_NAMES | {
    "routing_plan",
    "permute",
    "unpermute",
    "unpermute_weighted",
    "swiglu/forward",
    "swiglu/backward",
    "router/v2_lite/forward",
    "router/v2_lite/backward",
    "router/v3/forward",
    "router/v3/backward",
    "linear_cross_entropy/forward_backward",
}


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """The document of the whole suite on a CPU, the file it was written to, and the words."""
    out = tmp_path_factory.mktemp("bench") / "ops.json"
    words = ["suite=ops", "device=cpu", "repeats=4", f"out={out}"]
    args = bench.parse_args(BenchArgs, words, prog="graphmoe.bench")
    return bench.bench(args, words), out, words


def test_every_case_runs_on_a_cpu_and_gives_finite_numbers(measured):
    rows = measured[0]["rows"]
    assert {row["case"] for row in rows} == NAMES
    for row in rows:
        assert row["error"] is None, row
        assert len(row["samples_ms"]) == 4
        numbers = [row[key] for key in ("p10_ms", "median_ms", "p90_ms", "floor_ms", "time_over_floor")]
        assert all(math.isfinite(number) and number > 0 for number in numbers), row
        assert min(row["samples_ms"]) <= row["p10_ms"] <= row["median_ms"] <= row["p90_ms"]
        assert row["time_over_floor"] == pytest.approx(row["median_ms"] / row["floor_ms"], rel=1e-3)
        if row["case"] in MLP_NAMES:
            mix = ["auto=torch,torch,torch"] if row["case"].endswith("/forward_backward") else []
            assert row["alternative"] in ["torch", *mix]


def test_the_document_and_its_table_name_the_environment_but_not_this_machine(measured):
    document, out, _ = measured
    assert document["environment"]["packages"]["torch"].startswith(torch.__version__.split("+")[0])
    command = document["environment"]["command"]
    assert command[:4] == ["python", "-m", "graphmoe.bench", "suite=ops"] and command[-1] == "out=ops.json"
    text = json.dumps(document)
    assert str(out.parent) not in text and os.path.expanduser("~") + "/" not in text
    assert "host" not in document["environment"]
    table = bench.render(document)
    lines = [line for line in table.splitlines() if line.startswith("|")]
    assert len(lines) == 2 + len(document["rows"]) and len({line.count("|") for line in lines}) == 1
    assert "times of a CPU" in table and "790 TFLOP/s" in table


def test_json_on_stdout_is_what_the_file_holds(tmp_path, capsys, caplog, monkeypatch):
    caplog.set_level("INFO")
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # as in a new process
    out = tmp_path / "ops.json"
    (tmp_path / "ops.rows.jsonl").write_text("what an earlier suite left")
    bench.main(["device=cpu", "only=permute,swiglu/f", "repeats=2", "format=json", f"out={out}"])
    streams = capsys.readouterr()
    document = json.loads(streams.out)
    assert json.loads(out.read_text()) == document and [*tmp_path.iterdir()] == [out]
    assert [row["case"] for row in document["rows"]] == ["permute", "swiglu/forward"]
    assert "[2/2] swiglu/forward: graphmoe" in streams.err
    assert document["left_out"] == ["triton, turbo, te: a CPU has the torch backend only"]


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["repeats=0"], ["repeats=0", "repeats=20"]),
        (["suite=model"], ["suite=model", "expected one of ops"]),
        (["shapes=huge"], ["shapes=huge", "auto, full, tiny"]),
        (["device=cpu", "shapes=full"], ["shapes=full", "shapes=tiny"]),
        (["device=cpu", "only=permute,gemm"], ["only=gemm", "grouped_mlp/v2_lite/forward", "unpermute"]),
        (["device=cpu", "out=no_such_folder/ops.json"], ["out=no_such_folder/ops.json", "no folder"]),
        (["device=cpu", "out=."], ["out=.", "is a folder", "ops.json"]),
        (["repeat=3"], ["did you mean 'repeats'?"]),
        (["scopes=layer"], ["scopes=layer has no effect with suite=ops", "suite=step"]),
        (["limit_s=9"], ["limit_s=9 has no effect with suite=ops; use suite=step or suite=ladder"]),
        (["suite=step", "limit_s=0"], ["limit_s=0", "limit_s=120"]),
        (["suite=step", "scopes=none,every"], ["scopes=every", "full_iteration", "[none,[attn,loss]]"]),
        (["suite=step", "scopes=[]"], ["scopes=", "scopes=none,full_iteration"]),
        (["suite=step", "micro_batch_sizes=1,x"], ["micro_batch_sizes=1,x", "'x'", "micro_batch_sizes=1,4"]),
        (["suite=step", "seq_lens=0"], ["seq_lens=0", "'0'", "seq_lens=1,4"]),
        (["suite=step", "overrides=model.num_layer=2"], ["model.num_layer=2", "'model.num_layers'"]),
        (["suite=step", "overrides=graph=layer"], ["overrides=graph=layer", "scopes=..."]),
        (["suite=step", "overrides=train.val_batches=2"], ["train.val_batches=2", "only steps are timed"]),
        (["suite=step", "device=cpu", "overrides=model.top_k=9"], ["model.top_k=9", "use 1 to 8"]),
        (["suite=step", "device=cpu", "only=mbs9"], ["only=mbs9", "mbs2_s32/none_again"]),
        (["suite=ladder", "device=cpu", "nproc=1"], ["nproc=1: the rungs", "use nproc=2 or more"]),
        (["suite=ladder", "device=cpu", "blocks=1"], ["blocks=1 has no effect", "use suite=dispatch"]),
        (["suite=ladder", "device=cpu", "micro_batch_sizes=1,x"], ["'x' is no number above 0"]),
        (
            ["suite=ladder", "device=cpu", "only=top"],
            ["only=top: no case", "cases are baseline, loss_fusion"],
        ),
    ],
    ids=lambda value: value[-1] if "=" in value[-1] else "",
)
def test_a_bad_argument_names_key_value_and_what_is_valid(words, parts, capsys):
    with pytest.raises(SystemExit) as exit_info:
        run_tool(bench.main, words)
    streams = capsys.readouterr()
    assert exit_info.value.code == 2 and streams.out == ""
    for part in parts:
        assert part in streams.err


FLOORS = {  # case: (FLOPs or bytes, milliseconds), worked out by hand
    # 98304 rows x 2048 x 1408: three products of 2 FLOPs each, gate, up and down
    "grouped_mlp/v2_lite/forward": (6 * 98304 * 2048 * 1408, 2.1529),
    "grouped_mlp/v2_lite_skewed/dgrad": (6 * 98304 * 2048 * 1408, 2.1529),
    "grouped_mlp/v2_lite/wgrad": (6 * 98304 * 2048 * 1408, 2.1529),
    "grouped_mlp/v2_lite/forward_backward": (18 * 98304 * 2048 * 1408, 6.4588),
    "grouped_mlp/qwen3_30b/forward_backward": (18 * 131072 * 2048 * 768, 4.6973),
    "grouped_mlp/v3_ep8/forward": (6 * 32768 * 7168 * 2048, 3.6535),
    # experts read; counts, ends, rows and slots written
    "routing_plan": (393_216 + 256 + 256 + 393_216 + 393_216, 0.00027446),
    # 64 MiB of tokens, 384 MiB of rows, 384 KiB of row numbers, as much of weights
    "permute": (67_108_864 + 402_653_184 + 393_216, 0.109339),
    "unpermute": (402_653_184 + 67_108_864 + 393_216, 0.109339),
    "unpermute_weighted": (402_653_184 + 67_108_864 + 2 * 393_216, 0.109430),
    # h of 528 MiB and a of half that; weights of 384 KiB
    "swiglu/forward": (553_648_128 + 276_824_064 + 393_216, 0.193224),
    "swiglu/backward": (276_824_064 + 2 * 553_648_128 + 2 * 393_216, 0.322073),
    # logits of 4 MiB read; weights and experts of 384 KiB, two sums of 1 KiB and two of 4 B written
    "router/v2_lite/forward": (4_194_304 + 2 * 393_216 + 2 * 1024 + 8, 0.0011588),
    "router/v2_lite/backward": (2 * 4_194_304 + 2 * 393_216 + 1024, 0.0021340),
    # logits of 16 MiB and a bias of 1 KiB; weights and experts of 512 KiB, sums of 4 KiB
    "router/v3/forward": (16_777_216 + 1024 + 2 * 524_288 + 2 * 4096 + 8, 0.0041477),
    "router/v3/backward": (2 * 16_777_216 + 2 * 524_288 + 4096, 0.0080482),
    # logits, and the gradients of both factors
    "linear_cross_entropy/forward_backward": (6 * 16384 * 2048 * 102400, 26.0960),
}


def test_a_floor_is_what_a_hand_calculation_gives():
    cases = {case.name: case.floor for case in ops.ops_suite(ops.FULL, CPU)[0]}
    assert {name: cases[name].amount for name in FLOORS} == {
        name: amount for name, (amount, _) in FLOORS.items()
    }
    for name, (_, ms) in FLOORS.items():
        assert cases[name].ms == pytest.approx(ms, rel=1e-4), name


@pytest.mark.parametrize("shape", ops.FULL.mlp.values(), ids=ops.FULL.mlp)
def test_a_skewed_routing_gives_one_expert_four_times_the_mean(shape):
    generator = torch.Generator().manual_seed(1)
    routing, weight_TK = route(shape.T, shape.E, shape.K, generator, CPU, skewed=True)
    counts = torch.bincount(routing.expert_TK.flatten(), minlength=shape.E)
    assert int(counts.max()) == int(counts[0]) == 4 * shape.T * shape.K // shape.E
    assert bool((routing.expert_TK.sort(dim=1).values.diff(dim=1) > 0).all())  # a token's experts differ
    assert int(routing.ends_E[-1]) == shape.T * shape.K
    assert bool((weight_TK > 0).all() and (weight_TK.sum(1) <= 1 + 1e-6).all())


def test_a_natural_routing_takes_the_largest_shares_of_a_softmax():
    logits_TE = torch.randn(64, 8, generator=torch.Generator().manual_seed(3))
    routing, weight_TK = route(64, 8, 2, torch.Generator().manual_seed(3), CPU)
    expected = logits_TE.softmax(-1).topk(2)
    assert torch.equal(routing.expert_TK.long(), expected.indices)
    torch.testing.assert_close(weight_TK, expected.values)


def case_of(*alternatives, results=("y", "dx")):
    return Case("made_up", {"T": 3}, Floor(1000, "bytes"), results, lambda: list(alternatives))


def gives(*values):
    return lambda: Run(lambda: tuple(torch.tensor([v]) for v in values))


def fails(message):
    def bind():
        raise RuntimeError(message)

    return bind


def test_a_failing_alternative_is_a_row_with_the_reason_and_the_others_go_on():
    rows = run_case(
        case_of(
            Alternative("reference", gives(1.0, 2.0)),
            Alternative("broken", fails("no kernel in /opt/some/where/kernels.py for you\nlong advice")),
            Alternative("wrong", gives(1.0, 2.2)),
            Alternative("nan", gives(float("nan"), 2.0)),
            Alternative("right", gives(1.001, 2.0)),
        ),
        CPU,
        2,
    )
    errors = {row.alternative: row.error for row in rows}
    assert errors == {
        "reference": None,
        "broken": "RuntimeError: no kernel in kernels.py for you",
        "wrong": "dx differs by 10.0% from the first alternative's",
        "nan": "y is not finite",
        "right": None,
    }
    assert [len(row.samples_ms) for row in rows] == [2, 0, 0, 0, 2]


def test_a_case_whose_inputs_do_not_fit_is_one_row_and_the_status_is_1(monkeypatch, capsys):
    def make():
        raise torch.OutOfMemoryError("out of memory. Tried to allocate 2 TiB")

    good = case_of(Alternative("reference", gives(1.0, 2.0)))
    bad = dataclasses.replace(good, name="too_large", make=make)
    monkeypatch.setattr(ops, "ops_suite", lambda *_: ([bad, good], []))
    with pytest.raises(SystemExit) as exit_info:
        run_tool(bench.main, ["device=cpu", "repeats=2"])
    assert exit_info.value.code == 1
    table = capsys.readouterr().out
    assert re.search(r"\| too_large \| all \| failed: OutOfMemoryError: out of memory\. Tried", table)
    assert "| made_up | reference | 0." in table


def test_memory_is_what_the_allocator_holds_beside_output_or_gradients(monkeypatch):
    cuda, y = torch.device("cuda"), torch.zeros(256)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 10_000)
    held = iter([5000, 5000 + 1024 + 700, 5000])
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: next(held))
    case = case_of()
    run = Run(lambda: (y, y, None), lambda: y)
    assert cases_module._memory(dataclasses.replace(case, memory="kept"), run, cuda) == 700
    assert cases_module._memory(dataclasses.replace(case, memory="peak"), run, cuda) == 5000 - 1024
    assert cases_module._memory(case, run, cuda) is None
    assert cases_module._memory(dataclasses.replace(case, memory="kept"), run, CPU) is None


def test_absolute_paths_lose_their_folders():
    assert without_folders("out=/srv/data/me/ops.json") == "out=ops.json"
    assert without_folders("no /opt/a/b.so, at 790 TFLOP/s, 4.3 TB/s") == "no b.so, at 790 TFLOP/s, 4.3 TB/s"
    assert without_folders("only=grouped_mlp/v2_lite/forward") == "only=grouped_mlp/v2_lite/forward"


@dataclasses.dataclass
class Named:
    name: str


@dataclasses.dataclass
class KeptRow:
    case: str
    samples_ms: list[float]
    error: str | None = None


def run_named(case: Named) -> list[KeptRow]:
    if case.name == "killed":
        raise KeyboardInterrupt
    return [KeptRow(case.name, [1.0, 2.0]), KeptRow(f"{case.name} again", [3.0])]


def test_rows_are_kept_as_soon_as_they_are_there_by_the_first_rank_alone(tmp_path, monkeypatch, caplog):
    out, file = tmp_path / "ops.json", tmp_path / "ops.rows.jsonl"
    cases = [Named("first"), Named("second"), Named("killed"), Named("never")]
    with pytest.raises(KeyboardInterrupt):
        one_by_one(cases, run_named, str, out)
    kept = [KeptRow(**json.loads(line)) for line in file.read_text().splitlines()]
    assert kept == [*run_named(cases[0]), *run_named(cases[1])] and not out.exists()
    keep(tmp_path / "gone" / "ops.json", kept)
    assert "rows are not kept meanwhile" in caplog.text
    file.unlink()
    one_by_one(cases[:1], run_named, str, None)
    monkeypatch.setenv("RANK", "1")
    assert one_by_one(cases[:1], run_named, str, out) == run_named(cases[0])
    assert not [*tmp_path.iterdir()]


def test_a_list_is_split_at_commas_outside_brackets():
    assert split_list("a, b=[c,d],") == split_list("[a,b=[c,d]]") == ["a", "b=[c,d]"]
    assert split_list("[[a,b]],c") == ["[[a,b]]", "c"]
    assert split_list("") == split_list("[]") == []
