"""Comparisons of many Python objects with what they were, each by one call in C++.

A step checks its guards before every call, while a GPU may wait. Nearly always nothing has changed, but a model of 300
parameters has 1,200 tensors, 900 dictionaries and 300 modules that could have. Torch's own checks of tensors take 50 ns
each, those of `state_checks.cpp` 6 ns.

The file is compiled once for each version of Python and torch, with the headers that both bring, and kept in the cache
folder. Without a C++ compiler or a cache folder the comparisons are made through torch and in Python, and give the same
answers.
"""

from __future__ import annotations

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
import weakref
from collections.abc import Callable
from importlib.machinery import ExtensionFileLoader, ModuleSpec
from importlib.util import module_from_spec
from itertools import repeat, starmap
from operator import attrgetter, is_
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from weft import cache_folder, torch_adapter

log = logging.getLogger(__name__)

_SOURCE = Path(__file__).with_suffix(".cpp")
_MODULE = "compiled_state_checks"
_COMPILE_SECONDS = 120  # at most; it takes 2


def unchanged_tensors(tensors: list[torch.Tensor], placed: list[torch.Tensor]) -> Callable[[], bool]:
    """A check that tensors have the types, dtypes, devices, sizes and strides that they have now, require grad where
    they do now, and that the elements of those in ``placed`` begin where they do now."""
    every = list({id(tensor): tensor for tensor in (*tensors, *placed)}.values())
    if (check := _check("tensors", every)) is not None:
        return check
    alike, in_place = torch_adapter.like(tensors), torch_adapter.same_addresses(placed)
    return lambda: alike(*tensors) and in_place()


def no_gradients(leaves: list[torch.Tensor]) -> Callable[[], bool] | None:
    """A check that the ``.grad`` of these tensors is None; None as :func:`unchanged_dicts`."""
    return _check("no_gradients", leaves) or torch_adapter.no_gradients(leaves)


def unchanged_dicts(dicts: list[dict[Any, Any]]) -> Callable[[], bool] | None:
    """A check that these dictionaries have the versions that they have now; None before torch has loaded what makes
    such checks (its optimizers load it)."""
    return _check("versions", dicts) or torch_adapter.unchanged_dicts(dicts)


def all_empty(containers: list[Any]) -> Callable[[], bool]:
    """A check that these dictionaries, lists and other containers are empty."""
    compared = [each for each in containers if isinstance(each, (dict, list, set, frozenset))]
    others = [each for each in containers if not isinstance(each, (dict, list, set, frozenset))]
    check = _check("empty", compared)
    if check is None:
        return lambda: not any(containers)
    return (lambda: check() and not any(others)) if others else check


def same_attributes(objects: list[tuple[Any, type, Any]]) -> Callable[[], bool]:
    """A check of objects, each with its class and the dictionary of its attributes, that they still have these; for
    None as the dictionary, their classes alone. No code of theirs runs. An object may be given by a weak reference: it
    must be alive then."""
    check = _check("attributes", objects)
    return check or (lambda: all(starmap(_has, objects)))


def _has(obj: Any, kind: type, attributes: Any) -> bool:
    obj = obj() if type(obj) is weakref.ref else obj
    return type(obj) is kind and (attributes is None or object.__getattribute__(obj, "__dict__") is attributes)


def same_slots(objects: list[tuple[Any, str, Any]]) -> Callable[[], bool]:
    """A check that attributes of objects, each with its name and value, have these very values."""
    if (check := _check("slots", objects)) is not None:
        return check
    holders, names, values = ([each[at] for each in objects] for at in range(3))
    return lambda: all(map(is_, map(getattr, holders, names, repeat(None)), values))


def require_grad(leaves: list[tuple[torch.Tensor, bool]]) -> Callable[[], bool]:
    """A check of tensors whether each requires grad as it says."""
    if (check := _check("require_grad", leaves)) is not None:
        return check
    tensors, expected = [leaf for leaf, _ in leaves], [required for _, required in leaves]
    return lambda: list(map(_requires_grad, tensors)) == expected


_requires_grad = attrgetter("requires_grad")


def same_items(lists: list[tuple[Any, tuple[Any, ...]]]) -> Callable[[], bool]:
    """A check that each list, or what else has a length and items, holds these very objects and no more."""
    compared = [each for each in lists if type(each[0]) is list]
    others = [each for each in lists if type(each[0]) is not list]
    check = _check("items", compared)
    if check is None:
        return lambda: all(starmap(_holds, lists))
    return (lambda: check() and all(starmap(_holds, others))) if others else check


def _holds(found: Any, known: tuple[Any, ...]) -> bool:
    return len(found) == len(known) and all(map(is_, found, known))


def _check(kind: str, objects: list[Any]) -> Callable[[], bool] | None:
    library = compiled()
    return None if library is None else getattr(library, kind)(tuple(objects))


@functools.cache  # compiled at most once a process
def compiled() -> ModuleType | None:
    """The compiled checks; None where there is no compiler, no cache folder or an unknown layout of tensors."""
    offset = torch_adapter.offset_in_tensors()
    if offset is None or sysconfig.get_config_var("Py_GIL_DISABLED") or not cache_folder.usable():
        return None
    try:
        library = _load(_binary())
    except (OSError, ImportError, subprocess.SubprocessError) as error:
        log.info("guards are checked without compiled code: %s", getattr(error, "stderr", None) or error)
        return None
    library.set_offset(offset)
    return library if _sees_changes(library) else None


def _sees_changes(library: ModuleType) -> bool:
    """Whether the library reads tensors as torch keeps them: not where it was compiled for another torch."""
    with torch_adapter.real_tensors(), torch_adapter.no_torch_function_modes():
        probe = torch.zeros(2, 3, device="cpu")
        check = library.tensors((probe,))
        if check is None or not check():
            return False
        probe.t_()
        return not check()


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


def _load(content: bytes) -> ModuleType:
    """Load a module from its bytes.

    Raises:
        ImportError: it does not fit this torch.
    """
    with tempfile.NamedTemporaryFile(suffix=".so") as file:
        file.write(content)
        file.flush()
        loader = ExtensionFileLoader(_MODULE, file.name)
        module = module_from_spec(ModuleSpec(_MODULE, loader, origin=file.name))
        loader.exec_module(module)
        return module
