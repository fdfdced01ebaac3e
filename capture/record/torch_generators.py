"""``torch.Generator`` objects of the user's inside a step.

Draws are operations of torch, which take the user's generator as an operand and draw from it in every call. The methods
that read or set its state are written in C, where nothing sees them. While a step is captured, a stand-in is in the
generator's place, whose methods record nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch

from weft import torch_adapter
from weft.capture.record.held_references import StandIn
from weft.capture.record.host_arrays import python_number
from weft.capture.record.host_draws import HostDraws
from weft.capture.record.recorder import OpRecorder
from weft.capture.user_code import user_line
from weft.errors import UncapturableDraw

_GENERATOR: type[Any] = type(torch.default_generator)  # torch.Generator is another class inside a fake world
_REFUSED = ("clone_state", "get_offset", "graphsafe_get_state", "graphsafe_set_state", "set_offset")
_MADE = "what it draws would go on from call to call"
_MAKE_OUTSIDE = "make it before the step, and seed it there or in the step with generator.manual_seed(...)"


class GeneratorCall:
    """The target of a node that calls a method of a generator of the user's."""

    def __init__(self, generator: Any, method: str) -> None:
        self._method = getattr(generator, method)
        self.__name__ = self.__qualname__ = f"generator_{method}"
        self.__module__ = __name__

    def __call__(self, *args: Any) -> Any:
        result = self._method(*args)
        return None if isinstance(result, _GENERATOR) else result


class TorchGenerators:
    """Stand-ins for the generators that a step reaches, for one capture."""

    def __init__(self, recorder: OpRecorder, draws: HostDraws) -> None:
        self.recorder = recorder
        self.draws = draws
        self._stand_ins: dict[int, _StandInGenerator] = {}

    def stand_in(self, value: Any) -> Any | None:
        """What stands in for a generator; None for all else and for torch's default generators."""
        if not isinstance(value, _GENERATOR) or isinstance(value, StandIn) or value is torch.default_generator:
            return None
        if id(value) not in self._stand_ins:
            self._stand_ins[id(value)] = _StandInGenerator(value, self)
        return self._stand_ins[id(value)]

    def replacements(self) -> Iterator[tuple[Any, str, Any]]:
        """(owner, name, replacement): the class, of which the step makes no generators."""
        yield torch, "Generator", _refusing(torch.Generator, self.draws.intercepts)

    def call(self, generator: Any, method: str, *args: Any, val: Any = None) -> Any:
        """Record a call of a method; ``val`` is its fake result."""
        self.recorder.effect(GeneratorCall(generator, method), *args, val=val)
        return val


class _StandInGenerator(StandIn, _GENERATOR):
    """Stands in for ``original``; methods whose names start with an underscore in torch have no place here."""

    def __new__(cls, original: Any, owner: TorchGenerators) -> _StandInGenerator:
        return super().__new__(cls, original.device)

    def __init__(self, original: Any, owner: TorchGenerators) -> None:
        super().__init__(original)
        self._owner = owner

    def manual_seed(self, seed: Any) -> _StandInGenerator:
        self._owner.call(self.weft_original, "manual_seed", python_number(seed))
        return self

    def seed(self) -> Any:
        return self._number("seed")

    def initial_seed(self) -> Any:
        return self._number("initial_seed")

    def get_state(self) -> torch.Tensor:
        with torch_adapter.only_mode():
            size = self.weft_original.get_state().shape
        with torch_adapter.only_mode(self._owner.recorder.fake_mode):
            state = torch.empty(size, dtype=torch.uint8)
        return self._owner.call(self.weft_original, "get_state", val=state)

    def set_state(self, state: torch.Tensor) -> _StandInGenerator:
        self._owner.call(self.weft_original, "set_state", state)
        return self

    def _number(self, method: str) -> Any:
        draws = self._owner.draws
        return draws.record(GeneratorCall(self.weft_original, method), (), {}, draws.fresh(int, f"Generator.{method}"))

    def __getattribute__(self, name: str) -> Any:
        if name in _REFUSED:
            remedy = "read and set its state with get_state and set_state"
            raise UncapturableDraw(f"Generator.{name}", user_line(), "a graph has no place for it", remedy)
        return super().__getattribute__(name)


def _refusing(original: type[Any], intercepts: Callable[[], bool]) -> type[Any]:
    """A class that stands for ``torch.Generator`` in checks of types, and that makes none in a step."""

    class Kind(type):
        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, original)

        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            return _refuse() if intercepts() else original(*args, **kwargs)

    return Kind("Generator", (), {})


def _refuse() -> NoReturn:
    raise UncapturableDraw("torch.Generator", user_line(), f"the step makes a generator, and {_MADE}", _MAKE_OUTSIDE)
