"""The handle of a collective that was issued during a capture (``async_op=True``).

The functional operation is recorded where the collective is issued. The wait, and the copy into the user's buffer, are
recorded where the user waits. A question that only a finished collective answers (``is_completed()``) counts as a
wait: no time passes in a capture, so a loop that polls must find the collective finished.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from weft.capture.user_code import user_line

Write = Callable[[Sequence[torch.Tensor]], None]


class CapturedWork(dist.Work):
    """Stands in for torch's ``Work`` of a collective that was issued and perhaps not waited for.

    Args:
        name: the function that issued it, for messages.
        results: what the functional operation returned, to be waited for one by one.
        write: puts the waited results into the user's buffers.
        outputs: the user's buffers, which are the value of its future.
    """

    def __init__(self, name: str, results: Sequence[torch.Tensor], write: Write, outputs: list[torch.Tensor]) -> None:
        super().__init__()
        self.name = name
        self.line = user_line()
        self.waited = False
        self._results = results
        self._write = write
        self._outputs = outputs
        self._future = CapturedFuture(self.wait)

    def wait(self, timeout: Any = None) -> bool:
        """Record the wait and the copy into the user's buffers; a second call does nothing."""
        if not self.waited:
            self.waited = True
            with torch.no_grad():
                self._write([torch.ops._c10d_functional.wait_tensor(result) for result in self._results])
            self._future.finish(self._outputs)
        return True

    def synchronize(self) -> None:
        """The same as :meth:`wait`."""
        self.wait()

    def block_current_stream(self) -> None:
        """The same as :meth:`wait`."""
        self.wait()

    def is_completed(self) -> bool:
        """Wait, and return True."""
        return self.wait()

    def is_success(self) -> bool:
        """Wait, and return True."""
        return self.wait()

    def exception(self) -> None:
        """None: a captured collective does not fail."""
        return None

    def result(self) -> list[torch.Tensor]:
        """Wait, and return the user's output buffers."""
        self.wait()
        return self._outputs

    def get_future(self) -> CapturedFuture:  # type: ignore[override]
        """The future whose value is the list of output buffers."""
        return self._future


class WorkInBatch(CapturedWork):
    """The handle of some operations of a batch, of which several may be in one call.

    Args:
        works: of the calls that the operations are in.
    """

    def __init__(self, name: str, works: Sequence[CapturedWork], outputs: list[torch.Tensor]) -> None:
        super().__init__(name, [], lambda results: None, outputs)
        self._works = works

    def wait(self, timeout: Any = None) -> bool:
        """Wait for the calls."""
        for each in self._works:
            each.wait()
        return super().wait()


class CapturedFuture:
    """The future of a captured collective, or of a callback that was attached to one with `then`.

    Callbacks run, in order, where the collective is waited for.
    """

    def __init__(self, wait: Callable[[], Any]) -> None:
        self._wait = wait
        self._value: Any = None
        self._finished = False
        self._callbacks: list[Callable[[CapturedFuture], Any]] = []

    def finish(self, value: Any) -> None:
        """Set the value and run the callbacks in order."""
        self._value = value
        self._finished = True
        for callback in self._callbacks:
            callback(self)
        self._callbacks.clear()

    def wait(self) -> Any:
        """Wait for the collective and return the value: its list of output tensors, or a callback's result."""
        if not self._finished:
            self._wait()
        return self._value

    def value(self) -> Any:
        """The same as :meth:`wait`."""
        return self.wait()

    def done(self) -> bool:
        """Wait, and return True."""
        self.wait()
        return True

    def then(self, callback: Callable[[CapturedFuture], Any]) -> CapturedFuture:
        """A future of the value that `callback` returns when it is called with this future."""
        child = CapturedFuture(self.wait)
        self.add_done_callback(lambda finished: child.finish(callback(finished)))
        return child

    def add_done_callback(self, callback: Callable[[CapturedFuture], Any]) -> None:
        """Call `callback` with this future where the collective is waited for, or now if it was."""
        if self._finished:
            callback(self)
        else:
            self._callbacks.append(callback)
