"""Graft without the editor: jobs from files, and several processes for one run."""
