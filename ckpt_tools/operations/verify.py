"""Verify: is every byte what it was when it was written?

Against the manifest, where there is one; else by structure, and by the CRC-32 of every record of a
zip, which torch writes and never compares. Bytes are read by the engine and hashed; or, quickly, an
object store is asked for the checksums that it keeps.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Unpack

from ckpt_tools.engine.scan import Finding
from ckpt_tools.errors import IntegrityError, PlanError, printable, redacted
from ckpt_tools.operations.arguments import checked
from ckpt_tools.operations.verification import Verification
from ckpt_tools.publish.check_manifest import Problem
from ckpt_tools.ranks.base import ALONE, Group, agree
from ckpt_tools.transfer.transfer import Path_, Reading


@dataclass(frozen=True, slots=True)
class VerifyResult:
    """What a verification found.

    Attributes:
        path: the checkpoint.
        is_sealed: whether it has a manifest; else only what its format itself keeps could be
            compared.
        num_files, nbytes: how many files, and of how many bytes, were compared.
        num_entries: tensors and objects; 0 where the index cannot be read.
        problems: what is wrong; whole where empty.
        lost: names of the entries that cannot be read as they were written.
        unknown: files whose bytes have no checksum, or none that is known without reading them.
        unread: tensors of kinds that are not read here, with their kinds: their bytes are compared,
            what they mean is not known.
        extra: files in a sealed directory that the manifest does not name; nothing is known of
            their bytes.
        notes: remarks.
        findings: with `deep`, tensors with values that a person should know of.
        seconds: wall-clock time.
    """

    path: str
    is_sealed: bool
    num_files: int
    nbytes: int
    num_entries: int
    problems: Sequence[Problem]
    lost: Sequence[str] = ()
    unknown: Sequence[str] = ()
    unread: Mapping[str, str] = field(default_factory=dict)
    extra: Sequence[str] = ()
    notes: Sequence[str] = ()
    findings: Sequence[Finding] = field(default_factory=list)
    seconds: float = 0.0


@checked(Reading)
def verify(
    src: Path_,
    *,
    quick: bool = False,
    deep: bool = False,
    require_manifest: bool = False,
    **options: Unpack[Reading],
) -> VerifyResult:
    """Finds out whether a checkpoint is whole.

    Args:
        src: a checkpoint, or a directory with one below; a path or a URL.
        quick: read no data: names, sizes, structure, and the checksums that an object store keeps.
        deep: also look at the values: NaN, infinity, nothing but zeros, nothing but one value.
        require_manifest: refuse a checkpoint that has none: only what its format keeps could be
            compared.
        **options: see `Reading`.

    Raises:
        NotACheckpointError: there is no checkpoint.
        IntegrityError: it has no manifest, and one is required.
        FormatError: its index is malformed, and there is no manifest to say more.
        StorageError: it cannot be read.
    """
    if quick and deep:
        raise PlanError("quick reads no values, and deep looks at them", hint="give one of the two")
    team: Group = options.get("team") or ALONE
    with team.phase("open"):
        work = Verification(src, options)
    if require_manifest and work.manifest is None:
        raise IntegrityError(
            f"it has no manifest that can be read: {printable(redacted(work.store.url))}",
            hint="ckpt seal adds one",
        )
    agree(team, (sorted(work.sizes.items()), work.manifest))
    began = time.monotonic()
    problems, unknown = work.compare(quick) if work.manifest else work.examine_all(quick)
    if not problems and not work.num_entries and not (work.catalog and work.catalog.unread):
        problems = [
            Problem("", "it holds no tensor and no object, so there is nothing that could be whole")
        ]
    lost = sorted({p.fqn for p in problems if p.fqn})
    unread = work.catalog.unread if work.catalog else {}
    if work.catalog and not quick and work.remote is None:
        unread = {**unread, **work.find_unread(set(lost))}
    findings = work.scan({*lost, *unread}) if deep and work.catalog else []
    work.store.close()
    sizes = work.sizes
    return VerifyResult(
        redacted(work.store.url),
        work.manifest is not None,
        len(sizes),
        sum(sizes.values()),
        work.num_entries,
        problems,
        lost,
        unknown,
        unread,
        work.extra(),
        work.notes,
        findings,
        time.monotonic() - began,
    )
