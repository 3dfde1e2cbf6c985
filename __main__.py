"""`python -m graft`: the same as the `graft` command."""

import sys

from .training.cli import main

sys.exit(main())
