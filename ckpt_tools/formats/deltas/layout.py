"""The directory of a publication: versions 1 and on, each complete or a delta.

A complete version is a Hugging Face directory. A delta has the changed tensors alone, and its index
tells the version below it. Version 0 is the engine's own model.

Sources of the layouts: slime at 624b824, `slime/utils/disk_delta.py` and `docs/en/advanced/
delta-weight-sync.md`; SkyRL at a956457, `skyrl/backends/skyrl_train/weight_sync/
delta_checkpoint.py`. `ckpt_base` is ours; other readers ignore it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ckpt_tools.core.catalog import Catalog
from ckpt_tools.errors import CheckpointError, FormatError, NotACheckpointError, printable
from ckpt_tools.formats.safetensors import DELTA, INDEX, MAX_HEADER_BYTES, SUFFIX, read_files
from ckpt_tools.storage import Store, read
from ckpt_tools.storage.small_files import parse_json

XOR, OVERWRITE = "xor", "overwrite"
ENCODINGS = (XOR, OVERWRITE)
XXH3, BLAKE3, ADLER32 = "xxh3-128", "blake3", "adler32"
CHECKSUMS = (XXH3, BLAKE3, ADLER32)
COMPRESSION = "zstd"
BASE = "ckpt_base"
MANIFEST_JSON = "manifest.json"  # of SkyRL
_DIGITS = re.compile(r"[0-9]{6,9}")


class Layout(NamedTuple):
    """The form of versions that the receivers of a project take.

    Attributes:
        name: of the layout.
        prefix, num_digits: of the name of a version's directory.
        encodings, checksums: of deltas.
        index_file: the file that tells what a delta changes; it is written last.
        has_complete: its receivers take complete versions, too.
    """

    name: str
    prefix: str
    num_digits: int
    encodings: Sequence[str]
    checksums: Sequence[str]
    index_file: str
    has_complete: bool

    def version_name(self, number: int) -> str:
        """Returns the name of a version's directory."""
        return f"{self.prefix}{number:0{self.num_digits}d}"

    def version_number(self, name: str) -> int | None:
        """Returns the number of a version by the name of its directory; None for another name."""
        digits = name.removeprefix(self.prefix)
        number = int(digits) if _DIGITS.fullmatch(digits) else 0
        return number if number and self.version_name(number) == name else None


SLIME = Layout("slime", "weight_v", 6, ENCODINGS, CHECKSUMS, INDEX, has_complete=True)
SKYRL = Layout("skyrl", "delta-", 8, (XOR,), (XXH3,), MANIFEST_JSON, has_complete=False)
LAYOUTS = {layout.name: layout for layout in (SLIME, SKYRL)}


class Versions(NamedTuple):
    """The versions of a publication.

    Attributes:
        url: of the directory.
        layout: how they are called; that of slime if there are none.
        numbers: of the versions, in order.
    """

    url: str
    layout: Layout
    numbers: list[int]

    @property
    def newest(self) -> int:
        """The newest version; 0 if there are none."""
        return self.numbers[-1] if self.numbers else 0

    def name(self, number: int) -> str:
        """Returns the name of a version's directory."""
        return self.layout.version_name(number)

    def path(self, number: int) -> str:
        """Returns the path or URL of a version."""
        return f"{self.url}/{self.name(number)}"


class DeltaIndex(NamedTuple):
    """The index of a delta.

    Attributes:
        number, base_number: the version, and the one that it changes.
        encoding, checksum: names of the encoding, and of the checksum of the new bytes.
        weight_map: the file of each changed tensor.
        base: path or URL of version 0, where the publisher has it; "" if it does not say.
        checksums: of the changed tensors, if the index has them; else the files have them.
        file: its name.
    """

    number: int
    base_number: int
    encoding: str
    checksum: str
    weight_map: Mapping[str, str]
    base: str = ""
    checksums: Mapping[str, str] = {}
    file: str = INDEX

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


def named_version(name: str) -> tuple[Layout, int] | None:
    """Returns the layout and the number of a version by its directory's name; None for another."""
    for layout in LAYOUTS.values():
        if number := layout.version_number(name):
            return layout, number
    return None


def no_versions(url: str) -> NotACheckpointError:
    """Returns the error of a directory without versions."""
    names = " or ".join(layout.version_name(1) for layout in LAYOUTS.values())
    return NotACheckpointError(
        f"no version lies in {printable(url)}", hint=f"looked for {names} and on"
    )


def versions_among(names: Iterable[str], url: str) -> Versions:
    """Returns the versions among the names of folders.

    Raises:
        FormatError: there are versions of two layouts.
    """
    found: dict[Layout, list[int]] = {}
    for version in filter(None, map(named_version, names)):
        found.setdefault(version[0], []).append(version[1])
    if len(found) > 1:
        both = " and ".join(layout.version_name(max(found[layout])) for layout in found)
        raise FormatError(
            f"versions of two layouts lie in one directory: {both} ({printable(url)})",
            hint="each receiver sees some of them only: move those of one layout elsewhere",
        )
    layout = next(iter(found), SLIME)
    return Versions(url, layout, sorted(found.get(layout, [])))


