"""A request: its identity, tokens, block hashes and counts.

    prompt                 outputs
    [0 ............ P-1] [P ........ num_tokens-1]      known tokens
    [0 ... num_computed_tokens-1]                       tokens whose KV is in the cache, or scheduled

A request that holds blocks is *resident*: its counts and the tokens of its partial hash block live in columns of a
RequestRows, so that a step reads and writes all rows with a few array operations. A request that waits keeps them
itself. In both cases the Request answers:

    tokens  [ array of whole hash blocks | partial block: in RequestRows (resident) or at the array's end ]
            or Lent: tokens of an engine, read in place; EngineSide.synchronise reports new ones
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import partial
from sys import byteorder
from typing import TYPE_CHECKING, Annotated, Final, Self

import numpy as np
from numpy.typing import NDArray

from hybridkv.arguments import check_types, flag, instance, instances, integer, integers, real, text
from hybridkv.errors import ConfigError, HashError
from hybridkv.extra_keys import EncoderInput, Extra, ExtraKeys, LoraAdapter, MultimodalItem
from hybridkv.request.sampling import SamplingParams
from hybridkv.request.tokens import MAX_TOKEN_ID, Hasher, Lender, Lent, checked_hasher, checked_marks, token_array
from hybridkv.units import MOST_COUNT, shown

if TYPE_CHECKING:
    from hybridkv.request_rows import RequestRows

_MOST_SECONDS: Final = 1e9
_GREEDY: Final = SamplingParams()


@dataclass(frozen=True, slots=True)
class Hints:
    """Hints of a caller about when a prefix is wanted again. They affect only what is kept, never results.

    Attributes:
        over: No later request resumes here.
        goes_on: The session continues, at the request's marks or, without marks, at its end.
        within_s: It continues within so many seconds. Implies ``goes_on``.
        shared_tokens: Many requests begin with so many of the prompt's first tokens. Acts as a mark.
        scratch: Only the shared tokens are worth keeping.
        secret: Nothing is kept for reuse, so no other request finds its blocks.
        ttl_s: What the request keeps is evicted after everything else of its tenant, for so many seconds.
        demote: What the request keeps leaves the device once a tier has it.
        prefetch: Nothing is computed: the request ends once the device has what a tier keeps of its prompt.
        in_memory: What the request keeps is not written to a store behind the host.

    Raises:
        ConfigError: A value is invalid, or two hints contradict each other.
    """

    over: bool = False
    goes_on: bool = False
    within_s: float | None = None
    shared_tokens: Annotated[int, partial(integer, least=0, most=MOST_COUNT)] = 0
    scratch: bool = False
    secret: bool = False
    ttl_s: float | None = None
    demote: bool = False
    prefetch: bool = False
    in_memory: bool = False

    def __post_init__(self) -> None:
        check_types(self)
        for name in ("within_s", "ttl_s"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= _MOST_SECONDS:
                raise ConfigError(f"{name} must lie in 0 .. {_MOST_SECONDS:g} seconds, got {value}")
        if self.within_s is not None:
            object.__setattr__(self, "goes_on", True)
        ends = [name for name in ("over", "scratch", "secret") if getattr(self, name)]
        if self.goes_on and ends:
            raise ConfigError(f"hints say that a session goes on, and that it is {ends[0]}: leave one of them out")
        kept = [name for name in ("ttl_s", "demote", "prefetch") if getattr(self, name)]
        if kept and ends:
            raise ConfigError(f"hints say {kept[0]} of what is {ends[0]}, which nobody wants again: leave one out")
        if self.demote and self.prefetch:
            raise ConfigError("hints say demote and prefetch, which are opposites: leave one of them out")
        if self.shared_tokens and self.secret:
            raise ConfigError("hints say that a prompt's beginning is shared, and that it is secret: leave one out")

    @classmethod
    def parse(cls, given: object) -> Self:
        """Return the hints of an object by its fields, such as {"within_s": 30}.

        Args:
            given: The object.

        Raises:
            ConfigError: It is no object, or has an unknown field or an invalid value.
        """
        if not isinstance(given, dict):
            raise ConfigError(f"hints must be an object, not {shown(given)}")
        known = [field.name for field in fields(cls)]
        unknown = [name for name in given if name not in known]
        if unknown:
            raise ConfigError(f"hints have no field {shown(unknown[0])}: use {', '.join(known)}")
        return cls(**given)

    def given(self) -> dict[str, object]:
        """Return the fields that differ from their defaults, as ``parse`` takes them."""
        return {one.name: value for one in fields(self) if (value := getattr(self, one.name)) != one.default}


NO_HINTS: Final = Hints()


class Request:
    """One request. It belongs to one manager; the module describes where its tokens live.

    Args:
        request_id: A unique id.
        prompt: Token ids, at least one; or Lent, if an engine keeps them.
        sampling: How its tokens are sampled; greedy by default.
        hasher: Hashes its blocks; ``None`` without prefix caching.
        cache_salt: Only requests with equal salts share blocks.
        tenant: The tenant that pays for the blocks kept of it (``KVCacheManager(shares=)``); by default its salt.
        arrival_time: Seconds on the caller's clock.
        eos_token_ids: End tokens of the model.
        lora: Adapter. Like the next three, it distinguishes blocks of equal tokens; see ``hybridkv.extra_keys``.
        multimodal: Images, sounds and videos in the prompt.
        prompt_embeds: [tokens, hidden], in place of the first tokens. Only digests are kept.
        encoder: The input of its encoder.
        continues: An earlier request of the same hasher; hashes of the common beginning are taken from it.
        priority: The least comes first, if the scheduler uses priorities.
        skip_reading_prefix_cache: Do not look its prefix up.
        skip_writing_prefix_cache: Do not publish its blocks.
        marks: Token counts, in prompt or output, at which its prefix should be resumable (natural layout). Kept
            ascending; positions that the request never reaches have no effect.
        hints: When its prefix is wanted again.

    Attributes:
        first_hit_tokens: Tokens that its first admission found in the cache; ``None`` before.
        branches: Number of branches forked off it.
        truncations: How often tokens were forgotten; invalidates hits that were found before.
        opening: The last answer of ``hybridkv.cache.index.opening``.
        branch_tokens: Token count up to which earlier requests had the same tokens but left no state; 0 if unknown.
    """

    __slots__ = (
        "_computed",
        "_encoder_keys",
        "_extras",
        "_lent",
        "_rows",
        "_tokens",
        "arrival_time",
        "branch_tokens",
        "branches",
        "cache_salt",
        "encoder",
        "eos_token_ids",
        "first_hit_tokens",
        "hasher",
        "hashes",
        "hints",
        "lora",
        "marks",
        "multimodal",
        "num_preemptions",
        "num_prompt_tokens",
        "opening",
        "priority",
        "request_id",
        "row",
        "sampling",
        "skip_reading_prefix_cache",
        "skip_writing_prefix_cache",
        "tenant",
        "truncations",
    )

    def __init__(
        self,
        request_id: str,
        prompt: Sequence[int] | NDArray[np.integer] | Lent,
        sampling: SamplingParams | None = None,
        *,
        hasher: Hasher | None = None,
        cache_salt: str | None = None,
        tenant: str | None = None,
        arrival_time: float = 0.0,
        eos_token_ids: tuple[int, ...] = (),
        lora: LoraAdapter | None = None,
        multimodal: Sequence[MultimodalItem] = (),
        prompt_embeds: NDArray[np.generic] | None = None,
        encoder: EncoderInput | None = None,
        continues: Request | None = None,
        priority: int = 0,
        skip_reading_prefix_cache: bool = False,
        skip_writing_prefix_cache: bool = False,
        marks: Sequence[int] | NDArray[np.integer] = (),
        hints: Hints | None = None,
    ) -> None:
        self.request_id = text("request_id", request_id)
        self._lent = prompt if isinstance(prompt, Lent) else None
        self._tokens = array("I") if isinstance(prompt, Lent) else token_array(prompt)
        self.num_prompt_tokens = len(self._tokens) if self._lent is None else self._lent.num_prompt_tokens
        if not self.num_prompt_tokens:
            raise ConfigError(f"request {request_id!r} has an empty prompt: give it at least one token")
        self.hints = NO_HINTS if hints is None else instance("hints", hints, Hints)
        self.marks = checked_marks(marks, f"marks of {request_id!r}")
        if self.hints.shared_tokens:
            self.marks = tuple(sorted({*self.marks, self.hints.shared_tokens}))
        self.sampling = _GREEDY if sampling is None else instance("sampling", sampling, SamplingParams)
        self.hasher = None if hasher is None else checked_hasher(hasher)
        self.cache_salt = cache_salt
        self.tenant = cache_salt if tenant is None else text("tenant", tenant)
        self.lora = lora
        self.multimodal = tuple(instances("multimodal", multimodal, MultimodalItem))
        self.encoder = encoder
        self._extras = self._extra_keys_of(prompt_embeds)
        self._encoder_keys: dict[int, list[bytes]] = {}
        for name, value in (("arrival_time", arrival_time), ("priority", priority)):
            real(f"{name} of {request_id!r}", value)
        self.arrival_time = arrival_time
        none = type(eos_token_ids) is tuple and not eos_token_ids
        self.eos_token_ids = () if none else tuple(integers("eos_token_ids", eos_token_ids, 0).tolist())
        self.priority = priority
        self.skip_reading_prefix_cache = flag("skip_reading_prefix_cache", skip_reading_prefix_cache)
        self.skip_writing_prefix_cache = flag("skip_writing_prefix_cache", skip_writing_prefix_cache)
        self._begin()
        self.hashes: list[bytes] = []
        if self._lent is not None and self._lent.hashes is not None:
            self.hashes = self._lent.hashes if self.hasher is not None else []
        elif continues is None:
            self.hashes = self._new_hashes()
        else:
            self.hashes = self._common_hashes(instance("continues", continues, Request))
            self.hashes += self._new_hashes()

    def _extra_keys_of(self, prompt_embeds: NDArray[np.generic] | None) -> ExtraKeys | None:
        """Return the extra keys of its blocks. They are checked without prefix caching, too."""
        given = (self.lora, self.cache_salt, prompt_embeds, self.encoder)
        if not self.multimodal and all(one is None for one in given):
            return None
        extras = ExtraKeys(
            self.num_prompt_tokens,
            1 if self.hasher is None else self.hasher.block_size,
            lora=self.lora,
            multimodal=self.multimodal,
            cache_salt=self.cache_salt,
            prompt_embeds=prompt_embeds,
            encoder=self.encoder,
        )
        return None if self.hasher is None else extras

    def _begin(self) -> None:
        """Reset its counts: it holds no row, and no token is computed."""
        self._rows: RequestRows | None = None
        self.row = -1
        self._computed = 0
        self.num_preemptions = self.branch_tokens = self.branches = self.truncations = 0
        self.first_hit_tokens: int | None = None
        self.opening: tuple[tuple[int, int, int, int], bytes, bytes] | None = None

    @property
    def reads_prefix_cache(self) -> bool:
        """Whether its prefix is looked up. Not if log probabilities of the prompt are wanted."""
        return not self.skip_reading_prefix_cache and self.sampling.prompt_logprobs is None

    @property
    def writes_prefix_cache(self) -> bool:
        """Whether its blocks are published."""
        return not (self.skip_writing_prefix_cache or self.hints.secret)

    @property
    def num_encoder_tokens(self) -> int:
        """Tokens of the encoder's output; 0 without an encoder."""
        return 0 if self.encoder is None else self.encoder.num_tokens

    def branch(self, request_id: str, sampling: SamplingParams) -> Request:
        """Return a new request with the same tokens, prompt and keys. O(tokens).

        Args:
            request_id: Its id.
            sampling: How its tokens are sampled.
        """
        return self._copied(request_id, instance("sampling", sampling, SamplingParams), self.num_tokens)

    def prefix(self, request_id: str, num_tokens: int) -> Request:
        """Return a new request of the first tokens, with the same keys. O(num_tokens).

        Args:
            request_id: Its id.
            num_tokens: How many tokens, at least 1 and at most those that are known.
        """
        made = self._copied(request_id, _GREEDY, integer("num_tokens", num_tokens, 1, self.num_tokens))
        made.num_prompt_tokens = min(self.num_prompt_tokens, num_tokens)
        return made

    def _copied(self, request_id: str, sampling: SamplingParams, num_tokens: int) -> Request:
        """Return a new request with the first tokens and their hashes."""
        made = object.__new__(Request)
        for name in self.__slots__:
            setattr(made, name, getattr(self, name))
        made.request_id = text("request_id", request_id)
        made.sampling = sampling
        made._lent = None
        made._tokens = token_array(self.token_ids(0, num_tokens))
        made.hashes = [] if self.hasher is None else self.hashes[: num_tokens // self.hasher.block_size]
        made._begin()
        return made

    # -- counts

    @property
    def num_tokens(self) -> int:
        """Known tokens: prompt and outputs."""
        rows = self._rows
        if rows is None:
            return len(self._tokens) if self._lent is None else self._lent.lender.num_tokens
        return rows.each_num_tokens[self.row]

    @property
    def is_lent(self) -> bool:
        """Whether an engine keeps its tokens (Lent)."""
        return self._lent is not None

    @property
    def lender(self) -> Lender | None:
        """The engine's own request; ``None`` without one."""
        return None if self._lent is None else self._lent.lender

    @property
    def num_output_tokens(self) -> int:
        """Known tokens after the prompt."""
        return self.num_tokens - self.num_prompt_tokens

    @property
    def num_computed_tokens(self) -> int:
        """Tokens whose KV is in the cache or scheduled; set by the scheduler."""
        rows = self._rows
        return self._computed if rows is None else rows.each_num_computed[self.row]

    @num_computed_tokens.setter
    def num_computed_tokens(self, tokens: int) -> None:
        """Set the count.

        Args:
            tokens: Computed or scheduled tokens.
        """
        if self._rows is None:
            self._computed = tokens
        else:
            self._rows.num_computed[self.row] = tokens

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Tokens that end the output: requested ones, and those of the model unless they are ignored."""
        asked = self.sampling.stop_token_ids
        return asked if self.sampling.ignore_eos else (*self.eos_token_ids, *asked)

    @property
    def held_ids(self) -> tuple[int, ...]:
        """Tokens that are not sampled before ``min_tokens`` outputs: all end tokens, ignored ones included."""
        return (*self.eos_token_ids, *self.sampling.stop_token_ids) if self.sampling.min_tokens else ()

    # -- tokens

    def token_ids(self, start: int = 0, stop: int | None = None) -> NDArray[np.int32]:
        """Return known tokens as a new int32 array. O(stop - start).

        Args:
            start: First token, 0 or more.
            stop: Token after the last one; ``None`` for all.
        """
        known = self.num_tokens
        if type(start) is not int or start < 0:
            start = integer("start", start, 0)
        if stop is not None and (type(stop) is not int or stop < 0):
            stop = integer("stop", stop, 0)
        end = known if stop is None else min(stop, known)
        if self._lent is not None:
            return np.array(self._lent.lender.all_token_ids[start:end], np.int32)
        whole = len(self._tokens)
        head = np.frombuffer(self._tokens, np.int32)[start:end].copy()
        if self._rows is None or end <= whole:
            return head
        rest = self._rows.partial_block[self.row, max(start - whole, 0) : end - whole]
        return np.concatenate((head, rest))

    def token_bytes(self, start: int, stop: int) -> bytes:
        """Return known tokens as the bytes of an int32 array. O(stop - start); the fastest way.

        Args:
            start: First token, 0 or more; not checked.
            stop: Token after the last one.
        """
        tokens, rows = self._tokens, self._rows
        whole = len(tokens)
        if self._lent is not None:
            return np.array(self._lent.lender.all_token_ids[start : min(stop, self.num_tokens)], np.int32).tobytes()
        if stop <= whole or rows is None:
            return tokens[start:stop].tobytes()
        rest = rows.partial_bytes(self.row, max(start - whole, 0), min(stop, rows.each_num_tokens[self.row]) - whole)
        return tokens[start:].tobytes() + rest if start < whole else rest

    def token_tuple(self, start: int, stop: int) -> tuple[int, ...]:
        """Return known tokens as a tuple. O(stop - start).

        Args:
            start: First token, 0 or more; not checked.
            stop: Token after the last one.
        """
        if stop <= len(self._tokens):
            return tuple(self._tokens[start:stop])
        return tuple(self.token_ids(start, stop).tolist())

    @property
    def output_token_ids(self) -> list[int]:
        """Known tokens after the prompt."""
        tokens: list[int] = self.token_ids(self.num_prompt_tokens).tolist()
        return tokens

    def append(self, token: int) -> None:
        """Append one token, and hash the block that it completes.

        Args:
            token: A token id.

        Raises:
            ConfigError: It is no token id.
            HashError: Its block could not be hashed. Nothing was appended.
        """
        if type(token) is not int or not 0 <= token <= MAX_TOKEN_ID:
            token = integer(f"token for {self.request_id!r}", token, 0, MAX_TOKEN_ID)
        if self._lent is not None:  # tested here to save a call: every token passes here, and few are lent
            self.refuse_lent()
        if self._rows is not None:
            self._rows.append_one(self.row, token)
            return
        self.hashes += self._new_hashes(token)
        self._tokens = extended(self._tokens, token.to_bytes(4, byteorder))

    def truncate(self, num_tokens: int) -> None:
        """Forget all tokens after the first ones, and the hashes of their blocks. O(tokens forgotten).

        Args:
            num_tokens: Tokens to keep.

        Raises:
            ConfigError: Fewer than the prompt's, more than are known, or, for a resident request, fewer than are
                computed or published, because other requests may share their blocks.
        """
        num_tokens = integer("num_tokens", num_tokens, most=MOST_COUNT)
        self.refuse_lent()
        known, computed = self.num_tokens, self.num_computed_tokens
        held = 0 if self._rows is None else self._rows.least_tokens(self.row)
        least = max(self.num_prompt_tokens, min(held, known))
        if not least <= num_tokens <= known:
            raise ConfigError(
                f"request {self.request_id!r} cannot be cut to {num_tokens} tokens: keep its {least} of prompt and "
                f"computed blocks, and no more than the {known} known"
            )
        if self._rows is None:
            self._tokens = cut(self._tokens, num_tokens)
            self._computed = min(computed, num_tokens)
        else:
            self._rows.truncate(self.row, num_tokens)
        if self.hasher is not None:
            del self.hashes[num_tokens // self.hasher.block_size :]
        self.truncations += 1

    def refuse_lent(self) -> None:
        """Raise ConfigError if an engine keeps its tokens, which must then be changed there."""
        if self._lent is not None:
            raise ConfigError(f"tokens of {self.request_id!r} are its engine's: change them there, then synchronise")

    # -- hashes

    def hash_lent(self) -> None:
        """Hash its full blocks up to the known tokens, unless its engine does so.

        Raises:
            HashError: As ``append``.
            ConfigError: The engine has not hashed them yet.
        """
        if self.hasher is None or self._lent is None:
            return
        if self._lent.hashes is None:
            self.hashes += self._new_hashes()
        elif len(self.hashes) < self.num_tokens // self.hasher.block_size:
            raise ConfigError(
                f"{self.request_id!r} has {self.num_tokens} tokens, of which its engine has hashed {len(self.hashes)} "
                f"blocks of {self.hasher.block_size}: hash first"
            )

    def extra_keys(self, first_block: int, count: int) -> list[Extra | None] | None:
        """Return the extra keys of hash blocks; ``None`` if all are empty.

        Args:
            first_block: The first hash block.
            count: How many.
        """
        return None if self._extras is None else self._extras.of_blocks(first_block, count)

    def encoder_keys(self, block_size: int) -> list[bytes]:
        """Return the keys of the encoder output that cross attention reads. O(encoder tokens), once.

        They cover the encoder's digest and token count, the adapter and the salt, not the prompt: a chain of hash
        blocks that all hold the token count. Empty without an encoder input or a hasher. Raises HashError as
        ``append``.

        Args:
            block_size: Tokens of a block; the last block may be partial.
        """
        if self.encoder is None or self.hasher is None:
            return []
        if block_size not in self._encoder_keys:
            size, tokens = self.hasher.block_size, self.encoder.num_tokens
            columns = -(-tokens // block_size)
            extras = ExtraKeys(1, size, lora=self.lora, cache_salt=self.cache_salt, encoder=self.encoder)
            content = np.full(columns * size, tokens, np.int32)
            self._encoder_keys[block_size] = self._hashed(None, content, extras.of_blocks(0, columns))
        return self._encoder_keys[block_size]

    def begins_as(self, other: Request, num_tokens: int) -> bool:
        """Return whether both begin with the same tokens and extra keys. O(num_tokens).

        Args:
            other: The other request.
            num_tokens: How many tokens to compare.
        """
        mine, theirs = self.token_ids(0, num_tokens), other.token_ids(0, num_tokens)
        if len(mine) < num_tokens or not np.array_equal(mine, theirs):
            return False
        blocks = 1 if self.hasher is None else -(-num_tokens // self.hasher.block_size)
        return self._extras is other._extras or self.extra_keys(0, blocks) == other.extra_keys(0, blocks)

    def _common_hashes(self, earlier: Request) -> list[bytes]:
        """Return the hashes of the full blocks with which both requests begin: equal tokens and extra keys."""
        if self._lent is not None or earlier._lent is not None:
            return []
        if earlier.hasher is not self.hasher:
            raise ConfigError(
                f"request {self.request_id!r} continues {earlier.request_id!r}, which was hashed by another hasher: "
                "construct both with hasher=cache.hasher"
            )
        if self.hasher is None:
            return []
        size = self.hasher.block_size
        blocks = min(len(self._tokens) // size, len(earlier.hashes))
        mine, theirs = (np.frombuffer(tokens, np.int32)[: blocks * size] for tokens in (self._tokens, earlier._tokens))
        differ = np.flatnonzero(mine != theirs)
        if differ.size:
            blocks = differ.item(0) // size
        none: list[Extra | None] = [None] * blocks
        extras, theirs_too = (request.extra_keys(0, blocks) for request in (self, earlier))
        if extras != theirs_too:
            pairs = enumerate(zip(extras or none, theirs_too or none, strict=True))
            blocks = next(i for i, (key, other) in pairs if key != other)
        return earlier.hashes[:blocks]

    def _new_hashes(self, *more: int) -> list[bytes]:
        """Return the missing hashes of the full blocks of ``_tokens`` followed by ``more``."""
        if self.hasher is None:
            return []
        size, done = self.hasher.block_size, len(self.hashes)
        full = (len(self._tokens) + len(more) if self._lent is None else self.num_tokens) // size
        if full == done:
            return []
        if self._lent is not None:
            tokens = self.token_ids(done * size, full * size)
        else:
            rest = self._tokens
            if more or done:  # else all tokens are new, and are read in place
                rest = rest[done * size :]
                rest.extend(more)
            tokens = np.frombuffer(rest, np.int32)[: (full - done) * size]
        return self._hashed(self.hashes[-1] if done else None, tokens, self.extra_keys(done, full - done))

    def hash_block(self, tokens: NDArray[np.int32]) -> None:
        """Append the hash of one more full block.

        Args:
            tokens: int32, its tokens.

        Raises:
            HashError: It could not be hashed. Nothing was done.
        """
        done = len(self.hashes)
        self.hashes += self._hashed(self.hashes[-1] if done else None, tokens, self.extra_keys(done, 1))

    def _hashed(
        self, parent: bytes | None, tokens: NDArray[np.int32], extras: Sequence[Extra | None] | None
    ) -> list[bytes]:
        """Return the hashes of full blocks after ``parent``. Raises HashError for every error of the hasher."""
        if self.hasher is None:
            return []
        try:
            return self.hasher.hash_chain(parent, tokens, extras)
        except Exception as error:
            raise hash_error(self.request_id, error) from error

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id!r}, prompt={self.num_prompt_tokens}, "
            f"tokens={self.num_tokens}, computed={self.num_computed_tokens})"
        )


def hash_error(request_id: str, error: Exception) -> HashError:
    """Return the HashError of a request.

    Args:
        request_id: Its id.
        error: The error of the hasher.
    """
    return HashError(f"blocks of request {request_id!r} could not be hashed: {error!r}", (request_id,))


def cut(tokens: array[int], length: int) -> array[int]:
    """Return the first tokens: shortened in place, or a copy if a view of them is still alive.

    Profilers and debuggers hold frames that ended, and with them views of the array, which cannot be resized then.

    Args:
        tokens: The tokens; may be changed.
        length: How many to keep.
    """
    try:
        del tokens[length:]
    except BufferError:
        return tokens[:length]
    return tokens


def extended(tokens: array[int], octets: bytes) -> array[int]:
    """Return the tokens with more appended: in place, or a copy if a view of them is still alive (see ``cut``).

    Args:
        tokens: The tokens; may be changed.
        octets: Bytes of the tokens to append.
    """
    try:
        tokens.frombytes(octets)
    except BufferError:
        return tokens + array(tokens.typecode, octets)
    return tokens
