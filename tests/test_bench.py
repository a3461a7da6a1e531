"""The benchmark tool: every case at tiny shapes, floors, routings, failures, peers, arguments."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import os
import re
from types import SimpleNamespace

import pytest
import torch

from graphmoe.bench import __main__ as bench
from graphmoe.bench import cases as cases_module
from graphmoe.bench import peers
from graphmoe.bench.cases import Alternative, Case, Floor, Run, run_case, without_folders
from graphmoe.bench.grouped_mlp_cases import grouped_mlp_cases
from graphmoe.bench.ops_suite import FULL, TINY, _loss_case, ops_suite
from graphmoe.bench.routing import route
from graphmoe.config.arguments import run_tool
from graphmoe.ops import timing
from tests import bench_peers

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
    args = bench.parse_args(bench.BenchArgs, words, prog="graphmoe.bench")
    return bench.bench(args, words), out, words


def test_every_case_runs_on_a_cpu_and_gives_finite_numbers(measured):
    rows = measured[0]["rows"]
    assert {row["case"] for row in rows} == NAMES
    for row in rows:
        assert (row["error"], row["note"]) == (None, None), row
        assert len(row["samples_ms"]) == 4
        numbers = [row[key] for key in ("p10_ms", "median_ms", "p90_ms", "floor_ms", "time_over_floor")]
        assert all(math.isfinite(number) and number > 0 for number in numbers), row
        assert min(row["samples_ms"]) <= row["p10_ms"] <= row["median_ms"] <= row["p90_ms"]
        assert row["time_over_floor"] == pytest.approx(row["median_ms"] / row["floor_ms"], rel=1e-3)
        assert row["time_over_floor"] * row["share_of_floor_rate"] == pytest.approx(1)


def test_the_document_names_the_environment_but_not_this_machine(measured):
    document, out, _ = measured
    assert document["environment"]["packages"]["torch"].startswith(torch.__version__.split("+")[0])
    assert document["environment"]["command"][:4] == ["python", "-m", "graphmoe.bench", "suite=ops"]
    assert document["environment"]["command"][-1] == "out=ops.json"
    text = json.dumps(document)
    assert str(out.parent) not in text and os.path.expanduser("~") + "/" not in text
    assert "host" not in document["environment"]


def test_the_table_has_a_line_for_each_row_and_says_that_cpu_times_mean_nothing(measured):
    text = bench.render(measured[0])
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert len(lines) == 2 + len(measured[0]["rows"]) and len({line.count("|") for line in lines}) == 1
    assert "times of a CPU" in text and "mean nothing" in text
    assert "790 TFLOP/s" in text and "4.3 TB/s" in text


def test_a_training_step_of_the_experts_is_timed_with_the_mix_that_auto_takes_too(measured):
    rows = [row for row in measured[0]["rows"] if row["case"].startswith("grouped_mlp/")]
    for name in MLP_NAMES:
        mix = ["auto=torch,torch,torch"] if name.endswith("/forward_backward") else []
        assert [row["alternative"] for row in rows if row["case"] == name] == ["torch", *mix]


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
    assert "[2/2] swiglu/forward: graphmoe" in streams.err and "left out: peers" in streams.err
    assert any("need a GPU" in line for line in document["left_out"])


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["repeats=0"], ["repeats=0", "repeats=20"]),
        (["suite=model"], ["suite=model", "expected one of ops"]),
        (["shapes=huge"], ["shapes=huge", "auto, full, tiny"]),
        (["device=cpu", "shapes=full"], ["shapes=full", "shapes=tiny"]),
        (["peers=maybe"], ["peers=maybe", "true or false"]),
        (["device=cpu", "only=permute,gemm"], ["only=gemm", "grouped_mlp/v2_lite/forward", "unpermute"]),
        (["device=cpu", "out=no_such_folder/ops.json"], ["out=no_such_folder/ops.json", "no folder"]),
        (["device=cpu", "out=."], ["out=.", "is a folder", "ops.json"]),
        (["repeat=3"], ["did you mean 'repeats'?"]),
        (["scopes=layer"], ["scopes=layer has no effect with suite=ops", "suite=step"]),
        (["suite=step", "peers=false"], ["peers=False has no effect with suite=step", "suite=ops"]),
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


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_gpu_that_is_not_there_is_an_error(capsys):
    with pytest.raises(SystemExit):
        run_tool(bench.main, ["device=cuda"])
    assert "device=cuda, but torch sees no GPU; use device=cpu" in capsys.readouterr().err


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


@pytest.mark.parametrize("name", FLOORS)
def test_a_floor_is_what_a_hand_calculation_gives(name):
    (case,) = [case for case in ops_suite(FULL, CPU, False)[0] if case.name == name]
    amount, ms = FLOORS[name]
    assert case.floor.amount == amount
    assert case.floor.ms == pytest.approx(ms, rel=1e-4)


@pytest.mark.parametrize("shape", FULL.mlp.values(), ids=FULL.mlp)
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


def test_a_peer_may_have_another_gradient_but_not_another_output():
    rows = run_case(
        case_of(
            Alternative("reference", gives(1.0, 2.0)),
            Alternative("other gradient", gives(1.0, 3.0), is_peer=True),
            Alternative("other output", gives(1.5, 2.0), is_peer=True),
        ),
        CPU,
        2,
    )
    assert [row.is_peer for row in rows] == [False, True, True]
    assert rows[1].error is None and rows[1].note == "dx differs by 50.0% from the first alternative's"
    assert len(rows[1].samples_ms) == 2
    assert rows[2].error == "y differs by 50.0% from the first alternative's" and not rows[2].samples_ms


def test_a_case_whose_inputs_do_not_fit_is_one_row_and_the_status_is_1(monkeypatch, capsys):
    def make():
        raise torch.OutOfMemoryError("out of memory. Tried to allocate 2 TiB")

    good = case_of(Alternative("reference", gives(1.0, 2.0)))
    bad = dataclasses.replace(good, name="too_large", make=make)
    monkeypatch.setattr(bench, "ops_suite", lambda *_: ([bad, good], []))
    with pytest.raises(SystemExit) as exit_info:
        run_tool(bench.main, ["device=cpu", "repeats=2"])
    assert exit_info.value.code == 1
    table = capsys.readouterr().out
    assert re.search(r"\| too_large \| all \| failed: OutOfMemoryError: out of memory\. Tried", table)
    assert "| made_up | reference | 0." in table


def test_alternatives_take_turns_and_each_round_starts_with_another():
    order: list[str] = []
    calls = {name: lambda name=name: order.append(name) for name in "abc"}
    samples = timing.time_in_turns(calls, 4, CPU)
    assert "".join(order) == "abcbcacababc"
    assert {name: len(times) for name, times in samples.items()} == {"a": 4, "b": 4, "c": 4}


class FakeClock:
    """The time in seconds, which passes only when a call says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def advance(self, seconds: float) -> None:
        self.now += seconds

    def event(self, enable_timing: bool) -> SimpleNamespace:
        """An event of a device that runs each call at once."""
        assert enable_timing
        event = SimpleNamespace(elapsed_time=lambda end: (end.at - event.at) * 1e3)
        event.record = lambda: setattr(event, "at", self.now)
        return event


