"""Chrome traces as Kineto writes them on a GPU: the same categories, arguments and links between events.

Times are microseconds. Kineto's numbers are far from zero, so all of them are moved by `ORIGIN`.
"""

import gzip
import json

ORIGIN = 4520102129634.002
PID, MAIN, BACKWARD = 4711, 4711, 4802
"""The process, its main thread, and the thread in which autograd runs backwards on a GPU."""
PRODUCT = [[4096, 2048], [2048, 1024]]
FACTS = {"run": "tiny", "rank": 0, "num_ranks": 2, "steps": [10, 11], "graph_scope": "none"}


class KinetoTrace:
    """A trace that grows event by event; ``step_us`` is the length of its only step, which begins at 0."""

    def __init__(self, device="NVIDIA H100 80GB HBM3", *, step_us=None):
        self.device, self._ids = device, 0
        process = {"name": "process_name", "ph": "M", "pid": PID, "tid": 0, "args": {"name": "python"}}
        end = {"name": "Record Window End", "ph": "i", "s": "g", "pid": "", "tid": "", "args": {}}
        self.events = [{**process, "ts": ORIGIN}, {**end, "ts": ORIGIN}]
        if step_us is not None:
            self.range("ProfilerStep#1", 0, step_us)

    def range(self, name, start, end, thread=MAIN):
        """Add the two events of ``record_function``, on the host and on the device."""
        self._put("user_annotation", name, start, end, PID, thread, {})
        self._put("gpu_user_annotation", name, start, end, 0, 7, {})

    def operation(
        self, name, start, end, thread=MAIN, *, dims=None, kind="c10::BFloat16", sequence=None, forward_tid=0
    ):
        args = {}
        if sequence is not None:
            args = {"Sequence number": sequence, "Fwd thread id": forward_tid}
        if dims is not None:
            args |= {"Input Dims": dims, "Input type": [kind] * len(dims)}
        self._put("cpu_op", name, start, end, PID, thread, args)

    def call(self, name, start, end, correlation, thread=MAIN, kind="cuda_runtime"):
        """A call of the runtime or the driver, and the arrow to what it launches."""
        self._put(kind, name, start, end, PID, thread, {"cbid": 211, "correlation": correlation})
        at = {"pid": PID, "tid": thread, "ts": ORIGIN + start}
        self.events.append({"ph": "s", "id": correlation, **at, "cat": "ac2g", "name": "ac2g"})

    def activity(self, kind, name, start, end, correlation, stream=7, **more):
        """A kernel, a copy or a memset; kernels of a graph have the correlation of its launch."""
        args = {"device": 0, "context": 1, "stream": stream, "correlation": correlation, **more}
        self._put(kind, name, start, end, 0, stream, args)
        at = {"pid": 0, "tid": stream, "ts": ORIGIN + start, "bp": "e"}
        self.events.append({"ph": "f", "id": correlation, **at, "cat": "ac2g", "name": "ac2g"})

    def launch(self, name, at, start, end, thread=MAIN, stream=7):
        """A kernel and the call at ``at`` that launches it, which takes 2 microseconds; its correlation."""
        correlation = 10_000 + self._ids
        self.call("cudaLaunchKernel", at, at + 2, correlation, thread)
        self.activity("kernel", name, start, end, correlation, stream, grid=[132, 1, 1])
        return correlation

    def write(self, path, facts=None, **more):
        document = {"schemaVersion": 1, "deviceProperties": [{"id": 0, "name": self.device}], **more}
        document |= {"graphmoe": facts} if facts else {}
        path.parent.mkdir(parents=True, exist_ok=True)
        opened = gzip.open if path.suffix == ".gz" else open
        with opened(path, "wt", encoding="utf-8") as file:
            json.dump({**document, "displayTimeUnit": "ms", "traceEvents": self.events}, file)
        return path

    def _put(self, kind, name, start, end, pid, tid, args):
        self._ids += 1
        event = {"ph": "X", "cat": kind, "name": name, "pid": pid, "tid": tid, "ts": ORIGIN + start}
        self.events.append({**event, "dur": end - start, "args": {"External id": self._ids, **args}})


def two_steps():
    """Two steps of 1000 us, each: a forward, its W in autograd's thread, a sum over ranks, the update."""
    trace = KinetoTrace()
    for number, at in ((10, 0.0), (11, 1000.0)):
        trace.range(f"ProfilerStep#{number}", at, at + 900)
        trace.range("attn:F", at + 10, at + 60)
        trace.operation("aten::mm", at + 20, at + 40, dims=PRODUCT)
        trace.launch("nvjet_tst_128x256", at + 25, at + 100, at + 200)
        trace.range("attn:W", at + 100, at + 160, BACKWARD)
        trace.operation("aten::mm", at + 110, at + 130, BACKWARD, dims=PRODUCT, kind="float")
        trace.launch("sm80_xmma_gemm", at + 115, at + 300, at + 500, BACKWARD)
        trace.range("gradients:sum", at + 170, at + 200, BACKWARD)
        name = "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
        trace.launch(name, at + 180, at + 450, at + 600, BACKWARD, stream=20)
        trace.range("optimizer:update", at + 210, at + 260)
        trace.launch("triton_poi_fused_adamw", at + 220, at + 700, at + 1000)
    return trace
