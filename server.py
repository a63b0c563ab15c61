"""The Tinker API over HTTP: an unmodified `tinker` client trains and samples here.

    client -> [server: order, promises, errors] -> trainer (one device thread), sampler (its own), cache (workers)

A request that takes long is answered at once with a promise; the client polls retrieve_future until it is kept.

Invariants
  1. Per model, requests run of seq_id, however they arrive; a failed one is consumed too.
  2. The same (model_id, seq_id) is the same request: its request_id, and later its bytes, are served again.
  3. Nothing blocks the event loop: tensors, devices and disks are for threads. Models take turns there.
  4. A ValueError is the client's (category user), anything else ours (server, logged); neither disturbs others.

Left out: images, custom losses on the server, projects, billing. Surviving a restart is the journal's, to come.
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
import json
import logging
import os
import re
import secrets
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import jax
import pydantic
import safetensors.numpy
import tyro
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route
from tinker import types

import cache
import wire
from cache import TinkerPath
from losses import LOSSES
from model import ModelConfig, check_rank, load
from sampler import EmbeddedEngine, Overloaded, SamplerConfig
from trainer import Trainer, TrainerConfig

log = logging.getLogger("server")

POLL_S = 25.0  # the SDK gives up on a poll after 45 s; answering 408 before that makes it ask again at once, in silence
KEEP_RESULTS_S = 3600.0
LOST_SESSION_S = 120.0  # without a heartbeat (one every 10 s): its adapters make room when another client needs it
EXTERNAL_URL_S = 3600.0
API = "/api/v1"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerConfig:
    model: tyro.conf.OmitArgPrefixes[ModelConfig] = dataclasses.field(default_factory=ModelConfig)
    trainer: tyro.conf.OmitArgPrefixes[TrainerConfig] = dataclasses.field(default_factory=TrainerConfig)
    sampler: tyro.conf.OmitArgPrefixes[SamplerConfig] = dataclasses.field(default_factory=SamplerConfig)
    host: str = "127.0.0.1"  # address to listen on; any but loopback needs an api key
    port: int = 8000  # 0 takes a free one
    api_key: str | None = None  # clients send it as TINKER_API_KEY; unset: $TINKER_SERVER_API_KEY, or none is checked
    state_dir: Path = Path("state")  # checkpoints, compiled programs and the demo model live here
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


class Promise:
    """One accepted request: pending, then a response that is served as often as it is asked for."""

    def __init__(self, request_id: str):
        self.request_id, self.done, self.finished_at = request_id, asyncio.Event(), 0.0
        self.body, self.media_type, self.failed = b"", "application/json", False
        self.cancel: Callable[[], Any] = lambda: None

    def resolve(self, result: dict | bytes) -> None:
        """bytes are protobuf, a dict is JSON. The first resolution stands."""
        if self.done.is_set():
            return
        if isinstance(result, bytes):
            self.body, self.media_type = result, "application/x-protobuf"
        else:
            self.body, self.failed = json.dumps(result).encode(), "error" in result
        self.finished_at = time.monotonic()
        self.done.set()

    def fail(self, error: BaseException) -> None:
        user = isinstance(error, ValueError | NotFound | Gone)
        if not user:
            log.error("request %s failed", self.request_id, exc_info=error)
        self.resolve(
            wire.failed(str(error) if user else f"{type(error).__name__}: {error}", "user" if user else "server")
        )


@dataclasses.dataclass(eq=False)
class Session:
    """What one ServiceClient holds."""

    session_id: str
    user_metadata: dict | None
    display_name: str | None
    last_seen: float = dataclasses.field(default_factory=time.monotonic)
    ended: bool = False
    runs: "dict[str, Run]" = dataclasses.field(default_factory=dict)
    samplers: "dict[str, SamplingSession]" = dataclasses.field(default_factory=dict)
    snapshots: list[cache.Checkpoint] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(eq=False)
class Run:
    """One model in training: its queue, and what the client is told of it."""

    model_id: str
    session: Session
    info: dict[str, Any]
    next_seq: int = 0  # 0 creates the adapter
    pending: dict[int, tuple[Promise, Callable[[], Awaitable[dict | bytes]]]] = dataclasses.field(default_factory=dict)
    requests: dict[int, Promise] = dataclasses.field(default_factory=dict)
    worker: asyncio.Task | None = None
    ready: bool = False


@dataclasses.dataclass(eq=False)
class SamplingSession:
    """One SamplingClient: one immutable adapter, or the base model."""

    sampler_id: str
    session: Session
    base_model: str
    model_path: str | None
    folder: Path | None  # of the published adapter; None: the base
    requests: dict[int, tuple[Promise, list[str]]] = dataclasses.field(default_factory=dict)
    completions: list[Promise] = dataclasses.field(default_factory=list)  # in order, for retrieve_futures
    completed: asyncio.Condition = dataclasses.field(default_factory=asyncio.Condition)


class Service:
    """The verbs, without HTTP: requests in as the SDK's types, dicts and bytes out."""

    def __init__(self, config: ServerConfig, store: cache.Store, trainer: Trainer, sampler: EmbeddedEngine):
        self.config, self.store, self.trainer, self.sampler, self.model = config, store, trainer, sampler, trainer.model
        self.device = ThreadPoolExecutor(1, "device")
        self.promises: dict[str, Promise] = {}
        self.sessions: dict[str, Session] = {}
        self.runs: dict[str, Run] = {}
        self.samplers: dict[str, SamplingSession] = {}
        self.background: set[asyncio.Task] = set()
        self.closing = asyncio.Event()
        self.secret = secrets.token_bytes(32)  # signs download links

    # -- order and promises

    def enqueue(
        self, run: Run, seq_id: int | None, work: Callable[[], Awaitable[dict | bytes]], *, first: bool = False
    ) -> dict:
        """Accept a request of one model: a promise now, `work` when every smaller seq_id is done."""
        if not first and not 1 <= (seq_id or 0) < 2**63:
            raise ValueError(f"seq_id is {seq_id}; requests of a model are numbered from 1")
        seq_id = 0 if first else int(seq_id or 0)
        if seq_id not in run.requests:
            self.check_alive(run.session)
            if seq_id < run.next_seq:
                raise Gone(f"seq_id {seq_id} of {run.model_id} was executed and its result is no longer kept")
            promise = run.requests[seq_id] = self.promise()
            run.pending[seq_id] = (promise, work)
            run.info["last_request_time"], run.session.last_seen = datetime.now(UTC).isoformat(), time.monotonic()
            if run.worker is None or run.worker.done():
                run.worker = self.spawn(self.drain(run))
        return {"request_id": run.requests[seq_id].request_id, "model_id": run.model_id}

    async def drain(self, run: Run) -> None:
        """One model's worker: takes its requests in order, each to its end. (Later: neighbours share tiles here.)"""
        while run.next_seq in run.pending:
            promise, work = run.pending.pop(run.next_seq)
            try:
                if run.next_seq > 0 and not run.ready:
                    raise ValueError(f"{run.model_id} was not created: its first request failed")
                promise.resolve(await work())
            except Exception as error:
                promise.fail(error)
            run.next_seq += 1

    async def on_device(self, call: Callable, *args, **kwargs):
        return await asyncio.get_running_loop().run_in_executor(self.device, functools.partial(call, *args, **kwargs))

    def promise(self) -> Promise:
        promise = Promise(cache.new_id("r"))
        self.promises[promise.request_id] = promise
        return promise

    def spawn(self, work) -> asyncio.Task:
        task = asyncio.create_task(work)
        self.background.add(task)  # the loop itself keeps only a weak reference
        task.add_done_callback(self.background.discard)
        return task

    async def retrieve_future(self, request: types.FutureRetrieveRequest) -> Response:
        promise = self.find(self.promises, request.request_id, "future")
        await self.wait(promise.done.wait(), POLL_S)
        if not promise.done.is_set():
            return JSONResponse(wire.try_again(promise.request_id), 408)
        return Response(promise.body, media_type=promise.media_type)

    async def wait(self, event, timeout_s: float) -> None:
        """Until `event`, the time-out or the end of the server, whichever is first."""
        tasks = [asyncio.ensure_future(event), asyncio.ensure_future(self.closing.wait())]
        try:
            await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()

    def find(self, table: dict[str, Any], key: str, what: str) -> Any:
        if key not in table:
            raise NotFound(
                f"unknown {what} {key!r} (results are kept for {KEEP_RESULTS_S / 3600:.0f} h; "
                "only checkpoints survive a restart)"
            )
        return table[key]

    # -- sessions

    async def create_session(self, request: types.CreateSessionRequest) -> dict:
        session = Session(cache.new_id("s"), request.user_metadata, request.display_name)
        self.sessions[session.session_id] = session
        return {"type": "create_session", "session_id": session.session_id}

    def session(self, session_id: str) -> Session:
        session = self.find(self.sessions, session_id, "session")
        self.check_alive(session)
        session.last_seen = time.monotonic()
        return session

    def check_alive(self, session: Session) -> None:
        if session.ended:
            raise Gone(f"session {session.session_id} has ended; its checkpoints can be loaded from a new one")

    async def session_heartbeat(self, request: types.SessionHeartbeatRequest) -> dict:
        self.session(request.session_id)
        return {"type": "session_heartbeat"}

    async def end_session(self, session: Session) -> None:
        """Free what only this session could reach: adapters in training and ephemeral snapshots. Checkpoints stay."""
        if session.ended:
            return
        session.ended = True
        for run in session.runs.values():
            for promise, _ in run.pending.values():
                promise.fail(Gone(f"session {session.session_id} has ended"))
            run.pending.clear()
            if run.worker is not None:
                await asyncio.wait([run.worker])  # what runs may yet make an adapter or a snapshot
            await self.on_device(self.trainer.release, run.model_id)
        for snapshot in session.snapshots:
            await asyncio.to_thread(self.store.remove_snapshot, snapshot)
        session.snapshots.clear()

    async def make_room(self) -> None:
        """A new adapter needs a place: sessions that have been silent for long give up theirs."""
        if len(self.trainer.adapters) >= self.trainer.config.max_adapters:
            for session in list(self.sessions.values()):
                if session.runs and time.monotonic() - session.last_seen > LOST_SESSION_S:
                    await self.end_session(session)

    # -- training

    def new_run(self, session_id: str, model_seq_id: int, user_metadata: dict | None) -> Run:
        session = self.session(session_id)
        model_id = cache.check_run_id(f"{session_id}:train:{model_seq_id}")  # the SDK derives the same id
        if model_id not in self.runs:
            now = datetime.now(UTC).isoformat()
            metadata = {key: str(value) for key, value in (user_metadata or {}).items()}
            info = {"base_model": self.model.name, "user_metadata": metadata, "last_request_time": now}
            self.runs[model_id] = session.runs[model_id] = Run(model_id, session, info)
        return self.runs[model_id]

    def check_base_model(self, name: str) -> None:
        if name not in (self.model.name, str(self.model.directory)):
            raise ValueError(f"base_model {name!r} is not served here; this server has {self.model.name!r}")

    async def create_model(self, request: types.CreateModelRequest) -> dict:
        run, lora = self.new_run(request.session_id, request.model_seq_id, request.user_metadata), request.lora_config

        async def work() -> dict:
            self.check_base_model(request.base_model)
            check_optimizer(request.optimizer_config.type)
            if lora is None:
                raise ValueError("lora_config is missing: this server trains LoRA adapters only")
            if not (lora.train_attn or lora.train_mlp):
                raise ValueError(
                    "lora_config: train_attn and train_mlp are both false; the unembedding alone is not trained here"
                )
            check_rank(lora.rank, self.model.config.max_rank)
            if lora.train_unembed:
                log.info("%s: train_unembed is accepted, but the unembedding is not trained", run.model_id)
            await self.make_room()
            seed = lora.seed if lora.seed is not None else secrets.randbits(31)
            options = dict(rank=lora.rank, train_attn=lora.train_attn, train_mlp=lora.train_mlp)
            await self.on_device(self.trainer.create, run.model_id, seed=seed, **options)
            return await self.created(run, "create_model", **options, seed=seed)

        return self.enqueue(run, 0, work, first=True)

    async def created(self, run: Run, kind: str, **options) -> dict:
        run.info |= options
        run.ready = True
        await asyncio.to_thread(self.store.put_run, run.model_id, run.info)
        return {"type": kind, "model_id": run.model_id}

    async def get_info(self, request: types.GetInfoRequest) -> dict:
        run = self.find(self.runs, request.model_id, "model")
        data = {
            "arch": self.model.hf_config["architectures"][0],
            "model_name": self.model.name,
            "tokenizer_id": str(self.model.directory),
        }
        return {
            "type": "get_info",
            "model_id": run.model_id,
            "model_name": self.model.name,
            "model_data": data,
            "is_lora": True,
            "lora_rank": run.info.get("rank"),
        }

    async def forward_backward(self, body: bytes) -> dict:
        model_id, seq_id = wire.decode_envelope(body)
        run = self.find(self.runs, model_id, "model")

        async def work() -> bytes:
            request = await asyncio.to_thread(self.read_forward_backward, body)
            call = functools.partial(self.trainer.forward_backward, backward=not request.forward_only)
            answer = await self.on_device(call, model_id, request.data, request.loss_fn, request.loss_config)
            return await asyncio.to_thread(wire.encode_forward_backward, *answer)

        return self.enqueue(run, seq_id, work)

    def read_forward_backward(self, body: bytes) -> wire.ForwardBackward:
        request = wire.decode_forward_backward(body)
        if request.loss_fn not in LOSSES:
            raise ValueError(f"loss_fn {request.loss_fn!r} is not known; this server has {', '.join(LOSSES)}")
        required = ("target_tokens", *LOSSES[request.loss_fn].inputs)
        wire.validate_forward_backward(
            request, required, vocab_size=self.model.vocab_size, max_tokens=self.trainer.row_len
        )
        return request

    async def optim_step(self, request: types.OptimStepRequest) -> dict:
        run, params = self.find(self.runs, request.model_id, "model"), request.optim_params

        async def work() -> dict:
            check_optimizer(getattr(params, "type", "adamw"))
            return {"metrics": await self.on_device(self.trainer.optim_step, run.model_id, params.model_dump())}

        return self.enqueue(run, request.seq_id, work)

    # -- weights

    def meta(self, run: Run) -> dict:
        return {key: run.info.get(key) for key in ("base_model", "rank", "train_attn", "train_mlp")}

    async def save_weights(self, request: types.SaveWeightsRequest) -> dict:
        run = self.find(self.runs, request.model_id, "model")

        async def work() -> dict:
            path = TinkerPath(
                run.model_id, "weights", request.path if request.path is not None else f"auto-{request.seq_id:06d}"
            )
            tensors, state = await self.on_device(self.trainer.checkpoint, run.model_id)
            files = {"adapter.safetensors": await asyncio.to_thread(safetensors.numpy.save, tensors)}
            await asyncio.to_thread(
                self.store.write,
                path,
                files,
                meta=self.meta(run) | state,
                ttl_seconds=request.ttl_seconds,
                overwrite=request.overwrite,
                user_metadata=request.user_metadata,
            )
            return {"type": "save_weights", "path": str(path)}

        return self.enqueue(run, request.seq_id, work)

    async def load_weights(self, request: types.LoadWeightsRequest) -> dict:
        if request.session_id is not None:
            run, seq_id = self.new_run(request.session_id, request.model_seq_id or 0, request.user_metadata), 0
        else:
            run, seq_id = self.find(self.runs, request.model_id or "", "model"), request.seq_id

        async def work() -> dict:
            checkpoint = await asyncio.to_thread(self.open_checkpoint, request.path, ("weights",))
            self.check_base_model(request.base_model or checkpoint.meta["base_model"])
            check_optimizer(request.optimizer_config.type if request.optimizer_config else "adamw")
            tensors = await asyncio.to_thread(safetensors.numpy.load_file, checkpoint.folder / "adapter.safetensors")
            await self.make_room()
            await self.on_device(
                self.trainer.restore, run.model_id, tensors, checkpoint.meta, optimizer=request.optimizer
            )
            answer = await self.created(
                run, "load_weights", **{k: checkpoint.meta[k] for k in ("rank", "train_attn", "train_mlp")}
            )
            return answer | {"path": request.path}

        return self.enqueue(run, seq_id, work, first=request.session_id is not None)

    def open_checkpoint(self, path: str, segments: tuple[str, ...]) -> cache.Checkpoint:
        parsed = TinkerPath.parse(path)
        if parsed.segment not in segments:
            raise ValueError(f"{path} is not of the right kind: expected tinker://<run>/{' or '.join(segments)}/<name>")
        return self.store.open(parsed)

    async def save_weights_for_sampler(self, request: types.SaveWeightsForSamplerRequest) -> dict:
        run = self.find(self.runs, request.model_id, "model")

        async def work() -> dict:
            files = await self.adapter_files(*await self.on_device(self.trainer.snapshot, run.model_id))
            if request.path is not None:
                path = TinkerPath(run.model_id, "sampler_weights", request.path)
                await asyncio.to_thread(
                    self.store.write,
                    path,
                    files,
                    meta=self.meta(run),
                    ttl_seconds=request.ttl_seconds,
                    user_metadata=request.user_metadata,
                )
                return {"type": "save_weights_for_sampler", "path": str(path)}
            sampler_id = await self.sample_from_snapshot(
                run.session, request.sampling_session_seq_id or 0, run.model_id, files
            )
            return {"type": "save_weights_for_sampler", "sampling_session_id": sampler_id}

        return self.enqueue(run, request.seq_id, work)

    async def adapter_files(self, tensors, peft_config: dict) -> dict[str, bytes]:
        """An adapter folder as PEFT, vLLM and the embedded engine read it."""
        weights = await asyncio.to_thread(safetensors.numpy.save, tensors, {"format": "pt"})
        return {"adapter_model.safetensors": weights, "adapter_config.json": json.dumps(peft_config, indent=2).encode()}

    async def sample_from_snapshot(
        self, session: Session, seq: int, run_id: str, files: dict[str, bytes], path: str | None = None
    ) -> str:
        snapshot = await asyncio.to_thread(self.store.write_snapshot, run_id, files, meta={})
        session.snapshots.append(snapshot)
        return self.new_sampler(session, seq, path, snapshot.folder).sampler_id

    async def save_weights_external(self, request: types.SaveWeightsExternalRequest) -> dict:
        run = self.find(self.runs, request.model_id, "model")

        async def work() -> dict:
            if request.age_encryption_recipients:
                raise ValueError("age_encryption_recipients: encrypted exports are not supported; leave it out")
            path = TinkerPath(run.model_id, "external_weights", request.path)
            files = await self.adapter_files(*await self.on_device(self.trainer.snapshot, run.model_id))
            saved = await asyncio.to_thread(
                self.store.write, path, files, meta=self.meta(run), ttl_seconds=request.ttl_seconds
            )
            return {"type": "save_weights_external", "path": str(path), "size_bytes": saved.size_bytes}

        return self.enqueue(run, request.seq_id, work)

    async def weights_info(self, request: WeightsInfo) -> dict:
        checkpoint = await asyncio.to_thread(self.open_checkpoint, request.tinker_path, tuple(cache.SEGMENTS))
        meta = checkpoint.meta
        return {
            "base_model": meta["base_model"],
            "is_lora": True,
            "lora_rank": meta["rank"],
            "train_unembed": False,
            "train_mlp": meta["train_mlp"],
            "train_attn": meta["train_attn"],
        }

    # -- sampling

    def new_sampler(self, session: Session, seq: int, model_path: str | None, folder: Path | None) -> SamplingSession:
        sampler_id = f"{session.session_id}:sample:{seq}"
        sampler = SamplingSession(sampler_id, session, self.model.name, model_path, folder)
        self.samplers[sampler_id] = session.samplers[sampler_id] = sampler
        return sampler

    async def create_sampling_session(self, request: types.CreateSamplingSessionRequest) -> dict:
        session, seq = self.session(request.session_id), request.sampling_session_seq_id
        sampler_id = f"{session.session_id}:sample:{seq}"
        if sampler_id not in self.samplers:
            if request.base_model is not None:
                self.check_base_model(request.base_model)
            if request.model_path is None:
                self.new_sampler(session, seq, None, None)
            else:
                checkpoint = await asyncio.to_thread(
                    self.open_checkpoint, request.model_path, ("sampler_weights", "weights")
                )
                self.check_base_model(checkpoint.meta["base_model"])
                if checkpoint.path.segment == "sampler_weights":
                    self.new_sampler(session, seq, request.model_path, checkpoint.folder)
                else:  # a training checkpoint: its weights are published for this session
                    tensors = await asyncio.to_thread(
                        safetensors.numpy.load_file, checkpoint.folder / "adapter.safetensors"
                    )
                    exported = await asyncio.to_thread(self.trainer.export, tensors, checkpoint.meta)
                    files = await self.adapter_files(*exported)
                    await self.sample_from_snapshot(session, seq, checkpoint.path.run_id, files, request.model_path)
        return {"type": "create_sampling_session", "sampling_session_id": sampler_id}

    async def get_sampler(self, sampler_id: str) -> dict:
        sampler = self.find(self.samplers, sampler_id, "sampler")
        return {"sampler_id": sampler_id, "base_model": sampler.base_model, "model_path": sampler.model_path}

    async def asample(self, body: bytes) -> dict:
        request = wire.decode_sample(body)
        sampler = self.find(self.samplers, request.sampling_session_id, "sampling session")
        self.check_alive(sampler.session)
        if request.seq_id not in sampler.requests:
            promise = Promise(cache.new_id("r"))
            try:
                wire.validate_sample(
                    request, vocab_size=self.model.vocab_size, context_tokens=self.sampler.context_tokens
                )
                future = self.sampler.submit(request, sampler.folder)  # Overloaded: 429, then the same seq_id again
            except ValueError as error:
                await self.settle(sampler, functools.partial(promise.fail, error), promise)
            else:
                promise.cancel = future.cancel
                future.add_done_callback(functools.partial(self.sampled, asyncio.get_running_loop(), sampler, promise))
            self.promises[promise.request_id] = promise
            sampler.requests[request.seq_id] = (
                promise,
                [f"{sampler.sampler_id}:{request.seq_id}:{i}" for i in range(request.num_samples)],
            )
        promise, sequence_ids = sampler.requests[request.seq_id]
        return {"request_id": promise.request_id, "sample_sequence_ids": sequence_ids}

    def sampled(
        self, loop: asyncio.AbstractEventLoop, sampler: SamplingSession, promise: Promise, future: Future
    ) -> None:
        """Runs in the sampler's thread: encode there, hand over the bytes."""
        try:
            answer = functools.partial(promise.resolve, wire.encode_sample(future.result()))
        except BaseException as error:  # CancelledError included
            answer = functools.partial(promise.fail, Gone("cancelled") if future.cancelled() else error)

        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(lambda: self.spawn(self.settle(sampler, answer, promise)))

    async def settle(self, sampler: SamplingSession, answer: Callable[[], None], promise: Promise) -> None:
        """Resolve a sample and tell whoever polls its whole session."""
        answer()
        sampler.completions.append(promise)
        async with sampler.completed:
            sampler.completed.notify_all()

    async def retrieve_futures(self, request: types.FuturesRetrieveRequest) -> dict:
        """What of one sampling session has finished since `prev_cursor`; the results are then fetched one by one."""
        sampler = self.find(self.samplers, request.target.sampling_session_id, "sampling session")
        timeout = min(request.timeout if request.timeout is not None else POLL_S, POLL_S)
        async with sampler.completed:
            if len(sampler.completions) <= request.prev_cursor and timeout > 0:
                more = sampler.completed.wait_for(
                    lambda: len(sampler.completions) > request.prev_cursor or self.closing.is_set()
                )
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(more, timeout)
        completions = [
            {"state": "failed", "request_id": p.request_id}
            if p.failed
            else {"state": "finished", "request_id": p.request_id, "response_payload_uncompressed_size": len(p.body)}
            for p in sampler.completions[request.prev_cursor :]
        ]
        return {"completions": completions, "cursor": len(sampler.completions)}

    async def cancel_future(self, request: types.FutureRetrieveRequest) -> dict:
        promise = self.find(self.promises, request.request_id, "future")
        promise.cancel()
        return {"request_id": promise.request_id}

    # -- what the client and the CLI may look at

    async def training_runs(self) -> list[dict]:
        """Every run that is live or has checkpoints, newest first."""
        known = await asyncio.to_thread(self.store.runs)
        checkpoints = await asyncio.to_thread(self.store.list)
        return [self.training_run(run_id, info, checkpoints) for run_id, info in known]

    def training_run(self, run_id: str, info: dict, checkpoints: list[cache.Checkpoint]) -> dict:
        info = self.runs[run_id].info if run_id in self.runs else info
        mine = [c for c in checkpoints if c.path.run_id == run_id]
        newest = lambda segment: next((describe(c) for c in mine if c.path.segment == segment), None)
        run = types.TrainingRun(
            training_run_id=run_id,
            base_model=info["base_model"],
            model_owner="local",
            is_lora=True,
            lora_rank=info["rank"],
            last_request_time=info["last_request_time"],
            user_metadata=info["user_metadata"],
            last_checkpoint=newest("weights"),
            last_sampler_checkpoint=newest("sampler_weights"),
        )
        return run.model_dump(mode="json")

    async def get_training_run(self, run_id: str) -> dict:
        info = await asyncio.to_thread(self.store.run, run_id)
        if info is None:
            raise NotFound(f"unknown training run {run_id!r}")
        return self.training_run(run_id, info, await asyncio.to_thread(self.store.list, run_id))

    def sign(self, object_id: str, file: str, expires: int) -> str:
        return hmac.new(self.secret, f"{object_id}/{file}/{expires}".encode(), hashlib.sha256).hexdigest()

    async def sweep(self) -> None:
        """Once a minute: forget old results, remove expired checkpoints."""
        while True:
            await asyncio.sleep(60)
            old = time.monotonic() - KEEP_RESULTS_S
            expired = {p for p in self.promises.values() if p.done.is_set() and p.finished_at < old}
            self.promises = {key: p for key, p in self.promises.items() if p not in expired}
            for run in self.runs.values():
                run.requests = {seq: p for seq, p in run.requests.items() if p not in expired}
            for sampler in self.samplers.values():
                sampler.requests = {seq: pair for seq, pair in sampler.requests.items() if pair[0] not in expired}
            await asyncio.to_thread(self.store.sweep)

    async def close(self) -> None:
        self.closing.set()
        for sampler in self.samplers.values():
            async with sampler.completed:
                sampler.completed.notify_all()


