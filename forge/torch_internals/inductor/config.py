"""Inductor's settings."""

from torch._inductor import config as inductor_config
