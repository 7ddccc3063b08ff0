"""Sessions as files: what the cache holds of a conversation, in a file that resumes it in another process.

    export   blocks of the resume point ---> rows in token order, by layer ---> file: safetensors and a manifest
    import   file ---> everything is checked ---> blocks that a carrier takes ---> resume point of the cache

A file does not know the blocks it came from, so an engine with another memory or block size can import it:

    layer.keys, layer.values    [tokens, heads, width]    from the first token that the exporter's blocks hold
    layer.latent                [tokens, width]
    layer.key_scales, ...       quantized pages: scales and codes of keys and of values
    layer.state.0, ...          recurrent states after the last token, as they are
    tokens                      int32[known tokens]: the conversation; the tokens after the resume point have no rows

The heads and channels are those of the whole model, unless the engine is one rank of several: then the file holds its
share, and ``join_sessions`` makes a whole one (docs/design/0040).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from hybridkv.arguments import instance
from hybridkv.cache import KVCacheBlocks, KVCacheManager, Refusal, SlotPlan
from hybridkv.errors import CacheError, CapacityError, ConfigError, SessionError, UnsupportedModelError
from hybridkv.planner import Plan
from hybridkv.request import Request
from hybridkv.runner.handover import HandedOver
from hybridkv.runner.identity import bits_of
from hybridkv.runner.inputs import encode, require_vocabulary
from hybridkv.runner.load import LoadedModel
from hybridkv.runner.probe import Stored
from hybridkv.runner.runner import ModelRunner
from hybridkv.runner.session_file import TOKENS, read_session, require_names, split_in, write_session
from hybridkv.runner.shares import splits_in, whole_identity
from hybridkv.specs import AttentionSpec, Keeps, KVCacheSpec
from hybridkv.tiers import HostTier
from hybridkv.units import format_count, shown
from hybridkv.worker.copies import ArenaBlocks, copy_kernels
from hybridkv.worker.pages import PagedStorage
from hybridkv.worker.ranks import Run

Int32 = NDArray[np.int32]

_WHOLE: Final = 64
"""Tokens at whose multiples the rows of a window begin, if they are cached: blocks of 8 to 64 tokens can hold them."""


@dataclass(frozen=True, slots=True)
class Session:
    """A conversation in a file.

    Attributes:
        token_ids: all its known tokens: prompt and outputs.
        resume_tokens: leading tokens that the cache holds. A request that begins with ``token_ids`` continues there.
        cache_salt: the salt of its requests.
        note: text of the exporter's own.
        num_bytes: bytes of the file.
        request: how a request goes on that was exported while it ran; None for a conversation.
    """

    token_ids: tuple[int, ...]
    resume_tokens: int
    cache_salt: str | None
    note: str
    num_bytes: int
    request: HandedOver | None = None


class _Layer(NamedTuple):
    """A layer of the plan.

    Attributes:
        name: its name in the plan.
        group: number of its group.
        spec: its spec.
        parts: its views in the arena, by the names that they have in files.
    """

    name: str
    group: int
    spec: KVCacheSpec
    parts: Mapping[str, torch.Tensor]

    @property
    def is_state(self) -> bool:
        return self.spec.keeps is Keeps.STATE


class _Held(NamedTuple):
    """The blocks of a resume point in one group.

    Attributes:
        ids: int32[n], blocks of its columns as the worker knows them, 0 for null columns; or the one block of a state.
        first: the first token that they hold.
    """

    ids: Int32
    first: int


class _Memory(NamedTuple):
    """The device or the host tier: its manager, and the views of its layers."""

    cache: KVCacheManager
    storage: PagedStorage

    def local(self, group: int, ids: Int32) -> Int32:
        """Return blocks as the worker knows them."""
        return self.cache.block_pool.local(group, ids)


class SessionFiles:
    """Writes conversations of an engine to files, and reads them. No step may be in flight.

    Args:
        loaded: the model of the engine.
        plan: its plan.
        cache: its cache.
        runner: its runner.
        tier: its host tier; None without one.
    """

    def __init__(
        self, loaded: LoadedModel, plan: Plan, cache: KVCacheManager, runner: ModelRunner, tier: HostTier | None = None
    ) -> None:
        self._loaded, self._cache, self._runner = loaded, cache, runner
        self._host = None if tier is None else tier.host
        self._device = _Memory(cache, runner.storage)
        self._stored = Stored.of_plan(plan)
        self._max_model_len = plan.max_model_len

    # -- export

    def save(
        self, request: Request, path: Path, *, note: str, key: bytes | None, goes_on: HandedOver | None = None
    ) -> Session:
        """Write what the cache holds of ``request`` to a file. O(bytes).

        Args:
            request: A request that runs, or one made of a conversation that ended.
            path: The file. It is replaced as a whole, or not at all.
            note: Text of the exporter's own.
            key: Signs the file with HMAC-SHA256; ``None`` for no signature.
            goes_on: How a request that runs goes on elsewhere.

        Raises:
            CacheError: The cache does not hold all tokens but the last one.
            UnsupportedModelError: The cache holds something that files cannot.
            OSError: The file cannot be written.
        """
        self._require_sessions()
        if request.multimodal:
            raise UnsupportedModelError("session files cannot hold images: send the prompt with its images instead")
        memory = self._memory_of(request)
        layers = self._layers(memory)
        held, resume = self._held_by(memory, request)
        tensors = {TOKENS: torch.from_numpy(request.token_ids().astype(np.int32))}
        described: dict[str, dict[str, Any]] = {TOKENS: {"first_token": 0}}
        for layer in layers:
            of = held[layer.group]
            for (part, view), split in zip(layer.parts.items(), self._splits(layer), strict=True):
                name = f"{layer.name}.{part}"
                tensors[name] = self._read(layer, view, of, resume)
                described[name] = {"first_token": 0 if layer.is_state else of.first, "split": split}
        manifest = {
            **self._identity(),
            "rank": self._rank,
            "layout": "natural",
            "block_sizes": [group.spec.block_size for group in self._cache.config.groups],
            "resume_tokens": resume,
            "cache_salt": request.cache_salt,
            "note": instance("note", note, str),
            "request": None if goes_on is None else goes_on.fields(),
        }
        num_bytes = write_session(path, manifest, tensors, described, key)
        return Session(tuple(request.token_ids().tolist()), resume, request.cache_salt, note, num_bytes, goes_on)

    def has(self, request: Request) -> bool:
        """Return whether the device or the host tier has all tokens of a conversation but the last one.

        Args:
            request: A request made of the conversation.
        """
        caches = [self._cache] if self._host is None else [self._cache, self._host]
        return any(cache.find_hit(request).tokens == request.num_tokens - 1 for cache in caches)

    def _memory_of(self, request: Request) -> _Memory:
        """Return where the blocks of ``request`` are: on the device, unless only the host tier has them."""
        last = request.num_tokens - 1
        if request.row >= 0 or self._host is None or self._cache.find_hit(request).tokens == last:
            return self._device
        storage = self._runner.settled_tier()
        on_host = storage is not None and self._host.find_hit(request).tokens == last
        return _Memory(self._host, storage) if storage is not None and on_host else self._device

    def _held_by(self, memory: _Memory, request: Request) -> tuple[list[_Held], int]:
        """Return the blocks of the resume point of ``request`` by group, and its tokens."""
        cache = memory.cache
        if request.row >= 0:
            blocks, resume = cache.engine.blocks_to_share(request)
            if not resume:
                raise CacheError(f"request {request.request_id!r} has computed no token: run a step first")
            return self._held(memory, blocks, resume), resume
        hit = cache.find_hit(request)
        if hit.tokens != request.num_tokens - 1:
            raise CacheError(
                f"the cache holds {format_count(hit.tokens)} tokens of this conversation and needs the first "
                f"{format_count(request.num_tokens - 1)}: generate its last turn again, then export it"
            )
        held = self._held(memory, cache.engine.blocks_of(hit), hit.tokens)
        return [self._with_earlier(memory, request, number, one) for number, one in enumerate(held)], hit.tokens

    def _held(self, memory: _Memory, blocks: KVCacheBlocks, resume: int) -> list[_Held]:
        """Return the blocks of a resume point by group."""
        held = []
        for number, (group, ids) in enumerate(zip(self._cache.config.groups, blocks.ids, strict=True)):
            last = np.array([blocks.sources[number] if blocks.sources else 0], np.int32)
            if group.spec.keeps is Keeps.STATE:
                held.append(_Held(memory.local(number, last), 0))
                continue
            columns = np.append(ids, last) if last[0] else ids
            known = columns.nonzero()[0]
            first = int(known[0]) * group.spec.block_size if len(known) else resume
            held.append(_Held(memory.local(number, columns), first))
        return held

    def _with_earlier(self, memory: _Memory, request: Request, number: int, held: _Held) -> _Held:
        """Return the blocks of a window with those before them, as far as they are cached, to a multiple of _WHOLE.

        So an importer with larger blocks, which begin before the window, can fill them.
        """
        wanted = held.first // _WHOLE * _WHOLE
        while held.first > wanted:
            hit = memory.cache.find_hit(request.prefix("export", held.first + 1))
            if hit.tokens < held.first:
                return held
            before = self._held(memory, memory.cache.engine.blocks_of(hit), hit.tokens)[number]
            if before.first == held.first:
                return held
            ids = held.ids.copy()
            ids[: len(before.ids)] = before.ids
            held = _Held(ids, max(before.first, wanted))
        return held

    def _read(self, layer: _Layer, view: torch.Tensor, held: _Held, resume: int) -> torch.Tensor:
        """Return a part of a layer in token order, on the host."""
        if layer.is_state:
            return view[int(held.ids[0])].clone().cpu()
        at = self._slots(layer, held, resume, view.device)
        return bits_of(view)[at].cpu().view(view.dtype)

    # -- import

    def load(self, path: Path, *, key: bytes | None) -> Session:
        """Check a file, and put what it holds into the cache. O(bytes).

        Args:
            path: The file.
            key: The key with which it was signed; ``None`` if it is not signed.

        Raises:
            SessionError: The file is damaged, is signed otherwise, or was made with another model.
            SchemaError: The file has another format.
            CapacityError: The cache has no room for it.
            UnsupportedModelError: The cache holds something that files cannot.
            OSError: The file cannot be read.
        """
        self._require_sessions()
        layers = self._layers(self._device)
        manifest, tensors, num_bytes = read_session(path, key, self._require_same)
        tensors = self._shares(layers, manifest, tensors)
        resume, tokens = self._require_whole(layers, manifest, tensors)
        goes_on = HandedOver.parse(manifest.get("request"), len(tokens))
        carrier = Request("import", tokens[: resume + 1], hasher=self._cache.hasher, cache_salt=manifest["cache_salt"])
        carrier.first_hit_tokens = 0  # the request that resumes here is counted when it begins
        session = Session(tuple(tokens), resume, manifest["cache_salt"], manifest["note"], num_bytes, goes_on)
        if self._cache.find_hit(carrier).tokens < resume:
            self._take_in(carrier, layers, manifest["tensors"], tensors)
        return session

    def _take_in(
        self,
        carrier: Request,
        layers: Sequence[_Layer],
        described: Mapping[str, Mapping[str, Any]],
        tensors: Mapping[str, torch.Tensor],
    ) -> None:
        """Write checked tensors into new blocks, and make them a resume point."""
        cache, resume = self._cache, carrier.num_tokens - 1
        plan = cache.plan_slots(carrier, 0, delay_cache_blocks=True, num_external_computed_tokens=resume)
        if isinstance(plan, Refusal):
            raise CapacityError(
                f"the session needs {plan.needed_blocks} blocks, and the cache has room for {plan.free_blocks}: wait "
                "for running requests to end, or give the engine more memory"
            )
        firsts = {one.group: described[f"{one.name}.{next(iter(one.parts))}"]["first_token"] for one in layers}
        self._require_rows(plan, firsts)
        cache.commit(plan)
        try:
            self._move()
            blocks = cache.get_blocks(carrier.request_id)
            for layer in layers:
                ids = self._device.local(layer.group, blocks.ids[layer.group])
                held = _Held(ids[:1] if layer.is_state else ids, firsts[layer.group])
                for part, view in layer.parts.items():
                    self._write(layer, view, held, resume, tensors[f"{layer.name}.{part}"])
        except BaseException:
            if cache.engine.finish_load(carrier, 0):
                cache.free(carrier)
            raise
        cache.engine.finish_load(carrier)
        cache.keep_resume_point(carrier)
        cache.free(carrier)

    def _require_rows(self, plan: SlotPlan, firsts: Mapping[int, int]) -> None:
        """Raise SessionError unless the file has all tokens of the blocks: they would be shared with every request."""
        for number, first in firsts.items():
            group, append = self._cache.config.groups[number], plan.groups[number].append
            if group.spec.keeps is Keeps.STATE:
                continue
            known = append.nonzero()[0] if append is not None else np.arange(plan.groups[number].take)
            size = group.spec.block_size
            if len(known) and known[0] * size < first:
                raise SessionError(
                    f"the session begins at token {first} of a window, inside a block of {size} tokens: import it with "
                    f"blocks of a size that divides {first}"
                )

    def _move(self) -> None:
        """Carry out the moves of cached blocks that made room, as a Step without rows would."""
        runner, transfers = self._runner, self._cache.fields.take_transfers()
        if not transfers.copies:
            return
        copies = np.array([(one.group, one.source, one.destination) for one in transfers.copies], np.int64)
        kernels = copy_kernels(runner.storage.arena.device)
        ArenaBlocks(runner.config, runner.storage.arena, kernels).copy(copies)
        cells = self._cache.fields.cells(np.empty(0, np.int64), [], transfers.moved)
        for group in np.unique(cells.group).tolist():
            mine = cells.group == group
            runner.tables[group].write_cells(cells.row[mine], cells.column[mine], cells.block[mine])

    def _write(self, layer: _Layer, view: torch.Tensor, held: _Held, resume: int, tensor: torch.Tensor) -> None:
        """Write a part of a layer into its blocks."""
        made = tensor.to(view.device)
        if layer.is_state:
            view[int(held.ids[0])] = made
            return
        known = held.ids.nonzero()[0]
        first = max(held.first, int(known[0]) * layer.spec.block_size) if len(known) else resume
        at = self._slots(layer, held._replace(first=first), resume, view.device)
        bits_of(view)[at] = bits_of(made[first - held.first :])

    def request_of(self, session: Session, request_id: str) -> Request:
        """Return the request of a session with all its known tokens. O(tokens).

        Args:
            session: The session.
            request_id: The request's id.

        Raises:
            SessionError: It has none.
            ConfigError: A token of its sampling is outside the vocabulary.
        """
        if session.request is None:
            raise SessionError(
                "the session holds a conversation, or a request with logits_processors, which cannot go on: import_ it "
                "and add its tokens"
            )
        require_vocabulary(session.request.sampling, self._loaded)
        return session.request.request(
            request_id,
            session.token_ids,
            hasher=self._cache.hasher,
            cache_salt=session.cache_salt,
            eos_token_ids=self._loaded.eos_token_ids,
        )

    # -- where rows lie

    def _require_sessions(self) -> None:
        """Raise ConfigError unless the cache has resume points."""
        if not self._cache.bounds.keeps_resume_points or self._cache.hasher is None:
            raise ConfigError(
                "session files need the natural layout and prefix caching: make the plan with layout='natural', and "
                "the engine with prefix_caching=True"
            )

    def _layers(self, memory: _Memory) -> list[_Layer]:
        """Return the layers of the plan. Raises UnsupportedModelError if files cannot hold one of them."""
        layers = []
        for number, group in enumerate(self._cache.config.groups):
            for name, spec in zip(group.layer_names, group.layer_specs, strict=True):
                if spec.keeps is Keeps.NOTHING:
                    continue
                rate = spec.tokens_per_state if isinstance(spec, AttentionSpec) else 1
                if spec.keeps in {Keeps.RING, Keeps.ENCODER} or rate != 1:
                    raise UnsupportedModelError(
                        f"session files cannot hold layer {name!r}, which keeps {spec.keeps} of {rate} tokens a state: "
                        "send its tokens instead, and compute them again"
                    )
                views = memory.storage.views[name]
                layers.append(_Layer(name, number, spec, dict(zip(_part_names(spec, len(views)), views, strict=True))))
        return layers

    def _slots(
        self, layer: _Layer, held: _Held, resume: int, device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the kernel block and the offset of the tokens from ``held.first`` to ``resume``, int64 each."""
        size, pieces = layer.spec.block_size, self._runner.config.kernel_blocks_of(layer.group)
        position = np.arange(held.first, resume)
        column, offset = np.divmod(position, size)
        piece, within = np.divmod(offset, size // pieces)
        block = held.ids[column].astype(np.int64)
        if not block.all():
            raise CacheError(f"layer {layer.name!r} has a null block among tokens {held.first} .. {resume - 1}")
        return torch.from_numpy(block * pieces + piece).to(device), torch.from_numpy(within).to(device)

    # -- checks

    @property
    def _rank(self) -> list[int]:
        share = self._loaded.share
        return [0, 1] if share is None else [share.rank, share.ranks]

    def _identity(self) -> dict[str, Any]:
        """Return what two engines must have in common: of the whole model, if this one is a rank's share."""
        return whole_identity(self._loaded.model, self._loaded.share, self._stored)

    def _splits(self, layer: _Layer) -> tuple[tuple[int, tuple[Run, ...]] | None, ...]:
        """Return how ranks share each part of a layer; None where that is unknown."""
        shapes = [tuple(view.shape[1 if layer.is_state else 2 :]) for view in layer.parts.values()]
        found = splits_in(self._loaded.share, layer.name, layer.spec, shapes)
        if found is None:
            return (None,) * len(shapes)
        return tuple((split.axis, split.runs) for split in found)

    def _shares(
        self, layers: Sequence[_Layer], manifest: Mapping[str, Any], tensors: dict[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Return the tensors of this rank. Raises SessionError for a file of another rank, which is no whole."""
        made, mine = manifest.get("rank", [0, 1]), self._rank
        if made == mine:
            return tensors
        if made != [0, 1]:
            raise SessionError(
                f"the session holds rank {shown(made)} of an engine: join the files of all its ranks (join_sessions)"
            )
        share = self._loaded.share
        kept = {TOKENS} | {
            f"{layer.name}.{part}"
            for layer in layers
            if share is not None and share.has_whole(layer.name, layer.spec)
            for part in layer.parts
        }
        try:
            return {
                name: tensor if name in kept else split_in(manifest["tensors"][name], name).cut(tensor, *mine)
                for name, tensor in tensors.items()
            }
        except (ConfigError, IndexError) as error:
            raise SessionError(f"the session cannot be shared by {mine[1]} ranks: {error}") from error

    def _require_same(self, manifest: Mapping[str, Any]) -> None:
        for name, mine in self._identity().items():
            if manifest.get(name) != mine:
                raise SessionError(
                    f"the session was made with another {name}, {shown(manifest.get(name))} instead of {shown(mine)}: "
                    "import it into an engine of that model, with its dtype and quantization"
                )

    def _require_whole(
        self, layers: Sequence[_Layer], manifest: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]
    ) -> tuple[int, list[int]]:
        """Return the resume point and the tokens. Raises SessionError unless each tensor is the expected one."""
        described, resume = manifest["tensors"], manifest["resume_tokens"]
        require_names({TOKENS, *(f"{layer.name}.{part}" for layer in layers for part in layer.parts)}, tensors)
        tokens = tensors[TOKENS]
        if tokens.dtype != torch.int32 or tokens.dim() != 1 or not 0 < resume < len(tokens):
            raise SessionError(f"the session resumes after {resume} of {len(tokens)} tokens: export it again")
        if resume >= self._max_model_len:
            raise CapacityError(
                f"the session has {format_count(resume)} tokens, and requests of this engine at most "
                f"{format_count(self._max_model_len)}: raise max_model_len"
            )
        firsts = dict[int, int]()
        for layer in layers:
            for part, view in layer.parts.items():
                name = f"{layer.name}.{part}"
                first = described[name]["first_token"]
                if type(first) is not int or not 0 <= first <= resume or firsts.setdefault(layer.group, first) != first:
                    raise SessionError(f"tensor {name!r} of the session begins at token {first}: export it again")
                shape = tuple(view.shape[1:]) if layer.is_state else (resume - first, *view.shape[2:])
                if tuple(tensors[name].shape) != shape or tensors[name].dtype != view.dtype:
                    raise SessionError(
                        f"tensor {name!r} of the session is {tensors[name].dtype} of {tuple(tensors[name].shape)}, and "
                        f"this engine needs {view.dtype} of {shape}: import it into an engine of the same model"
                    )
        return resume, encode(self._loaded, tokens.tolist(), what="session")


def _part_names(spec: KVCacheSpec, parts: int) -> tuple[str, ...]:
    """Return the names in files of the parts of a layer's page, in order."""
    if spec.keeps is Keeps.STATE:
        return tuple(f"state.{number}" for number in range(parts))
    quantized = isinstance(spec, AttentionSpec) and spec.quantization is not None
    names = {
        (1, False): ("latent",),
        (2, False): ("keys", "values"),
        (2, True): ("scales", "codes"),
        (4, True): ("key_scales", "value_scales", "key_codes", "value_codes"),
    }
    return names[parts, quantized]
