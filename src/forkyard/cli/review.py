"""`review`: run a change in a copy of a sandbox, have it reviewed, keep or post the verdict."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from typing import IO, TYPE_CHECKING, Any

import click

from forkyard.cli.app import App, Verb, find_sandbox, pass_app, seconds

if TYPE_CHECKING:
    from forkyard.models.reviews import Dossier, ReviewVerdict

_PULL = re.compile(r"(?P<owner>[A-Za-z0-9_.-]+)/(?P<repo>[A-Za-z0-9_.-]+)#(?P<number>[0-9]+)")


def steps(_ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> list[dict[str, str]]:
    found = []
    for value in values:
        name, equals, command = value.partition("=")
        if not name or not equals or not command:
            raise click.BadParameter(f"{value!r} is not of the form NAME=COMMAND.", param=param)
        found.append({"name": name, "command": command})
    return found


@click.command("review", cls=Verb)
@click.argument("target")
@click.argument("head", required=False)
@click.option("--base", help="What the head is to be merged into. Default: the default branch.")
@click.option("--step", "steps", multiple=True, callback=steps, metavar="NAME=COMMAND", help="To run. May be repeated.")
@click.option("--plan", type=click.File("r"), help="A JSON file with a plan: steps, reviewer, sandbox …")
@click.option("--sandbox", metavar="ID", help="Fork this sandbox: warm, dependencies and all.")
@click.option("--snapshot", help="Or begin with this snapshot. Neither: with a new sandbox.")
@click.option("--directory", help="Where to check out. Default: /root/review.")
@click.option("--reviewer", metavar="COMMAND", help="A program of this machine: JSON on stdin, a verdict on stdout.")
@click.option("--reviewer-inside", metavar="COMMAND", help="The same in a copy of the sandbox.")
@click.option("--reviewer-url", metavar="URL", help="An endpoint that is POSTed the JSON and answers with a verdict.")
@click.option("--secret", default="GITHUB_TOKEN", show_default=True, help="Stored secret with GitHub's token.")
@click.option("--clone-url", metavar="URL", help="Where the sandbox fetches from. Default: what GitHub says.")
@click.option("--key", default="", help="Another one has the same head reviewed again.")
@click.option("--timeout", "timeout_s", type=seconds, default="30m", show_default=True)
@pass_app
def review_command(
    app: App,
    target: str,
    head: str | None,
    base: str | None,
    steps: list[dict[str, str]],
    plan: IO[str] | None,
    sandbox: str | None,
    snapshot: str | None,
    directory: str | None,
    reviewer: str | None,
    reviewer_inside: str | None,
    reviewer_url: str | None,
    secret: str,
    clone_url: str | None,
    key: str,
    timeout_s: float,
) -> None:
    """Review a branch (REPO HEAD) of a hosted repository, or a pull request on GitHub (OWNER/REPO#NUMBER).

    A copy of a sandbox checks the head out and runs the steps. Results and diff go to the reviewer; its verdict is kept,
    or posted on GitHub. Without a reviewer the steps are the verdict. Ends with 0 if that is not REQUEST_CHANGES.
    """
    wanted: dict[str, Any] = _loaded(plan)
    wanted["steps"] = [*wanted.get("steps", []), *steps]
    if sum(one is not None for one in (reviewer, reviewer_inside, reviewer_url)) > 1:
        raise click.UsageError("Give one reviewer.")
    if reviewer_inside is not None:
        wanted["reviewer"] = {"type": "command", "command": reviewer_inside}
    if reviewer_url is not None:
        wanted["reviewer"] = {"type": "http", "url": reviewer_url}
    given = {"snapshot": snapshot, "directory": directory}
    wanted |= {name: value for name, value in given.items() if value is not None}
    pull = _PULL.fullmatch(target)
    if pull is None and head is None:
        raise click.UsageError("Give REPO and HEAD, or OWNER/REPO#NUMBER.")
    with app.client() as client:
        if sandbox is not None:
            wanted["sandbox"] = find_sandbox(client, sandbox).id
        options: dict[str, Any] = {"plan": wanted, "key": key, "timeout_s": timeout_s}
        if reviewer is not None:
            options["reviewer"] = _program(reviewer)
        if pull is not None:
            owner, repo, number = pull["owner"], pull["repo"], int(pull["number"])
            found = client.reviews.pull_request(owner, repo, number, secret=secret, clone_url=clone_url, **options)
        else:
            assert head is not None
            found = client.reviews.branch(target, head, base, **options)
    if app.json:
        app.print_json(found)
    else:
        for step in found.steps:
            click.echo(f"{'passed' if step.passed else 'FAILED'}  {step.name}  {step.duration_s:.1f} s")
        if found.verdict is not None:
            click.echo(f"\n{found.verdict.event}\n\n{found.verdict.body}".rstrip())
            for comment in found.verdict.comments:
                click.echo(f"\n{comment.path}:{comment.line}: {comment.body}")
        if found.posted and found.posted.get("url"):
            click.echo(f"\n{found.posted['url']}")
        if found.error:
            click.echo(f"The review failed: {found.error}", err=True)
    if found.state == "failed" or (found.verdict is not None and found.verdict.event == "REQUEST_CHANGES"):
        raise SystemExit(1)


def _loaded(plan: IO[str] | None) -> dict[str, Any]:
    if plan is None:
        return {}
    try:
        found = json.load(plan)
    except ValueError as error:
        raise click.UsageError(f"{plan.name} is not JSON: {error}.") from None
    if not isinstance(found, dict):
        raise click.UsageError(f"{plan.name} has no JSON object in it.")
    return found


def _program(command: str) -> Any:
    def ask(dossier: Dossier) -> ReviewVerdict:
        from pydantic import ValidationError

        from forkyard.models.reviews import ReviewVerdict

        done = subprocess.run(shlex.split(command), input=dossier.model_dump_json().encode(), stdout=subprocess.PIPE)
        if done.returncode != 0:
            raise click.ClickException(f"The reviewer ended with exit code {done.returncode}; its review waits.")
        try:
            return ReviewVerdict.model_validate_json(done.stdout)
        except ValidationError as error:
            raise click.ClickException(f"The reviewer's answer is no verdict: {error.errors()[0]['msg']}.") from None

    return ask
