"""Retries calls of object stores, and translates their errors.

Every package has its own exceptions. They become a StorageError with a hint, without secrets.
"""

from __future__ import annotations

import random
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from ckpt_tools.core import ending
from ckpt_tools.core.logs import log
from ckpt_tools.errors import (
    CatalogError,
    FormatError,
    IntegrityError,
    StorageError,
    printable,
)
from ckpt_tools.ranks.base import ALONE, Group
from ckpt_tools.storage.base import Store, Traffic
from ckpt_tools.storage.kept import KEPT

T = TypeVar("T")

ATTEMPTS = 4
_FIRST_WORD_S, _TICK_S, _IDLE_TICKS = 5.0, 0.5, 10
_LEAST_SECRET = 3  # shorter logins occur in other words
_SECRET = re.compile(
    r"(?i)([\w-]*(?:secret|token|password|credential|signature|key(?!s\b|count|-?marker))[\w-]*)([\"']?\s*[=:]\s*[\"']?)[^\s\"'&,)]+"
)
_NO_BUCKET = ("NoSuchBucket", "bucket does not exist")
_UNREACHABLE = "is the endpoint right? --storage-option endpoint_url=…"
_OUTAGE = (
    "Timeout",
    "Connection",
    "Payload",
    "Disconnected",
    "SlowDown",
    "status=50",
    "Incomplete",
    "Could not connect",
    "Cannot connect",
    "Name or service not known",
    "closed the connection",
)
_HINTS = (
    (
        ("NoCredentials", "Unable to locate credentials"),
        "give credentials as s3fs takes them: environment, ~/.aws, or --storage-option",
    ),
    (
        ("InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidToken", "ExpiredToken"),
        "the credentials are wrong or have expired",
    ),
    (
        ("Invalid endpoint",),
        "an endpoint is a whole URL: --storage-option endpoint_url=https://HOST:9000",
    ),
    (("RequestTimeTooSkewed",), "this machine's clock is wrong"),
    (("PreconditionFailed", "status=412"), "the object was replaced meanwhile: start again"),
    (
        ("NoSuchUpload",),
        "another process has completed or given up this upload: look at the destination",
    ),
    (_NO_BUCKET, "make the bucket, or correct its name or the endpoint"),
    (
        ("AccessDenied", "Forbidden", "Access Denied", "PermissionError"),
        "the credentials are wrong, or do not permit this",
    ),
    (
        ("status=400", "[Errno 22] Bad Request"),
        "the credentials may have expired: the store gives no reason",
    ),
    (("Could not connect", "Cannot connect", "Name or service not known"), _UNREACHABLE),
)


def retry(
    operation: str,
    url: str,
    call: Callable[[], Any],
    missing: Any = None,
    traffic: Traffic | None = None,
) -> Any:
    """Calls a store, with retries after temporary failures.

    Args:
        operation: a verb, for messages.
        url: URL of the object, for messages.
        call: the function.
        missing: the result if there is no such object. If None, that is an error.
        traffic: counts the calls.

    Raises:
        StorageError: the failure is permanent, or every try failed.
    """
    with _WAITS.noted(operation, url):
        return _tried(operation, url, call, missing, traffic)


def _tried(
    operation: str, url: str, call: Callable[[], Any], missing: Any, traffic: Traffic | None
) -> Any:
    for attempt in range(ATTEMPTS):
        ending.refuse_wait()
        if traffic is not None:
            traffic.add(operation)
        try:
            return call()
        except FileNotFoundError as error:
            is_bucket = any(word in _text(error) for word in _NO_BUCKET)
            if missing is not None and not is_bucket:
                return missing
            what = "bucket" if is_bucket else "object"
            raise StorageError(
                f"cannot {operation}: no such {what} ({printable(url)})",
                hint=hint(error),
                is_missing=True,
            ) from None
        except Exception as error:  # every package has exceptions of its own
            if isinstance(error, StorageError):
                raise
            if attempt + 1 < ATTEMPTS and may_pass(error):
                pause(attempt)
                continue
            raise failure(operation, url, error) from None
    raise AssertionError


class _Waits:
    """The calls of stores that are under way. A thread warns of one that takes long."""

    def __init__(self) -> None:
        self._calls: dict[object, tuple[float, str, str]] = {}
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    @contextmanager
    def noted(self, operation: str, url: str) -> Iterator[None]:
        """Notes a call while it runs."""
        key = object()
        self._calls[key] = (time.monotonic(), operation, url)
        if self._thread is None or not self._thread.is_alive():  # a fork has none
            with self._lock:
                self._thread = threading.Thread(target=self._watch, name="ckpt-waits", daemon=True)
                self._thread.start()
        try:
            yield
        finally:
            self._calls.pop(key, None)

    def _watch(self) -> None:
        """Warns after 5 s of one wait, then after 10 s, 20 s and so on; ends when there is none."""
        next_word_s, idle = _FIRST_WORD_S, 0
        while idle < _IDLE_TICKS:
            time.sleep(_TICK_S)
            began, operation, url = min(self._calls.copy().values(), default=(0.0, "", ""))
            waited_s = time.monotonic() - began if operation else 0.0
            idle = 0 if operation else idle + 1
            if waited_s < _FIRST_WORD_S:
                next_word_s = _FIRST_WORD_S
            elif waited_s >= next_word_s:
                next_word_s *= 2
                log.warning(
                    "waiting for the store, for %.0f s so far: %s %s",
                    waited_s,
                    operation,
                    printable(url),
                )


