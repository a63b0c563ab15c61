"""A replica without a model: it answers as vLLM does (status codes, words, pauses) and keeps a real LRU prefix cache.

For tests, which break it in every way a replica breaks, and for bench/router.py, which runs it as a process of its own:
`python tests/stub_replica.py --port 8001`.
"""

import argparse
import asyncio
import collections
import contextlib
import dataclasses
import json
import socket
from collections.abc import AsyncIterator

import uvicorn

BASE = "base"


class PrefixCache:
    """Blocks of `block` tokens, least recently used out first, the leaf of a chain before its root."""

    def __init__(self, blocks: int, block: int):
        self.capacity, self.block = blocks, block
        self.held: collections.OrderedDict[int, None] = collections.OrderedDict()

    def read(self, model: str, ids: list[int]) -> int:
        """How many leading tokens were there; all full blocks are now."""
        chain, digest = [], hash(model)
        for start in range(0, len(ids) - self.block + 1, self.block):
            digest = hash((digest, *ids[start : start + self.block]))
            chain.append(digest)
        hit = next((i for i, digest in enumerate(chain) if digest not in self.held), len(chain))
        for digest in reversed(chain):
            self.held[digest] = None
            self.held.move_to_end(digest)
        while len(self.held) > self.capacity:
            self.held.popitem(last=False)
        return hit * self.block


