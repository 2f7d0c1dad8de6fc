"""Settings of the API process, validated once in `main` and passed down.

Every field can come from the environment (`PERMILLE_DATA_DIR`, `PERMILLE_PORT`, ...) or from an argument of
`load`. No secret has a default value. The service generates the first token and its keys, and stores them in
`private_dir` (by default, the data folder). Only the owner of these files can read them.
"""

import ipaddress
import re
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, Self

from pydantic import Field, field_validator, model_validator

from permille.addresses import is_loopback
from permille.store.settings import MAX_S, HeaderToken, Quota, SettingsGroup, StoreSettings

Network = ipaddress.IPv4Network | ipaddress.IPv6Network
MIB = 1024 * 1024
_HOST: Final = re.compile(r"[A-Za-z0-9._-]+|[0-9a-fA-F:.]+|\[[0-9a-fA-F:.]+\]", re.ASCII)
UPLOADS_WAITING = 4
"""Maximum number of logs and states of one device that wait for their check."""
UPLOADS_KEPT = 1000
"""Maximum number of stored logs and states of one device.

An upload is admitted while the number is below this limit, so uploads that arrive at the same time can
exceed it by a few (at most `UPLOADS_WAITING`).
"""


class Downloads(StrEnum):
    """Sender of a package's bytes to a device: the API, nginx (`accel`), or the bucket (`redirect`)."""

    SERVE = "serve"
    ACCEL = "accel"
    REDIRECT = "redirect"


