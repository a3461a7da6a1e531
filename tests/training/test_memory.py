"""Memory of whole ranks: against dry runs and flat buffers, along pipelines, and what is refused."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import graphmoe.runtime.dispatch
from graphmoe.model.build import build_model
from graphmoe.model.sizes import host_bytes, rank_weights, state_bytes
from graphmoe.ops.delta_net import launches
from graphmoe.ops.symm.peers import Region, Sizes
from graphmoe.optim.flat_buffers import families_of
from graphmoe.optim.rule import ADAMW
from graphmoe.optim.storage import kept_of
from graphmoe.plan.layout import Layout
from graphmoe.plan.pipeline.check import peak_activations
from graphmoe.plan.pipeline.layouts import all_pieces
from graphmoe.plan.pipeline.schedules import schedule_of
from graphmoe.plan.plan import plan_of
from graphmoe.runtime.dispatch import close_dispatcher, make_dispatcher, open_dispatcher
from graphmoe.runtime.ranks import Mesh
from graphmoe.runtime.torch_compat import fake_process_group
from graphmoe.training.dry_run import dry_run
from graphmoe.training.memory import memory_of_places
from tests.ops.ahead_of_time import launches_of
from tests.plan.costs.test_activations import HYBRID, MODEL
from tests.runs import config, slow_but

pytestmark = pytest.mark.usefixtures("unmeasured")
LARGER = ("model.hidden_size=512", "model.expert_ffn_size=320", "model.num_layers=3", "optim.bucket_mb=1")
FP8, SEPARATE = "precision.fp8=rowwise", "passes.disabled=[fuse_experts]"
SYMM = ("launch.fake_world=2", "parallel.ep=2", "moe.dispatcher=symm", "moe.balance=none")
REPLICAS = (*SYMM[:-1], "moe.balance=replicas")
FEW_SLOTS = (*REPLICAS, "moe.replica_slots=1")
TWO = "launch.fake_world=2"
PEAKS = {
    "one rank": (), "all again": ("recompute.all=true",), "ep": (TWO, "parallel.ep=2"),
    "tp": (TWO, "parallel.tp=2"), "8 bits": (FP8,), "8 bits, ep": (FP8, *SYMM), "replicas": REPLICAS,
    "8 bits, replicas": (FP8, *REPLICAS), "a state": HYBRID, "a state, tp": (*HYBRID, TWO, "parallel.tp=2"),
}  # fmt: skip


def memory_of(*words: str, ranks: int = 1):
    run = config(*MODEL, *words)
    return memory_of_places(plan_of(run, ranks), on_nvidia=False)


@pytest.mark.parametrize("words", slow_but(PEAKS, "8 bits, replicas"))
def test_the_total_is_near_the_peak_of_a_dry_run(words):
    (memory,) = memory_of(*LARGER, *words, ranks=1 + (TWO in words))
    found = dry_run(config(*MODEL, *LARGER, *words))["memory"]
    forms, shared = (found["at_peak_bytes"].get(kind, 0) for kind in ("forms", "shared"))
    assert (memory.buffers["fp8_weights"], memory.buffers["dispatch"]) == (forms, shared)
    peak = found["peak_bytes"] - forms - shared
    apart = memory.buffers["communication"] + forms + shared  # libraries' buffers are in no dry run
    assert memory.total - apart == pytest.approx(peak, rel=0.05)


class Made(TorchDispatchMode):
    """Bytes of all storages that are made."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: dict[int, torch.Tensor] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.tensors.setdefault(result.untyped_storage()._cdata, result)
        return result

    @property
    def num_bytes(self) -> int:
        return sum(tensor.untyped_storage().nbytes() for tensor in self.tensors.values())


@pytest.mark.parametrize("heads", [(2, 4), (4, 4)])
def test_the_backward_of_states_works_in_what_its_kernels_allocate(heads):
    (H, V), (B, S, K, W) = heads, (2, 200, 32, 64)
    (memory,) = memory_of(
        *HYBRID, f"data.seq_len={S}", f"train.micro_batch_size={B}", f"train.global_batch_size={B}",
        f"model.linear_key_heads={H}", f"model.linear_value_heads={V}", f"model.linear_value_head_dim={W}",
        "model.expert_ffn_size=16", "model.num_experts=1", "model.top_k=1", "model.num_dense_layers=0",
    )  # fmt: skip
    sizes = (V, W), (H, K), (H, K), (V, W)
    d_out, q, k, v = (torch.empty(B, S, *each, dtype=torch.bfloat16, device="meta") for each in sizes)
    g, beta = (torch.empty(B, S, V, device="meta") for _ in range(2))
    with Made() as made:
        launches_of("", lambda: launches.backward(d_out, q, k, v, g, beta, None))
    # and gradients of the result, of its gate, and of what the layer adds to
    beside = 2 * d_out.numel() * 2 + 3 * B * S * 128 * 2
    assert memory.buffers["working"] == pytest.approx(made.num_bytes + beside, rel=0.01)


