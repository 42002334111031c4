"""Parameter shapes of specs equal those of the modules and the parameter counts of transformers' checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from quire.engine.architecture.parameter_shapes import count_parameters
from quire.engine.checkpoint.family_spec import build_encoder_spec
from quire.engine.checkpoint.model_resolver import read_model_config
from quire.engine.checkpoint.tensor_headers import read_checkpoint_size
from quire.engine.encoders.encoder import Encoder
from quire.engine.layers.schemes import UnquantizedScheme
from quire.engine.layers.sublayer import BuildContext
from quire.engine.models import decoder_spec
from quire.engine.models.decoder import Decoder
from quire.kernels.reference import ReferenceBackend
from tests import tiny_encoders, tiny_models

CPU = torch.device("cpu")
NOT_LOADED = {"apertus": 3, "opt": 2 * 64}
"""Numbers in a checkpoint that no module loads: an eps of each layer's xIELU (apertus); the first two positions (opt).
"""


@pytest.mark.few(12)
@pytest.mark.parametrize("family", tiny_models.FAMILIES)
def test_decoder_spec_parameter_shapes_equal_module_and_checkpoint(family: str, tmp_path: Path) -> None:
    path = tiny_models.save_tiny_model(tmp_path, family)
    spec = decoder_spec(read_model_config(path))
    backend = ReferenceBackend()
    scheme = UnquantizedScheme(backend, torch.float32)
    context = BuildContext(backend, scheme, spec.hidden_size, torch.float32, torch.float32, CPU, max_model_len=64)
    shapes = spec.parameter_shapes()
    assert shapes == {name: each.shape for name, each in Decoder(spec, context, lambda: None).parameters().items()}
    assert count_parameters(shapes) + NOT_LOADED.get(family, 0) == read_checkpoint_size(path).num_floats


@pytest.mark.parametrize("family", tiny_encoders.ENCODERS)
def test_encoder_spec_parameter_shapes_equal_module(family: str, tmp_path: Path) -> None:
    spec = build_encoder_spec(read_model_config(tiny_encoders.save_tiny_encoder(tmp_path, family)))
    backend = ReferenceBackend()
    scheme = UnquantizedScheme(backend, torch.float32)
    placement = {"dtype": torch.float32, "device": CPU, "max_model_len": 64, "report_progress": lambda: None}
    parameters = Encoder(spec, backend, scheme, **placement).parameters()
    assert spec.parameter_shapes() == {name: tuple(each.shape) for name, each in parameters.items()}
