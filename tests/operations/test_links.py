"""Checkpoints behind symbolic links: the cache of Hugging Face, links by hand, links that lead out.
And: nothing is never whole.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckpt_tools
from ckpt_tools import NotACheckpointError, PlanError, StorageError

Run = Callable[..., subprocess.CompletedProcess[str]]
TENSORS = {"a": torch.arange(4000.0).view(40, 100), "b": torch.ones(7)}


def put(repository: Path, name: str, data: bytes, is_large: bool) -> Path:
    """Puts a file into a cache as huggingface_hub does: large ones by SHA-256, small ones by the
    hash of git.
    """
    digest = hashlib.sha256(data) if is_large else hashlib.sha1(b"blob %d\0" % len(data) + data)
    blob, link = repository / "blobs" / digest.hexdigest(), repository / "snapshots" / "0f1e" / name
    blob.parent.mkdir(parents=True, exist_ok=True)
    link.parent.mkdir(parents=True, exist_ok=True)
    blob.write_bytes(data)
    link.symlink_to(os.path.relpath(blob, link.parent))
    return blob


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """A repository in a cache: a model of two shards."""
    repository, plain = tmp_path / "models--me--net", tmp_path / "plain"
    plain.mkdir()
    names = {key: f"model-0000{n}-of-00002.safetensors" for n, key in enumerate(TENSORS, 1)}
    for key, name in names.items():
        save_file({key: TENSORS[key]}, plain / name, metadata={"format": "pt"})
        put(repository, name, (plain / name).read_bytes(), is_large=True)
    index = json.dumps({"metadata": {"total_size": 16028}, "weight_map": names}).encode()
    put(repository, "model.safetensors.index.json", index, is_large=False)
    put(repository, "config.json", b"{}", is_large=False)
    return repository


def test_a_snapshot_is_read_by_its_links_names(cache: Path, tmp_path: Path, ckpt: Run) -> None:
    ckpt_tools.merge(cache, tmp_path / "m.safetensors")  # found below, like any checkpoint
    got = load_file(tmp_path / "m.safetensors")
    assert got.keys() == TENSORS.keys() and all(torch.equal(got[k], TENSORS[k]) for k in TENSORS)
    one = cache / "snapshots" / "0f1e" / "model-00001-of-00002.safetensors"
    assert ckpt_tools.inspect(one).catalog.tensors["a"].shape == (40, 100)
    assert ckpt("diff", one, one.with_name("model-00002-of-00002.safetensors")).returncode == 1
    (tmp_path / "by-hand.safetensors").symlink_to(one)  # a link to a link
    assert ckpt_tools.diff(tmp_path / "by-hand.safetensors", one).is_same


def test_every_byte_of_a_cache_is_compared_with_the_names_of_its_blobs(
    cache: Path, ckpt: Run
) -> None:
    snapshot = cache / "snapshots" / "0f1e"
    result = ckpt_tools.verify(snapshot)
    assert not result.problems and not result.unknown
    for name in (
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
    ):
        blob = (snapshot / name).resolve()
        data = blob.read_bytes()
        for at in range(len(data) - 1, 0, -max(1, len(data) // 7)):
            blob.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
            done = ckpt("verify", snapshot)
            assert done.returncode not in (0, 2) and "Traceback" not in done.stderr, (
                name,
                at,
                done.stdout,
            )
        blob.write_bytes(data)
    one = (snapshot / "model-00001-of-00002.safetensors").resolve()
    one.write_bytes(one.read_bytes()[:-1] + b"\1")
    assert "its hash is not the name of its blob" in ckpt("verify", snapshot).stdout
    assert (
        "its hash is not the name of its blob"
        in ckpt("verify", snapshot / "model-00001-of-00002.safetensors").stdout
    )


def test_a_seal_stands_beside_the_link_and_not_among_blobs(cache: Path) -> None:
    before = sorted(p.name for p in (cache / "blobs").iterdir())
    ckpt_tools.seal(cache / "snapshots" / "0f1e")
    ckpt_tools.seal(cache / "snapshots" / "0f1e" / "model-00001-of-00002.safetensors")
    assert sorted(p.name for p in (cache / "blobs").iterdir()) == before
    assert ckpt_tools.verify(cache).is_sealed


def test_only_the_blobs_of_a_cache_are_followed_out_of_a_snapshot(
    cache: Path, tmp_path: Path
) -> None:
    secret = tmp_path / "secret"
    save_file({"b": torch.zeros(7)}, secret)
    link = cache / "snapshots" / "0f1e" / "model-00002-of-00002.safetensors"
    link.unlink()
    link.symlink_to(secret)
    with pytest.raises(StorageError, match="leads out of the checkpoint"):
        ckpt_tools.merge(cache, tmp_path / "m.safetensors")
    (cache / "blobs").rename(tmp_path / "moved")
    # whoever makes such a cache could make it lead anywhere
    (cache / "blobs").symlink_to(tmp_path / "moved")
    with pytest.raises(StorageError, match="leads out of the checkpoint"):
        ckpt_tools.merge(cache / "snapshots" / "0f1e", tmp_path / "m.safetensors")


@pytest.mark.parametrize("target", ["elsewhere.safetensors", "nowhere"])
def test_a_shard_that_is_a_link_out_of_the_directory_is_not_left_out(
    target: str, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    save_file({"a": TENSORS["a"]}, run / "one.safetensors")
    (run / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}})
    )
    save_file({"b": TENSORS["b"]}, tmp_path / "elsewhere.safetensors")
    (run / "two.safetensors").symlink_to(tmp_path / target)
    with pytest.raises(StorageError, match="two.safetensors"):
        ckpt_tools.merge(run, tmp_path / "m.safetensors")
    assert not (tmp_path / "m.safetensors").exists()


def test_nothing_is_never_whole_nor_the_same(tmp_path: Path, ckpt: Run) -> None:
    for name in ("one", "two"):
        save_file({}, tmp_path / f"{name}.safetensors")
    one, two = tmp_path / "one.safetensors", tmp_path / "two.safetensors"
    done = ckpt("verify", one)
    assert (
        done.returncode == 14
        and "holds no tensor and no object" in done.stdout
        and "whole" not in done.stdout.split(": ")[1]
    )
    with pytest.raises(PlanError, match="nothing to compare"):
        ckpt_tools.diff(one, two)
    blob = tmp_path / "0a1b"
    one.rename(blob)
    (tmp_path / "link").symlink_to(blob)
    with pytest.raises(NotACheckpointError):
        ckpt_tools.inspect(tmp_path / "link")
