"""`torch.save` files: a zip of a (nested) state dict (`.pt`, `.pth` or `.bin`).

Hugging Face's `.bin` shards with an index are read too. `data.pkl` says how tensors lie in
storages, and each storage is a record of the zip. A tensor is therefore a range of bytes here too,
even as a view of a shared storage. Plain values become objects, as DCP would have stored them.
Values of unknown types are counted, and none of their code runs.

Source: torch 2.13 `torch/serialization.py`; confirmed on files that it wrote.
"""

from __future__ import annotations

import math
import struct
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ckpt_tools.core.box import row_major_strides, whole
from ckpt_tools.core.catalog import (
    RAW,
    Catalog,
    Extent,
)
from ckpt_tools.core.checksum import crc32
from ckpt_tools.core.coverage import MAX_REPEATED_BYTES
from ckpt_tools.core.plan import Slot, Target
from ckpt_tools.errors import (
    CatalogError,
    CheckpointError,
    FormatError,
    IntegrityError,
    PlanError,
    printable,
)
from ckpt_tools.formats.base import Request, guess_bare, locate_bare
from ckpt_tools.formats.builder import CatalogBuilder, UnreadValues, name_of
from ckpt_tools.formats.in_memory import InMemoryFile
from ckpt_tools.formats.pickle.state import (
    DTensorShard,
    Path,
    ShardedTensorShard,
    TensorView,
    TupleItem,
    TypedKey,
    UnreadTensor,
    has_numpy,
    is_number,
    is_value,
    kind_of,
    leaves,
    most_nodes,
    python_numbers,
    unpickled,
)
from ckpt_tools.formats.pickle.write import TensorRecord
from ckpt_tools.formats.safetensors import compare_index, read_index, shard_size
from ckpt_tools.formats.zip.directory import LOCAL
from ckpt_tools.formats.zip.read import ZipRecord, data_start, read_directory
from ckpt_tools.formats.zip.write import TorchArchive
from ckpt_tools.storage import Store, read

# an expanded tensor of a few bytes could keep a reader busy for days
NAME = "torch_save"
INDEX = "pytorch_model.bin.index.json"
LOOKS_FOR = "*.pt, *.pth, *.bin"
SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
locate, guess = locate_bare, guess_bare
TOP_LEVEL = "top level"  # key of a remark in `Catalog.extras`
_MAX_PICKLE_BYTES = 256 << 20
_TAIL_BYTES = 1536
_MAX_HOLES = 10_000
_ALL_RANKS = (
    "give the directory with the files of all ranks, named …rank_0.pt, …rank_1.pt and so on"
)

_STATE_DICT = (
    "a whole module needs its own code to be read: load it where that code is, and save its"
    " state_dict()"
)


def recognise(files: Mapping[str, int]) -> bool:
    """Tells whether the index of `.bin` shards, or `pytorch_model.bin`, is among the files."""
    return INDEX in files or "pytorch_model.bin" in files


def read_catalog(store: Store) -> Catalog:
    """Reads `data.pkl` and the zip directory of every file; see `Format.read_catalog`."""
    files = store.list_files()
    weight_map = read_index(store, INDEX) if INDEX in files else {}
    names = sorted(set(weight_map.values())) or [n for n in files if n.endswith(SUFFIXES)][:1]
    return read_files(store, names, weight_map, InMemoryFile())


def read_readable(store: Store) -> tuple[Catalog, dict[str, CheckpointError], dict[str, str]]:
    """Reads the shards that can be read; see `safetensors.read_readable`."""
    if INDEX not in store.list_files():
        raise FormatError(f"one file, and no index of several ({printable(store.url)})")
    weight_map = read_index(store, INDEX)
    broken: dict[str, CheckpointError] = {}
    sound: list[str] = []
    for name in sorted(set(weight_map.values())):
        try:
            read_files(store, [name], {}, InMemoryFile())
            sound.append(name)
        except (FormatError, CatalogError) as error:
            broken[name] = error
    if not sound:
        raise FormatError(f"no shard can be read: {next(iter(broken.values()))}")
    catalog = read_files(store, sound, {}, InMemoryFile())
    lost = {f: n for f, n in weight_map.items() if n in broken or f not in catalog.tensors}
    try:
        compare_index(
            {f: n for f, n in weight_map.items() if f not in lost}, catalog.tensors, INDEX
        )
    except FormatError as error:  # the tensor is there, in another file
        broken[INDEX] = error
    return catalog, broken, lost