def check_optimizer(kind: str) -> None:
    if kind != "adamw":
        raise ValueError(f"optimizer {kind!r} is not supported; this server has adamw")


def describe(c: cache.Checkpoint) -> types.Checkpoint:
    kind: Any = cache.SEGMENTS[c.path.segment]
    return types.Checkpoint(
        checkpoint_id=f"{c.path.segment}/{c.path.name}",
        checkpoint_type=kind,
        time=c.created,
        tinker_path=str(c.path),
        size_bytes=c.size_bytes,
        public=c.public,
        user_metadata=c.user_metadata,
        expires_at=c.expires_at,
    )


# ---- HTTP


def http_status(error: Exception) -> int:
    """The one table from exceptions to synchronous answers. No 408, 409 or 5xx for what is final: the SDK would retry
    it.
    """
    for kind, status in (
        (pydantic.ValidationError, 422),
        (NotFound, 404),
        (Gone, 410),
        (Overloaded, 429),
        (ValueError, 400),
        (ClientDisconnect, 400),  # nobody reads it
    ):
        if isinstance(error, kind):
            return status
    return 500


async def on_error(request: Request, error: Exception) -> JSONResponse:
    status = error.status_code if isinstance(error, HTTPException) else http_status(error)
    if status == 500:
        log.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return JSONResponse({"detail": error.detail if isinstance(error, HTTPException) else str(error)}, status)


