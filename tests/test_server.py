"""The server as its users meet it: the unmodified SDK over HTTP, and raw HTTP where the SDK is too polite to ask.

A request is right when its numbers are, whatever else is asked of the server meanwhile: most tests compare bits.
"""

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
import tinker
from safetensors.numpy import load_file
from tinker import types
from tinker.proto import tinker_public_pb2 as pb

ROOT = Path(__file__).parent.parent
TOKENS = list(b"the quick brown fox jumps over the lazy dog")
ADAM = types.AdamParams(learning_rate=1e-2)
GREEDY = types.SamplingParams(max_tokens=8, temperature=0.0)


# ---- clients


def rest(server) -> tinker.RestClient:
    return tinker.RestClient(base_url=server.url, api_key="tml-test")


def connect(url: str, api_key: str = "tml-test") -> tinker.ServiceClient:
    return tinker.ServiceClient(base_url=url, api_key=api_key)


@pytest.fixture
def service(server):
    """A session of its own: closing it frees its adapters, of which a server has few."""
    assert server.process.poll() is None, "the server has ended"  # the SDK would try again for minutes
    client = connect(server.url)
    yield client
    client.close("success").result()


@pytest.fixture
def http(server):
    with httpx.Client(base_url=f"{server.url}/api/v1/", timeout=40) as client:
        yield client


def new_adapter(service: tinker.ServiceClient, *, seed: int = 0, rank: int = 4, **options) -> tinker.TrainingClient:
    return service.create_lora_training_client("demo", rank=rank, seed=seed, **options).result()


def datum(tokens=TOKENS, **inputs) -> types.Datum:
    """One sequence to be learnt; `inputs` replace or join its targets and weights, None takes one out."""
    inputs = {"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)} | inputs
    given = {name: values for name, values in inputs.items() if values is not None}
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=given)


def prompt(tokens=TOKENS) -> types.ModelInput:
    return types.ModelInput.from_ints(tokens)


def logprobs(output: types.ForwardBackwardOutput) -> list[list[float]]:
    return [list(each["logprobs"].data) for each in output.loss_fn_outputs]


def train(client: tinker.TrainingClient, steps: int = 1) -> list[list[float]]:
    """Log-probs of TOKENS after `steps` steps on them: equal bits mean equal adapters."""
    for _ in range(steps):
        client.forward_backward([datum()], "cross_entropy").result()
        client.optim_step(ADAM).result()
    return logprobs(client.forward([datum()], "cross_entropy").result())


# ---- raw requests


def raw_model(http: httpx.Client, **lora) -> str:
    """A session with one adapter in training; nothing but HTTP."""
    body = {"tags": [], "user_metadata": {}, "sdk_version": "0.38.0", "type": "create_session"}
    session_id = http.post("create_session", json=body).json()["session_id"]
    config = {"rank": 4, "seed": 0, "train_unembed": True, "train_mlp": True, "train_attn": True} | lora
    body = {"session_id": session_id, "model_seq_id": 0, "base_model": "demo", "lora_config": config}
    created = http.post("create_model", json=body).json()
    assert http.post("retrieve_future", json={"request_id": created["request_id"]}).json()["model_id"]
    return created["model_id"]


def finish(http: httpx.Client, model_id: str) -> None:
    session_id, reason = model_id.split(":")[0], {"reason": {"type": "success"}}
    assert http.post(f"sessions/{session_id}/finish", json=reason).status_code == 204


def fb_body(model_id: str, seq_id: int, tokens=TOKENS, *, loss_fn: str = "cross_entropy") -> bytes:
    n = len(tokens) - 1
    request = pb.ForwardBackwardRequest(model_id=model_id, seq_id=seq_id, loss_fn=loss_fn)
    example = request.data.add()
    example.model_input.add().encoded_text.tokens = np.asarray(tokens[:-1], np.int32).tobytes()
    for name, values, dtype in (
        ("target_tokens", np.asarray(tokens[1:], np.int64), pb.DTYPE_INT64),
        ("weights", np.ones(n, np.float32), pb.DTYPE_FLOAT32),
    ):
        example.loss_fn_inputs[name].CopyFrom(pb.Tensor(dense=values.tobytes(), dtype=dtype, shape=[n]))
    return request.SerializeToString()


def post_fb(http: httpx.Client, model_id: str, seq_id: int, **options) -> str:
    answer = http.post("forward_backward", content=fb_body(model_id, seq_id, **options))
    assert answer.status_code == 200, answer.text
    return answer.json()["request_id"]


def post_optim(http: httpx.Client, model_id: str, seq_id: int) -> str:
    body = {"model_id": model_id, "seq_id": seq_id, "type": "optim_step", "adam_params": ADAM.model_dump()}
    return http.post("optim_step", json=body).json()["request_id"]


def numbers(answer: httpx.Response) -> Any:
    """What must be equal: log-probs and metrics, but for how fast it was."""
    if answer.headers["content-type"] != "application/x-protobuf":
        return answer.json()
    output = pb.ForwardBackwardOutput.FromString(answer.content)
    timeless = {name: value for name, value in output.metrics.items() if "per_s" not in name}
    return timeless | {"logprobs": output.loss_fn_outputs[0].fields["logprobs"].data}


def result(http: httpx.Client, request_id: str) -> httpx.Response:
    answer = http.post("retrieve_future", json={"request_id": request_id})
    assert answer.status_code == 200, answer.text
    return answer


# ---- training


def test_a_client_learns_what_the_server_is(server, service):
    capabilities = rest(server).get_server_capabilities().result()
    assert [model.model_name for model in capabilities.supported_models] == ["demo"]
    client = new_adapter(service, rank=8)
    info = client.get_info()
    assert (info.model_data.model_name, info.is_lora, info.lora_rank) == ("demo", True, 8)
    tokenizer = client.get_tokenizer()
    assert tokenizer.decode(tokenizer.encode("héllo")) == "héllo"


def test_a_seed_decides_every_number_and_training_lowers_the_loss(service):
    first, again, other = (new_adapter(service, seed=seed) for seed in (1, 1, 2))
    before = logprobs(first.forward([datum()], "cross_entropy").result())
    after = train(first)
    assert after == train(again)
    assert after != train(other)
    assert sum(after[0]) > sum(before[0])


