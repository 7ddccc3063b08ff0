"""Options of the commands that run a model: the model, sampling, the engine's steps and speculation.

Torch takes seconds to import, so this module imports it only inside the functions of commands that run a model.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from hybridkv.cli.options import (
    cache_option,
    eviction_option,
    model_option,
    no_prefix_caching_option,
    request_option,
    run_option,
    shares_option,
    short_share_option,
    skip_layers_option,
)
from hybridkv.cli.output import note, status
from hybridkv.errors import ConfigError
from hybridkv.eviction import TenantShares
from hybridkv.request import SamplingParams
from hybridkv.spec_fields import Quantization
from hybridkv.units import MOST_COUNT, format_bytes, shown

if TYPE_CHECKING:
    from hybridkv.runner.drafters import Drafter
    from hybridkv.runner.load import LoadedModel
    from hybridkv.runner.options import EngineOptions
    from hybridkv.runner.probe import Stored
    from hybridkv.runner.tensor_parallel import Ranks
    from hybridkv.stores import StoreChoice

_DRAFTS: Final = 4
_MOST_RUNNING: Final = 1 << 16
"""Most requests that run at once: the worker's tables hold a row for each of them."""
_MOST_THREADS: Final = 1 << 10

attention_option: Final = partial(
    run_option, "Attention backend: gather, eager, triton or torch.", metavar="NAME", default="gather"
)
engine_memory_option: Final = partial(cache_option, "Cache memory: 8GiB, or a number of bytes.", show_default="1GiB")
engine_length_option: Final = partial(
    cache_option,
    "Tokens of the longest request, prompt and output together.",
    max=MOST_COUNT,
    metavar="N",
    show_default="the model's limit, or less if memory is short",
)
system_option: Final = partial(request_option, "System message of conversations that have no system message.")


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """The model that a command runs."""

    model: str = model_option(
        "Model to run: a folder, a .gguf file, ORG/NAME on the hub, or tiny:NAME (tiny:? lists these).", default=...
    )
    trust_remote_code: bool = model_option(
        "Allow Python code from the model's folder to run.", "--trust-remote-code", default=False
    )
    threads: int | None = run_option(
        "CPU threads of the model.",
        min=1,
        max=_MOST_THREADS,
        metavar="N",
        show_default="OMP_NUM_THREADS, or by the model's size and the cores",
    )

    def load(self) -> LoadedModel:
        """Load the model, with the log messages and progress bars of transformers turned off, and set its threads.

        Raises:
            ConfigError: as ``hybridkv.runner.load``.
        """
        with status(f"loading {self.model}"):
            import torch  # noqa: PLC0415  # takes seconds

            from hybridkv.runner.load import load  # noqa: PLC0415  # same
            from hybridkv.runner.threads import suitable_threads  # noqa: PLC0415  # same

            cores = torch.get_num_threads()
            self._prepare()
            loaded = load(self.model, trust_remote_code=self.trust_remote_code)
            weights = sum(one.nbytes for one in loaded.model.parameters())
            suitable = cores if "OMP_NUM_THREADS" in os.environ else suitable_threads(weights, cores)
            torch.set_num_threads(self.threads or suitable)
        note(f"loaded {loaded.name}: {format_bytes(weights)} of weights, {in_threads()}")
        return loaded

    def ranks(self, number: int) -> Ranks:
        """Load the model cut over ranks, as quietly.

        Args:
            number: how many ranks; at least 2.

        Raises:
            ConfigError: as ``hybridkv.runner.Ranks``, like the next two.
            UnsupportedModelError: as there.
            WorkerError: as there.
        """
        with status(f"loading {self.model} in {number} processes"):
            from hybridkv.runner.tensor_parallel import Ranks  # noqa: PLC0415  # takes seconds

            self._prepare()
            return Ranks(self.model, number, trust_remote_code=self.trust_remote_code, threads=self.threads)

    def _prepare(self) -> None:
        import torch  # noqa: PLC0415  # takes seconds
        from transformers.utils import logging as chatter  # noqa: PLC0415  # same

        from hybridkv.runner.load import TINY  # noqa: PLC0415  # same

        chatter.set_verbosity_error()
        chatter.disable_progress_bar()
        warnings.filterwarnings("ignore", module=r"transformers\..*")
        if self.model.startswith(TINY):
            torch.set_num_threads(1)  # a tiny model is made before several threads could start


