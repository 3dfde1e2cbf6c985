"""What is kept, recomputed, quantized or moved during a step."""
