"""How long a lost server is missed, and what it costs not to lose it.

    start -> import -> restore -> load -> compile -> replay -> the first new optimizer step

The same step (a forward_backward of one sequence, an optim_step) from three beginnings: nothing at all, the state
directory of a server that was killed, and a mirror alone, on an empty disk. Then its price: the CPU time that the
journal takes of a request, the bytes that a step sends to the mirror, and a step's time with the mirror out of reach
over that with none, taken in turns.

All of one machine: a bucket's distance is not in it. Python's imports are in each of the three; MaxText's, and
all tracing and compiling, in the first alone.
Run: `uv run bench/recover.py`
"""

import contextlib
import dataclasses
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import httpx
import numpy as np
import tyro
from report import finish
from tinker.proto import tinker_public_pb2 as pb

from cache import Journal

ROOT = Path(__file__).resolve().parent.parent
TOKENS = np.arange(60, 160, dtype=np.int32)
ADAM = {"learning_rate": 1e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-12}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    steps: int = 100  # of each server whose steps are timed
    requests: int = 500  # whose CPU time is counted


class Client:
    """Raw HTTP: the SDK waits up to 30 s before it tries again, which is not the server's time."""

    def __init__(self, port: int):
        self.http, self.seq = httpx.Client(base_url=f"http://127.0.0.1:{port}/api/v1/", timeout=60), 0

    def post(self, verb: str, **body) -> httpx.Response:
        while True:
            try:
                answer = self.http.post(verb, **body)
                if answer.status_code != 408:
                    assert answer.status_code == 200, answer.text
                    return answer
            except httpx.TransportError:  # it is not there yet, or not any more
                time.sleep(0.02)

    def result(self, accepted: httpx.Response) -> httpx.Response:
        answer = self.post("retrieve_future", json={"request_id": accepted.json()["request_id"]})
        assert b'"error"' not in answer.content, answer.text
        return answer

    def create(self) -> None:
        opened = {"tags": [], "user_metadata": {}, "sdk_version": "0.38.0", "type": "create_session"}
        session = self.post("create_session", json=opened).json()["session_id"]
        body = {"session_id": session, "model_seq_id": 0, "base_model": "demo", "lora_config": {"rank": 32, "seed": 0}}
        self.model_id = self.result(self.post("create_model", json=body)).json()["model_id"]

    def step(self) -> None:
        self.seq += 2
        request = pb.ForwardBackwardRequest(model_id=self.model_id, seq_id=self.seq - 1, loss_fn="cross_entropy")
        example = request.data.add()
        example.model_input.add().encoded_text.tokens = TOKENS[:-1].tobytes()
        inputs = {"target_tokens": (TOKENS[1:].astype(np.int64), pb.DTYPE_INT64)}
        inputs["weights"] = np.ones(len(TOKENS) - 1, np.float32), pb.DTYPE_FLOAT32
        for name, (values, dtype) in inputs.items():
            example.loss_fn_inputs[name].CopyFrom(pb.Tensor(dense=values.tobytes(), dtype=dtype, shape=[len(values)]))
        first = self.post("forward_backward", content=request.SerializeToString())
        body = {"model_id": self.model_id, "seq_id": self.seq, "type": "optim_step", "adam_params": ADAM}
        second = self.post("optim_step", json=body)
        self.result(first)
        self.result(second)


