"""`hybridkv serve --replicas`: answers, where prompts go, replicas that are killed, clients that leave, drains."""

import asyncio
import json
import os
import re
import signal
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx2
import pytest
from serve_support import LONGEST, PATH, WAIT, Served, until
from test_command import command, ended
from test_front_processes import lives, streaming
from test_fronts import BODIES, CHAT, OTHERS, plain

from hybridkv.observe.block_index import BlockIndex
from warm import children

TWO = ("--replicas", "2")
FEW = ("--max-waiting", "0")
OF_PLACES = re.compile(r'at most \d+ fit|"(cached_tokens|created|created_at)": ?\d+')
"""What differs from one process: places, hits, because each replica has seen half of the prompts, and times."""
SMALL = ["--model", "tiny:llama", "--memory", "4MiB", "--max-model-len", str(LONGEST), "--port", "0"]
ENDLESS = {"max_tokens": 480, "ignore_eos": True}


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[int, str]]:
    """The process of a server of two replicas with 64 places each, and where it serves. Each has its seed of hashes."""
    with command(*TWO, *FEW, model=SMALL, alone=True) as (process, line, url):
        assert re.search(r": 2 replicas, each 4 MiB for 512 tokens a request, 64 at once, 1 thread$", line.strip())
        yield process.pid, url
        process.send_signal(signal.SIGTERM)
        status, out, err = ended(process)
    assert (status, out) == (0, "drained: all requests were answered\n")
    assert not err or re.fullmatch(r"(prefix cache not reset: \d+ blocks are in use\n)+", err)


@pytest.fixture
def url(server: tuple[int, str]) -> str:
    return server[1]


def counts(url: str, name: str) -> dict[str, float]:
    """The metric of each replica that runs."""
    text = httpx2.get(f"{url}/metrics", timeout=WAIT).text
    found = re.findall(rf'^hybridkv:{name}{{.*replica="(\d)".*}} (\S+)$', text, re.MULTILINE)
    return {replica: float(value) for replica, value in found}


def idle(url: str) -> bool:
    return counts(url, "num_requests_running") == {"0": 0, "1": 0}


def ask(url: str, path: str = PATH, **body: object) -> dict[str, Any]:
    """What a whole answer says."""
    answer = httpx2.post(f"{url}{path}", json={"temperature": 0, "max_tokens": 4, **body}, timeout=WAIT)
    assert answer.status_code == 200, answer.text
    said: dict[str, Any] = answer.json()
    return said


def cached(said: dict[str, Any]) -> int:
    found: int = said["usage"]["prompt_tokens_details"]["cached_tokens"]
    return found


@pytest.mark.parametrize("stream", [False, True])
def test_replicas_answer_as_one_process(url: str, llama: Served, *, stream: bool) -> None:
    for path, body in [*BODIES, *OTHERS] if not stream else BODIES:
        asked = {**body, "stream": True} if stream else body
        one, two = (httpx2.post(f"{at}{path}", json=asked, timeout=WAIT) for at in (llama.url, url))
        assert two.status_code == one.status_code, (body, two.text)
        if stream and one.status_code == 200:
            assert text_of(two.text) == text_of(one.text), body
        else:
            said = [OF_PLACES.sub("", json.dumps(plain(answer.json()))) for answer in (one, two)]
            assert said[1] == said[0], body


def text_of(stream: str) -> dict[int, str]:
    """The text of each choice."""
    found: dict[int, str] = {}
    for line in stream.splitlines():
        if line.startswith("data: {"):
            said = json.loads(line[6:])
            for one in said.get("choices", ()):
                more = one.get("text") or one.get("delta", {}).get("content") or ""
                found[one["index"]] = found.get(one["index"], "") + more
            if said.get("type") == "response.output_text.delta":
                found[0] = found.get(0, "") + said["delta"]
    return found


