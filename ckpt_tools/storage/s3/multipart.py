"""Writes objects to S3. Nothing is visible before the last step.

A file is a multipart upload, or one PUT if it is small. Parts are sent in parallel while the next
ones fill. The server compares checksums.
"""

from __future__ import annotations

import asyncio
import threading
import uuid
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ckpt_tools.core import ending
from ckpt_tools.core.checksum import crc64nvme, hex64, join_crc64
from ckpt_tools.core.logs import log
from ckpt_tools.errors import IntegrityError, StorageError, printable
from ckpt_tools.storage.retries import (
    ATTEMPTS,
    appeared,
    delay,
    failure,
    may_pass,
    pause,
    retry,
    status,
)
from ckpt_tools.storage.s3.client import S3, encoded, stored_crc64
from ckpt_tools.storage.s3.open_uploads import OpenUpload, SentPart
from ckpt_tools.storage.s3.parts import part_starts

MARK, CLAIM, OWNER = "ckpt-upload", "ckpt-crc64nvme", "ckpt-attempt"
_CONFLICT, _EXISTS = 409, 412
_COPY_WEIGHT = 4 << 20  # counted bytes in flight of a copy, which allow 16 copies at the same time


class _Part:
    """A part that is being filled."""

    def __init__(self, nbytes: int) -> None:
        self.data, self.left = bytearray(nbytes), nbytes


@dataclass(frozen=True, slots=True)
class UploadOptions:
    """Options of a new object.

    Attributes:
        starts: the starts of its parts, if not those of `part_starts`.
        is_held: `finish` leaves the last step to `complete`.
        is_exclusive: create the object only if there is none of that name. Some stores cannot check
            this.
        replaces: replace only the object with this ETag.
        crc64: CRC-64/NVME of the whole object, if known in advance. It is stored in the object's
            metadata.
        owner: id of the attempt, stored in the object's metadata.
        mine: the byte range whose parts this process sends, if several processes share the upload.
        upload_id: id of the upload, if another process begins and completes it.
        begun: an open upload to continue. If this try fails, the upload stays open for the next
            one.
    """

    starts: Sequence[int] | None = None
    is_held: bool = False
    is_exclusive: bool = False
    replaces: str = ""
    crc64: int | None = None
    owner: str = ""
    mine: tuple[int, int] | None = None
    upload_id: str = ""
    begun: OpenUpload | None = None

    @property
    def notes(self) -> dict[str, str]:
        """Returns the metadata of the object."""
        claim = {} if self.crc64 is None else {CLAIM: hex64(self.crc64)}
        return {
            MARK: self.begun.mark if self.begun else uuid.uuid4().hex,
            **claim,
            **({OWNER: self.owner} if self.owner else {}),
        }

    @property
    def condition(self) -> dict[str, str]:
        """Returns the condition as arguments of the API."""
        return (
            {"IfNoneMatch": "*"}
            if self.is_exclusive
            else {"IfMatch": self.replaces}
            if self.replaces
            else {}
        )


