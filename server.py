"""The Tinker API over HTTP: an unmodified `tinker` client trains and samples here.

    client -> [server: order, promises, errors] -> trainer (one device thread), sampler (its own), cache (workers)

A request that takes long is answered at once with a promise; the client polls retrieve_future until it is kept.

Invariants
  1. Per model, requests run of seq_id, however they arrive; a failed one is consumed too.
  2. The same (model_id, seq_id) is the same request: its request_id, and later its bytes, are served again.
  3. Nothing blocks the event loop: tensors, devices and disks are for threads. Models take turns there.
  4. A ValueError is the client's (category user), anything else ours (server, logged); neither disturbs others.
  5. No answer leaves before what it rests on is in the journal: a killed server goes on where its clients saw it.

Left out: images, custom losses on the server, projects, billing.
Run: `uv run server.py` on a laptop; `uv run --extra tpu server.py --model Qwen/Qwen3-0.6B` on a TPU VM.
Read first: `Service.enqueue` and `Service.drain`, then one verb: `Service.forward_backward`.
"""

import asyncio
import contextlib
import dataclasses
import functools
import gc
import hashlib
import hmac
import inspect
import itertools
import json
import logging
import math
import os
import resource
import secrets
import shutil
import signal
import socket
import sys
import threading
import time
import zlib
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import jax
import numpy as np
import pydantic
import safetensors.numpy
import tyro
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route
from tinker import types

import cache
import wire
from cache import TinkerPath
from losses import LOSSES, loss_numbers, token_fields
from model import ModelConfig, check_rank, load
from sampler import EmbeddedEngine, Fleet, Overloaded, SamplerConfig, engine_bytes
from trainer import CALLS, Trainer, TrainerConfig

log = logging.getLogger("server")

POLL_S = 25.0  # the SDK gives up on a poll after 45 s; answering 408 before that makes it ask again at once, in silence
KEEP_RESULTS_S = 3600.0
LOST_SESSION_S = 120.0  # without a heartbeat (one every 10 s): its adapters make room when another client needs it
EXTERNAL_URL_S = 3600.0
KEEP_ALIVE_S = 60  # httpx drops an idle connection after 5 s; if the server does it first, a request may meet its end
REPEATED = {"create_model", "load_weights", "optim_step", "forward_backward"}  # what changes an adapter
STATE_EVERY_S = 20.0  # of computing that a restart would have to do again
STATE_EVERY_BYTES = 64 << 20  # of requests that the journal keeps for it
FLUSH_S = 15.0  # at most, for what a mirror lacks when the server ends: a preempted machine has 30
SHARED_TILES = 32  # worth of tokens, at most, that waiting forward_backwards of a model put into one call
API = "/api/v1"

in_thread = asyncio.to_thread  # for disks and large tensors


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerConfig:
    model: tyro.conf.OmitArgPrefixes[ModelConfig] = dataclasses.field(default_factory=ModelConfig)
    trainer: tyro.conf.OmitArgPrefixes[TrainerConfig] = dataclasses.field(default_factory=TrainerConfig)
    sampler: tyro.conf.OmitArgPrefixes[SamplerConfig] = dataclasses.field(default_factory=SamplerConfig)
    host: str = "127.0.0.1"  # address to listen on; any but loopback needs an api key
    port: int = 8000  # 0 takes a free one
    api_key: str | None = None  # clients send it as TINKER_API_KEY; unset: $TINKER_SERVER_API_KEY, or none is checked
    state_dir: Path = Path("state")  # checkpoints, compiled programs and the demo model live here
    mirror: str | None = None  # gs://bucket/run, or a path: what another machine goes on from if this one is lost
    metadata: str | None = None  # address that tells of a preemption; unset: Google Cloud's, on its machines
    journal_mb: int = 8192  # of requests and results on the disk, beyond which a client is told to come back later
    max_body_mb: int = 16  # larger requests are refused with 413; the SDK sends at most 5 MB and one datum


class NotFound(LookupError):
    """Answered with 404."""


class Gone(LookupError):
    """Answered with 410: it was here, and will not come back."""


class WeightsInfo(pydantic.BaseModel):
    """Two bodies for which the SDK has no type."""

    tinker_path: str


class TimeToLive(pydantic.BaseModel):
    ttl_seconds: int | None = None


# ---- what the server remembers


@dataclasses.dataclass(eq=False)
class Promise:
    """One accepted request: pending, then an answer that is served as often as it is asked for."""

    request_id: str = dataclasses.field(default_factory=lambda: cache.new_id("r"))
    answer: "asyncio.Future[dict | bytes]" = dataclasses.field(default_factory=asyncio.Future)
    finished_at: float = math.inf
    cancel: Callable[[], Any] = lambda: None
    keep: Callable[[bytes], Any] = lambda _: None  # in the journal

    def resolve(self, answer: dict | bytes) -> None:
        """bytes are protobuf, a dict is JSON. The first resolution stands."""
        if not self.answer.done():
            self.answer.set_result(answer)
            self.finished_at = time.monotonic()
            self.keep(b"P" + answer if isinstance(answer, bytes) else json.dumps(answer).encode())

    @property
    def failed(self) -> bool:
        return self.answer.done() and isinstance(answer := self.answer.result(), dict) and "error" in answer

    def fail(self, error: BaseException) -> None:
        if isinstance(error, ValueError | NotFound | Gone):
            return self.resolve(wire.failed(str(error), "user"))
        log.error("request %s failed", self.request_id, exc_info=error)
        self.resolve(wire.failed(f"{type(error).__name__}: {error}", "server"))


Decoded = tuple[int, Promise, wire.ForwardBackward]  # with its seq_id


@dataclasses.dataclass(eq=False)
class Session:
    """What one ServiceClient holds."""

    session_id: str
    user_metadata: dict | None
    display_name: str | None
    last_seen: float = dataclasses.field(default_factory=time.monotonic)
    ended: bool = False
    ending: asyncio.Task | None = None  # what frees all that it held
    runs: "dict[str, Run]" = dataclasses.field(default_factory=dict)
    samplers: "dict[str, SamplingSession]" = dataclasses.field(default_factory=dict)

    def check_alive(self) -> None:
        if self.ended:
            raise Gone(f"session {self.session_id} has ended; its checkpoints can be loaded from a new one")


@dataclasses.dataclass(eq=False)
class Run:
    """One model in training: its queue, and what the client is told of it."""

    model_id: str
    session: Session
    info: dict[str, Any]
    next_seq: int = 0  # 0 creates the adapter
    pending: dict[int, tuple[Promise, str, bytes]] = dataclasses.field(default_factory=dict)  # verb and body
    requests: dict[int, Promise] = dataclasses.field(default_factory=dict)
    worker: asyncio.Task | None = None
    ready: bool = False
    saving: asyncio.Task | None = None
    trouble: str = "it was not created: its first request failed"  # where it is not
    shared: dict[int, list[int]] = dataclasses.field(default_factory=dict)  # first seq_id -> those in one call, before
    loaded: dict[int, str] = dataclasses.field(default_factory=dict)  # seq_id -> the version, before
    unsaved_s: float = 0.0  # how long a restart would compute to be where the adapter is now
    unsaved_bytes: int = 0
    state: cache.Checkpoint | None = None  # where it would begin
    covered: int = 0  # the first seq_id that it would do again


@dataclasses.dataclass(eq=False)
class SamplingSession:
    """One SamplingClient: one immutable adapter, or the base model."""

    sampler_id: str
    session: Session
    model_path: str | None
    folder: Path | None = None  # of the published adapter; None: the base
    snapshot: cache.Checkpoint | None = None  # the folder's, where it goes with this
    retired: bool = False  # it has gone
    trouble: str = ""  # why it cannot be sampled
    last_used: float = dataclasses.field(default_factory=time.monotonic)
    requests: dict[int, Promise] = dataclasses.field(default_factory=dict)
    completions: list[dict] = dataclasses.field(default_factory=list)  # in order, for retrieve_futures
    forgotten: int = 0  # of them, the oldest
    completed: asyncio.Future = dataclasses.field(default_factory=asyncio.Future)  # the next of them; then replaced


def now() -> str:
    return datetime.now(UTC).isoformat()


def find[T](table: dict[str, T], key: str, what: str) -> T:
    if key not in table:
        kept = f"results are kept for {KEEP_RESULTS_S / 3600:.0f} h"
        raise NotFound(f"unknown {what} {key!r} ({kept})")
    return table[key]


