"""What the API process needs to know, validated once in `main` and passed down.

Every field can come from the environment (`PERMILLE_DATA_DIR`, `PERMILLE_PORT`, ...) or from a keyword.
There is no default secret: tokens and keys are made at the first start, below the data folder, readable by
their owner alone.
"""

import ipaddress
from pathlib import Path
from typing import Self

from pydantic import Field, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

MIB = 1024 * 1024
DAY_S = 86_400.0


class Settings(BaseSettings):
    """Settings of one API process."""

    model_config = SettingsConfigDict(env_prefix="PERMILLE_", frozen=True, extra="ignore")

    data_dir: Path = Field(description="folder of the database, the blobs and the keys")
    host: str = Field(default="127.0.0.1", description="address to bind; other than loopback needs TLS")
    port: int = Field(default=8321, ge=0, le=65_535)
    database_url: str = Field(default="", description="default: SQLite below the data folder")
    blob_root: Path = Field(default=Path(), description="default: `blobs` below the data folder")
    model_root: Path = Field(default=Path(), description="default: `models` below the data folder")
    corpus_root: Path = Field(default=Path(), description="default: `corpora` below the data folder")
    tls_certificate: Path | None = None
    tls_key: Path | None = None
    allowed_hosts: tuple[str, ...] = Field(default=(), description="host names to answer to beside loopback")
    max_body_bytes: int = Field(default=MIB, ge=1024)
    max_log_bytes: int = Field(default=64 * MIB, ge=1024)
    enrolments_per_minute: int = Field(default=60, ge=1, description="enrolments and tokens, by address")
    stream_s: float = Field(
        default=900.0, gt=0, description="an event stream ends after this; clients resume"
    )
    memory_bytes: int | None = Field(
        default=None, ge=1, description="memory a job may use; default: what is free"
    )
    flops_per_s: float | None = Field(default=None, gt=0, description="default: 8e9 a processor core")
    max_job_s: float = Field(default=7 * DAY_S, gt=0, description="a job that takes longer is refused")

    @model_validator(mode="after")
    def _complete(self) -> Self:
        defaults: dict[str, object] = {
            "database_url": f"sqlite:///{self.data_dir.absolute() / 'permille.db'}",
            "blob_root": self.data_dir / "blobs",
            "model_root": self.data_dir / "models",
            "corpus_root": self.data_dir / "corpora",
        }
        for name, value in defaults.items():
            if getattr(self, name) in ("", Path()):
                object.__setattr__(self, name, value)
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ValueError("expected tls_certificate and tls_key together, got one of them")
        if not is_loopback(self.host) and self.tls_certificate is None:
            raise ValueError(
                f"expected tls_certificate and tls_key for a bind other than loopback, got neither for {self.host!r}"
            )
        return self

    @property
    def token_path(self) -> Path:
        """Where the first operator token is written, mode 0600."""
        return self.data_dir / "operator.token"

    @property
    def url_path(self) -> Path:
        """Where the URL of a running service is written."""
        return self.data_dir / "service.url"

    @property
    def keys_dir(self) -> Path:
        """Folder of the private keys, mode 0700."""
        return self.data_dir / "keys"


def is_loopback(host: str) -> bool:
    """Whether an address or name can only be reached from this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
