"""What follows a push: triggers, and the mirror at GitHub."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import Field
from starlette.responses import Response

from forkyard.compat.freestyle.calls import Body, Call, done, ours, time_of
from forkyard.compat.freestyle.errors import Refused
from forkyard.compat.freestyle.git import BAD_REQUEST, Git
from forkyard.compat.freestyle.models import Text
from forkyard.errors import NotFound
from forkyard.git.hosting import GitHosting
from forkyard.models.git_triggers import RemoteCreate, TriggerCreate

#: The remote that `githubSync` means.
MIRROR = "github"
_GITHUB = re.compile(r"[A-Za-z0-9][A-Za-z0-9-]*/[A-Za-z0-9._-]+")


class _Event(Body):
    event: Literal["push"] = "push"
    branch: Text | None = None
    branches: list[Text] | None = None
    globs: list[Text] | None = None


class _Action(Body):
    """Their documentation and their types name the fields differently."""

    action: Literal["webhook"] = "webhook"
    endpoint: Text | None = None
    url: Text | None = None


class _NewTrigger(Body):
    trigger: _Event
    action: _Action


class _Mirror(Body):
    name: Text = Field(alias="githubRepoName")


class GitAutomation:
    def __init__(self, hosting: GitHosting, git: Git) -> None:
        self._hosting = hosting
        self._git = git

    async def listed(self, call: Call) -> Response:
        repo = await self._git.repo(call)
        rows = [
            {
                "repositoryId": repo.id,
                "trigger": {"event": "push", "branches": one.branches, "globs": one.paths},
                "action": {"action": "webhook", "endpoint": one.action.get("url", "")},
                "managed": one.action.get("type") != "webhook",
                "id": one.id,
                "createdAt": time_of(one.created_at),
            }
            for one in await self._hosting.triggers.list(repo)
        ]
        return done({"triggers": rows})

    async def create(self, call: Call) -> Response:
        body = await call.body(_NewTrigger, BAD_REQUEST)
        event = body.trigger
        with ours(BAD_REQUEST):
            wanted = TriggerCreate.model_validate(
                {
                    "events": ["push"],
                    "branches": event.branches or ([event.branch] if event.branch else []),
                    "paths": event.globs or [],
                    "action": {"type": "webhook", "url": body.action.endpoint or body.action.url or ""},
                }
            )
        made = await self._hosting.triggers.create(await self._git.repo(call), wanted, call.who)
        return done({"triggerId": made.id})

    async def delete(self, call: Call) -> Response:
        try:
            await self._hosting.triggers.delete(await self._git.repo(call), call.path["trigger"])
        except NotFound as error:
            raise Refused(404, "TRIGGER_ERROR", error.message) from error
        return done()

    async def mirror(self, call: Call) -> Response:
        repo = await self._git.repo(call)
        for remote in await self._hosting.sync.list(repo):
            if remote.name == MIRROR:
                return done({"githubRepoName": remote.url.partition("github.com/")[2].removesuffix(".git")})
        # Clients take an error with a body for a failure; one without is `null` to them.
        return Response(status_code=404)

    async def set_mirror(self, call: Call) -> Response:
        body = await call.body(_Mirror, BAD_REQUEST)
        if _GITHUB.fullmatch(body.name) is None:
            raise Refused(400, BAD_REQUEST, "githubRepoName looks like owner/repository")
        with ours(BAD_REQUEST):
            wanted = RemoteCreate(name=MIRROR, url=f"https://github.com/{body.name}.git")
        await self._hosting.sync.create(await self._git.repo(call), wanted)
        return done()

    async def unset_mirror(self, call: Call) -> Response:
        await self._hosting.sync.delete(await self._git.repo(call), MIRROR)
        return done()
