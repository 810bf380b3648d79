"""TESSA through PEFT's own calls: create, save, load, switch, disable, merge."""

from __future__ import annotations

import copy
import json
import pickle
import subprocess
import sys

import peft
import pytest
import torch
from peft.utils.peft_types import PeftType
from torch import nn

import tessa.peft
from tessa.adapter_io import CONFIG_FILE, read_adapter, write_adapter
from tessa.budget import budget_of
from tessa.errors import UserError
from tessa.peft import TessaConfig, TessaLayer, choose_slices, gradient_energy
from tessa.peft.registration import register_method, register_peft_type
from tessa.slices import Slice

MIXED = {"q_proj": "along", "k_proj": "across", "v_proj": "across", "o_proj": "along"}


def _config(**kwargs) -> TessaConfig:
    defaults = {"rank_equivalent": 8, "shards": 4, "init_weights": False, "task_type": "CAUSAL_LM"}
    return TessaConfig(**(defaults | kwargs))


def _targets(placement) -> list[str] | None:
    return sorted(placement) if isinstance(placement, dict) else None


def _logits(model, ids) -> torch.Tensor:
    with torch.no_grad():
        return model(ids).logits


def _trainable(model) -> dict[str, nn.Parameter]:
    return {n: p for n, p in model.named_parameters() if p.requires_grad}


@pytest.fixture
def base_logits(llama, ids):
    return _logits(llama, ids)


def test_registration_is_idempotent_and_a_full_member():
    register_peft_type()
    register_method(TessaConfig, tessa.peft.TessaModel)
    assert list(PeftType).count(PeftType.TESSA) == 1
    assert PeftType("TESSA") is PeftType["TESSA"] is PeftType.TESSA
    assert "TESSA" in list(PeftType)
    assert json.dumps({"t": PeftType.TESSA}) == '{"t": "TESSA"}'
    assert pickle.loads(pickle.dumps(PeftType.TESSA)) is PeftType.TESSA
    assert copy.deepcopy(PeftType.TESSA) is PeftType.TESSA


def test_import_order_does_not_matter():
    code = "import peft, tessa.peft; from peft import PeftType; print(PeftType.TESSA.value)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "TESSA"


@pytest.mark.parametrize("placement", ["across", "along", MIXED], ids=["across", "along", "mixed"])
@pytest.mark.parametrize("bias", [False, True])
def test_output_equals_merged_weights(ids, placement, bias, make_llama):
    base = make_llama(bias=bias)
    plain = _logits(base, ids)
    model = peft.get_peft_model(base, _config(placement=placement, target_modules=_targets(placement)))
    adapted = _logits(model, ids)
    assert (adapted - plain).abs().max() > 1e-3
    with model.disable_adapter():
        torch.testing.assert_close(_logits(model, ids), plain, rtol=0, atol=1e-6)
    merged = model.merge_and_unload()
    assert not any(isinstance(m, TessaLayer) for m in merged.modules())
    torch.testing.assert_close(_logits(merged, ids), adapted, rtol=0, atol=1e-5)


def test_new_adapter_starts_as_the_base_model(llama, ids, base_logits):
    model = peft.get_peft_model(llama, _config(init_weights=True))
    torch.testing.assert_close(_logits(model, ids), base_logits, rtol=0, atol=1e-6)


def test_only_deltas_train_and_their_number_is_the_budget(llama, ids):
    model = peft.get_peft_model(llama, _config())
    trainable = _trainable(model)
    assert trainable
    assert all(n.endswith("tessa_delta.default") for n in trainable)
    config = model.peft_config["default"]
    budget = budget_of(config.get_slices(), 8)
    assert sum(p.numel() for p in trainable.values()) == budget.tessa
    assert budget.matched
    model(ids, labels=ids).loss.backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in trainable.values())
    assert all(p.grad is None for n, p in model.named_parameters() if n not in trainable)


