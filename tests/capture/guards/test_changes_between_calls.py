"""Whatever a program changes between two calls, the next call computes what eager computes, by compiled checks and
by torch's."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import weft

scale = 1.0  # a global that the step reads


class Block(nn.Module):
    """Depends on an attribute, a class attribute, a list and a dictionary."""

    shift = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)
        self.register_buffer("offset", torch.zeros(1))
        self.gain = 1.0
        self.weights = [1.0, 2.0]
        self.options = {"bias": 0.0, "deep": {"flag": False}}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.activation(self.norm(self.linear(x)) * self.gain + self.shift + self.offset)
        if hasattr(self, "extra"):
            x = x + self.extra
        if self.options["deep"]["flag"]:
            x = x * 3.0
        return x * self.weights[0] + self.options["bias"]

    def activation(self, x: torch.Tensor) -> torch.Tensor:
        return x.relu()


class Trainer:
    """A model, its optimizer and its step."""

    def __init__(self) -> None:
        self.block = type("Block", (Block,), {})  # whose attributes one trainer changes for itself
        torch.manual_seed(0)
        self.model = nn.Sequential(self.block(), nn.Sequential(self.block(), nn.Linear(4, 4)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1, weight_decay=0.1)

    def step(self, x: torch.Tensor) -> torch.Tensor:
        loss = (self.model(x.to(next(self.model.parameters()).dtype)) * scale).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


def _inner(trainer: Trainer) -> Any:
    return trainer.model[1][0]


def _parameter_replaced(trainer: Trainer) -> None:
    linear = _inner(trainer).linear
    linear.weight = nn.Parameter(linear.weight.detach() * 2)


def _parameter_replaced_in_the_dictionary(trainer: Trainer) -> None:
    linear = _inner(trainer).linear
    linear._parameters["weight"] = nn.Parameter(linear.weight.detach() * 2)


def _data_at_another_address(trainer: Trainer) -> None:
    for p in trainer.model.parameters():
        p.data = p.data * 0.5


def _data_of_one_at_another_address(trainer: Trainer) -> None:
    weight = _inner(trainer).linear.weight
    weight.data = weight.data.clone() * 0.5


def _data_of_another_dtype(trainer: Trainer) -> None:
    trainer.model.double()
    for state in trainer.optimizer.state.values():
        state.update({key: value.double() for key, value in state.items() if key != "step"})


def _data_of_another_shape(trainer: Trainer) -> None:
    _inner(trainer).offset.data = torch.ones(4)


def _data_transposed(trainer: Trainer) -> None:
    weight = trainer.model[1][1].weight
    weight.data = weight.data.t()


def _two_parameters_in_one_memory(trainer: Trainer) -> None:
    first, second = trainer.model[0].linear.weight, _inner(trainer).linear.weight
    second.data = first.data


def _exchanged_tensors(trainer: Trainer) -> None:
    weight = _inner(trainer).linear.weight
    torch.utils.swap_tensors(weight, nn.Parameter(weight.detach() * 2))


def _frozen(trainer: Trainer) -> None:
    trainer.model[0].linear.weight.requires_grad_(False)


def _module_replaced(trainer: Trainer) -> None:
    trainer.model[1][0].norm = nn.Identity()


def _attribute_added(trainer: Trainer) -> None:
    _inner(trainer).extra = 0.25


def _attribute_changed(trainer: Trainer) -> None:
    _inner(trainer).gain = 0.5


def _attribute_changed_in_the_dictionary(trainer: Trainer) -> None:
    vars(_inner(trainer))["gain"] = 0.5


def _attribute_deleted(trainer: Trainer) -> None:
    del _inner(trainer).__dict__["gain"]
    trainer.block.gain = 0.75


def _list_entry(trainer: Trainer) -> None:
    _inner(trainer).weights[0] = 3.0


def _nested_dictionary_entry(trainer: Trainer) -> None:
    _inner(trainer).options["deep"]["flag"] = True


def _weight_decay(trainer: Trainer) -> None:
    trainer.optimizer.param_groups[0]["weight_decay"] = 0.5


def _parameter_taken_from_its_group(trainer: Trainer) -> None:
    trainer.optimizer.param_groups[0]["params"].pop(0)


def _parameters_in_another_order(trainer: Trainer) -> None:
    trainer.optimizer.param_groups[0]["params"].reverse()


def _group_added(trainer: Trainer) -> None:
    taken = trainer.optimizer.param_groups[0]["params"].pop()
    trainer.optimizer.add_param_group({"params": [taken], "lr": 0.01})


def _state_replaced(trainer: Trainer) -> None:
    for state in trainer.optimizer.state.values():
        state["exp_avg"] = state["exp_avg"] * 2


def _gradient_left(trainer: Trainer) -> None:
    weight = _inner(trainer).linear.weight
    weight.grad = torch.ones_like(weight)


def _tensor_hook(trainer: Trainer) -> None:
    _inner(trainer).linear.weight.register_hook(lambda grad: grad * 2)


def _accumulation_hook(trainer: Trainer) -> None:
    _inner(trainer).linear.weight.register_post_accumulate_grad_hook(_double)


def _double(p: torch.Tensor) -> None:
    assert p.grad is not None
    p.grad.mul_(2)


def _module_hook(trainer: Trainer) -> None:
    _inner(trainer).register_forward_hook(lambda module, args, output: output * 2)


def _optimizer_hook(trainer: Trainer) -> None:
    trainer.optimizer.register_step_pre_hook(lambda optimizer, args, kwargs: _halve(optimizer))


def _halve(optimizer: torch.optim.Optimizer) -> None:
    for p in optimizer.param_groups[0]["params"]:
        if p.grad is not None:
            p.grad.mul_(0.5)


def _class_attribute(trainer: Trainer) -> None:
    trainer.block.shift = 0.5


def _method_of_the_class(trainer: Trainer) -> None:
    trainer.block.activation = lambda self, x: x.tanh()


def _method_of_the_object(trainer: Trainer) -> None:
    _inner(trainer).activation = torch.tanh


def _another_class(trainer: Trainer) -> None:
    _inner(trainer).__class__ = type("Other", (trainer.block,), {"activation": lambda self, x: x.sigmoid()})


def _another_dictionary(trainer: Trainer) -> None:
    inner = _inner(trainer)
    inner.__dict__ = {**vars(inner), "gain": 0.5}


CHANGES = [
    *(_parameter_replaced, _parameter_replaced_in_the_dictionary, _data_at_another_address),
    *(_data_of_one_at_another_address, _data_of_another_dtype, _data_of_another_shape, _data_transposed),
    *(_two_parameters_in_one_memory, _exchanged_tensors, _frozen, _module_replaced, _attribute_added),
    *(_attribute_changed, _attribute_changed_in_the_dictionary, _attribute_deleted, _list_entry),
    *(_nested_dictionary_entry, _weight_decay, _parameter_taken_from_its_group, _parameters_in_another_order),
    *(_group_added, _state_replaced, _gradient_left, _tensor_hook, _accumulation_hook, _module_hook, _optimizer_hook),
    *(_class_attribute, _method_of_the_class, _method_of_the_object, _another_class, _another_dictionary),
]


def _run(change: Callable[[Trainer], None], wrap: Callable[[Any], Any], in_thread: bool) -> list[torch.Tensor]:
    trainer = Trainer()
    step, x = wrap(trainer.step), torch.linspace(-1, 1, 12).view(3, 4)
    results = [step(x) for _ in range(4)]
    if in_thread:
        thread = threading.Thread(target=change, args=(trainer,))
        thread.start()
        thread.join()
    else:
        change(trainer)
    results += [step(x) for _ in range(3)]
    return [*results, *(p.detach().clone() for p in trainer.model.parameters())]


@pytest.mark.parametrize("in_thread", [False, True], ids=["", "in a thread"])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__.strip("_"))
def test_a_change_between_calls_is_followed(
    guard_checks: str, change: Callable[[Trainer], None], in_thread: bool
) -> None:
    expected = _run(change, lambda step: step, in_thread)
    found = _run(change, weft.compile, in_thread)
    for value, wanted in zip(found, expected, strict=True):
        assert value.dtype == wanted.dtype
        torch.testing.assert_close(value, wanted, rtol=1e-5, atol=1e-6)


def test_a_changed_global_is_followed(guard_checks: str, monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for wrap in (lambda step: step, weft.compile):
        monkeypatch.setitem(globals(), "scale", 1.0)
        results.append(_run(lambda trainer: monkeypatch.setitem(globals(), "scale", 2.0), wrap, in_thread=False))
    for value, wanted in zip(*results, strict=True):
        torch.testing.assert_close(value, wanted, rtol=1e-5, atol=1e-6)


def test_steps_that_nothing_changed_between_are_captured_once(guard_checks: str) -> None:
    trainer = Trainer()
    step = weft.compile(trainer.step)
    for _ in range(6):
        step(torch.ones(3, 4))
    assert len(step.captures) == 1
    for _ in range(3):  # the same dictionary is changed before each call, to what does not matter
        trainer.optimizer.param_groups[0]["lr"] *= 0.5
        step(torch.ones(3, 4))
    assert len(step.captures) == 1


def test_a_method_that_is_set_anew_and_a_cache_of_pythons_own_are_no_changes() -> None:
    """As Lightning sets its hooks before each batch, and fills the cache of ``re``."""

    class Loop:
        def __init__(self) -> None:
            self.factor = 2.0
            self.hook: Any = self.scaled

        def scaled(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.factor if re.match(r"[a-z]+", "name") else x

        def shifted(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.factor

    loop, other = Loop(), Loop()
    step = weft.compile(lambda x: loop.hook(x))
    for at in range(4):
        loop.hook = loop.scaled
        re.compile(f"pattern {at}")
        assert step(torch.ones(())) == 2
    assert len(step.captures) == 1
    loop.hook = loop.shifted
    assert step(torch.ones(())) == 3
    other.factor = 5.0
    loop.hook = other.scaled
    assert step(torch.ones(())) == 5
    assert len(step.captures) == 3
