"""Saves a live state: the ranks assign shards to writers, each writes, and rank 0 commits.

The ranks keep this assignment. While no rank's shards change, a save exchanges only a few bytes per
file and an exclusive-or of the tensors' checksums. The files are those of stock `dcp.save`, and the
manifest.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ckpt_tools.core.catalog import ChunkList, TensorEntry
from ckpt_tools.core.checksum import crc64nvme, hex64
from ckpt_tools.core.dtypes import BY_NAME
from ckpt_tools.core.laps import Laps
from ckpt_tools.core.quantized import find_quantized
from ckpt_tools.engine.execute import Progress
from ckpt_tools.engine.statistics import Moments, add_moments
from ckpt_tools.errors import CheckpointError
from ckpt_tools.formats.dcp import format as dcp
from ckpt_tools.formats.dcp.metadata import ItemLocation
from ckpt_tools.formats.registry import is_ours
from ckpt_tools.loop.saving.agreement import MetadataHead, WriteTask, agree
from ckpt_tools.loop.saving.description import RankNames
from ckpt_tools.loop.saving.known_files import Unchanged
from ckpt_tools.loop.saving.replicas import Proof, ReplicaProof
from ckpt_tools.loop.saving.write import (
    FilePlan,
    RankFile,
    commit,
    describe,
    plan_rank_files,
    write_files,
    write_index,
    write_part,
)
from ckpt_tools.loop.state.device_statistics import DeviceMoments, moments_by_name
from ckpt_tools.loop.state.shard_info import FileKind, ShardInfo
from ckpt_tools.loop.state.state_dict import Only
from ckpt_tools.publish.base import Attempt, Destination
from ckpt_tools.publish.manifest import Manifest, SealedTensor
from ckpt_tools.ranks.gloo import GlooGroup


@dataclass(slots=True)
class SaveLayout:
    """The agreed layout of a save, as one rank needs it. It is kept from save to save.

    `names` has the names that this rank brought, and `replicas` the proof of what others hold, too.
    """

    names: RankNames
    task: WriteTask
    files: tuple[FilePlan, ...]
    head: MetadataHead | None
    replicas: ReplicaProof

    def numbers_in(self, kind: FileKind) -> tuple[int, ...]:
        """Returns the shards in a file of this rank, among those that it writes."""
        return next((plan.numbers for plan in self.files if plan.kind == kind), ())

    def shards_in(self, kind: FileKind) -> tuple[ShardInfo, ...]:
        """Returns the shards in a file of this rank."""
        return tuple(self.names.infos[self.task.shards[n]] for n in self.numbers_in(kind))

    def staged_plans(self, has_frozen: bool) -> list[FilePlan]:
        """Returns the plans of the files in the order in which their shards are copied.

        Those of frozen parameters come last, or not at all: no later change has to wait for them.
        """
        plans = sorted(self.files, key=lambda plan: plan.kind == FileKind.FROZEN)
        return [plan for plan in plans if has_frozen or plan.kind != FileKind.FROZEN]


@dataclass(slots=True)
class SaveReport:
    """The result of a save.

    Attributes:
        path: the checkpoint.
        own_nbytes, nbytes: bytes of this rank's files; on rank 0, of all files.
        linked_nbytes: on rank 0, bytes that were not written, because the step before has them.
        seconds: from the start of the write to the commit.
        notes: remarks of the store.
        step: its number; None for a checkpoint without one.
        digest: on rank 0, CRC-64/NVME of the manifest, in hexadecimal. The manifest has the
            checksum of every file, so the digest stands for all bytes.
        stall_s: seconds for which `save` held the training loop.
        metrics: as given to `save`.
        mirror_lag_steps: on rank 0, steps that the mirror does not have yet, this one included.
        not_finite: on rank 0, tensors with NaN or infinite values, if the save measured them.
        timing: seconds of each phase: `wait` for the save before, `collect` the state, `agree` with
            the other ranks, `compare` replicas, and what may be linked, `copy` to host memory,
            `write`, `fsync` and `commit`. On rank 0, `write` and `fsync` are those of the slowest
            rank.
    """

    path: str
    own_nbytes: int
    nbytes: int = 0
    seconds: float = 0.0
    notes: Sequence[str] = ()
    step: int | None = None
    digest: str = ""
    stall_s: float = 0.0
    metrics: Mapping[str, float] = field(default_factory=dict)
    mirror_lag_steps: int = 0
    not_finite: Sequence[str] = ()
    timing: Mapping[str, float] = field(default_factory=dict)
    linked_nbytes: int = 0


@dataclass(frozen=True, slots=True)
class SaveExtras:
    """What a save has besides the state. Only rank 0's counts, but for `measured` and `remark`.

    Attributes:
        files: contents of small files that lie in the checkpoint, by name.
        only: which part of the state is written; None for all of it.
        metrics: numbers of the step. The manifest stores one that is not finite as null.
        statistics: measure every tensor. All ranks have the same value.
        before: the step that was saved last, with the same layout, to measure changes from.
        measured: the statistics of this rank's shards on an accelerator.
        timing: seconds of the phases before the write.
        notes: on rank 0, remarks on the state.
        remark: of this rank on its part of the state; "" for none.
    """

    files: Mapping[str, bytes] = field(default_factory=dict)
    only: Only | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    statistics: bool = False
    before: Path | None = None
    measured: DeviceMoments | None = None
    timing: Mapping[str, float] = field(default_factory=dict)
    notes: Sequence[str] = ()
    remark: str = ""


@dataclass(frozen=True, slots=True)
class Save:
    """The save of one rank, without the bytes of its shards.

    Attributes:
        step: its number, for the manifest; None for a checkpoint without one.
        layout: from `agree_layout`.
        objects: this rank's objects as archives, in the layout's order.
        overwrite: replace an existing checkpoint once everything is written. Only rank 0's value
            counts.
        extras: files to add, and what was left out.
    """

    step: int | None
    layout: SaveLayout
    objects: Mapping[str, bytes]
    overwrite: bool
    extras: SaveExtras


def extras_of(
    only: str | Callable[[str], bool] | None,
    files: Mapping[str, bytes] | None,
    metrics: Mapping[str, float] | None = None,
    statistics: bool = False,
) -> SaveExtras:
    """Returns what a save has besides its state.

    Raises:
        ValueError: an unknown choice, or a name that a checkpoint needs for itself.
        TypeError: a file is not bytes, or a metric is not a number.
    """
    if not callable(only) and only not in (None, Only.TRAINABLE):
        raise ValueError(
            f"only: expected {Only.TRAINABLE.value!r} or a function of a name, got {only!r}"
        )
    for name, data in (files or {}).items():
        if not isinstance(name, str) or len(name.encode()) > 200 or not name.isprintable():
            raise ValueError(f"files: expected a short printable name, got {name!r}")
        if not name or "/" in name or name.startswith((".", "ckpt.", "__")) or is_ours(name):
            raise ValueError(f"files: a step cannot have a file named {name!r}")
        if not isinstance(data, bytes):
            raise TypeError(f"files[{name!r}]: expected bytes, got a {type(data).__name__}")
    kind = Only.CHOSEN if callable(only) else Only(only) if only is not None else None
    return SaveExtras(dict(files or {}), kind, numbers_of(metrics or {}), statistics)


def numbers_of(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Returns metrics as floats; a tensor of one element is a number, too.

    Raises:
        TypeError: a name is no text, or a value is no number.
    """
    found = {}
    if not isinstance(metrics, Mapping):
        raise TypeError(f"metrics: expected a dict, got a {type(metrics).__name__}")
    for name, value in metrics.items():
        if not isinstance(name, str) or not name.isprintable() or not 0 < len(name) <= 200:
            raise ValueError(f"metrics: expected a short printable name, got {name!r}")
        try:
            found[name] = float(value)
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            kind = "larger one" if isinstance(error, OverflowError) else type(value).__name__
            raise TypeError(f"metrics[{name!r}]: expected a number, got a {kind}") from None
    return found


