"""All private torch interfaces of the project, checked with torch 2.11 to 2.13 and 2.15."""

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
# Bytes of changed inputs up to which a kernel is tuned. Candidates run on copies of them, on the host if
# copies raise the peak memory: minutes for an optimizer (torch/_inductor/runtime/triton_heuristics.py:
# copy_args_to_cpu_if_needed).
MOST_COPIED = 2**30
# called by ``torch.no_grad`` and the like, as a TorchFunctionMode sees it
set_grad_enabled = torch._C._set_grad_enabled
demangle: Callable[[str], str] = torch._C._demangle  # C++ symbols
# without a table torch 2.15 records detach as an alias, through which a gradient would flow
make_fx = functools.partial(proxy_tensor.make_fx, decomposition_table={})


def storage_info(name: str, offset: int, length: int) -> Any:
    """Return DCP's record of an entry's place in a file."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    return _StorageInfo(name, offset, length)


def import_compilers() -> None:
    """Import the compilers before the first segment's compile is timed."""
    import torch._inductor.compile_fx  # noqa: F401
    from torch._inductor.codecache import torch_key
    from torch._inductor.runtime.triton_compat import HAS_TRITON, triton_key

    # Keys of compiled code contain hashes of torch's and Triton's files: half a second of SHA-256, which
    # releases the GIL (torch/_inductor/codecache.py: torch_key, CacheBase.get_system)
    def hash_files() -> None:
        torch_key()
        if HAS_TRITON:
            triton_key()

    threading.Thread(target=hash_files, name="hash of compilers", daemon=True).start()


def fake_mode() -> FakeTensorMode:
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    # torch's compile caches refuse a mode without a ShapeEnv
    return FakeTensorMode(shape_env=ShapeEnv())


def lazy_graph_modules() -> ContextDecorator:
    """Context: traced graphs generate Python code only when they run (torch/fx/_lazy_graph_module.py)."""
    # most never run: their code took a sixth of a run that traces and compiles nothing
    return cast(ContextDecorator, _use_lazy_graph_module(True))


def joint_graph(forward: fx.GraphModule, fakes: Sequence[Tensor]) -> fx.GraphModule:
    """Trace forward and backward of a functional graph in Inductor's ops (torch/_functorch/aot_autograd.py).

    Inputs: fakes, then ``tangents_*`` of outputs with gradients. Outputs: the forward's, then a gradient or
    None per input. Keeps node metadata.
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
    """Min-cut a joint graph (torch/_functorch/partitioners.py); ``static_inputs`` are saved for free."""
    from unittest import mock

    from torch._functorch import partitioners
    from torch._functorch.compile_utils import fx_graph_cse

    joint.graph = fx_graph_cse(joint.graph)  # torch 2.15 does not merge forward with backward
    # Attention is tagged as random, so the partition would save and set the generator's state, which can't be
    # captured. `draws_random_numbers` rejects ops that do draw.
    with mock.patch.object(partitioners, "has_recomputable_rng_ops", lambda graph: False):
        return partitioners.min_cut_rematerialization_partition(
            joint, None, num_fwd_outputs=num_outputs, static_lifetime_input_indices=list(static_inputs)
        )


def mark(node: fx.Node, *, recomputed: bool) -> None:
    """Mark a forward node of a joint graph to be recomputed, or to be saved if the backward needs it."""
    policy = CheckpointPolicy.MUST_RECOMPUTE if recomputed else CheckpointPolicy.MUST_SAVE
    node.meta["recompute"] = policy


def remove_marks(graph: fx.Graph) -> None:
    # torch would act on the marks when it compiles a graph without gradients
    for node in graph.nodes:
        node.meta.pop("recompute", None)


def is_recomputed(node: fx.Node) -> bool:
    return node.meta.get("recompute") is CheckpointPolicy.MUST_RECOMPUTE


def draws_random_numbers(target: Any, arguments: Sequence[Any], named: Mapping[str, Any]) -> bool:
    """Return whether a call draws random numbers (attention: only with dropout)."""
    if torch.Tag.nondeterministic_seeded not in getattr(target, "tags", ()):
        return False
    names = [argument.name for argument in target._schema.arguments]
    given = {**dict(zip(names, arguments, strict=False)), **named}
    return "dropout_p" not in names or bool(given.get("dropout_p", 0.0))


def compile_inference(
    graph: fx.GraphModule, fakes: Sequence[Tensor], mode: FakeTensorMode
) -> Callable[..., Any]:
    """Compile a graph without gradients by Inductor and its caches."""
    from torch._inductor.compile_fx import compile_fx

    # `MOST_COPIED` would leave an optimizer's pointwise kernel the smaller blocks
    changes = any(map(_changes_tensors, graph.graph.nodes))
    patches: dict[str, Any] = {"triton.autotune_pointwise": False} if changes else {}
    # Inductor writes long expressions with several readers to memory (torch/_inductor/ir.py:
    # should_realize_on_reuse). Those of stochastic rounding, which hash, would be fp32 buffers of a shard.
    if any(node.target is torch.ops.aten.bitwise_xor.Tensor for node in graph.graph.nodes):
        patches |= {"realize_opcount_threshold": 10_000, "realize_reads_threshold": 100}
    with torch.no_grad(), torch._guards.tracing(torch._guards.TracingContext(mode)):
        return compile_fx(graph, list(fakes), config_patches=patches)  # type: ignore[return-value]


def _changes_tensors(node: torch.fx.Node) -> bool:
    if not isinstance(node.target, torch._ops.OpOverload) or not node.target._schema.is_mutable:
        return False
    changed: Any = node.args[0]
    return node.target is not torch.ops.aten.copy_.default or changed.meta["val"].numel() > 1


def graphs_to_bytes(graphs: Any) -> bytes:
    """Serialize graphs of fake tensors (torch/fx/_graph_pickler.py). *Raises* errors of many types."""
    from torch.fx._graph_pickler import GraphPickler, Options

    return GraphPickler.dumps(graphs, Options(ops_filter=None))


def graphs_from_bytes(content: bytes) -> Any:
    """Return the graphs that `graphs_to_bytes` stored. Runs code: trusted files only."""
    from torch.fx._graph_pickler import GraphPickler

    return GraphPickler.loads(content, fake_mode())


def tensors_of(module: nn.Module) -> dict[str, tuple[dict[str, Any], str]]:
    """Return where each parameter and buffer is held, by name: (dictionary, key)."""
    return {
        f"{prefix}.{key}".lstrip("."): (holder, key)
        for prefix, part in module.named_modules()
        for holder in (part._parameters, part._buffers)
        for key, tensor in holder.items()
        if tensor is not None
    }


def custom_function_of(node: Any) -> type | None:
    """Return the custom autograd function of an autograd node, if any (torch/autograd/function.py)."""
    function = getattr(type(node), "_forward_cls", None)
    # torch.library generates such classes for register_autograd (torch/_library/autograd.py)
    generated = function is not None and function.__name__.startswith("GeneratedBackwardFor_")
    return None if generated else function


@contextmanager
def cache_counts() -> Iterator[dict[str, int]]:
    """Yield counts of torch's compile cache events, filled in when the block ends."""
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
    """Add a tag to all keys of torch's compile caches."""
    # Triton's compile processes read the variable at their start, for keys of autotuned configurations
    # (torch/_inductor/runtime/autotune_cache.py)
    own = os.environ.get(_KEY_TAG, "").partition(_OURS)[0]
    torch.compiler.config.cache_key_tag = os.environ[_KEY_TAG] = f"{own}{_OURS}{tag}"


