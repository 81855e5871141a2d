"""The manifest: what was sealed on disk, as JSON beside the data. `docs/manifest.md` describes every field.

May import levels 0 to 3.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ckpt_tools.checksum import hex64
from ckpt_tools.plan import Plan

VERSION = 1
CHECKSUM = "crc64nvme"


@dataclass(frozen=True, slots=True)
class Sealed:
    """A file or tensor with its checksum as 16 hex digits."""

    nbytes: int
    crc64nvme: str


@dataclass(frozen=True, slots=True)
class SealedTensor:
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
        """Returns the JSON text, ASCII only, keys in a fixed order."""
        body = {"ckpt_manifest": VERSION, "checksum": CHECKSUM} | asdict(self)
        body["index"] = {"name": self.index[0], **asdict(self.index[1])} if self.index else None
        return json.dumps(body, indent=1).encode("ascii") + b"\n"


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
