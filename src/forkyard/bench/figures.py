"""What is promised: each figure's name, its bar, and the benchmark that measures it. Pure data."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import quantiles
from typing import Any, Literal


@dataclass(frozen=True)
class Sample:
    """Measured values of one figure: milliseconds, or single values of another unit."""

    values: list[float]
    unit: str = "ms"

    @property
    def p50(self) -> float:
        return percentile(self.values, 50)

    @property
    def p95(self) -> float:
        return percentile(self.values, 95)

    def as_json(self) -> dict[str, Any]:
        if self.unit != "ms":
            return {"value": round(self.p50, 2), "unit": self.unit, "n": len(self.values)}
        return {"p50_ms": round(self.p50, 2), "p95_ms": round(self.p95, 2), "n": len(self.values)}


def percentile(values: list[float], p: int) -> float:
    if len(values) == 1:
        return values[0]
    return quantiles(values, n=100, method="inclusive")[p - 1]


@dataclass(frozen=True)
class Figure:
    name: str
    bench: str
    promise: str
    limit: float
    kind: Literal["x_t0", "p95_x_t0", "at_most", "at_least"]
    unit: str = "ms"

    def bar(self) -> str:
        if self.kind in ("x_t0", "p95_x_t0"):
            return f"≤ {self.limit:g} × T0" + (" p95" if self.kind == "p95_x_t0" else "")
        return f"{'≤' if self.kind == 'at_most' else '≥'} {self.limit:g} {self.unit}".rstrip()

    def measured(self, sample: Sample, t0_ms: float) -> str:
        if self.kind in ("x_t0", "p95_x_t0"):
            counted = sample.p95 if self.kind == "p95_x_t0" else sample.p50
            return f"{counted / t0_ms:.2f} × T0 ({sample.p50:.0f} ms, p95 {sample.p95:.0f} ms)"
        return f"{self._value(sample):.4g} {self.unit}".rstrip()

    def met(self, sample: Sample, t0_ms: float) -> bool:
        if self.kind == "x_t0":
            return sample.p50 <= self.limit * t0_ms
        if self.kind == "p95_x_t0":
            return sample.p95 <= self.limit * t0_ms
        value = self._value(sample)
        return value <= self.limit if self.kind == "at_most" else value >= self.limit

    def _value(self, sample: Sample) -> float:
        """Throughput figures are measured as the time a 64 MB transfer takes."""
        return 64_000 / sample.p50 if self.unit == "MB/s" else sample.p50


FIGURES = (
    Figure("create_cold", "create", "create, nothing warm, to the agent's first answer", 3, "x_t0"),
    Figure("exec_true", "exec", "`exec true` on a used sandbox, through the SDK", 1, "x_t0"),
    Figure("file_write_64mb", "files", "write a 64 MB file", 20, "at_least", "MB/s"),
    Figure("file_read_64mb", "files", "read a 64 MB file", 20, "at_least", "MB/s"),
    Figure("idle_pss_mib", "density", "proportional memory of an idle sandbox", 60, "at_most", "MiB"),
    Figure("alive_at_once", "density", "sandboxes alive at once, each answering an exec", 50, "at_least", ""),
    Figure("fork_parent_pause", "fork", "fork, 40 MB dirty: the parent stands still", 0.5, "x_t0"),
    Figure("fork_child_answers", "fork", "fork(1): the child's agent answers", 2, "x_t0"),
    Figure("fork_child_exec", "fork", "fork(1): the child's first exec is done", 5, "x_t0"),
    Figure("fork10_all_answer", "fork", "fork(10): all ten agents answer", 10, "x_t0"),
    Figure(
        "fork_clean_ram", "fork", "fork, 512 MiB more of clean RAM in the guest: times as long", 1.2, "at_most", "×"
    ),
    Figure("sibling_pss_mib", "fork", "extra memory of an idle sibling", 40, "at_most", "MiB"),
    Figure("snapshot_pause_400mb", "snapshot", "snapshot, 400 MB dirty, always written: it stands still", 0.5, "x_t0"),
    Figure("create_snapshot", "snapshot", "create from a snapshot, beside a plain create", 1.3, "at_most", "×"),
    Figure("pause_hot", "pause", "pause", 0.2, "x_t0"),
    Figure("resume_hot", "resume", "resume, soon after", 0.2, "x_t0"),
    Figure("pause_cold", "pause", "pause to disk, 40 MB dirty", 3, "x_t0"),
    Figure("resume_cold", "resume", "resume from disk, to the agent's answer", 3, "x_t0"),
    Figure("create_pool", "pool", "create from the warm pool, to the agent's answer", 0.5, "x_t0"),
    Figure("create_pool_exec", "pool", "its first exec", 1.5, "x_t0"),
    Figure(
        "preview_overhead", "net", "preview request, warm: over the guest's own time, beside nginx", 3, "at_most", "×"
    ),
    Figure("egress_share", "net", "download: of what the host's curl gets, or the guest can take", 50, "at_least", "%"),
    Figure("dns_decision", "net", "answer to a name, allowed or not", 5, "at_most"),
    Figure("preview_websockets", "net", "idle WebSockets through previews, each answering", 1000, "at_least", ""),
    Figure("slot_ready", "net", "network slot from the pool, its door open", 10, "at_most"),
    Figure("git_clone_ratio", "git", "clone, 10,000 files and 2,000 commits: beside `git daemon`", 1.3, "at_most", "×"),
    Figure("git_commit_10_files", "git", "commit of 10 files through the API, p50", 50, "at_most"),
    Figure("git_pushes_lost", "git", "50 pushes to 50 repositories, then 20 to one: lost or damaged", 0, "at_most", ""),
    Figure("volume_1gib_attach", "volumes", "create with a copy of a 1 GiB volume: over one without", 0.5, "x_t0"),
    Figure("volume_1gib_attach_no_pool", "volumes", "the same, and no machine is ready for either", 0.5, "x_t0"),
    Figure(
        "spec_create_ratio",
        "spec",
        "create of a 3-layer spec with a running server, beside a plain one",
        1.3,
        "at_most",
        "×",
    ),
    Figure("first_http_after_create", "spec", "the first answer of that server, through its preview", 5, "x_t0"),
    Figure(
        "freestyle_create_ratio",
        "compat",
        "create and first command through Freestyle's package, beside our own SDK",
        1.3,
        "at_most",
        "×",
    ),
    Figure(
        "e2b_create_ratio", "compat", "create and first command through E2B's package, beside ours", 1.3, "at_most", "×"
    ),
    Figure("burst20_create", "burst", "20 creates at once, nothing warm", 20, "p95_x_t0"),
)

BENCHES = tuple(dict.fromkeys(figure.bench for figure in FIGURES))
