"""The router: vLLM replicas that look like one server, and each prompt where its beginning is cached already.

    asample -> [choose] -> the replica that holds the prefix -> tokens, log-probs -> the reply's blocks are noted too
    save_weights_for_sampler -> folder -> [load] on every replica, or on none -> the next asample may name it

A library (`Router`, which the sampler owns) and a program: any OpenAI or vLLM client takes it for one server.

Invariants
  1. A name is served when every ready replica has loaded it, and until its last request has ended; never on a part.
  2. No answer to a request ejects a replica, least of all a 4xx: a broken connection does, its /health, long silence.
  3. A replica gets traffic only after every live adapter and the fleet's state (paused, asleep).
  4. A request is tried elsewhere as long as no byte of an answer has left; a client that leaves ends its generation.
  5. What is remembered of prompts is bounded by what the replicas' own caches hold.

Left out: vLLM's KV events (this index is an estimate: it evicts in the engine's order, but does not watch it evict);
a batch that streams goes whole to the least loaded replica; TLS towards clients.
Run: `uv run router.py --replica http://127.0.0.1:8001 --replica http://127.0.0.1:8002`
Read first: `choose`, then `Router.forward`, then `Router.load_lora`.
"""

import asyncio
import collections
import contextlib
import dataclasses
import errno
import functools
import gc
import hmac
import itertools
import json
import logging
import os
import random
import re
import resource
import socket
import sys
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Sequence
from typing import Any
from urllib.parse import urlsplit

import orjson
import tyro
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

log = logging.getLogger("router")

PREFILL_TOKENS = 2048  # about one engine step: a prompt with more of them uncached weighs as several requests
COUNTED = ("affinity", "spilled", "unmatched", "retries", "ejections", "refused", "prompt_tokens", "cached_tokens")
MOST_SAMPLES = 1024  # of one request that count: no client makes a load of its own choosing
FORKS = 8  # ways on from a block beyond which it is a template; as many conversations of one group may begin alike
RETRIES = 2  # of a request that broke off with its replica; if it is what kills them, it shall not kill the fleet
CONNECT_S = 5.0
LAG_S = 0.2  # between two looks at a folder that a replica's mount does not show yet
GENERATE = {"/v1/completions", "/v1/chat/completions", "/inference/v1/generate"}
UNDO = {"/pause": "/resume", "/sleep": "/wake_up"}
CONTROL = (*UNDO, *UNDO.values(), "/reset_prefix_cache")
JSON_LINE = b"content-type: application/json\r\n"
KV_BLOCKS = 16_384  # the cache of a replica that does not say
MAX_BODY_BYTES = 64 << 20
HOP = {b"connection", b"keep-alive", b"transfer-encoding", b"content-length", b"upgrade", b"te", b"trailer", b"expect"}
OURS = HOP | {b"host", b"x-request-id", b"accept-encoding"}  # replies are read here, so replicas shall not compress
LOST = (OSError, EOFError)  # a replica that cannot be reached, or breaks off; a timeout is an OSError too
URL = re.compile(r"https?://([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(:\d+)?/*")
NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RouterConfig:
    replica: tyro.conf.UseAppendAction[tuple[str, ...]] = ()  # http://host:port of one replica; give it once for each
    host: str = "127.0.0.1"  # address to listen on; any but loopback needs an api key
    port: int = 8080  # 0 takes a free one
    # Unset, the two keys come from $ROUTER_API_KEY and $ROUTER_UPSTREAM_API_KEY.
    api_key: str | None = dataclasses.field(default=None, repr=False)  # asked of clients
    upstream_api_key: str | None = dataclasses.field(
        default=None, repr=False
    )  # sent to replicas instead of the client's
    imbalance: float = 16.0  # requests that the replica with the prefix may be ahead of the least loaded one
    tokenizer: str | None = None  # a Hugging Face directory, to know text prompts by their tokens and not their bytes
    max_in_flight: int = 4096  # requests accepted, waiting ones included; more are answered 429
    wait_s: float = 60.0  # how long a request waits while no replica is ready
    probe_every_s: float = 2.0  # between two looks at a replica
    patience_s: float = 300.0  # without an answer to a look: a replica that compiles or is busy is silent, not dead
    load_timeout_s: float = 120.0  # until every replica has loaded an adapter, or none has
    drain_timeout_s: float = 600.0  # until the last request of a version that is unloaded

    def __post_init__(self):
        for name, value in vars(self).items():
            if isinstance(value, int | float) and not value >= 0:
                raise ValueError(f"--{name.replace('_', '-')} is {value}: it must be 0 or more")


class Refusal(RuntimeError):
    """The fleet did not do it; answered with its status."""

    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status = status


Ask = Callable[["Replica"], Awaitable[str | None]]  # None: done; else why not


# ---- which replica: a pure core


def block_hashes(data: bytes, seed: int, step: int) -> list[int]:
    """One hash a full block of `step` bytes, each over the one before it (at first `seed`): two prompts share a block's
    hash exactly when they share everything up to its end. Python's own hash: keyed anew in each process, 60 bits wide.
    """
    return list(
        itertools.accumulate(
            (data[end - step : end] for end in range(step, len(data) + 1, step)),
            lambda before, block: hash((before, block)),
            initial=seed,
        )
    )[1:]


@dataclasses.dataclass(slots=True, eq=False)
class Block:
    parent: "Block | None"
    owners: int = 0  # replicas that hold it
    successors: int = 0  # different blocks that came after it, and are held


