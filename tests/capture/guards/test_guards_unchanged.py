"""The fast check of the guards notices every change of the state that a captured step depends on.

Each test takes a captured step apart by its own data: every entry of every container, every leaf, every tensor.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from types import CellType, CodeType
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import weft
from harness import run_ranks
from weft import torch_adapter
from weft.capture.guards import container_guard
from weft.capture.state.containers import MISSING, Container

factor = 2.0  # a global that the step reads


class Hints:
    """Has no attributes at first."""

    shift = 0.0


class Trainer:
    """A step that hangs on state of every kind."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.1), nn.Linear(6, 4, bias=False))
        self.model[0].bias.register_hook(torch.clone)
        self.model[3].weight.register_post_accumulate_grad_hook(lambda p: None)
        self.model[2].register_forward_hook(lambda module, args, output: output * 1.0)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1, fused=True)
        self.average = torch.zeros(4)
        self.spare: Any = None
        self.switch = True
        self.name = "plain"
        self.weights = [1.0, 1, torch.ones(4)]
        self.recent: deque[float] = deque([0.5, 0.25])
        self.none: OrderedDict[str, float] = OrderedDict()
        self.hints = Hints()
        self.options = {"scale": 1.0, "deep": {"flag": False}, "shape": (2, 3), "none": self.none}
        self.ordered = OrderedDict(first=1.0, second=0.5)
        self.model[1].bias.requires_grad_(False)
        shift = torch.full((4,), 0.5)

        def train(x: torch.Tensor, y: torch.Tensor, by: float) -> torch.Tensor:
            out = self.model(x) * self.weights[0] * self.weights[1] + self.weights[2] + shift
            if self.switch and self.spare is None and self.name == "plain" and not self.options["deep"]["flag"]:
                out = out * self.options["scale"] * factor * by * sum(self.recent) + self.hints.shift
            out = out * self.ordered["first"]
            self.average = self.average * 0.9 + out.detach().mean(0) * 0.1
            loss = (out - y).square().mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            return loss

        self.step = weft.compile(train)


X, Y = torch.ones(3, 4), torch.zeros(3, 4)


class Probe:
    """The guards of the form of a step that serves a call, and the call."""

    def __init__(self, step: Any, *args: Any) -> None:
        for _ in range(4):  # gradients come to exist, and optimizer state
            step(*args)
        self.captures = len(step.captures)
        self.captured = step.entries[0].captured
        self.guards = step.entries[0].guards
        self.call = torch_adapter.flatten((args, {}))
        self.changes = 0
        assert self.unchanged()

    def unchanged(self) -> bool:
        return self.guards.unchanged(*self.call)

    @property
    def containers(self) -> list[Container]:
        return [each for each in self.captured.state.containers if not each.frozen]

    def missed(self, what: str, change: Callable[[], Any], back: Callable[[], Any]) -> list[str]:
        """What is wrong with how a change is noticed."""
        self.changes += 1
        change()
        found = self.unchanged(), self.guards.failure(*self.call)
        back()
        wrong = [f"{what} was passed over"] if found[0] or found[1] is None else []
        self.guards.failure(*self.call)  # may have to look closely once: something is another object
        return wrong if self.unchanged() else [*wrong, f"{what} is not forgotten"]


def _others(value: Any) -> list[Any]:
    """Values that are not the same, most of all those that compare as equal."""
    if isinstance(value, torch.Tensor):
        leaf = value.requires_grad or isinstance(value, nn.Parameter)
        alike = [nn.Parameter(value.detach().clone())] if leaf else []
        return [None, value.detach().to(torch.float16), value.detach().unsqueeze(0), *alike]
    if isinstance(value, bool):
        return [not value, int(value), None]
    if isinstance(value, int):
        return [value + 1, float(value), str(value)]
    if isinstance(value, float):
        return [value + 0.5, torch.tensor(value), *([int(value)] if value == int(value) else [])]
    if isinstance(value, str):
        return [value + "x", value.encode()]
    if value is None:
        return [0, False, MISSING, torch.ones(())]
    if isinstance(value, (dict, list, deque)):
        return [copy.copy(value), type(value)()]
    if isinstance(value, tuple):
        return [(), (*value, 0)]
    if isinstance(value, CodeType):
        return [value.replace(co_name="another")]
    return [object(), None]


