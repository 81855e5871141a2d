"""Attacks, each as it was once carried out: what a hostile file, directory, server or environment
may do, and what comes of it.
"""

from __future__ import annotations

import collections
import io
import itertools
import json
import lzma
import os
import pickle
import resource
import struct
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from aiohttp import web
from safetensors.torch import save_file

import ckpt_tools
from ckpt_tools import (
    CheckpointError,
    CheckpointManager,
    FormatError,
    PlanError,
    StorageError,
    UnsafePickleError,
)
from ckpt_tools.core.box import bands, flat_range_boxes, whole
from ckpt_tools.errors import printable, redacted
from ckpt_tools.formats import torch_save
from ckpt_tools.formats.deepspeed import zero as deepspeed
from ckpt_tools.formats.pickle import plain_values
from ckpt_tools.formats.pickle import state as state_pickle
from ckpt_tools.formats.pickle import write as pickle_write
from ckpt_tools.loop.archives import pack, unpack
from ckpt_tools.publish.destinations import open_root
from ckpt_tools.publish.steps import list_steps
from ckpt_tools.publish.superseded import RollbackNote
from ckpt_tools.storage import LocalStore, RemoteStore, read
from ckpt_tools.storage.base import check_path
from tests.servers.faults import serving

Run = Callable[..., subprocess.CompletedProcess[str]]
GIB = 1 << 30


def limited(
    code: str, *words: object, seconds: int = 60, memory: int = 3 * GIB, **more: Any
) -> subprocess.CompletedProcess[str]:
    """Runs code in a process of its own, with bounds on memory and time."""

    def bound() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))

    command = [sys.executable, "-c", code, *map(str, words)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=seconds,
        preexec_fn=bound,
        env=environment,
        **more,
    )


