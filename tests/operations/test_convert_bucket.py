"""`ckpt convert` from and to a bucket, on real S3 servers: files whose checksums stand in several
places, as streams of parts.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp

import ckpt_tools
from ckpt_tools.errors import IntegrityError, PlanError
from ckpt_tools.formats.registry import open_source
from tests.servers.buckets import real
from tests.servers.servers import Server

Saved = Callable[[int], Path]


@pytest.mark.slow
def test_convert_reads_from_and_writes_to_a_bucket(server: Server, tmp_path: Path) -> None:
    fs = server.bucket("convert")
    torch.manual_seed(0)
    model = {f"layers.{i}.weight": torch.randn(1500, 1000) for i in range(4)} | {
        "none": torch.zeros(0, 3),
        "bias": torch.arange(7.0),
    }
    names = list(model)
    state = {
        n: {"exp_avg": torch.randn_like(v), "step": torch.tensor(3.0)} for n, v in model.items()
    }
    whole = {
        "model": model,
        "optimizer": {
            "state": dict(enumerate(state.values())),
            "param_groups": [{"lr": 0.5, "params": [0, 1, 2, 3, 4, 5]}],
        },
        "epoch": 2,
    }
    torch.save(whole, tmp_path / "state.pt")
    fs.put(str(tmp_path / "state.pt"), "convert/in/state.pt")
    url, options = "s3://convert", {"storage_options": server.options}
    ckpt_tools.convert(f"{url}/in/state.pt", f"{url}/dcp", to="dcp", ranks=3, **options)
    ckpt_tools.convert(f"{url}/dcp", f"{url}/out/back.pt", to="torch", optimizer="ids", **options)
    with fsspec.open(f"{url}/out/back.pt", **server.options) as file:
        back = torch.load(file, weights_only=True)
    assert back["model"].keys() == model.keys() and all(
        torch.equal(back["model"][n], v) for n, v in model.items()
    )
    assert all(
        torch.equal(back["optimizer"]["state"][i]["exp_avg"], state[n]["exp_avg"])
        for i, n in enumerate(names)
    )
    assert back["epoch"] == 2 and back["optimizer"]["param_groups"][0] == {
        "lr": 0.5,
        "params": [0, 1, 2, 3, 4, 5],
    }
    assert (
        ckpt_tools.verify(f"{url}/out/back.pt", **options).problems == []
        and ckpt_tools.diff(tmp_path / "state.pt", f"{url}/out/back.pt", **options).is_same
    )
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text("{}")
    ckpt_tools.convert(
        f"{url}/dcp",
        f"{url}/hf",
        to="hf",
        base=tmp_path / "base",
        max_shard_bytes=8_000_000,
        **options,
    )
    assert ckpt_tools.diff(
        f"{url}/hf", tmp_path / "state.pt", **options
    ).differences == [] and "convert/hf/config.json" in fs.find("convert/hf")
    assert not fs.call_s3("list_multipart_uploads", Bucket="convert").get("Uploads")


def made_by_others(kind: str, folder: Path) -> None:
    """Checkpoints without an index of ours."""
    torch.manual_seed(1)
    model = {f"w{i}": torch.randn(400, 700) for i in range(6)}
    if kind == "accelerate":
        dcp.save({"model": model}, checkpoint_id=folder / "pytorch_model_fsdp_0", no_dist=True)
        (folder / "trainer_state.json").write_text('{"global_step": 7}')
    elif kind == "bin":
        names = [f"pytorch_model-0000{n}-of-00002.bin" for n in (1, 2)]
        folder.mkdir()
        for number, name in enumerate(names):
            torch.save({f: v for f, v in model.items() if int(f[1:]) % 2 == number}, folder / name)
        placed = {f: names[int(f[1:]) % 2] for f in model}
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": placed}))
    else:
        folder.mkdir()
        for rank in range(2):
            torch.save({"model": model, "rank": rank}, folder / f"ckpt_rank_{rank}.pt")


@pytest.mark.parametrize("kind", ["accelerate", "bin", "ranks"])
def test_a_directory_without_an_index_is_copied_to_a_disk_and_into_a_bucket(
    kind: str, server: Server, tmp_path: Path
) -> None:
    real(server)
    made_by_others(kind, tmp_path / "src")
    right = {
        p.relative_to(tmp_path / "src").as_posix(): p.read_bytes()
        for p in (tmp_path / "src").rglob("*")
        if p.is_file()
    }
    server.bucket(f"others-{kind}")
    at, options = f"s3://others-{kind}/copy", {"storage_options": server.options}
    ckpt_tools.copy(tmp_path / "src", at, **options)
    ckpt_tools.copy(at, tmp_path / "back", **options)
    ckpt_tools.copy(tmp_path / "back", tmp_path / "again")
    assert {
        p.relative_to(tmp_path / "again").as_posix(): p.read_bytes()
        for p in (tmp_path / "again").rglob("*")
        if p.is_file()
    } == right
    assert (
        ckpt_tools.diff(tmp_path / "src", at, **options).is_same
        and ckpt_tools.verify(at, **options).problems == []
    )
    assert "it is there already" in ckpt_tools.copy(tmp_path / "src", tmp_path / "again").notes
    assert "it is there already" in ckpt_tools.copy(tmp_path / "src", at, **options).notes
    assert not list(tmp_path.glob(".tmp.*"))


def test_what_no_small_file_makes_a_checkpoint_is_not_copied_into_a_bucket(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    for rank in range(2):
        torch.save(
            {"model": {"w": torch.zeros(17_000_000)}}, tmp_path / "src" / f"ckpt_rank_{rank}.pt"
        )
    with pytest.raises(PlanError, match="an object store would show it before it is complete"):
        ckpt_tools.copy(tmp_path / "src", "memory://large/copy")
    ckpt_tools.copy(tmp_path / "src", tmp_path / "copy")
    assert ckpt_tools.diff(tmp_path / "src", tmp_path / "copy").is_same
    # with an optimizer there are two indexes: neither can be the only last one
    made_by_others("accelerate", tmp_path / "two")
    dcp.save(
        {"optimizer": {"state": {"w0": {"step": torch.ones(1)}}}},
        checkpoint_id=tmp_path / "two" / "optimizer_0",
        no_dist=True,
    )
    with pytest.raises(PlanError, match="an object store would show it before it is complete"):
        ckpt_tools.copy(tmp_path / "two", "memory://two/copy")
    ckpt_tools.copy(tmp_path / "two", tmp_path / "two-copied")
    assert ckpt_tools.diff(tmp_path / "two", tmp_path / "two-copied").is_same


@pytest.mark.slow
def test_damage_is_found_where_no_fingerprint_comes_together(saved: Saved, tmp_path: Path) -> None:
    """Streams are filled some files at a time; of a tensor that is cut along its columns each of
    them has no run.
    """
    ckpt_tools.reshard(saved(16) / "columns", tmp_path / "sealed", to_ranks=16)
    source = open_source(tmp_path / "sealed")
    cut = next(
        t
        for t in source.catalog.tensors.values()
        if len(t.chunks) == 16 and len(t.shape) == 2 and t.chunks[1].box.offsets[0] == 0
    )
    extent = source.format.locate(source.store, [cut])[cut.chunks[9].extent]
    path = tmp_path / "sealed" / extent.file
    data = bytearray(path.read_bytes())
    data[extent.start + extent.nbytes // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(IntegrityError):
        ckpt_tools.reshard(tmp_path / "sealed", "memory://columns/out", to_ranks=16)