@dataclasses.dataclass
class Stub:
    """The ASGI application. Its fields are what a test looks at, and sets to break it."""

    blocks: int = 4096
    block: int = 16
    token_s: float = 0.0  # a sampled token takes this long
    adapters: dict[str, str] = dataclasses.field(default_factory=dict)
    answers: dict[str, list] = dataclasses.field(default_factory=dict)  # path -> (status, text) of its next calls
    hangs: dict[str, asyncio.Event] = dataclasses.field(default_factory=dict)  # path -> it waits for this first
    log: list[str] = dataclasses.field(default_factory=list)  # paths of what came
    control: list[str] = dataclasses.field(default_factory=list)  # "path?query" of POSTs that change the replica
    headers: list[dict] = dataclasses.field(default_factory=list)  # of requests that name a model
    running: int = 0
    most_running: int = 0
    aborted: int = 0
    prompts: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    misses: int = 0  # prompts of which a full block was not cached
    asleep: bool = False
    keep_log: bool = True

    def __post_init__(self):
        self.cache = PrefixCache(self.blocks, self.block)
        self.awake = asyncio.Event()
        self.awake.set()

    async def __call__(self, scope, receive, send) -> None:
        if scope["type"] != "http":
            return
        path, body, more = scope["path"], b"", True
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        payload = json.loads(body) if body.startswith(b"{") else {}
        if self.keep_log:
            if payload.get("model"):
                self.headers.append({k.decode(): v.decode() for k, v in scope["headers"]})
            self.log.append(path)
        if path in self.hangs:
            await self.hangs[path].wait()
        if self.answers.get(path):
            status, text = self.answers[path].pop(0)
            return await self.reply(send, status, text)
        if path in ("/v1/completions", "/v1/chat/completions", "/inference/v1/generate"):
            return await self.generate(path, payload, receive, send)
        query = scope["query_string"].decode()
        await self.reply(send, *self.rest(scope["method"], path, query, payload))

    def rest(self, method: str, path: str, query: str, payload: dict) -> tuple[int, object]:
        if method == "POST":
            self.control.append(f"{path}?{query}" if query else path)
        name = payload.get("lora_name")
        match path:
            case "/v1/models":
                cards = [{"id": BASE, "object": "model", "root": BASE, "parent": None, "max_model_len": 4096}]
                return 200, {
                    "object": "list",
                    "data": cards + [dict(id=k, root=v, parent=BASE) for k, v in self.adapters.items()],
                }
            case "/metrics":
                labels = f'block_size="{self.block}",cache_dtype="auto",num_gpu_blocks="{self.blocks}"'
                return 200, f"vllm:cache_config_info{{{labels}}} 1.0\n"
            case "/v1/load_lora_adapter" if name == BASE or name in self.adapters:
                return 400, f"The lora adapter '{name}' has already been loaded."
            case "/v1/load_lora_adapter":
                self.adapters[name] = payload["lora_path"]
                return 200, f"Success: LoRA adapter '{name}' added successfully."
            case "/v1/unload_lora_adapter" if name not in self.adapters:
                return 404, f"The lora adapter '{name}' cannot be found."
            case "/v1/unload_lora_adapter":
                del self.adapters[name]
                return 200, f"Success: LoRA adapter '{name}' removed successfully."
            case "/pause":
                self.awake.clear()
            case "/resume":
                self.awake.set()
            case "/sleep":
                self.asleep = True
            case "/wake_up":
                self.asleep = False
            case "/reset_prefix_cache":
                self.cache.held.clear()
            case "/stub/stats":
                return 200, {
                    name: getattr(self, name)
                    for name in ("prompts", "prompt_tokens", "hit_tokens", "misses", "aborted")
                }
            case "/stub/set":
                vars(self).update(payload)
            case "/server_info":
                lora, parallel = {"max_lora_rank": 8, "max_loras": 3}, {"data_parallel_size": 1}
                return 200, {"vllm_config": {"lora_config": lora, "parallel_config": parallel}}
            case "/health":
                pass
            case _:
                return 404, "Not Found"
        return 200, {}

    async def generate(self, path: str, payload: dict, receive, send) -> None:
        model, prompt = payload.get("model", BASE), payload.get("prompt", payload.get("token_ids"))
        if model != BASE and model not in self.adapters:
            return await self.reply(send, 404, f"The model `{model}` does not exist.")
        if payload.get("max_tokens", 4) < 1:
            return await self.reply(send, 400, "max_tokens must be at least 1")
        if messages := payload.get("messages"):
            prompt = "".join(f"<{message['role']}>{message['content']}" for message in messages)
        many = isinstance(prompt, list) and isinstance(prompt[0], list | str)
        prompts = [list(map(ord, each)) if isinstance(each, str) else each for each in (prompt if many else [prompt])]
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        work, gone = (
            asyncio.ensure_future(self._work(path, payload, model, prompts, send)),
            asyncio.ensure_future(receive()),
        )
        try:
            await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
            self.aborted += not work.done()
        finally:
            self.running -= 1
            gone.cancel()
            work.cancel()
        if work.done() and not work.cancelled():
            work.result()

    async def _work(self, path: str, payload: dict, model: str, prompts: list[list[int]], send) -> None:
        n, length, stream = payload.get("n", 1), payload.get("max_tokens", 4), payload.get("stream", False)
        choices, cached = [], 0
        await self.awake.wait()
        for ids in prompts:
            hit = self.cache.read(f"{model} {payload.get('cache_salt')}", ids)
            self.prompts, self.prompt_tokens = self.prompts + 1, self.prompt_tokens + len(ids)
            self.hit_tokens, self.misses = (
                self.hit_tokens + hit,
                self.misses + (hit < len(ids) // self.block * self.block),
            )
            cached += hit
            first = sum(ids) + (payload.get("seed") or 0)
            choices += [[(first + 7919 * j + 31 * k) % 40_000 + 256 for k in range(length)] for j in range(n)]
        if stream:
            await self._stream(send, choices[0])
        else:
            await asyncio.sleep(self.token_s * length)
        await self.awake.wait()
        for i, reply in enumerate(choices):
            self.cache.read(f"{model} {payload.get('cache_salt')}", prompts[i // n] + reply[:-1])
        if stream:
            return await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})
        usage = {"prompt_tokens": sum(map(len, prompts)), "prompt_tokens_details": {"cached_tokens": cached}}
        each = [self._choice(path, i, reply) for i, reply in enumerate(choices)]
        await self.reply(send, 200, {"id": "cmpl", "model": model, "choices": each, "usage": usage})

    def _choice(self, path: str, index: int, reply: list[int]) -> dict:
        choice = {"index": index, "finish_reason": "length", "token_ids": reply}
        if path == "/v1/completions":
            return choice | {"text": "".join(map(chr, reply)), "logprobs": {"token_logprobs": [-0.125] * len(reply)}}
        return choice | {"message": {"role": "assistant", "content": "".join(map(chr, reply))}}

    async def _stream(self, send, reply: list[int]) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
        for i, token in enumerate(reply):
            await asyncio.sleep(self.token_s if i else 0)
            await self.awake.wait()
            event = {"choices": [{"index": 0, "text": chr(token), "token_ids": [token]}]}
            await send(
                {"type": "http.response.body", "body": f"data: {json.dumps(event)}\n\n".encode(), "more_body": True}
            )

    async def reply(self, send, status: int, content: object) -> None:
        if isinstance(content, str) and status != 200:
            content = {"error": {"message": content, "code": status}}
        kind = b"text/plain" if isinstance(content, str) else b"application/json"
        body = (content if isinstance(content, str) else json.dumps(content)).encode()
        headers = [(b"content-type", kind), (b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})


def listen(port: int) -> socket.socket:
    sock = socket.create_server(("127.0.0.1", port), backlog=2048)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # asyncio does not, for a socket that it has not made
    return sock


class Server(uvicorn.Server):
    """In the loop of the caller, ended at once by `kill`: what SIGKILL does to a server and its connections."""

    @contextlib.contextmanager
    def capture_signals(self):
        yield

    async def main_loop(self):
        self.killed = asyncio.Event()
        await self.killed.wait()

    async def shutdown(self, sockets=None):
        if self.server_state.tasks:
            await asyncio.wait(self.server_state.tasks, timeout=5)
        await self.lifespan.shutdown()

    def kill(self) -> None:
        self.killed.set()
        for server in self.servers:
            server.close()
        for connection in list(self.server_state.connections):
            connection.transport.abort()


@contextlib.asynccontextmanager
async def serving(app, port: int = 0, **settings) -> AsyncIterator[tuple[str, Server]]:
    """(url, server); ends with the block, or by `server.kill()` before. `settings` are uvicorn's."""
    sock = listen(port)
    server = Server(uvicorn.Config(app, log_level="error", access_log=False, timeout_keep_alive=60, **settings))
    task = asyncio.create_task(server.serve(sockets=[sock]))
    while not server.started:
        await asyncio.sleep(0.001)
    try:
        yield f"http://127.0.0.1:{sock.getsockname()[1]}", server
    finally:
        server.kill()
        await task


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    for name, default in (("port", 0), ("blocks", 4096), ("token-s", 0.0)):
        parser.add_argument(f"--{name}", type=type(default), default=default)
    given = parser.parse_args()
    stub = Stub(blocks=given.blocks, token_s=given.token_s, keep_log=False)
    listening = listen(given.port)
    print(f"http://127.0.0.1:{listening.getsockname()[1]}", flush=True)
    settings = uvicorn.Config(stub, log_level="error", access_log=False, lifespan="off", timeout_keep_alive=60)
    uvicorn.Server(settings).run(sockets=[listening])
