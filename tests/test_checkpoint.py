"""Checkpoint: tensors accounted for (cases 25 and 27), and every byte of a group where the layout says."""

import json

import numpy as np
import pytest

from lily import reading
from lily.checkpoint import Checkpoint
from lily.errors import CheckpointError
from lily.weight_layout import Piece
from lily.weight_map import HEAD, PREFIX, modules, plain_tensors
from tests.checkpoint_tools import (MODEL_DIR, bf16, dequantise, f32, mini_checkpoint, mini_config, mini_tensors, quantised, write_checkpoint)

L0, L1 = PREFIX + "layers.0.", PREFIX + "layers.1."  # MINI: layer 0 is Gated DeltaNet, layer 1 attention


def load(checkpoint, group):
    """The group's three regions, read into guarded memory: the bytes around each view must stay as they were."""
    regions = []
    for size in (group.weight_bytes, group.scale_bytes, group.scale_bytes):
        memory = np.full(size + 64, 0xA5, np.uint8)
        regions.append((memory, memory[32 : 32 + size]))
    views = [view for _, view in regions]
    checkpoint.load_group(group, *(views if group.scale_bytes else views[:1]))
    for memory, _ in regions:
        assert (memory[:32] == 0xA5).all() and (memory[-32:] == 0xA5).all()
    return [view.tobytes() for view in views]


def group_rows(checkpoint, name):
    """A group as float32 [experts or 1, n, k]."""
    group = {g.name: g for g in checkpoint.layout()}[name]
    weight, scales, biases = load(checkpoint, group)
    rows = f32(weight).reshape(-1, group.k) if group.bits == 16 else dequantise(weight, scales, biases, group.bits, group.group_size, group.k)
    return group, rows.reshape(max(1, group.experts), group.n, group.k)


def stored_rows(tensors, path, bits=4, size=64):
    """A stored module as float32 [experts or 1, n, k], without our reader."""
    dtype, shape, weight = tensors[path + ".weight"]
    if dtype == "BF16":
        return f32(weight).reshape(-1, *shape[-2:])
    k = shape[-1] * 32 // bits
    rows = dequantise(weight, tensors[path + ".scales"][2], tensors[path + ".biases"][2], bits, size, k)
    return rows.reshape(-1, shape[-2], k)


def build(tmp_path, top=None, shards=1, formats=None, plain=(), raw=False, **text):
    config = mini_config(top, **text)
    tensors = mini_tensors(config, formats=formats, plain=plain, raw=raw)
    return tensors, write_checkpoint(tmp_path / "m", config, tensors, shards)


def test_lily_tiny():
    with Checkpoint.open(MODEL_DIR) as checkpoint:
        groups = {group.name: group for group in checkpoint.layout()}
        assert checkpoint.total_bytes == 12_895_248 and not checkpoint.raw_norms and checkpoint.shared_slots == 1
        assert sum(g.weight_bytes + 2 * g.scale_bytes for g in groups.values()) + sum(
            4 * checkpoint.plain(name).size for name in checkpoint.plain_names()) > checkpoint.total_bytes
        assert len(groups) == 2 + 8 * 5
        gdn, router = groups["layers.0.gdn_in"], groups["layers.3.router"]
        assert (gdn.n, gdn.k, gdn.suffix, gdn.kind) == (1544, 256, "b4_g64", "q4")
        assert gdn.offsets == {"qkv": 0, "z": 1024, "b": 1536, "a": 1540}
        assert (router.n, router.suffix, router.offsets) == (33, "b8_g64", {"gate": 0, "shared_gate": 32})
        assert groups["layers.3.attn_in"].offsets == {"q": 0, "k": 4096, "v": 4352}
        assert (groups["layers.7.experts_gate_up"].experts, groups["layers.7.experts_gate_up"].n) == (33, 128)


