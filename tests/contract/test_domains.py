"""Domains of users: verified by a record that a name server on loopback holds, mapped, mapped anew."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from websockets.asyncio.client import connect
from websockets.asyncio.server import ServerConnection, serve

from forkyard.errors import HostFailure
from forkyard.gateway import tls
from forkyard.gateway.certificates import Brought
from forkyard.gateway.server import Server, configured
from forkyard.net.authority import Authority

from .conftest import running_world
from .gateway_yard import Yard, backend, running_yard
from .zone import Zone

pytestmark = pytest.mark.anyio
NAME = "app.example.test"


@pytest.fixture
def zone() -> Iterator[Zone]:
    with Zone() as zone:
        yield zone


@pytest.fixture
async def yard(tmp_path: Path, zone: Zone) -> AsyncIterator[Yard]:
    async with running_world(tmp_path) as world, running_yard(world) as yard:
        world.control.domains.nameservers = [zone.address]
        yield yard


async def added(yard: Yard, port: int, name: str = NAME) -> dict[str, str]:
    body = {"domain": name, "sandbox_id": yard.sandbox_id, "port": port}
    answer = await yard.world.client.post("/domains", json=body)
    assert answer.status_code == 201, answer.text
    return dict(answer.json())


async def opened(yard: Yard, name: str = NAME, **headers: str) -> httpx.Response:
    return await yard.client.get("/x", headers={"Host": name, **headers})


async def test_a_domain_serves_once_its_record_was_seen(yard: Yard, zone: Zone) -> None:
    async with backend() as guest:
        info = await added(yard, guest.port)
        assert (info["record_name"], info["verified"]) == (f"_forkyard.{NAME}", False)
        before = await opened(yard, Accept="text/html")
        assert before.status_code == 409
        assert info["record_value"] in before.text

        async def verify() -> httpx.Response:
            return await yard.world.client.post(f"/domains/{NAME}/verify")

        missing = await verify()
        assert (missing.status_code, missing.json()["code"]) == (409, "domain_unverified")
        assert "there is none" in missing.json()["detail"]
        zone.records[info["record_name"]] = ["v=spf1 -all", "wrong"]
        assert "'wrong'" in (await verify()).json()["detail"]
        zone.records[info["record_name"]] += [info["record_value"]]
        assert (await verify()).json()["verified"] is True
        zone.records.clear()
        assert (await verify()).json()["verified"] is True
        assert (await opened(yard, NAME.upper() + ":443")).text == "hello"
        assert guest.seen[0].headers["host"] == NAME.upper() + ":443"
        assert guest.seen[0].headers["x-forwarded-host"] == NAME.upper() + ":443"


async def test_a_domain_is_mapped_to_a_fork_without_a_gap(yard: Yard, zone: Zone) -> None:
    async with backend() as one, backend(lambda _: b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nnew") as two:
        info = await added(yard, one.port)
        zone.records[info["record_name"]] = [info["record_value"]]
        await yard.world.client.post(f"/domains/{NAME}/verify")
        texts: list[str] = []
        done = asyncio.Event()

        async def keep_asking() -> None:
            while not done.is_set():
                answer = await opened(yard)
                assert answer.status_code == 200
                texts.append(answer.text)

        asking = asyncio.create_task(keep_asking())
        while len(texts) < 5:
            await asyncio.sleep(0.01)
        (fork,) = (await yard.world.client.post(f"/sandboxes/{yard.sandbox_id}/fork", json={})).json()["children"]
        body = {"sandbox_id": fork["sandbox"]["id"], "port": two.port}
        mapped = await yard.world.client.put(f"/domains/{NAME}", json=body)
        assert (mapped.status_code, mapped.json()["verified"]) == (200, True)
        already = len(texts)
        while len(texts) < already + 5:
            await asyncio.sleep(0.01)
        done.set()
        await asking
        assert set(texts[already + 1 :]) == {"new"}
        assert "hello" in texts


async def test_a_name_that_nobody_mapped_is_said_so(yard: Yard) -> None:
    page = await opened(yard, "nobody.example.test", Accept="text/html")
    assert page.status_code == 404
    assert "no sandbox is mapped to the name" in page.text.lower()
    assert (await opened(yard, "nobody.example.test")).json()["code"] == "domain_not_found"
    # Nor is it a way to the API, whoever pointed it here.
    rebound = await yard.client.get("/api/v1/health", headers={"Host": "nobody.example.test"})
    assert rebound.status_code == 404


async def test_domains_are_listed_and_removed(yard: Yard) -> None:
    await added(yard, 3000)
    twice = await yard.world.client.post("/domains", json={"domain": NAME, "sandbox_id": yard.sandbox_id, "port": 1})
    assert (twice.status_code, twice.json()["code"]) == (409, "conflict")
    (listed,) = (await yard.world.client.get("/domains")).json()["items"]
    assert (listed["domain"], listed["port"]) == (NAME, 3000)
    assert (await yard.world.client.delete(f"/domains/{NAME}")).status_code == 204
    for verb, path in (("DELETE", NAME), ("POST", f"{NAME}/verify")):
        gone = await yard.world.client.request(verb, f"/domains/{path}")
        assert (gone.status_code, gone.json()["code"]) == (404, "domain_not_found")


@pytest.mark.parametrize(
    "domain", ["localhost", "3000-x.localhost", "*.example.com", "*", "com", "127.0.0.1", "a b.com", "", "x" * 300]
)
async def test_names_that_cannot_be_mapped_are_refused(yard: Yard, domain: str) -> None:
    body = {"domain": domain, "sandbox_id": yard.sandbox_id, "port": 3000}
    answer = await yard.world.client.post("/domains", json=body)
    assert (answer.status_code, answer.json()["code"]) == (422, "invalid_request")
    assert "domain" in str(answer.json()["details"])


async def test_a_domain_needs_a_sandbox_and_a_port(yard: Yard) -> None:
    body = {"domain": NAME, "sandbox_id": "nobody", "port": 3000}
    assert (await yard.world.client.post("/domains", json=body)).json()["code"] == "sandbox_not_found"
    body = {"domain": NAME, "sandbox_id": yard.sandbox_id, "port": 70000}
    assert (await yard.world.client.post("/domains", json=body)).status_code == 422


async def test_a_name_server_that_does_not_answer_is_said_so(yard: Yard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forkyard.control.domains.LOOKUP_S", 0.2)
    transport, _ = await asyncio.get_running_loop().create_datagram_endpoint(asyncio.DatagramProtocol, ("127.0.0.1", 0))
    yard.world.control.domains.nameservers = [transport.get_extra_info("sockname")[:2]]
    await added(yard, 3000)
    answer = await yard.world.client.post(f"/domains/{NAME}/verify")
    assert (answer.status_code, answer.json()["code"]) == (504, "timeout")
    transport.close()


# ── TLS ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@contextlib.asynccontextmanager
async def tls_port(yard: Yard, context: ssl.SSLContext) -> AsyncIterator[int]:
    config = configured(yard.gateway, grace_s=1)
    config.host, config.port = "127.0.0.1", 0
    config.load()
    config.ssl = context
    server = Server(config, signals=False)
    serving = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.005)
    try:
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = True
        await serving


async def test_https_with_certificates_of_our_own(yard: Yard, zone: Zone, tmp_path: Path) -> None:
    authority = await asyncio.to_thread(Authority.load_or_make, tmp_path / "ca")
    domains = yard.world.control.domains
    trust = ssl.create_default_context(cadata=authority.certificate_pem)
    async with backend() as guest, tls_port(yard, tls.context(authority, "localhost", domains.is_verified)) as port:

        async def ask(name: str | None) -> str:
            """The answer, to a client that insists on the certificate being for this name."""
            trust.check_hostname = name is not None
            reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trust, server_hostname=name or "")
            writer.write(f"GET / HTTP/1.1\r\nHost: {name or 'localhost'}\r\nConnection: close\r\n\r\n".encode())
            answer = await reader.read()
            writer.close()
            return answer.decode()

        preview = f"{guest.port}-{yard.sandbox_id}.localhost"
        assert (await ask(preview)).endswith("hello")
        assert guest.seen[0].headers["x-forwarded-proto"] == "https"
        assert guest.seen[0].headers["x-forwarded-port"] == "443"
        assert "/api/v1/docs" in await ask("localhost")
        assert "/api/v1/docs" in await ask(None)  # without SNI
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await ask(NAME)
        info = await added(yard, guest.port)
        zone.records[info["record_name"]] = [info["record_value"]]
        await yard.world.client.post(f"/domains/{NAME}/verify")
        assert (await ask(NAME)).endswith("hello")


async def test_websockets_over_tls(yard: Yard, tmp_path: Path) -> None:
    async def echo(socket: ServerConnection) -> None:
        assert socket.request is not None
        await socket.send(socket.request.headers["X-Forwarded-Proto"])

    authority = await asyncio.to_thread(Authority.load_or_make, tmp_path / "ca")
    trust = ssl.create_default_context(cadata=authority.certificate_pem)
    async with (
        serve(echo, "127.0.0.1", 0) as guest,
        tls_port(yard, tls.context(authority, "localhost", lambda _: False)) as port,
    ):
        name = f"{guest.sockets[0].getsockname()[1]}-{yard.sandbox_id}.localhost"
        async with connect(f"wss://{name}:{port}/", host="127.0.0.1", port=port, ssl=trust, proxy=None) as socket:
            assert await socket.recv() == "https"


def put_certificate(chain: Path, key_file: Path, *names: str, key: ec.EllipticCurvePrivateKey | None = None) -> None:
    """One that signs itself, in place of what was there."""
    own = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, names[0])])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder(subject, subject, own.public_key(), x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name) for name in names]), critical=False)
        .sign(own, hashes.SHA256())
    )
    encoding, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    shown = (key or own).private_bytes(encoding, form, serialization.NoEncryption())
    chain.parent.mkdir(exist_ok=True)
    for path, content in ((key_file, shown), (chain, certificate.public_bytes(encoding))):
        new = path.with_suffix(".new")
        new.write_bytes(content)
        new.replace(path)


async def shown_names(port: int, name: str | None) -> list[str]:
    """Whom the certificate is for that a client sees who asks for this name."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context, server_hostname=name or "")
    shown = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    certificate = x509.load_der_x509_certificate(shown)
    found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return found.get_values_for_type(x509.DNSName)


