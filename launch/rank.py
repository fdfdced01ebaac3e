"""``python -m weft.launch.rank train.py ...``: one rank of a run, which leaves at once when it is told to stop.

`weft launch` starts its ranks by this module. The script runs as by ``python train.py``: it is ``__main__``, its folder
comes first on the path, and its errors print the same traceback. What differs is the end of a process that was told to
stop, or that an error ends. Exit functions run and files are flushed, and the process is gone. Python would first look
through all objects that training has made, for a second or several, and destroy process groups whose ranks may be gone.
"""

from __future__ import annotations

import io
import os
import signal
import sys
import types

from weft.launch.leave import leave, status_of


def main() -> None:
    """Run the script in ``sys.argv[1]`` with the arguments after it."""
    script = os.path.abspath(sys.argv[1])
    sys.argv = sys.argv[1:]
    if not sys.flags.safe_path:
        sys.path[0] = os.path.dirname(script)  # in place of the working folder, where python -m looks
    module = types.ModuleType("__main__")
    module.__file__ = script
    sys.modules["__main__"] = module
    status = 0
    try:
        with io.open_code(script) as file:
            code = compile(file.read(), script, "exec", dont_inherit=True)
        exec(code, module.__dict__)
    except SystemExit as error:
        status = status_of(error)
    except BaseException as error:  # noqa: BLE001 - the rank ends with it
        trace = error.__traceback__.tb_next if error.__traceback__ is not None else None  # without this file
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, trace
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        status = 128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    signals = sys.modules.get("weft.distributed.stop_signal")
    if status or (signals is not None and signals.stopped()):
        leave(status)


if __name__ == "__main__":
    main()
