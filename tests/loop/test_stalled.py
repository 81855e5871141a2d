"""Three ranks on a bucket: bodies that stop in the middle, of writes and of reads."""

from __future__ import annotations

import asyncio
import json
import random
import uuid
from dataclasses import dataclass, field
from typing import Any

import pytest
from aiohttp import web

import ckpt_tools
from tests.conftest import torchrun
from tests.servers.faults import Breaker, before
from tests.servers.servers import Server

LARGE = 1_000_000
NUM = 2  # of each kind


@dataclass
class Stalls(Breaker):
    """Takes no more of two large writes, and sends half of two large reads; then nothing."""

    stalled: list[str] = field(default_factory=list)

    async def _wait(self, request: web.Request) -> None:
        self.stalled.append(request.method)
        while request.transport is not None and not request.transport.is_closing():
            await asyncio.sleep(0.1)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        is_large = request.method == "PUT" and (request.content_length or 0) > LARGE
        if is_large and self.stalled.count("PUT") < NUM:
            await self._wait(request)
        return await super().handle(request)

    async def answer(
        self, request: web.Request, answer: Any, data: bytearray, kind: str
    ) -> web.StreamResponse:
        is_large = request.method == "GET" and len(data) > LARGE
        if not is_large or self.stalled.count("GET") >= NUM:
            return await super().answer(request, answer, data, kind)
        response = web.StreamResponse(status=answer.status)
        response.headers.update({"Content-Range": answer.headers.get("Content-Range", "")})
        response.content_length = len(data)
        await response.prepare(request)
        await response.write(bytes(data[: len(data) // 2]))
        await self._wait(request)
        return response


@pytest.mark.slow
@pytest.mark.parametrize("server", ["moto"], indirect=True)
def test_bodies_that_stall_are_sent_and_read_again(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CKPT_S3_CLIENT", "s3fs")
    server.bucket("stalled")
    root = f"s3://stalled/{uuid.uuid4()}/run"
    stalls = Stalls(server.endpoint, 0.0, (), False, 0, random.Random(0))
    quick = {"read_timeout": 2, "connect_timeout": 2, "retries": {"max_attempts": 0}}
    with before(stalls) as url:
        options = server.options | {"endpoint_url": url, "config_kwargs": quick}
        torchrun(3, "stalled.py", root, json.dumps(options))
    assert sorted(stalls.stalled) == ["GET", "GET", "PUT", "PUT"]
    assert not ckpt_tools.verify(root, storage_options=server.options).problems
