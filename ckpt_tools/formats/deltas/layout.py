"""The directory of a publication: versions `weight_v000001` and on, each complete or a delta.

A complete version is a Hugging Face directory. A delta has the changed tensors alone, and its index
tells the version below it. Version 0 is the engine's own model.

Source of the layout: slime at 624b824, `slime/utils/disk_delta.py` and `docs/en/advanced/
delta-weight-sync.md`. `ckpt_base` is ours; other readers ignore it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from ckpt_tools.core.catalog import Catalog
from ckpt_tools.errors import FormatError, printable
from ckpt_tools.formats.safetensors import DELTA, INDEX, MAX_HEADER_BYTES
from ckpt_tools.storage import Store, read
from ckpt_tools.storage.small_files import parse_json

XOR, OVERWRITE = "xor", "overwrite"
ENCODINGS = (XOR, OVERWRITE)
XXH3, BLAKE3, ADLER32 = "xxh3-128", "blake3", "adler32"
CHECKSUMS = (XXH3, BLAKE3, ADLER32)
COMPRESSION = "zstd"
BASE = "ckpt_base"
_NAME, _DIGITS = re.compile(r"weight_v([0-9]{6,9})"), re.compile(r"[0-9]{6,9}")


class DeltaIndex(NamedTuple):
    """The index of a delta.

    Attributes:
        number, base_number: the version, and the one that it changes.
        encoding, checksum: names of the encoding, and of the checksum of the new bytes.
        weight_map: the file of each changed tensor.
        base: path or URL of version 0, where the publisher has it; "" if it does not say.
    """

    number: int
    base_number: int
    encoding: str
    checksum: str
    weight_map: Mapping[str, str]
    base: str = ""

    def render(self) -> dict[str, Any]:
        """Returns the index as JSON values."""
        about = {
            "version": f"{self.number:06d}",
            "base_version": f"{self.base_number:06d}",
            DELTA: self.encoding,
            "compression_format": COMPRESSION,
            "checksum_format": self.checksum,
        }
        return {
            "metadata": about | ({BASE: self.base} if self.base else {}),
            "weight_map": dict(self.weight_map),
        }


def version_name(number: int) -> str:
    """Returns the name of a version's directory."""
    return f"weight_v{number:06d}"


def version_number(name: str) -> int | None:
    """Returns the number of a version by the name of its directory; None for another name."""
    found = _NAME.fullmatch(name)
    number = int(found[1]) if found else 0
    return number if number and version_name(number) == name else None


def numbers_in(names: Iterable[str]) -> list[int]:
    """Returns the numbers of the versions among the names of folders, in order."""
    return sorted(n for name in names if (n := version_number(name)) is not None)


def read_delta_index(store: Store) -> DeltaIndex | None:
    """Returns the index of a delta; None for a complete version.

    Raises:
        FormatError: it is malformed, or of a kind that this tool does not know.
    """
    if INDEX not in store.list_files():
        return None
    where = f"{INDEX} in {printable(store.url)}"
    body = _json(store, INDEX, MAX_HEADER_BYTES, where)
    about, weight_map = body.get("metadata"), body.get("weight_map")
    if not isinstance(about, dict) or DELTA not in about:
        return None
    number, base = (_number(about.get(key), key, where) for key in ("version", "base_version"))
    if base != number - 1:
        raise FormatError(f"version {number} is a change of version {base}, not of the one before")
    for key, known in (
        (DELTA, ENCODINGS),
        ("compression_format", (COMPRESSION,)),
        ("checksum_format", CHECKSUMS),
    ):
        if about.get(key) not in known:
            raise FormatError(
                f"{key}: expected {' or '.join(known)}, got {printable(str(about.get(key)))!r}"
                f" ({where})"
            )
    if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
        raise FormatError(f"weight_map: expected file names by tensor ({where})")
    said = about.get(BASE, "")
    return DeltaIndex(
        number,
        base,
        about[DELTA],
        about["checksum_format"],
        weight_map,
        said if isinstance(said, str) else "",
    )


def index_text(store: Store, catalog: Catalog) -> bytes:
    """Returns the index of a complete version; for a single file, the one that it would have."""
    if INDEX in store.list_files():
        return read(store, INDEX)
    total = sum(entry.nbytes for entry in catalog.tensors.values())
    weight_map = {n: e.chunks[0].extent.file for n, e in sorted(catalog.tensors.items())}
    body = {"metadata": {"total_size": total}, "weight_map": weight_map}
    return json.dumps(body, indent=2).encode("ascii")


def _number(value: object, key: str, where: str) -> int:
    if not isinstance(value, str) or not _DIGITS.fullmatch(value):
        raise FormatError(f"{key}: expected six digits, got {printable(str(value))!r} ({where})")
    return int(value)


def _json(store: Store, name: str, most_nbytes: int, where: str) -> dict[str, Any]:
    if store.size(name) > most_nbytes:
        raise FormatError(f"an index is too long: over {most_nbytes:,} bytes ({where})")
    try:
        body = parse_json(read(store, name).decode("utf-8"))
    except ValueError as error:
        raise FormatError(f"not valid JSON: {printable(str(error))} ({where})") from error
    if not isinstance(body, dict):
        raise FormatError(f"expected a JSON object, got {type(body).__name__} ({where})")
    return body
