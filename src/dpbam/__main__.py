"""``python -m dpbam`` is ``dpbam``."""

from __future__ import annotations

import sys

from dpbam.app.cli import main

if __name__ == "__main__":
    sys.exit(main())
