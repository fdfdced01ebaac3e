"""Every mistake weft can name, one class each.

A message says what happened, where (rank, mesh axis, the user's file and line) and what to do about it.
"""

from __future__ import annotations

from collections.abc import Sequence

from weft.shown_values import choices, listed, shown

HOW_TO_REDUCE = (
    "To see which few operations it takes, run again with WEFT_DUMP_DIR=<directory>, where the step's graph is then "
    "written, and reduce that: python -m weft.launch.minify <directory>/step_<process>_<number>_graph.py"
)


def _gibibytes(size: int) -> str:
    """Bytes as GiB, with three digits."""
    return f"{size / 2**30:.3g} GiB"


class WeftError(RuntimeError):
    """Base of all errors raised by weft."""


class InternalFault(WeftError):
    """Base of the errors that are faults of weft's own, whatever the step is."""


class CannotLaunch(WeftError):
    """A run cannot be started, found or ended: what is missing, and the remedy."""

    def __init__(self, what: str, remedy: str) -> None:
        super().__init__(f"{what}. {remedy}")


# ---- arguments of public functions


class InvalidArgument(WeftError, ValueError):
    """A public function was given a value that it does not take."""

    def __init__(self, function: str, argument: str, value: object, allowed: str, remedy: str) -> None:
        super().__init__(f"{function}: {argument} is {self._given(value)}, and must be {allowed}. {remedy}")

    def _given(self, value: object) -> str:
        return shown(value)


class InvalidArgumentType(InvalidArgument, TypeError):
    """A public function was given a value of a type that it does not take."""

    def _given(self, value: object) -> str:
        text = shown(value)
        named = value is None or text.startswith(("a ", "the ", f"{type(value).__name__}("))
        return text if named else f"{text} (of type {type(value).__name__})"


class MalformedGraph(InternalFault):
    """A graph broke the grammar of its stage: a fault of weft's own."""

    def __init__(self, what: str, neighbourhood: str) -> None:
        super().__init__(
            f"the graph is malformed: {what}. This is a fault in weft; please report it with\n{neighbourhood}"
        )


class MalformedProgram(InternalFault):
    """A generated program broke a rule of programs: a fault of weft's own."""

    def __init__(self, what: str, lines: str) -> None:
        super().__init__(f"the program is malformed: {what}. This is a fault in weft; please report it with\n{lines}")


class MalformedSchedule(InternalFault):
    """A schedule would not compute what the step does, or not within its memory: a fault of weft's own."""

    def __init__(self, stage: str, what: str, neighbourhood: str) -> None:
        super().__init__(
            f"the schedule is malformed after {stage}: {what}. This is a fault in weft; please report it with\n"
            f"{neighbourhood}"
        )


class MalformedNest(InternalFault):
    """A loop nest broke its grammar: a fault of weft's own. ``stage`` made it, of the operations at ``origin``."""

    def __init__(self, what: str, nest: str, stage: str, origin: str) -> None:
        where = f" after {stage}" if stage else ""
        source = f", of {origin}" if origin else ""
        super().__init__(
            f"a loop nest is malformed{where}: {what}{source}. This is a fault in weft; please report it with\n{nest}\n"
            f"{HOW_TO_REDUCE}"
        )


class UnsupportedNest(InternalFault):
    """A loop nest that is well-formed, but not the work of one kernel."""

    def __init__(self, what: str) -> None:
        super().__init__(f"one kernel cannot compute {what}: the nests must not be joined")


class UncapturableMutation(WeftError):
    """The step changes a tensor in a way that has no functional meaning."""

    def __init__(self, what: str) -> None:
        super().__init__(f"cannot capture {what}")


class ProcessGroupExists(WeftError):
    """A fake world was asked for in a process that belongs to a real one."""

    def __init__(self, rank: int, world_size: int, backend: str) -> None:
        super().__init__(
            f"weft.fake_world: this process is rank {rank} of {world_size} over {backend}. Use another process, or "
            "call torch.distributed.destroy_process_group() first"
        )


class FakeWorldActive(WeftError):
    """A fake world was asked for inside another."""

    def __init__(self, rank: int, world_size: int) -> None:
        super().__init__(f"weft.fake_world: rank {rank} of a fake world of {world_size} is active. Leave it first")


