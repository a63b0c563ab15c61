"""How long a heartbeat waits while the server is busy: the time a client sees from its POST to the answer.

A session that misses its heartbeats is taken for lost, so the event loop must answer them whatever else goes on. This
bench holds idle long-polls open, queues samples, and sends heartbeats on a connection of its own, one after another.
The aim: under 100 ms, each of them.

Client and server share this machine, so the numbers hold the client's work too: it fills the server from a process of
its own. Compare the row `busy` with the row `idle`.

Run: `uv run bench/heartbeat.py`, or with --base-url against a server that runs already.
"""

import asyncio
import contextlib
import dataclasses
import importlib.metadata
import json
import multiprocessing
import os
import platform
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import numpy as np
import tyro

SERVER = Path(__file__).resolve().parent.parent / "server.py"
API = "/api/v1/"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    base_url: str | None = None  # unset: a server of its own, on this machine
    polls: int = 1000  # idle long-polls held open
    samples: int = 2000  # requests of 16 tokens in the sampler's queue
    idle: int = 100  # heartbeats before the load begins
    every_s: float = 0.05  # between two heartbeats


@contextlib.contextmanager
def server(base_url: str | None) -> Iterator[str]:
    """The url of the server that is given, or of one that ends with the block."""
    if base_url is not None:
        yield base_url
        return
    with tempfile.TemporaryDirectory() as state_dir:
        command = [sys.executable, str(SERVER), "--port", "0", "--state-dir", state_dir]
        process = subprocess.Popen(command, cwd=SERVER.parent, stderr=subprocess.PIPE, text=True)
        assert process.stderr is not None
        try:
            for line in process.stderr:
                if ready := re.search(r"ready in .*TINKER_BASE_URL=(\S+)", line):
                    yield ready[1]
                    return
            raise RuntimeError("the server ended before it was ready")
        finally:
            process.send_signal(signal.SIGINT)
            process.communicate()


def headers() -> dict[str, str]:
    return {"X-API-Key": os.environ.get("TINKER_API_KEY", "tml-any")}


def measure(url: str, session_id: str, every_s: float, go_on: Callable[[int], bool]) -> list[float]:
    """The milliseconds of heartbeats sent one after another, while go_on(how many there were)."""
    latencies_ms = []
    with httpx.Client(base_url=f"{url}{API}", headers=headers(), timeout=60) as client:
        while go_on(len(latencies_ms)):
            started = time.perf_counter()
            client.post("session_heartbeat", json={"session_id": session_id}).raise_for_status()
            latencies_ms.append(1e3 * (time.perf_counter() - started))
            time.sleep(every_s)
    return latencies_ms


def load(url: str, session_id: str, config: Config) -> None:
    """Fill the server, and return when every sample is there. Runs in a process of its own."""
    asyncio.run(_load(url, session_id, config))


async def _load(url: str, session_id: str, config: Config) -> None:
    limits = httpx.Limits(max_connections=config.polls + 100)
    async with httpx.AsyncClient(base_url=f"{url}{API}", headers=headers(), timeout=600, limits=limits) as client:
        created = await client.post(
            "create_sampling_session",
            json={"session_id": session_id, "sampling_session_seq_id": 0},
        )
        sample = {
            "sampling_session_id": created.json()["sampling_session_id"],
            "num_samples": 1,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": list(range(65, 91))}]},
            "sampling_params": {"max_tokens": 16, "stop": []},
        }
        asked = await asyncio.gather(
            *(client.post("asample", json=sample | {"seq_id": i}) for i in range(config.samples))
        )
        ids = [answer.json()["request_id"] for answer in asked]
        poll = lambda i: client.post("retrieve_future", json={"request_id": ids[i]})
        pending = True
        while pending:  # on the last of a queue: idle until those before them are done
            answers = await asyncio.gather(*map(poll, range(-config.polls, 0)))
            pending = any(answer.status_code == 408 for answer in answers)


def main(config: Config) -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a poll is an open file, here and in a server of our own
    with server(config.base_url) as url:
        body = {"tags": [], "user_metadata": {}, "sdk_version": "bench", "type": "create_session"}
        session_id = httpx.post(f"{url}{API}create_session", json=body, headers=headers()).json()["session_id"]
        idle = measure(url, session_id, config.every_s, lambda n: n < config.idle)
        client = multiprocessing.get_context("spawn").Process(target=load, args=(url, session_id, config))
        started = time.perf_counter()
        client.start()
        busy = measure(url, session_id, config.every_s, lambda _: client.is_alive())
        seconds = time.perf_counter() - started
        if client.exitcode:
            raise RuntimeError(f"the load ended with exit code {client.exitcode}")
    print(f"{'server':>8} {'heartbeats':>10} {'p50 ms':>8} {'p99 ms':>8} {'max ms':>8}")
    rows = {"idle": idle, "busy": busy}
    for name, ms in rows.items():
        print(f"{name:>8} {len(ms):>10} {np.median(ms):>8.1f} {np.percentile(ms, 99):>8.1f} {max(ms):>8.1f}")
    record = {
        "bench": "heartbeat",
        "polls": config.polls,
        "samples": config.samples,
        "samples_s": round(config.samples / seconds, 1),
        **{f"{name}_p50_ms": round(float(np.median(ms)), 2) for name, ms in rows.items()},
        **{f"{name}_max_ms": round(max(ms), 2) for name, ms in rows.items()},
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in ("jax", "uvicorn", "starlette")},
    }
    print(json.dumps(record))


if __name__ == "__main__":
    main(tyro.cli(Config, description="Heartbeat latency of a busy Tinker server."))
