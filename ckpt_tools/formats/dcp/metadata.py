"""DCP's `.metadata`: a pickle of dataclasses, read and written without torch.

The reader uses inert classes of our own in place of torch's. The writer emits the opcodes of
torch's pickler, so that `pickle.load` builds the same objects. Writing takes only the time and
memory of joining bytes.

Source: torch 2.13 `torch/distributed/checkpoint/metadata.py`, `filesystem.py`; confirmed on files
that it wrote.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from ckpt_tools.core.box import Box
from ckpt_tools.core.dtypes import BY_NAME
from ckpt_tools.errors import FormatError, printable
from ckpt_tools.formats.pickle.load import load_pickle, short_repr
from ckpt_tools.formats.pickle.plain_values import Inert
from ckpt_tools.formats.pickle.write import integer

if TYPE_CHECKING:
    from ckpt_tools.core.chunk_table import ChunkTable, Ints
    from ckpt_tools.formats.dcp.place_rows import PlaceRows

METADATA = "torch.distributed.checkpoint.metadata"
FILESYSTEM = "torch.distributed.checkpoint.filesystem"
_OLD_METADATA = "torch.distributed._shard.sharded_tensor.metadata"
_PLANNER = "torch.distributed.checkpoint.planner"
_DTYPES = [*BY_NAME, "qint8", "quint8", "qint32"]
MAX_DIMS = 64
_MAX_KEYS = 200  # of the path to an entry
_MAX_INDEX = 1 << 20  # of a list, and of all lists together beside four for each entry
_LONG_PART_BYTES = 1 << 12  # of a template; shorter ones are joined


class ItemLocation(NamedTuple):
    """The location of an item: file, first byte, number of bytes."""

    file: str
    start: int
    nbytes: int


class ColumnRange(NamedTuple):
    """A placeholder for chunks, or for entries of the dict of places, that were read as arrays.

    See `metadata_columns`.
    """

    start: int
    stop: int
    is_places: bool = False


class TensorMeta(NamedTuple):
    """One tensor from `.metadata`."""

    dtype: str
    shape: tuple[int, ...]
    boxes: Sequence[Any]


@dataclass(slots=True)
class Metadata:
    """The contents of one `.metadata`, as plain values.

    `places` is keyed by FQN and offsets: the chunk's for a tensor, None for an object.
    """

    tensors: dict[str, TensorMeta] = field(default_factory=dict)
    objects: list[str] = field(default_factory=list)
    paths: dict[str, tuple[str | int, ...]] = field(default_factory=dict)
    places: dict[tuple[str, tuple[int, ...] | None], ItemLocation] = field(default_factory=dict)
    extras: dict[str, str] = field(default_factory=dict)
    compressed: bool = False  # all items, with zstd
    num_place_ranges: int = 0  # placeholders among the places; each is a key, so all are different


# ---- reading -------------------------------------------------------------------------------------


class _Stub(metaclass=Inert):
    """Stands in for an object of torch, with the same attributes."""

    def __setstate__(self, state: object) -> None:
        if type(state) is not dict:
            raise TypeError("the state of an object is not a dict")
        self.__dict__ = state  # not copied: a pickle can give one dict to a million objects


def _globals() -> tuple[dict[tuple[str, str], Any], dict[str, type]]:
    """Returns the allow-list with fresh inert classes, and those classes by name."""
    names = (
        "Metadata",
        "TensorStorageMetadata",
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "MetadataIndex",
        "StorageMeta",
    )
    stubs: dict[str, type] = {name: type(name, (_Stub,), {}) for name in (*names, "_StorageInfo")}
    stubs["TensorProperties"] = type(
        "TensorProperties",
        (_Stub,),
        {"__setstate__": lambda self, state: setattr(self, "state", state)},
    )
    allowed: dict[tuple[str, str], Any] = {(METADATA, name): stub for name, stub in stubs.items()}
    allowed[FILESYSTEM, "_StorageInfo"] = stubs["_StorageInfo"]
    allowed[_OLD_METADATA, "TensorProperties"] = stubs["TensorProperties"]
    for module, name in (
        (METADATA, "_MEM_FORMAT_ENCODING"),
        (_OLD_METADATA, "MEM_FORMAT_ENCODING"),
    ):
        allowed[module, name] = lambda value: value
    # Megatron also stores its plans, which are not needed
    for name in ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData", "BytesIOWriteData"):
        allowed[_PLANNER, name] = type(name, (_Stub,), {"__init__": lambda *_: None})
    allowed["torch", "Size"] = tuple
    allowed["torch.serialization", "_get_layout"] = lambda name: name
    for module in ("pathlib", "pathlib._local"):
        for name in (
            "Path",
            "PosixPath",
            "WindowsPath",
            "PurePath",
            "PurePosixPath",
            "PureWindowsPath",
        ):
            allowed[module, name] = lambda *parts: "/".join(parts)
    allowed.update({("torch", name): name for name in _DTYPES})
    return allowed, stubs


def parse_metadata(data: bytes, where: str, ranges: Sequence[ColumnRange] = ()) -> Metadata:
    """Returns the contents of a `.metadata` pickle, checked value by value.

    Args:
        data: the pickle.
        where: names the pickle in messages.
        ranges: the placeholders for its persistent ids. In the boxes of tensors they are kept; in
            the places they are left out.

    Raises:
        UnsafePickleError: the pickle names a global that DCP's metadata does not need.
        FormatError: it is malformed, or not DCP metadata.
    """
    allowed, stubs = _globals()
    root = load_pickle(data, allowed, where, ranges.__getitem__ if ranges else None)
    read = _Reader(where, stubs)
    read.expect(root, "Metadata")
    result = Metadata()
    for fqn, value in read.items(root, "state_dict_metadata"):
        if isinstance(value, stubs["BytesStorageMetadata"]):
            result.objects.append(fqn)
        else:
            result.tensors[fqn] = read.tensor(fqn, value)
    if root.__dict__.get("planner_data") is not None:
        for fqn, path in read.items(root, "planner_data"):
            result.paths[fqn] = read.path(path)
        read.check_lists(result.paths.values())
    read.places(root, result)
    read.extras(root, result)
    return result


class _Reader:
    """A converter from stubs to plain values; a value of an unexpected type is a FormatError."""

    def __init__(self, where: str, stubs: Mapping[str, type]) -> None:
        self.where, self.stubs = where, stubs
        self.lists: dict[int, str] = {}

    def fail(self, what: str, got: object) -> FormatError:
        return FormatError(
            f"malformed DCP metadata: expected {what}, got {printable(repr(type(got).__name__))}"
            f" ({self.where})"
        )

    def expect(self, value: object, name: str) -> dict[str, Any]:
        if not isinstance(value, self.stubs[name]):
            raise self.fail(f"a {name}", value)
        return value.__dict__

    def items(self, owner: Any, name: str) -> Iterable[tuple[str, Any]]:
        table = owner.__dict__.get(name)
        if not isinstance(table, dict):
            raise self.fail(f"a dict at {name}", table)
        for key, value in table.items():
            if not isinstance(key, str):
                raise self.fail(f"a string key in {name}", key)
            yield key, value

    def ints(self, value: object) -> tuple[int, ...]:
        if type(value) is not tuple or len(value) > MAX_DIMS:
            raise self.fail("a tuple of ints", value)
        for item in value:
            if type(item) is not int or not -(1 << 62) < item < 1 << 62:
                raise self.fail("an int of at most 62 bits", item)
        return value

    def text(self, value: object) -> str:
        if not isinstance(value, str):
            raise self.fail("a string", value)
        return value

    def path(self, value: object) -> tuple[str | int, ...]:
        if type(value) is not tuple or not all(isinstance(v, (str, int)) for v in value):
            raise self.fail("a tuple of keys", value)
        if len(value) > _MAX_KEYS:
            raise FormatError(
                f"malformed DCP metadata: expected at most {_MAX_KEYS} keys to an entry, got"
                f" {len(value)} ({self.where})"
            )
        for number in value:
            # a list is made as long as its largest index
            if type(number) is not str and not 0 <= number < _MAX_INDEX:
                raise FormatError(
                    f"malformed DCP metadata: expected an index of a list from 0 on, below"
                    f" {_MAX_INDEX}, got {short_repr(number)} ({self.where})"
                )
        return value

    def check_lists(self, paths: Collection[tuple[str | int, ...]]) -> None:
        """Refuses paths whose lists would be far longer than the number of entries."""
        lengths: dict[tuple[str | int, ...], int] = {}
        for path in paths:
            for depth, key in enumerate(path):
                if type(key) is not str:
                    above = path[:depth]
                    lengths[above] = max(lengths.get(above, 0), int(key) + 1)
        if sum(lengths.values()) > _MAX_INDEX + 4 * len(paths):
            raise FormatError(
                f"malformed DCP metadata: expected lists of about {len(paths)} items, got"
                f" {sum(lengths.values())} ({self.where})"
            )

    def tensor(self, fqn: str, value: object) -> TensorMeta:
        fields = self.expect(value, "TensorStorageMetadata")
        state = self.expect(fields.get("properties"), "TensorProperties").get("state")
        if type(state) is not tuple or len(state) < 2:
            raise self.fail("tensor properties", state)
        if state[1] != "torch.strided":
            raise FormatError(
                f"unsupported layout: expected torch.strided, got {short_repr(state[1])}"
                f" ({self.where}, {printable(fqn)!r})"
            )
        chunks = fields.get("chunks")
        if not isinstance(chunks, list):
            raise self.fail("a list of chunks", chunks)
        # with a shared list, a small file could claim a huge number of chunks
        if chunks and self.lists.setdefault(id(chunks), fqn) != fqn:
            both = f"{printable(self.lists[id(chunks)])!r} and {printable(fqn)!r}"
            raise FormatError(f"two tensors share one list of chunks: {both} ({self.where})")
        boxes: list[Any] = []
        chunk_type, ints = self.stubs["ChunkStorageMetadata"], self.ints
        for chunk in chunks:
            if type(chunk) is ColumnRange and not chunk.is_places:
                boxes.append(chunk)
                continue
            if not isinstance(chunk, chunk_type):
                raise self.fail("a ChunkStorageMetadata", chunk)
            boxes.append(
                Box(ints(chunk.__dict__.get("offsets")), ints(chunk.__dict__.get("sizes")))
            )
        shape = ints(fields.get("size"))
        if any(size < 0 for size in shape):
            raise FormatError(
                f"a tensor has a negative size: {list(shape)} ({self.where}, {printable(fqn)!r})"
            )
        return TensorMeta(self.text(state[0]), shape, boxes)

    def places(self, root: Any, result: Metadata) -> None:
        table = root.__dict__.get("storage_data")
        if not isinstance(table, dict):
            raise self.fail("a dict at storage_data", table)
        index_type, info_type = self.stubs["MetadataIndex"], self.stubs["_StorageInfo"]
        how = set[bool]()
        for index, info in table.items():
            if type(index) is ColumnRange and index.is_places and info is None:
                result.num_place_ranges += 1
                continue
            if not isinstance(index, index_type) or not isinstance(info, info_type):
                raise self.fail("a MetadataIndex and a _StorageInfo", index)
            key, at = index.__dict__, info.__dict__
            how.add(self.transforms(at.get("transform_descriptors")))
            fqn, offset = self.text(key.get("fqn")), key.get("offset")
            start, nbytes = self.ints((at.get("offset"), at.get("length")))
            place = ItemLocation(self.text(at.get("relative_path")), start, nbytes)
            where = (fqn, None if offset is None else self.ints(offset))
            if result.places.setdefault(where, place) != place:
                raise FormatError(f"two places for one chunk of {printable(fqn)!r} ({self.where})")
        if len(how) > 1:
            raise FormatError(f"some items are compressed, and some are not ({self.where})")
        result.compressed = True in how

    def transforms(self, how: object) -> bool:
        """Tells whether an item is compressed with zstd. Any other transformation is refused."""
        if not how:
            return False
        if isinstance(how, list) and len(how) == 1 and isinstance(how[0], str):
            name, _, version = how[0].partition("/")
            if name == "stream.zstd" and version.partition(".")[0] == "1":
                return True
        names = ", ".join(map(short_repr, how[:8])) if isinstance(how, list) else short_repr(how)
        raise FormatError(
            f"an item is transformed in a way that is not known: {names} ({self.where})"
        )

    def extras(self, root: Any, result: Metadata) -> None:
        version = root.__dict__.get("version")
        if isinstance(version, str):
            result.extras["dcp_version"] = version
        meta = root.__dict__.get("storage_meta")
        if isinstance(meta, self.stubs["StorageMeta"]):
            result.extras.update(
                {
                    k: v
                    for k, v in meta.__dict__.items()
                    if k in ("save_id", "checkpoint_id") and isinstance(v, str)
                }
            )


# ---- writing -------------------------------------------------------------------------------------


def _text(value: str) -> bytes:
    raw = value.encode("utf-8", "surrogatepass")
    return (
        b"\x8c" + bytes([len(raw)]) + raw
        if len(raw) < 256
        else b"X" + struct.pack("<I", len(raw)) + raw
    )


_common = functools.lru_cache(maxsize=1 << 14)(integer)  # numbers that many tensors share


class _Emitter:
    """A writer of opcodes, with a memo for repeated values: globals, attributes, files, FQNs."""

    def __init__(self, memo: Mapping[object, bytes] | None = None) -> None:
        self.parts: list[bytes | LatePart] = []
        self.put = self.parts.append
        # file names that are filled in last: the part that each precedes, and the name
        self.files: list[tuple[int, str]] = []
        self._memo: dict[object, bytes] = dict(memo or {})
        self._reused: dict[object, bytes] = {}

    @property
    def memo(self) -> Mapping[object, bytes]:
        """The values pushed so far, each with the opcodes that push it again."""
        return self._memo

    def once(self, key: object, make: Callable[[], bytes]) -> bytes:
        """Returns opcodes that push a value.

        The first time they are `make()` and a memo slot, and later a look-up of that slot.
        """
        known = self._memo.get(key)
        if known is not None:
            return known
        made = make() + b"\x94"
        slot = len(self._memo)
        self._memo[key] = b"h" + bytes([slot]) if slot < 256 else b"j" + struct.pack("<I", slot)
        return made

    def reused(self, key: object, make: Callable[[], bytes]) -> bytes:
        """Returns the opcodes of `make`, which it computes only twice.

        From the second time on they stay the same, because all their values are in the memo.
        """
        known = self._reused.get(key)
        if known is None:
            made, self._reused[key] = make(), make()
            return made
        return known

    def name(self, value: str) -> bytes:
        return self.once(value, lambda: _text(value))

    def file(self, value: str) -> None:
        """Puts a file's name, which `filled` may replace."""
        known = self._memo.get(("file", value))
        if known is None:
            self.files.append((len(self.parts), value))
            self.once(("file", value), bytes)
        self.put(known or b"\x94")

    def known_file(self, value: str) -> bytes:
        """Returns the opcodes that push a file's name again."""
        return self._memo["file", value]

    def joined(self) -> tuple[list[bytes | LatePart], list[tuple[int, str]]]:
        """Returns parts and files with as few parts as the names of files leave."""
        parts, files, at = list[bytes | LatePart](), list[tuple[int, str]](), 0
        for number, value in self.files:
            parts += _joined(self.parts[at:number])
            files.append((len(parts), value))
            at = number
        return [*parts, *_joined(self.parts[at:])], files

    def filled(self, name: Callable[[str], str]) -> Iterator[bytes | LatePart]:
        """Yields all opcodes, with the final names of files."""
        at = 0
        for number, value in self.files:
            yield from self.parts[at:number]
            yield _text(name(value))
            at = number
        yield from self.parts[at:]

    def glob(self, module: str, name: str) -> bytes:
        known = self._memo.get((module, name))
        return (
            known
            if known is not None
            else self.once((module, name), lambda: _text(module) + _text(name) + b"\x93")
        )

    def new(self, module: str, name: str) -> bytes:
        return self.glob(module, name) + b")\x81"

    def size(self, dims: Sequence[int]) -> bytes:
        body = b"".join(map(_common, dims))
        close = (b")", b"\x85", b"\x86", b"\x87")[len(dims)] if len(dims) < 4 else b"t"
        return (
            self.glob("torch", "Size") + (b"(" if len(dims) > 3 else b"") + body + close + b"\x85R"
        )