def test_turns_of_chats_go_where_their_beginnings_are(url: str) -> None:
    """Six chats side by side: each stays where it began, and both replicas have some."""
    before = counts(url, "prefix_cache_hits_total")
    chats = [[{"role": "user", "content": f"Chat {name}: {'tell me more ' * 5}"}] for name in "abcdef"]
    for turn in range(3):
        for chat in chats:
            said = ask(url, CHAT, messages=chat, max_tokens=8, ignore_eos=True)
            prompt = said["usage"]["prompt_tokens"]
            if turn:
                assert cached(said) > prompt - 48, (turn, cached(said), prompt)
            chat += [said["choices"][0]["message"], {"role": "user", "content": f"And {turn}?"}]
    hits = counts(url, "prefix_cache_hits_total")
    assert all(hits[one] - before[one] > 100 for one in "01"), (before, hits)


def test_salts_and_embeddings_go_where_their_beginnings_are(url: str) -> None:
    """Prompts of equal texts are told apart by their salts."""
    prompt = "a text of some length, which fills several blocks of the cache"
    for _ in range(2):
        found = [cached(ask(url, prompt=prompt, cache_salt=salt)) for salt in ("one", "two", "three")]
    assert all(one >= 48 for one in found)
    asked = {"input": "another text of some length, which fills several blocks"}
    _, again = (httpx2.post(f"{url}/v1/embeddings", json=asked, timeout=WAIT).json() for _ in range(2))
    assert cached(again) >= 48


def test_load_is_shared_and_limited_and_clients_that_leave_end_their_requests(url: str) -> None:
    """Of 8 streams each replica has 4. Then places are taken, until no replica has any."""
    with ExitStack() as stack:
        for number in range(8):
            stack.enter_context(streaming(url, prompt=f"{number} goes on", **ENDLESS))
        assert counts(url, "num_requests_running") == {"0": 4, "1": 4}
        known = "32 tokens, so two blocks, of one"
        with streaming(url, prompt=known, n=60, **ENDLESS), streaming(url, prompt=known, n=60, **ENDLESS):
            full = httpx2.post(f"{url}{PATH}", json={"prompt": "no", "max_tokens": 1}, timeout=WAIT)
            assert (full.status_code, full.json()["error"]["code"]) == (429, "queue_full")
            assert full.headers["retry-after"] == "1"
        until(lambda: sum(counts(url, "num_requests_running").values()) == 8)
    until(lambda: idle(url))
    left = httpx2.Client(base_url=url, timeout=0.3)
    with pytest.raises(httpx2.TimeoutException):  # a whole answer, too
        left.post(PATH, json={"prompt": "whole", "n": 32, **ENDLESS})
    left.close()
    until(lambda: idle(url))


def test_prompts_that_wait_count(server: tuple[int, str]) -> None:
    """Long and short prompts in turn, for replicas that stand still: neither gets all the long ones."""
    process, url = server
    before, replicas = counts(url, "request_prompt_tokens_sum"), children(process)

    async def crowd() -> None:
        async with httpx2.AsyncClient(base_url=url, timeout=WAIT) as client:
            asking = []
            for number, tokens in enumerate([400, 20, 400, 20, 400, 20]):
                body = {"prompt": [number + 7] * tokens, "max_tokens": 1, "ignore_eos": True}
                asking.append(asyncio.create_task(client.post(PATH, json=body)))
                await asyncio.sleep(0.2)  # so that they come in this order
            for one in replicas:
                os.kill(one, signal.SIGCONT)
            assert [one.status_code for one in await asyncio.gather(*asking)] == [200] * 6

    for one in replicas:
        os.kill(one, signal.SIGSTOP)
    try:
        asyncio.run(crowd())
    finally:
        for one in replicas:
            os.kill(one, signal.SIGCONT)
    now = counts(url, "request_prompt_tokens_sum")
    assert sorted(now[one] - before[one] for one in "01") == [440, 820]


def test_metrics_of_all_replicas_have_one_head(url: str) -> None:
    text = httpx2.get(f"{url}/metrics", timeout=WAIT).text
    heads = re.findall(r"^# TYPE (\S+) ", text, re.MULTILINE)
    assert len(heads) == len(set(heads)) > 20
    assert all('replica="' in line for line in text.splitlines() if not line.startswith("#"))
    assert httpx2.get(f"{url}/health", timeout=WAIT).json() == {"status": "ok"}


