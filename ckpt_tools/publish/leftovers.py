"""Removes unfinished work of dead jobs from an object store."""

from __future__ import annotations

import datetime as dt
from collections.abc import Container, Iterator, Mapping
from typing import Any

from ckpt_tools.core.logs import log
from ckpt_tools.errors import StorageError, printable
from ckpt_tools.formats.base import LOCK, UPLOADS, note_of
from ckpt_tools.formats.registry import INDEXES, is_ours
from ckpt_tools.publish.run_root import Leftover
from ckpt_tools.storage import RemoteStore
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
    objects = [
        name
        for folder, step in store.enter_all().items()
        for name in _unfinished(step, folder, before)
    ]
    objects += _abandoned_notes(store, before)
    if not dry_run:
        store.remove(objects)
    return [Leftover(f"{store.url}/{name}", "object") for name in objects] + _uploads(
        store.s3, store, before, dry_run
    )


def _unfinished(step: RemoteStore, folder: str, before: dt.datetime) -> list[str]:
    """Returns the objects of attempts in one prefix that never got an index, and have been silent
    for long.
    """
    files = step.list_files()
    ours = [name for name in files if is_ours(name) or name == LOCK]
    if any(name in INDEXES for name in files) or any(
        step.modified(name) is None or step.modified(name) > before for name in ours
    ):
        return []
    return [f"{folder}/{name}" for name, about in step.about_all(ours).items() if about.is_marked]


def _abandoned_notes(store: RemoteStore, before: dt.datetime) -> list[str]:
    """Returns the notes that single files' attempts left in a prefix, and that nobody has touched
    for long.
    """
    notes = [n for n in store.list_files() if (note := note_of(n)) and note[0] == UPLOADS]
    old = [n for n in notes if (when := store.modified(n)) is not None and when <= before]
    return [n for n, about in store.about_all(old).items() if about.is_marked]


def _uploads(s3: S3, store: RemoteStore, before: dt.datetime, dry_run: bool) -> list[Leftover]:
    """Gives up uploads below a prefix that were begun long ago and never ended: they cost money and
    nobody sees them.
    """
    found: list[Leftover] = []
    for upload in _list_uploads(s3, store):
        if upload["Initiated"] < before and is_ours(upload["Key"].rpartition("/")[2]):
            found.append(
                Leftover(
                    f"{store.url.split('://')[0]}://{upload['Bucket']}/{upload['Key']}", "upload"
                )
            )
            if not dry_run:
                _give_up(s3, store, upload)
    return found


def give_up_uploads(store: RemoteStore, names: Container[str]) -> None:
    """Gives up all unfinished uploads of some files in a prefix that this process alone writes
    to.
    """
    if store.s3 is None:
        return
    top = len(store.s3.at_prefix(store.root)["Prefix"])
    for upload in _list_uploads(store.s3, store):
        if upload["Key"][top:] in names:
            _give_up(store.s3, store, upload)


def _list_uploads(s3: S3, store: RemoteStore) -> Iterator[Mapping[str, Any]]:
    """Yields the unfinished uploads below a prefix; none where the store does not let this job list
    them, which is logged.
    """
    marker: dict[str, str] = {}
    where, seen = s3.at_prefix(store.root), set[str]()
    while True:
        try:
            page = s3.call("list uploads", store.url, "list_multipart_uploads", **where, **marker)
        except StorageError as error:
            log.warning(
                "unfinished uploads of dead jobs below %s are not removed: %s; this needs"
                " s3:ListBucketMultipartUploads",
                printable(store.url),
                error,
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
    target = {key: upload[key] for key in ("Bucket", "Key", "UploadId")}
    s3.call("give up", store.url, "abort_multipart_upload", missing={}, **target)
