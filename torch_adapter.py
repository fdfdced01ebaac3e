"""The one place where weft touches torch names that torch does not promise to keep.

Each function is tested on torch 2.11, 2.13 and 2.15; nothing else in weft imports a private torch name.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import inspect
import operator
import pickle
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType
from typing import Any, cast

import sympy
import torch
import torch.distributed as dist
from torch._functorch import pyfunctorch
from torch._ops import OpOverload
from torch._prims_common import make_contiguous_strides_for
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd.function import _HookMixin
from torch.distributed import _functional_collectives, distributed_c10d
from torch.distributed._composable.contract import _get_registry
from torch.distributed.device_mesh import DeviceMesh
from torch.fx.experimental import symbolic_shapes
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.nn.modules import module as nn_module
from torch.optim import optimizer as torch_optimizer
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils import _python_dispatch, _pytree
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._sympy.functions import FloorDiv, Mod
from torch.utils._sympy.numbers import int_oo
from torch.utils.hooks import RemovableHandle

from weft import dtensor_placements, thread_patches

# ---- capture: what a recording dispatch mode needs


_WAIT_FOR_SEVERAL = "_c10d_functional::wait_tensors"  # of torch 2.15: one operation for several waits
# Composite operations that write running statistics, which their schemas do not say.
_WRITE_STATISTICS = frozenset({"aten::batch_norm", "aten::_batch_norm_impl_index", "aten::instance_norm"})


def shape_env_of(fake_mode: FakeTensorMode) -> ShapeEnv:
    """The ShapeEnv of a fake mode that was made with one."""
    return cast(ShapeEnv, fake_mode.shape_env)


def is_composite(op: OpOverload) -> bool:
    """Whether torch computes ``op`` by other operations, with autograd and without."""
    # TorchScript has operations of its own, which the dispatcher does not know.
    name = op.name()
    key = "CompositeImplicitAutograd"
    return torch._C._dispatch_has_kernel(name) and torch._C._dispatch_has_kernel_for_dispatch_key(name, key)


def is_taken_apart(op: OpOverload) -> bool:
    """Whether a composite operation is recorded as those that it calls, also where torch leaves it whole: its results
    may be views of its operands (``chunk``, ``to``, ``reshape``), or are no tensors (``bool(x)``), or it writes running
    statistics, or it is a program's own. Other composite operations may choose kernels by what their operands are, and
    would choose others for fakes (LSTMs, ``linalg.svdvals``)."""
    if op._schema.name == _WAIT_FOR_SEVERAL or op._schema.name in _WRITE_STATISTICS:
        return True
    results = op._schema.returns
    may_be_views = all(each.alias_info and not each.alias_info.is_write for each in results)
    no_tensors = not any("Tensor" in str(each.type) for each in results)
    return bool(results) and is_composite(op) and (may_be_views or no_tensors or op.namespace != "aten")


def run_composite(op: OpOverload, args: Any, kwargs: Any) -> Any:
    """A composite operation by the C++ function that eager runs; ``op.decompose`` prefers decompositions in Python."""
    if op._schema.name == _WAIT_FOR_SEVERAL:
        return [torch.ops._c10d_functional.wait_tensor.default(each) for each in args[0]]
    return op._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)


def is_plain_tensor_type(kind: type) -> bool:
    """Whether tensors of this type reach kernels as they are: no subclass that takes operations apart (DTensor)."""
    return issubclass(kind, FakeTensor) or kind.__torch_dispatch__ is torch._C._disabled_torch_dispatch_impl


def capture_queries() -> list[tuple[ModuleType, str]]:
    """(module, name) of the functions that tell whether a tensor is fake and which modes are active."""
    innermost, whole_stack = "_get_current_{}_mode", "_get_current_{}_mode_stack"
    names = {
        _python_dispatch: [innermost.format("dispatch"), whole_stack.format("dispatch"), "is_in_torch_dispatch_mode"],
        torch.overrides: [innermost.format("function"), whole_stack.format("function"), "has_torch_function"],
        fake_tensor: ["is_fake", "maybe_get_fake_mode"],
        torch._guards: ["detect_fake_mode"],
    }
    return [(module, name) for module in names for name in names[module]]


@contextlib.contextmanager
def modes_set_aside(own: Callable[[Any], bool]) -> Iterator[None]:
    """Inside, the dispatch and function modes that are ``own`` are not active, and all others are."""
    functions, flags = torch.overrides, {name for name in vars(_python_dispatch) if name.startswith("_is_in_")}
    with contextlib.ExitStack() as stack:
        before = functions._get_current_function_mode_stack()
        for mode in reversed(before):
            functions._pop_mode()
            stack.callback(functions._push_mode, mode)
        active = stack.enter_context(_disable_current_modes())
        dispatch = [mode for mode in active if mode is not None and not own(mode)]
        stack.callback(vars(_python_dispatch).update, {name: getattr(_python_dispatch, name) for name in flags})
        vars(_python_dispatch).update(dict.fromkeys(flags, bool(dispatch)))
        for owner, modes in ((_python_dispatch, dispatch), (functions, [mode for mode in before if not own(mode)])):
            for mode in modes:
                owner._push_mode(mode)
                stack.callback(owner._pop_mode)
        yield


@contextlib.contextmanager
def only_mode(*modes: TorchDispatchMode) -> Iterator[None]:
    """Run with exactly these dispatch modes and no function mode in between."""
    with _disable_current_modes(), torch._C.DisableTorchFunction(), contextlib.ExitStack() as stack:
        for mode in modes:
            stack.enter_context(mode)
        yield


def forget_fake_results() -> None:
    """Empty torch's cache of what operations on fakes returned: it does not know that a rank may have been another."""
    FakeTensorMode.cache_clear()


real_tensors = _disable_current_modes  # inside, operations run for real although a fake mode is active
ENGINE_CODE = torch.autograd.graph._engine_run_backward.__code__  # the Python code that runs autograd's engine
running_autograd_node = torch._C._current_autograd_node  # whose backward is running in this thread, or None


def last_sequence_number() -> int:
    """Sequence number of the autograd node made last in this thread."""
    return torch.autograd._get_sequence_nr() - 1


sequence_number = operator.methodcaller("_sequence_nr")  # that an autograd node got when the forward operation made it


def new_node(graph: torch.fx.Graph, op: str, target: Any, args: Any, kwargs: Any, name: str | None) -> torch.fx.Node:
    """``graph.create_node``, three times as fast from torch 2.13 on, which looks through all arguments for raw symbolic
    numbers to warn of; weft's graphs have none."""
    node = graph.create_node(op, target, name=name)
    node._update_args_kwargs(args, kwargs)
    return node


call_of = operator.attrgetter("_args", "_kwargs", "target")  # of a node, which answers for two of them in Python


# ---- fake world: a process group of any size in one process


def fake_process_group(world_size: int, rank: int) -> None:
    """Make the default process group one of `world_size` ranks that communicates with nobody."""
    torch.distributed.init_process_group(
        torch.distributed.Backend.FAKE, store=FakeStore(), rank=rank, world_size=world_size
    )


