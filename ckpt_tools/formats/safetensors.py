"""safetensors: one file, or shards with `model.safetensors.index.json`.

A file is an 8-byte little-endian header length, a JSON header, then the payloads without gaps. This
module parses the header itself, because the library accepts duplicate keys and keeps the last.

Files in which torch's DCP has stored each rank's part of tensors are read too.

Source: the format's specification at github.com/huggingface/safetensors, version 0.8; torch 2.13
`torch/distributed/checkpoint/hf_storage.py`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ckpt_tools.core.box import Box, whole
from ckpt_tools.core.catalog import Catalog, ChunkList, Extent, TensorEntry, one_chunk
from ckpt_tools.core.dtypes import by_tag
from ckpt_tools.core.plan import Literal, Slot, Target
from ckpt_tools.errors import (
    CatalogError,
    CheckpointError,
    FormatError,
    PlanError,
    StorageError,
    printable,
)
from ckpt_tools.formats.base import Request, attempt_of, guess_bare, locate_bare
from ckpt_tools.storage import Store, check_path, read
from ckpt_tools.storage.one_file import folder_of
from ckpt_tools.storage.small_files import parse_json

NAME = "safetensors"
SUFFIX = ".safetensors"
LOOKS_FOR = f"*{SUFFIX}"
locate, guess = locate_bare, guess_bare
_PAIRS = "F4"  # one byte holds two values
# files of torch beside the model: ckpt does not know their contents, and names them
_STATES = (".pt", ".pth", ".bin", ".pkl", ".ckpt")
INDEX = "model.safetensors.index.json"
DELTA = "delta_encoding"  # in the metadata of the index: only what changed since another version
MAX_HEADER_BYTES = 100_000_000
_MAX_INDEX_BYTES = 1 << 28
_MAX_SIZE = 1 << 48
_PAGE_BYTES = 4096
_SHARDING = "DCP_SHARDING_INFO"
_RANK = re.compile(r"shard-(?!00000)([0-9]{5})-.*\.safetensors")
_SHARD = re.compile(r".*-([0-9]{5})-of-([0-9]{5})\.safetensors")


def recognise(files: Mapping[str, int]) -> bool:
    """Tells whether the files have an index, one `.safetensors`, or one set of numbered shards."""
    return INDEX in files or bool(data_files(files))


def data_files(files: Mapping[str, int]) -> list[str]:
    """Returns the single file, or the one set of numbered shards; nothing if there are several.

    `model.fp16.safetensors` beside `model.safetensors` is a variant, which loaders take on request
    only.
    """
    found = [name for name in files if name.endswith(".safetensors")]
    found = [name for name in found if attempt_of(name) or not _is_variant(name, files)]
    is_set = len({m[2] if (m := _SHARD.fullmatch(name)) else name for name in found}) == 1
    # A name with the id of an attempt may be one of several files that were never committed. An
    # index refers to those that were.
    return found if is_set and not any(map(attempt_of, found)) else []


def _is_variant(name: str, files: Mapping[str, int]) -> bool:
    stem, _, rest = name.partition(".")
    return rest.count(".") == 1 and f"{stem}.safetensors" in files


def read_catalog(store: Store) -> Catalog:
    """Reads the headers; see `Format.read_catalog`."""
    names, weight_map = _shards_of(store)
    catalog = read_files(store, names, weight_map)
    # also weights that the index does not name
    others = (*_STATES, SUFFIX)
    beside = tuple(sorted({n for n in store.list_files() if n.endswith(others)} - {*names}))
    if not beside:
        return catalog
    shown = ", ".join(map(printable, beside))
    return replace(catalog, beside=beside, extras={**catalog.extras, "beside": shown})


def read_readable(store: Store) -> tuple[Catalog, dict[str, CheckpointError], dict[str, str]]:
    """Reads the shards that can be read.

    Returns:
        The catalog of these shards, the error of each other shard, and the tensors of the index
        that cannot be read, with their file. A tensor that a sound shard lacks is one of them.

    Raises:
        FormatError: no shard can be read, or the index cannot.
    """
    names, weight_map = _shards_of(store)
    broken: dict[str, CheckpointError] = {}
    there: dict[str, TensorEntry] = {}
    for name in names:
        try:
            entries = _read_shard(store, name)[-1]
            if entries.keys() - weight_map.keys():  # perhaps under damaged names
                placed = {fqn: at for fqn, at in weight_map.items() if at == name}
                compare_index(placed, entries, INDEX)
        except (FormatError, CatalogError) as error:
            broken[name] = error
        else:
            there |= entries
    if len(broken) == len(names):
        raise FormatError(f"no shard can be read: {next(iter(broken.values()), 'there is none')}")
    catalog = read_files(store, [n for n in names if n not in broken], {})
    lost = {f: n for f, n in weight_map.items() if n in broken or f not in there}
    ranks = {f for f, entry in catalog.tensors.items() if len(entry.chunks) > 1}  # several files
    try:
        placed = {f: n for f, n in weight_map.items() if f not in lost and f not in ranks}
        compare_index(placed, there, INDEX)
    except FormatError as error:  # the tensor is there, in another file
        broken[INDEX] = error
    return catalog, broken, lost


def _shards_of(store: Store) -> tuple[list[str], dict[str, str]]:
    """Returns the data files, and the file of each tensor if there is an index."""
    files = store.list_files()
    if name := folder_of(store)[1]:
        return [name], {}
    if INDEX not in files:
        return complete_set(data_files(files), store.url), {}
    weight_map = read_index(store, INDEX)
    if "model.safetensors" in files and "model.safetensors" not in weight_map.values():
        raise FormatError(
            f"two models in one directory: model.safetensors, and the shards of {INDEX}"
            f" ({printable(store.url)})",
            hint="move one away, or give the path of the file; transformers reads the single file",
        )
    renamed = {
        name: found
        for name in set(weight_map.values()) - files.keys()
        if (found := _of_ranks(name, files))
    }
    names = {name for at in weight_map.values() for name in renamed.get(at, [at])}
    return sorted(names), {fqn: renamed.get(at, [at])[0] for fqn, at in weight_map.items()}


def complete_set(names: list[str], where: str) -> list[str]:
    """Returns the names of a set of numbered shards.

    Raises:
        CatalogError: some are missing.
    """
    matches = [match for name in names if (match := _SHARD.fullmatch(name))]
    total = int(matches[0][2]) if matches else 0
    numbers = {int(match[1]) for match in matches}  # ranks may each have a part of a file
    if numbers != set(range(1, total + 1)):
        raise CatalogError(
            f"shards are missing, and there is no index: expected {total} files, got"
            f" {len(numbers)} ({printable(where)})",
            hint="restore them; or give the path of one file to read that file alone",
        )
    return names


def _of_ranks(name: str, files: Iterable[str]) -> list[str]:
    """Returns the per-rank files of torch's HuggingFaceStorageWriter for a consolidated name.

    Its index has the name of the consolidated file.
    """
    return sorted(
        file
        for file in files
        if _RANK.fullmatch(file) and file.partition("-")[2].partition("-")[2] == name
    )


def read_files(store: Store, names: Sequence[str], weight_map: Mapping[str, str]) -> Catalog:
    """Reads the headers of some files of a directory.

    `weight_map` has the file of each tensor, if there is an index.

    Raises:
        FormatError, CatalogError: see `Format.read_catalog`.
    """
    tensors: dict[str, TensorEntry] = {}
    sizes: dict[str, int] = {}
    extras: dict[str, str] = {}
    pieces: dict[str, list[TensorEntry]] = {}
    for name in names:
        sizes[name], more, offsets, entries = _read_shard(store, name)
        extras.update(more)
        for fqn, entry in entries.items():
            if fqn in offsets and fqn not in tensors:
                pieces.setdefault(fqn, []).append(_piece(entry, offsets[fqn], name))
            elif fqn in tensors or fqn in pieces:
                first = tensors.get(fqn) or pieces[fqn][0]
                raise FormatError(
                    f"a tensor is in two shards: {printable(fqn)!r}"
                    f" ({printable(first.chunks[0].extent.file)}, {printable(name)})"
                )
            else:
                tensors[fqn] = entry
    tensors |= {fqn: _whole(fqn, parts) for fqn, parts in pieces.items()}
    compare_index(weight_map, tensors, INDEX)
    ranks = (
        {name: int(m[1]) - 1 for name in names if (m := _RANK.fullmatch(name))} if pieces else {}
    )
    return Catalog(
        NAME,
        tensors,
        file_sizes=sizes,
        extras=extras,
        ranks=ranks,
        world_size=max(ranks.values()) + 1 if ranks else None,
    )


def _read_shard(
    store: Store, name: str
) -> tuple[int, dict[str, str], dict[str, tuple[int, ...]], dict[str, TensorEntry]]:
    """Returns a file's size, its metadata for people, the offsets of its parts, and its tensors."""
    size = shard_size(store, name)
    header = _read_header(store, name, size)
    more = _read_extras(header.pop("__metadata__", {}), name)
    offsets = _read_offsets(more.pop(_SHARDING, "{}"), name)
    return size, more, offsets, _entries(header, name, size)