def idle(samplers: Iterable[SamplingSession], now: float) -> list[SamplingSession]:
    """Those whose snapshot nobody has sampled for long, but for the newest of each run; `samplers` oldest first."""
    held = [(sampler, sampler.snapshot.path.run_id) for sampler in samplers if sampler.snapshot is not None]
    newest = {run_id: sampler for sampler, run_id in held}
    old = lambda sampler: now - sampler.last_used > KEEP_RESULTS_S
    return [sampler for sampler, run_id in held if old(sampler) and newest[run_id] is not sampler]


def queued(kind: type[pydantic.BaseModel]) -> Callable[[Callable], Callable[..., dict]]:
    """Makes a verb of what is to be done with a model when its turn comes: the client gets a promise of it."""

    def verb_of(work: Callable[..., Awaitable[dict]]) -> Callable[..., dict]:
        def verb(service: "Service", body: bytes) -> dict:
            run, seq_id = service.turn(kind.model_validate_json(body))
            return service.enqueue(run, seq_id, work.__name__, body)

        verb.__wrapped__ = lambda service, run, body: work(service, run, kind.model_validate_json(body))
        return verb

    return verb_of


class Service:
    """The verbs, without HTTP: requests in as the SDK's types, dicts and bytes out. One without an await is atomic."""

    def __init__(
        self,
        config: ServerConfig,
        store: cache.Store,
        journal: cache.Journal,
        trainer: Trainer,
        sampler: EmbeddedEngine | Fleet,
    ):
        self.config, self.store, self.journal, self.trainer, self.sampler = config, store, journal, trainer, sampler
        self.model = trainer.model
        self.device, self.calls = ThreadPoolExecutor(1, "device"), asyncio.Semaphore(CALLS)
        self.to_score: dict[Path | None, list[tuple[np.ndarray, Future]]] = {}  # by the adapter's folder
        self.scorer: asyncio.Task | None = None
        if isinstance(sampler, Fleet):
            sampler.score = self.score
        self.promises: dict[str, Promise] = {}
        self.sessions: dict[str, Session] = {}
        self.runs: dict[str, Run] = {}
        self.samplers: dict[str, SamplingSession] = {}
        self.opening: dict[str, asyncio.Task] = {}  # of a sampler's id: what makes it
        self.background: set[asyncio.Task] = set()
        self.protector: cache.Protector | None = None
        self.closing: asyncio.Future  # made in the loop that it belongs to, see `application`
        self.secret = secrets.token_bytes(32)  # signs download links
        self.records = journal.records()  # what a process before this one has left, until `recover` takes it
        self.check_mine()

    def check_mine(self) -> None:
        """ValueError: what is unfinished there is of another model."""
        names = {json.loads(record.body) for record in self.records if record.kind == "base"}
        ended = {record.owner for record in self.records if record.kind == "end"}
        unfinished = sum(record.kind == "session" and record.owner not in ended for record in self.records)
        if unfinished and names - {self.model.name}:
            theirs, remedy = ", ".join(names), "serve that model, use another --state-dir"
            raise ValueError(f"{self.journal.file} holds {unfinished} sessions of {theirs}: {remedy}, or move it away")
        with self.journal.together:
            self.journal.drop("base", "")
            self.note("base", "", self.model.name)

    # -- order and promises

    def turn(self, request: Any) -> tuple[Run, int]:
        """The model that a request is for, and its place in the queue: 0 if it is to create the model."""
        if getattr(request, "session_id", None) is not None:
            return self.new_run(request.session_id, request.model_seq_id or 0, request.user_metadata), 0
        run = find(self.runs, request.model_id or "", "model")
        if request.seq_id is None or not 1 <= request.seq_id < 2**63:
            raise ValueError(f"seq_id is {request.seq_id}; requests of a model are numbered from 1")
        return run, request.seq_id

    def enqueue(self, run: Run, seq_id: int, verb: str, body: bytes) -> dict:
        """Accept a request of one model: a promise now, the work when every smaller seq_id is done."""
        if seq_id not in run.requests:
            run.session.check_alive()
            if seq_id < run.next_seq:
                raise Gone(f"seq_id {seq_id} of {run.model_id} was executed and its result is no longer kept")
            promise = run.requests[seq_id] = self.promise(run.model_id, seq_id, body, verb)
            run.pending[seq_id] = (promise, verb, body)
            run.info["last_request_time"], run.session.last_seen = now(), time.monotonic()
            if run.worker is None or run.worker.done():
                run.worker = self.spawn(self.drain(run))
        return {"request_id": run.requests[seq_id].request_id, "model_id": run.model_id}

    async def drain(self, run: Run) -> None:
        """One model's worker: takes its requests in order, neighbouring forward_backwards together."""
        while run.next_seq in run.pending:
            started, (promise, verb, body) = time.monotonic(), run.pending[run.next_seq]
            if run.ready and verb == "forward_backward":
                for group in await self.take_forward_backwards(run):
                    await self.share_tiles(run, group)
            else:
                del run.pending[run.next_seq]
                await self.execute(run, promise, verb, body)
                run.next_seq += 1
            run.unsaved_s += time.monotonic() - started
            self.save_state(run)

    async def execute(self, run: Run, promise: Promise, verb: str, body: bytes) -> None:
        """What has been answered is done again after a restart only where it changed the adapter."""
        if promise.failed or (promise.answer.done() and verb not in REPEATED):
            return
        try:
            if verb == "forward_backward" or (run.next_seq > 0 and not run.ready):
                raise ValueError(f"{run.model_id}: {run.trouble}")
            promise.resolve(await getattr(Service, verb).__wrapped__(self, run, body))
        except Exception as error:
            self.fail(run, promise, error)

    def fail(self, run: Run, promise: Promise, error: Exception) -> None:
        """What the client was told is done again after a restart, or the adapter is another one: then it is none."""
        if not promise.answer.done():
            return promise.fail(error)
        if run.ready or run.next_seq == 0:
            run.ready, run.trouble = False, f"what it had done could not be repeated after a restart: {error}"
            log.error("%s: %s", run.model_id, run.trouble)

    async def on_device(self, call: Callable, *args, **kwargs):
        return await asyncio.get_running_loop().run_in_executor(self.device, functools.partial(call, *args, **kwargs))

    def promise(self, owner: str, seq_id: int, body: bytes, verb: str) -> Promise:
        """Of a request that is in the journal from now on: `Journal.durable` says when a crash cannot undo it."""
        self.journal.check_room()
        promise = Promise()
        with self.journal.together:
            self.journal.add("request", owner, seq_id, f"{verb} {promise.request_id}".encode())
            self.journal.add("payload", owner, seq_id, body)
        return self.remember(promise)

    def remember(self, promise: Promise) -> Promise:
        promise.keep = functools.partial(self.journal.add, "answer", promise.request_id, 0)
        self.promises[promise.request_id] = promise
        return promise

    def spawn(self, work: Coroutine) -> asyncio.Task:
        task = asyncio.create_task(work)
        self.background.add(task)  # the loop itself keeps only a weak reference
        task.add_done_callback(self.background.discard)
        return task

    async def retrieve_future(self, request: types.FutureRetrieveRequest) -> dict | bytes | Response:
        promise = find(self.promises, request.request_id, "future")
        await self.wait(promise.answer, POLL_S)
        if not promise.answer.done():
            return JSONResponse(wire.try_again(promise.request_id), 408)
        return promise.answer.result()

    async def wait(self, future: asyncio.Future, timeout_s: float) -> None:
        """Until `future`, the time-out or the end of the server, whichever is first."""
        await asyncio.wait([future, self.closing], timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)

    # -- sessions

    def create_session(self, request: types.CreateSessionRequest) -> dict:
        session = Session(cache.new_id("s"), request.user_metadata, request.display_name)
        self.sessions[session.session_id] = session
        self.note("session", session.session_id, [session.user_metadata, session.display_name])
        return {"type": "create_session", "session_id": session.session_id}

    def note(self, kind: str, owner: str, value: Any, seq: int = 0) -> None:
        self.journal.add(kind, owner, seq, json.dumps(value).encode())

    def session(self, session_id: str) -> Session:
        session = find(self.sessions, session_id, "session")
        session.check_alive()
        session.last_seen = time.monotonic()
        return session

    def session_heartbeat(self, request: types.SessionHeartbeatRequest) -> dict:
        self.session(request.session_id)
        return {"type": "session_heartbeat"}

    async def end_session(self, session: Session) -> None:
        """Whoever asks again meanwhile waits, too: a place that is about to be free can be counted on."""
        if not session.ended:
            session.ended = True
            self.note("end", session.session_id, None)
            session.ending = self.spawn(self.free(session))
        if session.ending is not None and not session.ending.done():
            await asyncio.shield(session.ending)

    async def free(self, session: Session) -> None:
        """What only this session could reach: adapters in training and ephemeral snapshots. Checkpoints stay."""
        for run in session.runs.values():
            for promise, _, _ in run.pending.values():
                promise.fail(Gone(f"session {session.session_id} has ended"))
            run.pending.clear()
            if busy := [task for task in (run.worker, run.saving) if task is not None]:
                await asyncio.wait(busy)  # what runs may yet make an adapter or a snapshot
            await self.on_device(self.trainer.release, run.model_id)
            for kind in ("payload", "shared", "loaded", "state"):
                self.journal.drop(kind, run.model_id)
            if run.state is not None:
                await in_thread(self.store.remove_snapshot, run.state)
        for sampler in list(session.samplers.values()):
            await self.end_sampler(sampler)

    async def end_sampler(self, sampler: SamplingSession) -> None:
        """Nobody waits for what it samples, and its snapshot goes when no engine serves it any more."""
        for promise in sampler.requests.values():
            promise.cancel()
        self.journal.drop("payload", sampler.sampler_id)
        if (snapshot := sampler.snapshot) is not None:
            sampler.snapshot, sampler.retired = None, True
            self.note("retired", sampler.sampler_id, None)
            try:
                await asyncio.wrap_future(self.sampler.retire(snapshot.folder))
                await in_thread(self.store.remove_snapshot, snapshot)
            except Exception:
                log.exception("%s stays until the next start", snapshot.folder)

    async def make_room(self, run: Run) -> None:
        """A new adapter needs a place: other sessions that have been silent for long give up theirs."""
        if run.model_id not in self.trainer.adapters and len(self.trainer.adapters) >= self.trainer.config.max_adapters:
            await self.end_silent(LOST_SESSION_S, lambda session: session is not run.session and bool(session.runs))

    async def end_silent(self, longest_s: float, which: Callable[[Session], bool] = lambda _: True) -> None:
        """Those that nothing was heard of for so long: less where their places are wanted, for laptops sleep, too."""
        for session in list(self.sessions.values()):
            if which(session) and time.monotonic() - session.last_seen > longest_s:
                await self.end_session(session)

    # -- training

    def new_run(self, session_id: str, model_seq_id: int, user_metadata: dict | None) -> Run:
        session = self.session(session_id)
        model_id = cache.check_run_id(f"{session_id}:train:{model_seq_id}")  # the SDK derives the same id
        if model_id not in self.runs:
            metadata = {key: str(value) for key, value in (user_metadata or {}).items()}
            info = {"base_model": self.model.name, "user_metadata": metadata, "last_request_time": now()}
            self.runs[model_id] = session.runs[model_id] = Run(model_id, session, info)
            self.note("run", model_id, [session_id, info])
        return self.runs[model_id]

    def check_base_model(self, name: str) -> None:
        """Its folder is a name, too: what loads the tokenizer by the model's name (the cookbook) can use no other."""
        folder = self.model.directory.resolve()
        if name != self.model.name and Path(name).resolve() != folder:
            raise ValueError(f"base_model {name!r} is not served here; this server has {self.model.name!r} ({folder})")

    @queued(types.CreateModelRequest)
    async def create_model(self, run: Run, request: types.CreateModelRequest) -> dict:
        self.check_base_model(request.base_model)
        check_optimizer(request.optimizer_config.type)
        lora = request.lora_config
        if lora is None:
            raise ValueError("lora_config is missing: this server trains LoRA adapters only")
        if not (lora.train_attn or lora.train_mlp):
            both = "train_attn and train_mlp are both false"
            raise ValueError(f"lora_config: {both}; the unembedding alone is not trained here")
        check_rank(lora.rank, self.model.config.max_rank)
        if lora.train_unembed:
            log.info("%s: train_unembed is accepted, but the unembedding is not trained", run.model_id)
        await self.make_room(run)
        seed = lora.seed if lora.seed is not None else zlib.crc32(run.model_id.encode())  # the same after a restart
        options = dict(rank=lora.rank, train_attn=lora.train_attn, train_mlp=lora.train_mlp, seed=seed)
        await self.on_device(self.trainer.create, run.model_id, **options)
        return await self.created(run, "create_model", options)

    async def created(self, run: Run, kind: str, options: dict) -> dict:
        run.info |= options
        run.ready = True
        await in_thread(self.store.put_run, run.model_id, run.info)
        return {"type": kind, "model_id": run.model_id}

    def get_info(self, request: types.GetInfoRequest) -> dict:
        run, name = find(self.runs, request.model_id, "model"), self.model.name
        arch, tokenizer = self.model.hf_config["architectures"][0], str(self.model.directory)
        lora = {"is_lora": True, "lora_rank": run.info.get("rank")}
        data = {"arch": arch, "model_name": name, "tokenizer_id": tokenizer}
        return {"type": "get_info", "model_id": run.model_id, "model_name": name, "model_data": data} | lora

    def forward_backward(self, body: bytes) -> dict:
        model_id, seq_id = wire.decode_envelope(body)
        return self.enqueue(find(self.runs, model_id, "model"), seq_id, "forward_backward", body)

    async def take_forward_backwards(self, run: Run) -> list[list[Decoded]]:
        """Those that wait next to each other, up to a number of tokens, in groups of one loss and direction.

        The bound is for the others: for the memory of what is decoded, and for the models that wait for the device.
        """
        taken: list[Decoded] = []
        room, last = SHARED_TILES * self.trainer.rows * self.trainer.row_len, math.inf
        while room > 0 and run.next_seq in run.pending and run.next_seq <= last:
            seq_id, (promise, verb, body) = run.next_seq, run.pending[run.next_seq]
            if verb != "forward_backward":
                break
            del run.pending[seq_id]
            run.next_seq += 1
            run.unsaved_bytes += len(body)
            if promise.failed:
                continue
            if not taken:  # after a restart, those that shared tiles do so again: sums depend on their order
                last = max(run.shared.pop(seq_id, [seq_id if promise.answer.done() else math.inf]))
            try:
                request = await in_thread(self.read_forward_backward, body)
            except Exception as error:
                self.fail(run, promise, error)
            else:
                if not (promise.answer.done() and request.forward_only):
                    taken.append((seq_id, promise, request))
                    room -= sum(datum.inputs["target_tokens"].size for datum in request.data)
        kind = lambda each: (each[2].loss_fn, each[2].forward_only)
        return [list(group) for _, group in itertools.groupby(taken, kind)]

    async def share_tiles(self, run: Run, group: list[Decoded]) -> None:
        """One call for all; if it fails, one for each, so that a request answers only for itself."""
        seq_ids, promises, requests = zip(*group, strict=True)
        backward = not requests[0].forward_only
        try:
            async with self.calls:
                turns, answers = self.trainer.turns(run.model_id, requests, backward=backward), None
                while answers is None:  # the device takes others' turns between
                    answers = await self.on_device(next, turns)
        except Exception as error:
            if len(group) == 1:
                return self.fail(run, promises[0], error)
            answers = None
        if answers is None:  # and the error is gone, with the frames that hold a gradient
            for each in group:
                await self.share_tiles(run, [each])
            return
        if backward and len(group) > 1:
            self.note("shared", run.model_id, seq_ids, seq_ids[0])
        for promise, answer in zip(promises, answers, strict=True):
            try:
                promise.resolve(await in_thread(wire.encode_forward_backward, *answer))
            except Exception as error:  # not to be run again: its gradient has joined
                promise.fail(error)

    def save_state(self, run: Run) -> None:
        """Once in a while: where a restart begins instead of at the beginning. Written while others compute."""
        due = run.unsaved_s > STATE_EVERY_S or run.unsaved_bytes > STATE_EVERY_BYTES
        if due and run.ready and (run.saving is None or run.saving.done()) and not run.session.ended:
            run.unsaved_s, run.unsaved_bytes = 0.0, 0
            copy = functools.partial(self.trainer.checkpoint, run.model_id, gradients=True)
            copied = self.device.submit(copy)  # at once: what comes meanwhile, from next_seq on, is behind it
            run.saving = self.spawn(self.write_state(run, run.next_seq, asyncio.wrap_future(copied)))

    async def write_state(self, run: Run, next_seq: int, copied: Awaitable) -> None:
        path = TinkerPath(run.model_id, cache.SNAPSHOTS, cache.new_id())
        try:
            tensors, meta = await copied
            save = functools.partial(safetensors.numpy.save_file, tensors)
            files: dict[str, cache.Content] = {"state.safetensors": save}
            state = await in_thread(self.store.write, path, files, meta=meta)
        except Exception:
            return log.exception("the state of %s was not written; a restart begins before it", run.model_id)
        with self.journal.together:
            self.note("state", run.model_id, [path.name, run.info], next_seq)
            for kind in ("payload", "shared", "loaded", "state"):
                self.journal.drop(kind, run.model_id, below=next_seq)
        await asyncio.wrap_future(self.journal.durable())
        if self.journal.trouble:
            return  # a restart begins where the journal's last state is: that stays
        before, run.state, run.covered = run.state, state, next_seq
        if before is not None:
            await in_thread(self.store.remove_snapshot, before)

    def read_forward_backward(self, body: bytes) -> wire.ForwardBackward:
        request = wire.decode_forward_backward(body)
        numbers = loss_numbers(request.loss_fn, request.loss_config)
        required, limit = ("target_tokens", *LOSSES[request.loss_fn].inputs), self.trainer.row_len
        wire.validate_forward_backward(request, required, vocab_size=self.model.vocab_size, max_tokens=limit)
        for i, datum in enumerate(request.data):
            try:
                token_fields(request.loss_fn, numbers, datum.inputs)
            except ValueError as error:
                raise ValueError(f"data[{i}].{error}") from None
        return request

    @queued(types.OptimStepRequest)
    async def optim_step(self, run: Run, request: types.OptimStepRequest) -> dict:
        params = request.optim_params
        check_optimizer(getattr(params, "type", "adamw"))
        return {"metrics": await self.on_device(self.trainer.optim_step, run.model_id, params.model_dump())}

    # -- weights

    async def keep(self, run: Run, request: Any, segment: str, name: str, files: dict, state: dict) -> cache.Checkpoint:
        """Write a checkpoint of this run; the request may say how long it lives and what it replaces."""
        path = TinkerPath(run.model_id, segment, name)
        meta = {key: run.info[key] for key in ("base_model", "rank", "train_attn", "train_mlp")} | state
        meta["seq_id"] = request.seq_id
        options = request.model_dump(include={"ttl_seconds", "overwrite", "user_metadata"})  # those that it has
        try:
            return await in_thread(self.store.write, path, files, meta=meta, **options)
        except ValueError:
            for saved in await in_thread(self.store.list, run.model_id):
                if saved.path == path and saved.meta["seq_id"] == request.seq_id:
                    return saved  # by this very request, just before a crash
            raise

    @queued(types.SaveWeightsRequest)
    async def save_weights(self, run: Run, request: types.SaveWeightsRequest) -> dict:
        name = request.path if request.path is not None else f"auto-{request.seq_id:06d}"
        tensors, state = await self.on_device(self.trainer.checkpoint, run.model_id)
        files = {"adapter.safetensors": await in_thread(safetensors.numpy.save, tensors)}
        saved = await self.keep(run, request, "weights", name, files, state)
        return {"type": "save_weights", "path": str(saved.path)}

    @queued(types.LoadWeightsRequest)
    async def load_weights(self, run: Run, request: types.LoadWeightsRequest) -> dict:
        """Into a model of this session, or into a new one."""
        checkpoint = await in_thread(self.open_checkpoint, request.path, ("weights",))
        meta = checkpoint.meta
        self.check_base_model(request.base_model or meta["base_model"])
        check_optimizer(request.optimizer_config.type if request.optimizer_config else "adamw")
        if run.loaded.setdefault(run.next_seq, checkpoint.folder.name) != checkpoint.folder.name:
            raise ValueError(f"{request.path} is another version now")
        tensors = await in_thread(safetensors.numpy.load_file, checkpoint.folder / "adapter.safetensors")
        await self.make_room(run)
        await self.on_device(self.trainer.restore, run.model_id, tensors, meta, optimizer=request.optimizer)
        self.note("loaded", run.model_id, checkpoint.folder.name, run.next_seq)
        run.unsaved_s = math.inf  # the checkpoint may be deleted: a restart shall not need it
        options = {key: meta[key] for key in ("rank", "train_attn", "train_mlp")}
        return await self.created(run, "load_weights", options) | {"path": request.path}

    def open_checkpoint(self, path: str, segments: tuple[str, ...]) -> cache.Checkpoint:
        parsed = TinkerPath.parse(path)
        if parsed.segment not in segments:
            raise ValueError(f"{path} is not of the right kind: expected tinker://<run>/{' or '.join(segments)}/<name>")
        return self.store.open(parsed)

    @queued(types.SaveWeightsForSamplerRequest)
    async def save_weights_for_sampler(self, run: Run, request: types.SaveWeightsForSamplerRequest) -> dict:
        files = peft_files(*await self.on_device(self.trainer.snapshot, run.model_id))
        if request.path is not None:
            saved = await self.keep(run, request, "sampler_weights", request.path, files, {})
            return {"type": "save_weights_for_sampler", "path": str(saved.path)}
        snapshot = await self.snapshot(run.model_id, files)
        sampler_id = f"{run.session.session_id}:sample:{request.sampling_session_seq_id or 0}"
        self.add_sampler(SamplingSession(sampler_id, run.session, None, snapshot.folder, snapshot))
        return {"type": "save_weights_for_sampler", "sampling_session_id": sampler_id}

    async def snapshot(self, run_id: str, files: dict[str, cache.Content]) -> cache.Checkpoint:
        """A folder that the sampler serves from now on."""
        snapshot = await in_thread(self.store.write_snapshot, run_id, files, meta={})
        try:  # hashing it takes about as long as loading
            await asyncio.gather(self.publish(snapshot.folder), in_thread(self.store.seal, snapshot))
        except BaseException:
            await in_thread(self.store.remove_snapshot, snapshot)
            raise
        return snapshot

    async def publish(self, folder: Path) -> None:
        await asyncio.wrap_future(await in_thread(self.sampler.publish, folder))  # the embedded engine reads the folder

    @queued(types.SaveWeightsExternalRequest)
    async def save_weights_external(self, run: Run, request: types.SaveWeightsExternalRequest) -> dict:
        if request.age_encryption_recipients:
            raise ValueError("age_encryption_recipients: encrypted exports are not supported; leave it out")
        files = peft_files(*await self.on_device(self.trainer.snapshot, run.model_id))
        saved = await self.keep(run, request, "external_weights", request.path, files, {})
        return {"type": "save_weights_external", "path": str(saved.path), "size_bytes": saved.size_bytes}

    async def weights_info(self, request: WeightsInfo) -> dict:
        meta = (await in_thread(self.open_checkpoint, request.tinker_path, tuple(cache.SEGMENTS))).meta
        trained = {"train_unembed": False, "train_mlp": meta["train_mlp"], "train_attn": meta["train_attn"]}
        return {"base_model": meta["base_model"], "is_lora": True, "lora_rank": meta["rank"]} | trained

    # -- sampling

    def add_sampler(self, sampler: SamplingSession) -> None:
        self.samplers[sampler.sampler_id] = sampler.session.samplers[sampler.sampler_id] = sampler
        run_id = sampler.snapshot.path.run_id if sampler.snapshot is not None else None
        version = sampler.folder.name if sampler.folder is not None else None  # a snapshot's name, too
        self.note("sampler", sampler.sampler_id, [sampler.session.session_id, sampler.model_path, run_id, version])
        if sampler.session.ended:  # meanwhile
            self.spawn(self.end_sampler(sampler))

    async def create_sampling_session(self, request: types.CreateSamplingSessionRequest) -> dict:
        session, path = self.session(request.session_id), request.model_path
        sampler_id = f"{session.session_id}:sample:{request.sampling_session_seq_id}"
        if request.base_model is not None:
            self.check_base_model(request.base_model)
        if sampler_id not in self.samplers:  # asked again meanwhile, it is made once all the same
            if sampler_id not in self.opening:
                self.opening[sampler_id] = self.spawn(self.open_sampler(SamplingSession(sampler_id, session, path)))
            await asyncio.shield(self.opening[sampler_id])
        return {"type": "create_sampling_session", "sampling_session_id": sampler_id}

    async def open_sampler(self, sampler: SamplingSession) -> None:
        try:
            if sampler.model_path is not None:
                sampler.folder, sampler.snapshot = await self.adapter(sampler.model_path)
            self.add_sampler(sampler)
        finally:
            del self.opening[sampler.sampler_id]

    async def adapter(self, path: str) -> tuple[Path, cache.Checkpoint | None]:
        """The folder of a sampler's checkpoint; or a snapshot, made of a training checkpoint."""
        checkpoint = await in_thread(self.open_checkpoint, path, ("sampler_weights", "weights"))
        self.check_base_model(checkpoint.meta["base_model"])
        if checkpoint.path.segment == "sampler_weights":
            await self.publish(checkpoint.folder)
            return checkpoint.folder, None
        tensors = await in_thread(safetensors.numpy.load_file, checkpoint.folder / "adapter.safetensors")
        exported = await in_thread(self.trainer.export, tensors, checkpoint.meta)
        snapshot = await self.snapshot(checkpoint.path.run_id, peft_files(*exported))
        return snapshot.folder, snapshot

    def score(self, prompt: np.ndarray, folder: Path | None) -> Future | None:
        """A prompt's log-probs by the forward program; None: it is too long for a row. For the fleet's thread."""
        if not 2 <= len(prompt) <= self.trainer.row_len + 1:
            return None
        future: Future = Future()
        self.closing.get_loop().call_soon_threadsafe(self.add_to_score, folder, prompt, future)
        return future

    def add_to_score(self, folder: Path | None, prompt: np.ndarray, future: Future) -> None:
        self.to_score.setdefault(folder, []).append((prompt, future))
        if self.scorer is None or self.scorer.done():
            self.scorer = self.spawn(self.score_waiting())

    async def score_waiting(self) -> None:
        """One adapter after the other; prompts that wait for the same one share tiles, as many as one call may take."""
        most = SHARED_TILES * self.trainer.rows
        while self.to_score:
            folder, waiting = next(iter(self.to_score.items()))
            del self.to_score[folder]
            if waiting[most:]:
                self.to_score[folder] = waiting[most:]  # behind the others
            taken = [(prompt, future) for prompt, future in waiting[:most] if future.set_running_or_notify_cancel()]
            if not taken:
                continue
            turns, scores = self.trainer.score_turns([prompt for prompt, _ in taken], folder), None
            try:
                while scores is None:
                    scores = await self.on_device(next, turns)
            except Exception as error:
                for _, future in taken:
                    future.set_exception(error)
            else:
                for (_, future), each in zip(taken, scores, strict=True):
                    future.set_result(each)

    def asample(self, body: bytes) -> dict:
        request = wire.decode_sample(body)
        sampler = find(self.samplers, request.sampling_session_id, "sampling session")
        sampler.session.check_alive()
        sampler.last_used = sampler.session.last_seen = time.monotonic()
        if request.seq_id not in sampler.requests:
            if sampler.trouble:
                raise Gone(f"{sampler.sampler_id} did not survive a restart: {sampler.trouble}")
            if sampler.retired:
                remedy = "save_weights_for_sampler(name) makes one that stays"
                raise Gone(f"{sampler.sampler_id} was idle for an hour, and newer versions came: it is gone; {remedy}")
            self.journal.check_room()  # or it would be sampled each time that it is refused
            future = self.submit(sampler, request)  # Overloaded: 429, then the same seq_id again
            promise = sampler.requests[request.seq_id] = self.promise(
                sampler.sampler_id, request.seq_id, body, "asample"
            )
            self.follow(sampler, promise, future)
        sequence_ids = [f"{sampler.sampler_id}:{request.seq_id}:{i}" for i in range(request.num_samples)]
        return {"request_id": sampler.requests[request.seq_id].request_id, "sample_sequence_ids": sequence_ids}

    def submit(self, sampler: SamplingSession, request: wire.SampleRequest) -> Future:
        try:
            context_tokens = self.sampler.context_tokens
            wire.validate_sample(request, vocab_size=self.model.vocab_size, context_tokens=context_tokens)
            return self.sampler.submit(request, sampler.folder)
        except ValueError as error:
            future: Future = Future()
            future.set_exception(error)
            return future

    def follow(self, sampler: SamplingSession, promise: Promise, future: Future) -> None:
        promise.cancel = future.cancel
        self.spawn(self.sampled(sampler, promise, future))

    async def sampled(self, sampler: SamplingSession, promise: Promise, future: Future) -> None:
        """Keep the promise when the engine has answered, and tell whoever polls its whole session."""
        try:
            promise.resolve(await in_thread(wire.encode_sample, await asyncio.wrap_future(future)))
        except asyncio.CancelledError:
            if self.closing.done():
                raise  # not the client has cancelled it: the next process samples it
            promise.fail(Gone("cancelled"))
        except Exception as error:
            promise.fail(error)
        sampler.completions.append(completion(promise))
        sampler.completed.set_result(None)
        sampler.completed = asyncio.Future()

    async def retrieve_futures(self, request: types.FuturesRetrieveRequest) -> dict:
        """What of one sampling session has finished since `prev_cursor`; the results are then fetched one by one."""
        sampler = find(self.samplers, request.target.sampling_session_id, "sampling session")
        if sampler.forgotten + len(sampler.completions) <= request.prev_cursor:
            await self.wait(sampler.completed, min(request.timeout if request.timeout is not None else POLL_S, POLL_S))
        new = sampler.completions[max(request.prev_cursor - sampler.forgotten, 0) :]
        return {"completions": new, "cursor": sampler.forgotten + len(sampler.completions)}

    def cancel_future(self, request: types.FutureRetrieveRequest) -> dict:
        promise = find(self.promises, request.request_id, "future")
        promise.cancel()
        return {"request_id": promise.request_id}

    async def sweep(self) -> None:
        """Once a minute: forget sessions that are silent, old results and snapshots, remove expired checkpoints."""
        while True:
            await asyncio.sleep(60)
            await self.end_silent(KEEP_RESULTS_S)
            while stale := idle(self.samplers.values(), time.monotonic()):  # looked at again: ending one takes time
                await self.end_sampler(stale[0])
            self.forget(before=time.monotonic() - KEEP_RESULTS_S)
            for run in self.runs.values():  # what is in a state need not be repeated, and can be forgotten
                if run.unsaved_s and (run.worker is None or run.worker.done()):
                    run.unsaved_s = math.inf
                    self.save_state(run)
            try:
                await in_thread(self.store.sweep)
            except OSError:
                log.exception("expired checkpoints were not removed")

    def forget(self, *, before: float) -> None:
        """Results that were there earlier, as long as no restart needs to know of them."""
        for owner in (*self.runs.values(), *self.samplers.values()):
            training = isinstance(owner, Run)
            key, covered = (owner.model_id, owner.covered) if training else (owner.sampler_id, math.inf)
            covered = covered if not owner.session.ended else math.inf
            gone = {seq: p for seq, p in owner.requests.items() if p.finished_at < before and seq < covered}
            with self.journal.together:
                for seq, promise in gone.items():
                    del owner.requests[seq], self.promises[promise.request_id]
                    self.journal.drop("answer", promise.request_id)
                    for kind in ("request", "payload"):
                        self.journal.drop(kind, key, seq=seq)
                if not training and gone:
                    names = {promise.request_id for promise in gone.values()}
                    kept = [each for each in owner.completions if each["request_id"] not in names]
                    owner.forgotten, owner.completions = owner.forgotten + len(owner.completions) - len(kept), kept
                    self.journal.drop("forgotten", key)
                    self.note("forgotten", key, owner.forgotten)
        for session in [session for session in self.sessions.values() if session.ended]:
            keys = [session.session_id, *session.runs, *session.samplers]
            if not any(owner.requests for owner in (*session.runs.values(), *session.samplers.values())):
                with self.journal.together:
                    for kind, key in itertools.product(cache.KINDS, keys):
                        self.journal.drop(kind, key)
                for table, key in itertools.product((self.sessions, self.runs, self.samplers), keys):
                    table.pop(key, None)


