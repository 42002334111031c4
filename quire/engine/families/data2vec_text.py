"""Data2Vec's text model (Baevski et al., 2022): RoBERTa's layers."""

from quire.engine.families.base import EncoderFamily
from quire.engine.families.roberta import ROBERTA, build_roberta_spec

DATA2VEC_TEXT = EncoderFamily(model_types=("data2vec-text",), defaults=ROBERTA.defaults, build_spec=build_roberta_spec)
