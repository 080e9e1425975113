// The clamped gated activation times the routing weight, quantised.
#include "mx.h"

namespace deepinfer::custom_calls {
namespace {

enum { kX, kWeight };
constexpr int64_t kMxMode = 1;

std::vector<Tensor> Infer(const Request& request) {
  request.NeedRank(kX, 2);
  request.NeedMultiple(kX, 1, 512);
  request.NeedRank(kWeight, 1);
  request.NeedDim(kWeight, 0, request.in(kX).dims[0], "the rows of x");
  const Dims half = {request.in(kX).dims[0], request.in(kX).dims[1] / 2};
  return {ResultOf(DataType::kUint8, half), ResultOf(DataType::kUint8, MxScaleDims(half)),
          ResultOf(request.in(kX).dtype, half)};
}

void Enqueue(const Request& request, Call& call, const std::vector<Tensor>& results) {
  call.Run(ascend::kSwigluQuant, call.Describe(request.in(kX)), call.Describe(request.in(kWeight)), nullptr, nullptr,
           static_cast<int64_t>(DataType::kFloat8E4m3), kMxMode, kMxGroup, true, request.f64("limit"), 0.0, true,
           call.Describe(results[0], DataType::kFloat8E4m3, results[0].dims),
           call.Describe(results[1], DataType::kFloat8E8m0, results[1].dims), call.Describe(results[2]));
}

}  // namespace

const Target& SwigluMxfp8Target() {
  static const Target target{
      "deepinfer.cann.swiglu_mxfp8.v2",
      "DeepinferSwigluMxfp8",
      "silu(min(gate, limit)) * clip(up, +-limit) * weight, quantised and as it was before",
      {"aclnnSwigluGroupQuant"},
      {{"x", {DataType::kBf16}, "(T, 2 * D): gate, up; D a multiple of 256"}, {"weight", {DataType::kFloat}, "(T,)"}},
      {{"limit", Attribute::kF64, "bound of gate and up"}},
      {{"codes", "(T, D) uint8"}, {"scale", "(T, D / 64, 2) uint8"}, {"y", "(T, D), as x"}},
      false,
      Infer,
      Enqueue};
  return target;
}

}  // namespace deepinfer::custom_calls
