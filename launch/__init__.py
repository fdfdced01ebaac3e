"""The command line: ``weft calibrate``."""
