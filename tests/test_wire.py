"""wire.py against the real SDK: its encoder writes our requests, its decoder reads our answers.

The oracles are the SDK's own conversions where it has them, and plain loops over plain lists where it has not.
Malformed bytes (cut, flipped, random) must raise ValueError and nothing else.
"""

import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tinker import types as sdk
from tinker.lib.chunked_fwdbwd_helpers import REDUCE_MAP, combine_fwd_bwd_output_results
from tinker.lib.public_interfaces.sampling_client import _check_prompt_logprobs_last_n_honored
from tinker.proto import tinker_public_pb2 as pb
from tinker.proto.request_conv import forward_backward_request_to_proto
from tinker.proto.response_conv import deserialize_forward_backward_output, deserialize_sample_response
from tinker.types.try_again_response import TryAgainResponse

import wire
from sampler import SampleResult, Sequence

VOCAB = 100
FLOATS = st.floats(width=32)
TOKENS = st.integers(0, VOCAB - 1)
BF16_ONE_AND_MINUS_TWO = b"\x80\x3f\x00\xc0"


# ---- builders ----


def sdk_body(data: list[sdk.Datum], *, loss_fn: Any = "cross_entropy", config: Any = None, seq_id: int = 1) -> bytes:
    """What TrainingClient.forward_backward posts."""
    inner = sdk.ForwardBackwardInput(data=data, loss_fn=loss_fn, loss_fn_config=config)
    request = sdk.ForwardBackwardRequest(forward_backward_input=inner, model_id="s:train:0", seq_id=seq_id)
    return forward_backward_request_to_proto(request).SerializeToString()


def sdk_datum(tokens: list[int], **inputs: Any) -> sdk.Datum:
    return sdk.Datum(model_input=sdk.ModelInput.from_ints(tokens), loss_fn_inputs=inputs)


def good_datum(length: int = 4) -> sdk.Datum:
    return sdk_datum(list(range(length)), target_tokens=list(range(1, length + 1)), weights=[1.0] * length)


def proto_body(**tensor: Any) -> bytes:
    """One datum of 4 tokens whose input "weights" is the given Tensor: for what the SDK would never write."""
    message = pb.ForwardBackwardRequest(model_id="m", seq_id=1, loss_fn="cross_entropy")
    datum = message.data.add()
    datum.model_input.add().encoded_text.tokens = np.arange(4, dtype=np.int32).tobytes()
    datum.loss_fn_inputs["weights"].CopyFrom(pb.Tensor(**tensor))
    return message.SerializeToString()


def csr(values: list[float], crow: list[int], col: list[int]) -> pb.SparseCsr:
    return pb.SparseCsr(
        values=np.array(values, np.float32).tobytes(),
        crow_indices=np.array(crow, np.int64).tobytes(),
        col_indices=np.array(col, np.int64).tobytes(),
    )


def sample_json(params: dict[str, Any] | None = None, **fields: Any) -> bytes:
    request = {
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]},
        "sampling_params": {"max_tokens": 4, **(params or {})},
        "sampling_session_id": "s:sample:0",
        "seq_id": 0,
        **fields,
    }
    return json.dumps(request).encode()


