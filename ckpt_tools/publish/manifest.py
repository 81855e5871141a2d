"""The manifest: a sealed record of files and tensors, as JSON beside the data. `docs/manifest.md`
describes every field.
"""

from __future__ import annotations

import datetime as dt
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import chain
from typing import Any, NamedTuple

from ckpt_tools.core.box import whole
from ckpt_tools.core.checksum import crc64nvme, hex64
from ckpt_tools.core.plan import Literal, Plan
from ckpt_tools.core.statistics import TensorStatistics, unpack_statistics
from ckpt_tools.errors import FormatError, printable
from ckpt_tools.formats.base import MANIFEST, attempt_of, is_attempt_id, note_name, note_of
from ckpt_tools.formats.dcp.format import is_data_file
from ckpt_tools.formats.dcp.metadata import MAX_DIMS
from ckpt_tools.ranks.base import MAX_RANKS
from ckpt_tools.version import __version__

VERSION = 2  # version 1 has no checksum of its own and is not read
CHECKSUM = "crc64nvme"
NUM_LOST = "num_lost"  # in `source`: entries that `ckpt salvage` could not rescue
DELTA_FILES = "delta_files"  # in `source`: bytes and CRC-64 of a delta's own files, by name
PROOF = "proof"  # in `source`: how the inverse gave the source back
RENAMED_BY = "renamed_by"  # in `source`: the maps and rules that changed the names, in order
ROOM_BYTES = 1 << 20  # what a result needs on a disk beside its data


class SealedRange(NamedTuple):
    """A range of a file, a payload or a cell of one, with its checksums as 16 and 8 hex digits."""

    start: int
    nbytes: int
    crc64nvme: str
    crc32: str


class SealedFile(NamedTuple):
    """A file with its checksum as 16 hex digits, and those of the cells of its long payloads.

    `linked` is the step from which the save took the file, instead of writing it; "" for none.
    """

    nbytes: int
    crc64nvme: str
    ranges: tuple[SealedRange, ...] = ()
    linked: str = ""


class SealedPickle(NamedTuple):
    """The range of a `torch.save` file that has its pickle, and the checksum as 16 hex digits."""

    start: int
    nbytes: int
    crc64nvme: str


class SealedTensor(NamedTuple):
    """A tensor with the checksum of its row-major little-endian bytes, however it is sharded.

    `statistics` is None if the writer did not compute them.
    """

    dtype: str
    shape: tuple[int, ...]
    fingerprint: str
    statistics: TensorStatistics | None = None
    tied_to: str = ""


