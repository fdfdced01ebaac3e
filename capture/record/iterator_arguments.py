"""Iterators among the arguments: ``train_step(data_iterator)``, where the step calls ``next(data_iterator)``.

A compiled step runs no Python, so it cannot move an iterator. The call takes the items before the step begins, in the
order in which the step asks for them, and they are arguments of the step like all others: :class:`IteratorItems` is in
the place of the iterator, a pytree whose leaves are those of the items. How many items a step takes is found by its
first captures: the first one ends where the step asks for an item, the second one gives it that item again and again,
and the third one has all of them.

So the items come earlier than in eager. That changes nothing where the step has not changed before what the iterator
can read, and has drawn no random numbers. A capture refuses an item that the step asks for after a draw, an opaque call
or a branch on a value, or after a change of what the iterator reaches. Iterators that only go through lists and tuples
run no code, and draw nothing.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from weft import torch_adapter
from weft.capture.node_kinds import is_ordered, is_random
from weft.capture.record.ended_runs import RunEnded
from weft.capture.record.recorder import OpRecorder, recording
from weft.capture.record.runtime_checks import check
from weft.capture.segments import is_branch
from weft.capture.state.origin import is_user_class
from weft.capture.user_code import user_line
from weft.errors import UncapturableDraw
from weft.short_tracebacks import called_for_user

T = TypeVar("T")

_FIRST = "take all items at the beginning of the step: batches = [next(iterator) for _ in range(n)]"
_ONLY_NEXT = "use next() or a loop, or take the items before the step and pass them as arguments"
_MOST_WANTED = 64  # at once: a loop over an iterator would get the same item for ever
_SAME_ITEMS = "take as many items at each call, or take them before the step and pass them as arguments"


class ItemsWanted(RunEnded):
    """Ends a capture in which the step asked for items that are no arguments yet."""


class IteratorItems:
    """What a step gets for an iterator: the items of this call, and then what the iterator itself gives.

    Args:
        taken: the items of this call.
        number: of the iterator among those of the call.
        items: those of this iterator.
    """

    # What the step changes in `items` is an effect that each call repeats; the position is none.
    __slots__ = ("__dict__", "_at", "_taken", "number")

    def __init__(self, taken: ItemsOfCall | None, number: int, items: list[Any]) -> None:
        self.number = number
        self.items = items
        self._taken = taken
        self._at = 0

    def __iter__(self) -> IteratorItems:
        return self

    def __next__(self) -> Any:
        if self._taken is None:
            raise RuntimeError("the call that this iterator was an argument of has ended")
        if self._at < len(self.items):
            self._at += 1
            self._taken.asked(self.number)
            return self.items[self._at - 1]
        return self._taken.more(self.number, self.items)

    def __getattr__(self, name: str) -> Any:
        iterator = None if self._taken is None else self._taken.iterators[self.number]
        if name.startswith("__") or not hasattr(iterator, name):
            raise AttributeError(f"an iterator has no attribute {name!r}")
        if recording() is None:
            return getattr(iterator, name)
        why = "items are taken when a call begins, with next()"
        raise UncapturableDraw(f"{name} of an iterator from outside the step", user_line(), why, _ONLY_NEXT)


class ItemsOfCall:
    """The items that one call takes from iterators.

    Args:
        iterators: those among the arguments, by their position or name.

    Attributes:
        order: which iterators the step asked for items, by their numbers.
        after_draws: whether it asked for one after it drew random numbers on a GPU.
        ended: whether one of them had no more.
    """

    def __init__(self, iterators: dict[int | str, Iterator[Any]]) -> None:
        self.places = list(iterators)
        self.order: list[int] = []
        self.after_draws = False
        self.ended = False
        self.iterators = list(iterators.values())
        self._items: list[list[Any]] = [[] for _ in iterators]
        self._wanted: list[int] = []
        self._recorder: OpRecorder | None = None

    def take(self, numbers: Iterable[int]) -> None:
        """Take the next items of iterators, up to one that has ended."""
        with contextlib.suppress(StopIteration):
            self.ended = True
            for number in numbers:
                self._items[number].append(next(self.iterators[number]))
            self.ended = False

    def take_wanted(self) -> None:
        """Take the items that a capture asked for."""
        self.take(self._wanted)
        self._wanted.clear()

    def arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of the call with the items taken so far in the places of the iterators."""
        self.order.clear()
        self._recorder = None
        made = {place: IteratorItems(self, at, list(self._items[at])) for at, place in enumerate(self.places)}
        named = {place: each for place, each in made.items() if isinstance(place, str)}
        return tuple(made.get(at, value) for at, value in enumerate(args)), {**kwargs, **named}

    def asked(self, number: int) -> None:
        """Note that the step asks for an item, and refuse what would not be eager's."""
        if (recorder := recording()) is None:
            return
        if recorder is not self._recorder:  # another attempt at the capture
            self.check()
            self._recorder = recorder
            self.order.clear()
        _check_nothing_before(recorder, self.iterators[number])
        self.after_draws |= any(map(is_random, recorder.graph.nodes))
        self.order.append(number)

    def more(self, number: int, items: list[Any]) -> Any:
        """An item beyond the arguments: of the iterator itself; in a capture the last of the arguments once more, which
        are ``items``."""
        self.asked(number)
        if recording() is None:
            return called_for_user(next, self.iterators[number])
        self._wanted.append(number)
        if not items or len(self._wanted) > _MOST_WANTED:
            raise ItemsWanted
        # The step may change lists and dictionaries in it.
        return torch_adapter.unflatten(*torch_adapter.flatten(items[-1]))

    @property
    def wants(self) -> bool:
        """Whether a capture asked for items beyond its arguments."""
        return bool(self._wanted)

    def check(self) -> None:
        """Raise :class:`ItemsWanted` where a capture asked for items beyond its arguments."""
        if self.wants:
            raise ItemsWanted

    def is_used_up(self) -> bool:
        """Whether the step asked for all items that it had."""
        return len(self.order) == sum(map(len, self._items))