# ---- agreeing ------------------------------------------------------------------------------------


def agree_layout(
    group: GlooGroup, names: RankNames, proof: Proof, names_differ: bool = False
) -> SaveLayout:
    """Returns the layout of a save. All ranks call it, each with its names.

    Args:
        group: all ranks.
        names: of this rank.
        proof: how often the replicas of several ranks are compared.
        names_differ: ranks may have tensors that other ranks lack.

    Raises:
        PlanError: ranks disagree about a tensor, have different values, or the shards leave a hole.
            Every rank raises.
    """
    task, head = agree(group, names, names_differ)
    with group.phase("plan the files"):
        files = plan_rank_files(group.rank, [names.infos[i] for i in task.shards])
        replicas = ReplicaProof(task.replicas, names.infos, proof)
    return SaveLayout(names, task, files, head, replicas)


# ---- writing -------------------------------------------------------------------------------------


def write(
    group: GlooGroup,
    target: Destination,
    save: Save,
    contents: Sequence[Sequence[memoryview] | Unchanged],
    attempt: str,
    jobs: int,
    before_commit: Callable[[], None] | None = None,
    progress: Progress | None = None,
) -> tuple[SaveReport, Sequence[RankFile], Manifest | None]:
    """Writes one checkpoint and makes it visible. All ranks call it with the agreed layout.

    Args:
        group: all ranks.
        target: the new checkpoint. It must not exist, unless the save overwrites.
        save: of this rank.
        contents: for each file of this rank, the bytes of its shards, or where they are already.
        attempt: id of this attempt, the same on all ranks.
        jobs: threads on this rank.
        before_commit: called on rank 0 when everything is written. If it raises, nothing is
            committed.
        progress: called with the bytes of each batch that is written, by any thread.

    Returns:
        The report; this rank's files; and on rank 0 the manifest.

    Raises:
        CheckpointError: this rank failed, or PeerError: another rank did. Then nothing new is
            visible at `target`.
    """
    what, began = target.url.rpartition("/")[2], time.monotonic()
    notes, manifest = list[str](), None
    extras, timing = save.extras, dict(save.extras.timing)
    with ExitStack() as stack:
        with group.phase(f"begin {what}"):
            if group.rank == 0:
                target.check(save.overwrite)
                staged = stack.enter_context(target.stage(attempt, save.overwrite))
        with group.phase(f"write {what}"):
            if group.rank:
                staged = target.join(attempt)
            mine = _write_files(target, staged, save, contents, jobs, progress)
        parts = group.gather([part._replace(shares={}) for part in mine], f"write {what}")
        fingerprints = group.xor(_fingerprints(save.layout, mine), f"write {what}")
        for name in ("write", "fsync"):
            timing[name] = max(
                sum(p.seconds.get(name, 0.0) for p in files) for files in parts or [mine]
            )
        laps = Laps()
        with group.phase(f"commit {what}"):
            if group.rank == 0:
                done = replace(save, extras=replace(extras, timing=timing))
                manifest, notes = _commit(target, staged, done, parts, fingerprints, before_commit)
    files = [part for files in parts for part in files]
    remarks = dict.fromkeys(part.remark for part in files if part.remark)
    notes = [*extras.notes, *notes, *remarks]
    laps.lap("commit")
    report = SaveReport(
        target.url,
        sum(p.nbytes for p in mine),
        sum(p.nbytes for p in files),
        time.monotonic() - began,
        notes,
        save.step,
        "" if manifest is None else hex64(crc64nvme(manifest.render())),
        not_finite=[] if manifest is None else manifest.not_finite,
        timing=timing | laps.seconds,
        linked_nbytes=sum(p.nbytes for p in files if p.linked),
    )
    return report, mine, manifest


