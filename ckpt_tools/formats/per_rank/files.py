"""One `torch.save` file per rank, with DTensors or ShardedTensors inside.

Examples are verl's `model_world_size_8_rank_3.pt`, `rank0.pt`, Accelerate's
`pytorch_model_fsdp_0_rank3.bin`, and torch_checkpointing's `model_3.pt`. Meta's
`consolidated.03.pth` have plain tensors, whose names tell their place.

A DTensor's pickle has its mesh, its placements and its global shape. Each file's part therefore has
a known box, and all files together are one checkpoint. Any other tensor is the same on all ranks
and becomes one tensor with replicas.

Source: torch 2.13 `torch/distributed/tensor/_api.py`, `device_mesh.py`; confirmed on files that
jobs wrote.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from ckpt_tools.core.box import Box, whole
from ckpt_tools.core.catalog import (
    Catalog,
    Chunk,
    ChunkList,
    Extent,
)
from ckpt_tools.core.dtypes import DType
from ckpt_tools.core.placements import (
    Placement,
    ReplicatePlacement,
    ShardPlacement,
    StridedShardPlacement,
    rank_box,
)
from ckpt_tools.core.plan import Target
from ckpt_tools.errors import CatalogError, FormatError, printable
from ckpt_tools.formats.base import Request, guess_bare, locate_bare
from ckpt_tools.formats.builder import CatalogBuilder, UnreadValues, name_of
from ckpt_tools.formats.per_rank import meta
from ckpt_tools.formats.per_rank import xla as xla_shards
from ckpt_tools.formats.per_rank.flat_param import (
    RankValue,
    Raw,
    has_flats,
    read_shapes,
    unfold_flat_params,
)
from ckpt_tools.formats.pickle.plain_values import OpaqueObject
from ckpt_tools.formats.pickle.state import DTensorShard, Path, ShardedTensorShard, TensorView
from ckpt_tools.formats.torch_save import read_leaves
from ckpt_tools.storage import Store

NAME = "per_rank"
LOOKS_FOR = "*rank_0.pt"
_FILE = re.compile(
    r"(?P<part>.*?)[._-]?(?:world_size_(?P<size>[0-9]{1,7})_)?rank[._-]?(?P<rank>0{0,8}[0-9]{1,7})(?:[_-]of[_-](?P<of>0{0,8}[0-9]{1,7}))?\.(?:pt|pth|bin)"
)
# the names of torch_checkpointing
_NUMBERED = re.compile(r"(?P<part>.+)_(?P<rank>[0-9]{1,7})(?P<size>)(?P<of>)\.pt")
_BARE = re.compile(r".+_0\.safetensors")  # torch_checkpointing's other layout
# Accelerate's names in large jobs
_PART_NAMES = {"pytorch_model_fsdp_0": "model", "optimizer_0": "optimizer"}
# parts that differ from rank to rank
_OWN = re.compile(r"extra_state|rngs?(_states?)?|random_states?")
locate, guess = locate_bare, guess_bare


def recognise(files: Mapping[str, int]) -> bool:
    """Tells whether there are files of ranks, including rank 0's."""
    return any(int(m["rank"]) == 0 for m in _matches(files).values())


def _matches(files: Mapping[str, int]) -> dict[str, re.Match[str]]:
    """Returns the files of ranks.

    `model_0.pt` may also be an epoch. Bare numbers therefore count only if several parts have the
    same ones, from 0 on.
    """
    for names in (_FILE, meta.FILE):
        if found := {name: m for name in files if (m := names.fullmatch(name))}:
            return found
    numbered = {name: m for name in files if (m := _NUMBERED.fullmatch(name))}
    ranks: dict[str, set[int]] = {}
    for match in numbered.values():
        ranks.setdefault(match["part"], set()).add(int(match["rank"]))
    alike = len({frozenset(r) for r in ranks.values()}) == 1 and all(
        r == set(range(len(r))) for r in ranks.values()
    )
    return numbered if len(ranks) > 1 and alike else {}


