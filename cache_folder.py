"""The folder of the cache: entries with checksums, for many processes at once, and no error that ends a run.

An entry is a file: a line with the SHA-256 of its name and of the rest, then the rest. It is written under a temporary
name and renamed, so a reader never sees half of one. What was not written by this user, is no regular file, or has
another checksum counts as missing.

What is in the cache can be made again. So a folder that is full, read-only, gone or open to others is a warning, once
per folder and process, and the run goes on without it. Works without torch.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
import stat
import tempfile
from pathlib import Path

from weft import errors, knobs

log = logging.getLogger(__name__)

_PRIVATE = 0o700  # mode of its folders: the owner only
# Larger files are not read: a graph of 100,000 nodes has about 50 MiB.
_LARGEST_ENTRY = 1 << 28
# A name that is a link is refused, and a pipe does not stop the process that opens it.
# Windows has neither flag.
_OPEN_FLAGS = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)


def directory() -> Path:
    """The folder of the cache, ``knobs.cache_dir``, created with mode 0700 if it is missing.

    Raises:
        CacheUnusable: the folder cannot be made, another user owns it or others can write to it. Its kernels run on
            this user's GPUs.
    """
    try:
        path = Path(knobs.cache_dir).expanduser()
    except RuntimeError as error:  # a container's user without a home
        raise errors.CacheUnusable(knobs.cache_dir, OSError(str(error))) from error
    _check_private(path)
    return path


def usable() -> bool:
    """Whether entries can be kept: ``knobs.cache_dir`` is not empty and names a private folder. Where the folder is
    not, a warning says so once."""
    if not knobs.cache_dir:
        return False
    try:
        directory()
    except errors.CacheUnusable as error:
        _warn(knobs.cache_dir, str(error))
        return False
    return True


def entry_path(kind: str, name: str) -> Path:
    """The file of an entry. It need not exist, and neither does the folder.

    Args:
        kind: the folder inside the cache.
        name: a hash of everything that the entry depends on.
    """
    return Path(os.path.expanduser(knobs.cache_dir), kind, name[:2], name)


def read_checked(path: Path) -> bytes | None:
    """The content that :func:`write_checked` wrote to ``path``; None where it is missing or damaged, or cannot be
    read."""
    content = read_own(path) if usable() else None
    if content is None:
        return None
    checksum, _, rest = content.partition(b"\n")
    if checksum == _checksum(path, rest):
        return rest
    log.warning("%s is damaged (its checksum is another); it will be made again", path)
    return None


def write_checked(path: Path, content: bytes) -> bool:
    """Write ``content`` with its checksum to ``path`` and replace what is there; a reader sees the old or the new
    content, never a part. Returns whether that succeeded; the first failure is a warning."""
    if not usable():
        return False
    try:
        _write_atomically(path, _checksum(path, content) + b"\n" + content)
    except OSError as error:
        _warn(knobs.cache_dir, str(errors.CacheUnusable(knobs.cache_dir, error)))
        return False
    return True


def read_own(path: Path) -> bytes | None:
    """The bytes of a file of the cache; None where there is none. One that cannot be read, that others can write to or
    that is no plain file is left out with a warning."""
    try:
        return _read_own_file(path)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        log.warning("%s is not used: %s", path, error)
        return None


@functools.cache  # once per folder and process
def _warn(folder: str, message: str) -> None:
    log.warning("%s. This run goes on without keeping what it compiles", message)


# ---- who can write


@functools.cache  # once per process: every look-up of a kernel calls it
def _check_private(path: Path) -> None:
    """Create the folder if it is missing; raise CacheUnusable if other users can write to it."""
    try:
        _make_private(path)
        found = path.stat()
        if not stat.S_ISDIR(found.st_mode):
            raise NotADirectoryError(f"{path} is no folder")
    except (OSError, ValueError) as error:
        raise errors.CacheUnusable(str(path), OSError(str(error))) from error
    if others := _other_writers(found):
        reason = f"{others} can write to it (mode {stat.S_IMODE(found.st_mode):o}); take that away and empty it"
        raise errors.CacheUnusable(str(path), PermissionError(reason))


def _make_private(path: Path) -> None:
    """Create a folder and those above it, for this user alone whatever the process's mask says."""
    missing = [each for each in (path, *path.parents) if not each.exists()]
    for each in reversed(missing):
        each.mkdir(mode=_PRIVATE, exist_ok=True)


def _other_writers(found: os.stat_result) -> str:
    """Who beside this user can change a file or a folder; empty where nobody can."""
    if not hasattr(os, "geteuid"):  # Windows: access is no matter of modes, and a home folder is its user's
        return ""
    if found.st_uid not in (os.geteuid(), 0):
        return f"its owner, user {found.st_uid},"
    if found.st_mode & stat.S_IWOTH:
        return "everybody"
    if found.st_mode & stat.S_IWGRP and not _is_private_group(found.st_gid):
        return "its group"
    return ""


def _is_private_group(group: int) -> bool:
    """Whether this user is the only member of a group. Many systems create such a group for each user, with the same
    name, and make new directories writable for it."""
    import grp
    import pwd

    try:
        entry, user = grp.getgrgid(group), pwd.getpwuid(os.geteuid())
    except KeyError:
        return False
    return entry.gr_gid == user.pw_gid and entry.gr_name == user.pw_name and set(entry.gr_mem) <= {user.pw_name}


# ---- files


def _read_own_file(path: Path) -> bytes:
    """The bytes of a regular file that only this user can have written.

    Raises:
        OSError: there is none, or it cannot be read.
        ValueError: it is something else, another user's, or too large.
    """
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | _OPEN_FLAGS)) as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise ValueError("it is no regular file")
        if others := _other_writers(found):
            raise ValueError(f"{others} can write to it")
        if found.st_size > _LARGEST_ENTRY:
            raise ValueError(f"it has {found.st_size} bytes")
        return file.read(_LARGEST_ENTRY + 1)


def _write_atomically(path: Path, content: bytes) -> None:
    _make_private(path.parent)
    handle, temporary = tempfile.mkstemp(dir=path.parent)  # readable and writable for this user only
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def _checksum(path: Path, rest: bytes) -> bytes:
    # The name is hashed too. Otherwise a file copied to another name would be accepted as that kernel.
    return hashlib.sha256(path.name.encode() + b"\n" + rest).hexdigest().encode()
