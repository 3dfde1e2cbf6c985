"""Objective Settings: noise and loss. Tooltips are in training/config.py."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

from ..training.config import ObjectiveConfig
from ..training.objective.sigmas import SIGMAS
from ..training.objective.weighting import LOSSES, SPACES, WEIGHTINGS
from .node import Node
from .sockets import Objective, schema
from .widgets import read, widgets


class ObjectiveSettings(Node):
    """Which noise levels are trained at, and how the loss is computed."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        menus = {
            "sigmas": ["auto", *SIGMAS],
            "loss": LOSSES,
            "space": ["auto", *SPACES],
            "weighting": WEIGHTINGS,
        }
        return schema(
            node_id="GraftObjectiveSettings",
            display_name="Objective Settings",
            description="Noise levels, added noise, loss and its weighting, preservation.",
            search_aliases=[
                *("graft", "timestep", "sigma", "shift", "min-snr", "huber", "noise offset"),
                *("prior preservation", "differential output preservation", "DOP"),
            ],
            inputs=widgets(ObjectiveConfig, **menus),
            outputs=[Objective.Output("objective_settings")],
        )

    @classmethod
    def execute(cls, **values: Any) -> io.NodeOutput:
        return io.NodeOutput(read(ObjectiveConfig(), values))
