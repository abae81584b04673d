"""A repository with a Node dev server: served, reloaded by a push, and forked three times. Each fork shows its own change."""

import json
import time
from http.client import HTTPConnection
from urllib.parse import urlsplit

from forkyard import Forkyard

SERVER = """
const fs = require('fs')
const greeting = fs.readFileSync('greeting.txt', 'utf8')
require('http').createServer((_, answer) => {
  answer.end(greeting + ' in ' + fs.readFileSync('color.txt', 'utf8'))
}).listen(process.env.PORT)
"""
FILES = {
    "package.json": json.dumps({"main": "server.js"}),  # or a script `dev`, and dependencies
    "server.js": SERVER,
    "greeting.txt": "hello",
    "color.txt": "black",
}


def page(url: str) -> str:
    """What a browser would show. (Not every resolver knows that names below `localhost` are this machine.)"""
    parts = urlsplit(url)
    connection = HTTPConnection("127.0.0.1", parts.port, timeout=60)
    connection.request("GET", "/", headers={"Host": parts.netloc})
    return connection.getresponse().read().decode()


with Forkyard() as fy:
    repo = fy.git.create(f"hello-{time.time_ns()}", files=FILES)
    with fy.dev_servers.create(repo.name) as server:
        print(server.url, "runs", server.info.command, "and says", page(server.url))
        assert page(server.url) == "hello in black"

        commit = repo.commit("Be polite", {"greeting.txt": "good day"})
        while server.refresh().sha != commit.sha:
            assert server.info.error is None, server.info.error
            time.sleep(0.2)
        print("after a push it says", page(server.url))
        assert page(server.url) == "good day in black"

        forks = server.sandbox().fork(3)
        for fork, color in zip(forks, ("red", "green", "blue"), strict=True):
            fork.files.write("/repo/color.txt", color)
        for fork, color in zip(forks, ("red", "green", "blue"), strict=True):
            print(fork.url(3000), "says", page(fork.url(3000)))
            assert page(fork.url(3000)) == f"good day in {color}"
            fork.delete()
        assert page(server.url) == "good day in black"
    repo.delete()
