"""GitHub's REST API for pull requests, as strict as a recorded contract: what GitHub would not take is refused, and
whatever breaks its documented form is written down as a violation."""

from __future__ import annotations

import contextlib
import json
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

TOKEN = "ghp_0123456789"
PULL = "/repos/acme/app/pulls/7"


@dataclass
class FakeGitHub:
    url: str = ""
    pull: dict[str, Any] = field(default_factory=dict)
    files: list[dict[str, Any]] = field(default_factory=list)
    reviews: list[dict[str, Any]] = field(default_factory=list)
    posts: list[dict[str, Any]] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)
    own: bool = False  # the token's user opened the pull request
    lose_answer: bool = False  # take the next review, and die before saying so

    def answer(self, method: str, target: str, headers: dict[str, str], body: bytes) -> tuple[int, Any]:
        parts = urlsplit(target)
        if headers.get("authorization") != f"Bearer {TOKEN}":
            return 401, {"message": "Bad credentials"}
        if (
            headers.get("accept") != "application/vnd.github+json"
            or headers.get("x-github-api-version") != "2022-11-28"
        ):
            self.violations.append(f"headers of {method} {target}: {headers}")
        if not headers.get("user-agent"):
            return 403, {"message": "Request forbidden by administrative rules."}
        if (method, parts.path) == ("GET", PULL):
            return 200, self.pull
        if (method, parts.path) == ("GET", f"{PULL}/files"):
            return 200, self._page(self.files, parts.query)
        if (method, parts.path) == ("GET", f"{PULL}/reviews"):
            return 200, self._page(self.reviews, parts.query)
        if (method, parts.path) == ("POST", f"{PULL}/reviews"):
            return self._review(headers, body)
        return 404, {"message": "Not Found"}

    def _page(self, items: list[dict[str, Any]], query: str) -> list[dict[str, Any]]:
        given = {name: int(values[0]) for name, values in parse_qs(query).items()}
        if set(given) - {"page", "per_page"} or not 1 <= given.get("per_page", 30) <= 100:
            self.violations.append(f"query {query}")
        size, page = given.get("per_page", 30), given.get("page", 1)
        return items[(page - 1) * size : page * size]

    def _review(self, headers: dict[str, str], body: bytes) -> tuple[int, Any]:
        if headers.get("content-type") != "application/json":
            return 415, {"message": "Unsupported Media Type"}
        given = json.loads(body)
        self.posts.append(given)
        extra = set(given) - {"commit_id", "body", "event", "comments"}
        if extra or not re.fullmatch("[0-9a-f]{40}", given.get("commit_id", "")):
            self.violations.append(f"review {given}")
        for comment in given.get("comments", []):
            shape = {name: type(value) for name, value in comment.items()}
            if shape != {"path": str, "line": int, "side": str, "body": str} or comment["side"] not in (
                "LEFT",
                "RIGHT",
            ):
                self.violations.append(f"comment {comment}")
            if not self._shown(comment):
                return 422, {"message": "Unprocessable Entity", "errors": ["Line could not be resolved"]}
        if given["event"] not in ("APPROVE", "REQUEST_CHANGES", "COMMENT"):
            return 422, {"message": "Unprocessable Entity"}
        if given["event"] != "APPROVE" and not given.get("body"):
            return 422, {"message": "Unprocessable Entity", "errors": ["Body can't be blank"]}
        if self.own and given["event"] != "COMMENT":
            return 422, {"message": "Unprocessable Entity", "errors": ["Can not approve your own pull request"]}
        state = {"APPROVE": "APPROVED", "REQUEST_CHANGES": "CHANGES_REQUESTED", "COMMENT": "COMMENTED"}[given["event"]]
        number = 80 + len(self.reviews)
        made = {"id": number, "body": given["body"], "state": state, "html_url": f"https://github.test/r/{number}"}
        self.reviews.append(made)
        if self.lose_answer:
            self.lose_answer = False
            raise ConnectionAbortedError
        return 200, made

    def _shown(self, comment: dict[str, Any]) -> bool:
        for file in self.files:
            if file["filename"] == comment["path"]:
                start, count = re.search(r"\+(\d+),?(\d*)", file["patch"]).groups()  # type: ignore[union-attr]
                return int(start) <= comment["line"] < int(start) + int(count or 1)
        return False


@contextlib.contextmanager
def fake_github() -> Iterator[FakeGitHub]:
    github = FakeGitHub()

    class Handler(BaseHTTPRequestHandler):
        def _serve(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length") or 0))
            headers = {name.lower(): value for name, value in self.headers.items()}
            try:
                status, content = github.answer(self.command, self.path, headers, body)
            except ConnectionAbortedError:
                self.close_connection = True
                return
            answer = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json; charset=utf-8")
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _serve

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    github.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield github
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    assert github.violations == []
