"""The catalog: what a checkpoint holds and where each byte lies.

A catalog is plain data. Any format can fill it, and every operation reads it. It does not know how
files are opened or how a format packs its items.
"""

from __future__ import annotations

import difflib
import fnmatch
import re
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import NamedTuple

from ckpt_tools.core.box import Box, CopyTable, whole
from ckpt_tools.core.dtypes import DType
from ckpt_tools.errors import FormatError, PlanError, printable

RAW, TORCH_ZIP, ZIP = "raw", "torch_zip", "zip"


class Extent(NamedTuple):
    """Bytes `start <= i < start + nbytes` of a file.

    `strides` are in elements, and None for row-major order. `crc32` is the CRC-32 of the bytes,
    where the format keeps one. `packing` is one of:

    - RAW: the range is the payload itself.
    - TORCH_ZIP: the range is a `torch.save` archive. `Format.locate` finds the payload in it.
    - ZIP: the range is any other zip that holds several entries.
    """

    file: str
    start: int
    nbytes: int
    packing: str = RAW
    strides: tuple[int, ...] | None = None
    crc32: int | None = None


class Chunk(NamedTuple):
    """A stored piece of a tensor: which elements, and where they lie."""

    box: Box
    extent: Extent


class ChunkTable(Sequence[Chunk]):
    """Chunks stored as arrays, so that questions about all of them need no loop in Python.

    `chunk_table` implements it. `names` lists the files of the whole catalog, or of a part of it.
    Several tensors share one such tuple.
    """

    names: tuple[str, ...]

    @abstractmethod
    def under(self, names: tuple[str, ...]) -> ChunkTable:
        """Returns the same chunks with other file names, in the same order."""

    @abstractmethod
    def kinds(self) -> list[Box]:
        """Returns one example box per distinct size."""

    @abstractmethod
    def nbytes_by_file(self, itemsize: int) -> Mapping[str, tuple[int, int]]:
        """Returns the number of chunks in each file, and the bytes of their elements."""

    @abstractmethod
    def file_names(self) -> set[str]:
        """Returns the files that hold a chunk."""

    @abstractmethod
    def covers(self, shape: Sequence[int]) -> bool:
        """Tells whether the chunks certainly hold every element of a tensor exactly once."""

    @abstractmethod
    def copies(self, targets: Sequence[Box]) -> CopyTable | None:
        """Pairs every target box with the chunks that overlap it.

        Returns None if the chunks are cut along several dims, or overlap.
        """

    @abstractmethod
    def fit(self, file_sizes: Mapping[str, int], itemsize: int) -> bool:
        """Tells whether every extent lies in its file and is long enough for its elements."""

    @abstractmethod
    def are_apart(self, others: Sequence[ChunkTable], ranges: Iterable[Extent]) -> bool:
        """Tells whether no two extents overlap, among `ranges` and `others`.

        `others` includes this table.
        """


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor: global shape, element type, and its chunks (in any order, replicas included)."""

    fqn: str
    dtype: DType
    shape: tuple[int, ...]
    chunks: Sequence[Chunk]

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor, stored once."""
        return whole(self.shape).numel * self.dtype.itemsize


def kinds_of(entry: TensorEntry) -> list[Box]:
    """Returns boxes of a tensor's chunks: at least one for each distinct size."""
    return (
        entry.chunks.kinds()
        if isinstance(entry.chunks, ChunkTable)
        else [c.box for c in entry.chunks]
    )


def nbytes_by_file(entry: TensorEntry) -> Mapping[str, tuple[int, int]]:
    """Returns the number of a tensor's chunks in each file, and the bytes of their elements."""
    if isinstance(entry.chunks, ChunkTable):
        return entry.chunks.nbytes_by_file(entry.dtype.itemsize)
    found: dict[str, tuple[int, int]] = {}
    for box, extent in entry.chunks:
        count, nbytes = found.get(extent.file, (0, 0))
        found[extent.file] = count + 1, nbytes + box.numel * entry.dtype.itemsize
    return found


def files_of(entry: TensorEntry) -> set[str]:
    """Returns the files that hold a chunk of a tensor."""
    return (
        entry.chunks.file_names()
        if isinstance(entry.chunks, ChunkTable)
        else {c.extent.file for c in entry.chunks}
    )