class MeshOfFakeTensor(WeftError):
    """Inside a fake world, a DeviceMesh was made of a tensor, whose values nobody knows there."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__(
            f"DeviceMesh was given a tensor of shape {shape}, made inside weft.fake_world: it holds no "
            f"values, so the ranks of the mesh are unknown. Use init_device_mesh(device_type, {shape}), or "
            f"give DeviceMesh the ranks as nested lists."
        )


class NoSuchDimension(WeftError, IndexError):
    """A dimension of a tensor was named that it does not have."""

    def __init__(self, function: str, dim: int, count: int) -> None:
        there = f"choose one from {-count} to {count - 1}" if count else "leave the call out"
        super().__init__(f"{function}: dim is {dim}, and the tensor has {count} dimensions; {there}")


# ---- distributed: wrapping modules


class InvalidMesh(WeftError, ValueError):
    """A wrapper was given a mesh that it cannot use. ``what`` says why, and what to do."""

    def __init__(self, wrapper: str, mesh: object, what: str) -> None:
        super().__init__(f"{wrapper} cannot use mesh={mesh}: {what}")


class NoProcessGroup(WeftError, ValueError):
    """A wrapper was to use all ranks in a process without a process group."""

    def __init__(self, wrapper: str) -> None:
        super().__init__(
            f"{wrapper}: mesh is None, which means all ranks, and this process has no process group. Call "
            "torch.distributed.init_process_group() in a script that torchrun starts, or pass mesh=, or plan for many "
            "ranks in one process: with weft.fake_world(8)"
        )


class ContainerWithoutForward(WeftError, ValueError):
    """A list or dict of modules was to be wrapped, whose hooks would never run."""

    def __init__(self, wrapper: str, kind: str) -> None:
        super().__init__(
            f"{wrapper} cannot wrap a {kind}: it has no forward, so its parameters would never be exchanged. Wrap the "
            f"modules in it, each by itself or together as a list: weft.{wrapper}(list(modules))"
        )


class NotTheRoot(WeftError):
    """A method of the outermost wrapped module was called on one inside it."""

    def __init__(self, method: str) -> None:
        super().__init__(
            f"{method} belongs to the root FSDP module, the outermost one that runs, and this one runs inside another. "
            "Call it on the root"
        )


class AlreadyWrapped(WeftError):
    """A module that is wrapped already was to be wrapped again."""

    def __init__(self, wrapper: str, kind: str) -> None:
        super().__init__(
            f"cannot apply {wrapper} to a {kind}: it is wrapped already. Wrap each module once: modules that need "
            "another setting first, then the one around them"
        )


class CannotCopyWrapped(WeftError):
    """A wrapped module was to be copied."""

    def __init__(self, kind: str) -> None:
        super().__init__(
            f"cannot apply copy.deepcopy to a {kind}, whose parameters belong to process groups. Copy the module "
            "before wrapping it and wrap both, or load the state_dict() of one into the other"
        )


class UnsupportedPolicy(WeftError, NotImplementedError):
    """A wrapper was asked for something that weft does not do."""

    def __init__(self, wrapper: str, what: str) -> None:
        super().__init__(f"{wrapper} does not support {what}; leave it out")


class UnsupportedParameter(WeftError):
    """`replicate` cannot average the gradient of a parameter."""

    def __init__(self, path: str, what: str) -> None:
        super().__init__(
            f"replicate cannot manage parameter {path}: it {what}, and only plain tensors with dense gradients "
            "are averaged. Pass it in ignored_params and synchronize it yourself"
        )


class NotMaterialized(WeftError):
    """A replicated module was used before its state was the same on all ranks."""

    def __init__(self, path: str | None) -> None:
        state = "its state was never broadcast" if path is None else f"{path} is still on the meta device"
        super().__init__(
            f"a replicated module built on the meta device is not ready: {state}. Call weft.materialize(model, "
            "device=...) before the first forward; after your own initialization, "
            "weft.distributed.ddp.broadcast_state(model)"
        )


class GradientLost(WeftError):
    """A gradient was exchanged or removed by other code before `replicate` had averaged it."""

    def __init__(self, path: str) -> None:
        super().__init__(
            f"the gradient of parameter {path} was replaced or set to None by another hook before it was averaged "
            "over the replicas. Register that hook after weft.replicate: it then gets the averaged gradient"
        )


class GradientWithGraph(WeftError):
    """A gradient that is to be averaged over replicas was made with ``create_graph=True``."""

    def __init__(self, path: str) -> None:
        super().__init__(
            f"the gradient of parameter {path} is to be differentiated (create_graph=True), and its average over the "
            "replicas cannot be: what is computed from it would have another gradient. Take such gradients with "
            "torch.autograd.grad(..., create_graph=True), which averages nothing, or run that backward in "
            "model.no_sync()"
        )


class NumpyOnTensor(WeftError):
    """The step gave a tensor to a function of numpy that makes an array of it in C."""

    def __init__(self, line: str) -> None:
        super().__init__(
            f"a function of numpy's is given a tensor at {line}, whose values do not exist while a step is captured. "
            "Give it an array (x.detach().cpu().numpy(), which is captured), use torch operations, or move the code "
            "into a function marked @weft.opaque"
        )


class MemoryOfTensor(WeftError):
    """The step looks at the memory of a tensor, or changes it, while there is none."""

    def __init__(self, what: str, line: str, remedy: str) -> None:
        super().__init__(
            f"cannot capture {what} at {line}: tensors have no memory while a step is captured. Instead, {remedy}; or "
            "move it into a function marked @weft.opaque"
        )


class TextOfValue(WeftError):
    """The step makes text of a tensor or of a number that the data decides.

    Attributes:
        in_raise: whether for the message of an exception that it raises.
    """

    def __init__(self, line: str, *, in_raise: bool = False) -> None:
        self.in_raise = in_raise
        super().__init__(
            f"a tensor or a number that was read from one becomes text at {line}: while a step is captured it has no "
            "value, and the code may read the text. Each call makes the text where it goes straight into print, a "
            'logger or the result of the step. Else give them the value itself (logger.info("loss %s", loss.item())), '
            "or make the text in a function marked @weft.opaque or outside the step"
        )


class OutsideEffect(WeftError):
    """The step does something to the world outside, which a compiled step would not repeat."""

    def __init__(self, what: str, line: str) -> None:
        super().__init__(
            f"the step {what} at {line}: a compiled step runs no Python, so it would happen once only. Do it in a "
            "function marked @weft.opaque, which every call runs, or outside the step"
        )


class UncapturableWrapper(WeftError):
    """A module of the step is wrapped by something that keeps state of its own which no capture can follow."""

    def __init__(self, path: str, wrapper: str, remedy: str) -> None:
        super().__init__(f"cannot capture a step with {path}, which is wrapped by {wrapper}: {remedy}")


class WrappedInStep(WeftError):
    """The step wraps a module, which a compiled step would not do at later calls."""

    def __init__(self, wrapper: str, line: str, remedy: str) -> None:
        super().__init__(f"cannot capture {wrapper} at {line}: a compiled step runs no Python; {remedy}")


class UncapturableLayout(WeftError):
    """An operation of the step makes or reads a tensor that is not strided."""

    def __init__(self, operation: str, layout: object, line: str) -> None:
        super().__init__(
            f"cannot capture {operation} at {line}: it has to do with a {layout} tensor, and graphs hold strided ones "
            "only. Use a dense gradient (sparse=False), use a sparse matrix for nothing but products adj @ x on a CPU, "
            "call .to_dense() before the step, quantize with fake_quantize_per_tensor_affine, or run the step "
            'uncompiled with weft.compile(..., fallback="eager")'
        )


class ScriptedModule(WeftError, NotImplementedError):
    """The step calls TorchScript code that does what a capture cannot follow."""

    def __init__(self, module: str, line: str, why: str, script_line: str = "") -> None:
        where = f" ({script_line})" if script_line else ""
        super().__init__(
            f"cannot capture the scripted {module} at {line}: {why}{where}. Train the module that it was made from "
            "(torch.jit.script it after training, to deploy it), or run the step uncompiled with "
            'weft.compile(..., fallback="eager")'
        )


class UnstridedArgument(WeftError, NotImplementedError):
    """An argument of the step is a tensor that is not strided."""

    def __init__(self, path: str, layout: object, is_nested: bool) -> None:
        if not is_nested:
            remedy = f"pass {path}.to_dense()"
        elif str(layout) == "torch.jagged":
            remedy = f"pass {path}.values() and {path}.offsets(), or {path}.to_padded_tensor(0.0)"
        else:
            remedy = f"pass torch.nested.to_padded_tensor({path}, 0.0) and a mask, or its tensors as a list"
        kind = f"nested {layout}" if is_nested else layout
        super().__init__(
            f"{path} is a {kind} tensor, and graphs hold strided ones only: {remedy}, "
            'or run the step uncompiled with weft.compile(..., fallback="eager")'
        )


class RuntimeCheckFailed(WeftError):
    """A condition on data-dependent numbers, without which the step has no meaning, does not hold in this call."""

    def __init__(self, condition: str, found: str, line: str = "") -> None:
        self.condition, self.found = condition, found
        where = f" at {line}" if line else ""
        super().__init__(
            f"the numbers in the tensors of this call do not fit together{where}: {condition} does not hold for "
            f"{found}. "
            "Pass data for which the same line runs without weft.compile, or check sizes before the step: splits of an "
            "all-to-all and lengths that are read from tensors must fit the tensors they are used with"
        )


class CannotCapture(WeftError):
    """Python needed the value of a tensor to go on, while the step was captured."""

    def __init__(self, line: str, why: str, remedy: str = "") -> None:
        remedy = remedy or (
            "Use torch.where or a mask instead of a branch, keep the number in a tensor instead of .item(), "
            "move the code out of the step or into a function marked @weft.opaque"
        )
        super().__init__(
            f"the step cannot be captured at {line}\n  {why}\n"
            "A tensor's value decides here what Python does next, and it does not exist until the step runs. "
            f'{remedy}, or run the step uncompiled with weft.compile(..., fallback="eager").'
        )


class UncapturableSubclass(WeftError):
    """The step makes a tensor of a subclass that has the data itself, and is no wrapper around plain tensors."""

    def __init__(self, line: str) -> None:
        super().__init__(
            f"the step cannot be captured at {line}\n  It makes a tensor of a subclass of torch.Tensor, which a "
            "capture can make of wrappers only. Use plain tensors in the step, give the subclass __tensor_flatten__ "
            'and __tensor_unflatten__, or run the step uncompiled with weft.compile(..., fallback="eager").'
        )


class PathsDiffer(WeftError):
    """The step did something else than before, although its values and its Python state were the same."""

    def __init__(self, step: str, line: str, detail: str) -> None:
        super().__init__(
            f"{step} branches on a value at {line}\n  To capture the branch, the step was run on fake tensors again. "
            f"What it did before this line is not what it did the first time: {detail}. What the step updates before "
            "the line is updated. Let nothing but tensors and unchanged Python state decide what the step does, "
            'or run it uncompiled with weft.compile(..., fallback="eager").'
        )


class TooManyPaths(WeftError):
    """A step took ever new ways through its branches on values."""

    def __init__(self, step: str, line: str, paths: int) -> None:
        super().__init__(
            f"{step} has taken {paths} different ways through its branches on values; the last one begins at {line}\n"
            "  Each way has programs of its own. What the step updates before this line is updated. "
            "Keep numbers that are often others in tensors: index with tensors, loop a fixed number of times under a "
            "mask. Raise WEFT_PATH_LIMIT where the ways are bounded, or run the step uncompiled with "
            'weft.compile(..., fallback="eager").'
        )


class StaleAutocastCopy(WeftError):
    """A region of autocast that began before the call keeps a copy of a weight from before an update.

    Args:
        step: name of the step.
        weight: name of the weight.
        dtype: of the copy.
        line: of the call.
    """

    def __init__(self, step: str, weight: str, dtype: str, line: str) -> None:
        super().__init__(
            f"{step} was called at {line} in a region of torch.autocast that was open when {weight} was last updated. "
            f"Autocast casts a weight once in a region, and eager would go on with the {dtype} copy from before the "
            "update until the outermost region ends: the forward would not see what training changed. "
            "Put `with torch.autocast(...)` around the forward inside the step, or open it anew for each call, or pass "
            "cache_enabled=False to the outermost region.",
        )


class AnomalyModeAround(WeftError):
    """A compiled step was called while autograd's anomaly mode checks gradients for NaN.

    Args:
        step: name of the step.
        line: of the call.
    """

    def __init__(self, step: str, line: str) -> None:
        super().__init__(
            f"{step} was called at {line} in autograd's anomaly mode, which checks what backward functions return "
            "for NaN. A compiled step has no backward functions and would not check. Look for it in the uncompiled "
            'step (weft.compile(..., fallback="eager") runs it), or pass check_nan=False to torch.autograd.'
            "set_detect_anomaly.",
        )


class FunctionModeAround(WeftError):
    """A TorchFunctionMode was active around a call of a compiled step.

    Args:
        step: name of the step.
        mode: type of the mode.
        line: of the call.
    """

    def __init__(self, step: str, mode: str, line: str) -> None:
        super().__init__(
            f"{step} was called at {line} inside the TorchFunctionMode {mode}. The mode sees calls of torch functions, "
            "and a compiled step makes none. Enter the mode inside the step, which captures what it does, "
            'use a TorchDispatchMode, or run the step uncompiled with weft.compile(..., fallback="eager").',
        )


class UsedDuringCapture(WeftError):
    """A thread used a tensor of a step that another thread was capturing.

    Args:
        step: name of the step.
        thread: name of the thread that used the tensor.
        line: where it did.
    """

    def __init__(self, step: str, thread: str, line: str) -> None:
        super().__init__(
            f"thread {thread} used a tensor of the step {step} at {line}, while another thread captured that step. "
            "During a first call the gradients, the optimizer state and all results of a step hold no data. "
            "Let other threads that train with the same model wait for the first call of the step; move what the step "
            "itself does in threads to a function marked @weft.opaque.",
        )


class DrawDecidesPython(CannotCapture):
    """Python needed the value of a random number or a time to go on, while the step was captured."""

    def __init__(self, line: str, sources: list[str]) -> None:
        WeftError.__init__(
            self,
            f"the step cannot be captured at {line}\n"
            f"  {' and '.join(sources)} decides here what Python does next, and each call of the compiled step gets "
            "another number. Use the number in arithmetic or torch.where instead of a branch, call the function before "
            "the step and pass the result as an argument (one capture for each value), move the code into a function "
            'marked @weft.opaque, or run the step uncompiled with weft.compile(..., fallback="eager").',
        )


class UncapturableDraw(WeftError):
    """The step draws or reads something from outside that a graph cannot hold: an array, a choice among objects."""

    def __init__(self, what: str, line: str, why: str, remedy: str) -> None:
        super().__init__(
            f"cannot capture {what} at {line}: {why}, and a compiled step runs no Python. Remedy: {remedy}. Or run the "
            'step uncompiled with weft.compile(..., fallback="eager")'
        )


class UnrecordedDraw(WeftError):
    """The step used a random generator in a way that the capture could not see."""

    def __init__(self, generators: list[str], line: str | None) -> None:
        super().__init__(
            f"the step uses {' and '.join(generators)} at {line} through a function that the capture cannot see, so "
            "the compiled step would use the numbers of its first call for ever. Call the generator as an attribute of "
            "its module or object (random.random(), rng.random()), draw with torch, or draw before the step and pass "
            "the result as an argument"
        )


class PythonStateChanged(WeftError):
    """The step changed Python state that a captured graph would leave as it was."""

    def __init__(self, path: str, change: str, remedy: str, why: str = "") -> None:
        why = why or "a compiled step runs no Python, so it would change once only"
        super().__init__(f"the step changed {path} ({change}); {why}: {remedy}")


class EscapedTensor(WeftError):
    """A tensor made by the step was stored inside an object that cannot be rebuilt from its parts."""

    def __init__(self, kind: type, where: str, why: str = "") -> None:
        lazy = any(hasattr(kind, name) for name in ("__next__", "__await__", "__anext__"))
        remedy = why or (
            "it computes its values after the step has ended, where nothing is captured: make them a list in the step"
            if lazy
            else "register the type with torch.utils._pytree.register_pytree_node or use a dataclass, dict, list or "
            "tuple"
        )
        super().__init__(f"{where} holds a {kind.__qualname__} with tensors inside; {remedy}")


class CaptureValueEscaped(WeftError):
    """A fake tensor or symbolic number of the capture was stored where the capture could not put things back."""

    def __init__(self, step: str, place: str, kind: str, line: str, failure: BaseException | None) -> None:
        known = f"{failure}\nBesides, " if isinstance(failure, WeftError) else ""
        made = f", made at {line}," if line else ""
        super().__init__(
            f"{known}{step} stored a {kind} of the capture{made} in {place}. A compiled step cannot store there at "
            "each call, because weft does not follow that object. The value was taken out; if something else was in "
            "its place before, make that object anew before you go on. Return the value from the step, keep it in an "
            "attribute, list or dictionary that the code of the step names, or store it in a function marked "
            "@weft.opaque"
        )


class UnregisteredType(WeftError):
    """An argument of the step is an object with tensors inside that pytrees do not know."""

    def __init__(self, kind: type, where: str, why: str = "make it a dataclass or ") -> None:
        super().__init__(
            f"{where} is a {kind.__module__}.{kind.__qualname__} with tensors inside; {why}"
            "register it with torch.utils._pytree.register_pytree_node so that its tensors become inputs of the step"
        )


class GraphOutsideStep(WeftError):
    """A tensor was computed with gradients outside the call of a step, where its backward cannot be captured."""

    def __init__(self, where: str, remedy: str | None = None) -> None:
        remedy = remedy or f"pass {where}.detach(), or compute it inside the step"
        super().__init__(f"{where} has a grad_fn from outside the step; {remedy}")


class BackwardOutsideStep(WeftError):
    """A backward outside of a compiled step goes through a tensor that the step computed."""

    def __init__(self, where: str) -> None:
        super().__init__(
            f"this backward goes through {where}. A compiled step returns tensors without their graph of autograd, so "
            "that the gradients of the step's part would be missing. Call backward() inside of the compiled step, or "
            "use .detach() where no gradient has to flow through the tensor"
        )


class RememberedFunctionWrites(WeftError):
    """A function that remembers its results changes the Python state when it computes one."""

    def __init__(self, functions: Sequence[str], changed: Sequence[str]) -> None:
        super().__init__(
            f"{listed(changed)} changed in the captured call and would not change in the next one: a function with "
            f"functools.lru_cache ({listed(functions)}) changes it when it runs, and remembers its result. Move the "
            "change out of that function, or call the function before the compiled step"
        )


class RememberedFunctionReads(WeftError):
    """The result that a function remembers is one of the captured call: the next call would compute another one."""

    def __init__(self, function: str, line: str) -> None:
        super().__init__(
            f"{function}, which has functools.lru_cache, is first called at {line}: its result depends on values that "
            "the step changes, or the step writes to it. Call it before the compiled step, or without the cache"
        )


class MarkedDynamicSpecialised(WeftError):
    """A size marked with `mark_dynamic` was fixed to a number by the step."""

    def __init__(self, size: str, value: int, line: str) -> None:
        super().__init__(
            f"{size} was marked with weft.mark_dynamic, and the step fixes it to {value} at {line}. "
            "Do not compare that size with a number there or turn it into one (int, range, a list of that "
            "length), or mark it with weft.maybe_mark_dynamic: then each value that needs it gets a capture of its own"
        )


class CannotCopyStep(WeftError, TypeError):
    """A compiled step was to be copied or written with pickle."""

    def __init__(self, action: str, name: str) -> None:
        super().__init__(
            f"cannot apply {action} to the compiled step {name}: its graphs and programs belong to this process and to "
            "the objects that the step uses. Copy or send the function itself, and compile it there: weft.compile(...)"
        )


class NotCapturedYet(WeftError):
    """A compiled step was to be explained before its first call."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"{name} was not captured yet: call it once, or give the arguments of a call, weft.explain({name}, *args)"
        )


