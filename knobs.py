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
import os
import sys
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from weft import errors

log = logging.getLogger(__name__)

PREFIX = "WEFT_"

# ---- the knobs

agreement_timeout_s: Annotated[
    float, "Seconds that a rank waits for the others to say which graph they captured before it gives up."
] = 30.0

autotune: Annotated[
    bool,
    "Measure which of cuBLAS's algorithms computes each large matrix product fastest on this GPU (seconds, the first"
    " time; kept in the cache), and use that. Sums may be added up in another order than by cuBLAS's own choice. Rank"
    " 0's counts for all.",
] = False

bucket_mib: Annotated[
    int,
    "Most MiB of inputs that neighbouring collectives of tensors on the CPU, which go through one buffer, may have. On"
    " GPUs the schedule decides by what it costs.",
] = 256

cluster: Annotated[
    str,
    "Description of the cluster, by name (h200x8) or path; where it is empty, the one that fits this machine's GPUs.",
] = ""

cuda_graphs: Annotated[bool, "Record steps as CUDA graphs: whole, or in pieces where not all can be recorded."] = True

disable_passes: Annotated[str, "Names of passes over the graph that are left out, separated by commas."] = ""

dump_dir: Annotated[
    str,
    "Directory where each step that is compiled is written: `..._graph.py`, which `python -m weft.inductor.minify`"
    " reduces where kernels go wrong, and `..._program.py`, what runs as one file; none where it is empty.",
] = ""

cache_dir: Annotated[str, "Directory of compiled kernels and measurements; all in it can be made again."] = (
    "~/.cache/weft"
)

even_batches: Annotated[
    bool,
    "Every rank's batches have the same sizes, which ranks check when they capture: embeddings may then be looked up in"
    " their shards, and no whole table is gathered, and no whole gradient of one reduced, for a few rows.",
] = False

peer_timeout_s: Annotated[
    float,
    "Seconds that a rank waits for the others in a collective over shared memory, and when such memory is made, before"
    " it gives up.",
] = 600.0

prefetch_mib: Annotated[
    int,
    "Most MiB of gathered parameters that are started ahead of their use, and of gradients whose reduction is"
    " not waited for yet, in steps on the CPU. On GPUs the schedule decides by what it costs. The same on all ranks.",
] = 1024

recapture_limit: Annotated[int, "How often a step is captured anew before a warning says what keeps changing."] = 8

record_collectives: Annotated[
    bool, "Record steps that communicate over NCCL as CUDA graphs too; otherwise they run kernel by kernel."
] = False

schedule_timeout_s: Annotated[
    float,
    "Seconds that ranks wait for each other to compile, before rank 0 makes the schedule of a step for all of them.",
] = 600.0

transports: Annotated[
    str,
    "Transports over symmetric memory that may carry collectives between GPUs of one host where they cost less than"
    " NCCL, separated by commas: copy_engine, push, copy_sum, pull, one_shot, two_shot, with _ and a number of programs"
    " behind, as the cluster's description names them; or all. With nccl, or empty, NCCL carries everything.",
] = "all"

verify: Annotated[
    bool, "Run the first call of every compiled step also uncompiled, and compare loss, gradients and state."
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

    @property
    def variable(self) -> str:
        """The environment variable that sets it."""
        return PREFIX + self.name.upper()

    def parse(self, text: str) -> Any:
        """The value that an environment variable means. Raises errors.InvalidKnob."""
        if self.optional and text == "":
            return None
        try:
            return _SWITCH[text.lower()] if self.type is bool else self.type(text)
        except (KeyError, ValueError):
            raise errors.InvalidKnob(self.variable, text, self.wanted()) from None

    def check(self, value: Any) -> Any:
        """`value`, where it has the knob's type. Raises errors.InvalidKnob."""
        if value is None and self.optional:
            return None
        if type(value) is self.type or (self.type is float and type(value) is int):
            return self.type(value)
        raise errors.InvalidKnob(f"knobs.{self.name}", value, self.wanted())

    def wanted(self) -> str:
        """The values it takes, in words."""
        values = "0 or 1" if self.type is bool else self.type.__name__
        return f"{values}, or nothing" if self.optional else values


_SWITCH = {"0": False, "false": False, "off": False, "1": True, "true": True, "on": True}


def _collect() -> dict[str, Knob]:
    """The annotated names of this module; what they hold before the environment is read is the default."""
    found = {}
    for name, hint in get_type_hints(sys.modules[__name__], include_extras=True).items():
        if get_origin(hint) is Annotated:
            kind, doc = get_args(hint)
            kinds = get_args(kind) if get_origin(kind) is types.UnionType else (kind,)
            (plain,) = (k for k in kinds if k is not types.NoneType)
            found[name] = Knob(name, plain, types.NoneType in kinds, globals()[name], doc)
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
        "Each is a name in `weft/knobs.py` and an environment variable, read when weft first needs one.",
        "`with weft.knobs.override(name=value):` sets one for the length of a block.",
        "",
        "| knob | environment variable | type | default | what it does |",
        "|---|---|---|---|---|",
    ]
    for knob in KNOBS.values():
        cells = f"`{knob.name}`", f"`{knob.variable}`", knob.wanted(), f"`{knob.default}`", knob.doc
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


globals().update(read_environment(os.environ))

if __name__ == "__main__":
    sys.stdout.write(page())
