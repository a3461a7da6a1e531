"""Text files (.txt, .jsonl, .parquet): finding them, splitting into parts, reading documents."""

import glob
import json
import os
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from graphmoe.config.arguments import near_path
from graphmoe.config.packages import is_installed
from graphmoe.config.schema import ConfigError
from graphmoe.data.errors import BadRecords, one_line

ENDINGS = (".txt", ".jsonl", ".parquet")
ROW_ENDINGS = ENDINGS[1:]  # of files with rows that have named fields
PART_BYTES = 16 << 20


@dataclass(frozen=True)
class Part:
    """An independently readable part of a file: bytes of a .txt or .jsonl, row groups of a .parquet."""

    path: Path
    start: int
    stop: int
    size_bytes: int


class LinePlace(NamedTuple):
    """Byte position of a line; str() gives its line number, for which it reads the file."""

    path: Path
    byte: int

    def __str__(self) -> str:
        return f"{self.path}:{_line_number(self.path, self.byte)}"


def find_files(patterns: Sequence[str], key: str, endings: tuple[str, ...] = ENDINGS) -> list[Path]:
    """Return the matching files, each once, sorted within each pattern; a folder means its text files.

    *Raises* ConfigError for a pattern without matches, non-files and unknown suffixes.
    """
    files: dict[Path, None] = {}
    for pattern in patterns:
        place = os.path.expanduser(pattern)
        is_folder = os.path.isdir(place)
        matches = _inside(place, endings) if is_folder else sorted(glob.glob(place, recursive=True))
        found = [Path(match).absolute() for match in matches if not os.path.isdir(match)]
        if unread := [path for path in found if not path.is_file()]:
            raise ConfigError(
                f"{key}: {unread[0]} is not a regular file; remove it, or use a pattern without it"
            )
        if not found and is_folder:
            raise ConfigError(f"{key}: the folder {pattern} has no {', '.join(endings)} file at any depth")
        if not found:
            raise ConfigError(
                f"{key}: no file matches '{pattern}' (looked from {os.getcwd()}){near_path(pattern)}"
            )
        files.update(dict.fromkeys(found))
    unknown = [str(path) for path in files if path.suffix not in endings]
    if unknown:
        raise ConfigError(f"{key}: cannot read {', '.join(unknown[:3])}; use files in {', '.join(endings)}")
    parquet = next((path for path in files if path.suffix == ".parquet"), None)
    if parquet and not is_installed("pyarrow"):
        raise ConfigError(f"{parquet}: parquet files need pyarrow: pip install 'graphmoe[hf]'")
    return list(files)


def _inside(folder: str, endings: tuple[str, ...]) -> list[str]:
    found = glob.glob(os.path.join(glob.escape(folder), "**"), recursive=True)
    return sorted(path for path in found if path.endswith(endings))