class IteratorArguments:
    """The iterators among the arguments of one step.

    Attributes:
        seen: whether a call had one that was captured.
        order: the iterators that each call takes items from, by position or name, in the order of the step.
        after_draws: whether the step asks for an item after it has drawn random numbers on a GPU.
    """

    def __init__(self) -> None:
        self.seen = False
        self.after_draws = False
        self.order: list[int | str] = []
        self.call: ItemsOfCall | None = None
        self._outer: ItemsOfCall | None = None  # of another step, inside of which this one is called

    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Take the items of a call. Returns whether an iterator had too few of them."""
        named = {**dict(enumerate(args)), **kwargs}
        found = {place: each for place, each in named.items() if _is_iterator(each)}
        once = {place: each for place, each in found.items() if sum(each is other for other in found.values()) == 1}
        if not once:
            return False
        self.seen = True
        self.call = ItemsOfCall(once)
        self._outer, _mine.call = _mine.call, self.call
        offsets = _offsets() if self.after_draws else []
        self.call.take(self.call.places.index(place) for place in self.order if place in once)
        if self.after_draws and _offsets() != offsets:
            what, why = "next() of an iterator that draws random numbers on a GPU", "the step draws others before"
            raise UncapturableDraw(what, "its argument", why, _FIRST)
        return self.call.ended

    @property
    def ended(self) -> bool:
        """Whether an iterator of the present call had too few items."""
        return self.call is not None and self.call.ended

    def arguments(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The arguments of the present call, with the items taken so far in the places of the iterators."""
        return (args, kwargs) if self.call is None else self.call.arguments(args, kwargs)

    def end(self) -> None:
        """Forget the present call."""
        if self.call is not None:
            self.call, _mine.call = None, self._outer

    def take_wanted(self) -> None:
        """Take the items that a capture asked for."""
        if self.call is not None:
            self.call.take_wanted()

    def with_items(self, args: Any, kwargs: Any, capture: Callable[[Any, Any], T]) -> T:
        """``capture(args, kwargs)`` of a call that does not run, with the items that it needs.

        Raises:
            UncapturableDraw: an iterator has too few items.
        """
        self.begin(args, kwargs)
        try:
            while not self.ended:
                try:
                    return capture(*self.arguments(args, kwargs))
                except ItemsWanted:
                    self.take_wanted()
                except Exception:
                    if self.call is None or not self.call.wants:
                        raise
                    self.take_wanted()
            what, why = "next() of an iterator among the arguments", "it has too few items for a call"
            raise UncapturableDraw(what, "the step", why, "pass one that has the items of a call")
        finally:
            self.end()

    def check(self) -> None:
        """After a capture that failed.

        Raises:
            ItemsWanted: the step asked for items beyond its arguments. With them as arguments it may not fail.
        """
        if self.call is not None:
            self.call.check()

    def captured(self, *, complete: bool) -> None:
        """After a capture of the present call.

        Args:
            complete: whether it went to the end of the step, and not to a branch on a value.

        Raises:
            ItemsWanted: the step asked for items beyond its arguments.
            UncapturableDraw: it took fewer, or others than at its first call.
        """
        self.check()
        if self.call is not None and complete:
            order = [self.call.places[number] for number in self.call.order]
            if not self.call.is_used_up() or order[: len(self.order)] != self.order:
                what, why = "next() of iterators among the arguments", "it takes other items than at other calls"
                raise UncapturableDraw(what, "the step", why, _SAME_ITEMS)
            self.order = self.order or order
            self.after_draws |= self.call.after_draws


