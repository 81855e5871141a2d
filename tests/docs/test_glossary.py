"""One word, one thing: the names in the code follow docs/glossary.md."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

import ckpt_tools

ROOT = Path(ckpt_tools.__file__).parent
GLOSSARY = ROOT.parent / "docs" / "glossary.md"
# These words meant something to their authors only.
OPAQUE = (
    "Held Handed Vouched Past Near Together Offer About How Try Heap Made Trail Within Joint Parts"
    " Prints Seals Place Team Shelf Look Begun Sent Fast"
).split()
# Seams: several modules implement one function under one name.
SEAMS = {"recognise", "read_catalog", "lay_out", "locate", "guess", "read_readable", "read_files"}


def definitions(kind: type = ast.ClassDef) -> dict[str, set[str]]:
    """The public classes or functions of the package, and the modules that define each."""
    found: dict[str, set[str]] = defaultdict(set)
    for path in ROOT.rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, kind) and not node.name.startswith("_"):
                found[node.name].add(str(path.relative_to(ROOT)))
    return found


def test_no_class_name_has_two_meanings_and_none_is_opaque() -> None:
    found = definitions()
    assert not {name: where for name, where in found.items() if len(where) > 1}
    assert not set(OPAQUE) & found.keys()


def test_no_function_name_has_two_meanings() -> None:
    """A command has the name of the operation that it calls."""
    found = {
        name: {module for module in where if not module.startswith("cli/")}
        for name, where in definitions(ast.FunctionDef).items()
        if name not in SEAMS
    }
    assert not {name: where for name, where in found.items() if len(where) > 1}


def test_the_glossary_is_sorted_and_has_each_word_once() -> None:
    words = re.findall(r"^\| ([\w ]+) \| ", GLOSSARY.read_text(), re.M)[1:]
    assert words == sorted(set(words)) and len(words) > 25


def test_words_of_the_glossary_are_the_names_in_the_code() -> None:
    """A class that is named after a word of the glossary is in the folder of that meaning."""
    where = {
        "Attempt": "publish/",
        "Batch": "engine/",
        "Box": "core/",
        "Catalog": "core/",
        "Chunk": "core/",
        "Destination": "publish/",
        "Extent": "core/",
        "Group": "ranks/",
        "Journal": "publish/",
        "Lease": "publish/",
        "Manifest": "publish/",
        "Mirror": "loop/",
        "Overlap": "core/",
        "Plan": "core/",
        "Request": "formats/",
        "Shard": "loop/",
        "Slot": "core/",
        "Step": "run/",
        "Tile": "engine/",
        "Upload": "storage/",
    }
    found = definitions()
    for name, folder in where.items():
        (module,) = found[name]
        assert module.startswith(folder), (name, module)