async def test_each_name_is_shown_the_certificate_for_it(yard: Yard, tmp_path: Path) -> None:
    authority = await asyncio.to_thread(Authority.load_or_make, tmp_path / "ca")
    first, more = (tmp_path / "cert.pem", tmp_path / "key.pem"), tmp_path / "more"
    put_certificate(*first, "*.brought.test", "brought.test")
    more.mkdir()
    put_certificate(more / "one.pem", more / "one.key", "one.test")
    put_certificate(more / "two" / "fullchain.pem", more / "two" / "privkey.pem", "two.test", "*.two.test")
    (more / "README").write_text("not one of them")
    mapped = ("one.test", "app.two.test", "bare.test")
    context = tls.context(authority, "brought.test", mapped.__contains__, Brought(first, more))
    async with tls_port(yard, context) as port:
        for name in ("3000-x.brought.test", "brought.test", "stranger.test", "localhost", None):
            assert await shown_names(port, name) == ["*.brought.test", "brought.test"]
        assert await shown_names(port, "ONE.test") == ["one.test"]
        assert await shown_names(port, "app.two.test") == ["two.test", "*.two.test"]
        assert await shown_names(port, "bare.test") == ["bare.test"]  # of our own authority
    async with tls_port(yard, tls.context(authority, "localhost", mapped.__contains__, Brought(None, more))) as port:
        assert await shown_names(port, "one.test") == ["one.test"]
        assert "localhost" in await shown_names(port, "localhost")
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await shown_names(port, "stranger.test")


