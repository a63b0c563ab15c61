"""Bytes <-> numpy: the whole Tinker protocol on one page. No other module sees a protobuf.

    forward_backward -> decode_envelope -> queue -> decode_forward_backward -> validate_forward_backward -> trainer
    asample          -> decode_sample -> validate_sample -> sampler
    retrieve_future  <- encode_forward_backward <- trainer;  encode_sample <- sampler;  try_again, failed <- server

It keeps four promises:
  1. Whatever the bytes, a decoder returns or raises ValueError: the field, what was got, what is allowed.
  2. A decoded tensor is float32 or int64, [N] or [N, K]; cells that a CSR tensor does not list are 0.
     Arrays may be read-only views of the body.
  3. Memory is bounded before it is taken: a body of 100 bytes cannot ask for a terabyte of zeros.
  4. An answer that the SDK would choke on (an empty sequence, a metric without its reduction) is our bug: an assert.

It does no I/O (see server.py) and copies no schema: `tinker.proto` and `tinker.types` are the SDK's own.
Images, audio, target_prompt_logprobs and prompt_alt_tokens_k are refused by name. Two things are accepted and ignored,
for only stable_reinforce reads them: provenance spans and record_stability_info.

Run:        pytest tests/test_wire.py
Read first: the other side of this page, `tinker/proto/request_conv.py` and `response_conv.py` in the SDK.
"""

import itertools
import math
import operator
import reprlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
import pydantic
from google.protobuf.message import DecodeError
from jaxtyping import Float32, Int32, Shaped
from tinker import types as sdk
from tinker.proto import tinker_public_pb2 as pb
from tinker.types.topk_logprobs import MASK_LOGPROB

DTYPES: dict[int, np.dtype] = {
    pb.DTYPE_FLOAT32: np.dtype("<f4"),
    pb.DTYPE_INT64: np.dtype("<i8"),
    pb.DTYPE_INT32: np.dtype("<i4"),
    pb.DTYPE_BFLOAT16: np.dtype("<u2"),  # numpy has none: two bytes to be widened
}
STOP_REASONS = {"stop": pb.STOP_REASON_STOP, "length": pb.STOP_REASON_LENGTH}
REDUCTIONS = frozenset({"mean", "sum", "min", "max", "slack", "hash2", "unique"})  # how the SDK joins chunks
MAX_SPARSE_CELLS = 2**26  # dense cells that the CSR tensors of one request may declare: 512 MiB of int64
MAX_TARGETS = 1024  # a position of a datum may have: the trainer runs a datum once for every 32 of them
MAX_SAMPLES = 1024
MAX_TOPK = 32
INT32_MAX = 2**31 - 1
INT64_MAX = 2**63 - 1  # unpickled sampling clients count their seq_ids from 1e9 times a random number up to 1e9


# ---- What the rest of the server sees. eq=False: == between arrays is an array, not a bool. ----


@dataclass(slots=True, eq=False)
class Datum:
    """One training sequence: tokens[: i + 1] predict inputs["target_tokens"][i]."""

    tokens: Int32[np.ndarray, " n"]
    inputs: dict[str, Shaped[np.ndarray, "_ ..."]]  # by the client's names: target_tokens, weights, advantages ..


@dataclass(slots=True, eq=False)
class ForwardBackward:
    """Datums, and the loss to sum over them; forward_only leaves the gradients alone."""

    model_id: str
    seq_id: int
    data: list[Datum]
    loss_fn: str
    loss_config: dict[str, float | str]
    forward_only: bool


@dataclass(slots=True)
class SamplingParams:
    """How to draw and when to stop. The token that completes a stop belongs to the sequence."""

    max_tokens: int | None  # None: to the end of the context
    temperature: float  # 0: greedy
    top_k: int  # 0: off
    top_p: float  # 1: off
    seed: int | None
    stop_tokens: tuple[int, ...]
    stop_strings: tuple[str, ...]
    stop_at_eos: bool  # False only for an explicit empty list of stops