def completion(promise: Promise) -> dict:
    """As retrieve_futures tells of it."""
    answer, told = promise.answer.result(), {"state": "failed", "request_id": promise.request_id}
    if isinstance(answer, bytes):
        told |= {"state": "finished", "response_payload_uncompressed_size": len(answer)}
    return told


def check_optimizer(kind: str) -> None:
    if kind != "adamw":
        raise ValueError(f"optimizer {kind!r} is not supported; this server has adamw")


def peft_files(tensors: dict, config: dict) -> dict[str, cache.Content]:
    """An adapter folder as PEFT, vLLM and the embedded engine read it."""
    save = lambda file: safetensors.numpy.save_file(tensors, file, {"format": "pt"})  # never the whole in one piece
    return {"adapter_model.safetensors": save, "adapter_config.json": json.dumps(config, indent=2).encode()}


# ---- after a restart


def recover(service: Service) -> None:
    """Everybody's sessions, requests and results are there again; what was not finished goes on, in the background."""
    records, service.records = service.records, []
    payloads = {(record.owner, record.seq): record.body for record in records if record.kind == "payload"}
    remember_all(service, records, payloads)
    held = [run.state for run in service.runs.values() if not run.session.ended]
    held += [each.snapshot for each in service.samplers.values() if not (each.retired or each.session.ended)]
    service.store.keep_snapshots({each.path.name for each in held if each is not None})
    for run in service.runs.values():
        if not run.session.ended:
            run.worker = service.spawn(resume(service, run))
            continue
        for promise in run.requests.values():  # those that the end itself was about to answer
            if not promise.answer.done():
                promise.fail(Gone(f"session {run.session.session_id} has ended"))
    for sampler in service.samplers.values():
        for seq, promise in sampler.requests.items():
            if not promise.answer.done():
                ask_again(service, sampler, promise, payloads.get((sampler.sampler_id, seq)))
    if records:
        log.info("%d sessions go on", sum(not session.ended for session in service.sessions.values()))


