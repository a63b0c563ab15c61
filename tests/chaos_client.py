"""A client that knows of no server but the SDK's: GRPO on the demo task, every number that it got written down.

python tests/chaos_client.py URL FILE     (tests/test_chaos.py runs it, kills the server, and compares the files)
"""

import dataclasses
import json
import sys
from pathlib import Path

import numpy as np
import tinker

sys.path.append(str(Path(__file__).parent.parent / "examples"))
import grpo


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recorder(grpo.Learner):
    got: list = dataclasses.field(default_factory=list)

    def step(self, data, loss, rate):
        output = super().step(data, loss, rate)
        logprobs = [each["logprobs"].to_numpy().tolist() for each in output.loss_fn_outputs]
        self.got.append([loss, output.metrics["loss:sum"], logprobs])
        return output

    def sample(self, prompts, samples, *, seed, temperature=1.0):
        groups = super().sample(prompts, samples, seed=seed, temperature=temperature)
        self.got.append(["sample", [[[s.tokens, s.logprobs, s.stop_reason] for s in group] for group in groups]])
        return groups


def main(url: str, file: Path) -> None:
    config = grpo.Config(warmup_steps=30, warmup_batch=16, steps=40, prompts=8, samples=8)
    service = tinker.ServiceClient(base_url=url, api_key="tml-any")
    client = service.create_lora_training_client("demo", rank=8, seed=0).result()
    tokenizer, rng = client.get_tokenizer(), np.random.default_rng(0)
    learner = Recorder(client=client, encode=lambda text: tokenizer.encode(text, add_special_tokens=False))
    prompts = grpo.PROMPTS[:200]
    for _ in grpo.warm_up(learner, prompts, config, rng):
        pass
    for _ in grpo.train(learner, prompts, config, rng):
        pass
    learner.got.append(["saved", client.save_state("final").result().path.rpartition("/")[2]])
    file.write_text("\n".join(map(json.dumps, learner.got)))
    service.close("success").result()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
