"""What a router in front of replicas gains and costs: prefix-cache hits on an RL trace, added latency, CPU a request.

The trace is GRPO's: shuffled epochs over the problems, 8 samples of each prompt one after another, 128 requests in
flight, another adapter version every 256 prompts. KV of another version is useless, so the first sample of a group
always misses: 1 in 8 is the floor. A prompt *misses* if a full block of it was not in the cache of the replica that it
reached; *token hits* are the share of prompt tokens that were. Replicas are stubs with an LRU cache of 16-token blocks
(tests/stub_replica.py), each a process of its own; round robin and least loaded are chosen by the client itself.

Multi-turn: conversations of 4 turns that begin with a group's prompt, 3 replicas. Reply and user turn are short (24 and
16 tokens at the mean), which makes it hard: least loaded scores about 75 % on it.

CPU is the router process's own, from the scheduler's count, all threads. Client, stubs and router share this machine:
compare the rows, and take added latency from the sequential column, where nothing queues.

The Rust peers run beside it if they are found: pip install vllm-router==0.1.17 sglang-router==0.3.2 in an environment
of their own, and --peers its bin folder. sglang-router takes text only: one character a token.

Run: `uv run bench/router.py --peers ENV/bin` (about 10 minutes), `--rollouts 8000` for a first look.
"""

import asyncio
import collections
import contextlib
import dataclasses
import glob
import importlib.util
import itertools
import json
import resource
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tyro
from report import finish

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import router

ROOT = Path(router.__file__).parent
PROBLEMS, GROUP, TEMPLATE, MEAN = 1460, 8, 23, 133
IDS = 256, 50_000  # token ids that are characters too
GROUPS_A_VERSION = 256
BLOCKS = 8192  # of a replica's cache: 131,072 tokens
TOKEN_S = 0.0005  # of a stub's sampled token


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    rollouts: int = 64_728  # 8,091 groups: five and a half epochs
    in_flight: int = 128
    seed: int = 0
    peers: Path | None = None  # folder of the vllm-router and sglang-router programs; unset: looked for in PATH
    scenarios: bool = True  # kill, lagging mount, slow replica, burst, 2,000 in flight
    latency: int = 1500  # requests one after another, of each router


# ---- the trace


@dataclasses.dataclass(frozen=True)
class Rollout:
    version: str
    prompt: list[int]
    tokens: int  # of its reply


def prompts(rng: np.random.Generator, count: int, *, template: int = TEMPLATE, mean: int = MEAN) -> list[list[int]]:
    """`count` problems behind one template, at least two blocks of their own, `mean` tokens in all at the mean."""
    shared, rest = rng.integers(*IDS, template).tolist(), mean - TEMPLATE
    lengths = 32 + np.clip(rng.gamma(2, (rest - 32) / 2, count), 0, 800).round().astype(int)
    return [shared + rng.integers(*IDS, n).tolist() for n in lengths]


