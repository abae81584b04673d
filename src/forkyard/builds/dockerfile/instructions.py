"""The instructions of one stage as steps. No I/O.

Owns: what each instruction means, and which variables are known where.
"""

from __future__ import annotations

import hashlib
import posixpath
import re
import shlex
from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from forkyard.builds.dockerfile.parser import Instruction
from forkyard.builds.dockerfile.words import MAX_CHARS, Unbounded, expand, split
from forkyard.errors import InvalidDockerfile
from forkyard.models.bases import AddStep, ConfigStep, DockerfileSource, ImageConfig
from forkyard.models.specs import MAX_FILE_BYTES, FileStep, LayerStep, RunStep, SecretName, Step
from forkyard.models.texts import Name, Part, Path

MAX_STEPS = 1000
MAX_SOURCES = 1000
MAX_VARIABLES = 1000
#: What all values may come to once variables are put in, and the variables that each RUN is given.
MAX_EXPANDED_CHARS = 16 * 2**20
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*$")
_URL = re.compile(r"[a-z]+://|git@")
_GIT = re.compile(r"https?://[^?#]*\.git(#|$)")
_PLACE_OPTIONS = frozenset(["type", "target", "dst", "destination"])
_OWNER_OPTIONS = frozenset(["uid", "gid", "mode"])
_MOUNT_OPTIONS = {
    "secret": _PLACE_OPTIONS | _OWNER_OPTIONS | {"id", "source", "src", "env", "required"},
    "cache": _PLACE_OPTIONS | _OWNER_OPTIONS | {"id", "sharing", "readonly", "ro", "rw"},
    "tmpfs": _PLACE_OPTIONS | {"size"},
}
#: What to do instead of a flag of RUN, or a mount, that there is not.
_INSTEAD = {
    "network": "what a build may reach is said to the build, by its `network`; take it out",
    "security": "a RUN is root in a machine of its own; take it out",
    "bind": "COPY what it needs",
    "ssh": "clone what it needs by a `git` step of the spec, or give it a secret",
}
#: The machine that runs this may have none of these, so it says what it misses.
_DOWNLOAD = (
    'if command -v curl >/dev/null; then curl -fsSL -o "$2" -- "$1"; '
    'elif command -v wget >/dev/null; then wget -q -O "$2" -- "$1"; '
    'else echo "ADD of a url needs curl or wget in the image" >&2; exit 127; fi'
)


class CopyStep(AddStep):
    """COPY and ADD: out of the context, or out of another stage. `content` stands for what is found there."""

    stage: int | None = None
    content: str = ""

    def model_dump(self, **options: Any) -> dict[str, Any]:
        """As it counts for a cache: by what is copied, not by where it lies."""
        dumped = super().model_dump(**options)
        return {**dumped, "context": None, "stage": None} if self.content else dumped


class SecretMount(Part):
    """`RUN --mount=type=secret`: what stands for a secret of the build, for this command alone."""

    id: SecretName
    target: Path | None = None
    env: Name | None = None
    required: bool = False
    mode: int = 0o400
    owner: str = "0:0"


class DirectoryMount(Part):
    """`RUN --mount=type=cache` and `tmpfs`: a directory. What lies in it is kept with the layer."""

    target: Path
    mode: int
    owner: str = "0:0"


class MountedRun(RunStep):
    """RUN with mounts."""

    secrets: tuple[SecretMount, ...]
    directories: tuple[DirectoryMount, ...]


#: The number of the stage, or of the image, that COPY --from names on this line.
StageOf = Callable[[str, int], int]


class Room:
    """What a Dockerfile may still come to: a few lines can name each other to any size."""

    def __init__(self) -> None:
        self._left_chars = MAX_EXPANDED_CHARS

    def take(self, one: Instruction, chars: int) -> None:
        self._left_chars -= chars
        if self._left_chars < 0:
            raise one.wrong(
                f"with its variables put in the Dockerfile has more than {MAX_EXPANDED_CHARS} characters; use "
                "fewer, or shorter ones"
            ) from Unbounded()


