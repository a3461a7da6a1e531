"""Folder of a compile cache: its permissions, and environment variables that point torch to a work folder."""

import contextlib
import errno
import grp
import os
import pwd
import shlex
import shutil
import stat
import tempfile
from pathlib import Path

from graphmoe.config.schema import ConfigError
from graphmoe.runtime.cache.blobs import write_whole
from graphmoe.runtime.cache.entries import FLASH4, INDUCTOR, TRITON
from graphmoe.runtime.host.files import link_in

# Each with the part of a work folder
VARIABLES = {
    "TORCHINDUCTOR_CACHE_DIR": INDUCTOR,
    "TRITON_CACHE_DIR": TRITON,
    "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR": FLASH4,
}
OURS = "GRAPHMOE_WORK_FOLDER"
TEMPORARY = "graphmoe-work-"
TAG_FILE = "CACHEDIR.TAG"
# Standard tag (bford.info/cachedir): backups skip the folder, and the command prunes only tagged ones
TAG = "Signature: 8a477f597d28d172789f06886806bc55\n# Compiled code of graphmoe, docs/compile.md.\n"
# A cold compilation would not fit: the disk counts as full
MIN_FREE_BYTES = 256 * 2**20


def check_trusted(folder: Path, *, shared: bool) -> None:
    """Reject a cache that other users can write to, since its files are executed. *Raises* ConfigError.

    As in sshd: the folder, its parents and links to it belong to this user or root and are not writable by
    others, except sticky parents (/tmp); files inside too if others may enter. ``shared`` allows groups.
    """
    place = folder.resolve()
    for path in (*reversed(folder.absolute().parents), folder, *reversed(place.parents)):
        _check_trusted(path, folder, shared, is_above=path != folder or path.is_symlink())
    _check_trusted(place, folder, shared)
    if not place.is_dir() or not place.stat().st_mode & (stat.S_IXGRP | stat.S_IXOTH):
        return
    for root, folders, files in os.walk(place):  # skips what is removed meanwhile
        for inside in (Path(root, name) for name in (*folders, *files)):
            _check_trusted(inside, folder, shared)
            if inside.is_symlink():
                target = inside.resolve()
                for path in (*target.parents, target):
                    _check_trusted(path, folder, shared, is_above=path != target)


def _check_trusted(path: Path, cache: Path, shared: bool, *, is_above: bool = False) -> None:
    try:
        status = path.lstat()
    except OSError:
        return
    mode = 0 if stat.S_ISLNK(status.st_mode) else stat.S_IMODE(status.st_mode)  # its target's counts
    is_sticky = is_above and bool(mode & stat.S_ISVTX)
    by_group = mode & stat.S_IWGRP and not shared and not _is_own_group(status.st_gid)
    is_open = (by_group or mode & stat.S_IWOTH) and not is_sticky
    if is_open or not (shared or status.st_uid in (0, os.getuid())):
        trust = "" if mode & stat.S_IWOTH else ", compile.cache_shared=true if you trust its group"
        raise ConfigError(
            f"compile.cache_dir={cache} holds code that is run, and {path} belongs to "
            f"{_owner(status)} with mode {mode:04o}, so that others may write there; use chmod -R go-w "
            f"{path}, another compile.cache_dir or GRAPHMOE_CACHE{trust}, or compile.cache=false"
        )


def refuse_links(cache: Path) -> None:
    """Raise ConfigError if anything in the cache is a link: it makes none, and removing would follow it."""
    # compilers link in the other folder, of which only whole folders are removed
    if path := link_in(cache, ("work",)):
        raise ConfigError(
            f"{path} is a link to {os.readlink(path)}, and no job makes one there; nothing was "
            f"removed; remove the link first: rm {shlex.quote(str(path))}"
        )


def _is_own_group(gid: int) -> bool:
    try:
        user, group = pwd.getpwuid(os.getuid()), grp.getgrgid(gid)
    except KeyError:
        return False
    return user.pw_gid == gid and group.gr_name == user.pw_name and not {*group.gr_mem} - {user.pw_name}


def _owner(status: os.stat_result) -> str:
    try:
        return pwd.getpwuid(status.st_uid).pw_name
    except KeyError:
        return f"user {status.st_uid}"


def make_cache(folder: Path, *, shared: bool = False) -> None:
    """Create the cache folder. *Raises* OSError, also if the disk is nearly full."""
    if not folder.is_dir():
        folder.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
            folder.chmod(0o2770 if shared else 0o700)
    free = shutil.disk_usage(folder).free
    if free < MIN_FREE_BYTES:
        raise OSError(errno.ENOSPC, f"{free / 2**20:.0f} MiB are free")
    if not (folder / TAG_FILE).exists():
        write_whole(folder / TAG_FILE, TAG.encode())


def point_torch_at(work: Path) -> list[str]:
    """Set the cache variables of torch and Triton that the user has not set; return their names."""
    names = [name for name in VARIABLES if not is_users(name)]
    for name in names:
        os.environ[name] = str(work / VARIABLES[name])
    os.environ[OURS] = str(work)
    return names


def point_torch_away(work: Path) -> None:
    for name, part in VARIABLES.items():
        if os.environ.get(name) == str(work / part):
            del os.environ[name]
    if os.environ.get(OURS) == str(work):
        del os.environ[OURS]


def is_users(name: str) -> bool:
    """Return whether the user has set an environment variable."""
    value = os.environ.get(name)
    if not value:
        return False
    if OURS in os.environ and Path(value).is_relative_to(os.environ[OURS]):
        return False
    # torch sets its own default
    path = Path(value)
    return not (path.parent == Path(tempfile.gettempdir()) and path.name.startswith("torchinductor_"))
