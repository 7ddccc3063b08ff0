"""Sessions of engines with several tensor parallel ranks, each a process with its own heads, go on with other ranks."""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_models import share_of
from runner_support import generated, greedy, loaded_model, shared_prompts
from safetensors import safe_open

import warm
from hybridkv.errors import ConfigError, SessionError, UnsupportedModelError
from hybridkv.runner import Engine, EngineOptions, ModelShare, Stored, join_sessions, plan_for, wrap
from hybridkv.runner.session_file import read_session, write_session

TOKENS = 10
PROMPT = shared_prompts(1, 6, prefix=50, longest=9)[0]
TAIL = [65, 66, 67]
KEY = b"a secret"

RANK = """
import json, sys
from datetime import timedelta
sys.path[:0] = {path!r}
import torch.distributed as dist
from rank_models import share_of
from runner_support import loaded_model
from test_session_ranks import KEY, TOKENS, engine, greedy
from hybridkv.runner import ModelShare, wrap

rank, ranks = int(sys.argv[1]), {ranks}
meeting = "file://" + {meeting!r}
dist.init_process_group("gloo", meeting, timedelta(seconds=60), ranks, rank)
whole = loaded_model({name!r}).model
loaded = wrap(share_of(whole, rank, ranks, keep_states={kept}), share=ModelShare.of(whole, rank, ranks))
with engine(loaded, {form!r}) as running:
    if {source!r}:
        running.import_({source!r}, key=KEY)
    (done,) = running.generate([{prompt!r}], greedy(TOKENS))
    running.export(done, {target!r} + str(rank), key=KEY)
print(json.dumps([done.hit_tokens, list(done.token_ids)]))
"""


def engine(loaded: Any, form: str | None = None) -> Engine:  # noqa: ANN401  # a LoadedModel
    return Engine(loaded, plan_for(loaded, [120] * 2, stored=Stored(form)), EngineOptions(self_check=False))


def run_ranks(
    name: str,
    ranks: int,
    prompt: list[int],
    folder: Path,
    *,
    source: str = "",
    form: str | None = None,
    kept: bool = False,
) -> tuple[int, list[int]]:
    """Run an engine of some ranks: it imports ``source``, generates, and exports. Return its hit and its tokens.

    ``kept``: whether each rank has the states of all heads.
    """
    folder.mkdir()
    script = folder / "rank.py"
    script.write_text(
        RANK.format(
            path=sys.path,
            ranks=ranks,
            meeting=str(folder / "meeting"),
            name=name,
            form=form,
            kept=kept,
            source=source,
            prompt=prompt,
            target=str(folder / "a"),
        )
    )
    with ExitStack() as stack:
        started = [
            stack.enter_context(warm.Warm([script, str(rank)], environment={"OMP_NUM_THREADS": "1"}))
            for rank in range(ranks)
        ]
        outputs = [one.communicate(timeout=120) for one in started]
    assert [one.returncode for one in started] == [0] * ranks, outputs
    said = [json.loads(out.splitlines()[-1]) for out, _ in outputs]
    assert all(one == said[0] for one in said)
    return said[0][0], said[0][1]


def of_one_rank(name: str, path: Path, form: str | None = None) -> list[int]:
    """Export a conversation of an engine of one rank; return its tokens."""
    with engine(loaded_model(name), form) as running:
        (done,) = running.generate([PROMPT], greedy(TOKENS))
        running.export(done, path, key=KEY)
    return [*done.prompt_token_ids, *done.token_ids]


@pytest.mark.parametrize(
    ("name", "ranks", "others", "kept"),
    [
        *(("llama", 2, 4, ()), ("llama", 4, 2, ()), ("qwen3_next", 2, 2, ())),
        *(("qwen3_next", 2, 2, ("first",)), ("qwen3_next", 2, 2, ("of joined", "of one"))),
    ],
)
def test_session_of_some_ranks_goes_on_with_one_and_with_others(
    name: str, ranks: int, others: int, kept: tuple[str, ...], tmp_path: Path
) -> None:
    """Four ranks of two KV heads: each head is copied. ``kept``: engines whose ranks have the states of all heads."""
    _, tokens = run_ranks(name, ranks, PROMPT, tmp_path / "first", kept="first" in kept)
    conversation = of_one_rank(name, tmp_path / "one")
    assert [*PROMPT, *tokens] == conversation
    files = [tmp_path / "first" / f"a{rank}" for rank in reversed(range(ranks))]
    join_sessions(files, tmp_path / "joined", key=KEY)
    with safe_open(tmp_path / "joined", framework="pt") as joined, safe_open(tmp_path / "one", framework="pt") as one:
        assert joined.keys() == one.keys()
        for tensor in joined.keys():  # noqa: SIM118  # no mapping
            torch.testing.assert_close(joined.get_tensor(tensor), one.get_tensor(tensor), rtol=1e-3, atol=1e-3)
    turn = [*conversation, *TAIL]
    expected = list(generated(loaded_model(name), turn, TOKENS))
    with engine(loaded_model(name)) as running:
        session = running.import_(tmp_path / "joined", key=KEY)
        (done,) = running.generate([turn], greedy(TOKENS))
    assert (done.hit_tokens, list(done.token_ids)) == (len(conversation) - 1, expected)
    assert session.resume_tokens == len(conversation) - 1
    for source in ("joined", "one"):
        place = f"of {source}"
        hit, made = run_ranks(name, others, turn, tmp_path / place, source=str(tmp_path / source), kept=place in kept)
        assert (hit, made) == (len(conversation) - 1, expected)


