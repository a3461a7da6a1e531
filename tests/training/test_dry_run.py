"""The dry run of one rank of a layout: counts beside those of real ranks, and groups that are wrong."""

import functools
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from graphmoe.ops.collectives import use_groups
from graphmoe.ops.dispatch import send_plan
from graphmoe.ops.fp8_mlp import mlp, mlp_gradients
from graphmoe.plan import layout as layouts
from graphmoe.plan.experts import Load
from graphmoe.plan.layout import Layout, divisors
from graphmoe.plan.plan import plan_of
from graphmoe.runtime.dispatch import make_dispatcher
from graphmoe.runtime.ranks import Mesh, Ranks
from graphmoe.runtime.torch_compat import FakeTensorMode, fake_process_group
from graphmoe.segments import run_segments
from graphmoe.training.build import build
from graphmoe.training.dry_run import collectives, dry_run, run_watched
from graphmoe.training.dry_run.collectives import CollectiveLog, WrongGroup, check_experts, check_groups
from graphmoe.training.dry_run.model import BalancedAllToAll
from graphmoe.training.dry_run.report import FILE, render, verdict
from graphmoe.training.dry_run.watch import MemoryLog, StepWatch, WatchedChannels, bytes_inside
from graphmoe.training.micro_batches import micro_batches_of
from graphmoe.training.step import TrainStep
from tests.distributed.ranks import Job, selected
from tests.runs import command, config, slow_but, text_of
from tests.runtime.test_fp8_model import NUM_WEIGHTS, TRAINED
from tests.runtime.test_fp8_model import model_of as model_in_8_bits

pytestmark = pytest.mark.usefixtures("unmeasured")
# Round robin over an expert on each rank sends each token to two ranks, as the dry run assumes.
WORDS = (
    "model.num_dense_layers=1", "model.mtp_depth=1", "model.top_k=2", "model.aux_loss=micro_batch",
    "model.aux_loss_coef=0.1", "moe.force_balance=true", "precision.compute=fp32", "train.steps=1",
    "train.global_batch_size=32", "optim.bucket_mb=0.01",
)  # fmt: skip
OF_FOUR = {
    "ep4": ("parallel.ep=4",), "tp2 ep4": ("parallel.tp=2", "parallel.ep=4"),
    "tp2 etp2": ("parallel.tp=2", "parallel.etp=2"),
    "a tied head": ("model.tie_embeddings=true", "model.vocab_size=256"),
    "pp2 ep2": ("parallel.pp=2", "parallel.ep=2", "model.num_experts=2"),
    "pp2 tp2, a tied head": ("parallel.pp=2", "parallel.tp=2", "model.tie_embeddings=true"),
    "pp4 zbv": ("parallel.pp=4", "model.num_layers=6", "pipeline.schedule=zbv"),
    "dense, pp2 tp2": (
        "parallel.pp=2", "parallel.tp=2", "model.num_experts=0", "model.mtp_depth=0",
        "moe.force_balance=false",
    ),
    "pp2 interleaved": ("parallel.pp=2", "model.num_layers=4", "pipeline.schedule=interleaved"),
}  # fmt: skip


@dataclass(frozen=True)
class RealStep:
    """The step of a dry run, on real tensors and real ranks: what it says, holds, and holds at most."""

    words: tuple[str, ...]

    def __call__(self, ranks: Ranks, folder: Path) -> tuple[list[dict[str, Any]], dict[str, int], int]:
        run = config(*WORDS, *self.words)
        plan = plan_of(run, ranks.size)
        mesh = Mesh(plan.layout)
        use_groups(mesh)
        model, optimizer = build(plan, torch.device("cpu"), mesh, make_dispatcher(plan, mesh))
        log, memory = CollectiveLog(mesh), MemoryLog()
        watch = StepWatch(log, memory, has_data=True)
        execute = optimizer.executor(run_segments)
        channels = functools.partial(WatchedChannels, watch)
        micro_batches = micro_batches_of(plan, model, execute, mesh, open_channels=channels)
        step = TrainStep(plan, optimizer, micro_batches, mesh)
        run_watched(step, watch, memory)
        use_groups(None)
        times = dict.fromkeys(("forward", "backward"), 1 if plan.pipeline else plan.num_micro_batches)
        return log.to_json(times), memory.held, memory.peak_bytes


