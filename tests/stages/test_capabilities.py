"""What a backend lacks is refused by the field's name, and nothing else is refused."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollyard.schemas.sandbox import ImageBuild, Limits, SandboxSpec, SetupStep
from rollyard.stages.capabilities import Capabilities, refusals

NOTHING = Capabilities()
EVERYTHING = Capabilities(
    isolated=True,
    images=True,
    builds=True,
    users=True,
    workdirs=True,
    read_only=True,
    networks=frozenset({"gateway", "none", "allow", "open"}),
    limits=tuple((name, "hard") for name in Limits.__struct_fields__),
)
BUILD = ImageBuild(dockerfile="FROM scratch")
ASKED: dict[str, dict[str, Any]] = {
    "sandbox.image": {"image": "python:3.12"},
    "sandbox.build": {"build": BUILD},
    "sandbox.user": {"user": "1000"},
    "sandbox.workdir": {"workdir": "/testbed"},
    "sandbox.read_only": {"read_only": True},
    "sandbox.network": {"network": "gateway"},
    "sandbox.limits.cpus": {"limits": Limits(cpus=0.5)},
    "sandbox.limits.memory_bytes": {"limits": Limits(memory_bytes=1 << 30)},
    "sandbox.limits.disk_bytes": {"limits": Limits(disk_bytes=1 << 30)},
    "sandbox.limits.max_processes": {"limits": Limits(max_processes=100)},
    "sandbox.limits.max_file_bytes": {"limits": Limits(max_file_bytes=1 << 20)},
    "sandbox.setup[1].user": {"setup": ("true", SetupStep(run="id", user="root"))},
}


def fields(problems: list[str]) -> list[str]:
    return [problem.partition(":")[0] for problem in problems]


@pytest.mark.parametrize("field", ASKED)
def test_each_field_is_refused_where_it_cannot_be_had(field: str) -> None:
    spec = SandboxSpec(**ASKED[field])
    (problem,) = refusals("poor", NOTHING, spec)
    assert problem.startswith(f"{field}: the backend 'poor' ")
    assert refusals("rich", EVERYTHING, spec) == []


@given(st.sets(st.sampled_from(sorted(ASKED))))
def test_all_that_is_asked_in_vain_is_named_at_once(asked: set[str]) -> None:
    wanted: dict[str, Any] = {}
    limits: dict[str, Any] = {}
    for field in asked:
        for name, value in ASKED[field].items():
            if name == "limits":
                limits |= {
                    key: getattr(value, key) for key in Limits.__struct_fields__ if getattr(value, key) is not None
                }
            else:
                wanted[name] = value
    spec = SandboxSpec(**wanted, limits=Limits(**limits))
    both = {"sandbox.build"} if {"sandbox.image", "sandbox.build"} <= asked else set()
    assert set(fields(refusals("poor", NOTHING, spec))) == asked | both
    assert set(fields(refusals("rich", EVERYTHING, spec))) == both


def test_a_task_that_asks_for_nothing_is_welcome_everywhere() -> None:
    assert refusals("poor", NOTHING, SandboxSpec()) == []


def test_hosts_to_allow_go_with_the_network_allow() -> None:
    hosts = ("example.org",)
    assert fields(refusals("rich", EVERYTHING, SandboxSpec(allow_hosts=hosts))) == ["sandbox.allow_hosts"]
    assert refusals("rich", EVERYTHING, SandboxSpec(network="allow", allow_hosts=hosts)) == []


def test_the_default_network_is_the_strictest_with_a_gateway() -> None:
    assert EVERYTHING.network("default") == "gateway"
    assert NOTHING.network("default") == "open"
    assert EVERYTHING.network("none") == "none"
