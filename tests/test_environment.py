"""What is refused before a run starts."""

import dataclasses

import pytest
import torch

from graphmoe.config import ConfigError, ModelConfig, RunConfig
from graphmoe.environment import check_memory


def test_a_model_larger_than_the_memory_is_refused_with_the_sizes():
    small = RunConfig()
    check_memory(small, torch.device("cpu"))
    huge = dataclasses.replace(small, model=ModelConfig(num_layers=10_000, num_experts=512))
    with pytest.raises(ConfigError, match=r"10000 has [\d,]+ parameters.* GiB, and this cpu has .* GiB"):
        check_memory(huge, torch.device("cpu"))