def in_threads() -> str:
    """Return the number of the model's CPU threads in words."""
    import torch  # noqa: PLC0415  # takes seconds

    count = torch.get_num_threads()
    return f"{count} thread" if count == 1 else f"{count} threads"


def checking(name: str) -> AbstractContextManager[None]:
    """Return a context in which an engine is made: a terminal shows that the model is compared with itself."""
    return status(f"checking {name} on pages against plain transformers")


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """How tokens are sampled."""

    max_tokens: int = request_option(
        "Limit of output tokens of each request that sets no max_tokens.",
        "--max-tokens",
        "--max-new-tokens",
        max=MOST_COUNT,
        metavar="N",
        default=32,
    )
    temperature: float = request_option("Sampling temperature; 0 takes the most probable token.", default=0.0)
    top_p: float = request_option(
        "Sample from the most probable tokens whose probabilities add up to this share, 0 to 1.", default=1.0
    )
    seed: int = request_option("Seed of the sampling; equal seeds give equal outputs.", default=0)
    stop: list[str] | None = request_option("Text that ends an output. May be repeated.")

    def params(self) -> SamplingParams:
        """Return the sampling parameters. Raises ConfigError for values out of range."""
        return SamplingParams(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            seed=self.seed,
            stop=tuple(self.stop or ()),
        )


@dataclass(frozen=True, slots=True)
class StoredOptions:
    """The form of keys and values in pages."""

    kv_dtype: str | None = cache_option(
        f"Quantization of keys and values, with the scales in the page: {', '.join(Quantization)}.",
        metavar="DTYPE",
        show_default="none, the model's dtype",
    )
    kv_dtype_skip_layers: list[str] | None = skip_layers_option()

    def stored(self) -> Stored:
        """Return the form, as plans and engines take it."""
        from hybridkv.runner.probe import Stored  # noqa: PLC0415  # takes seconds

        return Stored(self.kv_dtype, tuple(self.kv_dtype_skip_layers or ()))


@dataclass(frozen=True, slots=True)
class TierOptions:
    """Where prefixes stay after the device evicts them."""

    host_memory: str | None = cache_option(
        "Host memory that keeps prefixes after the device evicts them: 8GiB, or a number of bytes.",
        metavar="SIZE",
        show_default="none",
    )
    disk: Path | None = cache_option(
        "Folder of a disk store behind the host memory, which keeps prefixes after the process ends.",
        metavar="FOLDER",
        show_default="none",
    )
    disk_memory: str | None = cache_option(
        "Size of the disk store, of each replica and rank, reserved when it is made: 100GiB, or a number of bytes.",
        metavar="SIZE",
        show_default="none",
    )

    store: str | None = cache_option(
        "URL of a store behind the host memory, which engines share: redis://HOST, mooncake://HOST:PORT, file:///FOLDER.",
        metavar="URL",
        show_default="none",
    )

    def behind(self, place: int = 0, replicas: int = 1) -> dict[str, Any]:
        """Return the arguments of an engine. Each replica has a folder of its own, and reads those of the others.

        Args:
            place: the place of the replica, from 0.
            replicas: how many there are.

        Raises:
            ConfigError: an option lacks another one.
        """
        from hybridkv.stores import DiskFolder, StoreUrl  # noqa: PLC0415  # only some commands need them

        if (self.disk is None) != (self.disk_memory is None):
            raise ConfigError("--disk FOLDER and --disk-memory SIZE belong together: give both, or none")
        if self.disk is not None and self.store is not None:
            raise ConfigError("--disk and --store cannot be used together: drop one of them")
        choice: StoreChoice | None = None
        if self.disk is not None and self.disk_memory is not None:
            folders = [self.disk / f"replica-{number}" for number in range(replicas)] if replicas > 1 else [self.disk]
            own = folders.pop(place)
            choice = DiskFolder(own, self.disk_memory, tuple(folders))
        elif self.store is not None:
            choice = StoreUrl(self.store)
        if choice is not None and self.host_memory is None:
            raise ConfigError("--disk and --store need host memory in front of them: give --host-memory, too")
        return {"host_memory": self.host_memory, "store": choice}


