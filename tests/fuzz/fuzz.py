"""Hostile input by the million: `python -m tests.fuzz.fuzz TARGET… --runs 1000000 [--seed 1] [--keep
DIR]`.

Genuine files are mutated, and pickles are also put together from opcodes. Whatever comes, a reader
may do one of two things: read it, or raise a CheckpointError (for a configuration: its own error).
Anything else ends the run and leaves the input in DIR: another exception, a crash, more than 5 s of
a processor, more than 300 MiB, a file or a process made. The last line tells what was seen.
"""

from __future__ import annotations

import argparse
import faulthandler
import io
import json
import mmap
import os
import random
import re
import resource
import shutil
import signal
import struct
import sys
import tempfile
import time
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from ckpt_tools.core.catalog import TORCH_ZIP, Extent
from ckpt_tools.core.checksum import crc64nvme, hex64
from ckpt_tools.core.coverage import check
from ckpt_tools.core.dtypes import BY_NAME
from ckpt_tools.core.plan import Target
from ckpt_tools.engine.crc_watch import CrcWatch
from ckpt_tools.engine.sinks import WriteSink
from ckpt_tools.errors import CheckpointError
from ckpt_tools.formats import gguf, npz, safetensors, torch_save
from ckpt_tools.formats.dcp import format as distributed
from ckpt_tools.formats.dcp import metadata as dcp_metadata
from ckpt_tools.formats.dcp import metadata_columns as dcp_bulk
from ckpt_tools.formats.deepspeed import zero as deepspeed
from ckpt_tools.formats.in_memory import InMemoryFile
from ckpt_tools.formats.per_rank import files as per_rank
from ckpt_tools.formats.pickle.write import integer
from ckpt_tools.formats.pickle.write import opcodes as opcodes_of
from ckpt_tools.formats.zip import read as torch_zip
from ckpt_tools.formats.zip import verify as zip_check
from ckpt_tools.operations.convert.lora import read_lora
from ckpt_tools.operations.convert.object_reader import unpack_objects
from ckpt_tools.operations.convert.take_apart import take_apart
from ckpt_tools.operations.convert.training_state import NAMINGS, put_together
from ckpt_tools.publish.journal import find_dead_attempt, prove_tiles, read_journals
from ckpt_tools.publish.manifest import parse_manifest as parse_manifest
from ckpt_tools.ranks.base import ALONE
from ckpt_tools.storage import MemoryStore, Overlay, is_url
from ckpt_tools.storage.base import check_path
from tests.fuzz.seeds import (
    SEEDS,
    WORK,
    ZERO,
    adapter_config,
    odd,
    saved,
    states,
    strange_places,
)
from training.config import ConfigError
from training.extras.accelerate_config import read as read_configuration

CONFIG = Path(tempfile.gettempdir()) / f"fuzz-{os.getpid()}.yaml"
JOURNAL = Path(tempfile.gettempdir()) / f"fuzz-{os.getpid()}-journal"
ADAPTER = Path(tempfile.gettempdir()) / f"fuzz-{os.getpid()}-adapter"
BASE = save({"a.q.weight": torch.ones(6, 8)})
DATA = bytes(1 << 16)
SECONDS, MEBIBYTES, MAX_BYTES = 5.0, 300, 1 << 16
HEAVY = 0.01  # the part of the bombs that are full size: one costs as much as a hundred others
INTERESTING = [
    b"\x00",
    b"\xff",
    b"\x7f\xff\xff\xff",
    b"\xff" * 4,
    b"\xff" * 8,
    b"\x80" + b"\x00" * 7,
    b"PK\x03\x04",
    b"\x85",
    b"\x86",
    b"../",
    b"{",
    b"[",
    b'"',
    b"9" * 20,
    b"-1",
]
OPCODES = [
    b"(",
    b")",
    b"}",
    b"]",
    b"N",
    b"\x88",
    b"\x89",
    b"t",
    b"\x85",
    b"\x86",
    b"\x87",
    b"a",
    b"e",
    b"s",
    b"u",
    b"b",
    b"R",
    b"\x81",
    b"\x93",
    b"\x94",
    b"K\x01",
    b"K\x94",
    b"M\x85\x86",
    b"J\xff\xff\xff\xff",
    b"h\x00",
    b"h\x01",
    b"h\x02",
    b"h\x94",
    b"j\x00\x01\x00\x00",
    b"q\x00",
    b"q\x01",
    b"r\x05\x00\x00\x00",
    b"\x8c\x01a",
    b"\x8c\x02ub",
    b"\x8c\x04size",
    b"X\x01\x00\x00\x00b",
    b"\x8a\x01\x05",
    b"\x8a\x08" + b"\x7f" * 8,
    b"Q",
    b"ctorch\nSize\n",
    b"ctorch\nfloat32\n",
    b"ctorch.distributed.checkpoint.metadata\nMetadataIndex\n",
    b"ctorch.distributed.checkpoint.metadata\nMetadata\n",
    b"ctorch.serialization\n_get_layout\n",
    b"cpathlib\nPosixPath\n",
    b"ctorch._utils\n_rebuild_tensor_v2\n",
    b"ccollections\nOrderedDict\n",
    b"cos\nsystem\n",
]


