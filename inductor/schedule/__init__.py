"""From a graph with collectives to its order of issue; read :mod:`weft.inductor.schedule.planner` first.

The sizes of buckets are decided in ``bucketing.py`` (``cut_into_buckets``), for the largest sizes that ``planner.py``
tries; the order of issue in ``search_order.py``, from orders that ``list_schedule.py`` makes and ``local_search.py``
improves; what is gathered twice in ``reshard.py``; the transport of each collective in ``select_transport.py``.
"""
