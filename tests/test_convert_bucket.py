"""`ckpt convert` from and to a bucket, on real S3 servers: files whose checksums stand in several places, as streams of parts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import fsspec
import pytest
import torch

import ckpt_tools
from ckpt_tools.errors import IntegrityError
from ckpt_tools.formats import open_source
from tests.servers.servers import Server

Saved = Callable[[int], Path]


def test_convert_reads_from_and_writes_to_a_bucket(server: Server, tmp_path: Path) -> None:
    fs = server.bucket("convert")
    torch.manual_seed(0)
    model = {f"layers.{i}.weight": torch.randn(1500, 1000) for i in range(4)} | {"none": torch.zeros(0, 3), "bias": torch.arange(7.0)}
    names = list(model)
    state = {n: {"exp_avg": torch.randn_like(v), "step": torch.tensor(3.0)} for n, v in model.items()}
    whole = {
        "model": model,
        "optimizer": {"state": dict(enumerate(state.values())), "param_groups": [{"lr": 0.5, "params": [0, 1, 2, 3, 4, 5]}]},
        "epoch": 2,
    }
    torch.save(whole, tmp_path / "state.pt")
    fs.put(str(tmp_path / "state.pt"), "convert/in/state.pt")
    url, options = "s3://convert", {"storage_options": server.options}
    ckpt_tools.convert(f"{url}/in/state.pt", f"{url}/dcp", to="dcp", ranks=3, **options)
    ckpt_tools.convert(f"{url}/dcp", f"{url}/out/back.pt", to="torch", optimizer="ids", **options)
    with fsspec.open(f"{url}/out/back.pt", **server.options) as file:
        back = torch.load(file, weights_only=True)
    assert back["model"].keys() == model.keys() and all(torch.equal(back["model"][n], v) for n, v in model.items())
    assert all(torch.equal(back["optimizer"]["state"][i]["exp_avg"], state[n]["exp_avg"]) for i, n in enumerate(names))
    assert back["epoch"] == 2 and back["optimizer"]["param_groups"][0] == {"lr": 0.5, "params": [0, 1, 2, 3, 4, 5]}
    assert (
        ckpt_tools.verify(f"{url}/out/back.pt", **options).problems == []
        and ckpt_tools.diff(tmp_path / "state.pt", f"{url}/out/back.pt", **options).is_same
    )
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text("{}")
    ckpt_tools.convert(f"{url}/dcp", f"{url}/hf", to="hf", base=tmp_path / "base", max_shard_bytes=8_000_000, **options)
    assert ckpt_tools.diff(f"{url}/hf", tmp_path / "state.pt", **options).differences == [] and "convert/hf/config.json" in fs.find(
        "convert/hf"
    )
    assert not fs.call_s3("list_multipart_uploads", Bucket="convert").get("Uploads")


def test_damage_is_found_where_no_fingerprint_comes_together(saved: Saved, tmp_path: Path) -> None:
    """Streams are filled some files at a time; of a tensor that is cut along its columns each of them has no run."""
    ckpt_tools.reshard(saved(16) / "columns", tmp_path / "sealed", to_ranks=16)
    source = open_source(tmp_path / "sealed")
    cut = next(t for t in source.catalog.tensors.values() if len(t.chunks) == 16 and len(t.shape) == 2 and t.chunks[1].box.offsets[0] == 0)
    extent = source.format.locate(source.store, [cut])[cut.chunks[9].extent]
    path = tmp_path / "sealed" / extent.file
    data = bytearray(path.read_bytes())
    data[extent.start + extent.nbytes // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(IntegrityError):
        ckpt_tools.reshard(tmp_path / "sealed", "memory://columns/out", to_ranks=16)