EXPECTED_ROWS = {
    "embed": [PREFIX + "embed_tokens"],
    "lm_head": [HEAD],
    "layers.0.gdn_in": [L0 + "linear_attn.in_proj_qkv", L0 + "linear_attn.in_proj_z", L0 + "linear_attn.in_proj_b", L0 + "linear_attn.in_proj_a"],
    "layers.0.gdn_out": [L0 + "linear_attn.out_proj"],
    "layers.1.attn_in": [L1 + "self_attn.q_proj", L1 + "self_attn.k_proj", L1 + "self_attn.v_proj"],
    "layers.1.attn_out": [L1 + "self_attn.o_proj"],
    "layers.1.router": [L1 + "mlp.gate", L1 + "mlp.shared_expert_gate"],
}


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("batch_bytes", [16 << 20, 1000])  # the small one cuts every read and uses the threads
def test_rows_of_every_group(tmp_path, monkeypatch, shards, batch_bytes):
    monkeypatch.setattr(reading, "BATCH_BYTES", batch_bytes)
    tensors, folder = build(tmp_path, shards=shards)
    with Checkpoint.open(folder) as checkpoint:
        for name, paths in EXPECTED_ROWS.items():
            _, rows = group_rows(checkpoint, name)
            np.testing.assert_array_equal(rows, np.concatenate([stored_rows(tensors, path) for path in paths], 1), name)
        for layer in (L0, L1):
            short = "layers.0." if layer == L0 else "layers.1."
            expected = np.concatenate([
                np.concatenate([stored_rows(tensors, layer + f"mlp.switch_mlp.{part}"), stored_rows(tensors, layer + f"mlp.shared_expert.{part}")])
                for part in ("gate_proj", "up_proj")], 1)
            np.testing.assert_array_equal(group_rows(checkpoint, short + "experts_gate_up")[1], expected)
            expected = np.concatenate([stored_rows(tensors, layer + "mlp.switch_mlp.down_proj"), stored_rows(tensors, layer + "mlp.shared_expert.down_proj")])
            np.testing.assert_array_equal(group_rows(checkpoint, short + "experts_down")[1], expected)


