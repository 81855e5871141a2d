"""`torch.save` files: one zip of a (nested) state dict, `.pt`, `.pth` or `.bin`; or Hugging Face's `.bin` shards with an index.

`data.pkl` tells how tensors lie in storages, each of which is a record of the zip; so a tensor is a range of bytes here too, a
view of a shared storage included. What in a state dict is no tensor stays where it is and is only counted. Types that this
reader does not know become inert stand-ins: nothing of them runs. May import levels 0 to 2 and the parts of formats before it.

Source: torch 2.13 `torch/serialization.py`, `torch/_utils.py`; confirmed on files that it wrote.
"""

from __future__ import annotations

import math
import struct
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from ckpt_tools.box import row_major_strides, whole
from ckpt_tools.catalog import RAW, TORCH_ZIP, Catalog, Chunk, Extent, TensorEntry
from ckpt_tools.dtypes import BY_NAME, BY_STORAGE_CLASS, DType
from ckpt_tools.errors import FormatError, PlanError, printable
from ckpt_tools.formats.base import Request
from ckpt_tools.formats.safetensors import compare_index, read_index, size_of
from ckpt_tools.formats.torch_zip import LOCAL, Record, data_start, read_directory
from ckpt_tools.formats.unpickle import load
from ckpt_tools.plan import Target
from ckpt_tools.storage import Store, read

NAME = "torch_save"
INDEX = "pytorch_model.bin.index.json"
LOOKS_FOR = "*.pt, *.pth, *.bin"
SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
_MAX_PICKLE_BYTES, _MAX_NODES, _MAX_DEPTH = 256 << 20, 10_000_000, 64
_TAIL_BYTES = 1536
_ALL_RANKS = "give the directory with the files of all ranks, named …rank_0.pt, …rank_1.pt and so on"


class _Storage(NamedTuple):
    key: str
    dtype: DType | None
    numel: int


class _View(NamedTuple):
    """A tensor as the pickle has it: elements of a storage."""

    storage: _Storage
    dtype: DType
    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]


class Kept:
    """Stands in for an object: takes anything, keeps its state, and does nothing."""

    state: Mapping[str, Any]

    def __new__(cls, *args: object) -> Kept:
        del args
        made = object.__new__(cls)
        made.state = {}
        return made

    def __init__(self, *args: object) -> None:
        del args

    def __setstate__(self, state: object) -> None:
        self.state = state if isinstance(state, dict) else {}


class Sharded(NamedTuple):
    """A rank's part of a DTensor: its elements, the shape of the whole, and its spec."""

    local: _View
    shape: tuple[int, ...]
    spec: Kept


def recognise(files: Mapping[str, int]) -> bool:
    """Tells whether the index of `.bin` shards, or `pytorch_model.bin` alone, is among the files."""
    return INDEX in files or "pytorch_model.bin" in files


def read_catalog(store: Store) -> Catalog:
    """Reads `data.pkl` and the zip's directory of every file; see `Format.read_catalog`."""
    files = store.list_files()
    weight_map = read_index(store, INDEX) if INDEX in files else {}
    names = sorted(set(weight_map.values())) or [n for n in files if n.endswith(SUFFIXES)][:1]
    tensors: dict[str, TensorEntry] = {}
    paths: dict[str, tuple[str | int, ...]] = {}
    sizes: dict[str, int] = {}
    others: Counter[str] = Counter()
    for name in names:
        sizes[name] = size_of(store, name)
        for path, value, extent in read_tensors(store, name, sizes[name], others):
            fqn = join(path)
            if fqn in tensors:
                raise FormatError(f"two tensors have one name: {printable(fqn)!r} ({printable(name)})")
            if isinstance(value, Sharded):
                raise FormatError(f"a part of a tensor, as one rank has it: {printable(fqn)!r} ({printable(name)})", hint=_ALL_RANKS)
            tensors[fqn], paths[fqn] = TensorEntry(fqn, value.dtype, value.sizes, (Chunk(whole(value.sizes), extent),)), path
    unknown = [printable(kind) for kind in others if "." in kind]
    if unknown and not tensors:
        raise FormatError(
            f"no tensors of a type that is known here, but {', '.join(unknown[:5])} ({', '.join(map(printable, names))})",
            hint="files of one rank with FlatParameters or ShardedTensors inside are not read yet",
        )
    compare_index(weight_map, tensors, INDEX)
    is_nested = any(len(path) > 1 for path in paths.values())
    archives = tuple(Extent(name, 0, size, TORCH_ZIP) for name, size in sizes.items())
    return Catalog(NAME, tensors, {}, paths if is_nested else {}, sizes, extras=told(others), archives=archives)


def told(others: Counter[str]) -> dict[str, str]:
    """Returns what a catalog says of values that are no tensors."""
    kinds = ", ".join(f"{printable(kind)} ({count:,})" if count else printable(kind) for kind, count in others.most_common(8))
    return {"other values": kinds} if kinds else {}


