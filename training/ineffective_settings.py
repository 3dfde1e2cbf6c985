"""Settings that have no effect beside others: INEFFECTIVE, a row for each case.

The one rule: settings have the names of their widgets, which no two nodes of settings share, so the config of
a run, that of a dataset and the inputs of a job's graph are looked up in the same way. Tests train to check
that the rows are true, and that a setting without a row has an effect.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .config import TrainConfig, inputs_of
from .family import Family

Values = Mapping[str, Any]
"""Setting -> its value; a frozenset of values if it differs between layers."""


class OtherThan(tuple[Any, ...]):
    """All values but these."""

    def __contains__(self, value: object) -> bool:
        return not super().__contains__(value)


def other_than(*values: Any) -> OtherThan:
    return OtherThan(values)


@dataclass(frozen=True)
class Ineffective:
    """Settings that have no effect while every setting in `beside` has one of its values there."""

    settings: tuple[str, ...]
    beside: Mapping[str, Collection[Any]]
    on: str = ""
    """What they have no effect on; empty: anything."""

    def holds(self, values: Values) -> bool:
        return all(value in allowed for name, allowed in self.beside.items() for value in _each(values[name]))

    def why(self, values: Values) -> str:
        """Return for instance "has no effect with schedule cosine; it is for restarts"."""
        where = " and ".join(f"{name} {_shown(values[name])}" for name in self.beside)
        needed = [allowed for allowed in self.beside.values() if isinstance(allowed, OtherThan)]
        hint = f"; it is for {' and '.join(map(str, tuple(needed[0])))}" if needed else ""
        return f"has no effect{self.on and f' on {self.on}'} with {where}{hint}"


INEFFECTIVE = (
    Ineffective(("floor",), {"schedule": ("constant",)}),
    Ineffective(("cycles",), {"schedule": other_than("restarts")}),
    Ineffective(("power",), {"schedule": other_than("polynomial")}),
    Ineffective(("d_coef",), {"optimizer": other_than("prodigy", "prodigy-plus-schedule-free")}),
    Ineffective(("beta1",), {"optimizer": ("adafactor",)}),
    Ineffective(("beta2",), {"optimizer": ("adafactor", "muon", "sgd")}),
    Ineffective(("eps",), {"optimizer": ("adafactor", "came", "lion", "lion8bit", "muon", "sgd")}),
    Ineffective(("ema_power",), {"ema_decay": (0.0,)}),
    Ineffective(("shift",), {"resolution_shift": ("flux", "ltx")}),
    Ineffective(("mean",), {"sigmas": other_than("logit-normal")}),
    Ineffective(("std",), {"sigmas": other_than("logit-normal", "sigmoid")}),
    Ineffective(("mode_scale",), {"sigmas": other_than("mode")}),
    Ineffective(("noise_range",), {"min_noise": (0.0,), "max_noise": (1.0,)}),
    Ineffective(("huber_delta",), {"loss": other_than("huber", "pseudo-huber")}),
    Ineffective(("min_snr_gamma",), {"weighting": other_than("min-snr")}),
    Ineffective(("preservation_share",), {"preservation": (0.0,)}),
    Ineffective(("factor", "decompose_both", "full_matrix"), {"algorithm": other_than("lokr")}),
    Ineffective(("decompose_both",), {"full_matrix": (True,)}),
    Ineffective(
        ("rank", "alpha", "rslora", "rank_dropout"), {"algorithm": ("lokr",), "full_matrix": (True,)}
    ),
    Ineffective(("rank", "rank_dropout"), {"algorithm": ("full",)}),
    Ineffective(("alpha", "rslora"), {"algorithm": ("oft", "boft", "full")}),
)


def ineffective_settings(
    values: Values, defaults: Values, rows: Sequence[Ineffective] = INEFFECTIVE
) -> dict[str, str]:
    """Return {setting: reason} for settings that are not at their defaults and have no effect."""
    return {
        name: row.why(values)
        for row in rows
        if row.holds(values)
        for name in row.settings
        if values[name] != defaults[name]
    }


def ineffective_notes(
    values: Values, defaults: Values, rows: Sequence[Ineffective] = INEFFECTIVE
) -> list[str]:
    """Return a sentence for every setting that is not at its default and has no effect."""
    return [
        f"{name} {_shown(values[name])} {why}."
        for name, why in ineffective_settings(values, defaults, rows).items()
    ]


def run_settings(config: TrainConfig, family: Family | None = None) -> Values:
    """Return the settings of a run, by their widgets' names; sigmas "auto" is the family's."""
    adapter, sigmas = config.adapter, config.objective.sigmas
    return {
        **inputs_of(config),
        "algorithm": frozenset({adapter.algorithm, *(name for _, name in adapter.algorithms)}),
        "sigmas": family.sigmas if family and sigmas == "auto" else sigmas,
    }


def _each(value: Any) -> Collection[Any]:
    return value if isinstance(value, frozenset) else (value,)


def _shown(value: Any) -> str:
    return ", ".join(f"{v:g}" if isinstance(v, float) else str(v) for v in sorted(_each(value)))
