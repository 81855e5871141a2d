"""Archives of one tensor, both ways, with torch and Python's zipfile as oracles."""

from __future__ import annotations

import io
import struct
import zipfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckpt_tools.core.catalog import TORCH_ZIP, Extent
from ckpt_tools.core.checksum import crc32
from ckpt_tools.core.dtypes import BY_NAME
from ckpt_tools.errors import CheckpointError, FormatError
from ckpt_tools.formats.zip.read import ArchiveItem, locate_payloads
from ckpt_tools.formats.zip.write import wrap
from ckpt_tools.storage import LocalStore, MemoryStore, read
from tests.strategies import full_shapes, shapes


def packed(data: bytes, dtype: str, sizes: tuple[int, ...]) -> tuple[MemoryStore, ArchiveItem]:
    return MemoryStore({"f": b"before" + data + b"behind"}), ArchiveItem(
        Extent("f", 6, len(data), TORCH_ZIP), BY_NAME[dtype], sizes
    )


def saved(tensor: torch.Tensor) -> bytes:
    file = io.BytesIO()
    torch.save(tensor, file)
    return file.getvalue()


@given(st.sampled_from(sorted(BY_NAME)), shapes)
def test_torch_and_zipfile_read_what_is_wrapped(name: str, sizes: tuple[int, ...]) -> None:
    wrapping = wrap(BY_NAME[name], sizes)
    payload = (
        np.random.default_rng(1)
        .integers(0, 2 if name == "bool" else 255, wrapping.nbytes, np.uint8)
        .tobytes()
    )
    archive = wrapping.prefix + payload + wrapping.render_suffix(crc32(payload))
    assert len(archive) == len(wrapping.prefix) + wrapping.nbytes + wrapping.suffix_nbytes
    assert len(wrapping.prefix) % 64 == 0
    assert zipfile.ZipFile(io.BytesIO(archive)).testzip() is None
    tensor = torch.load(io.BytesIO(archive), weights_only=True)
    assert tensor.dtype == getattr(torch, name)
    assert tuple(tensor.shape) == sizes
    assert tensor.is_contiguous()
    assert bytes(tensor.untyped_storage()) == payload


@pytest.mark.parametrize(
    "name", ["float32", "bool", "int64", "bfloat16", "float8_e5m2", "uint32", "complex64"]
)
def test_the_wrapping_is_torchs_own_but_for_the_serialization_id(name: str) -> None:
    tensor = torch.zeros(3, 2, dtype=getattr(torch, name))
    theirs, wrapping = zipfile.ZipFile(io.BytesIO(saved(tensor))), wrap(BY_NAME[name], (3, 2))
    payload = bytes(tensor.untyped_storage())
    ours = zipfile.ZipFile(
        io.BytesIO(wrapping.prefix + payload + wrapping.render_suffix(crc32(payload)))
    )
    names = [n for n in theirs.namelist() if not n.endswith("serialization_id")]
    assert ours.namelist() == names
    assert all(ours.read(n) == theirs.read(n) for n in names if not n.endswith("data.pkl"))
    assert all(
        (ours.getinfo(n).flag_bits, ours.getinfo(n).compress_type) == (0x808, 0) for n in names
    )


@given(
    st.sampled_from(["float32", "int8", "bfloat16", "complex128", "float8_e4m3fn", "uint16"]),
    full_shapes,
    st.data(),
)
def test_the_payload_is_found_in_what_torch_saved(
    name: str, shape: tuple[int, ...], data: st.DataObject
) -> None:
    dtype = BY_NAME[name]
    order = data.draw(st.permutations(range(len(shape))))
    raw = np.random.default_rng(2).integers(
        0, 255, int(np.prod(shape, dtype=int)) * dtype.itemsize, np.uint8
    )
    tensor = torch.from_numpy(raw).view(getattr(torch, name)).view(shape).permute(order)
    store, item = packed(saved(tensor), name, tuple(tensor.shape))
    ((_, extent),) = locate_payloads(store, [item])
    words = np.frombuffer(
        read(store, extent.file, extent.start, extent.nbytes), f"V{dtype.itemsize}"
    )
    strides = [s * dtype.itemsize for s in extent.strides] if extent.strides else None
    found = np.ndarray(tuple(tensor.shape), words.dtype, buffer=words.data, strides=strides)
    want = np.ndarray(
        tuple(tensor.shape),
        words.dtype,
        raw.data if raw.size else None,
        strides=[s * dtype.itemsize for s in tensor.stride()],
    )
    assert found.tobytes() == want.tobytes()