def trace(seed: int, rollouts: int, *, template: int = TEMPLATE) -> list[Rollout]:
    rng, groups = np.random.default_rng(seed), rollouts // GROUP
    problems = prompts(rng, PROBLEMS, template=template)
    order = np.concatenate([rng.permutation(PROBLEMS) for _ in range(groups // PROBLEMS + 1)])[:groups]
    lengths = np.clip(rng.lognormal(4.0, 0.6, rollouts), 8, 400).astype(int)
    return [
        Rollout(f"v{i // GROUP // GROUPS_A_VERSION}", problems[order[i // GROUP]], int(lengths[i]))
        for i in range(groups * GROUP)
    ]


def body(rollout: Rollout, *, text: bool, seed: int = 0) -> bytes:
    prompt = "".join(map(chr, rollout.prompt)) if text else rollout.prompt
    options = dict(max_tokens=rollout.tokens, n=1, logprobs=0, return_token_ids=True, seed=seed)
    return json.dumps(dict(model=rollout.version, prompt=prompt, **options)).encode()


# ---- replicas, routers, and a client


@contextlib.asynccontextmanager
async def program(*command: str, url: str | None = None) -> AsyncIterator[tuple[str, subprocess.Popen]]:
    """A process that is ready: it has printed its url, or answers /health at the one that is given."""
    output = subprocess.PIPE if url is None else subprocess.DEVNULL
    process = subprocess.Popen(command, stdout=output, stderr=subprocess.DEVNULL, text=True, cwd=ROOT)
    try:
        if url is None:
            assert process.stdout is not None
            url = process.stdout.readline().strip()
        deadline = time.monotonic() + 60
        while True:
            with contextlib.suppress(OSError, EOFError):
                if (await router.Replica(url, None).ask("GET", "/health", fresh=True)).status == 200:
                    break
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{' '.join(command)} is not ready")
            await asyncio.sleep(0.1)
        yield url, process
    finally:
        process.kill()
        process.wait()


def stub(*, port: int = 0, token_s: float = TOKEN_S):
    flags = ("--port", str(port), "--blocks", str(BLOCKS), "--token-s", str(token_s))
    return program(sys.executable, str(ROOT / "tests" / "stub_replica.py"), *flags)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return sock.getsockname()[1]


def routed(name: str, replicas: Sequence[str], config: Config):
    """The router `name` in front of the replicas."""
    port = str(free_port())
    if name == "router.py":
        command = [sys.executable, str(ROOT / "router.py"), *(x for url in replicas for x in ("--replica", url))]
    else:
        launch = ["launch"] if name == "sglang-router" else []
        command = [find(name, config) or "", *launch, "--policy", "cache_aware"]
        command += ["--prometheus-port", str(free_port()), "--worker-urls", *replicas, "--host", "127.0.0.1"]
    return program(*command, "--port", port, url=f"http://127.0.0.1:{port}")


def find(name: str, config: Config) -> str | None:
    return shutil.which(name, path=str(config.peers.resolve()) if config.peers else None)


@contextlib.asynccontextmanager
async def fleet(name: str, config: Config, *, versions: Sequence[str], replicas: int = 2, token_s: float = TOKEN_S):
    """(where requests go, the replicas, the router's process); without a router, they go to the replicas themselves."""
    async with contextlib.AsyncExitStack() as stack:
        stubs = [await stack.enter_async_context(stub(token_s=token_s)) for _ in range(replicas)]
        clients = [router.Replica(url, None) for url, _ in stubs]
        for client in clients:
            for version in versions:
                await client.ask("POST", "/v1/load_lora_adapter", {"lora_name": version, "lora_path": f"/{version}"})
        if name in ("round robin", "least loaded"):
            yield clients, clients, None
            return
        url, process = await stack.enter_async_context(routed(name, [client.url for client in clients], config))
        yield [router.Replica(url, None)], clients, process


async def post(target: router.Replica, body: bytes) -> router.Answer:
    return await target.send(target.request(b"POST", b"/v1/completions", router.JSON_LINE, body))


def chooser(name: str, targets: list[router.Replica]) -> Callable[[], router.Replica]:
    turn, n = itertools.count(), len(targets)

    def least_loaded() -> router.Replica:
        first = next(turn)
        return min((targets[(first + i) % n] for i in range(n)), key=lambda target: target.in_flight)

    return least_loaded if name == "least loaded" else lambda: targets[next(turn) % n]


async def replay(
    name: str, targets: list[router.Replica], rollouts: Sequence[Rollout], in_flight: int
) -> collections.Counter:
    """Every rollout once, in order, `in_flight` at a time; how many answers had which status."""
    queue, pick, statuses = iter(rollouts), chooser(name, targets), collections.Counter()

    async def worker() -> None:
        for rollout in queue:
            target = pick()
            target.in_flight += 1
            answer = await post(target, body(rollout, text=name == "sglang-router"))
            target.in_flight -= 1
            statuses[answer.status] += 1

    await asyncio.gather(*(worker() for _ in range(in_flight)))
    return statuses


async def seen(replicas: Sequence[router.Replica]) -> dict[str, Any]:
    """What the replicas' caches saw: misses and token hits as shares, the smallest share of prompts that one got."""
    stats = [json.loads((await replica.ask("GET", "/stub/stats")).body) for replica in replicas]
    total = {key: sum(each[key] for each in stats) for key in stats[0]}
    return {
        "misses": total["misses"] / total["prompts"],
        "token_hits": total["hit_tokens"] / total["prompt_tokens"],
        "least_share": min(each["prompts"] for each in stats) / total["prompts"],
        "prompts": total["prompts"],
    }


def cpu_ms(process: subprocess.Popen | None) -> float:
    paths = glob.glob(f"/proc/{process.pid}/task/*/schedstat") if process else []
    return sum(int(Path(path).read_text().split()[0]) for path in paths) / 1e6


# ---- what is measured


async def run_trace(name: str, config: Config, rollouts: Sequence[Rollout]) -> dict[str, Any]:
    versions = sorted({rollout.version for rollout in rollouts})
    async with fleet(name, config, versions=versions) as (targets, replicas, process):
        before, started = cpu_ms(process), time.perf_counter()
        statuses = await replay(name, targets, rollouts, config.in_flight)
        seconds = time.perf_counter() - started
        assert statuses == {200: len(rollouts)}, statuses
        used = {"cpu_ms": (cpu_ms(process) - before) / len(rollouts)} if process else {}
        return await seen(replicas) | used | {"requests_s": len(rollouts) / seconds}


async def run_multi_turn(name: str, config: Config, *, groups: int = 200, turns: int = 4) -> dict[str, Any]:
    rng = np.random.default_rng(config.seed)
    begins = iter([prompt for prompt in prompts(rng, groups) for _ in range(GROUP)])
    lengths = np.random.default_rng(config.seed + 1)
    async with fleet(name, config, versions=["v0"], replicas=3) as (targets, replicas, _):
        pick = chooser(name, targets)

        async def worker() -> None:
            for prompt in begins:
                for _ in range(turns):
                    target, tokens = pick(), int(np.clip(lengths.lognormal(3.0, 0.6), 4, 200))
                    seed = int(lengths.integers(1 << 30))
                    target.in_flight += 1
                    text = name == "sglang-router"
                    answer = await post(target, body(Rollout("v0", prompt, tokens), text=text, seed=seed))
                    target.in_flight -= 1
                    reply = json.loads(answer.body)["choices"][0]["token_ids"]
                    prompt = prompt + reply + lengths.integers(*IDS, lengths.integers(8, 25)).tolist()

        await asyncio.gather(*(worker() for _ in range(config.in_flight)))
        return await seen(replicas)


async def run_latency(names: Sequence[str], config: Config) -> dict[str, dict[str, float]]:
    """Added milliseconds at the median and CPU a request, one request at a time, all routers taking turns."""
    rollouts = trace(config.seed, 800)[:200]
    async with contextlib.AsyncExitStack() as stack:
        stubs = [await stack.enter_async_context(stub(token_s=0)) for _ in range(2)]
        clients = [router.Replica(url, None) for url, _ in stubs]
        for client in clients:
            await client.ask("POST", "/v1/load_lora_adapter", {"lora_name": "v0", "lora_path": "/v0"})
        started = {n: await stack.enter_async_context(routed(n, [c.url for c in clients], config)) for n in names}
        targets = {"direct": clients[0], **{name: router.Replica(url, None) for name, (url, _) in started.items()}}
        times: dict[str, list[float]] = {name: [] for name in targets}
        used = dict.fromkeys(names, 0.0)
        for _ in range(config.latency // len(rollouts) + 1):
            for name, target in targets.items():
                before = cpu_ms(started[name][1]) if name in started else 0.0
                for rollout in rollouts:
                    request = body(rollout, text=name == "sglang-router")
                    begun = time.perf_counter()
                    await post(target, request)
                    times[name].append(1e3 * (time.perf_counter() - begun))
                if name in started:
                    used[name] += cpu_ms(started[name][1]) - before
        direct = float(np.median(times["direct"]))
        return {n: {"added_ms": float(np.median(times[n])) - direct, "cpu_ms": used[n] / len(times[n])} for n in names}


# ---- scenarios, of router.py alone


async def kill_and_return(config: Config) -> dict[str, Any]:
    """SIGKILL one of two replicas under load, start it again: statuses of all answers, and its share afterwards."""
    rollouts = trace(config.seed, 12_000)
    async with contextlib.AsyncExitStack() as stack:
        first, second = [await stack.enter_async_context(stub()) for _ in range(2)]
        url, _ = await stack.enter_async_context(routed("router.py", [first[0], second[0]], config))
        target = router.Replica(url, None)
        for version in sorted({rollout.version for rollout in rollouts}):
            payload = {"lora_name": version, "lora_path": f"/{version}"}
            assert (await target.ask("POST", "/v1/load_lora_adapter", payload)).status == 200
        load = asyncio.create_task(replay("router.py", [target], rollouts, config.in_flight))
        await asyncio.sleep(1.5)
        first[1].kill()
        await asyncio.sleep(1.5)
        back, _ = await stack.enter_async_context(stub(port=int(first[0].rpartition(":")[2])))
        statuses = await load
        stats = json.loads((await target.ask("GET", "/router/stats")).body)
        returned = json.loads((await router.Replica(back, None).ask("GET", "/stub/stats")).body)["prompts"]
        return {
            "failed": sum(statuses.values()) - statuses[200],
            "requests": len(rollouts),
            "retried": stats["retries_total"],
            "ejections": stats["ejections_total"],
            "served_after_return": returned,
        }


async def lagging_mount(config: Config) -> dict[str, Any]:
    """One replica does not see the adapter's folder for 5 looks: the load waits for it, and asks nobody else again."""
    async with fleet("router.py", config, versions=[]) as ((target,), replicas, _):
        absent = [[404, "Loading lora v1 failed: No adapter found for /v1"]] * 5
        await replicas[0].ask("POST", "/stub/set", {"answers": {"/v1/load_lora_adapter": absent}})
        started = time.perf_counter()
        answer = await target.ask("POST", "/v1/load_lora_adapter", {"lora_name": "v1", "lora_path": "/v1"})
        return {"status": answer.status, "seconds": time.perf_counter() - started}


async def slow_replica(config: Config) -> dict[str, Any]:
    """One of two replicas decodes five times slower: its share of the prompts, and misses."""
    rollouts = trace(config.seed, 4096)
    async with fleet("router.py", config, versions=["v0", "v1"]) as (targets, replicas, _):
        await replicas[0].ask("POST", "/stub/set", {"token_s": 5 * TOKEN_S})
        await replay("router.py", targets, rollouts, config.in_flight)
        return await seen(replicas)


async def burst(config: Config) -> dict[str, Any]:
    """64 identical prompts at once: how often their beginning was computed."""
    async with fleet("router.py", config, versions=["v0"]) as (targets, replicas, _):
        await replay("router.py", targets, [Rollout("v0", list(range(300, 500)), 50)] * 64, 64)
        return {"computed": round((await seen(replicas))["misses"] * 64)}


async def many_in_flight(config: Config, *, count: int = 2000) -> dict[str, Any]:
    async with fleet("router.py", config, versions=["v0"], token_s=0.1) as (targets, _, process):
        rng = np.random.default_rng(config.seed)
        rollouts = [Rollout("v0", prompt, 100) for prompt in prompts(rng, count)]
        load = asyncio.create_task(replay("router.py", targets, rollouts, count))
        most = 0
        while not load.done():
            await asyncio.sleep(0.5)
            most = max(most, json.loads((await targets[0].ask("GET", "/router/stats")).body)["in_flight"])
        return {"failed": count - load.result()[200], "most_in_flight": most, "cpu_ms": cpu_ms(process) / count}


async def measure(config: Config) -> None:
    peers = [name for name in ("vllm-router", "sglang-router") if find(name, config)]
    for name in {"vllm-router", "sglang-router"} - set(peers):
        print(f"{name}: not installed (pip install {name} in an environment of its own, then --peers its bin folder)")
    routers, direct = ["router.py", *peers], ["round robin", "least loaded"]
    latency = await run_latency(routers, config)
    rollouts, template = trace(config.seed, config.rollouts), trace(config.seed, 4096, template=400)
    columns = ("misses %", "token hits %", "least share %", "multi-turn %", "template's share %")
    print(f"{'':>14} | " + " | ".join((*columns, "CPU ms", "added ms alone", "CPU ms alone")))
    table: dict[str, dict[str, float]] = {}
    for name in [*direct, *routers]:
        row = await run_trace(name, config, rollouts)
        row["multi_turn"] = (await run_multi_turn(name, config))["token_hits"]
        row["template_share"] = (await run_trace(name, config, template))["least_share"]
        row |= {f"{key}_alone": value for key, value in latency.get(name, {}).items()}
        table[name] = row
        shares = [100 * row[key] for key in ("misses", "token_hits", "least_share", "multi_turn", "template_share")]
        costs = [row.get(key, float("nan")) for key in ("cpu_ms", "added_ms_alone", "cpu_ms_alone")]
        cells = [f"{value:.2f}" for value in shares] + [f"{value:.3f}" for value in costs]
        print(f"{name:>14} | " + " | ".join(cells), flush=True)
    record: dict[str, Any] = {"bench": "router", "rollouts": len(rollouts), "in_flight": config.in_flight}
    record |= {f"{name} {key}": value for name, row in table.items() for key, value in row.items()}
    ours, theirs = table["router.py"], table.get("vllm-router", {})
    keys = [key for key in ("cpu_ms", "cpu_ms_alone", "added_ms_alone") if key in theirs]
    over = {f"{key} over vllm-router's": ours[key] / theirs[key] for key in keys}
    print("; ".join(f"{key}: {value:.2f}" for key, value in over.items()))
    record |= over
    goals = {
        "true misses at most 12.75 %": ours["misses"] <= 0.1275,
        **{f"token hits at least {name}'s": ours["token_hits"] >= table[name]["token_hits"] for name in peers},
        "multi-turn token hits at least 76 %": ours["multi_turn"] >= 0.76,
        "a 400-token template splits within 45/55": ours["template_share"] >= 0.45,
        "added latency at most 0.4 ms": ours["added_ms_alone"] <= 0.4,
        "CPU at most 0.35 ms a request": ours["cpu_ms"] <= 0.35,
    }
    if config.scenarios:
        scenarios = [kill_and_return, lagging_mount, slow_replica, burst, many_in_flight]
        found = {}
        for scenario in scenarios:
            found[scenario.__name__] = result = await scenario(config)
            shown = ", ".join(f"{key} {value:.4g}" for key, value in result.items())
            print(f"{scenario.__name__}: {shown}", flush=True)
            record |= {f"{scenario.__name__} {key}": value for key, value in result.items()}
        goals["a killed replica fails no request, its return neither"] = found["kill_and_return"]["failed"] == 0
        goals["2,000 requests in flight hold"] = found["many_in_flight"]["failed"] == 0
    fast = [name for name in ("httptools", "uvloop") if importlib.util.find_spec(name)]
    finish(record, goals, ("uvicorn", *fast))


def main(config: Config) -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    asyncio.run(measure(config))


if __name__ == "__main__":
    main(tyro.cli(Config, description="Prefix-cache hits, latency and CPU of router.py and its peers."))
