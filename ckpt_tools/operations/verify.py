"""Verifies that every byte of a checkpoint is as it was written.

It compares with the manifest, if there is one. Otherwise it checks the structure and the CRC-32 of
every zip record, which torch writes but never compares. The engine reads and hashes the bytes. A
quick check asks an object store for its own checksums instead.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Unpack

from ckpt_tools.core.threads import num_threads
from ckpt_tools.engine.scan import Finding
from ckpt_tools.errors import (
    IntegrityError,
    NotACheckpointError,
    PlanError,
    printable,
    redacted,
)
from ckpt_tools.formats import safetensors
from ckpt_tools.formats.registry import versions_in
from ckpt_tools.operations.arguments import checked
from ckpt_tools.operations.folder import note_on_others
from ckpt_tools.operations.verification import Verification
from ckpt_tools.publish.check_manifest import Problem
from ckpt_tools.ranks.base import ALONE, Group, check_agreement
from ckpt_tools.run.step import Step, damage
from ckpt_tools.storage import local_path
from ckpt_tools.storage.one_file import folder_of
from ckpt_tools.transfer.options import Path_, Reading


@dataclass(frozen=True, slots=True)
class VerifyResult:
    """The result of `verify`.

    Attributes:
        path: the checkpoint.
        is_sealed: whether it has a manifest. Otherwise only the format's own checksums were
            compared.
        num_files, nbytes: number and bytes of the compared files.
        num_entries: number of tensors and objects; 0 if the index is unreadable.
        problems: the problems found; empty for a whole checkpoint.
        lost: names of the damaged or missing entries.
        unknown: files without a checksum, or with one that is unknown without a read.
        unread: tensors of unsupported kinds, with their kinds. Their bytes are compared, but not
            interpreted.
        extra: files in a sealed directory that the manifest does not name. Their bytes were not
            checked.
        notes: remarks.
        findings: with `deep`, tensors with suspicious values.
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


def step_damage(
    storage_options: Mapping[str, Any] | None = None,
) -> Callable[[Step, int | None], str]:
    """Returns a function that reads a whole step, and returns its problem; "" if it has none.

    A step without a manifest is read as `verify` does.
    """

    def read(step: Step, jobs: int | None) -> str:
        if step.error is not None or step.problem or step.manifest is not None:
            return damage(step, jobs)
        found = verify(step.path, jobs=jobs, storage_options=storage_options)
        return str(found.problems[0]) if found.problems else ""

    return read


@checked(Reading)
def verify(
    src: Path_,
    *,
    quick: bool = False,
    deep: bool = False,
    require_manifest: bool = False,
    **options: Unpack[Reading],
) -> VerifyResult:
    """Finds out whether a checkpoint is whole, and what is damaged.

    Args:
        src: a checkpoint, or a directory with one below; a path or a URL.
        quick: read no data: names, sizes, structure, and the checksums that an object store keeps.
        deep: also scan the values for NaN, infinity, tensors of only zeros, and tensors of one
            value.
        require_manifest: refuse a checkpoint without a manifest, for which only the format's own
            checksums exist.
        **options: see `Reading`.

    Raises:
        NotACheckpointError: there is no checkpoint.
        IntegrityError: it has no manifest, but one is required.
        StorageError: it cannot be read.
    """
    if quick and deep:
        raise PlanError("quick reads no values, and deep looks at them", hint="give one of the two")
    try:
        return _verify(src, quick, deep, require_manifest, options)
    except NotACheckpointError as error:
        url = local_path(src).rstrip("/")
        versions = versions_in(url, options.get("storage_options")) if error.num_below else None
        if versions is None or not versions.numbers:
            raise
    from ckpt_tools.operations.verify_versions import look_at_versions, of_publication  # with zstd

    began = time.monotonic()

    def one(path: str) -> VerifyResult:
        return _verify(path, quick, deep, require_manifest, options)

    try:
        newest = one(versions.path(versions.numbers[-1]))
    except IntegrityError as error:
        newest = VerifyResult(url, True, 0, 0, 0, [Problem("", f"is damaged: {error}")])
    problems, notes = look_at_versions(
        url,
        versions,
        options.get("storage_options"),
        options.get("jobs"),
        lambda path: list(one(path).problems),
        quick,
    )
    return replace(newest, **of_publication(url, newest, problems, notes, versions, began))


def _verify(
    src: Path_, quick: bool, deep: bool, require_manifest: bool, options: Reading
) -> VerifyResult:
    group: Group = options.get("group") or ALONE
    with group.phase("open"):
        work = Verification(src, options)
    if require_manifest and work.manifest is None:
        raise IntegrityError(
            f"it has no manifest that can be read: {printable(redacted(work.store.url))}",
            hint="ckpt seal adds one",
        )
    check_agreement(group, (sorted(work.sizes.items()), work.manifest))
    work.notes += note_on_others(src, work.store)
    began = time.monotonic()
    problems, unknown = work.compare(quick) if work.manifest else work.examine_all(quick)
    if not quick and not problems and work.format is safetensors:
        problems = _compare_changes(work, num_threads(options.get("jobs")))
    if not problems and not work.num_entries and not (work.catalog and work.catalog.unread):
        problems = [Problem("", "it holds no tensor and no object, so there is nothing to verify")]
    lost = sorted({p.fqn for p in problems if p.fqn})
    unread = work.catalog.unread if work.catalog else {}
    if work.catalog and not quick and not work.is_remote:
        unread = {**unread, **work.find_unread(set(lost))}
        work.look_for_code(set(lost))
    findings = work.scan({*lost, *unread}) if deep and work.catalog else []
    work.store.close()
    sizes, extra = work.sizes, work.extra()
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
        extra,
        work.notes,
        findings,
        time.monotonic() - began,
    )


def _compare_changes(work: Verification, jobs: int) -> list[Problem]:
    """Compares the own files of a delta with its manifest.

    Without a manifest, it compares what the delta changes with the checksums of its publisher.
    """
    from ckpt_tools.formats.deltas.chain import as_patched, wrong_tensors  # with zstd
    from ckpt_tools.publish.delta import wrong_files

    version = as_patched(folder_of(work.store)[0])
    if version is None:
        return []
    if work.manifest is not None:
        with version.layers[-1].opened() as store:
            return [Problem(file, why) for file, why in wrong_files(store).items()]
    work.notes.append("changed tensors were compared with the publisher's checksums")
    what = "is not what the publisher noted: the changes or the model below are others"
    return [Problem(version.changed[n].file, what, n) for n in wrong_tensors(version, jobs)]
