"""One `torch.save` file a rank, with DTensors inside: verl's `model_world_size_8_rank_3.pt`, `rank0.pt`, ….

A DTensor's pickle has its mesh, its placements and the shape of the whole; so each file's part has its box, and all files
together are one checkpoint. A tensor that is none of these is the same on all ranks: one tensor with replicas. May import
levels 0 to 2 and torch_save.

Source: torch 2.13 `torch/distributed/tensor/_api.py`, `device_mesh.py`; confirmed on files that jobs wrote.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from ckpt_tools.box import Box, whole
from ckpt_tools.catalog import TORCH_ZIP, Catalog, Chunk, Extent, TensorEntry
from ckpt_tools.dtypes import DType
from ckpt_tools.errors import CatalogError, FormatError, printable
from ckpt_tools.formats import torch_save
from ckpt_tools.formats.torch_save import Kept, Path, Sharded, join, read_tensors, told
from ckpt_tools.layout import Placement, Replicate, Shard, StridedShard, rank_boxes
from ckpt_tools.storage import Store

NAME = "per_rank"
LOOKS_FOR = "*rank_0.pt"
_FILE = re.compile(r"(?P<part>.*?)[._-]?(?:world_size_(?P<size>\d{1,7})_)?rank[._-]?(?P<rank>\d{1,7})\.(?:pt|pth|bin)")
_FLAT = "_flat_param"
locate, guess, lay_out = torch_save.locate, torch_save.guess, torch_save.lay_out


def recognise(files: Mapping[str, int]) -> bool:
    """Tells whether files of ranks are there, rank 0's among them."""
    return any(m["rank"].strip("0") == "" for m in map(_FILE.fullmatch, files) if m)


def read_catalog(store: Store) -> Catalog:
    """Reads `data.pkl` of every rank's files; see `Format.read_catalog`."""
    files = store.list_files()
    chunks: dict[str, list[Chunk]] = {}
    kinds: dict[str, tuple[DType, tuple[int, ...]]] = {}
    paths: dict[str, Path] = {}
    ranks: dict[str, int] = {}
    others: Counter[str] = Counter()
    for part, names in _parts(files).items():
        for rank, name in enumerate(names):
            ranks[name] = rank
            for path, kind, chunk in _read_rank(store, name, files[name], rank, others):
                whole_path = (part, *path) if part else path
                fqn = join(whole_path)
                if kinds.setdefault(fqn, kind) != kind:
                    raise FormatError(f"ranks disagree about a tensor: {printable(fqn)!r}, {kinds[fqn]} and {kind} ({printable(name)})")
                chunks.setdefault(fqn, []).append(chunk)
                paths[fqn] = whole_path
    entries = {fqn: TensorEntry(fqn, *kinds[fqn], tuple(found)) for fqn, found in chunks.items()}
    sizes = {name: files[name] for name in ranks}
    return Catalog(
        NAME, entries, {}, paths, sizes, max(ranks.values()) + 1, ranks, told(others),
        tuple(Extent(name, 0, size, TORCH_ZIP) for name, size in sizes.items()),
    )  # fmt: skip


def _parts(files: Mapping[str, int]) -> dict[str, list[str]]:
    """Returns the files of each part (model, optim, …) by rank."""
    found: dict[str, dict[int, str]] = {}
    sizes: dict[str, set[int]] = {}
    for name in files:
        if match := _FILE.fullmatch(name):
            found.setdefault(match["part"], {})[int(match["rank"])] = name
            sizes.setdefault(match["part"], set()).update([int(match["size"])] if match["size"] else [])
    for part, names in found.items():
        world_size = max([*sizes[part], max(names) + 1])
        missing = [rank for rank in range(world_size) if rank not in names]
        if missing or len(sizes[part]) > 1:
            raise CatalogError(
                f"files of ranks are missing: {', '.join(map(str, missing[:10]))} of {world_size} ({printable(part) or 'rank_N'})",
                hint="copy the files of all ranks of one save into one directory",
            )
    return {part: [names[rank] for rank in sorted(names)] for part, names in sorted(found.items())}


def _read_rank(
    store: Store, name: str, size: int, rank: int, others: Counter[str]
) -> Iterator[tuple[Path, tuple[DType, tuple[int, ...]], Chunk]]:
    """Yields the tensors of one file: path, type and shape of the whole, and the part that is here."""
    for path, value, extent in read_tensors(store, name, size, others):
        if path and str(path[-1]).endswith(_FLAT):
            raise FormatError(f"a flat parameter of FSDP1: {printable(join(path))!r} ({printable(name)})", hint="not read yet")
        if not isinstance(value, Sharded):
            yield path, (value.dtype, value.sizes), Chunk(whole(value.sizes), extent)
            continue
        try:
            box = _box(value, rank)
        except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
            where = f"{printable(join(path))!r}, {printable(name)}"
            raise FormatError(f"a DTensor of another kind than torch 2.13 writes: {printable(str(error))} ({where})") from error
        if box.sizes != value.local.sizes:
            raise FormatError(
                f"a rank's part has another shape than its placements say: expected {list(box.sizes)}, got {list(value.local.sizes)}"
                f" ({printable(join(path))!r}, {printable(name)})"
            )
        yield path, (value.local.dtype, value.shape), Chunk(box, extent)


def _box(value: Sharded, rank: int) -> Box:
    """Returns the elements that a rank's part has."""
    mesh, placements = value.spec.state["mesh"], [_placement(p, len(value.shape)) for p in value.spec.state["placements"]]
    shape = _mesh_shape(mesh)
    if math.prod(shape) > 1 << 20:
        raise ValueError(f"a mesh of {math.prod(shape)} ranks")
    coordinate = mesh.state.get("_coordinate_on_dim")
    number = rank
    if isinstance(coordinate, (tuple, list)) and len(coordinate) == len(shape):
        number = 0
        for index, size in zip(coordinate, shape, strict=True):
            if type(index) is not int or not 0 <= index < size:
                raise ValueError("a coordinate outside of its mesh")
            number = number * size + index
    (box,) = rank_boxes(value.shape, shape, placements)[number]
    return box


def _mesh_shape(mesh: Kept) -> Sequence[int]:
    """Returns the ranks along each axis."""
    if "_layout" in mesh.state:
        shape = tuple(math.prod(axis.state["shape"]) for axis in mesh.state["_layout"].state["axes"])
    else:
        shape = tuple(mesh.state["mesh"].sizes)
    if not all(type(n) is int and n > 0 for n in shape):
        raise ValueError("a mesh without ranks")
    return shape


def _placement(kept: Kept, ndim: int) -> Placement:
    kind = type(kept).__name__
    if kind == "Replicate":
        return Replicate()
    dim = kept.state["dim"]
    if kind not in ("Shard", "_StridedShard") or type(dim) is not int or not 0 <= dim < ndim:
        raise ValueError(f"a placement that is not final: {kind}")
    return Shard(dim) if kind == "Shard" else StridedShard(dim)