def routes(service: Service) -> list[Route]:
    s, limit = service, service.config.max_body_mb * 2**20
    # JSON is parsed under the GIL, in no thread without stopping the loop: no more of it than a prompt can be.
    prompts = min(limit, 2**18 + 64 * service.sampler.context_tokens)

    async def read(request: Request) -> bytes:
        most = prompts if request.url.path == f"{API}/asample" else limit
        body = bytearray()
        async for part in request.stream():
            body += part
            if len(body) > most:
                allowed = (
                    f"a prompt has {s.sampler.context_tokens} tokens at most" if most == prompts else "--max-body-mb"
                )
                raise HTTPException(413, f"the request is larger than {most} bytes ({allowed})")
        return bytes(body)

    def post(
        path: str, verb: Callable[[Any], Awaitable[dict | Response]], kind: type[pydantic.BaseModel] | None = None
    ) -> Route:
        """`kind`: the type of the request, None for the raw body."""

        async def endpoint(request: Request) -> Response:
            body = await read(request)
            answer = await verb(body if kind is None else kind.model_validate_json(body))
            return answer if isinstance(answer, Response) else JSONResponse(answer)

        return Route(f"{API}/{path}", endpoint, methods=["POST"])

    def route(path: str, verb: Callable[[Request], Awaitable[Any]], method: str = "GET") -> Route:
        async def endpoint(request: Request) -> Response:
            answer = await verb(request)
            return (
                answer
                if isinstance(answer, Response)
                else JSONResponse(answer)
                if answer is not None
                else Response(status_code=204)
            )

        return Route(f"{API}/{path}", endpoint, methods=[method])

    def page(request: Request, items: list) -> tuple[list, dict]:
        offset, limit = (int(request.query_params.get(key, default)) for key, default in (("offset", 0), ("limit", 20)))
        if offset < 0 or limit < 0:
            raise ValueError(f"offset {offset} and limit {limit} must not be negative")
        return items[offset : offset + limit], {"offset": offset, "limit": limit, "total_count": len(items)}

    async def constant(answer: dict) -> dict:
        return answer

    async def list_runs(request: Request) -> dict:
        items, cursor = page(request, await s.training_runs())
        return {"training_runs": items, "cursor": cursor}

    async def list_checkpoints(request: Request) -> dict:
        run_id = request.path_params.get("run")
        items = [describe(c).model_dump(mode="json") for c in await asyncio.to_thread(s.store.list, run_id)]
        if run_id is not None:
            return {"checkpoints": items}
        items, cursor = page(request, items)
        return {"checkpoints": items, "cursor": cursor}

    def named(request: Request) -> TinkerPath:
        return TinkerPath.parse("tinker://{run}/{segment}/{name}".format(**request.path_params))

    async def ttl(request: Request) -> None:
        body = TimeToLive.model_validate_json(await read(request))
        await asyncio.to_thread(s.store.set_ttl, named(request), body.ttl_seconds)

    async def external_urls(request: Request) -> dict:
        checkpoint = await asyncio.to_thread(s.store.open, named(request))
        if checkpoint.path.segment != "external_weights":
            raise ValueError(f"{checkpoint.path} is not an external checkpoint: save it with save_weights_external")
        expires, folder = int(time.time() + EXTERNAL_URL_S), checkpoint.folder.name
        link = lambda file: (
            f"{request.base_url}download/{folder}/{file}?expires={expires}&signature={s.sign(folder, file, expires)}"
        )
        when = datetime.now(UTC) + timedelta(seconds=EXTERNAL_URL_S)
        return {"urls": {file: link(file) for file in checkpoint.files}, "expires": when.isoformat()}

    async def download(request: Request) -> Response:
        """Links carry their own permission: clients fetch them without the key."""
        folder, file = request.path_params["object"], request.path_params["file"]
        expires, signature = request.query_params.get("expires", "0"), request.query_params.get("signature", "")
        genuine = re.fullmatch("[0-9]{1,12}", expires) and hmac.compare_digest(
            signature.encode(), s.sign(folder, file, int(expires)).encode()
        )
        if not genuine or int(expires) < time.time():
            raise HTTPException(403, "this link is wrong or has expired; ask for external_weights_urls again")
        path = s.store.root / "objects" / folder / file
        if not path.is_file():
            raise NotFound(f"{file} is gone: its checkpoint was deleted")
        return FileResponse(path)

    async def sessions(request: Request) -> dict:
        items, _ = page(request, list(reversed(s.sessions)))
        return {"sessions": items}

    async def show_session(request: Request) -> dict:
        session = s.find(s.sessions, request.path_params["session"], "session")
        return {
            "training_run_ids": list(session.runs),
            "sampler_ids": list(session.samplers),
            "user_metadata": session.user_metadata,
            "display_name": session.display_name,
        }

    async def finish(request: Request) -> None:
        await s.end_session(s.find(s.sessions, request.path_params["session"], "session"))

    on_path = lambda call: lambda request: asyncio.to_thread(call, named(request))
    checkpoint = "training_runs/{run}/checkpoints/{segment}/{name}"
    models = [
        {"model_name": s.model.name, "max_context_length": s.trainer.row_len, "trainable": True, "sampleable": True}
    ]
    return [
        post("client/config", lambda _: constant({})),
        post("client/dynamic_config", lambda _: constant({"refresh_interval_sec": 300, "sample_cancel_enabled": True})),
        post("telemetry", lambda _: constant({"status": "accepted"})),
        post("create_session", s.create_session, types.CreateSessionRequest),
        post("session_heartbeat", s.session_heartbeat, types.SessionHeartbeatRequest),
        post("create_model", s.create_model, types.CreateModelRequest),
        post("get_info", s.get_info, types.GetInfoRequest),
        post("forward_backward", s.forward_backward),
        post("optim_step", s.optim_step, types.OptimStepRequest),
        post("save_weights", s.save_weights, types.SaveWeightsRequest),
        post("load_weights", s.load_weights, types.LoadWeightsRequest),
        post("save_weights_for_sampler", s.save_weights_for_sampler, types.SaveWeightsForSamplerRequest),
        post("save_weights_external", s.save_weights_external, types.SaveWeightsExternalRequest),
        post("weights_info", s.weights_info, WeightsInfo),
        post("create_sampling_session", s.create_sampling_session, types.CreateSamplingSessionRequest),
        post("asample", s.asample),
        post("retrieve_future", s.retrieve_future, types.FutureRetrieveRequest),
        post("retrieve_futures", s.retrieve_futures, types.FuturesRetrieveRequest),
        post("cancel_future", s.cancel_future, types.FutureRetrieveRequest),
        route("healthz", lambda _: constant({"status": "ok"})),
        route("get_server_capabilities", lambda _: constant({"supported_models": models})),
        route("samplers/{sampler}", lambda request: s.get_sampler(request.path_params["sampler"])),
        route("sessions", sessions),
        route("sessions/{session}", show_session),
        route("sessions/{session}/finish", finish, "POST"),
        route("training_runs", list_runs),
        route("training_runs/{run}", lambda request: s.get_training_run(request.path_params["run"])),
        route("training_runs/{run}/checkpoints", list_checkpoints),
        route("checkpoints", list_checkpoints),
        route(f"{checkpoint}/publish", on_path(lambda path: s.store.set_public(path, True)), "POST"),
        route(f"{checkpoint}/publish", on_path(lambda path: s.store.set_public(path, False)), "DELETE"),
        route(f"{checkpoint}/ttl", ttl, "PUT"),
        route(f"{checkpoint}/external_weights_urls", external_urls),
        route(checkpoint, on_path(s.store.delete), "DELETE"),
        Route("/download/{object}/{file:path}", download),
    ]


