"""OCI images as they come: a layout, or the archive of one, or what `docker save` writes. Blocking.

Owns: finding the manifest for this kind of machine, its config and its layers, and that each is what its digest says.
Archives are an attacker's: of them only files with names of our own making are ever written.
"""

from __future__ import annotations

import hashlib
import json
import posixpath
import re
import tarfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forkyard.errors import InvalidImage
from forkyard.images.archives import BROKEN, Member, members
from forkyard.models.bases import ImageConfig

OS, ARCHITECTURE = "linux", "amd64"
MAX_LAYERS = 500
MAX_MEMBERS = 100_000
_MAX_JSON_BYTES = 8 * 2**20
_BLOB = re.compile(r"(?:\./)?blobs/sha256/([0-9a-f]{64})$")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}$")
_CHUNK_BYTES = 1 << 20
#: What the kernel gives a program as one variable, its end included; and what the agent reads of an image.
_MAX_VARIABLE_BYTES = 128 * 1024
_MAX_CONFIG_BYTES = 2**20
_INDEXES = ("application/vnd.oci.image.index.v1+json", "application/vnd.docker.distribution.manifest.list.v2+json")


@dataclass(frozen=True)
class Layer:
    blob: Path
    diff_id: str  # of its content, uncompressed


@dataclass(frozen=True)
class Contents:
    config: ImageConfig = field(default_factory=ImageConfig)
    layers: tuple[Layer, ...] = ()

    @property
    def digest(self) -> str:
        """Of all that counts in a machine. Digests of images differ with who packed them, and from a registry to an archive."""
        said = json.dumps([self.config.model_dump(), [layer.diff_id for layer in self.layers]])
        return f"sha256:{hashlib.sha256(said.encode()).hexdigest()}"


def read_archive(archive: Path, scratch: Path, most_bytes: int) -> Contents:
    """A tar archive of an OCI layout, or of `docker save`. At most so much of it is written."""
    try:
        with tarfile.open(archive, "r:*", tarinfo=Member) as opened:
            found = members(opened, most=MAX_MEMBERS, most_bytes=most_bytes, refusal=InvalidImage)
            by_name = {member.name.removeprefix("./"): member for member in found}
            if "oci-layout" in by_name and "index.json" in by_name:
                _take_layout(_Writer(opened, most_bytes), by_name, scratch)
                return read_layout(scratch)
            if "manifest.json" in by_name:
                return _read_saved(_Writer(opened, most_bytes), by_name, scratch)
    except (*BROKEN, KeyError) as error:
        raise InvalidImage(f"the archive is cut off or no tar archive: {error}") from None
    raise InvalidImage(
        "the archive is neither an OCI layout nor one of `docker save`: it has no oci-layout, no manifest.json"
    )


def _take_layout(writer: _Writer, members: dict[str, tarfile.TarInfo], to: Path) -> None:
    (to / "blobs" / "sha256").mkdir(parents=True)
    for name, member in members.items():
        if name in ("oci-layout", "index.json"):
            writer.write(member, to / name)
        elif found := _BLOB.match(name):
            writer.write(member, to / "blobs" / "sha256" / found[1])


class _Writer:
    """Members of an archive as files, which together become no larger than they may."""

    def __init__(self, archive: tarfile.TarFile, most_bytes: int) -> None:
        self._archive, self._left_bytes = archive, most_bytes

    def write(self, member: tarfile.TarInfo, to: Path) -> None:
        content = self._archive.extractfile(member)  # of a link, what it names: old archives have a layer once
        if content is None:
            raise InvalidImage(f"{member.name} in the archive is no file")
        with to.open("wb") as out:
            while chunk := content.read(_CHUNK_BYTES):
                self._left_bytes -= len(chunk)
                if self._left_bytes < 0:
                    raise InvalidImage("the image is larger than this host takes")
                out.write(chunk)
        if member.isreg() and to.stat().st_size != member.size:
            raise InvalidImage(f"{member.name} in the archive is cut off")


