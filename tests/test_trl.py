"""TRL's asynchronous trainer on two real vLLM replicas behind router.py: unchanged, it takes them for one server.

One run for the whole file: two replicas, the router and trl_client.py, each a process of its own. It takes minutes.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import httpx
import jax
import pytest
from conftest import ROOT

import model
from sampler import GUARD, SamplerConfig, replica_commands

pytestmark = [pytest.mark.engine, pytest.mark.slow]

STEPS = 12
STALENESS = 4  # TRL's own --max_staleness: a sample may be so many versions old
VERSIONS = [f"trl-policy-v{n}" for n in range(1, STEPS + 2)]  # one before the first step, and one after each
PYTHON = model.ENGINE / "bin" / "python"


@contextlib.contextmanager
def running(command: list, log: Path, environment: dict[str, str]) -> Iterator[subprocess.Popen]:
    """A process and all that it starts, until the block ends. A guard ends what it guards when its stdin is closed."""
    with log.open("wb") as out:
        asked = dict(stdin=subprocess.PIPE, stdout=out, stderr=out, start_new_session=True)
        process = subprocess.Popen(list(map(str, command)), cwd=ROOT, env=environment, **asked)
    try:
        yield process
    finally:
        process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=20)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def wait_for(what, *processes: subprocess.Popen, within_s: float = 600):
    """What `what` returns when it is true at last; none of the processes may end before."""
    deadline = time.monotonic() + within_s
    while not (found := what()):
        ended = [process.args for process in processes if process.poll() is not None]
        assert not ended and time.monotonic() < deadline, ended
        time.sleep(0.1)
    return found


@pytest.fixture(scope="module")
def run(state_dir, tmp_path_factory):
    """The run when it is over: .code, .steps (TRL's metrics), .stats (the router's), .logs (of both replicas)."""
    root = tmp_path_factory.mktemp("trl")
    base = model.load(model.ModelConfig(max_rank=8), state_dir=state_dir, devices=jax.devices()[:1])
    config = SamplerConfig(sampler="vllm", replicas=2, context=256, slots=16, versions=STALENESS + 1)
    commands, environment = replica_commands(base, config, root), os.environ | {"OMP_NUM_THREADS": "1"}
    replicas = [f"--replica={url}" for url, _, _ in commands]
    router_command = [sys.executable, "-c", GUARD, sys.executable, "router.py", "--port=0", *replicas]
    logs, seconds, started = [root / "replica-0.log", root / "replica-1.log"], {}, time.monotonic()
    with contextlib.ExitStack() as stack:
        start = lambda command, log, env: stack.enter_context(running(command, log, env))
        servers = [start(command, log, env) for (_, command, env), log in zip(commands, logs, strict=True)]
        servers += [start(router_command, root / "router.log", environment)]
        said = lambda: re.search(r"listening at (\S+)", (root / "router.log").read_text())
        router = httpx.Client(base_url=wait_for(said, *servers)[1], timeout=60)
        wait_for(lambda: router.get("/health").status_code == 200, *servers)
        seconds["until the replicas serve"] = time.monotonic() - started
        client = [PYTHON, "tests/trl_client.py", base.directory, router.base_url, root / "output", STEPS]
        trl = start(client, root / "trl.log", environment)
        wait_for(lambda: trl.poll() is not None, *servers)
        seconds["in all"] = time.monotonic() - started
        stats = router.get("/router/stats").json()
        router.close()
    if trl.returncode:
        pytest.fail((root / "trl.log").read_text()[-5000:])
    history = json.loads((root / "output" / "log.json").read_text())
    seconds["of TRL's steps"] = history[-1]["train_runtime"]
    print(*(f"{value:.0f} s {name}" for name, value in seconds.items()), sep="\n")
    return SimpleNamespace(code=trl.returncode, steps=history[:-1], stats=stats, logs=[log.read_text() for log in logs])


def test_it_trains_to_the_end(run):
    assert run.code == 0 and len(run.steps) == STEPS
    assert sum(step["grad_norm"] > 0 for step in run.steps) > STEPS / 2  # where all rewards are equal it is 0
    assert not any(step.get("rollout/vllm_retry_total") for step in run.steps)  # no request had to come twice


def test_what_the_replicas_sampled_is_what_the_trainer_computes(run):
    """The mean ratio is 1 for any two policies, in expectation; the divergence is 0 only for the same."""
    ratios, divergences = [step["ratio"] for step in run.steps], [step["kl"] for step in run.steps]
    print(f"ratio {min(ratios):.6f} to {max(ratios):.6f}, divergence up to {max(divergences):.1e} nats")
    assert all(0.999 < ratio < 1.001 for ratio in ratios)
    assert max(divergences) < 1e-6


def test_every_version_was_loaded_once_on_each_replica_and_left_in_its_time(run):
    for log in run.logs:
        assert re.findall(r"Loaded new LoRA adapter: name '(\S+)'", log) == VERSIONS
        assert re.findall(r"Removed LoRA adapter: name '(\S+)'", log) == VERSIONS[: -STALENESS - 1]
        for call in ("/v1/load_lora_adapter", "/pause?mode=keep", "/resume"):
            assert log.count(f'"POST {call} HTTP/1.1" 200') == len(VERSIONS), call
    assert list(run.stats["adapters"]) == VERSIONS[-STALENESS - 1 :] and not run.stats["modes"]


def test_prompts_went_where_they_were_cached_and_no_replica_left(run):
    stats = run.stats
    served = [log.count('"POST /v1/completions HTTP/1.1" 200') for log in run.logs]
    print(f"served {served}, {stats}")
    assert stats["ejections_total"] == stats["retries_total"] == stats["refused_total"] == 0
    assert stats["affinity_total"] > stats["unmatched_total"] > 0 and min(served) > 0
    assert stats["cached_tokens_total"] > 0
