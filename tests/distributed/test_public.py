"""What a user calls, on a target that is read into the shards of eight devices: the answers of one device."""

from __future__ import annotations

from typing import Any

import jax
import pytest

import specjax
from specjax.checkpoints import save_target
from specjax.models import Target
from specjax.testing import tiny_target

MESH = {"data": 2, "fsdp": 4}
PROMPTS = [f"Count to {n}." for n in (3, 12, 7, 110, 4, 9, 11, 2)]
DRAFTERS: dict[str, dict[str, Any]] = {"prompt_lookup": {"num_nodes": 3}, "early_exit": {"exit_layer": 1}}


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> tuple[Target, Target]:
    """The same model on one device and on all."""
    folder = tmp_path_factory.mktemp("model") / "target"
    save_target(tiny_target(), folder)
    return specjax.load_target(folder), specjax.load_target(folder, mesh=MESH)


def test_it_is_really_split(targets: tuple[Target, Target]) -> None:
    assert targets[0].placement is None
    kernel = targets[1].params["layers"][0]["attn"]["q"]["kernel"]
    assert len(kernel.addressable_shards) == jax.device_count() == 8
    assert kernel.addressable_shards[0].data.size * 4 == kernel.size


@pytest.mark.parametrize(
    ("name", "temperature", "batch"), [("prompt_lookup", 1.0, 8), ("early_exit", 0.0, 6), ("early_exit", 1.0, 1)]
)
def test_answers_are_those_of_one_device(
    targets: tuple[Target, Target], name: str, temperature: float, batch: int
) -> None:
    prompts, found = PROMPTS[:batch], []
    for target in targets:
        drafter = specjax.load_drafter(name, target, **DRAFTERS[name])
        options: dict[str, Any] = {"temperature": temperature, "max_new_tokens": 12, "seed": 3}
        results = specjax.generate(target, drafter, prompts, batch=batch, **options)
        streamed = "".join(piece for piece, _ in specjax.stream(target, drafter, prompts[0], **options))
        assert streamed == results[0].text
        found.append([result.completion.tokens for result in results])
    assert found[0] == found[1]


def test_it_is_measured_and_certified_there(targets: tuple[Target, Target]) -> None:
    drafter = specjax.load_drafter("prompt_lookup", targets[1], num_nodes=2)
    rows = specjax.benchmark(targets[1], drafter, prompts=PROMPTS[:1], max_new_tokens=8)
    assert all(row["matches_baseline"] and row["layout"] == "plain" for row in rows if row["category"] == "all")
    found = specjax.certify(targets[1], drafter, prompts=PROMPTS[:1], max_new_tokens=8, tv=0.4, rows=16, show=False)
    assert [row.verdict for row in found] == ["pass", "pass"]


def test_packed_weights_are_for_one_device(targets: tuple[Target, Target]) -> None:
    drafter = specjax.load_drafter("prompt_lookup", targets[1])
    with pytest.raises(
        ValueError, match="layout='packed' is for one CPU device, and the target lies on a mesh of data=2"
    ):
        specjax.certify(targets[1], drafter, layout="packed")
