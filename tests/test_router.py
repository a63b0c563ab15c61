"""The router against replicas that break in every known way; the public reports are named where their input is used."""

import asyncio
import collections
import contextlib
import dataclasses
import errno
import json
import logging
import random
import sys
from types import SimpleNamespace

import httpx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from stub_replica import Stub, serving

import router
from router import Index, Router, RouterConfig, block_hashes, choose, prompt_key, replies

pytestmark = pytest.mark.anyio
QUICK = dict(probe_every_s=0.02, wait_s=5.0, load_timeout_s=5.0, drain_timeout_s=5.0)


@pytest.fixture
def anyio_backend():
    return "asyncio"


async def until(condition) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.002)


@contextlib.asynccontextmanager
async def fleet(*stubs: Stub, **config):
    """The router in front of the stubs: .client speaks to it, .kill(i) and .start(i) are what happens to a replica."""
    async with contextlib.AsyncExitStack() as stack:
        served = [await stack.enter_async_context(serving(stub)) for stub in stubs]
        urls, servers = [url for url, _ in served], [server for _, server in served]
        routing = Router(RouterConfig(replica=tuple(urls), **QUICK | config))
        url, _ = await stack.enter_async_context(serving(router.Proxy(routing), http=router.Protocol))
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        client = await stack.enter_async_context(
            httpx.AsyncClient(base_url=url, timeout=30, limits=limits, verify=False)
        )

        async def start(i: int, stub: Stub) -> None:
            _, servers[i] = await stack.enter_async_context(serving(stub, int(urls[i].rpartition(":")[2])))

        async def kill(i: int) -> None:
            servers[i].kill()

        await until(lambda: len(routing.ready) == len(stubs))
        yield SimpleNamespace(
            router=routing, client=client, url=url, urls=urls, kill=kill, start=start, replicas=routing.replicas
        )


def completion(prompt, **more) -> dict:
    return {"model": "base", "prompt": prompt, "max_tokens": 4} | more


async def complete(f, prompt, **more) -> httpx.Response:
    return await f.client.post("/v1/completions", json=completion(prompt, **more))


async def load(f, name: str, path: str = "/adapters/v") -> httpx.Response:
    return await f.client.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": path})


async def unload(f, name: str) -> httpx.Response:
    return await f.client.post("/v1/unload_lora_adapter", json={"lora_name": name})