@dataclass(frozen=True, slots=True)
class Manifest:
    """See `docs/manifest.md`. `index` is None if a single file is its own index."""

    attempt: str
    created: str
    tool: str
    operation: str
    format: str
    source: Mapping[str, Any]
    world_size: int | None
    files: Mapping[str, SealedFile] = field(repr=False)
    index: tuple[str, SealedFile] | None
    tensors: Mapping[str, SealedTensor] = field(repr=False)
    objects: Mapping[str, SealedFile] = field(default_factory=dict, repr=False)
    pickles: Mapping[str, SealedPickle] = field(default_factory=dict, repr=False)
    step: int | None = None
    metrics: Mapping[str, float | None] = field(default_factory=dict)
    timing: Mapping[str, float | None] = field(default_factory=dict)

    @property
    def num_lost(self) -> int:
        """Returns the number of entries that `ckpt salvage` could not rescue."""
        found = self.source.get(NUM_LOST)
        return found if type(found) is int and found > 0 else 0

    @property
    def salvage_note(self) -> str:
        """Returns the remark on a salvaged checkpoint; "" for any other."""
        number = self.num_lost
        return f"salvaged: {number:,} entr{'y' if number == 1 else 'ies'} lost" if number else ""

    @property
    def notes(self) -> list[str]:
        """Returns remarks on how the checkpoint was made."""
        found = self.source.get(RENAMED_BY)
        steps = [printable(str(one)) for one in found] if isinstance(found, list) else []
        renamed = [f"names and layout were changed by {', then '.join(steps)}"] if steps else []
        return [note for note in (self.salvage_note, *renamed, self._proof_note) if note]

    @property
    def _proof_note(self) -> str:
        found = self.source.get(PROOF)
        told = found if isinstance(found, dict) else {}
        number, changed = told.get("num_tensors"), told.get("num_changed")
        in_part = told.get("in_part")
        if type(number) is not int or type(changed) is not int:
            return ""
        if not number and not changed and not in_part:
            return ""  # all was cloned
        rest = f"; {changed:,} tensors are cast or computed" if changed else ""
        if isinstance(in_part, list) and in_part:
            rest += f"; of {len(in_part):,} there is a part"
        return f"the inverse gave {number:,} tensors of the source back{rest}"

    @property
    def delta_files(self) -> Mapping[str, tuple[int, str]]:
        """Returns bytes and CRC-64 of a delta's own files; none for any other checkpoint.

        Raises:
            FormatError: it is malformed.
        """
        told = self.source.get(DELTA_FILES, {})
        try:
            return {str(name): (int(nbytes), str(crc)) for name, (nbytes, crc) in told.items()}
        except (AttributeError, TypeError, ValueError, OverflowError) as error:
            raise FormatError(f"the manifest of a delta is malformed: {DELTA_FILES}") from error

    @property
    def thinned(self) -> list[str]:
        """Returns the names that `ckpt thin` has removed; none for a full step."""
        found = self.source.get("thinned")
        return [str(key) for key in found] if isinstance(found, list) else []

    @property
    def not_finite(self) -> list[str]:
        """Returns the names of the tensors with NaN or infinity, as far as the save measured it."""
        return [
            fqn for fqn, t in self.tensors.items() if t.statistics and not t.statistics.is_finite
        ]

    @property
    def has_statistics(self) -> bool:
        """Tells whether the save measured its tensors."""
        return any(t.statistics is not None for t in self.tensors.values())

    @classmethod
    def now(
        cls,
        attempt: str,
        operation: str,
        format_name: str,
        source: Mapping[str, Any],
        **fields: Any,
    ) -> Manifest:
        """Returns a manifest with the current time and the version of this tool."""
        created, tool = (
            dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
            f"ckpt-tools {__version__}",
        )
        return cls(
            attempt=attempt,
            created=created,
            tool=tool,
            operation=operation,
            format=format_name,
            source=source,
            **fields,
        )

    def render(self) -> bytes:
        """Returns the JSON text: ASCII, a line for every file and tensor, keys in a fixed order."""
        body: dict[str, Any] = {"ckpt_manifest": VERSION, "checksum": CHECKSUM}
        body |= {f.name: getattr(self, f.name) for f in fields(self)}
        body["index"] = {"name": self.index[0], **_fields(self.index[1])} if self.index else None
        for key in _OMITTED:
            if not body[key]:
                del body[key]
        lines = [
            f" {json.dumps(key)}: {_table(value) if key in _TABLES else json.dumps(value)}"
            for key, value in body.items()
        ]
        text = ("{\n" + ",\n".join(lines)).encode("ascii")
        return text + f',\n "crc64nvme": "{hex64(crc64nvme(text))}"\n}}\n'.encode("ascii")


def _table(entries: Mapping[str, SealedFile | SealedTensor | SealedPickle]) -> str:
    lines = [
        f"  {json.dumps(name)}: {json.dumps(_fields(entry))}" for name, entry in entries.items()
    ]
    return "{\n" + ",\n".join(lines) + "\n }" if lines else "{}"


def _fields(entry: SealedFile | SealedTensor | SealedPickle) -> dict[str, Any]:
    values = {
        _KEYS.get(key, key): value
        for key, value in entry._asdict().items()
        if value or key not in _OPTIONAL
    }
    if "statistics" in values:
        values["statistics"] = values["statistics"].packed()
    return values


def file_name(attempt: str, beside: str = "") -> str:
    """Returns the manifest's name; see `note_name`."""
    return note_name(MANIFEST, attempt, beside)


def of_other_attempts(manifest: Manifest, files: Iterable[str]) -> list[str]:
    """Returns the files beside a checkpoint that other attempts have written, by their names.

    They belong to an attempt that this one has replaced, or to one at work. The files of a delta
    are its own, though its manifest has those of the complete version.
    """
    own, mine = {*manifest.files, file_name(manifest.attempt)}, manifest.attempt[:8]

    def is_other(name: str) -> bool:
        return attempt_of(name) not in ("", mine) or note_of(name) == (MANIFEST, "")

    return [name for name in files if name not in own and is_other(name)]


