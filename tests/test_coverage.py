"""What of the SDK works here: every public method of each of its clients, and every command of `tinker`, one by one.

This file mirrors no module. The methods are found by introspection, so that a new SDK shows its new ones by itself: as
a failing test, and as "untested" in the README, whose table is made of the two tables below (`readme`, under cog).
What a table says of a method, or command, is one of three:

    a function   it works. The function calls it, through `call`, and checks what comes of it;
                 its docstring is what a reader of the README should know besides
    Refused      it cannot be had, and the error says why
    a str        why it does not apply to this server

A method's twin `.._async` goes through the same function: it is awaited in one event loop that all of them share.
"""

import asyncio
import base64
import inspect
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import click
import click.testing
import httpx
import numpy as np
import pytest
import tinker
from tinker import types
from tinker.cli.__main__ import main_cli
from tinker.cli.exceptions import TinkerCliError
from tinker.lib.public_interfaces import training_client
from tinker.lib.public_interfaces.api_future import APIFuture

pytestmark = [
    pytest.mark.filterwarnings("ignore:DEPRECATED:FutureWarning"),  # every twin is, and a few others
    pytest.mark.filterwarnings("ignore:RestClient.search_sessions is experimental:FutureWarning"),
]

KEY = "tml-test"
TOKENS = list(b"pack my box with five dozen liquor jugs")
PROMPT = types.ModelInput.from_ints(TOKENS)
ADAM = types.AdamParams(learning_rate=1e-2)
GREEDY = types.SamplingParams(max_tokens=6, temperature=0.0)


# ---- a client of each kind, and what they have left on the server


@dataclass
class World:
    url: str
    service: tinker.ServiceClient
    rest: tinker.RestClient
    admin: tinker.AdminClient
    trainer: tinker.TrainingClient  # others may train it on
    sampler: tinker.SamplingClient  # what it was when it was saved
    saved: str  # the same, with its optimizer
    published: str  # the same, for samplers
    score: list[float]  # the log-probs of TOKENS then
    step: int  # how many it had taken
    tokens: list[int] = field(default_factory=list)  # what follows PROMPT then
    numbers: Iterator[int] = field(default_factory=itertools.count)

    def name(self) -> str:
        return f"coverage-{next(self.numbers)}"

    def checkpoint(self, path: str) -> types.Checkpoint | None:
        listed = self.rest.list_checkpoints(self.trainer.model_id).result().checkpoints
        return next((each for each in listed if each.tinker_path == path), None)

    @property
    def session_id(self) -> str:
        return self.trainer.model_id.split(":")[0]


@pytest.fixture(scope="module")
def world(server):
    with connect(server.url) as service:
        trainer = service.create_lora_training_client("demo", rank=4, seed=0, user_metadata={"who": "me"}).result()
        for _ in range(2):
            step = take_step(trainer)
        world = World(
            url=server.url,
            service=service,
            rest=tinker.RestClient(base_url=server.url, api_key=KEY),
            admin=tinker.AdminClient(base_url=server.url, api_key=KEY),
            trainer=trainer,
            sampler=trainer.save_weights_and_get_sampling_client().result(),
            saved=trainer.save_state("saved").result().path,
            published=trainer.save_weights_for_sampler("published").result().path,
            score=score(trainer),
            step=step,
        )
        world.tokens = greedy(world.sampler)
        yield world


def connect(url: str) -> tinker.ServiceClient:
    """Of a project, which means nothing here, but copy_weights would not even ask the server without."""
    names = dict(project_id="project", display_name="coverage", user_metadata={"what": "coverage"})
    return tinker.ServiceClient(base_url=url, api_key=KEY, **names)


def datum(tokens: list[int] = TOKENS) -> types.Datum:
    inputs = {"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)}
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)


def logprobs(output: types.ForwardBackwardOutput) -> list[list[float]]:
    return [list(each["logprobs"].data) for each in output.loss_fn_outputs]


def score(trainer: tinker.TrainingClient) -> list[float]:
    return logprobs(trainer.forward([datum()], "cross_entropy").result())[0]


