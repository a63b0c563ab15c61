"""GRPO in a page: a client that teaches a policy by reward alone, through the official `tinker` SDK and nothing else.

    warm-up: answers of the right form -> forward_backward(cross_entropy) -> optim_step
    a step:  snapshot -> N samples a prompt -> reward -> advantage -> forward_backward(importance_sampling) -> optim_step

The task: a prompt is three different digits, `572=`; its answer is the two smallest in order, `25`. The reward is 1 for
exactly that, else 0. Warm-up answers are two of the prompt's digits drawn at random: they teach the form and nothing of
order, so a policy that has learned them is right one time in 6. What is smaller is learned from rewards alone.
Rewards before and after are measured on prompts held out of both phases, sampled at temperature 1.

Look at `kl`, the mean over tokens of sampling - training log-prob. Every step is on-policy: sampler and trainer score the
same tokens with the same weights, so it shows their arithmetic only: about 0. At 1e-2 the loss would use wrong ratios.

Left out: a KL penalty to a reference, several steps a batch (they need the loss `ppo`), sampling while training.
Run: `uv run examples/grpo.py --serve`; with a server running: `TINKER_BASE_URL=http://... uv run examples/grpo.py`.
Read first: `train`, which is the algorithm.
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
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import matplotlib
import numpy as np
import tinker
import tyro
from rich.console import Console
from rich.progress import Progress, TextColumn
from rich.table import Table
from tinker import types

SERVER = Path(__file__).resolve().parent.parent / "server.py"
START_S = 300.0  # the longest wait for a server started here
PROMPTS = ["".join(digits) for digits in itertools.permutations("0123456789", 3)]  # 720
HELD_OUT = 128


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    base_url: str | None = None  # the server; unset: $TINKER_BASE_URL
    model: str | None = None  # unset: the first that the server names
    serve: bool = False  # start the repository's server.py on a free port, and stop it at the end
    state_dir: Path | None = None  # of the server that --serve starts; unset: a temporary folder
    seed: int = 0  # of the adapter, the prompts and the sampling
    rank: int = 32  # of the adapter
    warmup_steps: int = 150  # supervised steps
    warmup_batch: int = 64  # answers a supervised step
    warmup_learning_rate: float = 5e-3
    steps: int = 70  # GRPO steps
    prompts: int = 16  # prompts a GRPO step
    samples: int = 16  # answers a prompt: one group
    learning_rate: float = 2e-3
    plot: Path = Path("grpo.png")  # where the curve of the reward goes

    def __post_init__(self):
        limits = {"seed": 0, "warmup_steps": 0, "warmup_batch": 1, "steps": 1, "prompts": 1, "samples": 2}
        for name, least in limits.items():
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least {least}")
        if self.prompts > len(PROMPTS) - HELD_OUT:
            raise ValueError(f"prompts is {self.prompts}; at most {len(PROMPTS) - HELD_OUT} different ones exist")
        if self.serve and self.base_url:
            raise ValueError(f"base_url is {self.base_url!r}, but serve starts its own server: give only one")


# ---------------------------------------------------------------------------------------------------- the task


def solve(digits: str) -> str:
    return "".join(sorted(digits)[:2])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Learner:
    """An adapter in training, and text as its model reads it."""

    client: tinker.TrainingClient
    encode: Callable[[str], list[int]]

    def prompt(self, digits: str) -> list[int]:
        return self.encode(f"{digits}=")

    def reward(self, digits: str, tokens: Sequence[int]) -> float:
        return float(list(tokens) == self.encode(solve(digits)))

    def datum(self, digits: str, answer: Sequence[int], **inputs: Sequence[float]) -> types.Datum:
        """`inputs` are per token of the answer; the prompt's own tokens get zeros, which count for nothing."""
        prompt = self.prompt(digits)
        tokens, unscored = [*prompt, *answer], [0.0] * (len(prompt) - 1)
        tensors = {name: np.array([*unscored, *values], np.float32) for name, values in inputs.items()}
        tensors["target_tokens"] = np.array(tokens[1:])
        return types.Datum(
            model_input=types.ModelInput.from_ints(tokens[:-1]),
            loss_fn_inputs={name: types.TensorData.from_numpy(values) for name, values in tensors.items()},
        )

    def step(self, data: list[types.Datum], loss: types.LossFnType, rate: float) -> types.ForwardBackwardOutput:
        """One optimizer step on the sum of the losses (AdamW: the size of that sum hardly matters)."""
        forward_backward = self.client.forward_backward(data, loss)
        optim_step = self.client.optim_step(types.AdamParams(learning_rate=rate))  # sent before the first is waited for
        output = forward_backward.result()
        optim_step.result()
        return output

    def sample(self, prompts: Sequence[str], samples: int, *, seed: int, temperature: float = 1.0):
        """The present policy's answers: `samples` sequences for each prompt."""
        policy = self.client.save_weights_and_get_sampling_client().result()  # an immutable snapshot of the adapter
        futures = []
        for i, digits in enumerate(prompts):
            length = len(self.encode(solve(digits)))
            params = types.SamplingParams(max_tokens=length, temperature=temperature, seed=seed + i)
            futures.append(policy.sample(types.ModelInput.from_ints(self.prompt(digits)), samples, params))
        return [future.result().sequences for future in futures]


