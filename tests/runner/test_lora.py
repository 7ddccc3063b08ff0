"""Requests of a model and of its adapters in one batch give the tokens of peft with each adapter alone."""

import json
import warnings
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from peft import PeftModel
from runner_support import (
    TOLERANCE,
    EngineFactory,
    EveryLogit,
    drained,
    generated,
    greedy,
    loaded_model,
    reference_logits,
    relative_difference,
    shared_prompts,
)
from safetensors.torch import load_file, save_file
from scripted import ScriptedDrafter
from test_host_memory import chats

from hybridkv.errors import ConfigError, WorkerError
from hybridkv.extra_keys import LoraAdapter
from hybridkv.request import Request, SamplingParams
from hybridkv.runner import Completion, Engine, EngineOptions, LoadedModel, ModelShare, load, plan_for, wrap
from hybridkv.runner import engine as engine_module
from hybridkv.runner.lora import Adapter, Adapters, LoraRows, LoraTokens, Side
from hybridkv.runner.probe import Forwards
from hybridkv.runner.step_context import StepContext
from hybridkv.step import NewRow
from lora_folders import save_adapter

NAMES = ("llama", "qwen3_next", "granite_hybrid")
ADAPTERS = (None, "few", "all")
OUTPUT = 10
Asked = list[tuple[list[int], str | None]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, str]]:
    @cache
    def of(name: str) -> dict[str, str]:
        folder = tmp_path_factory.mktemp(name)
        return {one: str(save_adapter(name, folder, one, seed)) for seed, one in enumerate(ADAPTERS[1:])}

    return of


class Peft:
    """A tiny model with one adapter, as transformers and peft run it."""

    def __init__(self, name: str, folders: Mapping[str, str]) -> None:
        self.models: dict[str | None, LoadedModel] = {None: load(f"tiny:{name}")}
        for adapter, folder in folders.items():
            model = load(f"tiny:{name}").model
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "The following (rank|alpha)_pattern keys")  # peft's own, for experts
                PeftModel.from_pretrained(model, folder)  # in place
            self.models[adapter] = wrap(model)

    @cache  # noqa: B019 - lives as long as its test module
    def tokens(self, prompt: tuple[int, ...], adapter: str | None, count: int = OUTPUT) -> tuple[int, ...]:
        return generated(self.models[adapter], prompt, count)

    def same(self, asked: Asked, done: list[Completion]) -> None:
        said = [one.token_ids for one in done]
        assert said == [self.tokens(tuple(prompt), adapter) for prompt, adapter in asked]


@pytest.fixture(scope="module")
def pefts(folders: Callable[[str], dict[str, str]]) -> Callable[[str], Peft]:
    return cache(lambda name: Peft(name, folders(name)))


def run(engine: Engine, asked: Asked, sampling: SamplingParams | None = None) -> list[Completion]:
    """All of ``asked`` at once, in their order."""
    ids = [engine.add(prompt, sampling or greedy(OUTPUT), lora=adapter) for prompt, adapter in asked]
    done = {one.request_id: one for one in drained(engine)}
    engine.scheduler.check()
    return [done[one] for one in ids]


def all_of(prompts: list[list[int]]) -> Asked:
    """Every prompt with the model and with each adapter, next to each other."""
    return [(prompt, adapter) for prompt in prompts for adapter in ADAPTERS]


@pytest.mark.parametrize("name", NAMES)
def test_mixed_batches_equal_peft_with_each_adapter_alone(
    name: str, make_engine: EngineFactory, folders: Callable[[str], dict[str, str]], pefts: Callable[[str], Peft]
) -> None:
    asked, peft, seen = all_of(shared_prompts(3, 1)), pefts(name), EveryLogit()
    loaded, before = loaded_model(name), set(loaded_model(name).model.state_dict())
    engine = make_engine(
        loaded, [one for one, _ in asked] * 2, 2 * OUTPUT, observer=seen, token_budget=48, lora_modules=folders(name)
    )
    first = run(engine, asked)
    peft.same(asked, first)
    assert len({one.token_ids for one in first}) == len(first)
    assert max(len(step) for step in seen.steps) > 2 * len(ADAPTERS)  # so rows of all three are in one step
    for (_, adapter), one in zip(asked, first, strict=True):
        apart = relative_difference(seen.of(one), reference_logits(peft.models[adapter], one))
        assert float(apart.max()) < TOLERANCE
    again = run(engine, asked)
    peft.same(asked, again)
    assert all(one.hit_tokens == len(prompt) - 1 for (prompt, _), one in zip(asked, again, strict=True))
    longer = [([*prompt, *one.token_ids, 65, 66], adapter) for (prompt, adapter), one in zip(asked, first, strict=True)]
    done = run(engine, longer, greedy(4))
    expected = [peft.tokens(tuple(prompt), adapter, 4) for prompt, adapter in longer]
    assert [one.token_ids for one in done] == expected
    assert all(one.hit_tokens >= len(prompt) - 3 for (prompt, _), one in zip(longer, done, strict=True))
    engine.close()
    assert set(loaded.model.state_dict()) == before
    assert not any(one._forward_hooks for one in loaded.model.modules())


