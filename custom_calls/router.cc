// The experts of each row and their weights, from logits.
#include "target.h"

namespace deepinfer::custom_calls {
namespace {

enum { kLogits, kBias };

constexpr int64_t kMaxExperts = 2048;
constexpr int64_t kOneGroup = 1;
constexpr int64_t kSqrtSoftplus = 2;

std::vector<Tensor> Infer(const Request& request) {
  request.NeedRank(kLogits, 2);
  request.NeedRank(kBias, 1);
  const Dims& dims = request.in(kLogits).dims;
  if (dims[1] > kMaxExperts) request.NeedDim(kLogits, 1, kMaxExperts, "or less: the operator's limit");
  request.NeedDim(kBias, 0, dims[1], "the experts of logits");
  const int64_t k = request.i64("k");
  if (k < 1 || k > dims[1]) {
    request.Refuse("attribute k is " + std::to_string(k) + "; it must be 1 to " + std::to_string(dims[1]) +
                   ", the experts of logits");
  }
  return {ResultOf(DataType::kFloat, {dims[0], k}), ResultOf(DataType::kInt32, {dims[0], k})};
}

void Enqueue(const Request& request, Call& call, const std::vector<Tensor>& results) {
  const Tensor normed = call.Temporary(DataType::kFloat, request.in(kLogits).dims);
  call.Run(ascend::kGatingTopK, call.Describe(request.in(kLogits)), call.Describe(request.in(kBias)), nullptr, nullptr,
           request.i64("k"), kOneGroup, kOneGroup, 0, 1, kSqrtSoftplus, false, request.f64("scaling"),
           request.f64("eps"), call.Describe(results[0]), call.Describe(results[1]), call.Describe(normed));
}

}  // namespace

const Target& RouterTarget() {
  static const Target target{
      "deepinfer.cann.router.v2",
      "DeepinferRouter",
      "the k best of sqrt(softplus(logits)) + bias, and their unbiased scores summing to scaling",
      {"aclnnMoeGatingTopKV2"},
      {{"logits", {DataType::kFloat}, "(T, E), E at most 2048"},
       {"bias", {DataType::kFloat}, "(E,), added for the choice only"}},
      {{"k", Attribute::kI64, "experts of a row"},
       {"scaling", Attribute::kF64, "sum of the weights of a row"},
       {"eps", Attribute::kF64, "added to the sum before dividing"}},
      {{"weights", "(T, k) float32"}, {"expert_ids", "(T, k) int32, best first"}},
      false,
      Infer,
      Enqueue};
  return target;
}

}  // namespace deepinfer::custom_calls
