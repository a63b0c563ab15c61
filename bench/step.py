"""What the server costs: a training step through HTTP against the same compiled programs called in a loop.

    client -> HTTP -> decode -> pack -> transfer -> [tile, tile, .. AdamW] -> fetch -> encode -> HTTP -> client
                                                    ^ all that the bare step is

The arithmetic is the model's; whatever else a request costs is the server's doing. Five measures, each with its aim:

- throughput: one request of 64 datums and an optim_step, tokens/s through the server over tokens/s of the bare step.
  The aim: at least 0.85. The bare step runs in this process with its tiles on the device; the two take turns, and each
  is idle while the other runs. Wall time holds the client's work too, which shares the cores. CPU time is of the server
  alone, and does not see waiting: read both. It takes minutes a round: --datums 16 is quicker.
- adapters: eight adapters taking turns on the device against one that has all the turns: CPU time a token. The aim: at
  most 1.1 times. They are data to one program; swapping them should cost nothing.
- round trip: forward_backward of 29 tokens and an optim_step on the demo model, sent together as a training loop does.
  The aim: 30 ms. Its floor is the same calls of the trainer without HTTP.
- sample: 16 tokens of one prompt on the demo model. The aim: 100 ms. Its floor is the engine without HTTP.
- prompt: a head pass over half prompt tokens against none. The aim: at most 0.55 of the CPU time, since prompts are not
  scored.

Left out: large models, where the server's share is smaller still; other machines than a CPU.
Run: `uv run bench/step.py`, or with --devices 4 on as many virtual devices
"""

import contextlib
import dataclasses
import json
import logging
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tinker
import tyro
from report import finish
from safetensors.numpy import save_file
from tinker import types

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import wire
from losses import score
from model import DEMO_CONFIG, ModelConfig, load, random_weights, write_demo
from sampler import EmbeddedEngine, SamplerConfig
from trainer import Trainer, TrainerConfig, make_pieces, make_tiles

SERVER = Path(__file__).resolve().parent.parent / "server.py"
LOSS, ROW_LEN, TURNS = "importance_sampling", 512, 8
MODEL = DEMO_CONFIG | dict(
    vocab_size=32_768,
    hidden_size=512,
    intermediate_size=1536,
    num_hidden_layers=8,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=64,
)
ADAM = types.AdamParams(learning_rate=1e-5)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    throughput: bool = True  # --no-throughput leaves a section out, likewise the others
    adapters: bool = True
    latency: bool = True
    prompt: bool = True
    datums: int = 64  # of the request whose throughput is measured; 16 take a quarter of the time
    rounds: int = 2  # of each kind, in turn; medians count
    trips: int = 60  # round trips and samples, after ten to warm up
    devices: int = 1  # virtual ones, of the server and here


# ---- clocks


@dataclasses.dataclass(frozen=True)
class Cost:
    wall_s: float
    cpu_s: float  # of all threads of one process


def cost(pid: int, run: Callable[[], Any]) -> Cost:
    clock = ~pid << 3 | 2  # clock_getcpuclockid(3), which Python lacks; Linux only, nanoseconds where /proc has ticks
    cpu, wall = time.clock_gettime(clock), time.perf_counter()
    run()
    return Cost(time.perf_counter() - wall, time.clock_gettime(clock) - cpu)


def median(costs: Sequence[Cost]) -> Cost:
    return Cost(*(statistics.median(each) for each in zip(*map(dataclasses.astuple, costs), strict=True)))


# ---- the model, the data and the server


