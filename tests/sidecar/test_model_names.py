"""What people call the model of a namespace, whatever its JSON is."""

from __future__ import annotations

from typing import Any

import pytest

from sidecar.sessions.model_names import layers_of, model_name


@pytest.mark.parametrize(
    ("namespace", "served_as", "name"),
    [
        ({"model": {"name": "org/model", "revision": "1"}}, "", "org/model"),
        ({"model": {"name": "org/model"}}, "alias", "org/model"),
        ({"model": {"digest": "0123456789abcdef"}}, "/models/llama", "/models/llama"),
        ({"model": {"digest": "0123456789abcdef"}}, "", "files 0123456789ab"),
        ({"model": {"sampled": "0123456789abcdef"}}, "", "files 0123456789ab"),
        # vLLM's own offloading: the tier alone, and the spec that sets it up.
        ({"model": "org/model", "identity": "llama, rev 1"}, "", "org/model"),
        ({"model": "", "identity": {"model": {"name": "org/model"}}}, "", "org/model"),
        ({"model": "", "identity": {"model": {"digest": "ab" * 32}}}, "llama", "llama"),
        ({}, "", "-"),
        ({"model": 7, "identity": ["x"]}, "", "-"),
        ({"model": {"name": "a\x1b[31m\nb"}}, "", "a?[31m?b"),
    ],
)
def test_there_is_a_name(namespace: dict[str, Any], served_as: str, name: str) -> None:
    assert model_name(namespace, served_as) == name


def test_a_name_is_bounded() -> None:
    assert len(model_name({"model": {"name": "x" * 10_000}})) == 256


def test_a_group_of_layers_says_which_part_it_is() -> None:
    assert layers_of({"group": ["a", "b"], "layers": 30}) == "2 of 30 layers"
    assert layers_of({"group": ["a"], "layers": "\x1b[2J"}) == "1 of ?[2J layers"
    assert layers_of({"layers": 30}) == layers_of({"group": 7}) == ""
