"""Runs benchmarks and shows them: a table, JSON, or the table inside SPECIFICATION.md."""

from __future__ import annotations

import asyncio
import json
import os
import platform
import sys
from datetime import date
from pathlib import Path
from typing import Any

from forkyard.bench.figures import BENCHES, FIGURES, Sample
from forkyard.bench.measure import MEASURES, reference
from forkyard.bench.peers import Missing, Peers, peers
from forkyard.errors import InvalidRequest
from forkyard.settings import Settings

BEGIN, END = "<!-- bench: begin -->", "<!-- bench: end -->"
OLDER = " (earlier run)"


def main(
    names: tuple[str, ...] = (),
    *,
    n: int | None = None,
    as_json: bool = False,
    write: Path | None = None,
    with_peers: bool = False,
) -> int:
    unknown = set(names) - set(BENCHES)
    if unknown:
        raise InvalidRequest(f"no benchmark is called {', '.join(sorted(unknown))}; there are {', '.join(BENCHES)}")
    if with_peers and not names:
        names = ("create", "fork")  # what peers are compared with
    accel, t0, greeting, results = asyncio.run(_run(names or BENCHES, n))
    others = asyncio.run(peers(n, _say)) if with_peers else {}
    if write is not None:
        _write(write, accel, t0, results)
    if as_json:
        document = _document(accel, t0, greeting, results)
        document["results"] |= {name: other.as_json() for name, other in others.items()}
        print(json.dumps(document, indent=2))
    else:
        _show(accel, t0, results)
        _show_peers(t0, others)
    return 0 if all(f.met(results[f.name], t0.p50) for f in FIGURES if f.name in results) else 3


def _say(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\033[K  … {text}", end="", file=sys.stderr, flush=True)


async def _run(names: tuple[str, ...], n: int | None) -> tuple[str, Sample, Sample, dict[str, Sample]]:
    _say("reference: starting an idle hypervisor")
    accel, t0, greeting = await reference(Settings())
    results: dict[str, Sample] = {}
    for measure in dict.fromkeys(MEASURES[name] for name in names):  # one may serve two names
        results |= await measure(n, _say)
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr)
    return accel, t0, greeting, results


def _document(accel: str, t0: Sample, greeting: Sample, results: dict[str, Sample]) -> dict[str, Any]:
    def shown(sample: Sample) -> dict[str, float]:
        return {"p50": round(sample.p50, 2), "p95": round(sample.p95, 2), "n": len(sample.values)}

    return {
        "accel": accel,
        "reference": {"qemu_start_ms": shown(t0), "qemu_greeting_ms": shown(greeting)},
        "results": {name: sample.as_json() for name, sample in results.items()},
    }


def _rows(t0: Sample, results: dict[str, Sample]) -> list[tuple[str, str, str, str, str]]:
    return [
        (
            figure.name,
            figure.promise,
            figure.bar(),
            figure.measured(results[figure.name], t0.p50),
            "yes" if figure.met(results[figure.name], t0.p50) else "**no**",
        )
        for figure in FIGURES
        if figure.name in results
    ]


def _show(accel: str, t0: Sample, results: dict[str, Sample]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(
        title=f"{accel}, T0 = {t0.p50:.0f} ms (an idle hypervisor to its first answer, p50 of {len(t0.values)})"
    )
    for column in ("figure", "what", "bar", "measured", "met"):
        table.add_column(column)
    for row in _rows(t0, results):
        table.add_row(*row[:4], row[4].strip("*"))
    Console().print(table)


def _show_peers(t0: Sample, others: Peers) -> None:
    from rich.console import Console
    from rich.table import Table

    if not others:
        return
    table = Table(title="what one would use instead, measured in the same run")
    for column in ("peer", "measured"):
        table.add_column(column)
    for name, other in others.items():
        if isinstance(other, Missing):
            table.add_row(name, other.why)
        else:
            table.add_row(name, f"{other.p50 / t0.p50:.2f} × T0 ({other.p50:.0f} ms, p95 {other.p95:.0f} ms)")
    Console().print(table)


def _write(path: Path, accel: str, t0: Sample, results: dict[str, Sample]) -> None:
    """Figures that were not measured this time keep what they had, marked as older."""
    text = path.read_text()
    before, rest = text.split(BEGIN, 1)
    earlier, after = rest.split(END, 1)
    rows = {
        line.split("`")[1]: line.removesuffix(" |").removesuffix(OLDER) + f"{OLDER} |"
        for line in earlier.splitlines()
        if line.startswith("| `")
    }
    for name, promise, bar, measured, met in _rows(t0, results):
        rows[name] = f"| `{name}` | {promise} | {bar} | {measured} | {met} |"
    cores = len(os.sched_getaffinity(0))
    lines = [
        BEGIN,
        f"Measured {date.today().isoformat()} with `make bench`: {accel}, {cores} cores, "
        f"Linux {platform.release().split('-')[0]}, 512 MiB guest. T0 = {t0.p50:.0f} ms (p95 {t0.p95:.0f} ms).",
        "",
        "| figure | promise | bar | measured | met |",
        "|---|---|---|---|---|",
        *(rows[figure.name] for figure in FIGURES if figure.name in rows),
        END,
    ]
    path.write_text(before + "\n".join(lines) + after)
