"""JSON answers. ASCII only, so that no text from a guest, lone surrogates included, can make an answer impossible."""

from __future__ import annotations

import json
from collections.abc import Sequence

from pydantic import BaseModel
from starlette.responses import Response


def answer(content: BaseModel | Sequence[BaseModel], status: int = 200) -> Response:
    if isinstance(content, BaseModel):
        plain: object = content.model_dump(mode="json")
    else:
        plain = [item.model_dump(mode="json") for item in content]
    return Response(json.dumps(plain).encode("ascii"), status_code=status, media_type="application/json")


def done() -> Response:
    return Response(status_code=204)
