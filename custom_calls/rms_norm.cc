// Root-mean-square norm over the last axis.
#include "target.h"

namespace deepinfer::custom_calls {
namespace {

enum { kX, kWeight };

std::vector<Tensor> Infer(const Request& request) {
  request.NeedRank(kWeight, 1);
  if (request.in(kX).dims.empty()) request.NeedRank(kX, 1);
  request.NeedMultiple(kX, -1, 1);
  request.NeedDim(kWeight, 0, request.in(kX).dims.back(), "the last dimension of x");
  return {ResultOf(request.in(kX).dtype, request.in(kX).dims)};
}

void Enqueue(const Request& request, Call& call, const std::vector<Tensor>& results) {
  Dims reduced = request.in(kX).dims;
  reduced.back() = 1;
  const Tensor rstd = call.Temporary(DataType::kFloat, reduced);
  call.Run(ascend::kRmsNorm, call.Describe(request.in(kX)), call.Describe(request.in(kWeight)), request.f64("eps"),
           call.Describe(results[0]), call.Describe(rstd));
}

}  // namespace

const Target& RmsNormTarget() {
  static const Target target{
      "deepinfer.cann.rms_norm.v2",
      "DeepinferRmsNorm",
      "x / sqrt(mean(x^2) + eps) * weight over the last axis",
      {"aclnnRmsNorm"},
      {{"x", {DataType::kBf16, DataType::kFloat}, "(..., D)"}, {"weight", {DataType::kBf16, DataType::kFloat}, "(D,)"}},
      {{"eps", Attribute::kF64, "added to the mean square"}},
      {{"y", "as x"}},
      false,
      Infer,
      Enqueue};
  return target;
}

}  // namespace deepinfer::custom_calls