def test_page_and_reset_of_the_cache(url: str) -> None:
    ask(url, prompt="kept until it is reset, in whole blocks of the cache")
    with httpx2.stream("GET", f"{url}/live", timeout=WAIT) as answer:
        lines = answer.iter_lines()
        assert json.loads(next(lines).removeprefix("data: "))["seats"] == 64
    with streaming(url, prompt="holds blocks", **ENDLESS):
        assert httpx2.post(f"{url}/reset_prefix_cache", timeout=WAIT).status_code == 409
    until(lambda: idle(url))
    assert httpx2.post(f"{url}/reset_prefix_cache", timeout=WAIT).status_code == 200
    assert cached(ask(url, prompt="kept until it is reset, in whole blocks of the cache")) == 0


def test_killed_replica_loses_its_requests_and_another_one_takes_its_place() -> None:
    with command(*TWO, model=SMALL) as (process, _, url):
        first, second = children(process.pid)
        asked = {"input": "before"}
        vector = httpx2.post(f"{url}/v1/embeddings", json=asked, timeout=WAIT).json()["data"][0]["embedding"]
        with ExitStack() as stack:
            said = [stack.enter_context(streaming(url, prompt=f"{one} goes on", **ENDLESS)) for one in range(4)]
            os.kill(first, signal.SIGKILL)
            last = [[line for line in one if line][-1] for one in said]
        errors = [json.loads(one.removeprefix("data: "))["error"] for one in last if one != "data: [DONE]"]
        assert [one["code"] for one in errors] == ["replica_ended"] * 2
        assert errors[0]["message"] == "replica 0 has ended, and this request with it: send it again"
        assert httpx2.get(f"{url}/health", timeout=WAIT).status_code == 200
        for number in range(6):
            assert ask(url, prompt=f"{number}: the other one answers")["choices"][0]["text"]
        assert counts(url, "num_requests_running").keys() <= {"0", "1"}
        until(lambda: counts(url, "num_requests_running").keys() == {"0", "1"})
        assert first not in children(process.pid)
        for _ in range(3):  # the new one, too
            again = httpx2.post(f"{url}/v1/embeddings", json=asked, timeout=WAIT).json()["data"][0]["embedding"]
            assert again == pytest.approx(vector, abs=1e-5)  # computed in parts where a beginning is cached
        turns = [cached(ask(url, prompt=f"{name} text for a replica, of some blocks")) for name in "abab"]
        assert turns[:2] == [0, 0]
        assert min(turns[2:]) >= 32
        with streaming(url, prompt="drains", **ENDLESS) as lines:
            process.send_signal(signal.SIGTERM)
            os.kill(second, signal.SIGTERM)  # as systemd does
            assert [one for one in lines if one][-1] == "data: [DONE]"
        status, out, err = ended(process)
    assert (status, out) == (0, "drained: all requests were answered\n")
    assert err == "replica 0 ended with status -9: another one takes its place\n"


def test_disks_of_replicas_outlive_them_and_are_read_by_all(tmp_path: Path) -> None:
    """Replica 0 writes two prompts, which its successor finds. Then each replica of three reads all."""
    disk = ("--host-memory", "4MiB", "--disk", str(tmp_path), "--disk-memory", "8MiB")
    prompts = [f"{name}: a text for a replica, of some blocks of its cache" for name in "abcd"]
    with command(*TWO, *disk, model=SMALL) as (process, _, url):
        said = [ask(url, prompt=one) for one in prompts]
        assert [cached(one) for one in said] == [0] * 4
        until(lambda: all(spilled(url).get(one, 0) >= 4 for one in "01"))  # prompts, and prompts with outputs
        first, _ = children(process.pid)
        os.kill(first, signal.SIGKILL)
        until(lambda: first not in children(process.pid) and idle(url))
        require_found(url, prompts, said)
        assert counts(url, "request_success_total")["0"] == 2
        process.send_signal(signal.SIGTERM)
        assert ended(process)[0] == 0
    with command("--replicas", "3", *disk, model=SMALL) as (process, _, url):
        require_found(url, [prompts[at] for at in (1, 0, 3, 2)], [said[at] for at in (1, 0, 3, 2)])
        process.send_signal(signal.SIGTERM)
        assert ended(process)[0] == 0
    folders = [tmp_path / f"replica-{place}" / "blocks" for place in range(3)]
    assert sorted(tmp_path.glob("**/blocks")) == folders
    assert all(one.stat().st_size <= 8 << 20 for one in folders)


