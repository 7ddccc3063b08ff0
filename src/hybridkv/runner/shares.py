"""Shares: a model that is one tensor parallel rank of a whole one, and the sessions of such ranks.

    engines of 2 ranks --export--> a.0, a.1 --join_sessions--> a --import_--> engines of 1, 2 or 4 ranks

A file of all ranks together is the file that an engine of one rank would have written, but for rounding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from transformers import PreTrainedModel

from hybridkv.arguments import each, flag, instance, integer
from hybridkv.errors import ConfigError, SessionError, UnsupportedModelError
from hybridkv.runner.identity import identity_of
from hybridkv.runner.probe import AS_COMPUTED, Stored, planner_model
from hybridkv.runner.session_file import (
    TOKENS,
    checked_key,
    checked_path,
    read_session,
    require_names,
    split_in,
    write_session,
)
from hybridkv.specs import AttentionSpec, KVCacheSpec, MambaSpec
from hybridkv.units import shown
from hybridkv.worker.ranks import Split, splits_of


@dataclass(frozen=True, slots=True, eq=False)
class ModelShare:
    """Says that a model holds the heads and channels of one rank.

    Attributes:
        rank: number of the rank, from 0.
        ranks: how many there are.
        layers: specs of the whole model by layer.
        identity: identity of the whole model, with pages as computed.
        cuts_heads: whether ranks divide the heads of keys and values.
    """

    rank: int
    ranks: int
    layers: Mapping[str, KVCacheSpec]
    identity: Mapping[str, Any]
    cuts_heads: bool = True

    @classmethod
    def of(cls, whole: PreTrainedModel, rank: int, ranks: int, *, cuts_heads: bool = True) -> Self:
        """Return the share of a rank. O(weights * 1024).

        Args:
            whole: the whole model.
            rank: number of the rank, from 0.
            ranks: how many there are.
            cuts_heads: whether ranks divide the heads of keys and values.

        Raises:
            ConfigError: there is no such rank.
            UnsupportedModelError: the runner cannot run the whole model.
        """
        instance("whole", whole, PreTrainedModel)
        integer("ranks", ranks, 1)
        integer("rank", rank, 0, ranks - 1)
        layers = {layer.name: layer.spec for layer in planner_model(whole, block_size=16).layers}
        return cls(rank, ranks, layers, identity_of(whole, AS_COMPUTED), flag("cuts_heads", cuts_heads))

    def identity_of(self, stored: Stored) -> dict[str, Any]:
        """Return the identity of the whole model with pages of a form.

        Args:
            stored: the form.
        """
        return {**self.identity, "quantization": [stored.kv_dtype, *stored.skipped]}

    def has_whole(self, layer: str, spec: KVCacheSpec) -> bool:
        """Return whether this rank keeps the whole pages of a layer, as all ranks do if their plan does not cut it.

        Args:
            layer: its name.
            spec: its spec on this rank.
        """
        whole = self.layers.get(layer)
        if isinstance(whole, AttentionSpec):
            return not self.cuts_heads and whole == spec
        return isinstance(whole, MambaSpec) and isinstance(spec, MambaSpec) and spec.shapes == whole.shapes

    def splits(self, layer: str, spec: KVCacheSpec, shapes: Sequence[tuple[int, ...]]) -> tuple[Split, ...]:
        """Return how ranks share each part of a layer's page.

        Args:
            layer: its name.
            spec: its spec on this rank.
            shapes: the shapes of its parts on this rank: of one token, or of a state.

        Raises:
            UnsupportedModelError: that is unknown, or this rank has other shapes than its share of the whole.
        """
        whole = self.layers.get(layer)
        of_whole = [tuple(shape) for shape in shapes]
        if isinstance(whole, AttentionSpec) and isinstance(spec, AttentionSpec):
            heads, mine = whole.num_kv_heads, spec.num_kv_heads
            of_whole = [(shape[0] * heads // mine, *shape[1:]) for shape in of_whole]
        elif isinstance(whole, MambaSpec):
            of_whole = list(whole.shapes)
        if type(whole) is type(spec) and whole is not None and len(of_whole) == len(shapes):
            found = splits_of(whole, of_whole)
            sized = zip(found, of_whole, shapes, strict=True)
            if all(self._cut_shape(split, one) == tuple(shape) for split, one, shape in sized):
                return found
        raise UnsupportedModelError(
            f"layer {layer!r} of rank {self.rank} keeps parts {list(shapes)}, which are not the share of {whole}: give "
            "the whole model of which this is a rank"
        )

    def _cut_shape(self, split: Split, shape: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(split.cut(torch.empty(shape, dtype=torch.uint8), self.rank, self.ranks).shape)


def whole_identity(model: PreTrainedModel, share: ModelShare | None, stored: Stored) -> dict[str, Any]:
    """Return the identity of a model, or of the whole one of which it is a share. O(weights * 1024) without a share.

    Args:
        model: the model.
        share: the rank that it is of a whole one; None for a whole one.
        stored: how its keys and values are stored.
    """
    return identity_of(model, stored) if share is None else share.identity_of(stored)


def splits_in(
    share: ModelShare | None, layer: str, spec: KVCacheSpec, shapes: Sequence[tuple[int, ...]]
) -> tuple[Split, ...] | None:
    """Return how ranks share each part of a layer's page; None if that is unknown, and the layer is whole.

    Args:
        share: the rank that the model is of a whole one; None for a whole one.
        layer: its name.
        spec: its spec on this rank.
        shapes: the shapes of its parts on this rank: of one token, or of a state.

    Raises:
        UnsupportedModelError: that is unknown, and the rank has a share of the layer.
    """
    if share is not None and not share.has_whole(layer, spec):
        return share.splits(layer, spec, shapes)
    try:
        return splits_of(spec, shapes)
    except UnsupportedModelError:
        return None


def join_sessions(paths: Sequence[str | Path], path: str | Path, *, key: bytes | None = None) -> None:
    """Make a session of the files that all ranks of an engine exported. Engines with any number of ranks import it.

    O(bytes).

    Args:
        paths: the files of the ranks, in any order.
        path: the file to write, as a whole or not at all.
        key: the key with which all of them are signed; None if they are not signed.

    Raises:
        SessionError: a file is damaged or signed otherwise, or the files are not of all ranks, each once, at one point
            of one conversation.
        SchemaError: a file has another format.
        OSError: a file cannot be read or written.
    """
    secret, joined_path = checked_key(key), checked_path("path", path)
    read = [read_session(one, secret, lambda _: None)[:2] for one in each(checked_path)("paths", paths)]
    read.sort(key=lambda one: str(one[0].get("rank")))
    expected = sorted(([number, len(read)] for number in range(len(read))), key=str)
    if not read or [manifest.get("rank") for manifest, _ in read] != expected:
        raise SessionError(
            f"the files hold ranks {shown([manifest.get('rank') for manifest, _ in read])}: give the file of each rank "
            "of an engine once"
        )
    read.sort(key=lambda one: int(one[0]["rank"][0]))
    first, tensors = read[0]
    own = ("rank", "tensors", "note", "request", "block_sizes")
    for manifest, theirs in read[1:]:
        require_names(tensors, theirs)
        differs = [name for name in {**first, **manifest} if name not in own and first.get(name) != manifest.get(name)]
        entries = [first["tensors"], manifest["tensors"]]
        begins = [{name: (of[name].get("first_token"), of[name].get("split")) for name in tensors} for of in entries]
        if differs or begins[0] != begins[1] or not torch.equal(tensors[TOKENS], theirs[TOKENS]):
            what = differs[0] if differs else "tokens"
            raise SessionError(f"the files have other {what}: export all ranks at the same point of a conversation")
    described = {
        name: {field: value for field, value in one.items() if field != "sha256"}
        for name, one in first["tensors"].items()
    }
    try:
        joined = {
            name: tensor if name == TOKENS else split_in(described[name], name).join([one[name] for _, one in read])
            for name, tensor in tensors.items()
        }
    except (ConfigError, IndexError, RuntimeError) as error:  # RuntimeError: shapes that torch cannot concatenate
        raise SessionError(f"the files of the ranks do not fit each other: {error}") from error
    manifest = {name: value for name, value in first.items() if name not in {"tensors", "format", "library"}}
    write_session(joined_path, manifest | {"rank": [0, 1]}, joined, described, secret)
