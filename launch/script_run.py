"""Runs a user's training script in a fake world up to a step, for ``weft plan``.

The script is the one that torchrun runs. It runs in this process, as one rank, with no GPU and no other rank
(:mod:`weft.capture.fake.fake_world`). Checkpoints are neither read nor written, ``torch.compile`` does nothing, and
loggers that report over the network are off. When the script calls the step that was asked for, the plan is made there,
and the script ends.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import importlib
import importlib.util
import os
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from weft import torch_adapter
from weft.argument_checks import ArgumentChecks
from weft.capture.fake.fake_world import fake_world
from weft.capture.user_code import format_frame, frames_of
from weft.compile import CompiledStep
from weft.errors import ScriptFailed, StepNotReached, WeftError
from weft.thread_patches import Patches

_CHECKS = ArgumentChecks("weft plan")

Reached = Callable[[CompiledStep[..., Any], tuple[Any, ...], dict[str, Any]], None]

# Turns off what reports over the network; a script that sets them itself keeps its values.
_OFFLINE = {
    "WANDB_MODE": "disabled",
    "MLFLOW_TRACKING_URI": "",
    "COMET_MODE": "disabled",
    "HF_HUB_OFFLINE": "1",
    "WEFT_PLAN": "1",
}


@dataclass(frozen=True)
class Script:
    """A training script and the step of it that is asked for.

    Attributes:
        path: of the file, or with ``module`` the dotted name of a module, as ``python -m`` takes it.
        arguments: of the script.
        module: whether ``path`` names a module.
        compile_function: a function of the script that is not compiled yet and is to be planned: ``train_step`` or
            ``Trainer.train_step`` of the script itself, ``package.module:Trainer.train_step`` of another module.
        step: name of the compiled step to plan; "" for any.
        nth: which of the compiled steps that the script calls, counted from 1.
        form: which form of the step, by the sizes of its arguments, counted from 1.
    """

    path: str
    arguments: tuple[str, ...] = ()
    module: bool = False
    compile_function: str = ""
    step: str = ""
    nth: int = 1
    form: int = 1


class _Done(BaseException):
    """Ends the script once the step was planned. No ``Exception``: the script's own ``except`` must not take it."""