def test_requests_queued_without_waiting_give_the_same_bits_as_one_at_a_time(service):
    queued, waited = new_adapter(service), new_adapter(service)
    futures = []
    for _ in range(3):
        futures += [queued.forward_backward([datum()], "cross_entropy"), queued.optim_step(ADAM)]
    last = queued.forward([datum()], "cross_entropy")
    assert logprobs(last.result()) == train(waited, steps=3)
    assert [future.result().metrics["optim/step"] for future in futures[1::2]] == [1, 2, 3]


def test_forward_leaves_the_gradients_alone(service):
    plain, disturbed = new_adapter(service), new_adapter(service)
    disturbed.forward([datum(TOKENS[::-1])], "cross_entropy").result()
    plain.forward_backward([datum()], "cross_entropy").result()
    disturbed.forward_backward([datum()], "cross_entropy").result()
    disturbed.forward([datum(TOKENS[::-1])], "cross_entropy").result()
    for client in (plain, disturbed):
        client.optim_step(ADAM).result()
    assert train(plain) == train(disturbed)


def test_datums_are_answered_in_order_at_their_own_length(service):
    client = new_adapter(service)
    data = [datum(TOKENS[: 3 + 5 * i]) for i in (0, 5, 2, 7)]
    together = client.forward(data, "cross_entropy").result()
    assert [len(each) for each in logprobs(together)] == [2, 27, 12, 37]
    for one, each in zip(data, logprobs(together), strict=True):
        alone = logprobs(client.forward([one], "cross_entropy").result())[0]
        np.testing.assert_allclose(each, alone, atol=1e-5)


def test_a_request_of_more_than_1024_datums_arrives_in_chunks_and_is_put_together(service):
    client = new_adapter(service)
    data = [datum(TOKENS[i % 7 : i % 7 + 4]) for i in range(1030)]
    output = client.forward_backward(data, "cross_entropy").result()
    assert len(output.loss_fn_outputs) == 1030
    assert output.metrics["loss:sum"] == pytest.approx(-sum(map(sum, logprobs(output))), rel=1e-4)
    client.optim_step(ADAM).result()


def test_a_custom_loss_is_a_forward_and_a_cross_entropy_with_any_weights(service):
    """What forward_backward_custom sends; the SDK needs torch to compute the weights, -dC/dlogprobs."""
    client = new_adapter(service)
    learned = np.array(logprobs(client.forward([datum()], "cross_entropy").result())[0])
    weights = -2 * (learned + 1)  # C = sum (logprob + 1)^2: negative where the log-prob is above -1
    output = client.forward_backward([datum(weights=weights.tolist())], "cross_entropy").result()
    assert output.metrics["loss:sum"] == pytest.approx(-(learned * weights).sum(), rel=1e-5)
    client.optim_step(ADAM).result()
    closer = np.array(logprobs(client.forward([datum()], "cross_entropy").result())[0])
    assert ((closer + 1) ** 2).sum() < ((learned + 1) ** 2).sum()


def test_soft_targets_come_dense_or_sparse_and_go_back_in_their_shape(service):
    """The SDK sends the smaller of both: here 2 of 40 columns are used, then all."""
    client, n = new_adapter(service), len(TOKENS) - 1
    targets, weights = np.zeros((n, 40), np.int64), np.zeros((n, 40), np.float32)
    targets[:, :2], weights[:, :2] = np.stack([TOKENS[1:], TOKENS[:-1]], axis=1), (0.75, 0.25)

    one = datum(target_tokens=types.TensorData.from_numpy(targets), weights=types.TensorData.from_numpy(weights))
    output = client.forward(data=[one], loss_fn="cross_entropy").result()
    plain = logprobs(client.forward([datum()], "cross_entropy").result())[0]
    got = output.loss_fn_outputs[0]["logprobs"].to_numpy()
    assert got.shape == (n, 40)
    np.testing.assert_allclose(got[:, 0], plain, atol=1e-5)
    assert output.metrics["loss:sum"] == pytest.approx(-(0.75 * got[:, 0] + 0.25 * got[:, 1]).sum(), rel=1e-5)


@pytest.mark.parametrize("loss_fn", ["importance_sampling", "ppo", "cispo", "dro", "gspo", "stable_reinforce"])
def test_a_policy_loss_trains_on_what_was_sampled(service, loss_fn):
    client = new_adapter(service)
    sampler = client.save_weights_and_get_sampling_client().result()
    sequence = sampler.sample(prompt(TOKENS[:9]), 1, types.SamplingParams(max_tokens=6, seed=1)).result().sequences[0]
    sampled, zeros, ones = list(sequence.logprobs or ()), [0.0] * 8, [1.0] * len(sequence.tokens)
    mask = {"sequence_ratio_mask": zeros + ones} if loss_fn == "gspo" else {}
    one = datum(TOKENS[:9] + sequence.tokens, weights=None, logprobs=zeros + sampled, advantages=zeros + ones, **mask)
    before = logprobs(client.forward_backward([one], loss_fn).result())[0]
    np.testing.assert_allclose(before[8:], sampled, atol=1e-4)
    client.optim_step(ADAM).result()
    assert sum(logprobs(client.forward([one], loss_fn).result())[0][8:]) > sum(before[8:])


# ---- order and promises


def test_requests_run_in_the_order_of_their_seq_id_whatever_order_they_arrive_in(http):
    ordered, shuffled = raw_model(http), raw_model(http)
    answers = {}
    for model_id, order in ((ordered, (1, 2, 3)), (shuffled, (2, 3, 1))):
        ids = {seq: post_optim(http, model_id, seq) if seq == 2 else post_fb(http, model_id, seq) for seq in order}
        answers[model_id] = [numbers(result(http, ids[seq])) for seq in (1, 2, 3)]
        finish(http, model_id)
    assert answers[ordered] == answers[shuffled]
    assert answers[ordered][0] != answers[ordered][2]


