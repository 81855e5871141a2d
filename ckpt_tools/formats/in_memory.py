"""Entries made from values in metadata: archives of objects, and scalar tensors.

They lie in a file that exists in memory only.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any

from ckpt_tools.core.box import whole
from ckpt_tools.core.catalog import BytesEntry, Extent, TensorEntry, one_chunk
from ckpt_tools.core.dtypes import BY_NAME
from ckpt_tools.formats.zip.write import render_archive

FILE = "<values>"  # no writer gives a data file this name


class InMemoryFile:
    """A file in memory that grows; equal bytes are stored once."""

    def __init__(self, files: Mapping[str, bytes] | None = None) -> None:
        """Begins with the contents of `files`, if given."""
        self._data = bytearray((files or {}).get(FILE, b""))
        self._known: dict[bytes, Extent] = {}
        self._archives: dict[str, bytes] = {}

    @property
    def files(self) -> dict[str, bytes]:
        """The contents by file name, as in `Catalog.memory_files`."""
        return {FILE: bytes(self._data)} if self._data else {}

    def add(self, data: bytes) -> Extent:
        """Adds bytes if they are new, and returns where they lie."""
        found = self._known.get(data)
        if found is None:
            found = self._known[data] = Extent(FILE, len(self._data), len(data))
            self._data += data
        return found

    def value(self, fqn: str, value: Any) -> BytesEntry:
        """Returns the object of a plain value."""
        key = f"{type(value).__name__} {value!r}"
        if key not in self._archives:
            self._archives[key] = render_archive(value)
        return BytesEntry(fqn, self.add(self._archives[key]))

    def scalar(self, fqn: str, value: float) -> TensorEntry:
        """Returns a float32 tensor without dims, as torch's optimizers keep their step."""
        return TensorEntry(
            fqn,
            BY_NAME["float32"],
            (),
            one_chunk(whole(()), self.add(struct.pack("<f", value))),
        )