# ---------------------------------------------------------------------------------------------------- the algorithm


def warm_up(learner: Learner, prompts: list[str], config: Config, rng: np.random.Generator) -> Iterator[dict]:
    """Supervised steps on two digits of the prompt. Yields each step's loss an answer."""
    for _ in range(config.warmup_steps):
        data = []
        for digits in rng.choice(prompts, config.warmup_batch).tolist():
            answer = learner.encode("".join(rng.permutation(list(digits))[:2]))
            data.append(learner.datum(digits, answer, weights=[1.0] * len(answer)))
        output = learner.step(data, "cross_entropy", config.warmup_learning_rate)
        yield {"loss": output.metrics["loss:sum"] / len(data)}


def train(learner: Learner, prompts: list[str], config: Config, rng: np.random.Generator) -> Iterator[dict]:
    """GRPO: an answer better than its group's mean becomes likelier, a worse one less. Yields each step's figures.

    Reference: Shao et al. 2024 (arXiv 2402.03300), equation 3, with one step a batch (nothing to clip) and without its KL
    term; the advantage is not divided by the group's standard deviation (Liu et al. 2025, arXiv 2503.20783).
    """
    for _ in range(config.steps):
        chosen = rng.choice(prompts, config.prompts, replace=False).tolist()
        groups = learner.sample(chosen, config.samples, seed=int(rng.integers(2**30)))
        rewards = np.array([[learner.reward(d, s.tokens) for s in g] for d, g in zip(chosen, groups, strict=True)])
        advantages = rewards - rewards.mean(axis=1, keepdims=True)  # [prompts, samples]

        answers = [(digits, s) for digits, group in zip(chosen, groups, strict=True) for s in group]
        data = [
            learner.datum(digits, s.tokens, logprobs=s.logprobs, advantages=[advantage] * len(s.tokens))
            for (digits, s), advantage in zip(answers, advantages.ravel(), strict=True)
        ]
        output = learner.step(data, "importance_sampling", config.learning_rate)

        training = [o["logprobs"].to_numpy() for o in output.loss_fn_outputs]  # before the step, of prompt and answer
        gaps = [s.logprobs - q[-len(s.logprobs) :] for (_, s), q in zip(answers, training, strict=True)]
        gap = np.concatenate(gaps)
        yield {"reward": rewards.mean(), "kl": gap.mean(), "largest gap": np.abs(gap).max()}


def evaluate(learner: Learner, prompts: list[str]) -> dict:
    """Mean reward of two samples a prompt at temperature 1, and of the greedy answer."""
    figures = {}
    for name, samples, temperature in (("reward", 2, 1.0), ("greedy", 1, 0.0)):
        groups = learner.sample(prompts, samples, seed=0, temperature=temperature)
        rewards = [learner.reward(d, s.tokens) for d, group in zip(prompts, groups, strict=True) for s in group]
        figures[name] = np.mean(rewards)
    return figures


# ---------------------------------------------------------------------------------------------------- the report


def watch(progress: Progress, name: str, steps: Iterable[dict], total: int) -> list[dict]:
    bar, rows = progress.add_task(name, total=total, figures=""), []
    for row in steps:
        rows.append(row)
        progress.update(bar, advance=1, figures=" ".join(f"{key} {value:.2g}" for key, value in row.items()))
    return rows


