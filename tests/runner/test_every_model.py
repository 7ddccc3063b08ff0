"""Every causal language model that an engine runs, shrunk, in six regimes against plain transformers."""

import pytest
import torch
from csv_table import DATA, read
from every_model import LONGEST, MEMORY, MODEL_TYPES, configs, context, tried
from regimes import Regimes
from runner_support import TOLERANCE, EngineFactory, shared_prompts
from shrunk_models import small_config, small_model
from transformers import AutoModelForCausalLM

from hybridkv.errors import HybridKVError, UnsupportedModelError
from hybridkv.runner import Engine
from hybridkv.runner.attention.gather import NAME
from hybridkv.runner.load import wrap
from hybridkv.runner.probe import Forwards, attention_implementation
from hybridkv.runner.tiny import fill

PROMPTS, PREFIX, LONGEST_TAIL, OUTPUT = 5, 8, 16, 16
NEAR_TIES = 2

SAMPLE = {
    "bloom": Forwards.BY_ROW,  # ALiBi made of a mask's length
    "cohere2": Forwards.TOGETHER,  # windows, full layers without positions, scaled logits
    "falcon": Forwards.BY_ROW,  # one KV head, attention of its own
    "gemma4_text": Forwards.BY_ROW,  # layers that share keys and values, soft caps, sandwich norms
    "got_ocr2": Forwards.BY_ROW,  # the text part of a model of images
    "gpt2": Forwards.TOGETHER,  # learned positions
    "gptj": Forwards.BY_ROW,  # partial rotary
    "lfm2_moe": Forwards.TOGETHER,  # states, experts
    "minicpm3": Forwards.TOGETHER,  # MLA
    "olmo2": Forwards.TOGETHER,  # QK norm
    "qwen3_moe": Forwards.TOGETHER,  # experts
    "roberta": Forwards.BY_ROW,  # positions that begin at another number
}
"""One of each kind, and how it runs."""


def _runs() -> list[str]:
    """Return the model types that the documentation lists as running."""
    return [row["model type"] for row in read(DATA / "models-run.csv")]


UNLIKE = (
    "bloom",
    "cohere2",
    "gemma4_text",
    "gpt2",
    "lfm2_moe",
    "minicpm3",
    "minimax",
    "minimax_m3_vl_text",
    "qwen4_exp_text",
    "recurrent_gemma",
    "roberta",
    "rwkv",
)
"""Those whose pages, masks or positions are unlike others': CI; self-checks at load compare all of SAMPLE there."""
ALL = [pytest.param(one, marks=() if one in UNLIKE else pytest.mark.thorough) for one in _runs()]


ROOM: dict[str, int | None] = {
    **dict.fromkeys(("jamba", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"), 1),
    **dict.fromkeys(
        ("bailing_hybrid", "falcon_h1", "kimi_linear", "minimax", "nemotron_h", "olmo_hybrid", "zamba", "zamba2")
    ),
    **dict.fromkeys(("deepseek_v4", "qwen4_exp", "qwen4_exp_text")),
}
"""Of models whose states or windows are so large beside 38 tokens that room for two is room for all; see Regimes."""


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # as gpt_bigcode is imported
@pytest.mark.parametrize("model_type", ALL)
def test_every_model_type_in_six_regimes_equals_plain_transformers(model_type: str, make_engine: EngineFactory) -> None:
    model = small_model(model_type)
    assert context(model) > 10 * TOLERANCE
    prompts = shared_prompts(PROMPTS, 1, PREFIX, LONGEST_TAIL)
    regimes = Regimes(
        make_engine, wrap(model, None, model_type), prompts, OUTPUT, (6, 14), room=ROOM.get(model_type, 2)
    )
    found = regimes.compare()
    assert found.tokens == (len(found.regimes) + 1) * PROMPTS * OUTPUT
    assert found.near_ties <= NEAR_TIES


@pytest.mark.parametrize("model_type", SAMPLE)
def test_forward_kind_of_a_model_is_detected_at_load(model_type: str) -> None:
    with Engine(small_model(model_type), memory=MEMORY, max_model_len=LONGEST) as engine:
        assert engine.runner.forwards is SAMPLE[model_type]


@pytest.mark.parametrize("model_type", [pytest.param(one, marks=pytest.mark.thorough) for one in MODEL_TYPES])
def test_documented_model_types_run(model_type: str) -> None:
    assert (tried(model_type).outcome == "runs") == (model_type in _runs())


def test_eager_attention_with_required_mask_runs_rows_together() -> None:
    with Engine(small_model("modernbert-decoder"), memory=MEMORY, max_model_len=LONGEST) as engine:
        assert engine.runner.forwards is Forwards.TOGETHER


def test_at_least_166_model_types_run() -> None:
    assert len(_runs()) >= 166
    assert set(SAMPLE) <= set(_runs())


@pytest.mark.parametrize(
    ("model_type", "match"), [("bigbird_pegasus", "attends in both directions"), ("openai-gpt", "layers keep nothing")]
)
def test_unsupported_models_are_rejected_and_keep_their_attention(model_type: str, match: str) -> None:
    model = small_model(model_type)
    own = {id(one): one._attn_implementation for one in configs(model)}
    with pytest.raises(HybridKVError, match=match):
        Engine(model, memory=MEMORY, max_model_len=LONGEST)
    assert {id(one): one._attn_implementation for one in configs(model)} == own


def test_model_whose_plain_forward_ignores_its_window_is_rejected() -> None:
    """Moshi's cache has a window that its masks lack: past it, its own ``generate`` differs from one forward."""
    config = small_config("moshi")
    config.sliding_window = 24
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    fill(model, torch.Generator().manual_seed(0))
    with pytest.raises(UnsupportedModelError, match="computes other logits on paged caches than in plain transformers"):
        Engine(model, memory=MEMORY, max_model_len=LONGEST)


def test_failed_attention_switch_restores_every_part() -> None:
    model = small_model("got_ocr2")  # its whole has no attention of its own to switch, its text part has
    own = [one._attn_implementation for one in configs(model)]
    with pytest.raises(UnsupportedModelError, match="AttentionInterface"), attention_implementation(model, NAME):
        pass
    assert [one._attn_implementation for one in configs(model)] == own