def take_step(trainer: tinker.TrainingClient) -> int:
    """Its number."""
    trainer.forward_backward([datum()], "cross_entropy").result()
    return int(trainer.optim_step(ADAM).result().metrics["optim/step"])


def greedy(sampler: tinker.SamplingClient) -> list[int]:
    return list(sampler.sample(PROMPT, 1, GREEDY).result().sequences[0].tokens)


# ---- the methods


class Refused(NamedTuple):
    """A call that raises `error`, whose text holds `says`."""

    error: type[Exception]
    says: str
    arguments: Callable[[World], tuple] = lambda world: ()


class Call:
    """A method of one of the clients, as a function: what it returns has been waited for."""

    def __init__(self, client: Any, name: str, loop: asyncio.AbstractEventLoop):
        self.client, self.name, self.loop = client, name, loop

    def __call__(self, *args, **kwargs) -> Any:
        return self.on(self.client, *args, **kwargs)

    def on(self, client: Any, *args, **kwargs) -> Any:
        method = getattr(client, self.name)
        if not self.name.endswith("_async"):
            value = method(*args, **kwargs)
            return value.result() if isinstance(value, APIFuture) else value

        async def awaited() -> Any:
            value = await method(*args, **kwargs)
            return await value if isinstance(value, APIFuture) else value

        return asyncio.run_coroutine_threadsafe(awaited(), self.loop).result(60)


def telemetry(world: World, call: Call) -> None:
    events = call()
    batch = events._batch([events._generic_event("test_coverage")])
    sent = asyncio.run_coroutine_threadsafe(events._send_batch(batch), events._tinker_provider.get_loop())
    assert sent.result(10).status == "accepted"


def capabilities(world: World, call: Call) -> None:
    (model,) = call().supported_models
    assert (model.model_name, model.max_context_length) == ("demo", 256)
    assert model.trainable and model.sampleable


def sampling_client(world: World, call: Call) -> None:
    for path in (world.published, world.saved):
        sampler = call(model_path=path)
        assert greedy(sampler) == world.tokens and sampler.get_base_model() == "demo"


# ServiceClient


def close(world: World, call: Call) -> None:
    service = connect(world.url)
    session_id = service.create_lora_training_client("demo", rank=4).result().model_id.split(":")[0]
    call.on(service, "success")
    beat = httpx.post(f"{world.url}/api/v1/session_heartbeat", json={"session_id": session_id})
    assert beat.status_code == 410 and "ended" in beat.json()["detail"]
    call.on(service, "errored")  # the first reason stands


def create_lora_training_client(world: World, call: Call) -> None:
    with connect(world.url) as service:
        client = call.on(service, "demo", rank=8, seed=3, user_metadata={"n": "1"})
        run = world.rest.get_training_run(client.model_id).result()
        assert (run.base_model, run.lora_rank, run.user_metadata) == ("demo", 8, {"n": "1"})
        assert take_step(client) == 1


def create_training_client_from_state(world: World, call: Call) -> None:
    with connect(world.url) as service:
        client = call.on(service, world.saved)
        assert client.model_id != world.trainer.model_id and score(client) == world.score
        assert take_step(client) == 1


def create_training_client_from_state_with_optimizer(world: World, call: Call) -> None:
    with connect(world.url) as service:
        client = call.on(service, world.saved)
        assert client.model_id != world.trainer.model_id and score(client) == world.score
        assert take_step(client) == world.step + 1


def create_rest_client(world: World, call: Call) -> None:
    assert world.trainer.model_id in call().get_session(world.session_id).result().training_run_ids


# TrainingClient


def forward(world: World, call: Call) -> None:
    output = call([datum(), datum(TOKENS[:9])], "cross_entropy")
    long, short = logprobs(output)
    assert (len(long), len(short)) == (len(TOKENS) - 1, 8) and long[:8] == pytest.approx(short, abs=1e-5)
    assert output.metrics["loss:sum"] == pytest.approx(-sum(long + short), rel=1e-4)
    sampler = world.trainer.save_weights_and_get_sampling_client().result()
    assert long == pytest.approx(sampler.compute_logprobs(PROMPT).result()[1:], abs=1e-4)


