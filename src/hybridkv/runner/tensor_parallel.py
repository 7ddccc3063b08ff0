"""Tensor parallel ranks: one process for each, all led by one engine.

    Ranks("llama", 2)    rank 0: this process, its engine, scheduler and drafts --Step--> rank 1: a child, follow
                              '----- sums over ranks: gloo on CPUs, NCCL on GPUs -------------'

Transformers cuts the weights by its own plan for the model (``tp_plan``) and sums the ranks' results. Layers that the
plan does not name, such as recurrent ones, are whole on each rank, and so are their states, which rank 0 stores. So are
keys and values that the plan gathers, because a norm spans all heads.
"""

from __future__ import annotations

import pickle
import secrets
import signal
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers.distributed.tensor_parallel import apply_tensor_parallelism
from transformers.utils import logging as chatter

from hybridkv.arguments import at_least, flag, instance, integer, or_none, text
from hybridkv.errors import ConfigError, HybridKVError, UnsupportedModelError, WorkerError
from hybridkv.runner.engine import Engine
from hybridkv.runner.inputs import require_drafter
from hybridkv.runner.load import LoadedModel, load
from hybridkv.runner.lockstep import follow, lead
from hybridkv.runner.lora import require_combinable
from hybridkv.runner.options import EngineOptions
from hybridkv.runner.planning import plan_of
from hybridkv.runner.probe import AS_COMPUTED, Stored
from hybridkv.runner.shares import ModelShare
from hybridkv.units import shown
from hybridkv.wire import Link, Listener, connect

if TYPE_CHECKING:
    from hybridkv.kv_events import RequestPublisher
    from hybridkv.runner.drafters import Drafter
    from hybridkv.stores import StoreChoice

_HEADS: Final = ("num_attention_heads", "num_key_value_heads")
_MOST_RANKS: Final = 64
_START_S: Final = 120.0
"""Seconds in which the process of a rank must connect. Chosen by hand."""
_COLLECTIVE_S: Final = 600.0
"""Seconds that ranks wait for each other, such as for one that still loads. Chosen by hand."""
_END_S: Final = 20.0
"""Seconds after which a rank that has no leader any more is killed. Chosen by hand."""


@dataclass(frozen=True, slots=True)
class _Rank:
    """A rank of a model; its process is told this.

    Attributes:
        source: the model, as ``load`` takes it.
        rank: number of the rank.
        ranks: how many there are.
        device: kind of device, cpu or cuda.
        trust_remote_code: as in ``load``.
        threads: threads of its computations.
        meeting: path of the file where the ranks find each other.
    """

    source: str
    rank: int
    ranks: int
    device: str
    trust_remote_code: bool
    threads: int
    meeting: str

    def whole(self) -> LoadedModel:
        """Load the whole model."""
        torch.set_num_threads(self.threads)
        where = self.device if self.device == "cpu" else f"{self.device}:{self.rank}"
        return load(self.source, device=where, trust_remote_code=self.trust_remote_code)

    def meet(self) -> None:
        """Wait for the other ranks."""
        dist.init_process_group(
            "gloo" if self.device == "cpu" else "cpu:gloo,cuda:nccl",
            f"file://{self.meeting}",
            timedelta(seconds=_COLLECTIVE_S),
            self.ranks,
            self.rank,
        )
        if self.device == "cuda":
            torch.cuda.set_device(self.rank)


def cut(loaded: LoadedModel, rank: int, ranks: int) -> LoadedModel:
    """Keep a rank's share of a model's weights, in place. All ranks call it, in an initialised process group.

    Args:
        loaded: the whole model.
        rank: number of the rank, from 0.
        ranks: how many there are.

    Raises:
        UnsupportedModelError: transformers has no plan for the model, or the ranks cannot divide its heads.
    """
    heads = _divided_heads(loaded, ranks)
    model, config = loaded.model, loaded.model.config.get_text_config()
    share = ModelShare.of(model, rank, ranks, cuts_heads=bool(heads))
    # the outputs of an uneven cut could not be gathered
    plan = {name: style for name, style in model.tp_plan.items() if name != "lm_head" or not config.vocab_size % ranks}
    apply_tensor_parallelism(model, init_device_mesh(model.device.type, (ranks,)), plan)
    config.head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    for name, count in heads.items():
        setattr(config, name, count)
    return replace(loaded, share=share)


