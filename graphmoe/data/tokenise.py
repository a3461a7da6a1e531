"""Tokenise text files into one ``.bin/.idx`` pair, the same for any number of processes."""

import logging
import multiprocessing
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path

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

Document = tuple[object, str]  # place, for messages, and text

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


_PartResult = tuple[list[int], BadRecords]  # document lengths of a part, and its bad records


def tokenise_files(
    files: Sequence[Path],
    recipe: Recipe,
    prefix: Path,
    *,
    workers: int,
    on_bytes: Callable[[int], None] = lambda num_bytes: None,
) -> tuple[npt.NDArray[np.int64], BadRecords]:
    """Write the documents of ``files``, in order, to ``prefix.bin`` and ``prefix.idx``.

    Returns each document's number of tokens, and what was skipped. ``on_bytes`` gets the bytes of each
    finished part. *Raises* DataError for the first bad content in file order, and for files without text.
    """
    bad = BadRecords(recipe.skip_bad, option=recipe.skip_option)
    parts = [part for path in files for part in parts_of(path, bad)]
    dtype = smallest_dtype(num_ids(load_tokenizer(recipe.tokenizer_path)))
    bin_path, idx_path = pair(prefix)
    remove_left_overs(bin_path.parent, bin_path.name)
    folder = draft_of(bin_path)
    lengths: list[npt.NDArray[np.int64]] = [np.zeros(0, np.int64)]
    folder.mkdir()
    try:
        partial = folder / "whole"
        with open(partial, "wb") as whole:
            results = _run_parts(parts, recipe, folder, dtype.str, workers)
            for number, (part, (of_part, found)) in enumerate(zip(parts, results, strict=True)):
                bad.merge(found.counts, found.first)
                lengths.append(np.asarray(of_part, dtype=np.int64))
                with open(folder / str(number), "rb") as piece:
                    shutil.copyfileobj(piece, whole, 16 << 20)
                (folder / str(number)).unlink()
                on_bytes(part.size_bytes)
            whole.flush()
            os.fsync(whole.fileno())
        length_N = np.concatenate(lengths)
        if not len(length_N):
            raise DataError(_nothing_found(files, bad))
        write_index(folder / "index", dtype, length_N)
        os.replace(partial, bin_path)
        os.replace(folder / "index", idx_path)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
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


def batches(documents: Iterator[Document], max_chars: int) -> Iterator[list[Document]]:
    batch: list[Document] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += len(document[1])
        if size >= max_chars:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _nothing_found(files: Sequence[Path], bad: BadRecords) -> str:
    names = ", ".join(map(str, files[:3])) + (f" and {len(files) - 3} more" if len(files) > 3 else "")
    skipped = f"; bad records skipped: {bad.counts.total()}, the first: {bad.first}" if bad.counts else ""
    return f"the corpus is empty: no text in {names}{skipped}"


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
    tokenizer = load_tokenizer(recipe.tokenizer_path)
    bad = BadRecords(recipe.skip_bad, option=recipe.skip_option)
    lengths: list[int] = []
    with open(out, "wb") as file:
        for batch in batches(read_documents(part, recipe.text_field, bad), BATCH_CHARS):
            for ids_T in encode_checked(tokenizer, batch, recipe.end_token, recipe.id_limit, bad):
                lengths.append(len(ids_T))
                file.write(ids_T.astype(dtype).tobytes())
    return lengths, bad
