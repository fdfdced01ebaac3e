"""Functions that read or change the world outside a step: files, processes, other threads, settings of Python.

A compiled step runs no Python, so what such a function tells or does in the capture would hold for ever, or would
happen once. One table says for each function what becomes of a call by the step:

- *compared*: the function is called again before every call of the step, with the same arguments; the graph serves the
  call if the answer is the same.
- *refused*: the answer is another one at every call, or takes something away; the error says what to do.
- *effects*: the function changes something outside; the error says how every call of the step can do it.

Calls count where the step's own code makes them, or a library for it, also through the standard library. Modules that
are imported meanwhile and functions that remember their results run once in eager too, and may do what they like.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from weft.capture.user_code import called_for_user, user_line
from weft.errors import OutsideEffect, UncapturableDraw

# The owner as "module" or "module:class", and names of functions in it. Modules that are not imported are left out.
_COMPARED: dict[str, str] = {
    "concurrent.futures:Future": "done cancelled running",
    "multiprocessing.process:BaseProcess": "is_alive exitcode",
    "numpy": "geterr get_printoptions",
    "os": "stat lstat statvfs listdir access getcwd getcwdb readlink getpid cpu_count",
    "os.path": "exists lexists isfile isdir islink getsize getmtime",
    "pathlib:Path": "exists is_file is_dir is_symlink",
    "shutil": "which",
    "socket": "gethostname getfqdn",
    "sys": "getrecursionlimit gettrace getprofile",
    "subprocess:Popen": "poll",
    "threading": "active_count current_thread",
    "threading:Thread": "name is_alive",
    "torch": "get_num_threads get_num_interop_threads",
    "torch.backends:ContextProp": "__get__",
    "torch.backends.cuda": "flash_sdp_enabled math_sdp_enabled mem_efficient_sdp_enabled cudnn_sdp_enabled",
}
_REFUSED: dict[str, str] = {
    "builtins": "input",
    "gc": "isenabled get_count",
    "os": "scandir read pread times getloadavg getrandom",
    "queue:Queue": "get qsize empty full join",
    "multiprocessing.queues:Queue": "get qsize empty full",
    "multiprocessing.queues:SimpleQueue": "get empty",
    "multiprocessing.connection:_ConnectionBase": "recv recv_bytes recv_bytes_into poll",
    "resource": "getrusage",
    "socket:socket": "recv recv_into recvfrom recvmsg accept",
    "torch": "load",
    "torch.jit": "trace trace_module script load",
    "torch.cuda": "mem_get_info memory_stats utilization",
    "uuid": "uuid1",
}
_EFFECTS: dict[str, str] = {
    "concurrent.futures:ThreadPoolExecutor": "submit",
    "concurrent.futures:ProcessPoolExecutor": "submit",
    "csv:DictWriter": "writerow writerows writeheader",
    "gc": "disable enable freeze unfreeze set_threshold",
    "multiprocessing.connection:_ConnectionBase": "send send_bytes",
    "multiprocessing.process:BaseProcess": "start join terminate kill",
    "multiprocessing.queues:Queue": "put",
    "multiprocessing.queues:SimpleQueue": "put",
    "os": (
        "mkdir rmdir remove unlink rename replace symlink link chmod chown utime truncate ftruncate write pwrite open "
        "system kill killpg putenv unsetenv chdir fork posix_spawn mkfifo umask nice sendfile"
    ),
    "queue:Queue": "put task_done",
    "socket:socket": "connect bind listen send sendall sendto sendmsg",
    "sqlite3": "connect",
    "subprocess:Popen": "__init__ wait communicate terminate kill send_signal",
    "sys": "setrecursionlimit settrace setprofile",
    "threading:Thread": "start join",
    "time": "sleep",
    "torch": (
        "set_num_threads set_num_interop_threads use_deterministic_algorithms set_deterministic_debug_mode "
        "set_default_dtype set_float32_matmul_precision"
    ),
    "torch.backends:ContextProp": "__set__",
    "torch.backends.cuda": "enable_flash_sdp enable_math_sdp enable_mem_efficient_sdp enable_cudnn_sdp",
}
# Modules that stand between the step's code and the function that is replaced.
_MODULES = ("builtin_types", "outside_calls", "outside_objects", "repeated_warnings")
_BETWEEN = tuple(f"weft.capture.record.{name}" for name in _MODULES)
_WHY = "the compiled step would have the answer of its first call for ever"
_REMEDY = "call it before the step and pass the result as an argument, or call it in a function marked @weft.opaque"


class OutsideRead(NamedTuple):
    """One call of a function whose answer is compared.

    Attributes:
        text: what was called.
        call: calls it again.
        answer: what it told: its result, or the kind and the text of the error that it raised.
    """

    text: str
    call: Callable[[], Any]
    answer: Any

    def failure(self) -> str | None:
        """How the answer differs now, None where it does not."""
        now = _answer(self.call)[0]
        return None if now == self.answer else f"{self.text} gives {now!r}, gave {self.answer!r}"


class OutsideCalls:
    """Stands in for the functions of the table while a step is captured.

    Attributes:
        reads: the calls whose answers are compared before every call of the step.
    """

    def __init__(self, intercepts: Callable[[], bool]) -> None:
        self.reads: list[OutsideRead] = []
        self._intercepts = intercepts
        self._busy = False  # a function of the table that another one calls is a part of that

    def replacements(self) -> Iterator[tuple[Any, str, Any]]:
        """(owner, name, replacement)."""
        for table, make in ((_COMPARED, self._comparing), (_REFUSED, self._refusing), (_EFFECTS, self._forbidding)):
            for path, names in table.items():
                module, _, kind = path.partition(":")
                owner = sys.modules.get(module)
                owner = getattr(owner, kind, None) if kind else owner
                for name in names.split() if owner is not None else ():
                    if (original := getattr(owner, name, None)) is not None:
                        text = f"{kind or module}.{name}"
                        if isinstance(original, property) and original.fget is not None:
                            yield owner, name, property(make(original.fget, text), original.fset, doc=original.__doc__)
                        else:
                            yield owner, name, make(original, text)

    def end(self) -> None:
        """Forget the capture: a module that was imported meanwhile may have kept a replacement."""
        self._intercepts = lambda: False

    def counts(self) -> bool:
        """Whether the step's code, or a library for it, makes the call that runs now."""
        if self._busy or not self._intercepts():
            return False
        self._busy = True  # to tell whose code it is, files are looked at
        try:
            return called_for_user(*_BETWEEN)
        finally:
            self._busy = False

    def _comparing(self, original: Callable[..., Any], text: str) -> Any:
        @functools.wraps(original)
        def read(*args: Any, **kwargs: Any) -> Any:
            if not self.counts():
                return original(*args, **kwargs)
            call = functools.partial(original, *args, **kwargs)
            self._busy = True  # also for the text of an argument: that of a thread asks whether it is alive
            try:
                answer, result, error = _answer(call)
                asked = _flag_name(*args) if text == "ContextProp.__get__" else f"{text}({', '.join(map(repr, args))})"
            finally:
                self._busy = False
            if all((known.text, known.answer) != (asked, answer) for known in self.reads):
                self.reads.append(OutsideRead(asked, call, answer))
            if error is not None:
                raise error
            return result

        return read

    def _refusing(self, original: Callable[..., Any], text: str) -> Any:
        @functools.wraps(original)
        def read(*args: Any, **kwargs: Any) -> Any:
            if self.counts():
                raise UncapturableDraw(text, user_line(), _WHY, _REMEDY)
            return original(*args, **kwargs)

        return read

    def _forbidding(self, original: Callable[..., Any], text: str) -> Any:
        @functools.wraps(original)
        def effect(*args: Any, **kwargs: Any) -> Any:
            if self.counts():
                sets = text == "ContextProp.__set__"
                what = f"sets {_flag_name(*args)}" if sets else f"calls {text.removesuffix('.__init__')}"
                raise OutsideEffect(what, user_line())
            return original(*args, **kwargs)

        return effect


def outside_failure(reads: list[OutsideRead]) -> str | None:
    """The first answer that is another than in the capture, as text; None where none is."""
    return next(filter(None, (read.failure() for read in reads)), None)


def _flag_name(flag: Any, owner: Any, *kind: type) -> str:
    """``torch.backends.cudnn.benchmark``, for what is behind it."""
    names = [name for each in type(owner).__mro__ for name, value in vars(each).items() if value is flag]
    return ".".join([getattr(owner, "__name__", "torch.backends"), *names[:1]])


def _answer(call: Callable[[], Any]) -> tuple[Any, Any, Exception | None]:
    """What is compared of a call, its result, and the error that it raised."""
    try:
        result = call()
    except OSError as error:
        return (type(error).__name__, error.errno), None, error
    return result, result, None
