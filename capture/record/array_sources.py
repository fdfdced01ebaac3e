"""Where the arrays of a step come from that exist only when it runs, and how they become tensors.

A step that draws an array is captured once more (:class:`ArrayDrawn`), with the functions of numpy that make arrays
replaced: a drawn value may be written to any of them. Other steps use numpy's own functions.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
import types
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from weft import torch_adapter
from weft.capture.record.array_calls import map_leaves
from weft.capture.record.array_recorder import OUTSIDE, ArrayRecorder, is_tensor_dtype
from weft.capture.record.ended_runs import RunEnded
from weft.capture.record.growing_lists import AppendedList
from weft.capture.record.host_arrays import HostArray, names
from weft.capture.record.host_lists import HostList
from weft.capture.record.recorder import OpRecorder
from weft.capture.record.unread_arguments import UnreadValue
from weft.capture.state.contents import LARGEST_BYTES
from weft.capture.user_code import called_for_user, nearest_package, user_line
from weft.errors import UncapturableDraw
from weft.short_tracebacks import users_mistake

log = logging.getLogger(__name__)

# Functions of numpy that make arrays of what is none.
_MAKING = names(
    "arange array asanyarray asarray ascontiguousarray asfortranarray copy empty empty_like eye fromiter full "
    "full_like geomspace identity indices linspace logspace ones ones_like tri zeros zeros_like"
)
_OF_LISTS = names("array asanyarray asarray")
# Functions that make an array of a list first: ``np.mean(losses)``.
_REDUCING = names("amax amin average max mean median min percentile prod quantile std sum var")
_SIZES = frozenset({"empty", "eye", "full", "identity", "indices", "ones", "tri", "zeros", "arange", "linspace"})
# Methods of generators that draw arrays, and the place of the argument that is a size. Others are in `host_draws`.
_DRAWING: dict[str, int] = {
    "choice": 1,
    "permutation": 0,
    "permuted": 3,
    "dirichlet": 1,
    "multinomial": 2,
    "multivariate_hypergeometric": 2,
    "multivariate_normal": 2,
    "random_integers": 2,
    "tomaxint": 0,
}
DRAWS_OF_ARRAYS = (*_DRAWING, "shuffle")
_TENSORS_OF = (torch.tensor, torch.as_tensor, torch.asarray)
_INDEXED = (torch.Tensor.__getitem__, torch.Tensor.__setitem__)
_EXTENSIONS = (".so", ".pyd")
_NUMBERS = (torch.SymInt, torch.SymFloat, torch.SymBool)
_CALLERS = ("random", "weft.capture.record.host_draws", "weft.capture.record.numpy_classes", __name__)


class ArrayDrawn(RunEnded):
    """Ends the run of a step that draws an array, which is then captured with arrays followed."""


class ArrayDraw:
    """Draws from a generator; what a node of numpy calls.

    Args:
        text: the method as the user would write it.
        target: takes the name of a method and its arguments.
        method: its name.
    """

    def __init__(self, text: str, target: Callable[..., Any], method: str) -> None:
        self._target = target
        self._method = method
        self.__name__ = self.__qualname__ = text

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._target(self._method, *args, **kwargs)


class ArrayOfList:
    """Makes an array of a list of numbers that is one leaf of the arguments; what a node of numpy calls.

    An array of integers of 64 bits becomes one of other numbers in another way than a list of them does: numbers that
    do not fit are no error, and are rounded once.

    Args:
        make: ``numpy.array``, or a function that does the same for a list.
    """

    def __init__(self, make: Callable[..., Any]) -> None:
        self._make = make
        self.__name__ = self.__qualname__ = "array_of_list"
        self.__module__ = "numpy"

    def __call__(self, numbers: Any, *args: Any, **kwargs: Any) -> Any:
        return self._make(numbers.tolist(), *args, **kwargs)


class ArraySources:
    """The arrays of one capture.

    Args:
        recorder: of the capture.
        intercepts: whether what this thread does now is a part of the step.
        described: where the sources of symbolic numbers are noted, by symbol.
        followed: whether arrays are followed; if not, the first draw of one raises :class:`ArrayDrawn`.

    Attributes:
        wanted: whether a draw raised, which the step may have caught.
    """

    def __init__(
        self, recorder: OpRecorder, intercepts: Callable[[], bool], described: dict[Any, str], *, followed: bool
    ) -> None:
        self._intercepts = intercepts
        self._followed = followed
        self._unreached: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}
        self._recorder = recorder
        self.arrays = ArrayRecorder(recorder, described)
        self.wanted = False

    def end(self) -> None:
        """Forget the capture: nothing is recorded any more."""
        self.arrays.active = False

    def check(self) -> None:
        """Raise :class:`ArrayDrawn` again where the step drew an array and caught it."""
        if self.wanted:
            raise ArrayDrawn

    def following(self) -> ArrayRecorder:
        """What records the arrays of the capture.

        Raises:
            ArrayDrawn: arrays are not followed yet.
        """
        if not self._followed:
            self.wanted = True
            raise ArrayDrawn
        return self.arrays

    # ---- tensors in the memory of arrays that the step makes

    def note_unreached(self, tensor: torch.Tensor) -> None:
        """Note a tensor of the step that is at no place in the Python state, with its content: the step may have made
        it in the memory of an array that it made before."""
        log.debug("a tensor of shape %s is not reachable from the step: it becomes a constant", tuple(tensor.shape))
        if self._followed or tensor.device.type != "cpu" or isinstance(tensor, FakeTensor):
            return
        copied = tensor.numel() * tensor.element_size() <= LARGEST_BYTES and tensor.layout is torch.strided
        with torch.no_grad(), torch_adapter.real_tensors(), torch_adapter.no_torch_function_modes():
            self._unreached[id(tensor)] = tensor, tensor.detach().clone() if copied else None

    def check_unreached(self) -> None:
        """Raise where the step wrote to such a tensor, or to its array: the program would go on with what one call left
        there, and the array would not see it. Where arrays are followed, each call makes them anew.

        Raises:
            ArrayDrawn: arrays are not followed yet.
        """
        for node, tensor in self._recorder.placeholders:
            known, before = self._unreached.get(id(tensor), (None, None))
            if known is None:
                continue
            with torch.no_grad(), torch_adapter.real_tensors(), torch_adapter.no_torch_function_modes():
                changed = before is not None and not torch.equal(_bytes(known), _bytes(before))
            if changed or self._recorder.current_value(tensor) is not node:
                raise ArrayDrawn

    # ---- draws

    def draw(
        self,
        text: str,
        target: Callable[..., Any],
        method: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        size_at: int | None = None,
    ) -> Any:
        """Record a draw of an array, or of a number of numpy's.

        Args:
            text: the function as the user would write it.
            target: takes the name of a method and its arguments, and draws, from its ``generator`` if it has one.
            size_at: place of the argument that is the size; None where ``method`` is one of ``DRAWS_OF_ARRAYS``.

        Raises:
            UncapturableDraw: the result has no place in a graph.
        """
        arrays = self.following()
        if kwargs.get("out") is not None:
            raise UncapturableDraw(text, user_line(), "it writes to an array (out=)", "assign its result instead")
        draw = ArrayDraw(text, target, method)
        scratch = getattr(_scratch(getattr(target, "generator", None)), method)
        if method == "shuffle":
            if not args or type(args[0]) is not HostArray:
                why = "it shuffles a list, or an array that the step did not make itself"
                remedy = f"draw a permutation with numpy.random.permutation, or {OUTSIDE}"
                raise UncapturableDraw(text, user_line(), why, remedy)
            return arrays.call(draw, args, kwargs, writes=args[0], scratch=scratch)
        at = _DRAWING[method] if size_at is None else size_at
        args = args[:at] + arrays.plain(args[at:])
        kwargs = {key: arrays.plain(value) if key == "size" else value for key, value in kwargs.items()}
        return arrays.call(draw, args, kwargs, scratch=scratch)

    # ---- what stands in for functions while a step is captured

    def replacements(self) -> Iterator[tuple[Any, str, Any]]:
        """(owner, name, replacement) of the functions that make arrays, and of ``torch.from_numpy``."""
        numpy = sys.modules.get("numpy")
        if self._followed and numpy is not None:
            for name in _MAKING:
                yield numpy, name, self._making(getattr(numpy, name), name)
            for name in _REDUCING:
                yield numpy, name, self._reducing(getattr(numpy, name), numpy.array)
            yield torch, "from_numpy", self._from_numpy(torch.from_numpy)
        elif numpy is not None:
            for name in _OF_LISTS | _REDUCING:
                yield numpy, name, self._of_numbers(getattr(numpy, name))

    def _of_numbers(self, original: Callable[..., Any]) -> Any:
        """Stands in for a function that makes arrays of lists: where numbers in one differ between calls, the array
        does too, and is followed."""

        @functools.wraps(original)
        def make(*args: Any, **kwargs: Any) -> Any:
            found = args and (_holds_numbers(args[0]) or isinstance(args[0], AppendedList))
            if found and self._intercepts() and _called_by_step():
                self.following()
            return original(*args, **kwargs)

        return make

    def _making(self, original: Callable[..., Any], name: str) -> Any:
        @functools.wraps(original)
        def make(*args: Any, **kwargs: Any) -> Any:
            if self.arrays.busy or not self._intercepts() or not _called_by_step():
                return original(*args, **kwargs)
            if name in _SIZES:
                args, kwargs = self.arrays.plain((args, kwargs))
            return self._made(original, args, kwargs)

        return make

    def number_of_class(self, kind: type) -> Callable[..., Any]:
        """Stands in for the call of a class of numbers of numpy's."""

        def make(*args: Any, **options: Any) -> Any:
            found = len(args) == 1 and (type(args[0]) is HostArray or _holds_numbers(args[0]))
            if not found or self.arrays.busy or not self._intercepts() or not _called_by_step():
                return kind(*args, **options)
            self.following()
            return self._made(kind, args, options)

        return make

    def _reducing(self, original: Callable[..., Any], array: Callable[..., Any]) -> Any:
        """Stands in for a function that reduces a list: of numbers of the step, an array is made first."""

        @functools.wraps(original)
        def reduce(*args: Any, **kwargs: Any) -> Any:
            if args and isinstance(args[0], AppendedList) and self._intercepts() and _called_by_step():
                call = lambda target, given, _: self.arrays.call(target, (*given, *args[1:]), kwargs)
                return args[0].reduced(original, call, *args[1:], **kwargs)
            if args and _holds_numbers(args[0]) and self._intercepts() and _called_by_step():
                args = (self._made(array, args[:1], {}), *args[1:])
            return original(*args, **kwargs)

        return reduce

    def _made(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        numpy, found = sys.modules["numpy"], []
        if args and isinstance(args[0], deque):
            args = (list(args[0]), *args[1:])  # as numpy takes it
        if original.__name__ in _OF_LISTS and args and type(args[0]) is HostList:
            return self.arrays.call(ArrayOfList(original), (self.arrays.of_list(args[0]), *args[1:]), kwargs)
        args, kwargs = map_leaves((args, kwargs), lambda leaf: self.numpy(leaf) if _is_tensor(leaf) else leaf)
        map_leaves((args, kwargs), found.append)
        if any(type(each) is HostArray or isinstance(each, _NUMBERS) for each in found):
            return self.arrays.call(original, args, kwargs)
        result = original(*args, **kwargs)
        given = any(isinstance(each, numpy.ndarray) and numpy.may_share_memory(each, result) for each in found)
        if given or type(result) is not numpy.ndarray or not is_tensor_dtype(result.dtype):
            return result
        return self.arrays.made(original, result)

    def _from_numpy(self, original: Callable[..., Any]) -> Any:
        @functools.wraps(original)
        def from_numpy(array: Any) -> torch.Tensor:
            return self.arrays.tensor(array) if type(array) is HostArray else original(array)

        return from_numpy

    @contextlib.contextmanager
    def extensions_kept(self) -> Iterator[None]:
        """Inside, modules in C that look up functions of numpy by name, as its generators do, find the originals."""
        numpy = sys.modules.get("numpy")
        if not self._followed or numpy is None:
            yield
            return
        originals = types.ModuleType("numpy")
        vars(originals).update(vars(numpy))
        holders = [
            (vars(module), name)
            for module in list(sys.modules.values())
            if str(getattr(module, "__file__", "")).endswith(_EXTENSIONS)
            for name in ("np", "numpy")
            if vars(module).get(name) is numpy
        ]
        for module, name in holders:
            module[name] = originals
        try:
            yield
        finally:
            for module, name in holders:
                module[name] = numpy

    # ---- tensors that become arrays

    def numpy(self, tensor: torch.Tensor, *, force: bool = False) -> HostArray:
        """``tensor.numpy(force=force)``.

        Raises:
            ArrayDrawn: arrays are not followed.
            RuntimeError, TypeError: torch gives no array of this tensor, as in eager.
        """
        arrays = self.following()
        if force:
            tensor = tensor.detach().cpu().resolve_conj().resolve_neg()
        with torch_adapter.only_mode():
            _check_numpy(tensor)
        return arrays.of_tensor(tensor)

    # ---- arrays among the arguments of functions of torch

    def torch_function(self, function: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Any, Any, Any]:
        """The function to call in the place of a function of torch, with the arguments to give it."""
        if not self._followed or not _holds_array((args, kwargs)):
            return function, args, kwargs
        if function in _TENSORS_OF and args and type(args[0]) is HostArray:
            return functools.partial(self._tensor, function), args, kwargs
        if function in _TENSORS_OF and args and len(args) == 1 and (kind := _dtype_of_numbers(args[0])) is not None:
            numbers = map_leaves(args[0], lambda leaf: leaf.item() if type(leaf) is HostArray else leaf)
            return function, (numbers,), {"dtype": kind, **{k: v for k, v in kwargs.items() if v is not None}}
        indexed = function in _INDEXED
        plain = lambda leaf: self._operand(function, leaf, indexing=False)
        index = lambda leaf: self._operand(function, leaf, indexing=True)
        converted = [map_leaves(each, index if indexed and at == 1 else plain) for at, each in enumerate(args)]
        return function, tuple(converted), map_leaves(kwargs, plain)

    def _operand(self, function: Callable[..., Any], leaf: Any, indexing: bool) -> Any:
        if type(leaf) is not HostArray:
            return leaf
        known = self.arrays.known(leaf)
        if known is not None:
            return known
        if not isinstance(leaf, sys.modules["numpy"].ndarray):
            # Torch takes a truth value of numpy's for a float.
            return self.arrays.number(leaf if indexing or leaf.dtype.kind != "b" else leaf.astype("float64"))
        if indexing:
            return self.arrays.tensor(leaf.copy(), sharing=False)
        name = getattr(function, "__name__", str(function))
        why = "a function of torch is given a drawn array of numpy's"
        raise UncapturableDraw(name, user_line(), why, "make a tensor of the array with torch.from_numpy")

    def _tensor(self, function: Callable[..., Any], array: Any, *rest: Any, **options: Any) -> torch.Tensor:
        """``torch.tensor(array)``, or ``torch.as_tensor(array)``, which shares its memory where it can."""
        numpy = sys.modules["numpy"]
        known, is_array = self.arrays.known(array), isinstance(array, numpy.ndarray)
        sharing = function is not torch.tensor and is_array
        if known is not None and not sharing:
            return function(known, *rest, **options)
        options |= zip(("dtype", "device"), rest, strict=False)
        dtype, device = options.pop("dtype", None), options.pop("device", None)
        grad, copy = options.pop("requires_grad", False), options.pop("copy", None)
        if options:
            why = f"a drawn array becomes no tensor with {', '.join(options)}"
            raise self.arrays.refusal(f"torch.{function.__name__}", why, "make it with torch.from_numpy")
        whole = array if is_array else self.arrays.call(numpy.array, (array,))
        shared = self.arrays.tensor(whole, sharing=sharing)
        device = torch.get_default_device() if device is None else device
        made = shared.to(device=device, dtype=dtype or shared.dtype, copy=bool(copy) or not sharing)
        return made.requires_grad_() if grad else made


def _check_numpy(tensor: torch.Tensor) -> None:
    """Raise what ``Tensor.numpy`` raises, by asking a small tensor of the kind."""
    if tensor.device.type != "cpu":
        text = f"can't convert {tensor.device} device type tensor to numpy. "
        raise users_mistake(TypeError(f"{text}Use Tensor.cpu() to copy the tensor to host memory first."))
    like = torch.empty(0, dtype=tensor.dtype, requires_grad=tensor.requires_grad)
    if tensor.is_neg() and not tensor.requires_grad:
        like = torch.empty(0, dtype=torch.complex64).conj().imag
    elif tensor.is_conj():
        like = like.conj()
    try:
        like.numpy()
    except (RuntimeError, TypeError) as error:
        raise users_mistake(error) from None


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _dtype_of_numbers(data: Any) -> torch.dtype | None:
    """The dtype that torch gives a tensor of these numbers, some of numpy's among them; None where not all are numbers.

    That of numpy's counts in full: ``[numpy.float64(1), 1.0]`` gives float64, where Python's numbers give the default.
    """
    found: list[Any] = []
    map_leaves(data, found.append)
    kinds = [kind for each in found if (kind := _dtype_of_number(each)) is not None]
    return functools.reduce(torch.promote_types, kinds) if kinds and len(kinds) == len(found) else None


def _dtype_of_number(number: Any) -> torch.dtype | None:
    numpy, kind = sys.modules["numpy"], type(number)
    sample = number.weft_sample if kind is HostArray else number
    if isinstance(sample, numpy.generic):
        return torch.from_numpy(numpy.zeros(0, sample.dtype)).dtype if is_tensor_dtype(sample.dtype) else None
    if kind in (float, torch.SymFloat):
        return torch.get_default_dtype()
    return torch.bool if kind in (bool, torch.SymBool) else torch.int64 if kind in (int, torch.SymInt) else None


def _holds_array(tree: Any) -> bool:
    if issubclass(type(tree), UnreadValue):
        return False
    if isinstance(tree, (list, tuple)):
        return any(map(_holds_array, tree))
    if isinstance(tree, dict):
        return any(map(_holds_array, tree.values()))
    if type(tree) is slice:
        return any(map(_holds_array, (tree.start, tree.stop, tree.step)))
    return type(tree) is HostArray


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor)


def _holds_numbers(tree: Any) -> bool:
    """Whether there are tensors, or numbers that differ from call to call, in a list, or in lists in it."""
    if type(tree) in (list, tuple) or isinstance(tree, deque):
        return any(map(_holds_numbers, tree))
    return type(tree) is HostList or isinstance(tree, (torch.Tensor, *_NUMBERS))


def _scratch(generator: Any) -> Any:
    """A generator of the same kind, of whose numbers only shape and dtype count."""
    random = sys.modules["numpy.random"]
    return random.Generator(random.PCG64(0)) if isinstance(generator, random.Generator) else random.RandomState(0)


def _called_by_step() -> bool:
    """Whether the step's code makes an array now, or a library for it, and not numpy or torch for ends of their own."""
    return nearest_package(*_CALLERS) not in ("numpy", "torch", "weft", "sympy") and called_for_user(*_CALLERS)