def use_torchs_ptxas() -> None:
    """Make Triton use torch's ptxas, unless the user names one."""
    from torch._inductor.runtime.compile_tasks import _set_triton_ptxas_path

    # Inductor sets it at its first kernel, sooner in a warm job. Triton's keys contain the path, so earlier
    # kernels would be recompiled by the next job (torch/_inductor/runtime/compile_tasks.py).
    # FP_FUSION=1 is the default before Triton 3.10; 3.9 warns if unset (triton/knobs.py: fp_fusion_enabled).
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
    _set_triton_ptxas_path()


def bind_threads(cpus: set[int]) -> None:
    """Bind threads with the caller's affinity to ``cpus`` (torch/numa/binding.py). *Raises* OSError."""
    # torchrun's --numa-binding takes an unknown NUMA node for node 0 and needs numactl
    numa_binding._bind_all_threads_in_current_process_to_logical_cpus(logical_cpu_indices=cpus)


@contextmanager
def fake_process_group(num_ranks: int, rank: int) -> Iterator[None]:
    """Context in which this process is one rank of many, and collectives do nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=num_ranks)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


def process_group_in(argument: Any) -> torch.distributed.ProcessGroup | None:
    """Return the process group in a c10d operation's argument (torch/csrc/distributed/c10d/Ops.cpp)."""
    if not isinstance(argument, torch.ScriptObject):
        return None
    try:
        return torch.distributed.ProcessGroup.unbox(argument)
    except (RuntimeError, TypeError):
        return None


def has_nvshmem() -> bool:
    from torch.distributed import _symmetric_memory

    return _symmetric_memory.is_nvshmem_available()


def nvshmem_empty(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device, group: torch.distributed.ProcessGroup
) -> Tensor:
    """Allocate memory that a group's kernels can reach. Collective over the job."""
    from torch.distributed import _symmetric_memory

    # no symmetric memory of another backend may exist in this process
    _symmetric_memory.set_backend("NVSHMEM")
    tensor = _symmetric_memory.empty(*shape, dtype=dtype, device=device)
    _symmetric_memory.rendezvous(tensor, group)
    return tensor


def all_to_all_by_splits(
    rows: Tensor, out: Tensor, splits: Tensor, out_splits: Tensor, group: torch.distributed.ProcessGroup
) -> None:
    """All-to-all of rows by int64 ``splits`` [P]; writes counts and offsets [2, P]. No device sync."""
    torch.ops.symm_mem.all_to_all_vdev(rows, out, splits, out_splits, group.group_name)


