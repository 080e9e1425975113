// The last channels of each head rotated by position, adjacent channels forming a pair. Writes x in place.
#include "target.h"

namespace deepinfer::custom_calls {
namespace {

enum { kX, kCos, kSin };
constexpr int64_t kInterleaved = 1;

std::vector<Tensor> Infer(const Request& request) {
  request.NeedRank(kX, 3);
  request.NeedRank(kCos, 2);
  request.NeedRank(kSin, 2);
  const Dims& dims = request.in(kX).dims;
  request.NeedDim(kCos, 0, dims[0], "the rows of x");
  request.NeedMultiple(kCos, 1, 2);
  if (request.in(kCos).dims[1] > dims[2]) request.NeedDim(kCos, 1, dims[2], "at most the channels of x");
  request.NeedDim(kSin, 0, dims[0], "the rows of x");
  request.NeedDim(kSin, 1, request.in(kCos).dims[1], "the channels of cos");
  return {ResultOf(request.in(kX).dtype, dims)};
}

void Enqueue(const Request& request, Call& call, const std::vector<Tensor>& results) {
  const Dims& dims = results[0].dims;
  const int64_t rows = dims[0], length = request.in(kCos).dims[1];
  const Dims angles = {rows, 1, 1, length};
  call.Run(ascend::kPartialRotary, call.Describe(results[0], results[0].dtype, {rows, 1, dims[1], dims[2]}),
           call.Describe(request.in(kCos), DataType::kFloat, angles),
           call.Describe(request.in(kSin), DataType::kFloat, angles), kInterleaved,
           call.IntArray({dims[2] - length, dims[2]}));
}

}  // namespace

const Target& RopeTarget() {
  static const Target target{"deepinfer.cann.rope.v2",
                             "DeepinferRope",
                             "x with its last R channels rotated; the inverse takes -sin",
                             {"aclnnInplacePartialRotaryMul"},
                             {{"x", {DataType::kBf16, DataType::kFloat}, "(T, H, K)"},
                              {"cos", {DataType::kFloat}, "(T, R), each value twice"},
                              {"sin", {DataType::kFloat}, "(T, R), each value twice"}},
                             {},
                             {{"x", "as x"}},
                             true,
                             Infer,
                             Enqueue};
  return target;
}

}  // namespace deepinfer::custom_calls
