"""Stores whose host and user stand in the URL: an FTP server."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.servers.servers import free_port


@pytest.fixture
def ftp(tmp_path: Path) -> Iterator[str]:
    (tmp_path / "served").mkdir()
    port = free_port()
    # its own process: pyftpdlib needs modules that warn that they are old
    words = ["-m", "pyftpdlib", "-i", "127.0.0.1", "-p", str(port), "-u", "me", "-P", "5ecret"]
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", *words, "-d", tmp_path / "served"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr and any("starting FTP server" in line for line in process.stderr)
    yield f"ftp://me:5ecret@127.0.0.1:{port}"
    process.kill()
    process.stderr.close()
    process.wait()


def ckpt(*words: str | Path) -> subprocess.CompletedProcess[str]:
    command = Path(sys.executable).with_name("ckpt")
    return subprocess.run([command, *words], capture_output=True, text=True, timeout=60)


@pytest.mark.slow
def test_the_host_and_the_user_of_a_url_are_used(ftp: str, tmp_path: Path) -> None:
    weights = {"w": np.arange(100_000, dtype=np.float32)}
    save_file(weights, tmp_path / "served" / "m.safetensors")
    done = ckpt("merge", f"{ftp}/m.safetensors", tmp_path / "out.safetensors")
    assert done.returncode == 0, done.stderr
    assert np.array_equal(load_file(tmp_path / "out.safetensors")["w"], weights["w"])
    for refused in (ftp.replace("5ecret", "5ecret1"), "ftp://me:5ecret@127.0.0.1:1"):
        done = ckpt("inspect", f"{refused}/m.safetensors")
        assert done.returncode == 15 and "cannot open ftp://" in done.stderr, done.stderr
        assert "Traceback" not in done.stderr and "5ecret" not in done.stderr