class LateTable(NamedTuple):
    """The chunks of a tensor that has very many.

    Attributes:
        cut: tensors with the same have the same boxes.
        kind: tensors with the same differ in their starts alone; None if there is no other.
        make: makes the chunks.
        starts: returns where each begins in its file, in bytes.
    """

    cut: object
    kind: object
    make: Callable[[], ChunkTable]
    starts: Callable[[], Ints]


LatePart = Callable[[], bytes]  # opcodes that are made when they are wanted


class Template:
    """A `.metadata` without the parts that change between saves: objects' places and the save id.

    The objects and the order of their fields are torch's. `checkpoint_id` is empty: torch stores
    the absolute path on the training host there, which should stay private.
    """

    def __init__(self, metadata: Metadata, tables: Mapping[str, LateTable] | None = None) -> None:
        """Renders all parts that stay the same.

        Args:
            metadata: its `places` may lack those of objects.
            tables: the chunks of tensors that have very many, in place of boxes and places. Their
                places are rendered at each save, so that nobody holds those of all tensors.
        """
        tables = tables or {}
        out = _Emitter()
        out.put(
            b"\x80\x04"
            + out.new(METADATA, "Metadata")
            + b"}("
            + out.name("state_dict_metadata")
            + b"}("
        )
        for fqn, tensor in metadata.tensors.items():
            out.put(out.name(fqn))
            _emit_tensor(out, tensor, tables.get(fqn))
        for fqn in metadata.objects:
            out.put(out.name(fqn) + out.new(METADATA, "BytesStorageMetadata"))
        out.put(b"u" + out.name("planner_data") + b"}(")
        for fqn, path in metadata.paths.items():
            keys = b"".join(out.name(k) if isinstance(k, str) else integer(k) for k in path)
            out.put(out.name(fqn) + b"(" + keys + b"t")
        out.put(b"u" + out.name("storage_data") + b"}(")
        placed: dict[str, dict[tuple[int, ...], ItemLocation]] = {}
        for (fqn, offset), place in metadata.places.items():
            if offset is not None:
                placed.setdefault(fqn, {})[offset] = place
        alike: dict[object, PlaceRows] = {}
        for fqn, tensor in metadata.tensors.items():
            if fqn in tables:
                _emit_table(out, fqn, tables[fqn], alike)
                continue
            numbers = {box.offsets: i for i, box in enumerate(tensor.boxes)}
            for offset, place in placed.get(fqn, {}).items():
                _emit_place(out, fqn, offset, numbers[offset], place)
        self._memo = out.memo
        self._parts, self._files = out.joined()

    def render(
        self, objects: Mapping[str, ItemLocation], save_id: str, name: Callable[[str], str] = str
    ) -> bytes:
        """Returns the whole file; `name` returns the final name of a data file."""
        return b"".join(self.pieces(objects, save_id, name))

    def pieces(
        self, objects: Mapping[str, ItemLocation], save_id: str, name: Callable[[str], str] = str
    ) -> Iterator[bytes]:
        """Yields the file in pieces, as `render` returns it."""
        for part in self._opcodes(objects, save_id).filled(name):
            yield part if isinstance(part, bytes) else part()

    def _opcodes(self, objects: Mapping[str, ItemLocation], save_id: str) -> _Emitter:
        out = _Emitter(self._memo)
        out.parts += self._parts
        out.files += self._files
        for fqn, place in objects.items():
            _emit_place(out, fqn, None, None, place)
        out.put(b"u" + out.name("storage_meta") + out.new(METADATA, "StorageMeta") + b"}(")
        out.put(out.name("checkpoint_id") + _text("") + out.name("save_id") + _text(save_id))
        out.put(
            out.name("load_id")
            + b"N"
            + out.name("modules")
            + b"]ub"
            + out.name("version")
            + _text("1.0.0")
            + b"ub."
        )
        return out