GLOBALS = [
    b"c" + name.replace(".", "\n", 1).replace("/", ".").encode() + b"\n"
    for name in (
        "torch/_utils._rebuild_tensor_v2",
        "torch/_utils._rebuild_tensor_v3",
        "torch/_utils._rebuild_parameter",
        "torch/_tensor._rebuild_from_type_v2",
        "_codecs.encode",
        "builtins.set",
        "builtins.bytearray",
        "builtins.complex",
        "builtins.getattr",
        "collections.Counter",
        "collections.OrderedDict",
        "collections.defaultdict",
        "torch.device",
        "torch.Size",
        "torch.float32",
        "torch.FloatStorage",
        "numpy.dtype",
        "numpy/core/multiarray.scalar",
    )
]
_watch = [False]


def _hook(event: str, args: tuple[Any, ...]) -> None:
    """Ends the run when a reader opens a file to write, starts a process or connects."""
    if _watch[0] and (
        event in ("os.system", "subprocess.Popen", "os.exec", "os.posix_spawn", "socket.connect")
        or (event == "open" and isinstance(args[1], str) and set(args[1]) & set("wax+"))
    ):
        raise SystemExit(f"forbidden: {event} {args}")


@contextmanager
def _allowed() -> Iterator[None]:
    was, _watch[0] = _watch[0], False
    yield
    _watch[0] = was


def metadata(data: bytes) -> object:
    catalog = distributed.read_catalog(MemoryStore({".metadata": data, "__0_0.distcp": DATA}))
    check(catalog)
    return catalog


def many(data: bytes) -> object:
    """Reads as arrays what may be read so; it must be what the reader of single objects says, and
    nothing that this one refuses.
    """
    try:
        plain = dcp_metadata.parse_metadata(data, "test")
    except CheckpointError:
        assert dcp_bulk.read_bulk(data, "test") is None
        raise
    found = dcp_bulk.read_bulk(data, "test")
    if found is None:
        return plain
    metadata, chunks = found
    assert (metadata.objects, metadata.paths, list(chunks)) == (
        plain.objects,
        plain.paths,
        list(plain.tensors),
    )
    for fqn, meta in plain.tensors.items():
        expected = [(box, tuple(plain.places[fqn, box.offsets])) for box in meta.boxes]
        assert [(c.box, tuple(c.extent[:3])) for c in chunks[fqn]] == expected
    return chunks


def item(data: bytes) -> object:
    store, extent = MemoryStore({"f": data}), Extent("f", 0, len(data), TORCH_ZIP)
    list(zip_check.examine(store, [extent]))
    return list(
        torch_zip.locate_payloads(
            store, [torch_zip.ArchiveItem(extent, BY_NAME["float32"], (3, 4))]
        )
    )


def file(data: bytes) -> object:
    store = MemoryStore({"f.pt": data})
    catalog = torch_save.read_catalog(store)
    check(catalog)
    list(zip_check.examine(store, catalog.archives))
    return catalog


