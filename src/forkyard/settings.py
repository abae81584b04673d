"""Every setting, its default and its environment variable.

Each field below is set by `FORKYARD_<NAME>` in the environment; the field's description is its documentation
(`docs/reference/settings.md` is generated from it). Nothing else in the code reads the environment.
"""

from __future__ import annotations

import hashlib
import ipaddress
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from forkyard.errors import InvalidSetting

PREFIX = "FORKYARD_"


class _FromEnvironment(BaseSettings):
    model_config = SettingsConfigDict(env_prefix=PREFIX, frozen=True, extra="ignore")

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            wrong = error.errors()[0]
            name = str(wrong["loc"][0]) if wrong["loc"] else "?"
            variable = name if name.startswith(PREFIX) else PREFIX + name.upper()
            raise InvalidSetting(
                f"{variable} is {str(wrong['input'])[:100]!r}: {wrong['msg'].removeprefix('Value error, ')}; "
                "correct it, or unset it to get the default",
                setting=variable,
            ) from None


class Settings(_FromEnvironment):
    state_dir: Path = Field(Path("/var/lib/forkyard"), description="What must survive a reboot: database, keys, disks.")
    cache_dir_override: Path | None = Field(
        None,
        alias="FORKYARD_CACHE_DIR",
        description="Images and templates; rebuilt when missing, may be shared. Default: `cache` in the state dir.",
    )
    run_dir: Path = Field(Path("/run/forkyard"), description="What lives as long as the daemon: its socket.")
    ram_dir_override: Path | None = Field(
        None,
        alias="FORKYARD_RAM_DIR",
        description="RAM of templates; must be on tmpfs. Default: a directory in /dev/shm named after the state dir.",
    )
    listen_host: str = Field("127.0.0.1", description="Address the API listens on.")
    listen_port: int = Field(7070, ge=0, le=65535, description="Port the API listens on; 0 picks a free one.")
    preview_domain: str | None = Field(
        None,
        pattern=r"^[a-z0-9]([a-z0-9.-]*[a-z0-9])?$",
        description="Domain below which previews have their names (`<port>-<id>.<domain>`), if `*.<domain>` leads here. "
        "Default: `localhost`.",
    )
    preview_scheme: Literal["http", "https"] | None = Field(
        None, description="Scheme of preview URLs. Default: `https` with a `tls_cert_file`, else `http`."
    )
    preview_port: int | None = Field(
        None, ge=1, le=65535, description="Port in preview URLs, if it is not the one this daemon listens on."
    )
    tls_port: int | None = Field(
        None, ge=0, le=65535, description="Also listen here with TLS, for previews and the API; 0 picks a free port."
    )
    tls_cert_file: Path | None = Field(
        None, description="Certificate chain for `tls_port`, PEM. Default: certificates of our own (`forkyard ca`)."
    )
    tls_key_file: Path | None = Field(None, description="Private key of `tls_cert_file`, PEM.")
    tls_cert_dir: Path | None = Field(
        None,
        description="Directory of more certificates for `tls_port`, each for the names it is made for: `NAME.pem` with its key "
        "in it or in `NAME.key`, or `NAME/fullchain.pem` with `NAME/privkey.pem`.",
    )
    dns_servers: str | None = Field(
        None,
        description="Name servers asked for the records of domains: `9.9.9.9, 127.0.0.1:5353`. Default: this host's.",
    )
    ssh: bool = Field(True, description="Whether there is an SSH gateway.")
    ssh_port_override: int | None = Field(
        None,
        ge=0,
        le=65535,
        alias="FORKYARD_SSH_PORT",
        description="Port of the SSH gateway; 0 picks a free one. Default: 7022, or a free one if the API's is too.",
    )
    allowed_hosts: str = Field(
        "", description="Names this daemon is reached by, separated by commas, besides localhost and addresses."
    )
    accel: Literal["auto", "kvm", "tcg"] = Field(
        "auto", description="Accelerator; `auto` takes KVM only if a probe guest ran on it."
    )
    vm_uid_base: int = Field(
        660000, ge=1000, description="First of the unprivileged user ids that VMs run under, one each."
    )
    vm_uid_count: int = Field(4096, ge=1, description="How many such user ids there are; also the most VMs at once.")
    tb_size_mib: int = Field(64, ge=8, le=1024, description="Translation cache of one VM under software emulation.")
    pool_size: int = Field(2, ge=0, description="Most machines kept ready per shape; 0 turns the warm pool off.")
    pool_memory_mib: int = Field(
        1024, ge=0, description="Most memory that ready machines and hypervisors of all shapes may take."
    )
    pool_shells: int = Field(
        2,
        ge=0,
        description="Hypervisors kept ready for forks and resumes, per template in use; more for a minute after more were "
        "wanted at once. 0: none.",
    )
    pool_slots: int = Field(4, ge=0, description="Network namespaces kept ready for new machines.")
    create_timeout_s: float = Field(
        60.0, gt=0, description="A create that is not answered by the guest in this time fails."
    )
    boot_timeout_s: float = Field(300.0, gt=0, description="The first boot of a template must be done in this time.")
    cool_after_s: float = Field(
        60.0, ge=0, description="A paused sandbox keeps its memory this long; then it is moved to disk."
    )
    memory_overcommit: float = Field(
        4.0,
        gt=0,
        description="Machines that run may have this many times the memory of the host, for they share most of it.",
    )
    disk_budget_gib: float | None = Field(
        None, gt=0, description="What sandboxes and snapshots may occupy on disk; default: all but the reserve."
    )
    disk_layers: int = Field(
        16,
        ge=2,
        description="A disk that rests on more layers (one for each fork or snapshot) is folded while it runs.",
    )
    disk_reserve_gib: float = Field(1.0, ge=0, description="Disk space that is always left free.")
    quota_running: int | None = Field(None, ge=0, description="Most sandboxes of one API key that run at once.")
    quota_memory_mib: int | None = Field(None, ge=0, description="Most memory of the running sandboxes of one API key.")
    quota_creates_per_minute: int | None = Field(
        None, ge=0, description="Most sandboxes one API key may create in a minute, forks included."
    )
    volume_gib: float = Field(64.0, gt=0, le=64, description="The largest volume that may be made.")
    quota_volumes_gib: float | None = Field(
        None, ge=0, description="What the volumes of one API key may have together, full or not."
    )
    recording_mib: int = Field(4096, ge=1, description="Most disk of one recording; then requests are refused.")
    recordings_mib: int = Field(32768, ge=1, description="Most disk of all recordings together.")
    git_quota_mib: int = Field(
        10240,
        ge=1,
        description="What a hosted repository may occupy, large files included, unless it has its own quota.",
    )
    git_mirrors_gib: float = Field(
        10.0,
        gt=0,
        description="What copies of repositories elsewhere may occupy, kept for the next clone; those that were not used "
        "for longest go first.",
    )
    git_allow_private: bool = Field(
        False,
        description="What repositories are made of and kept in step with, their webhooks and reviewers may be on this host "
        "and in private networks.",
    )
    webhook_timeout_s: float = Field(10.0, gt=0, le=300, description="A webhook must be answered in this time.")
    webhook_tries: int = Field(8, ge=1, le=30, description="How often a webhook is tried before it has failed.")
    webhook_backoff_s: float = Field(
        5.0, gt=0, description="Wait before the second attempt of a webhook; each wait is three times the one before."
    )
    github_api_url: str = Field(
        "https://api.github.com",
        pattern=r"^https?://\S+$",
        description="GitHub's REST API, for GitHub Apps and reviews.",
    )
    extra_ca_file: Path | None = Field(
        None,
        description="More certificate authorities (PEM) to trust on the way out, besides the system's, where the door "
        "looks into TLS: for secrets, record and replay; and for webhooks.",
    )
    insecure_registries: str = Field(
        "", description="Registries of images that are spoken to without TLS, separated by commas: `127.0.0.1:5000`."
    )
    private_registries: str = Field(
        "",
        description="Registries of images that may be on this host or in private networks, separated by commas: "
        "`registry.example:5000`. Those without TLS may, too.",
    )
    layers_budget_gib: float | None = Field(
        20.0,
        gt=0,
        description="What layers of specs may occupy on disk; those that were not used for longest go first.",
    )
    retention_days: float = Field(
        30.0, gt=0, description="Deleted sandboxes and their events are remembered this long."
    )
    cache_days: float = Field(
        30.0, gt=0, description="Images and templates that nobody used for this long, and no disk needs, are removed."
    )
    fault_file: Path | None = Field(
        None, description="For tests: the daemon stops itself (SIGSTOP) at the step that this file names."
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="Least level that is logged.")
    log_json: bool = Field(False, description="Log as JSON lines.")

    @property
    def cache_dir(self) -> Path:
        return self.cache_dir_override or self.state_dir / "cache"

    @property
    def scope(self) -> str:
        """Tells this daemon's things on the host (cgroups, RAM files) from those of a daemon with another state."""
        return hashlib.sha256(str(self.state_dir.absolute()).encode()).hexdigest()[:12]

    @property
    def ram_dir(self) -> Path:
        return self.ram_dir_override or Path("/dev/shm") / f"forkyard-{self.scope}"

    @property
    def ssh_port(self) -> int:
        if self.ssh_port_override is not None:
            return self.ssh_port_override
        return 0 if self.listen_port == 0 else 7022

    @property
    def ssh_host_key(self) -> Path:
        return self.state_dir / "ssh_host_ed25519_key"

    @property
    def nameservers(self) -> list[tuple[str, int]]:
        """`dns_servers` as addresses and ports."""
        return [_server(server) for server in (self.dns_servers or "").replace(",", " ").split()]

    @field_validator("dns_servers")
    @classmethod
    def _are_servers(cls, given: str | None) -> str | None:
        for server in (given or "").replace(",", " ").split():
            _server(server)
        return given

    @property
    def plain_http_registries(self) -> list[str]:
        return self.insecure_registries.replace(",", " ").split()

    @property
    def trusted_registries(self) -> list[str]:
        """Those that whoever runs this daemon has named."""
        return [*self.plain_http_registries, *self.private_registries.replace(",", " ").split()]

    @property
    def api_socket(self) -> Path:
        return self.run_dir / "api.sock"

    @property
    def key_file(self) -> Path:
        """The first API key, readable by root only: how the CLI and SDK on this machine find it."""
        return self.state_dir / "api-key"

    @property
    def secrets_key_file(self) -> Path:
        """What seals secrets in the database; readable by root only."""
        return self.state_dir / "secrets-key"


def _server(text: str) -> tuple[str, int]:
    """`9.9.9.9`, `9.9.9.9:53`, `2620:fe::fe` or `[2620:fe::fe]:53`."""
    host, port = text, "53"
    if text.startswith("[") and "]:" in text:
        host, _, port = text[1:].rpartition("]:")
    elif text.count(":") == 1:
        host, _, port = text.partition(":")
    try:
        ipaddress.ip_address(host)
    except ValueError:
        raise ValueError(f"{host!r} is no address of a name server (it looks like 9.9.9.9 or 127.0.0.1:5353)") from None
    if not (port.isascii() and port.isdigit() and 1 <= int(port) <= 65535):
        raise ValueError(f"{port!r} is no port; ports are numbers from 1 to 65535")
    return host, int(port)


class ClientSettings(_FromEnvironment):
    """What the SDK and the CLI read. Without a URL they look for the daemon of this machine."""

    url: str | None = Field(None, description="Where the API is, such as `http://127.0.0.1:7070`; for clients.")
    api_key: str | None = Field(None, description="API key a client presents. Default: the key file of this machine.")