def f32(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def i32(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def one_sequence(**fields: Any) -> SampleResult:
    return SampleResult([Sequence(i32(5), f32(-0.5), "stop")], **fields)


def validate(data: list[sdk.Datum], *, required: tuple[str, ...] = ("target_tokens", "weights")) -> None:
    request = wire.decode_forward_backward(sdk_body(data))
    wire.validate_forward_backward(request, required, vocab_size=VOCAB, max_tokens=8)


# ---- forward_backward in ----


def test_the_captured_request_of_the_contract_decodes_to_its_numbers() -> None:
    body = sdk_body([sdk_datum([1, 2, 3, 4], weights=[0.0, 1.0, 1.0, 1.0], target_tokens=[2, 3, 4, 5])])
    assert wire.decode_envelope(body) == ("s:train:0", 1)
    request = wire.decode_forward_backward(body)
    assert (request.model_id, request.seq_id, request.loss_fn) == ("s:train:0", 1, "cross_entropy")
    assert (request.loss_config, request.forward_only) == ({}, False)
    [datum] = request.data
    assert datum.tokens.dtype == np.int32 and datum.tokens.tolist() == [1, 2, 3, 4]
    assert datum.inputs["target_tokens"].dtype == np.int64 and datum.inputs["target_tokens"].tolist() == [2, 3, 4, 5]
    assert datum.inputs["weights"].dtype == np.float32 and datum.inputs["weights"].tolist() == [0, 1, 1, 1]


@given(st.lists(st.lists(st.tuples(TOKENS, TOKENS, FLOATS, FLOATS), min_size=1, max_size=9), min_size=1, max_size=5))
def test_what_the_sdk_encodes_comes_back_bit_for_bit(sequences: list[list[tuple[int, int, float, float]]]) -> None:
    columns = [list(zip(*sequence, strict=True)) for sequence in sequences]
    data = [sdk_datum(list(t), target_tokens=list(y), logprobs=list(q), advantages=list(a)) for t, y, q, a in columns]
    decoded = wire.decode_forward_backward(sdk_body(data, loss_fn="importance_sampling")).data
    assert len(decoded) == len(data)
    for datum, (tokens, targets, logprobs, advantages) in zip(decoded, columns, strict=True):
        assert datum.tokens.tolist() == list(tokens)
        assert datum.inputs["target_tokens"].tolist() == list(targets)
        assert datum.inputs["logprobs"].tobytes() == f32(*logprobs).tobytes()  # bytes, so that NaN equals itself
        assert datum.inputs["advantages"].tobytes() == f32(*advantages).tobytes()


def test_chunks_of_a_model_input_are_joined() -> None:
    chunks = [sdk.EncodedTextChunk(tokens=part) for part in ([1, 2], [], [3])]
    datum = sdk.Datum(model_input=sdk.ModelInput(chunks=list(chunks)), loss_fn_inputs={})
    assert wire.decode_forward_backward(sdk_body([datum])).data[0].tokens.tolist() == [1, 2, 3]


def test_images_are_refused_by_the_index_of_their_datum() -> None:
    image = sdk.Datum(model_input=sdk.ModelInput(chunks=[sdk.ImageChunk(data=b"x", format="png")]), loss_fn_inputs={})
    with pytest.raises(ValueError, match=r"data\[1\]\.model_input: got chunk image: .*text tokens only"):
        wire.decode_forward_backward(sdk_body([good_datum(), image]))


@given(st.data(), st.integers(1, 6), st.integers(1, 6))
def test_a_csr_tensor_is_the_dense_one_that_plain_loops_build(data: st.DataObject, rows: int, width: int) -> None:
    row = st.lists(st.integers(0, width - 1), unique=True, max_size=width).map(sorted)
    columns = data.draw(st.lists(row, min_size=rows, max_size=rows))
    crow, col = [0], [c for row in columns for c in row]
    for row_columns in columns:
        crow.append(crow[-1] + len(row_columns))
    values = list(range(1, len(col) + 1))
    expected = [[0] * width for _ in range(rows)]
    for r in range(rows):
        for k in range(crow[r], crow[r + 1]):
            expected[r][col[k]] = values[k]
    tensor = sdk.TensorData(values, "int64", [rows, width], crow, col)
    [datum] = wire.decode_forward_backward(sdk_body([sdk_datum([0] * rows, target_tokens=tensor)])).data
    assert datum.inputs["target_tokens"].dtype == np.int64
    assert datum.inputs["target_tokens"].tolist() == expected


def test_dense_two_dimensional_tensors_keep_their_shape() -> None:
    [datum] = wire.decode_forward_backward(sdk_body([sdk_datum([0, 1], weights=np.arange(6.0).reshape(2, 3))])).data
    assert datum.inputs["weights"].tolist() == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize(
    ("dtype", "dense", "expected", "numpy_dtype"),
    [
        (pb.DTYPE_BFLOAT16, BF16_ONE_AND_MINUS_TWO, [1.0, -2.0], np.float32),
        (pb.DTYPE_INT32, b"\x07\x00\x00\x00\xff\xff\xff\xff", [7, -1], np.int64),
        (pb.DTYPE_INT64, b"\x07" + b"\x00" * 7, [7], np.int64),
        (pb.DTYPE_FLOAT32, b"\x00\x00\x80\x3f", [1.0], np.float32),
    ],
)
def test_every_wire_dtype_widens_to_float32_or_int64(
    dtype: Any, dense: bytes, expected: list, numpy_dtype: Any
) -> None:
    [datum] = wire.decode_forward_backward(proto_body(dense=dense, dtype=dtype)).data  # no shape: one dimension
    assert datum.inputs["weights"].dtype == numpy_dtype
    assert datum.inputs["weights"].tolist() == expected


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        ({"dense": b"12345", "dtype": pb.DTYPE_FLOAT32}, "got 5 bytes, allowed a multiple of 4"),
        ({"dense": b"1234", "dtype": pb.DTYPE_FLOAT32, "shape": [2]}, "got 1 values, allowed 2 for shape"),
        ({"dense": b"1234"}, "got dtype 0, allowed FLOAT32"),
        ({"dense": b"1234", "dtype": 9}, "got dtype 9, allowed FLOAT32"),
        ({"dense": b"", "dtype": pb.DTYPE_FLOAT32, "shape": [0, 2**62]}, "no dimension below 1"),
        ({"dense": b"1234", "dtype": pb.DTYPE_FLOAT32, "shape": [-1]}, "no dimension below 1"),
        ({"dense": b"1234", "dtype": pb.DTYPE_FLOAT32, "shape": [1, 1, 1]}, "allowed (N,) or (N, K)"),
        ({"dtype": pb.DTYPE_FLOAT32, "shape": [4]}, "got 0 values, allowed 4"),
        ({"sparse_csr": csr([], [0, 0], []), "dtype": pb.DTYPE_FLOAT32, "shape": [1]}, "allowed (N, K)"),
        ({"sparse_csr": csr([1], [0, 1], [0]), "dtype": pb.DTYPE_FLOAT32, "shape": [2, 2]}, "allowed 3 crow_indices"),
        ({"sparse_csr": csr([1], [], [0]), "dtype": pb.DTYPE_FLOAT32, "shape": [2, 2]}, "allowed 3 crow_indices"),
        ({"sparse_csr": csr([1], [0, 2, 1], [0]), "dtype": pb.DTYPE_FLOAT32, "shape": [2, 2]}, "never fall"),
        ({"sparse_csr": csr([1], [0, 1, 2], [0]), "dtype": pb.DTYPE_FLOAT32, "shape": [2, 2]}, "from 0 to 1 (values)"),
        ({"sparse_csr": csr([1], [0, 1, 1], [2]), "dtype": pb.DTYPE_FLOAT32, "shape": [2, 2]}, "each 0 to 1"),
        ({"sparse_csr": csr([1], [0, 1, 1], [-1]), "dtype": pb.DTYPE_FLOAT32, "shape": [2, 2]}, "each 0 to 1"),
        ({"sparse_csr": csr([1], [0, 1, 1], []), "dtype": pb.DTYPE_FLOAT32, "shape": [2, 2]}, "allowed 1 col_indices"),
        ({"sparse_csr": csr([1, 2], [0, 2, 2], [1, 1]), "dtype": pb.DTYPE_FLOAT32, "shape": [2, 2]}, "rise inside"),
    ],
)
def test_a_tensor_that_contradicts_itself_is_named(tensor: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as error:
        wire.decode_forward_backward(proto_body(**tensor))
    assert str(error.value).startswith('data[0].loss_fn_inputs["weights"]')
    assert message in str(error.value)


@pytest.mark.parametrize("shape", [[1, 2**40], [1, 2**62], [2**62, 2**62], [-(2**62), 2]])
def test_a_small_body_cannot_ask_for_a_large_tensor(shape: list[int]) -> None:
    body = proto_body(sparse_csr=csr([], [0, 0], []), dtype=pb.DTYPE_FLOAT32, shape=shape)
    assert len(body) < 200
    with pytest.raises(ValueError, match=r"got sparse tensors of \d+ cells, allowed 67108864: send fewer datums"):
        wire.decode_forward_backward(body)


def test_the_sparse_bound_is_on_the_request_not_on_each_tensor() -> None:
    message = pb.ForwardBackwardRequest.FromString(
        proto_body(sparse_csr=csr([], [0, 0], []), dtype=pb.DTYPE_FLOAT32, shape=[1, 2**25])
    )
    message.data.extend([message.data[0], message.data[0]])
    with pytest.raises(ValueError, match="got sparse tensors of 100663296 cells"):
        wire.decode_forward_backward(message.SerializeToString())


def test_the_tagged_loss_config_wins_and_keeps_strings() -> None:
    body = sdk_body([good_datum()], loss_fn="ppo", config={"clip_low_threshold": 0.9, "x": "text"})
    assert wire.decode_forward_backward(body).loss_config == {"clip_low_threshold": 0.9, "x": "text"}
    message = pb.ForwardBackwardRequest.FromString(body)
    message.loss_fn_config["clip_low_threshold"] = 0.1
    assert wire.decode_forward_backward(message.SerializeToString()).loss_config["clip_low_threshold"] == 0.9
    message.ClearField("loss_fn_config_v2")
    assert wire.decode_forward_backward(message.SerializeToString()).loss_config == {"clip_low_threshold": 0.1}
    message.loss_fn_config_v2["beta"].SetInParent()
    with pytest.raises(ValueError, match=r'loss_fn_config\["beta"\]: got neither, allowed a number or a text'):
        wire.decode_forward_backward(message.SerializeToString())


def test_forward_only_and_provenance_spans_pass_through_the_decoder() -> None:
    message = pb.ForwardBackwardRequest.FromString(sdk_body([good_datum()]))
    message.forward_only = True
    message.data[0].model_input_spans.add().prompt_tokens.length = 4
    assert wire.decode_forward_backward(message.SerializeToString()).forward_only


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "model_id: got an empty string"),
        (b"\x0a\x01m", "seq_id: got 0, allowed 1 or more"),
        (b"\x0a\x02\xff\xfe", "body: got 4 bytes, allowed a ForwardBackwardRequest"),
        (b'{"model_id": "m"}', "body: got 17 bytes, allowed a ForwardBackwardRequest"),
    ],
)
def test_an_envelope_that_places_no_request_is_a_value_error(body: bytes, message: str) -> None:
    for decode in (wire.decode_envelope, wire.decode_forward_backward):
        with pytest.raises(ValueError, match=message):
            decode(body)