def test_neighbouring_forward_backwards_share_tiles_and_a_bad_one_fails_alone(http):
    """While the first runs the others arrive, and share what it would have had to itself: 3 x 20 tokens, one tile."""
    together, alone = raw_model(http), raw_model(http)
    post_fb(http, together, 1, tokens=list(range(200)))  # keeps the device busy
    ids = [post_fb(http, together, seq, loss_fn="nonsense" if seq == 3 else "cross_entropy") for seq in (2, 3, 4, 5)]
    answers = [result(http, each) for each in ids]
    assert "nonsense" in answers[1].json()["error"]
    shared = [numbers(answers[i]) for i in (0, 2, 3)]
    finish(http, together)
    result(http, post_fb(http, alone, 1, tokens=list(range(200))))
    single = [numbers(result(http, post_fb(http, alone, seq))) for seq in (2, 3, 4)]
    finish(http, alone)
    tiles = [each["tiles:sum"] for each in shared]
    assert sum(tiles) < 3 and [each["tiles:sum"] for each in single] == [1, 1, 1]
    for mine, theirs in zip(shared, single, strict=True):
        assert mine["loss:sum"] == pytest.approx(theirs["loss:sum"], rel=1e-5)


def test_the_same_seq_id_is_the_same_request_and_its_result_is_served_again(http):
    model_id = raw_model(http)
    with ThreadPoolExecutor(8) as pool:  # as a client that lost the answer, and is in a hurry
        ids = set(pool.map(lambda _: post_fb(http, model_id, 1), range(8)))
    assert len(ids) == 1
    first = result(http, *ids)
    assert first.headers["content-type"] == "application/x-protobuf"
    assert post_fb(http, model_id, 1) in ids
    assert result(http, *ids).content == first.content
    step = result(http, post_optim(http, model_id, 2)).json()
    assert step["metrics"]["optim/step"] == 1
    assert result(http, post_optim(http, model_id, 2)).json() == step
    finish(http, model_id)


def test_a_failed_request_is_consumed_and_the_next_one_runs(http):
    model_id = raw_model(http)
    good, bad = post_fb(http, model_id, 2), post_fb(http, model_id, 1, loss_fn="nonsense")
    failed = result(http, bad).json()
    assert failed["category"] == "user" and "nonsense" in failed["error"]
    assert result(http, good).headers["content-type"] == "application/x-protobuf"
    finish(http, model_id)


def test_a_body_that_is_damaged_behind_its_envelope_fails_in_its_turn(http):
    model_id = raw_model(http)
    body = pb.ForwardBackwardRequest(model_id=model_id, seq_id=1, loss_fn="cross_entropy")
    body.data.add().model_input.add().encoded_text.tokens = b"123"
    answer = http.post("forward_backward", content=body.SerializeToString())
    assert result(http, answer.json()["request_id"]).json()["category"] == "user"
    assert "error" not in result(http, post_optim(http, model_id, 2)).json()
    finish(http, model_id)


def test_a_model_that_was_not_created_says_so_to_every_later_request(http):
    """The SDK computes the model's id itself: it may go on."""
    model_id = raw_model(http)
    session_id = model_id.split(":")[0]
    body = {"session_id": session_id, "model_seq_id": 1, "base_model": "demo", "lora_config": {"rank": 10_000}}
    created = http.post("create_model", json=body).json()
    assert "rank" in result(http, created["request_id"]).json()["error"]
    failed = result(http, post_fb(http, created["model_id"], 1)).json()
    assert failed["category"] == "user" and "not created" in failed["error"]
    finish(http, model_id)


def test_what_is_unknown_is_404(http):
    model_id = "s0000000000:train:0"
    assert http.post("retrieve_future", json={"request_id": "r0"}).status_code == 404
    assert http.post("cancel_future", json={"request_id": "r0"}).status_code == 404
    assert http.post("get_info", json={"model_id": model_id}).status_code == 404
    assert http.post("forward_backward", content=fb_body(model_id, 1)).status_code == 404
    assert http.post("session_heartbeat", json={"session_id": "s0"}).status_code == 404
    assert http.get("samplers/s0:sample:0").status_code == 404
    assert http.get(f"training_runs/{model_id}").status_code == 404
    assert http.get("nonsense").status_code == 404


def test_a_finished_session_is_gone_but_its_results_are_not(http):
    model_id = raw_model(http)
    session_id, request_id = model_id.split(":")[0], post_fb(http, model_id, 1)
    first = result(http, request_id).content
    waiting = post_fb(http, model_id, 3)  # 2 will never come
    assert http.post("session_heartbeat", json={"session_id": session_id}).status_code == 200
    finish(http, model_id)
    finish(http, model_id)
    assert http.post("session_heartbeat", json={"session_id": session_id}).status_code == 410
    assert http.post("forward_backward", content=fb_body(model_id, 2)).status_code == 410
    assert result(http, request_id).content == first
    assert "ended" in result(http, waiting).json()["error"]


def test_a_finished_session_makes_room_for_another_client(server):
    for _ in range(2):
        with connect(server.url) as service:
            for seed in range(8):
                new_adapter(service, seed=seed)
            with pytest.raises(tinker.RequestFailedError, match="adapters are in training") as failed:
                new_adapter(service)
            assert failed.value.category == "user"


# ---- errors

LONG = [1] * 600
IMAGE = types.ImageChunk(data=b"x", format="png", expected_tokens=1)
BAD_DATA: dict[str, tuple[list[types.Datum], Any, str]] = {  # name: (data, loss, what the message must name)
    "unequal lengths": ([datum(), datum(weights=[1.0])], "cross_entropy", r"data\[1\].*weights"),
    "unequal targets": ([datum(target_tokens=[1, 2])], "cross_entropy", r"data\[0\].*target_tokens"),
    "target out of range": ([datum(), datum(target_tokens=[10**6] * 42)], "cross_entropy", r"data\[1\].*target_tokens"),
    "token out of range": ([datum(), datum([-1, 2, 3])], "cross_entropy", r"data\[1\].*model_input"),
    "unknown loss": ([datum()], "custom", r"loss_fn.*custom.*cross_entropy"),
    "missing input": ([datum()], "ppo", r"data\[0\].*advantages"),
    "NaN weight": ([datum(), datum(weights=[float("nan")] * 42)], "cross_entropy", r"data\[1\].*weights"),
    "infinite weight": ([datum(weights=[float("inf")] * 42)], "cross_entropy", r"data\[0\].*weights"),
    "too long": ([datum(), datum(LONG)], "cross_entropy", r"data\[1\].*599.*256"),
    "empty": ([datum([1], target_tokens=[], weights=[])], "cross_entropy", r"data\[0\]"),
    "image": ([types.Datum(model_input=types.ModelInput(chunks=[IMAGE]), loss_fn_inputs=datum().loss_fn_inputs)],
              "cross_entropy", r"data\[0\].*image"),
}  # fmt: skip
BAD_ADAM = {
    "learning_rate": dict(learning_rate=-1.0),
    "beta1": dict(learning_rate=1e-3, beta1=1.0),
    "beta2": dict(learning_rate=1e-3, beta2=-0.1),
    "eps": dict(learning_rate=1e-3, eps=0.0),
    "weight_decay": dict(learning_rate=1e-3, weight_decay=-1.0),
    "grad_clip_norm": dict(learning_rate=1e-3, grad_clip_norm=-1.0),
}