def read_layout(directory: Path) -> Contents:
    index = _json(directory / "index.json")
    manifest = _manifest(directory, index, depth=0)
    config = _blob(directory, manifest.get("config"))
    layers = manifest.get("layers")
    if not isinstance(layers, list) or len(layers) > MAX_LAYERS:
        raise InvalidImage(f"the manifest names no layers, or more than {MAX_LAYERS}")
    blobs: dict[str, Path] = {}
    for layer in layers:
        digest = str(layer.get("digest")) if isinstance(layer, dict) else ""
        if digest not in blobs:
            blobs[digest] = _blob(directory, layer)
    return _contents(config, [blobs[str(layer["digest"])] for layer in layers])


def _manifest(directory: Path, index: dict[str, Any], depth: int) -> dict[str, Any]:
    """The one for this kind of machine."""
    offers = [one for one in index.get("manifests") or () if isinstance(one, dict)]
    if not offers or depth > 4:
        raise InvalidImage("the image's index names no manifest")
    fitting = [one for one in offers if _platform(one) in (None, (OS, ARCHITECTURE))]
    if not fitting:
        there = ", ".join("/".join(platform) for one in offers if (platform := _platform(one)))
        raise InvalidImage(f"the image is for {there}; this host runs {OS}/{ARCHITECTURE}")
    if depth == 0 and _several(fitting):
        raise InvalidImage("the archive must hold one image; save one by its name")
    chosen = next((one for one in fitting if _platform(one) is not None), fitting[0])
    document = _json(_blob(directory, chosen))
    if document.get("mediaType") in _INDEXES or "manifests" in document:
        return _manifest(directory, document, depth + 1)
    return document


def _platform(descriptor: dict[str, Any]) -> tuple[str, str] | None:
    platform = descriptor.get("platform")
    if not isinstance(platform, dict) or not platform.get("architecture"):
        return None
    return str(platform.get("os", OS)), str(platform["architecture"])


def _several(offers: list[dict[str, Any]]) -> bool:
    """Whether these are images, and not tags or variants of one."""
    digests: dict[str, set[str]] = {}
    for one in offers:
        platform = one.get("platform") if _platform(one) is not None else None
        digests.setdefault(str(platform.get("variant")) if platform else "", set()).add(str(one.get("digest")))
    unnamed = digests.pop("", set())
    return len(unnamed) > 1 or bool(unnamed and digests) or any(len(found) > 1 for found in digests.values())


def _blob(directory: Path, descriptor: Any) -> Path:
    digest = descriptor.get("digest") if isinstance(descriptor, dict) else None
    if not isinstance(digest, str) or not _DIGEST.match(digest):
        raise InvalidImage("the manifest names something by no sha256 digest")
    path = directory / "blobs" / "sha256" / digest.removeprefix("sha256:")
    if not path.is_file() or path.is_symlink():
        raise InvalidImage(f"{digest} is missing; the image is not whole")
    if _sha256(path) != digest:
        raise InvalidImage(f"{digest} is not what its name says; the image is cut off or changed")
    return path


def _read_saved(writer: _Writer, members: dict[str, tarfile.TarInfo], scratch: Path) -> Contents:
    scratch.mkdir(parents=True, exist_ok=True)
    writer.write(members["manifest.json"], scratch / "manifest.json")
    listed = _parsed(scratch / "manifest.json")
    if not isinstance(listed, list) or len(listed) != 1 or not isinstance(listed[0], dict):
        raise InvalidImage("the archive must hold one image; save one by its name")
    names = listed[0].get("Layers")
    if not isinstance(names, list) or len(names) > MAX_LAYERS:
        raise InvalidImage("the archive's manifest.json names no layers")
    wanted = [listed[0].get("Config"), *names]
    for name in wanted:
        if not isinstance(name, str) or name not in members:
            raise InvalidImage(f"{name!r} is not in the archive; it is not whole")
    # Each once, and as they lie in the archive: in a packed one every way back is the whole way again.
    paths = {name: scratch / str(number) for number, name in enumerate(dict.fromkeys(wanted))}
    for name in sorted(paths, key=lambda name: members[name].offset):
        writer.write(members[name], paths[name])
    return _contents(paths[wanted[0]], [paths[name] for name in wanted[1:]])