@dataclass(frozen=True, slots=True)
class BytesEntry:
    """One object that is not a tensor: copied whole and never unpickled.

    Attributes:
        fqn, extent: its name, and its bytes.
        replicas: must hold the same bytes.
        crc64: the sealed CRC-64 of its bytes; None if there is none.
    """

    fqn: str
    extent: Extent
    replicas: tuple[Extent, ...] = ()
    crc64: int | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Catalog:
    """All entries of a checkpoint.

    Attributes:
        format: name of the format that read the checkpoint.
        tensors: by FQN, in the order of the checkpoint.
        objects: by FQN, in the order of the checkpoint.
        paths: for an FQN that was flattened from a nested dict, the keys on the way (DCP's
            `planner_data`).
        file_sizes: bytes of every data file that the entries use.
        world_size: number of ranks that wrote the checkpoint; None if the format does not record
            it.
        ranks: for each data file, the rank that wrote it, if the format records it.
        extras: other facts that the format keeps, as strings for people.
        archives: zips that hold several entries each. Entries are views of their records, so some
            may share bytes.
        memory_files: files that exist in memory only. The reader made these objects and small tensors from
            values in metadata.
        beside: names of files and folders next to the checkpoint's own. Nothing is read from them.
        unread: tensors of kinds that ckpt does not read, such as quantized ones. Each has its kind,
            for people.
        unknown: values of unknown types, each with its type.
        lacks_shapes: the files lack the shapes of parameters; a separate file of shapes must give
            them.
        index_crcs: CRC-64 of the index files, as they were read.
    """

    format: str
    tensors: Mapping[str, TensorEntry]
    objects: Mapping[str, BytesEntry] = field(default_factory=dict)
    paths: Mapping[str, tuple[str | int, ...]] = field(default_factory=dict)
    file_sizes: Mapping[str, int] = field(default_factory=dict)
    world_size: int | None = None
    ranks: Mapping[str, int] = field(default_factory=dict)
    extras: Mapping[str, str] = field(default_factory=dict)
    archives: tuple[Extent, ...] = ()
    memory_files: Mapping[str, bytes] = field(default_factory=dict)
    beside: tuple[str, ...] = ()
    unread: Mapping[str, str] = field(default_factory=dict)
    unknown: Mapping[str, str] = field(default_factory=dict)
    lacks_shapes: bool = False
    index_crcs: Mapping[str, int] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, each stored once."""
        return sum(t.nbytes for t in self.tensors.values())

    def where(self, file: str) -> str:
        """Returns a file's name for a message, with the rank that wrote it if known."""
        return (
            f"{printable(file)} of rank {self.ranks[file]}"
            if file in self.ranks
            else printable(file)
        )


def check_names(catalog: Catalog) -> None:
    """Refuses names that no file could store again.

    Raises:
        FormatError: a name contains a lone surrogate, or is too long for a parameter name.
    """
    for fqn in chain(catalog.tensors, catalog.objects, catalog.unread, catalog.unknown):
        if len(fqn) > _MAX_NAME or (
            not fqn.isascii() and any("\ud800" <= c <= "\udfff" for c in fqn)
        ):
            raise FormatError(f"an entry's name is not valid, or too long: {printable(fqn)!r}")


# ---- views: the same bytes under other names, or fewer of them -----------------------------------


def keep(catalog: Catalog, wanted: Callable[[str], bool]) -> Catalog:
    """Returns the catalog with only the entries whose FQN passes `wanted`."""
    return replace(
        catalog,
        tensors={k: v for k, v in catalog.tensors.items() if wanted(k)},
        objects={k: v for k, v in catalog.objects.items() if wanted(k)},
        paths={k: v for k, v in catalog.paths.items() if wanted(k)},
        unread={k: v for k, v in catalog.unread.items() if wanted(k)},
    )


def check_new_name(old: str, new: str) -> None:
    """Refuses a new name of a tensor that no format can hold.

    Raises:
        PlanError: it is empty, or not Unicode text.
    """
    if not new:
        raise PlanError(
            f"nothing is left of a name: {printable(old)!r}",
            hint="give a replacement that leaves a name",
        )
    if any("\ud800" <= c <= "\udfff" for c in new):
        raise PlanError(
            f"a new name is not Unicode text: {printable(new)!r}, of {printable(old)!r}",
            hint="the replacement has half of a character, or bytes that are no UTF-8",
        )


def rename(catalog: Catalog, new_name: Callable[[str], str]) -> Catalog:
    """Returns the catalog with a new FQN for every tensor.

    The result has no `paths`, because they spell the old names.

    Raises:
        PlanError: two tensors would get one name.
    """
    renamed: dict[str, TensorEntry] = {}
    origin: dict[str, str] = {}
    for fqn, entry in catalog.tensors.items():
        name = new_name(fqn)
        check_new_name(fqn, name)
        if name in renamed:
            raise PlanError(
                f"two tensors would get one name: {printable(origin[name])!r} and"
                f" {printable(fqn)!r} both become {printable(name)!r}",
                hint=(
                    "keep the names as they are with --keep-prefix, or leave one out with --select"
                ),
            )
        renamed[name], origin[name] = replace(entry, fqn=name), fqn
    return replace(
        catalog,
        tensors=renamed,
        paths={},
        unread={new_name(fqn): kind for fqn, kind in catalog.unread.items()},
    )