def test_device_times_are_those_between_events_and_slow_cases_take_fewer_rounds(monkeypatch):
    clock = FakeClock()
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    monkeypatch.setattr(torch.cuda, "Event", clock.event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: clock.advance(0.001))
    monkeypatch.setattr(timing, "FLUSH_BYTES", 2**20)
    calls = {"short": lambda: clock.advance(0.001), "long": lambda: clock.advance(0.01)}
    samples = timing._times_of_device(calls, 6, CPU)
    assert samples == {"short": pytest.approx([1.0] * 6), "long": pytest.approx([10.0] * 6)}
    monkeypatch.setattr(timing, "MAX_CASE_S", 0.0)
    assert [len(times) for times in timing._times_of_device(calls, 6, CPU).values()] == [3, 3]


def test_as_many_rounds_are_timed_as_fit_into_the_time_of_a_case():
    assert [timing.affordable(20, round_s) for round_s in (1e-6, 0.1, 60.0)] == [20, 15, 3]
    assert timing.affordable(2, 60.0) == 2


def test_the_spread_interpolates_percentiles():
    assert timing.spread([3.0, 1.0, 2.0]) == pytest.approx((1.2, 2.0, 2.8))
    assert timing.spread([5.0]) == (5.0, 5.0, 5.0)


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


def test_each_peer_of_the_routed_experts_is_called_so_that_it_computes_what_we_do(monkeypatch):
    bench_peers.install(monkeypatch)
    shapes = {"tiny": TINY.mlp["qwen3_30b"]}
    for case in grouped_mlp_cases(shapes, CPU, ["torch"], list(peers.GROUPED_MLP)):
        rows = run_case(case, CPU, 1)
        direction = case.name.split("/")[-1]
        mix = ["auto=torch,torch,torch"] if direction == "forward_backward" else []
        others = [] if direction.endswith("grad") else [*mix, *peers.GROUPED_MLP]
        assert [(row.alternative, row.error, row.note) for row in rows] == [
            (name, None, None) for name in ["torch", *others]
        ]


def test_each_peer_of_the_loss_is_called_so_that_it_computes_what_we_do(monkeypatch):
    bench_peers.install(monkeypatch)
    rows = run_case(_loss_case(TINY.loss, CPU, list(peers.LINEAR_CROSS_ENTROPY)), CPU, 1)
    assert [(row.alternative, row.error, row.note) for row in rows] == [
        (name, None, None) for name in ["graphmoe", *peers.LINEAR_CROSS_ENTROPY]
    ]


def test_every_function_of_every_peer_is_accepted_as_it_was_read(monkeypatch):
    bench_peers.install(monkeypatch)
    for functions in peers.FUNCTIONS.values():
        for function in functions:
            assert callable(getattr(function.load(), "apply", function.load()))


def test_a_peer_that_is_absent_or_another_or_broken_is_left_out_with_the_reason(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(peers.FUNCTIONS, "no_such_peer", ())
    assert peers.why_unusable("no_such_peer") == "not installed"
    function = peers.Function("changed_peer", "loss", ("h", "w"))
    monkeypatch.setitem(peers.FUNCTIONS, "changed_peer", (function,))
    (tmp_path / "changed_peer.py").write_text("def loss(w, h): ...\n")
    assert peers.why_unusable("changed_peer") == "changed_peer.loss takes (w, h), not (h, w)"
    monkeypatch.setitem(
        peers.FUNCTIONS, "broken_peer", (dataclasses.replace(function, module="broken_peer"),)
    )
    (tmp_path / "broken_peer.py").write_text("raise OSError('libcudart.so.99: cannot open')\n")
    assert peers.why_unusable("broken_peer") == "does not load: OSError: libcudart.so.99: cannot open"


def test_absolute_paths_lose_their_folders():
    assert without_folders("out=/srv/data/me/ops.json") == "out=ops.json"
    assert without_folders("no /opt/a/b.so, at 790 TFLOP/s, 4.3 TB/s") == "no b.so, at 790 TFLOP/s, 4.3 TB/s"
    assert without_folders("only=grouped_mlp/v2_lite/forward") == "only=grouped_mlp/v2_lite/forward"
