"""Checkpoints that lie: every verb refuses them with a line that names the lie, opens nothing
outside, and leaves nothing behind.
"""

from __future__ import annotations

import os
import pickle
import resource
import shutil
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import ckpt_tools
from ckpt_tools import CheckpointError, UnsafePickleError
from ckpt_tools.formats.dcp import metadata as dcp_metadata
from tests.command import run_ckpt

Change = Callable[[Any], object]


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("honest") / "c"
    dcp.save(
        {"model": {"w": torch.arange(600.0).reshape(20, 30), "v": torch.ones(50)}, "step": 3},
        checkpoint_id=path,
        no_dist=True,
    )
    return path


def places(meta: Any) -> dict[str, Any]:
    return {index.fqn: info for index, info in meta.storage_data.items()}


def tensor(meta: Any) -> Any:
    return meta.state_dict_metadata["model.w"]


def place(**fields: object) -> Change:
    def change(meta: Any) -> None:
        for name, value in fields.items():
            setattr(places(meta)["model.w"], name, value)

    return change


def chunk(**fields: tuple[int, ...]) -> Change:
    def change(meta: Any) -> None:
        for name, value in fields.items():
            setattr(tensor(meta).chunks[0], name, torch.Size(value))
        index = next(i for i in meta.storage_data if i.fqn == "model.w")
        info = meta.storage_data.pop(index)
        meta.storage_data[index.__class__("model.w", tensor(meta).chunks[0].offsets)] = info

    return change


def shape(size: tuple[int, ...]) -> Change:
    return lambda meta: setattr(tensor(meta), "size", size)


def twice(meta: Any) -> None:
    other = pickle.loads(pickle.dumps(tensor(meta).chunks[0]))
    other.offsets = torch.Size((5, 0))
    tensor(meta).chunks.append(other)
    index = next(i for i in meta.storage_data if i.fqn == "model.w")
    meta.storage_data[
        pickle.loads(pickle.dumps(index)).__class__("model.w", torch.Size((5, 0)))
    ] = places(meta)["model.w"]


def dtype(meta: Any) -> None:
    tensor(meta).properties.dtype = torch.float16


def giant(meta: Any) -> None:
    shape((1 << 40, 1 << 20))(meta)
    chunk(sizes=(1 << 40, 1 << 20))(meta)


def same_place(meta: Any) -> None:
    places(meta)["model.v"].offset = places(meta)["model.w"].offset + 8


LIES: dict[str, tuple[Change, str]] = {
    "up": (place(relative_path="../secret"), "outside the checkpoint"),
    "absolute": (place(relative_path="/etc/passwd"), "outside the checkpoint"),
    "url": (place(relative_path="s3://bucket/x"), "outside the checkpoint|missing"),
    "backslash": (place(relative_path="..\\secret"), "outside the checkpoint"),
    "nul": (place(relative_path="a\0b"), "outside the checkpoint"),
    "long": (place(relative_path="x" * 10_000), "outside the checkpoint"),
    "newline": (place(relative_path="a\nb"), "missing"),
    "escape": (place(relative_path="\x1b]0;pwn\x07"), "missing"),
    "negative": (place(offset=-5), "outside its file"),
    "past the end": (place(offset=10**9), "outside its file"),
    "beyond 63 bits": (place(offset=1 << 63), "62 bits"),
    "length": (place(length=-1), "outside its file"),
    "shared bytes": (same_place, "share bytes"),
    "hole": (chunk(sizes=(7, 30)), "leave a hole"),
    "too far": (chunk(offsets=(3, 0)), "exceeds its tensor"),
    "negative offset": (chunk(offsets=(-1, 0)), "exceeds its tensor"),
    "overlap": (twice, "exceeds its tensor|overlap"),
    "dims": (chunk(offsets=(0,), sizes=(600,)), "number of dims"),
    "negative shape": (shape((-20, 30)), "negative size"),
    "other type": (dtype, "not what the index says"),
    "giant": (giant, "claims 4611686018427387904 bytes, but its item has"),
    "string for a number": (place(offset="0"), "expected an int"),
}


