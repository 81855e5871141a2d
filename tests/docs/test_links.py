"""Every link of every page leads somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [
    *sorted(ROOT.glob("*.md")),
    *(p for p in sorted((ROOT / "docs").rglob("*.md")) if p.name != "command.md"),
]
LINK = re.compile(r"\]\(([^)\s]+)\)")
GENERATED = {ROOT / "docs" / "reference" / "command.md"}  # by `make docs`


def without_code(text: str) -> str:
    return re.sub(r"`[^`\n]*`", "", re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S))


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and the site name them."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S)
    found = set()
    for title in re.findall(r"^#+ (.+)$", text, re.M):
        plain = re.sub(r"[^\w\- ]", "", re.sub(r"[`*]|\]\([^)]*\)", "", title).lower())
        found.add(plain.strip().replace(" ", "-"))
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_of_a_page_lead_somewhere(page: Path) -> None:
    for link in LINK.findall(without_code(page.read_text())):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists() or target in GENERATED, link
        assert not anchor or target.suffix != ".md" or anchor in anchors(target), link


def test_every_page_is_in_the_navigation() -> None:
    text = (ROOT / ".mkdocs.yml").read_text()
    named = set(re.findall(r"[\w./-]+\.md", text))
    there = {str(p.relative_to(ROOT / "docs")) for p in (ROOT / "docs").rglob("*.md")}
    assert named - {"reference/command.md"} == there - {"reference/command.md"}
