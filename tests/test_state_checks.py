"""Checks of many objects at once see each change, compiled and through torch; what is the same passes."""

from __future__ import annotations

import contextlib
import importlib
import subprocess
import sys
import tempfile
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from guard_library import compile_checks, compiled_checks
from torch import nn

from weft import knobs, state_checks
from weft.capture.guards import guards


class Scaled(torch.Tensor):
    """A subclass."""


def _other_address(tensor: torch.Tensor) -> None:
    tensor.data = tensor.data.clone()


def _other_dtype(tensor: torch.Tensor) -> None:
    tensor.data = tensor.data.double()


def _same_memory_as_integers(tensor: torch.Tensor) -> None:
    with torch.no_grad():
        tensor.requires_grad_(False)
        tensor.data = tensor.data.view(torch.int32)


def _other_shape(tensor: torch.Tensor) -> None:
    tensor.data = torch.zeros(3, 4)


def _other_view_of_the_same(tensor: torch.Tensor) -> None:
    tensor.data = tensor.data.view(6, 4)


def _transposed(tensor: torch.Tensor) -> None:
    tensor.data = tensor.data.view(6, 4).t()


def _part_of_the_same(tensor: torch.Tensor) -> None:
    tensor.data = tensor.data[1:]


def _as_negative(tensor: torch.Tensor) -> None:
    tensor.data = torch._neg_view(tensor.data)


def _requires_grad(tensor: torch.Tensor) -> None:
    tensor.requires_grad_(not tensor.requires_grad)


def _transposed_in_place(tensor: torch.Tensor) -> None:
    with torch.no_grad():
        tensor.t_()


def _resized(tensor: torch.Tensor) -> None:
    tensor.requires_grad_(False)
    tensor.resize_(2, 6)


def _resized_by_out(tensor: torch.Tensor) -> None:
    tensor.requires_grad_(False)
    tensor.resize_(0)
    torch.add(torch.ones(3, 3), 1.0, out=tensor)


def _set(tensor: torch.Tensor) -> None:
    tensor.requires_grad_(False)
    tensor.set_(torch.zeros(4, 6))


def _storage_resized(tensor: torch.Tensor) -> None:
    tensor.untyped_storage().resize_(1 << 20)


def _swapped(tensor: torch.Tensor) -> None:
    other = tensor.detach().clone().requires_grad_(tensor.requires_grad)
    if isinstance(tensor, nn.Parameter):
        other = nn.Parameter(other, tensor.requires_grad)
    torch.utils.swap_tensors(tensor, other)


def _of_another_class(tensor: torch.Tensor) -> None:
    tensor.__class__ = Scaled


TENSOR_CHANGES = [
    *(_other_address, _other_dtype, _same_memory_as_integers, _other_shape, _other_view_of_the_same, _transposed),
    *(_part_of_the_same, _as_negative, _requires_grad, _transposed_in_place, _resized, _resized_by_out, _set),
    *(_storage_resized, _swapped, _of_another_class),
]


def _tensors() -> list[torch.Tensor]:
    return [torch.ones(4, 6), nn.Parameter(torch.ones(4, 6)), torch.ones(4, 6).requires_grad_(), torch.ones(2, 4, 6)[1]]


@pytest.mark.parametrize("at", [0, 1, 2])
@pytest.mark.parametrize("change", TENSOR_CHANGES, ids=lambda change: change.__name__.strip("_"))
def test_a_change_of_a_tensor_is_seen(guard_checks: str, change: Callable[[torch.Tensor], None], at: int) -> None:
    tensors = _tensors()
    holds = state_checks.unchanged_tensors(tensors, tensors)
    assert holds()
    change(tensors[at])
    assert not holds()


