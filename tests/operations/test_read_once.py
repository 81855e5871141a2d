"""Checks of what has no manifest, in a bucket: each byte is fetched once, in long requests, and the
result is that of a disk.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from aiohttp import web
from safetensors.torch import save_file

import ckpt_tools
from tests.servers.faults import watched
from tests.servers.servers import Server
from tests.strategies import flip

Saved = Callable[[int], Path]
SHAPES = {
    "few": (3, 3_000_000),
    "long": (1, 12_000_000),
    "many": (60, 100_000),
    "tiny": (2000, 300),
}


def make(case: str, folder: Path) -> Path:
    generator = torch.Generator().manual_seed(0)
    if case == "bare":
        save_file(
            {f"w{i}": torch.randn(2_000_000, generator=generator) for i in range(7)},
            folder / "m.safetensors",
        )
        return folder / "m.safetensors"
    if case == "file":
        torch.save(
            {f"w{i}": torch.randn(50_000, generator=generator) for i in range(40)}, folder / "m.pt"
        )
        return folder / "m.pt"
    num, numel = SHAPES[case]
    state = {f"w{i}": torch.randn(numel, generator=generator) for i in range(num)} | {
        "note": "x",
        "empty": torch.zeros(0),
        "step": torch.tensor(3),
    }
    dcp.save(state, checkpoint_id=folder / "src", no_dist=True)
    return folder / "src"


def fetched(passed: list[tuple[web.Request, int]]) -> tuple[int, int]:
    """Returns how many requests had a range of more than 64 KiB, and all bytes that were asked for
    in ranges.
    """
    ranges = [
        re.fullmatch(r"bytes=(\d+)-(\d+)", r.headers["Range"])
        for r, _ in passed
        if r.method == "GET" and "Range" in r.headers
    ]
    sizes = [int(m[2]) - int(m[1]) + 1 for m in ranges if m]
    return len(sizes), sum(sizes)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["few", "long", "many", "tiny", "bare", "file"])
def test_verify_and_seal_fetch_each_byte_once(case: str, server: Server, tmp_path: Path) -> None:
    if server.name == "moto":
        pytest.skip("its ranges of a large object take seconds")
    fs = server.bucket("once")
    source = make(case, tmp_path)
    total = (
        source.stat().st_size
        if source.is_file()
        else sum(p.stat().st_size for p in source.iterdir())
    )
    fs.put(str(source), f"once/{case}{source.suffix}", recursive=source.is_dir())
    with watched(server.endpoint) as (url, passed):
        there, options = (
            f"s3://once/{case}{source.suffix}",
            {"storage_options": replace(server, endpoint=url).options},
        )
        for verb in (ckpt_tools.verify, ckpt_tools.seal):
            passed.clear()
            verb(there, **options)
            count, nbytes = fetched(passed)
            # nobody keeps a checksum of bare bytes
            is_read = case != "bare" or verb is ckpt_tools.seal
            # to open a torch.save file of small tensors, the headers between them are read
            most = 1.1 if case != "file" else 2.1
            assert 0.9 * is_read <= nbytes / total < most, (verb, nbytes / total)
            assert count <= 16 + total // (2 << 20), (verb, count)
    sealed = ckpt_tools.seal(source)
    folder = source.parent if source.is_file() else source
    name = (
        next(
            n
            for n in fs.ls("once", detail=False, refresh=True)
            if n.endswith(".json") and f"/{case}." in n
        )
        if source.is_file()
        else (
            next(
                n for n in fs.ls(f"once/{case}", detail=False, refresh=True) if n.endswith(".json")
            )
        )
    )
    mine, theirs = (
        json.loads((folder / sealed.manifest).read_bytes()),
        json.loads(fs.cat_file(name)),
    )
    assert mine["tensors"] == theirs["tensors"]
    assert sorted(mine["files"].values(), key=str) == sorted(theirs["files"].values(), key=str)
    assert ckpt_tools.verify(there, storage_options=server.options).problems == []


@pytest.mark.slow
@pytest.mark.parametrize("case", ["columns", "adamw", "tp", "hsdp"])
def test_what_ranks_saved_is_sealed_in_a_bucket_as_on_a_disk(
    case: str, server: Server, saved: Saved, tmp_path: Path
) -> None:
    fs = server.bucket("ranks")
    shutil.copytree(saved(4) / case, tmp_path / "src")
    fs.put(str(tmp_path / "src"), f"ranks/{case}", recursive=True)
    ckpt_tools.seal(f"s3://ranks/{case}", storage_options=server.options)
    sealed = ckpt_tools.seal(tmp_path / "src")
    name = next(
        n for n in fs.ls(f"ranks/{case}", detail=False, refresh=True) if n.endswith(".json")
    )
    mine, theirs = (
        json.loads((tmp_path / "src" / sealed.manifest).read_bytes()),
        json.loads(fs.cat_file(name)),
    )
    assert (mine["tensors"], mine["files"], mine["index"]) == (
        theirs["tensors"],
        theirs["files"],
        theirs["index"],
    )


@pytest.mark.slow
@pytest.mark.parametrize("part", range(6))
def test_a_flipped_bit_in_a_bucket_is_found_by_both(
    part: int, server: Server, tmp_path: Path
) -> None:
    fs = server.bucket("flipped")
    source = make("many", tmp_path)
    data = source / "__0_0.distcp"
    flip(data, (data.stat().st_size - 1) * part // 5, 3)
    fs.put(str(source), f"flipped/{part}", recursive=True)
    result = ckpt_tools.verify(f"s3://flipped/{part}", storage_options=server.options)
    assert (
        {p.fqn for p in result.problems}
        == {p.fqn for p in ckpt_tools.verify(source).problems}
        != set()
    )
    with pytest.raises(ckpt_tools.IntegrityError):
        ckpt_tools.seal(f"s3://flipped/{part}", storage_options=server.options)
