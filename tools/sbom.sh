#!/usr/bin/env bash
# Write what a release depends on as CycloneDX JSON: the wheel in an environment of its own.
#
#   tools/sbom.sh DIST OUT.json
set -euo pipefail
dist=$(realpath "$1")
out=$(realpath "$2")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/release"
"$work/release/bin/python" -m pip install --quiet ${DPBAM_PIP_ARGS:-} "$(ls "$dist"/*.whl)[app]"
python3 -m venv "$work/tool"
"$work/tool/bin/python" -m pip install --quiet "cyclonedx-bom>=5,<8"
"$work/tool/bin/cyclonedx-py" environment "$work/release/bin/python" --output-format JSON \
  --output-file "$out"
