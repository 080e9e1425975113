// One softmax of each row over its window and its selected keys, with a sink; a key is also its value.
#include "target.h"

namespace deepinfer::custom_calls {
namespace {

enum { kQ, kWindow, kWindowLen, kSinks, kSelected, kSelectedLen };

constexpr int64_t kHeadDim = 512;
constexpr int64_t kMaxHeads = 128;
constexpr int64_t kMetadataWords = 1024;
constexpr const char* kLayout = "BSND";

void NeedKeys(const Request& request, size_t keys, size_t length) {
  request.NeedRank(keys, 3);
  request.NeedSameType(keys, kQ);
  request.NeedDim(keys, 0, request.in(kQ).dims[0], "the rows of q");
  request.NeedMultiple(keys, 1, 1);
  request.NeedDim(keys, 2, kHeadDim, "the only head width of the operator");
  request.NeedRank(length, 1);
  request.NeedDim(length, 0, request.in(kQ).dims[0], "the rows of q");
}

std::vector<Tensor> Infer(const Request& request) {
  request.NeedRank(kQ, 3);
  const Dims& dims = request.in(kQ).dims;
  request.NeedDim(kQ, 2, kHeadDim, "the only head width of the operator");
  if (dims[1] < 1 || dims[1] > kMaxHeads) request.NeedDim(kQ, 1, kMaxHeads, "or at least 1 and less");
  NeedKeys(request, kWindow, kWindowLen);
  request.NeedRank(kSinks, 1);
  request.NeedDim(kSinks, 0, dims[1], "the heads of q");
  if (request.num_inputs() == kSelected + 1) {
    request.Refuse("selected was given without selected_len");
  }
  if (request.num_inputs() > kSelected) NeedKeys(request, kSelected, kSelectedLen);
  return {ResultOf(request.in(kQ).dtype, dims)};
}

// (B, N, 512) as one key head.
aclTensor* Keys(Call& call, const Tensor& keys) {
  return call.Describe(keys, keys.dtype, {keys.dims[0], keys.dims[1], 1, keys.dims[2]});
}

// The metadata operator takes empty tensors for what is absent; the main one takes null.
void EnqueueMetadata(const Request& request, Call& call, const Tensor& metadata, bool has_selected) {
  const Tensor empty = call.Temporary(DataType::kInt32, {0});
  const auto absent = [&] { return call.Describe(empty); };
  const Dims& q = request.in(kQ).dims;
  const int64_t num_selected = has_selected ? request.in(kSelected).dims[1] : 0;
  call.Run(ascend::kSparseMlaMetadata, absent(), absent(), absent(), absent(), call.Describe(request.in(kWindowLen)),
           has_selected ? call.Describe(request.in(kSelectedLen)) : absent(), absent(), absent(), absent(), q[1], 1,
           kHeadDim, q[0], 1, request.in(kWindow).dims[1], num_selected, 0, 0, 1, 0, 0, -1, -1, kLayout, kLayout, true,
           has_selected, call.Describe(metadata));
}

void Enqueue(const Request& request, Call& call, const std::vector<Tensor>& results) {
  const bool has_selected = request.num_inputs() > kSelected;
  const Tensor metadata = call.Temporary(DataType::kInt32, {kMetadataWords});
  EnqueueMetadata(request, call, metadata, has_selected);
  const Dims& dims = request.in(kQ).dims;
  const Dims rows = {dims[0], 1, dims[1], dims[2]};
  aclTensor* selected = has_selected ? Keys(call, request.in(kSelected)) : nullptr;
  aclTensor* selected_len = has_selected ? call.Describe(request.in(kSelectedLen)) : nullptr;
  call.Run(ascend::kSparseMla, call.Describe(request.in(kQ), request.in(kQ).dtype, rows),
           Keys(call, request.in(kWindow)), selected, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr,
           nullptr, call.Describe(request.in(kWindowLen)), selected_len, nullptr, nullptr, nullptr,
           call.Describe(request.in(kSinks)), call.Describe(metadata), request.f64("scale"), 1, 0, 0, -1, -1, kLayout,
           kLayout, 1, false, call.Describe(results[0], results[0].dtype, rows), nullptr);
}

}  // namespace

const Target& AttentionTarget() {
  static const Target target{"deepinfer.cann.attention.v2",
                             "DeepinferAttention",
                             "softmax over window and selected keys, the sink in the denominator only",
                             {"aclnnSparseFlashMlaMetadata", "aclnnSparseFlashMla"},
                             {{"q", {DataType::kBf16}, "(B, H, 512), H at most 128"},
                              {"window", {DataType::kBf16}, "(B, W, 512)"},
                              {"window_len", {DataType::kInt32}, "(B,): how many leading keys count"},
                              {"sinks", {DataType::kFloat}, "(H,)"},
                              {"selected", {DataType::kBf16}, "(B, N, 512)", true},
                              {"selected_len", {DataType::kInt32}, "(B,)", true}},
                             {{"scale", Attribute::kF64, "factor of the scores"}},
                             {{"y", "as q"}},
                             false,
                             Infer,
                             Enqueue};
  return target;
}

}  // namespace deepinfer::custom_calls