def remember_all(service: Service, records: list[cache.Record], payloads: dict[tuple[str, int], bytes]) -> None:
    """The journal's records, in their order, as what they were made of."""
    answers = {record.owner: record.body for record in records if record.kind == "answer"}
    owners: dict[str, Run | SamplingSession] = {}
    asked: dict[str, Run | SamplingSession] = {}  # by request id
    for record in records:
        kind, owner, seq = record.kind, record.owner, record.seq
        given: Any = json.loads(record.body) if kind not in ("request", "payload", "answer") else None
        if kind == "session":
            service.sessions[owner] = Session(owner, *given)
        elif kind == "end":
            service.sessions[owner].ended = True
        elif kind == "run":
            session = service.sessions[given[0]]
            owners[owner] = service.runs[owner] = session.runs[owner] = Run(owner, session, given[1])
        elif kind == "sampler":
            owners[owner] = reopen(service, SamplingSession(owner, service.sessions[given[0]], given[1]), *given[2:])
        elif kind == "request":
            verb, request_id = record.body.decode().split()
            promise = Promise(request_id)
            if request_id in answers:
                promise.resolve(answer_in(answers[request_id]))
            owners[owner].requests[seq], asked[request_id] = service.remember(promise), owners[owner]
            if isinstance(run := owners[owner], Run) and (owner, seq) in payloads:
                run.pending[seq] = (promise, verb, payloads[owner, seq])
        elif kind == "shared":
            service.runs[owner].shared[seq] = given
        elif kind == "loaded":
            service.runs[owner].loaded[seq] = given
        elif kind == "state":
            run, path = service.runs[owner], TinkerPath(owner, cache.SNAPSHOTS, given[0])
            run.state, run.info, run.next_seq, run.covered = service.store.find(path), given[1], seq, seq
        elif kind == "retired":
            service.samplers[owner].retired = True
        elif kind == "forgotten":
            service.samplers[owner].forgotten = given
    for request_id in answers:  # in the order in which they came
        if isinstance(sampler := asked.get(request_id), SamplingSession):
            sampler.completions.append(completion(service.promises[request_id]))