def torch_file(path: Path, data: bytes, **records: bytes) -> Path:
    """A torch.save file with a pickle of one's own."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", data)
        archive.writestr("archive/version", b"3\n")
        for name, content in records.items():
            archive.writestr(f"archive/data/{name}", content)
    return path


# ---- code from the working directory, code from the checkpoint -----------------------------------

EVIL = "import os; open(os.environ['PROOF'], 'a').write(__name__); raise SystemExit(0)\n"
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 16,
}


def test_modules_in_the_working_directory_are_not_imported(tmp_path: Path) -> None:
    work, proof = tmp_path / "work", tmp_path / "proof"
    work.mkdir()
    for name in ("torch", "transformers", "json", "numpy", "safetensors"):
        (work / f"{name}.py").write_text(EVIL)
    (work / "config.json").write_text(json.dumps(LLAMA))
    torch.save({"model": {"w": torch.ones(2)}}, tmp_path / "s.pt")
    ckpt = Path(sys.executable).with_name("ckpt")
    environment = os.environ | {"PROOF": str(proof), "PYTHONPATH": ""}
    for words in (
        ["inspect", str(tmp_path / "s.pt"), "--shapes", "."],
        ["convert", str(tmp_path / "s.pt"), "out", "--to", "hf", "--base", ".", "--check"],
    ):
        subprocess.run([ckpt, *words], cwd=work, env=environment, capture_output=True, timeout=120)
        subprocess.run(
            [sys.executable, "-P", "-m", "ckpt_tools", *words],
            cwd=work,
            env=environment,
            capture_output=True,
            timeout=120,
        )
    assert not proof.exists()


def test_python_m_imports_nothing_of_ours_from_the_working_directory(tmp_path: Path) -> None:
    """What Python itself needs to find the package is looked for there; nothing that the package
    imports is.
    """
    for name in ("torch", "numpy", "safetensors", "fsspec"):
        (tmp_path / f"{name}.py").write_text(EVIL)
    save_file({"w": torch.ones(2)}, tmp_path / "m.safetensors")
    environment = os.environ | {"PROOF": str(tmp_path / "proof"), "PYTHONPATH": ""}
    done = subprocess.run(
        [sys.executable, "-m", "ckpt_tools", "inspect", "m.safetensors"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        timeout=60,
    )
    assert done.returncode == 0 and not (tmp_path / "proof").exists(), done.stderr


@pytest.mark.parametrize(
    ("names", "flag"),
    [
        (["Evil"], "--check"),
        (["pipeline"], "--shapes"),
        (["os.system"], "--check"),
        ([{}], "--shapes"),
        ("AutoModel", "--check"),
        (["__builtins__"], "--shapes"),
    ],
)
def test_a_config_s_own_code_is_not_run_whoever_answers(
    flag: str, names: Any, tmp_path: Path
) -> None:
    base, proof = tmp_path / "base", tmp_path / "proof"
    base.mkdir()
    (base / "evil.py").write_text(EVIL)
    config = {
        **LLAMA,
        "architectures": names,
        "auto_map": {
            "AutoConfig": "evil.Config",
            "AutoModel": "evil.Model",
            "AutoModelForCausalLM": "evil.Model",
        },
    }
    config |= {"model_type": "evil"} if names != "AutoModel" else {}
    (base / "config.json").write_text(json.dumps(config))
    torch.save({"model": {"w": torch.ones(2)}}, tmp_path / "s.pt")
    ckpt = Path(sys.executable).with_name("ckpt")
    words = (
        ["convert", "s.pt", "out", "--to", "hf", "--base", "base", "--check"]
        if flag == "--check"
        else ["inspect", "s.pt", "--shapes", "base"]
    )
    done = subprocess.run(
        [ckpt, *words],
        cwd=tmp_path,
        env=os.environ | {"PROOF": str(proof)},
        input="y\n" * 50,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert not proof.exists() and "Traceback" not in done.stderr
    assert done.returncode in (13, 14) or names == "AutoModel", done.stderr


# ---- a pickle that changes its reader ------------------------------------------------------------


def snapshot() -> str:
    """What the modules that read pickles have, functions with all that can be set on them."""
    found = []
    for module in (state_pickle, plain_values, torch_save, deepspeed, pickle_write):
        for name, value in sorted(vars(module).items()):
            if callable(value):
                about = [
                    repr(getattr(value, key, None))
                    for key in ("__kwdefaults__", "__defaults__", "__dict__")
                    if not isinstance(value, type)
                ]
                found.append(
                    f"{module.__name__}.{name} {about}"
                    f" {sorted(vars(value)) if isinstance(value, type) else ''}"
                )
    return "\n".join(found)


GLOBALS = [
    ("torch._utils", "_rebuild_tensor_v2"),
    ("torch._utils", "_rebuild_tensor_v3"),
    ("torch._utils", "_rebuild_parameter"),
    ("_codecs", "encode"),
    ("torch._tensor", "_rebuild_from_type_v2"),
    ("builtins", "set"),
    ("builtins", "bytearray"),
    ("builtins", "complex"),
    ("builtins", "getattr"),
    ("collections", "OrderedDict"),
    ("collections", "Counter"),
    ("torch", "float32"),
    ("torch", "FloatStorage"),
    ("torch", "device"),
    ("torch", "Size"),
    ("numpy", "dtype"),
    ("numpy.core.multiarray", "scalar"),
    ("torch._utils", "_rebuild_qtensor"),
    ("posix", "system"),
]


@pytest.mark.parametrize(
    "state",
    [
        {"x": 1},
        (None, {"__kwdefaults__": {"dtype": 3}}),
        (None, {"__defaults__": (1,)}),
        ({"__wrapped__": 1}, {"function": 3}),
        [1],
        ["float64"] * 5,
    ],
)
@pytest.mark.parametrize("name", GLOBALS)
def test_a_read_leaves_no_trace_in_the_process(
    name: tuple[str, str], state: Any, tmp_path: Path
) -> None:
    before = snapshot()
    data = (
        b"\x80\x02"
        b"}X\x01\x00\x00\x00a"
        + f"c{name[0]}\n{name[1]}\n".encode()
        + pickle_write.opcodes(state)
        + b"bs."
    )
    torch_file(tmp_path / "evil.pt", data)
    with _whatever():
        ckpt_tools.inspect(tmp_path / "evil.pt")
    assert snapshot() == before
    torch.save({"w": torch.arange(3.0)}, tmp_path / "honest.pt")
    ckpt_tools.merge(
        tmp_path / "honest.pt", tmp_path / f"{abs(hash((name, str(state))))}.safetensors"
    )
    assert ckpt_tools.inspect(tmp_path / "honest.pt").by_dtype.keys() == {"float32"}


class _whatever:
    """An error of ours, or none; never another one."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        return isinstance(error, CheckpointError)


# ---- outside the checkpoint ----------------------------------------------------------------------


