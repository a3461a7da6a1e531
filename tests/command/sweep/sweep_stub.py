"""graphmoe.train with jobs that take no time: what a sweep does around them, without training.

The learning rate says what becomes of a job.
"""

from pathlib import Path

from hydra.core.hydra_config import HydraConfig

from graphmoe.command.hydra import hydra_app
from graphmoe.command.sweep.job import record_folder
from graphmoe.config.schema import RunConfig
from graphmoe.run.files import write_json
from graphmoe.runtime.launch.failures import RunFailed

FAILS, CRASHES, ENDS_BY_SIGNAL = 0.5, 0.6, 0.7
"""Learning rates at which a job raises a known error, an unknown one, or ends as after a signal."""
STARTS_FILE = "starts"
"""File in the current folder with the learning rate of each job that was started, one on a line."""
GONE = "cause-is-gone"
"""A file in the current folder with which all jobs finish."""


def main() -> None:
    hydra_app(task, prog="graphmoe.train", examples=(), makes_folder=True, known_errors=(RunFailed,))


def task(config: RunConfig) -> float | None:
    folder, rate = Path(HydraConfig.get().runtime.output_dir), config.optim.lr
    record_folder(folder)
    with open(STARTS_FILE, "a", encoding="utf-8") as starts:
        starts.write(f"{rate}\n")
    is_gone = Path(GONE).exists()
    if rate == FAILS and not is_gone:
        raise RunFailed("the workers are gone\nsecond line")
    if rate == CRASHES and not is_gone:
        raise ZeroDivisionError("a mistake of ours")
    stopped = rate == ENDS_BY_SIGNAL and not is_gone
    numbers = {"final_val_loss": rate / 2, "final_loss": rate, "median_tokens_per_s": 128.0}
    document = {"finished": not stopped, "steps": 2, "folder": str(folder), **numbers}
    write_json(folder / "summary.json", document)
    if stopped:
        raise KeyboardInterrupt
    return rate / 2


if __name__ == "__main__":
    main()
