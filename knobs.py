"""Every knob of weft: a typed name, its default, and what it does.

The value of a knob is read as `knobs.recapture_limit`. It can be set by an environment variable, WEFT_ and
the name in capitals (WEFT_RECAPTURE_LIMIT), read once, when weft first needs a knob; or, for the length of a
block, by

    with knobs.override(recapture_limit=2):
        ...

docs/knobs.md lists them; `python -m weft.knobs` prints that page.
"""

from __future__ import annotations

import contextlib
import difflib
import logging
import math
import os
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from weft import errors
from weft.transport_rows import LIBRARIES, TRANSPORTS, peer_transports, transport_row

log = logging.getLogger(__name__)

PREFIX = "WEFT_"

SHIPPED_CLUSTERS = Path(__file__).parent / "inductor" / "cost" / "clusters"
"""Folder of the cluster descriptions that come with weft."""


# ---- what values are accepted


@dataclass(frozen=True)
class Limit:
    """Which values of its type a knob takes: a condition, and the same in words."""

    words: str
    holds: Callable[[Any], bool]


def _known_transports(value: str) -> bool:
    names = [name.strip() for name in value.split(",") if name.strip()]
    return names == ["all"] or all(transport_row(name) is not None for name in names)


def _known_cluster(value: str) -> bool:
    return not value or (SHIPPED_CLUSTERS / f"{value}.toml").is_file() or Path(value).is_file()


_POSITIVE = Limit("a finite number of more than 0", lambda value: 0 < value < math.inf)
_AT_LEAST_ONE = Limit("a whole number of at least 1", lambda value: value >= 1)
_NOT_NEGATIVE = Limit("a whole number of at least 0", lambda value: value >= 0)
_TRANSPORT_NAMES = Limit(f"all, or names separated by commas: {', '.join(TRANSPORTS)}", _known_transports)
_CLUSTER_NAME = Limit("the name of a description that comes with weft, or the path of a file", _known_cluster)


# ---- the knobs

agreement_timeout_s: Annotated[
    float,
    "Seconds that a rank waits for the other ranks to report the graph they captured before it raises.",
    _POSITIVE,
] = 30.0

bucket_mib: Annotated[
    int,
    "Maximum MiB of inputs in one bucket of adjacent collectives on the CPU. On GPUs the scheduler decides from"
    " predicted times.",
    _AT_LEAST_ONE,
] = 256

cluster: Annotated[
    str,
    "Cluster description, by name (h200x8) or path. Empty: the description that matches this machine's GPUs.",
    _CLUSTER_NAME,
] = ""

cuda_graphs: Annotated[bool, "Record steps as CUDA graphs, in pieces if not all of a step can be recorded."] = True

disable_passes: Annotated[str, "Names of graph passes to skip, separated by commas."] = ""

dump_dir: Annotated[
    str,
    "Directory to which every compiled step is written: `..._graph.py`, the input of `python -m weft.launch.minify`,"
    " and `..._program.py`, the program as one file. Empty: nothing is written.",
] = ""

full_traceback: Annotated[
    bool, "Keep the frames of torch and weft in the tracebacks of errors in a step, not those of the user's code alone."
] = False

cache_dir: Annotated[
    str,
    "Directory of compiled kernels, graphs and measurements. It can be deleted at any time. One that others can write"
    " to, or that cannot be written, is not used. Empty: nothing is kept.",
] = "~/.cache/weft"

even_batches: Annotated[
    bool,
    "States that batches have the same sizes on all ranks; ranks check this at capture. Embeddings are then looked up"
    " in their shards: rows are communicated instead of whole tables and whole gradients.",
] = False

form_limit: Annotated[
    int,
    "Maximum number of compiled forms that a step keeps. The one that was used longest ago is dropped first, and is"
    " captured again if a call needs it. Must be the same on all ranks.",
    _AT_LEAST_ONE,
] = 64

peer_timeout_s: Annotated[
    float,
    "Seconds that a rank waits for the other ranks once they have agreed on a graph, before it raises: while they"
    " compile and rank 0 makes the schedule, while symmetric memory is allocated, and in a collective over symmetric"
    " memory.",
    _POSITIVE,
] = 600.0

prefetch_mib: Annotated[
    int,
    "Maximum MiB of prefetched parameters, and of gradients in pending reductions, in steps on the CPU. On GPUs the"
    " scheduler decides from predicted times. Must be the same on all ranks.",
    _NOT_NEGATIVE,
] = 1024

path_limit: Annotated[
    int,
    "Maximum number of ways through its branches on values that a step has, each captured when it is first taken. A"
    " further one is an error. Must be the same on all ranks.",
    _AT_LEAST_ONE,
] = 64

recapture_limit: Annotated[
    int,
    "Number of recaptures of a step before a warning names the value that keeps changing.",
    _NOT_NEGATIVE,
] = 8

record_collectives: Annotated[
    bool, "Also record steps with collectives as CUDA graphs. By default they run kernel by kernel."
] = False

ring_dir: Annotated[
    str,
    "Directory to which a rank writes its last collectives when a compiled step that communicates fails. `weft launch`"
    " sets it. Empty: nothing is written.",
] = ""

strict: Annotated[
    bool,
    "Raise the error of a pass or kernel of weft's own that fails, instead of leaving it out of the compilation with a"
    " warning. Always on in weft's tests.",
] = False

