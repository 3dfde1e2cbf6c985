"""Programs for maintainers. They are not installed with Graft."""