def _joined(parts: Iterable[bytes | LatePart]) -> Iterator[bytes | LatePart]:
    """Joins short parts. A long one may stand at several places, and is not copied."""
    short = list[bytes]()
    for part in parts:
        if isinstance(part, bytes) and len(part) < _LONG_PART_BYTES:
            short.append(part)
            continue
        if short:
            yield b"".join(short)
            short.clear()
        yield part
    if short:
        yield b"".join(short)


def render(metadata: Metadata, save_id: str) -> bytes:
    """Returns the `.metadata` that torch would write; see `Template`."""
    return Template(metadata).render(
        {fqn: place for (fqn, offset), place in metadata.places.items() if offset is None}, save_id
    )


def _emit_tensor(out: _Emitter, tensor: TensorMeta, table: LateTable | None) -> None:
    out.put(
        out.new(METADATA, "TensorStorageMetadata")
        + b"}("
        + out.name("properties")
        + out.new(METADATA, "TensorProperties")
        + b"("
    )
    out.put(out.glob("torch", tensor.dtype))
    out.put(
        out.once(
            0,
            lambda: (
                out.glob("torch.serialization", "_get_layout") + _text("torch.strided") + b"\x85R"
            ),
        )
    )
    out.put(
        b"\x89"
        + out.once(1, lambda: out.glob(METADATA, "_MEM_FORMAT_ENCODING") + b"K\x00\x85R")
        + b"\x89tb"
    )
    out.put(out.name("size") + out.size(tensor.shape) + out.name("chunks") + b"](")
    # most tensors of a model are cut like another one
    if table is None:
        chunks = out.reused(("boxes", *tensor.boxes), lambda: _chunks(out, tensor.boxes))
    else:
        chunks = out.reused(
            ("boxes", table.cut), lambda: _chunks(out, (chunk.box for chunk in table.make()))
        )
    out.put(chunks)
    out.put(b"eub")


