"""Every block of code in the docs: commands parse, and Python calls what is there.

The tutorial and the how-to on runs are also followed literally (test_tutorial.py, test_howto.py).
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import re
import shlex
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from typer.main import get_command

import ckpt_tools
from ckpt_tools.cli.app import app

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES = [path for path in PAGES if "history" not in path.parts and path.name != "command.md"]
FENCE = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^ *```", re.M | re.S)


def blocks(path: Path, language: str) -> Iterator[str]:
    for _, found, text in FENCE.findall(path.read_text()):
        if found == language:
            yield textwrap.dedent(text)


def commands(path: Path) -> list[list[str]]:
    """The words of each line of a block that begins with `ckpt`, up to a pipe or a comment."""
    text = re.sub(r"\\\n\s*", " ", path.read_text())
    lines = [line for block in blocks(path, "console") for line in block.splitlines()]
    lines += [line[4:] for line in text.splitlines() if line.startswith("    ")]
    found = [line.removeprefix("$ ") for line in lines]
    return [
        shlex.split(re.split(r"\s(?:#|&&|\||>)\s|\s#", line)[0])[1:]
        for line in found
        if re.match("ckpt [a-z]", line)
    ]


def parse(words: list[str]) -> None:
    """Parses a command line as `ckpt` does, and runs nothing."""
    group = get_command(app)
    assert isinstance(group, click.Group)
    with click.Context(group, info_name="ckpt") as context:
        command = group.get_command(context, words[0])
        assert command is not None, f"no verb {words[0]}"
        command.make_context(words[0], list(words[1:]), parent=context)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_each_command_parses(path: Path) -> None:
    for words in commands(path):
        try:
            parse(words)
        except (click.UsageError, ckpt_tools.CheckpointError) as error:
            pytest.fail(f"ckpt {' '.join(words)}: {error}")


def test_many_commands_are_found_and_a_wrong_one_fails() -> None:
    assert sum(len(commands(path)) for path in PAGES) > 50
    for words in (["merge", "a", "b", "--no-such"], ["mergee", "a"], ["merge", "a"]):
        with pytest.raises((click.UsageError, AssertionError)):
            parse(words)


def resolve(node: ast.expr, names: dict[str, Any]) -> Any:
    """What an expression such as `ckpt_tools.save` is; None if it is not of this package."""
    if isinstance(node, ast.Name):
        return names.get(node.id)
    if isinstance(node, ast.Attribute):
        owner = resolve(node.value, names)
        if inspect.ismodule(owner) or inspect.isclass(owner):
            assert hasattr(owner, node.attr), f"{owner.__name__} has no {node.attr}"
            return getattr(owner, node.attr)
    return None


def imported(tree: ast.Module) -> dict[str, Any]:
    names: dict[str, Any] = {
        "ckpt_tools": ckpt_tools,
        "CheckpointManager": ckpt_tools.CheckpointManager,
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("ckpt_tools"):
            assert importlib.util.find_spec(node.module or ""), node.module
            for one in node.names:
                try:
                    module = importlib.import_module(node.module or "")
                    assert hasattr(module, one.name), f"{node.module} has no {one.name}"
                except ImportError:  # of a trainer that has an environment of its own
                    continue
                names[one.asname or one.name] = getattr(module, one.name)
    return names


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_each_python_block_calls_what_is_there(path: Path) -> None:
    for text in blocks(path, "python"):
        tree = ast.parse(text)
        names = imported(tree)
        for node in ast.walk(tree):
            # methods of a manager have the usual name in all pages
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "checkpoints":
                manager = ckpt_tools.CheckpointManager
                known = hasattr(manager, node.attr) or node.attr in manager.__annotations__
                assert known or node.attr == "protected_steps", f"no checkpoints.{node.attr}"
            if not isinstance(node, ast.Call):
                continue
            called = resolve(node.func, names)
            if (
                isinstance(node.func, ast.Attribute)
                and ast.unparse(node.func.value) == "checkpoints"
            ):
                called = getattr(ckpt_tools.CheckpointManager, node.func.attr)
            if called is None or not callable(called):
                continue
            given = [word.arg for word in node.keywords if word.arg]
            parameters = inspect.signature(called).parameters
            takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
            unknown = [name for name in given if name not in parameters]
            assert takes_any or not unknown, f"{ast.unparse(node)}: no {unknown}"
