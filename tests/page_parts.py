"""What README, CONTRIBUTING and docs/ hold for a reader to run or follow: Python blocks, commands, links.

Imports nothing outside Python's library, so that ``.ci/newcomer.py`` uses it without what the tests need.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

LINK = re.compile(r"(?<!!)\[[^\]]+\]\(([^)\s]+)\)|!\[[^\]]*\]\(([^)\s]+)\)")
CODE = re.compile(
    r"<!-- setup\n(?P<setup>.*?)-->|^```python\n(?P<block>.*?)^```(?:\n+```text\n(?P<shown>.*?)^```)?",
    re.DOTALL | re.MULTILINE,
)
# A page whose blocks are a program for several processes says so.
PROCESSES = re.compile(r"<!-- processes: (\d) -->")
FENCE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
_COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
_COMMAND = re.compile(
    r"^ {4}((?:\w+=\S+ )*(?:\.?[\w/.]*/)?(?:weft|python|torchrun|make|pip|newcomer)(?: .*)?)$", re.MULTILINE
)


def pages(root: Path) -> list[Path]:
    """All pages of a checkout."""
    return sorted([*root.glob("*.md"), *(root / "docs").rglob("*.md")])


def links(text: str) -> list[str]:
    """The targets of a page's links and images."""
    return [found[1] or found[2] for found in LINK.finditer(FENCE.sub("", text))]


def anchors(page: Path) -> set[str]:
    """The anchors that a page's headings get: lower case, no punctuation, hyphens for spaces."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(page: Path) -> list[str]:
    """Links of ``page`` to files or headings that do not exist. Links to other sites are not followed."""
    wrong = []
    for link in links(page.read_text()):
        if re.match(r"[a-z]+:", link):
            continue
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            wrong.append(link)
    return wrong


def blocks(text: str) -> list[str]:
    """The Python blocks that a page shows."""
    return [found["block"] for found in CODE.finditer(text) if found["block"] is not None]


def program(text: str, after_each: str = "") -> str:
    """The Python of a page with its set-up, in order, and a line after each block; empty where it has none."""
    parts = [found["setup"] or found["block"] for found in CODE.finditer(text)]
    return "".join(f"{textwrap.dedent(part)}\n{after_each}\n" for part in parts)


def commands(text: str) -> Iterator[str]:
    """The commands that a page shows, without their comments."""
    for found in _COMMAND.finditer(_COMMENT.sub("", FENCE.sub("", text))):
        yield re.sub(r"\s+# .*", "", found[1]).strip()
