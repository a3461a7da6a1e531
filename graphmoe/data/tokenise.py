"""Tokenise text files into one ``.bin/.idx`` pair, the same for any number of processes."""

import logging
import multiprocessing
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from graphmoe.data.cache import draft_of, remove_left_overs
from graphmoe.data.errors import BadRecords, DataError
from graphmoe.data.indexed import pair, smallest_dtype, write_index
from graphmoe.data.text_files import Part, parts_of, read_documents
from graphmoe.data.tokenizer import encode, load_tokenizer, num_ids
from graphmoe.runtime.host.signals import die_with_parent

log = logging.getLogger(__name__)

Row = TypeVar("Row", bound=tuple[Any, ...])  # place, for messages, text, and perhaps more

BATCH_CHARS = 1 << 20
MIN_BYTES_PER_WORKER = 16 << 20  # starting a process costs about as much as tokenising this much


@dataclass(frozen=True)
class Recipe:
    tokenizer_path: Path
    end_token: int | None  # id appended to each document, if any
    text_field: str
    id_limit: int  # first id beyond the model's vocabulary
    skip_bad: bool
    skip_option: str = "data.skip_bad"

    def dtype(self) -> np.dtype[Any]:
        """Return the dtype of stored tokens."""
        return smallest_dtype(num_ids(load_tokenizer(self.tokenizer_path)))

    def documents(self, part: Part, bad: BadRecords, notes: Counter[str]) -> Iterator[npt.NDArray[Any]]:
        """Yield tokens of each document of a part; report bad records, count what else there is to note."""
        tokenizer = load_tokenizer(self.tokenizer_path)
        for batch in batches(read_documents(part, self.text_field, bad), BATCH_CHARS):
            yield from encode_checked(tokenizer, batch, self.end_token, self.id_limit, bad)


_PartResult = tuple[list[int], BadRecords, Counter[str]]  # document lengths of a part, bad records, notes


def tokenise_files(
    files: Sequence[Path],
    recipe: Recipe,
    prefix: Path,
    *,
    workers: int,
    on_bytes: Callable[[int], None] = lambda num_bytes: None,
    on_notes: Callable[[Counter[str]], None] = lambda notes: None,
) -> tuple[npt.NDArray[np.int64], BadRecords]:
    """Write the documents of ``files``, in order, to ``prefix.bin`` and ``prefix.idx``.

    Returns each document's number of tokens, and what was skipped. ``on_bytes`` gets the bytes of each
    finished part, ``on_notes`` what the recipe counted. *Raises* DataError for the first bad content in
    file order, and for files without text.
    """
    bad, noted = BadRecords(recipe.skip_bad, option=recipe.skip_option), Counter[str]()
    parts = [part for path in files for part in parts_of(path, bad)]
    dtype = recipe.dtype()
    bin_path, idx_path = pair(prefix)
    remove_left_overs(bin_path.parent, bin_path.name)
    folder = draft_of(bin_path)
    lengths: list[npt.NDArray[np.int64]] = [np.zeros(0, np.int64)]
    folder.mkdir()
    try:
        partial = folder / "whole"
        with open(partial, "wb") as whole:
            results = _run_parts(parts, recipe, folder, dtype.str, workers)
            for number, (part, (of_part, found, notes)) in enumerate(zip(parts, results, strict=True)):
                bad.merge(found.counts, found.first)
                lengths.append(np.asarray(of_part, dtype=np.int64))
                with open(folder / str(number), "rb") as piece:
                    shutil.copyfileobj(piece, whole, 16 << 20)
                (folder / str(number)).unlink()
                on_bytes(part.size_bytes)
                noted.update(notes)
            whole.flush()
            os.fsync(whole.fileno())
        length_N = np.concatenate(lengths)
        if not len(length_N):
            raise DataError(_nothing_found(files, bad, noted))
        write_index(folder / "index", dtype, length_N)
        os.replace(partial, bin_path)
        os.replace(folder / "index", idx_path)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    on_notes(noted)
    return length_N, bad


def workers_for(files: Sequence[Path]) -> int:
    """Return a useful number of processes for these files and cores; 1 starts none."""
    from graphmoe.runtime.host.tuning import cpus_here  # imports torch

    total_bytes = sum(path.stat().st_size for path in files)
    return max(1, min(len(cpus_here()), total_bytes // MIN_BYTES_PER_WORKER))


def encode_checked(
    tokenizer: Tokenizer, batch: Sequence[tuple[object, str]], end: int | None, id_limit: int, bad: BadRecords
) -> list[npt.NDArray[np.int64]]:
    """Return token ids of each (place, text); report and skip documents with ids from ``id_limit`` on."""
    documents = []
    for (place, _), ids_T in zip(batch, encode(tokenizer, [text for _, text in batch], end), strict=True):
        if ids_T.max(initial=0) >= id_limit:
            at = int(np.argmax(ids_T >= id_limit))
            bad.report_id("document", f"{place}, position {at}", int(ids_T[at]), id_limit)
        elif len(ids_T):
            documents.append(ids_T)
    return documents


def batches(documents: Iterator[Row], max_chars: int) -> Iterator[list[Row]]:
    batch: list[Row] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += len(document[1])
        if size >= max_chars:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _nothing_found(files: Sequence[Path], bad: BadRecords, notes: Counter[str]) -> str:
    names = ", ".join(map(str, files[:3])) + (f" and {len(files) - 3} more" if len(files) > 3 else "")
    skipped = f"; bad records skipped: {bad.counts.total()}, the first: {bad.first}" if bad.counts else ""
    counted = "".join(f"; {name.replace('_', ' ')}: {count}" for name, count in sorted(notes.items()))
    return f"the corpus is empty: no text in {names}{skipped}{counted}"


def _run_parts(
    parts: Sequence[Part], recipe: Recipe, folder: Path, dtype: str, workers: int
) -> Iterator[_PartResult]:
    outs = [folder / str(number) for number in range(len(parts))]
    if workers <= 1 or len(parts) <= 1:
        for part, out in zip(parts, outs, strict=True):
            yield _tokenise_part(part, recipe, out, dtype)
        return
    # not fork: the parent may have threads and a device context; the server imports once for all workers
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    executor = ProcessPoolExecutor(workers, mp_context=context, initializer=_begin_worker)
    try:
        yield from executor.map(_tokenise_part, parts, repeat(recipe), outs, repeat(dtype))
    finally:
        executor.shutdown(cancel_futures=True)


def _begin_worker() -> None:
    die_with_parent()
    # the other processes use the other cores
    os.environ["RAYON_NUM_THREADS"] = "1"


def _tokenise_part(part: Part, recipe: Recipe, out: Path, dtype: str) -> _PartResult:
    bad, notes = BadRecords(recipe.skip_bad, option=recipe.skip_option), Counter[str]()
    lengths: list[int] = []
    with open(out, "wb") as file:
        for ids_T in recipe.documents(part, bad, notes):
            lengths.append(len(ids_T))
            file.write(ids_T.astype(dtype).tobytes())
    return lengths, bad, notes