class _Ranks:
    """The collected contents of the files of all ranks."""

    def __init__(self) -> None:
        self.chunks: dict[str, list[Chunk]] = {}
        self.kinds: dict[str, tuple[DType, tuple[int, ...]]] = {}
        self.values: dict[str, dict[int, object]] = {}
        self.paths: dict[str, Path] = {}
        self.meshes: set[str] = set()

    def add(self, path: Path, rank: int, value: object, extents: tuple[Extent, ...]) -> None:
        """Adds one entry of one rank's file."""
        fqn = name_of(path)
        if isinstance(value, TensorView):
            kind, found = (value.dtype, value.sizes), [Chunk(whole(value.sizes), *extents)]
        elif isinstance(value, ShardedTensorShard):
            kind = value.dtype, value.shape
            found = [
                Chunk(box, extent) for (_, box), extent in zip(value.parts, extents, strict=True)
            ]
        elif isinstance(value, DTensorShard):
            box = _checked_box(value, rank, f"{printable(fqn)!r}, {printable(extents[0].file)}")
            self.meshes.add(_mesh_name(value.spec.state["mesh"]))
            kind, found = (value.local.dtype, value.shape), [Chunk(box, *extents)]
        else:
            self.values.setdefault(fqn, {})[rank] = value
            self.paths[fqn] = path
            return
        if self.kinds.setdefault(fqn, kind) != kind:
            raise FormatError(
                f"ranks disagree about a tensor: {printable(fqn)!r}, {self.kinds[fqn]} and {kind}"
                f" (rank {rank})"
            )
        self.chunks.setdefault(fqn, []).extend(found)
        self.paths[fqn] = path

    def build(self, found: CatalogBuilder) -> None:
        """Adds all entries to a catalog: a value that differs is one entry per rank."""
        for fqn, path in self.paths.items():
            if fqn in self.chunks:
                found.tensor(path, *self.kinds[fqn], ChunkList(self.chunks[fqn]))
            if (by_rank := self.values.get(fqn)) is None:
                continue
            if fqn in self.kinds:
                raise FormatError(
                    f"a tensor on some ranks and a value on others: {printable(fqn)!r}"
                )
            first = next(iter(by_rank.values()))
            # as text, because 1 == 1.0 == True, 0.0 == -0.0, and NaN is not equal to itself
            if all(type(v) is type(first) and repr(v) == repr(first) for v in by_rank.values()):
                found.value(path, first)
                continue
            for rank, value in by_rank.items():
                found.value((*path, f"rank_{rank}"), value)


def _read_ranks(
    store: Store, files: Mapping[str, int], others: UnreadValues
) -> tuple[Raw, dict[str, int]]:
    """Returns the entries of all ranks by path, and the rank of each file.

    Raises:
        FormatError: a rank has two entries of one name.
    """
    raw: Raw = {}
    ranks: dict[str, int] = {}
    seen: dict[int, dict[str, str]] = {}
    for part, names in _parts(files).items():
        for rank, name in enumerate(names):
            ranks[name] = rank
            above = (_PART_NAMES.get(part, part),) if part else ()
            if _OWN.fullmatch(part):
                above = (*above, f"rank_{rank}")
            mine, here = UnreadValues(), seen.setdefault(rank, {})
            for path, value, extents in read_leaves(store, name, files[name], mine):
                fqn = name_of((*above, *path))
                if fqn in here:
                    where = f"{printable(here[fqn])} and {printable(name)}"
                    raise FormatError(
                        f"two entries have one name: {printable(fqn)!r} ({where})",
                        hint="if the files are of two saves, move one away",
                    )
                here[fqn] = name
                raw.setdefault((*above, *path), {})[rank] = RankValue(value, extents)
            others.take(mine, above)
    return raw, ranks


def read_catalog(store: Store) -> Catalog:
    """Reads `data.pkl` of every rank's files; see `Format.read_catalog`."""
    files = store.list_files()
    _refuse_bare_shards(files)
    held_by, found = _Ranks(), CatalogBuilder()
    raw, ranks = _read_ranks(store, files, found.others)
    num_ranks = max(ranks.values()) + 1
    is_flat = has_flats(raw)
    named = (
        unfold_flat_params(raw, read_shapes(store, files), num_ranks, found.others)
        if is_flat
        else {}
    )
    if xla_shards.has_shards(raw):
        named |= xla_shards.unfold_xla_shards(raw, num_ranks, found.others)
    if meta.are_of_meta(ranks):
        named |= meta.join_parts(raw, num_ranks)
    for path, by_rank in raw.items():
        for rank, held in by_rank.items():
            held_by.add(path, rank, held.value, held.extents)
    held_by.build(found)
    for path, entry in named.items():
        found.tensor(path, entry.dtype, entry.shape, entry.chunks)
    found.sizes = {name: files[name] for name in ranks}
    found.extras = _told_mesh(held_by.meshes)
    return replace(found.finish(NAME, num_ranks, ranks), lacks_shapes=is_flat)


def lay_out(request: Request) -> Target:
    """Lays out one file per rank; see `Format.lay_out`.

    It needs torch, because how a DTensor is pickled depends on the version of torch.
    """
    from ckpt_tools.formats.per_rank.dtensor_write import lay_out as with_torch

    return with_torch(request)


