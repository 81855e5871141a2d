"""Lists the formats, and detects the format of a path.

`open_source` accepts a checkpoint, a file, or a directory with a checkpoint somewhere below.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, replace
from glob import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ckpt_tools.core.catalog import RAW, Catalog, Extent, Payloads, TensorEntry, check_names
from ckpt_tools.core.coverage import check
from ckpt_tools.core.memory import no_gc
from ckpt_tools.core.quantized import mark_quantized
from ckpt_tools.engine.crc_watch import Comparison, compare_positions
from ckpt_tools.errors import (
    CatalogError,
    CheckpointError,
    FormatError,
    IntegrityError,
    NotACheckpointError,
    PlanError,
    StorageError,
    printable,
)
from ckpt_tools.formats import accelerate, gguf, npz, safetensors, torch_save
from ckpt_tools.formats.base import (
    ASIDE,
    MANIFEST,
    SHORT_ID_GLOB,
    Format,
    Request,
    TargetTensor,
    attempt_of,
    note_of,
    suffix_of_format,
    whole_tensor,
)
from ckpt_tools.formats.dcp import format as dcp
from ckpt_tools.formats.deepspeed import zero as deepspeed
from ckpt_tools.formats.deltas.layout import (
    MANIFEST_JSON,
    Versions,
    named_version,
    read_delta_index,
    versions_among,
)
from ckpt_tools.formats.external import external_formats, recognised
from ckpt_tools.formats.look_alikes import look_alike
from ckpt_tools.formats.per_rank import files as per_rank
from ckpt_tools.formats.per_rank.meta import FILE as META_FILE
from ckpt_tools.formats.per_rank.meta import refuse_one_of
from ckpt_tools.storage import LocalStore, Overlay, Store, is_url, local_path
from ckpt_tools.storage.one_file import OneFile, folder_of, overlaid
from ckpt_tools.storage.retries import read_again_if_wrong

if TYPE_CHECKING:
    from ckpt_tools.storage import RemoteStore

__all__ = [
    "FORMATS",
    "INDEXES",
    "Format",
    "Request",
    "Source",
    "TargetTensor",
    "detect",
    "detect_in",
    "is_ours",
    "natural",
    "open_source",
    "refuse_file_name",
    "suffix_of",
    "versions_in",
    "whole_tensor",
]

_DIRECTORIES: tuple[Format, ...] = (dcp, accelerate, safetensors, deepspeed, per_rank)
_ARRAYS = (npz, gguf)  # files that are only read by their own path
FORMATS: tuple[Format, ...] = (*_DIRECTORIES, torch_save, *_ARRAYS)
_OF_FILES: dict[str, Format] = {
    safetensors.SUFFIX: safetensors,
    **dict.fromkeys(torch_save.SUFFIXES, torch_save),
    **{form.SUFFIX: form for form in _ARRAYS},
}
_TAKEN = frozenset({*(form.NAME for form in FORMATS), safetensors.NAME, *_OF_FILES})
_SEARCH_DEPTH = 3
_MAX_SEEN = 10_000
_MAX_LISTED = 300  # folders per level, in a store where each costs a request


@dataclass(frozen=True, slots=True)
class Source:
    """An opened checkpoint: its path or URL, store, format, and complete catalog.

    `held` has the rank that holds each file, if the files lie in the memory of a job's ranks.
    """

    path: str
    store: Store
    format: Format
    catalog: Catalog
    held: Mapping[str, int] | None = None

    @property
    def name(self) -> str:
        """Returns the last segment of the path."""
        return _without_query(self.path, self.path.rstrip("/").rpartition("/")[2])

    @property
    def local(self) -> Path | None:
        """Returns the local path; None for a checkpoint in an object store."""
        return None if is_url(self.path) else Path(self.path)

    @property
    def is_file(self) -> bool:
        """Tells whether the path is that of one file."""
        return bool(folder_of(self.store)[1])

    @property
    def folder(self) -> Store:
        """Returns the store of the directory that contains its files."""
        return folder_of(self.store)[0]

    @property
    def is_remote(self) -> bool:
        """Tells whether bytes may be damaged on their way from the store."""
        return self.store.capabilities.is_remote

    def with_memory_files(self, files: Mapping[str, bytes]) -> Source:
        """Returns the source with other files in memory over its own."""
        return replace(self, store=overlaid(self.store, files))

    def assume(self, tensors: Iterable[TensorEntry]) -> dict[Extent, Extent]:
        """Returns the usual positions of packed payloads; unusual ones are located.

        Call `compare` after the reading.
        """
        tensors = list(tensors)
        guessed = self.format.guess(tensors)
        unsure = [
            t
            for t in tensors
            if any(c.extent.packing != RAW and c.extent not in guessed for c in t.chunks)
        ]
        return {**guessed, **self.format.locate(self.store, unsure)}

    def compare(self, tensors: Iterable[TensorEntry], assumed: Payloads) -> Comparison:
        """Locates the payloads of tensors, and compares that with the positions of `assume`.

        Raises:
            FormatError: a payload cannot be located.
        """
        return compare_positions(assumed, self.format.locate(self.store, tensors))


def _without_query(where: str, name: str) -> str:
    """Returns a name, without the query if it is the last segment of a signed URL."""
    return name.partition("?")[0] if is_url(where) else name


def detect(
    path: str | os.PathLike[str],
    options: Mapping[str, Any] | None = None,
    beside: Mapping[str, bytes] | None = None,
) -> tuple[Store, Format]:
    """Finds the only checkpoint at or below a path or URL.

    Args:
        path: a file, or a directory that holds a checkpoint's files or has one below.
        options: of the object store, as fsspec takes them.
        beside: files in memory that act as files of the checkpoint.

    Returns:
        The store of its files and its format. The store's `url` is the place of the checkpoint.

    Raises:
        NotACheckpointError: there is none, or there are several, which the message lists.
        StorageError: the store cannot be opened or listed.
    """
    where = local_path(path)
    root, file = _open_remote(where, options) if is_url(where) else _open_local(where)
    if META_FILE.fullmatch(file):
        refuse_one_of(file, root.list_files())
    store, form = (
        (OneFile(root, file, where, _without_query(where, file)), _file_format(where, file))
        if file
        else detect_in(root)
    )
    if form is safetensors and not file:
        store = _completed(store, options)
    return (Overlay(store, beside, is_listed=True) if beside else store), form


def _completed(
    store: Store,
    options: Mapping[str, Any] | None = None,
    base: str = "",
    is_reached: Callable[[int, Store], Store | None] | None = None,
) -> Store:
    """Returns a delta as the complete version that it stands for; any other store as it is.

    `base` and `is_reached` are those of `find_chain`.
    """
    url = store.url.rstrip("/") if is_url(store.url) else os.path.realpath(store.url)
    version = named_version(url.rpartition("/")[2])
    if version is None or read_delta_index(store) is None:
        return store
    folders = cast("LocalStore | RemoteStore", store)
    from ckpt_tools.formats.deltas.chain import PatchedStore, find_chain  # with NumPy and zstd

    chain = find_chain(
        store,
        *version,
        folders.beside,
        lambda where: open_folder(where, options),
        base,
        is_reached,
    )
    return PatchedStore(chain, store.url) if chain.layers else chain.base


def open_version(
    url: str,
    options: Mapping[str, Any] | None,
    base: str,
    is_reached: Callable[[int, Store], Store | None] | None,
) -> Source:
    """Opens a version of a publication; the arguments are those of `open_source` and `find_chain`.

    Raises:
        CheckpointError: see `open_source` and `find_chain`.
    """
    return _source(_completed(open_folder(url, options), options, base, is_reached), safetensors)


def open_folder(where: str, options: Mapping[str, Any] | None = None) -> Store:
    """Opens a directory by its path or URL.

    Raises:
        NotACheckpointError: nothing lies there, or it is a file.
        StorageError: it cannot be opened.
    """
    where = local_path(where)
    store, file = _open_remote(where, options) if is_url(where) else _open_local(where)
    if file:
        raise NotACheckpointError(f"a file is no directory: {printable(where)}")
    return store


def versions_in(url: str, options: Mapping[str, Any] | None) -> Versions:
    """Returns the versions in a directory; none if it does not exist.

    The newest of them is whole. Above it may be one that is being written to a bucket.

    Raises:
        StorageError: a version is a link.
        FormatError: there are versions of two layouts.
    """
    try:
        store = open_folder(url, options)
    except NotACheckpointError:
        return versions_among((), url)
    try:
        links = sorted(name for name in store.strays() if named_version(name))
        if links:
            raise StorageError(
                f"a version is a link, which is not followed: {links[0]} ({printable(store.url)})"
            )
        found = versions_among(store.folders(), url)
        while found.numbers:
            files = store.enter(found.name(found.numbers[-1])).list_files()
            if _is_whole(found, files):
                break
            found.numbers.pop()
        return found
    finally:
        store.close()


def _is_whole(versions: Versions, files: Mapping[str, int]) -> bool:
    """Tells by the names of its files whether a version is published. An index is written last."""
    has_complete = versions.layout.has_complete
    return safetensors.recognise(files) if has_complete else versions.layout.index_file in files


def detect_in(root: Store) -> tuple[Store, Format]:
    """Finds the only checkpoint in or below a store, as `detect` does."""
    here = _recognise(root)
    if here:
        refuse_strays(root)
        return root, here
    if sealed := [name for name in root.list_files() if note_of(name) == (MANIFEST, "")]:
        raise IntegrityError(
            "a sealed checkpoint lacks the files that say where its tensors lie:"
            f" {printable(root.url)}",
            hint=f"restore what {printable(sealed[0])} lists, such as .metadata",
        )
    found = _search(root)
    if len(found) == 1:
        refuse_strays(found[0][0])
        return found[0]
    if found:
        shown = "\n".join(f"  {printable(s.url)}  ({f.NAME})" for s, f in found[:20])
        files = [name for name in root.list_files() if suffix_of(name)]
        shown += "".join(f"\n  {printable(f'{root.url}/{name}')}" for name in files)
        raise NotACheckpointError(
            f"{len(found) + len(files)} checkpoints lie below {printable(root.url)}; give the path"
            f" of one:\n{shown}",
            hint=f"for example: {found[-1][0].url}",
            num_below=len(found) + len(files),
        )
    refuse_strays(root)
    raise _nothing_found(root)


def refuse_strays(store: Store, needed: Container[str] = ()) -> None:
    """Refuses a directory in which a checkpoint file is a link that is not followed.

    Without that file, the rest could be read as if it were complete. The file may be whole, on a
    disk that is not mounted now.

    Args:
        store: the directory.
        needed: names of files that belong to the checkpoint, whatever they are called.

    Raises:
        StorageError: there is such a file.
    """
    for name, target in store.strays().items():
        if is_ours(name) or suffix_of(name) or name in needed:
            raise StorageError(
                "a file is no regular file, or a link that leads out of the checkpoint or nowhere:"
                f" {printable(name)} -> {printable(target)} ({printable(store.url)})",
                hint="mount the disk that it leads to, or put the file itself in its place",
                is_unreadable=True,
            )


def _find_aside(root: Path) -> Path | None:
    """Returns where a killed `--overwrite` has set a result aside."""
    if not root.name:
        return None
    found = root.parent.glob(f"{ASIDE}{escape(root.name)}.{SHORT_ID_GLOB}")
    return next((path for path in sorted(found) if not path.is_symlink()), None)


def _open_local(path: str) -> tuple[Store, str]:
    """Returns the store of a directory and "", or the store of a file's directory and its name."""
    root = Path(path)
    if not root.exists():
        hint = None
        if aside := _find_aside(root):
            old, new = (shlex.quote(printable(str(p))) for p in (aside, root))
            hint = (
                f"a killed --overwrite left it aside; the next one puts it back, or: mv {old} {new}"
            )
        if root.is_symlink():
            hint = f"it is a link that leads to nothing: {printable(os.readlink(root))}"
        raise NotACheckpointError(f"no such path: {printable(path)}", hint=hint)
    if root.is_dir():
        return LocalStore(root), ""
    if not root.is_file():
        raise NotACheckpointError(f"neither a file nor a directory: {printable(path)}")
    real = Path(os.path.realpath(root))
    if suffix_of(real.name) == suffix_of(root.name):
        return LocalStore(real.parent), real.name
    return LocalStore(root.parent, root.name), root.name  # only the link's name has the suffix


