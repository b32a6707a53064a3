"""URLs of gateways that a relay can serve, and those that it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollyard.gateway.relay.gateways import GatewayAddress, KnownGateways, parse_address
from rollyard.schemas.errors import ConfigError


@pytest.mark.parametrize(
    ("url", "host", "port", "tls"),
    [
        ("http://127.0.0.1:8400", "127.0.0.1", 8400, False),
        ("http://gateway", "gateway", 80, False),
        ("https://gateway.example", "gateway.example", 443, True),
        ("https://gateway.example:8443/", "gateway.example", 8443, True),
        ("http://[::1]:8400", "::1", 8400, False),
    ],
)
def test_an_address(url: str, host: str, port: int, tls: bool) -> None:
    assert parse_address(url) == GatewayAddress(url=url, host=host, port=port, tls=tls)


@pytest.mark.parametrize(
    "url",
    [
        "http://host/prefix",
        "http://host?x=1",
        "http://user@host",
        "ftp://host",
        "host:80",
        "http://",
        "http://h:no",
        "http://::1:8400",
    ],
)
def test_no_address_for_a_relay(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_address(url)
    assert url in caught.value.message
    assert "[gateway] url" in caught.value.hint


def test_one_that_cannot_be_used_takes_no_other_down(tmp_path: Path) -> None:
    known = KnownGateways(tmp_path / "gateways.json", ["http://a", "http://b/path"])
    assert [each.host for each in known.addresses()] == ["a"]
    [why] = known.refused()
    assert "http://b/path" in why
