"""Hostile files for the tests of attacks, and processes with bounds that read them."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from ckpt_tools.formats.pickle import write as pickle_write

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


def text(data: bytes) -> bytes:
    return b"X" + len(data).to_bytes(4, "little") + data


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