# Python takes no other types.
_OF_FUNCTIONS: dict[Any, list[Any]] = {"__defaults__": [(), (1,)], "__kwdefaults__": [{}, {"more": 1}]}


def _containers_missed(probe: Probe) -> list[str]:
    wrong = []
    for container in probe.containers:
        for key, value in container.entries().items():
            if key not in container.before or value is MISSING:
                continue
            for other in _OF_FUNCTIONS.get(key) or _others(value):
                if key in container.by_value and type(other) is type(value):
                    continue  # another value of an input
                if isinstance(container.obj, torch.Tensor) and not _may_be_gradient(container.obj, other):
                    continue
                what = f"{type(other).__name__} for {type(value).__name__} at {container.label(key)}"
                put = functools.partial(container.set, key)
                wrong += probe.missed(what, functools.partial(put, other), functools.partial(put, value))
            wrong += _removed_missed(probe, container, key, value)
        wrong += _added_missed(probe, container)
    return wrong


def _may_be_gradient(leaf: torch.Tensor, value: Any) -> bool:
    return value is None or (
        isinstance(value, torch.Tensor) and value.shape == leaf.shape and value.dtype == leaf.dtype
    )


def _removed_missed(probe: Probe, container: Container, key: Any, value: Any) -> list[str]:
    obj = container.obj
    if isinstance(obj, CellType):

        def remove() -> None:
            del obj.cell_contents

        return probe.missed(f"without {container.label(key)}", remove, lambda: container.set(key, value))
    if isinstance(obj, (list, deque)):
        return probe.missed(
            f"without {container.label(key)}", lambda: container.remove(key), lambda: obj.insert(key, value)
        )
    if isinstance(obj, dict):
        order = list(obj)

        def rename() -> None:
            container.remove(key)
            obj["another name"] = value

        def back() -> None:
            obj.pop("another name", None)
            obj[key] = value
            for each in order:  # which is guarded too
                obj[each] = obj.pop(each)

        return [
            *probe.missed(f"without {container.label(key)}", lambda: container.remove(key), back),
            *probe.missed(f"{container.label(key)} renamed", rename, back),
        ]
    return []


def _added_missed(probe: Probe, container: Container) -> list[str]:
    obj = container.obj
    if container.keys is not None or not isinstance(obj, (dict, list, deque)):
        return []
    if isinstance(obj, dict):
        return probe.missed(f"more in {container.path}", lambda: obj.update(more=None), lambda: obj.pop("more"))
    return probe.missed(f"more in {container.path}", lambda: obj.append(None), lambda: obj.pop())


def _leaves_missed(probe: Probe) -> list[str]:
    wrong = []
    for leaf, path in probe.captured.state.leaves:
        flag = leaf.requires_grad
        change, back = (functools.partial(leaf.requires_grad_, each) for each in (not flag, flag))
        wrong += probe.missed(f"{path}.requires_grad", change, back)
        if not flag:
            continue
        node = torch_adapter.accumulator(leaf)
        kinds = (leaf.register_hook, leaf.register_post_accumulate_grad_hook, node.register_hook, node.register_prehook)
        for register in kinds * 2:  # the second time torch has a dictionary of such hooks, an empty one
            handles: list[Any] = []
            wrong += probe.missed(
                f"{register.__qualname__} on {path}",
                lambda r=register, h=handles: h.append(r(lambda *_: None)),
                lambda h=handles: h.pop().remove(),
            )
    return wrong


