"""Numbers that ``graphmoe.trace`` makes of traces as Kineto writes them, and traces that it refuses."""

import gzip
import re
import shutil
import sys
import tracemalloc
import zipfile
from pathlib import Path

import pytest

from graphmoe.config.schema import ConfigError
from graphmoe.trace.__main__ import TRACELENS, main, tracelens_report
from graphmoe.trace.events import Activity, is_communication, read_trace
from graphmoe.trace.summary import SegmentTime, Summary, length, summarise, wall_of
from tests.kineto import BACKWARD, FACTS, KinetoTrace, two_steps
from tests.runs import TINY, command, document_of

COMPILED = "a row such as attn..mlp is a compiled unit: its kernels are fused over its segments"


def read(trace, tmp_path, num_kernels=5):
    return summarise(read_trace(trace.write(tmp_path / "a.trace.json", FACTS)), num_kernels)


def times_of(summary):
    return {f"{s.segment}:{s.part}": round(s.ms, 6) for s in summary.segments}


def test_time_that_intervals_cover_counts_once():
    assert length([(5, 6), (0, 2), (1, 3), (3, 4)]) == 5 and length([(0, 10), (2, 3)]) == 10


def test_kernels_belong_to_segments_and_a_step_has_idle_time_communication_and_launches(tmp_path):
    summary = read(two_steps(), tmp_path)
    expected = {"attn:F": 0.1, "attn:W": 0.2, "gradients:sum": 0.15, "optimizer:update": 0.3}
    assert times_of(summary) == expected
    assert [s.calls for s in summary.segments] == [1.0] * 4
    communication = {f"{s.segment}:{s.part}": s.communication_ms for s in summary.segments}
    assert communication == pytest.approx({**dict.fromkeys(expected, 0.0), "gradients:sum": 0.15})
    # from 100 to 2000 us: 100 + 300 + 300 us are busy in each step
    assert summary.step_ms == pytest.approx(0.95) and summary.idle == pytest.approx(1 - 1400 / 1900)
    assert summary.exposed_ms == pytest.approx(0.1) and summary.hidden_ms == pytest.approx(0.05)
    assert summary.launches == 4 and summary.launch_ms == pytest.approx(0.008)
    assert summary.streams == pytest.approx({"compute": 0.6, "copy": 0.15, "other": 0.0})


def test_a_call_of_the_driver_inside_one_of_the_runtime_counts_once(tmp_path):
    trace = two_steps()
    for at in (0.0, 1000.0):
        trace.call("cuLaunchKernelEx", at + 25.5, at + 26.5, 1, kind="cuda_driver")
        trace.call("cuLaunchKernelEx", at + 300, at + 303, 2, kind="cuda_driver")
        trace.call("cudaStreamSynchronize", at + 310, at + 800, 3)
        trace.call("cuLaunchKernelEx", at + 303, at + 305, 5, kind="cuda_driver")  # as the one before ends
        trace.call("cuLaunchKernelEx", at + 302, at + 303, 6, BACKWARD, kind="cuda_driver")
        trace.call("hipExtModuleLaunchKernel", at + 950, at + 960, 4)  # after the step
    summary = read(trace, tmp_path)
    assert summary.launches == 4 + 3 and summary.launch_ms == pytest.approx(0.014)


def test_all_kernels_of_a_graph_belong_to_the_range_of_its_launch(tmp_path):
    trace = KinetoTrace(step_us=100)
    trace.range("attn..moe_combine:B", 10, 40, BACKWARD)
    trace.call("cudaGraphLaunch", 12, 32, 77, BACKWARD)
    for name, start in (("triton_red_fused_rms", 50), ("nvjet_tst", 60), ("pull_kernel", 75)):
        trace.activity("kernel", name, start, start + 10, 77)
    summary = read(trace, tmp_path)
    (unit,) = summary.segments
    assert (unit.segment, unit.part, unit.calls) == ("attn..moe_combine", "B", 1)
    assert unit.ms == pytest.approx(0.03) and summary.launch_ms == pytest.approx(0.02)
    assert unit.communication_ms == pytest.approx(0.01) == summary.exposed_ms
    (note,) = summary.notes
    assert "is a compiled unit: its kernels are fused over its segments" in note
    whole = KinetoTrace(step_us=100)
    whole.range("full_iteration:replay", 10, 40)
    whole.call("cudaGraphLaunch", 12, 32, 77)
    whole.activity("kernel", "nvjet_tst", 50, 60, 77)
    summary = read(whole, tmp_path)
    assert [*times_of(summary)] == ["full_iteration:replay"]
    (note,) = summary.notes
    assert "name no segment" in note and "graph.scope=layer separates segments" in note


