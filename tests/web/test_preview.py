"""A person's view: a preview in a browser, made by a dev server in a sandbox, changed through the API."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from forkyard import Sandbox

from .browser import Browser

pytestmark = pytest.mark.timeout(300)
DEV_SERVER = (Path(__file__).parent / "dev_server.js").read_text()


def test_a_page_of_a_dev_server_reloads_hot_when_a_file_changes(browser: Browser, sbx: Sandbox) -> None:
    sbx.files.write("/app/app.js", 'export const text = "first version"\n')
    sbx.files.write("/root/dev_server.js", DEV_SERVER)
    url = sbx.url(5173)
    page = browser.open(url)
    page.wait_for("Nothing listens on this port yet")
    sbx.spawn(["node", "/root/dev_server.js"])
    page.wait_for("first version")  # the page of the gateway has tried again by itself
    assert page.evaluate("location.origin") == url
    loaded = page.evaluate("document.getElementById('kept').textContent")
    page.evaluate(
        "new Promise(done => { const look = () => document.body.dataset.connected ? done() : setTimeout(look, 50); look() })"
    )
    sbx.files.write("/app/app.js", 'export const text = "second version"\n')
    page.wait_for("second version")
    assert page.evaluate("document.getElementById('kept').textContent") == loaded  # hot: the page itself stayed

    sbx.pause()
    page.go(url)
    page.wait_for("second version")  # it woke on the request
    page.evaluate(
        "new Promise(done => { const look = () => document.body.dataset.connected ? done() : setTimeout(look, 50); look() })"
    )
    sbx.files.write("/app/app.js", 'export const text = "third version"\n')
    page.wait_for("third version")


VITE = {
    "package.json": '{"private": true, "type": "module", "devDependencies": {"vite": "7"}}',
    "index.html": '<!doctype html><title>vite</title><h1 id="made">starting</h1><script type="module" src="/main.js"></script>',
    "main.js": """
        import { text } from "./text.js"
        const show = made => { document.getElementById("made").textContent = made }
        show(text)
        import.meta.hot.accept("./text.js", news => show(news.text))
    """,
    "text.js": 'export const text = "first version"',
}


def test_a_page_of_vite_reloads_hot_when_a_file_changes(browser: Browser, sbx: Sandbox) -> None:
    """The dev server that most use, as its package is."""
    for name, content in VITE.items():
        sbx.files.write(f"/vite/{name}", content)
    sbx.exec("npm install --no-audit --no-fund --loglevel=error", cwd="/vite", timeout_s=200, check=True)
    sbx.spawn("npx vite --host 127.0.0.1", cwd="/vite")
    page = browser.open(sbx.url(5173))
    page.wait_for("first version")
    loaded = page.evaluate("performance.timeOrigin")
    # A page whose socket is not open yet is told of no change: it is saved again until it shows.
    for _ in range(20):
        sbx.files.write("/vite/text.js", 'export const text = "second version"')
        with contextlib.suppress(AssertionError):
            page.wait_for("second version", within_s=5)
            break
    assert "second version" in page.text
    assert page.evaluate("performance.timeOrigin") == loaded  # hot: the page itself stayed


def test_pages_of_the_gateway_are_clear(browser: Browser, sbx: Sandbox) -> None:
    url = sbx.url(3000)
    browser.open(url.replace(sbx.id, "a" * 20)).wait_for("No such sandbox")
    browser.open(url.replace("3000-", "0-")).wait_for("0' is no port")
    sbx.delete()
    browser.open(url).wait_for("This sandbox has ended")