class Server:
    def __init__(self, state_dir: Path, *flags: str, port: int = 0, environment: dict[str, str] | None = None):
        self.port = port if port else free_port()
        command = [sys.executable, "server.py", f"--port={self.port}", f"--state-dir={state_dir}", *flags]
        with state_dir.with_suffix(".log").open("a") as out:
            settings = os.environ | {"JAX_PLATFORMS": "cpu"} | (environment or {})
            self.process = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=out, env=settings)

    def cpu_s(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")

    def end(self, how: signal.Signals = signal.SIGTERM) -> None:
        self.process.send_signal(how)
        self.process.wait()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return sock.getsockname()[1]


@contextlib.contextmanager
def running(*args, **options) -> Iterator[Server]:
    server = Server(*args, **options)
    try:
        yield server
    finally:
        if server.process.poll() is None:
            server.end(signal.SIGKILL)


def time_to_first_step(folder: Path) -> dict[str, float]:
    """Seconds from the start of the process to a new step of one adapter."""
    mirror, seconds = f"--mirror={folder / 'mirror'}", {}
    port = free_port()
    client = Client(port)
    begins = {
        "nothing": folder / "first",
        "the state directory": folder / "first",
        "the mirror alone": folder / "second",
    }
    for name, state_dir in begins.items():
        started = time.monotonic()
        with running(state_dir, mirror, port=port) as server:
            if name == "nothing":
                client.create()
            client.step()
            seconds[name] = time.monotonic() - started
            print(f"{seconds[name]:6.1f} s to the first step from {name}", flush=True)
            for _ in range(5):
                client.step()
            time.sleep(15)  # until the compiled programs are in the mirror, too
            server.end(signal.SIGKILL if name == "nothing" else signal.SIGTERM)
    return seconds


def cost(folder: Path, config: Config) -> dict[str, float]:
    """Of a step, without a mirror and with one that cannot be reached; of the journal; of the mirror."""
    nowhere = {"STORAGE_EMULATOR_HOST": "http://127.0.0.1:9"}
    reachable = folder / "mirror"
    flags = {"none": (), "out of reach": ("--mirror=gs://nowhere/run",), "in reach": (f"--mirror={reachable}",)}
    with contextlib.ExitStack() as stack:
        servers, clients = {}, {}
        for name, given in flags.items():
            servers[name] = stack.enter_context(running(folder / name.replace(" ", "-"), *given, environment=nowhere))
            clients[name] = Client(servers[name].port)
            clients[name].create()
            clients[name].step()
        size = lambda: sum(file.stat().st_size for file in (reachable / "blobs").iterdir())
        time.sleep(15)
        times, before = {name: [] for name in flags}, size()
        for _ in range(config.steps):
            for name, client in clients.items():
                started = time.perf_counter()
                client.step()
                times[name].append(time.perf_counter() - started)
        time.sleep(3)
        sent = (size() - before) / config.steps
        said = clients["out of reach"].http.get("healthz").json()["unprotected"]
        assert said and "nowhere" in said[0], said
        print(f"with the mirror out of reach the server says: {said[0]}")
        for name in ("out of reach", "in reach"):
            servers.pop(name).end()
        cpu = servers["none"].cpu_s()
        for _ in range(config.requests // 4):  # a step is four requests
            clients["none"].step()
        request_us = (servers["none"].cpu_s() - cpu) / config.requests * 1e6
    medians = {name: statistics.median(each) for name, each in times.items()}
    ratios = {name: medians[name] / medians["none"] for name in ("out of reach", "in reach")}
    print(
        f"{1e3 * medians['none']:.1f} ms a step without a mirror;", *(f"{r:.3f} x {name}" for name, r in ratios.items())
    )
    return {
        "ratio_unreachable": ratios["out of reach"],
        "ratio_reachable": ratios["in reach"],
        "sent_bytes_a_step": sent,
        "request_cpu_us": request_us,
    }


def journal_cpu_us(folder: Path) -> float:
    """CPU time of a request's two records and its answer's, 500 requests/s in groups as a server's loop makes them."""
    folder.mkdir()
    journal, started = Journal(folder), time.process_time()
    for seq in range(1000):
        journal.add("request", "s0:train:0", seq, b"forward_backward r0000000000000000000000000000")
        journal.add("payload", "s0:train:0", seq, bytes(2000))
        journal.add("answer", f"r{seq:028x}", 0, bytes(1000))
        if seq % 5 == 4:  # what arrives while one commit runs
            journal.durable().result()
    used = time.process_time() - started
    journal.close()
    return used / 1000 * 1e6


def main(config: Config) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        seconds = time_to_first_step(folder)
        (folder / "cost").mkdir()
        figures = cost(folder / "cost", config)
        figures["journal_cpu_us"] = journal_cpu_us(folder / "journal")
    share = figures["journal_cpu_us"] / figures["request_cpu_us"]
    print(f"{figures['request_cpu_us']:.0f} us of CPU a request, {100 * share:.1f} % of it the journal's")
    print(f"a step sends {figures['sent_bytes_a_step'] / 1e3:.1f} kB to the mirror")
    sooner = seconds["nothing"] / seconds["the mirror alone"]
    print(f"the first step comes {sooner:.2f} x sooner from the mirror alone than from nothing")
    goals = {
        "from the mirror alone at least 3 x sooner than from nothing": sooner >= 3,
        "a step takes at most 5 % longer while the mirror cannot be reached": figures["ratio_unreachable"] <= 1.05,
        "the journal takes at most 5 % of a request": share <= 0.05,
    }
    finish(dict(first_step_s=seconds, **figures), goals, ["jax", "tinker", "fsspec"])


if __name__ == "__main__":
    main(tyro.cli(Config))