@pytest.mark.parametrize("dims", range(8))
def test_sizes_and_strides_of_any_number_of_dimensions_are_compared(guard_checks: str, dims: int) -> None:
    """Torch keeps those of more than five dimensions elsewhere."""
    others = [torch.ones([2] * each) for each in range(8)]
    tensor = torch.zeros([3, 2, 3, 2, 2, 2, 2, 2][:dims])
    holds = state_checks.unchanged_tensors([*others, tensor], [tensor])
    assert holds()
    layouts = [tensor.data, tensor.data.unsqueeze(0)]
    for dim in range(dims):
        layouts += [tensor.data.narrow(dim, 0, 1), torch.zeros(*tensor.shape, 2).select(-1, 0)]
        for other in range(dim):
            tensor.transpose_(dim, other)
            assert not holds(), (dim, other)
            tensor.transpose_(dim, other)
            assert holds()
    for layout in layouts[1:]:
        tensor.data = layout
        assert not holds()
        tensor.data = layouts[0]
        assert holds()


@pytest.mark.parametrize("at", range(4))
def test_a_change_of_one_among_many_tensors_that_are_alike_is_seen(guard_checks: str, at: int) -> None:
    tensors = [nn.Parameter(torch.ones(4, 6)) for _ in range(4)]
    holds = state_checks.unchanged_tensors(tensors, tensors)
    for change in TENSOR_CHANGES:
        assert holds()
        change(tensors[at])
        assert not holds(), change.__name__
        tensors[at] = nn.Parameter(torch.ones(4, 6))
        holds = state_checks.unchanged_tensors(tensors, tensors)


def test_two_tensors_that_exchange_their_memory_are_seen(guard_checks: str) -> None:
    first, second = tensors = [nn.Parameter(torch.ones(4, 6)) for _ in range(2)]
    holds = state_checks.unchanged_tensors(tensors, tensors)
    first.data, second.data = second.data, first.data
    assert not holds()
    first.data, second.data = second.data, first.data
    assert holds()
    torch.utils.swap_tensors(first, second)
    assert not holds()


def test_other_values_in_tensors_are_no_change(guard_checks: str) -> None:
    tensors = _tensors()
    holds = state_checks.unchanged_tensors(tensors, tensors)
    with torch.no_grad():
        for tensor in tensors:
            tensor.add_(1.0)
    tensors[1].sum().backward()
    assert holds()


def test_tensors_without_memory_of_their_own_are_compared(guard_checks: str) -> None:
    class Wrapper(torch.Tensor):
        @staticmethod
        def __new__(cls, rows: int) -> Wrapper:
            return torch.Tensor._make_wrapper_subclass(cls, (rows, 2))

        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            raise NotImplementedError(func)

    plain = torch.ones(3)
    odd: list[torch.Tensor] = [torch.ones(3, device="meta"), torch.eye(3).to_sparse(), Wrapper(3)]
    for each in odd:
        holds = state_checks.unchanged_tensors([plain, each], [plain])
        assert holds()
        plain.data = plain.data.clone()
        assert not holds()


@pytest.mark.parametrize("count", [0, 1, 300])
def test_a_gradient_is_seen(guard_checks: str, count: int) -> None:
    leaves = [nn.Parameter(torch.ones(2)) for _ in range(count)]
    holds = state_checks.no_gradients(leaves)
    assert holds is not None
    assert holds()
    if leaves:
        leaves[-1].sum().backward()
        assert not holds()
        leaves[-1].grad = None
        assert holds()
        leaves[0].grad = torch.zeros(2)
        assert not holds()


class Holder:
    """Has attributes."""


def _popped(found: dict[str, Any]) -> None:
    found.pop("a")


def _set_default(found: dict[str, Any]) -> None:
    found.setdefault("new", 1)


DICT_CHANGES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "other value": lambda found: found.__setitem__("a", 2.5),
    "new key": lambda found: found.__setitem__("new", 1),
    "deleted": lambda found: found.__delitem__("a"),
    "popped": _popped,
    "last popped": lambda found: found.popitem(),
    "updated": lambda found: found.update(a=2.5),
    "default": _set_default,
    "merged": lambda found: found.__ior__({"a": 2.5}),
    "cleared": lambda found: found.clear(),
}