class Index:
    """Which replica's cache holds which blocks, as far as the router can know: what it sent there, least recently used
    out first. A chain's leaf counts as older than its root, as in vLLM: no block outlives those that lead to it.
    """

    def __init__(self):
        self.versions: dict[str, dict[int, Block]] = {}  # KV of one adapter is useless under another
        self.caches: dict[Hashable, collections.OrderedDict[int, str]] = {}  # of a replica: block -> its version
        self.capacity: dict[Hashable, int] = {}  # in blocks

    def add(self, replica: Hashable, capacity: int) -> None:
        """A replica with an empty cache."""
        self.remove(replica)
        self.caches[replica], self.capacity[replica] = collections.OrderedDict(), capacity

    def remove(self, replica: Hashable) -> None:
        self.capacity.pop(replica, None)
        for digest, version in self.caches.pop(replica, {}).items():
            self._disown(digest, version)

    def forget(self, version: str) -> None:
        for digest in self.versions.pop(version, {}):
            for cache in self.caches.values():
                cache.pop(digest, None)

    def known(self, replica: Hashable, hashes: Sequence[int]) -> int:
        """How many leading blocks the replica holds."""
        cache, n = self.caches[replica], 0
        while n < len(hashes) and hashes[n] in cache:
            n += 1
        return n

    def common(self, version: str, hashes: Sequence[int]) -> int:
        """How many leading blocks identify no prompt (a chat template, a tool list): all up to the last one that every
        replica holds, or that goes on in more than FORKS ways.
        """
        blocks, everyone = self.versions.get(version, {}), len(self.caches)
        for n in range(len(hashes), 0, -1):
            block = blocks.get(hashes[n - 1])
            if block and (block.successors > FORKS or block.owners == everyone):
                return n
        return 0

    def record(self, replica: Hashable, version: str, hashes: Sequence[int]) -> None:
        """The replica has read or written these blocks just now."""
        cache, blocks, parent = self.caches[replica], self.versions.setdefault(version, {}), None
        for digest in hashes:
            if (block := blocks.get(digest)) is None:
                block = blocks[digest] = Block(parent)
                if parent:
                    parent.successors += 1
            if digest not in cache:
                cache[digest] = version
                block.owners += 1
            parent = block
        for digest in reversed(hashes):
            cache.move_to_end(digest)
        while len(cache) > self.capacity[replica]:
            self._disown(*cache.popitem(last=False))

    def _disown(self, digest: int, version: str) -> None:
        blocks = self.versions[version]
        block = blocks[digest]
        block.owners -= 1
        if not block.owners:
            del blocks[digest]
            if block.parent:
                block.parent.successors -= 1


def choose(known: Sequence[int], common: int, loads: Sequence[float], *, blocks: int, imbalance: float, turn: int):
    """(position, "affinity" | "spilled" | "unmatched") of the replica for a prompt of `blocks` full blocks.

    known: leading blocks that each replica holds; common: those that identify no prompt; loads: requests in flight,
    long prompts weighing more; turn: who is first among equals. A prompt that all of them hold whole is affinity too.
    """
    n = len(loads)
    least = min(range(n), key=lambda i: (loads[i], (i - turn) % n))
    if max(known) <= common:
        return least, "affinity" if known[least] == blocks > 0 else "unmatched"
    near = [i for i in range(n) if known[i] > common and loads[i] <= loads[least] + imbalance]
    if not near:
        return least, "spilled"
    return max(near, key=lambda i: (known[i], -loads[i])), "affinity"


# ---- what a request is known by


@dataclasses.dataclass(slots=True)
class Prompt:
    key: bytes  # 4 bytes a token; empty: any replica will do
    tokens: bool  # the key is token ids; else text, a token of which is about as long
    version: str  # whose KV it makes
    seed: int
    hashes: list[int]


def _ids(ids: Any) -> bytes:
    return array("I", ids).tobytes()


def _message(message: dict) -> bytes:
    """The same for a reply and for the message that repeats it in the next turn."""
    return json.dumps([message.get("role"), message.get("content"), message.get("tool_calls") or None]).encode() + b"\n"


def parsed(text: bytes) -> Any:
    """JSON; ValueError."""
    try:
        return orjson.loads(text)
    except ValueError:
        return json.loads(text)  # which takes what Python writes, too: NaN, half a surrogate


def prompt_key(payload: dict, tokenizer: Any = None) -> tuple[bytes, bool]:
    """(the prompt, whether it is token ids: 4 bytes each; text is as good, a token being about as long). Nothing if it
    is not one prompt: any replica will do.
    """
    with contextlib.suppress(Exception):  # a template's own, too: the engine will say what is wrong
        if (messages := payload.get("messages")) and tokenizer:
            chat = dict(tools=payload.get("tools"), add_generation_prompt=True, return_dict=False)
            return _ids(tokenizer.apply_chat_template(messages, **chat)), True
        if messages:
            return json.dumps(payload.get("tools")).encode() + b"".join(map(_message, messages)), False
        prompt = payload.get("prompt", payload.get("token_ids"))
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], list | str):
            (prompt,) = prompt
        if isinstance(prompt, str):
            return (_ids(tokenizer(prompt)["input_ids"]), True) if tokenizer else (prompt.encode(), False)
        return _ids(prompt), True
    return b"", True


def replies(body: bytes, *, tokens: bool) -> tuple[list[bytes], dict]:
    """(what followed the prompt in each choice, the usage) of a JSON answer or of a whole stream of events."""
    events = [line[6:] for line in body.splitlines() if line.startswith(b"data: {")] or [body]
    ids, texts, said, usage = collections.defaultdict(list), collections.defaultdict(str), {}, {}
    for event in map(parsed, events):
        usage = event.get("usage") or usage
        for choice in event.get("choices", ()):
            index, message = choice["index"], choice.get("message") or choice.get("delta")
            ids[index] += choice.get("token_ids") or ()
            texts[index] += choice.get("text") or (message or {}).get("content") or ""
            if message:
                said[index] = {"role": "assistant", "tool_calls": message.get("tool_calls")}
    if tokens:
        return [_ids(each[:-1]) for each in ids.values()], usage  # nobody has computed the last token's KV
    return [_message(said[i] | {"content": text}) if i in said else text.encode() for i, text in texts.items()], usage


# ---- one replica


@dataclasses.dataclass(slots=True)
class Answer:
    status: int = 0
    headers: list[tuple[bytes, bytes]] = dataclasses.field(default_factory=list)
    body: bytes = b""

    @property
    def text(self) -> str:
        return f"{self.status} {self.body[:300].decode(errors='replace')}"


