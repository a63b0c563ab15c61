"""What a client feels of the others: its training step and its sample, alone and beside them.

One client takes steps (a forward_backward of one sequence, an optim_step) and asks for samples, one after another:
alone; while another's one forward_backward of many long sequences is computed, whose whole duration is what a server
without turns would make it wait; and while another takes the same steps and four sample.

Run: `uv run bench/neighbours.py`
"""

import dataclasses
import statistics
import threading
import time
from collections.abc import Callable

import numpy as np
import tinker
import tyro
from heartbeat import server
from report import finish
from tinker import types

ADAM = types.AdamParams(learning_rate=1e-4)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    rounds: int = 40  # steps and samples of the client that is measured
    many: int = 1000  # sequences in the other's one request
    length: int = 200  # tokens in each sequence of anybody


def datum(length: int, seed: int) -> types.Datum:
    tokens = np.random.default_rng(seed).integers(0, 256, length + 1).tolist()
    inputs = {"target_tokens": tokens[1:], "weights": [1.0] * length}
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)


def stepping(service: tinker.ServiceClient, config: Config) -> Callable[[], object]:
    client, data = service.create_lora_training_client("demo", rank=8).result(), [datum(config.length, 1)]

    def step() -> None:
        working = client.forward_backward(data, "cross_entropy"), client.optim_step(ADAM)
        for each in working:
            each.result()

    return step


def sampling(service: tinker.ServiceClient) -> Callable[[], object]:
    client, params = service.create_sampling_client(base_model="demo").result(), types.SamplingParams(max_tokens=16)
    prompt = types.ModelInput.from_ints(list(range(65, 91)))
    return lambda: client.sample(prompt, 1, params).result()


def median_ms(works: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Of each, taking turns."""
    seen: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds):
        for name, work in works.items():
            started = time.perf_counter()
            work()
            seen[name].append(1e3 * (time.perf_counter() - started))
    return {name: statistics.median(each) for name, each in seen.items()}


def main(config: Config) -> None:
    with server(None) as url:
        connect = lambda: tinker.ServiceClient(base_url=url, api_key="tml-any")
        service, other = connect(), connect()
        works = {"step": stepping(service, config), "sample": sampling(service)}
        for work in works.values():
            work()
        rows = {"alone": median_ms(works, config.rounds)}

        greedy = other.create_lora_training_client("demo", rank=8).result()
        started = time.perf_counter()
        working = greedy.forward_backward([datum(config.length, i) for i in range(config.many)], "cross_entropy")
        beside = median_ms(works, config.rounds)
        assert not working.future().done(), "the other's request ended first: ask for --many more"
        rows["a long request"] = beside
        working.result()
        longest_s = time.perf_counter() - started

        others, over = [stepping(other, config), *(sampling(other) for _ in range(4))], threading.Event()

        def go_on(work: Callable[[], object]) -> None:
            while not over.is_set():
                work()

        threads = [threading.Thread(target=go_on, args=(work,)) for work in others]
        for thread in threads:
            thread.start()
        rows["one trains, four sample"] = median_ms(works, config.rounds)
        over.set()
        for thread in threads:
            thread.join()

    print(f"{'beside':>24} {'step, ms':>9} {'x alone':>8} {'sample, ms':>11} {'x alone':>8}")
    for name, ms in rows.items():
        step, sample = (ms[work] / rows["alone"][work] for work in works)
        print(f"{name:>24} {ms['step']:>9.0f} {step:>8.2f} {ms['sample']:>11.0f} {sample:>8.2f}")
    print(f"without turns the step beside the long request would have waited {longest_s:.0f} s")
    ratios = {name: ms["step"] / rows["alone"]["step"] for name, ms in rows.items()}
    goals = {f"a step is at most 2 x slower beside: {name}": ratio <= 2 for name, ratio in ratios.items()}
    record = {"bench": "neighbours", "ms": rows, "long_request_s": longest_s, "many": config.many}
    finish(record, goals, ["jax", "tinker"])


if __name__ == "__main__":
    main(tyro.cli(Config, description="What a client of the server feels of the others."))
