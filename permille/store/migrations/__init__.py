"""Migrations of the schema. Alembic runs `env.py`, and `versions` holds one module for each change."""
