"""Times of steps beside a save on a CPU: PYTHONPATH=. python docs/benchmarks/saves_cpu/measure.py

A step is many small operations of one thread, as a host that launches kernels. Prints JSON: milliseconds of
steps without a save and beside one, seconds of a save, and seconds of CPU that it takes of the trainer.
"""

import json
import sys
import tempfile
import time
from pathlib import Path

import torch

from graphmoe.checkpoint.store import CheckpointStore
from graphmoe.config.schema import CheckpointConfig

TENSORS, ELEMENTS, OPERATIONS, SAVES = 2000, 50_000, 2000, 4


def step(value: torch.Tensor) -> float:
    began = time.perf_counter()
    for _ in range(OPERATIONS):
        value = value.mul(0.5).add_(1.0)
    return 1e3 * (time.perf_counter() - began)


def spread(times_ms: list[float]) -> dict[str, float]:
    ordered = sorted(times_ms)
    shares = {"median": 0.5, "p95": 0.95, "max": 1.0}
    return {name: round(ordered[int(share * (len(ordered) - 1))], 2) for name, share in shares.items()}


def main() -> None:
    torch.set_num_threads(1)
    state = {f"layers.{n}.weight": torch.randn(ELEMENTS) for n in range(TENSORS)}
    value, alone_ms, beside_ms = torch.ones(256), list[float](), list[float]()
    seconds, cpu_s = list[float](), list[float]()
    with tempfile.TemporaryDirectory(dir=sys.argv[1] if sys.argv[1:] else None) as folder:
        store = CheckpointStore(Path(folder), CheckpointConfig(keep_last=1))
        for number in range(SAVES + 1):
            alone_ms += [step(value) for _ in range(50)]
            began = time.perf_counter()
            store.save(number, state)
            assert store._writer is not None
            first, used_s = len(beside_ms), time.process_time() - time.thread_time()
            while store._writer.is_alive():
                beside_ms.append(step(value))
            seconds.append(time.perf_counter() - began)
            cpu_s.append(time.process_time() - time.thread_time() - used_s)  # of other threads than this one
            if number == 0:  # allocates memory and starts what is needed
                del alone_ms[:], beside_ms[first:], seconds[:], cpu_s[:]
        store.close()
    found = {"alone_ms": spread(alone_ms), "beside_ms": spread(beside_ms), "steps_beside": len(beside_ms)}
    middle = len(seconds) // 2
    print(
        json.dumps(
            found | {"save_s": round(sorted(seconds)[middle], 2), "cpu_s": round(sorted(cpu_s)[middle], 3)}
        )
    )


if __name__ == "__main__":
    main()
