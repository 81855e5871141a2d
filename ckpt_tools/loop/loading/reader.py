"""Reads single tensors, or slices of them, from any checkpoint.

Imports torch.
"""

from __future__ import annotations

import difflib
import math
import operator
import os
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from types import EllipsisType, TracebackType
from typing import Any

import numpy.typing as npt
import torch

from ckpt_tools.core.box import Box, whole
from ckpt_tools.core.catalog import RAW, Extent, TensorEntry
from ckpt_tools.core.checksum import crc64nvme, hex64
from ckpt_tools.engine.schedule import DEFAULT_MEMORY_BYTES
from ckpt_tools.errors import IntegrityError, PlanError, StorageError, printable
from ckpt_tools.formats.registry import Source
from ckpt_tools.loop.loading.load_request import LoadReport
from ckpt_tools.loop.loading.opened import open_again
from ckpt_tools.loop.loading.read_shards import fill
from ckpt_tools.loop.state.shards import Shard, as_bytes
from ckpt_tools.operations.arguments import checked
from ckpt_tools.publish.manifest import Manifest
from ckpt_tools.storage import read
from ckpt_tools.transfer.prove import prove_replicas

Key = int | slice | EllipsisType

_JOBS = 4
_MAX_PIECES, _DIRECT_BYTES = 64, 1 << 20  # of a read in the caller's thread
_GAP_BYTES = 8 << 10  # between rows, which cost less than another read
_MAX_FILE_BYTES = 64 << 20


class StoredTensor:
    """A tensor in a checkpoint, which is read when it is asked for.

    `tensor[2:5, 0]` reads a part of it, `torch()` and `numpy()` all of it.

    Attributes:
        name: its name in the checkpoint.
        shape: its global shape.
        dtype: the name of its element type, such as `bfloat16`.
        nbytes: bytes of all elements.
    """

    def __init__(self, reader: Checkpoint, entry: TensorEntry) -> None:
        self._reader, self._entry = reader, entry
        self.name, self.shape, self.dtype = entry.fqn, entry.shape, entry.dtype.name
        self.nbytes = whole(entry.shape).numel * entry.dtype.itemsize

    def __repr__(self) -> str:
        return f"StoredTensor({printable(self.name)!r}, {self.dtype}, {list(self.shape)})"

    def __getitem__(self, key: Key | tuple[Key, ...]) -> torch.Tensor:
        """Reads a part of the tensor: only the bytes that it needs.

        Args:
            key: for each leading dim an index or a slice of step 1; `...` stands for whole dims.

        Raises:
            IndexError: it does not fit the shape.
            TypeError: it is of another kind, such as a mask.
            IntegrityError: a chunk, or the whole tensor, that was read is damaged; or several ranks
                saved this tensor, and their copies differ.
        """
        keys = _without_ellipsis(key if isinstance(key, tuple) else (key,), len(self.shape))
        if len(keys) > len(self.shape):
            raise IndexError(f"{len(keys)} indices for a tensor of {len(self.shape)} dims")
        keys = (*keys, *(slice(None) for _ in self.shape[len(keys) :]))
        ranges = [_range(k, size) for k, size in zip(keys, self.shape, strict=True)]
        box = Box(tuple(r.start for r in ranges), tuple(len(r) for r in ranges))
        sizes = [len(r) for k, r in zip(keys, ranges, strict=True) if isinstance(k, slice)]
        value = self._reader._read(self._entry, box)
        if box == whole(self.shape):
            self._reader._prove(self._entry, value)
        return value.reshape(sizes)

    def torch(self) -> torch.Tensor:
        """Reads the whole tensor. A sealed one is compared with its fingerprint.

        Raises:
            IntegrityError: it is damaged.
        """
        value = self._reader._read(self._entry, whole(self.shape))
        self._reader._prove(self._entry, value)
        return value

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[Any]:
        """Reads the whole tensor for NumPy's functions."""
        del copy  # it is always a new one
        return self.numpy() if dtype is None else self.numpy().astype(dtype)

    def numpy(self) -> npt.NDArray[Any]:
        """Reads the whole tensor as an array.

        Raises:
            PlanError: NumPy has no such element type.
        """
        try:
            return self.torch().numpy()
        except TypeError as error:
            raise PlanError(
                f"NumPy has no {self.dtype}: {printable(self.name)!r}",
                hint="read it with torch(), and cast it: tensor.torch().float().numpy()",
            ) from error