def put_in(
    one: Instruction,
    word: str,
    variables: Mapping[str, str],
    room: Room,
    most_chars: int = MAX_CHARS,
    *,
    quotes: bool = True,
) -> str:
    try:
        found = expand(word, variables, one.escape, most_chars, quotes=quotes)
    except ValueError as error:
        raise one.wrong(str(error)) from error
    room.take(one, len(found))
    return found


def arguments(one: Instruction, variables: Mapping[str, str], room: Room) -> list[tuple[str, str | None]]:
    """What ARG names, with the values it gives."""
    found: list[tuple[str, str | None]] = []
    for word in one.words():
        if len(found) == MAX_VARIABLES:
            raise one.wrong(f"more than {MAX_VARIABLES} variables are too many")
        name, equals, value = word.partition("=")
        if not _NAME.match(name):
            raise one.wrong(f"{name!r} cannot be the name of a variable")
        found.append((name, put_in(one, value, variables, room) if equals else None))
    return found


@dataclass(frozen=True)
class Heritage:
    """What a stage leaves to those that start from it, and no image says of itself."""

    args: Mapping[str, str] = field(default_factory=dict)
    shell: tuple[str, ...] = ("/bin/sh", "-c")


_NOTHING = Heritage()


class Compiler:
    """Goes through the instructions of one stage. `config` is that of what it starts from."""

    def __init__(
        self,
        source: DockerfileSource,
        config: ImageConfig,
        known: Mapping[str, str],
        stage_of: StageOf,
        room: Room,
        before: Heritage = _NOTHING,
    ) -> None:
        self._source, self._known, self._stage_of, self._room = source, known, stage_of, room
        self._args = dict(before.args)
        self._shell = before.shell
        self._has_cmd = False
        self.config = config
        self.steps: list[tuple[int, Step]] = []
        self._meanings: dict[str, Callable[[Instruction], None]] = {
            "RUN": self._run,
            "COPY": self._copy,
            "ADD": self._copy,
            "ENV": self._env,
            "ARG": self._arg,
            "WORKDIR": self._workdir,
            "USER": self._user,
            "ENTRYPOINT": self._entrypoint,
            "CMD": self._cmd,
            "EXPOSE": self._expose,
            "LABEL": self._label,
            "SHELL": self._set_shell,
            "VOLUME": self._volume,
            "STOPSIGNAL": self._stop_signal,
            "HEALTHCHECK": lambda _: None,  # nobody here asks; services have `ready`
            "MAINTAINER": self._maintainer,
        }

    def go_through(self, instructions: Sequence[Instruction], *, unsure: bool = False) -> None:
        """`unsure`: what it starts from is not known yet, and so not the values of all variables."""
        for one in instructions:
            try:
                self._understand(one)
            except InvalidDockerfile as error:
                if not (unsure and "$" in one.rest) or isinstance(error.__cause__, Unbounded):
                    raise

    def heritage(self) -> Heritage:
        return Heritage(self._args, self._shell)

    def _understand(self, one: Instruction) -> None:
        try:
            self._meanings[one.name](one)
        except ValidationError as error:
            first = error.errors()[0]
            raise one.wrong(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None

    # ── what changes files ───────────────────────────────────────────────────────────────────────────────────────

    def _run(self, one: Instruction) -> None:
        secrets, directories = [], []
        for flag, value in one.flags:
            if flag == "mount":
                options = dict(part.partition("=")[::2] for part in self._expanded(one, value).split(","))
                kind = options.get("type", "bind")
                if kind not in _MOUNT_OPTIONS:
                    raise one.wrong(f"--mount={value} is not supported; {_INSTEAD.get(kind, _INSTEAD['bind'])}")
                for option in options.keys() - _MOUNT_OPTIONS[kind]:
                    there = ", ".join(sorted(_MOUNT_OPTIONS[kind]))
                    raise one.wrong(f"--mount of a {kind} has no {option!r}; there is {there}")
                if kind == "secret":
                    secrets.append(self._secret(one, options))
                else:
                    directories.append(self._directory(one, options))
            elif (flag, value) not in (("network", "default"), ("security", "sandbox")):
                raise one.wrong(f"--{flag}={value} is not supported; {_INSTEAD.get(flag, 'take it out')}")
        command = one.json() or [*self._shell, script(one)]
        env = {name: value for name, value in self._args.items() if name not in self.config.env}
        self._room.take(one, sum(map(len, env.values())))
        if secrets or directories:
            run = MountedRun(command=command, env=env, secrets=tuple(secrets), directories=tuple(directories))
            self._kept(one, Step.model_construct(run=run))
        else:
            self._kept(one, Step(run=RunStep(command=command, env=env)))

    def _directory(self, one: Instruction, options: Mapping[str, str]) -> DirectoryMount:
        target = _target(options)
        if target is None:
            raise one.wrong(f"--mount of a {options['type']} needs a target")
        owner, mode = _owner_and_mode(one, options, "1777" if options["type"] == "tmpfs" else "0755")
        return DirectoryMount(target=posixpath.join(self.config.workdir, target), mode=mode, owner=owner)

    def _secret(self, one: Instruction, options: Mapping[str, str]) -> SecretMount:
        target = _target(options)
        name = options.get("id") or options.get("source") or options.get("src") or posixpath.basename(target or "")
        if not _NAME.match(name):
            raise one.wrong(f"{name!r} is no name of a stored secret; write --mount=type=secret,id=NPM_TOKEN")
        owner, mode = _owner_and_mode(one, options, "0400")
        if target is None and "env" not in options:
            target = f"/run/secrets/{name}"
        return SecretMount(
            id=name,
            target=None if target is None else posixpath.join(self.config.workdir, target),
            env=options.get("env"),
            required=options.get("required", "false") in ("", "true", "1"),
            mode=mode,
            owner=owner,
        )

    def _copy(self, one: Instruction) -> None:
        owner, mode, stage = self._flags(one)
        named = one.json()
        words = named or one.words()
        if len(words) < 2:
            raise one.wrong("needs a source and a destination")
        if len(words) > MAX_SOURCES + 1:
            raise one.wrong(f"more than {MAX_SOURCES} sources are too many; copy their directory")
        # In a list of JSON the quotes have gone already: those that are left are of the name.
        *sources, to = (self._expanded(one, word, quotes=named is None) for word in words)
        to = posixpath.join(self.config.workdir, to) + ("/" if to in (".", "..") else "")
        if len(sources) > 1 and not to.endswith("/"):
            raise one.wrong("with several sources the destination is a directory, and ends with `/`")
        if one.heredocs:
            self._write(one, to, owner, mode)
        urls = [name for name in sources if one.name == "ADD" and _URL.match(name)]
        for url in urls:
            if _is_git(url):
                raise one.wrong(f"{url} is a repository; clone it in a RUN, or by a `git` step of the spec")
        for url in urls:
            self._download(one, url, to, owner, mode)
        opened = {heredoc.word for heredoc in one.heredocs} | {f"<<{heredoc.name}" for heredoc in one.heredocs}
        paths = [name for name in sources if name not in urls and name not in opened]
        if paths:
            if stage is None and self._source.context is None:
                raise one.wrong("there is no context to copy from; give one with the Dockerfile")
            context = self._source.context if stage is None else None
            step = CopyStep(
                context=context, sources=paths, to=to, owner=owner, mode=mode, extract=one.name == "ADD", stage=stage
            )
            self._kept(one, Step.model_construct(add=step))

    def _flags(self, one: Instruction) -> tuple[str | None, int | None, int | None]:
        owner, mode, stage = None, None, None
        for flag, value in one.flags:
            if flag == "chown":
                owner = self._expanded(one, value)
            elif flag == "chmod":
                if not re.fullmatch(r"[0-7]{3,4}", value):
                    raise one.wrong(f"--chmod={value} is no octal number such as 755")
                mode = int(value, 8)
            elif flag == "from" and one.name == "COPY":
                stage = self._stage_of(self._expanded(one, value), one.line)
            elif flag not in ("link", "keep-git-dir"):
                raise one.wrong(f"--{flag} is not supported; take it out")
        return owner, mode, stage

    def _write(self, one: Instruction, to: str, owner: str | None, mode: int | None) -> None:
        files = {}
        for heredoc in one.heredocs:
            content = heredoc.content
            if heredoc.expands:
                content = _expanded_text(one, content, self._variables(), self._room)
            path = posixpath.join(to, heredoc.name) if to.endswith("/") else to
            files[path] = FileStep(content=content, mode=0o644 if mode is None else mode, user=owner or "root")
        self._kept(one, Step(files=files))

    def _download(self, one: Instruction, url: str, to: str, owner: str | None, mode: int | None) -> None:
        name = posixpath.basename(url.partition("?")[0]) or "index.html"
        path = posixpath.join(to, name) if to.endswith("/") else to
        script = [
            f"mkdir -p -- {shlex.quote(posixpath.dirname(path))} && {{ {_DOWNLOAD}; }}",
            f'chmod {0o600 if mode is None else mode:o} -- "$2"',
            *([f'chown {shlex.quote(owner)} -- "$2"'] if owner is not None else []),
        ]
        command = ["/bin/sh", "-c", " && ".join(script), "add", url, path]
        self._kept(one, Step(run=RunStep(command=command, user="root")))

    # ── what later ones are told ─────────────────────────────────────────────────────────────────────────────────

    def _env(self, one: Instruction) -> None:
        variables = self._variables()
        found = {}
        for name, value in pairs(one):
            if not _NAME.match(name):
                raise one.wrong(f"{name!r} cannot be the name of a variable")
            found[name] = put_in(one, value, variables, self._room)
            self._bound(one, len(self.config.env) + len(found))
        self.config = self.config.model_copy(update={"env": {**self.config.env, **found}})
        self.steps.append((one.line, Step(env=found)))

    def _arg(self, one: Instruction) -> None:
        for name, value in arguments(one, self._variables(), self._room):
            self._bound(one, len(self._args) + 1)
            if name in self._source.args:
                self._args[name] = self._source.args[name]
            elif value is not None:
                self._args[name] = value
            elif name in self._known:
                self._args[name] = self._known[name]

    def _workdir(self, one: Instruction) -> None:
        path = posixpath.normpath(posixpath.join(self.config.workdir, self._expanded(one, one.rest)))
        self.steps.append((one.line, Step(workdir=path)))
        self._set(one, workdir=path)

    def _user(self, one: Instruction) -> None:
        self._set(one, user=self._expanded(one, one.rest))

    def _entrypoint(self, one: Instruction) -> None:
        # A CMD of what the stage starts from was meant for another program.
        self._set(one, entrypoint=self._program(one), cmd=None if self._has_cmd else [])

    def _cmd(self, one: Instruction) -> None:
        self._has_cmd = True
        self._set(one, cmd=self._program(one))

    def _program(self, one: Instruction) -> list[str]:
        found = one.json()
        return [*self._shell, one.rest] if found is None else found

    def _expose(self, one: Instruction) -> None:
        self._set(one, expose=[self._expanded(one, word).lower() for word in one.words()])

    def _label(self, one: Instruction) -> None:
        found = pairs(one)
        self._set(one, labels={self._expanded(one, name): self._expanded(one, value) for name, value in found})

    def _maintainer(self, one: Instruction) -> None:
        self._set(one, labels={"maintainer": one.rest})

    def _volume(self, one: Instruction) -> None:
        named = one.json()
        self._set(one, volumes=[self._expanded(one, word, quotes=named is None) for word in named or one.words()])

    def _stop_signal(self, one: Instruction) -> None:
        self._set(one, stop_signal=self._expanded(one, one.rest))

    def _set_shell(self, one: Instruction) -> None:
        found = one.json()
        if not found:
            raise one.wrong('write it as a list: SHELL ["/bin/bash", "-c"]')
        self._shell = tuple(found)

    # ── inside ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _set(self, one: Instruction, **values: object) -> None:
        step = ConfigStep.model_validate(values)
        self.steps.append((one.line, Step(config=step)))
        self.config = self.config.after(step)

    def _kept(self, one: Instruction, step: Step) -> None:
        """A step whose outcome is a layer."""
        if len(self.steps) >= 2 * MAX_STEPS:
            raise one.wrong(f"more than {MAX_STEPS} steps are too many") from Unbounded()
        self.steps.append((one.line, step))
        self.steps.append((one.line, Step(layer=LayerStep())))

    def _bound(self, one: Instruction, variables: int) -> None:
        if variables > MAX_VARIABLES:
            raise one.wrong(f"more than {MAX_VARIABLES} variables are too many") from Unbounded()

    def _variables(self) -> Mapping[str, str]:
        return ChainMap(self.config.env, self._args)

    def _expanded(self, one: Instruction, word: str, *, quotes: bool = True) -> str:
        return put_in(one, word, self._variables(), self._room, quotes=quotes)


def _target(options: Mapping[str, str]) -> str | None:
    return options.get("target") or options.get("dst") or options.get("destination") or None


def _owner_and_mode(one: Instruction, options: Mapping[str, str], usual: str) -> tuple[str, int]:
    uid, gid, mode = options.get("uid", "0"), options.get("gid", "0"), options.get("mode", usual)
    if not (re.fullmatch(r"[0-9]{1,9} [0-9]{1,9}", f"{uid} {gid}") and re.fullmatch(r"[0-7]{3,4}", mode)):
        raise one.wrong(f"uid={uid}, gid={gid}, mode={mode}: these are numbers, mode an octal one such as {usual}")
    return f"{uid}:{gid}", int(mode, 8)


def _is_git(url: str) -> bool:
    """As Docker tells repositories from files."""
    return url.startswith(("git@", "git://", "ssh://")) or bool(_GIT.match(url))


def pairs(one: Instruction) -> list[tuple[str, str]]:
    """`name=value name="other value"`, or the old `name value`."""
    words = one.words()
    if "=" not in words[0]:
        name, value = words[0], one.rest[len(words[0]) :].strip()
        if not value:
            raise one.wrong(f"{name} has no value; write {name}=value")
        return [(name, value)]
    split_up = [word.partition("=") for word in split(one.rest, one.escape)]
    for name, equals, _ in split_up:
        if not equals:
            raise one.wrong(f"{name!r} has no `=`")
    return [(name, value) for name, _, value in split_up]


def _expanded_text(one: Instruction, text: str, variables: Mapping[str, str], room: Room) -> str:
    """Variables of a heredoc."""
    return put_in(one, text, variables, room, MAX_FILE_BYTES, quotes=False)


def script(one: Instruction) -> str:
    """What the shell is given."""
    if not one.heredocs:
        return one.rest
    first = one.heredocs[0]
    if one.rest != first.word:
        return one.rest + "\n" + "".join(heredoc.raw for heredoc in one.heredocs)
    if not first.content.startswith("#!"):
        return first.content
    end = "END_" + hashlib.sha256(first.content.encode()).hexdigest()[:16]
    return (
        f"f=$(mktemp) && cat > \"$f\" <<'{end}'\n{first.content}{end}\n"
        'chmod 755 "$f" && "$f"; code=$?; rm -f "$f"; exit $code'
    )
