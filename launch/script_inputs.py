"""What a run of a script depended on outside its own process: the files that it read and those that it looked for.

A later run that finds all of them as they were does the same, so that what was captured of the first one holds for it.
Python reports every opened file and every listed folder to audit hooks (PEP 578); questions about a file
(``os.path.exists``) go through functions of ``os``, which are replaced for the time of the run. A script that asks
another process, the network or the keyboard cannot be compared: :attr:`ScriptInputs.refusal` says so.
"""

from __future__ import annotations

import contextlib
import importlib.machinery
import importlib.util
import logging
import os
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from weft import knobs
from weft.thread_patches import stand_in

# Audit events of what no signature of a file tells.
_OUTSIDE = frozenset(
    {"subprocess.Popen", "os.system", "os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn"}
    | {"socket.connect", "socket.sendto", "builtins.input", "urllib.Request", "sqlite3.connect"}
)
_LISTING = frozenset({"os.listdir", "os.scandir"})
_NOTED = _OUTSIDE | _LISTING | {"open"}
_IMPORTER = "<frozen importlib._bootstrap_external>"
_IMPORTED = tuple(importlib.machinery.all_suffixes())
# Files of the kernel: they differ at every reading, and say nothing about a model.
_OF_THE_KERNEL = ("/proc/", "/sys/", "/dev/")
_OWN_ROOT = str(Path(__file__).parents[1]) + os.sep  # weft's files are hashed as a whole

Signature = list[Any] | None
"""What tells one state of a file from another, as JSON; None for a file that is not there."""


class ScriptInputs:
    """Collects the inputs of what runs inside :meth:`recorded`.

    Attributes:
        files: for each path how it was used ("read", "listed", "imported from") and its signature at its first use.
        refusal: what else the run depended on, or did that a plan without it would not: the name of an audit event, or
            that weft logged a warning; "" for nothing.
    """

    def __init__(self) -> None:
        self.files: dict[str, tuple[str, Signature]] = {}
        self.refusal = ""
        cache = [os.path.join(os.path.abspath(os.path.expanduser(knobs.cache_dir)), "")] if knobs.cache_dir else []
        self._ignored = (*_OF_THE_KERNEL, _OWN_ROOT, *cache)

    @contextlib.contextmanager
    def recorded(self) -> Iterator[None]:
        """Inside, inputs are collected, of all threads. Once per process at a time."""
        global _recording
        assert _recording is None, "one script is recorded at a time"
        _listen()
        with contextlib.ExitStack() as undo:
            for name, question in _QUESTIONS.items():
                undo.enter_context(stand_in(os, name, question))
            logger, handler = logging.getLogger("weft"), _Warnings(self)
            logger.addHandler(handler)
            undo.callback(logger.removeHandler, handler)
            for module in list(sys.modules.values()):  # imported before: no event tells of them
                self.use("read", getattr(module, "__file__", None))
            _recording = self
            try:
                yield
            finally:
                _recording = None

    def note(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Take in an audit event."""
        if event == "open":
            path, mode, flags = arguments
            writes = isinstance(flags, int) and (flags & os.O_ACCMODE) == os.O_WRONLY
            if not writes and not (isinstance(mode, str) and mode[:1] in ("w", "x") and "+" not in mode):
                self.use("read", path)
        elif event in _LISTING:
            imports = sys._getframe(2).f_code.co_filename == _IMPORTER
            self.use("imported from" if imports else "listed", "." if arguments[0] is None else arguments[0])
        elif event in _OUTSIDE:
            self.refusal = self.refusal or event

    def use(self, how: str, path: Any) -> None:
        """Take in that the file or folder ``path`` is read or asked about, or listed."""
        try:
            name = os.fsdecode(path)
        except TypeError:  # the number of an open file, or no file
            return
        name = os.path.abspath(name)
        if "__pycache__" in name:
            # Python compares the time of the source with that in the compiled file, and reads the latter alone.
            try:
                name = importlib.util.source_from_cache(name)
            except ValueError:
                return
        if not name.startswith(self._ignored) and name not in self.files:
            self.files[name] = how, None  # finding the signature is an event, too
            self.files[name] = how, signature(name, how)


class _Warnings(logging.Handler):
    def __init__(self, inputs: ScriptInputs) -> None:
        super().__init__(logging.WARNING)
        self._inputs = inputs

    def emit(self, record: logging.LogRecord) -> None:
        self._inputs.refusal = self._inputs.refusal or "a warning was logged"


_plain_stat = os.stat
_recording: ScriptInputs | None = None
_listens = False


def _listen() -> None:
    """Add the audit hook. Python has no way to take one away."""
    global _listens
    if not _listens:
        sys.addaudithook(_hook)
        _listens = True


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    # Two million events tell of `id` and of attributes of functions.
    if _recording is not None and event in _NOTED:
        _recording.note(event, arguments)


def _asking(function: Callable[..., Any]) -> Callable[..., Any]:
    def asked(path: Any, *args: Any, **kwargs: Any) -> Any:
        if _recording is not None and kwargs.get("dir_fd") is None:
            _recording.use("read", path)
        return function(path, *args, **kwargs)

    return asked


# In place of the functions of ``os``, through which ``os.path`` and ``pathlib`` ask about files.
_QUESTIONS = {name: _asking(getattr(os, name)) for name in ("stat", "lstat", "access")}


def signature(path: str, how: str) -> Signature:
    """The state of a file or folder now, as far as ``how`` looks at it."""
    try:
        if how != "read":
            names = sorted(os.listdir(path))
            # What else is in the folder, such as the files that plans are written to, no import finds.
            return names if how == "listed" else [name for name in names if name.endswith(_IMPORTED) or "." not in name]
        found = _plain_stat(path)
    except (OSError, ValueError):
        return None
    if stat.S_ISDIR(found.st_mode):
        return ["folder"]
    # Every change of the content moves the time of change, which no program can set back as it can that of writing.
    return [found.st_ino, found.st_ctime_ns, found.st_size]


def unchanged(files: dict[str, tuple[str, Signature]]) -> bool:
    """Whether all files are as they were."""
    return all(signature(path, how) == known for path, (how, known) in files.items())