@dataclass(slots=True, eq=False)
class SampleRequest:
    """One prompt, to be continued num_samples times and scored as asked."""

    sampling_session_id: str
    seq_id: int
    num_samples: int
    prompt: Int32[np.ndarray, " n"]
    params: SamplingParams
    prompt_logprobs: bool
    prompt_logprobs_last_n: int | None  # score only the last n prompt tokens; None: all
    topk_prompt_logprobs: int  # 0: off
    topk_sample_logprobs: int  # 0: off


Topk = tuple[Int32[np.ndarray, "n k"], Float32[np.ndarray, "n k"]]  # token ids and their log-probs; NaN: empty cell


@runtime_checkable
class Sequence(Protocol):
    """One continuation with the untempered model's log-probs; sampler.py makes these and does not import wire."""

    tokens: Int32[np.ndarray, " n"]
    logprobs: Float32[np.ndarray, " n"]
    stop_reason: str  # "stop" or "length"
    topk: Topk | None


@runtime_checkable
class SampleResult(Protocol):
    """What a SampleRequest comes to. A prompt position that was not scored, the first always, is NaN."""

    sequences: list[Any]  # of Sequence
    prompt_logprobs: Float32[np.ndarray, " n"] | None
    topk_prompt_logprobs: Topk | None


# ---- forward_backward: protobuf in ----


def decode_envelope(body: bytes) -> tuple[str, int]:
    """(model_id, seq_id): enough to queue a request, so that whatever is wrong inside it fails in its turn."""
    message = _parse(body)
    return message.model_id, message.seq_id


def _parse(body: bytes) -> pb.ForwardBackwardRequest:
    try:
        message = pb.ForwardBackwardRequest.FromString(body)
    except DecodeError as error:
        raise ValueError(f"body: got {len(body)} bytes, allowed a ForwardBackwardRequest: {error}") from None
    if not message.model_id:
        raise ValueError("model_id: got an empty string, allowed the id that create_model answered")
    if message.seq_id < 1:
        raise ValueError(f"seq_id: got {message.seq_id}, allowed 1 or more")
    return message


def decode_forward_backward(body: bytes) -> ForwardBackward:
    """The whole request, well formed; whether its numbers make sense is for validate_forward_backward to say."""
    message = _parse(body)
    if not message.data:
        raise ValueError("data: got 0 datums, allowed 1 or more")
    sparse = [t for d in message.data for t in d.loss_fn_inputs.values() if t.HasField("sparse_csr")]
    cells = sum(abs(math.prod(t.shape[:2])) for t in sparse)  # _shape refuses further dimensions
    if cells > MAX_SPARSE_CELLS:
        raise ValueError(f"data: got sparse tensors of {cells} cells, allowed {MAX_SPARSE_CELLS}: send fewer datums")
    return ForwardBackward(
        model_id=message.model_id,
        seq_id=message.seq_id,
        data=[_datum(f"data[{i}]", datum) for i, datum in enumerate(message.data)],
        loss_fn=message.loss_fn,
        loss_config=_loss_config(message),
        forward_only=message.forward_only,
    )


def _datum(field: str, message: pb.Datum) -> Datum:
    for chunk in message.model_input:
        if (kind := chunk.WhichOneof("chunk")) != "encoded_text":
            raise ValueError(f"{field}.model_input: got chunk {kind}: images are not supported: text tokens only")
    tokens = b"".join(chunk.encoded_text.tokens for chunk in message.model_input)
    return Datum(
        tokens=_array(f"{field}.model_input", tokens, pb.DTYPE_INT32).astype(np.int32),
        inputs={name: _tensor(_input(field, name), tensor) for name, tensor in message.loss_fn_inputs.items()},
    )


