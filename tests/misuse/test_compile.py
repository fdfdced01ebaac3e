"""Misuses of ``weft.compile`` and what it returns, ``capture``, ``explain``, ``opaque`` and ``mark_dynamic``."""

from __future__ import annotations

import copy
import functools
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import weft
from clear_errors import Misuse, faults


def step(x: torch.Tensor) -> torch.Tensor:
    return (x * 2).sum()


def with_backward(x: torch.Tensor) -> None:
    """A function that goes back through its argument."""
    x.sum().backward()


async def coroutine(x: torch.Tensor) -> None:
    """A function that runs nothing when it is called."""


def generator(x: torch.Tensor) -> Any:
    yield x


class Held:
    """An object with a tensor inside that pytrees do not know, of a class that says how one is made."""

    def __new__(cls, tensor: torch.Tensor) -> Held:
        return object.__new__(cls)

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


@functools.cache
def explained() -> Any:
    return weft.explain(step, torch.ones(3))


def compiled(**options: Any) -> Any:
    return weft.compile(step, **options)


def nested(layout: torch.layout = torch.strided) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)], layout=layout)


def called() -> Any:
    """A compiled step that has run once, so that guards see the arguments of the next call first."""
    result = compiled()
    result(x)
    return result


x = torch.ones(4, 3)
T, V = TypeError, ValueError

COMPILE = [
    Misuse("weft.compile(3)", "step", "3", T),
    Misuse("weft.compile('train')", "step", "'train'", T),
    Misuse("weft.compile(x)", "step", "tensor of shape (4, 3)", T),
    Misuse("weft.compile([step])", "step", "[the function step]", T),
    Misuse("weft.compile(Held)", "step", "the class Held", T),
    Misuse("weft.compile(nn.Linear)", "step", "the class Linear", T),
    Misuse("weft.compile(classmethod(step))", "step", "below that decorator", T),
    Misuse("weft.compile(property(step))", "step", "a property", T),
    Misuse("weft.compile(coroutine)", "step", "the function coroutine", T),
    Misuse("weft.compile(mode='fast')(3)", "mode", "'fast'", V),
    Misuse("weft.compile()(3)", "step", "3", T),
    Misuse("compiled(mode='fast')", "mode", "'fast'", V),
    Misuse("compiled(mode='max-autotune')", "mode", "'max-autotune'", V, "torch.compile(step, mode='nope')"),
    Misuse("compiled(mode=None)", "mode", "None", V),
    Misuse("compiled(mode=3)", "mode", "3", V),
    Misuse("compiled(mode=['bitwise'])", "mode", "['bitwise']", V),
    Misuse("compiled(dynamic='yes')", "dynamic", "'yes'", T),
    Misuse("compiled(dynamic=1)", "dynamic", "1", T),
    Misuse("compiled(dynamic=[0])", "dynamic", "[0]", T),
    Misuse("compiled(memory_limit='45GB')", "memory_limit", "'45GB'", T),
    Misuse("compiled(memory_limit=0)", "memory_limit", "0", V),
    Misuse("compiled(memory_limit=-1.5)", "memory_limit", "-1.5", V),
    Misuse("compiled(memory_limit=float('nan'))", "memory_limit", "nan", V),
    Misuse("compiled(memory_limit=float('inf'))", "memory_limit", "inf", V),
    Misuse("compiled(memory_limit=True)", "memory_limit", "True", T),
    Misuse("compiled(memory_limit=[45])", "memory_limit", "[45]", T),
    Misuse("compiled(memory_limit=45 * 2**30)", "memory_limit", "48318382080", V),
    Misuse("compiled(verify='no')", "verify", "'no'", T),
    Misuse("compiled(verify=1)", "verify", "1", T),
    Misuse("compiled(fallback='always')", "fallback", "'always'", V),
    Misuse("compiled(fallback=True)", "fallback", "True", V),
    Misuse("compiled(fallback=step)", "fallback", "the function step", V),
    Misuse("weft.CompiledStep(3)", "step", "3", T),
    Misuse("weft.CompiledStep(step, mode='fast')", "mode", "'fast'", V),
]