def refused(future, match: str) -> None:
    with pytest.raises(tinker.RequestFailedError, match=match) as failed:
        future.result()
    assert failed.value.category == "user"


def test_every_bad_request_is_the_users_own_error_and_disturbs_nobody(service):
    disturbed, quiet, neighbour = new_adapter(service), new_adapter(service), new_adapter(service)
    for client in (disturbed, quiet, neighbour):
        client.forward_backward([datum()], "cross_entropy").result()  # gradients that must survive what follows
    for data, loss_fn, named in BAD_DATA.values():
        for call in (disturbed.forward_backward, disturbed.forward):
            refused(call(data, loss_fn), named)
    refused(disturbed.forward_backward([datum()], "cross_entropy", {"clip": 1.0}), "clip")
    for field, numbers in BAD_ADAM.items():
        refused(disturbed.optim_step(types.AdamParams(**numbers)), field)
    refused(disturbed.optim_step(types.DimuonParams(learning_rate=0.1)), "dimuon")
    for name in ("..", ".hidden", "a/b", "a b", "ä", "x" * 200, "a\n"):
        refused(disturbed.save_state(name), "name")
    refused(disturbed.save_weights_external("x", age_encryption_recipients=["age1x"]), "age_encryption_recipients")
    refused(disturbed.save_state("short", ttl_seconds=-1), "ttl_seconds")
    for client in (disturbed, quiet, neighbour):
        client.optim_step(ADAM).result()
    expected = train(quiet)
    assert train(disturbed) == expected
    assert train(neighbour) == expected


@pytest.mark.parametrize("chunk", [IMAGE, types.DmelChunk(dmel=b"x")], ids=lambda chunk: chunk.type)
def test_pictures_and_sound_are_refused_by_every_verb_that_takes_a_prompt(service, chunk):
    client, sampler = new_adapter(service), service.create_sampling_client(base_model="demo").result()
    given = types.ModelInput(chunks=[types.EncodedTextChunk(tokens=TOKENS), chunk])
    one = types.Datum(model_input=given, loss_fn_inputs=datum().loss_fn_inputs)
    for call in (client.forward_backward, client.forward):
        refused(call([one], "cross_entropy"), r"data\[0\].model_input: .*images are not supported: text tokens only")
    for call in (lambda: sampler.sample(given, 1, GREEDY), lambda: sampler.compute_logprobs(given)):
        with pytest.raises(tinker.BadRequestError, match=r"prompt.*images are not supported: text tokens only"):
            call().result()


def test_an_optimizer_that_is_not_adamw_is_refused_wherever_it_can_be_asked_for(service):
    muon = dict(match="optimizer 'muon' is not supported; this server has adamw")
    client, params = new_adapter(service), types.optimizer.OptimParamsBase(type="muon", lr=0.1)
    config, path = types.optimizer.OptimizerConfigBase(type="muon"), client.save_state("adamw").result().path
    refused(service.create_lora_training_client("demo", optimizer=config), **muon)
    refused(service.create_training_client_from_state(path, optimizer=config), **muon)
    refused(client.optim_step(params), **muon)


def test_a_base_model_that_is_not_served_is_refused_by_a_message_that_names_the_one_that_is(service):
    message = "base_model 'llama' is not served here; this server has 'demo'"
    path = new_adapter(service).save_state("of-demo").result().path
    refused(service.create_lora_training_client("llama"), message)
    refused(service.create_training_client_from_state(path, base_model="llama"), message)
    for where in (dict(base_model="llama"), dict(base_model="llama", model_path=path)):
        with pytest.raises(tinker.BadRequestError, match=message):
            service.create_sampling_client(**where).result()


def test_the_folder_of_the_base_model_is_a_name_of_it_however_it_is_written(server, service):
    folder = new_adapter(service).get_info().model_data.tokenizer_id
    assert folder == str(server.state_dir / "models" / "demo")
    for name in (folder, f"{folder}/", os.path.relpath(folder, ROOT)):  # ROOT is where the server runs
        service.create_lora_training_client(name, rank=4).result()
        service.create_sampling_client(base_model=name).result()


def test_a_rank_above_the_servers_is_refused_by_a_message_that_names_its_own(service):
    refused(service.create_lora_training_client("demo", rank=33), r"rank is 33; this server takes 1\.\.32 .*--max-rank")


@pytest.mark.parametrize("asked", [True, False])
def test_train_unembed_is_accepted_and_reported_as_not_trained(server, service, asked):
    client = new_adapter(service, train_unembed=asked)  # true is the SDK's default
    train(client)
    for saved in (client.save_state("x"), client.save_weights_for_sampler("x"), client.save_weights_external("x")):
        info = rest(server).get_weights_info_by_tinker_path(saved.result().path).result()
        assert (info.train_mlp, info.train_attn, info.train_unembed) == (True, True, False)
    told = f"{client.model_id}: train_unembed is accepted, but the unembedding is not trained"
    assert (told in server.log.read_text()) == asked


@pytest.mark.parametrize("field, value", [("learning_rate", 1e39), ("beta1", 1 - 1e-9), ("beta2", 1 - 1e-9),
                                          ("eps", 1e-40), ("weight_decay", 1e39)])  # fmt: skip
def test_a_number_that_is_out_of_range_only_in_float32_is_refused_too(service, field, value):
    client = new_adapter(service)
    client.forward_backward([datum()], "cross_entropy").result()
    refused(client.optim_step(types.AdamParams(**{"learning_rate": 1e-3, field: value})), field)


@pytest.mark.parametrize("number", [-1, 10**9])
def test_a_model_whose_number_is_no_model_id_takes_no_place(http, number):
    model_id = raw_model(http)
    body = {
        "session_id": model_id.split(":")[0],
        "model_seq_id": number,
        "base_model": "demo",
        "lora_config": {"rank": 4},
    }
    created = http.post("create_model", json=body)
    if created.status_code == 200:
        assert "bad training run id" in result(http, created.json()["request_id"]).json()["error"]
        assert "not created" in result(http, post_fb(http, created.json()["model_id"], 1)).text
    finish(http, model_id)


