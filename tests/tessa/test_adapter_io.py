"""Adapter folders: what was written comes back; what does not fit is refused by name."""

from __future__ import annotations

import json
import pickle

import pytest
import torch
from safetensors.torch import load_file, save_file

from tessa.adapter_io import CONFIG_FILE, WEIGHTS_FILE, delta_key, read_adapter, read_config, write_adapter
from tessa.errors import UserError
from tessa.slices import Slice

Q, DOWN = "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.down_proj"
SLICES = {Q: Slice("in", 8, 4, 1, 16, 32), DOWN: Slice("in", 1, 4, 2, 32, 24)}


@pytest.fixture
def folder(tmp_path):
    deltas = {
        m: torch.randn(s.delta_shape, generator=torch.Generator().manual_seed(1)) for m, s in SLICES.items()
    }
    return write_adapter(
        tmp_path / "a", SLICES, deltas, base_model_name_or_path="base", rank_equivalent=2, placement="across"
    )


def _edit_config(folder, **changes):
    config = json.loads((folder / CONFIG_FILE).read_text())
    (folder / CONFIG_FILE).write_text(json.dumps(config | changes))


def _edit_weights(folder, change):
    weights = load_file(folder / WEIGHTS_FILE)
    change(weights)
    save_file(weights, folder / WEIGHTS_FILE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_round_trip(tmp_path, dtype):
    deltas = {m: torch.randn(s.delta_shape).to(dtype) for m, s in SLICES.items()}
    deltas[DOWN] = deltas[DOWN].t().contiguous().t()  # not contiguous, as a view of something larger may be
    write_adapter(tmp_path, SLICES, deltas, base_model_name_or_path="base", rank_equivalent=2, shards=2)
    adapter = read_adapter(tmp_path)
    assert adapter.slices == SLICES
    assert adapter.config["shards"] == 2
    assert adapter.config["target_modules"] == ["down_proj", "q_proj"]
    assert adapter.num_params == 16 * 4 + 32 * 4
    for module, delta in deltas.items():
        assert adapter.deltas[module].dtype == dtype
        assert torch.equal(adapter.deltas[module], delta)
    assert sorted(p.name for p in tmp_path.iterdir()) == [CONFIG_FILE, WEIGHTS_FILE]


def test_config_alone_needs_no_weights(folder):
    (folder / WEIGHTS_FILE).unlink()
    config, slices = read_config(folder)
    assert config["base_model_name_or_path"] == "base"
    assert slices == SLICES


def test_lora_adapter_is_refused(folder):
    _edit_config(folder, peft_type="LORA")
    with pytest.raises(UserError, match=r"a/adapter_config.json has peft_type 'LORA'"):
        read_adapter(folder)


class _Trap:
    def __reduce__(self):
        return (pytest.fail, ("the pickle was opened",))


@pytest.mark.parametrize("name", ["adapter_model.bin", "adapter_model.pt"])
def test_pickle_is_refused_unopened(folder, name):
    (folder / WEIGHTS_FILE).unlink()
    (folder / name).write_bytes(pickle.dumps(_Trap()))
    with pytest.raises(UserError, match=f"pickled weights .{name}.*never opened"):
        read_adapter(folder)


def test_pickle_under_the_name_of_safetensors_is_refused(folder):
    (folder / WEIGHTS_FILE).write_bytes(pickle.dumps(_Trap()))
    with pytest.raises(UserError, match="not a readable safetensors file"):
        read_adapter(folder)


def test_truncated_weights_are_refused(folder):
    data = (folder / WEIGHTS_FILE).read_bytes()
    (folder / WEIGHTS_FILE).write_bytes(data[:-8])
    with pytest.raises(UserError, match="not a readable safetensors file"):
        read_adapter(folder)


def test_wrong_shape_names_the_module(folder):
    _edit_weights(folder, lambda w: w.update({delta_key(Q): torch.zeros(16, 5)}))
    with pytest.raises(UserError, match=rf"'{Q}' has shape \[16, 5\].*needs \[16, 4\]"):
        read_adapter(folder)


def test_missing_and_unknown_tensors_are_named(folder):
    _edit_weights(folder, lambda w: w.update({"base_model.model.lm_head.weight": w.pop(delta_key(DOWN))}))
    with pytest.raises(UserError, match=r"missing deltas: .*down_proj.* unknown tensors: .*lm_head"):
        read_adapter(folder)


def test_integer_delta_is_refused(folder):
    _edit_weights(folder, lambda w: w.update({delta_key(Q): torch.zeros(16, 4, dtype=torch.int8)}))
    with pytest.raises(UserError, match=f"'{Q}' has dtype I8"):
        read_adapter(folder)


def test_nan_is_refused_unless_asked(folder):
    _edit_weights(folder, lambda w: w[delta_key(Q)].view(-1)[3:4].fill_(float("nan")))
    with pytest.raises(UserError, match=f"'{Q}' holds NaN"):
        read_adapter(folder)
    assert read_adapter(folder, check_finite=False).deltas[Q].isnan().any()


def test_config_faults_are_named(folder, tmp_path):
    with pytest.raises(UserError, match="no adapter folder at"):
        read_adapter(tmp_path / "absent")
    _edit_config(folder, slices={})
    with pytest.raises(UserError, match="has no 'slices'"):
        read_adapter(folder)
    _edit_config(folder, slices={Q: {"axis": "in"}})
    with pytest.raises(UserError, match=f"slices of '{Q}': slice keys must be"):
        read_adapter(folder)
    _edit_config(folder, slices={Q: SLICES[Q].to_dict() | {"offset": 30}})
    with pytest.raises(UserError, match=f"slices of '{Q}': a segment of 4 at offset 30"):
        read_adapter(folder)
    (folder / CONFIG_FILE).write_text("{")
    with pytest.raises(UserError, match="not readable JSON"):
        read_adapter(folder)
    (folder / CONFIG_FILE).unlink()
    with pytest.raises(UserError, match=f"has no {CONFIG_FILE}"):
        read_adapter(folder)


def test_writer_refuses_what_the_reader_would(tmp_path):
    with pytest.raises(UserError, match="same modules"):
        write_adapter(tmp_path, SLICES, {})
    deltas = {m: torch.zeros(s.delta_shape) for m, s in SLICES.items()}
    with pytest.raises(UserError, match=f"'{Q}' has shape"):
        write_adapter(tmp_path, SLICES, deltas | {Q: torch.zeros(1, 1)})
    with pytest.raises(UserError, match=f"'{Q}' has dtype torch.int64"):
        write_adapter(tmp_path, SLICES, deltas | {Q: torch.zeros(16, 4, dtype=torch.int64)})
    assert not list(tmp_path.iterdir())