def _open_remote(url: str, options: Mapping[str, Any] | None) -> tuple[Store, str]:
    from ckpt_tools.storage import RemoteStore

    store = RemoteStore(url, options)
    parent, _, name = store.url.rpartition("/")
    if "." in name and store.is_file():
        return RemoteStore(parent, options, given=name), name
    if not store.list_files() and not store.folders():
        raise NotACheckpointError(f"nothing lies at {printable(store.url)}")
    return store, ""


def suffix_of(name: str) -> str:
    """Returns the suffix that determines a file's format; "" for none."""
    bare = name.partition("?")[0]  # without the query of a signed URL
    for known in (_OF_FILES, _external):  # looking for packages takes 20 ms: only if it is needed
        for suffix in known() if callable(known) else known:
            if name.endswith(suffix) or bare.endswith(suffix):
                return suffix
    return ""


def refuse_file_name(path: str | os.PathLike[str]) -> None:
    """Refuses the name of a file for a directory. Lightning names directories `last.ckpt`.

    Raises:
        PlanError: it has the suffix of a format of single files.
    """
    suffix = suffix_of(local_path(path).rstrip("/"))
    if suffix and suffix != ".ckpt" and not os.path.isdir(path):
        raise PlanError(
            f"a directory is written, got the name of a file: {printable(str(path))!r}",
            hint=f"name the directory without {suffix}",
        )


