"""Azure and Google: the verbs and the manager through adlfs and gcsfs, on Azurite (from npm) and a
storage emulator (from PyPI).
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

import ckpt_tools
from tests.jobs import LONG
from tests.peers.environments import ROOT, python_of
from tests.servers.servers import answers, free_port

pytestmark = pytest.mark.skipif(not LONG, reason="two more servers to install: CKPT_LONG=1")
ACCOUNT = "devstoreaccount1"
# Azurite's own, known to all
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
EMULATE = (
    "import sys; from gcp_storage_emulator.server import create_server; create_server('127.0.0.1',"
    " int(sys.argv[1]), in_memory=True).run()"
)
MAKE = {
    "az": "fsspec.filesystem('az').mkdir('bench')",
    "gs": "fsspec.filesystem('gs', token='anon').mkdir('bench', create_parents=True)",
}
RUN = """
import sys, torch
from ckpt_tools import CheckpointManager
with CheckpointManager(sys.argv[1], keep_last=2) as checkpoints:
    for step in (1, 2, 3):
        checkpoints.save(step, {"model": {"w": torch.full((100, 100), float(step))}})
    checkpoints.wait()
    assert [s.number for s in checkpoints.steps()][-2:] == [2, 3], checkpoints.steps()
with CheckpointManager(sys.argv[1]) as checkpoints:
    state = {"model": {"w": torch.zeros(100, 100)}}
    assert checkpoints.resume(state) == 3 and bool((state["model"]["w"] == 3).all())
"""


@contextmanager
def serving(kind: str, folder: Path) -> Iterator[dict[str, str]]:
    """Yields what a process needs to reach a server."""
    port = free_port()
    if kind == "az":
        npm = shutil.which("npm")
        if npm is None:
            pytest.skip("npm is not installed")
        installed = subprocess.run(
            [npm, "install", "--prefix", folder, "azurite"],
            capture_output=True,
            text=True,
            timeout=600,
        )
        if installed.returncode:
            pytest.skip(f"Azurite cannot be installed here: {installed.stderr[-200:]}")
        azurite = folder / "node_modules" / ".bin" / "azurite-blob"
        command = [
            str(azurite),
            "--silent",
            "--location",
            str(folder),
            "--blobPort",
            str(port),
            "--skipApiVersionCheck",
        ]
        endpoint = f"BlobEndpoint=http://127.0.0.1:{port}/{ACCOUNT};"
        text = f"DefaultEndpointsProtocol=http;AccountName={ACCOUNT};AccountKey={KEY};{endpoint}"
        environment = {"AZURE_STORAGE_CONNECTION_STRING": text}
    else:
        command = [python_of("clouds"), "-c", EMULATE, str(port)]
        environment = {
            "STORAGE_EMULATOR_HOST": f"http://127.0.0.1:{port}",
            "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
        }
    log = (folder / "log").open("wb")
    with log, subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True) as process:
        try:
            assert answers(port, process), (folder / "log").read_text()
            yield os.environ | environment
        finally:
            os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.parametrize("kind", ["az", "gs"])
def test_every_verb_and_the_manager_work_there(kind: str, tmp_path: Path) -> None:
    python = python_of("clouds")
    whole = {f"w{i}": torch.randn(300, 1000) for i in range(8)} | {"step": torch.tensor(3)}
    dcp.save({"model": dict(whole)}, checkpoint_id=tmp_path / "one", no_dist=True)
    ckpt_tools.reshard(tmp_path / "one", tmp_path / "src", to_ranks=3)
    (tmp_path / "server").mkdir()
    with serving(kind, tmp_path / "server") as environment:

        def run(*words: object, status: int = 0) -> str:
            command = [python, *map(str, words)]
            done = subprocess.run(
                command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=300
            )
            assert done.returncode == status, done.stdout + done.stderr
            return done.stdout + done.stderr

        def ckpt(*words: object, status: int = 0) -> str:
            return run("-m", "ckpt_tools", *words, status=status)

        at = f"{kind}://bench"
        run("-c", f"import fsspec; {MAKE[kind]}")
        ckpt("copy", tmp_path / "src", f"{at}/src")
        assert "whole: as its manifest says" in ckpt("verify", f"{at}/src")
        ckpt("merge", f"{at}/src", tmp_path / "out.safetensors")
        got = load_file(tmp_path / "out.safetensors")
        assert got.keys() == whole.keys() and all(torch.equal(got[n], whole[n]) for n in whole)
        told = ckpt("reshard", f"{at}/src", f"{at}/two", "--to", 2)
        # the emulator does not know the condition that is sent
        assert ("does not refuse a second writer" in told) == (kind == "gs")
        assert "exists" in ckpt("reshard", f"{at}/src", f"{at}/two", "--to", 2, status=15)
        ckpt("reshard", f"{at}/src", f"{at}/two", "--to", 4, "--overwrite")
        assert "the same" in ckpt("diff", f"{at}/two", tmp_path / "src", "--read-all")
        if kind == "az":  # the emulator of gs cannot rename
            ckpt("merge", f"{at}/src", f"{at}/out.safetensors")
            assert "the same" in ckpt(
                "diff", f"{at}/out.safetensors", tmp_path / "out.safetensors", "--read-all"
            )
        run("-c", RUN, f"{at}/run")
        assert ckpt("latest", f"{at}/run", "--verify").strip() == f"{at}/run/step-00000003"
