"""How the first starter model was made."""