def ids(n: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(256, 50_000, n).tolist()


# ---- the choice


def test_the_replica_with_the_prefix_is_chosen_while_it_is_not_too_far_ahead():
    pick = lambda known, common, loads: choose(known, common, loads, blocks=8, imbalance=16, turn=0)
    assert pick([0, 5], 1, [0, 16]) == (1, "affinity")
    assert pick([0, 5], 1, [0, 17]) == (0, "spilled")
    assert pick([1, 1], 1, [3, 2]) == (1, "unmatched")
    assert pick([5, 7], 1, [0, 9]) == (1, "affinity")  # the longer match
    assert pick([5, 5], 1, [9, 8]) == (1, "affinity")  # of equals the less loaded
    assert pick([8, 8], 8, [1, 0]) == (1, "affinity")  # all hold all of it: a hit wherever it goes


def test_equals_take_turns():
    picks = [choose([0, 0, 0], 0, [1, 1, 1], blocks=2, imbalance=16, turn=turn)[0] for turn in range(6)]
    assert picks == [0, 1, 2, 0, 1, 2]


def test_a_block_is_known_by_all_that_came_before_it():
    """aibrix 917: unchained blocks let the joined text match the second one in its middle."""
    first, second = b"What a Good Day!!!!", b"Not a bad day today!"
    hashes = lambda data: block_hashes(data, 0, 4)
    joined = hashes(first + b" " + second)
    assert joined[:4] == hashes(first)
    assert not set(joined[4:]) & set(hashes(second))
    assert not set(hashes(first)) & set(hashes(second))


@given(st.binary(max_size=64), st.binary(max_size=64), st.sampled_from([4, 8]))
def test_prompts_share_blocks_exactly_as_far_as_they_share_a_beginning(a, b, step):
    shared = sum(x == y for x, y in zip(block_hashes(a, 0, step), block_hashes(b, 0, step), strict=False))
    same = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    assert shared == same // step


CHAINS = st.lists(st.sampled_from("abc"), min_size=1, max_size=6).map(
    lambda s: ["".join(s[: i + 1]) for i in range(len(s))]
)


@given(st.lists(st.tuples(st.sampled_from([0, 1]), st.sampled_from(["v1", "v2"]), CHAINS), max_size=40))
def test_the_index_is_what_a_slow_one_would_be(steps):
    index, caches, capacity = Index(), [[], []], 7
    for replica in range(2):
        index.add(replica, capacity)
    for replica, version, chain in steps:
        chain = [(version, block) for block in chain]
        index.record(replica, version, chain)
        caches[replica] = ([block for block in caches[replica] if block not in chain] + chain[::-1])[-capacity:]
    for replica in range(2):
        assert list(index.caches[replica]) == caches[replica]
        held = {block for _, block in caches[replica]}
        assert all(len(block) == 1 or block[:-1] in held for block in held)  # no leaf without its root
    for version, blocks in index.versions.items():
        assert blocks.keys() == {each for cache in caches for each in cache if each[0] == version}
        for (_, name), block in blocks.items():
            assert block.owners == sum((version, name) in cache for cache in caches)
            assert block.successors == sum(other[:-1] == name for _, other in blocks)
    index.forget("v1")
    index.remove(1)
    assert set(index.caches[0]) == {each for each in caches[0] if each[0] == "v2"}
    assert "v1" not in index.versions and len(index.versions.get("v2", ())) == len(index.caches[0])


def test_a_template_identifies_no_prompt_and_a_group_of_conversations_makes_none():
    index, template = Index(), ["t1", "t2"]
    for replica in "AB":
        index.add(replica, 100)
    for reply in range(router.FORKS):  # of one group, that begin alike
        index.record("A", "v", [*template, f"r{reply}"])
    assert index.common("v", [*template, "r0"]) == 0 and index.known("A", [*template, "new"]) == 2
    index.record("A", "v", [*template, "one more"])
    assert index.common("v", [*template, "r0"]) == 2
    index.record("B", "v", [*template, "r0"])
    assert index.common("v", [*template, "r0"]) == 3  # everybody has it


def test_what_is_written_in_one_turn_of_the_loop_leaves_in_one_packet():
    class Transport:
        def __init__(self):
            self.sent, self.closed = [], False

        def write(self, data):
            assert not self.closed
            self.sent.append(data)

        def close(self):
            self.closed = True

        def is_closing(self):
            return self.closed

    async def turns() -> list:
        transport = Transport()
        joined = router.Joined(transport)
        for part in (b"head, ", b"body"):
            joined.write(part)
        await asyncio.sleep(0)
        joined.write(b"end")
        joined.close()
        joined.write(b"to a client that has left")
        await asyncio.sleep(0)
        return transport.sent

    assert asyncio.run(turns()) == [b"head, body", b"end"]


@pytest.mark.parametrize("text", [b'{"x": NaN}', b'"\\ud800"', b"[1e999]", b'{"a": [1, 2.5, null, "\xc3\xa9"]}'])
def test_whatever_python_takes_for_json_is_json(text):
    assert repr(router.parsed(text)) == repr(json.loads(text))


def replay(prompts: list[list[int]], replicas: int = 2, in_flight: int = 128) -> tuple[list[int], Router]:
    """Requests a replica got when `in_flight` are under way; the oldest ends first."""
    routing = ready_router(replicas)
    running, split = collections.deque(), [0] * replicas
    for prompt in prompts:
        if len(running) == in_flight:
            replica, weight = running.popleft()
            replica.load -= weight
        replica, tokens = routing._choose(routing.ready, routing._prompt({"prompt": prompt}, None))
        weight = max(1, tokens / router.PREFILL_TOKENS)
        replica.load += weight
        running.append((replica, weight))
        split[routing.replicas.index(replica)] += 1
    return split, routing


def ready_router(replicas: int, blocks: int = 4096) -> Router:
    routing = Router(RouterConfig(replica=tuple(f"http://127.0.0.1:{i + 1}" for i in range(replicas))))
    routing.models = [{"id": "base"}]
    for replica in routing.replicas:
        routing.index.add(replica, blocks)
        replica.state = "ready"
    return routing


def test_distinct_id_prompts_of_one_length_spread():
    """vllm-project/router 237: 40 of them went to one engine."""
    assert replay([ids(256, seed) for seed in range(40)], in_flight=1)[0] == [20, 20]


def test_a_common_prefix_of_4096_tokens_makes_no_hotspot():
    """production-stack 957, one request at a time: load alone would never spread them."""
    template = ids(4096, 0)
    split, _ = replay([template + ids(64, seed) for seed in range(1, 101)], in_flight=1)
    assert 45 <= split[0] <= 55


def test_a_template_of_400_tokens_splits_evenly():
    template = ids(400, 0)
    split, _ = replay([template + ids(133, 1 + i // 8) for i in range(4096)])
    assert 0.45 <= split[0] / 4096 <= 0.55


def test_long_prompts_with_one_token_replies_do_not_all_land_on_one():
    """smg 1714: 32k in, 1 out. While the first is being read, a request that is short must go elsewhere."""
    prompts = [ids(32_000, 1)] + [ids(32, seed) for seed in range(2, 10)]
    split, _ = replay(prompts)
    assert sorted(split) == [1, 8]
    assert replay([ids(32_000, seed) for seed in range(12)], replicas=3)[0] == [4, 4, 4]


def test_an_imbalance_spills():
    split, routing = replay([ids(128, 0)] * 40)
    assert routing.counts["spilled"] == 1 and split[0] - split[1] <= 17  # from then on both hold it


def test_the_index_stays_within_what_the_replicas_hold():
    """production-stack 687: two hours of distinct long prompts took all memory."""
    bounded(prompts=2000, blocks=512)


@pytest.mark.slow
def test_the_index_stays_within_what_the_replicas_hold_over_two_million_prompts():
    grown_bytes = bounded(prompts=2_000_000, blocks=4096)
    assert grown_bytes < 8 << 20


def bounded(*, prompts: int, blocks: int) -> int:
    """Bytes by which the process grew over the second half."""
    routing, noise = ready_router(2, blocks), random.Random(0)
    for i in range(prompts):
        if i == prompts // 2:
            before = _resident_bytes()
        prompt = routing._prompt({"prompt": list(noise.randbytes(128))}, f"v{i * 20 // prompts}")
        replica, _ = routing._choose(routing.ready, prompt)
        reply = block_hashes(noise.randbytes(128), prompt.hashes[-1], 64)
        routing.index.record(replica, prompt.version, prompt.hashes + reply)
    caches = routing.index.caches.values()
    assert all(len(cache) == blocks for cache in caches)
    assert sum(map(len, routing.index.versions.values())) == 2 * blocks
    return _resident_bytes() - before


def _resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


# ---- what a request is known by


def test_a_reply_is_known_as_the_next_turn_will_say_it():
    turn = {"messages": [{"role": "user", "content": "hi"}]}
    said = {"role": "assistant", "content": "ho", "tool_calls": []}
    key, tokens = prompt_key(turn)
    next_turn = [*turn["messages"], {"content": "ho", "role": "assistant"}, {"role": "user", "content": "?"}]
    whole = json.dumps({"choices": [{"index": 0, "message": said}]})
    deltas = [{"role": "assistant"}, {"content": "h"}, {"content": "o"}]
    events = "".join("data: " + json.dumps({"choices": [{"index": 0, "delta": each}]}) + "\n\n" for each in deltas)
    for answer in (whole, events):
        (reply,), _ = replies(answer.encode(), tokens=tokens)
        assert prompt_key({"messages": next_turn})[0].startswith(key + reply)


def test_prompts_in_every_form_are_known():
    three = np.array([1, 2, 3], np.uint32).tobytes()
    assert prompt_key({"prompt": [1, 2, 3]}) == prompt_key({"token_ids": [1, 2, 3]}) == (three, True)
    assert prompt_key({"prompt": "hé"}) == ("hé".encode(), False)
    for other in (
        {},
        {"prompt": [1.5]},
        {"prompt": [-1]},
        {"prompt": {"a": 1}},
        {"prompt": [[1], [2]]},
        {"messages": 3},
    ):
        assert prompt_key(other) == (b"", True)
    assert prompt_key({"prompt": [[1, 2, 3]]}) == (three, True) and prompt_key({"prompt": ["hé"]}) == (
        "hé".encode(),
        False,
    )


def test_a_tokenizer_makes_text_and_ids_one():
    tokenizer = lambda text: {"input_ids": [ord(each) for each in text]}
    assert prompt_key({"prompt": "abc"}, tokenizer) == prompt_key({"prompt": [97, 98, 99]}, tokenizer)


def test_a_stream_says_the_same_as_an_answer():
    whole = {"choices": [{"index": 0, "token_ids": [5, 6, 7]}], "usage": {"prompt_tokens": 9}}
    events = [
        {"choices": [{"index": 0, "token_ids": [5]}]},
        {"choices": [{"index": 0, "token_ids": [6, 7]}]},
        {"choices": [], "usage": {"prompt_tokens": 9}},
    ]
    stream = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
    assert replies(stream.encode(), tokens=True) == replies(json.dumps(whole).encode(), tokens=True)


# ---- proxying


async def test_siblings_go_where_the_first_went_and_the_next_turn_too():
    stubs = Stub(), Stub()
    async with fleet(*stubs) as f:
        prompt = ids(100, 0)
        for _ in range(3):
            answer = await complete(f, prompt, max_tokens=40)
        reply = answer.json()["choices"][0]["token_ids"]
        assert sorted(stub.prompts for stub in stubs) == [0, 3]
        await complete(f, ids(50, 1)), await complete(f, ids(50, 2))
        hits = sum(stub.hit_tokens for stub in stubs)
        await complete(f, prompt + reply + ids(20, 3))
        assert sum(stub.hit_tokens for stub in stubs) - hits == 128  # of 160: 139 have been read, in blocks of 16
        assert f.router.counts["cached_tokens"] == sum(stub.hit_tokens for stub in stubs)


async def test_a_burst_of_identical_prompts_does_not_scatter():
    """llm-d-router 1726: they all come before the first has been read."""
    stubs = [Stub(token_s=0.01) for _ in range(4)]
    async with fleet(*stubs) as f:
        await asyncio.gather(*(complete(f, ids(200, 0)) for _ in range(16)))
        assert sorted(stub.prompts for stub in stubs) == [0, 0, 0, 16]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_text_is_routed_by_its_beginning(path):
    stubs = Stub(), Stub()
    async with fleet(*stubs) as f:
        for topic in ("snow " * 40, "rain " * 40, "wind " * 40, "hail " * 40):
            for _ in range(3):
                body = completion(topic) | (
                    {"messages": [{"role": "user", "content": topic}]} if "chat" in path else {}
                )
                assert (await f.client.post(path, json=body)).status_code == 200
        assert [stub.prompts for stub in stubs] == [6, 6]
        assert f.router.counts == collections.Counter(
            unmatched=4,
            affinity=8,
            prompt_tokens=f.router.counts["prompt_tokens"],
            cached_tokens=f.router.counts["cached_tokens"],
        )


async def test_prompts_of_a_batch_are_routed_each_on_its_own_and_joined_in_order():
    stubs = Stub(), Stub()
    async with fleet(*stubs) as f:
        prompts = [ids(48, seed) for seed in range(6)]
        seed = 2**64 + 1  # which only Python's json reads as it is
        single = [(await complete(f, prompt, n=2, seed=seed)).json()["choices"] for prompt in prompts]
        before = [stub.prompts for stub in stubs]
        assert before == [3, 3]
        batch = (await complete(f, prompts, n=2, seed=seed)).json()
        assert [choice["token_ids"] for choice in batch["choices"]] == [c["token_ids"] for pair in single for c in pair]
        assert [choice["index"] for choice in batch["choices"]] == list(range(12))
        assert batch["usage"]["prompt_tokens"] == 6 * 48
        assert [stub.prompts for stub in stubs] == [6, 6] and f.router.counts["affinity"] == 6
        bad = await complete(f, [[1], [2]], max_tokens=0)
        assert bad.status_code == 400 and "max_tokens" in bad.text


async def test_a_client_that_has_said_all_gets_its_answer():
    async with fleet(Stub()) as f:
        reader, writer = await asyncio.open_connection(*f.url.removeprefix("http://").split(":"))
        writer.write(b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n")
        writer.write_eof()
        answer = await reader.read()
        writer.close()
        assert answer.startswith(b"HTTP/1.1 200") and json.loads(answer.partition(b"\r\n\r\n")[2])["data"]


async def test_a_stream_passes_through_as_it_comes():
    stub = Stub()
    async with fleet(stub) as f:
        async with f.client.stream(
            "POST", "/v1/completions", json=completion(ids(20, 0), stream=True, max_tokens=3)
        ) as answer:
            chunks = [chunk async for chunk in answer.aiter_raw()]
        assert len(chunks) == 4 and chunks[-1] == b"data: [DONE]\n\n"
        assert answer.headers["content-type"] == "text/event-stream"
        stub.token_s = 30  # the second token
        async with f.client.stream("POST", "/v1/completions", json=completion([1], stream=True)) as answer:
            assert (await anext(answer.aiter_raw())).startswith(b"data: {")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_ends_its_generation(stream):
    """production-stack 634: Ctrl-C at the client left the engine generating."""
    stub = Stub(token_s=30)
    async with fleet(stub) as f:
        asking = asyncio.create_task(complete(f, [1, 2, 3], stream=stream))
        await until(lambda: stub.running == 1)
        asking.cancel()
        await until(lambda: stub.aborted == 1)
        await until(lambda: f.router.in_flight == 0)
        assert f.replicas[0].load == 0 and f.replicas[0].in_flight == 0 and len(f.router.ready) == 1


async def test_an_answer_without_a_body_leaves_the_connection_usable():
    async with fleet(Stub()) as f:
        for _ in range(3):
            head = await f.client.head("/version")
            assert head.status_code == 404 and head.content == b""
            assert (await complete(f, [1])).status_code == 200


async def test_unknown_paths_are_spread_and_answered_as_the_engine_does():
    """vllm-project/router 179: they all went to one engine."""
    stubs = Stub(), Stub()
    async with fleet(*stubs) as f:
        for _ in range(10):
            assert (await f.client.get("/v2/nothing?a=b")).status_code == 404
        assert [stub.log.count("/v2/nothing") for stub in stubs] == [5, 5]


async def test_beyond_its_bound_the_router_says_come_back_later():
    stub = Stub(token_s=30)
    async with fleet(stub, max_in_flight=3) as f:
        asking = [asyncio.create_task(complete(f, [i])) for i in range(3)]
        await until(lambda: stub.running == 3)
        refused = await complete(f, [9])
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        assert "--max-in-flight" in refused.json()["error"]["message"]
        stub.token_s = 0
        for each in asking:
            each.cancel()
        await until(lambda: f.router.in_flight == 0)
        assert (await complete(f, [9])).status_code == 200


async def test_requests_keep_their_id_and_the_upstream_key_is_never_logged(caplog):
    caplog.set_level(logging.DEBUG)
    stub = Stub()
    async with fleet(stub, upstream_api_key="sk-secret") as f:
        answer = await f.client.post(
            "/v1/completions", json=completion([1]), headers={"x-request-id": "mine", "authorization": "Bearer no"}
        )
        assert answer.headers["x-request-id"] == "mine" == stub.headers[-1]["x-request-id"]
        assert stub.headers[-1]["authorization"] == "Bearer sk-secret"
        first, second = (
            (await complete(f, [1])).headers["x-request-id"],
            (await complete(f, [1])).headers["x-request-id"],
        )
        assert first != second and len(first) == 16
        await complete(f, [[1], [2]])
        batch = [headers["x-request-id"] for headers in stub.headers[-2:]]
        assert batch[0][:-2] == batch[1][:-2] and {each[-2:] for each in batch} == {"-0", "-1"}
        await f.kill(0)
        await until(lambda: not f.router.ready)
    assert "sk-secret" not in caplog.text + repr(f.router.config)


async def test_the_router_asks_for_its_own_key_and_keeps_it():
    stub = Stub()
    async with fleet(stub, api_key="k") as f:
        for path in ("/v1/completions", "/router/stats"):
            assert (await f.client.post(path, json=completion([1]))).status_code == 401
        key = {"authorization": "Bearer k"}
        assert (await f.client.post("/v1/completions", json=completion([1]), headers=key)).status_code == 200
        assert "authorization" not in stub.headers[-1]


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [(b"{", 400, "JSON"), (b"[1]", 400, "object"), (b"x" * 2000, 413, "1024 bytes")],
)
async def test_bad_bodies_are_answered(body, status, says, monkeypatch):
    monkeypatch.setattr(router, "MAX_BODY_BYTES", 1024)
    async with fleet(Stub()) as f:
        answer = await f.client.post("/v1/completions", content=body)
        assert answer.status_code == status and says in answer.text


async def test_the_library_generates_without_http_in_front():
    async with fleet(Stub(), Stub()) as f:
        answer = await f.router.generate(completion(ids(20, 0)))
        assert len(answer["choices"][0]["token_ids"]) == 4
        with pytest.raises(ValueError, match="max_tokens"):
            await f.router.generate(completion([1], max_tokens=0))
        with pytest.raises(LookupError, match="nobody"):
            await f.router.generate(completion([1], model="nobody"))


# ---- health


async def test_killing_a_replica_under_load_fails_no_request_and_its_return_brings_no_404():
    stubs = [Stub(token_s=0.1), Stub(token_s=0.1)]  # slow enough for a busy machine to have many in flight
    async with fleet(*stubs) as f:
        assert (await load(f, "v1")).status_code == 200
        statuses, stop = collections.Counter(), asyncio.Event()

        async def client(seed: int) -> None:
            while not stop.is_set():
                seed += 1000
                statuses[(await complete(f, ids(40, seed), model="v1")).status_code] += 1

        clients = [asyncio.create_task(client(seed)) for seed in range(32)]
        await until(lambda: min(stub.running for stub in stubs) > 4)
        await f.kill(0)
        served = statuses[200]
        await until(lambda: statuses[200] > served + 100)
        assert len(f.router.ready) == 1
        again = Stub(token_s=0.01)
        await f.start(0, again)
        await until(lambda: again.prompts > 50)
        stop.set()
        await asyncio.gather(*clients)
        assert statuses.keys() == {200}, statuses
        assert again.control[0] == "/v1/load_lora_adapter" and again.adapters == {"v1": "/adapters/v"}
        assert f.router.counts["ejections"] >= 1 and f.router.counts["retries"] >= 1


async def test_connections_that_a_replica_has_closed_are_let_go():
    async with fleet(Stub(token_s=0.01)) as f:
        await asyncio.gather(*(complete(f, ids(20, seed)) for seed in range(20)))
        assert len(f.replicas[0].idle) >= 20
        await f.kill(0)
        await until(lambda: not f.replicas[0].idle and not f.replicas[0].open)


async def test_no_4xx_ejects():
    """sglang 25811: bad requests opened the circuit breaker of a healthy worker."""
    stubs = Stub(), Stub()
    async with fleet(*stubs) as f:
        for _ in range(50):
            assert (await complete(f, [1], max_tokens=0)).status_code == 400
        assert f.router.counts["ejections"] == f.router.counts["retries"] == 0 and len(f.router.ready) == 2


async def test_a_5xx_is_tried_elsewhere_and_does_not_eject():
    stubs = Stub(), Stub()
    async with fleet(*stubs) as f:
        stubs[0].answers["/v1/completions"] = [(500, "broken")] * 9
        for seed in range(4):
            assert (await complete(f, ids(40, seed))).status_code == 200
        assert stubs[1].prompts == 4 and f.router.counts["ejections"] == 0
        stubs[1].answers["/v1/completions"] = [(500, "broken, too")]
        answer = await complete(f, ids(40, 9))
        assert answer.status_code == 500 and "broken" in answer.text


async def test_a_replica_that_says_it_is_ill_is_out_until_it_is_well():
    stubs = Stub(), Stub()
    async with fleet(*stubs) as f:
        stubs[0].answers["/health"] = [(503, "EngineDeadError")] * 3
        await until(lambda: f.replicas[0].state == "out")
        assert (await complete(f, [1])).status_code == 200
        await until(lambda: f.replicas[0].state == "ready")


async def test_a_slow_answer_to_a_probe_ejects_nobody():
    """rllm 926: a busy worker took more than 5 s and was ejected. Patience here: until it is spent."""
    busy = Stub(token_s=0.001)
    async with fleet(busy, Stub(), patience_s=1e6) as f:
        release = busy.hangs["/health"] = asyncio.Event()
        seen = len(busy.log)
        await until(lambda: "/health" in busy.log[seen:])
        for seed in range(20):
            assert (await complete(f, ids(40, seed))).status_code == 200
        assert f.router.counts["ejections"] == 0 and busy.prompts == 10
        release.set()


async def test_a_replica_that_stays_silent_is_out_and_its_requests_end_elsewhere():
    silent, well = Stub(token_s=30), Stub(token_s=30)
    async with fleet(silent, well, patience_s=0.3) as f:
        asking = [asyncio.create_task(complete(f, ids(40, seed))) for seed in range(4)]
        await until(lambda: silent.running == well.running == 2)
        well.token_s = 0
        silent.hangs["/health"] = asyncio.Event()
        await until(lambda: f.replicas[0].state == "out")
        await until(lambda: asking[0].done() or asking[1].done())
        done = [each for each in asking if each.done()]
        assert all(each.result().status_code == 200 for each in done) and well.prompts == 4
        silent.hangs["/health"].set()
        for each in asking:
            each.cancel()


async def test_a_replica_that_is_back_takes_one_request_until_it_has_served_one():
    stubs = Stub(), Stub(token_s=30)
    async with fleet(*stubs) as f:
        await f.kill(0)
        await until(lambda: len(f.router.ready) == 1)
        back = Stub(token_s=30)
        await f.start(0, back)
        await until(lambda: len(f.router.ready) == 2)
        asking = [asyncio.create_task(complete(f, ids(40, seed))) for seed in range(8)]
        await until(lambda: back.running + stubs[1].running == 8)
        assert back.running == 1 and f.replicas[0].on_trial
        for each in asking:
            each.cancel()
        await until(lambda: f.router.in_flight == 0)
        back.token_s = 0
        while f.replicas[0].on_trial:
            await complete(f, ids(40, 50))
        back.token_s = 30
        asking = [asyncio.create_task(complete(f, ids(40, seed))) for seed in range(60, 68)]
        await until(lambda: back.running + stubs[1].running == 8)
        assert back.running == 4
        for each in asking:
            each.cancel()


async def test_replicas_come_and_go_while_running():
    stubs = Stub(), Stub()
    async with fleet(stubs[0]) as f, serving(stubs[1]) as (url, _):
        await load(f, "v1")
        await f.client.post("/pause?mode=keep")
        assert (await f.client.post("/router/replicas", json={"url": url})).status_code == 200
        await until(lambda: len(f.router.ready) == 2)
        assert stubs[1].control == ["/v1/load_lora_adapter", "/pause?mode=keep"]
        await f.client.post("/resume")
        for seed in range(4):
            assert (await complete(f, ids(40, seed), model="v1")).status_code == 200
        assert [stub.prompts for stub in stubs] == [2, 2]
        assert (await f.client.post("/router/replicas", json={"url": url})).status_code == 400
        removed = await f.client.request("DELETE", "/router/replicas", json={"url": f.urls[0]})
        assert list(removed.json()) == [url]
        assert (await complete(f, ids(40, 0), model="v1")).status_code == 200 and stubs[1].prompts == 3
        gone = await f.client.request("DELETE", "/router/replicas", json={"url": f.urls[0]})
        assert gone.status_code == 404


async def test_a_replica_that_restarted_between_two_probes_is_found_out_by_its_404():
    stubs = Stub(), Stub()
    async with fleet(*stubs, probe_every_s=1e6) as f:
        await load(f, "v1")
        stubs[0].adapters.clear()
        for seed in range(4):
            assert (await complete(f, ids(40, seed), model="v1")).status_code == 200
        await until(lambda: stubs[0].adapters == {"v1": "/adapters/v"} and len(f.router.ready) == 2)


async def test_with_no_replica_a_request_waits_and_is_then_refused():
    stub = Stub()
    async with fleet(stub, wait_s=0.2) as f:
        await f.kill(0)
        refused = await complete(f, [1])
        assert refused.status_code == 503 and refused.headers["retry-after"] == "1"
        f.router.config = dataclasses.replace(f.router.config, wait_s=30)
        asking = asyncio.create_task(complete(f, [1]))
        await f.start(0, Stub())
        assert (await asking).status_code == 200


async def test_a_stream_that_broke_off_is_not_begun_again():
    stub = Stub(token_s=0.01)
    async with fleet(stub, Stub()) as f:
        with pytest.raises(httpx.RemoteProtocolError):
            async with f.client.stream(
                "POST", "/v1/completions", json=completion([1], stream=True, max_tokens=1000)
            ) as answer:
                async for _ in answer.aiter_raw():
                    await f.kill(0)
        assert f.router.counts["retries"] == 0


# ---- control


async def test_a_load_is_everywhere_and_again_is_nothing_to_do():
    stubs = Stub(), Stub()
    async with fleet(*stubs) as f:
        for _ in range(2):
            answer = await load(f, "v1")
            assert answer.status_code == 200 and "'v1' added successfully" in answer.text
        assert [stub.control.count("/v1/load_lora_adapter") for stub in stubs] == [1, 1]
        other = await load(f, "v1", "/elsewhere")
        assert other.status_code == 400 and "already been loaded from /adapters/v" in other.text
        cards = (await f.client.get("/v1/models")).json()["data"]
        assert [card["id"] for card in cards] == ["base", "v1"] and cards[0]["max_model_len"] == 4096
        for name in ("base", "../v", "", ".v", "a" * 129):
            assert (await load(f, name)).status_code == 400
        assert (await f.client.get("/router/stats")).json()["generation"] == 1


async def test_a_name_whose_folder_was_written_anew_is_refused_until_it_is_unloaded(tmp_path):
    """TRL's second run begins at v1 again, in the folders of the first: those versions must not pass for its own."""
    (tmp_path / "weights").write_text("of the first run")
    async with fleet(Stub(), Stub()) as f:
        for _ in range(2):
            assert (await load(f, "v1", str(tmp_path))).status_code == 200
        (tmp_path / "weights").unlink()
        (tmp_path / "weights").write_text("of the second")
        answer = await load(f, "v1", str(tmp_path))
        assert answer.status_code == 400 and "written anew: unload it first" in answer.text
        await unload(f, "v1")
        assert (await load(f, "v1", str(tmp_path))).status_code == 200


async def test_a_name_that_a_replica_has_already_counts_if_its_path_is_the_same():
    stubs = Stub(), Stub()
    async with fleet(*stubs, probe_every_s=1e6) as f:
        stubs[0].adapters["v1"] = "/adapters/v"
        assert (await load(f, "v1")).status_code == 200
        stubs[0].adapters["v2"] = "/other"
        assert (await load(f, "v2")).status_code == 504
        assert [set(stub.adapters) for stub in stubs] == [{"v1"}, {"v1"}]


async def test_a_mount_that_lags_is_asked_again_and_it_alone():
    stubs = Stub(), Stub()
    async with fleet(*stubs) as f:
        stubs[0].answers["/v1/load_lora_adapter"] = [
            (404, "Loading lora v1 failed: No adapter found for /adapters/v")
        ] * 2
        assert (await load(f, "v1")).status_code == 200
        assert [stub.log.count("/v1/load_lora_adapter") for stub in stubs] == [3, 1]
        assert [stub.adapters for stub in stubs] == [{"v1": "/adapters/v"}] * 2


async def test_a_mount_that_never_shows_it_is_a_504_and_the_name_is_nowhere():
    stubs = Stub(), Stub()
    async with fleet(*stubs, load_timeout_s=0.5) as f:
        stubs[0].answers["/v1/load_lora_adapter"] = [(404, "No adapter found for /adapters/v")] * 99
        refused = await load(f, "v1")
        assert refused.status_code == 504 and f.urls[0] in refused.text and f.urls[1] not in refused.text
        assert stubs[1].adapters == {}
        assert (await complete(f, [1], model="v1")).status_code == 404


async def test_a_refused_load_is_undone_where_it_timed_out_too():
    stubs = Stub(), Stub(), Stub()
    async with fleet(*stubs, load_timeout_s=0.3) as f:
        stubs[0].answers["/v1/load_lora_adapter"] = [(500, "rank 16 is greater than max_lora_rank 8")]
        hang = stubs[1].hangs["/v1/load_lora_adapter"] = asyncio.Event()
        refused = await load(f, "v1")
        assert refused.status_code == 504 and "max_lora_rank" in refused.text and f.urls[1] in refused.text
        assert [stub.log.count("/v1/unload_lora_adapter") for stub in stubs] == [1, 1, 1]
        del stubs[1].hangs["/v1/load_lora_adapter"]
        hang.set()  # the late load happens after all
        await until(lambda: all(stub.adapters == {} for stub in stubs) and len(f.router.ready) == 3)
        assert (await load(f, "v1")).status_code == 200


async def test_a_failed_rollback_leaves_no_name_that_is_loaded_and_yet_unroutable():
    """dynamo 11163: the next load said success, and nothing was served, for ever."""
    stubs = Stub(), Stub()
    async with fleet(*stubs) as f:
        stubs[0].answers["/v1/load_lora_adapter"] = [(500, "truncated file")]
        stubs[1].answers["/v1/unload_lora_adapter"] = [(500, "busy")]
        assert (await load(f, "v1")).status_code == 504
        assert (await complete(f, [1], model="v1")).status_code == 404
        await until(lambda: len(f.router.ready) == 2 and stubs[1].adapters == {})
        assert (await load(f, "v1")).status_code == 200
        for seed in range(4):
            assert (await complete(f, ids(40, seed), model="v1")).status_code == 200
        assert [stub.prompts for stub in stubs] == [2, 2]


async def test_a_replica_that_dies_during_a_load_does_not_fail_it():
    stubs = Stub(), Stub()
    async with fleet(*stubs) as f:
        stubs[0].hangs["/v1/load_lora_adapter"] = asyncio.Event()
        loading = asyncio.create_task(load(f, "v1"))
        await until(lambda: "/v1/load_lora_adapter" in stubs[0].log)
        await f.kill(0)
        stubs[0].hangs["/v1/load_lora_adapter"].set()
        assert (await loading).status_code == 200
        assert (await complete(f, [1], model="v1")).status_code == 200
        back = Stub()
        await f.start(0, back)
        await until(lambda: len(f.router.ready) == 2)
        assert back.adapters == stubs[1].adapters == {"v1": "/adapters/v"}


async def test_an_unload_waits_for_the_last_request_of_its_version():
    stubs = Stub(token_s=30), Stub(token_s=30)
    async with fleet(*stubs) as f:
        await load(f, "v1")
        asking = [asyncio.create_task(complete(f, ids(40, seed), model="v1", max_tokens=1)) for seed in range(2)]
        await until(lambda: all(stub.running for stub in stubs))
        unloading = asyncio.create_task(unload(f, "v1"))
        await until(lambda: f.router.closed)
        assert (await complete(f, [1], model="v1")).status_code == 404  # no new ones
        assert (await load(f, "v1")).status_code == 400
        assert all("v1" in stub.adapters for stub in stubs) and not unloading.done()
        for each in asking:
            each.cancel()
        assert (await unloading).status_code == 200
        assert all(stub.adapters == {} for stub in stubs) and "v1" not in f.router.index.versions
        assert (await unload(f, "v1")).status_code == 404


async def test_an_unload_that_waits_in_vain_is_a_504_and_the_version_stays():
    stub = Stub(token_s=30)
    async with fleet(stub, drain_timeout_s=0.1) as f:
        await load(f, "v1")
        asking = asyncio.create_task(complete(f, [1], model="v1"))
        await until(lambda: stub.running)
        refused = await unload(f, "v1")
        assert refused.status_code == 504 and "1 requests" in refused.text
        stub.token_s = 0
        assert (await complete(f, [2], model="v1")).status_code == 200
        asking.cancel()


async def test_a_version_can_go_while_no_replica_is_there():
    stub = Stub()
    async with fleet(stub) as f:
        await load(f, "v1")
        await load(f, "v2")
        await f.kill(0)
        await until(lambda: not f.router.ready)
        assert (await unload(f, "v1")).status_code == 200
        await f.start(0, stub)  # where v1 is still loaded
        await until(lambda: f.router.ready)
        assert set(stub.adapters) == set(f.router.adapters) == {"v2"}


async def test_a_router_that_has_no_file_left_says_nothing_of_its_replicas(monkeypatch):
    looks, connect = 0, asyncio.open_connection

    async def refused(*_, **__):
        nonlocal looks
        looks += 1
        raise OSError(errno.EMFILE, "too many open files")

    async with fleet(Stub()) as f:
        monkeypatch.setattr(router.asyncio, "open_connection", refused)
        await until(lambda: looks > 1)
        assert f.router.ready and not f.router.counts["ejections"]
        monkeypatch.setattr(router.asyncio, "open_connection", connect)
        assert (await complete(f, [1])).status_code == 200


async def test_a_failed_pause_resumes_the_others():
    stubs = Stub(), Stub()
    async with fleet(*stubs) as f:
        stubs[1].answers["/pause"] = [(500, "cannot")]
        refused = await f.client.post("/pause?mode=keep")
        assert refused.status_code == 504 and f.urls[1] in refused.text
        assert all(stub.awake.is_set() for stub in stubs)
        assert (await f.client.get("/is_paused")).json() == {"is_paused": False}
        assert (await f.client.post("/pause?mode=keep")).status_code == 200
        assert not any(stub.awake.is_set() for stub in stubs)
        assert (await f.client.get("/is_paused")).json() == {"is_paused": True}
        asking = asyncio.create_task(complete(f, [1]))
        await until(lambda: any(stub.running for stub in stubs))  # a paused fleet takes requests
        assert (await f.client.post("/resume")).status_code == 200
        assert (await asking).status_code == 200


async def test_a_pause_whose_client_has_left_is_not_half_done():
    stubs = Stub(), Stub()
    async with fleet(*stubs) as f:
        release = stubs[1].hangs["/pause"] = asyncio.Event()
        pausing = asyncio.create_task(f.client.post("/pause?mode=keep"))
        await until(lambda: not stubs[0].awake.is_set() and "/pause" in stubs[1].log)
        pausing.cancel()
        release.set()
        await until(lambda: "/pause" in f.router.modes)
        assert not any(stub.awake.is_set() for stub in stubs)
        assert (await f.client.post("/resume")).status_code == 200


async def test_who_refuses_to_resume_leaves_and_returns_resumed_unless_all_refuse():
    stubs = Stub(), Stub()
    async with fleet(*stubs) as f:
        await f.client.post("/pause?mode=keep")
        for stub in stubs:
            stub.answers["/resume"] = [(500, "no")]
        assert (await f.client.post("/resume")).status_code == 504
        assert len(f.router.ready) == 2 and "/pause" in f.router.modes
        stubs[0].answers["/resume"] = [(500, "no")]
        assert (await f.client.post("/resume")).status_code == 200
        await until(lambda: len(f.router.ready) == 2 and stubs[0].awake.is_set())


async def test_a_reset_or_sleeping_cache_is_forgotten():
    stubs = Stub(), Stub()
    async with fleet(*stubs) as f:
        for path, undo in (("/reset_prefix_cache", None), ("/sleep?level=1", "/wake_up")):
            await complete(f, ids(40, 0))
            assert any(f.router.index.caches.values())
            assert (await f.client.post(path)).status_code == 200
            assert not any(f.router.index.caches.values()) and not any(f.router.index.versions.values())
            if undo:
                assert all(stub.asleep for stub in stubs)
                assert (await f.client.post(undo)).status_code == 200
                assert not any(stub.asleep for stub in stubs)


async def test_many_replicas_look_like_one_server():
    """vllm-project/router 135, too: /v1/models with one worker down."""
    async with fleet(Stub(), Stub()) as f:
        assert (await f.client.get("/health")).status_code == 200
        info = (await f.client.get("/server_info?config_format=json")).json()["vllm_config"]
        assert info["lora_config"]["max_loras"] == 3 and info["parallel_config"]["data_parallel_size"] == 1
        await f.kill(0)
        for _ in range(4):
            models = await f.client.get("/v1/models")
            assert models.status_code == 200 and models.json()["data"][0]["id"] == "base"
            assert (await f.client.get("/server_info?config_format=json")).status_code == 200
        assert (await f.client.get("/health")).status_code == 200  # every live replica is ready


async def test_a_policy_is_swapped_as_trls_trainer_does_it_while_requests_run():
    """The calls of AsyncGRPOTrainer 1.16 in their order, and what it reads from the answers (test_trl.py runs it)."""
    stubs = Stub(token_s=0.01), Stub(token_s=0.01)
    ask = dict(model="trl-policy-v1", n=1, logprobs=0, return_token_ids=True, seed=2**63 - 1)
    async with fleet(*stubs) as f:
        assert (await load(f, "trl-policy-v1")).status_code == 200
        base, *_ = (await f.client.get("/v1/models")).json()["data"]
        assert base["id"] == "base" and base["max_model_len"] == 4096
        early = asyncio.create_task(complete(f, [1, 2, 3], max_tokens=200, **ask))  # 2 s: it is there at the pause
        await until(lambda: any(stub.running for stub in stubs))
        assert (await f.client.post("/pause?mode=keep")).status_code == 200
        late = asyncio.create_task(complete(f, [1, 2, 3], **ask))  # it samples on, and waits
        assert (await load(f, "trl-policy-v2")).status_code == 200
        assert not early.done() and not late.done()
        assert (await f.client.post("/resume")).status_code == 200
        for answer in (await early, await late, await complete(f, [1, 2, 3], **ask)):  # it has not heard of v2 yet
            (choice,) = answer.json()["choices"]
            assert answer.status_code == 200 and len(choice["token_ids"]) == len(choice["logprobs"]["token_logprobs"])
            assert choice["token_ids"][0] == (6 + 2**63 - 1) % 40_000 + 256  # the seed came whole
        assert (await unload(f, "trl-policy-v1")).status_code == 200
        assert (await complete(f, [1, 2, 3], **ask)).status_code == 404
        load_, unload_ = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
        swap = [load_, "/pause?mode=keep", load_, "/resume", unload_]
        for stub in stubs:
            assert [call for call in stub.control if "completions" not in call] == swap
            assert list(stub.adapters) == ["trl-policy-v2"]


async def test_a_replica_that_does_not_load_adapters_is_no_missing_endpoint():
    """TRL reads a 404 as that, and ends."""
    stubs = Stub(), Stub()
    stubs[1].answers["/v1/load_lora_adapter"] = [(404, "Not Found")]
    async with fleet(*stubs) as f:
        answer = await load(f, "trl-policy-v1")
        assert answer.status_code == 504 and "Not Found" in answer.text and not stubs[0].adapters
        assert (await f.client.post("/v1/unload_lora_adapter", json={"lora_name": "trl-policy-v0"})).status_code == 404


async def test_it_is_not_healthy_before_every_replica_is_there():
    waiting = Stub()
    waiting.answers["/health"] = [(503, "starting")] * 10**6
    async with serving(Stub()) as (first, _), serving(waiting) as (second, _):
        routing = Router(RouterConfig(replica=(first, second), **QUICK))
        async with serving(router.Proxy(routing)) as (url, _), httpx.AsyncClient(base_url=url) as client:
            await until(lambda: len(routing.ready) == 1)
            assert (await client.get("/health")).status_code == 503
            waiting.answers.clear()
            await until(lambda: len(routing.ready) == 2)
            assert (await client.get("/health")).status_code == 200


async def test_a_fleet_that_ran_before_the_router_is_taken_over():
    stubs = Stub(adapters={"v1": "/a", "v2": "/b"}), Stub(adapters={"v2": "/old", "v3": "/c"})
    async with (
        serving(stubs[0]) as (first, _),
        serving(stubs[1]) as (second, _),
        Router(RouterConfig(replica=(first,), **QUICK)) as routing,
    ):
        await until(lambda: len(routing.ready) == 1)
        routing.add_replica(second)
        await until(lambda: len(routing.ready) == 2)
        assert stubs[1].adapters == stubs[0].adapters == routing.adapters == {"v1": "/a", "v2": "/b"}


# ---- sight


async def test_the_numbers_can_be_read_by_prometheus_and_as_json():
    async with fleet(Stub(), Stub()) as f:
        await load(f, "v1")
        for _ in range(3):
            await complete(f, ids(64, 0), model="v1")
        stats = (await f.client.get("/router/stats")).json()
        assert (stats["affinity_total"], stats["unmatched_total"], stats["spilled_total"]) == (2, 1, 0)
        assert (stats["prompt_tokens_total"], stats["cached_tokens_total"]) == (192, 128)
        assert stats["adapters"] == {"v1": "/adapters/v"} and stats["generation"] == 1
        lines = (await f.client.get("/metrics")).text.splitlines()
        assert "router_affinity_total 2" in lines and "router_generation 1" in lines
        assert f'router_replica_in_flight{{replica="{f.urls[0]}"}} 0' in lines
        assert all(len(line.split()) == 2 and float(line.split()[1]) >= 0 for line in lines)


def test_a_negative_number_is_named():
    with pytest.raises(ValueError, match="--wait-s is -1: it must be 0 or more"):
        RouterConfig(wait_s=-1)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--replica", "nonsense"], "give it as http://host:port"),
        ([], "--replica"),
        (["--replica", "http://127.0.0.1:1", "--host", "0.0.0.0"], "--api-key"),
        (["--replica", "http://127.0.0.1:1", "--port", "99999"], "--port"),
    ],
)
async def test_the_program_says_what_is_wrong(flags, says):
    program = await asyncio.create_subprocess_exec(
        sys.executable, router.__file__, *flags, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    said, _ = await program.communicate()
    assert program.returncode == 1 and says in said.decode() and "Traceback" not in said.decode()


# ---- what an attack has found


async def test_a_request_that_waited_before_its_version_was_unloaded_is_served():
    async with fleet(Stub()) as f:
        await load(f, "v1")
        await f.kill(0)
        await until(lambda: not f.router.ready)
        waiting = asyncio.create_task(complete(f, ids(20, 0), model="v1"))
        await until(lambda: f.router.using["v1"])
        unloading = asyncio.create_task(unload(f, "v1"))
        await until(lambda: "v1" in f.router.closed)
        await f.start(0, Stub())
        assert (await waiting).status_code == (await unloading).status_code == 200


async def test_any_path_that_names_an_adapter_keeps_it():
    stub = Stub(hangs={"/v1/responses": asyncio.Event()})
    async with fleet(stub) as f:
        await load(f, "v1")
        asking = asyncio.create_task(f.client.post("/v1/responses", json={"model": "v1", "input": "hello"}))
        await until(lambda: f.router.using["v1"])
        unloading = asyncio.create_task(unload(f, "v1"))
        await until(lambda: "v1" in f.router.closed)
        assert not unloading.done() and "v1" in stub.adapters
        stub.hangs["/v1/responses"].set()
        await asking
        assert (await unloading).status_code == 200 and not stub.adapters


async def test_a_replica_that_breaks_off_at_a_request_gets_it_a_few_times_only():
    async with fleet(Stub(token_s=0.01)) as f:
        await asyncio.gather(*(complete(f, ids(20, seed)) for seed in range(20)))
        replica = f.replicas[0]
        assert len(replica.idle) >= 20
        sent, exchange = 0, replica._exchange

        async def broken(connection, request, *rest):
            nonlocal sent
            if b" /v1/completions " not in request:
                return await exchange(connection, request, *rest)
            sent += 1
            raise EOFError

        replica._exchange = broken
        assert (await complete(f, ids(20, 99))).status_code == 502
        assert sent <= 2 * (router.RETRIES + 1)


async def test_load_inplace_is_refused():
    async with fleet(Stub()) as f:
        body = {"lora_name": "v1", "lora_path": "/adapters/v", "load_inplace": True}
        answer = await f.client.post("/v1/load_lora_adapter", json=body)
        assert answer.status_code == 400 and "load_inplace" in answer.text and not f.router.adapters


async def test_no_number_of_samples_leaves_a_load_behind():
    async with fleet(Stub(), Stub()) as f:
        for n in (10**18, 10**400, -1, True):
            assert (await complete(f, ids(20, 0), n=n, max_tokens=0)).status_code == 400
        assert [replica.load for replica in f.replicas] == [0, 0]


async def test_a_batch_that_can_never_be_accepted_says_so():
    async with fleet(Stub(), max_in_flight=4) as f:
        answer = await complete(f, [ids(20, seed) for seed in range(5)])
        assert answer.status_code == 400 and "at most 4" in answer.text


async def test_an_adapter_from_another_path_behind_our_back_is_replaced():
    stub = Stub()
    async with fleet(stub) as f:
        await load(f, "v1")
        stub.adapters["v1"] = "/elsewhere"
        await until(lambda: f.router.counts["ejections"] and f.router.ready)
        assert stub.adapters == {"v1": "/adapters/v"}


async def test_a_second_pause_that_fails_leaves_the_first():
    stubs = Stub(), Stub()
    async with fleet(*stubs) as f:
        assert (await f.client.post("/pause?mode=keep")).status_code == 200
        stubs[1].answers["/pause"] = [(400, "no such mode")]
        assert (await f.client.post("/pause?mode=bogus")).status_code == 504
        assert f.router.modes == {"/pause": "mode=keep"}
        assert [stub.control[-1] for stub in stubs] == ["/pause?mode=keep"] * 2


@pytest.mark.parametrize(
    "url", ["http://h:abc", "http://u:secret@h:1", 'http://h"x:1', "http://h:0", "ftp://h:1", "h:1"]
)
def test_a_replica_that_is_no_url_is_named_without_its_password(url):
    with pytest.raises(ValueError, match="http://host:port") as raised:
        router.Replica(url, None)
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize("number", [float("nan"), -1.0])
def test_numbers_out_of_range_are_refused(number):
    with pytest.raises(ValueError, match="--imbalance"):
        RouterConfig(imbalance=number)