@pytest.mark.parametrize("name", LIES)
def test_metadata_that_lies_is_refused_by_every_verb(
    name: str, honest: Path, tmp_path: Path
) -> None:
    change, message = LIES[name]
    path = tmp_path / "run" / "c"
    shutil.copytree(honest, path)
    (tmp_path / "run" / "secret").write_bytes(b"secret" * 9000)
    meta = pickle.loads((path / ".metadata").read_bytes())
    change(meta)
    (path / ".metadata").write_bytes(pickle.dumps(meta))
    verbs: list[Callable[[], object]] = [
        lambda: ckpt_tools.merge(path, tmp_path / "m.safetensors"),
        lambda: ckpt_tools.reshard(path, tmp_path / "r", to_ranks=2),
        lambda: ckpt_tools.diff(honest, path, read_all=True),
        lambda: ckpt_tools.diff(path, honest, read_all=True),
        lambda: ckpt_tools.seal(path),
    ]
    # another shape is a difference, and nothing is read
    for verb in verbs if name != "giant" else (verbs[0], verbs[1], verbs[-1]):
        with pytest.raises(CheckpointError, match=message if verb is not verbs[-1] else None):
            verb()
    try:
        assert ckpt_tools.verify(path, deep=name != "other type").problems or name == "other type"
    except CheckpointError:
        pass
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run"] and sorted(
        p.name for p in path.iterdir()
    ) == [".metadata", "__0_0.distcp"]
    # KiB: nobody believed a giant
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 8 << 20
    done = run_ckpt("merge", path, tmp_path / "m.safetensors")
    assert (
        done.returncode in (11, 12, 14, 15)
        and "Traceback" not in done.stderr
        and "\x1b]0" not in done.stderr
    ), done.stderr


@pytest.mark.parametrize("kind", ["fifo", "device", "link", "directory"])
def test_what_is_no_plain_file_is_not_opened(kind: str, honest: Path, tmp_path: Path) -> None:
    path = tmp_path / "c"
    shutil.copytree(honest, path)
    shard = path / "__0_0.distcp"
    size = shard.stat().st_size
    shard.unlink()
    if kind == "fifo":
        os.mkfifo(shard)
    elif kind == "device":
        if os.geteuid():
            pytest.skip("only root makes devices")
        os.mknod(shard, 0o600 | 0o020000, os.makedev(1, 5))  # as /dev/zero
    elif kind == "link":
        (tmp_path / "secret").write_bytes(bytes(size))
        shard.symlink_to(tmp_path / "secret")
    else:
        shard.mkdir()
    for words in (
        ("inspect", path),
        ("merge", path, tmp_path / "m.safetensors"),
        ("verify", path),
        ("copy", path, tmp_path / "d"),
    ):
        done = run_ckpt(*words)
        assert done.returncode in (11, 12, 14, 15) and "Traceback" not in done.stderr, (
            words,
            done.stdout,
            done.stderr,
        )
    assert not (tmp_path / "m.safetensors").exists() and not (tmp_path / "d").exists()


def test_a_destination_that_became_a_link_is_not_followed(honest: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "mine").write_text("mine")
    (tmp_path / "out").symlink_to(tmp_path / "elsewhere")
    for more in ([], ["--overwrite"]):
        done = run_ckpt("reshard", honest, tmp_path / "out", "--to", 2, *more)
        assert done.returncode == 15, done.stderr
    assert [p.name for p in (tmp_path / "elsewhere").iterdir()] == ["mine"]


def archive(path: Path) -> tuple[bytes, int, int]:
    """Returns the data file, and where the archive of `model.w` lies in it."""
    meta = pickle.loads((path / ".metadata").read_bytes())
    info = places(meta)["model.w"]
    return (path / "__0_0.distcp").read_bytes(), info.offset, info.length


