"""Files: checked before they are believed, and written whole or not at all."""
