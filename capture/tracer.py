"""Run a training step once on fake tensors and write it down as a StepGraph.

The user's function runs unchanged, with its own modules, optimizers and hooks; what reaches the dispatcher is recorded
(:mod:`weft.capture.recorder`), what it did to Python state is taken back (:mod:`weft.capture.state`), and both become
the captured step. Real tensors are read for their shapes only; nothing is computed.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from weft import torch_adapter
from weft.capture.arguments import Arguments
from weft.capture.collectives import functional_collectives
from weft.capture.dynamic import DynamicSizes, Specialised
from weft.capture.fake_world import current_fake_world
from weft.capture.functions import CaptureFunctions
from weft.capture.garbage import no_collections
from weft.capture.graph import Create, Input, Output, Return, Role, StepGraph, Update, drop_dead
from weft.capture.groups import canonical_groups
from weft.capture.hooks import HookCounts
from weft.capture.modules import ModulePath
from weft.capture.moment import Moments
from weft.capture.names import readable_name
from weft.capture.operands import map_operands
from weft.capture.randomness import record_random_state
from weft.capture.recorder import Recorder
from weft.capture.refusals import explained
from weft.capture.registrations import user_hook
from weft.capture.scripted import script_functions_as_written
from weft.capture.state import MISSING, Container, Place, State, identity, opaque_code
from weft.capture.streams import Streams
from weft.capture.values import Template
from weft.errors import CannotCapture, PythonStateChanged

log = logging.getLogger(__name__)


@dataclass
class Effect:
    """A change of Python state that every call makes: ``container[key]`` becomes ``template`` (None: is removed)."""

    container: Container
    key: Any
    template: Template | None


@dataclass
class CapturedStep:
    """A step as captured: the graph, and how calls of the user's function reach and leave it.

    Attributes:
        graph: the StepGraph.
        places: where the value of each input is found at the time of a call, aligned with ``graph.inputs``.
        effects: changes of Python state that each call repeats.
        result: what the step returns, over the graph's ``Return`` outputs.
        arguments: how the step was called.
        state: the Python state it can reach, for guards.
        recorded: operations that the recorder wrote down.
        passed: operations that ran once, for the capture, and are no part of the step (making optimizer state).
        hooks: how often each registered hook fired.
        shape_env: the symbols of the graph and what was assumed of them.
        sizes: the sizes of arguments that the capture began with as symbols.
        rates: the symbol of each learning rate and where its value is found.
        specialised: those among them, and of those asked for, that are numbers in the graph after all.
        seconds: how long the capture took.
    """

    graph: StepGraph
    places: list[Place]
    effects: list[Effect]
    result: Template
    arguments: Arguments
    state: State
    recorded: int
    passed: int
    hooks: HookCounts
    shape_env: ShapeEnv
    sizes: DynamicSizes
    rates: list[tuple[sympy.Symbol, Place]]
    specialised: list[Specialised]
    seconds: float = 0.0


@no_collections()
def capture_step(
    step: Callable[..., Any],
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
    *,
    dynamic: frozenset[tuple[int, int]] = frozenset(),
) -> CapturedStep:
    """Capture one call ``step(*args, **kwargs)`` without running it.

    Args:
        step: the training step.
        args, kwargs: real tensors, or the fake tensors of a fake world, in any nesting pytrees know.
        dynamic: (tensor leaf, dimension) pairs to keep symbolic, besides those marked on the tensors themselves.

    Raises:
        CannotCapture: the step does something that has no place in a graph; names the user's line and the remedy.
    """
    known = len(opaque_code)
    captured = _captured(step, args, kwargs or {}, dynamic)
    if len(opaque_code) > known:  # functions made inside the step: what only they use must guard nothing
        captured = _captured(step, args, kwargs or {}, dynamic)
    return captured


def _captured(
    step: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], dynamic: frozenset[tuple[int, int]]
) -> CapturedStep:
    """Capture the path that eager takes; where data decides on it, the one that libraries keep for traces."""
    asked: list[str] = []
    try:
        with torch_adapter.fakes_unnoticed() as asked:
            return _Capture(step, args, kwargs, dynamic).run()
    except CannotCapture as error:
        if not asked:
            raise
        log.info("%s can be traced another way; this one could not be: %s", asked[-1], str(error).split("\n")[0])
    return _Capture(step, args, kwargs, dynamic).run()


class _Capture:
    def __init__(
        self,
        step: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        dynamic: frozenset[tuple[int, int]],
    ) -> None:
        self.step = step
        world = current_fake_world()
        self.fake_mode = world.fake_mode if world else FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
        self.modes = (self.fake_mode,) if world else ()
        self.recorder = Recorder(self.fake_mode)
        self.state = State(step)
        self.recorder.shares_memory = lambda storage: self.state.in_memory.get(storage, ())
        self.arguments = Arguments(args, kwargs)
        for obj, path in self.arguments.objects:
            self.state.add(obj, path)
        self.dynamic = dynamic | self.arguments.marked_dynamic()
        self.recorder.input_name = self._input_name
        self.streams = Streams(self.recorder)
        self.sizes = DynamicSizes(self.recorder.symbols.shape_env)
        self.rates: list[tuple[dict[str, Any], torch.SymFloat, torch.fx.Node, Place]] = []
        self.initialized: list[tuple[torch.optim.Optimizer, torch.Tensor]] = []
        self.path = ModulePath(self.state)
        self.hooks = self._hooks()
        self.recorder.moments = self._moments()

    def run(self) -> CapturedStep:
        started = time.perf_counter()
        try:
            with self._prepared():
                args, kwargs = self.arguments.as_fakes(self.recorder, self.dynamic, self.sizes)
                with explained(self.step), self.fake_mode, self.recorder, CaptureFunctions(self.recorder):
                    result = self.step(*args, **kwargs)
                self.specialised = self.sizes.specialised()
            captured = self._finish(result)
        except BaseException:
            self._put_back()
            for optimizer, parameter in self.initialized:
                optimizer.state.pop(parameter, None)
            raise
        captured.seconds = time.perf_counter() - started
        return captured

    def _hooks(self) -> HookCounts:
        """Walk the hooks that belong to no object of the step: those on everything, those on arguments."""
        for kind, hooks in torch_adapter.global_hooks():
            self.state.add_hooks(hooks, f"the {kind} hooks of everything")
        leaves = [(leaf, path) for leaf, path in self.arguments.differentiable if id(leaf) not in self.state.homes]
        for leaf, path in leaves:
            for hooks in torch_adapter.registered_hooks(leaf):
                for hook in hooks.values():
                    self.state.add(user_hook(hook), f"a hook of {path}")
        return HookCounts(self.state, self.path, leaves)

    def _moments(self) -> Moments:
        arguments = self.arguments
        homes = {id(arguments.leaves[at]): place for at, place in arguments.tensors.items()}
        return Moments(self.recorder, self.state, [container for _, container in arguments.gradients], homes)

    # ---- around the run

    @contextlib.contextmanager
    def _prepared(self) -> Iterator[None]:
        """Everything that must differ while the user's function runs for the recorder."""
        torch.clear_autocast_cache()
        try:
            with contextlib.ExitStack() as stack:
                stack.enter_context(torch.autograd.set_multithreading_enabled(False))
                stack.enter_context(torch_adapter.force_eager())
                stack.enter_context(torch_adapter.dtensors_in_captures())
                stack.enter_context(script_functions_as_written())
                stack.enter_context(functional_collectives())
                stack.enter_context(record_random_state(self.recorder))
                stack.enter_context(self.path.followed())
                stack.enter_context(self.hooks.counted())
                stack.enter_context(self.sizes.watched())
                stack.enter_context(self.streams.noted())
                stack.enter_context(torch_adapter.around_optimizer_steps(self._before_step, self._after_step))
                self.recorder.module_path = self.path.current
                for optimizer, path in self.state.optimizers:
                    self._make_rates_symbolic(optimizer, path)
                yield
        finally:
            torch.clear_autocast_cache()

    def _put_back(self) -> None:
        for group, _, _, place in self.rates:
            group["lr"] = place.container.before["lr"]
        self.state.restore()
        self.arguments.restore()

    def _make_rates_symbolic(self, optimizer: torch.optim.Optimizer, path: str) -> None:
        for at, group in enumerate(optimizer.param_groups):
            if type(group.get("lr")) is not float:
                continue
            where = f"{path}.param_groups[{at}]['lr']"
            place = Place(Container(group, where, frozenset({"lr"})), "lr", where, Role.SCALAR)
            symbol = torch_adapter.lr_symbol(self.recorder.symbols.shape_env, group["lr"], f"lr{len(self.rates)}")
            self.rates.append((group, symbol, self.recorder.scalar_input(symbol, readable_name(where)), place))
            group["lr"] = symbol

    def _before_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.recorder.optimizing = True
        if all(known is not optimizer for known, _ in self.state.optimizers):
            self.state.add(optimizer, "optimizer")
            self._make_rates_symbolic(optimizer, "optimizer")
        missing = [
            p for g in optimizer.param_groups for p in g["params"] if p.grad is not None and p not in optimizer.state
        ]
        if missing:
            with self.recorder.paused(*self.modes):
                if torch_adapter.init_optimizer_state(optimizer):
                    self.initialized += [(optimizer, p) for p in missing]
                    self.state.extend_optimizer_state()

    def _after_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.recorder.optimizing = False

    # ---- from the record to the captured step

    def _finish(self, result: Any) -> CapturedStep:
        recorder = self.recorder
        outputs: list[Output] = []
        nodes: list[Any] = []

        def keep(kind: Callable[[int], Output], value: Any) -> int:
            outputs.append(kind(len(nodes)))
            nodes.append(value)
            return len(nodes) - 1

        with torch_adapter.only_mode(self.fake_mode):
            self.hooks.check()
            self.state.notice_new_hooks()
            effects = self._effects(keep)
            kept = lambda value: keep(Return, value)
            returned = Template.of(result, recorder, kept, "the step's return value", homes=self.state.homes)
            self._put_back()
            self._updates(outputs, nodes)
        self.streams.end()
        recorder.graph.output(tuple(nodes))
        self._leave_autograd()
        drop_dead(recorder.graph)
        inputs, places = self._inputs(outputs)
        groups = canonical_groups(recorder.graph)
        graph = StepGraph(recorder.graph, inputs, outputs, groups).check()
        return CapturedStep(
            graph,
            places,
            effects,
            returned,
            self.arguments,
            self.state,
            recorder.recorded,
            recorder.passed,
            self.hooks,
            recorder.symbols.shape_env,
            self.sizes,
            [(torch_adapter.symbol_of(rate), place) for _, rate, _, place in self.rates],
            self.specialised,
        )

    def _leave_autograd(self) -> None:
        """Cut the graph off from what autograd saved: in circles through autograd's own nodes, which Python's garbage
        collector does not see, fakes would keep the hooks of the step, and with them the user's model."""

        def cut(val: Any) -> Any:
            if not isinstance(val, torch.Tensor):
                return val
            self.recorder.forget(val)
            return torch_adapter.detached_fake(val) if val.requires_grad else val

        with torch_adapter.only_mode(self.fake_mode):
            for node in self.recorder.graph.nodes:
                if "val" in node.meta:
                    node.meta["val"] = map_operands(node.meta["val"], cut)

    def _effects(self, keep: Callable[[Callable[[int], Output], Any], int]) -> list[Effect]:
        effects = []
        for group, symbol, _, place in self.rates:
            if group["lr"] is not symbol:
                raise PythonStateChanged(place.path, "a number", "step the learning-rate scheduler outside the step")
            group["lr"] = place.container.before["lr"]
        for container, key, old, new in [*self.state.changes(), *self.arguments.changes()]:
            path = container.label(key)
            if new is MISSING:
                effects.append(Effect(container, key, None))
                continue
            if isinstance(new, (int, float)) and not isinstance(new, bool):
                remedy = "keep it in a tensor, count outside the step, or in a function marked @weft.opaque"
                raise PythonStateChanged(path, f"{old!r} -> {new!r}", remedy)
            if container.grew():
                remedy = "append in a function marked @weft.opaque, or keep what is needed in a place of its own"
                change = f"{len(container.before)} -> {len(container.obj)} entries"
                raise PythonStateChanged(container.path, change, remedy)
            kept = lambda value, path=path: keep(lambda _: Create(path), value)
            template = Template.of(new, self.recorder, kept, path, homes=self.state.homes)
            effects.append(Effect(container, key, template))
        return effects

    def _updates(self, outputs: list[Output], nodes: list[Any]) -> None:
        for node, tensor in self.recorder.placeholders:
            value = self.recorder.current(tensor)
            if value is not node:
                outputs.append(Update(node.name))
                nodes.append(value)

    def _inputs(self, outputs: list[Output]) -> tuple[list[Input], list[Place]]:
        """Entries for the placeholders that are used, with the names a reader expects; the others are erased."""
        known = dict(self.recorder.placeholders)
        rates = {node: place for _, _, node, place in self.rates}
        updated = {out.input for out in outputs if isinstance(out, Update)}
        inputs, places = [], []
        for node in [n for n in self.recorder.graph.nodes if n.op == "placeholder"]:
            if not node.users and node.name not in updated:
                self.recorder.graph.erase_node(node)
                continue
            place = rates.get(node) or self._place(known[node])
            inputs.append(Input(node.name, place.role, place.path, _sharding(place)))
            places.append(place)
        return inputs, places

    def _input_name(self, tensor: torch.Tensor) -> str:
        found = self._known_place(tensor)
        return "constant" if found is None else readable_name(found.path)

    def _known_place(self, tensor: torch.Tensor) -> Place | None:
        key = identity(tensor)
        return self.arguments.places.get(key) or self.state.places.get(key)

    def _place(self, tensor: torch.Tensor) -> Place:
        found = self._known_place(tensor)
        if found is None:
            log.debug("a tensor of shape %s is not reachable from the step: taken as a constant", tuple(tensor.shape))
            found = Place(Container([tensor], "constant"), 0, "constant", Role.BUFFER)
        return found


def _sharding(place: Place) -> str:
    outer = place.outer()
    return torch_adapter.describe_dtensor(outer) if place.inner else ""
