"""Write the JSON schema of the privacy statement from its type, into the documentation.

python tools/statement_schema.py
"""

from __future__ import annotations

import json
from pathlib import Path

from dpbam.app.runs.documents import Statement
from dpbam.app.runs.files import FORMAT

TARGET = Path(__file__).parents[1] / "docs" / "assets" / "privacy-statement.schema.json"


def schema() -> str:
    """Return the schema as text."""
    values = Statement.model_json_schema(mode="validation")
    head = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"dpbam privacy statement, format {FORMAT}",
        "description": 'privacy-statement.json of a run folder. Infinity is the word "infinite".',
    }
    rest = {key: value for key, value in values.items() if key not in ("title", "description")}
    return json.dumps({**head, **rest}, indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    TARGET.write_text(schema(), encoding="utf-8")
