"""Small files and servers that would take much memory or time."""

from __future__ import annotations

import io
import itertools
import lzma
import pickle
import struct
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from aiohttp import web

import ckpt_tools
from ckpt_tools import (
    CheckpointError,
    FormatError,
    StorageError,
    UnsafePickleError,
)
from ckpt_tools.core.box import bands, flat_range_boxes, whole
from ckpt_tools.formats.pickle import write as pickle_write
from ckpt_tools.formats.pickle.scan import scan
from ckpt_tools.loop.state.archives import pack, unpack
from tests.attacks.hostile import (
    GIB,
    alike,
    entries,
    limited,
    number,
    refused,
    tensor,
    text,
    torch_file,
)
from tests.servers.faults import serving


def objects() -> Iterator[tuple[str, bytes]]:
    yield "bytearray", b"\x80\x02cbuiltins\nbytearray\n" + pickle_write.opcodes((5 << 30,)) + b"R."
    yield "storage", b"\x80\x02ctorch\nUntypedStorage\n" + pickle_write.opcodes((5 << 30,)) + b"R."
    yield "set", b"\x80\x02c__builtin__\nbytearray\n" + pickle_write.opcodes((1 << 40,)) + b"R."


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "data"), list(objects()))
def test_an_object_does_not_allocate_more_than_it_has(
    kind: str, data: bytes, tmp_path: Path
) -> None:
    torch_file(tmp_path / "o.pt", data)
    code = (
        "import sys; from pathlib import Path; from ckpt_tools.loop.state.archives import unpack;"
        " unpack(Path(sys.argv[1]).read_bytes(), 'o', False)"
    )
    done = limited(code, tmp_path / "o.pt", memory=4 * GIB)
    assert done.returncode == 1 and "MemoryError" not in done.stderr, done.stderr
    assert (
        "ckpt_tools.errors." in done.stderr.splitlines()[-1]
        or "hint" in done.stderr.splitlines()[-1]
    ), done.stderr


def test_an_expanded_tensor_in_an_object_is_bounded(tmp_path: Path) -> None:
    assert unpack(pack({"x": [1, "two"]}), "x", False) == {"x": [1, "two"]}
    for size, message in ((1 << 40, "repeats its elements too often"), (1 << 28, "far larger")):
        buffer = io.BytesIO()
        torch.save({"t": torch.ones(1).expand(size)}, buffer)
        with pytest.raises(FormatError, match=message):
            unpack(buffer.getvalue(), "o", False)


