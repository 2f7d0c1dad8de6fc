"""Settings of the API process, validated once in `main` and passed down.

Every field can come from the environment (`PERMILLE_DATA_DIR`, `PERMILLE_PORT`, ...) or from a keyword.
There is no default secret: tokens and keys are made at the first start, below the data folder, readable by
their owner alone.
"""

import ipaddress
from enum import StrEnum
from pathlib import Path
from typing import Any, Self

from pydantic import Field, SecretStr, model_validator

from permille.addresses import is_loopback
from permille.store.settings import Quota, SettingsGroup, StoreSettings

Network = ipaddress.IPv4Network | ipaddress.IPv6Network
MIB = 1024 * 1024
UPLOADS_WAITING = 4
"""Logs and states of one device that may wait for their check."""
UPLOADS_KEPT = 1000
"""Stored logs and states of one device. Those that wait for their check may come on top."""


class Downloads(StrEnum):
    """Sender of a package's bytes to a device."""

    SERVE = "serve"
    ACCEL = "accel"
    REDIRECT = "redirect"


class AddressSettings(SettingsGroup):
    """Address and TLS of the API"""

    host: str = Field(default="127.0.0.1", description="address to bind, also `permille up --host`")
    port: int = Field(
        default=8321, ge=0, le=65_535, description="0: any free port; also `permille up --port`"
    )
    tls_certificate: Path | None = Field(
        default=None, description="PEM file; required for any address but loopback"
    )
    tls_key: Path | None = Field(default=None, description="PEM file of its key; set both or none")
    allowed_hosts: tuple[str, ...] = Field(
        default=(), description="JSON list of host names to answer to, besides those of loopback"
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

    @model_validator(mode="after")
    def _named_proxies(self) -> Self:
        _ = self.proxy_networks
        return self

    @property
    def proxy_networks(self) -> tuple[Network, ...]:
        """The trusted proxies. Raises ValueError if one is neither an address nor a network."""
        return tuple(ipaddress.ip_network(proxy) for proxy in self.trusted_proxies)


class ConnectionSettings(SettingsGroup):
    """Limits of connections and requests"""

    max_connections: int = Field(
        default=1000, ge=1, description="connections; at most half of the hard limit of open files, less 64"
    )
    max_connections_per_address: int = Field(
        default=250,
        ge=1,
        description="connections of one IPv4 address or IPv6 /64; trusted proxies have no limit of their own",
    )
    header_s: float = Field(default=10.0, gt=0, description="time for a request's head to arrive")
    body_s: float = Field(
        default=20.0, gt=0, description="time for a request's body to arrive, on top of its time at 4 KiB/s"
    )
    stream_s: float = Field(
        default=900.0, gt=0, description="length of an event stream; clients then resume it"
    )
    max_log_bytes: int = Field(default=64 * MIB, ge=1024, description="largest shared log or state")
    sign_ins_per_minute: int = Field(
        default=60,
        ge=1,
        description="calls a minute in each process: sign-ins of one device, attempts with one invitation, "
        "attempts of one address with unknown invitations, and a device's questions for a round and refused "
        "contributions",
    )


class QuotaSettings(SettingsGroup):
    """What devices and tenants may store"""

    runs_per_device_day: int = Field(default=200, ge=1, description="reports of a device in 24 hours")
    uploads_per_device_day: int = Field(
        default=50, ge=1, description="logs and states of a device in 24 hours, including repeated ones"
    )
    upload_bytes_per_device_day: int = Field(default=512 * MIB, ge=1, description="their bytes in 24 hours")
    runs_per_device: int = Field(
        default=10_000,
        ge=1,
        description="stored reports of a device; a further one is refused (`device-quota-spent`), and "
        "stays on the device",
    )
    upload_bytes_per_device: int = Field(
        default=4096 * MIB,
        ge=1,
        description="stored bytes of a device's logs and states; those that wait for their check may come on "
        "top",
    )
    queued_jobs_per_tenant: int = Field(
        default=10_000,
        ge=1,
        description="queued jobs of a tenant; checks of its devices' uploads do not count",
    )

    @property
    def quota(self) -> Quota:
        """Return the limits of one device: what it may send, and what is kept of it."""
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
        description="folder of `keys/` and `operator.token`, if workers share the data folder but must not "
        "see these; none: the data folder",
    )
    downloads: Downloads = Field(
        default=Downloads.SERVE,
        description="who sends a package's bytes to devices: the API, nginx (`accel`), the bucket "
        "(`redirect`): [downloads](../howto/serve-downloads.md)",
    )
    flops_per_s: float | None = Field(
        default=None, gt=0, description="speed of the machine, for preflight; none: 8e9 a core"
    )
    metrics_token: SecretStr | None = Field(
        default=None, description="bearer token that Prometheus sends; none: `/metrics` answers 404"
    )


class Settings(ServingSettings, QuotaSettings, ConnectionSettings, AddressSettings, StoreSettings):
    """Settings of one API process. Rows, blobs and inputs are below `data_dir` unless named."""

    data_dir: Path = Field(
        description="folder of the token and the keys, and of everything that no other setting places"
    )

    @model_validator(mode="after")
    def _sent_by_who_has_them(self) -> Self:
        if self.downloads is Downloads.REDIRECT and self.blob_bucket is None:
            raise ValueError("downloads=redirect needs blob_bucket")
        if self.downloads is Downloads.ACCEL and self.blob_bucket is not None:
            raise ValueError("downloads=accel does not go with blob_bucket: choose serve or redirect")
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
    """Return the address at which this machine reaches the socket.

    A bind to every address is reached by loopback of its family.
    """
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(settings.host, settings.host)  # noqa: S104
    return _url(settings, host, port)


def client_url(settings: Settings, port: int) -> str:
    """Return the address for clients, as `service.url` has it.

    A certificate usually names a host, not an address. With TLS on an address other than loopback, this is
    therefore the first of `allowed_hosts`. Otherwise it is the same as `local_url`.
    """
    if settings.tls_certificate is None or is_loopback(settings.host) or not settings.allowed_hosts:
        return local_url(settings, port)
    return _url(settings, settings.allowed_hosts[0], port)


def _url(settings: Settings, host: str, port: int) -> str:
    scheme = "https" if settings.tls_certificate else "http"
    return f"{scheme}://[{host.strip('[]')}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
