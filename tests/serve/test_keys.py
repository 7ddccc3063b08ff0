"""API keys, and tenants that share no cache."""

from pathlib import Path
from typing import Any

import pytest
from serve_support import PATH, Served, engine_of, serving

from hybridkv.errors import ConfigError
from hybridkv.serve import ApiKeys, ServeOptions

FILE = "# who may ask\n\noperator\nalice  salt-of-alice\nbob\tsalt-of-bob\n"


def test_keys_and_tenants(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(FILE)
    with serving(engine_of("llama"), ServeOptions(keys=ApiKeys.read(file))) as served:
        _only_known_keys(served)
        _tenants_share_nothing(served)
        _operators_alone(served)


def ask(served: Served, key: str, **body: object) -> tuple[int, dict[str, Any]]:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    answer = served.client.post(PATH, json=body, headers=headers)
    return answer.status_code, answer.json()


def _only_known_keys(served: Served) -> None:
    for key in ("", "carol", "alice salt-of-alice", "salt-of-alice", "ALICE"):
        status, said = ask(served, key, prompt="a", nonsense=1)
        assert (status, said["error"]["code"]) == (401, "invalid_api_key")
    assert served.client.post(PATH, json={}, headers={"Authorization": "Basic alice"}).status_code == 401
    assert served.client.get("/health").status_code == 200
    assert served.client.get("/ready").status_code == 200
    assert served.client.get("/metrics").status_code == 401
    assert served.client.get("/v1/models", headers={"Authorization": "bearer bob"}).status_code == 200


def _tenants_share_nothing(served: Served) -> None:
    prompt = "what alice asked is alice's alone, whoever holds a clock"

    def cached(key: str, **body: object) -> int:
        status, said = ask(served, key, prompt=prompt, max_tokens=1, **body)
        assert status == 200, said
        found: int = said["usage"]["prompt_tokens_details"]["cached_tokens"]
        return found

    assert cached("alice") == 0
    assert cached("bob") == 0
    assert cached("operator") == 0
    assert cached("operator", cache_salt="other") == 0
    assert cached("alice") > 32
    assert cached("alice", cache_salt="salt-of-alice") > 32
    for key, salt in (("alice", "mine"), ("alice", "salt-of-bob"), ("operator", "salt-of-alice")):
        status, said = ask(served, key, prompt=prompt, cache_salt=salt)
        assert (status, said["error"]["param"]) == (403, "cache_salt")


def _operators_alone(served: Served) -> None:
    for path, method in (("/metrics", "GET"), ("/reset_prefix_cache", "POST")):
        for key, status in (("alice", 403), ("operator", 200)):
            headers = {"Authorization": f"Bearer {key}"}
            assert served.client.request(method, path, headers=headers).status_code == status


@pytest.mark.parametrize(
    ("text", "said"),
    [("", "holds no API key"), ("# a\n", "holds no API key"), ("a b c", "line 1"), ("a\n\na b", "line 3")],
)
def test_a_file_that_cannot_be_is_refused(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "keys"
    file.write_text(text)
    with pytest.raises(ConfigError, match=said):
        ApiKeys.read(file)
    with pytest.raises(ConfigError, match="cannot read"):
        ApiKeys.read(tmp_path / "none")


def test_keys_are_not_shown(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("secret\n")
    assert "secret" not in repr(ApiKeys.read(file))
