"""Which guests trust our authority, and what becomes of secrets when keys and files go wrong."""

from __future__ import annotations

import stat
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from forkyard.control import network
from forkyard.control.plane import ControlPlane
from forkyard.control.secrets import Vault
from forkyard.control.trust import BUNDLE, CERTIFICATE
from forkyard.errors import ForkyardError, GuestFailure, HostFailure
from forkyard.guest.base import Guest
from forkyard.hosts.base import Incarnation
from forkyard.hosts.memory import MemoryHost
from forkyard.models import SandboxCreate, SandboxFork, SandboxInfo
from forkyard.models.network import EgressPolicy, NetworkPolicy, Secret
from forkyard.net.authority import Authority
from forkyard.store.sql import Store

pytestmark = pytest.mark.anyio
SECRETS = {"TOKEN": Secret(hosts=["a.test"], value="value-of-it")}
THEIRS = b"-----BEGIN CERTIFICATE-----\nof somebody\n-----END CERTIFICATE-----\n"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority.load_or_make(tmp_path / "authority")


@pytest.fixture
async def control(store: Store, host: MemoryHost, authority: Authority) -> AsyncIterator[ControlPlane]:
    control = ControlPlane(store, host, authority=authority)
    await control.start()
    yield control
    await control.stop(destroy=True)


async def read(guest: Guest, path: str) -> bytes:
    try:
        async with guest.read_file(path) as chunks:
            return b"".join([chunk async for chunk in chunks])
    except ForkyardError:
        return b""


async def write(guest: Guest, path: str, content: bytes) -> None:
    async def once() -> AsyncIterator[bytes]:
        yield content

    await guest.write_file(path, once())


def guest(host: MemoryHost, info: SandboxInfo, number: int = 1) -> Guest:
    return host.guest(Incarnation(info.id, number))


def policy(**egress: str) -> NetworkPolicy:
    return NetworkPolicy(egress=EgressPolicy(preset="none", **egress))  # type: ignore[arg-type]


async def test_a_sandbox_with_secrets_trusts_it_and_another_does_not(
    control: ControlPlane, host: MemoryHost, authority: Authority
) -> None:
    ours = authority.certificate_pem.encode()
    one = await control.sandboxes.create(SandboxCreate(secrets=SECRETS))
    other = await control.sandboxes.create(SandboxCreate())
    assert await read(guest(host, one), CERTIFICATE) == ours
    assert await read(guest(host, one), BUNDLE) == ours
    assert await read(guest(host, other), BUNDLE) == b""
    assert host.world.machines[Incarnation(one.id, 1)].spec.env["REQUESTS_CA_BUNDLE"] == BUNDLE
    assert "REQUESTS_CA_BUNDLE" not in host.world.machines[Incarnation(other.id, 1)].spec.env


async def test_a_change_of_policy_gives_and_takes_it_and_leaves_the_rest(
    control: ControlPlane, host: MemoryHost, authority: Authority
) -> None:
    ours = authority.certificate_pem.encode()
    info = await control.sandboxes.create(SandboxCreate())
    await write(guest(host, info), BUNDLE, THEIRS)
    for _ in range(2):
        await control.networks.set(info.id, policy(record="x"))
        assert await read(guest(host, info), BUNDLE) == THEIRS + ours
    await control.networks.set(info.id, policy())
    assert await read(guest(host, info), BUNDLE) == THEIRS
    assert not await guest(host, info).exists(CERTIFICATE)


async def test_a_change_while_it_sleeps_reaches_the_guest_when_it_wakes(
    control: ControlPlane, host: MemoryHost, authority: Authority
) -> None:
    info = await control.sandboxes.create(SandboxCreate())
    await control.sleep.pause(info.id)
    await control.networks.set(info.id, policy(record="x"))
    child = (await control.forks.fork(info.id, SandboxFork())).children[0].sandbox
    await control.sleep.resume(info.id)
    assert child is not None
    for one in (info, child):
        assert await read(guest(host, one), BUNDLE) == authority.certificate_pem.encode()