def replays(nodes, streams=1):
    """Two replays of a graph in one step: nodes of 10 us, one after the other, in turns on the streams."""
    trace = KinetoTrace(step_us=1000)
    for replay in (0, 1):
        begin = 500 * replay
        trace.range("full_iteration:replay", begin + 10, begin + 40)
        trace.call("cudaGraphLaunch", begin + 12, begin + 32, replay)
        for place, (kind, name) in enumerate(nodes):
            at = begin + 50 + 10 * place
            trace.activity(kind, name, at, at + 10, replay, 100 + place % streams)
    return trace


def test_kernels_of_a_whole_steps_graph_belong_to_the_segments_that_were_captured(tmp_path):
    nodes = [("kernel", "gather"), *[("kernel", "nvjet_tst")] * 2, ("gpu_memcpy", "Memcpy PtoP (0 -> 1)")]
    nodes += [("gpu_memset", "Memset (Device)"), *[("kernel", "nvjet_tst")] * 2, ("kernel", "adamw")]
    unit = "attn..moe_combine"
    graph = [
        ("embed", "F", ["gather"]),
        (unit, "F", ["nvjet_tst", "nvjet_tst", "memcpy"]),
        ("", "", ["memset"]),
    ]
    graph += [(unit, "I", ["nvjet_tst", "nvjet_tst"]), ("optimizer", "update", ["adamw"])]
    expected = {"embed:F": 0.02, f"{unit}:F": 0.06, "(no segment):": 0.02}
    expected |= {f"{unit}:I": 0.04, "optimizer:update": 0.02}

    def summary_of(nodes, graph, streams=1):
        path = replays(nodes, streams).write(tmp_path / "a.json", {**FACTS, "graph": graph})
        return summarise(read_trace(path), 5)

    for streams in (1, 300):
        summary = summary_of(nodes, graph, streams)
        assert times_of(summary) == expected and "graph" not in summary.facts and summary.notes == [COMPILED]
        assert summary.streams == pytest.approx({"compute": 0.12, "copy": 0.02, "other": 0.02})
        assert {(s.segment, s.part): s.calls for s in summary.segments}["embed", "F"] == 2
    # a branch on another stream runs later than what was captured after it
    late = [nodes[0], *nodes[2:5], *nodes[5:7], nodes[7], nodes[1]]
    assert times_of(summary_of(late, graph)) == expected
    # HIP names no nodes: kernels are in the order of their start
    plain = [(u, p, ["" if name[0] != "m" else name for name in names]) for u, p, names in graph]
    assert times_of(summary_of(nodes, plain)) == expected
    # kernels that no node names belong to what starts before them
    stray = [*nodes[:1], ("kernel", "memcpy128"), *nodes[1:]]
    assert times_of(summary_of(stray, graph)) == {**expected, "embed:F": 0.04}
    summary = summary_of(nodes, [])
    assert times_of(summary) == {"full_iteration:replay": 0.16} and "name no segment" in summary.notes[0]


def test_a_row_has_the_floors_of_its_segments_in_the_layers_that_have_it(tmp_path):
    dense, moe = {"attn": (1, 2, 3), "mlp": (10, 20, 30)}, {"attn": (4, 5, 6), "moe_experts": (40, 50, 60)}
    facts = {**FACTS, "floors": [dense, moe, {"optimizer": (7, 0, 0)}]}
    for rows, expected in (
        (("attn:F", "mlp:B", "gradients:sum"), {"attn:F": 5, "mlp:B": 50}),
        (
            ("attn..mlp:F", "attn:W", "optimizer:update"),
            {"attn..mlp:F": 11, "attn:W": 6, "optimizer:update": 7},
        ),
        (("attn..moe_experts:I", "attn..mlp:I", "loss:F"), {"attn..moe_experts:I": 55, "attn..mlp:I": 22}),
    ):
        trace = KinetoTrace(step_us=1000)
        for place, row in enumerate(rows):
            trace.range(row, 10 + 100 * place, 90 + 100 * place)
            trace.launch("kernel", 20 + 100 * place, 30 + 100 * place, 80 + 100 * place)
        found = summarise(read_trace(trace.write(tmp_path / "a.json", facts)), 1).segments
        assert {f"{s.segment}:{s.part}": s.floor_ms for s in found if s.floor_ms is not None} == expected