@pytest.mark.parametrize("placement", ["across", "along"])
def test_save_and_load_bit_equal(llama, ids, tmp_path, placement):
    fresh = copy.deepcopy(llama)
    model = peft.get_peft_model(llama, _config(placement=placement))
    expected = _logits(model, ids)
    model.save_pretrained(tmp_path)

    adapter = read_adapter(tmp_path)
    assert adapter.slices == model.peft_config["default"].get_slices()
    assert set(adapter.slices) == {
        n.removeprefix("base_model.model.") for n, m in model.named_modules() if isinstance(m, TessaLayer)
    }
    for name, parameter in _trainable(model).items():
        module = name.removeprefix("base_model.model.").removesuffix(".tessa_delta.default")
        assert torch.equal(adapter.deltas[module], parameter)

    loaded = peft.PeftModel.from_pretrained(fresh, tmp_path)
    assert torch.equal(_logits(loaded, ids), expected)
    assert not _trainable(loaded)
    assert isinstance(peft.PeftConfig.from_pretrained(tmp_path), TessaConfig)


def test_saved_config_is_stable(llama, tmp_path, make_llama):
    model = peft.get_peft_model(llama, _config())
    model.save_pretrained(tmp_path / "a")
    again = peft.PeftModel.from_pretrained(make_llama(), tmp_path / "a")
    again.save_pretrained(tmp_path / "b")
    assert (tmp_path / "a" / CONFIG_FILE).read_text() == (tmp_path / "b" / CONFIG_FILE).read_text()


def test_written_adapter_loads_in_peft(llama, ids, tmp_path):
    q1 = "model.layers.1.self_attn.q_proj"
    down0 = "model.layers.0.mlp.down_proj"
    slices = {q1: Slice("in", 8, 16, 1, 64, 64), down0: Slice("in", 2, 16, 4, 64, 128)}
    deltas = {m: 0.1 * torch.randn(s.delta_shape) for m, s in slices.items()}
    write_adapter(tmp_path, slices, deltas, base_model_name_or_path="tiny", rank_equivalent=8)
    model = peft.PeftModel.from_pretrained(copy.deepcopy(llama), tmp_path)
    # Modules of the same name in other layers stay as they are: the slices decide.
    assert sum(isinstance(m, TessaLayer) for m in model.modules()) == 2
    for module, s in slices.items():
        weight = llama.get_submodule(module).weight.data
        for position, index in enumerate(s.indices):
            weight[:, index] += deltas[module][:, position]
    torch.testing.assert_close(_logits(model, ids), _logits(llama, ids), rtol=0, atol=1e-5)


def test_several_adapters_switch_and_combine(llama, ids, base_logits, tmp_path):
    model = peft.get_peft_model(llama, _config(seed=1), adapter_name="one")
    one = _logits(model, ids)
    model.add_adapter("two", _config(seed=2, placement="along", target_modules=["q_proj", "down_proj"]))
    assert torch.equal(_logits(model, ids), one)
    assert all(".one" in n for n in _trainable(model))
    model.set_adapter("two")
    two = _logits(model, ids)
    assert (two - one).abs().max() > 1e-3
    assert (two - base_logits).abs().max() > 1e-3
    assert all(n.endswith("tessa_delta.two") for n in _trainable(model))
    model.set_adapter("one")
    assert torch.equal(_logits(model, ids), one)

    model.base_model.set_adapter(["one", "two"])
    both = _logits(model, ids)
    merged = copy.deepcopy(model).merge_and_unload(adapter_names=["one", "two"])
    torch.testing.assert_close(_logits(merged, ids), both, rtol=0, atol=1e-5)

    model.save_pretrained(tmp_path)
    assert set(read_adapter(tmp_path / "two").slices) == set(model.peft_config["two"].slices)
    model.set_adapter("one")
    model.delete_adapter("two")
    assert torch.equal(_logits(model, ids), one)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_merge_and_unmerge_restore_the_base_exactly(llama, ids, dtype):
    llama = llama.to(dtype)
    before = {n: p.clone() for n, p in llama.named_parameters()}
    model = peft.get_peft_model(llama, _config(seed=1), adapter_name="one")
    model.add_adapter("two", _config(seed=1))  # the same columns: merges overlap
    apart = _logits(model, ids)
    model.merge_adapter(adapter_names=["one", "two"])
    model.unmerge_adapter()
    model.merge_adapter(adapter_names=["one"], safe_merge=True)
    atol = 1e-5 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(_logits(model, ids), apart, rtol=0, atol=atol)
    model.unmerge_adapter()
    after = {n: p for n, p in model.unload().named_parameters()}
    assert all(torch.equal(before[n], after[n]) for n in before)


