"""Job files (YAML) as graphs of Graft's nodes."""
