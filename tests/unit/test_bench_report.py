"""The table in SPECIFICATION.md is written by benchmarks, also by some of them alone."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from forkyard.bench import measure
from forkyard.bench.figures import FIGURES, Sample
from forkyard.bench.measure import Say
from forkyard.bench.report import BEGIN, END, OLDER, _write


def rows(page: Path) -> dict[str, str]:
    return {line.split("`")[1]: line for line in page.read_text().splitlines() if line.startswith("| `")}


def test_what_is_not_measured_again_is_kept_and_marked_as_older(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"above\n{BEGIN}\n{END}\nbelow\n")
    first, second = (figure.name for figure in FIGURES[:2])
    _write(page, "tcg", Sample([50.0]), {first: Sample([100.0]), second: Sample([40.0])})
    assert list(rows(page)) == [first, second]
    before = rows(page)
    for _ in range(2):
        _write(page, "tcg", Sample([50.0]), {second: Sample([30.0])})
        assert rows(page)[first] == before[first].removesuffix(" |") + f"{OLDER} |"
        assert OLDER not in rows(page)[second] and rows(page)[second] != before[second]
    assert page.read_text().startswith("above\n") and page.read_text().endswith("below\n")


def test_what_a_spec_costs_is_measured_with_what_volumes_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    async def spec(n: int | None, say: Say) -> dict[str, Sample]:
        return {"spec_cached_create": Sample([1.0])}

    async def volumes(n: int | None, say: Say) -> dict[str, Sample]:
        return {"volume_1gib_attach": Sample([2.0])}

    monkeypatch.setattr(measure, "spec", spec)
    monkeypatch.setattr(measure, "volumes", volumes)
    found = asyncio.run(measure.MEASURES["spec"](1, print))
    assert set(found) == {"spec_cached_create", "volume_1gib_attach"}