Sink = Callable[[Answer, bytes], Awaitable[None]]  # takes the chunks of a stream as they come
Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Replica:
    """A vLLM server over kept-alive HTTP/1.1. By hand: the usual clients cost more CPU than all else that is done here
    (0.24 ms a request with aiohttp, over 1 ms with httpx, against 0.1).
    """

    def __init__(self, url: str, api_key: str | None, state: str = "starting"):
        try:
            parts = urlsplit(url)
            port = parts.port if parts.port is not None else {"http": 80, "https": 443}[parts.scheme]
        except (ValueError, KeyError):
            port = 0
        if not port or not URL.fullmatch(url):
            raise ValueError(f"replica {url.rpartition('@')[2]!r}: give it as http://host:port")  # no password in a log
        self.url, self.tls = url.rstrip("/"), parts.scheme == "https"
        self.address = parts.hostname or "", port
        self.headers = f"host: {parts.netloc}\r\n".encode()
        if api_key is not None:
            self.headers += f"authorization: Bearer {api_key}\r\n".encode()
        self.idle: list[Connection] = []
        self.open: set[asyncio.StreamWriter] = set()
        self.state = state  # "ready": gets traffic; "out": ejected, or new to a running fleet
        self.joined = 0  # times
        self.on_trial = False  # back, but one request at a time until the first has succeeded
        self.load, self.in_flight = 0.0, 0
        self.look = asyncio.Event()  # now, not when the next probe is due
        self.trouble = ""  # what was last said of it in the log
        self.watcher: asyncio.Task | None = None

    async def ask(self, method: str, target: str, payload: Any = None, *, fresh: bool = False) -> Answer:
        body = b"" if payload is None else json.dumps(payload).encode()
        return await self.send(self.request(method.encode(), target.encode(), JSON_LINE, body), fresh=fresh)

    def request(self, method: bytes, target: bytes, headers: bytes, body: bytes) -> bytes:
        head = b"%b %b HTTP/1.1\r\n%b%bcontent-length: %d\r\n\r\n"
        return head % (method, target, self.headers, headers, len(body)) + body

    async def send(self, request: bytes, sink: Sink | None = None, *, fresh: bool = False) -> Answer:
        """The answer; if it is a 200 its chunks go to the sink, too. Raises OSError or EOFError: the replica is lost;
        Refusal: it broke off when the sink had got something.
        """
        broken: BaseException | None = None
        if not fresh and (kept := self._kept()):
            answer = Answer()
            try:
                return await self._exchange(kept, request, answer, sink)
            except LOST as error:  # closed while it was idle, most likely; but only once: the request may do it
                if answer.status or self.state == "out":
                    raise
                broken = error
        try:
            async with asyncio.timeout(CONNECT_S):
                connection = await asyncio.open_connection(*self.address, ssl=self.tls or None)
        except ConnectionRefusedError as error:
            raise broken or error from None  # it was not idle: it has died of the request, perhaps
        self.open.add(connection[1])
        return await self._exchange(connection, request, Answer(), sink)

    def _kept(self) -> Connection | None:
        """An idle connection that is still good: what the replica has sent unasked would be taken for an answer. (There
        is no public way to look.)
        """
        while self.idle:
            reader, writer = self.idle.pop()
            if not (reader._buffer or reader.at_eof() or writer.is_closing()):  # pyright: ignore[reportAttributeAccessIssue]
                return reader, writer
            self.drop(writer)
        return None

    async def _exchange(self, connection: Connection, request: bytes, answer: Answer, sink: Sink | None) -> Answer:
        """Keeps the connection if the answer came whole; ends it, and what is still being generated, otherwise."""
        (reader, writer), parts = connection, []
        try:
            writer.write(request)
            first, *lines = (await reader.readuntil(b"\r\n\r\n"))[:-4].split(b"\r\n")
            answer.headers = [(k.strip().lower(), v.strip()) for k, _, v in (line.partition(b":") for line in lines)]
            answer.status, fields = int(first[9:12]), dict(answer.headers)
            if not (request.startswith(b"HEAD ") or answer.status in (204, 304)):
                async for chunk in _body(reader, fields):
                    parts.append(chunk)
                    if sink and answer.status == 200:
                        await sink(answer, chunk)
        except BaseException as error:
            self.drop(writer)
            if sink and parts and isinstance(error, LOST):
                raise Refusal(502, f"{self.url} broke off") from error
            if isinstance(error, ValueError | asyncio.LimitOverrunError):
                raise ConnectionError(f"{self.url} does not speak HTTP/1.1: {error}") from error
            raise
        answer.body = b"".join(parts)
        if writer in self.open and fields.get(b"connection", b"").lower() != b"close":
            self.idle.append(connection)
        else:
            self.drop(writer)
        return answer

    def drop(self, writer: asyncio.StreamWriter) -> None:
        self.open.discard(writer)
        writer.transport.abort()

    def prune(self) -> None:
        """Let go of idle connections that the replica has closed."""
        dead = lambda connection: connection[0].at_eof() or connection[1].is_closing()
        closed = [connection for connection in self.idle if dead(connection)]
        self.idle = [connection for connection in self.idle if not dead(connection)]
        for _, writer in closed:
            self.drop(writer)

    def hang_up(self) -> None:
        """End every connection: requests that wait on them are tried elsewhere."""
        self.idle.clear()
        for writer in list(self.open):
            self.drop(writer)


async def _body(reader: asyncio.StreamReader, fields: dict[bytes, bytes]) -> AsyncIterator[bytes]:
    if (length := fields.get(b"content-length")) is not None:
        yield await reader.readexactly(int(length))
    elif b"chunked" in fields.get(b"transfer-encoding", b""):
        while size := int((await reader.readuntil(b"\r\n")).partition(b";")[0], 16):
            yield (await reader.readexactly(size + 2))[:-2]
        await reader.readuntil(b"\r\n")
    else:
        yield await reader.read()
        fields[b"connection"] = b"close"


# ---- the fleet


def no_file_left(error: BaseException) -> bool:
    return isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE)


def to_the_end(method):
    """What has begun on a part of the fleet goes on though its caller is cancelled, as when the client has left."""

    @functools.wraps(method)
    async def whole(*given):
        return await asyncio.shield(asyncio.ensure_future(method(*given)))

    return whole


@dataclasses.dataclass(kw_only=True, slots=True)
class Call:
    """A request on its way to a replica."""

    method: bytes = b"POST"
    target: bytes = b"/v1/completions"  # path and query
    headers: bytes = b""  # complete lines
    payload: dict = dataclasses.field(default_factory=dict)  # empty: the body is none of ours
    body: bytes = b""  # the payload as it came
    request_id: bytes = b""


