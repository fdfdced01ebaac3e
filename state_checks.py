"""Comparisons of many Python objects with what they were, each by one call in C++.

A step checks its guards before every call, while a GPU may wait. Nearly always nothing has changed, but a model of 300
parameters has 1,200 tensors, 900 dictionaries and 300 modules that could have. Torch's own checks of tensors take 50 ns
each, those of `state_checks.cpp` 6 ns.

The file is compiled once for each version of Python and torch, with the headers that both bring, and kept in the cache
folder. Without a C++ compiler or a cache folder the comparisons are made through torch and in Python, and give the same
answers.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from weft import cache_folder, torch_adapter

log = logging.getLogger(__name__)

_SOURCE = Path(__file__).with_suffix(".cpp")
_KINDS = ("alike", "in_place", "no_gradients", "empty", "versions", "attributes")
_COMPILE_SECONDS = 120  # at most; it takes 2


class _Check:
    """A check that C++ makes, called with what it compares where that is not always the same.

    Args:
        library: of the checks.
        handle: what the library made.
        held: what must live as long as the check.
    """

    __slots__ = ("_handle", "_held", "_library")

    def __init__(self, library: ctypes.PyDLL, handle: int, held: tuple[Any, ...]) -> None:
        self._library, self._handle, self._held = library, handle, held

    def __call__(self, found: list[Any] | None = None) -> bool:
        return self._library.holds(self._handle, found) == 1

    def __del__(self) -> None:
        self._library.discard(self._handle)


def like(tensors: list[torch.Tensor]) -> Callable[[list[Any]], bool]:
    """A check that a list holds as many tensors, of the types, dtypes, devices, sizes and strides of these, which
    require grad where these do. It does not hold the tensors."""
    return _check("alike", tensors, tuple(set(map(type, tensors)))) or torch_adapter.like(tensors)


def same_addresses(tensors: list[torch.Tensor]) -> Callable[[], bool]:
    """A check that the elements of these tensors begin where they do now."""
    return _check("in_place", tensors, tuple(tensors)) or torch_adapter.same_addresses(tensors)


def no_gradients(leaves: list[torch.Tensor]) -> Callable[[], bool] | None:
    """A check that the ``.grad`` of these tensors is None; None as :func:`unchanged_dicts`."""
    return _check("no_gradients", leaves, tuple(leaves)) or torch_adapter.no_gradients(leaves)


def unchanged_dicts(dicts: list[dict[Any, Any]]) -> Callable[[], bool] | None:
    """A check that these dictionaries have the versions that they have now; None before torch has loaded what makes
    such checks (its optimizers load it)."""
    return _check("versions", dicts, tuple(dicts)) or torch_adapter.unchanged_dicts(dicts)


def all_empty(containers: list[Any]) -> Callable[[], bool]:
    """A check that these dictionaries, lists and other containers are empty."""
    compared = [each for each in containers if isinstance(each, (dict, list, set, frozenset))]
    others = [each for each in containers if not isinstance(each, (dict, list, set, frozenset))]
    check = _check("empty", compared, tuple(compared))
    if check is None:
        return lambda: not any(containers)
    return (lambda: check() and not any(others)) if others else check


def same_attributes(objects: list[tuple[Any, type, Any]]) -> Callable[[], bool]:
    """A check of objects, each with its class and the dictionary of its attributes, that they still have these; for
    None as the dictionary, their classes alone. No code of theirs runs."""
    check = _check("attributes", objects, tuple(objects))
    return check or (lambda: all(type(obj) is kind and _has(obj, attributes) for obj, kind, attributes in objects))


def _has(obj: Any, attributes: Any) -> bool:
    return attributes is None or object.__getattribute__(obj, "__dict__") is attributes


def _check(kind: str, objects: list[Any], held: tuple[Any, ...]) -> _Check | None:
    if (library := compiled()) is None:
        return None
    handle = getattr(library, kind)(objects)
    return _Check(library, handle, held) if handle else None


@functools.cache  # compiled at most once a process
def compiled() -> ctypes.PyDLL | None:
    """The compiled checks; None where there is no compiler, no cache folder or an unknown layout of tensors."""
    offset = torch_adapter.offset_in_tensors()
    if offset is None or sysconfig.get_config_var("Py_GIL_DISABLED") or not cache_folder.usable():
        return None
    try:
        library = _load(_binary())
    except (OSError, subprocess.SubprocessError) as error:
        log.info("guards are checked without compiled code: %s", getattr(error, "stderr", None) or error)
        return None
    for kind in _KINDS:
        function = getattr(library, kind)
        function.argtypes, function.restype = [ctypes.py_object], ctypes.c_void_p
    library.holds.argtypes = [ctypes.c_void_p, ctypes.py_object]
    library.discard.argtypes, library.discard.restype = [ctypes.c_void_p], None
    library.set_impl_offset.argtypes, library.set_impl_offset.restype = [ctypes.c_ssize_t], None
    library.set_impl_offset(offset)
    return library


def _binary() -> bytes:
    """The library, from the cache folder or compiled.

    Raises:
        OSError: there is no compiler.
        SubprocessError: it failed.
    """
    versions = (sys.version, sysconfig.get_config_var("SOABI"), torch.__version__, torch.version.git_version)
    key = "\n".join(map(str, (*versions, _SOURCE.read_text())))
    path = cache_folder.entry_path("state_checks", hashlib.sha256(key.encode()).hexdigest())
    if (known := cache_folder.read_checked(path)) is not None:
        return known
    start = time.perf_counter()
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or "clang++"
    installed = Path(torch.__file__).parent
    headers = [f"-I{installed / 'include'}", f"-I{sysconfig.get_path('include')}"]
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "state_checks.so")
        command = [compiler, "-std=c++20", "-O2", "-w", "-shared", "-fPIC", *headers, str(_SOURCE), "-o", str(output)]
        command += [f"-L{installed / 'lib'}", "-lc10"]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=_COMPILE_SECONDS)
        content = output.read_bytes()
    cache_folder.write_checked(path, content)
    log.debug("compiled the checks of guards in %.1f s", time.perf_counter() - start)
    return content


def _load(content: bytes) -> ctypes.PyDLL:
    """Load a library from its bytes.

    Raises:
        OSError: it does not fit this torch.
    """
    with tempfile.NamedTemporaryFile(suffix=".so") as file:
        file.write(content)
        file.flush()
        return ctypes.PyDLL(file.name)  # holds the GIL during calls
