"""Models of the transformers library by name, made small from their configs, with inputs."""

import importlib
import inspect
from types import ModuleType
from typing import Any

import torch

from forge.cli.app import TargetError
from forge.cli.inputs import random_tensor
from forge.executors.registry import unknown
from forge.ir.checks import in_one_line

# Sizes of a small model, by the name that a config has for them; a config takes those that it knows.
SIZES = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim", "word_embed_proj_dim"), 64),
    **dict.fromkeys(("intermediate_size", "moe_intermediate_size", "d_ff", "ffn_dim", "hidden_dim"), 128),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "max_position_embeddings", "n_positions"), 128),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 2),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads", "num_experts", "num_local_experts"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_experts_per_tok"), 2),
    **dict.fromkeys(("head_dim", "d_kv"), 16),
    "vocab_size": 512,
    "image_size": 32,
    "patch_size": 8,
}
BATCH, LENGTH = 2, 16
TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id")
HEADS = ("SEQ_TO_SEQ_CAUSAL_LM", "MASKED_LM", "CAUSAL_LM", "IMAGE_CLASSIFICATION")  # the first that a model has


def make(
    name: str, settings: dict[str, Any], training: bool, kwargs: dict[str, Any]
) -> tuple[torch.nn.Module, dict[str, Any]]:
    """Return a model, and arguments of its call that go with those that are given.

    name: a model type ("llama"), or the class of a config ("LlamaConfig") or of a model ("BertForMaskedLM").
    settings: fields of the config. training: with labels.

    Raises TargetError where the library is not installed, and for an unknown name or setting.
    """
    library = _library(name)
    config_class, model_class = _classes(name, library)
    config = _config(config_class, settings)
    model = model_class._from_config(config)
    if getattr(model, "loss_type", "") is None:  # the library would log that from within the model's forward
        model.loss_type = "ForCausalLM"
    return model, _arguments(model, config, training, kwargs)


def _library(name: str) -> ModuleType:
    try:
        library = importlib.import_module("transformers")
    except ImportError as error:
        raise TargetError(
            f"{name!r} is neither module:name nor file.py:name, and as a model of transformers it needs that library, "
            f"which does not import ({in_one_line(error)}): pip install transformers"
        ) from error
    library.logging.set_verbosity_error()
    return library


def _classes(name: str, library: ModuleType) -> tuple[Any, Any]:
    """Return the classes of a config and of a model."""
    types = library.CONFIG_MAPPING
    kind = types[name] if name in types else getattr(library, name, None)
    if isinstance(kind, type) and issubclass(kind, library.PreTrainedModel):
        model: Any = kind
        return model.config_class, model
    if not (isinstance(kind, type) and hasattr(kind, "model_type")):
        message = unknown("model type of transformers", name, types.keys())
        raise TargetError(f"{message}; a target is module:name, file.py:name, or a model type such as llama")
    mappings = importlib.import_module("transformers.models.auto.modeling_auto")
    for head in HEADS:
        mapping = getattr(mappings, f"MODEL_FOR_{head}_MAPPING", {})
        if kind in mapping:
            return kind, _first(mapping[kind])
    if kind not in mappings.MODEL_MAPPING:
        raise TargetError(f"{name}: transformers has no model for {kind.__name__} alone; name a model's class")
    return kind, _first(mappings.MODEL_MAPPING[kind])


def _first(classes: Any) -> Any:
    return classes[0] if isinstance(classes, tuple) else classes


def _config(config_class: Any, settings: dict[str, Any]) -> Any:
    """Return a small config without a cache, and with the settings."""
    usual = config_class()
    fields = {**usual.to_dict(), **usual.attribute_map}
    for name in settings:
        if name not in fields:
            raise TargetError(f"--set: {unknown(f'field of {config_class.__name__}', name, fields)}")
    parts = {name: _config(type(getattr(usual, name)), {}) for name in config_class.sub_configs if hasattr(usual, name)}
    renamed = {usual.attribute_map.get(name, name): value for name, value in settings.items()}
    return config_class(**{**_small(usual), **parts, **renamed})


def _small(usual: Any) -> dict[str, Any]:
    """Return the fields that make a config small; tokens of a larger vocabulary are 0."""
    fields = usual.to_dict()
    sizes = {name: size for name, size in SIZES.items() if isinstance(fields.get(name), int) and "depths" not in fields}
    tokens = {name: 0 for name in TOKENS if "vocab_size" in sizes and (fields.get(name) or 0) >= sizes["vocab_size"]}
    if usual.is_encoder_decoder:  # labels are shifted behind these
        tokens |= {name: 0 for name in ("pad_token_id", "decoder_start_token_id") if fields.get(name) is None}
    return {**sizes, **tokens, **({"use_cache": False} if "use_cache" in fields else {})}


def _arguments(model: torch.nn.Module, config: Any, training: bool, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return random tokens or images, and labels where the model is trained."""
    cpu = torch.device("cpu")
    if model.main_input_name == "pixel_values":
        side = config.image_size if isinstance(getattr(config, "image_size", None), int) else 32
        shape = (BATCH, getattr(config, "num_channels", 3), side, side)
        images = kwargs.get("pixel_values", random_tensor(shape, torch.float32, cpu))
        return {"pixel_values": images, **_labels(model, training, (len(images),), images)}
    if model.main_input_name != "input_ids":
        return {}
    vocabulary = config.get_text_config().vocab_size
    ids = kwargs.get("input_ids", random_tensor((BATCH, LENGTH), torch.int64, cpu, vocabulary))
    shape = (len(ids),) if type(model).__name__.endswith("ForSequenceClassification") else tuple(ids.shape)
    decoder = {"decoder_input_ids": ids} if config.is_encoder_decoder and not training else {}
    return {"input_ids": ids, **decoder, **_labels(model, training, shape, ids)}


def _labels(model: Any, training: bool, shape: tuple[int, ...], tokens: torch.Tensor) -> dict[str, Any]:
    """Return classes of that shape, or the tokens themselves, where the model makes a loss of them."""
    if not training or "labels" not in inspect.signature(model.forward).parameters:
        return {}
    if type(model).__name__.endswith("Classification"):
        return {"labels": random_tensor(shape, torch.int64, torch.device("cpu"), model.config.num_labels)}
    return {"labels": tokens}
