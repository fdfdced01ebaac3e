"""Runs a training step once on fake tensors and makes the captured step: a StepGraph and how calls reach it.

The user's function runs unchanged, with its own modules, optimizers and hooks. Nothing is computed; real tensors give
their shapes and dtypes only. The operations that reach the dispatcher become nodes
(:mod:`weft.capture.record.recorder`). What the function changed in Python state (a new ``.grad``, an attribute) is
found as the difference from a copy made before (:mod:`weft.capture.state.reachable_state`), undone, and kept as
:class:`Effect` s, which each later call repeats.

The outputs of the graph are of three kinds. ``Create``: a tensor that the step put at a place of Python state.
``Return``: a tensor that the step returned. ``Update``: the new value of an input that the step wrote to in place.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from weft import torch_adapter
from weft.capture.fake.fake_world import current_fake_world
from weft.capture.garbage_collection import garbage_collection_paused
from weft.capture.graph import drop_dead
from weft.capture.record.arguments import CallArguments
from weft.capture.record.attempts import captured_in_attempts
from weft.capture.record.autocast_copies import AutocastCopy, autocast_copy, emptied, may_be_copied
from weft.capture.record.autograd_links import detach_from_autograd
from weft.capture.record.branches import Branches
from weft.capture.record.builtin_types import builtin_types_know_symbols
from weft.capture.record.captured_step import Append, CapturedStep, Effect
from weft.capture.record.data_dependence import data_dependence_reported
from weft.capture.record.dynamic_sizes import DynamicSizes
from weft.capture.record.ended_runs import may_be_of_step
from weft.capture.record.escapes import EscapeCheck
from weft.capture.record.finished_graph import finished_graph
from weft.capture.record.float_arithmetic import FloatArithmetic
from weft.capture.record.generator_states import generators_kept
from weft.capture.record.growing_lists import GrowingLists, takes_out_entries
from weft.capture.record.hook_counts import HookCounts
from weft.capture.record.host_lists import HostList
from weft.capture.record.idle_optimizers import warn_of_idle
from weft.capture.record.intercept_collectives import functional_collectives
from weft.capture.record.kept_graphs import KeptGraphs
from weft.capture.record.large_arrays import LargeArrays
from weft.capture.record.left_settings import settings_kept
from weft.capture.record.memory_access import storages_keep_their_memory
from weft.capture.record.memory_of_arrays import refuse_writes_to_overlapping, refuse_writes_to_shared_memory
from weft.capture.record.missing_attributes import missing_attributes_noted
from weft.capture.record.module_path import ModulePath
from weft.capture.record.number_lists import NumberList
from weft.capture.record.number_tables import NumberTables
from weft.capture.record.numpy_functions import NumpyFunctions
from weft.capture.record.numpy_numbers import NumpyNumbers
from weft.capture.record.object_ids import Ids, plain_ids
from weft.capture.record.optimizer_states import Entry, OptimizerStates, remove
from weft.capture.record.outside_values import OutsideValues
from weft.capture.record.own_objects import OwnObjects
from weft.capture.record.percent_formats import percent_formats_know_symbols
from weft.capture.record.plain_keys import plain_keys_in_state
from weft.capture.record.plain_numbers import symbols_answer_as_numbers
from weft.capture.record.printed import output_repeated
from weft.capture.record.python_numbers import FOUND_ALONE, ChangingState, PythonNumbers, trying_arguments
from weft.capture.record.readable_names import readable_name
from weft.capture.record.recorder import OpRecorder
from weft.capture.record.remembered_results import RememberingFunctions
from weft.capture.record.replaced_gradients import UserTensors, release_replaced
from weft.capture.record.replaced_memory import memory_replaced
from weft.capture.record.result_aliases import inference_results, result_aliases
from weft.capture.record.sharding_text import sharding_text
from weft.capture.record.state_snapshot import StateSnapshots
from weft.capture.record.streams import Streams
from weft.capture.record.template_parts import Template
from weft.capture.record.templates import Templates
from weft.capture.record.tools_around import refuse_tools_around
from weft.capture.record.torch_functions import TorchFunctionInterceptor
from weft.capture.record.torchscript import scripts_interpreted
from weft.capture.record.unread_arguments import UnreadValue, ValuesOfArguments
from weft.capture.record.wrappers import wrapping_refused
from weft.capture.segments import Outcome
from weft.capture.state.containers import MISSING, Container, StatePlace
from weft.capture.state.hook_registrations import user_hook
from weft.capture.state.library_names import RunningCode
from weft.capture.state.reachable_state import ReachableState
from weft.capture.state.tensor_memory import inner_tensor, memory_key
from weft.capture.step_interface import Create, Input, Output, Return, Role, Update
from weft.capture.step_threads import capturing
from weft.capture.user_code import user_line
from weft.errors import PythonStateChanged, UsedDuringCapture, WeftError
from weft.short_tracebacks import mark_refused_call


@generators_kept()
@garbage_collection_paused()
def capture_step(
    step: Callable[..., Any],
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
    *,
    dynamic: frozenset[tuple[int, int]] = frozenset(),
    outcomes: tuple[Outcome, ...] = (),
    changing: ChangingState = FOUND_ALONE,
    expected: tuple[Outcome, ...] = (),
    predicts: bool = False,
) -> CapturedStep:
    """Capture one call ``step(*args, **kwargs)`` without computing anything.

    A step that branches on values that it computes has one path for each series of outcomes. What is captured is the
    path of ``outcomes``, up to the first branch beyond them.

    Args:
        step: the training step.
        args, kwargs: its arguments: real or fake tensors, in any nesting that pytrees know.
        dynamic: (tensor leaf, dimension) pairs to keep symbolic, besides those marked on the tensors themselves.
        outcomes: of the first branches on values.
        changing: Python numbers to keep symbolic.
        expected: of branches beyond ``outcomes``: the path that is captured where nothing else is known.
        predicts: see :class:`weft.capture.record.branches.Branches`.

    Raises:
        CannotCapture: the step does something that a graph cannot hold; names the user's line and the remedy.
    """
    refuse_tools_around(name := getattr(step, "__qualname__", type(step).__qualname__))
    changing = trying_arguments(changing, args, kwargs or {}) if not outcomes else changing
    escapes, created = EscapeCheck(), list[Entry]()  # `created`: state of optimizers

    def attempt(changing: ChangingState, earlier: Mapping[str, torch.Tensor], **how: Any) -> CapturedStep:
        paths = outcomes, expected, predicts
        remove(created)  # of a discarded attempt
        created.clear()
        capture = _StepCapture(step, args, kwargs or {}, dynamic, changing, escapes, paths, earlier, **how)
        captured = capture.run()
        created[:] = capture.optimizer_states.created
        return captured

    with capturing(), escapes.watching():
        try:
            captured = captured_in_attempts(attempt, changing, escapes.collect)
        except Exception as error:
            escapes.raise_for_escaped(name, (), error)
            raise
        finally:
            torch_adapter.bound_fake_results()
        try:
            escapes.raise_for_escaped(name, captured.fakes())
        except WeftError:
            remove(created)
            raise
    return captured


class _StepCapture:
    def __init__(
        self,
        step: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        dynamic: frozenset[tuple[int, int]],
        changing: ChangingState,
        escapes: EscapeCheck,
        outcomes: tuple[tuple[Outcome, ...], tuple[Outcome, ...], bool],
        earlier: Mapping[str, torch.Tensor],
        *,
        in_graph: list[torch.optim.Optimizer],
        found: ValuesOfArguments,
        remembering: RememberingFunctions,
        watched: bool = False,
        arrays: bool = False,
    ) -> None:
        self.step = step
        changing = replace(changing, numbers=changing.numbers | changing.tried)
        world = current_fake_world()
        self.fake_mode = world.fake_mode if world else FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
        self.modes = (self.fake_mode,) if world else ()
        self.recorder = OpRecorder(self.fake_mode)
        self.branches = Branches(self.recorder, *outcomes)
        self.branches.is_constant = lambda tensor: self._known_place(tensor) is None
        followed = functools.partial(ReachableState, step, computed=changing.names)
        state, shared = followed(replaced=changing.numbers, growing=changing.growing), set[str]()
        while state.shared:
            shared |= state.shared
            state = followed(replaced=changing.numbers - shared, growing=changing.growing - shared)
        self.state = state
        found.names = state.asked.new
        escapes.containers = lambda: state.containers
        escapes.modes.append(self.fake_mode)
        escapes.in_fake_world = world is not None
        self.recorder.shares_memory = lambda storage: self.state.in_memory.get(storage, ())
        self.met = set(map(id, state.objects))  # before the step makes any
        self.arguments = CallArguments(args, kwargs, changing.numbers, changing.values, changing.lists, self.met)
        self.changing = replace(changing, values=changing.values | self.arguments.unfolded)
        found.inputs, found.constants = self.arguments.paths_of_arrays()
        self.found, self.arguments.asked = found, found.asked
        found.unread = {self.arguments.paths[at] for at in self.arguments.not_to_be_read}
        for obj, path in self.arguments.objects:
            self.state.add(obj, path)
        self.met |= set(map(id, state.objects))
        self.made, self.collect = escapes.made, escapes.collect
        self.dynamic = (dynamic if not changing.plain else frozenset()) | self.arguments.marked_dynamic()
        self.recorder.input_name = self._input_name
        self.recorder.float_tags.used = not changing.plain_floats
        self.streams = Streams(self.recorder)
        self.sizes = DynamicSizes(self.recorder.symbols.shape_env)
        self.numbers = PythonNumbers(self.recorder, changing, shared)
        self.lists = GrowingLists(changing, self.numbers, shared)
        self.optimizer_states = OptimizerStates(self.recorder, self.state, self.modes, in_graph)
        self.tables = NumberTables(changing.tables, changing.plain_tables, found)
        self.large_arrays = LargeArrays(self.state, changing.tables)
        self.numpy_numbers = NumpyNumbers(self.state.containers, changing.numbers)
        self.remembering = remembering
        remembering.note(self.state.objects, self._walk_result, self.modes)
        followed = arrays or bool(self.arguments.has_arrays or self.large_arrays or self.numpy_numbers)
        ids = Ids(lambda: self.met, self.made)
        self.outside = OutsideValues(self.recorder, self.state, remembering, ids, watched=watched, arrays=followed)
        self.path = ModulePath(self.state)
        self.running = RunningCode(type(self).run.__code__)
        self.hooks = self._hooks()
        self.autocast_copies: list[AutocastCopy] = []
        self.graphs = KeptGraphs(self.state, earlier)
        self.recorder.snapshots = self._snapshots()

    def run(self) -> CapturedStep:
        started = time.perf_counter()
        try:
            with self._prepared():
                args, kwargs = self.arguments.as_fakes(
                    self.recorder, self.dynamic, self.sizes, self._plain_argument, self._array_argument
                )
                self.lists.check_arguments(known for _, known in self.arguments.objects_in_call)
                self.graphs.follow_arguments(self.arguments.faked)
                self.branches.whole_numbers = self.arguments.whole_numbers
                functions = TorchFunctionInterceptor(self.recorder, self.outside.arrays, self.branches.shown)
                symbols, drawn = self.recorder.symbols, self.outside.draws.described
                reported = data_dependence_reported(self.step, symbols, drawn)
                results: list[Any] = [None]  # of which no variable holds one: references to them are counted
                raised = False
                try:
                    changes = bool(self.changing.numbers or self.sizes.sizes)
                    noted = self.found.exceptions_noted(self.state.functions, bool(self.numbers.found), changes)
                    compared = self.remembering.compared(self._changes_so_far, self.recorder.graph)
                    asked, inside = self.branches.deciding(), functions.active_in_backward()
                    keys, kept = plain_keys_in_state(self.state.containers), settings_kept(self.step)
                    with reported, compared, self.fake_mode, self.recorder, functions, inside, asked, noted, keys, kept:
                        results[0] = self.step(*args, **kwargs)
                except BaseException as error:
                    mark_refused_call(error)
                    if isinstance(error, WeftError) or not may_be_of_step(error) or not self.branches.taken:
                        raise
                    results[0], raised = self.branches.ended_by(error), True
                self.specialised = self.sizes.specialised()
            self.optimizer_states.check()
            self.outside.arrays.check_unreached()
            self.remembering.check_written()
            captured = self._finish(results, raised)
        except BaseException:
            self._restore_state()
            remove(self.optimizer_states.created)
            for node in self.recorder.graph.nodes:
                # A value holds what autograd made of it, and wrappers look whether that is alive.
                node.meta.pop("val", None)
            raise
        finally:
            self.recorder.end()
            self.outside.end()
        captured.seconds = time.perf_counter() - started
        return captured

    def _is_made(self, value: Any) -> bool:
        """Whether an object was made since the capture began; the collector does not list a dict of plain values."""
        if not gc.is_tracked(value):  # a text, a number; or such a dict
            return type(value) is dict and id(value) not in self.met
        return id(value) not in self.met and id(value) in self.made(type(value))

    def _hooks(self) -> HookCounts:
        """Walk the hooks that belong to no object of the step, which are global or on arguments; count all hooks."""
        for kind, hooks in torch_adapter.global_hooks():
            self.state.add_hooks(hooks, f"the {kind} hooks of everything")
        known = self.state.places_by_id
        leaves = [(leaf, path) for leaf, path in self.arguments.differentiable if id(leaf) not in known]
        for leaf, path in leaves:
            for hooks in torch_adapter.registered_hooks(leaf):
                for hook in hooks.values():
                    self.state.add(user_hook(hook), f"a hook of {path}")
        return HookCounts(self.state, self.path, leaves)

    def _snapshots(self) -> StateSnapshots:
        return StateSnapshots(self.recorder, self.state, self.arguments, self.met, self.made)

    # ---- around the run

    @contextlib.contextmanager
    def _prepared(self) -> Iterator[None]:
        """Everything that the capture changes in torch and in the user's objects while the function runs."""
        name = getattr(self.step, "__qualname__", repr(self.step))
        with contextlib.ExitStack() as stack:
            if torch_adapter.in_autocast_region():
                stack.enter_context(self._autocast_around(name))
            refuse = lambda: UsedDuringCapture(name, threading.current_thread().name, user_line())
            stack.enter_context(torch_adapter.in_this_thread_alone(self.fake_mode, refuse))
            stack.enter_context(torch.autograd.set_multithreading_enabled(False))
            stack.enter_context(torch_adapter.force_eager())
            stack.enter_context(torch_adapter.dtensors_in_captures())
            stack.enter_context(scripts_interpreted(self.recorder))
            stack.enter_context(functional_collectives())
            stack.enter_context(wrapping_refused())
            stack.enter_context(self.outside.replaced())
            stack.enter_context(self.path.followed(self._is_made))
            stack.enter_context(self.hooks.counted())
            stack.enter_context(self.sizes.watched())
            stack.enter_context(self.graphs.followed(*self.modes))
            stack.enter_context((arithmetic := FloatArithmetic(self.recorder.symbols, self.recorder.emit)).exact())
            stack.enter_context(NumpyFunctions(arithmetic, self.outside.arrays.following).recorded())
            stack.enter_context(self.streams.noted())
            stack.enter_context(storages_keep_their_memory())
            stack.enter_context(output_repeated(self.recorder.symbols.shape_env))
            stack.enter_context(missing_attributes_noted(self.state.follow_missing))
            stack.enter_context(self.optimizer_states.reads_noted())
            stack.enter_context(symbols_answer_as_numbers())
            stack.enter_context(self.tables.noted(self.state.containers))
            stack.enter_context(builtin_types_know_symbols(self.state.functions))
            stack.enter_context(percent_formats_know_symbols(self.state.functions))
            stack.enter_context(torch_adapter.around_optimizer_steps(self._before_step, self._after_step))
            self.recorder.module_path = self._running_module
            for stand_ins in (self.numbers, self.tables, self.lists):
                stand_ins.put_into(self.state.containers)
            self.large_arrays.put_into(self.state.containers, self.recorder, self.outside.arrays.arrays)
            self.numpy_numbers.put_into(self.outside.arrays.arrays)
            yield

    def _running_module(self) -> str:
        """The path of the module that records an operation; notes the functions that led to it."""
        self.running.notice()
        return self.path.current()

    def _changes_so_far(self) -> Iterator[tuple[Container, Any, Any, Any]]:
        """The changes of the Python state, what was appended to lists among them."""
        yield from self.state.changes()
        yield from ((container, key, None, value) for container, key, value in self.lists.appended())

    def _plain_argument(self, value: Any, place: StatePlace) -> Any:
        """What the step gets for an argument that is no tensor."""
        if (kind := self.arguments.unread.get(place.key)) is not None:
            place = replace(place, container=self.arguments.passed)
            return UnreadValue(place, kind, self.found, self.fake_mode)
        number = self.numbers.argument(value, place)
        return self.outside.argument(value) if number is value else number

    def _array_argument(self, fake: torch.Tensor, array: Any, path: str) -> Any:
        """What the step gets for an array of numpy's, or a list, that is an input."""
        if type(array) is NumberList:
            place = StatePlace(self.arguments.passed, 0, path, Role.BATCH)
            return HostList(place, self.found, self.fake_mode, fake)
        return self.outside.arrays.arrays.argument(fake, array, path)

    @contextlib.contextmanager
    def _autocast_around(self, name: str) -> Iterator[None]:
        """The capture in a region of autocast that began before the call: note which weights it copies."""
        leaves = [*self.state.leaves, *self.arguments.differentiable]
        real = [] if self.modes else [(leaf, path) for leaf, path in leaves if may_be_copied(leaf)]
        with emptied(name, real):
            yield
            arguments = {id(self.arguments.leaves[at]): place for at, place in self.arguments.tensors.items()}
            places = {**self.state.places_by_id, **arguments}
            leaves = [] if self.modes else [*self.state.leaves, *self.arguments.differentiable]
            for leaf, _ in leaves:
                copy = autocast_copy(leaf, None, make=False) if may_be_copied(leaf) else None
                if copy is not None and id(leaf) in places:
                    cast = self.recorder.current_value(inner_tensor(copy)[0])
                    after_write = not any(node.op == "placeholder" for node in cast.all_input_nodes)
                    self.autocast_copies.append(AutocastCopy(name, places[id(leaf)], copy.dtype, after_write))

    def _walk_result(self, result: Any, path: str) -> None:
        """Follow what a function remembers: it is Python state that the step reaches by calling the function."""
        if id(result) in self.met:
            return
        self.state.add(result, path)
        self.met.update(map(id, self.state.objects))
        self.numbers.put_into(self.state.containers)

    def _restore_state(self) -> None:
        self.state.notice_new_hooks()
        self.state.notice_new_attributes()
        self.state.restore()
        self.arguments.restore()

    def _before_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.recorder.optimizing = True

        def follow() -> None:
            if all(known is not optimizer for known, _ in self.state.optimizers):
                if self._is_made(optimizer):  # no state of later calls
                    self.optimizer_states.make_in_graph(optimizer)
                    return
                self.state.add(optimizer, "optimizer")
                self.numbers.put_into(self.state.containers)

        self.optimizer_states.begin_step(optimizer, follow)

    def _after_step(self, optimizer: torch.optim.Optimizer) -> None:
        warn_of_idle(optimizer)  # now, because a closure may have computed the gradients
        self.recorder.optimizing = False
        self.optimizer_states.end_step()

    # ---- from the record to the captured step

    def _finish(self, results: list[Any], raised: bool) -> CapturedStep:
        recorder = self.recorder
        outputs: list[Output] = []
        nodes: list[Any] = []

        def keep(kind: Callable[[int], Output], value: Any) -> int:
            outputs.append(kind(len(nodes)))
            nodes.append(value)
            return len(nodes) - 1

        with torch_adapter.only_mode(self.fake_mode):
            recorder.storages.end()
            effects: list[Effect] = []
            appends: list[Append] = []
            moved: list[tuple[Container, list[Any], frozenset[str]]] = []
            if complete := not self.branches.undecided:
                if not raised:
                    self.hooks.check()
                self.state.plain_leaves.refuse_changed()
            self.state.notice_new_hooks()
            self.state.notice_new_attributes()
            self.graphs.check([tensor for _, tensor in recorder.placeholders])
            changes = [*self.state.changes(), *self.arguments.changes(self.state.containers)]
            self.numbers.check_changed(changes)
            self.numbers.check_tried()
            self.lists.check_changed(changes)
            own = (*self.state.containers, *self.arguments.containers)
            known = UserTensors({**self.state.places_by_id, **self.arguments.fakes})
            given, for_opaque = recorder.snapshots.given, list[Template]()
            begun_with = OwnObjects(self.met, self.state, self.made, self.arguments.passed_objects, given)
            appended = list(self.lists.appended()) if complete else []
            begun_with.note_left(results, changes, appended, self.collect)
            templates = Templates(recorder, known, begun_with)
            if complete:
                effects = self._effects(changes, keep, templates)
                moved = [(each, keys, frozenset[str]()) for each in own if (keys := each.moved())]
                moved += self.state.types.reordered()
                appends = self._appends(appended, keep, templates)
            what = "the exception that the step raises" if raised else "the step's return value"
            returned = templates.of(results[0], lambda value: keep(Return, value), what)
            results.clear()
            replaced: set[int] = set()
            if complete:
                create = lambda value, path: keep(lambda _: Create(path), value)
                replaced = memory_replaced(recorder, self.state.places_by_id, effects, create, nodes, templates)
                what = "an object that an opaque function got"
                for_opaque = [templates.of(each, lambda value: create(value, what), what) for each in given.changed()]
            given.end()
            templates.end()
            self.arguments.forget_fakes()
            self._restore_state()
            self.lists.settle(self.state.containers)
            aliases = result_aliases([node for node, _ in recorder.placeholders], nodes)
            inference = inference_results([tensor for _, tensor in recorder.placeholders], templates.inference)
            if complete:
                self._updates(outputs, nodes, replaced)
                updated = {out.input for out in outputs if isinstance(out, Update)}
                used = [(tensor, node.name in updated) for node, tensor in recorder.placeholders]
                path_of = lambda tensor: self._place(tensor).path
                refuse_writes_to_shared_memory(own, [each for each, *_ in changes], used, path_of)
                arrays = [*self.arguments.array_tensors, *self.large_arrays.tensors]
                refuse_writes_to_overlapping(used, arrays, path_of)
        self.streams.end()
        if complete and not self.branches.taken:  # what a branch holds may share memory too
            nodes = recorder.storages.without_copies(nodes)
        recorder.graph.output(tuple(nodes))
        with torch_adapter.no_torch_function_modes():  # those of a fake world would see each look at a fake value
            detach_from_autograd(self.recorder.graph, self.fake_mode)
            drop_dead(recorder.graph)
            inputs, places = self._inputs(outputs)
            if complete:
                self.optimizer_states.release_unread(places)
            graph = finished_graph(recorder.graph, inputs, places, outputs, recorder.placeholders)
        return CapturedStep(
            graph,
            places,
            effects,
            appends,
            returned,
            self.arguments,
            self.state,
            recorder.recorded,
            recorder.passed,
            self.hooks,
            recorder.symbols.shape_env,
            self.sizes,
            self.numbers.settle(self.state),
            recorder.symbols.computed,
            self.specialised,
            self.outside.environment.found,
            self.outside.calls.reads,
            self.running.libraries(self.state),
            self.autocast_copies,
            aliases,
            inference,
            self.changing,
            self.branches.taken,
            complete,
            raised,
            release_replaced(effects, [*places, *known.referred], recorder.graph),
            moved,
            self.graphs.updated if complete else [],
            for_opaque,
        )

    def _effects(
        self,
        changes: list[tuple[Container, Any, Any, Any]],
        keep: Callable[[Callable[[int], Output], Any], int],
        templates: Templates,
    ) -> list[Effect]:
        effects: list[Effect] = []
        removals: list[Effect] = []
        for container, key, _, new in changes:
            if container.outer is None and container is not self.state.types:
                container.frozen = False  # guarded after all: the step changes it (a scheduler that the step steps)
            path = container.label(key := plain_ids(key))
            templates.addresses.note(key, path)
            if new is MISSING:
                removals.append(Effect(container, key, None))
                continue
            # `add_param_group` is called once for each group. Where a step calls it each time, each is captured.
            is_groups = any(container.obj is each.param_groups for each, _ in self.state.optimizers)
            if container.grows_forever() and not is_groups and not takes_out_entries(self.state.functions):
                # Of a list that is an argument of the function, each call would compare the entries.
                remedy = "give the value and the object that has the list to a function marked @weft.opaque, and append"
                remedy += " and read there; or keep what is needed in a place of its own"
                change = f"{len(container.before)} -> {len(container.obj)} entries"
                raise PythonStateChanged(container.path, change, remedy)
            kept = lambda value, path=path: keep(lambda _: Create(path), value)
            effects.append(Effect(container, key, templates.of(new, kept, path)))
        return [*effects, *removals[::-1]]  # from the end of a list, so that positions keep their meaning

    def _appends(
        self,
        appended: list[tuple[Container, Any, Any]],
        keep: Callable[[Callable[[int], Output], Any], int],
        templates: Templates,
    ) -> list[Append]:
        appends: list[Append] = []
        for container, key, value in appended:
            path = container.label(key)
            kept = lambda value, path=path: keep(lambda _: Create(path), value)
            appends.append(Append(container, key, templates.of(value, kept, path)))
        return appends

    def _updates(self, outputs: list[Output], nodes: list[Any], replaced: set[int]) -> None:
        """Add an update to ``outputs``, and its value to ``nodes``, for each input whose value is no longer its
        placeholder. Tensors that get other memory, whose ids are ``replaced``, leave a value in their former memory."""
        for node, tensor in self.recorder.placeholders:
            read = self.recorder.value_of_memory if id(tensor) in replaced else self.recorder.current_value
            if (value := read(tensor)) is not node:
                outputs.append(Update(node.name))
                nodes.append(value)

    def _inputs(self, outputs: list[Output]) -> tuple[list[Input], list[StatePlace]]:
        """The entry and the place of each placeholder that is used; the other placeholders are erased."""
        known = dict(self.recorder.placeholders)
        number_places = {each.node: each.place for each in self.numbers.found}
        updated = {out.input for out in outputs if isinstance(out, Update)}
        inputs, places = [], []
        axes: dict[int, str] = {}
        for node in [n for n in self.recorder.graph.nodes if n.op == "placeholder"]:
            if not node.users and node.name not in updated:
                self.recorder.graph.erase_node(node)
                continue
            place = number_places.get(node) or self._place(known[node])
            inputs.append(Input(node.name, place.role, place.path, sharding_text(place, axes)))
            places.append(place)
        return inputs, places

    def _input_name(self, tensor: torch.Tensor) -> str:
        found = self._known_place(tensor)
        if found is None and tensor.requires_grad and tensor.is_leaf:
            self.state.add(tensor, "a parameter outside the known state")  # its gradient and hooks are state
        if found is None:
            self.outside.arrays.note_unreached(tensor)
            self.graphs.refuse_backward(tensor, "a tensor from outside the step")
        return "constant" if found is None else readable_name(found.path)

    def _known_place(self, tensor: torch.Tensor) -> StatePlace | None:
        key = memory_key(tensor)
        return self.arguments.places.get(key) or self.state.places.get(key)

    def _place(self, tensor: torch.Tensor) -> StatePlace:
        return self._known_place(tensor) or StatePlace(Container([tensor], "constant"), 0, "constant", Role.BUFFER)
