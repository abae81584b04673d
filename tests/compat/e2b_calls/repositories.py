"""Git in a sandbox."""

from __future__ import annotations

from registry import Yard, call


@call("git.init, status", "2.20")
def _(y: Yard) -> None:
    y.sbx.git.init(y.path("repo"), initial_branch="main")
    assert y.sbx.git.status(y.path("repo")).is_clean


@call("git.configure_user, set_config, get_config", "2.20")
def _(y: Yard) -> None:
    y.sbx.git.configure_user("Ada", "ada@example.com")
    y.sbx.git.set_config("pull.rebase", "false", scope="local", path=y.path("repo"))
    assert y.sbx.git.get_config("user.name") == "Ada"
    assert y.sbx.git.get_config("pull.rebase", scope="local", path=y.path("repo")) == "false"


@call("git.add, commit", "2.20")
def _(y: Yard) -> None:
    y.sbx.files.write(y.path("repo/a.txt"), "one\n")
    found = y.sbx.git.status(y.path("repo"))
    assert [one.name for one in found.file_status] == ["a.txt"]
    y.sbx.git.add(y.path("repo"))
    assert y.sbx.git.status(y.path("repo")).has_staged
    y.sbx.git.commit(y.path("repo"), "The first", author_name="Eve", author_email="eve@example.com")
    assert y.sbx.git.status(y.path("repo")).is_clean


@call("git.create_branch, checkout_branch, branches, delete_branch", "2.20")
def _(y: Yard) -> None:
    y.sbx.git.create_branch(y.path("repo"), "aside")
    y.sbx.git.checkout_branch(y.path("repo"), "main")
    found = y.sbx.git.branches(y.path("repo"))
    assert (sorted(found.branches), found.current_branch) == (["aside", "main"], "main")
    y.sbx.git.delete_branch(y.path("repo"), "aside")
    assert y.sbx.git.branches(y.path("repo")).branches == ["main"]


@call("git.restore, reset", "2.20")
def _(y: Yard) -> None:
    y.sbx.files.write(y.path("repo/a.txt"), "changed\n")
    y.sbx.git.restore(y.path("repo"), ["a.txt"])
    assert y.sbx.files.read(y.path("repo/a.txt")) == "one\n"
    y.sbx.files.write(y.path("repo/a.txt"), "changed\n")
    y.sbx.git.add(y.path("repo"))
    y.sbx.git.reset(y.path("repo"), mode="hard")
    assert y.sbx.git.status(y.path("repo")).is_clean


@call("git.remote_add, remote_get, push", "2.20")
def _(y: Yard) -> None:
    y.sbx.git.init(y.path("bare.git"), bare=True, initial_branch="main")
    y.sbx.git.remote_add(y.path("repo"), "origin", y.path("bare.git"))
    assert y.sbx.git.remote_get(y.path("repo"), "origin") == y.path("bare.git")
    assert y.sbx.git.remote_get(y.path("repo"), "nobody") is None
    y.sbx.git.push(y.path("repo"), remote="origin", branch="main")
    assert y.sbx.git.status(y.path("repo")).upstream == "origin/main"


@call("git.clone, pull", "2.20")
def _(y: Yard) -> None:
    y.sbx.git.clone(y.path("bare.git"), y.path("clone"))
    assert y.sbx.files.read(y.path("clone/a.txt")) == "one\n"
    y.sbx.files.write(y.path("repo/two.txt"), "two\n")
    y.sbx.git.add(y.path("repo"))
    y.sbx.git.commit(y.path("repo"), "The second")
    y.sbx.git.push(y.path("repo"))
    y.sbx.git.pull(y.path("clone"))
    assert y.sbx.files.read(y.path("clone/two.txt")) == "two\n"


@call("git.dangerously_authenticate", "2.20")
def _(y: Yard) -> None:
    y.sbx.git.dangerously_authenticate("ada", "token", host="git.example.com")
    asked = y.sbx.commands.run("printf 'protocol=https\\nhost=git.example.com\\n\\n' | git credential fill")
    assert "password=token\n" in asked.stdout