def test_a_wide_shared_expert_becomes_pseudo_experts_that_add_up(tmp_path):
    tensors, folder = build(tmp_path, shared_expert_intermediate_size=192)
    with Checkpoint.open(folder) as checkpoint:
        assert checkpoint.shared_slots == 3
        _, gate_up = group_rows(checkpoint, "layers.0.experts_gate_up")
        group, down = group_rows(checkpoint, "layers.0.experts_down")
    assert group.experts == 7 and group.k == 64
    x = np.random.default_rng(1).normal(size=128)
    gate, up, whole_down = (stored_rows(tensors, L0 + f"mlp.shared_expert.{part}_proj")[0] for part in ("gate", "up", "down"))

    def act(g, u):
        return (g @ x) / (1 + np.exp(-(g @ x))) * (u @ x)

    slots = sum(down[e] @ act(gate_up[e, :64], gate_up[e, 64:]) for e in (4, 5, 6))
    np.testing.assert_allclose(slots, whole_down @ act(gate, up), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("text, override", [
    ({"shared_expert_intermediate_size": 128, "moe_intermediate_size": 192}, {}),  # no whole number of widths
    ({"shared_expert_intermediate_size": 64 * 9}, {}),                             # too many
    ({}, {L1 + "mlp.shared_expert.down_proj": (8, 64)}),                           # another format, in one layer
])
def test_a_shared_expert_that_does_not_join_has_its_own_groups(tmp_path, text, override):
    top = {"quantization": {"bits": 4, "group_size": 64, **{path: {"bits": b, "group_size": g} for path, (b, g) in override.items()}}}
    tensors, folder = build(tmp_path, top, formats=override, **text)
    with Checkpoint.open(folder) as checkpoint:
        assert checkpoint.shared_slots == 0
        for layer, short in ((L0, "layers.0."), (L1, "layers.1.")):
            group, rows = group_rows(checkpoint, short + "shared_gate_up")
            width = checkpoint.config.shared_width
            assert group.experts == 0 and group.offsets == {"gate": 0, "up": width}
            np.testing.assert_array_equal(rows[:, width:], stored_rows(tensors, layer + "mlp.shared_expert.up_proj"))
            bits = override.get(layer + "mlp.shared_expert.down_proj", (4, 64))[0]
            np.testing.assert_array_equal(group_rows(checkpoint, short + "shared_down")[1], stored_rows(tensors, layer + "mlp.shared_expert.down_proj", bits))


def test_bfloat16_gates_get_groups_of_their_own(tmp_path):
    tensors, folder = build(tmp_path, plain=("in_proj_a", "in_proj_b", "mlp.gate"))
    with Checkpoint.open(folder) as checkpoint:
        names = {group.name: group for group in checkpoint.layout()}
        assert names["layers.0.gdn_in"].offsets == {"qkv": 0, "z": 256}
        group, rows = group_rows(checkpoint, "layers.0.gdn_ba")
        assert (group.suffix, group.kind, group.scale_bytes, group.offsets) == ("w16", "w16", 0, {"b": 0, "a": 2})
        np.testing.assert_array_equal(rows[:, :2], stored_rows(tensors, L0 + "linear_attn.in_proj_b"))
        np.testing.assert_array_equal(rows[:, 2:], stored_rows(tensors, L0 + "linear_attn.in_proj_a"))
        assert names["layers.0.router"].bits == 16 and names["layers.0.shared_gate"].bits == 4


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("size", [32, 64])
def test_every_format(tmp_path, bits, size):
    tensors, folder = build(tmp_path, {"quantization": {"bits": bits, "group_size": size}}, formats={"": (bits, size)})
    with Checkpoint.open(folder) as checkpoint:
        group, rows = group_rows(checkpoint, "layers.0.gdn_out")
        assert group.suffix == f"b{bits}_g{size}"
        np.testing.assert_array_equal(rows, stored_rows(tensors, L0 + "linear_attn.out_proj", bits, size))


def test_case_27_bits_follow_the_packed_width_where_the_config_is_silent(tmp_path):
    formats = {"mlp.gate": (8, 64), "mlp.shared_expert_gate": (8, 32), "lm_head": (8, 64)}
    _, folder = build(tmp_path, {"quantization": {"mode": "affine"}}, formats=formats)
    with Checkpoint.open(folder) as checkpoint:
        found = {group.name: group.suffix for group in checkpoint.layout()}
    assert (found["layers.0.router"], found["layers.0.shared_gate"], found["lm_head"], found["embed"]) == ("b8_g64", "b8_g32", "b8_g64", "b4_g64")


def test_case_27_the_router_is_inferred_without_an_override(tmp_path):
    _, folder = build(tmp_path, formats={"mlp.gate": (8, 64), "mlp.shared_expert_gate": (8, 64)})
    with Checkpoint.open(folder) as checkpoint:
        assert {g.name: g.bits for g in checkpoint.layout()}["layers.0.router"] == 8


# ---- plain tensors and the 1 of the norms (case 25) ----

NORMS = ["final_norm", "layers.0.input_norm", "layers.1.post_norm", "layers.1.q_norm", "layers.1.k_norm"]


@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize("with_mtp", [False, True])
def test_case_25_norms_gain_their_one_by_the_layout_of_the_convolution(tmp_path, raw, with_mtp):
    config = mini_config()
    tensors = mini_tensors(config, raw=raw)
    stored = dict(tensors)
    if with_mtp:
        stored["mtp.norm.weight"] = ("BF16", (128,), bytes(256))
    folder = write_checkpoint(tmp_path / "m", config, stored)
    with Checkpoint.open(folder) as checkpoint:
        assert checkpoint.raw_norms is raw
        specs = plain_tensors(checkpoint.config)
        for name in NORMS:
            np.testing.assert_array_equal(checkpoint.plain(name), f32(tensors[specs[name].tensor][2]) + np.float32(raw))
        for name in ("layers.0.gdn_norm", "layers.0.dt_bias"):
            np.testing.assert_array_equal(checkpoint.plain(name), f32(tensors[specs[name].tensor][2]))
        conv = checkpoint.plain("layers.0.conv1d")
        assert conv.shape == (256, 4) and conv.dtype == np.float32
        np.testing.assert_array_equal(conv.reshape(-1), f32(tensors[specs["layers.0.conv1d"].tensor][2]))
        np.testing.assert_array_equal(checkpoint.plain("layers.0.A_log"), np.frombuffer(tensors[specs["layers.0.A_log"].tensor][2], "<f4"))


def test_case_25_mixed_convolution_layouts_are_refused(tmp_path):
    config = mini_config(num_hidden_layers=3)
    tensors = mini_tensors(config)
    name = PREFIX + "layers.2.linear_attn.conv1d.weight"
    tensors[name] = ("BF16", (256, 1, 4), tensors[name][2])
    with pytest.raises(CheckpointError, match="layers.2.linear_attn.conv1d"):
        Checkpoint.open(write_checkpoint(tmp_path / "m", config, tensors))


# ---- faults ----

def replaced(name, dtype, shape, size):
    def change(tensors, config):
        tensors[name] = (dtype, shape, bytes(size))
    return change


def removed(name):
    def change(tensors, config):
        del tensors[name]
    return change


def override(path, **entry):
    def change(tensors, config):
        config["quantization"][path] = entry
    return change


def default_bits(bits, size=64):
    def change(tensors, config):
        config["quantization"] = {"bits": bits, "group_size": size}
    return change


def requantised(path, lead, k, bits, size):
    def change(tensors, config):
        parts = quantised(np.random.default_rng(0), lead, k, bits, size)
        tensors.update({f"{path}.{part}": stored for part, stored in parts.items()})
    return change


QKV, GATE, EXPERTS = L0 + "linear_attn.in_proj_qkv", L0 + "mlp.gate", L1 + "mlp.switch_mlp.up_proj"
FAULTS = [
    ("missing weight", removed(QKV + ".weight"), [QKV + ".weight", "missing"]),
    ("missing biases", removed(QKV + ".biases"), [QKV + ".biases", "missing"]),
    ("missing scales", removed(QKV + ".scales"), [QKV + ".weight", "4 or 8 bits"]),
    ("missing norm", removed(L1 + "self_attn.q_norm.weight"), ["q_norm", "missing", "[64]"]),
    ("missing layer", removed(L1 + "self_attn.k_proj.weight"), ["k_proj.weight", "missing"]),
    ("bits against the default", requantised(QKV, (256,), 128, 8, 64), [QKV + ".weight", "[256, 32]", "[256, 16]", "4 bits"]),
    ("default against all", default_bits(8), ["embed_tokens.weight", "[96, 16]", "[96, 32]", "8 bits"]),
    ("bits against an override", override(GATE, bits=8, group_size=64), [GATE + ".weight", "[4, 16]", "[4, 32]", "8 bits"]),
    ("group against the default", requantised(QKV, (256,), 128, 4, 32), [QKV + ".scales", "[256, 4]", "[256, 2]"]),
    ("group against an override", override(QKV, bits=4, group_size=32), [QKV + ".scales", "[256, 2]", "[256, 4]"]),
    ("three bits", replaced(QKV + ".weight", "U32", (256, 12), 256 * 48), [QKV + ".weight", "[256, 12]", "4 bits"]),
    ("wrong rows", requantised(QKV, (192,), 128, 4, 64), [QKV + ".weight", "[192, 16]", "[256, 16]"]),
    ("wrong experts", requantised(EXPERTS, (3, 64), 128, 4, 64), [EXPERTS + ".weight", "[3, 64, 16]", "[4, 64, 16]"]),
    ("experts not stacked", requantised(EXPERTS, (256,), 128, 4, 64), [EXPERTS + ".weight", "[4, 64, 16]"]),
    ("weight of another type", replaced(QKV + ".weight", "F32", (256, 16), 256 * 64), [QKV + ".weight", "F32", "U32"]),
    ("half-precision scales", replaced(QKV + ".scales", "F16", (256, 2), 1024), [QKV + ".scales", "F16", "BF16"]),
    ("biases of another shape", replaced(QKV + ".biases", "BF16", (256, 4), 2048), [QKV + ".biases", "[256, 4]"]),
    ("half-precision router", lambda t, c: [t.pop(GATE + ".scales"), t.pop(GATE + ".biases"), t.update({GATE + ".weight": ("F16", (4, 128), bytes(1024))})],
     [GATE + ".weight", "F16", "BF16 [4, 128]"]),
    ("bfloat16 q_proj", lambda t, c: [t.pop(L1 + f"self_attn.q_proj.{p}") for p in ("scales", "biases")] + [
        t.update({L1 + "self_attn.q_proj.weight": ("BF16", (256, 128), bytes(256 * 256))})], ["q_proj.weight", "4 or 8 bits"]),
    ("norm of another type", replaced(PREFIX + "norm.weight", "F16", (128,), 256), ["norm.weight", "F16"]),
    ("norm of another length", replaced(PREFIX + "norm.weight", "BF16", (64,), 128), ["norm.weight", "[64]", "[128]"]),
    ("convolution of another shape", replaced(L0 + "linear_attn.conv1d.weight", "BF16", (256, 4), 2048), ["conv1d", "[256, 4, 1]", "[256, 1, 4]"]),
    ("unknown tensor", replaced(L0 + "linear_attn.extra.weight", "BF16", (4,), 8), ["linear_attn.extra.weight"]),
    ("a layer too many", replaced(PREFIX + "layers.2.input_layernorm.weight", "BF16", (128,), 256), ["layers.2"]),
    ("rows launched together differ", lambda t, c: [override(L1 + "self_attn.v_proj", bits=8, group_size=64)(t, c),
                                                    requantised(L1 + "self_attn.v_proj", (64,), 128, 8, 64)(t, c)], ["v_proj", "8 bits", "q_proj"]),
]


@pytest.mark.parametrize("change, says", [fault[1:] for fault in FAULTS], ids=[fault[0] for fault in FAULTS])
def test_case_27_a_fault_names_tensor_shape_and_expectation(tmp_path, change, says):
    config = mini_config()
    tensors = mini_tensors(config)
    change(tensors, config)
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(write_checkpoint(tmp_path / "m", config, tensors))
    for text in says:
        assert text in str(caught.value)


def test_vision_and_draft_tensors_are_ignored(tmp_path):
    config = mini_config()
    tensors = mini_tensors(config)
    extra = {"vision_tower.blocks.0.weight": ("F32", (1,), bytes(4)), "mtp.fc.weight": ("BF16", (1,), bytes(2))}
    with Checkpoint.open(write_checkpoint(tmp_path / "m", config, {**tensors, **extra})) as checkpoint:
        assert checkpoint.total_bytes == sum(len(data) for _, _, data in tensors.values())


def test_an_unquantised_checkpoint_names_the_command(tmp_path):
    config = mini_config({"quantization": None})
    tensors = {"model.language_model.embed_tokens.weight": ("BF16", (96, 128), bf16(np.ones((96, 128))).tobytes())}
    with pytest.raises(CheckpointError, match="mlx_lm.convert --hf-path"):
        Checkpoint.open(write_checkpoint(tmp_path / "m", config, tensors))


def test_folders_without_what_they_need(tmp_path):
    with pytest.raises(CheckpointError, match="absent"):
        Checkpoint.open(tmp_path / "absent")
    with pytest.raises(CheckpointError, match="config.json"):
        Checkpoint.open(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(mini_config()))
    with pytest.raises(CheckpointError, match="model.safetensors"):
        Checkpoint.open(tmp_path)


# ---- reading ----

def test_progress_grows_to_the_total(tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "BATCH_BYTES", 5000)
    calls = []
    with Checkpoint.open(mini_checkpoint(tmp_path / "m"), lambda done, total: calls.append((done, total))) as checkpoint:
        for group in checkpoint.layout():
            load(checkpoint, group)
        for name in checkpoint.plain_names():
            checkpoint.plain(name)
        total = checkpoint.total_bytes
    done = [call[0] for call in calls]
    assert done == sorted(done) and done[-1] == total and {call[1] for call in calls} == {total}


def test_case_29_a_file_cut_after_opening(tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "BATCH_BYTES", 4096)
    folder = mini_checkpoint(tmp_path / "m")
    with Checkpoint.open(folder) as checkpoint:
        path = folder / "model.safetensors"
        path.write_bytes(path.read_bytes()[:20000])
        with pytest.raises(CheckpointError, match="ended inside tensor"):
            for group in checkpoint.layout():
                load(checkpoint, group)


def test_a_view_of_the_wrong_size(tmp_path):
    with Checkpoint.open(mini_checkpoint(tmp_path / "m")) as checkpoint:
        with pytest.raises(ValueError, match="embed"):
            checkpoint.load_group(checkpoint.layout()[0], np.zeros(8, np.uint8))


@pytest.mark.parametrize("piece", [
    Piece("t", "weight", 1, 10, 0, 10, 0, 10), Piece("t", "weight", 3, 4, 0, 4, 2, 7), Piece("t", "weight", 3, 4, 4, 8, 0, 5),
])
@pytest.mark.parametrize("batch_bytes, vectors", [(1 << 20, 512), (6, 512), (3, 2), (1 << 20, 2)])
def test_batches_cover_a_piece_once(monkeypatch, piece, batch_bytes, vectors):
    monkeypatch.setattr(reading, "BATCH_BYTES", batch_bytes)
    monkeypatch.setattr(reading, "MAX_VECTORS", vectors)
    source = np.arange(1, 101, dtype=np.uint8)
    found, expected = np.zeros(64, np.uint8), np.zeros(64, np.uint8)
    for offset, parts in reading.batches(piece, 5, found.data):
        assert len(parts) <= vectors and sum(map(len, parts)) <= max(batch_bytes, 4)
        for part in parts:
            part[:] = source[offset : offset + len(part)].data
            offset += len(part)
    for i in range(piece.segments):
        start = 5 + piece.source + i * piece.source_stride
        at = piece.dest + i * piece.dest_stride
        expected[at : at + piece.nbytes] = source[start : start + piece.nbytes]
    np.testing.assert_array_equal(found, expected)


def test_fingerprint_follows_config_and_headers(tmp_path):
    one, same = mini_checkpoint(tmp_path / "a"), mini_checkpoint(tmp_path / "b")
    other = mini_checkpoint(tmp_path / "c", formats={"mlp.gate": (8, 64)})
    prints = []
    for folder in (one, same, other):
        with Checkpoint.open(folder) as checkpoint:
            prints.append(checkpoint.fingerprint())
    assert prints[0] == prints[1] != prints[2] and len(prints[0]) == 64


def test_fingerprint_differs_for_another_training_of_the_same_layout(tmp_path):
    folder = mini_checkpoint(tmp_path / "a")
    with Checkpoint.open(folder) as checkpoint:
        before = checkpoint.fingerprint()
        file, entry = checkpoint._files[0].path, next(iter(checkpoint._tensors.values()))
    with open(file, "r+b") as stream:
        stream.seek(entry.offset)
        first = stream.read(1)[0]
        stream.seek(entry.offset)
        stream.write(bytes([first ^ 1]))
    with Checkpoint.open(folder) as checkpoint:
        assert checkpoint.fingerprint() != before


def test_every_module_is_in_exactly_one_group():
    with Checkpoint.open(MODEL_DIR) as checkpoint:
        for part in ("weight", "scales", "biases"):
            found = [piece.tensor for group in checkpoint.layout() for piece in group.pieces if piece.part == part]
            assert sorted(found) == sorted(f"{path}.{part}" for path in modules(checkpoint.config))
