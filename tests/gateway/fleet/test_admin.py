from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from aiohttp import test_utils, web

from rollyard.gateway.admin import admin_routes
from rollyard.gateway.keys import SessionGrant, sign

TOKEN = b"the admin token of the tests"
ROUTES = [
    ("GET", "/admin/servers"),
    ("PUT", "/admin/servers/s1"),
    ("DELETE", "/admin/servers/s1"),
    ("POST", "/admin/servers/s1/pause"),
    ("POST", "/admin/servers/s1/resume"),
    ("POST", "/admin/servers/s1/drain"),
    ("POST", "/admin/weights"),
]


class Admin:
    """The endpoints of a gateway, and a client that has the token."""

    def __init__(self, client: aiohttp.ClientSession) -> None:
        self._client = client
        self.url = ""

    async def ask(
        self, method: str, path: str, body: Any = None, *, authorization: str | None = f"Bearer {TOKEN.decode()}"
    ) -> tuple[int, Any]:
        headers = {"Authorization": authorization} if authorization is not None else {}
        async with self._client.request(method, self.url + path, json=body, headers=headers) as response:
            return response.status, await response.json()


@pytest.fixture
async def admin(fleet: Any) -> AsyncIterator[Admin]:
    gateway = await fleet.gateway()
    async with aiohttp.ClientSession() as client, serving(gateway.desk, TOKEN) as server:
        made = Admin(client)
        made.url = str(server.make_url("")).rstrip("/")
        yield made


def serving(desk: Any, token: bytes) -> test_utils.TestServer:
    app = web.Application()
    app.add_routes(admin_routes(desk, token))
    return test_utils.TestServer(app)


SESSION_KEY = sign(SessionGrant(run="r", rollout_id="x", attempt=1), TOKEN)


@pytest.mark.parametrize(
    ("authorization", "status", "code"),
    [
        (None, 401, "admin_token_missing"),
        ("", 401, "admin_token_missing"),
        ("Bearer ", 401, "admin_token_missing"),
        (f"Basic {TOKEN.decode()}", 401, "admin_token_missing"),
        ("Bearer wrong", 403, "admin_token_wrong"),
        (f"Bearer {TOKEN.decode()}x", 403, "admin_token_wrong"),
        ("Bearer ü", 403, "admin_token_wrong"),
        (f"Bearer {SESSION_KEY}", 403, "admin_token_wrong"),
    ],
)
async def test_nothing_opens_without_the_token(admin: Admin, authorization: str | None, status: int, code: str) -> None:
    for method, path in ROUTES:
        answered, body = await admin.ask(method, path, {}, authorization=authorization)
        assert (answered, body["error"]["code"]) == (status, code), path


async def test_without_a_token_in_the_configuration_all_is_off(fleet: Any) -> None:
    gateway = await fleet.gateway()
    async with aiohttp.ClientSession() as client, serving(gateway.desk, b"") as server:
        for method, path in ROUTES:
            for headers in ({}, {"Authorization": "Bearer "}, {"Authorization": "Bearer x"}):
                async with client.request(method, server.make_url(path), headers=headers) as response:
                    assert (response.status, (await response.json())["error"]["code"]) == (403, "admin_off")


async def test_servers_come_and_go_over_http(fleet: Any, admin: Admin) -> None:
    server = await fleet.server("s1", register=False)
    fields = {"url": server.url, "engine": "vllm", "policy_version": 2}
    assert await admin.ask("PUT", "/admin/servers/s1", fields) == (200, {"server_id": "s1"})
    [gateway] = fleet.gateways
    await fleet.until(lambda: [entry.healthy for entry in gateway.pool.entries()] == [True])
    status, body = await admin.ask("GET", "/admin/servers")
    assert (status, body["servers"]) == (
        200,
        [{"server_id": "s1", **fields, "view": {"server_id": "s1", "healthy": True}}],
    )
    assert await admin.ask("POST", "/admin/servers/s1/pause") == (200, {"server_id": "s1", "state": "paused"})
    assert await admin.ask("POST", "/admin/servers/s1/resume") == (200, {"server_id": "s1", "state": "serving"})
    assert await admin.ask("POST", "/admin/servers/s1/drain") == (200, {"server_id": "s1", "state": "draining"})
    other = await fleet.server("s2", register=False)
    replaced = await admin.ask("PUT", "/admin/servers/s2?replaces=s1", {"url": other.url, "engine": "vllm"})
    assert replaced == (200, {"server_id": "s2"})
    assert await fleet.states() == {"s2": ("serving", None)}
    assert (await admin.ask("DELETE", "/admin/servers/s2"))[0] == 200
    assert await admin.ask("GET", "/admin/servers") == (200, {"servers": []})


async def test_weights_over_http(fleet: Any, admin: Admin) -> None:
    await fleet.server("s1")
    status, body = await admin.ask("POST", "/admin/weights", {"version": 3, "checkpoint": "/c", "servers": ["s1"]})
    assert (status, [(one["step"], one["policy_version"]) for one in body["servers"]]) == (200, [("done", 3)])
    fleet.servers["s1"].answers["load"] = 400
    status, body = await admin.ask("POST", "/admin/weights", {"version": 4, "checkpoint": "/c"})
    assert (status, body["servers"][0]["step"]) == (502, "failed")


async def test_an_update_goes_on_when_whoever_asked_goes_away(fleet: Any, admin: Admin) -> None:
    await fleet.server("s1")
    server = fleet.servers["s1"]
    server.may_load.clear()
    asking = asyncio.create_task(admin.ask("POST", "/admin/weights", {"version": 3, "checkpoint": "/c"}))
    await server.loads.wait()
    asking.cancel()
    server.may_load.set()
    await fleet.until_state("s1", "serving")
    assert await fleet.states() == {"s1": ("serving", 3)}


@pytest.mark.parametrize(
    ("asked", "status", "says"),
    [
        (("PUT", "/admin/servers/s1", {"url": "http://x"}), 400, "missing required field `engine`"),
        (("PUT", "/admin/servers/s1", {"server_id": "s2"}), 400, "is not that of the path"),
        (("PUT", "/admin/servers/s1", []), 400, "Expected `object`"),
        (("PUT", "/admin/servers/n?replaces=s9", {"url": "http://x", "engine": "vllm"}), 400, "no server 's9'"),
        (("POST", "/admin/servers/s9/pause", None), 404, "no server 's9' is in the pool"),
        (("POST", "/admin/servers/s1/drain?timeout_s=nan", None), 400, "between 0 and 86400"),
        (("POST", "/admin/servers/s1/drain?timeout_s=soon", None), 400, "a number of seconds"),
        (("POST", "/admin/weights", {"version": "new"}), 400, "Expected `int`"),
        (("POST", "/admin/weights", {"version": 1, "how": "hope"}), 400, "hope"),
        (("POST", "/admin/weights", {"version": 1, "model": "judge"}), 400, "no server of model 'judge'"),
    ],
)
async def test_what_cannot_be_done_is_said(
    fleet: Any, admin: Admin, asked: tuple[str, str, Any], status: int, says: str
) -> None:
    await fleet.server("s1")
    answered, answer = await admin.ask(*asked)
    assert answered == status
    assert says in answer["error"]["message"]
