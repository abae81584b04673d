"""Signatures on webhooks: a JWT by a key of this daemon, which anyone can check, and an HMAC for who shares a secret.

Owns: the Ed25519 key, in a file only root reads, and its public half as a JWKS.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import json
import os
import time
from pathlib import Path
from typing import Any

import jwt
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from forkyard.errors import HostFailure

LIFETIME_S = 300


class Signer:
    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._key = key
        raw = key.public_key().public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw)
        public = {"crv": "Ed25519", "kty": "OKP", "x": _base64url(raw)}
        # The thumbprint of RFC 7638: the same key has the same id wherever it is computed.
        thumbprint = hashlib.sha256(json.dumps(public, sort_keys=True, separators=(",", ":")).encode())
        self.kid = _base64url(thumbprint.digest())
        self.jwks: dict[str, Any] = {"keys": [{**public, "kid": self.kid, "use": "sig", "alg": "EdDSA"}]}

    @classmethod
    def load_or_make(cls, path: Path) -> Signer:
        """Blocking."""
        try:
            with contextlib.suppress(FileExistsError):
                made = Ed25519PrivateKey.generate().private_bytes(
                    serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
                )
                descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
                with os.fdopen(descriptor, "wb") as file:
                    file.write(made)
                    file.flush()
                    os.fsync(file.fileno())
            key = serialization.load_pem_private_key(path.read_bytes(), None)
        except (OSError, ValueError) as error:
            raise HostFailure(f"the key that signs webhooks, {path}, cannot be used: {error}; remove it") from error
        if not isinstance(key, Ed25519PrivateKey):
            raise HostFailure(f"the key that signs webhooks, {path}, is no Ed25519 key; remove it")
        return cls(key)

    def token(self, delivery_id: str, body: bytes) -> str:
        now = int(time.time())
        claims = {
            "iss": "forkyard",
            "iat": now,
            "exp": now + LIFETIME_S,
            "jti": delivery_id,
            "body_sha256": hashlib.sha256(body).hexdigest(),
        }
        return jwt.encode(claims, self._key, algorithm="EdDSA", headers={"kid": self.kid})


def hub_signature(secret: str, body: bytes) -> str:
    """As GitHub has it in X-Hub-Signature-256."""
    return "sha256=" + hmac.new(secret.encode(), body, hashlib.sha256).hexdigest()


def _base64url(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")