class Router:
    """Replicas as one server. `async with Router(config) as router:` watches them; all its methods are for one loop."""

    def __init__(self, config: RouterConfig):
        self.config = config
        self.replicas = [Replica(url, config.upstream_api_key) for url in dict.fromkeys(config.replica)]
        self.index, self.block_tokens = Index(), 16
        self.models: list[dict] = []  # the base's cards, as the first replica to join listed them
        self.adapters: dict[str, str] = {}  # name -> path, on every ready replica
        self.written: dict[str, int | None] = {}  # name -> when its folder was, at its load
        self.closed: set[str] = set()  # adapters that take no new requests: their last are awaited
        self.modes: dict[str, str] = {}  # "/pause", "/sleep" while in force -> its query
        self.tried_modes: set[str] = set()  # those that a replica may be in without our knowing
        self.generation = 0  # changes of the adapters and modes
        self.control = asyncio.Lock()  # one change at a time; a replica joins between two
        self.some_ready, self.ended = asyncio.Event(), asyncio.Event()
        self.in_flight, self.using, self.turn = 0, collections.Counter(), itertools.count()
        self.counts, self.tokenizer = collections.Counter(), None
        if config.tokenizer:
            from transformers import AutoTokenizer

            self.tokenizer = AutoTokenizer.from_pretrained(config.tokenizer)

    async def __aenter__(self) -> "Router":
        for replica in self.replicas:
            replica.watcher = asyncio.create_task(self._watch(replica))
        self.minutes = asyncio.create_task(self._log_minutes())
        return self

    async def __aexit__(self, *_) -> None:
        tasks = [self.minutes, *(replica.watcher for replica in self.replicas if replica.watcher)]
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        for replica in self.replicas:
            replica.hang_up()

    @property
    def ready(self) -> list[Replica]:
        return [replica for replica in self.replicas if replica.state == "ready"]

    # -- requests

    async def generate(self, payload: dict, *, path: str = "/v1/completions") -> dict:
        """The engine's answer to the engine's request. ValueError or LookupError: it was refused (4xx); RuntimeError:
        the fleet failed.
        """
        answer = await self.serve(Call(target=path.encode(), headers=JSON_LINE, payload=payload, request_id=new_id()))
        if answer.status != 200:
            raise ValueError(answer.text) if answer.status < 500 else Refusal(answer.status, answer.text)
        return parsed(answer.body)

    async def serve(self, call: Call, sink: Sink | None = None) -> Answer:
        """As `forward`; but prompts of a batch go each its own way, and their choices come back in their order."""
        prompts = call.payload.get("prompt")
        if sink or not isinstance(prompts, list) or len(prompts) < 2 or not isinstance(prompts[0], list | str):
            return await self.forward(call, sink)
        if len(prompts) > self.config.max_in_flight:
            raise ValueError(f"prompt holds {len(prompts)} prompts; at most {self.config.max_in_flight} are in flight")
        payload = json.loads(call.body) if call.body else call.payload  # with integers of any size
        alone = lambda i, prompt: dataclasses.replace(
            call, payload=payload | {"prompt": prompt}, body=b"", request_id=b"%b-%d" % (call.request_id, i)
        )
        tasks = [asyncio.create_task(self.forward(alone(i, prompt))) for i, prompt in enumerate(prompts)]
        try:
            answers = await asyncio.gather(*tasks)
        finally:  # one has failed, or the client has left: nobody wants the others
            for task in tasks:
                task.cancel()
        if failed := [answer for answer in answers if answer.status != 200]:
            return failed[0]
        usage = collections.Counter()
        try:
            parts = [parsed(answer.body) for answer in answers]
            for part in parts:
                usage.update({name: n for name, n in (part.get("usage") or {}).items() if isinstance(n, int)})
            choices = [choice | {"index": i} for i, choice in enumerate(c for part in parts for c in part["choices"])]
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise Refusal(502, f"an answer to one prompt of the batch is none of an engine's: {error!r}") from error
        body = json.dumps(parts[0] | {"choices": choices, "usage": usage}).encode()
        return dataclasses.replace(answers[0], body=body)

    async def forward(self, call: Call, sink: Sink | None = None) -> Answer:
        """The answer of the replica that suits the call best.

        Raises Refusal: 429 too many, 503 no replica, 502 it broke off too often; LookupError: no such model.
        """
        if self.in_flight >= self.config.max_in_flight:
            self.counts["refused"] += 1
            raise Refusal(429, f"{self.in_flight} requests are in flight, --max-in-flight of them: come back later")
        model = call.payload.get("model")
        model = model if isinstance(model, str) else None
        if model in self.closed:  # those that came before it was closed are waited for
            raise LookupError(f"The model `{model}` does not exist.")
        self.in_flight += 1
        self.using[model] += 1
        try:
            await self.some_replica()
            if not self._serves(model):
                raise LookupError(f"The model `{model}` does not exist.")  # though it may, on a part of the fleet
            return await self._forward(call, model, sink)
        finally:
            self.in_flight -= 1
            self.using[model] -= 1
            if not self.using[model]:
                del self.using[model]
                self.ended.set()

    async def _forward(self, call: Call, model: str | None, sink: Sink | None) -> Answer:
        n, prompt = call.payload.get("n"), self._prompt(call.payload, model)
        headers = call.headers + b"x-request-id: %b\r\n" % call.request_id
        body = call.body or json.dumps(call.payload).encode() if call.payload else call.body
        tried: set[Replica] = set()  # they answered, but not well
        answer, broken = None, 0
        while True:
            ready = [replica for replica in self.ready if replica not in tried]
            if not ready and answer is not None:
                return answer
            if not ready:
                await self.some_replica()
                tried.clear()
                continue
            replica, uncached_tokens = self._choose(ready, prompt)
            samples = min(n, MOST_SAMPLES) if isinstance(n, int) else 1
            weight = max(samples, 1, uncached_tokens / PREFILL_TOKENS)
            replica.load, replica.in_flight, joined = replica.load + weight, replica.in_flight + 1, replica.joined
            try:
                answer = await replica.send(replica.request(call.method, call.target, headers, body), sink)
            except LOST as error:
                if no_file_left(error):
                    raise Refusal(503, "the router has no file left to connect with: raise its limit") from error
                if joined == replica.joined:  # or it broke off before it came back
                    self._eject(replica, error)
                self.counts["retries"] += 1
                answer, broken = None, broken + (not isinstance(error, ConnectionRefusedError))
                if broken > RETRIES:
                    raise Refusal(502, f"{replica.url} broke off: {error}") from error
                continue
            finally:
                replica.load, replica.in_flight = replica.load - weight, replica.in_flight - 1
            if answer.status == 404 and model in self.adapters and b"does not exist" in answer.body:
                answer = problem(503, f"{model} is being loaded again")  # the replica has restarted unnoticed
            if answer.status < 500:
                replica.on_trial = False
                if prompt.key and answer.status == 200:
                    loop = asyncio.get_running_loop()  # in two turns: the client has its packet at the end of this one
                    loop.call_soon(loop.call_soon, self._learn, replica, prompt, answer)
                return answer
            self.counts["retries"] += 1
            tried.add(replica)
            replica.look.set()

    def _prompt(self, payload: dict, model: str | None) -> Prompt:
        key, tokens = prompt_key(payload, self.tokenizer)
        key = key[: 4 * self.models[0].get("max_model_len", len(key))]  # the engine will refuse what is longer
        version = model if model is not None else self.models[0]["id"]
        seed = hash((version, str(payload.get("cache_salt"))))
        return Prompt(key, tokens, version, seed, block_hashes(key, seed, 4 * self.block_tokens))

    def _choose(self, ready: list[Replica], prompt: Prompt) -> tuple[Replica, float]:
        """(the replica, how many tokens of the prompt it has to compute)."""
        fleet = [replica for replica in ready if not (replica.on_trial and replica.in_flight)] or ready
        version, hashes, loads = prompt.version, prompt.hashes, [replica.load for replica in fleet]
        known, common = [self.index.known(replica, hashes) for replica in fleet], self.index.common(version, hashes)
        turn, imbalance = next(self.turn), self.config.imbalance
        at, how = choose(known, common, loads, blocks=len(hashes), imbalance=imbalance, turn=turn)
        self.counts[how] += bool(prompt.key)
        self.index.record(fleet[at], version, hashes)  # now: siblings come before the first has its answer
        return fleet[at], len(prompt.key) / 4 - known[at] * self.block_tokens

    def _learn(self, replica: Replica, prompt: Prompt, answer: Answer) -> None:
        """Note the reply's blocks, which the next turn begins with, and how much the engine found in its cache."""
        step, hashes = 4 * self.block_tokens, prompt.hashes
        with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError):  # an answer that is none of vLLM's
            written, usage = replies(answer.body, tokens=prompt.tokens)
            self.counts["prompt_tokens"] += usage.get("prompt_tokens") or 0
            self.counts["cached_tokens"] += (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
            for reply in written if replica in self.index.caches and self._serves(prompt.version) else ():
                rest = prompt.key[len(hashes) * step :] + reply
                more = block_hashes(rest, hashes[-1] if hashes else prompt.seed, step)
                self.index.record(replica, prompt.version, hashes + more)

    async def some_replica(self) -> None:
        if not self.some_ready.is_set():
            try:
                async with asyncio.timeout(self.config.wait_s):
                    await self.some_ready.wait()
            except TimeoutError:
                raise Refusal(503, f"no replica was ready within {self.config.wait_s:g} s") from None

    def _serves(self, model: str | None) -> bool:
        return model is None or model in self.adapters or any(model == card["id"] for card in self.models)

    # -- health

    async def _watch(self, replica: Replica) -> None:
        while True:
            replica.look.clear()
            try:
                async with asyncio.timeout(self.config.patience_s):
                    await self._look_at(replica)
            except Exception as error:
                if no_file_left(error):  # says nothing of the replica
                    log.warning("no look at %s: %s", replica.url, error)
                else:
                    self._eject(replica, error)
                if isinstance(error, TimeoutError):
                    replica.hang_up()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.config.probe_every_s):
                    await replica.look.wait()

    async def _look_at(self, replica: Replica) -> None:
        replica.prune()
        health = await replica.ask("GET", "/health", fresh=True)  # a new connection: the host is there, too
        if health.status != 200:
            raise RuntimeError(f"/health answers {health.text}")
        generation = self.generation
        models, adapters = await self._cards(replica)
        paused = await replica.ask("GET", "/is_paused") if "/pause" in self.modes else Answer()
        settled = generation == self.generation and not self.control.locked()
        if replica.state == "ready" and settled:  # or it has restarted, or was changed behind our back
            if adapters != self.adapters or _names(models) != _names(self.models):
                self._eject(replica, RuntimeError("what it serves is not what the fleet does"))
            elif paused.status == 200 and b"false" in paused.body:
                self._eject(replica, RuntimeError("it is not paused"))
        if replica.state != "ready":
            async with self.control, asyncio.timeout(self.config.load_timeout_s):
                await self._join(replica)

    async def _cards(self, replica: Replica) -> tuple[list[dict], dict[str, str]]:
        """(the base's cards, name -> path of its adapters)."""
        answer = await replica.ask("GET", "/v1/models")
        if answer.status != 200:
            raise RuntimeError(f"/v1/models answers {answer.text}")
        cards = parsed(answer.body)["data"]
        adapters = {card["id"]: card["root"] for card in cards if card.get("parent")}
        return [card for card in cards if not card.get("parent")], adapters

    async def _join(self, replica: Replica) -> None:
        """Bring a replica to where the fleet is, then let it have traffic."""
        models, adapters = await self._cards(replica)
        metrics = (await replica.ask("GET", "/metrics")).body.decode(errors="replace")
        size, blocks = (re.search(rf'[{{,]{name}="(\d+)"', metrics) for name in ("block_size", "num_gpu_blocks"))
        if not self.models:  # the very first: what it serves is what the fleet serves
            if not models:
                raise RuntimeError("/v1/models lists no base model")
            self.models, self.adapters, self.block_tokens = models, adapters, (int(size[1]) if size else 0) or 16
        if _names(models) != _names(self.models):
            raise RuntimeError(f"it serves {_names(models)}, the fleet {_names(self.models)}")
        for name, _ in adapters.items() - self.adapters.items():
            await self._unload_one(name, replica)
        for name, path in self.adapters.items() - adapters.items():
            if refused := await self._load_one(name, path, replica, patient=False):
                raise RuntimeError(f"it does not load {name}: {refused}")
        for do in self.tried_modes:
            target = f"{do}?{self.modes[do]}" if do in self.modes else UNDO[do]
            answer = await replica.ask("POST", target)
            if answer.status >= 400:
                raise RuntimeError(f"{target} answers {answer.text}")
        self.index.add(replica, int(blocks[1]) if blocks else KV_BLOCKS)
        replica.on_trial, replica.state, replica.joined = replica.state == "out", "ready", replica.joined + 1
        self.some_ready.set()
        log.info("%s is ready: %d adapters, generation %d", replica.url, len(self.adapters), self.generation)

    def _eject(self, replica: Replica, error: BaseException) -> None:
        if replica.state != "ready":
            if replica.trouble != str(error):
                log.info("%s is not ready: %s: %s", replica.url, type(error).__name__, error)
            replica.trouble = str(error)
            return
        log.warning("%s is out: %s: %s", replica.url, type(error).__name__, error)
        replica.state = "out"
        self.counts["ejections"] += 1
        self.index.remove(replica)
        for _, writer in replica.idle:
            replica.drop(writer)
        replica.idle.clear()
        replica.look.set()
        if not self.ready:
            self.some_ready.clear()

    def add_replica(self, url: str) -> None:
        """It gets traffic when it has joined. ValueError: it is there already, or no url."""
        if any(replica.url == url.rstrip("/") for replica in self.replicas):
            raise ValueError(f"replica {url} is there already")
        replica = Replica(url, self.config.upstream_api_key, "out")
        self.replicas.append(replica)
        replica.watcher = asyncio.create_task(self._watch(replica))

    def remove_replica(self, url: str) -> None:
        """No new requests; those in flight there end in peace. LookupError: unknown."""
        replica = next((each for each in self.replicas if each.url == url.rstrip("/")), None)
        if replica is None:
            raise LookupError(f"there is no replica {url}")
        if replica.watcher:
            replica.watcher.cancel()
        self._eject(replica, RuntimeError("removed"))
        self.replicas.remove(replica)
        replica.open.clear()  # the others are not kept when their answers are complete

    # -- control: all or nothing

    async def _ask_all(self, ask: Ask) -> dict[Replica, str]:
        """Who refused, and how. A replica that cannot be reached leaves the fleet instead, and returns in its state."""

        async def one(replica: Replica) -> str | None:
            try:
                async with asyncio.timeout(self.config.drain_timeout_s):
                    return await ask(replica)
            except TimeoutError:
                return "it took too long"
            except LOST as error:
                self._eject(replica, error)

        asked = self.ready
        said = await asyncio.gather(*map(one, asked))
        return {replica: refusal for replica, refusal in zip(asked, said, strict=True) if refusal}

    async def _everywhere(self, what: str, ask: Ask, undo: Ask | None = None) -> None:
        """`ask` on all, or (Refusal 504, with who refused) on none: where it timed out it is undone, too. What has no
        undoing stays done if anyone does it, or nobody is there. Who then refuses leaves the fleet, and returns in its
        state.
        """
        asked = len(self.ready)
        refused = await self._ask_all(ask)
        failed = bool(refused) and (undo is not None or len(refused) == asked)
        leaving = refused if not failed else await self._ask_all(undo) if undo else {}
        for replica, refusal in leaving.items():
            self._eject(replica, RuntimeError(refusal))
        if failed or (undo is not None and not self.ready):
            said = "; ".join(f"{replica.url}: {why}" for replica, why in refused.items())
            raise Refusal(504, f"{what} failed, on all: {said or 'no replica is left'}")

    @to_the_end
    async def load_lora(self, name: str, path: str) -> None:
        """`name` is served from now on, or (Refusal 504) nowhere. Under the same path again: nothing to do.
        ValueError: a bad name, or in use with another path or other weights, since KV caches are keyed by it.
        """
        await self.some_replica()
        if not NAME.fullmatch(name) or name in _names(self.models):
            raise ValueError(f"lora_name {name!r}: 1 to 128 of A-Z a-z 0-9 . _ -, no leading dot, not the base's name")
        written = await asyncio.to_thread(last_written, path)
        async with self.control:
            if self.adapters.get(name, path) != path or name in self.closed:
                raise ValueError(f"{name} has already been loaded from {self.adapters[name]}: choose another name")
            if (before := self.written.get(name)) and written and before != written:  # another run has begun, at v1
                raise ValueError(f"{name} has already been loaded, and {path} was written anew: unload it first")
            if name not in self.adapters:
                unload = functools.partial(self._unload_one, name)
                await self._everywhere(f"loading {name}", functools.partial(self._load_one, name, path), unload)
                self.adapters[name], self.written[name] = path, written
                self.generation += 1

    async def _load_one(self, name: str, path: str, replica: Replica, *, patient: bool = True) -> str | None:
        """None, or how it refused. Where its mount lags behind, it is asked again until the deadline."""
        payload = {"lora_name": name, "lora_path": path, "load_inplace": False}
        async with asyncio.timeout(self.config.load_timeout_s):
            while True:
                answer = await replica.ask("POST", "/v1/load_lora_adapter", payload)
                if answer.status == 200:
                    return None
                if b"already been loaded" in answer.body and (await self._cards(replica))[1].get(name) == path:
                    return None
                if not (patient and answer.status == 404 and b"No adapter found" in answer.body):
                    return answer.text
                await asyncio.sleep(LAG_S)

    async def _unload_one(self, name: str, replica: Replica) -> str | None:
        async with asyncio.timeout(self.config.load_timeout_s):
            answer = await replica.ask("POST", "/v1/unload_lora_adapter", {"lora_name": name})
        return None if answer.status in (200, 404) else answer.text

    @to_the_end
    async def unload_lora(self, name: str) -> None:
        """New requests are refused at once; the adapter goes when its last one has ended. LookupError: unknown;
        Refusal 504: they did not end in time, or no replica does it, and it stays.
        """
        if name not in self.adapters or name in self.closed:
            raise LookupError(f"The LoRA adapter {name!r} cannot be found.")
        self.closed.add(name)
        try:
            async with asyncio.timeout(self.config.drain_timeout_s):
                while self.using[name]:
                    self.ended.clear()
                    await self.ended.wait()
            async with self.control:
                await self._everywhere(f"unloading {name}", functools.partial(self._unload_one, name))
                del self.adapters[name]
                self.written.pop(name, None)
                self.index.forget(name)
                self.generation += 1
        except TimeoutError:
            raise Refusal(504, f"{name} is still used by {self.using[name]} requests, and stays") from None
        finally:
            self.closed.discard(name)

    @to_the_end
    async def broadcast(self, path: str, query: str = "") -> None:
        """One of CONTROL, everywhere, or (Refusal 504) nowhere: a pause that one refuses ends on the others."""

        async def post(target: str, replica: Replica) -> str | None:
            answer = await replica.ask("POST", target)
            return answer.text if answer.status >= 400 else None

        await self.some_replica()
        async with self.control:
            again = path in self.modes  # then the undoing of another mode is the one before
            back = f"{path}?{self.modes[path]}" if again else UNDO.get(path, "")
            undo = functools.partial(post, back) if path in UNDO else None
            self.tried_modes |= {path} & UNDO.keys()
            before, self.modes = self.modes, {do: how for do, how in self.modes.items() if path not in (do, UNDO[do])}
            try:
                await self._everywhere(path, functools.partial(post, f"{path}?{query}" if query else path), undo)
            except Refusal:
                self.modes = before if undo is None or again else self.modes
                raise
            if path in UNDO:
                self.modes[path] = query
            if path in ("/reset_prefix_cache", "/sleep"):
                for replica in self.ready:
                    self.index.add(replica, self.index.capacity[replica])
            self.generation += 1

    # -- sight

    def stats(self) -> dict[str, Any]:
        held = lambda replica: len(self.index.caches.get(replica, ()))
        each = lambda r: dict(ready=int(r.state == "ready"), in_flight=r.in_flight, load=r.load, blocks=held(r))
        return {
            "generation": self.generation,
            "in_flight": self.in_flight,
            **{f"{name}_total": self.counts[name] for name in COUNTED},
            "adapters": self.adapters,
            "modes": self.modes,
            "replicas": {replica.url: each(replica) for replica in self.replicas},
        }

    def metrics(self) -> str:
        """The numbers of `stats` as Prometheus reads them."""
        stats = self.stats()
        lines = [f"router_{name} {value}" for name, value in stats.items() if isinstance(value, int)]
        for url, each in stats["replicas"].items():
            lines += [f'router_replica_{name}{{replica="{url}"}} {value}' for name, value in each.items()]
        return "\n".join(lines) + "\n"

    async def _log_minutes(self) -> None:
        while True:
            before = self.counts.copy()
            await asyncio.sleep(60)
            last = ", ".join(f"{count - before[name]} {name}" for name, count in sorted(self.counts.items()))
            ready = f"{len(self.ready)} of {len(self.replicas)} replicas"
            log.info("%s, generation %d, %d in flight; in a minute: %s", ready, self.generation, self.in_flight, last)


