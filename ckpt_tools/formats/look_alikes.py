"""Recognises files that are something else than their names say."""

from __future__ import annotations

from contextlib import suppress

from ckpt_tools.errors import CheckpointError, FormatError, printable
from ckpt_tools.storage import Store, read

_SUFFIXES = (
    ".safetensors .bin .pt .pth .ckpt .distcp .gguf .npz .npy .json .metadata .msgpack .model"
).split()
_MOST = 256  # files that are looked at
_START_BYTES = 512
_LFS = b"version https://git-lfs.github.com/spec/"


def look_alike(store: Store) -> FormatError | None:
    """Returns the error of the first file that is empty, a pointer of Git LFS, or a page.

    It is called when a checkpoint cannot be read, to name the cause.
    """
    names = [n for n in store.list_files() if n.endswith(tuple(_SUFFIXES))]
    return next((found for name in names[:_MOST] if (found := other_kind(store, name))), None)


def other_kind(store: Store, name: str) -> FormatError | None:
    """Returns the error of a file that is empty, a pointer of Git LFS, or a page."""
    with suppress(CheckpointError):
        nbytes = store.size(name)
        what, hint = _kind(read(store, name, 0, min(nbytes, _START_BYTES)) if nbytes else b"")
        if what:
            return FormatError(f"{printable(name)} {what} ({printable(store.url)})", hint=hint)
    return None


def _kind(start: bytes) -> tuple[str, str]:
    text = start.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if not start:
        return "is empty", "copy or download it again"
    if start.startswith(_LFS):
        return "is a pointer of Git LFS: the file itself was not fetched", "run: git lfs pull"
    if text.startswith((b"<!doctype", b"<html")):
        return (
            "is an HTML page, perhaps of a login or an error",
            "download it again, with the address of the file itself and the right to read it",
        )
    if text.startswith(b"<?xml"):
        return "is an XML page, perhaps the error of a store", "download it again"
    return "", ""
