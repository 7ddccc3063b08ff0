"""What a server answers at /metrics."""

from __future__ import annotations

from http.client import HTTPException
from typing import Final
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from hybridkv.errors import ConfigError

_MOST_BYTES: Final = 16 << 20
_WAIT_S: Final = 10.0


def metrics_url(url: str) -> str:
    """Where the metrics of the server at ``url`` are. ConfigError for what is no address of one."""
    whole = url if "://" in url else f"http://{url}"
    try:
        parts = urlsplit(whole)
        there = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
    except ValueError:
        there = False
    if not there or not whole.isprintable() or " " in whole:
        raise ConfigError(f"{url!r} is no address of a server: give http://HOST:PORT")
    return f"{whole.rstrip('/').removesuffix('/metrics')}/metrics"


def read_metrics(url: str, api_key: str | None) -> str:
    """What ``url`` answers. ConfigError, in one line, where it does not, or with something else."""
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    try:
        with urlopen(Request(url, headers=headers), timeout=_WAIT_S) as answer:  # noqa: S310 - http alone
            read: bytes = answer.read(_MOST_BYTES)
            return read.decode()
    except HTTPError as error:
        key = ": name a key without a salt in HYBRIDKV_API_KEY" if error.code in {401, 403} else ""
        raise ConfigError(f"{url} answers {error.code} {error.reason}{key}") from error
    except (OSError, HTTPException, ValueError) as error:
        raise ConfigError(f"cannot read {url}: {getattr(error, 'reason', error)}: is a server there?") from error