def forward_backward(world: World, call: Call) -> None:
    with connect(world.url) as service:
        client = service.create_lora_training_client("demo", rank=4, seed=0).result()
        output = call.on(client, [datum()], "cross_entropy")
        assert output.metrics["loss:sum"] == pytest.approx(-sum(logprobs(output)[0]), rel=1e-4)
        client.optim_step(ADAM).result()
        assert sum(score(client)) > sum(logprobs(output)[0])


def optim_step(world: World, call: Call) -> None:
    with connect(world.url) as service:
        client = service.create_lora_training_client("demo", rank=4, seed=0).result()
        before = score(client)
        for number in (1, 2):
            client.forward_backward([datum()], "cross_entropy").result()
            metrics = call.on(client, ADAM).metrics
            assert metrics["optim/step"] == number
        assert sum(score(client)) > sum(before)


class Leaf(np.ndarray):
    """What the SDK does to a tensor of torch before it asks a custom loss for its gradient."""

    grad = None

    def clone(self) -> "Leaf":
        return self.copy()

    def detach(self) -> "Leaf":
        return self

    def requires_grad_(self, _: bool) -> "Leaf":
        return self


def forward_backward_custom(world: World, call: Call) -> None:
    """the client needs torch"""  # and has none here: a stand-in differentiates sum (logprob + 1)^2

    class Loss(NamedTuple):
        leaves: list[Leaf]

        def detach(self) -> np.float64:
            return sum(((leaf + 1) ** 2).sum() for leaf in self.leaves).view(np.ndarray)[()]

        def backward(self) -> None:
            for leaf in self.leaves:
                leaf.grad = (2 * (leaf + 1)).view(np.ndarray)

    value = lambda values: float(((np.array(values) + 1) ** 2).sum())
    stand_in = SimpleNamespace(tensor=lambda data: np.array(data, np.float64).view(Leaf))
    with connect(world.url) as service, mock.patch.object(training_client, "torch", stand_in):
        client = service.create_lora_training_client("demo", rank=4, seed=0).result()
        before = score(client)
        metrics = call.on(client, [datum()], lambda data, leaves: (Loss(leaves), {"mine": 7.0})).metrics
        assert metrics["mine"] == 7 and metrics["loss:sum"] == pytest.approx(value(before), rel=1e-4)
        surrogate = sum(2 * (each + 1) * each for each in before)
        assert metrics["surrogate_loss:sum"] == pytest.approx(surrogate, rel=1e-4)
        client.optim_step(ADAM).result()
        assert value(score(client)) < value(before)


def load_state(world: World, call: Call) -> None:
    call(world.saved)
    assert score(world.trainer) == world.score and take_step(world.trainer) == 1


def load_state_with_optimizer(world: World, call: Call) -> None:
    call(world.saved)
    assert score(world.trainer) == world.score and take_step(world.trainer) == world.step + 1


def save_state(world: World, call: Call) -> None:
    path = call(name := world.name(), ttl_seconds=3600, user_metadata={"n": "1"}).path
    assert path == f"tinker://{world.trainer.model_id}/weights/{name}"
    saved = world.checkpoint(path)
    assert (saved.checkpoint_type, saved.user_metadata) == ("training", {"n": "1"})
    assert saved.size_bytes > 0 and 3500 < (saved.expires_at - saved.time).total_seconds() < 3700


def save_weights_for_sampler(world: World, call: Call) -> None:
    path = call(name := world.name()).path
    assert path == f"tinker://{world.trainer.model_id}/sampler_weights/{name}"
    assert world.checkpoint(path).checkpoint_type == "sampler"
    sampler = world.service.create_sampling_client(model_path=path).result()
    assert sampler.compute_logprobs(PROMPT).result()[1:] == pytest.approx(score(world.trainer), abs=1e-4)


