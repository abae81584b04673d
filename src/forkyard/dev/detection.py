"""How a repository is installed and served, told by the files at its top. Pure.

What it reads is a stranger's: whatever is not as it should be counts as not there. The port is in $PORT; programs that do
not read it are told by an option.
"""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from forkyard.builds import managers
from forkyard.builds.managers import PIP, Tool
from forkyard.errors import InvalidRequest
from forkyard.models.specs import LOCKFILES, Manager

#: Files whose text is looked at.
READ = (*managers.READ, "pyproject.toml", "requirements.txt", "main.py", "app.py", "server.py", "asgi.py", "wsgi.py")
#: A change of one of these means to install again.
MANIFESTS = frozenset({"package.json", "pyproject.toml", *LOCKFILES})

_SCRIPTS = ("dev", "start", "serve")
_ENTRIES = ("server.js", "index.js", "app.js", "main.js", "server.mjs", "index.mjs", "server.ts", "index.ts")
_PYTHON_ENTRIES = tuple(name for name in READ if name.endswith(".py"))
#: Programs that want the port as an option.
_PORT_OPTION = {
    "vite": "--port",
    "astro": "--port",
    "ng": "--port",
    "nuxt": "--port",
    "nuxi": "--port",
    "webpack": "--port",
    "webpack-dev-server": "--port",
    "parcel": "--port",
    "vue-cli-service": "--port",
    "next": "--port",
    "react-router": "--port",
    "vitepress": "--port",
    "gatsby": "--port",
    "eleventy": "--port",
    "wrangler": "--port",
    "http-server": "-p",
    "serve": "-l",
}
_RUNNERS = frozenset({"npx", "bunx", "pnpx", "cross-env", "env", "exec"})
_RUN_BY = frozenset(
    {("pnpm", "exec"), ("pnpm", "dlx"), ("yarn", "exec"), ("yarn", "dlx"), ("bun", "x"), ("bun", "--bun")}
)


@dataclass(frozen=True)
class Setup:
    """`install` None: there is nothing to install."""

    manager: Manager | None
    install: str | None
    command: str
    fetch: str | None = None
    """Run first, as root: `install` and `command` need it."""
    script: str | None = None
    """`install`, with what must be so around it."""


def detect(names: Collection[str], texts: Mapping[str, str], *, port: int, command: str | None = None) -> Setup:
    """`names`: the files at the top; `texts`: of those in `READ` that are there. `command`: if it is given, only how to
    install is found out."""
    found = [_javascript(names, texts, port), _python(names, texts, port), _static(names, port)]
    ways = [way for way in found if way is not None]
    # The first that can be started: a package.json may be there for tools alone.
    tool, install, serve = next((way for way in ways if way[2] is not None), ways[0])
    if command is None and serve is None:
        raise InvalidRequest(
            "how to start this repository cannot be told: it has no `dev`, `start` or `serve` script in package.json, no "
            "manage.py, no Python file with an app or a server, and no index.html; give a command",
            field="command",
        )
    served = command or serve or ""
    if tool is None:
        return Setup(None, install, served)
    return Setup(tool.manager, install, served, tool.fetch, None if install is None else tool.script(install))


_Found = tuple[Tool | None, str | None, str | None]


# ── JavaScript ───────────────────────────────────────────────────────────────────────────────────────────────────


def _javascript(names: Collection[str], texts: Mapping[str, str], port: int) -> _Found | None:
    if "package.json" not in names:
        return None
    package = _json(texts.get("package.json", ""))
    tool = managers.declared(package) or managers.wanted(managers.by_lockfile(names) or "npm", texts)
    return tool, _javascript_install(names, package, tool), _script(names, package, tool, port)


def _javascript_install(names: Collection[str], package: Mapping[str, Any], tool: Tool) -> str | None:
    wanted = ("dependencies", "devDependencies", "optionalDependencies", "peerDependencies", "workspaces")
    # Without node_modules, a newer Yarn runs nothing in a repository that it has not installed.
    if not tool.modern_yarn and not any(package.get(kind) for kind in wanted):
        return None
    return tool.install(next((name for name in sorted(names) if LOCKFILES.get(name) == tool.manager), None))


