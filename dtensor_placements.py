"""How DTensor places the results of operations while a step is captured: each kind of operation once.

DTensor decides for each operation where its result lies (its sharding). Under a fake mode torch decides anew for every
call, by a fake run of the operation: 0.5 s for the 582 states that AdamW makes of Llama 8B's parameters. A decision
depends on the operation and on the specs of its operands, so a capture keeps it, as torch's eager mode does.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

# Torch's `propagate_op_sharding`: from the schema of a call (its operation and operands) to the sharding of its result.
Place = Callable[[Any], Any]


def placed_once(place: Place) -> Place:
    """``place`` for one capture: called once for calls that are alike, and for calls on lists once for each kind of
    element. Numbers without a value, such as a count of steps, are allowed."""
    return _without_symbols(_by_column(_remembered(place)))


def _without_symbols(place: Place) -> Place:
    """``place`` for calls with symbolic numbers. Torch looks at all arguments and would ask for their values: it gets
    1.0, since no number decides on a placement."""

    def run(schema: Any) -> Any:
        stand_in = lambda value: 1.0 if isinstance(value, torch.SymFloat) else value
        args = tuple(map(stand_in, schema.args_schema))
        kwargs = {key: stand_in(value) for key, value in schema.kwargs_schema.items()}
        values = zip((*args, *kwargs.values()), (*schema.args_schema, *schema.kwargs_schema.values()), strict=True)
        if all(new is old for new, old in values):
            return place(schema)
        found = place(dataclasses.replace(schema, args_schema=args, kwargs_schema=kwargs))
        # Where something has to move, arguments are taken from the plan.
        return place(schema) if found.needs_redistribute else found

    return run


def _by_column(place: Place) -> Place:
    """``place`` for operations on lists (``_foreach_*``, fused optimizers). What torch does with one element depends on
    that element of each list, a column, alone; but it looks at all lists again for each. Of columns that are alike one
    is placed: a model has few kinds of parameters."""

    def run(schema: Any) -> Any:
        columns = _columns(schema)
        try:
            known: dict[Any, int] = {}
            numbers = [known.setdefault(column, len(known)) for column in columns]
        except TypeError:  # symbolic sizes
            return place(schema)
        if len(known) == len(columns):
            return place(schema)
        firsts = [numbers.index(number) for number in range(len(known))]
        args = tuple(type(arg)(arg[at] for at in firsts) if _is_list(arg) else arg for arg in schema.args_schema)
        found = place(dataclasses.replace(schema, args_schema=args))
        specs = found.output_spec
        if found.needs_redistribute:  # the plan for that is one of all elements
            return place(schema)
        if specs is None:
            return found
        return dataclasses.replace(found, output_spec=type(specs)(specs[number] for number in numbers))

    return run


def _columns(schema: Any) -> list[tuple[Any, ...]]:
    """The columns of the lists that an operation is given; none for operations that do not work column by column."""
    operation, args, named = schema.op, schema.args_schema, schema.kwargs_schema.values()
    lists = [arg for arg in args if _is_list(arg)]
    if not operation.name().startswith(("aten::_foreach_", "aten::_fused_")) or len(operation._schema.returns) > 1:
        return []
    if not args or not _is_list(args[0]):  # such as _fused_rms_norm
        return []
    of_all = any(getattr(arg, "ndim", 0) for arg in (*args, *named))  # a tensor with a number for each column
    if of_all or any(map(_is_list, named)) or len({len(each) for each in lists}) != 1:
        return []
    if any(isinstance(entry, (torch.SymInt, torch.SymFloat)) for each in lists for entry in each):
        return []  # two of them cannot be compared
    return list(zip(*([(type(entry), entry) for entry in each] for each in lists), strict=True))


def _is_list(value: Any) -> bool:
    return type(value) in (list, tuple) and len(value) > 0


def _remembered(place: Place) -> Place:
    """``place``, called once for schemas that torch holds for equal. Its own table of them is not used under a fake
    mode, because of symbolic sizes; those cannot be hashed and are placed at each call."""
    known: dict[Any, Any] = {}

    def run(schema: Any) -> Any:
        try:
            found = known.get(schema)
        except TypeError:
            return place(schema)
        if found is None:
            found = known[schema] = place(schema)
        return found

    return run