@pytest.mark.slow
@pytest.mark.parametrize("method", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_compressed_entries_are_refused_and_not_inflated(method: int, tmp_path: Path) -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as archive:
        archive.writestr("archive/data.pkl", pickle.dumps({"a": 1}, 2), zipfile.ZIP_STORED)
        archive.writestr("archive/data/0", bytes(200 << 20))
    with pytest.raises(CheckpointError, match="compressed"):
        unpack(buffer.getvalue(), "o", False)
    (tmp_path / "s.pt").write_bytes(buffer.getvalue())
    with pytest.raises(FormatError, match="not stored as torch does it"):
        ckpt_tools.inspect(tmp_path / "s.pt")
    assert "not stored as torch does it" in str(ckpt_tools.verify(tmp_path / "s.pt").problems)
    assert lzma  # LZMA is here, so that it could have been inflated


def collisions(count: int) -> bytes:
    """Integers that hash alike, as the keys of a dict."""
    modulus = sys.hash_info.modulus
    return (
        b"\x80\x02}("
        + b"".join(pickle_write.integer(modulus * i) + b"N" for i in range(1, count))
        + b"u."
    )


def shared_dicts(depth: int) -> bytes:
    data = b"\x80\x02}X\x01\x00\x00\x00xK\x01s"
    for i in range(depth):
        data += (
            b"q"
            + bytes([i])
            + b"}(X\x01\x00\x00\x00ah"
            + bytes([i])
            + b"X\x01\x00\x00\x00bh"
            + bytes([i])
            + b"u"
        )
    return data + b"."


@pytest.mark.parametrize(
    "data", [collisions(60_000), shared_dicts(60)], ids=["integers that hash alike", "shared dicts"]
)
def test_small_files_do_not_take_minutes(data: bytes, tmp_path: Path) -> None:
    torch_file(tmp_path / "s.pt", data)
    # it took 48 s and more
    done = limited(
        "import sys, ckpt_tools; ckpt_tools.inspect(sys.argv[1])", tmp_path / "s.pt", seconds=45
    )
    assert done.returncode == 1 and "ckpt_tools.errors." in done.stderr, done.stderr[-500:]


def test_a_list_of_chunks_under_many_names_is_refused(tmp_path: Path) -> None:
    dcp.save({"w": torch.ones(3000)}, checkpoint_id=tmp_path / "c", no_dist=True)
    metadata = pickle.loads((tmp_path / "c" / ".metadata").read_bytes())
    entry = metadata.state_dict_metadata["w"]
    entry.chunks = entry.chunks * 2000
    for i in range(2000):
        other = type(entry)(entry.properties, entry.size, entry.chunks)
        metadata.state_dict_metadata[f"w{i}"] = other
    (tmp_path / "c" / ".metadata").write_bytes(pickle.dumps(metadata))
    done = limited(
        "import sys, ckpt_tools; ckpt_tools.inspect(sys.argv[1])", tmp_path / "c", seconds=60
    )
    assert done.returncode == 1 and "two tensors share one list of chunks" in done.stderr, (
        done.stderr[-500:]
    )


def copies(make: bytes, value: bytes, more: bytes = b"") -> bytes:
    """A pickle that passes one long value to a call a thousand times."""
    call = b"h\x01h\x00" + (b"h\x02\x86R" if more else b"\x85R")
    extra = more + b"q\x02" if more else b""
    return b"\x80\x02" + make + b"q\x01" + value + b"q\x00" + extra + b"](" + call * 3000 + b"e."


NUMBERS = b"".join(b"J" + n.to_bytes(4, "little") for n in range(200_000))
LONG_LIST = b"]q\x00(" + NUMBERS + b"e"
LONG_DICT = b"}q\x00(" + b"".join(NUMBERS[i : i + 5] + b"N" for i in range(0, 10**6, 5)) + b"u"
COPIES = {
    "OrderedDict": copies(b"ccollections\nOrderedDict\n", LONG_DICT),
    "set": copies(b"c__builtin__\nset\n", LONG_LIST),
    "Size": copies(b"ctorch\nSize\n", LONG_LIST),
    "encode": copies(b"c_codecs\nencode\n", text(b"a" * 2_000_000), text(b"latin1")),
}


@pytest.mark.parametrize("kind", COPIES)
def test_calls_of_a_pickle_copy_no_more_than_it_holds(kind: str, tmp_path: Path) -> None:
    path = torch_file(tmp_path / "x.pt", COPIES[kind])
    code = "import sys, ckpt_tools; ckpt_tools.inspect(sys.argv[1])"
    done = limited(code, path, memory=2 * GIB)
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 1 and "MemoryError" not in done.stderr, last
    assert "Error" in done.stderr and "ckpt_tools.errors." in done.stderr


@pytest.mark.slow
def test_tuples_of_floats_that_hash_alike_are_no_keys(tmp_path: Path) -> None:
    pairs = list(alike(3000))
    assert len({hash(pair) for pair in pairs}) == 1
    body = b"".join(
        b"G" + struct.pack(">d", a) + b"G" + struct.pack(">d", b) + b"\x86N" for a, b in pairs
    )
    path = torch_file(tmp_path / "x.pt", b"\x80\x02}(" + body + b"u.")
    with pytest.raises(UnsafePickleError, match="keys of its dicts are tuples"):
        ckpt_tools.inspect(path)


@pytest.mark.parametrize("where", ["body", "listing"])
def test_a_web_server_that_never_stops_sending_fills_no_memory(where: str) -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        if request.method == "HEAD":
            return web.Response(headers={"Content-Length": "5000", "Accept-Ranges": "bytes"})
        response = web.StreamResponse()
        await response.prepare(request)
        for _ in range(4096):
            await response.write(bytes(1 << 20))
        return response

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    code = "import sys, ckpt_tools; ckpt_tools.inspect(sys.argv[1])"
    with serving(app) as url:
        path = f"{url}/model.safetensors" if where == "body" else f"{url}/folder/"
        done = limited(code, path, memory=3 * GIB)
    assert done.returncode == 1 and "MemoryError" not in done.stderr
    assert "ckpt_tools.errors." in done.stderr.splitlines()[-2] + done.stderr.splitlines()[-1]


@pytest.mark.parametrize("token", ["", "<NextContinuationToken>t</NextContinuationToken>"])
def test_a_listing_of_a_bucket_that_does_not_end_is_an_error(token: str) -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        body = (
            '<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><Name>b</Name>'
            f"<Prefix>p/</Prefix><IsTruncated>true</IsTruncated>{token}</ListBucketResult>"
        )
        return web.Response(text=body, content_type="application/xml")

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    with serving(app) as url, pytest.raises(StorageError, match="does not end"):
        ckpt_tools.inspect(
            "s3://b/p/",
            storage_options={"endpoint_url": url, "key": "k", "secret": "s"},
        )


def test_tuples_of_numbers_that_hash_alike_are_no_keys(tmp_path: Path) -> None:
    """-1 and -2 have one hash in Python, and so have all tuples of them."""
    keys = itertools.product((-1, -2), repeat=13)
    items = b"".join(b"(" + b"".join(map(number, key)) + b"tN" for key in keys)
    torch_file(tmp_path / "x.pt", b"\x80\x02}(" + items + b"u.")
    assert "keys of its dicts are tuples" in refused(tmp_path / "x.pt")
    with pytest.raises(UnsafePickleError, match="keys of its dicts are tuples"):
        unpack((tmp_path / "x.pt").read_bytes(), "x", False)


def test_tuples_within_sizes_are_no_keys_either() -> None:
    """A `torch.Size` remembers the tuple of its numbers, and a dict may refer to it."""
    numbers = itertools.product(range(15), repeat=3)
    sizes = [b"h\x02" + b"".join(map(number, n)) + b"\x87\x94\x85\x94R\x94" for n in numbers]
    known = b"\x8c\x05torch\x94\x8c\x04Size\x94\x93\x94"
    head = b"\x80\x04}(\x8c\x01a](" + known + b"".join(sizes) + b"e\x8c\x01b}("
    for first, is_tuple in ((3, True), (4, True), (5, False)):  # the numbers, the arguments, a Size
        seen = b"".join(b"j" + struct.pack("<I", first + 3 * n) + b"N" for n in range(len(sizes)))
        data = head + seen + b"uu."
        if is_tuple:
            with pytest.raises(UnsafePickleError, match="keys of its dicts are tuples"):
                scan(data, "x")
        else:
            scan(data, "x")


@pytest.mark.slow
def test_references_to_tuples_are_no_keys_of_an_object_s_state() -> None:
    pairs = [
        b"G" + struct.pack(">d", a) + b"G" + struct.pack(">d", b) + b"\x86\x94"
        for a, b in alike(3000)
    ]
    known = b"\x8c\x05torch\x94\x8c\x04Size\x94\x93\x94"
    head = b"\x80\x04](" + known + b"".join(pairs)
    for count, is_harmless in ((8, True), (3000, False)):
        seen = b"".join(b"j" + struct.pack("<I", 3 + n) + b"N" for n in range(count))
        data = head + b"h\x02)\x81}(" + seen + b"ube."
        if is_harmless:
            scan(data, "x")
        else:
            with pytest.raises(UnsafePickleError, match="keys of its dicts are tuples"):
                scan(data, "x")


def test_later_opcodes_have_no_place_in_an_early_pickle() -> None:
    size = b"h\x00K\x01K\x02\x86\x94\x85R"
    with pytest.raises(UnsafePickleError, match="of protocol 2 with an opcode of protocol 4"):
        scan(b"\x80\x02ctorch\nSize\nq\x00" + size + b"\x86.", "x")


@pytest.mark.parametrize("build", [b"Nb", b"N}\x86b"], ids=["None", "None and no slots"])
def test_a_build_that_does_nothing_hides_no_tuple(build: bytes, tmp_path: Path) -> None:
    keys = itertools.product((-1, -2), repeat=12)
    items = b"".join(b"(" + b"".join(map(number, key)) + b"t" + build + b"N" for key in keys)
    torch_file(tmp_path / "x.pt", b"\x80\x02}(" + items + b"u.")
    assert "keys of its dicts are tuples" in refused(tmp_path / "x.pt")


def test_a_mesh_of_a_million_ranks_costs_nothing(tmp_path: Path) -> None:
    def built(module: str, name: str, state: bytes) -> bytes:
        return f"c{module}\n{name}\n".encode() + b")R" + state + b"b"

    axes = b"(" + number(1024) * 2 + b"t"
    layout = built("torch.distributed._mesh_layout", "_MeshLayout", entries({"shape": axes}))
    mesh = built("torch.distributed.device_mesh", "DeviceMesh", entries({"_layout": layout}))
    shard = built("torch.distributed.tensor.placement_types", "Shard", entries({"dim": number(0)}))
    spec = built(
        "torch.distributed.tensor._dtensor_spec",
        "DTensorSpec",
        entries({"mesh": mesh, "placements": b"(" + shard * 2 + b"t"}),
    )
    part = (
        b"ctorch._tensor\n_rebuild_from_type_v2\n(ctorch._utils\n_rebuild_wrapper_subclass\n"
        b"ctorch.distributed.tensor\nDTensor\n(Nctorch\nfloat32\n("
        + (number(1 << 20) + b"tt" + entries({"_spec": spec, "_local_tensor": tensor(1, (1,))}))
        + b"tR"
    )
    (tmp_path / "v").mkdir()
    data = b"\x80\x02" + entries({f"w{i}": part for i in range(40)}) + b"."
    torch_file(tmp_path / "v" / "rank_0.pt", data, **{"0": bytes(4)})
    refused(tmp_path / "v", seconds=20)


def test_a_tensor_that_repeats_its_bytes_for_days_is_refused(tmp_path: Path) -> None:
    data = b"\x80\x02" + entries({"w": tensor(4, (1 << 40,), (0,))}) + b"."
    torch_file(tmp_path / "x.pt", data, **{"0": bytes(16)})
    assert "repeats its elements too often" in refused(tmp_path / "x.pt")
    torch.save({"w": torch.ones(1).expand(1 << 20)}, tmp_path / "y.pt")
    assert ckpt_tools.inspect(tmp_path / "y.pt").total.num_tensors == 1


@pytest.mark.parametrize("num_dims", [900, 3000])
def test_shapes_of_very_many_dims_end_in_no_recursion(num_dims: int) -> None:
    shape = (*(1,) * num_dims, 6)
    assert [b.sizes[-1] for b in flat_range_boxes(shape, 1, 5)] == [4]
    found = list(bands(whole(shape), 2))
    assert [b.offsets[-1] for b in found] == [0, 2, 4] and all(
        len(b.sizes) == len(shape) for b in found
    )


@pytest.mark.slow
def test_long_strings_of_a_gguf_file_are_not_kept(tmp_path: Path) -> None:
    count, size = 3000, 1 << 20
    with (tmp_path / "b.gguf").open("wb") as out:
        out.write(b"GGUF" + struct.pack("<IQQ", 3, 0, count))
        for index in range(count):
            key = b"k%d" % index
            out.write(struct.pack("<Q", len(key)) + key + struct.pack("<IQ", 8, size))
            out.seek(size, 1)
        out.write(b"\0")
    done = limited(
        "import sys, ckpt_tools; ckpt_tools.inspect(sys.argv[1])",
        tmp_path / "b.gguf",
        memory=2 * GIB,
    )
    assert done.returncode == 0, done.stderr[-500:]


def test_a_shared_dict_in_deepspeed_s_states_is_refused(tmp_path: Path) -> None:
    """Twenty dicts that each hold the one before twice are a million entries."""
    body = number(1)
    for depth in range(20):
        again = b"h" + bytes([depth - 1]) if depth else number(1)
        body = b"}q" + bytes([depth]) + b"(" + text(b"a") + body + text(b"b") + again + b"u"
    shapes = b"](" + entries({"w": b"ctorch\nSize\n(" + number(4) + b"t\x85R"}) + b"e"
    fields = {"module": entries({"w": tensor(4, (4,))}), "param_shapes": shapes, "x": body}
    data = b"\x80\x02" + entries(fields) + b"."
    torch_file(tmp_path / "mp_rank_00_model_states.pt", data, **{"0": bytes(16)})
    group = b"](" + tensor(4, (4,)) + b"e"
    state = {
        "zero_stage": number(2),
        "partition_count": number(1),
        "single_partition_of_fp32_groups": group,
        "group_paddings": b"](" + number(0) + b"e",
        "base_optimizer_state": entries({"state": b"}", "param_groups": b"]"}),
    }
    data = b"\x80\x02" + entries({"optimizer_state_dict": entries(state)}) + b"."
    name = "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    torch_file(tmp_path / name, data, **{"0": bytes(16)})
    refused(tmp_path, seconds=30)
