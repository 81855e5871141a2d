"""A job's directory such as `checkpoint-100/`, of Accelerate's `save_state` or the Trainer.

A model and an optimizer lie side by side, each in a file or, as DCP, in a folder:

- FSDP's sharded state: `pytorch_model_fsdp_0/` and `optimizer_0/`.
- FSDP's full state: `pytorch_model_fsdp.bin` and `optimizer.bin`.
- Other jobs: `model.safetensors`, and `optimizer.bin` or `optimizer.pt`.

All become one catalog. The first model is `model.*`, and the first optimizer is `optimizer.*`.
Others have the name of their folder or file.

Source: accelerate 1.15 `utils/fsdp_utils.py`, `checkpointing.py`; transformers 5.23 `trainer.py`;
confirmed on directories that they wrote.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from ckpt_tools.core.catalog import Catalog
from ckpt_tools.core.plan import Literal, Target
from ckpt_tools.errors import CatalogError, CheckpointError, FormatError, printable
from ckpt_tools.formats import safetensors, torch_save
from ckpt_tools.formats.base import SHAPES, Request, below, note_of
from ckpt_tools.formats.builder import UnreadValues, name_of
from ckpt_tools.formats.dcp import format as dcp
from ckpt_tools.formats.in_memory import InMemoryFile
from ckpt_tools.formats.pickle.state import Path, is_value, leaves
from ckpt_tools.formats.torch_save import read_leaves
from ckpt_tools.storage import Store, read
from ckpt_tools.storage.small_files import parse_json

NAME = "accelerate"
LOOKS_FOR = "pytorch_model_fsdp_0/"
_FOLDER = re.compile(r"(?:pytorch_model_fsdp|optimizer)_([0-9]{1,6})")
_FULL = re.compile(r"pytorch_model_fsdp(?:_([0-9]{1,6}))?\.bin")
_MORE_MODELS = re.compile(r"(?:model|pytorch_model)_([0-9]{1,6})\.(?:safetensors|bin)")
_OPTIMIZER = re.compile(r"optimizer(?:_([0-9]{1,6}))?\.(?:bin|pt)")
_VALUES = re.compile(
    r"(?P<key>(?:scheduler|scaler)(?:_[0-9]{1,6})?)\.(?:bin|pt)|(?P<progress>trainer_state)\.json"
)
_MAX_JSON_BYTES = 64 << 20
locate, guess = dcp.locate, dcp.guess


def recognise(files: Mapping[str, int]) -> bool:
    """Tells whether the files have an FSDP model, or any model beside other state of a job."""
    if any(
        name.startswith("pytorch_model_fsdp_") and name.endswith("/.metadata") for name in files
    ) or any(map(_FULL.fullmatch, files)):
        return True
    return any(_OPTIMIZER.fullmatch(name) or _VALUES.fullmatch(name) for name in files) and bool(
        _models(files)
    )


def _models(files: Mapping[str, int]) -> dict[str, list[str]]:
    """Returns the files of each model by its name in the catalog.

    The first model is given by its index, if it has one. If a model exists in both formats,
    safetensors is used, as in transformers.
    """
    own = {
        name: size
        for name, size in files.items()
        if "/" not in name and not _MORE_MODELS.fullmatch(name)
    }
    found: dict[str, list[str]] = {}
    full = sorted(filter(_FULL.fullmatch, own))
    if full:
        return {
            "model" if name == "pytorch_model_fsdp.bin" else name.removesuffix(".bin"): [name]
            for name in full
        }
    if safetensors.recognise(own):
        found["model"] = (
            [safetensors.INDEX]
            if safetensors.INDEX in own
            else safetensors.complete_set(safetensors.data_files(own), "model")
        )
    elif torch_save.recognise(own):
        found["model"] = [torch_save.INDEX if torch_save.INDEX in own else "pytorch_model.bin"]
    if found:
        found |= {
            name.rpartition(".")[0]: [name]
            for name in sorted(filter(_MORE_MODELS.fullmatch, files))
        }
    return found


class _Entries:
    """The collected entries of all parts."""

    def __init__(self) -> None:
        self.tables: dict[str, Any] = {
            "tensors": {},
            "objects": {},
            "paths": {},
            "file_sizes": {},
            "ranks": {},
            "unread": {},
            "unknown": {},
            "index_crcs": {},
        }
        self.archives: list[Any] = []
        self.memory_file, self.unknown = InMemoryFile(), UnreadValues()
        self.world_size: int | None = None  # only sharded state records it
        self.read: set[str] = set()  # files and folders

    def add(self, part: Catalog, where: str) -> None:
        """Adds a part whose names are those of the whole catalog."""
        for name, table in self.tables.items():
            if both := table.keys() & getattr(part, name).keys():
                raise FormatError(
                    f"two parts hold {printable(next(iter(both)))!r} ({printable(where)})"
                )
            table |= getattr(part, name)
        self.archives += part.archives
        self.world_size = max(self.world_size or 0, part.world_size or 0) or None

    def add_files(self, part: Catalog, key: str, names: Iterable[str]) -> None:
        """Adds the contents of one part's files; `key` goes before all names."""
        paths = {n: (key, *(part.paths.get(n) or (n,))) for n in (*part.tensors, *part.objects)}
        self.add(
            replace(
                below(part, "", f"{key}."),
                paths={f"{key}.{n}": path for n, path in paths.items()},
                memory_files={},
            ),
            key,
        )
        self.read.update(names)


