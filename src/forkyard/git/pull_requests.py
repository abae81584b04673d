"""GitHub's REST API, as far as a review needs it: a pull request, its files, its reviews. Answers are not trusted."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import httpx

from forkyard.errors import HostFailure, InvalidRequest, OperationTimeout
from forkyard.models.git import FileDiff
from forkyard.models.reviews import Event, GitHubTarget, ReviewComment

API_VERSION = "2022-11-28"
TIMEOUT_S = 60.0
PAGE = 100
#: GitHub itself lists no more.
MAX_FILES = 3000
MAX_REVIEWS = 1000
_STATUS: dict[str, Literal["added", "deleted", "modified", "renamed", "copied"]] = {
    "added": "added",
    "removed": "deleted",
    "renamed": "renamed",
    "copied": "copied",
}


class Unprocessable(Exception):
    """GitHub does not take this review as it is. The message is what it said."""


@dataclass(frozen=True)
class Pull:
    title: str
    body: str
    base: str
    head: str
    base_sha: str
    head_sha: str
    clone_url: str


class PullRequests:
    def __init__(self, api_url: str, token: str, context: ssl.SSLContext) -> None:
        self._url = api_url
        self._headers = {
            "Accept": "application/vnd.github+json",
            "Authorization": f"Bearer {token}",
            "User-Agent": "Forkyard",
            "X-GitHub-Api-Version": API_VERSION,
        }
        self._context = context

    async def pull(self, target: GitHubTarget) -> Pull:
        found = await self._ask("GET", _path(target))
        try:
            return Pull(
                title=str(found["title"]),
                body=str(found["body"] or ""),
                base=str(found["base"]["ref"]),
                head=str(found["head"]["ref"]),
                base_sha=str(found["base"]["sha"]),
                head_sha=str(found["head"]["sha"]),
                clone_url=str(found["base"]["repo"]["clone_url"]),
            )
        except (KeyError, TypeError):
            raise _strange("a pull request") from None

    async def files(self, target: GitHubTarget) -> list[FileDiff]:
        found = []
        async for item in self._pages(f"{_path(target)}/files", MAX_FILES):
            try:
                found.append(
                    FileDiff(
                        path=item["filename"],
                        previous_path=item.get("previous_filename"),
                        status=_STATUS.get(item["status"], "modified"),
                        additions=item["additions"],
                        deletions=item["deletions"],
                        binary="patch" not in item and not item["changes"],
                        new_sha=item.get("sha"),
                        patch=item.get("patch"),
                    )
                )
            except (KeyError, TypeError, ValueError):
                raise _strange("the files of a pull request") from None
        return found

    async def find_review(self, target: GitHubTarget, marker: str) -> dict[str, Any] | None:
        """One that we posted and do not know of: the daemon died, or the answer was lost."""
        async for item in self._pages(f"{_path(target)}/reviews", MAX_REVIEWS):
            if isinstance(item, dict) and marker in str(item.get("body") or ""):
                return _posted(item)
        return None

    async def review(
        self, target: GitHubTarget, head_sha: str, event: Event, body: str, comments: Sequence[ReviewComment]
    ) -> dict[str, Any]:
        """`Unprocessable` if GitHub does not take it so."""
        content = {
            "commit_id": head_sha,
            "event": event,
            "body": body,
            "comments": [{"path": c.path, "line": c.line, "side": "RIGHT", "body": c.body} for c in comments],
        }
        return _posted(await self._ask("POST", f"{_path(target)}/reviews", content))

    async def _pages(self, path: str, most: int) -> AsyncIterator[Any]:
        for page in range(1, most // PAGE + 1):
            found = await self._ask("GET", f"{path}?per_page={PAGE}&page={page}")
            if not isinstance(found, list):
                raise _strange(path)
            for item in found:
                yield item
            if len(found) < PAGE:
                return

    async def _ask(self, method: str, path: str, content: object = None) -> Any:
        try:
            async with httpx.AsyncClient(verify=self._context, timeout=TIMEOUT_S, trust_env=False) as client:
                answer = await client.request(method, self._url + path, headers=self._headers, json=content)
                if answer.is_success:
                    return answer.json()
        except httpx.TimeoutException:
            raise OperationTimeout(f"GitHub did not answer within {TIMEOUT_S:.0f} s") from None
        except httpx.HTTPError as error:
            raise HostFailure(f"GitHub cannot be reached at {self._url}: {error}") from None
        except ValueError:
            raise _strange(path) from None
        said = answer.text[:500]
        if answer.status_code == 422 and method == "POST":
            raise Unprocessable(said)
        if answer.status_code in (401, 403, 404):
            raise InvalidRequest(
                f"GitHub answered {answer.status_code} to {method} {path}: the pull request is not there, or the token "
                f"in the secret may not do this. It said: {said}",
                field="target",
            )
        raise HostFailure(f"GitHub answered {answer.status_code} to {method} {path}: {said}")


def _path(target: GitHubTarget) -> str:
    return f"/repos/{target.owner}/{target.repo}/pulls/{target.number}"


def _posted(item: Any) -> dict[str, Any]:
    if not isinstance(item, dict) or not isinstance(item.get("id"), int):
        raise _strange("a review")
    return {"id": item["id"], "url": str(item.get("html_url", "")), "event": str(item.get("state", ""))}


def _strange(what: str) -> HostFailure:
    return HostFailure(f"GitHub's answer about {what} is not understood; is the API's address right?")