def _external() -> list[str]:
    """Returns the suffixes of formats of other packages."""
    return [suffix for form in external_formats(_TAKEN) if (suffix := suffix_of_format(form))]


def _file_format(path: str, name: str) -> Format:
    if (suffix := suffix_of(name)) in _OF_FILES:
        return _OF_FILES[suffix]
    for form in external_formats(_TAKEN):
        if suffix_matches(form, name):
            return form
    if name == ".metadata" or name.endswith(".distcp"):
        raise NotACheckpointError(
            f"a part of a checkpoint: {printable(path)}",
            hint=f"give the directory: {path.rpartition('/')[0] or '.'}",
        )
    known = ", ".join(f"*{suffix}" for suffix in (*_OF_FILES, *_external()))
    folders = " or ".join(f.LOOKS_FOR for f in _DIRECTORIES)
    found = f"not a checkpoint: {printable(path)}"
    raise NotACheckpointError(
        f"{found}; looked for {known}, or a directory with {folders}", found=found
    )


def _recognise(root: Store) -> Format | None:
    files = root.list_files()
    if any(name.startswith("pytorch_model_fsdp_") for name in root.folders()):
        files = root.list_files(below=True)
    own = next((f for f in FORMATS if f.recognise(files)), None)
    if own is None and MANIFEST_JSON in files and named_version(root.url.rpartition("/")[2]):
        own = safetensors  # a delta of SkyRL, whose files have names of their own
    return own or recognised(external_formats(_TAKEN), files)


