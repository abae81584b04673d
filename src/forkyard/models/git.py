"""Wire types of git hosting: repositories, refs, contents, commits, merges, searches."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Literal, Self

from pydantic import Field, StringConstraints, model_validator

from forkyard.models.base import Answer, Request

RepoName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")]
Sha = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{40}$")]
Ref = Annotated[str, StringConstraints(min_length=1, max_length=250)]
Revision = Annotated[str, StringConstraints(min_length=1, max_length=250)]
FilePath = Annotated[str, StringConstraints(min_length=1, max_length=4096)]
Text = Annotated[str, StringConstraints(max_length=65536)]
Visibility = Literal["private", "public"]
Permission = Literal["read", "write"]
FileMode = Literal["100644", "100755", "120000"]
EntryType = Literal["file", "directory", "symlink", "submodule"]


class Person(Request):
    """Who wrote or committed something."""

    name: str = Field(min_length=1, max_length=256)
    email: str = Field(max_length=256)
    date: datetime | None = Field(None, description="Default: now.")


# ── repositories ─────────────────────────────────────────────────────────────────────────────────────────────────


class FileChange(Request):
    """What happens to one path. With `content`: added or changed. `mode` alone changes the mode."""

    path: FilePath
    content: str | None = None
    encoding: Literal["utf-8", "base64"] = "utf-8"
    mode: FileMode | None = Field(None, description="`100644` file, `100755` executable, `120000` symlink.")
    delete: bool = Field(False, description="Remove the file, or everything below the directory.")
    rename_from: FilePath | None = Field(None, description="Move this file or directory here; may come with `content`.")


class FilesSource(Request):
    type: Literal["files"] = "files"
    files: list[FileChange] = Field(min_length=1, max_length=100_000)
    message: Text = "First commit"
    author: Person | None = None


class GitSource(Request):
    type: Literal["git"] = "git"
    url: str = Field(
        min_length=1, max_length=2048, description="http, https, git or ssh. Credentials in it are not kept."
    )
    rev: Revision | None = Field(None, description="Branch, tag or commit. Default: everything, at the remote's HEAD.")
    history: bool = Field(True, description="False takes the files of `rev` alone, as one new commit.")
    directory: FilePath | None = Field(None, description="Take only what is below it; only without history.")
    allow_private: bool = Field(False, description="The address may be this host, or in a private network.")
    message: Text = "Import"
    author: Person | None = None

    @model_validator(mode="after")
    def _one_commit(self) -> Self:
        if self.directory is not None and self.history:
            raise ValueError("a directory of it has no history of its own: set history to false")
        return self


class ArchiveSource(Request):
    type: Literal["archive"] = "archive"
    url: str = Field(min_length=1, max_length=2048, description="http or https. Credentials in it are not kept.")
    format: Literal["tar", "zip"] = Field("tar", description="A tar may be compressed.")
    strip: int = Field(0, ge=0, le=100, description="Leave out so many leading parts of each path.")
    directory: FilePath | None = Field(None, description="Of what is left, take only what is below it.")
    allow_private: bool = Field(False, description="The address may be this host, or in a private network.")
    message: Text = "Import"
    author: Person | None = None


class RepoCreate(Request):
    name: RepoName | None = Field(None, description="Unique. Default: the id.")
    description: str | None = Field(None, max_length=1024)
    visibility: Visibility = Field("private", description="`public`: anyone who reaches the daemon may clone it.")
    default_branch: Ref = "main"
    quota_mib: int | None = Field(None, ge=1, le=2**20, description="Most it may occupy. Default: the daemon's.")
    source: Annotated[FilesSource | GitSource | ArchiveSource, Field(discriminator="type")] | None = Field(
        None,
        description="What is in it from the start. Default: nothing. (An archive of yours: `POST /git/repos/archive`.)",
    )


class RepoUpdate(Request):
    """Absent fields stay as they are."""

    name: RepoName | None = None
    description: str | None = Field(None, max_length=1024)
    visibility: Visibility | None = None
    default_branch: Ref | None = None
    quota_mib: int | None = Field(None, ge=1, le=2**20)


class RepoInfo(Answer):
    id: str
    name: str
    description: str | None = None
    visibility: Visibility
    default_branch: str
    clone_url: str = Field(description="For `git clone`; a private one asks for a token as the password.")
    size_bytes: int = Field(description="As of the last push, commit, upload or clean-up.")
    quota_bytes: int
    created_at: datetime
    updated_at: datetime
    pushed_at: datetime | None = None


class RepoTokenCreate(Request):
    permission: Permission = "write"
    expires_in_s: float | None = Field(86400.0, gt=0, le=86400 * 3650, description="Null: never.")


class RepoToken(Answer):
    """A token for this repository alone."""

    token: str = Field(description="Shown this once; only its hash is kept.")
    token_id: str
    identity_id: str
    permission: Permission
    clone_url: str = Field(description="With the token in it: git can use it at once.")
    expires_at: datetime | None = None


# ── refs ─────────────────────────────────────────────────────────────────────────────────────────────────────────


class BranchInfo(Answer):
    name: str
    sha: str
    default: bool = False


class BranchCreate(Request):
    name: Ref
    rev: Revision | None = Field(None, description="Where it begins. Default: the default branch.")


class BranchUpdate(Request):
    rev: Revision = Field(description="Where it shall point.")
    expected_sha: Sha | None = Field(None, description="Only if it points here now.")
    force: bool = Field(False, description="Also if commits are lost by it.")


class PersonInfo(Answer):
    name: str
    email: str
    date: datetime


class TagInfo(Answer):
    name: str
    sha: str = Field(description="What the ref points to: the tag object, or the commit of a lightweight tag.")
    target: str = Field(description="The object that is tagged.")
    message: str | None = None
    tagger: PersonInfo | None = None


class TagCreate(Request):
    name: Ref
    rev: Revision | None = Field(None, description="Default: the default branch.")
    message: Text | None = Field(None, description="Makes it an annotated tag.")
    tagger: Person | None = None


# ── commits ──────────────────────────────────────────────────────────────────────────────────────────────────────


class CommitCreate(Request):
    """All changes or none, in one commit."""

    message: Text
    files: list[FileChange] = Field(default_factory=list, max_length=100_000)
    branch: Ref | None = Field(None, description="Default: the default branch. One that is missing is made.")
    start: Revision | None = Field(None, description="Where a new branch begins. Default: nowhere, it has no history.")
    expected_sha: Sha | None = Field(
        None, description="Only if the branch points here; 40 zeros: only if there is no such branch."
    )
    author: Person | None = None
    committer: Person | None = Field(None, description="Default: the author.")
    allow_empty: bool = Field(False, description="Also if nothing changes.")


class CommitInfo(Answer):
    sha: str
    tree: str
    parents: list[str]
    author: PersonInfo
    committer: PersonInfo
    message: str


class Merge(Request):
    into: Ref | None = Field(None, description="A branch. Default: the default branch.")
    source: Revision = Field(description="What is merged: a branch, tag or commit.")
    message: Text | None = None
    expected_sha: Sha | None = None
    fast_forward: Literal["auto", "never", "only"] = "auto"
    squash: bool = Field(False, description="One commit with the changes and one parent.")
    author: Person | None = None


class CherryPick(Request):
    branch: Ref | None = Field(None, description="Onto which. Default: the default branch.")
    commits: list[Revision] = Field(min_length=1, max_length=100)
    expected_sha: Sha | None = None
    committer: Person | None = None


class MergeResult(Answer):
    """Conflicts are an error (`merge_conflict`), whose details name the paths; nothing has changed then."""

    branch: str
    sha: str = Field(description="Where the branch is now.")
    previous_sha: str
    fast_forward: bool = False
    commits: list[str] = Field(default_factory=list, description="Made by this, oldest first.")


# ── contents ─────────────────────────────────────────────────────────────────────────────────────────────────────


class TreeEntry(Answer):
    name: str
    path: str
    type: EntryType
    mode: str
    sha: str
    size: int | None = Field(None, description="Of files and symlinks.")


class ContentInfo(TreeEntry):
    """A file with its bytes, or a directory with its entries."""

    content: str | None = Field(None, description="Base64; absent of files over 16 MiB: download those.")
    entries: list[TreeEntry] | None = None
    commit: str = Field(description="The commit that was looked at.")


class TreeInfo(Answer):
    sha: str
    entries: list[TreeEntry]
    truncated: bool = False


class BlobInfo(Answer):
    sha: str
    size: int
    content: str = Field(description="Base64.")
    encoding: Literal["base64"] = "base64"


class FileDiff(Answer):
    path: str
    previous_path: str | None = Field(None, description="Of a rename or copy.")
    status: Literal["added", "deleted", "modified", "renamed", "copied", "type_changed"]
    additions: int = 0
    deletions: int = 0
    binary: bool = False
    old_sha: str | None = None
    new_sha: str | None = None
    old_mode: str | None = None
    new_mode: str | None = None
    patch: str | None = Field(None, description="Absent of binary files, and where it would be too long.")


class Comparison(Answer):
    """From the merge base of the two to `head`, as a pull request shows it."""

    base: str
    head: str
    merge_base: str | None
    status: Literal["identical", "ahead", "behind", "diverged"]
    ahead_by: int
    behind_by: int
    commits: list[CommitInfo] = Field(description="Of `head` and not of `base`, newest first, at most 250.")
    files: list[FileDiff]
    additions: int
    deletions: int
    truncated: bool = Field(False, description="Some commits, files or patches were left out.")


# ── search ───────────────────────────────────────────────────────────────────────────────────────────────────────


class Match(Answer):
    line_number: int
    line: str
    start_column: int = Field(description="In characters, from 1.")
    end_column: int = Field(description="After the last character that matches.")
    before: list[str] = Field(default_factory=list)
    after: list[str] = Field(default_factory=list)


class FileMatches(Answer):
    path: str
    sha: str
    size: int
    matches: list[Match]


class ContentMatches(Answer):
    commit: str
    files: list[FileMatches]
    total_files: int = 0
    total_matches: int
    truncated: bool = False


class PathMatches(Answer):
    commit: str
    files: list[TreeEntry]
    truncated: bool = False


class DiffLine(Answer):
    path: str
    kind: Literal["added", "removed"]
    line_number: int
    line: str
    start_column: int = Field(1, description="Of the first match, in characters, from 1.")
    end_column: int = Field(1, description="After the last character that matches.")


class CommitMatches(Answer):
    commits: list[CommitInfo]
    truncated: bool = False


class CommitDiffMatches(Answer):
    commit: CommitInfo
    lines: list[DiffLine]


class DiffMatches(Answer):
    commits: list[CommitDiffMatches]
    truncated: bool = False
