"""Copies within one S3: what the store copies by itself, and the checksums of what nobody here has
seen.
"""

from __future__ import annotations

import json
import zipfile
import zlib
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from awscrt.checksums import crc64nvme
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

import ckpt_tools
from ckpt_tools import IntegrityError, StorageError
from ckpt_tools.core.box import whole
from ckpt_tools.core.plan import num_cells
from ckpt_tools.formats.registry import open_source
from ckpt_tools.publish.find_manifest import find_manifest
from ckpt_tools.storage import LocalStore, RemoteStore
from ckpt_tools.storage.s3.parts import MAX_PARTS, MIN_PART_BYTES
from ckpt_tools.transfer.server_copy import CopyRange, cut_parts
from tests.conftest import torchrun
from tests.servers.buckets import MIB, save_locally, uploads
from tests.servers.servers import Server
from tests.states import tensors
from tests.strategies import flip


@given(
    st.lists(st.tuples(st.integers(0, 3000), st.integers(1, 40_000)), max_size=12),
    st.integers(0, 20_000),
    st.integers(1, 40),
    st.booleans(),
)
def test_a_file_is_cut_into_parts_that_a_store_takes(
    gaps: list[tuple[int, int]], tail: int, scale: int, framed: bool
) -> None:
    ranges, at = [], 0
    for gap, nbytes in gaps:
        ranges.append(CopyRange(at + gap * 1024 * scale, nbytes * 1024 * scale, "f", 7))
        at = ranges[-1].start + ranges[-1].nbytes
    total = at + tail * 1024 * scale
    parts = cut_parts(total, ranges, framed)
    assert [p.start for p in parts] == [0, *(p.start + p.nbytes for p in parts)][: len(parts)]
    assert sum(p.nbytes for p in parts) == total and len(parts) <= MAX_PARTS
    assert all(p.nbytes >= MIN_PART_BYTES for p in parts[:-1]) and all(p.nbytes > 0 for p in parts)
    for part in (p for p in parts if p.source is not None):
        assert (
            part.source in ranges
            and part.source.start <= part.start
            and part.start + part.nbytes <= part.source.start + part.source.nbytes
        )
        assert (part.start - part.source.start) % 16 == 0
    copied = {0, *(p.start + p.nbytes for p in parts if p.source is not None)}
    for part in (p for p in parts if p.source is not None and framed and p.start == p.source.start):
        # else what stands before it would wait for bytes that never pass
        assert part.start in copied


@pytest.mark.parametrize(
    ("sizes", "count"),
    [
        ((1024, 1279), 0),
        ((1024, 1280), 1),
        ((1024, 2559), 1),
        ((1024, 2560), 2),
        ((1025, 5120), 1),
        ((96, 81920), 4),
        ((4096, 65536), 16),
        ((), 0),
    ],
)
def test_a_payload_has_cells_of_whole_rows_and_5_mib(sizes: tuple[int, ...], count: int) -> None:
    assert num_cells(whole(sizes), 4 * whole(sizes).numel) == count


@pytest.mark.slow
def test_within_one_store_the_store_copies(server: Server, tmp_path: Path) -> None:
    server.bucket("within")
    source = save_locally(tmp_path / "run", tensors(3, 5 * MIB + 3) | {"small": torch.arange(7.0)})
    options: dict[str, Any] = {"storage_options": server.options}
    result = ckpt_tools.copy(source, "s3://within/a", **options)
    assert (result.client_nbytes, result.store_nbytes) == (
        sum(s.stat().st_size for s in source.glob("*.distcp")),
        0,
    )
    merged = ckpt_tools.merge("s3://within/a", "s3://within/m.safetensors", **options)
    assert (
        merged.store_nbytes > 0.75 * merged.written_nbytes
        and merged.read_nbytes < 0.25 * merged.written_nbytes + 65536
    )
    ckpt_tools.copy("s3://within/m.safetensors", tmp_path / "m.safetensors", **options)
    got = load_file(tmp_path / "m.safetensors")
    want = tensors(3, 5 * MIB + 3) | {"small": torch.arange(7.0)}
    assert got.keys() == want.keys() and all(torch.equal(got[k], want[k]) for k in want)
    manifest = next(p for p in tmp_path.glob("m.safetensors.ckpt.manifest.*"))
    sealed = RemoteStore("s3://within", server.options)
    there = next(n for n in sealed.list_files() if n.startswith("m.safetensors.ckpt"))
    text = fsspec.filesystem("s3", **server.options).cat(f"within/{there}").decode()
    checksum = manifest.read_text().split('"crc64nvme": "')[1][:16]
    # derived from the source's fingerprints there, from the bytes here
    assert f'"crc64nvme": "{checksum}"' in text
    copied = ckpt_tools.copy("s3://within/a", "s3://within/b", **options)
    assert (copied.client_nbytes, copied.store_nbytes) == (0, result.client_nbytes)
    ckpt_tools.copy("s3://within/b", tmp_path / "b", **options)
    assert {p.name: p.read_bytes() for p in source.iterdir()} == {
        p.name: p.read_bytes() for p in (tmp_path / "b").iterdir()
    }


