"""Pages of tensor parallel ranks: beside slices by hand, and beside the shapes that the planner gives a rank."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from hybridkv.errors import ConfigError, HybridKVError, UnsupportedModelError
from hybridkv.models import known_models, read_model
from hybridkv.specs import FullAttentionSpec, KVCacheSpec, MambaSpec, MLAAttentionSpec
from hybridkv.worker.pages import parts_of
from hybridkv.worker.ranks import Run, Split, splits_of

RANKS = (1, 2, 4, 8)
DTYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.uint8)


def drawn(rng: np.random.Generator, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    size = int(np.prod(shape)) * dtype.itemsize
    return torch.from_numpy(rng.integers(0, 256, size, np.uint8)).view(dtype).reshape(*shape)


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Every bit."""
    flat, wanted = (each.reshape(-1).view(torch.uint8) for each in (one, other))
    return one.shape == other.shape and torch.equal(flat, wanted)


def heads_of(whole: torch.Tensor, heads: int, rank: int, ranks: int) -> torch.Tensor:
    """Oracle: [heads, ..] as a list of heads, of which a rank takes every one that it serves."""
    served = [head for head in range(heads) if head * ranks // heads <= rank < max((head + 1) * ranks // heads, 1)]
    if heads >= ranks:
        served = [head for head in range(heads) if head // (heads // ranks) == rank]
    return torch.stack([whole.view(torch.uint8)[head] for head in served]).view(whole.dtype)


@pytest.mark.parametrize("seed", range(40))
def test_keys_of_ranks_are_those_of_their_heads(seed: int) -> None:
    rng = np.random.default_rng(seed)
    heads, width, tokens, dtype = 2 ** int(rng.integers(0, 5)), int(rng.integers(1, 9)), 5, DTYPES[seed % 4]
    spec = FullAttentionSpec(block_size=16, num_kv_heads=heads, head_size=width, dtype="float32")
    whole = drawn(rng, (tokens, heads, width), dtype)
    (keys, values) = splits_of(spec, [(heads, width)] * 2)
    assert keys == values
    for ranks in RANKS:
        expected = [heads_of(whole.transpose(0, 1), heads, rank, ranks).transpose(0, 1) for rank in range(ranks)]
        parts = [keys.cut(whole, rank, ranks) for rank in range(ranks)]
        assert all(map(same, parts, expected))
        assert same(keys.join(expected), whole)


def test_latents_are_whole_on_every_rank() -> None:
    spec = MLAAttentionSpec(block_size=16, head_size=12, dtype="float32")
    whole = drawn(np.random.default_rng(0), (5, 12), torch.float32)
    (split,) = splits_of(spec, [(12,)])
    for ranks in RANKS:
        parts = [split.cut(whole, rank, ranks) for rank in range(ranks)]
        assert all(same(part, whole) for part in parts)
        assert same(split.join(parts), whole)


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("kind", ["mamba1", "mamba2", "gdn_attention", "kda_attention", "short_conv"])
@pytest.mark.parametrize("transformers", [True, False])
def test_states_of_ranks_are_those_of_their_heads(seed: int, kind: str, transformers: bool) -> None:  # a layout
    """Channels get their place in the model by name, as x of head 3, element 1; a rank's are found by its heads."""
    rng = np.random.default_rng(seed)
    heads, keys = 2 ** int(rng.integers(3, 5)), 2 ** int(rng.integers(0, 4))
    width, state, kernel = (int(one) for one in rng.integers(1, 6, 3))
    names = {
        "mamba1": [("x", head, 0) for head in range(heads)],
        "short_conv": [("x", head, 0) for head in range(heads)],
        "mamba2": [("x", head, at) for head in range(heads) for at in range(width)]
        + [(part, group, at) for part in "BC" for group in range(keys) for at in range(state)],
        "gdn_attention": [(part, head, at) for part in "qk" for head in range(keys) for at in range(state)]
        + [("v", head, at) for head in range(heads) for at in range(width)],
    }
    channels = names[kind.replace("kda", "gdn")]
    matrix = {"mamba1": (state,), "mamba2": (width, state)}.get(
        kind, (state, width) if transformers else (width, state)
    )
    of_rank = {"x": heads, "v": heads, "B": keys, "C": keys, "q": keys, "k": keys}

    def serves(name: tuple[str, int, int], rank: int, ranks: int) -> bool:
        """Rank r of R serves head h of H if r's share of the model overlaps h's: [r/R, (r+1)/R) and [h/H, (h+1)/H)."""
        part, head, _ = name
        count: int = of_rank[part]
        return head * ranks < (rank + 1) * count and rank * count < (head + 1) * ranks

    conv = drawn(rng, (len(channels), kernel), torch.float32)
    recurrent = drawn(rng, (heads, *matrix), torch.float32)
    whole = [conv if transformers else conv.T.contiguous(), *([] if kind == "short_conv" else [recurrent])]
    shapes = tuple(tuple(one.shape) for one in whole)
    spec = MambaSpec(block_size=16, shapes=shapes, dtypes=("float32",) * len(shapes), mamba_type=kind)
    splits = splits_of(spec, shapes, channels_first=transformers)
    for ranks in RANKS:
        expected = []
        for rank in range(ranks):
            mine = [at for at, name in enumerate(channels) if serves(name, rank, ranks)]
            of_conv = conv[mine] if transformers else conv[mine].T
            expected.append([of_conv, recurrent[[h for h in range(heads) if h * ranks // heads == rank]]][: len(whole)])
        for at, split in enumerate(splits):
            parts = [split.cut(whole[at], rank, ranks) for rank in range(ranks)]
            assert all(map(same, parts, [one[at] for one in expected]))
            assert same(split.join([one[at] for one in expected]), whole[at])


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("backend", ["vllm", "transformers"])
def test_shares_of_known_models_have_the_pages_of_their_plans(backend: str, ranks: int) -> None:
    kinds = set[str]()
    for known in known_models():
        try:
            whole, rank = (read_model(known.name, block_size=16, tp=tp, backend=backend) for tp in (1, ranks))
        except HybridKVError:  # so many ranks cannot share it
            continue
        for layer, mine in zip(whole.layers, rank.layers, strict=True):
            kinds |= {_kind(layer.spec)} if _agrees(layer.spec, mine.spec, ranks, backend) else set()
    assert kinds >= {
        "FullAttentionSpec",
        "SlidingWindowSpec",
        "MLAAttentionSpec",
        "mamba2",
        "gdn_attention",
        "short_conv",
    }


def _kind(spec: KVCacheSpec) -> str:
    return spec.mamba_type if isinstance(spec, MambaSpec) else type(spec).__name__


def _agrees(whole: KVCacheSpec, mine: KVCacheSpec, ranks: int, backend: str) -> bool:
    """Whether a layer is shared. It must then have the shapes of the plan, and come together again."""
    try:
        shapes = [part.shape for part in parts_of(whole)]
        splits = splits_of(whole, shapes, channels_first=backend == "transformers")
    except UnsupportedModelError:
        return False
    for shape, split, planned in zip(shapes, splits, parts_of(mine), strict=True):
        tensor = torch.arange(int(np.prod(shape))).reshape(shape)
        parts = [split.cut(tensor, rank, ranks) for rank in range(ranks)]
        assert all(part.shape == planned.shape for part in parts), (whole, mine)
        assert torch.equal(split.join(parts), tensor)
    return True


def test_what_cannot_be_shared_is_named() -> None:
    split = Split(0, (Run(6, 2),))
    with pytest.raises(ConfigError, match="4 ranks cannot share 6 heads"):
        split.cut(torch.zeros(12), 0, 4)
    with pytest.raises(ConfigError, match="no 12 elements on axis 0"):
        split.cut(torch.zeros(10), 0, 2)
    with pytest.raises(ConfigError, match="must have 6 elements on axis 0"):
        split.join([torch.zeros(6), torch.zeros(5)])
    rwkv = MambaSpec(block_size=16, shapes=((4,), (4,)), dtypes=("float32",) * 2, mamba_type="linear_attention")
    with pytest.raises(UnsupportedModelError, match="use one rank"):
        splits_of(rwkv, rwkv.shapes)
