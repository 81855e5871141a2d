"""A proxy before an S3 endpoint that breaks what passes, at random by a seed.

    with faulty(endpoint, share=0.3, seed=1) as (url, log): …

It breaks GETs of objects (`READS`) or all that writes (`WRITES`). Kinds: `503` (busy), `reset` (the
connection dies before an answer), `truncate` (it dies in the middle of a body), `corrupt` (one bit
of a body is wrong), `late` (half a second later), `lost` (it is done, and nobody is told).
"""

from __future__ import annotations

import asyncio
import io
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from aiohttp import ClientResponse, ClientSession, web
from yarl import URL

from tests.servers.servers import free_port

READS = ("503", "reset", "truncate", "corrupt", "late")
WRITES = ("503", "reset", "lost", "late")


@dataclass
class Breaker:
    """What passes a proxy, and what becomes of it."""

    endpoint: str
    share: float
    kinds: tuple[str, ...]
    writes: bool
    most: int
    rng: random.Random
    log: list[str] = field(default_factory=list)
    passed: list[tuple[web.Request, int]] = field(default_factory=list)

    def choose(self, request: web.Request) -> str:
        is_hit = (
            request.method in ("PUT", "POST")
            if self.writes
            else request.method == "GET" and "Range" in request.headers
        )
        is_hit = is_hit and len(self.log) < self.most
        kind = self.rng.choice(self.kinds) if is_hit and self.rng.random() < self.share else ""
        self.log.extend([kind] if kind else [])
        return kind

    def flip(self, data: bytearray) -> None:
        if data:
            data[self.rng.randrange(len(data))] ^= 1 << self.rng.randrange(8)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body, kind = bytearray(await request.read()), self.choose(request)
        if kind == "503":
            text = "<Error><Code>SlowDown</Code><Message>busy</Message></Error>"
            return web.Response(status=503, text=text, content_type="application/xml")
        if kind == "reset":
            request.transport.abort()
            return web.Response()
        if kind == "corrupt" and self.writes:
            self.flip(body)
        target = URL(self.endpoint + request.raw_path, encoded=True)
        async with (
            ClientSession(auto_decompress=False) as session,
            session.request(
                request.method,
                target,
                headers=request.headers,
                data=io.BytesIO(body) if body else None,
                allow_redirects=False,
            ) as answer,
        ):
            data = bytearray(await answer.read())
        if kind == "lost":
            request.transport.abort()
            return web.Response()
        if kind == "late":
            await asyncio.sleep(0.5)
        if kind == "corrupt" and not self.writes:
            self.flip(data)
        return await self.answer(request, answer, data, kind)

    async def answer(
        self, request: web.Request, answer: ClientResponse, data: bytearray, kind: str
    ) -> web.StreamResponse:
        self.passed.append((request, answer.status))
        headers = {
            k: v
            for k, v in answer.headers.items()
            if k.lower() not in ("transfer-encoding", "connection", "content-length")
        }
        response = web.StreamResponse(status=answer.status, headers=headers)
        response.content_length = int(answer.headers.get("Content-Length", len(data)))
        await response.prepare(request)
        await response.write(bytes(data[: len(data) // 2] if kind == "truncate" else data))
        if kind == "truncate":
            request.transport.abort()
        else:
            await response.write_eof()
        return response


@contextmanager
def faulty(
    endpoint: str,
    share: float,
    seed: int,
    kinds: tuple[str, ...] = READS,
    writes: bool = False,
    most: int = 10**9,
) -> Iterator[tuple[str, list[str]]]:
    """Yields the proxy's URL, and the list of faults that grows as they are done."""
    breaker = Breaker(endpoint, share, kinds, writes, most, random.Random(seed))
    with before(breaker) as url:
        yield url, breaker.log


@dataclass
class Refuser(Breaker):
    """Refuses to read the objects whose names have a text, as long as it is not empty."""

    answer_of: str = ""
    wanted: str = ""

    def choose(self, request: web.Request) -> str:
        is_read = request.method in ("GET", "HEAD") and "list-type" not in request.query
        is_hit = is_read and self.wanted and self.wanted in request.path and not request.query
        self.log.extend([self.answer_of] if is_hit else [])
        return self.answer_of if is_hit else ""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        kind = self.choose(request)
        if kind == "reset":
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        if not kind:
            return await super().handle(request)
        status, code = kind.split()
        text = f"<Error><Code>{code}</Code><Message>{code}</Message></Error>"
        return web.Response(status=int(status), text=text, content_type="application/xml")


@contextmanager
def refusing(endpoint: str, wanted: str, kind: str) -> Iterator[tuple[str, Refuser]]:
    """Yields the URL of a proxy that refuses reads, and the proxy, whose `wanted` may change.

    Args:
        endpoint: of the store.
        wanted: part of the names of the objects.
        kind: `reset`, or the status and the code of S3's answer.
    """
    refuser = Refuser(endpoint, 0.0, (), False, 0, random.Random(0), answer_of=kind, wanted=wanted)
    with before(refuser) as url:
        yield url, refuser


@dataclass
class Answerer(Breaker):
    """Gives another answer to some requests: status and code, such as `503 SlowDown`."""

    when: Callable[[web.Request], str] = lambda request: ""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        if not (kind := self.when(request)):
            return await super().handle(request)
        self.log.append(request.path)
        status, code = kind.split()
        text = f"<Error><Code>{code}</Code><Message>{code}</Message></Error>"
        return web.Response(status=int(status), text=text, content_type="application/xml")


@contextmanager
def answering(endpoint: str, when: Callable[[web.Request], str]) -> Iterator[tuple[str, list[str]]]:
    """Yields a proxy's URL, and the paths of the requests for which `when` has an answer."""
    answerer = Answerer(endpoint, 0.0, (), False, 0, random.Random(0), when=when)
    with before(answerer) as url:
        yield url, answerer.log


@dataclass
class Outage(Breaker):
    """Stops to answer some methods: `busy` answers 503, `silent` answers nothing.

    Listings are answered in any case.
    """

    methods: tuple[str, ...] = ()
    how: str = "busy"

    async def handle(self, request: web.Request) -> web.StreamResponse:
        is_list = request.method == "GET" and "list-type" in request.query
        if request.method not in self.methods or is_list:
            return await super().handle(request)
        self.log.append(request.path)
        if self.how == "silent":
            while request.transport is not None and not request.transport.is_closing():
                await asyncio.sleep(0.1)
        text = "<Error><Code>SlowDown</Code><Message>busy</Message></Error>"
        return web.Response(status=503, text=text, content_type="application/xml")


@contextmanager
def out_of_order(
    endpoint: str, methods: tuple[str, ...], how: str
) -> Iterator[tuple[str, list[str]]]:
    """Yields the URL of a proxy with an `Outage`, and the paths that it did not serve."""
    outage = Outage(endpoint, 0.0, (), False, 0, random.Random(0), methods=methods, how=how)
    with before(outage) as url:
        yield url, outage.log


@dataclass
class Forbidder(Breaker):
    """Forbids to delete objects."""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        is_delete = request.method == "DELETE" or "delete" in request.query
        if not is_delete or request.path.endswith("/.ckpt.lock"):
            return await super().handle(request)
        text = "<Error><Code>AccessDenied</Code><Message>no</Message></Error>"
        return web.Response(status=403, text=text, content_type="application/xml")


@contextmanager
def forbidding_deletes(endpoint: str) -> Iterator[str]:
    """Yields the URL of a proxy that forbids to delete anything but leases."""
    with before(Forbidder(endpoint, 0.0, (), False, 0, random.Random(0))) as url:
        yield url


@contextmanager
def watched(endpoint: str) -> Iterator[tuple[str, list[tuple[web.Request, int]]]]:
    """Yields a proxy's URL that breaks nothing, and the list of requests with the status of each
    answer.
    """
    breaker = Breaker(endpoint, 0.0, (), False, 0, random.Random(0))
    with before(breaker) as url:
        yield url, breaker.passed


@contextmanager
def before(breaker: Breaker) -> Iterator[str]:
    app = web.Application(client_max_size=1 << 30)
    app.router.add_route("*", "/{path:.*}", breaker.handle)
    with serving(app) as url:
        yield url


@contextmanager
def serving(app: web.Application) -> Iterator[str]:
    """Serves an application on loopback, in a thread, and yields its URL."""
    loop, port, started = asyncio.new_event_loop(), free_port(), threading.Event()

    async def serve() -> None:
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        started.set()
        await stop.wait()
        await runner.cleanup()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await asyncio.sleep(0.05)  # the connections of cancelled requests close in later turns

    stop = asyncio.Event()
    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    assert started.wait(10)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()


class Gate(Breaker):
    """Holds requests of one method whose path has one of some texts, until it is opened."""

    def __init__(self, endpoint: str, texts: tuple[str, ...], method: str) -> None:
        super().__init__(endpoint, 0.0, (), False, 0, random.Random(0))
        self._texts, self._method = texts, method
        self.reached, self.opened = threading.Event(), threading.Event()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        if request.method == self._method and any(text in request.path for text in self._texts):
            self.reached.set()
            while not self.opened.is_set():
                await asyncio.sleep(0.05)
        return await super().handle(request)


@contextmanager
def held_at(endpoint: str, texts: tuple[str, ...], method: str) -> Iterator[tuple[str, Gate]]:
    """Yields the URL of a proxy, and its gate."""
    gate = Gate(endpoint, texts, method)
    with before(gate) as url:
        yield url, gate


@dataclass
class Loser(Breaker):
    """Passes a PUT of an object on, and lets nobody hear of it."""

    ending: str = ""
    then: Callable[[], object] = lambda: None

    def choose(self, request: web.Request) -> str:
        is_hit = request.method == "PUT" and request.path.endswith(self.ending)
        is_hit = is_hit and len(self.log) < self.most
        self.log.extend(["lost"] if is_hit else [])
        return "lost" if is_hit else ""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        number = len(self.log)
        answer = await super().handle(request)
        if len(self.log) > number:
            self.then()
        return answer


@contextmanager
def losing(
    endpoint: str, ending: str, most: int = 10**9, then: Callable[[], object] = lambda: None
) -> Iterator[tuple[str, list[str]]]:
    """Yields a proxy's URL, and the answers that were lost.

    Args:
        endpoint: of the store.
        ending: of the names of the objects.
        most: so many answers are lost.
        then: called after each, in the thread of the proxy.
    """
    loser = Loser(endpoint, 0.0, (), True, most, random.Random(0), ending=ending, then=then)
    with before(loser) as url:
        yield url, loser.log
