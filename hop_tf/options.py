"""`CommunicationOptions`: the settings of the communication between ranks, under all schemes."""

from __future__ import annotations

import dataclasses
import ipaddress
import numbers
import os
import re
import ssl
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from hop_tf.arguments import check_choice

DATA_PLANES = ("tcp", "grpc")
_ON_NONFINITE = ("warn", "raise")

_INTERFACES = "HOP_TF_INTERFACES"
# If set, ranks measure their links when their first `fit` has ended, and rank 0 prints a plan: see `hop_tf plan`. The
# values in `PLAN_KINDS` select the best settings, all settings, or all settings as JSON.
PLAN_VARIABLE = "HOP_TF_PLAN"
STEP_SECONDS_VARIABLE = "HOP_TF_STEP_SECONDS"  # Seconds of emulated compute in a step.
PLAN_KINDS = ("1", "all", "json")
# The file to which a process writes its threads' stacks if it waits for long. The launcher sets the variable.
STACKS_VARIABLE = "HOP_TF_STACKS"
# The steps of each rank that TensorFlow's profiler records, as "10:12": see `hop_tf launch --profile_steps`.
PROFILE_VARIABLE = "HOP_TF_PROFILE_STEPS"
# The number of devices of a worker: GPUs of its machine or, without GPUs, logical CPUs.
DEVICES_VARIABLE = "HOP_TF_DEVICES_PER_WORKER"
_DURATIONS = ("timeout_seconds", "progress_timeout_seconds", "report_interval_seconds")
TLS_FILES = ("tls_certificate_chain", "tls_private_key", "tls_root_certificates")


