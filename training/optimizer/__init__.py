"""Optimizers, learning-rate schedules, the moving average, and the check that gradients reach every part."""
