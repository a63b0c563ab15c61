"""Recipes of the tinker-cookbook, unmodified: against an undisturbed server, and one that is killed in the middle.

    python -m tinker_cookbook.recipes.X (the engine's environment, real torch) -> SDK -> server.py -> metrics.jsonl

The model is as small as the demo, with a vocabulary of word pieces: in bytes, ten turns of guess_number would be 2,000
tokens. Where a recipe asks the hub for a data set, the folder that it runs in has a local one of that name. Four or
five run at a time: most of the dozen seconds that each takes are imports. The whole file takes minutes.
"""

import contextlib
import json
import math
import os
import random
import re
import signal
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path
from statistics import mean

import pytest
import tinker
from conftest import ROOT
from safetensors.numpy import save_file
from test_chaos import Killable
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

import model

pytestmark = [pytest.mark.engine, pytest.mark.slow]

PYTHON = model.ENGINE / "bin" / "python"
RENDERER = "qwen3_instruct"  # for the demo's tokens, <|im_start|> and <|im_end|>


def words(**arguments) -> list[str]:
    return [f"{name}={value}" for name, value in arguments.items()]


def recipe(module: str, **arguments) -> list[str]:
    common = dict(renderer_name=RENDERER, behavior_if_log_dir_exists="resume")
    return ["-m", f"tinker_cookbook.recipes.{module}", *words(**common, **arguments)]


RL = dict(learning_rate=3e-3, lora_rank=16, eval_every=0, save_every=0)
ARITHMETIC = dict(env="arithmetic", group_size=8, groups_per_batch=4, max_steps=8, **RL)
MINIBATCHES = {"stream_minibatch_config.groups_per_batch": 4, "stream_minibatch_config.num_minibatches": 2}
# No recipe's command line has the KL penalty's reference: this takes the whole Config from its own.
TRAIN = "import asyncio, chz, tinker_cookbook.rl.train as rl; asyncio.run(rl.main(chz.entrypoint(rl.Config)))"
BUILDER = dict(model_name_for_tokenizer="MODEL", renderer_name=RENDERER, batch_size=4, group_size=8, n_batches=8)
KL = {
    "dataset_builder": "tinker_cookbook.recipes.math_rl.arithmetic_env:ArithmeticDatasetBuilder",
    **{f"dataset_builder.{name}": value for name, value in BUILDER.items()},
    "kl_reference_config.base_model": "MODEL",
}
SUPERVISED = dict(num_epochs=2, learning_rate=1e-2, lora_rank=16, eval_every=0, save_every=0)
# What python is given, but for model_name and log_path. The second wave has a teacher from the first.
WAVES = (
    {
        "chat_sl": recipe("chat_sl.train", dataset="sums.jsonl", batch_size=32, rolling_save_every=4, **SUPERVISED),
        "dpo": recipe("preference.dpo.train", batch_size=8, learning_rate=3e-3),
        "math_rl": recipe("math_rl.train", **ARITHMETIC),
        "guess_number": recipe(
            "multiplayer_rl.guess_number.train",
            group_size=2,
            batch_size=1,
            max_tokens=4,
            max_steps=3,
            eval_every=0,
            save_every=0,
        ),
    },
    {
        "off-policy": recipe("math_rl.train", max_steps_off_policy=1, **ARITHMETIC),
        "minibatches": recipe("math_rl.train", loss_fn="ppo", **ARITHMETIC, **MINIBATCHES),
        "distillation": recipe(
            "distillation.on_policy_distillation",
            teacher_model="MODEL",
            teacher_checkpoint="TEACHER",
            group_size=8,
            groups_per_batch=4,
            max_tokens=5,
            max_steps=8,
            **RL,
        ),
        "shorter": recipe(
            "preference.shorter.train",
            group_size=4,
            batch_size=4,
            max_tokens=8,
            max_steps=8,
            learning_rate=3e-3,
            eval_every=0,
        ),
        "kl": ["-c", TRAIN, *words(recipe_name="kl", max_tokens=5, kl_penalty_coef=0.1, **RL, **KL)],
    },
)
STEPS = {name: 8 for wave in WAVES for name in wave} | {"chat_sl": 16, "guess_number": 3}


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
    weights["lm_head.weight"][end] *= 4  # a reply in five ends in time, or the rewards would all be the same
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})


