"""Comparisons of many Python objects with what they were, each by one call in C++.

A step checks its guards before every call, while a GPU may wait. Nearly always nothing has changed, but a model of 300
parameters has 1,200 tensors, 900 dictionaries and 300 modules that could have. Torch's own checks of tensors take 50 ns
each, those of `state_checks.cpp` 6 ns.

A process compiles the file for itself, with the headers of Python and torch, once a step has been called often
(:func:`compile_in_background`). The result is kept nowhere: nothing that lies in a folder is executed. Until then, and
without a C++ compiler, the comparisons are made through torch and in Python, and give the same answers.
"""

from __future__ import annotations

import functools
import logging
import os
import shlex
import shutil
import subprocess
import sysconfig
import tempfile
import threading
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

from weft import torch_adapter

log = logging.getLogger(__name__)

_SOURCE = Path(__file__).with_suffix(".cpp")
_MODULE = "compiled_state_checks"
_COMPILE_SECONDS = 600  # at most; it takes 2, and minutes at the lowest priority on a busy host


def unchanged_tensors(tensors: list[torch.Tensor], placed: list[torch.Tensor]) -> Callable[[], bool]:
    """A check that tensors have the types, dtypes, devices, sizes and strides that they have now, require grad where
    they do now, and that the elements of those in ``placed`` begin where they do now."""
    every = list({id(tensor): tensor for tensor in (*tensors, *placed)}.values())

    def through_torch() -> Callable[[], bool]:
        alike, in_place = torch_adapter.like(tensors), torch_adapter.same_addresses(placed)
        return lambda: alike(*tensors) and in_place()

    return _check("tensors", every, through_torch)


def no_gradients(leaves: list[torch.Tensor]) -> Callable[[], bool] | None:
    """A check that the ``.grad`` of these tensors is None; None as :func:`unchanged_dicts`."""
    through_torch = None if compiled() else torch_adapter.no_gradients(leaves)
    return _check("no_gradients", leaves, lambda: through_torch) if compiled() or through_torch else None


def unchanged_dicts(dicts: list[dict[Any, Any]]) -> Callable[[], bool] | None:
    """A check that these dictionaries have the versions that they have now; None before torch has loaded what makes
    such checks (its optimizers load it)."""
    through_torch = None if compiled() else torch_adapter.unchanged_dicts(dicts)
    return _check("versions", dicts, lambda: through_torch) if compiled() or through_torch else None


def all_empty(containers: list[Any]) -> Callable[[], bool]:
    """A check that these dictionaries, lists and other containers are empty."""
    compared = [each for each in containers if isinstance(each, (dict, list, set, frozenset))]
    others = [each for each in containers if not isinstance(each, (dict, list, set, frozenset))]
    check = _check("empty", compared, lambda: lambda: not any(compared))
    return (lambda: check() and not any(others)) if others else check


def same_attributes(objects: list[tuple[Any, type, Any]]) -> Callable[[], bool]:
    """A check of objects, each with its class and the dictionary of its attributes, that they still have these; for
    None as the dictionary, their classes alone. No code of theirs runs. An object may be given by a weak reference: it
    must be alive then."""
    return _check("attributes", objects, lambda: lambda: all(starmap(_has, objects)))


def _has(obj: Any, kind: type, attributes: Any) -> bool:
    obj = obj() if type(obj) is weakref.ref else obj
    return type(obj) is kind and (attributes is None or object.__getattribute__(obj, "__dict__") is attributes)


def same_slots(objects: list[tuple[Any, str, Any]]) -> Callable[[], bool]:
    """A check that attributes of objects, each with its name and value, have these very values.

    Compiled for slots, for the contents of cells, and for the code and defaults of functions.

    Raises:
        ValueError: by the check, where a cell is empty. The compiled one says False.
    """

    def in_python() -> Callable[[], bool]:
        holders, names, values = ([each[at] for each in objects] for at in range(3))
        return lambda: all(map(is_, map(getattr, holders, names, repeat(None)), values))

    return _check("slots", objects, in_python)


def require_grad(leaves: list[tuple[torch.Tensor, bool]]) -> Callable[[], bool]:
    """A check of tensors whether each requires grad as it says."""

    def in_python() -> Callable[[], bool]:
        tensors, expected = [leaf for leaf, _ in leaves], [required for _, required in leaves]
        return lambda: list(map(_requires_grad, tensors)) == expected

    return _check("require_grad", leaves, in_python)


def same_settings(read: Callable[[], list[Any]]) -> Callable[[], bool]:
    """A check that this thread has the settings of torch that it has now: grad mode, inference mode, the default dtype
    and autocast.

    Args:
        read: reads them.
    """

    def in_python() -> Callable[[], bool]:
        before = read()
        return lambda: read() == before

    return _check("settings", [None], in_python)


_requires_grad = attrgetter("requires_grad")


def same_items(lists: list[tuple[Any, tuple[Any, ...]]]) -> Callable[[], bool]:
    """A check that each list, or what else has a length and items, holds these very objects and no more."""
    compared = [each for each in lists if type(each[0]) is list]
    others = [each for each in lists if type(each[0]) is not list]
    check = _check("items", compared, lambda: lambda: all(starmap(_holds, compared)))
    return (lambda: check() and all(starmap(_holds, others))) if others else check


