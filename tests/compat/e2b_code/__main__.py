"""Calls of the published `e2b-code-interpreter`, each with what a caller may rely on; told as those of `e2b_calls` are."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

Check = Callable[[Any], None]
CALLS: list[tuple[str, str, Check]] = []


def call(name: str, since: str = "2.9") -> Callable[[Check], Check]:
    def add(check: Check) -> Check:
        CALLS.append((name, since, check))
        return check

    return add


class Yard:
    def __init__(self) -> None:
        import e2b_code_interpreter as package

        self.package = package
        #: On a machine of this test, the interpreter that has a kernel.
        self.envs = {"PATH": os.environ["COMPAT_PATH"]} if "COMPAT_PATH" in os.environ else {}
        self.sbx: Any = None


if "COMPAT_VM" in os.environ:

    @call("Template.build: code-interpreter-v1, pip_install")
    def _(y: Any) -> None:
        template = y.package.Template().from_template("code-interpreter-v1").pip_install(["matplotlib", "pandas"])
        y.package.Template.build(template, "code-interpreter-v1")


@call("Sandbox.create (code-interpreter-v1)")
def _(y: Any) -> None:
    y.sbx = y.package.Sandbox.create(timeout=1200, envs=y.envs)
    info = y.sbx.get_info()
    assert "code-interpreter-v1" in (info.template_id, info.name)  # the name, if it was built


@call("run_code")
def _(y: Any) -> None:
    done = y.sbx.run_code("x = 41\nprint('hello')\nx + 1")
    assert (done.text, done.error) == ("42", None)
    assert "".join(done.logs.stdout) == "hello\n"
    assert done.results[0].is_main_result
    assert done.execution_count is not None


@call("run_code: remembers")
def _(y: Any) -> None:
    assert y.sbx.run_code("x * 2").text == "82"


@call("run_code: stderr, callbacks")
def _(y: Any) -> None:
    out: list[str] = []
    err: list[str] = []
    results: list[Any] = []
    y.sbx.run_code(
        "import sys\nprint('one')\nprint('two', file=sys.stderr)\n3",
        on_stdout=lambda message: out.append(message.line),
        on_stderr=lambda message: err.append(message.line),
        on_result=results.append,
    )
    assert ("".join(out), "".join(err), [one.text for one in results]) == ("one\n", "two\n", ["3"])


@call("run_code: error")
def _(y: Any) -> None:
    errors: list[Any] = []
    done = y.sbx.run_code("def f():\n    1 / 0\nf()", on_error=errors.append)
    assert done.error.name == "ZeroDivisionError"
    assert "division by zero" in done.error.value
    assert "ZeroDivisionError" in done.error.traceback
    assert errors[0].name == "ZeroDivisionError"


@call("run_code: envs")
def _(y: Any) -> None:
    code = "import os; os.environ.get('ONCE', 'nothing')"
    assert y.sbx.run_code(code, envs={"ONCE": "here"}).text == "here"
    assert y.sbx.run_code(code).text == "nothing"


@call("run_code: display, html, json")
def _(y: Any) -> None:
    done = y.sbx.run_code(
        "from IPython.display import HTML, JSON, Markdown, display\n"
        "display(HTML('<b>x</b>')); display(Markdown('# y')); display(JSON({'a': 1}))"
    )
    assert [one.html for one in done.results if one.html] == ["<b>x</b>"]
    assert [one.markdown for one in done.results if one.markdown] == ["# y"]
    assert [one.json for one in done.results if one.json] == [{"a": 1}]
    assert not any(one.is_main_result for one in done.results)


@call("run_code: image")
def _(y: Any) -> None:
    import base64

    pixel = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
    done = y.sbx.run_code(
        f"import base64\nfrom IPython.display import Image\nImage(base64.b64decode('{pixel}'), format='png')"
    )
    assert base64.b64decode(done.results[0].png) == base64.b64decode(pixel)


@call("run_code: timeout, and the next one runs")
def _(y: Any) -> None:
    began = time.monotonic()
    try:
        y.sbx.run_code("import time; time.sleep(60)", timeout=2)
    except Exception as error:
        assert "timeout" in type(error).__name__.lower(), error
    else:
        raise AssertionError("it did not time out")
    assert y.sbx.run_code("x").text == "41"
    assert time.monotonic() - began < 40


@call("run_code: bash")
def _(y: Any) -> None:
    done = y.sbx.run_code("echo from bash", language="bash")
    assert "".join(done.logs.stdout) == "from bash\n"


@call("run_code: bash in a cell (!)")
def _(y: Any) -> None:
    assert "".join(y.sbx.run_code("!echo from a cell").logs.stdout).split() == ["from", "a", "cell"]


@call("run_code: javascript, remembers")
def _(y: Any) -> None:
    done = y.sbx.run_code("const n = 20; console.log('hello'); n + 1", language="javascript")
    assert (done.text, done.error) == ("21", None)
    assert "".join(done.logs.stdout) == "hello\n"
    assert y.sbx.run_code("n * 2", language="js").text == "40"
    failed = y.sbx.run_code("null.x", language="js")
    assert failed.error.name == "TypeError"
    assert failed.error.traceback


@call("run_code: javascript, envs")
def _(y: Any) -> None:
    assert y.sbx.run_code("process.env.ONCE", language="js", envs={"ONCE": "here"}).text == "here"


if "COMPAT_VM" in os.environ:  # it takes a newer Node than this machine may have

    @call("run_code: typescript")
    def _(y: Any) -> None:
        done = y.sbx.run_code("const m: number = 3; console.log(m * 2)", language="ts")
        assert "".join(done.logs.stdout) == "6\n"


@call("run_code: a table (pandas)")
def _(y: Any) -> None:
    done = y.sbx.run_code("import pandas\npandas.DataFrame({'a': [1, 2, 3], 'b': ['x', 'y', 'z']})")
    assert done.results[0].data == {"a": [1, 2, 3], "b": ["x", "y", "z"]}
    assert "<table" in done.results[0].html


def _drawn(y: Any, *lines: str) -> Any:
    done = y.sbx.run_code("\n".join(["import matplotlib.pyplot as plt", *lines, "plt.show()"]))
    assert done.error is None, done.error
    shown = done.results[0]
    import base64

    assert base64.b64decode(shown.png).startswith(b"\x89PNG")
    return shown.chart


@call("run_code: line chart")
def _(y: Any) -> None:
    chart = _drawn(
        y,
        "plt.plot([0, 1, 2], [0, 1, 4], label='squares')",
        "plt.plot([0, 1, 2], [0, 1, 8], label='cubes')",
        "plt.title('Powers'); plt.xlabel('Time (s)'); plt.ylabel('Size [m]')",
    )
    assert (type(chart).__name__, chart.title) == ("LineChart", "Powers")
    assert (chart.x_label, chart.y_label, chart.x_unit, chart.y_unit) == ("Time (s)", "Size [m]", "s", "m")
    assert (chart.x_scale.value, chart.y_scale.value) == ("linear", "linear")
    assert chart.x_ticks
    assert len(chart.x_ticks) == len(chart.x_tick_labels)
    assert [one.label for one in chart.elements] == ["squares", "cubes"]
    assert chart.elements[1].points == [(0, 0), (1, 1), (2, 8)]


@call("run_code: line chart with dates and categories")
def _(y: Any) -> None:
    chart = _drawn(
        y,
        "import datetime",
        "plt.plot([datetime.date(2030, 1, 1 + n) for n in range(3)], ['low', 'high', 'low'])",
    )
    assert (chart.x_scale.value, chart.y_scale.value) == ("datetime", "categorical")
    assert chart.title is None
    assert chart.elements[0].points[1] == ("2030-01-02", "high")


@call("run_code: scatter chart")
def _(y: Any) -> None:
    chart = _drawn(y, "plt.scatter([1, 2], [3, 4], label='a')", "plt.scatter([5], [6], label='b')", "plt.yscale('log')")
    assert type(chart).__name__ == "ScatterChart"
    assert chart.y_scale.value == "log"
    assert [(one.label, one.points) for one in chart.elements] == [("a", [(1, 3), (2, 4)]), ("b", [(5, 6)])]


@call("run_code: bar chart")
def _(y: Any) -> None:
    chart = _drawn(y, "plt.bar(['A', 'B', 'C'], [100, 200, 300])", "plt.ylabel('Sold')")
    assert (type(chart).__name__, chart.y_label) == ("BarChart", "Sold")
    assert [(one.label, one.value, one.group) for one in chart.elements] == [
        ("A", 100, "Group 0"),
        ("B", 200, "Group 0"),
        ("C", 300, "Group 0"),
    ]
    lying = _drawn(y, "plt.barh(['A', 'B'], [1, 2], label='mine')")
    assert [(one.label, one.value, one.group) for one in lying.elements] == [("A", 1, "mine"), ("B", 2, "mine")]


@call("run_code: pie chart")
def _(y: Any) -> None:
    chart = _drawn(y, "plt.pie([90, 10], labels=['No', 'Yes'], startangle=90)", "plt.title('Early?')")
    assert (type(chart).__name__, chart.title) == ("PieChart", "Early?")
    assert [(one.label, round(one.angle), one.radius) for one in chart.elements] == [("No", 324, 1), ("Yes", 36, 1)]


@call("run_code: box and whisker chart")
def _(y: Any) -> None:
    for filled in (False, True):
        chart = _drawn(
            y,
            f"plt.boxplot([[1, 2, 3, 4, 100], [5, 6, 7]], patch_artist={filled})",
            "plt.xticks([1, 2], ['A', 'B'])",
        )
        assert type(chart).__name__ == "BoxAndWhiskerChart"
        first, second = chart.elements
        assert (first.label, first.first_quartile, first.median, first.third_quartile) == ("A", 2, 3, 4)
        assert (first.min, first.max, first.outliers) == (1, 4, [100])
        assert (second.label, second.median, second.outliers) == ("B", 6, [])


@call("run_code: several charts in one figure")
def _(y: Any) -> None:
    chart = _drawn(
        y,
        "figure, (one, two) = plt.subplots(1, 2)",
        "one.plot([1, 2], [3, 4]); two.bar(['A'], [1]); figure.suptitle('Both')",
    )
    assert (type(chart).__name__, chart.title) == ("SuperChart", "Both")
    assert [type(one).__name__ for one in chart.elements] == ["LineChart", "BarChart"]


@call("run_code: a picture that is no chart")
def _(y: Any) -> None:
    chart = _drawn(y, "plt.imshow([[0, 1], [1, 0]])")
    assert chart.type.value == "unknown"


@call("run_code: unknown language")
def _(y: Any) -> None:
    try:
        y.sbx.run_code("x", language="cobol")
    except Exception as error:
        assert "cobol" in str(error)
    else:
        raise AssertionError("it ran")


@call("create_code_context, run_code in it")
def _(y: Any) -> None:
    y.context = y.sbx.create_code_context(cwd="/tmp", language="python")
    assert (y.context.language, y.context.cwd) == ("python", "/tmp")
    assert y.sbx.run_code("import os; y = 5; os.getcwd()", context=y.context).text == "/tmp"
    done = y.sbx.run_code("y")
    assert done.error.name == "NameError"


@call("list_code_contexts")
def _(y: Any) -> None:
    found = y.sbx.list_code_contexts()
    assert y.context.id in [one.id for one in found]
    assert {"python", "javascript"} <= {one.language for one in found}


@call("restart_code_context")
def _(y: Any) -> None:
    y.sbx.restart_code_context(y.context)
    assert y.sbx.run_code("y", context=y.context).error.name == "NameError"


@call("remove_code_context")
def _(y: Any) -> None:
    y.sbx.remove_code_context(y.context)
    assert y.context.id not in [one.id for one in y.sbx.list_code_contexts()]


@call("run_code: a context that is gone")
def _(y: Any) -> None:
    try:
        y.sbx.run_code("1", context=y.context)
    except Exception as error:
        assert "not found" in str(error).lower()
    else:
        raise AssertionError("it ran")


@call("AsyncSandbox.run_code, create_code_context")
def _(y: Any) -> None:
    async def main() -> None:
        sbx = await y.package.AsyncSandbox.connect(y.sbx.sandbox_id)
        assert (await sbx.run_code("6 * 7")).text == "42"
        context = await sbx.create_code_context()
        assert (await sbx.run_code("'in it'", context=context)).text == "in it"
        await sbx.remove_code_context(context)

    asyncio.new_event_loop().run_until_complete(main())


@call("create_code_context: a sandbox that is not open to all")
def _(y: Any) -> None:
    made = y.package.Sandbox.create(timeout=300, envs=y.envs, network={"allow_public_traffic": False})
    assert made.traffic_access_token
    context = made.create_code_context(language="bash")
    assert context.id in [one.id for one in made.list_code_contexts()]
    made.remove_code_context(context)
    assert made.kill()


@call("commands and files beside code")
def _(y: Any) -> None:
    assert y.sbx.commands.run("echo beside").stdout == "beside\n"
    y.sbx.run_code("open('/tmp/e2b-code.txt', 'w').write('written')")
    assert y.sbx.files.read("/tmp/e2b-code.txt") == "written"


@call("kill")
def _(y: Any) -> None:
    assert y.sbx.kill()


def _number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:3])


def main() -> None:
    if "--list" in sys.argv:
        print(json.dumps([(name, since) for name, since, _ in CALLS]))
        return
    from importlib.metadata import version

    ours, yard = _number(version("e2b-code-interpreter")), Yard()
    for name, since, check in CALLS:
        if _number(since) > ours:
            continue
        began, wrong = time.monotonic(), None
        try:
            check(yard)
        except BaseException:
            wrong = traceback.format_exc(limit=-4)
        print(json.dumps({"call": name, "wrong": wrong, "seconds": round(time.monotonic() - began, 2)}), flush=True)


main()
