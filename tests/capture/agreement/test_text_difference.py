"""The difference of two texts: exact where small, quick and honest where large."""

from __future__ import annotations

from weft.capture.agreement.text_difference import difference


def test_equal_texts_have_no_difference() -> None:
    assert difference("a\nb", "a\nb\n", "x", "y") == ""


def test_a_changed_line_is_shown_with_context_and_line_numbers() -> None:
    before = "\n".join(f"line {i}" for i in range(1, 21))
    after = before.replace("line 10\n", "line ten\nline ten and a half\n")
    assert difference(before, after, "rank 0", "rank 3").splitlines() == [
        "--- rank 0",
        "+++ rank 3",
        "@@ line 7 | line 7 @@",
        "  line 7",
        "  line 8",
        "  line 9",
        "- line 10",
        "+ line ten",
        "+ line ten and a half",
        "  line 11",
        "  line 12",
        "  line 13",
    ]


def test_two_hunks_have_the_line_numbers_of_both_texts() -> None:
    before = "\n".join(f"line {i}" for i in range(1, 101))
    after = before.replace("line 20\n", "").replace("line 70", "line seventy")
    shown = difference(before, after, "a", "b").splitlines()
    heads = [line for line in shown if line.startswith("@@")]
    assert heads == ["@@ line 17 | line 17 @@", "@@ line 67 | line 66 @@"]
    assert [line for line in shown[2:] if line[0] in "+-"] == ["- line 20", "- line 70", "+ line seventy"]


def test_a_longer_text_shows_its_added_lines() -> None:
    assert difference("a", "a\nb", "x", "y").splitlines()[-1] == "+ b"
    assert difference("", "b", "x", "y").splitlines()[-1] == "+ b"


def test_differences_of_long_texts_are_trimmed() -> None:
    before = "\n".join(f"add({i % 7})" for i in range(100_000))
    after = "\n".join(f"add({i % 5})" for i in range(100_000))
    shown = difference(before, after, "x", "y").splitlines()
    assert len(shown) == 61
    assert shown[-1] == "... (of 100000 and 100000 lines; later differences are not shown)"


def test_a_single_difference_deep_in_a_long_text_is_not_trimmed() -> None:
    before = "\n".join(f"line {i}" for i in range(50_000))
    shown = difference(before, before.replace("line 40000\n", ""), "x", "y").splitlines()
    assert len(shown) == 10
    assert "- line 40000" in shown
