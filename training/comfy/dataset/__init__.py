"""Datasets in the editor: what Load Dataset shows, and the files that a browser sends to it."""
