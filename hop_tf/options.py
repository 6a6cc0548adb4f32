"""`CommunicationOptions`: how ranks talk to each other, whatever the scheme."""

from __future__ import annotations

import dataclasses
import os

_POSITIVE = ("timeout_seconds", "progress_timeout_seconds", "report_interval_seconds")


@dataclasses.dataclass(frozen=True, kw_only=True)
class CommunicationOptions:
    """How ranks talk to each other: deadlines, credentials and records.

    A peer is *lost* when nothing at all, not even a heartbeat, was heard of it for `timeout_seconds`; that covers a
    killed or frozen process, a cut network and a peer that was never started. A peer that is alive but does not
    deliver (for instance because it evaluates while others train) is waited for up to `progress_timeout_seconds`.

    Attributes:
      timeout_seconds: Silence after which a peer counts as lost. Default 60.
      progress_timeout_seconds: Longest wait for a living peer's contribution. Default 3600.
      tls_certificate_chain: Path of the PEM file with this process's certificate, or None for plain text.
      tls_private_key: Path of the PEM file with its private key. Given together with the certificate.
      tls_root_certificates: Path of the PEM file with the authorities that peers' certificates must chain to. Both
        sides present a certificate (mutual TLS).
      cluster_token: A secret that every rank of the job shares. A connection without it is refused and training goes
        on. It travels in clear text unless TLS is on. Default None: no token.
      log_dir: Directory for TensorBoard records of `strategy.report()`; each rank writes a run `rank_<r>` below it.
        Default None: no records.
      report_interval_seconds: Time between two such records. Default 5.

    Raises:
      ValueError: If a duration is not positive, or the TLS files are given in part.
    """

    timeout_seconds: float = 60.0
    progress_timeout_seconds: float = 3600.0
    tls_certificate_chain: str | os.PathLike | None = None
    tls_private_key: str | os.PathLike | None = None
    tls_root_certificates: str | os.PathLike | None = None
    cluster_token: str | None = dataclasses.field(default=None, repr=False)
    log_dir: str | os.PathLike | None = None
    report_interval_seconds: float = 5.0

    def __post_init__(self):
        for name in _POSITIVE:
            value = getattr(self, name)
            if not value > 0:
                raise ValueError(f"`{name}` must be a positive number of seconds. Received: {name}={value}.")
        tls = (self.tls_certificate_chain, self.tls_private_key, self.tls_root_certificates)
        if any(part is not None for part in tls) and any(part is None for part in tls):
            raise ValueError(
                "`tls_certificate_chain`, `tls_private_key` and `tls_root_certificates` must be given together. "
                f"Received: tls_certificate_chain={tls[0]}, tls_private_key={tls[1]}, tls_root_certificates={tls[2]}."
            )
        if self.cluster_token is not None and not self.cluster_token:
            raise ValueError("`cluster_token` must be a non-empty string or None. Received: cluster_token=''.")

    @property
    def uses_tls(self) -> bool:
        """Whether connections are encrypted and both sides are authenticated by certificates."""
        return self.tls_certificate_chain is not None