@dataclasses.dataclass(frozen=True, kw_only=True)
class CommunicationOptions:
    """Settings of the communication between ranks: deadlines, credentials and records.

    A peer is *lost* when no message of any kind, not even a heartbeat, has come from it for `timeout_seconds`. This
    covers a killed or frozen process, a cut network and a peer that was never started. Eight round trips to the peer
    are added to this time, because heartbeats need them. The sum is at most 2 * `timeout_seconds`. A living peer may
    deliver nothing for a while, for instance because it evaluates while others train. Ranks wait for such a peer for up
    to `progress_timeout_seconds`.

    Attributes:
      timeout_seconds: Silence after which a peer counts as lost. Default 60.
      progress_timeout_seconds: Longest wait for a living peer's contribution. Default 3600.
      data_plane: The connections that carry arrays between ranks. "tcp": plain sockets on a port that the system
        chooses. Under TLS, and while the port cannot be reached, arrays travel as with "grpc". "grpc": gRPC on the
        address of the cluster description, which costs about three times the processor time. Ranks may have different
        values. Default "tcp".
      interfaces: Addresses of this machine, one for each network interface that arrays travel on. Connections of the
        first bulk lane use the first address at both ends, and so on. The addresses must differ, and all ranks must
        give the same number of them. Only for `data_plane` "tcp" without TLS. Default None: the addresses in the
        environment variable HOP_TF_INTERFACES, separated by commas, if the variable is set.
      bandwidth_bits_per_second: The known or estimated rate of this rank's link. If round trips are long, the parts of
        an all-reduce travel over as many connections as are needed to fill the link. (A connection has at most about
        3 MiB in flight.) Together, the connections send no faster than this rate. A higher rate than the link's causes
        congestion; a lower rate leaves a part of the link unused. Ranks may have different rates. Default 100e6.
      tls_certificate_chain: Path of the PEM file with this process's certificate, or None for plain text. The
        certificate must name (as a subject alternative name) the host of this process in the cluster description.
      tls_private_key: Path of the PEM file with the certificate's private key, not encrypted.
      tls_root_certificates: Path of the PEM file with the authorities that peers' certificates must chain to. Both
        sides present a certificate (mutual TLS). The three files go together. They are read when the options are made,
        and again for new connections when the files have changed.
      cluster_token: A secret that every rank of the job shares: a random text. Both sides of a connection prove that
        they know the token, without sending it. A peer without the token is refused, and training goes on. Default
        None: no token.
      on_nonfinite: The reaction of a rank that is about to send NaN or infinite values. "warn": the rank warns at the
        first such step, and `strategy.report()` counts such steps as `nonfinite_steps`. "raise": the rank raises a
        `HopError` before it sends the values, and ends the job. "raise" is refused with a `LossScaleOptimizer`, whose
        gradients sometimes overflow and are then left out. Default "warn".
      log_dir: Directory for the records of each rank: `strategy.report()` for TensorBoard, and events for
        `hop_tf timeline`. Each rank writes a run `rank_<r>` in this directory, and each parameter server `ps_<s>`. If
        the disk is full or not writable, training goes on without records, with a warning. Default None: no records.
      report_interval_seconds: Time between two reports for TensorBoard. Default 5.

    Raises:
      TypeError: If an argument has a wrong type.
      ValueError: If a duration or the rate is not positive and finite, the data plane is unknown, the interfaces or the
        token cannot be used, or the TLS files are incomplete, unreadable, of another format or do not belong together.
    """

    timeout_seconds: float = 60.0
    progress_timeout_seconds: float = 3600.0
    data_plane: str = "tcp"
    interfaces: Sequence[str] | None = None
    bandwidth_bits_per_second: float = 100e6
    tls_certificate_chain: str | os.PathLike | None = None
    tls_private_key: str | os.PathLike | None = None
    tls_root_certificates: str | os.PathLike | None = None
    cluster_token: str | None = dataclasses.field(default=None, repr=False)
    on_nonfinite: str = "warn"
    log_dir: str | os.PathLike | None = None
    report_interval_seconds: float = 5.0

    def __post_init__(self):
        # Floats of Python: a sum with a NumPy float32 is a float32, too, which cannot hold the fractions of clock
        # seconds.
        for name in _DURATIONS:  # The limit is centuries; threads cannot wait for longer.
            object.__setattr__(self, name, _checked_number(self, name, "seconds", threading.TIMEOUT_MAX))
        rate = _checked_number(self, "bandwidth_bits_per_second", "bits per second", sys.float_info.max)
        object.__setattr__(self, "bandwidth_bits_per_second", rate)
        check_choice("data_plane", self.data_plane, DATA_PLANES)
        check_choice("on_nonfinite", self.on_nonfinite, _ON_NONFINITE)
        object.__setattr__(self, "interfaces", _checked_interfaces(self.interfaces))
        for name in (*TLS_FILES, "log_dir"):
            _check_path(name, getattr(self, name))
        _check_token(self.cluster_token)
        tls = {name: getattr(self, name) for name in TLS_FILES}
        if self.uses_tls and None in tls.values():
            received = ", ".join(f"{name}={path}" for name, path in tls.items())
            raise ValueError(
                "`tls_certificate_chain`, `tls_private_key` and `tls_root_certificates` must be given together. "
                f"Received: {received}."
            )
        if self.interfaces is not None and (self.uses_tls or self.data_plane != "tcp"):
            raise ValueError(
                "`interfaces` must be None with TLS or data_plane='grpc': only plain sockets are bound to interfaces. "
                f"Received: interfaces={self.interfaces}."
            )
        read_tls_files(self)

    @property
    def uses_tls(self) -> bool:
        """True if connections are encrypted, and both sides authenticate by certificates."""
        return any(getattr(self, name) is not None for name in TLS_FILES)


@dataclasses.dataclass(frozen=True)
class TlsFiles:
    """The contents of the TLS files.

    Attributes:
      certificate_chain: This process's certificate.
      private_key: The certificate's private key.
      root_certificates: The authorities that peers' certificates must chain to.
    """

    certificate_chain: bytes
    private_key: bytes = dataclasses.field(repr=False)
    root_certificates: bytes


def read_tls_files(options: CommunicationOptions) -> TlsFiles | None:
    """Reads and checks the TLS files of `options`; None without TLS.

    Raises:
      ValueError: If a file cannot be read or has another format, or the key belongs to another certificate.
    """
    if not options.uses_tls:
        return None
    contents = {name: _read(name, getattr(options, name)) for name in TLS_FILES}
    # This checks the files only. gRPC decides which key strengths are allowed.
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.set_ciphers("DEFAULT:@SECLEVEL=0")
    for name in ("tls_root_certificates", "tls_certificate_chain"):
        path = getattr(options, name)
        try:
            context.load_verify_locations(path)
        except OSError as error:  # SSL errors are OSErrors too.
            raise ValueError(f"`{name}` must be a PEM file of certificates. Received: {name}={path}.") from error
    chain, key = options.tls_certificate_chain, options.tls_private_key
    try:
        context.load_cert_chain(chain, key, password="")  # Without a password OpenSSL would ask on the terminal.
    except OSError as error:
        raise ValueError(
            "`tls_private_key` must be a PEM file with the private key of `tls_certificate_chain`, not encrypted. "
            f"Received: tls_private_key={key}, tls_certificate_chain={chain}."
        ) from error
    return TlsFiles(*(contents[name] for name in TLS_FILES))


