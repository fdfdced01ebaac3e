"""What becomes of each function of numpy that is given an array whose values exist only when a step runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from weft.capture.record.host_arrays import HostArray, names
from weft.capture.user_code import in_raise_statement, user_line
from weft.errors import TextOfValue

# Functions that write to their first argument and return nothing.
_WRITING = names("copyto fill_diagonal place put put_along_axis putmask")
# The shape of the result depends on values.
_SIZED = names(
    "argwhere bincount compress extract flatnonzero intersect1d nonzero setdiff1d setxor1d trim_zeros union1d "
    "unique unique_all unique_counts unique_inverse unique_values"
)
# It depends on the values of an argument other than the first.
_SIZED_BY_OTHERS = frozenset({"delete", "repeat"})
# Numbers among the arguments are sizes or places, which must be plain.
_PLAIN = names(
    "array_split broadcast_to dsplit expand_dims hsplit moveaxis pad repeat reshape resize rollaxis split "
    "swapaxes tile trace transpose tri tril triu vander vsplit full_like zeros_like ones_like empty_like arange "
    "linspace"
)
# They tell what an array is without its values.
_TELLING = names("can_cast common_type iscomplexobj isrealobj iterable min_scalar_type ndim result_type shape size")
_TEXTS = names("array2string array_repr array_str")
_REFUSED = names(
    "apply_along_axis apply_over_axes einsum_path get_printoptions may_share_memory piecewise save savetxt savez "
    "savez_compressed shares_memory"
)


def dispatch(owner: Any, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call ``function`` through ``owner``, an :class:`~weft.capture.record.array_recorder.ArrayRecorder`.

    Raises:
        UncapturableDraw: the function has no place in a graph.
        TextOfValue: it makes text of values.
    """
    name = function.__name__
    if name in _REFUSED:
        raise owner.refusal(f"numpy.{name}", "it does with a drawn array what a graph has no place for")
    if name in _TEXTS:
        raise TextOfValue(user_line(), in_raise=in_raise_statement())
    if name in _TELLING:
        shown = [each.weft_sample if type(each) is HostArray else each for each in args]
        return function(*shown, **kwargs)
    if name in _WRITING:
        target = args[0] if args else next((kwargs[each] for each in ("a", "arr", "dst") if each in kwargs), None)
        return owner.call(function, args, kwargs, writes=target)
    if kwargs.get("out") is not None:
        out = kwargs["out"][0] if isinstance(kwargs["out"], tuple) else kwargs["out"]
        owner.call(function, args, {**kwargs, "out": out}, writes=out)
        return out
    if name in _PLAIN:
        args, kwargs = owner.plain((args, kwargs))
    others = any(type(each) is HostArray for each in (*args[1:], *kwargs.values()))
    sized = name in _SIZED or (name in _SIZED_BY_OTHERS and others) or (name == "where" and len(args) == 1)
    return owner.call(function, args, kwargs, sized=sized)


def dispatch_ufunc(owner: Any, ufunc: Any, method: str, inputs: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """The same of a ``numpy.ufunc``: itself (``"__call__"``), or a method such as ``reduce``."""
    out = options.pop("out", (None,))
    function = ufunc if method == "__call__" else getattr(ufunc, method)
    if method == "at":
        return owner.call(function, inputs, options, writes=inputs[0])
    if all(each is None for each in out):
        return owner.call(function, inputs, options)
    if len(out) > 1:
        raise owner.refusal(ufunc.__name__, "it writes several arrays", "leave out= away")
    owner.call(function, inputs, {**options, "out": out[0]}, writes=out[0])
    return out[0]
