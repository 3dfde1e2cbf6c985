"""Many cases against a real ComfyUI with Graft in it, or against the command line: `python dev/sweep.py`."""
