"""The sampler: published adapter folders in, sampled tokens with their log-probabilities out.

    save_weights_for_sampler -> folder -> [load] .. asample -> [prefill -> decode, decode, ..] -> tokens, log-probs

`EmbeddedEngine` samples in the trainer's own process on its own base: continuous batching over a KV cache of fixed
shape. Three programs: `prefill` reads one chunk of one prompt, `insert` copies the prefilled row and its adapter into
slots, `decode` advances every slot by one token. A slot carries its own copy of its adapter, so any mix of adapters
decodes in one step.

Invariants
  1. An adapter is known by its folder, which is never rewritten: a request samples the version that it named.
  2. Returned log-probs are the model's own (no temperature, no truncation): what importance sampling divides by.
  3. A request's tokens depend on its seed and position alone, not on what shares its batch.
  4. Shapes are fixed at start: no request compiles anything. A failure fails the requests in flight, not the thread.

Left out: paged attention, prefix sharing between requests: vLLM's business (a fleet behind router.py is to come).
Run: `uv run server.py` starts it.    Read first: `EmbeddedEngine.step`.
"""

import collections
import dataclasses
import functools
import json
import logging
import queue
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int, Integer
from safetensors.numpy import load_file

from model import Adapter, Model

log = logging.getLogger("sampler")

MAX_TOPK = 32  # the most alternatives a token that a client may ask for: the width of one compiled top-k


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplerConfig:
    slots: int = 16  # sequences decoded together; every slot is computed at every step
    context: int = 512  # tokens the KV cache of a slot holds; prompt and reply may have one more
    chunk: int = 64  # prompt tokens read at a time
    adapters: int = 16  # adapters kept on the device, least recently used out first; others are read again
    max_queue: int = 20_000  # waiting requests beyond which a client is told to come back later


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


def with_cache(model: Model, context: int) -> tuple[nnx.GraphDef, nnx.State]:
    """(graph, blank cache of one sequence): the same weights, but attention remembers."""
    from maxtext.layers.attentions import Attention

    def build():
        module = model.module(model.base, model.zeros())
        config = module.base.config
        layers = (config.num_decoder_layers,) if config.scan_layers else ()
        attentions: list[Any] = [node for _, node in nnx.iter_graph(module) if isinstance(node, Attention)]
        for attention in attentions:
            attention.attention_op = CachedAttention(attention.attention_op, context, layers)
        return module

    graph, cache, *_ = nnx.split(nnx.eval_shape(build), nnx.Cache, nnx.LoRAParam, ...)
    return graph, jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), cache)


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


def programs(model: Model, graph: nnx.GraphDef):
    """(prefill, insert, decode), compiled once each. `row` is the cache of one sequence, `slots` = (rows, adapters)
    stacked.
    """

    def forward(row, adapter: Adapter, base, head, tokens, positions):  # tokens [t] -> row, logits float32 [t, V]
        with model.tracing():
            lora = jax.tree.unflatten(model.lora_tree, [adapter[path] for path in model.shapes])
            module = nnx.merge(graph, row, lora, base, copy=True)
            hidden = module(tokens[None], positions[None], jnp.ones_like(tokens)[None])[0]
        return nnx.state(module, nnx.Cache), jnp.einsum("td,vd->tv", hidden, head, preferred_element_type=jnp.float32)

    pinned = functools.partial(jax.jit, out_shardings=model.sharding())  # or a second call would compile again

    @pinned
    def prefill(row, adapter, base, head, tokens, positions, targets, wanted):
        """wanted: 0 nothing, 1 log-probs of `targets`, 2 the top k besides."""
        row, logits = forward(row, adapter, base, head, tokens, positions)
        logprobs = jax.nn.log_softmax(logits)
        return row, jnp.take_along_axis(logprobs, targets[:, None], -1)[:, 0], top_logprobs(wanted > 1, logprobs)

    donating = functools.partial(pinned, donate_argnums=0)

    @donating
    def insert(slots, row, adapter, where):
        return jax.tree.map(lambda many, one: many.at[where].set(one, mode="drop"), slots, (row, adapter))

    @donating
    def decode(slots, base, head, ints, floats, wanted):
        (rows, adapters), (token, position, top_k, seed), (temperature, top_p) = slots, ints, floats  # [S] each
        every_slot = jax.vmap(forward, (0, 0, None, None, 0, 0))
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

    return prefill, insert, decode


