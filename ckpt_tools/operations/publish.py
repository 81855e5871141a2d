"""Publishes versions of a model for inference engines: complete ones, and deltas."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Unpack, cast

from ckpt_tools.core.box import whole
from ckpt_tools.core.catalog import other_names
from ckpt_tools.core.plan import Literal, Slot, Target
from ckpt_tools.errors import (
    CheckpointError,
    IntegrityError,
    NotACheckpointError,
    PeerError,
    PlanError,
    StorageError,
    printable,
    redacted,
)
from ckpt_tools.formats import safetensors
from ckpt_tools.formats.base import Format, Request, is_note
from ckpt_tools.formats.deltas.chain import as_patched
from ckpt_tools.formats.deltas.layout import (
    ADLER32,
    CHECKSUMS,
    ENCODINGS,
    LAYOUTS,
    XOR,
    XXH3,
    DeltaIndex,
    Layout,
    Versions,
    index_text,
    versions_among,
)
from ckpt_tools.formats.registry import (
    Source,
    open_folder,
    open_source,
    open_version,
    versions_in,
)
from ckpt_tools.operations.arguments import checked
from ckpt_tools.operations.convert.convert import convert_source, prepare
from ckpt_tools.operations.convert.flat_shapes import check_needed, lay_beside
from ckpt_tools.operations.convert.options import Conversion, check_request
from ckpt_tools.operations.old_versions import remove_old
from ckpt_tools.publish.delta import DeltaCounts, DeltaDestination, DeltaJob
from ckpt_tools.publish.manifest import DELTA_FILES, Manifest
from ckpt_tools.publish.sealed_source import checked_manifest, open_sealed
from ckpt_tools.ranks.base import ALONE, Group
from ckpt_tools.storage import PinnedStore, Store, is_url, local_path, read, write_file
from ckpt_tools.transfer.options import Path_, Reading
from ckpt_tools.transfer.result import TransferResult
from ckpt_tools.transfer.transfer import TransferRequest, transfer

_CONFIG = "config.json"
_MAX_BESIDE_BYTES = 64 << 20  # longer files beside the model are not sealed with a delta
_SHOWN = 5
_FULL_EVERY = 20  # of a job: a version is read with all deltas below it
_WHY_COMPLETE = "it is complete, because the version before cannot be read"


class Publication(Reading, total=False):
    """How to publish.

    Attributes:
        base: the directory of the model's config and tokenizer. If nothing is published yet, it is
            version 0, which the engines have, and the first version is a delta.
        dry_run: only plan, and write nothing.
        full: publish a complete version.
        full_every: publish a complete version after so many deltas.
        keep_last: then remove versions that the newest so many do not need. If it is absent, all
            stay.
        layout: of the versions, for the receivers of "slime" or of "skyrl". If it is absent, that
            of the versions that are there, or "slime".
        encoding: of a delta: one of `ENCODINGS`, "xor" if absent.
        checksum: of a delta's tensors: one of `CHECKSUMS`, "xxh3-128" if absent.
        dtype, keep_dtype, names, partial, rename, key_map, settings: as for `convert`.
    """

    base: Path_ | None
    dry_run: bool
    full: bool
    full_every: int | None
    keep_last: int | None
    layout: str | None
    encoding: str | None
    checksum: str | None
    dtype: Any
    keep_dtype: Sequence[str]
    names: str | None
    partial: bool
    rename: Sequence[str]
    key_map: Path_ | None
    settings: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class PublishResult:
    """A published version, or with `dry_run`, the plan of one.

    Attributes:
        source, destination: paths or URLs.
        version: its number.
        base_version: the version that a delta changes; None for a complete version.
        num_tensors, nbytes: of the model.
        num_changed, changed_nbytes: tensors and bytes that a delta changes.
        written_nbytes: of the files of this version.
        notes: remarks.
        seconds: wall-clock time.
        is_dry_run: whether nothing was written.
        removed: the numbers of old versions that `keep_last` has removed.
    """

    source: str
    destination: str
    version: int
    base_version: int | None
    num_tensors: int
    nbytes: int
    num_changed: int | None
    changed_nbytes: int | None
    written_nbytes: int | None
    notes: Sequence[str] = ()
    seconds: float = 0.0
    is_dry_run: bool = False
    removed: Sequence[int] = ()


@checked(Publication)
def publish_version(src: Path_, root: Path_, **how: Unpack[Publication]) -> PublishResult:
    """Publishes a model as the next version, for inference engines to pull.

    The first version is complete, or with `base` a delta against that model. Later versions are
    deltas against the version before, unless `full` is set.

    Args:
        src: a checkpoint of any format, with the model as `convert --to hf` takes it.
        root: the directory of the versions; a path or a URL.
        **how: see `Publication`.

    Raises:
        PlanError: the model is not that of the version before; the message lists what differs.
        CheckpointError: see the tree in `errors`. Then no version was added.
    """
    if (how.get("group") or ALONE).size > 1:
        raise PlanError(
            "one process publishes a version of a checkpoint",
            hint="run it without torchrun; a Publisher publishes the model of a job",
        )
    began = time.monotonic()
    result = _publish(src, _versions_before(root, how, ALONE), how, began)
    keep_last = how.get("keep_last")
    if keep_last is None:
        return result
    if result.is_dry_run:
        return replace(result, notes=[*result.notes, "a dry run looks at no old versions"])
    return without_old(result, root, keep_last, how.get("storage_options"))


def without_old(
    result: PublishResult, root: Path_, keep_last: int, options: Mapping[str, Any] | None
) -> PublishResult:
    """Removes the versions that the newest `keep_last` do not need.

    Returns:
        The result, with these versions, and with a note if they could not be removed: the new
        version is published in any case.
    """
    removed: Sequence[int] = ()
    try:
        removed, notes = remove_old(local_path(root).rstrip("/"), keep_last, options)
    except CheckpointError as error:
        notes = [f"old versions stay: {printable(str(error))}"]
    return replace(result, removed=removed, notes=[*result.notes, *notes])


def publish_part(
    source: Source, root: Path_, how: Publication, job: DeltaJob, needs_chain: bool
) -> PublishResult:
    """Publishes the model in the memory of a job's ranks. All ranks call it.

    Args:
        source: the model. This rank can read its own part.
        root, how: as for `publish_version`; but `keep_last` is left to the caller.
        job: the ranks. Its baseline is that of the new version afterwards.
        needs_chain: raise if the version before cannot be read, or is damaged. Else a complete
            version is published, with a note.

    Raises:
        CheckpointError: as for `publish_version`. Then no version was added.
    """
    how = {**how, "group": job.group}
    began = time.monotonic()
    versions = _versions_before(root, how, job.group)
    may_begin_anew = versions.layout.has_complete and not needs_chain
    try:
        return _publish(source, versions, how, began, job, may_begin_anew)
    except BaseException as error:
        if job.baseline is not None:
            job.baseline.forget()
        if not may_begin_anew or how.get("full") or not _is_damage(error, job.group):
            raise
        damage = str(error)
    result = _publish(source, versions, {**how, "full": True}, began, job)
    return replace(result, notes=[*result.notes, f"{_WHY_COMPLETE}: {damage}"])


def _is_damage(error: BaseException, group: Group) -> bool:
    """Tells whether a version failed on any rank because those before it are damaged.

    All ranks call it, each with its own error.
    """
    if not isinstance(error, Exception):
        return False
    try:
        return any(group.all_gather(isinstance(error, IntegrityError), "tell what has failed"))
    except PeerError:  # nothing can be exchanged any more
        return False


def _versions_before(root: Path_, how: Publication, group: Group) -> Versions:
    """Returns the versions that are there, with the layout of the next one. All ranks call it."""
    check_publication(how)
    url, options = local_path(root).rstrip("/"), how.get("storage_options")
    versions = versions_among((), url)
    with group.phase("look at the versions"):
        if group.rank == 0:
            _refuse_model(url, options)
            versions = _with_layout(versions_in(url, options), how)
            _refuse_leftover(versions.path(versions.newest + 1))
    return group.broadcast(versions, "look at the versions")


def _publish(
    src: Path_ | Source,
    versions: Versions,
    how: Publication,
    began: float,
    job: DeltaJob | None = None,
    may_begin_anew: bool = False,
) -> PublishResult:
    group = ALONE if job is None else job.group
    options, base = how.get("storage_options"), how.get("base")
    number, is_full = versions.newest + 1, bool(how.get("full"))
    to, may_begin_anew = versions.path(number), may_begin_anew or is_full
    old, sealed, problem = _look_before(versions, base, options, group, may_begin_anew)
    with ExitStack() as stack:
        if old is not None:
            stack.callback(old.store.close)
        with group.phase("open the model"):
            conversion = _conversion(how, src, old, to, stack)
            if isinstance(src, Source):
                source = src
            else:
                source, _ = open_sealed(src, options, lay_beside(how.get("shapes")))
                check_needed(how.get("shapes"), source.catalog)
        how = _with_defaults(how, versions.layout, job)
        is_due = is_full or _num_deltas(old) >= (how.get("full_every") or math.inf)
        if not is_due and old is not None:
            return _publish_delta(
                source, old, sealed, versions, number, how, conversion, began, job
            )
        about = {"version": number}
        result = convert_source(source, to, "hf", conversion, "publish", about=about)
        if problem and not is_full:
            result = replace(result, notes=(*result.notes, f"{_WHY_COMPLETE}: {problem}"))
        return _result_of(result, number, None, None, began)


def _refuse_leftover(path: str) -> None:
    """Refuses to publish where another program has left a part of the next version on a disk."""
    if not is_url(path) and os.path.lexists(path):
        raise StorageError(
            f"the next version is there, and is not whole: {printable(path)}",
            hint="another publisher has left it, or is at work: wait, or move it away",
        )


def _with_layout(there: Versions, how: Publication) -> Versions:
    """Returns the versions, with the layout that was asked for if there are none.

    Raises:
        PlanError: the versions have another one; or its receivers do not take what is asked for.
    """
    name = how.get("layout")
    layout = there.layout if name is None else LAYOUTS[name]
    if there.numbers and layout != there.layout:
        raise PlanError(
            f"--layout {name}: the versions in {printable(there.url)} are those of"
            f" {there.layout.name}",
            hint="publish to another directory, or leave --layout out",
        )
    check_layout(layout, how, has_versions=bool(there.numbers))
    return there._replace(layout=layout)


def check_layout(layout: Layout, how: Publication, has_versions: bool) -> None:
    """Refuses what the receivers of a layout do not take.

    Raises:
        PlanError: with the option.
    """
    for key, known in (("encoding", layout.encodings), ("checksum", layout.checksums)):
        if (value := how.get(key)) is not None and value not in known:
            raise PlanError(
                f"--{key} {value}: receivers of {layout.name} take {' or '.join(known)}"
            )
    if layout.has_complete:
        return
    for key in ("full", "full_every"):
        if how.get(key):
            option = f"--{key.replace('_', '-')}"
            raise PlanError(
                f"{option}: receivers of {layout.name} take no complete versions",
                hint="begin anew in another directory, with the model as --base",
            )
    if not has_versions and how.get("base") is None:
        raise PlanError(
            f"receivers of {layout.name} take deltas alone, and there is nothing to change",
            hint="give the model that the engines have with --base DIR",
        )


def _with_defaults(how: Publication, layout: Layout, job: DeltaJob | None) -> Publication:
    """Returns how to publish, with the defaults of a checkpoint or of a job."""
    checksum = XXH3 if job is None or ADLER32 not in layout.checksums else ADLER32
    every = _FULL_EVERY if job is not None and layout.has_complete else None
    return {
        **how,
        "checksum": how.get("checksum") or checksum,
        "full_every": how.get("full_every") or every,
    }


def _look_before(
    versions: Versions,
    base: Path_ | None,
    options: Mapping[str, Any] | None,
    group: Group,
    may_begin_anew: bool,
) -> tuple[Source | None, Manifest | None, str]:
    """Opens the version before, on all ranks.

    Returns:
        The version, its manifest, and why it cannot be read. Then there is neither.

    Raises:
        CheckpointError: it cannot be read, and no complete version may be published instead.
    """
    old = sealed = own = None
    try:
        old = _open_before(versions, base, options)
        sealed = None if old is None else checked_manifest(old)
    except CheckpointError as error:
        own = error
    told = group.all_gather("" if own is None else str(own), "open the version before")
    problem = next(filter(None, told), "")
    if not problem:
        return old, sealed, ""
    if old is not None:
        old.store.close()
    if not may_begin_anew:
        raise own or PlanError(
            f"another rank cannot read the version before: {problem}",
            hint="every rank must see the same files under ROOT",
        )
    return None, None, problem


def _open_before(
    versions: Versions, base: Path_ | None, options: Mapping[str, Any] | None
) -> Source | None:
    """Opens the version before; None for none. `base` also tells where version 0 lies now."""
    if versions.newest:
        where = "" if base is None else local_path(base)
        return open_version(versions.path(versions.newest), options, where, None)
    return None if base is None else open_source(base, options)


def _refuse_model(url: str, options: Mapping[str, Any] | None) -> None:
    """Refuses a directory that is a checkpoint itself: versions would lie in a model."""
    with suppress(NotACheckpointError):
        folder = open_folder(url, options)
        if safetensors.recognise(folder.list_files()):
            raise PlanError(
                f"versions are published to a directory of their own: {printable(url)} is a model",
                hint="give another ROOT; the model's directory is for --base",
            )


def check_publication(how: Publication) -> None:
    """Refuses values that no publication takes.

    Raises:
        PlanError: with the option.
    """
    for key, known in (("layout", LAYOUTS), ("encoding", ENCODINGS), ("checksum", CHECKSUMS)):
        if (value := how.get(key)) is not None and value not in known:
            raise PlanError(
                f"--{key}: expected one of {', '.join(known)}, got {printable(str(value))!r}"
            )
    for key in ("full_every", "keep_last"):
        if (number := how.get(key)) is not None and (type(number) is not int or number < 1):
            raise PlanError(f"{key}: expected a number from 1 on, got {printable(repr(number))}")


def _conversion(
    how: Publication, src: Path_ | Source, old: Source | None, to: str, stack: ExitStack
) -> Conversion:
    """Returns how the model is converted. The config comes from `base`, a version, or the source.

    `stack` removes the copies of small files that come from a bucket.
    """
    given = {k: v for k, v in how.items() if k in Conversion.__annotations__ and v is not None}
    base, options = how.get("base"), how.get("storage_options")
    if base is None:
        with suppress(CheckpointError):
            folder = (
                old.folder
                if old is not None
                else src.folder
                if isinstance(src, Source)
                else open_folder(local_path(src), options)
            )
            given |= {"base": _local(folder, stack)} if _CONFIG in folder.list_files() else {}
    elif is_url(local_path(base)):
        given["base"] = _local(open_folder(local_path(base), options), stack)
    found = cast(Conversion, given)
    check_request("hf", to, found)
    return found


def _num_deltas(old: Source | None) -> int:
    """Returns how many deltas a version is above a complete one."""
    patched = None if old is None else as_patched(old.folder)
    return 0 if patched is None else len(patched.layers)


def _local(folder: Store, stack: ExitStack) -> str:
    """Returns a local directory with the files of a model beside its weights."""
    patched = as_patched(folder)
    url = folder.url if patched is None else patched.complete_url
    if not is_url(url):
        return url
    there = stack.enter_context(TemporaryDirectory(prefix="ckpt-"))
    copies = stack.enter_context(closing(PinnedStore(Path(there))))
    for name, nbytes in folder.list_files().items():
        if nbytes <= _MAX_BESIDE_BYTES and not name.endswith((safetensors.SUFFIX, ".index.json")):
            write_file(copies, name, read(folder, name))
    return there


def _publish_delta(
    source: Source,
    old: Source,
    sealed: Manifest | None,
    versions: Versions,
    number: int,
    how: Publication,
    conversion: Conversion,
    began: float,
    job: DeltaJob | None,
) -> PublishResult:
    to = versions.path(number)
    with (ALONE if job is None else job.group).phase(f"plan version {number}"):
        request, parts, _ = prepare(
            source, to, "hf", conversion, "publish", about={"version": number, "base": number - 1}
        )
        tied = _only_tied(request, old)
        if tied:
            kept = [tensor for tensor in request.layout.tensors if tensor.fqn not in tied]
            request = replace(request, layout=replace(request.layout, tensors=kept))
            pairs = ", ".join(f"{printable(name)} ({printable(to)})" for name, to in tied.items())
            parts.notes.append(
                f"other names of tensors are left out, as in the version before: {pairs}"
            )
        _compare(request.layout, old)
        said = ""
        if number == 1:
            base = str(how.get("base"))
            said = base if is_url(base) else os.path.realpath(local_path(base))
        index = DeltaIndex(
            number,
            number - 1,
            how.get("encoding") or XOR,
            how.get("checksum") or XXH3,
            {},
            said,
        )
        was = {} if sealed is None else sealed.tensors
        place = DeltaDestination(request.dst, old, was, index, versions.layout, job)
        form = _AsBefore(old)
    layout = replace(request.layout, files={}, aliases={})
    baseline = None if job is None else job.baseline
    if baseline is not None:
        baseline.begin("" if sealed is None else sealed.attempt)
    attempts, about = list[str](), dict(request.about)

    def prove(group: Group) -> None:
        if request.prove is not None:
            request.prove(group)
        attempts.append(place.finish(group))
        about[DELTA_FILES] = place.sealed_files

    wanted = replace(
        request, dst=place, format=cast(Format, form), layout=layout, prove=prove, about=about
    )
    result = transfer(wanted)
    if baseline is not None:
        baseline.advance(attempts[-1])
    if form.unsealed:
        names = printable(", ".join(form.unsealed[:_SHOWN]))
        parts.notes.append(f"too long to be sealed with a delta: {names}")
    result = replace(result, notes=(*result.notes, *parts.notes))
    return _result_of(result, number, number - 1, place.counts, began)


class _AsBefore:
    """The files of the version before, as a format: names, headers and positions stay."""

    NAME = safetensors.NAME

    def __init__(self, old: Source) -> None:
        """Reads the headers, the index, and the small files beside them."""
        self._tensors = old.catalog.tensors
        store = old.store
        data = sorted(old.catalog.file_sizes)
        ends = dict.fromkeys(data, 0)
        for entry in self._tensors.values():
            extent = entry.chunks[0].extent
            ends[extent.file] = min(ends[extent.file] or extent.start, extent.start)
        sizes = {name: store.size(name) for name in data}
        self._literals = [
            Literal(name, 0, read(store, name, 0, ends[name] or sizes[name])) for name in data
        ]
        self.unsealed: list[str] = []
        for name, nbytes in store.list_files().items():
            if name in sizes or name == safetensors.INDEX or is_note(name) or name.startswith("."):
                continue
            if nbytes > _MAX_BESIDE_BYTES:
                self.unsealed.append(name)
                continue
            sizes[name] = nbytes
            self._literals.append(Literal(name, 0, read(store, name)))
        self._sizes = sizes
        self._index = Literal(safetensors.INDEX, 0, index_text(store, old.catalog))

    def lay_out(self, request: Request) -> Target:
        """Lays out the same files, whatever is asked for: the tensors are the same."""
        slots = {}
        for tensor in request.tensors:
            extent = self._tensors[tensor.fqn].chunks[0].extent
            slots[tensor.fqn] = (Slot(whole(tensor.shape), extent.file, extent.start),)
        return Target(self.NAME, self._sizes, slots, tuple(self._literals), index=self._index)


def _only_tied(request: TransferRequest, old: Source) -> dict[str, str]:
    """Returns the tensors of a model that the version before has under another name, with it."""
    same = other_names(request.catalog)
    pairs = [*same.items(), *((other, name) for name, other in same.items())]
    there = old.catalog.tensors
    wanted = {tensor.fqn for tensor in request.layout.tensors}
    return {
        name: other
        for name, other in pairs
        if name in wanted and name not in there and other in there and other in wanted
    }


def _compare(layout: Request, old: Source) -> None:
    """Refuses a model that has other tensors than the version before.

    Raises:
        PlanError: names, types or shapes differ.
    """
    new = {t.fqn: (t.dtype.name, tuple(t.shape)) for t in layout.tensors}
    was = {n: (t.dtype.name, tuple(t.shape)) for n, t in old.catalog.tensors.items()}
    parted = [n for n, t in old.catalog.tensors.items() if len(t.chunks) != 1]
    if parted:
        raise PlanError(
            f"the version before stores tensors in parts: {printable(parted[0])!r}",
            hint="publish a complete version: --full",
        )
    if new == was:
        return
    types = {(new[n][0], was[n][0]) for n in new.keys() & was.keys() if new[n][0] != was[n][0]}
    problems = [
        *(f"only in the source: {printable(n)!r}" for n in new.keys() - was.keys()),
        *(f"only in the version before: {printable(n)!r}" for n in was.keys() - new.keys()),
        *(
            f"{printable(n)!r}: {new[n][0]} {list(new[n][1])}, before {was[n][0]} {list(was[n][1])}"
            for n in new.keys() & was.keys()
            if new[n] != was[n]
        ),
    ]
    shown = "\n".join(f"  {line}" for line in sorted(problems)[:_SHOWN])
    more = f"\n  and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
    hint = "give the model's config with --base DIR; or publish a complete version: --full"
    if len(types) == 1 and new.keys() == was.keys():
        (_, name) = types.pop()
        hint = f"--dtype {name} writes the type of the version before; or --full"
        if len({kind for kind, _ in was.values() if "float" in kind}) > 1:
            hint = (
                "the version before has several types: leave --dtype out, or keep the types of some"
                " tensors with --keep-dtype GLOB; or --full"
            )
    raise PlanError(
        f"the model is not that of the version before ({printable(old.path)}):\n{shown}{more}",
        hint=hint,
    )


def _result_of(
    result: TransferResult,
    number: int,
    base: int | None,
    counts: DeltaCounts | None,
    began: float,
) -> PublishResult:
    is_delta = counts is not None and not result.is_dry_run
    written = None if counts is not None or result.is_dry_run else result.written_nbytes
    return PublishResult(
        result.source,
        redacted(result.destination),
        number,
        base,
        result.num_tensors,
        sum(result.bytes_by_dtype.values()),
        counts.num_changed if counts is not None and is_delta else None,
        counts.changed_nbytes if counts is not None and is_delta else None,
        counts.written_nbytes if counts is not None and is_delta else written,
        result.notes,
        time.monotonic() - began,
        result.is_dry_run,
    )
