"""A run: training with a key and a folder. `execute.py` reads from top to bottom."""
