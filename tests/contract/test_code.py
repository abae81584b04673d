"""Code that is run in contexts, under the real agent: what is remembered, shown, raised, interrupted."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from forkyard import (
    CodeEnd,
    CodeOutput,
    CodeRaised,
    ContextInfo,
    ContextNotFound,
    Forkyard,
    InvalidRequest,
    LanguageMissing,
    Sandbox,
)
from forkyard.control import code as contexts
from forkyard.guest import code as program

from .sdk_daemon import Daemon, running_daemon

PATH = f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin"


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with pytest.MonkeyPatch.context() as patch, running_daemon() as daemon:
        patch.setattr(program, "FOLDER", str(tmp_path_factory.mktemp("code")))
        program.bundle.cache_clear()
        yield daemon
    program.bundle.cache_clear()


@pytest.fixture(scope="module")
def sbx(daemon: Daemon) -> Iterator[Sandbox]:
    # This machine's own python3 has no kernel; that of these tests has.
    with Forkyard(daemon.url, daemon.key) as fy, fy.sandboxes.create(env={"PATH": PATH}) as sandbox:
        yield sandbox


@pytest.fixture(scope="module")
def python(sbx: Sandbox) -> ContextInfo:
    return sbx.contexts.create("python", env={"PATH": PATH})


@pytest.fixture(scope="module")
def bash(sbx: Sandbox) -> ContextInfo:
    return sbx.contexts.create("bash", env={"PATH": PATH})


def test_what_python_defines_is_there_in_the_next_run(sbx: Sandbox, python: ContextInfo) -> None:
    first = sbx.run_code("x = 41\nprint('hello')", context=python)
    assert (first.stdout, first.results, first.ok, first.context_id) == ("hello\n", [], True, python.id)
    second = sbx.run_code("import sys; print('oh', file=sys.stderr); x + 1", context=python)
    assert (second.text, second.stderr) == ("42", "oh\n")
    assert second.execution_count == first.execution_count + 1


def test_an_exception_is_data_unless_asked_otherwise(sbx: Sandbox, python: ContextInfo) -> None:
    outcome = sbx.run_code("def f():\n    return 1/0\nf()", context=python)
    assert outcome.exception is not None
    assert (outcome.status, outcome.exception.name, outcome.exception.value) == (
        "exception",
        "ZeroDivisionError",
        "division by zero",
    )
    assert "return 1/0" in outcome.exception.traceback
    assert "\x1b[" not in outcome.exception.traceback
    with pytest.raises(CodeRaised, match="ZeroDivisionError") as raised:
        sbx.run_code("1/0", context=python, check=True)
    assert raised.value.outcome is not None


def test_results_come_in_all_their_representations(sbx: Sandbox, python: ContextInfo) -> None:
    shown = sbx.run_code(
        """
from IPython.display import HTML, JSON, Latex, Markdown, SVG, Image, display
display(HTML("<b>x</b>"), Markdown("# x"), Latex("$x$"), JSON({"a": [1]}), SVG("<svg></svg>"))
display(Image(data=b"\\x89PNG\\r\\n\\x1a\\n", format="png"), {"text/x-odd": "o", "text/plain": "t"}, raw=False)
class Both:
    def _repr_html_(self): return "<i>"
    def __repr__(self): return "both"
Both()
""",
        context=python,
    ).check()
    by_format = {name: result for result in shown.results for name in result.formats() if name != "text"}
    assert by_format["markdown"].markdown == "# x"
    assert by_format["latex"].latex == "$x$"
    assert by_format["json"].json_value == {"a": [1]}
    assert "<svg" in (by_format["svg"].svg or "")
    assert by_format["png"].png is not None
    main = shown.results[-1]
    assert (main.main, main.text, main.html) == (True, "both", "<i>")
    assert [result.main for result in shown.results[:-1]] == [False] * 7


def test_text_that_has_no_utf8_does_not_hold_up_a_run(sbx: Sandbox, python: ContextInfo) -> None:
    raised = sbx.run_code("raise ValueError('x \\ud83d')", context=python, timeout_s=30)
    assert (raised.status, raised.exception and raised.exception.value) == ("exception", "x ?")
    assert sbx.run_code("print('a\\ud800 b\\udc80')", context=python, timeout_s=30).stdout == "a? b?\n"


def test_a_table_that_cannot_be_told_as_data_is_shown_all_the_same(sbx: Sandbox, python: ContextInfo) -> None:
    shown = sbx.run_code(
        """
