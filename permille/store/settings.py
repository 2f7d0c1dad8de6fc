"""The settings that service and workers share: each program's own settings extend these.

Read from the environment with the prefix PERMILLE_ (PERMILLE_DATABASE_URL ...), once, in `main`.
"""

from pathlib import Path

from pydantic import SecretStr
from pydantic_settings import BaseSettings, SettingsConfigDict


class StoreSettings(BaseSettings):
    """Where the rows, the blobs and the inputs are.

    Attributes:
        database_url: `sqlite:////absolute/path.db` or `postgresql+psycopg://...`.
        blob_root: folder of the blob store.
        model_root: folder below which models may be registered.
        corpus_root: folder below which corpora may be registered.
        work_root: scratch folder of jobs: checkpoints, spilled scores. May be erased while no job runs.
        broker_url: `redis://...` to carry jobs by Celery; None: local workers look into the database.
    """

    model_config = SettingsConfigDict(env_prefix="PERMILLE_", extra="ignore", frozen=True)

    database_url: SecretStr
    blob_root: Path
    model_root: Path
    corpus_root: Path
    work_root: Path
    broker_url: SecretStr | None = None
