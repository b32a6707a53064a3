"""A reverse proxy and nothing else: python bare.py PORT UPSTREAM"""

from __future__ import annotations

import asyncio
import sys

import aiohttp
import uvloop
from aiohttp import web

PORT, UPSTREAM = int(sys.argv[1]), sys.argv[2]
CLIENT = web.AppKey("client", aiohttp.ClientSession)


async def forward(request: web.Request) -> web.StreamResponse:
    body = await request.read()
    headers = {"Content-Type": "application/json"}
    async with request.app[CLIENT].post(UPSTREAM + request.path, data=body, headers=headers) as answer:
        if answer.content_type != "text/event-stream":
            return web.Response(body=await answer.read(), status=answer.status, content_type=answer.content_type)
        response = web.StreamResponse(status=answer.status, headers={"Content-Type": answer.headers["Content-Type"]})
        await response.prepare(request)
        async for block in answer.content.iter_any():
            await response.write(block)
        await response.write_eof()
        return response


async def main() -> None:
    app = web.Application(client_max_size=1 << 26)
    app.router.add_post("/{path:.*}", forward)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None)) as client:
        app[CLIENT] = client
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", PORT, backlog=4096).start()
        await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(main())
