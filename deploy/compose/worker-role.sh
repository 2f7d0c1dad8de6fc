#!/bin/sh
# Makes the database role of workers. PostgreSQL's image runs this once, when it makes the database.
set -eu
psql -v ON_ERROR_STOP=1 -v password="$WORKER_PASSWORD" -U "$POSTGRES_USER" -d "$POSTGRES_USER" <<'SQL'
CREATE ROLE permille_worker LOGIN PASSWORD :'password';
SQL