def answer_in(body: bytes) -> dict | bytes:
    return body[1:] if body[:1] == b"P" else json.loads(body)


def reopen(service: Service, sampler: SamplingSession, run_id: str | None, version: str | None) -> SamplingSession:
    try:
        if run_id is not None and version is not None:
            sampler.snapshot = service.store.open(TinkerPath(run_id, cache.SNAPSHOTS, version))
            sampler.folder = sampler.snapshot.folder
        elif sampler.model_path is not None:
            sampler.folder = service.open_checkpoint(sampler.model_path, ("sampler_weights",)).folder
        if sampler.folder is not None and sampler.folder.name != version:
            raise ValueError(f"{sampler.model_path} is another version now")
    except (ValueError, RuntimeError) as error:
        sampler.trouble = str(error)
    service.samplers[sampler.sampler_id] = sampler.session.samplers[sampler.sampler_id] = sampler
    return sampler


def ask_again(service: Service, sampler: SamplingSession, promise: Promise, body: bytes | None) -> None:
    """The same request under the same version and seed."""
    if body is None or sampler.trouble or sampler.retired or sampler.session.ended:
        future: Future = Future()
        why = sampler.trouble or "it has ended"
        future.set_exception(Gone(f"{sampler.sampler_id} did not survive a restart: {why}"))
        return service.follow(sampler, promise, future)
    try:
        service.follow(sampler, promise, service.submit(sampler, wire.decode_sample(body)))
    except Overloaded:  # those in its slots do not count as waiting: here they wait, too
        asyncio.get_running_loop().call_later(0.5, ask_again, service, sampler, promise, body)