def _tensors_missed(probe: Probe) -> list[str]:
    """Tensors that are the same objects over other memory."""
    wrong = []
    for place in probe.captured.places:
        value = place.get()
        if not isinstance(value, torch.Tensor):
            continue
        data = value.data
        wide = torch.zeros(*data.shape, 2, dtype=data.dtype).select(-1, 0)
        for what, other in {
            "dtype": data.to(torch.float16),
            "device": data.to("meta"),
            "shape": data.unsqueeze(0),
            "strides": wide if data.dim() else None,
        }.items():
            if other is None:
                continue

            def put(value: torch.Tensor = value, other: torch.Tensor = other) -> None:
                value.data = other

            def back(value: torch.Tensor = value, data: torch.Tensor = data) -> None:
                value.data = data

            with contextlib.suppress(RuntimeError):  # torch refuses it: nobody can do it
                put()
                back()
                wrong += probe.missed(f"another {what} of {place.path}", put, back)
    return wrong


def test_a_change_of_any_container_entry_is_noticed() -> None:
    trainer = Trainer()
    probe = Probe(trainer.step, X, Y, 3.0)
    kinds = {type(container.obj) for container in probe.containers if container.before}
    assert {dict, list, deque, CellType, nn.Parameter} <= kinds
    assert _containers_missed(probe) == []
    assert probe.changes > 3 * sum(len(container.before) for container in probe.containers)


def test_a_change_of_any_leaf_is_noticed() -> None:
    probe = Probe(Trainer().step, X, Y, 3.0)
    assert _leaves_missed(probe) == []
    trained = sum(leaf.requires_grad for leaf, _ in probe.captured.state.leaves)
    assert (trained, len(probe.captured.state.leaves)) == (4, 5)
    assert probe.changes == 9 * trained + 1


def test_a_change_of_any_tensor_is_noticed() -> None:
    probe = Probe(Trainer().step, X, Y, 3.0)
    assert _tensors_missed(probe) == []
    tensors = [place for place in probe.captured.places if isinstance(place.get(), torch.Tensor)]
    assert probe.changes > 2 * len(tensors)


def _rename(trainer: Trainer) -> None:
    for name in ["plain", "other"] * 100:  # Python stores attributes in another way once it has done so often
        trainer.name = name


def _set_global(value: float) -> None:
    global factor
    factor = value


# Ways to change a dictionary, and how to take it back.
DICTIONARY_CHANGES: dict[str, tuple[Callable[[Trainer], Any], Callable[[Trainer], Any]]] = {
    "attribute": (lambda t: setattr(t, "switch", False), lambda t: setattr(t, "switch", True)),
    "attribute, often": (_rename, lambda t: setattr(t, "name", "plain")),
    "vars": (lambda t: vars(t).update(name="other"), lambda t: vars(t).update(name="plain")),
    "empty": (lambda t: vars(t.hints).update(shift=1.0), lambda t: vars(t.hints).clear()),
    "global": (lambda _: _set_global(3.0), lambda _: _set_global(2.0)),
    "globals()": (lambda _: globals().update(factor=3.0), lambda _: globals().update(factor=2.0)),
    "item": (lambda t: t.options.__setitem__("scale", 2.0), lambda t: t.options.__setitem__("scale", 1.0)),
    "|=": (lambda t: t.options.__ior__({"scale": 2.0}), lambda t: t.options.__ior__({"scale": 1.0})),
    "setdefault": (lambda t: t.options.setdefault("more", 1), lambda t: t.options.pop("more")),
    "popitem": (lambda t: t.options.popitem(), lambda t: t.options.update(none=t.none)),
    "clear": (lambda t: t.options["deep"].clear(), lambda t: t.options["deep"].update(flag=False)),
    "order": (
        lambda t: t.options.update(scale=t.options.pop("scale")),
        lambda t: [t.options.update({key: t.options.pop(key)}) for key in ("deep", "shape", "none")],
    ),
    "order, ordered": (lambda t: t.ordered.move_to_end("first"), lambda t: t.ordered.move_to_end("second")),
    "item, ordered": (lambda t: dict.update(t.ordered, first=2.0), lambda t: dict.update(t.ordered, first=1.0)),
    "hook": (
        lambda t: t.model[0]._forward_hooks.update({-1: lambda *_: None}),
        lambda t: t.model[0]._forward_hooks.clear(),
    ),
    "training": (lambda t: t.model.eval(), lambda t: t.model.train()),
    "setting": (
        lambda t: t.optimizer.param_groups[0].update(weight_decay=1.0),
        lambda t: t.optimizer.param_groups[0].update(weight_decay=0.01),
    ),
}