def read_files(
    store: Store, names: Sequence[str], weight_map: Mapping[str, str], memory_file: InMemoryFile
) -> Catalog:
    """Reads some files of a directory.

    Args:
        store: the directory.
        names: names of the files.
        weight_map: the file of each tensor, if there is an index.
        memory_file: receives the plain values, and goes into the catalog.

    Raises:
        FormatError, CatalogError: see `Format.read_catalog`.
    """
    found = CatalogBuilder(memory_file=memory_file)
    for name in names:
        found.sizes[name] = shard_size(store, name)
        for path, value, extents in read_leaves(store, name, found.sizes[name], found.others):
            if isinstance(value, (DTensorShard, ShardedTensorShard)):
                raise FormatError(
                    f"the file has only one rank's part of a tensor: {printable(name_of(path))!r}"
                    f" ({printable(name)})",
                    hint=_ALL_RANKS,
                )
            if isinstance(value, TensorView):
                found.whole(path, value, extents[0], name)
            else:
                found.value(path, value, name)
    unknown = [printable(kind) for kind in found.others if "." in kind]
    if unknown and not found.tensors and not found.others.tensors:
        raise FormatError(
            f"no tensors of a known type, but {', '.join(unknown[:5])}"
            f" ({', '.join(map(printable, names))})",
            hint=(
                _STATE_DICT
                if any(kind.startswith(("torch.nn.", "__main__.")) for kind in unknown)
                else _ALL_RANKS
            ),
        )
    compare_index(weight_map, found.tensors, INDEX)
    found.extras = _top_level(found.paths.values())
    catalog = found.finish(NAME)
    is_nested = any(len(path) > 1 for path in found.paths.values())
    return catalog if is_nested else replace(catalog, paths={})


def _top_level(paths: Iterable[Path]) -> dict[str, str]:
    """Returns a remark on a file whose top level is not a dict with names, for `Catalog.extras`."""
    for path in paths:
        if not path:
            return {TOP_LEVEL: "one value without a name, which is called tensor"}
        if path[0] == "":
            return {TOP_LEVEL: "an entry with an empty name, which is called tensor"}
        if type(path[0]) is int:
            return {TOP_LEVEL: "a list, whose items are called 0, 1, …"}
    return {}


# ---- one file ------------------------------------------------------------------------------------


