"""What a client says a template is made of, as a spec of ours. Pure.

An image that is Debian with one of our runtimes in it is our base image: it boots in no time, and has what they have.
Others are pulled.
"""

from __future__ import annotations

import posixpath
import shlex
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from forkyard.builds.bases import family_of
from forkyard.builds.drawing import is_snapshot
from forkyard.builds.templates import Recipe
from forkyard.compat.e2b.errors import Refused
from forkyard.compat.e2b.models import BuildStart, BuildStep
from forkyard.models.specs import Size, Spec, Step

#: E2B's own images, which are much like our base image.
_THEIRS = ("e2bdev/base", "e2bdev/code-interpreter")
START = "start"
_READY_S = 300.0


def recipe_of(
    start: BuildStart,
    size: Size,
    uploads: Mapping[str, str],
    *,
    base: Recipe | None,
    snapshot: str | None,
    default_user: str,
    default_home: str,
) -> Recipe:
    """`uploads`: by the client's hash. `base`: of the template it starts from; or it starts from a `snapshot`, with its
    memory."""
    made = _Making(base, default_user, default_home, start.start_cmd is not None)
    for number, step in enumerate(start.steps, 1):
        made.step(str(number), step, uploads)
    made.end(start)
    origin: dict[str, Any] = {"base": "debian"}
    if base is not None:
        origin = {name: getattr(base.spec, name) for name in ("base", "image") if name in base.spec.model_fields_set}
    elif snapshot is not None:
        origin = {"base": snapshot}
    elif start.from_image is not None:
        origin = _origin(start.from_image)
    try:
        # A snapshot has its size, whatever is said of it.
        sized = {} if is_snapshot(origin.get("base", "")) else {"size": size}
        spec = Spec(**origin, **sized, steps=made.steps, skip_cache=start.force)
    except ValidationError as error:
        raise Refused(400, _said(error)) from None
    return Recipe(spec, made.user, made.workdir, made.labels)


def _origin(image: str) -> dict[str, Any]:
    if image.partition(":")[0] in _THEIRS:
        return {"base": "debian"}
    known = family_of(image)
    return {"image": image} if known is None else {"base": known}


class _Making:
    def __init__(self, base: Recipe | None, user: str, home: str, restarted: bool) -> None:
        self.steps: list[Step] = []
        self.labels: list[str] = []
        if base is None:
            self.user, self.workdir = user, home
            self._add("base", user=user)
            self._add("base", workdir=home)
        else:
            self.user, self.workdir = base.user, base.workdir
            # A start command of its own takes the place of that of its base.
            kept = [step for step in base.spec.steps if not (restarted and step.service is not None)]
            self.steps, self.labels = kept, ["base"] * len(kept)

    def _add(self, label: str, **step: Any) -> None:
        try:
            self.steps.append(Step(**step))
        except ValidationError as error:
            raise Refused(400, f"step {label}: {_said(error)}") from None
        self.labels.append(label)

    def step(self, label: str, step: BuildStep, uploads: Mapping[str, str]) -> None:
        args = step.args
        kind = step.type.upper()
        if kind == "RUN" and args:
            self._add(label, run={"command": args[0], "user": args[1] if len(args) > 1 and args[1] else None})
            self._layer(label, step)
        elif kind == "COPY" and len(args) >= 2:
            self._copy(label, step, uploads)
            self._layer(label, step)
        elif kind == "ENV" and args and len(args) % 2 == 0:
            self._add(label, env=dict(zip(args[::2], args[1::2], strict=True)))
        elif kind == "WORKDIR" and len(args) == 1:
            self.workdir = posixpath.normpath(posixpath.join(self.workdir, args[0]))
            self._add(label, workdir=self.workdir)
        elif kind == "USER" and args:
            self.user = args[0]
            self._add(label, user=self.user)
        else:
            raise Refused(400, f"step {label}: {step.type[:40]} with {len(args)} arguments is not served here")

    def _layer(self, label: str, step: BuildStep) -> None:
        self._add(label, layer={"skip_cache": step.force})

    def _copy(self, label: str, step: BuildStep, uploads: Mapping[str, str]) -> None:
        source, to, *more = step.args
        owner, mode = (*more, "", "")[:2]
        upload = uploads.get(step.files_hash or "")
        if upload is None:
            raise Refused(400, f"step {label}: the files of COPY {source[:200]} were not uploaded")
        if mode and not (len(mode) <= 5 and all(digit in "01234567" for digit in mode)):
            raise Refused(400, f"step {label}: {mode[:20]!r} is no mode such as 0755")
        wanted = {
            "context": upload,
            "sources": [source],
            "to": posixpath.join(self.workdir, to),
            "owner": owner or self.user,
            "mode": int(mode, 8) if mode else None,
        }
        self._add(label, add=wanted)

    def end(self, start: BuildStart) -> None:
        if start.start_cmd is not None:
            service = {
                "name": START,
                # What has done its work and ended is not a failure.
                "exec": f"/bin/bash -l -c {shlex.quote(start.start_cmd)} && exec sleep infinity",
                "user": self.user,
                "workdir": self.workdir,
                "ready": start.ready_cmd,
                "ready_timeout_s": _READY_S,
            }
            self._add("finalize", service=service)
        elif start.ready_cmd is not None:
            self._add("finalize", wait_for={"command": start.ready_cmd, "timeout_s": _READY_S})


def _said(error: ValidationError) -> str:
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    return f"{'.'.join(str(part) for part in first['loc'])}: {first['msg']}"[:500]
