"""Environments of the peers that write the test checkpoints: each its own, laid over the present one, so that torch is installed once."""

from __future__ import annotations

import os
import site
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
JOBS = Path(__file__).parent
_PEERS = {
    "deepspeed": (["deepspeed==0.19.8"], ["hjson", "msgpack", "ninja", "py-cpuinfo", "pydantic", "einops"]),
    "lightning": (["lightning==2.6.6"], ["lightning-utilities", "torchmetrics", "pytorch-lightning==2.6.6"]),
    "megatron": (["megatron-core==0.16.1"], []),
    "torch_checkpointing": (["torch_checkpointing==0.1.1"], []),
    "peft": (["peft==0.21.2"], []),
    "xla": ([], []),
}


def python_of(peer: str) -> str:
    """Returns the interpreter of a peer's environment, which is made where it is missing; skips the test where it cannot be made."""
    folder = ROOT / ".peers" / peer
    done = folder / "done"
    if not done.exists():
        log = _make(folder, *_PEERS[peer])
        if log:
            pytest.skip(f"{peer} cannot be installed here: {log}")
        done.touch()
    return str(folder / "bin" / "python")


def _make(folder: Path, alone: list[str], others: list[str]) -> str:
    """Makes an environment; returns the last line of what went wrong, "" for nothing."""
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")} | {
        "DS_BUILD_OPS": "0",
        "DS_ACCELERATOR": "cpu",
    }
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    steps = [[sys.executable, "-m", "venv", "--clear", str(folder)]]
    steps += [[*pip, "setuptools", "wheel"]] + ([[*pip, "--no-deps", "--no-build-isolation", *alone]] if alone else [])
    steps += [[*pip, "--no-deps", *others]] if others else []
    for number, step in enumerate(steps):
        done = subprocess.run(step, env=environment, capture_output=True, text=True, timeout=600)
        if done.returncode:
            return (done.stderr.strip().splitlines() or ["no message"])[-1]
        if number == 0:
            (packages,) = (folder / "lib").glob("python*/site-packages")
            (packages / "zz_parent.pth").write_text("\n".join(site.getsitepackages()) + "\n")
    return ""


def run_job(peer: str, num_ranks: int, script: str, *arguments: object) -> None:
    """Runs one of the scripts of this folder in a peer's environment, under torchrun where it has several ranks."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    environment |= {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR", "PYTHONWARNINGS": "ignore"}
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"] if num_ranks else []
    command = [python_of(peer), *launch, str(JOBS / script), *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
