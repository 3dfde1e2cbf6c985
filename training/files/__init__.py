"""Files: checked before use, and written whole or not at all."""
