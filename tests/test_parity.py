"""Four programs score the same tokens under the same trained adapters: trainer, embedded engine, Hugging Face, vLLM.

Every pair agrees to 1e-4 nats a token in float32, for adapters that have moved log-probs by whole nats.
"""

import dataclasses
import itertools
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from test_model import LLAMA3_ROPE, MODULES, weights, write
from test_sampler import STEP, publish, request, score

import model
from model import Model, ModelConfig, hugging_face, load, write_demo
from sampler import EmbeddedEngine, Fleet, SamplerConfig
from trainer import Trainer, TrainerConfig
from wire import Datum

pytestmark = [pytest.mark.engine, pytest.mark.slow]

TOLERANCE = 1e-4  # nats
SIZES = model.DEMO_CONFIG | dict(hidden_size=64, intermediate_size=96, rms_norm_eps=1e-5)
LLAMA = SIZES | dict(architectures=["LlamaForCausalLM"], model_type="llama")
TIED = dict(tie_word_embeddings=True)
BASES = {  # and whether the trainer scans its layers
    "qwen3": (SIZES, True),
    "qwen3-tied": (SIZES | TIED, False),
    "llama": (LLAMA | LLAMA3_ROPE | dict(max_position_embeddings=16_384), False),
    "llama-tied": (LLAMA | TIED, True),
}
ADAPTERS = {False: {"all": {}, "attention": dict(train_mlp=False)}, True: {"all": {}, "mlp": dict(train_attn=False)}}
RANKS = {"all": 4, "attention": 2, "mlp": 1}
ROW, SAMPLED = 256, 8
PROMPTS = [np.random.default_rng(n).integers(0, 256, n).astype(np.int32) for n in (1, 40, ROW - 2 * SAMPLED)]


@dataclasses.dataclass
class Case:
    """One adapter, or the base, of one trainer."""

    name: str
    directory: Path  # of the base
    folder: Path | None  # of the adapter
    trainer: Trainer
    model_id: str
    sequences: list[np.ndarray]  # prompt and what the embedded engine sampled
    scores: dict[str, list[np.ndarray]]  # by program: log-probs of every token but the first


@pytest.fixture(scope="module")
def cases(tmp_path_factory) -> dict[str, list[Case]]:
    """Of each base, scored by all but vLLM."""
    root = tmp_path_factory.mktemp("parity")
    tokenizer, made = write_demo(root / "demo"), {}
    for name, (config, scan) in BASES.items():
        shutil.copytree(tokenizer, root / name)
        write(root / name, config, weights(config))
        made[name] = list(trained(root / name, scan))
    every = [case for those in made.values() for case in those]
    jobs = [(case.directory, case.folder, tokens) for case in every for tokens in case.sequences]
    answers = iter(hugging_face(jobs))
    for case in every:
        case.scores["Hugging Face"] = [next(answers)[1] for _ in case.sequences]
    return made


def trained(directory: Path, scan: bool) -> Iterator[Case]:
    """The base and the adapters of one trainer, scored by it and by the embedded engine."""
    config = ModelConfig(model=str(directory), scan_layers=scan, max_rank=max(RANKS.values()))
    base = load(config, state_dir=directory, devices=jax.devices()[:1])
    trainer = Trainer(base, TrainerConfig(row_len=ROW))
    engine = EmbeddedEngine(base, SamplerConfig(context=ROW, chunk=64, slots=len(PROMPTS)))
    for seed, (adapter, options) in enumerate({"base": {}, **ADAPTERS[scan]}.items()):
        trainer.create(adapter, seed=seed, rank=RANKS.get(adapter, 1), **options)
        folder, layers = None, "scanned" if scan else "unrolled"
        if adapter != "base":
            train(trainer, adapter, seed)
            folder = publish(trainer, adapter, directory.with_name(f"{directory.name}-{layers}-{adapter}"))
            base.check_peft(folder)
        wanted = dict(max_tokens=SAMPLED, seed=seed, prompt_logprobs=True)
        replies = [engine.submit(request(prompt, **wanted), folder) for prompt in PROMPTS]
        pairs = [(future.result(), future.result().sequences[0]) for future in replies]
        sequences = [np.concatenate([prompt, s.tokens]) for prompt, (_, s) in zip(PROMPTS, pairs, strict=True)]
        scores = {
            "trainer": [score(trainer, adapter, tokens) for tokens in sequences],
            "engine": [np.concatenate([reply.prompt_logprobs[1:], s.logprobs]) for reply, s in pairs],
        }
        yield Case(f"{directory.name} {layers} {adapter}", directory, folder, trainer, adapter, sequences, scores)
    engine.close()


