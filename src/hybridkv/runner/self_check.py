"""Self-check at load: the model on pages says what it says alone.

Any model whose attention goes through transformers' interface can be run; whether it is run rightly cannot be read in
its config. So a few prompts run on pages of their own, and the logits behind them are compared with plain forwards':

    cold      two prompts in one step, so that neither may see the other
    chunked   the same in chunks that end inside blocks, while others run
    warm      prompts that begin as earlier ones: full blocks are shared, and one that is hit in part is copied
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import torch
from transformers import PreTrainedModel

from hybridkv.cache import KVCacheManager
from hybridkv.errors import HybridKVError, UnsupportedModelError
from hybridkv.planner import Plan
from hybridkv.request import Request, SamplingParams
from hybridkv.runner import step_context
from hybridkv.runner.attention.formulas import AttentionBackend
from hybridkv.runner.load import LoadedModel
from hybridkv.runner.model_call import is_encoder_decoder
from hybridkv.runner.planning import plan_for
from hybridkv.runner.probe import Forwards, attention_implementation, forwards_of, planner_model, probe
from hybridkv.runner.runner import ModelRunner
from hybridkv.runner.sampling.draws import Draws
from hybridkv.runner.states.continuation import depends_on_calls, difference
from hybridkv.schedule import Scheduler, SchedulerLimits
from hybridkv.step import Step

logger = logging.getLogger(__name__)

_TOLERANCE: Final = {torch.float64: 2e-4, torch.float32: 2e-4, torch.float16: 5e-2, torch.bfloat16: 2e-1}

_TOKENS: Final = 41
_LONGEST: Final = 320
"""Prompts reach past a window, if it ends before so many tokens."""
_CHUNK: Final = 29
_ROWS: Final = 2
_SEED: Final = 11
_FEWEST: Final = 8

_Kind = tuple[type, str, torch.dtype, str, str | None, int, AttentionBackend]
_COMPARED: Final[dict[_Kind, Forwards]] = {}
"""Those that said the same, and how they did; the oldest goes first."""
_MOST_KINDS: Final = 64


@dataclass(frozen=True, slots=True)
class Asked:
    """The first ``tokens`` of a prompt, in a regime. wave: those of one run together, the next behind them."""

    regime: str
    wave: int
    prompt: int
    tokens: int


@dataclass(frozen=True, slots=True, eq=False)
class Alone:
    """What the model says without pages. logits: float32[tokens, vocabulary] behind every token of each of ``prompts``.

    bound: differences up to it are rounding. context: by how much the last logits differ where other tokens come before
    the last few: what is not above ``bound`` would hide a wrong context.
    """

    prompts: tuple[list[int], ...]
    logits: tuple[torch.Tensor, ...]
    bound: float
    context: float


@dataclass(frozen=True, slots=True)
class Report:
    """worst: by regime, the largest difference, as a share of the largest logit, and behind how many tokens.

    bound: differences up to it are rounding. failed: what the model raised, "" for nothing.
    """

    worst: Mapping[str, tuple[float, int]]
    bound: float
    failed: str = ""

    @property
    def wrong(self) -> str:
        """What differs, "" for nothing."""
        worst = self.worst.items()
        said = (f"{regime} {most:.2g} behind token {at}" for regime, (most, at) in worst if not most <= self.bound)
        return ", ".join(said) or self.failed

    def require_right(self, name: str) -> None:
        """Raise UnsupportedModelError for what is wrong with the model ``name``."""
        if self.failed:
            raise UnsupportedModelError(f"{name} does not run on pages: not supported ({self.failed})")
        if self.wrong:
            raise UnsupportedModelError(
                f"{name} says something else on pages than alone: largest difference of two logits, as a share of the "
                f"largest one: {self.wrong} (bound {self.bound:.2g}); some layer does more than attend over what it "
                "keeps"
            )


@dataclass(frozen=True, slots=True)
class Trial:
    """How a model is run on pages: laid out as ``plan`` has them, and by what."""

    plan: Plan
    forwards: Forwards
    attention: AttentionBackend


@contextmanager
def plain_transformers(model: PreTrainedModel) -> Iterator[None]:
    """Run ``model`` inside as transformers alone runs it. Raises UnsupportedModelError, in one line, if it fails.

    Passes on named errors of this library, and torch.OutOfMemoryError.
    """
    try:
        yield
    except (HybridKVError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # a model's code raises anything
        said = " ".join(f"{type(error).__name__}: {error}".split())
        raise UnsupportedModelError(
            f"{type(model).__name__} fails in plain transformers, without pages: {said}: mend the model or its config, "
            "or install the version of transformers that it was written for"
        ) from error


def tolerance(dtype: torch.dtype) -> float:
    """How far rounding may move logits, as a share of the largest. In half precision tokens find other experts."""
    return _TOLERANCE.get(dtype, 2e-1)


def require_same(loaded: LoadedModel, plan: Plan, attention: AttentionBackend) -> Forwards | None:
    """How ``loaded`` says the same on pages as alone: rows together, else row by row. None where nothing was compared.

    attention: what attends. Some ten short forwards each way, once in a process for models that are alike but for
    their weights.
    Encoder-decoders, and plans for requests of a few tokens, are not compared. A line in the log where the weights are
    such that a wrong context would not show, and for rows that run one by one.
    Raises UnsupportedModelError, with what differs, for a model that says something else either way.
    """
    length = min(_length(plan), plan.max_model_len - 1)
    if is_encoder_decoder(loaded.model) or length < _FEWEST:
        return None
    kind = _kind_of(loaded, plan, attention)
    if kind is not None and kind in _COMPARED:
        return _COMPARED[kind]
    step_context.require_free(loaded.model)
    name, alone = type(loaded.model).__name__, said_alone(loaded, length)
    probed = probe(loaded.model)  # refuses a model that cannot run on pages at all, and says why
    trial = Trial(plan, forwards_of(loaded.model, probed), attention)
    report = compare(loaded, alone, trial)
    if report.wrong and not report.failed and depends_on_calls(probed.mixers):
        return trial.forwards  # alone, too: its mixers were compared one by one, and the log tells
    together = ""
    if report.wrong and trial.forwards is Forwards.TOGETHER:
        together, trial = f" (together: {report.wrong})", replace(trial, forwards=Forwards.BY_ROW)
        report = compare(loaded, alone, trial)
    report.require_right(name)
    if trial.forwards is Forwards.BY_ROW:
        logger.info("%s: each row of a step runs in a forward of its own%s", name, together)
    if alone.context <= report.bound:
        logger.info("%s: a wrong context would not show in its logits (%.2g)", name, alone.context)
    elif kind is not None:
        _COMPARED[kind] = trial.forwards
        if len(_COMPARED) > _MOST_KINDS:
            del _COMPARED[next(iter(_COMPARED))]
    return trial.forwards


def _kind_of(loaded: LoadedModel, plan: Plan, attention: AttentionBackend) -> _Kind | None:
    """What decides how a model runs, its weights left out; None for one with code of its own on some module."""
    model = loaded.model
    if any(one._forward_hooks or one._forward_pre_hooks or "forward" in vars(one) for one in model.modules()):
        return None
    config = model.config.to_json_string(use_diff=False)
    return type(model), config, model.dtype, plan.layout, plan.placement, plan.model.block_size, attention


def _length(plan: Plan) -> int:
    """Tokens of a prompt: past the longest window or chunk that is not long."""
    masks = (spec.mask for group in plan.config.groups for spec in group.layer_specs)
    ends = [span + _TOKENS // 3 for mask in masks for span in mask if span is not None]
    return max([_TOKENS, *(end for end in ends if end <= _LONGEST)])


def said_alone(loaded: LoadedModel, length: int) -> Alone:
    """What ``loaded`` says to prompts of up to ``length`` tokens, at least 8.

    Raises UnsupportedModelError if ``loaded`` fails without pages.
    """
    draw = np.random.default_rng(_SEED)
    first, second, other = (draw.integers(0, loaded.vocab_size, length).tolist() for _ in range(3))
    prompts = (first, second[: length // 2])
    with torch.inference_mode():
        logits = tuple(_plain(loaded, tokens) for tokens in prompts)
        with attention_implementation(loaded.model, "eager"):
            noise = difference(_plain(loaded, first), logits[0])
        elsewhere = _plain(loaded, [*other[: length - length // 8], *first[length - length // 8 :]])
    bound = max(tolerance(loaded.model.dtype), 4 * noise)
    return Alone(prompts, logits, bound, context=difference(elsewhere[-1], logits[0][-1]))


def compare(loaded: LoadedModel, alone: Alone, trial: Trial) -> Report:
    """Compare the prompts of ``alone`` on pages; what the model raises is in the Report."""
    length = len(alone.prompts[0])
    ends = sorted({length // 3, length // 3 + 1, length - 1, length})
    asked = [Asked("cold", 0, 0, length // 3), Asked("cold", 0, 1, length // 3 // 2)]
    asked += [Asked("chunked", 1, prompt, len(tokens)) for prompt, tokens in enumerate(alone.prompts)]
    asked += [Asked("warm", 2 + wave, 0, end) for wave, end in enumerate(ends)]
    try:
        said = _on_pages(loaded, alone.prompts, asked, trial)
    except (HybridKVError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # noqa: BLE001 - a model that was handed what it does not expect raises anything
        return Report({}, alone.bound, failed=f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")
    worst = dict[str, tuple[float, int]]()
    for one, logits in said.items():
        found = difference(logits, alone.logits[one.prompt][one.tokens - 1])
        worst[one.regime] = max(worst.get(one.regime, (0.0, 0)), (found, one.tokens))
    return Report(worst, alone.bound)


def _plain(loaded: LoadedModel, prompt: Sequence[int]) -> torch.Tensor:
    """float32[tokens, vocabulary]."""
    ids = torch.tensor([list(prompt)], device=loaded.model.device)
    with plain_transformers(loaded.model):
        logits: torch.Tensor = loaded.model(input_ids=ids, use_cache=False).logits[0].float()
    return logits


def _on_pages(
    loaded: LoadedModel, prompts: Sequence[Sequence[int]], asked: Sequence[Asked], trial: Trial
) -> dict[Asked, torch.Tensor]:
    """The logits behind each, float32[vocabulary], from a runner of its own."""
    plan, lengths = trial.plan, [len(prompt) + 1 for prompt in prompts] * 3
    small = plan_for(loaded, lengths, block_size=plan.model.block_size, layout=plan.layout, placement=plan.placement)
    by_request, rows, said = dict[str, Asked](), dict[int, str](), dict[Asked, torch.Tensor]()

    def note(step: Step, logits: torch.Tensor) -> None:
        rows.update((new.row, new.request_id) for new in step.new_rows)
        for row, one in zip(step.rows[Draws.of(step).row].tolist(), logits, strict=True):
            said[by_request[rows[row]]] = one.cpu()

    runner = ModelRunner(
        loaded.model,
        small.config,
        planner_model(loaded.model, block_size=small.model.block_size, name=loaded.name),
        max_running=_ROWS,
        max_model_len=small.max_model_len,
        max_batched_tokens=_CHUNK,
        observer=note,
        forwards=trial.forwards,
        attention=trial.attention,
    )
    try:
        cache = KVCacheManager(small)
        scheduler = Scheduler(cache, SchedulerLimits(max_running=_ROWS, max_batched_tokens=_CHUNK))
        for wave in sorted({one.wave for one in asked}):
            for one in (one for one in asked if one.wave == wave):
                name, tokens = f"{one.regime} {one.prompt} {one.tokens}", prompts[one.prompt][: one.tokens]
                by_request[name] = one
                sampling = SamplingParams(max_tokens=1, ignore_eos=True)
                scheduler.add(Request(name, tokens, sampling, hasher=cache.hasher, cache_salt=one.regime))
            while not scheduler.drained:
                step = scheduler.schedule()
                scheduler.update(runner.execute(step))
    finally:
        runner.detach()
    return said
