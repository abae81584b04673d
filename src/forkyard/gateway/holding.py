"""How much of WebSocket messages waits in memory: what is not whole yet, and what an end that is slow has not taken. Pure.

So much as a request may hold each direction of a socket has for nothing. What goes beyond it comes out of one room for
all of this process, of which those of one sandbox (or, before it is known whose they are, of one client) fill a part. A
socket for which there is no room is closed: if it waited, sockets with half a message each would wait for each other.
"""

from __future__ import annotations

FREE_BYTES = 256 * 1024
MAX_BYTES = 2**30
MAX_BYTES_OF_ONE = 256 * 2**20

#: Of the protocol: try again later.
TRY_LATER = 1013
WHY = "too many large messages are under way at once"


class Room:
    def __init__(self) -> None:
        self._held = 0
        self._of: dict[str, int] = {}

    def change(self, whose: str, by: int) -> bool:
        """Whether there is room. What is given back always has some."""
        of_one = self._of.get(whose, 0) + by
        if by > 0 and (self._held + by > MAX_BYTES or of_one > MAX_BYTES_OF_ONE):
            return False
        self._held += by
        if of_one:
            self._of[whose] = of_one
        else:
            self._of.pop(whose, None)
        return True


class Hold:
    """What one direction of one socket holds. It is said what comes, when a message is taken (at that time no more than
    the rest of the last piece waits behind it), and when it was passed on."""

    def __init__(self, room: Room, whose: str) -> None:
        self.room = room
        self._whose = whose
        self._arriving = 0
        self._in_hand = 0
        self._counted = 0
        self.refused = False

    def belongs_to(self, whose: str) -> None:
        self.room.change(self._whose, -self._counted)
        self._whose, self._counted = whose, 0
        self._count()

    def came(self, size_bytes: int) -> bool:
        """False: there is no room for it."""
        self._arriving += size_bytes
        return self._count()

    def taken(self) -> None:
        self._in_hand, self._arriving = self._arriving, 0
        self._count()

    def passed(self) -> None:
        self._in_hand = 0
        self._count()

    def close(self) -> None:
        self._arriving = self._in_hand = 0
        self._count()

    def _count(self) -> bool:
        wanted = max(0, self._arriving + self._in_hand - FREE_BYTES)
        if wanted != self._counted:
            if not self.room.change(self._whose, wanted - self._counted):
                self.refused = True
                return False
            self._counted = wanted
        return True
