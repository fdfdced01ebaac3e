"""The arguments of a captured call: their leaves, which of them are tensors, and the fakes that stand for them.

Arguments are flattened as a pytree. Each tensor leaf has a place, by which later calls find their own tensor. In the
capture a fake tensor stands for it, with symbols for the dynamic sizes. A leaf that requires grad is passed as itself,
because hooks and ``.grad`` belong to that object.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import torch

from weft import torch_adapter
from weft.capture.record.argument_containers import ArgumentContainers, PassedObject
from weft.capture.record.data_arguments import register_data
from weft.capture.record.dynamic_sizes import MARKS, DynamicSizes, sizes_of
from weft.capture.record.number_lists import NumberList, folded
from weft.capture.record.numpy_arguments import (
    kind_of,
    may_be_input,
    must_be_input,
    tensors_of,
)
from weft.capture.record.python_numbers import differing
from weft.capture.record.readable_names import argument_path
from weft.capture.record.recorder import OpRecorder
from weft.capture.record.shared_arguments import SharedArguments, Steps
from weft.capture.record.unread_arguments import Asked, may_be_unread
from weft.capture.state.containers import SIMPLE, Attributes, Container, StatePlace, same_simple
from weft.capture.state.tensor_memory import inner_tensor, memory_key, own_attributes
from weft.capture.step_interface import Role
from weft.capture.strided_overlap import offset_within, span
from weft.errors import UnregisteredType, UnstridedArgument
from weft.tensor_subclasses import Shell


class CallArguments:
    """The flattened arguments of one call.

    Args:
        args, kwargs: the positional and the keyword arguments.
        changing: paths of the arguments that change from call to call. Arrays among them are inputs.
        values: paths of arguments that are guarded by their values all the same.
        lists: by path, the lists of numbers that are one leaf each.
        held: ids of the objects of the Python state. One that is passed is given to the step as it is.

    Attributes:
        leaves: the flattened arguments, with tensors in the place of the arrays that are inputs.
        arrays: those arrays, by their number: what must stay the same of each.
        unread: the type of each leaf that the step only passes on, by its number.
        asked: with which texts the step compared those.
        paths: how the user would write each leaf.
        tensors: the place of each leaf that is a tensor, by its number.
        vals: the fake of each of them, with symbolic sizes.
        fakes: the place of each tensor that the step is given for one of them, by its id.
        places: the same places by the memory of the tensor.
        gradients: number of each leaf of autograd that requires grad, and the container of its ``.grad``.
        numbers: the leaves of the captured call that are Python numbers, by their number.
        unfolded: paths of lists that are no leaf, although they are among ``lists``, because the state holds them.
        objects_in_call: what leads to each list, tuple, dictionary and data object passed, and its id.

    Raises:
        UnregisteredType: an argument is an object with tensors inside that is not registered as a pytree.
        UnstridedArgument: a tensor argument is sparse or has another layout that is not strided.
    """

    def __init__(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        changing: Collection[str] = (),
        values: Collection[str] = (),
        lists: Mapping[str, tuple[Any, ...]] | None = None,
        held: Collection[int] = (),
    ) -> None:
        register_data((args, kwargs))
        call = folded((args, kwargs), lists or {}, values)
        keyed, self.spec = torch_adapter.flatten_with_paths(call)
        of_state = (path for path, leaf in keyed if type(leaf) is NumberList and id(leaf.items) in held)
        if unfolded := frozenset(map(argument_path, of_state)):
            call = folded((args, kwargs), lists or {}, unfolded.union(values))
            keyed, self.spec = torch_adapter.flatten_with_paths(call)
        self.unfolded, self._held = unfolded, held
        self.objects_in_call: list[tuple[Steps, int]] = []
        self.paths = [argument_path(path) for path, _ in keyed]
        self._capture_spec = torch_adapter.exact_spec(call)
        self._call = args, kwargs
        self._containers = ArgumentContainers(self._call, self._call, held)
        passed = [leaf for _, leaf in keyed]
        self.arrays: dict[int, tuple[Any, ...]] = {
            at: kind_of(leaf)
            for at, (leaf, path) in enumerate(zip(passed, self.paths, strict=True))
            if (path in changing and path not in values and id(leaf) not in held and may_be_input(leaf))
            or must_be_input(leaf)
        }
        self.unread = {
            at: type(leaf)
            for at, (leaf, path) in enumerate(zip(passed, self.paths, strict=True))
            if path in changing and path not in values and id(leaf) not in held
            if may_be_unread(leaf) and _is_once(leaf, passed)
        }
        self.asked: list[Asked] = []
        self.container = Container(self._with_tensors(passed), "args", label=lambda at: self.paths[at])
        self.passed = Container(passed, "args", label=lambda at: self.paths[at])
        self.shapes: list[tuple[int, ...] | None] = []
        self.tensors: dict[int, StatePlace] = {}
        self.vals: dict[int, torch.Tensor] = {}
        self.fakes: dict[int, StatePlace] = {}
        self.places: dict[tuple[Any, ...], StatePlace] = {}
        self.gradients: list[tuple[int, Container]] = []
        self.numbers = {at: leaf for at, leaf in enumerate(self.leaves) if type(leaf) in (int, float)}
        self._holders: list[tuple[int, Container]] = []  # of attributes of leaves
        self._constants: list[tuple[int, Container]] = []  # leaves that do not require grad
        self._passed: dict[int, Any] = {}  # held, so that no other object gets the id of one
        for at, leaf in enumerate(self.leaves):
            self._admit(at, leaf)

    @property
    def leaves(self) -> list[Any]:
        """The flattened arguments of the call that is bound now."""
        return self.container.obj

    def _with_tensors(self, leaves: list[Any]) -> list[Any]:
        """Leaves of a call, with tensors in the place of the arrays that are inputs."""
        if not self.arrays:
            return leaves
        leaves = list(leaves)
        for at, tensor in zip(self.arrays, tensors_of(leaves[at] for at in self.arrays), strict=True):
            leaves[at] = tensor
        return leaves

    def inputs_of(self, leaves: list[Any]) -> list[Any] | str:
        """Leaves of another call with tensors in the place of arrays; or why arrays, or what the step only passes on,
        are of another kind there."""
        for at, kind in self.unread.items():
            if type(leaves[at]) is not kind:
                return f"{self.paths[at]} is a {type(leaves[at]).__qualname__}, was a {kind.__qualname__}"
        for asked in self.asked:
            if (leaves[asked.place.key] == asked.other) is not asked.outcome:
                return f"no more: {asked}"
        if not self.arrays:
            return leaves
        for at, kind in self.arrays.items():
            if kind_of(leaves[at]) != kind:
                return f"the type of {self.paths[at]} changed, or whether it can be written to"
        try:
            return self._with_tensors(leaves)
        except (TypeError, ValueError) as error:
            return f"{self.paths[next(iter(self.arrays))]}, or another array: {error}"

    def changed(self, leaves: list[Any], contents: Iterable[Container]) -> Iterator[str]:
        """The paths of the numbers and arrays among the leaves of another call that are others than in this one.

        Args:
            contents: what the Python state holds, the contents of arrays among it.
        """
        for at, number in self.numbers.items():
            yield from differing(self.paths[at], leaves[at], number)
        known = self.passed.obj
        yield from (self.paths[at] for at in self.arrays)
        yield from (self.paths[at] for at in self.unread)
        for at, (leaf, before) in enumerate(zip(leaves, known, strict=True)):
            if at not in self.tensors and (may_be_input(leaf) or (may_be_unread(leaf) and type(leaf) is type(before))):
                same = leaf is before or same_simple(leaf, before)
                if not same or any(each.obj is leaf and any(True for _ in each.changes()) for each in contents):
                    yield self.paths[at]

    @property
    def has_arrays(self) -> bool:
        """Whether arrays or numbers of numpy's are inputs."""
        return any(type(self.passed.obj[at]) is not NumberList for at in self.arrays)

    @property
    def not_to_be_read(self) -> list[int]:
        """Numbers of the leaves whose stand-ins tell when the step looks inside."""
        return [*self.unread, *(at for at in self.arrays if type(self.passed.obj[at]) is NumberList)]

    def for_eager(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The positional and keyword arguments of the call that is bound now, in new lists and dictionaries."""
        leaves = [list(leaf.items) if type(leaf) is NumberList else leaf for leaf in self.passed.obj]
        return torch_adapter.unflatten(leaves, self._capture_spec)

    def paths_of_arrays(self) -> tuple[set[str], set[str]]:
        """Paths of the arrays that are inputs, and of those that could be and are guarded by their values."""
        others = (at for at, leaf in enumerate(self.leaves) if at not in self.tensors and may_be_input(leaf))
        large = {
            at
            for at in self.arrays
            if must_be_input(self.passed.obj[at]) and type(self.passed.obj[at]) is not NumberList
        }
        return {self.paths[at] for at in self.arrays.keys() - large}, {self.paths[at] for at in others}

    @property
    def array_tensors(self) -> list[torch.Tensor]:
        """The tensors in the memory of the arrays that are inputs."""
        return [self.leaves[at] for at in self.arrays]

    @property
    def objects(self) -> Iterator[tuple[Any, str]]:
        """Arguments that are neither tensors nor plain values: modules, optimizers, functions."""
        unread = {id(self.leaves[at]) for at in self.unread}
        return (
            (leaf, path)
            for leaf, path in zip(self.leaves, self.paths, strict=True)
            if not isinstance(leaf, (torch.Tensor, *SIMPLE)) and id(leaf) not in unread
        )

    @property
    def faked(self) -> Iterator[tuple[StatePlace, torch.Tensor, torch.Tensor]]:
        """(place, argument, what the step is given for it) of each tensor that the step is not given itself."""
        fakes = ((at, fake) for at, fake in self._passed.items() if at not in self.arrays)
        return ((self.tensors[at], self.leaves[at], fake) for at, fake in fakes)

    @property
    def differentiable(self) -> list[tuple[torch.Tensor, str]]:
        """Tensor arguments that require grad, with their paths."""
        return [(self.leaves[at], self.paths[at]) for at, _ in self.gradients]

    def _admit(self, at: int, leaf: Any) -> None:
        path = self.paths[at]
        if not isinstance(leaf, torch.Tensor):
            if _is_batch_object(leaf):
                raise UnregisteredType(type(leaf), path)
            self.shapes.append(sizes_of(leaf))
            return
        if leaf.is_nested:  # has no sizes to ask for
            raise UnstridedArgument(path, leaf.layout, is_nested=True)
        self.shapes.append(leaf.shape)
        inner, names = inner_tensor(leaf)
        if inner.layout is not torch.strided:
            raise UnstridedArgument(path, inner.layout, is_nested=False)
        self.tensors[at] = StatePlace(self.container, at, path, Role.BATCH, names)
        self.places.setdefault(memory_key(inner), self.tensors[at])
        for name, value in own_attributes(leaf).items():
            if type(value) is torch.Tensor:
                holder = Attributes(leaf, path, frozenset({name}), lambda key: f"{path}.{key}")
                self._holders.append((at, holder))
                place = StatePlace(holder, name, f"{path}.{name}", Role.BATCH)
                self.places.setdefault(memory_key(value), place)
        if not (leaf.requires_grad and leaf.is_leaf):
            self._constants.append((at, Container(leaf, path, label=lambda key: f"{path}.{key}")))
        else:
            gradient = Container(leaf, path, label=lambda key: f"{path}.{key}")
            self.gradients.append((at, gradient))
            if leaf.grad is not None:
                grad, names = inner_tensor(leaf.grad)
                self.places.setdefault(
                    memory_key(grad), StatePlace(gradient, "grad", f"{path}.grad", Role.GRADIENT, names)
                )

    @property
    def whole_numbers(self) -> frozenset[int]:
        """Ids of the plain tensors among the arguments that hold integers or booleans, and of those in the memory of
        arrays."""
        inner = [inner_tensor(self.leaves[at])[0] for at in self.tensors if at not in self.arrays]
        kinds = [each for each in inner if not each.dtype.is_floating_point and not each.dtype.is_complex]
        return frozenset(
            id(each) for each in (*kinds, *map(self.leaves.__getitem__, self.arrays)) if type(each) is torch.Tensor
        )

    def marked_dynamic(self) -> frozenset[tuple[int, int]]:
        """(leaf, dimension) pairs that ``mark_dynamic`` or ``maybe_mark_dynamic`` named."""
        return frozenset(
            (at, dim)
            for at, leaf in enumerate(self.leaves)
            if isinstance(leaf, torch.Tensor)
            for dim, mark in getattr(leaf, MARKS, {}).items()
            if mark != "static"
        )

    def as_fakes(
        self,
        recorder: OpRecorder,
        dynamic: frozenset[tuple[int, int]],
        sizes: DynamicSizes,
        stand_in: Callable[[Any, StatePlace], Any],
        array: Callable[[torch.Tensor, Any, str], Any],
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments to capture with: fake tensors in place of real ones, symbols in place of dynamic sizes.

        ``stand_in`` says what the step gets for an argument that is no tensor, at this place, and ``array`` what for an
        array whose tensor has this fake. A leaf of autograd that requires grad is passed as itself: hooks on it and its
        ``.grad`` belong to that object.
        """
        places = [StatePlace(self.container, at, path, Role.SCALAR) for at, path in enumerate(self.paths)]
        leaves = [
            leaf if isinstance(leaf, torch.Tensor) else stand_in(leaf, place)
            for leaf, place in zip(self.leaves, places, strict=True)
        ]
        parts = self._parts()
        # How they overlap is fixed, and so are the sizes of the state.
        fixed = {*parts, *parts.values(), *(at for at in self.tensors if id(self.leaves[at]) in self._held)}
        dynamic -= {(at, dim) for at, dim in dynamic if at in fixed}
        for at in sorted(self.tensors, key=lambda at: at in parts):  # made after what they are a part of
            leaves[at] = self._fake(self.leaves[at], at, recorder, {d for a, d in dynamic if a == at}, sizes)
        made: dict[int, Any] = {}
        for at in self.arrays:
            real = self.passed.obj[at]
            known = id(real.items if type(real) is NumberList else real)
            if known not in made:
                made[known] = self._passed[at] = array(leaves[at], real, self.paths[at])
                self.fakes[id(made[known])] = StatePlace(self.passed, at, self.paths[at], Role.BATCH)
            leaves[at] = made[known]
        shared = SharedArguments(self._held)
        given = shared.of_call(torch_adapter.unflatten(leaves, self._capture_spec), self._call)
        self.objects_in_call = [(steps, id(obj)) for steps, obj in shared.objects]
        self._containers = ArgumentContainers(given, self._call, self._held)
        return given

    def _parts(self) -> dict[int, int]:
        """For each tensor argument inside the memory of another one, the numbers of both. None has sizes that its user
        marked as dynamic."""
        by_storage: dict[Any, list[tuple[int, torch.Tensor]]] = {}
        for at in self.tensors:
            if "dynamic" not in getattr(self.leaves[at], MARKS, {}).values():
                inner = inner_tensor(self.leaves[at])[0]
                by_storage.setdefault(memory_key(inner)[0], []).append((at, inner))
        return {
            at: other
            for there in by_storage.values()
            for at, part in there
            for other, whole in there
            if span(part) < span(whole) and offset_within(part, whole) is not None
        }

    def _fake(
        self, leaf: torch.Tensor, at: int, recorder: OpRecorder, dims: set[int], sizes: DynamicSizes
    ) -> torch.Tensor:
        path = self.paths[at]
        inner, names = inner_tensor(leaf)
        if (leaf.requires_grad and leaf.is_leaf) or id(leaf) in self._held:
            self.vals[at] = inner
            self.fakes.setdefault(id(leaf), self.tensors[at])
            for dim in sorted(dims):
                sizes.refuse(
                    path, dim, leaf.shape[dim], "requires_grad: such an argument keeps the sizes of the captured call"
                )
            return leaf
        required = {dim for dim, mark in getattr(leaf, MARKS, {}).items() if mark == "dynamic"}
        with torch_adapter.only_mode(recorder.fake_mode), torch_adapter.inference_mode_of(inner):
            shape = [
                sizes.symbol(at, dim, path, size, required=dim in required) if dim in dims else size
                for dim, size in enumerate(inner.shape)
            ]
            val = torch.empty_strided(
                shape, sizes.strides(at, path, inner, shape), dtype=inner.dtype, device=inner.device
            )
        self.vals[at] = val
        same = (each for each in self.tensors if each in self._passed and self.leaves[each] is leaf)
        if (first := next(same, None)) is not None:
            self._passed[at] = self._passed[first]
            return self._passed[at]
        known = recorder.input_fake(inner)
        if known is None:
            part = recorder.view_of_input(inner) if not dims else None
            known = (part or recorder.new_input(inner, val)).val
        if not names and any(known is each for each in self._passed.values()):
            # Another tensor in the same memory: the step may ask whether both are one object.
            with torch_adapter.only_mode(recorder.fake_mode), torch_adapter.inference_mode_of(known):
                known = recorder.storages.share(known.detach(), recorder.storages.of(known))
        passed = Shell.of(leaf).around({names: known}) if names else known
        if at in self.arrays:
            return passed  # which the step does not get
        self._passed[at] = passed
        for name, value in own_attributes(leaf).items():
            setattr(passed, name, value)
        self.fakes.setdefault(id(passed), self.tensors[at])
        return passed

    def captured(self) -> Iterator[tuple[StatePlace, torch.Tensor]]:
        """The place of each tensor that the step got a tensor of the capture for, and that, without its wrapper."""
        for at, passed in self._passed.items():
            if isinstance(passed, torch.Tensor):
                yield self.tensors[at], inner_tensor(passed)[0]

    def forget_fakes(self) -> None:
        """Let go of what the step was given: only while it is captured are they tensors of the user's."""
        self.fakes.clear()
        self._passed.clear()
        self._containers.forget()
        self._call, self._held = ((), {}), ()

    def bind(self, leaves: list[Any]) -> None:
        """Bind the leaves of another call: places and gradients refer to them from now on."""
        leaves = list(leaves)  # and not the call, which has them as an attribute
        self.passed.obj, self.container.obj = leaves, self._with_tensors(leaves)
        leaves = self.container.obj
        for at, container in (*self.gradients, *self._constants, *self._holders):
            container.obj = leaves[at]

    def changes(self, state: Iterable[Container]) -> Iterator[tuple[Container, Any, Any, Any]]:
        """(container, key, before, after) of each ``.grad`` and ``.requires_grad`` that the step changed, and of each
        entry of a list, a dictionary or a data object; ``state`` are the containers of the Python state."""
        for _, container in self.gradients:
            for key, old, new in container.changes():
                yield container, key, old, new
        for at, container in self._constants:
            passed = self._passed.get(at)
            if isinstance(passed, torch.Tensor) and passed.requires_grad and passed.is_leaf:
                yield container, "requires_grad", False, True
                if passed.grad is not None:
                    yield container, "grad", None, passed.grad
        yield from self._containers.changes(state)

    @property
    def containers(self) -> list[Container]:
        """Those of the lists, dictionaries and data objects in the arguments."""
        return self._containers.found

    @property
    def passed_objects(self) -> list[PassedObject]:
        """The lists, dictionaries and data objects in the arguments themselves."""
        return self._containers.objects

    @contextlib.contextmanager
    def containers_of(self, call: tuple[Any, Any]) -> Iterator[None]:
        """Inside, what the step changes of lists, dictionaries and data objects is changed in those of this call:
        (positional, keyword arguments)."""
        with self.bound_to(call):
            yield
            self._containers.order_entries()

    @contextlib.contextmanager
    def bound_to(self, call: tuple[Any, Any]) -> Iterator[None]:
        """Inside, the objects among the arguments are those of this call: (positional, keyword arguments)."""
        self._containers.bind(call)
        try:
            yield
        finally:
            self._containers.forget()

    def restore(self) -> None:
        """Undo changes of tensors; what the step got in place of a list or dictionary is the capture's own."""
        for _, container in self.gradients:
            container.restore()
        self._containers.restore()


def _is_once(leaf: Any, leaves: list[Any]) -> bool:
    """Whether an argument is no other one too, or cannot be changed."""
    return isinstance(leaf, (str, bytes, frozenset)) or sum(each is leaf for each in leaves) == 1


def _is_batch_object(obj: Any) -> bool:
    """Whether an object is data: it has tensors as attributes, and no module or optimizer among them."""
    if isinstance(obj, (type, torch.nn.Module, torch.optim.Optimizer)) or callable(obj):
        return False
    values = list(getattr(obj, "__dict__", {}).values())
    holds_model = any(isinstance(value, (torch.nn.Module, torch.optim.Optimizer)) for value in values)
    return not holds_model and any(isinstance(value, torch.Tensor) for value in values)