_KINDS: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("attempt", "created", "tool", "operation", "format"), (str,)),
    "source": (dict,),
    "world_size": (int, type(None)),
    "step": (int, type(None)),
}
_OPTIONAL = ("ranges", "linked", "statistics", "tied_to")  # absent rather than empty
_KEYS = {"ranges": "runs"}  # in the text, if it differs from the field
_TABLES = ("files", "tensors", "objects", "pickles")  # a line for each entry
_OMITTED = ("metrics", "timing", "objects", "pickles")  # absent rather than empty
_HEX, _HEX_DIGITS = re.compile(r"[0-9a-f]*"), 16
_MAX_COUNT = 1 << 62
_OWN = re.compile(rb',\n "crc64nvme": "([0-9a-f]{16})"\n}\n\Z')


def parse_manifest(data: bytes, where: str) -> Manifest:
    """Returns a manifest from its text.

    Raises:
        FormatError: it is malformed, or of a version that this tool does not know.
    """
    try:
        body = json.loads(data)
        if body["ckpt_manifest"] != VERSION or body["checksum"] != CHECKSUM:
            raise FormatError(
                f"a manifest of another version: expected {VERSION} with {CHECKSUM}, got"
                f" {printable(str(body['ckpt_manifest']))} with {printable(str(body['checksum']))}"
                f" ({printable(where)})"
            )
        own = _OWN.search(data)
        if own is None or hex64(crc64nvme(data[: own.start()])) != own[1].decode():
            raise FormatError(
                f"a manifest is damaged: its checksum is not that of its text ({printable(where)})"
            )
        index = body["index"]
        for key, kinds in _KINDS.items():
            if type(body[key]) not in kinds:
                raise ValueError(f"{key} is a {type(body[key]).__name__}")
        for key in ("world_size", "step"):
            if body[key] is not None:
                _count(body[key], key)
        if (body["world_size"] or 0) > MAX_RANKS:
            raise ValueError(f"world_size is above {MAX_RANKS:,}")
        if not is_attempt_id(body["attempt"]):
            raise ValueError(f"attempt is {body['attempt']!r}, not a UUID")
        return Manifest(
            **{
                f.name: body[f.name]
                for f in fields(Manifest)
                if f.name not in ("index", *_TABLES, *_OMITTED)
            },
            metrics=_numbers("metrics", body.get("metrics", {})),
            timing=_numbers("timing", body.get("timing", {})),
            files={str(name): _sealed(entry) for name, entry in body["files"].items()},
            index=None if index is None else (str(index["name"]), _sealed(index)),
            tensors=_tensors(body["tensors"]),
            objects={str(fqn): _sealed(entry) for fqn, entry in body.get("objects", {}).items()},
            pickles={str(name): _pickle(entry) for name, entry in body.get("pickles", {}).items()},
        )
    except (
        ValueError,
        TypeError,
        KeyError,
        AttributeError,
        OverflowError,
        RecursionError,
    ) as error:
        raise FormatError(
            f"a manifest is malformed: {printable(repr(error))} ({printable(where)})"
        ) from error


_MAX_PICKLE_BYTES = 512 << 20  # a reader refuses longer pickles


def seal_objects(plan: Plan, fingerprints: Mapping[str, int]) -> dict[str, SealedFile]:
    """Returns the objects of a finished plan with their checksums."""
    return {
        t.fqn: seal_file(whole(t.shape).numel, fingerprints[t.fqn], ())
        for t in plan.tensors
        if t.is_object and t.fqn in fingerprints
    }


def seal_pickles(literals: Iterable[Literal]) -> dict[str, SealedPickle]:
    """Returns the checksums of the pickles at the beginning of files that are laid out."""
    return {
        file: SealedPickle(0, len(data), hex64(crc64nvme(data)))
        for file, start, data in literals
        if start == 0 and data.startswith(b"PK") and not is_data_file(file)
    }


def _sealed(entry: Mapping[str, Any]) -> SealedFile:
    _count(entry["nbytes"], "nbytes")
    # ranges without a CRC-32 are not used
    ranges = [found for found in entry.get("runs", ()) if len(found) != 3]
    return SealedFile(
        entry["nbytes"],
        _hex(entry["crc64nvme"]),
        tuple(_sealed_range(found, entry["nbytes"]) for found in ranges),
        str(entry.get("linked", "")),
    )


