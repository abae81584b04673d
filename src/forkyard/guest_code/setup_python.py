# mypy: ignore-errors
"""Run in the Python kernel when it starts: tables and charts are shown as data too."""


def set_up(chart):
    import json

    from IPython import get_ipython
    from IPython.core.formatters import BaseFormatter
    from traitlets import ObjectName, Unicode

    most_rows = 1000

    def table(frame):
        rows = json.loads(frame.head(most_rows).to_json(orient="values", date_format="iso"))
        return {"columns": [str(name) for name in frame.columns], "rows": rows, "row_count": len(frame)}

    def shown(figure):
        try:
            return chart(figure)
        except Exception:  # drawn in a way nobody has thought of: its image is there
            return None

    def add(mime, makers):
        traits = {"format_type": Unicode(mime), "print_method": ObjectName("_repr_no_"), "_return_type": dict}
        # Matplotlib takes its figures out of every formatter when it chooses among them.
        traits["pop"] = lambda _self, _type, default=None: default
        formatter = type("Formatter", (BaseFormatter,), traits)(parent=get_ipython().display_formatter)
        for module, name, maker in makers:
            formatter.for_type_by_name(module, name, maker)
        get_ipython().display_formatter.formatters[mime] = formatter

    add("application/vnd.forkyard.data+json", [(name, "DataFrame", table) for name in ("pandas", "pandas.core.frame")])
    add("application/vnd.forkyard.chart+json", [("matplotlib.figure", "Figure", shown)])
