"""A spec as layers, and what makes a layer the same as one that was built before. No I/O.

Owns: the key of a layer, a hash of its parent's key and of everything that goes into it, and the words that say why a
layer is not in the cache.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from forkyard.builds.dockerfile.instructions import CopyStep
from forkyard.models import Shape
from forkyard.models.bases import ImageConfig
from forkyard.models.specs import Spec, Step

#: A new number builds everything anew: how steps are done has changed.
FORMAT = 6
_SHOWN = 120
#: Defaults of commands in a sandbox: the agent looks for them among its variables.
USER, WORKDIR = "FORKYARD_USER", "FORKYARD_WORKDIR"
#: Steps that are done again with the next one: they take no time.
_QUICK = frozenset({"env", "workdir", "user", "files", "config"})
_COMMON_INPUTS = 3


@dataclass(frozen=True)
class Input:
    """One thing a layer is made of. `shown` is for people."""

    name: str
    digest: str
    shown: str

    def to_json(self) -> dict[str, str]:
        return {"name": self.name, "digest": self.digest, "shown": self.shown}


@dataclass(frozen=True)
class Context:
    """What earlier steps have set for later ones."""

    env: tuple[tuple[str, str], ...] = ()
    workdir: str | None = None
    user: str = "root"

    @classmethod
    def of(cls, config: ImageConfig) -> Context:
        """Of a stage of a Dockerfile. The variables of its image are in the machine already."""
        return cls((), config.workdir, config.user)

    @classmethod
    def left(cls, env: Mapping[str, str]) -> Context:
        """By the layers of a spec, as `Layer.env_after` has it."""
        rest = tuple((name, value) for name, value in env.items() if name not in (USER, WORKDIR))
        return cls(rest, env.get(WORKDIR), env.get(USER, "root"))

    def after(self, step: Step) -> Context:
        env = self.env if step.env is None else tuple({**dict(self.env), **step.env}.items())
        workdir, user = step.workdir or self.workdir, step.user or self.user
        if step.config is not None:
            workdir, user = step.config.workdir or workdir, step.config.user or user
        return Context(env, workdir, user)


@dataclass(frozen=True)
class Start:
    """What the first layer begins with."""

    base: str  # as it was named
    template: str  # the key of the machine that has booted
    image: str | None = None  # its image; None: the base image
    parent: Layer | None = None  # a layer of another stage, instead
    context: Context = Context()
    index: int = 0
    allow_secrets: bool = False


@dataclass(frozen=True)
class Layer:
    index: int
    key: str
    parent_key: str | None
    inputs: tuple[Input, ...]
    steps: tuple[tuple[int, Step], ...]  # with their numbers in the spec
    context: Context  # before its first step
    shape: Shape
    skip_cache: bool
    image: str | None = None

    @property
    def sources(self) -> set[int]:
        """Stages it copies from."""
        copies = [step.add for _, step in self.steps if isinstance(step.add, CopyStep)]
        return {copy.stage for copy in copies if copy.stage is not None}

    def env_after(self) -> dict[str, str]:
        """Of the machine, and of what is made of it: how commands are run there travels as variables."""
        context = self._context_after(len(self.steps))
        user = {USER: context.user} if context.user != "root" else {}
        workdir = {WORKDIR: context.workdir} if context.workdir is not None else {}
        return {**user, **workdir, **dict(context.env)}

    def stops(self) -> list[int]:
        """After how many of its steps the machine is kept, so that a change in a later one does not do them again."""
        kinds = [step.kind for _, step in self.steps]
        return [
            count
            for count in range(1, len(kinds))
            if kinds[count - 1] not in _QUICK and (kinds[count - 1], kinds[count]) != ("service", "service")
        ]

    def part(self, count: int) -> Layer:
        """The first `count` steps, as a layer: the same as that of a spec that has only these."""
        inputs = self.inputs[: _COMMON_INPUTS + count]
        return replace(self, key=_key(self.parent_key, inputs), inputs=inputs, steps=self.steps[:count])

    def rest(self, count: int) -> Layer:
        """What is left to do after the first `count` steps."""
        return replace(self, steps=self.steps[count:], context=self._context_after(count))

    def _context_after(self, count: int) -> Context:
        context = self.context
        for _, step in self.steps[:count]:
            context = context.after(step)
        return context


def shape_of(spec: Spec) -> Shape:
    return Shape(**spec.size.model_dump())


def layers_of(spec: Spec, start: Start, steps: Sequence[tuple[int, Step]]) -> list[Layer]:
    """At least one."""
    found: list[Layer] = []
    # What may hold secrets is never what a build finds that would not have kept it.
    apart = ["allow_secrets"] if start.allow_secrets else []
    context, skip = start.context, spec.skip_cache
    before = start.parent
    for part, salt, skips in _parts(steps):
        skip = skip or skips
        parent = found[-1] if found else before
        inputs = [
            Input("base", digest([start.base, start.template]), f"{start.base} ({start.template[:12]})"),
            Input("size", digest(shape_of(spec).model_dump()), _size(spec)),
            Input(
                "discriminator",
                digest([spec.discriminator, salt, *apart]),
                " ".join([spec.discriminator, salt, *apart]).strip(),
            ),
            *(Input(f"step {number}", digest([step.kind, step.canonical()]), shown(step)) for number, step in part),
        ]
        parent_key = None if parent is None else parent.key
        key = _key(parent_key, inputs)
        index = start.index + len(found)
        found.append(
            Layer(index, key, parent_key, tuple(inputs), tuple(part), context, shape_of(spec), skip, start.image)
        )
        for _, step in part:
            context = context.after(step)
    return found


def _key(parent: str | None, inputs: Sequence[Input]) -> str:
    return digest([FORMAT, parent, [(one.name.split()[0], one.digest) for one in inputs]])


def _parts(steps: Sequence[tuple[int, Step]]) -> Iterable[tuple[list[tuple[int, Step]], str, bool]]:
    """Steps of each layer, its discriminator, and whether the cache is to be left alone. None is empty, but for that of
    an empty spec: what is said of an empty layer is said of the next, and of the last if there is none."""
    found: list[tuple[list[tuple[int, Step]], str, bool]] = []
    part: list[tuple[int, Step]] = []
    salt, skip = "", False
    for number, step in steps:
        if step.layer is None:
            part.append((number, step))
            continue
        salt, skip = f"{salt} {step.layer.discriminator}".strip(), skip or step.layer.skip_cache
        if part:
            found.append((part, salt, skip))
            part, salt, skip = [], "", False
    if part or not found:
        found.append((part, salt, skip))
    elif salt or skip:
        last, said, skipped = found.pop()
        found.append((last, f"{said} {salt}".strip(), skip or skipped))
    return found


def _size(spec: Spec) -> str:
    size = spec.size
    return f"{size.vcpus} cpu, {size.memory_mib} MiB, {size.disk_gib} GiB"


def digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, ensure_ascii=True).encode()).hexdigest()


def shown(step: Step) -> str:
    """A step in a few words. Values of variables and contents of files are left out."""
    if step.git is not None:
        text = f"{step.git.url} {step.git.rev or ''}"
    elif step.service is not None:
        text = f"{step.service.name}: {step.service.exec or 'what the image runs'}"
    elif step.run is not None:
        text = step.run.shown()
    elif step.wait_for is not None:
        text = step.wait_for.command
    elif step.add is not None:
        text = f"{' '.join(step.add.sources)} to {step.add.to}"
    elif step.config is not None:
        text = " ".join(step.config.model_fields_set)
    elif step.install is not None:
        text = step.install.lockfile
    elif (version := step.python or step.node or step.bun or step.uv) is not None:
        text = version
    elif step.context is not None:
        text = step.context
    else:
        text = step.workdir or step.user or " ".join(step.apt or step.files or step.env or ())
    line = " ".join(f"{step.kind} {text}".split())
    return line if len(line) <= _SHOWN else line[: _SHOWN - 1] + "…"


def _alike(layer: Layer, inputs: list[dict[str, str]]) -> bool:
    """Whether it may be the same as it was before a change: a step is the same, or the only one is of the same kind."""
    steps = {one.name: one for one in layer.inputs[_COMMON_INPUTS:]}
    others = {one["name"]: one for one in inputs[_COMMON_INPUTS:]}
    if any(name in steps and steps[name].digest == one["digest"] for name, one in others.items()):
        return True
    if len(steps) > 1 or steps.keys() != others.keys():
        return False
    return all(one.shown.split()[0] == others[name]["shown"].split()[0] for name, one in steps.items())


def why_missing(layer: Layer, kept: Sequence[tuple[str | None, list[dict[str, str]]]], *, parent_cached: bool) -> str:
    """`kept`: the parent key and the inputs of each layer there is."""
    if layer.parent_key is not None and not parent_cached:
        return "the layer before it is not in the cache"
    best: tuple[int, list[dict[str, str]]] | None = None
    ours = {(one.name, one.digest) for one in layer.inputs}
    for parent_key, inputs in kept:
        if parent_key == layer.parent_key:
            same = sum((one["name"], one["digest"]) in ours for one in inputs)
            if (best is None or same > best[0]) and _alike(layer, inputs):
                best = (same, inputs)
    if best is None:
        return "nothing like it was built before" if layer.parent_key is None else "nothing was built on that layer yet"
    theirs = {one["name"]: one for one in best[1]}
    # The size first: the machine that has booted, which is in the base, is of one size, too.
    for one in sorted(layer.inputs, key=lambda one: one.name != "size"):
        other = theirs.get(one.name)
        if other is None:
            return f"{one.name} ({one.shown}) is new"
        if other["digest"] != one.digest:
            if other["shown"] == one.shown:
                return f"{one.name} ({one.shown}) has other content"
            return f"{one.name} is `{one.shown}`, and was `{other['shown']}`"
    for name in theirs.keys() - {one.name for one in layer.inputs}:
        return f"{name} ({theirs[name]['shown']}) is gone"
    return "it was built before, and evicted or deleted since"