WALLS = {  # idle, launches, exposed ms, share of memory: wall
    (0.2, 500, 1.0, None): "host",
    (0.2, 3, 1.0, None): "exchange",
    (0.2, 3, 0.1, 0.96): "memory",
    (0.2, 3, 0.1, 0.95): "compute",
    (0.2, 500, 3.0, None): "exchange",
    (0.04, 500, 0.4, None): "compute",
}


@pytest.mark.parametrize("figures", WALLS, ids=str)
def test_a_wall_is_named_with_its_figures(figures):
    idle, launches, exposed, memory = figures
    rows = [SegmentTime(name, "F", 1, ms, 0, [], floor) for name, ms, floor in
            (("attn", 4, 3), ("mlp", 5, 2), ("loss", 9, None))]  # fmt: skip
    facts = {"memory": memory}
    summary = Summary("a", None, "gpu", facts, 1, 10.0, idle, exposed, 0.0, 1.0, launches, {}, rows)
    wall = wall_of(summary)
    assert (wall.name, wall.row, wall.over_ms) == (WALLS[figures], "mlp:F", 3)
    assert {"memory": "96.0%", "host": "20.0% with 500", "exchange": "exposed"}.get(
        wall.name, "mlp:F"
    ) in wall.why
    summary.facts["memory"] = 0.99
    assert wall_of(summary).name == "memory" and wall_of(Summary("a", None, "cpu", {}, 1, 10.0)) is None


def test_an_eager_backward_is_the_segments_of_the_forward_by_sequence_numbers(tmp_path):
    trace = KinetoTrace(step_us=1000)
    trace.range("attn:F", 10, 30)
    trace.operation("aten::t", 11, 12, sequence=41)
    trace.range("mlp:F", 40, 60)
    trace.operation("aten::mm", 41, 50, sequence=41)  # has the node: what came before only saw the number
    trace.operation("aten::silu", 51, 55, sequence=42)
    trace.operation("aten::add", 70, 75, sequence=43)
    name = "autograd::engine::evaluate_function: "
    trace.operation(f"{name}AddBackward0", 100, 110, BACKWARD, sequence=43, forward_tid=1)
    trace.launch("add", 105, 200, 210, BACKWARD)
    trace.operation(f"{name}SiluBackward0", 120, 140, BACKWARD, sequence=42, forward_tid=1)
    trace.operation("SiluBackward0", 121, 139, BACKWARD, sequence=42, forward_tid=1)
    trace.operation("aten::silu_backward", 122, 138, BACKWARD, sequence=60)
    trace.launch("silu_backward", 125, 220, 240, BACKWARD)
    trace.operation(f"{name}MmBackward0", 150, 170, BACKWARD, sequence=41, forward_tid=1)
    trace.launch("gemm", 155, 250, 280, BACKWARD)
    summary = read(trace, tmp_path)
    assert times_of(summary) == {"mlp:B": 0.05, "(no segment):": 0.01}


def test_a_kernel_between_steps_or_without_a_launch_is_no_part_of_a_segment(tmp_path):
    trace = two_steps()
    trace.launch("validation", 950, 1010, 1040)
    trace.activity("kernel", "stray", 1050, 1060, 999_999)
    summary = read(trace, tmp_path)
    times = times_of(summary)
    assert (times["(between steps):"], times["(unknown):"]) == (0.015, 0.005)
    assert summary.notes == ["(unknown): kernels whose launch is not in the trace"]
    assert summary.idle == pytest.approx(1 - 1440 / 1900)


def test_two_traces_are_compared(tmp_path, capsys):
    one, other = two_steps(), two_steps()
    other.launch("triton_new", 230, 650, 690)
    words = [str(t.write(tmp_path / n, FACTS)) for t, n in ((one, "a.json"), (other, "b.json.gz"))]
    traces = f"trace={','.join(words)}"
    found = document_of(main, capsys, traces)
    assert [trace["trace"] for trace in found["traces"]] == words
    new = {"name": "triton_new", "first": None, "second": 0.02, "difference": 0.02}
    assert found["comparison"]["kernels"][0] == new
    rows = {row["name"]: row for row in found["comparison"]["figures"] + found["comparison"]["segments"]}
    assert rows["launches"]["difference"] == 0.5
    assert rows["optimizer:update"]["difference"] == pytest.approx(0.02)
    main([traces, "kernels=1"])
    out = capsys.readouterr().out
    assert "triton_new" in out and "+0.020" in out and "nvjet" not in out