def _names(cards: list[dict]) -> list[str]:
    return [card["id"] for card in cards]


def last_written(folder: str) -> int | None:
    """In ns. None: it cannot be seen from here; the replicas may have mounts of their own."""
    with contextlib.suppress(OSError):
        return max((entry.stat().st_mtime_ns for entry in os.scandir(folder)), default=None)


# ---- over HTTP


def new_id() -> bytes:
    return b"%016x" % random.getrandbits(64)


def answer_of(content: Any, status: int = 200) -> Answer:
    kind, text = (b"text/plain", content) if isinstance(content, str) else (b"application/json", json.dumps(content))
    return Answer(status, [(b"content-type", kind)], text.encode())


def problem(status: int, message: str) -> Answer:
    answer = answer_of({"error": {"message": message, "type": "RouterError", "code": status}}, status)
    answer.headers += [(b"retry-after", b"1")] if status in (429, 503) else []
    return answer


class Proxy:
    """The ASGI application: a few paths are answered here, any other goes to a replica."""

    def __init__(self, router: Router):
        self.router = router

    async def __call__(self, scope, receive, send) -> None:
        if scope["type"] == "lifespan":
            await receive()
            async with self.router:
                await send({"type": "lifespan.startup.complete"})
                await receive()
            return await send({"type": "lifespan.shutdown.complete"})
        body, more = bytearray(), True
        while more and len(body) <= MAX_BODY_BYTES:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body += message.get("body", b"")
            more = message.get("more_body", False)
        task, gone = asyncio.current_task(), asyncio.ensure_future(receive())
        leave = lambda _: task and task.cancel()
        gone.add_done_callback(leave)  # when the client has left, this task ends, and with it the generation
        headers, started = dict(scope["headers"]), False
        request_id = headers.get(b"x-request-id") or new_id()

        async def sink(answer: Answer, chunk: bytes) -> None:
            nonlocal started
            if not started:
                await send(_start(answer, request_id))
                started = True
            await send({"type": "http.response.body", "body": chunk, "more_body": True})

        try:
            answer = await self._answer(scope, headers, bytes(body), request_id, sink)
            if started and answer.status != 200:
                log.warning("a stream broke off: %s", answer.text)
                return  # without its end the server cuts the connection: the client shall notice
            if not started:
                await send(_start(answer, request_id, len(answer.body)))
            await send({"type": "http.response.body", "body": b"" if started else answer.body})
        except asyncio.CancelledError:
            if not gone.done() and not started:  # the router is ending; or else the client has left
                ending = problem(503, "the router is shutting down")
                await send(_start(ending, request_id, len(ending.body)))
                await send({"type": "http.response.body", "body": ending.body})
        finally:
            gone.remove_done_callback(leave)
            gone.cancel()

    async def _answer(self, scope, headers: dict[bytes, bytes], body: bytes, request_id: bytes, sink: Sink) -> Answer:
        """ValueError is the caller's fault, LookupError nothing of that name, Refusal the fleet's."""
        config = self.router.config
        given, expected = headers.get(b"authorization", b""), f"Bearer {config.api_key}".encode()
        if config.api_key and not hmac.compare_digest(given, expected):
            return problem(401, "send the router's key: Authorization: Bearer ...")
        if len(body) > MAX_BODY_BYTES:
            return problem(413, f"the body is larger than {MAX_BODY_BYTES} bytes")
        try:
            if (answer := await self._own(scope, body)) is not None:
                return answer
            drop = OURS | {b"authorization"} if config.upstream_api_key or config.api_key else OURS
            call = Call(
                method=scope["method"].encode(),
                target=scope["raw_path"] + (b"?" + scope["query_string"] if scope["query_string"] else b""),
                headers=b"".join([b"%b: %b\r\n" % header for header in scope["headers"] if header[0] not in drop]),
                payload=_payload(scope, headers, body),
                body=body,
                request_id=request_id,
            )
            return await self.router.serve(call, sink if call.payload.get("stream") else None)
        except ValueError as error:
            return problem(400, str(error))
        except LookupError as error:
            return problem(404, str(error.args[0]))
        except Refusal as error:
            return problem(error.status, str(error))

    async def _own(self, scope, body: bytes) -> Answer | None:
        """The answer to what is no replica's business alone, as one server would give it."""
        router, method, path = self.router, scope["method"], scope["path"]
        match method, path:
            case "GET", "/health":
                waiting = [replica.url for replica in router.replicas if replica.state == "starting"]
                return problem(503, f"waiting for {waiting}") if waiting or not router.ready else answer_of({})
            case "GET", "/v1/models":
                await router.some_replica()
                base = router.models[0]["id"]
                cards = [dict(id=k, object="model", root=v, parent=base) for k, v in router.adapters.items()]
                return answer_of({"object": "list", "data": router.models + cards})
            case "POST", "/v1/load_lora_adapter":
                name, root = _strings(body, "lora_name", "lora_path")
                if _json(body).get("load_inplace"):
                    raise ValueError("load_inplace is true: KV caches are keyed by the name, choose a new one")
                await router.load_lora(name, root)
                return answer_of(f"Success: LoRA adapter '{name}' added successfully.")
            case "POST", "/v1/unload_lora_adapter":
                (name,) = _strings(body, "lora_name")
                await router.unload_lora(name)
                return answer_of(f"Success: LoRA adapter '{name}' removed successfully.")
            case "POST", _ if path in CONTROL:
                await router.broadcast(path, scope["query_string"].decode())
                return answer_of({"status": "ok", "generation": router.generation})
            case "GET", "/is_paused":
                return answer_of({"is_paused": "/pause" in router.modes})
            case "POST" | "DELETE", "/router/replicas":
                (router.add_replica if method == "POST" else router.remove_replica)(*_strings(body, "url"))
                return answer_of(router.stats()["replicas"])
            case "GET", "/router/stats":
                return answer_of(router.stats())
            case "GET", "/metrics":
                return answer_of(router.metrics())
        return None


