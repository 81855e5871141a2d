"""`.metadata`, both ways, with torch's own classes as the oracle; and pickles that mean harm."""

from __future__ import annotations

import os
import pickle
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint import metadata as torch_metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo

from ckpt_tools.core.box import Box
from ckpt_tools.errors import CheckpointError, FormatError, UnsafePickleError
from ckpt_tools.formats.dcp.metadata import (
    ItemLocation,
    Metadata,
    TensorMeta,
    parse_metadata,
    render,
)

sizes = st.lists(st.integers(0, 2**40), max_size=5).map(tuple)
names = st.text(st.characters(exclude_categories=["Cs"]), max_size=300)


@st.composite
def metadatas(draw: st.DrawFn) -> Metadata:
    result = Metadata()
    for fqn in draw(st.lists(names, unique=True, max_size=4)):
        shape = draw(sizes)
        offsets = draw(
            st.lists(
                st.tuples(*[st.integers(0, 2**40)] * len(shape)),
                unique=True,
                min_size=1,
                max_size=3,
            )
        )
        result.tensors[fqn] = TensorMeta(
            draw(st.sampled_from(["float32", "bfloat16", "bool"])),
            shape,
            [Box(o, shape) for o in offsets],
        )
        for offset in offsets:
            result.places[fqn, offset] = ItemLocation(
                f"__{draw(st.integers(0, 3))}_0.distcp",
                draw(st.integers(0, 2**50)),
                draw(st.integers(0, 2**35)),
            )
        result.paths[fqn] = tuple(
            draw(st.lists(st.one_of(names, st.integers(0, 70000)), min_size=1, max_size=4))
        )
    for fqn in draw(
        st.lists(names.filter(lambda n: n not in result.tensors), unique=True, max_size=3)
    ):
        result.objects.append(fqn)
        result.places[fqn, None] = ItemLocation("__0_0.distcp", 0, 5)
    return result


@given(metadatas())
def test_torch_reads_what_is_rendered_as_the_objects_it_would_have_written(ours: Metadata) -> None:
    theirs = pickle.loads(render(ours, "some-id"))
    assert isinstance(theirs, torch_metadata.Metadata)
    assert list(theirs.state_dict_metadata) == [*ours.tensors, *ours.objects]
    for fqn, tensor in ours.tensors.items():
        value = theirs.state_dict_metadata[fqn]
        assert value == torch_metadata.TensorStorageMetadata(
            torch_metadata.TensorProperties(dtype=getattr(torch, tensor.dtype)),
            torch.Size(tensor.shape),
            [
                torch_metadata.ChunkStorageMetadata(torch.Size(b.offsets), torch.Size(b.sizes))
                for b in tensor.boxes
            ],
        )
        assert isinstance(value.size, torch.Size)
    assert theirs.planner_data == ours.paths
    want = {
        torch_metadata.MetadataIndex(f, o): _StorageInfo(*p) for (f, o), p in ours.places.items()
    }
    assert theirs.storage_data == want
    assert [i.index for i in theirs.storage_data if i.offset is None] == [None] * len(ours.objects)
    assert (theirs.storage_meta.save_id, theirs.storage_meta.load_id, theirs.version) == (
        "some-id",
        None,
        "1.0.0",
    )


@given(metadatas())
def test_what_is_rendered_parses_to_the_same(ours: Metadata) -> None:
    again = parse_metadata(render(ours, "id"), "test")
    assert (again.tensors, again.objects, again.paths, again.places) == (
        ours.tensors,
        ours.objects,
        ours.paths,
        ours.places,
    )
    assert again.extras == {"dcp_version": "1.0.0", "save_id": "id", "checkpoint_id": ""}


def genuine() -> bytes:
    meta = Metadata()
    meta.tensors["w"] = TensorMeta("float32", (4, 2), [Box((0, 0), (2, 2)), Box((2, 0), (2, 2))])
    meta.places = {
        ("w", (0, 0)): ItemLocation("__0_0.distcp", 0, 1000),
        ("w", (2, 0)): ItemLocation("__1_0.distcp", 0, 1000),
    }
    meta.paths = {"w": ("w",)}
    return pickle.dumps(pickle.loads(render(meta, "id")))


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_every_protocol_that_torch_might_use_is_read(protocol: int) -> None:
    again = parse_metadata(pickle.dumps(pickle.loads(genuine()), protocol=protocol), "test")
    assert again.tensors["w"].shape == (4, 2)


def test_paths_of_any_system_and_python_are_read() -> None:
    theirs = pickle.loads(genuine())
    theirs.storage_meta.checkpoint_id = Path("/train/host/run")
    data = pickle.dumps(theirs)
    for module, name in (
        (b"pathlib", b"PosixPath"),
        (b"pathlib._local", b"PosixPath"),
        (b"pathlib", b"WindowsPath"),
    ):
        swapped = data.replace(b"\x8c\x07pathlib", b"\x8c" + bytes([len(module)]) + module).replace(
            b"\x8c\x09PosixPath", b"\x8c" + bytes([len(name)]) + name
        )
        frame = struct.pack("<Q", len(swapped) - 11)
        assert (
            parse_metadata(swapped[:3] + frame + swapped[11:], "test").extras["checkpoint_id"]
            == "//train/host/run"
        )


