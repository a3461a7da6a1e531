"""The fork server of all tests that start processes: a child starts with torch, graphmoe and pytest.

A process has one server, which imports the list set last before its first child: this is the only list.
"""

import multiprocessing
import os

# Inductor asks for a GPU when it is imported. CUDA's own answer makes CUDA unusable in children of a fork.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload([
    "graphmoe.train", "graphmoe.training.run", "graphmoe.info", "graphmoe.runtime.launch.elastic",
    "torch._functorch.aot_autograd", "torch._inductor.compile_fx", "torch.distributed.checkpoint",
    "tests.runs",
])  # fmt: skip