def _start(answer: Answer, request_id: bytes, length: int | None = None) -> dict:
    headers = [header for header in answer.headers if header[0] not in OURS] + [(b"x-request-id", request_id)]
    headers += [(b"content-length", b"%d" % length)] if length is not None else []
    return {"type": "http.response.start", "status": answer.status, "headers": headers}


def _json(body: bytes) -> dict:
    try:
        payload = parsed(body)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the body is not JSON: {error}") from None
    if not isinstance(payload, dict):
        raise ValueError("the body is not a JSON object")
    return payload


def _payload(scope, headers: dict[bytes, bytes], body: bytes) -> dict:
    """What a request asks of a model, whatever its path: the adapter that it names is in use, too."""
    if scope["method"] != "POST":
        return {}
    if scope["path"] in GENERATE:
        return _json(body)
    with contextlib.suppress(ValueError):  # any other body is the engine's business
        return _json(body) if b"json" in headers.get(b"content-type", b"") else {}
    return {}


def _strings(body: bytes, *names: str) -> list[str]:
    payload = _json(body)
    for name in names:
        if not isinstance(payload.get(name), str) or not payload[name]:
            raise ValueError(f"{name} is {payload.get(name)!r}: give a string that is not empty")
    return [payload[name] for name in names]


class Joined:
    """A transport that sends what is written in one turn of the loop at its end, in one packet: uvicorn writes the head
    and the body of an answer apart, and a packet costs as much as all that is computed for it.
    """

    def __init__(self, transport: asyncio.Transport):
        self.transport, self.written = transport, []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.transport, name)

    def write(self, data: bytes) -> None:
        if not self.written:
            asyncio.get_running_loop().call_soon(self.flush)
        self.written.append(data)

    def flush(self) -> None:
        if self.written and not self.transport.is_closing():
            self.transport.write(b"".join(self.written))
        self.written.clear()

    def close(self) -> None:
        self.flush()
        self.transport.close()