@pytest.mark.parametrize("name", NAMES)
def test_preempted_requests_of_adapters_equal_peft(
    name: str, make_engine: EngineFactory, folders: Callable[[str], dict[str, str]], pefts: Callable[[str], Peft]
) -> None:
    asked, many = all_of(shared_prompts(2, 2)), 5 * OUTPUT
    engine = make_engine(
        loaded_model(name), [one for one, _ in asked], many, room_for=2, max_running=6, lora_modules=folders(name)
    )
    done = run(engine, asked, greedy(many))
    assert engine.statistics().preemptions > 0
    assert [one.token_ids for one in done] == [pefts(name).tokens(tuple(prompt), one, many) for prompt, one in asked]


@pytest.mark.parametrize("name", NAMES)
def test_adapters_with_host_memory_equal_peft(
    name: str, folders: Callable[[str], dict[str, str]], pefts: Callable[[str], Peft]
) -> None:
    loaded, prompts = loaded_model(name), chats(3, 1)
    asked = all_of(prompts)
    longest = max(map(len, prompts)) + OUTPUT
    plan = plan_for(loaded, [longest, longest], max_model_len=longest + 1)
    options = EngineOptions(max_running=2, in_flight=2, self_check=False, lora_modules=folders(name))
    with Engine(loaded, plan, options, host_memory="32MiB") as engine:
        for _ in range(3):
            pefts(name).same(asked, run(engine, asked))
        assert engine.tier is not None
        assert engine.tier.statistics().loads > 0


@pytest.mark.parametrize("name", NAMES)
def test_drafts_of_adapters_equal_peft(
    name: str, make_engine: EngineFactory, folders: Callable[[str], dict[str, str]], pefts: Callable[[str], Peft]
) -> None:
    peft, prompts = pefts(name), shared_prompts(2, 3)
    script = np.random.default_rng(0)

    def drafts(_: Request, __: int) -> tuple[int, int]:
        count = int(script.integers(0, 5))
        return int(script.integers(0, count + 1)), count

    asked, drafter = all_of(prompts), ScriptedDrafter(drafts)
    drafter._outputs = {(tuple(prompt), ADAPTERS.index(one)): peft.tokens(tuple(prompt), one) for prompt, one in asked}
    engine = make_engine(
        loaded_model(name), [one for one, _ in asked], OUTPUT, speculate=drafter, lora_modules=folders(name)
    )
    for prompt, one in asked:
        sampling = SamplingParams(
            max_tokens=OUTPUT, ignore_eos=True, seed=ADAPTERS.index(one)
        )  # greedy: names the script
        engine.add(prompt, sampling, lora=one)
    done = sorted(drained(engine), key=lambda one: int(one.request_id))
    peft.same(asked, done)
    assert sum(engine.statistics().accepted_by_position) > 0


@pytest.mark.parametrize("name", NAMES)
def test_forks_of_adapters_have_the_logits_of_peft(
    name: str, make_engine: EngineFactory, folders: Callable[[str], dict[str, str]], pefts: Callable[[str], Peft]
) -> None:
    asked, seen = all_of(shared_prompts(1, 4)), EveryLogit()
    sampling = SamplingParams(n=3, temperature=1.0, seed=5, max_tokens=OUTPUT, ignore_eos=True)
    prompts = [one for one, _ in asked for _ in range(3)]
    engine = make_engine(loaded_model(name), prompts, OUTPUT, observer=seen, lora_modules=folders(name))
    adapter_of = {engine.add(prompt, sampling, lora=adapter): adapter for prompt, adapter in asked}
    done = drained(engine)
    assert len(done) == 9
    for one in done:
        adapter = adapter_of[one.request_id.partition("#")[0]]
        apart = relative_difference(seen.of(one), reference_logits(pefts(name).models[adapter], one))
        assert float(apart.max()) < TOLERANCE