class Checkpoint(Mapping[str, StoredTensor]):
    """An opened checkpoint: its tensors by name. Nothing but metadata is read until you ask.

    Use it in a `with` block, or call `close()`. A read after that raises ValueError.

    Attributes:
        path: path or URL.
        format: name of its format.
        world_size: number of ranks that saved it; None if the format does not store it.
    """

    def __init__(self, source: Source, sealed: Manifest | None) -> None:
        self._source, self._sealed = source, sealed
        self.path, self.format = source.path, source.catalog.format
        self.world_size = source.catalog.world_size
        self._is_closed = False
        self._proved = set[str]()  # tensors whose replicas are equal
        self._places: dict[str, list[tuple[Box, Extent]]] = {}  # of the payloads of some tensors

    def __repr__(self) -> str:
        return f"Checkpoint({printable(self.path)!r}, {self.format}, {len(self)} tensors)"

    def __getitem__(self, name: str) -> StoredTensor:
        """Returns a tensor; nothing is read yet.

        Raises:
            KeyError: there is no tensor of that name; the message has the nearest names.
        """
        if (entry := self._source.catalog.tensors.get(name)) is None:
            raise KeyError(self._no_such(str(name)))
        return StoredTensor(self, entry)

    def __contains__(self, name: object) -> bool:
        return name in self._source.catalog.tensors

    def _no_such(self, name: str) -> str:
        if name in self._source.catalog.objects:
            return f"{printable(name)} is an object, no tensor: ckpt_tools.load reads it"
        if kind := self._source.catalog.unread.get(name):
            return f"{printable(name)} is {printable(kind)}, which is not read"
        names = list(self._source.catalog.tensors)
        near = difflib.get_close_matches(name, names[:2000], 3, 0.5) or names[:3]
        shown = ", ".join(map(printable, near)) or "none"
        return f"{printable(name)} is not in {printable(self.path)}; the nearest names: {shown}"

    def __iter__(self) -> Iterator[str]:
        return iter(self._source.catalog.tensors)

    def __len__(self) -> int:
        return len(self._source.catalog.tensors)

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def names(self) -> list[str]:
        """Returns the names of all entries: tensors, and objects such as a scheduler's values."""
        return [*self._source.catalog.tensors, *self._source.catalog.objects]

    def file(self, name: str) -> bytes:
        """Returns the contents of a small file of the checkpoint, such as a config.

        Raises:
            StorageError: there is no such file, or it is larger than 64 MiB.
            IntegrityError: it is not what was sealed.
        """
        self._refuse_closed()
        nbytes = self._source.store.size(name)
        if nbytes > _MAX_FILE_BYTES:
            raise StorageError(
                f"a file is too large to be read whole: {nbytes} bytes ({printable(name)})"
            )
        data = read(self._source.store, name)
        sealed = self._sealed.files.get(name) if self._sealed else None
        if sealed is not None and sealed.crc64nvme != hex64(crc64nvme(data)):
            raise IntegrityError(
                f"a file is not what was sealed ({printable(name)!r} in {printable(self.path)})",
                hint="ckpt verify says what is damaged",
            )
        return data

    def rows(self, name: str, indices: Sequence[int] | torch.Tensor) -> torch.Tensor:
        """Reads rows of a tensor, such as those of an embedding, in one pass.

        Each row is read once, and neighbours are read together.

        Args:
            name: of the tensor.
            indices: `[n]`, of rows along the first dim, in any order. A negative one counts from
                the end.

        Returns:
            `[n, ...]`, the rows in the order of `indices`.

        Raises:
            KeyError: there is no tensor of that name.
            IndexError: an index is out of range, or the tensor has no dims.
            TypeError: they are no list of integers, such as a mask or a slice.
            IntegrityError: as for `StoredTensor.__getitem__`.
        """
        tensor = self[name]
        if not tensor.shape:
            raise IndexError(f"{printable(name)} has no rows: it has no dims")
        size = tensor.shape[0]
        found = _whole_numbers(indices)
        if wrong := [index for index in found if not -size <= index < size]:
            raise IndexError(f"index {wrong[0]} is out of range for a dim of {size}")
        rows, inner = sorted({i % size for i in found}), tensor.shape[1:]
        spans = _spans(rows, max(1, math.prod(inner) * tensor._entry.dtype.itemsize))
        boxes = [Box((i, *(0 for _ in inner)), (j - i, *inner)) for i, j in spans]
        if boxes == [whole(tensor.shape)]:
            value = tensor.torch()
        else:
            value = self._read_rows(tensor._entry, boxes)
        begins = accumulate((j - i for i, j in spans), initial=0)
        shifts = [(i, begin - i) for (i, _), begin in zip(spans, begins, strict=False)]
        firsts = [i for i, _ in shifts]
        return value[[i % size + shifts[bisect_right(firsts, i % size) - 1][1] for i in found]]

    def close(self) -> None:
        """Closes its files and connections. Names and shapes stay; values are no longer read."""
        self._is_closed = True
        self._source.store.close()

    def _refuse_closed(self) -> None:
        if self._is_closed:
            raise ValueError(f"the checkpoint is closed: {printable(self.path)}; open it again")

    def _read(self, entry: TensorEntry, box: Box) -> torch.Tensor:
        self._refuse_closed()
        tensor = self._read_directly(entry, box)
        if tensor is None:
            tensor = self._empty(entry, box)
            self._fill(entry, [box], [tensor])
        return tensor

    def _read_rows(self, entry: TensorEntry, boxes: Sequence[Box]) -> torch.Tensor:
        """Reads boxes of rows, and returns them one below the other."""
        self._refuse_closed()
        found = [self._read_directly(entry, box) for box in boxes]
        parts = [
            self._empty(entry, box) if part is None else part
            for box, part in zip(boxes, found, strict=True)
        ]
        left = [i for i, part in enumerate(found) if part is None]
        for at in range(0, len(left), _MAX_PIECES):  # a plan pairs each with each chunk
            some = left[at : at + _MAX_PIECES]
            self._fill(entry, [boxes[i] for i in some], [parts[i] for i in some])
        return parts[0] if len(parts) == 1 else torch.cat([*parts, self._empty(entry, None)])

    def _empty(self, entry: TensorEntry, box: Box | None) -> torch.Tensor:
        """Returns room for a box of a tensor; for no rows of it without a box."""
        sizes = box.sizes if box is not None else (0, *entry.shape[1:])
        return torch.empty(sizes, dtype=getattr(torch, entry.dtype.name), device="cpu")

    def _fill(
        self, entry: TensorEntry, boxes: Sequence[Box], parts: Sequence[torch.Tensor]
    ) -> None:
        self._prove_replicas(entry)
        shards = [
            Shard(entry.fqn, entry.dtype, entry.shape, box, part)
            for box, part in zip(boxes, parts, strict=True)
            if box.numel
        ]
        if shards:
            fill(self._source, shards, _JOBS, DEFAULT_MEMORY_BYTES, LoadReport(self.path))

    def _prove_replicas(self, entry: TensorEntry) -> None:
        if self._sealed is None and entry.fqn not in self._proved:
            prove_replicas(self._source, [entry], jobs=_JOBS)
            self._proved.add(entry.fqn)

    def _read_directly(self, entry: TensorEntry, box: Box) -> torch.Tensor | None:
        """Reads a little in this thread, as one range of bytes, without a plan.

        Returns None if it is more, lies in several chunks, or is a whole chunk: the plan compares
        that with its checksum.
        """
        nbytes = box.numel * entry.dtype.itemsize
        if not 0 < nbytes <= _DIRECT_BYTES or self._source.store.capabilities.is_remote:
            return None
        places = self._places.get(entry.fqn)
        if places is None:
            self._prove_replicas(entry)
            places = self._places[entry.fqn] = self._found_places(entry)
        for held, extent in places:
            first = _first_element(held, box)
            if first is not None:
                data = bytearray(nbytes)
                start = extent.start + first * entry.dtype.itemsize
                self._source.store.read_into(extent.file, start, memoryview(data))
                dtype = getattr(torch, entry.dtype.name)
                return torch.frombuffer(data, dtype=dtype).reshape(box.sizes)
        return None

    def _found_places(self, entry: TensorEntry) -> list[tuple[Box, Extent]]:
        """Returns the boxes of a tensor's chunks with their payloads, if they are few and plain."""
        if len(entry.chunks) > _MAX_PIECES:
            return []
        found = self._source.format.locate(self._source.store, [entry])
        places = [(box, found.get(extent, extent)) for box, extent in entry.chunks]
        return [
            (box, extent)
            for box, extent in places
            if extent.packing == RAW
            and extent.strides is None
            and extent.nbytes == box.numel * entry.dtype.itemsize
        ]

    def _prove(self, entry: TensorEntry, value: torch.Tensor) -> None:
        sealed = self._sealed.tensors.get(entry.fqn) if self._sealed else None
        got = hex64(crc64nvme(as_bytes(value) or b""))
        if sealed is not None and sealed.fingerprint != got:
            raise IntegrityError(
                f"a tensor is not what was sealed: expected fingerprint {sealed.fingerprint}, got"
                f" {got} ({printable(entry.fqn)!r} in {printable(self.path)})",
                hint="ckpt verify says what is damaged",
            )


