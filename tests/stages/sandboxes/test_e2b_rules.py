"""The pure parts of the backend `e2b`: network rules, references, time limits, pauses, errors."""

from __future__ import annotations

import httpx
import msgspec
import pytest
from e2b.exceptions import (
    AuthenticationException,
    NotEnoughSpaceException,
    RateLimitException,
    SandboxException,
    SandboxNotFoundException,
    SandboxNotRunningException,
    ServiceBusyException,
)
from e2b_server.egress import Rules as FirewallRules
from hypothesis import given
from hypothesis import strategies as st

from rollyard.schemas.errors import ConfigError, SandboxError
from rollyard.schemas.sandbox import NetworkMode
from rollyard.stages.sandbox import Labels, open_backend
from rollyard.stages.sandboxes.e2b_clients import MAX_PAUSE_S, PoolKey, backoff_pauses
from rollyard.stages.sandboxes.e2b_errors import converted, is_busy, is_gone, sandbox_error
from rollyard.stages.sandboxes.e2b_identity import (
    Handle,
    Placing,
    is_due,
    metadata_of,
    read_metadata,
    timeout_of,
)
from rollyard.stages.sandboxes.e2b_network import GatewayAddress, rules_for

addresses = st.ip_addresses(v=4).map(str)
hosts = st.lists(st.sampled_from(["a", "files", "x-1"]), min_size=2, max_size=3).map(".".join)
labels = st.builds(
    Labels,
    run=st.text(min_size=1, max_size=20),
    rollout_id=st.text(min_size=1, max_size=20),
    attempt=st.integers(1, 9),
    owner=st.text(max_size=20),
    created_ms=st.integers(0, 1 << 45),
    role=st.sampled_from(["agent", "eval", "warm", "check"]),
)
placings = st.builds(
    Placing,
    deadline_ms=st.integers(0, 1 << 45),
    workdir=st.sampled_from(["", "/testbed"]),
    user=st.sampled_from(["", "user", "root", "agent"]),
    max_file_bytes=st.integers(0, 1 << 40),
    gateway=st.booleans(),
)


@given(st.sampled_from(["gateway", "none", "allow", "open"]), st.lists(addresses), st.lists(addresses), addresses)
def test_rules_mean_what_the_mode_says(mode: NetworkMode, allow: list[str], gateway: list[str], other: str) -> None:
    rules = rules_for(mode, allow, gateway)
    firewall = FirewallRules(rules.allow, rules.deny)
    assert not FirewallRules.problem(rules.allow, rules.deny)
    wanted = {"gateway": gateway, "none": [], "allow": [*gateway, *allow], "open": [other]}[mode]
    for address in wanted:
        assert firewall.allows(address)
    if other not in wanted:
        assert not firewall.allows(other)


@given(st.lists(hosts, min_size=1), hosts)
def test_names_are_allowed_as_names(allow: list[str], other: str) -> None:
    rules = rules_for("allow", [name.upper() for name in allow], ["gateway.example"])
    firewall = FirewallRules(rules.allow, rules.deny)
    assert not FirewallRules.problem(rules.allow, rules.deny)
    assert all(firewall.allows("198.51.100.1", name) for name in [*allow, "gateway.example"])
    assert firewall.allows("198.51.100.1", other) == (other in allow)


def test_the_gateway_is_known_by_name_only_where_the_firewall_reads_names() -> None:
    assert GatewayAddress.of("https://gateway.example/x").known_by_name()
    for url in ("http://gateway.example", "https://gateway.example:8443", "https://203.0.113.7"):
        assert not GatewayAddress.of(url).known_by_name()
    assert GatewayAddress.of("http://203.0.113.7:8100") == GatewayAddress("203.0.113.7", 8100, False)


@pytest.mark.parametrize("url", ["", "gateway:80", "ftp://gateway", "http://", "http://gateway:no"])
def test_an_address_that_is_none_is_refused_with_the_setting(url: str) -> None:
    with pytest.raises(SandboxError, match=r"\[gateway\] url"):
        GatewayAddress.of(url)


@given(labels, placings, st.text(st.characters(codec="ascii", categories=["L", "N"]), min_size=1))
def test_what_is_written_on_a_sandbox_gives_its_reference(made: Labels, placing: Placing, sandbox_id: str) -> None:
    read_labels, read_placing = read_metadata(metadata_of("here", made, placing))
    assert (read_labels, read_placing) == (made, placing)
    handle = Handle.of(sandbox_id, placing)
    assert Handle.of(sandbox_id, read_placing).text() == handle.text()
    assert Handle.parse(handle.text()) == handle