def test_a_request_without_datums_is_refused_after_its_envelope() -> None:
    body = pb.ForwardBackwardRequest(model_id="m", seq_id=1).SerializeToString()
    assert wire.decode_envelope(body) == ("m", 1)
    with pytest.raises(ValueError, match="data: got 0 datums, allowed 1 or more"):
        wire.decode_forward_backward(body)


def only_value_errors(body: bytes) -> None:
    for decode in (wire.decode_envelope, wire.decode_forward_backward, wire.decode_sample):
        try:
            decoded = decode(body)
            if isinstance(decoded, wire.ForwardBackward):
                wire.validate_forward_backward(decoded, ("target_tokens",), vocab_size=VOCAB, max_tokens=8)
            if isinstance(decoded, wire.SampleRequest):
                wire.validate_sample(decoded, vocab_size=VOCAB, context_tokens=8)
        except ValueError as error:
            assert 0 < len(str(error)) < 1000


SPARSE = sdk.TensorData([7, 8], "int64", [4, 8], [0, 1, 1, 2, 2], [3, 5])
VALID_BODIES = [
    sdk_body([good_datum(), sdk_datum([0, 1, 2, 3], target_tokens=SPARSE)], loss_fn="ppo", config={"a": 1.0, "b": "c"}),
    sample_json({"stop": ["a"], "seed": 1, "top_p": 0.5}, prompt_logprobs=True, prompt_logprobs_last_n=2),
]


