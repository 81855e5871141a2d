"""The frames of a delta: a file of them, and what is wrong with the version below it."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from io import BytesIO
from itertools import chain
from tempfile import TemporaryFile
from typing import IO

from ckpt_tools.core.checksum import crc64nvme, hex64
from ckpt_tools.errors import IntegrityError, StorageError, printable
from ckpt_tools.formats.deltas.chain import as_patched
from ckpt_tools.formats.registry import Source
from ckpt_tools.publish.manifest import SealedFile
from ckpt_tools.storage import WritableStore

_COPY_BYTES = 8 << 20


def wrong_before(name: str, before: Source) -> IntegrityError:
    """Returns the error of a version below a delta that is damaged, or made of another base."""
    version = as_patched(before.folder)
    upon = base = ""
    if version is not None and not version.layers[0].about.base_number:
        upon = f", with {printable(version.complete_url)} as version 0"
        base = "that is another model now than version 1 changes; or "
    return IntegrityError(
        f"a tensor of the version before is not what was sealed: {printable(name)!r}"
        f" ({printable(before.path)}{upon})",
        hint=(
            f"{base}it is damaged, or a version below it is: ckpt verify on the directory of the"
            " versions names the file. Restore it; or publish a complete version: --full, or"
            " full=True"
        ),
    )


class FrameFile:
    """The finished frames one after the other, in a file without a name."""

    def __init__(self, folder: str | None) -> None:
        self._folder = folder
        self._file: IO[bytes] = BytesIO()
        self._lock = threading.Lock()
        self.table: dict[str, tuple[int, int, str]] = {}  # start, end and checksum by tensor
        self.nbytes = 0

    def add(self, name: str, frame: Iterable[bytes], checksum: str) -> None:
        """Adds the frame of a tensor, which comes in parts."""
        with self._lock, told_if_full():
            if not self.table:  # here, all ranks hear of it if there is no room
                self._file = TemporaryFile(prefix="ckpt-", dir=self._folder)  # noqa: SIM115  # see `close`
            start = self.nbytes
            for piece in frame:
                self._file.write(piece)
                self.nbytes += len(piece)
            self.table[name] = start, self.nbytes, checksum

    def write(self, to: WritableStore, name: str) -> dict[str, SealedFile]:
        """Writes a safetensors file of all frames, if there are any, and returns it by name."""
        if not self.table:
            return {}
        header = self._header()
        writer = to.create(name, len(header) + self.nbytes)
        try:
            at, crc = 0, 0
            for piece in chain((header,), parts_of(self._file)):
                writer.write_at(at, piece)
                at, crc = at + len(piece), crc64nvme(piece, crc)
            writer.finish()
        except BaseException:
            writer.abort()
            raise
        return {name: SealedFile(at, hex64(crc))}

    def _header(self) -> bytes:
        about = {
            name: {"dtype": "U8", "shape": [end - start], "data_offsets": [start, end]}
            for name, (start, end, _) in self.table.items()
        }
        checksums = {name: checksum for name, (*_, checksum) in self.table.items()}
        text = json.dumps({"__metadata__": checksums, **about}).encode("ascii")
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text

    def close(self) -> None:
        """Gives up the room."""
        self._file.close()


@contextmanager
def told_if_full() -> Iterator[None]:
    """Tells what to do if changes cannot be kept until they are published.

    Raises:
        StorageError: the body has raised OSError.
    """
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"cannot keep the changes until they are published: {error.strerror}",
            hint="they wait in ROOT, or for a bucket in TMPDIR: make room there",
        ) from error


def parts_of(file: IO[bytes]) -> Iterator[bytes]:
    """Yields the contents of a file."""
    file.seek(0)
    while piece := file.read(_COPY_BYTES):
        yield piece