# of `wide.py`: twice 1602 rows of 8 KiB, in halves; 801 and 800 columns of 8 KiB, whole
CELLS = [800 * 8192, *[801 * 8192] * 5]


def manifest_of(path: Path) -> Any:
    return json.loads(next(path.glob("ckpt.manifest.*")).read_text())


def files_of(path: Path) -> dict[str, bytes]:
    return {p.name.split(".")[0]: p.read_bytes() for p in path.glob("*.distcp")}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of 2, 3 and 8 ranks; each of 8 has a piece of 8.4 MB of two tensors and of 6.3
    MB of a third, and a small one.
    """
    out, generator = tmp_path_factory.mktemp("sources"), torch.Generator().manual_seed(3)
    shapes = {"a": (16384, 1025), "b": (12291, 1024), "c": (8, 2101, 1000), "small": (7, 5)}
    source = save_locally(
        out / "run",
        {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()},
    )
    for ranks in (2, 3, 8):
        ckpt_tools.reshard(source, out / str(ranks), to_ranks=ranks)
    return out


# less 5 MiB before each run that follows something that is sent; of 8 to 3 ranks only "c" is made
# of whole pieces
@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "to_ranks", "least", "most"),
    [
        (8, 8, 0.2, 0.4),
        (8, 4, 0.5, 0.6),
        (8, 1, 0.85, 0.9),
        (8, 3, 0.3, 0.4),
        (2, 4, 0.6, 0.7),
        (2, 8, 0.3, 0.4),
        (3, 1, 0.85, 0.95),
    ],
)
def test_a_reshard_by_whole_cells_is_copied_by_the_store(
    server: Server,
    sources: Path,
    tmp_path: Path,
    ranks: int,
    to_ranks: int,
    least: float,
    most: float,
) -> None:
    server.bucket("cells")
    options: dict[str, Any] = {"storage_options": server.options}
    source, there = sources / str(ranks), f"s3://cells/{sources.name}-{ranks}"
    if not RemoteStore(there, server.options).list_files():
        ckpt_tools.copy(source, there, **options)
    result = ckpt_tools.reshard(
        there, f"s3://cells/{ranks}to{to_ranks}", to_ranks=to_ranks, **options
    )
    assert least <= result.store_nbytes / result.written_nbytes <= most
    assert result.read_nbytes < result.written_nbytes - result.store_nbytes + 65536
    ckpt_tools.copy(f"s3://cells/{ranks}to{to_ranks}", tmp_path / "there", **options)
    ckpt_tools.reshard(source, tmp_path / "here", to_ranks=to_ranks)
    there_sealed, here_sealed = manifest_of(tmp_path / "there"), manifest_of(tmp_path / "here")
    assert there_sealed["tensors"] == here_sealed["tensors"]
    if ranks == 3:  # thirds do not add up to halves: what is sealed of "a" and "c" is the whole
        counts = [
            len(next(iter(sealed["files"].values())).pop("runs"))
            for sealed in (there_sealed, here_sealed)
        ]
        assert 3 == counts[0] < counts[1]
    # derived there, from the bytes here
    assert [*there_sealed["files"].values()] == [*here_sealed["files"].values()]
    got, want = files_of(tmp_path / "there"), files_of(tmp_path / "here")
    assert got.keys() == want.keys() and all(got[name] == want[name] for name in want)


@pytest.mark.slow
def test_without_checksums_of_pieces_a_reshard_passes_through(
    server: Server, sources: Path, tmp_path: Path
) -> None:
    """A manifest need not have them."""
    fs = server.bucket("earlier")
    options: dict[str, Any] = {"storage_options": server.options}
    eight = sources / "8"
    ckpt_tools.copy(eight, "s3://earlier/eight", **options)
    sealed = find_manifest(LocalStore(eight))
    assert sealed is not None
    files = {name: entry._replace(ranges=()) for name, entry in sealed.files.items()}
    name = next(n for n in fs.find("earlier/eight") if "ckpt.manifest" in n)
    fs.pipe(name, replace(sealed, files=files).render())
    result = ckpt_tools.reshard("s3://earlier/eight", "s3://earlier/two", to_ranks=2, **options)
    assert result.store_nbytes == 0
    # fingerprints are enough
    merged = ckpt_tools.merge("s3://earlier/eight", "s3://earlier/m.safetensors", **options)
    assert merged.store_nbytes > 0.5 * merged.written_nbytes
    assert ckpt_tools.diff("s3://earlier/two", eight, **options).is_same


@pytest.mark.slow
@pytest.mark.parametrize("work", ["merge", "reshard"])
def test_damage_in_what_a_store_copies_is_found(server: Server, tmp_path: Path, work: str) -> None:
    """At once by a store that has the checksum of what it holds; else by the first one who reads:
    what was sealed is what was right.
    """
    fs = server.bucket("copied")
    options: dict[str, Any] = {"storage_options": server.options}
    values = {"long": torch.randn(8, 1_600_000, generator=torch.Generator().manual_seed(5))}
    ckpt_tools.reshard(save_locally(tmp_path / "run", values), tmp_path / "four", to_ranks=4)
    ckpt_tools.copy(tmp_path / "four", f"s3://copied/{work}", **options)
    name = next(n for n in fs.find(f"copied/{work}") if "__1_0" in n)
    data = bytearray(fs.cat(name))
    data[-4_000_000] ^= 1
    fs.pipe(name, bytes(data))
    target = f"s3://copied/{work}-result" + (".safetensors" if work == "merge" else "")

    def go() -> Any:
        if work == "merge":
            return ckpt_tools.merge(f"s3://copied/{work}", target, **options)
        return ckpt_tools.reshard(f"s3://copied/{work}", target, to_ranks=2, **options)

    if server.name == "moto":
        with pytest.raises(StorageError, match="differs from what was sent: expected CRC-64"):
            go()
        assert not fs.find(target.removeprefix("s3://")) and not uploads(fs, "copied")
    else:
        assert go().store_nbytes > 10_000_000
        found = ckpt_tools.verify(target, **options)
        assert {p.fqn for p in found.problems} - {""} == {
            "long" if work == "merge" else "model.long"
        }


def test_whoever_writes_the_manifest_has_the_same_checksums_of_pieces(tmp_path: Path) -> None:
    """From a loop, from `dcp.save`, from a reshard, and from `seal`, which reads: that of a range
    of the file, by another program.
    """
    torchrun(2, "wide.py", str(tmp_path))
    ckpt_tools.seal(tmp_path / "stock")
    ckpt_tools.reshard(tmp_path / "ours", tmp_path / "again", to_ranks=2)
    for path in (
        tmp_path / "manager" / "step-00000001",
        tmp_path / "ours",
        tmp_path / "stock",
        tmp_path / "again",
    ):
        sealed = manifest_of(path)
        runs = [
            (name, *run)
            for name, entry in sorted(sealed["files"].items())
            for run in entry.get("runs", ())
        ]
        assert sorted(nbytes for _, _, nbytes, *_ in runs) == CELLS, path
        for name, start, nbytes, crc64, crc32 in runs:
            data = (path / name).read_bytes()[start : start + nbytes]
            assert (crc64, crc32) == (f"{crc64nvme(data):016x}", f"{zlib.crc32(data):08x}")
        archives = [*open_source(path).catalog.tensors.values()]
        for extent in (chunk.extent for tensor in archives for chunk in tensor.chunks):
            with zipfile.ZipFile(
                BytesIO(
                    (path / extent.file).read_bytes()[extent.start : extent.start + extent.nbytes]
                )
            ) as archive:
                assert archive.testzip() is None
        for written in sealed["files"].values():
            written.pop("runs", None)
        next(path.glob("ckpt.manifest.*")).unlink()
        ckpt_tools.seal(path)
        resealed = manifest_of(path)
        assert [
            (name, *run)
            for name, entry in sorted(resealed["files"].items())
            for run in entry.pop("runs", ())
        ] == runs
        assert (resealed["files"], resealed["tensors"]) == (sealed["files"], sealed["tensors"])
    next(path.glob("ckpt.manifest.*")).unlink()
    flip(path / runs[0][0], runs[0][1] + 5_000_000, 3)
    with pytest.raises(
        IntegrityError, match=f"a damaged checkpoint is not sealed: {runs[0][0]}.* expected CRC-32"
    ):
        ckpt_tools.seal(path)
    assert not list(path.glob("ckpt.manifest.*"))