def _dicts() -> list[dict[str, Any]]:
    holder = Holder()
    holder.a, holder.b = 1.5, 2
    return [{"a": 1.5, "b": 2}, OrderedDict(a=1.5, b=2), {str(at): at for at in range(100)} | {"a": 1.5}, vars(holder)]


@pytest.mark.parametrize("at", [0, 1, 2, 3])
@pytest.mark.parametrize("change", DICT_CHANGES)
def test_a_change_of_a_dictionary_is_seen(guard_checks: str, change: str, at: int) -> None:
    dicts = _dicts()
    holds, others_hold = (
        state_checks.unchanged_dicts(group) for group in (dicts, [each for each in dicts if each is not dicts[at]])
    )
    assert holds is not None
    assert others_hold is not None
    assert holds()
    assert others_hold()
    list(dicts[at].items()), dicts[at].get("missing"), dicts[at].copy()
    assert holds()
    DICT_CHANGES[change](dicts[at])
    assert not holds()
    assert others_hold()


def test_an_assigned_attribute_is_seen_by_each_check_that_there_is(guard_checks: str) -> None:
    holder = Holder()
    holder.a = 1
    first, second = (state_checks.unchanged_dicts([vars(holder)]) for _ in range(2))
    assert first is not None
    assert second is not None
    del first  # the other one goes on
    assert second()
    holder.a = 2
    assert not second()
    third = state_checks.unchanged_dicts([vars(holder)])
    assert third is not None
    assert third()
    assert not second()


@pytest.mark.parametrize(
    ("made", "fill"),
    [
        (dict, lambda found: found.update(a=1)),
        (dict, lambda found: found.__setitem__("a", 1)),
        (OrderedDict, lambda found: found.update(a=1)),
        (list, lambda found: found.append(1)),
        (set, lambda found: found.add(1)),
        (deque, lambda found: found.append(1)),
    ],
)
def test_a_filled_container_is_seen(guard_checks: str, made: Callable[[], Any], fill: Callable[[Any], None]) -> None:
    containers = [{}, [], made(), set(), OrderedDict(), deque()]
    holds = state_checks.all_empty(containers)
    assert holds()
    fill(containers[2])
    assert not holds()
    containers[2].clear()
    assert holds()


class Other(nn.Linear):
    """Another class with the same layout."""


@pytest.mark.parametrize(
    "change",
    [
        lambda module: setattr(module, "__class__", Other),
        lambda module: setattr(module, "__dict__", dict(vars(module))),
    ],
)
def test_another_class_or_dictionary_of_attributes_is_seen(
    guard_checks: str, change: Callable[[nn.Module], None]
) -> None:
    modules: list[nn.Module] = [nn.Linear(2, 2), nn.Linear(2, 2)]
    holds = state_checks.same_attributes([(each, type(each), vars(each)) for each in modules])
    assert holds()
    modules[0].weight = nn.Parameter(torch.zeros(2, 2))
    assert holds()
    change(modules[1])
    assert not holds()


def _exchanged(found: list[Any]) -> None:
    found[0], found[1] = found[1], found[0]


@pytest.mark.parametrize("made", [list, deque])
@pytest.mark.parametrize(
    "change",
    [
        lambda found: found.append(1.5),
        lambda found: found.pop(),
        lambda found: found.clear(),
        lambda found: found.__setitem__(1, float("1.5")),
        _exchanged,
    ],
)
def test_other_items_of_a_list_are_seen(
    guard_checks: str, change: Callable[[Any], None], made: Callable[[Any], Any]
) -> None:
    values = [object(), 1.5, "text"]
    found, untouched = made(values), [1, 2]
    holds = state_checks.same_items([(untouched, (1, 2)), (found, tuple(values))])
    assert holds()
    change(found)
    assert not holds()


class Slotted:
    """Has a slot and attributes."""

    __slots__ = ("__dict__", "inside")

    def __init__(self, inside: Any) -> None:
        self.inside = self.attribute = inside


