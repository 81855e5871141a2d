"""The command in odd surroundings: closed streams, an ASCII locale, no width, names that other
systems would not have.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import ckpt_tools
from ckpt_tools import StorageError
from tests.command import run_command

COMMAND = f"{shlex.quote(sys.executable)} -m ckpt_tools"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    torch.save({"w": torch.arange(5.0)}, tmp_path / "s.pt")
    return tmp_path / "s.pt"


def shell(line: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["sh", "-c", line], env=os.environ | environment, capture_output=True, text=True
    )


@pytest.mark.slow
@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&-", "<&- >&- 2>&-"])
def test_a_closed_stream_changes_neither_the_result_nor_the_status(
    closed: str, source: Path, tmp_path: Path
) -> None:
    """The number of a closed stream goes to the next file that is opened: messages must not be
    written into that.
    """
    done = shell(f"{COMMAND} merge {source} {tmp_path}/m.safetensors {closed}")
    assert done.returncode == 0 and "Traceback" not in done.stderr
    assert torch.equal(load_file(tmp_path / "m.safetensors")["w"], torch.arange(5.0))
    assert ckpt_tools.verify(tmp_path / "m.safetensors").problems == []
    done = shell(f"{COMMAND} merge {tmp_path}/nowhere {tmp_path}/n.safetensors {closed}")
    assert done.returncode == 10 and "Traceback" not in done.stderr


def shown(source: Path) -> list[list[str]]:
    """Command lines of the help, of a report and of an error with a letter beyond ASCII."""
    helps = [["--help"], ["merge", "--help"], ["convert", "--help"]]
    return [*helps, ["inspect", str(source)], ["inspect", f"{source}/é"]]


@pytest.mark.slow
def test_help_is_shown_in_a_locale_without_letters_beyond_ascii(source: Path) -> None:
    for words in shown(source):
        done = shell(f"{COMMAND} {shlex.join(words)}", LC_ALL="C", PYTHONUTF8="0")
        assert done.returncode == (10 if "é" in words[-1] else 0), (words, done.stderr)
        assert "Traceback" not in done.stderr and (done.stdout or done.stderr)


@pytest.mark.parametrize("columns", ["0", "wide", "-1"])
def test_help_is_shown_in_any_width(columns: str, source: Path) -> None:
    for words in shown(source):
        done = run_command(*words, env=os.environ | {"COLUMNS": columns})
        assert done.returncode == (10 if "é" in words[-1] else 0), (words, done.stderr)
        assert "Traceback" not in done.stderr and (done.stdout or done.stderr)


def test_an_error_is_json_too_where_that_is_asked_for(
    source: Path, tmp_path: Path, ckpt: Callable[..., Any]
) -> None:
    (tmp_path / "there.safetensors").touch()
    for words, kind, code in (
        (("inspect", tmp_path / "nowhere"), "NotACheckpointError", 10),
        (("merge", source, tmp_path / "m.safetensors", "--select", "zz"), "PlanError", 13),
        (("merge", source, tmp_path / "there.safetensors"), "StorageError", 15),
    ):
        done = ckpt(*words, "--json")
        told = json.loads(done.stdout)
        assert done.returncode == code and told.keys() == {"error", "message", "hint", "exit_code"}
        assert (told["error"], told["exit_code"]) == (kind, code) and told["message"] in done.stderr


@pytest.mark.parametrize("name", ["a:b", "a\\b", "C:x", "a b", "a%20b", "é", "-x", "#1?"])
def test_a_name_that_this_system_allows_is_one(
    name: str, tmp_path: Path, ckpt: Callable[..., Any]
) -> None:
    torch.save({"w": torch.arange(5.0)}, tmp_path / f"{name}.pt")
    done = ckpt("merge", tmp_path / f"{name}.pt", tmp_path / f"{name}.safetensors")
    assert done.returncode == 0, done.stderr
    assert torch.equal(load_file(tmp_path / f"{name}.safetensors")["w"], torch.arange(5.0))
    assert ckpt_tools.verify(tmp_path / f"{name}.safetensors").problems == []
    assert ckpt_tools.diff(
        (tmp_path / f"{name}.safetensors").as_uri(), tmp_path / f"{name}.pt"
    ).is_same


def test_a_file_url_is_decoded_and_has_no_host(source: Path, tmp_path: Path) -> None:
    (tmp_path / "a-b c").mkdir()
    source.rename(tmp_path / "a-b c" / "s.pt")
    for url in (f"file://{tmp_path}/a%2Db%20c/s.pt", f"file://localhost{tmp_path}/a-b%20c/s.pt"):
        ckpt_tools.merge(url, f"file://{tmp_path}/m%2Dm.safetensors", overwrite=True)
        assert list(load_file(tmp_path / "m-m.safetensors")) == ["w"]
    for url in ("file://elsewhere/x", "file://x"):
        with pytest.raises(StorageError, match="a file:// URL has no host, and an absolute path"):
            ckpt_tools.inspect(url)