async def resume(service: Service, run: Run) -> None:
    """An adapter as it was: its last state, and what came after once more."""
    if run.covered:
        try:
            if run.state is None:
                raise ValueError("its state is not there")
            state = await in_thread(service.store.open, run.state.path)
            tensors = await in_thread(safetensors.numpy.load_file, state.folder / "state.safetensors")
            restore = functools.partial(service.trainer.restore, optimizer=True)
            await service.on_device(restore, run.model_id, tensors, state.meta)
            run.ready = True
        except Exception as error:
            run.trouble = f"it could not be restored after a restart: {error}"
            log.error("%s: %s", run.model_id, run.trouble)
    await service.drain(run)


# ---- what the client and the CLI may look at


def healthz(service: Service, _: Request) -> dict:
    """It serves; and what of its state a crash, or the loss of this machine, would take."""
    mirror = service.protector
    said = [
        service.journal.trouble,
        mirror.trouble if mirror is not None else "no --mirror: this machine's disk is all",
    ]
    behind = {"mirror_behind_s": round(time.time() - mirror.protected_until, 1)} if mirror is not None else {}
    return {"status": "ok", "unprotected": [each for each in said if each]} | behind


def get_server_capabilities(service: Service, _: Request) -> dict:
    model = {"model_name": service.model.name, "max_context_length": service.trainer.row_len}
    return {"supported_models": [model | {"trainable": True, "sampleable": True}]}


def get_sampler(service: Service, request: Request) -> dict:
    sampler = find(service.samplers, request.path_params["sampler"], "sampler")
    return {"sampler_id": sampler.sampler_id, "base_model": service.model.name, "model_path": sampler.model_path}


def page(request: Request, key: str, items: list) -> dict:
    offset, limit = (int(request.query_params.get(name, default)) for name, default in (("offset", 0), ("limit", 20)))
    if offset < 0 or limit < 0:
        raise ValueError(f"offset {offset} and limit {limit} must not be negative")
    cursor = {"offset": offset, "limit": limit, "total_count": len(items)}
    return {key: items[offset : offset + limit], "cursor": cursor}


def get_session(service: Service, request: Request) -> dict:
    session = find(service.sessions, request.path_params["session"], "session")
    held = {"training_run_ids": list(session.runs), "sampler_ids": list(session.samplers)}
    return held | {"user_metadata": session.user_metadata, "display_name": session.display_name}


async def training_runs(service: Service, request: Request) -> dict:
    """Every run that ever had an adapter, newest first; or the one that the path names."""
    if "project_id" in request.query_params:
        raise ValueError(f"project_id: {NO_PROJECTS}; leave it out")
    checkpoints = await in_thread(service.store.list)
    newest = {(c.path.run_id, c.path.segment): describe(c) for c in reversed(checkpoints)}
    runs = {}
    for run_id, info in await in_thread(service.store.runs):
        info |= service.runs[run_id].info if run_id in service.runs else {}  # after a restart it may know less
        runs[run_id] = {key: info[key] for key in ("base_model", "last_request_time", "user_metadata")} | {
            "training_run_id": run_id,
            "model_owner": "local",
            "is_lora": True,
            "lora_rank": info["rank"],
            "last_checkpoint": newest.get((run_id, "weights")),
            "last_sampler_checkpoint": newest.get((run_id, "sampler_weights")),
        }
    if "run" in request.path_params:
        return find(runs, request.path_params["run"], "training run")
    return page(request, "training_runs", list(runs.values()))


def describe(checkpoint: cache.Checkpoint) -> dict:
    path, expires_at = checkpoint.path, checkpoint.expires_at
    return {
        "checkpoint_id": f"{path.segment}/{path.name}",
        "checkpoint_type": cache.SEGMENTS[path.segment],
        "time": checkpoint.created.isoformat(),
        "tinker_path": str(path),
        "expires_at": expires_at.isoformat() if expires_at is not None else None,
    } | {key: getattr(checkpoint, key) for key in ("size_bytes", "public", "user_metadata")}