def test_safe_merge_refuses_a_broken_adapter(llama):
    model = peft.get_peft_model(llama, _config())
    name, parameter = next(iter(_trainable(model).items()))
    parameter.data[0, 0] = float("inf")
    layer = model.get_submodule(name.removesuffix(".tessa_delta.default"))
    before = layer.base_layer.weight.clone()
    with pytest.raises(UserError, match="adapter 'default' gives NaN or infinite"):
        layer.merge(safe_merge=True)
    assert torch.equal(layer.base_layer.weight, before)


def test_delta_weight_is_the_update(llama):
    model = peft.get_peft_model(llama, _config(placement="along"))
    layer = model.base_model.model.model.layers[0].self_attn.o_proj
    before = layer.base_layer.weight.clone()
    update = layer.get_delta_weight("default")
    assert update.count_nonzero() == layer.tessa_delta["default"].numel()
    layer.merge()
    torch.testing.assert_close(layer.base_layer.weight, before + update)


def test_bfloat16_base_keeps_float32_deltas(llama, ids):
    model = peft.get_peft_model(llama.bfloat16(), _config())
    trainable = _trainable(model)
    assert all(p.dtype == torch.float32 for p in trainable.values())
    out = model(ids, labels=ids)
    assert out.logits.dtype == torch.bfloat16
    out.loss.backward()
    assert all(p.grad.dtype == torch.float32 and p.grad.abs().sum() > 0 for p in trainable.values())


def test_autocast_trains_in_bfloat16(llama, ids):
    model = peft.get_peft_model(llama, _config())
    exact = _logits(model, ids)
    with torch.autocast("cpu", torch.bfloat16):
        out = model(ids, labels=ids)
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(torch.randn(2, 64)).dtype == torch.bfloat16
    assert (out.logits.float() - exact).abs().max() < 0.05
    out.loss.backward()
    assert all(p.grad.dtype == torch.float32 for p in _trainable(model).values())


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_gives_the_same_gradients(ids, reentrant, make_llama):
    gradients = []
    for checkpointing in (False, True):
        model = peft.get_peft_model(make_llama(), _config())
        for p in _trainable(model).values():
            nn.init.constant_(p, 0.01)
        model.train()
        if checkpointing:
            model.enable_input_require_grads()
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model(ids, labels=ids).loss.backward()
        gradients.append({n: p.grad for n, p in _trainable(model).items()})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient)