def test_a_stage_without_a_loss_needs_the_gradient_of_its_embedding_as_in_a_dry_run():
    words = (
        *LARGER, "model.num_layers=2", "model.num_dense_layers=2", "model.vocab_size=65536",
        "launch.fake_world=2", "parallel.pp=2", "train.global_batch_size=4", "launch.fake_rank=0",
    )  # fmt: skip
    first, _ = memory_of(*words, ranks=2)
    found = dry_run(config(*MODEL, *words))["memory"]
    gradient = 4 * 65536 * 512
    beside_state = found["peak_bytes_by_phase"]["backward"] - sum(found["state_bytes"].values())
    assert gradient < beside_state < 1.5 * gradient
    assert first.total - first.buffers["communication"] == pytest.approx(found["peak_bytes"], rel=0.02)
    of_layers, *_ = memory_of(*words, "graph.scope=layer", ranks=2)
    assert of_layers.buffers["graph_pool"] < first.buffers["working"] > 0.7 * gradient  # no graph has it


@pytest.mark.slow
@pytest.mark.parametrize("again", [(), ("recompute.all=true",)])
def test_each_slot_of_replicas_takes_the_weights_of_an_expert_as_in_a_dry_run(again):
    """Fewer slots than a rank owns experts leave the room for rows as it is."""
    found = []
    for slots in (1, 3):
        words = (*LARGER, *REPLICAS, f"moe.replica_slots={slots}", *again)
        (memory,), dry = memory_of(*words, ranks=2), dry_run(config(*MODEL, *words))["memory"]
        alone = dry["peak_bytes"] - dry["state_bytes"]["shared"]
        found.append((memory.buffers["working"], dry["at_peak_bytes"]["inside"], alone))
    of_an_expert = 2 * 3 * 512 * 320
    more = [after - before for before, after in zip(*found, strict=True)]
    assert more == pytest.approx([2 * of_an_expert] * 3, rel=1e-4)  # and the experts' numbers


class Recorder:
    """Peers that keep how many bytes they were asked to share."""

    rank, size, num_bytes = 0, 2, 0

    def __init__(self, replicas: "Recorder | None" = None) -> None:
        self.replicas = replicas

    def reserve(self, sizes: Sizes | int) -> None:
        self.num_bytes = sizes if isinstance(sizes, int) else Region.with_room_for(sizes, 2).num_bytes


SHARED = {
    "rows": SYMM, "replicas": REPLICAS, "few slots": FEW_SLOTS, "8 bits": (*REPLICAS, FP8),
    "few slots, captured": (*FEW_SLOTS, "graph.scope=layer"), "separate": (*REPLICAS, SEPARATE),
}  # fmt: skip


@pytest.mark.parametrize("words", slow_but(SHARED, "separate"))
def test_memory_shared_for_dispatch_is_what_a_run_asks_for(words, monkeypatch):
    peers = Recorder(Recorder())
    monkeypatch.setattr(graphmoe.runtime.dispatch, "make_peers", lambda mesh, device: peers)
    plan = plan_of(config(*MODEL, *words), 2)
    with fake_process_group(2, 0):
        open_dispatcher(plan, Mesh(plan.layout), torch.device("cuda"))
    close_dispatcher()
    asked = peers.num_bytes, peers.replicas.num_bytes
    if plan.captured:  # a graph may have to pull the weights of all own experts
        of_expert = 3 * plan.model.hidden_size * plan.model.expert_ffn_size
        assert asked[1] > plan.model.num_experts // 2 * of_expert * plan.dtype.itemsize
    assert (asked[1] > 0) == (words != SYMM) and asked[0] > 0
    assert dry_run(config(*MODEL, *words))["memory"]["state_bytes"]["shared"] == sum(asked)
    assert SEPARATE in words or memory_of(*words, ranks=2)[0].buffers["dispatch"] == sum(asked)


OF_EXPERTS = ("precision.fp8_products=[experts]", "precision.fp8_skip_layers=[-1]")


