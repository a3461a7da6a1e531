"""Entries of the compile cache: list them, verify them, prune the oldest.

python -m graphmoe.cache
python -m graphmoe.cache action=verify
python -m graphmoe.cache action=prune max_size=20GB
"""

from __future__ import annotations

import enum
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE
from rich.console import Group
from rich.markup import escape

from graphmoe.config.arguments import emit, parse_args, parse_size, run_tool, text_table
from graphmoe.config.ranges import number_of, shown_size
from graphmoe.config.schema import ConfigError, OutputFormat, compiled_folder
from graphmoe.runtime.cache.folders import TAG_FILE, check_trusted, refuse_links

if TYPE_CHECKING:
    from graphmoe.runtime.cache.entries import Entry
    from graphmoe.runtime.cache.store import CompileCache, Held

Action = enum.StrEnum("Action", ("list", "verify", "prune"))


@dataclass
class CacheArgs:
    action: Action = Action.list
    """list the entries, verify every file (exit status 1 if one was damaged), or prune."""
    max_size: str | None = None
    """prune: size that the rest may have, such as 20GB or 500MiB; none removes only what no entry needs."""
    cache_dir: Path | None = None
    """Folder of compiled code; default: compiled in $GRAPHMOE_CACHE or ~/.cache/graphmoe."""
    format: OutputFormat = OutputFormat.text
    """text, or json: one document on stdout and nothing else there."""


def main(argv: list[str]) -> None:
    args = parse_args(CacheArgs, argv, prog="graphmoe.cache", places=("action",))
    if args.max_size is not None and args.action is not Action.prune:
        raise ConfigError(f"max_size={args.max_size} is for action=prune, not action={args.action.name}")
    max_bytes = None if args.max_size is None else parse_size("max_size", args.max_size)
    folder = compiled_folder(None if args.cache_dir is None else str(args.cache_dir))
    is_empty = not folder.exists() or (folder.is_dir() and not any(folder.iterdir()))
    if not is_empty and not (folder / TAG_FILE).exists():
        raise ConfigError(f"{folder} is not a compile cache: it has no {TAG_FILE}; set cache_dir=...")
    if args.action is not Action.list:
        folder = folder.resolve()
        check_trusted(folder, shared=True)
        refuse_links(folder)
    from graphmoe.runtime.cache.store import CompileCache, holdings, prune, verify  # imports torch

    cache = CompileCache(folder)
    if args.action is Action.list:
        held = [*holdings(cache)]
        document = list_document(cache, held)
        emit(document, list_text(document, held), args.format)
    elif args.action is Action.verify:
        document = verify(cache)
        emit(document, verify_text(document), args.format)
        if document["damaged"] or document["lacking"]:
            sys.exit(1)
    else:
        document, gone = prune(cache, max_bytes)
        emit(document, prune_text(document, gone), args.format)


def list_document(cache: CompileCache, held: list[Held]) -> dict[str, Any]:
    from graphmoe.runtime.cache.key import BASE
    from graphmoe.runtime.cache.store import total_bytes

    return {
        "cache_dir": str(cache.folder),
        "total_bytes": total_bytes(cache),
        "entries": [
            {
                "key": one.entry.key,
                "model": one.entry.notes.get("model"),
                "device": one.entry.facts.get(f"{BASE}device"),
                "scope": one.entry.facts.get("graph.scope"),
                "graphs": one.entry.notes.get("graphs"),
                "files": len(one.entry.files),
                "bytes": one.num_bytes,
                "shared_bytes": one.shared_bytes,
                "last_used": _date(one.entry.last_used),
                "created": _date(one.entry.created),
            }
            for one in held
        ],
    }


def list_text(document: dict[str, Any], held: list[Held]) -> Group:
    """Return a table of entries; those with equal model, device and scope show the facts that differ."""
    from graphmoe.runtime.cache.key import differences

    first: dict[str, Held] = {}
    rows = []
    for one, row in zip(held, document["entries"], strict=True):
        scope = row["scope"]
        shown = f"[{','.join(scope)}]" if isinstance(scope, list) else scope or "?"
        what = f"{row['model'] or '?'} on {row['device'] or '?'}, scope {shown}"
        other = differences(one.entry.facts, first.setdefault(what, one).entry.facts)
        words = "; ".join([what, *other])
        rows.append(
            [words, row["key"][:8], row["last_used"], shown_size(row["bytes"]), str(row["graphs"] or "?")]
        )
    total = f"{number_of(len(held), 'entry')}, {shown_size(document['total_bytes'])} in all"
    return Group(
        escape(document["cache_dir"]),
        text_table(("what", "key", "last used", "size", "graphs"), rows, box=SIMPLE),
        total,
    )


def verify_text(document: dict[str, Any]) -> str:
    damaged, files = len(document["damaged"]), document["files"]
    lines = [f"whole: {files - damaged} of {number_of(files, 'file')}"]
    if damaged:
        lines[0] += f"; set aside: {damaged}"
    for key, paths in document["lacking"].items():
        lines.append(f"entry {key} lost these files; its next job compiles them again:")
        lines += [f"  {path}" for path in paths]
    return "\n".join(lines)


def prune_text(document: dict[str, Any], gone: list[Entry]) -> str:
    lines = [
        f"entry {entry.key} ({entry.notes.get('model', '?')}, last used {_date(entry.last_used)}) is gone"
        for entry in gone
    ]
    lines += [f"the work folder {name} of a killed job is gone" for name in document["work_folders"]]
    if document["damaged"]:
        lines.append(f"damaged files removed: {document['damaged']}")
    if document["waiting_bytes"]:
        size = shown_size(document["waiting_bytes"])
        lines.append(f"{size} are kept for an hour: a job may be about to use them")
    sizes = f"{shown_size(document['bytes_before'])} -> {shown_size(document['bytes_after'])}"
    return "\n".join([*lines, f"{sizes}; stored files removed: {document['files']}"])


def _date(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))


if __name__ == "__main__":
    run_tool(main)