def test_quantized_pages_are_shared_bit_for_bit(tmp_path: Path) -> None:
    """A rank that imports a whole session and exports it again has the codes and scales of its heads."""
    form = "int8_per_token_head"
    conversation = of_one_rank("llama", tmp_path / "one", form)
    turn = [*conversation, *TAIL]
    hit, _ = run_ranks("llama", 2, turn, tmp_path / "two", source=str(tmp_path / "one"), form=form)
    assert hit == len(conversation) - 1
    join_sessions([tmp_path / "two" / "a0", tmp_path / "two" / "a1"], tmp_path / "joined", key=KEY)
    with safe_open(tmp_path / "joined", framework="pt") as joined, safe_open(tmp_path / "one", framework="pt") as one:
        for name in one.keys():  # noqa: SIM118  # no mapping
            before = one.get_tensor(name)[: len(conversation) - 1]
            assert torch.equal(joined.get_tensor(name)[: len(before)], before)


# -- files of ranks, made of a whole one by hand


def by_hand(name: str, whole: Path, folder: Path, ranks: int) -> list[Path]:
    """Cut a session by heads and channels, as the models have them: no code of the library decides where."""
    manifest, tensors, _ = read_session(whole, KEY, lambda _: None)
    config: Any = loaded_model(name).model.config
    files = []
    for rank in range(ranks):

        def share(tensor: torch.Tensor, axis: int, *sections: int, rank: int = rank) -> torch.Tensor:
            return torch.cat([one.chunk(ranks, axis)[rank] for one in torch.split(tensor, list(sections), axis)], axis)

        mine = {"tokens": tensors["tokens"]}
        for one, tensor in tensors.items():
            if name == "deepseek_v3":  # a latent for all heads
                mine[one] = tensor
            elif one.endswith((".keys", ".values")):
                mine[one] = share(tensor, 1, tensor.shape[1])
            elif one.endswith(".state.0") and name == "bamba":
                inner, state = config.mamba_n_heads * config.mamba_d_head, config.mamba_n_groups * config.mamba_d_state
                mine[one] = share(tensor, 0, inner, state, state)
            elif one.endswith(".state.0") and name == "qwen3_next":
                keys = config.linear_num_key_heads * config.linear_key_head_dim
                mine[one] = share(tensor, 0, keys, keys, len(tensor) - 2 * keys)
            elif one.endswith((".state.0", ".state.1")):
                mine[one] = share(tensor, 0, len(tensor))
        described = {of: {**entry, "sha256": None} for of, entry in manifest["tensors"].items()}
        files.append(folder / f"{name} {rank}")
        own = {field: value for field, value in manifest.items() if field not in {"tensors", "rank"}}
        write_session(files[-1], own | {"rank": [rank, ranks]}, mine, described, KEY)
    return files


@pytest.mark.parametrize("name", ["llama", "gemma3", "deepseek_v3", "mamba", "bamba", "qwen3_next", "lfm2"])
def test_ranks_cut_by_hand_are_joined_to_the_whole(name: str, tmp_path: Path) -> None:
    conversation = of_one_rank(name, tmp_path / "one")
    join_sessions(by_hand(name, tmp_path / "one", tmp_path, 2), tmp_path / "joined", key=KEY)
    whole, joined = (read_session(tmp_path / one, KEY, lambda _: None) for one in ("one", "joined"))
    assert whole[0] == joined[0]
    assert all(torch.equal(tensor, joined[1][one]) for one, tensor in whole[1].items())
    with engine(loaded_model(name)) as running:
        running.import_(tmp_path / "joined", key=KEY)
        (done,) = running.generate([[*conversation, *TAIL]], greedy(TOKENS))
    assert done.hit_tokens == len(conversation) - 1
    assert done.token_ids == generated(loaded_model(name), [*conversation, *TAIL], TOKENS)


