"""Folder of checkpoints: names, manifests, final renames, clean-up, retention.

``step_00000100`` is complete: it gets this name after its manifest is written. Process <pid> writes or
deletes ``*.tmp-<pid>``. ``*.replaced`` is the old version of a step that is being saved again.
"""

import itertools
import json
import logging
import os
import re
import shutil
from collections.abc import Sequence, Set
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from graphmoe.config.arguments import near_path
from graphmoe.config.untrusted import FileError, is_file_name, read_json
from graphmoe.runtime.host.files import FileSum, difference, replace_text, sync_folder

log = logging.getLogger(__name__)

CHECKPOINTS = "checkpoints"
# List of files with sizes and SHA-256; DCP's list of entries
MANIFEST, METADATA = "manifest.json", ".metadata"
# Marks the folder of a run; written by graphmoe.run
RUN_CONFIG = "resolved.yaml"
_STEP = re.compile(r"step_([0-9]{8}|[1-9][0-9]{8,})")
_FORMAT, _FORMATS = 2, (1, 2)  # 1: tensors as torch.save writes them, 2: their elements
_TEMPORARY = re.compile(r"step_.+\.tmp-([0-9]+)")


class CheckpointError(RuntimeError):
    """Error: a checkpoint cannot be written, read or loaded into a state."""


class MismatchError(CheckpointError):
    """Error: an intact checkpoint has other entries than the state to load into."""


def shortened(lines: Sequence[str]) -> str:
    """Return up to ten lines as one text, taken in turn from each kind (a line's text before its colon)."""
    kinds: dict[str, list[str]] = {}
    for line in lines:
        kinds.setdefault(line.partition(":")[0], []).append(line)
    in_turn = [line for turn in itertools.zip_longest(*kinds.values()) for line in turn if line]
    more = [f"... and {len(lines) - 10} more"] if len(lines) > 10 else []
    return "\n  ".join([*sorted(in_turn[:10], key=lines.index), *more])


def folder_of(folder: Path, step: int) -> Path:
    return folder / f"step_{step:08d}"


def step_of(path: Path) -> int | None:
    """Return the step in a checkpoint folder's name, or None."""
    match = _STEP.fullmatch(path.name)
    return int(match[1]) if match else None


def run_of(path: Path) -> Path:
    """Return the run folder, given its path or that of its ``checkpoints`` or of one checkpoint."""
    inside = path if step_of(path) is None else path.parent
    return inside.parent if inside.name == CHECKPOINTS else inside


def why_none(path: Path) -> str:
    """Return the error text for a path without a checkpoint."""
    run = run_of(path)
    if (run / RUN_CONFIG).is_file() and not saved_steps(run / CHECKPOINTS):
        return (
            f"{path} holds no checkpoint: none was saved yet; a run saves first after checkpoint.interval "
            "steps, and at its end (never with checkpoint.enabled=false)"
        )
    folder = path.parent if step_of(path) is not None else run / CHECKPOINTS
    return (
        f"{path} holds no checkpoint; give a run's folder, its {CHECKPOINTS} folder, or a whole "
        f"checkpoint such as {folder_of(folder, 100)}{near_path(path)}"
    )


def saved_steps(folder: Path) -> list[int]:
    """Return the steps of the checkpoints, newest first; contents are not verified."""
    if not folder.is_dir():
        return []
    steps = [step_of(path) for path in folder.iterdir() if path.is_dir()]
    return sorted((step for step in steps if step is not None), reverse=True)


def locate(path: Path) -> tuple[Path, int | None]:
    """Return the folder of checkpoints, and the step if the path names one."""
    if path.is_dir() and (step := step_of(path)) is not None:
        return path.parent, step
    inside = path / CHECKPOINTS
    return inside if inside.is_dir() else path, None


def make_temporary(folder: Path, step: int) -> Path:
    final = folder_of(folder, step)
    temporary = final.with_name(f"{final.name}.tmp-{os.getpid()}")
    temporary.mkdir(parents=True)
    return temporary


def publish(temporary: Path, step: int) -> None:
    """Rename a complete temporary folder to the name of its step."""
    final = folder_of(temporary.parent, step)
    replaced = final.with_name(f"{final.name}.replaced")
    sync_folder(temporary)
    if final.exists():
        final.rename(replaced)
    try:
        temporary.rename(final)
    except OSError:
        if replaced.exists():
            replaced.rename(final)
        raise
    sync_folder(final.parent)
    if replaced.exists():
        removed(replaced)


