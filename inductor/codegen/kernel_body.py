"""Triton text of one kernel, from its loop nest and its KernelPlan.

Every value is one statement in the outermost block where it can be computed. A short value with one use is written
inline. The loop of a kernel has one *pass* for each link of the longest chain of reductions along it, and one more
where stores depend on the last. Passes are numbered by *phase*, from 0; later ones load again what they need.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from weft.inductor.codegen import expressions, reductions
from weft.inductor.codegen.canonical import is_position
from weft.inductor.codegen.expressions import ATOM, Text
from weft.inductor.codegen.kernel_plan import Dim, KernelPlan
from weft.inductor.codegen.live_values import depths
from weft.inductor.codegen.positions import Positions, Scope, size_text
from weft.inductor.codegen.register_tiling import block_start, packed_load, reread_loads
from weft.inductor.codegen.row_passes import RowPass, row_passes
from weft.inductor.codegen.triton_text import indented
from weft.inductor.codegen.value_text import ValueWriter
from weft.inductor.loop_ir.axes import size_hint
from weft.inductor.loop_ir.ir import Call, Const, Index, Int, Load, Nest, Reduce, ReductionResult, Scalar, Store, Value

# Bytes of shared memory for loads in flight below sm_90: an L40S has 99 KiB for a program, an A100 163.
_SHARED_BEFORE_HOPPER = 72 * 1024
_MAX_INLINE_CHARACTERS = 56  # characters of an expression that is written inside another


class KernelBody(ValueWriter):
    """The statements of one kernel; the arguments are those of :class:`ValueWriter`."""

    def __init__(
        self, nest: Nest, plan: KernelPlan, dtypes: Mapping[str, torch.dtype], pointers: Mapping[str, str]
    ) -> None:
        super().__init__(nest, plan, dtypes, pointers)
        # The pass in which a value is first known: a value of depth d needs d passes of the loop behind it.
        self.depth = depths(nest, self.looped)
        self.last = max((self.depth[value] for value in self.values), default=0)
        self.loaded = {load.buffer for load in nest.reads}
        self.reloaded = self._reloaded() if plan.reloads_shared else frozenset[Value]()
        self.pass_values = {phase: self._values_of_pass(phase) for phase in range(self.last + 1)} if plan.loop else {}
        self.resident: dict[Load, list[str]] = {}  # the words of each block that stays in registers

    def statements(self) -> list[str]:
        """The function's body, without indentation."""
        for phase in range(self.last + 1):
            self.phase = phase
            # What a pass of the loop needs from outside comes before it: numbers of the row, and results of earlier
            # passes.
            self._outside_loop(phase)
            if self.plan.loop and (self._accumulated(phase) or self._stores(phase, inside=True)):
                self._loop(self.plan.loop, phase)
        return self.body.statements()

    # ---- which value is computed where

    def _reloaded(self) -> frozenset[Value]:
        """Tiles that are the same in every iteration and that only the loop uses, with the values they come from.

        They are loaded in each iteration, from a cache, so that they do not occupy registers across the loop.
        """
        outside = {value for store in self.nest.stores if not self._inside(store.axes) for value in store.values()}
        found: set[Value] = set()
        # In this order users come before their operands, so all users are decided when a value is.
        for value in reversed(self.values):
            users = [user for user in self.values if value in user.operands()]
            # All of them: one user outside the loop would need the tile in registers there anyway.
            needed = all(self._inside(user.axes) or self._along_loop(user) or user in found for user in users)
            # Scalars and positions hardly need registers; a reduction would be repeated in each iteration.
            tiled = bool(self.at.tile(value.axes)) and not is_position(value) and not isinstance(value, Reduce)
            if tiled and needed and value not in outside and not self._inside(value.axes):
                found.add(value)
        return frozenset(found)

    def _stores(self, phase: int, *, inside: bool) -> list[Store]:
        return [s for s in self.nest.stores if self._inside(s.axes) == inside and self._phase_of_store(s) == phase]

    def _phase_of_store(self, store: Store) -> int:
        """The pass in or after which a store happens: the first possible one, but the last where the buffer is also
        read, because later passes read it again."""
        # As early as possible else, since later passes then need not compute the value again.
        return self.last if store.buffer in self.loaded else max(self.depth[value] for value in store.values())

    def _accumulated(self, phase: int) -> list[Reduce]:
        """Reductions along the loop that pass ``phase`` accumulates."""
        return [reduce for reduce in self.nest.reduces if self._along_loop(reduce) and self.depth[reduce] == phase + 1]

    def _along_loop(self, value: Value) -> bool:
        return isinstance(value, Reduce) and not self.looped.isdisjoint(value.over)

    def _values_of_pass(self, phase: int) -> list[Value]:
        """The values that pass ``phase`` of the loop computes, operands first."""
        roots = [arg for reduce in self._accumulated(phase) for arg in reduce.args]
        roots += [value for store in self._stores(phase, inside=True) for value in store.values()]
        # Tiles of earlier passes are gone: a pass starts from loads, from reductions and from values outside the loop.
        needed: set[Value] = set()
        stack = [root for root in roots if self._within(root)]
        while stack:
            value = stack.pop()
            if value not in needed:
                needed.add(value)
                stack += (operand for operand in value.operands() if self._within(operand))
        return [value for value in self.values if value in needed]

    # ---- blocks of statements

    def _outside_loop(self, phase: int) -> None:
        """The values that do not change along the loop, before pass ``phase`` of it."""
        here = [
            value
            for value in self.values
            if self.depth[value] == phase and not self._within(value) and not self._is_result(value)
        ]
        # Other blocks refer to these values by name, so they cannot be written inline.
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
        return self._along_loop(value) or (isinstance(value, ReductionResult) and self._along_loop(value.reduce))

    def _loop(self, dim: Dim, phase: int) -> None:
        if phase == 0 and self.plan.resident_blocks:
            self._load_resident_blocks(dim)
        # Several reductions of one depth accumulate in one pass.
        gathered = {reduce: self._accumulator(reduce) for reduce in self._accumulated(phase)}
        for accumulator in gathered.values():
            self.body.lines += accumulator.before()
        resident = [load for load in self.pass_values[phase] if load in self.resident]
        # What was read last is still in a cache. The last pass accumulates nothing, so its order changes no sum.
        backwards = bool(resident) and phase == self.last
        # Programs of a grid start in order, and each multiprocessor has one: the next row here is one round of
        # programs ahead.
        for row in self.plan.grid if backwards else ():  # of the program that the multiprocessor takes next
            ahead, size = self.plan.multiprocessors, self.plan.resident_blocks * dim.block
            self.body.lines += self._prefetches(resident, row, ahead, dim, size, self.body)
        plan, at, part = self.plan, self.at, self._has_partial_tail(dim)
        # A mask in the loop would cost a comparison and a selection for every element, so the tail has its own code.
        full = replace(dim, size=dim.size // dim.block * dim.block) if part else dim
        # The plan says whether a dimension is masked, so the full blocks are written under a plan whose loop ends
        # with them.
        self.plan = replace(plan, dims=tuple(full if one is dim else one for one in plan.dims))
        self.at = Positions(self.plan, self.nest.sizes, self.body)
        first = self._resident_block_lines(full, resident, phase, gathered)
        rest = []
        if first != full.size:
            rest.append(self._remaining_blocks(full, self._iteration(phase, gathered), first, backwards))
        self.plan, self.at = plan, at
        if part:
            rest.append([f"{dim.name}_start = {full.size}", *self._iteration(phase, gathered).statements()])
        # Backwards the tail comes first: it was read last.
        for lines in reversed(rest) if backwards else rest:
            self.body.lines += lines
        for reduce, accumulator in gathered.items():
            statements, results = accumulator.after()
            self.body.lines += statements
            self._name_results(reduce, results)

    def _load_resident_blocks(self, dim: Dim) -> None:
        """Issue the loads of all resident blocks, before anything waits for one of them."""
        for load in reread_loads(self.plan, self.nest, self.dtypes):
            self.resident[load] = [self._fresh("resident") for _ in range(self.plan.resident_blocks)]
            for block, name in enumerate(self.resident[load]):
                at = block_start(load, dim, block)
                start = self._pointer(load.buffer, at, at.axes, frozenset(), self.body)
                self.body.lines.append(f"{name} = {packed_load(start, dim, self.dtypes[load.buffer].itemsize)}")

    def _resident_block_lines(
        self, dim: Dim, resident: Sequence[Load], phase: int, gathered: Mapping[Reduce, reductions.Accumulator]
    ) -> int:
        """Write a pass over the resident blocks, unrolled; returns where the other blocks start."""
        blocks = self.plan.resident_blocks if resident else 0
        for block in range(blocks):
            for load in resident:
                # Later passes take a copy that the compiler cannot see through. It would keep the float32 values of the
                # first pass otherwise, which need twice the registers of 16-bit elements.
                name = self.resident[load][block] if phase == 0 else f"opaque_copy({self.resident[load][block]}, ARCH)"
                # As if the load had been written ahead: the writer of loads takes it from there.
                self.early_loads[load] = f"unpack({name}, {self.pointers[load.buffer]})"
            self.body.lines += [f"{dim.name}_start = {block * dim.block}"]
            self.body.lines += self._iteration(phase, gathered).statements()
        return blocks * dim.block

    def _has_partial_tail(self, dim: Dim) -> bool:
        """Whether a loop along a row, or down columns, is full blocks and then a masked tail."""
        # With a symbolic size, the tail is unknown.
        is_split = self.plan.tile == (dim,) or self.plan.shape == "column"
        return is_split and dim.masked and isinstance(dim.size, int) and dim.size > dim.block

    def _iteration(self, phase: int, gathered: Mapping[Reduce, reductions.Accumulator]) -> Scope:
        """The statements of pass ``phase`` for one block."""
        scope = inner = Scope(self.body)
        parts = self._row_passes(phase)
        if self.plan.multi_pass:
            scope.lines += self._prefetch_next_row(self.pass_values[phase], scope)
        for at, part in enumerate(parts):
            self.later = [*(later.values for later in parts[at + 1 :]), *self._later_passes()]
            if at > 0:
                # A scope of its own for names, not for statements: a tile of an earlier row pass must be loaded
                # again, not referred to.
                inner = Scope(inner, scope)
                # Without a barrier compilers reuse the first load of a row for the second, which costs its registers.
                inner.lines.append("tl.debug_barrier()")
            self._write_row_pass(part, gathered, inner)
        return scope

    def _prefetch_next_row(self, values: Sequence[Value], scope: Scope) -> list[str]:
        """Prefetch the next row into the L2 cache while this one is computed.

        Pipelined loads would need the memory of the L1 cache, where the passes find the row again. Measured on an H200
        in LayerNorm's backward of 16384 columns: 188 us without, 173 with.
        """
        loop, row = self.plan.loop, next(dim for dim in self.plan.dims if dim.tiling == "whole")
        # With several rows to a block, the next block's rows would be several instructions each.
        if loop is None or loop.block > 1:
            return []
        loads = [v for v in values if isinstance(v, Load) and not is_position(v) and self._inside(v.axes)]
        return self._prefetches(loads, loop, 1, row, row.size, scope)

    def _prefetches(self, loads: Sequence[Load], rows: Dim, ahead: int, dim: Dim, size: Int, scope: Scope) -> list[str]:
        """Prefetches of the first ``size`` elements along ``dim`` of the row ``ahead`` rows on, or of the last row."""
        lines = []
        for load in loads:
            index, itemsize = load.index, self.dtypes[load.buffer].itemsize
            outside = Index([pair for pair in index.strides if pair[0] not in dim.axes], index.offset)
            steps = [size, outside.offset, *(stride for _, stride in outside.strides)]
            # One instruction prefetches one contiguous piece of memory.
            if load.operands() or len(rows.axes) > 1 or len(dim.axes) > 1 or index.stride(dim.axes[0]) != 1:
                continue
            # The instruction needs addresses and sizes that are multiples of 16 bytes.
            if size_hint(rows.size) > ahead and all(isinstance(n, int) and n * itemsize % 16 == 0 for n in steps):
                start = self._pointer(load.buffer, outside, outside.axes, frozenset(), scope)
                n, last = rows.name, size_text(rows.size - 1)
                # Clamped to the last row: an address behind the buffer may be unmapped, and rows that repeat do no
                # harm.
                step = f"(tl.minimum({n} + {ahead}, {last}) - {n}) * {outside.stride(rows.axes[0])}"
                lines.append(f"prefetch({start} + {step}, {size * itemsize}, ARCH, ALIGNED)")
        return lines

    def _row_passes(self, phase: int) -> list[RowPass]:
        whole = RowPass(self.pass_values[phase], self._accumulated(phase), self._stores(phase, inside=True))
        if not self.plan.multi_pass:
            return [whole]
        along = frozenset(axis for dim in self.plan.dims if dim.tiling == "whole" for axis in dim.axes)
        return row_passes(whole, along, self.looped, depths(self.nest, along))

    def _write_row_pass(self, part: RowPass, gathered: Mapping[Reduce, reductions.Accumulator], scope: Scope) -> None:
        # Issued before anything waits for a load of this row.
        for load in part.early_loads:
            name = self.early_loads[load] = self._fresh("v")
            scope.lines.append(f"{name} = {self._load_text(load, scope)}")
        self._compute(part.values, part.stores, [*part.accumulated, *part.row_reductions], set(part.live_out), scope)
        for reduce in part.accumulated:
            mask = self._mask_of_reduction(reduce, scope)
            scope.lines += gathered[reduce].step(self._arguments(reduce, scope), mask)
        for store in part.stores:
            self._store(store, scope)
        # Last: nothing else in this pass depends on these reductions, and they exchange values between threads.
        self._compute(part.row_reductions, [], [], set(part.live_out), scope)

    def _remaining_blocks(self, dim: Dim, scope: Scope, first: int, backwards: bool) -> list[str]:
        """The loop over the blocks from ``first`` on, in reverse order if ``backwards``."""
        size = size_text(dim.size)
        start = dim.name if dim.block == 1 and not dim.wide else f"{dim.name}_start"
        step = "1" if dim.block == 1 else dim.block_name
        lines = indented(scope.statements())
        if isinstance(dim.size, int):
            stages = str(self.plan.stages)
            # Decided when the kernel is compiled, as its text is the same for all GPUs.
            if self.plan.pipeline_bytes > _SHARED_BEFORE_HOPPER:
                stages += " if ARCH >= 90 else 1"
            loads_ahead = self.plan.stages > 1
            # With constant bounds and step, compilers can prove the alignment of loads in both directions.
            last = f"{dim.size - dim.block}, {first - dim.block}, -{step}"
            bounds = last if backwards else f"{first}, {size}, {step}"
            walk = f"tl.range({bounds}, num_stages={stages})" if loads_ahead else f"range({bounds})"
            return [f"for {start} in {walk}:", *lines]
        # Triton's interpreter fails on a range whose bounds are not constants.
        # Triton pipelines no `while`; only loops of symbolic length are written so.
        return [f"{start} = 0", f"while {start} < {size}:", *lines, f"    {start} += {step}"]

    def _compute(
        self,
        values: Sequence[Value],
        stores: Sequence[Store],
        gathered: list[Reduce],
        elsewhere: set[Value],
        scope: Scope,
    ) -> None:
        """Write ``values``, and outside the loop ``stores``. Values in ``elsewhere`` get a name, as others use them."""
        uses: Counter[Value] = Counter()
        for user in (*values, *gathered):
            for operand in user.operands():
                # Written inline, an operand that its user repeats would be computed twice.
                uses[operand] += 2 if _repeats(user) else 1
        for store in stores:
            uses.update(store.values())
        for value in values:
            if value in scope.names:
                continue  # a result of a reduction with several
            text = self._expression(value, scope)
            # A load is never written inline: its place in the order of statements is decided here, not by the
            # compiler.
            inline = uses[value] <= 1 and value not in elsewhere and len(text.code) <= _MAX_INLINE_CHARACTERS
            # Names for these would only make the text longer; a position that is one variable has a name already.
            plain = isinstance(value, (Const, Scalar)) or (is_position(value) and text.level == ATOM)
            if plain or (inline and (isinstance(value, (Call, ReductionResult)) or is_position(value))):
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

    def _later_passes(self) -> list[Sequence[Value]]:
        return [self.pass_values[later] for later in range(self.phase + 1, self.last + 1)]


def _repeats(user: Value) -> bool:
    """Whether an operand is written more than once in the text of its user."""
    if isinstance(user, Reduce):
        return user.kind in reductions.ACCUMULATORS
    return isinstance(user, Call) and user.op in expressions.REPEATS
