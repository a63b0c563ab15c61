"""Recipes of the tinker-cookbook, unmodified: against an undisturbed server, and one that is killed in the middle.

    python -m tinker_cookbook.recipes.X (the engine's environment, real torch) -> SDK -> server.py -> metrics.jsonl

The model is as small as the demo, with a vocabulary of word pieces: in bytes, ten turns of guess_number would be 2,000
tokens. Where a recipe asks the hub for a data set, the folder that it runs in has a local one of that name. Three
recipes run at a time; most of the dozen seconds that each takes are imports. The whole file takes minutes.
"""

import contextlib
import json
import os
import random
import subprocess
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace

import pytest
from safetensors.numpy import save_file
from test_chaos import Killable
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

import model

pytestmark = [pytest.mark.engine, pytest.mark.slow]

PYTHON = model.ENGINE / "bin" / "python"
COMMON = "renderer_name=qwen3_instruct behavior_if_log_dir_exists=resume"
MATH = f"-m tinker_cookbook.recipes.math_rl.train {COMMON} env=arithmetic group_size=8 groups_per_batch=4"
MATH += " learning_rate=3e-3 lora_rank=16 eval_every=0 max_steps=8"
WAVES = (
    {
        "chat_sl": f"-m tinker_cookbook.recipes.chat_sl.train {COMMON} dataset=sums.jsonl batch_size=32 num_epochs=2"
        " learning_rate=1e-2 lora_rank=16 eval_every=0 save_every=0 rolling_save_every=4",
        "math_rl": f"{MATH} save_every=4",
    },
)
STEPS = {"chat_sl": 16, "math_rl": 8}
FEWSHOT = [{"role": "user", "content": "What is 4 + 5?"}, {"role": "assistant", "content": "9"}]


def write_model(directory: Path) -> None:
    """The demo model with a vocabulary of 1,032 pieces of the words that the recipes use."""
    model.write_demo(directory)
    sources = model.ENGINE.glob("lib/python3.11/site-packages/tinker_cookbook/recipes/*_rl/**/*env.py")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=1024, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([path.read_text() for path in sorted(sources)], trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in model.DEMO_SPECIAL])
    tokenizer.save(str(directory / "tokenizer.json"))
    end = tokenizer.token_to_id("<|im_end|>")
    config = model.DEMO_CONFIG | {"vocab_size": tokenizer.get_vocab_size(), "eos_token_id": end}
    (directory / "config.json").write_text(json.dumps(config))
    weights = model.random_weights(config, seed=0)
    weights["lm_head.weight"][end] *= 3  # a reply in ten ends in time, or the rewards would all be the same
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})


def write_data(folder: Path) -> None:
    """256 sums, half of them answered with many words."""
    dice = random.Random(0)
    sums = [
        (f"What is {a} + {b}?", str(a + b)) for a, b in ((dice.randrange(101), dice.randrange(101)) for _ in range(256))
    ]
    replies = [reply if i % 2 else f"{reply} is the sum of the two, as I see it" for i, (_, reply) in enumerate(sums)]
    turn = lambda user, reply: [{"role": "user", "content": user}, {"role": "assistant", "content": reply}]
    chats = [FEWSHOT + turn(question, reply) for (question, _), reply in zip(sums, replies, strict=True)]
    write_jsonl(folder / "sums.jsonl", [{"messages": chat} for chat in chats])


def write_jsonl(path: Path, rows: Iterable[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


class Recipe:
    """One recipe in a process of its own, and what it has written."""

    def __init__(self, server: Killable, folder: Path, name: str, arguments: str):
        self.name, self.folder = name, folder / name
        self.log = folder / f"{name}.log"
        environment = os.environ | {"TINKER_BASE_URL": server.url, "TINKER_API_KEY": "tml-any", "OMP_NUM_THREADS": "1"}
        command = [PYTHON, *arguments.split(), f"model_name={server.model}", f"log_path={self.folder}"]
        with self.log.open("a") as out:
            self.process = subprocess.Popen(command, cwd=folder, env=environment, stdout=out, stderr=out)

    def rows(self, file: str = "metrics.jsonl") -> list[dict]:
        path = self.folder / file
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def steps(self) -> list[dict]:
        """The rows of steps: the last one of a reinforcement learning run only counts tokens."""
        return [row for row in self.rows() if any(key.startswith(("optim/", "dpo_loss")) for key in row)]

    def wait(self, until: Callable[[], bool], within_s: float = 300) -> None:
        deadline = time.monotonic() + within_s
        while not until():
            assert self.process.poll() is None and time.monotonic() < deadline, self.log.read_text()[-5000:]
            time.sleep(0.05)

    def finish(self) -> None:
        try:
            code = self.process.wait(timeout=300)
            assert code == 0, self.log.read_text()[-5000:]
        finally:
            self.process.kill()


@pytest.fixture(scope="module", params=["undisturbed", "killed"])
def world(request, tmp_path_factory):
    """All recipes when they are over: .recipes; the .server that they ran against, in a .folder with their data."""
    folder = tmp_path_factory.mktemp(request.param)
    write_model(folder / "model")
    write_data(folder)
    server = Killable(folder / "state", "--model", str(folder / "model"), "--row-len=768", "--context=768")
    server.model = folder / "model"
    recipes = {}
    with contextlib.ExitStack() as stack:
        stack.callback(lambda: server.kill())
        server.start()
        server.wait("ready in")
        for wave in WAVES:
            started = time.monotonic()
            running = [Recipe(server, folder, name, arguments) for name, arguments in wave.items()]
            for recipe in running:
                stack.callback(recipe.process.kill)
                recipe.wait(lambda recipe=recipe: bool(recipe.steps()))
            if request.param == "killed":
                print(*(f"{recipe.name}: {len(recipe.steps())} of {STEPS[recipe.name]} steps" for recipe in running))
                server.kill()
                assert not any(recipe.process.poll() is not None for recipe in running)
                server.start()
                server.wait("ready in")
            for recipe in running:
                recipe.finish()
                recipes[recipe.name] = recipe
            print(f"{time.monotonic() - started:.0f} s: {', '.join(wave)}")
        yield SimpleNamespace(server=server, folder=folder, recipes=recipes)


def test_every_recipe_takes_all_its_steps_on_what_the_model_has_really_sampled(world):
    for name, recipe in world.recipes.items():
        steps = recipe.steps()
        divergences = [step[key] for step in steps for key in ("optim/kl_sample_train_v1",) if key in step]
        print(f"{name}: {len(steps)} steps, kl_sample_train up to {max(map(abs, divergences), default=0):.1e}")
        assert [step["step"] for step in steps] == list(range(STEPS[name])), name
        assert all(abs(divergence) < 1e-4 for divergence in divergences), name


def test_what_is_to_be_learnt_is_learnt(world):
    losses = [step["train_mean_nll"] for step in world.recipes["chat_sl"].steps()]
    assert losses[-1] < 0.5 * losses[0]
    rewards = [step["env/all/reward/total"] for step in world.recipes["math_rl"].steps()]
    assert rewards[0] < -0.08 and rewards[-1] > -0.02
