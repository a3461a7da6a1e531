"""Private torch interfaces that the project uses, all of them, checked with torch 2.11 to 2.13 and 2.15.

Each function names its source in torch; nothing else in the project imports a private name of torch. Torch's
compilers are imported where they are called: a process that compiles nothing starts two seconds earlier.
"""

import functools
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ContextDecorator, contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.fx.experimental import proxy_tensor
from torch.numa import binding as numa_binding
from torch.utils._pytree import tree_map_only as tree_map_only
from torch.utils.checkpoint import CheckpointPolicy

_KEY_TAG, _OURS = "TORCH_COMPILE_CACHE_KEY_TAG", " graphmoe "
set_grad_enabled = torch._C._set_grad_enabled
"""The function that ``torch.no_grad`` and its like call, as a TorchFunctionMode sees it."""
make_fx = functools.partial(proxy_tensor.make_fx, decomposition_table={})
"""Without a table torch 2.15 records an alias for detach, through which a gradient would flow."""


def import_compilers() -> None:
    """Import the compilers, which takes seconds that would else count as those of the first unit.

    The hashes of torch's and Triton's files, parts of the keys of all compiled code, take another half second
    of SHA-256, which lets Python go on: a thread computes them. (torch/_inductor/codecache.py: torch_key,
    CacheBase.get_system.)
    """
    import torch._inductor.compile_fx  # noqa: F401
    from torch._inductor.codecache import torch_key
    from torch._inductor.runtime.triton_compat import HAS_TRITON, triton_key

    def hash_files() -> None:
        torch_key()
        if HAS_TRITON:
            triton_key()

    threading.Thread(target=hash_files, name="hash of compilers", daemon=True).start()


def fake_mode() -> FakeTensorMode:
    """Return a mode for tensors without data; torch's compile caches refuse one that has no ShapeEnv."""
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    return FakeTensorMode(shape_env=ShapeEnv())


def lazy_graph_modules() -> ContextDecorator:
    """Let graphs that are traced inside get their Python code only when they are run.

    Most graphs on the way to a unit's code are only read and cut, and their code took a sixth of
    a run that traces and compiles nothing.
    Inductor does the same with its own. (torch/fx/_lazy_graph_module.py.)
    """
    return cast(ContextDecorator, _use_lazy_graph_module(True))


def joint_graph(forward: fx.GraphModule, fakes: Sequence[Tensor]) -> fx.GraphModule:
    """Trace forward and backward of a functional graph, in the operations that Inductor compiles.

    Inputs are ``primals_*``, one for each fake, and ``tangents_*``, one for each output that requires
    a gradient; outputs are those of the forward, then a gradient or None for each input. Node metadata
    of the forward survives. (torch/_functorch/aot_autograd.py, used by torch's own higher order ops.)
    """
    from torch._functorch.aot_autograd import aot_export_joint_simple
    from torch._inductor.decomposition import select_decomp_table

    mode: FakeTensorMode = fakes[0].fake_mode  # type: ignore[attr-defined]

    def run(*tensors: Tensor) -> Any:
        return fx.Interpreter(forward).run(*tensors)

    with mode, torch.enable_grad(), fx.traceback.preserve_node_meta():
        graph = aot_export_joint_simple(
            run, tuple(fakes), trace_joint=True, decompositions=select_decomp_table()
        )
    assert isinstance(graph, fx.GraphModule)
    return graph


