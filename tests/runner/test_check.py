"""The check of generated outputs against plain transformers finds wrong tokens and wrong ends."""

from dataclasses import replace

import pytest
import torch
from runner_support import MODELS, EngineFactory, greedy, loaded_model, shared_prompts

from hybridkv.request import SamplingParams
from hybridkv.runner import Completion
from hybridkv.runner.check import CheckReport, Difference, LogitRecorder, check_completions, forced_logits
from hybridkv.schedule import FinishReason

PARAMS = [
    greedy(16),
    SamplingParams(temperature=1.0, seed=4, max_tokens=16, ignore_eos=True),
    SamplingParams(temperature=0.7, top_k=9, top_p=0.9, repetition_penalty=1.2, seed=5, max_tokens=16),
    SamplingParams(repetition_penalty=1.4, max_tokens=16),
]


def run(name: str, make_engine: EngineFactory) -> tuple[list[Completion], LogitRecorder]:
    loaded, prompts, recorder = loaded_model(name), shared_prompts(4, 8), LogitRecorder()
    engine = make_engine(loaded, prompts, 16, observer=recorder, token_budget=30)  # type: ignore[arg-type]  # any observer
    done = engine.generate(prompts, PARAMS)
    engine.close()
    return done, recorder


def check(name: str, done: list[Completion], recorder: LogitRecorder) -> CheckReport:
    return check_completions(loaded_model(name), done, PARAMS, recorder)


@pytest.mark.parametrize("name", MODELS)
def test_check_of_correct_outputs_finds_no_difference(name: str, make_engine: EngineFactory) -> None:
    report = check(name, *run(name, make_engine))
    assert report == CheckReport(4, 64, (), ())
    assert report.ok


def lower_case(output: list[int], logits: torch.Tensor) -> torch.Tensor:
    logits[65:91] -= 2 + len(output) / 8
    return logits


EDITED = [
    SamplingParams(presence_penalty=1.5, frequency_penalty=0.5, max_tokens=16, ignore_eos=True),
    SamplingParams(temperature=0.8, seed=3, repetition_penalty=2.5, bad_words=("a", "e ", (70, 71)), max_tokens=16),
    SamplingParams(logit_bias={67: 50.0, 256: 40.0}, stop=("CCC",), min_tokens=6, max_tokens=16),
    SamplingParams(logits_processors=(lower_case,), frequency_penalty=0.3, max_tokens=16, ignore_eos=True),
]


def test_check_applies_sampling_edits_of_each_request(make_engine: EngineFactory) -> None:
    loaded, prompts, recorder = loaded_model("llama"), shared_prompts(4, 8), LogitRecorder()
    engine = make_engine(loaded, prompts, 16, observer=recorder, token_budget=30)  # type: ignore[arg-type]  # as above
    done = engine.generate(prompts, EDITED)
    engine.close()
    assert (len(done[2].token_ids), done[2].text) == (7, "CCCC")
    report = check_completions(loaded, done, EDITED, recorder)
    assert report == CheckReport(4, 16 * 3 + 7, (), ())
    # of each request: what it would have been without what it asked for
    for which, params in enumerate(EDITED):
        plain = replace(PARAMS[0], temperature=params.temperature, seed=params.seed, stop=params.stop)
        report = check_completions(loaded, [done[which]], [plain], recorder)
        assert not report.ok, which


@pytest.mark.parametrize("which", range(4))
def test_check_reports_a_wrong_token(which: int, make_engine: EngineFactory) -> None:
    done, recorder = run("llama", make_engine)
    tokens = list(done[which].token_ids)
    right, tokens[9] = tokens[9], (tokens[9] + 1) % 256
    done[which] = replace(done[which], token_ids=tuple(tokens))
    report = check("llama", done, recorder)
    assert not report.ok
    first = report.differences[0]
    assert (first.request_id, first.at, first.token, first.expected) == (str(which), 9, tokens[9], right)
    assert not first.near_tie


@pytest.mark.parametrize(("share", "near"), [(1e-4, 1), (3e-4, 0)])
def test_check_accepts_a_near_tie_within_rounding_only(
    share: float, near: int, make_engine: EngineFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    done, recorder = run("llama", make_engine)
    prompt, tokens = done[0].prompt_token_ids, list(done[0].token_ids)
    logits = forced_logits(loaded_model("llama").model, prompt, tokens)
    best = logits[15].topk(2)
    # the reference's two best are as good as equal, and we drew the second
    level = logits.index_put((torch.tensor(15), best.indices[1]), best.values[0] - 1e-6)
    monkeypatch.setattr("hybridkv.runner.check.forced_logits", lambda *_, **__: level)
    done[0] = replace(done[0], token_ids=(*tokens[:15], int(best.indices[1]), *tokens[16:]))
    ids, _ = recorder._kept["0", len(prompt) + 15]
    moved = level[15][ids.long()] + share * level.abs().max()
    recorder._kept["0", len(prompt) + 15] = ids, moved
    report = check_completions(loaded_model("llama"), done[:1], PARAMS[:1], recorder)
    assert ([one.at for one in report.differences], report.near_ties, report.ok) == ([15], near, bool(near))


def test_near_tie_needs_margin_and_difference_within_rounding() -> None:
    found = Difference("0", 1, 2, 3, margin=0.39, measured=0.1, rounding=0.1)
    assert found.near_tie
    assert not replace(found, margin=0.4).near_tie
    assert not replace(found, measured=0.11, margin=0.1).near_tie


def test_check_compares_greedy_tokens_with_generate(
    make_engine: EngineFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    done, recorder = run("llama", make_engine)
    said = list(done[0].token_ids)
    said[4] = (said[4] + 1) % 256
    monkeypatch.setattr("hybridkv.runner.check.generate_greedy", lambda _model, _prompt, count, *_, **__: said[:count])
    found = check_completions(loaded_model("llama"), done[:1], PARAMS[:1], recorder).differences
    assert [(one.at, one.token, one.expected, one.near_tie) for one in found] == [
        (4, done[0].token_ids[4], said[4], False)
    ]


def test_check_reports_a_wrong_finish_reason(make_engine: EngineFactory) -> None:
    done, recorder = run("llama", make_engine)
    done[0] = replace(done[0], finish_reason=FinishReason.STOP)
    assert check("llama", done, recorder).wrong_ends == ("request 0 ended by stop, but its output has no stop",)
    done[0] = replace(done[0], finish_reason=FinishReason.ABORT)
    assert check("llama", done, recorder).ok
    stop = done[3].token_ids[5]
    params = [*PARAMS[:3], replace(PARAMS[3], stop_token_ids=(stop,))]
    report = check_completions(loaded_model("llama"), done, params, recorder)
    assert report.wrong_ends == ("request 3 continued after a stop token",)


def test_logit_recorder_compares_the_largest_logits_only() -> None:
    recorder = LogitRecorder()
    logits = torch.randn(3000, generator=torch.Generator().manual_seed(0))
    best = logits.topk(1024)
    recorder._kept["a", 7] = best.indices.int(), best.values
    moved = logits.clone()
    moved[logits.argmin()] += 1000
    assert recorder.difference("a", 7, moved) == 0
    moved[logits.argmax()] -= 0.5
    assert recorder.difference("a", 7, moved) == pytest.approx(0.5)
