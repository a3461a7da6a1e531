"""Tokenise text files into a Megatron ``.bin/.idx`` pair, in parallel.

python -m graphmoe.prepare input='corpus/*.jsonl' tokenizer=tokenizer.json output=corpus/tokens
python -m graphmoe.train data=memmap 'data.paths=[corpus/tokens]' data.tokenizer=tokenizer.json
"""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graphmoe.config.arguments import emit, parse_args, run_tool
from graphmoe.config.progress import counting
from graphmoe.config.ranges import number_of
from graphmoe.config.schema import ConfigError, OutputFormat


@dataclass
class PrepareArgs:
    input: list[str]
    """Files, globs or folders of .txt, .jsonl or .parquet, separated by commas."""
    tokenizer: Path
    """A Hugging Face tokenizer.json, the folder that holds one, or a name on the hub."""
    output: Path
    """Prefix of the files that are written: .bin, .idx and their sums, .sha256."""
    text_field: str = "text"
    """Field of a .jsonl or .parquet record that holds the text."""
    eod_token: str | None = None
    """Token put after each document; default: the end token that the tokenizer's files name."""
    append_eod: bool = True
    """Put that token after each document; false leaves documents as they are."""
    workers: int = 0
    """Processes, >= 0; 0 takes as many as there are cores and as pay off."""
    skip_bad: bool = False
    """Count and skip bad files and records instead of stopping at the first."""
    overwrite: bool = False
    """Replace files that are there already."""
    format: OutputFormat = OutputFormat.text
    """text, or json: one document on stdout and nothing else there."""


def prepare(args: PrepareArgs) -> dict[str, Any]:
    """Write ``output.bin``, ``.idx`` and ``.sha256``; returns the counts that the tool prints."""
    from graphmoe.data.contents import SUMS, write_sums
    from graphmoe.data.indexed import pair
    from graphmoe.data.text_files import find_files
    from graphmoe.data.tokenise import Recipe, tokenise_files, workers_for
    from graphmoe.data.tokenizer import end_of_document, find_tokenizer, load_tokenizer, num_ids

    started = time.monotonic()
    files = find_files(args.input, "input")
    bin_path, idx_path = pair(args.output)
    there = [str(path) for path in (bin_path, idx_path) if path.exists()]
    if there and not args.overwrite:
        raise ConfigError(f"{' and '.join(there)} exist already; use overwrite=true or another output")
    if args.workers < 0:
        raise ConfigError(f"workers={args.workers} is negative; use workers=0 to have it chosen")
    bin_path.parent.mkdir(parents=True, exist_ok=True)
    path = find_tokenizer(args.tokenizer, "tokenizer")
    tokenizer = load_tokenizer(path, "tokenizer")
    end = end_of_document(tokenizer, path, args.eod_token, "eod_token") if args.append_eod else None
    ids = num_ids(tokenizer)
    recipe = Recipe(path, end, args.text_field, ids, args.skip_bad, "skip_bad")
    workers = args.workers or workers_for(files)
    bin_path.with_suffix(SUMS).unlink(missing_ok=True)
    with counting("tokenising", sum(path.stat().st_size for path in files)) as on_bytes:
        length_N, bad = tokenise_files(files, recipe, args.output, workers=workers, on_bytes=on_bytes)
    write_sums(args.output)
    return {
        "bin": str(bin_path),
        "idx": str(idx_path),
        "files": len(files),
        "documents": len(length_N),
        "tokens": int(length_N.sum()),
        "bin_bytes": bin_path.stat().st_size,
        "vocab_size": ids,
        "eod_token": None if end is None else tokenizer.id_to_token(end),
        "workers": workers,
        "skipped": dict(bad.counts),
        "seconds": round(time.monotonic() - started, 3),
    }


def main(argv: list[str]) -> None:
    args = parse_args(PrepareArgs, argv, prog="graphmoe.prepare", places=("input",))
    from graphmoe.data.errors import DataError

    try:
        counts = prepare(args)
    except DataError as error:
        raise ConfigError(str(error)) from error
    except OSError as error:
        raise ConfigError(f"cannot write output={args.output}: {error}") from error
    rate = counts["tokens"] / max(counts["seconds"], 1e-3)
    text = (
        f"{number_of(counts['documents'], 'document')}, {counts['tokens']:,} tokens out of "
        f"{number_of(counts['files'], 'file')} "
        f"-> {counts['bin']} ({counts['bin_bytes']:,} bytes)\n"
        f"{counts['seconds']:.1f} s with {number_of(counts['workers'], 'process')}, {rate:,.0f} tokens/s"
    )
    if counts["skipped"]:
        text += "\nskipped: " + ", ".join(f"{count:,} {kind}" for kind, count in counts["skipped"].items())
    emit(counts, text, args.format)


if __name__ == "__main__":
    run_tool(main)