def matcher(globs: Iterable[str]) -> Callable[[str], bool]:
    """Returns a test whether a name matches one of the globs; `*` matches dots too.

    Without globs, no name matches.
    """
    patterns = [fnmatch.translate(g) for g in globs]
    joined = re.compile("|".join(patterns)) if patterns else None
    return lambda name: joined is not None and joined.match(name) is not None


def check_globs(globs: Iterable[str], names: Sequence[str], what: str) -> None:
    """Refuses globs that match no name.

    Args:
        globs: as for `matcher`.
        names: all names that they may match.
        what: the option, for the message.

    Raises:
        PlanError: a glob matches nothing; the hint lists the nearest names.
    """
    names = list(dict.fromkeys(names))
    for glob in globs:
        wanted = matcher([glob])
        if not any(map(wanted, names)):
            close = difflib.get_close_matches(glob.rstrip("*."), names[:2000], 3, 0.5) or names[:3]
            shown = ", ".join(map(printable, close)) or "there are none"
            raise PlanError(
                f"{what} matches none of {len(names)} names: {printable(glob)!r}",
                hint=f"the nearest names: {shown}",
            )


def chooser(select: Sequence[str], exclude: Sequence[str]) -> Callable[..., bool]:
    """Returns a test of an entry by its names.

    An entry passes if `select` is empty or matches one of its names, and `exclude` matches none of
    them.
    """
    wanted, unwanted = matcher(select), matcher(exclude)
    return lambda *names: (not select or any(map(wanted, names))) and not any(map(unwanted, names))


def choose(catalog: Catalog, select: Sequence[str], exclude: Sequence[str]) -> Catalog:
    """Returns the entries that `select` matches (all if it is empty) and `exclude` does not match.

    Raises:
        PlanError: a glob matches no name.
    """
    names = [*catalog.tensors, *catalog.objects, *catalog.unread]
    check_globs(select, names, "--select")
    check_globs(exclude, names, "--exclude")
    return keep(catalog, chooser(select, exclude))


def refuse_unread(catalog: Catalog, hint: str = "leave them out: --exclude GLOB") -> None:
    """Refuses a catalog with tensors of kinds that ckpt does not read.

    Raises:
        PlanError: there are such tensors; the message lists names and kinds.
    """
    if catalog.unread:
        some = [
            f"{printable(name)!r} ({printable(kind)})"
            for name, kind in list(catalog.unread.items())[:4]
        ]
        more = f" and {len(catalog.unread) - 4} more" if len(catalog.unread) > 4 else ""
        raise PlanError(
            f"tensors of kinds that ckpt does not read: {', '.join(some)}{more}", hint=hint
        )


_MAX_NAME = 1 << 16
_WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})


def strip_wrappers(fqn: str) -> str:
    """Returns an FQN without the segments that wrappers of the model add.

    torch.compile, FSDP1 and activation checkpointing add their segments anywhere. DDP and DeepSpeed
    put `module` in front.
    """
    segments = [s for s in fqn.split(".") if s not in _WRAPPERS]
    while len(segments) > 1 and segments[0] == "module":
        segments = segments[1:]
    return ".".join(segments) if segments else fqn


def stripped_from(fqn: str) -> str:
    """Returns the segments that `strip_wrappers` removes, joined; "" for none."""
    segments = fqn.split(".")
    # the number of leading `module` segments
    front = len([s for s in segments if s not in _WRAPPERS]) - len(strip_wrappers(fqn).split("."))
    gone = [s for s in segments if s in _WRAPPERS]
    return ".".join([*gone, *(["module"] * front)])


_OTHER_STATE = re.compile(
    r"(optim(izer)?s?(_states?)?(_\d+)?|(lr_)?schedulers?(_\d+)?|dataloaders?|train_state|train_loop|trainer|samplers?|(grad_)?scalers?"
    r"|rngs?(_states?)?|random_states?(_\d+)?|callbacks?|loops|timestamp|hparams|hyper_parameters|(global_)?steps?|epochs?|iterations?)"
)
_MODEL_KEYS = ("model", "MODEL", "model_state_dict", "state_dict", "module", "model_state")


def is_other_state(segment: str) -> bool:
    """Tells whether a key of a training state usually holds optimizer, scheduler or other state."""
    return _OTHER_STATE.fullmatch(segment) is not None


