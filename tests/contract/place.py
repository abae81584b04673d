"""A server of files on loopback, some of which are elsewhere."""

from __future__ import annotations

import contextlib
import http.server
import threading


class Place(contextlib.AbstractContextManager["Place"]):
    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.elsewhere: dict[str, str] = {}
        self.seen: list[tuple[str, str | None]] = []

    def __enter__(self) -> Place:
        place = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                place.seen.append((self.path, self.headers.get("Authorization")))
                content = place.files.get(self.path)
                self.send_response(302 if self.path in place.elsewhere else 404 if content is None else 200)
                self.send_header("Content-Length", str(len(content or b"")))
                if self.path in place.elsewhere:
                    self.send_header("Location", place.elsewhere[self.path])
                self.end_headers()
                self.wfile.write(content or b"")

            def log_message(self, *_: object) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def url(self, path: str, user: str = "") -> str:
        return f"http://{user}127.0.0.1:{self._server.server_port}{path}"