class HookDidNotFire(WeftError):
    """A registered hook ran fewer times in the capture than what it is registered on."""

    def __init__(self, owner: str, kind: str, name: str, fired: int, expected: int) -> None:
        super().__init__(
            f"the {kind} hook {name} on {owner} fired {fired} times in the capture, expected {expected}: its "
            "work would be lost. Register it before the first call of the step, on the object the step really uses."
        )


class HookCountDiffers(WeftError):
    """A hook fired another number of times in the capture than in the eager step."""

    def __init__(self, owner: str, kind: str, name: str, eager: int, captured: int) -> None:
        super().__init__(
            f"the {kind} hook {name} on {owner} fired {eager} times in the eager step and {captured} times in "
            "the capture. "
            "What the step does must not change from one call to the next by itself: look for branches on "
            "Python's random module, on time or on a counter around what the hook is registered on."
        )


class UnknownOption(WeftError, ValueError):
    """An option has a value weft does not know."""

    def __init__(self, name: str, value: object, known: Sequence[object]) -> None:
        super().__init__(f"{name}={shown(value)} is not known; choose one of {choices(value, known)}")


class VerifyFailed(WeftError):
    """The compiled step left other values behind than the eager one."""

    def __init__(self, differences: list[str]) -> None:
        shown = "\n  ".join(differences[:20])
        super().__init__(
            f"the compiled step differs from the eager one in {len(differences)} tensors:\n  {shown}\n"
            "Either the step is not deterministic (run it twice eagerly to see) or this is a fault in weft; "
            f"please report it. {HOW_TO_REDUCE}"
        )