def locate(store: Store, tensors: Iterable[TensorEntry]) -> Mapping[Extent, Extent]:
    """Nothing is packed; see `Format.locate`."""
    del store, tensors
    return {}


def guess(tensors: Iterable[TensorEntry]) -> Mapping[Extent, Extent]:
    """Nothing is packed; see `Format.guess`."""
    del tensors
    return {}


def lay_out(request: Request) -> Target:
    """See `Format.lay_out`; not yet."""
    del request
    raise PlanError("torch.save files are not written yet")


# ---- one file ------------------------------------------------------------------------------------------------------------


Path = tuple[str | int, ...]


def join(path: Path) -> str:
    """Returns the name of what stands at the end of a path of keys."""
    return ".".join(map(str, path)) or "tensor"


def read_tensors(store: Store, name: str, size: int, others: Counter[str]) -> Iterator[tuple[Path, _View | Sharded, Extent]]:
    """Yields the tensors of a file: the keys on the way, what the pickle says, and where its bytes lie.

    Args:
        store: where the file is.
        name: its name.
        size: its bytes.
        others: counts what is no tensor, by type.

    Raises:
        FormatError: it is no `torch.save` file, or malformed.
    """
    where, extent = printable(name), Extent(name, 0, size)
    head = read(store, name, 0, min(2, size))
    if head != b"PK":
        hint = "files of torch before 1.6 are no zips: load and save it again with torch, if you trust it" if head[:1] == b"\x80" else None
        raise FormatError(f"not a torch.save archive: {where} begins with {head!r}", hint=hint)
    tail = min(size, _TAIL_BYTES)
    try:
        records, directory = read_directory(store, extent, read(store, name, size - tail, tail))
    except struct.error as error:
        raise FormatError(f"a zip is truncated ({where})") from error
    if "data.pkl" not in records:
        raise FormatError(f"not a torch.save archive: {where} has no data.pkl", hint="TorchScript and torch.export files are programs")
    if records["data.pkl"].nbytes > _MAX_PICKLE_BYTES:
        raise FormatError(f"a pickle is too long: {records['data.pkl'].nbytes} bytes ({where})")
    at = _start(store, name, records["data.pkl"], size)
    root = _unpickle(read(store, name, at, records["data.pkl"].nbytes), where, others)
    views = list(_tensors(root, where, others))
    used = {f"data/{_local(value).storage.key}" for _, value in views}
    missing = sorted(used - records.keys())
    if missing:
        raise FormatError(f"a storage is missing: {printable(missing[0])} ({where})")
    store.will_read((name, records[key].header, LOCAL.size) for key in used)
    places = {key: (_start(store, name, records[key], size), records[key]) for key in sorted(used, key=lambda k: records[k].header)}
    for path, value in views:
        start, record = places[f"data/{_local(value).storage.key}"]
        (crc,) = struct.unpack_from("<I", directory, record.crc_at)
        yield path, value, _extent(name, join(path), _local(value), start, record.nbytes, crc)


def _local(value: _View | Sharded) -> _View:
    return value.local if isinstance(value, Sharded) else value


def _start(store: Store, name: str, record: Record, size: int) -> int:
    """Returns where a record's data begins, from its local header."""
    if not 0 <= record.header <= size - LOCAL.size:
        raise FormatError(f"a record stands where none belongs: at byte {record.header} ({printable(name)})")
    start = record.header + data_start(read(store, name, record.header, LOCAL.size), Record(0, record.nbytes, 0))
    if start + record.nbytes > size:
        raise FormatError(f"a record runs past its file: {start + record.nbytes} of {size} bytes ({printable(name)})")
    return start


def _extent(file: str, fqn: str, view: _View, start: int, nbytes: int, crc: int) -> Extent:
    itemsize, numel = view.dtype.itemsize, math.prod(view.sizes)
    last = view.offset + sum((n - 1) * s for n, s in zip(view.sizes, view.strides, strict=True)) if numel else view.offset - 1
    if (last + 1) * itemsize > nbytes:
        raise FormatError(f"a tensor exceeds its storage: {printable(fqn)!r}, element {last} of {nbytes // itemsize} ({printable(file)})")
    is_flat = all(n == 1 or s == r for n, s, r in zip(view.sizes, view.strides, row_major_strides(view.sizes), strict=True))
    count = (last + 1 - view.offset) * itemsize
    known = crc if crc and is_flat and count == nbytes else None
    return Extent(file, start + view.offset * itemsize, count, RAW, None if is_flat or not numel else view.strides, known)


# ---- data.pkl ------------------------------------------------------------------------------------------------------------