def write_data(folder: Path) -> None:
    """Sums, half of them answered with many words: to be learnt, preferred to something else, and asked."""
    dice = random.Random(0)
    pairs = [(dice.randrange(101), dice.randrange(101)) for _ in range(256)]
    questions, sums = [f"What is {a} + {b}?" for a, b in pairs], [str(a + b) for a, b in pairs]
    turn = lambda question, reply: [{"role": "user", "content": question}, {"role": "assistant", "content": reply}]
    replies = [reply if i % 2 else f"{reply} is the sum of the two, as I see it" for i, reply in enumerate(sums)]
    chats = [{"messages": turn(*each)} for each in zip(questions, replies, strict=True)]
    write_jsonl(folder / "sums.jsonl", chats)
    said = lambda question, reply: f"\n\nHuman: {question}\n\nAssistant: {reply}"
    preferences = [
        {"chosen": said(question, reply), "rejected": said(question, "Failed to parse")}
        for question, reply in zip(questions, sums, strict=True)
    ]
    write_jsonl(folder / "Anthropic" / "hh-rlhf" / "train.jsonl", preferences[: 8 * STEPS["dpo"]])
    write_jsonl(folder / "Anthropic" / "hh-rlhf" / "test.jsonl", preferences[-8:])
    write_jsonl(folder / "zwhe99" / "DeepMath-103K" / "train.jsonl", [{"question": each} for each in questions])


