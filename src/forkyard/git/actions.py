"""What a trigger does: post a webhook, create a sandbox, run a command in one. Each attempt has an `Outcome`."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from typing import Protocol

from forkyard.control.sandboxes import Sandboxes
from forkyard.errors import Conflict, ForkyardError
from forkyard.git.names import NO_SHA
from forkyard.git.signing import Signer, hub_signature
from forkyard.git.webhooks import MAX_RESPONSE_BYTES, Outcome, Sender
from forkyard.guest.base import ExecSpec, Execution, Exit, Guest, Output
from forkyard.lifecycle import State
from forkyard.models import SandboxCreate, SandboxInfo
from forkyard.models.git_triggers import Action, ExecAction, SandboxAction, WebhookAction
from forkyard.store.triggers import DeliveryRecord, TriggerRecord

#: What a command gets on top of its own time limit, for waking the sandbox.
_MARGIN_S = 120.0
#: The first use of a shape builds its template.
_CREATE_S = 1800.0


class CreateSandbox(Protocol):
    def __call__(
        self, request: SandboxCreate, *, api_key_id: str = "", idempotency_key: str | None = None
    ) -> Awaitable[SandboxInfo]: ...


Perform = Callable[[TriggerRecord, Action, DeliveryRecord], Awaitable[Outcome]]


class Actions:
    def __init__(self, sender: Sender, signer: Signer, sandboxes: Sandboxes) -> None:
        self._sender = sender
        self._signer = signer
        self._sandboxes = sandboxes
        #: Whoever can build specs puts itself here.
        self.create_sandbox: CreateSandbox = sandboxes.create
        #: By the action's `type`. More can be added.
        self.by_type: dict[str, Perform] = {"webhook": self.webhook, "sandbox": self.sandbox, "exec": self.exec}

    async def perform(self, trigger: TriggerRecord, action: Action, delivery: DeliveryRecord) -> Outcome:
        began = time.monotonic()
        work = self.by_type.get(action.type)
        if work is None:
            return Outcome(False, 0.0, error=f"nothing in this daemon does what {action.type!r} asks for")
        try:
            return await work(trigger, action, delivery)
        except ForkyardError as error:
            return Outcome(False, _ms(began), error=error.message, retry=error.retryable)

    async def webhook(self, _trigger: TriggerRecord, action: Action, delivery: DeliveryRecord) -> Outcome:
        assert isinstance(action, WebhookAction)
        body = json.dumps(delivery.payload).encode()
        headers = {
            "Content-Type": "application/json",
            "User-Agent": "Forkyard",
            "X-Forkyard-Event": delivery.event,
            "X-Forkyard-Delivery": delivery.id,
            "X-Forkyard-Signature": self._signer.token(delivery.id, body),
        }
        if action.secret is not None:
            headers["X-Hub-Signature-256"] = hub_signature(action.secret, body)
        # Ours are the last word: a header of the trigger cannot pass for a signature.
        private = {name: value for name, value in action.headers.items() if not _ours(name)}
        return await self._sender.post(action.url, headers, private, body, allow_private=action.allow_private)

    async def sandbox(self, trigger: TriggerRecord, action: Action, delivery: DeliveryRecord) -> Outcome:
        assert isinstance(action, SandboxAction)
        began = time.monotonic()
        request = action.sandbox.model_copy(update={"env": {**action.sandbox.env, **variables(delivery)}})
        try:
            async with asyncio.timeout(_CREATE_S):
                # The key: a daemon that dies before it has written down the outcome makes no second one.
                made = await self.create_sandbox(
                    request, api_key_id=trigger.key_id, idempotency_key=f"{delivery.id}:{len(delivery.attempts)}"
                )
        except TimeoutError:
            return Outcome(False, _ms(began), error=f"the sandbox was not there after {_CREATE_S:.0f} s")
        if made.state is State.FAILED:
            return Outcome(False, _ms(began), error=f"sandbox {made.id} failed", response=made.id)
        return Outcome(True, _ms(began), response=made.id)

    async def exec(self, _trigger: TriggerRecord, action: Action, delivery: DeliveryRecord) -> Outcome:
        assert isinstance(action, ExecAction)
        began = time.monotonic()
        spec = ExecSpec(
            command=action.command,
            cwd=action.cwd,
            env={**action.env, **variables(delivery)},
            user=action.user,
            timeout_s=action.timeout_s,
            label="git trigger",
            id=f"{delivery.id}-{len(delivery.attempts)}",
        )
        try:
            async with asyncio.timeout(action.timeout_s + _MARGIN_S), self._sandboxes.use(action.sandbox_id) as guest:
                end, output = await _ran(guest, spec)
        except TimeoutError:
            return Outcome(False, _ms(began), error=f"it did not end within {action.timeout_s:g} s", retry=False)
        text = output.decode("utf-8", "replace")
        if end is None:
            return Outcome(False, _ms(began), error="the sandbox went away before the command ended", response=text)
        if end.exit_code == 0:
            return Outcome(True, _ms(began), status=0, response=text)
        how = "ran out of time" if end.timed_out else f"exit code {end.exit_code}, signal {end.signal}"
        # It ran, and that is how it ended: to run it again is for people to decide.
        return Outcome(False, _ms(began), end.exit_code, f"the command failed: {how}", text, retry=False)


def variables(delivery: DeliveryRecord) -> dict[str, str]:
    sha = delivery.after if delivery.after != NO_SHA else delivery.before
    return {
        "FORKYARD_REPO": str(delivery.payload["repository"]["name"]),
        "FORKYARD_REF": delivery.ref,
        "FORKYARD_SHA": sha,
        "FORKYARD_EVENT": delivery.event,
        "FORKYARD_DELIVERY": delivery.id,
    }


async def _ran(guest: Guest, spec: ExecSpec) -> tuple[Exit | None, bytes]:
    try:
        async with guest.execute(spec) as execution:
            return await _read(execution)
    except Conflict:  # started by a daemon that died meanwhile
        assert spec.id is not None
        async with guest.attach(spec.id) as execution:
            return await _read(execution)


async def _read(execution: Execution) -> tuple[Exit | None, bytes]:
    kept = b""
    async for item in execution:
        if isinstance(item, Output):
            kept = (kept + item.data)[-MAX_RESPONSE_BYTES:]
        elif isinstance(item, Exit):
            return item, kept
    return None, kept


def _ours(name: str) -> bool:
    lower = name.lower()
    return lower.startswith("x-forkyard-") or lower in (
        "content-type",
        "content-length",
        "transfer-encoding",
        "connection",
        "host",
        "user-agent",
        "x-hub-signature-256",
    )


def _ms(began: float) -> float:
    return round((time.monotonic() - began) * 1000, 1)
