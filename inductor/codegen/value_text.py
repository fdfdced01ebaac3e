"""Triton text of single values of a loop nest: expressions, reductions inside a tile, loads and stores.

Which value is computed where, and in which loop, is decided in kernel_body.py.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

import torch

from weft.inductor.codegen import expressions, reductions
from weft.inductor.codegen.canonical import is_position
from weft.inductor.codegen.expressions import AND, ATOM, COMPARE, PRODUCT, SUM, Text, literal, typed
from weft.inductor.codegen.kernel_plan import L2_REUSE_BYTES, Dim, KernelPlan
from weft.inductor.codegen.positions import Positions, Scope, size_text
from weft.inductor.codegen.reductions import Across
from weft.inductor.codegen.thread_layout import thread_layout
from weft.inductor.codegen.triton_text import dtype_name
from weft.inductor.loop_ir.axes import size_hint
from weft.inductor.loop_ir.ir import Call, Const, Index, Load, Nest, Reduce, ReductionResult, Scalar, Store, Value
from weft.inductor.loop_ir.value_ranges import Ranges


class ValueWriter:
    """Writes values of one nest, in the scope that the caller names.

    Args:
        nest: canonical, its reductions in the form for the plan.
        dtypes: of the buffers in memory.
        pointers: the argument that each buffer is.

    Attributes:
        phase: the pass over the loop that is being written, counted from 0.
        later: the values that later row passes and loop passes compute.
        early_loads: loads that were written ahead, in the dtype of memory.
    """

    def __init__(
        self, nest: Nest, plan: KernelPlan, dtypes: Mapping[str, torch.dtype], pointers: Mapping[str, str]
    ) -> None:
        self.nest, self.plan, self.dtypes, self.pointers = nest, plan, dtypes, pointers
        self.looped = frozenset(plan.loop.axes) if plan.loop else frozenset[int]()
        self.ranges = Ranges(nest.sizes)
        self.values = nest.values()
        self.body = Scope()
        self.at = Positions(plan, nest.sizes, self.body)
        # Filled by the subclass, before anything is written.
        self.reloaded = frozenset[Value]()
        self.pass_values: dict[int, list[Value]] = {}
        self.phase = 0
        self.later: list[Sequence[Value]] = []
        self.early_loads: dict[Load, str] = {}
        self.numbers: Counter[str] = Counter()

    def _inside(self, axes: frozenset[int]) -> bool:
        """Whether something that changes along ``axes`` belongs into the loop."""
        # Every value that changes along the loop is computed in it, and no other: all else is hoisted.
        return not axes.isdisjoint(self.looped)

    def _within(self, value: Value) -> bool:
        """Whether a value is computed in the loop."""
        return self._inside(value.axes) or value in self.reloaded

    def _fresh(self, prefix: str) -> str:
        self.numbers[prefix] += 1
        return f"{prefix}{self.numbers[prefix] - 1}"

    # ---- values

    def _expression(self, value: Value, scope: Scope) -> Text:
        if isinstance(value, Const):
            return self._constant(value)
        if isinstance(value, Scalar):
            return Text(str(value.expression))
        if isinstance(value, Load) and is_position(value):
            return self._position(value, scope)
        if isinstance(value, Load):
            return self._load(value, scope)
        if isinstance(value, Call):
            return self._call(value, scope)
        assert isinstance(value, Reduce), value
        return self._reduce(value, scope)

    def _position(self, value: Load, scope: Scope) -> Text:
        """An integer that is affine in the axes, with 32 bits where its range allows."""
        index = value.index
        # 64-bit integers take two registers and several instructions each, so most positions are int32; `narrow`
        # tells users.
        narrow = self.ranges.fits(value)
        # One term for each run of axes; their sum is exact, as the range of the whole is known to fit.
        terms = []
        for dim in self.plan.dims:
            counts = dim.tiling == "loop" and dim.block == 1  # its variable is a plain int to the interpreter
            form = "{}" if dim.wide else "tl.full([], {}, tl.int64)" if counts else "{}.to(tl.int64)"
            found = self.at.terms(index, dim, scope, "{}" if narrow else form)
            if narrow and counts and not dim.wide and len(index.axes) == len(index.axes & frozenset(dim.axes)):
                found = [f"tl.full([], {' + '.join(found)}, tl.int32)"]
            terms += found
            # A wide dimension's variable is int64 already, and makes the sum int64.
            narrow = narrow and not (dim.wide and found)
        terms += [size_text(index.offset)] if index.offset != 0 else []
        code = " + ".join(terms)
        return Text(code, SUM if len(terms) > 1 else PRODUCT if " * " in code else ATOM, narrow)

    def _quads(self, value: Value, scope: Scope) -> str | None:
        """``value // 4`` for each group of four neighbours in a tile, where each group starts at a multiple of four.

        One Philox counter gives four random numbers, so such a group needs one counter instead of four.
        """
        tile = self.plan.tile
        # Groups lie along the last dimension, whose neighbours are neighbours in the shape.
        if not (tile and isinstance(value, Load) and is_position(value) and tile[-1].block % 4 == 0):
            return None
        index, dim = value.index, tile[-1]
        others = {axis: stride for axis, stride in index.strides if axis not in dim.axes}
        # Every other term must be a multiple of 4: a group would start inside a counter's four numbers otherwise.
        steps = [step for step in (index.offset, *others.values()) if isinstance(step, int) and step % 4 == 0]
        if self.at.terms(index, dim, scope) != [dim.name] or len(steps) <= len(others):
            return None
        offset, *strides = (step // 4 for step in steps)
        rest = Index(zip(others, strides, strict=True), offset)
        name = self.at.quads(dim, scope)
        if rest == Index():
            return name
        return f"{self._position(Load(value.buffer, rest, value.dtype), scope)} + {name}"

    def _constant(self, value: Const) -> Text:
        # Types that Triton gives a bare literal, or that take the type of what is next to it without a loss.
        plain = value.dtype in (torch.float32, torch.int64, torch.int32, torch.bool)
        return literal(value.value, value.dtype) if plain else typed(value.value, value.dtype)

    def _call(self, value: Call, scope: Scope) -> Text:
        if value.op == "rand" and (quads := self._quads(value.args[1], scope)) is not None:
            code = f"uniform_quads({scope.text(value.args[0])}, {quads})"
            return expressions.call("tl.reshape", code, self.at.shape(self.at.tile(value.axes)))
        if value.op == "eq" and (found := self._compare_within_block(value, scope)) is not None:
            return found
        if value.op == "checked_index":
            self._assert_in_range(value, scope)
        # 32-bit operands give a 32-bit result, which wraps around silently where it does not fit.
        fits = value.dtype == torch.int64 and self.ranges.fits(value)
        operands = []
        for arg in value.args:
            text = scope.text(arg)
            if isinstance(arg, Const):
                text = literal(arg.value, arg.dtype) if value.op in expressions.INFIX else text
            elif text.narrow and value.dtype == torch.int64 and not fits:
                text = expressions.cast(Text(text.code, text.level), torch.int64)
            operands.append(text)
        # C's division and Python's agree here, so no instructions correct the sign.
        if value.op in _OF_NONNEGATIVE and all(self.ranges.nonnegative(arg) for arg in value.args):
            text = expressions.infix(_OF_NONNEGATIVE[value.op], PRODUCT, *operands)
        else:
            text = expressions.write(value, operands)
        # One 64-bit operand makes the result 64 bits in Triton, whether or not its range needs them.
        whole = [text.narrow for text, arg in zip(operands, value.args, strict=True) if arg.dtype == torch.int64]
        return Text(text.code, text.level, narrow=fits and all(whole))

    def _assert_in_range(self, value: Call, scope: Scope) -> None:
        """Write the assertion of a position that the data decides, in the elements that the nest has."""
        position, size, condition = value.args
        at, end = (scope.text(each).at(SUM) for each in (position, size))
        of = f" of a dimension of {end}" if isinstance(size, Const) else ""
        masks = self._masks(value.axes, None if isinstance(condition, Const) else condition, scope)
        mask = f", mask={' & '.join(masks)}" if masks else ""
        scope.lines.append(f'tl.device_assert(({at} >= 0) & ({at} < {end}), "index out of range{of}"{mask})')

    def _compare_within_block(self, value: Call, scope: Scope) -> Text | None:
        """``position == number`` with 32 bits, as a comparison of offsets inside the loop's block.

        Offsets are in registers. Compilers compute a position, which addresses need too, with 64 bits: an addition and
        two comparisons for every element instead of one.
        """
        place, number = value.args
        dim = self.plan.loop
        if dim is None or self.plan.tile != (dim,) or dim.wide or number.dtype != torch.int32 or self._within(number):
            return None
        if not (isinstance(place, Load) and is_position(place) and self._position(place, scope).code == dim.name):
            return None
        here = Text(f"tl.arange(0, {dim.block_name})")
        return expressions.infix("==", COMPARE, here, Text(f"{scope.text(number).at(SUM)} - {dim.name}_start", SUM))

    # ---- reductions

    def _across(self, reduce: Reduce) -> tuple[Across, frozenset[Dim]]:
        """How a reduction goes across its tile, and the dimensions of the tile."""
        # Only dimensions of the tile: along a loop's scalar index the accumulator adds up, one element at a time.
        over = self.at.tile(reduce.over)
        dims = over | self.at.tile(axis for arg in reduce.args for axis in arg.axes)
        tile = self.plan.tile
        # The last dimension is reduced first, which leaves the numbers of the others as they are.
        left = [at for at, dim in enumerate(tile) if dim in dims - over]
        if not left:
            return Across(tuple(range(len(tile)))[::-1] if dims else (), ""), dims
        positions = tuple(at for at in reversed(range(len(tile))) if tile[at] in over)
        # The result must broadcast against tiles again, so the reduced dimension comes back with size 1.
        suffix = "" if not positions or len(tile) == 1 else "[:, None]" if left[0] == 0 else "[None, :]"
        return Across(positions, suffix), dims

    def _arguments(self, reduce: Reduce, scope: Scope) -> list[str]:
        """The reduction's arguments, in the types and the shape that it works on."""
        _, dims = self._across(reduce)
        codes = []
        for arg in reduce.args:
            text = scope.text(arg)
            if isinstance(arg, Const):
                text = typed(arg.value, arg.dtype)
            if arg is reduce.args[0] and reduce.dtype == torch.bool:
                text = expressions.truth(text, arg.dtype)
            elif arg is reduce.args[0] and reduce.dtype != arg.dtype:
                text = expressions.cast(text, reduce.dtype)
            elif text.narrow:
                text = expressions.cast(text, torch.int64)
            # A sum counts a value at every point, also along dimensions that the value does not change along.
            broadcast = self.at.tile(arg.axes) != dims
            codes.append(f"tl.broadcast_to({text}, {self.at.shape(dims)})" if broadcast else str(text))
        return codes

    def _accumulator(self, reduce: Reduce) -> reductions.Accumulator:
        across, dims = self._across(reduce)
        name, shape = self._fresh("acc"), self.at.shape(dims)
        layout = thread_layout(self.plan, self.pass_values[self.phase], self.dtypes)
        return reductions.accumulator(reduce.kind, name, [reduce.dtype], shape, across, layout)

    def _mask_of_reduction(self, reduce: Reduce, scope: Scope) -> str | None:
        """The mask of a reduction's tile, None where it has no tail or where the tail is known to add nothing."""
        # Only reduced dimensions: garbage in the tail of another one stays in its own, unstored, elements.
        dims = [dim for dim in self.plan.dims_of(frozenset(reduce.over)) if dim.masked]
        if not dims or (reduce.kind == "sum" and all(self._zero_outside(reduce.args[0], dim) for dim in dims)):
            return None
        return " & ".join(self.at.mask(dim, scope) for dim in self.plan.dims if dim in dims)

    def _zero_outside(self, value: Value, dim: Dim) -> bool:
        """Whether a value is known to be 0 in the masked tail of a dimension."""
        if isinstance(value, Load):
            # The load is masked along the dimension, and `other` stands in its tail.
            return value.other == 0 and not is_position(value) and dim in self.plan.dims_of(value.axes)
        # All factors of a product, not one: zero times infinity is NaN.
        if isinstance(value, Call) and value.op in ("mul", "neg", "abs", "to", "add", "sub"):
            return all(self._zero_outside(arg, dim) for arg in value.args)
        return False

    def _reduce(self, reduce: Reduce, scope: Scope) -> Text:
        """A reduction inside one tile."""
        across, _ = self._across(reduce)
        mask = self._mask_of_reduction(reduce, scope)
        texts = self._arguments(reduce, scope)
        if mask is not None:
            texts[0] = f"tl.where({mask}, {texts[0]}, {reductions.identity(reduce.kind, reduce.dtype)})"
        if not reduce.kind.startswith("arg"):
            return Text(reductions.across(reduce.kind, texts[0], reduce.dtype, across), COMPARE)
        return self._arg_reduce(reduce, texts, mask, across, scope)

    def _arg_reduce(self, reduce: Reduce, texts: list[str], mask: str | None, across: Across, scope: Scope) -> Text:
        value = self._fresh("v")
        best, position = reductions.arg_across(reduce.kind, value, texts[1], mask, reduce.dtype, across)
        name = self._fresh("best")
        scope.lines += [f"{value} = {texts[0]}", f"{name} = {best}"]
        at = self._fresh("at")
        scope.lines.append(f"{at} = {position.format(best=name)}")
        self._name_parts(reduce, [name, at], scope)
        return Text(name)  # not used: the parts are

    def _name_results(self, reduce: Reduce, results: list[str]) -> None:
        names = []
        for result in results:
            if result.isidentifier():
                names.append(result)
                continue
            names.append(self._fresh(reduce.kind))
            self.body.lines.append(f"{names[-1]} = {result}")
        self.body.names[reduce] = Text(names[0])
        self._name_parts(reduce, names, self.body)

    def _name_parts(self, reduce: Reduce, names: list[str], scope: Scope) -> None:
        for value in self.values:
            if isinstance(value, ReductionResult) and value.reduce is reduce:
                scope.names[value] = Text(names[value.at])

    # ---- memory

    def _pointer(self, buffer: str, index: Index, axes: frozenset[int], dims: frozenset[Dim], scope: Scope) -> str:
        """The address of ``buffer[index]``, as a tile along ``dims``."""
        # Scalar terms are added to the pointer itself: elements of a tile share a base and differ in small offsets.
        # 32-bit offsets then suffice for tensors of any size, as long as one tile's reach fits.
        alone = [size_text(index.offset)] if index.offset != 0 else []
        tiled = []
        for dim in self.plan.dims:
            (tiled if dim.block > 1 else alone).extend(self.at.terms(index, dim, scope))
        for value, stride in index.indirect:
            text = scope.text(value)
            # Data decides how large the product with the stride is, so it is computed with 64 bits.
            if value.dtype != torch.int64 or (text.narrow and not isinstance(value, Const)):
                text = expressions.cast(text, torch.int64)
            term = text.at(SUM + 1) if stride == 1 else f"{text.at(PRODUCT)} * {size_text(stride)}"
            (tiled if self.at.tile(value.axes) else alone).append(term)
        # The mask or the stored value may change along more dimensions; the pointer needs the shape of all.
        if self.at.tile(index.axes) != dims:
            tiled.append(f"tl.zeros({self.at.shape(dims)}, tl.int32)")
        offset = " + ".join(tiled)
        return " + ".join(
            [self.pointers[buffer], *alone, *([f"({offset})" if len(tiled) > 1 else offset] * bool(tiled))]
        )

    def _masks(self, axes: frozenset[int], mask: Value | None, scope: Scope) -> list[str]:
        dims = [dim for dim in self.plan.dims if dim in self.plan.dims_of(axes) and dim.masked]
        masks = [self.at.mask(dim, scope) for dim in dims]
        if isinstance(mask, Const):
            return [*masks, str(typed(mask.value, mask.dtype))]
        return masks if mask is None else [*masks, scope.text(mask).at(AND + 1)]

    def _load(self, load: Load, scope: Scope) -> Text:
        ahead = self.early_loads.pop(load, None)
        code, types = ahead or self._load_text(load, scope), (self.dtypes[load.buffer], load.dtype)
        if (
            # With resident blocks arithmetic bounds the loop too: one instruction for each conversion instead of two.
            types == (torch.bfloat16, torch.float32)
            and self.plan.resident_blocks
            and not ahead
            and self._inside(load.axes)
        ):
            return Text(f"widen_bfloat16({code}, ARCH)")
        return Text(code if types[0] == types[1] else f"{code}.to({dtype_name(load.dtype)})")

    def _load_text(self, load: Load, scope: Scope) -> str:
        """A load in the dtype of memory."""
        dims = self.at.tile(load.axes)
        masks = self._masks(load.axes, load.mask, scope)
        args = [self._pointer(load.buffer, load.index, load.axes, dims, scope)]
        if masks:
            args.append(" & ".join(masks))
        # Tails of a loop or of a whole row take part in reductions, so their elements need a value. Elements behind
        # the end of the grid reach no result: their stores are masked.
        reaches = any(dim.masked and dim.tiling != "grid" for dim in self.plan.dims_of(load.axes))
        if load.mask is not None or reaches:
            args.append(f"other={literal(load.other, self.dtypes[load.buffer])}")
        if (hint := self._eviction(load)) is not None:
            args.append(f'eviction_policy="{hint}"')
        return f"tl.load({', '.join(args)})"

    def _eviction(self, load: Load) -> str | None:
        """The eviction policy of a load: what a later pass or another program loads again is kept, the rest is not."""
        # The same for all programs: a weight, a table.
        if not any(dim.tiling == "grid" for dim in self.plan.dims_of(load.axes)):
            return "evict_last" if self.plan.grid and load.axes else None
        # A program's row, held whole: loaded once, and the default policy is as good as any.
        if not self._inside(load.axes):
            return None
        # A load that was issued early is itself one of the later passes' loads, so it has to be found once more.
        again = sum(load in values for values in self.later)
        return "evict_last" if again > (load in self.early_loads) else "evict_first"

    def _store(self, store: Store, scope: Scope) -> None:
        conditions, axes = self._single_writer(store, scope)
        dims = self.at.tile(axes)
        masks = self._masks(axes, store.mask, scope) + conditions
        value = scope.text(store.value)
        args = [self._pointer(store.buffer, store.index, axes, dims, scope), str(value)]
        if masks:
            args.append(" & ".join(masks))
        if self._evicts_first(store):
            args.append('eviction_policy="evict_first"')
        scope.lines.append(f"tl.store({', '.join(args)})")

    def _evicts_first(self, store: Store) -> bool:
        """Whether a store should be evicted first from the L2 cache.

        So it is in a later pass over rows, whose rows wait in the cache to be read again, if the store is too large for
        the next kernel to find it there. (5% of a cross-entropy of 8192 rows of 128256, on an H200.)
        """
        elements = math.prod(size_hint(self.nest.sizes[axis]) for axis in store.axes)
        again = self.plan.shape == "row" and self.phase > 0 and self._inside(store.axes)
        return again and elements * self.dtypes[store.buffer].itemsize > L2_REUSE_BYTES

    def _single_writer(self, store: Store, scope: Scope) -> tuple[list[str], frozenset[int]]:
        """Conditions that let one point store where many would store the same, and the axes of store and conditions."""
        conditions, axes = [], store.axes
        for dim in self.plan.dims:
            missing = [at for at, axis in enumerate(dim.axes) if axis not in store.axes]
            if not missing or (len(missing) == len(dim.axes) and dim.tiling != "grid"):
                continue
            # The condition is a tile along this dimension, so the store has to be one too.
            axes |= frozenset(dim.axes)
            # The first block along a dimension of the grid stores for all of them.
            if len(missing) == len(dim.axes):
                conditions.append(f"({self.at.index(dim, scope)} == 0)")
            else:
                conditions += [f"({self.at.run(dim, at, at, scope)} == 0)" for at in missing]
        return conditions, axes


# Triton's // and % of integers round towards zero as C's do; without negative numbers all of these agree.
_OF_NONNEGATIVE = {"floordiv": "//", "truncdiv": "//", "mod": "%", "fmod": "%"}
