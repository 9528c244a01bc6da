"""Settings that every test shares."""

import pytest
import torch
from hypothesis import settings

settings.register_profile("steady", deadline=None, derandomize=True, max_examples=40)
settings.load_profile("steady")


@pytest.fixture(autouse=True)
def _same_start() -> None:
    """Models and data that a test makes are the same in every run; private noise is not."""
    torch.manual_seed(0)
