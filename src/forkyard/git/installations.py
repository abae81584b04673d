"""Tokens of GitHub App installations, for git and for the REST API: made when needed, kept until they are about to
expire."""

from __future__ import annotations

import base64
import binascii
import ssl
import time
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx
import jwt

from forkyard.control.secrets import Secrets
from forkyard.errors import InvalidRequest, RemoteFailed

TIMEOUT_S = 20.0
#: A token is good for an hour; one with less than this left is not begun with.
_MARGIN_S = 300.0
#: GitHub takes ten minutes at most, and its clock may be behind.
_JWT_S = 540
_SKEW_S = 60


class GitHubTokens:
    def __init__(self, secrets: Secrets, api: str, ca: Path | None) -> None:
        self._secrets = secrets
        self._api = api.rstrip("/")
        self._ca = ca
        self._kept: dict[tuple[str, int], tuple[str, float]] = {}

    async def token(self, app: Mapping[str, Any]) -> str:
        place = (str(app["app_id"]), int(app["installation_id"]))
        kept = self._kept.get(place)
        if kept is not None and kept[1] - time.time() > _MARGIN_S:
            return kept[0]
        claim = await self._claim(place[0], str(app["private_key_secret"]))
        url = f"{self._api}/app/installations/{place[1]}/access_tokens"
        headers = {
            "Authorization": f"Bearer {claim}",
            "Accept": "application/vnd.github+json",
            "X-GitHub-Api-Version": "2022-11-28",
        }
        try:
            async with httpx.AsyncClient(timeout=TIMEOUT_S, verify=_context(self._ca)) as client:
                answer = await client.post(url, headers=headers)
        except httpx.HTTPError as error:
            raise RemoteFailed(f"GitHub at {self._api} cannot be reached: {error or type(error).__name__}") from error
        if answer.status_code != 201:
            raise RemoteFailed(
                f"GitHub gave no token for installation {place[1]} of app {place[0]}: {answer.status_code} "
                f"{answer.text[:200]}"
            )
        try:
            given = answer.json()
            token, expires_at = str(given["token"]), datetime.fromisoformat(str(given["expires_at"])).timestamp()
        except (ValueError, KeyError, TypeError) as error:
            raise RemoteFailed("GitHub's answer to the request for a token is not understood") from error
        self._kept[place] = (token, expires_at)
        return token

    def forget(self, app: Mapping[str, Any]) -> None:
        """It was refused, whatever it said of its expiry."""
        self._kept.pop((str(app["app_id"]), int(app["installation_id"])), None)

    async def _claim(self, app_id: str, secret: str) -> str:
        now = int(time.time())
        claims = {"iat": now - _SKEW_S, "exp": now + _JWT_S, "iss": app_id}
        try:
            return jwt.encode(claims, _pem(await self._secrets.stored(secret)), algorithm="RS256")
        except (ValueError, TypeError, jwt.PyJWTError):  # the error may repeat the key
            raise InvalidRequest(
                f"secret {secret!r} is no RSA private key; store the file GitHub gave: "
                f"base64 -w0 KEY.pem | forkyard secrets set {secret}"
            ) from None


def _pem(value: str) -> str:
    """A stored secret is one line: base64 of the file, or the file with `\\n` spelled out."""
    if "-----BEGIN" in value:
        return value.replace("\\n", "\n")
    try:
        return base64.b64decode(value, validate=True).decode("ascii")
    except (binascii.Error, UnicodeDecodeError) as error:
        raise ValueError("no base64") from error


def _context(ca: Path | None) -> ssl.SSLContext:
    context = ssl.create_default_context()
    if ca is not None:
        context.load_verify_locations(ca)
    return context
