"""Each way to change what a trained model and its optimizer hold is noticed by the guards, compiled and in Python.

``tests/capture/guards/test_guards_unchanged.py`` takes entries one by one. Here a program changes them as programs do.
"""

from __future__ import annotations

import types
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import weft
from weft import torch_adapter


class Scale(nn.Module):
    """Multiplies by a parameter and by a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("running", torch.ones(4))
        self.by = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight * self.running * self.by


class Program:
    """A step of a small model, AdamW, a cell, a function with defaults, and where in its state the tests change it."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.0), Scale(), nn.Linear(4, 4))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1, fused=True)
        model, optimizer, factor = self.model, self.optimizer, 1.0

        def shifted(out: torch.Tensor, by: float = 0.5, *, again: float = 0.25) -> torch.Tensor:
            return out * factor + by + again

        def step(x: torch.Tensor) -> torch.Tensor:
            loss = shifted(model(x)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        self.function = shifted
        self.factor: Any = shifted.__closure__[0]
        self.step = weft.compile(step)
        self.x = torch.ones(2, 4)
        for _ in range(4):
            self.step(self.x)

    @property
    def first(self) -> nn.Linear:
        return self.model[0]

    @property
    def weight(self) -> nn.Parameter:
        return self.first.weight

    @property
    def state(self) -> Any:
        return self.optimizer.state

    @property
    def group(self) -> dict[str, Any]:
        return self.optimizer.param_groups[0]

    def holds(self) -> bool:
        """Whether the guards take the state for unchanged."""
        return self.step.entries[0].guards.unchanged(*torch_adapter.flatten(((self.x,), {})))


def _renamed(found: dict[Any, Any], key: Any, other: Any) -> None:
    """As many entries, with the same values, of which one has another key."""
    entries = [(other if each is key else each, value) for each, value in found.items()]
    found.clear()
    found.update(entries)


def _last_first(found: dict[Any, Any]) -> None:
    entries = list(found.items())
    found.clear()
    found.update([entries[-1], *entries[:-1]])


def _no_grad(change: Callable[[Program], Any]) -> Callable[[Program], Any]:
    with_grad = change

    def changed(program: Program) -> None:
        with torch.no_grad():
            with_grad(program)

    return changed


def _exchange_data(p: Program) -> None:
    first, last = p.model[0].weight, p.model[3].weight
    first.data, last.data = last.data, first.data


def _exchange_states(p: Program) -> None:
    one, other = p.state[p.model[0].weight], p.state[p.model[3].weight]
    one["exp_avg"], other["exp_avg"] = other["exp_avg"], one["exp_avg"]


def _freeze(p: Program) -> None:
    p.weight.requires_grad_(False)


class OtherScale(Scale):
    """Another class."""


CHANGES: dict[str, Callable[[Program], Any]] = {
    # parameters and buffers
    "another parameter": lambda p: setattr(p.first, "weight", nn.Parameter(p.weight.detach().clone())),
    "another parameter, written to _parameters": lambda p: p.first._parameters.update(weight=nn.Parameter(p.weight)),
    "parameters exchanged": lambda p: setattr(p.first, "weight", p.model[3].weight),
    "no bias": lambda p: setattr(p.first, "bias", None),
    "a new parameter": lambda p: p.first.register_parameter("more", nn.Parameter(torch.ones(1))),
    "a parameter of another name": lambda p: _renamed(p.first._parameters, "bias", "shift"),
    "parameters in another order": lambda p: _last_first(p.first._parameters),
    "data of another dtype": lambda p: setattr(p.weight, "data", p.weight.data.double()),
    "data of another shape": lambda p: setattr(p.weight, "data", torch.ones(4, 5)),
    "data with other strides": lambda p: setattr(p.weight, "data", p.weight.data.t()),
    "data transposed in place": _no_grad(lambda p: p.weight.t_()),
    "data that another parameter has": lambda p: setattr(p.weight, "data", p.model[3].weight.data),
    "data resized": lambda p: p.model[2].running.resize_(2, 2),
    "another buffer": lambda p: setattr(p.model[2], "running", torch.ones(4, dtype=torch.float64)),
    "a new buffer": lambda p: p.first.register_buffer("more", torch.ones(1)),
    "a buffer that requires grad": lambda p: p.model[2].running.requires_grad_(),
    "a frozen parameter": _freeze,
    "a class of a parameter": lambda p: setattr(p.weight, "__class__", nn.parameter.Buffer),
    "parameters swapped": lambda p: torch.utils.swap_tensors(p.weight, p.model[3].weight),
    "a gradient": lambda p: setattr(p.weight, "grad", torch.ones(4, 4)),
    "a gradient of the last one": lambda p: p.model[3].bias.sum().backward(),
    # the optimizer
    "a state replaced": lambda p: p.state.__setitem__(p.weight, dict(p.state[p.weight])),
    "a state removed": lambda p: p.state.pop(p.weight),
    "a state added": lambda p: p.state.__setitem__(nn.Parameter(torch.ones(1)), {}),
    "a state of another parameter": lambda p: _renamed(p.state, p.weight, nn.Parameter(torch.ones(4, 4))),
    "states in another order": lambda p: _last_first(p.state),
    "all states gone": lambda p: p.state.clear(),
    "another dictionary of states": lambda p: setattr(p.optimizer, "state", defaultdict(dict, p.state)),
    "an entry of a state of another dtype": lambda p: p.state[p.weight].update(exp_avg=torch.ones(4, 4).double()),
    "an entry of a state removed": lambda p: p.state[p.weight].pop("exp_avg"),
    "an entry of a state added": lambda p: p.state[p.weight].update(more=1.0),
    "an entry of a state renamed": lambda p: _renamed(p.state[p.weight], "exp_avg", "average"),
    "entries of a state in another order": lambda p: _last_first(p.state[p.weight]),
    "an entry of a state over other memory": lambda p: setattr(p.state[p.weight]["exp_avg"], "data", torch.ones(4)),
    "loaded states": lambda p: p.optimizer.load_state_dict(p.optimizer.state_dict()),
    "a setting": lambda p: p.group.update(weight_decay=0.5),
    "a setting removed": lambda p: p.group.pop("weight_decay"),
    "a setting renamed": lambda p: _renamed(p.group, "weight_decay", "decay"),
    "fewer parameters": lambda p: p.group["params"].pop(),
    "more parameters": lambda p: p.group["params"].append(nn.Parameter(torch.ones(1))),
    "parameters of a group in another order": lambda p: p.group["params"].reverse(),
    "another list of parameters": lambda p: p.group.update(params=list(p.group["params"])),
    "another group": lambda p: p.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]}),
    "another list of groups": lambda p: setattr(p.optimizer, "param_groups", list(p.optimizer.param_groups)),
    "a copy of a group": lambda p: p.optimizer.param_groups.__setitem__(0, dict(p.group)),
    # hooks
    "a gradient hook": lambda p: p.weight.register_hook(lambda grad: grad),
    "a hook after accumulation": lambda p: p.weight.register_post_accumulate_grad_hook(lambda leaf: None),
    "a hook on the accumulator": lambda p: p.node.register_hook(lambda *_: None),
    "a forward hook": lambda p: p.first.register_forward_hook(lambda *_: None),
    "a forward-pre hook": lambda p: p.first.register_forward_pre_hook(lambda *_: None),
    "a backward hook": lambda p: p.first.register_full_backward_hook(lambda *_: None),
    "a hook written to the dictionary": lambda p: p.first._forward_hooks.update({7: lambda *_: None}),
    "a hook set in the dictionary": lambda p: p.first._forward_hooks.__setitem__(7, lambda *_: None),
    "a step hook": lambda p: p.optimizer.register_step_post_hook(lambda *_: None),
    # modules, their attributes and their classes
    "eval": lambda p: p.model.eval(),
    "eval of one": lambda p: p.model[1].eval(),
    "another attribute": lambda p: setattr(p.model[2], "by", 2.0),
    "an attribute of another type": lambda p: setattr(p.model[2], "by", 1),
    "an attribute set by vars": lambda p: vars(p.model[2]).update(by=2.0),
    "an attribute removed": lambda p: delattr(p.model[2], "by"),
    "another __dict__": lambda p: setattr(p.model[2], "__dict__", dict(vars(p.model[2]))),
    "another __dict__ of the optimizer": lambda p: setattr(p.optimizer, "__dict__", dict(vars(p.optimizer))),
    "another dictionary of parameters": lambda p: setattr(p.first, "_parameters", dict(p.first._parameters)),
    "another dictionary of hooks": lambda p: setattr(p.first, "_forward_hooks", OrderedDict({7: lambda *_: None})),
    "another class": lambda p: setattr(p.model[2], "__class__", OtherScale),
    "a forward of its own": lambda p: setattr(p.model[2], "forward", lambda x: x),
    "another module": lambda p: p.model.__setitem__(2, Scale()),
    "one module more": lambda p: p.model.append(nn.Identity()),
    "one module less": lambda p: p.model.pop(3),
    "modules in another order": lambda p: _last_first(p.model._modules),
    # functions and what they close over
    "the contents of a cell": lambda p: setattr(p.factor, "cell_contents", 2.0),
    "an empty cell": lambda p: delattr(p.factor, "cell_contents"),
    "defaults": lambda p: setattr(p.function, "__defaults__", (0.25,)),
    "no defaults": lambda p: setattr(p.function, "__defaults__", None),
    "keyword defaults": lambda p: setattr(p.function, "__kwdefaults__", {"again": 0.5}),
    "code": lambda p: setattr(p.function, "__code__", p.function.__code__.replace(co_name="other")),
}


