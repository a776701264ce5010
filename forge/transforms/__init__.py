"""Transforms: functions from traces to traces, one algorithm a file."""

from forge.transforms.attention_masks import attention_masks
from forge.transforms.cse import cse
from forge.transforms.dce import dce
from forge.transforms.grouped_queries import grouped_queries
from forge.transforms.head import heads
from forge.transforms.hoist import hoist
from forge.transforms.lifetimes import delete_last_used

__all__ = ["attention_masks", "cse", "dce", "delete_last_used", "grouped_queries", "heads", "hoist"]
