"""The formats, and finding out which one a path is.

`open_source` takes what a user types: a checkpoint, a file, or a directory that holds one somewhere below.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ckpt_tools.catalog import Catalog, check
from ckpt_tools.errors import NotACheckpointError, printable
from ckpt_tools.formats import accelerate, dcp, safetensors
from ckpt_tools.formats.base import Format, Request, TargetTensor, whole_tensor
from ckpt_tools.storage import LocalStore, Store

__all__ = ["FORMATS", "Format", "Request", "Source", "TargetTensor", "detect", "foreign_files", "open_source", "whole_tensor"]

FORMATS: tuple[Format, ...] = (dcp, accelerate, safetensors)
_SEARCH_DEPTH = 3
_MAX_SEEN = 10_000


@dataclass(frozen=True, slots=True)
class Source:
    """An opened checkpoint: its bytes, its format, and its catalog, proved whole."""

    path: Path
    store: Store
    format: Format
    catalog: Catalog


class _OneFile:
    """A store that shows one file of a directory, for a source given as a file."""

    def __init__(self, inner: LocalStore, name: str) -> None:
        self._inner, self._name = inner, name
        self.url, self.capabilities = inner.url, inner.capabilities
        self.size, self.read_into, self.view, self.will_read = inner.size, inner.read_into, inner.view, inner.will_read
        self.create, self.close = inner.create, inner.close

    def list_files(self, below: bool = False) -> Mapping[str, int]:
        del below
        return {self._name: self._inner.size(self._name)}


def detect(path: str | os.PathLike[str]) -> tuple[Path, Format]:
    """Finds the one checkpoint at or below a path.

    Returns:
        The path of the checkpoint (a file, or the directory that holds its files) and its format.

    Raises:
        NotACheckpointError: there is none, or there are several; they are listed.
    """
    root = Path(path)
    if not root.exists():
        raise NotACheckpointError(f"no such path: {printable(str(root))}")
    if root.is_file():
        return root, _file_format(root)
    if not root.is_dir():
        raise NotACheckpointError(f"neither a file nor a directory: {printable(str(root))}")
    here = _recognise(root)
    if here:
        return root, here
    found = list(_search(root))
    if len(found) == 1:
        return found[0]
    if found:
        shown = "\n".join(f"  {printable(str(p))}  ({f.NAME})" for p, f in found[:20])
        raise NotACheckpointError(
            f"{len(found)} checkpoints lie below {printable(str(root))}; give the path of one:\n{shown}",
            hint=f"for example: {found[-1][0]}",
        )
    raise _nothing_found(root)


def _file_format(path: Path) -> Format:
    if path.suffix == ".safetensors":
        return safetensors
    if path.name == ".metadata" or path.suffix == ".distcp":
        raise NotACheckpointError(f"a part of a checkpoint: {printable(str(path))}", hint=f"give the directory: {path.parent}")
    raise NotACheckpointError(
        f"not a checkpoint: {printable(str(path))}; looked for *.safetensors, or a directory with "
        + " or ".join(f.LOOKS_FOR for f in FORMATS)
    )


def _recognise(root: Path) -> Format | None:
    has_parts = any(name.startswith("pytorch_model_fsdp_") for name in os.listdir(root))
    files = LocalStore(root).list_files(below=has_parts)
    return next((f for f in FORMATS if f.recognise(files)), None)


def _search(root: Path) -> list[tuple[Path, Format]]:
    """Returns the checkpoints up to three levels down, in the natural order of their names."""
    found: list[tuple[Path, Format]] = []
    level = [root]
    for _ in range(_SEARCH_DEPTH):
        below = [Path(e.path) for d in level for e in os.scandir(d) if e.is_dir(follow_symlinks=False) and not e.name.startswith(".")]
        level = []
        for folder in sorted(below[:_MAX_SEEN], key=_natural):
            known = _recognise(folder) if os.access(folder, os.R_OK | os.X_OK) else None
            if known:
                found.append((folder, known))
            else:
                level.append(folder)
    return sorted(found, key=lambda item: _natural(item[0]))


def _natural(path: Path) -> list[tuple[int, int, str]]:
    """Orders step-900 before step-10000."""
    parts: list[tuple[int, int, str]] = []
    word = ""
    for c in f"{path}\0":
        if word and c.isascii() and c.isdigit() != word[-1].isdigit():
            parts.append((0, int(word), "") if word.isdigit() else (1, 0, word))
            word = ""
        word += c
    return parts


def _nothing_found(root: Path) -> NotACheckpointError:
    names = sorted(p.name for p in root.iterdir())
    inside = printable(", ".join(names[:8])) + (f" and {len(names) - 8} more" if len(names) > 8 else "") if names else "nothing"
    hint = None
    if any(n.endswith(".distcp") for n in names):
        hint = ".distcp files without .metadata: the save was never finished, or .metadata was not copied along"
    elif any(n.endswith((".pt", ".pth", ".bin")) for n in names):
        hint = "torch.save files are not supported yet"
    return NotACheckpointError(
        f"not a checkpoint: {printable(str(root))} holds {inside}; looked for "
        + " or ".join(f.LOOKS_FOR for f in FORMATS)
        + ", three levels down",
        hint=hint,
    )


def open_source(path: str | os.PathLike[str]) -> Source:
    """Opens a checkpoint, reads its metadata, and proves that every tensor is there exactly once.

    Raises:
        NotACheckpointError: see `detect`.
        FormatError: its metadata is malformed.
        CatalogError: it has holes, overlaps, or files that are missing or short.
    """
    found, form = detect(path)
    store: Store
    if found.is_file():
        real = Path(os.path.realpath(found))
        store = _OneFile(LocalStore(real.parent), real.name)
    else:
        store = LocalStore(found)
    catalog = form.read_catalog(store)
    check(catalog)
    return Source(found, store, form, catalog)


_OURS = (".distcp", ".metadata", ".safetensors", ".safetensors.index.json")


def foreign_files(target: Path) -> list[str]:
    """Returns what stands at a destination and belongs to no checkpoint of ours: never to be overwritten."""
    if target.is_file():
        return [] if target.name.endswith(_OURS) else [target.name]
    names = sorted(p.name for p in target.iterdir())
    return [n for n in names if not n.endswith(_OURS) and ".ckpt.manifest." not in f".{n}"]
