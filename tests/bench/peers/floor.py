"""The least that a recording gateway does: python floor.py PORT UPSTREAM NATS

The bare proxy, which publishes each request and each reply verbatim to JetStream. The first ack is awaited while the
model works, and before the first byte goes out; the second before the reply ends.
"""

from __future__ import annotations

import asyncio
import sys

import aiohttp
import nats
import uvloop
from aiohttp import web
from nats.js import JetStreamContext

PORT, UPSTREAM, NATS = int(sys.argv[1]), sys.argv[2], sys.argv[3]
CLIENT = web.AppKey("client", aiohttp.ClientSession)
STREAM = web.AppKey("stream", JetStreamContext)


async def forward(request: web.Request) -> web.StreamResponse:
    body, stream = await request.read(), request.app[STREAM]
    intent = asyncio.create_task(stream.publish("floor.calls", body))
    headers = {"Content-Type": "application/json"}
    async with request.app[CLIENT].post(UPSTREAM + request.path, data=body, headers=headers) as answer:
        if answer.content_type != "text/event-stream":
            reply = await answer.read()
            await intent
            await stream.publish("floor.calls", reply)
            return web.Response(body=reply, status=answer.status, content_type=answer.content_type)
        response = web.StreamResponse(status=answer.status, headers={"Content-Type": answer.headers["Content-Type"]})
        await intent
        await response.prepare(request)
        blocks = []
        async for block in answer.content.iter_any():
            blocks.append(block)
            await response.write(block)
        await stream.publish("floor.calls", b"".join(blocks))
        await response.write_eof()
        return response


async def main() -> None:
    app = web.Application(client_max_size=1 << 26)
    app.router.add_post("/{path:.*}", forward)
    bus = await nats.connect(NATS, pending_size=1 << 26)
    app[STREAM] = bus.jetstream()
    await app[STREAM].add_stream(name="FLOOR", subjects=["floor.>"])
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None)) as client:
        app[CLIENT] = client
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", PORT, backlog=4096).start()
        await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(main())