@pytest.mark.parametrize("body", VALID_BODIES, ids=["protobuf", "json"])
def test_every_truncation_of_a_valid_body_decodes_or_is_a_value_error(body: bytes) -> None:
    for end in range(len(body)):
        only_value_errors(body[:end])


@given(st.sampled_from(VALID_BODIES), st.data())
def test_flipped_bytes_decode_or_are_a_value_error(body: bytes, data: st.DataObject) -> None:
    damaged = bytearray(body)
    for at in data.draw(st.lists(st.integers(0, len(body) - 1), max_size=8)):
        damaged[at] = data.draw(st.integers(0, 255))
    only_value_errors(bytes(damaged))


@given(st.binary(max_size=200))
def test_random_bytes_are_a_value_error(body: bytes) -> None:
    only_value_errors(body)


# ---- forward_backward: do the numbers make sense ----


def test_a_sound_request_passes_with_odd_but_legal_numbers() -> None:
    negative = sdk_datum([0, 99], target_tokens=[99, 0], weights=[-1.0, 0.0])  # forward_backward_custom sends these
    integer = sdk_datum([0], target_tokens=[1], weights=np.array([1]))
    counted = dict(logprobs=[math.nan, -math.inf], advantages=[math.inf, math.nan])  # by the trainer, and dropped
    unread = sdk_datum([0, 1], target_tokens=[1, 2], weights=[1.0, 1.0], **counted)
    soft = sdk_datum(
        [0, 1], target_tokens=np.array([[1, 2], [3, 0]]), weights=np.array([[0.5, 0.5], [1, 0]], np.float32)
    )
    validate([good_datum(8), negative, integer, unread, soft])


