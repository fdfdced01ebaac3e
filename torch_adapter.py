"""The one place where weft touches torch names that torch does not promise to keep.

Each function works on torch 2.11 and 2.13 and is tested on both; nothing else in weft imports a private torch name.
"""

from __future__ import annotations
