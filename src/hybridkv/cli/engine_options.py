"""What commands that run a model read: the model, how tokens are drawn, how an engine steps, and who drafts.

Torch takes seconds to import: only commands that run a model pay.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from hybridkv.cli.options import (
    eviction_option,
    model_option,
    no_prefix_caching_option,
    request_option,
    run_option,
    shares_option,
    short_share_option,
)
from hybridkv.errors import ConfigError
from hybridkv.eviction import TenantShares
from hybridkv.request import SamplingParams
from hybridkv.units import MOST_COUNT, shown

if TYPE_CHECKING:
    from hybridkv.runner.drafters import Drafter
    from hybridkv.runner.engine import EngineOptions
    from hybridkv.runner.load import LoadedModel

_DRAFTS: Final = 4
_MOST_RUNNING: Final = 1 << 16
"""Requests at once: rows are columns of memory."""

attention_option: Final = partial(run_option, "gather, eager, triton or torch.", metavar="NAME", default="gather")
system_option: Final = partial(request_option, "A conversation's first message, where it has none such.")


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """The model that a command runs."""

    model: str = model_option("A folder or .gguf file, ORG/NAME on the hub, or tiny:NAME (tiny:? lists).", default=...)
    trust_remote_code: bool = model_option(
        "Run Python code that model folders hold; else none ever runs.", "--trust-remote-code", default=False
    )

    def load(self) -> LoadedModel:
        """As hybridkv.runner.load has it, with no chatter on standard error: what matters there is an exception."""
        import torch  # noqa: PLC0415  # see above
        from transformers.utils import logging as chatter  # noqa: PLC0415  # same

        from hybridkv.runner.load import TINY, load  # noqa: PLC0415  # same

        chatter.set_verbosity_error()
        chatter.disable_progress_bar()
        warnings.filterwarnings("ignore", module=r"transformers\..*")
        if self.model.startswith(TINY):
            torch.set_num_threads(1)  # such a model is done before threads have met
        return load(self.model, trust_remote_code=self.trust_remote_code)


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """How tokens are drawn."""

    max_new_tokens: int = request_option(
        "Of each request, unless its sampling says max_tokens.", max=MOST_COUNT, metavar="N", default=32
    )
    temperature: float = request_option("0 draws the most probable token.", default=0.0)
    top_p: float = request_option("Draw from the most probable tokens of this share.", default=1.0)
    seed: int = request_option("Of the draws: equal seeds, equal outputs.", default=0)
    stop: list[str] | None = request_option("Text that ends an output; may be given several times.")

    def params(self) -> SamplingParams:
        """What the options say. ConfigError for values that cannot be."""
        return SamplingParams(
            max_tokens=self.max_new_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            seed=self.seed,
            stop=tuple(self.stop or ()),
        )


@dataclass(frozen=True, slots=True)
class StepOptions:
    """How an engine schedules, keeps and computes."""

    max_running: int = run_option("Requests at once.", max=_MOST_RUNNING, metavar="N", default=64)
    token_budget: int = run_option("Tokens of a step.", max=MOST_COUNT, metavar="N", default=2048)
    short_share: float | None = short_share_option()
    no_prefix_caching: bool = no_prefix_caching_option()
    eviction: str | None = eviction_option()
    shares: list[str] | None = shares_option()
    attention: str = attention_option()

    def engine_options(self, **others: Any) -> EngineOptions:  # noqa: ANN401  # as EngineOptions has them
        """The options of an engine. others: those that only one command asks for."""
        from hybridkv.runner.engine import EngineOptions  # noqa: PLC0415  # see above

        return EngineOptions(
            self.max_running,
            self.token_budget,
            prefix_caching=not self.no_prefix_caching,
            short_share=self.short_share,
            eviction=self.eviction,
            shares=TenantShares.parse(self.shares or ()),
            attention=self.attention,
            **others,
        )


speculate_option: Final = partial(
    run_option,
    "Draft K tokens a step, verified together: ngram[:K] by the request's own text, draft:DIR[:K] by a "
    f"smaller model. K: {_DRAFTS}.",
    metavar="DRAFTS",
)


@dataclass(frozen=True, slots=True)
class Speculate:
    """source: of the draft model, a folder or tiny:NAME; None for prompt lookup. drafts: of a request in a step."""

    source: str | None
    drafts: int = _DRAFTS

    @classmethod
    def parse(cls, text: str | None) -> Speculate | None:
        """From ``ngram[:K]`` or ``draft:DIR[:K]``, None from nothing. ConfigError for anything else."""
        if text is None:
            return None
        kind, _, rest = text.partition(":")
        source, _, last = rest.rpartition(":")
        if re.fullmatch("-?[0-9]{1,9}", last):
            rest, drafts = source, int(last)
        else:
            drafts = _DRAFTS
        if (kind, bool(rest)) not in {("ngram", False), ("draft", True)}:
            raise ConfigError(f"--speculate is ngram[:K] or draft:DIR[:K], got {shown(text)}")
        return cls(rest or None, drafts)

    def drafter(
        self, options: EngineOptions, lengths: Sequence[int] | None = None, *, trust_remote_code: bool = False
    ) -> Drafter:
        """The drafter. A draft model runs with ``options``, but for its prefix cache, which it lives on.

        lengths: tokens of each request, prompt and output together, that there has to be room for. None: nobody knows
        who will come, and a draft model has plan_within's own memory. trust_remote_code: as ``load`` has it.
        Raises ConfigError for a number of drafts that cannot be, and as ``load`` and ``plan_for`` do.
        """
        from hybridkv.runner import Engine, load, plan_for, plan_within  # noqa: PLC0415  # see above
        from hybridkv.runner.drafters import AdaptiveDrafter, DraftModel, NgramDrafter  # noqa: PLC0415  # same

        if self.source is None:
            return AdaptiveDrafter(NgramDrafter(self.drafts))
        loaded = load(self.source, trust_remote_code=trust_remote_code)
        if lengths is None:
            plan = plan_within(loaded, max_batched_tokens=options.token_budget, max_in_flight=options.in_flight)
        else:
            plan = plan_for(loaded, lengths)
        return DraftModel(Engine(loaded, plan, replace(options, prefix_caching=True)), self.drafts)
