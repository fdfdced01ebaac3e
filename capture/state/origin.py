"""Whose an object, a class or a module is: the user's own, a library's, or of the machinery that is not walked.

What torch, numpy and the like keep is no state of the user's. Objects of installed libraries are walked, as far as the
step's code names their attributes. Only of the user's own modules and classes is what they themselves hold (variables
of modules, attributes of classes, code of functions) compared before each call: nobody changes that of a library.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator

from weft.source_files import is_own_file

# Packages whose objects and functions are not walked: they are no state of the user's.
_FOREIGN = {"torch", "numpy", "sympy", "mpmath", "rich", "triton", "weft", "_pytest", "pytest", "tyro", "matplotlib"}
# Modules inside those packages whose objects are walked all the same.
_WALKED = ("weft.distributed", "weft.capture.toy", "torch.amp", "torch.cuda.amp", "torch.distributions")
# Modules inside those packages that count as libraries: the user makes their objects, and sets attributes of them.
_LIBRARIES = ("torch.utils.data",)
# Classes of the standard library that are made to hold what the user puts there, and where they hold it.
_HOLDERS: dict[str, tuple[str, ...]] = {
    "argparse.Namespace": (),
    "types.SimpleNamespace": (),
    "collections.UserDict": ("data",),
    "collections.UserList": ("data",),
    "collections.ChainMap": ("maps",),
    "configparser.RawConfigParser": ("_sections", "_defaults"),
    "configparser.SectionProxy": ("_parser",),
    "contextlib._BaseExitStack": ("_exit_callbacks",),
    "logging.LoggerAdapter": ("extra",),
    "string.Template": ("template",),
    "textwrap.TextWrapper": (
        *("width", "initial_indent", "subsequent_indent", "expand_tabs", "tabsize", "replace_whitespace"),
        *(
            "fix_sentence_endings",
            "break_long_words",
            "break_on_hyphens",
            "drop_whitespace",
            "max_lines",
            "placeholder",
        ),
    ),
    "unittest.mock.Base": tuple(
        f"_mock_{name}" for name in ("children", "return_value", "side_effect", "called", "call_count")
    ),
    "enum.Enum": ("_value_",),
}


def is_foreign(module: str | None) -> bool:
    """Whether functions of a module are machinery, by the module's name."""
    return _root(module) in _FOREIGN and not (module or "").startswith((*_WALKED, *_LIBRARIES))


def is_walked(kind: type) -> bool:
    """Whether objects of a class are weft's, torch's or numpy's and are walked as a whole."""
    return is_walked_module(kind.__module__) or _is_data(kind)


def _is_data(kind: type) -> bool:
    """Whether objects of a class of numpy's have attributes. They hold what the user put there: the coefficients of a
    polynomial, the mask of an array."""
    return _root(kind.__module__) == "numpy" and any("__dict__" in vars(base) for base in kind.__mro__)


def is_walked_module(module: str | None) -> bool:
    """Whether a module is weft's or torch's and objects of its classes are walked as a whole, by its name."""
    return (module or "").startswith(_WALKED)


def is_user_class(kind: type) -> bool:
    """Whether the code of a class is the user's or of a library that is walked. Not that of torch's iterators over
    data, which each item moves."""
    module = kind.__module__
    if module.startswith(_LIBRARIES) and issubclass(kind, Iterator):
        return False
    foreign = is_foreign(module) and not _is_data(kind)
    return not foreign and (_root(module) not in sys.stdlib_module_names or module == "__main__")


def is_own(obj: types.ModuleType | type | types.FunctionType) -> bool:
    """Whether a module, class or function is the user's own, and no library's."""
    module = obj if isinstance(obj, types.ModuleType) else sys.modules.get(obj.__module__ or "")
    if module is None:
        return isinstance(obj, types.FunctionType) and is_own_file(obj.__code__.co_filename)
    if module.__name__ == "__main__":
        return True
    filename = vars(module).get("__file__")
    if filename is None and type(obj) is types.ModuleType and vars(module).get("__spec__") is None:
        return not is_foreign(module.__name__)  # code made it, and put into it what it holds
    return isinstance(filename, str) and is_own_file(filename)


def is_pythons_own(function: types.FunctionType, name: str) -> bool:
    """Whether a variable that a function reads is private to a module of the standard library: a cache of its own, as
    that of ``re`` for compiled patterns."""
    return name.startswith("_") and _root(function.__module__) in sys.stdlib_module_names - {"__main__"}


def held_by(kind: type) -> tuple[str, ...] | None:
    """The attributes in which objects of a class of the standard library hold what the user put there; None where the
    class is made for another purpose, and () where the user's code names them."""
    names = [f"{base.__module__}.{base.__qualname__}" for base in kind.__mro__]
    return next((_HOLDERS[name] for name in names if name in _HOLDERS), None)


def _root(module: str | None) -> str:
    return (module or "").split(".")[0]
