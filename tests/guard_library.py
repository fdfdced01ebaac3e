"""The compiled checks of guards, for tests of them."""

from __future__ import annotations

import os
import shutil
from types import ModuleType

import pytest

from weft import state_checks


def compiled_checks(library: ModuleType | None) -> ModuleType:
    """``library`` as :func:`weft.state_checks.compile_now` made it. Skips the test where there is no compiler, and
    fails it where there is one that has made nothing."""
    if library is None:
        if not os.environ.get("CXX") and not any(map(shutil.which, ("c++", "g++", "clang++"))):
            pytest.skip("no compiler")
        pytest.fail("the compiler did not make the checks of guards: run it with the logger weft at INFO")
    return library


def compile_checks() -> ModuleType:
    """The compiled checks of this process, see :func:`compiled_checks`."""
    return compiled_checks(state_checks.compile_now())
