"""`git create | ls | show | url | set | rm | log | cat | commit | compare | merge | search`, and what `cli.git_refs` and
`cli.git_triggers` add."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Literal

import click

from forkyard.cli import git_refs, git_triggers, show
from forkyard.cli.app import App, Verb, pass_app, seconds

#: How long the token in the URL of a new repository is good.
CLONE_URL_S = 30 * 86400.0


@click.group("git")
def git_command() -> None:
    """Repositories that this daemon hosts. Where a command wants a REPO, its name or id will do."""


for _more in (
    *(git_refs.branch, git_refs.tag, git_refs.cherry_pick, git_refs.archive),
    *(git_triggers.triggers, git_triggers.remotes, git_triggers.sync),
):
    git_command.add_command(_more)


@git_command.command("create", cls=Verb)
@click.argument("name", required=False)
@click.option("--public", is_flag=True, help="Anyone who reaches the daemon may clone it.")
@click.option("--branch", "default_branch", default="main", show_default=True, help="The default branch.")
@click.option("--description")
@click.option("--quota", "quota_mib", type=click.IntRange(1), metavar="MIB", help="Most it may occupy.")
@click.option("--from", "url", metavar="URL", help="Begin with what is in this repository (http, https, git, ssh).")
@click.option("--rev", help="With --from: this branch; with --no-history, any revision.")
@click.option("--no-history", is_flag=True, help="With --from: only the files, as one new commit.")
@click.option("--allow-private", is_flag=True, help="With --from: it may be on this host or in a private network.")
@click.option("--archive", type=click.File("rb"), help="Begin with what is in this tar or zip file.")
@click.option("--strip", type=click.IntRange(0), default=0, help="With --archive: drop so many leading directories.")
@pass_app
def create(
    app: App,
    name: str | None,
    public: bool,
    default_branch: str,
    description: str | None,
    quota_mib: int | None,
    url: str | None,
    rev: str | None,
    no_history: bool,
    allow_private: bool,
    archive: IO[bytes] | None,
    strip: int,
) -> None:
    """Make a repository and print a URL that git can clone from and push to at once.

    The URL holds a token for this repository alone, good for 30 days; `git url` makes another.
    """
    visibility: Literal["public", "private"] = "public" if public else "private"
    with app.client() as client:
        if archive is not None:
            made = client.git.create_from_archive(
                _pieces(archive),
                name,
                format="zip" if archive.peek(2)[:2] == b"PK" else "tar",  # type: ignore[attr-defined]
                visibility=visibility,
                default_branch=default_branch,
                quota_mib=quota_mib,
                strip=strip,
            )
        else:
            made = client.git.create(
                name,
                description=description,
                visibility=visibility,
                default_branch=default_branch,
                quota_mib=quota_mib,
                url=url,
                rev=rev,
                history=not no_history,
                allow_private=allow_private,
            )
        token = made.token(expires_in_s=CLONE_URL_S)
    if app.json:
        app.print_json({**made.info.model_dump(mode="json"), "clone_url": token.clone_url})
    else:
        click.echo(token.clone_url)


@git_command.command("ls", cls=Verb)
@click.option("--search", help="Only those with this in their name.")
@pass_app
def ls(app: App, search: str | None) -> None:
    """List repositories, newest first."""
    with app.client() as client:
        found = [repo.info for repo in client.git.list(search=search)]
    if app.json:
        app.print_json(found)
        return
    show.table(
        ("name", "id", "visibility", "branch", "size", "pushed"),
        (
            (
                info.name,
                info.id,
                info.visibility,
                info.default_branch,
                f"{info.size_bytes / 2**20:.1f} MiB",
                f"{show.age(info.pushed_at)} ago" if info.pushed_at else "never",
            )
            for info in found
        ),
    )


@git_command.command("show", cls=Verb)
@click.argument("repo")
@pass_app
def show_command(app: App, repo: str) -> None:
    """A repository, its branches and tags."""
    with app.client() as client:
        found = client.git.repo(repo)
        branches, tags = found.branches(), found.tags()
    if app.json:
        app.print_json({**found.info.model_dump(mode="json"), "branches": branches, "tags": tags})
        return
    for key in ("name", "id", "visibility", "description", "clone_url"):
        click.echo(f"{key:12} {getattr(found.info, key) or ''}")
    click.echo(f"{'size':12} {found.info.size_bytes / 2**20:.1f} of {found.info.quota_bytes / 2**20:.0f} MiB")
    for branch in branches:
        click.echo(f"{'branch':12} {branch.sha[:12]} {branch.name}{' (default)' if branch.default else ''}")
    for tag in tags:
        click.echo(f"{'tag':12} {tag.target[:12]} {tag.name}")


@git_command.command("url", cls=Verb)
@click.argument("repo")
@click.option("--read", is_flag=True, help="For reading alone.")
@click.option("--expires", type=seconds, default="30d", show_default=True, help="Such as 90s, 5m, 2h, 1d, or never.")
@pass_app
def url_command(app: App, repo: str, read: bool, expires: float) -> None:
    """Print a URL that git can use, with a new token for this repository alone."""
    with app.client() as client:
        made = client.git.repo(repo).token(
            "read" if read else "write", expires_in_s=None if expires == float("inf") else expires
        )
    app.print_json(made) if app.json else click.echo(made.clone_url)


@git_command.command("set", cls=Verb)
@click.argument("repo")
@click.option("--name", help="A new name. The id stays.")
@click.option("--description")
@click.option("--public/--private", default=None)
@click.option("--branch", "default_branch", help="The default branch.")
@click.option("--quota", "quota_mib", type=click.IntRange(1), metavar="MIB")
@pass_app
def set_(
    app: App,
    repo: str,
    name: str | None,
    description: str | None,
    public: bool | None,
    default_branch: str | None,
    quota_mib: int | None,
) -> None:
    """Rename a repository, or change its settings."""
    with app.client() as client:
        info = client.git.repo(repo).update(
            name=name,
            description=description,
            visibility=None if public is None else "public" if public else "private",
            default_branch=default_branch,
            quota_mib=quota_mib,
        )
    app.print_json(info) if app.json else click.echo(info.name)


@git_command.command("rm", cls=Verb)
@click.argument("repos", nargs=-1, required=True, metavar="REPO...")
@click.option("--force", "-f", is_flag=True, help="Do not mind repositories that are not there.")
@pass_app
@click.pass_context
def rm(ctx: click.Context, app: App, repos: tuple[str, ...], force: bool) -> None:
    """Delete repositories, for ever."""
    from forkyard.errors import ForkyardError, RepoNotFound

    deleted: list[str] = []
    failed = False
    with app.client() as client:
        for typed in repos:
            try:
                client.git.delete(typed)
            except ForkyardError as error:
                if not (force and isinstance(error, RepoNotFound)):
                    app.fail(error)
                    failed = True
            else:
                deleted.append(typed)
                if not app.json:
                    click.echo(typed)
    if app.json:
        app.print_json({"deleted": deleted})
    if failed:
        ctx.exit(1)


@git_command.command("log", cls=Verb)
@click.argument("repo")
@click.argument("rev", required=False)
@click.option("--path", help="Only what changed this file or directory.")
@click.option("--author", help="Part of a name or address.")
@click.option("-n", "limit", type=click.IntRange(1), default=20, show_default=True)
@pass_app
def log(app: App, repo: str, rev: str | None, path: str | None, author: str | None, limit: int) -> None:
    """List commits, newest first."""
    with app.client() as client:
        found = client.git.repo(repo).commits(rev, path=path, author=author, limit=limit)
    if app.json:
        app.print_json(found)
        return
    show.table(
        ("commit", "age", "author", "message"),
        (
            (one.sha[:12], show.age(one.committer.date), one.author.name, one.message.partition("\n")[0])
            for one in found
        ),
    )


@git_command.command("cat", cls=Verb)
@click.argument("repo")
@click.argument("path", default="")
@click.option("--rev", help="Branch, tag or commit.")
@pass_app
def cat(app: App, repo: str, path: str, rev: str | None) -> None:
    """Print a file, or list a directory."""
    with app.client() as client:
        found = client.git.repo(repo)
        content = found.contents(path, rev)
        data = found.read(path, rev) if content.entries is None and not app.json else b""
    if app.json:
        app.print_json(content)
    elif content.entries is None:
        sys.stdout.buffer.write(data)
    else:
        for entry in content.entries:
            click.echo(f"{entry.mode} {entry.sha[:12]} {entry.path}{'/' if entry.type == 'directory' else ''}")


@git_command.command("commit", cls=Verb)
@click.argument("repo")
@click.argument("files", nargs=-1, metavar="PATH[=FILE]...")
@click.option("--message", "-m", required=True)
@click.option("--branch", help="Default: the default branch.")
@click.option("--delete", "deleted", multiple=True, metavar="PATH", help="Remove this. Repeatable.")
@click.option("--expected", "expected_sha", metavar="SHA", help="Only if the branch is there.")
@pass_app
def commit(
    app: App,
    repo: str,
    files: tuple[str, ...],
    message: str,
    branch: str | None,
    deleted: tuple[str, ...],
    expected_sha: str | None,
) -> None:
    """Commit files of this machine, without a clone. PATH is where in the repository; FILE, if not the same, here."""
    changes: dict[str, str | bytes | None] = dict.fromkeys(deleted)
    for typed in files:
        path, _, here = typed.partition("=")
        try:
            changes[path] = sys.stdin.buffer.read() if here == "-" else Path(here or path).read_bytes()
        except OSError as error:
            raise click.BadParameter(f"{here or path}: {error.strerror}") from None
    with app.client() as client:
        made = client.git.repo(repo).commit(message, changes, branch=branch, expected_sha=expected_sha)
    app.print_json(made) if app.json else click.echo(made.sha)


@git_command.command("compare", cls=Verb)
@click.argument("repo")
@click.argument("base")
@click.argument("head")
@pass_app
def compare(app: App, repo: str, base: str, head: str) -> None:
    """What HEAD changed since it parted from BASE."""
    with app.client() as client:
        found = client.git.repo(repo).compare(base, head)
    if app.json:
        app.print_json(found)
        return
    click.echo(f"{found.status}: {found.ahead_by} ahead, {found.behind_by} behind")
    for file in found.files:
        was = f" (was {file.previous_path})" if file.previous_path else ""
        click.echo(f"\n{file.status} {file.path}{was} +{file.additions} -{file.deletions}")
        if file.patch:
            click.echo(file.patch.rstrip("\n"))


@git_command.command("merge", cls=Verb)
@click.argument("repo")
@click.argument("source")
@click.option("--into", help="Default: the default branch.")
@click.option("--message", "-m")
@click.option("--squash", is_flag=True)
@pass_app
def merge(app: App, repo: str, source: str, into: str | None, message: str | None, squash: bool) -> None:
    """Merge a branch, tag or commit into a branch. Conflicts are named, and nothing changes then."""
    with app.client() as client:
        made = client.git.repo(repo).merge(source, into=into, message=message, squash=squash)
    app.print_json(made) if app.json else click.echo(made.sha)


@git_command.command("search", cls=Verb)
@click.argument("repo")
@click.argument("query")
@click.option("--rev")
@click.option("--regex", "-E", is_flag=True)
@click.option("--ignore-case", "-i", is_flag=True)
@click.option("--word", "-w", is_flag=True)
@click.option("--include", multiple=True, metavar="GLOB", help="Repeatable.")
@pass_app
def search(
    app: App,
    repo: str,
    query: str,
    rev: str | None,
    regex: bool,
    ignore_case: bool,
    word: bool,
    include: tuple[str, ...],
) -> None:
    """Search in the files of a repository."""
    with app.client() as client:
        found = client.git.repo(repo).search(
            query, rev=rev, regex=regex, case_sensitive=not ignore_case, whole_word=word, include=include
        )
    if app.json:
        app.print_json(found)
        return
    for file in found.files:
        for match in file.matches:
            click.echo(f"{file.path}:{match.line_number}:{match.line}")


def _pieces(file: IO[bytes]) -> Iterator[bytes]:
    while piece := file.read(2**20):
        yield piece