@checked(name="open")
def open_checkpoint(
    path: str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None = None
) -> Checkpoint:
    """Opens a checkpoint of any format, to read single tensors or slices of them.

    `ckpt_tools.open` is this function.

    Args:
        path: a path or a URL, as every verb of `ckpt` takes it.
        storage_options: of the object store, as fsspec takes them.

    Raises:
        NotACheckpointError: there is none.
        FormatError: its metadata is malformed.
        CatalogError: it has holes, overlaps, or files that are missing or short.
    """
    return Checkpoint(*open_again(path, storage_options))


def _spans(rows: Sequence[int], row_bytes: int) -> list[tuple[int, int]]:
    """Returns the ranges of rows to read: short gaps between sorted rows are read, too."""
    spans: list[tuple[int, int]] = []
    for row in rows:
        if spans and (row - spans[-1][1]) * row_bytes <= _GAP_BYTES:
            spans[-1] = spans[-1][0], row + 1
        else:
            spans.append((row, row + 1))
    return spans


def _whole_numbers(indices: object) -> list[int]:
    """Returns the indices of rows as a list.

    Raises:
        TypeError: they are no list of integers.
    """
    listed = indices.tolist() if isinstance(indices, torch.Tensor) else indices
    found = list(listed) if isinstance(listed, Iterable) else None
    if found is None or not all(map(_is_index, found)):
        raise TypeError(
            "indices: expected a list or a 1-d tensor of integers, got"
            f" {printable(str(indices)[:40])}; a slice is read with tensor[2:5]"
        )
    return [operator.index(one) for one in found]