def _write_files(
    target: Destination,
    staged: Attempt,
    save: Save,
    contents: Sequence[Sequence[memoryview] | Unchanged],
    jobs: int,
    progress: Progress | None,
) -> list[RankFile]:
    """Writes this rank's files, or takes them over from the step before."""
    layout, extras = save.layout, save.extras
    measured: Mapping[str, Moments] = {}
    if extras.measured is not None:
        pairs = zip(layout.files, contents, strict=True)
        has_frozen = not any(
            plan.kind == FileKind.FROZEN and isinstance(one, Unchanged) and one.copies is None
            for plan, one in pairs
        )
        written = [n for plan in layout.staged_plans(has_frozen) for n in plan.numbers]
        names = [layout.names.infos[layout.task.shards[n]].fqn for n in written]
        measured = moments_by_name(names, extras.measured.result())
    parts: list[RankFile] = []
    for plan, given in zip(layout.files, contents, strict=True):
        how = remark = ""
        if isinstance(given, Unchanged):
            found = given.take_over(target, staged)
            if found.linked:
                parts.append(found)
                continue
            how, remark, memory = found.how, found.remark, given.live(jobs)
        else:
            memory = given
        part = write_part(
            plan,
            target,
            staged,
            memory,
            list(save.objects.values()) if plan is layout.files[0] else (),
            jobs,
            extras.statistics,
            extras.before,
            {fqn: found for fqn, found in measured.items() if fqn in plan.target.slots},
            progress,
        )
        if isinstance(given, Unchanged) and part.crc64 != given.known.part.crc64:
            raise CheckpointError(
                f"values changed while {part.name} was written",
                hint="the next save writes the new values",
            )
        parts.append(part._replace(how=how, remark=remark or extras.remark))
    return parts


