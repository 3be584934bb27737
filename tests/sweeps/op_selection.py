"""The operations of the database that CI tries: some of every family, those that once were wrong among them."""

from __future__ import annotations

FAMILIES: dict[str, str] = {
    "sums and products": "add sub mul div.no_rounding_mode addcmul addcdiv lerp rsub float_power",
    "pointwise, smooth": "sin cos tanh sigmoid erf square exp expm1 logsumexp nn.functional.gelu nn.functional.silu",
    "pointwise, with a kink": "abs nn.functional.relu nn.functional.leaky_relu clamp sign maximum fmin "
    "nn.functional.hardtanh",
    "with a pole": "reciprocal rsqrt log log1p atanh acos acosh logit xlogy special.xlog1py pow div.floor_rounding atan2",
    "steep or periodic": "tan sinh erfinv sinc exp2 digamma lgamma polygamma.polygamma_n_1 i0 special.erfcx",
    "comparisons, rounding": "floor round frac remainder fmod where masked_fill nan_to_num heaviside copysign",
    "reductions": "sum mean amax amin max.reduction_with_dim prod var std norm linalg.vector_norm median aminmax nansum",
    "scans": "cumsum cumprod logcumsumexp cummax",
    "sorting and choosing": "sort topk kthvalue mode msort argsort unique",
    "indexing": "gather scatter scatter_add scatter_reduce.amax index_select index_put take index_add masked_select "
    "index_reduce.prod __getitem__ nn.functional.embedding take_along_dim",
    "shapes": "cat stack split chunk permute transpose reshape view expand constant_pad_nd flip roll tril unfold as_strided "
    "repeat tile diagonal squeeze unbind T movedim",
    "products of matrices": "mm bmm matmul addmm baddbmm einsum mv dot kron outer nn.functional.linear "
    "nn.functional.bilinear",
    "linear algebra": "linalg.inv linalg.solve linalg.cholesky linalg.eigh linalg.svd linalg.det linalg.qr matrix_exp "
    "pinverse",
    "softmax and losses": "softmax log_softmax nn.functional.cross_entropy nn.functional.binary_cross_entropy "
    "nn.functional.kl_div nn.functional.mse_loss nn.functional.huber_loss nn.functional.gaussian_nll_loss "
    "nn.functional.nll_loss nn.functional.ctc_loss nn.functional.triplet_margin_loss",
    "norms": "nn.functional.layer_norm nn.functional.batch_norm nn.functional.group_norm nn.functional.rms_norm "
    "nn.functional.normalize nn.functional.cosine_similarity nn.functional.local_response_norm renorm",
    "convolutions and pools": "nn.functional.conv2d nn.functional.conv_transpose2d nn.functional.max_pool2d "
    "nn.functional.avg_pool2d nn.functional.adaptive_max_pool2d nn.functional.fractional_max_pool2d nn.functional.unfold",
    "resampling": "nn.functional.grid_sample nn.functional.interpolate.bicubic nn.functional.interpolate.bilinear "
    "nn.functional.pixel_shuffle",
    "attention": "nn.functional.scaled_dot_product_attention nn.functional.multi_head_attention_forward",
    "random": "nn.functional.dropout bernoulli normal nn.functional.rrelu",
    "complex": "fft.rfft fft.ifft2 stft view_as_complex polar angle",
    "no gradient": "argmax isnan eq logical_and bincount arange nonzero zeros_like searchsorted item",
}
CHOSEN = [name for names in FAMILIES.values() for name in names.split()]


def dtypes_of(place: int) -> tuple[str, ...]:
    """FP32 for all; every eighth in BF16 too, every eighth in FP16."""
    return ("float32", *({1: ("bfloat16",), 5: ("float16",)}.get(place % 8, ())))


def wrappers_of(place: int, dtype: str) -> tuple[str, ...]:
    """The programs around the operation (tests/sweeps/op_programs.py)."""
    return (("sum", "compared", "product")[place % 3],) if dtype == "float32" else ("compared", "product")


SELECTION = [
    (name, dtype, wrappers_of(place, dtype)) for place, name in enumerate(CHOSEN) for dtype in dtypes_of(place)
]
