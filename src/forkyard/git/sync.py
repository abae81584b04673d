"""stub"""

from __future__ import annotations
import asyncio
from pathlib import Path
from typing import Any


class Sync:
    def __init__(self, *args: Any, github_api: str, ca: Path | None) -> None:
        pass

    async def start(self) -> None:
        pass

    async def run(self) -> None:
        await asyncio.Event().wait()
