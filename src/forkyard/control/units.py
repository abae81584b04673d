"""Services as systemd units: from what was asked for to files, and from what systemd says to an answer. No I/O.

The request itself is kept in a section of the unit that systemd leaves alone, so the guest's disk is the only truth.
"""

from __future__ import annotations

import json
import shlex

from pydantic import ValidationError

from forkyard.errors import InvalidRequest
from forkyard.models.bases import ImageConfig
from forkyard.models.builds import ServiceInfo
from forkyard.models.specs import Service
from forkyard.models.texts import UNIT_KINDS

UNITS = "/etc/systemd/system"
SCRIPTS = "/opt/forkyard/services"
_SECTION = "[X-Forkyard]"
PROPERTIES = "ActiveState,SubState,Result,ExecMainStatus,MainPID,NRestarts,UnitFileState,LoadState"
MARK = "::forkyard::"
#: One that has ended so often before it was ready has failed, though systemd would go on starting it.
CRASHES = 5


def unit_name(name: str) -> str:
    """A service of ours, or a unit by its full name."""
    return name if name.endswith(UNIT_KINDS) else f"{name}.service"


def completed(service: Service, image: ImageConfig) -> Service:
    """With what the image says: its variables for every service, and if no command was given its program, run as it says."""
    changed: dict[str, object] = {"env": {**image.env, **service.env}}
    if service.exec is None:
        if not image.program:
            raise InvalidRequest(
                f"service {service.name} has no exec, and the image of the machine no ENTRYPOINT or CMD; give it an exec"
            )
        changed["exec"] = f"exec {shlex.join(image.program)}"
        changed["user"] = service.user or image.user
        changed["workdir"] = service.workdir or image.workdir
    return service.model_copy(update=changed)


def script(service: Service, shell: str) -> str:
    return f"#!{shell}\n{service.exec}\n"


def unit(service: Service, shell: str) -> str:
    user, _, group = (service.user or "").partition(":")
    group = service.group or group
    after = [unit_name(name) for name in dict.fromkeys([*service.after, *service.requires])]
    lines = ["[Unit]", f"Description={service.name}"]
    lines += [f"After={' '.join(after)}"] if after else []
    lines += [f"Requires={' '.join(map(unit_name, service.requires))}"] if service.requires else []
    lines += [f"OnFailure={' '.join(map(unit_name, service.on_failure))}"] if service.on_failure else []
    lines += [f"StartLimitIntervalSec={service.start_limit_s if service.start_limit is not None else 0:g}"]
    lines += [f"StartLimitBurst={service.start_limit}"] if service.start_limit is not None else []
    lines += ["", "[Service]", f"Type={service.type}"]
    lines += [f"ExecStart={shell} {SCRIPTS}/{service.name}.sh"]
    lines += ["NotifyAccess=all"] if service.type == "notify" or service.watchdog_s else []
    remains = service.type == "oneshot" if service.remain is None else service.remain
    lines += ["RemainAfterExit=yes"] if remains else []
    lines += [f"User={user or 'root'}"]  # also for root: it has a home then
    lines += [f"Group={group}"] if group else []
    lines += [f"WorkingDirectory={_escaped(service.workdir)}"] if service.workdir else []
    lines += [f"Environment={quoted(f'{name}={value}')}" for name, value in service.env.items()]
    lines += [f"Restart={service.restart}", f"RestartSec={service.restart_s:g}"]
    lines += [f"TimeoutStartSec={service.ready_timeout_s:g}"]
    lines += [f"WatchdogSec={service.watchdog_s:g}"] if service.watchdog_s else []
    wanted_by = " ".join(map(unit_name, service.wanted_by)) or "multi-user.target"
    lines += ["", "[Install]", f"WantedBy={wanted_by}", "", _SECTION]
    lines += [f"Service={json.dumps(service.model_dump(mode='json', exclude_defaults=True))}"]
    return "\n".join(lines) + "\n"


def _escaped(text: str) -> str:
    return text.replace("%", "%%")


def quoted(text: str) -> str:
    """As a word of a unit file. systemd reads C escapes and `%` specifiers in it."""
    quoted = (
        text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\r", "\\r").replace("\t", "\\t")
    )
    return f'"{_escaped(quoted)}"'


def asked(unit_file: str) -> Service | None:
    """What this unit was made from. The guest may have written anything there."""
    _, found, rest = unit_file.partition(f"\n{_SECTION}\nService=")
    try:
        return Service.model_validate_json(rest.partition("\n")[0]) if found else None
    except ValidationError:
        return None


#: Prints each unit of ours: a mark, its properties, a mark, its file.
LIST = f"""
cd {UNITS} && for unit in $(grep -lFx '{_SECTION}' -- *.service 2>/dev/null); do
  echo "{MARK}unit $unit"; systemctl show --property={PROPERTIES} -- "$unit"; echo '{MARK}file'; cat -- "$unit"
done
true
"""


def listed(text: str) -> list[ServiceInfo]:
    """What `LIST` printed."""
    found = []
    for part in text.split(f"{MARK}unit ")[1:]:
        name, _, rest = part.partition("\n")
        shown, _, file = rest.partition(f"{MARK}file\n")
        values = dict(line.split("=", 1) for line in shown.splitlines() if "=" in line)
        found.append(
            ServiceInfo(
                name=name.removesuffix(".service"),
                active=values.get("ActiveState", "unknown"),
                sub=values.get("SubState", ""),
                result=values.get("Result", ""),
                exit_code=_number(values.get("ExecMainStatus")),
                pid=_number(values.get("MainPID")) or None,
                restarts=_number(values.get("NRestarts")) or 0,
                enabled=values.get("UnitFileState") == "enabled",
                service=asked(file),
            )
        )
    return sorted(found, key=lambda info: info.name)


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isascii() and text.isdigit() else None


def wait_script(service: Service) -> str:
    """Ends with 0 when it is ready, with 3 when it has failed, with 4 when it ends again and again."""
    name = shlex.quote(unit_name(service.name))
    return f"""
while ! timeout 30 "$(command -v bash || echo sh)" -c "$FORKYARD_READY" >/dev/null 2>&1; do
  state=$(systemctl show --property=ActiveState,NRestarts -- {name})
  case $state in *=failed*|*=inactive*) exit 3 ;; esac
  restarts=${{state##*NRestarts=}}
  restarts=${{restarts%%[!0-9]*}}
  [ "${{restarts:-0}}" -lt {CRASHES} ] || exit 4
  sleep 0.2
done
"""
