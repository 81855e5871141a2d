"""A second, faster client to read S3, if the package obstore is installed.

It comes with the extra `s3-fast`, and needs half the time. It gets endpoint, region and credentials
as s3fs has found them in its options, the configuration and the environment. If a setting cannot be
passed on, or a request fails, s3fs makes the request: it has the retries and the messages.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import os
import re
import threading
import time
from functools import partial
from importlib.util import find_spec
from typing import Any

from ckpt_tools.core.memory import trimmer
from ckpt_tools.errors import StorageError

S3FS, OBSTORE = "s3fs", "obstore"
WORTH_BYTES = 64 << 10  # smaller reads do not pay for the import
_SWITCH = "CKPT_S3_CLIENT"
_MISSES, _REST_S = 4, 30.0  # after so many failures in a row, only s3fs is used for this time
# Timeout for a whole range with its body: obstore has no timeout for silence alone. The end of the
# process waits for a running request.
_SECONDS = 30
# Renewable credentials are fetched again after this time. botocore renews them earlier before their
# end.
_FRESH = dt.timedelta(minutes=5)
# bytes fetched since the last trim; pause after a trim, as a multiple of its time
_TRIM_BYTES, _TRIM_PAUSE = 16 << 20, 20
_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")  # plain buckets only, no access points
_EXPRESS = "--x-s3"  # these buckets need sessions


class ObstoreClients:
    """The clients for one s3fs file system."""

    # id of the process that created clients: a fork would wait for threads that it does not have
    process = 0

    def __init__(self) -> None:
        self._clients: dict[str, Any] = {}
        self._lock, self._misses, self._rests_until = threading.Lock(), 0, 0.0

    def get(
        self, fs: Any, bucket: str, key: str, start: int, nbytes: int, etag: str | None
    ) -> memoryview | None:
        """Fetches a range of an object on the calling thread.

        Work on other threads would outlive the interpreter, and abort the process.

        Args:
            fs: s3fs's file system, always the same one.
            bucket, key: the object.
            start, nbytes: the range in bytes.
            etag: ETag of the version; any version if None.

        Returns:
            The bytes, possibly fewer than `nbytes`; None if s3fs must fetch them.
        """
        if ObstoreClients.process not in (0, os.getpid()) or time.monotonic() < self._rests_until:
            return None
        try:
            client = self._client(fs, bucket)
            if client is None:
                return None
            condition = {"if_match": etag} if etag else {}
            data = memoryview(
                client.get(key, options={"range": (start, start + nbytes), **condition}).bytes()
            )
        except BaseException as error:  # a panic of obstore is no Exception
            if isinstance(error, (KeyboardInterrupt, SystemExit)):
                raise
            self._misses += 1
            if self._misses >= _MISSES:
                self._misses, self._rests_until = 0, time.monotonic() + _REST_S
            return None
        self._misses = 0
        _HEAP.note(nbytes)
        return data

    def _client(self, fs: Any, bucket: str) -> Any:
        with self._lock:
            if bucket not in self._clients:
                ObstoreClients.process = os.getpid()
                self._clients[bucket] = asyncio.run_coroutine_threadsafe(
                    _open(fs, bucket), fs.loop
                ).result()
            return self._clients[bucket]


class _CHeap:
    """The heap of the C library.

    It keeps freed memory for each thread, together 100 MiB and more, until it is trimmed.
    """

    def __init__(self) -> None:
        self._trim = trimmer()
        self._lock, self._nbytes, self._next = threading.Lock(), 0, 0.0

    def note(self, nbytes: int) -> None:
        """Counts fetched bytes, and now and then returns free memory to the system.

        This takes at most a few per cent of the time.
        """
        with self._lock:
            self._nbytes += nbytes
            if self._trim is None or self._nbytes < _TRIM_BYTES or time.monotonic() < self._next:
                return
            self._nbytes, self._next = 0, float("inf")
        began = time.thread_time()
        self._trim(0)
        self._next = time.monotonic() + _TRIM_PAUSE * (time.thread_time() - began)


_HEAP = _CHeap()


def reader() -> str:
    """Returns the client that reads S3: `s3fs`, `obstore`, or "" for obstore only where it pays.

    Raises:
        StorageError: the environment names another client, or one that is not installed.
    """
    chosen = os.environ.get(_SWITCH, "")
    if chosen not in ("", S3FS, OBSTORE):
        raise StorageError(f"{_SWITCH} is {S3FS} or {OBSTORE}, got {chosen!r}")
    is_installed = chosen != S3FS and find_spec("obstore") is not None
    if chosen == OBSTORE and not is_installed:
        raise StorageError(
            f"{_SWITCH}={OBSTORE}, which is not installed", hint="pip install 'ckpt-tools[s3-fast]'"
        )
    return chosen if is_installed else S3FS


async def _open(fs: Any, bucket: str) -> Any:
    """Returns a client for a bucket with s3fs's settings; None if obstore lacks one of them."""
    from botocore import UNSIGNED  # type: ignore[import-untyped]
    from botocore.utils import get_environ_proxies  # type: ignore[import-untyped]

    await fs.set_session()
    known = await fs.get_s3(bucket)
    config, extra = (
        known.meta.config,
        fs._get_s3_method_kwargs(known.get_object).keys() - {"RequestPayer"},
    )
    is_plain = known.meta.endpoint_url.startswith("http:")
    has_own_trust = (
        config.client_cert
        or "verify" in fs.client_kwargs
        or fs.session.get_config_variable("ca_bundle")
    )
    is_odd = not _BUCKET.fullmatch(bucket) or bucket.endswith(_EXPRESS)
    if (
        (has_own_trust and not is_plain)
        or extra
        or is_odd
        or config.proxies
        or get_environ_proxies(known.meta.endpoint_url)
    ):
        return None
    import obstore.store

    make: Any = obstore.store.S3Store
    get = known.meta.service_model.operation_model("GetObject")
    # botocore supports all styles of endpoints
    there = await known._ruleset_resolver.construct_endpoint(
        get, {"Bucket": bucket, "Key": "k"}, {}
    )
    credentials = None if config.signature_version is UNSIGNED else known._get_credentials()
    patience = {"timeout": f"{_SECONDS}s", "connect_timeout": f"{config.connect_timeout:g}s"}
    return make(
        bucket,
        endpoint=there.url,
        virtual_hosted_style_request=True,  # the bucket is in the endpoint
        region=known.meta.region_name or "us-east-1",
        skip_signature=credentials is None,
        request_payer=bool(fs.req_kw),
        client_options={"allow_http": is_plain, **patience},
        retry_config={"max_retries": 0},
        credential_provider=partial(_credentials, credentials, fs.loop) if credentials else None,
    )


def _credentials(known: Any, loop: asyncio.AbstractEventLoop) -> dict[str, Any]:
    """Returns botocore's credentials as obstore takes them."""
    frozen = asyncio.run_coroutine_threadsafe(known.get_frozen_credentials(), loop).result()
    until = dt.datetime.now(dt.UTC) + _FRESH if hasattr(known, "refresh_needed") else None
    return {
        "access_key_id": frozen.access_key,
        "secret_access_key": frozen.secret_key,
        "token": frozen.token,
        "expires_at": until,
    }