def test_a_view_of_a_larger_storage_is_found_at_its_offset() -> None:
    tensor = torch.arange(100, dtype=torch.int32).view(10, 10)[2:4]
    store, item = packed(saved(tensor), "int32", (2, 10))
    ((_, extent),) = locate_payloads(store, [item])
    assert np.frombuffer(read(store, "f", extent.start, extent.nbytes), "i4").tolist() == list(
        range(20, 40)
    )


@pytest.mark.parametrize(
    ("dtype", "sizes", "message"),
    [
        ("float16", (3, 2), "expected float16"),
        ("float32", (2, 3), r"expected float32 \[2, 3\], got float32 \[3, 2\]"),
        ("float32", (6,), "index says"),
    ],
)
def test_an_item_that_is_not_what_the_index_says_is_refused(
    dtype: str, sizes: tuple[int, ...], message: str
) -> None:
    store, item = packed(saved(torch.zeros(3, 2)), dtype, sizes)
    with pytest.raises(FormatError, match=message):
        list(locate_payloads(store, [item]))


def test_truncation_anywhere_is_an_error() -> None:
    data = saved(torch.zeros(40, 40))
    for nbytes in range(0, len(data), 97):
        with pytest.raises(CheckpointError):
            list(
                locate_payloads(
                    MemoryStore({"f": data[:nbytes]}),
                    [ArchiveItem(Extent("f", 0, nbytes, TORCH_ZIP), BY_NAME["float32"], (40, 40))],
                )
            )


def test_compressed_records_and_lies_about_sizes_are_refused() -> None:
    squeezed = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(saved(torch.zeros(100)))) as old,
        zipfile.ZipFile(squeezed, "w", zipfile.ZIP_DEFLATED) as new,
    ):
        for name in old.namelist():
            new.writestr(name, old.read(name))
    store, item = packed(squeezed.getvalue(), "float32", (100,))
    with pytest.raises(FormatError, match="method 8"):
        list(locate_payloads(store, [item]))
    good = saved(torch.zeros(100))
    at = good.rindex(b"PK\x01\x02", 0, good.index(b"archive/data/0", good.index(b"PK\x01\x02")))
    lie = bytearray(good)
    struct.pack_into("<2I", lie, at + 20, 1 << 30, 1 << 30)
    store, item = packed(bytes(lie), "float32", (100,))
    with pytest.raises(FormatError, match="wrong length"):
        list(locate_payloads(store, [item]))


@given(st.integers(0), st.integers(0, 7))
def test_no_single_flipped_bit_crashes_the_reader(position: int, bit: int) -> None:
    data = bytearray(saved(torch.arange(8.0)))
    data[position % len(data)] ^= 1 << bit
    try:
        list(
            locate_payloads(
                MemoryStore({"f": bytes(data)}),
                [ArchiveItem(Extent("f", 0, len(data), TORCH_ZIP), BY_NAME["float32"], (8,))],
            )
        )
    except CheckpointError:
        pass


class SparseFile:
    """A file that seeks where only zeros are written, so that 4 GiB of them take no room."""

    def __init__(self, path: Path) -> None:
        self.file = path.open("wb")
        self.zeros = bytes(1 << 20)

    def write(self, data: bytes) -> int:
        view = memoryview(data).cast("B")
        if len(view) >= 1 << 20 and all(
            view[i : i + (1 << 20)] == self.zeros[: len(view) - i]
            for i in range(0, len(view), 1 << 20)
        ):
            self.file.seek(len(view), 1)
        else:
            self.file.write(view)
        return len(view)

    def flush(self) -> None:
        self.file.flush()


