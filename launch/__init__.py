"""The command line: ``weft launch``, ``weft calibrate``, ``weft checkpoint`` and tools around them."""