class OpenedFile:
    """A `torch.save` file with its `data.pkl` and zip directory read; `root` is the saved value."""

    def __init__(self, store: Store, name: str, size: int, others: Counter[str]) -> None:
        """Reads the file; `others` counts types that are not known.

        Raises:
            FormatError: it is not a `torch.save` archive, or it is malformed.
        """
        self._store, self._size, self.name = store, size, name
        self._where = where = printable(name)
        extent = Extent(name, 0, size)
        head = read(store, name, 0, min(2, size))
        if head != b"PK":
            hint = (
                "files of torch before 1.6 are no zips: load and save it again with torch, if you"
                " trust it"
                if head[:1] == b"\x80"
                else None
            )
            raise FormatError(f"not a torch.save archive: {where} begins with {head!r}", hint=hint)
        tail = min(size, _TAIL_BYTES)
        try:
            self._records, self._directory = read_directory(
                store, extent, read(store, name, size - tail, tail)
            )
        except struct.error as error:
            raise FormatError(f"a zip is truncated ({where})") from error
        if "data.pkl" not in self._records:
            raise FormatError(
                f"not a torch.save archive: {where} has no data.pkl",
                hint="TorchScript and torch.export files are programs",
            )
        if self._records["data.pkl"].nbytes > _MAX_PICKLE_BYTES:
            raise FormatError(
                f"a pickle is too long: {self._records['data.pkl'].nbytes} bytes ({where})"
            )
        self._places: dict[str, tuple[int, ZipRecord]] = {}
        at = self._start(self._records["data.pkl"])
        data = read(store, name, at, self._records["data.pkl"].nbytes)
        self._check_pickle(data)
        self.pickle_start, self.pickle_nbytes = at, len(data)
        self.root = unpickled(data, where, lambda kind: others.update({kind: 0}))

    def _check_pickle(self, data: bytes) -> None:
        """Compares the pickle with the CRC-32 that the zip's directory has for it.

        The pickle has every name, every plain value, and the place of every tensor, so one flipped
        bit in it changes what is read without any other sign.

        Raises:
            IntegrityError: they differ.
        """
        (expected,) = struct.unpack_from("<I", self._directory, self._records["data.pkl"].crc_at)
        # torch.serialization.set_crc32_options(False) writes 0
        if expected and (got := crc32(data)) != expected:
            raise IntegrityError(
                f"a pickle is damaged: expected CRC-32 {expected:08x}, got {got:08x} (data.pkl in"
                f" {self._where})",
                hint="names and values cannot be trusted; take another copy of the file",
            )

    def find(self, views: Iterable[TensorView]) -> None:
        """Looks up where the storages of tensors begin.

        A store in a network looks up all of them at once.
        """
        used = {key for view in views if (key := f"data/{view.storage.key}") not in self._places}
        missing = sorted(used - self._records.keys())
        if missing:
            raise FormatError(f"a storage is missing: {printable(missing[0])} ({self._where})")
        self._store.will_read((self.name, self._records[key].header, LOCAL.size) for key in used)
        for key in sorted(used, key=lambda k: self._records[k].header):
            self._places[key] = self._start(self._records[key]), self._records[key]

    def extent(self, view: TensorView, fqn: str) -> Extent:
        """Returns where a tensor's bytes lie; see `find`.

        Raises:
            FormatError: the tensor exceeds its storage.
        """
        key = f"data/{view.storage.key}"
        if key not in self._places:
            self.find([view])
        start, record = self._places[key]
        (crc,) = struct.unpack_from("<I", self._directory, record.crc_at)
        return _extent(self.name, fqn, view, start, record.nbytes, crc)

    def payload(self, view: TensorView) -> bytes:
        """Returns the bytes from a tensor's first element to its last.

        Raises:
            FormatError: the tensor exceeds its storage.
            IntegrityError: the bytes differ from the CRC-32 in the archive.
        """
        extent = self.extent(view, "")
        data = read(self._store, extent.file, extent.start, extent.nbytes)
        if extent.crc32 is not None and crc32(data) != extent.crc32:
            raise IntegrityError(f"a record is damaged: another CRC-32 ({printable(self.name)})")
        return data

    def _start(self, record: ZipRecord) -> int:
        """Returns where a record's data begins, from its local header."""
        if not 0 <= record.header <= self._size - LOCAL.size:
            raise FormatError(
                f"a zip record has an impossible position: byte {record.header} ({self._where})"
            )
        start = record.header + data_start(
            read(self._store, self.name, record.header, LOCAL.size), ZipRecord(0, record.nbytes, 0)
        )
        if start + record.nbytes > self._size:
            raise FormatError(
                f"a record runs past its file: {start + record.nbytes} of {self._size} bytes"
                f" ({self._where})"
            )
        return start


def pickle_range(store: Store, name: str, size: int) -> tuple[int, int]:
    """Returns where the pickle of a `torch.save` file lies: its start and bytes."""
    opened = OpenedFile(store, name, size, UnreadValues())
    return opened.pickle_start, opened.pickle_nbytes


def read_leaves(
    store: Store, name: str, size: int, others: UnreadValues
) -> Iterator[tuple[Path, object, tuple[Extent, ...]]]:
    """Yields tensors and plain values of a file.

    Each comes with the path of keys, the value in the pickle, and the extents of a tensor's parts.

    Args:
        store: the store of the file.
        name: name of the file.
        size: its bytes.
        others: receives values of other types.

    Raises:
        FormatError: it is not a `torch.save` archive, or it is malformed.
    """
    opened = OpenedFile(store, name, size, others)
    found = list(leaves(opened.root, printable(name), most_nodes(opened.pickle_nbytes)))
    opened.find(view for _, value in found for view in views_of(value))
    for path, value in found:
        if isinstance(value, UnreadTensor):
            others.tensors[path] = value.kind
        elif isinstance(value, (TensorView, DTensorShard, ShardedTensorShard)) or is_value(value):
            if has_numpy(value):
                others.numpy.append(path)
            value = python_numbers(value)
            yield path, value, tuple(opened.extent(view, name_of(path)) for view in views_of(value))
        else:
            others[kind_of(value)] += 1
            others.foreign[path] = kind_of(value)


def views_of(value: object) -> tuple[TensorView, ...]:
    """Returns the parts of a tensor that are in the file; none for a value that is not a tensor."""
    if isinstance(value, ShardedTensorShard):
        return tuple(view for view, _ in value.parts)
    return (
        (value.local,)
        if isinstance(value, DTensorShard)
        else (value,)
        if isinstance(value, TensorView)
        else ()
    )


