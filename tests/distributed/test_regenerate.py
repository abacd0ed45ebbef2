"""Answers that the devices of one host make together: those of one device."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import pytest

from specjax import build
from specjax.checkpoints import save_target
from specjax.testing import tiny_target
from specjax.training.data import Answer, read_answers
from specjax.training.regenerate import RegenerateConfig, read_prompts, regenerate

MESHES = {"rows": {"data": -1}, "rows and weights": {"data": 2, "fsdp": 4}}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("regenerate")
    save_target(tiny_target(), folder / "target")
    lines = [json.dumps({"source": "s", "id": i, "prompt": "count " * (1 + i % 4)}) for i in range(11)]
    (folder / "prompts.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def answers(place: Path, name: str, temperature: float, **mesh: int) -> list[Answer]:
    """As the program makes them: a process's own devices, and fewer prompts in the last part than rows."""
    config = build.load_config("configs/regenerate.py", str(place / "target"))
    config.layout, config.drafter = "plain", {"name": "prompt_lookup", "num_nodes": 2}
    config.mesh.update(mesh)
    target = build.placed_target(config, jax.local_devices())
    assert (target.placement is None) == (not mesh)
    loop, weights = build.regeneration_loop(config, target, temperature)
    decode = RegenerateConfig(temperature=temperature, max_new_tokens=10, batch=8, part=9)
    prompts = read_prompts(place / "prompts.jsonl")
    assert regenerate(prompts, target, loop, weights, place / name, decode) == len(prompts)
    assert regenerate(prompts, target, loop, weights, place / name, decode) == 0
    return sorted(read_answers(place / name), key=lambda answer: int(answer.id))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_answers_are_those_of_one_device(place: Path, temperature: float) -> None:
    alone = answers(place, f"one {temperature}", temperature)
    assert len(alone) == 11 and len({answer.response_ids for answer in alone}) > 1
    for name, mesh in MESHES.items():
        assert answers(place, f"{name} {temperature}", temperature, **mesh) == alone


def test_a_mesh_is_of_the_devices_that_are_given(place: Path) -> None:
    config = build.load_config("configs/regenerate.py", str(place / "target"))
    config.mesh.data = -1
    few = build.placed_target(config, jax.local_devices()[:2])
    assert few.placement is not None and few.placement.mesh.size == 2
    assert build.placed_target(config, jax.local_devices()[:1]).placement is None
    config.mesh.data = 8
    with pytest.raises(ValueError, match="needs 8 devices, but there are 2"):
        build.placed_target(config, jax.local_devices()[:2])