@dataclass(frozen=True, slots=True)
class StepOptions:
    """How an engine schedules, caches and computes."""

    max_running: int = run_option("Limit of requests that run at once.", max=_MOST_RUNNING, metavar="N", default=64)
    token_budget: int = run_option("Limit of tokens in a step.", max=MOST_COUNT, metavar="N", default=2048)
    short_share: float | None = short_share_option()
    no_prefix_caching: bool = no_prefix_caching_option()
    eviction: str | None = eviction_option()
    shares: list[str] | None = shares_option()
    attention: str = attention_option()

    def engine_options(self, **others: Any) -> EngineOptions:  # noqa: ANN401  # as EngineOptions has them
        """Return the options of an engine.

        Args:
            others: more fields of EngineOptions, from options of a single command.

        Raises:
            ConfigError: for values out of range.
        """
        from hybridkv.runner.options import EngineOptions  # noqa: PLC0415  # takes seconds

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
    "Draft K tokens in a step and verify them together: ngram[:K] drafts from the request's own text, draft:DIR[:K] "
    f"with a smaller model. K is {_DRAFTS} if not given.",
    metavar="DRAFTS",
)


@dataclass(frozen=True, slots=True)
class Speculate:
    """Speculative decoding as `--speculate` names it.

    Attributes:
        source: draft model, as ``load`` takes it; None for prompt lookup.
        drafts: drafted tokens of a request in a step.
    """

    source: str | None
    drafts: int = _DRAFTS

    @classmethod
    def parse(cls, text: str | None) -> Speculate | None:
        """Read ``ngram[:K]`` or ``draft:DIR[:K]``; None stays None. Raises ConfigError for any other text."""
        if text is None:
            return None
        kind, _, rest = text.partition(":")
        source, _, last = rest.rpartition(":")
        if re.fullmatch("-?[0-9]{1,9}", last):
            rest, drafts = source, int(last)
        else:
            drafts = _DRAFTS
        if (kind, bool(rest)) not in {("ngram", False), ("draft", True)}:
            raise ConfigError(f"--speculate must be ngram[:K] or draft:DIR[:K], got {shown(text)}")
        return cls(rest or None, drafts)

    def drafter(
        self, options: EngineOptions, lengths: Sequence[int] | None = None, *, trust_remote_code: bool = False
    ) -> Drafter:
        """Return the drafter. A draft model runs with ``options``, always with a prefix cache, which it depends on.

        Args:
            options: options of the engine that verifies the drafts.
            lengths: tokens of each request, prompt and output together, which the draft model's cache must hold. None:
                requests are not known in advance, and ``plan_within`` chooses the memory.
            trust_remote_code: whether Python code of the draft model's folder may run.

        Raises:
            ConfigError: for a number of drafts out of range, and as ``load`` and ``plan_for``.
        """
        from hybridkv.runner import Engine, load, plan_for, plan_within  # noqa: PLC0415  # takes seconds
        from hybridkv.runner.drafters import AdaptiveDrafter, DraftModel, NgramDrafter  # noqa: PLC0415  # same

        if self.source is None:
            return AdaptiveDrafter(NgramDrafter(self.drafts))
        loaded = load(self.source, trust_remote_code=trust_remote_code)
        if lengths is None:
            plan = plan_within(loaded, max_batched_tokens=options.token_budget, max_in_flight=options.in_flight)
        else:
            plan = plan_for(loaded, lengths)
        return DraftModel(Engine(loaded, plan, replace(options, prefix_caching=True, lora_modules={})), self.drafts)
