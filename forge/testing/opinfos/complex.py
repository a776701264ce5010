"""Operations with complex64 among their dtypes: all that torch differentiates in it, and those without a gradient
that it runs in it. tests/test_complex.py compares this list with torch.
"""

from forge.torch_internals.versions import TORCH

DIFFERENTIATED = """
nn.functional.tanhshrink nn.functional.softsign aten.sigmoid_backward aten.silu_backward aten.tanh_backward
nn.functional.conv1d nn.functional.conv_transpose1d nn.functional.conv2d nn.functional.conv_transpose2d
nn.functional.conv3d nn.functional.conv_transpose3d acos acosh asin asinh atan atanh cos cosh exp exp2 expm1 log log10
log1p log2 reciprocal rsqrt sigmoid sin sinh sqrt tan tanh abs angle neg positive sgn square isfinite isinf isnan
isreal logical_not conj_physical add sub rsub mul div pow float_power ldexp eq ne logical_and logical_or logical_xor
isclose where Tensor.where Tensor.add_ Tensor.sub_ Tensor.mul_ Tensor.div_ Tensor.pow_ operator.iadd operator.isub
operator.imul operator.itruediv operator.truediv Tensor.float Tensor.double Tensor.half Tensor.bfloat16 Tensor.int
Tensor.long Tensor.bool Tensor.short Tensor.char Tensor.byte Tensor.to Tensor.cpu Tensor.to_device Tensor.type_as
Tensor.type zeros ones empty full full.inferred_dtype zeros_like ones_like empty_like full_like Tensor.new_zeros
Tensor.new_ones Tensor.new_empty Tensor.new_full tensor tensor.inferred_dtype as_tensor Tensor.new_tensor
scalar_tensor arange.inferred_dtype linspace logspace eye tril_indices triu_indices Tensor.zero_ nn.functional.one_hot
getitem setitem index_put ops.aten.index index_select index_add index_copy index_fill gather take_along_dim take
scatter scatter_add masked_fill masked_scatter Tensor.copy_ fill getitem.computed cat stack hstack vstack dstack
column_stack split Tensor.split split_with_sizes chunk tensor_split hsplit vsplit dsplit unbind Tensor.repeat tile
Tensor.tile repeat_interleave diff split.computed Tensor.split.computed split_with_sizes.computed chunk.computed
tensor_split.computed hsplit.computed vsplit.computed dsplit.computed unbind.computed matmul linalg.matmul
operator.matmul mm bmm mv dot vdot outer ger inner kron trace chain_matmul linalg.multi_dot addmm addmv addr baddbmm
addbmm Tensor.addmm_ Tensor.addmv_ Tensor.addr_ Tensor.baddbmm_ Tensor.addbmm_ nn.functional.linear
nn.functional.bilinear tensordot einsum linalg.vector_norm linalg.vector_norm.count linalg.matrix_norm linalg.norm
norm Tensor.norm cross linalg.cross pairwise_distance nn.functional.mse_loss nn.functional.l1_loss
nn.functional.smooth_l1_loss nn.functional.poisson_nll_loss nn.functional.triplet_margin_loss nn.functional.rms_norm
rms_norm nn.functional.normalize _weight_norm nn.functional.adaptive_avg_pool1d nn.functional.adaptive_avg_pool2d
nn.functional.adaptive_avg_pool3d nn.functional.unfold nn.functional.fold rand randn rand_like randn_like normal
multinomial Tensor.uniform_ Tensor.normal_ nn.functional.dropout nn.functional.alpha_dropout
nn.functional.dropout.inplace dropout alpha_dropout feature_dropout feature_alpha_dropout
nn.functional.feature_alpha_dropout nn.functional.dropout1d nn.functional.dropout2d nn.functional.dropout3d sum mean
any all prod count_nonzero logsumexp Tensor.sum_to_size var std var_mean std_mean cumsum cumprod logcumsumexp
nn.functional.pad pixel_shuffle pixel_unshuffle channel_shuffle reshape Tensor.reshape Tensor.view Tensor.view_as
Tensor.reshape_as flatten ravel unflatten unsqueeze squeeze Tensor.expand broadcast_to Tensor.broadcast_to
Tensor.expand_as
broadcast_tensors meshgrid atleast_1d atleast_2d atleast_3d transpose swapaxes permute Tensor.permute movedim moveaxis
t adjoint Tensor.T Tensor.mT Tensor.H Tensor.mH select narrow ops.aten.slice diagonal Tensor.unfold flip Tensor.flip
fliplr flipud roll rot90 tril triu diag_embed diag Tensor.contiguous clone detach detach_ diagonal.written chunk.written
reshape.computed Tensor.reshape.computed Tensor.view.computed Tensor.view_as.computed Tensor.reshape_as.computed
flatten.computed ravel.computed unflatten.computed unsqueeze.computed squeeze.computed Tensor.expand.computed
broadcast_to.computed Tensor.broadcast_to.computed
Tensor.expand_as.computed broadcast_tensors.computed meshgrid.computed atleast_1d.computed
atleast_2d.computed atleast_3d.computed transpose.computed swapaxes.computed permute.computed Tensor.permute.computed
movedim.computed moveaxis.computed t.computed adjoint.computed Tensor.T.computed Tensor.mT.computed Tensor.H.computed
Tensor.mH.computed select.computed narrow.computed ops.aten.slice.computed diagonal.computed Tensor.unfold.computed
diag.computed Tensor.contiguous.computed as_strided.computed narrow.at_a_tensor repeat_interleave.by_a_tensor
unsafe_chunk.computed unsafe_split.computed unsafe_split_with_sizes.computed
softmax log_softmax nn.functional.softmax nn.functional.log_softmax
nn.functional.softmin sinc logaddexp addcmul addcdiv lerp
fft.fft fft.ifft fft.hfft fft.irfft fft.fft2 fft.ifft2 fft.hfft2 fft.irfft2 fft.fftn fft.ifftn fft.hfftn fft.irfftn
fft.fftshift fft.ifftshift conj real imag view_as_real resolve_conj resolve_neg conj.computed real.computed
imag.computed view_as_real.computed imag.conjugated conj.conjugated resolve_conj.conjugated Tensor.chalf Tensor.cfloat
Tensor.cdouble stft nonzero_static bartlett_window blackman_window hamming_window hann_window kaiser_window
linalg.diagonal.computed norm.nuc Tensor.norm.nuc
redistribute spread unshard all_reduce all_gather_into_tensor reduce_scatter_tensor all_to_all_single
""".split()
if TORCH >= (2, 15):
    DIFFERENTIATED += ["lstm.dropout", "gru.dropout", "rnn_tanh.dropout", "nan_to_num"]
