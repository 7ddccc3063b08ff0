"""The live page in Chromium, and traffic to look at."""

import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from random import Random
from typing import Any

import httpx2
from serve_support import WAIT

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@contextmanager
def browser() -> Iterator[Any]:
    """Chromium; a page of it is a tab."""
    from playwright.sync_api import sync_playwright  # noqa: PLC0415 - nothing else needs it

    with sync_playwright() as playing:
        opened = playing.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


@contextmanager
def tab(opened: Any, url: str, width: int = 1280, scheme: str = "light") -> Iterator[Any]:  # noqa: ANN401 - playwright is optional
    """``url`` shown; whatever it has to complain of fails behind."""
    page = opened.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    said: list[str] = []
    page.on("console", lambda one: said.append(one.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.goto(f"{url}/")
    yield page
    page.close()
    assert said == []


def ask_on(url: str, stopped: threading.Event, number: int) -> None:
    """Prompts that share their beginnings, until it is ``stopped``."""
    random = Random(number)
    with httpx2.Client(base_url=url, timeout=WAIT) as client:
        while not stopped.is_set():
            prompt = f"system prompt {random.randrange(4)} " * random.randint(3, 9) + str(random.randrange(30))
            body = {"prompt": prompt, "max_tokens": random.randint(5, 60), "ignore_eos": True}
            client.post("/v1/completions", json=body)


@contextmanager
def traffic(url: str, clients: int) -> Iterator[None]:
    """So many at once."""
    stopped = threading.Event()
    threads = [threading.Thread(target=ask_on, args=(url, stopped, number)) for number in range(clients)]
    for one in threads:
        one.start()
    try:
        yield
    finally:
        stopped.set()
        for one in threads:
            one.join(WAIT)
