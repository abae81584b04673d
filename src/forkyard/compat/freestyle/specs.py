"""Freestyle's specs as ours: the layers below are built once and kept, the topmost is done in each VM. Pure.

Three shapes come in (see `models.NewVm`), and mean the same here: a chain of layers, the innermost first. Units that only
set something up become steps; those that stay become services.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from typing import Any

from forkyard.compat.freestyle import dockerfile, models, runtimes
from forkyard.compat.freestyle.calls import ours
from forkyard.compat.freestyle.errors import Refused
from forkyard.control.units import quoted
from forkyard.models.bases import DockerfileSource
from forkyard.models.specs import Size, Spec, Step

#: Where sandboxes find hosted repositories.
INSIDE = "http://git.forkyard.internal"
#: Theirs, which clients and people have written down.
_HOSTED = "https://git.freestyle.sh/"
_WAITS = "freestyle-wait-for-"
_SETUP_ONLY = ("freestyle-run-command-", _WAITS)
_NO_LIMIT_S = 86400.0
_UNIT_S = 3600.0
_BURST = 5
_OUTSIDE_PORT = 443
#: Nothing is to be seen from outside.
NO_PORT = 0
#: A clone over one of a layer below, as dev servers have it (a template's files, then those of the repository). What is not
#: in git, such as installed packages, stays; the old index tells git which files are to go.
_OVER = """set -e
if [ -d {path}/.git ]; then
  mv {path}/.git/index {next}/.git/index && rm -rf {path}/.git && mv {next}/.git {path}/.git && rm -rf {next}
  git -C {path} reset -q --hard
else
  rmdir {path} 2>/dev/null || true
  mv -T {next} {path}
