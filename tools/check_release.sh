#!/usr/bin/env bash
# Build sdist and wheel, check them, install the wheel into an empty environment outside the
# repository, and there train, stop, resume, report and audit.
#
#   tools/check_release.sh [PYTHON]     PYTHON has `build` and `twine` (the extra `release`)
set -euo pipefail
python=$(realpath -s "${1:-python3}")
root=$(cd "$(dirname "$0")/.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
step() { echo "== $*"; }

step "sdist and wheel"
"$python" -m build --outdir "$work/dist" "$root" > "$work/build.log" 2>&1 || { cat "$work/build.log"; exit 1; }
"$python" -m twine check --strict "$work"/dist/*

step "the wheel holds the package and nothing else"
"$python" - "$work"/dist/*.whl << 'PY'
import sys, zipfile
names = zipfile.ZipFile(sys.argv[1]).namelist()
stray = [n for n in names if not n.startswith(("dpbam/", "dpbam-"))]
assert not stray, stray
templates = {f"dpbam/app/report/templates/{name}" for name in ("report.html.j2", "page.js")}
missing = {"dpbam/py.typed", *templates} - set(names)
assert not missing, missing
PY

step "an empty environment outside the repository"
"$python" -m venv "$work/venv"
bin=$work/venv/bin
# DPBAM_PIP_ARGS: for example an index with torch's CPU wheels
wheel=$(ls "$work"/dist/*.whl)
"$bin/python" -m pip install --quiet ${DPBAM_PIP_ARGS:-} "$wheel"
cd "$work"

step "the library alone: a private step, and one sentence from the command line"
"$bin/python" "$root/tests/release/library_alone.py"
"$bin/dpbam" --version 2> error && exit 1
grep -q "dpbam\[app\]" error

step "the command line"
"$bin/python" -m pip install --quiet ${DPBAM_PIP_ARGS:-} "$wheel[app]"
"$bin/dpbam" --version

step "train, interrupted"
"$bin/dpbam" train --data digits --epsilon 3 --epochs 12 --checkpoint-every 1 --out run --json-lines > events &
pid=$!
for _ in $(seq 600); do # wait for the first checkpoint
  if compgen -G "run/checkpoints/*" > /dev/null || ! kill -0 $pid 2> /dev/null; then break; fi
  sleep 0.5
done
kill -INT $pid 2> /dev/null || true
wait $pid || code=$?
[ "${code:-0}" = 130 ] || { echo "expected to be interrupted (130), got ${code:-0}"; tail events; exit 1; }

step "resume, report, audit, predict"
"$bin/dpbam" train --resume --out run --quiet
test -s run/privacy-statement.md
"$bin/dpbam" report run --publishable --out report.html
"$bin/dpbam" audit run
"$bin/dpbam" evaluate run --json > /dev/null

step "extras are optional: what needs one names it"
"$bin/dpbam" train --data hf:mnist --epsilon 3 --dry-run 2> error && exit 1
grep -q "dpbam\[hf\]" error
"$bin/dpbam" train --data digits --epsilon 3 --epochs 1 --noise secure --out secure 2> error && exit 1
grep -q "dpbam\[secure\]" error
"$bin/dpbam" train --data digits --epsilon 3 --epochs 1 --tensorboard --out board 2> error && exit 1
grep -q "dpbam\[tensorboard\]" error
echo "release checked: $(ls "$work/dist")"