@pytest.mark.parametrize("kind", ["other local name", "deflated", "sizes"])
def test_a_zip_that_says_two_things_is_refused(kind: str, honest: Path, tmp_path: Path) -> None:
    path = tmp_path / "c"
    shutil.copytree(honest, path)
    data, start, nbytes = archive(path)
    item = bytearray(data[start : start + nbytes])
    entry = item.rindex(b"PK\x01\x02", 0, item.rindex(b"archive/data/0"))
    (local,) = struct.unpack_from("<I", item, entry + 42)
    if kind == "other local name":
        item[local + 30 : local + 44] = b"archive/data/9"
    elif kind == "deflated":
        struct.pack_into("<H", item, entry + 10, zipfile.ZIP_DEFLATED)
        struct.pack_into("<H", item, local + 8, zipfile.ZIP_DEFLATED)
    else:
        struct.pack_into("<I", item, entry + 24, 1 << 30)
    (path / "__0_0.distcp").write_bytes(data[:start] + bytes(item) + data[start + nbytes :])
    assert [p.fqn for p in ckpt_tools.verify(path).problems] == ["model.w"]
    # torch reads it, and so do we: the bytes are those that the directory means
    if kind != "other local name":
        with pytest.raises(CheckpointError):
            ckpt_tools.merge(path, tmp_path / "m.safetensors")
    assert not (tmp_path / "m.safetensors").exists() or kind == "other local name"


# what others' scanners were led past with, and what a checkpoint has no use for
GLOBALS = """os.system posix.system nt.system subprocess.Popen subprocess.check_output builtins.eval builtins.exec builtins.compile builtins.open
builtins.getattr builtins.__import__ builtins.globals builtins.bytearray importlib.import_module runpy._run_code runpy.run_path pydoc.locate pydoc.pipepager
pkgutil.resolve_name operator.attrgetter operator.methodcaller functools.partial functools.reduce timeit.timeit timeit.main cProfile.run cProfile.runctx
profile.Profile pdb.run bdb.Bdb trace.Trace doctest.debug_script code.InteractiveInterpreter codeop.compile_command idlelib.pyshell.ModifiedInterpreter
idlelib.autocomplete.AutoComplete lib2to3.pgen2.grammar.Grammar ctypes.CDLL ctypes.util._findLib_gcc shutil.rmtree shutil.copy pathlib.Path.write_text
socket.create_connection asyncio.unix_events._UnixSubprocessTransport multiprocessing.util.spawnv_passfds pty.spawn webbrowser.open smtplib.SMTP urllib.request.urlopen
http.client.HTTPSConnection zipimport.zipimporter pickle.loads _pickle.loads dill.loads joblib.load torch.load torch.hub.load torch.jit.load torch.storage._load_from_bytes
torch.utils.collect_env.run torch._dynamo.guards.GuardBuilder torch.fx.experimental.symbolic_shapes.ShapeEnv numpy.load numpy.testing._private.utils.runstring
numpy.f2py.crackfortran.getlincoef types.CodeType types.FunctionType distutils.file_util.write_file venv.create ensurepip._run_pip logging.config._resolve
tensorflow.io.read_file keras.utils.get_file sys.modules collections.OrderedDict.fromkeys torch.Size.__reduce__ torch.distributed.checkpoint.metadata.dataclass""".split()


def asks(name: str, how: str) -> bytes:
    """A pickle that asks for a global in one of the ways that there are."""
    module, _, attribute = name.rpartition(".")
    if how == "global":
        return f"c{module}\n{attribute}\n".encode()
    texts = [b"\x8c" + bytes([len(t)]) + t.encode() for t in (module, attribute)]
    if how == "by memo":
        return b"".join(t + b"\x94" for t in texts) + b"]\x94h\x00h\x01\x93"
    if how == "dotted":
        top, _, rest = name.partition(".")
        texts = [b"\x8c" + bytes([len(t)]) + t.encode() for t in (top, rest)]
    return b"".join(texts) + b"\x93"


@pytest.mark.parametrize("how", ["global", "by name", "by memo", "dotted"])
@pytest.mark.parametrize("name", GLOBALS)
def test_no_global_gets_past_the_list(name: str, how: str) -> None:
    protocol = 2 if how == "global" else 4
    for rest in (
        b")R.",
        b"\x8c\x04exit\x85R." if protocol == 4 else b"X\x04\x00\x00\x00exit\x85R.",
        b")\x81}b.",
        b".",
    ):
        with pytest.raises(UnsafePickleError, match="refused a pickle: it asks for"):
            dcp_metadata.parse_metadata(
                b"\x80" + bytes([protocol]) + asks(name, how) + rest, "test"
            )