def arrays(data: bytes) -> object:
    catalog = npz.read_catalog(MemoryStore({"f.npz": data}))
    check(catalog)
    list(zip_check.examine(MemoryStore({"f.npz": data}), catalog.archives))
    return catalog


def llama(data: bytes) -> object:
    catalog = gguf.read_catalog(MemoryStore({"f.gguf": data}))
    check(catalog)
    return catalog


def header(data: bytes) -> object:
    catalog = safetensors.read_catalog(MemoryStore({"model.safetensors": data}))
    check(catalog)
    return catalog


def index(data: bytes) -> object:
    files = {
        safetensors.INDEX: data,
        "a.safetensors": save({"a": torch.ones(2)}),
        "b.safetensors": save({"b": torch.ones(3)}),
    }
    return safetensors.read_catalog(MemoryStore(files))


def manifest(data: bytes) -> object:
    """With the checksum of its own text, which an attacker can write too; and without."""
    text = (
        data[: data.rfind(b',\n "crc64nvme"')] if b',\n "crc64nvme"' in data else data.rstrip()[:-1]
    )
    found = parse_manifest(
        text + f',\n "crc64nvme": "{hex64(crc64nvme(text))}"\n}}\n'.encode(), "fuzz"
    )
    with suppress(CheckpointError):
        parse_manifest(data, "fuzz")
    return found


def journal(data: bytes) -> object:
    """What the lines say, each with the checksum that belongs to it, in a directory whose inode the
    head knows."""
    with _allowed():
        JOURNAL.mkdir(0o700, exist_ok=True)
    inode = JOURNAL.stat().st_ino
    data = re.sub(rb'"inode": ?0\b', b'"inode":%d' % inode, data)
    lines = (hex64(crc64nvme(line)).encode() + b" " + line + b"\n" for line in data.split(b"\n"))
    with _allowed():
        (JOURNAL / ".ckpt.journal.fuzz").write_bytes(b"".join(lines))
    earlier = find_dead_attempt([JOURNAL], WORK)
    past = prove_tiles(
        read_journals(JOURNAL, WORK),
        MemoryStore({"f": DATA, "g": DATA}),
        (1 << 16, 1 << 16),
        1,
        ALONE,
    )
    if earlier is None:
        raise CheckpointError("not gone on with")
    sink = WriteSink(Target("dcp", {"f": len(DATA), "g": len(DATA)}, {}), MemoryStore({}))
    past.restore(sink, CrcWatch({}, MemoryStore()), {})
    return past, sink.fingerprints.join()


def url(data: bytes) -> object:
    text = data.decode("utf-8", "replace")
    return is_url(text), check_path(text, "fuzz")


def accelerate(data: bytes) -> object:
    with _allowed():
        CONFIG.write_bytes(data)
    return read_configuration(str(CONFIG))


def zero(data: bytes) -> object:
    """A file of DeepSpeed's, the model's states beside good states of the optimizer or the other
    way round.
    """
    names = {"mp_rank_00_model_states.pt": 0, "zero_pp_rank_0_mp_rank_00_optim_states.pt": 1}
    results = []
    for name, number in names.items():
        files = {n: data if n == name else ZERO[k] for n, k in names.items()}
        try:
            catalog = deepspeed.read_catalog(MemoryStore(files))
            check(catalog)
            results.append(catalog)
        except CheckpointError:
            if number:
                raise
    return results


def parts(data: bytes) -> object:
    """A training state, taken apart and put together under every naming."""
    store = MemoryStore({"f.pt": data})
    catalog = torch_save.read_catalog(store)
    check(catalog)
    overlaid = Overlay(store, catalog.memory_files)
    for naming in NAMINGS:
        made = InMemoryFile(catalog.memory_files)
        whole = put_together(take_apart(catalog, overlaid), naming, made)
        unpack_objects(whole, Overlay(store, made.files), made)
    return catalog


def flats(data: bytes) -> object:
    """The file of a rank with parameters split in its way, beside shapes."""
    shapes = b'{"a.w": [3, 4], "b": [5]}'
    catalog = per_rank.read_catalog(MemoryStore({"x_rank_0.pt": data, "shapes.json": shapes}))
    check(catalog)
    return catalog


