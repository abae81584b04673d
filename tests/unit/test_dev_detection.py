"""How a repository is installed and served, as its files tell it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from forkyard.dev.detection import detect
from forkyard.errors import InvalidRequest

NPM_CI = "npm ci --no-audit --no-fund"
NPM_INSTALL = "npm install --no-audit --no-fund"
PNPM = "pnpm install"
YARN = "yarn install --non-interactive"
PIP = ".venv/bin/pip install --no-input -r requirements.txt"
DEPS = {"vite": "^5"}


def package(script: str | None = "node server.js", name: str = "dev", **fields: Any) -> str:
    return json.dumps({"scripts": {name: script} if script else {}, "dependencies": DEPS, **fields})


@pytest.mark.parametrize(
    ("names", "texts", "manager", "install", "command"),
    [
        # Which manager: the lockfile says, and packageManager before it.
        (["package-lock.json"], package(), "npm", NPM_CI, "npm run dev"),
        (["npm-shrinkwrap.json"], package(), "npm", NPM_CI, "npm run dev"),
        ([], package(), "npm", NPM_INSTALL, "npm run dev"),
        (["pnpm-lock.yaml"], package(), "pnpm", f"{PNPM} --frozen-lockfile", "pnpm run dev"),
        (["yarn.lock"], package(), "yarn", f"{YARN} --frozen-lockfile", "yarn run dev"),
        (["bun.lock"], package(), "bun", "bun install --frozen-lockfile", "bun run dev"),
        (["bun.lockb"], package(), "bun", "bun install --frozen-lockfile", "bun run dev"),
        (["bun.lock", "package-lock.json"], package(), "bun", "bun install --frozen-lockfile", "bun run dev"),
        ([], package(packageManager="pnpm@9.1.0"), "pnpm", PNPM, "pnpm run dev"),
        (
            ["yarn.lock"],
            package(packageManager="yarn@4.1.0+sha224.x"),
            "yarn",
            "yarn install --immutable",
            "yarn run dev",
        ),
        (["package-lock.json"], package(packageManager="evil@1; rm -rf /"), "npm", NPM_CI, "npm run dev"),
        # Without dependencies nothing is installed.
        ([], package(dependencies={}), "npm", None, "npm run dev"),
        (["package-lock.json"], package(dependencies=None), "npm", None, "npm run dev"),
        # Which script, and whether it must be told the port.
        ([], package(name="start"), "npm", NPM_INSTALL, "npm run start"),
        ([], package("vite"), "npm", NPM_INSTALL, "npm run dev -- --port 4000"),
        (["pnpm-lock.yaml"], package("vite --open"), "pnpm", f"{PNPM} --frozen-lockfile", "pnpm run dev --port 4000"),
        ([], package("tsc && FOO=1 npx vite"), "npm", NPM_INSTALL, "npm run dev -- --port 4000"),
        ([], package("vite --port 4000"), "npm", NPM_INSTALL, "npm run dev"),
        ([], package("next dev"), "npm", NPM_INSTALL, "npm run dev -- --port 4000"),
        ([], package("react-router dev"), "npm", NPM_INSTALL, "npm run dev -- --port 4000"),
        ([], package("npx -y vite@7"), "npm", NPM_INSTALL, "npm run dev -- --port 4000"),
        ([], package("pnpm exec vite"), "npm", NPM_INSTALL, "npm run dev -- --port 4000"),
        (["bun.lock"], package("bun --bun vite"), "bun", "bun install --frozen-lockfile", "bun run dev --port 4000"),
        ([], package("yarn serve"), "npm", NPM_INSTALL, "npm run dev"),
        ([], f"\ufeff{package()}", "npm", NPM_INSTALL, "npm run dev"),
        (["web.js"], package(None, main="./web.js"), "npm", NPM_INSTALL, "node web.js"),
        ([], package("vite & node api.js"), "npm", NPM_INSTALL, "npm run dev"),
        ([], package("echo 'half"), "npm", NPM_INSTALL, "npm run dev"),
        (["server.js"], package(None), "npm", NPM_INSTALL, "node server.js"),
        (["web.js"], package(None, main="web.js"), "npm", NPM_INSTALL, "node web.js"),
        (
            ["yarn.lock", "server.js"],
            package(None, packageManager="yarn@4.1.0", dependencies={}),
            "yarn",
            "yarn install --immutable",
            "yarn node server.js",
        ),
        (["bun.lock", "index.ts"], package(None), "bun", "bun install --frozen-lockfile", "bun index.ts"),
    ],
)
def test_javascript(names: list[str], texts: str, manager: str, install: str | None, command: str) -> None:
    found = detect(["package.json", *names], {"package.json": texts}, port=4000)
    assert (found.manager, found.install, found.command) == (manager, install, command)


@pytest.mark.parametrize(
    ("texts", "more", "manager", "install", "command"),
    [
        (
            {"app.py": "app = Flask(__name__)"},
            ["requirements.txt"],
            "pip",
            PIP,
            ".venv/bin/flask --app app:app run --port 4000 --debug",
        ),
        (
            {"main.py": "import x\napi: FastAPI = FastAPI()"},
            ["uv.lock"],
            "uv",
            "uv sync --frozen",
            "uv run uvicorn main:api --port 4000 --reload",
        ),
        ({"pyproject.toml": "[tool.uv]", "main.py": "print(1)"}, [], "uv", "uv sync", "uv run python main.py"),
        ({}, ["requirements.txt", "manage.py"], "pip", PIP, ".venv/bin/python manage.py runserver 127.0.0.1:4000"),
        (
            {"app.py": "import streamlit as st"},
            ["requirements.txt"],
            "pip",
            PIP,
            ".venv/bin/streamlit run app.py --server.port 4000 --server.headless true",
        ),
        (
            {"pyproject.toml": "[project]\nname='x'", "server.py": ""},
            [],
            "pip",
            PIP.replace("-r requirements.txt", "-e ."),
            ".venv/bin/python server.py",
        ),
        ({"server.py": "serve()"}, [], None, None, "python3 server.py"),
        ({}, ["index.html"], None, None, "python3 -m http.server 4000 --bind 127.0.0.1"),
        ({"pyproject.toml": "no toml ["}, ["index.html"], None, None, "python3 -m http.server 4000 --bind 127.0.0.1"),
    ],
)
def test_python_and_plain_files(
    texts: dict[str, str], more: list[str], manager: str | None, install: str | None, command: str
) -> None:
    found = detect([*texts, *more], texts, port=4000)
    assert (found.manager, found.install, found.command) == (manager, install, command)


@pytest.mark.parametrize(
    ("more", "install", "command"),
    [
        ({"index.html": ""}, None, "python3 -m http.server 4000 --bind 127.0.0.1"),
        ({"requirements.txt": "", "manage.py": ""}, PIP, ".venv/bin/python manage.py runserver 127.0.0.1:4000"),
        ({"app.py": "app = Flask(__name__)"}, None, "flask --app app:app run --port 4000 --debug"),
        ({"manage.py": "", "server.js": ""}, NPM_INSTALL, "node server.js"),
    ],
)
def test_a_package_json_that_starts_nothing_hides_nothing(
    more: dict[str, str], install: str | None, command: str
) -> None:
    texts = {"package.json": package(None), **more}
    found = detect(list(texts), texts, port=4000)
    assert (found.install, found.command) == (install, command)


def test_a_package_manager_is_fetched_also_where_there_is_nothing_to_install() -> None:
    text = package(dependencies={})
    found = detect(["package.json", "pnpm-lock.yaml"], {"package.json": text}, port=3000)
    assert (found.install, found.command) == (None, "pnpm run dev") and "pnpm@" in (found.fetch or "")
    found = detect(["package.json"], {"package.json": text}, port=3000, command="make serve")
    assert (found.manager, found.install, found.fetch) == ("npm", None, None)


def test_a_command_that_is_given_is_taken_and_what_to_install_is_still_found() -> None:
    found = detect(["package.json"], {"package.json": package()}, port=3000, command="make serve")
    assert (found.install, found.command) == (NPM_INSTALL, "make serve")
    assert detect(["Makefile"], {}, port=3000, command="make serve").install is None


@pytest.mark.parametrize("names", [[], ["README.md"], ["package.json"]])
def test_what_cannot_be_told_is_asked_for(names: list[str]) -> None:
    with pytest.raises(InvalidRequest, match="give a command"):
        detect(names, {"package.json": "[]"}, port=3000)


def test_a_broken_manifest_is_named() -> None:
    with pytest.raises(InvalidRequest, match=r"package\.json is no JSON"):
        detect(["package.json"], {"package.json": "{"}, port=3000)
