"""Programs for those who maintain Graft. They are not installed with it."""