class Protocol(HttpToolsProtocol):
    def connection_made(self, transport: Any) -> None:
        super().connection_made(Joined(transport))  # pyright: ignore[reportArgumentType]

    def eof_received(self) -> None:
        """The client has nothing more to say, and the connection ends: what has been written goes before."""
        self.transport.flush()  # pyright: ignore[reportAttributeAccessIssue]


def main(config: RouterConfig) -> None:
    if config.host not in ("127.0.0.1", "localhost", "::1") and not config.api_key:
        raise ValueError(f"--host {config.host} can be reached from elsewhere: set --api-key (or $ROUTER_API_KEY) too")
    if not config.replica:
        raise ValueError("give at least one --replica http://host:port")
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a request in flight is two open files
    try:
        family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
        sock = socket.create_server((config.host, config.port), family=family, backlog=2048)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # asyncio does not, for sockets that it has not made
    except (OSError, OverflowError) as error:
        remedy = "choose another --port (0 takes a free one)"
        raise ValueError(f"cannot listen on {config.host}:{config.port} ({error}); {remedy}") from error
    log.info("listening at http://%s:%d for %d replicas", config.host, sock.getsockname()[1], len(config.replica))
    options = uvicorn.Config(
        Proxy(Router(config)),
        http=Protocol,
        lifespan="on",
        log_level="warning",
        access_log=False,
        timeout_keep_alive=60,
        timeout_graceful_shutdown=2,
        server_header=False,
        date_header=False,
        proxy_headers=False,  # the replicas' own headers go through
    )
    gc.set_threshold(50_000)  # the index has no cycles, and walking all of it again and again is a tenth of the CPU
    uvicorn.Server(options).run(sockets=[sock])


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s", datefmt="%H:%M:%S")
    try:
        given = tyro.cli(
            RouterConfig, description="vLLM replicas as one server: prefix affinity, all-or-nothing control."
        )
        environment = lambda name: getattr(given, name) or os.environ.get(f"ROUTER_{name.upper()}")
        main(dataclasses.replace(given, **{name: environment(name) for name in ("api_key", "upstream_api_key")}))
    except (ValueError, RuntimeError, OSError) as error:
        sys.exit(f"router.py: {error}")
    except KeyboardInterrupt:  # uvicorn raises it again when it has shut down
        sys.exit(130)
