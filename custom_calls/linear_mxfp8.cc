// x @ w.T with block-scaled FP8 weights; x is quantised on the device first.
#include "mx.h"

namespace deepinfer::custom_calls {
namespace {

enum { kX, kW, kScale };

std::vector<Tensor> Infer(const Request& request) {
  request.NeedRank(kX, 2);
  request.NeedRank(kW, 2);
  request.NeedMultiple(kX, 1, kMxPair);
  request.NeedDim(kW, 1, request.in(kX).dims[1], "the columns of x");
  NeedScales(request, kScale, kW);
  return {ResultOf(DataType::kBf16, {request.in(kX).dims[0], request.in(kW).dims[0]})};
}

void Enqueue(const Request& request, Call& call, const std::vector<Tensor>& results) {
  const Tensor& x = request.in(kX);
  const Tensor codes = call.Temporary(DataType::kFloat8E4m3, x.dims);
  const Tensor scale = call.Temporary(DataType::kFloat8E8m0, MxScaleDims(x.dims));
  call.Run(ascend::kDynamicMxQuant, call.Describe(x), -1, "rint", static_cast<int64_t>(DataType::kFloat8E4m3), kMxGroup,
           request.i64("scale_rule"), call.Describe(codes), call.Describe(scale));
  const Tensor &w = request.in(kW), &w_scale = request.in(kScale);
  call.Run(ascend::kQuantMatmul, call.Describe(codes), call.Describe(w, DataType::kFloat8E4m3, w.dims),
           call.Describe(scale), call.Describe(w_scale, DataType::kFloat8E8m0, w_scale.dims), nullptr, nullptr, nullptr,
           nullptr, nullptr, false, true, kMxGroupSizes, call.Describe(results[0]));
}

}  // namespace

const Target& LinearMxfp8Target() {
  static const Target target{"deepinfer.cann.linear_mxfp8.v2",
                             "DeepinferLinearMxfp8",
                             "quantised x @ dequantised w.T",
                             {"aclnnDynamicMxQuant", "aclnnQuantMatmulV5"},
                             {{"x", {DataType::kBf16}, "(T, K), K a multiple of 64"},
                              {"w", {DataType::kUint8}, "(N, K)"},
                              {"w_scale", {DataType::kUint8}, "(N, K / 64, 2)"}},
                             {{"scale_rule", Attribute::kI64, "CANN's scaleAlg: 0 or 1"}},
                             {{"y", "(T, N) bfloat16"}},
                             false,
                             Infer,
                             Enqueue};
  return target;
}

}  // namespace deepinfer::custom_calls
