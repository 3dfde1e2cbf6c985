"""Methods that multiply the base weight instead of adding to it: their difference is a function of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor

from ..config import AdapterConfig
from ..frozen_base.frozen_layer import LayerSpec
from ..user_error import UserError
from .base import Adapter


class Multiplied(Adapter):
    """An adapter whose difference is `change` of the base weight."""

    multiplies_base: ClassVar[bool] = True

    def __init__(self, spec: LayerSpec, config: AdapterConfig) -> None:
        super().__init__(spec, config)
        if config.max_norm:
            raise UserError(
                f"max_norm limits a difference that {config.algorithm} does not have without the base: set "
                "it to 0."
            )

    @staticmethod
    def change(weights: Mapping[str, Tensor], base: Tensor, strength: float = 1.0) -> Tensor:
        """Return what ComfyUI's loader adds to `base` at `strength`, before scaling, in its shape.

        `weights` are the parameters by name.
        """
        raise NotImplementedError

    def delta(self, base: Tensor | None = None) -> Tensor:
        if base is None:
            raise UserError(
                f"{self.config.algorithm} multiplies the base weight; give it, as in delta(base)."
            )
        return self.scale * self.change(dict(self.named_parameters()), base)
