"""The certificate authority of this installation.

Owns: one key and one certificate, made at the first use and kept in the state directory (the key for root only), and the
leaf certificates made from them, which live in memory. Two things use it: the door, for the connections of sandboxes
whose policy looks into TLS (only those sandboxes trust it), and the gateway, for previews over HTTPS. Never does: I/O
after it was loaded.
"""

from __future__ import annotations

import fcntl
import ipaddress
import os
import ssl
import time
from collections import OrderedDict
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from forkyard.errors import HostFailure

KEY_NAME = "ca-key.pem"
CERTIFICATE_NAME = "ca.pem"
#: Clocks of guests and clients may be behind ours.
_BACKDATED = timedelta(days=2)
_LIFETIME = timedelta(days=3650)
_LEAF_LIFETIME = timedelta(days=90)
_RENEW_AFTER_S = 86400.0
_MAX_CONTEXTS = 1024
_MAX_COMMON_NAME = 64


class Authority:
    """Open with `Authority.load_or_make`."""

    def __init__(self, key: ec.EllipticCurvePrivateKey, certificate: x509.Certificate) -> None:
        self._key = key
        self._certificate = certificate
        self._leaf_key = ec.generate_private_key(ec.SECP256R1())
        self._contexts: OrderedDict[tuple[str, ...], tuple[float, ssl.SSLContext]] = OrderedDict()

    @classmethod
    def load_or_make(cls, directory: Path) -> Authority:
        """Blocking. Two processes that come first at once get the same one."""
        try:
            directory.mkdir(mode=0o711, parents=True, exist_ok=True)
            lock = os.open(directory / ".ca.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if not (directory / CERTIFICATE_NAME).exists():
                    _make(directory)
                return cls._load(directory)
            finally:
                os.close(lock)
        except (OSError, ValueError) as error:
            raise HostFailure(
                f"the certificate authority in {directory} cannot be used: {error}; remove {KEY_NAME} and "
                f"{CERTIFICATE_NAME} to have a new one made"
            ) from error

    @classmethod
    def _load(cls, directory: Path) -> Authority:
        key = serialization.load_pem_private_key((directory / KEY_NAME).read_bytes(), password=None)
        certificate = x509.load_pem_x509_certificate((directory / CERTIFICATE_NAME).read_bytes())
        if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != certificate.public_key():
            raise ValueError("key and certificate do not belong together")
        return cls(key, certificate)

    @property
    def certificate_pem(self) -> str:
        """What those who shall trust it are given."""
        return self._certificate.public_bytes(serialization.Encoding.PEM).decode("ascii")

    @property
    def fingerprint(self) -> str:
        """SHA-256, in hex."""
        return self._certificate.fingerprint(hashes.SHA256()).hex()

    @property
    def expires_at(self) -> datetime:
        return self._certificate.not_valid_after_utc

    def context_for(self, names: Sequence[str]) -> ssl.SSLContext:
        """A server's context with a certificate for these host names or addresses; `*.example.com` is one. It speaks
        HTTP/1.1."""
        wanted = tuple(names)
        made_at, context = self._contexts.get(wanted, (float("-inf"), None))
        if context is None or time.monotonic() - made_at > _RENEW_AFTER_S:
            context = self._new_context(wanted)
            self._contexts[wanted] = (time.monotonic(), context)
        self._contexts.move_to_end(wanted)
        while len(self._contexts) > _MAX_CONTEXTS:  # names come from guests
            self._contexts.popitem(last=False)
        return context

    def _new_context(self, names: tuple[str, ...]) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        chain = self._leaf(names).public_bytes(serialization.Encoding.PEM) + self._certificate.public_bytes(
            serialization.Encoding.PEM
        )
        # The ssl module reads files only; this one has no name and is gone when it is closed.
        with os.fdopen(os.memfd_create("leaf", os.MFD_CLOEXEC), "wb") as file:
            file.write(_pem(self._leaf_key) + chain)
            file.flush()
            context.load_cert_chain(f"/proc/self/fd/{file.fileno()}")
        return context

    def _leaf(self, names: tuple[str, ...]) -> x509.Certificate:
        now = datetime.now(UTC)
        common_name = names[0] if names and len(names[0]) <= _MAX_COMMON_NAME else "forkyard"
        return (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)]))
            .issuer_name(self._certificate.subject)
            .public_key(self._leaf_key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - _BACKDATED)
            .not_valid_after(min(now + _LEAF_LIFETIME, self.expires_at))
            .add_extension(x509.SubjectAlternativeName([_general_name(name) for name in names]), critical=False)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
            .add_extension(_usage(digital_signature=True), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(self._leaf_key.public_key()), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False)
            .sign(self._key, hashes.SHA256())
        )


def _make(directory: Path) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    now = datetime.now(UTC)
    # A name of its own, so that two installations can be told apart in a list of authorities.
    name = x509.Name(
        [
            x509.NameAttribute(NameOID.ORGANIZATION_NAME, "Forkyard"),
            x509.NameAttribute(NameOID.COMMON_NAME, f"Forkyard local CA {os.urandom(4).hex()}"),
        ]
    )
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _BACKDATED)
        .not_valid_after(now + _LIFETIME)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(key_cert_sign=True, crl_sign=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    # The certificate last: while it is not there, nothing is.
    _write(directory / KEY_NAME, _pem(key), 0o600)
    _write(directory / CERTIFICATE_NAME, certificate.public_bytes(serialization.Encoding.PEM), 0o644)


def _write(path: Path, content: bytes, mode: int) -> None:
    temporary = path.with_name(f".{path.name}.new")
    temporary.unlink(missing_ok=True)
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode), "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _general_name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _usage(*, digital_signature: bool = False, key_cert_sign: bool = False, crl_sign: bool = False) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=digital_signature,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=key_cert_sign,
        crl_sign=crl_sign,
        encipher_only=False,
        decipher_only=False,
    )
