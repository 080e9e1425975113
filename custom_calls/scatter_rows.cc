// Rows written at given places of a cache. Writes the cache in place; an index outside of it is a fault of the device.
#include "target.h"

namespace deepinfer::custom_calls {
namespace {

enum { kCache, kIndex, kRows };

std::vector<Tensor> Infer(const Request& request) {
  request.NeedRank(kCache, 2);
  request.NeedRank(kIndex, 1);
  request.NeedRank(kRows, 2);
  request.NeedSameType(kRows, kCache);
  request.NeedDim(kRows, 0, request.in(kIndex).dims[0], "one for each index");
  request.NeedDim(kRows, 1, request.in(kCache).dims[1], "the columns of cache");
  return {ResultOf(request.in(kCache).dtype, request.in(kCache).dims)};
}

void Enqueue(const Request& request, Call& call, const std::vector<Tensor>& results) {
  const Tensor& index = request.in(kIndex);
  if (index.dims[0] == 0) return;
  call.Run(ascend::kScatterNdUpdate, call.Describe(results[0]),
           call.Describe(index, DataType::kInt32, {index.dims[0], 1}), call.Describe(request.in(kRows)));
}

}  // namespace

const Target& ScatterRowsTarget() {
  static const std::vector<DataType> kinds = {DataType::kBf16, DataType::kFloat, DataType::kUint8};
  static const Target target{
      "deepinfer.cann.scatter_rows.v2",
      "DeepinferScatterRows",
      "cache with rows written at the indices, which are different and not negative",
      {"aclnnScatterNdUpdate"},
      {{"cache", kinds, "(P, D)"}, {"index", {DataType::kInt32}, "(T,)"}, {"rows", kinds, "(T, D)"}},
      {},
      {{"cache", "as cache"}},
      true,
      Infer,
      Enqueue};
  return target;
}

}  // namespace deepinfer::custom_calls
