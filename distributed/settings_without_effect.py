"""Setters of torch's FSDPModule and ReplicateModule that tune collectives by hand, which the compiler decides here.

They are accepted, so that code that calls them runs unchanged. Each says once in the log that it does nothing.
"""

from __future__ import annotations

import logging
from typing import Any

from weft.argument_checks import ArgumentChecks
from weft.short_tracebacks import methods_shorten_tracebacks

_log = logging.getLogger(__name__)
_said: set[str] = set()


def say_once(method: str, why: str) -> None:
    """Log that a method does nothing, once a process."""
    if method not in _said:
        _said.add(method)
        _log.warning("%s does nothing in weft: %s", method, why)


class ReducedGradients:
    """What ``finalize_backward(async_op=True)`` returns: a handle of reductions that are done."""

    def wait(self) -> None:
        """Does nothing."""


@methods_shorten_tracebacks
class SettingsWithoutEffect:
    """The setters that do nothing on sharded and on replicated modules: the base of the classes of both."""

    _checks: ArgumentChecks  # of the class that inherits these

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Does nothing: gradients are reduced in every backward that synchronizes. Logged once."""
        say_once("set_is_last_backward", "gradients are reduced in every backward that synchronizes")

    def _set_unshard_async_op(self, async_op: bool) -> None:
        say_once("_set_unshard_async_op", "the compiler decides when a collective runs")

    def set_post_optim_event(self, event: Any) -> None:
        """Does nothing: all-gathers run on the caller's stream, or where the compiler puts them. Logged once."""
        say_once("set_post_optim_event", "the compiler decides when a collective runs")

    def set_custom_all_gather(self, comm: Any) -> None:
        """Does nothing: the compiler chooses how all-gathers are carried out. Logged once."""
        say_once("set_custom_all_gather", "the compiler chooses how all-gathers are carried out")

    def set_custom_reduce_scatter(self, comm: Any) -> None:
        """Does nothing: the compiler chooses how reduce-scatters are carried out. Logged once."""
        say_once("set_custom_reduce_scatter", "the compiler chooses how reduce-scatters are carried out")

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """Does nothing: each parameter has a reduction of its own. Logged once."""
        self._checks.number("max_input_buffers", max_input_buffers, least=1, whole=True)
        say_once("set_reduce_scatter_max_input_buffers", "each parameter has a reduction of its own")

    def set_separate_reduce_scatter_group(self, enable: bool = True, *, recurse: bool = True) -> None:
        """Does nothing: the compiler chooses communicators. Logged once."""
        say_once("set_separate_reduce_scatter_group", "the compiler chooses communicators")

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Does nothing: the compiler plans communication memory. Logged once."""
        why = "the compiler plans communication memory"
        say_once("set_allocate_memory_from_process_group_for_comm", why)

    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> None:
        """Does nothing: knobs.transports says whether symmetric memory is used. Logged once."""
        say_once("set_symm_mem_for_comm", "knobs.transports says whether symmetric memory is used")

    def set_keep_unsharded_storage(self, keep: bool, *, recurse: bool = True) -> None:
        """Does nothing: the compiler plans the memory of gathered parameters. Logged once."""
        self._checks.boolean("keep", keep)
        say_once("set_keep_unsharded_storage", "the compiler plans the memory of gathered parameters")

    def set_manual_backward_finalization(self, enabled: bool) -> None:
        """Accepts False alone: gradients are reduced by the end of each backward that synchronizes.

        Raises:
            InvalidArgument: ``enabled`` is True. Gradients of backwards without synchronization would be reduced in
                :meth:`finalize_backward`, which has no counterpart here.
        """
        self._checks.boolean("enabled", enabled)
        if enabled:
            remedy = "Call set_requires_gradient_sync(True) before the last backward, which then reduces the sum"
            raise self._checks.invalid("enabled", enabled, "False", remedy)

    def finalize_backward(self, *, async_op: bool = False) -> ReducedGradients | None:
        """Does nothing: gradients are reduced by the end of each backward that synchronizes. Logged once.

        Returns:
            With ``async_op`` a handle, whose ``wait`` does nothing either.
        """
        self._checks.boolean("async_op", async_op)
        say_once("finalize_backward", "gradients are reduced in every backward that synchronizes")
        return ReducedGradients() if async_op else None
