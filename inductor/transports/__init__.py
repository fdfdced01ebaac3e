"""Collectives over memory that ranks share; read :mod:`weft.inductor.transports.peer_calls` first.

A new collective is a row in ``graph/collectives.py``. A new transport is a row in ``transport_rows.py`` and one file
here; the docstring of ``graph/collectives.py`` lists all that either touches. Which transport carries a collective is
decided in ``schedule/select_transport.py``, whether it can in ``peer_calls.py`` (``unsupported_reason``), offsets and
barriers in ``arena.py``.
"""
