"""Removes unfinished work of dead jobs from an object store."""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Collection, Container, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from ckpt_tools.core.logs import log
from ckpt_tools.errors import StorageError, printable
from ckpt_tools.formats.base import (
    LOCK,
    MANIFEST,
    UPLOADS,
    attempt_of,
    is_note,
    note_of,
    short_name,
)
from ckpt_tools.formats.dcp.format import is_data_file, is_rank_metadata
from ckpt_tools.formats.deltas.layout import named_version
from ckpt_tools.formats.registry import INDEXES, is_ours
from ckpt_tools.publish.base import Leftover
from ckpt_tools.publish.bucket.lease import is_leased
from ckpt_tools.publish.find_manifest import find_manifest
from ckpt_tools.publish.manifest import of_other_attempts
from ckpt_tools.publish.step_names import is_step_name
from ckpt_tools.storage import RemoteStore, read
from ckpt_tools.storage.base import MAX_NOTE_BYTES
from ckpt_tools.storage.s3.client import S3, next_page


def remove_abandoned(store: RemoteStore, grace_s: float, dry_run: bool) -> list[Leftover]:
    """Removes the unfinished work below a run's prefix. See `RunRoot.remove_leftovers`.

    Only S3 tells its time, so nothing is removed from other stores.
    """
    if store.s3 is None:
        return []
    now = store.now()
    assert now is not None
    before = now - dt.timedelta(seconds=grace_s)
    folders = store.enter_all()
    noted = {upload for place in (store, *folders.values()) for upload in _noted_uploads(place)}
    removed, unknown = list[Leftover](), list[Leftover]()
    uploads = [*_list_uploads(store.s3, store)]
    top = len(store.s3.at_prefix(store.root)["Prefix"])
    busy = {u["Key"][top:].rpartition("/")[0] for u in uploads if _is_active(store, u, before)}
    busy |= {name for name, step in folders.items() if _is_held(step)}  # by a copy
    for folder, step in folders.items():
        if folder in busy:
            continue  # another rank of the same attempt still sends
        try:
            sizes, found = step.list_files(), _unfinished(step, before)
            if found and not dry_run:
                # a copy may have continued the work since the listing, and committed it
                found = found & _unfinished(step.fresh(), before)
                step.remove(sorted(found))
        except StorageError as error:  # the others do not depend on it
            unknown.append(Leftover(step.url, "folder", str(error)))
            continue
        removed += [Leftover(f"{step.url}/{n}", "object", nbytes=sizes[n]) for n in sorted(found)]
    notes, sizes = _abandoned_notes(store, before), store.list_files()
    if not dry_run:
        store.remove(notes)
    removed += [Leftover(f"{store.url}/{name}", "object", nbytes=sizes[name]) for name in notes]
    old = [
        u
        for u in uploads
        if u["Key"][top:].rpartition("/")[0] not in busy and not _is_active(store, u, before)
    ]
    return removed + unknown + _uploads(store.s3, store, old, dry_run, noted)


def _is_held(step: RemoteStore) -> bool:
    """Tells whether a live copy holds a folder, or may hold it."""
    try:
        return LOCK in step.list_files() and is_leased(step)
    except StorageError as error:
        log.warning("%s may be in use, and stays: %s", printable(step.url), error)
        return True


def _is_active(store: RemoteStore, upload: Mapping[str, Any], before: dt.datetime) -> bool:
    """Tells whether an upload has begun, or a part of it has arrived, since some time.

    A large file takes longer than any grace, and some servers do not tell when an upload began. If
    its parts cannot be listed, it counts as active.
    """
    if upload["Initiated"] >= before:
        return True
    assert store.s3 is not None
    where = {key: upload[key] for key in ("Bucket", "Key", "UploadId")}
    marker: dict[str, Any] = {}
    while True:
        try:
            page = store.s3.call(
                "list parts", store.url, "list_parts", missing={}, **where, **marker
            )
        except StorageError as error:
            log.warning("an upload may be in use, and stays: %s", error)
            return True
        if any(part["LastModified"] >= before for part in page.get("Parts") or ()):
            return True
        following = page.get("NextPartNumberMarker")
        if not page.get("IsTruncated") or marker.get("PartNumberMarker") == following:
            return False
        marker = {"PartNumberMarker": following}


