"""What triggers of repositories do with more than Git: run a spec, reload a dev server, create a sandbox of a spec."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator

from forkyard.builds.builds import Builds
from forkyard.control.plane import ControlPlane
from forkyard.dev.servers import DevServers
from forkyard.git.actions import CreateSandbox
from forkyard.git.clones import Clones
from forkyard.git.hosting import GitHosting
from forkyard.git.names import NO_SHA
from forkyard.git.webhooks import Outcome
from forkyard.models import SandboxCreate, SandboxInfo
from forkyard.models.builds import BuildCreate
from forkyard.models.git_triggers import Action, SpecAction
from forkyard.models.specs import GitRepo, Spec
from forkyard.store.triggers import DeliveryRecord, TriggerRecord


def maker(control: ControlPlane, builds: Builds) -> CreateSandbox:
    """Makes sandboxes, with a spec or without."""

    async def make(request: SandboxCreate, *, api_key_id: str = "", idempotency_key: str | None = None) -> SandboxInfo:
        create = control.sandboxes.create if request.spec is None else builds.sandbox
        return await create(request, api_key_id=api_key_id, idempotency_key=idempotency_key)

    return make


def register(hosting: GitHosting, control: ControlPlane, builds: Builds, servers: DevServers) -> None:
    actions = hosting.automation.actions
    assert actions is not None  # hosting has started

    async def run_spec(trigger: TriggerRecord, action: Action, delivery: DeliveryRecord) -> Outcome:
        assert isinstance(action, SpecAction)
        began = time.monotonic()
        spec = at_push(action.spec, delivery, hosting.clones)
        wanted = BuildCreate(spec=spec, network=action.network, identity=action.identity)
        info = await builds.finished((await builds.create(wanted, key_id=trigger.key_id)).id)
        took_ms = round((time.monotonic() - began) * 1000, 1)
        if info.snapshot_id is not None:
            return Outcome(True, took_ms, response=f"build {info.id}, snapshot {info.snapshot_id}")
        why = "it was cancelled" if info.failure is None else info.failure.message
        # It ran, and that is how it ended.
        return Outcome(False, took_ms, error=f"build {info.id} failed: {why}", retry=False)

    actions.create_sandbox = maker(control, builds)
    actions.by_type["spec"] = run_spec
    actions.by_type["dev_server"] = servers.perform


@contextlib.asynccontextmanager
async def dev_servers(control: ControlPlane, hosting: GitHosting, builds: Builds) -> AsyncIterator[DevServers]:
    """Dev servers, and all that triggers can do, for as long as the block lasts."""
    servers = DevServers(control, hosting, maker(control, builds))
    register(hosting, control, builds, servers)
    await servers.start()
    hosting.automation.deliver()
    try:
        yield servers
    finally:
        await servers.stop()


def at_push(spec: Spec, delivery: DeliveryRecord, clones: Clones) -> Spec:
    """Steps that clone what was pushed, without a revision of their own, clone the commit that was pushed. So what
    stands before them comes from the cache, and they and what follows are done anew."""
    repository = delivery.payload["repository"]
    if delivery.after == NO_SHA:
        return spec

    def pushed(repo: GitRepo) -> bool:
        return repo.rev is None and clones.hosted_name(repo.url) in (repository["id"], repository["name"])

    steps = [
        step.model_copy(update={"git": step.git.model_copy(update={"rev": delivery.after})})
        if step.git is not None and pushed(step.git)
        else step
        for step in spec.steps
    ]
    return spec.model_copy(update={"steps": steps})
