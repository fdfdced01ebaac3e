"""Which dictionaries were changed, against copies of them."""

from __future__ import annotations

import random
from collections import OrderedDict, defaultdict
from typing import Any

import torch
from torch import nn

import weft
from weft.capture.guards.dict_watch import DictWatch


def _change(found: dict[Any, Any], rng: random.Random) -> None:
    key = rng.choice([*found, "new"])
    rng.choice(
        [lambda: found.__setitem__(key, object()), lambda: found.pop(key, None), lambda: found.update(a=object())]
    )()


def test_exactly_the_changed_dictionaries_are_reported() -> None:
    import torch._dynamo.guards  # noqa: F401 - loads the checks in C, as torch's optimizers do

    rng = random.Random(0)
    kinds = (dict, OrderedDict, lambda entries: defaultdict(list, entries))
    dicts = [kinds[at % 3]({name: object() for name in "abc"}) for at in range(600)]
    watch = DictWatch(dicts)
    assert len(watch.changes()) == 600
    watch.accept(watch.changes())
    for _ in range(60):
        before = [list(each.items()) for each in dicts]
        for at in rng.choices(range(600), k=rng.choice((0, 0, 1, 5))):
            _change(dicts[at], rng)
        truly = {at for at, each in enumerate(dicts) if list(each.items()) != before[at]}
        assert truly <= watch.changes().keys()
        assert watch.changes() == watch.changes()  # until they are accepted
        watch.accept(watch.changes())
        assert not watch.changes()
    assert sum(len(numbers) for numbers, _ in watch._groups) > 400  # those that never changed, by few calls


def test_what_changes_while_groups_are_made_is_not_accepted() -> None:
    import torch._dynamo.guards  # noqa: F401

    dicts: list[dict[str, int]] = [{"a": 0} for _ in range(10)]
    watch = DictWatch(dicts)
    watch.accept(watch.changes())
    nothing = watch.changes()
    dicts[3]["a"] = 1  # another thread, between the look and the groups
    watch.accept(nothing)
    assert watch.changes().keys() == {3}


class Halves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.weight).sum()


def test_hooks_that_come_with_the_memory_of_another_tensor_run() -> None:
    """swap_tensors gives a leaf the hooks of another tensor, which were registered long before."""
    results = []
    for compiled in (False, True):
        model, other = Halves(), nn.Parameter(torch.full((4,), 3.0))
        other.register_hook(lambda grad: grad * 10)

        def step(x: torch.Tensor, model: Halves = model) -> torch.Tensor:
            model(x).backward()
            grad = model.weight.grad
            model.weight.grad = None
            assert grad is not None
            return grad

        run: Any = weft.compile(step) if compiled else step
        for _ in range(4):
            run(torch.ones(4))
        torch.utils.swap_tensors(model.weight, other)
        results.append(run(torch.ones(4)))
    assert torch.equal(results[0], torch.full((4,), 10.0))
    assert torch.equal(results[0], results[1])


class Holder:
    """An object whose attributes Python may keep in the object itself."""

    def __init__(self) -> None:
        self.value = 0


def test_assignments_to_attributes_are_changes() -> None:
    """Python 3.13.0 has to be helped: its dictionaries of attributes tell nobody of assignments."""
    holder, module = Holder(), nn.Linear(1, 1)
    watch = DictWatch([vars(holder), vars(module)])
    watch.accept(watch.changes())
    assert vars(holder) == {"value": 0}
    for name, value in (("value", 1), ("other", 1), ("value", 2)):
        setattr(holder, name, value)
        assert list(watch.changes()) == [0]
        watch.accept(watch.changes())
    module.eval()
    assert list(watch.changes()) == [1]