def _commit(
    target: Destination,
    staged: Attempt,
    save: Save,
    parts: Sequence[Sequence[RankFile]],
    fingerprints: Sequence[int],
    before_commit: Callable[[], None] | None,
) -> tuple[Manifest, list[str]]:
    """Writes index, small files and manifest, and publishes. Returns the manifest and notes.

    Only rank 0 calls it, with the written parts of all ranks.
    """
    head, extras = save.layout.head, save.extras
    assert head is not None
    saved = {
        fqn: (rank, item)
        for rank, (names, files) in enumerate(zip(head.objects, parts, strict=True))
        for fqn, item in zip(names, files[0].objects, strict=True)
    }
    places = {
        fqn: ItemLocation(dcp.data_file_name(rank), item.start, item.nbytes)
        for fqn, (rank, item) in saved.items()
    }
    index = write_index(
        staged,
        head.template.pieces(
            places, staged.attempt, lambda file: target.name(file, staged.attempt)
        ),
    )
    # last, because in a bucket their names are those of the result that is replaced
    small = write_files(staged, extras.files)
    if before_commit is not None:
        before_commit()
    tensors = _seal(head, fingerprints, parts)
    sealed = {fqn: item for fqn, (_, item) in saved.items()}
    manifest = describe(target, staged, index, parts, tensors, sealed)
    manifest = replace(
        manifest,
        source={"only": extras.only} if extras.only else manifest.source,
        step=save.step,
        files={**manifest.files, **small},
        metrics={n: v if math.isfinite(v) else None for n, v in extras.metrics.items()},
        timing={name: round(seconds, 4) for name, seconds in extras.timing.items()},
    )
    return manifest, commit(staged, manifest, index)


def _fingerprints(layout: SaveLayout, parts: Sequence[RankFile]) -> list[int]:
    """Returns this rank's share of every tensor's fingerprint."""
    values = [0] * layout.task.num_tensors
    numbers = {
        layout.names.infos[number].fqn: tensor
        for number, tensor in zip(layout.task.shards, layout.task.numbers, strict=True)
    }
    for part in parts:
        for fqn, share in part.shares.items():
            values[numbers[fqn]] ^= share
    return values


def _seal(
    head: MetadataHead, fingerprints: Sequence[int], parts: Sequence[Sequence[RankFile]]
) -> dict[str, SealedTensor]:
    moments: dict[str, Moments] = {}
    for files in parts:
        for part in files:
            add_moments(moments, part.moments.items())
    entries = {
        fqn: TensorEntry(fqn, BY_NAME[o.dtype], o.shape, ChunkList()) for fqn, o in head.tensors
    }
    parts_of_weights = find_quantized(entries) if moments else {}  # they have no magnitudes
    found = {fqn: one.result() for fqn, one in moments.items() if fqn not in parts_of_weights}
    tensors = {
        fqn: sealed._replace(fingerprint=f"{value:016x}", statistics=found.get(fqn))
        for (fqn, sealed), value in zip(head.tensors, fingerprints, strict=True)
    }
    return tensors | {
        fqn: tensors[other]._replace(tied_to=other)
        for fqn, other in head.aliases.items()
        if other in tensors
    }
