"""GRPO in a page: a client that teaches a policy to sort, through the official `tinker` SDK and nothing of this repository.

    warm-up:  shuffled answers -> forward_backward(cross_entropy) -> optim_step
    loop:     snapshot -> sample N a prompt -> reward -> advantage -> forward_backward(importance_sampling) -> optim_step

The task: the prompt is three different digits, `507=`; the answer is the same digits ascending, `057`, and the end of the text.
The reward is 1 for exactly that, else 0. Warm-up answers are the prompt's digits in a random order: they teach the form of an
answer and nothing of sorting, so a policy that has learned them is right once in 3! = 6. Order is learned from rewards alone.
Rewards before and after are measured on prompts that are held out of both phases.

What to look at: `kl`, the mean of sampling - training log-probs. Every step is on-policy, so the sampler and the trainer score the
same tokens under the same weights: what differs is their arithmetic, about 1e-7. A kl of 1e-2 would mean training on wrong ratios.

Left out: a KL penalty to a reference, several epochs over a batch (then use the loss `ppo`), overlap of sampling and training.
Run: `uv run examples/grpo.py --serve`, or against a running server `TINKER_BASE_URL=http://... uv run examples/grpo.py`.
Read first: `train`, which is the algorithm; the rest is the task and the report.
"""

import contextlib
import dataclasses
import itertools
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import tinker
import tyro
from rich.console import Console
from rich.progress import Progress, TextColumn
from rich.table import Table
from tinker import types

SERVER = Path(__file__).resolve().parent.parent / "server.py"
HELD_OUT = 128  # of the 720 prompts
START_S = 300.0  # the longest wait for a server started here


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    base_url: str | None = None  # the server; unset: $TINKER_BASE_URL
    model: str | None = None  # unset: the first that the server names
    serve: bool = False  # start the repository's server on a free port, and stop it at the end
    state_dir: Path | None = None  # of the server that --serve starts; unset: a temporary folder
    seed: int = 0  # of the adapter, the prompts and the sampling
    rank: int = 32  # of the adapter
    warmup_steps: int = 200  # supervised steps
    warmup_batch: int = 64  # answers a supervised step
    warmup_learning_rate: float = 5e-3
    steps: int = 80  # GRPO steps
    prompts: int = 16  # prompts a GRPO step
    samples: int = 16  # answers a prompt: one group
    learning_rate: float = 3e-3  # of the first GRPO step; falls linearly to 0
    plot: Path = Path("grpo.png")  # reward over steps

    def __post_init__(self):
        for name, least in dict(seed=0, warmup_steps=0, warmup_batch=1, steps=1, prompts=1, samples=2).items():
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least {least}")
        if self.prompts > 720 - HELD_OUT:
            raise ValueError(f"prompts is {self.prompts}; a step draws different ones, of {720 - HELD_OUT}")
        if self.serve and self.base_url:
            raise ValueError(f"serve starts a server, and base_url {self.base_url!r} names another: give one of the two")


# ---------------------------------------------------------------------------------------------------- the task


@dataclasses.dataclass(frozen=True)
class Task:
    """The task in tokens."""

    tokenizer: Any

    def prompt(self, digits: str) -> list[int]:
        return self.tokenizer.encode(f"{digits}=", add_special_tokens=False)

    def answer(self, digits: str) -> list[int]:
        return self.tokenizer.encode(digits, add_special_tokens=False)

    def reward(self, digits: str, tokens: Sequence[int]) -> float:
        return float(list(tokens) == self.answer(min(digits) + max(digits)))


def all_prompts(rng: np.random.Generator) -> tuple[list[str], list[str]]:
    """(for training, held out)"""
    prompts = rng.permutation(["".join(digits) for digits in itertools.permutations("0123456789", 3)]).tolist()
    return prompts[HELD_OUT:], prompts[:HELD_OUT]


def make_datum(prompt: list[int], answer: Sequence[int], **inputs: Sequence[float]) -> types.Datum:
    """Predict `answer` after `prompt`; `inputs` are per answer token. The prompt's own tokens get zeros: they count for nothing."""
    tokens = [*prompt, *answer]
    padded = {name: [0.0] * (len(prompt) - 1) + list(values) for name, values in inputs.items()}
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs={"target_tokens": tokens[1:], **padded}
    )