@pytest.fixture(scope="module")
def four(request, tmp_path_factory):
    cases = {name: RealStep(OF_FOUR[name]) for name in selected(request, "case")}
    return Job(tmp_path_factory.mktemp("four"), cases, num_ranks=4).results()


def dry(*words: str) -> dict[str, Any]:
    """What a dry run finds, with the dispatcher of a CPU."""
    shares = any(word.startswith(("parallel.ep=", "parallel.etp=")) for word in words)
    return dry_run(config(*WORDS, *["moe.dispatcher=alltoall"] * shares, *words))


def of_four(name: str, rank: int, *words: str) -> dict[str, Any]:
    return dry("launch.fake_world=4", f"launch.fake_rank={rank}", *OF_FOUR[name], *words)


@pytest.mark.parametrize("rank", [0, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "case", slow_but([*OF_FOUR], "tp2 ep4", "pp2 ep2", "pp2 tp2, a tied head", "pp4 zbv")
)
def test_collectives_and_memory_are_those_of_a_real_rank(four, case, rank):
    found, (calls, state, peak) = of_four(case, rank), four[case][rank]
    assert found["collectives"] == calls and len(calls) > 3
    assert found["memory"]["state_bytes"] == {kind: size for kind, size in state.items() if size}
    assert found["memory"]["peak_bytes"] == pytest.approx(peak, rel=0.05)  # work under way keeps tensors
    assert not dist.is_initialized()


def test_ranks_that_do_not_hold_the_experts_in_their_order_are_noticed(monkeypatch):
    layout = Layout(dp=8, ep=4, etp=2)
    check_experts(layout, [0, 1, 2, 3, 4, 5, 6, 7])
    message = "rank 2 has index 1 in ep_etp, so it receives tokens for index 0 of ep, 1 of etp; "
    with pytest.raises(WrongGroup, match=f"{message}its experts are of index 1 of ep, 0 of etp"):
        check_experts(layout, [0, 2, 4, 6, 1, 3, 5, 7])
    monkeypatch.setattr(collectives, "check_order", lambda *_: None)
    for axis in ("edp", "ep", "etp", "ep_etp"):  # the layout agrees with its groups, not with dispatchers
        monkeypatch.setitem(layouts._SPANS, axis, (("pp", "edp", "etp", "ep"), layouts._SPANS[axis][1]))
    with pytest.raises(WrongGroup, match="rank 1 has index 1 in ep_etp, so it receives"):
        dry("launch.fake_world=8", "parallel.ep=2", "parallel.etp=2")


@pytest.mark.parametrize("ranks", [[0, 2, 4, 6], [1, 0, 2, 3], [0, 1]], ids=str)
def test_a_process_group_of_other_ranks_is_noticed(monkeypatch, ranks):
    with fake_process_group(8, 0):
        mesh, found = Mesh(Layout(dp=8, ep=4)), dist.get_process_group_ranks
        check_groups(mesh)
        wrong = {mesh.group("ep_etp"): ranks}
        monkeypatch.setattr(dist, "get_process_group_ranks", lambda g: wrong.get(g) or found(g))
        with pytest.raises(WrongGroup, match="the process group of ep has the ranks"):
            check_groups(mesh)


def test_tokens_that_are_sent_along_another_axis_are_noticed(monkeypatch):
    made = BalancedAllToAll.__init__

    def along_edp(self: BalancedAllToAll, mesh: Mesh, *rest: Any) -> None:
        made(self, mesh, *rest)
        self._group = mesh.group("edp")

    monkeypatch.setattr(BalancedAllToAll, "__init__", along_edp)
    with pytest.raises(WrongGroup, match=r"among ranks \[0, 4\], but the group of ep_etp is \[0, 1, 2, 3\]"):
        dry("launch.fake_world=8", "parallel.ep=4")


def calls_of(log: CollectiveLog) -> list[tuple]:
    return [(call.operation, call.axes, call.ranks, call.bytes) for call in log.counts]


def test_a_collective_of_a_group_that_no_axis_has_is_noticed():
    with fake_process_group(8, 0):
        mesh = Mesh(Layout(dp=4, tp=2))
        log = CollectiveLog(mesh)
        other, _ = dist.new_subgroups_by_enumeration([[0, 3], [1, 2], [4, 7], [5, 6]])
        with StepWatch(log, MemoryLog(), has_data=True):
            dist.all_reduce(torch.zeros(4), group=mesh.group("tp"))
            with pytest.raises(WrongGroup, match=r"\[0, 3\], which are not the group of any axis"):
                dist.all_reduce(torch.zeros(4), group=other)
    assert calls_of(log) == [("all_reduce", ("tp", "cp_tp"), (0, 1), 16)]


def test_what_an_operation_takes_for_itself_counts_while_it_runs():
    memory = MemoryLog()
    memory.hold("weights", [held := torch.zeros(256)])
    memory.borrowed(500, "forward")
    memory.saw(held, "backward")
    assert memory.peaks == {"forward": 1524, "backward": 1024}
    assert memory.peak == {"weights": 1024, "inside": 500}
    ops, x = torch.ops.graphmoe, torch.zeros(2, 6, 8)
    for op, given, num_bytes in (
        (ops.all_gather, (x, "tp", 4, 1), 4 * 4 * 96), (ops.all_gather, (x, "tp", 4, 0), 0),
        (ops.reduce_scatter, (x, "tp", 2, 1), 4 * 96),
    ):  # fmt: skip
        assert bytes_inside(op.default, given) == num_bytes
    assert bytes_inside(torch.ops.aten.add.Tensor, (x, x)) == 0


def test_weights_of_replicas_count_with_their_scales():
    ops, (T, K, D, H, G, S) = torch.ops.graphmoe, (5, 2, 32, 64, 7, 3)
    x, gate_up, down, h = (torch.zeros(size) for size in ((T, D), (4, H, D), (4, D, H // 2), (T * K, H)))
    plan = [torch.zeros(size, dtype=torch.int32) for size in ((T * K,), (T, K), (G,))]
    slots, experts = torch.zeros(T, K), torch.zeros(2, S, dtype=torch.int32)
    of_gate_up, of_down = S * 4 * H * D, S * 4 * D * H // 2
    q, s = functools.partial(torch.zeros, dtype=torch.uint8), torch.zeros
    weights = q(4, H, D), s(4, H, 1), q(4, D, H // 2), s(4, D, 1)
    fp8_gate_up, fp8_down = S * (H * D + 4 * H), S * (D * H // 2 + 4 * D)
    last = (*plan, torch.bfloat16, "rowwise")
    forward = (q(T, D), s(T, 1), *weights, slots, *last)
    dgrad = (q(T, D), s(T, 1), q(T * K, H), s(T * K, 2), *weights, slots, *last)
    for op, given, more, added in (
        (ops.grouped_mlp, (x, gate_up, down, slots, *plan, "torch"), (), of_gate_up + of_down),
        (ops.grouped_mlp_hidden, (x, gate_up, *plan, "torch"), (), of_gate_up),
        (ops.grouped_mlp_dgrad, (x, h, gate_up, down, slots, *plan, "torch"), (), of_gate_up + of_down),
        (ops.fp8_mlp_forward, forward, (None, None), fp8_gate_up + fp8_down),
        (ops.fp8_mlp_hidden, (*forward[:4], *last), (), fp8_gate_up),
        (ops.fp8_mlp_dgrad, dgrad, (None,) * 3, fp8_gate_up + fp8_down),
    ):
        without, found = bytes_inside(op.default, given), bytes_inside(op.default, (*given, *more, experts))
        assert found - without == added and bytes_inside(op.default, (*given, *more, None)) == without


@pytest.mark.slow
def test_known_scales_of_experts_in_8_bits_take_no_bytes_inside():
    found: dict[str, dict[str, int]] = {"rowwise": {}, "tensorwise": {}}
    sizes = [((64, 32), (2, 64, 32), (2, 32, 32)), ((128,), (64, 2), (2,))]

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if "fp8_mlp_" in func.name():
                found[recipe][func.name()] = bytes_inside(func, args)
            return func(*args, **(kwargs or {}))

    for recipe in found:
        with FakeTensorMode(), Watch():
            x, gate_up, down = (torch.empty(*size, dtype=torch.bfloat16) for size in sizes[0])
            plan = [torch.empty(size, dtype=torch.int32) for size in sizes[1]]
            layer = x, gate_up, down, torch.empty(64, 2), *plan
            _, *h = mlp(*layer, recipe=recipe)
            mlp_gradients(x, *h, *layer, recipe=recipe)
    assert found["rowwise"] == found["tensorwise"] and len(found["rowwise"]) == 3


def test_the_logits_of_a_fused_loss_count_as_inside():
    compiled = of_four("ep4", 0, "compile.enabled=true", "model.vocab_size=8192")["memory"]
    assert compiled["at_peak_bytes"]["inside"] == 2 * 16 * 8192 * 4


def test_what_does_not_fit_is_said_with_the_bytes():
    words = ("launch.fake_world=4", "parallel.ep=4")
    peak = dry(*words)["memory"]["peak_bytes"]
    fits, short = (dry(*words, f"launch.fake_memory_gb={(peak + by) / 2**30!r}") for by in (8, -8))
    assert fits["fits"] and "[bold]fits[/bold]" in verdict(fits) and not short["fits"]
    said, text = f"DOES NOT FIT[/bold]: the peak is 0.00 GiB ({peak:,} bytes)", verdict(short)
    assert said in text and "recompute=all" in text and "share" not in text
    symm = dry(*words, "moe.dispatcher=symm", "moe.balance=replicas", "launch.fake_memory_gb=1.025e-4")
    room = symm["card_bytes"] - sum(symm["memory"]["state_bytes"].values())
    assert -symm["memory"]["state_bytes"]["shared"] < room < 0  # a smaller batch shares less
    assert "activations and 0.00 GiB that ranks share" in verdict(symm)
    assert "no batch is small enough: raise parallel.pp" in verdict(dry(*words, "launch.fake_memory_gb=1e-6"))


@pytest.mark.slow
def test_the_command_writes_a_report_and_leaves_the_folder_free(tmp_path):
    words = ["model=tiny", "launch.fake_world=16", "parallel.ep=4", "compile.enabled=false"]
    words += ["moe.dispatcher=alltoall", "graph.scope=none"]
    for _ in range(2):
        run = command(tmp_path, *words, "format=json")
        assert run.process.exitcode == 0, run.err.read_text()
    document, outputs = json.loads(run.out.read_text()), tmp_path / "outputs"
    assert document == json.loads((outputs / "tiny" / FILE).read_text())
    assert [*outputs.iterdir()] == [outputs / "tiny"] and not (outputs / "tiny/resolved.yaml").exists()
    assert document["global_batch_size"] == 64 and document["compute"] == "bf16"
    assert document["groups"]["ep"] == [0, 1, 2, 3] and document["groups"]["edp"] == [0, 4, 8, 12]
    assert "│ forward  │ all_to_all     │ ep    │ 0..3" in text_of(render(document), width=80)
    in_fp8 = text_of(render({**document, "fp8": "rowwise"}), width=300)
    assert document["fp8"] == "none" and "; bf16, products in 8 bits (rowwise), experts balanced" in in_fp8


def test_the_default_batch_grows_with_the_layout_and_no_other_does():
    for words, batch in {
        "": 16, "launch.fake_world=64 parallel.tp=2": 64, "launch.fake_world=4": 16,
        "launch.fake_world=64 parallel.pp=4": 16 * 2 * 16,  # four for each rank of a pipeline
        "launch.fake_world=64 parallel.pp=4 pipeline.microbatches=5": 16 * 2 * 5,
        "launch.fake_world=32 parallel.pp=8 model.num_layers=8": 4 * 2 * 32,
        "launch.fake_world=4 train.global_batch_size=24": 24,
    }.items():  # fmt: skip
        assert config("train.global_batch_size=16", *words.split()).train.global_batch_size == batch, words


def test_rows_are_divided_evenly_among_ranks():
    layout, loads = Layout(dp=16, ep=4, etp=2), (Load(256, 256), Load(494, 768))
    with fake_process_group(16, 0):
        few, many = (BalancedAllToAll(Mesh(layout), 8, load) for load in loads)
    assert (few.rows_P, many.rows_P, many.expert_rows) == ([32] * 8, [62] * 6 + [61] * 2, 768)


def test_rows_of_uneven_shares_fit_their_plan_both_ways():
    for num_experts, ep in ((n, ep) for n in (384, 256, 160, 128) for ep in divisors(n, most=64)):
        with fake_process_group(ep, 0):
            layout, load = Layout(dp=ep, ep=ep), Load(100 * min(8, ep), 800)
            dispatcher = BalancedAllToAll(Mesh(layout), num_experts, load)
            with FakeTensorMode(allow_fallback_kernels=False):
                h, experts = torch.empty(100, 4, requires_grad=True), torch.empty(100, 8, dtype=torch.int64)
                plan = send_plan(experts, num_experts, ep, 1)
                rows, _, _, *counts = dispatcher.dispatch(h, h.new_empty(100, 8), experts, *plan)
                dispatcher.combine(rows, *plan, *counts).sum().backward()
        assert len(rows) == 100 * min(8, ep) and h.grad.shape == h.shape


def test_a_dry_run_takes_uneven_rows_and_names_unused_keys(caplog):
    words = "launch.fake_world=6", "parallel.ep=6", "model.num_experts=24", "model.top_k=5"
    more = "train.global_batch_size=12", "precision.fp8_wgrad=bf16"
    calls = dry(*words, *more)["collectives"]  # 32 tokens, each to 5 of 6 ranks
    assert caplog.messages.count("precision.fp8_wgrad=bf16 has no effect with precision.fp8=none") == 1
    assert {"forward", "backward"} == {call["phase"] for call in calls if call["shape"][:1] == (160,)}


PIPELINES = {
    "a large head": ("model.vocab_size=16384", "data.seq_len=4"),
    "zbv, compiled": ("pipeline.schedule=zbv", "compile.enabled=true", "model.num_dense_layers=0"),
    "no MoE layers but one of later tokens": ("model.num_dense_layers=8", "model.mtp_depth=1"),
    "beside ep": ("parallel.ep=2", "launch.fake_world=8", "train.global_batch_size=24"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PIPELINES)
def test_the_rank_that_is_shown_holds_the_most(name):
    words = (
        "launch.fake_world=4", "parallel.pp=4", "model.num_layers=8", "model.mtp_depth=0",
        "pipeline.microbatches=6", "train.global_batch_size=12", *PIPELINES[name],
    )  # fmt: skip
    shown = dry(*words)
    place, stage = shown["pipeline"]["pp_rank"], shown["world"] // 4
    peaks = [dry(*words, f"launch.fake_rank={rank * stage}")["memory"]["peak_bytes"] for rank in range(4)]
    assert shown["memory"]["peak_bytes"] == peaks[place] >= 0.97 * max(peaks)
    assert shown["rank"] == place * stage


def test_a_message_outside_of_the_pipeline_is_noticed():
    with fake_process_group(8, 2):
        mesh = Mesh(Layout(dp=4, pp=2))
        log = CollectiveLog(mesh)
        right, wrong = (dist.new_group(ranks) for ranks in ([2, 6], [2, 4]))
        with StepWatch(log, MemoryLog(), has_data=True):
            dist.isend(torch.zeros(4), 6, group=right)
            dist.irecv(torch.zeros(2), 6, group=right)
            with pytest.raises(WrongGroup, match=r"is among ranks \[2, 4\], but the pipeline has \[2"):
                dist.isend(torch.zeros(4), 4, group=wrong)
    assert calls_of(log) == [("send", ("pp",), (2, 6), 16), ("receive", ("pp",), (6, 2), 8)]


def test_a_long_dry_run_of_a_pipeline_says_where_it_is(monkeypatch, caplog):
    monkeypatch.setattr("graphmoe.config.progress.EVERY_S", 0.001)
    caplog.set_level("INFO")
    dry("launch.fake_world=2", "parallel.pp=2", "train.global_batch_size=16")
    said = [re.match("move ([0-9]+) of ([0-9]+) of the schedule ", message) for message in caplog.messages]
    moves, totals = zip(*[(int(found[1]), int(found[2])) for found in said if found], strict=True)
    assert len({*moves}) > 2 and [*moves] == sorted(moves) and {*totals} == {8}  # F and B of 4 micro-batches


PAIRS = (
    "launch.fake_world=4 parallel.ep=2 train.global_batch_size=36 compile.enabled=true moe.dispatcher=symm "
    "pipeline.ep_overlap=true model.mtp_depth=0 pipeline.costs=[dense:1,moe:2,loss:3]"
)
LONG = "1f1b", "zbv compile.enabled=true", "gpipe", *(f"{n} {PAIRS}" for n in ("zb1p", "zbv", "dualpipe_v"))


@pytest.mark.parametrize("name", slow_but(LONG, "1f1b"))
def test_a_long_step_needs_what_its_first_micro_batches_show(monkeypatch, name):
    sizes = "launch.fake_world=2", "parallel.pp=2", "model.num_layers=4", "train.global_batch_size=18"
    asked = *sizes, *f"pipeline.schedule={name}".split()
    short = dry(*asked)
    monkeypatch.setattr("graphmoe.training.dry_run.shortened", lambda plan, *_: plan)
    whole = dry(*asked)
    num_run = 9 if name == "gpipe" else 5
    assert (short["micro_batches_run"], whole["micro_batches_run"], short["micro_batches"]) == (num_run, 9, 9)
    assert short["memory"] == whole["memory"] and short["collectives"] == whole["collectives"]
    assert (f"{num_run} of the 9 micro-batches were run" in text_of(render(short))) == (num_run < 9)


def test_a_stage_of_dense_layers_shares_as_much_memory_as_others():
    words = "launch.fake_world=4", "parallel.pp=2", "parallel.ep=2", "moe.dispatcher=symm"
    layout = "model.num_layers=2", "model.num_dense_layers=1", "model.mtp_depth=0", "pipeline.layout=Et|tL"
    found = [dry(*words, *layout, f"launch.fake_rank={rank}")["memory"]["state_bytes"] for rank in (0, 2)]
    assert found[0]["shared"] == found[1]["shared"] > 0


def test_the_report_names_the_stages_of_the_rank():
    words = "parallel.pp=2", "pipeline.layout=Ett|mL", "launch.fake_rank=3"
    text = text_of(render(dry("launch.fake_world=4", *words)))
    assert "rank 1 of the pipeline: stage 1 (mL) of Ett|mL, pipeline.schedule=1f1b" in text
    assert "launch.fake_rank=2*n shows rank n" in text and re.search("│ send +│ pp", text)


@pytest.mark.slow
@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_weights_in_8_bits_are_counted_apart_from_activations(compute):
    memory = dry_run(config(*TRAINED, "launch.fake_world=1", f"precision.compute={compute}"))["memory"]
    named = model_in_8_bits().named_parameters()
    of_layers = [w for name, w in named if name.startswith("layers") and "gate.w" not in name]
    sizes = [w.shape for w in of_layers if w.dim() > 1]
    assert len(sizes) == NUM_WEIGHTS
    # Along either axis: a byte for each number, four for the scale of each row and of each column.
    # In bf16 the numbers lie where the weights lay.
    beside = 2 * (compute == "fp32")
    found = sum(beside * size.numel() + 4 * size[:-2].numel() * sum(size[-2:]) for size in sizes)
    assert memory["at_peak_bytes"]["forms"] == found and memory["peak_in"] != "forms"


@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.slow), 8])
def test_delayed_scales_are_exchanged_once_a_step_by_the_ranks_of_a_stage(world):
    words = (f"launch.fake_world={world}", "precision.fp8=tensorwise", "train.global_batch_size=8")
    found = dry_run(config(*TRAINED, *words, f"parallel.pp={min(world, 2)}", "launch.fake_rank=0"))
    calls = [call for call in found["collectives"] if call["operation"] == "all_reduce"]
    shapes = [(call["shape"], call["count"]) for call in calls if "stage" in call["axes"]]
    assert shapes == ([] if world == 1 else [((2 * 8, 4), 1)])  # of a dense layer and the embedding
