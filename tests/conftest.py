"""Settings for all tests."""

import pytest
import torch

# Tiny models gain nothing from a second thread, and lose much where tests share the cores with servers they started.
torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no NVIDIA GPU here"))