def _doubled(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {one: tensor.repeat(1, 2, 1) for one, tensor in tensors.items() if one.endswith("keys")}


def test_files_that_do_not_belong_together_are_named(tmp_path: Path) -> None:
    of_one_rank("llama", tmp_path / "one")
    first, second = by_hand("llama", tmp_path / "one", tmp_path, 2)
    with engine(loaded_model("llama")) as running, pytest.raises(SessionError, match="join the files of all its ranks"):
        running.import_(first, key=KEY)
    for given in ([first], [first, first], [tmp_path / "one", second], []):
        with pytest.raises(SessionError, match="give the file of each rank of an engine once"):
            join_sessions(given, tmp_path / "joined", key=KEY)
    with pytest.raises(SessionError, match="is signed: give its key"):
        join_sessions([first, second], tmp_path / "joined")
    changes: list[tuple[str, Callable[[dict[str, Any], dict[str, torch.Tensor]], object]]] = [
        ("other resume_tokens", lambda manifest, _: manifest.update(resume_tokens=3)),
        ("other weights", lambda manifest, _: manifest.update(weights="no")),
        ("other tokens", lambda _, tensors: tensors["tokens"].add_(1)),
        ("other tokens", lambda manifest, _: next(iter(manifest["tensors"].values())).update(first_token=1)),
        ("no tensor", lambda _, tensors: tensors.pop(next(one for one in tensors if one.endswith("keys")))),
        ("do not fit each other", lambda _, tensors: tensors.update(_doubled(tensors))),
    ]  # fmt: skip
    for message, change in changes:
        manifest, tensors, _ = read_session(second, KEY, lambda _: None)
        change(manifest, tensors)
        entries = {one: manifest["tensors"][one] for one in tensors}
        write_session(
            tmp_path / "changed", {one: manifest[one] for one in manifest if one != "tensors"}, tensors, entries, KEY
        )
        with pytest.raises(SessionError, match=message):
            join_sessions([first, tmp_path / "changed"], tmp_path / "joined", key=KEY)
    assert not (tmp_path / "joined").exists()


def test_share_of_another_model_is_named() -> None:
    with pytest.raises(ConfigError, match="rank"):
        ModelShare.of(loaded_model("llama").model, 2, 2)
    loaded = wrap(loaded_model("llama").model, share=ModelShare.of(loaded_model("llama").model, 0, 2))
    with engine(loaded) as running:
        (done,) = running.generate([PROMPT], greedy(2))
        with pytest.raises(UnsupportedModelError, match="give the whole model of which this is a rank"):
            running.export(done, "nowhere")


@pytest.mark.parametrize(
    ("split", "message"),
    [
        (None, "does not say how ranks share"),
        ([1, [[2, 1]]], "does not say how ranks share"),
        ([-2, [[2, 0]]], "does not say how ranks share"),
        ([-2, [[True, 1]]], "does not say how ranks share"),
        ([-2, [[3, 1]]], "cannot be shared by 2 ranks"),
        ([-9, [[2, 1]]], "cannot be shared by 2 ranks"),
        ([-3, [[1, len(PROMPT) + TOKENS - 1]]], "this engine needs|begins at"),
    ],
)
def test_session_with_a_wrong_split_changes_nothing(split: object, message: str, tmp_path: Path) -> None:
    of_one_rank("llama", tmp_path / "one")
    manifest, tensors, _ = read_session(tmp_path / "one", KEY, lambda _: None)
    described = manifest.pop("tensors")
    for name in described:
        described[name]["split"] = split
    write_session(tmp_path / "changed", manifest, tensors, described, KEY)
    half = wrap(share_of(loaded_model("llama").model, 0, 2), share=ModelShare.of(loaded_model("llama").model, 0, 2))
    with alone(tmp_path / "meeting"), engine(half) as running:
        before = running.cache.statistics(), running.runner.storage.arena.clone()
        with pytest.raises(SessionError, match=message):
            running.import_(tmp_path / "changed", key=KEY)
        assert running.cache.statistics() == before[0]
        assert torch.equal(running.runner.storage.arena, before[1])


@contextmanager
def alone(meeting: Path) -> Iterator[None]:
    """A group of this process, in which models of ranks can run without the others."""
    dist.init_process_group("gloo", f"file://{meeting}", rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
