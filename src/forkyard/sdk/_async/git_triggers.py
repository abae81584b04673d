"""What a repository does by itself: `repo.triggers` and `repo.remotes`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from forkyard.models import Page
from forkyard.models.base import Request
from forkyard.models.git_triggers import (
    Delivery,
    DeliveryInfo,
    DeliveryStatus,
    DevServerAction,
    Direction,
    EventKind,
    ExecAction,
    GitHubApp,
    RefState,
    RemoteCreated,
    RemoteInfo,
    SandboxAction,
    SpecAction,
    SyncReport,
    TriggerInfo,
    WebhookAction,
)
from forkyard.models.reviews import ReviewPlan
from forkyard.sdk import validation, wire
from forkyard.sdk._async.transport import AsyncTransport

AnyAction = WebhookAction | SandboxAction | SpecAction | ExecAction | DevServerAction | Mapping[str, Any]


class AsyncTriggers:
    """What shall happen when branches or tags of a repository change."""

    def __init__(self, transport: AsyncTransport, repo_path: str) -> None:
        self._transport = transport
        self._path = f"{repo_path}/triggers"

    async def create(
        self,
        action: AnyAction,
        *,
        events: Sequence[EventKind] = ("push",),
        branches: Sequence[str] = (),
        tags: Sequence[str] = (),
        paths: Sequence[str] = (),
        enabled: bool = True,
    ) -> TriggerInfo:
        """`action`: a `WebhookAction`, `SandboxAction`, `SpecAction`, `ExecAction` or `DevServerAction`, or a mapping with
        a `type`. The globs say which branches, tags and changed files it is about."""
        body = {
            "action": _plain(action),
            "events": list(events),
            "branches": list(branches),
            "tags": list(tags),
            "paths": list(paths),
            "enabled": enabled,
        }
        answer = await self._transport.request("POST", self._path, body=body)
        return wire.parse(TriggerInfo, answer.content)

    async def list(self) -> list[TriggerInfo]:
        answer = await self._transport.request("GET", self._path)
        return wire.parse(Page[TriggerInfo], answer.content).items

    async def get(self, trigger_id: str) -> TriggerInfo:
        answer = await self._transport.request("GET", f"{self._path}/{wire.segment(trigger_id)}")
        return wire.parse(TriggerInfo, answer.content)

    async def update(
        self,
        trigger_id: str,
        *,
        action: AnyAction | None = None,
        events: Sequence[EventKind] | None = None,
        branches: Sequence[str] | None = None,
        tags: Sequence[str] | None = None,
        paths: Sequence[str] | None = None,
        enabled: bool | None = None,
    ) -> TriggerInfo:
        """Change what is given."""
        given = {
            "action": None if action is None else _plain(action),
            "events": events,
            "branches": branches,
            "tags": tags,
            "paths": paths,
            "enabled": enabled,
        }
        body = {key: value for key, value in given.items() if value is not None}
        answer = await self._transport.request(
            "PATCH", f"{self._path}/{wire.segment(trigger_id)}", body=body, again=True
        )
        return wire.parse(TriggerInfo, answer.content)

    async def delete(self, trigger_id: str) -> None:
        """With its log."""
        await self._transport.request("DELETE", f"{self._path}/{wire.segment(trigger_id)}")

    async def deliveries(
        self, trigger_id: str, *, status: DeliveryStatus | None = None, limit: int | None = 100
    ) -> Sequence[DeliveryInfo]:
        """What it told, newest first, and how each attempt went."""
        path = f"{self._path}/{wire.segment(trigger_id)}/deliveries"
        return await self._transport.items(Page[DeliveryInfo], path, {"status": status}, limit)

    async def delivery(self, trigger_id: str, delivery_id: str) -> Delivery:
        """With its payload."""
        path = f"{self._path}/{wire.segment(trigger_id)}/deliveries/{wire.segment(delivery_id)}"
        answer = await self._transport.request("GET", path)
        return wire.parse(Delivery, answer.content)

    async def redeliver(self, trigger_id: str, delivery_id: str) -> Delivery:
        """Again, with the same id and payload."""
        path = f"{self._path}/{wire.segment(trigger_id)}/deliveries/{wire.segment(delivery_id)}/redeliver"
        answer = await self._transport.request("POST", path)
        return wire.parse(Delivery, answer.content)


class AsyncRemotes:
    """Other git hosts that a repository is kept in step with."""

    def __init__(self, transport: AsyncTransport, repo_path: str) -> None:
        self._transport = transport
        self._path = f"{repo_path}/remotes"

    async def create(
        self,
        url: str,
        name: str = "origin",
        *,
        direction: Direction = "both",
        branches: Sequence[str] = (),
        tags: bool = True,
        username: str = "git",
        secret: str | None = None,
        github_app: GitHubApp | None = None,
        poll_s: float | None = 300.0,
        hook_secret: str | None = None,
        review: ReviewPlan | Mapping[str, Any] | None = None,
    ) -> RemoteCreated:
        """`secret` names a stored one with the password or token. The answer has the secret of its hook, this once. With a
        `review` plan, pull requests that its webhook tells of are reviewed on GitHub."""
        body = {
            "name": name,
            "url": url,
            "direction": direction,
            "branches": list(branches),
            "tags": tags,
            "username": username,
            "secret": secret,
            "github_app": None if github_app is None else github_app.model_dump(),
            "poll_s": poll_s,
            "hook_secret": hook_secret,
            "review": None if review is None else validation.review_plan(review).model_dump(mode="json"),
        }
        answer = await self._transport.request("POST", self._path, body=body)
        return wire.parse(RemoteCreated, answer.content)

    async def list(self) -> list[RemoteInfo]:
        answer = await self._transport.request("GET", self._path)
        return wire.parse(Page[RemoteInfo], answer.content).items

    async def get(self, name: str = "origin") -> RemoteInfo:
        answer = await self._transport.request("GET", f"{self._path}/{wire.segment(name)}")
        return wire.parse(RemoteInfo, answer.content)

    async def update(self, name: str, /, **changes: Any) -> RemoteInfo:
        """Change its `name`, `url`, `direction`, `branches`, `tags`, `username`, `secret`, `github_app`, `poll_s`,
        `hook_secret` or `review`. It is synced at once; at another url it is compared anew."""
        body = {
            key: value.model_dump(mode="json") if isinstance(value, Request) else value
            for key, value in changes.items()
        }
        answer = await self._transport.request("PATCH", f"{self._path}/{wire.segment(name)}", body=body)
        return wire.parse(RemoteInfo, answer.content)

    async def delete(self, name: str = "origin") -> None:
        """Both sides stay as they are."""
        await self._transport.request("DELETE", f"{self._path}/{wire.segment(name)}")

    async def refs(self, name: str = "origin") -> Sequence[RefState]:
        """How branches and tags stood at the last sync, those not in step first."""
        answer = await self._transport.request("GET", f"{self._path}/{wire.segment(name)}/refs")
        return wire.parse(Page[RefState], answer.content).items

    async def sync(self, name: str = "origin") -> SyncReport:
        """Now, and wait for it. What has diverged is reported and left."""
        answer = await self._transport.request(
            "POST", f"{self._path}/{wire.segment(name)}/sync", timeout_s=wire.CREATE_S, again=True
        )
        return wire.parse(SyncReport, answer.content)


def _plain(action: AnyAction) -> dict[str, Any]:
    if isinstance(action, Mapping):
        return dict(action)
    plain: dict[str, Any] = action.model_dump(mode="json", exclude_defaults=True)
    return {"type": action.type, **plain}