def write_jsonl(path: Path, rows: Iterable[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


class Recipe:
    """A process of its own, and what it writes."""

    def __init__(self, name: str, command: list, server: Killable, folder: Path):
        self.name, self.folder, self.log = name, folder / name, folder / f"{name}.log"
        environment = os.environ | {"TINKER_BASE_URL": server.url, "TINKER_API_KEY": "tml-any", "OMP_NUM_THREADS": "1"}
        environment["HF_DATASETS_CACHE"] = str(folder / "cache")
        with self.log.open("a") as out:
            asked = dict(stdout=out, stderr=out, start_new_session=True)
            self.process = subprocess.Popen(list(map(str, command)), cwd=folder, env=environment, **asked)

    def rows(self, file: str = "metrics.jsonl") -> list[dict]:
        path = self.folder / file
        whole = path.read_text().rpartition("\n")[0] if path.exists() else ""  # the last line may be half written
        return [json.loads(line) for line in whole.splitlines()]

    def steps(self) -> list[dict]:
        """The metrics of each step. (A reinforcement learning run ends with a row that counts tokens alone.)"""
        return [row for row in self.rows() if "optim/step" in row or "dpo_loss" in row]

    def of(self, metric: str) -> list[float]:
        return [step[metric] for step in self.steps()]

    def wait_for_steps(self, number: int, within_s: float = 300) -> None:
        deadline = time.monotonic() + within_s
        while len(self.steps()) < number:
            assert self.process.poll() is None and time.monotonic() < deadline, self.log.read_text()[-5000:]
            time.sleep(0.05)

    def finish(self) -> None:
        assert self.process.wait(timeout=300) == 0, self.log.read_text()[-5000:]

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self.process.wait()


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """It says `.model`: the folder of what it serves. It is restarted, and there is no other."""
    folder = tmp_path_factory.mktemp("server")
    write_model(folder / "model")
    server = Killable(
        folder / "state", "--model", str(folder / "model"), "--row-len=768", "--context=768", "--max-adapters=12"
    )
    server.model = folder / "model"
    server.start()
    try:
        server.wait("ready in")
        yield server
    finally:
        server.kill()


@pytest.fixture(scope="module", params=["undisturbed", "killed"])
def recipes(request, server, tmp_path_factory):
    """All recipes, by name, when they are over: on the server as it is, and on one that is killed once in each."""
    folder, over = tmp_path_factory.mktemp(request.param), {}
    write_data(folder)
    with contextlib.ExitStack() as stack:
        for wave in WAVES:
            started, running = time.monotonic(), []
            for name, arguments in wave.items():
                taught = over["chat_sl"].rows("checkpoints.jsonl")[-1]["sampler_path"] if over else ""
                command = [word.replace("MODEL", str(server.model)).replace("TEACHER", taught) for word in arguments]
                command += words(model_name=server.model, log_path=folder / name)
                running.append(Recipe(name, [PYTHON, *command], server, folder))
                stack.callback(running[-1].kill)
            if request.param == "killed":
                all_in_the_middle(running)
                server.kill()
                print("killed after", {recipe.name: len(recipe.steps()) for recipe in running})
                assert all(recipe.process.poll() is None for recipe in running)
                server.start()
                server.wait("ready in")
            for recipe in running:
                recipe.finish()
            over |= {recipe.name: recipe for recipe in running}
            print(f"{time.monotonic() - started:.0f} s: {', '.join(wave)}")
        yield over


def all_in_the_middle(recipes: list[Recipe]) -> None:
    """Returns when each has taken a step and all go on: who is fast stands still until the others have come so far."""
    behind = list(recipes)
    while behind:
        for recipe in [recipe for recipe in behind if recipe.steps()]:
            recipe.signal(signal.SIGSTOP)
            behind.remove(recipe)
        assert all(recipe.process.poll() is None for recipe in behind), [recipe.log for recipe in behind]
        time.sleep(0.05)
    for recipe in recipes:
        recipe.signal(signal.SIGCONT)
    time.sleep(0.3)  # their next requests are on the way


def test_every_recipe_takes_all_its_steps(recipes):
    for name, recipe in recipes.items():
        assert recipe.of("step") == list(range(STEPS[name])), name


def test_what_was_sampled_is_what_the_trainer_computes(recipes):
    for name in set(recipes) - {"chat_sl", "dpo"}:
        fresh = [step for step in recipes[name].steps() if step.get("async/staleness_max", 0) == 0]
        largest = max(abs(step["optim/kl_sample_train_v1"]) for step in fresh)
        print(f"{name}: kl_sample_train {largest:.1e}")
        assert largest < 1e-5, name
    assert max(recipes["off-policy"].of("async/staleness_max")) >= 1  # a slow rollout may be older than was asked for


def test_what_a_model_so_small_can_learn_is_learnt(recipes):
    def told(name: str, metric: str) -> list[float]:
        values = recipes[name].of(metric)
        print(f"{name}: {metric}", *(f"{value:.3g}" for value in values))
        return values

    loss = told("chat_sl", "train_mean_nll")
    assert loss[-1] < 0.5 * loss[0]
    loss, accuracy = told("dpo", "dpo_loss"), told("dpo", "accuracy")
    assert abs(loss[0] - math.log(2)) < 1e-5  # the policy is the reference
    assert loss[-1] < 0.1 and accuracy[-1] == 1
    for name in ("math_rl", "off-policy", "minibatches"):  # 0.1 is taken off a reply that does not end in time
        reward = told(name, "env/all/reward/total")
        assert mean(reward[-2:]) > reward[0] + 0.02, name
    reward = told("shorter", "env/all/reward/total")
    assert mean(reward[-2:]) > reward[0] + 0.1
    # Of the base itself it would begin at 0. Eight steps of 160 tokens are too few to see it fall.
    assert told("distillation", "teacher_kl")[0] > 0.2
    divergence = told("kl", "kl_policy_base")
    assert abs(divergence[0]) < 1e-5 < 1e-3 < max(divergence)  # the reference is the base, and stays it
    assert set(told("guess_number", "env/all/turns_per_episode")) == {10}


def test_a_rolling_checkpoint_makes_the_one_before_go(recipes, server):
    saved = [row["state_path"] for row in recipes["chat_sl"].rows("checkpoints.jsonl")]
    assert [path.rsplit("/", 1)[1] for path in saved] == ["000004", "000008", "000012", "final"]
    rest = tinker.RestClient(base_url=server.url, api_key="tml-any")
    there = [each.tinker_path for each in rest.list_checkpoints(saved[-1].split("/")[2]).result().checkpoints]
    assert sorted(there) == sorted([saved[-1], saved[-1].replace("/weights/", "/sampler_weights/")])


def test_the_command_of_the_readme_goes_on_where_it_was_killed(server, readme_block, tmp_path):
    block = readme_block("tinker_cookbook", "bash")
    folders = {"state/models/demo": server.model, "state/arithmetic": tmp_path / "run"}
    here = {"http://127.0.0.1:8000": server.url, **folders}
    for theirs, ours in here.items():
        assert theirs in block
        block = block.replace(theirs, str(ours))
    command = ["bash", "-ec", f"cd {ROOT}\n{block}"]
    recipe = Recipe("run", command, server, tmp_path)
    try:
        recipe.wait_for_steps(3)
    finally:
        recipe.kill()
    before, saved = recipe.steps(), [row["state_path"] for row in recipe.rows("checkpoints.jsonl")]
    recipe = Recipe("run", command, server, tmp_path)
    try:
        recipe.finish()
    finally:
        recipe.kill()
    assert re.search(r"Resumed training from (\S+)", recipe.log.read_text())[1] == saved[-1]
    assert recipe.of("step") == list(range(len(recipe.steps()))) and len(recipe.steps()) > len(before)
    assert recipe.of("optim/step") == [step + 1 for step in recipe.of("step")]  # with the optimizer's state
    assert recipe.steps()[:2] == before[:2]  # written by the first
    assert max(map(abs, recipe.of("optim/kl_sample_train_v1"))) < 1e-5