@pytest.mark.parametrize("what", ["link", "device", "pipe", "giant"])
def test_side_files_are_regular_small_and_inside(what: str, tmp_path: Path, ckpt: Run) -> None:
    base = tmp_path / "base"
    base.mkdir()
    (base / "config.json").write_text("{}")
    (tmp_path / "id_rsa").write_text("PRIVATE")
    target = base / "tokenizer.json"
    if what == "link":
        target.symlink_to(tmp_path / "id_rsa")
    elif what == "device":
        target.symlink_to("/dev/zero")
    elif what == "pipe":
        os.mkfifo(target)
    else:
        target.write_bytes(b"x")
        os.truncate(target, 300 << 20)
    torch.save({"model": {"w": torch.ones(2)}}, tmp_path / "s.pt")
    done = ckpt("convert", "s.pt", "out", "--to", "hf", "--base", "base", cwd=tmp_path)
    assert (
        done.returncode == 13 and "tokenizer.json" in done.stderr and "Traceback" not in done.stderr
    )
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", ["zero", "pipe", "deep", "giant", "folder", "half"])
@pytest.mark.parametrize("option", ["--shapes", "--map", "--param-order", "--base"])
def test_named_files_of_any_kind_are_one_line(
    option: str, kind: str, tmp_path: Path, ckpt: Run
) -> None:
    path = tmp_path / ("config.json" if option == "--base" else "f.json")
    if kind == "zero":
        path.symlink_to("/dev/zero")
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "giant":
        path.write_bytes(b"[")
        os.truncate(path, 1 << 40)
    else:
        path.write_text("[" * 200_000 if kind == "deep" else '{"a": "\\ud800"}')
    torch.save(
        {
            "model": {"w": torch.ones(2)},
            "optimizer": {"state": {}, "param_groups": [{"params": [0]}]},
        },
        tmp_path / "s.pt",
    )
    value = str(tmp_path) if option == "--base" else str(path)
    to = "hf" if option == "--base" else "dcp"
    done = ckpt("convert", tmp_path / "s.pt", tmp_path / "out", "--to", to, option, value)
    assert done.returncode == 13 or (
        kind in ("half", "deep") and option in ("--base", "--shapes")
    ), done.stderr
    assert "Traceback" not in done.stderr and len(done.stderr) < 2000


@pytest.mark.parametrize(
    "name", ["%2e%2e/secret.distcp", "a?b.distcp", "a#b.distcp", "%2e%2e%2fsecret.distcp"]
)
def test_a_name_with_codes_does_not_leave_a_web_server_s_folder(name: str, tmp_path: Path) -> None:
    dcp.save({"w": torch.ones(300)}, checkpoint_id=tmp_path / "c", no_dist=True)
    metadata = pickle.loads((tmp_path / "c" / ".metadata").read_bytes())
    for info in metadata.storage_data.values():
        info.relative_path = name
    (tmp_path / "c" / ".metadata").write_bytes(pickle.dumps(metadata))
    asked: list[str] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        asked.append(request.raw_path)
        if request.path == "/c/":
            return web.Response(text='<a href=".metadata">x</a>', content_type="text/html")
        if request.path == "/c/.metadata":
            return web.Response(body=(tmp_path / "c" / ".metadata").read_bytes())
        return web.Response(status=404)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    with serving(app) as url, pytest.raises(CheckpointError):
        ckpt_tools.verify(f"{url}/c/")
    assert asked and not [
        path for path in asked if "secret" in path or "?b" in path or path.endswith("/a")
    ]


def test_a_file_that_is_swapped_for_a_link_while_it_is_opened_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "c").mkdir()
    (tmp_path / "secret").write_bytes(b"SECRET")
    path, inside, outside = tmp_path / "c" / "f", tmp_path / "c" / "in", tmp_path / "c" / "out"
    inside.write_bytes(b"public")
    path.write_bytes(b"public")
    stop = threading.Event()

    def swap() -> None:
        while not stop.is_set():
            outside.symlink_to(tmp_path / "secret")
            os.replace(outside, path)
            inside.write_bytes(b"public")
            os.replace(inside, path)

    thread = threading.Thread(target=swap)
    thread.start()
    seen: collections.Counter[str] = collections.Counter()
    try:
        deadline = time.monotonic() + 4
        while time.monotonic() < deadline:
            store = LocalStore(tmp_path / "c")
            try:
                seen[read(store, "f", 0, 6).decode()] += 1
            except StorageError as error:
                seen["replaced by a link" if "replaced by a link" in str(error) else "refused"] += 1
            finally:
                store.close()
    finally:
        stop.set()
        thread.join()
    assert (
        "SECRET" not in seen and seen["public"] and seen["refused"] + seen["replaced by a link"]
    ), seen


