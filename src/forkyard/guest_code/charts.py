# mypy: ignore-errors
"""What a matplotlib figure shows, as data. Asks the figure alone, and imports nothing of matplotlib. Runs in the kernel."""

import re

MOST_POINTS = 5000
_UNIT = re.compile(r"[(\[]([^()\[\]]{1,40})[)\]]\s*$")


def chart(figure):
    """Of one pair of axes, or of all that show something; None if none does."""
    found = [one for one in map(_of_axes, figure.axes) if one is not None]
    if len(found) == 1:
        return found[0]
    whole = figure._suptitle.get_text() if getattr(figure, "_suptitle", None) is not None else None
    return {"type": "superchart", "title": whole or None, "elements": found} if found else None


def _of_axes(axes):
    wedges = [patch for patch in axes.patches if type(patch).__name__ == "Wedge"]
    if wedges:
        return {"type": "pie", "title": axes.get_title() or None, "elements": [_wedge(one) for one in wedges]}
    boxes = _boxes(axes)
    if boxes:
        return {"type": "box_and_whisker", **_labels(axes), "elements": boxes}
    bars = [group for group in axes.containers if type(group).__name__ == "BarContainer"]
    if bars:
        elements = [one for number, group in enumerate(bars) for one in _bars(axes, group, number)]
        return {"type": "bar", **_labels(axes), "elements": elements}
    dots = [group for group in axes.collections if type(group).__name__ == "PathCollection"]
    lines = [line for line in axes.get_lines() if len(line.get_xdata())]
    if not dots and not lines:
        return _unknown(axes)
    elements = [_points(group.get_label(), *zip(*group.get_offsets()[:MOST_POINTS], strict=True)) for group in dots]
    if not dots:
        elements = [_points(line.get_label(), line.get_xdata(), line.get_ydata()) for line in lines]
    ticks = {**_ticks("x", axes.xaxis, axes.get_xscale()), **_ticks("y", axes.yaxis, axes.get_yscale())}
    return {"type": "scatter" if dots else "line", **_labels(axes), **ticks, "elements": elements}


def _unknown(axes):
    """Something is drawn that is none of the kinds above."""
    drawn = [*axes.patches, *axes.collections, *axes.images]
    return {"type": "unknown", "title": axes.get_title() or None, "elements": []} if drawn else None


def _labels(axes):
    x, y = axes.get_xlabel(), axes.get_ylabel()
    return {
        "title": axes.get_title() or None,
        "x_label": x or None,
        "y_label": y or None,
        "x_unit": _unit(x),
        "y_unit": _unit(y),
    }


def _unit(label):
    found = _UNIT.search(label)
    return found[1] if found else None


def _ticks(name, axis, scale):
    """Where the ticks of an axis are, what is written there, and how it goes from one to the next."""
    units = type(axis.get_converter() if hasattr(axis, "get_converter") else axis.converter).__name__
    kind = "datetime" if "Date" in units else "categorical" if units == "StrCategoryConverter" else scale
    written = [text.get_text() for text in axis.get_ticklabels()]
    places = written if kind == "categorical" else _plain(axis.get_majorticklocs())
    return {f"{name}_ticks": places, f"{name}_tick_labels": written, f"{name}_scale": kind}


def _points(label, xs=(), ys=()):
    return {"label": str(label), "points": [list(point) for point in zip(_plain(xs), _plain(ys), strict=False)]}


def _wedge(patch):
    return {"label": patch.get_label(), "angle": round(patch.theta2 - patch.theta1, 4), "radius": float(patch.r)}


# ── bars ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def _bars(axes, group, number):
    name = str(group.get_label())
    name = f"Group {number}" if name.startswith("_") else name
    lying = getattr(group, "orientation", None) == "horizontal"
    ticks = _written(axes.yaxis if lying else axes.xaxis)
    for bar in group:
        side, length = (bar.get_height(), bar.get_width()) if lying else (bar.get_width(), bar.get_height())
        begin = bar.get_y() if lying else bar.get_x()
        yield {"label": _nearest(ticks, begin, begin + side), "group": name, "value": _plain([length])[0]}


def _written(axis):
    """By place."""
    return list(zip(axis.get_majorticklocs(), [text.get_text() for text in axis.get_ticklabels()], strict=False))


def _nearest(ticks, begin, end):
    """What is written at something that reaches so far: bars that stand together share a tick, between them."""
    middle = (begin + end) / 2
    place, text = min(ticks, key=lambda tick: abs(tick[0] - middle), default=(None, ""))
    near = place is not None and abs(place - middle) <= max(2 * abs(end - begin), 0.5)
    return text if near and text else f"{middle:g}"


# ── boxes ────────────────────────────────────────────────────────────────────────────────────────────────────────


def _boxes(axes):
    """A box plot is nothing but lines (and patches, if its boxes are filled): a closed rectangle, a line across it, two that
    stand on it. Drawn twice, it is one."""
    lines = [[(float(x), float(y)) for x, y in line.get_xydata()] for line in axes.get_lines()]
    filled = [patch.get_path().vertices for patch in axes.patches if type(patch).__name__ == "PathPatch"]
    outlines = [[(float(x), float(y)) for x, y in one] for one in filled] or lines
    rectangles = dict.fromkeys(_corners(one) for one in outlines if _is_rectangle(one))
    found = [_box(axes, lines, one, lying=False) or _box(axes, lines, one, lying=True) for one in rectangles]
    return [one for one in found if one is not None]


def _is_rectangle(points):
    return len(points) in (5, 6) and points[0] == points[4] and len(set(points[:4])) == 4


def _corners(points):
    xs, ys = zip(*points[:4], strict=True)
    return min(xs), max(xs), min(ys), max(ys)


def _box(axes, lines, corners, *, lying):
    left, right, low, high = corners
    if lying:
        left, right, low, high = low, high, left, right
        lines = [[(y, x) for x, y in line] for line in lines]
    middle, near = (left + right) / 2, (right - left) * 1e-6
    inside = [line for line in lines if line and all(left - near <= x <= right + near for x, _ in line)]
    pairs = [line for line in inside if len(line) == 2]
    across = [(abs(a[0] - b[0]), a[1]) for a, b in pairs if a[1] == b[1] and a[0] != b[0] and low <= a[1] <= high]
    standing = [(a, b) for a, b in pairs if abs(a[0] - middle) <= near and abs(b[0] - middle) <= near]
    reach = [y for pair in standing for _, y in pair if pair[0][1] in (low, high) or pair[1][1] in (low, high)]
    if not across or not reach:
        return None
    far = [y for line in inside if all(abs(x - middle) <= near for x, _ in line) for _, y in line]
    return {
        "label": _nearest(_written(axes.yaxis if lying else axes.xaxis), left, right),
        "min": min(reach),
        "first_quartile": low,
        "median": max(across)[1],  # the widest: a whisker's end may be there too
        "third_quartile": high,
        "max": max(reach),
        "outliers": sorted({y for y in far if not min(reach) <= y <= max(reach)}),
    }


def _plain(values):
    """Numbers as numbers, times as ISO 8601, all else as text; None for what JSON has no number for."""
    found = []
    for value in list(values)[:MOST_POINTS]:
        try:
            number = float(value)
            found.append(number if number - number == 0 else None)
        except (TypeError, ValueError):
            found.append(value.isoformat() if hasattr(value, "isoformat") else str(value))
    return found