async def checkpoints(service: Service, request: Request) -> dict:
    """Those of one run, all at once; or those of all runs, by pages."""
    run_id = request.path_params.get("run")
    items = [describe(checkpoint) for checkpoint in await in_thread(service.store.list, run_id)]
    return {"checkpoints": items} if run_id is not None else page(request, "checkpoints", items)


def named(request: Request) -> TinkerPath:
    return TinkerPath.parse("tinker://{run}/{segment}/{name}".format(**request.path_params))


async def set_ttl(service: Service, request: Request) -> None:
    body = TimeToLive.model_validate_json(await read(service, request))
    await in_thread(service.store.set_ttl, named(request), body.ttl_seconds)


async def external_weights_urls(service: Service, request: Request) -> dict:
    checkpoint = await in_thread(service.store.open, named(request))
    if checkpoint.path.segment != "external_weights":
        raise ValueError(f"{checkpoint.path} is not an external checkpoint: save it with save_weights_external")
    folder, expires = checkpoint.folder.name, str(int(time.time() + EXTERNAL_URL_S))
    query = lambda file: f"expires={expires}&signature={sign(service, folder, file, expires)}"
    urls = {file: f"{request.base_url}download/{folder}/{file}?{query(file)}" for file in checkpoint.files}
    return {"urls": urls, "expires": datetime.fromtimestamp(int(expires), UTC).isoformat()}


def sign(service: Service, folder: str, file: str, expires: str) -> str:
    return hmac.new(service.secret, f"{folder}/{file}/{expires}".encode(), hashlib.sha256).hexdigest()


def download(service: Service, request: Request) -> Response:
    """Links carry their own permission: clients fetch them without the key."""
    folder, file = request.path_params["object"], request.path_params["file"]
    expires, signature = (request.query_params.get(key, "") for key in ("expires", "signature"))
    genuine = hmac.compare_digest(signature.encode(), sign(service, folder, file, expires).encode())
    if not genuine or int(expires) < time.time():
        raise HTTPException(403, "this link is wrong or has expired; ask for external_weights_urls again")
    path = service.store.root / "objects" / folder / file
    if not path.is_file():
        raise NotFound(f"{file} is gone: its checkpoint was deleted")
    return FileResponse(path)


# ---- HTTP

NO_PROJECTS = "this server has no projects: every client sees every session and checkpoint"
ABSENT: dict[str, list[tuple[str, str]]] = {  # what else the SDK asks for: 404 and why, lest the URL seem wrong
    NO_PROJECTS: [("PUT", "sessions/{session}/project")],
    "sessions are not searched here: list_sessions and get_session tell of them": [("POST", "sessions/search")],
    "this server records no traces of sessions": [("GET", "sessions/{session}/trace_export")],
    "checkpoints are not copied here: load one into a training client and save that": [("POST", "copy_weights")],
    "this server keeps no accounts: nothing is billed, and nothing audited": [
        ("GET", "billing/usage/events"),
        ("GET", "billing/usage/checkpoints/current"),
        ("GET", "audit"),
    ],
    "this server issues no keys: set TINKER_API_KEY to its --api-key or, where it has none, to any tml-...": [
        ("GET", "auth/apikey/me"),
        ("DELETE", "auth/apikey/me"),
    ],
}


def refuse(reason: str) -> Callable[[Service, Request], dict]:
    def handler(service: Service, _: Request) -> dict:
        raise NotFound(reason)

    return handler


CHECKPOINT = "training_runs/{run}/checkpoints/{segment}/{name}"
# Method, path, handler, and what that takes beside the service: JSON of such a type, the body as bytes, or the Request.
ROUTES: tuple[tuple[str, str, Callable[[Service, Any], Any], type], ...] = (
    ("POST", "client/config", lambda *_: {}, bytes),
    ("POST", "client/dynamic_config", lambda *_: {"refresh_interval_sec": 300, "sample_cancel_enabled": True}, bytes),
    ("POST", "telemetry", lambda *_: {"status": "accepted"}, bytes),
    ("POST", "create_session", Service.create_session, types.CreateSessionRequest),
    ("POST", "session_heartbeat", Service.session_heartbeat, types.SessionHeartbeatRequest),
    ("POST", "create_model", Service.create_model, bytes),
    ("POST", "get_info", Service.get_info, types.GetInfoRequest),
    ("POST", "forward_backward", Service.forward_backward, bytes),
    ("POST", "optim_step", Service.optim_step, bytes),
    ("POST", "save_weights", Service.save_weights, bytes),
    ("POST", "load_weights", Service.load_weights, bytes),
    ("POST", "save_weights_for_sampler", Service.save_weights_for_sampler, bytes),
    ("POST", "save_weights_external", Service.save_weights_external, bytes),
    ("POST", "weights_info", Service.weights_info, WeightsInfo),
    ("POST", "create_sampling_session", Service.create_sampling_session, types.CreateSamplingSessionRequest),
    ("POST", "asample", Service.asample, bytes),
    ("POST", "retrieve_future", Service.retrieve_future, types.FutureRetrieveRequest),
    ("POST", "retrieve_futures", Service.retrieve_futures, types.FuturesRetrieveRequest),
    ("POST", "cancel_future", Service.cancel_future, types.FutureRetrieveRequest),
    ("GET", "healthz", healthz, Request),
    ("GET", "get_server_capabilities", get_server_capabilities, Request),
    ("GET", "samplers/{sampler}", get_sampler, Request),
    ("GET", "sessions", lambda s, r: page(r, "sessions", list(reversed(s.sessions))), Request),
    ("GET", "sessions/{session}", get_session, Request),
    (
        "POST",
        "sessions/{session}/finish",
        lambda s, r: s.end_session(find(s.sessions, r.path_params["session"], "session")),
        Request,
    ),
    ("GET", "training_runs", training_runs, Request),
    ("GET", "training_runs/{run}", training_runs, Request),
    ("GET", "training_runs/{run}/checkpoints", checkpoints, Request),
    ("GET", "checkpoints", checkpoints, Request),
    ("POST", f"{CHECKPOINT}/publish", lambda s, r: in_thread(s.store.set_public, named(r), True), Request),
    ("DELETE", f"{CHECKPOINT}/publish", lambda s, r: in_thread(s.store.set_public, named(r), False), Request),
    ("PUT", f"{CHECKPOINT}/ttl", set_ttl, Request),
    ("GET", f"{CHECKPOINT}/external_weights_urls", external_weights_urls, Request),
    ("DELETE", CHECKPOINT, lambda s, r: in_thread(s.store.delete, named(r)), Request),
    *((*each, refuse(reason), Request) for reason, absent in ABSENT.items() for each in absent),
)


def route(service: Service, method: str, path: str, handler: Callable[[Service, Any], Any], kind: type) -> Route:
    async def endpoint(request: Request) -> Response:
        check_key(service, request)
        given: Any = request if kind is Request else await read(service, request)
        answer = handler(service, kind.model_validate_json(given) if issubclass(kind, pydantic.BaseModel) else given)
        answer = await answer if inspect.isawaitable(answer) else answer
        if not (durable := service.journal.durable()).done():
            await asyncio.wrap_future(durable)  # nothing is told that a crash could undo
        return respond(answer)

    return Route(f"{API}/{path}", endpoint, methods=[method])


def check_key(service: Service, request: Request) -> None:
    key, sent = service.config.api_key, request.headers.get("X-API-Key", "")
    if key and not sent:
        raise HTTPException(401, "X-API-Key is missing: set TINKER_API_KEY")
    if key and not hmac.compare_digest(sent.encode("latin-1"), key.encode()):
        raise HTTPException(403, "X-API-Key is not this server's key")


def respond(answer: dict | bytes | Response | None) -> Response:
    if isinstance(answer, dict):
        return JSONResponse(answer)
    if isinstance(answer, bytes):
        return Response(answer, media_type="application/x-protobuf")
    return answer if answer is not None else Response(status_code=204)


async def read(service: Service, request: Request) -> bytes:
    limits = [(service.config.max_body_mb * 2**20, "--max-body-mb")]
    if request.url.path == f"{API}/asample":
        # JSON is parsed under the GIL, in no thread without stopping the loop: no more of it than a prompt can be.
        context = service.sampler.context_tokens
        limits.append((2**18 + 64 * context, f"a prompt has {context} tokens at most"))
    most, allowed = min(limits)
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > most:
            raise HTTPException(413, f"the request is larger than {most} bytes ({allowed})")
    return bytes(body)


STATUS = {  # what is answered at once. No 408, 409 or 5xx for what is final: the SDK would retry it.
    pydantic.ValidationError: 422,
    NotFound: 404,
    Gone: 410,
    Overloaded: 429,
    cache.Full: 429,
    ValueError: 400,
    ClientDisconnect: 400,  # nobody reads it
    Exception: 500,
}


