"""Logging: structlog everywhere, one line per event, to standard error.

Owns: how a log line looks, for people or as JSON. Libraries that log through the standard library (uvicorn, alembic)
come out the same way. Never does: deciding what is logged.
"""

from __future__ import annotations

import logging
import sys
from typing import TextIO

import structlog
from structlog.typing import Processor


def configure(level: str = "info", *, json: bool = False, stream: TextIO | None = None) -> None:
    out = stream or sys.stderr
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    final: list[Processor]
    if json:
        final = [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    else:  # plain: structlog's own tracebacks show local variables, and with them API keys
        final = [structlog.dev.ConsoleRenderer(colors=out.isatty(), exception_formatter=structlog.dev.plain_traceback)]
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelName(level.upper())),
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(out)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *final],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access"):
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = True
    # A line per request is for debugging; what matters is in the events.
    logging.getLogger("uvicorn.access").disabled = level != "debug"
    for noisy in ("alembic", "aiosqlite"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