@dataclass(eq=False)
class _Watch:
    """Looks for the step among the calls of compiled steps.

    Attributes:
        seen: names of the steps that were called, in order, without those inside others.
    """

    script: Script
    reached: Reached
    seen: list[CompiledStep[..., Any]]
    forms: list[Any]
    done: bool = False

    def call(self, step: CompiledStep[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Replaces the call of a compiled step."""
        if self.done:
            raise _Done
        if not any(step is known for known in self.seen):
            self.seen.append(step)
        if self._is_wanted(step, args, kwargs):
            self.done = True
            self.reached(step, args, kwargs)
            raise _Done
        return step.step(*args, **kwargs)

    def _is_wanted(self, step: CompiledStep[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        if self.script.step and step.__name__ != self.script.step:
            return False
        named = [known for known in self.seen if not self.script.step or known.__name__ == self.script.step]
        if self.script.nth > len(named) or named[self.script.nth - 1] is not step:
            return False
        form = _form(args, kwargs)
        if form not in self.forms:
            self.forms.append(form)
        return len(self.forms) >= self.script.form


def _form(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    leaves, spec = torch_adapter.flatten((args, kwargs))
    shapes = [(tuple(leaf.shape), leaf.dtype) for leaf in leaves if isinstance(leaf, torch.Tensor)]
    return [str(spec), shapes]


def prepare() -> None:
    """Import what :func:`run_to_step` needs. Not at the top: it takes a quarter of a second, and the plan of a step
    that was captured before runs no script. Not in the run, whose files are the script's."""
    importlib.import_module("weft.launch.stand_ins")


def run_to_step(script: Script, world_size: int, rank: int, gpus_per_host: int, reached: Reached) -> None:
    """Run a script as one rank of a fake world until it calls the step, and call ``reached`` there, inside the world.
    What the script prints goes to stderr.

    Raises:
        InvalidArgument: the script, or the function to compile, is not there.
        StepNotReached: the script ended without calling such a step.
        ScriptFailed: the script raised an error before.
        WeftError: an error of weft's own of the script, or of ``reached``.
    """
    from weft.launch.stand_ins import patch_torch  # see `prepare`

    code, name, folder = _loaded(script)
    watch = _Watch(script, reached, [], [])
    patches = Patches()
    patches.attribute(CompiledStep, "__call__", lambda step, *args, **kwargs: watch.call(step, *args, **kwargs))
    patch_torch(patches)
    local = min(gpus_per_host, world_size)
    with contextlib.ExitStack() as undo:
        undo.enter_context(_as_main(script, name, folder))
        undo.enter_context(contextlib.redirect_stdout(sys.stderr))
        undo.enter_context(fake_world(world_size, rank, local_world_size=local))
        for variable, value in _OFFLINE.items():
            os.environ.setdefault(variable, value)
        patches.apply()
        undo.callback(patches.undo)
        try:
            _compile_outside(script)
            exec(code, sys.modules["__main__"].__dict__)  # the user's own script, as Python runs it
        except _Done:
            return
        except SystemExit as error:
            if watch.done:
                return
            raise StepNotReached(script.path, [step.__name__ for step in watch.seen], f"exit {error.code}") from error
        except WeftError:
            raise
        except Exception as error:
            frames = frames_of(error.__traceback__)
            line = format_frame(frames[0]) if frames else script.path
            raise ScriptFailed(line, error, _needs_value(error)) from error
    if not watch.done:
        raise StepNotReached(script.path, [step.__name__ for step in watch.seen])


def _needs_value(error: Exception) -> bool:
    """Whether the script asked for the value of a fake tensor."""
    return isinstance(error, torch_adapter.data_dependent_errors()) or "fake" in str(error).lower()


# ---- the script as the main module


def _loaded(script: Script) -> tuple[Any, str, str]:
    """The code of a script, its file, and the folder that it imports from."""
    file = script.path
    if script.module:
        sys.path.insert(0, os.getcwd())
        try:
            spec = importlib.util.find_spec(script.path)
            if spec is not None and spec.submodule_search_locations is not None:
                spec = importlib.util.find_spec(f"{script.path}.__main__")
        except ModuleNotFoundError:
            spec = None
        finally:
            sys.path.remove(os.getcwd())
        if spec is None or not spec.origin:
            raise _CHECKS.invalid("script", script.path, "the name of a module", "Write it as for python -m")
        file = spec.origin
    try:
        source = Path(file).read_bytes()
        tree = ast.parse(source, file)
    except OSError as error:
        remedy = f"It cannot be read: {error.strerror or type(error).__name__}"
        raise _CHECKS.invalid("script", script.path, "a Python file", remedy) from error
    except (SyntaxError, ValueError) as error:
        raise _CHECKS.invalid("script", script.path, "a Python file", f"Python cannot read it: {error}") from error
    if script.compile_function and ":" not in script.compile_function:
        _decorate(tree, script)
    folder = os.getcwd() if script.module else str(Path(file).resolve().parent)
    return compile(tree, file, "exec"), file, folder


def _decorate(tree: ast.Module, script: Script) -> None:
    """Put ``weft.compile`` around a function of the script. Line numbers stay as they are.

    Raises:
        InvalidArgument: the script defines none of that name, or more than one.
    """
    wanted = script.compile_function.split(".")
    found: list[ast.FunctionDef] = []
    known: list[str] = []

    def walk(node: ast.AST, path: list[str]) -> None:
        for inner in ast.iter_child_nodes(node):
            named = isinstance(inner, (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef))
            here = [*path, inner.name] if named else path  # type: ignore[attr-defined]
            if isinstance(inner, ast.FunctionDef):
                known.append(".".join(here))
                if here[-len(wanted) :] == wanted:
                    found.append(inner)
            walk(inner, here)

    walk(tree, [])
    if len(found) != 1:
        which = "a function of the script" if not found else f"one function of the script, not {len(found)}"
        raise _CHECKS.invalid("--compile-function", script.compile_function, which, f"It has {', '.join(known)}")
    function = found[0]
    call = ast.parse("__import__('weft').compile", mode="eval").body
    function.decorator_list.append(call)
    for node in ast.walk(call):
        ast.copy_location(node, function)


def _compile_outside(script: Script) -> None:
    """Compile a function of another module than the script's."""
    module_name, colon, path = script.compile_function.partition(":")
    if not colon:
        return
    try:
        owner: Any = importlib.import_module(module_name)
        *parents, name = path.split(".")
        for parent in parents:
            owner = getattr(owner, parent)
        function = getattr(owner, name)
    except (ImportError, AttributeError) as error:
        remedy = "Write package.module:function or package.module:Class.method"
        raise _CHECKS.invalid("--compile-function", script.compile_function, "a function", remedy) from error
    if not isinstance(function, CompiledStep):
        setattr(owner, name, CompiledStep(function))


@contextlib.contextmanager
def _as_main(script: Script, file: str, folder: str) -> Iterator[None]:
    """Inside, the script is the main module, with its arguments and its import path."""
    before = sys.argv, list(sys.path), sys.modules["__main__"]
    main = types.ModuleType("__main__")
    main.__dict__.update(__file__=file, __builtins__=builtins, __cached__=None)
    if script.module:
        main.__package__ = script.path.rpartition(".")[0]
    sys.argv = [file, *script.arguments]
    sys.path.insert(0, folder)
    sys.modules["__main__"] = main
    try:
        yield
    finally:
        sys.argv, sys.path[:], sys.modules["__main__"] = before
