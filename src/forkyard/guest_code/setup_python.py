# mypy: ignore-errors
"""Run in the Python kernel when it starts: tables and charts are shown as data too. Leaves no name behind."""


def _forkyard_setup():
    import json

    from IPython import get_ipython
    from IPython.core.formatters import BaseFormatter
    from traitlets import ObjectName, Unicode

    most_rows, most_points = 1000, 5000

    def plain(values):
        """Numbers as numbers, all else as text; None for what JSON has no number for."""
        found = []
        for value in list(values)[:most_points]:
            try:
                number = float(value)
                found.append(number if number - number == 0 else None)
            except (TypeError, ValueError):
                found.append(str(value))
        return found

    def table(frame):
        rows = json.loads(frame.head(most_rows).to_json(orient="values", date_format="iso"))
        return {"columns": [str(name) for name in frame.columns], "rows": rows, "row_count": len(frame)}

    def chart(figure):
        charts = [one for one in map(axes_chart, figure.axes) if one is not None]
        if len(charts) == 1:
            return charts[0]
        return {"type": "superchart", "title": "", "elements": charts} if charts else None

    def axes_chart(axes):
        kind, elements = contents(axes)
        if not elements:
            return None
        labels = {"title": axes.get_title(), "x_label": axes.get_xlabel(), "y_label": axes.get_ylabel()}
        return {"type": kind, **labels, "elements": elements}

    def contents(axes):
        wedges = [patch for patch in axes.patches if type(patch).__name__ == "Wedge"]
        if wedges:
            return "pie", [{"label": patch.get_label(), "angle": patch.theta2 - patch.theta1} for patch in wedges]
        bars = [group for group in axes.containers if type(group).__name__ == "BarContainer"]
        if bars:
            names = [text.get_text() for text in axes.get_xticklabels()]
            named = len(bars) == 1 and len(names) == len(bars[0])
            return "bar", [
                {
                    "label": names[place] if named else str(place),
                    "group": str(group.get_label()),
                    "value": plain([bar.get_height()])[0],
                }
                for group in bars
                for place, bar in enumerate(group)
            ]
        dots = [group for group in axes.collections if type(group).__name__ == "PathCollection"]
        if dots:
            return "scatter", [
                {
                    "label": str(group.get_label()),
                    "points": [plain(point) for point in group.get_offsets()[:most_points]],
                }
                for group in dots
            ]
        lines = axes.get_lines()
        return "line", [
            {
                "label": str(line.get_label()),
                "points": [
                    list(point) for point in zip(plain(line.get_xdata()), plain(line.get_ydata()), strict=False)
                ],
            }
            for line in lines
        ]

    def add(mime, makers):
        traits = {"format_type": Unicode(mime), "print_method": ObjectName("_repr_no_"), "_return_type": dict}
        # Matplotlib takes its figures out of every formatter when it chooses among them.
        traits["pop"] = lambda _self, _type, default=None: default
        formatter = type("Formatter", (BaseFormatter,), traits)(parent=get_ipython().display_formatter)
        for module, name, maker in makers:
            formatter.for_type_by_name(module, name, maker)
        get_ipython().display_formatter.formatters[mime] = formatter

    add("application/vnd.forkyard.data+json", [(name, "DataFrame", table) for name in ("pandas", "pandas.core.frame")])
    add("application/vnd.forkyard.chart+json", [("matplotlib.figure", "Figure", chart)])


_forkyard_setup()
del _forkyard_setup
