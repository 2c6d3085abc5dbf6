"""What holds the user's config back, from the ceilings of its two halves.

A new rule is a new row of `RULES`; the first whose evidence is decisive speaks first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from autotune.metrics import METRICS, throughput
from autotune.types import Config, Estimate, Finding, Label, Sink, Source, Stage, Trial

MODERATE_PCT = 5.0
"""Data wait above which the loader holds the device back (METHODS 5)."""
WAITING_WORKER = 0.6
"""Share of a core below which a worker mostly waits for storage or the network."""
DISTURBED: dict[Label, str] = {
    Label.CONTENDED: "other processes were using the machine",
    Label.THROTTLED: "the device was throttled",
    Label.COLD: "the data came from storage, not from the page cache",
}
"""Labels of rows that are taken only where there are no others, and what is said then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What the rules look at: the baseline, and what each half can do alone."""

    baseline: Trial
    wait_pct: float
    speed: Estimate
    device: Estimate | None
    worker_share: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One bottleneck: when it is the one, and what to say then."""

    bottleneck: str
    holds: Callable[[Evidence], bool]
    advice: str


def diagnose(trials: Sequence[Trial], baseline: Config) -> list[Finding]:
    """The findings about the baseline; none where it gave no trustworthy number."""
    evidence = _gathered(trials, baseline)
    if evidence is None:
        return []
    return [
        Finding(
            bottleneck=rule.bottleneck,
            evidence=_told(evidence),
            advice=rule.advice,
            gain=_gain_if_fed(evidence) if evidence.wait_pct > MODERATE_PCT else None,
        )
        for rule in RULES
        if rule.holds(evidence)
    ][:1]


def _is_starved(evidence: Evidence) -> bool:
    return evidence.wait_pct > MODERATE_PCT


def _mostly_waits(evidence: Evidence) -> bool:
    share = evidence.worker_share
    return _is_starved(evidence) and share is not None and share < WAITING_WORKER


RULES: tuple[Rule, ...] = (
    Rule(
        bottleneck="data-starved: storage",
        holds=_mostly_waits,
        advice="loading waits rather than computes: more workers, past the cores too",
    ),
    Rule(
        bottleneck="data-starved: CPU preprocessing",
        holds=lambda e: _is_starved(e) and e.worker_share is not None,
        advice="loading computes: workers up to the cores, then cheaper transforms",
    ),
    Rule(
        bottleneck="data-starved",
        holds=_is_starved,
        advice="more loader workers",
    ),
    Rule(
        bottleneck="device-bound",
        holds=lambda e: True,
        advice="the loader keeps up: a larger micro-batch, another precision, a faster device",
    ),
)


def _gathered(trials: Sequence[Trial], baseline: Config) -> Evidence | None:
    row = _last(trials, lambda t: t.end_to_end and t.config == baseline)
    if row is None or row.measurement is None:
        return None
    speed = throughput(row.measurement)
    wait_pct = METRICS["data_wait_pct"].compute(row.measurement)
    if speed is None or wait_pct is None:
        return None
    device = _last(trials, lambda t: t.source is Source.CACHED and t.config == baseline)
    loader = _last(trials, lambda t: t.sink is Sink.DISCARD and t.config == baseline)
    return Evidence(
        baseline=row,
        wait_pct=wait_pct,
        speed=speed,
        device=throughput(device.measurement) if device and device.measurement else None,
        worker_share=_busy_share(loader),
    )


def _last(trials: Sequence[Trial], fits: Callable[[Trial], bool]) -> Trial | None:
    """The newest row; of the undisturbed ones, where there are any."""
    found = [t for t in trials if t.ok and t.stage is not Stage.INSPECT and fits(t)]
    calm = [t for t in found if not DISTURBED.keys() & set(t.labels)]
    rows = calm or found
    return rows[-1] if rows else None


def _busy_share(loader: Trial | None) -> float | None:
    """Share of a core that a loading process uses while it loads as fast as it can."""
    measured = None if loader is None else loader.measurement
    if measured is None or measured.cpu_s is None:
        return None
    seconds = (measured.end_ns - measured.start_ns) / 1e9
    if seconds <= 0:
        return None
    if not measured.workers:
        return measured.cpu_s / seconds
    return (measured.worker_cpu_s or 0.0) / seconds / min(measured.workers, measured.cpus)


def _gain_if_fed(evidence: Evidence) -> float | None:
    """How many times faster the job would be if it never waited for data."""
    if evidence.device is not None:
        return max(1.0, evidence.device.value / evidence.speed.value)
    return 1 / max(1 - evidence.wait_pct / 100, 1e-3)


def _told(evidence: Evidence) -> str:
    told = f"{evidence.wait_pct:.0f} % of the time the step waits for data"
    if evidence.device is not None:
        told += (
            f"; the device alone makes {evidence.device.value:.0f} samples/s, "
            f"the whole job {evidence.speed.value:.0f}"
        )
    if evidence.worker_share is not None:
        busy = 100 * min(1.0, evidence.worker_share)
        told += f"; a loading process is busy {busy:.0f} % of the time"
    for label in evidence.baseline.labels:
        if label in DISTURBED:
            told += f"; less sure, as {DISTURBED[label]}"
    return told
