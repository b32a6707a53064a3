"""A gateway process: everything started in order, and stopped so that nothing which is owed stays unwritten."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final
from uuid import uuid4

import structlog
from aiohttp import web
from prometheus_client import CollectorRegistry

from rollyard.gateway.app import SERVED, AccessLog, make_app
from rollyard.gateway.calls import Gateway
from rollyard.gateway.desk import PoolDesk
from rollyard.gateway.engines import engines
from rollyard.gateway.engines.control import controls
from rollyard.gateway.engines.upstream import http_client
from rollyard.gateway.history import Canonical
from rollyard.gateway.lease import GatewayLease
from rollyard.gateway.logguard import LogGuard
from rollyard.gateway.metrics import GatewayMetrics
from rollyard.gateway.models import RunModels
from rollyard.gateway.pool import ServerPool
from rollyard.gateway.recorder import Recorder
from rollyard.gateway.renderers import Renderers
from rollyard.gateway.sessions import Sessions
from rollyard.gateway.settings import GatewaySettings
from rollyard.pipeline.blobs import BlobStore
from rollyard.pipeline.bus import Bus
from rollyard.pipeline.config import Config
from rollyard.pipeline.streams import ensure
from rollyard.schemas.errors import SetupError

log = structlog.get_logger(__name__)

CONNECT_WAIT_S: Final = 60.0
START_TIMEOUT_S: Final = 30.0
HOUSEKEEPING_S: Final = 2.0


class RunningGateway:
    """A gateway that serves at `url`."""

    def __init__(self, url: str, gateway: Gateway) -> None:
        self.url = url
        self.gateway = gateway
        self.incarnation = gateway.incarnation


@asynccontextmanager
async def gateway_service(
    bus: Bus, settings: GatewaySettings, registry: CollectorRegistry | None = None
) -> AsyncIterator[RunningGateway]:
    """A gateway that serves until the block ends. Raises BusError, or SetupError when its port is taken.

    At the end it stops listening, lets calls finish for `drain_s`, aborts the rest, and writes the ends that it owes.
    """
    metrics = GatewayMetrics(registry or CollectorRegistry())
    incarnation = f"gw-{uuid4().hex}"
    lease = GatewayLease(bus, incarnation, settings.lease_s)
    recorder = Recorder(bus, metrics)
    async with http_client() as client, recorder.running(settings.flush_s):
        kinds = engines(client)
        canonical = Canonical(settings.canonical_off)
        renderers = Renderers()
        pool = ServerPool(bus, kinds, renderers.prepare)
        gateway = Gateway(
            bus=bus,
            incarnation=incarnation,
            settings=settings,
            engines=kinds,
            pool=pool,
            desk=PoolDesk(bus, incarnation, pool, controls(client)),
            sessions=Sessions(canonical, settings.cache_max_bytes),
            canonical=canonical,
            recorder=recorder,
            renderers=renderers,
            guard=LogGuard(bus, metrics, settings.full_at),
            metrics=metrics,
            run_models=RunModels(bus),
        )
        # Before the first call can be dispatched: a weight update asks every gateway that holds a lease.
        await lease.renew(settings.public_url)
        async with _background(gateway, settings), _listening(gateway, settings) as url:
            public_url = settings.public_url or url
            await lease.renew(public_url)
            renewing = asyncio.create_task(lease.run(public_url))
            log.info("gateway_started", url=url, incarnation=incarnation)
            try:
                yield RunningGateway(url, gateway)
            finally:
                log.info("gateway_stopping", calls=sum(map(len, gateway.in_flight.values())))
                renewing.cancel()
    await lease.release()


async def serve_gateway(config: Config, stop: asyncio.Event) -> None:
    """A gateway process: serve until `stop` is set, then drain. Raises ConfigError, BusError, SetupError."""
    settings = settings_of(config)
    blobs = BlobStore(config.blobs_dir())
    async with Bus.connect(config.nats.url, name="gateway", blobs=blobs, wait_s=CONNECT_WAIT_S) as bus:
        await ensure(bus, config.limits)
        async with gateway_service(bus, settings):
            await stop.wait()


def settings_of(config: Config) -> GatewaySettings:
    """The part of the configuration that a gateway needs. Raises ConfigError when there is no secret."""
    return GatewaySettings(
        secret=config.secret(),
        admin_token=config.admin_token(),
        host=config.gateway.host,
        port=config.gateway.port,
        public_url=config.gateway.url.rstrip("/"),
        lease_s=config.worker.lease_s,
    )


@asynccontextmanager
async def _background(gateway: Gateway, settings: GatewaySettings) -> AsyncIterator[None]:
    """What follows the bus beside the calls. A task that breaks ends the process: it would serve on old knowledge."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(gateway.closed.run()),
                group.create_task(gateway.pool.run()),
                group.create_task(gateway.run_models.run()),
                group.create_task(gateway.desk.run()),
                group.create_task(gateway.guard.run(settings.poll_s)),
                group.create_task(_housekeep(gateway)),
            ]
            try:
                await _know_closed_sessions(gateway)
                await gateway.desk.ready.wait()
                yield
            finally:
                for task in tasks:
                    task.cancel()
    except BaseExceptionGroup as group_error:
        # What the block itself raises is nearly always alone, and its callers look for it by its class.
        if len(group_error.exceptions) == 1:
            raise group_error.exceptions[0] from None
        raise


