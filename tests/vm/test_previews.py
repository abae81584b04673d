"""Previews of real machines: servers that listen anywhere, WebSockets, sleep, forks."""

from __future__ import annotations

import hashlib
import os

import pytest

from forkyard import Forkyard, NetworkPolicy, Sandbox

from .conftest import Daemon
from .previews import get, open_socket, serve, until_served

pytestmark = pytest.mark.timeout(300)

#: A WebSocket server without packages: it echoes text frames.
ECHO_JS = r"""
const http = require("http"), crypto = require("crypto")
http.createServer((_, answer) => answer.end("plain")).on("upgrade", (request, socket) => {
  const key = request.headers["sec-websocket-key"] + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
  socket.write("HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Accept: "
    + crypto.createHash("sha1").update(key).digest("base64") + "\r\n\r\n")
  socket.on("error", () => {})
  socket.on("data", data => {
    if ((data[0] & 15) !== 1) return socket.end()
    const length = data[1] & 127, mask = data.subarray(2, 6), text = data.subarray(6, 6 + length)
    socket.write(Buffer.concat([Buffer.from([129, length]), text.map((byte, i) => byte ^ mask[i % 4])]))
  })
}).listen(3000, "127.0.0.1")
"""
#: Answers with the digest of what it was sent.
UPLOAD_PY = """
import hashlib, http.server
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_POST(self):
        left, digest = int(self.headers["Content-Length"]), hashlib.sha256()
        while left:
            piece = self.rfile.read(min(left, 65536))
            digest.update(piece)
            left -= len(piece)
        body = digest.hexdigest().encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
http.server.HTTPServer(("127.0.0.1", 9000), Handler).serve_forever()
"""


@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0"])
def test_a_server_is_reached_wherever_it_listens(sbx: Sandbox, address: str) -> None:
    sbx.files.write("/srv/www/index.html", f"hello from {sbx.id}")
    serve(sbx, "python3", "-m", "http.server", "8000", "--bind", address, cwd="/srv/www")
    assert until_served(sbx.url(8000)).text == f"hello from {sbx.id}"
    assert get(sbx.url(8000), "/none").status_code == 404
    assert get(sbx.url(8000), method="HEAD").headers["content-length"] == str(len(f"hello from {sbx.id}"))


def test_a_port_where_nothing_listens_is_said_so(sbx: Sandbox) -> None:
    page = get(sbx.url(8000), headers={"Accept": "text/html"})
    assert (page.status_code, page.headers["retry-after"]) == (502, "1")
    assert "Nothing listens on this port yet" in page.text


def test_a_large_upload_arrives_whole(sbx: Sandbox) -> None:
    sbx.files.write("/root/upload.py", UPLOAD_PY)
    serve(sbx, "python3", "/root/upload.py")
    until_served(sbx.url(9000))
    data = os.urandom(8 * 2**20)
    assert get(sbx.url(9000), method="POST", content=data).text == hashlib.sha256(data).hexdigest()


def test_a_websocket_and_a_sandbox_that_sleeps_meanwhile(sbx: Sandbox) -> None:
    sbx.files.write("/root/echo.js", ECHO_JS)
    serve(sbx, "node", "/root/echo.js")
    assert until_served(sbx.url(3000)).text == "plain"
    with open_socket(sbx.url(3000)) as socket:
        socket.send("hello")
        assert socket.recv(30) == "hello"
    sbx.pause()
    assert get(sbx.url(3000)).text == "plain"
    assert sbx.refresh().cause == "woken"
    with open_socket(sbx.url(3000)) as socket:
        socket.send("again")
        assert socket.recv(30) == "again"


def test_a_sandbox_whose_memory_is_on_disk_wakes_on_the_request(sbx: Sandbox) -> None:
    sbx.files.write("/srv/www/index.html", "kept")
    serve(sbx, "python3", "-m", "http.server", "8000", "--bind", "127.0.0.1", cwd="/srv/www")
    until_served(sbx.url(8000))
    sbx.pause(durable=True)
    assert get(sbx.url(8000)).text == "kept"
    assert sbx.refresh().state == "running"


def test_a_fork_serves_its_own_content_at_once(sbx: Sandbox) -> None:
    sbx.files.write("/srv/www/index.html", "parent")
    serve(sbx, "python3", "-m", "http.server", "8000", "--bind", "127.0.0.1", cwd="/srv/www")
    until_served(sbx.url(8000))
    (child,) = sbx.fork()
    child.files.write("/srv/www/index.html", "child")
    assert get(child.url(8000)).text == "child"
    assert get(sbx.url(8000)).text == "parent"
    child.delete()
    gone = get(sbx.url(8000).replace(sbx.id, child.id))
    assert (gone.status_code, gone.json()["code"]) == (410, "sandbox_ended")


def test_a_token_and_a_port_that_is_off(fy: Forkyard) -> None:
    network = NetworkPolicy.model_validate({"ingress": {"access": "off", "ports": {"8000": "token"}}})
    with fy.sandboxes.create(network=network) as sandbox:
        serve(sandbox, "python3", "-m", "http.server", "8000", cwd="/srv")
        preview = sandbox.preview(8000)
        assert (preview.access, get(preview.url).status_code) == ("token", 401)
        assert preview.link is not None
        url, _, link = preview.link.partition("/?")
        opened = get(url, f"/?{link}", headers={"Accept": "text/html"})
        assert (opened.status_code, opened.headers["location"]) == (303, "/")
        cookie = opened.headers["set-cookie"].partition(";")[0]
        assert get(preview.url, headers={"Cookie": cookie}).status_code in (200, 502)
        assert get(sandbox.url(8001)).status_code == 403


def test_a_restarted_daemon_serves_on(own_daemon: Daemon) -> None:
    with own_daemon.client() as fy:
        sandbox = fy.sandboxes.create()
        sandbox.files.write("/srv/www/index.html", "still here")
        serve(sandbox, "python3", "-m", "http.server", "8000", "--bind", "127.0.0.1", cwd="/srv/www")
        until_served(sandbox.url(8000))
        own_daemon.kill()
        own_daemon.start()
        assert get(sandbox.url(8000)).text == "still here"
