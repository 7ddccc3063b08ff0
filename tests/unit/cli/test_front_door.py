"""``import hybridkv``: its names, when they are imported, and a manager that takes what a plan decided."""

import ast
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

import hybridkv
from caches import cache_with
from hybridkv import KVCacheManager, Plan, Request, plan, read_model
from hybridkv.cache import CacheOptions
from hybridkv.cache.placement import AlignPlacement, EndsPlacement, IntervalPlacement, placement_of
from hybridkv.cache.transfers import Transfer
from hybridkv.errors import ConfigError
from hybridkv.eviction import LRU
from hybridkv.step import Copy

MODEL = read_model("qwen3-next-80b-a3b")
TORCH = {"AsyncEngine", "BlockTable", "Engine", "EngineOptions", "ModelRunner", "MultiGroupBlockTable", "PagedStorage"}


def planned(**options: object) -> Plan:
    return plan(MODEL, "400GiB", **{"max_model_len": 4096, **options})  # type: ignore[arg-type]  # of this file


def python(*lines: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(  # noqa: S603 - our own lines
        [sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, timeout=120, check=False
    )


# -- names


def test_public_names_exist_and_are_typed() -> None:
    source = ast.parse(Path(hybridkv.__file__).read_text("utf-8"))
    typed = next(one for one in source.body if isinstance(one, ast.If) and ast.unparse(one.test) == "TYPE_CHECKING")
    told = [alias.name for line in typed.body if isinstance(line, ast.ImportFrom) for alias in line.names]
    assert sorted(told) == sorted(hybridkv.__all__)
    for name in hybridkv.__all__:
        assert getattr(hybridkv, name).__module__.startswith("hybridkv.")
    assert set(hybridkv.__all__) <= set(dir(hybridkv))


def test_public_name_that_is_unknown_is_rejected() -> None:
    with pytest.raises(AttributeError, match="module 'hybridkv' has no attribute 'Manager'"):
        _ = hybridkv.Manager  # type: ignore[attr-defined]  # that is the point
    from hybridkv import planner, simulator  # noqa: PLC0415 - folders, not names of the front door

    assert planner.plan is hybridkv.plan
    assert simulator.replay is hybridkv.replay


def test_control_plane_imports_without_torch() -> None:
    names = sorted({*hybridkv.__all__} - TORCH - {"load"})
    done = python(
        "import sys, hybridkv",
        "assert 'numpy' not in sys.modules, 'nothing is imported before it is asked for'",
        f"from hybridkv import {', '.join(names)}",
        "print(sorted({'torch', 'transformers', 'typer', 'rich'} & set(sys.modules)), hybridkv.__version__)",
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("[] 0.")


@pytest.mark.parametrize("name", sorted(TORCH))
def test_missing_torch_names_the_extra(name: str) -> None:
    done = python("import sys", "sys.modules['torch'] = None", f"from hybridkv import {name}")
    assert done.returncode == 1
    assert f"ImportError: hybridkv.{name} needs torch: pip install 'hybridkv[runner]'" in done.stderr


# -- a manager of a plan


@pytest.mark.parametrize("placement", ["ends", "interval:512", "align", "align:1024", "none"])
def test_manager_of_plan_keeps_its_placement(placement: str) -> None:
    made = planned(placement=placement)
    cache = KVCacheManager(made)
    assert cache.placement is not None
    assert cache.placement == placement_of(made)
    assert cache.placement.name.startswith(placement)
    assert (cache.max_model_len, cache.config) == (4096, made.config)
    assert cache.enable_caching == (placement != "none")


def test_manager_of_plan_has_its_ranks() -> None:
    made = plan(read_model("llama-3-8b"), "40GiB", max_model_len=4096, dcp=2, pcp=2, layout="reference")
    cache = KVCacheManager(made)
    assert (cache.dcp_world_size, cache.pcp_world_size) == (2, 2)
    assert cache.placement is None
    assert cache.groups[0].policy.block_size == 64


def test_manager_option_that_contradicts_the_plan_is_rejected() -> None:
    made = planned(placement="interval:512")
    for wrong, said in (
        ({"max_model_len": 8192}, "max_model_len 8192 contradicts the plan, which was made for 4096"),
        ({"dcp_world_size": 2}, "dcp_world_size 2 contradicts the plan, which was made for 1"),
        ({"pcp_world_size": 2}, "pcp_world_size 2 contradicts the plan, which was made for 1"),
        ({"placement": EndsPlacement()}, "placement ends contradicts the plan, which was made with interval:512"),
    ):
        with pytest.raises(ConfigError, match=said):
            cache_with(made, **wrong)
    every = {"dcp_world_size": 1, "pcp_world_size": 1, "placement": IntervalPlacement(512), "eviction": LRU}
    same = cache_with(made, 4096, **every)
    assert same.placement == IntervalPlacement(512)
    reference = planned(layout="reference")
    with pytest.raises(ConfigError, match="placement align:16 contradicts the plan, which was made with align"):
        KVCacheManager(reference, options=CacheOptions(placement=AlignPlacement(16)))


def test_manager_of_config_without_max_model_len_is_rejected() -> None:
    config = planned().config
    with pytest.raises(ConfigError, match="max_model_len is missing: a config does not contain it"):
        KVCacheManager(config)
    assert KVCacheManager(config, 100).max_model_len == 100
    with pytest.raises(ConfigError, match="kv_cache_config must be a Plan or a KVCacheConfig, got 'plan'"):
        KVCacheManager("plan")  # type: ignore[arg-type]  # that is the point


def test_manager_with_longer_requests_than_the_plan_is_rejected() -> None:
    cache = KVCacheManager(planned(max_model_len=64))
    sched = hybridkv.Scheduler(cache)
    with pytest.raises(ConfigError, match="64"):
        sched.add(Request("long", list(range(64)), hasher=cache.hasher))


def test_custom_worker_uses_public_names_only() -> None:
    cache = hybridkv.KVCacheManager(planned())
    sched = hybridkv.Scheduler(cache, hybridkv.SchedulerLimits())
    sched.add(hybridkv.Request("a", [1, 2, 3], hybridkv.SamplingParams(max_tokens=2), hasher=cache.hasher))
    while not sched.drained:
        step = sched.schedule()
        sampled = hybridkv.Csr.from_lists([[7] if samples else [] for samples in step.samples])
        outcome = sched.update(hybridkv.StepResult(step.id, sampled))
    assert [one.request.token_ids().tolist() for one in outcome.finished] == [[1, 2, 3, 7, 7]]


def test_copy_kinds_of_steps_and_transfers_agree() -> None:
    in_steps = [field.name for field in fields(Copy)]
    assert [name for name in in_steps if name in Transfer._fields] == [*Transfer._fields]