def _read_offsets(text: str, name: str) -> dict[str, tuple[int, ...]]:
    """Returns the offset of each part of a tensor in the whole; nothing for ordinary files.

    torch's HuggingFaceStorageWriter notes these offsets.
    """
    offsets = {}
    for fqn, about in _parse_json(
        text.encode("utf-8", "surrogatepass"), f"{_SHARDING} of {printable(name)}"
    ).items():
        found = about.get("saved_offsets") if isinstance(about, dict) else None
        if not isinstance(found, list) or not _are_sizes(found):
            raise FormatError(
                f"saved_offsets of a tensor's part are not counts ({printable(name)},"
                f" {printable(fqn)!r})"
            )
        offsets[fqn] = tuple(found)
    return offsets


def _piece(entry: TensorEntry, offsets: tuple[int, ...], name: str) -> TensorEntry:
    """Returns an entry as a part of a tensor. Its shape ends where the part ends."""
    if len(offsets) != len(entry.shape):
        raise FormatError(
            f"a tensor's part has {len(entry.shape)} dims and {len(offsets)} offsets"
            f" ({printable(name)}, {printable(entry.fqn)!r})"
        )
    box = Box(offsets, entry.shape)
    return TensorEntry(entry.fqn, entry.dtype, box.ends, one_chunk(box, entry.chunks[0].extent))