async def test_a_certificate_that_was_renewed_is_shown_without_a_restart(
    yard: Yard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Brought, "look_every_s", 0.0)
    authority = await asyncio.to_thread(Authority.load_or_make, tmp_path / "ca")
    first, more = (tmp_path / "cert.pem", tmp_path / "key.pem"), tmp_path / "more"
    put_certificate(*first, "old.test")
    more.mkdir()
    async with tls_port(yard, tls.context(authority, "old.test", lambda _: False, Brought(first, more))) as port:
        assert await shown_names(port, None) == ["old.test"]
        put_certificate(*first, "half.test", key=ec.generate_private_key(ec.SECP256R1()))  # half of it is there
        assert await shown_names(port, None) == ["old.test"]
        put_certificate(*first, "new.test", "old.test")
        for name in (None, "old.test", "new.test"):
            assert await shown_names(port, name) == ["new.test", "old.test"]
        put_certificate(more / "late.pem", more / "late.key", "late.test")
        assert await shown_names(port, "late.test") == ["late.test"]
        (more / "late.pem").unlink()
        assert await shown_names(port, "late.test") == ["new.test", "old.test"]


def test_a_certificate_that_cannot_be_used_is_said_by_its_setting(tmp_path: Path) -> None:
    chain, key = tmp_path / "a" / "cert.pem", tmp_path / "a" / "cert.key"
    put_certificate(chain, key, "a.test")
    with pytest.raises(HostFailure, match="FORKYARD_TLS_CERT_FILE"):
        Brought((chain, tmp_path / "none.pem"))
    with pytest.raises(HostFailure, match="FORKYARD_TLS_CERT_DIR"):
        Brought(None, tmp_path / "none")
    key.write_text("nonsense")
    with pytest.raises(HostFailure, match=r"cert\.pem .*FORKYARD_TLS_CERT_DIR"):
        Brought(None, tmp_path / "a")
