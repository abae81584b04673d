"""A tree that is being changed: put, delete, rename, change the mode; then only what changed is written. No I/O of its
own: directories are read by a function that is handed in, and written to a pack.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

from forkyard.errors import Conflict, InvalidPath, RevisionNotFound
from forkyard.git.names import checked_path
from forkyard.git.objects import DIRECTORY, EXECUTABLE, FILE, Entry, PackWriter, Signature, commit_data, tree_data

ReadTree = Callable[[str], dict[str, Entry]]
Node = Entry | dict[str, "Node"]
N = TypeVar("N", bound=Node)


class TreeEdit:
    def __init__(self, read: ReadTree, base: str | None = None) -> None:
        self._read = read
        self._base = base
        self._root: dict[str, Node] = {} if base is None else dict(read(base))
        self._new: dict[int, set[str]] = {}

    def put(self, path: str, mode: int, sha: str, *, careful: bool = True) -> None:
        """`careful` refuses what a file system that ignores case could not hold."""
        *above, name = checked_path(path).split("/")
        directory = self._root
        for depth, part in enumerate(above):
            below = self._opened(directory, part)
            if below is None:
                if part in directory:
                    raise Conflict(
                        f"{path!r} cannot be written: {'/'.join(above[: depth + 1])!r} is a file, not a directory; "
                        "delete it in the same commit",
                        path=path,
                    )
                below = self._add(directory, part, {}, careful)
            directory = below
        if self._is_directory(directory.get(name)):
            raise Conflict(f"{path!r} is a directory; delete it in the same commit to put a file there", path=path)
        self._add(directory, name, Entry(mode, sha), careful)

    def delete(self, path: str) -> None:
        """A file, or a directory with all in it. Directories that become empty vanish, as git has none."""
        directory, name = self._found(path)
        del directory[name]

    def rename(self, source: str, destination: str) -> None:
        if destination == source or destination.startswith(source + "/"):
            raise InvalidPath(f"{source!r} cannot be moved to {destination!r}, into itself", path=destination)
        directory, name = self._found(source)
        node = directory.pop(name)
        if isinstance(node, Entry) and node.mode != DIRECTORY:
            self.put(destination, node.mode, node.sha)
            return
        *above, last = checked_path(destination).split("/")
        directory = self._root
        for part in above:
            below = self._opened(directory, part)
            if below is None:
                if part in directory:
                    raise Conflict(
                        f"{source!r} cannot be moved to {destination!r}: {part!r} is a file", path=destination
                    )
                below = self._add(directory, part, {}, careful=True)
            directory = below
        if last in directory:
            raise Conflict(f"{source!r} cannot be moved to {destination!r}, which exists already", path=destination)
        self._add(directory, last, node, careful=True)

    def change_mode(self, path: str, mode: int) -> None:
        directory, name = self._found(path)
        node = directory[name]
        if not isinstance(node, Entry) or node.mode not in (FILE, EXECUTABLE) or mode not in (FILE, EXECUTABLE):
            raise Conflict(f"the mode of {path!r} can only change between 100644 and 100755", path=path)
        directory[name] = Entry(mode, node.sha)

    def entry(self, path: str) -> Entry | None:
        """The file at `path`."""
        try:
            directory, name = self._found(path)
        except RevisionNotFound:
            return None
        node = directory[name]
        return node if isinstance(node, Entry) and node.mode != DIRECTORY else None

    def write(self, pack: PackWriter) -> str:
        """The id of the new tree; its parts that were not there before are in the pack."""
        return self._written(self._root, pack, root=True) or ""

    def _written(self, directory: dict[str, Node], pack: PackWriter, *, root: bool = False) -> str | None:
        self._refuse_twins(directory)
        entries: dict[str, Entry] = {}
        for name, node in directory.items():
            if isinstance(node, Entry):
                entries[name] = node
            elif (sha := self._written(node, pack)) is not None:
                entries[name] = Entry(DIRECTORY, sha)
        return pack.add("tree", tree_data(entries)) if entries or root else None

    def _opened(self, directory: dict[str, Node], name: str) -> dict[str, Node] | None:
        """A directory below this one, ready to be changed. None: there is none."""
        node = directory.get(name)
        if isinstance(node, Entry):
            if node.mode != DIRECTORY:
                return None
            opened: dict[str, Node] = dict(self._read(node.sha))
            directory[name] = opened
            return opened
        return node

    def _found(self, path: str) -> tuple[dict[str, Node], str]:
        *above, name = checked_path(path).split("/")
        directory: dict[str, Node] | None = self._root
        for part in above:
            directory = self._opened(directory, part) if directory is not None else None
        if directory is None or name not in directory:
            raise RevisionNotFound(f"there is no {path!r} in this branch", path=path)
        return directory, name

    def _is_directory(self, node: Node | None) -> bool:
        """One that was emptied is none."""
        if isinstance(node, Entry):
            return node.mode == DIRECTORY
        return node is not None and any(self._files(node))

    def _files(self, directory: dict[str, Node]) -> Iterator[Entry]:
        for node in directory.values():
            if isinstance(node, Entry):
                yield node
            else:
                yield from self._files(node)

    def _add(self, directory: dict[str, Node], name: str, node: N, careful: bool) -> N:
        if careful and name not in directory:
            self._new.setdefault(id(directory), set()).add(name)
        directory[name] = node
        return node

    def _refuse_twins(self, directory: dict[str, Node]) -> None:
        """Of what this edit added; what was there before is not its business."""
        new = self._new.get(id(directory))
        if not new:
            return
        folded: dict[str, str] = {}
        for name in sorted(directory, key=lambda name: name in new):
            twin = folded.setdefault(name.casefold(), name)
            if twin != name and name in new:
                raise Conflict(
                    f"{name!r} differs from {twin!r} only in upper and lower case; a Mac or Windows could not check "
                    "out both",
                    path=name,
                )


def new_tree() -> TreeEdit:
    """With nothing in it."""

    def nothing(sha: str) -> dict[str, Entry]:
        raise AssertionError(f"a new tree has no {sha}")

    return TreeEdit(nothing)


def first_commit(edit: TreeEdit, pack: PackWriter, author: Signature, message: str) -> str:
    return pack.add("commit", commit_data(edit.write(pack), [], author, author, message))