class _GroupsOfThread:
    """Torch's record of the process groups, with another record in its place in some threads."""

    def __init__(self, of_process: Any) -> None:
        vars(self).update(of_process=of_process, mine=threading.local())

    def __getattr__(self, name: str) -> Any:
        return getattr(getattr(self.mine, "groups", self.of_process), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(getattr(self.mine, "groups", self.of_process), name, value)


class _OwnGroups(distributed_c10d._World):
    """A record of process groups that keeps to itself what torch's own keeps in globals of its module."""

    pg_map = pg_names = pg_group_ranks = pg_backend_config = tags_to_pg = pg_to_tag = None  # type: ignore[assignment]
    group_count = 0  # type: ignore[assignment]

    def __init__(self) -> None:
        super().__init__()
        for name in ("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "tags_to_pg", "pg_to_tag"):
            setattr(self, name, {})


_GROUPS: Any = _GroupsOfThread(distributed_c10d._world)
_RANKS: Any = torch.utils.weak.WeakIdKeyDictionary()  # of each process group, as one tuple


@contextlib.contextmanager
def process_groups_of_thread() -> Iterator[None]:
    """Inside, this thread has no process group but those that it makes, and no other thread sees them.

    Torch tests its own process groups in threads in this way (``torch.testing._internal``'s ``ThreadLocalWorld``).
    """
    _GROUPS.mine.groups = _OwnGroups()
    try:
        with thread_patches.stand_in(distributed_c10d, "_world", _GROUPS):
            yield
    finally:
        del _GROUPS.mine.groups


def dispatch_through(mode: FakeTensorMode, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Let `change` rewrite the keyword arguments of every operation that reaches `mode`.

    Set on the instance and not in a subclass: higher-order operators look handlers up by the mode's exact type.
    """
    original = mode.dispatch

    def dispatch(func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return original(func, types, args, change(kwargs or {}))

    mode.dispatch = dispatch  # type: ignore[method-assign]


@contextlib.contextmanager
def in_this_thread_alone(mode: FakeTensorMode, refuse: Callable[[], Exception]) -> Iterator[None]:
    """Inside, operations on the fakes of `mode` in another thread raise what `refuse` makes there."""
    before = vars(mode).get("dispatch")
    dispatch, thread = mode.dispatch, threading.get_ident()

    def checked(func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if threading.get_ident() != thread:
            raise refuse()
        return dispatch(func, types, args, kwargs)

    mode.dispatch = checked  # type: ignore[method-assign]
    try:
        yield
    finally:
        if before is None:
            del mode.dispatch
        else:
            mode.dispatch = before  # type: ignore[method-assign]


def forget_fakes(mode: FakeTensorMode, tensors: Iterable[torch.Tensor]) -> None:
    """Let go of the weak references that `mode` keeps to fakes made by operations; nothing looks them up again."""
    memo = mode.fake_tensor_converter.meta_converter.tensor_memo
    known = {id(tensor) for tensor in tensors}
    for key in [key for key, fake in memo.items() if id(fake) in known]:
        del memo[key]


def autograd_engine_entry() -> tuple[ModuleType, str]:
    """Module and name of the function through which `backward` and `autograd.grad` both enter the engine."""
    return torch.autograd.graph, "_engine_run_backward"


def gpu_context_entry() -> tuple[ModuleType, str]:
    """Module and name of the function that starts CUDA when the first fake of a GPU's tensor is made."""
    return fake_tensor, "init_gpu_context"


def device_context_type() -> type:
    """The class behind `with torch.device(...)` and `torch.set_default_device`; its `__init__` takes a device."""
    return DeviceContext


def default_device() -> torch.device | None:
    """What `torch.set_default_device` set last in this thread, or None where nothing was set."""
    context = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
    return None if context is None else context.device


# ---- distributed: what wrappers of modules need


def is_dtensor(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a DTensor; does not import DTensor where nobody else did."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def version_getter() -> Any:
    """The function that torch function modes see where code reads the version counter of a tensor."""
    return cast(Any, torch.Tensor)._version.__get__


untraced: Any = torch._disable_dynamo  # makes a function run as it is under torch.compile, with all that it calls
nn_functions = torch._C._nn  # the functions in C++ that those of torch.nn call
custom_device_entry = torch._C, "_get_privateuse1_backend_name"  # what names the device that others may register


def after_backward(callback: Callable[[], None]) -> None:
    """From inside a backward, ask for `callback` at its end; callbacks run in the order of asking."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


# The post-accumulate-grad hooks on a tensor by their numbers, in the order of registration, or None.
post_accumulate_hooks = operator.attrgetter("_post_accumulate_grad_hooks")
# Register hooks that a tensor lists but autograd no longer calls, as after `swap_tensors`.
register_listed_hooks = lambda tensor, hooks: setattr(tensor, "_post_accumulate_grad_hooks", hooks)
address = operator.attrgetter("_cdata")  # of a tensor in C++; `swap_tensors` changes it, and leaves hooks behind
python_rules = torch._C._EnablePythonDispatcher  # inside, a rule in Python for fakes comes before one in C++
# Composite functions in C++ (matmul, linear) want sizes as integers, and have a rule in Python for symbolic ones.
COMPOSITES_WANT_INTEGERS = torch.__version__.startswith("2.11")
outside_transforms = pyfunctorch.temporarily_clear_interpreter_stack  # run operations as if torch.func were not used


def cast_gradients(ctx: Any, dtype: torch.dtype | None) -> None:
    """In the forward of a Function with one output: autograd casts each gradient of the output to `dtype` before it
    adds them up; None adds them as they come. Before torch 2.14 the dtype is always that of the output."""
    if hasattr(ctx, "set_output_grad_dtype"):
        ctx.set_output_grad_dtype(dtype)


def in_transform() -> bool:
    """Whether a transform of torch.func (grad, jvp, vmap) runs in this thread."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def checkpoints_itself(module: torch.nn.Module) -> bool:
    """Whether torch.distributed._composable.checkpoint was called on it."""
    return "checkpoint" in (_get_registry(module) or ())


def in_backward() -> bool:
    """Whether the autograd engine is running in this thread (its callbacks at the end included)."""
    return torch._C._current_graph_task_id() != -1


def function_modes() -> list[Any]:
    """The function modes of this thread, the innermost last; the device in the place of ``with torch.device(...)``."""
    if not torch._C._len_torch_function_stack():
        return []
    modes = torch.overrides._get_current_function_mode_stack()
    return [mode.device if isinstance(mode, DeviceContext) else mode for mode in modes]


pack_padded_sequence, pad_packed_sequence = torch._pack_padded_sequence, torch._pad_packed_sequence
# The (pack, unpack) pair that autograd would use now: it applies the innermost pair only.
innermost_saved_tensor_hooks = functools.partial(torch._C._autograd._top_saved_tensors_default_hooks, True)
# As torch's public functions of like names, which are in Python.
deterministic_algorithms = torch._C._get_deterministic_algorithms
float32_matmul_precision = torch._C._get_float32_matmul_precision


class StorageWrites(TorchDispatchMode):
    """While active, notes in `storages` the storage_key of every tensor that an operation writes to."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        for at, argument in enumerate(func._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            written = args[at] if at < len(args) else named.get(argument.name)
            for tensor in written if isinstance(written, (list, tuple)) else [written]:
                if isinstance(tensor, torch.Tensor):
                    self.storages.add(storage_key(tensor))
        return func(*args, **named)


local_tensor = operator.attrgetter("_local_tensor")  # the shard that a DTensor holds, the very object and no operation
dtensor_spec = operator.attrgetter("_spec")  # mesh, placements and global shape of a DTensor


def dtensor_with(local: torch.Tensor, spec: Any) -> Any:
    """A DTensor of `local` with the `dtensor_spec` of another; no operation and no gradient."""
    kind = torch.distributed.tensor.DTensor
    return kind.__new__(kind, local, spec, requires_grad=False)  # its `__init__` does nothing, in 8 microseconds


def dtensor_spec_of(
    local: torch.Tensor, mesh: Any, placements: tuple[Any, ...], shape: torch.Size | None = None
) -> Any:
    """The `dtensor_spec` of a DTensor whose parts are all like `local`, or of a contiguous one of this shape."""
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
    from torch.distributed.tensor._utils import compute_global_tensor_info

    if shape is None:
        sizes, stride = compute_global_tensor_info(local, mesh, placements)
    else:
        sizes, stride = shape, make_contiguous_strides_for(shape)
    return DTensorSpec(mesh, placements, tensor_meta=TensorMeta(torch.Size(sizes), tuple(stride), local.dtype))


def group_rank(group_name: str) -> int:
    """This process's rank in the process group of that name."""
    return torch._C._distributed_c10d._resolve_process_group(cast(Any, group_name)).rank()


def group_ranks(group_name: str) -> tuple[int, ...]:
    """Ranks of the world that are in the process group of that name, in its order. Raises RuntimeError without one."""
    group = distributed_c10d._resolve_process_group(cast(Any, group_name))
    return _RANKS.get(group) or _RANKS.setdefault(group, tuple(dist.get_process_group_ranks(group)))


def strided_shard(dim: int, split_factor: int) -> Any:
    """The placement of a dimension split over this mesh dimension after `split_factor` parts over a later one."""
    from torch.distributed.tensor.placement_types import _StridedShard

    return _StridedShard(dim, split_factor=split_factor)


def joined_mesh(meshes: list[DeviceMesh]) -> DeviceMesh:
    """The mesh that has the dimensions of all `meshes`, which come of one root mesh."""
    return DeviceMesh._concatenate(meshes)


def refresh_rnn_weights(module: torch.nn.RNNBase) -> None:
    """Make an RNN use what is in the places of its parameters now; it keeps a list of its own."""
    module._flat_weights[:] = weights = [getattr(module, name) for name in module._flat_weights_names]
    # With references to them, forward would find other weights than at the call before, and make new lists of both.
    module._flat_weight_refs[:] = [None] * len(weights)


def flat_submesh(mesh: DeviceMesh, names: tuple[str, ...]) -> DeviceMesh:
    """The 1-D mesh over the named dimensions of `mesh` taken together."""
    part = mesh[names]
    return part if part.ndim == 1 else part._flatten()


def tree_map(function: Callable[[Any], Any], tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> Any:
    """`tree`, a nest of containers, with `function` applied to its leaves, and to what ``is_leaf`` holds for."""
    return _pytree.tree_map(function, tree, is_leaf=is_leaf)


def fresh_number(shape_env: ShapeEnv, dtype: torch.dtype) -> torch.SymInt | torch.SymFloat | torch.SymBool:
    """A new symbol for a number of this dtype that only the data decides."""
    with _without_line(shape_env):
        if dtype == torch.bool:
            return shape_env.create_unbacked_symbool()
        return shape_env.create_unbacked_symfloat() if dtype.is_floating_point else shape_env.create_unbacked_symint()


@contextlib.contextmanager
def _without_line(shape_env: ShapeEnv) -> Iterator[None]:
    """Torch notes which line of the user's asked for a symbol; to know its own lines it imports all of torch.export.
    Inside, no line is noted."""
    shape_env._get_user_frame = lambda: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        del shape_env._get_user_frame


def constrain(number: torch.SymInt | torch.SymFloat, low: float | None, high: float | None) -> None:
    """State that a number made by :func:`fresh_number` lies in [low, high]; None where nothing is known."""
    if low is not None or high is not None:
        infinite = int_oo if isinstance(number, torch.SymInt) else sympy.oo
        bounds = -infinite if low is None else low, infinite if high is None else high
        shape_env = number.node.shape_env
        with _without_line(shape_env):
            shape_env.constrain_symbol_range(symbol_of(number), *bounds)


def new_runtime_asserts(shape_env: ShapeEnv, seen: set[Any]) -> Iterator[tuple[Any, str]]:
    """(expression, message) of conditions on data-dependent symbols that were added since ``seen`` was last filled."""
    if shape_env.num_deferred_runtime_asserts == len(seen):
        return
    for conditions in list(shape_env.deferred_runtime_asserts.values()):
        for condition in conditions:
            if condition.expr not in seen:
                seen.add(condition.expr)
                yield condition.expr, str(condition.msg)


def number_symbol(shape_env: ShapeEnv, value: int | float, name: str) -> torch.SymInt | torch.SymFloat:
    """A symbolic number whose present value is ``value``; nothing else is assumed of it."""
    from torch._dynamo.source import ConstantSource  # a second to import, and only captures need it

    source = ConstantSource(name)
    with _without_line(shape_env):
        symbol = shape_env.create_unspecified_symbol(value, source=source, dynamic_dim=DimDynamic.DYNAMIC)
    make: Any = shape_env.create_symintnode if isinstance(value, int) else shape_env.create_symfloatnode
    return make(symbol, hint=value, source=source)


def size_symbol(shape_env: ShapeEnv, value: int, name: str) -> torch.SymInt:
    """A symbolic size whose present value is ``value`` (2 or more)."""
    from torch._dynamo.source import ConstantSource  # a second to import, and only captures need it

    source = ConstantSource(name)
    symbol = shape_env.create_symbol(value, source=source, dynamic_dim=DimDynamic.DYNAMIC, constraint_dim=None)
    return cast(torch.SymInt, shape_env.create_symintnode(symbol, hint=value, source=source))


@contextlib.contextmanager
def on_replacement(shape_env: ShapeEnv, note: Callable[[Any, Any], None]) -> Iterator[None]:
    """Call ``note(symbol, expression)`` whenever a trace finds a symbol equal to an expression, at that moment."""
    original = shape_env._set_replacement

    def set_replacement(symbol: Any, expression: Any, message: str) -> None:
        before = shape_env.replacements.get(symbol)
        original(symbol, expression, message)
        if shape_env.replacements.get(symbol) is not before:
            note(symbol, expression)

    shape_env._set_replacement = set_replacement  # type: ignore[method-assign]
    try:
        yield
    finally:
        del shape_env._set_replacement


def hint(number: int | torch.SymInt) -> int | None:
    """The value that a size had in the captured call; None where only the data decides it."""
    value = number if isinstance(number, int) else number.node.hint if number.node.has_hint() else None
    return None if value is None else int(value)


is_sure = symbolic_shapes.statically_known_true  # whether a condition holds by what is known of symbols; asks nothing

symbol_of = operator.attrgetter("node._expr")  # that a number was made as, whatever it was found equal to since
expression = operator.attrgetter("node.expr")  # of a symbolic number, with all that its trace found equal put in


def shape_env_of_number(number: torch.SymInt | torch.SymFloat | torch.SymBool) -> Any:
    """The ShapeEnv that a symbolic number belongs to; None for one that C++ made by itself."""
    return getattr(number.node, "shape_env", None)


def fake_mode_of(graph: torch.fx.Graph) -> FakeTensorMode:
    """The mode of a graph's fake tensors; a new one where it has none."""
    vals = lambda kinds: (val for node in graph.nodes if isinstance(val := node.meta.get("val"), kinds))
    mode = next((val.fake_mode for val in vals(FakeTensor)), None)
    numbers = (shape_env_of_number(val) for val in vals((torch.SymInt, torch.SymFloat, torch.SymBool)))
    return mode or FakeTensorMode(shape_env=next(numbers, None))


def symbolic_size(fake_mode: FakeTensorMode, size: Any) -> torch.SymInt | int:
    """A size of a fake tensor for a sympy expression over the symbols of its mode."""
    return shape_env_of(fake_mode).create_symintnode(size, hint=None)


def symbolic_number(fake_mode: FakeTensorMode, kind: str, expression: Any) -> Any:
    """A SymInt, SymFloat or SymBool (``kind``) for a sympy expression over the symbols of a mode."""
    shape_env = shape_env_of(fake_mode)
    if kind == "SymBool":
        return shape_env.create_symboolnode(expression)
    make = {"SymInt": shape_env.create_symintnode, "SymFloat": shape_env.create_symfloatnode}[kind]
    return make(expression, hint=None)


# Entries of torch's cache of fake results, each of about 2 KB, that are left there between captures. The capture of a
# large model needs some hundreds.
MAX_FAKE_RESULTS = 2048


def bound_fake_results() -> None:
    """Empty torch's cache of fake results where it has become large. It keeps an entry for each operation and size that
    was ever captured."""
    if len(FakeTensorMode.cache) > MAX_FAKE_RESULTS:
        FakeTensorMode.cache_clear()


def fake_with_values(mode: FakeTensorMode, real: torch.Tensor) -> FakeTensor:
    """A fake of a tensor that knows its values until it is written to."""
    return mode.fake_tensor_converter.from_real_tensor(mode, real, make_constant=True)


def known_values(fake: Any) -> torch.Tensor | None:
    """The values that a fake tensor knows; None for one that knows none, and for anything else."""
    return fake.constant if isinstance(fake, FakeTensor) else None


def new_fake(
    mode: FakeTensorMode, device: torch.device, dtype: torch.dtype, sizes: Any, strides: Any, offset: Any, storage: Any
) -> FakeTensor:
    """A fake tensor by its layout, in the storage of a fake, or for None in one of its own."""
    with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
        if storage is None:
            meta = torch.empty_strided(sizes, strides, dtype=dtype, device="meta")
        else:
            meta = torch.empty(0, dtype=dtype, device="meta").set_(storage, offset, sizes, strides)
        # The constructor sets twenty attributes in Python, which takes longest: those of the first fake are copied.
        known: dict[torch.device, dict[str, Any]] = mode.__dict__.setdefault("_weft_attributes_of_fakes", {})
        if (attributes := known.get(device)) is None:
            fake = FakeTensor(mode, meta, device)
            if device == fake.fake_device:  # "cuda" is the current device, which may be another one later
                known[device] = dict(vars(fake))
            return fake
        keys: dict[str, Any] = {"dispatch_device": True, "device_for_backend_keys": device}
        fake = torch.Tensor._make_subclass(FakeTensor, meta, False, **keys)
        warns = mode._allow_unsafe_data_ptr_access
        (torch._C._set_warn_deprecated_on_mutable_data_ptr if warns else torch._C._set_throw_on_mutable_data_ptr)(fake)
        vars(fake).update(attributes)
        return fake


def contiguous_fake(mode: FakeTensorMode, device: torch.device, dtype: torch.dtype, sizes: Any) -> FakeTensor:
    """What ``torch.empty`` of these sizes makes under the mode."""
    return new_fake(mode, device, dtype, sizes, make_contiguous_strides_for(sizes), 0, None)


def fake_like(mode: FakeTensorMode, tensor: torch.Tensor) -> FakeTensor:
    """A fake tensor with the layout of a plain or a fake one, from the start of memory of its own."""
    with inference_mode_of(tensor):
        return new_fake(mode, tensor.device, tensor.dtype, tensor.shape, tensor.stride(), 0, None)


@contextlib.contextmanager
def inference_mode_of(tensor: torch.Tensor) -> Iterator[None]:
    """Inside, fakes are made as inference tensors if ``tensor`` is one, and else as ordinary ones.

    Eager gives a view the kind of its base. Torch makes a new tensor for each fake, of the kind of the present mode.
    """
    if (kind := tensor.is_inference()) is torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(kind), below_autograd():
        yield


# Inside, operations go past autograd: no backward is recorded, composite operations stay whole, slices are no views.
below_autograd: Callable[[], contextlib.AbstractContextManager[Any]] = torch._C._AutoDispatchBelowAutograd


def detached_fake(fake: torch.Tensor) -> torch.Tensor:
    """``fake.detach()``, in a third of its time for all but unusual tensors. Its mode must be active."""
    if type(fake) is not FakeTensor or fake._has_symbolic_sizes_strides or fake.constant is not None:
        return fake.detach()
    if fake.layout is not torch.strided or fake.is_conj() or fake.is_neg():
        return fake.detach()
    layout = fake.dtype, fake.shape, fake.stride(), fake.storage_offset()
    return new_fake(fake.fake_mode, fake.fake_device, *layout, fake.untyped_storage())


def forget_data_memos(fake: FakeTensor) -> None:
    """Let a fake tensor forget the symbols that stand for its data (``.item()``, the length of ``nonzero``).

    Torch keeps them for as long as the fake's own version counter stands still, which writes through ``.data`` or to
    the real tensor that the fake stands for do not move.
    """
    held = vars(fake)
    for name in ("item_memo", "nonzero_memo", "unique_memo", "unique_consecutive_memo"):
        if held.get(f"_{name}", "") is not None and name in vars(FakeTensor):
            setattr(fake, name, None)


replaced = ShapeEnv.replace  # what a trace found a symbol to be equal to, in the end; itself where to nothing


def init_optimizer_state(optimizer: torch.optim.Optimizer) -> bool:
    """Let an optimizer of torch's make the state it would make in its first step; False where it cannot be asked.

    The same method of a user's optimizer may do anything, and is not called.
    """
    make = getattr(optimizer, "_init_group", None)
    if make is None or not getattr(make, "__module__", "").startswith("torch.optim."):
        return False
    lists = len(inspect.signature(make).parameters) - 1
    for group in optimizer.param_groups:
        make(group, *([] for _ in range(lists)))
    return True


def registered_hooks(tensor: torch.Tensor) -> list[dict[int, Any]]:
    """The dictionaries of hooks that users registered on a tensor (gradient and post-accumulate-gradient hooks)."""
    return [d for d in (tensor._backward_hooks, tensor._post_accumulate_grad_hooks) if d]


# The dictionaries of hooks on a leaf, each read by one call in C.
leaf_hooks = operator.attrgetter("_backward_hooks"), operator.attrgetter("_post_accumulate_grad_hooks")
# Attributes of tensor subclasses are read as they are, and several times faster.
no_torch_function = torch._C.DisableTorchFunctionSubclass
# As above, and no function mode sees what is read or called either.
no_torch_function_modes = torch._C.DisableTorchFunction
# Takes both back.
torch_functions = torch._C._EnableTorchFunction


def like(tensors: Iterable[torch.Tensor]) -> Callable[..., bool]:
    """A check, in C, that as many values are tensors of the types, dtypes, devices, sizes and strides of these, which
    require grad where these do."""
    return torch._C._dynamo.guards.TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check


def same_addresses(tensors: list[torch.Tensor]) -> Callable[[], bool]:
    """A check that the elements of these tensors begin where they do now; in C where torch is built for CUDA."""
    addresses = [tensor.data_ptr() for tensor in tensors]
    if compare := getattr(torch._C, "_tensors_data_ptrs_at_indices_equal", None):
        return functools.partial(compare, tensors, addresses, list(range(len(tensors))))
    return lambda: list(map(torch.Tensor.data_ptr, tensors)) == addresses


def offset_in_tensors() -> int | None:
    """Where in a tensor object the address of its C++ tensor is, in bytes; None where it is at no one place."""
    with real_tensors(), no_torch_function_modes():
        probes = torch.empty(1, device="cpu"), torch.nn.Parameter(torch.empty(1, device="cpu"))
    places = [_words_that_are(probe._cdata, probe) for probe in probes]
    return places[0][0] if len(places[0]) == 1 and places[0] == places[1] else None


def _words_that_are(value: int, obj: Any) -> list[int]:
    """The offsets of the words of an object in memory that have this value."""
    words = (ctypes.c_uint64 * (torch.Tensor.__basicsize__ // 8)).from_address(id(obj))
    return [8 * at for at, word in enumerate(words) if word == value]


# The version of a dictionary: another number after each change of its keys or of the objects at them, whoever makes it.
# It stays the same in two cases: the order of an OrderedDict changes and nothing else; from Python 3.12 on, an empty
# dictionary is filled by one `update`.
dict_version = torch._C._dynamo.guards.dict_version


def unchanged_dicts(dicts: list[dict[Any, Any]]) -> Callable[[], bool] | None:
    """As :func:`weft.state_checks.unchanged_dicts`, by torch's own checks in C."""
    return _checks_in_c(dicts, lambda each, found: _add_guard(each.add_dict_version_guard, found))


def no_gradients(leaves: list[torch.Tensor]) -> Callable[[], bool] | None:
    """As :func:`weft.state_checks.no_gradients`, by torch's own checks in C."""

    def check_gradient(leaf: Any, _: torch.Tensor) -> None:
        gradient = leaf.grad_manager(source="grad", example_value=None, guard_manager_enum=_guard_kind())
        _add_guard(gradient.add_id_match_guard, id(None))

    return _checks_in_c(leaves, check_gradient)


def _checks_in_c(objects: list[Any], add: Callable[[Any, Any], None]) -> Callable[[], bool] | None:
    if _guard_kind() is None:
        return None
    root = torch._C._dynamo.guards.RootGuardManager()
    for at, found in enumerate(objects):
        add(root.list_getitem_manager(key=at, source="", example_value=None, guard_manager_enum=_guard_kind()), found)
    return functools.partial(root.check, objects)


def _guard_kind() -> Any:
    return getattr(getattr(sys.modules.get("torch._dynamo.guards"), "GuardManagerType", None), "GUARD_MANAGER", None)


def _add_guard(method: Any, expected: Any) -> None:
    described = ["unchanged"]
    try:
        method(expected, described, None)
    except TypeError:  # torch 2.11 takes no stack of the user's
        method(expected, described)


def hooks_made() -> int:
    """How many hooks were registered in this process so far, on tensors, modules and everything else."""
    return RemovableHandle.next_id


def tensor_hooks(tensor: torch.Tensor) -> list[tuple[str, dict[int, Any] | None]]:
    """Kind and dictionary (None before the first registration) of the hooks registered on a tensor."""
    return [("gradient", tensor._backward_hooks), ("post-accumulate-grad", tensor._post_accumulate_grad_hooks)]


def accumulator(leaf: torch.Tensor) -> Any:
    """The autograd node that adds to the ``.grad`` of a leaf that requires grad; torch forgets it when nobody
    holds it. None of a view of a tensor that was made to require grad after the view: it gets no gradient."""
    with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.inference_mode(False), torch.enable_grad():
        touched = _Touch.apply(leaf)
        return touched.grad_fn.next_functions[0][0]


class _Touch(torch.autograd.Function):
    """Depends on a leaf without an operation on it: torch's own way runs a view, which costs a DTensor milliseconds."""

    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor) -> torch.Tensor:
        return torch.empty(0)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> None:
        return None


def node_hooks(node: Any) -> list[tuple[str, dict[int, Any]]]:
    """Kind and dictionary of the hooks registered on an autograd node; torch shows them to the handle of a new one
    only."""
    handles = [("node", node.register_hook(_nothing)), ("node-pre", node.register_prehook(_nothing))]
    found = [(kind, handle.hooks_dict_ref()) for kind, handle in handles]
    for _, handle in handles:
        handle.remove()
    return found


def _nothing(*grads: Any) -> None:
    """A hook that leaves gradients alone."""


def optimizer_hooks(optimizer: torch.optim.Optimizer) -> list[tuple[str, dict[int, Any]]]:
    """Kind and dictionary of the hooks on an optimizer's step; one that calls no ``Optimizer.__init__`` has none."""
    found = ((kind, vars(optimizer).get(f"_optimizer_step_{kind}_hooks")) for kind in ("pre", "post"))
    return [(f"step-{kind}", hooks) for kind, hooks in found if hooks is not None]


# Torch's dictionaries of hooks on all modules and on the steps of all optimizers; also of users' hooks.
_FORWARD_PRE: Any = nn_module._global_forward_pre_hooks
_FORWARD: Any = nn_module._global_forward_hooks
_STEP_PRE: Any = torch_optimizer._global_optimizer_pre_hooks
_STEP_POST: Any = torch_optimizer._global_optimizer_post_hooks


def global_hooks() -> list[tuple[str, dict[int, Any]]]:
    """Kind and dictionary of the hooks that users registered on all modules, and on the steps of all optimizers."""
    return [
        ("forward-pre", _FORWARD_PRE),
        ("forward", _FORWARD),
        ("full-backward-pre", nn_module._global_backward_pre_hooks),
        ("full-backward", nn_module._global_backward_hooks),
        ("step-pre", _STEP_PRE),
        ("step-post", _STEP_POST),
    ]


class _HooksOfThread(OrderedDict[Any, Any]):
    """A dictionary of global hooks that shows hooks of weft's own, in one thread, after those of users.

    In place of torch's dictionary while a step is captured. Registering a hook there for that time would run it in all
    threads, and change a dictionary that another thread's optimizer is in the middle of. Everything else happens to
    the dictionary itself. Dynamo, in another thread, can trace look-ups in an ordered dictionary only.
    """

    def __init__(self, users: Any) -> None:
        super().__init__()
        self._users = users
        self._own = threading.local()

    @contextlib.contextmanager
    def showing(self, key: object, hook: Any) -> Iterator[None]:
        """Inside, this thread sees ``hook`` too."""
        before = self._extra()
        self._own.hooks = [*before, (key, hook)]
        try:
            yield
        finally:
            self._own.hooks = before

    def _extra(self) -> list[tuple[Any, Any]]:
        return getattr(self._own, "hooks", [])

    def __getitem__(self, key: Any) -> Any:
        return dict(self.items())[key]

    def __setitem__(self, key: Any, hook: Any) -> None:
        self._users[key] = hook

    def __delitem__(self, key: Any) -> None:
        del self._users[key]

    def __contains__(self, key: Any) -> bool:
        return key in self._users or any(own is key for own, _ in self._extra())

    def __iter__(self) -> Iterator[Any]:
        return iter([key for key, _ in self.items()])

    def __len__(self) -> int:
        return len(self._users) + len(self._extra())

    def __bool__(self) -> bool:
        return len(self) > 0

    def values(self) -> Any:
        """The hooks that this thread sees; a view of torch's own dictionary in all others."""
        extra = self._extra()
        return [*self._users.values(), *(hook for _, hook in extra)] if extra else self._users.values()

    def items(self) -> Any:
        """As values(), with the keys."""
        extra = self._extra()
        return [*self._users.items(), *extra] if extra else self._users.items()


# One for each dictionary and for good: the handle of a hook that a step registers refers to it weakly.
_OF_THREAD = {
    name: (module, _HooksOfThread(getattr(module, name)))
    for module, name in (
        (nn_module, "_global_forward_pre_hooks"),
        (nn_module, "_global_forward_hooks"),
        (nn_module, "_global_forward_hooks_always_called"),
        (torch_optimizer, "_global_optimizer_pre_hooks"),
        (torch_optimizer, "_global_optimizer_post_hooks"),
    )
}


@contextlib.contextmanager
def _global_hooks(**hooks: Any) -> Iterator[None]:
    """Show hooks in torch's dictionaries of these names to this thread."""
    with contextlib.ExitStack() as stack:
        key = object()
        for name, hook in hooks.items():
            module, of_thread = _OF_THREAD[name]
            stack.enter_context(thread_patches.stand_in(module, name, of_thread))
            stack.enter_context(of_thread.showing(key, hook))
        yield


@contextlib.contextmanager
def around_module_calls(enter: Callable[[Any], None], leave: Callable[[Any, Any], None]) -> Iterator[None]:
    """Call ``enter(module)`` before the forward of every module that this thread calls, and ``leave(module, output)``
    after it; output is None where an exception ended it."""
    users = _FORWARD_PRE, _FORWARD, nn_module._global_backward_pre_hooks, nn_module._global_backward_hooks
    hooks = {
        "_global_forward_pre_hooks": lambda module, args: enter(module),
        "_global_forward_hooks": lambda module, args, output: leave(module, output),
        "_global_forward_hooks_always_called": True,
    }
    # torch.compile warns of global hooks; those of users alone count.
    with _global_hooks(**hooks), thread_patches.replaced(nn_module, "_has_any_global_hook", lambda: any(users)):
        yield


@contextlib.contextmanager
def node_registrations(
    exchange: Callable[[Any], Any], registered: Callable[[RemovableHandle, Any], None]
) -> Iterator[None]:
    """Register ``exchange(hook)`` for each hook on an autograd node, and tell ``registered`` about it."""
    register = thread_patches.present(_HookMixin, "_register_hook")

    def exchanged(hooks: Any, hook: Any) -> Any:
        hooks, handle = register(hooks, exchange(hook))
        registered(handle, hook)
        return hooks, handle

    with thread_patches.replaced(_HookMixin, "_register_hook", staticmethod(exchanged)):
        yield


# Classes that the functions below flatten. They are not registered with pytrees: code of the user's would flatten them.
_unregistered: dict[type, Any] = {}


def _with_unregistered(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Call a function of pytrees while those classes are registered."""
    new = {kind: node for kind, node in _unregistered.items() if kind not in _pytree.SUPPORTED_NODES}
    _pytree.SUPPORTED_NODES.update(new)
    try:
        return function(*args, **options)
    finally:
        for kind in new:
            _pytree.SUPPORTED_NODES.pop(kind, None)


def register_parts(
    kind: type,
    flat: Callable[[Any], tuple[list[Any], Any]],
    made: Callable[..., Any],
    keys: Callable[[Any, int], Iterable[Any]],
) -> None:
    """Have :func:`flatten` take the objects of a class apart: ``flat`` gives what one holds and what else makes it,
    ``made`` makes it of both, ``keys`` gives of the second and the number of parts a key or ``(name,)`` for each."""

    def named(obj: Any) -> tuple[list[Any], Any]:
        parts, context = flat(obj)
        key = lambda at: _pytree.GetAttrKey(*at) if isinstance(at, tuple) else _pytree.MappingKey(at)
        return list(zip(map(key, keys(context, len(parts))), parts, strict=True)), context

    _unregistered[kind] = _pytree.NodeDef(kind, flat, made, cast(Any, named))


def flatten(tree: Any) -> tuple[list[Any], Any]:
    """Leaves of a pytree in order, and the spec that :func:`unflatten` needs."""
    return _with_unregistered(_pytree.tree_flatten, tree)


def registered_parts(obj: Any) -> tuple[list[Any], Callable[[list[Any]], Any]] | None:
    """What an object of a type that is registered with pytrees holds, and what makes one of such parts; None of other
    types."""
    if (node := _pytree.SUPPORTED_NODES.get(type(obj))) is None:
        return None
    parts, context = node.flatten_fn(obj)
    return list(parts), lambda new: node.unflatten_fn(new, context)


def flatten_with_paths(tree: Any) -> tuple[list[tuple[tuple[Any, ...], Any]], Any]:
    """Leaves of a pytree with their key paths (numbers, if a type has no keys), and the spec to put it together."""
    with contextlib.suppress(ValueError):
        return _with_unregistered(_pytree.tree_flatten_with_path, tree)
    key, (leaves, spec) = _pytree.SequenceKey, flatten(tree)
    return [((key(0), key(at)), leaf) for at, leaf in enumerate(leaves)], spec


class _Size(tuple):
    """Stands for a ``torch.Size`` in a tree, which pytrees would put together again as a tuple."""


_pytree.register_pytree_node(_Size, lambda size: (list(size), None), lambda sizes, _: torch.Size(sizes))


def exact_spec(tree: Any) -> Any:
    """The spec of a tree for :func:`unflatten`, which gives back sizes of tensors as ``torch.Size`` too."""
    is_size = lambda node: isinstance(node, torch.Size)
    if any(map(is_size, _with_unregistered(_pytree.tree_leaves, tree, is_leaf=is_size))):
        exact = lambda leaf: _Size(leaf) if is_size(leaf) else leaf
        tree = _with_unregistered(_pytree.tree_map, exact, tree, is_leaf=is_size)
    return flatten(tree)[1]


def unflatten(leaves: list[Any], spec: Any) -> Any:
    """The pytree of ``spec`` with ``leaves`` as its leaves."""
    return _with_unregistered(_pytree.tree_unflatten, leaves, spec)


def describe_group(name: str) -> str:
    """What a process group was made for: its mesh axis, ``world`` for the default group, ``group`` when nothing
    says."""
    described = dist.distributed_c10d._resolve_process_group(cast(Any, name)).group_desc
    if described == "default_pg":
        return "world"
    return described.removeprefix("mesh_") if described and described != "undefined" else "group"


@contextlib.contextmanager
def force_eager() -> Iterator[None]:
    """Functions compiled by torch.compile run as they were written, so that a capture sees their operations.

    As ``torch.compiler.set_stance("force_eager")`` does, but in this thread alone.
    """
    if "torch._dynamo" not in sys.modules:
        yield
        return
    with thread_patches.replaced(torch._dynamo.eval_frame, "_callback_from_stance", lambda callback: None):
        yield


@contextlib.contextmanager
def dtensors_in_captures() -> Iterator[None]:
    """DTensors take numbers that have no value (a count of steps), and equal operations are placed once, see
    :mod:`weft.dtensor_placements`. Torch's table of placements holds the numbers of a call, and compares those of later
    calls with them: that would ask for the value of a number of another capture, so it is emptied before and after."""
    if "torch.distributed.tensor" not in sys.modules:
        yield
        return
    propagator: Any = torch.distributed.tensor.DTensor._op_dispatcher.sharding_propagator
    forget = getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", lambda: None)
    forget()
    with contextlib.ExitStack() as stack:
        stack.callback(forget)
        for name in ("propagate_op_sharding", "propagate_op_sharding_non_cached"):
            place = dtensor_placements.placed_once(thread_patches.present(propagator, name))
            stack.enter_context(thread_patches.replaced(propagator, name, place))
        yield


def compares_keys(question: Any, file: str) -> bool:
    """Whether torch asks if two keys of one of its tables in C++ are the same, which differ in a float without a value.

    Torch 2.11 has the numbers of a call in its keys of DTensor placements. It compares keys whose hashes share a few
    bits, and hashes numbers by their addresses: whether it asks is a matter of chance, and differs between ranks.
    """
    return isinstance(question, sympy.Eq) and file.endswith("/SymFloat.h")


@contextlib.contextmanager
def around_optimizer_steps(before: Callable[[Any], None], after: Callable[[Any], None]) -> Iterator[None]:
    """Call ``before(optimizer)`` and ``after(optimizer)`` around every optimizer's step in this thread."""
    hooks = {
        "_global_optimizer_pre_hooks": lambda optimizer, args, kwargs: before(optimizer),
        "_global_optimizer_post_hooks": lambda optimizer, args, kwargs: after(optimizer),
    }
    with _global_hooks(**hooks):
        yield


def data_dependent_errors() -> tuple[type[Exception], ...]:
    """What torch raises when Python asks for a value that a fake tensor does not have."""
    return (
        symbolic_shapes.GuardOnDataDependentSymNode,
        fake_tensor.DataDependentOutputException,
        fake_tensor.DynamicOutputShapeException,
    )


# ---- torch.compile's door


def aot_autograd(
    compile_graph: Callable[..., Any], simplify: Callable[[torch.fx.Graph], None], *, recompute: bool
) -> Callable[..., Any]:
    """A backend of Dynamo's that hands ``compile_graph`` functional ATen graphs: of inference, forward and backward.

    Written inputs are written by ``copy_`` at the end of a graph wherever autograd allows it. Nothing is decomposed
    that ATen's own autograd and functionalization do not take apart.

    Args:
        compile_graph: called with a graph module and its inputs; returns a callable over the list of inputs.
        simplify: changes the graph of forward and backward together, before they are taken apart.
        recompute: whether backward computes what is cheap again (torch's min-cut), or gets what eager would save.
    """
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import default_partition, min_cut_rematerialization_partition

    partition = min_cut_rematerialization_partition if recompute else default_partition

    def simplified(joint: torch.fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        simplify(joint.graph)
        return partition(joint, *args, **kwargs)

    return aot_autograd(
        fw_compiler=compile_graph,
        partition_fn=simplified,
        decompositions={},
        keep_inference_input_mutations=True,
    )


def offer_backend(name: str, entry_point: Any) -> None:
    """Let Dynamo, which is imported already, find a backend where it has not found one of that name."""
    from torch._dynamo.backends import registry

    registry._BACKENDS.setdefault(name, entry_point)


def dynamo_source(placeholder: torch.fx.Node) -> str:
    """Where the input of a graph of Dynamo's comes from, as Dynamo writes it; "" where it does not say."""
    source = getattr(placeholder, "_dynamo_source", None)
    return "" if source is None else str(source.name)


def aot_input_index(placeholder: torch.fx.Node) -> int | None:
    """Which input of the graph given to AOTAutograd a placeholder is; None for saved values, gradients, sizes."""
    described: Any = placeholder.meta.get("desc")
    return described.idx if type(described).__name__ == "PlainAOTInput" else None


# ---- execution: what a generated program needs


def references_from_cpp(tensor: torch.Tensor) -> int:
    """How many of the references that ``sys.getrefcount`` counts for a tensor object are C++'s, see below."""
    return int(_counts_cpp_references() and cpp_holders(tensor) > 0)


def cpp_holders(tensor: torch.Tensor) -> int:
    """How often C++ holds a tensor, besides its Python object: views of it and autograd do."""
    return cast(Any, tensor)._use_count() - 1


@functools.cache
def _counts_cpp_references() -> bool:
    """Torch keeps a tensor's Python object while C++ holds the tensor; newer versions count that as a reference."""
    with _disable_current_modes(), torch.inference_mode(False):
        base = torch.zeros(2)
        before = sys.getrefcount(base)
        view = base[0]
        return sys.getrefcount(base) > before and view is not None


def storage_users(tensor: torch.Tensor) -> int:
    """How many tensors, with views, hold on to the memory of this one (and Python, where it looked at it)."""
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


def abandon_capture(device: torch.device, pool: Any) -> None:
    """Give back what a CUDA graph whose capture could not even be ended holds of the allocator."""
    with contextlib.suppress(RuntimeError):  # done by torch, where it came so far
        torch._C._cuda_endAllocateToPool(device.index, pool)
        torch._C._cuda_releasePool(device.index, pool)


def current_stream_key() -> tuple[int, int]:
    """Device and id of the current CUDA stream. ``torch.cuda.current_stream`` reads the environment each time."""
    return torch._C._cuda_getCurrentStream(torch._C._cuda_getDevice())[1::-1]


def backend_of_group(name: str, device: str) -> str:
    """The backend that a process group communicates over for tensors on this kind of device."""
    backends = distributed_c10d.BackendConfig(dist.Backend(dist.get_backend_config(process_group(name))))
    return str(backends.get_device_backend_map().get(device, ""))


# The C++ callable of an operation: what calling the OpOverload does, less a Python frame (0.3 microseconds).
kernel: Callable[[OpOverload], Callable[..., Any]] = operator.attrgetter("_op")


def storage_key(tensor: torch.Tensor) -> int:
    """What tells one storage from another, for fake tensors too, while both are alive."""
    return tensor.untyped_storage()._cdata


# Runs a kernel of the user's CUDA code on the memory of tensors; modes do not see it. Builds for CPUs lack it.
JITERATOR_LAUNCH = torch._C, "_cuda_jiterator_compile_and_launch_kernel"


def in_autocast_region() -> bool:
    """Whether this thread is in a region of autocast, be it a disabled one: its cache lives until the region ends."""
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting() > 0


def cpu_autocast_casts(name: str) -> bool:
    """Whether the CPU's autocast has a rule for an operation of aten."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "AutocastCPU")


def autocast_kernel(op: OpOverload, cast: Callable[..., tuple[Any, Any] | None]) -> Callable[..., Any]:
    """The CPU's autocast for ``op``: it gets the arguments that ``cast`` makes of its own; for None it is as it was."""
    key = torch._C.DispatchKey.AutocastCPU

    def kernel(keys: torch._C.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(key)):
            if (given := cast(op, args, kwargs)) is not None:
                return op.redispatch(keys.remove(key), *given[0], **given[1])
        return op.redispatch(keys.remove(key), *args, **kwargs)

    return kernel


def no_autocast() -> contextlib.AbstractContextManager[Any]:
    """Operations inside are what they say, whatever autocast the caller is in."""
    return torch._C._DisableAutocast()


def assumptions(shape_env: ShapeEnv) -> list[Any]:
    """Boolean expressions over symbols that a trace took to be true."""
    return [guard.expr for guard in shape_env.guards]


@contextlib.contextmanager
def assuming_nothing(shape_env: ShapeEnv | None) -> Iterator[list[Any]]:
    """Inside, code may ask about sizes, and nothing is assumed for good that the trace did not assume.

    Gives a list of what was answered with the sizes of the captured call alone: what the code made holds for no others.
    Without this, each such answer would become a fact about the symbols of the trace, for which no call is checked.
    """
    answered: list[Any] = []
    if shape_env is None:
        yield answered
        return
    known = {guard.expr for guard in shape_env.guards}
    evaluate = shape_env.evaluate_expr

    def answer(expr: Any, *args: Any, **kwargs: Any) -> Any:
        if shape_env._maybe_evaluate_static(expr) is not None:
            return evaluate(expr, *args, **kwargs)
        if (either := kwargs.get("fallback_value")) is not None:  # right in both cases
            return either
        found = evaluate(expr, *args, **kwargs)
        fact = sympy.Eq(expr, found) if not expr.is_Boolean else expr if found else sympy.Not(expr)
        if fact not in known:
            answered.append(fact)
        return found

    outer = vars(shape_env).get("evaluate_expr")
    shape_env.evaluate_expr = answer  # type: ignore[method-assign]
    try:
        with shape_env.suppress_guards():
            yield answered
    finally:
        if outer is None:
            del shape_env.evaluate_expr
        else:
            shape_env.evaluate_expr = outer


def range_of(shape_env: ShapeEnv, symbol: Any) -> tuple[int, int | None]:
    """Smallest and largest value of a size symbol; the largest is None where there is no bound."""
    bounds: Any = shape_env.var_to_range[symbol]
    return int(bounds.lower), None if bounds.upper > 2**62 else int(bounds.upper)


def known_of(shape_env: ShapeEnv, symbol: Any) -> str:
    """All that is known of a symbol, as text: its range, and of a size its value in the captured call."""
    value = shape_env.backed_var_to_val.get(symbol) if symbol.is_integer else ""
    return f"{shape_env.var_to_range.get(symbol)}, {value}"


def world_size() -> int:
    """Ranks of the default process group, 1 where there is none."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


# ---- capture: what stands in for functions of torch.distributed


@contextlib.contextmanager
def redirected_collective(name: str, replacement: Callable[..., Any]) -> Iterator[None]:
    """Make the function `name` of torch.distributed do `replacement` instead, where this torch has it.

    It is exchanged by name, in this thread. Most of these functions are also wrappers around an inner one, which is
    exchanged too, so that references made earlier (`from torch.distributed import ...`) are served.
    """
    held = getattr(distributed_c10d, name, None)
    if held is None:
        yield
        return
    function = thread_patches.original(held)
    inner = getattr(function, "__wrapped__", None)
    cells = [
        c for c in function.__closure__ or () if inner is not None and thread_patches.original(c.cell_contents) is inner
    ]
    served = _as_generator(replacement) if inspect.isgeneratorfunction(inner) else replacement
    with contextlib.ExitStack() as stack:
        for cell in cells:
            stack.enter_context(thread_patches.replaced(cell, "cell_contents", served))
        for module in (dist, distributed_c10d):
            if module.__dict__.get(name) is held:
                stack.enter_context(thread_patches.replaced(module, name, replacement))
        yield


def _as_generator(manager: Callable[..., Any]) -> Callable[..., Iterator[Any]]:
    """The generator function that ``contextlib.contextmanager`` would make ``manager`` of."""

    def generator(*args: Any, **kwargs: Any) -> Iterator[Any]:
        with manager(*args, **kwargs) as value:
            yield value

    return generator


@contextlib.contextmanager
def functional_collectives_waited() -> Iterator[None]:
    """Functional collectives called from Python return waited plain tensors, as in torch's own traces."""
    module: Any = _functional_collectives
    with thread_patches.replaced(module, "_maybe_wrap_tensor", module.wait_tensor):
        yield


@contextlib.contextmanager
def gloo_all_to_all_without_scatter() -> Iterator[None]:
    """The differentiable all_to_all of torch.distributed.nn calls all_to_all on gloo too, not scatters."""

    def forward(ctx: Any, group: Any, outputs: list[torch.Tensor], *inputs: torch.Tensor) -> Any:
        ctx.group = group
        ctx.input_tensor_size_list = [tensor.size() for tensor in inputs]
        torch.distributed.all_to_all(outputs, [tensor.contiguous() for tensor in inputs], group=group)
        return tuple(outputs)

    module = sys.modules.get("torch.distributed.nn.functional")
    if module is None:
        yield
        return
    with thread_patches.replaced(module._AlltoAll, "forward", staticmethod(forward)):
        yield


def surely(condition: bool | torch.SymBool) -> bool:
    """Whether a condition on sizes holds, False where only the data decides."""
    return symbolic_shapes.guard_or_false(condition)


# ---- agreement


def default_store() -> dist.Store:
    """The store through which the ranks of the default process group met."""
    return dist.distributed_c10d._get_default_store()


@dataclasses.dataclass(frozen=True)
class UnfinishedCollective:
    """A collective that NCCL's flight recorder has not seen end.

    Attributes:
        operation: as the recorder calls it, such as ``nccl:_all_gather_base``.
        group: the description of its process group.
        lines: (file, line) of the Python code that issued it, innermost first.
    """

    operation: str
    group: str
    lines: tuple[tuple[str, int], ...]


def unfinished_collectives(since_ns: int) -> list[UnfinishedCollective]:
    """The collectives over NCCL that were issued after this time (ns since 1970) and have not ended, oldest first.

    Empty where the recorder is switched off (``TORCH_FR_BUFFER_SIZE=0``), and for replays of CUDA graphs, which it does
    not see. May wait for the GPU.
    """
    dump = getattr(torch._C._distributed_c10d, "_dump_nccl_trace", None)
    if dump is None:
        return []
    entries = pickle.loads(dump(True, True, False)).get("entries", ())  # written by this process just now
    return [
        UnfinishedCollective(
            entry["profiling_name"],
            str(entry["process_group"][1]),
            tuple((frame["filename"], frame["line"]) for frame in entry.get("frames", ())),
        )
        for entry in entries
        if entry["state"] != "completed" and entry["time_created_ns"] >= since_ns
    ]


def abort_process_groups() -> None:
    """End all collectives of this process on GPUs. What they write is wrong, and no group can be used any more."""
    groups = list(distributed_c10d._world.pg_map)
    first: Any = groups[0]._get_backend(torch.device("cuda"))
    # In one group call: communicators that are aborted one by one may wait for each other (pytorch issue 119797).
    first._group_start()
    for group in groups:
        group.abort()
    first._group_end()


def map_leaves(kind: type, function: Callable[[Any], Any], tree: Any) -> Any:
    """``tree`` with ``function`` applied to its leaves of this type."""
    return _pytree.tree_map_only(kind, function, tree)


# ---- symmetric memory


def world_group_name() -> str:
    """The name under which torch registered the default process group."""
    return str(distributed_c10d._get_default_group().group_name)


def process_group(group_name: str) -> dist.ProcessGroup:
    """The process group of that name. Raises RuntimeError without one."""
    return distributed_c10d._resolve_process_group(cast(Any, group_name))


def can_share_gpu_memory() -> bool:
    """Whether this torch has symmetric memory on GPUs."""
    return torch.cuda.is_available() and hasattr(torch._C._distributed_c10d, "_SymmetricMemory")


def symmetric_empty(size: int, device: torch.device) -> torch.Tensor:
    """``size`` bytes of a GPU's memory that peers can map, once every rank of a group has called symmetric_peers."""
    from torch.distributed import _symmetric_memory

    return _symmetric_memory.empty(size, dtype=torch.uint8, device=device)


def symmetric_peers(memory: torch.Tensor, group_name: str) -> tuple[list[torch.Tensor], Any]:
    """``memory`` of each rank of the group, its own included, all made by symmetric_empty with the same size; and what
    has to live as long as they are used.

    Every rank of the group must call this. Raises RuntimeError where GPUs cannot reach each other's memory.
    """
    from torch.distributed import _symmetric_memory

    handle = _symmetric_memory.rendezvous(memory, cast(Any, group_name))
    parts = [handle.get_buffer(rank, memory.shape, torch.uint8) for rank in range(handle.world_size)]
    return parts, (memory, handle)


def coalesces(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether torch issues a batch of sends and receives as one operation, with one work."""
    return type(group) is dist.ProcessGroup and bool(group._get_backend(device).supports_coalescing)


# ---- measuring


def occupy_gpu(seconds: float) -> None:
    """Give the current stream something to do for at least ``seconds``, which the host does not wait for."""
    torch.cuda._sleep(round(seconds * 3e9))  # cycles a second; no GPU has more


def fakes_unsupported_errors() -> tuple[type[Exception], ...]:
    """What operations on fakes raise whose result only the data decides, or that have no fake implementation."""
    unsupported = (fake_tensor.UnsupportedOperatorException, fake_tensor.UnsupportedFakeTensorException)
    return (*data_dependent_errors(), *unsupported)


# An assertion of torch's own on a tensor, in Python.
assert_tensor = torch._assert


def lacks_fake(error: Exception) -> bool:
    """Whether an error says that an operation has no fake implementation."""
    unsupported = isinstance(error, fake_tensor.UnsupportedOperatorException)
    return unsupported or "There was no fake impl registered" in str(error)


@contextlib.contextmanager
def recomputing(mode: FakeTensorMode) -> Iterator[None]:
    """Run operations on fakes of ``mode`` once more: without new guards on its symbols, and without the real kernels
    on zeros that torch runs for operations that have no fake implementation."""
    quiet = contextlib.nullcontext() if mode.shape_env is None else _without_guards(mode.shape_env)
    fallback, mode.allow_fallback_kernels = mode.allow_fallback_kernels, False
    try:
        with only_mode(mode), torch.no_grad(), quiet:
            yield
    finally:
        mode.allow_fallback_kernels = fallback


@contextlib.contextmanager
def _without_guards(shape_env: Any) -> Iterator[None]:
    """Inside, no guard is added; `surely_equal` knows afterwards which equations would have been."""
    original, assumed = shape_env.evaluate_expr, {}

    def evaluate_expr(expr: Any, *args: Any, **kwargs: Any) -> Any:
        outcome = original(expr, *args, **kwargs)
        if isinstance(expr, (sympy.Eq, sympy.Ne)) and bool(outcome) is isinstance(expr, sympy.Eq):
            assumed[expr.lhs] = expr.rhs
        return outcome

    shape_env._weft_assumed, shape_env.evaluate_expr = assumed, evaluate_expr
    try:
        with shape_env.suppress_guards():
            yield
    finally:
        shape_env.evaluate_expr = original


def unbacked_symbols(tensor: torch.Tensor) -> frozenset[Any]:
    """The symbols in a fake tensor's sizes, strides and offset whose values depend on data."""
    return frozenset(symbolic_shapes.free_unbacked_symbols(tensor))


def surely_equal(a: Any, b: Any) -> bool:
    """Whether two sizes are equal for all values of their symbols that the graph is made for, and that the operations
    recomputed last assume. Adds no guard."""
    if type(a) is int and type(b) is int:
        return a == b
    if str(a) == str(b) or symbolic_shapes.statically_known_true(a == b):
        return True
    if not isinstance(difference := a - b, torch.SymInt):
        return False
    # 2 * (s // 2) is s where s is known to be even.
    node = difference.node
    exact = {
        quotient: quotient.args[0] / quotient.args[1]
        for quotient in node.expr.atoms(FloorDiv)
        if Mod(*quotient.args) in node.shape_env.divisible
    }
    known = getattr(node.shape_env, "_weft_assumed", {})
    return 0 in (sympy.expand(node.expr.xreplace(each)) for each in (exact, known))


# ---- checkpoints


def checkpoint_index_classes() -> dict[tuple[str, str], Any]:
    """What the index of a distributed checkpoint (DCP's ``.metadata``) is made of: module and name to class or
    function. None of them does more than hold values."""
    from torch.distributed.checkpoint import filesystem, metadata

    names = ("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta")
    names = (*names, "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING")
    return {
        **{(metadata.__name__, name): getattr(metadata, name) for name in names},
        (filesystem.__name__, "_StorageInfo"): filesystem._StorageInfo,
        ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    }