def _without_ellipsis(keys: tuple[Key, ...], num_dims: int) -> tuple[int | slice, ...]:
    """Returns the indices with whole dims in the place of `...`.

    Raises:
        TypeError: one is neither an integer nor a slice.
    """
    found: list[int | slice] = []
    for key in keys:
        if isinstance(key, EllipsisType):
            found += [slice(None)] * (num_dims - len(keys) + 1)
        elif isinstance(key, slice) or _is_index(key):
            found.append(key if isinstance(key, slice) else operator.index(key))
        else:
            raise TypeError(
                f"a {type(key).__name__} is no index or slice: checkpoint.rows(name, indices) reads"
                " rows, and .torch() the tensor"
            )
    return tuple(found)


def _first_element(held: Box, box: Box) -> int | None:
    """Returns where a box begins in a chunk, in elements, if its elements are neighbours there.

    Returns None if they are not, or the box is the whole chunk, or not all of it lies in the chunk.
    """
    first, is_split, is_part = 0, False, False
    for at, size, begin, num in zip(held.offsets, held.sizes, box.offsets, box.sizes, strict=True):
        if begin < at or begin + num > at + size:
            return None
        is_part |= num != size
        if is_split and num != size:
            return None
        is_split |= num > 1
        first = first * size + begin - at
    return first if is_part else None


def _is_index(key: object) -> bool:
    is_scalar = not isinstance(key, torch.Tensor) or (key.ndim == 0 and key.dtype is not torch.bool)
    return hasattr(key, "__index__") and not isinstance(key, bool) and is_scalar


def _range(key: int | slice, size: int) -> range:
    """Returns the elements of one dim that an index or a slice means."""
    if isinstance(key, slice):
        start, stop, step = key.indices(size)
        if step != 1:
            raise IndexError("only slices of step 1 are read")
        return range(start, max(start, stop))
    if not -size <= key < size:
        raise IndexError(f"index {key} is out of range for a dim of {size}")
    return range(key % size, key % size + 1)
