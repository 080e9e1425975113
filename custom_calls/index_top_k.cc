// The best keys of each row by index score, from FP4 queries and keys.
#include "mx.h"

namespace deepinfer::custom_calls {
namespace {

enum { kQ, kQScale, kWeights, kKeys, kKeyScale, kKeyLen };

constexpr int64_t kHeadDim = 128;
constexpr int64_t kMaxHeads = 64;
constexpr int64_t kMaxTopK = 8192;
constexpr int64_t kMxfp4 = 5;
constexpr int64_t kMetadataWords = 1024;
constexpr const char* kLayout = "BSND";

// Packed rows (B, N, 64) with scales (B, N, 2, 2).
void NeedPacked(const Request& request, size_t codes, size_t scale) {
  request.NeedRank(codes, 3);
  request.NeedDim(codes, 2, kHeadDim / 2, "the bytes of 128 channels");
  request.NeedRank(scale, 4);
  for (int64_t i = 0; i < 2; ++i) request.NeedDim(scale, i, request.in(codes).dims[i], "as its codes");
  for (int64_t i = 2; i < 4; ++i) request.NeedDim(scale, i, 2, "one scale for 32 channels, in pairs");
}

std::vector<Tensor> Infer(const Request& request) {
  NeedPacked(request, kQ, kQScale);
  const int64_t rows = request.in(kQ).dims[0], heads = request.in(kQ).dims[1];
  if (heads < 1 || heads > kMaxHeads) request.NeedDim(kQ, 1, kMaxHeads, "or at least 1 and less");
  request.NeedRank(kWeights, 2);
  request.NeedDim(kWeights, 0, rows, "the rows of q");
  request.NeedDim(kWeights, 1, heads, "the heads of q");
  NeedPacked(request, kKeys, kKeyScale);
  request.NeedDim(kKeys, 0, rows, "the rows of q");
  request.NeedMultiple(kKeys, 1, 1);
  request.NeedRank(kKeyLen, 1);
  request.NeedDim(kKeyLen, 0, rows, "the rows of q");
  const int64_t k = request.i64("k");
  if (k < 1 || k > kMaxTopK) {
    request.Refuse("attribute k is " + std::to_string(k) + "; it must be 1 to 8192");
  }
  return {ResultOf(DataType::kInt32, {rows, k}), ResultOf(DataType::kBf16, {rows, k})};
}

// The metadata operator takes empty tensors for what is absent; the main one takes null.
void EnqueueMetadata(const Request& request, Call& call, const Tensor& metadata) {
  const Tensor empty = call.Temporary(DataType::kInt32, {0});
  const auto absent = [&] { return call.Describe(empty); };
  const Dims& q = request.in(kQ).dims;
  call.Run(ascend::kIndexerMetadata, absent(), absent(), absent(), call.Describe(request.in(kKeyLen)), absent(), q[1],
           1, kHeadDim, request.i64("k"), kMxfp4, q[0], 1, request.in(kKeys).dims[1], kLayout, kLayout, 0, 1,
           call.Describe(metadata));
}

void Enqueue(const Request& request, Call& call, const std::vector<Tensor>& results) {
  const Tensor metadata = call.Temporary(DataType::kInt32, {kMetadataWords});
  EnqueueMetadata(request, call, metadata);
  const int64_t rows = request.in(kQ).dims[0], heads = request.in(kQ).dims[1], keys = request.in(kKeys).dims[1];
  const Dims chosen = {rows, 1, 1, results[0].dims[1]};
  call.Run(ascend::kIndexer, call.Describe(request.in(kQ), DataType::kFloat4E2m1, {rows, 1, heads, kHeadDim}),
           call.Describe(request.in(kKeys), DataType::kFloat4E2m1, {rows, keys, 1, kHeadDim}),
           call.Describe(request.in(kWeights), DataType::kFloat, {rows, 1, heads}),
           call.Describe(request.in(kQScale), DataType::kFloat8E8m0, {rows, 1, heads, 2, 2}),
           call.Describe(request.in(kKeyScale), DataType::kFloat8E8m0, {rows, keys, 1, 2, 2}), nullptr, nullptr,
           nullptr, call.Describe(request.in(kKeyLen)), nullptr, nullptr, nullptr, call.Describe(metadata),
           request.i64("k"), kMxfp4, 1, kLayout, kLayout, 0, 1, 1, call.Describe(results[0], DataType::kInt32, chosen),
           call.Describe(results[1], DataType::kBf16, chosen));
}

}  // namespace

const Target& IndexTopKTarget() {
  static const Target target{"deepinfer.cann.index_top_k.v2",
                             "DeepinferIndexTopK",
                             "places of the k keys with the largest sum of weight * relu(q . key) over heads",
                             {"aclnnQuantLightningIndexerV2Metadata", "aclnnQuantLightningIndexerV2"},
                             {{"q", {DataType::kUint8}, "(B, I, 64) E2M1, I at most 64"},
                              {"q_scale", {DataType::kUint8}, "(B, I, 2, 2) E8M0"},
                              {"weights", {DataType::kFloat}, "(B, I)"},
                              {"keys", {DataType::kUint8}, "(B, N, 64) E2M1"},
                              {"key_scale", {DataType::kUint8}, "(B, N, 2, 2) E8M0"},
                              {"key_len", {DataType::kInt32}, "(B,): how many leading keys count"}},
                             {{"k", Attribute::kI64, "keys of a row"}},
                             {{"places", "(B, k) int32, -1 where there are no more"}, {"scores", "(B, k) bfloat16"}},
                             false,
                             Infer,
                             Enqueue};
  return target;
}

}  // namespace deepinfer::custom_calls