def _script(names: Collection[str], package: Mapping[str, Any], tool: Tool, port: int) -> str | None:
    scripts = package.get("scripts")
    scripts = scripts if isinstance(scripts, dict) else {}
    name = next((name for name in _SCRIPTS if _text(scripts.get(name)).strip()), None)
    if name is not None:
        option = _PORT_OPTION.get(_program(_text(scripts[name])))
        given = "" if option is None else f"{' --' if tool.manager == 'npm' else ''} {option} {port}"
        return f"{tool.manager} run {name}{given}"
    runtime = "bun" if tool.manager == "bun" else "yarn node" if tool.modern_yarn else "node"
    main = _text(package.get("main")).removeprefix("./")
    entry = next((entry for entry in (main, *_ENTRIES) if entry and entry in names), None)
    return None if entry is None else f"{runtime} {shlex.quote(entry)}"


def _program(script: str) -> str:
    """The last one that a script starts: what options at its end go to. With a port of its own it is left alone."""
    try:
        words = shlex.split(re.split(r"&&|\|\||[;|&]", script)[-1])
    except ValueError:
        return ""
    while words:
        if tuple(words[:2]) in _RUN_BY:
            del words[:2]
        elif words[0] in _RUNNERS or "=" in words[0] or words[0].startswith("-"):
            del words[0]
        else:
            break
    if not words or any(word.startswith(("--port", "-p", "-l")) for word in words[1:]):
        return ""
    return words[0].rpartition("/")[2].partition("@")[0]


# ── Python ───────────────────────────────────────────────────────────────────────────────────────────────────────


def _python(names: Collection[str], texts: Mapping[str, str], port: int) -> _Found | None:
    project = _toml(texts.get("pyproject.toml", ""))
    tool = project.get("tool")
    if "uv.lock" in names or (isinstance(tool, dict) and "uv" in tool):
        uv = Tool("uv")
        install = uv.install("uv.lock" if "uv.lock" in names else None)
        return uv, install, _python_command("uv run ", names, texts, port)
    if "requirements.txt" in names:
        pip = Tool("pip")
        return pip, pip.install("requirements.txt"), _python_command(".venv/bin/", names, texts, port)
    if isinstance(project.get("project"), dict):
        return Tool("pip"), f"{PIP} -e .", _python_command(".venv/bin/", names, texts, port)
    served = _python_command("", names, texts, port)
    return None if served is None else (None, None, served.replace("python ", "python3 ", 1))


def _python_command(prefix: str, names: Collection[str], texts: Mapping[str, str], port: int) -> str | None:
    if "manage.py" in names:
        return f"{prefix}python manage.py runserver 127.0.0.1:{port}"
    for entry in _PYTHON_ENTRIES:
        text, module = texts.get(entry, ""), entry.removesuffix(".py")
        if made := re.search(
            r"^(\w+)(?:\s*:[^=\n]*)?\s*=\s*(?:\w+\.)?(FastAPI|Starlette|Litestar|Flask)\(", text, re.M
        ):
            app = f"{module}:{made[1]}"
            if made[2] == "Flask":
                return f"{prefix}flask --app {app} run --port {port} --debug"
            return f"{prefix}uvicorn {app} --port {port} --reload"
        if re.search(r"^\s*import streamlit", text, re.M):
            return f"{prefix}streamlit run {entry} --server.port {port} --server.headless true"
    entry = next((entry for entry in _PYTHON_ENTRIES if entry in names), "")
    return f"{prefix}python {entry}" if entry else None


def _static(names: Collection[str], port: int) -> _Found:
    served = f"python3 -m http.server {port} --bind 127.0.0.1" if "index.html" in names else None
    return None, None, served


def _json(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text.removeprefix("\ufeff"))
    except (ValueError, RecursionError):
        raise InvalidRequest("package.json is no JSON", field="repo") from None
    return found if isinstance(found, dict) else {}


def _toml(text: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError):
        return {}


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""