def suffix_matches(form: Format, name: str) -> bool:
    """Tells whether a format of files, which has a `SUFFIX`, claims a file's name."""
    suffix = suffix_of_format(form)
    return bool(suffix) and name.endswith(suffix)


def _search(root: Store) -> list[tuple[Store, Format]]:
    """Returns the checkpoints up to three levels down, in the natural order of their names."""
    found: list[tuple[Store, Format]] = []
    level = [root]
    limit = _MAX_LISTED if root.capabilities.is_remote else _MAX_SEEN
    for _ in range(_SEARCH_DEPTH):
        below = [
            store.enter(name)
            for store in level
            for name in store.folders()
            if not name.startswith(".")
        ]
        level = []
        for folder in sorted(below[:limit], key=lambda store: natural(store.url)):
            try:
                known = _recognise(folder)
            except StorageError:  # no permission to read it
                continue
            if known:
                found.append((folder, known))
            else:
                level.append(folder)
    return sorted(found, key=lambda item: natural(item[0].url))


def natural(path: str) -> list[tuple[int, int, str]]:
    """Returns a sort key that orders step-900 before step-10000."""
    parts: list[tuple[int, int, str]] = []
    word = ""
    for c in f"{path}\0":
        if word and c.isascii() and c.isdigit() != word[-1].isdigit():
            parts.append((0, int(word), "") if word.isdigit() else (1, 0, word))
            word = ""
        word += c
    return parts


