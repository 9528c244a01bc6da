"""``dpbam``, and ``python -m dpbam``: the command line, if its packages are installed."""

from __future__ import annotations

import sys
from importlib.util import find_spec

#: What ``dpbam[app]`` brings, as it is imported; the library needs none of them.
APP_PACKAGES = (
    "pydantic", "typer", "rich", "PIL", "pooch", "sklearn", "vl_convert", "jinja2",
    "tomli_w", "filelock", "markdown_it",
)  # fmt: skip


def main() -> int:
    """Run the command line; without its packages, say how to install them."""
    if missing := [name for name in APP_PACKAGES if find_spec(name) is None]:
        print(
            f"the command line needs packages that are not installed ({', '.join(missing)}): "
            "pip install 'dpbam[app]'",
            file=sys.stderr,
        )
        return 2
    from dpbam.app.cli import main as run

    return run()


if __name__ == "__main__":
    sys.exit(main())
