"""What only maintainers run; not in the wheel."""
