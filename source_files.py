"""Whose code a file is: the user's own, an installed package's, or machinery (torch, the standard library, weft)."""

from __future__ import annotations

import contextlib
import functools
import os
import sysconfig

import torch

_OWN_ROOT = os.path.dirname(os.path.abspath(__file__))
_OWN_USER_ROOMS = ("tests", "examples", "bench")
_OWN_USER_FILES = ("toy.py",)
_INSTALLED = ("site-packages", "dist-packages")

# Names of code without a file that a user wrote: `python -c` and `exec`, a pipe, a prompt (also of Python 3.13 and of
# `code.interact`), a cell, a docstring's example. Frozen importlib and code that libraries generate have other names.
_TYPED_IN = (
    "<string>", "<stdin", "<ipython-input", "<python-input", "<console>", "<input>", "<cell", "<notebook", "<doctest ",
)  # fmt: skip

# What a file is; all but machinery (torch, the standard library, weft) counts as user code.
_MACHINERY, _OWN, LIBRARY = 0, 1, 2


class _KindOfFile(dict[str, int]):
    """The kind of each file that was asked for: one look-up in C where it was asked for before."""

    def __missing__(self, filename: str) -> int:
        kind = self[filename] = _classify(filename)
        return kind


KIND_OF_FILE = _KindOfFile()
"""What each file of code is: 0 for machinery (torch, the standard library, weft), another number for user code."""


def is_user_file(filename: str) -> bool:
    """Whether code from this file is user code, that of installed packages included."""
    return KIND_OF_FILE[filename] != _MACHINERY


def is_own_file(filename: str) -> bool:
    """Whether code from this file is the user's own, and not of an installed package."""
    return KIND_OF_FILE[filename] == _OWN


def is_library_file(filename: str) -> bool:
    """Whether code from this file is that of an installed package other than torch and weft."""
    return KIND_OF_FILE[filename] == LIBRARY


def is_weft_file(filename: str) -> bool:
    """Whether code from this file is weft itself: not its tests, examples or benchmarks, and no package beside it.

    A virtual environment may lie inside the checkout; what is installed there is not weft.
    """
    return any(_is_weft(path) for path in {os.path.abspath(filename), os.path.realpath(filename)})


def _classify(filename: str) -> int:
    if not _is_users(filename):
        return _MACHINERY
    return LIBRARY if _is_installed(filename) else _OWN


def _is_installed(filename: str) -> bool:
    """Whether an installer has put a file where it is: into a folder of packages, or with ``pip install --target`` into
    any folder, in which it leaves its records."""
    if any(folder in _INSTALLED for folder in filename.split(os.sep)):
        return True
    folder, name = os.path.split(os.path.abspath(filename))
    while name:
        if name in _names_installed_in(folder):
            return True
        folder, name = os.path.split(folder)
    return False


@functools.cache
def _names_installed_in(folder: str) -> frozenset[str]:
    """The packages and modules in a folder that the records of installers there name."""
    found = set[str]()
    with contextlib.suppress(OSError):
        for record in (each for each in os.listdir(folder) if each.endswith(".dist-info")):
            with contextlib.suppress(OSError), open(os.path.join(folder, record, "RECORD"), encoding="utf-8") as lines:
                found.update(line.partition(",")[0].partition("/")[0] for line in lines)
    return frozenset(found)


def _is_users(filename: str) -> bool:
    if filename.startswith("<"):
        return filename.startswith(_TYPED_IN)
    path = os.path.abspath(filename)
    return not (_is_machinery(path) or _is_machinery(_real_path(path)))


def _real_path(path: str) -> str:
    """An absolute path with links resolved. A process loads thousands of files from a few hundred folders, whose own
    paths are resolved once."""
    folder, name = os.path.split(path)
    path = os.path.join(_real_folder(folder), name)
    return os.path.realpath(path) if os.path.islink(path) else path


_real_folder = functools.cache(os.path.realpath)


def _is_machinery(path: str) -> bool:
    return _is_machinery_folder(os.path.dirname(path) + os.sep) or _is_weft(path)


@functools.cache
def _is_machinery_folder(folder: str) -> bool:
    """Whether a folder, with a separator at its end, is torch's or the standard library's."""
    if any(folder.startswith(root) for root in _roots(os.path.dirname(torch.__file__))):
        return True
    for library in _standard_library():
        for root in _roots(library):
            if folder.startswith(root):
                return not any(installed in folder[len(root) :].split(os.sep) for installed in _INSTALLED)
    return False


def _is_weft(path: str) -> bool:
    for root in _roots(_OWN_ROOT):
        if path.startswith(root):
            parts = path[len(root) :].split(os.sep)
            users = parts[0] in _OWN_USER_ROOMS or parts[-1] in _OWN_USER_FILES
            return not users and not any(installed in parts for installed in _INSTALLED)
    return False


@functools.cache
def _standard_library() -> list[str]:
    return [sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")]


@functools.cache
def _roots(folder: str) -> list[str]:
    """A folder as written and with links resolved: an editable install may be reached through either. The longer path
    is first, since a link may lie inside the folder that it leads to."""
    spellings = {os.path.abspath(folder) + os.sep, os.path.realpath(folder) + os.sep}
    return sorted(spellings, key=len, reverse=True)
