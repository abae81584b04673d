"""A Dockerfile as stages: for each what it starts from, and its steps. No I/O.

Owns: which stages there are and which of them a target needs. It is told what images say of themselves by whoever can
look.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

from forkyard.builds.dockerfile.instructions import Compiler, Heritage, Room, arguments, put_in
from forkyard.builds.dockerfile.parser import Instruction, parse, wrong
from forkyard.models.bases import DockerfileSource, ImageConfig
from forkyard.models.specs import Step

SCRATCH = "scratch"
_PLATFORM = {
    f"{side}{name}": value
    for side in ("TARGET", "BUILD")
    for name, value in (("PLATFORM", "linux/amd64"), ("OS", "linux"), ("ARCH", "amd64"), ("VARIANT", ""))
}
_PLATFORMS = ("linux/amd64", "linux/x86_64", "amd64", "x86_64", "linux")
_STAGE_NAME = re.compile(r"[a-z][a-z0-9_.-]*$")

#: What an image says of itself.
ConfigOf = Callable[[str], Awaitable[ImageConfig]]


@dataclass(frozen=True)
class Stage:
    number: int
    base: str | int  # an image, or an earlier stage
    steps: tuple[tuple[int, Step], ...]  # with the lines they stand on
    before: ImageConfig
    after: ImageConfig


@dataclass
class Outline:
    """A stage before anything is looked up."""

    number: int
    name: str
    base: str
    instructions: list[Instruction] = field(default_factory=list)


@dataclass
class Dockerfile:
    source: DockerfileSource
    arguments: dict[str, str]  # those before the first FROM
    outlines: list[Outline]

    @classmethod
    def read(cls, source: DockerfileSource) -> Dockerfile:
        """All that can be said without looking anywhere. `InvalidDockerfile` names the line. Takes its time."""
        known, room = dict(_PLATFORM), Room()
        found: list[Outline] = []
        for one in parse(source.text):
            if one.name == "FROM":
                found.append(_from(one, known, len(found), room))
            elif found:
                found[-1].instructions.append(one)
            elif one.name == "ARG":
                for name, value in arguments(one, known, room):
                    known[name] = source.args.get(name, known.get(name, "") if value is None else value)
            else:
                raise one.wrong("stands before the first FROM; only ARG may")
        if not found:
            raise wrong(1, "there is no FROM in it")
        read = cls(source, known, found)
        read.target()
        for outline in found:
            Compiler(source, ImageConfig(), known, lambda *_: 0, room).go_through(outline.instructions, unsure=True)
        return read

    async def stages(self, config_of: ConfigOf) -> list[Stage]:
        """Those that the target needs, each after those it needs itself, the target last. An image that is only copied
        from is a stage too."""
        needed = _Needed(self, config_of)
        await needed.stage(self.target())
        return needed.order

    def target(self) -> int:
        if self.source.target is None:
            return len(self.outlines) - 1
        found = self.named(self.source.target, len(self.outlines))
        if found is None:
            names = ", ".join(one.name or str(one.number) for one in self.outlines)
            raise wrong(1, f"there is no stage {self.source.target!r}; there is {names}")
        return found

    def named(self, name: str, before: int) -> int | None:
        for one in reversed(self.outlines[:before]):
            if one.name and one.name == name.lower():
                return one.number
        return int(name) if name.isdigit() and int(name) < before else None


class _Needed:
    def __init__(self, file: Dockerfile, config_of: ConfigOf) -> None:
        self._file, self._config_of = file, config_of
        self._made: dict[str | int, Stage] = {}
        self._left: dict[int, Heritage] = {}
        self._rooms = Room(), Room()
        self.order: list[Stage] = []

    async def stage(self, number: int) -> Stage:
        if number in self._made:
            return self._made[number]
        file, outline = self._file, self._file.outlines[number]
        base: str | int = outline.base
        before = Heritage()
        earlier = None if outline.base.isdigit() else file.named(outline.base, number)
        if earlier is not None:
            base, config = earlier, (await self.stage(earlier)).after
            before = self._left[earlier]
        else:
            config = await self._config(outline.base)
        named: list[tuple[str, int]] = []

        def note(name: str, line: int) -> int:
            named.append((name, line))
            return 0

        looking = Compiler(file.source, config, file.arguments, note, self._rooms[0], before)
        await asyncio.to_thread(looking.go_through, outline.instructions)
        numbers = {name: await self._source(name, number, line) for name, line in named}
        compiler = Compiler(file.source, config, file.arguments, lambda name, _: numbers[name], self._rooms[1], before)
        await asyncio.to_thread(compiler.go_through, outline.instructions)
        self._left[number] = compiler.heritage()
        return self._keep(number, Stage(number, base, tuple(compiler.steps), config, compiler.config))

    async def _source(self, name: str, before: int, line: int) -> int:
        found = self._file.named(name, before)
        if found is not None:
            return (await self.stage(found)).number
        if name.isdigit():
            raise wrong(line, f"--from={name}: there is no such stage before this one")
        if name not in self._made:
            config = await self._config(name)
            number = len(self._file.outlines) + sum(isinstance(key, str) for key in self._made)
            self._keep(name, Stage(number, name, (), config, config))
        return self._made[name].number

    async def _config(self, image: str) -> ImageConfig:
        return ImageConfig() if image == SCRATCH else await self._config_of(image)

    def _keep(self, key: str | int, stage: Stage) -> Stage:
        self._made[key] = stage
        self.order.append(stage)
        return stage


def _from(one: Instruction, known: Mapping[str, str], number: int, room: Room) -> Outline:
    words = [put_in(one, word, known, room) for word in one.words()]
    for flag, value in one.flags:
        if flag != "platform":
            raise one.wrong(f"there is no flag --{flag}")
        platform = put_in(one, value, known, room)
        if platform not in ("", *_PLATFORMS):
            raise one.wrong(f"--platform={platform}: this host runs linux/amd64; take it out")
    if len(words) not in (1, 3) or (len(words) == 3 and words[1].lower() != "as"):
        raise one.wrong("write `FROM image` or `FROM image AS name`")
    if not words[0]:
        raise one.wrong(f"{one.rest!r} comes to nothing: an ARG in it has no value")
    name = words[2].lower() if len(words) == 3 else ""
    if name and not _STAGE_NAME.match(name):
        raise one.wrong(f"{name!r} cannot be the name of a stage")
    return Outline(number, name, words[0])