def key_path(catalog: Catalog, fqn: str) -> tuple[str, ...]:
    """Returns the keys that lead to an entry.

    They are the keys that the format kept, or else the FQN split at its dots.
    """
    path = catalog.paths.get(fqn)
    return tuple(map(str, path)) if path else tuple(fqn.split("."))


def find_optimizers(catalog: Catalog) -> set[tuple[str, ...]]:
    """Returns the keys above each optimizer, whatever its name.

    An optimizer is a dict that holds `param_groups`, usually with `state` beside it.
    """
    found: dict[tuple[str, ...], set[str]] = {}
    for fqn in chain(catalog.objects, catalog.tensors):
        path = key_path(catalog, fqn)
        for depth, key in enumerate(path[:-1]):
            if key in ("state", "param_groups"):
                found.setdefault(path[:depth], set()).add(key)
                break
    return {prefix for prefix, keys in found.items() if prefix and "param_groups" in keys}


def find_model(catalog: Catalog) -> tuple[str, ...]:
    """Returns the keys above the model: `("model",)` for Accelerate, `()` for torchtitan.

    If the format kept the paths, a key such as `model` leads to the model. Without paths, `model.`
    may also be the first attribute of the module, such as Hugging Face's `model.` beside
    `lm_head.`. It then counts only if nothing else lies beside it.
    """
    optimizers = find_optimizers(catalog)
    is_below = _below(optimizers)
    paths = [path for fqn in catalog.tensors if not is_below(path := key_path(catalog, fqn))]
    prefix: tuple[str, ...] = ()
    for depth in range(3):
        level = [p for p in paths if p[:depth] == prefix and len(p) > depth]
        inner = {p[depth] for p in level if len(p) > depth + 1}
        beside = {p[depth] for p in level if not is_other_state(p[depth])}
        found = [k for k in _MODEL_KEYS if k in inner]
        if found and (catalog.paths or beside == {found[0]}):
            return _below_its_file(catalog, paths, (*prefix, found[0]))
        if (
            len(beside) == 1
            and beside <= inner
            and catalog.paths
            and {o[:depth] for o in optimizers if len(o) == depth + 1} == {prefix}
        ):
            # the only dict beside an optimizer is the model, whatever its key
            return (*prefix, *beside)
        if len(beside) != 1 or not any(
            len(p) > depth + 1 and p[depth + 1] in _MODEL_KEYS for p in level
        ):
            return ()
        prefix = (*prefix, beside.pop())
    return ()


def _below(prefixes: Collection[tuple[str, ...]]) -> Callable[[tuple[str, ...]], bool]:
    """Returns a test whether a path lies below one of these."""
    depths = sorted({len(prefix) for prefix in prefixes})
    return lambda path: any(path[:depth] in prefixes for depth in depths if depth < len(path))


def _below_its_file(
    catalog: Catalog, paths: Iterable[tuple[str, ...]], prefix: tuple[str, ...]
) -> tuple[str, ...]:
    """Returns the keys of a model whose files are named like its key.

    An example is `model_rank_0.pt` that holds `{"model": …, "optimizer": …}`.
    """
    below = [p[len(prefix) :] for p in paths if p[: len(prefix)] == prefix]
    keys = {p[0] for p in below if not is_other_state(p[0])}
    is_twice = (
        bool(catalog.paths)
        and len(keys) == 1
        and keys <= set(_MODEL_KEYS)
        and all(len(p) == 2 for p in below if p[0] in keys)
    )
    return (*prefix, *keys) if is_twice else prefix


def model_only(catalog: Catalog, key: str | None = None) -> tuple[Catalog, tuple[str, ...]]:
    """Returns the model's tensors under their names within the model, and the keys taken off.

    Args:
        catalog: of the whole state.
        key: of the model, such as `ema.model`; found if None.

    Raises:
        PlanError: no tensor is below that key.
    """
    prefix, is_below = find_model(catalog), _below(find_optimizers(catalog))
    if key is not None:
        prefix = tuple(key.split("."))
        if not any(key_path(catalog, fqn)[: len(prefix)] == prefix for fqn in catalog.tensors):
            roots = sorted({key_path(catalog, fqn)[0] for fqn in catalog.tensors})
            raise PlanError(
                f"no tensor is below the key {printable(key)!r}",
                hint=f"the keys at the top: {printable(', '.join(roots[:8]))}",
            )

    def is_model(fqn: str) -> bool:
        path = key_path(catalog, fqn)
        return (
            path[: len(prefix)] == prefix
            if prefix
            else not (is_other_state(path[0]) or is_below(path))
        )

    kept = replace(keep(catalog, is_model), objects={})
    cut = len(".".join(prefix)) + 1 if prefix else 0
    return rename(kept, lambda fqn: fqn[cut:]), prefix