def _nothing_found(root: Store) -> NotACheckpointError:
    names = sorted([*root.list_files(), *root.folders()])
    inside = (
        printable(", ".join(names[:8])) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
        if names
        else "nothing"
    )
    hint = None
    is_unfinished = any(n.endswith(".distcp") for n in names)
    if is_unfinished:
        hint = (
            ".distcp files without .metadata: the save was never finished, or .metadata was not"
            " copied along"
        )
    elif any(n.endswith(safetensors.SUFFIX) and attempt_of(n) for n in names):
        hint = (
            "an unfinished write to a bucket leaves files of such names; if it is complete, give"
            " the path of the file itself"
        )
    elif any(n.endswith(torch_save.SUFFIXES) for n in names):
        hint = "give the path of a torch.save file itself"
    elif any(n.endswith(tuple(form.SUFFIX for form in _ARRAYS)) for n in names):
        hint = "give the path of the file itself"
    found = f"not a checkpoint: {printable(root.url)} holds {inside}"
    looked_for = " or ".join(f.LOOKS_FOR for f in FORMATS if f not in _ARRAYS)
    return NotACheckpointError(
        f"{found}; looked for {looked_for}, three levels down",
        hint=hint,
        found=found,
        is_unfinished=is_unfinished,
    )


def open_source(
    path: str | os.PathLike[str],
    options: Mapping[str, Any] | None = None,
    beside: Mapping[str, bytes] | None = None,
) -> Source:
    """Opens a checkpoint, and checks that its chunks cover every tensor exactly once.

    The arguments are those of `detect`.

    Raises:
        NotACheckpointError: see `detect`.
        FormatError: its metadata is malformed.
        CatalogError: it has holes, overlaps, or files that are missing or short.
        StorageError: it cannot be read.
    """
    return _source(*detect(path, options, beside))


def open_source_in(folder: Store) -> Source:
    """Opens the checkpoint in a folder that is listed already, as `open_source` does.

    In a bucket, an object with the very name of the folder is left alone.
    """
    store, form = detect_in(folder)
    return _source(_completed(store) if form is safetensors else store, form)


def _source(store: Store, form: Format) -> Source:
    try:
        with no_gc():  # an object per tensor, and none in a cycle
            try:
                catalog = read_again_if_wrong(store, lambda: sound_catalog(store, form))
            except dcp.CompressedError:
                store = decompressed(store)
                catalog = sound_catalog(store, form)
        if how := getattr(store, "compression", ""):
            catalog = replace(catalog, extras={**catalog.extras, "compression": how})
        if about := getattr(store, "about", ""):  # of a delta
            catalog = replace(catalog, extras={**catalog.extras, "version": about})
    except (FormatError, CatalogError) as error:
        if found := look_alike(store):
            raise type(error)(str(found), hint=found.hint) from error
        raise
    return Source(
        store.url,
        Overlay(store, catalog.memory_files) if catalog.memory_files else store,
        form,
        catalog,
    )


def decompressed(store: Store) -> Store:
    """Returns a compressed checkpoint as the plain one that it stands for."""
    from ckpt_tools.formats.dcp.compressed import DecompressedStore  # with zstd

    return DecompressedStore(store)


def sound_catalog(store: Store, form: Format) -> Catalog:
    """Reads a catalog, and checks that its chunks cover every tensor exactly once.

    Raises:
        CheckpointError: it is malformed or incomplete.
    """
    catalog = form.read_catalog(store)
    check_names(catalog)
    check(catalog)
    return mark_quantized(catalog)


def is_checkpoint_file(folder: Store, name: str) -> bool:
    """Tells by name and contents whether a file may be part of a checkpoint of this tool."""
    if not is_ours(name):
        return False
    store = OneFile(folder, name, f"{folder.url}/{name}")
    try:
        check_names(_file_format(store.url, name).read_catalog(store))
    except CheckpointError:
        return False
    return True


def check_metadata(store: Store) -> None:
    """Checks the metadata of the checkpoint in or below a store, as `open_source` does.

    Raises:
        CheckpointError: it is malformed or incomplete.
    """
    inner, form = detect_in(store)
    try:
        try:
            read_again_if_wrong(inner, lambda: sound_catalog(inner, form))
        except dcp.CompressedError:
            sound_catalog(decompressed(inner), form)
    finally:
        inner.close()


INDEXES = (dcp.LOOKS_FOR, safetensors.INDEX, MANIFEST_JSON)
_OURS = (".distcp", ".metadata", ".safetensors", ".safetensors.index.json")


def is_ours(name: str) -> bool:
    """Tells by its name whether a file may be part of a checkpoint of this tool."""
    return name.endswith(_OURS) or note_of(name) is not None