def train(trainer: Trainer, model_id: str, seed: int) -> None:
    """Four optimizer steps on random tokens, supervised and reinforced in turn."""
    rng = np.random.default_rng(seed)
    for loss in ("cross_entropy", "importance_sampling") * 2:
        tokens = rng.integers(0, 264, 101).astype(np.int32)
        inputs = {"target_tokens": tokens[1:]}
        if loss == "cross_entropy":
            inputs |= {"weights": np.ones(100, np.float32)}
        else:
            inputs |= {"logprobs": score(trainer, model_id, tokens), "advantages": rng.normal(size=100).astype("f")}
        asked = SimpleNamespace(data=[Datum(tokens[:-1], inputs)], loss_fn=loss, loss_config={})
        trainer.forward_backward(model_id, [asked], backward=True)
        assert trainer.optim_step(model_id, STEP)["optim/skipped"] == 0


def largest(these: list[np.ndarray], those: list[np.ndarray]) -> float:
    return max(float(np.abs(a - b).max()) for a, b in zip(these, those, strict=True))


@pytest.mark.parametrize("name", BASES)
def test_four_programs_give_the_same_log_probs(cases, name, tmp_path):
    fleet = Fleet(cases[name][0].trainer.model, SamplerConfig(sampler="vllm", slots=8), tmp_path)
    fleet.warm_up()
    gaps, asked = {}, dict(max_tokens=SAMPLED, prompt_logprobs=True)
    for case in cases[name]:
        replies = [fleet.submit(request(tokens, **asked), case.folder) for tokens in case.sequences]
        replies = [reply.result() for reply in replies]
        case.scores["vLLM"] = [reply.prompt_logprobs[1:] for reply in replies]
        for one, other in itertools.combinations(case.scores, 2):
            gaps[f"{case.name}: {one}, {other}"] = largest(case.scores[one], case.scores[other])
        sampled = [reply.sequences[0] for reply in replies]
        again = [np.concatenate([tokens, s.tokens]) for tokens, s in zip(case.sequences, sampled, strict=True)]
        again = [score(case.trainer, case.model_id, tokens)[-SAMPLED:] for tokens in again]
        gaps[f"{case.name}: vLLM's samples, trainer"] = largest(again, [s.logprobs for s in sampled])
        if case.folder is not None:
            base = [score(case.trainer, "base", tokens) for tokens in case.sequences]
            assert largest(case.scores["trainer"], base) > 1  # else agreement says nothing
    fleet.close()
    print(*(f"{gap:.1e} {pair}" for pair, gap in gaps.items()), sep="\n")
    assert not {pair: gap for pair, gap in gaps.items() if not gap <= TOLERANCE}  # NaN is no agreement


@pytest.mark.parametrize("name", ["qwen3", "llama"])
def test_a_wrong_part_of_an_adapter_is_seen(cases, name, tmp_path):
    """Log-probs hang on the order of every module's rows and on alpha, far beyond the tolerance."""
    case = next(case for case in cases[name] if case.model_id == "all")
    tensors = load_file(case.folder / "adapter_model.safetensors")
    config = json.loads((case.folder / "adapter_config.json").read_text())
    wrong = {module: {k: np.roll(b, 1, 0) for k, b in tensors.items() if f"{module}.lora_B" in k} for module in MODULES}
    for module, changed in {**wrong, "alpha": {}}.items():
        (tmp_path / module).mkdir()
        save_file(tensors | changed, tmp_path / module / "adapter_model.safetensors")
        alpha = {} if changed else {"lora_alpha": config["lora_alpha"] / 2}
        (tmp_path / module / "adapter_config.json").write_text(json.dumps(config | alpha))
    tokens = case.sequences[1]
    answers = hugging_face([(case.directory, tmp_path / part, tokens) for part in (*wrong, "alpha")])
    gaps = [float(np.abs(logprobs - case.scores["trainer"][1]).max()) for _, logprobs in answers]
    print(dict(zip((*wrong, "alpha"), gaps, strict=True)))
    assert min(gaps) > 100 * TOLERANCE


def test_the_parity_command_names_the_layer_that_departs(cases, monkeypatch, capsys):
    case = next(case for case in cases["llama"] if case.model_id == "all")
    model.parity(str(case.directory), adapter=case.folder)
    *lines, last = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 * (1 + SIZES["num_hidden_layers"] + 3)  # a title, the embedding, the norm, the log-probs
    assert last.startswith("parity: largest log-prob difference")
    read = Model.read_peft

    def wrong(self, folder):
        adapter, scale = read(self, folder)
        return adapter | {"layers_1/mlp/wo/b": 1.01 * adapter["layers_1/mlp/wo/b"]}, scale

    monkeypatch.setattr(Model, "read_peft", wrong)
    with pytest.raises(SystemExit, match=f"first departure: layer 1 of {case.folder}"):
        model.parity(str(case.directory), adapter=case.folder)
