"""Generate text with a trained run.

python -m graphmoe.generate run=outputs/tiny prompt="def main("
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from graphmoe.config.arguments import emit, parse_args, run_tool
from graphmoe.config.schema import ConfigError, DeviceChoice, ModelConfig, OutputFormat
from graphmoe.run.files import TOKENIZER_FILE

if TYPE_CHECKING:
    import torch

    from graphmoe.model.transformer import Transformer


@dataclass
class GenerateArgs:
    run: Path
    """Folder of the run."""
    prompt: str = "def "
    """Text to continue."""
    tokens: int = 200
    """Tokens to generate, > 0."""
    temperature: float = 0.8
    """0 takes the likeliest token, > 0 samples."""
    seed: int = 0
    """Seed of the sampling."""
    step: int | None = None
    """Step of the checkpoint; default: the newest."""
    attention: str | None = None
    """The run's model.attention if that is code of your own, which no file is trusted to name."""
    layer: str | None = None
    """The run's model.layer if that is code of your own, which no file is trusted to name."""
    device: DeviceChoice = DeviceChoice.auto
    """cpu or cuda; auto is a GPU that has room for the weights, else the CPU."""
    format: OutputFormat = OutputFormat.text
    """text, a token at a time, or json: one document at the end."""


def main(argv: list[str]) -> None:
    args = parse_args(GenerateArgs, argv, prog="graphmoe.generate", places=("run", "prompt"))
    if args.tokens < 1:
        raise ConfigError(f"tokens={args.tokens} must be greater than 0")
    if not 0 <= args.temperature < math.inf:
        raise ConfigError(f"temperature={args.temperature} must be 0 or greater")
    from graphmoe.run.stored import read_stored_run, run_tokenizer

    _, run = read_stored_run(args.run)
    if not (args.run / TOKENIZER_FILE).is_file():
        raise ConfigError(_no_tokenizer(args.run, run.data.source))
    from graphmoe.checkpoint import CheckpointError
    from graphmoe.data.tokenizer import load_tokenizer
    from graphmoe.run.weights import run_config  # imports torch
    from graphmoe.training.evaluation import generate

    config = run_config(args.run, (args.attention, args.layer))
    tokenizer = load_tokenizer(args.run / TOKENIZER_FILE)
    try:
        model, step = load_model(args.run, config, _device(args.device, config), args.step)
    except CheckpointError as error:
        raise ConfigError(str(error)) from error
    # the last document of a prompt attends to itself only, as in training; one of data=chat is a conversation
    if run.data.document_mask and run.data.source != "chat":
        path, end, _ = run_tokenizer(args.run)
        if end is None:
            raise ConfigError(f"{path} has no end-of-document token, which data.document_mask=true needs")
        model.mask_documents(end)
    pieces = generate(model, tokenizer, args.prompt, args.tokens, args.temperature, args.seed)
    document = {"run": str(args.run), "step": step, "prompt": args.prompt}
    if args.format is OutputFormat.text:
        for piece in pieces:
            emit(document, piece, args.format, end="")
    emit({**document, "text": "".join(pieces)}, "", args.format)


def _device(choice: DeviceChoice, config: ModelConfig) -> torch.device:
    import torch

    from graphmoe.run.machine import memory_of, open_device

    if choice is DeviceChoice.auto and torch.cuda.is_available():
        gpu = open_device(DeviceChoice.cuda)
        return gpu if _bytes_of(config) < memory_of(gpu) else torch.device("cpu")
    return open_device(choice)


def _bytes_of(config: ModelConfig) -> int:
    from graphmoe.model.sizes import count_parameters

    return 4 * count_parameters(config)["total"]["full"]


def _no_tokenizer(folder: Path, source: str | None) -> str:
    copy = f"copy the {TOKENIZER_FILE}"
    advice = {
        "synthetic": ", random tokens that stand for no text; train on text, such as data=stdlib",
        "memmap": f" without data.tokenizer; {copy} that made the token files into the run's folder, or "
        "train with data.tokenizer=...",
    }.get(source or "", f"; {copy} of its data into the run's folder")
    return f"run={folder} has no {TOKENIZER_FILE}: it was trained on data.source={source}{advice}"


def load_model(
    folder: Path, config: ModelConfig, device: torch.device, step: int | None = None
) -> tuple[Transformer, int]:
    """Return a model with fp32 weights of a run's newest checkpoint, or that of ``step``, and its step."""
    from graphmoe.checkpoint.store import CheckpointStore
    from graphmoe.model.build import build_model
    from graphmoe.run.machine import memory_of

    needed, there = _bytes_of(config), memory_of(device)
    if needed > there:
        raise ConfigError(
            f"run={folder} has a model whose weights take {needed / 2**30:.1f} GiB in fp32, and this "
            f"{device.type} has {there / 2**30:.1f} GiB"
        )
    model = build_model(config, device=device, seed=None)
    state = {"model": model.state_dict()}
    loaded = CheckpointStore.open_any(folder).load(state, step, partial=True)
    assert loaded is not None
    return model, loaded


if __name__ == "__main__":
    run_tool(main)