def symmetric_memory(
    num_bytes: int, group: torch.distributed.ProcessGroup
) -> tuple[list[Tensor], Callable[[], None]]:
    """Return peer-readable buffers by rank, and a barrier kernel on the current stream. Collective.

    Buffers live as long as tensors or barrier (torch/csrc/distributed/c10d/symm_mem/CUDASymmetricMemory.cu).
    """
    from torch._C._distributed_c10d import _SymmetricMemory

    device = torch.device("cuda", torch.cuda.current_device())
    # not from a pool as symmetric_memory.empty, so each tensor begins at the handle's address
    own = _SymmetricMemory.empty_strided_p2p((num_bytes,), (1,), torch.uint8, device)
    handle = _SymmetricMemory.rendezvous(own, group.group_name)
    buffers = [handle.get_buffer(rank, (num_bytes,), torch.uint8) for rank in range(handle.world_size)]
    buffers[handle.rank] = own  # the others do not own their memory: the handle does
    addresses = [buffer.data_ptr() for buffer in buffers]
    assert addresses == list(handle.buffer_ptrs) and not any(address % 16 for address in addresses)
    return buffers, functools.partial(handle.barrier, channel=0)


def storage_of(tensor: Tensor) -> tuple[int, torch.UntypedStorage]:
    """Return a storage's unique id, valid while the storage lives, and the storage."""
    storage = tensor.untyped_storage()
    return storage._cdata, storage


def in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


# context without TorchDispatchModes, including fake tensors'
without_modes = torch.utils._python_dispatch._disable_current_modes

# some KB of host memory each
MAX_MEMORY_EVENTS = 1_000_000


def start_memory_history() -> None:
    torch.cuda.memory._record_memory_history(
        stacks="python", max_entries=MAX_MEMORY_EVENTS, clear_history=True
    )


def write_memory_history(path: Path) -> None:
    # read by pytorch.org/memory_viz
    torch.cuda.memory._dump_snapshot(str(path))


def stop_memory_history() -> None:
    torch.cuda.memory._record_memory_history(enabled=None)


def tune_each_kernel_once() -> None:
    """Reuse a generated kernel's first autotuning result, across jobs (torch/_inductor/runtime)."""
    from torch._inductor.runtime.autotune_cache import AutotuneCache
    from torch._inductor.runtime.cache_dir_utils import cache_dir
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    recheck, tune = CachingAutotuner.recheck_autotune_cache, CachingAutotuner.autotune_to_one_config
    if getattr(tune, "once", False):
        return
    # Every graph with the kernel tunes it anew, and not always alike: other blocks sum a reduction in another
    # order. Files are named by content.
    chosen: dict[str, str] = {}

    @functools.wraps(recheck)
    def recheck_here(self: CachingAutotuner, *args: Any, **kwargs: Any) -> None:
        if self.filename is not None:
            # a cached graph would look for the result in the folder of the job that compiled it
            self.filename = os.path.join(cache_dir(), *self.filename.split(os.sep)[-2:])
            if self.save_cache_hook is not None:
                of_compiler: AutotuneCache = self.save_cache_hook.__self__
                here = AutotuneCache.create(self.inductor_meta, self.filename, of_compiler.configs_hash)
                self.save_cache_hook = here and here.save
        recheck(self, *args, **kwargs)

    @functools.wraps(tune)
    def tune_once(self: CachingAutotuner, *args: Any, **kwargs: Any) -> None:
        if self.filename is None:
            tune(self, *args, **kwargs)
            return
        name = os.path.basename(self.filename)
        named = zip(self.fn.arg_names, args, strict=False)
        copied = sum(each.nbytes for each_name, each in named if each_name in self.mutated_arg_names)
        tuned = [one for one in self.launchers if str(one.config) == chosen.get(name)]
        if not tuned and copied > MOST_COPIED:  # the last has the largest blocks of a reduction over rows
            tuned = ([one for one in self.launchers if not one.n_spills] or self.launchers)[-1:]
        tuned = tuned or _stored(self, self.filename)
        if len(tuned) == 1:
            self.launchers = tuned
            getattr(self, "_release_static_launchers_except", lambda launcher: None)(tuned[0])  # torch 2.13
        else:
            tune(self, *args, **kwargs)
        chosen[name] = str(self.launchers[0].config)

    tune_once.once = True  # type: ignore[attr-defined]
    CachingAutotuner.recheck_autotune_cache = recheck_here  # type: ignore[method-assign]
    CachingAutotuner.autotune_to_one_config = tune_once  # type: ignore[method-assign]


def _stored(kernel: Any, file: str) -> list[Any]:
    from torch._inductor.runtime.autotune_cache import AutotuneCache

    # torch 2.11 ignores stored configurations derived from register use after compilation
    cache = AutotuneCache.create(kernel.inductor_meta, file, "")
    best = cache._read() if cache else None
    if not best:
        return []

    def is_best(config: Any) -> bool:
        numbers = {**config.kwargs, "num_warps": config.num_warps, "num_stages": config.num_stages}
        return all(best.get(name) == value for name, value in numbers.items())

    return [launcher for launcher in kernel.launchers if is_best(launcher.config)]