def test_an_empty_name_is_a_bad_name(service):
    refused(new_adapter(service).save_state(""), "name")


def test_what_cannot_be_created_says_why(service):
    refused(service.create_lora_training_client("llama"), "base_model.*llama.*demo")
    refused(service.create_lora_training_client("demo", rank=33), "rank is 33")
    refused(service.create_lora_training_client("demo", rank=0), "rank is 0")
    refused(service.create_lora_training_client("demo", train_mlp=False, train_attn=False), "train_attn")
    refused(service.create_lora_training_client("demo", optimizer=types.DimuonOptimizerConfig()), "dimuon")
    for path in ("tinker://s0000000000:train:0/weights/none", "tinker://x/weights/../x", "tinker://a/b", "tinker://"):
        refused(service.create_training_client_from_state(path), "checkpoint")


def test_a_name_that_exists_is_kept_unless_overwrite_is_asked_for(service):
    client = new_adapter(service)
    client.save_state("twice").result()
    client.save_weights_for_sampler("twice").result()  # another kind: another name
    train(client)
    refused(client.save_state("twice"), "exists")
    refused(client.save_weights_for_sampler("twice"), "exists")
    client.save_state("twice", overwrite=True).result()


def test_a_bad_sample_is_the_users_own_error_and_the_next_one_is_served(service):
    sampler = service.create_sampling_client(base_model="demo").result()
    refused(sampler.sample(prompt(LONG), 1, GREEDY), "prompt: got 600")
    refused(sampler.sample(prompt(), 1, types.SamplingParams(max_tokens=500)), "prompt.*max_tokens 500")
    refused(sampler.sample(prompt([1, 10**6]), 1, GREEDY), "prompt.*1000000")
    refused(sampler.sample(prompt([]), 1, GREEDY), "prompt: got 0")
    assert sampler.sample(prompt(), 1, GREEDY).result().sequences


def test_a_sampling_parameter_out_of_range_is_refused_by_name(service):
    sampler = service.create_sampling_client(base_model="demo").result()
    for field, params in {
        "temperature": types.SamplingParams(max_tokens=1, temperature=-1.0),
        "top_p": types.SamplingParams(max_tokens=1, top_p=0.0),
        "top_k": types.SamplingParams(max_tokens=1, top_k=-2),
        "max_tokens": types.SamplingParams(max_tokens=0),
        "stop": types.SamplingParams(max_tokens=1, stop=[""]),
    }.items():
        with pytest.raises((tinker.BadRequestError, tinker.RequestFailedError), match=field):
            sampler.sample(prompt(), 1, params).result()
    image = types.ModelInput(chunks=[IMAGE])
    with pytest.raises((tinker.BadRequestError, tinker.RequestFailedError), match="image"):
        sampler.sample(image, 1, GREEDY).result()


def test_a_checkpoint_that_is_not_there_cannot_be_sampled_from(service):
    for path in ("tinker://s0000000000:train:0/sampler_weights/none", "tinker://x/y/z", "tinker://../../.."):
        with pytest.raises(tinker.BadRequestError, match="checkpoint"):
            service.create_sampling_client(model_path=path).result()
    with pytest.raises(tinker.BadRequestError, match="llama"):
        service.create_sampling_client(base_model="llama").result()


IDS = ("session_id", "model_id", "request_id", "tinker_path")
MALFORMED = {
    "nothing": b"",
    "null": b"null",
    "array": b"[]",
    "string": b'"x"',
    "not JSON": b"\xff{",
    "deep": b'{"a":' * 20_000,
    "empty object": b"{}",
    "objects for ids": json.dumps({name: {"a": 1} for name in IDS}).encode(),
    "numbers for ids": json.dumps(dict.fromkeys(IDS, 10**40)).encode(),
    "traversal": json.dumps(dict.fromkeys(IDS, "../../x")).encode(),
}


@pytest.mark.parametrize(
    "verb",
    [
        "session_heartbeat",
        "create_model",
        "get_info",
        "forward_backward",
        "optim_step",
        "save_weights",
        "load_weights",
        "save_weights_for_sampler",
        "save_weights_external",
        "weights_info",
        "create_sampling_session",
        "asample",
        "retrieve_future",
        "retrieve_futures",
        "cancel_future",
    ],
)
def test_a_malformed_body_is_a_4xx_that_is_not_retried(server, verb):
    for name, body in MALFORMED.items():
        answer = httpx.post(f"{server.url}/api/v1/{verb}", content=body)  # a 500 also closes its connection
        assert answer.status_code in (400, 404, 422) and answer.json()["detail"], f"{name}: {answer.text}"


def test_a_body_that_is_too_large_is_refused(http):
    answer = http.post("forward_backward", content=bytes(65 * 2**20))
    assert answer.status_code == 413 and "max-body-mb" in answer.text


def test_a_client_that_hangs_up_inside_its_body_is_no_failure_of_the_servers(server, http):
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as lying:
        lying.sendall(b"POST /api/v1/telemetry HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\nabc")
    assert http.get("healthz").json()["status"] == "ok"
    time.sleep(0.5)
    assert "ClientDisconnect" not in server.log.read_text()


# ---- sampling


@pytest.fixture
def sampler(service):
    """An adapter that has learnt something, frozen."""
    client = new_adapter(service, seed=5)
    train(client)
    return client.save_weights_and_get_sampling_client().result()


def test_greedy_sampling_is_deterministic_and_a_seed_is_too(sampler):
    tokens = lambda n, params: [s.tokens for s in sampler.sample(prompt(), n, params).result().sequences]
    assert tokens(2, GREEDY)[0] == tokens(1, GREEDY)[0] == tokens(2, GREEDY)[1]
    seeded = types.SamplingParams(max_tokens=12, seed=7, temperature=1.5)
    assert tokens(3, seeded) == tokens(3, seeded)
    assert len(set(map(tuple, tokens(3, seeded)))) == 3
    unseeded = types.SamplingParams(max_tokens=12, temperature=1.5)
    assert tokens(1, unseeded) != tokens(1, unseeded)