def _whole(fqn: str, parts: list[TensorEntry]) -> TensorEntry:
    """Joins a tensor's parts. No file has its shape, so the shape ends where the last parts end."""
    if len({(part.dtype, len(part.shape)) for part in parts}) > 1:
        raise FormatError(
            f"parts of a tensor are of several types: {printable(fqn)!r},"
            f" {', '.join(sorted({p.dtype.name for p in parts}))}"
        )
    shape = tuple(map(max, zip(*(part.shape for part in parts), strict=True)))
    return TensorEntry(
        fqn, parts[0].dtype, shape, ChunkList(chunk for part in parts for chunk in part.chunks)
    )


def shard_size(store: Store, name: str) -> int:
    """Returns the size of a shard in bytes.

    Raises:
        CatalogError: there is no such file.
    """
    try:
        return store.size(name)
    except StorageError as error:
        if not error.is_missing:
            raise
        raise CatalogError(
            f"a data file is missing: {printable(name)} (named by the index)"
        ) from error


def compare_index(
    weight_map: Mapping[str, str], tensors: Mapping[str, TensorEntry], index: str
) -> None:
    """Makes sure that every tensor is in the file that the index names.

    Raises:
        FormatError: a tensor is not in its file.
    """
    for fqn, name in weight_map.items():
        if fqn not in tensors or all(chunk.extent.file != name for chunk in tensors[fqn].chunks):
            raise FormatError(
                f"{index} places {printable(fqn)!r} in {printable(name)}, which does not hold it"
            )


