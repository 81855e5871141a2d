"""The manifest: what was sealed on disk, as JSON beside the data. `docs/manifest.md` describes every field.

May import levels 0 to 3.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from ckpt_tools.checksum import hex64
from ckpt_tools.plan import Plan

VERSION = 1
CHECKSUM = "crc64nvme"


class Sealed(NamedTuple):
    """A file or tensor with its checksum as 16 hex digits."""

    nbytes: int
    crc64nvme: str


class SealedTensor(NamedTuple):
    """A tensor with the checksum of its row-major little-endian bytes, however it is sharded."""

    dtype: str
    shape: tuple[int, ...]
    fingerprint: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """See `docs/manifest.md`; `index` is None where a single file is its own index."""

    attempt: str
    created: str
    tool: str
    operation: str
    format: str
    source: Mapping[str, Any]
    world_size: int | None
    files: Mapping[str, Sealed]
    index: tuple[str, Sealed] | None
    tensors: Mapping[str, SealedTensor]
    step: int | None = None

    def render(self) -> bytes:
        """Returns the JSON text: ASCII, a line for every file and tensor, keys in a fixed order."""
        body: dict[str, Any] = {"ckpt_manifest": VERSION, "checksum": CHECKSUM}
        body |= {f.name: getattr(self, f.name) for f in fields(self)}
        body["index"] = {"name": self.index[0], **self.index[1]._asdict()} if self.index else None
        lines = [
            f" {json.dumps(key)}: {_table(value) if key in ('files', 'tensors') else json.dumps(value)}" for key, value in body.items()
        ]
        return ("{\n" + ",\n".join(lines) + "\n}\n").encode("ascii")


def _table(entries: Mapping[str, Sealed | SealedTensor]) -> str:
    lines = [f"  {json.dumps(name)}: {json.dumps(entry._asdict())}" for name, entry in entries.items()]
    return "{\n" + ",\n".join(lines) + "\n }" if lines else "{}"


def file_name(attempt: str, beside: str = "") -> str:
    """Returns the manifest's name: unique per attempt; with the data file's name in front where it stands beside one."""
    return f"{beside}.ckpt.manifest.{attempt[:8]}.json" if beside else f"ckpt.manifest.{attempt[:8]}.json"


def seal_tensors(plan: Plan, fingerprints: Mapping[str, int]) -> dict[str, SealedTensor]:
    """Returns the tensors of a finished plan with their fingerprints; an empty tensor's is that of no bytes, 0."""
    return {
        t.fqn: SealedTensor(t.dst_dtype.name, t.shape, hex64(fingerprints.get(t.fqn, 0)))
        for t in plan.tensors
        if not t.is_object and t.is_complete
    }
