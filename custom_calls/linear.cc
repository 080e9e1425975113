// The plain matrix product x @ w.T.
#include "target.h"

namespace deepinfer::custom_calls {
namespace {

enum { kX, kW };

// Keeps the operands' precision: no narrower type inside the product.
constexpr int8_t kKeepType = 0;

std::vector<Tensor> Infer(const Request& request) {
  request.NeedRank(kX, 2);
  request.NeedRank(kW, 2);
  request.NeedSameType(kW, kX);
  request.NeedMultiple(kX, 1, 1);
  request.NeedDim(kW, 1, request.in(kX).dims[1], "the columns of x");
  return {ResultOf(request.in(kX).dtype, {request.in(kX).dims[0], request.in(kW).dims[0]})};
}

void Enqueue(const Request& request, Call& call, const std::vector<Tensor>& results) {
  call.Run(ascend::kMatmul, call.Describe(request.in(kX)), call.DescribeTransposed(request.in(kW)),
           call.Describe(results[0]), kKeepType);
}

}  // namespace

const Target& LinearTarget() {
  static const Target target{
      "deepinfer.cann.linear.v2",
      "DeepinferLinear",
      "x @ w.T",
      {"aclnnMatmul"},
      {{"x", {DataType::kBf16, DataType::kFloat}, "(T, K)"}, {"w", {DataType::kBf16, DataType::kFloat}, "(N, K)"}},
      {},
      {{"y", "(T, N), as x"}},
      false,
      Infer,
      Enqueue};
  return target;
}

}  // namespace deepinfer::custom_calls