@pytest.mark.parametrize(
    ("datum", "message"),
    [
        (sdk_datum([]), "data[1].model_input: got 0 tokens, allowed 1 to 8"),
        (good_datum(9), "data[1].model_input: got 9 tokens, allowed 1 to 8 (--row-len): split it"),
        (sdk_datum([3, 100]), "data[1].model_input: got 100 at position 1, allowed tokens 0 to 99"),
        (sdk_datum([-1]), "data[1].model_input: got -1 at position 0, allowed tokens 0 to 99"),
        (
            sdk_datum([0], weights=[1.0]),
            "data[1].loss_fn_inputs: got ['weights'], cross_entropy also needs ['target_tokens']",
        ),
        (
            sdk_datum([0, 1], target_tokens=[1, -100], weights=[1.0, 0.0]),
            'data[1].loss_fn_inputs["target_tokens"]: got -100 at position 1, allowed tokens 0 to 99',
        ),
        (
            sdk_datum([0, 1], target_tokens=[1, 2**40], weights=[1.0, 0.0]),
            f"got {2**40} at position 1, allowed tokens 0 to 99",
        ),
        (
            sdk_datum([0], target_tokens=np.array([1.0]), weights=[1.0]),
            'data[1].loss_fn_inputs["target_tokens"]: got float32, allowed int64',
        ),
        (
            sdk_datum([0, 1], target_tokens=[1], weights=[1.0, 1.0]),
            'data[1].loss_fn_inputs["target_tokens"]: got shape (1,), allowed (2,): one for each token',
        ),
        (
            sdk_datum([0, 1], target_tokens=[1, 2], weights=[1.0, math.nan]),
            'data[1].loss_fn_inputs["weights"]: got nan at position 1, allowed finite numbers',
        ),
        (
            sdk_datum([0, 1], target_tokens=np.array([[1, 2], [3, 4]]), weights=[1.0, 1.0]),
            'data[1].loss_fn_inputs["weights"]: got shape (2,), allowed (2, 2): one for each token',
        ),
        (
            sdk_datum([0], target_tokens=np.array([[1, 2], [3, 4]]), weights=np.ones((2, 2), np.float32)),
            'data[1].loss_fn_inputs["target_tokens"]: got shape (2, 2), allowed (1, 2): one for each token',
        ),
        (
            sdk_datum([0], target_tokens=np.array([[1, 100]]), weights=np.ones((1, 2), np.float32)),
            'data[1].loss_fn_inputs["target_tokens"]: got 100 at position 1, allowed tokens 0 to 99',
        ),
    ],
)
def test_a_bad_datum_is_named_with_its_field_value_and_limit(datum: sdk.Datum, message: str) -> None:
    with pytest.raises(ValueError) as error:
        validate([good_datum(), datum])
    assert message in str(error.value)


# ---- forward_backward out ----


ARRAYS = st.lists(
    st.tuples(st.integers(1, 5), st.sampled_from([(), (1,), (3,)])).map(
        lambda shape: np.arange(math.prod((shape[0], *shape[1])), dtype=np.float32).reshape(shape[0], *shape[1])
    ),
    min_size=1,
    max_size=6,
)


@given(ARRAYS)
def test_the_sdk_reads_every_datum_back_in_order_and_shape(arrays: list[np.ndarray]) -> None:
    output = deserialize_forward_backward_output(wire.encode_forward_backward(arrays, {"loss:sum": 1.5}))
    assert output.metrics == {"loss:sum": 1.5}
    assert output.loss_fn_output_type == "ArrayRecord"
    assert len(output.loss_fn_outputs) == len(arrays)
    for fields, array in zip(output.loss_fn_outputs, arrays, strict=True):
        np.testing.assert_array_equal(fields["logprobs"].to_numpy(), array, strict=True)