@pytest.mark.parametrize("words", [(), OF_EXPERTS])
def test_weights_in_8_bits_are_two_forms_of_each_matrix_beside_or_in_it(words):
    run = config(*MODEL, *LARGER, FP8, *words)
    weights = rank_weights(run.model, Layout(), [all_pieces(run.model.num_layers, 0)])
    expert = [w for w in weights if w.dim() == 3]
    others = {(1024, 512), (8, 512)}  # vocabulary and router
    dense = [w for w in weights if w.dim() == 2 and tuple(w.shape) not in others]
    assert len(expert) == 4 and len(dense) == 3 * 4 + 2 + 2 * 2
    chosen = expert[:2] if words else [*expert, *dense]
    scales = sum(4 * (w.shape[0] if w.dim() == 3 else 1) * sum(w.shape[-2:]) for w in chosen)
    beside = sum(2 * w.numel() for w in chosen) + scales
    given = (*LARGER, FP8, *words)
    in_the_place_of_bf16, of_a_part = memory_of(*given), memory_of(*given, "launch.fake_world=2", ranks=2)
    for memory, num_bytes in (
        (memory_of(*given, "precision.compute=fp32"), beside), (in_the_place_of_bf16, scales),
        (of_a_part, beside), (memory_of(*LARGER), 0),
    ):  # fmt: skip
        assert memory[-1].buffers["fp8_weights"] == num_bytes


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb1p", "interleaved", "zbv", "v_half", "v_min"])
def test_activations_in_flight_are_those_of_the_schedules_table(schedule):
    words = (
        "launch.fake_world=null", "launch.nproc=4", "parallel.pp=4", f"pipeline.schedule={schedule}",
        "train.global_batch_size=32", "model.num_layers=8", "model.num_dense_layers=0",
    )  # fmt: skip
    run = config(*MODEL, *words)
    run.pipeline.layout = "Ett|tt|tt|ttL" if schedule in ("gpipe", "1f1b", "zb1p") else "Et|t|t|t|t|t|t|tL"
    plan = plan_of(run, 4)
    places = memory_of_places(plan, on_nvidia=False)
    assert plan.pipeline is not None and len(places) == 4
    for place, peak in zip(places, peak_activations(plan.pipeline.table), strict=True):
        if place.place in (1, 2):  # all stages there are alike
            error = 0.05 if schedule_of(schedule).splits_backward else 1e-9  # a deferred wgrad holds others
            assert place.activations == pytest.approx(place.by_segment.total() * peak, error)
        assert place.activations <= place.by_segment.total() * plan.num_micro_batches


def test_lanes_of_a_captured_pipeline_have_working_memory_each():
    words = "launch.fake_world=null", "launch.nproc=2", "parallel.pp=2", "train.global_batch_size=16"
    memories = {
        scope: (*memory_of(*words, f"graph.scope={scope}", ranks=2), *memory_of(f"graph.scope={scope}"))
        for scope in ("layer", "none", "partial")
    }
    pools = {scope: [memory.buffers["graph_pool"] for memory in of] for scope, of in memories.items()}
    working = memories["layer"][0].buffers["working"]
    assert pools["layer"] == [working, 0, 0] and working > 0  # others have one lane of whole layers
    assert pools["none"] == [0, 0, 0] and pools["partial"][-1] > 0


def test_captured_segments_of_overlapped_micro_batches_are_held_twice():
    words = ("parallel.ep=2", "moe.dispatcher=symm", "moe.balance=none", "graph.scope=[attn,mlp]")
    words = ("launch.fake_world=null", "launch.nproc=2", *words)
    (plain,), (both,) = (memory_of(*words, f"pipeline.ep_overlap={on}", ranks=2) for on in ("false", "true"))
    assert both.activations - plain.activations == sum(plain.by_segment[name] for name in ("attn", "mlp")) > 0
    assert both.buffers["graph_pool"] > plain.buffers["graph_pool"]