transports: Annotated[
    str,
    "Transports over symmetric memory that the scheduler may use between GPUs of one host, separated by commas:"
    f" {', '.join(peer_transports())}. A suffix gives the number of thread blocks, as in push_32."
    f" `all`: those of the cluster description. {' or '.join(f'`{name}`' for name in LIBRARIES)}, or empty: none, so"
    " that the process group's backend carries everything.",
    _TRANSPORT_NAMES,
] = "all"

verify: Annotated[
    bool, "Run the first call of every compiled step eagerly too, and compare loss, gradients and state."
] = False

verify_graphs: Annotated[
    bool,
    "Verify what each stage of the compiler hands to the next (graphs, loop nests, schedules, programs) and raise an"
    " error at the first fault. After every pass, the fake value of each changed node is computed again from its"
    " operands. Finds faults of weft's own passes; compilation takes longer. Always on in weft's tests.",
] = False


# ---- how they are read


@dataclass(frozen=True)
class Knob:
    """What is known of one knob. `type` is bool, int, float or str; an `optional` one may also be None."""

    name: str
    type: type
    optional: bool
    default: Any
    doc: str
    limit: Limit | None = None

    @property
    def variable(self) -> str:
        """The environment variable that sets it."""
        return PREFIX + self.name.upper()

    def parse(self, text: str) -> Any:
        """The value that an environment variable means. Raises errors.InvalidKnob."""
        if self.optional and text == "":
            return None
        try:
            value = _SWITCH[text.lower()] if self.type is bool else self.type(text)
        except (KeyError, ValueError):
            raise errors.InvalidKnob(self.variable, text, self.wanted()) from None
        return self._within_limit(self.variable, value)

    def check(self, value: Any) -> Any:
        """`value`, where it has the knob's type. Raises errors.InvalidKnob."""
        if value is None and self.optional:
            return None
        if type(value) is self.type or (self.type is float and type(value) is int):
            return self._within_limit(f"knobs.{self.name}", self.type(value))
        raise errors.InvalidKnob(f"knobs.{self.name}", value, self.wanted())

    def _within_limit(self, what: str, value: Any) -> Any:
        if self.limit is not None and not self.limit.holds(value):
            raise errors.InvalidKnob(what, value, self.wanted())
        return value

    def wanted(self) -> str:
        """The values it takes, in words."""
        values = "0 or 1" if self.type is bool else self.type.__name__
        values = f"{values}: {self.limit.words}" if self.limit is not None else values
        return f"{values}, or nothing" if self.optional else values


_SWITCH = {"0": False, "false": False, "off": False, "1": True, "true": True, "on": True}


def _collect() -> dict[str, Knob]:
    """The annotated names of this module; what they hold before the environment is read is the default."""
    found = {}
    for name, hint in get_type_hints(sys.modules[__name__], include_extras=True).items():
        if get_origin(hint) is Annotated:
            kind, doc, *limit = get_args(hint)
            kinds = get_args(kind) if get_origin(kind) is types.UnionType else (kind,)
            (plain,) = (k for k in kinds if k is not types.NoneType)
            found[name] = Knob(name, plain, types.NoneType in kinds, globals()[name], doc, *limit)
    return found


KNOBS: Mapping[str, Knob] = types.MappingProxyType(_collect())


def read_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    """Values of the knobs that `environment` sets; a WEFT_ variable that is no knob is warned about.

    Raises errors.InvalidKnob for a value that the knob does not take.
    """
    known = {knob.variable: knob for knob in KNOBS.values()}
    for variable in sorted(v for v in environment if v.startswith(PREFIX) and v not in known):
        near = difflib.get_close_matches(variable, known, 1)
        log.warning("%s is no knob of weft and has no effect%s", variable, f"; {near[0]} is" if near else "")
    return {knob.name: knob.parse(environment[v]) for v, knob in known.items() if v in environment}


@contextlib.contextmanager
def override(**values: Any) -> Iterator[None]:
    """Give knobs other values inside a `with` block.

    Raises errors.UnknownKnob, errors.InvalidKnob.
    """
    for name, value in values.items():
        if name not in KNOBS:
            raise errors.UnknownKnob(name, sorted(KNOBS))
        values[name] = KNOBS[name].check(value)
    before = {name: globals()[name] for name in values}
    globals().update(values)
    try:
        yield
    finally:
        globals().update(before)


def page() -> str:
    """The page of documentation, in Markdown."""
    lines = [
        "# Knobs",
        "",
        "Each knob is a variable of `weft.knobs` and an environment variable, which is read on first use.",
        "`with weft.knobs.override(name=value):` sets one inside a block.",
        "",
        "| knob | environment variable | type | default | what it does |",
        "|---|---|---|---|---|",
    ]
    for knob in KNOBS.values():
        cells = f"`{knob.name}`", f"`{knob.variable}`", knob.wanted(), f"`{knob.default}`", knob.doc
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


try:
    globals().update(read_environment(os.environ))
except errors.InvalidKnob as error:
    # `python -m weft.capture` and the like are programs of their own: a mistake in their environment ends them.
    if sys.orig_argv[1:2] == ["-m"] and sys.orig_argv[2:3][0].partition(".")[0] == "weft":
        sys.exit(f"weft: {error}")
    raise

if __name__ == "__main__":
    sys.stdout.write(page())