class Upload:
    """A new S3 object. `complete` makes it visible. `finish` calls that, unless `is_held`."""

    def __init__(
        self, s3: S3, path: str, url: str, nbytes: int, how: UploadOptions | None = None
    ) -> None:
        """Prepares the upload; sends no request yet.

        Args:
            s3: the S3 calls.
            path: bucket and key.
            url: for messages.
            nbytes: size of the object.
            how: options of the object.
        """
        how = how or UploadOptions()
        self._s3, self._path, self._url, self.nbytes, self._how = s3, path, url, nbytes, how
        starts = how.starts
        self._metadata = how.notes
        self._at = s3.at(path)
        self._starts = part_starts(nbytes) if starts is None else starts
        self._parts: dict[int, _Part] = {}
        self._sent: dict[int, SentPart] = {}
        self._running: list[Future[None]] = []
        self._error: BaseException | None = None
        # the PUT of a small object, which starts before `complete`
        self._put: Future[None] | None = None
        self._upload_id, self._is_over, self.is_complete = (
            how.upload_id or (how.begun.upload_id if how.begun else ""),
            False,
            False,
        )
        self.kept_nbytes = 0  # bytes that an earlier try has sent
        self._source: dict[str, Any] = {}  # of a copy of a whole object
        self._is_proved = False  # the store has told its checksum
        self._expected: int | None = None
        self._creation: Future[Any] | None = None  # the last request that starts the upload
        self._lock, self._begin = threading.Lock(), threading.Lock()

    @property
    def is_small(self) -> bool:
        """Tells whether the object is written with one PUT."""
        return len(self._starts) <= 1 and not self._upload_id and self._how.mine is None

    # ---- filling ---------------------------------------------------------------------------------

    def write_at(self, start: int, data: memoryview | bytes) -> None:
        view = memoryview(data).cast("B")
        while len(view):
            number = bisect_right(self._starts, start) - 1
            part = self._part(number)
            at = start - self._starts[number]
            piece = view[: len(part.data) - at]
            part.data[at : at + len(piece)] = piece
            with self._lock:
                part.left -= len(piece)
                is_full = part.left == 0
                if is_full and not self.is_small:
                    del self._parts[number]
            if is_full and not self.is_small:
                self._send(number, bytes(part.data))
            elif is_full and not self._how.is_held and self._how.crc64 is None:
                self._put = self._start_end(self._how.condition)
            start, view = start + len(piece), view[len(piece) :]

    def view(self, start: int, nbytes: int) -> None:
        del start, nbytes

    def _end(self, number: int) -> int:
        return self._starts[number + 1] if number + 1 < len(self._starts) else self.nbytes

    def _part(self, number: int) -> _Part:
        self._raise_early()
        with self._lock:
            if number not in self._parts:
                self._parts[number] = _Part(self._end(number) - self._starts[number])
            return self._parts[number]

    def _raise_early(self) -> None:
        """Raises the error of a part that has failed in the background."""
        if self._error is not None:
            raise self._failed(self._error) from None

    def _done(self, future: Future[None], held: int) -> None:
        self._s3.server.flight.leave(held)
        if not future.cancelled() and self._error is None:
            self._error = future.exception()

    def _failed(self, error: BaseException) -> StorageError:
        return failure("write", self._url, error)

    @property
    def mark(self) -> str:
        """Returns the mark in the object's metadata that identifies it."""
        return self._metadata[MARK]

    def begin(self) -> str:
        """Starts the multipart upload, if not yet started; returns its id."""
        with self._begin:
            if self._is_over:
                raise StorageError(f"cannot write: it was given up before ({printable(self._url)})")
            if not self._upload_id:
                answer = retry("create", self._url, self._create)
                self._upload_id = str(answer["UploadId"])
            return self._upload_id

    def _create(self) -> Any:
        sums = {"ChecksumAlgorithm": "CRC64NVME", "ChecksumType": "FULL_OBJECT"}
        work = self._s3.ask("create_multipart_upload", **self._at, Metadata=self._metadata, **sums)
        self._creation = self._s3.run(work)
        return ending.result(self._creation, keeps=True)

    def _send(self, number: int, data: bytes) -> None:
        crc = crc64nvme(data)
        there = self._how.begun.parts.get(number) if self._how.begun else None
        if there is not None and there.holds(data, crc):
            self._sent[number] = there._replace(crc64=crc)
            with self._lock:
                self.kept_nbytes += len(data)
            return
        sums = self._s3.seal(data, crc)
        self._s3.server.flight.enter(len(data))
        self._start(number, len(data), crc, "upload_part", Body=data, **sums)

    def copy(self, start: int, nbytes: int, source: str, source_start: int, etag: str) -> None:
        """Makes the store copy a part from another of its objects.

        Args:
            start: start of the part.
            nbytes: bytes of the part.
            source: bucket and key.
            source_start: first byte of the source.
            etag: ETag of the source. It is an error if the source has changed.
        """
        self._s3.server.flight.enter(_COPY_WEIGHT)
        self._start(
            bisect_right(self._starts, start) - 1,
            nbytes,
            None,
            "upload_part_copy",
            CopySource=self._s3.at(source),
            CopySourceRange=f"bytes={source_start}-{source_start + nbytes - 1}",
            CopySourceIfMatch=etag,
        )

    def copy_whole(self, source: str, etag: str) -> None:
        """Makes the store copy the whole of another of its objects, with one request at the end.

        Args:
            source: bucket and key.
            etag: ETag of the source. It is an error if the source has changed.
        """
        assert self.is_small
        self._source = {"CopySource": self._s3.at(source), "CopySourceIfMatch": etag}
        self._sent[0] = SentPart("", self.nbytes, None)

    def expect(self, crc64: int) -> None:
        """Sets the expected checksum of the whole object.

        Parts that the store copies are not read here. A store that supports such checksums compares
        it.
        """
        self._expected = crc64

    def _start(
        self, number: int, nbytes: int, crc64: int | None, method: str, **kwargs: Any
    ) -> None:
        upload_id = self.begin()
        held = nbytes if "Body" in kwargs else _COPY_WEIGHT

        async def send() -> None:
            for attempt in range(ATTEMPTS):
                try:
                    answer = await self._s3.ask(
                        method, **self._at, UploadId=upload_id, PartNumber=number + 1, **kwargs
                    )
                    break
                except Exception as error:
                    if attempt + 1 == ATTEMPTS or not may_pass(error):
                        raise
                    await asyncio.sleep(delay(attempt))
            result = answer.get("CopyPartResult", answer)
            if "Body" in kwargs:
                self._s3.note(result)
            self._sent[number] = SentPart(str(result["ETag"]), nbytes, crc64)

        future = self._s3.run(send())
        future.add_done_callback(lambda done: self._done(done, held))
        self._running.append(future)

    # ---- the end ---------------------------------------------------------------------------------

    def finish(self) -> None:
        """Waits until the store has every part, then completes the object unless `is_held`."""
        for future in self._running:  # callbacks may still run after this
            with suppress(Exception):
                ending.result(future)
            if not future.done():
                raise StorageError(f"the process ends: {printable(self._url)} is not complete")
            self._error = self._error or (None if future.cancelled() else future.exception())
        self._raise_early()
        low, high = (
            (0, self.nbytes)
            if self._how.mine is None or not self._how.upload_id
            else self._how.mine
        )
        if not self.is_small and len(self._sent) != len(
            [start for start in self._starts if low <= start < high]
        ):
            raise StorageError(
                f"a file was not written in full: {len(self._sent)} of {len(self._starts)} parts"
                f" ({printable(self._url)})"
            )
        if self._how.upload_id:
            self._is_over = True  # the process that began the upload completes it
        elif not self._how.is_held:
            self.complete()

    @property
    def sent(self) -> dict[int, SentPart]:
        """Returns the parts that the store has, by number."""
        return self._sent

    def absorb(self, sent: Mapping[int, SentPart]) -> None:
        """Adds the parts that another process has sent of the same object."""
        self._sent |= sent

    def complete(self) -> None:
        """Makes the object visible.

        Raises:
            StorageError: another writer was first, or the store refuses. The sent parts are
                discarded.
        """
        if self._is_over:
            raise StorageError(f"cannot write: it was given up before ({printable(self._url)})")
        condition = self._how.condition
        if self._put is None:
            self._check_expected()
        if (
            self._how.is_exclusive
            and not self.is_small
            and not self._s3.server.excludes.get("many")
            and self._head()
        ):
            # checked as late as possible, because the server itself does not check
            raise appeared(self._url)
        for attempt in range(ATTEMPTS):
            work, self._put = self._put or self._start_end(condition), None
            try:
                ending.result(work)
                break
            except Exception as error:  # noqa: BLE001  # the state of the object is checked below
                try:
                    head = self._head()
                # the first error says more: a store gives no reason in its answer to a HEAD
                except StorageError:
                    raise self._failed(error) from None
                if head.get("Metadata", {}).get(MARK) == self._metadata[MARK]:
                    break
                condition = self._condition_of_retry(
                    error, head, condition, is_last=attempt + 1 == ATTEMPTS
                )
                pause(attempt)
        self._parts.clear()
        self._is_over = self.is_complete = True
        self._prove()

    def _condition_of_retry(
        self, error: Exception, head: Mapping[str, Any], condition: dict[str, str], is_last: bool
    ) -> dict[str, str]:
        """Returns the condition for another try, or raises if a retry cannot help."""
        replaces = self._how.replaces
        if not is_last and replaces and head.get("ETag") == replaces == condition.get("IfMatch"):
            return {"IfMatch": replaces.strip('"')}  # RadosGW compares ETags without the quotes
        if not is_last and (status(error) == _CONFLICT or may_pass(error)):
            return condition
        if status(error) == _EXISTS:
            raise appeared(self._url) from None
        raise self._failed(error) from None

    def _head(self) -> dict[str, Any]:
        return self._s3.head(self._url, self._path)

    def _check_expected(self) -> None:
        """Compares the sent checksum with the expected one, before the object is visible."""
        crc = crc64nvme(self._parts[0].data) if self._parts else self._crc64()
        if self._how.crc64 not in (None, crc):
            raise IntegrityError(
                f"bytes were damaged on the way: expected CRC-64 {hex64(self._how.crc64 or 0)}, got"
                f" {hex64(crc or 0)} ({printable(self._url)})",
                hint="try again; if it fails again, the source is damaged",
            )

    def _start_end(self, condition: dict[str, str]) -> Future[None]:
        """Starts the last step: one PUT of the whole object, or the end of a multipart upload."""
        if not self.is_small:
            return self._s3.run(self._ask_complete(condition))
        if self._source:
            return self._s3.run(self._ask_copy(condition))
        data = self._parts[0].data if self._parts else bytearray()
        crc, flight = crc64nvme(data), self._s3.server.flight
        self._sent[0] = SentPart("", len(data), crc)
        sums = self._s3.seal(data, crc)
        flight.enter(len(data))
        future: Future[None] = self._s3.run(self._ask_put(data, {**sums, **condition}))
        future.add_done_callback(lambda _: flight.leave(len(data)))
        return future

    async def _ask_put(self, data: bytearray, more: dict[str, str]) -> None:
        self._s3.note(
            await self._s3.ask("put_object", **self._at, Body=data, Metadata=self._metadata, **more)
        )

    async def _ask_copy(self, condition: dict[str, str]) -> None:
        answer = await self._s3.ask(
            "copy_object",
            **self._at,
            **self._source,
            Metadata=self._metadata,
            MetadataDirective="REPLACE",
            ChecksumAlgorithm="CRC64NVME",
            **condition,
        )
        told = stored_crc64(answer.get("CopyObjectResult", {}))
        self._is_proved = told is not None and told == self._crc64()

    async def _ask_complete(self, condition: dict[str, str]) -> None:
        crc = self._crc64()
        sums = (
            {}
            if crc is None
            else {
                "ChecksumCRC64NVME": encoded(crc.to_bytes(8, "big")),
                "ChecksumType": "FULL_OBJECT",
            }
        )
        parts = [{"PartNumber": n + 1, "ETag": s.etag} for n, s in sorted(self._sent.items())]
        await self._s3.ask(
            "complete_multipart_upload",
            **self._at,
            UploadId=self._upload_id,
            MultipartUpload={"Parts": parts},
            **sums,
            **condition,
        )

    def _crc64(self) -> int | None:
        """Returns the checksum of the whole object; None if that of a copied part is unknown."""
        crcs = [(s.crc64, s.nbytes) for _, s in sorted(self._sent.items())]
        if any(crc is None for crc, _ in crcs):
            return self._expected if self._how.crc64 is None else self._how.crc64
        return join_crc64((crc, nbytes) for crc, nbytes in crcs if crc is not None)

    def _prove(self) -> None:
        """Compares the stored object with the sent one: size, and checksum if the store has it."""
        if self._is_proved:
            return
        head = self._head()
        if head.get("Metadata", {}).get(MARK) != self._metadata[MARK]:
            what = "replaced" if head else "removed"
            raise StorageError(
                f"another writer {what} an object as soon as it was written:"
                f" {printable(self._url)}",
                hint="another writer was first; look at what it wrote",
            )
        stored, mine = stored_crc64(head), self._crc64()
        told = (f"{self.nbytes} bytes", f"{head['ContentLength']} bytes")
        if told[0] == told[1] and stored is not None and mine is not None:
            told = (f"CRC-64 {hex64(mine)}", f"CRC-64 {hex64(stored)}")
        if told[0] != told[1]:
            with suppress(StorageError):
                # remove only this writer's object
                self._s3.call(
                    "remove", self._url, "delete_object", **self._at, IfMatch=head["ETag"]
                )
            raise StorageError(
                f"a stored object differs from what was sent: expected {told[0]}, got {told[1]}"
                f" ({printable(self._url)})",
                hint=self._advice(),
            )

    def _advice(self) -> str:
        """Returns the hint for an object that differs from the sent one."""
        if any(sent.crc64 is None for sent in self._sent.values()):
            return (
                "try again; if it fails again, the source of the store's copy is damaged: run"
                " ckpt verify on it"
            )
        return "try again; if it fails again, the store or the network changes bytes"

    def abort(self) -> None:
        with self._begin:
            if self._is_over:
                return
            self._is_over = True
        running = [*self._running, *([self._put] if self._put else [])]
        for future in running:
            future.cancel()
        wait(running, 0.5 if ending.has_begun() else 30)
        self._parts.clear()
        if self._how.begun is None and (upload_id := self._upload_id or self._created()):
            try:
                self._s3.call(
                    "give up",
                    self._url,
                    "abort_multipart_upload",
                    missing={},
                    **self._at,
                    UploadId=upload_id,
                )
            except StorageError as error:
                if ending.has_begun():
                    ending.cut()
                else:
                    log.warning("an unfinished upload is left; ckpt prune removes it: %s", error)

    def _created(self) -> str:
        """Returns the id of an upload that was being started when a signal came; "" if none."""
        try:
            return str(ending.result(self._creation)["UploadId"]) if self._creation else ""
        except Exception:  # noqa: BLE001  # the store has refused it, or has not answered in time
            return ""


def refuses(s3: S3, path: str, url: str, data: bytes, is_small: bool) -> bool:
    """Tells whether a server honours the condition not to overwrite an object.

    It tries on an existing object, which may be written again with the same contents.
    """
    kind = "one" if is_small else "many"
    if kind not in s3.server.excludes:
        probe = Upload(
            s3,
            path,
            url,
            len(data),
            UploadOptions((0,) if is_small else (0, len(data)), is_held=True, is_exclusive=True),
        )
        probe.write_at(0, data)
        try:
            probe.finish()
            probe._start_end({"IfNoneMatch": "*"}).result()
            s3.server.excludes[kind] = False
        except Exception as error:  # noqa: BLE001  # a refusal; any other error tells nothing
            if status(error) == _EXISTS:
                s3.server.excludes[kind] = True
        finally:
            probe.abort()
    return s3.server.excludes.get(kind, False)