# ---- capture: collectives


class InvalidCollective(WeftError, ValueError):
    """A collective was called with arguments that do not fit together."""

    def __init__(self, name: str, what: str, line: str) -> None:
        super().__init__(f"torch.distributed.{name} at {line}: {what}")


class UncapturableCollective(WeftError):
    """The step calls a function of torch.distributed that has no place in a graph that all ranks share."""

    def __init__(self, name: str, line: str, remedy: str) -> None:
        super().__init__(f"cannot capture torch.distributed.{name} at {line}: {remedy}")


class UncapturableStreamCall(WeftError):
    """The step asked a stream or event how far it is."""

    def __init__(self, name: str, line: str) -> None:
        super().__init__(
            f"cannot capture torch.cuda.{name} at {line}: the answer depends on when it is asked, and Python "
            "would act on it once, in the capture. Ask outside the step, or in a function marked @weft.opaque"
        )


class InvalidCollectiveRow(WeftError):
    """A row of the registry of collectives does not describe its operation."""

    def __init__(self, operation: str, what: str, remedy: str) -> None:
        super().__init__(f"cannot register {operation} as a collective: {what}. {remedy}")


class UnregisteredCollective(WeftError):
    """A step calls an operation in a namespace of collectives of which weft does not know what it does."""

    def __init__(self, operation: str, line: str) -> None:
        where = f" at {line}" if line else ""
        super().__init__(
            f"{operation}{where} is in a namespace of collectives, and no row says what it communicates: add one with "
            "weft.inductor.graph.collectives.register, or define it in a namespace of yours if it is no collective"
        )