@pytest.mark.parametrize("name", ["inside", "attribute"])
def test_another_value_of_a_slot_or_attribute_is_seen(guard_checks: str, name: str) -> None:
    values = [object(), object()]
    objects = [Slotted(value) for value in values]
    holds = state_checks.same_slots([(obj, name, value) for obj, value in zip(objects, values, strict=True)])
    assert holds()
    setattr(objects[1], name, object())
    assert not holds()
    setattr(objects[1], name, values[1])
    assert holds()
    delattr(objects[0], name)
    assert not holds()


def _function() -> Any:
    value = 1.5

    def function(a: float = 0.5, *, b: float = 0.25) -> float:
        return value + a + b

    return function


FUNCTION_CHANGES: dict[str, Callable[[Any], Any]] = {
    "contents": lambda function: setattr(function.__closure__[0], "cell_contents", float("1.5")),
    "code": lambda function: setattr(function, "__code__", function.__code__.replace(co_name="other")),
    "defaults": lambda function: setattr(function, "__defaults__", (float("0.5"),)),
    "no defaults": lambda function: setattr(function, "__defaults__", None),
    "keyword defaults": lambda function: setattr(function, "__kwdefaults__", {"b": 0.25}),
    "no keyword defaults": lambda function: setattr(function, "__kwdefaults__", None),
}


@pytest.mark.parametrize("change", FUNCTION_CHANGES)
def test_a_change_of_a_function_or_a_cell_is_seen(guard_checks: str, change: str) -> None:
    names = ("__code__", "__defaults__", "__kwdefaults__")
    functions = [_function(), _function(), lambda: None]
    entries = [(each, name, getattr(each, name)) for each in functions for name in names]
    entries += [(each.__closure__[0], "cell_contents", 1.5) for each in functions[:2]]
    entries[-2:] = [(cell, name, cell.cell_contents) for cell, name, _ in entries[-2:]]
    holds = state_checks.same_slots(entries)
    assert holds()
    FUNCTION_CHANGES[change](functions[1])
    assert not holds()


def test_defaults_that_a_function_gets_and_loses_are_seen(guard_checks: str) -> None:
    function = lambda *args: None
    holds = state_checks.same_slots([(function, "__defaults__", None), (function, "__kwdefaults__", None)])
    assert holds()
    function.__kwdefaults__ = {}
    assert not holds()
    function.__kwdefaults__ = None
    assert holds()
    function.__defaults__ = ()
    assert not holds()
    del function.__defaults__
    assert holds()


@contextlib.contextmanager
def _other_dtype_by_default() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


SETTINGS: dict[str, Callable[[], Any]] = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu"),
    "autocast on GPUs": lambda: torch.autocast("cuda", torch.bfloat16),
    "no autocast": lambda: torch.autocast("cpu", enabled=False),
    "another dtype for autocast": lambda: torch.autocast("cpu", torch.float16, enabled=False),
    "autocast without a cache": lambda: torch.autocast("cpu", enabled=False, cache_enabled=False),
    "default dtype": _other_dtype_by_default,
}


@pytest.mark.parametrize("around", SETTINGS)
@pytest.mark.filterwarnings("ignore:.*CUDA is not available")
def test_other_settings_of_torch_are_seen(guard_checks: str, around: str) -> None:
    holds = state_checks.same_settings(guards._read_settings)
    assert holds()
    with SETTINGS[around]():
        assert not holds()
        within = state_checks.same_settings(guards._read_settings)
        assert within()
    assert holds()
    assert not within()


def test_settings_are_those_of_each_thread(guard_checks: str) -> None:
    holds = state_checks.same_settings(guards._read_settings)
    with torch.no_grad(), ThreadPoolExecutor(1) as pool:
        assert not holds()
        assert pool.submit(holds).result()


