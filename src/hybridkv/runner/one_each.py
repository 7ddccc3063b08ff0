"""What is given for many prompts: one value for all of them, or one each."""

from __future__ import annotations

from collections.abc import Sequence

from hybridkv.errors import ConfigError
from hybridkv.request import SamplingParams
from hybridkv.runner.encoder_inputs import Given


def one_each(
    prompts: Sequence[str | Sequence[int]], sampling: SamplingParams | Sequence[SamplingParams] | None
) -> list[tuple[str | Sequence[int], SamplingParams | None]]:
    """Each prompt with its sampling: one for all, or one each. Raises ConfigError when the numbers differ."""
    params = list(sampling) if isinstance(sampling, Sequence) else [sampling] * len(prompts)
    if len(params) != len(prompts):
        raise ConfigError(f"{len(params)} sampling parameters for {len(prompts)} prompts: give one for each")
    return list(zip(prompts, params, strict=True))


def one_input_each(prompts: Sequence[object], encoders: Sequence[Given] | None) -> list[Given | None]:
    """What the encoder reads for each prompt, None where there is none. Raises ConfigError when the numbers differ."""
    inputs: list[Given | None] = [None] * len(prompts) if encoders is None else list(encoders)
    if len(inputs) != len(prompts):
        raise ConfigError(f"{len(inputs)} encoder inputs for {len(prompts)} prompts: give one for each")
    return inputs