class UnwaitedCollective(WeftError):
    """The step ended with an asynchronous collective that nobody had waited for."""

    def __init__(self, name: str, line: str, count: int) -> None:
        more = f" ({count - 1} more like it)" if count > 1 else ""
        super().__init__(
            f"the step ends without a wait for torch.distributed.{name}(async_op=True) issued at {line}{more}: "
            "its result would be lost. Call wait() on what it returned"
        )


class StepFailed(WeftError):
    """An operation of a compiled step raised; the original error is the cause.

    Attributes:
        fails_eagerly: see the constructor.
    """

    def __init__(self, operation: str, stack: list[str], error: BaseException, fails_eagerly: bool | None) -> None:
        """``fails_eagerly``: whether the same operation fails on the same operands by itself; None: not known."""
        self.fails_eagerly = fails_eagerly
        where = "".join(f"\n  {line}" for line in stack) or "\n  (no line of yours: an operation that weft added)"
        if fails_eagerly:
            verdict = "The operation by itself fails on these operands too. Correct the step or its data at that line."
        elif fails_eagerly is None:
            verdict = (
                "Run the step without weft.compile: if it raises at that line too, the mistake is in the step or its "
                "data; if not, this is a fault in weft; please report it."
            )
        else:
            verdict = (
                "The operation by itself accepts these operands, so this is a fault in weft; please report it. "
                f"{HOW_TO_REDUCE}"
            )
        super().__init__(
            f"{operation} failed in a compiled step: {type(error).__name__}: {error}\nIt came from{where}\n{verdict}"
        )


class CollectiveFailed(WeftError):
    """A collective of a compiled step failed or cannot end. Where its library raised an error, that is the cause."""

    def __init__(self, operation: str, stack: list[str], why: str) -> None:
        where = "".join(f"\n  {line}" for line in stack) or "\n  (no line of yours: a collective that weft added)"
        super().__init__(
            f"{operation} failed in a compiled step: {why}\nIt came from{where}\nThe results of this step are lost. "
            "This process makes no more calls of compiled steps that communicate: restart from a checkpoint."
        )


# ---- distributed: sharded parameters


class InvalidShardPlacement(WeftError, ValueError):
    """A parameter cannot be split as asked. ``what`` says why, and what to do."""

    def __init__(self, path: str, what: str) -> None:
        super().__init__(f"fully_shard cannot split parameter {path}: {what}")


class InvalidReshardSize(WeftError, ValueError):
    """`reshard_after_forward` named a number of ranks that does not fit the mesh."""

    def __init__(self, value: int, size: int) -> None:
        fitting = [str(ranks) for ranks in range(1, size + 1) if size % ranks == 0]
        super().__init__(
            f"fully_shard cannot reshard to reshard_after_forward={value} ranks: the number must divide the {size} "
            f"ranks that shard. Choose one of {listed(fitting)}, or pass True, False or None"
        )


class ReshardSizeWithMeshDims(WeftError, ValueError, NotImplementedError):
    """`reshard_after_forward` named a number of ranks beside `dp_mesh_dims`."""

    def __init__(self, value: int) -> None:
        super().__init__(
            f"fully_shard: reshard_after_forward is {value}, and a number of ranks is not supported together with "
            "dp_mesh_dims. Pass True, False or None"
        )


class UnshardableParameter(WeftError, ValueError):
    """A parameter is of a kind that `fully_shard` does not manage."""

    def __init__(self, path: str, what: str) -> None:
        super().__init__(
            f"fully_shard cannot manage parameter {path}: it {what}. Change it, or pass it in ignored_params"
        )


class InvalidGatherExtension(WeftError, ValueError):
    """A method with which a tensor subclass gathers itself does not keep FSDP2's contract."""

    def __init__(self, method: str, path: str, what: str) -> None:
        super().__init__(f"{method} of parameter {path} {what}. Change the method in the class of the parameter")


class HookBeforeSharding(WeftError):
    """A hook was registered on a parameter that sharding was about to exchange for another."""

    def __init__(self, path: str) -> None:
        super().__init__(
            f"a hook is registered on parameter {path}, which fully_shard exchanges for its shard: the hook "
            "would never run. Register it on the sharded parameter, after fully_shard"
        )


class ParameterReplaced(WeftError):
    """Something else was put in the place of a sharded parameter."""

    def __init__(self, path: str, value: object) -> None:
        super().__init__(
            f"in the place of sharded parameter {path} there is {shown(value)} now. Change parameters before "
            "fully_shard, or put a DTensor of the same layout there (load_state_dict does)"
        )


class MetaParameters(WeftError):
    """Sharded parameters have no memory yet."""

    def __init__(self, paths: list[str]) -> None:
        super().__init__(
            f"sharded parameters are still on the meta device: {listed(paths)}. Call weft.materialize(model, "
            "device=...) before the first forward"
        )


class OffloadedToDevice(WeftError):
    """A shard that CPUOffloadPolicy keeps on the host was moved to another device."""

    def __init__(self, path: str, device: object) -> None:
        super().__init__(
            f"the shard of {path} is on {device}, but its CPUOffloadPolicy keeps it on the host. Leave out "
            f'model.to("{device}") and model.cuda(), and load state dicts onto the CPU; forward copies what it needs'
        )


class InvalidKnob(WeftError, ValueError):
    """A knob was given a value it does not take."""

    def __init__(self, what: str, value: object, wanted: str) -> None:
        super().__init__(
            f"{what} = {shown(value)} is not accepted: this knob takes {wanted}. Set such a value, or leave the knob "
            "out; docs/knobs.md describes all of them"
        )


