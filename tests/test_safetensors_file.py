"""The header reader (case 29): each way a file can be bad is a CheckpointError that names the file and the tensor."""

import json
import struct

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lily.errors import CheckpointError
from lily.safetensors_file import INDEX_NAME, MAX_HEADER_BYTES, open_folder, read_file
from tests.checkpoint_tools import MODEL_DIR, safetensors_bytes

GOOD = {"a": ("F32", (2, 3), bytes(24)), "b": ("BF16", (4,), bytes(8)), "none": ("U8", (0, 7), b"")}


def packed(header, data=b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def tensor(dtype="U8", shape=(4,), offsets=(0, 4), **more):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets), **more}


# name, bytes of the file, what the message must say
FAULTS = [
    ("empty file", b"", "0 bytes"),
    ("seven bytes", bytes(7), "7 bytes"),
    ("header longer than the file", struct.pack("<Q", 100) + b"{}", "only 2 follow"),
    ("header over the limit", struct.pack("<Q", MAX_HEADER_BYTES + 1) + b"{}", "over the limit"),
    ("header length of all ones", b"\xff" * 8 + b"{}", "over the limit"),
    ("empty header", struct.pack("<Q", 0), "begin with"),
    ("header is a list", packed(b"[]"), "begin with"),
    ("leading space", packed(b" {}"), "begin with"),
    ("bad JSON", packed(b'{"a":'), "JSON"),
    ("two objects", packed(b"{}{}"), "JSON"),
    ("not UTF-8", packed(b'{"\xff": 1}'), "JSON"),
    ("nested too deep", packed(b'{"a":' * 60000), "JSON"),
    ("a number of 9,999 digits", packed(b'{"a":' + b"1" * 9999 + b"}"), ""),
    ("duplicate tensor", packed(b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}}', bytes(2)), "'a' twice"),
    ("duplicate field", packed(b'{"a":{"dtype":"U8","dtype":"U8","shape":[1],"data_offsets":[0,1]}}', bytes(1)), "'dtype' twice"),
    ("metadata is not text", packed({"__metadata__": {"n": 1}}), "__metadata__"),
    ("tensor is no object", packed({"a": 3}), "tensor a"),
    ("field missing", packed({"a": {"dtype": "U8", "shape": [1]}}), "tensor a"),
    ("field too many", packed({"a": tensor(extra=1)}, bytes(4)), "tensor a"),
    ("unknown dtype", packed({"a": tensor("Q4")}, bytes(4)), "tensor a has the unknown dtype 'Q4'"),
    ("dtype is a list", packed({"a": tensor(["U8"])}, bytes(4)), "tensor a"),
    ("negative dimension", packed({"a": tensor(shape=(-4,))}, bytes(4)), "tensor a"),
    ("fractional dimension", packed({"a": tensor(shape=(4.0,))}, bytes(4)), "tensor a"),
    ("boolean dimension", packed({"a": tensor(shape=(True,), offsets=(0, 1))}, bytes(1)), "tensor a"),
    ("shape is no list", packed({"a": {"dtype": "U8", "shape": 4, "data_offsets": [0, 4]}}, bytes(4)), "tensor a"),
    ("three offsets", packed({"a": tensor(offsets=(0, 4, 8))}, bytes(4)), "tensor a"),
    ("negative offset", packed({"a": tensor(offsets=(-4, 0))}, bytes(4)), "tensor a"),
    ("offset past the end", packed({"a": tensor(offsets=(0, 4))}, bytes(3)), "tensor a ends at byte 4"),
    ("end before begin", packed({"a": tensor(offsets=(4, 0))}, bytes(4)), "tensor a begins at byte 4"),
    ("size too small", packed({"a": tensor("F32", (2,), (0, 4))}, bytes(4)), "tensor a has 4 bytes"),
    ("size too large", packed({"a": tensor("U8", (2,), (0, 4))}, bytes(4)), "tensor a has 4 bytes"),
    ("overflowing shape", packed({"a": tensor("U8", (2**62, 2**62, 4), (0, 0))}), "tensor a"),
    ("overlap", packed({"a": tensor(), "b": tensor(offsets=(3, 7))}, bytes(7)), "tensor b overlaps"),
    ("same range twice", packed({"a": tensor(), "b": tensor()}, bytes(4)), "tensor b overlaps"),
    ("hole", packed({"a": tensor(), "b": tensor(offsets=(5, 9))}, bytes(9)), "tensor b leaves a hole of 1"),
    ("hole at the start", packed({"a": tensor(offsets=(1, 5))}, bytes(5)), "tensor a leaves a hole of 1"),
    ("data after the last tensor", packed({"a": tensor()}, bytes(6)), "2 bytes follow the last tensor (the last is a)"),
    ("truncated data", safetensors_bytes(GOOD)[:-1], "tensor b ends at byte 32"),
    ("truncated header", safetensors_bytes(GOOD)[:40], "follow in the file"),
]


@pytest.mark.parametrize("content, says", [fault[1:] for fault in FAULTS], ids=[fault[0] for fault in FAULTS])
def test_case_29_a_bad_file_is_refused(tmp_path, content, says):
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        read_file(path)
    assert says in str(caught.value) and "model.safetensors" in str(caught.value)


