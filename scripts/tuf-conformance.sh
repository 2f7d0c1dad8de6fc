#!/usr/bin/env bash
# Run the conformance suite of TUF against the agent's client, in a separate environment. No test may fail. The
# suite is on no package index, so pip installs the pinned commit from GitHub. PERMILLE_TUF_CONFORMANCE can name a
# checkout of that commit instead. Some tests of the suite set the clock with `faketime`.
set -euo pipefail
commit=eec841c186f81f2d9d8d30460c7e7deefa615f9e
folder=build/tuf-conformance
if ! command -v faketime >/dev/null 2>&1; then
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends faketime >/dev/null
  else
    echo "the suite needs faketime. Type: sudo apt-get install faketime" >&2
    exit 1
  fi
fi
if [ ! -e "$folder/.installed" ]; then
  .venv/bin/python -m venv "$folder"
  "$folder/bin/python" -m pip --disable-pip-version-check --quiet install \
    "${PERMILLE_TUF_CONFORMANCE:-git+https://github.com/theupdateframework/tuf-conformance@$commit}"
  touch "$folder/.installed"
fi
suite=$("$folder/bin/python" -c 'import tuf_conformance; print(tuf_conformance.__path__[0])')
exec "$folder/bin/python" -m pytest -c /dev/null --rootdir "$suite" -p no:cacheprovider -q "$suite" \
  --entrypoint "$PWD/.venv/bin/python -m tests.conformance.client"