def test_equal_shapes_share_one_record() -> None:
    arrays = [f32(1, 2), f32(3), f32(4).reshape(1, 1), f32(5)]
    output = pb.ForwardBackwardOutput.FromString(wire.encode_forward_backward(arrays, {"loss:sum": 0.0}))
    assert [record.num_datums for record in output.loss_fn_outputs] == [2, 1, 1]


def test_the_sdk_combines_two_chunks_by_the_reduction_in_the_name() -> None:
    three = wire.encode_forward_backward([f32(0)] * 3, {"loss:sum": 2.0, "kl:mean": 1.0, "gap:max": 3.0})
    one = wire.encode_forward_backward([f32(0)], {"loss:sum": 5.0, "kl:mean": 5.0, "gap:max": 1.0})
    combined = combine_fwd_bwd_output_results([deserialize_forward_backward_output(body) for body in (three, one)])
    assert combined.metrics == {"loss:sum": 7.0, "kl:mean": 2.0, "gap:max": 3.0}  # means weigh by datums: (3 + 5) / 4
    assert len(combined.loss_fn_outputs) == 4


def test_reductions_are_the_ones_the_sdk_knows() -> None:
    assert set(REDUCE_MAP) == wire.REDUCTIONS


@pytest.mark.parametrize("metrics", [{}, {"loss:sum": 0.0, "kl": 1.0}, {"loss:sum": 0.0, "a:b:sum": 1.0}])
def test_metrics_the_sdk_cannot_combine_are_our_bug(metrics: dict[str, float]) -> None:
    with pytest.raises(AssertionError):
        wire.encode_forward_backward([f32(0)], metrics)


# ---- asample in ----


@given(
    prompt=st.lists(st.lists(TOKENS, min_size=1, max_size=4), min_size=1, max_size=4),
    temperature=st.floats(0, 10),
    top_k=st.integers(-1, 50),
    top_p=st.floats(0.01, 1),
    seed=st.none() | st.integers(),
    stop=st.none() | st.text(min_size=1) | st.lists(st.text(min_size=1)) | st.lists(TOKENS),
    seq_id=st.integers(0, 2**63 - 1),
)
def test_what_the_sdk_posts_to_asample_decodes(
    prompt: list[list[int]], temperature: float, top_k: int, top_p: float, seed: int | None, stop: Any, seq_id: int
) -> None:
    request = sdk.SampleRequest(
        sampling_session_id="s:sample:0",
        seq_id=seq_id,
        num_samples=2,
        prompt=sdk.ModelInput(chunks=[sdk.EncodedTextChunk(tokens=chunk) for chunk in prompt]),
        sampling_params=sdk.SamplingParams(
            max_tokens=7, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed, stop=stop
        ),
        prompt_logprobs=True,
        topk_prompt_logprobs=2,
        topk_sample_logprobs=3,
        record_stability_info=True,
    )
    decoded = wire.decode_sample(json.dumps(request.model_dump(mode="json", exclude_none=True)).encode())
    assert (decoded.sampling_session_id, decoded.seq_id, decoded.num_samples) == ("s:sample:0", seq_id, 2)
    assert decoded.prompt.tolist() == [token for chunk in prompt for token in chunk]
    assert decoded.params.max_tokens == 7
    assert (decoded.params.temperature, decoded.params.top_p) == (temperature, top_p)
    assert decoded.params.top_k == max(top_k, 0)
    assert (decoded.params.seed is None) == (seed is None)
    assert decoded.params.seed is None or 0 <= decoded.params.seed < 2**63 - 1
    stops = [stop] if isinstance(stop, str) else stop or []
    assert [*decoded.params.stop_tokens, *decoded.params.stop_strings] == stops
    assert decoded.params.stop_at_eos == (stop != [])
    assert (decoded.prompt_logprobs, decoded.prompt_logprobs_last_n) == (True, None)
    assert (decoded.topk_prompt_logprobs, decoded.topk_sample_logprobs) == (2, 3)