def _divided_heads(loaded: LoadedModel, ranks: int) -> dict[str, int]:
    """Return the numbers of a rank's heads by the config's name for them; none if each rank caches all keys.

    Raises UnsupportedModelError as ``cut``.
    """
    model, config = loaded.model, loaded.model.config.get_text_config()
    if not {*model.tp_plan} - {"lm_head"}:
        raise UnsupportedModelError(
            f"transformers has no tensor parallel plan for the layers of {type(model).__name__}: run it with one rank"
        )
    if any(name.endswith(".k_proj") and "gather_output" in style for name, style in model.tp_plan.items()):
        return {}
    heads = {name: count for name in _HEADS if (count := getattr(config, name, None))}
    for name, count in heads.items():
        if count % ranks:
            raise UnsupportedModelError(
                f"{loaded.name} has {name} {count}, which {ranks} ranks cannot divide: use a number that divides it"
            )
    return {name: count // ranks for name, count in heads.items()}


class Ranks:
    """A model whose weights are cut over processes of this machine. Use it with ``with``; close its engine before.

    Args:
        source: the model, as ``load`` takes it.
        ranks: how many there are; this process is the first.
        device: cpu, or cuda: rank N uses GPU N.
        trust_remote_code: as in ``load``.
        threads: CPU threads of each rank; None: those of this process, shared.

    Attributes:
        loaded: the share of this process.

    Raises:
        ConfigError: as ``load``.
        UnsupportedModelError: as ``cut``.
        WorkerError: the process of another rank ended. It has printed why.
    """

    def __init__(
        self,
        source: str,
        ranks: int,
        *,
        device: str = "cpu",
        trust_remote_code: bool = False,
        threads: int | None = None,
    ) -> None:
        text("source", source)
        integer("ranks", ranks, 2, _MOST_RANKS)
        flag("trust_remote_code", trust_remote_code)
        or_none(at_least(1))("threads", threads)
        if text("device", device) not in {"cpu", "cuda"}:
            raise ConfigError(f"device must be cpu or cuda, got {shown(device)}")
        self._links: list[Link] = []
        self._children: list[subprocess.Popen[bytes]] = []
        with ExitStack() as undo:
            undo.callback(self._end)
            folder = undo.enter_context(tempfile.TemporaryDirectory(prefix="hybridkv-ranks-"))
            undo.callback(torch.set_num_threads, torch.get_num_threads())
            threads = threads or max(1, torch.get_num_threads() // ranks)
            meeting = str(Path(folder) / "meeting")
            told = [_Rank(source, rank, ranks, device, trust_remote_code, threads, meeting) for rank in range(ranks)]
            whole = told[0].whole()
            _divided_heads(whole, ranks)  # raises before a process starts
            key = secrets.token_bytes(32)
            for one in told[1:]:
                self._start(one, key)
            try:
                told[0].meet()
                self.loaded = cut(whole, 0, ranks)
            except RuntimeError as error:
                raise self._failure(error) from error
            self._closing = undo.pop_all()

    def _start(self, told: _Rank, key: bytes) -> None:
        """Start the process of a rank, and wait until it has connected."""
        with Listener(("127.0.0.1", 0), authkey=key) as listener:
            code = f"from {__name__} import run_rank; run_rank()"
            command = [sys.executable, "-X", "faulthandler", "-c", code]  # a crash in C prints where
            child = subprocess.Popen(command, stdin=subprocess.PIPE)  # noqa: S603 - our own
            self._children.append(child)
            assert child.stdin is not None  # noqa: S101 - asked for above
            with child.stdin as pipe:
                pickle.dump((listener.address, key, told), pipe)
            try:
                self._links.append(listener.accept(_START_S))
            except TimeoutError as error:
                raise self._failure(error) from error

    def _failure(self, error: Exception) -> HybridKVError:
        """Return what to raise for an error that another rank may have caused by ending."""
        for rank, child in enumerate(self._children, 1):
            if child.poll() is not None:
                return WorkerError(f"rank {rank} ended with status {child.returncode}: it has printed why")
        return WorkerError(f"the ranks lost each other: {error}")

    def engine(
        self,
        *,
        options: EngineOptions | None = None,
        memory: int | str | None = None,
        max_model_len: int | None = None,
        host_memory: int | str | None = None,
        store: StoreChoice | None = None,
        stored: Stored = AS_COMPUTED,
        speculate: Drafter | None = None,
        requests: RequestPublisher | None = None,
    ) -> Engine:
        """Return an Engine whose Steps run on all ranks. Call it once; the arguments are those of Engine.

        Args:
            options: how the engine runs.
            memory: bytes, or a size, of each rank's cache.
            max_model_len: tokens of the longest request.
            host_memory: bytes, or a size, of each rank's host memory.
            store: a store that all ranks reach.
            stored: the form of keys and values in pages.
            speculate: a Drafter; it runs on this rank alone.
            requests: receives each request as it ends.

        Raises:
            ConfigError: as Engine.
            UnsupportedModelError: as Engine.
            CapacityError: as Engine.
            WorkerError: the process of another rank ended.
        """
        options = EngineOptions() if options is None else instance("options", options, EngineOptions)
        require_combinable(options, ranks=len(self._links) + 1)
        if speculate is not None:
            require_drafter("speculate", speculate)
        drafts = 0 if speculate is None else speculate.num_speculative_tokens
        plan = plan_of(
            self.loaded,
            options,
            None,
            memory,
            max_model_len=max_model_len,
            num_speculative_tokens=drafts,
            stored=stored,
        )
        shared: dict[str, Any] = {"plan": plan, "options": options, "host_memory": host_memory, "store": store}
        try:
            dist.broadcast_object_list([shared], device=torch.device("cpu"))
            engine = Engine(self.loaded, **shared, speculate=speculate, requests=requests)
        except RuntimeError as error:
            raise self._failure(error) from error
        lead(engine, self._links)
        return engine

    def _end(self) -> None:
        for link in self._links:
            link.close()
        for child in self._children:
            try:
                child.wait(_END_S)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
        if dist.is_initialized():
            dist.destroy_process_group()

    def close(self) -> None:
        """End the processes of the other ranks. A second call does nothing."""
        self._closing.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def run_rank() -> None:
    """Run a rank, as the process that started this one says on standard input."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 finishes its answers, and ends the others by closing
    address, key, told = pickle.load(sys.stdin.buffer)  # noqa: S301 - from the parent alone
    chatter.set_verbosity_error()
    chatter.disable_progress_bar()
    with connect(address, authkey=key) as link:
        try:
            whole = told.whole()
            told.meet()
            loaded = cut(whole, told.rank, told.ranks)
            shared: list[Any] = [None]
            dist.broadcast_object_list(shared, device=torch.device("cpu"))
            with Engine(loaded, **shared[0]) as engine:
                follow(engine, link)
        except HybridKVError as error:
            sys.exit(f"rank {told.rank}: {error}")