def _unfinished(step: RemoteStore, before: dt.datetime) -> set[str]:
    """Returns the old objects of attempts that have no index, in one folder of a run."""
    files = step.list_files()
    if has_index(files):  # before anything is asked about a single object
        return _replaced(step, files, before)
    left = {
        *files_of_attempts(step, files),
        *files_of_copies(step, files),
        *({LOCK} & files.keys()),
    }
    is_held = LOCK in files and is_leased(step)  # by a copy
    if is_held or any(step.modified(name) is None or step.modified(name) > before for name in left):
        return set()
    return {name for name, about in step.object_infos(left).items() if about.is_marked}


def _replaced(step: RemoteStore, files: Collection[str], before: dt.datetime) -> set[str]:
    """Returns the objects beside a complete step that no attempt can commit any more.

    An attempt that was killed has left them: that of another one, which it replaced, or its own.
    They are old; or the attempt's manifest is older than the index, so that the index is not its
    own, and the store would refuse another one.
    """
    if len({_id_of(name) for name in files} - {""}) < 2:
        return set()  # all is of one attempt, and no manifest needs to be read
    manifest = find_manifest(step)
    if manifest is None or manifest.index is None:
        return set()
    # a delta has the manifest of a complete version, and perhaps another index
    index = next((n for n in (manifest.index[0], *INDEXES) if n in files), None)
    if index is None:
        return set()
    appeared = step.modified(index)
    attempts: dict[str, list[str]] = {}
    for name in of_other_attempts(manifest, files):
        attempts.setdefault(_id_of(name), []).append(name)
    left = [
        name
        for names in attempts.values()
        if max(map(step.modified, names)) <= before
        or any(note_of(name) and step.modified(name) < appeared for name in names)
        for name in names
    ]
    return {
        name
        for name, info in step.object_infos(left).items()
        if info.is_marked and attempt_of(name) in ("", info.owner[:8])
    }


def _id_of(name: str) -> str:
    """Returns the id of the attempt in the name of a data file or a manifest; "" for none."""
    note = note_of(name)
    is_manifest = note is not None and note[0] == MANIFEST
    return name.split(".")[-2] if is_manifest else attempt_of(name)


def has_index(files: Iterable[str]) -> bool:
    """Tells whether files are a checkpoint by their names: no attempt has left them so."""
    return any(name in INDEXES or is_rank_metadata(name) for name in files)


def files_of_attempts(store: RemoteStore, files: Collection[str]) -> set[str]:
    """Returns the files that attempts at a checkpoint have written into a prefix.

    The caller makes sure that no index refers to them. A file that `merge` or `convert` wrote needs
    no index, and is never among them. A name alone proves nothing, because a date looks like the id
    of an attempt: the object must carry the same id.

    Args:
        store: the prefix. If it keeps no metadata of objects, names have to do.
        files: names in the prefix.
    """
    named = {name: attempt for name in files if (attempt := attempt_of(name))}
    notes = {name for name in files if is_note(name)}
    if store.s3 is None:
        return notes | named.keys()
    infos = store.object_infos(named)
    own = {n for n, attempt in named.items() if infos[n].owner[:8] == attempt}
    if own and not has_index(files):
        # a save may have written small files of other names
        attempts = {named[name] for name in own}
        small = [n for n in files if n not in named and not is_ours(n) and n != LOCK]
        own |= {n for n, info in store.object_infos(small).items() if info.owner[:8] in attempts}
    return notes | own


def files_of_copies(store: RemoteStore, files: Collection[str]) -> set[str]:
    """Returns the data files that interrupted copies of steps have written into a prefix.

    They have no id in their names. The caller makes sure that no index refers to them.
    """
    if store.s3 is None:
        return set()
    infos = store.object_infos(name for name in files if is_data_file(name))
    return {name for name, info in infos.items() if info.is_marked}


def _abandoned_notes(store: RemoteStore, before: dt.datetime) -> list[str]:
    """Returns old notes on uploads that attempts at single files left in a prefix."""
    notes = [n for n in store.list_files() if (note := note_of(n)) and note[0] == UPLOADS]
    old = [n for n in notes if (when := store.modified(n)) is not None and when <= before]
    return [n for n, about in store.object_infos(old).items() if about.is_marked]


