"""A proxy before an S3 endpoint that breaks GETs of objects, at random by a seed.

    with faulty(endpoint, share=0.3, seed=1) as (url, log): …

Kinds: `503` (busy), `reset` (the connection dies before an answer), `truncate` (it dies in the middle of a body), `corrupt` (one bit of a body
is wrong), `late` (half a second later).
"""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from aiohttp import ClientSession, web
from yarl import URL

from tests.servers.servers import free_port

KINDS = ("503", "reset", "truncate", "corrupt", "late")


@contextmanager
def faulty(endpoint: str, share: float, seed: int, kinds: tuple[str, ...] = KINDS) -> Iterator[tuple[str, list[str]]]:
    """Yields the proxy's URL, and the list of faults that grows as they are done."""
    rng, log, port, started = random.Random(seed), [], free_port(), threading.Event()
    loop = asyncio.new_event_loop()

    async def handle(request: web.Request) -> web.StreamResponse:
        async with ClientSession(auto_decompress=False) as session:
            body = await request.read()
            target = URL(endpoint + request.raw_path, encoded=True)
            async with session.request(request.method, target, headers=request.headers, data=body or None, allow_redirects=False) as answer:
                data = bytearray(await answer.read())
        is_object = request.method == "GET" and "Range" in request.headers and data
        kind = rng.choice(kinds) if is_object and rng.random() < share else ""
        log.extend([kind] if kind else [])
        if kind == "503":
            return web.Response(
                status=503, text="<Error><Code>SlowDown</Code><Message>busy</Message></Error>", content_type="application/xml"
            )
        if kind == "reset":
            request.transport.abort()
            return web.Response()
        if kind == "late":
            await asyncio.sleep(0.5)
        if kind == "corrupt":
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        headers = {k: v for k, v in answer.headers.items() if k.lower() not in ("transfer-encoding", "connection", "content-length")}
        response = web.StreamResponse(status=answer.status, headers=headers)
        response.content_length = int(answer.headers.get("Content-Length", len(data)))
        await response.prepare(request)
        await response.write(bytes(data[: len(data) // 2] if kind == "truncate" else data))
        if kind == "truncate":
            request.transport.abort()
        else:
            await response.write_eof()
        return response

    async def serve() -> None:
        runner = web.AppRunner(web.Application(client_max_size=1 << 30), access_log=None)
        runner.app.router.add_route("*", "/{path:.*}", handle)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        started.set()
        await stop.wait()
        await runner.cleanup()

    stop = asyncio.Event()
    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    assert started.wait(10)
    try:
        yield f"http://127.0.0.1:{port}", log
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()
