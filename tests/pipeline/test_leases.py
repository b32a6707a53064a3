"""Leases: who is alive, by the reader's own clock."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from structlog.testing import CapturingLogger

from rollyard.pipeline import kv
from rollyard.pipeline.bus import Bus
from rollyard.pipeline.kv import Bucket
from rollyard.pipeline.leases import LeaseView, hold_lease
from rollyard.schemas import subjects
from rollyard.schemas.fleet import Lease

LONG = Lease(owner="a place, by any name", lease_s=600)
SHORT = Lease(owner="short", lease_s=0.4)


def leases(bus: Bus) -> Bucket[Lease]:
    return Bucket(bus, subjects.NODES, Lease)


async def until(condition: object) -> None:
    while not condition():  # type: ignore[operator]  # noqa: ASYNC110 - renewed elsewhere
        await asyncio.sleep(0.01)


@asynccontextmanager
async def view_of(bus: Bus) -> AsyncIterator[LeaseView]:
    async with LeaseView.following(bus, subjects.NODES) as view:
        yield view


async def test_a_held_lease_is_known_from_the_start_and_goes_with_its_holder(bus: Bus) -> None:
    async with hold_lease(bus, subjects.NODES, LONG), view_of(bus) as view:
        assert view.alive(LONG.owner)
        assert view.owners() == [LONG.owner]
        assert not view.alive("somebody else")
    assert await leases(bus).get(subjects.token(LONG.owner)) is None
    async with view_of(bus) as view:
        assert view.owners() == []


async def test_nobody_is_dead(bus: Bus) -> None:
    """Calls that no gateway made name nobody; an aggregator must not wait for their ends, nor fail over the name."""
    async with view_of(bus) as view:
        assert not view.alive("")
        assert await view.is_dead("")


async def test_a_view_sees_holders_come_and_go(bus: Bus) -> None:
    async with view_of(bus) as view:
        async with hold_lease(bus, subjects.NODES, LONG):
            await until(lambda: view.alive(LONG.owner))
        await until(lambda: not view.alive(LONG.owner))


async def test_a_lease_lives_as_long_as_it_is_renewed(bus: Bus) -> None:
    renewals = 0

    def renewed() -> None:
        nonlocal renewals
        renewals += 1

    async with view_of(bus) as view:
        async with hold_lease(bus, subjects.NODES, SHORT, release=False, renewed=renewed):
            await until(lambda: view.alive(SHORT.owner))
            while renewals < 8:
                assert view.alive(SHORT.owner)
                await asyncio.sleep(0.02)
        found = await leases(bus).get(SHORT.owner)
        assert found is not None
        assert found[0].renewal >= 6
        # Nobody gave it back, nobody renews it: it runs out, and is still there to be swept up.
        await until(lambda: not view.alive(SHORT.owner))
        assert view.owners() == [SHORT.owner]


async def test_two_holders_of_a_place(bus: Bus) -> None:
    async with view_of(bus) as view, hold_lease(bus, subjects.NODES, SHORT, release=False):
        async with hold_lease(bus, subjects.NODES, SHORT, release=False):
            await until(lambda: view.alive(SHORT.owner))
        for _ in range(30):
            assert view.alive(SHORT.owner)
            await asyncio.sleep(0.02)


async def test_time_in_which_this_process_stood_still_counts_against_nobody(bus: Bus) -> None:
    import time  # noqa: PLC0415

    await leases(bus).put("p", Lease(owner="p", lease_s=1))
    async with view_of(bus) as view:
        assert view.alive("p")
        time.sleep(2.5)  # noqa: ASYNC251 - this is the point
        assert view.alive("p")
        await until(lambda: not view.alive("p"))


async def test_a_record_that_cannot_be_read_hides_no_other(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    alarms = CapturingLogger()
    monkeypatch.setattr(kv, "log", alarms)
    await bus.publish(subjects.kv_subject(subjects.NODES, "broken"), b"\x81broken")
    await leases(bus).put("p", Lease(owner="p", lease_s=600))
    async with view_of(bus) as view:
        assert view.owners() == ["p"]
        await bus.publish(subjects.kv_subject(subjects.NODES, "broken"), b"hello")
        await leases(bus).put("q", Lease(owner="q", lease_s=600))
        await until(lambda: view.alive("q"))
    assert [call.args[0] for call in alarms.calls] == ["value_not_readable"] * 2
    assert alarms.calls[0].kwargs["error"].startswith("broken in bucket nodes: not a Lease")
