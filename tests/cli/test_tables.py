"""Tables fit the terminal, and lose nothing; colours are only for terminals that want them."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import ckpt_tools
from ckpt_tools.cli.tables import table
from tests.command import run_command

LONG = "optimizer.state.layers.{}.self_attention.{}.weight.exp_avg"
NAMES = [LONG.format(number, part) for number in (1, 2) for part in ("query", "key")]
SENTENCE = "expected CRC-32 45afc4e6, got 7675f5c0, and this is told with many more words"


def printed(
    width: int | None,
    rows: list[list[str]],
    head: list[str],
    right: tuple[int, ...],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> list[str]:
    monkeypatch.delenv("COLUMNS", raising=False)
    if width is not None:
        monkeypatch.setenv("COLUMNS", str(width))
    table(head, rows, right)
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("width", [60, 80, 120, 200, None])
def test_a_table_fits_and_keeps_every_number_and_every_word_of_its_last_column(
    width: int | None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [[name, str(10**k), "-", f"{k}.25", SENTENCE] for k, name in enumerate(NAMES, 5)]
    head = ["tensor", "bytes", "nothing", "value", "what"]
    lines = printed(width, rows, head, (1, 2, 3), capsys, monkeypatch)
    assert all(len(line) <= (width or 1000) for line in lines)
    text = "\n".join(lines)
    for row in rows:
        assert row[1] in text and row[3] in text
    words = text.split()
    assert all(words.count(word) >= len(rows) for word in SENTENCE.split())
    if width in (200, None):
        assert len(lines) == 1 + len(rows) and all(name in text for name in NAMES)


def test_names_stay_different_when_they_are_shortened(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [[name, "1"] for name in NAMES]
    for width in (36, 40, 50):
        lines = printed(width, rows, ["tensor", "n"], (1,), capsys, monkeypatch)
        firsts = "\n".join(lines[1:])
        shown = [line.split()[0] for line in lines[1:] if line.split()[-1] == "1"]
        assert len(set(shown)) == len(NAMES) or firsts.count("weight") == len(NAMES)


def test_columns_without_room_follow_below_with_the_same_names(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    head = ["name", *(f"metric{k}" for k in range(9)), "state"]
    rows = [[f"step-{n}", *(f"{n}.{k:06}" for k in range(9)), "complete"] for n in (1, 2)]
    lines = printed(60, rows, head, tuple(range(1, 10)), capsys, monkeypatch)
    assert all(len(line) <= 60 for line in lines)
    text = "\n".join(lines)
    assert all(cell in text for row in rows for cell in row)
    blocks = text.split("\n\n")
    assert len(blocks) > 1 and all(block.split()[0] == "name" for block in blocks)
    assert "state" in blocks[0] and text.count("complete") == 2


@pytest.mark.parametrize("name", ["\u0301" * 50, "e\u0301" * 40, "日本語" * 20, "日本", ""])
def test_signs_without_a_width_and_wide_ones_end(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for width in (20, 40, 80):
        rows = [[name, "1", name], [NAMES[0], "22", SENTENCE]]
        lines = printed(width, rows, ["tensor", "n", "what"], (1,), capsys, monkeypatch)
        assert "22" in "".join(lines)
    assert len(printed(None, [["日本", "1"]], ["name", "n"], (1,), capsys, monkeypatch)[0]) == 9


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("tables") / "run"
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(12)))
    optimizer = torch.optim.AdamW(model.parameters())
    with ckpt_tools.CheckpointManager(root, keep_last=None, statistics=True) as checkpoints:
        for step in (1, 2):
            model(torch.ones(1, 8)).sum().backward()
            optimizer.step()
            state = {"optimizer": optimizer, "model": model}
            checkpoints.save(step, state, asynchronous=False, metrics={"loss": 1 / step, "b": 2})
    return root


@pytest.mark.parametrize("columns", [80, 200])
def test_every_verb_that_prints_a_table_fits(columns: int, run: Path) -> None:
    one, two = run / "step-00000001", run / "step-00000002"
    env = os.environ | {"COLUMNS": str(columns)}
    for words in (
        ("inspect", "step-00000001"),
        ("inspect", "step-00000001", "--tree"),
        ("inspect", "step-00000001", "--files"),
        ("inspect", "."),
        ("ls", "."),
        ("ls", ".", "--metrics", "--timing"),
        ("ls", ".", "--bytes"),
        ("diff", "step-00000001", "step-00000002"),
        ("stats", "step-00000001", "--histogram"),
        ("check", "."),
        ("verify", "step-00000001", "--deep"),
        ("prune", ".", "--keep-last", "1", "--dry-run"),
        ("thin", ".", "--keep-full", "1", "--dry-run"),
    ):
        done = run_command(*words, env=env, cwd=run)
        assert done.returncode in (0, 1, 10), done.stderr
        rows = [line for line in done.stdout.splitlines() if line.startswith("  ")]
        assert all(len(line) <= columns for line in rows), (words, done.stdout)
    assert one.exists() and two.exists()


def test_weights_come_before_optimizers_and_objects_are_folded(run: Path) -> None:
    text = run_command("inspect", run / "step-00000001").stdout
    keys = text.partition("key ")[2]
    assert keys.index("model") < keys.index("optimizer")
    assert "optimizer.param_groups.* (" in text and text.count("param_groups") == 1
    text = run_command("diff", run / "step-00000001", run / "step-00000002").stdout
    assert text.index("model.*.weight") < text.index("optimizer.state.")
    text = run_command("stats", run / "step-00000001").stdout
    assert text.rindex("model.") < text.index("optimizer.state.")


def on_terminal(words: list[str], env: dict[str, str]) -> str:
    """Returns what a command writes to a terminal."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "ckpt_tools", *words], stdout=theirs, stderr=theirs, env=env
    )
    os.close(theirs)
    found = b""
    while True:
        try:
            part = os.read(ours, 1 << 16)
        except OSError:  # the terminal is closed
            break
        if not part:
            break
        found += part
    process.wait(60)
    os.close(ours)
    return found.decode()


def test_colours_are_for_terminals_without_no_color(run: Path) -> None:
    env = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "COLUMNS")}
    for words in (["ls", str(run)], ["inspect", str(run / "nothing")]):
        plain = run_command(*words, env=env)
        assert "\x1b" not in plain.stdout + plain.stderr
        assert "\x1b[" in on_terminal(words, env)
        assert "\x1b" not in on_terminal(words, env | {"NO_COLOR": "1"})