EIGHT = ("launch.fake_world=8", "train.global_batch_size=16", "optim.bucket_mb=0.01", "compile.enabled=false")
CASES = {
    "dp": (), "bf16": ("precision.compute=bf16",), "tp, ep": ("parallel.tp=2", "parallel.ep=2"),
    "latent queries, multi-token prediction": ("model.q_lora_rank=8", "model.mtp_depth=1"),
    "grouped queries, ep": (
        "model.attention=gqa", "model.num_kv_heads=2", "model.qk_norm=true", "parallel.ep=4",
    ),
    "options of attention, tp": (
        "model.attention=gqa", "model.num_kv_heads=2", "parallel.tp=2", "model.attention_sinks=true",
        "model.attention_gate=true", "model.attention_bias=qkvo",
    ),
    "a state, tp": (
        "model.attention=gqa", "model.num_kv_heads=2", "parallel.tp=2", "model.linear_attention=delta_net",
        "model.full_every=2", "model.linear_key_heads=2", "model.linear_value_heads=4", "model.mtp_depth=1",
    ),
    "cp, etp": ("parallel.cp=2", "parallel.etp=2", "parallel.ep=2"),
    "a tied head": ("model.tie_embeddings=true", "parallel.tp=2"),
    "whole matrices": ("optim.name=muon",),
    "whole matrices, ep, bf16": ("optim.name=muon", "parallel.ep=4", "precision.compute=bf16"),
    "bf16 moments": ("optim.moment_dtype=bf16", "parallel.ep=2", "precision.compute=bf16"),
    "int8 moments, no masters": (
        "optim.moment_dtype=int8", "optim.master_dtype=bf16", "precision.compute=bf16",
    ),
    "whole matrices, int8": ("optim.name=muon", "optim.moment_dtype=int8", "parallel.ep=2"),
    "offloaded": ("optim.offload=true", "precision.compute=bf16", "parallel.ep=2"),
    "offloaded weights in fp32": ("optim.offload=true", "optim.moment_dtype=bf16"),
    "offloaded matrices, int8": (
        "optim.offload=true", "optim.name=muon", "optim.moment_dtype=int8", "precision.compute=bf16",
    ),
    "whole matrices, more ranks than experts": ("optim.name=muon", "model.num_experts=2", "model.top_k=1"),
    "shards of gradients": ("optim.grad_shard=true", "parallel.ep=4", "model.num_layers=6"),
    "shards of gradients, a tied head": (
        "optim.grad_shard=true", "parallel.ep=2", "model.tie_embeddings=true", "model.mtp_depth=2",
    ),
    "shards of weights": ("parallel.dp_shard=fsdp2", "parallel.ep=2", "precision.compute=bf16"),
    "shards of weights in pairs of ranks": (
        "parallel.dp_shard=fsdp2", "parallel.dp_shard_size=4", "parallel.ep=4", "model.num_layers=6",
    ),
    "shards of weights, turns, whole matrices": (
        "parallel.dp_shard=fsdp2", "parallel.ep=2", "optim.name=muon", "model.tie_embeddings=true",
        "compile.enabled=true", "moe.dispatcher=symm", "moe.balance=none", "pipeline.ep_overlap=true",
    ),
    "shards of gradients, whole matrices": ("optim.grad_shard=true", "optim.name=muon", "parallel.ep=2"),
    "bf16 gradients": ("optim.grad_dtype=bf16", "precision.compute=bf16", "parallel.ep=4"),
    "bf16 gradients, shards, whole matrices": (
        "optim.grad_dtype=bf16", "precision.compute=bf16", "optim.grad_shard=true", "optim.name=muon",
        "parallel.ep=2", "model.num_layers=6",
    ),
}  # fmt: skip


@pytest.mark.parametrize("words", CASES.values(), ids=CASES)
def test_state_is_what_a_dry_run_counts(words):
    run = config(*EIGHT, "model.num_dense_layers=1", *words)
    layout = Layout.of(run.parallel, 8)
    element_bytes = 2 if run.precision.compute.value == "bf16" else 4
    memory, offload = dry_run(run)["memory"], run.optim.offload
    found, moments = memory["state_bytes"], "slots" if offload else "moments"
    names = {"params": "weights", "grads": "gradients", "main_params": "main_weights", "moments": moments}
    given = {"bucket_mb": run.optim.bucket_mb, "element_bytes": element_bytes, "kept": kept_of(run.optim)}
    shared = {"grad_shard": run.optim.grad_shard, "offload": offload}
    shared["weight_places"] = plan_of(run, 8).weight_places
    projected = state_bytes(run.model, layout, **given, **shared)
    assert memory["host_bytes"] == (host_bytes(run.model, layout, **given) if offload else 0)
    if element_bytes == 4:  # the shard of the weights is the main weights
        assert projected["main_params"] == 0
    assert projected == {kind: found.get(name, 0) for kind, name in names.items()}


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
@pytest.mark.parametrize("words", [(), ("model.mtp_depth=1",), ("model.tie_embeddings=true",)])
def test_state_of_each_place_of_a_pipeline_is_that_of_its_flat_buffers(schedule, words):
    run = config(
        "launch.nproc=8", "parallel.pp=2", "parallel.ep=2", f"pipeline.schedule={schedule}",
        "train.global_batch_size=16", *words,
    )  # fmt: skip
    plan = plan_of(run, 8)
    layout = plan.layout
    for place in range(2):
        stages = tuple(plan.own_stages(place))
        with fake_process_group(8, place * 4):
            mesh = Mesh(layout)
            model = build_model(
                run.model, device="meta", dtype=torch.bfloat16, seed=None, execution=run.moe, layout=layout,
                rank=mesh.rank, dispatcher=make_dispatcher(plan, mesh), stages=stages,
            )  # fmt: skip
            families = families_of(model, mesh, run.optim.bucket_mb * 1e6 / 4, ADAMW)
        found = state_bytes(run.model, layout, stages, bucket_mb=run.optim.bucket_mb)
        assert found["moments"] == sum(8 * len(family.main) for family in families)
        shards = [family.main for family in families if family.group is not None]
        assert found["grads"] == 4 * sum(len(numbers) for numbers in (*(f.grad for f in families), *shards))
