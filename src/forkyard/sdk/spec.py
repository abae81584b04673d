"""`Spec()`: a machine described in Python, or read from `forkyard.yaml`.

Owns: the builder, and what of a spec is on this machine: files and lockfiles are read here and travel with it. A spec is
a value: every call gives a new one.
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import date
from pathlib import Path
from typing import Any, TypeAlias

from pydantic import ValidationError

from forkyard.errors import InvalidRequest
from forkyard.models import specs as model
from forkyard.models.base import field_of
from forkyard.sdk import lockfiles
from forkyard.sdk.uploads import Upload, image_source
from forkyard.sdk.uploads import context as context_of

#: Text, bytes, a local file or directory, or a mapping with `content` or `from`, `mode`, `user`.
FileSource: TypeAlias = str | bytes | Path | Mapping[str, Any]


class Spec:
    """A machine, described step by step: `Spec().apt("ripgrep").run("npm ci").layer()`."""

    def __init__(self, **fields: Any) -> None:
        self._fields = fields
        self._uploads: tuple[Upload, ...] = ()

    def __repr__(self) -> str:
        return f"Spec({json.dumps(self.to_dict())})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Spec) and self.model() == other.model()

    __hash__ = None  # type: ignore[assignment]

    # ── what it is ───────────────────────────────────────────────────────────────────────────────────────────────

    def base(self, name: str) -> Spec:
        """What it starts from: `debian`, `python`, `node` or `bun`."""
        return self._with(base=name)

    def from_image(self, image: str | os.PathLike[str]) -> Spec:
        """Start from an OCI image: `registry/name:tag`, a local OCI layout, a local `docker save` archive, or the id of
        one that was imported."""
        source, upload = image_source(image)
        return self._with(image=source)._sending(upload)

    def dockerfile(
        self,
        dockerfile: str | os.PathLike[str],
        context: str | os.PathLike[str] | None = None,
        *,
        args: Mapping[str, str] | None = None,
        target: str | None = None,
    ) -> Spec:
        """Start from what a Dockerfile makes: its text, or a path. `context` is the directory that COPY and ADD take
        files from; that of a Dockerfile which is a path is the directory it lies in."""
        text, path = _dockerfile_text(dockerfile, Path())
        where = Path(context) if context is not None else None if path is None else path.parent
        upload = None if where is None else context_of(where, path)
        fields = {"text": text, "context": None if upload is None else upload.digest, "target": target}
        given = {name: value for name, value in fields.items() if value is not None}
        return self._with(dockerfile={**given, "args": dict(args or {})})._sending(upload)

    def name(self, name: str) -> Spec:
        """For people."""
        return self._with(name=name)

    def size(self, *, vcpus: int = 1, memory_mib: int = 512, disk_gib: int = 8) -> Spec:
        return self._with(size={"vcpus": vcpus, "memory_mib": memory_mib, "disk_gib": disk_gib})

    def discriminator(self, value: str) -> Spec:
        """Another value makes other layers."""
        return self._with(discriminator=value)

    def skip_cache(self, skip: bool = True) -> Spec:
        """Build all layers even if they are there."""
        return self._with(skip_cache=skip)

    def from_cache(self) -> Spec:
        """The same, without any `skip_cache`: of its steps too."""
        steps = [
            {"layer": {**step["layer"], "skip_cache": False}}
            if isinstance(step, dict) and isinstance(step.get("layer"), dict)
            else step
            for step in self._fields.get("steps", ())
        ]
        return self._with(skip_cache=False, steps=steps)

    # ── steps ────────────────────────────────────────────────────────────────────────────────────────────────────

    def apt(self, *packages: str) -> Spec:
        """Debian packages."""
        return self._step(apt=list(packages))

    def files(self, files: Mapping[str, FileSource]) -> Spec:
        """By path in the machine: text, bytes, or a local `Path`, which may be a directory."""
        return self._step(files=_files(files, Path()))

    def add(
        self,
        source: str | os.PathLike[str],
        to: str,
        *,
        names: Sequence[str] = (".",),
        owner: str | None = None,
        mode: int | str | None = None,
    ) -> Spec:
        """What is in a local directory, as large as it is: all of it, or `names`, which may be patterns. What its
        `.dockerignore` names stays behind."""
        upload = context_of(Path(source))
        step = {"context": upload.digest, "sources": list(names), "to": to, "owner": owner, "mode": mode}
        return self._step(add=step)._sending(upload)

    def git(
        self,
        url: str,
        path: str = "/repo",
        rev: str | None = None,
        *,
        depth: int | None = None,
        secret: str | None = None,
    ) -> Spec:
        """Clone a repository, a hosted one by its name. `secret`: the name of a stored one, for another host."""
        return self._step(git={"url": url, "path": path, "rev": rev, "depth": depth, "secret": secret})

    def run(
        self,
        command: str | list[str],
        *,
        user: str | None = None,
        cwd: str | None = None,
        timeout_s: float = 3600,
    ) -> Spec:
        """A shell command, or a program and its arguments; a failure ends the build."""
        return self._step(run={"command": command, "user": user, "cwd": cwd, "timeout_s": timeout_s})

    def install(self, lockfile: str | os.PathLike[str], path: str | None = None, *, manager: str | None = None) -> Spec:
        """Dependencies of a local lockfile. Built again when it, or the manifest beside it, has changed. If there is no
        such file here, it must be in the machine, by an earlier step: below `path`, which is below the working directory."""
        step = {"lockfile": os.fspath(lockfile), "path": path, "manager": manager}
        return self._step(install=_install(step, Path()))

    def python(self, version: str = "latest") -> Spec:
        """Python of this version, as `python3`; the base's own if it is that."""
        return self._step(python=version)

    def node(self, version: str | int = "latest") -> Spec:
        """Node.js of this version, such as 22."""
        return self._step(node=version)

    def bun(self, version: str = "latest") -> Spec:
        return self._step(bun=version)

    def uv(self, version: str = "latest") -> Spec:
        return self._step(uv=version)

    def context(self, language: str = "python") -> Spec:
        """Start what `run_code` runs this language with: sandboxes then have it running already."""
        return self._step(context=language)

    def env(self, **variables: str) -> Spec:
        """For later steps, services, and every command of the sandbox."""
        return self._step(env={name: str(value) for name, value in variables.items()})

    def workdir(self, path: str) -> Spec:
        """Of later steps and services, and the default of commands in the sandbox."""
        return self._step(workdir=path)

    def user(self, name: str) -> Spec:
        """Of later steps and services, and the default of commands in the sandbox; made if there is none."""
        return self._step(user=name)

    def service(self, name: str, exec: str | None = None, **options: Any) -> Spec:
        """A systemd unit, started now and ready before the next step: `ready`, `restart`, `type`, `env`, `after` …
        Without `exec` it is what the image says: its ENTRYPOINT and CMD."""
        return self._step(service={"name": name, "exec": exec, **options})

    def wait_for(self, command: str, *, timeout_s: float = 120, interval_s: float = 0.5) -> Spec:
        """Go on when this command succeeds."""
        return self._step(wait_for={"command": command, "timeout_s": timeout_s, "interval_s": interval_s})

    def layer(self, *, discriminator: str = "", skip_cache: bool = False) -> Spec:
        """What stands before this is built once and kept, as a snapshot of the running machine."""
        return self._step(layer={"discriminator": discriminator, "skip_cache": skip_cache})

    # ── in and out ───────────────────────────────────────────────────────────────────────────────────────────────

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Spec:
        """From a YAML or JSON file. Files it names are looked for beside it."""
        file = Path(path)
        try:
            text = file.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidRequest(f"{file} cannot be read: {error}", field="spec") from None
        return cls.parse(text, file.parent, where=str(file))

    @classmethod
    def parse(cls, text: str, directory: str | os.PathLike[str] = ".", *, where: str = "the spec") -> Spec:
        """From YAML or JSON text."""
        document = _document(text, where)
        if not isinstance(document, dict):
            raise InvalidRequest(f"{where} is not a mapping with `steps`", field="spec")
        steps = document.get("steps", [])
        sent: list[Upload] = []
        if isinstance(steps, list):
            document["steps"] = [_read(step, Path(directory), sent) for step in steps]
        uploads = (*sent, *_read_base(document, Path(directory)))
        spec = cls(**{str(name): value for name, value in document.items()})
        spec._uploads = uploads
        spec.model(where)
        return spec

    def model(self, where: str = "spec") -> model.Spec:
        """Checked. `InvalidRequest` names what is wrong, and where."""
        try:
            return model.Spec.model_validate(self._fields)
        except ValidationError as error:
            errors = [
                {"field": field_of(item["loc"]) or "spec", "message": str(item["msg"])} for item in error.errors()
            ]
            message = "; ".join(f"{item['field']}: {item['message']}" for item in errors)
            raise InvalidRequest(f"{where}: {message}", errors=errors) from None

    def to_dict(self) -> dict[str, Any]:
        """As YAML has it, without what is default."""
        return self.model().model_dump(mode="json", exclude_defaults=True)

    @property
    def uploads(self) -> tuple[Upload, ...]:
        """What must be sent ahead of it; clients do."""
        return self._uploads

    def _with(self, **fields: Any) -> Spec:
        made = Spec(**{**self._fields, **fields})
        made._uploads = self._uploads
        return made

    def _sending(self, upload: Upload | None) -> Spec:
        if upload is not None:
            self._uploads = (*self._uploads, upload)
        self.model()  # a mistake is told where it is made
        return self

    def _step(self, **step: Any) -> Spec:
        cleaned = {
            kind: {name: item for name, item in value.items() if item is not None} if isinstance(value, dict) else value
            for kind, value in step.items()
        }
        spec = self._with(steps=[*self._fields.get("steps", ()), cleaned])
        spec.model()  # a mistake is told where it is made
        return spec


