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
    step("find the daemon, or start it", fy.health, lambda h: f"version {h.version}, {h.accel}")
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
    counter = "i=0; while :; do i=$((i+1)); echo $i > /dev/shm/count; sleep 0.1; done"
    step("start a background process", lambda: sbx.spawn(counter), lambda p: p.id)
    sbx.exec("echo prepared once > /root/plan")
    children = step("fork it into three", lambda: sbx.fork(3), lambda all_: " ".join(c.id[:6] for c in all_))
    with ThreadPoolExecutor(3) as pool:
        step(
            "each goes its own way",
            lambda: list(
                pool.map(
                    lambda c: c.exec("echo $(cat /root/plan), count $(cat /dev/shm/count)").stdout.strip(), children
                )
            ),
            "\n".join,
        )
    step("pause", sbx.pause, lambda i: i.state)
    step("resume", sbx.resume, lambda i: i.state)
    step("pause to disk", lambda: sbx.pause(durable=True), lambda i: f"{i.state}: no process, no memory")
    step("any call wakes it", lambda: sbx.exec("echo still counting: $(cat /dev/shm/count)"), out)
    snap = step("snapshot", sbx.snapshot, lambda s: s.id)
    other = step("create from the snapshot", lambda: fy.sandboxes.create(snapshot=snap), lambda s: s.id)
    step("delete all", lambda: [s.delete() for s in [sbx, other, *children, snap]], lambda _: "gone")

console.print(table)
console.print(
    "The daemon goes on in the background: try [b].venv/bin/forkyard create[/b], or stop it with [b]forkyard down[/b]."
)
