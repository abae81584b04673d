"""Templates on tmpfs."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

from forkyard.host.templates import Templates
from forkyard.models import Shape


def templates_in(directory: Path) -> Templates:
    unused = cast(Any, None)
    return Templates(
        cache_dir=directory,
        ram_dir=directory / "ram",
        driver=unused,
        connect=unused,
        journal=unused,
        foundry=unused,
        image=unused,
        boot_timeout_s=1,
    )


def test_a_ram_that_many_want_at_once_is_copied_once_and_seen_whole(tmp_path: Path) -> None:
    template = tmp_path / "templates" / "key"
    template.mkdir(parents=True)
    content = bytes(range(256)) * (1 << 16)
    (template / "ram").write_bytes(content)
    (template / "manifest.json").write_text('{"milestones": []}')
    templates = templates_in(tmp_path)

    async def all_at_once() -> list[Path]:
        return await asyncio.gather(*(templates.ram_of("key", Shape()) for _ in range(8)))

    found = asyncio.run(all_at_once())
    assert {path.read_bytes() == content for path in found} == {True}
    assert [path.name for path in (tmp_path / "ram").iterdir()] == ["key.ram"]
