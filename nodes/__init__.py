"""Graft's nodes: a schema and a call each. The engine is in `training/`."""