fi"""
IDLE_S = 300.0


@dataclass
class Plan:
    """What has to be done for a VM."""

    snapshot_id: str | None = None
    #: A Dockerfile that is built into an image, and not done in a Debian machine.
    image: str | None = None
    cached: list[Step] = field(default_factory=list)
    own: list[Step] = field(default_factory=list)
    size: dict[str, int] = field(default_factory=dict)
    workdir: str | None = None
    port: int | None = None
    idle_s: float | None = IDLE_S
    #: Ids or names of hosted repositories that are cloned.
    repos: list[str] = field(default_factory=list)
    #: Where the layers so far have cloned something.
    _cloned: set[str] = field(default_factory=set)
    _setup_only: set[str] = field(default_factory=set)

    #: Clients that send specs have words that the oldest does not know.
    newer: bool = False

    def refused(self, code: str, message: str) -> Refused:
        return Refused(400, code if self.newer else "CREATE_VM_BAD_REQUEST", message)

    def spec(self) -> Spec:
        """Of the layers below."""
        with ours("CREATE_VM_BAD_REQUEST"):
            # A snapshot has its size; what is made of it is resized then.
            base: dict[str, Any] = {"base": self.snapshot_id} if self.snapshot_id else {"size": Size(**self.size)}
            if self.image is not None:
                base["dockerfile"] = DockerfileSource(text=self.image)
            return Spec(steps=self.cached, **base)


def plan(top: models.Layer, spec: models.Layer | None, template: models.Layer | None) -> Plan:
    """Of a VM."""
    if spec is not None and template is not None:
        raise _wrong("spec and template exclude each other")
    made = Plan(newer=spec is not None)
    below = _chain(spec or template or top.snapshot)
    # The outermost layer of a spec is of this VM alone, and so is what stands at the top.
    own = below[-1:] if spec is not None else []
    for layer in below[: len(below) - len(own)]:
        _add_layer(made, layer)
    for layer in (*own, top):
        made.own += _steps(layer, made)
        said = dict(made.size) if spec is not None else {}
        _settle(made, layer)
        if layer is top:  # what a spec says of its size goes before what is said beside it
            made.size |= said
    with ours("CREATE_VM_BAD_REQUEST"):
        Spec(steps=made.own)
    return made


def build(spec: models.Layer | None, template: models.Layer | None) -> Plan:
    """Of a snapshot: everything is kept."""
    if spec is not None and template is not None:
        raise _wrong("spec and template exclude each other")
    made = Plan(newer=spec is not None)
    for layer in _chain(spec or template):
        _add_layer(made, layer)
    return made


def _chain(layer: models.Layer | None) -> list[models.Layer]:
    """Innermost first."""
    found = []
    while layer is not None:
        found.append(layer)
        layer = layer.snapshot
    return found[::-1]


def _add_layer(made: Plan, layer: models.Layer) -> None:
    steps = _steps(layer, made)
    if steps:
        salt = {"discriminator": layer.discriminator or "", "skip_cache": bool(layer.skip_cache)}
        made.cached += [*steps, _step(layer=salt)]
    _settle(made, layer)


def _settle(made: Plan, layer: models.Layer) -> None:
    """What is not a step; that of the outer layer counts."""
    sources = [source for source in (layer.snapshot, layer.snapshot_id, layer.base_image) if source is not None]
    if len(sources) > 1:
        raise made.refused("CONFLICTING_SPEC_SOURCES_ERROR", "a layer has one of snapshot, snapshotId and baseImage")
    _check_size(made, layer)
    made.snapshot_id = layer.snapshot_id or made.snapshot_id
    made.workdir = layer.workdir or made.workdir
    if "idle_s" in layer.model_fields_set:
        made.idle_s = layer.idle_s
    for name, value in (
        ("vcpus", layer.vcpus),
        ("memory_mib", None if layer.memory_gb is None else layer.memory_gb * 1024),
        ("disk_gib", layer.disk_gb),
    ):
        if value is not None:
            made.size[name] = value
    if layer.ports == []:
        made.port = NO_PORT
    for port in layer.ports or ():
        if port.port == _OUTSIDE_PORT:
            made.port = port.target


def _check_size(made: Plan, layer: models.Layer) -> None:
    for number, least, most, name, word in (
        (layer.vcpus, 1, models.MAX_VCPUS, "vcpuCount", "VCPU"),
        (layer.memory_gb, 1, models.MAX_MEMORY_GB, "memSizeGb", "MEM"),
        (layer.disk_gb, models.LEAST_DISK_GB, models.MAX_DISK_GB, "rootfsSizeGb", "ROOTFS"),
    ):
        if number is not None and not least <= number <= most:
            raise made.refused(f"CREATE_VM_{word}_OUT_OF_RANGE", f"{name} is from {least} to {most}, not {number}")
        if number is not None and word != "ROOTFS" and number.bit_count() != 1:
            raise made.refused(f"CREATE_VM_{word}_NOT_POWER_OF_TWO", f"{name} is a power of two, not {number}")


# ── one layer ────────────────────────────────────────────────────────────────────────────────────────────────────


def _steps(layer: models.Layer, made: Plan) -> list[Step]:
    if layer.base_image is not None:
        text = layer.base_image.dockerfile
        foreign = dockerfile.is_foreign(text)
        if foreign:
            made.image = text
        made.cached += [*([] if foreign else _image(text)), _step(layer={})]
    return [
        *(_step(run={"command": _groupadd(group)}) for group in layer.groups or ()),
        *(_step(run={"command": _useradd(user)}) for user in layer.users or ()),
        *([_step(apt=layer.apt)] if layer.apt else []),
        *([_step(run={"command": f"mkdir -p -- {shlex.quote(layer.workdir)}"})] if layer.workdir else []),
        *_git(layer, made),
        *_files(layer),
        *_units(layer, made),
        *_patches(layer),
    ]


def _image(text: str) -> Iterator[Step]:
    for one in dockerfile.instructions(text):
        if one.kind in ("node", "python", "bun"):
            yield _step(**{one.kind: one.value})
        elif one.kind == "run":
            yield _step(run={"command": runtimes.replaced(one.value)})
        elif one.kind == "env" and one.env:
            yield _step(env=dict(one.env))
        elif one.kind in ("workdir", "user"):
            yield _step(**{one.kind: one.value})


def _groupadd(group: models.Group) -> str:
    words = ["groupadd", "-f", *(["-r"] if group.system else [])]
    words += [] if group.gid is None else ["-g", str(group.gid)]
    return shlex.join([*words, "--", group.name])


def _useradd(user: models.User) -> str:
    """One of the system has no shell and no home, and groups that are not there are made, as by systemd-sysusers."""
    plain, home = (["-m", "-s", "/bin/bash"], user.home)
    if user.system:
        plain, home = (["-r", "-M", "-s", "/usr/sbin/nologin"], user.home or "/")
    words = ["useradd", *plain[:-1], user.shell or plain[-1]]
    words += [] if user.uid is None else ["-u", str(user.uid)]
    words += [] if user.gecos is None else ["-c", user.gecos]
    words += [] if home is None else ["-d", home]
    words += ["-G", ",".join(user.groups)] if user.groups else []
    groups = [f"{shlex.join(['groupadd', '-f', '--', group])} && " for group in user.groups or ()]
    known = f"id -u -- {shlex.quote(user.name)} >/dev/null 2>&1"
    return f"{known} || {{ {''.join(groups)}{shlex.join([*words, '--', user.name])}; }}"


def _git(layer: models.Layer, made: Plan) -> Iterator[Step]:
    git = layer.git or models.Git()
    if git.repos and layer.git_repos:
        raise Refused(400, "INVALID_GIT_REPO_SPEC_ERROR", "git.repos and gitRepos exclude each other; use git.repos")
    user = (git.config and git.config.user) or models.GitUser()
    for name, value in (("name", user.name), ("email", user.email), ("signingkey", user.signingkey)):
        if value is not None:
            yield _step(run={"command": shlex.join(["git", "config", "--system", f"user.{name}", value])})
    for wanted in git.repos or layer.git_repos or ():
        url = _url(wanted.repo, made)
        path = wanted.path or layer.workdir or f"/root/{url.rstrip('/').rpartition('/')[2].removesuffix('.git')}"
        if path in made._cloned or made.snapshot_id or layer.snapshot_id:
            yield _step(git={"url": url, "path": f"{path}.next", "rev": wanted.rev})
            yield _step(run={"command": _OVER.format(path=shlex.quote(path), next=shlex.quote(f"{path}.next"))})
        else:
            yield _step(git={"url": url, "path": path, "rev": wanted.rev})
        made._cloned.add(path)


def _url(repo: str, made: Plan) -> str:
    if repo.startswith(_HOSTED):
        repo = repo.removeprefix(_HOSTED).strip("/").removesuffix(".git")
    if "://" in repo:
        return repo
    made.repos.append(repo)
    return f"{INSIDE}/{repo}.git"


def _files(layer: models.Layer) -> list[Step]:
    scripts = {_script_of(unit) for unit in (layer.systemd and layer.systemd.services) or ()}
    files: dict[str, Any] = {}
    for path, file in (layer.files or {}).items():
        content = runtimes.replaced(file.content) if path in scripts else file.content
        files[path] = {
            "content": content,
            "encoding": "base64" if file.encoding == "base64" else "utf8",
            "mode": 0o755 if file.executable or content.startswith("#!") else None,
        }
    return [_step(files=files)] if files else []


def _script_of(unit: models.Unit) -> str:
    return unit.exec[0].split()[-1] if unit.exec and unit.exec[0].split() else ""


# ── units ────────────────────────────────────────────────────────────────────────────────────────────────────────


def _units(layer: models.Layer, made: Plan) -> Iterator[Step]:
    units = {unit.name.removesuffix(".service"): unit for unit in (layer.systemd and layer.systemd.services) or ()}
    made._setup_only |= {name for name, unit in units.items() if _only_sets_up(name, unit)}
    waits_for = {
        name: {bare(other) for other in (*(unit.after or ()), *(unit.requires or ()))} & units.keys()
        for name, unit in units.items()
    }
    for name in _order(waits_for, made._setup_only):
        unit = units[name]
        if name in made._setup_only:
            yield _step(run=_run(unit))
        else:
            yield _step(service=service_fields(unit, made._setup_only))


def _order(waits_for: dict[str, set[str]], setup_only: set[str]) -> Iterator[str]:
    """One after the other what systemd starts at once: what may be waited for without being named, a service, goes before
    a step that nothing holds back, and what only waits goes last."""
    sorter = TopologicalSorter(waits_for)
    try:
        sorter.prepare()
    except CycleError as error:
        raise _wrong(f"units wait for each other in a circle: {' → '.join(reversed(error.args[1]))}") from None
    ready: list[str] = []
    while sorter.is_active():
        ready += sorter.get_ready()
        ready.sort(key=lambda name: (name in setup_only, name.startswith(_WAITS)))  # stable: else as they were given
        sorter.done(ready[0])
        yield ready.pop(0)


def _only_sets_up(name: str, unit: models.Unit) -> bool:
    return unit.mode == "oneshot" and (bool(unit.delete_after_success) or name.startswith(_SETUP_ONLY))


def bare(unit_name: str) -> str:
    return unit_name.removesuffix(".service")


def _run(unit: models.Unit) -> dict[str, Any]:
    exports = [f"export {name}={shlex.quote(value)}" for name, value in (unit.env or {}).items()]
    limit_s = _UNIT_S if unit.timeout_s is None else unit.timeout_s or _NO_LIMIT_S
    return {
        "command": "\n".join([*exports, _script(unit)]),
        "user": unit.user,
        "cwd": unit.workdir or "/",
        "timeout_s": min(limit_s, _NO_LIMIT_S),
    }


def _script(unit: models.Unit) -> str:
    if not unit.exec:
        raise Refused(400, "EXEC_EMPTY", f"the unit {unit.name[:64]} has no exec")
    return unit.exec[0] if len(unit.exec) == 1 else "\n".join(["set -e", *unit.exec])


def service_fields(unit: models.Unit, gone: set[str] | frozenset[str] = frozenset()) -> dict[str, Any]:
    """A unit as a service of ours. `gone`: units that were only steps, which nothing can wait for any more."""
    kind = "oneshot" if unit.mode == "oneshot" else "notify" if unit.ready_signal else "simple"
    restart = unit.restart or models.UnitRestart()
    limit_s = None if unit.timeout_s is None else min(unit.timeout_s or _NO_LIMIT_S, _NO_LIMIT_S)
    fields: dict[str, Any] = {
        "name": bare(unit.name),
        "exec": _script(unit),
        "type": kind,
        "restart": restart.policy,
        "restart_s": restart.restart_s,
        "env": unit.env,
        "user": unit.user,
        "group": unit.group,
        "workdir": unit.workdir,
        "after": [name for name in unit.after or () if bare(name) not in gone],
        "requires": [name for name in unit.requires or () if bare(name) not in gone],
        "on_failure": unit.on_failure,
        "wanted_by": unit.wanted_by,
        "watchdog_s": unit.watchdog_s or None,
        "remain": unit.remain,
        **_start_limit(restart),
        "enabled": unit.enable is not False,
        "ready_timeout_s": limit_s,
    }
    return {name: value for name, value in fields.items() if value is not None}


def _start_limit(restart: models.UnitRestart) -> dict[str, Any]:
    """As systemd has it: one number given brings its default of the other, and a zero means none."""
    if restart.burst is restart.interval_s is None or restart.burst == 0 or restart.interval_s == 0:
        return {}
    return {"start_limit": restart.burst or _BURST, "start_limit_s": restart.interval_s}


def _patches(layer: models.Layer) -> Iterator[Step]:
    names: list[str] = []
    commands = ["systemctl daemon-reload"]
    for patch in (layer.systemd and layer.systemd.patched) or ():
        unit = f"{bare(patch.name)}.service"
        if "/" in unit or "\0" in unit:
            raise Refused(400, "SERVICE_NAME_INVALID_CHARS", f"{unit[:64]!r} is no name of a unit")
        yield _step(files={f"/etc/systemd/system/{unit}.d/freestyle.conf": {"content": _drop_in(patch)}})
        names.append(shlex.quote(unit))
        commands += [f"systemctl add-wants -- {shlex.quote(target)} {names[-1]}" for target in patch.wanted_by or ()]
        if patch.enable is not None:
            commands.append(f"systemctl {'enable' if patch.enable else 'disable'} -- {names[-1]}")
    if names:
        commands.append(f"systemctl try-restart -- {' '.join(names)}")
        yield _step(run={"command": " && ".join(commands)})


def _drop_in(patch: models.Unit) -> str:
    restart = patch.restart or models.UnitRestart()
    limit_s = None if patch.timeout_s is None else patch.timeout_s or _NO_LIMIT_S
    unit = {
        "After": " ".join(patch.after or ()),
        "Requires": " ".join(patch.requires or ()),
        "OnFailure": " ".join(patch.on_failure or ()),
        "StartLimitBurst": restart.burst,
        "StartLimitIntervalSec": restart.interval_s,
    }
    service = {
        "Type": "oneshot" if patch.mode == "oneshot" else "notify" if patch.ready_signal else None,
        "NotifyAccess": "all" if patch.ready_signal or patch.watchdog_s else None,
        "RemainAfterExit": None if patch.remain is None else "yes" if patch.remain else "no",
        "User": patch.user,
        "Group": patch.group,
        "WorkingDirectory": patch.workdir,
        "Restart": restart.policy if "policy" in restart.model_fields_set else None,
        "RestartSec": restart.restart_s,
        "TimeoutStartSec": limit_s,
        "WatchdogSec": patch.watchdog_s,
    }
    lines = ["[Unit]", *_settings(unit), "[Service]"]
    lines += ["ExecStart=", *(f"ExecStart={line}" for line in patch.exec)] if patch.exec else []
    lines += [f"Environment={quoted(f'{name}={value}')}" for name, value in (patch.env or {}).items()]
    lines += _settings(service)
    if any("\n" in line for line in lines):
        raise _wrong(f"the patch of {patch.name[:64]} has a line break in it")
    return "\n".join(lines) + "\n"


def _settings(wanted: dict[str, str | float | None]) -> list[str]:
    given = {name: value for name, value in wanted.items() if value is not None and value != ""}
    return [f"{name}={f'{value:g}' if isinstance(value, float) else value}" for name, value in given.items()]


# ── checks ───────────────────────────────────────────────────────────────────────────────────────────────────────


def _step(**fields: Any) -> Step:
    with ours("CREATE_VM_BAD_REQUEST"):
        return Step.model_validate(fields)
    raise AssertionError("unreachable")


def _wrong(message: str) -> Refused:
    return Refused(400, "CREATE_VM_BAD_REQUEST", message)