class CheckKey:
    """ASGI middleware: every API call carries the key, where one is set."""

    def __init__(self, app, key: str | None):
        self.app, self.key = app, key

    async def __call__(self, scope, receive, send):
        if self.key and scope["type"] == "http" and scope["path"].startswith(API):
            sent = dict(scope["headers"]).get(b"x-api-key")
            if sent is None or not hmac.compare_digest(sent, self.key.encode()):
                detail = (
                    "X-API-Key is missing: set TINKER_API_KEY" if sent is None else "X-API-Key is not this server's key"
                )
                return await JSONResponse({"detail": detail}, 401 if sent is None else 403)(scope, receive, send)
        await self.app(scope, receive, send)


def application(service: Service) -> Starlette:
    @contextlib.asynccontextmanager
    async def lifespan(_):
        sweeper = service.spawn(service.sweep())
        yield
        sweeper.cancel()

    handlers = {
        HTTPException: on_error,
        LookupError: on_error,
        ValueError: on_error,
        Overloaded: on_error,
        ClientDisconnect: on_error,
        Exception: on_error,
    }
    middleware = [Middleware(CheckKey, key=service.config.api_key)]
    return Starlette(routes=routes(service), middleware=middleware, exception_handlers=handlers, lifespan=lifespan)


# ---- start and stop


