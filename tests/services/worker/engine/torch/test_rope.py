"""Frequencies and scale of every rotary embedding are those that transformers computes in float32."""

from typing import Any

import pytest
import torch
from transformers import Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from services.worker.engine.torch.rope import rope_tables
from services.worker.engine.torch.rope_config import Rope, read_rope

HEAD_DIM, CONTEXT = 128, 32_768


def rope_of(parameters: dict[str, Any]) -> Rope:
    return read_rope({"rope_parameters": parameters, "max_position_embeddings": CONTEXT})


@pytest.mark.parametrize(
    "parameters",
    [
        {"rope_type": "linear", "factor": 2.0},
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        {"rope_type": "yarn", "factor": 4.0},
        {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 4096, "truncate": False},
        {
            "rope_type": "yarn",
            "factor": 8.0,
            "original_max_position_embeddings": 4096,
            "mscale": 1.0,
            "mscale_all_dim": 0.7,
            "beta_fast": 24,
        },
    ],
    ids=["linear", "llama3", "yarn", "yarn untruncated", "yarn with mscale"],
)
def test_scaled_embeddings_are_those_of_transformers(parameters: dict[str, Any]) -> None:
    parameters = parameters | {"rope_theta": 1e6}
    config = Qwen3Config(head_dim=HEAD_DIM, max_position_embeddings=CONTEXT, rope_parameters=dict(parameters))
    frequencies, scale = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config)
    cos_PD, sin_PD = rope_tables(rope_of(parameters), HEAD_DIM, 2, torch.float64)
    angles = torch.atan2(sin_PD[1], cos_PD[1])[: HEAD_DIM // 2]
    assert torch.allclose(angles, frequencies.double(), rtol=1e-6, atol=0)
    assert torch.allclose(cos_PD[0], torch.full((HEAD_DIM,), scale, dtype=torch.float64))
