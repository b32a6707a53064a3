"""Behaviours: whose sandbox it is can always be told, and from where it can be reached."""

from __future__ import annotations

from typing import Final

from msgspec import structs

from rollyard.stages.conformance.behaviour import Group
from rollyard.stages.conformance.bench import Bench, expect, refused, same

labels: Final = Group("labels")


@labels()
async def listed(bench: Bench) -> None:
    """Every sandbox is listed with the labels that it was made with, and none after its end"""
    given = bench.labels()
    async with bench.fresh(given) as sandbox:
        found = [known for ref, known in await bench.backend.list_owned() if ref == sandbox.ref]
        same(found, [given], "labels in the list")
        same((sandbox.ref.backend, sandbox.ref.place), (bench.backend.name, bench.backend.place), "reference")
        expect(bench.backend.reaches(sandbox.ref.place), "its own place is out of reach")
    refs = [ref for ref, _ in await bench.backend.list_owned()]
    expect(sandbox.ref not in refs, "it is still listed after its end")


@labels()
async def other_place(bench: Bench) -> None:
    """A sandbox of another place or backend is refused"""
    ref = bench.sandbox.ref
    expect(not bench.backend.reaches("another-place-0123456789"), "another place is called its own")
    await refused("a sandbox of another backend", bench.backend.open(structs.replace(ref, backend="another")))
    if ref.place != "any":
        await refused("a sandbox of another place", bench.backend.open(structs.replace(ref, place="another-place-0")))


@labels()
async def lease(bench: Bench) -> None:
    """The lease can be renewed, twice at a time too"""
    await bench.backend.renew_lease()
    await bench.backend.renew_lease()
