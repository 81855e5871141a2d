"""Removes optimizer and loader state from old steps of a run. The models stay.

A thinned step takes the place of the full one in the same way as any result replaces another: in
one instant, once it is complete.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from typing import Any, Unpack

from ckpt_tools.core.box import whole
from ckpt_tools.core.catalog import Catalog
from ckpt_tools.core.counts import check_count
from ckpt_tools.core.naming import find_optimizers, is_other_state, key_path, shortest_names
from ckpt_tools.core.selection import check_globs, keep, matcher, refuse_unread
from ckpt_tools.errors import (
    CheckpointError,
    IntegrityError,
    PlanError,
    StorageError,
    printable,
)
from ckpt_tools.formats.dcp import format as dcp
from ckpt_tools.formats.registry import Request, Source, TargetTensor
from ckpt_tools.operations.arguments import checked
from ckpt_tools.operations.merge_reshard import dtype_by_name, keeper, saved_boxes, target_dtype
from ckpt_tools.publish.base import OLD_FILES_STAY
from ckpt_tools.publish.destinations import open_destination
from ckpt_tools.run.base import RunRoot, log_leftovers
from ckpt_tools.run.reasons import reason_to_stay
from ckpt_tools.run.retention import Retention, sound_steps
from ckpt_tools.run.roots import open_root
from ckpt_tools.run.shared_files import shared_nbytes
from ckpt_tools.run.step import Step, is_there, open_step
from ckpt_tools.run.steps import list_steps, no_steps
from ckpt_tools.storage import read
from ckpt_tools.storage.kept import KEPT
from ckpt_tools.transfer.options import Dtype, Options, Path_, Reading
from ckpt_tools.transfer.transfer import TransferRequest, transfer

_MAX_FILE_BYTES = 64 << 20  # of a small file that a save has put beside its data
_EXTRA = "_extra_state"  # what `nn.Module.get_extra_state` returns


@dataclass(frozen=True, slots=True)
class ThinnedStep:
    """A step that was thinned, or would be.

    Attributes:
        number, path: of the step.
        before_nbytes, after_nbytes: bytes of its files, without the manifest and without what it
            shared with other steps; `after_nbytes` is an estimate in a dry run.
        dropped: bytes by the name of what is gone; a key stands for all below it.
        stays: why its old files are still there; "" if they are gone. The next `thin` or `prune`,
            or the next job, removes them.
    """

    number: int
    path: str
    before_nbytes: int
    after_nbytes: int
    dropped: Mapping[str, int]
    stays: str = ""

    @property
    def freed_nbytes(self) -> int:
        """Returns the bytes that are free now, or would be."""
        return 0 if self.stays else self.before_nbytes - self.after_nbytes


@dataclass(frozen=True, slots=True)
class ThinResult:
    """The result of `thin`.

    Attributes:
        thinned: steps, oldest first.
        kept: path of each full step that stays full, with the reason.
        failed: path of each step that could not be thinned, or read, with the error. It is as it
            was.
        damaged, unfit: those of them that are damaged, and those that the request does not fit.
        is_dry_run: whether nothing was written.
    """

    thinned: list[ThinnedStep] = field(default_factory=list)
    kept: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    damaged: list[str] = field(default_factory=list)
    unfit: list[str] = field(default_factory=list)
    is_dry_run: bool = False

    def fail(self, step: Step, error: CheckpointError) -> None:
        """Adds a step that could not be thinned."""
        self.failed[str(step.path)] = str(error)
        if isinstance(error, IntegrityError):
            self.damaged.append(str(step.path))
        elif isinstance(error, PlanError):
            self.unfit.append(str(step.path))

    @property
    def freed_nbytes(self) -> int:
        """Returns the bytes that are free now, or would be."""
        return sum(step.freed_nbytes for step in self.thinned)


@checked(Reading)
def thin(
    root: Path_,
    keep_full: int,
    *,
    keep_every: int | None = None,
    drop: Sequence[str] = (),
    dtype: Dtype | None = None,
    dry_run: bool = False,
    **options: Unpack[Reading],
) -> ThinResult:
    """Removes optimizer and loader state from all but the newest steps of a run.

    A step stays full if it is pinned, if a link leads to it, or if it holds files that no save
    wrote. As for `Retention`, so do the newest full step that is not known to have NaN or infinity,
    and the newest that is known to be finite. These steps are read first: a damaged one does not
    count. No job may be saving to the run.

    Args:
        root: directory of the run, a path or a URL.
        keep_full: how many of the newest full steps stay as they are, at least 1.
        keep_every: steps whose number is a multiple of this stay full.
        drop: globs of entries to remove. If empty: all but the models. A model is a key with
            tensors that are of no optimizer, with all that lies below it.
        dtype: `bf16`, `fp16`, `fp32` or `fp64`: also cast the tensors that stay.
        dry_run: change nothing, and return what would be done.
        **options: see `Reading`. Several processes cannot share the work.

    Raises:
        NotACheckpointError: there are no steps.
        PlanError: a number is less than 1, or a glob matches nothing.
        StorageError: another job holds the run.
    """
    check_count("keep_full", keep_full, PlanError)
    check_count("keep_every", keep_every, PlanError, or_none=True)
    if dtype is not None:
        dtype_by_name(dtype)
    where = open_root(root, options.get("storage_options"))
    how: dict[str, Any] = {"drop": drop, "dtype": dtype, "options": options}
    with KEPT.during():
        steps = list_steps(where)
        if not steps:  # a claim would make the directory
            raise no_steps(where)
        if dry_run:
            where.check_writable()  # so that it promises nothing that cannot be done
            return thin_steps(where, steps, keep_full, keep_every, dry_run=True, **how)
        lock = where.claim()
        try:
            log_leftovers(where.remove_leftovers())
            return thin_steps(where, list_steps(where), keep_full, keep_every, **how)
        finally:
            lock.release()


def thin_steps(
    where: RunRoot,
    steps: Sequence[Step],
    keep_full: int,
    keep_every: int | None = None,
    *,
    held: Container[str] = (),
    reads: bool = True,
    drop: Sequence[str] = (),
    dtype: Dtype | None = None,
    dry_run: bool = False,
    options: Reading,
) -> ThinResult:
    """Thins the steps of a run that the caller holds; arguments as for `thin`.

    Args:
        where: the root.
        steps: its steps, without superseded ones.
        keep_full, keep_every, drop, dtype, dry_run, options: as for `thin`.
        held: paths of steps that stay full, because something still reads them.
        reads: read the newest full steps first. A damaged one is not counted.
    """
    result = ThinResult(is_dry_run=dry_run)
    result.failed.update({str(s.path): str(s.error) for s in steps if s.error is not None})
    full = _counted(steps, reads, result, options.get("jobs"))
    links = where.links()
    chosen = list(_chosen(full, keep_full, keep_every, held, result.kept))
    for step in list(chosen):
        if reason := reason_to_stay(where, step, links, with_host=True):
            result.kept[str(step.path)] = reason
            chosen.remove(step)
    if drop and (names := _names(chosen)):
        check_globs(drop, names, "--drop")
    alike: dict[object, ThinnedStep | str] = {}
    for step in chosen:
        key = _sizes_in(step) if dry_run and not reads else None
        try:
            if key is not None and key in alike:
                found = alike[key]
            else:
                source = open_step(step)
                with closing(source.store):
                    found = _thin_one(step, source, drop, dtype, options, result.is_dry_run)
                alike[key] = found
        except CheckpointError as error:
            result.fail(step, error)
            continue
        if isinstance(found, ThinnedStep):
            result.thinned.append(replace(found, number=step.number, path=str(step.path)))
        elif found:
            result.kept[str(step.path)] = found
    return result


def _names(steps: Iterable[Step]) -> list[str]:
    """Returns the names in steps that can be opened; `thin` reports the others."""
    names: dict[str, None] = {}
    for step in steps:
        with suppress(CheckpointError):
            source = open_step(step)
            with closing(source.store):
                names |= dict.fromkeys([*source.catalog.tensors, *source.catalog.objects])
    return list(names)


def _counted(
    steps: Sequence[Step], reads: bool, result: ThinResult, jobs: int | None
) -> list[Step]:
    """Returns the complete steps without damaged ones that would be a reason to thin others.

    These are the newest full step, and the newest full steps without known NaN or infinity.
    """
    kept = result.kept
    for step in steps:
        if step.error is None and step.not_counted:
            kept[str(step.path)] = step.not_counted
    found = [step for step in steps if step.counts]
    if not reads:
        return found

    def needed(steps: Sequence[Step]) -> Iterator[Step]:
        full = [step for step in steps if not step.thinned]
        yield from (step for step, _ in Retention(last=1).reasons_beside(full))

    damaged: dict[str, str] = {}
    found = sound_steps(found, needed, damaged, result.failed, jobs)
    kept |= {path: f"it is not counted: {problem}" for path, problem in damaged.items()}
    return found


def _chosen(
    steps: Sequence[Step],
    keep_full: int,
    keep_every: int | None,
    held: Container[str],
    kept: dict[str, str],
) -> Iterator[Step]:
    """Yields the steps to thin, oldest first, and notes why others stay full."""
    rules = Retention(last=keep_full, every=keep_every)
    full = [step for step in steps if not step.thinned]
    now = dt.datetime.now(dt.UTC)
    reasons = rules.reasons(full, now) if full else {}
    for step in steps:
        reason = reasons.get(str(step.path), "")
        if step.thinned:  # the newest full steps are no reason to keep it
            reason = ", ".join(rules.reasons_alone(step, now))
        if not reason and str(step.path) in held:
            reason = "it is still needed"
        elif not reason and not (step.is_removable and _is_ours(step)):
            reason = "no save of this tool wrote it"
        if reason:
            kept[str(step.path)] = reason
        else:
            yield step


def _is_ours(step: Step) -> bool:
    return step.manifest is not None and step.manifest.format == dcp.NAME


def _thin_one(
    step: Step,
    source: Source,
    drop: Sequence[str],
    dtype: Dtype | None,
    options: Reading,
    is_dry_run: bool,
) -> ThinnedStep | str:
    """Thins one step; returns why it stays as it is, "" if there is nothing to remove."""
    catalog = _kept_part(source.catalog, drop)
    refuse_unread(catalog)
    if not catalog.tensors:
        raise PlanError("no tensor would be left", hint="ckpt prune removes whole steps")
    gone = _gone(source.catalog, catalog)
    is_kept = keeper((), catalog)
    casts = any(target_dtype(t, dtype, is_kept) is not t.dtype for t in catalog.tensors.values())
    if not gone and not casts:
        return ""
    world_size = source.catalog.world_size or 1
    targets = [
        TargetTensor(
            t.fqn,
            target_dtype(t, dtype, is_kept),
            t.shape,
            tuple(saved_boxes(t, world_size, world_size)),
        )
        for t in catalog.tensors.values()
    ]
    assert step.manifest is not None
    sealed = [*step.manifest.files.values(), *(step.manifest.index or ())[1:]]
    before = sum(file.nbytes for file in sealed)
    shared = shared_nbytes(step)
    if shared and before - shared <= sum(whole(t.shape).numel * t.dtype.itemsize for t in targets):
        return f"other steps share {shared:,} of its bytes, which a thinned one would write again"
    objects = {o.fqn: o.extent.nbytes for o in catalog.objects.values()}
    request = Request(targets, world_size, objects, catalog.paths, files=_small_files(step, source))
    how: Options = {**options, "overwrite": True, "dry_run": is_dry_run, "resume": False}
    moved = transfer(
        TransferRequest(
            "thin",
            source,
            catalog,
            open_destination(step.path, options.get("storage_options")),
            dcp,
            request,
            how,
            left_out=gone,
            about={"thinned": sorted({*step.thinned, *gone})},
            in_place=True,
            prove=lambda _: _check_unchanged(step),
        )
    )
    stays = next((note for note in moved.notes if note.startswith(OLD_FILES_STAY)), "")
    return ThinnedStep(
        step.number,
        str(step.path),
        before - shared,  # the size of the new manifest is not known here
        sum(moved.files.values()),
        gone,
        stays,
    )


def _sizes_in(step: Step) -> object:
    """Returns what the result of a dry run depends on. Steps of one job differ in values only."""
    manifest = step.manifest
    if manifest is None or manifest.index is None:
        return None
    return (
        manifest.world_size,
        tuple(step.thinned),
        manifest.index[1].nbytes,
        tuple((name, t.dtype, t.shape, t.tied_to) for name, t in manifest.tensors.items()),
        tuple((name, o.nbytes) for name, o in manifest.objects.items()),
        tuple(file.nbytes for file in manifest.files.values()),
        shared_nbytes(step),
    )


def _check_unchanged(step: Step) -> None:
    """Makes sure that a step is still the one that was read: a job may have saved its number anew.

    Raises:
        StorageError: another save has taken its place.
    """
    if not is_there(step):
        raise StorageError(f"another save has taken its place: {printable(str(step.path))}")


def _kept_part(catalog: Catalog, drop: Sequence[str]) -> Catalog:
    """Returns what stays: by default the models, without optimizers and loaders.

    The values of a model are a part of it, such as the extra state of a module or the count of an
    average: a load asks for them.
    """
    if drop:
        is_dropped = matcher(drop)
        return keep(catalog, lambda fqn: not is_dropped(fqn))
    optimizers = find_optimizers(catalog)

    def is_of_a_model(fqn: str) -> bool:
        path = key_path(catalog, fqn)
        is_below = any(path[:depth] in optimizers for depth in range(1, len(path)))
        return not is_below and not is_other_state(path[0])

    models = keep(catalog, is_of_a_model)
    tops = {key_path(catalog, fqn)[0] for fqn in models.tensors}
    objects = {
        fqn: entry
        for fqn, entry in models.objects.items()
        if _EXTRA in (path := key_path(catalog, fqn)) or (len(path) > 1 and path[0] in tops)
    }
    return replace(models, objects=objects)


def _gone(before: Catalog, after: Catalog) -> dict[str, int]:
    """Returns what is gone, with the bytes; see `shortest_names`."""
    sizes = {fqn: t.nbytes for fqn, t in before.tensors.items() if fqn not in after.tensors}
    objects = {fqn: o.extent.nbytes for fqn, o in before.objects.items()}
    sizes |= {fqn: n for fqn, n in objects.items() if fqn not in after.objects}
    return shortest_names(before, sizes, (*after.tensors, *after.objects))


def _small_files(step: Step, source: Source) -> dict[str, bytes]:
    """Returns the small files that the save has put beside its data."""
    assert step.manifest is not None
    found = {}
    for name, sealed in step.manifest.files.items():
        if name not in source.catalog.file_sizes:
            if sealed.nbytes > _MAX_FILE_BYTES:
                raise PlanError(f"{printable(name)} is too long to be carried along")
            found[name] = read(source.store, name)
    return found