import json
class Frame:
    columns = ["a"]
    def __len__(self): return 3
    def head(self, most): return self
    def to_json(self, orient, date_format, default_handler): return json.dumps([[object()]], default=default_handler)
    def __repr__(self): return "table"
class Odd(Frame):
    def to_json(self, **options): raise UnicodeDecodeError("utf-8", b"\\xff", 0, 1, "invalid start byte")
Frame.__module__, Frame.__name__ = "pandas", "DataFrame"
display(Frame(), Odd())
""",
        context=python,
    ).check()
    told, untold = shown.results
    assert told.data is not None and told.data["rows"][0][0].startswith("<object object")
    assert (untold.text, untold.data) == ("table", None)


def test_after_a_time_limit_the_code_is_interrupted_and_the_context_goes_on(sbx: Sandbox, python: ContextInfo) -> None:
    sbx.run_code("kept = 'yes'", context=python)
    outcome = sbx.run_code("while True: pass", context=python, timeout_s=0.5)
    assert (outcome.status, outcome.state_kept) == ("timed_out", True)
    assert outcome.exception is not None and outcome.exception.name == "KeyboardInterrupt"
    assert sbx.run_code("kept", context=python).text == "'yes'"


def test_a_kernel_that_dies_is_replaced_and_it_is_said(sbx: Sandbox, python: ContextInfo) -> None:
    outcome = sbx.run_code("import os; os._exit(3)", context=python)
    assert (outcome.status, outcome.state_kept) == ("died", False)
    assert sbx.run_code("'os' in dir()", context=python).text == "False"


def test_a_run_has_an_environment_of_its_own(sbx: Sandbox, python: ContextInfo, bash: ContextInfo) -> None:
    asked = "import os; os.environ.get('A')"
    assert sbx.run_code(asked, context=python, env={"A": "it's"}).text == '"it\'s"'
    assert sbx.run_code(asked, context=python).results == []
    assert sbx.run_code("echo [$A]", context=bash, env={"A": "it's $x"}).stdout == "[it's $x]\n"
    assert sbx.run_code("echo [$A]", context=bash).stdout == "[]\n"


def test_output_is_heard_as_it_comes(sbx: Sandbox, bash: ContextInfo) -> None:
    heard: list[str] = []
    sbx.run_code("echo out; echo err >&2", context=bash, on_stdout=heard.append, on_stderr=heard.append)
    assert sorted(heard) == ["err\n", "out\n"]


def test_a_shell_keeps_its_variables_and_its_directory(sbx: Sandbox, bash: ContextInfo) -> None:
    assert sbx.run_code("a=5; f() { echo f $a; }; cd /usr", context=bash).ok
    outcome = sbx.run_code("f; pwd; (exit 3)", context=bash)
    assert outcome.stdout == "f 5\n/usr\n"
    assert outcome.exception is not None and (outcome.exception.name, outcome.exception.value) == ("ExitStatus", "3")
    assert sbx.run_code("echo 'not closed", context=bash).status == "exception"
    late = sbx.run_code("for i in 1 2 3; do sleep 60; done; echo no", context=bash, timeout_s=0.3)
    assert (late.status, late.state_kept, late.stdout) == ("timed_out", True, "")
    assert sbx.run_code("f", context=bash).stdout == "f 5\n"


def test_javascript_is_run_as_in_a_console(sbx: Sandbox) -> None:
    node = sbx.contexts.create("javascript", env={"PATH": PATH})
    assert sbx.run_code("const x = 1; console.log('hi')", context=node).stdout == "hi\n"
    again = sbx.run_code("import { EOL as end } from 'node:os';\nconst x = [await 2, end]; x", context=node)
    assert (again.text, again.results[0].json_value) == ("[ 2, '\\n' ]", [2, "\n"])
    thrown = sbx.run_code("function f() { null.y }\nf()", context=node)
    assert thrown.exception is not None and thrown.exception.name == "TypeError"
    assert thrown.exception.traceback.splitlines()[-1].strip() == "at <anonymous>:2:1"
    for endless in ("while (true) {}", "await new Promise(() => {})"):
        late = sbx.run_code(endless, context=node, timeout_s=0.3)
        assert (late.status, late.state_kept) == ("timed_out", True)
    shown = sbx.run_code("display({[Symbol.for('Jupyter.display')]: () => ({'text/html': '<b>'})}); x[0]", context=node)
    assert [(result.html, result.text, result.main) for result in shown.results] == [
        ("<b>", None, False),
        (None, "2", True),
    ]
    assert sbx.run_code("process.exit(3)", context=node).status == "died"


def test_a_trace_shows_the_commands_of_the_code_alone(sbx: Sandbox) -> None:
    shell = sbx.contexts.create("bash", env={"PATH": PATH})
    assert sbx.run_code("set -x; true 1", context=shell).stderr == "++ true 1\n"
    assert sbx.run_code("true 2", context=shell, env={"A": "b"}).stderr == "++ true 2\n"
    assert sbx.run_code("set +x\ntrue 3", context=shell).stderr == "++ set +x\n"
    assert sbx.run_code("true 4; (exit 5)", context=shell).stderr == ""


@pytest.fixture(scope="module")
def node(sbx: Sandbox) -> ContextInfo:
    return sbx.contexts.create("javascript", env={"PATH": PATH})


def test_javascript_may_give_its_own_values_any_name(sbx: Sandbox, node: ContextInfo) -> None:
    names = (
        "answers, vm, session, Session, say, show, plain, last, step, valueOf, requests, util, JSON, Buffer, process"
    )
    for code in ('const fs = require("fs")', f"let {names}", "function run() { return 1 }", "const Promise = run"):
        sbx.run_code(code, context=node, timeout_s=30).check()
    assert sbx.run_code("[run(), typeof fs.statSync]", context=node, timeout_s=30).text == "[ 1, 'function' ]"
    sbx.contexts.restart(node)


def test_javascript_imports_and_exports_as_a_module_does(sbx: Sandbox, node: ContextInfo, tmp_path: Path) -> None:
    data = tmp_path / "data.json"
    data.write_text("[5]")
    ran = sbx.run_code(
        f"""
