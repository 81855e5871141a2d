"""Reads bodies of limited length from a web server.

fsspec reads the whole body of an answer. A server that ignores the range of a request, or that
sends a compressed body, could fill the memory of its reader.
"""

from __future__ import annotations

import re
from typing import Any

from ckpt_tools.errors import StorageError, printable

_MAX_PAGE_BYTES = 64 << 20  # a listing, or an answer to a request without a range
_RANGE = re.compile(r"bytes=(\d+)-(\d+)")


async def bounded_client(**settings: Any) -> Any:
    """Returns an aiohttp session for fsspec that reads no more than the requested bytes."""
    import aiohttp

    class Bounded(aiohttp.ClientResponse):
        async def read(self) -> bytes:
            found = _RANGE.fullmatch(self.request_info.headers.get("Range", ""))
            most = int(found[2]) - int(found[1]) + 1 if found else _MAX_PAGE_BYTES
            body = bytearray()
            while self._body is None:
                data = await self.content.readany()
                body += data
                if len(body) > most:
                    self.close()
                    raise StorageError(
                        f"a web server sends too much: expected at most {most} bytes"
                        f" ({printable(str(self.url))})",
                        hint="it may not know ranges: copy the checkpoint to a disk first",
                    )
                if not data:
                    self._body = bytes(body)
            return self._body

    settings.setdefault("headers", {})["Accept-Encoding"] = "identity"
    return aiohttp.ClientSession(response_class=Bounded, **settings)
