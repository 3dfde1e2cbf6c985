"""What is kept, recomputed, quantised or moved during a step."""
