"""Memory of a step: what is saved, recomputed, quantized or offloaded, and the plan that decides it."""