class _Globals(dict[tuple[str, str], Any]):
    """The allow-list; what is not in it becomes a stand-in that takes anything and does nothing."""

    def __init__(self, others: Counter[str]) -> None:
        super().__init__({("torch", name): d for name, d in BY_STORAGE_CLASS.items()} | {("torch", name): d for name, d in BY_NAME.items()})
        self._others = others
        for module in ("torch", "torch.storage"):
            self[module, "UntypedStorage"] = self[module, "TypedStorage"] = None
        self["collections", "OrderedDict"] = type("OrderedDict", (dict,), {})  # anew: a hostile pickle can set attributes on it
        self["torch", "Size"] = tuple
        self["torch._utils", "_rebuild_tensor_v2"] = _rebuild
        self["torch._utils", "_rebuild_tensor_v3"] = lambda *args: _rebuild(*args[:6], dtype=args[6])
        self["torch.serialization", "_get_layout"] = self["torch", "device"] = lambda *args: args
        self["torch._utils", "_rebuild_wrapper_subclass"] = self["torch.distributed.tensor", "DTensor"] = None
        self["torch._tensor", "_rebuild_from_type_v2"] = _rebuild_sharded
        self |= {(module, name): type(name, (Kept,), {}) for module, names in _KEPT.items() for name in names.split()}
        self["torch._utils", "_rebuild_parameter"] = lambda tensor, *_: tensor
        self["torch._utils", "_rebuild_parameter_with_state"] = lambda tensor, *_: tensor

    def __missing__(self, key: tuple[str, str]) -> Any:
        self._others[".".join(key)] += 0
        return type("Foreign", (Kept,), {})


_KEPT = {
    "torch.distributed._mesh_layout": "_MeshLayout _FlatLayout",
    "torch.distributed.device_mesh": "DeviceMesh",
    "torch.distributed.tensor._dtensor_spec": "DTensorSpec ShardOrderEntry TensorMeta",
    "torch.distributed.tensor.placement_types": "Shard _StridedShard Replicate Partial",
}


def _rebuild_sharded(function: object, kind: object, args: object, state: object) -> Sharded:
    del function, kind
    tables = [table for table in (state if isinstance(state, tuple) else (state,)) if isinstance(table, dict)]  # attributes, slots
    spec, local = (next((t[name] for t in tables if name in t), None) for name in ("_spec", "_local_tensor"))
    shape = args[2] if isinstance(args, tuple) and len(args) > 2 else None
    if not isinstance(spec, Kept) or not isinstance(local, _View) or not isinstance(shape, tuple):
        raise TypeError("not a DTensor")
    if not all(type(n) is int and 0 <= n < 1 << 62 for n in shape) or len(shape) > 64:
        raise ValueError("not a DTensor's shape")
    return Sharded(local, tuple(shape), spec)


def _rebuild(storage: object, offset: object, sizes: object, strides: object, *_: object, dtype: object = None) -> _View:
    found = dtype if dtype is not None else storage.dtype if isinstance(storage, _Storage) else None
    if not isinstance(storage, _Storage) or not isinstance(found, DType):
        raise TypeError("not a tensor's storage")
    if type(offset) is not int or not isinstance(sizes, tuple) or not isinstance(strides, tuple) or not len(sizes) == len(strides) <= 64:
        raise ValueError("not a tensor's shape")
    if not all(type(n) is int and 0 <= n < 1 << 62 for n in (offset, *sizes, *strides)):
        raise ValueError("not a tensor's numbers")
    return _View(storage, found, offset, tuple(sizes), tuple(strides))


def _persistent(pid: object) -> _Storage:
    if not isinstance(pid, tuple) or len(pid) != 5 or pid[0] != "storage" or type(pid[2]) is not str or type(pid[4]) is not int:
        raise ValueError("not a storage")
    return _Storage(pid[2], pid[1] if isinstance(pid[1], DType) else None, pid[4])


def _unpickle(data: bytes, where: str, others: Counter[str]) -> object:
    return load(data, _Globals(others), f"data.pkl in {where}", persistent_load=_persistent)


def _tensors(root: object, where: str, others: Counter[str]) -> Iterator[tuple[Path, _View | Sharded]]:
    """Yields the tensors of nested dicts and lists with the keys on the way; counts all else by its type."""
    waiting: list[tuple[tuple[str | int, ...], object]] = [((), root)]
    seen = 0
    while waiting:
        path, value = waiting.pop()
        seen += 1
        if seen > _MAX_NODES or len(path) > _MAX_DEPTH:
            raise FormatError(f"a state dict is too large or too deep: {seen:,} entries, {len(path)} levels ({where})")
        if isinstance(value, (_View, Sharded)):
            yield path, value
        elif isinstance(value, dict):
            waiting += [((*path, key), item) for key, item in reversed(value.items()) if isinstance(key, (str, int))]
        elif isinstance(value, (list, tuple)) and not isinstance(value, _Storage):
            waiting += [((*path, number), item) for number, item in reversed(list(enumerate(value)))]
        else:
            others[type(value).__name__] += 1
