"""Transforms: functions from traces to traces, one algorithm per file."""

from forge.support.deprecation import renamed_attributes
from forge.transforms.add_rows_in_place import add_rows_in_place
from forge.transforms.attention_blocks import attention_blocks
from forge.transforms.attention_masks import attention_masks
from forge.transforms.channels_last import channels_last
from forge.transforms.collective_schedule import bucket_collectives, overlap_collectives
from forge.transforms.contiguous_batches import contiguous_batches
from forge.transforms.contract import contract
from forge.transforms.cse import cse
from forge.transforms.dce import dce
from forge.transforms.decoding_attention import decoding_attention
from forge.transforms.decompose_attention import decompose_attention
from forge.transforms.decompose_cross_entropy import decompose_cross_entropy
from forge.transforms.fold_constants import fold_constants, partition_by_weights
from forge.transforms.fold_norms import fold_norms
from forge.transforms.freezing import Freezing
from forge.transforms.fuse_attention import fuse_attention
from forge.transforms.fuse_biases import fuse_biases
from forge.transforms.grouped_queries import grouped_queries
from forge.transforms.inline_attention import inline_attention
from forge.transforms.join_copies import join_copies
from forge.transforms.join_products import join_products
from forge.transforms.join_quantized import join_quantized
from forge.transforms.lifetimes import delete_last_used
from forge.transforms.linear_cross_entropy import fused_linear_cross_entropy
from forge.transforms.mark_bounded import mark_bounded
from forge.transforms.masks_in_rows import masks_in_rows
from forge.transforms.move_indices import move_indices
from forge.transforms.overlap_calls import overlap_calls
from forge.transforms.products import products
from forge.transforms.reduce_in_place import reduce_in_place
from forge.transforms.rematerialize import rematerialize
from forge.transforms.replacement import rewrite
from forge.transforms.row_major import row_major
from forge.transforms.row_products import row_products
from forge.transforms.scatter_in_place import scatter_in_place
from forge.transforms.separate_sinks import separate_sinks
from forge.transforms.slice_counted import slice_counted
from forge.transforms.split_groups import split_groups
from forge.transforms.sum_few_rows import sum_few_rows
from forge.transforms.unfuse_addends import unfuse_addends
from forge.transforms.write_in_place import write_in_place

__all__ = [
    "Freezing",
    "add_rows_in_place",
    "attention_blocks",
    "attention_masks",
    "bucket_collectives",
    "channels_last",
    "contiguous_batches",
    "contract",
    "cse",
    "dce",
    "decoding_attention",
    "decompose_attention",
    "decompose_cross_entropy",
    "delete_last_used",
    "fold_constants",
    "fold_norms",
    "fuse_attention",
    "fuse_biases",
    "fused_linear_cross_entropy",
    "grouped_queries",
    "inline_attention",
    "join_copies",
    "join_products",
    "join_quantized",
    "mark_bounded",
    "masks_in_rows",
    "move_indices",
    "overlap_calls",
    "overlap_collectives",
    "partition_by_weights",
    "products",
    "reduce_in_place",
    "rematerialize",
    "rewrite",
    "row_major",
    "row_products",
    "scatter_in_place",
    "separate_sinks",
    "slice_counted",
    "split_groups",
    "sum_few_rows",
    "unfuse_addends",
    "write_in_place",
]
__getattr__ = renamed_attributes(__name__, {"heads": "fused_linear_cross_entropy"}, globals().__getitem__)