def test_truncation_at_any_byte_is_an_error() -> None:
    data = genuine()
    for nbytes in range(len(data)):
        with pytest.raises(CheckpointError):
            parse_metadata(data[:nbytes], "test")


@pytest.mark.slow
def test_no_single_flipped_bit_does_more_than_raise() -> None:
    data = genuine()
    for position in range(len(data)):
        for bit in range(8):
            flipped = bytearray(data)
            flipped[position] ^= 1 << bit
            try:
                parse_metadata(bytes(flipped), "test")
            except CheckpointError:
                pass


@settings(max_examples=300)
@given(st.binary(max_size=200))
def test_random_bytes_do_no_more_than_raise(data: bytes) -> None:
    with pytest.raises(CheckpointError):
        parse_metadata(b"\x80\x04" + data, "test")


CANARY = "canary-was-here"


class Attack:
    def __init__(self, function: Callable[..., object], *args: object) -> None:
        self.function, self.args = function, args

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return self.function, self.args


@pytest.mark.parametrize(
    "attack",
    [
        Attack(os.system, f"touch {CANARY}"),
        Attack(eval, f"open('{CANARY}', 'w')"),
        Attack(exec, f"open('{CANARY}', 'w')"),
        Attack(open, CANARY, "w"),
        Attack(getattr, "", "join"),
        Attack(__import__, "os"),
        Attack(torch.load, CANARY),
        Attack(bytearray, 1 << 30),
    ],
    ids=lambda a: a.function.__name__,
)
@pytest.mark.parametrize("protocol", [2, 4])
def test_a_global_outside_the_list_is_named_and_never_runs(
    attack: Attack, protocol: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UnsafePickleError, match=rf"asks for .*{attack.function.__name__}"):
        parse_metadata(pickle.dumps(attack, protocol), "test")
    assert list(tmp_path.iterdir()) == []


def frame(body: bytes) -> bytes:
    return b"\x80\x04" + body + b"."


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (frame(b"X" + struct.pack("<I", 1 << 31) + b"a"), "runs past"),
        (frame(b"\x8d" + struct.pack("<Q", 1 << 40)), "no place"),
        (frame(b"\x96" + struct.pack("<Q", 1 << 40)), "no place"),
        (frame(b"K\x01r" + struct.pack("<I", 0xFFFFFFFF)), "no place"),
        (frame(b"\x8a\xff" + bytes(255)), "no place"),
        (frame(b"\x8b" + struct.pack("<I", 1 << 30)), "no place"),
        (frame(b"\x82\x01"), "no place"),
        (frame(b"(ios\nsystem\n"), "no place"),
        (frame(b"S'text'\n"), "no place"),
        (frame(b"K\x01Q"), "no place"),
        (frame(b"K\x01") + b"more", "follow its STOP"),
        (b"\x80\x04\x8c\x02os\x8c\x0bpath.system\x93.", "os.path.system"),
        (b"\x80\x00.", "protocol"),
        (b"", "protocol"),
        (frame(b"K\x01"), "expected a Metadata"),
    ],
)
def test_opcodes_and_lengths_without_place_in_a_checkpoint_are_refused(
    data: bytes, message: str
) -> None:
    with pytest.raises(FormatError, match=message):
        parse_metadata(data, "test")


def test_a_hostile_pickle_leaves_no_trace_in_the_next() -> None:
    module = b"\x8c\x25torch.distributed.checkpoint.metadata"
    spoil = frame(module + b"\x8c\x08Metadata\x93}\x8c\x13state_dict_metadata}s\x86b")
    with pytest.raises(CheckpointError):
        parse_metadata(spoil, "test")
    assert parse_metadata(genuine(), "test").tensors["w"].dtype == "float32"


def test_values_of_another_type_are_named() -> None:
    theirs = pickle.loads(genuine())
    theirs.state_dict_metadata["w"].chunks[0].offsets = (0, "x")
    with pytest.raises(FormatError, match="expected an int"):
        parse_metadata(pickle.dumps(theirs), "test")
    theirs = pickle.loads(genuine())
    theirs.state_dict_metadata["w"].properties.layout = torch.sparse_coo
    with pytest.raises(FormatError, match="torch.sparse_coo"):
        parse_metadata(pickle.dumps(theirs), "test")
    theirs = pickle.loads(genuine())
    next(iter(theirs.storage_data.values())).transform_descriptors = ["stream.gzip/1"]
    with pytest.raises(FormatError, match="gzip"):
        parse_metadata(pickle.dumps(theirs), "test")