def spilled(url: str) -> dict[str, float]:
    """The resume points that each replica has written to its disk."""
    text = httpx2.get(f"{url}/metrics", timeout=WAIT).text
    found = re.findall(r'cascade_jobs_total{.*replica="(\d)".*tier="STORAGE".*} (\S+)$', text, re.MULTILINE)
    return {replica: float(value) for replica, value in found}


def require_found(url: str, prompts: list[str], said: list[dict[str, Any]]) -> None:
    again = [ask(url, prompt=one) for one in prompts]
    assert [one["choices"][0]["text"] for one in again] == [one["choices"][0]["text"] for one in said]
    assert [cached(one) for one in again] == [one["usage"]["prompt_tokens"] - 1 for one in again]


def test_replicas_end_with_their_server() -> None:
    with command(*TWO, model=SMALL, alone=True) as (process, _, url):
        replicas = children(process.pid)
        with streaming(url, prompt="goes on", **ENDLESS) as lines:
            os.kill(process.pid, signal.SIGKILL)
            with suppress(httpx2.TransportError):
                list(lines)
        until(lambda: not any(map(lives, replicas)))


def test_server_whose_replicas_cannot_start_again_ends(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("sk-operator\n")
    head = {"Authorization": "Bearer sk-operator"}
    with command(*TWO, "--api-key-file", str(keys), model=SMALL) as (process, _, url):
        assert httpx2.get(f"{url}/v1/models", timeout=WAIT).status_code == 401
        assert httpx2.get(f"{url}/v1/models", headers=head, timeout=WAIT).status_code == 200
        keys.unlink()
        first, second = children(process.pid)
        os.kill(second, signal.SIGKILL)
        assert process.stderr is not None
        said = [process.stderr.readline() for _ in range(3)]
        assert said[2] == "replica 1 ended before it was ready, with status 2: it printed why; it stays out\n"
        assert httpx2.get(f"{url}/health", timeout=WAIT).status_code == 200
        os.kill(first, signal.SIGKILL)
        status, _, err = ended(process)
    assert status == 2
    assert "error: the last replica has ended, and none took its place" in err


def test_answers_are_cut_off_after_the_grace() -> None:
    with command(*TWO, "--grace", "0.3", model=SMALL) as (process, _, url):
        with streaming(url, n=32, prompt="long", **ENDLESS) as lines:
            process.send_signal(signal.SIGTERM)
            with pytest.raises(httpx2.TransportError):
                list(lines)
        assert ended(process)[:2] == (1, "stopped: 1 answers took longer than the 0.3 s of --grace and were cut off\n")


def test_index_counts_copies_and_forgets_what_is_removed() -> None:
    index = BlockIndex()
    index.store(0, 16, ["a", "b"])
    index.store(0, 16, ["a"])  # in host memory, too
    index.remove(0, ["a"])
    assert index.known_tokens(["a", "b", "c"], 16) == 32
    assert index.known_tokens(["b", "a"], 16) == 32
    assert index.known_tokens(["c", "a"], 16) == 0
    index.store(1, 32, ["b"])
    index.remove(0, ["a", "b", "unknown"])
    assert index.known_tokens(["x", "b", "y"], 16) == 32
    assert len(index._copies) == 1
    index.clear()
    assert index.known_tokens(["x", "b"], 16) == 0