class Int8Linear(nn.Module):
    """Row-wise int8 weights: stands for the quantised layers that have no plain weight to widen or merge."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        scale = linear.weight.detach().abs().amax(1, keepdim=True) / 127
        self.register_buffer("weight", (linear.weight.detach() / scale).round().to(torch.int8))
        self.register_buffer("scale", scale)

    def forward(self, x):
        return x @ (self.weight * self.scale).t().to(x.dtype)


def test_quantised_base_trains_beside_its_weights(llama, ids):
    for parent in [layer.self_attn for layer in llama.model.layers]:
        parent.q_proj = Int8Linear(parent.q_proj)
    quantised = _logits(llama, ids)
    model = peft.get_peft_model(llama, _config(placement="along", target_modules=["q_proj"]))
    assert (_logits(model, ids) - quantised).abs().max() > 1e-3
    with model.disable_adapter():
        assert torch.equal(_logits(model, ids), quantised)
    model(ids, labels=ids).loss.backward()
    assert all(p.grad.abs().sum() > 0 for p in _trainable(model).values())
    with pytest.raises(UserError, match="Int8Linear has no plain weight to merge into"):
        model.merge_adapter()
    with pytest.raises(UserError, match="is quantised; use 'random'"):
        choose_slices(llama, _config(offset_rule="weight", target_modules=["q_proj"]))


def test_hooks_on_the_base_layer_still_run(llama, ids):
    model = peft.get_peft_model(llama, _config(target_modules=["q_proj"]))
    expected, calls = _logits(model, ids), []
    base = model.base_model.model.model.layers[0].self_attn.q_proj.base_layer
    base.register_forward_hook(lambda *_: calls.append(1))
    torch.testing.assert_close(_logits(model, ids), expected, rtol=0, atol=1e-6)
    assert calls == [1]


def test_weight_rule_takes_the_heaviest_window(llama):
    name = "model.layers.0.self_attn.o_proj"
    llama.get_submodule(name).weight.data[24:32] *= 50
    slices = choose_slices(llama, _config(offset_rule="weight", rank_equivalent=4, width_multiple=8))
    assert slices[name].offset == 24
    assert slices[name].width == 8


def test_gradient_rule_needs_data_and_follows_it(llama, ids, make_llama):
    config = _config(offset_rule="gradient", offset_multiple=1, target_modules=["o_proj", "gate_proj"])
    with pytest.raises(UserError, match=r"choose_slices\(model, config, batches\)"):
        peft.get_peft_model(llama, config)
    flags = {n: p.requires_grad for n, p in llama.named_parameters()}
    batches = [{"input_ids": ids, "labels": ids}, {"input_ids": ids[:1], "labels": ids[:1]}]
    energy = gradient_energy(llama, config, batches)
    assert {n: p.requires_grad for n, p in llama.named_parameters()} == flags
    assert all(p.grad is None for p in llama.parameters())

    expected = {name: 0.0 for name in energy}
    for batch in batches:
        llama.zero_grad()
        llama(**batch).loss.backward()
        for name in energy:
            other = 1 if name.endswith("o_proj") else 0
            expected[name] += llama.get_submodule(name).weight.grad.double().square().sum(other)
    for name, values in energy.items():
        torch.testing.assert_close(torch.tensor(values), expected[name], rtol=1e-4, atol=1e-12)

    slices = choose_slices(llama, config, batches)
    model = peft.get_peft_model(llama, config)
    assert model.peft_config["default"].get_slices() == slices
    with pytest.raises(UserError, match="got no batches"):
        choose_slices(make_llama(), _config(offset_rule="gradient"), [])


def test_siblings_share_columns(llama):
    model = peft.get_peft_model(llama, _config(seed=4))
    attention = model.base_model.model.model.layers[1].self_attn
    offsets = {getattr(attention, n).tessa_slices["default"].offset for n in ("q_proj", "k_proj", "v_proj")}
    assert len(offsets) == 1


def test_targets_by_layer_regex_and_all_linear(llama):
    config = _config(target_modules=["q_proj", "v_proj"], layers_to_transform=[1])
    assert sorted(choose_slices(llama, config)) == [
        "model.layers.1.self_attn.q_proj",
        "model.layers.1.self_attn.v_proj",
    ]
    assert len(choose_slices(llama, _config(target_modules=r".*\.0\.mlp\..*_proj"))) == 3
    assert len(choose_slices(llama, _config(target_modules="all-linear"))) == 14


def test_unmatched_budget_is_said(llama):
    with pytest.warns(UserWarning, match=r"not matched with LoRA's(.|\n)*k_proj .*not matched"):
        peft.get_peft_model(llama, _config(placement="along", rank_equivalent=4, target_modules=["k_proj"]))


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"placement": "beside"}, "allowed: across, along"),
        ({"placement": {"q_proj": "up"}}, "placement 'up'"),
        ({"offset_rule": "best"}, "allowed: first, random, weight, gradient"),
        ({"rank_equivalent": 0}, "must be positive"),
        ({"shards": 0}, "at least 1"),
        ({"slices": {"a.q_proj": {"axis": "in"}}}, "a.q_proj: slice keys"),
    ],
)
def test_config_refusals(kwargs, message):
    with pytest.raises(UserError, match=message):
        _config(**kwargs)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"target_modules": ["lm_head"]}, "'lm_head' is not one that TESSA knows how to shard"),
        ({"target_modules": ["self_attn"]}, "'model.layers.0.self_attn' is a LlamaAttention"),
        ({"target_modules": ["qkv"]}, r"match nothing .*'down_proj'"),
        ({"placement": "along", "shards": 5}, "q_proj': 5 shards do not divide"),
        (
            {"slices": {"model.layers.0.self_attn.q_proj": Slice("in", 0, 8, 1, 32, 32)}},
            r"slice of a \[32, 32\] weight, but the layer's is \[64, 64\]",
        ),
        (
            {"slices": {"model.layers.9.mlp.up_proj": Slice("in", 0, 8, 1, 128, 64)}},
            "lacks: ..model.layers.9",
        ),
    ],
)
def test_model_refusals(llama, kwargs, message):
    with pytest.raises(UserError, match=message):
        peft.get_peft_model(llama, _config(**kwargs))
