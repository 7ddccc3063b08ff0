"""What an engine is made of: options, a plan, and the cache, the scheduler and the runner of that plan."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from hybridkv.arguments import check_fields, flag, integer, one_of, or_none, text
from hybridkv.cache import CacheOptions, KVCacheManager
from hybridkv.errors import ConfigError
from hybridkv.eviction import EVERYBODY, TenantShares, eviction_named, eviction_of
from hybridkv.planner import Plan
from hybridkv.runner.attention.formulas import AttentionBackend, attention_backend
from hybridkv.runner.decode_graphs import compile_option
from hybridkv.runner.images import attends_both_ways
from hybridkv.runner.load import LoadedModel
from hybridkv.runner.planning import plan_within
from hybridkv.runner.probe import planner_model
from hybridkv.runner.runner import ModelRunner, Observer, Undrawn, require_fit
from hybridkv.runner.self_check import require_same
from hybridkv.schedule import Scheduler, SchedulerLimits
from hybridkv.schedule.limits import short_share


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How an engine runs. max_running: requests at once. token_budget: tokens of a step.

    in_flight: steps scheduled ahead of their results, 1 or 2: then forwards run in a thread of their own, observers and
    logits_processors with them, while the next step is scheduled. prefix_caching: share blocks of equal prefixes.
    attention: what attends over the pages (AttentionBackend).
    compile: "decode" for steps that only decode as CUDA graphs, where the model allows it and attention is "triton";
    elsewhere they run as they are, and the log says why.
    self_check: first compare the model on pages with plain forwards, some 15 short ones (hybridkv.runner.self_check).
    kv_events: the cache tells what it stores and forgets, for AsyncEngine's ``events``; end_events: and where hits can
    end, for an exact KVEventPublisher.
    image_bytes: of the features of images kept on the device; beyond it those read longest ago are made anew.
    eviction, shares: what the cache gives up next, by name, None for what suits the plan, and shares of tenants of what
    it keeps (KVCacheManager). remembered_losses, block_times: what statistics tell besides (KVCacheManager).
    short_share: as SchedulerLimits.
    Raises ConfigError for counts that are none, and for the name of no eviction.
    """

    max_running: int = 64
    token_budget: int = 2048
    in_flight: int = 1
    prefix_caching: bool = True
    self_check: bool = True
    image_bytes: int = 256 << 20
    attention: AttentionBackend | str = AttentionBackend.GATHER
    compile: str | None = None
    kv_events: bool = False
    end_events: bool = False
    eviction: str | None = None
    shares: TenantShares = EVERYBODY
    remembered_losses: int = 0
    block_times: bool = False
    short_share: float | None = None

    def __post_init__(self) -> None:
        check_fields(self, partial(integer, least=1), "max_running", "token_budget")
        check_fields(self, partial(integer, least=1, most=2), "in_flight")
        check_fields(self, partial(integer, least=0), "image_bytes", "remembered_losses")
        check_fields(self, flag, "prefix_caching", "self_check", "kv_events", "end_events", "block_times")
        check_fields(self, attention_backend, "attention")
        check_fields(self, compile_option, "compile")
        if self.eviction is not None:
            check_fields(self, text, "eviction")
            eviction_named(self.eviction)
        check_fields(self, one_of(TenantShares), "shares")
        check_fields(self, or_none(short_share), "short_share")


class Parts(NamedTuple):
    """Of one engine."""

    cache: KVCacheManager
    scheduler: Scheduler
    runner: ModelRunner


def plan_of(
    loaded: LoadedModel,
    plan: Plan | None,
    memory: int | str | None,
    max_model_len: int | None,
    *,
    options: EngineOptions,
    drafts: int,
) -> Plan:
    """``plan``, or one within ``memory``. drafts: most of a row in a step. Raises ConfigError for both at once."""
    if plan is None:
        return plan_within(
            loaded,
            memory,
            max_model_len=max_model_len,
            max_batched_tokens=options.token_budget,
            max_in_flight=options.in_flight,
            num_speculative_tokens=drafts,
        )
    if memory is not None or max_model_len is not None:
        raise ConfigError("the plan has a memory and a max_model_len: leave these out, or leave the plan out")
    return plan


def assemble(
    loaded: LoadedModel,
    plan: Plan,
    options: EngineOptions,
    *,
    drafts: int,
    observer: Observer | None,
    undrawn: Undrawn | None = None,
) -> Parts:
    """Cache, scheduler and runner of ``plan``; from here on the model runs on pages.

    Raises ConfigError for a plan of another model, and as ModelRunner does.
    """
    planned = planner_model(loaded.model, block_size=plan.model.block_size, name=loaded.name)
    require_fit(planned, plan.config)
    forwards = require_same(loaded, plan, AttentionBackend(options.attention)) if options.self_check else None
    limits = SchedulerLimits(
        max_running=options.max_running,
        max_batched_tokens=options.token_budget,
        max_in_flight=options.in_flight,
        num_speculative_tokens=drafts,
        whole_items=attends_both_ways(loaded.model),
        short_share=options.short_share,
    )
    cache = KVCacheManager(
        plan,
        enable_caching=options.prefix_caching,
        enable_kv_cache_events=options.kv_events,
        options=CacheOptions(
            end_events=options.end_events,
            eviction=eviction_of(plan, options.eviction),
            shares=options.shares,
            remembered_losses=options.remembered_losses,
            block_times=options.block_times,
        ),
    )
    scheduler = Scheduler(cache, limits)
    runner = ModelRunner(
        loaded.model,
        plan.config,
        planned,
        max_running=limits.max_running,
        max_model_len=plan.max_model_len,
        max_batched_tokens=limits.max_batched_tokens,
        max_encoder_tokens=plan.limits.max_encoder_tokens,
        observer=observer,
        undrawn=undrawn,
        forwards=forwards,
        attention=options.attention,
        compiled=options.compile,
    )
    return Parts(cache, scheduler, runner)
