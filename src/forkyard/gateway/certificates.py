"""Certificates the user brings: which one is for which name, and which is the newest.

Owns: reading them, also again when their files change, so that one that was renewed needs no restart. It is looked for
that during handshakes, now and then: a few `stat`s. What cannot be read then is said in the log, and what was read before
goes on.
"""

from __future__ import annotations

import ssl
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import structlog
from cryptography import x509
from cryptography.x509.oid import NameOID

from forkyard.errors import HostFailure

log = structlog.get_logger(__name__)

LOOK_EVERY_S = 5.0
MAX_IN_DIRECTORY = 4096


@dataclass(frozen=True)
class _Files:
    chain: Path
    key: Path
    setting: str

    def stamp(self) -> tuple[int, ...]:
        found = [path.stat() for path in (self.chain, self.key)]
        return tuple(number for one in found for number in (one.st_mtime_ns, one.st_size, one.st_ino))


@dataclass(frozen=True)
class _Read:
    stamp: tuple[int, ...]
    names: frozenset[str]
    context: ssl.SSLContext


class Brought:
    """`first` (chain and key) is also for who names nothing, or a name that none is for. In the directory each is
    `NAME.pem` (with its key in it, or in `NAME.key`), or `NAME/fullchain.pem` with `NAME/privkey.pem`; what they are
    for is written in them."""

    look_every_s = LOOK_EVERY_S

    def __init__(self, first: tuple[Path, Path] | None, directory: Path | None = None) -> None:
        """Blocking. Raises `HostFailure` if one of them cannot be used."""
        self._first = None if first is None else _Files(*first, "FORKYARD_TLS_CERT_FILE and FORKYARD_TLS_KEY_FILE")
        self._directory = directory
        self._read: dict[_Files, _Read] = {}
        self._by_name: dict[str, ssl.SSLContext] = {}
        self._complaints: set[str] = set()
        for error in self._look():
            raise error

    @property
    def first(self) -> ssl.SSLContext | None:
        return None if self._first is None else self._read[self._first].context

    def of(self, name: str | None) -> ssl.SSLContext | None:
        """For this name, exactly or by a wildcard; for None, the first."""
        if time.monotonic() - self._looked_at >= self.look_every_s:
            self._look_again()
        if name is None:
            return self.first
        return self._by_name.get(name) or self._by_name.get(f"*.{name.partition('.')[2]}")

    def _look_again(self) -> None:
        complaints = {error.message for error in self._look()}
        for complaint in complaints - self._complaints:
            log.error("a certificate cannot be used; what was there before is", error=complaint)
        self._complaints = complaints

    def _look(self) -> list[HostFailure]:
        self._looked_at, errors = time.monotonic(), []
        read: dict[_Files, _Read] = {}
        try:
            wanted = list(self._files())
        except OSError as error:
            errors.append(HostFailure(f"{self._directory} cannot be read: {error}; check FORKYARD_TLS_CERT_DIR"))
            wanted = list(self._read)
        for files in wanted:
            known = self._read.get(files)
            try:
                stamp = files.stamp()
                read[files] = known if known is not None and known.stamp == stamp else _read(files, stamp)
            except (OSError, ValueError) as error:  # ssl.SSLError is one of the first
                errors.append(
                    HostFailure(
                        f"the certificate {files.chain} with the key {files.key} cannot be used: {error}; check "
                        f"{files.setting}"
                    )
                )
                if known is not None:
                    read[files] = known
        if read != self._read:
            self._read = read
            self._by_name = {name: one.context for one in reversed(read.values()) for name in one.names}
        return errors

    def _files(self) -> Iterator[_Files]:
        if self._first is not None:
            yield self._first
        if self._directory is None:
            return
        for entry in sorted(self._directory.iterdir())[:MAX_IN_DIRECTORY]:
            if entry.suffix == ".pem" and entry.is_file():
                key = entry.with_suffix(".key")
                yield _Files(entry, key if key.exists() else entry, "FORKYARD_TLS_CERT_DIR")
            elif (chain := entry / "fullchain.pem").is_file():
                yield _Files(chain, entry / "privkey.pem", "FORKYARD_TLS_CERT_DIR")


def _read(files: _Files, stamp: tuple[int, ...]) -> _Read:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    context.load_cert_chain(files.chain, files.key, password=lambda: b"")  # nobody is there to be asked
    certificate = x509.load_pem_x509_certificate(files.chain.read_bytes())
    return _Read(stamp, frozenset(_names(certificate)), context)


def _names(certificate: x509.Certificate) -> Iterator[str]:
    try:
        alternatives = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        names = alternatives.get_values_for_type(x509.DNSName)
    except x509.ExtensionNotFound:
        names = [str(one.value) for one in certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)]
    for name in names:
        yield name.lower()
