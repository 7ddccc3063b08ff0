"""Plan, share, schedule and simulate the KV cache of hybrid LLMs.

    plan(read_model(...), memory) -> Plan -> KVCacheManager -> Scheduler -> Step -> a worker      StepResult back
                              |                                                      BlockTable, PagedStorage
                              +--> replay(TraceFile(...), plan): the same, with modelled time
    Engine(model), AsyncEngine(model): all of it around a transformers model

Each name is imported on first use; torch is imported only by names that run models.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from hybridkv.cache import BlockHasher as BlockHasher
    from hybridkv.cache import KVCacheManager as KVCacheManager
    from hybridkv.errors import HybridKVError as HybridKVError
    from hybridkv.models import read_model as read_model
    from hybridkv.planner import KVCacheConfig as KVCacheConfig
    from hybridkv.planner import Plan as Plan
    from hybridkv.planner import plan as plan
    from hybridkv.request import Request as Request
    from hybridkv.request import SamplingParams as SamplingParams
    from hybridkv.request import StructuredOutput as StructuredOutput
    from hybridkv.runner import AsyncEngine as AsyncEngine
    from hybridkv.runner import Engine as Engine
    from hybridkv.runner import EngineOptions as EngineOptions
    from hybridkv.runner import ModelRunner as ModelRunner
    from hybridkv.runner.load import load as load
    from hybridkv.schedule import Scheduler as Scheduler
    from hybridkv.schedule import SchedulerLimits as SchedulerLimits
    from hybridkv.simulator import ReplaySettings as ReplaySettings
    from hybridkv.simulator import TraceFile as TraceFile
    from hybridkv.simulator import Workload as Workload
    from hybridkv.simulator import replay as replay
    from hybridkv.step import Csr as Csr
    from hybridkv.step import Step as Step
    from hybridkv.step import StepResult as StepResult
    from hybridkv.worker import BlockTable as BlockTable
    from hybridkv.worker import MultiGroupBlockTable as MultiGroupBlockTable
    from hybridkv.worker import PagedStorage as PagedStorage

    __version__: str

_HOMES: Final = {
    "cache": ("BlockHasher", "KVCacheManager"),
    "errors": ("HybridKVError",),
    "models": ("read_model",),
    "planner": ("KVCacheConfig", "Plan", "plan"),
    "request": ("Request", "SamplingParams", "StructuredOutput"),
    "runner": ("AsyncEngine", "Engine", "EngineOptions", "ModelRunner", "load"),
    "schedule": ("Scheduler", "SchedulerLimits"),
    "simulator": ("ReplaySettings", "TraceFile", "Workload", "replay"),
    "step": ("Csr", "Step", "StepResult"),
    "worker": ("BlockTable", "MultiGroupBlockTable", "PagedStorage"),
}
_HOME_OF: Final = {name: home for home, names in _HOMES.items() for name in names}
_NEEDS_TORCH: Final = frozenset({"runner", "worker"})

__all__ = list(_HOME_OF)  # of strings


if not TYPE_CHECKING:  # who checks types is to find the names above, and no others

    def __getattr__(name: str) -> object:
        """One of ``__all__``, or ``__version__``. ImportError, saying what to install, where a library is missing."""
        if name == "__version__":
            from importlib.metadata import version  # noqa: PLC0415  # read when it is asked for

            return version("hybridkv")
        home = _HOME_OF.get(name)
        if home is None:
            raise AttributeError(f"module 'hybridkv' has no attribute {name!r}")
        try:
            found: object = getattr(import_module(f"hybridkv.{home}"), name)
        except ModuleNotFoundError as error:
            if home not in _NEEDS_TORCH:
                raise
            raise ImportError(
                f"hybridkv.{name} needs {error.name}: pip install 'hybridkv[runner]'", name=error.name
            ) from error
        globals()[name] = found
        return found


def __dir__() -> list[str]:
    """Return all names, imported or not."""
    return sorted({*globals(), *__all__, "__version__"})