def _holds(found: Any, known: tuple[Any, ...]) -> bool:
    return len(found) == len(known) and all(map(is_, found, known))


def new_tensors(alike: list[torch.Tensor], kept: list[torch.Tensor]) -> Callable[[list[Any]], bool] | None:
    """A check whether the items of a list are tensors like these, which are not kept: of their types, dtypes, devices,
    sizes and strides, requiring grad where they do. Each must be in a storage of its own, which none of ``kept`` has.
    None where there are no compiled checks, or where tensors of a kind cannot be compared so."""
    library = compiled()
    return None if library is None else library.new_tensors((tuple(alike), tuple(kept)))


def joined(checks: list[Callable[[], bool]]) -> list[Callable[[], bool]]:
    """One compiled check in the place of these, and those that are not compiled."""
    library = compiled()
    made = [each.made if type(each) is _UntilCompiled else each for each in checks]
    plain = [each for each in made if type(each).__module__ == _MODULE]
    others = [each for each, check in zip(checks, made, strict=True) if type(check).__module__ != _MODULE]
    return others if library is None or not plain else [library.joined(tuple(plain)), *others]


class _UntilCompiled:
    """A check that is made another way until the compiled one is there.

    Args:
        kind: of the compiled check.
        objects: that it compares.
        check: the other way.
    """

    __slots__ = ("_check", "_kind", "_objects")

    def __init__(self, kind: str, objects: list[Any], check: Callable[[], bool]) -> None:
        self._kind = kind
        self._objects: list[Any] | None = objects
        self._check = check

    @property
    def made(self) -> Callable[[], bool]:
        """The check that is made now."""
        return self._check

    def __call__(self) -> bool:
        if self._objects is None or (library := compiled()) is None:
            return self._check()
        # It compares with the present state: made before the state is compared with what it was, so that it knows no
        # change that another thread makes in between.
        check = getattr(library, self._kind)(tuple(self._objects))
        if not self._check():
            return False
        self._objects = None
        self._check = check or self._check
        return True


def _check(kind: str, objects: list[Any], other_way: Callable[[], Any]) -> Callable[[], bool]:
    library = compiled()
    if library is None:
        return _UntilCompiled(kind, objects, other_way())
    return getattr(library, kind)(tuple(objects)) or other_way()


_library: ModuleType | None = None


def compiled() -> ModuleType | None:
    """The compiled checks, None before :func:`compile_now` has made them."""
    return _library


@functools.cache
def compile_in_background() -> None:
    """Begin to compile the checks, on a thread and at the lowest priority. A second call does nothing."""
    threading.Thread(target=compile_now, name="weft compiles the checks of guards", daemon=True).start()


@functools.cache  # at most once a process
def compile_now() -> ModuleType | None:
    """Compile the checks; None where there is no compiler or an unknown layout of tensors."""
    global _library
    offset = torch_adapter.offset_in_tensors()
    if offset is None or sysconfig.get_config_var("Py_GIL_DISABLED"):
        return None
    try:
        library = _loaded()
    except (OSError, ImportError, subprocess.SubprocessError) as error:
        log.info("guards are checked without compiled code: %s", getattr(error, "stderr", None) or error)
        return None
    library.set_offset(offset)
    _library = library if _sees_changes(library) else None
    return _library


def _sees_changes(library: ModuleType) -> bool:
    """Whether the library reads tensors as torch keeps them: not where it was compiled for another torch."""
    with torch_adapter.real_tensors(), torch_adapter.no_torch_function_modes():
        probe = torch.zeros(2, 3, device="cpu")
        check = library.tensors((probe,))
        if check is None or not check():
            return False
        probe.t_()
        return not check()


def _loaded() -> ModuleType:
    """The module, compiled.

    Raises:
        OSError: there is no compiler.
        SubprocessError: it failed.
        ImportError: what it made does not fit this torch.
    """
    start = time.perf_counter()
    compiler = shlex.split(os.environ.get("CXX", "")) or [shutil.which("c++") or shutil.which("g++") or "clang++"]
    patient = [found, "-n", "19"] if (found := shutil.which("nice")) else []
    installed = Path(torch.__file__).parent
    headers = [f"-I{installed / 'include'}", f"-I{sysconfig.get_path('include')}"]
    # The folder is this process's own, and no other user can write to it.
    with tempfile.TemporaryDirectory(prefix="weft_") as folder:
        output = Path(folder, "state_checks.so")
        command = [*compiler, "-std=c++20", "-O2", "-w", "-shared", "-fPIC", *headers, str(_SOURCE), "-o", str(output)]
        command += [f"-L{installed / 'lib'}", "-lc10", "-ltorch_cpu"]
        subprocess.run([*patient, *command], check=True, capture_output=True, text=True, timeout=_COMPILE_SECONDS)
        loader = ExtensionFileLoader(_MODULE, str(output))
        module = module_from_spec(ModuleSpec(_MODULE, loader, origin=str(output)))
        loader.exec_module(module)
    log.debug("compiled the checks of guards in %.1f s", time.perf_counter() - start)
    return module