def save_weights_and_get_sampling_client(world: World, call: Call) -> None:
    """inflight is a snapshot of that moment"""
    for kind in ("snapshot", "inflight"):
        sampler = call(kind=kind)
        assert sampler.compute_logprobs(PROMPT).result()[1:] == pytest.approx(score(world.trainer), abs=1e-4)


def save_weights_external(world: World, call: Call) -> None:
    path = call(name := world.name()).path
    assert path == f"tinker://{world.trainer.model_id}/external_weights/{name}"
    urls = world.rest.get_external_weights_urls(path).result().urls
    assert httpx.get(urls["adapter_config.json"]).json()["r"] == 4


def get_info(world: World, call: Call) -> None:
    info = call()
    assert (info.model_id, info.model_data.model_name) == (world.trainer.model_id, "demo")
    assert info.is_lora and info.lora_rank == 4


def get_tokenizer(world: World, call: Call) -> None:
    tokenizer = call()
    assert tokenizer.decode(tokenizer.encode("héllo")) == "héllo"


# SamplingClient


def sample(world: World, call: Call) -> None:
    answer = call(PROMPT, 2, GREEDY, include_prompt_logprobs=True, topk_sample_logprobs=3)
    assert [list(each.tokens) for each in answer.sequences] == [world.tokens] * 2
    assert len({each.sequence_id for each in answer.sequences}) == 2
    assert answer.prompt_logprobs[1:] == pytest.approx(world.score, abs=1e-4)
    first = answer.sequences[0]
    assert len(first.logprobs) == len(first.topk_logprobs) == len(world.tokens) and len(first.topk_logprobs[0]) == 3


def compute_logprobs(world: World, call: Call) -> None:
    first, *others = call(PROMPT)
    assert first is None and others == pytest.approx(world.score, abs=1e-4)
    assert call(PROMPT, prompt_logprobs_last_n=3)[:-3] == [None] * (len(TOKENS) - 3)


def create(world: World, call: Call) -> None:
    assert greedy(call(world.service.holder, model_path=world.published)) == world.tokens


def from_sampler_handle(world: World, call: Call) -> None:
    assert greedy(call(world.sampler.get_sampler_handle(), api_key=KEY)) == world.tokens


def get_sampler_handle(world: World, call: Call) -> None:
    told = base64.urlsafe_b64decode(call()).decode()
    assert world.sampler._sampling_session_id in told and world.url in told and KEY not in told


def get_base_model(world: World, call: Call) -> None:
    assert call() == "demo"


def get_tokenizer_of_sampler(world: World, call: Call) -> None:
    """the SDK loads it by the model's name: a hub name or a folder, which `demo` is not"""
    folder = world.trainer.get_info().model_data.tokenizer_id
    get_tokenizer(world, lambda: call.on(world.service.create_sampling_client(base_model=folder).result()))


# RestClient


def delete_checkpoint(world: World, call: Call) -> None:
    path = world.trainer.save_state(name := world.name()).result().path
    call(world.trainer.model_id, f"weights/{name}")
    assert world.checkpoint(path) is None


def delete_checkpoint_from_tinker_path(world: World, call: Call) -> None:
    path = world.trainer.save_weights_for_sampler(world.name()).result().path
    call(path)
    assert world.checkpoint(path) is None


def get_external_weights_urls(world: World, call: Call) -> None:
    path = world.trainer.save_weights_external(world.name()).result().path
    answer = call(path)
    assert sorted(answer.urls) == ["adapter_config.json", "adapter_model.safetensors"]
    assert {httpx.get(url).status_code for url in answer.urls.values()} == {200}


def get_sampler(world: World, call: Call) -> None:
    sampler_id = world.service.create_sampling_client(model_path=world.published).result()._sampling_session_id
    answer = call(sampler_id)
    assert (answer.sampler_id, answer.base_model, answer.model_path) == (sampler_id, "demo", world.published)


def get_session(world: World, call: Call) -> None:
    session = call(world.session_id)
    assert world.trainer.model_id in session.training_run_ids
    assert world.sampler._sampling_session_id in session.sampler_ids
    assert session.user_metadata == {"what": "coverage"}


