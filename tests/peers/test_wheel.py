"""The wheel works in an environment that has nothing else of ours."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

ROOT = Path(__file__).parents[2]


def run(*words: object, cwd: Path | None = None) -> str:
    """What a command says that sees no other copy of the package: pip would take it for installed."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        list(map(str, words)), capture_output=True, text=True, env=environment, cwd=cwd
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return str(done.stdout)


def test_the_wheel_installs_into_an_empty_environment_and_runs(tmp_path: Path) -> None:
    run(sys.executable, "-m", "build", "--outdir", tmp_path / "dist", ROOT)
    (wheel,), (sdist,) = (tmp_path / "dist").glob("*.whl"), (tmp_path / "dist").glob("*.tar.gz")
    assert sdist.stat().st_size > 100_000
    run(sys.executable, "-m", "venv", tmp_path / "venv")
    bin_ = tmp_path / "venv" / "bin"
    pip = (bin_ / "python", "-m", "pip", "install", "--disable-pip-version-check")
    said = run(*pip, "-c", ROOT / "constraints.txt", wheel, cwd=tmp_path)
    assert (bin_ / "ckpt").exists(), said
    save_file({"w": torch.arange(6.0)}, tmp_path / "a.safetensors")
    for words in (["inspect"], ["verify"]):
        run(bin_ / "ckpt", *words, "a.safetensors", cwd=tmp_path)
    run(bin_ / "ckpt", "merge", "a.safetensors", "b.safetensors", cwd=tmp_path)
    assert torch.equal(load_file(tmp_path / "b.safetensors")["w"], torch.arange(6.0))
    assert "ckpt reshard" in (tmp_path / "venv" / "share" / "man" / "man1" / "ckpt.1").read_text()
    found = run(
        bin_ / "python", "-c", "import ckpt_tools; print(ckpt_tools.__file__)", cwd=tmp_path
    )
    assert str(tmp_path / "venv") in found
