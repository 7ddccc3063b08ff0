"""The worker of the natural layout, without vLLM: what it asks of vLLM's names stands here in a few lines.

vLLM's own views are looked at by tests/vllm/natural_views.py, whole engines by tests/vllm/natural_duel.py.
"""

import importlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from test_vllm_natural import FULL, HYBRID, OPTIONS, WINDOWS, config

from engine_groups import SIZE
from hybridkv.errors import ConfigError
from hybridkv.planner import SlabClass, SlabLayout
from hybridkv.vllm.natural import ATTRIBUTE, Cell, NaturalStep, natural_plan
from hybridkv.vllm.specs import RUNNER

LENGTH, MEMORY = 128, 64 << 10


class Layout(Enum):
    """Orders of a page by whether a block's bytes are one run, and whether layers lie inside blocks."""

    LBNHC = (True, False)
    BLNHC = (True, True)
    BHLNC = (False, True)

    @property
    def is_block_compact(self) -> bool:
        return self.value[0]

    @property
    def is_block_outermost(self) -> bool:
        return self.value[1]


class Times(NamedTuple):
    language_model: float
    encoder: float


@dataclass
class Group:
    layer_names: list[str]
    kv_cache_spec: Any


@dataclass
class Tensor:
    size: int
    layers: list[str]
    layer_stride: int
    block_stride: int
    offset: int = 0


@dataclass
class TheirConfig:
    num_blocks: int
    kv_cache_tensors: list[Tensor]
    kv_cache_groups: list[Group]
    kv_cache_layout: str | None = None


class Event:
    def __init__(self, calls: list[str]) -> None:
        self.synchronize = lambda: calls.append("waited")


class TheirWorker:
    """The methods of vLLM's workers that the mix-in uses. calls: the calls so far, in order."""

    def __init__(
        self, vllm_config: SimpleNamespace, layouts: Sequence[str] = ("LBNHC", "BLNHC"), kernel_block: int = SIZE
    ) -> None:
        backend = SimpleNamespace(size=kernel_block)
        layer = SimpleNamespace(get_attn_backend=lambda: backend)
        compiled = {"compilation_time": 3.0, "encoder_compilation_time": 1.0}
        self.calls: list[str] = []
        self.layouts = list(layouts)
        self.vllm_config = vllm_config
        vllm_config.additional_config = {"hybridkv": {"block_size": SIZE}}
        vllm_config.compilation_config = SimpleNamespace(
            **compiled, static_forward_context={f"layer{number}": layer for number in range(8)}
        )
        table = SimpleNamespace(block_table=SimpleNamespace(np=np.zeros((2, 4), np.int32)))
        self.model_runner = SimpleNamespace(
            device="cpu",
            kv_caches=[],
            requests={},
            input_batch=SimpleNamespace(req_id_to_index={}, block_table=[table, table]),
            prepare_inputs_event=None,
        )

    def get_supported_kv_cache_layouts(self) -> list[str]:
        return self.layouts

    def initialize_from_config(self, made: TheirConfig) -> None:
        self.calls.append(f"laid out, {made.kv_cache_layout}")
        self.made = made
        self.model_runner.kv_caches.append(torch.zeros(made.kv_cache_tensors[0].size, dtype=torch.int8))

    def compile_or_warm_up_model(self) -> None:
        self.calls.append("warmed up")

    def execute_model(self, output: Any) -> str:  # noqa: ANN401 - vLLM's
        self.calls.append("forward")
        self.model_runner.kv_caches[0][0] += 1
        return f"output of {output.name}"


CONNECTORS = list[Any]()
"""vLLM's connector in this process, if there is one."""


class Stages:
    """The group of pipeline stages; ``first`` is what the first stage sends, ``None`` in the first stage itself."""

    first: Any = None

    def broadcast_object(self, own: Any) -> Any:  # noqa: ANN401 - vLLM's
        return own if self.first is None else self.first