def table(before: dict, steps: list[dict], after: dict) -> Table:
    columns = {"reward": ".3f", "greedy": ".3f", "kl": ".1e", "largest gap": ".1e"}
    out = Table("", *columns, title="mean reward, and sampling - training log-probs")
    shown = [(f"step {i}", steps[i]) for i in range(0, len(steps), -(-len(steps) // 8))]  # eight of them
    for name, row in [("held out, before", before), *shown, ("held out, after", after)]:
        out.add_row(name, *(format(row[key], form) if key in row else "" for key, form in columns.items()))
    return out


def plot(before: dict, steps: list[dict], after: dict, path: Path) -> None:
    matplotlib.use("Agg")  # a file, never a window
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 3.5), layout="constrained")
    axes.plot([row["reward"] for row in steps], label="training prompts")
    axes.plot([0, len(steps)], [before["reward"], after["reward"]], "o", label="held-out prompts")
    axes.axhline(1 / 6, color="grey", linestyle=":", label="any two digits of the prompt")
    axes.set(xlabel="GRPO step", ylabel="mean reward", ylim=(0, 1.02))
    axes.legend(loc="lower right")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png", dpi=150)


@contextlib.contextmanager
def served(state_dir: Path, *flags: str) -> Iterator[str]:
    """server.py as a child process; yields its address."""
    state_dir.mkdir(parents=True, exist_ok=True)
    log = state_dir / "server.log"
    with log.open("wb") as out:
        command = [sys.executable, SERVER, "--port=0", "--state-dir", state_dir, *flags]
        child = subprocess.Popen(command, stdout=out, stderr=out)
    try:
        give_up = time.monotonic() + START_S
        while not (ready := re.search(r"TINKER_BASE_URL=(\S+)", log.read_text())):
            if child.poll() is not None or time.monotonic() > give_up:
                raise RuntimeError(f"server.py did not start; its log ends\n{log.read_text()[-2000:]}")
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
        base_url = config.base_url or os.environ.get("TINKER_BASE_URL")
        if config.serve:
            state_dir = config.state_dir or Path(stack.enter_context(tempfile.TemporaryDirectory()))
            with console.status("starting server.py"):
                base_url = stack.enter_context(served(state_dir))
        if not base_url:
            raise ValueError("base_url is not set: give --base-url or $TINKER_BASE_URL, or start a server with --serve")
        key = os.environ.get("TINKER_API_KEY", "tml-any")  # a server without a key takes any
        capabilities = tinker.RestClient(base_url=base_url, api_key=key).get_server_capabilities().result()
        model = config.model or next((m.model_name for m in capabilities.supported_models if m.model_name), None)
        if model is None:
            raise ValueError(f"model is not set, and {base_url} names none: give --model")
        console.print(f"{base_url} serves {model}, {time.monotonic() - started:.0f} s after the start")

        service = stack.enter_context(tinker.ServiceClient(base_url=base_url, api_key=key))
        client = service.create_lora_training_client(model, rank=config.rank, seed=config.seed).result()
        tokenizer, rng = client.get_tokenizer(), np.random.default_rng(config.seed)
        learner = Learner(client=client, encode=lambda text: tokenizer.encode(text, add_special_tokens=False))
        prompts = rng.permutation(PROMPTS).tolist()
        held_out, prompts = prompts[:HELD_OUT], prompts[HELD_OUT:]
        columns = *Progress.get_default_columns(), TextColumn("{task.fields[figures]}")
        with Progress(*columns, console=console) as progress:
            watch(progress, "warm-up", warm_up(learner, prompts, config, rng), config.warmup_steps)
            before = evaluate(learner, held_out)
            steps = watch(progress, "GRPO", train(learner, prompts, config, rng), config.steps)
        after = evaluate(learner, held_out)
    console.print(table(before, steps, after))
    console.print(f"largest gap of all: {max(row['largest gap'] for row in steps):.1e}")
    plot(before, steps, after, config.plot)
    console.print(f"{config.plot} written, {time.monotonic() - started:.0f} s after the start")


if __name__ == "__main__":
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # or it says that PyTorch is missing
    try:
        main(tyro.cli(Config, description="GRPO through the tinker SDK: a policy learns a task by reward alone."))
    except (ValueError, RuntimeError) as error:
        sys.exit(f"grpo.py: {error}")