def _parse_json(data: bytes, where: str) -> dict[str, Any]:
    try:
        value = parse_json(data.decode("utf-8"))
    except ValueError as error:
        raise FormatError(f"not valid JSON: {printable(str(error))} ({where})") from error
    if not isinstance(value, dict):
        raise FormatError(f"expected a JSON object, got {type(value).__name__} ({where})")
    return value


def read_index(store: Store, index: str) -> dict[str, str]:
    """Returns the file of each tensor from Hugging Face's index.

    Raises:
        FormatError: the index is malformed.
        StorageError: it names a file outside of the checkpoint.
    """
    size = store.size(index)
    if size > _MAX_INDEX_BYTES:
        raise FormatError(
            f"an index is too long: expected at most {_MAX_INDEX_BYTES} bytes, got {size} ({index})"
        )
    body = _parse_json(read(store, index), index)
    weight_map, about = body.get("weight_map"), body.get("metadata")
    if isinstance(about, dict) and DELTA in about:
        raise FormatError(
            f"only the changes since another version lie here ({printable(store.url)})",
            hint=f"its directory has to be called weight_v{printable(str(about.get('version')))},"
            " beside the other versions",
        )
    if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
        raise FormatError(f"weight_map: expected file names by tensor ({index})")
    for name in weight_map.values():
        check_path(name, index)
    return weight_map


def _read_header(store: Store, name: str, size: int) -> dict[str, Any]:
    where = printable(name)
    if size < 8:
        raise FormatError(
            f"a safetensors file is truncated: expected at least 8 bytes, got {size} ({where})"
        )
    nbytes = int.from_bytes(read(store, name, 0, 8), "little")
    if nbytes > MAX_HEADER_BYTES:
        raise FormatError(
            f"a safetensors header is too long: expected at most {MAX_HEADER_BYTES} bytes, got"
            f" {nbytes} ({where})"
        )
    if 8 + nbytes > size:
        raise FormatError(
            f"a safetensors header runs past its file: expected at most {size - 8} bytes, got"
            f" {nbytes} ({where})"
        )
    return _parse_json(read(store, name, 8, nbytes), f"header of {where}") | {
        "__header_bytes__": 8 + nbytes
    }


def _read_extras(value: object, name: str) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(v, str) for v in value.values()):
        raise FormatError(f"__metadata__: expected strings by string ({printable(name)})")
    return value


def _entries(header: dict[str, Any], name: str, size: int) -> dict[str, TensorEntry]:
    """Returns the tensors of one file.

    The payloads must follow each other without gaps, from the header to the end of the file.
    """
    base = header.pop("__header_bytes__")
    entries: dict[str, TensorEntry] = {}
    for fqn, fields in header.items():
        where = f"{printable(name)}, {printable(fqn)!r}"
        if not isinstance(fields, dict) or set(fields) != {"dtype", "shape", "data_offsets"}:
            raise FormatError(
                f"a tensor's header: expected dtype, shape and data_offsets ({where})"
            )
        shape, offsets = fields["shape"], fields["data_offsets"]
        if not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2 or len(shape) > 64:
            raise FormatError(
                "a tensor's shape or data_offsets are not counts:"
                f" {printable(str((shape, offsets)))} ({where})"
            )
        entry = TensorEntry(
            fqn,
            by_tag(str(fields["dtype"]), where),
            _in_bytes(fields["dtype"], shape, where),
            ChunkList(),
        )
        if offsets[1] - offsets[0] != entry.nbytes:
            raise FormatError(
                f"data_offsets do not fit the shape: expected {entry.nbytes} bytes, got {offsets}"
                f" ({where})"
            )
        extent = Extent(name, base + offsets[0], entry.nbytes)
        entries[fqn] = TensorEntry(
            fqn, entry.dtype, entry.shape, one_chunk(whole(entry.shape), extent)
        )
    end = base
    for extent in sorted(
        (e.chunks[0].extent for e in entries.values()), key=lambda x: (x.start, x.nbytes)
    ):
        if extent.start != end:
            raise FormatError(
                f"payloads leave a gap or overlap: expected one to start at byte {end}, got"
                f" {extent.start} ({printable(name)})"
            )
        end = extent.start + extent.nbytes
    if end != size:
        raise FormatError(
            f"a safetensors file has the wrong length: expected {end} bytes, got {size}"
            f" ({printable(name)})",
            hint="it was truncated, or appended to",
        )
    return entries


