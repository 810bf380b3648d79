"""Adapter folders with random non-zero weights at a matched budget, made once and read by every backend.

`AdapterSet` is the parent-safe description; ``python -m experiments.adapters SPEC.json FOLDER`` makes the
folders in a child process, since writing them needs torch. Weights are scaled so that an adapter changes the
outputs clearly and does not drown the base model.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from experiments.offload import publish, run_module
from tessa.budget import bd_lora_params, lora_params
from tessa.errors import UserError
from tessa.offsets import plan_slices
from tessa.slices import Slice, parallel_of

LAYOUT = 2  # part of the folder's hash: raise it when the same description makes other weights
RELATIVE_STRENGTH = 0.3
"""Size of an adapter's output relative to the base layer's, for unit inputs."""


@dataclass(frozen=True)
class AdapterSet:
    """What determines a set of adapters.

    Attributes:
        format: "lora", "bd_lora" or "tessa".
        shapes: module path -> [d_out, d_in] of every adapted projection.
        ranks: rank (rank-equivalent for TESSA) of each adapter; its length is the number of adapters.
        blocks: blocks of BD-LoRA, the serving TP degree.
        weight_std: standard deviation that the adapters are scaled to, the one that Llama's projections start from; the
            base model's own is not looked at.
    """

    format: str
    shapes: Mapping[str, tuple[int, int]]
    ranks: tuple[int, ...]
    placement: str = "across"
    offset: str = "first"
    shards: int = 8
    blocks: int = 1
    seed: int = 0
    weight_std: float = 0.02

    @property
    def hash(self) -> str:
        content = {"layout": LAYOUT, **asdict(self)}
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def names(self) -> list[str]:
        return [adapter_name(i) for i in range(len(self.ranks))]

    def slices(self, index: int) -> dict[str, Slice]:
        """A TESSA adapter's slices by module path. Raises UserError where the description does not fit the model."""
        return plan_slices(
            self.shapes,
            rank=self.ranks[index],
            placement=self.placement,
            shards=self.shards,
            rule=self.offset,
            seed=self.seed + index,
        )

    def parameters(self, index: int) -> int:
        """How many parameters an adapter really has. Raises UserError as `slices`, or where blocks do not fit."""
        rank = self.ranks[index]
        if self.format == "tessa":
            return sum(s.num_params for s in self.slices(index).values())
        if self.format == "bd_lora":
            return sum(
                bd_lora_params(rank, *shape, parallel_of(module), self.blocks)
                for module, shape in self.shapes.items()
            )
        return int(sum(lora_params(rank, *shape) for shape in self.shapes.values()))


def adapter_name(index: int) -> str:
    """Name of the adapter that a workload calls ``index``; the base model is ``base``."""
    return f"adapter-{index:04d}"


def ensure_adapters(spec: AdapterSet, cache: Path) -> list[Path]:
    """Folders of the set's adapters in ``cache``, made in a child process if they are not there.

    Raises:
        UserError: the description does not fit the model (the child's message).
    """
    target = cache / "adapters" / spec.hash
    if not target.is_dir():
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".making-") as scratch:
            description = Path(scratch) / "spec.json"
            description.write_text(json.dumps(asdict(spec)))
            made = Path(scratch) / "adapters"
            run_module("the adapters could not be made", "experiments.adapters", description, made)
            publish(made, target)
    return [target / name for name in spec.names]


def make(spec: AdapterSet, folder: Path) -> None:
    """Write every adapter of the set below ``folder``; needs torch, numpy and safetensors."""
    writers = {"lora": _write_lora, "bd_lora": _write_bd_lora, "tessa": _write_tessa}
    if spec.format not in writers:
        raise UserError(f"adapter format '{spec.format}' is unknown; allowed: {', '.join(writers)}")
    for index, rank in enumerate(spec.ranks):
        writers[spec.format](spec, index, rank, folder / adapter_name(index))