def test_a_changed_requires_grad_is_seen(guard_checks: str) -> None:
    leaves = [torch.ones(2), nn.Parameter(torch.ones(2))]
    holds = state_checks.require_grad([(leaf, leaf.requires_grad) for leaf in leaves])
    assert holds()
    for leaf in leaves:
        leaf.requires_grad_(not leaf.requires_grad)
        assert not holds()
        leaf.requires_grad_(not leaf.requires_grad)
        assert holds()


def test_objects_that_are_held_weakly_are_compared_while_they_live(guard_checks: str) -> None:
    kept, other = Holder(), Holder()
    holds, others_hold = (
        state_checks.same_attributes([(weakref.ref(each), Holder, vars(each))]) for each in (kept, other)
    )
    assert holds()
    assert others_hold()
    kept.__dict__ = {}
    assert not holds()
    del other
    assert not others_hold()


def test_what_is_compared_is_kept_and_given_back(guard_checks: str) -> None:
    holder = Holder()
    gone = weakref.ref(holder)
    check = state_checks.same_attributes([(holder, Holder, vars(holder))])
    del holder
    assert gone() is not None
    assert check()
    del check
    assert gone() is None


@pytest.fixture
def fresh(tmp_path: Path) -> Iterator[Path]:
    with knobs.override(cache_dir=str(tmp_path)):
        yield tmp_path


def test_checks_become_compiled_ones_when_these_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    library = compile_checks()
    importlib.import_module("torch._dynamo.guards")
    now: list[Any] = [None]
    monkeypatch.setattr(state_checks, "compiled", lambda: now[0])
    tensors, holder = [torch.zeros(2), torch.ones(3)], Holder()
    checks = [
        state_checks.unchanged_tensors(tensors, tensors),
        state_checks.no_gradients(tensors),
        state_checks.unchanged_dicts([vars(holder)]),
        state_checks.all_empty([[], {}]),
        state_checks.same_items([([1], (1,))]),
        state_checks.same_attributes([(holder, Holder, vars(holder))]),
        state_checks.require_grad([(tensors[0], False)]),
        state_checks.same_settings(guards._read_settings),
    ]
    assert all(check is not None and check() for check in checks)
    now[0] = library
    tensors[1].resize_(2)  # what changed before is no part of what the compiled check knows
    assert [check() for check in checks] == [False, *[True] * 7]
    tensors[1].resize_(3)
    assert all(check() for check in checks)
    monkeypatch.setattr(state_checks._UntilCompiled, "__call__", lambda self: self._check())
    holder.added = 1
    tensors[0].requires_grad_()
    assert [check() for check in checks] == [False, True, False, True, True, True, False, True]


def test_nothing_that_was_compiled_is_left_or_read(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(fresh))
    compiled_checks(state_checks.compile_now.__wrapped__())
    assert list(fresh.iterdir()) == []


@pytest.mark.parametrize("without", ["compiler", "headers"])
def test_without_the_library_torch_compares(fresh: Path, monkeypatch: pytest.MonkeyPatch, without: str) -> None:
    monkeypatch.setattr(state_checks, "_library", None)
    if without == "compiler":
        monkeypatch.setenv("CXX", str(fresh / "missing"))
    else:
        source = fresh / "checks.cpp"
        source.write_text("#include <no/such/header.h>\n")
        monkeypatch.setattr(state_checks, "_SOURCE", source)
    assert state_checks.compile_now.__wrapped__() is None


PROGRAM = """
import torch, weft
from weft import state_checks
from weft.compile import CompiledStep

model = torch.nn.Linear(3, 3)
step = weft.compile(lambda x: model(x).sum().detach())
for call in range({calls}):
    step(torch.ones(3))
print("begun", state_checks.compile_in_background.cache_info().currsize)
"""


@pytest.mark.parametrize(("calls", "begun"), [(20, 0), (300, 1)])
def test_a_step_that_is_called_often_has_them_compiled(calls: int, begun: int) -> None:
    run = [sys.executable, "-W", "ignore", "-c", PROGRAM.format(calls=calls)]
    assert f"begun {begun}" in subprocess.run(run, capture_output=True, text=True, check=True, timeout=300).stdout
