"""NumPy's files; the oracle is numpy."""

from __future__ import annotations

import math
import zipfile
from io import BytesIO
from pathlib import Path

import fsspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

import ckpt_tools
from ckpt_tools import CheckpointError, FormatError, NotACheckpointError, PlanError
from ckpt_tools.formats import npz
from ckpt_tools.storage import MemoryStore

KINDS = ["f8", "f4", "f2", "i8", "i4", "i2", "i1", "u8", "u4", "u2", "u1", "?", "c8"]


def arrays() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    found = {f"layer/{kind}": (rng.standard_normal((7, 5, 3)) * 100).astype(kind) for kind in KINDS}
    return found | {
        "fortran": np.asfortranarray(rng.standard_normal((40, 30))),
        "scale": np.float32(3),
        "none": np.zeros((0, 4), "f4"),
        "row": np.asfortranarray(rng.standard_normal((1, 9))),
        "big": rng.standard_normal((900, 300)).astype("f4"),
    }


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    np.savez(tmp_path / "a.npz", **arrays())
    return tmp_path / "a.npz"


def test_every_verb_reads_them(saved: Path, tmp_path: Path) -> None:
    assert ckpt_tools.inspect(saved).catalog.tensors.keys() == arrays().keys()
    found = ckpt_tools.verify(saved)
    assert found.problems == [] and not found.unknown
    ckpt_tools.merge(saved, tmp_path / "m.safetensors")
    got = load_file(tmp_path / "m.safetensors")
    assert got.keys() == arrays().keys()
    assert all(
        got[n].dtype == a.dtype and got[n].shape == a.shape and np.array_equal(got[n], a)
        for n, a in arrays().items()
    )
    ckpt_tools.convert(saved, tmp_path / "dcp", to="dcp", ranks=3)
    assert ckpt_tools.diff(saved, tmp_path / "dcp").is_same


def test_every_flipped_bit_is_found(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", w=np.arange(12, dtype="f4").reshape(3, 4), b=np.ones(3, "i2"))
    data = (tmp_path / "a.npz").read_bytes()
    for position in range(len(data)):
        flipped = bytearray(data)
        flipped[position] ^= 1 << position % 8
        (tmp_path / "a.npz").write_bytes(flipped)
        try:
            found = ckpt_tools.verify(tmp_path / "a.npz").problems
        except CheckpointError:
            continue
        assert found, position


def test_a_damaged_value_is_not_merged(saved: Path, tmp_path: Path) -> None:
    data = bytearray(saved.read_bytes())
    data[data.index(b"big.npy") + 500_000] ^= 1
    saved.write_bytes(data)
    with pytest.raises(CheckpointError, match="damaged since they were written"):
        ckpt_tools.merge(saved, tmp_path / "m.safetensors")
    assert not (tmp_path / "m.safetensors").exists()


@pytest.mark.parametrize(
    ("write", "says"),
    [
        (lambda p: np.savez_compressed(p, w=np.zeros((30, 30))), "a compressed array"),
        (lambda p: np.savez(p, w=np.array([{}], object)), "arrays of this type are not read: |O"),
        (lambda p: np.savez(p, w=np.zeros(3, ">f4")), "arrays of this type are not read: >f4"),
        (
            lambda p: np.savez(p, w=np.zeros(3, [("a", "f4"), ("b", "i8")])),
            "arrays of this type are not read",
        ),
        (lambda p: p.write_bytes(b"PK\x05\x06"), "not a .npz, or a damaged one"),
        (lambda p: p.write_bytes(b""), "is empty"),
        (
            lambda p: zipfile.ZipFile(p, "w").writestr("w.npy", b"no array at all"),
            "not an array of numpy",
        ),
    ],
)
def test_what_cannot_be_read_is_told(write: object, says: str, tmp_path: Path) -> None:
    write(tmp_path / "a.npz")  # type: ignore[operator]
    with pytest.raises(FormatError, match=says.replace("|", r"\|")):
        ckpt_tools.inspect(tmp_path / "a.npz")


def test_a_directory_of_arrays_says_what_to_give(saved: Path) -> None:
    with pytest.raises(NotACheckpointError, match="looked for (?!.*npz)") as error:
        ckpt_tools.inspect(saved.parent)
    assert error.value.hint == "give the path of the file itself"


def test_it_is_no_target(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="cannot write 'npz'"):
        ckpt_tools.convert(saved, tmp_path / "b.npz", to="npz")


@settings(max_examples=60)
@given(
    st.lists(st.integers(0, 6), max_size=4),
    st.sampled_from(KINDS),
    st.booleans(),
    st.sampled_from([(1, 0), (2, 0), (3, 0)]),
)
def test_headers_of_every_version(
    shape: list[int], kind: str, is_fortran: bool, version: tuple[int, int]
) -> None:
    array = (
        np.arange(math.prod(shape)).reshape(shape, order="F" if is_fortran else "C").astype(kind)
    )
    inner, outer = BytesIO(), BytesIO()
    np.lib.format.write_array(inner, array, version)
    with zipfile.ZipFile(outer, "w") as archive:
        archive.writestr("w.npy", inner.getvalue())
    entry = npz.read_catalog(MemoryStore({"a.npz": outer.getvalue()})).tensors["w"]
    assert entry.shape == tuple(shape) and entry.nbytes == array.nbytes
    ((_, extent),) = entry.chunks
    values = np.frombuffer(outer.getvalue(), array.dtype, array.size, extent.start)
    assert np.array_equal(values.reshape(shape, order="F" if extent.strides else "C"), array)


def test_from_a_bucket_too(saved: Path, tmp_path: Path) -> None:
    fs = fsspec.filesystem("memory")
    fs.pipe("/npz/a.npz", saved.read_bytes())
    ckpt_tools.merge("memory://npz/a.npz", tmp_path / "m.safetensors")
    got = load_file(tmp_path / "m.safetensors")
    assert all(np.array_equal(got[n], a) for n, a in arrays().items())
    assert ckpt_tools.verify("memory://npz/a.npz").problems == []