@pytest.mark.parametrize("way", DICTIONARY_CHANGES)
def test_every_way_to_change_a_dictionary_is_noticed(way: str) -> None:
    trainer = Trainer()
    probe = Probe(trainer.step, X, Y, 3.0)
    change, back = DICTIONARY_CHANGES[way]
    for _ in range(2):
        assert probe.missed(way, functools.partial(change, trainer), functools.partial(back, trainer)) == []


def test_an_empty_dictionary_that_is_filled_without_a_new_version_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch has it from Python 3.12 on."""
    trainer = Trainer()
    version = torch_adapter.dict_version
    attributes = vars(trainer.hints)
    monkeypatch.setattr(torch_adapter, "dict_version", lambda each: 1 if each is attributes else version(each))
    probe = Probe(trainer.step, X, Y, 3.0)
    fill, back = functools.partial(attributes.update, shift=1.0), attributes.clear
    for _ in range(2):
        assert probe.missed("a filled dictionary", fill, back) == []


def test_entries_of_dictionaries_that_nobody_changed_are_not_read(
    guard_checks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Trainer()
    probe = Probe(trainer.step, X, Y, 3.0)
    read: list[str] = []
    matching = container_guard._DictGuard.matching

    def noting(guard: Any) -> Any:
        read.append(guard.container.path)
        return matching(guard)

    monkeypatch.setattr(container_guard._DictGuard, "matching", noting)
    assert probe.unchanged()
    assert read == []
    trainer.model[0].in_features = 4.0
    assert not probe.unchanged()
    trainer.model[0].in_features = 4
    assert probe.unchanged()
    assert read == ["self.model.0", "self.model.0", "self.hints"]  # after a change, empty ones are read too
    assert probe.unchanged()
    assert len(read) == 3


@pytest.mark.parametrize("in_list", [False, True])
def test_a_tensor_that_takes_the_place_of_another_is_compared_with_it(in_list: bool) -> None:
    trainer = Trainer()
    probe = Probe(trainer.step, X, Y, 3.0)

    def put(tensor: torch.Tensor) -> None:
        if in_list:
            trainer.weights[2] = tensor
        else:
            trainer.average = tensor

    before = trainer.weights[2] if in_list else trainer.average
    for what, other in {"strides": torch.zeros(8)[::2], "device": torch.zeros(4, device="meta")}.items():
        assert probe.missed(f"other {what}", functools.partial(put, other), functools.partial(put, before)) == []
    put(other := torch.ones(4))
    assert probe.unchanged()
    change, back = (functools.partial(setattr, other, "data", each) for each in (torch.zeros(8)[::2], other.data))
    assert probe.missed("other strides of the new tensor", change, back) == []


def test_tensors_replaced_at_every_step_need_no_full_check() -> None:
    """Gradients that are left behind, and what a step assigns: other objects at each call, that look the same."""
    trainer = Trainer()
    probe = Probe(trainer.step, X, Y, 3.0)
    before = trainer.average, trainer.model[0].weight.grad
    trainer.step(X, Y, 3.0)
    assert trainer.average is not before[0]
    assert trainer.model[0].weight.grad is not before[1]
    assert probe.unchanged()
    trainer.optimizer.param_groups[0]["lr"] = 0.01
    assert probe.unchanged()
    assert len(trainer.step.captures) == probe.captures


@contextlib.contextmanager
def _changed(setter: Callable[[Any], Any], value: Any, back: Any) -> Iterator[None]:
    setter(value)
    yield
    setter(back)


@pytest.mark.parametrize(
    "around",
    [
        torch.no_grad,
        torch.inference_mode,
        lambda: torch.autocast("cpu", torch.bfloat16),
        lambda: _changed(torch.set_default_dtype, torch.float64, torch.float32),
        lambda: _changed(torch.use_deterministic_algorithms, True, False),
        lambda: _changed(torch.set_float32_matmul_precision, "medium", torch.get_float32_matmul_precision()),
    ],
)
def test_changed_settings_of_torch_are_noticed(around: Callable[[], Any]) -> None:
    probe = Probe(Trainer().step, X, Y, 3.0)
    with around():
        assert not probe.unchanged()
    assert probe.unchanged()


@pytest.mark.parametrize(
    "args",
    [
        (X, Y),
        (X, Y, 3),
        (X, Y, 4.0),
        ([X], Y, 3.0),
        (X, X, 3.0),
        (X, Y.double(), 3.0),
        (X, Y[:1], 3.0),
        (X, Y[:, :1], 3.0),
        (X, torch.zeros(4, 3).t(), 3.0),
        (X, torch.zeros(3, 4, requires_grad=True), 3.0),
        (X, nn.Parameter(torch.zeros(3, 4)), 3.0),
        (X, Y.to("meta"), 3.0),
    ],
)
def test_changed_arguments_are_noticed(args: tuple[Any, ...]) -> None:
    probe = Probe(Trainer().step, X, Y, 3.0)
    assert probe.guards.unchanged(*torch_adapter.flatten(((X + 1, Y + 1, 3.0), {})))
    assert not probe.guards.unchanged(*torch_adapter.flatten((args, {})))


def test_violated_size_conditions_are_noticed() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        return x.sum(1) if x.shape[0] < 10 else x.sum(0)

    guards = Probe(weft.compile(step, dynamic=True), X).guards
    for x, same in {
        torch.ones(5, 7): True,
        torch.ones(5, 7).double(): False,
        torch.ones(7, 5).t(): False,
        torch.ones(1, 7): False,
        torch.ones(11, 7): False,
        torch.ones(5): False,
    }.items():
        assert guards.unchanged(*torch_adapter.flatten(((x,), {}))) is same


def test_a_form_that_alternates_with_another_is_found_quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = Trainer()
    for at in range(8):
        trainer.switch = at % 2 == 0
        trainer.step(X, Y, 3.0)
    captures = len(trainer.step.captures)
    for entry in trainer.step.entries:
        monkeypatch.setattr(entry.guards, "failure", None)
    for at in range(4):
        trainer.switch = at % 2 == 0
        trainer.step(X, Y, 3.0)
    assert len(trainer.step.captures) == captures


def _inner_missed(probe: Probe) -> list[str]:
    """Wrapper tensors that are the same objects around other tensors."""
    wrong = []
    for place in (each for each in probe.captured.places if each.inner):
        (name,) = place.inner
        outer, inner = place.outer(), place.get()
        put, back = (functools.partial(setattr, outer, name, each) for each in (inner.double(), inner))
        wrong += probe.missed(f"another tensor in {place.path}", put, back)
    return wrong


def _sharded(rank: int, world: int) -> tuple[int, list[str]]:
    """What is not noticed of a sharded step, whose parameters and states are the inner tensors of DTensors."""
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for layer in model:
        weft.fully_shard(layer, mesh=mesh)
    weft.fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    probe = Probe(weft.compile(step), torch.ones(2, 4))
    inner = sum(bool(place.inner) for place in probe.captured.places)
    return inner, _containers_missed(probe) + _leaves_missed(probe) + _tensors_missed(probe) + _inner_missed(probe)


def test_changes_of_a_sharded_step_are_noticed() -> None:
    ((inner, missed),) = run_ranks(_sharded, 1)
    assert inner == 4 * 3  # parameters and two states of each
    assert missed == []
