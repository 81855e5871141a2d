"""The code that the pages on the design name exists."""

from __future__ import annotations

import importlib
import re
from contextlib import suppress
from pathlib import Path

import ckpt_tools

ROOT = Path(__file__).parents[2]
LAYER = "core|ranks|storage|engine|formats|publish|transfer|operations|loop|integrations|cli"


def resolved(dotted: str) -> object:
    """Returns what a dotted name below `ckpt_tools` names: a module, a class, a function."""
    value: object = importlib.import_module("ckpt_tools")
    where = "ckpt_tools"
    for name in dotted.split("."):
        where = f"{where}.{name}"
        with suppress(ModuleNotFoundError):
            importlib.import_module(where)
        value = getattr(value, name)
    return value


def test_the_code_that_the_architecture_names_exists() -> None:
    text = "".join((ROOT / "docs" / page).read_text() for page in ("architecture.md", "scale.md"))
    names = re.findall(rf"`((?:{LAYER})(?:\.\w+)+)`", text)
    names = [name for name in names if not name.endswith(".py")]
    assert len(names) > 20
    for name in names:
        resolved(name)
    paths = re.findall(rf"`((?:{LAYER}|tests)/[\w/]*(?:\.py)?)`", text)
    assert len(paths) > 40
    for path in paths:
        assert (ROOT / path).exists() or (ROOT / "ckpt_tools" / path).exists(), path


def test_the_reference_has_every_public_name() -> None:
    page = (ROOT / "docs" / "reference" / "python.md").read_text()
    special = {"__version__", "open", "distributed"}  # open_checkpoint; a module
    missing = [
        n for n in ckpt_tools.__all__ if n not in special and not re.search(rf"\b{n}\b", page)
    ]
    assert not missing
    for name in re.findall(r"^::: (ckpt_tools[\w.]+)$", page, re.M):
        resolved(name.removeprefix("ckpt_tools."))