def _in_bytes(tag: str, shape: Sequence[int], where: str) -> tuple[int, ...]:
    """Returns the shape of a tensor as torch has it.

    For 4-bit values, torch counts bytes of two values each, but the file counts values.
    """
    if tag != _PAIRS:
        return tuple(shape)
    if not shape or shape[-1] % 2:
        raise FormatError(
            f"values of four bits go in pairs: expected an even last dim, got {list(shape)}"
            f" ({where})"
        )
    return (*shape[:-1], shape[-1] // 2)


def _are_sizes(value: object) -> bool:
    return isinstance(value, list) and all(type(n) is int and 0 <= n < _MAX_SIZE for n in value)


# ---- writing -------------------------------------------------------------------------------------


def lay_out(request: Request) -> Target:
    """Lays out one file, or `world_size` numbered shards with an index; see `Format.lay_out`.

    Raises:
        PlanError: a dtype has no safetensors tag, or a tensor is split.
    """
    if any(t.fqn == "__metadata__" for t in request.tensors):
        raise PlanError(
            "safetensors cannot hold a tensor named '__metadata__'",
            hint="leave it out with --exclude __metadata__",
        )
    untagged = [
        t for t in request.tensors if t.dtype.tag is None or (t.dtype.tag == _PAIRS and not t.shape)
    ]
    if untagged:
        raise PlanError(
            "safetensors cannot hold "
            + ", ".join(f"{printable(t.fqn)!r} ({t.dtype.name})" for t in untagged[:8]),
            hint="leave them out with --exclude GLOB",
        )
    count = request.world_size
    names = [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    names = list(map(request.name, names)) if request.with_index else [request.file_name]
    literals, slots, sizes, weight_map = [], {}, {}, {}
    for number, name in enumerate(names):
        mine = [t for t in request.tensors if t.boxes[number] is not None]
        # A stable sort: the order within each group stays. Tensors of whole pages come first, so
        # that each begins on a page, and a file system can clone it.
        nbytes_of = {t.fqn: whole(t.shape).numel * t.dtype.itemsize for t in mine}
        mine.sort(
            key=lambda t: (
                nbytes_of[t.fqn] >= request.small_first,
                nbytes_of[t.fqn] % _PAGE_BYTES > 0,
            )
        )
        header = _render_header(mine)
        literals.append(Literal(name, 0, header))
        at = len(header)
        for tensor in mine:
            slots[tensor.fqn] = (Slot(whole(tensor.shape), name, at),)
            weight_map[tensor.fqn] = name
            at += whole(tensor.shape).numel * tensor.dtype.itemsize
        sizes[name] = at
    for name, data in request.files.items():
        if name != request.index:
            literals.append(Literal(name, 0, data))
            sizes[name] = len(data)
    total = sum(whole(t.shape).numel * t.dtype.itemsize for t in request.tensors)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    data = json.dumps(index, indent=2).encode() + b"\n"
    own = Literal(request.index, 0, request.files[request.index]) if request.index else None
    return Target(
        NAME,
        sizes,
        slots,
        tuple(literals),
        index=Literal(INDEX, 0, data) if request.with_index else own,
    )


def _render_header(tensors: Iterable[Any]) -> bytes:
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for tensor in tensors:
        nbytes = whole(tensor.shape).numel * tensor.dtype.itemsize
        shape = (
            [*tensor.shape[:-1], 2 * tensor.shape[-1]]
            if tensor.dtype.tag == _PAIRS
            else list(tensor.shape)
        )
        table[tensor.fqn] = {
            "dtype": tensor.dtype.tag,
            "shape": shape,
            "data_offsets": [at, at + nbytes],
        }
        at += nbytes
    text = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    # payloads begin on a page: whole pages are written, and mapped tensors are page-aligned
    text += b" " * (-(len(text) + 8) % _PAGE_BYTES)
    return len(text).to_bytes(8, "little") + text