async def _know_closed_sessions(gateway: Gateway) -> None:
    try:
        async with asyncio.timeout(START_TIMEOUT_S):
            await gateway.closed.ready.wait()
    except TimeoutError:
        raise SetupError(
            f"the closed sessions were not read from the bus within {START_TIMEOUT_S:g} s",
            hint="is the bucket `sessions` there? `rollyard doctor` tells",
        ) from None


async def _housekeep(gateway: Gateway) -> None:
    while True:
        await asyncio.sleep(HOUSEKEEPING_S)
        gateway.sessions.trim()
        for rule, count in gateway.canonical.counts.items():
            gateway.metrics.canonical.labels(rule).set(count)


async def _drop_silent(server: web.Server, served: set[web.RequestHandler], limit_s: float) -> None:
    """Close connections that have not sent the headers of a first request in time; aiohttp has no limit for that."""
    since_s: dict[web.RequestHandler, float] = {}
    while True:
        await asyncio.sleep(limit_s / 4)
        now_s = time.monotonic()
        served.intersection_update(server.connections)
        waiting = [each for each in server.connections if each not in served]
        since_s = {each: since_s.get(each, now_s) for each in waiting}
        for each, began_s in since_s.items():
            if now_s - began_s > limit_s:
                each.force_close()
                if each.transport is not None:
                    each.transport.abort()


@asynccontextmanager
async def _listening(gateway: Gateway, settings: GatewaySettings) -> AsyncIterator[str]:
    app = make_app(gateway)
    runner = web.AppRunner(
        app,
        # A request whose client is gone is cancelled, and with it the call at the model server.
        handler_cancellation=True,
        access_log_class=AccessLog,
        max_line_size=settings.max_header_bytes,
        max_field_size=settings.max_header_bytes,
        shutdown_timeout=settings.drain_s,
    )
    await runner.setup()
    try:
        site = web.TCPSite(runner, settings.host, settings.port)
        try:
            await site.start()
        except OSError as error:
            raise SetupError(
                f"the gateway cannot listen on {settings.host}:{settings.port}: {os.strerror(error.errno or 0)}",
                hint="stop what uses the port, or choose another one",
            ) from error
        host, port = runner.addresses[0][:2]
        assert runner.server is not None
        watching = asyncio.create_task(_drop_silent(runner.server, app[SERVED], settings.header_timeout_s))
        try:
            yield f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        finally:
            watching.cancel()
    finally:
        await runner.cleanup()
        await gateway.stop()
