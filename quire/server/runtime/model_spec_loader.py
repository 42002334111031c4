from __future__ import annotations

from quire.engine.checkpoint.model_resolver import resolve_model, resolve_weights
from quire.engine.checkpoint.overrides import load_model_config, read_sampling_defaults, resolve_model_with_overrides
from quire.engine.checkpoint.pooling import read_pooling_and_tasks
from quire.engine.checkpoint.tensor_headers import read_checkpoint_size
from quire.engine.gguf.file_names import GGUF_SUFFIX
from quire.engine.images.multimodal_prompt import make_multimodal_prompt_builder
from quire.engine.lora.target_modules import ModuleShapes, adaptable_modules
from quire.engine.text.null_tokenizer import load_tokenizer
from quire.server.adapter_registry import check_local_adapters
from quire.server.config import ServerConfig
from quire.server.served_model import ServedModelSpec


def load_served_model_spec(config: ServerConfig) -> tuple[ServedModelSpec, ModuleShapes | None]:
    """Also returns the modules that adapters may change; None without enable_lora. Reads the headers of the weights'
    files while the engine loads them, because the engine would report errors seconds later. Raises ModelError, and
    ConfigError for unusable adapters.
    """
    path = resolve_model_with_overrides(config)
    model_config, defaults = load_model_config(config, path), read_sampling_defaults(config)
    vocab_size, (pooling, _) = model_config.vocab_size, read_pooling_and_tasks(path, model_config, config)
    if config.load_format == "auto":
        read_checkpoint_size(resolve_weights(config))
    tokenizer_path = resolve_model(config.tokenizer, config.revision) if config.tokenizer else path
    skip = config.skip_tokenizer_init
    tokenizer = load_tokenizer(tokenizer_path, config.chat_template, vocab_size, model_config.eos_token_ids, skip=skip)
    modules = adaptable_modules(model_config) if config.enable_lora else None
    check_local_adapters(config, modules)
    images = make_multimodal_prompt_builder(path, tokenizer)
    return ServedModelSpec(
        config,
        tokenizer,
        vocab_size,
        defaults,
        pooling=pooling,
        multimodal_prompt_builder=images,
        model_type=model_config.model_type,
        weights_format="gguf" if path.suffix == GGUF_SUFFIX else "safetensors",
    ), modules