def checked(spec: Spec | model.Spec | Mapping[str, Any]) -> model.Spec:
    """A spec in any form."""
    if isinstance(spec, model.Spec):
        return spec
    return (spec if isinstance(spec, Spec) else Spec(**spec)).model()


def uploads_of(spec: Spec | model.Spec | Mapping[str, Any]) -> tuple[Upload, ...]:
    return spec.uploads if isinstance(spec, Spec) else ()


def _dockerfile_text(dockerfile: str | os.PathLike[str], directory: Path) -> tuple[str, Path | None]:
    """The text, and the file it is from."""
    if isinstance(dockerfile, str) and "\n" in dockerfile:
        return dockerfile, None
    path = directory / dockerfile
    if isinstance(dockerfile, str) and not path.is_file() and dockerfile.lstrip().upper().startswith(("FROM ", "ARG ")):
        return dockerfile, None
    try:
        return path.read_text(), path
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"{path} cannot be read: {error}", field="dockerfile") from None


def _read_base(document: dict[Any, Any], directory: Path) -> tuple[Upload, ...]:
    """`image` and `dockerfile` of a file may name what is on this machine: `file`, `context`."""
    uploads: list[Upload] = []
    image = document.get("image")
    if isinstance(image, dict) and "file" in image:
        document["image"], upload = image_source(directory / str(image["file"]))
        uploads += [] if upload is None else [upload]
    given = document.get("dockerfile")
    if isinstance(given, str):
        given = {"text": given} if "\n" in given else {"file": given}
    if isinstance(given, dict):
        rest = {name: value for name, value in given.items() if name not in ("file", "context")}
        path = None
        if "file" in given:
            rest["text"], path = _dockerfile_text(Path(str(given["file"])), directory)
        where = directory / str(given["context"]) if "context" in given else None if path is None else path.parent
        if where is not None:
            uploads.append(context_of(where, path))
            rest["context"] = uploads[-1].digest
        document["dockerfile"] = rest
    return tuple(uploads)


