"""The handle of a collective that was issued during a capture: what happens when it is waited for.

The functional operation is recorded where the collective is issued; the wait, and the copy into the user's
buffer, where the user waits. Asking a handle for anything that only a finished collective has counts as
waiting for it: a capture has no clock, so a loop that polls must see the end at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from weft.capture.user_code import user_line

Write = Callable[[Sequence[torch.Tensor]], None]


class CapturedWork(dist.Work):
    """A collective on its way, in the place of torch's Work.

    Args:
        name: the function that issued it, for messages.
        results: what the functional operation returned, to be waited for one by one.
        write: puts the waited results into the user's buffers.
        outputs: the user's buffers, which futures hold.
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
        """Wait for the results and copy them into the user's buffers; nothing the second time."""
        if not self.waited:
            self.waited = True
            with torch.no_grad():
                self._write([torch.ops._c10d_functional.wait_tensor(result) for result in self._results])
            self._future.finish(self._outputs)
        return True

    def synchronize(self) -> None:
        self.wait()

    def block_current_stream(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self.wait()

    def is_success(self) -> bool:
        return self.wait()

    def exception(self) -> None:
        return None

    def result(self) -> list[torch.Tensor]:
        self.wait()
        return self._outputs

    def get_future(self) -> CapturedFuture:  # type: ignore[override]
        return self._future


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
        """Take the value and run the callbacks."""
        self._value = value
        self._finished = True
        for callback in self._callbacks:
            callback(self)
        self._callbacks.clear()

    def wait(self) -> Any:
        """Wait for the collective; return the value (of a collective: the list of its output tensors)."""
        if not self._finished:
            self._wait()
        return self._value

    def value(self) -> Any:
        return self.wait()

    def done(self) -> bool:
        self.wait()
        return True

    def then(self, callback: Callable[[CapturedFuture], Any]) -> CapturedFuture:
        """A future of what `callback` returns when it is given this future, finished."""
        child = CapturedFuture(self.wait)
        self.add_done_callback(lambda finished: child.finish(callback(finished)))
        return child

    def add_done_callback(self, callback: Callable[[CapturedFuture], Any]) -> None:
        if self._finished:
            callback(self)
        else:
            self._callbacks.append(callback)
