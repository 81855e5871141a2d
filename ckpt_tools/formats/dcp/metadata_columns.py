"""Reads a `.metadata` of very many chunks as arrays, much faster than `metadata` does.

It also needs much less memory. Chunks in a list and places in a dict stand side by side.
`pickle_columns` turns such stretches into columns. The rest goes through `metadata`, with
placeholders that show which tensor each stretch belongs to. An irregular file is left to
`metadata`, which also reports its errors.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ckpt_tools.core.catalog import TORCH_ZIP
from ckpt_tools.core.chunk_table import ChunkTable
from ckpt_tools.errors import FormatError
from ckpt_tools.formats.dcp.metadata import (
    FILESYSTEM,
    METADATA,
    ColumnRange,
    ItemLocation,
    Metadata,
    parse_metadata,
)
from ckpt_tools.formats.dcp.pickle_columns import (
    Argument,
    Ints,
    IrregularPickle,
    ObjectWindow,
    Remainder,
    ShapeGroup,
    numbers_of_size,
    unframed,
    windows,
)

_CHUNK, _INDEX, _INFO = (
    (METADATA, "ChunkStorageMetadata"),
    (METADATA, "MetadataIndex"),
    (FILESYSTEM, "_StorageInfo"),
)
_CLASSES = (_CHUNK, _INDEX, _INFO)
_MAX_KEY = 1 << 62
_MAX_DIMS = 16
_LEAST = 4  # objects of a stretch; shorter ones stay in the rest
_LEAST_MEAN = 8  # objects of the stretches of a pickle whose columns are worth their cost
_MAX_OBJECT_BYTES = 64 << 20  # of a pickle that may be read as objects, for their memory


def read_bulk(data: bytes, where: str) -> tuple[Metadata, dict[str, ChunkTable]] | None:
    """Reads a `.metadata`, with the chunks of tensors as arrays.

    Returns:
        The metadata, whose `places` has only those of objects, and the chunks by FQN. None if the
        file is wrong, or less regular than the files of torch and this tool. `metadata.parse` then
        reads it.
    """
    try:
        plain = unframed(data)
        del data
        found = _Stretches()
        rest = Remainder(plain)
        for number, window in enumerate(windows(plain, rest)):
            # tensors of one or two chunks are read faster as objects
            is_worth = (
                number or window.mean_stretch >= _LEAST_MEAN or len(plain) > _MAX_OBJECT_BYTES
            )
            if not is_worth:
                return None
            found.take(window, rest)
        small = rest.finish()
        if not found.ranges:
            return None
        del plain, rest
        metadata = parse_metadata(small, where, found.ranges)
        if metadata.num_place_ranges != sum(one.is_places for one in found.ranges):
            return None  # some stand elsewhere, where no reader looks
        return metadata, _join(metadata, found)
    except (IrregularPickle, FormatError):
        return None


class _Columns:
    """Columns of numbers that arrive in parts, with one row per object."""

    def __init__(self, *names: str) -> None:
        self._parts: dict[str, list[Ints]] = {name: [] for name in names}

    def add(self, **columns: Ints) -> None:
        for name, values in columns.items():
            self._parts[name].append(values)

    def joined(self, name: str) -> Ints:
        """Returns the whole column, and can do so only once.

        The dims of a 2-d column are as many as its widest part has.
        """
        parts = self._parts.pop(name)
        if not parts:
            return np.zeros((0, 0), np.int64)
        if parts[0].ndim == 2:
            width = max(p.shape[1] for p in parts)
            parts = [np.pad(p, ((0, 0), (0, width - p.shape[1]))) for p in parts]
        return np.concatenate(parts)


class _Stretches:
    """All stretches of a pickle. The number of a stretch is its persistent id."""

    def __init__(self) -> None:
        self.ranges: list[ColumnRange] = []
        self.chunks = _Columns("ndim", "offsets", "sizes")
        self.places = _Columns("ndim", "offsets", "fqn", "file", "start", "nbytes")
        self.strings: dict[str, int] = {}
        self._num_chunks = self._num_places = 0
        # strings in the memo: their memo indices, in order, and their numbers in `strings`
        self._texts: list[tuple[Ints, Ints]] = []

    def take(self, window: ObjectWindow, rest: Remainder) -> None:
        """Takes the stretches of a window out of the rest."""
        bases: Ints = np.zeros(len(window.starts), np.int64)
        chunks, indices = [], []
        memos = np.concatenate([[0], np.cumsum(window.num_memos)])
        for first, last in window.stretches():
            rest.walk(int(window.starts[first]))
            if _class(window, first, rest) == _INFO:  # its index is not a regular object
                rest.walk(int(window.ends[first]))
                first += 1
            kind = _class(window, first, rest) if last - first >= _LEAST else None
            if kind not in (_CHUNK, _INDEX):
                rest.walk(int(window.ends[last - 1]))
                continue
            last -= kind == _INDEX and (last - first) % 2
            bases[first:last] = rest.num_memos + memos[first:last] - memos[first]
            if kind == _CHUNK:
                one = ColumnRange(self._num_chunks, self._num_chunks + last - first)
                self._num_chunks = one.stop
                chunks.append((first, last))
            else:
                one = ColumnRange(
                    self._num_places, self._num_places + (last - first) // 2, is_places=True
                )
                self._num_places = one.stop
                indices.append((first, last))
            by = b"J" + struct.pack("<i", len(self.ranges)) + (b"QN" if one.is_places else b"Q")
            rest.replace(int(window.ends[last - 1]), int(memos[last] - memos[first]), by)
            self.ranges.append(one)
        self._extract(window, rest.names, bases, _ranges(chunks, 1), _ranges(indices, 2))

    def _extract(
        self,
        window: ObjectWindow,
        names: Mapping[int, object],
        bases: Ints,
        chunks: Ints,
        indices: Ints,
    ) -> None:
        """Reads the columns of a window: of chunks, and of pairs of an index and a place."""
        numbers = np.full(len(bases), -1, np.int64)  # the number of the chunk, or of the pair
        numbers[chunks] = np.arange(len(chunks))
        numbers[indices] = numbers[indices + 1] = np.arange(len(indices))
        expected = np.zeros(len(bases), np.int8)
        expected[chunks], expected[indices], expected[indices + 1] = 1, 2, 3
        tables = {1: _Table(len(chunks)), 2: _Table(len(indices)), 3: _Table(len(indices))}
        # references to earlier strings: rows, column, indices in the memo
        seen: list[tuple[_Rows, str, Ints]] = []
        texts: list[tuple[Ints, Ints]] = []
        for kind in window.kinds:
            is_mine = numbers[kind.numbers] >= 0
            if not is_mine.any():
                continue
            mine = ShapeGroup(kind.shape, kind.numbers[is_mine], kind.rows[is_mine])
            class_, fields = kind.shape.resolved(names)
            which = _CLASSES.index(class_) + 1 if class_ in _CLASSES else 0
            if not which or (expected[mine.numbers] != which).any():
                raise IrregularPickle
            if which == 2:
                fields = {"offset": None, **fields}  # the index of an object has no offset
            row = tables[which].rows(mine, numbers[mine.numbers], names)
            for name, value in fields.items():
                if name in ("fqn", "relative_path") and isinstance(value, Argument):
                    self._put_text(row, str(name), value, bases, seen, texts)
                else:
                    row.put(
                        name,
                        value,
                        is_size=name in ("offsets", "sizes") or (name == "offset" and which == 2),
                    )
        self._texts += texts
        for row, name, found in seen:
            row.table.put(name, row.at, self._look_up(found, names))
        self._add(tables)

    def _put_text(
        self,
        row: _Rows,
        name: str,
        value: Argument,
        bases: Ints,
        seen: list[tuple[_Rows, str, Ints]],
        texts: list[tuple[Ints, Ints]],
    ) -> None:
        if value.opcode in "hj":
            seen.append((row, name, row.kind.indices(value)))
            return
        if value.opcode != "\x8c":
            raise IrregularPickle
        found, which = row.kind.texts(value)
        strings = np.array(
            [self.strings.setdefault(text, len(self.strings)) for text in found], np.int64
        )[which]
        row.table.put(name, row.at, strings)
        if value.memo >= 0:
            texts.append((bases[row.kind.numbers] + value.memo, strings))

    def _look_up(self, indices: Ints, names: Mapping[int, object]) -> Ints:
        """Returns the numbers of the strings at these indices of the memo."""
        wanted, which = np.unique(indices, return_inverse=True)
        found = np.full(len(wanted), -1, np.int64)
        for number, index in enumerate(wanted.tolist()):
            text = names.get(index)
            if isinstance(text, str):
                found[number] = self.strings.setdefault(text, len(self.strings))
        for known, strings in reversed(self._texts):  # the string is usually a recent one
            if (found >= 0).all():
                break
            order = np.argsort(known, kind="stable")
            at = np.minimum(np.searchsorted(known, wanted, sorter=order), len(known) - 1)
            fits = known[order[at]] == wanted
            found[fits] = strings[order[at[fits]]]
        if (found < 0).any():
            raise IrregularPickle
        return found[which]

    def _add(self, tables: Mapping[int, _Table]) -> None:
        chunk, index, info = tables[1], tables[2], tables[3]
        if chunk.num_rows:
            if (chunk.column("offsets.ndim") != chunk.column("sizes.ndim")).any():
                raise IrregularPickle
            self.chunks.add(
                ndim=chunk.column("sizes.ndim"),
                offsets=chunk.column("offsets"),
                sizes=chunk.column("sizes"),
            )
        if index.num_rows:
            self.places.add(
                ndim=index.column("offset.ndim"),
                offsets=index.column("offset"),
                fqn=index.column("fqn"),
                file=info.column("relative_path"),
                start=info.column("offset"),
                nbytes=info.column("length"),
            )


def _class(window: ObjectWindow, number: int, rest: Remainder) -> object:
    """Returns the class of an object, as module and name."""
    shape = window.kinds[window.shapes[number]].shape
    return rest.names.get(shape.index(shape.kind))


class _Table:
    """Columns of one kind of object in a window; every row must be filled."""

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self._columns: dict[str, Ints] = {}
        self._filled: dict[str, int] = {}

    def put(self, name: str, at: Ints, values: Ints) -> None:
        self._columns.setdefault(name, np.zeros(self.num_rows, np.int64))[at] = values
        self._filled[name] = self._filled.get(name, 0) + len(at)

    def put_dims(self, name: str, at: Ints, dims: Sequence[Ints]) -> None:
        column = self._columns.setdefault(name, np.zeros((self.num_rows, 0), np.int64))
        if column.shape[1] < len(dims):
            column = self._columns[name] = np.pad(
                column, ((0, 0), (0, len(dims) - column.shape[1]))
            )
        for dim, values in enumerate(dims):
            column[at, dim] = values
        self._filled[name] = self._filled.get(name, 0) + len(at)

    def rows(self, kind: ShapeGroup, at: Ints, names: Mapping[int, object]) -> _Rows:
        """Returns the rows that objects of one shape fill."""
        return _Rows(self, kind, at, names)

    def column(self, name: str) -> Ints:
        if self._filled.get(name) != self.num_rows:
            raise IrregularPickle
        return self._columns[name]


class _Rows(NamedTuple):
    """Some rows of a table, filled by objects of one shape."""

    table: _Table
    kind: ShapeGroup
    at: Ints
    names: Mapping[int, object]

    def put(self, name: object, value: Any, is_size: bool) -> None:
        """Fills a field of the objects."""
        if is_size:
            self._put_size(str(name), value)
        elif name in ("offset", "length"):
            self.table.put(str(name), self.at, self.kind.ints(value))
        elif name == "index" and value is not None:
            self.kind.ints(value)  # checked to be a number; its value is not needed
        elif name not in ("index", "transform_descriptors") or value is not None:
            raise IrregularPickle

    def _put_size(self, name: str, value: Any) -> None:
        """Fills columns with a `torch.Size`; the offset of an object is None and gets -1 dims."""
        numbers: Sequence[object] = ()
        if value is not None:
            numbers = numbers_of_size(value)
            if (
                self.names.get(self.kind.shape.index(value.function)) != ("torch", "Size")
                or len(numbers) > _MAX_DIMS
            ):
                raise IrregularPickle
        self.table.put(
            f"{name}.ndim",
            self.at,
            np.full(len(self.at), -1 if value is None else len(numbers), np.int64),
        )
        self.table.put_dims(name, self.at, [self.kind.ints(number) for number in numbers])


def _ranges(spans: Sequence[tuple[int, int]], step: int) -> Ints:
    return (
        np.concatenate([np.arange(first, last, step) for first, last in spans])
        if spans
        else np.zeros(0, np.int64)
    )


# ---- joining chunks and places -------------------------------------------------------------------


class _Keys(NamedTuple):
    """The key of a chunk: one number for its tensor and its offsets."""

    base: Ints  # [t]
    strides: Ints  # [t, d]
    shapes: Ints  # [t, d]
    ndim: Ints  # [t]

    def of(self, tensor: Ints, offsets: Ints, ndim: Ints) -> Ints:
        """Returns the key of each chunk; -1 for a chunk that cannot belong to its tensor."""
        width = self.strides.shape[1]
        offsets = np.pad(offsets, ((0, 0), (0, max(0, width - offsets.shape[1]))))
        fits = (tensor >= 0) & (ndim == self.ndim[tensor]) & (offsets[:, width:] == 0).all(axis=1)
        offsets = offsets[:, :width]
        fits &= ((offsets >= 0) & (offsets <= self.shapes[tensor])).all(axis=1)
        keys = self.base[tensor] + (np.where(fits[:, None], offsets, 0) * self.strides[tensor]).sum(
            axis=1
        )
        return np.where(fits, keys, -1)


def _keys(shapes: Sequence[tuple[int, ...]]) -> _Keys:
    width, base = max(map(len, shapes), default=0), 0
    bases, strides = np.zeros(len(shapes), np.int64), np.zeros((len(shapes), width), np.int64)
    table = np.zeros((len(shapes), width), np.int64)
    for number, shape in enumerate(shapes):
        bases[number] = base
        table[number, : len(shape)] = shape
        for dim in range(len(shape)):
            strides[number, dim] = math.prod(n + 1 for n in shape[dim + 1 :])
        base += math.prod(n + 1 for n in shape)
        if base >= _MAX_KEY:
            raise IrregularPickle
    return _Keys(bases, strides, table, np.array([len(s) for s in shapes], np.int64))


def _join(metadata: Metadata, found: _Stretches) -> dict[str, ChunkTable]:
    """Returns the chunks of every tensor, each with its place.

    Raises:
        IrregularPickle: a chunk has no place, or two places differ.
    """
    fqns = list(metadata.tensors)
    keys = _keys([metadata.tensors[fqn].shape for fqn in fqns])
    tensor_of = {fqn: number for number, fqn in enumerate(fqns)}
    single = [(k, p) for k, p in metadata.places.items() if k[0] in tensor_of and k[1] is not None]
    metadata.places = {k: p for k, p in metadata.places.items() if k[1] is None}
    files = dict[str, int]()
    place_keys, place_files, starts, nbytes = _all_places(
        found, keys, tensor_of, single, files, metadata
    )
    order = np.argsort(place_keys, kind="stable")
    ordered = place_keys[order]
    same = np.flatnonzero((ordered[1:] == ordered[:-1]) & (ordered[1:] >= 0))
    for column in (place_files, starts, nbytes):
        if (column[order[same]] != column[order[same + 1]]).any():
            raise IrregularPickle
    tensors, offsets, sizes, ndim, lengths = _all_chunks(found, fqns, metadata)
    wanted = keys.of(tensors, offsets, ndim)
    at = np.minimum(np.searchsorted(ordered, wanted), max(len(ordered) - 1, 0))
    if (wanted < 0).any() or not len(ordered) or (ordered[at] != wanted).any():
        raise IrregularPickle
    which = order[at]
    names = tuple(files)
    numbers, starts, nbytes = place_files[which].astype(np.int32), starts[which], nbytes[which]
    result, first = {}, 0
    for fqn, count in zip(fqns, lengths, strict=True):
        rows, dims = slice(first, first + count), len(metadata.tensors[fqn].shape)
        result[fqn] = ChunkTable(
            offsets[rows, :dims],
            sizes[rows, :dims],
            names,
            numbers[rows],
            starts[rows],
            nbytes[rows],
            TORCH_ZIP,
        )
        first += count
    return result


def _all_places(
    found: _Stretches,
    keys: _Keys,
    tensor_of: Mapping[str, int],
    single: Sequence[Any],
    files: dict[str, int],
    metadata: Metadata,
) -> tuple[Ints, Ints, Ints, Ints]:
    """Returns keys, files, starts and lengths of all places, including those outside of stretches.

    The places of objects go to `metadata`.
    """
    strings = list(found.strings)
    ndim, offsets, fqn, file = (
        found.places.joined(name) for name in ("ndim", "offsets", "fqn", "file")
    )
    start, nbytes = found.places.joined("start"), found.places.joined("nbytes")
    if not len(ndim):
        raise IrregularPickle
    if (np.abs(start) >= _MAX_KEY).any() or (np.abs(nbytes) >= _MAX_KEY).any():
        raise IrregularPickle
    for row in np.flatnonzero(ndim < 0).tolist():
        place = ItemLocation(strings[file[row]], int(start[row]), int(nbytes[row]))
        if metadata.places.setdefault((strings[fqn[row]], None), place) != place:
            raise IrregularPickle
    fqn, file, ndim, offsets, start, nbytes = (
        column[ndim >= 0] for column in (fqn, file, ndim, offsets, start, nbytes)
    )
    tensor = np.array([tensor_of.get(text, -1) for text in strings], np.int64)[fqn]
    used, which = np.unique(file, return_inverse=True)
    numbers = np.array([files.setdefault(strings[i], len(files)) for i in used], np.int64)[which]
    if single:
        alone: npt.NDArray[Any] = np.zeros(
            (len(single), max([offsets.shape[1], *(len(k[1]) for k, _ in single)])), np.int64
        )
        for row, (key, _) in enumerate(single):
            alone[row, : len(key[1])] = key[1]
        more = np.array(
            [
                [
                    tensor_of[k[0]],
                    len(k[1]),
                    files.setdefault(p.file, len(files)),
                    p.start,
                    p.nbytes,
                ]
                for k, p in single
            ],
            np.int64,
        )
        offsets = np.concatenate(
            [np.pad(offsets, ((0, 0), (0, alone.shape[1] - offsets.shape[1]))), alone]
        )
        tensor, ndim, numbers, start, nbytes = (
            np.concatenate([old, new])
            for old, new in zip((tensor, ndim, numbers, start, nbytes), more.T, strict=True)
        )
    return keys.of(tensor, offsets, ndim), numbers, start, nbytes


def _all_chunks(
    found: _Stretches, fqns: Sequence[str], metadata: Metadata
) -> tuple[Ints, Ints, Ints, Ints, list[int]]:
    """Returns tensor, offsets, sizes and dims of all chunks, and the number of chunks per tensor.

    The chunks are in the order of the tensors.
    """
    ndim, offsets, sizes = (found.chunks.joined(name) for name in ("ndim", "offsets", "sizes"))
    width = max([offsets.shape[1], *(len(m.shape) for m in metadata.tensors.values())])
    offsets, sizes = (
        (
            np.pad(part, ((0, 0), (0, width - part.shape[1])))
            if len(ndim)
            else np.zeros((0, width), np.int64)
        )
        for part in (offsets, sizes)
    )
    blocks: list[tuple[Ints, Ints, Ints]] = []
    lengths = []
    for fqn in fqns:
        count = 0
        for part in metadata.tensors[fqn].boxes:
            if isinstance(part, ColumnRange):
                rows = slice(part.start, part.stop)
                blocks.append((offsets[rows], sizes[rows], ndim[rows]))
            else:
                row = np.zeros((2, 1, width), np.int64)
                if len(part.offsets) > width or len(part.sizes) != len(part.offsets):
                    raise IrregularPickle
                row[0, 0, : len(part.offsets)], row[1, 0, : len(part.sizes)] = (
                    part.offsets,
                    part.sizes,
                )
                blocks.append((row[0], row[1], np.array([len(part.offsets)], np.int64)))
            count += len(blocks[-1][2])
        lengths.append(count)
    if not blocks:
        raise IrregularPickle
    joined = [np.concatenate(parts) for parts in zip(*blocks, strict=True)]
    return np.repeat(np.arange(len(fqns)), lengths), joined[0], joined[1], joined[2], lengths