def _chunks(out: _Emitter, boxes: Iterable[Box]) -> bytes:
    parts = list[bytes]()
    for offsets, sizes in boxes:
        head = out.reused(
            "chunk", lambda: out.new(METADATA, "ChunkStorageMetadata") + b"}(" + out.name("offsets")
        )
        parts += (head, out.size(offsets), out.reused("sizes", lambda: out.name("sizes")))
        parts.append(out.reused(sizes, lambda: out.size(sizes) + b"ub"))  # noqa: B023  (called at once)
    return b"".join(parts)


def _emit_table(out: _Emitter, fqn: str, table: LateTable, alike: dict[object, PlaceRows]) -> None:
    """Puts the places of a tensor's chunks. Most tensors differ in name and starts only."""
    if table.kind in alike:
        rows, index = alike[table.kind], _index(out, fqn)
        out.put(lambda: rows.render(index, table.starts()))
        return
    before, behind = [], []
    for number, (box, at) in enumerate(table.make()):
        _emit_place(out, fqn, box.offsets, number, ItemLocation(at.file, at.start, at.nbytes))
        before.append(
            _number(out, number, box.offsets) + _info(out) + out.known_file(at.file) + _start(out)
        )
        behind.append(_end(out, at.nbytes))
    if table.kind is not None:
        from ckpt_tools.formats.dcp.place_rows import PlaceRows  # with NumPy

        alike[table.kind] = PlaceRows(before, behind)


