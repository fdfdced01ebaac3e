"""The text of a kernel, from a nest and the plan of its kernel.

Every value is one statement, in the outermost block where it can be computed; short ones that are used once are
written where they are used. A loop is walked once for each reduction along it that another waits for; what its later
walks need of the tensors, they load again, but for blocks that are held (:mod:`.held`). So do the segments of a loop's
body (:mod:`.segments`), which have names of their own for what they compute again.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from weft.inductor.axes import magnitude
from weft.inductor.codegen import expressions, reductions
from weft.inductor.codegen.canonical import is_position
from weft.inductor.codegen.expressions import AND, ATOM, COMPARE, PRODUCT, SUM, Text, dtype_name, literal, typed
from weft.inductor.codegen.held import block_start, read_again, words
from weft.inductor.codegen.plan import CACHE, MULTIPROCESSORS, Dim, Plan, depths
from weft.inductor.codegen.positions import Positions, Scope, size_text
from weft.inductor.codegen.ranges import Ranges
from weft.inductor.codegen.reductions import Across
from weft.inductor.codegen.segments import Segment, segments
from weft.inductor.codegen.spread import spread
from weft.inductor.ir import Call, Const, Index, Int, Load, Nest, Part, Reduce, Scalar, Store, Value

_SHARED_BEFORE_HOPPER = 72 * 1024  # bytes for loads in flight: an L40S has 99 KiB for a program, an A100 163
_LONGEST = 56  # characters of an expression that is written inside another


class Body:
    """The statements that one nest becomes.

    Args:
        nest: canonical, its reductions in the form for the plan.
        dtypes: of the buffers.
        pointers: the argument that each buffer is.
    """

    def __init__(self, nest: Nest, plan: Plan, dtypes: Mapping[str, torch.dtype], pointers: Mapping[str, str]) -> None:
        self.nest, self.plan, self.dtypes, self.pointers = nest, plan, dtypes, pointers
        self.looped = frozenset(plan.loop.axes) if plan.loop else frozenset[int]()
        self.ranges = Ranges(nest.sizes)
        self.values = nest.values()
        self.depth = depths(nest, self.looped)
        self.last = max((self.depth[value] for value in self.values), default=0)
        self.loaded = {load.buffer for load in nest.reads}
        self.body = Scope()
        self.at = Positions(plan, nest.sizes, self.body)
        self.reread = self._reread() if plan.rereads else frozenset[Value]()
        self.walks = {phase: self._walk(phase) for phase in range(self.last + 1)} if plan.loop else {}
        self.phase = 0
        self.later: list[Sequence[Value]] = []  # what later segments and walks of the loop compute
        self.asked: dict[Load, str] = {}  # loads that were written ahead, in the type that is in memory
        self.held: dict[Load, list[str]] = {}  # the words of each block that stays in registers
        self.numbers: Counter[str] = Counter()

    def statements(self) -> list[str]:
        """The function's body, without indentation."""
        for phase in range(self.last + 1):
            self.phase = phase
            self._straight(phase)
            if self.plan.loop and (self._gathered(phase) or self._stores(phase, inside=True)):
                self._loop(self.plan.loop, phase)
        return self.body.statements()

    # ---- which value is computed where

    def _inside(self, axes: frozenset[int]) -> bool:
        """Whether something that changes along ``axes`` belongs into the loop."""
        return not axes.isdisjoint(self.looped)

    def _within(self, value: Value) -> bool:
        """Whether a value is computed in the loop."""
        return self._inside(value.axes) or value in self.reread

    def _reread(self) -> frozenset[Value]:
        """Tiles that are the same in every iteration and that only the loop needs, from their loads on."""
        outside = {value for store in self.nest.stores if not self._inside(store.axes) for value in store.values()}
        found: set[Value] = set()
        for value in reversed(self.values):
            users = [user for user in self.values if value in user.operands()]
            needed = all(self._inside(user.axes) or self._along_loop(user) or user in found for user in users)
            tiled = bool(self.at.tile(value.axes)) and not is_position(value) and not isinstance(value, Reduce)
            if tiled and needed and value not in outside and not self._inside(value.axes):
                found.add(value)
        return frozenset(found)

    def _stores(self, phase: int, *, inside: bool) -> list[Store]:
        return [s for s in self.nest.stores if self._inside(s.axes) == inside and self._due(s) == phase]

    def _due(self, store: Store) -> int:
        """The walk of the loop after or in which a store happens: the first that can, but the last if the buffer is
        read too, as a later walk reads it again."""
        return self.last if store.buffer in self.loaded else max(self.depth[value] for value in store.values())

    def _gathered(self, phase: int) -> list[Reduce]:
        """Reductions along the loop that its walk number ``phase`` computes."""
        return [reduce for reduce in self.nest.reduces if self._along_loop(reduce) and self.depth[reduce] == phase + 1]

    def _along_loop(self, value: Value) -> bool:
        return isinstance(value, Reduce) and not self.looped.isdisjoint(value.over)

    def _walk(self, phase: int) -> list[Value]:
        """The values that walk number ``phase`` of the loop computes, operands first."""
        roots = [arg for reduce in self._gathered(phase) for arg in reduce.args]
        roots += [value for store in self._stores(phase, inside=True) for value in store.values()]
        needed: set[Value] = set()
        stack = [root for root in roots if self._within(root)]
        while stack:
            value = stack.pop()
            if value not in needed:
                needed.add(value)
                stack += (operand for operand in value.operands() if self._within(operand))
        return [value for value in self.values if value in needed]

    # ---- blocks of statements

    def _straight(self, phase: int) -> None:
        """What does not change along the loop, between two walks of it."""
        here = [
            value
            for value in self.values
            if self.depth[value] == phase and not self._within(value) and not self._is_result(value)
        ]
        elsewhere = {
            operand
            for value in self.values
            if self._within(value) or self.depth[value] != phase or self._along_loop(value)
            for operand in value.operands()
        }
        stores = self._stores(phase, inside=False)
        elsewhere |= {v for store in self.nest.stores if store not in stores for v in store.values()}
        self._compute(here, stores, [], elsewhere, self.body)

    def _is_result(self, value: Value) -> bool:
        return self._along_loop(value) or (isinstance(value, Part) and self._along_loop(value.reduce))

    def _loop(self, dim: Dim, phase: int) -> None:
        if phase == 0 and self.plan.held:
            self._hold(dim)
        gathered = {reduce: self._accumulator(reduce) for reduce in self._gathered(phase)}
        for accumulator in gathered.values():
            self.body.lines += accumulator.before()
        held = [load for load in self.walks[phase] if load in self.held]
        # What was read last is in a cache still; the last walk has no sums that another order would change.
        backwards = bool(held) and phase == self.last
        for row in self.plan.grid if backwards else ():  # of the program that the multiprocessor takes next
            self.body.lines += self._prefetches(held, row, MULTIPROCESSORS, dim, self.plan.held * dim.block, self.body)
        plan, at, part = self.plan, self.at, self._ends_in_a_part(dim)
        # The mask of the last block would cost a comparison and a selection for every element of all blocks.
        full = replace(dim, size=dim.size // dim.block * dim.block) if part else dim
        self.plan = replace(plan, dims=tuple(full if one is dim else one for one in plan.dims))
        self.at = Positions(self.plan, self.nest.sizes, self.body)
        first = self._held_blocks(full, held, phase, gathered)
        rest = [] if first == full.size else [self._walk_on(full, self._iteration(phase, gathered), first, backwards)]
        self.plan, self.at = plan, at
        if part:
            rest.append([f"{dim.name}_start = {full.size}", *self._iteration(phase, gathered).statements()])
        for lines in reversed(rest) if backwards else rest:
            self.body.lines += lines
        for reduce, accumulator in gathered.items():
            statements, results = accumulator.after()
            self.body.lines += statements
            self._name_results(reduce, results)

    def _hold(self, dim: Dim) -> None:
        """Load what is held, before anything waits for any of it."""
        for load in read_again(self.plan, self.nest, self.dtypes):
            self.held[load] = [self._fresh("held") for _ in range(self.plan.held)]
            for block, name in enumerate(self.held[load]):
                at = block_start(load, dim, block)
                start = self._pointer(load.buffer, at, at.axes, frozenset(), self.body)
                self.body.lines.append(f"{name} = {words(start, dim, self.dtypes[load.buffer].itemsize)}")

    def _held_blocks(
        self, dim: Dim, held: Sequence[Load], phase: int, gathered: Mapping[Reduce, reductions.Accumulator]
    ) -> int:
        """Write what a walk does with the blocks that are held, one after the other; where the others start."""
        blocks = self.plan.held if held else 0
        for block in range(blocks):
            for load in held:
                name = self.held[load][block] if phase == 0 else f"again({self.held[load][block]}, ARCH)"
                self.asked[load] = f"unpacked({name}, {self.pointers[load.buffer]})"
            self.body.lines += [f"{dim.name}_start = {block * dim.block}"]
            self.body.lines += self._iteration(phase, gathered).statements()
        return blocks * dim.block

    def _ends_in_a_part(self, dim: Dim) -> bool:
        """Whether full blocks and then a part of one make up a loop over rows."""
        return self.plan.tile == (dim,) and dim.masked and isinstance(dim.size, int) and dim.size > dim.block

    def _iteration(self, phase: int, gathered: Mapping[Reduce, reductions.Accumulator]) -> Scope:
        """What walk number ``phase`` does with one block."""
        scope = inner = Scope(self.body)
        parts = self._segments(phase)
        if self.plan.segmented:
            scope.lines += self._next_row(self.walks[phase], scope)
        for at, part in enumerate(parts):
            self.later = [*(later.values for later in parts[at + 1 :]), *self._later_walks()]
            if at > 0:
                inner = Scope(inner, scope)
                # Without it compilers take the second load of a row for the first.
                inner.lines.append("tl.debug_barrier()")
            self._segment(part, gathered, inner)
        return scope

    def _next_row(self, values: Sequence[Value], scope: Scope) -> list[str]:
        """Ask for the next row while this one is computed: loads in flight would need the memory of the first-level
        cache. Measured on an H200 in LayerNorm's backward of 16384 columns: 188 us without, 173 with."""
        loop, row = self.plan.loop, next(dim for dim in self.plan.dims if dim.walk == "whole")
        if loop is None or loop.block > 1:
            return []
        loads = [v for v in values if isinstance(v, Load) and not is_position(v) and self._inside(v.axes)]
        return self._prefetches(loads, loop, 1, row, row.size, scope)

    def _prefetches(self, loads: Sequence[Load], rows: Dim, ahead: int, dim: Dim, size: Int, scope: Scope) -> list[str]:
        """Ask for the first elements along ``dim`` of the row that is so many ``ahead``, or of the last."""
        lines = []
        for load in loads:
            index, itemsize = load.index, self.dtypes[load.buffer].itemsize
            outside = Index([pair for pair in index.strides if pair[0] not in dim.axes], index.offset)
            steps = [size, outside.offset, *(stride for _, stride in outside.strides)]
            if load.operands() or len(rows.axes) > 1 or len(dim.axes) > 1 or index.stride(dim.axes[0]) != 1:
                continue
            if magnitude(rows.size) > ahead and all(isinstance(n, int) and n * itemsize % 16 == 0 for n in steps):
                start = self._pointer(load.buffer, outside, outside.axes, frozenset(), scope)
                n, last = rows.name, size_text(rows.size - 1)
                step = f"(tl.minimum({n} + {ahead}, {last}) - {n}) * {outside.stride(rows.axes[0])}"
                lines.append(f"prefetch({start} + {step}, {size * itemsize}, ARCH, ALIGNED)")
        return lines

    def _segments(self, phase: int) -> list[Segment]:
        whole = Segment(self.walks[phase], self._gathered(phase), self._stores(phase, inside=True))
        if not self.plan.segmented:
            return [whole]
        along = frozenset(axis for dim in self.plan.dims if dim.walk == "whole" for axis in dim.axes)
        return segments(whole, along, self.looped, depths(self.nest, along))

    def _segment(self, part: Segment, gathered: Mapping[Reduce, reductions.Accumulator], scope: Scope) -> None:
        for load in part.ahead:
            name = self.asked[load] = self._fresh("v")
            scope.lines.append(f"{name} = {self._asked(load, scope)}")
        self._compute(part.values, part.stores, [*part.gathered, *part.ends], set(part.kept), scope)
        for reduce in part.gathered:
            mask = self._mask_of_reduction(reduce, scope)
            scope.lines += gathered[reduce].step(self._arguments(reduce, scope), mask)
        for store in part.stores:
            self._store(store, scope)
        self._compute(part.ends, [], [], set(part.kept), scope)

    def _walk_on(self, dim: Dim, scope: Scope, first: int, backwards: bool) -> list[str]:
        """The loop over the blocks behind those before ``first``, the last one first where it goes ``backwards``."""
        size = size_text(dim.size)
        start = dim.name if dim.block == 1 and not dim.wide else f"{dim.name}_start"
        step = "1" if dim.block == 1 else dim.block_name
        lines = [f"    {line}" for line in scope.statements()]
        if isinstance(dim.size, int):
            stages = str(self.plan.stages)
            if self.plan.ahead > _SHARED_BEFORE_HOPPER:
                stages += " if ARCH >= 90 else 1"
            loads_ahead = self.plan.stages > 1
            # Compilers see how what is loaded is aligned where both bounds are.
            last = f"{dim.size - dim.block}, {first - dim.block}, -{step}"
            bounds = last if backwards else f"{first}, {size}, {step}"
            walk = f"tl.range({bounds}, num_stages={stages})" if loads_ahead else f"range({bounds})"
            return [f"for {start} in {walk}:", *lines]
        # A range with bounds that are not constants fails in Triton's interpreter.
        return [f"{start} = 0", f"while {start} < {size}:", *lines, f"    {start} += {step}"]

    def _compute(
        self,
        values: Sequence[Value],
        stores: Sequence[Store],
        gathered: list[Reduce],
        elsewhere: set[Value],
        scope: Scope,
    ) -> None:
        """Statements for ``values``, and outside the loop for ``stores`` behind them."""
        uses: Counter[Value] = Counter()
        for user in (*values, *gathered):
            for operand in user.operands():
                uses[operand] += 2 if _repeats(user) else 1
        for store in stores:
            uses.update(store.values())
        for value in values:
            if value in scope.names:
                continue  # a result of a reduction with several
            text = self._expression(value, scope)
            inline = uses[value] <= 1 and value not in elsewhere and len(text.code) <= _LONGEST
            plain = isinstance(value, (Const, Scalar)) or (is_position(value) and text.level == ATOM)
            if plain or (inline and (isinstance(value, (Call, Part)) or is_position(value))):
                scope.names[value] = text
            else:
                self._name(value, text, scope)
        if scope is self.body:
            for store in stores:
                self._store(store, scope)

    def _name(self, value: Value, text: Text, scope: Scope) -> None:
        name = self._fresh(value.kind if isinstance(value, Reduce) else "v")
        scope.lines.append(f"{name} = {text}")
        scope.names[value] = Text(name, ATOM, text.narrow)

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
        """A whole number that is affine in the axes."""
        index = value.index
        narrow = self.ranges.fits(value)
        terms = []
        for dim in self.plan.dims:
            counts = dim.walk == "loop" and dim.block == 1  # its variable is a plain int to the interpreter
            form = "{}" if dim.wide else "tl.full([], {}, tl.int64)" if counts else "{}.to(tl.int64)"
            found = self.at.terms(index, dim, scope, "{}" if narrow else form)
            if narrow and counts and not dim.wide and len(index.axes) == len(index.axes & frozenset(dim.axes)):
                found = [f"tl.full([], {' + '.join(found)}, tl.int32)"]
            terms += found
            narrow = narrow and not (dim.wide and found)
        terms += [size_text(index.offset)] if index.offset != 0 else []
        code = " + ".join(terms)
        return Text(code, SUM if len(terms) > 1 else PRODUCT if " * " in code else ATOM, narrow)

    def _quads(self, value: Value, scope: Scope) -> str | None:
        """``value // 4`` with a quarter of its points, where each four neighbours of a tile count on from a multiple
        of four: these share one counter of the random numbers."""
        tile = self.plan.tile
        if not (tile and isinstance(value, Load) and is_position(value) and tile[-1].block % 4 == 0):
            return None
        index, dim = value.index, tile[-1]
        others = {axis: stride for axis, stride in index.strides if axis not in dim.axes}
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
        plain = value.dtype in (torch.float32, torch.int64, torch.int32, torch.bool)
        return literal(value.value, value.dtype) if plain else typed(value.value, value.dtype)

    def _call(self, value: Call, scope: Scope) -> Text:
        if value.op == "rand" and (quads := self._quads(value.args[1], scope)) is not None:
            code = f"uniform_quads({scope.text(value.args[0])}, {quads})"
            return expressions.call("tl.reshape", code, self.at.shape(self.at.tile(value.axes)))
        if value.op == "eq" and (found := self._found_in_block(value, scope)) is not None:
            return found
        fits = value.dtype == torch.int64 and self.ranges.fits(value)
        operands = []
        for arg in value.args:
            text = scope.text(arg)
            if isinstance(arg, Const):
                text = literal(arg.value, arg.dtype) if value.op in expressions.INFIX else text
            elif text.narrow and value.dtype == torch.int64 and not fits:
                text = expressions.cast(Text(text.code, text.level), torch.int64)
            operands.append(text)
        if value.op in _OF_NATURALS and all(self.ranges.natural(arg) for arg in value.args):
            text = expressions.infix(_OF_NATURALS[value.op], PRODUCT, *operands)
        else:
            text = expressions.write(value, operands)
        whole = [text.narrow for text, arg in zip(operands, value.args, strict=True) if arg.dtype == torch.int64]
        return Text(text.code, text.level, narrow=fits and all(whole))

    def _found_in_block(self, value: Call, scope: Scope) -> Text | None:
        """``position == number`` of 32 bits as a comparison of places in the loop's block: these are in registers,
        while compilers compute a position, which goes into addresses too, with 64 bits (an addition and two comparisons
        for every element instead of one)."""
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
        """How a reduction goes across its tile, and the tile's dimensions."""
        over = self.at.tile(reduce.over)
        dims = over | self.at.tile(axis for arg in reduce.args for axis in arg.axes)
        tile = self.plan.tile
        left = [at for at, dim in enumerate(tile) if dim in dims - over]
        if not left:
            return Across(tuple(range(len(tile)))[::-1] if dims else (), ""), dims
        positions = tuple(at for at in reversed(range(len(tile))) if tile[at] in over)
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
            broadcast = self.at.tile(arg.axes) != dims
            codes.append(f"tl.broadcast_to({text}, {self.at.shape(dims)})" if broadcast else str(text))
        return codes

    def _accumulator(self, reduce: Reduce) -> reductions.Accumulator:
        across, dims = self._across(reduce)
        name, shape = self._fresh("acc"), self.at.shape(dims)
        lies = spread(self.plan, self.walks[self.phase], self.dtypes)
        return reductions.accumulator(reduce.kind, name, [reduce.dtype], shape, across, lies)

    def _mask_of_reduction(self, reduce: Reduce, scope: Scope) -> str | None:
        """Where the argument's tile has elements, None where all of it has or the rest does not count."""
        dims = [dim for dim in self.plan.dims_of(frozenset(reduce.over)) if dim.masked]
        if not dims or (reduce.kind == "sum" and all(self._zero_outside(reduce.args[0], dim) for dim in dims)):
            return None
        return " & ".join(self.at.mask(dim, scope) for dim in self.plan.dims if dim in dims)

    def _zero_outside(self, value: Value, dim: Dim) -> bool:
        """Whether a value is known to be 0 behind the end of a dimension."""
        if isinstance(value, Load):
            return value.other == 0 and not is_position(value) and dim in self.plan.dims_of(value.axes)
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
            if isinstance(value, Part) and value.reduce is reduce:
                scope.names[value] = Text(names[value.at])

    # ---- memory

    def _pointer(self, buffer: str, index: Index, axes: frozenset[int], dims: frozenset[Dim], scope: Scope) -> str:
        """The address of ``buffer[index]``, as a tile along ``dims``."""
        alone = [size_text(index.offset)] if index.offset != 0 else []
        tiled = []
        for dim in self.plan.dims:
            (tiled if dim.block > 1 else alone).extend(self.at.terms(index, dim, scope))
        for value, stride in index.picks:
            text = scope.text(value)
            if value.dtype != torch.int64 or (text.narrow and not isinstance(value, Const)):
                text = expressions.cast(text, torch.int64)
            term = text.at(SUM + 1) if stride == 1 else f"{text.at(PRODUCT)} * {size_text(stride)}"
            (tiled if self.at.tile(value.axes) else alone).append(term)
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
        ahead = self.asked.pop(load, None)
        code, types = ahead or self._asked(load, scope), (self.dtypes[load.buffer], load.dtype)
        if types == (torch.bfloat16, torch.float32) and self.plan.held and not ahead and self._inside(load.axes):
            return Text(f"widened({code}, ARCH)")
        return Text(code if types[0] == types[1] else f"{code}.to({dtype_name(load.dtype)})")

    def _asked(self, load: Load, scope: Scope) -> str:
        """A load, with the type that is in memory."""
        dims = self.at.tile(load.axes)
        masks = self._masks(load.axes, load.mask, scope)
        args = [self._pointer(load.buffer, load.index, load.axes, dims, scope)]
        if masks:
            args.append(" & ".join(masks))
        reaches = any(dim.masked and dim.walk != "grid" for dim in self.plan.dims_of(load.axes))
        if load.mask is not None or reaches:
            args.append(f"other={literal(load.other, self.dtypes[load.buffer])}")
        if (hint := self._eviction(load)) is not None:
            args.append(f'eviction_policy="{hint}"')
        return f"tl.load({', '.join(args)})"

    def _eviction(self, load: Load) -> str | None:
        """What the cache should do with the lines: keep what is loaded again, let go what is not."""
        if not any(dim.walk == "grid" for dim in self.plan.dims_of(load.axes)):
            return "evict_last" if self.plan.grid and load.axes else None
        if not self._inside(load.axes):
            return None
        again = sum(load in values for values in self.later)
        return "evict_last" if again > (load in self.asked) else "evict_first"

    def _later_walks(self) -> list[Sequence[Value]]:
        return [self.walks[later] for later in range(self.phase + 1, self.last + 1)]

    def _store(self, store: Store, scope: Scope) -> None:
        conditions, axes = self._once(store, scope)
        dims = self.at.tile(axes)
        masks = self._masks(axes, store.mask, scope) + conditions
        value = scope.text(store.value)
        args = [self._pointer(store.buffer, store.index, axes, dims, scope), str(value)]
        if masks:
            args.append(" & ".join(masks))
        if store.mode == "add":
            scope.lines.append(f'tl.atomic_add({", ".join(args)}, sem="relaxed")')
            return
        if self._passes_by(store):
            args.append('eviction_policy="evict_first"')
        scope.lines.append(f"tl.store({', '.join(args)})")

    def _passes_by(self, store: Store) -> bool:
        """Whether a store goes past rows that wait in the second-level cache to be read again, and is too much for the
        next kernel to find there (5% of a cross-entropy of 8192 rows of 128256, on an H200)."""
        elements = math.prod(magnitude(self.nest.sizes[axis]) for axis in store.axes)
        again = self.plan.shape == "row" and self.phase > 0 and self._inside(store.axes)
        return again and elements * self.dtypes[store.buffer].itemsize > CACHE

    def _once(self, store: Store, scope: Scope) -> tuple[list[str], frozenset[int]]:
        """Conditions under which one of the many points that would store the same does, and the axes of store and
        conditions."""
        conditions, axes = [], store.axes
        for dim in self.plan.dims:
            missing = [at for at, axis in enumerate(dim.axes) if axis not in store.axes]
            if not missing or (len(missing) == len(dim.axes) and dim.walk != "grid"):
                continue
            axes |= frozenset(dim.axes)
            if len(missing) == len(dim.axes):
                conditions.append(f"({self.at.index(dim, scope)} == 0)")
            else:
                conditions += [f"({self.at.run(dim, at, at, scope)} == 0)" for at in missing]
        return conditions, axes


_OF_NATURALS = {"floordiv": "//", "truncdiv": "//", "mod": "%", "fmod": "%"}


def _repeats(user: Value) -> bool:
    """Whether an operand is written more than once in the text of its user."""
    if isinstance(user, Reduce):
        return user.kind in reductions.ACCUMULATORS
    return isinstance(user, Call) and user.op in expressions.REPEATS
