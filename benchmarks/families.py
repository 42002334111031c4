"""Model families against Quire's Llama of the same shape, in one process: steps of 1 and of 8 sequences, and prompts.

    OMP_WAIT_POLICY=passive python -m benchmarks.families [qwen2 phi3 ...] [--rounds 9] [--layers 12]

Rows show a family's time relative to the Llama's (median over rounds) and its parameters per token relative to the
Llama's. Two Llama rows show the noise. Random weights in bfloat16, hidden size 768, 12 heads, 4 KV heads; 12 in both
models for families without GQA. `quire serve` sets the variable for its engine: otherwise PyTorch's threads spin too.
"""

from __future__ import annotations

from collections import defaultdict
from statistics import median
from typing import Any

from benchmarks.common.engines import at_once, dummy, folder_of, random_prompt, request
from benchmarks.common.options import options
from quire.engine.checkpoint.sizes.model_sizes import read_model_sizes
from quire.engine.common.errors import QuireError
from quire.engine.common.types import EngineCoreRequest
from quire.engine.engine_core import EngineCore
from tests.tiny_models import FAMILIES, SHAPE

VOCAB = 8000
WIDE: dict[str, Any] = {
    **{"vocab_size": VOCAB, "hidden_size": 768, "intermediate_size": 2048, "num_attention_heads": 12},
    **{"num_key_value_heads": 4, "head_dim": 64, "max_position_embeddings": 2048, "torch_dtype": "bfloat16"},
}
SMALL = ("layer_types", "sliding_window", "num_kv_shared_layers", "rope_parameters", "layer_rope_theta")
"""Fields that fit only the tests' small shape."""
MIDDLES = ("n_inner", "ffn_dim", "ffn_hidden_size")
"""Other names of intermediate_size."""
LLAMA, ALL_KEYS = "llama", "llama of 12 key heads"
WORKS = ("1 sequence", "8 sequences", "prompt of 512")


def config_of(family: str, layers: int) -> dict[str, Any]:
    told = {LLAMA: FAMILIES["llama"], ALL_KEYS: FAMILIES["llama"]}.get(family) or FAMILIES[
        family.removesuffix(" again")
    ]
    made = {**SHAPE, **told, **WIDE, "num_hidden_layers": layers}
    grouped = told.get("num_key_value_heads", 2) == 2 and family != ALL_KEYS
    if not grouped:
        made["num_key_value_heads"] = 12
    if family in ("granite_swa", "exaone4", "olmo3"):  # given per layer
        made |= {"sliding_window": 2048}
    made |= {key: WIDE["intermediate_size"] for key in MIDDLES if key in told}
    return {key: value for key, value in made.items() if key not in SMALL}


def engine_of(config: dict[str, Any]) -> EngineCore:
    with folder_of(config) as folder:
        return dummy(folder, num_kv_blocks=400, dtype="bfloat16", enable_prefix_caching=False)


def work(engine: EngineCore, name: str) -> tuple[float, float, float]:
    """Seconds of a step of 1 sequence, a step of 8, and a prompt."""

    def asked(key: str, length: int, tokens: int) -> EngineCoreRequest:
        return request(key, random_prompt(length, key, range(10, VOCAB)), tokens)

    (one,) = at_once(engine, [asked(name, 32, 33)]).values()
    many = at_once(engine, [asked(f"{name}-{i}", 32, 25) for i in range(8)])
    (long,) = at_once(engine, [asked(f"{name} long", 512, 1)]).values()
    return median(one.gaps), median(gap for each in many.values() for gap in each.gaps if gap), long.latency


def main() -> None:
    families = {"nargs": "*", "default": list(FAMILIES)}
    args = options(__doc__, {"families": families, "--rounds": 9, "--layers": 12})
    engines: dict[str, EngineCore] = {}
    sizes: dict[str, int] = {}
    keyed: dict[str, int] = {}
    for family in (LLAMA, ALL_KEYS, "llama again", *args.families):
        config = config_of(family, args.layers)
        try:
            engines[family] = engine_of(config)
        except QuireError as error:
            print(f"{family}: not made: {error}", flush=True)
            continue
        sizes[family], keyed[family] = read_model_sizes(config).active_parameters, config["num_key_value_heads"]
    times: dict[str, list[tuple[float, float, float]]] = defaultdict(list)
    for turn in range(args.rounds + 1):
        for family, engine in engines.items():
            took = work(engine, f"{family} {turn}")
            if turn:  # the first warms up
                times[family].append(took)
    print(f"{'':26}{'parameters':>11}" + "".join(f"{name:>16}" for name in WORKS))
    for family in engines:
        llama = LLAMA if keyed[family] == WIDE["num_key_value_heads"] else ALL_KEYS
        pairs = list(zip(times[family], times[llama], strict=True))
        shares = [median(ours[k] / theirs[k] for ours, theirs in pairs) for k in range(len(WORKS))]
        print(f"{family:26}{sizes[family] / sizes[llama]:11.3f}" + "".join(f"{share:16.3f}" for share in shares))


if __name__ == "__main__":
    main()