def read_catalog(store: Store) -> Catalog:
    """Reads the metadata of every part; see `Format.read_catalog`."""
    return _read(store, None)


def read_readable(store: Store) -> tuple[Catalog, dict[str, CheckpointError], dict[str, str]]:
    """Reads the readable parts, if shards of the model's safetensors are missing or damaged.

    See `safetensors.read_readable`.
    """
    model, broken, lost = safetensors.read_readable(store)
    catalog = _read(store, model, broken)
    return catalog, broken, {f"model.{fqn}": name for fqn, name in lost.items()}


def _read(
    store: Store, model: Catalog | None, broken: dict[str, CheckpointError] | None = None
) -> Catalog:
    """Reads every part.

    Args:
        store: the directory.
        model: replaces the model's own files if it is given.
        broken: receives the error of each optimizer that cannot be read. If None, it is raised.
    """
    files = store.list_files(below=True)
    parts = _Entries()
    _read_folders(store, files, parts)
    for key, names in _models(files).items():
        if key == "model" and any(name.startswith("model.") for name in parts.tables["tensors"]):
            # a DCP folder has the model already. The file is a merged copy in the same directory,
            # and becomes an entry of `beside`
            continue
        catalog = model if key == "model" and model else _read_model(store, names, parts)
        parts.add_files(catalog, key, [*names, *catalog.file_sizes])
    for name in sorted(filter(_OPTIMIZER.fullmatch, files)):
        key = name.rpartition(".")[0]
        if not any(n.startswith(f"{key}.") for n in parts.tables["paths"]):
            try:
                found = torch_save.read_files(store, [name], {}, parts.memory_file)
            except (FormatError, CatalogError) as error:
                if broken is None:
                    raise
                broken[name] = error
                continue
            parts.add_files(found, key, [name])
    for name, path, value in _values(store, files, parts.unknown):
        fqn = name_of(path)
        parts.read.add(name)
        if fqn in parts.tables["tensors"] or fqn in parts.tables["objects"]:
            parts.unknown.skip((name, *path), "its name is taken")
            continue
        parts.tables["objects"][fqn] = parts.memory_file.value(fqn, value)
        parts.tables["paths"][fqn] = path
    tops = {name.partition("/")[0] for name in (*files, *store.folders())}
    beside = tuple(
        sorted(
            name
            for name in tops
            if name not in parts.read and name != SHAPES and note_of(name) is None
        )
    )
    parts.tables["unread"] |= parts.unknown.unread
    parts.tables["unknown"] |= parts.unknown.unknown
    extras = {"beside": ", ".join(map(printable, beside))} if beside else {}
    return Catalog(
        NAME,
        **parts.tables,
        world_size=parts.world_size,
        extras=extras | parts.unknown.told,
        archives=tuple(parts.archives),
        beside=beside,
        memory_files=parts.memory_file.files,
    )


def _read_folders(store: Store, files: Mapping[str, int], parts: _Entries) -> None:
    for folder in sorted({name.partition("/")[0] for name in files if name.endswith("/.metadata")}):
        match = _FOLDER.fullmatch(folder)
        if match:
            inner = store.enter(folder)
            try:
                part = dcp.read_catalog(inner)
            finally:
                inner.close()
            parts.add(below(part, folder, "" if int(match[1]) == 0 else f"{folder}."), folder)
            parts.read.add(folder)


def _read_model(store: Store, names: list[str], parts: _Entries) -> Catalog:
    index = names[0] if names[0] in (safetensors.INDEX, torch_save.INDEX) else ""
    weight_map = safetensors.read_index(store, index) if index else {}
    data = sorted(set(weight_map.values())) or names
    if data[0].endswith(safetensors.SUFFIX):
        return safetensors.read_files(store, data, weight_map)
    return torch_save.read_files(store, data, weight_map, parts.memory_file)