def _input(field: str, name: str) -> str:
    return f'{field}.loss_fn_inputs["{name:.64}"]'  # cut: the name is the client's and may be megabytes


def _tensor(field: str, message: pb.Tensor) -> Shaped[np.ndarray, "n ..."]:
    if message.HasField("sparse_csr"):
        return _densify(field, message)
    values = _array(field, message.dense, message.dtype)
    shape = _shape(field, tuple(message.shape) or values.shape)
    if values.size != math.prod(shape):
        raise ValueError(f"{field}: got {values.size} values, allowed {math.prod(shape)} for shape {shape}")
    return values.reshape(shape)


def _shape(field: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    if len(shape) not in (1, 2) or min(shape) < 1:
        raise ValueError(f"{field}: got shape {shape[:8]}, allowed (N,) or (N, K) with no dimension below 1")
    return shape


def _array(field: str, data: bytes, dtype: int) -> Shaped[np.ndarray, " n"]:
    """A flat buffer as float32 or int64, the two dtypes that the SDK's users see."""
    if dtype not in DTYPES:
        raise ValueError(f"{field}: got dtype {dtype}, allowed FLOAT32, INT64, INT32, BFLOAT16")
    if len(data) % DTYPES[dtype].itemsize:
        raise ValueError(f"{field}: got {len(data)} bytes, allowed a multiple of {DTYPES[dtype].itemsize}")
    values = np.frombuffer(data, DTYPES[dtype])
    if dtype == pb.DTYPE_BFLOAT16:
        return (values.astype(np.uint32) << 16).view(np.float32)  # bfloat16 is the upper half of a float32
    return values.astype(np.int64, copy=False) if values.dtype.kind == "i" else values


def _densify(field: str, message: pb.Tensor) -> Shaped[np.ndarray, "n k"]:
    """CSR: row i has values[crow[i] : crow[i + 1]] in the columns col[crow[i] : crow[i + 1]]."""
    shape = _shape(field, tuple(message.shape))
    if len(shape) != 2:
        raise ValueError(f"{field}: got a sparse tensor of shape {shape}, allowed (N, K)")
    (rows, width), csr = shape, message.sparse_csr
    values = _array(field, csr.values, message.dtype)
    crow = _array(f"{field} crow_indices", csr.crow_indices, pb.DTYPE_INT64)
    col = _array(f"{field} col_indices", csr.col_indices, pb.DTYPE_INT64)
    got = f"{field}: got crow_indices {reprlib.repr(crow[:9].tolist())}, col_indices {reprlib.repr(col[:9].tolist())}"
    if crow.size != rows + 1 or crow[0] != 0 or crow[-1] != values.size or (crow[1:] < crow[:-1]).any():
        raise ValueError(f"{got}, allowed {rows + 1} crow_indices that never fall, from 0 to {values.size} (values)")
    if col.size != values.size or ((col < 0) | (col >= width)).any():
        raise ValueError(f"{got}, allowed {values.size} col_indices (one a value), each 0 to {width - 1}")
    cells = np.repeat(np.arange(rows), np.diff(crow)) * width + col  # [nnz], row-major
    if (cells[1:] <= cells[:-1]).any():
        raise ValueError(f"{got}, allowed col_indices that rise inside each row")
    dense = np.zeros(rows * width, values.dtype)
    dense[cells] = values
    return dense.reshape(rows, width)


def _loss_config(message: pb.ForwardBackwardRequest) -> dict[str, float | str]:
    """The tagged map, or the older one, which holds the same numbers and no strings."""
    config: dict[str, float | str] = {}
    for key, value in message.loss_fn_config_v2.items():
        if (kind := value.WhichOneof("value")) is None:  # what a kind of a later SDK looks like
            raise ValueError(f'loss_fn_config["{key:.64}"]: got neither, allowed a number or a text')
        config[key] = getattr(value, kind)
    return config or dict(message.loss_fn_config)


def validate_forward_backward(
    request: ForwardBackward, required: tuple[str, ...], *, vocab_size: int, max_tokens: int
) -> None:
    """ValueError unless every datum holds the required inputs, one usable number a token."""
    for i, datum in enumerate(request.data):
        field, length = f"data[{i}]", datum.tokens.size
        if not 1 <= length <= max_tokens:
            limit = f"1 to {max_tokens} (--row-len): split it"
            raise ValueError(f"{field}.model_input: got {length} tokens, allowed {limit}")
        _check_tokens(f"{field}.model_input", datum.tokens, vocab_size)
        if missing := set(required) - datum.inputs.keys():
            got = reprlib.repr(sorted(datum.inputs))
            raise ValueError(f"{field}.loss_fn_inputs: got {got}, {request.loss_fn} also needs {sorted(missing)}")
        targets = datum.inputs["target_tokens"].shape
        several = len(targets) == 2 and request.loss_fn == "cross_entropy"  # soft targets: K a position
        if several and targets[1] > MAX_TARGETS:
            name = _input(field, "target_tokens")
            raise ValueError(f"{name}: got {targets[1]} targets a position, allowed {MAX_TARGETS}: keep the likeliest")
        for name, values in sorted(datum.inputs.items(), key=lambda item: item[0] != "target_tokens"):
            wide = several and name in ("target_tokens", "weights")
            _check_input(_input(field, name), name, values, (length, targets[1]) if wide else (length,), vocab_size)


def _check_input(
    field: str, name: str, values: Shaped[np.ndarray, "_ ..."], shape: tuple[int, ...], vocab_size: int
) -> None:
    if values.shape != shape:
        why = "one for each token of model_input; cross_entropy alone takes (N, K), for target_tokens and weights alike"
        raise ValueError(f"{field}: got shape {values.shape}, allowed {shape}: {why}")
    if name == "target_tokens":
        _check_tokens(field, values.reshape(-1), vocab_size)
    elif name not in ("logprobs", "advantages"):  # of these the trainer counts what is not finite, and drops it
        _check_each(field, values.reshape(-1), np.isfinite(values).reshape(-1), "finite numbers")


def _check_tokens(field: str, tokens: Shaped[np.ndarray, " n"], vocab_size: int) -> None:
    if tokens.dtype.kind != "i":
        raise ValueError(f"{field}: got {tokens.dtype}, allowed int64 or int32: tokens are whole numbers")
    _check_each(field, tokens, (tokens >= 0) & (tokens < vocab_size), f"tokens 0 to {vocab_size - 1}")


def _check_each(field: str, values: Shaped[np.ndarray, " n"], ok: Shaped[np.ndarray, " n"], allowed: str) -> None:
    if not ok.all():
        at = ok.argmin()
        raise ValueError(f"{field}: got {values[at]} at position {at}, allowed {allowed}")


# ---- forward_backward: protobuf out ----


def encode_forward_backward(logprobs: list[Float32[np.ndarray, "_ ..."]], metrics: dict[str, float]) -> bytes:
    """Each datum's log-probs in the client's order, and metrics named `name:reduction`, `loss:sum` among them."""
    assert "loss:sum" in metrics, "forward_backward_custom pops it"
    assert all(k.count(":") == 1 and k.split(":")[1] in REDUCTIONS for k in metrics), f"no reduction: {list(metrics)}"
    output = pb.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord", metrics=metrics)
    # A record is rectangular but for its first axis: one record for each run of equal trailing shape.
    for trailing_shape, run in itertools.groupby(logprobs, key=lambda array: array.shape[1:]):
        arrays = list(run)
        record = output.loss_fn_outputs.add(num_datums=len(arrays))
        tensor = record.fields["logprobs"]
        tensor.data = b"".join(array.astype("<f4").tobytes() for array in arrays)
        tensor.offsets = np.cumsum([0, *(array.nbytes for array in arrays)], dtype="<i8").tobytes()  # in bytes
        tensor.dtype = pb.DTYPE_FLOAT32
        tensor.trailing_shape.extend(trailing_shape)
    return output.SerializeToString()


# ---- asample: JSON in ----

SAMPLE_FIELDS: dict[str, tuple[Callable[[Any], bool], str]] = {  # field: (what it accepts, the same in words)
    "sampling_session_id": (bool, "the id that create_sampling_session answered"),
    "seq_id": (lambda n: n is not None and 0 <= n <= INT64_MAX, "0 or more"),
    "base_model": (lambda name: name is None, "null: create_sampling_session takes it"),
    "model_path": (lambda path: path is None, "null: create_sampling_session takes it"),
    "num_samples": (lambda n: 1 <= n <= MAX_SAMPLES, f"1 to {MAX_SAMPLES}"),
    "prompt.chunks": (
        lambda chunks: all(isinstance(chunk, sdk.EncodedTextChunk) for chunk in chunks),
        "encoded_text: images are not supported: text tokens only",
    ),
    "sampling_params.max_tokens": (lambda n: n is None or 1 <= n <= INT32_MAX, "1 or more, or null: all that fit"),
    "sampling_params.temperature": (lambda t: 0 <= t < math.inf, "0 (greedy) or a finite positive number"),
    "sampling_params.top_k": (lambda k: -1 <= k <= INT32_MAX, "-1 or 0 (off), or 1 or more"),
    "sampling_params.top_p": (lambda p: 0 < p <= 1, "more than 0 and at most 1"),
    "topk_prompt_logprobs": (lambda k: 0 <= k <= MAX_TOPK, f"0 (off) to {MAX_TOPK}"),
    "topk_sample_logprobs": (lambda k: 0 <= k <= MAX_TOPK, f"0 (off) to {MAX_TOPK}"),
    "target_prompt_logprobs": (lambda tensor: tensor is None, "null: not supported: forward() scores chosen targets"),
    "prompt_alt_tokens_k": (lambda k: k == 0, "0: alternative tokens are not supported"),
}


def decode_sample(body: bytes) -> SampleRequest:
    """The whole request, every number in its range; stop, seed and top_k reduced to one form each."""
    try:  # forbid: a misspelt sampling parameter must not become a default
        message = sdk.SampleRequest.model_validate_json(body, extra="forbid")
    except pydantic.ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(map(str, first["loc"])) or "body"
        raise ValueError(f"{field:.200}: got {reprlib.repr(first['input'])}: {first['msg']}") from None
    for field, (accepts, allowed) in SAMPLE_FIELDS.items():
        if not accepts(value := operator.attrgetter(field)(message)):
            raise ValueError(f"{field}: got {reprlib.repr(value)}, allowed {allowed}")
    assert message.sampling_session_id is not None and message.seq_id is not None  # the table has seen to it
    prompt = _token_ids("prompt", message.prompt.to_ints())  # renderers send a chunk for each header and content
    last_n = message.prompt_logprobs_last_n
    if last_n is not None and not (message.prompt_logprobs and 1 <= last_n < prompt.size):
        allowed = f"1 to {prompt.size - 1} (all but the first token), with prompt_logprobs true"
        raise ValueError(f"prompt_logprobs_last_n: got {last_n}, allowed {allowed}")
    return SampleRequest(
        sampling_session_id=message.sampling_session_id,
        seq_id=message.seq_id,
        num_samples=message.num_samples,
        prompt=prompt,
        params=_sampling_params(message.sampling_params),
        prompt_logprobs=bool(message.prompt_logprobs),
        prompt_logprobs_last_n=last_n,
        topk_prompt_logprobs=message.topk_prompt_logprobs,
        topk_sample_logprobs=message.topk_sample_logprobs,
    )


def _token_ids(field: str, tokens: list[int]) -> Int32[np.ndarray, " n"]:
    try:
        return np.array(tokens, np.int32)
    except OverflowError:
        raise ValueError(f"{field}: got a token of more than 32 bits, allowed 0 to {INT32_MAX}") from None


def _sampling_params(message: sdk.SamplingParams) -> SamplingParams:
    stop = [message.stop] if isinstance(message.stop, str) else list(message.stop or [])
    if "" in stop:
        raise ValueError(f"sampling_params.stop: got {reprlib.repr(message.stop)}, allowed no empty string")
    tokens = _token_ids("sampling_params.stop", [s for s in stop if isinstance(s, int)])
    return SamplingParams(
        max_tokens=message.max_tokens,
        temperature=float(message.temperature),  # the SDK's own defaults are the integer 1
        top_k=max(message.top_k, 0),
        top_p=float(message.top_p),
        seed=message.seed % INT64_MAX if message.seed is not None else None,  # as the service folds it
        stop_tokens=tuple(tokens.tolist()),
        stop_strings=tuple(s for s in stop if isinstance(s, str)),
        stop_at_eos=message.stop is None or len(stop) > 0,
    )


def validate_sample(request: SampleRequest, *, vocab_size: int, context_tokens: int) -> None:
    """ValueError unless every token is in the vocabulary, and prompt and max_tokens fit into the context together."""
    _check_tokens("prompt", request.prompt, vocab_size)
    _check_tokens("sampling_params.stop", np.array(request.params.stop_tokens, np.int32), vocab_size)
    new = request.params.max_tokens if request.params.max_tokens is not None else 1
    if request.prompt.size < 1 or request.prompt.size + new > context_tokens:
        allowed = f"1 or more, and {context_tokens} in all: shorten the prompt or lower max_tokens"
        raise ValueError(f"prompt: got {request.prompt.size} tokens and max_tokens {new}, allowed {allowed}")


# ---- asample: protobuf out ----


def encode_sample(result: SampleResult) -> bytes:
    """The whole answer. What was not asked for is left out, not sent empty."""
    assert result.sequences and all(0 < s.tokens.size == s.logprobs.size for s in result.sequences), "empty sequence"
    response = pb.SampleResponse(topk_prompt_logprobs=_topk(result.topk_prompt_logprobs))
    for sequence in result.sequences:
        response.sequences.add(
            stop_reason=STOP_REASONS[sequence.stop_reason],
            tokens=sequence.tokens.astype("<i4").tobytes(),
            logprobs=sequence.logprobs.astype("<f4").tobytes(),
            topk_sampled_logprobs=_topk(sequence.topk),
        )
    if result.prompt_logprobs is not None:
        response.prompt_logprobs = result.prompt_logprobs.astype("<f4").tobytes()
    return response.SerializeToString()


def _topk(topk: Topk | None) -> pb.TopkLogprobs | None:
    """Empty cells become token 0 with the SDK's mask value; it shows a row of them as None."""
    if topk is None:
        return None
    (ids, logprobs), empty = topk, np.isnan(topk[1])
    return pb.TopkLogprobs(
        token_ids=np.where(empty, 0, ids).astype("<i4").tobytes(),
        logprobs=np.where(empty, MASK_LOGPROB, logprobs).astype("<f4").tobytes(),
        length=ids.shape[0],
        k=ids.shape[1],
    )


# ---- The two answers of retrieve_future that are not a result: JSON ----


def try_again(request_id: str, queue_state: str = "active") -> dict[str, str]:
    """Still pending. Sent with status 408, at which the SDK asks again at once and in silence."""
    assert queue_state in ("active", "paused_capacity", "paused_rate_limit"), queue_state
    return {"type": "try_again", "request_id": request_id, "queue_state": queue_state}


def failed(message: str, category: Literal["user", "server"]) -> dict[str, str]:
    """Failed for good. Sent with status 200: the SDK raises RequestFailedError and does not retry."""
    return {"error": message, "category": category}
