#!/usr/bin/env bash
# Install the programs that the tests need: Redis, PostgreSQL, Chromium, a registry, and tools that check deploy/. If this
# does not run as root, or apt-get is missing, print the command to type. Arguments are further programs, such as
# wrk for `make bench-service`.
set -euo pipefail
bash "$(dirname "$0")/helm.sh"
missing=()
command -v redis-server >/dev/null 2>&1 || missing+=(redis-server)
command -v initdb >/dev/null 2>&1 || ls /usr/lib/postgresql/*/bin/initdb >/dev/null 2>&1 || missing+=(postgresql)
command -v chromium >/dev/null 2>&1 || command -v chromium-browser >/dev/null 2>&1 || command -v google-chrome >/dev/null 2>&1 || missing+=(chromium)
command -v nginx >/dev/null 2>&1 || [ -x /usr/sbin/nginx ] || missing+=(nginx-light)
command -v promtool >/dev/null 2>&1 || missing+=(prometheus)
command -v docker-compose >/dev/null 2>&1 || missing+=(docker-compose)
command -v systemd-analyze >/dev/null 2>&1 || missing+=(systemd)
command -v docker-registry >/dev/null 2>&1 || missing+=(docker-registry)
command -v skopeo >/dev/null 2>&1 || missing+=(skopeo)
command -v openssl >/dev/null 2>&1 || missing+=(openssl)
for program in "$@"; do
  command -v "$program" >/dev/null 2>&1 || missing+=("$program")
done
[ ${#missing[@]} -eq 0 ] && exit 0
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
  echo "installing ${missing[*]}"
  export DEBIAN_FRONTEND=noninteractive UCF_FORCE_CONFFOLD=1
  apt-get update -qq
  # Tests start PostgreSQL themselves, so do not create a cluster for the machine.
  [ -e /etc/postgresql-common ] || { mkdir -p /etc/postgresql-common && echo 'create_main_cluster = false' >/etc/postgresql-common/createcluster.conf; }
  apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
else
  echo "the tests need: ${missing[*]}. Type: sudo apt-get install ${missing[*]}" >&2
  exit 1
fi