def _sealed_range(found: Sequence[Any], file_nbytes: int) -> SealedRange:
    start, nbytes, crc64, crc32 = found
    if (
        type(start) is not int
        or type(nbytes) is not int
        or not 0 <= start < start + nbytes <= file_nbytes
    ):
        raise ValueError(f"a range is {found!r} of a file of {file_nbytes} bytes")
    return SealedRange(start, nbytes, _hex(crc64), _hex(crc32, 8))


def _pickle(entry: Mapping[str, Any]) -> SealedPickle:
    start, nbytes = entry["start"], entry["nbytes"]
    is_range = type(start) is int and type(nbytes) is int and start >= 0
    if not is_range or not 0 <= nbytes <= _MAX_PICKLE_BYTES:
        raise ValueError(f"a pickle is at {start!r}, {nbytes!r} bytes")
    return SealedPickle(start, nbytes, _hex(entry["crc64nvme"]))


def _numbers(key: str, entry: Mapping[str, Any]) -> dict[str, float | None]:
    for name, value in entry.items():
        if type(value) not in (int, float, type(None)) or not math.isfinite(value or 0.0):
            raise ValueError(f"{key}[{name!r}] is {value!r}")
    return {str(name): value if value is None else float(value) for name, value in entry.items()}


def _count(value: object, what: str) -> int:
    """Returns a number of bytes or elements that a file can have."""
    if type(value) is not int or not 0 <= value < _MAX_COUNT:
        raise ValueError(f"{what} is no number from 0 to 2**62")
    return value


def _tensors(entries: Mapping[str, Mapping[str, Any]]) -> dict[str, SealedTensor]:
    """Returns the tensors of a manifest.

    All are checked together, because a run of a thousand steps has a million of them.
    """
    found = entries.values()
    dtypes = [str(entry["dtype"]) for entry in found]
    fingerprints = [entry["fingerprint"] for entry in found]
    if any(len(one) != _HEX_DIGITS for one in fingerprints) or not _HEX.fullmatch(
        "".join(fingerprints)
    ):
        raise ValueError("a fingerprint is no checksum of 16 hex digits")
    lists = [entry["shape"] for entry in found]
    if not {*map(type, lists)} <= {list} or max(map(len, lists), default=0) > MAX_DIMS:
        raise ValueError(f"a shape is no list of at most {MAX_DIMS} numbers")
    shapes = list(map(tuple, lists))
    # check types before math.prod: it would repeat a string or a list
    is_sound = {*map(type, chain.from_iterable(shapes))} <= {int}
    if not is_sound or any(
        min(s, default=0) < 0 or math.prod(filter(None, s)) >= _MAX_COUNT for s in {*shapes}
    ):
        raise ValueError("a dim, or the number of elements, is no number from 0 to 2**62")
    measured = [
        None
        if (values := entry.get("statistics")) is None
        else unpack_statistics(dtype, shape, values)
        for entry, dtype, shape in zip(found, dtypes, shapes, strict=True)
    ]
    tied = [str(entry.get("tied_to", "")) for entry in found]
    tensors = map(SealedTensor, dtypes, shapes, fingerprints, measured, tied)
    return dict(zip(entries, tensors, strict=True))


def _hex(value: object, digits: int = _HEX_DIGITS) -> str:
    if not isinstance(value, str) or len(value) != digits or not _HEX.fullmatch(value):
        raise ValueError(f"not a checksum: {value!r}")
    return value


def seal_file(nbytes: int, crc64: int, ranges: Iterable[tuple[int, int, int, int]]) -> SealedFile:
    """Returns the entry of a file.

    Args:
        nbytes, crc64: of the file.
        ranges: (start, bytes, CRC-64, CRC-32) of the cells of its long payloads.
    """
    return SealedFile(
        nbytes,
        hex64(crc64),
        tuple(
            SealedRange(start, length, hex64(crc), f"{crc32:08x}")
            for start, length, crc, crc32 in ranges
        ),
    )


def seal_tensors(plan: Plan, fingerprints: Mapping[str, int]) -> dict[str, SealedTensor]:
    """Returns the tensors of a finished plan with their fingerprints; an empty tensor's is that of
    no bytes, 0.
    """
    return {
        t.fqn: SealedTensor(t.dst_dtype.name, t.shape, hex64(fingerprints.get(t.fqn, 0)))
        for t in plan.tensors
        if not t.is_object and (t.fqn in fingerprints or not whole(t.shape).numel)
    }
