"""A store whose listings are late: no step is overwritten, and none that a rule keeps is removed."""

from __future__ import annotations

import random
import uuid
from dataclasses import dataclass, field
from typing import Any

import pytest
from aiohttp import web

import ckpt_tools
from ckpt_tools import CheckpointManager, StorageError
from tests.servers.faults import Breaker, before
from tests.servers.servers import Server
from tests.states import filled


@dataclass
class Late(Breaker):
    """Answers each listing as it was when it was asked for first, while `is_frozen`."""

    is_frozen: bool = False
    kept: dict[str, bytes] = field(default_factory=dict)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        is_list = request.method == "GET" and "list-type" in request.query
        if is_list and self.is_frozen and request.raw_path in self.kept:
            body = self.kept[request.raw_path]
            return web.Response(body=body, content_type="application/xml")
        return await super().handle(request)

    async def answer(
        self, request: web.Request, answer: Any, data: bytearray, kind: str
    ) -> web.StreamResponse:
        if request.method == "GET" and "list-type" in request.query:
            self.kept[request.raw_path] = bytes(data)
        return await super().answer(request, answer, data, kind)


@pytest.mark.slow
def test_a_late_listing_overwrites_and_removes_nothing(server: Server) -> None:
    server.bucket("late")
    root = f"s3://late/{uuid.uuid4()}/run"
    late = Late(server.endpoint, 0.0, (), False, 0, random.Random(0))
    with before(late) as url:
        options = server.options | {"endpoint_url": url}
        with CheckpointManager(root, storage_options=server.options, keep_last=None) as checkpoints:
            for step in (1, 2):
                checkpoints.save(step, filled(step), asynchronous=False)
        assert len(ckpt_tools.steps(root, storage_options=options)) == 2
        with CheckpointManager(root, storage_options=server.options, keep_last=None) as checkpoints:
            checkpoints.resume(filled(0))
            for step in (3, 4):
                checkpoints.save(step, filled(step), asynchronous=False)
        late.is_frozen = True
        into = filled(0)
        with CheckpointManager(root, storage_options=options, keep_last=1) as checkpoints:
            assert checkpoints.resume(into) == 2, "what the listing shows"
            with pytest.raises(StorageError, match="appeared|exists|first"):
                checkpoints.save(3, filled(9), asynchronous=False)
    found = ckpt_tools.steps(root, storage_options=server.options)
    assert {3, 4} <= {step.number for step in found if not step.problem}
    for step in (3, 4):
        with CheckpointManager(root, storage_options=server.options, keep_last=None) as checkpoints:
            into = filled(0)
            checkpoints.resume(into, step=step)
            assert into["w"].tolist() == [step] * 5