def _document(text: str, where: str) -> Any:
    """JSON is tried first: YAML has no tabs at the beginnings of lines."""
    import yaml

    def once(loader: yaml.SafeLoader, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        names = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode) and key.value != "<<"]
        for name in names:
            if names.count(name) > 1:
                raise yaml.constructor.ConstructorError(None, None, f"{name} is there twice", node.start_mark)
        return yaml.SafeLoader.construct_mapping(loader, node, deep)

    class Loader(yaml.SafeLoader):
        construct_mapping = once

    if text.lstrip().startswith("{"):
        with suppress(ValueError, RecursionError):
            return json.loads(text, object_pairs_hook=_once)
    try:
        return _written(yaml.load(text, Loader), yaml.load(text, yaml.BaseLoader))
    except (yaml.YAMLError, RecursionError) as error:
        raise InvalidRequest(f"{where} is no YAML: {' '.join(str(error).split())}", field="spec") from None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise InvalidRequest(f"{twice} is there twice in one object; keep one of them", field="spec")
    return found


def _read(step: Any, directory: Path, sent: list[Upload]) -> Any:
    """A step of a file, with what it names of this machine put in; `sent`: with what must be sent ahead."""
    if not isinstance(step, dict):
        return step
    if isinstance(files := step.get("files"), dict):
        step = {**step, "files": _files(files, directory)}
    if isinstance(install := step.get("install"), str | dict):
        given = {"lockfile": install} if isinstance(install, str) else install
        step = {**step, "install": _install(given, directory)}
    if isinstance(add := step.get("add"), dict) and "from" in add:
        brought, upload = _add(add, directory)
        step = {**step, "add": brought}
        sent.append(upload)
    return step