@given(st.dictionaries(st.sampled_from(["rollyard-labels", "rollyard-placing", "x"]), st.text()))
def test_metadata_of_somebody_else_is_an_orphan_of_no_run(metadata: dict[str, str]) -> None:
    read_labels, placing = read_metadata(metadata)
    assert (read_labels.run, read_labels.created_ms, placing.deadline_ms) == ("", 0, 0)


def test_a_foreign_handle_is_refused() -> None:
    with pytest.raises(SandboxError, match="is no sandbox of E2B"):
        Handle.parse("/some/folder")


@given(placings, st.floats(2, 86_400), st.integers(0, 1 << 45))
def test_no_time_limit_passes_the_deadline(placing: Placing, timeout_s: float, now_ms: int) -> None:
    timeout = timeout_of(placing, timeout_s, now_ms)
    assert 1 <= timeout <= timeout_s + 1
    assert now_ms + timeout * 1000 < max(placing.deadline_ms, now_ms) + 2000


@given(placings, st.floats(2, 86_400), st.integers(0, 1 << 45), st.integers(-10, 86_400_000))
def test_a_sandbox_is_extended_in_the_second_half_of_its_time(
    placing: Placing, timeout_s: float, now_ms: int, left_ms: int
) -> None:
    end_ms = now_ms + left_ms
    due = is_due(placing, timeout_s, now_ms, end_ms)
    assert due == (left_ms < timeout_s * 500 and placing.deadline_ms > max(now_ms, end_ms))


@given(st.integers(1, 20), st.floats(0, 1))
def test_pauses_grow_are_bounded_and_left_to_chance(max_tries: int, unit: float) -> None:
    pauses = list(backoff_pauses(max_tries, lambda: unit))
    assert len(pauses) == max_tries - 1
    assert pauses == sorted(pauses)
    assert all(0 < pause <= MAX_PAUSE_S for pause in pauses)
    if pauses:
        least, most = next(backoff_pauses(2, lambda: 0.0)), next(backoff_pauses(2, lambda: 1.0))
        assert least < most


def test_a_pool_key_is_its_version_and_no_other_key() -> None:
    first, second = PoolKey("2", 0), PoolKey("2", 1)
    assert first == "2" and first in ("1.1", "2") and first != "1.1"
    assert first != second and first == PoolKey("2", 0)
    assert len({first: 1, second: 2, PoolKey("2", 0): 3}) == 2


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (SandboxNotFoundException("x"), "the sandbox is gone"),
        (SandboxNotRunningException("x"), "the sandbox is gone"),
        (AuthenticationException("401"), r"\[backends.e2b\] api_key_env"),
        (RateLimitException("429"), "max_creates"),
        (ServiceBusyException("503"), "max_creates"),
        (NotEnoughSpaceException("507"), "disk is full"),
        (SandboxException("404: no template", status_code=404), "sandbox.image"),
        (httpx.ConnectError("refused"), "gives no answer"),
        (msgspec.DecodeError("a page of HTML"), "DecodeError"),
    ],
)
def test_every_error_says_what_to_do(error: Exception, says: str) -> None:
    with pytest.raises(SandboxError, match=says), converted("it failed"):
        raise error
    assert str(sandbox_error("it failed", error)).startswith("it failed: ")


def test_busy_and_gone_are_told_apart() -> None:
    assert is_busy(RateLimitException("x")) and is_busy(SandboxException("502", status_code=502))
    assert not is_busy(SandboxException("400", status_code=400)) and not is_busy(AuthenticationException("401"))
    assert is_gone(SandboxNotFoundException("x")) and not is_gone(RateLimitException("x"))


def test_settings_that_are_not_acceptable_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("E2B_API_KEY", raising=False)
    with pytest.raises(ConfigError, match="E2B_API_KEY"):
        open_backend("e2b", {"root": "/nowhere"})
    monkeypatch.setenv("E2B_API_KEY", "k")
    with pytest.raises(ConfigError, match="clients"):
        open_backend("e2b", {"root": "/nowhere", "clients": 0})
    with pytest.raises(ConfigError, match="no_such"):
        open_backend("e2b", {"root": "/nowhere", "no_such": 1})


def test_the_place_is_that_of_key_service_and_installation(monkeypatch: pytest.MonkeyPatch) -> None:
    def place(key: str, **settings: str) -> str:
        monkeypatch.setenv("E2B_API_KEY", key)
        return open_backend("e2b", {"root": "/nowhere", **settings}).place

    assert place("k") == place("k") and place("k")[4:] != "k"
    different = {place("k"), place("l"), place("k", domain="e2b.example"), place("k", installation="other")}
    assert len(different) == 4
    assert all(name.startswith("e2b-") and len(name) == 20 for name in different)