@pytest.mark.parametrize("what", ["hard link", "pipe", "folder", "link"])
def test_the_lock_of_a_run_is_a_file_of_its_own(what: str, tmp_path: Path) -> None:
    victim, lock = tmp_path / "victim", tmp_path / "run" / ".ckpt.lock"
    victim.write_bytes(b"years of work")
    lock.parent.mkdir()
    {
        "hard link": lambda: os.link(victim, lock),
        "pipe": lambda: os.mkfifo(lock),
        "folder": lock.mkdir,
        "link": lambda: lock.symlink_to(victim),
    }[what]()
    with pytest.raises(StorageError, match=r"lock of a run is not used|cannot create"):
        CheckpointManager(tmp_path / "run")
    assert victim.read_bytes() == b"years of work"


# ---- secrets -------------------------------------------------------------------------------------

SIGNED = "X-Amz-Signature=5ecret1&X-Amz-Credential=AKIA5ecret2&sig=5ecret3"


def test_secrets_of_urls_are_nowhere(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(3)}, tmp_path / "m.pt")
    save_file({"w": torch.ones(3)}, tmp_path / "m.safetensors")

    async def answer(request: web.Request) -> web.StreamResponse:
        path = tmp_path / request.path.lstrip("/")
        return web.FileResponse(path) if path.is_file() else web.Response(status=404)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    with serving(app) as url:
        signed = f"{url.replace('://', '://user:5ecret0@')}/m.safetensors?{SIGNED}"
        ckpt = Path(sys.executable).with_name("ckpt")
        for words in (
            ["merge", signed, "out.safetensors", "--json"],
            ["convert", signed, "out", "--to", "dcp", "--json"],
            ["copy", signed, "c.safetensors", "--json"],
            ["inspect", signed],
            ["inspect", signed, "--json"],
            ["verify", signed],
            ["merge", signed.replace("m.", "no."), "x.safetensors"],
            ["merge", f"s3://user:5ecret4@bucket/x?{SIGNED}", "x.safetensors"],
            ["diff", signed, signed, "--json"],
        ):
            done = subprocess.run(
                [ckpt, *words], cwd=tmp_path, capture_output=True, text=True, timeout=120
            )
            assert "5ecret" not in done.stdout + done.stderr, (words, done.stdout, done.stderr)
        assert done.returncode == 0, done.stderr
    for path in tmp_path.rglob("*.json"):
        assert b"5ecret" not in path.read_bytes(), path
    assert list(tmp_path.glob("out.safetensors.ckpt.manifest*"))


def test_logs_have_no_secrets(caplog: pytest.LogCaptureFixture) -> None:
    from ckpt_tools.core.logs import log

    log.warning("%s: %s", f"https://me:5ecret@host/x?{SIGNED}", "why")
    assert "5ecret" not in caplog.text and "host/x" in caplog.text
    assert redacted("s3://bucket/a@b/c?x=1") == "s3://bucket/a@b/c?x=***"


# ---- memory and time -----------------------------------------------------------------------------


def objects() -> Iterator[tuple[str, bytes]]:
    yield "bytearray", b"\x80\x02cbuiltins\nbytearray\n" + pickle_write.opcodes((5 << 30,)) + b"R."
    yield "storage", b"\x80\x02ctorch\nUntypedStorage\n" + pickle_write.opcodes((5 << 30,)) + b"R."
    yield "set", b"\x80\x02c__builtin__\nbytearray\n" + pickle_write.opcodes((1 << 40,)) + b"R."