class UnknownKnob(WeftError, ValueError):
    """knobs.override was given a name that is no knob."""

    def __init__(self, name: str, known: list[str]) -> None:
        super().__init__(f"knobs.{name} does not exist; choose one of {choices(name, known)}. docs/knobs.md lists all")


class GraphMismatch(WeftError):
    """Ranks captured different graphs. `ranks` differ from the others; `rank` is the one that raises."""

    def __init__(self, name: str, rank: int, ranks: list[int], summary: str, difference: str) -> None:
        self.rank, self.ranks = rank, ranks
        self.summary, self.difference = summary, difference
        super().__init__(
            f"{name}: ranks do not hold the same step. {summary}\n{difference}\n"
            f"This is rank {rank}. The step has not run: no collective was started and no state changed. All ranks "
            f"must issue the same collectives with the same options: look for branches on get_rank(), sizes of what "
            f"is communicated, modules, hooks, optimizer groups or options that differ between the ranks above."
        )


class RanksDiverged(WeftError):
    """Ranks make different calls of compiled steps, and some had begun theirs. ``ranks`` differ from the others;
    ``rank`` is the one that raises."""

    def __init__(self, name: str, rank: int, ranks: list[int], summary: str, difference: str) -> None:
        self.rank, self.ranks = rank, ranks
        super().__init__(
            f"{name}: ranks make different calls of compiled steps. {summary}\n{difference}\nThis is rank {rank}. What "
            "the calls have written is lost: restart from a checkpoint. All ranks must call the same steps in the same "
            "order with arguments that lead to the same collectives: look for sizes, flags and Python state that "
            "changed on some ranks only."
        )


class GroupMismatch(WeftError):
    """Members of a process group disagree about a collective. ``ranks`` are those; ``rank`` is the one that raises."""

    def __init__(self, name: str, rank: int, ranks: list[int], listed: str, what: str, line: str) -> None:
        self.rank, self.ranks = rank, ranks
        super().__init__(
            f"{name}: {listed} {what}. This is rank {rank}, where it concerns\n  {line}\nThe step has not run: no "
            "collective was started and no state changed. All members of a group must use it in the same collectives, "
            "and each must expect as many elements as its partner sends. Look for groups of the same ranks that were "
            "created one by one and are used in another order, and for split sizes made from the rank."
        )


class AgreementTimeout(WeftError):
    """Some ranks did not say in time which graph they captured. `missing` are their numbers."""

    def __init__(
        self, name: str, call: int, rank: int, missing: list[int], listed: str, by: int, seconds: float
    ) -> None:
        self.rank = rank
        self.missing = missing
        if rank in missing:
            what = f"rank {rank} came too late: rank {by} had waited {seconds:.1f} s for {listed} and given up"
        else:
            what = f"rank {by} waited {seconds:.1f} s and did not hear from {listed}. This is rank {rank}"
        super().__init__(
            f"{name}: the ranks could not compare what they do next (number {call}): {what}. Look at the logs of those "
            f"that were missing: a rank may have died or raised, may have been busy capturing or loading data "
            f"(WEFT_AGREEMENT_TIMEOUT_S waits longer), or may not have called this step."
        )


class StoreLost(WeftError):
    """The store that the ranks share stopped answering."""

    def __init__(self, name: str, rank: int) -> None:
        super().__init__(
            f"{name}: rank {rank} lost the store that ranks compare their graphs over. The process that holds it "
            f"(the launcher, or rank 0) has died or is unreachable: look at its log first."
        )


class CannotInitialize(WeftError):
    """`materialize` found tensors that no module initializes."""

    def __init__(self, paths: list[str], what: str) -> None:
        super().__init__(
            f"weft.materialize: {what}: {listed(paths)}. Give the module that owns them a reset_parameters() "
            "that fills its parameters and buffers, or build that module off the meta device"
        )


# ---- inductor: kernels


class TritonMissing(WeftError):
    """A kernel was to be made and triton is not installed."""

    def __init__(self) -> None:
        super().__init__("weft's kernels need triton, which is not installed: `pip install triton` (3.6 to 3.9)")


class KernelCompilationFailed(InternalFault):
    """Triton did not accept a generated kernel. `reason` is what it said."""

    def __init__(self, name: str, reason: str, text: str) -> None:
        self.reason = reason
        super().__init__(
            f"kernel {name} does not compile: {reason}\nThis is a fault in weft; please report it with the text of "
            f"the kernel:\n{text}\n{HOW_TO_REDUCE}"
        )


class NotOnGpu(WeftError):
    """A kernel was to be measured that runs on no GPU."""

    def __init__(self, kernel: str) -> None:
        super().__init__(
            f"kernel {kernel} cannot be measured: it was generated, but not for a GPU of this machine. Run the step on "
            "a GPU, and measure what weft.explain(step) says of it there"
        )


class NoGeneratedKernels(WeftError):
    """The kernels of a step were to be timed that runs ATen's alone: on a CPU, or with ``mode="bitwise"``."""

    def __init__(self, step: str) -> None:
        super().__init__(
            f"{step} runs ATen's kernels here, and no generated ones that could be timed. Call "
            'print(explained.on("H200").kernels()) for those that a GPU would run, where explained = weft.explain(...)'
        )


class NotASavedGraph(WeftError, ValueError):
    """A file that was to be reduced is none that weft wrote."""

    def __init__(self, path: object, why: str) -> None:
        super().__init__(
            f"{path} is no graph that weft saved: {why}. Run the step with WEFT_DUMP_DIR=<directory> and name the file "
            "that is then written there, step_<process>_<number>_graph.py"
        )


class InvalidEnvironment(WeftError, ValueError):
    """Environment variables of the launcher do not describe a process of a job."""

    def __init__(self, variable: str, value: str | None, wanted: str) -> None:
        given = "is not set" if value is None else f"is {value!r}"
        super().__init__(
            f"{variable} {given}, and must be {wanted} where RANK is set. Start the processes with torchrun, which "
            "sets it, or unset RANK"
        )


class NothingToReduce(WeftError):
    """A graph was to be reduced that has no fault by itself."""

    def __init__(self) -> None:
        super().__init__(
            "without its collectives, hooks and random numbers, which cannot be made again outside the step, the graph "
            "does not fail: report the file as it is"
        )


class UnsupportedKernelArgument(InternalFault):
    """A kernel has an argument of a type that cannot be passed to it: a fault of weft's own."""

    def __init__(self, kernel: str, argument: str, kind: str) -> None:
        super().__init__(
            f"kernel {kernel} takes {argument} as {kind}, which the launcher does not pass. This is a fault in weft; "
            "please report it"
        )