class AddressSettings(SettingsGroup):
    """Address and TLS of the API"""

    host: str = Field(default="127.0.0.1", description="address to listen on, also `permille up --host`")
    port: int = Field(
        default=8321,
        ge=0,
        le=65_535,
        description="port to listen on, also `permille up --port`; 0: any free port",
    )
    tls_certificate: Path | None = Field(
        default=None, description="PEM file of the certificate chain; required for any address but loopback"
    )
    tls_key: Path | None = Field(
        default=None, description="PEM file of the certificate's key; set both or none"
    )
    allowed_hosts: tuple[str, ...] = Field(
        default=(), description="JSON list of host names that requests may use, besides those of loopback"
    )
    trusted_proxies: tuple[str, ...] = Field(
        default=(), description="JSON list of proxies (address or network) whose `X-Forwarded-For` is trusted"
    )

    @model_validator(mode="after")
    def _safe_bind(self) -> Self:
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ValueError("--tls-certificate and --tls-key belong together. Give both or none.")
        if not is_loopback(self.host) and self.tls_certificate is None:
            raise ValueError(
                f"Other machines can reach {self.host!r}. Give --tls-certificate and --tls-key, or listen on "
                "127.0.0.1."
            )
        return self

    @field_validator("allowed_hosts")
    @classmethod
    def _host_names(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for host in value:
            if not _HOST.fullmatch(host):  # it would match no request, and each would be refused
                raise ValueError(f"{host!r:.100} is no name of a host. Leave out scheme, port, path and `*`.")
        return value

    @model_validator(mode="after")
    def _named_proxies(self) -> Self:
        try:
            _ = self.proxy_networks
        except ValueError as exc:
            raise ValueError(
                f"PERMILLE_TRUSTED_PROXIES: {exc}. Write addresses or networks, such as 10.0.0.0/8."
            ) from exc
        return self

    @property
    def proxy_networks(self) -> tuple[Network, ...]:
        """The trusted proxies. Raises ValueError if one is neither an address nor a network."""
        return tuple(ipaddress.ip_network(proxy) for proxy in self.trusted_proxies)


class ConnectionSettings(SettingsGroup):
    """Limits of connections and requests"""

    max_connections: int = Field(
        default=1000,
        ge=1,
        description="maximum number of connections. Numbers above `L / 2 - 64` are reduced to that, where "
        "`L` is the hard limit of open files, but at most 65,536",
    )
    max_connections_per_address: int = Field(
        default=250,
        ge=1,
        description="maximum number of connections of one IPv4 address or IPv6 /64; this limit does not "
        "apply to trusted proxies",
    )
    header_s: float = Field(
        default=10.0, gt=0, le=MAX_S, description="seconds in which a request's head must arrive"
    )
    body_s: float = Field(
        default=20.0,
        gt=0,
        le=MAX_S,
        description="seconds in which a request's body must arrive, plus one second for each 4 KiB of it",
    )
    stream_s: float = Field(
        default=900.0,
        gt=0,
        le=MAX_S,
        description="seconds after which an event stream ends; clients then resume it",
    )
    max_log_bytes: int = Field(default=64 * MIB, ge=1024, description="largest shared log or state")
    sign_ins_per_minute: int = Field(
        default=60,
        ge=1,
        description="maximum number of calls in a minute, for each process and for each kind of call. "
        "Limited for each device: sign-ins, joining a federation, questions for a round, reports on "
        "rollouts, facts, and refused contributions. Limited for each invitation: enrolments. Limited for "
        "each address: enrolments with unknown invitations and failed sign-ins to the pages, together",
    )


class QuotaSettings(SettingsGroup):
    """Quotas of devices and tenants"""

    runs_per_device_day: int = Field(
        default=200, ge=1, description="reports that a device may send in 24 hours"
    )
    uploads_per_device_day: int = Field(
        default=50,
        ge=1,
        description="logs and states that a device may send in 24 hours; repeated uploads count again",
    )
    upload_bytes_per_device_day: int = Field(
        default=512 * MIB, ge=1, description="bytes of logs and states that a device may send in 24 hours"
    )
    runs_per_device: int = Field(
        default=10_000,
        ge=1,
        description="maximum number of stored reports of a device. Further reports are refused "
        "(`device-quota-spent`) and stay on the device",
    )
    upload_bytes_per_device: int = Field(
        default=4096 * MIB,
        ge=1,
        description="maximum bytes of stored logs and states of a device. Further logs and states are "
        "refused, but uploads that arrive at the same time can exceed the limit",
    )
    queued_jobs_per_tenant: int = Field(
        default=10_000,
        ge=1,
        description="maximum number of queued jobs of a tenant; jobs that check devices' uploads do not "
        "count",
    )

    @property
    def quota(self) -> Quota:
        """Return the limits of one device: how much it may send, and how much the service stores."""
        return Quota(
            runs_a_day=self.runs_per_device_day,
            uploads_a_day=self.uploads_per_device_day,
            bytes_a_day=self.upload_bytes_per_device_day,
            outstanding=UPLOADS_WAITING,
            runs_kept=self.runs_per_device,
            uploads_kept=UPLOADS_KEPT,
            bytes_kept=self.upload_bytes_per_device,
        )


class ServingSettings(SettingsGroup):
    """Keys, downloads, preflight and metrics of the API"""

    private_dir: Path | None = Field(
        default=None,
        description="folder of `keys/` and `operator.token`. Set it if workers share the data folder, "
        "because they must not read these files. Default: the data folder",
    )
    downloads: Downloads = Field(
        default=Downloads.SERVE,
        description="who sends a package's bytes to devices: the API (`serve`), nginx (`accel`) or the "
        "bucket (`redirect`); see [downloads](../howto/serve-downloads.md)",
    )
    metrics_token: HeaderToken | None = Field(
        default=None, description="bearer token that Prometheus sends. Without it, `/metrics` answers 404"
    )


class Settings(ServingSettings, QuotaSettings, ConnectionSettings, AddressSettings, StoreSettings):
    """Settings of one API process.

    The database, the blobs and the inputs lie below `data_dir`, unless a setting of their own places them
    elsewhere.
    """

    data_dir: Path = Field(
        description="folder of the token, of the keys, and of all data that has no setting of its own"
    )

    @model_validator(mode="after")
    def _sent_by_who_has_them(self) -> Self:
        if self.downloads is Downloads.REDIRECT and self.blob_bucket is None:
            raise ValueError("downloads=redirect needs a bucket. Set PERMILLE_BLOB_BUCKET, or choose serve.")
        if self.downloads is Downloads.ACCEL and self.blob_bucket is not None:
            raise ValueError("downloads=accel cannot send the blobs of a bucket. Choose serve or redirect.")
        return self

    @property
    def token_path(self) -> Path:
        """The path of the first operator token, a file of mode 0600."""
        return (self.private_dir or self.data_dir) / "operator.token"

    @property
    def keys_dir(self) -> Path:
        """Folder of the private keys, mode 0700."""
        return (self.private_dir or self.data_dir) / "keys"


def load(**overrides: Any) -> Settings:
    """Read the settings from the environment, with overrides. Raises pydantic's ValidationError."""
    return Settings(**overrides)


def local_url(settings: Settings, port: int) -> str:
    """Return the URL at which this machine reaches the socket.

    If the socket listens on all addresses, the URL has the loopback address.
    """
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(settings.host, settings.host)  # noqa: S104
    return _url(settings, host, port)


def client_url(settings: Settings, port: int) -> str:
    """Return the URL for clients, which the file `service.url` holds.

    A certificate usually names a host, not an address. With TLS on an address other than loopback, the URL
    therefore has the first host of `allowed_hosts`. Otherwise it is the same as `local_url`.
    """
    if settings.tls_certificate is None or is_loopback(settings.host) or not settings.allowed_hosts:
        return local_url(settings, port)
    return _url(settings, settings.allowed_hosts[0], port)


def _url(settings: Settings, host: str, port: int) -> str:
    scheme = "https" if settings.tls_certificate else "http"
    return f"{scheme}://[{host.strip('[]')}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
