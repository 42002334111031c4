"""`quire quantize`: writes a quantized checkpoint in compressed-tensors format, which other programs read too."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from quire.engine.checkpoint.model_resolver import read_model_config, resolve_model
from quire.engine.common.errors import ConfigError, ModelError
from quire.engine.families import decoder_model_types, find_decoder_family
from quire.engine.text.tokenizer import Tokenizer
from quire.server.cli.flags import build_parser
from quire.server.cli.quantize.calibration import read_tokenized_samples
from quire.server.cli.unknown_flags import parse_flags

QUANTIZATION_FORMATS = ("int8", "w8a8", "int4", "fp8")
"""w8a8 is an alias of int8."""
_DEFAULT_STRENGTH = 0.5
"""The value that SmoothQuant uses for most models."""


def main(argv: Sequence[str], started: float) -> int:
    args = parse_flags(
        build_parser(
            "quire quantize",
            __doc__,
            {
                "model": {"metavar": "MODEL", "help": "directory or hub id of floating-point weights"},
                "out": {"metavar": "OUT", "type": Path, "help": "directory to create"},
                "--format": {
                    "choices": QUANTIZATION_FORMATS,
                    "required": True,
                    "help": "format of the layers' linears; w8a8 is another name of int8",
                },
                "--smooth": {
                    "metavar": "FILE",
                    "type": Path,
                    "help": "apply SmoothQuant first, with these samples: a .jsonl file with text, prompt or messages, "
                    "or a text file",
                },
                "--smooth-strength": {
                    "metavar": "NUMBER",
                    "type": float,
                    "default": _DEFAULT_STRENGTH,
                    "help": f"share of the activations' range that weights take, 0 to 1 (default {_DEFAULT_STRENGTH})",
                },
                "--revision": {"metavar": "TEXT", "help": "branch, tag or commit of a hub id"},
            },
        ),
        argv,
    )
    _check_output_folder(args.out)
    path = resolve_model(args.model, args.revision)
    _check_quantizable(path)
    name, samples = args.format.replace("w8a8", "int8"), None
    program = [
        sys.executable,
        "-P",
        "-m",
        "quire.engine.worker.checkpoint_writer.quantize_checkpoint",
        str(path),
        str(args.out),
        name,
    ]
    if args.smooth is not None:
        samples = _tokenized_samples_json(args.smooth, args.smooth_strength, name, path)
        program.append(str(args.smooth_strength))
    status = subprocess.run(program, input=samples, text=True).returncode
    if status < 0:  # for example, killed for lack of memory
        print(f"quire quantize: it was ended by {signal.Signals(-status).name}", file=sys.stderr)
    return 1 if status < 0 else status


def _tokenized_samples_json(file: Path, strength: float, name: str, path: Path) -> str:
    if name != "int8":
        raise ConfigError(f"smooth: {name} does not round activations to integers: --format int8", param="smooth")
    if not 0 <= strength <= 1:
        raise ConfigError(f"smooth_strength: {strength:g} is not in 0 to 1", param="smooth_strength")
    config = read_model_config(path)
    tokenizer = Tokenizer.from_pretrained(path, model_vocab_size=config.vocab_size)
    return json.dumps(read_tokenized_samples(file, tokenizer, config.max_position))


def _check_output_folder(out: Path) -> None:
    if out.is_dir() and not out.is_symlink():
        if any(out.iterdir()):
            raise ConfigError(f"OUT: {out} exists and is not empty")
    elif os.path.lexists(out):
        raise ConfigError(f"OUT: {out} exists and is not a directory")
    if not out.absolute().parent.is_dir():
        raise ConfigError(f"OUT: there is no directory {out.absolute().parent}")


def _check_quantizable(path: Path) -> None:
    if not path.is_dir():
        raise ModelError(f"model: {path.name} is already quantized; give the checkpoint from which it was made")
    config = read_model_config(path)
    if quantization_config := config.raw.get("quantization_config"):
        raise ModelError(f"model: its weights are quantized already ({quantization_config.get('quant_method')})")
    if (family := find_decoder_family(config.model_type)) is None:
        known = ", ".join(decoder_model_types())
        raise ModelError(f"model: {config.model_type!r} does not belong to a family whose linears are known: {known}")
    if family.weight_names.stacked_experts is not None:
        raise ModelError(
            f"model: {config.model_type!r} stores its experts as no compressed-tensors checkpoint can; "
            "`quire serve --quantization` makes few bits of them while it loads"
        )
