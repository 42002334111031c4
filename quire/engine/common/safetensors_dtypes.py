"""Data types of safetensors files."""

FLOAT_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
"""Bytes per element of the dtypes that the loader casts to the model's dtype."""
DTYPE_BYTES = {
    **FLOAT_BYTES,
    "I64": 8,
    "U64": 8,
    "I32": 4,
    "U32": 4,
    "I16": 2,
    "U16": 2,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
}