def get_training_run(world: World, call: Call) -> None:
    run = call(world.trainer.model_id)
    assert (run.training_run_id, run.base_model, run.lora_rank) == (world.trainer.model_id, "demo", 4)
    assert run.user_metadata == {"who": "me"} and run.last_checkpoint and run.last_sampler_checkpoint


def get_training_run_by_tinker_path(world: World, call: Call) -> None:
    get_training_run(world, lambda _: call(world.saved))


def get_weights_info_by_tinker_path(world: World, call: Call) -> None:
    for path in (world.saved, world.published):
        info = call(path)
        assert (info.base_model, info.is_lora, info.lora_rank) == ("demo", True, 4)
        assert (info.train_mlp, info.train_attn, info.train_unembed) == (True, True, False)


def list_checkpoints(world: World, call: Call) -> None:
    kinds = {each.tinker_path: each.checkpoint_type for each in call(world.trainer.model_id).checkpoints}
    assert (kinds[world.saved], kinds[world.published]) == ("training", "sampler")


def by_pages(call: Call, items: Callable[[Any], list]) -> list:
    """Everything listed, two at a time, and that no page holds more."""
    pages = []
    while page := items(call(limit=2, offset=2 * len(pages))):
        assert len(page) <= 2
        pages.append(page)
    return list(itertools.chain(*pages))


def list_sessions(world: World, call: Call) -> None:
    listed = by_pages(call, lambda page: page.sessions)
    assert world.session_id in listed and len(set(listed)) == len(listed)


def list_training_runs(world: World, call: Call) -> None:
    listed = by_pages(call, lambda page: page.training_runs)
    assert world.trainer.model_id in [run.training_run_id for run in listed]
    assert call(limit=1).cursor.total_count == len(listed)


def list_user_checkpoints(world: World, call: Call) -> None:
    listed = by_pages(call, lambda page: page.checkpoints)
    assert {world.saved, world.published} <= {each.tinker_path for each in listed}
    assert call(limit=1).cursor.total_count == len(listed)


def publish(world: World, call: Call) -> None:
    path = world.trainer.save_state(world.name()).result().path
    call(path)
    assert world.checkpoint(path).public


def unpublish(world: World, call: Call) -> None:
    path = world.trainer.save_state(world.name()).result().path
    world.rest.publish_checkpoint_from_tinker_path(path).result()
    call(path)
    assert not world.checkpoint(path).public


def set_checkpoint_ttl(world: World, call: Call) -> None:
    path = world.trainer.save_state(world.name()).result().path
    call(path, 3600)
    assert world.checkpoint(path).expires_at is not None
    call(path, None)
    assert world.checkpoint(path).expires_at is None


MISSING = tinker.NotFoundError
NO_PROJECTS = "this server has no projects"
NO_BILLING = "nothing is billed, and nothing audited"
NO_COPIES = "checkpoints are not copied here"
NO_TRACES = "this server records no traces of sessions"
ANYWHERE = types.SessionSearchRequest()
NO_IDENTITY = "whoami requires JWT auth"
CONSOLE = "a page of Thinking Machines' console"

BILLING = {
    "get_audit_log": Refused(MISSING, NO_BILLING),
    "get_billing_usage": Refused(MISSING, NO_BILLING, lambda _: ("2026-01-01T00:00:00Z", "2026-01-02T00:00:00Z")),
    "get_current_checkpoint_storage_usage": Refused(MISSING, NO_BILLING),
}

