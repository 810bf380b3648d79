from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

from experiments import models
from experiments.models import ModelSpec, check_parallel, ensure_model, load_named, load_spec
from tessa.errors import UserError


def values(model: str = "tiny", **changes: object) -> dict[str, object]:
    return yaml.safe_load((models.CONF / f"{model}.yaml").read_text()) | changes


def architecture(**changes: object) -> dict[str, object]:
    return {**values()["architecture"], **changes}  # type: ignore[dict-item]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def tiny(cache: Path) -> Path:
    return ensure_model(load_named("tiny_gqa"), cache)


@pytest.mark.parametrize("name", [n for n in models.known_models() if n != "local"])
def test_every_shipped_model_is_valid(name: str) -> None:
    spec = load_named(name)
    assert spec.name == name
    assert len(spec.linear_shapes()) == 7 * spec.num_layers
    check_parallel(spec, 2)


def test_parameter_counts_are_the_published_ones() -> None:
    """Billions of weights, embedding and head included, as the model cards state them."""
    published = {"llama3_1_8b": 8.03, "llama3_1_70b": 70.6, "qwen3_8b": 8.19, "qwen3_32b": 32.8}
    for name, billions in published.items():
        spec = load_named(name)
        count = sum(a * b for a, b in spec.linear_shapes().values()) + 2 * spec.vocab_size * spec.hidden_size
        assert count / 1e9 == pytest.approx(billions, rel=0.005), name


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sourc": "hub"}, "unknown key 'sourc'.*allowed"),
        ({"source": "web"}, "source='web'; allowed: generated, hub, path"),
        ({"weights": "hub"}, "weights='hub' with source=generated; allowed: random, dummy"),
        ({"weights": None}, "'weights' is missing"),
        ({"dtype": "fp32"}, "dtype='fp32'; allowed: auto, float32"),
        ({"tokenizer": "gpt2"}, "only value is 'generated'"),
        ({"name": "../x"}, "a name may hold"),
        ({"vocab_size": 100}, "vocab_size=100; at least 259"),
        ({"max_model_len": 4096}, "max_model_len=4096; allowed: 1 to .*1024"),
        ({"source": "hub", "weights": "dummy"}, "needs hub_id"),
        ({"architecture": architecture(head_dim=16)}, "head_dim=16; .*at least 32"),
        ({"architecture": architecture(num_key_value_heads=3)}, "8 heads cannot share 3 KV heads"),
        ({"architecture": architecture(model_type="qwen3")}, "only llama models can be generated"),
        ({"architecture": architecture(hidden_size="256")}, "hidden_size must be a positive integer"),
        ({"architecture": architecture(vocab_size=1024)}, "beside architecture"),
        ({"architecture": architecture(eos_token_id=5000)}, "eos_token_id=5000 lies outside"),
    ],
)
def test_mistakes_are_named(changes: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_spec(values(**changes))


def test_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(UserError, match=r"unknown model 'smal'; known: .*small, tiny, tiny_gqa"):
        load_named("smal")


@pytest.mark.parametrize(
    ("name", "allowed"),
    [
        ("tiny", [1, 2, 4, 8]),
        ("tiny_gqa", [1, 2, 4, 8]),
        ("small", [1, 2, 4, 8]),
        ("llama3_1_70b", [1, 2, 4, 8, 16, 32, 64]),
    ],
)
def test_allowed_parallel_degrees(name: str, allowed: list[int]) -> None:
    assert models.allowed_parallel(load_named(name)) == allowed


def test_parallel_degree_that_splits_a_head_is_refused() -> None:
    with pytest.raises(UserError, match=r"tp=3 does not fit model 'tiny'.*allowed: 1, 2, 4, 8"):
        check_parallel(load_named("tiny"), 3)
    # 12 heads over 4 ranks are whole, but 6 KV heads neither split over 4 nor repeat evenly.
    odd = load_spec(values(architecture=architecture(num_attention_heads=12, num_key_value_heads=6)))
    with pytest.raises(UserError, match="allowed: 1, 2, 3, 6, 12"):
        check_parallel(odd, 4)


def test_hash_follows_the_files_only() -> None:
    spec = load_named("tiny")
    assert replace(spec, seed=1).hash != spec.hash
    assert replace(spec, weights="dummy").hash != spec.hash
    assert replace(spec, dtype="bfloat16", max_model_len=64).hash == spec.hash
    assert replace(spec, weights="dummy", seed=1).hash == replace(spec, weights="dummy").hash


def test_model_folder_on_disk(tmp_path: Path, tiny: Path) -> None:
    local = values("local", path=str(tiny))
    spec = load_spec(local)
    assert (spec.hidden_size, spec.num_kv_heads, spec.vocab_size, spec.max_model_len) == (256, 2, 1024, 1024)
    assert ensure_model(spec, tmp_path) == tiny
    with pytest.raises(UserError, match=r"model\.path="):
        load_spec(values("local"))
    with pytest.raises(UserError, match="does not exist"):
        load_spec(values("local", path=str(tmp_path / "nowhere")))
    with pytest.raises(UserError, match=r"holds no config\.json"):
        load_spec(values("local", path=str(tmp_path)))
    (tmp_path / "config.json").write_text((tiny / "config.json").read_text())
    with pytest.raises(UserError, match=r"no \*\.safetensors"):
        load_spec(values("local", path=str(tmp_path)))
    assert load_spec(values("local", path=str(tmp_path), weights="dummy")).load_format == "dummy"
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match="cannot be used"):
        load_spec(values("local", path=str(tmp_path), weights="dummy"))


