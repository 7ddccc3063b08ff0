"""What `hybridkv doctor` says of a server is what its own /metrics tell."""

from serve_support import engine_of, serving

from hybridkv.cli.exposition import Exposition
from hybridkv.cli.scrape import metrics_url, read_metrics
from hybridkv.doctor import Diagnosis, examine_server

PROMPT = "A beginning that all of them share, word by word, again and again. "


def looked_at(*salts: str | None) -> Diagnosis:
    """After requests that begin alike, each with its salt."""
    with serving(engine_of("qwen3_next", remembered_losses=1000)) as served:
        for number, salt in enumerate(salts):
            more = {} if salt is None else {"cache_salt": salt}
            served.post("/v1/completions", prompt=f"{PROMPT}{number}", max_tokens=2, **more)
        return examine_server(served.url, Exposition.parse(read_metrics(metrics_url(served.url), None), 0.0))


def test_a_server_whose_requests_share() -> None:
    told = looked_at(*[None] * 6)
    assert told.findings == ()
    assert told.figures.keys() == {
        "found",
        "blocks_and_prefixes",
        "salts",
        "states_read_again",
        "states_and_requests",
    }


def test_a_server_of_a_salt_for_each_request() -> None:
    told = looked_at(*(f"salt-{number}" for number in range(6)))
    assert [one.name for one in told.findings] == ["salts"]
