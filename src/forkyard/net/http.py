"""Looks into HTTP and HTTPS of the sandboxes that ask for it: secrets put in, exchanges recorded, recordings replayed.

Owns: the guest's side of an intercepted connection (with a certificate of our authority for the name it asked for) and
the other side (with the host's own trust: never weaker than a direct connection). HTTP/1.1 both ways, streamed; a
WebSocket is passed through once the server agrees. The door has decided that the name may be reached; that every request
on the connection is for this name is checked here. Secrets are put in over TLS only.

All that a guest sends is an attacker's: h11 bounds and checks it, and what could be read in two ways is refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import socket
import ssl
import time
from collections.abc import AsyncIterator
from pathlib import Path

import h11
import structlog

from forkyard.errors import ForkyardError, HostFailure
from forkyard.models.network import Verdict
from forkyard.net.authority import Authority
from forkyard.net.base import Header, Network
from forkyard.net.injection import Headers, Scrubber, inject, put, wanted
from forkyard.net.outside import Intercepted, Interceptor, Request
from forkyard.net.policy import matches
from forkyard.net.recordings import Asked, Recordings, Taking
from forkyard.net.wire import SILENCE_S, Wire, pumped

log = structlog.get_logger(__name__)

_HANDSHAKE_S = 20.0
_FIRST_REQUEST_S = 60.0
_KEEP_ALIVE_S = 300.0
_HEAD_BYTES = 64 * 1024
#: Of this connection only, or of the transport, and not the message's.
_HOP = frozenset({b"connection", b"keep-alive", b"proxy-connection", b"proxy-authorization", b"te", b"trailer"})
#: A recording must have whole answers, which do not depend on what a client has in its cache.
_CONDITIONAL = frozenset({b"if-none-match", b"if-modified-since"})


class Refused(Exception):
    """What the guest is told in place of an answer."""

    def __init__(self, status: int, reason: str, *, verdict_denied: bool = True) -> None:
        super().__init__(reason)
        self.status = status
        self.reason = reason
        self.denied = verdict_denied


class HttpInterceptor:
    """One per daemon."""

    def __init__(self, authority: Authority, recordings: Recordings, extra_ca_file: Path | None = None) -> None:
        self._authority = authority
        self._recordings = recordings
        self._trust = ssl.create_default_context()
        if extra_ca_file is not None:
            try:
                self._trust.load_verify_locations(extra_ca_file)
            except (OSError, ssl.SSLError) as error:
                raise HostFailure(
                    f"FORKYARD_EXTRA_CA_FILE: no certificates could be read from {extra_ca_file}: {error}"
                ) from error
        self._trust.set_alpn_protocols(["http/1.1"])

    def wants(self, network: Network, name: str, tls: bool) -> bool:
        if network.egress.record is not None or network.egress.replay is not None:
            return True
        return tls and bool(wanted(network.injections.values(), name) or _added(network, name))

    async def replays(self, network: Network, name: str) -> bool:
        return network.egress.replay is not None and await self._recordings.has_host(network.egress.replay, name)

    async def serve(self, guest: socket.socket, what: Intercepted) -> None:
        context = self._authority.context_for([what.name]) if what.tls else None
        try:
            async with asyncio.timeout(_HANDSHAKE_S):
                wire = await Wire.accepted(guest, context)
        except ssl.SSLError as error:
            guest.close()
            why = error.reason or "unknown"
            hint = "; does it bring certificates of its own?" if "UNKNOWN_CA" in why.upper().replace(" ", "_") else ""
            what.note("failed", f"the guest ended the TLS handshake for {what.name}: {why}{hint}")
            return
        except (OSError, TimeoutError):
            guest.close()
            what.note("failed", f"the guest did not finish the TLS handshake for {what.name}")
            return
        async with contextlib.AsyncExitStack() as stack:
            stack.callback(wire.abort)
            session = _Session(wire, what, self._recordings, self._trust)
            stack.callback(session.close)
            await session.run()
            await wire.close()


def _added(network: Network, name: str) -> list[Header]:
    return [one for one in network.headers if matches(one.host, name)]


class _Upstream:
    """A connection to the real host, and how far its conversation has come."""

    def __init__(self, wire: Wire) -> None:
        self.wire = wire
        self.http = h11.Connection(h11.CLIENT, max_incomplete_event_size=_HEAD_BYTES)

    @property
    def usable(self) -> bool:
        return self.http.our_state is h11.IDLE and self.http.their_state is h11.IDLE and not self.wire.ended


class _Exchange:
    """A request under way, for the log."""

    def __init__(self, request: h11.Request) -> None:
        self.method = request.method.decode("ascii")
        self.target = request.target.decode("latin-1")
        self.began_s = time.monotonic()
        self.status: int | None = None
        self.reason: str | None = None
        self.bytes_out = 0
        self.bytes_in = 0


class _Session:
    """One connection of a guest."""

    def __init__(self, wire: Wire, what: Intercepted, recordings: Recordings, trust: ssl.SSLContext) -> None:
        self._wire = wire
        self._what = what
        self._recordings = recordings
        self._trust = trust
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=_HEAD_BYTES)
        self._upstream: _Upstream | None = None
        self._now: _Exchange | None = None
        injections = what.network.injections.values() if what.tls else ()
        self._injections = wanted(injections, what.name)
        self._added = _added(what.network, what.name) if what.tls else []

    def close(self) -> None:
        if self._upstream is not None:
            self._upstream.wire.abort()
            self._upstream = None

    async def run(self) -> None:
        """Until the guest or the server is done."""
        patience_s = _FIRST_REQUEST_S
        while True:
            try:
                request = await self._event(self._http, self._wire, patience_s)
                if not isinstance(request, h11.Request):
                    return  # it hung up
                self._now = _Exchange(request)
                goes_on = await self._exchange(request)
                self._log("allowed")
                if not goes_on:
                    return
            except Refused as refusal:
                await self._refuse(refusal)
                return
            except h11.RemoteProtocolError as error:
                await self._refuse(Refused(400, f"what the sandbox sent to {self._what.name} is no HTTP/1.1: {error}"))
                return
            except (TimeoutError, ConnectionError, ssl.SSLError):
                return
            finally:
                self._log("failed", "it was broken off")
            if self._http.our_state is not h11.DONE or self._http.their_state is not h11.DONE:
                return
            self._http.start_next_cycle()
            patience_s = _KEEP_ALIVE_S

    def _log(self, verdict: Verdict, reason: str | None = None) -> None:
        """The request under way is over. The first word counts."""
        now, self._now = self._now, None
        if now is not None:
            took_s = time.monotonic() - now.began_s
            self._what.record(
                Request(
                    now.method,
                    now.target,
                    now.status,
                    verdict,
                    reason or now.reason,
                    now.bytes_out,
                    now.bytes_in,
                    took_s,
                )
            )

    async def _exchange(self, request: h11.Request) -> bool:
        """False if nothing can follow it."""
        self._check_host(request)
        egress = self._what.network.egress
        if egress.replay is not None:
            await self._replay(egress.replay, request)
            return True
        if egress.record is not None and (full := await self._recordings.full(egress.record)) is not None:
            raise Refused(507, full)
        headers, used = inject(_passed_on(request, recording=egress.record is not None), self._injections)
        headers, more = put(headers, self._added)
        used |= more
        if used:  # else we could not see a secret that comes back
            headers = [
                *((n, v) for n, v in headers if n.lower() not in (b"accept-encoding", b"sec-websocket-extensions")),
                (b"Accept-Encoding", b"identity"),
            ]
        upstream = await self._connected()
        hashed = hashlib.sha256()
        sending = asyncio.create_task(self._send(upstream, request, headers, hashed))
        try:
            return await self._receive(upstream, request, Scrubber(used), sending, hashed)
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
            if upstream.http.our_state is h11.DONE and upstream.http.their_state is h11.DONE:
                upstream.http.start_next_cycle()
            else:
                self.close()

    def _count(self, *, status: int | None = None, bytes_out: int = 0, bytes_in: int = 0) -> None:
        if self._now is not None:
            self._now.status = self._now.status if status is None else status
            self._now.bytes_out += bytes_out
            self._now.bytes_in += bytes_in

    # ── there ────────────────────────────────────────────────────────────────────────────────────────────────────

    async def _connected(self) -> _Upstream:
        if self._upstream is not None and self._upstream.usable:
            return self._upstream
        self.close()
        name = self._what.name
        try:
            sock = await self._what.connect()
            async with asyncio.timeout(_HANDSHAKE_S):
                wire = await Wire.connected(sock, self._trust if self._what.tls else None, name)
        except ssl.SSLCertVerificationError as error:
            why = f"the certificate of {name} is not trusted by this host: {error.verify_message}"
            raise Refused(502, why, verdict_denied=False) from None
        except (OSError, TimeoutError) as error:
            why = getattr(error, "strerror", None) or str(error) or "it did not answer in time"
            raise Refused(502, f"{name} could not be reached: {why}", verdict_denied=False) from None
        self._upstream = _Upstream(wire)
        return self._upstream

    async def _send(self, upstream: _Upstream, request: h11.Request, headers: Headers, hashed: hashlib._Hash) -> None:
        """The request, and its body as it comes."""
        http, wire = upstream.http, upstream.wire
        await wire.write(http.send(h11.Request(method=request.method, target=request.target, headers=headers)) or b"")
        while True:
            event = await self._event(self._http, self._wire, SILENCE_S)
            if isinstance(event, h11.Data):
                hashed.update(event.data)
                self._count(bytes_out=len(event.data))
                await wire.write(http.send(h11.Data(data=event.data)) or b"")
            elif isinstance(event, h11.EndOfMessage):
                await wire.write(http.send(h11.EndOfMessage()) or b"")
                return
            else:
                raise ConnectionResetError("the sandbox hung up in the middle of a request")

    # ── and back ─────────────────────────────────────────────────────────────────────────────────────────────────

    async def _receive(
        self,
        upstream: _Upstream,
        request: h11.Request,
        scrubber: Scrubber,
        sending: asyncio.Task[None],
        hashed: hashlib._Hash,
    ) -> bool:
        answer = await self._head(upstream, scrubber, sending)
        self._count(status=answer.status_code)
        if isinstance(answer, h11.InformationalResponse):  # 101: from here on it is no HTTP
            await self._switched(upstream, scrubber)
            return False
        await self._say(answer)
        egress = self._what.network.egress
        taking = None if egress.record is None else self._recordings.begin(egress.record)
        try:
            async for data in self._body(upstream, scrubber):
                if taking is not None:
                    await taking.write(data)
                self._count(bytes_in=len(data))
                await self._say(h11.Data(data=data))
            if taking is not None:
                await asyncio.wait([sending])  # then the hash of the request is whole
                if not sending.cancelled() and sending.exception() is None:
                    await self._keep(taking, self._asked(request, hashed.hexdigest()), answer)
        finally:
            if taking is not None:
                taking.close()
        await self._say(h11.EndOfMessage())
        return answer.status_code != 421

    async def _head(
        self, upstream: _Upstream, scrubber: Scrubber, sending: asyncio.Task[None]
    ) -> h11.Response | h11.InformationalResponse:
        name = self._what.name
        while True:
            try:
                event = await self._event(upstream.http, upstream.wire, SILENCE_S)
            except (h11.RemoteProtocolError, OSError, TimeoutError) as error:
                why = "hung up before it answered" if upstream.wire.ended else f"gave no answer: {error}"
                raise Refused(502, f"{name} {why}", verdict_denied=False) from None
            if isinstance(event, h11.InformationalResponse) and event.status_code != 101:
                await self._say(event)
                continue
            if isinstance(event, h11.Response | h11.InformationalResponse):
                headers = [
                    (key, scrubber.whole(value))
                    for key, value in event.headers.raw_items()
                    if key.lower() not in _HOP - ({b"connection"} if event.status_code == 101 else set())
                    and key.lower() != b"alt-svc"  # it would lead around us
                ]
                made = type(event)(status_code=event.status_code, reason=event.reason, headers=headers)
                if isinstance(made, h11.InformationalResponse):
                    await self._say(made)
                return made
            if sending.done() and not sending.cancelled() and sending.exception() is not None:
                raise ConnectionResetError("the sandbox hung up")
            raise Refused(502, f"{name} hung up before it answered", verdict_denied=False)

    async def _body(self, upstream: _Upstream, scrubber: Scrubber) -> AsyncIterator[bytes]:
        while True:
            event = await self._event(upstream.http, upstream.wire, SILENCE_S)
            if isinstance(event, h11.Data):
                if data := scrubber.feed(bytes(event.data)):
                    yield data
            elif isinstance(event, h11.EndOfMessage):
                if data := scrubber.finish():
                    yield data
                return
            else:
                raise ConnectionResetError(f"{self._what.name} hung up in the middle of its answer")

    async def _switched(self, upstream: _Upstream, scrubber: Scrubber) -> None:
        """Both ways, as it comes, until both are done."""
        theirs, ours = upstream.http.trailing_data[0], self._http.trailing_data[0]
        await upstream.wire.write(ours)
        await asyncio.gather(
            pumped(self._wire, upstream.wire), pumped(upstream.wire, self._wire, scrubber=scrubber, first=theirs)
        )

    # ── recordings ───────────────────────────────────────────────────────────────────────────────────────────────

    async def _keep(self, taking: Taking, asked: Asked, answer: h11.Response) -> None:
        headers = tuple(
            (key.decode("latin-1"), value.decode("latin-1"))
            for key, value in answer.headers.raw_items()
            if key.lower() not in _HOP and key.lower() != b"transfer-encoding"
        )
        try:
            kept = await taking.finish(asked, answer.status_code, answer.reason.decode("latin-1"), headers)
            if not kept and self._now is not None:
                self._now.reason = "not recorded: its answer is too large, or the recording has no more room"
        except (OSError, ForkyardError) as error:
            log.error("an exchange was not recorded", sandbox=self._what.sandbox_id, error=str(error))

    def _asked(self, request: h11.Request, body_sha256: str) -> Asked:
        what = self._what
        scheme, usual = ("https", 443) if what.tls else ("http", 80)
        port = "" if what.port == usual else f":{what.port}"
        path = request.target.decode("latin-1")
        partial = [value for key, value in request.headers if key == b"range"]
        return Asked(
            request.method.decode("ascii"),
            f"{scheme}://{what.name}{port}{path}",
            body_sha256,
            partial[0].decode("latin-1") if partial else None,
        )

    async def _replay(self, name: str, request: h11.Request) -> None:
        hashed = hashlib.sha256()
        if any(key == b"expect" for key, _ in request.headers):
            await self._say(h11.InformationalResponse(status_code=100, headers=[]))
        while not isinstance(event := await self._event(self._http, self._wire, SILENCE_S), h11.EndOfMessage):
            if not isinstance(event, h11.Data):
                raise ConnectionResetError("the sandbox hung up in the middle of a request")
            hashed.update(event.data)
        asked = self._asked(request, hashed.hexdigest())
        answered = await self._recordings.find(name, self._what.sandbox_id, asked)
        if answered is None:
            raise Refused(
                403, f"{asked.method} {asked.url} is not in the recording {name!r}, and nothing else is answered"
            )
        headers = [(key.encode("latin-1"), value.encode("latin-1")) for key, value in answered.headers]
        self._count(status=answered.status)
        bodyless = asked.method == "HEAD" or answered.status in (204, 304)
        if not bodyless:
            headers = [(key, value) for key, value in headers if key.lower() != b"content-length"]
            headers.append((b"Content-Length", b"%d" % answered.body_bytes))
        reason = answered.reason.encode("latin-1")
        await self._say(h11.Response(status_code=answered.status, reason=reason, headers=headers))
        if not bodyless:
            async with contextlib.aclosing(self._recordings.body(name, answered)) as chunks:
                async for chunk in chunks:
                    self._count(bytes_in=len(chunk))
                    await self._say(h11.Data(data=chunk))
        await self._say(h11.EndOfMessage())

    # ── the guest ────────────────────────────────────────────────────────────────────────────────────────────────

    def _check_host(self, request: h11.Request) -> None:
        """Else a guest could reach, through a name it may, another that the same server has."""
        what = self._what
        hosts = [value for key, value in request.headers if key == b"host"]
        host = hosts[0].decode("latin-1").strip().lower() if len(hosts) == 1 else ""
        name, _, port = host.partition(":")
        if name.rstrip(".") != what.name or (port and port != str(what.port)):
            raise Refused(421, f"a request for {host or 'no host'} on a connection to {what.name}")
        names = {key for key, _ in request.headers}
        if {b"transfer-encoding", b"content-length"} <= names:
            # What we take for its body, the server could take for another request.
            raise Refused(400, f"the size of a request to {what.name} is ambiguous")
        if not request.target.startswith(b"/") and request.target != b"*":
            raise Refused(400, f"a request to {what.name} whose address is not a path")

    async def _say(self, event: h11.Event) -> None:
        await self._wire.write(self._http.send(event) or b"")

    async def _refuse(self, refusal: Refused) -> None:
        verdict: Verdict = "denied" if refusal.denied else "failed"
        self._what.note(verdict, refusal.reason)
        self._count(status=refusal.status)
        self._log(verdict, refusal.reason)
        if self._http.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            return  # an answer has begun: all that is left is to hang up
        body = f"Forkyard: {refusal.reason}\n".encode()
        headers = [
            ("Content-Type", "text/plain; charset=utf-8"),
            ("Content-Length", str(len(body))),
            ("Connection", "close"),
            ("X-Forkyard-Blocked", "1"),
        ]
        with contextlib.suppress(OSError, TimeoutError, h11.LocalProtocolError, ssl.SSLError):
            await self._say(h11.Response(status_code=refusal.status, headers=headers, reason=b"Refused"))
            await self._say(h11.Data(data=body))
            await self._say(h11.EndOfMessage())

    async def _event(self, http: h11.Connection, wire: Wire, timeout_s: float) -> h11.Event | type[h11.PAUSED]:
        while True:
            event = http.next_event()
            if event is h11.NEED_DATA:
                http.receive_data(await wire.read(timeout_s))
            elif isinstance(event, h11.Event):
                return event
            else:
                return h11.PAUSED


def _passed_on(request: h11.Request, *, recording: bool) -> Headers:
    """Of upgrades only WebSocket: in other protocols we would no longer see whom the guest talks to."""
    upgrades = [value.strip().lower() for key, value in request.headers if key == b"upgrade"]
    dropped = _HOP | (_CONDITIONAL if recording else frozenset()) | {b"http2-settings"}
    if upgrades != [b"websocket"]:  # of several a server may choose
        return [(key, value) for key, value in request.headers.raw_items() if key.lower() not in dropped | {b"upgrade"}]
    kept = [(key, value) for key, value in request.headers.raw_items() if key.lower() not in dropped]
    return [*kept, (b"Connection", b"Upgrade")]


_check: type[Interceptor] = HttpInterceptor
