"""The suite that every format passes: lay out, fill, recognise, read back, locate; values and names
intact.
"""

from __future__ import annotations

import io
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from safetensors.torch import save

import ckpt_tools
from ckpt_tools.core.box import whole
from ckpt_tools.core.catalog import RAW, Catalog, Extent, TensorEntry, one_chunk
from ckpt_tools.core.coverage import check
from ckpt_tools.core.dtypes import BY_NAME
from ckpt_tools.core.placements import reshard_boxes
from ckpt_tools.core.plan import plan_transfer
from ckpt_tools.engine.execute import execute_batches
from ckpt_tools.engine.schedule import schedule
from ckpt_tools.engine.sinks import WriteSink
from ckpt_tools.errors import CheckpointError
from ckpt_tools.formats import safetensors, torch_save
from ckpt_tools.formats.dcp import format as dcp
from ckpt_tools.formats.registry import FORMATS, Request, TargetTensor
from ckpt_tools.storage import MemoryStore, Store, read

NAMES = [
    "w",
    "dots.in.name",
    "a/b",
    "ünïcödé-名前",
    "line\nbreak",
    "\x1b]0;pwn",
    '"quoted"\\',
    "x" * 400,
]
SHAPES = [(7, 3), (), (0,), (3, 0, 2), (1, 17), (5,), (2, 3, 4), (300,)]


def filled(form: ModuleType, dtype: str, ranks: int) -> tuple[MemoryStore, dict[str, np.ndarray]]:
    """Writes a set of tensors through a format's layout, from memory to memory."""
    rng = np.random.default_rng(0)
    itemsize = BY_NAME[dtype].itemsize
    values = {
        n: rng.integers(0, 255, (*s, itemsize), np.uint8)
        for n, s in zip(NAMES, SHAPES, strict=True)
    }
    blob, entries = bytearray(), {}
    for name, shape in zip(NAMES, SHAPES, strict=True):
        raw = values[name].tobytes()
        entries[name] = TensorEntry(
            name, BY_NAME[dtype], shape, one_chunk(whole(shape), Extent("f", len(blob), len(raw)))
        )
        blob += raw
    tensors = []
    for name, shape in zip(NAMES, SHAPES, strict=True):
        boxes = [whole(shape)]
        if ranks > 1 and form.NAME == "dcp" and shape:
            boxes = reshard_boxes([whole(shape), whole((*shape[:-1], 0))], shape, ranks)
        tensors.append(
            TargetTensor(name, BY_NAME[dtype], shape, (*boxes, *[None] * (ranks - len(boxes))))
        )
    name = "pytorch_model.bin" if form is torch_save else "model.safetensors"
    target = form.lay_out(Request(tensors, ranks, file_name=name, with_index=ranks > 1))
    source, out = Catalog("memory", entries, file_sizes={"f": len(blob)}), MemoryStore()
    sink = WriteSink(target, out)
    sink.open()
    execute_batches(
        schedule(plan_transfer(source, target), {}, 64, 256), MemoryStore({"f": blob}), sink, 2
    )
    sink.finish()
    if target.index:
        out.files[target.index.file] = memoryview(target.index.data)
    return out, values


def value(store: Store, catalog: Catalog, form: ModuleType, name: str) -> np.ndarray:
    entry = catalog.tensors[name]
    located = form.locate(store, [entry])
    full = np.zeros((*entry.shape, entry.dtype.itemsize), np.uint8)
    for box, packed in entry.chunks:
        extent = located.get(packed, packed)
        assert extent.packing == RAW
        raw = np.frombuffer(read(store, extent.file, extent.start, extent.nbytes), np.uint8)
        full[box.slices()] = raw.reshape((*box.sizes, entry.dtype.itemsize))
    return full


