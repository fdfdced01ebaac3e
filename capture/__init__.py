"""The tracer: from one call of a training step to its StepGraph. :mod:`weft.capture.record.tracer` has all stages.

Where to look:

- Which operation becomes which node: ``record/recorder.py``.
- How in-place operations such as ``p.grad.add_()``, and views, become values: ``record/tracked_storages.py``, with the
  functional form of each operation in ``record/functional_ops.py``.
- What a step reads and changes of Python's state: ``state/reachable_state.py``.
- When a captured step may run again: ``guards/guards.py``. What ranks compare: ``agreement/agreement.py``.
- The graph itself: ``graph.py``; its inputs and outputs: ``step_interface.py``; metadata of nodes: ``node_meta.py``.
"""