class Server(uvicorn.Server):
    """uvicorn that tells the service when to let its long-polls go."""

    def __init__(self, config: uvicorn.Config, service: Service):
        super().__init__(config)
        self.service = service

    async def shutdown(self, sockets=None):
        await self.service.close()
        await super().shutdown(sockets)


def bind(config: ServerConfig) -> socket.socket:
    """Take the port before the minute of loading, so that a busy one is said at once."""
    if config.host not in ("127.0.0.1", "localhost", "::1") and not config.api_key:
        raise ValueError(
            f"--host {config.host} is reachable from elsewhere: set --api-key (or $TINKER_SERVER_API_KEY) as well"
        )
    if config.api_key and not config.api_key.startswith("tml-"):
        raise ValueError("--api-key must start with tml-: the SDK accepts no other")
    sock = socket.socket(socket.AF_INET6 if ":" in config.host else socket.AF_INET)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((config.host, config.port))
        sock.listen(1024)  # clients may connect while the model loads; they are served when it has
    except OSError as error:
        raise ValueError(
            f"cannot listen on {config.host}:{config.port}: {error.strerror}; "
            "choose another --port (0 takes a free one)"
        ) from error
    return sock


def main(config: ServerConfig) -> None:
    started = time.monotonic()
    sock = bind(config)
    url = f"http://{config.host}:{sock.getsockname()[1]}"
    config.state_dir.mkdir(parents=True, exist_ok=True)
    store = cache.Store(config.state_dir)
    jax.config.update("jax_compilation_cache_dir", str(store.root / "xla"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
    log.info("loading %s on %d %s device(s)", config.model.model, jax.device_count(), jax.default_backend())
    model = load(config.model, state_dir=config.state_dir)
    trainer = Trainer(model, config.trainer)
    trainer.warm_up()
    sampler = EmbeddedEngine(model, config.sampler)
    sampler.warm_up()
    service = Service(config, store, trainer, sampler)
    log.info(
        "%s: tiles of %d x %d tokens, %d adapters of rank <= %d; sampler: %d slots of %d tokens",
        model.name,
        trainer.rows,
        trainer.row_len,
        config.trainer.max_adapters,
        config.model.max_rank,
        config.sampler.slots,
        config.sampler.context,
    )
    log.info(
        "ready in %.0f s: TINKER_BASE_URL=%s TINKER_API_KEY=%s",
        time.monotonic() - started,
        url,
        "<yours>" if config.api_key else "tml-any",
    )
    options = uvicorn.Config(application(service), log_level="warning", timeout_graceful_shutdown=2, lifespan="on")
    gc.collect()
    gc.freeze()  # 700,000 objects of start-up: a full collection over them holds a heartbeat for 400 ms
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # uvicorn raises either again when it has shut down
    with contextlib.suppress(KeyboardInterrupt):
        Server(options, service).run(sockets=[sock])
    sampler.close()
    store.close()
    log.info("stopped")
    sys.stderr.flush()
    os._exit(0)  # a tile may still be computing on the device thread; nobody waits for it any more


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s", datefmt="%H:%M:%S")
    for noisy in ("absl", "httpx", "jax._src.xla_bridge"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # or it says at every start that there is no torch
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    try:
        given = tyro.cli(
            ServerConfig, description="A Tinker server: trains and samples LoRA adapters over one base model."
        )
        main(dataclasses.replace(given, api_key=given.api_key or os.environ.get("TINKER_SERVER_API_KEY")))
    except (ValueError, RuntimeError) as error:
        sys.exit(f"server.py: {error}")
    except KeyboardInterrupt:  # while the model was loading
        print("server.py: interrupted before it was ready", file=sys.stderr)
        sys.exit(130)