def _noted_uploads(store: RemoteStore) -> list[str]:
    """Returns the ids of uploads that attempts in a prefix have noted for `--resume`."""
    found: list[str] = []
    notes = [n for n in store.list_files() if (note := note_of(n)) and note[0] == UPLOADS]
    for name, about in store.object_infos(notes).items():
        # an object without the mark may be anybody's
        if about.is_marked and store.size(name) <= MAX_NOTE_BYTES:
            with suppress(
                ValueError, TypeError, KeyError, AttributeError, RecursionError, StorageError
            ):
                uploads = json.loads(read(store, name))["uploads"]
                found += [str(upload_id) for upload_id, _ in uploads.values()]
    return found


def _uploads(
    s3: S3,
    store: RemoteStore,
    uploads: Iterable[Mapping[str, Any]],
    dry_run: bool,
    noted: Container[str],
) -> list[Leftover]:
    """Ends those of some old uploads that attempts have left. They cost money, unseen.

    A listing does not tell who began an upload. So an attempt must have noted its id, or its name
    must be one that only this tool uses: that of a step's data file, or of a result that is there.
    """
    found: list[Leftover] = []
    top = len(s3.at_prefix(store.root)["Prefix"])
    results = {note[1] for name in store.list_files() if (note := note_of(name)) and note[1]}
    for upload in uploads:
        path = upload["Key"][top:]
        is_own = upload["UploadId"] in noted or short_name(path) in results or _is_of_attempt(path)
        if is_own:
            found.append(
                Leftover(
                    f"{store.url.split('://')[0]}://{upload['Bucket']}/{upload['Key']}", "upload"
                )
            )
            if not dry_run:
                _give_up(s3, store, upload)
    return found


def _is_of_attempt(path: str) -> bool:
    """Tells whether a path is that of a data file of a step, a named save, or a version."""
    folder, _, name = path.rpartition("/")
    has_id = bool(attempt_of(name))
    if is_step_name(folder):
        return has_id or is_data_file(name)
    if named_version(folder):
        return has_id
    return "/" not in folder and has_id and is_data_file(name)


def give_up_uploads(store: RemoteStore, names: Container[str]) -> None:
    """Ends all unfinished uploads of some files in a prefix that only this process may write."""
    if store.s3 is None:
        return
    top = len(store.s3.at_prefix(store.root)["Prefix"])
    for upload in _list_uploads(store.s3, store):
        if upload["Key"][top:] in names:
            _give_up(store.s3, store, upload)


def _list_uploads(s3: S3, store: RemoteStore) -> Iterator[Mapping[str, Any]]:
    """Yields the unfinished uploads below a prefix.

    If the store does not let this job list them, it logs that and yields nothing.
    """
    marker: dict[str, str] = {}
    where, seen = s3.at_prefix(store.root), set[str]()
    while True:
        try:
            page = s3.call("list uploads", store.url, "list_multipart_uploads", **where, **marker)
        except StorageError as error:
            is_forbidden = "denied" in str(error).lower() or "forbidden" in str(error).lower()
            log.warning(
                "unfinished uploads of dead jobs below %s are not removed: %s%s",
                printable(store.url),
                error,
                "; this needs s3:ListBucketMultipartUploads" if is_forbidden else "",
            )
            return
        for upload in page.get("Uploads") or ():
            if not upload["Key"].startswith(where["Prefix"]):
                raise StorageError(
                    f"a listing names what was not asked for: {printable(upload['Key'])}"
                    f" ({printable(store.url)})"
                )
            yield {**upload, "Bucket": where["Bucket"]}
        if not page.get("IsTruncated"):
            return
        key, upload_id = next_page(page, ("NextKeyMarker", "NextUploadIdMarker"), seen, store.url)
        marker = {"KeyMarker": key, "UploadIdMarker": upload_id}


def _give_up(s3: S3, store: RemoteStore, upload: Mapping[str, Any]) -> None:
    store.check_writable()
    target = {key: upload[key] for key in ("Bucket", "Key", "UploadId")}
    s3.call("give up", store.url, "abort_multipart_upload", missing={}, **target)