def selected(size: int, backends: Sequence[Any], specs: Sequence[Any]) -> int:
    """As vLLM's: the kernel's own block where it divides ``size``, else ValueError."""
    assert [spec.block_size for spec in specs] == [size]
    if size % backends[0].size:
        raise ValueError(size)
    return int(backends[0].size)


def stand_in(name: str, **names: object) -> ModuleType:
    module = ModuleType(name)
    vars(module).update(names)
    return module


@pytest.fixture
def mixed(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Any]]:
    """The mix-in before TheirWorker."""
    interface = {
        "KVCacheConfig": TheirConfig,
        "KVCacheGroupSpec": Group,
        "KVCacheTensor": Tensor,
        "UniformTypeKVCacheSpecs": object,
    }
    for module in (
        stand_in("vllm"),
        stand_in("vllm.config", set_current_vllm_config=nullcontext),
        stand_in("vllm.distributed"),
        stand_in("vllm.distributed.parallel_state", get_pp_group=Stages),
        stand_in(
            "vllm.distributed.kv_transfer",
            has_kv_transfer_group=lambda: bool(CONNECTORS),
            get_kv_transfer_group=lambda: CONNECTORS[-1],
        ),
        stand_in("vllm.platforms", current_platform=SimpleNamespace(is_cpu=lambda: False, is_cuda_alike=lambda: True)),
        stand_in("vllm.v1"),
        stand_in("vllm.v1.kv_cache_interface", **interface),
        stand_in("vllm.v1.kv_cache_layout", KVCacheLayout=Layout),
        stand_in("vllm.v1.worker"),
        stand_in("vllm.v1.worker.gpu_worker", Worker=object),
        stand_in("vllm.v1.worker.utils", select_common_block_size=selected),
        stand_in("vllm.v1.worker.worker_base", CompilationTimes=Times),
    ):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    ours = ("hybridkv.vllm.natural_config", "hybridkv.vllm.natural_worker")
    for name in ours:
        monkeypatch.delitem(sys.modules, name, raising=False)
    layout = importlib.import_module(ours[1]).NaturalLayout
    yield type("Mixed", (layout, TheirWorker), {})
    for name in ours:
        del sys.modules[name]


def theirs(specs: Sequence[object] = HYBRID) -> Any:  # noqa: ANN401 - vLLM's KVCacheConfig
    given: Any = config(MEMORY, specs)
    given.kv_cache_layout = "BLNHC"
    return given


def plan_of(specs: Sequence[object] = HYBRID) -> Any:  # noqa: ANN401 - our KVCacheConfig
    made = natural_plan(theirs(specs), OPTIONS, name="tiny", max_model_len=LENGTH, max_in_flight_tokens=48)
    return made.config


NONE = np.empty((0, 3), np.int32)
STEP = NaturalStep(NONE, np.empty((0, 2), np.int32), NONE, NONE)


def output(step: NaturalStep | None, name: str = "step") -> SimpleNamespace:
    made = SimpleNamespace(name=name)
    if step is not None:
        setattr(made, ATTRIBUTE, step)
    return made


def first_runner() -> SimpleNamespace:
    """A VllmConfig of vLLM's first model runner."""
    return SimpleNamespace(use_v2_model_runner=False)


def begun(mixed: type[Any], **changed: Any) -> Any:  # noqa: ANN401 - a worker
    worker = mixed(first_runner(), **changed)
    worker.initialize_from_config(theirs())
    return worker


class Defaults:
    """A VllmConfig whose runner is V2 unless the environment says otherwise, as vLLM's is on GPUs."""

    speculative_config = None

    def __init__(self, **model: object) -> None:
        self.model_config, self.validated = SimpleNamespace(**model), 0

    @property
    def use_v2_model_runner(self) -> bool:
        return os.environ.get(RUNNER, "1") == "1"

    def _validate_v1_model_runner(self) -> None:
        self.validated += 1