def _extent(file: str, fqn: str, view: TensorView, start: int, nbytes: int, crc: int) -> Extent:
    itemsize, numel = view.dtype.itemsize, math.prod(view.sizes)
    last = (
        view.offset + sum((n - 1) * s for n, s in zip(view.sizes, view.strides, strict=True))
        if numel
        else view.offset - 1
    )
    if (last + 1) * itemsize > nbytes:
        raise FormatError(
            f"a tensor exceeds its storage: {printable(fqn)!r}, element {last} of"
            f" {nbytes // itemsize} ({printable(file)})"
        )
    if numel > max(last + 1 - view.offset, MAX_REPEATED_BYTES // itemsize):
        raise FormatError(
            f"a tensor repeats its elements too often: {numel:,} of {last + 1 - view.offset:,}"
            f" stored ones ({printable(fqn)!r} in {printable(file)})",
            hint="save the tensor before it is expanded",
        )
    is_flat = all(
        n == 1 or s == r
        for n, s, r in zip(view.sizes, view.strides, row_major_strides(view.sizes), strict=True)
    )
    count = (last + 1 - view.offset) * itemsize
    known = crc if crc and count == nbytes else None
    return Extent(
        file,
        start + view.offset * itemsize,
        count,
        RAW,
        None if is_flat or not numel else view.strides,
        known,
    )


# ---- writing -------------------------------------------------------------------------------------


def lay_out(request: Request) -> Target:
    """Lays out one file, with tensors and plain values nested by their paths; see `Format.lay_out`.

    Raises:
        PlanError: a path leads through a value that is not a dict.
    """
    keys = {tensor.fqn: str(number) for number, tensor in enumerate(request.tensors)}
    held = {t.fqn: TensorRecord(t.dtype, t.shape, keys[t.fqn]) for t in request.tensors}
    archive = TorchArchive(nested({**held, **request.values}, request.paths))
    name, slots = request.file_name, {}
    for tensor in request.tensors:
        box = whole(tensor.shape)
        slots[tensor.fqn] = (
            Slot(box, name, archive.room(keys[tensor.fqn], box.numel * tensor.dtype.itemsize)),
        )
    archive.finish()
    literals, trailers = archive.around(name)
    return Target(
        NAME, {name: archive.nbytes}, slots, tuple(literals), tuple(trailers), world_size=1
    )


def nested(flat: Mapping[str, Any], paths: Mapping[str, Path]) -> Any:
    """Returns values by flat name as nested dicts, lists and tuples.

    A value without a path lies at the top under its name. Numbered keys below an optimizer's
    `state` become ints again.

    Raises:
        PlanError: one name leads through another entry's value.
    """
    root: dict[str | int, Any] = {}
    for fqn, value in flat.items():
        path = paths.get(fqn) or (fqn,)
        owner = root
        for depth, key in enumerate(path[:-1]):
            owner = owner.setdefault(_key(path, depth, key), {})
            if not isinstance(owner, dict):
                raise PlanError(
                    f"two entries do not fit into one state dict: {printable(fqn)!r} leads through"
                    " a value"
                )
        if owner.setdefault(_key(path, len(path) - 1, path[-1]), value) is not value:
            raise PlanError(f"two entries have one name: {printable(fqn)!r}")
    if any(isinstance(key, _Index) for key in root) and all(
        isinstance(key, _Index) or is_number(key) for key in root
    ):  # a list at the top, of which some items are tensors with a number as their name
        root = {_Index(int(key)): value for key, value in root.items()}
    return _with_lists(root)


def _key(path: Path, depth: int, key: str | int) -> Any:
    if isinstance(key, int):
        return _TupleIndex(key) if isinstance(key, TupleItem) else _Index(key)
    if isinstance(key, TypedKey):
        return key.original
    return (
        int(key)
        if is_number(key) and depth and path[depth - 1] == "state" and depth + 1 < len(path)
        else key
    )


class _Index(int):
    """A position in a list; its type distinguishes it from a number that is a dict's key.

    A dict treats both as the same key.
    """


class _TupleIndex(_Index):
    """A position in a tuple."""


def _with_lists(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    items = {key: _with_lists(item) for key, item in value.items()}
    if items and all(isinstance(key, _Index) for key in items):
        if max(items) - len(items) > _MAX_HOLES:
            raise PlanError(f"a list lacks {max(items) - len(items)} of its items")
        kind = tuple if all(isinstance(key, _TupleIndex) for key in items) else list
        # None for an item that was left out
        return kind(items.get(number) for number in range(max(items) + 1))
    return {int(key) if isinstance(key, _Index) else key: item for key, item in items.items()}
