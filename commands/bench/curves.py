"""Learning curves, and what follows from them: who reaches what the reference reaches, in how many steps.

A curve has the values of one run, by metric; METRICS says of each whether less is better. Every trainer is
compared at its best rate: that with the least loss of its first seed. The reference is ComfyUI's node.
`steps_to_match`: a trainer's steps to the node's best value over the node's own, the median of the seeds.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

REFERENCE = "comfyui"
METRICS: Mapping[str, bool] = {"loss": True, "object": False, "style": False}
"""What is compared -> whether less of it is better."""

Values = Mapping[str, float]
"""Metric -> value."""


@dataclass
class Curve:
    """One run: what was measured after every few steps."""

    task: str
    trainer: str
    seed: int
    lr: float
    steps: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    """Of one CPU thread since the first step, without the measuring."""
    values: dict[str, list[float]] = field(default_factory=dict)
    """Metric -> value at each of `steps`."""

    def add(self, values: Values) -> None:
        """Append the values of a step."""
        for metric, value in values.items():
            self.values.setdefault(metric, []).append(round(value, 5))

    def best(self, metric: str) -> float:
        """Return the best value on the curve."""
        return best_of(metric, self.values[metric])

    def first_step(self, metric: str, goal: float) -> int | None:
        """Return the first step at which the curve is at least as good as `goal`."""
        points = zip(self.steps, self.values[metric])
        return next((step for step, value in points if best_of(metric, (value, goal)) == value), None)


@dataclass
class Watch:
    """Measures a run every few steps; the time that this takes is not counted."""

    curve: Curve
    every: int
    began: float = field(default_factory=time.process_time)

    def look(self, step: int, measure: Callable[[], Values]) -> None:
        if step % self.every:
            return
        now = time.process_time()
        self.curve.steps.append(step)
        self.curve.seconds.append(round(now - self.began, 2))
        self.curve.add(measure())
        self.began += time.process_time() - now


def best_of(metric: str, values: Iterable[float]) -> float:
    """Return the best of some values of a metric."""
    return min(values) if METRICS[metric] else max(values)


def best_rate(curves: Sequence[Curve]) -> float:
    """Return the learning rate of the curve with the best value of the first metric."""
    metric = next(iter(METRICS))
    best = best_of(metric, (curve.best(metric) for curve in curves))
    return next(curve.lr for curve in curves if curve.best(metric) == best)


def compare(curves: Sequence[Curve]) -> dict[str, Any]:
    """Return, by task, each trainer's best rate, and by metric what it reaches there and how soon."""
    found: dict[str, Any] = {}
    for task in dict.fromkeys(curve.task for curve in curves):
        own = [curve for curve in curves if curve.task == task]
        rates = {
            trainer: best_rate([c for c in own if (c.trainer, c.seed) == (trainer, own[0].seed)])
            for trainer in dict.fromkeys(curve.trainer for curve in own)
        }
        at_best = [curve for curve in own if curve.lr == rates[curve.trainer]]
        metrics = [metric for metric in METRICS if metric in own[0].values]
        found[task] = {
            "best_rate": rates,
            "metrics": {metric: _compare_metric(at_best, metric) for metric in metrics},
        }
    return found


def _compare_metric(curves: Sequence[Curve], metric: str) -> dict[str, Any]:
    found: dict[str, Any] = {"best": {}, "steps_to_match": {}, "by_seed": {}}
    for trainer in dict.fromkeys(curve.trainer for curve in curves):
        own = [curve for curve in curves if curve.trainer == trainer]
        found["best"][trainer] = round(statistics.median(curve.best(metric) for curve in own), 5)
        if any(curve.trainer == REFERENCE for curve in curves):
            ratios = [_ratio(curves, trainer, seed, metric) for seed in dict.fromkeys(c.seed for c in own)]
            found["by_seed"][trainer] = ratios
            # A seed that never gets there counts as the worst.
            ordered = sorted(ratios, key=lambda ratio: float("inf") if ratio is None else ratio)
            found["steps_to_match"][trainer] = ordered[len(ordered) // 2]
    return found


def _ratio(curves: Sequence[Curve], trainer: str, seed: int, metric: str) -> float | None:
    """Return a trainer's steps to the reference's best value over the reference's; None if it never does."""
    mine, reference = (
        next((curve for curve in curves if (curve.trainer, curve.seed) == (name, seed)), None)
        for name in (trainer, REFERENCE)
    )
    if not mine or not reference:
        return None
    goal = reference.best(metric)
    steps, its = mine.first_step(metric, goal), reference.first_step(metric, goal)
    return round(steps / its, 3) if steps and its else None