class CudaError(WeftError):
    """A function of CUDA's driver failed."""

    def __init__(self, what: str, name: str, meaning: str) -> None:
        super().__init__(
            f"{what} failed with {name}: {meaning}. An error of an earlier kernel may show only here: run again with "
            "CUDA_LAUNCH_BLOCKING=1 to see which one it is"
        )


class ReplayFailed(WeftError):
    """A recorded step could not be run again: an error of the GPU, in this call or in work before it."""

    def __init__(self, error: Exception) -> None:
        super().__init__(
            f"running the recorded step failed: {error}\nThe GPU reports errors late, so the operation at fault may be "
            "any of the step's, or one before it. Run again with WEFT_CUDA_GRAPHS=0 and CUDA_LAUNCH_BLOCKING=1, which "
            "starts kernels one by one and names the line"
        )


class NoCudaDriver(WeftError):
    """A kernel was to be loaded on a machine without CUDA's driver."""

    def __init__(self, error: OSError) -> None:
        super().__init__(f"libcuda.so.1, which NVIDIA's driver brings, cannot be loaded: {error}")


class CacheUnusable(WeftError):
    """What was compiled cannot be kept, or not be read."""

    def __init__(self, directory: str, error: OSError) -> None:
        super().__init__(f"the cache in {directory} cannot be used: {error}. Set WEFT_CACHE_DIR to another directory")


class InvalidCluster(WeftError, ValueError):
    """The description of a cluster says something it cannot say."""

    def __init__(self, file: str, what: str) -> None:
        super().__init__(
            f"{file}: {what}. Correct that line of the description; docs/clusters.md has all keys and their units"
        )


class NoClusterFile(WeftError, ValueError):
    """The description of a cluster was named by a path at which there is no file."""

    def __init__(self, path: str) -> None:
        super().__init__(
            f"cluster={path!r} is no file. Name a description that exists, one of docs/clusters.md by its name, or "
            "write one with weft calibrate --out"
        )


class NoClusterHere(WeftError):
    """No description fits the machine."""

    def __init__(self, found: str) -> None:
        super().__init__(
            f"no description of a cluster fits this machine, which has {found}. Name one, or a path, as "
            "WEFT_CLUSTER=h200x8, or measure one here: weft calibrate"
        )


class GroupGone(WeftError):
    """The ranks of a process group are asked for where there is no such group."""

    def __init__(self, group: str) -> None:
        super().__init__(
            f"the step communicates over {group!r}, and this process has no such process group: ask inside the "
            "weft.fake_world, or before the destroy_process_group, that the step was captured in"
        )


class CannotCarry(WeftError):
    """A transport was chosen for a collective that it does not serve."""

    def __init__(self, transport: str, kind: str, dtype: str, group: str, nodes: int) -> None:
        super().__init__(
            f"transport {transport} does not carry {kind} of {dtype} over {group!r}, which is on {nodes} "
            f"node{'s' if nodes > 1 else ''}: see weft.inductor.cost.collective_cost.transports_for"
        )


class TransportNotBound(WeftError):
    """A transport has a row and calls in graphs, and nothing that runs them."""

    def __init__(self, transport: str, call: str) -> None:
        super().__init__(
            f"nothing runs the calls of transport {transport}, which are {call}s: declare a subclass of BoundPeerCall "
            f'with transport="{transport}", in a file that weft.inductor.transports.apply_transports imports'
        )


class LinkMissing(WeftError):
    """A cluster's description does not say what joins the ranks of a group."""

    def __init__(self, cluster: str, link: str, group: str, ranks: int, nodes: int) -> None:
        super().__init__(
            f"{group!r} has {ranks} ranks on {nodes} node{'s' if nodes > 1 else ''} of cluster {cluster}, whose "
            f"description has no [{link}]: add the bandwidth and latency of that link, or correct gpus_per_node"
        )


class RandomStepUnverified(WeftError):
    """A step that draws random numbers was to be compared with its eager run, which draws others."""

    def __init__(self, operation: str, line: str) -> None:
        where = f" at {line}" if line else ""
        super().__init__(
            f"the step cannot be verified: {operation}{where} draws random numbers, and generated kernels draw others "
            'than eager does. Verify it with dropout set to 0, or with mode="bitwise", which draws eager\'s'
        )


# ---- inductor: memory of peers


class MulticastNotOff(WeftError):
    """GPUs were to share memory where libraries may switch NVLink multicast on."""

    def __init__(self, wrong: list[str]) -> None:
        super().__init__(
            "GPUs cannot share memory before NVLink multicast is off in NCCL, torch and NVSHMEM: "
            f"{', '.join(wrong)}. Set all three in the environment of every rank, before it starts: "
            "NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1"
        )


class PeersUnreachable(WeftError):
    """The ranks of a group cannot address each other's memory."""

    def __init__(self, axis: str, why: str) -> None:
        super().__init__(
            f"the ranks over {axis!r} cannot address each other's memory: {why}. Collectives over them have to "
            "stay with NCCL, which is what a step gets that is compiled on such machines"
        )


class ArenaMismatch(WeftError):
    """Ranks planned different uses of the memory that they share."""

    def __init__(self, axis: str, rank: int, why: str) -> None:
        super().__init__(
            f"ranks over {axis!r} planned their shared memory differently: {why}. This is rank {rank}. The sizes of "
            "gathered and reduced tensors, WEFT_ knobs and versions of weft have to be the same on all ranks"
        )


class PeerTimeout(WeftError):
    """A rank did not come to a collective over shared memory in time. ``rank`` is its number in the world."""

    def __init__(self, rank: int, axis: str, collective: str, seconds: float) -> None:
        self.rank = rank
        super().__init__(
            f"rank {rank} (axis {axis!r}) did not come to {collective} within {seconds:g} s. Its process is "
            "alive: look at its log and its stack (py-spy dump), it may wait for data, a checkpoint or another "
            "collective, or may have raised. WEFT_PEER_TIMEOUT_S waits longer. This step and its results are lost: "
            "restart from a checkpoint"
        )


class PeerLost(WeftError):
    """A rank that a collective over shared memory waited for is dead. ``rank`` is its number in the world."""

    def __init__(self, rank: int, axis: str, collective: str, seconds: float) -> None:
        self.rank = rank
        super().__init__(
            f"rank {rank} (axis {axis!r}) died: it did not come to {collective} within {seconds:g} s, and its "
            "process has ended. Look at its log first, and at the system's (out of memory). This step and its results "
            "are lost: restart from a checkpoint"
        )


class ScheduleTimeout(WeftError):
    """Ranks did not come to agree on the schedule of a step."""

    def __init__(self, rank: int, missing: str, seconds: float) -> None:
        super().__init__(
            f"rank {rank} waited {seconds:g} s for the schedule of the step, and {missing} did not come. Such a rank "
            "may still compile, with a cold cache: look at its log and its stack (py-spy dump). "
            "WEFT_PEER_TIMEOUT_S waits longer"
        )


