#include "mx.h"

namespace deepinfer::custom_calls {

Dims MxScaleDims(const Dims& dims) {
  Dims scales(dims.size() + 1, 2);
  for (size_t i = 0; i < dims.size(); ++i) scales[i] = dims[i];
  scales[dims.size() - 1] /= kMxPair;
  return scales;
}

void NeedScales(const Request& request, size_t scale, size_t of) {
  const Dims wanted = MxScaleDims(request.in(of).dims);
  request.NeedRank(scale, static_cast<int64_t>(wanted.size()));
  for (size_t i = 0; i < wanted.size(); ++i) {
    request.NeedDim(scale, static_cast<int64_t>(i), wanted[i], "one scale for 32 channels, in pairs");
  }
}

}  // namespace deepinfer::custom_calls