def test_natural_worker_chooses_the_first_runner_where_vllm_would_take_the_second(
    mixed: type[Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(RUNNER, "kept for the end of this test")
    monkeypatch.delenv(RUNNER)
    started = Defaults(logits_processors=None)
    mixed(started)
    assert (os.environ[RUNNER], started.use_v2_model_runner, started.validated) == ("0", False, 1)
    assert [record.getMessage() for record in caplog.records] == [
        "the natural layout runs on vLLM's first model runner: VLLM_USE_V2_MODEL_RUNNER=0 is set in this process"
    ]
    mixed(started)
    assert len(caplog.records) == 1


@pytest.mark.parametrize("given", ["the second runner", "drafts", "logits_processors"])
def test_natural_worker_lets_the_user_choose_what_vllm_has_derived_options_from(
    mixed: type[Any], monkeypatch: pytest.MonkeyPatch, given: str
) -> None:
    monkeypatch.setenv(RUNNER, "1")
    started = Defaults(**{given: ["one"]} if given == "logits_processors" else {})
    if given != "the second runner":
        monkeypatch.delenv(RUNNER)
    if given == "drafts":
        started.speculative_config = object()  # type: ignore[assignment]
    before = os.environ.get(RUNNER)
    with pytest.raises(ConfigError, match="the natural layout supports vLLM's first model runner: start with VLLM_USE"):
        mixed(started)
    assert os.environ.get(RUNNER) == before


def test_natural_worker_warms_up_after_the_first_step_makes_the_views(mixed: type[Any]) -> None:
    """Graphs that are captured before there is an arena would read what is not there."""
    worker = begun(mixed)
    assert worker.compile_or_warm_up_model() == (3.0, 1.0)
    assert worker.calls == []
    assert worker.execute_model(output(replace_config(STEP), "first")) == "output of first"
    assert worker.calls == ["laid out, BLNHC", "warmed up", "forward"]
    worker.execute_model(output(STEP))
    assert worker.calls[3:] == ["forward"]


def replace_config(step: NaturalStep) -> NaturalStep:
    return step._replace(config=plan_of())


def test_natural_worker_copies_and_clears_blocks_around_the_forward(mixed: type[Any]) -> None:
    worker = begun(mixed)
    worker.execute_model(output(replace_config(STEP)))
    (storage,) = worker.model_runner.kv_caches
    slabs: SlabLayout = plan_of().slabs
    size = slabs.classes[0].block_bytes
    storage[:] = 0
    storage[size] = 7  # block 1, moved to 2, of which 3 is a copy; what the forward makes of block 0 is kept in 4
    storage[5 * size] = 9
    copies = [np.array([triple], np.int32) for triple in ((0, 1, 2), (0, 2, 3), (0, 0, 4))]
    worker.execute_model(
        output(NaturalStep(copies[0], np.array([(0, 5)], np.int32), copies[1], copies[2], cells=(), config=None))
    )
    assert storage[: 6 * size : size].tolist() == [1, 7, 7, 7, 1, 0]


def test_natural_arena_copies_and_clears_blocks_of_each_class(mixed: type[Any]) -> None:
    """Two classes over the same bytes: blocks of 256 and of 512 in slabs of 512."""
    slabs = SlabLayout(512, 4, (SlabClass(256, 2, (0,)), SlabClass(512, 1, (1,))), (1, 1))
    storage = torch.arange(4 * 2, dtype=torch.uint8).repeat_interleave(256)
    arena = sys.modules[mixed.__mro__[1].__module__].Arena(storage, SimpleNamespace(slabs=slabs))
    arena.copy(np.array([(0, 2, 4), (0, 4, 5), (1, 3, 1)], np.int32))
    assert storage[::256].tolist() == [0, 1, 6, 7, 2, 2, 6, 7]
    arena.zero(np.array([(0, 6), (1, 1)], np.int32))
    assert storage[::256].tolist() == [0, 1, 0, 0, 2, 2, 0, 7]


def alone(connector: object, work: str) -> tuple[object, str]:
    return connector, work


def combined(connector: object, work: object) -> tuple[object, SimpleNamespace]:
    """In vLLM's MultiConnector, after a connector without tiers; their metadata stand side by side."""
    return SimpleNamespace(sub_connectors=[object(), connector]), SimpleNamespace(metadata=("another's", work))


def nested(connector: object, work: str) -> tuple[object, SimpleNamespace]:
    return combined(*combined(connector, work))


@pytest.mark.parametrize("natural", [True, False])
@pytest.mark.parametrize("given", [alone, combined, nested])
def test_natural_worker_runs_transfers_around_its_block_operations(
    mixed: type[Any], monkeypatch: pytest.MonkeyPatch, given: Callable[..., Any], *, natural: bool
) -> None:
    """A store reads blocks before they move, and a load writes blocks that were cleared."""
    worker = begun(mixed)
    seen = list[tuple[str, list[int]]]()

    def see(what: str) -> None:
        blocks = worker._arena._blocks[0]
        seen.append((what, [*blocks[2:5, -1].tolist(), len(worker.calls)]))

    tier = SimpleNamespace(
        begin=lambda work, arena: see(f"begin {work} {arena is worker._arena}"), load=lambda: see("load")
    )
    connector, work = given(SimpleNamespace(natural=tier if natural else None), "first")
    monkeypatch.setattr(sys.modules[__name__], "CONNECTORS", [connector])
    first = output(replace_config(STEP))
    first.kv_connector_metadata = work
    worker.execute_model(first)
    worker._arena._blocks[0][2:5] = torch.tensor([[7], [8], [9]], dtype=torch.uint8)
    of_class = np.array([[0, 2, 3]], np.int32)
    step = output(STEP._replace(moves=of_class, zero=np.array([[0, 2]], np.int32)))
    step.kv_connector_metadata = given(None, "second")[1]
    seen.clear()
    calls = len(worker.calls)
    worker.execute_model(step)
    told = [("begin second True", [7, 8, 9, calls]), ("load", [0, 7, 9, calls])]
    assert seen == (told if natural else [])
    assert len(worker.calls) == calls + 1


def test_natural_worker_rewrites_tables_after_the_previous_step_read_them(mixed: type[Any]) -> None:
    worker = begun(mixed)
    worker.execute_model(output(replace_config(STEP)))
    runner = worker.model_runner
    runner.requests = {"a": SimpleNamespace(block_ids=([1], [2, 3])), "b": SimpleNamespace(block_ids=([4], [5]))}
    runner.input_batch.req_id_to_index = {"a": 1}
    runner.prepare_inputs_event = Event(worker.calls)
    worker.calls.clear()
    worker.execute_model(output(STEP))
    assert worker.calls == ["forward"]
    cells = (Cell("a", 1, 1, 9), Cell("b", 0, 0, 8), Cell("b", 1, 1, 7), Cell("unheard of", 0, 0, 6))
    worker.execute_model(output(STEP._replace(cells=cells)))
    assert worker.calls == ["forward", "waited", "forward"]
    assert runner.requests["a"].block_ids == ([1], [2, 9])
    assert runner.requests["b"].block_ids == ([8], [5])
    assert runner.input_batch.block_table[1].block_table.np.tolist() == [[0, 0, 0, 0], [0, 9, 0, 0]]


def test_natural_worker_offers_packable_page_layouts_only(mixed: type[Any]) -> None:
    assert mixed(first_runner(), layouts=[one.name for one in Layout]).get_supported_kv_cache_layouts() == ["BLNHC"]
    with pytest.raises(ConfigError, match=r"side by side \(LBNHC\).*--attention-backend"):
        mixed(first_runner(), layouts=["LBNHC"]).get_supported_kv_cache_layouts()


@pytest.mark.parametrize("kernel_block", [SIZE // 2, 3])
def test_natural_worker_rejects_kernels_with_other_block_sizes(mixed: type[Any], kernel_block: int) -> None:
    with pytest.raises(ConfigError, match=f"kernel of layer2 does not read blocks of {SIZE} tokens"):
        begun(mixed, kernel_block=kernel_block)


def test_natural_worker_rejects_steps_of_another_scheduler(mixed: type[Any]) -> None:
    worker = begun(mixed)
    with pytest.raises(ConfigError, match="NaturalWorker takes its steps from --scheduler-cls"):
        worker.execute_model(output(None))
    with pytest.raises(ConfigError, match="first step, which has the cache's layout, did not arrive"):
        worker.execute_model(output(STEP))


@pytest.mark.parametrize("specs", [HYBRID, WINDOWS, (HYBRID[0],), (FULL,)])
def test_natural_worker_layers_of_a_group_are_disjoint_and_aligned(mixed: type[Any], specs: Sequence[object]) -> None:
    worker = mixed(first_runner())
    worker.initialize_from_config(theirs(specs))
    ours = plan_of(specs)
    worker.execute_model(output(STEP._replace(config=ours)))
    made = worker.made
    bytes_of = {
        layer: group.kv_cache_spec.real_page_size_bytes for group in made.kv_cache_groups for layer in group.layer_names
    }
    for number, group in enumerate(made.kv_cache_groups):
        seen = np.zeros(ours.arena_bytes, np.int32)
        for tensor in made.kv_cache_tensors:
            (layer,) = tensor.layers
            if layer not in group.layer_names:
                continue
            assert made.blocks_of_layer[layer] == ours.blocks_of(number)
            for block in range(ours.blocks_of(number)):
                begin = tensor.offset + block * tensor.block_stride
                assert begin % 16 == 0
                assert begin // tensor.block_stride == block
                seen[begin : begin + bytes_of[layer]] += 1
        assert seen.max() == 1


def test_natural_worker_of_a_later_stage_puts_its_layers_in_the_first_stages_places(
    mixed: type[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = begun(mixed)
    monkeypatch.setattr(Stages, "first", first._specs)
    later = theirs()
    for group in later.kv_cache_groups:
        group.layer_names = [f"{name} of stage 1" for name in group.layer_names]
    worker = mixed(first_runner())
    context = worker.vllm_config.compilation_config.static_forward_context
    context |= {f"{name} of stage 1": layer for name, layer in context.items()}
    worker.initialize_from_config(later)
    for one in (first, worker):
        one.execute_model(output(replace_config(STEP)))
    places = [{tensor.layers[0]: tensor.offset for tensor in one.made.kv_cache_tensors} for one in (first, worker)]
    assert places[1] == {f"{name} of stage 1": offset for name, offset in places[0].items()}
    assert worker.made.blocks_of_layer == {
        f"{name} of stage 1": blocks for name, blocks in first.made.blocks_of_layer.items()
    }


def test_natural_worker_rejects_stages_with_other_layers(mixed: type[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Stages, "first", begun(mixed)._specs)
    worker = mixed(first_runner())
    with pytest.raises(ConfigError, match=r"first pipeline stage has \[.*VLLM_PP_LAYER_PARTITION"):
        worker.initialize_from_config(theirs(HYBRID[:1]))


@pytest.mark.gpu
@pytest.mark.skipif(
    not (torch.cuda.is_available() and os.environ.get("VLLM_PYTHON")),
    reason="needs a GPU, and VLLM_PYTHON: a Python with vllm's CUDA build and hybridkv",
)
def test_natural_engines_on_a_gpu_pass_the_duel() -> None:
    script = Path(__file__).parents[2] / "vllm" / "natural_duel.py"
    regimes = ("as started", "captured", "a step ahead", "little memory")
    command = (os.environ["VLLM_PYTHON"], str(script), "--models", "llama", "granite_hybrid", "--regimes", *regimes)
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - these tests' own
    assert not done.returncode, done.stdout + done.stderr[-3000:]