Entry = Callable[[World, Call], None] | Refused | str
METHODS: dict[type, dict[str, Entry]] = {
    tinker.ServiceClient: {
        "close": close,
        "copy_weights": Refused(MISSING, NO_COPIES, lambda world: (world.saved,)),
        "create_custom_loss": "traced and run in the client, which needs torch; the server is not asked",
        "create_lora_training_client": create_lora_training_client,
        "create_rest_client": create_rest_client,
        "create_sampling_client": sampling_client,
        "create_training_client_from_state": create_training_client_from_state,
        "create_training_client_from_state_with_optimizer": create_training_client_from_state_with_optimizer,
        "get_console_url": CONSOLE,
        "get_server_capabilities": capabilities,
        "get_telemetry": telemetry,
    },
    tinker.TrainingClient: {
        "create_sampling_client": sampling_client,
        "forward": forward,
        "forward_backward": forward_backward,
        "forward_backward_custom": forward_backward_custom,
        "get_console_url": CONSOLE,
        "get_info": get_info,
        "get_telemetry": telemetry,
        "get_tokenizer": get_tokenizer,
        "load_state": load_state,
        "load_state_with_optimizer": load_state_with_optimizer,
        "optim_step": optim_step,
        "save_state": save_state,
        "save_weights_and_get_sampling_client": save_weights_and_get_sampling_client,
        "save_weights_external": save_weights_external,
        "save_weights_for_sampler": save_weights_for_sampler,
    },
    tinker.SamplingClient: {
        "compute_logprobs": compute_logprobs,
        "create": create,
        "from_sampler_handle": from_sampler_handle,
        "get_base_model": get_base_model,
        "get_sampler_handle": get_sampler_handle,
        "get_telemetry": telemetry,
        "get_tokenizer": get_tokenizer_of_sampler,
        "on_queue_state_change": "the SDK calls it when a server says that it has paused; this one never does",
        "sample": sample,
    },
    tinker.RestClient: {
        "assign_session_project": Refused(MISSING, NO_PROJECTS, lambda world: (world.session_id, "project")),
        "copy_weights": Refused(MISSING, NO_COPIES, lambda world: (world.saved, "project")),
        "delete_checkpoint": delete_checkpoint,
        "delete_checkpoint_from_tinker_path": delete_checkpoint_from_tinker_path,
        "export_session_trace": Refused(MISSING, NO_TRACES, lambda world: (world.session_id,)),
        "get_external_weights_urls": get_external_weights_urls,
        "get_sampler": get_sampler,
        "get_server_capabilities": capabilities,
        "get_session": get_session,
        "get_telemetry": telemetry,
        "get_training_run": get_training_run,
        "get_training_run_by_tinker_path": get_training_run_by_tinker_path,
        "get_weights_info_by_tinker_path": get_weights_info_by_tinker_path,
        "list_checkpoints": list_checkpoints,
        "list_sessions": list_sessions,
        "list_training_runs": list_training_runs,
        "list_user_checkpoints": list_user_checkpoints,
        "publish_checkpoint_from_tinker_path": publish,
        "search_sessions": Refused(MISSING, "sessions are not searched here", lambda _: (ANYWHERE,)),
        "set_checkpoint_ttl_from_tinker_path": set_checkpoint_ttl,
        "unpublish_checkpoint_from_tinker_path": unpublish,
        "whoami": Refused(RuntimeError, NO_IDENTITY),
        **BILLING,
    },
    tinker.AdminClient: {"get_telemetry": telemetry, **BILLING},
}


# ---- the commands


def version(world: World, run: Callable[..., str]) -> None:
    assert tinker.__version__ in run()


def status(world: World, run: Callable[..., str]) -> None:
    assert "Tinker accessible: yes" in run()


def model_list(world: World, run: Callable[..., str]) -> None:
    assert "demo" in run()


def run_list(world: World, run: Callable[..., str]) -> None:
    runs = json.loads(run("--limit", "0"))["runs"]
    assert world.trainer.model_id in [each["training_run_id"] for each in runs]


def run_info(world: World, run: Callable[..., str]) -> None:
    shown = json.loads(run(world.trainer.model_id))
    assert (shown["training_run_id"], shown["base_model"], shown["lora_rank"]) == (world.trainer.model_id, "demo", 4)


def checkpoint_list(world: World, run: Callable[..., str]) -> None:
    for arguments in (["--run-id", world.trainer.model_id], ["--limit", "0"]):
        listed = [each["tinker_path"] for each in json.loads(run(*arguments))["checkpoints"]]
        assert {world.saved, world.published} <= set(listed)