def key_of(name: str) -> str:
    """Returns the key of a file's values in a catalog; "" for a file without values."""
    match = _VALUES.fullmatch(name)
    return (match["key"] or match["progress"]) if match else ""


def _values(
    store: Store, files: Mapping[str, int], unknown: UnreadValues
) -> Iterator[tuple[str, Path, object]]:
    """Yields the plain values of schedulers, a loss scaler and the Trainer's progress.

    Each value comes with its file.
    """
    for name in sorted(files):
        match = _VALUES.fullmatch(name)
        if match is None:
            continue
        if match["key"]:
            mine = UnreadValues()
            found = list(read_leaves(store, name, files[name], mine))
            unknown.take(mine, (match["key"],))
            for path, value, extents in found:
                if extents:
                    unknown.skip((name, *path), "a tensor")
                else:
                    yield name, (match["key"], *path), value
            continue
        try:
            if files[name] > _MAX_JSON_BYTES:
                raise ValueError(f"{files[name]} bytes")
            values = leaves(parse_json(read(store, name)), name)
            yield from (
                (name, (match["progress"], *path), value)
                for path, value in values
                if is_value(value)
            )
        except (ValueError, RecursionError) as error:
            raise FormatError(f"malformed: {printable(str(error))} ({name})") from error


def lay_out(request: Request) -> Target:
    """Lays out the model and each optimizer as DCP in separate folders; see `Format.lay_out`.

    The model's metadata is the index. The optimizers' metadata are among the data files.
    `request.files` lie beside the folders.
    """
    targets = {
        folder: _lay_out_part(request, folder)
        for folder in sorted({_folder(t.fqn) for t in request.tensors})
    }
    first = targets.pop(_MODEL, None) or targets.pop(min(targets))
    beside = {name: len(data) for name, data in request.files.items()}
    merged: dict[str, Any] = {
        "file_sizes": {**first.file_sizes, **beside},
        "slots": dict(first.slots),
    }
    literals = [*first.literals, *(Literal(name, 0, data) for name, data in request.files.items())]
    trailers = list(first.trailers)
    for part in targets.values():
        assert part.index is not None
        merged["file_sizes"] |= {**part.file_sizes, part.index.file: len(part.index.data)}
        merged["slots"] |= part.slots
        literals += [*part.literals, part.index]
        trailers += part.trailers
    return Target(
        NAME,
        **merged,
        literals=tuple(literals),
        trailers=tuple(trailers),
        index=first.index,
        world_size=request.world_size,
    )


_MODEL = "pytorch_model_fsdp_0"


def _folder(fqn: str) -> str:
    """Returns the folder of an entry.

    The first optimizer has the names `optimizer.…`, the second `optimizer_1.optimizer.…`.
    """
    match = re.match(r"optimizer(?:_([0-9]+))?\.", fqn)
    return f"optimizer_{match[1] or 0}" if match else _MODEL


def _lay_out_part(request: Request, folder: str) -> Target:
    """Lays out the entries of one folder, with their names within it."""

    def mine(fqn: str) -> bool:
        return _folder(fqn) == folder

    def inner(fqn: str) -> str:
        return fqn.partition(".")[2] if re.match(r"optimizer_[0-9]+\.", fqn) else fqn

    own = replace(
        request,
        tensors=[replace(t, fqn=inner(t.fqn)) for t in request.tensors if mine(t.fqn)],
        objects={inner(n): size for n, size in request.objects.items() if mine(n)},
        paths={
            inner(n): path[1:] if inner(n) != n else path
            for n, path in request.paths.items()
            if mine(n)
        },
        files={},  # they lie beside the folders
    )
    part = dcp.lay_out(own)
    outer = {inner(n): n for n in (*(t.fqn for t in request.tensors), *request.objects) if mine(n)}
    assert part.index is not None

    def at(name: str) -> str:
        return f"{folder}/{name}"

    return replace(
        part,
        file_sizes={at(n): size for n, size in part.file_sizes.items()},
        slots={
            outer[n]: tuple(slot._replace(file=at(slot.file)) for slot in slots)
            for n, slots in part.slots.items()
        },
        literals=tuple(literal._replace(file=at(literal.file)) for literal in part.literals),
        trailers=tuple(trailer._replace(file=at(trailer.file)) for trailer in part.trailers),
        index=part.index._replace(file=at(part.index.file)),
    )
