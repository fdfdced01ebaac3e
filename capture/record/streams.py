"""The user's side streams and events, as nodes and metadata that order the graph.

A node that was issued on a side stream has its number in ``node.meta["stream"]``. Streams are numbered in the order
in which the step names them; 0 is the stream that is current when the step begins. The calls that order streams are
nodes with effects:

``stream_wait(waiting, waited)``            ``waiting.wait_stream(waited)``
``event_record(event, stream)``             ``event.record(stream)``, by the event's number
``event_wait(event, stream)``               ``stream.wait_event(event)``
``stream_synchronize(stream)``              the host waits; so do ``event_synchronize(event)``,
                                            ``device_synchronize()``
``record_stream(tensor, stream)``           the memory of the tensor is in use on that stream
``stream_begin(stream)``, ``stream_end``    the step's work on a side stream comes after what was on it before
                                            the step, and before what is put on it later

An event that the step has not recorded before it waits for it is one of outside: another stream may be writing inputs
of the step until then. Passes start all-gathers of parameters early and move other reads of inputs. So the step also
waits for such an event in front of everything, by a fence like ``stream_begin``.

An executor that runs everything on one stream needs no ``stream_wait``: one stream keeps the order, so the call does
nothing. The other calls have an effect outside the step. Each call of the step makes them again on the user's own
objects, with the stream of the program for stream 0. On a machine without a GPU they do nothing.

On a GPU the plain ``torch.Stream`` and ``torch.Event`` are C types whose methods cannot be replaced. Nodes on such a
stream are marked, and fenced by ``stream_begin`` and ``stream_end``. Waits between such streams are not recorded, and
an event that the step records is recorded once, by the capture. Use the classes of ``torch.cuda`` instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.fx

from weft import torch_adapter
from weft.capture.fake import fake_streams
from weft.capture.fake.fake_world import current_fake_world
from weft.capture.node_meta import meta_of
from weft.capture.record.recorder import OpRecorder
from weft.capture.state.tensor_memory import inner_tensor
from weft.capture.user_code import user_frames, user_line
from weft.errors import UncapturableStreamCall
from weft.thread_patches import replaced


def stream_wait(waiting: int, waited: int) -> None:
    """Target of a node: later work on stream ``waiting`` comes after all work issued on ``waited`` so far.

    It does nothing when called, because a program on one stream keeps this order by itself.
    """


class StreamCall:
    """Target of a node: a call on streams or events that has an effect outside the step.

    Args:
        name: of the call in the graph.
        call: makes it, with the values of the node's tensor arguments; None where there is no GPU.
    """

    def __init__(self, name: str, call: Callable[..., Any] | None) -> None:
        self.__name__ = self.__qualname__ = name
        self.__module__ = __name__
        self._call = call

    def __call__(self, *args: Any) -> None:
        if self._call is not None:
            self._call(*(arg for arg in args if isinstance(arg, torch.Tensor)))


class Streams:
    """Numbers the streams and events of one capture and records what orders them.

    Args:
        recorder: writes the graph; asked for the current stream at each node.
    """

    def __init__(self, recorder: OpRecorder) -> None:
        self._recorder = recorder
        self._real = current_fake_world() is None
        self._numbers: dict[Any, int] = {}
        self._streams: list[Any] = []
        self._events: dict[int, tuple[int, Any]] = {}
        self._recorded: set[int] = set()  # events that the step has recorded so far

    @contextmanager
    def noted(self) -> Iterator[None]:
        """While active, calls of the streams and events of ``torch.cuda`` are recorded instead of made.

        Does nothing where there is no GPU.
        """
        if not torch.cuda.is_available():
            yield
            return
        stream, event = (
            (torch.cuda.Stream, torch.cuda.Event) if self._real else (fake_streams.Stream, fake_streams.Event)
        )
        if torch.cuda.is_initialized():  # else the step is the first user of the GPU, on the default stream
            self._admit(torch.cuda.current_stream())
        with ExitStack() as stack:
            for owner, name, replacement in (
                (stream, "wait_stream", self._wait_stream),
                (stream, "wait_event", lambda stream, event: self._wait_event(event, stream)),
                (stream, "record_event", self._record_event(event)),
                (stream, "synchronize", self._synchronize),
                (stream, "query", self._refuse("Stream.query")),
                (event, "record", self._record),
                (event, "wait", self._wait_event),
                (event, "synchronize", self._synchronize_event),
                (event, "query", self._refuse("Event.query")),
                (event, "elapsed_time", self._refuse("Event.elapsed_time")),
                (torch.Tensor, "record_stream", self._record_stream),
                (torch.cuda, "synchronize", self._synchronize_device),
                (torch.accelerator, "synchronize", self._synchronize_device),
            ):
                stack.enter_context(replaced(owner, name, _method(replacement)))
            self._recorder.stream = self.current
            try:
                yield
            finally:
                self._recorder.stream = None

    def current(self) -> int:
        """The number of the stream that is current in Python."""
        if not self._real:  # asked at each node: not through the replacements of torch's functions
            return self._number(fake_streams.current_stream())
        if not torch.cuda.is_initialized():
            return 0
        number = self._numbers.get(torch_adapter.current_stream_key())
        return self._number(torch.cuda.current_stream()) if number is None else number

    def end(self) -> None:
        """Append the last nodes of the graph: later work on the side streams comes after the step."""
        for number, stream in enumerate(self._streams):
            if number:
                self._note(
                    "stream_end",
                    lambda stream=stream: stream.wait_stream(torch.cuda.current_stream()),
                    number,
                )

    # ---- replacements of the user's calls

    def _wait_stream(self, waiting: Any, waited: Any) -> None:
        self._recorder.emit_effect(stream_wait, self._number(waiting), self._number(waited))

    def _record(self, event: Any, stream: Any = None) -> None:
        self._recorded.add(self._event(event))
        self._note("event_record", lambda: event.record(), self._event(event), self._stream_or_current(stream))

    def _record_event(self, kind: Any) -> Callable[..., Any]:
        def record_event(stream: Any, event: Any = None) -> Any:
            event = kind() if event is None else event
            self._record(event, stream)
            return event

        return record_event

    def _wait_event(self, event: Any, stream: Any = None) -> None:
        self._follow(event, "event_wait", lambda: event.wait(), self._stream_or_current(stream))

    def _synchronize(self, stream: Any) -> None:
        number = self._number(stream)
        self._note("stream_synchronize", lambda: torch.cuda.current_stream().synchronize(), number)

    def _synchronize_event(self, event: Any) -> None:
        self._follow(event, "event_synchronize", lambda: event.synchronize())

    def _synchronize_device(self, device: Any = None) -> None:
        self._note("device_synchronize", lambda: torch.cuda.synchronize(device))

    def _record_stream(self, tensor: torch.Tensor, stream: Any) -> None:
        number, inner = self._number(stream), inner_tensor(tensor)[0]
        self._note("record_stream", lambda value: value.record_stream(stream), self._recorder.value(inner), number)

    def _refuse(self, name: str) -> Callable[..., Any]:
        def refuse(*args: Any) -> None:
            raise UncapturableStreamCall(name, user_line())

        return refuse

    # ---- the graph

    def _note(self, name: str, call: Callable[..., Any], *args: Any) -> torch.fx.Node:
        return self._recorder.emit_effect(StreamCall(name, call if self._real else None), *args)

    def _follow(self, event: Any, name: str, call: Callable[..., Any], *args: Any) -> None:
        """Note a call that waits for an event."""
        number = self._event(event)
        if number not in self._recorded:
            self._fence(name, call, number, *args)
        # At its place too: the step may call code that records the event, which no capture sees.
        self._note(name, call, number, *args)

    def _fence(self, name: str, call: Callable[..., Any], *args: Any) -> None:
        """A call in front of all others, of which no pass moves one across it."""
        node = self._recorder.emit_first(StreamCall(name, call if self._real else None), *args)
        node.meta = meta_of((), val=None, effect=True, fence=True, frames=user_frames(4), module="", stage="forward")

    def _stream_or_current(self, stream: Any) -> int:
        return self.current() if stream is None else self._number(stream)

    def _event(self, event: Any) -> int:
        return self._events.setdefault(id(event), (len(self._events), event))[0]

    def _number(self, stream: Any) -> int:
        if not self._streams:
            self._admit(torch.cuda.default_stream())
        number = self._numbers.get(self._key(stream))
        if number is None:
            number = self._admit(stream)
            self._begin(stream, number)
        return number

    def _admit(self, stream: Any) -> int:
        self._streams.append(stream)
        return self._numbers.setdefault(self._key(stream), len(self._numbers))

    def _key(self, stream: Any) -> Any:
        """Equal for all Python objects of one stream."""
        return (stream.device_index, stream.stream_id) if self._real else stream

    def _begin(self, stream: Any, number: int) -> None:
        """Order the step after earlier work on a side stream that it names for the first time, by a fence."""
        self._fence("stream_begin", lambda: torch.cuda.current_stream().wait_stream(stream), number)


def _method(replacement: Callable[..., Any]) -> Callable[..., Any]:
    """A plain function, which a class binds to its objects; ``replacement`` is bound already."""
    return lambda *args, **kwargs: replacement(*args, **kwargs)