class _OfThread(threading.local):
    call: ItemsOfCall | None = None


_mine = _OfThread()


def check_items_of_call() -> None:
    """Raise :class:`ItemsWanted` where a capture of the present call asked for items beyond its arguments."""
    if _mine.call is not None:
        _mine.call.check()


def _is_iterator(value: Any) -> bool:
    """Whether a value is an iterator whose position no walk of the Python state finds."""
    return isinstance(value, Iterator) and not isinstance(value, IteratorItems) and not is_user_class(type(value))


def _offsets() -> list[int]:
    """How far the generators of the GPUs are."""
    if not torch.cuda.is_initialized():
        return []
    return [generator.get_offset() for generator in torch.cuda.default_generators]


def _check_nothing_before(recorder: OpRecorder, iterator: Any) -> None:
    """Raise where the step has done something before that the iterator may go by, or that decides on the item."""
    reached = _reached_by(iterator)
    runs_code = not all(_runs_no_code(each) for each in reached if isinstance(each, Iterator))
    for node in recorder.graph.nodes:
        if is_branch(node):
            raise _refusal("branches on a value")
        if runs_code and node.op == "call_function" and _moves_host(node):
            raise _refusal(f"calls {getattr(node.target, '__name__', node.target)}")
    snapshot, held = recorder.snapshots.take(reached, lambda node: 0)
    entries = [each for each in snapshot.entries if any(each.container is own for own in held)]
    changed = [each.container.label(each.key) for each in entries] + [each.place.path for each in snapshot.tensors]
    if changed:
        raise _refusal(f"changes {changed[0]}, which the iterator can read,")


def _refusal(before: str) -> UncapturableDraw:
    why = f"the step {before} before, and all items are taken when a call begins"
    return UncapturableDraw("next() of an iterator from outside the step", user_line(), why, _FIRST)


def _runs_no_code(iterator: Any) -> bool:
    """Whether an iterator of Python's own only goes through what it holds."""
    return type(iterator) in _PLAIN


_PLAIN = frozenset(
    {type(iter(each)) for each in ([], (), {}, {}.values(), {}.items(), set(), "", b"", range(0), range(1 << 99))}
    | {type(reversed([])), type(reversed(())), zip, enumerate, itertools.chain, itertools.cycle, itertools.islice}
)


def _reached_by(iterator: Any) -> list[Any]:
    """What an iterator can read: what it holds, and what the iterators in it hold."""
    found, pending = [], [iterator]
    while pending:
        each = pending.pop()
        if (_is_iterator(each) or type(each) is tuple) and all(each is not other for other in found):
            pending += gc.get_referents(each)
        found.append(each)
    return found


def _moves_host(node: torch.fx.Node) -> bool:
    """Whether a node draws from a generator of the host, or calls what only Python knows."""
    draws_on_gpu = is_random(node) and _is_on_gpu(node)
    return (is_ordered(node) or is_random(node)) and node.target is not check and not draws_on_gpu


def _is_on_gpu(node: torch.fx.Node) -> bool:
    values = torch_adapter.flatten(node.meta.get("val"))[0]
    return bool(values) and all(isinstance(each, torch.Tensor) and each.is_cuda for each in values)


@dataclass(frozen=True)
class IteratorSlot:
    """In a template, the iterator that is an argument of the call."""

    number: int

    def fill(self, outputs: list[Any]) -> Any:
        """The iterator of the present call."""
        return None if _mine.call is None else _mine.call.iterators[self.number]


def slot_of_iterator(value: Any) -> IteratorSlot | None:
    """The slot in the place of what the step got for an iterator; None of all else."""
    return IteratorSlot(value.number) if isinstance(value, IteratorItems) and _mine.call is not None else None


def _unflattened(items: list[Any], number: int) -> IteratorItems:
    return IteratorItems(_mine.call, number, list(items))


torch_adapter.register_parts(
    IteratorItems, lambda each: (each.items, each.number), _unflattened, lambda _, count: range(count)
)