# ---------------------------------------------------------------------------------------------------- the algorithm


def warm_up(
    client: tinker.TrainingClient, task: Task, prompts: list[str], config: Config, rng: np.random.Generator
) -> Iterator[dict]:
    """Supervised steps on answers in no order. Yields each one's loss an answer."""
    for _ in range(config.warmup_steps):
        batch = []
        for digits in rng.choice(prompts, config.warmup_batch):
            answer = task.answer("".join(rng.permutation(list(digits))[:2]))
            batch.append(make_datum(task.prompt(digits), answer, weights=[1.0] * len(answer)))
        forward_backward = client.forward_backward(batch, "cross_entropy")
        optim_step = client.optim_step(types.AdamParams(learning_rate=config.warmup_learning_rate))
        loss = forward_backward.result().metrics["loss:sum"]  # both were sent before the first is waited for
        optim_step.result()
        yield dict(loss=loss / len(batch))


def sample(
    client: tinker.TrainingClient, task: Task, prompts: Sequence[str], samples: int, *, seed: int, temperature: float = 1.0
) -> list[list[types.SampledSequence]]:
    """The present policy's answers: a group of `samples` for each prompt."""
    policy = client.save_weights_and_get_sampling_client().result()  # an immutable snapshot of the adapter
    futures = []
    for i, digits in enumerate(prompts):
        params = types.SamplingParams(max_tokens=len(task.answer(digits)), temperature=temperature, seed=seed + i)
        futures.append(policy.sample(types.ModelInput.from_ints(task.prompt(digits)), samples, params))
    return [list(future.result().sequences) for future in futures]


def train(
    client: tinker.TrainingClient, task: Task, prompts: list[str], config: Config, rng: np.random.Generator
) -> Iterator[dict]:
    """GRPO: an answer better than its group's mean becomes likelier, a worse one less likely. Yields each step's figures.

    Reference: Shao et al. 2024 (arXiv 2402.03300), equation 3, on-policy (one step a batch, so nothing to clip) and without its KL
    term. The advantage is not divided by the group's standard deviation: Liu et al. 2025 (arXiv 2503.20783).
    """
    for step in range(config.steps):
        chosen = rng.choice(prompts, config.prompts, replace=False).tolist()
        groups = sample(client, task, chosen, config.samples, seed=int(rng.integers(2**30)))
        rewards = np.array([[task.reward(d, s.tokens) for s in group] for d, group in zip(chosen, groups, strict=True)])
        advantages = rewards - rewards.mean(axis=1, keepdims=True)  # [prompts, samples]

        batch, sampling_logprobs = [], []
        for digits, group, of_group in zip(chosen, groups, advantages.tolist(), strict=True):
            for s, advantage in zip(group, of_group, strict=True):
                per_token = dict(logprobs=s.logprobs, advantages=[advantage] * len(s.tokens))
                batch.append(make_datum(task.prompt(digits), s.tokens, **per_token))
                sampling_logprobs.append(np.array(s.logprobs))
        forward_backward = client.forward_backward(batch, "importance_sampling")
        optim_step = client.optim_step(types.AdamParams(learning_rate=config.learning_rate * (1 - step / config.steps)))
        outputs = forward_backward.result().loss_fn_outputs
        optim_step.result()

        logprobs = [output["logprobs"].to_numpy() for output in outputs]  # the trainer's, of prompt and answer
        gaps = np.concatenate([p - q[-len(p) :] for p, q in zip(sampling_logprobs, logprobs, strict=True)])
        yield dict(reward=rewards.mean(), kl=gaps.mean(), largest_gap=np.abs(gaps).max())


def evaluate(client: tinker.TrainingClient, task: Task, prompts: list[str]) -> dict:
    """Mean reward over `prompts`: of two samples each at temperature 1, and of the greedy answer."""
    figures = {}
    for name, samples, temperature in (("reward", 2, 1.0), ("greedy", 1, 0.0)):
        groups = sample(client, task, prompts, samples, seed=0, temperature=temperature)
        figures[name] = np.mean([task.reward(d, s.tokens) for d, g in zip(prompts, groups, strict=True) for s in g])
    return figures


# ---------------------------------------------------------------------------------------------------- the report


