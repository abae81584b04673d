"""Times that a cron expression names. Pure.

Five fields (minute, hour, day of month, month, day of week) with `*`, lists, ranges, steps and names, or `@hourly` and its
like. As with cron, a day matches by either of its two fields if both are restricted.
"""

from __future__ import annotations

import calendar
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from forkyard.errors import InvalidRequest

_MACROS = {
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
    "@monthly": "0 0 1 * *",
    "@weekly": "0 0 * * 0",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@hourly": "0 * * * *",
}
_MONTHS = {name.lower(): n for n, name in enumerate(calendar.month_abbr) if name}
_DAYS = {name.lower(): (n + 1) % 7 for n, name in enumerate(calendar.day_abbr)}
#: A leap day on a certain weekday comes round in at most 28 years, but for skipped ones.
_HORIZON_DAYS = 366 * 30


@dataclass(frozen=True)
class Cron:
    minutes: frozenset[int]
    hours: frozenset[int]
    days: frozenset[int]
    months: frozenset[int]
    weekdays: frozenset[int]
    any_day: bool
    any_weekday: bool
    zone: ZoneInfo

    @classmethod
    def parse(cls, text: str, timezone: str = "UTC") -> Cron:
        try:
            zone = ZoneInfo(timezone)
        except (ZoneInfoNotFoundError, ValueError, OSError):
            raise InvalidRequest(f"{timezone[:64]!r} is no timezone; one looks like Europe/Berlin") from None
        fields = _MACROS.get(text.strip().lower(), text).lower().split()
        if len(fields) != 5:
            raise InvalidRequest(f"{text[:64]!r} is no cron expression: it has minute, hour, day, month and weekday")
        weekdays = _numbers(fields[4], 0, 7, _DAYS)
        return cls(
            _numbers(fields[0], 0, 59),
            _numbers(fields[1], 0, 23),
            _numbers(fields[2], 1, 31),
            _numbers(fields[3], 1, 12, _MONTHS),
            frozenset(day % 7 for day in weekdays),
            any_day=fields[2].startswith("*"),
            any_weekday=fields[4].startswith("*"),
            zone=zone,
        )

    def after(self, instant: datetime) -> datetime:
        """The first such minute that is later."""
        day = instant.astimezone(self.zone).replace(hour=0, minute=0, second=0, microsecond=0, tzinfo=None)
        for _ in range(_HORIZON_DAYS):
            if day.month in self.months and self._is_day(day):
                for hour in sorted(self.hours):
                    for minute in sorted(self.minutes):
                        # A minute that a clock change skips is taken as the one after it.
                        at = day.replace(hour=hour, minute=minute, tzinfo=self.zone).astimezone(UTC)
                        if at > instant:
                            return at
            day += timedelta(days=1)
        raise InvalidRequest("this cron expression names no time at all")

    def _is_day(self, day: datetime) -> bool:
        by_date, by_weekday = day.day in self.days, (day.weekday() + 1) % 7 in self.weekdays
        if self.any_day or self.any_weekday:
            return by_date and by_weekday
        return by_date or by_weekday


def _numbers(field: str, least: int, most: int, names: dict[str, int] | None = None) -> frozenset[int]:
    found: set[int] = set()
    for part in field.split(","):
        span, slash, step = part.partition("/")
        stride = _number(step, 1, most + 1, {}) if slash else 1
        if span == "*":
            first, last = least, most
        else:
            start, dash, end = span.partition("-")
            first = _number(start, least, most, names or {})
            last = _number(end, least, most, names or {}) if dash else most if slash else first
        if first > last:
            raise InvalidRequest(f"{part[:32]!r} in a cron expression ends before it begins")
        found.update(range(first, last + 1, stride))
    return frozenset(found)


def _number(text: str, least: int, most: int, names: dict[str, int]) -> int:
    if text in names:
        return names[text]
    if not text.isascii() or not text.isdigit() or len(text) > 4 or not least <= int(text) <= most:
        raise InvalidRequest(f"{text[:32]!r} in a cron expression is not a number from {least} to {most}")
    return int(text)
