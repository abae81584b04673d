"""Dockerfiles: what they say is understood, and what is wrong with one is named with its line."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any

import pytest

from forkyard.builds.dockerfile.instructions import CopyStep, DirectoryMount, SecretMount
from forkyard.builds.dockerfile.parser import parse
from forkyard.builds.dockerfile.stages import Dockerfile, Stage
from forkyard.builds.dockerfile.words import expand, split
from forkyard.errors import InvalidDockerfile
from forkyard.models.bases import DockerfileSource, ImageConfig

CONTEXT = "sha256:" + "0" * 64
IMAGES = {
    "debian": ImageConfig(env={"PATH": "/usr/bin"}),
    "node:22": ImageConfig(env={"PATH": "/node/bin"}, user="node", workdir="/app"),
}


def stages(text: str, **options: Any) -> list[Stage]:
    async def config_of(name: str) -> ImageConfig:
        return IMAGES[name]

    source = DockerfileSource(text=text, **{"context": CONTEXT, **options})
    return asyncio.run(Dockerfile.read(source).stages(config_of))


def steps(text: str, **options: Any) -> list[Any]:
    """Values of the steps of the last stage, without the ends of layers."""
    return [getattr(step, step.kind) for _, step in stages(text, **options)[-1].steps if step.layer is None]


# ── syntax ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_lines_are_joined_and_comments_do_not_count() -> None:
    found = parse("# a comment\nFROM debian\n\nRUN one && \\\n  # in between\n\n  two \\\n  three\nCMD x\n")
    assert [(one.line, one.name) for one in found] == [(2, "FROM"), (4, "RUN"), (9, "CMD")]
    assert found[1].rest.split() == ["one", "&&", "two", "three"]


def test_the_escape_character_can_be_another() -> None:
    found = parse("# escape=`\nFROM debian\nRUN dir C:\\ `\n  more\n")
    assert found[1].rest.split() == ["dir", "C:\\", "more"]


def test_heredocs_belong_to_their_instruction() -> None:
    found = parse('FROM debian\nRUN <<EOF\na\n# no comment\nEOF\nCOPY <<-"X" <<Y /to/\n\tx\n\tX\ny\nY\nUSER u\n')
    assert [one.name for one in found] == ["FROM", "RUN", "COPY", "USER"]
    assert found[1].heredocs[0].content == "a\n# no comment\n"
    first, second = found[2].heredocs
    assert (first.content, first.expands, second.content, second.expands) == ("x\n", False, "y\n", True)
    assert found[3].line == 11


def test_text_that_only_looks_like_a_heredoc_is_none() -> None:
    found = parse('FROM debian\nRUN echo "a <<EOF" && cat <<<word && echo $((1<<EOF))\nRUN two\n')
    assert not found[1].heredocs
    assert found[2].rest == "two"


@pytest.mark.parametrize(
    ("text", "line", "why"),
    [
        ("FROM debian\nRUN true\nFLY away\n", 3, "unknown instruction 'FLY'"),
        ("FROM debian\nONBUILD RUN x\n", 2, "unknown instruction"),
        ("RUN x\n", 1, "before the first FROM"),
        ("", 1, "no instruction"),
        ("ARG A=1\n", 1, "no FROM"),
        ("FROM debian\nRUN <<EOF\nnever ends\n", 2, "not closed"),
        ("FROM\n", 1, "needs something"),
        ("FROM a b\n", 1, "FROM image AS name"),
        ("FROM debian\nCOPY x\n", 2, "a source and a destination"),
        ("FROM debian\nCOPY a b c\n", 2, "ends with `/`"),
        ("FROM debian\nCOPY --chmod=rwx a b\n", 2, "octal"),
        ("FROM debian\nCOPY --frm=a a b\n", 2, "--frm"),
        ("FROM debian\nRUN --mount=type=ssh y\n", 2, "not supported; clone"),
        ("FROM debian\nRUN --mount=target=/x y\n", 2, "not supported; COPY what it needs"),
        ("FROM debian\nRUN --mount=type=cache y\n", 2, "needs a target"),
        ("FROM debian\nRUN --mount=type=cache,target=/x,from=a y\n", 2, "no 'from'"),
        ("FROM debian\nRUN --mount=type=tmpfs,target=/x,mode=0700 y\n", 2, "no 'mode'"),
        ("FROM debian\nRUN --network=none y\n", 2, "by its `network`"),
        ("FROM debian\nRUN --security=insecure y\n", 2, "root in a machine of its own"),
        ("FROM debian\nRUN --mount=type=secret,id=npm-token y\n", 2, "no name of a stored secret"),
        ("FROM debian\nRUN --mount=type=secret,id=A,mode=rw y\n", 2, "an octal one"),
        ("FROM debian\nRUN --mount=type=secret,id=A,sharing=x y\n", 2, "no 'sharing'"),
        ("FROM debian\nENV A\n", 2, "no value"),
        ("FROM debian\nENV 1A=x\n", 2, "name of a variable"),
        ("FROM debian\nENV A=${B\n", 2, "not closed"),
        ("FROM debian\nENV A='b\n", 2, "not closed"),
        ("FROM debian\nENV A=${B:?must be given}\n", 2, "must be given"),
        ("FROM debian\nSHELL bash\n", 2, "as a list"),
        ("FROM debian\nEXPOSE http\n", 2, "expose"),
        ("FROM debian\nUSER a b\n", 2, "user"),
        ("FROM $NOTHING\n", 1, "comes to nothing"),
        ("FROM debian\n\nCOPY --from=3 a b\n", 3, "no such stage"),
        ("FROM --platform=linux/arm64 debian\n", 1, "this host runs linux/amd64"),
        ("ARG P=linux/arm/v7\nFROM --platform=$P debian\n", 2, "this host runs linux/amd64"),
        ("FROM debian\nADD https://example.com/a/repo.git#main /src\n", 2, "is a repository; clone it"),
        ("FROM debian\nADD git@example.com:a/repo /src\n", 2, "is a repository; clone it"),
    ],
)
def test_a_mistake_is_named_with_its_line(text: str, line: int, why: str) -> None:
    with pytest.raises(InvalidDockerfile, match=why) as wrong:
        stages(text or "\n")
    assert wrong.value.details["line"] == line
    assert f"line {line}:" in wrong.value.message


@pytest.mark.parametrize("platform", ["linux/amd64", "$BUILDPLATFORM", "$TARGETPLATFORM", "${NONE:-amd64}"])
def test_the_platform_of_this_host_may_be_named(platform: str) -> None:
    assert stages(f"FROM --platform={platform} debian\n")[0].base == "debian"


# ── what is written to do harm ───────────────────────────────────────────────────────────────────────────────────────

TENFOLD = "$A" * 10


@pytest.mark.parametrize(
    ("text", "line", "why"),
    [
        ("ARG A=xxxxxxxxxx\n" + f"ARG A={TENFOLD}\n" * 7 + "FROM debian\n", 5, "more than 65536 characters"),
        ("FROM debian\nARG A=xxxxxxxxxx\n" + f"ARG A={TENFOLD}\n" * 7, 6, "more than 65536 characters"),
        (
            "FROM debian\nARG A=xxxxxxxxxx\n"
            + f"ARG A={TENFOLD}\n" * 3
            + "LABEL "
            + " ".join(f"a{number}={TENFOLD[:8]}" for number in range(1000)),
            6,
            "more than 16777216 characters",
        ),
        (
            "FROM debian\nARG A=xxxxxxxxxx\n" + f"ARG A={TENFOLD}\n" * 3 + f"ARG B={TENFOLD[:8]}\n" + "RUN x\n" * 450,
            None,
            "more than 16777216 characters",
        ),
        ("FROM debian\nENV A=" + "${B:-" * 2000 + "x" + "}" * 2000, 2, "more than 16 others"),
        ("FROM debian\nRUN " + "--mount=type=cache " * 2000 + "true\n", 2, "more than 100 flags"),
        ("FROM debian\n" + "ENV " + " ".join(f"A{number}=b" for number in range(2000)), 2, "more than 1000 variables"),
        ("FROM debian\n" + "ARG " + " ".join(f"A{number}=b" for number in range(2000)), 2, "more than 1000 variables"),
        ("FROM debian\nCOPY " + "a " * 2000 + "/to/\n", 2, "more than 1000 sources"),
        ("FROM debian\n" + ("ADD " + "http://a " * 400 + "/to/\n") * 3, 4, "more than 1000 steps"),
    ],
)
def test_what_a_dockerfile_may_come_to_is_bounded_and_told_at_once(text: str, line: int | None, why: str) -> None:
    began = time.process_time()
    with pytest.raises(InvalidDockerfile, match=why) as wrong:
        Dockerfile.read(DockerfileSource(text=text, context=CONTEXT))
    assert line is None or wrong.value.details["line"] == line
    assert time.process_time() - began < 2


@pytest.mark.parametrize(
    "text",
    [
        "# a=" + " " * 400_000 + "x y\nFROM debian\n",
        "FROM debian\nCMD " + "[" * 400_000 + "\n",
        "FROM debian\n" + ("EXPOSE " + " ".join(map(str, range(10000, 11000))) + "\n") * 80,
        "FROM debian\nRUN " + "a " * 200_000 + "\n",
    ],
    ids=["blanks", "brackets", "ports", "words"],
)
def test_a_large_dockerfile_is_read_in_no_time(text: str) -> None:
    began = time.process_time()
    with contextlib.suppress(InvalidDockerfile):
        stages(text)
    assert time.process_time() - began < 4


# ── words ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_words_end_at_blanks_outside_of_quotes() -> None:
    assert split("a 'b c' \"d e\"f g\\ h") == ["a", "'b c'", '"d e"f', "g\\ h"]


@pytest.mark.parametrize(
    ("word", "outcome"),
    [
        ("$A", "1"),
        ("${A}b", "1b"),
        ("$NONE", ""),
        ("${NONE:-x}", "x"),
        ("${EMPTY:-x}", "x"),
        ("${EMPTY-x}", ""),
        ("${A:+y}", "y"),
        ("${NONE:+y}", ""),
        ("${NONE:-${A}2}", "12"),
        ("'$A'", "$A"),
        ('"$A b"', "1 b"),
        ("\\$A", "$A"),
        ("a\\ b", "a b"),
        ('"a\\nb"', "a\\nb"),
        ("5$", "5$"),
    ],
)
def test_variables_are_put_in(word: str, outcome: str) -> None:
    assert expand(word, {"A": "1", "EMPTY": ""}) == outcome


def test_quotes_are_text_where_there_are_none() -> None:
    text = "{'a': \"it's $A\", \\\"b\\\": ${NONE:-'$A'}, \\$A}"
    assert expand(text, {"A": "1"}, quotes=False) == "{'a': \"it's 1\", \"b\": '1', $A}"


# ── meaning ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_run_has_a_shell_an_exec_and_a_heredoc_form() -> None:
    shell, program, script, mixed, other = steps(
        'FROM debian\nRUN echo $A\nRUN ["echo", "$A"]\nRUN <<EOF\necho 1\nEOF\nRUN python3 <<EOF\nprint()\nEOF\n'
        'SHELL ["/bin/bash", "-ec"]\nRUN x\n'
    )
    assert shell.command == ["/bin/sh", "-c", "echo $A"]
    assert program.command == ["echo", "$A"]
    assert script.command == ["/bin/sh", "-c", "echo 1\n"]
    assert mixed.command[2] == "python3 <<EOF\nprint()\nEOF\n"
    assert other.command == ["/bin/bash", "-ec", "x"]


def test_a_heredoc_with_an_interpreter_is_run_by_it() -> None:
    (run,) = steps("FROM debian\nRUN <<EOF\n#!/usr/bin/env python3\nprint(1)\nEOF\n")
    assert "#!/usr/bin/env python3\nprint(1)\n" in run.command[2]
    assert steps("FROM debian\nRUN <<EOF\n#!/bin/x\nEOF\n") == steps("FROM debian\nRUN <<EOF\n#!/bin/x\nEOF\n")


def test_every_run_and_copy_ends_a_layer() -> None:
    (stage,) = stages("FROM debian\nENV A=1\nRUN one\nCOPY a /\nUSER x\n")
    assert [step.kind for _, step in stage.steps] == ["env", "run", "layer", "add", "layer", "config"]
    assert [line for line, _ in stage.steps] == [2, 3, 3, 4, 4, 5]


def test_arguments_are_known_where_they_are_named() -> None:
    text = "ARG TAG=22\nARG WHO=nobody\nFROM node:$TAG\nRUN one\nARG WHO\nARG MORE=x$WHO\nENV SAID=$MORE\nRUN two\n"
    first, env, second = steps(text)
    assert (first.env, env, second.env) == ({}, {"SAID": "xnobody"}, {"WHO": "nobody", "MORE": "xnobody"})
    *_, env, second = steps(text, args={"WHO": "me"})
    assert (env, second.env["WHO"]) == ({"SAID": "xme"}, "me")
    (run,) = steps("FROM debian\nARG TARGETARCH\nRUN x\n")
    assert run.env == {"TARGETARCH": "amd64"}


def test_an_environment_is_stronger_than_an_argument() -> None:
    _, run = steps("FROM debian\nARG A=arg\nENV A=env\nRUN x\n")
    assert run.env == {}


def test_variables_of_the_image_are_known() -> None:
    (stage,) = stages("FROM node:22\nENV PATH=/mine:$PATH A='b c' D=\"e $PATH\"\nENV OLD style here\n")
    assert stage.after.env == {"PATH": "/mine:/node/bin", "A": "b c", "D": "e /node/bin", "OLD": "style here"}


def test_directories_are_relative_to_that_before() -> None:
    (stage,) = stages("FROM node:22\nWORKDIR src\nCOPY a b/\nCOPY a .\nWORKDIR /x/../y\nUSER 1000:1000\n")
    copies = [step.add.to for _, step in stage.steps if step.add is not None]
    assert copies == ["/app/src/b/", "/app/src/./"]
    assert (stage.before.user, stage.after.user, stage.after.workdir) == ("node", "1000:1000", "/y")


def test_what_an_image_says_of_itself() -> None:
    (stage,) = stages(
        'FROM debian\nENTRYPOINT ["/run.sh"]\nCMD serve $PORT\nEXPOSE 80 443/tcp\nLABEL a=b "c d"="e f"\n'
        "VOLUME /data\nSTOPSIGNAL SIGINT\nHEALTHCHECK --interval=5s CMD curl x\nMAINTAINER me\n"
    )
    config = stage.after
    assert (config.entrypoint, config.cmd) == (["/run.sh"], ["/bin/sh", "-c", "serve $PORT"])
    assert (config.expose, config.labels) == (["80", "443/tcp"], {"a": "b", "c d": "e f", "maintainer": "me"})


def test_a_program_of_the_stage_itself_keeps_its_arguments() -> None:
    text = 'FROM debian AS base\nCMD ["old"]\nFROM base\nENTRYPOINT ["/run"]\nFROM base\nCMD ["8080"]\nENTRYPOINT ["/run"]\n'
    programs = [stages(text, target=target)[-1].after.program for target in ("0", "1", "2")]
    assert programs == [["old"], ["/run"], ["/run", "8080"]]


def test_ports_are_named_in_any_case() -> None:
    (stage,) = stages("FROM debian\nEXPOSE 53/UDP 80/Tcp\n")
    assert stage.after.expose == ["53/udp", "80/tcp"]


def test_a_stage_hands_its_arguments_and_its_shell_on() -> None:
    text = 'FROM debian AS a\nARG V=one\nARG W=two\nSHELL ["/bin/bash", "-c"]\nFROM a\nARG W=three\nRUN x\n'
    (run,) = steps(text)
    assert (run.env, run.command) == ({"V": "one", "W": "three"}, ["/bin/bash", "-c", "x"])
    (run,) = steps(text.replace("FROM a\n", "FROM debian\n"))
    assert (run.env, run.command) == ({"W": "three"}, ["/bin/sh", "-c", "x"])


def test_copy_and_add_take_flags_urls_and_heredocs() -> None:
    text = (
        "FROM debian\nCOPY --chown=app:app --chmod=750 a* /to/\nADD https://example.com/x.tgz?k=1 b.tar /to/\n"
        'COPY --chown=5 <<EOF /to/file\nhello $PATH "quoted"\nEOF\n'
    )
    copy, url, archive, files = steps(text)
    (*_, listed) = steps('FROM debian\nARG D=/d\nCOPY ["$D/a b", "it\'s", "${D}/"]\n')
    assert (listed.sources, listed.to) == (["/d/a b", "it's"], "/d/")
    assert (copy.owner, copy.mode, copy.sources, copy.context) == ("app:app", 0o750, ["a*"], CONTEXT)
    assert url.command[-2:] == ["https://example.com/x.tgz?k=1", "/to/x.tgz"]
    assert (archive.sources, archive.extract) == (["b.tar"], True)
    assert files["/to/file"].content == 'hello /usr/bin "quoted"\n'
    assert files["/to/file"].user == "5"
    (files,) = steps('FROM debian\nCOPY <<EOF /f\n{"a": "say \\\\"hi\\\\" $PATH", \'b\': "\\$PATH"}\nEOF\n')
    assert files["/f"].content == '{"a": "say \\"hi\\" /usr/bin", \'b\': "$PATH"}\n'
    with pytest.raises(InvalidDockerfile, match="no context"):
        stages("FROM debian\nCOPY a /\n", context=None)


def test_only_the_stages_that_are_needed_are_built_in_order() -> None:
    text = (
        "FROM debian AS base\nRUN a\nFROM node:22 AS unused\nRUN b\nFROM base AS build\nRUN c\n"
        "FROM scratch\nCOPY --from=build /out /\nCOPY --from=node:22 /x /\nCOPY --from=0 /y /\n"
    )
    found = stages(text)
    assert [(stage.number, stage.base) for stage in found] == [(0, "debian"), (2, 0), (4, "node:22"), (3, "scratch")]
    copies = [step.add for _, step in found[-1].steps if isinstance(step.add, CopyStep)]
    assert [copy.stage for copy in copies] == [2, 4, 0]
    assert [stage.number for stage in stages(text, target="unused")] == [1]
    with pytest.raises(InvalidDockerfile, match="no stage 'x'"):
        stages(text, target="x")


def test_directories_of_a_run_are_there() -> None:
    options = (
        "target=c,type=cache,id=x,sharing=locked",
        "type=cache,dst=$D,uid=1,gid=2,mode=0700",
        "type=tmpfs,target=/t",
    )
    mounts = " ".join(f"--mount={option}" for option in options)
    (_, run) = steps(f"FROM debian\nARG D=/d\nWORKDIR /w\nRUN {mounts} x\n")[-2:]
    assert (run.secrets, run.directories) == (
        (),
        (
            DirectoryMount(target="/w/c", mode=0o755),
            DirectoryMount(target="/d", mode=0o700, owner="1:2"),
            DirectoryMount(target="/t", mode=0o1777),
        ),
    )


def test_secrets_of_a_run_are_where_docker_has_them() -> None:
    options = ("id=A", "id=A,env=B", "target=t/C,uid=1,gid=2,mode=0444,required")
    mounts = " ".join(f"--mount=type=secret,{option}" for option in options)
    (_, run) = steps(f"FROM debian\nWORKDIR /w\nRUN {mounts} x\n")[-2:]
    assert run.secrets == (
        SecretMount(id="A", target="/run/secrets/A"),
        SecretMount(id="A", env="B"),
        SecretMount(id="C", target="/w/t/C", mode=0o444, owner="1:2", required=True),
    )