def test_a_stop_token_or_string_ends_a_sequence_and_belongs_to_it(service, sampler):
    free = sampler.sample(prompt(), 1, types.SamplingParams(max_tokens=24, seed=3, stop=[])).result().sequences[0]
    assert free.stop_reason == "length" and len(free.tokens) == 24
    at = free.tokens.index(free.tokens[5])
    stopped = types.SamplingParams(max_tokens=24, seed=3, stop=[free.tokens[5]])
    sequence = sampler.sample(prompt(), 1, stopped).result().sequences[0]
    assert (sequence.tokens, sequence.stop_reason) == (free.tokens[: at + 1], "stop")
    assert len(sequence.logprobs) == at + 1
    tokenizer = new_adapter(service).get_tokenizer()
    text = next(text for token in free.tokens if (text := str(tokenizer.decode([token]))).isalnum())
    length = next(n for n in range(25) if text in tokenizer.decode(free.tokens[:n]))
    stopped = types.SamplingParams(max_tokens=24, seed=3, stop=[text])
    sequence = sampler.sample(prompt(), 1, stopped).result().sequences[0]
    assert (sequence.tokens, sequence.stop_reason) == (free.tokens[:length], "stop")


def test_prompt_logprobs_are_the_trainers(service):
    client = new_adapter(service, seed=5)
    expected = train(client)[0]
    sampler = client.save_weights_and_get_sampling_client().result()
    first, *rest = sampler.compute_logprobs(prompt()).result()
    assert first is None
    np.testing.assert_allclose(np.array(rest, float), expected, atol=1e-4)


def test_only_the_last_prompt_logprobs_are_told_when_only_they_are_asked_for(sampler):
    everything = sampler.compute_logprobs(prompt()).result()
    last = sampler.compute_logprobs(prompt(), prompt_logprobs_last_n=3).result()
    assert last == [None] * (len(TOKENS) - 3) + everything[-3:]


def test_the_likeliest_tokens_come_with_their_logprobs(sampler):
    asked = sampler.sample(
        prompt(), 1, GREEDY, include_prompt_logprobs=True, topk_prompt_logprobs=3, topk_sample_logprobs=2
    )
    answer = asked.result()
    sequence, topk = answer.sequences[0], answer.topk_prompt_logprobs
    assert topk is not None and len(topk) == len(TOKENS) and topk[0] is None
    for token, logprob, likeliest in zip(TOKENS[1:], answer.prompt_logprobs[1:], topk[1:], strict=True):
        assert likeliest is not None and len(likeliest) == 3
        assert dict(likeliest).get(token, logprob) == logprob <= likeliest[0][1]
    alternatives = sequence.topk_logprobs
    assert [row[0][0] for row in alternatives] == sequence.tokens  # greedy
    np.testing.assert_allclose([row[0][1] for row in alternatives], sequence.logprobs, atol=1e-6)


def test_a_snapshot_does_not_change_when_training_goes_on(service):
    client = new_adapter(service)
    train(client)
    frozen = client.save_weights_and_get_sampling_client().result()
    before, score = frozen.compute_logprobs(prompt()).result(), train(client)
    assert frozen.compute_logprobs(prompt()).result() == before
    assert logprobs(client.forward([datum()], "cross_entropy").result()) == score  # nor does sampling touch the trainer
    newer = client.save_weights_and_get_sampling_client().result()
    assert newer.compute_logprobs(prompt()).result() != before


def test_snapshots_that_nobody_samples_any_more_go_but_for_the_newest_of_a_run():
    from server import KEEP_RESULTS_S, SamplingSession, idle

    def sampler(run, used_s_ago, snapshot=True):
        path = SimpleNamespace(path=SimpleNamespace(run_id=run)) if snapshot else None
        return SamplingSession("x", None, None, None, path, last_used=1e6 - used_s_ago)

    async def check():  # sampling sessions hold futures, which need a loop
        long = 2 * KEEP_RESULTS_S
        gone, used, last = sampler("a", long), sampler("a", 5), sampler("a", long)
        other, base = sampler("b", long), sampler("b", long, snapshot=False)
        assert idle([gone, used, other, base, last], 1e6) == [gone]

    asyncio.run(check())


def test_named_weights_are_sampled_like_the_snapshot_they_are(service):
    client = new_adapter(service)
    train(client)
    sampled = lambda sampler: sampler.sample(prompt(), 1, GREEDY).result().sequences[0]
    tokens = lambda sampler: (sampled(sampler).tokens, sampled(sampler).logprobs)
    expected = tokens(client.save_weights_and_get_sampling_client().result())
    for path in (client.save_weights_for_sampler("named").result().path, client.save_state("named").result().path):
        assert tokens(service.create_sampling_client(model_path=path).result()) == expected


def test_a_sample_asked_for_twice_is_sampled_once(service, http):
    sampler_id = service.create_sampling_client(base_model="demo").result()._sampling_session_id
    ask = sample_body(sampler_id, 0)
    first, again = (http.post("asample", json=ask).json() for _ in range(2))
    assert first == again and len(set(first["sample_sequence_ids"])) == 2
    assert result(http, first["request_id"]).content == result(http, first["request_id"]).content
    other = http.post("asample", json=ask | {"seq_id": 10**18}).json()  # as an unpickled client counts
    assert result(http, other["request_id"]).content != result(http, first["request_id"]).content


def sample_body(sampler_id: str, seq_id: int, max_tokens: int = 4) -> dict:
    chunks = [{"type": "encoded_text", "tokens": TOKENS[:5]}, {"type": "encoded_text", "tokens": TOKENS[5:]}]
    return {"sampling_session_id": sampler_id, "seq_id": seq_id, "num_samples": 2, "prompt": {"chunks": chunks},
            "sampling_params": {"max_tokens": max_tokens, "stop": []}}  # fmt: skip


def test_what_has_finished_is_told_in_one_poll_and_a_cancelled_sample_fails(service, http):
    sampler_id = service.create_sampling_client(base_model="demo").result()._sampling_session_id
    ids = [http.post("asample", json=sample_body(sampler_id, seq)).json()["request_id"] for seq in range(3)]
    long = http.post("asample", json=sample_body(sampler_id, 3, max_tokens=450)).json()["request_id"]
    assert http.post("cancel_future", json={"request_id": long}).status_code == 200
    assert "cancel" in result(http, long).json()["error"]
    seen, cursor = [], 0
    while len(seen) < 4:
        target = {"sampling_session_id": sampler_id}
        answer = http.post("retrieve_futures", json={"target": target, "prev_cursor": cursor, "timeout": 10.0}).json()
        assert answer["cursor"] > cursor
        seen, cursor = seen + answer["completions"], answer["cursor"]
    assert {each["request_id"]: each["state"] for each in seen} == dict.fromkeys(ids, "finished") | {long: "failed"}
    idle = {"target": {"sampling_session_id": sampler_id}, "prev_cursor": cursor, "timeout": 0.0}
    assert http.post("retrieve_futures", json=idle).json() == {"completions": [], "cursor": cursor}