COMPILED = [
    Misuse("copy.deepcopy(compiled())", "copy.deepcopy", "step", T),
    Misuse("copy.copy(compiled())", "copy.copy", "step", T),
    Misuse("pickle.dumps(compiled())", "pickle", "step", T),
    Misuse("pickle.dumps({'step': compiled()})", "pickle", "step", T),
    Misuse("m = nn.Linear(3, 3); m.run = compiled(); copy.deepcopy(m)", "copy.deepcopy", "step", T),
    Misuse("compiled()(nested())", "args[0]", "nested", NotImplementedError),
    Misuse("compiled()(nested(torch.jagged))", "args[0]", "torch.jagged", NotImplementedError),
    Misuse("compiled()({'a': [x, nested()]})", "args[0]['a'][1]", "nested", NotImplementedError),
    Misuse("compiled()(x.to_sparse())", "in step", "torch.sparse_coo"),
    Misuse("compiled()(x.to_sparse_csr())", "args[0]", "torch.sparse_csr", NotImplementedError),
    Misuse("compiled()(x=x.to_sparse())", "in step", "to_dense"),
    Misuse("called()(nested())", "args[0]", "nested", NotImplementedError),
    Misuse("called()(nested(torch.jagged))", "args[0]", "torch.jagged", NotImplementedError),
    Misuse("called()(x.to_sparse())", "in step", "torch.sparse_coo"),
    Misuse("called()(x.to_sparse_csr())", "args[0]", "torch.sparse_csr", NotImplementedError),
    Misuse("called()(Held(x))", "args[0]", "Held"),
    Misuse("weft.fully_shard(nn.Linear(2, 2))", "mesh is None", "init_process_group", ValueError),
    Misuse("weft.replicate(nn.Linear(2, 2))", "mesh is None", "init_process_group", ValueError),
    Misuse("weft.compile(with_backward)(torch.ones(3, requires_grad=True) * 2)", "args[0]", "grad_fn"),
    Misuse("weft.compile(lambda x: x.mul_(2))(torch.ones(3, requires_grad=True) * 2)", "args[0]", "grad_fn"),
    Misuse("weft.compile(lambda w: w * 2)(torch.ones(3, requires_grad=True)).sum().backward()", "detach", "backward()"),
    Misuse("compiled()(Held(x))", "args[0]", "Held"),
    Misuse("compiled()([Held(x)])", "args[0][0]", "Held"),
    Misuse("weft.capture(3)", "step", "3", T),
    Misuse("weft.capture(None, x)", "step", "None", T),
    Misuse("weft.capture(nn.Linear, x)", "step", "the class Linear", T),
    Misuse("weft.capture(step, nested())", "args[0]", "nested", NotImplementedError),
    Misuse("weft.explain(3)", "step", "3", T),
    Misuse("weft.explain('step', x)", "step", "'step'", T),
    Misuse("weft.explain(None)", "step", "None", T),
    Misuse("weft.explain(compiled())", "step", "not captured yet"),
    Misuse("weft.explain(weft.capture(step, x))", "step", "a StepGraph", T),
    Misuse("explained().on('H9000')", "gpu", "'H9000'", V),
    Misuse("explained().on(3)", "gpu", "3", V),
    Misuse("explained().scheduled('nowhere')", "cluster", "'nowhere'", V),
    Misuse("explained().scheduled('/nonexistent/file.toml')", "cluster", "/nonexistent/file.toml", V),
    Misuse("explained().scheduled(3)", "cluster", "3", T),
    Misuse("explained().scheduled(memory_limit='45GB')", "memory_limit", "'45GB'", T),
    Misuse("explained().scheduled(memory_limit=-1)", "memory_limit", "-1", V),
    Misuse("explained().write('/nonexistent/folder/step.py')", "path", "/nonexistent/folder/step.py", OSError),
    Misuse("explained().write('/')", "path", "'/'", OSError),
    Misuse("explained().write(3.5)", "path", "3.5", T),
    Misuse("explained().write_trace('/tmp/trace.json')", "step", "no schedule"),
    Misuse("explained().measured()", "step", "GPU"),
]

OPAQUE = [
    Misuse("weft.opaque(3)", "function", "3", T),
    Misuse("weft.opaque(None)", "function", "None", T),
    Misuse("weft.opaque('log')", "function", "'log'", T),
    Misuse("weft.opaque(Held)", "function", "the class Held", T),
    Misuse("weft.opaque(coroutine)", "function", "the function coroutine", T),
    Misuse("weft.opaque(generator)", "function", "the function generator", T),
    Misuse("weft.opaque(x)", "function", "tensor of shape (4, 3)", T),
]

MARKS = [
    Misuse("weft.mark_dynamic(3, 0)", "tensor", "3", T),
    Misuse("weft.mark_dynamic('x', 0)", "tensor", "'x'", T),
    Misuse("weft.mark_dynamic(None, 0)", "tensor", "None", T),
    Misuse("weft.mark_dynamic(np.ones(3), 0)", "tensor", "ndarray", T),
    Misuse("weft.mark_dynamic([x], 0)", "tensor", "of type list", T),
    Misuse("weft.mark_dynamic(x, 'batch')", "dim", "'batch'", T),
    Misuse("weft.mark_dynamic(x, 2)", "dim", "2", IndexError),
    Misuse("weft.mark_dynamic(x, -3)", "dim", "-3", IndexError),
    Misuse("weft.mark_dynamic(x, 0.0)", "dim", "0.0", T),
    Misuse("weft.mark_dynamic(x, None)", "dim", "None", T),
    Misuse("weft.mark_dynamic(x, True)", "dim", "True", T),
    Misuse("weft.mark_dynamic(x, [0, 'a'])", "dim", "'a'", T),
    Misuse("weft.mark_dynamic(x, (0, 7))", "dim", "7", IndexError),
    Misuse("weft.mark_dynamic(x, [])", "dim", "[]", V),
    Misuse("weft.mark_dynamic(x, {0: 'batch'})", "dim", "{0: 'batch'}", T),
    Misuse("weft.mark_dynamic(torch.tensor(1.0), 0)", "dim", "0", IndexError),
    Misuse("weft.maybe_mark_dynamic(3, 0)", "tensor", "3", T),
    Misuse("weft.maybe_mark_dynamic(x, 'batch')", "dim", "'batch'", T),
    Misuse("weft.maybe_mark_dynamic(x, 9)", "dim", "9", IndexError),
    Misuse("weft.mark_static(3)", "tensor", "3", T),
    Misuse("weft.mark_static(x, 'batch')", "dim", "'batch'", T),
    Misuse("weft.mark_static(x, 9)", "dim", "9", IndexError),
]

NAMES = {
    **{"torch": torch, "nn": nn, "np": np, "weft": weft, "copy": copy, "pickle": pickle, "x": x},
    **{
        "step": step,
        "coroutine": coroutine,
        "with_backward": with_backward,
        "generator": generator,
        "Held": Held,
        "explained": explained,
    },
    **{"compiled": compiled, "nested": nested, "CompiledStep": weft.CompiledStep, "called": called},
}


@pytest.mark.parametrize("misuse", [*COMPILE, *COMPILED, *OPAQUE, *MARKS], ids=str)
def test_the_error_is_clear(misuse: Misuse) -> None:
    assert not faults(misuse, NAMES)
