"""The models of the tests; every file here adds its own to zoo.MODELS."""

from tests.models import by_hand, decoders, encoders, multimodal, series, sound, state_spaces, vision, zoo

__all__ = ["by_hand", "decoders", "encoders", "multimodal", "series", "sound", "state_spaces", "vision", "zoo"]
