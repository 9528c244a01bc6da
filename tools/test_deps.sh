#!/usr/bin/env bash
# Install what some tests need of the system: as root, on Debian and its descendants.
#
#   make test-deps
#
# Without chromium the pages are tested in no browser; without ip a run on two hosts is not tested.
set -euo pipefail
wanted=()
command -v chromium chromium-browser google-chrome > /dev/null || wanted+=(chromium)
command -v chromedriver > /dev/null || wanted+=(chromium-driver)
command -v ip > /dev/null || wanted+=(iproute2)
[ ${#wanted[@]} -gt 0 ] || { echo "nothing to install: chromium, chromedriver and ip are there"; exit 0; }

if ! command -v apt-get > /dev/null; then
  echo "this installs by apt-get, which is not here: install ${wanted[*]} by your own system" >&2
  exit 1
fi
as_root=()
if [ "$(id -u)" != 0 ]; then
  command -v sudo > /dev/null || { echo "run it as root: it installs ${wanted[*]}" >&2; exit 1; }
  as_root=(sudo)
fi
"${as_root[@]}" apt-get update --quiet=2
DEBIAN_FRONTEND=noninteractive "${as_root[@]}" apt-get install --quiet=2 --yes \
  --no-install-recommends "${wanted[@]}"
echo "installed: ${wanted[*]}"