def _emit_place(
    out: _Emitter, fqn: str, offset: tuple[int, ...] | None, number: int | None, place: ItemLocation
) -> None:
    head = _index(out, fqn)
    if offset is not None and number is not None:
        head += _number(out, number, offset)
    out.put(head + _info(out))
    out.file(place.file)
    out.put(_start(out) + integer(place.start) + _end(out, place.nbytes))


def _index(out: _Emitter, fqn: str) -> bytes:
    return out.reused(
        ("index", fqn),
        lambda: out.new(METADATA, "MetadataIndex") + b"}(" + out.name("fqn") + out.name(fqn),
    )


def _number(out: _Emitter, number: int, offset: tuple[int, ...]) -> bytes:
    return out.reused(
        (number, offset),
        lambda: out.name("index") + _common(number) + out.name("offset") + out.size(offset),
    )


def _info(out: _Emitter) -> bytes:
    return out.reused(
        "info",
        lambda: b"ub" + out.new(FILESYSTEM, "_StorageInfo") + b"}(" + out.name("relative_path"),
    )


def _start(out: _Emitter) -> bytes:
    return out.reused("offset", lambda: out.name("offset"))


def _end(out: _Emitter, nbytes: int) -> bytes:
    return out.reused("length", lambda: out.name("length")) + _common(nbytes) + b"ub"