class ScheduleLost(InternalFault):
    """Rank 0 could not make the schedule of a step, so no rank can go on."""

    def __init__(self, why: str) -> None:
        super().__init__(f"rank 0 could not make the schedule of the step, see its log: {why}")


class RankCannotCompile(WeftError):
    """Another rank could not compile the step, so this one does not run it either."""

    def __init__(self, rank: int, why: str) -> None:
        super().__init__(
            f"rank {rank} could not compile the step, so no rank runs it; its own error has the remedy: {why}"
        )


class ScheduleMismatch(WeftError):
    """The graphs of ranks differ so much that no one order of their collectives runs on all of them."""

    def __init__(self) -> None:
        super().__init__(
            "the kernels of this rank are others than those of the rest, since sizes differ between ranks, and no "
            "order of its collectives is that of the others. Pad batches to one size, or mark the size that differs "
            "with weft.mark_dynamic"
        )


class MemoryLimitUnreachable(WeftError):
    """No order of a step's operations was found that needs as little memory as it may use.

    Attributes:
        limit: bytes that it may use.
        peak: bytes that the least demanding order found holds.
        task: what runs when it does.
        inputs: those of them that hold the step's inputs.
        held: the largest of the others, each with the operation that makes it.
        certain: whether recomputation cannot help: the inputs with the operands of one operation exceed the limit.
    """

    def __init__(
        self, limit: int, peak: int, task: str, inputs: int, held: list[tuple[int, str]], certain: bool = False
    ) -> None:
        self.limit, self.peak, self.task, self.inputs, self.held = limit, peak, task, inputs, held
        self.certain = certain
        largest = "".join(f"\n  {_gibibytes(size)} made by {maker}" for size, maker in held)
        more = f"up to {_gibibytes(peak - limit)}" if certain else _gibibytes(peak - limit)
        super().__init__(
            f"no order of the step's operations fits memory_limit={_gibibytes(limit)}: the least demanding holds "
            f"{_gibibytes(peak)}, of which {_gibibytes(inputs)} are parameters, optimizer state and other inputs, "
            f"while this runs: {task}. The largest others are{largest}\nAllow {more} more, take a smaller batch, "
            "checkpoint activations, or shard over more ranks"
        )


class NotScheduled(WeftError):
    """The schedule of a step is asked for that has none."""

    def __init__(self, step: str) -> None:
        super().__init__(
            f"{step} has no schedule of communication: it runs on CPUs, or does not communicate. Call "
            'weft.explain(...).scheduled("h200x8") for the one that it would have on a cluster'
        )


class BranchesOnInteger(WeftError):
    """A step that is planned goes on in a way that depends on a whole number that it computes."""

    def __init__(self, line: str) -> None:
        super().__init__(
            f"{line}: how the step goes on depends on a number that it computes, which a plan does not have. Take the "
            "number from the host, or move the branch out of the step"
        )


class StepNotReached(WeftError):
    """A script that is planned ended without calling the step."""

    def __init__(self, script: str, steps: list[str], why: str = "the end of the script") -> None:
        called = f"it called {', '.join(steps)}" if steps else "it called no step that weft.compile compiles"
        super().__init__(
            f"{script} came to {why} without the step to plan: {called}. Name another with --step or --nth, or a "
            "function that is not compiled with --compile-function"
        )


class ScriptFailed(WeftError):
    """A script that is planned raised an error before its step."""

    def __init__(self, line: str, error: Exception, needs_value: bool) -> None:
        remedy = "The script runs as one rank without GPUs here; WEFT_PLAN=1 is set for it to see"
        if needs_value:
            remedy = "A plan has sizes and no values: do this after the first step, or leave it out under WEFT_PLAN=1"
        super().__init__(f"{line}: {type(error).__name__}: {error}. {remedy}")


class CannotWrite(WeftError, OSError):
    """A file that the user named cannot be written."""

    def __init__(self, what: str, path: object, error: OSError) -> None:
        why = error.strerror or type(error).__name__
        where = "Name a file in a folder that exists and that this process may write to"
        super().__init__(f"{what}: path is {shown(str(path))}, which cannot be written: {why}. {where}")


class ReplayDiffers(WeftError):
    """A step that was computed twice from one state has other bits the second time: ``rank``, and its first tensor."""

    def __init__(self, step: str, rank: int, tensor: str) -> None:
        self.rank, self.tensor = rank, tensor
        super().__init__(f"{step} computed {tensor} differently twice on rank {rank}: test its processor and memory")


# ---- checkpoints


class CheckpointDamaged(WeftError):
    """A checkpoint is not what was written. ``damages`` says which files, and which tensors they hold."""

    def __init__(self, folder: object, damages: Sequence[str]) -> None:
        self.folder, self.damages = folder, list(damages)
        more = f"; and {len(self.damages) - 10} more files" if len(self.damages) > 10 else ""
        super().__init__(f"the checkpoint {folder} is damaged: {'; '.join(self.damages[:10])}{more}.")


class CheckpointMismatch(WeftError):
    """A checkpoint is one of another model, optimizer or set of objects."""

    def __init__(self, path: object, missing: Sequence[str], other: Sequence[str]) -> None:
        lacking = f"it has no {', '.join(missing[:10])}" + (f" and {len(missing) - 10} more" if missing[10:] else "")
        differing = "; ".join(other[:10]) + (f"; and {len(other) - 10} more" if other[10:] else "")
        what = "; ".join(part for part in (lacking if missing else "", differing) if part)
        super().__init__(f"the checkpoint {path} does not fit: {what}. Build what the run built that wrote it")


class CheckpointNotSaved(WeftError):
    """A checkpoint could not be written. Checkpoints of before are still there."""

    def __init__(self, step: int, folder: object, reason: str) -> None:
        super().__init__(f"step {step} was not saved to {folder}: {reason}. Checkpoints of before are unchanged.")


class CheckpointNotLoaded(WeftError):
    """Ranks that load a checkpoint wait for one that is gone."""

    def __init__(self, folder: object, reason: str) -> None:
        super().__init__(f"nothing was loaded from {folder}: {reason}.")


class NotMainThread(WeftError, ValueError):
    """``weft.stopping`` was called first where Python cannot install signal handlers."""

    def __init__(self) -> None:
        super().__init__("weft.stopping: call it first in the main thread, where Python handles signals.")


class CannotCheckpoint(WeftError, TypeError):
    """An argument of TrainState is nothing that can be saved and loaded again."""

    def __init__(self, name: str, what: str) -> None:
        super().__init__(f"weft.TrainState: {name}: {what}.")