def _refuse_bare_shards(files: Mapping[str, int]) -> None:
    """Refuses shards that are probably the model, instead of ignoring them.

    Raises:
        FormatError: there are `.safetensors` with the same numbers among the files of ranks.
    """
    for name in files:
        if _BARE.fullmatch(name) and f"{name.removesuffix('0.safetensors')}1.safetensors" in files:
            raise FormatError(
                "shards of ranks as bare safetensors, which do not record their position:"
                f" {printable(name)}",
                hint="let torch_checkpointing save that item with TorchSerialization, its default",
            )


def _parts(files: Mapping[str, int]) -> dict[str, list[str]]:
    """Returns the files of each part (model, optim, …) by rank."""
    found: dict[str, dict[int, str]] = {}
    sizes: dict[str, set[int]] = {}
    for name, match in sorted(_matches(files).items()):
        of_part = found.setdefault(match["part"], {})
        if (other := of_part.setdefault(int(match["rank"]), name)) != name:
            raise CatalogError(
                f"two files of one rank: {printable(other)} and {printable(name)}",
                hint="one of them is of another save: move it away",
            )
        sizes.setdefault(match["part"], set()).update(
            [int(size)] if (size := match["size"] or match["of"]) else []
        )
    known = {size for part in found for size in sizes[part]}
    if len(known) > 1:
        raise CatalogError(
            f"files of jobs with different numbers of ranks: {', '.join(map(str, sorted(known)))}",
            hint="keep the files of one save",
        )
    for part, names in found.items():
        world_size = max([*sizes[part], max(names) + 1])
        missing = [rank for rank in range(world_size) if rank not in names]
        if missing:
            raise CatalogError(
                f"files of ranks are missing: {', '.join(map(str, missing[:10]))} of {world_size}"
                f" ({printable(part) or 'rank_N'})",
                hint="copy the files of all ranks of one save into one directory",
            )
    return {part: [names[rank] for rank in sorted(names)] for part, names in sorted(found.items())}


def _checked_box(value: DTensorShard, rank: int, where: str) -> Box:
    """Returns the elements that a rank's part of a DTensor holds."""
    try:
        box = _box(value, rank)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        raise FormatError(
            f"a DTensor of a kind that torch 2.1 to 2.15 do not write: {printable(str(error))}"
            f" ({where})"
        ) from error
    if box.sizes != value.local.sizes:
        raise FormatError(
            f"a rank's part has another shape than its placements say: expected {list(box.sizes)},"
            f" got {list(value.local.sizes)} ({where})"
        )
    return box


def _box(value: DTensorShard, rank: int) -> Box:
    """Returns the elements that a rank's part holds."""
    mesh, placements = (
        value.spec.state["mesh"],
        [_placement(p, len(value.shape)) for p in value.spec.state["placements"]],
    )
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
    if number >= math.prod(shape):
        raise ValueError(f"rank {number} of a mesh of {math.prod(shape)} ranks")
    return rank_box(value.shape, shape, placements, number)


def _mesh_shape(mesh: OpaqueObject) -> Sequence[int]:
    """Returns the number of ranks along each axis."""
    if "_layout" in mesh.state:
        layout = mesh.state["_layout"].state
        # "shape" before torch 2.13
        axes = (
            [axis.state["shape"] for axis in layout["axes"]]
            if "axes" in layout
            else layout["shape"]
        )
        shape = tuple(
            axis if type(axis) is int else math.prod(axis)
            for axis in (axes if isinstance(axes, (list, tuple)) else (axes,))
        )
    else:
        shape = tuple(mesh.state["mesh"].sizes)
    if not all(type(n) is int and n > 0 for n in shape):
        raise ValueError("a mesh without ranks")
    return shape


def _mesh_name(mesh: OpaqueObject) -> str:
    """Returns the device type of a mesh and the names of its axes: `cuda:ddp,fsdp`.

    Returns "" for a mesh of another kind.
    """
    device = mesh.state.get("_device_type", mesh.state.get("device_type"))
    names = mesh.state.get("_mesh_dim_names", mesh.state.get("mesh_dim_names")) or ()
    if not isinstance(names, tuple) or not all(type(name) is str for name in (device, *names)):
        return ""
    return printable(f"{device}:{','.join(names)}" if names else str(device))


def _told_mesh(meshes: set[str]) -> dict[str, str]:
    return {"mesh": next(iter(meshes))} if len(meshes) == 1 and "" not in meshes else {}


def _placement(kept: OpaqueObject, ndim: int) -> Placement:
    kind = type(kept).__name__
    if kind == "Replicate":
        return ReplicatePlacement()
    dim = kept.state["dim"]
    if kind not in ("Shard", "_StridedShard") or type(dim) is not int or not 0 <= dim < ndim:
        raise ValueError(f"a placement that is not final: {kind}")
    return ShardPlacement(dim) if kind == "Shard" else StridedShardPlacement(dim)