def test_only_an_explicit_empty_stop_list_ignores_the_end_of_sequence() -> None:
    def params(**given: Any) -> wire.SamplingParams:
        return wire.decode_sample(sample_json(given)).params

    assert params() == params(stop=None)
    assert params().stop_at_eos and params(stop=[9]).stop_at_eos and params(stop="a").stop_at_eos
    assert not params(stop=[]).stop_at_eos
    assert params(stop=[9, 8]).stop_tokens == (9, 8) and params(stop=["a", "b"]).stop_strings == ("a", "b")


def test_a_null_max_tokens_and_an_off_top_k_have_one_form() -> None:
    params = wire.decode_sample(sample_json({"max_tokens": None, "top_k": -1})).params
    assert (params.max_tokens, params.top_k) == (None, 0)
    assert wire.decode_sample(sample_json({"top_k": 0})).params.top_k == 0


@pytest.mark.parametrize(
    ("params", "fields", "message"),
    [
        ({"max_tokens": 0}, {}, "sampling_params.max_tokens: got 0, allowed 1 or more"),
        ({"temperature": -0.1}, {}, "sampling_params.temperature: got -0.1, allowed 0 (greedy) or a finite"),
        ({"temperature": math.nan}, {}, "sampling_params.temperature: got nan"),
        ({"temperature": math.inf}, {}, "sampling_params.temperature: got inf"),
        ({"top_p": 0}, {}, "sampling_params.top_p: got 0.0, allowed more than 0 and at most 1"),
        ({"top_p": 1.1}, {}, "sampling_params.top_p: got 1.1"),
        ({"top_k": -2}, {}, "sampling_params.top_k: got -2, allowed -1 or 0 (off)"),
        ({"stop": ""}, {}, "sampling_params.stop: got '', allowed no empty string"),
        ({"stop": ["a", ""]}, {}, "sampling_params.stop: got ['a', ''], allowed no empty string"),
        ({"stop": [2**31]}, {}, "sampling_params.stop: got a token of more than 32 bits"),
        ({"temprature": 1}, {}, "sampling_params.temprature: got 1: Extra inputs are not permitted"),
        ({"seed": "x"}, {}, "sampling_params.seed: got 'x': Input should be a valid integer"),
        ({}, {"num_samples": 0}, "num_samples: got 0, allowed 1 to 1024"),
        ({}, {"num_samples": 1025}, "num_samples: got 1025, allowed 1 to 1024"),
        ({}, {"topk_prompt_logprobs": 33}, "topk_prompt_logprobs: got 33, allowed 0 (off) to 32"),
        ({}, {"topk_sample_logprobs": -1}, "topk_sample_logprobs: got -1, allowed 0 (off) to 32"),
        ({}, {"prompt_alt_tokens_k": 1}, "prompt_alt_tokens_k: got 1, allowed 0"),
        ({}, {"target_prompt_logprobs": {"data": [1], "dtype": "int64"}}, "target_prompt_logprobs: got TensorData"),
        ({}, {"prompt_logprobs_last_n": 1}, "prompt_logprobs_last_n: got 1, allowed 1 to 2"),
        ({}, {"prompt_logprobs_last_n": 3, "prompt_logprobs": True}, "prompt_logprobs_last_n: got 3, allowed 1 to 2"),
        ({}, {"sampling_session_id": None}, "sampling_session_id: got None, allowed the id"),
        ({}, {"seq_id": None}, "seq_id: got None, allowed 0 or more"),
        ({}, {"seq_id": 2**63}, "seq_id: got 9223372036854775808, allowed 0 or more"),
        ({}, {"base_model": "m"}, "base_model: got 'm', allowed null"),
        ({}, {"model_path": "tinker://m/weights/a"}, "model_path: got 'tinker://m/weights/a', allowed null"),
        ({}, {"prompt": {"chunks": [{"tokens": [2**31], "type": "encoded_text"}]}}, "prompt: got a token of more than"),
        (
            {},
            {"prompt": {"chunks": [{"type": "image", "data": "eA==", "format": "png"}]}},
            "images are not supported: text tokens only",
        ),
    ],
)
def test_a_sample_request_out_of_range_is_named_with_its_limit(params: Any, fields: Any, message: str) -> None:
    with pytest.raises(ValueError) as error:
        wire.decode_sample(sample_json(params, **fields))
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("params", "fields", "message"),
    [
        ({}, {"prompt": {"chunks": []}}, "prompt: got 0 tokens and max_tokens 4, allowed 1 or more, and 8 in all"),
        ({"max_tokens": 6}, {}, "prompt: got 3 tokens and max_tokens 6, allowed 1 or more, and 8 in all: shorten"),
        ({"stop": [100]}, {}, "sampling_params.stop: got 100 at position 0, allowed tokens 0 to 99"),
        (
            {},
            {"prompt": {"chunks": [{"tokens": [1, -1], "type": "encoded_text"}]}},
            "prompt: got -1 at position 1",
        ),
    ],
)
def test_a_sample_request_must_fit_the_model(params: Any, fields: Any, message: str) -> None:
    with pytest.raises(ValueError) as error:
        wire.validate_sample(wire.decode_sample(sample_json(params, **fields)), vocab_size=VOCAB, context_tokens=8)
    assert message in str(error.value)