def watch(progress: Progress, name: str, steps: Iterable[dict], total: int) -> list[dict]:
    """Run the steps under a progress bar."""
    bar, rows = progress.add_task(name, total=total, figures=""), []
    for row in steps:
        rows.append(row)
        progress.update(bar, advance=1, figures="  ".join(f"{key} {value:.2g}" for key, value in row.items()))
    return rows


def table(before: dict, steps: list[dict], after: dict) -> Table:
    out = Table("", "reward", "greedy", "kl", "largest gap", title="mean reward; sampling - training log-probs")
    shown = range(0, len(steps), -(-len(steps) // 8))
    rows = [("held out, before", before), *((f"step {i}", steps[i]) for i in shown), ("held out, after", after)]
    for name, row in rows:
        figures = [format(row[key], form) if key in row else ""
                   for key, form in dict(reward=".3f", greedy=".3f", kl=".1e", largest_gap=".1e").items()]  # fmt: skip
        out.add_row(name, *figures)
    return out


def plot(before: dict, steps: list[dict], after: dict, path: Path) -> None:
    matplotlib.use("Agg")  # a file, never a window
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 3.5), layout="constrained")
    axes.plot([row["reward"] for row in steps], label="training prompts, each step")
    axes.plot([0, len(steps)], [before["reward"], after["reward"]], "o", label="held-out prompts")
    axes.axhline(1 / 6, color="grey", linestyle=":", label="any order (1/6)")
    axes.set(xlabel="GRPO step", ylabel="mean reward", ylim=(0, 1.02))
    axes.legend(loc="lower right")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png", dpi=150)


@contextlib.contextmanager
def server(state_dir: Path | None) -> Iterator[str]:
    """server.py as a child process; yields its address."""
    with contextlib.ExitStack() as stack:
        folder = state_dir if state_dir is not None else Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "server.log"
        log = stack.enter_context(path.open("wb"))
        child = subprocess.Popen([sys.executable, SERVER, "--port", "0", "--state-dir", folder], stdout=log, stderr=log)
        try:
            give_up = time.monotonic() + START_S
            while not (ready := re.search(r"TINKER_BASE_URL=(\S+)", path.read_text())):
                if child.poll() is not None or time.monotonic() > give_up:
                    raise RuntimeError(f"server.py did not start; the end of its log:\n{path.read_text()[-2000:]}")
                time.sleep(0.1)
            yield ready[1]
        finally:
            child.send_signal(signal.SIGINT)
            try:
                child.wait(10)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()


def main(config: Config) -> None:
    console, started = Console(), time.monotonic()
    with contextlib.ExitStack() as stack:
        base_url = config.base_url if config.base_url is not None else os.environ.get("TINKER_BASE_URL")
        if config.serve:
            with console.status("starting server.py"):
                base_url = stack.enter_context(server(config.state_dir))
        if not base_url:
            raise ValueError("no server: set --base-url or $TINKER_BASE_URL, or start one here with --serve")
        key = os.environ.get("TINKER_API_KEY", "tml-any")  # a server without a key takes any
        service = stack.enter_context(tinker.ServiceClient(base_url=base_url, api_key=key))
        model = config.model or service.get_server_capabilities().supported_models[0].model_name
        console.print(f"{base_url} serves {model} after {time.monotonic() - started:.0f} s")

        client = service.create_lora_training_client(model, rank=config.rank, seed=config.seed).result()
        task, rng = Task(client.get_tokenizer()), np.random.default_rng(config.seed)
        prompts, held_out = all_prompts(rng)
        columns = *Progress.get_default_columns(), TextColumn("{task.fields[figures]}")
        with Progress(*columns, console=console) as progress:
            watch(progress, "warm-up", warm_up(client, task, prompts, config, rng), config.warmup_steps)
            before = evaluate(client, task, held_out)
            steps = watch(progress, "GRPO", train(client, task, prompts, config, rng), config.steps)
        after = evaluate(client, task, held_out)
    console.print(table(before, steps, after))
    plot(before, steps, after, config.plot)
    console.print(f"{config.plot} after {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # it would say that there is no PyTorch
    try:
        main(tyro.cli(Config, description="GRPO through the tinker SDK: a policy learns to sort three digits."))
    except (ValueError, RuntimeError) as error:
        sys.exit(f"grpo.py: {error}")