async def test_from_a_snapshot_it_is_taken_if_it_is_not_wanted(
    control: ControlPlane, host: MemoryHost, authority: Authority
) -> None:
    info = await control.sandboxes.create(SandboxCreate(secrets=SECRETS))
    snapshot = await control.snapshots.create(info.id)
    plain = await control.sandboxes.create(SandboxCreate(snapshot=snapshot.id))
    assert authority.certificate_pem.encode() not in await read(guest(host, plain), BUNDLE)


async def test_a_guest_is_told_only_what_it_did_not_know_when_the_snapshot_was_taken(
    control: ControlPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To tell it takes longer than all the rest of a create."""
    told: list[str] = []

    async def tell(word: str) -> None:
        told.append(word)

    monkeypatch.setattr(network, "trust", lambda *_: tell("trust"))
    monkeypatch.setattr(network, "distrust", lambda *_: tell("distrust"))
    info = await control.sandboxes.create(SandboxCreate())
    without = await control.snapshots.create(info.id)
    await control.networks.set(info.id, policy(record="x"))
    trusting = await control.snapshots.create(info.id)
    await control.networks.set(info.id, policy())
    assert told == ["trust", "distrust"]
    for snapshot, secrets, expected in (
        (without, {}, []),
        (without, SECRETS, ["trust"]),
        (trusting, SECRETS, []),
        (trusting, {}, ["distrust"]),
    ):
        told.clear()
        wanted = SandboxCreate(snapshot=snapshot.id, secrets=secrets, network=policy())
        copy = await control.sandboxes.create(wanted)
        assert told == expected
        again = await control.snapshots.create(copy.id)
        await control.sandboxes.create(wanted.model_copy(update={"snapshot": again.id}))
        assert told == expected, "a copy of the copy knows it too"


async def test_a_guest_that_could_not_be_told_is_told_when_it_next_comes_to_life(
    control: ControlPlane, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fails(*_: object) -> None:
        raise GuestFailure("its disk is full")

    with monkeypatch.context() as patched:
        patched.setattr(network, "trust", fails)
        info = await control.sandboxes.create(SandboxCreate(secrets=SECRETS))
    assert (await control.ground.record(info.id)).trusts_ca is None
    snapshot = await control.snapshots.create(info.id)
    told: list[object] = []

    async def tell(*_: object) -> None:
        told.append(1)

    monkeypatch.setattr(network, "distrust", tell)
    await control.sandboxes.create(SandboxCreate(snapshot=snapshot.id, network=policy()))
    assert told, "half of it may be in there"


# ── the vault ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_what_was_sealed_is_opened_by_the_same_key_and_name_only(tmp_path: Path) -> None:
    vault = Vault.load_or_make(tmp_path / "key")
    sealed = vault.seal("TOKEN", "välue")
    assert Vault.load_or_make(tmp_path / "key").open("TOKEN", sealed) == "välue"
    assert "välue" not in sealed
    for other, name in ((Vault(), "TOKEN"), (vault, "OTHER")):
        with pytest.raises(HostFailure, match="cannot be decrypted"):
            other.open(name, sealed)
    assert stat.S_IMODE((tmp_path / "key").stat().st_mode) == 0o600


def test_a_damaged_key_file_says_so(tmp_path: Path) -> None:
    (tmp_path / "key").write_bytes(b"short")
    with pytest.raises(HostFailure, match="5 bytes instead of 32"):
        Vault.load_or_make(tmp_path / "key")


async def test_a_daemon_that_lost_the_key_starts_and_leaves_the_secret_out(store: Store, host: MemoryHost) -> None:
    first = ControlPlane(store, host)
    await first.start()
    info = await first.sandboxes.create(SandboxCreate(secrets=SECRETS))
    await first.stop()
    second = ControlPlane(store, host)
    await second.start()
    network = host.world.machines[Incarnation(info.id, 1)].network
    assert network is not None
    assert (network.egress.preset, network.injections) == ("coding", {})
    await second.stop(destroy=True)