def test_a_prompt_that_fills_the_context_exactly_is_fine() -> None:
    for params in ({"max_tokens": 5}, {"max_tokens": None}):
        wire.validate_sample(wire.decode_sample(sample_json(params)), vocab_size=VOCAB, context_tokens=8)


# ---- asample out ----


@given(st.lists(st.tuples(st.lists(TOKENS, min_size=1, max_size=5), st.sampled_from(["stop", "length"])), min_size=1))
def test_the_sdk_reads_the_sequences_back(sequences: list[tuple[list[int], Any]]) -> None:
    result = SampleResult([Sequence(i32(*tokens), -f32(*tokens) / 7, reason) for tokens, reason in sequences])
    response = deserialize_sample_response(wire.encode_sample(result))
    assert [(s.tokens, s.stop_reason) for s in response.sequences] == sequences
    for sequence, (tokens, _) in zip(response.sequences, sequences, strict=True):
        assert sequence.logprobs == (-f32(*tokens) / 7).tolist()
        assert sequence.topk_logprobs is None
    assert response.prompt_logprobs is None and response.topk_prompt_logprobs is None


def test_a_prompt_position_without_a_logprob_reads_as_none() -> None:
    result = one_sequence(prompt_logprobs=f32(math.nan, math.nan, -0.5))
    response = deserialize_sample_response(wire.encode_sample(result))
    assert response.prompt_logprobs == [None, None, -0.5]
    _check_prompt_logprobs_last_n_honored(response, 1)  # raises when a position before the last 1 has a value


def test_topk_rows_and_cells_that_are_nan_read_as_nothing() -> None:
    logprobs = np.array([[math.nan, math.nan], [-0.5, -1.5], [-0.25, math.nan]], np.float32)
    ids = np.array([[9, 9], [4, 5], [6, 9]], np.int32)
    response = deserialize_sample_response(wire.encode_sample(one_sequence(topk_prompt_logprobs=(ids, logprobs))))
    assert response.topk_prompt_logprobs == [None, [(4, -0.5), (5, -1.5)], [(6, -0.25)]]
    assert response.topk_prompt_logprobs_np is not None
    assert response.topk_prompt_logprobs_np.token_ids[0].tolist() == [0, 0]
    assert response.topk_prompt_logprobs_np.logprobs[0].tolist() == [-99999.0, -99999.0]


def test_topk_of_sampled_tokens_has_a_row_a_token() -> None:
    topk = np.array([[1, 2], [3, 4]], np.int32), np.array([[-1, -2], [-3, -4]], np.float32)
    result = SampleResult([Sequence(i32(1, 3), f32(-1, -3), "length", topk)])
    [sequence] = deserialize_sample_response(wire.encode_sample(result)).sequences
    assert sequence.topk_logprobs == [[(1, -1.0), (2, -2.0)], [(3, -3.0), (4, -4.0)]]


def test_an_empty_sequence_is_our_bug() -> None:
    with pytest.raises(AssertionError, match="empty sequence"):
        wire.encode_sample(SampleResult([Sequence(i32(), f32(), "stop")]))


# ---- the answers that are not a result ----


def test_the_sdk_reads_try_again_and_failed() -> None:
    assert TryAgainResponse.model_validate(wire.try_again("r1")).queue_state == "active"
    assert TryAgainResponse.model_validate(wire.try_again("r1", "paused_capacity")).request_id == "r1"
    response = sdk.RequestFailedResponse.model_validate(wire.failed("data[0]: too long", "user"))
    assert (response.error, response.category) == ("data[0]: too long", sdk.RequestErrorCategory.User)