def checkpoint_info(world: World, run: Callable[..., str]) -> None:
    shown = json.loads(run(world.saved))
    assert (shown["tinker_path"], shown["checkpoint_type"]) == (world.saved, "training") and shown["size_bytes"] > 0


def checkpoint_set_ttl(world: World, run: Callable[..., str]) -> None:
    set_checkpoint_ttl(world, lambda path, ttl: run(path, *(["--ttl", str(ttl)] if ttl else ["--remove"])))


def checkpoint_delete(world: World, run: Callable[..., str]) -> None:
    delete_checkpoint_from_tinker_path(world, lambda path: run(path, "--yes"))


def checkpoint_download(world: World, run: Callable[..., str]) -> None:
    """as PEFT; a training checkpoint through a session of its own"""
    external = world.trainer.save_weights_external(world.name()).result().path
    for path in (world.saved, external):
        told = json.loads(run(path, "--output", "."))
        folder = click.format_filename(told["destination"])
        with open(f"{folder}/adapter_config.json") as config, open(f"{folder}/adapter_model.safetensors", "rb") as file:
            assert json.load(config)["r"] == 4 and len(file.read()) > 1000
    listed = world.rest.list_user_checkpoints().result().checkpoints
    assert not [each.tinker_path for each in listed if each.tinker_path.endswith("/download")]


COMMANDS: dict[str, Callable[[World, Callable[..., str]], None] | Refused | str] = {
    "auth login": Refused(TinkerCliError, "set TINKER_API_KEY"),
    "auth logout": "forgets, on the client's machine, the key that auth login has stored",
    "auth status": status,
    "auth whoami": Refused(TinkerCliError, NO_IDENTITY),
    "billing checkpoint-storage": Refused(TinkerCliError, NO_BILLING),
    "billing usage": Refused(TinkerCliError, NO_BILLING, lambda world: ("2026-01-01", "2026-01-02")),
    "checkpoint delete": checkpoint_delete,
    "checkpoint download": checkpoint_download,
    "checkpoint info": checkpoint_info,
    "checkpoint list": checkpoint_list,
    "checkpoint publish": publish,
    "checkpoint push-hf": "uploads to the Hugging Face Hub; of this server it asks what checkpoint download asks",
    "checkpoint set-ttl": checkpoint_set_ttl,
    "checkpoint unpublish": unpublish,
    "model list": model_list,
    "run info": run_info,
    "run list": run_list,
    "session export-trace": Refused(TinkerCliError, NO_TRACES, lambda world: (world.session_id,)),
    "version": version,
}


# ---- introspection, and the README


def public_methods(client: type) -> list[str]:
    public = [name for name in dir(client) if not name.startswith("_")]
    return [name for name in public if inspect.isroutine(getattr(client, name))]


def commands(group: click.Command = main_cli, words: tuple[str, ...] = ()) -> Iterator[str]:
    if not isinstance(group, click.Group):
        yield " ".join(words)
        return
    context = click.Context(group)
    for name in group.list_commands(context):
        yield from commands(group.get_command(context, name), (*words, name))


def twins(client: type) -> dict[str, list[str]]:
    """What a client can do, and the names of the method, or of both, that do it."""
    found: dict[str, list[str]] = {}
    for name in public_methods(client):
        found.setdefault(name.removesuffix("_async"), []).append(name)
    return found


def outcome(entry: Entry | None) -> str:
    if entry is None:
        return "**untested**"
    if isinstance(entry, Refused):
        return f"refused: {entry.says}"
    if isinstance(entry, str):
        return f"not applicable: {entry}"
    return "works" + (f": {note}" if (note := inspect.getdoc(entry)) else "")


def readme() -> str:
    """The README's table: a row for every outcome, with the methods that have it."""
    found = {client.__name__: (list(twins(client)), METHODS[client]) for client in METHODS}
    found |= {"the command": (list(commands()), COMMANDS)}
    rows = [f"| tinker {tinker.__version__} | | |", "|---|---|---|"]
    for title, (names, table) in found.items():
        outcomes: dict[str, list[str]] = {}
        for name in sorted(names, key=lambda name: outcome(table.get(name)) != "works"):
            outcomes.setdefault(outcome(table.get(name)), []).append(name)
        for told, names in outcomes.items():
            rows.append(f"| {title} | {', '.join(names)} | {told} |")
            title = ""
    return "\n".join(rows)