def test_a_sample_that_was_refused_is_told_like_one_that_failed(service, http):
    sampler_id = service.create_sampling_client(base_model="demo").result()._sampling_session_id
    refused = http.post("asample", json=sample_body(sampler_id, 0, max_tokens=10_000)).json()["request_id"]
    ask = {"target": {"sampling_session_id": sampler_id}, "prev_cursor": 0, "timeout": 1.0}
    told = http.post("retrieve_futures", json=ask).json()["completions"]
    assert told == [{"state": "failed", "request_id": refused}]


# ---- checkpoints


def test_a_checkpoint_is_listed_published_given_an_end_and_deleted(server, service):
    client = new_adapter(service, user_metadata={"who": "me"})
    path = client.save_state("listed", user_metadata={"step": "1"}).result().path
    client.save_weights_for_sampler("listed").result()
    reader, run_id = rest(server), client.model_id
    only = lambda: next(c for c in reader.list_checkpoints(run_id).result().checkpoints if c.tinker_path == path)
    assert (only().checkpoint_type, only().public, only().user_metadata) == ("training", False, {"step": "1"})
    assert only().size_bytes and only().expires_at is None
    reader.publish_checkpoint_from_tinker_path(path).result()
    assert only().public
    reader.unpublish_checkpoint_from_tinker_path(path).result()
    assert not only().public
    reader.set_checkpoint_ttl_from_tinker_path(path, 3600).result()
    assert only().expires_at is not None
    reader.set_checkpoint_ttl_from_tinker_path(path, None).result()
    assert only().expires_at is None
    info = reader.get_weights_info_by_tinker_path(path).result()
    assert (info.base_model, info.is_lora, info.lora_rank, info.train_mlp) == ("demo", True, 4, True)
    run = reader.get_training_run(run_id).result()
    assert run.user_metadata == {"who": "me"} and run.last_checkpoint is not None
    assert run.last_checkpoint.tinker_path == path and run.last_sampler_checkpoint is not None
    assert run_id in [each.training_run_id for each in reader.list_training_runs().result().training_runs]
    assert path in [each.tinker_path for each in reader.list_user_checkpoints().result().checkpoints]
    reader.delete_checkpoint_from_tinker_path(path).result()
    assert path not in [each.tinker_path for each in reader.list_checkpoints(run_id).result().checkpoints]
    refused(service.create_training_client_from_state(path), "unknown checkpoint")


def test_a_session_lists_its_runs_and_samplers(server, service):
    client = new_adapter(service)
    sampler_id = client.save_weights_and_get_sampling_client().result()._sampling_session_id
    reader = rest(server)
    session_id = client.model_id.split(":")[0]
    assert session_id in reader.list_sessions().result().sessions
    session = reader.get_session(session_id).result()
    assert (session.training_run_ids, session.sampler_ids) == ([client.model_id], [sampler_id])


def test_runs_of_one_project_cannot_be_listed_for_there_are_no_projects(server):
    with pytest.raises(tinker.BadRequestError, match="no projects"):
        rest(server).list_training_runs(project_id="mine").result()


def test_external_weights_are_downloaded_by_links_that_need_no_key(server, service, tmp_path):
    client = new_adapter(service)
    saved = client.save_weights_external("peft").result()
    urls = rest(server).get_external_weights_urls(saved.path).result().urls
    assert sorted(urls) == ["adapter_config.json", "adapter_model.safetensors"]
    for name, url in urls.items():
        with urllib.request.urlopen(url) as answer:
            (tmp_path / name).write_bytes(answer.read())
    assert json.loads((tmp_path / "adapter_config.json").read_text())["r"] == 4
    assert any("lora_A" in name for name in load_file(tmp_path / "adapter_model.safetensors"))
    url = urls["adapter_config.json"]
    for wrong in (url[:-2], url.replace("expires=", "expires=9"), url.replace("config", "model"), url.split("?")[0],
                  url.replace("adapter_config.json", "../../lock")):  # fmt: skip
        assert httpx.get(wrong).status_code in (403, 404), wrong


def test_a_link_to_what_was_deleted_is_404(server, service):
    path = new_adapter(service).save_weights_external("gone").result().path
    urls = rest(server).get_external_weights_urls(path).result().urls
    rest(server).delete_checkpoint_from_tinker_path(path).result()
    assert httpx.get(urls["adapter_config.json"]).status_code == 404


def test_a_link_with_a_letter_that_is_not_ascii_is_a_wrong_link(server):
    assert (
        httpx.get(f"{server.url}/download/object/file", params={"expires": "99999999999", "signature": "é"}).status_code
        == 403
    )


def test_loading_without_the_optimizer_starts_its_moments_anew(service):
    client = new_adapter(service)
    score = train(client, steps=2)
    path = client.save_state("fork").result().path
    weights = service.create_training_client_from_state(path).result()
    whole = service.create_training_client_from_state_with_optimizer(path).result()
    assert logprobs(weights.forward([datum()], "cross_entropy").result()) == score
    after = train(client)
    assert train(whole) == after
    assert train(weights) != after


# ---- load, start and end


def test_idle_long_polls_end_in_try_again_and_slow_nobody(server, http, service):
    model_id = raw_model(http)
    never = [post_fb(http, model_id, seq) for seq in range(2, 12)]  # 1 will never come
    sampler_id = service.create_sampling_client(base_model="demo").result()._sampling_session_id
    session = {"session_id": model_id.split(":")[0]}

    async def scenario() -> list[httpx.Response]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=f"{server.url}/api/v1/", timeout=60, limits=limits) as client:
            poll = lambda request_id: client.post("retrieve_future", json={"request_id": request_id})
            polls = [asyncio.create_task(poll(never[i % 10])) for i in range(300)]
            asked = [client.post("asample", json=sample_body(sampler_id, seq, max_tokens=2)) for seq in range(200)]
            for sampled in await asyncio.gather(*asked):
                assert (await poll(sampled.json()["request_id"])).status_code == 200
                assert (await client.post("session_heartbeat", json=session)).status_code == 200
            return await asyncio.gather(*polls)

    for answer in asyncio.run(scenario()):
        assert answer.status_code == 408
        body = answer.json()
        assert (body["type"], body["queue_state"]) == ("try_again", "active") and body["request_id"] in never
    finish(http, model_id)