@pytest.mark.parametrize("change", CHANGES)
def test_each_way_to_change_state_is_noticed(guard_checks: str, change: str) -> None:
    program: Any = Program()
    program.node = torch_adapter.accumulator(program.weight)
    assert program.holds()
    assert bool(program.step.entries[0].guards._steady._joined) == (guard_checks == "joined")
    CHANGES[change](program)
    assert not program.holds()


def test_exchanges_between_tensors_that_look_alike_are_looked_at(guard_checks: str) -> None:
    """The graph may serve them: the program runs on with the same numbers as eager."""
    results = []
    for compiled in (True, False):
        program = Program()
        run = program.step if compiled else program.step.step
        found = []
        for change in (_exchange_data, _exchange_states):
            change(program)
            found += [run(program.x).detach().clone() for _ in range(2)]
        results.append([*found, *(each.detach().clone() for each in program.model.parameters())])
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


def test_values_that_are_no_part_of_the_graph_change_nothing(guard_checks: str) -> None:
    program = Program()
    with torch.no_grad():
        program.weight.add_(1.0)
        program.state[program.weight]["exp_avg"].zero_()
    program.group["lr"] = 0.25
    assert program.holds()
    assert isinstance(program.function, types.FunctionType)
    program.factor.cell_contents = program.factor.cell_contents
    assert program.holds()