import fs, {{ statSync as stat }} from "fs"; import * as path from 'node:path'; import "os";
import data from "{data}" with {{ type: "json" }};
export const one = 1, text = '; import a from "b"';
export default function two() {{ return 2 }}
export async function three() {{ return 3 }}
export {{ one, text as t }};
export default [typeof fs.statSync, typeof stat, path.sep, data[0], one, two(), await three()]; // import a from "b"
""",
        context=node,
    ).check()
    assert ran.results[0].json_value == ["function", "function", "/", 5, 1, 2, 3]
    assert sbx.run_code("two() + text", context=node).text == "'2; import a from \"b\"'"


def test_what_javascript_displays_last_is_shown_once(sbx: Sandbox, node: ContextInfo) -> None:
    shown = sbx.run_code("display([5])", context=node)
    assert [(result.json_value, result.main) for result in shown.results] == [([5], False)]


def test_javascript_that_closes_its_stdin_does_not_end_its_context(sbx: Sandbox, node: ContextInfo) -> None:
    asking = 'const r = require("readline").createInterface({ input: process.stdin }); r.close(); const kept = 7'
    sbx.run_code(asking, context=node).check()
    read = 'require("child_process").execSync("cat", { stdio: ["inherit", "pipe", "inherit"] }).length'
    assert sbx.run_code(read, context=node, timeout_s=30).text == "0"
    assert sbx.run_code("kept", context=node, timeout_s=30).text == "7"


def test_typescript_on_an_older_node_takes_bun_and_says_so(sbx: Sandbox, tmp_path: Path) -> None:
    (tmp_path / "older.js").write_text("delete require('node:module').stripTypeScriptTypes")
    env = {"PATH": f"{tmp_path}:/usr/local/bin:/usr/bin:/bin", "NODE_OPTIONS": f"--require={tmp_path}/older.js"}
    node = sbx.contexts.create("javascript", env=env)
    bun, does = tmp_path / "bun", tmp_path / "does"
    bun.write_text(f"#!/bin/sh\n. {does}\n")  # once: a program that somebody writes cannot be started
    bun.chmod(0o755)
    for script, said in (
        ("exec sed 's/: number//'", None),
        ("echo 'error: Unexpected =' >&2; exit 1", "Unexpected ="),
        (None, "or Bun; this is Node.js v"),
    ):
        if script is None:
            bun.unlink()
        else:
            does.write_text(script)
        ran = sbx.run_code("const n: number = 3; n", language="typescript", context=node)
        if said is None:
            assert ran.text == "3"
        else:
            assert ran.exception is not None and said in ran.exception.value
            assert "[eval]" not in ran.exception.traceback


def test_more_output_than_a_run_may_have_is_counted_and_not_told(sbx: Sandbox, bash: ContextInfo) -> None:
    outcome = sbx.run_code("head -c 9000000 /dev/zero | tr '\\0' x", context=bash)
    assert (len(outcome.stdout), outcome.truncated, outcome.ok) == (8 << 20, True, True)


def test_leaving_a_run_interrupts_it(sbx: Sandbox, bash: ContextInfo) -> None:
    with sbx.run_code_stream("echo go; sleep 600", context=bash) as events:
        for event in events:
            if isinstance(event, CodeOutput):
                break
    assert sbx.run_code("echo next", context=bash, timeout_s=30).stdout == "next\n"


def test_an_interrupt_ends_what_runs(sbx: Sandbox, bash: ContextInfo) -> None:
    ends: list[CodeEnd] = []
    going = threading.Event()

    def follow() -> None:
        for event in sbx.run_code_stream("echo go; sleep 600", context=bash):
            if isinstance(event, CodeOutput):
                going.set()
            if isinstance(event, CodeEnd):
                ends.append(event)

    follower = threading.Thread(target=follow)
    follower.start()
    assert going.wait(20)
    sbx.contexts.interrupt(bash)
    follower.join(20)
    assert [end.status for end in ends] == ["interrupted"]


def test_contexts_are_apart_and_can_be_restarted_and_deleted(sbx: Sandbox, bash: ContextInfo) -> None:
    other = sbx.contexts.create("bash", cwd="/tmp", env={"PATH": PATH, "MINE": "1"})
    assert sbx.run_code("echo $MINE $PWD; q=1", context=other).stdout == "1 /tmp\n"
    assert sbx.run_code("echo [$q]", context=bash).stdout == "[]\n"
    assert {bash.id, other.id} <= {context.id for context in sbx.contexts.list()}
    sbx.contexts.restart(other)
    assert sbx.run_code("echo [$q] $MINE", context=other).stdout == "[] 1\n"
    sbx.contexts.delete(other)
    with pytest.raises(ContextNotFound):
        sbx.run_code("true", context=other)
    with pytest.raises(ContextNotFound):
        sbx.contexts.delete(other)


def test_the_first_run_without_a_context_makes_one_of_its_language(sbx: Sandbox) -> None:
    assert sbx.run_code("y=7", language="bash").context_id == "bash"
    assert sbx.run_code("echo $y", language="bash").stdout == "7\n"
    assert sbx.contexts.get("bash").language == "bash"
    with pytest.raises(InvalidRequest, match="runs bash, not python"):
        sbx.run_code("1", context="bash", language="python")


def test_a_machine_without_a_kernel_says_what_to_install(sbx: Sandbox, tmp_path: Path) -> None:
    python = tmp_path / "python3"
    python.write_text('#!/bin/sh\nexec /usr/bin/python3 -I -S "$@"\n')
    python.chmod(0o755)
    with pytest.raises(LanguageMissing, match="python3-ipykernel"):
        sbx.contexts.create("python", env={"PATH": f"{tmp_path}:/usr/bin:/bin"})


def test_a_python_that_is_too_old_for_it_is_named(sbx: Sandbox, tmp_path: Path) -> None:
    python = tmp_path / "python3"
    old = "import runpy, sys; sys.version_info = (3, 9, 1); runpy.run_path(sys.argv[1], run_name='__main__')"
    python.write_text(f'#!/bin/sh\nexec /usr/bin/python3 -c "{old}" "$@"\n')
    python.chmod(0o755)
    with pytest.raises(LanguageMissing, match=r"needs Python 3\.10 or newer, and .* is 3\.9"):
        sbx.contexts.create("python", env={"PATH": f"{tmp_path}:/usr/bin:/bin"})


def test_a_machine_without_python_runs_the_languages_it_has(
    sbx: Sandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bash").symlink_to("/bin/bash")
    monkeypatch.setattr(contexts, "BROUGHT", (sys.executable, "-I"))
    shell = sbx.contexts.create("bash", env={"PATH": str(tmp_path)})
    assert sbx.run_code("echo $((6 * 7))", context=shell).stdout == "42\n"
    with pytest.raises(LanguageMissing, match="no node"):
        sbx.contexts.create("javascript", env={"PATH": str(tmp_path)})
    with pytest.raises(LanguageMissing, match="machine's python3"):
        sbx.contexts.create("python", env={"PATH": str(tmp_path)})


def test_code_may_be_as_long_as_is_said_and_longer_code_is_not_repeated(sbx: Sandbox, node: ContextInfo) -> None:
    long = "7 //" + "\1" * (4 << 20)
    assert sbx.run_code(long[: 4 << 20], context=node, timeout_s=60).text == "7"
    with pytest.raises(InvalidRequest, match="at most 4194304 characters") as refused:
        sbx.run_code(long, context=node)
    assert len(str(refused.value)) < 1000


def test_code_runs_from_the_command_line(sbx: Sandbox, daemon: Daemon, tmp_path: Path) -> None:
    script = tmp_path / "a.sh"
    script.write_text("echo from a file; z=3")
    assert daemon.cli("run-code", sbx.id, str(script)).stdout == "from a file\n"
    again = daemon.cli("run-code", sbx.id, "-l", "bash", "-", input="echo $z; false")
    assert (again.stdout, again.returncode) == ("3\n", 1)
    assert "bash" in daemon.cli("contexts", "ls", sbx.id).stdout
    assert daemon.cli("run-code", sbx.id, "-l", "bash", "-c", "sleep 60", "--timeout", "0.3").returncode == 124


def test_a_file_that_cannot_be_read_is_said_with_its_name(sbx: Sandbox, daemon: Daemon, tmp_path: Path) -> None:
    bad = tmp_path / "bad.py"
    bad.write_bytes(b"x = '\xff'")
    for file, why in ((tmp_path / "none.py", "No such file"), (tmp_path, "Is a directory"), (bad, "is not UTF-8")):
        refused = daemon.cli("run-code", sbx.id, str(file))
        assert (refused.returncode, "Traceback" in refused.stderr) == (1, False)
        assert str(file) in refused.stderr and why in refused.stderr
