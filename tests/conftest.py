"""Settings for all tests."""

import torch

# Tiny models gain nothing from a second thread, and lose much where tests share the cores with servers they started.
torch.set_num_threads(1)
