# mypy: ignore-errors
"""Run in the Python kernel when it starts: tables and charts are shown as data too, and any text can be told."""


def set_up(chart):
    import json

    from IPython import get_ipython
    from IPython.core.formatters import BaseFormatter
    from traitlets import ObjectName, Unicode

    most_rows = 1000

    def table(frame):
        rows = json.loads(frame.head(most_rows).to_json(orient="values", date_format="iso", default_handler=str))
        return {"columns": [str(name) for name in frame.columns], "rows": rows, "row_count": len(frame)}

    def if_it_can(maker):
        def made(value):
            try:
                return maker(value)
            except Exception:  # of a kind nobody has thought of: its text or image is there
                return None

        return made

    def add(mime, makers):
        traits = {"format_type": Unicode(mime), "print_method": ObjectName("_repr_no_"), "_return_type": dict}
        # Matplotlib takes its figures out of every formatter when it chooses among them.
        traits["pop"] = lambda _self, _type, default=None: default
        formatter = type("Formatter", (BaseFormatter,), traits)(parent=get_ipython().display_formatter)
        for module, name, maker in makers:
            formatter.for_type_by_name(module, name, if_it_can(maker))
        get_ipython().display_formatter.formatters[mime] = formatter

    add("application/vnd.forkyard.data+json", [(name, "DataFrame", table) for name in ("pandas", "pandas.core.frame")])
    add("application/vnd.forkyard.chart+json", [("matplotlib.figure", "Figure", chart)])

    # Half a surrogate pair has no UTF-8: the kernel's own way to pack fails at it, and then says nothing more of the run.
    from jupyter_client.jsonutil import json_default

    session = get_ipython().kernel.session
    pack = session.pack

    def packed(message):
        try:
            return json.dumps(message, default=json_default, allow_nan=False).encode()
        except (TypeError, ValueError):
            return pack(message)

    session.pack = packed