@pytest.mark.parametrize(("kind", "data"), list(objects()))
def test_an_object_does_not_allocate_more_than_it_has(
    kind: str, data: bytes, tmp_path: Path
) -> None:
    torch_file(tmp_path / "o.pt", data)
    code = (
        "import sys; from pathlib import Path; from ckpt_tools.loop.archives import unpack;"
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
    for size, message in ((1 << 40, "repeats its elements too often"), (1 << 30, "far larger")):
        buffer = io.BytesIO()
        torch.save({"t": torch.ones(1).expand(size)}, buffer)
        with pytest.raises(FormatError, match=message):
            unpack(buffer.getvalue(), "o", False)


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
        ckpt_tools.verify(tmp_path / "s.pt")
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


def test_names_and_numbers_that_are_none_are_one_line(tmp_path: Path, ckpt: Run) -> None:
    torch.save({"a\ud800b": torch.ones(2)}, tmp_path / "s.pt")
    for words in (
        ["inspect", "s.pt"],
        ["merge", "s.pt", "m.safetensors"],
        ["verify", "s.pt"],
        ["convert", "s.pt", "d", "--to", "dcp"],
    ):
        done = ckpt(*words, cwd=tmp_path)
        assert (
            done.returncode == 11
            and "Traceback" not in done.stderr
            and "is not valid" in done.stderr
        ), done.stderr
    header = (
        "{'descr': '<f4', 'fortran_order': False, 'shape': (3, 100000000000000000000), }".ljust(118)
        + "\n"
    )
    array = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode() + bytes(12)
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("x.npy", array)
    done = ckpt("inspect", "a.npz", cwd=tmp_path)
    assert done.returncode == 11 and "impossible shape" in done.stderr, done.stdout
    (tmp_path / "run" / "step-１２").mkdir(parents=True)
    assert ckpt("ls", "run", cwd=tmp_path).stdout.startswith("no steps")


# ---- what reaches a terminal ---------------------------------------------------------------------

UNSEEN = "\x1b\x07\x9b\n\r\u061c\u2060\u206a\u00ad\u180e\u034f\u3164\U000e0041\u202e\u2066\ufeff\u200b\ufe0f\u115f\ufff9"


def test_nothing_that_controls_or_hides_is_printable() -> None:
    import unicodedata

    shown = printable(f"a{UNSEEN}b")
    assert shown.isascii() and shown.startswith("a\\x1b\\x07\\x9b\\n\\r\\u061c")
    for code in range(0x110000):
        if unicodedata.category(chr(code)) in ("Cf", "Cc", "Cs", "Zl", "Zp"):
            assert printable(chr(code)).isascii() and len(printable(chr(code))) > 1, hex(code)


def test_text_of_a_checkpoint_never_reaches_the_terminal_raw(tmp_path: Path, ckpt: Run) -> None:
    name = f"evil{UNSEEN}"
    torch.save(
        {"model": {name: torch.ones(3), "w": torch.ones(2)}, name: 3, "optimizer": {name: 4}},
        tmp_path / "s.pt",
    )
    torch.save(
        {"model": {name: torch.zeros(3), "w": torch.ones(2)}, f"other{UNSEEN}": 3},
        tmp_path / "t.pt",
    )
    root = tmp_path / "run"
    with CheckpointManager(root) as checkpoints:
        checkpoints.save(1, {"w": torch.ones(3)}, asynchronous=False)
    (path,) = (root / "step-00000001").glob("ckpt.manifest*")
    manifest = ckpt_tools.publish.manifest.parse_manifest(path.read_bytes(), "m")
    fields = {f: getattr(manifest, f) for f in manifest.__slots__}
    path.write_bytes(
        ckpt_tools.publish.manifest.Manifest(
            **fields | {"created": f"now{UNSEEN}", "tool": UNSEEN}
        ).render()
    )
    (root / f"step-00000001.superseded{UNSEEN.replace(chr(10), '')}").mkdir()
    (root / f"other{UNSEEN}".replace("\n", "x")).write_text("x")
    verbs = [
        ["inspect", "s.pt"],
        ["inspect", "s.pt", "--tree"],
        ["inspect", "s.pt", "--ranks"],
        ["merge", "s.pt", "m.safetensors"],
        ["verify", "s.pt"],
        ["verify", "s.pt", "--deep"],
        ["diff", "s.pt", "t.pt"],
        ["merge", "s.pt", "n.safetensors", "--select", "zz"],
        ["convert", "s.pt", "d", "--to", "dcp"],
        ["convert", "s.pt", "u.pt", "--to", "torch"],
        ["reshard", "s.pt", "r", "--to", "2"],
        ["salvage", "s.pt", "g"],
        ["seal", "s.pt"],
        ["ls", "run"],
        ["latest", "run", "--verify"],
        ["prune", "run", "--keep-last", "1"],
        ["inspect", "run"],
        ["merge", "s.pt", f"x{UNSEEN}.pt".replace("\n", "")],
    ]
    for words in verbs:
        done = ckpt(*words, cwd=tmp_path)
        assert "Traceback" not in done.stderr, (words, done.stderr)
        text = done.stdout + done.stderr
        assert not [c for c in UNSEEN.replace("\n", "") if c in text], (words, text)


# ---- manifests -----------------------------------------------------------------------------------


def test_a_manifest_of_an_older_kind_vouches_for_nothing(tmp_path: Path, ckpt: Run) -> None:
    """Version 1 had no checksum of its own, so that anybody could have changed it."""
    dcp.save({"w": torch.ones(300)}, checkpoint_id=tmp_path / "c", no_dist=True)
    sealed = ckpt_tools.seal(tmp_path / "c")
    path = tmp_path / "c" / sealed.manifest
    body = json.loads(path.read_bytes())
    del body["crc64nvme"]
    path.write_text(json.dumps(body | {"ckpt_manifest": 1}))
    done = ckpt("verify", tmp_path / "c")
    assert done.returncode == 1 and "another version" in done.stdout
    path.unlink()
    done = ckpt("verify", tmp_path / "c")
    assert done.returncode == 0 and "it has no manifest" in done.stdout
    done = ckpt("verify", tmp_path / "c", "--require-manifest")
    assert (
        done.returncode == 14 and "it has no manifest" in done.stderr and "ckpt seal" in done.stderr
    )


def test_paths_that_leave_a_root_are_refused_for_every_store() -> None:
    for path in (
        "../x",
        "a/../x",
        "/x",
        "a//x",
        "a\\..\\x",
        "s3://b/x",
        "a::b",
        "C:\\x",
        "a\x00b",
        "./x",
    ):
        with pytest.raises(StorageError):
            check_path(path, "here")
        with pytest.raises(StorageError):
            RemoteStore("memory://attacks")._full(path)


def test_a_pickle_s_numbers_are_bounded(tmp_path: Path) -> None:
    torch_file(tmp_path / "s.pt", b"\x80\x02](" + pickle_write.integer(1 << 60) * 20_000 + b"e.")
    with pytest.raises(UnsafePickleError, match="integers of 6 bytes or more"):
        ckpt_tools.inspect(tmp_path / "s.pt")
    with pytest.raises((PlanError, FormatError)):
        ckpt_tools.merge(tmp_path / "s.pt", tmp_path / "m.safetensors")


# ---- second round --------------------------------------------------------------------------------


def text(data: bytes) -> bytes:
    return b"X" + len(data).to_bytes(4, "little") + data


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


def alike(count: int) -> Iterator[tuple[float, float]]:
    """Yields pairs of floats whose tuples have one hash: the hash of a tuple can be inverted."""
    mask, prime = (1 << 64) - 1, (1 << 61) - 1
    p1, p2, p5 = 11400714785074694791, 14029467366897019727, 2870177450012600261

    def turned(number: int, by: int) -> int:
        return ((number << by) | (number >> (64 - by))) & mask

    end = (0x1234567890ABCDEF - (2 ^ p5 ^ 3527539)) & mask
    end = turned(end * pow(p1, -1, 1 << 64) & mask, 33)
    first = 1.0
    while count:
        first += 1.0
        begun = turned((p5 + hash(first) * p2) & mask, 31) * p1 & mask
        lane = (end - begun) * pow(p2, -1, 1 << 64) & mask
        signed = lane - (1 << 64) if lane >> 63 else lane
        for by in range(61):
            mantissa = ((abs(signed) << by) | (abs(signed) >> (61 - by))) & prime
            second = float(mantissa) * 2.0 ** (61 - by if by else 0)
            if abs(signed) < prime and mantissa < 1 << 53 and hash(second) == abs(signed):
                yield first, second if signed > 0 else -second
                count -= 1
                break


def test_tuples_of_floats_that_hash_alike_are_no_keys(tmp_path: Path) -> None:
    pairs = list(alike(3000))
    assert len({hash(pair) for pair in pairs}) == 1
    body = b"".join(
        b"G" + struct.pack(">d", a) + b"G" + struct.pack(">d", b) + b"\x86N" for a, b in pairs
    )
    path = torch_file(tmp_path / "x.pt", b"\x80\x02}(" + body + b"u.")
    with pytest.raises(UnsafePickleError, match="keys of its dicts are tuples"):
        ckpt_tools.inspect(path)


@pytest.mark.parametrize("what", ["link", "dangling link", "pipe"])
def test_a_pin_is_not_written_through_anything(what: str, tmp_path: Path, ckpt: Run) -> None:
    with CheckpointManager(tmp_path / "run") as checkpoints:
        checkpoints.save(1, {"w": torch.ones(2)}, asynchronous=False)
    victim, pin = tmp_path / "victim", tmp_path / "run" / "step-00000001" / "ckpt.pin"
    if what == "link":
        victim.write_text("precious")
    if what == "pipe":
        os.mkfifo(pin)
    else:
        pin.symlink_to(victim)
    done = ckpt("pin", tmp_path / "run" / "step-00000001")
    assert done.returncode in (0, 15) and "Traceback" not in done.stderr
    assert not victim.exists() or victim.read_text() == "precious"


@pytest.mark.parametrize(
    "config",
    [
        {"alpha_pattern": {"(a+)+b": 8}},
        {"alpha_pattern": {"(": 8}},
        {"alpha_pattern": [1]},
        {"alpha_pattern": {"proj": "8"}},
        {"lora_alpha": "4"},
        {"lora_alpha": float("nan")},
        {"lora_alpha": 10**400},
    ],
)
def test_the_config_of_an_adapter_is_checked(
    config: dict[str, Any], tmp_path: Path, ckpt: Run
) -> None:
    name = "a" * 40
    save_file({f"{name}.weight": torch.ones(3, 3)}, tmp_path / "b.safetensors")
    (tmp_path / "ad").mkdir()
    sides = {"A": torch.ones(1, 3), "B": torch.ones(3, 1)}
    save_file(
        {f"base_model.model.{name}.lora_{s}.weight": t for s, t in sides.items()},
        tmp_path / "ad" / "adapter_model.safetensors",
    )
    whole = {"peft_type": "LORA", "r": 1, "lora_alpha": 4} | config
    (tmp_path / "ad" / "adapter_config.json").write_text(json.dumps(whole))
    words = ("merge", tmp_path / "b.safetensors", tmp_path / "o.safetensors")
    done = ckpt(*words, "--lora", tmp_path / "ad")
    assert done.returncode == 11 and "Traceback" not in done.stderr, done.stderr


@pytest.mark.parametrize(
    "url",
    [
        "http://user:5ecr/et1@host/x",
        "http://user:a@5ecret1@host/x",
        "http://user:5ecret1@host/x",
        "https://host/x?private_token=5ecret1",
        "https://host/x?X%2DAmz%2DSignature=5ecret1",
        "https://host/x?a=1;sig=5ecret1",
        "https://host/x?client_secret=(5ecret1",
        "https://host/x#access_token=5ecret1",
    ],
)
def test_no_secret_of_a_url_is_shown(url: str) -> None:
    shown = redacted(f"cannot read: {url} (again)")
    assert "5ecr" not in shown and "et1" not in shown and "host" in shown and "again" in shown
    for plain in ("http://localhost:9000/a@b/c", "s3://bucket/run@v2/step", "file:///a/b@c"):
        assert redacted(plain) == plain


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


def test_a_note_of_a_rollback_by_somebody_else_moves_no_step(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, keep_last=None) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(step, {"n": step}, asynchronous=False)
    attempts = {s.name: s.manifest.attempt for s in list_steps(open_root(tmp_path)) if s.manifest}
    note = RollbackNote("x", "aaaaaaaa-0000-4000-8000-000000000000", 1, attempts, True)
    (tmp_path / note.file).write_bytes(note.render())
    os.chown(tmp_path / note.file, 12345, 12345)
    assert [s.number for s in list_steps(open_root(tmp_path))] == [1, 2, 3]
    with CheckpointManager(tmp_path, keep_last=None) as checkpoints:
        assert checkpoints.resume({"n": 0}) == 3


def test_numbers_that_are_infinite_end_no_command(tmp_path: Path, ckpt: Run) -> None:
    with CheckpointManager(tmp_path) as checkpoints:
        checkpoints.save(1, {"w": torch.ones(2)}, asynchronous=False)
    note = {"ckpt_rollback": 1, "step": "x", "resumed": 1e999, "is_committed": True, "victims": {}}
    note["attempt"] = "aaaaaaaa-0000-4000-8000-000000000000"
    (tmp_path / ".ckpt.rollback.aaaaaaaa.json").write_text(json.dumps(note))
    (tmp_path / "step-00000002").mkdir()
    with open(tmp_path / "step-00000002" / ".metadata", "wb") as file:
        file.truncate(1 << 40)
    with open(tmp_path / "step-00000002" / "ckpt.manifest.aaaaaaaa.json", "wb") as file:
        file.truncate(1 << 40)
    for words in (["ls"], ["latest"], ["prune", "--keep-last", "1"]):
        done = ckpt(words[0], tmp_path, *words[1:])
        assert "Traceback" not in done.stderr and done.returncode == 0, done.stderr
    with CheckpointManager(tmp_path) as checkpoints:
        assert checkpoints.resume({"w": torch.zeros(2)}) == 1


@pytest.mark.parametrize(
    "rules",
    [
        {"rename": [["w", "\\9"]]},
        {"rename": [["w", "\ud800x"]]},
        {"split": [{"match": "w", "into": [1, 2], "parts": [1, 1]}]},
        {"split": [{"match": "w", "into": ["a", "b"], "parts": None}]},
        {"fuse": [{"match": "w", "from": [1], "into": "z"}]},
        {"fuse": [{"match": "w", "from": [], "into": "z"}]},
        {"unstack": [{"match": "w", "into": 3}]},
        {"unstack": [{"match": "s", "into": "z{layer}"}]},
    ],
)
def test_a_key_map_that_means_nothing_is_one_line(
    rules: dict[str, Any], tmp_path: Path, ckpt: Run
) -> None:
    save_file({"w": torch.ones(4, 2), "s": torch.tensor(1.0)}, tmp_path / "b.safetensors")
    (tmp_path / "map.json").write_text(json.dumps(rules))
    out = tmp_path / "out"
    words = ("convert", tmp_path / "b.safetensors", out, "--to", "dcp")
    done = ckpt(*words, "--map", tmp_path / "map.json")
    assert done.returncode == 13 and "Traceback" not in done.stderr and not out.exists()


# ---- third round ---------------------------------------------------------------------------------


def number(value: int) -> bytes:
    return b"J" + value.to_bytes(4, "little", signed=True)


def entries(pairs: dict[str, bytes]) -> bytes:
    return b"}(" + b"".join(text(key.encode()) + value for key, value in pairs.items()) + b"u"


def tensor(numel: int, shape: tuple[int, ...], strides: tuple[int, ...] | None = None) -> bytes:
    """The pickle of a float32 tensor in record 0."""
    if strides is None:
        strides = tuple(torch.empty(0).expand(shape).stride()) if 0 in shape else steps(shape)
    storage = b"(" + text(b"storage") + b"ctorch\nFloatStorage\n" + text(b"0") + text(b"cpu")
    pieces = [b"(" + b"".join(map(pickle_write.integer, part)) + b"t" for part in (shape, strides)]
    return (
        b"ctorch._utils\n_rebuild_tensor_v2\n("
        + (storage + pickle_write.integer(numel) + b"tQ" + number(0) + pieces[0] + pieces[1])
        + b"\x89ccollections\nOrderedDict\n)RtR"
    )


def steps(shape: tuple[int, ...]) -> tuple[int, ...]:
    found, step = [], 1
    for size in reversed(shape):
        found.insert(0, step)
        step *= size
    return tuple(found)


def refused(path: Path, verb: str = "inspect", seconds: int = 40) -> str:
    """Runs a verb with bounds, and returns the last line of its error, which is one of ours."""
    code = f"import sys, ckpt_tools; ckpt_tools.{verb}(sys.argv[1])"
    done = limited(code, path, seconds=seconds)
    assert done.returncode == 1 and "ckpt_tools.errors." in done.stderr, done.stderr[-800:]
    return done.stderr


def test_tuples_of_numbers_that_hash_alike_are_no_keys(tmp_path: Path) -> None:
    """-1 and -2 have one hash in Python, and so have all tuples of them."""
    keys = itertools.product((-1, -2), repeat=13)
    items = b"".join(b"(" + b"".join(map(number, key)) + b"tN" for key in keys)
    torch_file(tmp_path / "x.pt", b"\x80\x02}(" + items + b"u.")
    assert "keys of its dicts are tuples" in refused(tmp_path / "x.pt")
    with pytest.raises(UnsafePickleError, match="keys of its dicts are tuples"):
        unpack((tmp_path / "x.pt").read_bytes(), "x", False)


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


def test_two_files_of_one_rank_s_names_are_told(tmp_path: Path) -> None:
    (tmp_path / "v").mkdir()
    torch.save({"a.b": torch.ones(2), "a": {"b": torch.zeros(2)}}, tmp_path / "v" / "rank_0.pt")
    with pytest.raises(FormatError, match="two entries have one name"):
        ckpt_tools.inspect(tmp_path / "v")


def test_digits_of_other_alphabets_are_no_ranks(tmp_path: Path) -> None:
    (tmp_path / "v").mkdir()
    torch.save({"w": torch.ones(2)}, tmp_path / "v" / "rank_\uff10.pt")
    with pytest.raises(CheckpointError):
        ckpt_tools.inspect(tmp_path / "v")


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


@pytest.mark.parametrize("name", [";reboot;", "\x1b[31mabcd", "`reboot`"])
def test_no_command_of_another_is_recommended(name: str, tmp_path: Path) -> None:
    """The hint about a result that was set aside is there to be pasted into a shell."""
    (tmp_path / f".aside.model.{name}").mkdir()
    (tmp_path / ".aside.model.00000000").symlink_to("/etc")
    with pytest.raises(CheckpointError, match="no such path") as error:
        ckpt_tools.inspect(tmp_path / "model")
    assert error.value.hint is None
    (tmp_path / "a; reboot").mkdir()
    (tmp_path / "a; reboot" / ".aside.model.01234567").mkdir()
    with pytest.raises(CheckpointError, match="no such path") as error:
        ckpt_tools.inspect(tmp_path / "a; reboot" / "model")
    assert f"mv '{tmp_path}/a; reboot/.aside.model.01234567'" in str(error.value.hint)
