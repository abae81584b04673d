"""Settings: what the environment says, and what is said of it when it makes no sense."""

from __future__ import annotations

from pathlib import Path

import pytest

from forkyard.errors import InvalidSetting
from forkyard.settings import ClientSettings, Settings

REFERENCE = Path(__file__).parents[2] / "docs" / "reference" / "settings.md"


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("FORKYARD_LISTEN_PORT", "http", "integer"),
        ("FORKYARD_SSH_PORT", "70000", "65535"),
        ("FORKYARD_ACCEL", "warp", "'tcg'"),
        ("FORKYARD_PREVIEW_DOMAIN", "not a domain", "pattern"),
        ("FORKYARD_DNS_SERVERS", "9.9.9.9:dns", "'dns' is no port"),
        ("FORKYARD_DNS_SERVERS", "9.9.9.9, nameserver", "'nameserver' is no address"),
        ("FORKYARD_DNS_SERVERS", "9.9.9.9:0", "'0' is no port"),
        ("FORKYARD_DNS_SERVERS", "[::1", "'[::1' is no address"),
    ],
)
def test_a_setting_that_makes_no_sense_is_named(
    variable: str, value: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(InvalidSetting) as refused:
        Settings()
    assert refused.value.details["setting"] == variable
    assert variable in refused.value.message and said in refused.value.message


def test_name_servers_are_addresses_with_or_without_a_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORKYARD_DNS_SERVERS", "9.9.9.9, 127.0.0.1:5353 2620:fe::fe [::1]:54")
    wanted = [("9.9.9.9", 53), ("127.0.0.1", 5353), ("2620:fe::fe", 53), ("::1", 54)]
    assert Settings().nameservers == wanted


def test_every_setting_has_its_line_in_the_reference() -> None:
    page = REFERENCE.read_text()
    for cls in (Settings, ClientSettings):
        for name, field in cls.model_fields.items():
            assert f"`{field.alias or 'FORKYARD_' + name.upper()}`" in page
            assert field.description
