import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

from ckpt_tools.errors import StorageError
from ckpt_tools.storage import LocalStore, read


def test_links_are_followed_as_long_as_they_stay_inside(tmp_path: Path) -> None:
    root = tmp_path / "root"
    (root / "sub").mkdir(parents=True)
    (root / "sub" / "real").write_bytes(b"in")
    (tmp_path / "secret").write_bytes(b"out")
    (root / "inside").symlink_to("sub/real")
    (root / "outside").symlink_to("../secret")
    (root / "away").symlink_to("..")
    store = LocalStore(root)
    assert read(store, "inside") == b"in"
    for path in ("outside", "away/secret"):
        with pytest.raises(StorageError, match="leads out"):
            store.size(path)
    assert "outside" not in store.list_files()


def test_devices_and_pipes_are_no_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for name in ("pipe", "folder"):
        with pytest.raises(StorageError, match="not a regular file"):
            LocalStore(tmp_path).size(name)


def test_more_files_than_a_shell_allows_to_be_open(tmp_path: Path) -> None:
    """A checkpoint of 2,000 ranks has 2,000 files; most shells allow 1,024."""
    state = {f"w{i}": torch.full((2,), float(i)) for i in range(400)}
    writer = dcp.FileSystemWriter(tmp_path / "src", single_file_per_rank=False)
    dcp.save(state, storage_writer=writer, no_dist=True)

    def run(*words: object) -> None:
        done = subprocess.run(
            [sys.executable, "-m", "ckpt_tools", *map(str, words)],
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (128, 4096)),
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr

    run("merge", tmp_path / "src", tmp_path / "one.safetensors")
    run("copy", tmp_path / "src", tmp_path / "copied")
    run("diff", tmp_path / "src", tmp_path / "copied")
    got = load_file(tmp_path / "one.safetensors")
    assert got.keys() == state.keys() and all(torch.equal(got[n], state[n]) for n in state)
