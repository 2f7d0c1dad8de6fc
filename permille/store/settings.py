"""Settings that the service and the workers share. Each program extends them with its own settings.

`main` of each program reads them once from environment variables with the prefix PERMILLE_, such as
PERMILLE_DATA_DIR.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Self
from urllib.parse import parse_qs, parse_qsl, urlsplit

from pydantic import AfterValidator, Field, SecretStr, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from permille.schemas.fields import MAX_INTEGER
from permille.telemetry import LogFormat

PREFIX = "PERMILLE_"
_BUCKET: Final = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]", re.ASCII)
_PREFIX: Final = re.compile(r"([A-Za-z0-9_-][A-Za-z0-9._-]*(/[A-Za-z0-9_-][A-Za-z0-9._-]*)*)?", re.ASCII)

_HOST: Final = re.compile(r"[a-z0-9._-]+|[0-9a-f:.]+", re.ASCII)
_HEADER_WORD: Final = re.compile(r"[!-~]+", re.ASCII)
MAX_S: Final = 1e9
"""Limit of all durations, in seconds. The clocks of Python and of the database cannot add much more."""
# In the message of pydantic's SettingsError. Only lists are parsed as JSON.
_FIELD: Final = re.compile(r'error parsing value for field "(\w+)"', re.ASCII)
_REQUIREMENTS: Final = ("required", "optional", "none")
# The options of a broker's URL, and their values. None allows any value. With other options, the service
# would start, and then fail at each request.
_BROKER_OPTIONS: Final[dict[str, tuple[str, ...] | None]] = {
    "ssl_cert_reqs": (*_REQUIREMENTS, *(f"CERT_{one.upper()}" for one in _REQUIREMENTS)),
    **dict.fromkeys(("ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_check_hostname")),
}
_REGION: Final = re.compile(r"[a-z0-9-]{1,63}", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketAddress:
    """The name of a bucket, the prefix of all keys in it, its endpoint and its region. Without an endpoint,
    the bucket is at AWS.
    """

    bucket: str
    prefix: str
    endpoint: str | None
    region: str | None

    @classmethod
    def parse(cls, text: str) -> "BucketAddress":
        """Parse `s3://bucket/prefix?endpoint=https://host&region=name`. Only the bucket is required.

        Raises:
            ValueError: the address does not have this form, or contains a user or a password.

        Example:
            >>> BucketAddress.parse("s3://models/team?endpoint=https://minio.example.org").prefix
            'team'
        """
        try:
            parts, prefix = urlsplit(text), urlsplit(text).path.strip("/")
            # With strict parsing, a malformed parameter is an error. Otherwise it would be ignored.
            asked = parse_qs(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
            endpoint, region = asked.pop("endpoint", [None])[-1], asked.pop("region", [None])[-1]
            at = urlsplit(endpoint or "https://aws")
            well_formed = (
                parts.scheme == "s3"
                and _BUCKET.fullmatch(parts.netloc)
                and _PREFIX.fullmatch(prefix)
                and not (asked or parts.fragment or at.query or at.fragment)
                and at.scheme in ("http", "https")
                and _HOST.fullmatch(at.hostname or "")
                and at.port != 0
                and "@" not in at.netloc
                and (region is None or _REGION.fullmatch(region))
            )
        except ValueError:
            well_formed = False
        if not well_formed:
            # The message does not quote the address, or urllib's error about it: they may hold a secret.
            raise ValueError(
                "expected s3://bucket/prefix?endpoint=https://host&region=name, got another form"
            )
        return cls(bucket=parts.netloc, prefix=prefix, endpoint=endpoint, region=region)


@dataclass(frozen=True, slots=True, kw_only=True)
class Quota:
    """Limits on the reports and uploads of one device, per day and in total (`permille.store.uploads`).

    Attributes:
        outstanding: how many uploads of the device may arrive or wait for their check at the same time.
    """

    runs_a_day: int
    uploads_a_day: int
    bytes_a_day: int
    outstanding: int
    runs_kept: int
    uploads_kept: int
    bytes_kept: int


class SettingsGroup(BaseSettings):
    """A group of settings that belong together.

    `make settings` writes the operator's reference from these classes. There, the docstring of a group is
    a heading, and the description of a field explains its variable. The settings class of a program inherits
    from the groups that the program reads. It does not nest them, because the name of a nested group would
    be part of each variable. For example, the variable of the field `port` is PERMILLE_PORT.
    """

    # An empty variable counts as unset: compose files and charts set those that have no value.
    model_config = SettingsConfigDict(
        env_prefix=PREFIX, extra="ignore", frozen=True, env_ignore_empty=True, allow_inf_nan=False
    )

    @field_validator("*", mode="before")
    @classmethod
    def _strip(cls, value: Any) -> Any:
        """Remove white space at the ends, such as the newline that many files of secrets have."""
        return value.strip() if isinstance(value, str) else value

    @field_validator("*")
    @classmethod
    def _fits_the_database(cls, value: Any) -> Any:
        """Refuse numbers that a query or a row cannot hold."""
        if isinstance(value, int) and value > MAX_INTEGER:
            raise ValueError(f"The number must be at most {MAX_INTEGER}.")
        return value


class StorageSettings(SettingsGroup):
    """Storage"""

    data_dir: Path | None = Field(
        default=None,
        description="folder of the token and the keys. Data that no other setting places elsewhere is stored "
        "here, too",
    )
    database_url: SecretStr = Field(
        description="`postgresql+psycopg://user:password@host/name` for PostgreSQL, with options of libpq "
        "such as `?sslmode=verify-full`. Behind PgBouncer in transaction mode, add `?prepare_threshold=0`, "
        "which turns prepared statements off"
    )
    worker_role: str | None = Field(
        default=None,
        pattern=r"^[a-z_][a-z0-9_]{0,62}$",
        description="database role of the workers. At its start, the API grants it what workers need "
        "(PostgreSQL); see [a role for workers](../howto/grow-beyond-one-machine.md#a-role-for-workers)",
    )
    blob_root: Path = Field(
        description="folder of the results, which are named by their digests. If there is a bucket, this "
        "folder holds copies, and each machine has its own"
    )
    blob_bucket: str | None = Field(
        default=None,
        description="`s3://bucket/prefix?endpoint=https://host&region=name`: store the results [in a "
        "bucket](../howto/store-blobs-in-a-bucket.md)",
    )
    blob_cache_bytes: int = Field(
        default=64 << 30,
        ge=0,
        description="limit, in bytes, of the copies from the bucket that a machine keeps. Copies in use are "
        "kept even above this limit",
    )
    collection_grace_s: float = Field(
        default=86_400.0,
        ge=0,
        le=MAX_S,
        description="age, in seconds, from which a stored result is deleted if no row of the database refers "
        "to it: see [What is kept](../howto/delete-old-data.md)",
    )

    @field_validator("database_url")
    @classmethod
    def _usable(cls, value: SecretStr) -> SecretStr:
        from permille.store.database import parse_url  # loads SQLAlchemy, which `permille --help` lacks

        parse_url(value.get_secret_value())
        return value

    @field_validator("blob_bucket")
    @classmethod
    def _well_formed(cls, value: str | None) -> str | None:
        if value is not None:
            BucketAddress.parse(value)
        return value


class FolderSettings(SettingsGroup):
    """Folders of inputs and scratch"""

    model_root: Path = Field(description="the first tenant can register models below this folder only")
    corpus_root: Path = Field(description="the first tenant can register texts below this folder only")
    tenant_root: Path = Field(
        description="models and texts of all other tenants, in `<tenant id>/models` and `<tenant id>/corpora`"
    )
    work_root: Path = Field(description="scratch folder of jobs; may be erased while no job runs")

    @model_validator(mode="after")
    def _apart(self) -> Self:
        others = self.tenant_root.resolve()
        for what, root in (("model", self.model_root), ("corpus", self.corpus_root)):
            own = root.resolve()
            # Otherwise the first tenant could register the models of the others.
            if others.is_relative_to(own):
                raise ValueError(
                    f"The {what} root {own} contains {others}, the folder of other tenants. Choose a "
                    f"--{what}-root that holds the {what} files only, or a data folder outside it."
                )
            if own.is_relative_to(others):
                raise ValueError(
                    f"The {what} root {own} lies in {others}, the folder of other tenants. Choose another "
                    f"--{what}-root."
                )
        return self


class ProcessSettings(SettingsGroup):
    """Jobs, messages and logs"""

    broker_url: SecretStr | None = Field(
        default=None,
        description="`redis://...`: tell workers about new jobs with Celery. Without a broker, workers poll "
        "the database",
    )

    @field_validator("broker_url")
    @classmethod
    def _redis(cls, value: SecretStr | None) -> SecretStr | None:
        if value is not None and not _is_redis(value.get_secret_value()):
            # The message does not quote the URL, because it may hold a password.
            raise ValueError("Write redis://host:6379/0, or rediss:// for TLS.")
        for name, given in parse_qsl("" if value is None else urlsplit(value.get_secret_value()).query):
            choices = _BROKER_OPTIONS.get(name, ())
            if choices is not None and given not in choices:
                raise ValueError(
                    f"{name!r:.40} is not an option, or its value is unknown. After `?`, a URL may have "
                    "ssl_cert_reqs=required, optional or none, ssl_ca_certs, ssl_certfile, ssl_keyfile and "
                    "ssl_check_hostname."
                )
        return value

    memory_bytes: int | None = Field(
        default=None,
        ge=1,
        description="memory that a job may use (on a GPU, memory of the GPU). The default is the memory that "
        "is free when the job begins. If a model does not fit, masks and perplexity are computed one decoder "
        "layer at a time, which is slower and gives the same result. A preflight refuses a job that even "
        "so needs more memory than any idle worker has reported",
    )
    fisher_split_flops: float = Field(
        default=2e13,
        ge=0,
        description="a `fisher` mask that needs more floating-point operations than this is split into jobs "
        "that all workers share. The default is about forty minutes of one core. A mask of up to 16 "
        "sequences is never split. The resulting mask is the same",
    )
    log_format: LogFormat = Field(
        default=LogFormat.TEXT,
        description="`json`: one object a line on standard error, with `request_id` and `job_id`",
    )


class StoreSettings(ProcessSettings, FolderSettings, StorageSettings):
    """The settings that service and workers share. Paths default to places below the data folder."""

    @model_validator(mode="before")
    @classmethod
    def _below_data_dir(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("data_dir"):
            return {**layout(Path(str(values["data_dir"]).strip())), **values}
        return values


def _is_redis(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return (
            parts.scheme in ("redis", "rediss")
            and bool(parts.hostname)
            and parts.port != 0
            and re.fullmatch(r"/?\d*", parts.path, re.ASCII) is not None
        )
    except ValueError:  # the port is not a number, or the brackets of an address do not close
        return False


def _in_a_header(value: SecretStr) -> SecretStr:
    if not _HEADER_WORD.fullmatch(value.get_secret_value()):
        raise ValueError("A token consists of letters, digits and signs of ASCII, without spaces.")
    return value


HeaderToken = Annotated[SecretStr, AfterValidator(_in_a_header)]
"""A token that is sent in a header. HTTP libraries print a token with other characters in their errors."""


def layout(data_dir: Path) -> dict[str, Any]:
    """Return the default paths below the data folder.

    Example:
        >>> layout(Path("/srv/permille"))["database_url"]
        'sqlite:////srv/permille/permille.db'
    """
    root = data_dir.absolute()
    return {
        "database_url": f"sqlite:///{root / 'permille.db'}",
        "blob_root": root / "blobs",
        "model_root": root / "models",
        "corpus_root": root / "corpora",
        "tenant_root": root / "tenants",
        "work_root": root / "work",
    }


def explain(error: ValueError) -> str:
    """Describe invalid settings in one line. The message omits their values, which may be secret.

    Args:
        error: pydantic's ValidationError, or its SettingsError for a variable that is not valid
            JSON.
    """
    if not isinstance(error, ValidationError):
        name = _FIELD.search(str(error))
        form = 'Write a JSON list, such as ["one", "two"].'
        return str(error) if name is None else f"{PREFIX}{name[1].upper()}: {form}"
    missing, wrong = [], []
    for entry in error.errors(include_input=False, include_url=False):
        variable = PREFIX + "_".join(map(str, entry["loc"])).upper()
        if entry["type"] == "missing":
            missing.append(variable)
        else:
            message = str(entry["msg"]).removeprefix("Value error, ")
            wrong.append(f"{variable}: {message}" if entry["loc"] else message)
    if missing:
        named = ", ".join(missing)
        folder = "" if f"{PREFIX}DATA_DIR" in missing else f" (or {PREFIX}DATA_DIR, which is enough)"
        wrong.append(f"set {named}{folder} in the environment")
    return "; ".join(wrong)