def test_cache_inside_the_repository_is_refused(repo_root: Path) -> None:
    with pytest.raises(UserError, match="inside the repository"):
        ensure_model(load_named("tiny"), repo_root / "models")
    assert not (repo_root / "models").exists()


def test_cache_folder_from_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TESSA_CACHE", str(tmp_path))
    assert models.default_cache() == tmp_path
    monkeypatch.delenv("TESSA_CACHE")
    assert models.default_cache() == Path.home() / ".cache" / "tessa-bench"


def test_complete_folder_is_taken_as_it_is(tiny: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a child was started for a model that is there")

    monkeypatch.setattr(subprocess, "run", refuse)
    assert ensure_model(load_named("tiny_gqa"), cache) == tiny


def test_failing_child_is_told_apart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def child(returncode: int) -> None:
        done = subprocess.CompletedProcess([], returncode, stdout="", stderr="gone wrong\n")
        monkeypatch.setattr(subprocess, "run", lambda *_, **__: done)

    child(2)
    with pytest.raises(UserError, match=r"^gone wrong$"):
        ensure_model(load_named("tiny"), tmp_path)
    child(1)
    with pytest.raises(RuntimeError, match=r"exit status 1:\ngone wrong"):
        ensure_model(load_named("tiny"), tmp_path)


def test_command_line_reports_a_mistake_without_traceback(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "experiments.models", "nosuch", str(tmp_path)]
    run = subprocess.run(command, cwd=models.REPO, capture_output=True, text=True)
    assert run.returncode == 2
    assert run.stderr.startswith("unknown model 'nosuch'")


def test_interrupted_build_leaves_no_folder_and_the_next_one_cleans_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from experiments import model_build

    spec = load_named("tiny")
    folder = models.model_folder(spec, tmp_path)

    def interrupt(_: ModelSpec) -> dict[str, object]:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(model_build, "random_weights", interrupt)
        with pytest.raises(KeyboardInterrupt):
            model_build.build(spec, folder)
    assert [p.name for p in folder.parent.iterdir()] == [f".{folder.name}.lock"]
    # What a killed process leaves, as nothing cleans up after it.
    stale = folder.parent / f".{folder.name}.tmp-killed"
    stale.mkdir()
    assert model_build.build(spec, folder) == folder
    assert not stale.exists()
    assert {p.name for p in folder.iterdir()} >= {"config.json", "model.safetensors", "tokenizer.json"}


def test_weights_depend_on_the_seed_alone() -> None:
    import numpy as np

    from experiments.model_build import random_weights

    spec = load_named("tiny")
    first, second = random_weights(spec), random_weights(spec)
    assert all(np.array_equal(first[k], second[k]) for k in first)
    other = random_weights(replace(spec, seed=1))
    assert not np.allclose(first["lm_head.weight"], other["lm_head.weight"])
    # Two tensors of one shape must not be copies of each other.
    names = [f"model.layers.{i}.self_attn.{p}_proj.weight" for i in (0, 1) for p in "qkv"]
    assert len({first[n].tobytes() for n in names}) == len(names)


def test_generated_model_loads_completely_and_its_logits_are_lively(tiny: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    prompts = torch.randint(3, 1024, (4, 48), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = model(prompts).logits
    assert torch.isfinite(logits).all()
    log_probs = logits.log_softmax(-1)
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    # Neither uniform (log of 1024 is 6.9 nats) nor one token that always wins.
    assert 2.0 < entropy.mean() < 0.9 * math.log(1024)
    assert logits.argmax(-1).unique().numel() > 100
    # The prediction must depend on the far past, or an error in the KV cache would go unseen.
    changed = prompts.clone()
    changed[:, :8] = prompts[:, :8].flip(-1)
    with torch.no_grad():
        moved = (model(changed).logits[:, -1].log_softmax(-1) - log_probs[:, -1]).abs().mean()
    assert moved > 0.05


def test_tokenizer_covers_every_id_and_keeps_text(tiny: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny)
    assert len(tokenizer) == 1024
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1, 2)
    text = "Größe = 3\n\tπ w300"
    ids = tokenizer(text, add_special_tokens=False).input_ids
    assert len(ids) == len(text.encode())
    assert tokenizer.decode(ids) == text
    assert all(tokenizer.decode([i]) for i in range(1024))


@pytest.mark.parametrize("name", ["llama3_1_8b", "qwen3_8b"])
def test_dummy_weights_need_no_hub(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    from transformers import AutoConfig

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    spec = load_named(name)
    folder = ensure_model(spec, tmp_path)
    assert sorted(p.name for p in folder.iterdir()) == [
        "config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    config = AutoConfig.from_pretrained(folder)
    assert config.architectures == spec.architecture["architectures"]
    assert config.vocab_size == spec.vocab_size
    for key in models.SIZES:
        assert getattr(config, key) == spec.architecture[key]
    rope = {"rope_theta": spec.architecture["rope_theta"], **spec.architecture.get("rope_scaling", {})}
    assert rope.items() <= config.rope_parameters.items()
    assert config.dtype == torch.bfloat16
    vocab = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    assert len(vocab) == spec.vocab_size
    assert vocab["<eos>"] == spec.architecture["eos_token_id"]


def test_hub_without_network_names_the_ways_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    spec = replace(load_named("qwen3_8b"), weights="hub")
    with pytest.raises(UserError, match=r"Qwen/Qwen3-8B could not be downloaded(.|\n)*model.weights=dummy"):
        ensure_model(spec, tmp_path)


def test_spec_survives_the_way_to_the_child() -> None:
    for name in ("tiny", "llama3_1_8b"):
        spec = load_named(name)
        assert load_spec(json.loads(json.dumps(asdict(spec)))) == spec


def test_spec_from_hydra_is_the_same() -> None:
    for name in ("tiny", "llama3_1_8b"):
        spec = load_spec(OmegaConf.create(values(name)))  # type: ignore[arg-type]
        assert spec == load_named(name)
        assert spec.hash == load_named(name).hash


def test_child_follows_an_override(cache: Path) -> None:
    """The child builds the specification it is handed, not the file of that name."""
    spec = replace(load_named("tiny"), seed=7)
    folder = ensure_model(spec, cache)
    assert folder == models.model_folder(spec, cache)
    assert os.path.isfile(folder / "model.safetensors")
