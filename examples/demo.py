"""What `make demo` runs: starts a daemon if none runs, creates sandboxes, runs commands and files in them."""

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rich.console import Console
from rich.table import Table

from forkyard import Forkyard

console = Console()
table = Table(title="What just happened", title_justify="left")
table.add_column("step")
table.add_column("result", overflow="fold")
table.add_column("time", justify="right")


def step(text: str, work: Any, show: Any = str) -> Any:
    with console.status(text):
        started = time.perf_counter()
        result = work()
        took_ms = (time.perf_counter() - started) * 1000
    table.add_row(text, show(result).strip(), f"{took_ms:,.0f} ms")
    return result


def out(result: Any) -> str:
    return str(result.stdout)


with Forkyard() as fy:
    sbx = step("create a sandbox", lambda: fy.sandboxes.create(name="demo"), lambda s: s.id)
    step("which machine is this?", lambda: sbx.exec("hostname; uname -sr; . /etc/os-release; echo $PRETTY_NAME"), out)
    step("run Python", lambda: sbx.exec(["python3", "-c", "print(sum(range(10**6)))"]), out)
    step("run Node", lambda: sbx.exec("node -p 'process.version'"), out)
    step(
        "write a file",
        lambda: sbx.files.write("/root/hello.py", "print('hello from', __file__)\n"),
        lambda _: "/root/hello.py",
    )
    step("run it", lambda: sbx.exec("python3 hello.py"), out)
    step("upload 32 MB", lambda: sbx.files.write("/root/blob", bytes(32_000_000)), lambda _: "/root/blob")
    step("checksum it inside", lambda: sbx.exec("sha256sum blob | cut -c1-16"), out)
    step("a failing command is data", lambda: sbx.exec("ls /nowhere"), lambda r: f"exit {r.exit_code}: {r.stderr}")
    server = step(
        "start a background process", lambda: sbx.spawn("while sleep 0.2; do date +%s.%N; done"), lambda p: p.id
    )
    with ThreadPoolExecutor(4) as pool:
        others = step(
            "create four more at once",
            lambda: list(pool.map(lambda i: fy.sandboxes.create(name=f"demo-{i}"), range(4))),
            lambda all_: " ".join(s.id[:6] for s in all_),
        )
        step(
            "ask each for a random number",
            lambda: list(pool.map(lambda s: s.exec("head -c4 /dev/urandom | od -An -tx4").stdout.strip(), others)),
            " ".join,
        )
    step(
        "the background process still runs",
        lambda: server.info(),
        lambda i: f"running={i.running}, {i.stdout_bytes} bytes",
    )
    step("delete all five", lambda: [s.delete() for s in [sbx, *others]], lambda _: "gone")

console.print(table)
console.print(
    "The daemon goes on in the background: try [b].venv/bin/forkyard create[/b], or stop it with [b]forkyard down[/b]."
)
