"""LoRA Settings: what Build LoRA leaves at its default, between it and Train Steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

from comfy_api.latest import io

from ..training.adapters.preset import apply_preset
from ..training.config import AdapterConfig
from ..training.user_error import UserError
from .node import Node
from .sockets import Lora, schema
from .widgets import widget

T = TypeVar("T")


class LoraSettings(Node):
    """Dropout, starting values, and what differs from layer to layer."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="GraftLoraSettings",
            display_name="LoRA Settings",
            description="Dropout, starting values, LoKr's shape, and ranks and learning rates by layer.",
            search_aliases=["graft", "dropout", "rslora", "pissa", "lora+", "per-layer", "block"],
            inputs=[
                Lora.Input("lora", tooltip="From Build LoRA."),
                widget(AdapterConfig, "dropout", "Share of a layer's inputs left out in a step.", high=0.99),
                widget(AdapterConfig, "rank_dropout", "Share of the rank left out in a step.", high=0.99),
                widget(AdapterConfig, "module_dropout", "Share of the layers left out in a step.", high=0.99),
                widget(
                    AdapterConfig,
                    "max_norm",
                    "Largest change of a layer's weight, as its norm; 0 is no limit.",
                    high=1000,
                ),
                widget(
                    AdapterConfig,
                    "lora_plus_ratio",
                    "LoRA+: how much faster the factor that starts at zero learns; 16 is its authors'.",
                    low=0.01,
                    high=1000,
                ),
                widget(
                    AdapterConfig,
                    "rslora",
                    "Scale by alpha / root of the rank: every rank learns as fast.",
                ),
                widget(
                    AdapterConfig,
                    "init",
                    "Starting values; pissa starts at the base's principal components.",
                    options=["default", "gaussian", "pissa"],
                ),
                widget(AdapterConfig, "tucker", "Of convolutions: decompose the kernel too."),
                widget(
                    AdapterConfig,
                    "factor",
                    "Of LoKr: size of the small factor; -1 divides evenly.",
                    low=-1,
                    high=1024,
                ),
                widget(AdapterConfig, "decompose_both", "Of LoKr: decompose the small factor too."),
                widget(AdapterConfig, "full_matrix", "Of LoKr: decompose neither factor."),
                widget(
                    AdapterConfig,
                    "blocks",
                    'Which of the model\'s blocks: "0-11, 18, 30-", early, middle or late. Empty: all.',
                ),
                *(
                    io.String.Input(
                        name,
                        default="",
                        multiline=True,
                        tooltip=f"One a line: pattern of layer names = {what}. The first match counts.",
                    )
                    for name, what in (
                        ("learning_rates", "multiple of the learning rate, e.g. *attn* = 0.5"),
                        ("ranks", "rank, e.g. *mlp* = 8"),
                        ("alphas", "alpha, e.g. *mlp* = 4"),
                        ("algorithms", "algorithm, e.g. *mlp* = lokr"),
                    )
                ),
                io.String.Input(
                    "preset",
                    default="",
                    multiline=True,
                    optional=True,
                    tooltip="A preset in LyCORIS's JSON layout: which layers, in place of Build LoRA's "
                    "targets, and algorithm and rank of each. The patterns above come first.",
                ),
            ],
            outputs=[Lora.Output("lora_changed", display_name="lora")],
        )

    @classmethod
    def execute(
        cls,
        lora: AdapterConfig,
        learning_rates: str,
        ranks: str,
        alphas: str,
        algorithms: str,
        preset: str = "",
        **values: Any,
    ) -> io.NodeOutput:
        lora = replace(lora, **values)
        lora = apply_preset(preset, lora) if preset.strip() else lora
        return io.NodeOutput(
            replace(
                lora,
                lrs=(*_rows("learning_rates", learning_rates, float), *lora.lrs),
                ranks=(*_rows("ranks", ranks, int), *lora.ranks),
                alphas=(*_rows("alphas", alphas, float), *lora.alphas),
                algorithms=(*_rows("algorithms", algorithms, str), *lora.algorithms),
            )
        )


def _rows(name: str, text: str, convert: Callable[[str], T]) -> tuple[tuple[str, T], ...]:
    """Return lines of "pattern = value" as pairs."""
    rows = []
    for line in text.splitlines():
        pattern, _, value = (part.strip() for part in line.rpartition("="))
        try:
            if line.strip():
                rows.append((pattern, convert(value)))
        except ValueError:
            pattern = ""
        if line.strip() and not pattern:
            raise UserError(f"{name}: {line.strip()!r} is not a line like *attn* = 0.5")
    return tuple(rows)
