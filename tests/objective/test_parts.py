"""A slider of a method that ComfyUI applies otherwise below 0 is refused before its first step."""

from __future__ import annotations

from dataclasses import replace

import pytest

from graft.training.adapters.build import ADAPTERS
from graft.training.loop import train

from ..support.adapter_cases import adapter_config, train_config
from ..support.tiny import TinyDataset, TinyDenoiser


class Pairs(TinyDataset):
    """Every picture with the next as its opposite."""

    def batch(self, size, *, seed, index):
        own, other = (super(Pairs, self).batch(size, seed=seed, index=index + i) for i in range(2))
        return replace(own, opposite=other)

    def largest_batch(self, size):
        return self.batch(size, seed=0, index=0)


@pytest.mark.parametrize("method", ["lora", *(name for name in ADAPTERS if name in ("oft", "boft", "glora"))])
def test_a_slider_needs_a_method_with_an_opposite(method):
    def run():
        return train(TinyDenoiser(), Pairs(), train_config(adapter_config(method)), None, steps=1)

    if ADAPTERS[method].has_opposite:
        assert run().step == 1
    else:
        with pytest.raises(ValueError, match=f"does not apply {method} there as it was trained"):
            run()
