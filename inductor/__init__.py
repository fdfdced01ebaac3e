"""The compiler: from a captured StepGraph to the Program that runs it. :mod:`weft.inductor.compiler` has all stages.

Where to look:

- What a collective is, and all that a new one or a new transport touches: ``graph/collectives.py``.
- How large buckets get and which collectives share one: ``schedule/planner.py`` derives the largest size from the
  cluster (``priced``) and tries multiples of it; ``schedule/bucketing.py`` cuts within it (``cut_into_buckets``).
- The order of issue: ``schedule/search_order.py``; without a description of the cluster ``passes/schedule_waits.py``.
- Which loops share a kernel: ``fusion/fuse.py``. What a kernel's text is: ``codegen/kernel.py``.
- Which operations run in place: ``runtime/placement.py``. Where values lie in memory: ``runtime/memory_plan.py``.
"""