_WAITS = _Waits()


def failure(operation: str, url: str, error: BaseException) -> StorageError:
    """Returns the user's error for a call that finally failed.

    Args:
        operation: a verb.
        url: URL of the object.
        error: the exception of the store's package.
    """
    advice = hint(error)
    text = f"cannot {operation}: {error_text(error, url)} ({printable(url)})"
    return StorageError(
        text,
        hint=advice,
        is_transient=advice in (None, _UNREACHABLE) and _is_outage(error),
        is_unreadable=True,
    )


def _is_outage(error: BaseException) -> bool:
    """Tells whether a store could not be reached, or was busy."""
    if isinstance(error, (PermissionError, NotImplementedError)):
        return False
    return isinstance(error, (ConnectionError, TimeoutError, EOFError)) or any(
        word in _text(error) for word in _OUTAGE
    )


def pause(attempt: int) -> None:
    """Waits a random time, which grows with the number of failed attempts."""
    time.sleep(delay(attempt))


def delay(attempt: int) -> float:
    """Returns the seconds to wait after a number of failed attempts.

    The time is random, so that not all clients come back at the same time.
    """
    return float(random.random() * 0.2 * 2**attempt)  # noqa: S311


def translated(error: Exception) -> BaseException:
    """Returns Python's own exception for botocore's error, as s3fs does."""
    from s3fs.errors import translate_boto_error  # type: ignore[import-untyped]

    found: BaseException = translate_boto_error(error)
    return found


def status(error: BaseException) -> int:
    """Returns the HTTP status of a store's answer; 0 if unknown."""
    answer = getattr(error.__cause__, "response", None) or getattr(error, "response", None) or {}
    return (
        int((answer.get("ResponseMetadata") or {}).get("HTTPStatusCode") or 0)
        if isinstance(answer, dict)
        else 0
    )


def may_pass(error: Exception) -> bool:
    """Tells whether a retry may help: the connection broke, or the store was busy."""
    text = _text(error)
    if isinstance(error, (PermissionError, ValueError, NotImplementedError)) or hint(error):
        return False  # s3fs itself has already retried
    return isinstance(error, (OSError, TimeoutError, EOFError)) or any(
        word in text
        for word in (
            "Timeout",
            "Connection",
            "Payload",
            "Disconnected",
            "SlowDown",
            "status=50",
            "Incomplete",
            "Checksum",
        )
    )


def hint(error: BaseException) -> str | None:
    text = _text(error)
    return next((hint for words, hint in _HINTS if any(word in text for word in words)), None)


def _text(error: BaseException) -> str:
    """Returns the type, text and store's code of an error. s3fs keeps the code in the cause."""
    answer = getattr(error.__cause__, "response", None) or {}
    status = answer.get("ResponseMetadata", {}).get("HTTPStatusCode")
    code = f"{answer.get('Error', {}).get('Code', '')} status={status}" if status else ""
    return f"{type(error).__name__} {error} {code}"


def error_text(error: BaseException, url: str = "") -> str:
    """Returns an error's text on one line, with `***` for text that looks like a secret.

    Args:
        error: the error of a store's package.
        url: the URL that was given. Its login is a secret wherever the text repeats it.
    """
    text = " ".join(str(error).split())
    login, at, _ = url.partition("://")[2].partition("@")
    is_login = at and "/" not in login  # hf://ORG/MODEL@REVISION has none
    for secret in (login, *login.split(":")) if is_login else ():
        text = text.replace(secret, "***") if len(secret) >= _LEAST_SECRET else text
    if text in ("", "None") or text.endswith("] None"):
        text = _text(error).replace("None", "").strip()
    return printable(_SECRET.sub(r"\1\2***", " ".join(text.split())))[:300]


def appeared(url: str) -> StorageError:
    """Returns the error for a destination that another writer has created."""
    return StorageError(
        f"the destination appeared while this was at work: {printable(url)}",
        hint="another writer was first; look at what it wrote",
    )


def read_again_if_wrong(store: Store, read: Callable[[], T], group: Group = ALONE) -> T:
    """Calls `read`, and a second time if the bytes from a remote store were wrong.

    A bit may have flipped on the way. If the second call succeeds, a warning says so.

    Args:
        store: the store that `read` reads from.
        read: raises an IntegrityError, FormatError or CatalogError for wrong bytes.
        group: the processes that share the work. Only a process alone can call `read` again.
    """
    try:
        return read()
    except (IntegrityError, FormatError, CatalogError) as error:
        if group.size > 1 or not store.capabilities.is_remote:
            raise
        store.close()
        KEPT.forget(f"{store.url}/")
        result = read()
        log.warning(
            "bytes from %s were wrong at first, and right when read again: %s",
            printable(store.url),
            error,
        )
        return result