def adapter(data: bytes) -> object:
    """The config of an adapter beside genuine matrices."""
    with _allowed():
        ADAPTER.mkdir(exist_ok=True)
        matrices = {"a.q.lora_A.weight": torch.ones(4, 8), "a.q.lora_B.weight": torch.ones(6, 4)}
        if not (ADAPTER / "adapter_model.safetensors").exists():
            (ADAPTER / "adapter_model.safetensors").write_bytes(save(matrices))
        (ADAPTER / "adapter_config.json").write_bytes(data)
    base = safetensors.read_catalog(MemoryStore({"m.safetensors": BASE}))
    return read_lora(str(ADAPTER), base, base)


TARGETS: dict[str, Callable[[bytes], object]] = {
    "zero": zero,
    "parts": parts,
    "flats": flats,
    "metadata": metadata,
    "many": many,
    "item": item,
    "file": file,
    "arrays": arrays,
    "llama": llama,
    "header": header,
    "index": index,
    "manifest": manifest,
    "journal": journal,
    "url": url,
    "accelerate": accelerate,
    "adapter": adapter,
}


def mutate(data: bytearray, rng: random.Random, pool: list[bytes]) -> bytearray:
    """Changes a few places: bits, bytes, numbers, pieces removed, doubled, or taken from
    another.
    """
    for _ in range(rng.choice((1, 1, 1, 2, 3, 6))):
        at, kind = rng.randrange(len(data) + 1), rng.randrange(8)
        if kind == 0 and at < len(data):
            data[at] ^= 1 << rng.randrange(8)
        elif kind == 1 and at < len(data):
            data[at] = rng.randrange(256)
        elif kind == 2:
            piece = rng.choice(INTERESTING)
            data[at : at + rng.choice((0, len(piece)))] = piece
        elif kind == 3:
            del data[at : at + rng.randrange(1, 40)]
        elif kind == 4:
            data[at:at] = data[at : at + rng.randrange(1, 60)] * rng.choice((1, 1, 2, 50))
        elif kind == 5:
            other = rng.choice(pool)
            start = rng.randrange(len(other))
            data[at : at + rng.choice((0, 20))] = other[start : start + rng.randrange(1, 80)]
        elif kind == 6:
            data[at : at + 8] = struct.pack(
                "<Q",
                rng.choice((0, 1, 1 << 31, 1 << 32, 1 << 62, 1 << 63, (1 << 64) - 1, len(data))),
            )[: rng.choice((2, 4, 8))]
        else:
            del data[at:]
    return data[:MAX_BYTES]


def program(rng: random.Random, opcodes: Sequence[bytes] = OPCODES) -> bytes:
    """Returns a pickle of opcodes in any order."""
    return (
        b"\x80"
        + bytes([rng.choice((2, 4))])
        + b"".join(rng.choices(opcodes, k=rng.randrange(2, 60)))
        + b"."
    )


def hostile(rng: random.Random) -> bytes:
    """Returns a torch.save file: states that hold one dict many times, integers that hash alike,
    attributes for functions, giant lengths.
    """
    kind = rng.randrange(4)
    if kind == 0:
        data = b"\x80\x02}" + b"".join(
            b"q"
            + bytes([i])
            + b"}(X\x01\x00\x00\x00ah"
            + bytes([i])
            + b"X\x01\x00\x00\x00bh"
            + bytes([i])
            + b"u"
            for i in range(rng.randrange(70 if rng.random() < HEAVY else 8))
        )
    elif kind == 1:
        data = (
            b"\x80\x02}("
            + b"".join(
                integer(sys.hash_info.modulus * i) + b"N"
                for i in range(1, 4000 if rng.random() < HEAVY else 20)
            )
            + b"u"
        )
    elif kind == 2:
        state = rng.choice(
            [
                (None, {"__kwdefaults__": {"dtype": 1}}),
                {"x": 1},
                (None, {"function": 1}),
                [1, 2],
                "x",
            ]
        )
        data = b"\x80\x02" + rng.choice(GLOBALS) + opcodes_of(state) + b"b"
    else:
        data = (
            b"\x80\x02"
            + rng.choice(GLOBALS)
            + opcodes_of(rng.choice([(1 << 40,), ("x",), ([1, "a"],), ({1: 2},), (1.0, 2.0)]))
            + b"R"
        )
    with io.BytesIO() as buffer, zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr(
            "archive/data.pkl",
            program(rng, [*OPCODES, *GLOBALS]) if rng.random() < 0.3 else data + b".",
        )
        archive.close()
        return buffer.getvalue()