@pytest.mark.slow
def test_an_item_past_4_gib_is_found_in_torchs_zip64_and_torch_opens_ours(tmp_path: Path) -> None:
    numel = (1 << 32) + 4096
    zeros = torch.from_numpy(np.zeros(numel, np.uint8))
    sparse = SparseFile(tmp_path / "theirs")
    torch.save(zeros, sparse)
    sparse.file.close()
    size = (tmp_path / "theirs").stat().st_size
    store = LocalStore(tmp_path)
    ((_, extent),) = locate_payloads(
        store, [ArchiveItem(Extent("theirs", 0, size, TORCH_ZIP), BY_NAME["uint8"], (numel,))]
    )
    assert extent.nbytes == numel
    wrapping = wrap(BY_NAME["uint8"], (numel,))
    with (tmp_path / "ours").open("wb") as file:
        file.write(wrapping.prefix)
        file.seek(numel - 1, 1)
        file.write(b"\x07" + wrapping.render_suffix(123))
    assert zipfile.ZipFile(tmp_path / "ours").getinfo("archive/data/0").file_size == numel
    tensor = torch.load(tmp_path / "ours", weights_only=True, mmap=True)
    assert (tensor.numel(), tensor[-1].item()) == (numel, 7)
    size = (tmp_path / "ours").stat().st_size
    ((_, extent),) = locate_payloads(
        store, [ArchiveItem(Extent("ours", 0, size, TORCH_ZIP), BY_NAME["uint8"], (numel,))]
    )
    assert (extent.start, extent.nbytes) == (len(wrapping.prefix), numel)


def outcome(store: MemoryStore, item: ArchiveItem, beside: Sequence[ArchiveItem] = ()) -> object:
    """What is found for one archive, alone or beside others, or the error."""
    try:
        return dict(locate_payloads(store, list(beside) or [item]))[item.extent]
    except FormatError as error:
        return str(error)


@pytest.mark.parametrize("gap", [0, 24])
@pytest.mark.parametrize("odd", ["", "transposed", "view", "dtype", "empty"])
def test_archives_that_equal_their_neighbours_are_found_as_each_alone(odd: str, gap: int) -> None:
    tensors = [torch.randn(4, 4) for _ in range(40)]
    others = {
        "transposed": torch.randn(4, 4).t(),
        "view": torch.randn(8, 4)[4:],
        "dtype": torch.arange(16, dtype=torch.int32).reshape(4, 4),
        "empty": torch.zeros(0, 4),
    }
    if odd:
        tensors[17] = others[odd]
    data, items = b"", []
    for tensor in tensors:
        one = saved(tensor)
        extent = Extent("f", len(data), len(one), TORCH_ZIP)
        name = str(tensor.dtype).removeprefix("torch.")
        items.append(ArchiveItem(extent, BY_NAME[name], tuple(tensor.shape)))
        data += one + bytes(gap)
    store = MemoryStore({"f": data})
    found = dict(locate_payloads(store, items))
    assert found == {item.extent: outcome(store, item) for item in items}
    values = [read(store, "f", e.start, e.nbytes) for e in found.values()]
    assert len(set(values)) >= 39 and sum(e.crc32 is not None for e in found.values()) >= 39


def test_a_changed_byte_in_a_run_has_the_outcome_of_the_archive_alone() -> None:
    one = [saved(torch.randn(3, 2)) for _ in range(12)]
    nbytes = len(one[0])
    items = [
        ArchiveItem(Extent("f", n * nbytes, nbytes, TORCH_ZIP), BY_NAME["float32"], (3, 2))
        for n in range(12)
    ]
    for at in range(5 * nbytes, 6 * nbytes):
        data = bytearray(b"".join(one))
        data[at] ^= 0xFF
        store = MemoryStore({"f": bytes(data)})
        assert outcome(store, items[5], items) == outcome(store, items[5])


@pytest.mark.parametrize("at", [0, 11])
def test_a_damaged_end_of_a_run_does_not_spoil_the_others(at: int) -> None:
    one = [saved(torch.randn(3, 2)) for _ in range(12)]
    one[at] = one[at][:-30] + bytes(30)
    items = [
        ArchiveItem(Extent("f", n * len(d), len(d), TORCH_ZIP), BY_NAME["float32"], (3, 2))
        for n, d in enumerate(one)
    ]
    store = MemoryStore({"f": b"".join(one)})
    with pytest.raises(FormatError, match=f"at byte {at * len(one[0])}"):
        list(locate_payloads(store, items))