# ---- the engine


@dataclasses.dataclass(eq=False)
class Job:
    """A request on its way through the engine."""

    request: Request
    folder: Path | None  # None: the base model
    seeds: np.ndarray  # uint32, one a sample
    stop: frozenset[int]
    max_tokens: int
    future: Future
    row: nnx.State | None = None  # the prefilled cache, kept until every sample has started
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
        longest = model.hf_config["max_position_embeddings"]
        if not 2 <= config.context <= longest:
            raise ValueError(f"--context is {config.context}; {model.name} takes 2..{longest} tokens")
        self.model, self.config = model, config
        self.tokenizer, self.eos = load_tokenizer(model.directory), eos_tokens(model.directory)
        replicated = model.sharding()
        # A sharded base would be gathered at every decoded token: on several devices the engine has its own copy.
        self.base, self.head = jax.device_put((model.base, model.head), replicated)
        graph, blank = with_cache(model, config.context)
        self.blank = jax.device_put(blank, replicated)
        self.prefill, self.insert, self.decode = programs(model, graph)
        stack = lambda one: jax.tree.map(lambda x: jnp.zeros((config.slots, *x.shape), x.dtype), one)
        self.fresh = jax.jit(stack, out_shardings=replicated)
        self.scaled = jax.jit(model.scaled, out_shardings=replicated)
        self.adapters: collections.OrderedDict[Path | None, Adapter] = collections.OrderedDict()
        self.state = self.fresh((self.blank, self.adapter(None)))
        self.inbox: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self.waiting: collections.deque[Job] = collections.deque()
        self.slots: list[Sample | None] = [None] * config.slots
        self.closing = False
        self.thread = threading.Thread(target=self.run, name="sampler", daemon=True)
        self.thread.start()

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
                self.state = self.fresh((self.blank, self.adapter(None)))
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
        ints, floats = np.zeros((4, len(self.slots)), np.uint32), np.ones((2, len(self.slots)), np.float32)
        ints[1] = self.config.context  # idle slots write nowhere
        for i, sample in active:
            prompt, params = sample.job.request.prompt, sample.job.request.params
            token = sample.tokens[-1] if sample.tokens else prompt[-1]
            ints[:, i] = token, len(prompt) - 1 + len(sample.tokens), max(params.top_k, 0), sample.seed
            floats[:, i] = params.temperature, params.top_p
        wanted = any(sample.job.request.topk_sample_logprobs for _, sample in active)
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
        config = json.loads((folder / "adapter_config.json").read_text())
        adapter = jax.device_put(
            self.model.from_peft(load_file(folder / "adapter_model.safetensors")), self.model.sharding()
        )
        return self.scaled(adapter, np.float32(config["lora_alpha"] / config["r"]))


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
        scores, last_n = np.concatenate(job.prompt_logprobs), request.prompt_logprobs_last_n
        if last_n is not None:
            scores[: max(len(scores) - last_n, 0)] = np.nan
    if k:
        nothing = (np.zeros(MAX_TOPK, np.int32), np.full(MAX_TOPK, np.nan, np.float32))  # nothing predicts position 0
        topk = _stack([nothing, *(pair for chunk in job.prompt_topk for pair in zip(*chunk, strict=True))], k)
    return SampleResult(sequences, scores, topk)


def _stack(rows: list, k: int) -> TopK | None:
    """[(ids [K], log-probs [K]) a token] -> the k best of each, (ids [n, k], log-probs [n, k])."""
    return (np.stack([ids[:k] for ids, _ in rows]), np.stack([values[:k] for _, values in rows])) if k else None


def load_tokenizer(directory: Path):
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
