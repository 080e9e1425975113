// Rows grouped by expert times the block-scaled FP4 weights of their expert.
#include "mx.h"

namespace deepinfer::custom_calls {
namespace {

enum { kX, kXScale, kW, kWScale, kCounts };

constexpr int64_t kNzRows = 16;
constexpr int64_t kNzColumns = 64;  // 4-bit values in 32 bytes
constexpr int64_t kOneOutput = 3;
constexpr int64_t kAlongRows = 0;
constexpr int64_t kCountsEach = 1;

std::vector<Tensor> Infer(const Request& request) {
  request.NeedRank(kX, 2);
  request.NeedMultiple(kX, 1, kMxPair);
  NeedScales(request, kXScale, kX);
  const int64_t k = request.in(kX).dims[1];
  request.NeedRank(kW, 5);
  const Dims& w = request.in(kW).dims;
  request.NeedDim(kW, 1, k / kNzColumns, "the columns of x by 64");
  request.NeedDim(kW, 3, kNzRows, "the rows of a fractal");
  request.NeedDim(kW, 4, kNzColumns / 2, "the bytes of a row of a fractal");
  const Dims scales = {w[0], w[2] * kNzRows, k / kMxPair, 2};
  request.NeedRank(kWScale, 4);
  for (int64_t i = 0; i < 4; ++i) request.NeedDim(kWScale, i, scales[i], "one scale for 32 channels, in pairs");
  request.NeedRank(kCounts, 2);
  request.NeedDim(kCounts, 0, w[0], "the experts of w");
  request.NeedDim(kCounts, 1, 2, "the two words of a 64-bit count, low one first");
  return {ResultOf(DataType::kBf16, {request.in(kX).dims[0], w[2] * kNzRows})};
}

void Enqueue(const Request& request, Call& call, const std::vector<Tensor>& results) {
  const Tensor &x = request.in(kX), &x_scale = request.in(kXScale), &w = request.in(kW), &w_scale = request.in(kWScale);
  const int64_t experts = w.dims[0], n = results[0].dims[1], k = x.dims[1];
  const Tensor weight{DataType::kFloat4E2m1,
                      {experts, n, k},
                      w.address,
                      ascend::Format::kFractalNz,
                      {},
                      {experts, k / kNzColumns, n / kNzRows, kNzRows, kNzColumns}};
  const auto scales = [&](const Tensor& t) {
    return Tensor{DataType::kFloat8E8m0, t.dims, t.address, t.format, {}, {}};
  };
  const Tensor rows{DataType::kFloat8E4m3, x.dims, x.address, ascend::Format::kNd, {}, {}};
  call.Run(ascend::kGroupedMatmulNz, call.DescribeList(rows), call.DescribeList(weight), nullptr, nullptr, nullptr,
           call.DescribeList(scales(w_scale)), nullptr, call.DescribeList(scales(x_scale)),
           call.Describe(request.in(kCounts), DataType::kInt64, {experts}), nullptr, nullptr, nullptr, kOneOutput,
           kAlongRows, kCountsEach, 0, nullptr, kMxGroup, call.DescribeList(results[0]), nullptr, nullptr);
}

}  // namespace

const Target& ExpertProductsTarget() {
  static const Target target{"deepinfer.cann.expert_products.v2",
                             "DeepinferExpertProducts",
                             "for each group of rows, rows @ w[expert].T; rows behind the last group give zeros",
                             {"aclnnGroupedMatmulWeightNz"},
                             {{"x", {DataType::kUint8}, "(M, K) E4M3, K a multiple of 64"},
                              {"x_scale", {DataType::kUint8}, "(M, K / 64, 2)"},
                              {"w", {DataType::kUint8}, "(E, K / 64, N / 16, 16, 32) E2M1 in fractals"},
                              {"w_scale", {DataType::kUint8}, "(E, N, K / 64, 2)"},
                              {"counts", {DataType::kInt32}, "(E, 2): rows of each expert, low and high word"}},
                             {},
                             {{"y", "(M, N) bfloat16"}},
                             false,
                             Infer,
                             Enqueue};
  return target;
}

}  // namespace deepinfer::custom_calls
