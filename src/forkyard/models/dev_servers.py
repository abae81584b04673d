"""Wire types of dev servers."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal, Self

from pydantic import Field, StringConstraints, ValidationError, model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError

from forkyard.lifecycle import State
from forkyard.models import EnvName, SandboxCreate
from forkyard.models.base import Answer, Request
from forkyard.models.git import Ref, RepoCreate
from forkyard.models.network import Port
from forkyard.models.specs import HOSTED, GitRepo, Manager, SecretName
from forkyard.models.texts import Path, Text, User, Value

OnPush = Literal["restart", "pull", "ignore"]
DevServerName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")]


class DevServerCreate(Request):
    name: DevServerName | None = Field(None, description="Unique among dev servers. Default: its id.")
    repo: Text | None = Field(
        None,
        description="A hosted repository, by name, id or address; or the url of another, which is not told of pushes. With "
        "`template_repo`: the name of the new one.",
    )
    template_repo: Text | None = Field(
        None,
        max_length=2048,
        description="A hosted repository or a url: a new hosted repository is made of it, with its history.",
    )
    branch: Ref | None = Field(None, description="Default: the default branch.")
    command: Text | None = Field(None, description="A shell command. Default: found out from the repository's files.")
    install: str | None = Field(
        None, max_length=65536, description="Run before it. Default: found out; empty: nothing."
    )
    port: Port = Field(3000, description="What it listens on, also told as $PORT.")
    path: Path = Field("/repo", description="Where the repository is, in the sandbox.")
    user: User | None = Field(None, description="Who runs it. Default: root.")
    env: dict[EnvName, Value] = Field(default_factory=dict, max_length=256)
    on_push: OnPush = Field(
        "restart",
        description="What a push to the branch does. `restart`: fetch, install if a manifest changed, restart. `pull`: the "
        "same for servers that see changed files themselves; restarted only if something was installed.",
    )
    ready_timeout_s: float = Field(300.0, gt=0, le=3600, description="It must answer on its port in this time.")
    secret: SecretName | None = Field(
        None, description="Secret with a password or token, if `repo`, or else `template_repo`, is a url."
    )
    sandbox: SandboxCreate = Field(
        default_factory=lambda: SandboxCreate(persistence="persistent"), description="The machine it runs in."
    )

    @model_validator(mode="after")
    def _can_be_made(self) -> Self:
        """What the repository and the machine are asked for with is refused here, with the field it came in."""
        if self.repo is None and self.template_repo is None:
            raise _refused(("repo",), None, "give a repo, or a template_repo to make one of")
        try:
            if self.template_repo is not None:
                RepoCreate(name=self.repo)
            clone = self.clone(self.repo if self.repo is not None and self.template_repo is None else "new")
        except ValidationError as error:
            first = error.errors()[0]
            where = _OF_CLONE.get(str(first["loc"][0]), str(first["loc"][0])) if first["loc"] else "secret"
            raise _refused((where,), getattr(self, where, None), first["msg"]) from None
        try:
            self.machine(clone)
        except ValidationError as error:
            raise _refused(("sandbox", "git"), self.path, error.errors()[0]["msg"]) from None
        return self

    def clone(self, url: str, branch: str | None = None) -> GitRepo:
        """Of this repository. The secret is for one elsewhere, which is no name."""
        secret = self.secret if self.template_repo is None and not HOSTED.fullmatch(url) else None
        return GitRepo(url, self.path, branch or self.branch, user=self.user, secret=secret)

    def machine(self, clone: GitRepo, **changes: Any) -> SandboxCreate:
        """What it runs in, with the clone. Checked again: another repository may want to be at the same path."""
        changes["git"] = [clone, *self.sandbox.git]
        asked = SandboxCreate.model_validate({**dict(self.sandbox), **changes})
        asked.model_fields_set.intersection_update(self.sandbox.model_fields_set | changes.keys())
        return asked


#: The fields of a clone, as they are called here.
_OF_CLONE = {"url": "repo", "name": "repo", "rev": "branch"}


def _refused(where: tuple[str, ...], given: object, said: str) -> ValidationError:
    said = said.removeprefix("Value error, ")
    error = InitErrorDetails(type=PydanticCustomError("value_error", "{said}", {"said": said}), loc=where, input=given)
    return ValidationError.from_exception_data("DevServerCreate", [error], hide_input=True)


class DevServerInfo(Answer):
    id: str
    name: str
    repo_id: str | None = Field(None, description="Of a hosted repository.")
    repo_url: str
    branch: str
    sandbox_id: str
    sandbox_state: State
    url: str = Field(description="Its preview; opening it wakes the sandbox.")
    port: int
    path: str
    manager: Manager | None = None
    install: str | None = None
    command: str
    on_push: OnPush
    sha: str = Field(description="The commit it serves, as of the last reload.")
    error: str | None = Field(None, description="Why the last reload failed; what was served before is served on.")
    created_at: datetime
    updated_at: datetime


class DevServerLogs(Answer):
    log: str
