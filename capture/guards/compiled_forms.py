"""The captured forms of one step: which of them serves a call, and which goes when there are too many.

A step that is called with ever new sizes, or in ever new states, has ever new forms, each of megabytes: a graph, a
program, guards, on a GPU recordings and arenas. At most ``knobs.form_limit`` are kept; the one that served a call
longest ago goes first. Ranks that make the same calls drop the same forms.

To check all guards of all forms would make a call slower the more forms there are. A form is therefore looked up by
the sizes of the tensors and by the plain values of the call first. Only a call of a kind that no form has served yet
asks all of those that can have its sizes.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Sequence
from typing import Any, Protocol, TypeVar

import torch

from weft import knobs
from weft.capture.guards.guards import Guards
from weft.capture.record.captured_step import CapturedStep
from weft.capture.record.dynamic_sizes import sizes_of

log = logging.getLogger(__name__)

# Forms that are asked why they do not serve a call. The reasons of all would be a long message that says one thing.
_ASKED = 4
_PLAIN = frozenset({bool, int, float, str, type(None)})


class CompiledForm(Protocol):
    """A captured form with its guards."""

    captured: CapturedStep
    guards: Guards


F = TypeVar("F", bound=CompiledForm)


class CompiledForms(list[F]):
    """Captured forms, the one that served the last call first."""

    def __init__(self) -> None:
        super().__init__()
        self._served: dict[Hashable, F] = {}  # by the sizes and values of a call: the form that served it last

    def find(self, leaves: list[Any], spec: Any, reasons: list[str]) -> F | None:
        """The form whose guards hold, moved to the front; why others do not serve goes to ``reasons``."""
        # Nearly every step has one form, for which the key would be wasted.
        if len(self) == 1 and self[0].guards.unchanged(leaves, spec):
            return self[0]
        key = _key(leaves)
        if key is not None and (form := self._served.get(key)) is not None and form.guards.unchanged(leaves, spec):
            return self._to_front(form, key)
        candidates = [form for form in self if _can_have_sizes(form.captured, leaves)]
        for form in candidates:
            if form.guards.unchanged(leaves, spec):
                return self._to_front(form, key)
        for form in candidates:
            if (why := form.guards.failure(leaves, spec)) is None:
                return self._to_front(form, key)
            if len(reasons) < _ASKED:
                reasons.append(why)
        others = [form for form in self[:_ASKED] if form not in candidates]
        reasons += [why for form in others if (why := form.guards.failure(leaves, spec)) is not None]
        return None

    def add(self, form: F) -> F:
        """Put a new form in front. Beyond ``knobs.form_limit`` the one that was used longest ago goes."""
        self._release_others(form)
        self.insert(0, form)
        while len(self) > max(knobs.form_limit, 1):
            self.drop(self[-1])
            log.debug("a compiled form was dropped: there are more than %d", knobs.form_limit)
        return form

    def drop(self, form: F) -> None:
        """Forget a form."""
        self[:] = [each for each in self if each is not form]
        self._served = {key: kept for key, kept in self._served.items() if kept is not form}

    def _to_front(self, form: F, key: Hashable | None) -> F:
        if self[0] is not form:
            self._release_others(form)
            at = next(at for at, each in enumerate(self) if each is form)
            self.insert(0, self.pop(at))
        if key is not None:
            # Sizes that are symbols make one form serve any number of keys.
            if len(self._served) > 16 * max(knobs.form_limit, 1):
                self._served.clear()
            self._served[key] = form
        return form

    def _release_others(self, serving: F) -> None:
        """Release the gradients that the guards of all other forms hold: the form that serves now may replace them."""
        for each in self:
            if each is not serving:
                each.guards.release_gradients()


def _key(leaves: Sequence[Any]) -> Hashable | None:
    """The sizes of the tensors and the plain values of a call; None where they have no hash."""
    key = tuple(
        [leaf.shape if isinstance(leaf, torch.Tensor) else leaf if type(leaf) in _PLAIN else None for leaf in leaves]
    )
    try:
        hash(key)
    except TypeError:  # sizes of a fake world may be symbols
        return None
    return key


def _can_have_sizes(captured: CapturedStep, leaves: Sequence[Any]) -> bool:
    """Whether the static sizes of a form are those of ``leaves``; its guards ask the same, and more. Wrappers around
    tensors, whose sizes are others than those in the graph, can be anything here."""
    arguments = captured.arguments
    if len(leaves) != len(arguments.leaves):
        return False
    for at, place in arguments.tensors.items():
        leaf, val = leaves[at], arguments.vals[at]
        if isinstance(leaf, torch.Tensor) and place.inner:
            continue
        sizes = sizes_of(leaf)
        if sizes is None or len(sizes) != val.dim():
            return False
        if any(type(wanted) is int and wanted != size for wanted, size in zip(val.shape, sizes, strict=True)):
            return False
    return True
