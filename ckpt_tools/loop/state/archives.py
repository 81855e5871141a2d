"""Packs plain values into `torch.save` archives and unpacks them.

`ReadBack` proves that `unpack` reads the archives of `pack`.

Imports torch.
"""

from __future__ import annotations

import hashlib
import io
import math
import zipfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ckpt_tools.errors import (
    CheckpointError,
    FormatError,
    IntegrityError,
    PlanError,
    UnsafePickleError,
    printable,
)
from ckpt_tools.formats.builder import UnreadValues
from ckpt_tools.formats.pickle.state import TensorView
from ckpt_tools.formats.torch_save import read_leaves
from ckpt_tools.loop.state.objects import Key, Structure, decode_object, encode_object
from ckpt_tools.storage import MemoryStore

_EXPANDED = 64  # an expanded tensor gets its full size when it is loaded


def pack(value: Any, path: Key = ()) -> bytes:
    """Returns a value as DCP stores an object: a `torch.save` archive.

    Raises:
        PlanError: its type is not supported; see `encode`.
    """
    buffer = io.BytesIO()
    torch.save(
        value.encoded if isinstance(value, Structure) else encode_object(value, path), buffer
    )
    return buffer.getvalue()


def unpack(
    data: bytes, name: str, trust_pickle: bool, tensor: Callable[[str], Any] | None = None
) -> Any:
    """Returns a value from its archive, after comparing the checksums.

    Args:
        data: the archive.
        name: names the object in messages.
        trust_pickle: run the code that the archive asks for.
        tensor: see `decode`.

    Raises:
        IntegrityError: the archive is damaged.
        UnsafePickleError: it asks for code, and `trust_pickle` is False.
        FormatError: it is malformed.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            if any(i.compress_type or i.file_size > len(data) for i in archive.infolist()):
                raise ValueError("a record is compressed, or longer than the archive")
            damaged = archive.testzip() if any(i.CRC for i in archive.infolist()) else None
    except Exception as error:  # zipfile raises many types for unexpected bytes
        raise IntegrityError(
            f"an object's archive is damaged: {printable(str(error) or type(error).__name__)}"
            f" ({printable(name)!r})"
        ) from error
    if damaged:
        raise IntegrityError(
            f"an object was damaged since it was written: {printable(damaged)}"
            f" ({printable(name)!r})"
        )
    if not trust_pickle:
        _check_archive(data, name)
    try:
        value = torch.load(io.BytesIO(data), map_location="cpu", weights_only=not trust_pickle)
    except Exception as error:  # torch's unpickler may raise any type
        if trust_pickle:
            raise
        lines: Sequence[str] = str(error).splitlines()
        reason = next(
            (line for line in lines if "GLOBAL" in line or "Unsupported" in line), lines[0]
        )
        raise UnsafePickleError(
            f"refused an object of the checkpoint: {printable(reason.strip())}"
            f" ({printable(name)!r})",
            hint="no code of it was run; if you wrote the file, pass trust_pickle=True",
        ) from error
    return decode_object(value, tensor)


def _check_archive(data: bytes, name: str) -> None:
    """Reads an archive without running code, and refuses tensors far larger than the archive.

    Raises:
        FormatError: it is malformed, or claims lengths that it does not have.
    """
    for _, value, _ in read_leaves(MemoryStore({name: data}), name, len(data), UnreadValues()):
        if isinstance(value, TensorView) and math.prod(
            value.sizes
        ) * value.dtype.itemsize > _EXPANDED * len(data):
            raise FormatError(
                f"a tensor of an object is far larger than its archive: {list(value.sizes)}"
                f" ({printable(name)!r})"
            )


def check_value(value: Any, path: Key) -> None:
    """Refuses values that `pack` refuses.

    Raises:
        PlanError: its type is not supported; see `encode`.
    """
    if not isinstance(value, Structure):
        encode_object(value, path, replace=lambda *_: None)


def check_loadable(data: bytes, name: str, hint: str | None = None) -> None:
    """Reads an archive as a resume does.

    Args:
        data: the archive.
        name: names the object in messages.
        hint: advice for the user; the error's own hint if None.

    Raises:
        PlanError: it could not be loaded.
    """
    try:
        unpack(data, name, False, tensor=lambda stored: stored)
    except CheckpointError as error:
        raise PlanError(
            f"cannot save {printable(name)!r}: it could not be loaded again: {error}",
            hint=hint or error.hint,
        ) from error


class ReadBack:
    """Checks before a commit that `resume` can load the objects."""

    def __init__(self) -> None:
        self._proved: dict[str, bytes] = {}  # a digest of each object of the previous save

    def check(self, objects: Mapping[str, bytes]) -> None:
        """Reads archives as a resume does, except those that have not changed since the last save.

        Raises:
            PlanError: one could not be loaded.
        """
        digests = {name: hashlib.blake2b(data).digest() for name, data in objects.items()}
        for name, data in objects.items():
            if self._proved.get(name) != digests[name]:
                check_loadable(data, name)
        self._proved = digests
