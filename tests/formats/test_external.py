"""A package that adds a format: the how-to, followed literally."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.numpy import load_file

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "add-a-format.md"
BLOCK = re.compile(r'^```\w+ title="([\w.-]+)"\n(.*?)^```$', re.M | re.S)
COMMANDS = re.compile(r"^```console\n(.*?)^```$", re.M | re.S)


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """The files of the page in a directory, and an environment in which the package is installed."""
    work = tmp_path_factory.mktemp("toy")
    for name, text in BLOCK.findall(PAGE.read_text()):
        (work / name).write_text(text)
    site = work / "site"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
    done = subprocess.run(
        [*pip, "--target", str(site), str(work)], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return work, os.environ | {"PYTHONPATH": str(site), "PATH": path}


@pytest.mark.slow
def test_the_how_to_add_a_format_works_as_it_stands(
    package: tuple[Path, dict[str, str]],
) -> None:
    work, environment = package
    (commands,) = COMMANDS.findall(PAGE.read_text())
    said = {}
    for line in commands.splitlines():
        words = line.removeprefix("$ ").split()
        done = subprocess.run(
            words, cwd=work, env=environment, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, (line, done.stderr)
        said[line] = done.stdout
    assert "toy" in said["$ ckpt inspect a.toy"] and "1 tensor" in said["$ ckpt inspect a.toy"]
    assert load_file(work / "a.safetensors")["w"].ravel().tolist() == list(range(12))


def test_the_other_blocks_of_the_page_run() -> None:
    (module,) = [text for name, text in BLOCK.findall(PAGE.read_text()) if name == "toy_format.py"]
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.M | re.S)
    assert len(blocks) == 2
    for block in blocks:
        found: dict[str, object] = {}
        exec(f"{module}\n{block}", found)
        assert {"rows", "catalog"} & found.keys()


def test_damaged_files_of_an_external_format_are_one_line(
    package: tuple[Path, dict[str, str]], tmp_path: Path
) -> None:
    work, environment = package
    data = b'{"w": {"dtype": "float32", "shape": [3, 4], "start": 0}}\n' + bytes(48)
    (tmp_path / "try.py").write_text(
        "import sys, ckpt_tools, pathlib\n"
        "data = pathlib.Path('whole.toy').read_bytes()\n"
        "bad = [data[:n] for n in range(len(data))]\n"
        "bad += [data.replace(b'[3, 4]', s) for s in (b'[-3, 4]', b'[3, 4e9]', b'[1048576]')]\n"
        "bad += [b'GGUF' + bytes(60), b'', b'[[' * 5000 + b'\\n']\n"
        "for number, content in enumerate(bad):\n"
        "    pathlib.Path('x.toy').write_bytes(content)\n"
        "    try: ckpt_tools.inspect('x.toy')\n"
        "    except ckpt_tools.CheckpointError: continue\n"
        "    sys.exit(f'number {number} was read')\n"
    )
    (tmp_path / "whole.toy").write_bytes(data)
    done = subprocess.run(
        [sys.executable, "try.py"], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert work.is_dir()


def test_a_broken_external_format_is_named_and_does_not_stop_the_command(tmp_path: Path) -> None:
    info = tmp_path / "broken-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[ckpt_tools.formats]\nbroken = no_such_module\n")
    done = subprocess.run(
        [sys.executable, "-m", "ckpt_tools", "inspect", str(tmp_path)],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 10 and "no_such_module" in done.stderr
    assert "Traceback" not in done.stderr


def installed(folder: Path, name: str, source: str) -> dict[str, str]:
    """Installs a package with one format in a folder, and returns the environment that has it."""
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[ckpt_tools.formats]\n{name} = {name}_format\n")
    (folder / f"{name}_format.py").write_text(source)
    return os.environ | {"PYTHONPATH": str(folder)}


def inspected(path: Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "ckpt_tools", "inspect", str(path)]
    return subprocess.run(words, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize("claims", ["NAME = 'dcp'", "NAME, SUFFIX = 'mine', '.safetensors'"])
def test_an_external_format_takes_no_name_of_another(claims: str, tmp_path: Path) -> None:
    source = f"{claims}\nLOOKS_FOR, recognise = 'all', bool\n"
    source += "read_catalog = locate = guess = lay_out = None\n"
    done = inspected(tmp_path, installed(tmp_path, "greedy", source))
    assert done.returncode == 10 and "Traceback" not in done.stderr
    assert "greedy_format is not used" in done.stderr


def test_an_external_format_that_fails_to_recognise_is_named(tmp_path: Path) -> None:
    source = "NAME, LOOKS_FOR = 'faulty', 'nothing'\n"
    source += "read_catalog = locate = guess = lay_out = None\n"
    source += "def recognise(files): raise ValueError('oops')\n"
    done = inspected(tmp_path, installed(tmp_path, "faulty", source))
    assert done.returncode == 10 and "Traceback" not in done.stderr
    assert "the format faulty failed: ValueError('oops')" in done.stderr