def test_a_good_file(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(safetensors_bytes(GOOD))
    file = read_file(path)
    assert {name: (entry.dtype, entry.shape, entry.nbytes) for name, entry in file.tensors.items()} == {
        "a": ("F32", (2, 3), 24), "b": ("BF16", (4,), 8), "none": ("U8", (0, 7), 0)}
    assert file.tensors["b"].offset == 8 + len(file.header) + 24


def test_padded_header_and_metadata_are_fine(tmp_path):
    path = tmp_path / "x.safetensors"
    path.write_bytes(packed(json.dumps({"__metadata__": {"format": "mlx"}, "a": tensor()}).encode() + b"   ", bytes(4)))
    assert list(read_file(path).tensors) == ["a"]


def test_agrees_with_the_safetensors_package():
    from safetensors import safe_open

    path = MODEL_DIR / "model.safetensors"
    ours = read_file(path).tensors
    with safe_open(path, "np") as theirs:
        assert set(theirs.keys()) == set(ours)
        for name in theirs.keys():
            part = theirs.get_slice(name)
            assert (part.get_dtype(), tuple(part.get_shape())) == (ours[name].dtype, ours[name].shape)


def sharded(folder, placed=None, files=None):
    """Two shards, a in the first, b in the second, with the index given."""
    files = files or {"model-00001-of-00002.safetensors": ["a"], "model-00002-of-00002.safetensors": ["b"]}
    for file, names in files.items():
        (folder / file).write_bytes(safetensors_bytes({name: GOOD[name] for name in names}))
    if placed is None:
        placed = {name: file for file, names in files.items() for name in names}
    (folder / INDEX_NAME).write_text(json.dumps({"weight_map": placed}))


def test_shards(tmp_path):
    sharded(tmp_path)
    files, tensors = open_folder(tmp_path)
    assert len(files) == 2 and tensors["b"].file.name == "model-00002-of-00002.safetensors"


def test_complete_numbered_shards_need_no_index(tmp_path):
    sharded(tmp_path)
    (tmp_path / INDEX_NAME).unlink()
    assert set(open_folder(tmp_path)[1]) == {"a", "b"}


FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def missing_shard(folder):
    sharded(folder)
    (folder / SECOND).unlink()
    return [SECOND, "tensor b"]


def missing_shard_without_index(folder):
    sharded(folder)
    (folder / SECOND).unlink()
    (folder / INDEX_NAME).unlink()
    return [SECOND]


def tensor_not_in_its_shard(folder):
    sharded(folder, {"a": FIRST, "b": SECOND, "c": FIRST})
    return ["tensor c", FIRST]


def tensor_in_another_shard(folder):
    sharded(folder, {"a": SECOND, "b": FIRST})
    return ["tensor a", SECOND]


def tensor_in_two_shards(folder):
    sharded(folder, {"a": FIRST, "b": SECOND}, {FIRST: ["a"], SECOND: ["a", "b"]})
    return ["tensor a", FIRST, SECOND]


def shard_outside_the_folder(folder):
    sharded(folder, {"a": "../model.safetensors"})
    return ["tensor a", "../model.safetensors"]


def index_of_another_kind(folder):
    sharded(folder, {"a": "weights.bin"})
    return ["tensor a", "weights.bin"]


def broken_index(folder):
    (folder / INDEX_NAME).write_text("{")
    return [INDEX_NAME]


def index_without_map(folder):
    (folder / INDEX_NAME).write_text("{}")
    return [INDEX_NAME]


def index_of_numbers(folder):
    (folder / INDEX_NAME).write_text('{"weight_map": {"a": 1}}')
    return ["tensor a"]


def damaged_shard(folder):
    sharded(folder)
    (folder / SECOND).write_bytes((folder / SECOND).read_bytes()[:-1])
    return [SECOND, "tensor b"]


def no_weights(folder):
    return ["no model.safetensors"]


@pytest.mark.parametrize("build", [
    missing_shard, missing_shard_without_index, tensor_not_in_its_shard, tensor_in_another_shard, tensor_in_two_shards,
    shard_outside_the_folder, index_of_another_kind, broken_index, index_without_map, index_of_numbers, damaged_shard, no_weights,
])
def test_case_29_bad_folders_are_refused(tmp_path, build):
    expected = build(tmp_path)
    with pytest.raises(CheckpointError) as caught:
        open_folder(tmp_path)
    for text in expected:
        assert text in str(caught.value)


def accepts_or_refuses(path, content):
    """Whatever the bytes, the reader answers with entries inside the file or a CheckpointError."""
    path.write_bytes(content)
    try:
        file = read_file(path)
    except CheckpointError:
        return
    for entry in file.tensors.values():
        assert 8 <= entry.offset <= entry.offset + entry.nbytes <= len(content)


bounded = settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@bounded
@given(st.binary(max_size=200))
def test_any_bytes(tmp_path, content):
    accepts_or_refuses(tmp_path / "any.safetensors", content)


@bounded
@given(st.integers(0, 500), st.integers(0, 255), st.integers(0, 3))
def test_any_changed_byte(tmp_path, place, value, cut):
    content = bytearray(safetensors_bytes(GOOD))
    content[place % len(content)] = value
    accepts_or_refuses(tmp_path / "changed.safetensors", bytes(content[: len(content) - cut]))


values = st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
                      lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3), max_leaves=8)
entries = st.fixed_dictionaries({"dtype": st.sampled_from(["U8", "F32", "BF16", "??"]) | values, "shape": st.lists(st.integers(-1, 9), max_size=3) | values,
                                 "data_offsets": st.lists(st.integers(-1, 40), min_size=2, max_size=2) | values})


@bounded
@given(st.dictionaries(st.text(max_size=4), entries | values, max_size=4), st.integers(0, 40))
def test_any_header(tmp_path, header, data):
    accepts_or_refuses(tmp_path / "header.safetensors", packed(header, bytes(data)))