def parts_of(path: Path, bad: BadRecords) -> list[Part]:
    """Return a file's parts in order; a .txt is one document and one part."""
    size = path.stat().st_size
    if path.suffix == ".jsonl":
        ranges = [(start, min(start + PART_BYTES, size)) for start in range(0, size, PART_BYTES)]
        return [Part(path, start, stop, stop - start) for start, stop in ranges]
    if path.suffix == ".parquet":
        file = _open_parquet(path, bad)
        groups = range(file.num_row_groups) if file is not None else range(0)
        return [Part(path, group, group + 1, size // len(groups)) for group in groups]
    return [Part(path, 0, size, size)] if size else []


def read_documents(part: Part, text_field: str, bad: BadRecords) -> Iterator[tuple[object, str]]:
    """Yield (file and line or row, text) of each document; report invalid ones to ``bad``."""
    readers = {".txt": _read_txt, ".jsonl": _read_jsonl, ".parquet": _read_parquet}
    for place, text in readers[part.path.suffix](part, text_field, bad):
        if is_text(text, text_field, place, bad):
            yield place, text


def read_records(
    part: Part, fields: Collection[str], bad: BadRecords
) -> Iterator[tuple[object, dict[str, Any]]]:
    """Yield (file and line or row, record); of a .parquet only columns in ``fields``, if it has any."""
    if part.path.suffix == ".jsonl":
        yield from _json_records(part, bad)
    elif (file := _open_parquet(part.path, bad)) is not None:
        columns = [name for name in file.schema_arrow.names if name in fields]
        yield from _parquet_records(file, part, columns or None, bad)


def is_text(value: Any, field: str, place: object, bad: BadRecords) -> bool:
    """Return whether a document's value is valid text; report other values and lone surrogates to ``bad``."""
    if not isinstance(value, str):
        bad.report("record without text", f"{place}: field '{field}' is {type(value).__name__}, not text")
        return False
    try:
        value.encode()
    except UnicodeEncodeError as error:
        bad.report("text with a lone surrogate", f"{place}: {error.reason} at character {error.start}")
        return False
    return value != ""


def _read_txt(part: Part, text_field: str, bad: BadRecords) -> Iterator[tuple[object, Any]]:
    try:
        raw = part.path.read_bytes()
        yield part.path, raw.decode("utf-8-sig")
    except OSError as error:
        bad.report("unreadable file", f"{part.path}: {error.strerror}")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        bad.report("file that is not UTF-8", f"{part.path}:{line}: byte {raw[error.start]:#04x} is not UTF-8")


def _read_jsonl(part: Part, text_field: str, bad: BadRecords) -> Iterator[tuple[object, Any]]:
    for place, record in _json_records(part, bad):
        if text_field in record:
            yield place, record[text_field]
        else:
            there = ", ".join(list(record)[:10])
            bad.report("record without text", f"{place}: no field '{text_field}' (it has: {there})")


def _json_records(part: Part, bad: BadRecords) -> Iterator[tuple[object, dict[str, Any]]]:
    try:
        file = open(part.path, "rb")  # noqa: SIM115 (closed by the with below; opening alone may fail here)
    except OSError as error:
        bad.report("unreadable file", f"{part.path}: {error.strerror}")
        return
    with file:
        offset = part.start
        if offset:
            file.seek(offset - 1)
            # a line belongs to the part in which it starts
            offset += len(file.readline()) - 1
        while offset < part.stop and (raw := file.readline()):
            place = LinePlace(part.path, offset)
            line = raw if offset else raw.removeprefix(b"\xef\xbb\xbf")
            offset += len(raw)
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except UnicodeDecodeError as error:
                bad.report("line that is not UTF-8", f"{place}: byte {error.start} of the line is not UTF-8")
                continue
            except (ValueError, RecursionError) as error:
                bad.report("bad JSON line", f"{place}: not JSON: {error}")
                continue
            if isinstance(record, dict):
                yield place, record
            else:
                what = f"a JSON object is expected, not {type(record).__name__}"
                bad.report("record without text", f"{place}: {what}")


def _line_number(path: Path, offset: int) -> int:
    count = 1
    with open(path, "rb") as file:
        while offset > 0 and (block := file.read(min(offset, 1 << 20))):
            count += block.count(b"\n")
            offset -= len(block)
    return count


def _read_parquet(part: Part, text_field: str, bad: BadRecords) -> Iterator[tuple[object, Any]]:
    file = _open_parquet(part.path, bad)
    if file is None:
        return
    if text_field not in file.schema_arrow.names:
        names = f"{part.path}; its columns: {', '.join(file.schema_arrow.names)}"
        raise ConfigError(f"text_field={text_field} is not a column of {names}")
    for place, record in _parquet_records(file, part, [text_field], bad):
        yield place, record[text_field]


def _parquet_records(
    file: Any, part: Part, columns: Sequence[str] | None, bad: BadRecords
) -> Iterator[tuple[object, dict[str, Any]]]:
    first_row = sum(file.metadata.row_group(group).num_rows for group in range(part.start))
    try:
        records = file.read_row_group(part.start, columns=columns).to_pylist()
        if len(records) != (rows := file.metadata.row_group(part.start).num_rows):
            raise ValueError(f"it has {len(records)} rows instead of {rows}")
    except (OSError, ValueError) as error:  # pyarrow's own errors derive from these
        place = f"{part.path}: row group {part.start} (row {first_row} on)"
        bad.report("unreadable row group", f"{place}: {one_line(error)}")
        return
    for row, record in enumerate(records, first_row):
        yield f"{part.path} row {row}", record


def _open_parquet(path: Path, bad: BadRecords) -> Any:
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path)
        rows = sum(file.metadata.row_group(group).num_rows for group in range(file.num_row_groups))
        if rows != file.metadata.num_rows:
            raise ValueError(f"its row groups have {rows} rows instead of {file.metadata.num_rows}")
        return file
    except (OSError, ValueError) as error:
        size = path.stat().st_size
        bad.report("unreadable file", f"{path} ({size} bytes) is not a whole parquet file: {one_line(error)}")
        return None
