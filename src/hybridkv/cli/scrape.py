"""What a server answers at /metrics."""

from __future__ import annotations

from http.client import HTTPException, HTTPMessage
from typing import IO, Final
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, Request, build_opener

from hybridkv.errors import ConfigError
from hybridkv.units import shown

MOST_BYTES: Final = 16 << 20
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
    """What ``url`` answers. ConfigError, in one line, where it does not, or with something else.

    api_key: goes to that server alone; one that sends a request with it elsewhere is not followed.
    """
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    try:
        request = Request(url, headers=headers)  # noqa: S310 - http alone
        with build_opener(_KeyStays).open(request, timeout=_WAIT_S) as answer:
            read: bytes = answer.read(MOST_BYTES)
            return read.decode()
    except HTTPError as error:
        key = ": name a key without a salt in HYBRIDKV_API_KEY" if error.code in {401, 403} else ""
        raise ConfigError(f"{url} answers {error.code} {error.reason}{key}") from error
    except ConfigError:
        raise
    except (OSError, HTTPException, ValueError) as error:
        raise ConfigError(f"cannot read {url}: {getattr(error, 'reason', error)}: is a server there?") from error


class _KeyStays(HTTPRedirectHandler):
    """Follows redirects, but none to another server with a key: urllib would hand it on."""

    def redirect_request(  # noqa: PLR0917 - urllib's
        self, req: Request, fp: IO[bytes], code: int, msg: str, headers: HTTPMessage, newurl: str
    ) -> Request | None:
        """See HTTPRedirectHandler; ConfigError where a key would go elsewhere."""
        if req.has_header("Authorization") and _server_of(newurl) != _server_of(req.full_url):
            parts = urlsplit(newurl)
            other = shown(f"{parts.scheme}://{parts.netloc}")
            raise ConfigError(
                f"{req.full_url} sends on to {other}, which does not get the key: name that server itself"
            )
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _server_of(url: str) -> tuple[str, str | None, int]:
    """Scheme, host and port. ValueError for a port that is none."""
    parts = urlsplit(url)
    return parts.scheme, parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)
