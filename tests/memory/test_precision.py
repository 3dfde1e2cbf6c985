"""Stochastic rounding is right on average, and the loss scale follows its rule."""

from __future__ import annotations

import pytest
import torch

from graft.tests.support.tiny import TinyDataset, TinyDenoiser
from graft.training.config import MemoryConfig, TrainConfig
from graft.training.loop import train
from graft.training.memory.precision import compute_dtype, stochastic_bf16
from graft.training.state import LossScale


def rounded(value, count=20000):
    return stochastic_bf16(torch.full((count,), value), torch.Generator().manual_seed(0)).float()


def test_stochastic_rounding_gives_the_two_neighbors_and_the_value_on_average():
    low, high = 1.0, 1.0078125  # bf16 has 8 bits
    values = rounded(1.002)
    assert set(values.tolist()) == {low, high}
    assert abs(float(values.mean()) - 1.002) < 1e-4


def test_what_bf16_holds_is_not_rounded():
    exact = torch.tensor([0.0, -0.0, 1.5, -3.0e-20, 2.0**100]).bfloat16()
    assert torch.equal(stochastic_bf16(exact.float(), torch.Generator().manual_seed(1)), exact)


def test_infinities_and_nan_stay_themselves():
    odd = torch.tensor([torch.inf, -torch.inf, torch.nan])
    result = stochastic_bf16(odd, torch.Generator().manual_seed(1))
    assert result.isinf().tolist() == [True, True, False] and bool(result[2].isnan())


def test_the_loss_scale_halves_on_overflow_and_doubles_after_a_long_time_without():
    scale = LossScale(1024.0, clean=7)
    assert scale.halved() == LossScale(512.0)
    assert scale.after_step() == LossScale(1024.0, 8)
    assert LossScale(1024.0, 1999).after_step() == LossScale(2048.0)
    assert LossScale(1.0).halved() == LossScale(1.0)
    assert LossScale(2.0**24, 1999).after_step() == LossScale(2.0**24)


def test_the_forward_pass_is_in_the_models_own_format_unless_set():
    denoiser = TinyDenoiser()
    denoiser.dtypes = (torch.float16, torch.bfloat16)
    assert compute_dtype(MemoryConfig(), denoiser) == torch.float16
    assert compute_dtype(MemoryConfig(dtype="bf16"), denoiser) == torch.bfloat16


def test_a_format_that_the_model_cannot_be_computed_in_is_refused_by_name():
    denoiser = TinyDenoiser()
    denoiser.dtypes = (torch.bfloat16, torch.float32)
    with pytest.raises(ValueError, match="precision: tiny cannot be computed in fp16.*one of bf16, fp32"):
        train(denoiser, TinyDataset(), TrainConfig(memory=MemoryConfig(dtype="fp16")), None, steps=1)
