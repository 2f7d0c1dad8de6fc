"""Alembic's folder. `env.py` is run by Alembic only; `versions` holds one module a change of the schema."""