def read_delta_index(store: Store) -> DeltaIndex | None:
    """Returns the index of a delta; None for a complete version.

    Raises:
        FormatError: it is malformed, or of a kind that this tool does not know.
    """
    version, files = named_version(store.url.rstrip("/").rpartition("/")[2]), store.list_files()
    if version is not None and version[0].index_file == MANIFEST_JSON:
        return _read_manifest_json(store)
    found = _read_index(store) if INDEX in files else None
    if found is None and _has_frames(store, files):
        raise FormatError(
            "a delta does not say what it changes: its index is gone, or that of something else"
            f" ({printable(store.url)})",
            hint="restore its files from another copy of the directory",
        )
    return found


def _has_frames(store: Store, files: Mapping[str, int]) -> bool:
    """Tells whether the files of a version have frames: bytes, each with its checksum."""
    names = sorted(name for name in files if name.endswith(SUFFIX))[:1]
    try:
        found = read_files(store, names, {})
    except CheckpointError:
        return False  # who reads all files tells what is wrong
    return bool(found.tensors) and all(
        entry.dtype.name == "uint8" and name in found.extras
        for name, entry in found.tensors.items()
    )


def _read_index(store: Store) -> DeltaIndex | None:
    where = f"{INDEX} in {printable(store.url)}"
    body = _json(store, INDEX, MAX_HEADER_BYTES, where)
    about, weight_map = body.get("metadata"), body.get("weight_map")
    if not isinstance(about, dict) or DELTA not in about:
        return None
    number, base = (_number(about.get(key), key, where) for key in ("version", "base_version"))
    _check_base(number, base)
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


def _check_base(number: int, base: int) -> None:
    if base != number - 1:
        raise FormatError(f"version {number} is a change of version {base}, not of the one before")


def _read_manifest_json(store: Store) -> DeltaIndex:
    """Returns what the manifest of SkyRL says.

    Raises:
        FormatError: it is gone or malformed, or has checksums of another kind.
    """
    where = f"{MANIFEST_JSON} in {printable(store.url)}"
    if MANIFEST_JSON not in store.list_files():
        raise FormatError(f"a delta has no manifest ({where})", hint="restore it")
    body = _json(store, MANIFEST_JSON, MAX_HEADER_BYTES, where)
    weight_map, checksums = {}, {}
    try:
        number, base, said = body["version"], body["base_version"], body.get(BASE, "")
        if type(number) is not int or type(base) is not int:
            raise TypeError
        for record in body["tensors"]:
            name, file, key = (str(record[k]) for k in ("name", "payload_file", "payload_key"))
            kind = record.get("checksum_algorithm", XXH3 if "checksum" in record else "sha256")
            if kind not in SKYRL.checksums or key != name or name in weight_map:
                raise FormatError(
                    f"{printable(name)!r}: expected one {XXH3} under its own name, got"
                    f" {printable(str(kind))!r} under {printable(key)!r} ({where})"
                )
            weight_map[name], checksums[name] = file, str(record["checksum"])
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        raise FormatError(f"the manifest of a delta is malformed ({where})") from error
    if number < 1:
        raise FormatError(f"version: expected a number from 1 on, got {number} ({where})")
    _check_base(number, base)
    base_url = said if isinstance(said, str) else ""
    return DeltaIndex(number, base, XOR, XXH3, weight_map, base_url, checksums, MANIFEST_JSON)


class ChangedBytes(NamedTuple):
    """The frame of a tensor in a delta: its bytes, and the checksum of the tensor's new bytes."""

    nbytes: int
    checksum: str


def manifest_json(index: DeltaIndex, frames: Mapping[str, ChangedBytes], catalog: Catalog) -> bytes:
    """Returns the manifest of a delta as SkyRL's receivers read it.

    Args:
        index: the contents of the index.
        frames: by tensor.
        catalog: of the version below, which has the same tensors.
    """
    tensors = []
    for name, file in index.weight_map.items():
        entry, frame = catalog.tensors[name], frames[name]
        tensors.append(
            {
                "name": name,
                "dtype": entry.dtype.name,
                "shape": list(entry.shape),
                "uncompressed_num_bytes": entry.nbytes,
                "compressed_num_bytes": frame.nbytes,
                "payload_file": file,
                "payload_key": name,
                "checksum": frame.checksum,
                "checksum_algorithm": index.checksum,
            }
        )
    body = {
        "version": index.number,
        "base_version": index.base_number,
        "tensors": tensors,
        "total_uncompressed_num_bytes": sum(catalog.tensors[n].nbytes for n in index.weight_map),
        "total_compressed_num_bytes": sum(frames[n].nbytes for n in index.weight_map),
        "payload_files": sorted(set(index.weight_map.values())),
    }
    return json.dumps(body | ({BASE: index.base} if index.base else {})).encode("ascii")


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