def _files(files: Mapping[str, FileSource], directory: Path) -> dict[str, Any]:
    return {path: file for name, source in files.items() for path, file in _file(str(name), source, directory)}


def _file(name: str, source: FileSource, directory: Path) -> Iterator[tuple[str, Any]]:
    if isinstance(source, bytes):
        yield name, _content(source)
    elif isinstance(source, Path):
        yield from _local(name, directory / source, {})
    elif isinstance(source, Mapping) and "from" in source:
        rest = {key: value for key, value in source.items() if key != "from"}
        yield from _local(name, directory / str(source["from"]), rest)
    else:
        yield name, source


def _local(name: str, path: Path, rest: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    try:
        if path.is_dir():
            for below in sorted(path.rglob("*")):
                if below.is_file() and ".git" not in below.relative_to(path).parts:
                    yield f"{name.rstrip('/')}/{below.relative_to(path).as_posix()}", _one(below, rest)
        else:
            yield name, _one(path, rest)
    except OSError as error:
        raise InvalidRequest(f"{path} cannot be read: {error.strerror}", field=f"files.{name}") from None


def _one(path: Path, rest: dict[str, Any]) -> dict[str, Any]:
    executable = {"mode": 0o755} if os.access(path, os.X_OK) else {}
    return {**_content(path.read_bytes()), **executable, **rest}


def _content(data: bytes) -> dict[str, Any]:
    try:
        return {"content": data.decode()}
    except UnicodeDecodeError:
        return {"content": base64.b64encode(data).decode(), "encoding": "base64"}


def _install(step: Mapping[str, Any], directory: Path) -> dict[str, Any]:
    lockfile = directory / str(step.get("lockfile", ""))
    if "files" in step or not lockfile.is_file():
        return dict(step)
    manager = step.get("manager") or model.LOCKFILES.get(lockfile.name)
    files = {name: _content(path.read_bytes()) for name, path in lockfiles.taken(lockfile, manager).items()}
    return {**step, "lockfile": lockfile.name, "files": files}


def _add(step: Mapping[str, Any], directory: Path) -> tuple[dict[str, Any], Upload]:
    """`from`: a directory of this machine."""
    upload = context_of(directory / str(step["from"]))
    rest = {name: value for name, value in step.items() if name != "from"}
    return {"sources": ["."], **rest, "context": upload.digest}, upload


def _written(value: Any, text: Any) -> Any:
    """Values of variables as they stand in the file: `1.10` and `yes` are no numbers and truths there. `text`: the same
    document, with nothing but texts in it."""
    if isinstance(value, list) and isinstance(text, list):
        return [_written(*pair) for pair in zip(value, text, strict=True)]
    if not isinstance(value, dict) or not isinstance(text, dict):
        return value
    found = {name: _written(item, text.get(str(name))) for name, item in value.items()}
    for kind in ("env", "args"):
        if isinstance(given := value.get(kind), dict) and isinstance(said := text.get(kind), dict):
            found[kind] = {
                name: said.get(str(name), item) if isinstance(item, int | float | date) else item
                for name, item in given.items()
            }
    return found