def test_a_new_process_goes_on_bit_for_bit_and_ctrl_c_ends_a_busy_one_at_once(serve, server, tmp_path):
    key = "tml-secret"
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "xla").symlink_to(server.state_dir / "xla")  # the same programs
    with serve(tmp_path / "state", "--api-key", key) as first:
        assert httpx.get(f"{first.url}/api/v1/healthz").status_code == 401
        assert httpx.get(f"{first.url}/api/v1/healthz", headers={"X-API-Key": "tml-no"}).status_code == 403
        service = connect(first.url, key)
        client = new_adapter(service)
        train(client, steps=2)
        path = client.save_state("kept").result().path
        expected, run_id = train(client), client.model_id
        reader = tinker.RestClient(base_url=first.url, api_key=key)
        links = reader.get_external_weights_urls(client.save_weights_external("x").result().path).result()
        assert httpx.get(links.urls["adapter_config.json"]).status_code == 200
        asleep = busy(first.url, key, client)
        assert first.interrupt() < 5
        asleep.join()
        assert "Traceback" not in first.log.read_text(), first.log.read_text()
    with serve(tmp_path / "state") as second, connect(second.url) as service:
        assert run_id in [run.training_run_id for run in rest(second).list_training_runs().result().training_runs]
        resumed = service.create_training_client_from_state_with_optimizer(path).result()
        assert resumed.model_id != run_id
        assert train(resumed) == expected


def busy(url: str, key: str, client: tinker.TrainingClient) -> threading.Thread:
    """Everything at once: a large forward_backward on the device, samples in flight, a long-poll open."""
    headers = {"X-API-Key": key}
    http = httpx.Client(base_url=f"{url}/api/v1/", headers=headers, timeout=60)
    model_id = raw_model(http)
    request = pb.ForwardBackwardRequest.FromString(fb_body(model_id, 1, TOKENS * 5))
    request.data.extend([request.data[0]] * 999)
    working = http.post("forward_backward", content=request.SerializeToString()).json()["request_id"]
    body = {"session_id": model_id.split(":")[0], "sampling_session_seq_id": 0, "base_model": "demo"}
    sampler_id = http.post("create_sampling_session", json=body).json()["sampling_session_id"]
    for seq in range(40):
        assert http.post("asample", json=sample_body(sampler_id, seq, max_tokens=400)).status_code == 200

    def poll() -> None:
        with (
            contextlib.closing(http),
            contextlib.suppress(httpx.TransportError),
        ):  # cut off is an end too: the SDK asks again
            assert http.post("retrieve_future", json={"request_id": working}).status_code == 408

    asleep = threading.Thread(target=poll)
    asleep.start()
    time.sleep(1)
    return asleep


def test_a_port_or_a_folder_that_is_taken_is_one_line_at_once(server):
    port = server.url.rsplit(":", 1)[1]
    for flags in (
        ["--port", port],
        ["--port", "0", "--state-dir", str(server.state_dir)],
        ["--port", "0", "--host", "0.0.0.0"],
    ):
        command = [sys.executable, "server.py", *flags]
        ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
        last = ended.stderr.splitlines()
        assert ended.returncode == 1 and last[-1].startswith("server.py: "), ended.stderr
        assert "Traceback" not in ended.stderr and "loading" not in ended.stderr


def test_only_folders_of_the_servers_own_are_checked_and_cleared_never_the_users_weights(tmp_path):
    from model import ModelConfig
    from server import ServerConfig, cache_folders, hub_folder

    config = ServerConfig(model=ModelConfig(model="Qwen/Qwen3-0.6B"), state_dir=tmp_path)
    assert all(folder.is_relative_to(tmp_path) for folder in cache_folders(config).values())
    assert [folder.name for folder in hub_folder(config).values()] == ["models--Qwen--Qwen3-0.6B"]
    assert hub_folder(ServerConfig(state_dir=tmp_path)) == {}


def test_a_session_that_ends_while_its_adapter_is_loaded_gives_its_place_back(service, http):
    path = new_adapter(service).save_state("loaded").result().path
    for _ in range(7):
        opened = {"tags": [], "user_metadata": {}, "sdk_version": "0.38.0", "type": "create_session"}
        session_id = http.post("create_session", json=opened).json()["session_id"]
        body = {"session_id": session_id, "model_seq_id": 0, "path": path, "optimizer": True, "type": "load_weights"}
        request_id = http.post("load_weights", json=body).json()["request_id"]
        finish(http, f"{session_id}:train:0")
        result(http, request_id)
    for seed in range(7):  # the eighth is the first line's
        new_adapter(service, seed=seed)


def test_a_sampler_asked_for_again_while_it_is_made_is_made_once(server, service, http):
    path = new_adapter(service).save_state("sampled").result().path
    opened = {"tags": [], "user_metadata": {}, "sdk_version": "0.38.0", "type": "create_session"}
    session_id = http.post("create_session", json=opened).json()["session_id"]
    body = {"session_id": session_id, "sampling_session_seq_id": 0, "model_path": path}
    folders = lambda: len(list((server.state_dir / "objects").iterdir()))
    before = folders()
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: http.post("create_sampling_session", json=body), range(8)))
    assert {answer.json()["sampling_session_id"] for answer in answers} == {f"{session_id}:sample:0"}
    assert folders() == before + 1
    finish(http, f"{session_id}:train:0")
    assert folders() == before


def test_an_optimizer_step_numbered_0_is_not_the_creation_of_the_model(http):
    model_id = raw_model(http)
    body = {"model_id": model_id, "seq_id": 0, "type": "optim_step", "adam_params": ADAM.model_dump()}
    answer = http.post("optim_step", json=body)
    finish(http, model_id)
    assert answer.status_code == 400 and "seq_id" in answer.text


def test_nothing_of_all_this_was_a_failure_of_the_servers(server):
    assert "Traceback" not in server.log.read_text(), server.log.read_text()