def _write_tessa(spec: AdapterSet, index: int, rank: int, folder: Path) -> None:
    import numpy as np
    import torch

    from tessa.adapter_io import write_adapter

    rng = np.random.default_rng([spec.seed, index])
    slices = spec.slices(index)
    deltas = {}
    for module, s in slices.items():
        # A slice touches width of d_in inputs (axis in) or of d_out outputs: an entry as large as the weight's
        # changes that share of the output by as much as the output itself.
        std = (
            spec.weight_std * (RELATIVE_STRENGTH * s.d_in / s.width) ** 0.5
            if s.axis == "in"
            else spec.weight_std
        )
        deltas[module] = torch.from_numpy(
            rng.standard_normal(s.delta_shape, dtype=np.float32) * np.float32(std)
        )
    write_adapter(
        folder,
        slices,
        deltas,
        rank_equivalent=rank,
        placement=spec.placement,
        shards=spec.shards,
        seed=spec.seed,
    )


def _write_lora(spec: AdapterSet, index: int, rank: int, folder: Path) -> None:
    _write_factors(
        spec,
        index,
        rank,
        folder,
        {module: ((rank, d_in), (d_out, rank)) for module, (d_out, d_in) in spec.shapes.items()},
        {},
    )


def _write_bd_lora(spec: AdapterSet, index: int, rank: int, folder: Path) -> None:
    """PEFT's layout: the block-diagonal factor is stored as its blocks side by side."""
    n = spec.blocks
    shapes: dict[str, tuple[tuple[int, int], tuple[int, int]]] = {}
    for module, (d_out, d_in) in spec.shapes.items():
        if parallel_of(module) == "column":
            shapes[module] = (rank, d_in), (d_out, rank // n)
        else:
            shapes[module] = (rank, d_in // n), (d_out, rank)
        if rank % n or d_out % n or d_in % n:
            raise UserError(
                f"BD-LoRA with {n} blocks needs a rank that {n} divides, got rank {rank} for {module}"
            )
    names = {module.rsplit(".", 1)[-1] for module in spec.shapes}
    use = {
        "target_modules_bd_a": sorted(m for m in names if parallel_of(m) == "row"),
        "target_modules_bd_b": sorted(m for m in names if parallel_of(m) == "column"),
        "nblocks": n,
        "match_strict": True,
    }
    _write_factors(spec, index, rank, folder, shapes, {"use_bdlora": use})


def _write_factors(
    spec: AdapterSet,
    index: int,
    rank: int,
    folder: Path,
    shapes: Mapping[str, tuple[tuple[int, int], tuple[int, int]]],
    extra: Mapping[str, Any],
) -> None:
    import numpy as np
    from safetensors.numpy import save_file

    rng = np.random.default_rng([spec.seed, index])
    tensors = {}
    for module, (a_shape, b_shape) in shapes.items():
        # B A has entries of std sqrt(inner) std_a std_b; the inner dimension of a block is b_shape[1].
        std = (spec.weight_std * (RELATIVE_STRENGTH / b_shape[1]) ** 0.5) ** 0.5
        for factor, shape in (("A", a_shape), ("B", b_shape)):
            key = f"base_model.model.{module}.lora_{factor}.weight"
            tensors[key] = rng.standard_normal(shape, dtype=np.float32) * np.float32(std)
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "inference_mode": True,
        "r": rank,
        "lora_alpha": rank,
        "target_modules": sorted({module.rsplit(".", 1)[-1] for module in shapes}),
        "bias": "none",
        "base_model_name_or_path": None,
        **extra,
    }
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2, sort_keys=True))


def main(argv: list[str]) -> int:
    description, folder = argv
    values = json.loads(Path(description).read_text())
    values["shapes"] = {module: tuple(shape) for module, shape in values["shapes"].items()}
    values["ranks"] = tuple(values["ranks"])
    try:
        make(AdapterSet(**values), Path(folder))
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