def _contents(config_file: Path, blobs: list[Path]) -> Contents:
    config = _json(config_file)
    made_for = str(config.get("os", OS)), str(config.get("architecture", ""))
    if made_for != (OS, ARCHITECTURE):
        raise InvalidImage(f"the image is for {'/'.join(made_for)}; this host runs {OS}/{ARCHITECTURE}")
    rootfs = config.get("rootfs")
    diff_ids = rootfs.get("diff_ids") if isinstance(rootfs, dict) else None
    if not isinstance(diff_ids, list) or len(diff_ids) != len(blobs):
        raise InvalidImage("the image's config does not name the layers of its manifest")
    layers = tuple(Layer(blob, str(diff_id)) for blob, diff_id in zip(blobs, diff_ids, strict=True))
    return Contents(_config(config.get("config") or {}), layers)


def _config(given: Any) -> ImageConfig:
    if not isinstance(given, dict):
        raise InvalidImage("the image's config makes no sense")
    env = dict(_variable(item) for item in _texts(given.get("Env")))
    labels = given.get("Labels")
    found = ImageConfig(
        env=env,
        user=str(given.get("User") or "root"),
        workdir=posixpath.join("/", str(given.get("WorkingDir") or "/")),
        entrypoint=_texts(given.get("Entrypoint")),
        cmd=_texts(given.get("Cmd")),
        labels={str(name): str(value) for name, value in labels.items()} if isinstance(labels, dict) else {},
        expose=sorted(given["ExposedPorts"]) if isinstance(given.get("ExposedPorts"), dict) else [],
    )
    try:
        said = found.model_dump_json()
    except ValueError:  # half a surrogate pair
        raise InvalidImage("the image's config holds what is no text") from None
    if any("\0" in text for text in (*env, *env.values(), found.user, found.workdir, *found.entrypoint, *found.cmd)):
        raise InvalidImage("the image's config holds a NUL, which no program can be given")
    if len(said.encode()) > _MAX_CONFIG_BYTES:
        raise InvalidImage(f"the image's variables, labels and commands come to more than {_MAX_CONFIG_BYTES} bytes")
    return found


def _variable(item: str) -> tuple[str, str]:
    name, _, value = item.partition("=")
    if not name:
        raise InvalidImage(f"the image sets a variable without a name: {item[:100]!r}")
    if len(item.encode(errors="replace")) >= _MAX_VARIABLE_BYTES:
        raise InvalidImage(f"the image's variable {name[:100]!r} has more than {_MAX_VARIABLE_BYTES} bytes")
    return name, value


def _texts(given: Any) -> list[str]:
    return [str(item) for item in given] if isinstance(given, list) else []


def _json(path: Path) -> dict[str, Any]:
    found = _parsed(path)
    if not isinstance(found, dict):
        raise InvalidImage(f"{path.name} of the image makes no sense")
    return found


def _parsed(path: Path) -> Any:
    try:
        return json.loads(_bounded(path))
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidImage(f"{path.name} of the image cannot be read: {error}") from None


def _bounded(path: Path) -> bytes:
    if path.stat().st_size > _MAX_JSON_BYTES:
        raise InvalidImage(f"{path.name} of the image is larger than {_MAX_JSON_BYTES} bytes")
    return path.read_bytes()


def _sha256(path: Path) -> str:
    hashed = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            hashed.update(chunk)
    return f"sha256:{hashed.hexdigest()}"