# ---- the tests


@pytest.mark.parametrize("client", METHODS, ids=lambda client: client.__name__)
def test_every_public_method_of_the_sdk_is_in_the_table_and_nothing_else(client):
    assert twins(client).keys() - METHODS[client].keys() == set(), "untested"
    assert METHODS[client].keys() - twins(client).keys() == set(), "unknown to this SDK"


def test_every_command_of_the_sdk_is_in_the_table_and_nothing_else():
    assert set(commands()) - COMMANDS.keys() == set(), "untested"
    assert COMMANDS.keys() - set(commands()) == set(), "unknown to this SDK"


def test_every_client_of_the_sdk_has_a_table():
    assert {value for name, value in vars(tinker).items() if name.endswith("Client")} == METHODS.keys()


def test_a_method_that_a_new_sdk_brings_is_untested_in_the_readme(monkeypatch):
    assert "untested" not in readme()
    monkeypatch.setattr(tinker.RestClient, "brand_new_async", lambda self: None, raising=False)
    assert "| brand_new | **untested** |" in readme()


@pytest.fixture(scope="module")
def loop():
    """The event loop of every async twin, in a thread of its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield loop
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


METHOD_CASES = [
    pytest.param(client, name, METHODS[client][did], id=f"{client.__name__}.{name}")
    for client in METHODS
    for did, names in twins(client).items()
    for name in names
    if not isinstance(METHODS[client].get(did, ""), str)
]
COMMAND_CASES = [pytest.param(name, each, id=name) for name, each in COMMANDS.items() if not isinstance(each, str)]


@pytest.mark.parametrize("client, name, entry", METHOD_CASES)
def test_a_method_does_what_the_table_says(world, loop, client, name, entry):
    call = Call(next(each for each in vars(world).values() if type(each) is client), name, loop)
    if not isinstance(entry, Refused):
        return entry(world, call)
    with pytest.raises(entry.error, match=entry.says):
        call(*entry.arguments(world))


@pytest.mark.parametrize("name, entry", COMMAND_CASES)
def test_a_command_does_what_the_table_says(world, tmp_path, monkeypatch, name, entry):
    monkeypatch.chdir(tmp_path)
    for variable, value in {"TINKER_BASE_URL": world.url, "TINKER_API_KEY": KEY, "HOME": str(tmp_path)}.items():
        monkeypatch.setenv(variable, value)
    invoke = lambda *arguments: click.testing.CliRunner().invoke(
        main_cli, ["--format", "json", *name.split(), *arguments], input=f"{KEY}\n"
    )

    def run(*arguments: str) -> str:
        ended = invoke(*arguments)
        assert ended.exit_code == 0, (ended.output, ended.exception)
        return ended.stdout

    if not isinstance(entry, Refused):
        return entry(world, run)
    error = invoke(*entry.arguments(world)).exception
    assert isinstance(error, entry.error) and entry.says in f"{error.message} {error.details}", error


def test_a_user_types_the_command_in_a_process_of_its_own(world):
    """CPython 3.12.1 may abort while it ends, all work done and printed: a daemon thread of the SDK's is then in native
    code. That is no failure of the command.
    """
    command = [
        Path(sys.executable).with_name("tinker"),
        "-f",
        "json",
        "checkpoint",
        "list",
        "--run-id",
        world.trainer.model_id,
    ]
    environment = os.environ | {"TINKER_BASE_URL": world.url, "TINKER_API_KEY": KEY, "TINKER_TELEMETRY": "0"}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0 or (ended.returncode == -signal.SIGABRT and not ended.stderr), ended
    assert world.saved in [each["tinker_path"] for each in json.loads(ended.stdout)["checkpoints"]]