def test_adapters_of_rows_that_run_alone_equal_peft(
    make_engine: EngineFactory,
    folders: Callable[[str], dict[str, str]],
    pefts: Callable[[str], Peft],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_module, "require_same", lambda *_: Forwards.BY_ROW)
    asked = all_of(shared_prompts(2, 6))
    engine = make_engine(loaded_model("llama"), [one for one, _ in asked], OUTPUT, lora_modules=folders("llama"))
    assert engine.runner.forwards is Forwards.BY_ROW
    pefts("llama").same(asked, run(engine, asked))


def test_rows_do_not_depend_on_values_of_other_adapters() -> None:
    """Infinity in the part of another adapter leaves a row as it is."""
    layer, context = torch.nn.Linear(2, 2), StepContext()
    a, b = torch.tensor([[1.0, 0.0], [3e38, 3e38]]), torch.ones(2, 2)
    adapters = Adapters()
    adapters.sides = (Side(layer, a, b, torch.tensor([1, 2])),)
    rows, x = LoraRows(adapters, context, 4), torch.full((1, 3, 2), 10.0)
    plain = layer(x)
    rows.install()
    context.lora = LoraTokens(torch.tensor([1, 0, 2]))
    changed = layer(x)
    assert torch.equal(changed[0, 1], plain[0, 1])
    assert torch.equal(changed[0, 0], plain[0, 0] + 10)
    assert changed[0, 2].isinf().all()
    with pytest.raises(WorkerError, match="got 2 rows for 3 tokens"):
        layer(x[:, :2])
    rows.remove()
    assert torch.equal(layer(x), plain)


# -- keys


def in_turn(engine: Engine, prompts: list[list[int]]) -> list[Completion]:
    """Every prompt with the model, then every prompt with each adapter."""
    return [run(engine, [(prompt, adapter)])[0] for adapter in ADAPTERS for prompt in prompts]


def unlike(count: int) -> list[list[int]]:
    """Prompts without a common beginning, the shortest below a block."""
    draw = np.random.default_rng(7)
    return [draw.integers(32, 127, length).tolist() for length in (5, 40, 300)[:count]]


@pytest.mark.parametrize("name", ["llama", "qwen3_next"])
def test_prefixes_are_never_hit_across_adapters(
    name: str, make_engine: EngineFactory, folders: Callable[[str], dict[str, str]], pefts: Callable[[str], Peft]
) -> None:
    prompts = unlike(3)
    engine = make_engine(loaded_model(name), prompts * 6, OUTPUT, lora_modules=folders(name))
    done = in_turn(engine, prompts)
    assert [one.hit_tokens for one in done] == [0] * 9
    pefts(name).same([(prompt, adapter) for adapter in ADAPTERS for prompt in prompts], done)
    assert [one.hit_tokens for one in in_turn(engine, prompts)] == [len(prompt) - 1 for prompt in prompts] * 3


