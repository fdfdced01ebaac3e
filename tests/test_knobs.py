"""Knobs: their environment names, what they refuse, and that the docs page lists them."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest

from weft import errors, knobs
from weft.transport_rows import TRANSPORTS

ROOT = Path(__file__).parents[1]


def test_the_docs_page_lists_every_knob() -> None:
    text = (ROOT / "docs" / "knobs.md").read_text()
    assert text == knobs.page(), "run: python -m weft.knobs > docs/knobs.md"
    for name, knob in knobs.KNOBS.items():
        assert f"| `{name}` | `WEFT_{name.upper()}` |" in knobs.page()
        assert len(knob.doc) > 20
        assert knob.doc.endswith(".")


def test_defaults_have_the_type_they_declare() -> None:
    for knob in knobs.KNOBS.values():
        assert knob.check(knob.default) == knob.default


@pytest.mark.parametrize(
    ("variable", "text", "name", "value"),
    [
        ("WEFT_AGREEMENT_TIMEOUT_S", "2.5", "agreement_timeout_s", 2.5),
        ("WEFT_AGREEMENT_TIMEOUT_S", "7", "agreement_timeout_s", 7.0),
        ("WEFT_RECAPTURE_LIMIT", "3", "recapture_limit", 3),
        ("WEFT_VERIFY", "1", "verify", True),
        ("WEFT_VERIFY", "False", "verify", False),
    ],
)
def test_environment(variable: str, text: str, name: str, value: object) -> None:
    read = knobs.read_environment({variable: text, "PATH": "x"})
    assert read == {name: value}
    assert type(read[name]) is type(value)


@pytest.mark.parametrize(
    ("variable", "text"),
    [("WEFT_VERIFY", "maybe"), ("WEFT_RECAPTURE_LIMIT", "1.5"), ("WEFT_RECAPTURE_LIMIT", "")],
)
def test_a_value_that_does_not_parse_is_named(variable: str, text: str) -> None:
    with pytest.raises(errors.InvalidKnob, match=f"{variable} = '{text}'"):
        knobs.read_environment({variable: text})


def test_the_transports_of_the_knob_are_those_of_the_compiler() -> None:
    words, doc = knobs.KNOBS["transports"].wanted(), knobs.KNOBS["transports"].doc
    assert all(name in words and name in doc for name in TRANSPORTS)
    for accepted in ("", "nccl", "all", "push, pull_16", "gloo,two_shot_8"):
        assert knobs.KNOBS["transports"].check(accepted) == accepted


def test_optional_knobs() -> None:
    knob = knobs.Knob("cache_dir", str, True, None, "Where kernels are kept.")
    assert knob.parse("") is None
    assert knob.parse("/x") == "/x"
    assert knob.check(None) is None


def test_an_unknown_variable_is_warned_about_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "weft.knobs"):
        assert knobs.read_environment({"WEFT_RECAPTURE_LIMITS": "3", "WEFTY": "1"}) == {}
    (record,) = caplog.records
    assert record.getMessage() == (
        "WEFT_RECAPTURE_LIMITS is no knob of weft and has no effect; WEFT_RECAPTURE_LIMIT is"
    )


def test_the_environment_is_read_at_import() -> None:
    code = "from weft import knobs; print(knobs.recapture_limit, knobs.KNOBS['recapture_limit'].default)"
    environment = {"WEFT_RECAPTURE_LIMIT": "5", "PYTHONPATH": ":".join(sys.path), "WEFT_NONSENSE": "1"}
    run = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True, timeout=60
    )
    assert run.stdout.split() == ["5", "8"]
    assert run.stderr.count("WEFT_NONSENSE") == 1


def test_override() -> None:
    with knobs.override(recapture_limit=2, agreement_timeout_s=1):
        assert knobs.recapture_limit == 2
        assert type(knobs.agreement_timeout_s) is float
        with pytest.raises(ZeroDivisionError), knobs.override(recapture_limit=0):
            print(1 // knobs.recapture_limit)
        assert knobs.recapture_limit == 2
    assert knobs.recapture_limit == 8


def test_override_refuses_unknown_names_and_wrong_types() -> None:
    with pytest.raises(errors.UnknownKnob, match="recapture_limits does not exist"):
        knobs.override(recapture_limits=3).__enter__()
    for wrong in ({"recapture_limit": 2.0}, {"verify": 1}, {"agreement_timeout_s": "3"}, {"verify": None}):
        with pytest.raises(errors.InvalidKnob, match="this knob takes"):
            knobs.override(**wrong).__enter__()
    assert (knobs.recapture_limit, knobs.verify) == (8, False)
