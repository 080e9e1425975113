// Rows as E4M3 bytes with one power-of-two scale for 32 channels.
#include "mx.h"

namespace deepinfer::custom_calls {
namespace {

std::vector<Tensor> Infer(const Request& request) {
  request.NeedRank(0, 2);
  request.NeedMultiple(0, 1, kMxPair);
  const Dims& dims = request.in(0).dims;
  return {ResultOf(DataType::kUint8, dims), ResultOf(DataType::kUint8, MxScaleDims(dims))};
}

void Enqueue(const Request& request, Call& call, const std::vector<Tensor>& results) {
  call.Run(ascend::kDynamicMxQuant, call.Describe(request.in(0)), -1, "rint",
           static_cast<int64_t>(DataType::kFloat8E4m3), kMxGroup, request.i64("scale_rule"),
           call.Describe(results[0], DataType::kFloat8E4m3, results[0].dims),
           call.Describe(results[1], DataType::kFloat8E8m0, results[1].dims));
}

}  // namespace

const Target& QuantizeMxfp8Target() {
  static const Target target{"deepinfer.cann.quantize_mxfp8.v2",
                             "DeepinferQuantizeMxfp8",
                             "x as E4M3 bytes and E8M0 scale bytes, 32 channels to a scale",
                             {"aclnnDynamicMxQuant"},
                             {{"x", {DataType::kBf16}, "(T, K), K a multiple of 64"}},
                             {{"scale_rule", Attribute::kI64, "CANN's scaleAlg: 0 or 1"}},
                             {{"codes", "(T, K) uint8"}, {"scale", "(T, K / 64, 2) uint8"}},
                             false,
                             Infer,
                             Enqueue};
  return target;
}

}  // namespace deepinfer::custom_calls