def test_hits_across_adapters_would_change_tokens(
    make_engine: EngineFactory, folders: Callable[[str], dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test above can fail: with keys that leave the adapter out, requests hit blocks of another."""
    monkeypatch.setattr(Request, "_extra_keys_of", lambda *_: None)
    prompts, peft = unlike(3), Peft("llama", folders("llama"))
    engine = make_engine(loaded_model("llama"), prompts * 3, OUTPUT, lora_modules=folders("llama"))
    done = in_turn(engine, prompts)
    assert [one.hit_tokens for one in done] == [0] * 3 + [len(prompt) - 1 for prompt in prompts] * 2
    with pytest.raises(AssertionError):
        peft.same([(prompt, adapter) for adapter in ADAPTERS for prompt in prompts], done)


def test_adapter_keys_name_the_content_of_the_files(folders: Callable[[str], dict[str, str]], tmp_path: Path) -> None:
    folder = Path(folders("llama")["few"])
    first = Adapter.read("sql", folder, 1).key
    assert (first.name, first.id) == ("sql", 1)
    moved = copied(folder, tmp_path / "moved")
    assert Adapter.read("sql", moved, 2).key.path == first.path
    tensors = load_file(moved / "adapter_model.safetensors")
    name = min(tensors)
    save_file({**tensors, name: tensors[name] + 1}, moved / "adapter_model.safetensors")
    assert Adapter.read("sql", moved, 1).key.path != first.path


def test_base_keys_do_not_change_beside_adapters(
    make_engine: EngineFactory, folders: Callable[[str], dict[str, str]]
) -> None:
    (prompt,) = shared_prompts(1, 5)
    for adapters in ({}, folders("llama")):
        engine = make_engine(loaded_model("llama"), [prompt], OUTPUT, lora_modules=adapters)
        engine.add(prompt, greedy(1))
        (live,) = engine._live.values()
        assert live.request.hashes == Request("r", prompt, hasher=engine.cache.hasher).hashes
        assert live.request.hashes


# -- what is rejected


def copied(folder: Path, to: Path) -> Path:
    to.mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (to / name).write_bytes((folder / name).read_bytes())
    return to


def config_with(folder: Path, **fields: object) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def tensors_with(folder: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    path = folder / "adapter_model.safetensors"
    save_file(change(load_file(path)), path)


def renamed(old: str, new: str) -> Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]:
    return lambda tensors: {name.replace(old, new): tensor for name, tensor in tensors.items()}


V_A = "base_model.model.model.layers.1.self_attn.v_proj.lora_A.weight"


@pytest.mark.parametrize(
    ("break_it", "said"),
    [
        (lambda f: config_with(f, peft_type="LOHA"), "is of peft_type 'LOHA': only LORA"),
        (lambda f: config_with(f, use_dora=True), "use_dora=True, which is not supported"),
        (lambda f: config_with(f, modules_to_save=["embed_tokens"]), r"modules_to_save=\['embed_tokens'\]"),
        (lambda f: config_with(f, bias="lora_only"), "bias='lora_only'"),
        (lambda f: config_with(f, trainable_token_indices=[3]), "trainable_token_indices"),
        (lambda f: config_with(f, alora_invocation_tokens=[3]), "alora_invocation_tokens"),
        (lambda f: config_with(f, option_of_next_year={"a": 1}), "option_of_next_year"),
        (lambda f: config_with(f, init_lora_weights="pissa_niter_4"), "changes the model's own weights"),
        (lambda f: config_with(f, r=8), r"has A \(4, 64\) and B \(\d+, 4\), but .* says rank 8"),
        (lambda f: config_with(f, rank_pattern={"v_proj": 2}), r"v_proj has A \(4, 64\) .* says rank 2"),
        (lambda f: config_with(f, rank_pattern={"v_proj(": 2}), "rank_pattern must map expressions to numbers"),
        (lambda f: config_with(f, alpha_pattern=[3]), "alpha_pattern must map expressions to numbers"),
        (lambda f: config_with(f, lora_alpha=-1), "lora_alpha of .* must be a number above 0, got -1"),
        (lambda f: (f / "adapter_config.json").write_text("[]"), "must be a JSON object"),
        (lambda f: (f / "adapter_config.json").write_text("{"), "cannot be read: not JSON"),
        (lambda f: (f / "adapter_config.json").unlink(), "cannot be read: .*give a folder of peft"),
        (lambda f: (f / "adapter_model.safetensors").write_bytes(b"\0" * 99), "cannot be read"),
        (lambda f: tensors_with(f, lambda _: {}), "holds no tensors"),
        (
            lambda f: tensors_with(f, renamed("layers.1", "layers.9")),
            r"layers\.9\..* where LlamaForCausalLM has nothing",
        ),
        (
            lambda f: tensors_with(f, renamed("layers.1.self_attn.v_proj", "norm")),
            "model.norm, where .* has a LlamaRMSNorm",
        ),
        (
            lambda f: tensors_with(f, renamed("model.layers.1.self_attn.v_proj", "lm_head")),
            "lm_head, where .* a Linear",
        ),
        (lambda f: tensors_with(f, renamed(".lora_A.weight", ".lora_embedding_A")), "lora_embedding_A of shape"),
        (
            lambda f: tensors_with(f, lambda t: {n: one for n, one in t.items() if n != V_A}),
            r"v_proj has B \(\d+, 4\), but",
        ),
        (
            lambda f: tensors_with(f, lambda t: {**t, V_A: t[V_A][:, :32].contiguous()}),
            "maps 32 to .* where the layer maps 64 to",
        ),
        (
            lambda f: tensors_with(f, lambda t: {**t, V_A: t[V_A] * torch.nan}),
            "v_proj by values that are NaN or beyond torch.float32",
        ),
    ],
)
def test_adapters_that_cannot_run_are_rejected_by_name(
    break_it: Callable[[Path], object], said: str, folders: Callable[[str], dict[str, str]], tmp_path: Path
) -> None:
    folder = copied(Path(folders("llama")["few"]), tmp_path / "sql")
    break_it(folder)
    loaded = loaded_model("llama")
    with pytest.raises(ConfigError, match=rf"adapter 'sql'.*{said}"):
        Engine(loaded, memory="4MiB", options=EngineOptions(self_check=False, lora_modules={"sql": folder}))
    Engine(loaded, memory="4MiB", options=EngineOptions(self_check=False)).close()  # the model is free


def test_adapters_of_layers_that_see_some_tokens_are_rejected(
    tmp_path: Path, folders: Callable[[str], dict[str, str]]
) -> None:
    """As experts do; dt_proj of Mamba sees none, because the model multiplies with its weight."""
    loaded, folder = load("tiny:llama"), Path(folders("llama")["all"])
    mlp = loaded.model.get_decoder().layers[1].mlp
    mlp.forward = lambda hidden: (mlp.gate_proj(hidden[:, :2]), type(mlp).forward(mlp, hidden))[1]
    with pytest.raises(ConfigError, match=r"layers\.1\.mlp\.gate_proj of tiny:llama sees 2 of 5 tokens"):
        Adapters.load(loaded, EngineOptions(lora_modules={"sql": folder}))
    loaded, few = load("tiny:mamba"), copied(Path(folders("llama")["few"]), tmp_path / "few")
    ((name, layer), *_) = ((name, one) for name, one in loaded.model.named_modules() if name.endswith("dt_proj"))
    parts = {"A": torch.ones(4, layer.in_features), "B": torch.ones(layer.out_features, 4)}
    tensors_with(few, lambda _: {f"base_model.model.{name}.lora_{one}.weight": part for one, part in parts.items()})
    with pytest.raises(ConfigError, match="dt_proj of tiny:mamba sees 0 of 5 tokens"):
        Adapters.load(loaded, EngineOptions(lora_modules={"sql": few}))


def test_adapters_with_other_options_are_rejected(folders: Callable[[str], dict[str, str]]) -> None:
    loaded, adapters = loaded_model("llama"), folders("llama")
    with pytest.raises(ConfigError, match="do not run with compiled steps"):
        Adapters.load(loaded, EngineOptions(compile="decode", attention="triton", lora_modules=adapters))
    share = cast("ModelShare", SimpleNamespace(ranks=2))
    with pytest.raises(ConfigError, match="do not run with tensor parallel ranks"):
        Adapters.load(LoadedModel("m", loaded.model, None, (), share=share), EngineOptions(lora_modules=adapters))
    encoder = load("tiny:t5")
    with pytest.raises(ConfigError, match="encoder-decoder, which cannot have adapters"):
        Adapters.load(encoder, EngineOptions(lora_modules=adapters))
    with pytest.raises(ConfigError, match="must be a mapping of names to folders"):
        EngineOptions(lora_modules=["a"])  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="a name in lora_modules must be text"):
        EngineOptions(lora_modules={"": "x"})


def test_requests_and_sessions_of_unknown_adapters_are_rejected(
    make_engine: EngineFactory, folders: Callable[[str], dict[str, str]], tmp_path: Path
) -> None:
    engine = make_engine(loaded_model("llama"), [[1] * 20], OUTPUT, lora_modules=folders("llama"))
    with pytest.raises(ConfigError, match="adapter 'sql' is not loaded: choose one of lora_modules \\('few', 'all'\\)"):
        engine.add([1, 2], lora="sql")
    done = run(engine, [([1, 2, 3], "few")])
    leaving: list[Callable[[], object]] = [
        lambda: engine.export(done[0], tmp_path / "s"),
        lambda: engine.import_(tmp_path / "s"),
    ]
    for leave in leaving:
        with pytest.raises(ConfigError, match="session files do not say which adapter"):
            leave()
    plain = make_engine(loaded_model("llama"), [[1] * 20], OUTPUT)
    with pytest.raises(ConfigError, match=r"adapter 'few' is not loaded: choose one of lora_modules \(none\)"):
        plain.add([1, 2], lora="few")


def test_rows_of_adapters_that_a_worker_lacks_are_rejected() -> None:
    row = NewRow(0, "r", np.array([1], np.int32), 1, SamplingParams(), lora="sql")
    with pytest.raises(WorkerError, match="row 0 needs adapter 'sql', which this runner lacks"):
        LoraRows(Adapters(), StepContext(), 2).check([row])


def test_scheduler_names_the_adapter_of_a_new_row(
    make_engine: EngineFactory, folders: Callable[[str], dict[str, str]]
) -> None:
    seen: Any = EveryLogit()
    engine = make_engine(loaded_model("llama"), [[1] * 20] * 2, OUTPUT, observer=seen, lora_modules=folders("llama"))
    run(engine, [([1, 2], "all"), ([1, 2], None)])
    assert [new.lora for step in seen.steps for new in step.new_rows] == ["all", None]
    assert engine.adapters.key("all") == LoraAdapter("all", engine.adapters.key("all").path, 2)  # type: ignore[union-attr]
