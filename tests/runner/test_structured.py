"""Structured outputs: against a plain loop with masks, against jsonschema, and beside all else of a request."""

import asyncio
import json
import random
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from jsonschema import Draft202012Validator
from llguidance import LLMatcher
from llguidance.hf import from_tokenizer
from runner_support import EngineFactory, drained, loaded_model, shared_prompts

from hybridkv.errors import ConfigError, WorkerError
from hybridkv.request import SamplingParams, StructuredKind, StructuredOutput
from hybridkv.runner import AsyncEngine, Completion, Engine, EngineOptions, LoadedModel, wrap
from hybridkv.runner.check import LogitRecorder, check_completions
from hybridkv.runner.drafters import DraftModel, NgramDrafter
from hybridkv.runner.probe import attention_implementation
from hybridkv.runner.sampling import structured
from hybridkv.runner.sampling.draws import NO_DRAFT
from hybridkv.runner.sampling.sampler import RowState, sample
from hybridkv.schedule import FinishReason
from hybridkv.step import NewRow
from hybridkv.wire import decode_step, encode_step
from random_schemas import random_schema

RECORD = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "tags": {"type": "array", "items": {"enum": ["red", "green", None]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
FORMS = {
    "record": StructuredOutput("json_schema", json.dumps(RECORD)),
    "regex": StructuredOutput("regex", "(ab|ba){3,9}[0-9]{2}"),
    "open": StructuredOutput("regex", "[a-c]{4,30}"),
    "choice": StructuredOutput("choice", '["north by north west", "north", "south\\n"]'),
    "grammar": StructuredOutput("grammar", 'root ::= "(" root ")" | [xyz] [xyz] [xyz]'),
    "framed": StructuredOutput(
        "regex", "[ab]{2,9}", 'start: thought @form\nthought[lazy]: THOUGHT\nTHOUGHT: /[a-d ]*/ "d"'
    ),
}
MOST = 150


def matcher(form: StructuredOutput) -> LLMatcher:
    """The library's, made here: of the tokenizer of tiny models."""
    tokenizer = from_tokenizer(loaded_model("llama").tokenizer, 257, [256])
    if form.frame:
        inner = {"name": "form", "lark_grammar": f"start: /{form.text}/"}
        made = json.dumps({"grammars": [{"lark_grammar": form.frame}, inner]})
    elif form.kind == "regex":
        made = LLMatcher.grammar_from_regex(form.text)
    elif form.kind == "grammar":
        made = LLMatcher.grammar_from_lark('start: "(" start ")" | /[xyz][xyz][xyz]/')
    else:
        made = LLMatcher.grammar_from_json_schema(form.text, defaults={"whitespace_pattern": r"\n?[ \t]{0,40}"})
    return LLMatcher(tokenizer, made)


def plain_loop(loaded: LoadedModel, prompt: Sequence[int], params: SamplingParams) -> tuple[list[int], str]:
    """Greedy, token by token, whole forwards of plain transformers: the tokens, and why they end."""
    assert params.structured is not None
    parser, output = matcher(params.structured), list[int]()
    with attention_implementation(loaded.model, "eager"), torch.inference_mode():
        while len(output) < params.max_tokens:
            ids = torch.tensor([[*prompt, *output]])
            logits = loaded.model(ids, use_cache=False).logits[0, -1].double()
            for token, times in Counter(output).items():
                logits[token] -= params.frequency_penalty * times
            for token, bias in params.biases:
                logits[token] += bias
            allowed = np.frombuffer(parser.compute_logit_bias(), np.uint8) > 0
            if len(output) < params.min_tokens:
                allowed = allowed & (np.arange(257) != 256)
            logits[torch.from_numpy(~allowed)] = -torch.inf
            output.append(int(logits.argmax()))
            assert parser.consume_token(output[-1])
            if output[-1] == 256 or output[-1] in params.stop_token_ids or parser.is_stopped():
                return output, "stop"
    return output, "length"


ASKED = [
    *(SamplingParams(structured=form, max_tokens=MOST) for name, form in FORMS.items() if name != "choice"),
    SamplingParams(structured=FORMS["record"], frequency_penalty=0.8, max_tokens=MOST),
    SamplingParams(structured=FORMS["open"], logit_bias={256: 30.0}, min_tokens=7, max_tokens=MOST),
    SamplingParams(structured=FORMS["grammar"], logit_bias={40: 30.0}, max_tokens=12),
    SamplingParams(structured=FORMS["record"], stop_token_ids=(ord(","),), logprobs=2, max_tokens=MOST),
]
REPEATED = [[*b"ab ab ab ab ab ab ab "], [*b'{"name": "a", "age": 1, "name": "a", "age": 1, '], [*b"xyxyxyxyxyxyxyxy"]]
WAYS: dict[str, dict[str, Any]] = {
    "alone": {},
    "ahead": {"in_flight": 2},
    "chunked": {"token_budget": 9},
    "preempted": {"memory_blocks": 14, "token_budget": 60},
}


def prompts_of(count: int) -> list[list[int]]:
    return [REPEATED[at % 3] for at in range(count)]


@pytest.fixture(scope="module")
def expected() -> dict[str, list[tuple[list[int], str]]]:
    """The plain loop's outputs of each model."""
    found = {}
    for name in ("llama", "falcon_h1"):
        loaded = loaded_model(name)
        asked = zip(prompts_of(len(ASKED)), ASKED, strict=True)
        found[name] = [plain_loop(loaded, prompt, params) for prompt, params in asked]
    return found


def said(done: Sequence[Completion]) -> list[tuple[list[int], str]]:
    return [([*one.token_ids], str(one.finish_reason)) for one in done]


@pytest.mark.parametrize(
    ("name", "drafts", "way"),
    [*(("llama", drafts, way) for way in WAYS for drafts in (0, 3)), ("falcon_h1", 3, "ahead")],
)
def test_structured_outputs_equal_those_of_a_plain_loop(
    name: str, drafts: int, way: str, make_engine: EngineFactory, expected: dict[str, list[tuple[list[int], str]]]
) -> None:
    """Also chunked, preempted, with steps ahead, with drafts, and with the prompt found in the cache."""
    loaded, prompts = loaded_model(name), prompts_of(len(ASKED))
    drafter = NgramDrafter(drafts, min_ngram=1) if drafts else None
    engine = make_engine(loaded, prompts, MOST, speculate=drafter, **WAYS[way])
    for _ in range(2):
        done = engine.generate(prompts, ASKED)
        assert said(done) == expected[name]
    assert {reason for _, reason in expected[name]} == {"stop", "length"}
    assert sum(one.hit_tokens for one in done) > 0
    assert (sum(one.accepted_tokens for one in done) > 0) == (drafts > 0)
    assert (sum(one.drafted_tokens - one.accepted_tokens for one in done) > 0) == (drafts > 0)
    assert (sum(one.preemptions for one in done) > 0) == (way == "preempted")
    assert done[-1].logprobs is not None
    assert len(done[-1].logprobs) == len(done[-1].token_ids)


def test_branches_have_parsers_of_their_own(make_engine: EngineFactory) -> None:
    params = SamplingParams(temperature=1.0, seed=4, structured=FORMS["record"], max_tokens=MOST)
    loaded, (prompt,) = loaded_model("llama"), shared_prompts(1, 6)
    engine = make_engine(loaded, [prompt] * 4, MOST)
    together = engine.generate([prompt], replace(params, n=4))
    alone = engine.generate([prompt] * 4, [params.of_branch(number) for number in range(4)])
    assert said(together) == said(alone)
    assert len({one.token_ids for one in together}) == 4
    for one in together:
        Draft202012Validator(RECORD).validate(json.loads(one.text or ""))


def test_draft_model_proposes_for_structured_outputs(make_engine: EngineFactory) -> None:
    loaded, prompts, asked = loaded_model("llama"), prompts_of(3), ASKED[1:4]
    plain = make_engine(loaded, prompts, MOST).generate(prompts, asked)
    drafter = DraftModel(Engine(wrap(loaded_model("llama", 1).model), memory="4MiB"), 3)  # without a tokenizer
    engine = make_engine(loaded, prompts, MOST, speculate=drafter)
    assert said(engine.generate(prompts, asked)) == said(plain)
    assert engine.drafter is drafter


def test_encoded_steps_give_the_same_structured_outputs(
    make_engine: EngineFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on other ranks, whose engines compile what a Step brings."""
    loaded, prompts = loaded_model("llama"), prompts_of(len(ASKED))
    here = make_engine(loaded, prompts, MOST).generate(prompts, ASKED)
    engine = make_engine(loaded, prompts, MOST)
    execute = engine.runner.execute
    monkeypatch.setattr(engine.runner, "execute", lambda step: execute(decode_step(encode_step(step))))
    assert said(engine.generate(prompts, ASKED)) == said(here)


def test_request_with_a_structured_output_goes_on_elsewhere(tmp_path: Path) -> None:
    params = SamplingParams(temperature=0.9, seed=3, structured=FORMS["record"], max_tokens=MOST)

    def made() -> Engine:
        return Engine(loaded_model("llama"), memory="4MiB", options=EngineOptions(self_check=False))

    with made() as engine:
        (alone,) = engine.generate([REPEATED[0]], params)
        with engine.stream(REPEATED[0], params, request_id="a") as stream:
            for _ in range(8):
                next(stream)
            engine.export("a", tmp_path / "file")
    with made() as engine:
        engine.resume(tmp_path / "file")
        (done,) = drained(engine)
    assert said([done]) == said([alone])
    assert 0 < done.computed_tokens < alone.computed_tokens


def test_structured_outputs_are_checked_like_others(make_engine: EngineFactory) -> None:
    loaded, prompts, recorder = loaded_model("llama"), prompts_of(len(ASKED)), LogitRecorder()
    engine = make_engine(loaded, prompts, MOST, observer=recorder)  # type: ignore[arg-type]  # any observer
    done = engine.generate(prompts, ASKED)
    engine.close()
    assert check_completions(loaded, done, ASKED, recorder).ok
    free = [replace(params, structured=None) for params in ASKED]
    wrong = [check_completions(loaded, [one], [params], recorder).ok for one, params in zip(done, free, strict=True)]
    assert wrong.count(True) == 1  # a bias alone leads to the seventh


# -- ends


def test_output_ends_where_nothing_can_follow(make_engine: EngineFactory) -> None:
    """Without an end token, even if these are ignored or held back; an end token ends what could go on."""
    loaded, (prompt,) = loaded_model("llama"), shared_prompts(1, 6)
    asked = [
        SamplingParams(structured=FORMS["choice"], max_tokens=40),
        SamplingParams(structured=FORMS["choice"], max_tokens=40, ignore_eos=True, min_tokens=30),
        SamplingParams(structured=FORMS["open"], max_tokens=40, logit_bias={256: 50.0}, ignore_eos=True),
        SamplingParams(structured=FORMS["open"], max_tokens=3),
    ]
    chosen, ignored, ended, cut = make_engine(loaded, [prompt] * 4, 40).generate([prompt] * 4, asked)
    assert chosen.text in ("north by north west", "north", "south\n")
    assert 256 not in chosen.token_ids[:-1]
    assert (ignored.text, ignored.finish_reason) == (chosen.text, FinishReason.STOP)
    assert (len(ended.token_ids), ended.token_ids[4], ended.finish_reason) == (5, 256, FinishReason.STOP)
    assert (len(cut.token_ids), cut.finish_reason) == (3, FinishReason.LENGTH)


def test_caller_function_cannot_leave_the_form(make_engine: EngineFactory) -> None:
    def other(_: list[int], logits: torch.Tensor) -> torch.Tensor:
        return torch.where(torch.arange(len(logits)) == ord("z"), 99.0, logits)

    loaded, (prompt,) = loaded_model("llama"), shared_prompts(1, 6)
    params = SamplingParams(structured=FORMS["regex"], logits_processors=(other,), max_tokens=40)
    (done,) = make_engine(loaded, [prompt], 40).generate([prompt], params)
    assert "z" not in (done.text or "z")


def test_request_without_any_token_left_ends_alone(make_engine: EngineFactory) -> None:
    loaded, prompts = loaded_model("llama"), shared_prompts(2, 6)
    stuck = SamplingParams(structured=StructuredOutput("regex", "aab"), bad_words=((98,),), max_tokens=9)
    engine = make_engine(loaded, prompts, 9)
    engine.add(prompts[0], stuck, request_id="stuck")
    engine.add(prompts[1], SamplingParams(max_tokens=9, ignore_eos=True), request_id="other")
    with pytest.raises(ConfigError, match=r"no token is left to draw: bad_words.* or structured"):
        drained(engine)
    assert [one.request_id for one in drained(engine)] == ["other"]


def test_stuck_parser_fails_its_own_row() -> None:
    """Its output, of whatever origin, is not of its form: the other row goes on."""
    rows = RowState(2, 257, structured.Grammars(loaded_model("llama")))
    for row, output in enumerate(([98], [122])):
        rows.begin(
            NewRow(row, f"{row}", np.array([1, 2, *output], np.int32), 2, SamplingParams(structured=FORMS["open"]))
        )
    every = np.arange(2, dtype=np.int32), np.array([3, 3]), np.full(2, NO_DRAFT)
    masking = rows.begin_masks(every[0], every[2])
    assert masking is not None
    drawn, wrong = sample(torch.arange(257).repeat(2, 1).float(), rows.batch(*every, masking.result()))
    assert drawn.tolist() == [ord("c"), 256]
    assert [*wrong] == [1]
    assert "the structured output cannot go on, simplify it: " in str(wrong[1])


# -- schemas


def check_schemas(count: int, make_engine: EngineFactory) -> int:
    """Run ``count`` random schemas; return how many answers were cut off by their length."""
    rng, loaded = random.Random(43), loaded_model("llama")
    schemas = [random_schema(rng) for _ in range(count)]
    prompts = [[*b"Answer in JSON: ", 65 + at % 26] for at in range(count)]
    asked = [
        SamplingParams(
            structured=StructuredOutput("json_schema", json.dumps(schema)), max_tokens=1500, temperature=1.0, seed=at
        )
        for at, schema in enumerate(schemas)
    ]
    done = make_engine(loaded, prompts, 1500, room_for=40, max_running=32).generate(prompts, asked)
    cut = 0
    for schema, one in zip(schemas, done, strict=True):
        if one.finish_reason is FinishReason.LENGTH:
            cut += 1
            continue
        Draft202012Validator.check_schema(schema)
        Draft202012Validator(schema).validate(json.loads(one.text or ""))
    return cut


def test_answers_of_random_schemas_parse_and_validate(make_engine: EngineFactory) -> None:
    assert check_schemas(60, make_engine) == 0


@pytest.mark.thorough
def test_answers_of_many_random_schemas_parse_and_validate(make_engine: EngineFactory) -> None:
    assert check_schemas(500, make_engine) <= 5


def test_json_object_is_an_object(make_engine: EngineFactory) -> None:
    loaded, (prompt,) = loaded_model("llama"), shared_prompts(1, 6)
    params = SamplingParams(structured=StructuredOutput("json_object"), temperature=1.0, max_tokens=300, n=8)
    done = make_engine(loaded, [prompt] * 8, 300).generate([prompt], params)
    ended = [json.loads(one.text or "") for one in done if one.finish_reason is FinishReason.STOP]
    assert ended
    assert all(isinstance(one, dict) for one in ended)


# -- compiling


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        ("regex", "[a-", "regex '\\[a-' cannot be compiled, correct it: .*unclosed character class"),
        ("regex", "(?=a)b", "look-ahead and look-behind, is not supported"),
        ("json_schema", '{"uniqueItems": true}', 'cannot be compiled, correct it: Unimplemented keys: \\["uniqueItems'),
        ("json_schema", '{"$ref": "https://example.com/a"}', "cannot be compiled, correct it: Resource"),
        ("json_schema", '{"type": "string", "format": "colour"}', "Unknown format: colour"),
        ("json_schema", '{"const": NaN}', "cannot be compiled, correct it: expected value"),
        ("json_schema", '{"$ref": "#"}', "cannot be compiled, correct it: no output satisfies it"),
        ("grammar", "start: nothing", "cannot be compiled, correct it: .*unknown name"),
        ("grammar", "root ::= " + "(" * 5000, "cannot be compiled, correct it: Failed to convert"),
    ],
)
def test_form_that_cannot_be_compiled_is_rejected(
    kind: StructuredKind, text: str, message: str, make_engine: EngineFactory
) -> None:
    engine = make_engine(loaded_model("llama"), [[1] * 8], 8)
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        engine.add([1], SamplingParams(structured=StructuredOutput(kind, text)))
    assert engine.idle


def test_form_of_long_chains_is_compiled() -> None:
    """Each reference and each rule is a call inside the compiler: with a usual stack, the process would end."""
    chain: dict[str, Any] = {f"a{at}": {"items": {"$ref": f"#/$defs/a{at + 1}"}} for at in range(2200)}
    forms = [
        StructuredOutput("json_schema", json.dumps({"$defs": chain | {"a2200": {}}, "$ref": "#/$defs/a0"})),
        StructuredOutput(
            "grammar", "start: r0\n" + "\n".join(f"r{at}: r{at + 1}" for at in range(6000)) + '\nr6000: "a"'
        ),
    ]
    grammars = structured.Grammars(loaded_model("llama"))
    for form in forms:
        grammar = grammars.of(form)
        assert grammar is not None
        assert not grammar.parser([97] if form.kind == "grammar" else []).is_error()


def test_engine_without_tokenizer_rejects_structured_outputs() -> None:
    bare = wrap(loaded_model("llama").model)
    with Engine(bare, memory="4MiB", options=EngineOptions(self_check=False)) as engine:
        with pytest.raises(ConfigError, match="has no tokenizer: give the engine one, or leave structured out"):
            engine.add([1, 2], SamplingParams(structured=FORMS["regex"]))
        assert engine.idle
    row = NewRow(0, "a", np.array([1, 2], np.int32), 2, SamplingParams(structured=FORMS["regex"]))
    with pytest.raises(WorkerError, match="'a' has a structured output, and the runner no tokenizer: make it with"):
        RowState(1, 257).check([row])


def test_slow_tokenizer_is_rejected() -> None:
    class Slow:
        def encode(self, text: str, **_: object) -> list[int]:
            return [*text.encode()]

        def decode(self, ids: Sequence[int], **_: object) -> str:
            return bytes(ids).decode()

        def __len__(self) -> int:
            return 256

    loaded = wrap(loaded_model("llama").model, Slow())
    with pytest.raises(ConfigError, match="need a fast tokenizer with an end token, and that of model cannot be read"):
        structured.Grammars(loaded).of(FORMS["regex"])


def test_equal_forms_are_compiled_once_and_kept_while_in_use(
    make_engine: EngineFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    compiled = structured._compiled
    monkeypatch.setattr(structured, "_compiled", lambda form, *rest: made.append(form.text) or compiled(form, *rest))  # type: ignore[func-returns-value]  # to note it
    loaded, (prompt,) = loaded_model("llama"), shared_prompts(1, 6)
    engine = make_engine(loaded, [prompt] * 2, 40)
    again = StructuredOutput("regex", FORMS["regex"].text)
    for form in (FORMS["regex"], again):
        engine.generate([prompt], SamplingParams(structured=form, max_tokens=40, n=2))
    assert made == [again.text]
    with engine.stream(prompt, SamplingParams(structured=again, max_tokens=40)) as stream:
        next(stream)
        for at in range(200):  # more than are kept
            engine.grammars.of(StructuredOutput("regex", f"{at}"))
        assert engine.grammars.of(again) is not None
        assert len(made) == 201
    drained(engine)
    assert len(engine.grammars._made) <= 129
    engine.grammars.of(StructuredOutput("regex", "0"))
    assert made[-1] == "0"


# -- beside the forward


def test_masks_are_made_while_the_forward_runs(make_engine: EngineFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each forward waits here until its masks are there."""
    loaded, (prompt,) = loaded_model("llama"), shared_prompts(1, 6)
    engine = make_engine(loaded, [prompt], 40)
    masks, forward, ready, waited = engine.grammars.masks, engine.runner._forward, threading.Event(), list[bool]()

    def masked(*given: Any) -> structured.Masks:  # noqa: ANN401  # of masks
        made = masks(*given)
        ready.set()
        return made

    def run(step: Any, *given: Any) -> torch.Tensor:  # noqa: ANN401  # of _forward
        if step.samples.any():
            if not ready.wait(30):
                raise TimeoutError("no masks")
            ready.clear()
            waited.append(True)
        return forward(step, *given)

    monkeypatch.setattr(engine.grammars, "masks", masked)
    monkeypatch.setattr(engine.runner, "_forward", run)
    (done,) = engine.generate([prompt], SamplingParams(structured=FORMS["regex"], max_tokens=40))
    assert waited == [True] * len(done.token_ids)


def test_async_engine_compiles_outside_of_its_thread(
    make_engine: EngineFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    of = structured.Grammars.of

    def noted(self: structured.Grammars, form: StructuredOutput | None) -> structured.Grammar | None:
        if form is not None and form not in self._made:
            asked.append(threading.current_thread().name)
        return of(self, form)

    monkeypatch.setattr(structured.Grammars, "of", noted)
    loaded, prompts = loaded_model("llama"), shared_prompts(2, 6)
    params = [SamplingParams(structured=FORMS[name], max_tokens=40) for name in ("regex", "open")]
    alone = make_engine(loaded, prompts, 40).generate(prompts, params)
    asked.clear()

    async def run() -> list[Completion]:
        async with AsyncEngine(make_engine(loaded, prompts, 40)) as engine:
            with pytest.raises(ConfigError, match="cannot be compiled"):
                await engine.generate([prompts[0]], SamplingParams(structured=StructuredOutput("regex", "(")))
            parts = [part async for part in engine.stream(prompts[0], params[0])]
            return [part.completion for part in parts if part.completion] + await engine.generate(prompts, params)

    streamed, *done = asyncio.run(run())
    assert said([streamed, *done]) == said([alone[0], *alone])
    assert len(asked) == 3
    assert not [name for name in asked if name.startswith("hybridkv")]