def write_model(folder: Path) -> Path:
    write_demo(folder)  # its tokenizer will do
    (folder / "config.json").write_text(json.dumps(MODEL))
    save_file(random_weights(MODEL, seed=0), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def datums(count: int, low: int, high: int, *, vocab_size: int, seed: int = 0) -> list[wire.Datum]:
    """As the server has them once they are decoded: every token is scored."""
    rng, made = np.random.default_rng(seed), []
    for length in rng.integers(low, high + 1, count):
        tokens = rng.integers(0, vocab_size, length + 1)
        floats = {"logprobs": rng.uniform(-11, -10, length), "advantages": rng.normal(size=length)}
        inputs = {"target_tokens": tokens[1:], **{name: x.astype(np.float32) for name, x in floats.items()}}
        made.append(wire.Datum(tokens=tokens[:-1].astype(np.int32), inputs=inputs))
    return made


def request_of(data: list[wire.Datum]) -> wire.ForwardBackward:
    return wire.ForwardBackward("bare", 1, data, LOSS, {}, False)


def as_sent(data: list[wire.Datum]) -> list[types.Datum]:
    tensors = lambda datum: {name: types.TensorData.from_numpy(x) for name, x in datum.inputs.items()}
    tokens = lambda datum: types.ModelInput.from_ints(datum.tokens.tolist())
    return [types.Datum(model_input=tokens(datum), loss_fn_inputs=tensors(datum)) for datum in data]


def tokens_of(data: list[wire.Datum]) -> int:
    return sum(len(datum.tokens) for datum in data)


@contextlib.contextmanager
def served(state_dir: Path, *flags: str) -> Iterator[tuple[int, tinker.ServiceClient]]:
    """(pid, client) of a server that ends with the block."""
    log_path = state_dir / "server.log"
    command = [sys.executable, str(SERVER), "--port", "0", "--state-dir", str(state_dir), *flags]
    with log_path.open("w") as out:
        process = subprocess.Popen(command, cwd=SERVER.parent, stdout=out, stderr=out)
    try:
        while not (ready := re.search(r"ready in .*TINKER_BASE_URL=(\S+)", log_path.read_text())):
            if process.poll() is not None:
                raise RuntimeError(f"the server ended before it was ready:\n{log_path.read_text()[-2000:]}")
            time.sleep(0.1)
        client = tinker.ServiceClient(base_url=ready[1], api_key="tml-bench")
        yield process.pid, client
        client.close("success").result()
    finally:
        process.send_signal(signal.SIGINT)
        process.wait()


def step(clients: Sequence[tinker.TrainingClient], batches: Sequence[list[types.Datum]]) -> None:
    """Each batch and its optim_step, in turn by the next client; all are sent before the first is waited for."""
    futures = []
    for i, batch in enumerate(batches):
        client = clients[i % len(clients)]
        futures += [client.forward_backward(batch, LOSS), client.optim_step(ADAM)]
    for future in futures:
        future.result()


# ---- throughput, and adapters that take turns


def bare_step(trainer: Trainer, data: list[wire.Datum]) -> Callable[[], None]:
    """A function: the gradient program over all tiles, then AdamW, their inputs on the devices already."""
    trainer.create("bare", seed=0, rank=32)
    state, adam = trainer.adapters["bare"], np.array([1e-5, 0.9, 0.95, 1e-12, 0, 0], np.float32)
    tiles = make_tiles(make_pieces([request_of(data)]), rows=trainer.rows, row_len=trainer.row_len, alone=trainer.alone)
    base, head, _, *scale = trainer._arguments(state.weights, state.scale, tiles[0], LOSS)[:4]
    placed = jax.block_until_ready([trainer._arguments(state.weights, state.scale, tile, LOSS)[4:] for tile in tiles])

    def run() -> None:
        for inputs in placed:
            state.gradients, _ = trainer._gradient(base, head, state.weights, state.gradients, *scale, *inputs)
        states = state.weights, state.gradients, state.moments
        state.weights, state.gradients, state.moments, out = trainer._adamw(*states, np.int32(state.step), adam)
        jax.block_until_ready((state.weights, out))
        state.step += 1

    return run


def large(config: Config, folder: Path, goals: dict[str, bool]) -> dict[str, Any]:
    """Both sections on the larger model."""
    model, record = write_model(folder / "large"), {}
    flags = ("--model", str(model), "--row-len", str(ROW_LEN), "--max-adapters", str(TURNS))
    with served(folder, *flags) as (pid, service):
        create = lambda seed: service.create_lora_training_client(str(model), rank=32, seed=seed).result()
        client = create(0)
        if config.throughput:
            data = datums(config.datums, 128, 512, vocab_size=MODEL["vocab_size"])
            trainer = Trainer(load(ModelConfig(model=str(model)), state_dir=folder), TrainerConfig(row_len=ROW_LEN))
            trainer.warm_up()
            runs = {
                "server": (pid, lambda: step([client], [as_sent(data)])),
                "bare": (os.getpid(), bare_step(trainer, data)),
            }
            record["throughput"] = throughput(in_turn(runs, config.rounds), config.datums, tokens_of(data), goals)
            del trainer
        if config.adapters:
            data = datums(2 * TURNS, 128, 512, vocab_size=MODEL["vocab_size"], seed=1)
            batches = [as_sent(data[i::TURNS]) for i in range(TURNS)]
            several = [client, *(create(seed) for seed in range(1, TURNS))]
            runs = {"one": (pid, lambda: step([client], batches)), "eight": (pid, lambda: step(several, batches))}
            record["adapters"] = adapters(in_turn(runs, config.rounds), tokens_of(data), goals)
    return record


def in_turn(runs: dict[str, tuple[int, Callable]], rounds: int) -> dict[str, Cost]:
    """Medians; what disturbs the machine disturbs all alike. Everything is compiled before the first."""
    costs: dict[str, list[Cost]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, (pid, run) in runs.items():
            costs[name].append(cost(pid, run))
    return {name: median(each) for name, each in costs.items()}


def throughput(costs: dict[str, Cost], count: int, tokens: int, goals: dict[str, bool]) -> dict[str, Any]:
    server, bare = costs["server"], costs["bare"]
    ratios = {"wall": bare.wall_s / server.wall_s, "cpu": bare.cpu_s / server.cpu_s}
    print(f"{f'{count} datums, {tokens} tokens':>26} {'wall s':>7} {'tokens/s':>9} {'CPU s':>7} {'tokens/CPU s':>13}")
    for name, each in costs.items():
        speeds = f"{each.wall_s:>7.2f} {tokens / each.wall_s:>9.0f} {each.cpu_s:>7.2f} {tokens / each.cpu_s:>13.0f}"
        print(f"{name:>26} {speeds}")
    print(f"{'server / bare':>26} {'':>7} {ratios['wall']:>9.3f} {'':>7} {ratios['cpu']:>13.3f}\n")
    for name, ratio in ratios.items():
        goals[f"throughput: {ratio:.3f} >= 0.85 of the bare step's, {name}"] = ratio >= 0.85
    return {"tokens": tokens, "costs": as_record(costs), "ratio": ratios}


def adapters(costs: dict[str, Cost], tokens: int, goals: dict[str, bool]) -> dict[str, Any]:
    ratio = costs["eight"].cpu_s / costs["one"].cpu_s
    print(f"{f'{TURNS} turns, {tokens} tokens':>26} {'wall s':>7} {'CPU s':>7} {'CPU us/token':>13}")
    for name, each in costs.items():
        print(f"{f'{name} adapter(s)':>26} {each.wall_s:>7.2f} {each.cpu_s:>7.2f} {1e6 * each.cpu_s / tokens:>13.0f}")
    print()
    goals[f"adapters: eight take {ratio:.3f} <= 1.1 x the CPU time of one"] = ratio <= 1.1
    return {"tokens": tokens, "costs": as_record(costs), "ratio": ratio}


# ---- round trips of the demo model


@dataclasses.dataclass(frozen=True)
class SampleRequest:
    """As the engine reads it."""

    prompt: np.ndarray
    params: wire.SamplingParams
    num_samples: int = 1
    prompt_logprobs: bool = False
    prompt_logprobs_last_n: int | None = None
    topk_prompt_logprobs: int = 0
    topk_sample_logprobs: int = 0


def latency(config: Config, folder: Path, goals: dict[str, bool]) -> dict[str, Any]:
    (datum,) = data = datums(1, 29, 29, vocab_size=DEMO_CONFIG["vocab_size"])
    model = load(ModelConfig(), state_dir=folder)
    trainer, engine = Trainer(model, TrainerConfig()), EmbeddedEngine(model, SamplerConfig())
    trainer.warm_up()
    engine.warm_up()
    trainer.create("bare", seed=0, rank=32)
    params = wire.SamplingParams(
        max_tokens=16,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        seed=0,
        stop_tokens=(),
        stop_strings=(),
        stop_at_eos=False,
    )

    def trainer_alone() -> None:
        trainer.forward_backward("bare", [request_of(data)], backward=True)
        trainer.optim_step("bare", ADAM.model_dump())

    costs = {}
    with served(folder) as (pid, service):
        client = service.create_lora_training_client("demo", rank=32, seed=0).result()
        policy, sent = service.create_sampling_client(base_model="demo").result(), as_sent(data)
        asked = types.SamplingParams(max_tokens=16, temperature=1.0, seed=0, stop=[])
        sample = lambda: policy.sample(sent[0].model_input, 1, asked).result()
        runs = {
            "round trip": (pid, lambda: step([client], [sent])),
            "without HTTP": (os.getpid(), trainer_alone),
            "sample": (pid, sample),
            "engine": (os.getpid(), lambda: engine.submit(SampleRequest(datum.tokens, params), None).result()),
        }
        for name, (process, run) in runs.items():
            for _ in range(10):
                run()
            costs[name] = median([cost(process, run) for _ in range(config.trips)])
    engine.close()
    print(f"{f'demo, median of {config.trips}':>26} {'wall ms':>8} {'CPU ms':>8}")
    for name, each in costs.items():
        print(f"{name:>26} {1e3 * each.wall_s:>8.1f} {1e3 * each.cpu_s:>8.1f}")
    print()
    for name, most_ms in (("round trip", 30), ("sample", 100)):
        wall_ms = 1e3 * costs[name].wall_s
        goals[f"{name}: {wall_ms:.1f} <= {most_ms} ms"] = wall_ms <= most_ms
    return {"costs": as_record(costs)}


# ---- prompt tokens


def prompt(config: Config, goals: dict[str, bool]) -> dict[str, Any]:
    """The head alone, T=2048 D=256 V=32k; prompts and completions of 64 tokens alternate in the half case."""
    tokens, width, vocabulary = 2048, 256, 32_768
    keys = jax.random.split(jax.random.key(0), 4)
    hidden, cotangents = jax.random.normal(keys[0], (tokens, width)), jax.random.normal(keys[1], (tokens,))
    head = jax.random.normal(keys[2], (vocabulary, width)) / width**0.5
    targets = jax.random.randint(keys[3], (1, tokens), 0, vocabulary)

    @jax.jit
    def run(hidden, live):
        return jax.value_and_grad(lambda hidden: (score(hidden, head, targets, live).logprobs[0] * cotangents).sum())(
            hidden
        )

    lives = {"none": jnp.ones(tokens, bool), "half": jnp.arange(tokens) // 64 % 2 == 1}
    runs = {
        name: (os.getpid(), lambda live=live: jax.block_until_ready(run(hidden, live))) for name, live in lives.items()
    }
    for _, warm_up in runs.values():
        warm_up()
    costs = in_turn(runs, 3 * config.rounds)
    ratio = costs["half"].cpu_s / costs["none"].cpu_s
    print(f"{'prompt tokens, head alone':>26} {'wall ms':>8} {'CPU ms':>8}")
    for name, each in costs.items():
        print(f"{name:>26} {1e3 * each.wall_s:>8.0f} {1e3 * each.cpu_s:>8.0f}")
    print()
    goals[f"prompt: half of the tokens, {ratio:.3f} <= 0.55 of the CPU time"] = ratio <= 0.55
    return {"costs": as_record(costs), "ratio": ratio}


# ---- the report


def as_record(costs: dict[str, Cost]) -> dict[str, dict[str, float]]:
    return {name: dataclasses.asdict(each) for name, each in costs.items()}


def main(config: Config) -> None:
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={config.devices}"
    goals: dict[str, bool] = {}
    record: dict[str, Any] = {"bench": "step", "config": dataclasses.asdict(config)}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        jax.config.update("jax_compilation_cache_dir", str(folder / "xla"))  # the server's: what it compiled is read
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
        if config.throughput or config.adapters:
            record |= large(config, folder, goals)
        if config.latency:
            record["latency"] = latency(config, folder, goals)
        if config.prompt:
            record["prompt"] = prompt(config, goals)
    finish(record, goals, ("jax", "maxtext", "tinker", "uvicorn", "starlette"))


if __name__ == "__main__":
    for noisy in ("absl", "httpx"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # or it says that PyTorch is missing
    main(tyro.cli(Config, description="What the server costs beside the bare compiled step."))