def prune(
    folder: Path, newest: int, keep_last: int, keep_every: int, damaged: Set[int] = frozenset(),
    skipped: int = 0, held: int | None = None,
) -> list[int]:  # fmt: skip
    """Delete checkpoints that need not be kept once ``newest`` is complete; return their steps.

    Steps after ``newest`` belong to an abandoned continuation and are ignored. Damaged checkpoints do not
    count as kept. If the last ``skipped`` updates were skipped, checkpoints from before them are kept, and so
    is step ``held``.
    """
    for left in folder.glob(f"step_*.tmp-{os.getpid()}"):  # what an earlier call could not remove
        removed(left)
    steps = not_kept(saved_steps(folder), newest, keep_last, keep_every, damaged, skipped)
    return [step for step in steps if step != held and removed(folder_of(folder, step))]


def not_kept(
    steps: list[int], newest: int, keep_last: int, keep_every: int, damaged: Set[int] = frozenset(),
    skipped: int = 0,
) -> list[int]:  # fmt: skip
    """Return the steps, of those newest first, that `prune` deletes."""
    steps = [step for step in steps if step <= newest]
    good = [step for step in steps if step not in damaged]
    kept = set(good[:keep_last]) | {step for step in good if keep_every and step % keep_every == 0}
    if skipped:
        # a run that never recovers is restarted from one of these
        kept |= {step for step in steps if step <= newest - skipped}
    return [step for step in steps if step not in kept]


def clean_leftovers(folder: Path) -> None:
    """Remove incomplete checkpoints of dead processes. No other job may write to the folder."""
    own = [path for path in sorted(folder.glob("step_*")) if path.is_dir() and not path.is_symlink()]
    for path in own:
        final = path.with_name(path.name.removesuffix(".replaced"))
        if match := _TEMPORARY.fullmatch(path.name):
            pid = int(match[1])  # may be this process's: in containers each run may have the same
            if pid == os.getpid() or pid >= 2**31 or not psutil.pid_exists(pid):
                log.info("removing %s, left by a process that died", path)
                removed(path)
        elif final != path and final.exists():
            removed(path)
        elif final != path:  # the process died between the renames of `publish`
            path.rename(final)


def removed(path: Path) -> bool:
    """Remove a folder, of a link only the link; warn and return False if it cannot be removed now."""
    doomed = path
    try:
        if not _TEMPORARY.fullmatch(path.name):  # a half-deleted checkpoint must not look complete
            doomed = path.rename(path.with_name(f"{path.name}.tmp-{os.getpid()}"))
        if doomed.is_symlink():
            doomed.unlink()
        else:
            shutil.rmtree(doomed)
    except OSError as error:  # a mount, a file that NFS keeps, no permission
        log.warning("%s cannot be removed now: %s; the next save or start tries again", path, error)
        return False
    return True


@dataclass(frozen=True)
class _Manifest:
    format: int
    files: dict[str, FileSum]


def write_manifest(folder: Path, step: int, sums: dict[str, FileSum]) -> None:
    """Write and fsync manifest.json, the last file of a checkpoint."""
    import torch

    document = {
        "format": _FORMAT,
        "step": step,
        "torch": torch.__version__,
        "files": {name: asdict(sums[name]) for name in sorted(sums)},
    }
    replace_text(folder / MANIFEST, json.dumps(document, indent=1) + "\n", durably=True)


def damage(folder: Path, *, share: int = 0, shares: int = 1, contents: bool = True) -> list[str]:
    """Return how a checkpoint's files differ from its manifest, one line per file; empty if intact.

    ``share`` of ``shares`` is one rank's part of the files; ``contents=False`` compares sizes only.
    """
    try:
        files = files_in(folder)
    except CheckpointError as error:
        return [str(error)]
    names = sorted(files)[share::shares]
    found = (difference(folder / name, files[name], contents=contents) for name in names)
    return [line for line in found if line]


def files_in(folder: Path) -> dict[str, FileSum]:
    """Return the files of a checkpoint, by its manifest. *Raises* CheckpointError."""
    try:
        manifest = read_json(folder / MANIFEST, _Manifest)
    except FileError as error:
        raise CheckpointError(f"{MANIFEST}: cannot be read ({error})") from error
    if manifest.format not in _FORMATS:
        raise CheckpointError(f"{MANIFEST}: format {manifest.format}, this version reads up to {_FORMAT}")
    if METADATA not in manifest.files or not all(map(is_file_name, manifest.files)):
        raise CheckpointError(f"{MANIFEST}: it must name {METADATA}, and files of its own folder only")
    return manifest.files