def test_the_text_says_all_of_a_step(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    floors = [{"attn": (0.08, 0.0, 0.1)}]
    path = two_steps().write(tmp_path / "a.json", {**FACTS, "floors": floors})
    main([f"trace={path}", "tracelens=false"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[1:6] == [
        "steps 10 to 11, rank 0 of 2, NVIDIA H100 80GB HBM3; all times per step",
        "step 0.950 ms, GPU idle 26.3%",
        "communication 0.100 ms exposed, 0.050 ms hidden",
        "host 0.008 ms in 4 launches",
        "busy compute 0.600 ms, copy 0.150 ms, other 0.000 ms",
    ]
    assert lines[6] == "wall: exchange, communication is exposed for 10.5% of the step"
    rows = {"attn F 1 0.100 10.5% 0.000 0.080 1.25", "attn F nvjet_tst_128x256 1 0.100"}
    rows |= {"attn W 1 0.200 21.1% 0.000 0.100 2.00", "gradients sum 1 0.150 15.8% 0.150 - -"}
    assert rows <= {" ".join(line.split()) for line in lines}


def trace_of_a_cpu():
    trace = KinetoTrace(step_us=100)
    trace.range("attn:F", 10, 60)
    trace.operation("aten::mm", 15, 50)
    return trace


def test_a_trace_of_a_cpu_has_no_columns_of_a_gpu(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    path = trace_of_a_cpu().write(tmp_path / "a.json", FACTS)
    main([f"trace={path}", "tracelens=false"])
    out = capsys.readouterr().out
    assert re.search(r"^segment +part +calls +ms +of step$", out, re.MULTILINE)
    assert "floor" not in out and "beyond its operations is Python" in out
    gpu = two_steps().write(tmp_path / "b.json", FACTS)
    main([f"trace={path},{gpu}", "tracelens=false"])
    out = capsys.readouterr().out
    assert "operations and kernels that differ most" in out and "exposed communication ms" in out


def test_ranges_of_process_groups_are_none_of_segments(tmp_path):
    trace = trace_of_a_cpu()
    for start in (5, 8, 11):  # under way at once, and longer than what surrounds their start
        trace.range("gloo:send", start, start + 80)
    summary = read(trace, tmp_path)
    times = times_of(summary)
    assert "gloo:send" not in times and min(times.values()) >= 0 and times["attn:F"] == 0.05
    assert sum(times.values()) == pytest.approx(summary.step_ms)


def test_communication_is_known_by_name():
    of_peers = [
        "ncclDevKernel_AllGather_RING_LL", "void rcclGenericKernel<1, false>", "pull_kernel",
        "Memcpy PtoP (Device -> Device)", "void deep_ep::intranode::dispatch<8, 768, 8192>",
    ]  # fmt: skip
    names = dict.fromkeys(of_peers, True)
    names |= dict.fromkeys(["_sum_kernel", "Memcpy DtoD (Device -> Device)", "triton_poi_fused_add"], False)
    assert {n: is_communication(Activity(n, "kernel", 0, 1, "0", None)) for n in names} == names


def profile(run, *ranks):
    for rank in ranks:
        two_steps().write(run / "profile" / f"rank{rank}.trace.json.gz", FACTS)
    return run


def test_other_ranks_are_named_where_none_was_asked_for(tmp_path, capsys):
    profile(tmp_path, 0, 2, 3)
    (tmp_path / "profile" / "rank1.memory.pickle").touch()
    note = (
        "there are traces of more ranks, 2, 3; rank=2 shows one of them, and ranks=all joins their exchanges"
    )
    for words, expected in (((), True), (("rank=0",), False)):
        found = document_of(main, capsys, f"run={tmp_path}", *words, "tracelens=false")
        assert (note in found["notes"]) is expected


def test_two_runs_are_compared_by_a_rank_that_both_have(tmp_path, capsys):
    runs = [profile(tmp_path / "-".join(map(str, ranks)), *ranks) for ranks in ((0, 1), (1, 2), (0,))]
    found = document_of(main, capsys, f"run={runs[0]},{runs[1]}", "tracelens=false")
    assert [Path(each["trace"]).name for each in found["traces"]] == ["rank1.trace.json.gz"] * 2
    with pytest.raises(ConfigError, match="1-2 has rank 1, 2, .*/0 has rank 0; record the same"):
        main([f"run={runs[1]},{runs[2]}"])


REFUSED = (
    ("run=a,b ranks=all", "ranks=all joins the traces of one run=..."),
    ("", "nothing to read; use run=outputs/tiny or trace=<file>"),
    ("run=a trace=b", "use one of them"),
    ("trace=a,b,c", "3 traces are given"),
    ("trace=a rank=1", "rank=1 selects a trace of run=..."),
    ("trace=a kernels=0", "kernels=0 must be 1 or more"),
    ("run=nowhere", "run=nowhere is not a folder"),
    ("run=.", "has no trace; a run with profile.steps=[10,12] writes one"),
    ("trace=nowhere.json", "nowhere.json cannot be read (No such file"),
    ("run=one rank=3", "rank=3 has no trace in one; there are those of 0"),
    ("trace=torn.json.gz", "torn.json.gz is not a complete trace"),
    ("trace=list.json", "list.json: expected object, found array"),
    ("trace=steps.json", "has no steps (ranges named ProfilerStep#"),
    ("trace=idle.json", "has no kernel that a step launched"),
)


def test_a_trace_that_cannot_be_read_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    whole = two_steps().write(Path("one/profile/rank0.trace.json.gz")).read_bytes()
    Path("torn.json.gz").write_bytes(whole[: len(whole) // 2])
    Path("list.json").write_text("[]")
    KinetoTrace().write(Path("steps.json"))
    idle = KinetoTrace(step_us=10)
    idle.launch("validation", 20, 30, 40)
    idle.write(Path("idle.json"))
    for words, said in REFUSED:
        with pytest.raises(ConfigError) as caught:
            main(words.split())
        assert said in str(caught.value)


def script(folder, name, text):
    (folder / name).write_text(f"#!{sys.executable}\n{text}")
    (folder / name).chmod(0o755)


def test_tracelens_of_amd_is_called_where_it_is_on_path_and_no_other_command(tmp_path, monkeypatch, capsys):
    path, report = two_steps().write(tmp_path / "rank0.trace.json"), tmp_path / "rank0.tracelens.xlsx"
    script(tmp_path, "tracelens", "open('called', 'w')")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert "tracelens" not in document_of(main, capsys, f"trace={path}") and not Path("called").exists()
    command = "TraceLens_generate_perf_report_pytorch"
    script(tmp_path, command, "import sys\nprint('noise')\nopen(sys.argv[4], 'w')\n")
    main([f"trace={path}", "tracelens=false"])
    assert not report.exists() and capsys.readouterr().out
    assert document_of(main, capsys, f"trace={path}")["tracelens"] == [str(report)]
    script(tmp_path, command, "raise SystemExit('no sheet')")
    main([f"trace={path}"])
    shown = capsys.readouterr()
    assert "ended with status 1: no sheet" in shown.err and "GPU idle" in shown.out


@pytest.mark.skipif(
    shutil.which(TRACELENS) is None,
    reason="TraceLens of github.com/AMD-AGI is not installed; PyPI's package tracelens is another project",
)
def test_tracelens_of_amd_finds_the_same_times_in_a_trace(tmp_path):
    report = tracelens_report(two_steps().write(tmp_path / "rank0.trace.json"))
    timeline = zipfile.ZipFile(report).read("xl/worksheets/sheet1.xml").decode()
    figures = [float(value) for value in re.findall(r'<c r="B\d+"[^>]*><v>([\d.e-]+)</v>', timeline)]
    # ms of two steps: compute, exposed communication and copies, busy, idle, all
    assert figures[:6] == pytest.approx([1.2, 0.2, 0.0, 1.4, 0.5, 1.9])


def test_a_run_on_the_cpu_is_recorded_and_read(tmp_path, capsys):
    words = (*TINY, "run.name=tiny", "train.steps=4", "profile.steps=[2,3]", "checkpoint.enabled=false")
    trained = command(tmp_path, *words)
    assert trained.process.exitcode == 0, trained.err.read_text()
    assert "steps 2 to 3 are in" in trained.err.read_text() + trained.out.read_text()
    found = document_of(main, capsys, f"run={tmp_path / 'outputs/tiny'}")
    assert (found["on"], found["num_steps"], found["idle"]) == ("cpu", 2, None)
    names = {(s["segment"], s["part"]) for s in found["segments"]}
    assert {("attn", "F"), ("attn", "B"), ("moe_experts", "B"), ("optimizer", "update")} <= names
    assert sum(s["ms"] for s in found["segments"]) == pytest.approx(found["step_ms"], rel=0.02)


def test_a_small_file_of_very_many_events_is_refused_before_they_take_memory(tmp_path):
    path = tmp_path / "a.json.gz"
    path.write_bytes(gzip.compress(b'{"traceEvents": [' + b"{}," * 20_000_000 + b"{}]}"))
    assert path.stat().st_size < 200_000
    tracemalloc.start()
    with pytest.raises(ConfigError, match="more events than a profiler writes in 60,000,021 bytes"):
        read_trace(path)
    assert tracemalloc.get_traced_memory()[1] < 5 * 60e6
    tracemalloc.stop()
