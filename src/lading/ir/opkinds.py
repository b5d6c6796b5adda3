"""Which cost class each ATen operation belongs to."""

from __future__ import annotations

from functools import cache

from lading.ir.graph import OpKind

#: Kinds whose seconds are those of products of matrices.
PRODUCT_KINDS = (OpKind.MATMUL, OpKind.CONVOLUTION, OpKind.ATTENTION)
# Base names: no namespace, no overload, no trailing underscore of the in-place form.
_NAMES = {
    OpKind.MATMUL: """
        mm addmm bmm baddbmm addbmm mv addmv dot vdot matmul linear linear_backward addr ger outer einsum
        _grouped_mm _scaled_mm _scaled_grouped_mm _scaled_mm_v2 _scaled_grouped_mm_v2 _int_mm _addmm_activation
        mkldnn_linear _weight_int8pack_mm _weight_int4pack_mm""",
    OpKind.CONVOLUTION: """
        convolution convolution_backward _convolution convolution_overrideable convolution_backward_overrideable
        cudnn_convolution mkldnn_convolution _conv_depthwise2d slow_conv3d conv1d conv2d conv3d""",
    OpKind.ATTENTION: """
        scaled_dot_product_attention _scaled_dot_product_attention_math
        _scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_backward
        _scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention_for_cpu_backward
        _scaled_dot_product_efficient_attention _scaled_dot_product_efficient_attention_backward
        _scaled_dot_product_cudnn_attention _scaled_dot_product_cudnn_attention_backward
        _scaled_dot_product_fused_attention_overrideable _scaled_dot_product_fused_attention_overrideable_backward
        _flash_attention_forward _flash_attention_backward _efficient_attention_forward _efficient_attention_backward
        _cudnn_attention_forward _cudnn_attention_backward""",
    OpKind.ELEMENTWISE: """
        add sub rsub mul div neg abs sign sgn reciprocal square floor ceil round trunc frac remainder fmod floor_divide
        true_divide clamp clamp_min clamp_max maximum minimum fmax fmin lerp addcmul addcdiv where masked_fill
        eq ne lt le gt ge isnan isinf isfinite logical_and logical_or logical_not logical_xor
        bitwise_and bitwise_or bitwise_xor bitwise_not bitwise_left_shift bitwise_right_shift
        relu relu6 leaky_relu leaky_relu_backward threshold threshold_backward hardtanh hardtanh_backward hardswish
        hardswish_backward hardsigmoid hardsigmoid_backward tril triu sqrt copysign heaviside
        native_dropout_backward _masked_scale mse_loss mse_loss_backward smooth_l1_loss smooth_l1_loss_backward
        polar view_as_complex complex conj_physical _conj_physical angle signbit nan_to_num
        upsample_nearest2d upsample_nearest2d_backward upsample_bilinear2d upsample_bilinear2d_backward
        _foreach_add _foreach_sub _foreach_mul _foreach_div _foreach_addcmul _foreach_addcdiv _foreach_lerp
        _foreach_neg _foreach_maximum _foreach_minimum _foreach_clamp_max _foreach_clamp_min _foreach_reciprocal
        _foreach_sqrt _foreach_abs _foreach_sign""",
    OpKind.TRANSCENDENTAL: """
        exp exp2 expm1 log log2 log10 log1p pow sin cos tan asin acos atan atan2 sinh cosh tanh tanh_backward
        sigmoid sigmoid_backward log_sigmoid log_sigmoid_forward log_sigmoid_backward logit softplus softplus_backward
        silu silu_backward gelu gelu_backward mish mish_backward elu elu_backward rsqrt erf erfc erfinv
        glu glu_backward logaddexp logaddexp2 xlogy binary_cross_entropy binary_cross_entropy_backward
        binary_cross_entropy_with_logits _foreach_exp _foreach_pow _foreach_log _foreach_rsqrt""",
    OpKind.REDUCTION: """
        sum mean amax amin max min aminmax norm linalg_vector_norm var var_mean std std_mean prod argmax argmin
        any all cumsum cumprod cummax cummin logcumsumexp logsumexp count_nonzero nansum median mode
        histc bincount _foreach_norm _foreach_max avg_pool2d avg_pool2d_backward _adaptive_avg_pool2d
        _adaptive_avg_pool2d_backward max_pool2d_with_indices max_pool2d_with_indices_backward""",
    OpKind.SOFTMAX: """
        _softmax _softmax_backward_data _safe_softmax softmax _log_softmax _log_softmax_backward_data log_softmax
        _masked_softmax _masked_softmax_backward nll_loss_forward nll_loss_backward nll_loss2d_forward
        nll_loss2d_backward nll_loss nll_loss_nd cross_entropy_loss""",
    OpKind.NORM: """
        native_layer_norm native_layer_norm_backward layer_norm rms_norm _fused_rms_norm _fused_rms_norm_backward
        native_group_norm native_group_norm_backward native_batch_norm native_batch_norm_backward
        _native_batch_norm_legit _native_batch_norm_legit_no_training _native_batch_norm_legit_functional
        _batch_norm_with_update _batch_norm_with_update_functional _batch_norm_no_update batch_norm_backward
        cudnn_batch_norm cudnn_batch_norm_backward miopen_batch_norm""",
    OpKind.GATHER: """
        embedding index _unsafe_index gather index_select take take_along_dim masked_select nonzero nonzero_static
        _embedding_bag embedding_renorm one_hot grid_sampler_2d""",
    OpKind.SCATTER: """
        embedding_dense_backward embedding_backward _embedding_bag_backward _embedding_bag_dense_backward index_put
        _unsafe_index_put _index_put_impl scatter scatter_add scatter_reduce index_add index_copy index_fill put
        masked_scatter index_reduce select_scatter slice_scatter diagonal_scatter as_strided_scatter
        masked_scatter_backward gather_backward""",
    OpKind.COPY: """
        empty empty_like empty_strided empty_permuted new_empty new_empty_strided
        clone contiguous _to_copy to copy lift_fresh_copy cat stack hstack vstack fill zero full full_like ones
        ones_like zeros zeros_like new_full new_ones new_zeros scalar_tensor arange linspace eye repeat
        repeat_interleave roll flip constant_pad_nd _pad_circular reflection_pad1d replication_pad1d tile
        select_backward slice_backward expand_copy permute_copy view_copy transpose_copy t_copy unsqueeze_copy
        split_copy split_with_sizes_copy unfold_copy unfold_backward as_strided_copy diagonal_backward
        _reshape_copy _unsafe_view col2im im2col block_diag kron pixel_shuffle pixel_unshuffle channel_shuffle
        _foreach_copy _foreach_zero tril_indices triu_indices meshgrid broadcast_tensors _chunk_cat
        value_selecting_reduction_backward _resize_output pin_memory rot90 _copy_from""",
    OpKind.SORT: "sort topk argsort kthvalue _unique2 unique_consecutive unique_dim searchsorted bucketize",
    OpKind.RANDOM: """
        native_dropout dropout bernoulli rand rand_like randn randn_like randint randint_like randperm normal
        normal_functional uniform exponential multinomial random geometric log_normal cauchy rrelu_with_noise
        rrelu_with_noise_backward""",
    OpKind.STEP: """
        adamw _fused_adamw _fused_adam _fused_sgd _fused_adagrad""",
}


@cache
def _table() -> dict[str, OpKind]:
    return {name.rstrip("_"): kind for kind, text in _NAMES.items() for name in text.split()}


def base_name(name: str) -> str:
    """``"gelu_backward"`` of ``"aten.gelu_backward.default"``, in-place or not."""
    parts = name.split(".")
    return (parts[1] if len(parts) > 1 else parts[0]).rstrip("_")


def kind_of(aten_name: str) -> OpKind | None:
    """Look up the cost class of an operation.

    Args:
        aten_name: An overload's name such as ``"aten.mm.default"`` or ``"aten.mul_.Tensor"``; the namespace and the
            overload may be left out. In-place and ``_foreach_`` forms count as the plain ones.

    Returns:
        The class, or None for a name that is not in the table: the caller says so, it is not guessed here.
    """
    return _table().get(base_name(aten_name))