# those that are written
@pytest.fixture(params=[dcp, safetensors, torch_save], ids=lambda f: f.NAME)
def form(request: pytest.FixtureRequest) -> ModuleType:
    return request.param


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize(
    "dtype", ["float32", "bfloat16", "bool", "int64", "float8_e4m3fn", "uint16"]
)
def test_what_is_laid_out_reads_back(form: ModuleType, dtype: str, ranks: int) -> None:
    store, values = filled(form, dtype, ranks)
    assert form.recognise(store.list_files())
    catalog = form.read_catalog(store)
    check(catalog)
    assert set(catalog.tensors) == set(NAMES)
    for name, shape in zip(NAMES, SHAPES, strict=True):
        entry = catalog.tensors[name]
        assert (entry.shape, entry.dtype.name) == (shape, dtype)
        assert (value(store, catalog, form, name) == values[name]).all()


@pytest.mark.parametrize("any_form", FORMATS, ids=lambda f: f.NAME)
def test_other_files_are_not_mistaken(any_form: ModuleType) -> None:
    assert not any_form.recognise({})
    assert not any_form.recognise({"weights.bin": 5, "notes.txt": 1})


@pytest.mark.parametrize("suffix", [".npz", ".gguf", ".safetensors", ".pt"])
@pytest.mark.parametrize("content", ["npz", "gguf", "safetensors", "pt", "text"])
def test_a_file_of_another_format_under_this_suffix_is_refused(
    suffix: str, content: str, tmp_path: Path
) -> None:
    if suffix == f".{content}":
        pytest.skip("the right suffix")
    data = io.BytesIO()
    if content == "npz":
        np.savez(data, w=np.ones(3))
    elif content == "pt":
        torch.save({"w": torch.ones(3)}, data)
    others = {
        "gguf": b"GGUF" + bytes(60),
        "safetensors": save({"w": torch.ones(3)}),
        "text": b"just a text\n" * 9,
    }
    (tmp_path / f"x{suffix}").write_bytes(others.get(content, data.getvalue()))
    with pytest.raises(CheckpointError):
        ckpt_tools.inspect(tmp_path / f"x{suffix}")


class Counting(MemoryStore):
    """Counts the bytes that are read."""

    nbytes = 0

    def read_into(self, path: str, start: int, buffer: memoryview) -> None:
        self.nbytes += len(buffer)
        buffer[:] = self.files[path][start : start + len(buffer)]

    # every read goes through read_into
    def view(self, path: str, start: int, nbytes: int) -> memoryview | None:
        return None


def test_locating_a_few_tensors_reads_no_payload(form: ModuleType) -> None:
    big = 4 << 20
    shape = (big // 4,)
    blob = bytes(big)
    entry = TensorEntry(
        "big", BY_NAME["float32"], shape, one_chunk(whole(shape), Extent("f", 0, big))
    )
    name = "pytorch_model.bin" if form is torch_save else "model.safetensors"
    target = form.lay_out(
        Request([TargetTensor("big", entry.dtype, shape, (whole(shape),))], 1, file_name=name)
    )
    out = MemoryStore()
    sink = WriteSink(target, out)
    sink.open()
    source = Catalog("memory", {"big": entry}, file_sizes={"f": big})
    execute_batches(
        schedule(plan_transfer(source, target), {}, 1 << 20, 1 << 20),
        MemoryStore({"f": blob}),
        sink,
        1,
    )
    sink.finish()
    if target.index:
        out.files[target.index.file] = memoryview(target.index.data)
    store = Counting({name: bytes(data) for name, data in out.files.items()})
    catalog = form.read_catalog(store)
    form.locate(store, catalog.tensors.values())
    assert 0 < store.nbytes < 64 << 10, store.nbytes


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_guess_is_where_the_payload_is_found(form: ModuleType, ranks: int) -> None:
    store, _ = filled(form, "bfloat16", ranks)
    catalog = form.read_catalog(store)
    found = form.locate(store, catalog.tensors.values())
    guessed = form.guess(catalog.tensors.values())
    assert guessed.keys() == found.keys()
    assert all(found[at][:5] == extent[:5] for at, extent in guessed.items())
