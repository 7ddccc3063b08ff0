"""The Python of the pages on serving and events runs."""

import re
import socket
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

from serve_support import Served

from hybridkv.runner.tiny import tiny_model

DOCS = Path(__file__).parents[2] / "docs"


def snippets(name: str) -> list[str]:
    """Those that need more than is there: ``py``, where pages whose snippets run by themselves say ``python``."""
    return re.findall(r"```py\n(.*?)```", (DOCS / name).read_text("utf-8"), re.DOTALL)


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


def test_a_client_of_openai_streams_and_hints(llama: Served) -> None:
    snippet = "".join(snippets("serving.md"))
    assert "http://127.0.0.1:8000" in snippet
    said = StringIO()
    with redirect_stdout(said):
        exec(snippet.replace("http://127.0.0.1:8000", llama.url), {})  # noqa: S102 - our own page
    assert len(said.getvalue()) > 3
    assert "hints" in snippet


def test_events_are_published() -> None:
    snippet, _ = snippets("events.md")
    for port in ("5557", "5558"):
        assert port in snippet
        snippet = snippet.replace(port, str(free_port()))
    names: dict[str, object] = {"model": tiny_model("llama")}
    exec(snippet, names)  # noqa: S102 - our own page
    names["engine"].close()  # type: ignore[attr-defined]  # made by the snippet


def test_exact_events_are_published() -> None:
    before, exact = snippets("events.md")
    imports = "".join(line + "\n" for line in before.splitlines() if line.startswith("from "))
    assert "exact=True" in exact
    names: dict[str, object] = {"model": tiny_model("llama")}
    exec(imports + exact.replace("5557", str(free_port())), names)  # noqa: S102 - our own page
    names["publisher"].close()  # type: ignore[attr-defined]  # made by the snippet
    names["engine"].close()  # type: ignore[attr-defined]  # same