def parse_profile_steps(text: str) -> tuple[int, int]:
    """Reads "10:12", the first and the last step.

    Raises:
      ValueError: If `text` has another form, or the last step is before the first step.
    """
    match = re.fullmatch(r"(\d+):(\d+)", text)
    if match is None or int(match[1]) > int(match[2]):
        raise ValueError(
            "`profile_steps` must be the first and the last step, counted from 0, as 10:12. "
            f"Received: profile_steps={text!r}."
        )
    return int(match[1]), int(match[2])


def _read(name: str, path: str | os.PathLike) -> bytes:
    try:
        return Path(path).read_bytes()
    except (OSError, ValueError) as error:  # A path with a null byte is a ValueError.
        raise ValueError(f"`{name}` must be a readable file. Received: {name}={path}: {error}.") from error


def _checked_number(options: CommunicationOptions, name: str, unit: str, most: float) -> float:
    value = getattr(options, name)
    rule = f"`{name}` must be a finite, positive number of {unit}. Received: {name}={value!r}."
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(rule)
    if not 0 < value <= most:
        raise ValueError(rule)
    return float(value)


def checked_options(
    options: CommunicationOptions | None, argument: str = "communication_options"
) -> CommunicationOptions:
    """Returns `options`, or the defaults for None. Raises TypeError, which names `argument`, for any other type."""
    if options is None:
        return CommunicationOptions()
    if not isinstance(options, CommunicationOptions):
        raise TypeError(
            f"`{argument}` must be a hop_tf.CommunicationOptions or None. Received: {argument}={options!r}."
        )
    return options


def rank_folder(options: CommunicationOptions, rank: int) -> Path | None:
    """The folder of a rank's records, in `log_dir`; None without a `log_dir`."""
    return None if options.log_dir is None else Path(options.log_dir) / f"rank_{rank}"


def devices_per_worker(environ: Mapping[str, str]) -> int | None:
    """The number in `DEVICES_VARIABLE`; None if the variable is not set.

    Raises:
      ValueError: If the variable is no positive integer.
    """
    text = environ.get(DEVICES_VARIABLE, "").strip()
    if not text:
        return None
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"{DEVICES_VARIABLE} must be a positive integer. Received: {DEVICES_VARIABLE}={text!r}.")
    return int(text)


def _checked_interfaces(interfaces: Sequence[str] | None) -> tuple[str, ...] | None:
    source = "interfaces"
    if interfaces is None:
        source, text = f"{_INTERFACES}, interfaces", os.environ.get(_INTERFACES, "")
        interfaces = [part.strip() for part in text.split(",")] if text.strip() else None
    if interfaces is None:
        return None
    received = f"Received: {source}={interfaces!r}."
    rule = (
        "`interfaces` must be IP addresses of this machine without a port, at least one, such as ['10.0.0.7']. "
        f"{received}"
    )
    if isinstance(interfaces, str) or not isinstance(interfaces, Sequence):
        raise TypeError(rule)
    if not all(isinstance(address, str) for address in interfaces):
        raise TypeError(rule)
    try:
        addresses = tuple(str(ipaddress.ip_address(address)) for address in interfaces)
    except ValueError as error:
        raise ValueError(rule) from error
    if not addresses:
        raise ValueError(rule)
    if len(set(addresses)) < len(addresses):
        raise ValueError(
            f"`interfaces` must be different addresses: lanes that share an interface share its rate. {received}"
        )
    return addresses


def _check_path(name: str, value: object) -> None:
    rule = f"`{name}` must be a path (str or os.PathLike) or None. Received: {name}={value!r}."
    if value is not None and not isinstance(value, str | os.PathLike):
        raise TypeError(rule)
    if value is not None and not os.fspath(value):
        raise ValueError(rule)


def _check_token(token: object) -> None:
    """Refuses a value that is no token. The error does not show the value, because it may hold the secret."""
    rule = "`cluster_token` must be a non-empty string or None."
    if token is not None and not isinstance(token, str):
        raise TypeError(f"{rule} Received: cluster_token of type {type(token).__name__}.")
    if token == "":
        raise ValueError(f"{rule} Received: cluster_token=''.")