def partition(
    joint: fx.GraphModule, num_outputs: int, static_inputs: Sequence[int]
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Cut a joint graph into forward and backward so that the fewest bytes are kept between them.

    The backward computes again what is cheap, and what `mark_recomputed` marked. ``static_inputs``, the
    parameters, stay in memory anyway. (torch/_functorch/partitioners.py, the cut of torch.compile.)
    """
    from torch._functorch.compile_utils import fx_graph_cse
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    joint.graph = fx_graph_cse(joint.graph)  # torch 2.15 does not merge forward with backward
    with _without_generator_states():
        return min_cut_rematerialization_partition(
            joint, None, num_fwd_outputs=num_outputs, static_lifetime_input_indices=list(static_inputs)
        )


@contextmanager
def _without_generator_states() -> Iterator[None]:
    """Keep partitions inside from saving the random generator's state for attention, tagged as random.

    A graph that reads and sets it can't be captured. `draws_random_numbers` refuses what does draw.
    """
    from torch._functorch import partitioners

    name = "has_recomputable_rng_ops"
    saved = getattr(partitioners, name)
    setattr(partitioners, name, lambda graph: False)
    try:
        yield
    finally:
        setattr(partitioners, name, saved)


def mark_recomputed(node: fx.Node) -> None:
    """Make `partition` compute a node of a joint graph's forward again in the backward."""
    node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE


def mark_kept(node: fx.Node) -> None:
    """Make `partition` keep a node of a joint graph's forward, if the backward needs it."""
    node.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def remove_marks(graph: fx.Graph) -> None:
    """Take the marks off again: where a graph without gradients is compiled, torch would act on them too."""
    for node in graph.nodes:
        node.meta.pop("recompute", None)


def is_recomputed(node: fx.Node) -> bool:
    """Return whether `mark_recomputed` marked the node, or the one that it is a copy of."""
    return node.meta.get("recompute") is CheckpointPolicy.MUST_RECOMPUTE


def draws_random_numbers(target: Any, arguments: Sequence[Any], named: Mapping[str, Any]) -> bool:
    """Return whether an operation's call draws random numbers: not an attention without dropout."""
    if torch.Tag.nondeterministic_seeded not in getattr(target, "tags", ()):
        return False
    names = [argument.name for argument in target._schema.arguments]
    given = {**dict(zip(names, arguments, strict=False)), **named}
    return "dropout_p" not in names or bool(given.get("dropout_p", 0.0))


def compile_inference(
    graph: fx.GraphModule, fakes: Sequence[Tensor], mode: FakeTensorMode
) -> Callable[..., Any]:
    """Compile a graph without gradients by Inductor, through torch's FX and AOTAutograd caches.

    Pointwise kernels of a graph that changes its inputs are not timed: Inductor would run the candidates
    on copies of what they change, on the host if copies would raise the device's peak of memory, which
    takes minutes for an optimizer's buffers. (torch/_inductor/compile_fx.py: what
    ``torch._inductor.compile`` calls; copy_args_to_cpu_if_needed in
    torch/_inductor/runtime/triton_heuristics.py.)
    """
    from torch._inductor.compile_fx import compile_fx

    changes = any(map(_changes_tensors, graph.graph.nodes))
    patches = {"triton.autotune_pointwise": False} if changes else {}
    with torch.no_grad(), torch._guards.tracing(torch._guards.TracingContext(mode)):
        return compile_fx(graph, list(fakes), config_patches=patches)  # type: ignore[return-value]


def _changes_tensors(node: torch.fx.Node) -> bool:
    if not isinstance(node.target, torch._ops.OpOverload) or not node.target._schema.is_mutable:
        return False
    changed: Any = node.args[0]
    return node.target is not torch.ops.aten.copy_.default or changed.meta["val"].numel() > 1


def graphs_to_bytes(graphs: Any) -> bytes:
    """Store an object with graphs of fake tensors, for `graphs_from_bytes`. (torch/fx/_graph_pickler.py.)

    *Raises* errors of many types where something in it cannot be stored.
    """
    from torch.fx._graph_pickler import GraphPickler, Options

    return GraphPickler.dumps(graphs, Options(ops_filter=None))


def graphs_from_bytes(content: bytes) -> Any:
    """Make the object again, its fake tensors of one new mode. Runs code: for files of ours alone."""
    from torch.fx._graph_pickler import GraphPickler

    return GraphPickler.loads(content, fake_mode())


def tensors_of(module: nn.Module) -> dict[str, tuple[dict[str, Any], str]]:
    """Parameters and buffers by name: the dictionary that a module has each in, and its key there.

    (torch/nn/modules/module.py: ``_parameters`` and ``_buffers``, which an attribute's lookup reads.)
    """
    return {
        f"{prefix}.{key}".lstrip("."): (holder, key)
        for prefix, part in module.named_modules()
        for holder in (part._parameters, part._buffers)
        for key, tensor in holder.items()
        if tensor is not None
    }


def custom_function_of(node: Any) -> type | None:
    """The custom ``torch.autograd.Function`` behind a node of autograd's graph, if one is.

    None for torch's own nodes and for those that ``torch.library`` makes of register_autograd.
    (torch/autograd/function.py, torch/_library/autograd.py.)
    """
    function = getattr(type(node), "_forward_cls", None)
    generated = function is not None and function.__name__.startswith("GeneratedBackwardFor_")
    return None if generated else function


@contextmanager
def cache_counts() -> Iterator[dict[str, int]]:
    """Count hits, misses and bypasses of torch's compile caches in the block, filled in at its end."""
    from torch._dynamo.utils import counters

    names = {
        "fx_hits": ("inductor", "fxgraph_cache_hit"),
        "fx_misses": ("inductor", "fxgraph_cache_miss"),
        "fx_bypasses": ("inductor", "fxgraph_cache_bypass"),
        "aot_hits": ("aot_autograd", "autograd_cache_hit"),
        "aot_misses": ("aot_autograd", "autograd_cache_miss"),
        "aot_bypasses": ("aot_autograd", "autograd_cache_bypass"),
    }
    before = {name: counters[group][key] for name, (group, key) in names.items()}
    counts: dict[str, int] = {}
    try:
        yield counts
    finally:
        counts.update({name: counters[group][key] - before[name] for name, (group, key) in names.items()})


def set_key_tag(tag: str) -> None:
    """Make a tag part of all keys of torch's compile caches, beside the user's own, until the next call.

    In the processes that compile Triton kernels too, which are to find and name the configurations that
    kernels were tuned to: they read the variable when they start, at the first compilation.
    (torch/compiler/config.py; torch/_inductor/runtime/autotune_cache.py.)
    """
    own = os.environ.get(_KEY_TAG, "").partition(_OURS)[0]
    torch.compiler.config.cache_key_tag = os.environ[_KEY_TAG] = f"{own}{_OURS}{tag}"


def use_torchs_ptxas() -> None:
    """Let Triton assemble all kernels with the ptxas that comes with torch, unless the user names one.

    Inductor does so from its first kernel on. The path is part of Triton's keys, so a kernel that ran before
    would be compiled again by the next job, which finds Inductor's kernels in a cache and so sets it sooner.
    TRITON_DEFAULT_FP_FUSION=1 is the default before Triton 3.10; Triton 3.9 warns if it is not set.
    (torch/_inductor/runtime/compile_tasks.py; triton/knobs.py: fp_fusion_enabled.)
    """
    from torch._inductor.runtime.compile_tasks import _set_triton_ptxas_path

    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
    _set_triton_ptxas_path()


def bind_threads(cpus: set[int]) -> None:
    """Let this process run on these CPUs only: new threads, and each that had no place of its own.

    *Raises* OSError where the system does not permit it. (torch/numa/binding.py, of torchrun's
    ``--numa-binding``, which takes an unknown NUMA node for node 0 and wants the command numactl.)
    """
    numa_binding._bind_all_threads_in_current_process_to_logical_cpus(logical_cpu_indices=cpus)


@contextmanager
def fake_process_group(num_ranks: int, rank: int) -> Iterator[None]:
    """``torch.distributed`` as one of many ranks sees it, without the others: collectives do nothing.

    (torch/testing/_internal/distributed/fake_pg.py, the backend "fake" of torch's own dry runs.)
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=num_ranks)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


def process_group_in(argument: Any) -> torch.distributed.ProcessGroup | None:
    """Return the process group that an operation of c10d was given; None for anything else.

    (torch/csrc/distributed/c10d/Ops.cpp: operations take the group as an object of TorchScript.)
    """
    if not isinstance(argument, torch.ScriptObject):
        return None
    try:
        return torch.distributed.ProcessGroup.unbox(argument)
    except (RuntimeError, TypeError):
        return None


def has_nvshmem() -> bool:
    """Return whether this torch was built with NVSHMEM and its library is here.

    (torch/distributed/_symmetric_memory/__init__.py.)
    """
    from torch.distributed import _symmetric_memory

    return _symmetric_memory.is_nvshmem_available()


def nvshmem_empty(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device, group: torch.distributed.ProcessGroup
) -> Tensor:
    """Memory that the kernels of other ranks of a group can reach. A collective of all ranks of the job.

    No symmetric memory of another backend may have been taken in this process before.
    """
    from torch.distributed import _symmetric_memory

    _symmetric_memory.set_backend("NVSHMEM")
    tensor = _symmetric_memory.empty(*shape, dtype=dtype, device=device)
    _symmetric_memory.rendezvous(tensor, group)
    return tensor


def all_to_all_by_splits(
    rows: Tensor, out: Tensor, splits: Tensor, out_splits: Tensor, group: torch.distributed.ProcessGroup
) -> None:
    """Send ``splits[p]`` of the rows, which lie behind each other, to rank p; ``out`` gets rows likewise.

    All four are symmetric memory, splits int64 [P]; out_splits [2, P] gets the numbers of received rows and
    their starts. The host waits for nothing, and no check is made that ``out`` is long enough.
    (torch/csrc/distributed/c10d/symm_mem/nvshmem_extension.cu, ``all_to_all_vdev``.)
    """
    torch.ops.symm_mem.all_to_all_vdev(rows, out, splits, out_splits, group.group_name)


def symmetric_memory(
    num_bytes: int, group: torch.distributed.ProcessGroup
) -> tuple[list[Tensor], Callable[[], None]]:
    """Memory of each GPU of a group that all of them can read, by rank, and a barrier on the current stream.

    Collective; the host waits for the other ranks. The memory is there as long as tensors and barrier are.
    It is not taken from a pool, as ``torch.distributed._symmetric_memory.empty`` does, so each tensor begins
    where the handle's addresses do. (torch/distributed/_symmetric_memory/__init__.py;
    torch/csrc/distributed/c10d/symm_mem/CUDASymmetricMemory.cu, whose barrier is a kernel.)
    """
    from torch._C._distributed_c10d import _SymmetricMemory

    device = torch.device("cuda", torch.cuda.current_device())
    own = _SymmetricMemory.empty_strided_p2p((num_bytes,), (1,), torch.uint8, device)
    handle = _SymmetricMemory.rendezvous(own, group.group_name)
    buffers = [handle.get_buffer(rank, (num_bytes,), torch.uint8) for rank in range(handle.world_size)]
    buffers[handle.rank] = own  # the others do not own their memory: the handle does
    addresses = [buffer.data_ptr() for buffer in buffers]
    assert addresses == list(handle.buffer_ptrs) and not any(address % 16 for address in addresses)
    return buffers, functools.partial(handle.barrier, channel=0)


def storage_of(tensor: Tensor) -> tuple[int, torch.UntypedStorage]:
    """Return what tells the memory of a tensor from all other memory that is there, and that memory."""
    storage = tensor.untyped_storage()
    return storage._cdata, storage


def in_backward() -> bool:
    """Return whether autograd runs a backward in this thread. (torch/csrc/autograd/python_engine.cpp.)"""
    return torch._C._current_graph_task_id() != -1


without_modes = torch.utils._python_dispatch._disable_current_modes
"""A context in which no TorchDispatchMode sees anything, fake tensors' neither."""

MAX_MEMORY_EVENTS = 1_000_000
"""Allocations and frees that are kept, the last of them, some KB of the host's memory each."""


def start_memory_history() -> None:
    """Record from now on each allocation and free, with the Python stack that made it."""
    torch.cuda.memory._record_memory_history(
        stacks="python", max_entries=MAX_MEMORY_EVENTS, clear_history=True
    )


def write_memory_history(path: Path) -> None:
    """Write what is allocated now and what was recorded, for pytorch.org/memory_viz."""
    torch.cuda.memory._dump_snapshot(str(path))


def stop_memory_history() -> None:
    """Record nothing any more."""
    torch.cuda.memory._record_memory_history(enabled=None)