async def on_error(request: Request, error: Exception) -> JSONResponse:
    if isinstance(error, HTTPException):
        return JSONResponse({"detail": error.detail}, error.status_code)
    status = next(STATUS[kind] for kind in type(error).__mro__ if kind in STATUS)
    if status == 500:
        log.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return JSONResponse({"detail": str(error)}, status)


def application(service: Service) -> Starlette:
    @contextlib.asynccontextmanager
    async def lifespan(_):
        service.closing = asyncio.Future()
        recover(service)
        sweeper = service.spawn(service.sweep())
        yield
        sweeper.cancel()

    public = Route("/download/{object}/{file:path}", functools.partial(download, service))
    routes = [public, *(route(service, *each) for each in ROUTES)]
    handlers = dict.fromkeys((HTTPException, *STATUS), on_error)
    return Starlette(routes=routes, exception_handlers=handlers, lifespan=lifespan)


# ---- start and stop


class Server(uvicorn.Server):
    """uvicorn that tells the service when to let its long-polls go."""

    def __init__(self, config: uvicorn.Config, service: Service):
        super().__init__(config)
        self.service = service

    async def shutdown(self, sockets=None):
        self.service.closing.set_result(None)
        await super().shutdown(sockets)


def bind(config: ServerConfig) -> socket.socket:
    """Take the port before the minute of loading, so that a busy one is said at once."""
    host, port, key = config.host, config.port, config.api_key
    if host not in ("127.0.0.1", "localhost", "::1") and not key:
        raise ValueError(f"--host {host} can be reached from elsewhere: set --api-key (or $TINKER_SERVER_API_KEY) too")
    if key and not key.startswith("tml-"):
        raise ValueError("--api-key must start with tml-: the SDK accepts no other")
    ipv6 = ":" in host
    family = socket.AF_INET6 if ipv6 else socket.AF_INET
    try:  # clients may connect while the model loads; they are served when it has
        sock = socket.create_server((host, port), family=family, backlog=1024, dualstack_ipv6=ipv6)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # asyncio does not, for sockets that it has not made
        return sock
    except OSError as error:
        remedy = "choose another --port (0 takes a free one)"
        raise ValueError(f"cannot listen on {host}:{port} ({error.strerror}); {remedy}") from error


def build(config: ServerConfig, store: cache.Store, journal: cache.Journal) -> Service:
    """Load the model and compile every program."""
    jax.config.update("jax_compilation_cache_dir", str(store.root / "xla"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
    log.info("loading %s on %d %s device(s)", config.model.model, jax.device_count(), jax.default_backend())
    model = load(config.model, state_dir=config.state_dir)
    fleet = Fleet(model, config.sampler, config.state_dir) if config.sampler.sampler == "vllm" else None
    beside = {} if fleet is not None else {"the embedded sampler": engine_bytes(model, config.sampler)}
    trainer = Trainer(model, config.trainer, beside=beside)
    trainer.warm_up()
    model = trainer.model  # as the step wants it laid out
    sampler = fleet if fleet is not None else EmbeddedEngine(model, config.sampler)
    sampler.warm_up()
    for folder in cache_folders(config).values():
        if folder.is_dir():
            cache.seal_folder(folder)
    adapters = f"{config.trainer.max_adapters} adapters of rank <= {config.model.max_rank}"
    slots = f"{config.sampler.slots} slots of {config.sampler.context} tokens"
    log.info("%s: tiles of %d x %d tokens, %s; sampler: %s", model.name, trainer.rows, trainer.row_len, adapters, slots)
    return Service(config, store, journal, trainer, sampler)


def cache_folders(config: ServerConfig) -> dict[str, Path]:
    """Our own, whose loss costs time alone: compiled programs, the demo model."""
    return {name: config.state_dir / name for name in ("xla", "vllm/xla", "models")}


def hub_folder(config: ServerConfig) -> dict[str, Path]:
    """Weights from a hub: mirrored, too; but the folder is the user's, and nothing is sealed or removed there."""
    if "/" in config.model.model and not Path(config.model.model).exists():
        from huggingface_hub import constants

        return {"hf": Path(constants.HF_HUB_CACHE) / f"models--{config.model.model.replace('/', '--')}"}
    return {}


def main(config: ServerConfig) -> None:
    started, sock = time.monotonic(), bind(config)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a request in flight is two open files
    config.state_dir.mkdir(parents=True, exist_ok=True)
    mirror = cache.Mirror(config.mirror) if config.mirror is not None else None
    store = cache.Store(config.state_dir)
    folders = cache_folders(config) | hub_folder(config)
    if mirror is not None:
        restore(mirror, store, folders)
    for folder in cache_folders(config).values():
        if bad := cache.check_folder(folder):
            log.warning("%s: %d files are damaged or new, and will be made again", folder, bad)
            if folder.name == "models":  # it is all there, or written anew
                shutil.rmtree(folder)
    journal = cache.Journal(store.root, most_bytes=config.journal_mb << 20)
    service = build(config, store, journal)
    if mirror is not None:
        service.protector = cache.Protector(mirror, store.root, journal, folders)
        service.protector.start()
    url, key = f"http://{config.host}:{sock.getsockname()[1]}", "<yours>" if config.api_key else "tml-any"
    log.info("ready in %.0f s: TINKER_BASE_URL=%s TINKER_API_KEY=%s", time.monotonic() - started, url, key)
    options = uvicorn.Config(application(service), log_level="warning", timeout_graceful_shutdown=2, lifespan="on")
    options.timeout_keep_alive = KEEP_ALIVE_S
    gc.collect()
    gc.freeze()  # 700,000 objects of start-up: a full collection over them holds a heartbeat for 400 ms
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # uvicorn raises either again when it has shut down
    threading.Thread(target=watch_for_preemption, args=(config.metadata,), daemon=True).start()
    with contextlib.suppress(KeyboardInterrupt):
        Server(options, service).run(sockets=[sock])
    journal.close()  # first: what the engine gives up now is asked for again after the next start
    if service.protector is not None:
        service.protector.close(FLUSH_S)
    service.sampler.close()
    store.close()
    log.info("stopped")
    sys.stderr.flush()
    os._exit(0)  # a tile may still be computing on the device thread; nobody waits for it any more


def restore(mirror: cache.Mirror, store: cache.Store, folders: dict[str, Path]) -> None:
    """What this directory lacks of what the mirror has; training can begin without."""
    try:
        if not (store.root / "journal.sqlite").exists():
            cache.restore_state(mirror, store.root)
            store.remove_garbage()
    except FileNotFoundError:
        log.info("%s has no state yet", mirror.root)
    except RuntimeError:
        raise  # what is there is damaged
    except Exception as error:  # file systems raise whatever they like: gcsfs an Exception, for a key that has expired
        log.warning("%s cannot be read (%s): beginning without what it may hold", mirror.root, error)
    for name, folder in folders.items():
        if not folder.exists():
            with contextlib.suppress(Exception):
                mirror.pull(name, folder)


def watch_for_preemption(address: str | None) -> None:
    """End as on SIGTERM when the machine is about to be taken away: Google Cloud says so 30 s before."""
    board = Path("/sys/class/dmi/id/product_name")
    if address is None and not (board.is_file() and board.read_text().startswith("Google")):
        return
    address = address if address is not None else "http://metadata.google.internal"
    url = f"{address}/computeMetadata/v1/instance/preempted"
    while True:
        with contextlib.suppress(httpx.HTTPError, httpx.InvalidURL):
            if httpx.get(url, headers={"Metadata-Flavor": "Google"}, timeout=5).text.strip() == "TRUE":
                log.warning("this machine is about to be preempted")
                return os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(1)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s", datefmt="%H:%M:%S")
    for noisy in ("absl", "httpx", "jax._src.compilation_cache", "jax._src.xla_bridge"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # or it says at every start that there is no torch
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    try:
        if sys.argv[1:2] == ["fsck"]:
            sys.exit(cache.main(tyro.cli(cache.Command, args=["status", *sys.argv[2:]])))
        description = "A Tinker server: trains and samples LoRA adapters over one base model."
        given = tyro.cli(ServerConfig, description=description)
        main(dataclasses.replace(given, api_key=given.api_key or os.environ.get("TINKER_SERVER_API_KEY")))
    except (ValueError, RuntimeError) as error:
        sys.exit(f"server.py: {error}")
    except KeyboardInterrupt:  # while the model was loading
        print("server.py: interrupted before it was ready", file=sys.stderr)
        sys.exit(130)
