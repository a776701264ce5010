"""Transforms: functions from traces to traces, one algorithm per file."""

from forge.support.deprecation import renamed_attributes
from forge.transforms.attention_blocks import attention_blocks
from forge.transforms.attention_composition import compose_attention
from forge.transforms.attention_masks import attention_masks
from forge.transforms.attention_sinks import separate_sinks
from forge.transforms.bounded_indices import mark_bounded
from forge.transforms.channels_last import channels_last
from forge.transforms.collective_overlap import overlap_calls
from forge.transforms.collective_schedule import bucket_collectives, overlap_collectives
from forge.transforms.constant_folding import fold_constants, partition_by_weights
from forge.transforms.contiguous_batches import contiguous_batches
from forge.transforms.contractions import contract
from forge.transforms.counted_indices import slice_counted
from forge.transforms.cse import cse
from forge.transforms.dce import dce
from forge.transforms.decoding_attention import decoding_attention
from forge.transforms.folded_norms import fold_norms
from forge.transforms.freezing import Freezing
from forge.transforms.fused_attention import fuse_attention
from forge.transforms.fused_biases import fuse_biases
from forge.transforms.grouped_queries import grouped_queries
from forge.transforms.in_place_reductions import reduce_in_place
from forge.transforms.inlined_attention import inline_attention
from forge.transforms.joined_copies import join_copies
from forge.transforms.joined_products import join_products
from forge.transforms.joined_quantized import join_quantized
from forge.transforms.lifetimes import delete_last_used
from forge.transforms.linear_cross_entropy import fused_linear_cross_entropy
from forge.transforms.masked_sums import sum_few_rows
from forge.transforms.masks_in_rows import masks_in_rows
from forge.transforms.moved_indices import move_indices
from forge.transforms.products import products
from forge.transforms.rematerialize import rematerialize
from forge.transforms.replacement import rewrite
from forge.transforms.row_major import row_major
from forge.transforms.row_products import row_products
from forge.transforms.row_sums import add_rows_in_place
from forge.transforms.scatters_into_zeros import scatter_in_place
from forge.transforms.scored_losses import compose_cross_entropy
from forge.transforms.split_groups import split_groups
from forge.transforms.unfused_addends import unfuse_addends
from forge.transforms.write_in_place import write_in_place

__all__ = [
    "Freezing",
    "add_rows_in_place",
    "attention_blocks",
    "attention_masks",
    "bucket_collectives",
    "channels_last",
    "compose_attention",
    "compose_cross_entropy",
    "contiguous_batches",
    "contract",
    "cse",
    "dce",
    "decoding_attention",
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
