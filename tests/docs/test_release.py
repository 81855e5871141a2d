"""The workflow that publishes a release names what is there, and one version stands everywhere."""

from __future__ import annotations

import importlib.util
import re
import tomllib
from xml.etree import ElementTree as ET

import yaml

import ckpt_tools
from ckpt_tools.version import GONE_IN
from tests.jobs import ROOT

RELEASE = ROOT / ".github" / "workflows" / "release.yml"


def test_the_version_is_one() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert newest is not None
    assert project["version"] == ckpt_tools.__version__ == newest[1]
    numbers = [tuple(map(int, text.split(".")[:2])) for text in (GONE_IN, ckpt_tools.__version__)]
    assert numbers[0] > numbers[1], "names whose time is over are still there"


def test_the_changelog_has_a_screen_for_the_newest_release() -> None:
    parts = re.split(r"^## ", (ROOT / "CHANGELOG.md").read_text(), flags=re.M)
    kinds = re.findall(r"^\*\*(\w+)\*\*", parts[1], re.M)
    assert {"New", "Changed", "Fixed", "Security", "Deprecated"} <= set(kinds)
    assert len(parts[1].splitlines()) <= 60


def test_the_workflow_publishes_only_what_was_built_and_tested() -> None:
    jobs = yaml.safe_load(RELEASE.read_text())["jobs"]
    commands = [step["run"] for step in jobs["build"]["steps"] if "run" in step]
    tested = next(n for n, command in enumerate(commands) if ".ci/run" in command)
    built = next(n for n, command in enumerate(commands) if "make dist" in command)
    assert tested < built and jobs["publish"]["needs"] == "build"
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"make ([\w ]+)", "\n".join(commands)):
        assert all(re.search(rf"^{name}:", makefile, re.M) for name in target.split())


def test_the_site_needs_no_network() -> None:
    """Diagrams are pictures, drawn by the build, and the committed ones are those of the script."""
    loader = importlib.util.spec_from_file_location("diagrams", ROOT / "docs" / "diagrams.py")
    assert loader is not None and loader.loader is not None
    diagrams = importlib.util.module_from_spec(loader)
    loader.loader.exec_module(diagrams)
    for name, draw in diagrams.PICTURES.items():
        text = (ROOT / "docs" / "images" / name).read_text()
        assert text == draw() and ET.fromstring(text).tag.endswith("svg")
        assert "<script" not in text and "href" not in text
    pages = [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]
    assert not [page for page in pages if "```mermaid" in page.read_text()]
    assert "font: false" in (ROOT / ".mkdocs.yml").read_text()