def made(name: str, genuine: list[bytes], pool: list[bytes], rng: random.Random) -> bytes:
    """Returns input for a reader: a mutation, or what its own generator makes."""
    if name == "metadata" and rng.random() < 0.3:
        data = program(rng)
    elif name == "metadata" and rng.random() < 0.3:
        data = strange_places(rng)
    elif name == "adapter" and rng.random() < 0.7:
        data = adapter_config(rng)
    elif name in ("file", "parts") and rng.random() < 0.3:
        data = hostile(rng)
    elif name in ("zero", "parts", "flats") and rng.random() < 0.5:
        data = saved(odd(rng.choice(states(name)), rng))
    elif name in ("index", "manifest", "journal") and rng.random() < 0.5:
        texts = rng.choice(genuine).split(b"\n") if name == "journal" else [rng.choice(genuine)]
        data = b"\n".join(
            json.dumps(odd(json.loads(text), rng), default=str).encode() for text in texts
        )
    else:
        data = bytes(mutate(bytearray(rng.choice(pool)), rng, pool))
    return data[:MAX_BYTES]


def fuzz(name: str, pool: list[bytes], runs: int, seed: int, keep: Path) -> Counter[str]:
    """Feeds a reader; returns how often it read and how often it refused.

    The input is in the file `last` of `keep` while it is being read, so that it survives a crash.
    """
    rng, target, seen = random.Random(seed), TARGETS[name], Counter[str]()
    genuine = list(pool)
    keep.mkdir(parents=True, exist_ok=True)
    last = keep / f"last-{name}"
    last.write_bytes(bytes(MAX_BYTES + 8))
    before = set(os.listdir())
    with last.open("r+b") as file, mmap.mmap(file.fileno(), 0) as shared:
        base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for number in range(runs):
            data = made(name, genuine, pool, rng)
            shared[: len(data) + 8] = struct.pack("<Q", len(data)) + data
            if number % (1 if name == "accelerate" else 64) == 0:
                # as a rule 64 of them within the time of one
                signal.setitimer(signal.ITIMER_PROF, SECONDS)
                faulthandler.dump_traceback_later(60 * SECONDS, exit=True)
            try:
                _watch[0] = True
                target(data)
                seen["read"] += 1
                if len(pool) < 500 and rng.random() < 0.02:
                    pool.append(data)
            except (CheckpointError, ConfigError) as error:
                seen[type(error).__name__] += 1
            finally:
                _watch[0] = False
    signal.setitimer(signal.ITIMER_PROF, 0)
    faulthandler.cancel_dump_traceback_later()
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - base) >> 10
    assert grown < MEBIBYTES, f"{grown} MiB"
    assert set(os.listdir()) == before, "files were made"
    last.unlink()
    CONFIG.unlink(missing_ok=True)
    shutil.rmtree(JOURNAL, ignore_errors=True)
    shutil.rmtree(ADAPTER, ignore_errors=True)
    seen["MiB"] = grown
    return seen


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("targets", choices=TARGETS, nargs="+", metavar="TARGET")
    parser.add_argument("--runs", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", type=Path, default=Path("fuzz-found"))
    args = parser.parse_args()
    seeds = [SEEDS[name]() for name in args.targets]  # some start a process
    sys.addaudithook(_hook)
    faulthandler.register(signal.SIGPROF, chain=True)  # shows where it was, then ends the process
    for name, pool in zip(args.targets, seeds, strict=True):
        began = time.monotonic()
        seen = fuzz(name, pool, args.runs, args.seed, args.keep)
        print(f"{name}: {args.runs:,} runs, {time.monotonic() - began:.0f} s, {dict(seen)}")


if __name__ == "__main__":
    main()
